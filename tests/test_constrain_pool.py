"""Constraints from strangers: what explodes or nests is refused in time, in a child process that may die of it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import nanovllm_cli
from nanovllm_cli.constrain import pool
from nanovllm_cli.constrain.grammar import check
from nanovllm_cli.constrain.pool import CheckPool
from nanovllm_cli.constraint import MAX_CONSTRAINT_CHARS, Constraint
from nanovllm_cli.errors import BusyError, UsageError

SECONDS = 1.0


class Loop:
    """An event loop with a pool in it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.pool = CheckPool(processes=1, seconds=SECONDS, max_waiting=4)

    def __call__(self, work: Callable[[CheckPool], Awaitable[object]]) -> object:
        async def go() -> object:
            return await work(self.pool)

        return self.runner.run(go())

    def check(self, kind: str, text: str = "") -> None:
        self(lambda pool: pool.check(Constraint(kind, text)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop(lambda pool: pool.close())
    loop.runner.close()


def stop(pid: int) -> None:
    """Returns when it has stopped: which of its threads a signal meets first is the system's choice, and the others run on for as
    long as that one waits for a processor."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def schema_of(properties: int, objects: int) -> str:
    one = {"type": "object", "properties": {f"p{i}": {} for i in range(properties)}}
    return json.dumps({"anyOf": [one] * objects}, separators=(",", ":"))


EXPLODING = json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(5)]} for i in range(12)]})
ATTACKS: list[tuple[str, str, str]] = [
    ("lark", 'start: "a' + "(" * 60000, ""),
    ("lark", "start: " + "(" * 60000 + '"a"' + ")" * 60000, "nested"),
    ("gbnf", "root ::= " + "(" * 60000 + '"a"' + ")" * 60000, "nested"),
    ("gbnf", 'root ::= ["] ' + "(" * 60000 + '"a"' + ")" * 60000, "nested"),
    ("gbnf", "root ::= " + '"a"{2000} ' * 100, "parts"),
    ("gbnf", "root ::= " + "[a" * 90, "not closed"),
    ("regex", "(" * 60000 + "a" + ")" * 60000, "nested"),
    ("regex", "[" * 120000, ""),
    ("json_schema", '{"items":' * 20000 + "{}" + "}" * 20000, "nested"),
    ("json_schema", "[" * 120000, "nested"),
    ("json_schema", schema_of(3000, 1), "3000 members"),
    ("json_schema", json.dumps({"enum": [0] * 60000}, separators=(",", ":")), "50000 values"),
    ("json_schema", EXPLODING, ""),
    ("json_schema", json.dumps({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), ""),
    ("choice", json.dumps([str(i) for i in range(30000)]), "30000 choices"),
    ("choice", "[" * 100000, "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "said"), ATTACKS, ids=lambda value: str(value)[:24])
def test_what_explodes_is_refused_at_once(kind: str, text: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError) as caught:
        check(Constraint(kind, text))  # type: ignore[arg-type]
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert time.process_time() - began < 5.0


def test_what_is_huge_is_refused_before_it_is_read() -> None:
    with pytest.raises(UsageError):
        Constraint("json_schema", json.dumps({"description": "x" * (1 << 20)}))
    check(Constraint("json_schema", json.dumps({"type": "string", "description": "x" * (MAX_CONSTRAINT_CHARS - 100)})))


@pytest.mark.parametrize("regex", ["a{1,99999}", "(a{1,99999}){1,99999}", "(a|aa)+$", "(a|b)*a(a|b){25}", "(.{0,1000}x){0,1000}"])
def test_what_only_looks_bad_is_no_work(regex: str) -> None:
    began = time.process_time()
    check(Constraint("regex", regex))
    assert time.process_time() - began < 2.0


def test_verdicts_come_from_a_child(loop: Loop) -> None:
    for _ in range(2):
        loop.check("json_object")
        loop.check("regex", "a+")
        loop.check("lark", 'start: <|tool|> <[5-7]> %json {"type": "object"}')
        with pytest.raises(UsageError, match="unclosed"):
            loop.check("regex", "(")


def test_children_run_this_very_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be installed, or none: this one may have been found by the folder it was started in."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    loop = Loop()
    loop.check("regex", "a+")
    (child,) = loop.pool._idle
    environment = Path(f"/proc/{child.process.pid}/environ").read_text().split("\0")
    loop(lambda pool: pool.close())
    loop.runner.close()
    assert f"PYTHONPATH={Path(nanovllm_cli.__file__).resolve().parents[1]}" in environment


def test_a_child_that_takes_too_long_is_replaced(loop: Loop) -> None:
    """Stopped, as a schema that takes a second on one machine is too large in less on another."""
    loop.check("regex", "before it")
    for word in ("one", "two"):
        (child,) = loop.pool._idle
        stop(child.process.pid)
        with pytest.raises(UsageError, match="takes more than 1 s"):
            loop.check("regex", word)
        loop.check("regex", f"after {word}")


def test_a_child_that_dies_is_replaced(loop: Loop) -> None:
    loop.check("regex", "b+")
    (child,) = loop.pool._idle
    os.kill(child.process.pid, signal.SIGKILL)
    loop(lambda pool: child.process.wait())
    loop.check("regex", "c+")

    async def dies_of_it(pool: CheckPool) -> None:
        (now,) = pool._idle
        stop(now.process.pid)
        asking = asyncio.create_task(pool.check(Constraint("regex", "d+")))
        await asyncio.sleep(0)
        os.kill(now.process.pid, signal.SIGKILL)
        await asking

    with pytest.raises(UsageError, match="too involved"):
        loop(dies_of_it)
    loop.check("regex", "e+")


def test_a_queue_has_an_end_and_who_leaves_takes_nothing_from_others(loop: Loop) -> None:
    async def crowd(pool: CheckPool) -> None:
        tasks = [asyncio.create_task(pool.check(Constraint("regex", f"x{i // 2}"))) for i in range(8)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(BusyError):
            await pool.check(Constraint("regex", "one more"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [None] * 7
        await pool.check(Constraint("regex", "one more"))

    loop(crowd)


def test_verdicts_that_were_asked_for_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def verdict(self: CheckPool, constraint: Constraint) -> object:
        tried.append(constraint.text)
        if tried.count("fails") == 1 and constraint.text == "fails":
            raise OSError("no child could be started")
        return pool._Verdict(None, None)

    async def go() -> None:
        checks = CheckPool()
        for text in ("a", "\ud800", "a", "c", "a", "\ud800"):
            await checks.check(Constraint("regex", text))
        with pytest.raises(OSError, match="no child"):
            await checks.check(Constraint("regex", "fails"))
        await checks.check(Constraint("regex", "fails"))

    monkeypatch.setattr(CheckPool, "_tried", verdict)
    monkeypatch.setattr(pool, "_MAX_KEPT", 2)
    asyncio.run(go())
    assert tried == ["a", "\ud800", "c", "\ud800", "fails", "fails"]


def chain(count: int) -> str:
    """What llguidance goes down into, a stack frame or two for each rule."""
    rules = [f'r{i}: "a" r{i + 1} | "b{i}"' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "z"'])


def test_what_a_child_lets_through_does_not_end_the_engine() -> None:
    """Not even where it was started with a stack without limit, which an engine's threads have none of."""
    loop, before = Loop(), resource.getrlimit(resource.RLIMIT_STACK)
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (before[1], before[1]))
        loop.check("lark", chain(2000))
        with pytest.raises(UsageError, match="too involved"):
            loop.check("lark", chain(4000))
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)
        loop(lambda pool: pool.close())
        loop.runner.close()
    code = (
        "import sys; from nanovllm_cli.constrain.compiler import Compiler; from nanovllm_cli.constraint import Constraint\n"
        "from nanovllm_cli.constrain.vocabulary import byte_vocabulary; from nanovllm_cli.sampling_params import SamplingParams\n"
        "compiler = Compiler(byte_vocabulary)\n"
        "assert compiler.guide(SamplingParams(constraint=Constraint('lark', sys.stdin.read())), ())\n"
        "compiler.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=chain(3500), text=True, capture_output=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
