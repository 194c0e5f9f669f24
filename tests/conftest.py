"""The longest files first: `--dist loadfile` gives a file to one worker, and at the end none should be left alone with one."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Generator, Iterator

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # three workers on two cores: a thread that spins keeps others from working
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a shell, under nohup: commands would inherit it
        signal.signal(number, default)

LONGEST = (  # those that compile for other processors: where nothing is kept of it
    "test_kernels_generic", "test_kernels_arm", "test_ptx", "test_examples", "test_cuda_delta", "test_cuda_latent",
    "test_sanitizers", "test_models", "test_models_command", "test_hub", "test_chat_loop", "test_cuda_guesses",
    "test_completions", "test_cuda_gemma4", "test_gpu_script", "test_cli_terminal", "test_convert_experts",
    "test_pipes", "test_kernel_latent_attention", "test_convert_families", "test_cuda_conv", "test_convert",
    "test_cuda_wide_heads", "test_quantize_algorithms", "test_adapters", "test_url", "test_chat_terminal",
    "test_late_device", "test_cuda_engine", "test_convert_command", "test_kernel_expert_products",
    "test_tool_calls_odd", "test_cli_real", "test_cli_failures", "test_kv_file", "test_quantize_model",
    "test_convert_pickled", "test_cuda_experts",
)  # fmt: skip


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("CI"):
        _leave_most_out(config, items)
    places = {name: place for place, name in enumerate(LONGEST)}
    servers = len(LONGEST) // 2
    items.sort(key=lambda item: places.get(item.path.stem, servers if item.path.stem.startswith("test_server") else len(LONGEST)))


SHARES = {
    "test_cuda_": 4 / 5, "test_kernel_": 3 / 4, "test_ptx": 3 / 4, "test_tensor_parallel::test_a_family": 3 / 4,
    "test_models::test_equal_to_transformers": 1 / 2, "test_convert_families::test_a_folder_becomes": 1 / 2,
    "test_convert_experts::test_a_folder_becomes": 1 / 2, "test_convert_experts::test_the_file_gives": 1 / 2,
    "test_vision::": 1 / 2, "test_looking::test_random_requests": 1 / 2, "test_towers::": 1 / 2,
    "test_quantize_kinds::test_calibrated": 1 / 2, "test_tool_calls_odd::test_any_text": 1 / 2,
    "test_reasoning::test_any_stream": 1 / 2, "test_examples::": 1 / 4,
}  # fmt: skip
"""By the beginnings of tests: how many of their cases CI leaves out."""


def _leave_most_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test on emulated GPUs: where nothing is kept of what was compiled, all of them take minutes; and of those
    that go through all families. Which stay, is the same in every process."""
    cases: dict[tuple[float, str], list[pytest.Item]] = {}
    for item in items:
        share = next((SHARES[start] for start in SHARES if f"{item.path.stem}::{item.name}".startswith(start)), None)
        if share is not None and "[" in item.nodeid and "planted" not in item.name:
            cases.setdefault((share, item.nodeid.partition("[")[0]), []).append(item)
    left: set[pytest.Item] = set()
    for (share, _), each in cases.items():
        left |= set(random.Random(1).sample(each, int(len(each) * share)))
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: neither now nor later does a pass look at its millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
