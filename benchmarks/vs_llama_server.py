"""Streams through HTTP against llama.cpp's own server, on the same GGUF file, one after the other on the same machine.

    python benchmarks/vs_llama_server.py --llama-server PATH --file model.gguf --output benchmarks/results/vs_llama_server.json

Each round starts neither anew: both servers run all the time, and take turns. TTFT is what the client sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from serve_load import Answer, Server, body, percentile, stream, wait_ready


def llama_server(program: Path, file: Path, port: int, streams: int, context: int, threads: int) -> subprocess.Popen[bytes]:
    options = {"-m": file, "--port": port, "-np": streams, "-c": streams * context, "-t": threads, "-tb": threads}
    words = [str(word) for pair in options.items() for word in pair]
    return subprocess.Popen([str(program), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def turn(port: int, model: str, streams: int, tokens: int, seed: int) -> tuple[float, list[Answer]]:
    requests = [body(seed + i, tokens, model=model, cache_prompt=False) for i in range(streams)]
    began = time.monotonic()
    answers = await asyncio.gather(*[stream(port, data) for data in requests])
    return time.monotonic() - began, answers


async def measure(ports: dict[str, int], model: str, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in ports}
    waits: dict[str, list[float]] = {name: [] for name in ports}
    for port in ports.values():
        await wait_ready(port)
        await turn(port, model, 2, 8, 0)
    for number in range(rounds):
        for name, port in ports.items():
            seconds, answers = await turn(port, model, streams, tokens, 1000 * (number + 1))
            if not all(answer.status == 200 and answer.ended for answer in answers):
                raise SystemExit(f"{name} did not answer all: {[answer.status for answer in answers]}")
            if min(answer.frames for answer in answers) < tokens // 2:
                raise SystemExit(f"{name} did not write as much as it was asked for")
            speeds[name].append(streams * tokens / seconds)
            waits[name] += [answer.first or 0.0 for answer in answers]
    return {
        name: {
            "tokens_per_second": [round(speed, 1) for speed in speeds[name]],
            "ttft_ms": {
                "p50": round(1e3 * statistics.median(waits[name]), 1),
                "p95": round(1e3 * percentile(waits[name], 0.95), 1),
            },
        }
        for name in ports
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    threads = psutil.cpu_count(logical=False) or 1
    peer_port = 18999
    peer = llama_server(options.llama_server, options.file, peer_port, options.streams, options.context, threads)
    ours = Server(str(options.file), "--alias", "model", "-np", str(options.streams), "-c", str(options.context))
    try:
        ports = {"nanovllm": ours.port, "llama-server": peer_port}
        found = asyncio.run(measure(ports, "model", options.streams, options.tokens, options.rounds))
    finally:
        peer.terminate()
        ours.close()
    medians = {name: statistics.median(each["tokens_per_second"]) for name, each in found.items()}
    results = {
        "file": options.file.name, "streams": options.streams, "tokens": options.tokens, "threads": threads,
        "date": time.strftime("%Y-%m-%d"), **found, "ratio": round(medians["nanovllm"] / medians["llama-server"], 2),
    }  # fmt: skip
    print(json.dumps(results, indent=2))
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps(known | {options.file.name: results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
