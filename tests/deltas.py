"""Steps of the gated delta rule, and of Mamba-2's, on states of sequences, for the kernels' tests on either device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import state_rules
from nanovllm_cli.kernels.states import ByChannel, States


class Share(NamedTuple):
    """Of a sequence in a step: first it goes `back` over guesses that did not hold, then come known tokens, and guesses."""

    known: int
    guesses: int = 0
    back: int = 0


MAX_GUESSES = 23
Chunks = list[list[int | Share]]
"""For each step what there is of each sequence, or how many known tokens; 0 where it is not in the step."""


class Case(NamedTuple):
    """Heads and dims of keys, then of values; taps; see Chunks. mamba: the rule of Mamba-2, with a bias of its taps or none.
    most: the largest beta. by_channel: with a decay of each channel. floor: the least logarithm of one."""

    keys: tuple[int, int]
    values: tuple[int, int]
    width: int
    steps: Chunks
    tiled: bool = False
    mamba: bool = False
    bias: bool = False
    most: float = 1.0
    by_channel: bool = False
    floor: float = 0.0


def space(keys: tuple[int, int], values: tuple[int, int], width: int, steps: Chunks, bias: bool) -> Case:
    return Case(keys, values, width, steps, False, True, bias)


GUESSED: Chunks = [
    [Share(7, 5), 3, Share(1, 2)],
    [Share(1, 7, back=2), Share(1, 3), Share(1, back=2)],
    [Share(1, 1), Share(1, 20, back=3), Share(1, MAX_GUESSES)],
    [Share(2, back=1), Share(1, 6), Share(1, 1, back=MAX_GUESSES - 1)],
    [1, Share(30, 2, back=4), Share(1, back=1)],
    [Share(0, 1), Share(1, back=1), 0],
    [Share(0, 1), Share(0, 3), 1],
    [Share(0, 1), Share(0, 1, back=2), 1],
    [Share(2, back=1), Share(1, 1, back=1), Share(0, 4)],
    [Share(1, 4), 1, Share(3, back=2)],
    [1, 1, 1],
]
"""Of a model that guesses, and of one that drafts: steps with known tokens and guesses, and steps of guesses alone."""
CASES = [
    Case((1, 16), (1, 16), 4, [[1], *[[1]] * 20]),
    Case((2, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 30]),
    Case((2, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 3], tiled=True),
    Case((3, 24), (6, 24), 4, [[32, 31, 33], [1, 1, 1], [2, 70, 1], [33, 1, 40]]),
    Case((2, 32), (2, 16), 3, [[64], [3], [1], [1], [30]]),
    Case((1, 17), (3, 31), 2, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 1, 1]]),
    Case((1, 128), (2, 128), 4, [[9, 1], [1, 50], [1, 1], [6, 1]]),
    Case((2, 64), (4, 128), 4, [[0, 20], [3, 1], [1, 1]], tiled=True),
    Case((1, 2), (1, 3), 1, [[3], [1], [40]]),
    Case((1, 40), (1, 72), 5, [[70], [64], [1]]),
    Case((2, 16), (4, 24), 4, GUESSED),
]
TURNED = [case._replace(most=2.0) for case in (CASES[1], CASES[2], CASES[5], CASES[10])]
"""With betas up to 2."""
CHANNELS = [case._replace(by_channel=True) for case in (CASES[0], CASES[3], CASES[4], CASES[5], CASES[6], CASES[8], CASES[10])]
CHANNELS += [CHANNELS[0]._replace(floor=-5.0), CHANNELS[-1]._replace(floor=-0.7)]
"""With a decay of each channel."""
SPACES = [
    space((1, 16), (1, 16), 4, [[1], *[[1]] * 20], bias=True),
    space((1, 16), (4, 16), 4, [[5, 37, 1], *[[1, 1, 1]] * 30], bias=True),
    space((3, 24), (6, 24), 4, [[32, 31, 33], [1, 1, 1], [2, 70, 1], [33, 1, 40]], bias=True),
    space((2, 32), (2, 16), 3, [[64], [3], [1], [1], [30]], bias=False),
    space((1, 17), (3, 31), 2, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 1, 1]], bias=True),
    space((1, 128), (3, 64), 4, [[9, 1], [1, 50], [1, 1], [6, 1]], bias=True),
    space((2, 64), (4, 128), 4, [[0, 20], [3, 1], [1, 1]], bias=False),
    space((1, 2), (1, 3), 1, [[3], [1], [40]], bias=True),
    space((1, 37), (2, 3), 3, [[2, 40], [1, 1], [33, 1]], bias=True),
    space((1, 40), (2, 72), 2, [[70], [64], [1]], bias=False),
    space((2, 24), (4, 64), 4, GUESSED, bias=True),
]
"""Of Mamba-2's rule."""


