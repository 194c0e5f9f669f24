"""Attention to what an encoder has made, in the GPU's engine on emulated kernels: texts that are read, sounds, and images that
are looked at. What they give on a CPU is held against transformers in tests of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import barts
import moonshines
import reading
from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from emulation.late import LateDevice
from engines import greedy, run
from listening import EN, START, TRANSCRIBE, UNTIMED, a_window, prompt_of, whisper_folder
from nanovllm_cli.attention import warping
from nanovllm_cli.attention.cuda_views import behind_leads
from nanovllm_cli.attention.encoded import behind_each, looked_at
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine import aligning
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import TokenIds
from test_cuda_engine import engine_on
from test_word_times import HEADS, aligned, asked

pytestmark = needs_emulation
SIZE = 16
BEGINS = [START, EN, TRANSCRIBE, UNTIMED]
BF16 = torch.bfloat16


class Model(NamedTuple):
    """prompts: for an engine; the fourth of those that look at images has none."""

    folder: Path
    prompts: Callable[[Engine], list[Any]]

def hearing_of(engine: Engine) -> HearingSpec:
    worker = engine._executor
    assert isinstance(worker, Worker)
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    return worker.sight.senses.hearing


def sounds(engine: Engine) -> list[TokenIds]:
    texts = (BEGINS, [*BEGINS, 7, 8], [*range(40, 60), *BEGINS])
    return [prompt_of(hearing_of(engine), a_window(seed), text) for seed, text in enumerate(texts)]


def waves(engine: Engine) -> list[TokenIds]:
    spec = hearing_of(engine)
    asked = [(900, [256]), (7000, [256, 7, 8]), (16_000, [256, *range(40, 60)])]
    return [moonshines.prompt_of(spec, moonshines.a_wave(each, seed), text) for seed, (each, text) in enumerate(asked)]


def made(kind: str, folder: Path) -> Model:
    match kind:
        case "whisper":
            return Model(whisper_folder(folder, dtype=BF16), sounds)
        case "moonshine":
            return Model(moonshines.moonshine_folder(folder, dtype=BF16), waves)
        case "mllama":
            # Which takes more packages than a machine with a GPU may have.
            from test_mllama import IMAGE, Made, an_image

            llama = Made(folder)
            llama.model.to(BF16).save_pretrained(folder)
            small, large = an_image(1, 1), an_image(2, 2)
            asked = [([IMAGE, 5, 6, 7], [small]), ([5, 6, IMAGE, 8, IMAGE, 9], [small, large]),
                     ([IMAGE, IMAGE, *range(20, 50)], [large, small]), ([5, 6, 7], [])]  # fmt: skip
            prompts = [llama.prompt(*each) for each in asked]
            return Model(folder, lambda engine: prompts)
        case "bart":
            folder, source = barts.bart_folder(folder, "bart", BF16), barts.a_source
        case _:
            folder, source = reading.t5_folder(folder, kind, BF16), reading.a_source
    return Model(folder, lambda engine: [list(source(count, count)) for count in (1, 5, 16, 40)])


@pytest.fixture(scope="module", params=["t5", "bart", "whisper", "mllama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("transformers")
    return made(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine computes the halves of one that does, and nobody would see it."""
    yield
    assert not [each.message for each in caplog.get_records("call") if each.name.endswith("stepper")]


def answers(model: Model, device: EmulatedDevice | None, which: slice = slice(None), **settings: Any) -> list[Any]:
    """Tokens and log-probabilities."""
    engine = engine_on(model.folder, device, **{"max_num_batched_tokens": 64} | settings)
    outputs = run(engine, [(prompt, greedy(5, logprobs=0)) for prompt in model.prompts(engine)[which]])
    return [(each.outputs[0].token_ids, [step.logprob for step in each.outputs[0].logprobs or ()]) for each in outputs]


def check_near(found: list[Any], wanted: list[Any]) -> None:
    """That answers are the same as far as no two tokens were as likely, behind which follows another text."""
    same = 0
    for mine, theirs in zip(found, wanted, strict=True):
        for token, likelihood, their_token, their_likelihood in zip(*mine, *theirs, strict=True):
            assert likelihood == pytest.approx(their_likelihood, abs=0.1)
            if token != their_token:
                break
            same += 1
    assert same >= 0.7 * 5 * len(found)


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_tokens_and_likelihoods_are_those_of_the_cpu(model: Model, cache: Any) -> None:
    """Recorded, of sequences together that see different things; and nobody waits for the compiler."""
    device = EmulatedDevice()
    check_near(*(answers(model, where, kv_cache_dtype=cache) for where in (device, None)))
    assert {kernel.stem for kernel in device.launcher.launched - device.launcher.rehearsed} <= {"blocks"}


def test_sounds_of_any_length_are_as_on_the_cpu(tmp_path: Path) -> None:
    model = made("moonshine", tmp_path)
    device = EmulatedDevice()
    check_near(*(answers(model, where) for where in (device, None)))
    assert device.graphs, "such steps are recorded, too"


def test_steps_of_whoever_sees_something_are_recorded(model: Model) -> None:
    """And of whoever sees nothing."""
    for which in (slice(0, 3), slice(3, None)):
        device = EmulatedDevice()
        assert bool(answers(model, device, which)) == bool(device.graphs)


