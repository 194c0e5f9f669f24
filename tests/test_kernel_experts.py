"""route.cu and expert_sum.cu, emulated: choices against plain torch, weights and sums against float64, tasks by what they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from emulation.compare import GENERATOR, close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import expert_sum as expert_sums
from nanovllm_cli.kernels import reference
from nanovllm_cli.kernels.expert_sum import expert_sum
from nanovllm_cli.kernels.experts import FEW_ROWS, MANY_ROWS, Tasks, most_tasks, words_of
from nanovllm_cli.kernels.mixture import Groups, Scoring, shares_among_near
from nanovllm_cli.kernels.route import route
from test_kernel_small import untouched_memory

pytestmark = needs_emulation
# tokens, experts, experts a token: every number of experts a lane, fewer tokens than warps and more, tasks that are full.
SHAPES = [
    (1, 1, 1), (1, 128, 8), (3, 5, 2), (70, 5, 3), (7, 31, 4), (33, 33, 6), (31, 60, 4), (70, 60, 1), (40, 128, 8), (2, 257, 7),
    (17, 512, 5), (65, 256, 3), (9, 8, 8),
]  # fmt: skip


NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def memory_that_is_not_written_is_junk() -> Iterator[None]:
    """What torch.empty gives: of int64 the largest."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def matrices_of(experts: int) -> torch.Tensor:
    """Any words: the kernel reads nothing where they point."""
    return torch.randint(-(1 << 62), 1 << 62, (experts, 8), generator=GENERATOR)


