"""Steps of the gated delta rule, and of Mamba-2's, over a paged cache, for the kernels' tests on either device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import reference

Chunks = list[list[int]]
"""For each step the tokens of each sequence; 0 where it is not in the step."""


class Case(NamedTuple):
    """Heads and dims of keys, then of values; taps; see Chunks. mamba: the rule of Mamba-2, with a bias of its taps or none."""

    keys: tuple[int, int]
    values: tuple[int, int]
    width: int
    steps: Chunks
    tiled: bool = False
    block_size: int = 32
    mamba: bool = False
    bias: bool = False


def space(keys: tuple[int, int], values: tuple[int, int], width: int, steps: Chunks, bias: bool, block_size: int = 32) -> Case:
    return Case(keys, values, width, steps, False, block_size, True, bias)


CASES = [
    Case((1, 16), (1, 16), 4, [[1], *[[1]] * 20]),
    Case((2, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 30]),
    Case((2, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 3], tiled=True),
    Case((3, 24), (6, 24), 4, [[32, 31, 33], [1, 1, 1], [2, 70, 1], [33, 1, 40]]),
    Case((2, 32), (2, 16), 3, [[64], [3], [1], [1], [30]], block_size=16),
    Case((1, 17), (3, 31), 2, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 1, 1]]),
    Case((1, 128), (2, 128), 4, [[9, 1], [1, 50], [1, 1], [6, 1]]),
    Case((2, 64), (4, 128), 4, [[0, 20], [3, 1], [1, 1]], tiled=True),
    Case((1, 2), (1, 3), 1, [[3], [1], [40]]),
    Case((1, 40), (1, 72), 5, [[70], [64], [1]], block_size=64),
]
SPACES = [
    space((1, 16), (1, 16), 4, [[1], *[[1]] * 20], bias=True),
    space((1, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 30], bias=True),
    space((3, 24), (6, 24), 4, [[32, 31, 33], [1, 1, 1], [2, 70, 1], [33, 1, 40]], bias=True),
    space((2, 32), (2, 16), 3, [[64], [3], [1], [1], [30]], bias=False, block_size=16),
    space((1, 17), (3, 31), 2, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 1, 1]], bias=True),
    space((1, 128), (3, 64), 4, [[9, 1], [1, 50], [1, 1], [6, 1]], bias=True),
    space((2, 64), (4, 128), 4, [[0, 20], [3, 1], [1, 1]], bias=False),
    space((1, 2), (1, 3), 1, [[3], [1], [40]], bias=True),
    space((1, 37), (2, 3), 3, [[2, 40], [1, 1], [33, 1]], bias=True),
    space((1, 40), (2, 72), 2, [[70], [64], [1]], bias=False, block_size=64),
]
"""Of Mamba-2's rule."""


