"""What tests cost, as measured (costs.txt, which scripts/test_costs.py writes), and how much of them continuous integration runs.

A test is named as in `test_x.py::test_y`, without its case. One that is not in the table costs less than 0.3 s, or is new: all
of it is run. conftest.py applies what is decided here; nothing here knows of pytest.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("costs.txt")
SECONDS = 0.065
"""What a run spends on a test, about: of its cases, as many as fit."""
DEAR = 0.4
"""A test of which one case takes longer takes turns: it is run in one of so many commits that its part of each is SECONDS."""
RAREST = 32
"""But in one of so many, at the least."""
ALWAYS = ("test_compile_gate.py::", "test_sanitizers.py::")


class Cost(NamedTuple):
    """Of all cases of a test together, with nothing in the caches."""

    seconds: float
    cases: int

    @property
    def each(self) -> float:
        return self.seconds / self.cases


def read(file: Path = FILE) -> dict[str, Cost]:
    lines = [line.split() for line in file.read_text().splitlines()]
    return {name: Cost(float(seconds), int(cases)) for seconds, cases, name in lines}


def write(costs: Mapping[str, Cost], file: Path = FILE) -> None:
    """By name, so that a difference shows what has become dearer."""
    lines = [f"{cost.seconds:7.1f} {cost.cases:5} {name}\n" for name, cost in sorted(costs.items())]
    file.write_text("".join(lines))


def is_whole(name: str) -> bool:
    """What finds planted errors, and what guards every kernel, is run in all of its cases."""
    return "planted" in name or name.startswith(ALWAYS)


def num_cases(name: str, cost: Cost | None) -> int | None:
    """How many of its cases are run; None: all."""
    if cost is None or cost.seconds <= SECONDS or is_whole(name):
        return None
    return max(1, int(SECONDS / cost.each))


def waiting(costs: Mapping[str, Cost], turn: int) -> set[str]:
    """Tests whose turn it is not. turn: of the commit; each test has one among RAREST that follow each other.

    They lie in a row by their costs, each as long as the part of commits that run it, and those are run in which a comb's teeth
    stand, which are 1 apart: what a turn takes is about the same each time.
    """
    dear = {name: cost.each for name, cost in costs.items() if cost.each > DEAR and not is_whole(name)}
    left, end = set(), Fraction(turn % RAREST, RAREST)
    for name in sorted(dear, key=lambda name: (-dear[name], name)):
        start, end = end, end + Fraction(1, _commits(dear[name]))
        if start // 1 == end // 1:
            left.add(name)
    return left


def _commits(seconds: float) -> int:
    return min(RAREST, math.ceil(seconds / SECONDS))


def seconds_in_ci(costs: Mapping[str, Cost], turn: int) -> float:
    left = waiting(costs, turn)
    run = {name: cost for name, cost in costs.items() if name not in left}
    return sum(cost.each * (num_cases(name, cost) or cost.cases) for name, cost in run.items())


def seconds_of_files(names: Iterable[str], costs: Mapping[str, Cost]) -> dict[str, float]:
    """names: of tests, one for each case that will be run."""
    seconds: dict[str, float] = {}
    for name in names:
        file = name.partition("::")[0]
        seconds[file] = seconds.get(file, 0.0) + (costs[name].each if name in costs else 0.0)
    return seconds


def turn_of(folder: Path) -> int:
    """The number of the commit that is checked out there; its hash where the history is cut off; 0 without git."""
    try:
        shallow, commit = _git(folder, "rev-parse", "--is-shallow-repository", "HEAD").split()
        return int(commit, 16) if shallow == "true" else int(_git(folder, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return 0


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout
