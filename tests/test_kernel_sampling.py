"""logits_adjust.cu, sampling.cu and logprobs.cu, emulated, against the CPU's sampler and against formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.constraint import ReasoningPhase
from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sampling_random import DRAW_TOKEN, philox_uniforms
from nanovllm_cli.kernels import sampling_table
from nanovllm_cli.kernels.sampling import sample
from nanovllm_cli.kernels.sampling_table import FINE, NOT_FINITE, NOTHING_LEFT, SamplingBuffers, SamplingTable, Slices
from nanovllm_cli.sampling_params import SamplingParams
from sampler_reference import adjusted_row

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


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_the_cpu_samplers_in_a_large_vocabulary(order: int) -> None:
    """Flat rows, whose nuclei are larger than a list, and peaked ones."""
    both = Both(32_000, [*mixes(8, seed=1), SamplingParams(top_p=0.9), SamplingParams(top_k=5000, top_p=0.8)])
    logits = normal(10, 32_000) * torch.tensor([[0.1], [3.0]]).repeat(5, 1)
    assert both.kernels(logits, Emulator(order)).tolist() == tokens(both.cpu(logits))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [513, 4096])
def test_equal_logits_are_cut_by_id(vocab: int, order: int) -> None:
    """A few values only, banned tokens among them, and rows of one value, of which a list holds less than half."""
    params = [*mixes(10, seed=2), SamplingParams(top_k=3), SamplingParams(top_p=0.3), SamplingParams(top_k=2500, top_p=0.7)]
    both = Both(vocab, params)
    logits = torch.randint(-4, 4, (13, vocab), generator=torch.Generator().manual_seed(4)).float()
    logits[5:8, 1:] = logits[5:8, 1:].masked_fill(normal(3, vocab - 1) > 0, -math.inf)
    logits[10:] = 1.25
    logits[3] *= 0.0  # zeros of both signs are equal
    assert both.kernels(logits, Emulator(order)).tolist() == tokens(both.cpu(logits))


def test_different_logits_with_equal_gaps_are_cut_by_logit_for_top_k_and_by_id_for_top_p() -> None:
    """Divided by 3, neighbouring numbers round to the same: the better logit has the larger id here."""
    below = np.nextafter(np.float32(4.0), np.float32(0), dtype=np.float32)
    lower = np.nextafter(below, np.float32(0), dtype=np.float32)
    vocab = 64
    params = [SamplingParams(temperature=3.0, top_k=k, top_p=p) for k in (0, 2, 3, 4, 30) for p in (0.1, 0.4, 0.7, 1.0)]
    logits = torch.full((len(params), vocab), -1.0)
    logits[:, 7] = 9.0
    logits[:, 10:40] = torch.from_numpy(np.resize(np.array([lower, below, 4.0], np.float32), 30))
    both = Both(vocab, params)
    for _ in range(3):
        assert both.kernels(logits, Emulator()).tolist() == tokens(both.cpu(logits))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [513, 4096])
def test_greedy_rows_take_the_lowest_id_of_the_largest(vocab: int, order: int) -> None:
    both = Both(vocab, [GREEDY] * 6)
    logits = normal(6, vocab)
    logits[0, [vocab - 1, 17, 300]] = 50.0
    logits[1] = -3.5
    logits[2] = -math.inf
    logits[2, vocab - 2] = -1e30
    logits[3] = -0.0
    logits[3, 400:] = 0.0
    for slices in (None, Slices(1, -(-vocab // 128) * 128, 1), Slices(-(-vocab // 128), 128, 32)):
        assert both.kernels(logits, Emulator(order), slices).tolist() == logits.double().argmax(1).tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.9, logprobs=2)], ids=["greedy", "random"])
def test_rows_that_cannot_be_drawn_from_say_why_and_leave_the_others_alone(params: SamplingParams, order: int) -> None:
    vocab = 513
    banned = SamplingParams(temperature=0.0, allowed_token_ids=(7, 9))
    both = Both(vocab, [params, params, params, banned, params, banned], padding=1)
    logits = normal(7, vocab)
    logits[0, 300], logits[1, 512], logits[2], logits[3, 100] = math.nan, math.inf, -math.inf, math.nan
    logits[5, [7, 9]] = -math.inf
    got = both.kernels(logits, Emulator(order))
    assert both.buffers.status.tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT, NOT_FINITE, FINE, NOTHING_LEFT, FINE]
    drawn = both.cpu(logits)
    reasons = [entry.error and entry.error.split(":")[0] for entry in drawn]
    finite, left = "the model's logits are not finite", "no token is left to draw"
    assert reasons == [finite, finite, left, finite, None, left]
    assert got.tolist() == [0, 0, 0, 0, drawn[4].token_ids[0], 0, 0]
    moved = both.table.positions[torch.tensor(both.slots)]
    assert moved.tolist() == [0, 0, 0, 0, 1, 0]


# ---- adjustments ----


def adjusting(count: int, seed: int) -> list[SamplingParams]:
    """Every adjustment, alone and together, greedy and not."""
    random = np.random.default_rng(seed)

    def some(value: object, off: object) -> object:
        return value if random.random() < 0.5 else off

    return [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.8])),
            top_k=int(random.choice([0, 20])),
            repetition_penalty=some(float(random.choice([0.5, 1.3, 2.0])), 1.0),  # type: ignore[arg-type]
            presence_penalty=some(float(random.normal()) % 2, 0.0),  # type: ignore[arg-type]
            frequency_penalty=some(float(random.normal()) % 2, 0.0),  # type: ignore[arg-type]
            logit_bias=some({int(i): float(random.normal() * 5) for i in random.integers(0, 513, 30)}, None),  # type: ignore[arg-type]
            allowed_token_ids=some(tuple(random.integers(0, 513, 200).tolist()), None),  # type: ignore[arg-type]
            min_tokens=int(random.integers(0, 4)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [513, 1024])
def test_adjusted_logits_are_the_cpus_bit_for_bit_while_the_answer_grows(vocab: int, order: int) -> None:
    """Few tokens are likely, so that penalties meet what was drawn. The kernels keep positions and counts by themselves."""
    params = adjusting(16, seed=vocab)
    both = Both(vocab, params)
    emulator = Emulator(order)
    for step in range(5):
        logits = normal(16, vocab, seed=step)
        logits[:, :12] += 9.0
        states = [both.sampler._states[i] for i in range(16)]
        expected = logits.clone()
        for row, state in zip(expected.numpy(), states, strict=True):
            row[:] = adjusted_row(row, state)
        wanted = tokens(both.cpu(logits))
        assert both.kernels(logits, emulator).tolist() == wanted
        changed = [i for i in range(16) if not torch.equal(expected[i], logits[i])]
        assert len(changed) > 8
        assert torch.equal(both.buffers.adjusted[changed], expected[changed])
    counts = both.table.counts[torch.tensor(both.slots)].long()
    for i, state in enumerate(states):
        output = np.bincount(state.output_ids, minlength=vocab)
        assert counts[i].tolist() == (output.tolist() if params[i].has_penalties else [0] * vocab)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [513, 1024])
def test_a_mask_bans_what_it_leaves_out(vocab: int, order: int) -> None:
    """With filters, edits and greedily; rows 1 to 4 of 6, as of a batch whose other rows draw freely."""
    params = [GREEDY, SamplingParams(top_p=0.8), SamplingParams(top_k=9, logit_bias={5: 9.0, 6: 9.0}), SamplingParams()]
    guided = {"reasoning": ReasoningPhase("<think>", "</think>", budget=9)}
    both = Both(vocab, [SamplingParams(), *params, SamplingParams()])
    masks = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32)), generator=torch.Generator().manual_seed(1)).int()
    for row, (each, slot) in enumerate(zip(params, both.slots[1:5], strict=True), start=1):
        sequence = new(row, each, vocab)
        both.table.write(slot, replace(each, **guided), sequence.seed, STOPS, sequence.prompt_ids)
    slots = torch.tensor(both.slots[1:5], dtype=torch.int32)
    both.table.put_masks(slots, masks)
    logits = normal(6, vocab)
    expected = tokens(both.cpu(logits, [None, *masks, None]))
    both.buffers.token_ids.fill_(-7)
    sample(Emulator(order), logits[1:5], both.table, both.buffers.part(1, slots))
    assert both.buffers.token_ids.tolist() == [-7, *expected[1:5], -7]
    assert both.buffers.status.tolist() == [FINE] * 6


def test_a_slot_can_be_written_in_the_middle_of_an_answer() -> None:
    vocab = 513
    params = adjusting(6, seed=9)
    both = Both(vocab, params)
    for step in range(3):
        tokens(both.cpu(normal(6, vocab, seed=step)))
    for i, each in enumerate(params):
        state, sequence = both.sampler._states[i], new(i, each, vocab)
        both.table.write(both.slots[i], each, sequence.seed, STOPS, sequence.prompt_ids, state.output_ids)
    logits = normal(6, vocab, seed=3)
    assert both.kernels(logits, Emulator()).tolist() == tokens(both.cpu(logits))


def test_counts_end_at_the_largest_that_they_hold() -> None:
    table, buffers = SamplingTable(CPU, 1, 64), SamplingBuffers(CPU, 1, 64)
    table.write(0, SamplingParams(temperature=0.0, frequency_penalty=1e-9), 0, (), (), [5] * 65535)
    buffers.rows[0] = 0
    logits = torch.zeros(1, 64)
    logits[0, 5] = 9.0
    sample(Emulator(), logits, table, buffers)
    assert buffers.token_ids.tolist() == [5]
    assert table.counts[0, 5] == -1  # 65535 without its sign
    assert table.positions.tolist() == [65536]


# ---- random numbers ----


@pytest.mark.parametrize("position", [0, 1, 12_345, 2**32 - 1, 2**32, 2**40 + 3])
def test_the_random_numbers_are_the_cpus(position: int) -> None:
    """Of 2**18 equal tokens, the number's first 18 bits are the one drawn; and at many seeds, the word behind them is too."""
    vocab = 2**18
    seeds = [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF]
    table, buffers = SamplingTable(CPU, len(seeds), vocab), SamplingBuffers(CPU, len(seeds), vocab)
    buffers.rows[:] = torch.arange(len(seeds))
    for slot, seed in enumerate(seeds):
        table.write(slot, SamplingParams(), seed, (), ())
    table.positions.fill_(position)
    sample(Emulator(), torch.zeros(len(seeds), vocab), table, buffers, has_logprobs=False)
    expected = philox_uniforms(seeds, [position] * len(seeds), DRAW_TOKEN) * vocab
    assert buffers.token_ids.tolist() == expected.astype(np.int64).tolist()


