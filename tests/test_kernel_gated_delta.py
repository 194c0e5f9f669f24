"""gated_delta.cu, emulated: outputs, states and what is kept against the formula in float64, step after step, each done twice; by
the delta rule, with a decay a head or a channel, and by Mamba-2's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deltas import (
    CASES,
    CHANNELS,
    MAX_GUESSES,
    SPACES,
    TURNED,
    Case,
    Chunks,
    Kept,
    Share,
    check,
    check_same_bits,
    space,
)
from emulation.compare import close_to_rounding
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.gated_delta import gated_delta
from nanovllm_cli.kernels.states import ByChannel, States

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
RULES: dict[str, dict[str, Any]] = {"delta": {}, "channels": {"by_channel": True}, "mamba": {"mamba": True, "bias": True}}
EACH_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def on(emulator: Emulator) -> Callable[..., torch.Tensor]:
    return functools.partial(gated_delta, emulator)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_equal_to_the_formula(index: int, order: int) -> None:
    check(CASES[index], HALF if index % 3 == 2 else BF16, on(Emulator(order)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("index", range(len(SPACES)))
def test_equal_to_the_formula_of_a_state_space(index: int, order: int) -> None:
    check(SPACES[index], HALF if index % 3 == 2 else BF16, on(Emulator(order)))


@pytest.mark.parametrize("case", TURNED)
def test_betas_go_up_to_two(case: Case) -> None:
    check(case, BF16, on(Emulator(1)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("index", [0, 1, 3, 4, 6, 7, 8])
def test_equal_to_the_formula_with_a_decay_of_each_channel(index: int, order: int) -> None:
    check(CHANNELS[index], HALF if index == 3 else BF16, on(Emulator(order)))


def padded(args: dict[str, Any], rows: int) -> dict[str, Any]:
    """As a recorded step of decodes has them: rows without a sequence behind the others."""
    more = rows - len(args["kv_lens"])
    zeros = {"projected": torch.full((more, args["projected"].shape[1]), torch.nan).to(args["projected"].dtype),
             "gates": torch.full((more, args["gates"].shape[1]), torch.nan),
             **{name: torch.zeros(more, dtype=torch.int32) for name in ("kv_lens", "known_lens", "state_of")}}  # fmt: skip
    if (apart := args.get("by_channel")) is not None:
        wider = (F.pad(each, (0, 0, 0, more), value=torch.nan) for each in apart[:2])
        args = args | {"by_channel": ByChannel(*wider, apart.floor)}
    return args | {name: torch.cat([args[name], fill]) for name, fill in zeros.items()} | {
        "query_starts": torch.arange(rows + 1, dtype=torch.int32)}  # fmt: skip


def numbers_of(states: States) -> list[torch.Tensor]:
    return [tensor.nan_to_num(7.0).clone() for tensor in states]


@pytest.mark.parametrize("case", [CASES[1], CASES[1]._replace(by_channel=True), SPACES[1]], ids=RULES)
def test_rows_of_padding_write_nothing_and_are_zeros(case: Case) -> None:
    kept = Kept(case, BF16)
    free = next(state for state in range(len(kept.states.stamps)) if not (kept.state_of == state).any())
    kept.state_of[kept.state_of == 0] = free  # state 0, which padding names, is nobody's
    untouched = [tensor[0] for tensor in numbers_of(kept.states)]
    for counts in case.steps[:4]:
        args, expected = kept.step(counts)
        if counts == [1, 1, 1]:
            args = padded(args, 8)
        got = gated_delta(Emulator(), **args)
        close_to_rounding(got[: len(expected)], expected)
        assert not got[len(expected) :].any()
    kept.check()
    assert all(torch.equal(tensor[0], before) for tensor, before in zip(numbers_of(kept.states), untouched, strict=True))


@pytest.mark.parametrize("case", [CASES[3], CASES[-1], CHANNELS[6], SPACES[2]], ids=["delta", "guesses", "channels", "mamba"])
def test_sequences_of_guesses_are_told_apart_by_their_starts(case: Case) -> None:
    """As a recorded step with guesses has them: as many starts as rows, those behind the last sequence at the end."""
    kept = Kept(case, BF16)
    for counts in case.steps:
        args, expected = kept.step(counts)
        rows, own = len(args["projected"]), len(args["kv_lens"])
        args["query_starts"] = torch.cat([args["query_starts"], torch.full((rows - own,), rows, dtype=torch.int32)])
        for name in ("kv_lens", "known_lens", "state_of"):
            args[name] = torch.cat([args[name], torch.zeros(rows - own, dtype=torch.int32)])
        close_to_rounding(gated_delta(Emulator(), **args), expected)
    kept.check()


@EACH_RULE
@pytest.mark.parametrize(("keys", "values"), [((1, 16), (2, 16)), ((1, 24), (1, 128))])
def test_a_token_has_the_same_bits_whatever_it_is_computed_with(
    keys: tuple[int, int], values: tuple[int, int], rule: dict[str, Any]
) -> None:
    check_same_bits(on(Emulator()), Case(keys, values, 4, [[53]], **rule))


@EACH_RULE
@pytest.mark.parametrize("num_guesses", [1, 12])
def test_what_was_guessed_may_be_taken_back_to_any_token(num_guesses: int, rule: dict[str, Any]) -> None:
    """And more than there is room for is not there rather than wrong."""
    for back in range(num_guesses + 1):
        steps = [[5], [Share(1, num_guesses)], [Share(1, back=back)]]
        check(Case((1, 24), (2, 24), 4, steps, **rule), BF16, on(Emulator()))
    steps = [[5], [Share(1, MAX_GUESSES)], [Share(0, 1)], [1]]
    kept = Kept(Case((1, 24), (2, 24), 4, steps, **rule), BF16)
    for chunks in steps[:3]:
        args, expected = kept.step(chunks)
        close_to_rounding(gated_delta(Emulator(), **args), expected)
    assert gated_delta(Emulator(), **kept.step(steps[3])[0]).isnan().all()


@EACH_RULE
def test_a_step_of_which_a_part_was_done_is_done_again(rule: dict[str, Any]) -> None:
    """Of two sequences and four heads one block of threads; among them the one that writes a key head's inputs."""
    num_keys = 1 if "mamba" in rule else 2
    steps: Chunks = [[30, 31], [1, Share(1, 9)], [9, Share(1, back=4)], [1, 40]]
    kept = Kept(Case((num_keys, 16), (4, 16), 4, steps, **rule), BF16)
    for i, chunks in enumerate(kept.case.steps):
        args, expected = kept.step(chunks)
        gated_delta(Emulator(only_block=2 * i + 1), **args)
        close_to_rounding(gated_delta(Emulator(), **args), expected)
    kept.check()


