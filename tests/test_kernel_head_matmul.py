"""head_matmul.cu, emulated, against float64: products with a matrix of each head, between columns of wider tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import head_matmul as kernels
from nanovllm_cli.kernels.head_matmul import CudaHeadMatrices

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """before, between: columns that are nobody's, of x and of out, in front of each head's and at the end."""

    tokens: int
    heads: int
    num_rows: int
    width: int
    x_gap: int
    out_gap: int
    dtype: torch.dtype = BF16


CASES = [
    Case(1, 16, 64, 128, 64, 64),
    Case(1, 3, 128, 512, 0, 0, HALF),
    Case(17, 2, 40, 192, 64, 8),
    Case(33, 1, 32, 256, 8, 0, HALF),
    Case(64, 2, 48, 512, 0, 64),
    Case(5, 3, 33, 17, 1, 2),
    Case(16, 2, 7, 650, 4, 3, HALF),
    Case(3, 5, 1, 2, 6, 1),
    Case(31, 1, 90, 386, 2, 6),
]


class Product:
    """The matrices of a case, x, where the results go, and what they are in float64. What is nobody's is NaN."""

    def __init__(self, case: Case) -> None:
        tokens, heads, num_rows, width, self.x_gap, self.out_gap, dtype = self.case = case
        self.weight = random(heads, num_rows, width, dtype=dtype, scale=width**-0.5)
        own = random(tokens, heads, width, dtype=dtype)
        gap = torch.full((tokens, heads, self.x_gap), torch.nan, dtype=dtype)
        self.x = torch.cat([torch.cat([gap, own], 2).flatten(1), gap[:, 0]], 1)
        self.expected = torch.einsum("thk,hnk->thn", own.double(), self.weight.double())

    def run(self, emulator: Emulator, deterministic: bool = False, count: int | None = None) -> torch.Tensor:
        """The first `count` tokens: [T, H, N]."""
        _, heads, num_rows, width, x_gap, out_gap, dtype = self.case
        matrices = CudaHeadMatrices(emulator, deterministic, heads, num_rows, width, dtype)
        for head in range(heads):
            matrices.load(head, self.weight[head].float())
        x = self.x[:count].contiguous()
        out = torch.full((len(x), heads * (num_rows + out_gap) + out_gap), torch.nan, dtype=dtype)
        matrices.products_into(x, x_gap, x_gap + width, out, out_gap, out_gap + num_rows)
        assert out[:, out.shape[1] - out_gap :].isnan().all()
        found = out[:, : heads * (num_rows + out_gap)].unflatten(1, (heads, -1))
        assert found[..., :out_gap].isnan().all(), "written where nothing of ours is"
        return found[..., out_gap:]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_element_is_one_rounding_from_float64(case: Case, order: int) -> None:
    product = Product(case)
    emulator = Emulator(order)
    close_to_rounding(product.run(emulator), product.expected)
    assert emulator.launches == {"head_matmul": 1}


@pytest.mark.parametrize("case", [CASES[2], CASES[4]._replace(tokens=150), CASES[6]._replace(tokens=70)], ids=str)
def test_a_deterministic_gpus_bits_are_a_tokens_own(case: Case) -> None:
    product = Product(case)
    whole = product.run(Emulator(num_multiprocessors=132), deterministic=True)
    close_to_rounding(whole, product.expected)
    for count in (1, 2, 16, 17, 65):
        alone = product.run(Emulator(7), deterministic=True, count=count)
        assert torch.equal(alone, whole[: min(count, case.tokens)])


def test_many_tokens_are_the_librarys() -> None:
    product, emulator = Product(Case(kernels.MOST_FEW + 1, 3, 33, 40, 2, 5)), Emulator()
    close_to_rounding(product.run(emulator), product.expected)
    assert not emulator.launches


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    assert Product(CASES[0]).run(emulator, count=0).shape == (0, 16, 64)
    assert not emulator.launches


def test_products_of_their_own_are_side_by_side() -> None:
    product = Product(Case(2, 3, 20, 32, 0, 0))
    matrices = CudaHeadMatrices(Emulator(), False, 3, 20, 32, BF16)
    for head in range(3):
        matrices.load(head, product.weight[head])
    assert matrices.num_bytes == 3 * 20 * 32 * 2
    close_to_rounding(matrices.products(product.x, 0, 32), product.expected.flatten(1))


@pytest.mark.parametrize("bug", ["TAIL", "BARRIER"])
def test_planted_bugs_are_found(bug: str) -> None:
    product = Product(Case(17, 3, 33, 386, 2, 2))
    found = 0
    for order in ORDERS:
        try:
            close_to_rounding(product.run(Emulator(order, bugs=(bug,))), product.expected)
        except (AssertionError, KernelFailed):
            found += 1
    assert found


def test_gpus_without_bfloat16_say_so() -> None:
    with pytest.raises(UnsupportedError, match="bfloat16"):
        Product(CASES[0]).run(Emulator(capability=75))
    product = Product(CASES[1])
    close_to_rounding(product.run(Emulator(capability=75)), product.expected)


def test_a_warp_has_a_unit_of_what_models_have() -> None:
    assert [kernels.parts_of(width) for width in (64, 128, 192, 256, 512)] == [1, 1, 2, 2, 4]
    assert [kernels.tiles_of(tokens) for tokens in (1, 16, 17, 33, 64, 500)] == [1, 1, 2, 4, 4, 4]
