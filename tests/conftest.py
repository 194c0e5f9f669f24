"""The longest files first: `--dist loadfile` gives a file to one worker, and at the end none should be left alone with one."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # two workers on two cores: a thread that spins keeps the other's from working

LONGEST = (
    "test_examples", "test_sanitizers", "test_cli_terminal", "test_cli_real", "test_chat_loop", "test_kernel_prefill_attention",
    "test_cpu_integer", "test_compile_gate", "test_models_command", "test_convert_command", "test_pipes", "test_quantize_cli",
    "test_bench_serve", "test_hub", "test_kernels_generic", "test_kv_quant", "test_chat_prompt", "test_kv_file",
    "test_quant_engine", "test_quantize_model", "test_cuda_engine", "test_convert", "test_kernel_decode_attention",
    "test_kernel_gemm",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    servers = len(LONGEST) // 2
    items.sort(key=lambda item: places.get(item.path.stem, servers if item.path.stem.startswith("test_server") else len(LONGEST)))
