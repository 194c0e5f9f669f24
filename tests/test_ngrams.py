"""Embeddings of n-grams on the CPU: rows of a table in pieces, gates, and the convolution, against the formulas; what is kept of
a sequence from step to step."""

from __future__ import annotations

import math

import pytest
import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import ngram_rules, ngrams
from nanovllm_cli.kernels.ngrams import NGramHashes, NGramPast, NGramTable
from nanovllm_cli.kernels.states import States

END = 3
STEPS = [[1, 9], [1, 1], [7, 0], [2, 1], [1, 30], [40, 1]]
"""Tokens of two sequences in each step."""


class Kept:
    """Of two sequences in three states, behind what others have left there."""

    def __init__(self, longest: int, channels: int, before: int, dtype: torch.dtype) -> None:
        stamps = (torch.zeros(3, 2, 2, dtype=torch.int32).random_(1, 50) for _ in range(2))
        self.states = States(*(torch.zeros(0) for _ in range(4)), *stamps)
        self.past = NGramPast(random(3, 2, before, channels, dtype=dtype), torch.full((3, 2, longest - 1), 7).int())
        self.lens = [0, 0]

    def begin(self, counts: list[int]) -> ngrams.Steps:
        there = [i for i, count in enumerate(counts) if count]
        lens = torch.tensor([self.lens[i] + counts[i] for i in there]).int()
        starts = torch.tensor([0, *(counts[i] for i in there)]).cumsum(0).int()
        return starts, lens, lens, torch.tensor([2, 0])[there].int()

    def end(self, counts: list[int]) -> None:
        """What the delta rule's kernel does: it says that the other place is the state."""
        for i, count in enumerate(counts):
            if not count:
                continue
            own, before = (2, 0)[i], self.lens[i]
            stamps = self.states.stamps[own]
            place = 1 if before == 0 else next(p for p in range(2) if stamps[p, 0] == before)
            self.lens[i] += count
            stamps[1 - place] = self.states.reaches[own, 1 - place] = self.lens[i]
            if before == 0:
                stamps[place] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("longest", "heads", "width", "kept"), [(3, 2, 5, torch.bfloat16), (2, 1, 17, torch.float32), (4, 3, 1, torch.float32)]
)
def test_rows_are_those_that_hashes_say(longest: int, heads: int, width: int, kept: torch.dtype, dtype: torch.dtype) -> None:
    every = (longest - 1) * heads
    sizes = torch.randint(5, 40, (every,))
    offsets = torch.tensor([0, *sizes[:-1].tolist()]).cumsum(0)
    hashes = NGramHashes(torch.randint(1 << 40, 1 << 60, (longest,)), sizes, offsets, END)
    whole = random(int(sizes.sum()) + 3, width, dtype=kept)
    cuts = [1, 11, len(whole) - 12]
    table = NGramTable([each.contiguous() for each in whole.split(cuts)])
    texts = [torch.randint(0, 5, (sum(step[i] for step in STEPS),)) for i in range(2)]
    wanted = [whole[ngram_rules.ngram_rows(ids, hashes.multipliers, sizes, offsets, END)].flatten(1).to(dtype) for ids in texts]
    state = Kept(longest, 2, 2, dtype)
    for counts in STEPS:
        parts = [slice(state.lens[i], state.lens[i] + count) for i, count in enumerate(counts) if count]
        there = [i for i, count in enumerate(counts) if count]
        ids, step = torch.cat([texts[i][part] for i, part in zip(there, parts, strict=True)]), state.begin(counts)
        for _ in range(2):  # a step that failed comes again
            found = ngrams.gather(ids, table, hashes, dtype, state.past, state.states, step)
            assert torch.equal(found, torch.cat([wanted[i][part] for i, part in zip(there, parts, strict=True)]))
        state.end(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width", "taps", "apart"), [(3, 24, 4, 3), (2, 513, 2, 1), (4, 7, 3, 5), (2, 16, 1, 3)])
def test_streams_get_what_the_formula_says(count: int, width: int, taps: int, apart: int, dtype: torch.dtype) -> None:
    channels = count * width
    gains, weight = random(3, channels, dtype=dtype), random(taps, channels, dtype=dtype)
    state = Kept(2, channels, (taps - 1) * apart, dtype)
    every: list[list[torch.Tensor]] = [[], []]
    for counts in STEPS:
        tokens = sum(counts)
        shapes = (tokens, channels), (tokens, width), (count, tokens, width)
        keys, value, streams = (random(*shape, dtype=dtype) for shape in shapes)
        gated, normed = ngram_rules.gated(keys.double(), value.double(), streams.double(), gains.double(), 1e-6, 1.0)
        normed = ngram_rules.gated(keys, value, streams, gains, 1e-6, 1.0)[1]
        wanted, first = [], 0
        for i, own in enumerate(counts):
            every[i].append(normed[first : first + own])
            whole = torch.cat(every[i]).double()
            wanted.append(ngram_rules.convolved(whole, weight.double(), apart)[len(whole) - own :])
            first += own
        expected = streams.double() + (gated + torch.cat(wanted)).view(tokens, count, width).transpose(0, 1)
        step = state.begin(counts)
        found = [streams.clone() for _ in range(2)]
        for each in found:
            ngrams.join(keys, value, each, gains, 1e-6, 1.0, weight, apart, state.past, state.states, step)
        assert torch.equal(*found)
        close_to_rounding(found[0], expected, 1e-5 if dtype == torch.float32 else 4e-3)  # of which parts are rounded, too
        state.end(counts)


def test_a_gate_of_nothing_is_a_half() -> None:
    zeros = torch.zeros(2, 1, 8)
    value, gains = torch.full((1, 8), 4.0), torch.ones(3, 16)
    state = Kept(2, 16, 1, torch.float32)
    step = state.past, state.states, state.begin([1, 0])
    ngrams.join(torch.zeros(1, 16), value, zeros, gains, 1e-6, 0.0, torch.zeros(2, 16), 1, *step)
    assert torch.equal(zeros, torch.full_like(zeros, 2.0))
    assert math.isclose(float(state.past.inputs[2, 0, 0, 0]), 1.0, rel_tol=1e-5)