def test_weights_of_more_tokens_than_a_word_counts_add_up() -> None:
    """Gemma 3's 262,208, all of the same weight, and with one token that weighs as much as all others."""
    vocab, seeds = 262_208, list(range(6))
    logits = torch.zeros(len(seeds), vocab)
    logits[3:, -1] = math.log(vocab)
    table, buffers = SamplingTable(CPU, len(seeds), vocab), SamplingBuffers(CPU, len(seeds), vocab)
    buffers.rows[:] = torch.arange(len(seeds))
    for slot, seed in enumerate(seeds):
        table.write(slot, SamplingParams(top_p=0.9), seed, (), ())
    sample(Emulator(), logits, table, buffers, has_logprobs=False)
    uniforms = philox_uniforms(seeds, [0] * len(seeds), DRAW_TOKEN)
    assert buffers.token_ids[:3].tolist() == (uniforms[:3] * math.ceil(0.9 * vocab)).astype(np.int64).tolist()
    kept = math.ceil(0.8 * vocab)  # beside the last token, half of all
    places = uniforms[3:] * (kept + vocab)
    assert buffers.token_ids[3:].tolist() == [vocab - 1 if place >= kept else int(place) for place in places]


# ---- log-probabilities ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("vocab", "scale"), [(513, 3.0), (4096, 1.0), (4096, 20.0), (1024, 0.0), (4096, 0.0), (3, 1.0)])
def test_logprobs_are_those_of_float64(vocab: int, scale: float, order: int) -> None:
    """Of the model's own logits, also where the draw is from others; a row of equal logits overflows the list."""
    bias = {2: 60.0}
    params = [
        SamplingParams(logprobs=5),
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0.5, top_p=0.7),
        SamplingParams(logit_bias=bias, logprobs=20),
        SamplingParams(temperature=0.0, logit_bias=bias, logprobs=1),
    ]
    both = Both(vocab, params)
    logits = normal(6, vocab, scale=scale)
    logits[0, 1::2] = -math.inf
    logits[1, 2:-1] = -math.inf
    both.buffers.ranks.fill_(-5)
    got = both.kernels(logits, Emulator(order)).tolist()
    expected = torch.log_softmax(logits.double(), dim=1).numpy()
    for i, each in enumerate(params):
        if each.logprobs is None:
            assert both.buffers.ranks[i] == -5
            continue
        ranked = np.lexsort((np.arange(vocab), -logits[i].double().numpy()))
        assert both.buffers.ranks[i] == 1 + ranked.tolist().index(got[i])
        assert float(both.buffers.values[i]) == pytest.approx(expected[i, got[i]], rel=1e-5, abs=1e-6)
        top = [token for token in ranked[: each.logprobs].tolist() if expected[i, token] > -math.inf]
        padding = each.logprobs - len(top)
        assert both.buffers.top_ids[i, : each.logprobs].tolist() == top + [-1] * padding
        values = both.buffers.top_values[i, : each.logprobs].tolist()
        assert values == pytest.approx([*expected[i, top], *[-math.inf] * padding], rel=1e-5, abs=1e-6)


