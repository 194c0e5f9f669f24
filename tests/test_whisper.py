"""Whisper against transformers, by tiny random models: what its decoder makes of an encoder's rows; and that no bit of it
depends on steps, neighbours, or what was found again."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from listening import (
    EN,
    END,
    ROWS,
    SOUND,
    START,
    TEXT_LEN,
    TIMES,
    TRANSCRIBE,
    UNTIMED,
    VOCAB,
    a_window,
    config_of,
    features,
    prompt_of,
    whisper,
    whisper_folder,
)
from nanovllm_cli.config import LoraModule
from nanovllm_cli.constraint import TranscriptRules
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.whisper import MAX_ROWS, WHISPER
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import Sound, TokenIds

pytest.importorskip("transformers")
BEGINS = [START, EN, TRANSCRIBE, UNTIMED]


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


@pytest.fixture(scope="module")
def spec(worker: Worker) -> HearingSpec:
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    return worker.sight.senses.hearing


@functools.cache
def expected(seed: int, text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities behind each token of a text."""
    with torch.inference_mode():
        found = whisper()(input_features=features(a_window(seed)), decoder_input_ids=torch.tensor([text]))
    logprobs: torch.Tensor = found.logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("begins", [BEGINS, [*BEGINS, *range(5, 30)]], ids=["short", "longer than a tile"])
def test_texts_are_what_transformers_writes(begins: list[int], worker: Worker, spec: HearingSpec) -> None:
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_window(), begins), greedily(20, logprobs=0))])
    ids = list(output.outputs[0].token_ids)
    logprobs = expected(0, (*begins, *ids))[len(begins) - 1 : -1]
    assert ids == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
    (other,) = run(engine_for(worker), [(prompt_of(spec, a_window(9), begins), greedily(20, logprobs=0))])
    assert logprobs_of(other) != logprobs_of(output), "it matters what is heard"


def test_neither_steps_nor_neighbours_change_a_bit(worker: Worker, spec: HearingSpec) -> None:
    """Alone, cut anywhere, beside others, recorded or not, behind a found prefix, and computed again after a preemption."""
    asked = [(0, BEGINS), (0, [*BEGINS, 7, 8, 9]), (3, BEGINS), (4, [*range(40, 60), *BEGINS])]
    requests = [(prompt_of(spec, a_window(seed), begins), greedily(20, logprobs=0)) for seed, begins in asked]
    num_blocks = sum(-(-len(prompt) // 16) for prompt, _ in requests) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


def test_the_same_sound_is_encoded_once(worker: Worker, spec: HearingSpec) -> None:
    sight = worker.sight
    assert sight is not None
    engine, before = engine_for(worker), sight.num_computed
    window = a_window(11)
    for begins in ([START], BEGINS, [*BEGINS, 5]):
        run(engine, [(prompt_of(spec, window, begins), greedily(2))])
    assert sight.num_computed - before == 1
    lead = spec.placed(window, 0).num_tokens
    assert engine.stats().prefix_hit_tokens == 2 * lead, "the encoder's rows; a text here has no full block"
    run(engine, [(prompt_of(spec, a_window(12), BEGINS), greedily(2))])
    assert engine.stats().prefix_hit_tokens == 2 * lead, "what is cached is of that sound alone"


def test_several_answers_share_a_sound(worker: Worker, spec: HearingSpec) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_window(), BEGINS), params)])
    assert len({each.token_ids for each in output.outputs}) > 1
    for i, answer in enumerate(output.outputs):
        assert (answer.index, answer.error, len(answer.token_ids)) == (i, None, 12)
    (first,) = run(engine_for(worker), [(prompt_of(spec, a_window(), BEGINS), dataclasses.replace(params, n=1))])
    assert first.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "fp8")])
def test_other_types_are_near(dtype: str, cache: str, folder: Path) -> None:
    worker = worker_for(folder, dtype=dtype, num_blocks=32, kv_cache_dtype=cache)
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    text = [*BEGINS, *range(60, 70)]
    prompt = prompt_of(worker.sight.senses.hearing, a_window(), text)
    (output,) = run(engine_for(worker), [(prompt, greedily(1, logprobs=20))])
    top = dict(output.outputs[0].logprobs[0].top)  # type: ignore[index]
    truth = expected(0, tuple(text))[-1]
    assert max(abs(truth[token].item() - logprob) for token, logprob in top.items()) < 0.4


def test_guesses_change_no_token(worker: Worker, folder: Path, spec: HearingSpec) -> None:
    requests = [(prompt_of(spec, a_window(seed), BEGINS), greedily(30)) for seed in (0, 5)]
    plain = run(engine_for(worker), requests)
    guessing = worker_for(folder, dtype="float32", num_blocks=64, num_speculative_tokens=3)
    engine = engine_for(guessing, num_speculative_tokens=3)
    found = run(engine, requests)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.num_held_tokens for each in found) > 0


