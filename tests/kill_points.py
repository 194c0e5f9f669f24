"""Not tests: work is killed at random points, wherever it is and however slow the machine.

A run without an end is counted in function calls. Each further one dies of a timer that it sets itself at a random one of them:
a moment later, in the middle of whatever it then does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

NUM_POINTS = int(os.environ.get("TEST_NANOVLLM_KILLS", "10"))
"""Of each test: few where every commit is tested, 50 where somebody asks for them."""
_MOMENT = 0.002


def killed_at_random_points(work: Callable[[], None], check: Callable[[int], None], count: int = NUM_POINTS) -> int:
    """Runs work `count` times, each in a child of this process, which must have no threads. check(number) after each. How many
    of them were killed: those that began with what an earlier one left may be over sooner."""
    dice = random.Random(5)
    calls = _num_calls(work)
    check(0)
    killed = 0
    for number in range(1, count + 1):
        point, moment = dice.randrange(calls), dice.uniform(1e-6, _MOMENT)
        pid = os.fork()
        if pid == 0:
            _count_calls(point, lambda moment=moment: signal.setitimer(signal.ITIMER_REAL, moment))
            work()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGALRM), status
        killed += os.WIFSIGNALED(status)
        check(number)
    return killed


def _num_calls(work: Callable[[], None]) -> int:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        counted = _count_calls(-1, lambda: None)
        work()
        sys.setprofile(None)
        os.write(writing, counted[0].to_bytes(8, "big"))
        os._exit(0)
    calls = int.from_bytes(os.read(reading, 8), "big")
    assert os.waitpid(pid, 0)[1] == 0
    return calls


def _count_calls(point: int, then: Callable[[], object]) -> list[int]:
    """[how many there have been]; at the one of this number `then` is called."""
    counted = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[0] += 1
        if counted[0] == point + 1:
            sys.setprofile(None)
            then()

    sys.setprofile(count)
    return counted
