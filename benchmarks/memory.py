"""Peak memory of loading a GGUF and answering, against what the weights and the used part of the KV cache need.

    python benchmarks/memory.py --output benchmarks/results/memory.json

A process of its own loads random bf16 weights and generates 64 tokens after a prompt of 32, with a KV cache of 512 MiB. The
system says how much was resident at most (VmHWM), by stage; a thread looks every few milliseconds at how much of that was the
process's own (anonymous) and how much pages of files (libraries, the checkpoint). An earlier process, which does not count,
leaves the compiled kernels in their cache. The bar: 1.2 times (weights + the blocks of the KV cache that were written).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, said_by, save

MIB = 1 << 20
PROMPT, ANSWER = 32, 64
BAR = 1.2
SAMPLE_SECONDS = 0.004
FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssShmem": "anonymous", "RssFile": "files"}


def status() -> dict[str, int]:
    """Bytes by FIELDS' names, now. Memory that is shared but of no file counts as anonymous."""
    found = dict.fromkeys(FIELDS.values(), 0)
    for line in Path("/proc/self/status").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in FIELDS:
            found[FIELDS[field]] += int(value.split()[0]) * 1024
    return found


class Watch:
    """Peaks by stage. The system's own peak is reset as a stage begins, so `whole` is the largest of all stages."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes what is resident now
        highest: dict[str, int] = {}
        over = threading.Event()

        def look() -> None:
            while not over.wait(SAMPLE_SECONDS):
                for field, value in status().items():
                    highest[field] = max(value, highest.get(field, 0))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            over.set()
            thread.join()
            end = status()
            peaks = {
                "peak": end["peak"],
                "peak anonymous": max(end["anonymous"], highest.get("anonymous", 0)),
                "peak files": max(end["files"], highest.get("files", 0)),
                "resident after": end["resident"],
                "anonymous after": end["anonymous"],
            }
            self.stages[name] = peaks | {"milliseconds": round(seconds * 1000)}


def measure(path: str, threads: int, kv_bytes: int) -> dict[str, Any]:
    watch = Watch()
    start = status()["resident"]
    with watch.stage("imports"):
        from nanovllm_cli import EngineConfig, SamplingParams
        from nanovllm_cli.llm import LLM
    with watch.stage("load"):
        config = EngineConfig(threads=threads, kv_cache_bytes=kv_bytes, max_num_seqs=1)
        llm = LLM(path, config=config)
    with watch.stage("answer"):
        prompt = made_up(PROMPT, 0, llm.spec.vocab_size)
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == ANSWER
    blocks = -(-(PROMPT + ANSWER) // config.block_size)
    used = blocks * llm._worker.block_bytes
    whole = max(stage["peak"] for stage in watch.stages.values())
    return {
        "interpreter": start,
        "stages": watch.stages,
        "file": Path(path).stat().st_size,
        "weights": llm.weight_bytes,
        "kv cache": llm.kv_bytes,
        "kv used": used,
        "peak": whole,
        "bar": BAR * (llm.weight_bytes + used),
    }


def report(found: dict[str, Any], title: str) -> None:
    def mib(value: float) -> str:
        return f"{value / MIB:,.0f}"

    columns = ("peak", "peak anonymous", "peak files", "resident after", "anonymous after")
    print(f"| {title}: MiB | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, stage in found["stages"].items():
        print(f"| {name} | {' | '.join(mib(stage[column]) for column in columns)} |")
    need = found["weights"] + found["kv used"]
    print(
        f"\nfile {mib(found['file'])}, weights {mib(found['weights'])}, KV cache {mib(found['kv cache'])} of which "
        f"{mib(found['kv used'])} used; interpreter alone {mib(found['interpreter'])}"
    )
    above = found["peak"] - found["stages"]["imports"]["resident after"]
    verdict = "within" if found["peak"] <= found["bar"] else "OVER"
    print(
        f"peak {mib(found['peak'])} MiB = {found['peak'] / need:.3f} of weights and used KV; {verdict} the bar of {BAR}"
    )
    print(f"above what the imports take: {mib(above)} MiB = {above / need:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--file", type=Path, help="keep the weights here and use them again")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(str(options.file), options.threads, options.kv_mib * MIB)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "random.gguf"
        if not path.exists():
            from shapes import write_gguf

            write_gguf(path, options.shape)
        words = ("--file", path, "--threads", options.threads, "--kv-mib", options.kv_mib)
        for _ in range(2):
            found = said_by(__file__, "--measure", *words)
    report(found, f"{options.shape}, {options.threads} threads")
    save(options.output, {"shape": options.shape} | found)


if __name__ == "__main__":
    main()
