"""How long the command takes to start: its help, and the first token of an answer.

    python benchmarks/start.py [MODEL] --output benchmarks/results/start.json

Wall time of whole processes with everything in the caches of the system and of the kernels: one run of each comes first and
does not count. `nanovllm --help` to its end; `nanovllm run MODEL PROMPT -n 1` to the first byte on its standard output, and
to its end. Reported: the median and the fastest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from common import save


class Times(NamedTuple):
    """Seconds from the start of the process."""

    first_byte: float
    end: float


def command() -> list[str]:
    """The installed script, else the module."""
    script = Path(sys.executable).with_name("nanovllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "nanovllm_cli"]


def run(words: list[str], home: str) -> Times:
    """Settings and history of whoever measures play no part; the kernels' cache does."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NANOVLLM")}
    environment |= {"HOME": home, "XDG_CACHE_HOME": cache, "XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command(), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    first = time.perf_counter() - begin
    process.stdout.read()
    complaint = process.stderr.read().decode()
    if process.wait():
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{complaint}")
    return Times(first, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--prompt", default="hi")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model = str(Path(options.model).resolve()) if Path(options.model).exists() else options.model
    answer = ["run", "--no-save", "--raw", "-t", str(options.threads), "-n", "1", "--ignore-eos", model, options.prompt]
    with tempfile.TemporaryDirectory() as home:
        for words in (["--help"], answer):
            run(words, home)
        helps = [run(["--help"], home).end for _ in range(options.rounds)]
        answers = [run(answer, home) for _ in range(options.rounds)]
    seconds = {
        "nanovllm --help": helps,
        "first byte of an answer": [times.first_byte for times in answers],
        "end of the answer": [times.end for times in answers],
    }
    print(f"| {options.model}, {options.threads} threads | median s | fastest s |\n|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} |")
    save(options.output, {"model": options.model, "threads": options.threads, "seconds": seconds})


if __name__ == "__main__":
    main()
