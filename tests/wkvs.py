"""Steps of RWKV-7's time mixing on states of sequences, and formulas of it, for the kernels' tests."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from deltas import GUESSED, MAX_GUESSES, Chunks, Share
from emulation.compare import close_to_rounding, random
from nanovllm_cli.kernels import wkv, wkv_rules
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.states import States
from nanovllm_cli.kernels.token_shift import token_shift
from nanovllm_cli.kernels.wkv import CHANNEL, TIME, WkvInputs
from nanovllm_cli.kernels.wkv7 import wkv7

EPS = 64e-5
NAMES = ("r", "k", "v", "gates", "decays", "rates", "mixes", "first")
FP32 = {"decays", "rates", "mixes"}


class Case(NamedTuple):
    """Heads, their numbers, and what each step has of each sequence; is_first: the first layer."""

    heads: int
    dim: int
    steps: Chunks
    is_first: bool = False


CASES = [
    Case(1, 64, [[5, 37, 1], *[[1, 1, 1]] * 20]),
    Case(3, 24, [[3, 2, 31, 1], [1, 1, 1, 1], [2, 1, 0, 1]], is_first=True),
    Case(2, 17, [[70], [64], [1]]),
    Case(1, 80, [[0, 20], [3, 1], [1, 1]]),
    Case(2, 64, GUESSED),
    Case(2, 31, GUESSED),
]


class Kept:
    """States that lie anywhere, behind NaN and the stamps of others: what is read before it was written shows. launcher: of a
    GPU's kernels; None: the CPU's."""

    def __init__(self, case: Case, dtype: torch.dtype, launcher: Launcher | None = None) -> None:
        self.shift = wkv.token_shift if launcher is None else partial(token_shift, launcher)
        self.rule = wkv.wkv7 if launcher is None else partial(wkv7, launcher)
        self.case, self.dtype = case, dtype
        self.lens = [0] * len(case.steps[0])
        num_states, heads, dim = len(self.lens) + 2, case.heads, case.dim
        self.channels = heads * dim
        self.state_of = torch.randperm(num_states)[: len(self.lens)].int()
        self.states = States(
            torch.full((num_states, 2, heads, dim, dim), torch.nan),
            torch.full((num_states, 2, 1, 2 * self.channels), torch.nan, dtype=dtype),
            torch.full((num_states, 2, MAX_GUESSES, 2 * self.channels), torch.nan, dtype=dtype),
            torch.full((num_states, 2, MAX_GUESSES, 5 * self.channels), torch.nan),
            torch.randint(8, 11, (num_states, 2, heads), dtype=torch.int32),
            torch.randint(1, 60, (num_states, 2, heads), dtype=torch.int32),
        )
        self.shares = torch.rand(6, self.channels)
        self.tables = random(8, self.channels)
        zeros = torch.zeros(self.channels, dtype=torch.float64)
        self.past = [{0: (zeros, zeros, torch.zeros(heads, dim, dim, dtype=torch.float64))} for _ in self.lens]
        """Of each sequence, behind so many tokens: the rows that both mixings read last, and the state in float64."""

    def run(self, x: torch.Tensor, y: torch.Tensor, inputs: WkvInputs, **step: torch.Tensor) -> list[torch.Tensor]:
        """By all three kernels of a layer."""
        return [
            self.shift(x, self.shares, TIME, self.states, **step),
            self.rule(inputs, self.tables, EPS, self.states, **step),
            self.shift(y, self.shares[:1].contiguous(), CHANNEL, self.states, **step),
        ]

    def step(self, chunks: list[int | Share]) -> tuple[dict[str, Any], list[tuple[int, slice]]]:
        """Arguments of a step; and of each sequence of it how many of its rows are followed by the next, as guesses are not."""
        shares = {i: chunk if isinstance(chunk, Share) else Share(chunk) for i, chunk in enumerate(chunks) if chunk != 0}
        counts = [share.known + share.guesses for share in shares.values()]
        total = sum(counts)
        rows = {name: random(total, self.channels, dtype=torch.float32 if name in FP32 else self.dtype) for name in NAMES}
        if self.case.is_first:
            rows |= {"mixes": None, "first": None}
        args: dict[str, Any] = {
            "x": random(total, self.channels, dtype=self.dtype), "y": random(total, self.channels, dtype=self.dtype),
            "inputs": WkvInputs(**rows), "query_starts": torch.tensor([0, *counts]).cumsum(0).int(),
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
        lengths = [self.lens[i] + share.known + share.guesses for i, share in shares.items()]
        args["kv_lens"], args["known_lens"] = torch.tensor(lengths).int(), torch.tensor(known_lens).int()
        return args, runs

    def check(self, args: dict[str, Any], runs: list[tuple[int, slice]], found: list[torch.Tensor]) -> None:
        """What a step gave, by the formulas in float64."""
        for i, rows in runs:
            last_x, last_y, state = self.past[i][self.lens[i]]
            x, y = (args[name][rows].double() for name in ("x", "y"))
            close_to_rounding(found[0][:, rows], wkv_rules.token_shift(x, last_x, self.shares.double()))
            close_to_rounding(found[2][:, rows], wkv_rules.token_shift(y, last_y, self.shares[:1].double()))
            of_rows = [None if each is None else each[rows].double() for each in args["inputs"]]
            expected, state = float64_rule(*of_rows, self.tables.double(), state)  # type: ignore[arg-type]
            close_to_rounding(found[1][rows], expected)
            self.lens[i] += len(x)
            self.past[i][self.lens[i]] = x[-1], y[-1], state


def float64_rule(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, decays: torch.Tensor, rates: torch.Tensor,
    mixes: torch.Tensor | None, first: torch.Tensor | None, tables: torch.Tensor, state: torch.Tensor,
    eps: float = EPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the paper writes it (arXiv 2503.14456, section 4): states [V, D, D] of values by keys there, token by token,
    S = S (diag(w) - n^T (a * n)) + v^T k, out = S r^T. Nothing of it is the package's."""
    w0, a0, v0, k_k, k_a, r_k, gain, bias = tables
    heads, dim = state.shape[:2]
    w = (-torch.sigmoid(decays + w0) * 0.606531).exp()
    a = torch.sigmoid(rates + a0)
    if mixes is not None:
        assert first is not None
        v = torch.lerp(v, first, torch.sigmoid(mixes + v0))
    removed = torch.nn.functional.normalize((k * k_k).view(-1, heads, dim), dim=-1)
    k = k * torch.lerp(torch.ones_like(a), a, k_a)
    out = torch.empty_like(v)
    state = state.transpose(1, 2).clone()
    for t in range(len(r)):
        for h in range(heads):
            own = slice(h * dim, (h + 1) * dim)
            n, at = removed[t, h], a[t, own]
            state[h] = state[h] @ (torch.diag(w[t, own]) - torch.outer(n, at * n)) + torch.outer(v[t, own], k[t, own])
            out[t, own] = state[h] @ r[t, own]
    normed = torch.nn.functional.group_norm(out, heads, gain, bias, eps)
    bonus = (r * k * r_k).view(-1, heads, dim).sum(-1, keepdim=True) * v.view(-1, heads, dim)
    return (normed + bonus.flatten(1)) * gates, state.transpose(1, 2)


