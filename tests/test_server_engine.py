"""The engine in a process of its own: the same answers as in process, whatever happens to its clients or to itself."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import nanovllm_cli
from nanovllm_cli.children import child_environment
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.llm import LLM
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import engine_client
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.engine_client import EngineClient
from nanovllm_cli.server.engine_stream import EngineStream, joined
from nanovllm_cli.server.messages import (
    HEADER,
    Abort,
    Embed,
    Generate,
    Output,
    Piece,
    Refused,
    Start,
    Step,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.vision_spec import Image, PlacedImage, TokenIds

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"
CONFIG = EngineConfig(num_blocks=512, threads=1)
PROMPT = list(range(300, 340))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner) -> Iterator[EngineClient]:
    client = EngineClient("tiny", Start(str(TINY), CONFIG))
    runner.run(client.load())
    yield client
    runner.run(client.unload())


async def collect(stream: EngineStream) -> Output:
    whole: Output | None = None
    async for output in stream:
        whole = output if whole is None else joined(whole, output)
    assert whole is not None
    return whole


async def baseline(engine: EngineClient, seconds: float = 20.0) -> None:
    """Until nothing runs there. Fails where blocks stay taken."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = engine.stats
        if stats is not None and stats.running == stats.waiting == stats.used_blocks == 0 and not engine.num_running:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still there: {engine.stats}")


def num_sockets() -> int:
    """That this process has open."""
    return sum(connection.fd is not None for connection in psutil.Process().net_connections("all"))


async def until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.02)


# ---- messages ----

MESSAGES = [
    Start("/m", EngineConfig(cache_salt_secret=b"\0\xff"), "{{ x }}"),
    Generate(2**40, [0, 5], SamplingParams(logit_bias={7: -1.5}, stop=("é",), seed=2**64 - 1, max_tokens=3), -4, "salt"),
    Embed(3, [1], "cls"),
    Abort(9),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_is_what_arrives(message: Start | Generate | Embed | Abort) -> None:
    data = encode(message)
    assert HEADER.unpack(data[:4]) == (len(data) - 4,)
    assert decode_to_engine(data[4:]) == message


def test_steps_arrive_with_their_floats_to_the_bit() -> None:
    logprobs = [TokenLogprobs(4, -0.1234567890123456789, 2, ((4, -1e-300), (5, float("-inf"))))]
    output = Output(1, [Piece(0, "a\N{GRINNING FACE}", [4], logprobs, "stop", "x")], True, 16, 1, times=(0.1, 0.2, None))
    step = Step([output], EngineStats(*range(10)))
    assert decode_from_engine(encode(step)[4:]) == step


def test_outputs_that_nobody_has_read_are_joined_in_order() -> None:
    first = Output(1, [Piece(0, "a", [1], [TokenLogprobs(1, 0.0, 1, ())]), Piece(1, "x", [9])], False, 0)
    second = Output(1, [Piece(1, "y", [8], None, "stop"), Piece(0, "b", [2], [TokenLogprobs(2, 0.0, 1, ())])], False, 3)
    whole = joined(first, second)
    assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in whole.pieces] == [
        (0, "ab", [1, 2], None),
        (1, "xy", [9, 8], "stop"),
    ]
    assert whole.pieces[0].logprobs is not None
    assert [entry.token_id for entry in whole.pieces[0].logprobs] == [1, 2]
    assert whole.num_cached_tokens == 3


