"""Kernels that models need are compiled by several processes at once, each those that nobody else is compiling."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from nanovllm_cli.kernels import compiled, cpu, cpu_latent, warm
from nanovllm_cli.kernels.entry import Kernel
from nanovllm_cli.kernels.warm import Kind
from test_entry import negate, negated


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """An empty cache; the helpers that are started."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm.subprocess, "Popen", start)
    monkeypatch.setattr(warm, "_idle_processors", lambda most: 1)
    return found


def test_what_another_process_compiles_is_passed_over_and_later_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "LOCK_SECONDS", 0.05)
    with (tmp_path / "test_entry.negate.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(compiled.UnderWay), compiled.passing_over():
            negated("f", Kernel(negate._function))
        with compiled.passing_over(), ThreadPoolExecutor(1) as other:  # another model's thread waits as ever
            assert other.submit(negated, "f", Kernel(negate._function)).result() == (0, [-1, -2, -100])
        assert negated("f", Kernel(negate._function)) == (0, [-1, -2, -100]), "it has waited"


def test_a_part_that_is_under_way_does_not_keep_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def under_way(*_: torch.dtype) -> None:
        seen.append("taken")
        raise compiled.UnderWay

    others = [lambda *dtypes, number=number: seen.append((number, *dtypes)) for number in range(2)]
    monkeypatch.setitem(warm.PARTS, "all", (others[0], under_way))
    monkeypatch.setitem(warm.PARTS, "scan", (others[1],))
    warm.help_with('[[["all", ["bfloat16", "int8"]], ["scan", ["float32"]]], 1]')
    assert seen == ["taken", (1, torch.float32), (0, torch.bfloat16, torch.int8)], "beginning with the part that was told"


def test_a_helper_compiles_into_the_cache_and_is_gone_afterwards(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = Kind("latent", (torch.float32,))
    kernels = [kernel for kernel in vars(cpu_latent).values() if isinstance(kernel, Kernel)]
    (tmp_path / "numba.py").write_text("raise SystemExit(3)")
    with monkeypatch.context() as alone:
        alone.setenv("NUMBA_CACHE_DIR", str(tmp_path))
        cpu._use_own_cache_folder()
        alone.chdir(tmp_path)  # where somebody works is no place to import from
        with warm._helpers([latent]):
            assert started[0].wait(timeout=100) == 0
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_compiled", {})
    warm.warm_up([latent])
    hits = [sum(made.cache_hits for made, *_ in kernel._compiled.values()) for kernel in kernels]
    assert sum(hits) == len(kernels) == 2
    assert latent.is_compiled
    assert not Kind("latent", (torch.bfloat16,)).is_compiled


def test_what_fails_ends_the_helpers_too(started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: torch.dtype) -> None:
        raise RuntimeError("broken")

    monkeypatch.setitem(warm.PARTS, "all", (fail, fail))
    with pytest.raises(RuntimeError, match="broken"):
        warm.warm_up([Kind("all", (torch.float32,))])
    assert [each.returncode for each in started] == [-9]
    assert not Kind("all", (torch.float32,)).is_compiled


@pytest.mark.parametrize(
    ("processors", "load", "free", "expected"),
    [(8, 0.3, 8, 3), (2, 0.9, 8, 1), (2, 2.4, 8, 0), (1, 0.0, 8, 0), (8, 0.0, 2, 2), (16, 12.0, 8, 3)],
)
def test_helpers_are_as_many_as_there_are_idle_processors_and_memory(
    processors: int, load: float, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "num_processors", lambda: processors)
    monkeypatch.setattr(warm.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(warm.system, "available_bytes", lambda: free << 30)
    assert warm._idle_processors(4) == expected

    def unknown() -> None:
        raise OSError  # os.getloadavg where there is no /proc

    monkeypatch.setattr(warm.os, "getloadavg", unknown)
    assert warm._idle_processors(4) == min(3, processors - 1, free)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null/nowhere")
    assert warm._idle_processors(4) == 0, "nobody would find what they compile"


def test_kernels_of_versions_that_nobody_runs_any_more_are_removed(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This version's stay, however long ago they were compiled, and so does all in a folder that is shared with others."""
    names = {"old": "0123456789abcdef", "own": "aaaaaaaaaaaaaaaa", "recent": "bbbbbbbbbbbbbbbb", "other": "0123456789abcdef.kept"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours, shared = tmp_path / "nanovllm" / "kernels", tmp_path / "shared"
    for place in ours, shared:
        for name, folder in names.items():
            (place / folder).mkdir(parents=True)
            (place / folder / "kernel.nbc").touch()
            days = 89 if name == "recent" else 91
            os.utime(place / folder, (time.time() - days * 86_400,) * 2)
    monkeypatch.setitem(warm.PARTS, "scan", ())
    for place in ours, shared:
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(place / names["own"]))
        warm.remove_unused.cache_clear()
        warm.warm_up([Kind("scan", ())])
    assert {path.name for path in ours.iterdir()} == set(names.values()) - {names["old"]}
    assert {path.name for path in shared.iterdir()} == set(names.values())