class Paged:
    """Sequences in blocks that lie anywhere, behind NaN and the stamps of others: what is read before it was written shows.

    A block has two places for a state and for the inputs of the convolution. One of them holds what was there behind the token
    that its stamp says, for each head of values; a step reads that of the token before its first, and writes the other.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        (num_keys, key_dim), (num_values, value_dim) = case.keys, case.values
        self.channels = 2 * num_keys * key_dim + num_values * value_dim
        self.lens = [0] * len(case.steps[0])
        longest = max(sum(step[i] for step in case.steps) for i in range(len(self.lens)))
        width = -(-longest // case.block_size)
        num_blocks = width * len(self.lens) + 2
        self.tables = torch.randperm(num_blocks)[: width * len(self.lens)].view(len(self.lens), width).int()
        self.states = _with_room((num_blocks, 2, num_values, key_dim, value_dim), torch.float32).fill_(torch.nan)
        self.inputs = _with_room((num_blocks, 2, case.width - 1, self.channels), dtype).fill_(torch.nan)
        self.stamps = _with_room((num_blocks, 2, num_values), torch.int32).random_(1, longest + 1)
        self.taps = random(case.width, self.channels, dtype=dtype)
        self.decay = -random(num_values, dtype=torch.float32).abs()
        self.decay_bias = random(num_values, dtype=torch.float32)
        self.norm = random(0 if case.mamba else value_dim, dtype=torch.float32)
        self.skip = random(num_values, dtype=torch.float32) if case.mamba else None
        self.taps_bias = random(self.channels, dtype=dtype) if case.bias else None
        self.before = [torch.zeros(case.width - 1, self.channels, dtype=dtype) for _ in self.lens]
        self.own = [torch.zeros(num_values, key_dim, value_dim, dtype=torch.float64) for _ in self.lens]

    @property
    def weights(self) -> dict[str, Any]:
        return {"taps": self.taps, "decay": self.decay, "decay_bias": self.decay_bias, "norm": self.norm, "eps": 1e-6,
                "skip": self.skip, "taps_bias": self.taps_bias, "tiled": self.case.tiled}  # fmt: skip

    def step(self, counts: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        """Arguments of a step, by what both wrappers call them, and what it has to give, in float64."""
        there = [i for i, count in enumerate(counts) if count]
        num_values, value_dim = self.case.values
        projected = random(sum(counts), self.channels + num_values * value_dim, dtype=self.taps.dtype)
        gates = random(sum(counts), num_values if self.case.mamba else 2 * num_values, dtype=torch.float32)
        expected, first = [], 0
        for i in there:
            own = slice(first, first + counts[i])
            first += counts[i]
            out, self.own[i] = self._expected(projected[own], gates[own], i)
            known = torch.cat([self.before[i], projected[own, : self.channels]])
            self.before[i] = known[len(known) - self.case.width + 1 :]
            expected.append(out)
            self.lens[i] += counts[i]
        starts = torch.tensor([0, *(counts[i] for i in there)]).cumsum(0)
        return self.weights | {
            "projected": projected, "gates": gates, "states": self.states, "inputs": self.inputs, "stamps": self.stamps,
            "query_starts": starts.int(), "kv_lens": torch.tensor([self.lens[i] for i in there]).int(),
            "block_tables": self.tables[there], "block_size": self.case.block_size,
        }, torch.cat(expected)  # fmt: skip

    def _expected(self, projected: torch.Tensor, gates: torch.Tensor, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows for a sequence, and its state then."""
        x, gates, taps, decay, decay_bias = (x.double() for x in (projected, gates, self.taps, self.decay, self.decay_bias))
        state, before = self.own[sequence], self.before[sequence].double()
        if self.skip is None:
            norm = self.norm.double()
            return reference.gated_delta(x, gates, taps, decay, decay_bias, norm, 1e-6, state, before, self.case.tiled)
        bias = None if self.taps_bias is None else self.taps_bias.double()
        return reference.state_space(x, gates, taps, bias, decay, decay_bias, self.skip.double(), state, before)

    def check_cache(self) -> None:
        """The last block of each sequence has its state and inputs, in one place for all heads, and no other that says so."""
        for table, length, state, before in zip(self.tables.tolist(), self.lens, self.own, self.before, strict=True):
            if length == 0:
                continue
            block = table[(length - 1) // self.case.block_size]
            for head in range(len(state)):
                (place,) = (self.stamps[block, :, head] == length).nonzero().flatten().tolist()
                found = self.states[block, place, head].double()
                assert (found - state[head]).norm() <= 1e-5 * state[head].norm() + 1e-30
            assert torch.equal(self.inputs[block, place], before)


def _with_room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A planted bug may write behind it."""
    return torch.zeros(math.prod(shape) + 64, dtype=dtype)[: math.prod(shape)].view(shape)


def check(case: Case, dtype: torch.dtype, delta: Callable[..., torch.Tensor]) -> None:
    """All steps of a case, each of them twice as a step that failed is, and what lies in the cache in the end."""
    paged = Paged(case, dtype)
    for counts in case.steps:
        args, expected = paged.step(counts)
        out = delta(**args)
        close_to_rounding(out, expected)
        assert torch.equal(delta(**args), out)
    paged.check_cache()


def check_same_bits(delta: Callable[..., torch.Tensor], case: Case) -> None:
    """Of a prompt at once, in chunks, and token by token. case: of one sequence and step."""
    (total,) = case.steps[0]
    paged = Paged(case, torch.bfloat16)
    args, _ = paged.step([total])
    whole = delta(**args)
    for size in (1, 7, 16, 30):
        for tensor in (paged.states, paged.inputs):
            tensor.fill_(torch.nan)
        paged.stamps.fill_(total + 1)
        for start in range(0, total, size):
            end = min(total, start + size)
            own = {"projected": args["projected"][start:end].clone(), "gates": args["gates"][start:end].clone(),
                   "kv_lens": torch.tensor([end]).int(), "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            assert torch.equal(delta(**(args | own)), whole[start:end])
