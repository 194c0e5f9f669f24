"""What kernels ask of shared and of global memory at shapes in use, counted by the machine of ptx/: turns of 32 banks, sectors
of 32 bytes, against the fewest that would do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import scans
import test_kernel_block_gemv as block_gemv_tests
import test_kernel_decode_attention as decode_tests
import test_kernel_gemv as gemv_tests
import test_kernel_latent_attention as latent_tests
import test_kernel_prefill_attention as prefill_tests
import test_kernel_scaled as scaled_tests
from deltas import Case, Kept, space
from emulation.compare import random
from emulation.emulator import missing_ptx
from emulation.quantized import quantized
from nanovllm_cli.kernels.altup import altup_correct, altup_match, altup_predict
from nanovllm_cli.kernels.block_gemv import block_gemv
from nanovllm_cli.kernels.causal_conv import causal_conv
from nanovllm_cli.kernels.connection import read_streams, spread, write_streams
from nanovllm_cli.kernels.gated_delta import gated_delta
from nanovllm_cli.kernels.gemm import SMALL, gemm
from nanovllm_cli.kernels.gemv import gemv
from nanovllm_cli.kernels.head_matmul import head_matmul
from nanovllm_cli.kernels.packed_gemm import new_counters, packed_gemm
from nanovllm_cli.kernels.packed_gemv import packed_gemv
from nanovllm_cli.kernels.packed_wgmma import SHAPES, Plan, packed_wgmma
from nanovllm_cli.kernels.route import route
from nanovllm_cli.kernels.scaled_gemv import scaled_gemv
from nanovllm_cli.kernels.scan_parts import scan_parts
from nanovllm_cli.kernels.selective_scan import selective_scan
from nanovllm_cli.kernels.sparse_gate import sparse_gate
from nanovllm_cli.kernels.states import States
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.state_spec import ScanSpec
from ptx.device import PtxMachine
from test_ptx import OFFSETS, run

pytestmark = pytest.mark.skipif(missing_ptx() is not None, reason=str(missing_ptx()))
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
OUTPUTS, WIDTH = 256, 2048


def decode(kv: torch.dtype, dim: int, group: int) -> Callable[[PtxMachine], object]:
    step = decode_tests.step((BF16, kv), (1, group, dim), [300])
    return lambda machine: step.run(machine, step.scratch(machine))


def prefill(kv: torch.dtype | None, dim: int = 128) -> Callable[[PtxMachine], object]:
    case = prefill_tests.case((150,), (100,), 4, 1, dim, BF16, kv)
    return lambda machine: prefill_tests.run(case, machine)


def weights(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(rows, WIDTH, dtype=BF16), torch.zeros(rows, OUTPUTS, dtype=BF16)


def packed(machine: PtxMachine, rows: int) -> None:
    (x, residual), (weight, _) = weights(rows), quantized(Integer(4, 128), OUTPUTS, WIDTH)
    if rows <= 8:
        packed_gemv(machine, x, weight, None, residual=residual)
    elif rows <= 64:
        packed_gemm(machine, x, weight, None, new_counters(machine), residual=residual)
    else:
        packed_wgmma(machine, x, weight, None, new_counters(machine), residual=residual, plan=Plan(SHAPES[0]))


def scaled(machine: PtxMachine) -> None:
    x, weight = (scaled_tests.scaled(rows, WIDTH, torch.int8) for rows in (8, OUTPUTS))
    scaled_gemv(machine, x, weight, None, dtype=BF16)


def blocks(machine: PtxMachine, rows: int) -> None:
    x, residual = weights(rows)
    block_gemv(machine, x, block_gemv_tests.weights("Q4_K", OUTPUTS, WIDTH)[0], None, residual=residual)


def dense(machine: PtxMachine, rows: int) -> None:
    (x, residual), weight = weights(rows), gemv_tests.weights(OUTPUTS, WIDTH, BF16)
    if rows <= 8:
        gemv(machine, x, weight, None, residual=residual)
    else:
        gemm(machine, x, weight, None, residual=residual, tile=SMALL)


def routing(machine: PtxMachine) -> None:
    route(machine, random(64, 128), torch.zeros(128, 8, dtype=torch.int64), 8, True)


def delta(case: Case) -> Callable[[PtxMachine], object]:
    """A token behind others."""
    kept = Kept(case, BF16)
    args, _ = kept.step([1])
    behind = {"stamps": torch.full_like(kept.states.stamps, 9), "reaches": torch.full_like(kept.states.reaches, 9)}
    states = States(*(torch.zeros_like(tensor) for tensor in kept.states))._replace(**behind)
    args |= {"states": states, "kv_lens": torch.tensor([10]).int(), "known_lens": torch.tensor([10]).int()}
    return lambda machine: gated_delta(machine, **args)


def scanned(machine: PtxMachine) -> None:
    """The same by Mamba's first rule, of some of a layer's heads."""
    kernels = partial(causal_conv, machine), partial(selective_scan, machine)
    kept = scans.Kept(scans.Case(ScanSpec(256, 16, 5, 4), [[1]]), BF16, kernels)
    args, _ = kept.step([1])
    behind = {"stamps": torch.full_like(kept.states.stamps, 9), "reaches": torch.full_like(kept.states.reaches, 9)}
    kept.states = States(*(torch.zeros_like(tensor) for tensor in kept.states))._replace(**behind)
    kept.run(**args | {"kv_lens": torch.tensor([10]).int(), "known_lens": torch.tensor([10]).int()})
    scan_parts(machine, random(1, 192), 160, random(192), 1e-6, BF16)


def latent(kv: torch.dtype, heads: int) -> Callable[[PtxMachine], object]:
    step = latent_tests.step((heads, 64, 512), (BF16, kv), [300])
    return lambda machine: step.run(machine, step.scratch(machine))


def by_head(machine: PtxMachine, num_rows: int, width: int) -> None:
    """Of a token, from and to columns between others."""
    x, weight = random(1, 2 * (width + 64), dtype=BF16), random(2, num_rows, width, dtype=BF16)
    head_matmul(machine, x, 0, width + 64, weight, torch.zeros(1, 2 * (num_rows + 64), dtype=BF16), 64, num_rows + 64)


def streams(machine: PtxMachine) -> None:
    """Four, of a token, few gates of a row, and a projection that gets another's size."""
    kept, logits, tables = random(4, 1, WIDTH, dtype=BF16), random(1, 4), (random(16, 4), random(4, 4))
    altup_predict(machine, kept, logits, tables[0], 0.1)
    altup_correct(machine, kept, random(1, WIDTH, dtype=BF16), logits, tables[1], random(WIDTH, dtype=BF16), 0.1)
    sparse_gate(machine, random(1, 2 * WIDTH, dtype=BF16)[:, :WIDTH], 1.6)
    altup_match(machine, random(1, WIDTH, dtype=BF16), random(1, WIDTH, dtype=BF16))


