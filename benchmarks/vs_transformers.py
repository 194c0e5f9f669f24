"""nanovllm against transformers on the CPU: one folder of random bf16 weights, one machine, one run, sides taking turns.

    pip install transformers
    python benchmarks/vs_transformers.py --threads 2 --output benchmarks/results/vs_transformers.json

Each side runs in a process of its own and measures two workloads, both greedy, past any end, from prompts of token ids:

    decode 1    48 steps of one sequence after a prompt of 32 tokens
    mixed 32    32 requests at once, prompts of 16 to 256 tokens, answers of 16 to 64: answer tokens a second, prefill included

Ours is the whole engine with text at its end. transformers' is model.generate with its default attention; it takes the mixed
requests in the order in which they come, left-padded, in batches of 8 and all in one, and the better of the two counts. What a
batch draws behind the end of a request's answer counts for neither. Reported: the median over rounds, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, medians, save
from shapes import SHAPES

PROMPT, STEPS = 32, 48
REQUESTS, BATCHES = 32, (8, 32)
PROMPTS, ANSWERS = (16, 256), (16, 64)
CONTEXT = 40960


class Request(NamedTuple):
    prompt: list[int]
    answer_len: int


def mixed(vocab: int) -> list[Request]:
    """Lengths spread evenly over the logarithm of their range, short and long ones in turn; the two are unrelated."""

    def length(low: int, high: int, place: int) -> int:
        return round(low * (high / low) ** (place / (REQUESTS - 1)))

    return [
        Request(made_up(length(*PROMPTS, 13 * i % REQUESTS), i, vocab), length(*ANSWERS, 5 * i % REQUESTS))
        for i in range(REQUESTS)
    ]


def rate(tokens: int, work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - begin)


def measure_ours(folder: str, threads: int) -> dict[str, float]:
    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    room = REQUESTS * -(-(PROMPTS[1] + ANSWERS[1]) // 16)
    config = EngineConfig(
        threads=threads, max_model_len=512, num_blocks=room, max_num_seqs=REQUESTS, enable_prefix_caching=False
    )
    llm = LLM(folder, config=config)

    def params(n: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)

    def decode() -> float:
        """Over the steps after the one that ended the prompt."""
        steps = llm.stream(made_up(PROMPT, 0, llm.spec.vocab_size), params(STEPS + 1))
        while not next(steps).outputs[0].token_ids:
            pass
        return rate(STEPS, lambda: list(steps))

    requests = mixed(llm.spec.vocab_size)
    prompts, wanted = [r.prompt for r in requests], [params(r.answer_len) for r in requests]
    decode()
    llm.generate(prompts[:4], params(2))
    return {
        "decode 1": decode(),
        f"mixed {REQUESTS}": rate(sum(r.answer_len for r in requests), lambda: llm.generate(prompts, wanted)),
    }


def measure_transformers(folder: str, threads: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    vocab = model.config.vocab_size

    def generate(prompts: list[list[int]], count: int, after_step: Callable[[], None] = lambda: None) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

        def step(*_: Any, **__: Any) -> torch.Tensor:
            after_step()
            return torch.zeros(len(prompts), dtype=torch.bool)

        out = model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[step],
        )
        assert out.shape == (len(prompts), width + count)

    def decode() -> float:
        times: list[float] = []
        generate([made_up(PROMPT, 0, vocab)], STEPS + 1, lambda: times.append(time.perf_counter()))
        return STEPS / (times[-1] - times[0])

    def in_batches(requests: list[Request], size: int) -> None:
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            generate([r.prompt for r in batch], max(r.answer_len for r in batch))

    with torch.inference_mode():
        requests = mixed(vocab)
        total = sum(r.answer_len for r in requests)
        decode()
        generate([r.prompt for r in requests[:4]], 2)
        rates = {f"in batches of {n}": rate(total, lambda n=n: in_batches(requests, n)) for n in BATCHES}  # type: ignore[misc]
        return {"decode 1": decode(), f"mixed {REQUESTS}": max(rates.values())} | rates


SIDES = {"nanovllm": measure_ours, "transformers": measure_transformers}


def write_model(folder: Path, shape_name: str) -> None:
    """A Qwen3 model by transformers' own initialisation (normal, 0.02), with a tied head and a tokenizer of three words."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[shape_name]
    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["dim"],
        max_position_embeddings=CONTEXT,
        rope_theta=1e6,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({"t": 0, "1": 1, "t1": 2}, [("t", "1")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the weights here and use them again")
    parser.add_argument("--side", choices=[*SIDES, "write"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "write":
        write_model(options.folder, options.shape)
    elif options.side:
        print(json.dumps(SIDES[options.side](str(options.folder), options.threads)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            compare(options, options.folder or Path(scratch) / "model")


def run_side(side: str, options: argparse.Namespace, folder: Path) -> str:
    """What a side prints, in a process of its own."""
    given = {"--side": side, "--shape": options.shape, "--folder": folder, "--threads": options.threads}
    words = [str(word) for pair in given.items() for word in pair]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}")
    return done.stdout


def compare(
    options: argparse.Namespace, folder: Path, peer: str = "transformers", measure_peer: Callable[[], str] | None = None
) -> None:
    """Rounds in turns; the table to stdout, everything to options.output. measure_peer: prints the peer's rates as JSON, where it
    is not a side of this file."""
    if not (folder / "tokenizer.json").exists():
        run_side("write", options, folder)
    rounds: dict[str, list[dict[str, float]]] = {"nanovllm": [], peer: []}
    for number in range(options.rounds):
        for side, runs in rounds.items():
            printed = measure_peer() if side == peer and measure_peer else run_side(side, options, folder)
            runs.append(json.loads(printed.splitlines()[-1]))
            print(f"round {number + 1}, {side}: {runs[-1]}", file=sys.stderr)
    found = medians(rounds)
    ratios = {k: ours / found[peer][k] for k, ours in found["nanovllm"].items()}
    title = f"{options.shape}, bf16, {options.threads} threads"
    print(f"| {title} | nanovllm tok/s | {peer} tok/s | ratio |\n|---|---|---|---|")
    for k, ratio in ratios.items():
        print(f"| {k} | {found['nanovllm'][k]:.1f} | {found[peer][k]:.1f} | {ratio:.2f} |")
    settings = {"shape": options.shape, "threads": options.threads}
    save(options.output, settings | {"rounds": rounds, "medians": found, "ratios": ratios})


if __name__ == "__main__":
    main()
