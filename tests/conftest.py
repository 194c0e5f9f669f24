"""What holds for all tests; with CI set, a part of them is run, which costs.py chooses."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import costs
from emulation import few_cases
from nanovllm_cli.collector import keep_loaded

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # three workers on two cores: a thread that spins keeps others from working
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a shell, under nohup: commands would inherit it
        signal.signal(number, default)

STARTS: list[Callable[[], object]] = []  # of generators: each goes back to its first number


@pytest.fixture(autouse=True)
def own_numbers() -> None:
    """A test's random numbers are the same whatever ran before it, in its file or in another that shares the generator."""
    for start in STARTS:
        start()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` asks for all kinds of devices: 0.25 ms a test


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a person has set, and said, is neither read nor changed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def own_console() -> None:
    """A test that writes to the process's console does not find another's, whose captured stdout is closed."""
    output = sys.modules.get("nanovllm_cli.cli.output")
    if output is not None:
        output.console.cache_clear()


def pytest_collection_finish() -> None:
    """Of all generators that modules of tests hold. What these drew while they were imported depends on which others were."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for module in list(sys.modules.values()):
        for held in list(vars(module).values()) if _is_ours(module) else ():
            if torch is not None and isinstance(held, torch.Generator):
                STARTS.append(functools.partial(held.manual_seed, held.initial_seed()))
            elif numpy is not None and isinstance(held, numpy.random.Generator):
                source = held.bit_generator
                STARTS.append(functools.partial(setattr, source, "state", type(source)(source.seed_seq).state))


def _is_ours(module: types.ModuleType) -> bool:
    return str(getattr(module, "__file__", None)).startswith(os.path.dirname(__file__))


TURN = "TEST_NANOVLLM_TURN"
"""Of the commit: told to all processes by the first, as they have to run the same."""
LEFT_OUT = pytest.StashKey[tuple[int, int]]()
"""How many cases, and how many tests whose turn it is not."""


def pytest_configure() -> None:
    if os.environ.get("CI"):
        os.environ.setdefault(TURN, str(costs.turn_of(Path(__file__).parent)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The dearest files first: `--dist loadfile` gives a file to one process, and at the end none should be alone with one."""
    table = costs.read()
    if os.environ.get("CI") and few_cases.NAME not in os.environ:
        _leave_out(config, items, table)
    seconds = costs.seconds_of_files(map(_name, items), table)
    items.sort(key=lambda item: -seconds[item.path.name])


def _leave_out(config: pytest.Config, items: list[pytest.Item], table: dict[str, costs.Cost]) -> None:
    """Which cases stay, is the same in every process and with every commit."""
    waiting = costs.waiting(table, int(os.environ[TURN]))
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(_name(item), []).append(item)
    left: set[pytest.Item] = set()
    num_waiting = 0
    for name, cases in tests.items():
        number = 0 if name in waiting else costs.num_cases(name, table.get(name))
        num_waiting += number == 0
        if number is not None and number < len(cases):
            stay = random.Random(1).sample(cases, number)
            left |= set(cases) - set(stay)
            for item in stay:
                item.user_properties.append(("cases", len(cases)))  # for scripts/test_costs.py
    items[:] = [item for item in items if item not in left]
    config.stash[LEFT_OUT] = len(left), num_waiting
    config.hook.pytest_deselected(items=list(left))


def _name(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.nodeid.partition('::')[2].partition('[')[0]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist's: its processes do not tell what they deselected."""
    left_out = getattr(node, "workeroutput", {}).get("left_out")
    if left_out is not None:
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        cases, waiting = config.stash[LEFT_OUT]
        line = f"{cases} cases left out because CI is set, among them {waiting} tests whose turn comes with other commits"
        terminalreporter.write_line(f"{line} (tests/costs.py)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: neither now nor later does a pass look at its millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        keep_loaded()


@pytest.fixture
def eight_rows_may_have_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pays on this processor."""
    monkeypatch.setattr("nanovllm_cli.engine.cpu_platform.CpuPlatform.most_drafted", 8)
