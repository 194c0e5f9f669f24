"""logits_adjust.cu, sampling.cu and logprobs.cu, emulated, against the CPU's sampler and against formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sampling_random import DRAW_TOKEN, philox_uniforms
from nanovllm_cli.kernels.sampling import sample
from nanovllm_cli.kernels.sampling_table import (
    FINE,
    NOT_FINITE,
    NOTHING_LEFT,
    SamplingBuffers,
    SamplingTable,
    Slices,
    divide,
    on_device,
)
from nanovllm_cli.sampling_params import SamplingParams

pytestmark = needs_emulation
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
STOPS = (3, 5)


def normal(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def new(index: int, params: SamplingParams, vocab: int) -> NewSequence:
    """A sequence with a prompt and a seed of its own."""
    random = np.random.default_rng(index)
    prompt = random.integers(0, vocab, 20).tolist()
    return NewSequence(index, prompt, params, int(random.integers(0, 2**63)), STOPS)


class Both:
    """The same sequences in the kernels' table and in the CPU's sampler. Slots are not in the order of rows."""

    def __init__(self, vocab: int, params: Sequence[SamplingParams], padding: int = 0) -> None:
        self.count = len(params)
        self.sampler = Sampler(vocab)
        self.table = SamplingTable(CPU, self.count, vocab)
        self.buffers = SamplingBuffers(CPU, self.count + padding, vocab)
        self.slots = [(7 * i + 3) % self.count for i in range(self.count)] if self.count % 7 else list(range(self.count))
        self.buffers.rows[: self.count] = torch.tensor(self.slots)
        self.buffers.adjusted.fill_(math.nan)
        for i, each in enumerate(params):
            sequence = new(i, each, vocab)
            self.sampler.add(sequence)
            self.table.write(self.slots[i], each, sequence.seed, sequence.stop_ids, sequence.prompt_ids)

    def kernels(self, logits: torch.Tensor, emulator: Emulator, slices: Slices | None = None) -> torch.Tensor:
        before = logits.clone()
        self.buffers.token_ids.fill_(-7)
        sample(emulator, logits, self.table, self.buffers, slices=slices)
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
        return self.buffers.token_ids[: len(logits)].clone()

    def cpu(self, logits: torch.Tensor, masks: Sequence[torch.Tensor | None] | None = None) -> list[Drawn]:
        return self.sampler.sample(range(self.count), logits[: self.count], masks=masks)


def tokens(drawn: Sequence[Drawn]) -> list[int]:
    assert all(entry.error is None for entry in drawn), drawn
    return [entry.token_ids[0] for entry in drawn]


def mixes(count: int, seed: int, **fixed: object) -> list[SamplingParams]:
    """Random settings of every filter, each off in a third of the cases."""
    random = np.random.default_rng(seed)

    def sometimes(value: float | int, off: float | int) -> float | int:
        return off if random.random() < 0.33 else value

    return [
        SamplingParams(
            temperature=float(random.choice([0.3, 0.7, 1.0, 1.3, 3.0])),
            top_k=int(sometimes(int(random.choice([1, 5, 20, 50, 400, 1000])), 0)),
            top_p=float(sometimes(random.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0)),
            min_p=float(sometimes(random.choice([0.001, 0.02, 0.3, 1.0]), 0.0)),
            **fixed,
        )
        for _ in range(count)
    ]


# ---- tokens ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("vocab", "scale"), [(513, 3.0), (1000, 3.0), (1000, 0.02), (4096, 3.0), (4096, 12.0), (4096, 0.1), (33, 3.0), (1, 1.0)]
)
def test_tokens_are_the_cpu_samplers(vocab: int, scale: float, order: int) -> None:
    both = Both(vocab, mixes(12, seed=vocab))
    logits = normal(12, vocab, seed=vocab, scale=scale)
    assert both.kernels(logits, Emulator(order)).tolist() == tokens(both.cpu(logits))
    assert both.buffers.status.tolist() == [FINE] * 12
