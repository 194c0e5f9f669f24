"""How fast texts become vectors on the CPU: nanovllm, llama.cpp and transformers on the same random weights, sides taking turns.

    pip install llama-cpp-python transformers
    python benchmarks/embeddings.py --output benchmarks/results/embeddings.json

A BERT of bge-small's or bge-base's shape (--shape). Kinds: float32; 16 bits, where ours and transformers compute in bfloat16 and
llama.cpp has its F16 file; q8_0, one file for ours and llama.cpp. Each side gets token ids, in a process of its own: 64 texts
of 32 tokens, 32 of 128, 8 of 512, and one of 32 alone. llama.cpp gets as many texts at once as are 512 or 2,048 tokens, whichever
is faster; transformers all of a length, which need no padding. Reported: the median over rounds of tokens a second, and ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, medians, said_by, save

SHAPES = {"bge-small": (384, 12, 12, 1536), "bge-base": (768, 12, 12, 3072)}
VOCABULARY = 30522
WORK = {"64 x 32": (64, 32), "32 x 128": (32, 128), "8 x 512": (8, 512), "1 x 32": (1, 32)}
KINDS = ("float32", "16 bits", "q8_0")
REPEATS = 3


def texts(count: int, length: int) -> list[list[int]]:
    return [[200 + token for token in made_up(length, salt, VOCABULARY - 200)] for salt in range(count)]


def fastest(run: Callable[[list[list[int]]], Any]) -> dict[str, float]:
    """Tokens a second of each work."""
    found = {}
    for name, (count, length) in WORK.items():
        ids = texts(count, length)
        run(ids)
        seconds = []
        for _ in range(REPEATS if count > 1 else 10 * REPEATS):
            begin = time.perf_counter()
            run(ids)
            seconds.append(time.perf_counter() - begin)
        found[name] = count * length / min(seconds)
    return found


def measure_ours(folder: Path, kind: str, threads: int) -> dict[str, float]:
    from nanovllm_cli import LLM, EngineConfig

    dtype: Any = "float32" if kind == "float32" else "bfloat16"
    path = folder / "q8_0.gguf" if kind == "q8_0" else folder
    llm = LLM(path, config=EngineConfig(threads=threads, num_blocks=1024, dtype=dtype))
    return fastest(lambda ids: llm.embed(ids, "mean"))


def measure_transformers(folder: Path, kind: str, threads: int) -> dict[str, float]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32 if kind == "float32" else torch.bfloat16)

    def run(ids: list[list[int]]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor(ids)).last_hidden_state.mean(1).tolist()

    return fastest(run)


def measure_llama_cpp(folder: Path, kind: str, threads: int) -> dict[str, float]:
    import ctypes

    import llama_cpp as lib

    lib.llama_log_set(ctypes.cast(None, lib.llama_log_callback), None)
    lib.llama_backend_init()
    file = folder / {"float32": "f32.gguf", "16 bits": "f16.gguf", "q8_0": "q8_0.gguf"}[kind]
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    width = lib.llama_model_n_embd(model)

    def embedder(most: int) -> Callable[[list[list[int]]], Any]:
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 64 * 512, most, most, 64
        options.n_threads = options.n_threads_batch = threads
        options.embeddings, options.pooling_type = True, lib.LLAMA_POOLING_TYPE_MEAN
        context = lib.llama_init_from_model(model, options)

        def some(ids: list[list[int]]) -> list[list[float]]:
            tokens = [(token, place, number) for number, text in enumerate(ids) for place, token in enumerate(text)]
            batch = lib.llama_batch_init(len(tokens), 0, 1)
            batch.n_tokens = len(tokens)
            for i, (token, place, number) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, True
                batch.seq_id[i][0] = number
            assert lib.llama_encode(context, batch) == 0
            lib.llama_batch_free(batch)
            return [list(lib.llama_get_embeddings_seq(context, number)[:width]) for number in range(len(ids))]

        def run(ids: list[list[int]]) -> list[list[float]]:
            together = max(1, most // len(ids[0]))
            return [vector for first in range(0, len(ids), together) for vector in some(ids[first : first + together])]

        return run

    each = [fastest(embedder(most)) for most in (512, 2048)]
    return {name: max(found[name] for found in each) for name in WORK}


SIDES = {"nanovllm": measure_ours, "llama.cpp": measure_llama_cpp, "transformers": measure_transformers}


def make(folder: Path, shape: str) -> None:
    """The folder and its GGUF files."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    from nanovllm_cli.weights import convert

    hidden, layers, heads, inner = SHAPES[shape]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    BertTokenizer(vocab={name: i for i, name in enumerate(names)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )
    BertModel(config).save_pretrained(folder)
    for kind in ("f32", "f16", "q8_0"):
        with convert.open_source(folder) as source:
            convert.write(source, convert.plan(source, "gguf", kind), folder / f"{kind}.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="bge-small")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without", nargs="*", default=[], choices=SIDES)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, kind, path = options.side
        print(json.dumps(SIDES[side](Path(path), kind, options.threads)))
        return
    report: dict[str, Any] = {"shape": options.shape, "threads": options.threads, "rounds": {}, "ratios": {}}
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary), options.shape)
        for kind in KINDS:
            sides = [side for side in SIDES if side not in options.without and (kind != "q8_0" or side != "transformers")]
            rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side in sides:
                    words = ("--side", side, kind, temporary, "--threads", options.threads)
                    rounds[side].append(said_by(__file__, *words))
            found = medians(rounds)
            report["rounds"][kind] = rounds
            report["ratios"][kind] = {
                side: {name: found["nanovllm"][name] / found[side][name] for name in WORK} for side in sides[1:]
            }
            print(f"| {options.shape}, {kind}, {options.threads} threads, tokens/s | {' | '.join(sides)} |")
            print("|---" * (1 + len(sides)) + "|")
            for name in WORK:
                own = found["nanovllm"][name]
                others = (f"{found[side][name]:,.0f} ({own / found[side][name]:.2f})" for side in sides[1:])
                print(f"| {name} | {own:,.0f} | {' | '.join(others)} |", flush=True)
    save(options.output, report)


if __name__ == "__main__":
    main()
