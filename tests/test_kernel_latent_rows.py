"""latent_rows.cu, emulated, against float64: what is rotated of queries, and the row that is kept, in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels import latent_rows as kernels

pytestmark = needs_emulation
BF16, HALF, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
EPS, OFFSET = 1e-5, 0.5


class Case(NamedTuple):
    tokens: int
    heads: int
    key_dim: int
    rotary: int
    rank: int
    interleaved: bool
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    block_size: int = 16
    rotates: bool = True


CASES = [
    Case(3, 16, 128, 64, 512, True),
    Case(2, 20, 192, 64, 512, False, HALF, HALF),
    Case(5, 6, 18, 12, 40, True),
    Case(4, 33, 10, 6, 34, False, BF16, FP8),
    Case(1, 128, 32, 64, 512, False, HALF, FP8, 64),
    Case(3, 3, 16, 16, 1040, True, BF16, FP8, 32),
    Case(7, 1, 2, 2, 2, True, HALF, HALF),
    Case(2, 2, 64, 256, 256, False, BF16, BF16, 32),
    Case(2, 3, 6, 138, 22, True),
    Case(3, 5, 128, 64, 512, False, BF16, FP8, rotates=False),
    Case(2, 3, 18, 6, 32, False, rotates=False),
    Case(3, 16, 128, 64, 512, True, BF16, INT8),
    Case(5, 33, 10, 6, 34, False, HALF, INT8, 32),
]


class Rows:
    """Of a case: its inputs, slots in no order with one of padding, and what is expected in float64. The cache is NaN, or its
    scales are."""

    def __init__(self, case: Case) -> None:
        tokens, heads, key_dim, rotary, rank, interleaved, dtype, kv_dtype, block_size, rotates = self.case = case
        self.q = random(tokens, heads * (key_dim + rotary), dtype=dtype)
        self.kept, self.norm = random(tokens, rank + rotary, dtype=dtype), random(rank, dtype=dtype)
        angles = random(tokens, rotary // 2 if rotates else 0, scale=100)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.scale = torch.tensor([0.037]) if kv_dtype == FP8 else None
        num_blocks = tokens + 2
        self.slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(tokens))[:tokens]
        self.slots[0] = block_size * 2 - 1
        if tokens > 1:
            self.slots[tokens // 2] = -1
        filled = 99 if kv_dtype == INT8 else torch.nan
        self.cache = torch.full((num_blocks, 1, block_size, rotary + rank), filled).to(kv_dtype)
        if kv_dtype == INT8:
            self.scale = torch.full(self.cache.shape[:3], torch.nan)
        cos, sin = self.cos.double(), self.sin.double()
        queries = self.q.double().view(tokens, heads, -1)[..., key_dim:]
        self.queries = reference.rope(queries, cos, sin, interleaved)
        own = self.kept.double()[:, None]
        factor = (own[..., :rank].pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        normed = own[..., :rank] * factor * (OFFSET + self.norm.double())
        self.own = torch.cat([reference.rope(own[..., rank:], cos, sin, interleaved), normed], -1)[:, 0]

    def run(self, emulator: Emulator) -> torch.Tensor:
        """Rotated numbers of queries, [T, H, rotary]. Nothing else of the rows is written."""
        case, rows = self.case, []

        def empty(*shape: int, **options: object) -> torch.Tensor:
            rows.append(torch.full(shape, 7.0, dtype=case.dtype))
            return rows[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))
            found = kernels.latent_rows(
                emulator, self.q, self.kept, case.heads, self.norm, EPS, OFFSET, self.cos, self.sin, case.interleaved,
                self.slots, self.cache, self.scale,
            )  # fmt: skip
        found = found.view(case.tokens, case.heads, -1)
        assert (found[..., case.rotary :] == 7.0).all()
        return found[..., : case.rotary]

    def check(self, emulator: Emulator) -> None:
        close_to_rounding(self.run(emulator), self.queries)
        flat = self.cache.view(-1, self.cache.shape[-1])
        if self.cache.dtype == INT8:
            self.check_int8(flat)
            return
        own = self.own if self.scale is None else (self.own / self.scale.double()).clamp(-448, 448)
        there = self.slots >= 0
        close_to_rounding(flat[self.slots[there]], own[there])
        others = torch.ones(len(flat), dtype=torch.bool)
        others[self.slots[there]] = False
        assert flat[others].float().isnan().all()

    def check_int8(self, flat: torch.Tensor) -> None:
        """Half a step from float64, where a step is a 127th of the row's largest number."""
        assert self.scale is not None
        there, scales = self.slots[self.slots >= 0], self.scale.flatten()
        own, steps = self.own[self.slots >= 0], scales[there].double()
        assert torch.allclose(steps * 127, own.abs().amax(dim=-1), rtol=1e-5, atol=0.0)
        assert ((flat[there] * steps[:, None] - own).abs() <= 0.5001 * steps[:, None]).all()
        others = torch.ones(len(flat), dtype=torch.bool)
        others[there] = False
        assert (flat[others] == 99).all()
        assert scales[others].isnan().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_number_is_one_rounding_from_float64(case: Case, order: int) -> None:
    Rows(case).check(Emulator(order))


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_bits_do_not_depend_on_the_other_tokens(case: Case) -> None:
    both = Rows(case._replace(tokens=4))
    whole = both.run(Emulator())
    kept = both.cache.view(-1, both.cache.shape[-1])[both.slots[3]].view(torch.uint8)
    for name in ("q", "kept", "cos", "sin", "slots"):
        setattr(both, name, getattr(both, name)[3:])
    both.case, both.cache = both.case._replace(tokens=1), torch.full_like(both.cache.float(), torch.nan).to(both.cache.dtype)
    assert torch.equal(both.run(Emulator(7)), whole[3:])
    assert torch.equal(both.cache.view(-1, both.cache.shape[-1])[both.slots[0]].view(torch.uint8), kept)


def far_rows() -> Rows:
    """The last place of a cache of more than 2^31 elements."""
    rows = Rows(Case(1, 2, 16, 16, 48, True))
    num_blocks = 2**31 // (16 * 64) + 2
    rows.cache = cpu.zeros(num_blocks * 16 * 64, BF16).view(num_blocks, 1, 16, 64)
    rows.slots = torch.tensor([num_blocks * 16 - 1])
    return rows


def check_far(rows: Rows, emulator: Emulator) -> None:
    rows.run(emulator)
    close_to_rounding(rows.cache[-1, 0, -1:], rows.own)


def test_caches_beyond_two_to_the_31_elements() -> None:
    check_far(far_rows(), Emulator())


@pytest.mark.parametrize("bug", ["PAGE", "INT32"])
def test_planted_bugs_are_found(bug: str) -> None:
    found = 0
    for order in ORDERS:
        emulator = Emulator(order, bugs=(bug,))
        try:
            if bug == "INT32":
                check_far(far_rows(), emulator)
            else:
                Rows(CASES[0]).check(emulator)
        except (AssertionError, KernelFailed):
            found += 1
    assert found
