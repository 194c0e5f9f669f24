"""causal_conv.cu, selective_scan.cu and scan_parts.cu, emulated: outputs and states against formulas in float64, step after
step."""

from __future__ import annotations

import functools

import pytest
import torch

from deltas import Share
from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import state_rules
from nanovllm_cli.kernels.causal_conv import causal_conv
from nanovllm_cli.kernels.scan_parts import scan_parts
from nanovllm_cli.kernels.selective_scan import selective_scan
from nanovllm_cli.state_spec import ScanSpec
from scans import CASES, Case, Kept, Kernels, check, check_repeated, check_same_bits

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16


def on(emulator: Emulator) -> Kernels:
    return functools.partial(causal_conv, emulator), functools.partial(selective_scan, emulator)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_equal_to_the_formula(index: int) -> None:
    case = CASES[index]._replace(steps=CASES[index].steps[:11])
    check(case, HALF if index % 3 == 2 else BF16, on(Emulator(ORDERS[index % len(ORDERS)])))


def test_a_token_has_the_same_bits_whatever_it_is_computed_with() -> None:
    check_same_bits(40, 33, on(Emulator()))


def test_a_step_that_failed_between_the_kernels_is_repeated() -> None:
    check_repeated(on(Emulator()))


def test_rows_of_padding_write_nothing_and_are_zeros_and_what_is_not_there_is_nan() -> None:
    """As a recorded step of decodes has them: rows without a sequence behind the others."""
    kept = Kept(Case(ScanSpec(40, 4, 5, 4), [[5, 9], [1, 1]]), BF16, on(Emulator()))
    free = next(state for state in range(len(kept.states.stamps)) if not (kept.state_of == state).any())
    kept.state_of[kept.state_of == 0] = free  # state 0, which padding names, is nobody's
    untouched = [tensor[0].nan_to_num(7.0).clone() for tensor in kept.states]
    args, runs = kept.step([5, 9])
    kept.check(args, runs, kept.run(**args))
    kept.states.stamps[int(kept.state_of[1])] = 0
    args, _ = kept.step([1, 1])
    for name in ("projected", "rates", "both"):
        args[name] = torch.cat([args[name], torch.full((3, args[name].shape[1]), torch.nan).to(args[name].dtype)])
    for name in ("kv_lens", "known_lens", "state_of"):
        args[name] = torch.cat([args[name], torch.zeros(3, dtype=torch.int32)])
    out = kept.run(**args | {"query_starts": torch.arange(6, dtype=torch.int32)})
    for rows in (kept.mixed, out):
        assert rows[0].isfinite().all()
        assert rows[1].isnan().all()
        assert not rows[2:].any()
    assert all(torch.equal(tensor[0].nan_to_num(7.0), before) for tensor, before in zip(kept.states, untouched, strict=True))


@pytest.mark.parametrize(("rank", "size"), [(5, 16), (41, 3)])
def test_parts_are_normed_each_by_itself(rank: int, size: int) -> None:
    x, gains = random(3, rank + 2 * size), random(rank + 2 * size)
    for own in (None, gains):
        expected = state_rules.scan_parts(x.double(), rank, own, 1e-5)
        for got, wanted in zip(scan_parts(Emulator(), x, rank, own, 1e-5, HALF), expected, strict=True):
            close_to_rounding(got, wanted)


@pytest.mark.parametrize("bug", ["SAME_PLACE", "NOTHING_HELD", "NO_BARRIER"])
def test_planted_bugs_are_found(bug: str) -> None:
    case = Case(ScanSpec(40, 6, 5, 4), [[7, 3], [Share(1, 4), 1], [Share(2, back=2), 3]])

    def fails(order: int, bugs: tuple[str, ...]) -> bool:
        try:
            check(case, BF16, on(Emulator(order, bugs=bugs)))
        except (AssertionError, KernelFailed):
            return True
        return False

    assert any(fails(order, (bug,)) for order in ORDERS)
    assert not fails(ORDERS[-1], ())


def test_what_registers_do_not_hold_is_refused() -> None:
    for spec, message in ((ScanSpec(8, 4, 5, 9), "a convolution over 9 tokens"), (ScanSpec(8, 33, 5, 4), "states of 33 numbers")):
        kept = Kept(Case(spec, [[3]]), BF16, on(Emulator()))
        with pytest.raises(UnsupportedError, match=f"{message} on a GPU"):
            kept.run(**kept.step([3])[0])
