"""What control groups leave of memory and of processors, by files as the kernel writes them, of both versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm_cli import control_groups, processors, system
from nanovllm_cli.control_groups import NO_LIMIT
from nanovllm_cli.engine import memory

SERVICE = "system.slice/it.service"
NONE = "9223372036854771712\n"  # version 1's, without a limit
Groups = Callable[[str], list[Path]]


@pytest.fixture
def groups_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Of a tree ('' for version 2's): the process's, the one that this lies in, and the root."""
    root, own = tmp_path / "root", tmp_path / "own"
    monkeypatch.setattr(control_groups, "GROUPS", root)
    monkeypatch.setattr(control_groups, "OWN_GROUP", own)

    def made(tree: str) -> list[Path]:
        names = {"memory": "4:hugetlb,memory", "cpu": "7:cpu,cpuacct", "": "0:"}[tree]
        own.write_text(f"1:name=systemd:/elsewhere\n{names}:/{SERVICE}\n")
        groups = [root / tree / SERVICE, root / tree / "system.slice", root / tree]
        groups[0].mkdir(parents=True, exist_ok=True)
        return groups

    return made


def found_in_each(groups: list[Path], files: dict[str, str], ask: Callable[[], int]) -> set[int]:
    found = set()
    for group in groups:
        for name, text in files.items():
            (group / name).write_text(text)
        found.add(ask())
        for name in files:
            (group / name).unlink()
    return found


@pytest.mark.parametrize(
    ("tree", "files", "expected"),
    [
        ("", {"memory.max": "8000\n", "memory.current": "7000\n", "memory.stat": "anon 9\ninactive_file 6000\nslab 5\n"}, 7000),
        ("", {"memory.max": "8000\n", "memory.current": "7000\n", "memory.stat": "anon 7000\ninactive_file 0\n"}, 1000),
        ("", {"memory.max": "8000\n", "memory.current": "9000\n"}, 0),
        ("", {"memory.max": "max\n", "memory.current": "7000\n"}, NO_LIMIT),
        ("", {"memory.max": "", "memory.current": ""}, NO_LIMIT),
        ("", {}, NO_LIMIT),
        ("memory", {
            "memory.limit_in_bytes": "8000\n", "memory.usage_in_bytes": "7000\n", "memory.stat": "total_inactive_file 6000\n",
        }, 7000),
        ("memory", {"memory.limit_in_bytes": NONE, "memory.usage_in_bytes": "7000\n"}, NO_LIMIT),
    ],
    ids=[
        "files that were read are dropped where memory is short", "nothing to drop", "above the limit", "no limit",
        "nothing in the files", "no files", "version 1", "no limit in version 1",
    ],
)  # fmt: skip
def test_memory_that_is_left(tree: str, files: dict[str, str], expected: int, groups_in: Groups) -> None:
    """Of the process's own group, and of one that this lies in: a service's in its slice."""
    (found,) = found_in_each(groups_in(tree), files, control_groups.memory_left)
    assert found == expected if expected < NO_LIMIT else found >= NO_LIMIT


@pytest.mark.parametrize(
    ("tree", "files", "expected"),
    [
        ("", {"cpu.max": "200000 100000\n"}, 2),
        ("", {"cpu.max": "150000 100000\n"}, 2),
        ("", {"cpu.max": "5000 100000\n"}, 1),
        ("", {"cpu.max": "max 100000\n"}, NO_LIMIT),
        ("", {"cpu.max": "100000"}, NO_LIMIT),
        ("", {"cpu.max": "100000 0\n"}, NO_LIMIT),
        ("cpu", {"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}, 3),
        ("cpu", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, NO_LIMIT),
    ],
)
def test_processors_that_there_is_time_on(tree: str, files: dict[str, str], expected: int, groups_in: Groups) -> None:
    assert found_in_each(groups_in(tree), files, control_groups.processors) == {expected}


def test_the_engine_goes_by_what_is_left(groups_in: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    root = groups_in("")[-1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(system, "available_bytes", lambda: 5000)
    monkeypatch.setattr(system, "fast_processors", lambda: None)
    assert (memory.available_bytes(), processors.default_threads()) == (5000, 64)
    for name, text in {"memory.max": "9000", "memory.current": "8000", "cpu.max": "400000 100000"}.items():
        (root / name).write_text(text)
    assert (memory.available_bytes(), processors.default_threads()) == (1000, 4)


@pytest.mark.parametrize("told", [None, b"", b"no such\nline\n", b"\xff"])
def test_without_a_word_of_its_own_group_the_roots_limits_count(told: bytes | None, groups_in: Groups, tmp_path: Path) -> None:
    root, own = groups_in("")[-1], tmp_path / "own"
    own.unlink()
    if told is not None:
        own.write_bytes(told)
    (root / "cpu.max").write_text("300000 100000")
    assert control_groups.processors() == 3
