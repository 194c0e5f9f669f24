"""What Linux and macOS tell of a machine. macOS' side runs here against its library's calls as their manuals have them, and the
values that Macs were seen to give; no Mac is needed, and none has run it."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from macos import M2, Library, Value
from nanovllm_cli import processors, system
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine import cpu_platform
from nanovllm_cli.progress import NullProgress

Mac = Callable[..., None]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Mac:
    """mac(values, pages): from now on this is one."""

    def become(values: Mapping[str, Value] = M2, **others: tuple[int, int, int, int]) -> None:
        monkeypatch.setattr(system, "SYSTEM", "darwin")
        library = Library(values, **others)
        monkeypatch.setattr(system, "_library", lambda: library)

    return become


# ---- others ----

WINDOWS = (
    "import os, pathlib, runpy, subprocess, sys, tempfile\n"
    "missing = ('fcntl', 'resource', 'termios', 'pwd', 'grp', 'tty', 'pty', 'readline')\n"
    "sys.modules.update(dict.fromkeys(missing))\n"
    "sys.platform = 'win32'\n"
)
"""A Python that lacks what Windows' lacks: importing it is a ModuleNotFoundError."""


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WINDOWS + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["run", "tiny", "Hello"], ["--help"], []], ids=" ".join)
def test_who_is_on_windows_is_told_of_wsl(words: list[str]) -> None:
    done = on_windows(f"sys.argv[1:] = {words}\nrunpy.run_module('nanovllm_cli', run_name='__main__', alter_sys=True)")
    assert done.stderr.splitlines() == [
        "error: nanovllm runs under Linux and macOS, not under Windows",
        "hint: in WSL 2 it runs on Windows: `wsl --install` in PowerShell, then install it there",
    ]
    assert (done.returncode, done.stdout) == (6, "")


def test_the_library_says_so_too() -> None:
    done = on_windows("import nanovllm_cli; print(nanovllm_cli.__version__); nanovllm_cli.LLM")
    assert done.stdout
    *_, what, hint = done.stderr.splitlines()
    assert what.endswith("UnsupportedError: nanovllm runs under Linux and macOS, not under Windows")
    assert "WSL 2" in hint


def test_nothing_else_asks_which_system_it_is() -> None:
    asks = re.compile(r"\b(sys\.platform|platform\.system|os\.uname|os\.name\b)")
    folder = Path(system.__file__).parent
    assert [str(path) for path in folder.rglob("*.py") if asks.search(path.read_text())] == [system.__file__]


# ---- memory ----


