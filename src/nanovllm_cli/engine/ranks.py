"""The other processes that compute a model together with this one: `python -m nanovllm_cli.engine.rank_process`.

This process plans, draws and answers; the others do each of its steps on their share of the weights (distributed/division.py).
Each loads its part from the same files, and has a share of the processors, or a GPU of its own. They end when this one does, or
closes its ends of their connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm_cli import errors, system
from nanovllm_cli.children import child_environment
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.distributed.group import Meeting, memory_bytes
from nanovllm_cli.engine.loaded_model import Sizes
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.engine.rank_messages import (
    Begin,
    Failed,
    FromRank,
    Line,
    Loaded,
    Make,
    Measure,
    Measured,
    Put,
    Run,
    Take,
    Taken,
    ToRank,
)
from nanovllm_cli.errors import LostProcessError, NanovllmError, UnsupportedError
from nanovllm_cli.processors import default_threads, shares_of_processors

END_SECONDS = 5.0
logger = logging.getLogger(__name__)


class Ranks:
    """Starts config.tensor_parallel_size - 1 processes, which load the checkpoint at `path` meanwhile. config: this process's.
    on_gpus: on those behind the one that config names.

    Raises UnsupportedError where the system can't, and what the others' loading raises; LostProcessError when one has ended.
    """

    def __init__(self, path: str, config: EngineConfig, *, on_gpus: bool) -> None:
        size = config.tensor_parallel_size
        self.config = config
        if not on_gpus:
            self.config = replace(config, threads=max(1, (config.threads or default_threads()) // size))
        shares = None if on_gpus else shares_of_processors(size)
        before = None if shares is None else os.sched_getaffinity(0)
        self._others: list[_Other] = []
        self._end = weakref.finalize(self, _end, self._others, before, os.getpid())
        handle = system.shared_memory(memory_bytes(size))
        try:
            self.meeting = Meeting(0, size, handle)
            for rank in range(1, size):
                self._others.append(_Other(rank, handle, shares[rank] if shares else None, self.meeting))
        except OSError as failure:
            self.close()
            raise UnsupportedError(f"{size} processes can't be started: {failure.strerror}", "take fewer of them") from failure
        finally:
            os.close(handle)
        if shares is not None:
            _keep_to(shares[0])
        others = replace(
            self.config, draft_model=None, draft_quant=None, num_speculative_tokens=config.max_guesses, cache_salt_secret=None
        )
        for rank, other in enumerate(self._others, 1):
            other.send(Begin(path, replace(others, device=gpu_of(config, rank)) if on_gpus else others, rank))
        self._sizes: list[Sizes] = []

    def wait(self, kind: str) -> None:
        """Until all have loaded. kind: of this process's platform."""
        for answer in self._answers():
            assert isinstance(answer, Loaded)
            if answer.kind != kind:
                raise UnsupportedError(
                    f"GPUs of several kinds, that compute a model together: {kind}; {answer.kind}",
                    "choose others by CUDA_VISIBLE_DEVICES",
                )
            self._sizes.append(answer.sizes)

    def _answers(self) -> Iterator[FromRank]:
        for other in self._others:
            answer = other.receive()
            if isinstance(answer, Failed):
                kind = getattr(errors, answer.kind, NanovllmError)
                raise kind(answer.message, answer.hint)
            yield answer

    def measure(self) -> None:
        """Has the others run the largest step, as this process has to now, to see what it leaves of their memory."""
        for other in self._others:
            other.send(Measure())

    def least_share(self) -> float:
        """What that was, of the one that can keep the fewest blocks and states: as many as this."""
        found = []
        for answer, sizes in zip(self._answers(), self._sizes, strict=True):
            assert isinstance(answer, Measured)
            found.append(answer.budget / (sizes.block_bytes + sizes.state_bytes))
        return min(found)

    def are_like(self, block_bytes: int, near_bytes: int) -> bool:
        """Whether layers with a window have the same share of a block in each of the others as where it is of so many bytes."""
        return all(each.near_bytes * block_bytes == near_bytes * each.block_bytes for each in self._sizes)

    @property
    def sizes(self) -> Sizes:
        """The sums over the others."""
        return Sizes(*map(sum, zip(*self._sizes, strict=True)))

    def make_caches(self, num_blocks: int, num_states: int, num_parts: int) -> None:
        for other in self._others:
            other.send(Make(num_blocks, num_states, num_parts))

    def run(self, plan: Plan) -> None:
        """Has the others begin a step; this process has to do the same one now."""
        self.check()
        for other in self._others:
            other.send(Run(plan._replace(new=[], finished=[])))

    def check(self) -> None:
        """Raises LostProcessError where what was computed since the last time is of no use."""
        if self.meeting.is_broken:
            raise LostProcessError("one of the processes that compute the model has ended", "its own words, if any, are above")

    def take(self, which: list[int], parts: list[int] | None) -> list[torch.Tensor]:
        """Of each of the others, what these blocks of its cache hold, or states, which have no parts, [len(which), bytes]."""
        self.check()
        found = []
        try:
            for other in self._others:
                other.send(Take(which, parts))
            for other in self._others:
                answer = other.receive()
                assert isinstance(answer, Taken)
                found.append(torch.frombuffer(bytearray(answer.data), dtype=torch.uint8).view(len(which), -1))
        except BaseException:  # an answer may be left on a line
            self.meeting.break_off()
            raise
        return found

    def put(self, which: list[int], parts: list[int] | None, rows: torch.Tensor) -> None:
        """Into each of the others what `take` has found, side by side."""
        self.check()
        sizes = [each.state_bytes if parts is None else each.block_bytes for each in self._sizes]
        for other, part in zip(self._others, torch.split(rows, sizes, dim=1), strict=True):
            other.send(Put(which, parts, part.contiguous().numpy().tobytes()))

    def close(self) -> None:
        """Ends the others. So does to forget this object."""
        self._end()


