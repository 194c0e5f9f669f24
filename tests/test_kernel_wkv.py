"""token_shift.cu, wkv7.cu and squash.cu, emulated: outputs and states against formulas in float64, step after step."""

from __future__ import annotations

import pytest
import torch

from deltas import Share
from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.squash import squash
from nanovllm_cli.kernels.wkv import CHANNEL, TIME
from wkvs import CASES, EPS, Case, Kept, check, check_same_bits

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16


@pytest.mark.parametrize("index", range(len(CASES)))
def test_equal_to_the_formula(index: int) -> None:
    case = CASES[index]._replace(steps=CASES[index].steps[:9])
    check(case, HALF if index % 3 == 2 else BF16, Emulator(ORDERS[index % len(ORDERS)]))


@pytest.mark.parametrize(("heads", "dim"), [(2, 24), (1, 64)])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(heads: int, dim: int) -> None:
    check_same_bits(heads, dim, 33, Emulator())


def test_rows_of_padding_write_nothing_and_are_zeros_and_what_is_not_there_is_nan() -> None:
    """As a recorded step of decodes has them: rows without a sequence behind the others."""
    kept = Kept(Case(2, 24, [[5, 9], [1, 1]]), BF16, Emulator())
    free = next(state for state in range(len(kept.states.stamps)) if not (kept.state_of == state).any())
    kept.state_of[kept.state_of == 0] = free  # state 0, which padding names, is nobody's
    untouched = [tensor[0].nan_to_num(7.0).clone() for tensor in kept.states]
    args, runs = kept.step([5, 9])
    kept.check(args, runs, kept.run(**args))
    kept.states.stamps[int(kept.state_of[1])] = 0
    args, _ = kept.step([1, 1])

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, torch.full((3, rows.shape[1]), torch.nan).to(rows.dtype)])

    args |= {"x": padded(args["x"]), "y": padded(args["y"]), "inputs": type(args["inputs"])(*map(padded, args["inputs"]))}
    for name in ("kv_lens", "known_lens", "state_of"):
        args[name] = torch.cat([args[name], torch.zeros(3, dtype=torch.int32)])
    for rows in kept.run(**args | {"query_starts": torch.arange(6, dtype=torch.int32)}):
        assert rows[..., 0, :].isfinite().all()
        assert rows[..., 1, :].isnan().all()
        assert not rows[..., 2:, :].any()
    assert all(torch.equal(tensor[0].nan_to_num(7.0), before) for tensor, before in zip(kept.states, untouched, strict=True))


def test_a_step_that_failed_between_the_kernels_is_repeated() -> None:
    """What the first two leave nobody takes for a state, nor goes on from what was before it."""
    kept = Kept(Case(2, 16, [[9], [5], [1]]), BF16, Emulator())

    def begin(args: dict[str, object]) -> None:
        step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
        kept.shift(args["x"], kept.shares, TIME, kept.states, **step)
        kept.rule(args["inputs"], kept.tables, EPS, kept.states, **step)

    for chunks in kept.case.steps:
        args, runs = kept.step(chunks)
        begin(args)
        kept.check(args, runs, kept.run(**args))
    begin(kept.step([1])[0])
    kept.lens = [14]
    assert all(each.isnan().all() for each in kept.run(**kept.step([1])[0]))


def test_a_key_of_zeros_takes_nothing_off() -> None:
    """Whose length would be divided by."""
    kept = Kept(Case(1, 16, [[4]]), BF16, Emulator())
    args, runs = kept.step([4])
    args["inputs"].k[2:] = 0
    found = kept.run(**args)
    assert found[1].isfinite().all()
    kept.check(args, runs, found)


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_what_narrow_matrices_give_is_squashed(dtype: torch.dtype) -> None:
    x = torch.cat([random(9, 33), torch.tensor([[1e-6, -1e-6, 90.0, -90.0, torch.inf, -torch.inf, *[0.0] * 27]])])
    close_to_rounding(squash(Emulator(), x, "tanh", dtype), x.double().tanh())
    close_to_rounding(squash(Emulator(), x, "sigmoid", dtype), x.double().sigmoid())
    assert squash(Emulator(), torch.full((1, 1), torch.nan), "tanh", dtype).isnan().all()
    assert squash(Emulator(), torch.empty(0, 3), "tanh", dtype).shape == (0, 3)


@pytest.mark.parametrize("bug", ["SAME_PLACE", "NOTHING_HELD", "NO_BARRIER"])
def test_planted_bugs_are_found(bug: str) -> None:
    case = Case(2, 24, [[7, 3], [Share(1, 4), 1], [Share(2, back=2), 3]])

    def fails(order: int, bugs: tuple[str, ...]) -> bool:
        try:
            check(case, BF16, Emulator(order, bugs=bugs))
        except (AssertionError, KernelFailed):
            return True
        return False

    assert any(fails(order, (bug,)) for order in ORDERS)
    assert not fails(ORDERS[-1], ())


def test_what_the_kernels_do_not_take_is_refused() -> None:
    kept = Kept(Case(1, 132, [[3]]), BF16, Emulator())
    with pytest.raises(UnsupportedError, match="RWKV's heads of 132 numbers on a GPU"):
        kept.run(**kept.step([3])[0])
    kept = Kept(CASES[0], BF16, Emulator())
    args, _ = kept.step([5, 37, 1])
    step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
    for x, shares in ((args["x"], kept.shares[:, :-1].contiguous()), (args["x"].float(), kept.shares)):
        with pytest.raises(AssertionError):
            kept.shift(x, shares, CHANNEL, kept.states, **step)
    with pytest.raises(AssertionError):
        kept.shift(args["x"], kept.shares, CHANNEL, kept.states, **step | {"kv_lens": step["kv_lens"][1:]})
    with pytest.raises(AssertionError):
        kept.rule(args["inputs"]._replace(first=None), kept.tables, EPS, kept.states, **step)
