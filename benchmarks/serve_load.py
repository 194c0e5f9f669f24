"""The server under load, through real sockets: overload, clients that leave, a killed engine, and what HTTP costs.

    python benchmarks/serve_load.py --output benchmarks/results/serve_load.json [--model tiny] [--only overload,latency]

overload     256 streams, then 1,024: every one ends with 200, 400, 429 or 503; /health meanwhile; how soon a 429 comes
disconnects  10,000 clients that leave at random moments: blocks, tasks, descriptors and memory at the baseline behind them
throughput   64 streams through HTTP against the same requests in this process
latency      what HTTP adds to the engine's own time to the first token
killed       kill -9 of the engine under load: how long until new requests are served

The client is part of what is measured: it runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "src"))

SECTIONS = ("overload", "disconnects", "throughput", "latency", "killed")
WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "old", "roofs", "and",
    "nobody", "says", "a", "word",
]  # fmt: skip


@dataclass
class Answer:
    status: int = 0
    frames: int = 0
    first: float | None = None
    seconds: float = 0.0
    ended: bool = False


class Server:
    """`nanovllm serve`, started and ended here."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "nanovllm_cli", "serve", model, "--port", "0", *options]
        environment = {"PYTHONPATH": str(REPOSITORY / "src")}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | environment, text=True)
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            sys.stderr.write(line)
            if "http://" in line and not self.port:
                self.port = int(line.split("http://", 1)[1].split("/")[0].split()[0].rsplit(":", 1)[1])
            if self.port:
                break
        stream = self.process.stderr
        threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()
        self.root = psutil.Process(self.process.pid)

    @property
    def engine(self) -> psutil.Process:
        return next(child for child in self.root.children() if "engine_process" in " ".join(child.cmdline()))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def wait_ready(port: int, seconds: float = 120.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if (await get(port, "/health"))[0] == 200:
                return time.monotonic() - began
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server did not get ready")


async def get(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2]


def body(seed: int, tokens: int, **more: Any) -> bytes:
    chosen = random.Random(seed)
    text = " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(4, 24)))
    request = {
        "model": more.pop("model", "tiny"), "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "seed": seed, **more,
    }  # fmt: skip
    return json.dumps(request).encode()


async def stream(port: int, data: bytes, leave_after: float | None = None) -> Answer:
    """One streamed chat completion. leave_after: seconds after which the connection is dropped."""
    answer, began = Answer(), time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = (
            "POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json",
            f"Content-Length: {len(data)}", "Connection: close", "", "",
        )  # fmt: skip
        writer.write("\r\n".join(lines).encode() + data)
        tail = b""
        while True:
            if leave_after is not None:
                left = leave_after - (time.monotonic() - began)
                if left <= 0:
                    writer.transport.abort()
                    return answer
                try:
                    chunk = await asyncio.wait_for(reader.read(65536), left)
                except TimeoutError:
                    continue
            else:
                chunk = await reader.read(65536)
            if not chunk:
                break
            if not answer.status:
                answer.status = int(chunk.split(b" ", 2)[1])
            frames = chunk.count(b"data: ")
            if frames and answer.first is None:
                answer.first = time.monotonic() - began
            answer.frames += frames
            tail = (tail + chunk)[-64:]
        answer.ended = b"[DONE]" in tail or answer.status != 200
    finally:
        answer.seconds = time.monotonic() - began
        writer.close()
    return answer


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def watch_health(port: int, until: asyncio.Event) -> list[float]:
    times = []
    while not until.is_set():
        began = time.monotonic()
        await get(port, "/health")
        times.append(time.monotonic() - began)
        await asyncio.sleep(0.05)
    return times


async def overload(server: Server, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in (256, 1024):
        done = asyncio.Event()
        health = asyncio.create_task(watch_health(server.port, done))
        began = time.monotonic()
        answers = await asyncio.wait_for(
            asyncio.gather(*[stream(server.port, body(i, 64, model=model)) for i in range(count)]), 600
        )
        seconds = time.monotonic() - began
        done.set()
        times = await health
        refused = [answer.seconds for answer in answers if answer.status == 429]
        found[str(count)] = {
            "statuses": dict(Counter(str(answer.status) for answer in answers)),
            "not_ended": sum(not answer.ended for answer in answers),
            "seconds": round(seconds, 2),
            "health_p50_ms": round(1e3 * percentile(times, 0.5), 1),
            "health_p99_ms": round(1e3 * percentile(times, 0.99), 1),
            "refusal_p50_ms": round(1e3 * percentile(refused, 0.5), 1) if refused else None,
            "refusal_p99_ms": round(1e3 * percentile(refused, 0.99), 1) if refused else None,
            "tokens_per_second": round(sum(answer.frames for answer in answers) / seconds),
        }
    alone = []  # one more request while the server is full: how soon it hears so
    crowd = [asyncio.create_task(stream(server.port, body(i, 200, model=model))) for i in range(512)]
    await asyncio.sleep(1.5)
    for i in range(20):
        answer = await stream(server.port, body(i, 8, model=model))
        if answer.status == 429:
            alone.append(answer.seconds)
    await asyncio.gather(*crowd)
    found["refusal_when_full_ms"] = [round(1e3 * seconds, 1) for seconds in sorted(alone)]
    return found


async def state(server: Server) -> dict[str, Any]:
    await asyncio.sleep(1.5)
    status, data = await get(server.port, "/status.json")
    gc = {"status": status}
    try:
        gc["engine"] = json.loads(data)
    except ValueError:
        gc["engine"] = None
    return {
        "rss_server": server.root.memory_info().rss,
        "rss_engine": server.engine.memory_info().rss,
        "fds_server": server.root.num_fds(),
        "fds_engine": server.engine.num_fds(),
        "threads_server": server.root.num_threads(),
        "status": gc,
    }


async def disconnects(server: Server, model: str, count: int = 10_000) -> dict[str, Any]:
    chosen = random.Random(5)

    async def leaving(number: int) -> None:
        kind = number % 4
        data = body(number, 48, model=model, **({"stream": False} if kind == 3 else {}))
        await stream(server.port, data, leave_after=chosen.random() ** 2 * 0.4)

    async def run(first: int, last: int) -> None:
        limit = asyncio.Semaphore(64)

        async def one(number: int) -> None:
            async with limit:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await leaving(number)

        await asyncio.gather(*[one(number) for number in range(first, last)])

    await run(0, count // 5)  # warm: allocators and caches have grown to what the load needs
    before = await state(server)
    began = time.monotonic()
    await run(count // 5, count // 5 + count)
    seconds = time.monotonic() - began
    after = await state(server)
    growth = {key: round(after[key] / before[key] - 1, 4) for key in ("rss_server", "rss_engine")}
    answer = await stream(server.port, body(1, 8, model=model))
    return {"count": count, "seconds": round(seconds, 1), "before": before, "after": after, "growth": growth,
            "afterwards": answer.status}  # fmt: skip


def in_process(model: str, count: int, tokens: int, threads: int | None) -> float:
    """Tokens per second of the same requests without HTTP."""
    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    with LLM(model, config=EngineConfig(threads=threads)) as llm:
        ids, params = [], []
        for i in range(count):
            request = json.loads(body(i, tokens))
            ids.append(llm.encode_chat(request["messages"]))
            params.append(SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, temperature=llm.default_params.temperature))
        llm.generate(ids[:4], params[:4])
        began = time.monotonic()
        outputs = llm.generate(ids, params)
        seconds = time.monotonic() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def throughput(server: Server, model: str, tokens: int, rounds: int) -> dict[str, Any]:
    runs = []
    for _ in range(rounds):
        began = time.monotonic()
        answers = await asyncio.gather(*[stream(server.port, body(i, tokens, model=model)) for i in range(64)])
        seconds = time.monotonic() - began
        assert all(answer.status == 200 and answer.ended for answer in answers)
        runs.append(64 * tokens / seconds)
    return {"http": [round(run) for run in runs], "tokens": tokens}


async def latency(server: Server, model: str, count: int = 60) -> dict[str, Any]:
    """From the request's first byte to the answer's, less what the engine says of its own first token."""
    seen, engine = [], []
    for i in range(count):
        answer = await stream(server.port, body(10_000 + i, 4, model=model))
        seen.append(answer.first or 0.0)
    status, data = await get(server.port, "/metrics")
    del status
    sums = {}
    for line in data.decode().splitlines():
        if line.startswith("nanovllm:time_to_first_token_seconds_") and ("_sum" in line or "_count" in line):
            sums["sum" if "_sum" in line else "count"] = float(line.rsplit(" ", 1)[1])
    del engine
    return {"first_byte_ms": {"p50": round(1e3 * statistics.median(seen), 2), "p95": round(1e3 * percentile(seen, 0.95), 2)},
            "metrics": sums}  # fmt: skip


def engine_first_token(model: str, count: int = 60) -> list[float]:
    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    times = []
    with LLM(model, config=EngineConfig()) as llm:
        for i in range(count):
            ids = llm.encode_chat(json.loads(body(10_000 + i, 4))["messages"])
            began = time.monotonic()
            for output in llm.stream(ids, SamplingParams(max_tokens=4, ignore_eos=True, seed=i)):
                if output.metrics.first_token is not None:
                    times.append(time.monotonic() - began)
                    break
    return times


async def killed(server: Server, model: str, rounds: int = 3) -> dict[str, Any]:
    found = []
    for _ in range(rounds):
        crowd = [asyncio.create_task(stream(server.port, body(i, 400, model=model))) for i in range(64)]
        await asyncio.sleep(1.0)
        old = server.engine
        old.kill()
        began = time.monotonic()
        answers = await asyncio.wait_for(asyncio.gather(*crowd, return_exceptions=True), 60)
        ended = time.monotonic() - began
        while (await stream(server.port, body(1, 4, model=model))).status != 200:
            await asyncio.sleep(0.1)
        found.append(
            {
                "streams_ended_after_s": round(ended, 3),
                "served_again_after_s": round(time.monotonic() - began, 2),
                "statuses": dict(Counter(str(getattr(answer, "status", "broken")) for answer in answers)),
                "children": len(server.root.children()),
            }
        )
        await asyncio.sleep(1.0)
    return {"rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--served", default=None, help="what the server calls it; by default its name")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--tokens", type=int, default=256, help="of each answer in `throughput`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disconnects", type=int, default=10_000)
    options = parser.parse_args()
    name = options.served or options.model
    wanted = options.only.split(",")
    results: dict[str, Any] = {"model": options.model, "date": time.strftime("%Y-%m-%d"), "cores": psutil.cpu_count()}
    server = Server(options.model, *(["--alias", options.served] if options.served else []))
    sections: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "overload": lambda: overload(server, name),
        "disconnects": lambda: disconnects(server, name, options.disconnects),
        "throughput": lambda: throughput(server, name, options.tokens, options.rounds),
        "latency": lambda: latency(server, name),
        "killed": lambda: killed(server, name),
    }
    try:
        asyncio.run(wait_ready(server.port))
        for section in SECTIONS:
            if section in wanted:
                results[section] = asyncio.run(sections[section]())  # type: ignore[arg-type]
                print(section, json.dumps(results[section], indent=2), flush=True)
    finally:
        server.close()
    results["exit_code"] = server.process.returncode
    if "throughput" in wanted:
        alone = [in_process(options.model, 64, options.tokens, None) for _ in range(options.rounds)]
        found = results["throughput"]
        found["in_process"] = [round(run) for run in alone]
        found["ratio"] = round(statistics.median(found["http"]) / statistics.median(alone), 3)
    if "latency" in wanted:
        own = engine_first_token(options.model)
        found = results["latency"]
        found["engine_ms"] = {"p50": round(1e3 * statistics.median(own), 2), "p95": round(1e3 * percentile(own, 0.95), 2)}
        found["added_ms"] = round(found["first_byte_ms"]["p50"] - found["engine_ms"]["p50"], 2)
    print(json.dumps(results, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