def test_a_layer_of_a_t5_has_eight_launches(tmp_path: Path) -> None:
    """Two for each attention's matrices and one for itself, and two for the MLP; norms and sums are within."""
    device = EmulatedDevice()
    answers(made("t5", tmp_path), device)
    assert min(len(graph.launches) for graph in device.graphs) <= 8 * 3 + 9


def test_a_deterministic_gpu_gives_the_same_to_the_bit(model: Model) -> None:
    """Each alone; together, in small steps, twice, so that prefixes are found; with guesses; with few blocks."""
    device = EmulatedDevice()
    together = answers(model, device, deterministic=True)
    alone = [answers(model, EmulatedDevice(), slice(i, i + 1), deterministic=True)[0] for i in range(len(together))]
    assert alone == together
    for more in ({"max_num_batched_tokens": 17, "num_speculative_tokens": 2}, {"num_blocks": 14, "eager": True}):
        assert answers(model, EmulatedDevice(), deterministic=True, **more) == together


def test_nothing_is_read_before_it_is_there(tmp_path: Path) -> None:
    """On a device that does all as late as it may, but for towers, which are torch's."""
    model = made("t5", tmp_path)
    with LateDevice() as device:
        assert answers(model, device) == answers(model, EmulatedDevice())


def test_times_of_words_go_by_what_the_cpu_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys of the heads that tell them."""
    folder = whisper_folder(tmp_path, dtype=BF16)
    measured: list[tuple[np.ndarray, np.ndarray]] = []

    def weights_of(heads: list[tuple[np.ndarray, np.ndarray]], scale: float, rows: int) -> np.ndarray:
        measured.extend(heads)
        return warping.weights_of(heads, scale, rows)

    monkeypatch.setattr(aligning, "weights_of", weights_of)
    ways = (None, "auto"), (EmulatedDevice(), "auto"), (EmulatedDevice(), "fp8"), (EmulatedDevice(), "int8")
    for device, cache in ways:
        engine = engine_on(folder, device, kv_cache_dtype=cache)
        assert [len(rows) for rows in aligned(engine, [asked(hearing_of(engine), 1, [65, 66, 67])])] == [4]
    expected, *others = (measured[i : i + len(HEADS)] for i in range(0, len(measured), len(HEADS)))
    for found, near in zip(others, (0.03, 0.2, 0.04), strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            for side, its in zip(mine, theirs, strict=True):
                assert np.abs(side - its).max() <= near * np.abs(its).max()


def test_a_step_is_seen_on_the_device_as_on_the_host() -> None:
    """Tables and lengths, of decodes some of which are padding."""
    generator = torch.Generator().manual_seed(0)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    for count in (1, 3, 8):
        tables = torch.stack([torch.randperm(64, generator=generator)[:12].int() for _ in range(count)])
        leads = numbers(1, 6, count)
        first = torch.tensor([int(numbers(0, int(lead), 1)) for lead in leads], dtype=torch.int32)
        seen = torch.stack([first * SIZE, (leads - first) * SIZE - numbers(0, SIZE, count)], dim=1).int()
        lens = leads * SIZE + numbers(1, 5 * SIZE, count)
        batch = batch_of(tables, lens, leads * SIZE, seen)
        text, there = behind_leads(Emulator(), padded(batch), SIZE)
        own, looked = behind_each(batch, SIZE), looked_at(batch, torch.arange(count), SIZE)
        for found, wanted in ((text.block_tables, own.block_tables), (there.block_tables, looked.block_tables)):
            for mine, theirs, length in zip(found, wanted, (own if wanted is own.block_tables else looked).kv_lens, strict=False):
                assert torch.equal(mine[: -(-length // SIZE)], theirs[: -(-length // SIZE)])
        assert torch.equal(text.kv_lens[:count], own.kv_lens)
        assert torch.equal(text.known_lens[:count], own.known_lens)
        assert torch.equal(there.kv_lens[:count], looked.kv_lens)
        assert not text.kv_lens[count:].any()
        assert not there.kv_lens[count:].any()


def batch_of(tables: torch.Tensor, lens: torch.Tensor, leads: torch.Tensor, looks: torch.Tensor) -> Batch:
    places, count = (lens - 1).long(), len(lens)
    return Batch(
        token_ids=places, positions=places, rope_lens=places, query_starts=torch.arange(count + 1, dtype=torch.int32),
        kv_lens=lens, known_lens=lens, slots=places, block_tables=tables, logit_rows=torch.arange(count),
        states=torch.zeros(count, dtype=torch.int32), looks=looks, leads=leads,
    )  # fmt: skip


def padded(batch: Batch) -> Batch:
    """With two rows of padding, which see what somebody saw before. One has a table, of blocks that nobody has: of a step with
    guesses there are fewer tables than rows."""
    assert batch.looks is not None
    assert batch.leads is not None
    none = torch.zeros(2, dtype=torch.int32)
    return batch_of(
        torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], 1 << 30)]),
        torch.cat([batch.kv_lens, none]), torch.cat([batch.leads, none]), torch.cat([batch.looks, torch.full((2, 2), 16).int()]),
    )  # fmt: skip
