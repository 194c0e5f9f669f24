"""bf16 weights in 12 bits (kernels/compact.py): nothing is lost, and products are those of the weights in 16 bits, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nanovllm_cli.kernels import compact, cpu, reference
from nanovllm_cli.kernels.compact import Compact
from nanovllm_cli.kernels.dense import Plain

pytestmark = pytest.mark.skipif(not compact.AVAILABLE, reason="this processor looks up no 32 words at once (AVX-512BW)")


def normal(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k)


def with_zeros(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k) * (torch.rand(n, k) < 0.3) * torch.where(torch.rand(n, k) < 0.5, -1.0, 1.0)


def scaled(n: int, k: int) -> torch.Tensor:
    """Outputs and inputs of different sizes, as trained weights have."""
    return torch.randn(n, k) * torch.exp(0.4 * torch.randn(n, 1)) * torch.exp(0.4 * torch.randn(1, k))


def outliers(n: int, k: int) -> torch.Tensor:
    weight = torch.randn(n, k)
    weight.view(-1)[:: max(1, n * k // 20)] *= 1e6
    weight[-1, -1] = 2.0**-130  # subnormal
    return weight


def all_exponents(n: int, k: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-120, 30, (n, k)).float()) * torch.randn(n, k).sign()


KINDS: tuple[Callable[[int, int], torch.Tensor], ...] = (normal, with_zeros, scaled, outliers, all_exponents)
SHAPES = (64, 64), (1, 2), (65, 130), (130, 66), (200, 514), (70, 1100)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_same_weight(shape: tuple[int, int], kind: Callable[[int, int], torch.Tensor]) -> None:
    torch.manual_seed(sum(shape))
    weight = kind(*shape).bfloat16()
    kept, plain = Compact(*shape), Plain(*shape, torch.bfloat16)
    kept.load_rows(0, weight)
    plain.load_rows(0, weight)
    ids = torch.randperm(shape[0])
    assert torch.equal(kept.rows(ids).view(torch.int16), weight[ids].view(torch.int16))
    # a tile of 1 to 4 rows, two such, small panels and large ones, more than one task
    for tokens in (1, 2, 3, 4, 5, 8, 9, 24, 25, 200):
        x, bias = torch.randn(tokens, shape[1]).bfloat16(), torch.randn(shape[0])
        whole = kept.matmul(x, bias, torch.float32)
        assert torch.equal(whole, plain.matmul(x, bias, torch.float32)), tokens
        assert torch.equal(kept.matmul(x, None, torch.bfloat16), plain.matmul(x, None, torch.bfloat16)), tokens
    assert torch.equal(kept.matmul(x[:1].contiguous(), bias, torch.float32), whole[:1])
    expected = reference.matmul(x, weight, bias, torch.float64)
    assert (whole - expected).norm() <= 1e-5 * expected.norm()


def test_what_it_takes() -> None:
    kept = Compact(256, 1024)
    kept.load_rows(0, torch.randn(256, 1024).bfloat16())
    assert kept.num_whole == 0
    assert kept.num_bytes <= 0.76 * 2 * 256 * 1024
    kept.load_rows(64, all_exponents(64, 1024).bfloat16())
    assert kept.num_whole == 1, "too many exponents for a list"
    kept.load_rows(64, torch.randn(64, 1024).bfloat16())
    assert kept.num_whole == 0, "written over"


def test_the_list_is_as_long_as_it_says() -> None:
    """One pair too many, and a tile is kept whole; up to then it isn't."""
    shape = (64, 256)
    for entries, whole in ((32, 0), (33, 1)):
        weight = torch.ones(shape, dtype=torch.bfloat16)
        weight[:15, 0] = torch.exp2(torch.arange(1, 16).float()).bfloat16()  # with 1.0: 16 exponents, more often than the next
        weight[:15, 2] = weight[:15, 0]
        for entry in range(entries):
            weight[63 - entry // 16, 2 * (entry % 16) + entry % 2] = 2.0 ** (20 + entry)
        kept, plain = Compact(*shape), Plain(*shape, torch.bfloat16)
        kept.load_rows(0, weight)
        plain.load_rows(0, weight)
        assert kept.num_whole == whole
        assert torch.equal(kept.rows(torch.arange(64)), weight)
        x = torch.randn(3, 256).bfloat16()
        assert torch.equal(kept.matmul(x, None, torch.float32), plain.matmul(x, None, torch.float32))


def test_rows_come_in_any_pieces() -> None:
    weight = scaled(300, 70).bfloat16()
    kept = Compact(300, 70)
    for first, last in ((250, 300), (0, 10), (100, 250), (10, 100)):
        kept.load_rows(first, weight[first:last])
        assert torch.equal(kept.rows(torch.arange(first, last)), weight[first:last])
    assert torch.equal(kept.rows(torch.arange(300)), weight)


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    kept = Compact(700, 256)
    kept.load_rows(0, scaled(700, 256).bfloat16())
    x = torch.randn(200, 256).bfloat16()
    cpu.set_num_threads(1)
    try:
        expected = kept.matmul(x, None, torch.float32)
    finally:
        cpu.set_num_threads(2)
    assert torch.equal(kept.matmul(x, None, torch.float32), expected)
