"""Constraints that strangers send are tried out in child processes first, so that only what compiles in time reaches an engine.

A child has limits on memory and CPU time, and is killed and replaced when it takes too long or dies. Children talk in lines of
JSON over pipes; the first is started when it is needed. Verdicts are kept by the digest of what was asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm_cli.children import child_environment
from nanovllm_cli.constrain.checker import TOO_INVOLVED
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import BusyError, UsageError

_MAX_KEPT = 4096
_START_SECONDS = 60.0


class _Verdict(NamedTuple):
    """message: None for a constraint that is fine."""

    message: str | None
    hint: str | None


@dataclass
class CheckPool:
    """Belongs to one event loop. processes: most children at once. seconds: for one constraint. max_waiting: most constraints
    that are being tried or wait for it."""

    processes: int = 2
    seconds: float = 5.0
    max_waiting: int = 128
    _verdicts: OrderedDict[bytes, asyncio.Task[_Verdict]] = field(default_factory=OrderedDict, init=False)
    _idle: list[_Child] = field(default_factory=list, init=False)
    _num_waiting: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.processes)

    async def check(self, constraint: Constraint) -> None:
        """Raises UsageError for what does not compile in any vocabulary, or takes too much; BusyError where too many wait."""
        key = hashlib.blake2b(f"{constraint.kind}:{constraint.text}".encode("utf-8", "surrogatepass")).digest()
        task = self._verdicts.get(key)
        if task is None:
            if self._num_waiting >= self.max_waiting:
                raise BusyError("too many schemas and grammars are waiting to be checked", "try again in a moment")
            self._num_waiting += 1
            task = self._verdicts[key] = asyncio.create_task(self._tried(constraint))
            task.add_done_callback(lambda done: self._over(key, done))
        self._verdicts.move_to_end(key)
        verdict = await asyncio.shield(task)  # who leaves does not take it from others
        if verdict.message is not None:
            raise UsageError(verdict.message, verdict.hint)

    async def close(self) -> None:
        """Ends all children. What is being tried ends with CancelledError."""
        tasks = [task for task in self._verdicts.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        children, self._idle = self._idle, []
        for child in children:
            await child.kill()

    def _over(self, key: bytes, task: asyncio.Task[_Verdict]) -> None:
        self._num_waiting -= 1
        if task.cancelled() or task.exception() is not None:  # no verdict: it may be asked again
            self._verdicts.pop(key, None)
        while len(self._verdicts) > _MAX_KEPT and next(iter(self._verdicts.values())).done():
            self._verdicts.popitem(last=False)

    async def _tried(self, constraint: Constraint) -> _Verdict:
        async with self._room:
            while self._idle and self._idle[-1].process.returncode is not None:
                self._idle.pop()  # died of something else
            child = self._idle.pop() if self._idle else await _Child.start(self.seconds)
            try:
                verdict = await asyncio.wait_for(child.ask(constraint), self.seconds)
            except TimeoutError:
                await child.kill()
                return _Verdict(f"the constraint takes more than {self.seconds:g} s to compile", "make it smaller")
            except (EOFError, OSError):
                await child.kill()
                return _Verdict(TOO_INVOLVED, "make it smaller")
            except BaseException:
                await child.kill()
                raise
            self._idle.append(child)
            return verdict


@dataclass
class _Child:
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, seconds: float) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "nanovllm_cli.constrain.checker", str(math.ceil(seconds)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, env=child_environment(),
        )  # fmt: skip
        child = cls(process)
        try:
            await asyncio.wait_for(child.answer(), _START_SECONDS)
        except BaseException:
            await child.kill()
            raise
        return child

    async def ask(self, constraint: Constraint) -> _Verdict:
        """Raises EOFError or OSError where the child died of it."""
        assert self.process.stdin is not None
        line = json.dumps({"kind": constraint.kind, "text": constraint.text})
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()
        return await self.answer()

    async def answer(self) -> _Verdict:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return _Verdict(**json.loads(line))

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