# ---- what results do not depend on ----


def test_results_depend_neither_on_the_batch_nor_on_the_blocks_of_a_row() -> None:
    vocab = 4096
    params = [*mixes(8, seed=5, logprobs=20), *adjusting(4, seed=1)]
    logits = normal(12, vocab, scale=2.0)
    seen, reports = [], ("values", "ranks", "top_ids", "top_values")
    for slices in (Slices(1, 4096, 1), Slices(2, 2048, 1), Slices(9, 512, 4), Slices(32, 128, 32), Slices(8, 512, 2)):
        both = Both(vocab, params)
        got = both.kernels(logits, Emulator(7), slices)
        seen.append([got, *(getattr(both.buffers, name)[:8].view(torch.int32) for name in reports)])
    both, alone = Both(vocab, params), []
    for i in range(12):
        buffers = SamplingBuffers(CPU, 1, vocab)
        buffers.rows[0] = both.slots[i]
        sample(Emulator(), logits[i : i + 1], both.table, buffers)
        alone.append([buffers.token_ids, *(getattr(buffers, name).view(torch.int32) for name in reports)])
    seen.append([torch.cat(parts)[: len(whole)] for parts, whole in zip(zip(*alone, strict=True), seen[0], strict=True)])
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


def test_a_replay_finds_its_scratch_as_a_first_launch_does() -> None:
    """Twenty steps through one set of buffers, whose rows change places."""
    vocab = 1000
    both = Both(vocab, [*mixes(6, seed=8, logprobs=3), GREEDY, SamplingParams(top_k=7)])
    for step in range(20):
        logits = normal(8, vocab, seed=step, scale=1.0 + step % 5)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(step))
        both.buffers.rows[:] = torch.tensor(both.slots)[order]
        got = both.kernels(logits[order], Emulator(step))
        assert got[order.argsort()].tolist() == tokens(both.cpu(logits))