def test_a_stream_that_fails_gives_what_came_before(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        stream = EngineStream(lambda: None)
        stream.feed(Output(1, [Piece(0, "a", [1])], False, 0))
        stream.fail(ApiError(503, "gone"))
        assert (await anext(stream)).pieces[0].text == "a"
        with pytest.raises(ApiError, match="gone"):
            await anext(stream)

    runner.run(scenario())


def test_abort_is_told_once_and_ends_the_reader(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        told: list[int] = []
        stream = EngineStream(lambda: told.append(1))
        reader = asyncio.create_task(collect_all(stream))
        await asyncio.sleep(0)
        stream.abort()
        stream.abort()
        stream.feed(Output(1, [Piece(0, "late", [1])], True, 0))
        assert await reader == []
        assert told == [1]

    async def collect_all(stream: AsyncIterator[Output]) -> list[Output]:
        return [output async for output in stream]

    runner.run(scenario())


# ---- answers ----


def test_answers_are_those_of_the_engine_in_process(runner: asyncio.Runner, engine: EngineClient) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=7, n=2, logprobs=2, prompt_logprobs=1)
    with LLM("tiny", config=CONFIG) as llm:
        expected = llm.generate([PROMPT], params)[0]
        vector = llm.embed([PROMPT])[0]

    async def ask() -> Output:
        return await collect(engine.generate(PROMPT, params))

    found = runner.run(ask())
    assert found.finished
    for piece, answer in zip(sorted(found.pieces, key=lambda each: each.index), expected.outputs, strict=True):
        assert (piece.text, tuple(piece.token_ids)) == (answer.text, answer.token_ids)
        assert (piece.finish_reason, piece.stop_reason) == (answer.finish_reason, answer.stop_reason)
        assert tuple(piece.logprobs or ()) == answer.logprobs
    assert tuple(found.prompt_logprobs or ()) == expected.prompt_logprobs
    assert list(runner.run(engine.embed(PROMPT, "mean"))) == pytest.approx(vector, rel=1e-6)


def test_how_far_a_prompt_is_read_is_told_step_by_step(runner: asyncio.Runner, engine: EngineClient) -> None:
    prompt = [*range(100, 400)] * 5

    async def ask(tells_reading: bool) -> list[Output]:
        stream = engine.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), tells_reading=tells_reading)
        return [output async for output in stream]

    told = runner.run(ask(True))
    readings = [output.reading for output in told if output.reading is not None]
    counts = [count for count, _ in readings]
    assert len(counts) > 1, "some steps; those that were not read apart come as one"
    assert counts == sorted(set(counts))
    assert 0 < counts[0] <= counts[-1] <= len(prompt)
    assert [seconds for _, seconds in readings] == sorted(seconds for _, seconds in readings)
    assert not any(output.pieces for output in told if output.reading is not None)
    assert sum(len(piece.token_ids) for output in told for piece in output.pieces) == 3
    assert not any(output.reading for output in runner.run(ask(False)))


def test_what_is_refused_says_why_and_hurts_nobody(runner: asyncio.Runner, engine: EngineClient) -> None:
    async def scenario() -> None:
        good = engine.generate(PROMPT, SamplingParams(max_tokens=8))
        for prompt, params, status, code in [
            ([1] * 9000, SamplingParams(), 400, "context_length_exceeded"),
            ([], SamplingParams(), 400, None),
            ([10**7], SamplingParams(), 400, None),
            ([1], SamplingParams(stop_token_ids=(10**6,)), 400, None),
        ]:
            with pytest.raises(ApiError) as caught:
                await collect(engine.generate(prompt, params))
            assert (caught.value.status, caught.value.code, caught.value.by_engine) == (status, code, True)
        with pytest.raises(ApiError):
            await engine.embed([10**7], "mean")
        with pytest.raises(ApiError, match="priorities"):
            await engine.embed(PROMPT, "mean", priority=1)
        assert (await collect(good)).finished
        await baseline(engine)

    runner.run(scenario())


def test_what_cannot_be_met_is_told_apart(runner: asyncio.Runner, engine: EngineClient) -> None:
    params = SamplingParams(constraint=Constraint("choice", '["yes"]'), allowed_token_ids=(5,))

    async def ask() -> Output:
        return await collect(engine.generate(PROMPT, params))

    (piece,) = runner.run(ask()).pieces
    assert (piece.finish_reason, piece.unmeetable) == ("error", True)


def test_signals_for_all_of_a_terminal_or_unit_leave_the_end_to_the_server(runner: asyncio.Runner, engine: EngineClient) -> None:
    """Ctrl-C and a closed terminal reach the foreground group, systemd's SIGTERM all processes of a unit."""

    async def scenario() -> Output:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        first = await anext(stream)
        assert engine.pid is not None
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(engine.pid, signum)
        return joined(first, await collect(stream))

    assert len(runner.run(scenario()).pieces[0].token_ids) == 200


