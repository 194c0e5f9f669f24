"""A process for tests that does what `rank_process` does, for one model after the other: to start one takes two seconds.

    rank_server.py FD [gpu]    FD: a socket; of each message's two descriptors one is a connection's end, the other the shared
                               memory. gpu: the process has an emulated one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from nanovllm_cli.children import child_environment
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.progress import LoadProgress


class RankServer:
    """start: what stands in for `ranks.start_process`."""

    def __init__(self, *, has_gpu: bool = False) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *(["gpu"] if has_gpu else [])],
                pass_fds=(theirs.fileno(),), env=child_environment(),
            )  # fmt: skip
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


def on_emulation(config: EngineConfig, progress: LoadProgress | None) -> CudaPlatform:
    from emulation.device import EmulatedDevice

    return CudaPlatform(config, EmulatedDevice(), progress)


def main(fd: int, *, has_gpu: bool) -> None:
    from nanovllm_cli.engine.follower import follow
    from nanovllm_cli.engine.platforms import platform_of

    make_platform = on_emulation if has_gpu else platform_of

    with socket.socket(fileno=fd) as sock:
        while True:
            _, handles, _, _ = socket.recv_fds(sock, 1, 2)
            if not handles:
                return
            line, handle = handles
            with contextlib.suppress(EOFError, OSError):
                follow(line, handle, lambda: None, make_platform)
            os.close(handle)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(int(sys.argv[1]), has_gpu=len(sys.argv) > 2)
