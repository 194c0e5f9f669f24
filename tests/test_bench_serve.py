"""`bench serve` against a scripted server: what it asks, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.record import Summary, read_results
from nanovllm_cli.bench.serve import Outcome, Plan, find_model, measure, warm_up
from nanovllm_cli.bench.serve_client import Target, schedule
from nanovllm_cli.bench.workload import Request as Asked
from nanovllm_cli.bench.workload import Workload
from nanovllm_cli.client.http import Server
from nanovllm_cli.errors import AccessRefusedError, RequestError, ServerError, UsageError
from openai_server import OpenAIServer, Reply, Request, Script

INF = math.inf
TOLERANCE = 0.05
"""Seconds by which a mean of the client's times may differ from that of the server's own: the way through the system of one
machine, and what else runs on it."""


def words(count: int = 3, first: float = 0.0, gap: float = 0.0, prompt: int = 7) -> Script:
    """An answer of `count` pieces with usage."""

    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await asyncio.sleep(first)
        for i in range(count):
            await asyncio.sleep(gap if i else 0.0)
            await reply.piece(f" {i}", "length" if i == count - 1 else None)
        await reply.usage(prompt, count)
        await reply.done()

    return answer


def go(
    server: OpenAIServer | str,
    count: int = 1,
    rate: float = INF,
    *,
    prompt: str | list[int] = "hi",
    tick: Callable[[int], None] | None = None,
    target: dict[str, Any] | None = None,
    **plan: Any,
) -> Outcome:
    url = server if isinstance(server, str) else server.url
    aim = Target(Server.at(url), model="m", **target or {})
    workload = Workload("test", [Asked(prompt, 5)] * count)
    return measure(aim, workload, Plan(rate, **plan), Machine(), tick=tick or (lambda _: None))


def failed(script: Script, **more: Any) -> str:
    """The one failure of one request."""
    with OpenAIServer(script) as server:
        outcome = go(server, **more)
    assert outcome.summary.metrics["completed"] == 0
    [(error, count)] = outcome.failures
    assert count == 1
    return error


def test_figures_are_those_of_the_servers_own_clock() -> None:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await asyncio.sleep(0.1 + 0.02 * (request.index % 3))
        for i in range(4 + request.index % 2):
            await asyncio.sleep(0.1 if i else 0.0)
            await reply.piece("x")
        await reply.usage(11, len(reply.told))
        await reply.done()

    with OpenAIServer(answer) as server:
        metrics = go(server, 16, rate=40.0, goals={"ttft": 1000.0, "e2el": 1.0}).summary.metrics
        came = [reply.request.came for reply in server.replies]
        told = [[moment for moment, _ in reply.told] for reply in server.replies]
    ttft = [times[0] - begin for begin, times in zip(came, told, strict=True)]
    e2el = [times[-1] - begin for begin, times in zip(came, told, strict=True)]
    tpot = [(times[-1] - times[0]) / (len(times) - 1) for times in told]
    itl = [after - before for times in told for before, after in itertools.pairwise(times)]
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl)):
        assert metrics[f"mean_{name}_ms"] == pytest.approx(1e3 * statistics.fmean(values), abs=1e3 * TOLERANCE)
        assert metrics[f"median_{name}_ms"] == pytest.approx(1e3 * statistics.median(values), abs=1e3 * TOLERANCE)
    duration = max(times[-1] for times in told) - min(came)
    assert metrics["duration"] == pytest.approx(duration, abs=2 * TOLERANCE)
    assert metrics["request_throughput"] == pytest.approx(16 / metrics["duration"])
    assert (metrics["completed"], metrics["failed"]) == (16, 0)
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (16 * 11, 8 * 4 + 8 * 5)
    assert metrics["request_goodput"] == 0.0
    gaps = [after - before for before, after in itertools.pairwise(came)]
    assert sum(gaps) == pytest.approx(15 / 40.0, abs=2 * TOLERANCE)


def test_the_load_is_open_unless_it_is_limited() -> None:
    with OpenAIServer(words(2, first=0.15)) as server:
        assert go(server, 12).summary.metrics["max_concurrent_requests"] == 12
        assert server.most_at_once == 12
    with OpenAIServer(words(2, first=0.05)) as server:
        metrics = go(server, 9, max_concurrency=3).summary.metrics
        assert server.most_at_once == metrics["max_concurrent_requests"] == 3
    assert metrics["mean_queueing_ms"] > 40


def test_what_is_asked() -> None:
    target = {
        "api_key": "secret-key",
        "ignore_eos": True,
        "extra_body": {"top_k": 3, "temperature": None, "max_tokens": 9},
    }
    with OpenAIServer(words()) as server:
        go(server, prompt=[1, 2, 3], target=target)
        go(server, prompt="hello", target={"endpoint": "chat"})
        first, second = [reply.request for reply in server.replies]
    assert (first.method, first.path) == ("POST", "/v1/completions")
    assert first.headers["authorization"] == "Bearer secret-key"
    assert first.headers["host"] == server.url.removeprefix("http://")
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert first.body == {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9, "ignore_eos": True, "top_k": 3, **stream}
    assert second.path == "/v1/chat/completions"
    message = {"role": "user", "content": "hello"}
    assert second.body == {"model": "m", "messages": [message], "max_tokens": 5, "temperature": 0.0, **stream}
    assert "authorization" not in second.headers
    assert "secret-key" not in repr(Target(Server.at("http://x"), api_key="secret-key"))


def test_tokens_without_usage_are_pieces_and_that_is_said() -> None:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(3):
            await reply.piece("x")
        await reply.piece("", "stop")
        await reply.done()

    with OpenAIServer(answer) as server:
        known = go(server, 2, prompt=[5] * 9)
        guessed = go(server, 1, prompt="twelve chars", target={"endpoint": "chat"})
    assert (known.summary.metrics["total_output_tokens"], known.summary.metrics["total_input_tokens"]) == (6, 18)
    assert known.remarks[:1] == ["2 answers came without usage: their pieces were counted as tokens"]
    assert guessed.summary.metrics["total_input_tokens"] == 3
    assert "1 prompts came without usage: their tokens are estimated, four characters each" in guessed.remarks


def test_several_tokens_in_a_piece_are_counted_by_usage() -> None:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("three tokens here")
        await asyncio.sleep(0.05)
        await reply.piece("and four of them", "length")
        await reply.usage(2, 7)
        await reply.done()

    with OpenAIServer(answer) as server:
        metrics = go(server).summary.metrics
    assert metrics["total_output_tokens"] == 7
    assert metrics["mean_tpot_ms"] == pytest.approx(metrics["mean_itl_ms"] / 6)


def test_bytes_cut_anywhere_make_the_same_answer() -> None:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        stream = b': hi\r\n\r\ndata: {"choices": [{"text": "f\xc3\xbcr"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
        for byte in stream:
            await reply.chunk(bytes([byte]))
            await asyncio.sleep(0)
        await reply.raw(b"0\r\n\r\n")

    with OpenAIServer(answer) as server:
        assert go(server).summary.metrics["total_output_tokens"] == 1


def test_kinds_of_failure() -> None:
    async def refuses(reply: Reply, request: Request) -> None:
        await reply.whole("429 Too Many Requests", {"error": {"message": "slow\ndown", "type": "rate_limit"}})

    async def breaks(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("x")
        await reply.event({"error": {"message": "out of memory"}})

    async def hangs_up(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("x")

    async def says_nothing(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("", "stop")
        await reply.done()

    async def stops_early(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("x")
        await reply.raw(b"0\r\n\r\n")

    async def is_no_server(reply: Reply, request: Request) -> None:
        await reply.raw(b"220 smtp ready\r\n\r\n")

    async def closes(reply: Reply, request: Request) -> None:
        pass

    async def sends_a_page(reply: Reply, request: Request) -> None:
        await reply.whole("502 Bad Gateway", b"<html>\n<h1>gateway\x1b[31m</h1>" + b"x" * 100_000)

    assert failed(refuses) == "HTTP 429: slow down"
    assert failed(breaks) == "the server failed: out of memory"
    assert failed(hangs_up) == "the connection was lost in the middle of the answer"
    assert failed(says_nothing) == "an answer without any text"
    assert failed(stops_early) == "the answer ended before it was complete"
    assert failed(is_no_server) == "this is not HTTP: '220 smtp ready'"
    assert failed(closes) == "the server closed the connection without an answer"
    assert failed(sends_a_page).startswith("HTTP 502: <html> <h1>gateway")
    assert len(failed(sends_a_page)) < 250
    assert failed(words(2, first=30.0), target={"timeout": 0.2}) == "no end within 0.2 s"


def test_one_failure_hurts_nobody_else() -> None:
    good = words(2)

    async def some(reply: Reply, request: Request) -> None:
        await (reply.whole("500 No", b"sorry") if request.index % 3 == 0 else good(reply, request))

    with OpenAIServer(some) as server:
        outcome = go(server, 9)
    assert (outcome.summary.metrics["completed"], outcome.summary.metrics["failed"]) == (6, 3)
    assert outcome.failures == [("HTTP 500: sorry", 3)]
    assert len(outcome.summary.series["ttft_ms"]) == 6


def nowhere() -> str:
    """Where nobody listens."""
    with OpenAIServer(words()) as server:
        return server.url


def test_nobody_there() -> None:
    url = nowhere()
    assert go(url, 2).failures == [("connection refused", 2)]
    target = Target(Server.at(url), model="m")
    with pytest.raises(ServerError, match="connection refused"):
        find_model(target)
    with pytest.raises(RequestError, match="answers none of the first 2 requests: connection refused"):
        warm_up(target, Workload("test", [Asked("x", 1)] * 3), 2)


def test_finding_a_model() -> None:
    with OpenAIServer(words(), models=("first", "second")) as server:
        assert find_model(Target(Server.at(server.url))) == "first"
    with OpenAIServer(words(), models=()) as server, pytest.raises(ServerError, match="lists no model"):
        find_model(Target(Server.at(server.url)))


def test_a_key_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Reply, status: str, value: Any) -> None:
        await self.raw(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")

    monkeypatch.setattr(Reply, "whole", refuse)
    with OpenAIServer(words()) as server, pytest.raises(AccessRefusedError, match="HTTP 401: no") as error:
        find_model(Target(Server.at(server.url), api_key="secret-key"))
    assert "secret-key" not in f"{error.value.message} {error.value.hint}"


def test_warm_up_does_not_ask_what_is_measured() -> None:
    requests = [Asked(f"prompt {i}", 5) for i in range(5)]
    workload = Workload("test", requests)
    with OpenAIServer(words()) as server:
        target = Target(Server.at(server.url), model="m")
        warm_up(target, workload, 2)
        measure(target, workload, Plan(INF), Machine(), skip=2, tick=lambda _: None)
        asked = [reply.request.body["prompt"] for reply in server.replies]
    assert sorted(asked[:2]) == ["prompt 0", "prompt 1"]
    assert sorted(asked[2:]) == ["prompt 2", "prompt 3", "prompt 4"]


def test_an_interrupt_leaves_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    slow, fast = words(2, first=30.0), words(2)

    async def some(reply: Reply, request: Request) -> None:
        await (fast if request.index < 3 else slow)(reply, request)

    done = 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        if done == 3:
            raise KeyboardInterrupt

    with OpenAIServer(some) as server:
        outcome = go(server, 8, rate=200.0, tick=tick)
    assert isinstance(outcome.interrupted, KeyboardInterrupt)
    assert outcome.summary.metrics["completed"] == 3
    assert outcome.remarks[0] == "interrupted: 3 of 8 requests were done"
    del outcome  # and the frames that its exception came through
    gc.collect()
    assert caplog.text == ""  # no task was forgotten


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_gamma_distributions_deviation(burstiness: float, deviation: float) -> None:
    moments = schedule(20_001, 50.0, burstiness=burstiness, seed=3)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert moments[0] == 0.0
    assert moments[-1] == pytest.approx(20_000 / 50.0)  # the rate is kept exactly
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.05)  # 1 / sqrt(shape)
    assert schedule(100, 50.0, burstiness=burstiness, seed=3) != schedule(100, 50.0, burstiness=burstiness, seed=4)
    assert schedule(100, 50.0, burstiness=burstiness, seed=3) == schedule(100, 50.0, burstiness=burstiness, seed=3)


def test_a_ramp_grows_evenly() -> None:
    moments = schedule(100_000, 100.0, ramp_up=200.0, burstiness=INF)
    assert moments == sorted(moments)
    for moment in (10.0, 100.0, 200.0):  # by then the integral of 100 t / 200 has come: t^2 / 4
        assert sum(each <= moment for each in moments) == pytest.approx(moment**2 / 4, abs=2)
    assert sum(300.0 < each <= 310.0 for each in moments) == pytest.approx(1000, abs=2)


def test_schedules_that_make_no_sense() -> None:
    assert schedule(3, INF) == [0.0, 0.0, 0.0]
    assert schedule(1, 2.0) == [0.0]
    assert schedule(0, 2.0) == []
    for more in ({"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"burstiness": math.nan},
                 {"ramp_up": -1.0}, {"ramp_up": INF}, {"rate": INF, "ramp_up": 1.0}):  # fmt: skip
        with pytest.raises(UsageError):
            schedule(5, **{"rate": 1.0, **more})
    for plan in ({"max_concurrency": 0}, {"percentiles": [101.0]}, {"percentiles": []}):
        with pytest.raises(UsageError):
            Plan(1.0, **plan)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        Target(Server.at("http://x"), api_key="a\r\nX-Evil: 1")
    with pytest.raises(UsageError):
        Target(Server.at("http://x"), endpoint="chat").body(Asked([1, 2], 5))


# The command.


def command(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "nanovllm_cli", "bench", "serve", *arguments], light=True, cwd=cwd, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environ},
    )  # fmt: skip


def test_the_command_reports_and_saves(tmp_path: Path) -> None:
    with OpenAIServer(words(3), models=("a-model",)) as server:
        told = command(
            "--url", server.url, "--num-prompts", "4", "--request-rate", "100,inf", "--input-len", "5", "--output-len", "6",
            "--save", "out.json", "--report", "out.html", "--plot", "--goodput", "ttft:5000,tpot:5000",
            "--percentiles", "50,99.9", cwd=tmp_path, OPENAI_API_KEY="another", NANOVLLM_API_KEY="secret-key",
        )  # fmt: skip
        bodies = [reply.request.body for reply in server.replies]
        keys = {reply.request.headers["authorization"] for reply in server.replies}
    assert told.returncode == 0, told.stderr
    assert (len(bodies), keys) == (1 + 2 * 4, {"Bearer secret-key"})
    assert {(len(body["prompt"].split()), body["max_tokens"], body["model"]) for body in bodies} == {(5, 6, "a-model")}
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in told.stdout.splitlines()
        if line.startswith("|")
    ]
    assert ["a-model, 100 requests/s", ""] in cells
    assert ["a-model, all at once", ""] in cells
    assert cells.count(["successful requests", "4"]) == 2
    assert cells.count(["output tokens", "12"]) == 2
    assert cells.count(["latency (ms)", "mean", "median", "std", "p50", "p99.9"]) == 2
    assert "Time to first token: share of samples (%)" in told.stdout
    assert "model: a-model" in told.stderr
    results = read_results(tmp_path / "out.json")
    assert [isinstance(each, Summary) and each.settings["request_rate"] for each in results] == [100.0, "inf"]
    assert "<svg" in (tmp_path / "out.html").read_text()
    everything = told.stdout + told.stderr + "".join(path.read_text() for path in tmp_path.glob("out.*"))
    assert "secret-key" not in everything
    assert "\x1b" not in everything


def test_json_and_nothing_else(tmp_path: Path) -> None:
    with OpenAIServer(words(3)) as server:
        arguments = [
            "--url",
            server.url,
            "-m",
            "x",
            "--num-prompts",
            "3",
            "--warmup",
            "0",
            "-q",
            "--api-key",
            "secret-key",
        ]
        one = command(*arguments, "-o", "json", cwd=tmp_path)
        lines = command(*arguments, "-o", "jsonl", "--max-concurrency", "1,2", cwd=tmp_path)
    assert (one.returncode, one.stderr, lines.stderr) == (0, "", "")
    [result] = json.loads(one.stdout)
    assert (result["kind"], result["metrics"]["completed"], len(result["series"]["ttft_ms"])) == ("serve", 3, 3)
    assert [json.loads(line)["settings"]["max_concurrency"] for line in lines.stdout.splitlines()] == [1, 2]
    assert "secret-key" not in one.stdout
    assert "--api-key ..." in result["machine"]["command"]


def test_more_connections_than_files_may_be_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with OpenAIServer(words(1, first=0.3)) as server:
        words_of = [
            sys.executable,
            "-m",
            "nanovllm_cli",
            "bench",
            "serve",
            "--url",
            server.url,
            "-m",
            "x",
            "-o",
            "json",
        ]
        told = subprocess.run(
            [*words_of, "--warmup", "0", "--num-prompts", "80", "--input-len", "2"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, before[1])),
        )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)[0]["metrics"]["max_concurrent_requests"] == 80


def test_a_server_that_still_loads_is_waited_for_by_hand() -> None:
    async def refuse(reply: Reply, request: Request) -> None:
        await reply.whole("503 Service Unavailable", {"error": {"message": "the model is being loaded"}})

    with OpenAIServer(refuse) as server, pytest.raises(RequestError, match="HTTP 503: the model is being loaded") as caught:
        warm_up(Target(Server.at(server.url), model="m"), Workload("test", [Asked("x", 1)]), 1)
    assert "GET /health" in (caught.value.hint or "")


def test_nothing_succeeds(tmp_path: Path) -> None:
    async def refuse(reply: Reply, request: Request) -> None:
        await reply.whole("404 Not Found", {"error": {"message": "no such model"}})

    with OpenAIServer(refuse) as server:
        first = command("--url", server.url, "-m", "x", "--num-prompts", "2", cwd=tmp_path)
        second = command("--url", server.url, "-m", "x", "--num-prompts", "2", "--warmup", "0", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "the server answers none of the first 1 requests: HTTP 404: no such model" in first.stderr
    assert "2 failed: HTTP 404: no such model" in second.stderr
    assert "| failed requests" in second.stdout
    assert "hint:" not in first.stderr
    gone = command("--url", nowhere(), "-q", cwd=tmp_path)
    assert gone.returncode == 1
    assert "connection refused" in gone.stderr
    assert "hint: is it running?" in gone.stderr


def test_ctrl_c_reports_what_is_done(tmp_path: Path) -> None:
    slow, fast = words(2, first=30.0), words(2)

    async def some(reply: Reply, request: Request) -> None:
        await (fast if request.index < 3 else slow)(reply, request)

    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with OpenAIServer(some) as server:
            process = forked.Forked(
                [sys.executable, "-m", "nanovllm_cli", "bench", "serve", "--url", server.url, "-m", "x", "--num-prompts", "5",
                 "--warmup", "0", "--save", "out.json"],
                light=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            deadline = time.monotonic() + 30
            while sum(len(reply.told) == 2 for reply in server.replies) < 3 or len(server.replies) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.3)  # the last of the three is on its way
            process.send_signal(signum)
            out, err = process.communicate(timeout=30)
        assert process.returncode == code, err
        assert re.search(r"\| successful requests +\| +3 \|", out)
        assert "interrupted: 3 of 5 requests were done" in err
        [result] = read_results(tmp_path / "out.json")
        assert isinstance(result, Summary)
        assert result.metrics["completed"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        "--url ftp://x", "--request-rate fast", "--request-rate 0", "--request-rate nan", "--num-prompts 0", "--warmup -1",
        "--max-concurrency 1.5", "--max-concurrency 0", "--max-concurrency inf",
        "--goodput itl:5", "--percentiles 200", "--percentiles x", "--timeout 0",
        "--extra-body {", "--extra-body [1]", "--burstiness 0", "--ramp-up 5", "--plot -o json", "--dataset file",
        "--dataset sharegpt --input-len 5", "--prefix-len 5", "--input-len 0", "--range-ratio 1", "--dataset-path missing.txt",
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = run_here(["--url", "http://127.0.0.1:1", *arguments.split()])
    assert code == 2, capfd.readouterr().err


def run_here(arguments: list[str]) -> int:
    """The exit code of the command's errors, without a process."""
    from typer.main import get_command

    from nanovllm_cli.cli.failures import explanation
    from nanovllm_cli.cli.program import PROGRAM, build

    root = get_command(build())
    try:
        with root.make_context(PROGRAM, ["bench", "serve", *arguments]) as ctx:
            root.invoke(ctx)
    except Exception as error:
        return explanation(error).exit_code
    return 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_an_encrypted_server(tmp_path: Path) -> None:
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    subprocess.run(["openssl", "req", "-x509", *key, *name], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with OpenAIServer(words(3), context=context) as server:
        arguments = [
            "--url",
            server.url.replace("127.0.0.1", "localhost"),
            "--num-prompts",
            "4",
            "-o",
            "json",
        ]
        trusting = command(*arguments, cwd=tmp_path, SSL_CERT_FILE="cert.pem")
        careful = command(*arguments, cwd=tmp_path)
    assert json.loads(trusting.stdout)[0]["metrics"]["total_output_tokens"] == 12
    assert careful.returncode == 1
    assert "certificate verify failed" in careful.stderr