def test_aborted_at_any_time_everything_is_given_back(runner: asyncio.Runner, engine: EngineClient) -> None:
    async def leave(after: int) -> None:
        stream = engine.generate([*PROMPT, 400 + after], SamplingParams(max_tokens=500, ignore_eos=True, n=1 + after % 3))
        for _ in range(after % 5):
            await anext(stream)
        stream.abort()

    async def scenario() -> None:
        await asyncio.gather(*[leave(after) for after in range(60)])
        task = asyncio.create_task(engine.embed(PROMPT * 20, "mean"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await baseline(engine)

    runner.run(scenario())


def test_a_slow_reader_gets_everything_in_one_piece(runner: asyncio.Runner, engine: EngineClient) -> None:
    async def scenario() -> list[Output]:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        await until(lambda: stream.ended)
        return [output async for output in stream]

    (output,) = runner.run(scenario())
    assert len(output.pieces[0].token_ids) == 40


# ---- images ----


def with_image(num_bytes: int) -> TokenIds:
    return TokenIds(PROMPT, [PlacedImage(Image.of(1, num_bytes // 3, bytes(num_bytes)), 0, 1, 1)])


def finish(client: EngineClient, stream: EngineStream, request_id: int) -> None:
    step = Step([Output(request_id, [Piece(0, "a", [1], None, "stop")], True, 0)], EngineStats(*range(10)))
    client._take(step, asyncio.get_running_loop().create_future(), [])


def refuse(client: EngineClient, stream: EngineStream, request_id: int) -> None:
    client._take(Refused(request_id, "UsageError", "no", None), asyncio.get_running_loop().create_future(), [])


def abort(client: EngineClient, stream: EngineStream, request_id: int) -> None:
    stream.abort()


def die(client: EngineClient, stream: EngineStream, request_id: int) -> None:
    client._fail_all(ApiError(503, "gone"))


@pytest.mark.parametrize("end", [finish, refuse, abort, die])
def test_images_under_way_have_a_bound_and_an_end_gives_them_back(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, end: Callable[[EngineClient, EngineStream, int], None]
) -> None:
    monkeypatch.setattr(engine_client, "IMAGE_BYTES", 300)
    sent: list[Generate | Abort] = []
    link: Any = SimpleNamespace(send=sent.append)

    async def scenario() -> None:
        client = EngineClient("tiny", Start(str(TINY), CONFIG))
        client._state, client._link = EngineState.READY, link
        stream = client.generate(with_image(240), SamplingParams())
        client.generate(with_image(60), SamplingParams())
        with pytest.raises(ApiError, match="too many images are under way") as caught:
            client.generate(with_image(3), SamplingParams())
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "too_many_bytes", 1)
        client.generate(PROMPT, SamplingParams())
        assert (client.image_bytes, client.num_running, len(sent)) == (300, 3, 3)
        end(client, stream, sent[0].request_id)
        stream.abort()  # as its reader does at last
        assert client.image_bytes == (0 if end is die else 60)
        client.generate(with_image(240), SamplingParams())

    runner.run(scenario())


def test_a_request_with_more_images_than_that_is_let_in_alone(
    runner: asyncio.Runner, engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "IMAGE_BYTES", 300)

    async def scenario() -> None:
        for _ in range(2):
            stream = engine.generate(with_image(3000), SamplingParams())
            with pytest.raises(ApiError, match="under way"):
                engine.generate(with_image(3), SamplingParams())
            with pytest.raises(ApiError):  # the model reads none
                await collect(stream)
            assert engine.image_bytes == 0
        await baseline(engine)

    runner.run(scenario())


# ---- deaths ----


def test_killed_under_load_it_comes_back_and_leaves_nothing(
    runner: asyncio.Runner, engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where there is no room for it at first: each connection of an overloaded server is an open file."""
    start, failures = asyncio.create_subprocess_exec, [OSError(errno.EMFILE, "Too many open files")]

    async def fails_at_first(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(*args, **kwargs)

    async def one(seed: int) -> Output | ApiError:
        try:
            return await collect(engine.generate([*PROMPT, seed], SamplingParams(max_tokens=1500, ignore_eos=True)))
        except ApiError as error:
            return error

    async def scenario() -> None:
        before = num_sockets()
        old = engine.pid
        assert old is not None
        tasks = [asyncio.create_task(one(seed)) for seed in range(8)]
        await until(lambda: engine.stats is not None and engine.stats.running == 8)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fails_at_first)
        os.kill(old, signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks):
            assert isinstance(outcome, ApiError)
            assert (outcome.status, outcome.code) == (503, "engine_died")
            assert outcome.retry_after is not None
        assert engine.state is EngineState.RESTARTING
        with pytest.raises(ApiError) as caught:
            engine.generate(PROMPT, SamplingParams())
        assert caught.value.status == 503
        await until(lambda: engine.state is EngineState.READY)
        assert (engine.num_restarts, failures) == (2, [])
        assert (await collect(engine.generate(PROMPT, SamplingParams(max_tokens=3)))).finished
        assert not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE
        assert num_sockets() <= before  # those of an earlier test may close meanwhile

    runner.run(scenario())


def test_stopped_in_the_middle_it_has_not_died_and_can_be_loaded_again(runner: asyncio.Runner, engine: EngineClient) -> None:
    async def scenario() -> None:
        sockets, pid = num_sockets(), engine.pid
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
        await anext(stream)
        await engine.unload(EngineState.STOPPED)
        assert (engine.state, engine.pid) == (EngineState.STOPPED, None)
        with pytest.raises(ApiError) as caught:
            await collect(stream)
        assert (caught.value.status, caught.value.code) == (503, "draining")
        assert pid is not None
        assert not psutil.pid_exists(pid)
        await engine.load()
        assert (await collect(engine.generate(PROMPT, SamplingParams(max_tokens=3)))).finished
        assert num_sockets() == sockets

    runner.run(scenario())


def test_without_its_server_it_ends(tmp_path: Path) -> None:
    """The server is killed in the middle of an answer: no process stays."""
    code = f"""
        import asyncio
        from nanovllm_cli.config import EngineConfig
        from nanovllm_cli.sampling_params import SamplingParams
        from nanovllm_cli.server.engine_client import EngineClient
        from nanovllm_cli.server.messages import Start
        async def main():
            engine = EngineClient("tiny", Start({str(TINY)!r}, EngineConfig(num_blocks=512)))
            await engine.load()
            stream = engine.generate([5] * 9, SamplingParams(max_tokens=1900, ignore_eos=True))
            await anext(stream)
            print(engine.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
        child.wait(timeout=30)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", HEADER.pack(3) + b"abc", HEADER.pack(1 << 29), encode(Abort(1))[:6], b""],
    ids=["too long", "no message", "cut off", "cut off early", "closed"],
)
def test_what_is_no_message_ends_it(data: bytes) -> None:
    from nanovllm_cli.server.engine_process import Channel

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        Channel(theirs).receive()
        os._exit(7)
    theirs.close()
    ours.sendall(data)
    ours.close()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_model_that_cannot_be_loaded_says_so_as_in_process(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def scenario(path: Path) -> NanovllmError:
        engine = EngineClient("broken", Start(str(path), CONFIG))
        with pytest.raises(NanovllmError) as caught:
            await engine.load()
        assert engine.state is EngineState.FAILED
        assert engine.pid is None
        return caught.value

    assert isinstance(runner.run(scenario(tmp_path)), CheckpointError)


def test_where_no_process_can_be_started_loading_says_why(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)

    async def scenario() -> None:
        engine, sockets = EngineClient("tiny", Start(str(TINY), CONFIG)), num_sockets()
        with pytest.raises(NanovllmError, match="Too many open files"):
            await engine.load()
        assert (engine.state, num_sockets()) == (EngineState.FAILED, sockets)

    runner.run(scenario())


def silent_for(engine: EngineClient, seconds: float) -> Sequence[EngineState]:
    engine._heard -= seconds
    return [engine.state]


def test_busy_is_not_stuck_and_silence_is(runner: asyncio.Runner, engine: EngineClient) -> None:
    async def scenario() -> None:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True))
        await anext(stream)
        assert engine.state is EngineState.READY
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        try:
            assert silent_for(engine, 60.0) == [EngineState.READY]
            assert silent_for(engine, 120.0) == [EngineState.STUCK]
        finally:
            os.kill(pid, signal.SIGCONT)
        await anext(stream)
        await until(lambda: engine.state is EngineState.READY)
        stream.abort()
        await baseline(engine)
        silent_for(engine, 10000.0)
        assert engine.state is EngineState.READY  # nothing runs: nothing is expected

    runner.run(scenario())


def test_a_terminals_interrupt_does_not_reach_an_engine_that_is_still_imported() -> None:
    program = """
import os, runpy, signal, sys

class Interrupt:
    @staticmethod
    def find_spec(name, *_):
        if name == "nanovllm_cli.llm":
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), signum)
            sys.exit(7)

sys.meta_path.insert(0, Interrupt)
runpy.run_module("nanovllm_cli.server.engine_process", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=child_environment(), timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
