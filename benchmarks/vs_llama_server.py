"""Streams through HTTP against llama.cpp's own server, on the same GGUF file and machine, by the same client.

    python benchmarks/vs_llama_server.py --llama-server PATH --tokenizer FOLDER --type Q8_0 [--output FILE.json]
    python benchmarks/vs_llama_server.py --llama-server PATH --file model.gguf

Without a file weights are random, of Qwen3-0.6B's shape with the folder's vocabulary and template (shapes.py), kept in --keep;
types other than BF16 are quantized by llama.cpp. Both servers run all the time and take turns. TTFT is when the client has the
first text. The prompts of a round are new to both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from http_streams import Answer, Server, body, percentile, run, stream, wait_ready

sys.path.insert(0, str(Path(__file__).parent))


def weights(kind: str, tokenizer: Path, folder: Path) -> Path:
    """The file of that type, made where it is not there."""
    from shapes import write_gguf
    from vs_llama_cpp import quantize_by_llama_cpp

    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "qwen3-0.6b-random-BF16.gguf"
    if not plain.exists():
        write_gguf(plain, "qwen3-0.6b", tokenizer=tokenizer)
    wanted = folder / f"qwen3-0.6b-random-{kind}.gguf"
    if not wanted.exists():
        quantize_by_llama_cpp(plain, wanted, kind)
    return wanted


def llama_server(program: Path, file: Path, port: int, streams: int, context: int, threads: int) -> subprocess.Popen[bytes]:
    options = {"-m": file, "--port": port, "-np": streams, "-c": streams * context, "-t": threads, "-tb": threads}
    words = [str(word) for pair in options.items() for word in pair]
    return subprocess.Popen([str(program), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def turn(port: int, streams: int, tokens: int, seed: int) -> tuple[float, list[Answer]]:
    requests = [body(seed + i, tokens, model="model", cache_prompt=False, temperature=0.8) for i in range(streams)]
    began = time.monotonic()
    answers = await asyncio.gather(*[stream(port, data) for data in requests])
    return time.monotonic() - began, answers


async def measure(ports: dict[str, int], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in ports}
    waits: dict[str, list[float]] = {name: [] for name in ports}
    for port in ports.values():
        await wait_ready(port)
        await turn(port, streams, 8, 0)
    for number in range(rounds):
        for name, port in ports.items():
            seconds, answers = await turn(port, streams, tokens, 1000 * (number + 1))
            if not all(answer.status == 200 and answer.ended and answer.tokens == tokens for answer in answers):
                raise SystemExit(f"{name} did not answer all as they were asked for: {answers}")
            speeds[name].append(streams * tokens / seconds)
            waits[name] += [answer.first or answer.seconds for answer in answers]
            print(f"round {number + 1}, {name}: {speeds[name][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
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
    parser.add_argument("--file", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a folder")
    parser.add_argument("--type", default="BF16", help="BF16, or what llama.cpp quantizes to: Q8_0, Q4_K_M, …")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/nanovllm-benchmarks"), help="where made weights lie")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.file is None and options.tokenizer is None:
        parser.error("--file, or --tokenizer to make one")
    file = options.file or weights(options.type, options.tokenizer, options.keep)
    threads = psutil.cpu_count(logical=False) or 1
    peer_port = 18999
    peer = llama_server(options.llama_server, file, peer_port, options.streams, options.context, threads)
    ours = Server(str(file), "--alias", "model", "-np", str(options.streams), "-c", str(options.context), "--no-access-log")
    try:
        ports = {"nanovllm": ours.port, "llama-server": peer_port}
        found = run(measure(ports, options.streams, options.tokens, options.rounds))
    finally:
        peer.terminate()
        ours.close()
    medians = {name: statistics.median(each["tokens_per_second"]) for name, each in found.items()}
    results = {
        "file": file.name, "streams": options.streams, "tokens": options.tokens, "threads": threads,
        "date": time.strftime("%Y-%m-%d"), **found, "ratio": round(medians["nanovllm"] / medians["llama-server"], 2),
    }  # fmt: skip
    print(json.dumps(results, indent=2))
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps(known | {file.name: results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
