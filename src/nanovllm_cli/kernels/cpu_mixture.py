"""A mixture of experts on the CPU: all experts that the tokens take compute at once, each over the rows of those who take it.

Which experts run, and over how many rows, is known only when they do, so the arguments of their kernels are data: the first
kernel sorts the pairs of a token and an expert by experts, and writes the arguments of each expert in use to where the others
read them. That is how a step can be recorded.

An expert's pairs lie behind each other in all that is between kernels, so an argument is what it is for the expert and one row in
the first place, and what differs by where the memory is, by how many pairs there are, by the expert's first one and by how many
it has. All of that adds up, and is the same for every expert, as all have one format.

The kernels add the same numbers in the same order as `Mixture`, so every bit is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, Protocol, runtime_checkable

import torch

from nanovllm_cli.kernels import cpu, cpu_experts, cpu_gather
from nanovllm_cli.kernels.cpu import Program, Step, address_of, tags_of
from nanovllm_cli.kernels.entry import team_bytes
from nanovllm_cli.kernels.gathers import Gather, gather
from nanovllm_cli.kernels.mixture import Expert, Mixture, Scoring

_LINE = 64
_WORD = 8


@runtime_checkable
class Recordable(Protocol):
    """A weight, as far as it matters here."""

    @property
    def recordable(self) -> bool:
        """See `WeightStorage`."""


class CpuMixture(Mixture):
    """A Mixture, whose experts compute together where all are in the same formats. pool: for what is between their kernels where
    no step is recorded, one for all layers."""

    def __init__(
        self, pool: cpu.Pool, experts: Sequence[Expert], num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
    ) -> None:
        super().__init__(experts, num_chosen, norm_topk, scoring, route, add_weighted_rows)
        self._pool = pool
        self._known: dict[tuple[int, torch.dtype], _Together | None] = {}

    def can_be_recorded(self, width: int, dtype: torch.dtype) -> bool:
        return self._together(width, dtype) is not None

    def choose(self, logits: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scoring is None or self.scoring.table is None:
            return super().choose(logits)
        assert ids is not None
        return route_by_table(logits, ids, self.num_chosen, self.norm_topk, self.scoring)

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        together = self._together(x.shape[1], x.dtype)
        if together is None:
            assert cpu.recording() is None, "experts that can't be recorded"
            return super().__call__(x, logits, slots, ids)
        with cpu.kept_memory(self._pool):
            memory = together.new_memory(x.shape[0] * self.num_chosen)
        return together.run(x, *self.choose(logits, ids), memory)

    def _together(self, width: int, dtype: torch.dtype) -> _Together | None:
        key = width, dtype
        if key not in self._known:
            matrices = [matrix for expert in self.experts for matrix in (expert.gate_up, expert.down) if matrix is not None]
            weights = [matrix.weight for matrix in matrices]
            can = all(isinstance(weight, Recordable) and weight.recordable for weight in weights)
            self._known[key] = _if_alike(self.experts, width, dtype) if can else None
        return self._known[key]


class _Memory:
    """Of `count` pairs from `first` on, of num_pairs: an expert gets the same tensors for the same requests as the one before.
    All pairs' rows of one request lie behind each other. Without memory nothing comes of it but row_bytes, of each request."""

    def __init__(self, memory: torch.Tensor | None = None, num_pairs: int = 1, first: int = 0, count: int = 1) -> None:
        self._memory = memory
        self._num_pairs = num_pairs
        self._first = first
        self._count = count
        self.row_bytes: list[int] = []

    @property
    def pair_bytes(self) -> int:
        """What a pair needs."""
        return sum(-(-size // _LINE) * _LINE for size in self.row_bytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `cpu.Pool`."""
        size, rest = divmod(math.prod(shape) * dtype.itemsize, self._count)
        assert rest == 0, "rows that are alike"
        begin = self._num_pairs * self.pair_bytes + self._first * size
        self.row_bytes.append(size)
        if self._memory is None:
            return torch.empty(shape, dtype=dtype)
        return self._memory[begin : begin + size * self._count].view(dtype).view(shape)

    def rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self.empty((self._count, width), dtype)


class _Recorded:
    """The steps of an expert over rows in a `_Memory`; what it needed there, and where in it the result is."""

    def __init__(self, expert: Expert, width: int, dtype: torch.dtype, *where: Any) -> None:
        memory = _Memory(*where)
        x = memory.rows(width, dtype)
        with Program(memory) as program:
            y = expert(x)
        self.steps = program.steps
        self.row_bytes, self.pair_bytes = memory.row_bytes, memory.pair_bytes
        self.result_at = y.data_ptr() - x.data_ptr()

    @property
    def words(self) -> torch.Tensor:
        """The arguments of all steps, behind each other."""
        return torch.frombuffer(bytearray(b"".join(step.arguments for step in self.steps)), dtype=torch.int64)

    def is_like(self, other: _Recorded) -> bool:
        """Whether the same kernels read and write rows of the same sizes, so that their arguments differ alike by place."""
        kernels = [step.kernel for step in self.steps] == [step.kernel for step in other.steps]
        return kernels and self.row_bytes == other.row_bytes


def _if_alike(experts: Sequence[Expert], width: int, dtype: torch.dtype) -> _Together | None:
    """None where they are not."""
    memory = torch.empty(4 * _Recorded(experts[0], width, dtype).pair_bytes, dtype=torch.uint8)
    each: list[_Recorded] = []
    for expert in experts:
        needed = _Recorded(expert, width, dtype)
        if each and not needed.is_like(each[0]):
            return None
        each.append(_Recorded(expert, width, dtype, memory))
    return _Together(each, experts[0], memory, width, dtype)


class _Together:
    """The arguments of all experts' steps: what they are without memory, pairs and rows, and what each of these adds. each: in
    the first place of `memory`, alone; first: one of them."""

    def __init__(
        self, each: Sequence[_Recorded], first: Expert, memory: torch.Tensor, width: int, dtype: torch.dtype
    ) -> None:
        self._width, self._found, self._dtype = width, first.width, dtype
        self._pair_bytes, self._result_at = each[0].pair_bytes, each[0].result_at

        def words(memory: torch.Tensor, num_pairs: int, begin: int, count: int) -> torch.Tensor:
            return _Recorded(first, width, dtype, memory, num_pairs, begin, count).words

        other = torch.empty_like(memory)
        one, of_three = each[0].words, words(memory, 3, 0, 1)
        self._table = torch.stack([
            (words(other, 1, 0, 1) - one) // (other.data_ptr() - memory.data_ptr()),
            (of_three - one) // 2,
            words(memory, 3, 1, 1) - of_three,
            words(memory, 3, 0, 2) - of_three,
        ])  # fmt: skip
        self._base = torch.stack([own.words for own in each]) - self._added(memory, 1, 0, 1)
        assert torch.equal(words(memory, 4, 1, 3), self._base[0] + self._added(memory, 4, 1, 3)), "sums of these"
        sizes = [len(step.arguments) for step in each[0].steps]
        places = list(zip(each[0].steps, accumulate(sizes, initial=0), strict=False))
        runs = groupby(places, key=lambda place: cpu_gather.gather.is_at(place[0].kernel))
        self._runs = [_Run(list(run), meets) for meets, run in runs]

    def _added(self, memory: torch.Tensor, num_pairs: int, first: int, count: int) -> torch.Tensor:
        factors = torch.tensor([memory.data_ptr(), num_pairs, first, count - 1])
        return (factors[:, None] * self._table).sum(0)

    def new_memory(self, num_pairs: int) -> torch.Tensor:
        """For all that `run` has between the kernels of so many pairs."""
        return cpu.new_tensor((num_pairs * self._pair_bytes,), torch.uint8)

    def run(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """`Mixture.__call__` behind the router: chosen [T, k] int64 in ascending order, weights [T, k] fp32."""
        tokens, num_chosen = chosen.shape
        num_pairs, (num_experts, num_words), tag, size = tokens * num_chosen, self._base.shape, tags_of(self._dtype), team_bytes()
        most_parts = min(num_pairs, num_experts)
        most_together = min(most_parts, cpu_experts.MOST_TOGETHER * cpu.most_threads())
        row_of, parts = (cpu.new_tensor((count,), torch.int64) for count in (num_pairs, 2))
        words = cpu.new_tensor((most_parts, num_words), torch.int64)
        num_steps = sum(len(run.places) for run in self._runs)
        teams = cpu.new_tensor((num_steps * most_together, size), torch.uint8)
        out = cpu.new_tensor((tokens, self._found), self._dtype)
        take_ints = (
            num_pairs, num_chosen, num_experts, address_of(chosen, torch.int64, tokens, num_chosen), parts.data_ptr(),
            words.data_ptr(), self._base.data_ptr(), self._table.data_ptr(), num_words, memory.data_ptr(),
            address_of(x, self._dtype, tokens, self._width), self._width, x.itemsize, row_of.data_ptr(), teams.data_ptr(),
            len(teams), size, cpu.num_threads(),
        )  # fmt: skip
        cpu.launch(cpu_experts.take_parts, num_pairs * (num_words + self._width), tag, take_ints)
        team = teams.data_ptr()
        for run in self._runs:
            if run.meets:  # all pairs of all parts meet the other processes at once
                whole = self._base[0] + self._added(memory, num_pairs, 0, num_pairs)
                for step, place in run.places:
                    own = whole[place // _WORD : (place + len(step.arguments)) // _WORD]
                    gather(Gather(*own.tolist()))
                continue
            where = parts.data_ptr(), words.data_ptr(), _WORD * num_words
            cpu.launch(cpu_experts.alone, num_pairs * run.work, "", (run.table.data_ptr(), len(run.places), *where))
            for step, place in run.places:
                ints = (step.kernel, where[0], where[1] + place, where[2], team, size)
                cpu.launch(cpu_experts.gang, num_pairs * step.work, "", ints)
                team += most_together * size
        shares = address_of(weights, torch.float32, tokens, num_chosen)
        result = memory.data_ptr() + num_pairs * self._result_at
        sum_ints = (result, row_of.data_ptr(), shares, out.data_ptr(), tokens, num_chosen, self._found)
        cpu.launch(cpu_experts.sum_pairs, num_pairs * self._found, tag, sum_ints)
        return out


class _Run:
    """Steps that nobody meets other processes in, or that all do. places: each with where its arguments are among all."""

    def __init__(self, places: list[tuple[Step, int]], meets: bool) -> None:
        self.places = places
        self.meets = meets
        self.work = sum(step.work for step, _ in places)
        self.table = torch.tensor([(step.kernel, place) for step, place in places], dtype=torch.int64)


def route(
    logits: torch.Tensor, num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.route`; logits are fp32."""
    tokens, num_experts = logits.shape
    assert 0 < num_chosen <= num_experts
    chosen, weights = cpu.new_tensor((tokens, num_chosen), torch.int64), cpu.new_tensor((tokens, num_chosen), torch.float32)
    ints = (
        address_of(logits, torch.float32, tokens, num_experts), tokens, num_experts, num_chosen, int(norm_topk),
        chosen.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    how: tuple[int, ...] = (0, 0, 0, 0, 1, 1, 1)
    if scoring is not None and scoring.nearness is None:
        assert scoring.bias is not None, "zeros where there is none"
        ranks = cpu.new_tensor((tokens, num_experts), torch.float32)
        tables = (scoring.bias, scoring.expert_scale)
        bias, own = (0 if table is None else address_of(table, torch.float32, num_experts) for table in tables)
        how = (ranks.data_ptr(), bias, own, scoring.kind, *(scoring.groups or (1, 1, 1)))
    scale, nearness = (1.0, None) if scoring is None else (scoring.scale, scoring.nearness)
    numbers = (scale, -1.0 if nearness is None else nearness)
    cpu.launch(cpu_experts.route, tokens * num_experts * num_chosen, "", ints + how, numbers)
    return chosen, weights


def route_by_table(
    logits: torch.Tensor, ids: torch.Tensor, num_chosen: int, norm_topk: bool, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `digest_rules.route_by_table`; logits are fp32, and ids those of tokens that the table has rows of."""
    assert scoring.table is not None
    assert scoring.kind > 0, "no model has this of a softmax"
    tokens, num_experts = logits.shape
    chosen, weights = cpu.new_tensor((tokens, num_chosen), torch.int64), cpu.new_tensor((tokens, num_chosen), torch.float32)
    ints = (
        address_of(logits, torch.float32, tokens, num_experts), tokens, num_experts, num_chosen, int(norm_topk),
        chosen.data_ptr(), weights.data_ptr(), address_of(ids, torch.int64, tokens),
        address_of(scoring.table, torch.int64, len(scoring.table), num_chosen), scoring.kind,
    )  # fmt: skip
    cpu.launch(cpu_experts.route_by_table, 16 * tokens * num_chosen, "", ints, (scoring.scale,))
    return chosen, weights


def add_weighted_rows(out: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """See `reference.add_weighted_rows`; out is fp32."""
    n, width = y.shape
    ints = (
        address_of(out, torch.float32, *out.shape), address_of(y, y.dtype, n, out.shape[1]), address_of(rows, torch.int64, n),
        address_of(weights, torch.float32, n), n, width,
    )  # fmt: skip
    cpu.launch(cpu_experts.add_weighted_rows, 4 * n * width, tags_of(y.dtype), ints)


def add_onto(x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """x [T, width] itself, changed in place to (x + y) * factor."""
    ints = (address_of(x, x.dtype, *x.shape), address_of(y, x.dtype, *x.shape), *x.shape)
    cpu.launch(cpu_experts.add_onto, x.numel(), tags_of(x.dtype), ints, (factor,))
    return x