def expected(
    logits: torch.Tensor, taken: int, norm_topk: bool, scoring: Scoring | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, and weights in float64."""
    chosen, _ = reference.route(logits, taken, norm_topk, scoring)
    logits = logits.double()
    if scoring is not None and scoring.nearness is not None:
        return chosen, shares_among_near(logits, chosen, scoring.nearness)
    if scoring is not None:
        odds = (-logits).exp() if scoring.sigmoid else logits.exp().sum(dim=1, keepdim=True) / logits.exp() - 1
        scores = (1 / (1 + odds)).gather(1, chosen)
        weights = scores * scoring.scale / (scores.sum(dim=1, keepdim=True) if norm_topk else 1)
        return chosen, weights if scoring.expert_scale is None else weights * scoring.expert_scale.double()[chosen]
    whole = logits.gather(1, chosen) if norm_topk else logits
    weights = (whole - whole.max(dim=1, keepdim=True).values).exp()
    weights = weights / weights.sum(dim=1, keepdim=True)
    return chosen, weights if norm_topk else weights.gather(1, chosen)


def task_words(chosen: torch.Tensor, matrices: torch.Tensor, most_rows: int) -> torch.Tensor:
    """The tasks of experts [T, taken], one pair after another."""
    taken = chosen.shape[1]
    rows: list[list[int]] = []
    for expert in range(matrices.shape[0]):
        pairs = (chosen.flatten() == expert).nonzero().flatten().tolist()
        for first in range(0, len(pairs), most_rows):
            own = pairs[first : first + most_rows]
            numbers = [len(own), *own, *[own[-1]] * (most_rows - len(own)), *[0] * (7 if most_rows == 8 else 15)]
            rows.append(matrices[expert].tolist() + torch.tensor(numbers, dtype=torch.int32).view(torch.int64).tolist())
    rows += [[0] * words_of(most_rows)] * (most_tasks(chosen.shape[0], taken, matrices.shape[0], most_rows) - len(rows))
    return torch.tensor(rows, dtype=torch.int64).view(-1, words_of(most_rows))


def check_route(
    emulator: Emulator,
    logits: torch.Tensor,
    taken: int,
    norm_topk: bool,
    rows: int = FEW_ROWS,
    scoring: Scoring | None = None,
) -> None:
    matrices = matrices_of(logits.shape[1])
    tasks, weights = route(emulator, logits, matrices, taken, norm_topk, rows=rows, scoring=scoring)
    chosen, exact = expected(logits, taken, norm_topk, scoring)
    assert torch.equal(tasks.words, task_words(chosen, matrices, rows))
    assert torch.equal(weights.isnan(), exact.isnan())
    assert ((weights - exact).abs() <= 2e-6 * exact + 1e-37)[~exact.isnan()].all()
    assert tasks[1:] == (logits.shape[0], taken, logits.shape[1], rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tokens", "experts", "taken"), SHAPES)
def test_experts_are_those_of_the_reference_and_each_pair_is_in_one_task(
    tokens: int, experts: int, taken: int, order: int
) -> None:
    for norm_topk in (True, False):
        check_route(Emulator(order), random(tokens, experts, scale=3.0), taken, norm_topk)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "taken"), [*SHAPES[:5], (40, 128, 8), (2, 257, 7), (17, 512, 5), (9, 8, 8)])
def test_scores_are_weights_and_with_a_bias_they_choose(
    tokens: int, experts: int, taken: int, by_sigmoid: bool, order: int
) -> None:
    logits = random(tokens, experts, scale=3.0)
    for norm_topk, bias, rows in ((True, random(experts, scale=0.2), FEW_ROWS), (False, None, MANY_ROWS)):
        check_route(Emulator(order), logits, taken, norm_topk, rows, Scoring(by_sigmoid, bias, 2.5))
        own = Scoring(by_sigmoid, bias, 2.5, random(experts).abs(), by_logit=by_sigmoid)
        check_route(Emulator(order), logits, taken, norm_topk, rows, own)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "taken", "groups", "looked_at"),
    [(1, 4, 1, 2, 1), (5, 12, 3, 3, 2), (17, 12, 4, 6, 2), (9, 256, 8, 8, 4), (3, 10, 10, 5, 5), (7, 64, 6, 32, 3),
     (2, 258, 9, 6, 2), (33, 512, 4, 16, 7), (4, 6, 2, 3, 1)],
)  # fmt: skip
def test_experts_of_groups_that_are_not_looked_at_are_not_taken(
    tokens: int, experts: int, taken: int, groups: int, looked_at: int, by_sigmoid: bool, order: int
) -> None:
    logits, in_groups = random(tokens, experts, scale=3.0), Groups(groups, looked_at, 1 + by_sigmoid)
    for norm_topk, bias in ((True, random(experts, scale=0.2)), (False, None)):
        check_route(Emulator(order), logits, taken, norm_topk, scoring=Scoring(by_sigmoid, bias, 2.5, None, in_groups))
    logits[:, :] = logits[:, :1]  # the lower group among equals
    check_route(Emulator(order), logits, taken, True, scoring=Scoring(by_sigmoid, None, groups=in_groups))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tokens", "experts", "taken"), [(1, 3, 2), (17, 16, 2), (5, 33, 3), (3, 512, 2)])
def test_an_expert_weighs_its_share_among_those_near_behind_it(tokens: int, experts: int, taken: int, order: int) -> None:
    logits = random(tokens, experts, scale=3.0)
    logits[0] = -logits[0].abs()
    for nearness, rows in ((0.02, FEW_ROWS), (0.7, MANY_ROWS)):
        check_route(Emulator(order), logits, taken, False, rows, Scoring(nearness=nearness))


def test_a_share_without_magnitudes_is_found() -> None:
    logits = -random(9, 16, scale=3.0).abs()
    with pytest.raises(AssertionError):
        check_route(Emulator(bugs=("MAGNITUDE",)), logits, 2, False, FEW_ROWS, Scoring(nearness=0.7))


def test_more_groups_than_lanes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="33 groups"):
        route(Emulator(), random(1, 66), matrices_of(66), 2, True, scoring=Scoring(True, groups=Groups(33, 2, 2)))


def test_scales_of_other_experts_are_refused() -> None:
    for scales in (torch.ones(5), torch.ones(6).double(), torch.ones(12)[::2]):
        with pytest.raises(AssertionError):
            route(Emulator(), random(3, 6), matrices_of(6), 2, True, scoring=Scoring(expert_scale=scales))


def test_a_nan_is_taken_first_by_its_score_too() -> None:
    logits = random(3, 6)
    logits[1, 4] = NAN
    for by_sigmoid in (False, True):
        _, weights = route(Emulator(), logits, matrices_of(6), 2, True, scoring=Scoring(by_sigmoid, torch.zeros(6)))
        assert weights[1].isnan().all()
        assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
def test_many_tokens(order: int) -> None:
    check_route(Emulator(order), random(600, 128), 8, True)
    check_route(Emulator(order), random(600, 33), 5, True, MANY_ROWS)
    check_route(Emulator(order), random(90, 3), 2, False, MANY_ROWS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tokens", "padding"), [(8, [7]), (64, list(range(33, 64))), (3, [0, 2]), (5, [0, 1, 2, 4])])
def test_padding_has_no_tasks_and_its_sum_is_nothing(tokens: int, padding: list[int], order: int) -> None:
    """Whatever its logits are, and what lies where nobody has written."""
    logits, matrices, slots = random(tokens, 40), matrices_of(40), torch.arange(tokens)
    logits[padding], slots[padding] = NAN, -1
    tasks, weights = route(Emulator(order), logits, matrices, 3, True, slots)
    chosen, exact = expected(logits, 3, True)
    chosen[padding] = -1
    assert torch.equal(tasks.words, task_words(chosen, matrices, FEW_ROWS))
    there = slots >= 0
    assert ((weights - exact).abs() <= 2e-6 * exact)[there].all()
    y, residual = random(3 * tokens, 24, dtype=torch.bfloat16), random(tokens, 24, dtype=torch.bfloat16)
    weights[~there] = 1.0
    y.view(tokens, 3, 24)[padding] = NAN
    plain, before = expert_sum(Emulator(order), y, weights, None, slots), residual.clone()
    assert not plain[padding].any()
    assert torch.equal(expert_sum(Emulator(order), y, weights, residual, slots)[padding], before[padding])
    close_to_rounding(plain[there], (weights.double()[..., None] * y.double().view(tokens, 3, 24)).sum(1)[there])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tokens", "experts", "taken"), [(7, 31, 4), (40, 128, 8), (3, 257, 5)])
def test_of_equal_logits_the_lower_number_is_taken(tokens: int, experts: int, taken: int, order: int) -> None:
    logits = torch.randint(0, 3, (tokens, experts), generator=GENERATOR).float()
    logits[1] = 0.0
    check_route(Emulator(order), logits, taken, True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm_topk", [True, False])
def test_all_tokens_to_the_same_experts(norm_topk: bool, order: int) -> None:
    """Many full tasks of one expert, in the order of its tokens."""
    logits = random(70, 33)
    logits[:, 7] += 50.0
    logits[:69, 32] += 50.0
    check_route(Emulator(order), logits, 2, norm_topk)


ODD = {
    "NaN": [1.0, NAN, 3.0, -2.0, NAN, INF, 0.5],
    "NaN with a sign": [1.0, -NAN, 3.0, -2.0, 4.0, INF, 0.5],
    "one NaN": [1.0, 2.0, 3.0, NAN, 4.0, 7.0, 0.5],
    "infinity": [1.0, 2.0, INF, -INF, INF, INF, 0.5],
    "mostly nothing": [-INF, -INF, 2.0, -INF, -INF, -INF, -INF],
    "nothing": [-INF] * 7,
    "zeros": [-1.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0],
    "a zero and the smallest": [-0.0, -1.2e-38, 1.2e-38, 0.0, -1.0, -0.0, 0.0],
    "denormal numbers": [0.0, 1e-40, -1e-40, 2e-40, -1.0, -2e-40, 1e-44],
    "the largest": [3.4e38, -3.4e38, 3.4e38, 1.0, -3.4e38, 3.3e38, 0.0],
    "far apart": [0.0, 90.0, -90.0, 200.0, -200.0, 104.0, 100.0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("taken", [1, 3, 7])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_odd_numbers_are_ranked_as_the_reference_ranks_them(norm_topk: bool, taken: int, order: int) -> None:
    """On both sides of lanes, which have two neighbours each."""
    rows = torch.tensor(list(ODD.values()))
    logits = torch.cat((rows, torch.full((len(rows), 30), -5.0), rows), dim=1)
    check_route(Emulator(order), logits, taken, norm_topk)


def test_a_tokens_weights_are_alone_in_their_bits() -> None:
    logits, matrices = random(70, 60), matrices_of(60)
    for norm_topk in (True, False):
        _, together = route(Emulator(), logits, matrices, 4, norm_topk)
        for first, last in [(0, 1), (69, 70), (3, 40), (10, 12)]:
            _, alone = route(Emulator(), logits[first:last].clone(), matrices, 4, norm_topk)
            assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize(
    ("bug", "tokens"), [("EARLY_BARRIER", 40), ("NO_ORDER", 70), ("TIES", 3), ("ZERO", 3), ("NO_END", 40)]
)
def test_planted_bugs_of_routing_are_seen(bug: str, tokens: int) -> None:
    logits = -torch.randint(0, 2, (tokens, 33), generator=GENERATOR).float()
    logits[:, 1::3] += 0.0  # the others' zeros have a sign
    matrices = matrices_of(33)
    words = task_words(expected(logits, 3, True)[0], matrices, FEW_ROWS)

    def is_right(order: int, bugs: tuple[str, ...] = ()) -> bool:
        try:
            tasks, _ = route(Emulator(order, bugs=bugs), logits, matrices, 3, True)
        except KernelFailed as failure:
            if "does not compile" in str(failure):
                raise
            return False
        return torch.equal(tasks.words, words)

    assert all(is_right(order) for order in ORDERS)
    assert not all(is_right(order, (bug,)) for order in ORDERS)


@pytest.mark.parametrize(
    ("tokens", "taken", "experts", "most"),
    [(0, 2, 5, 0), (1, 8, 128, 8), (3, 8, 128, 24), (16, 8, 128, 128), (19, 8, 128, 147), (9, 2, 4, 6), (8192, 8, 128, 8320)],
)
def test_there_are_no_more_tasks_than_there_is_room_for(tokens: int, taken: int, experts: int, most: int) -> None:
    assert most_tasks(tokens, taken, experts) == most


def test_the_bound_of_tasks_is_reached() -> None:
    """One expert with nine tokens, and each of the others with one."""
    logits = torch.full((9, 4), -1.0)
    logits[:, 0] = 1.0
    logits[0, 1] = logits[1, 2] = logits[2, 3] = 0.0
    logits[3:, 1] = 0.0
    tasks, _ = route(Emulator(), logits, matrices_of(4), 2, True)
    counts = tasks.words.view(torch.int32)[:, 16]
    assert counts.tolist() == [8, 1, 7, 1, 1, 0]
    assert tasks.num_pairs == 18
    assert [Tasks(tasks.words, tokens, 2, 5).most_rows for tokens in (1, 7, 8, 9)] == [1, 7, 8, 8]


def test_no_tokens_are_no_tasks() -> None:
    emulator = Emulator()
    tasks, weights = route(emulator, torch.empty(0, 6), matrices_of(6), 2, True)
    assert (tasks.words.shape, weights.shape) == ((0, words_of(FEW_ROWS)), (0, 2))
    assert not emulator.launches


def test_more_experts_than_registers_hold_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="513 experts"):
        route(Emulator(), random(1, 513), matrices_of(513), 2, True)


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, m: (x.double(), m, 2),
        lambda x, m: (x.bfloat16(), m, 2),
        lambda x, m: (x[:, ::2], m[::2].clone(), 2),
        lambda x, m: (x, m[:-1], 2),
        lambda x, m: (x, m.int(), 2),
        lambda x, m: (x, m[:, :7].clone(), 2),
        lambda x, m: (x, m, 0),
        lambda x, m: (x, m, 7),
    ],
    ids=["float64", "bf16", "strides", "experts", "int32", "seven addresses", "none", "more than there are"],
)
def test_route_refuses_what_it_would_misread(bad) -> None:
    logits, matrices, taken = bad(random(3, 6), matrices_of(6))
    with pytest.raises(AssertionError):
        route(Emulator(), logits, matrices, taken, True)


# ---- the sum of experts' rows ----

BF16, FP16 = torch.bfloat16, torch.float16
SUMS = [(1, 8, 2048), (1, 1, 1), (3, 2, 17), (5, 3, 33), (2, 4, 264), (7, 8, 520), (1, 9, 301), (4, 17, 40), (33, 6, 8)]
"""Tokens, experts a token, width."""


def weighted(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights.double()[:, :, None] * y.double().view(*weights.shape, -1)).sum(dim=1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("tokens", "taken", "width"), SUMS)
def test_sum_of_experts_is_one_rounding_from_float64(tokens: int, taken: int, width: int, dtype: torch.dtype, order: int) -> None:
    y, weights = random(tokens * taken, width, dtype=dtype), random(tokens, taken).abs()
    residual = random(tokens, width, dtype=dtype)
    exact = weighted(y, weights)
    close_to_rounding(expert_sum(Emulator(order), y, weights), exact)
    exact += residual.double()
    got = expert_sum(Emulator(order), y, weights, residual)
    assert got is residual
    close_to_rounding(got, exact)


def test_sum_of_experts_is_in_their_order_and_the_residual_comes_last() -> None:
    """Where the order can be seen in fp32: what is small is lost if it comes after what is large, and the large ones go."""
    y = torch.tensor([1.0, 2.0**30, -(2.0**30), 4.0]).repeat_interleave(24).view(4, 24).to(BF16)
    weights = torch.tensor([[1.0, 1.0, 1.0, 0.5]])
    assert expert_sum(Emulator(), y, weights).tolist() == [[2.0] * 24]
    residual = torch.full((1, 24), 1.0, dtype=BF16)
    assert expert_sum(Emulator(), y, weights, residual).tolist() == [[3.0] * 24]


def test_a_tokens_sum_is_alone_in_its_bits() -> None:
    y, weights = random(9 * 3, 100, dtype=BF16), random(9, 3)
    together = expert_sum(Emulator(), y, weights)
    for first, last in [(0, 1), (8, 9), (2, 7)]:
        alone = expert_sum(Emulator(), y[3 * first : 3 * last].clone(), weights[first:last].clone())
        assert torch.equal(alone, together[first:last])


def test_sum_of_experts_passes_nan_on() -> None:
    y, weights = torch.ones(6, 17, dtype=BF16), torch.ones(3, 2)
    y[1, 4] = weights[2, 0] = torch.nan
    got = expert_sum(Emulator(), y, weights)
    assert got.isnan().sum(dim=1).tolist() == [1, 0, 17]
    assert got[0, 4].isnan()


def test_sum_of_experts_without_a_mask_is_found() -> None:
    y, weights, memory = random(8, 17, dtype=BF16), random(4, 2), torch.zeros(4 * 17 + 64, dtype=BF16)
    correct = expert_sum(Emulator(), y, weights)
    args = (torch.cat((y.flatten(), torch.zeros(64, dtype=BF16))), weights, None, None, memory, np.int32(2), np.int32(17))
    wrong = []
    for order in ORDERS:
        emulator = Emulator(order, bugs=("UNMASKED_TAIL",))
        emulator.launch(expert_sums.variant(BF16, 1), (4, 1, 1), (32, 1, 1), args)
        wrong.append(not torch.equal(memory[: 4 * 17].view(4, 17), correct))
    assert any(wrong)


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_experts_rows_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    tokens, taken, width = (1 << 20) + 1, 8, 512
    y = untouched_memory(tokens * taken * width, BF16).view(-1, width)
    residual = untouched_memory(tokens * width, BF16).view(-1, width)
    y[-8:], weights = random(8, width, dtype=BF16), torch.zeros(tokens, taken)
    weights[-1] = random(8).abs()
    expert_sum(Emulator(bugs=bugs, only_block=tokens - 1), y, weights, residual)
    if bugs:
        assert not residual[-1].any()
    else:
        close_to_rounding(residual[-1:], weighted(y[-8:], weights[-1:]))


def test_no_tokens_are_no_sum() -> None:
    emulator = Emulator()
    assert expert_sum(emulator, torch.empty(0, 8, dtype=BF16), torch.empty(0, 2)).shape == (0, 8)
    assert not emulator.launches


@pytest.mark.parametrize(
    "bad",
    [
        lambda y, w, r: (y.view(torch.int16), w, r.view(torch.int16)),
        lambda y, w, r: (y, w.to(BF16), r),
        lambda y, w, r: (y[:, ::2], w, r[:, ::2].clone()),
        lambda y, w, r: (y[:-1], w, r),
        lambda y, w, r: (y, w, r.half()),
        lambda y, w, r: (y, w, r[:2]),
        lambda y, w, r: (y, w, r.T.contiguous().T),
    ],
    ids=["type", "weights", "strides", "rows", "other type", "tokens", "turned"],
)
def test_sum_of_experts_refuses_what_it_would_misread(bad) -> None:
    y, weights, residual = bad(random(6, 24, dtype=BF16), random(3, 2), random(3, 24, dtype=BF16))
    with pytest.raises((AssertionError, KeyError)):
        expert_sum(Emulator(), y, weights, residual)
