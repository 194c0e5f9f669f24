"""What adapters cost that requests choose: tokens a second without any, where there are some and nobody takes one, where all take
the same, and where each takes another.

    python benchmarks/adapters.py --rank 16 --count 8 --output benchmarks/results/adapters.json

Random weights of a model's shape, rounded to --quant while they load, and random adapters of all matrices in the blocks. Prefill
of 512 tokens, and decoding of 1, 8 and 16 sequences after prompts of 32 tokens, by the whole engine. Settings take turns in one
run; the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, medians, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.llm import LLM
from nanovllm_cli.sampling_params import SamplingParams
from shapes import write_adapter, write_converted

PREFILL, PROMPT, STEPS, BATCHES = 512, 32, 32, (1, 8, 16)


def rates(llm: LLM, names: list[str]) -> dict[str, float]:
    """Tokens a second; each sequence takes one of `names` in turn, or none where there are none."""

    def params(index: int, count: int) -> SamplingParams:
        chosen = names[index % len(names)] if names else ()
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, lora=chosen)

    def prefill() -> float:
        begin = time.perf_counter()
        llm.generate(made_up(PREFILL, 99, llm.spec.vocab_size), params(0, 1))
        return PREFILL / (time.perf_counter() - begin)

    def decode(batch: int) -> float:
        engine = llm.engine
        before = engine.stats().generated_tokens
        for i in range(batch):
            engine.add(f"{i}", made_up(PROMPT, i, llm.spec.vocab_size), params(i, STEPS + 1))
        while engine.stats().generated_tokens - before < batch:
            engine.step()
        first, begin = engine.stats().generated_tokens, time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        return (engine.stats().generated_tokens - first) / (time.perf_counter() - begin)

    prefill()
    return {"prefill": max(prefill() for _ in range(2))} | {f"decode {batch}": decode(batch) for batch in BATCHES for _ in "xx"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="the shape's first so many alone")
    parser.add_argument("--quant", help="what the weights are rounded to")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_converted(Path(folder) / "random.gguf", options.shape, options.layers)
        adapter = str(write_adapter(Path(folder) / "adapter.gguf", path, options.rank))
        modules = {f"adapter-{i}": adapter for i in range(options.count)}
        config = EngineConfig(
            quant=options.quant, max_model_len=1024, num_blocks=1024, max_num_seqs=max(BATCHES),
            max_num_batched_tokens=PREFILL, enable_prefix_caching=False,
        )  # fmt: skip
        plain, able = LLM(path, config=config), LLM(path, config=replace(config, lora_modules=modules))
        settings = {
            "no adapters": (plain, []), f"{options.count}, none taken": (able, []),
            "all take the same": (able, ["adapter-0"]), "each takes another": (able, list(modules)),
        }  # fmt: skip
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
        for _ in range(options.rounds):
            for name, (llm, names) in settings.items():
                rounds[name].append(rates(llm, names))
                print(f"{name}: {rounds[name][-1]}", file=sys.stderr)
    found = medians(rounds)
    keys = list(found["no adapters"])
    print(f"| {options.shape}, {options.quant or 'bf16'}, rank {options.rank} | {' | '.join(keys)} |")
    print("|---" * (len(keys) + 1) + "|")
    for name, own in found.items():
        print(f"| {name} | {' | '.join(f'{own[key]:.1f}' for key in keys)} |")
    facts = {name: getattr(options, name) for name in ("shape", "layers", "quant", "rank", "count")}
    save(options.output, facts | {"rounds": rounds})


if __name__ == "__main__":
    main()
