"""Steps of the gated short convolution over a paged cache, for the kernels' tests on either device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import reference

Chunks = list[list[int]]
"""For each step the tokens of each sequence."""


class Case(NamedTuple):
    """steps: see Chunks; a sequence that is not in a step has a 0."""

    channels: int
    width: int
    steps: Chunks
    bias: bool = False
    block_size: int = 16


DECODES = [[1, 1, 1]] * 20
CASES = [
    Case(16, 3, [[1], *[[1]] * 20]),
    Case(64, 3, [[5, 17, 1], *DECODES]),
    Case(24, 3, [[16, 15, 33], [1, 1, 1], [2, 7, 1], [18, 1, 40]]),
    Case(8, 4, [[40], [3], [1], [1], [30]], bias=True),
    Case(17, 2, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 1, 1]], bias=True),
    Case(136, 8, [[9, 1], [1, 50], [1, 1], [6, 1]]),
    Case(600, 3, [[0, 20], [3, 1], [1, 1]]),
    Case(2, 1, [[3], [1], [20]]),
    Case(40, 3, [[70], [64], [1]], block_size=32),
    Case(33, 3, [[100, 3], [1, 61]], block_size=64),
    Case(2056, 3, [[2], [1]]),
]


class Paged:
    """Sequences in blocks that lie anywhere, behind NaN: what is read before it was written shows."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.lens = [0] * len(case.steps[0])
        longest = max(sum(step[i] for step in case.steps) for i in range(len(self.lens)))
        width = -(-longest // case.block_size)
        num_blocks = width * len(self.lens) + 2
        order = torch.randperm(num_blocks)[: width * len(self.lens)]
        self.tables = order.view(len(self.lens), width).int()
        shape = (num_blocks, case.block_size, case.channels)
        memory = torch.full((math.prod(shape) + 64,), torch.nan).to(dtype)  # a planted bug may write behind it
        self.cache = memory[: math.prod(shape)].view(shape)
        self.weight = random(case.width, case.channels, dtype=dtype)
        self.bias = random(case.channels, dtype=dtype) if case.bias else None
        self.inputs = [torch.zeros(case.width - 1, case.channels, dtype=dtype) for _ in self.lens]

    def step(self, counts: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Arguments of a step, by what both wrappers call them, and what it has to give, in float64. Sequences that are not in it
        are left away, as a scheduler does."""
        there = [i for i, count in enumerate(counts) if count]
        projected = random(sum(counts), 3 * self.case.channels, dtype=self.cache.dtype)
        rows, expected = iter(projected.split([counts[i] for i in there])), []
        for i in there:
            own = next(rows)
            before = self.inputs[i][len(self.inputs[i]) - self.case.width + 1 :]
            _, inputs = reference.gated_conv(own, self.weight, self.bias, before)  # rounded as they are kept
            wide = None if self.bias is None else self.bias.double()
            out, _ = reference.gated_conv(_with_inputs(own, inputs), self.weight.double(), wide, before.double())
            expected.append(out)
            self.inputs[i] = torch.cat([self.inputs[i], inputs])
            self.lens[i] += counts[i]
        starts = torch.tensor([0, *(counts[i] for i in there)]).cumsum(0)
        return {
            "projected": projected, "weight": self.weight, "bias": self.bias, "cache": self.cache,
            "query_starts": starts.int(), "kv_lens": torch.tensor([self.lens[i] for i in there]).int(),
            "block_tables": self.tables[there],
        }, torch.cat(expected)  # fmt: skip

    def check_cache(self) -> None:
        """Each block has the inputs of its tokens, and nobody else's."""
        case = self.case
        wanted = torch.full_like(self.cache, torch.nan)
        for table, length, inputs in zip(self.tables.tolist(), self.lens, self.inputs, strict=True):
            for position in range(length):
                wanted[table[position // case.block_size], position % case.block_size] = inputs[case.width - 1 + position]
        assert torch.equal(self.cache.nan_to_num(7.0), wanted.nan_to_num(7.0))


def _with_inputs(projected: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """In float64, with b * h as it was rounded: 1 * inputs."""
    _, c, _ = projected.double().chunk(3, dim=-1)
    return torch.cat([torch.ones_like(c), c, inputs.double()], dim=-1)


def check(case: Case, dtype: torch.dtype, convolve: Callable[..., torch.Tensor]) -> None:
    """All steps of a case, and what lies in the cache in the end."""
    paged = Paged(case, dtype)
    for counts in case.steps:
        args, expected = paged.step(counts)
        close_to_rounding(convolve(**args), expected)
    paged.check_cache()


def check_same_bits(convolve: Callable[..., torch.Tensor], channels: int) -> None:
    """Of a prompt at once, in chunks, and token by token."""
    args, _ = Paged(Case(channels, 3, [[53]], bias=True), torch.bfloat16).step([53])
    whole = convolve(**args)
    for size in (1, 7, 16, 30):
        args["cache"].fill_(torch.nan)
        for start in range(0, 53, size):
            end = min(53, start + size)
            own = {"projected": args["projected"][start:end].clone(), "kv_lens": torch.tensor([end]).int(),
                   "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            assert torch.equal(convolve(**(args | own)), whole[start:end])
