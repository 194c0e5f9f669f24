"""The bundled texts that `nanovllm quantize` calibrates with and measures on, out of the bundled model's own corpus.

    python scripts/bundled_texts.py

The two have no document in common: the corpus decides by a hash of a document's text which split it is in.
"""

from itertools import islice
from pathlib import Path

from tiny_corpus import END_OF_TEXT, documents

TEXTS = Path(__file__).resolve().parents[1] / "src" / "nanovllm_cli" / "assets" / "texts"
SPLITS = {"calibration": ("train", 240), "verification": ("held_out", 120)}
SEED = 4

if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for name, (split, count) in SPLITS.items():
        texts = [document.text.removesuffix(END_OF_TEXT) for document in islice(documents(split, seed=SEED), count)]
        (TEXTS / f"{name}.txt").write_text("\n\n".join(texts) + "\n")