def test_requests_choose_adapters_of_what_is_kept_of_a_sound(folder: Path, spec: HearingSpec, tmp_path: Path) -> None:
    """Beside others who choose none."""
    weight = whisper().model.decoder.layers[0].encoder_attn.k_proj.weight
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, weight.shape[1], generator=generator), torch.randn(weight.shape[0], 2, generator=generator)
    place = "base_model.model.model.decoder.layers.0.encoder_attn.k_proj"
    save_file({f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    modules = (LoraModule("own", str(tmp_path)),)
    worker = worker_for(folder, dtype="float32", num_blocks=32, lora_modules=modules)
    prompt = prompt_of(spec, a_window(), BEGINS)
    asked = [(prompt, greedily(6, logprobs=0)), (prompt, greedily(6, logprobs=0, lora=(("own", 1.0),)))]
    found = run(engine_for(worker, lora_modules=modules), asked)
    assert [each.outputs[0].error for each in found] == [None, None]
    plain, chosen = (torch.tensor(logprobs_of(each)) for each in found)
    first, text = ((*BEGINS, *each.outputs[0].token_ids) for each in found)
    torch.testing.assert_close(plain, expected(0, first)[3:-1].max(-1).values, rtol=0, atol=1e-4)
    with torch.inference_mode():
        before = weight.clone()
        weight += b @ a
        logits = whisper()(input_features=features(a_window()), decoder_input_ids=torch.tensor([text])).logits[0]
        weight.copy_(before)
    torch.testing.assert_close(chosen, logits.log_softmax(-1)[3:-1].max(-1).values, rtol=0, atol=1e-4)
    assert not torch.equal(plain, chosen)


def test_int8_while_loading(folder: Path, spec: HearingSpec) -> None:
    worker = worker_for(folder, dtype="float32", num_blocks=32, quant="int8")
    assert any(form is not None for form in worker.formats)
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_window(), BEGINS), greedily(8))])
    assert (output.outputs[0].error, len(output.outputs[0].token_ids)) == (None, 8)


# ---- rules ----


def by_transformers(drawn: list[int], logits: torch.Tensor, *, timed: bool, rules: TranscriptRules) -> set[int]:
    """Tokens that its processors leave, in its order."""
    import transformers
    from transformers.generation import logits_process as processors

    begin = 4
    ids = torch.tensor([[START, EN, TRANSCRIBE, UNTIMED][:begin] + drawn])
    scores = logits[None].clone()
    scores = processors.SuppressTokensAtBeginLogitsProcessor(list(rules.first_bans), begin)(ids, scores)
    scores = processors.SuppressTokensLogitsProcessor(list(rules.bans))(ids, scores)
    if timed:
        config = transformers.GenerationConfig(
            no_timestamps_token_id=UNTIMED, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=rules.latest
        )
        scores = processors.WhisperTimeStampLogitsProcessor(config, begin)(ids, scores)
    return set((scores[0] > -float("inf")).nonzero()[:, 0].tolist())


HISTORIES = [
    [], [TIMES], [TIMES, 5], [TIMES, 5, 6], [TIMES, 5, TIMES + 4], [TIMES, 5, TIMES + 4, TIMES + 4],
    [TIMES, 5, TIMES + 4, TIMES + 6], [TIMES + 2, 5, TIMES + 4, TIMES + 4, 9], [TIMES, TIMES], [5], [5, 6],
    [TIMES, 5, TIMES + ROWS], [TIMES, 5, 6, 7, 8, TIMES + 3, TIMES + 3, 5, TIMES + 9, TIMES + 9],
]  # fmt: skip