class Kept:
    """States that lie anywhere, behind NaN and the stamps of others: what is read before it was written shows."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        (num_keys, key_dim), (num_values, value_dim) = case.keys, case.values
        self.channels = 2 * num_keys * key_dim + num_values * value_dim
        self.num_gates = num_values * (1 if case.mamba else 1 + key_dim if case.by_channel else 2)
        self.lens = [0] * len(case.steps[0])
        longest = sum(max(_size(share) for share in step) for step in case.steps)
        num_states = len(self.lens) + 2
        self.state_of = torch.randperm(num_states)[: len(self.lens)].int()
        self.states = States(
            _with_room((num_states, 2, num_values, key_dim, value_dim), torch.float32).fill_(torch.nan),
            _with_room((num_states, 2, case.width - 1, self.channels), dtype).fill_(torch.nan),
            _with_room((num_states, 2, MAX_GUESSES, self.channels), dtype).fill_(torch.nan),
            _with_room((num_states, 2, MAX_GUESSES, self.num_gates), torch.float32).fill_(torch.nan),
            _with_room((num_states, 2, num_values), torch.int32).random_(1, longest + 1),
            _with_room((num_states, 2, num_values), torch.int32).random_(1, longest + 1),
        )
        self.taps = random(case.width, self.channels, dtype=dtype)
        self.decay = -random(num_values, dtype=torch.float32).abs()
        self.decay_bias = random(num_values * (key_dim if case.by_channel else 1), dtype=torch.float32)
        self.norm = random(0 if case.mamba else value_dim, dtype=torch.float32)
        self.skip = random(num_values, dtype=torch.float32) if case.mamba else None
        self.taps_bias = random(self.channels, dtype=dtype) if case.bias else None
        before = torch.zeros(case.width - 1, self.channels, dtype=dtype)
        state = torch.zeros(num_values, key_dim, value_dim, dtype=torch.float64)
        self.past = [{0: (before, state)} for _ in self.lens]
        """Of each sequence, behind so many tokens: inputs of the convolution, and the state in float64."""

    @property
    def weights(self) -> dict[str, Any]:
        return {"taps": self.taps, "decay": self.decay, "decay_bias": self.decay_bias, "norm": self.norm, "eps": 1e-6,
                "skip": self.skip, "taps_bias": self.taps_bias, "tiled": self.case.tiled, "most": self.case.most}  # fmt: skip

    def step(self, chunks: list[int | Share]) -> tuple[dict[str, Any], torch.Tensor]:
        """Arguments of a step, by what both wrappers call them, and what it has to give, in float64."""
        shares = {i: chunk if isinstance(chunk, Share) else Share(chunk) for i, chunk in enumerate(chunks) if chunk != 0}
        counts = [share.known + share.guesses for share in shares.values()]
        num_values, value_dim = self.case.values
        projected = random(sum(counts), self.channels + num_values * value_dim, dtype=self.taps.dtype)
        gates = random(sum(counts), self.num_gates, dtype=torch.float32)
        expected, known_lens, first = [], [], 0
        for i, share in shares.items():
            self.lens[i] -= share.back
            known_lens.append(self.lens[i] + share.known)
            for count in (share.known, *[1] * share.guesses):
                if count:
                    expected.append(self._advance(projected[first : first + count], gates[first : first + count], i))
                first += count
        apart: dict[str, Any] = {"projected": projected, "gates": gates}
        if self.case.by_channel:
            z, rates = projected[:, self.channels :].clone(), gates[:, num_values:].clone()
            apart = {"projected": projected[:, : self.channels].contiguous(), "gates": gates[:, :num_values].contiguous(),
                     "by_channel": ByChannel(rates, z, self.case.floor)}  # fmt: skip
        return self.weights | apart | {
            "states": self.states,
            "query_starts": torch.tensor([0, *counts]).cumsum(0).int(),
            "kv_lens": torch.tensor([self.lens[i] for i in shares]).int(), "known_lens": torch.tensor(known_lens).int(),
            "state_of": self.state_of[list(shares)],
        }, torch.cat(expected)  # fmt: skip

    def _advance(self, projected: torch.Tensor, gates: torch.Tensor, sequence: int) -> torch.Tensor:
        """By some tokens of a sequence."""
        x, gates, taps, decay, decay_bias = (x.double() for x in (projected, gates, self.taps, self.decay, self.decay_bias))
        before, state = self.past[sequence][self.lens[sequence]]
        if self.skip is None:
            norm = self.norm.double()
            rest = decay, decay_bias, norm, 1e-6, state, before.double()
            if self.case.by_channel:
                apart = x[:, : self.channels], gates[:, : len(decay)], gates[:, len(decay) :], x[:, self.channels :]
                out, state = state_rules.channel_delta(*apart, taps, *rest, self.case.floor)
            else:
                out, state = state_rules.gated_delta(x, gates, taps, *rest, self.case.tiled, self.case.most)
        else:
            bias = None if self.taps_bias is None else self.taps_bias.double()
            of_space = decay, decay_bias, self.skip.double(), state, before.double()
            out, state = state_rules.state_space(x, gates, taps, bias, *of_space)
        known = torch.cat([before, projected[:, : self.channels]])
        self.lens[sequence] += len(projected)
        self.past[sequence][self.lens[sequence]] = known[len(known) - self.case.width + 1 :], state
        return out

    def check(self) -> None:
        """The state of each sequence is there with its inputs, in one place for all heads, and no other that says so."""
        for index, length, past in zip(self.state_of.tolist(), self.lens, self.past, strict=True):
            if length == 0:
                continue
            before, state = past[length]
            for head in range(len(state)):
                (place,) = (self.states.stamps[index, :, head] == length).nonzero().flatten().tolist()
                found = self.states.matrices[index, place, head].double()
                assert (found - state[head]).norm() <= 1e-5 * state[head].norm() + 1e-30
                assert self.states.reaches[index, place, head] == length
            assert torch.equal(self.states.inputs[index, place], before)


def _size(chunk: int | Share) -> int:
    return chunk if isinstance(chunk, int) else chunk.known + chunk.guesses


def _with_room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A planted bug may write behind it."""
    return torch.zeros(math.prod(shape) + 64, dtype=dtype)[: math.prod(shape)].view(shape)


