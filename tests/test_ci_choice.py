"""What continuous integration runs: by costs that are written out here, and by the table that is in use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import costs
from costs import RAREST, Cost

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import test_costs as script

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (None, None),
        (Cost(0.06, 50), None),
        (Cost(0.9, 1), 1),
        (Cost(1.2, 50), 2),
        (Cost(9.9, 11), 1),
        (Cost(30.0, 3), 1),
    ],
)
def test_as_many_cases_stay_as_fit_the_time(cost: Cost | None, expected: int | None) -> None:
    assert costs.num_cases("test_x.py::test_y", cost) == expected
    assert costs.num_cases("test_x.py::test_a_planted_bug_is_found", cost) is None


def test_what_is_dear_takes_turns_and_each_gets_one_soon() -> None:
    table = {f"test_x.py::test_{seconds}": Cost(float(seconds), 1) for seconds in range(1, 41)}
    table |= {"test_x.py::test_a_planted_bug": Cost(90.0, 1), "test_sanitizers.py::test_y": Cost(90.0, 1)}
    for first in (0, 1721, 16**40 - 3):
        runs = [table.keys() - costs.waiting(table, turn) for turn in range(first, first + RAREST)]
        times = Counter(name for names in runs for name in names)
        assert {name for name, number in times.items() if number == RAREST} == {*list(table)[-2:]}
        assert times.keys() == table.keys()
        assert times["test_x.py::test_2"] in (RAREST // 17, RAREST // 17 + 1)
        assert times["test_x.py::test_40"] == 1
        spent = [sum(table[name].seconds for name in names) for names in runs]
        assert max(spent) - min(spent) < 40, "no more than the dearest"


def test_the_table_keeps_ci_to_its_time() -> None:
    """Of 10,900 s of three processes on two cores. The start and quick tests take 700 s."""
    table = costs.read()
    assert max(costs.seconds_in_ci(table, turn) for turn in range(RAREST)) < 900
    assert all((HERE / name.partition("::")[0]).is_file() for name in table)


def test_a_file_costs_what_is_run_of_it() -> None:
    table = {"test_x.py::test_a": Cost(6.0, 3), "test_x.py::test_b": Cost(1.5, 1)}
    names = ["test_x.py::test_a", "test_x.py::test_a", "test_x.py::test_b", "test_y.py::test_a"]
    assert costs.seconds_of_files(names, table) == {"test_x.py": 5.5, "test_y.py": 0.0}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_turns_are_the_numbers_of_commits(tmp_path: Path) -> None:
    assert costs.turn_of(tmp_path) == 0
    person = {f"GIT_{role}_{what}": "x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    person["GIT_CONFIG_GLOBAL"] = os.devnull
    for command in ("init -q", "commit -q --allow-empty -m 1", "commit -q --allow-empty -m 2"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True, env=os.environ | person)
    assert costs.turn_of(tmp_path) == 2
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}", tmp_path / "cut"], check=True)
    assert costs.turn_of(tmp_path / "cut") > 2**100


ALL_CASES = '<properties><property name="cases" value="9"/></properties>'
REPORT = f"""<testsuites><testsuite>
<testcase classname="tests.test_x" name="test_all[a]" time="3.5"/>
<testcase classname="tests.test_x" name="test_all[b-[1]]" time="1.0"/>
<testcase classname="tests.test_x" name="test_some[a]" time="4">{ALL_CASES}</testcase>
<testcase classname="tests.test_x" name="test_some[b]" time="1">{ALL_CASES}</testcase>
<testcase classname="tests.test_x" name="test_one[a]" time="4">{ALL_CASES}</testcase>
<testcase classname="tests.test_x" name="test_one_known[a]" time="4">{ALL_CASES}</testcase>
<testcase classname="tests.test_x.TestA" name="runTest" time="2"/>
<testcase classname="tests.test_x" name="test_quick" time="0.1"/>
<testcase classname="tests.test_x" name="test_not_here" time="0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_the_table(tmp_path: Path) -> None:
    """The last two are of other runs: one whose turn it was not, and one that is gone."""
    (tmp_path / "report.xml").write_text(REPORT)
    names = ["all", "some", "one", "one_known", "quick", "not_here", "waiting"]
    (tmp_path / "test_x.py").write_text("class TestA: ...\n" + "".join(f"def test_{name}(): ...\n" for name in names))
    old = {f"test_x.py::test_{name}": Cost(9.0, 9) for name in ("one_known", "quick", "not_here", "waiting", "gone")}
    new = script.measured(tmp_path / "report.xml", old)
    table = script.merged(old, new, script.defined_in(tmp_path, old.keys() | new.keys()))
    costs.write(table, tmp_path / "costs.txt")
    assert costs.read(tmp_path / "costs.txt") == table == {
        "test_x.py::TestA::runTest": Cost(2.0, 1), "test_x.py::test_all": Cost(4.5, 2), "test_x.py::test_some": Cost(12.0, 9),
        "test_x.py::test_one": Cost(36.0, 9), "test_x.py::test_one_known": Cost(9.0, 9), "test_x.py::test_not_here": Cost(9.0, 9),
        "test_x.py::test_waiting": Cost(9.0, 9),
    }  # fmt: skip


def test_processes_run_the_same_and_say_how_much_they_left_out(tmp_path: Path) -> None:
    """The suite's conftest over other tests: few cases of the first, and not the second, whose turn it is not."""
    for name in ("conftest.py", "costs.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "emulation").mkdir()
    (tmp_path / "emulation" / "few_cases.py").write_text((HERE / "emulation" / "few_cases.py").read_text())
    cases = "import pytest\n@pytest.mark.parametrize('i', range(20))\ndef test_cases(i): ...\n"
    (tmp_path / "test_x.py").write_text(cases + "def test_dear(): ...\ndef test_new(): ...\n")
    (tmp_path / "test_y.py").write_text("def test_other(): ...\n")
    costs.write({"test_x.py::test_cases": Cost(0.6, 20), "test_x.py::test_dear": Cost(2.5, 1)}, tmp_path / "costs.txt")
    settings = {"CI": "true", "TEST_NANOVLLM_TURN": "3", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TEST_NANOVLLM_CASES"} | settings
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    assert "19 cases left out because CI is set, among them 1 tests whose turn" in done.stdout