@EACH_RULE
@pytest.mark.parametrize("second", [1, 5])
def test_a_sequence_whose_place_is_gone_is_nan(second: int, rule: dict[str, Any]) -> None:
    """And no other, and no other head."""
    case = Case((2, 16), (4, 16), 4, [[20, 21], [second, 1]], **rule)
    kept = Kept(case, BF16)
    gated_delta(Emulator(), **kept.step(case.steps[0])[0])
    args, expected = kept.step(case.steps[1])
    for behind in (kept.states.stamps, kept.states.reaches):
        behind[int(kept.state_of[0]), :, 2] = 19
    got = gated_delta(Emulator(), **args)
    lost = got[:second].unflatten(1, (4, 16))
    assert lost[:, 2].isnan().all()
    lost[:, 2] = expected[:second].unflatten(1, (4, 16))[:, 2].to(BF16)
    close_to_rounding(got, expected)


def check_far_away(emulator: Emulator) -> None:
    """The last of states of four billion elements, of which only what is written takes memory."""
    case = Case((1, 128), (1, 128), 4, [[37], [Share(1, 3)], [1]])
    kept = Kept(case, BF16)
    num_states = 2**32 // (2 * 128 * 128) + 4
    try:
        few = {name: getattr(kept.states, name)[:, :, :8] for name in ("guesses", "guess_gates")}  # small enough for 32 bits
        shapes = [(num_states, *tensor.shape[1:]) for tensor in kept.states._replace(**few)]
        far = [cpu.zeros(math.prod(shape), tensor.dtype).view(shape) for shape, tensor in zip(shapes, kept.states, strict=True)]
    except OSError:
        pytest.skip("no address space of 16 GiB")
    kept.states = States(*far)
    kept.state_of = torch.tensor([num_states - 1]).int()
    for counts in case.steps:
        args, expected = kept.step(counts)
        close_to_rounding(gated_delta(emulator, **args), expected)
    kept.check()


def test_states_past_four_billion_elements() -> None:
    check_far_away(Emulator())


def fails(run: Callable[[], None]) -> bool:
    try:
        run()
    except (AssertionError, KernelFailed, ValueError):  # the last where two places or none have a stamp
        return True
    return False


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        ("NO_BARRIER", CASES[6]), ("UNMASKED_TAIL", CASES[3]), ("NOTHING_HELD", CASES[-1]), ("SAME_PLACE", CASES[0]),
        ("INT32", CASES[3]), ("NO_COMMIT", CASES[-1]),
        ("NO_BARRIER", CHANNELS[4]), ("DECAYED_TAIL", CHANNELS[1]),
        ("NO_BARRIER", SPACES[5]), ("UNMASKED_TAIL", SPACES[2]), ("NOTHING_HELD", SPACES[-1]), ("SAME_PLACE", SPACES[0]),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(bug: str, case: Case) -> None:

    def check_with(order: int, bugs: tuple[str, ...]) -> None:
        emulator = Emulator(order, bugs=bugs)
        if bug == "INT32":
            check_far_away(emulator)
        else:
            check(case, BF16, on(emulator))

    assert any(fails(lambda order=order: check_with(order, (bug,))) for order in ORDERS)
    assert not fails(lambda: check_with(0, ()))