@pytest.mark.parametrize("timed", [True, False])
def test_rules_leave_what_those_of_transformers_leave(*, timed: bool) -> None:
    from nanovllm_cli.engine.sampling_transcript import TranscriptMask

    rules = TranscriptRules(END, (7, 8, SOUND), (32, END), TIMES if timed else None, 20 if timed else None)
    mask = TranscriptMask(rules, VOCAB)
    kinds = set()
    for seed in range(12):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
        logits[TIMES:] += (seed % 4 - 2) * 2  # now times win, now texts
        for drawn in HISTORIES:
            words = mask.allowed(logits.numpy(), drawn)
            left = {i for i in range(VOCAB) if words[i // 32] >> (i % 32) & 1}
            assert left == by_transformers(drawn, logits, timed=timed, rules=rules), (seed, drawn)
            kinds.add((max(left) >= TIMES, min(left) < END))
    assert kinds == ({(True, False), (True, True), (False, True)} if timed else {(True, True)})


def test_rules_hold_in_the_engine(worker: Worker, spec: HearingSpec) -> None:
    """As transformers writes with times, greedily, alone and beside one that is drawn by chance."""
    rules = TranscriptRules(END, (7, 8), (32, END), TIMES, 20)
    begins = [START, EN, TRANSCRIBE]
    requests = [(prompt_of(spec, a_window(seed), begins), greedily(24, transcript=rules)) for seed in (0, 5, 6)]
    by_chance = SamplingParams(temperature=1.5, seed=1, max_tokens=24, ignore_eos=True, transcript=rules)
    *found, drawn = run(engine_for(worker), [*requests, (requests[0][0], by_chance)])
    for output, seed in zip(found, (0, 5, 6), strict=True):
        ids: list[int] = []
        for token in output.outputs[0].token_ids:
            logits = expected(seed, (*begins, *ids))[-1]
            left = by_transformers(ids, logits, timed=True, rules=rules)
            assert token == max(left, key=lambda each: (logits[each].item(), -each))
            ids.append(token)
    for i, token in enumerate(drawn.outputs[0].token_ids):
        before = list(drawn.outputs[0].token_ids[:i])
        assert token in by_transformers(before, expected(0, (*begins, *before))[-1], timed=True, rules=rules)


def test_rules_are_bounded() -> None:
    for wrong in ({"end": -1}, {"end": 5, "first_time": 5}, {"end": 1, "bans": (2**31,)}, {"end": 1, "bans": (1,) * 5000}):
        with pytest.raises(UsageError):
            TranscriptRules(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="transcript"):
        SamplingParams(transcript=5)  # type: ignore[arg-type]
    from nanovllm_cli.constraint import Constraint

    with pytest.raises(UsageError, match="rules of its own"):
        SamplingParams(transcript=TranscriptRules(1), constraint=Constraint("json_object"))


# ---- what is refused ----


def test_a_prompt_is_a_sound_and_a_text(worker: Worker, spec: HearingSpec) -> None:
    assert worker.sight is not None
    seeing = Seeing(worker.sight.senses, SOUND, SOUND, 1)
    window = a_window()
    good = prompt_of(spec, window, BEGINS)
    assert len(checked_images(seeing._replace(image_token=None), good, tuple(good), None)) == 1
    late = TokenIds([5, *good], [spec.placed(window, 1)])
    twice = TokenIds([*good, *good], [spec.placed(window, 0), spec.placed(window, len(good))])
    short = spec.placed(Sound.of(window.values, 100, 60, 9), 0)
    for prompt, told in (
        (TokenIds(BEGINS), "begins with half a minute of sound"), (late, "begins with half"), (twice, "this one has 2"),
        (TokenIds(good, [short]), "as the model hears them"), (TokenIds(good[:20], good.images), "as the model hears them"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=told):
            checked_images(seeing, prompt, tuple(prompt), None)
    engine = engine_for(worker)
    with pytest.raises(UsageError, match="begins with half a minute of sound"):
        engine.add("1", BEGINS, greedily(3))
    with pytest.raises(UnsupportedError, match="prompt_logprobs"):
        engine.add("1", good, greedily(3, prompt_logprobs=1))
    assert not engine.has_unfinished()


def test_what_is_no_whisper_is_refused() -> None:
    config = config_of().to_dict()
    for wrong, told in (
        ({"scale_embedding": True}, "scale_embedding"), ({"activation_function": "relu6"}, "activation"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=told):
            spec_from_hf(config | wrong, WHISPER)
    for wrong, told in (
        ({"max_source_positions": MAX_ROWS + 1}, "rows"), ({"decoder_layers": 1 << 20}, "layers"),
        ({"d_model": -1}, "hidden_size"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=told):
            spec_from_hf(config | wrong, WHISPER)
    read = EARS["WhisperForConditionalGeneration"].read
    settings = ConfigReader({"feature_size": 9, "chunk_length": 1}, "preprocessor_config.json")
    assert read(ConfigReader(config, "config.json"), settings).leads
    broken = ({"chunk_length": 30}, "pieces of 3000 frames"), ({"feature_size": 80}, "feature_size"), ({"n_fft": 512}, "n_fft")
    for wrong, told in broken:
        with pytest.raises((CheckpointError, UnsupportedError), match=told):
            read(ConfigReader(config, "config.json"), ConfigReader(settings.values | wrong, "preprocessor_config.json"))


def test_a_key_that_is_left_out_changes_nothing() -> None:
    """Of a config that has transformers' defaults."""
    from transformers import WhisperConfig

    whole, none = WhisperConfig().to_dict(), ConfigReader({}, "preprocessor_config.json")
    read = EARS["WhisperForConditionalGeneration"].read
    expected = spec_from_hf(whole, WHISPER), read(ConfigReader(whole, "config.json"), none)
    assert (expected[0].vocab_size, expected[0].max_position, expected[1].piece) == (51865, 1504 + 448, 3000)
    for key in whole:
        less = {name: value for name, value in whole.items() if name != key}
        assert (spec_from_hf(less, WHISPER), read(ConfigReader(less, "config.json"), none)) == expected, key


def test_the_context_is_the_text_and_the_sound(worker: Worker, spec: HearingSpec) -> None:
    lead = spec.placed(a_window(), 0).num_tokens
    assert (lead % 16, worker.max_model_len) == (0, lead + TEXT_LEN)
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_window(), BEGINS), greedily(500))])
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (TEXT_LEN - len(BEGINS), "length")