def connected(machine: PtxMachine) -> None:
    """Half a layer that reads four streams and writes them."""
    kept = spread(machine, random(1, WIDTH, dtype=BF16), 4)
    read, weights = read_streams(machine, kept, random(8, 4 * WIDTH), random(8), random(2), 1e-5, 1e-6, 2.0)
    write_streams(machine, kept, read, weights)


# The most that is taken, in turns of the banks and in sectors, of what would do.
KERNELS: dict[str, tuple[Callable[[PtxMachine], object], float, float]] = {
    "decode attention": (decode(BF16, 128, 4), 1.15, 1.1),
    "decode attention, group of 16": (decode(BF16, 128, 16), 1.25, 1.15),
    "decode attention, fp8": (decode(FP8, 128, 4), 1.1, 1.1),
    "decode attention, 512 dims": (decode(BF16, 512, 8), 1.15, 1.1),
    "prefill attention": (prefill(None), 1.0, 1.2),  # a quarter of a warp writes half a sector of its row
    "prefill attention, fp8": (prefill(FP8), 1.12, 1.3),
    "prefill attention, 512 dims": (prefill(None, 512), 1.0, 1.25),  # and is read so
    "prefill attention, 512 dims, fp8": (prefill(FP8, 512), 1.05, 1.4),
    "gemv": (lambda machine: dense(machine, 1), 1.0, 1.05),
    "gemm": (lambda machine: dense(machine, 40), 1.0, 1.1),
    "int4, a row": (lambda machine: packed(machine, 1), 1.0, 1.05),
    "int4, 32 rows": (lambda machine: packed(machine, 32), 1.0, 1.0),
    "int4, 64 rows": (lambda machine: packed(machine, 64), 1.1, 1.0),  # registers are short, and codes are read in halves
    "int4, 140 rows": (lambda machine: packed(machine, 140), 1.0, 1.0),
    "int8 by int8": (scaled, 1.0, 1.1),
    "Q4_K, a row": (lambda machine: blocks(machine, 1), 1.02, 1.05),
    "Q4_K, eight rows": (lambda machine: blocks(machine, 8), 1.0, 1.15),
    "gated delta rule, Qwen3.5": (delta(Case((16, 128), (32, 128), 4, [[1]])), 1.0, 1.01),
    "gated delta rule, Kimi Linear": (delta(Case((2, 128), (2, 128), 4, [[1]], by_channel=True)), 1.0, 1.01),
    "selective scan": (scanned, 1.0, 1.0),
    "state space, Granite 4 H": (delta(space((1, 128), (48, 64), 4, [[1]], bias=True)), 1.0, 1.0),
    "latent attention": (latent(BF16, 16), 1.0, 1.1),  # a quarter of a warp writes half a sector of its row
    "latent attention, 128 heads": (latent(BF16, 128), 1.0, 1.2),
    "latent attention, fp8": (latent(FP8, 16), 1.05, 1.1),
    "values by head": (lambda machine: by_head(machine, 128, 512), 1.0, 1.05),
    "streams of Gemma 3n": (streams, 1.0, 1.05),
    "streams, read and written": (connected, 1.0, 1.05),
    "routing": (routing, 1.15, 2.0),  # each task is written by one thread, and its pairs by others
}


