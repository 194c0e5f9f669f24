"""Mixtures of experts beside their matmuls: each expert that somebody takes computes over the rows of those who do.

Legend: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


class Matrix(Protocol):
    """What a linear layer has. weight: a WeightStorage, of which a device may know more."""

    @property
    def weight(self) -> object: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


class Expert(Protocol):
    """down(act(gate) * up), with gate and up in one weight: rows [n, K] -> [n, width], each by itself. down None: it gives what
    `held` makes of gate_up's product."""

    @property
    def gate_up(self) -> Matrix: ...

    @property
    def down(self) -> Matrix | None: ...

    @property
    def width(self) -> int: ...

    @property
    def activation(self) -> str: ...

    @property
    def held(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What gate_up makes of an input [n, 2 * inner], which is changed -> what down reads [n, inner], where that is more than
        the activation, in all experts alike: see `MLPSpec.limit`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Groups(NamedTuple):
    """Experts in num_groups groups of as many each, of which num_taken are looked at: those in which the sum of the num_best
    largest numbers that experts are chosen by is the largest, the lower group first among equals."""

    num_groups: int
    num_taken: int
    num_best: int


class Scoring(NamedTuple):
    """What a router makes of its logits where that is more than their softmax: scores, by a sigmoid or a softmax of all.
    Taken are the experts with the largest score + bias, or with by_logit logit + bias, bias [E] fp32, where there are groups
    of some of them; their scores, or with norm_topk their shares of the sum of these, times `scale`, and times what
    expert_scale [E] fp32 has for each expert, are the weights. nearness: of logits instead, and nothing else of all this; see
    `shares_among_near`. root_softplus: scores are roots of softpluses (DeepSeek-V4). table [tokens, k] int64: which experts each
    token takes, ascending, whatever their scores; a softmax has none."""

    sigmoid: bool = False
    bias: torch.Tensor | None = None
    scale: float = 1.0
    expert_scale: torch.Tensor | None = None
    groups: Groups | None = None
    nearness: float | None = None
    by_logit: bool = False
    root_softplus: bool = False
    table: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        """What kernels call it: 0 for a softmax, 1 for sigmoids, 2 for sigmoids of those that logits choose, 3 for roots of
        softpluses."""
        if self.root_softplus:
            return 3
        assert self.sigmoid or not self.by_logit, "no model has this of a softmax"
        return int(self.sigmoid) + int(self.by_logit)


def shares_among_near(logits: torch.Tensor, chosen: torch.Tensor, nearness: float) -> torch.Tensor:
    """Weights [T, k] of the experts `chosen` [T, k], those with the largest of logits [T, E]: of each the softmax's share among
    what is as large at most and comes behind it, and that near that their difference is no more than nearness times the larger
    of both, one's magnitude counting. As SparseMixer-v2 computes them where nothing is drawn (Liu et al. 2024)."""
    behind, weights = logits.clone(), torch.empty(chosen.shape, dtype=logits.dtype, device=logits.device)
    for _ in range(chosen.shape[1]):
        most, expert = behind.gather(-1, chosen).max(dim=-1, keepdim=True)  # NaN above all
        far = most - behind > nearness * torch.maximum(behind.abs(), most)
        share = behind.masked_fill(far, -torch.inf).softmax(dim=-1)
        weights.scatter_(-1, expert, share.gather(-1, chosen.gather(-1, expert)))
        behind.scatter_(-1, chosen.gather(-1, expert), -torch.inf)
    return weights


Route = Callable[[torch.Tensor, int, bool, Scoring | None], tuple[torch.Tensor, torch.Tensor]]
"""See `reference.route`."""
AddWeightedRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""See `reference.add_weighted_rows`."""


class Mixture:
    """sum over a token's experts of weight * expert(x), in ascending order and in fp32: a token's bits are its own. A token takes
    num_chosen; norm_topk, scoring: see `reference.route`."""

    def __init__(
        self,
        experts: Sequence[Expert],
        num_chosen: int,
        norm_topk: bool,
        scoring: Scoring | None,
        route: Route,
        add_weighted_rows: AddWeightedRows,
    ) -> None:
        self.experts = experts
        self.num_chosen = num_chosen
        self.norm_topk = norm_topk
        self.scoring = scoring
        self._route = route
        self._add_weighted_rows = add_weighted_rows

    @property
    def most_unread(self) -> float:
        """Most tokens that the host does not have to read the choices of."""
        return 0

    def can_be_recorded(self, width: int, dtype: torch.dtype) -> bool:
        """Whether a step over rows [T, width] of dtype can, whatever its tokens take."""
        return True

    def choose(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] fp32 -> experts [T, k] int64, ascending, and their weights [T, k] fp32. ids [T] int64: the tokens, where
        there is a table."""
        assert self.scoring is None or self.scoring.table is None, "a CPU's alone has these"
        return self._route(logits, self.num_chosen, self.norm_topk, self.scoring)

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K], logits [T, E] fp32 of the router -> [T, width]. The host reads who takes what. slots [T] int64: -1 for rows
        that nobody asks for, which a device may leave out. ids: see `choose`."""
        chosen, weights = self.choose(logits, ids)
        out = torch.zeros(x.shape[0], self.experts[0].width, dtype=torch.float32, device=x.device)
        for e, tokens, own in _by_expert(chosen, weights, len(self.experts)):
            self._add_weighted_rows(out, self.experts[e](x[tokens]), tokens, own)
        return out.to(x.dtype)

    def onto(
        self, residual: torch.Tensor, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """residual += the sum: None where that is done, else the sum."""
        return self(x, logits, slots, ids)


def _by_expert(
    chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that is in use, in ascending order: its tokens, and what it weighs for each of them."""
    experts = chosen.flatten()
    order = torch.argsort(experts, stable=True)
    tokens, own = order // chosen.shape[1], weights.flatten()[order]
    end = 0
    for e, count in enumerate(torch.bincount(experts, minlength=num_experts).tolist()):
        first, end = end, end + count
        if count:
            yield e, tokens[first:end], own[first:end]
