"""A process for tests that does what `rank_process` does, for one model after the other: to start one takes two seconds.

    rank_server.py FD    FD: a socket; of each message's two descriptors one is a connection's end, the other the shared memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from nanovllm_cli.children import child_environment


class RankServer:
    """start: what stands in for `ranks.start_process`."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=child_environment()
            )
        self.num_started = 0

    def start(self, line: int, handle: int, processors: set[int]) -> _Started:
        assert not processors, "as on a machine with one memory"
        socket.send_fds(self._sock, [b"."], [line, handle])
        self.num_started += 1
        return _Started()

    def close(self) -> None:
        self._sock.close()
        self._process.wait(10)


class _Started:
    """A Popen of something that ends by itself."""

    def wait(self, seconds: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        raise AssertionError("it has ended")


def main(fd: int) -> None:
    from nanovllm_cli.engine.follower import follow

    with socket.socket(fileno=fd) as sock:
        while True:
            _, handles, _, _ = socket.recv_fds(sock, 1, 2)
            if not handles:
                return
            line, handle = handles
            with contextlib.suppress(EOFError, OSError):
                follow(line, handle, at_end=lambda: None)
            os.close(handle)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(int(sys.argv[1]))