def test_no_tokens_is_no_launch() -> None:
    emulator = Emulator()
    args, _ = Kept(CASES[1], BF16).step([5, 37, 1])
    none = {"query_starts": args["query_starts"][:1]}
    none |= {name: args[name][:0] for name in ("projected", "gates", "kv_lens", "known_lens", "state_of")}
    assert gated_delta(emulator, **(args | none)).shape == (0, 64)
    assert not emulator.launches


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case((1, 16), (1, 16), 9, [[3]]), "a convolution over 9 tokens on a GPU"),
        (Case((1, 136), (1, 16), 4, [[3]]), "heads of 136 by 16 on a GPU"),
        (Case((1, 128), (1, 260), 4, [[3]]), "heads of 128 by 260 on a GPU"),
        (Case((1, 2), (1, 65), 4, [[3]]), "a delta rule's heads of 2 by 65 on a GPU"),
        (space((1, 256), (1, 64), 4, [[3]], True), "a state space's heads of 256 by 64 on a GPU"),
    ],
)
def test_what_registers_do_not_hold_is_refused(case: Case, message: str) -> None:
    args, _ = Kept(case, BF16).step([3])
    with pytest.raises(UnsupportedError, match=message):
        gated_delta(Emulator(), **args)


@pytest.mark.parametrize(
    "case",
    [Case((1, 128), (1, 256), 8, [[13], [1]]), Case((1, 128), (1, 62), 8, [[13], [1]]),
     Case((1, 128), (1, 256), 8, [[13], [1]], by_channel=True), space((1, 128), (1, 256), 8, [[13], [1]], True)],
    ids=["256", "62", "channels", "mamba"],
)  # fmt: skip
def test_the_largest_heads_and_the_most_taps(case: Case) -> None:
    check(case, BF16, on(Emulator()))


@pytest.mark.parametrize("name", ["projected", "gates", "taps", "decay", "norm", "kv_lens", "known_lens", "state_of"])
def test_what_would_be_misread_is_refused(name: str) -> None:
    args, _ = Kept(CASES[1], BF16).step([5, 37, 1])
    for bad in (args[name].double(), args[name][..., :-1].clone()):
        with pytest.raises(AssertionError):
            gated_delta(Emulator(), **(args | {name: bad}))


@pytest.mark.parametrize("name", States._fields)
def test_states_that_would_be_misread_are_refused(name: str) -> None:
    args, _ = Kept(CASES[1], BF16).step([5, 37, 1])
    kept = getattr(args["states"], name)
    for bad in (kept.double(), kept[..., :-1].clone()):
        with pytest.raises(AssertionError):
            gated_delta(Emulator(), **(args | {"states": args["states"]._replace(**{name: bad})}))


@pytest.mark.parametrize("name", ["gates", "skip", "taps_bias"])
def test_what_would_be_misread_in_a_state_space_is_refused(name: str) -> None:
    args, _ = Kept(SPACES[1], BF16).step([5, 37, 1])
    for bad in (args[name].double(), args[name][..., :-1].clone()):
        with pytest.raises(AssertionError):
            gated_delta(Emulator(), **(args | {name: bad}))
    with pytest.raises(AssertionError):  # the delta rule has no bias, and two gates a head
        gated_delta(Emulator(), **(args | {"skip": None}))


@pytest.mark.parametrize("name", ["projected", "gates", "decay_bias", "rates", "z"])
def test_what_would_be_misread_beside_a_decay_of_each_channel_is_refused(name: str) -> None:
    args, _ = Kept(CHANNELS[1], BF16).step([5, 37, 1])
    apart: ByChannel = args["by_channel"]
    good = getattr(apart, name) if name in ByChannel._fields else args[name]
    for bad in (good.double(), good[..., :-1].clone()):
        changed = {"by_channel": apart._replace(**{name: bad})} if name in ByChannel._fields else {name: bad}
        with pytest.raises(AssertionError):
            gated_delta(Emulator(), **(args | changed))
    with pytest.raises(AssertionError):  # states of two gates a head, as it has without
        gated_delta(Emulator(), **(args | {"by_channel": None}))
