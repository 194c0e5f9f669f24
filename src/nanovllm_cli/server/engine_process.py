"""The process that holds a model: `python -m nanovllm_cli.server.engine_process FD`. FD is its end of a socket pair.

It loads what the first message says, then steps while anything is unfinished, and tells after each step what the answers got.
It knows nothing of HTTP, templates or tools. It ends when the other end of the pair does.
"""

from __future__ import annotations

import signal

from nanovllm_cli.collector import come_seldom, keep_loaded

if __name__ == "__main__":  # before the imports, which take seconds
    come_seldom()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # a terminal, or systemd, tells every process; the server lets answers finish

import gc
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import LostError, NanovllmError
from nanovllm_cli.llm import LLM
from nanovllm_cli.progress import Unit
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.messages import (
    HEADER,
    MAX_MESSAGE_BYTES,
    Abort,
    Alive,
    Embed,
    Embedded,
    Facts,
    Failed,
    FromEngine,
    Keep,
    Kept,
    Loading,
    Output,
    Ready,
    Refused,
    Start,
    Step,
    ToEngine,
    decode_to_engine,
    encode,
)
from nanovllm_cli.server.outbox import Outbox
from nanovllm_cli.vision_spec import TokenIds

IDLE_SECONDS = 1.0

logger = logging.getLogger(__name__)