def test_greedy_rows_alone_are_one_launch() -> None:
    both = Both(513, [GREEDY] * 2)
    emulator = Emulator()
    sample(emulator, normal(0, 513), both.table, both.buffers)
    assert emulator.launches == {}
    sample(emulator, normal(2, 513), both.table, both.buffers, only_greedy=True, has_logprobs=False)
    assert emulator.launches == {"largest_logits": 1}


@pytest.mark.parametrize("vocab", [1, 513, 32_000, 50_257, 151_936, 2**18, 262_400, 2**22])
@pytest.mark.parametrize("batch", [1, 3, 64, 256])
def test_slices_cover_a_row(vocab: int, batch: int) -> None:
    count, length, lanes = sampling_table.divide(vocab, batch, 132)
    assert 1 <= count <= 128
    assert length % 128 == 0
    assert (count - 1) * length < vocab <= count * length
    assert 1 <= lanes <= 32
    assert count * 512 // lanes <= 2048
    assert batch < 256 or count <= 3


# ---- refusals ----


@pytest.mark.parametrize(
    "bad",
    [
        lambda logits: logits.double(),
        lambda logits: logits[:, :-1],
        lambda logits: logits[:, :-1].contiguous(),
        lambda logits: torch.cat((logits, logits)),
        lambda logits: torch.zeros(2 * 64 + 1)[1:].view(2, 64),
    ],
    ids=["type", "strides", "vocabulary", "batch", "alignment"],
)
def test_what_the_kernels_would_misread_is_refused(bad) -> None:
    both = Both(64, [GREEDY] * 2)
    with pytest.raises(AssertionError):
        sample(Emulator(), bad(normal(2, 64)), both.table, both.buffers)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(typical_p=0.9),
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(xtc_probability=0.5),
        SamplingParams(dry_multiplier=1.0),
        SamplingParams(bad_words=("a",)),
        SamplingParams(no_repeat_ngram_size=2),
        SamplingParams(repetition_penalty=2.0, penalty_last_n=64),
        SamplingParams(logprobs=21),
        SamplingParams(min_tokens=1),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_the_cpu(params: SamplingParams) -> None:
    assert not sampling_table.on_device(params, range(65))
    assert sampling_table.on_device(SamplingParams(logprobs=20, penalty_last_n=64), range(65))
    with pytest.raises(AssertionError):
        SamplingTable(CPU, 1, 100).write(0, params, 0, range(65), ())


