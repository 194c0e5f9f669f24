"""What guessing ahead by looking up gives and costs: decoding with `num_speculative_tokens` against decoding without.

    python benchmarks/speculation.py --model random.gguf --output benchmarks/results/speculation.json

The weights may be random (`benchmarks/shapes.py --tokenizer` makes them): after each forward one logit is raised, that of the
next token of a text, as if a model had learned to write it. So the texts are real, and how often a guess holds is what it would
be for a model that writes them, while every step is computed whole. Settings take turns in one run; decoding only, without
prompts. "edited": a source file with two names changed throughout and a word behind every ninth line, after the file itself.
"records": JSON with the same keys again and again. "prose": this project's architecture after its README. "unlike": tokens at
random, of which no guess holds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common import save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.llm import LLM
from nanovllm_cli.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PROMPT, ANSWER = 900, 200
GUESSES = (0, 8)
BATCHES = (1, 4)


def texts(llm: LLM) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of each kind, in tokens."""
    source = (ROOT / "src/nanovllm_cli/engine/sequence.py").read_text()
    lines = source.replace("num_computed", "computed_len").replace("Request", "Question").splitlines()
    edited = "\n".join(line + "  # checked" if i % 9 == 8 else line for i, line in enumerate(lines))
    rng = random.Random(0)
    names, cities = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald"), ("Rome", "Oslo", "Lima")
    people = [{"name": rng.choice(names), "age": rng.randrange(90), "city": rng.choice(cities)} for _ in range(60)]
    written = {
        "edited": (source, edited),
        "records": ("Sixty people as JSON, please.", json.dumps(people, indent=1)),
        "prose": ((ROOT / "README.md").read_text(), (ROOT / "docs/architecture.md").read_text()),
    }
    encoded = {name: tuple(llm.tokenizer.encode(text) for text in pair) for name, pair in written.items()}
    made = [rng.randrange(llm.spec.vocab_size) for _ in range(ANSWER)]
    encoded["unlike"] = (encoded["prose"][0], made)
    return {name: (prompt[:PROMPT], answer[:ANSWER]) for name, (prompt, answer) in encoded.items()}


def follow(llm: LLM, answers: dict[int, list[int]]) -> None:
    """From now on each sequence draws its answer. answers: by seed."""
    sampler = llm._worker.runner.sampler
    draw = type(sampler).sample

    def sample(seq_ids: Any, logits: torch.Tensor, rows: Any = None) -> Any:
        rows = range(len(seq_ids)) if rows is None else rows
        for seq_id, row in zip(seq_ids, rows, strict=True):
            state = sampler._states[seq_id]
            if state.position < len(answers[state.seed]):
                logits[row, answers[state.seed][state.position]] = 1e4
        return draw(sampler, seq_ids, logits, rows)

    sampler.sample = sample  # type: ignore[method-assign]


def decode(engine: Engine, prompt: list[int], batch: int, seeds: range) -> tuple[float, int, int, int]:
    """Seconds from the last prompt's first token on; tokens, guesses, guesses that held."""
    for seed in seeds[:batch]:
        engine.add(str(seed), prompt, SamplingParams(temperature=0.0, seed=seed, max_tokens=ANSWER, ignore_eos=True))
    begun: set[str] = set()
    counted = guessed = held = 0
    began = 0.0
    while engine.has_unfinished():
        for output in engine.step():
            new = len(output.outputs[0].delta_ids)
            if len(begun) == batch:
                counted += new
            elif new:
                begun.add(output.request_id)
                if len(begun) == batch:
                    began = time.perf_counter()
            if output.finished:
                guessed += output.metrics.num_guessed_tokens
                held += output.metrics.num_held_tokens
    return time.perf_counter() - began, counted, guessed, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--quant", help="as `nanovllm run --quant`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    config = EngineConfig(device="cpu", quant=options.quant, threads=options.threads, max_model_len=2048, max_num_seqs=16)
    llm = LLM(options.model, config=config)
    written = texts(llm)
    found: dict[str, dict[str, Any]] = {}
    for name, (prompt, answer) in written.items():
        follow(llm, dict.fromkeys(range(16), answer))
        for batch in BATCHES:
            rates: dict[int, list[float]] = {count: [] for count in GUESSES}
            shares: dict[int, float] = {}
            for _ in range(options.rounds):
                for count in GUESSES:
                    engine = again(llm, config, count)
                    seconds, tokens, guessed, held = decode(engine, prompt, batch, range(16))
                    rates[count].append(tokens / seconds)
                    shares[count] = held / guessed if guessed else 0.0
            plain = statistics.median(rates[0])
            found[f"{name}, {batch}"] = {"tokens_per_second": round(plain, 1)} | {
                f"guesses_{count}": {"ratio": round(statistics.median(rates[count]) / plain, 3), "held": round(shares[count], 3)}
                for count in GUESSES[1:]
            }
            print(f"{name}, {batch}", json.dumps(found[f"{name}, {batch}"]), flush=True)
    save(options.output, {"model": options.model.name, "quant": options.quant, "decoding": found})


def again(llm: LLM, config: EngineConfig, count: int) -> Engine:
    """An engine on the same weights and cache that guesses so many tokens, and remembers nothing."""
    return Engine(
        llm._worker, replace(config, num_speculative_tokens=count), vocab_size=llm.spec.vocab_size,
        max_model_len=llm._worker.max_model_len, num_blocks=llm._worker.num_blocks,
    )  # fmt: skip


if __name__ == "__main__":
    main()