@pytest.mark.parametrize("name", KERNELS)
def test_memory_is_asked_for_little_more_than_it_must(name: str) -> None:
    launch, banks, sectors = KERNELS[name]
    machine = PtxMachine(counts_traffic=True)
    launch(machine)
    for is_shared, most in ((True, banks), (False, sectors)):
        counts = [count for count in machine.traffic if count.is_shared == is_shared]
        actual, least = sum(count.actual for count in counts), sum(count.least for count in counts)
        worst = sorted(counts, key=lambda count: count.least - count.actual)[:3]
        assert 0 < least <= actual <= most * least, f"{actual / least:.2f} of the least; {worst}"


SHARED = "mov.u32 %s, own; mul.lo.s32 %o, %t, {stride}; and.b32 %o, %o, 255; add.s32 %s, %s, %o;\n"


@pytest.mark.parametrize(
    ("lines", "actual", "least"),
    [
        (SHARED.format(stride=4) + "ld.shared.u32 %d, [%s];", 1, 1),
        (SHARED.format(stride=8) + "ld.shared.u32 %d, [%s];", 2, 1),
        (SHARED.format(stride=128) + "ld.shared.u32 %d, [%s];", 2, 1),  # two words of one bank, 16 lanes each
        (SHARED.format(stride=0) + "ld.shared.u32 %d, [%s];", 1, 1),
        (SHARED.format(stride=8) + "ld.shared.u64 %d, [%s];", 2, 2),  # half a warp at a time
        (SHARED.format(stride=16) + "ld.shared.v4.u32 {%a, %b, %c, %d}, [%s];", 4, 4),
        (SHARED.format(stride=128) + "ld.shared.v4.u32 {%a, %b, %c, %d}, [%s];", 8, 4),
        ("ld.global.u64 %d, [%in];", 8, 8),
        ("add.s64 %in, %in, %at; ld.global.u32 %d, [%in];", 16, 4),
        ("sub.s64 %in, %in, %at; ld.global.u32 %d, [%in];", 1, 1),
    ],
)
def test_turns_and_sectors_are_counted_as_nvidia_describes_them(lines: str, actual: int, least: int) -> None:
    data, machine = torch.zeros(128, dtype=torch.int64), PtxMachine(counts_traffic=True)
    assert data.data_ptr() % 32 == 0, "torch's own boundary"
    run(OFFSETS + lines, data, 32, machine=machine)
    last = max(machine.traffic, key=lambda count: count.line)
    assert (last.requests, last.actual, last.least) == (1, actual, least)