# ---- planted bugs ----


def agree(kernel: str, bug: str, order: int, vocab: int, params: Sequence[SamplingParams], logits: torch.Tensor) -> bool:
    """Whether one kernel with a bug, beside the others without, still draws what the CPU draws."""

    class Mixed(Emulator):
        def launch(self, variant, *args) -> None:  # type: ignore[no-untyped-def]
            self.bugs = (bug,) if variant.entry == kernel else ()
            super().launch(variant, *args)

    both = Both(vocab, params)
    wanted = tokens(both.cpu(logits))
    try:
        sample(Mixed(order), logits, both.table, both.buffers, has_logprobs=False, slices=Slices(1, 640, 1))
    except KernelFailed:
        return False
    return both.buffers.token_ids[: both.count].tolist() == wanted


def test_the_tests_see_a_wrong_rule_for_ties() -> None:
    logits = torch.ones(1, 513)
    assert not any(agree("largest_logits", "TIES", order, 513, [GREEDY], logits) for order in ORDERS)


def test_the_tests_see_a_tail_without_a_mask() -> None:
    logits = normal(3, 513)  # the tail of the first row's last block
    logits[1] = 90.0
    assert not all(agree("largest_logits", "TAIL", order, 513, [GREEDY], logits[:1]) for order in ORDERS)


def test_the_tests_see_missing_barriers() -> None:
    biased = SamplingParams(temperature=0.0, logit_bias={100: -5.0, 101: 4.0, 127: 3.0})
    logits = torch.zeros(1, 513)
    logits[0, [100, 127]] = 2.5
    assert not all(agree("largest_logits", "ADJUST_WITHOUT_BARRIER", order, 513, [biased], logits) for order in ORDERS)
    params, logits = mixes(8, seed=3), normal(8, 513)
    assert not all(agree("draw_tokens", "SEARCH_WITHOUT_BARRIER", order, 513, params, logits) for order in ORDERS)
