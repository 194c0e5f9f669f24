"""What tests cost, from a report of pytest: tests/costs.txt, by which continuous integration chooses what it runs.

    XDG_CACHE_HOME=$(mktemp -d) CI=true PYTEST_ADDOPTS="--junitxml report.xml" make test
    python scripts/test_costs.py report.xml

Nothing may be in the caches, for so it is there. What that run left out keeps the line that it has; a run without CI leaves
nothing out. Tests of less than 0.3 s get none. Says what CI takes of those in the table.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
import costs  # noqa: E402
from costs import Cost  # noqa: E402

LEAST = 0.3


def measured(report: Path, old: dict[str, Cost]) -> dict[str, Cost]:
    """Of all tests of which a case was run. Where CI left cases out, these are taken to cost what those did that were run, but
    the dearest: it may have compiled for all. Of a single case that cannot be told, and the test keeps the line that it has."""
    seconds: dict[str, list[float]] = {}
    cases: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            _, module, *classes = case.attrib["classname"].split(".")
            name = "::".join((f"{module}.py", *classes, case.attrib["name"].partition("[")[0]))
            seconds.setdefault(name, []).append(float(case.attrib["time"]))
            for value in case.iterfind("properties/property[@name='cases']"):
                cases[name] = int(value.attrib["value"])
    all_cases = {name: _of_all(each, cases.get(name, len(each))) for name, each in seconds.items()}
    return {name: old.get(name, cost) if len(seconds[name]) == 1 < cost.cases else cost for name, cost in all_cases.items()}


def _of_all(seconds: list[float], cases: int) -> Cost:
    dearest, *others = sorted(seconds, reverse=True)
    return Cost(sum(seconds) + (cases - len(seconds)) * mean(others or [dearest]), cases)


def merged(old: dict[str, Cost], new: dict[str, Cost], defined: set[str]) -> dict[str, Cost]:
    """defined: names of tests that there are."""
    return {name: cost for name, cost in (old | new).items() if name in defined and cost.seconds >= LEAST}


def defined_in(folder: Path, names: set[str]) -> set[str]:
    texts = {file.name: file.read_text() for file in folder.glob("test_*.py")}
    scopes = {name: name.split("::")[:2] for name in names}
    return {name for name, (file, scope) in scopes.items() if re.search(rf"\b{scope}\b", texts.get(file, ""))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tests/costs.txt from a report that pytest wrote with --junitxml.")
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    old = costs.read()
    new = measured(options.report, old)
    table = merged(old, new, defined_in(TESTS, old.keys() | new.keys()))
    costs.write(table)
    print(f"{sum(cost.seconds for cost in table.values()):.0f} s in {costs.FILE.name}, of {len(table)} tests; of those CI takes")
    for turn in range(costs.RAREST):
        print(f"  {costs.seconds_in_ci(table, turn):.0f} s in turn {turn}, without {len(costs.waiting(table, turn))} tests")


if __name__ == "__main__":
    main()
