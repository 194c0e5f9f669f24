"""No CPU kernel makes an array for each of its tasks.

Numba would count the array's users, and those of each slice, by locked instructions that hold up every load behind them: that was
half of a decode step's time at one sequence, and no result showed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numba
import pytest
import torch
from numba.core.runtime import _nrt_python

import wkvs
from nanovllm_cli.kernels import altups, connections, cpu, cpu_experts, cpu_numbers
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.state_spec import ScanSpec
from scans import Case, Kept
from test_kernels_cpu import GENERATOR, Paged, randn
from test_kv_quant import QuantizedPaged

assert GENERATOR
BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each thread has memory of its own."""
    threads = numba.get_num_threads()
    cpu.set_num_threads(1)
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()
    cpu.set_num_threads(threads)


def arrays_made(call: Callable[[], object]) -> int:
    before = _nrt_python.memsys_get_stats_mi_alloc()
    call()
    return int(_nrt_python.memsys_get_stats_mi_alloc() - before)


def test_arrays_are_counted() -> None:
    """Otherwise nothing below could fail."""
    one = numba.njit(lambda: cpu_numbers.scratch(5))
    assert arrays_made(one) == 1


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4", "int4:zeros", "Q4_K", "Q6_K", "fp8", "nf4", "int8-weight-only"])
def test_a_matmul_of_many_tiles_makes_no_more_arrays_than_one_of_few(kind: str, rows: int) -> None:
    made = []
    for outputs in (128, 640):
        weight, x = randn(outputs, 512), randn(rows, 512, dtype=BF16)
        storage = (
            DenseStorage(outputs, 512, BF16)
            if kind == "bf16"
            else make_storage(parse_format(kind), outputs, 512, BF16, rounds=True)
        )
        storage.load_rows(0, weight)
        storage.matmul(x, None, BF16)
        made.append(arrays_made(lambda storage=storage, x=x: storage.matmul(x, None, BF16)))
        ids = torch.arange(outputs)
        made[-1] += arrays_made(lambda storage=storage, ids=ids: storage.rows(ids, None))
    assert made[0] == made[1] <= 4


@pytest.mark.parametrize("kinds", [None, (INT8, FP8)])
def test_attention_of_many_sequences_makes_no_more_arrays_than_that_of_one(kinds: tuple[torch.dtype, torch.dtype] | None) -> None:
    made = []
    for lens in ([100], [100, 300, 7, 64, 65, 1]):
        paged = Paged(lens, 2, 64, BF16) if kinds is None else QuantizedPaged(lens, 2, 64, BF16, *kinds)
        qkv = randn(sum(lens), 8 * 64, dtype=BF16)
        made.append(arrays_made(lambda paged=paged, qkv=qkv, lens=lens: paged.step(qkv, lens, lens, 4)))
    assert made[0] == made[1] <= 2


def test_dense_matmul_in_fp32_makes_one_array() -> None:
    packed = torch.zeros(cpu.packed_size(640, 64, torch.float32))
    assert arrays_made(lambda: cpu.matmul(randn(40, 64), packed, 640, None, torch.float32)) <= 1


def test_sums_of_many_tokens_experts_make_no_more_arrays_than_those_of_few() -> None:
    made = []
    for rows in (2, 30):
        y, weights, out = randn(rows, 3, 64, dtype=BF16), randn(rows, 3), torch.zeros(rows, 64, dtype=BF16)
        row_of = torch.randperm(rows * 3)
        ints = (y.data_ptr(), row_of.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, 3, 64)
        cpu_experts.sum_pairs.step("H", ints)
        made.append(arrays_made(lambda ints=ints: cpu_experts.sum_pairs.run("H", ints)))
        lines = y.double().view(-1, 64)[row_of].view(rows, 3, 64)
        expected = (weights.double()[:, :, None] * lines).sum(1)
        assert torch.allclose(out.double(), expected, rtol=0.01, atol=0.01)
    assert made[0] == made[1] <= 1


def test_streams_and_gates_of_many_tokens_make_no_more_arrays_than_those_of_one() -> None:
    made = []
    tables, gains = (randn(16, 4), randn(4, 4)), randn(96, dtype=BF16)
    for rows in (1, 30):
        streams, logits, found = randn(4, rows, 96, dtype=BF16), randn(rows, 4), randn(rows, 96, dtype=BF16)
        gains_of_all, normed = randn(384, dtype=BF16), randn(rows, 384, dtype=BF16)
        calls: list[Callable[[], object]] = [
            lambda x=streams, z=logits: altups.altup_predict(x, z, tables[0], 0.1),
            lambda x=streams, y=found, z=logits: altups.altup_correct(x, y, z, tables[1], gains, 0.1),
            lambda x=streams, y=found: altups.altup_match(y, x[0]),
            lambda y=found: altups.sparse_gate(y, 1.0),
            lambda x=streams: connections.read_streams(x, randn(8, 384), randn(8), randn(2), 1e-6, 0.0, 2.0),
            lambda x=streams, y=found, z=logits: connections.write_streams(x, y, z),
            lambda x=streams, y=gains_of_all: connections.norm_streams(x, y, 1e-6, 1.0),
            lambda y=normed, z=logits: connections.mix_streams(y, y, 4, z),
        ]
        for call in calls:
            call()
        made.append([arrays_made(call) for call in calls])
    assert made[0] == made[1]
    assert max(made[0]) <= 1


def test_scans_of_many_sequences_make_no_more_arrays_than_that_of_one() -> None:
    made = []
    for lens in ([3], [3, 20, 5]):
        kept = Kept(Case(ScanSpec(192, 16, 5, 4), [lens]), BF16)
        args, _ = kept.step(lens)
        kept.run(**args)
        made.append(arrays_made(lambda kept=kept, args=args: kept.run(**args)))
    assert made[0] == made[1] <= 2


def test_rwkvs_of_many_sequences_make_no_more_arrays_than_that_of_one() -> None:
    made = []
    for lens in ([3], [3, 20, 5]):
        kept = wkvs.Kept(wkvs.Case(3, 64, [lens]), BF16)
        args, _ = kept.step(lens)
        kept.run(**args)
        made.append(arrays_made(lambda kept=kept, args=args: kept.run(**args)))
    assert made[0] == made[1] <= 3
