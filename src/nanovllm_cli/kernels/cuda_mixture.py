"""A mixture of experts on a GPU. The device itself divides the work: `route` makes tasks of who takes what, and kernels of few
rows or of many multiply theirs, so that a step is recorded and the host reads nothing. Of many tokens, where the experts' format
has no kernel for large tasks, each expert has a matmul of its own.

Legend: T tokens, E experts, P pairs of a token and an expert it takes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch

from nanovllm_cli.kernels import reference
from nanovllm_cli.kernels.expert_sum import expert_sum
from nanovllm_cli.kernels.experts import FEW_ROWS, MANY_ROWS, MATRIX_WORDS, Tasks
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.mixture import Expert, Matrix, Mixture, Scoring
from nanovllm_cli.kernels.route import MAX_EXPERTS, route

READ_MEANWHILE = 100_000_000
"""Bytes: what a GPU of 4 TB/s reads while an expert's own five kernels are launched. An estimate, no GPU has measured it."""
LEAST_ROWS = 16
"""Of pairs, so many an expert on average are few: two tasks, whose blocks read the same part of a matrix one behind the other, in
about the time that tensor cores take for a task of 64. An estimate too."""


@runtime_checkable
class TaskWeight(Protocol):
    """An expert's weight that kernels find by its addresses."""

    @property
    def task_form(self) -> Hashable:
        """What the experts of a layer must have in common; None where no kernel takes tasks."""

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What kernels read of it, in their order. They never move."""

    @property
    def task_rows(self) -> int:
        """Pairs of the largest tasks that there is a kernel for: FEW_ROWS or MANY_ROWS."""

    @property
    def task_bytes(self) -> int:
        """Memory that a task reads, at the most. Whoever shares the weight has to take the same way, and so the same number."""

    @property
    def is_far(self) -> bool:
        """Whether it is read across the bus."""

    def task_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What they read of its bias. Never moves either, but is there when the bias is."""

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        """See `gemv.expert_gemv`; this weight stands for all."""


class CudaMixture(Mixture):
    """A Mixture. deterministic: small tasks for any number of tokens, as a row's bits would depend on which way it goes.

    Otherwise many tokens have large tasks where the experts' format has a kernel for these. Where it has none, small ones go on
    as long as it takes less time to read a matrix for each of them than to launch each expert's own matmuls. Of experts that are
    read across the bus each has its own as soon as it has two tasks on average: they copy it first.
    """

    def __init__(
        self,
        launcher: Launcher,
        deterministic: bool,
        experts: Sequence[Expert],
        num_chosen: int,
        norm_topk: bool,
        scoring: Scoring | None = None,
    ) -> None:
        super().__init__(experts, num_chosen, norm_topk, scoring, reference.route, reference.add_weighted_rows)
        self._launcher = launcher
        self._activation = experts[0].activation
        last = [expert.down for expert in experts if expert.down is not None]
        self._up, self._down = _shared([expert.gate_up for expert in experts]), _shared(last)
        self._most_few: float = 0
        self._most_tokens: float = 0
        if self._up is None or (last and self._down is None) or len(experts) > MAX_EXPERTS:
            return
        each = [self._up] if self._down is None else [self._up, self._down]
        is_far = any(weight.is_far for weight in each)
        has_large = all(weight.task_rows == MANY_ROWS for weight in each) and not is_far
        affordable = FEW_ROWS * READ_MEANWHILE // sum(weight.task_bytes for weight in each)
        few = FEW_ROWS if is_far else LEAST_ROWS if has_large else max(LEAST_ROWS, affordable)
        self._most_few = math.inf if deterministic else few * len(experts) // num_chosen
        self._most_tokens = math.inf if has_large else self._most_few

    @property
    def most_unread(self) -> float:
        return self._most_tokens

    @cached_property
    def _matrices(self) -> torch.Tensor:
        """Where the experts' are; once they are loaded."""
        rows = [_addresses(expert.gate_up) + _addresses(expert.down) for expert in self.experts]
        return torch.tensor(rows, dtype=torch.int64).to(self._launcher.device)

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.shape[0] > self._most_tokens:
            return super().__call__(x, logits, slots)
        return self._sum(x, logits, slots, None)

    def onto(
        self, residual: torch.Tensor, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if x.shape[0] > self._most_tokens:
            return super().onto(residual, x, logits, slots)
        self._sum(x, logits, slots, residual)
        return None

    def _sum(
        self, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        assert self._up is not None
        rows = FEW_ROWS if x.shape[0] <= self._most_few else MANY_ROWS
        how = (self.num_chosen, self.norm_topk, slots, rows, self.scoring)
        tasks, weights = route(self._launcher, logits, self._matrices, *how)
        if (held := self.experts[0].held) is None:
            inner = self._up.multiply_tasks(x, tasks, 0, self._activation)
        else:
            inner = held(self._up.multiply_tasks(x, tasks, 0, None))
        found = inner if self._down is None else self._down.multiply_tasks(inner, tasks, 1, None)
        return expert_sum(self._launcher, found, weights, residual, slots)


def _shared(matrices: Sequence[Matrix]) -> TaskWeight | None:
    """One that stands for all, or None where they are not alike."""
    weights = [matrix.weight for matrix in matrices if isinstance(matrix.weight, TaskWeight)]
    forms = {weight.task_form for weight in weights}
    alike = len(weights) == len(matrices) and len(forms) == 1 and None not in forms
    return weights[0] if alike else None


def _addresses(matrix: Matrix | None) -> list[int]:
    if matrix is None:
        return [0] * MATRIX_WORDS
    assert isinstance(matrix.weight, TaskWeight)
    tensors = matrix.weight.task_tensors
    padding = (None,) * (MATRIX_WORDS - 1 - len(tensors))
    words = (*tensors, *padding, matrix.weight.task_bias(matrix.bias))
    return [0 if tensor is None else tensor.data_ptr() for tensor in words]
