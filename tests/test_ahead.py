"""Which way weights are asked for is measured, once, where it matters; either way every bit is the same."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.kernels import ahead, simd_planes, simd_values
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.format import Blocks, Fp8, Integer, Nf4

WEIGHTS = (*(f"Q{bits}_K" for bits in (2, 3, 4, 5, 6)), "MXFP4", "TQ2_0", "int4", "bf16")


@pytest.fixture(autouse=True)
def nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_chosen", [])


def storage_of(name: str) -> CpuStorage:
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(130, 512, generator=generator) / 16
    made: CpuStorage
    if name == "bf16":
        made = DenseStorage(130, 512, torch.bfloat16)
    else:
        form = Integer(4, group=32) if name == "int4" else Blocks(name)
        made = make_storage(form, 130, 512, torch.bfloat16, rounds=True)
    made.load_rows(0, weight)
    return made


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_distance_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = storage_of(name), torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = weight.matmul(x, None, torch.float32)
    for distance in (ahead.JUST_READ, ahead.FAR):
        monkeypatch.setattr(ahead, "_chosen", [distance])
        for row in range(3):
            assert torch.equal(weight.matmul(x[row : row + 1], None, torch.float32), expected[row : row + 1])


def test_what_weights_ask_for() -> None:
    """On a processor that multiplies from planes in one pass; panels have requests of their own."""
    if not simd_planes._ONE_PASS:
        pytest.skip("this processor unpacks panels")
    for name in ("Q4_K", "Q5_K", "int4"):
        weight = storage_of(name)
        assert weight.asking_bytes == weight.num_bytes
    for form in (Fp8(128), Nf4()):
        assert make_storage(form, 64, 512, torch.float32, rounds=True).asking_bytes == 0
        if simd_values.AVAILABLE:
            assert (weight := make_storage(form, 64, 512, torch.bfloat16, rounds=True)).asking_bytes == weight.num_bytes
    eight = make_storage(Integer(8), 64, 512, torch.bfloat16, rounds=True)
    assert eight.asking_bytes == (eight.num_bytes if simd_planes.SEVERAL else 0)
    assert DenseStorage(64, 512, torch.float32).asking_bytes == 0


def reader(seconds: dict[int, float], seen: list[int]) -> Callable[[], None]:
    """Takes so long, by distances."""

    def read() -> None:
        seen.append(ahead.distance())
        time.sleep(seconds[ahead.distance()])

    return read


@pytest.mark.parametrize("better", [ahead.JUST_READ, ahead.FAR])
def test_the_quicker_distance_is_taken(better: int) -> None:
    seen: list[int] = []
    seconds = {each: 0.001 if each == better else 0.02 for each in (ahead.JUST_READ, ahead.FAR)}
    ahead.choose([(ahead.ENOUGH_BYTES // 2, reader(seconds, seen))] * 3)
    assert ahead.distance() == better
    assert len(seen) == 2 * 2 * ahead.ROUNDS, "no more weights than are enough"
    ahead.choose([(ahead.ENOUGH_BYTES, reader(seconds, seen))])
    assert len(seen) == 2 * 2 * ahead.ROUNDS, "it is measured once"


def test_where_little_is_read_nothing_is_measured() -> None:
    seen: list[int] = []
    ahead.choose([(ahead.ENOUGH_BYTES // 4, reader({}, seen))] * 3)
    ahead.choose([])
    assert not seen
    assert ahead.distance() == ahead.JUST_READ


def test_a_platform_keeps_no_weight_that_its_layer_has_let_go() -> None:
    platform = CpuPlatform(EngineConfig(), None)
    kept, gone = (platform.make_storage(Integer(8), 64, 512, torch.bfloat16) for _ in range(2))
    there = weakref.ref(gone), weakref.ref(kept)
    del gone
    assert there[0]() is None
    assert there[1]() is kept