def check(case: Case, dtype: torch.dtype, delta: Callable[..., torch.Tensor]) -> None:
    """All steps of a case, each of them twice as a step that failed is, and what lies in the cache in the end."""
    kept = Kept(case, dtype)
    for chunks in case.steps:
        args, expected = kept.step(chunks)
        out = delta(**args)
        close_to_rounding(out, expected)
        assert torch.equal(delta(**args), out)
    kept.check()


def check_same_bits(delta: Callable[..., torch.Tensor], case: Case) -> None:
    """Of a prompt at once, in chunks, token by token, and as guesses that hold. case: of one sequence and step."""
    ((total,),) = case.steps
    assert isinstance(total, int)
    kept = Kept(case, torch.bfloat16)
    args, _ = kept.step([total])
    whole = delta(**args)
    for size, guesses in ((1, 0), (7, 0), (16, 0), (30, 0), (5, 4), (20, 19), (9, 3)):
        kept.states.stamps.fill_(total + 1)
        for start in range(0, total, size):
            end = min(total, start + size)
            own = {name: args[name][start:end].clone() for name in ("projected", "gates")}
            if (more := args.get("by_channel")) is not None:
                own["by_channel"] = more._replace(rates=more.rates[start:end].clone(), z=more.z[start:end].clone())
            own |= {"kv_lens": torch.tensor([end]).int(), "known_lens": torch.tensor([max(start + 1, end - guesses)]).int(),
                    "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            assert torch.equal(delta(**(args | own)), whole[start:end])