def test_memory_that_is_free_or_idle_can_be_taken_on_a_mac(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac of 24 GiB: `vm_stat` says 17490 pages free and 4916 speculative, which the call counts as free, 468148 active, 468488
    inactive and 251554 wired, of 16 KiB each."""
    mac(pages=(17490 + 4916, 468148, 468488, 251554))
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 16384 if name == "SC_PAGE_SIZE" else real(name))
    assert system.available_bytes() == 7_962_263_552 + 4916 * 16384


def test_half_of_the_memory_is_taken_for_free_where_nobody_says(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    mac()
    library = Library(M2)
    library.host_statistics64 = lambda *_: 5  # KERN_FAILURE
    monkeypatch.setattr(system, "_library", lambda: library)
    assert system.memory_bytes() == 16 << 30
    assert system.available_bytes() == 8 << 30


def test_the_most_memory_is_in_bytes_on_a_mac_and_in_kib_under_linux(mac: Mac) -> None:
    """getrusage(2) of both."""
    here = system.peak_memory_bytes()
    assert here > 10 << 20
    mac()
    assert system.peak_memory_bytes() == pytest.approx(here / 1024, rel=0.5)


# ---- processors ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (M2, 4),
        (M2 | {"hw.perflevel0.physicalcpu": 8, "hw.perflevel1.physicalcpu": 2}, 8),
        (M2 | {"hw.perflevel0.name": b"Super", "hw.perflevel1.name": b"Performance", "hw.perflevel1.physicalcpu": 12}, 16),
        ({"hw.nperflevels": 1, "hw.perflevel0.name": b"Standard", "hw.perflevel0.physicalcpu": 6}, 6),
        ({"hw.ncpu": 8}, None),
        ({"hw.nperflevels": 2}, None),
    ],
    ids=["M2", "M1 Pro", "two kinds, neither frugal", "all alike", "nothing said", "levels without numbers"],
)
def test_frugal_cores_are_left_to_other_programs(
    values: dict[str, Value], expected: int | None, mac: Mac, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac(values)
    assert system.fast_processors() == expected
    monkeypatch.setattr(processors, "num_processors", lambda: 20)
    assert processors.default_threads() == (expected or 20)
    monkeypatch.setattr(processors, "num_processors", lambda: 3)
    assert processors.default_threads() == 3


def test_no_more_threads_are_made_on_a_mac_than_are_of_use(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "num_processors", lambda: 8)
    processors.check_thread_limit(linux := {"HOME": "/"})
    assert linux == {"HOME": "/"}
    mac()
    processors.check_thread_limit(unset := {"NUMBA_NUM_THREADS": ""})
    assert unset == {"NUMBA_NUM_THREADS": "4"}
    processors.check_thread_limit(wanted := {"NUMBA_NUM_THREADS": "8"})
    assert wanted == {"NUMBA_NUM_THREADS": "8"}


ASKED = "6 threads were asked for"


@pytest.mark.parametrize(("asked", "used", "noted"), [(None, 4, []), (3, 3, []), (4, 4, []), (6, 4, [ASKED])])
def test_who_asks_for_more_threads_than_there_can_be_is_told(
    asked: int | None, used: int, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    progress = NullProgress()
    monkeypatch.setattr(progress, "note", said.append)
    for name, number in (("num_processors", 8), ("default_threads", 4)):
        monkeypatch.setattr(cpu_platform, name, lambda number=number: number)
    monkeypatch.setattr(cpu_platform.cpu, "most_threads", lambda: 4)
    assert cpu_platform._num_threads(EngineConfig(threads=asked), progress) == used
    assert [line[: len(start)] for line, start in zip(said, noted, strict=True)] == noted


def test_models_that_take_turns_have_their_own_numbers_of_threads() -> None:
    one, two = (cpu_platform.CpuPlatform(EngineConfig(threads=threads), None) for threads in (1, 2))
    for platform in (one, two, one, two):
        platform.enter()
        assert cpu_platform.cpu.num_threads() == platform.threads


def test_a_processor_is_known_by_name(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_cpuinfo", lambda: "processor\t: 0\nmodel name\t: AMD EPYC: 9\n\nmodel name\t: another\n")
    assert system.processor_name() == "AMD EPYC: 9"
    monkeypatch.setattr(system, "_cpuinfo", lambda: "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0b\n")
    assert system.processor_name() == ""
    mac()
    assert system.processor_name() == "Apple M2"
    mac({})
    assert system.processor_name() == ""


def test_the_largest_cache(mac: Mac) -> None:
    sizes = [Path(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size") for i in range(4)]
    there = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in sizes if path.exists()]
    assert system.last_cache_bytes() == max(there, default=0)
    mac()
    assert system.last_cache_bytes() == 16 << 20
    mac({})
    assert system.last_cache_bytes() == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (M2, {"asimd", "asimddp", "i8mm"}),
        (M2 | {"hw.optional.arm.FEAT_I8MM": 0}, {"asimd", "asimddp"}),
        ({"hw.optional.neon": 1}, {"asimd"}),
    ],
    ids=["M2", "M1", "names of macOS 11"],
)
def test_instructions_of_a_mac(values: dict[str, Value], expected: set[str], mac: Mac) -> None:
    mac(values)
    assert system.arm_features() == expected


# ---- values of names ----


def test_values_are_texts_or_numbers_of_four_or_eight_bytes(mac: Mac) -> None:
    texts = {"hw.model": b"Mac14,6", "empty": b"", "long": b"x" * 255, "too.long": b"x" * 256}
    mac({"hw.memsize": 68719476736, "hw.ncpu": 12, **texts})
    assert system.sysctl_number("hw.memsize") == 64 << 30
    assert system.sysctl_number("hw.ncpu") == 12
    assert system.sysctl("hw.model") == b"Mac14,6"
    assert system.sysctl("empty") == b""
    assert system.sysctl("long") == b"x" * 255
    assert system.sysctl("too.long") is None
    assert system.sysctl("hw.cpufrequency") is None
    assert system.sysctl_number("hw.cpufrequency") is None
    assert system.sysctl_number("long") is None


# ---- limits ----


def limits(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int, int], bool], now: tuple[int, int]) -> list[tuple[int, int]]:
    """setrlimit that refuses pairs, and does nothing else; what it was given."""
    given = [now]

    def set_limit(what: int, pair: tuple[int, int]) -> None:
        if refuses(*pair):
            raise ValueError("current limit exceeds maximum limit")
        given.append(pair)

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    monkeypatch.setattr(resource, "getrlimit", lambda what: given[-1])
    return given


@pytest.mark.parametrize("mapped", [0, 1 << 20, 418_000_000_000, (1 << 47) - (1 << 27)])
def test_a_mac_is_asked_by_its_refusals_how_much_is_mapped(mapped: int, mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    """XNU's dosetrlimit: EINVAL for less than the map's size, which Python makes this ValueError."""
    mac()
    endless = resource.RLIM_INFINITY
    given = limits(monkeypatch, lambda soft, hard: soft != endless and soft < mapped, (endless, endless))
    assert mapped <= system.mapped_bytes() <= mapped + (1 << 26)
    assert given[-1] == (endless, endless)
    system.limit_address_space(1 << 30)
    soft, hard = given[-1]
    assert soft == hard
    assert mapped + (1 << 30) <= soft <= mapped + (1 << 30) + (1 << 26)


def test_a_hard_limit_of_addresses_is_kept(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    given = limits(monkeypatch, lambda *_: False, (resource.RLIM_INFINITY, 5 << 30))
    monkeypatch.setattr(system, "mapped_bytes", lambda: 3 << 30)
    system.limit_address_space(8 << 30)
    assert given[-1] == (5 << 30, 5 << 30)


@pytest.mark.parametrize(
    ("now", "most", "expected"),
    [
        ((256, resource.RLIM_INFINITY), 10240, 8192),
        ((256, resource.RLIM_INFINITY), 1 << 20, 65536),
        ((1024, 4096), 4096, 4096),
        ((1024, 524288), 524288, 65536),
        ((100_000, 524288), 524288, 100_000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10240, resource.RLIM_INFINITY),
        ((256, resource.RLIM_INFINITY), 256, 256),
    ],
    ids=["a Mac", "a large Mac", "to the hard limit", "Linux", "enough", "any number", "no more is given"],
)
def test_as_many_files_as_the_system_gives(
    now: tuple[int, int], most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = limits(monkeypatch, lambda soft, hard: soft > most, now)
    system.allow_open_files(65536)
    assert given[-1] == (expected, now[1])
