"""A mixture of experts in a recorded step of the CPU. Which experts run is known only when it is replayed, so the arguments of
their kernels are data: the step's first kernel writes those of the experts that its tokens take to where the others read them.

Each (token, expert) has a place of its own, with memory for its row and all that is between kernels. An expert's arguments in
place i are those that it has in place 0 and what differs between the places: the same for every expert, as all have one format.

The kernels add the same numbers in the same order as `Mixture`, so every bit is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import cpu, cpu_experts, cpu_gather
from nanovllm_cli.kernels.cpu import Program, Step, address_of, tags_of
from nanovllm_cli.kernels.entry import team_bytes
from nanovllm_cli.kernels.mixture import Mixture, OfRows, Scoring


class CpuMixture(Mixture):
    """A Mixture that can be recorded where all experts are in the same formats."""

    def __init__(
        self, experts: Sequence[OfRows], num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
    ) -> None:
        super().__init__(experts, num_chosen, norm_topk, scoring, route, add_weighted_rows)
        self._recorded: _Experts | None = None

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        if cpu.recording() is None:
            return super().__call__(x, logits, slots)
        if self._recorded is None:
            self._recorded = _Experts(self.experts, x.shape[1], x.dtype)
        return self._recorded.record(x, *self.choose(logits))


class _Place:
    """Memory for one expert's computation of one row: an expert gets the same tensors for the same requests as the one before."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.x = torch.zeros(1, width, dtype=dtype)
        self.y = self.x
        self._tensors: list[torch.Tensor] = []
        self._next = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `cpu.Pool`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._next == len(self._tensors):
            self._tensors.append(torch.zeros(num_bytes, dtype=torch.uint8))
        memory = self._tensors[self._next]
        self._next += 1
        assert memory.nbytes == num_bytes, "experts of one shape, in the same formats"
        return memory.view(dtype).view(shape)

    def record(self, expert: OfRows) -> list[Step]:
        """The steps from x to y."""
        self._next = 0
        with Program(self) as program:
            self.y = expert(self.x)
        return program.steps


class _Experts:
    """The arguments of all experts' steps, and as many places as were ever needed."""

    def __init__(self, experts: Sequence[OfRows], width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._first = experts[0]
        self._places = [_Place(width, dtype)]
        recorded = [self._places[0].record(expert) for expert in experts]
        self._steps = recorded[0]
        kernels = [step.kernel for step in self._steps]
        assert all([step.kernel for step in steps] == kernels for steps in recorded), "experts in the same formats"
        self._base = torch.stack([_words(steps) for steps in recorded])
        self._teams: dict[int, _Gang] = {}

    def record(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Record `Mixture.__call__` behind the router: chosen [T, k] int64 in ascending order, weights [T, k] fp32."""
        tokens, num_chosen = chosen.shape
        num_places = tokens * num_chosen
        if num_places not in self._teams:
            self._teams[num_places] = self._gang(num_places)
        ready, tag, num_words = self._teams[num_places], tags_of(self._dtype), self._base.shape[1]
        size = team_bytes()
        out = cpu.new_tensor((tokens, self._width), self._dtype)
        ready_ints = (
            num_places, num_chosen, address_of(chosen, torch.int64, tokens, num_chosen), ready.words.data_ptr(),
            self._base.data_ptr(), ready.moved.data_ptr(), num_words, address_of(x, self._dtype, tokens, self._width),
            ready.x_at.data_ptr(), self._width, ready.teams.data_ptr(), len(self._steps), size,
        )  # fmt: skip
        cpu.launch(cpu_experts.take_places, num_places * (num_words + self._width), tag, ready_ints)
        begin = ready.words.data_ptr()
        for i, step in enumerate(self._steps):
            teams = ready.teams.data_ptr() + i * num_places * size
            where = begin, 8 * num_words, num_places
            if cpu_gather.gather.is_at(step.kernel):
                cpu.launch(cpu_gather.gather_places, 0, "", where)  # all places meet the other processes at once
            else:
                cpu.launch(cpu_experts.gang, num_places * step.work, "", (step.kernel, *where, teams, size))
            begin += len(step.arguments)
        shares = address_of(weights, torch.float32, tokens, num_chosen)
        sum_ints = (ready.y_at.data_ptr(), shares, out.data_ptr(), tokens, num_chosen, self._width)
        cpu.launch(cpu_experts.sum_places, num_places * self._width, tag, sum_ints)
        return out

    def _gang(self, num_places: int) -> _Gang:
        while len(self._places) < num_places:
            self._places.append(_Place(self._width, self._dtype))
            self._places[-1].record(self._first)
        places = self._places[:num_places]
        moved = torch.stack([_words(place.record(self._first)) for place in places]) - self._base[0]
        return _Gang(places, moved, len(self._steps))


class _Gang:
    """Some places that compute at once: words [places, words] int64 are their arguments, moved what is added to those of place 0;
    x_at and y_at [places] int64 where their rows are, in and out."""

    def __init__(self, places: Sequence[_Place], moved: torch.Tensor, num_steps: int) -> None:
        self.moved = moved
        self.words = torch.zeros_like(moved)
        self.x_at = torch.tensor([place.x.data_ptr() for place in places])
        self.y_at = torch.tensor([place.y.data_ptr() for place in places])
        self.teams = torch.zeros(num_steps * len(places) * team_bytes(), dtype=torch.uint8)


def _words(steps: Sequence[Step]) -> torch.Tensor:
    """The arguments of all steps, behind each other."""
    return torch.frombuffer(bytearray(b"".join(step.arguments for step in steps)), dtype=torch.int64)


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
    if scoring is not None:
        assert scoring.bias is not None, "zeros where there is none"
        ranks = cpu.new_tensor((tokens, num_experts), torch.float32)
        tables = (scoring.bias, scoring.expert_scale)
        bias, own = (0 if table is None else address_of(table, torch.float32, num_experts) for table in tables)
        how = (ranks.data_ptr(), bias, own, int(scoring.sigmoid), *(scoring.groups or (1, 1, 1)))
    scale = 1.0 if scoring is None else scoring.scale
    cpu.launch(cpu_experts.route, tokens * num_experts * num_chosen, "", ints + how, (scale,))
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
