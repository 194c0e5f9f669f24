"""The router of a mixture of experts on a GPU (route.cu): who takes which, and the tasks that come of it."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.experts import FEW_ROWS, MANY_ROWS, MATRIX_WORDS, Tasks, most_tasks, words_of
from nanovllm_cli.kernels.kernel import WARP, Arg, Kernel, Launcher, check
from nanovllm_cli.kernels.mixture import Scoring

VALUES = (1, 2, 4, 8, 16)
"""Experts a lane: what the kernel is compiled for."""
MAX_EXPERTS = VALUES[-1] * WARP
MAX_GROUPS = WARP
ADDRESSES = 2 * MATRIX_WORDS
SHARED_PAIRS = 2048
"""At most so many are kept in shared memory: with the kernel's own it is no more than a block has without asking."""


def route(
    launcher: Launcher,
    logits: torch.Tensor,
    matrices: torch.Tensor,
    taken: int,
    norm_topk: bool,
    slots: torch.Tensor | None = None,
    rows: int = FEW_ROWS,
    scoring: Scoring | None = None,
) -> tuple[Tasks, torch.Tensor]:
    """logits [T, E] fp32, scoring: see `reference.route`. matrices [E, 8] int64: addresses of each expert's tensors, which no
    kernel writes. slots [T] int64: a token without one (-1) is padding, and has no pairs. Returns tasks of so many rows, and
    weights [T, taken] fp32, of padding anything. UnsupportedError past 512 experts."""
    tokens, experts = logits.shape
    assert 0 < taken <= experts, (taken, experts)
    check(logits, launcher, torch.float32, tokens, experts)
    check(matrices, launcher, torch.int64, experts, ADDRESSES)
    if slots is not None:
        check(slots, launcher, torch.int64, tokens)
    assert matrices.data_ptr() % 16 == 0
    assert tokens * taken < 1 << 31, (tokens, taken)
    num_tasks, values = most_tasks(tokens, taken, experts, rows), values_of(experts)
    tasks = torch.empty(num_tasks, words_of(rows), dtype=torch.int64, device=launcher.device)
    weights = torch.empty(tokens, taken, dtype=torch.float32, device=launcher.device)
    if tokens:
        is_small = tokens * taken <= SHARED_PAIRS
        chosen = None if is_small else torch.empty(tokens, taken, dtype=torch.int32, device=launcher.device)
        groups, nearness = (None, None) if scoring is None else (scoring.groups, scoring.nearness)
        scored = 0 if scoring is None or nearness is not None else 2 if scoring.by_logit else 1
        has_more = groups is not None or nearness is not None or scored == 2
        warps = max(-(-experts // WARP), min(tokens, most_warps(values, has_more)))
        args = (
            logits, slots, matrices, chosen, weights, tasks,
            np.int32(tokens), np.int32(experts), np.int32(taken), np.int32(norm_topk), np.int32(num_tasks),
        )  # fmt: skip
        how: tuple[Arg, ...] = ()
        if nearness is not None:
            assert groups is None
            how = (np.float32(nearness),)
        elif scoring is not None:
            for of_experts in (scoring.bias, scoring.expert_scale):
                if of_experts is not None:
                    check(of_experts, launcher, torch.float32, experts)
            how = (scoring.bias, np.int32(scoring.sigmoid), np.float32(scoring.scale), scoring.expert_scale)
        if groups is not None:
            if groups.num_groups > MAX_GROUPS:
                reason = f"{groups.num_groups} groups of experts on a GPU"
                raise UnsupportedError(reason, f"at most {MAX_GROUPS}, or use --device cpu")
            assert scored == 1, "no model has groups where logits choose"
            assert experts % groups.num_groups == 0
            assert groups.num_taken * (experts // groups.num_groups) >= taken
            how += tuple(map(np.int32, groups))
        kernel = variant(values, rows, scored, groups is not None, nearness is not None)
        room = 4 * tokens * taken if is_small else 0
        launcher.launch(kernel, (1, 1, 1), (warps * WARP, 1, 1), (*args, *how), room)
    return Tasks(tasks, tokens, taken, experts, rows), weights


def values_of(experts: int) -> int:
    """Experts a lane."""
    for values in VALUES:
        if experts <= values * WARP:
            return values
    raise UnsupportedError(f"a mixture of {experts} experts on a GPU", f"at most {MAX_EXPERTS}, or use --device cpu")


def most_warps(values: int, has_more: bool) -> int:
    """As route.cu has it."""
    return 16 if values > (4 if has_more else 8) else 32


def variant(values: int, rows: int, scored: int, grouped: bool = False, sparse: bool = False) -> Kernel:
    kinds = ("SCORED", scored), ("GROUPED", int(grouped)), ("SPARSE", int(sparse))
    return Kernel("route", "route", (("VALUES", values), ("TASK_ROWS", rows), *kinds))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    hows = (0, False, False), (1, False, False), (1, True, False), (0, False, True), (2, False, False)
    return [variant(values, rows, *how) for values, rows, how in itertools.product(VALUES, (FEW_ROWS, MANY_ROWS), hows)]
