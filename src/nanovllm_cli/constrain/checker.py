"""A child process of `pool.py`: a constraint comes in as a line of JSON, and so does the verdict go out. It may be killed
at any time."""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

from nanovllm_cli import system
from nanovllm_cli.constrain.grammar import CHECKED_STACK_BYTES, check, stack_of
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import NanovllmError

TOO_INVOLVED = "the constraint is too large or too involved"
_MEMORY_BYTES = 1 << 30
"""Beyond what a child has at its start."""


def main(cpu_seconds: int) -> None:
    """In a thread of its own: how deep a stack may go is no matter of how this process was started."""
    with stack_of(CHECKED_STACK_BYTES):
        thread = threading.Thread(target=_answer, args=(cpu_seconds,))
        thread.start()
    thread.join()


def _answer(cpu_seconds: int) -> None:
    """Reads standard input until it is closed. cpu_seconds: for one constraint; beyond them the system ends this process, even if
    whoever started it is gone."""
    check(Constraint("json_object"))  # what is made once is there before the limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    system.limit_address_space(_MEMORY_BYTES)
    _say({"message": None, "hint": None})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds, resource.RLIM_INFINITY))
        _say(_verdict(json.loads(line)))


def _verdict(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        check(Constraint(asked["kind"], asked["text"]))
    except NanovllmError as error:
        return {"message": error.message, "hint": error.hint}
    except (MemoryError, RecursionError):
        return {"message": TOO_INVOLVED, "hint": None}
    return {"message": None, "hint": None}


def _say(verdict: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