def check(case: Case, dtype: torch.dtype, launcher: Launcher | None = None) -> None:
    """All steps of a case, each of them twice as a step that failed is."""
    kept = Kept(case, dtype, launcher)
    for chunks in case.steps:
        args, runs = kept.step(chunks)
        found = [each.clone() for each in kept.run(**args)]
        assert all(torch.equal(one, other) for one, other in zip(kept.run(**args), found, strict=True))
        kept.check(args, runs, found)


def check_same_bits(heads: int, dim: int, total: int, launcher: Launcher | None = None) -> None:
    """Of a prompt at once, in chunks, token by token, and as guesses that hold."""
    kept = Kept(Case(heads, dim, [[total]]), torch.bfloat16, launcher)
    args, _ = kept.step([total])
    whole = [each.clone() for each in kept.run(**args)]
    for size, guesses in ((1, 0), (7, 0), (30, 0), (5, 4), (20, 19), (9, 3)):
        kept.states.stamps.fill_(total + 1)
        for start in range(0, total, size):
            end = min(total, start + size)
            own = {name: args[name][start:end].clone() for name in ("x", "y")}
            own["inputs"] = WkvInputs(*(None if each is None else each[start:end].clone() for each in args["inputs"]))
            own |= {"kv_lens": torch.tensor([end]).int(), "known_lens": torch.tensor([max(start + 1, end - guesses)]).int(),
                    "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            found = kept.run(**(args | own))
            for one, of_all in zip(found, whole, strict=True):
                assert torch.equal(one, of_all[..., start:end, :]), (size, guesses, start)
