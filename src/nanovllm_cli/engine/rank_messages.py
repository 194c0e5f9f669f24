"""What crosses between the processes of one model: msgspec structs as msgpack, over a socket pair that nobody else can open.
Nothing is pickled. What they compute does not cross here, but in the memory that they share.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.loaded_model import Sizes
from nanovllm_cli.engine.plan import Plan

MAX_MESSAGE_BYTES = 1 << 30
PARENT_SECONDS = 1
Received = TypeVar("Received")


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base of all; told apart by their names."""


# ---- from the first process ----


class Begin(Message):
    """What to load, as number `rank`. model: a checkpoint's path on this machine."""

    model: str
    config: EngineConfig
    rank: int


class Measure(Message):
    """The largest step is run, for what it leaves of a device's memory."""


class Make(Message):
    """The KV cache, as large as everybody's."""

    num_blocks: int
    num_states: int
    num_parts: int


class Run(Message):
    """A step. Nobody answers."""

    plan: Plan


class Take(Message):
    """What blocks of the cache hold here, or states, which have no parts."""

    which: list[int]
    parts: list[int] | None


class Put(Message):
    """What `Taken` said, into others. Nobody answers."""

    which: list[int]
    parts: list[int] | None
    data: bytes


# ---- to it ----


class Loaded(Message):
    """kind: of its platform."""

    sizes: Sizes
    kind: str


class Measured(Message):
    """budget: bytes that a KV cache may take there."""

    budget: int


class Failed(Message):
    """It can't load, or run a step, for an error of `errors`, by name."""

    kind: str
    message: str
    hint: str | None


class Taken(Message):
    data: bytes


ToRank = Begin | Measure | Make | Run | Take | Put
FromRank = Loaded | Measured | Failed | Taken


class Line(Generic[Received]):
    """An end of a connection. kinds: what may come. at_end: called, on a thread of its own, once the other process has ended or
    either has closed the line, whatever this one is waiting for. parent: the other process, where it is this one's parent, and a
    fork of it may keep the line open."""

    def __init__(self, handle: int, kinds: object, at_end: Callable[[], None], parent: int | None = None) -> None:
        self._connection = Connection(handle)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(kinds)
        self._at_end = at_end
        self._parent = parent
        self._watch = threading.Thread(target=self._wait_for_end, name="rank", daemon=True)
        self._watch.start()

    def send(self, message: Message) -> None:
        """OSError where nobody is there to read."""
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def receive(self) -> Received:
        """The next message, whenever it comes. EOFError or OSError when none will."""
        return self._decoder.decode(self._connection.recv_bytes(MAX_MESSAGE_BYTES))

    def end(self) -> None:
        """Both ends see it. Where nobody receives any more."""
        with contextlib.suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._watch.join()
        self._connection.close()

    def _wait_for_end(self) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        while not poll.poll(PARENT_SECONDS * 1000):
            if self._parent is not None and os.getppid() != self._parent:
                break
        self._at_end()
