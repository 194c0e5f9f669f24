"""Steps of Mamba's first rule on states of sequences, for the kernels' tests on either device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deltas import GUESSED, MAX_GUESSES, Chunks, Share
from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import scan, state_rules
from nanovllm_cli.kernels.states import States
from nanovllm_cli.state_spec import ScanSpec

Kernels = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
"""Of the convolution, and of the scan."""
ON_CPU: Kernels = (scan.causal_conv, scan.selective_scan)


class Case(NamedTuple):
    """spec, and what each step has of each sequence; bias: of the convolution."""

    spec: ScanSpec
    steps: Chunks
    bias: bool = True


CASES = [
    Case(ScanSpec(128, 16, 5, 4), [[5, 37, 1], *[[1, 1, 1]] * 20]),
    Case(ScanSpec(60, 7, 5, 3), [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 0, 1]], bias=False),
    Case(ScanSpec(31, 16, 5, 2), [[70], [64], [1]]),
    Case(ScanSpec(131, 3, 5, 5), [[0, 20], [3, 1], [1, 1]]),
    Case(ScanSpec(96, 16, 5, 4), GUESSED),
]


class Kept:
    """States that lie anywhere, behind NaN and the stamps of others: what is read before it was written shows."""

    def __init__(self, case: Case, dtype: torch.dtype, kernels: Kernels = ON_CPU) -> None:
        self.case, self.kernels = case, kernels
        spec = case.spec
        self.lens = [0] * len(case.steps[0])
        num_states = len(self.lens) + 2
        self.state_of = torch.randperm(num_states)[: len(self.lens)].int()
        values, size = spec.num_values, spec.key_dim
        self.states = States(
            torch.full((num_states, 2, values, size, spec.value_dim), torch.nan),
            torch.full((num_states, 2, spec.width - 1, spec.channels), torch.nan, dtype=dtype),
            torch.full((num_states, 2, MAX_GUESSES, spec.num_guessed), torch.nan, dtype=dtype),
            torch.full((num_states, 2, MAX_GUESSES, spec.num_gates), torch.nan),
            torch.randint(8, 11, (num_states, 2, values), dtype=torch.int32),  # in GUESSED behind what is known of the first
            torch.randint(1, 60, (num_states, 2, values), dtype=torch.int32),
        )
        self.taps, self.taps_bias = random(spec.width, spec.channels, dtype=dtype), random(spec.channels, dtype=dtype)
        self.decay = -random(spec.channels, size).exp()
        self.by_head = self.decay.view(values, spec.value_dim, size).transpose(1, 2).contiguous()
        self.rate_bias, self.skip = random(spec.channels), random(spec.channels)
        before = torch.zeros(spec.width - 1, spec.channels, dtype=dtype)
        self.past = [{0: (before, torch.zeros(spec.channels, size, dtype=torch.float64))} for _ in self.lens]
        """Of each sequence, behind so many tokens: inputs of the convolution, and the state in float64."""

    def run(self, projected: torch.Tensor, rates: torch.Tensor, both: torch.Tensor, **step: torch.Tensor) -> torch.Tensor:
        """By both kernels. The second reads what the first gave."""
        convolve, advance = self.kernels
        bias = self.taps_bias if self.case.bias else None
        self.mixed = convolve(projected, self.taps, bias, self.states, **step)
        weights = self.by_head, self.rate_bias, self.skip, self.states
        return advance(projected, self.mixed, rates, both, *weights, **step)

    def step(self, chunks: list[int | Share]) -> tuple[dict[str, Any], list[tuple[int, slice]]]:
        """Arguments of a step; and of each sequence of it how many of its rows are followed by the next, as guesses are not."""
        shares = {i: chunk if isinstance(chunk, Share) else Share(chunk) for i, chunk in enumerate(chunks) if chunk != 0}
        counts = [share.known + share.guesses for share in shares.values()]
        total, spec = sum(counts), self.case.spec
        args: dict[str, Any] = {
            "projected": random(total, 2 * spec.channels, dtype=self.taps.dtype), "rates": random(total, spec.channels),
            "both": random(total, 2 * spec.key_dim), "query_starts": torch.tensor([0, *counts]).cumsum(0).int(),
            "state_of": self.state_of[list(shares)],
        }  # fmt: skip
        runs, known_lens, first = [], [], 0
        for i, share in shares.items():
            self.lens[i] -= share.back
            known_lens.append(self.lens[i] + share.known)
            for count in (share.known, *[1] * share.guesses):
                if count:
                    runs.append((i, slice(first, first + count)))
                    first += count
            self.lens[i] += share.known + share.guesses
        args["kv_lens"], args["known_lens"] = torch.tensor([self.lens[i] for i in shares]).int(), torch.tensor(known_lens).int()
        for i, share in shares.items():
            self.lens[i] -= share.known + share.guesses
        return args, runs

    def check(self, args: dict[str, Any], runs: list[tuple[int, slice]], out: torch.Tensor) -> None:
        """What a step gave, by the formulas in float64. The scan's has what the convolution's kernel gave."""
        weights = self.decay.double(), self.rate_bias.double(), self.skip.double()
        bias = self.taps_bias.double() if self.case.bias else None
        for i, rows in runs:
            before, state = self.past[i][self.lens[i]]
            inputs, z = args["projected"][rows].chunk(2, dim=1)
            expected = state_rules.causal_conv(inputs.double(), self.taps.double(), bias, before.double())
            close_to_rounding(self.mixed[rows], expected)
            of_token = (each[rows].double() for each in (self.mixed, args["rates"], args["both"]))
            expected, state = state_rules.selective_scan(*of_token, z.double(), *weights, state)
            close_to_rounding(out[rows], expected)
            self.lens[i] += len(inputs)
            self.past[i][self.lens[i]] = torch.cat([before, inputs])[len(inputs) :], state


def check(case: Case, dtype: torch.dtype, kernels: Kernels = ON_CPU) -> None:
    """All steps of a case, each of them twice as a step that failed is."""
    kept = Kept(case, dtype, kernels)
    for chunks in case.steps:
        args, runs = kept.step(chunks)
        out = kept.run(**args).clone()
        assert torch.equal(kept.run(**args), out)
        kept.check(args, runs, out)


def check_same_bits(channels: int, total: int, kernels: Kernels = ON_CPU) -> None:
    """Of a prompt at once, in chunks, token by token, and as guesses that hold."""
    kept = Kept(Case(ScanSpec(channels, 16, 5, 4), [[total]]), torch.bfloat16, kernels)
    args, _ = kept.step([total])
    whole = kept.run(**args).clone()
    for size, guesses in ((1, 0), (7, 0), (30, 0), (5, 4), (20, 19), (9, 3)):
        kept.states.stamps.fill_(total + 1)
        for start in range(0, total, size):
            end = min(total, start + size)
            own = {name: args[name][start:end].clone() for name in ("projected", "rates", "both")}
            own |= {"kv_lens": torch.tensor([end]).int(), "known_lens": torch.tensor([max(start + 1, end - guesses)]).int(),
                    "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            assert torch.equal(kept.run(**(args | own)), whole[start:end])


def check_repeated(kernels: Kernels = ON_CPU) -> None:
    """The convolution alone leaves nothing that the next step takes for a state, nor one that goes on from before it."""
    kept = Kept(Case(ScanSpec(64, 4, 5, 4), [[9], [5], [1]]), torch.bfloat16, kernels)

    def convolve(args: dict[str, Any]) -> None:
        step = {name: args[name] for name in ("query_starts", "kv_lens", "known_lens", "state_of")}
        kernels[0](args["projected"], kept.taps, kept.taps_bias, kept.states, **step)

    for chunks in kept.case.steps:
        args, runs = kept.step(chunks)
        convolve(args)
        kept.check(args, runs, kept.run(**args))
    convolve(kept.step([1])[0])
    kept.lens = [14]
    assert kept.run(**kept.step([1])[0]).isnan().all()
