"""RWKV-7's time mixing on a CPU: the kernels against formulas in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import cpu, wkv, wkv_rules
from nanovllm_cli.kernels.wkv import CHANNEL, TIME
from wkvs import CASES, EPS, Case, Kept, check, check_same_bits, float64_rule

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_formula(case: Case, dtype: torch.dtype) -> None:
    cpu.set_num_threads(3 if dtype == BF16 else 1)
    check(case, dtype)


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (1, 23)])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(heads: int, dim: int) -> None:
    check_same_bits(heads, dim, 83)


def test_the_plain_rule_is_the_papers() -> None:
    kept = Kept(CASES[1]._replace(is_first=False), FP32)
    args, _ = kept.step([9, 1, 1, 1])
    rows, state = [each[:9].double() for each in args["inputs"]], torch.randn(3, 24, 24, dtype=torch.float64)
    expected, behind = float64_rule(*rows, kept.tables.double(), state)
    r, k, v, gates, decays, rates, mixes, first = rows
    found, left = wkv_rules.wkv7(r, k, v, decays, rates, gates, first, mixes, kept.tables.double(), EPS, state)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(left, behind)


def test_a_step_that_failed_between_the_kernels_is_repeated() -> None:
    """What the first two leave nobody takes for a state, nor goes on from what was before it."""
    kept = Kept(Case(2, 16, [[9], [5], [1]]), BF16)

    def begin(args: dict[str, object]) -> None:
        step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
        wkv.token_shift(args["x"], kept.shares, TIME, kept.states, **step)  # type: ignore[arg-type]
        wkv.wkv7(args["inputs"], kept.tables, EPS, kept.states, **step)  # type: ignore[arg-type]

    for chunks in kept.case.steps:
        args, runs = kept.step(chunks)
        begin(args)
        kept.check(args, runs, kept.run(**args))
    begin(kept.step([1])[0])
    kept.lens = [14]
    assert all(each.isnan().all() for each in kept.run(**kept.step([1])[0]))


def test_a_state_that_is_not_there_gives_no_numbers() -> None:
    kept = Kept(CASES[0], BF16)
    kept.lens = [5, 37, 1]
    kept.states.stamps.zero_()
    args, _ = kept.step([1, 1, 1])
    assert all(each.isnan().all() for each in kept.run(**args))


def test_a_nan_of_one_head_is_its_own_and_stays() -> None:
    kept = Kept(Case(2, 16, [[3], [1]]), BF16)
    args, _ = kept.step([3])
    args["inputs"].k[1, 5] = torch.nan
    found = kept.run(**args)[1]
    assert not found[0].isnan().any()
    assert not found[:, 16:].isnan().any()
    assert found[1:, :16].isnan().all()


def test_a_key_of_zeros_takes_nothing_off() -> None:
    """Whose length would be divided by."""
    kept = Kept(Case(1, 16, [[4]]), FP32)
    args, runs = kept.step([4])
    args["inputs"].k[2:] = 0
    found = kept.run(**args)
    assert found[1].isfinite().all()
    kept.check(args, runs, found)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_narrow_matrices_give_is_squashed(dtype: torch.dtype) -> None:
    x = torch.cat([random(5, 33), torch.tensor([[1e-6, -1e-6, 90.0, -90.0, torch.inf, -torch.inf, *[0.0] * 27]])])
    close_to_rounding(wkv.squash(x, "tanh", dtype), x.double().tanh())
    close_to_rounding(wkv.squash(x, "sigmoid", dtype), x.double().sigmoid())
    assert wkv.squash(torch.full((1, 1), torch.nan), "tanh", dtype).isnan().all()


def test_parts_of_other_sizes_are_refused() -> None:
    kept = Kept(CASES[0], BF16)
    args, _ = kept.step([5, 37, 1])
    step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
    with pytest.raises(AssertionError):
        wkv.token_shift(args["x"], kept.shares[:, :-1].contiguous(), TIME, kept.states, **step)
    with pytest.raises(AssertionError):
        wkv.token_shift(args["x"].float(), kept.shares, CHANNEL, kept.states, **step)
    with pytest.raises(AssertionError):
        wkv.wkv7(args["inputs"]._replace(first=None), kept.tables, EPS, kept.states, **step)
