"""An engine process's end of the socket pair: messages out, and a thread that reads those that come in."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator

from nanovllm_cli.server.messages import HEADER, MAX_MESSAGE_BYTES, FromEngine, ToEngine, decode_to_engine, encode


class Channel:
    """Where the other end is closed, or breaks the protocol, this process ends at once: nobody is left to answer."""

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