def main(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    start = channel.receive()
    assert isinstance(start, Start)
    progress = _Progress(channel)
    try:
        llm = LLM(
            start.model,
            config=start.config,
            offline=True,
            chat_template=start.chat_template,
            tool_format=start.tool_format,
            reasoning_format=start.reasoning_format,
            shows_calls=True,
            progress=progress,
        )
    except NanovllmError as error:
        channel.send(Failed(type(error).__name__, error.message, error.hint))
        os._exit(1)
    try:
        llm.prepare([SamplingParams(constraint=Constraint("json_object"))])  # half a second that steps would wait for, later
    except NanovllmError as error:
        logger.warning("%s: forms of answers are not to be had from this vocabulary: %s", start.model, error.message)
    kept = None if start.kept is None else _Kept(llm, Path(start.kept))
    if kept is not None:
        progress.stage("reading the prompt cache", None, "tokens")
        kept.read()
    gc.collect()
    keep_loaded()
    channel.send(Ready(_facts(llm, start.config)))
    try:
        Loop(llm, channel, kept).run()
    except LostError as error:
        if error.__cause__ is not None:  # else it has been said
            logger.error("%s", error.message, exc_info=error.__cause__)
        os._exit(1)


class Channel:
    """This process's end of the socket pair: messages out, and a thread that reads those that come in. Where the other end is
    closed, or breaks the protocol, this process ends at once: nobody is left to answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        """Waits where the other side does not read."""
        with self._sending:
            self._sock.sendall(encode(message))

    def take(self, timeout: float) -> Iterator[ToEngine]:
        """The messages that are there. Waits up to `timeout` seconds for the first, 0 not at all."""
        try:
            yield self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def receive(self) -> ToEngine:
        """The next message, whenever it comes."""
        return self._inbox.get()

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while header := stream.read(HEADER.size):
                    (size,) = HEADER.unpack(header)
                    body = stream.read(size) if size <= MAX_MESSAGE_BYTES else b""
                    if len(body) < size:
                        break
                    self._inbox.put(decode_to_engine(body))
        finally:
            os._exit(0)


class Loop:
    """One turn: what came in, then a step."""

    def __init__(self, llm: LLM, channel: Channel, kept: _Kept | None) -> None:
        self._llm = llm
        self._kept = kept
        self._engine = llm.engine
        self._channel = channel
        self._outbox = Outbox(llm.engine)
        if llm.sight is not None:  # which may be long at an image, and at several in one step
            llm.sight.told = lambda: channel.send(Alive(llm.engine.stats()))

    def run(self) -> None:
        while True:
            messages = list(self._channel.take(0 if self._engine.has_unfinished() else IDLE_SECONDS))
            if messages:
                self._tell(everything=True)  # the next step may be a long one, which reads prompts
            for message in messages:
                self._handle(message)
            if not self._engine.has_unfinished():
                self._llm.check()
                self._channel.send(Alive(self._engine.stats()))
                continue
            self._engine.advance()
            self._tell()

    def _tell(self, *, everything: bool = False) -> None:
        news = self._outbox.take(everything=everything)
        if news is None:
            return
        for embedded in news:
            if isinstance(embedded, Embedded):
                self._channel.send(embedded)
        self._channel.send(Step([each for each in news if isinstance(each, Output)], self._engine.stats()))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Start):
            raise ValueError("a second start")
        if isinstance(message, Keep):
            self._channel.send(self._kept.write() if self._kept is not None else Kept(0))
            return
        request_id = str(message.request_id)
        if isinstance(message, Abort):
            self._engine.abort(request_id)
            self._outbox.drop(request_id)
            return
        try:
            tells_reading = False
            salt = self._llm.cache_salt(len(message.prompt_ids), message.cache_salt)
            prompt = TokenIds(message.prompt_ids, message.images)
            if isinstance(message, Embed):
                pooling, priority, lora = message.pooling, message.priority, message.lora
                self._engine.embed(request_id, prompt, pooling, priority=priority, cache_salt=salt, lora=lora)
            else:
                self._engine.add(request_id, prompt, message.params, priority=message.priority, cache_salt=salt)
                tells_reading = message.tells_reading
            self._outbox.open(request_id, tells_reading=tells_reading)
        except NanovllmError as error:
            self._channel.send(Refused(message.request_id, type(error).__name__, error.message, error.hint))


class _Kept:
    """The file of what the model has read, from one process to the next."""

    def __init__(self, llm: LLM, path: Path) -> None:
        self._llm, self._path = llm, path
        self._num_written = 0

    def read(self) -> None:
        self._llm.load_kv(self._path)
        self._num_written = self._llm.engine.kv_files.num_registered

    def write(self) -> Kept:
        registered = self._llm.engine.kv_files.num_registered
        if registered == self._num_written:
            return Kept(0)
        try:
            count = self._llm.save_kv(None, self._path)
        except NanovllmError as error:
            return Kept(0, error.message)
        self._num_written = registered
        return Kept(count)


def _facts(llm: LLM, config: EngineConfig) -> Facts:
    return Facts(
        context_len=llm.context_len,
        vocab_size=llm.spec.vocab_size,
        vector_size=llm.vector_size,
        block_size=config.block_size,
        num_parameters=llm.num_parameters,
        weight_bytes=llm.weight_bytes,
        kv_bytes=llm.kv_bytes,
        dtype=str(llm.dtype).removeprefix("torch."),
        device="cpu" if llm.threads is not None else "cuda",
        max_num_seqs=config.max_num_seqs,
        pooling=llm.pooling,
        has_head=llm.spec.has_head,
        ranks=llm.embedding.ranks,
        classifies=bool(llm.embedding.labels),
        vision=llm.vision,
        hearing=llm.hearing,
    )


class _Progress:
    """Tells the server how loading goes, a hundred times a stage at the most."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stage, self._total, self._unit = "", 0, ""
        self._done = self._told = 0

    def stage(self, name: str, total: int | None, unit: Unit) -> None:
        self._stage, self._total, self._unit = name, total or 0, unit
        self._done = self._told = 0
        self._channel.send(Loading(name, 0, self._total, unit))

    def advance(self, n: int) -> None:
        self._done += n
        if (self._done - self._told) * 100 >= self._total:
            self._told = self._done
            self._channel.send(Loading(self._stage, self._done, self._total, self._unit))

    def done(self) -> None:
        pass

    def note(self, message: str) -> None:
        self._channel.send(Loading(note=message))

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()


if __name__ == "__main__":
    main(int(sys.argv[1]))
