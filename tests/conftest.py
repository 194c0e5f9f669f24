"""The longest files first: `--dist loadfile` gives a file to one worker, and at the end none should be left alone with one."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # two workers on two cores: a thread that spins keeps the other's from working
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a shell, under nohup: commands would inherit it
        signal.signal(number, default)

LONGEST = (
    "test_examples", "test_ptx", "test_sanitizers", "test_chat_loop", "test_kv_file", "test_quantize_model", "test_verify",
    "test_cuda_engine", "test_kernels_generic", "test_cli_real", "test_pipes", "test_hub", "test_quantize_algorithms",
    "test_cpu_integer", "test_models_command", "test_url", "test_cli_terminal", "test_convert_command", "test_kv_quant",
    "test_quant_engine", "test_kernel_sampling", "test_bench_roofline", "test_bench_serve", "test_compile_gate", "test_convert",
    "test_kernel_prefill_attention", "test_chat_prompt",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_numbers(request: pytest.FixtureRequest) -> None:
    """A test's random numbers are the same whatever ran before it, in its file or in another that shares the generator."""
    for module in (request.module, sys.modules.get("emulation.compare")):
        generator = getattr(module, "GENERATOR", None)
        if generator is not None:
            generator.manual_seed(generator.initial_seed())
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_console() -> None:
    """A test that writes to the process's console does not find another's, whose captured stdout is closed."""
    output = sys.modules.get("nanovllm_cli.cli.output")
    if output is not None:
        output.console.cache_clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    servers = len(LONGEST) // 2
    items.sort(key=lambda item: places.get(item.path.stem, servers if item.path.stem.startswith("test_server") else len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: neither now nor later does a pass look at its millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
