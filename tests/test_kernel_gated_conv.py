"""gated_conv.cu, emulated: outputs and what is kept against the formula in float64, step after step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from convolutions import CASES, Case, Paged, check, check_same_bits
from emulation.compare import close_to_rounding
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.gated_conv import gated_conv

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16


def on(emulator: Emulator) -> Callable[..., torch.Tensor]:
    return functools.partial(gated_conv, emulator)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_equal_to_the_formula(index: int, order: int) -> None:
    check(CASES[index], HALF if index % 3 == 2 else BF16, on(Emulator(order)))


def padded(args: dict[str, Any], rows: int) -> dict[str, Any]:
    """As a recorded step of decodes has them: rows without a sequence behind the others."""
    more = rows - len(args["kv_lens"])
    zeros = {"projected": torch.full((more, args["projected"].shape[1]), torch.nan).to(args["projected"].dtype),
             "kv_lens": torch.zeros(more, dtype=torch.int32),
             "block_tables": torch.zeros(more, args["block_tables"].shape[1], dtype=torch.int32)}  # fmt: skip
    return args | {name: torch.cat([args[name], fill]) for name, fill in zeros.items()} | {
        "query_starts": torch.arange(rows + 1, dtype=torch.int32)}  # fmt: skip


def test_rows_of_padding_write_nothing_and_are_zeros() -> None:
    case = CASES[1]
    paged = Paged(case, BF16)
    for counts in case.steps:
        args, expected = paged.step(counts)
        if counts == [1, 1, 1]:
            args = padded(args, 8)
        got = gated_conv(Emulator(), **args)
        close_to_rounding(got[: len(expected)], expected)
        assert not got[len(expected) :].any()
    paged.check_cache()


def test_sequences_of_guesses_are_told_apart_by_their_starts() -> None:
    """As a recorded step with guesses has them: as many starts as rows, those behind the last sequence at the end."""
    case = CASES[2]
    paged = Paged(case, BF16)
    for counts in case.steps:
        args, expected = paged.step(counts)
        rows, own = len(args["projected"]), len(args["kv_lens"])
        args["query_starts"] = torch.cat([args["query_starts"], torch.full((rows - own,), rows, dtype=torch.int32)])
        args["kv_lens"] = torch.cat([args["kv_lens"], torch.zeros(rows - own, dtype=torch.int32)])
        close_to_rounding(gated_conv(Emulator(), **args), expected)
    paged.check_cache()


def test_a_token_has_the_same_bits_whatever_it_is_computed_with() -> None:
    check_same_bits(on(Emulator()), 24)


def check_far_away(emulator: Emulator) -> None:
    """The last blocks of a cache of four billion elements, of which only what is written takes memory."""
    paged = Paged(Case(64, 3, [[20], [1]]), HALF)
    num_blocks = 2**32 // (16 * 64) + 4
    try:
        paged.cache = cpu.zeros(num_blocks * 16 * 64, HALF).view(num_blocks, 16, 64)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    paged.tables = torch.tensor([[num_blocks - 3, num_blocks - 1]]).int()
    for counts in paged.case.steps:
        args, expected = paged.step(counts)
        close_to_rounding(gated_conv(emulator, **args), expected)
    for position in range(16, 21):
        assert torch.equal(paged.cache[-1, position % 16], paged.inputs[0][2 + position])


def test_blocks_past_four_billion_elements() -> None:
    check_far_away(Emulator())


def fails(run: Callable[[], None]) -> bool:
    try:
        run()
    except (AssertionError, KernelFailed):
        return True
    return False


@pytest.mark.parametrize("bug", ["UNMASKED_TAIL", "PAGE", "INT32"])
def test_planted_bugs_are_found(bug: str) -> None:
    one_thread_too_many = Case(31, 3, [[8], [16]])  # writes 2 bytes behind an output, which nobody else has

    def check_with(order: int, bugs: tuple[str, ...]) -> None:
        emulator = Emulator(order, bugs=bugs)
        if bug == "INT32":
            check_far_away(emulator)
        else:
            check({"UNMASKED_TAIL": one_thread_too_many, "PAGE": CASES[1]}[bug], BF16, on(emulator))

    assert any(fails(lambda order=order: check_with(order, (bug,))) for order in ORDERS)
    assert not fails(lambda: check_with(0, ()))


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    args, _ = Paged(CASES[1], BF16).step([1, 1, 1])
    none = {"projected": args["projected"][:0], "query_starts": args["query_starts"][:1], "kv_lens": args["kv_lens"][:0],
            "block_tables": args["block_tables"][:0]}  # fmt: skip
    assert gated_conv(emulator, **(args | none)).shape == (0, 64)
    assert not emulator.launches


def test_more_taps_than_registers_are_refused() -> None:
    args, _ = Paged(Case(16, 9, [[3]]), BF16).step([3])
    with pytest.raises(UnsupportedError, match="a convolution over 9 tokens on a GPU"):
        gated_conv(Emulator(), **args)
