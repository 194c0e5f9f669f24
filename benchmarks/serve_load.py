"""The server under load, through real sockets: overload, clients that leave, a killed engine, and what HTTP costs.

    python benchmarks/serve_load.py --output benchmarks/results/serve_load.json [--only overload,latency]
    python benchmarks/serve_load.py --model FILE.gguf --served model --only throughput --tokens 32 --rounds 2 --kv-cache 1024

overload     256 streams, then 1,024: every one ends with 200, 400, 429 or 503; /health meanwhile; how soon a 429 comes
disconnects  10,000 clients that leave at a random moment or piece: blocks, tasks, descriptors and memory as before
throughput   64 streams through HTTP against the same requests in this process, and processor time of a token
latency      what HTTP adds to the engine's own time to the first token
killed       kill -9 of the engine under load: how long until new requests are served

The client (http_streams.py) is part of what is measured: it runs on the same cores. Sections that are not asked for stay as they
are in the file of results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from http_streams import Answer, HealthWatch, Server, body, get, percentile, run, stream, wait_ready

SECTIONS = ("overload", "disconnects", "throughput", "latency", "killed")


async def overload(server: Server, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in (256, 1024):
        health = HealthWatch(server.port)
        began = time.monotonic()
        answers = await asyncio.wait_for(
            asyncio.gather(*[stream(server.port, body(i, 64, model=model)) for i in range(count)]), 600
        )
        seconds = time.monotonic() - began
        times = health.close()
        refused = [answer.seconds for answer in answers if answer.status == 429]
        found[str(count)] = {
            "statuses": dict(Counter(str(answer.status) for answer in answers)),
            "not_ended": sum(not answer.ended for answer in answers),
            "seconds": round(seconds, 2),
            "health_asked": len(times),
            "health_ms": _summary(times),
            "refusal_ms": _summary(refused),
            "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds),
        }
    # One more request while the server is full: how soon it hears so. Full is what some of a crowd have heard.
    crowd = [asyncio.create_task(stream(server.port, body(i, 400, model=model))) for i in range(576)]
    while not any(task.done() and task.result().status == 429 for task in crowd):
        await asyncio.sleep(0.05)
    alone: list[Answer] = []
    while len(alone) < 20 and not any(task.done() and task.result().status == 200 for task in crowd):
        await asyncio.sleep(0.1)
        answer = await stream(server.port, body(1, 1, model=model))
        if answer.status == 429:
            alone.append(answer)
    await asyncio.gather(*crowd)
    found["refusal_when_full_ms"] = _summary([answer.seconds for answer in alone]) | {"of": len(alone)}
    return found


def _summary(seconds: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * percentile(seconds, share), 1) for name, share in shares.items()} if seconds else {}


async def state(server: Server) -> dict[str, Any]:
    """What must be as it was before. Waits until the engine has nothing left to do."""
    for _ in range(100):
        await asyncio.sleep(0.2)
        told = json.loads((await get(server.port, "/status.json"))[1])
        engine = told["models"][0]
        if engine["running"] == engine["waiting"] == engine["blocks"]["used"] == 0:
            break
    return {
        "rss_server": server.root.memory_info().rss,
        "rss_engine": server.engine.memory_info().rss,
        "fds_server": server.root.num_fds(),
        "fds_engine": server.engine.num_fds(),
        "threads_server": server.root.num_threads(),
        "threads_engine": server.engine.num_threads(),
        "http_under_way": told["http"]["in_flight"] - 1,
        "running": engine["running"],
        "waiting": engine["waiting"],
        "blocks": engine["blocks"],
    }


async def disconnects(server: Server, model: str, count: int) -> dict[str, Any]:
    """As many come first: then allocators have grown to what the load needs, steps of all sizes are recorded, and every page of
    the KV cache, which is small here, has been written to."""
    chosen = random.Random(5)
    ended: Counter[str] = Counter()
    limit = asyncio.Semaphore(64)

    async def leave(number: int) -> None:
        data = body(number, 48, model=model, **({"stream": False, "stream_options": None} if number % 4 == 3 else {}))
        when: dict[str, Any] = {"leave_after": chosen.random() ** 2 * 0.4} if number % 2 else {"leave_at": chosen.randint(1, 12)}
        async with limit:
            answer = await stream(server.port, data, **when)
        ended["after the answer" if answer.ended else "inside it" if answer.first else "before it"] += 1

    await asyncio.gather(*[leave(number) for number in range(count)])
    before = await state(server)
    ended.clear()
    began = time.monotonic()
    await asyncio.gather(*[leave(number) for number in range(count, 2 * count)])
    seconds = time.monotonic() - began
    after = await state(server)
    growth = {key: round(after[key] / before[key] - 1, 4) for key in ("rss_server", "rss_engine")}
    answer = await stream(server.port, body(1, 8, model=model))
    return {"count": count, "left": dict(ended), "seconds": round(seconds, 1), "before": before, "after": after, "growth": growth,
            "afterwards": answer.status}  # fmt: skip


def in_process(model: str, count: int, tokens: int, rounds: int, kv_cache_bytes: int | None) -> list[float]:
    """Tokens per second of the same requests without HTTP."""
    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    speeds = []
    with LLM(model, config=EngineConfig(kv_cache_bytes=kv_cache_bytes)) as llm:
        ids, params = [], []
        for i in range(count):
            request = json.loads(body(i, tokens))
            ids.append(llm.encode_chat(request["messages"]))
            params.append(SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, temperature=llm.default_params.temperature))
        llm.generate(ids[:4], params[:4])
        for _ in range(rounds):
            began = time.monotonic()
            outputs = llm.generate(ids, params)
            speeds.append(sum(len(output.outputs[0].token_ids) for output in outputs) / (time.monotonic() - began))
    return speeds


async def throughput(server: Server, model: str, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    runs: list[float] = []
    await asyncio.gather(*[stream(server.port, body(i, 8, model=model)) for i in range(4)])
    used, client = server.processor_seconds(), time.process_time()
    for _ in range(rounds):
        began = time.monotonic()
        answers = await asyncio.gather(*[stream(server.port, body(i, tokens, model=model)) for i in range(count)])
        seconds = time.monotonic() - began
        assert all(answer.status == 200 and answer.ended and answer.tokens == tokens for answer in answers)
        runs.append(count * tokens / seconds)
    per_token = 1e6 / (rounds * count * tokens)
    cost = {name: round((now - used[name]) * per_token, 1) for name, now in server.processor_seconds().items()}
    cost["client"] = round((time.process_time() - client) * per_token, 1)
    return {"streams": count, "tokens": tokens, "http": [round(run, 1) for run in runs], "processor_us_a_token": cost}


async def latency(server: Server, model: str, count: int = 100) -> dict[str, Any]:
    """From the request to the first text of its answer."""
    seen = [(await stream(server.port, body(10_000 + i, 4, model=model))).first or 0.0 for i in range(count)]
    return {"first_text_ms": {"p50": round(1e3 * statistics.median(seen), 2), "p95": round(1e3 * percentile(seen, 0.95), 2)}}


def engine_first_token(model: str, count: int = 100) -> list[float]:
    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    times = []
    with LLM(model, config=EngineConfig()) as llm:
        for i in range(count):
            ids = llm.encode_chat(json.loads(body(10_000 + i, 4))["messages"])
            began = time.monotonic()
            for output in llm.stream(ids, SamplingParams(max_tokens=4, ignore_eos=True, seed=i)):
                if output.outputs[0].text:
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
    parser.add_argument("--streams", type=int, default=64, help="in `throughput`")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer in `throughput`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache", type=int, metavar="MIB", help="of server and engine alike; by default what fits")
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("serve", nargs="*", help="behind --: options for `nanovllm serve`")
    options = parser.parse_args()
    name = options.served or options.model
    wanted = [section for section in SECTIONS if section in options.only.split(",")]
    results: dict[str, Any] = {"model": Path(options.model).name, "date": time.strftime("%Y-%m-%d"), "cores": psutil.cpu_count()}
    sections: dict[str, Callable[[Server], Awaitable[dict[str, Any]]]] = {
        "overload": lambda server: overload(server, name),
        "disconnects": lambda server: disconnects(server, name, options.disconnects),
        "throughput": lambda server: throughput(server, name, options.streams, options.tokens, options.rounds),
        "latency": lambda server: latency(server, name),
        "killed": lambda server: killed(server, name),
    }
    given = ["--no-access-log", *(["--alias", options.served] if options.served else []), *options.serve]
    kv_cache = None if options.kv_cache is None else options.kv_cache << 20
    for section in wanted:
        own = ["--kv-cache", "32M"] if section == "disconnects" else [] if kv_cache is None else ["--kv-cache", str(kv_cache)]
        server = Server(options.model, *given, *own)
        try:
            run(wait_ready(server.port))
            results[section] = run(sections[section](server))  # type: ignore[arg-type]
        finally:
            server.close()
        assert server.process.returncode == 0, "the server did not end as it should"
        found = results[section]
        if section == "throughput":
            alone = in_process(options.model, options.streams, options.tokens, options.rounds, kv_cache)
            found["in_process"] = [round(speed, 1) for speed in alone]
            found["ratio"] = round(statistics.median(found["http"]) / statistics.median(alone), 3)
        if section == "latency":
            own_ms = 1e3 * statistics.median(engine_first_token(options.model))
            found["engine_ms"] = round(own_ms, 2)
            found["added_ms"] = round(found["first_text_ms"]["p50"] - own_ms, 2)
        print(section, json.dumps(found, indent=2), flush=True)
    if options.output is not None:
        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        known[results["model"]] = known.get(results["model"], {}) | results
        options.output.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
