"""One of the processes that compute a model together, but the first: `python -m nanovllm_cli.engine.rank_process FD HANDLE CPUS`.

FD is its end of a socket pair, HANDLE the memory that all share, CPUS the processors that it is to keep to, if any. It loads what
the first message says, then does what comes, and ends when the other end of the pair does.
"""

from __future__ import annotations

import os
import signal
import sys


def main(fd: int, handle: int, processors: set[int]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # a terminal tells every process; this one ends with the first
    if processors:
        os.sched_setaffinity(0, processors)  # before libraries count them, and make threads
    from nanovllm_cli.engine.follower import follow

    follow(fd, handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), {int(word) for word in sys.argv[3].split(",") if word})