class _Other:
    """One of them. processors: those that it keeps to, if it does. When it ends nobody of the group waits any more."""

    def __init__(self, rank: int, handle: int, processors: set[int] | None, meeting: Meeting) -> None:
        self._rank = rank
        self._meeting = meeting
        self._is_closing = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs.fileno(), handle, processors or set())
        self._line: Line[FromRank] = Line(ours.detach(), FromRank, self._tell_end)

    def _tell_end(self) -> None:
        if not self._is_closing:
            logger.warning("process %d of those that compute the model has ended", self._rank)
        self._meeting.break_off()

    def send(self, message: ToRank) -> None:
        try:
            self._line.send(message)
        except OSError as failure:
            raise LostProcessError(f"one of the processes that compute the model has ended ({failure})") from failure

    def receive(self) -> FromRank:
        try:
            return self._line.receive()
        except (EOFError, OSError) as end:
            raise LostProcessError("one of the processes that compute the model has ended", "its own words are above") from end

    def end(self) -> None:
        """It is told to, and is not waited for."""
        self._is_closing = True
        self._meeting.break_off()  # what a GPU does goes on until then
        self._line.end()

    def close(self) -> None:
        self.end()
        self._line.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def gpu_of(config: EngineConfig, rank: int) -> str:
    """The device of a process, where config names the first one's."""
    return f"cuda:{int(config.device.partition(':')[2] or 0) + rank}"


def _end(others: list[_Other], before: set[int] | None, owner: int) -> None:
    """before: the processors that this process used, if it has been kept to some. owner: its number, which a fork of it that ends
    does not have."""
    if os.getpid() != owner:
        return
    for other in others:
        other.end()
    for other in others:
        other.close()
    if before is not None:
        _keep_to(before)


def _keep_to(processors: set[int]) -> None:
    """All threads of this process, those of kernels too."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), processors)


def start_process(line: int, handle: int, processors: set[int]) -> subprocess.Popen[bytes]:
    """See rank_process."""
    words = str(line), str(handle), ",".join(map(str, sorted(processors)))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "nanovllm_cli.engine.rank_process", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(line, handle), env=child_environment(),
    )  # fmt: skip
