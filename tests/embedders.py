"""Helpers of the tests of embedding models: tiny random ones as they are published, without a head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engines import SMALL, random_model
from nanovllm_cli.weights.source import resolve

TINY = resolve("tiny").path
END = 4087
"""<|endoftext|>, which the tokenizer puts behind a text, as Qwen3-Embedding's does: not its EOS, which is <|im_end|>."""
SIZES = SMALL | {"vocab_size": 4100, "num_hidden_layers": 2, "eos_token_id": 4089, "bos_token_id": 4087}
MODES = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def body(config: Any, folder: Path) -> Any:
    """transformers' own model without a head, saved as it saves it."""
    from transformers import AutoModel

    model = random_model(config, auto=AutoModel)
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """The bundled model's, which ends a text now."""
    shutil.copy(TINY / "tokenizer_config.json", folder)
    state = json.loads((TINY / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "type_id": 0}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": end}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}, {"SpecialToken": end}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [END], "tokens": ["<|endoftext|>"]}},
    }
    write_json(folder / "tokenizer.json", state)


def write_modules(folder: Path, *kinds: str, package: str = "sentence_transformers.models") -> None:
    named = [("", "Transformer"), *((f"{i}_{kind}", kind) for i, kind in enumerate(kinds, 1))]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"} for i, (path, kind) in enumerate(named)]
    write_json(folder / "modules.json", listed)


def write_pooling(folder: Path, pooling: str) -> None:
    """As sentence-transformers saves it."""
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    modes = {f"pooling_mode_{flag}": flag == MODES[pooling] for flag in flags}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 48} | modes | {"include_prompt": True})
    write_modules(folder, "Pooling", "Normalize")
