"""Models that hear by Whisper's encoder, or one much like it, against transformers: tiny random ones of each family, written as
transformers writes them; their spectrograms; and that no bit depends on steps, neighbours or what was found again."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, save, worker_for
from hearing import prompt_with
from hearing_kin import ARCHITECTURES, FAMILIES, a_piece, config_of, heard_by_transformers, random_ear
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HOP, RATE, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.sounds.reading import read_sound
from nanovllm_cli.vision_spec import Sound, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import load_ear, read_hearing
from sounding import noise
from sounding import wav as saved

transformers = pytest.importorskip("transformers")


def greedily(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)


@functools.cache
def model_of(family: str) -> Any:
    return random_ear(family)


def opened(family: str, folder: Path, **settings: Any) -> tuple[Any, Any, HearingSpec]:
    worker = worker_for(save(model_of(family), folder), dtype="float32", **settings)
    assert worker.sight is not None
    assert isinstance(worker.sight.senses.hearing, HearingSpec)
    return model_of(family), worker, worker.sight.senses.hearing


def parts_of(spec: HearingSpec) -> list[int | Sound]:
    """A sound of three pieces, and one shorter than a piece."""
    whole = spec.piece
    long = [a_piece(spec, whole, 0), a_piece(spec, whole, 1, 1), a_piece(spec, 13, 2, 2)]
    return [5, *long, 3, a_piece(spec, whole - 9, 3), 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_sounds_is_what_transformers_has(family: str, tmp_path: Path) -> None:
    model, worker, spec = opened(family, tmp_path)
    prompt = prompt_with(spec, parts_of(spec))
    (output,) = run(engine_for(worker), [(prompt, greedily(12))])
    answer = output.outputs[0]
    everything = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**heard_by_transformers(family, everything)).logits[0, len(prompt) - 1 : -1]
    assert len(answer.token_ids) == 12, "a step that fails leaves none"
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), expected, rtol=1e-3, atol=1e-3)
    other = prompt_with(spec, [5, a_piece(spec, spec.piece, 9), *parts_of(spec)[2:]])
    (different,) = run(engine_for(worker), [(other, greedily(12))])
    assert logprobs_of(different) != logprobs_of(output), "it matters what is heard"


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, worker, spec = opened(family, tmp_path)
    prompt = prompt_with(spec, parts_of(spec))
    ear = worker.sight._organs[-1].tower()
    given = heard_by_transformers(family, prompt)
    del given["attention_mask"]
    if family != "music-flamingo":
        del given["input_ids"]
    whole = model if family == "qwen2.5-omni" else model.model
    with torch.inference_mode():
        found = torch.cat([ear(placed.image).rows for placed in prompt.images])
        expected = whole.get_audio_features(**given, return_dict=True).pooler_output
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_steps_nor_neighbours_change_a_bit(family: str, tmp_path: Path) -> None:
    """Alone in one step, cut anywhere, beside others, behind a found prefix, and computed again after a preemption."""
    _, worker, spec = opened(family, tmp_path, num_blocks=64)
    parts = parts_of(spec)
    prompts = [prompt_with(spec, parts), prompt_with(spec, [*parts[:2], 9]), prompt_with(spec, [7])]
    prompts.append(TokenIds([*prompts[0], *range(2, 22)], prompts[0].images))
    requests = [(prompt, greedily(24)) for prompt in prompts]
    check_that_no_bit_changes(worker, requests, sum(-(-len(prompt) // 16) for prompt in prompts) + 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_of_sixteen_bits_hears_nearly_the_same(family: str, tmp_path: Path) -> None:
    save(model_of(family), tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        exact, short, plain = (load_ear(checkpoint, spec, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    sound = a_piece(spec, spec.piece - 5, 0, 2)
    rows = exact(sound).rows
    torch.testing.assert_close(plain(sound).rows.to(torch.float32), rows, rtol=1e-3, atol=1e-3)  # torch's products and attention
    near = torch.nn.functional.cosine_similarity(short(sound).rows.to(torch.float32), rows, dim=-1)
    assert near.min() > 0.99


def test_which_of_its_pieces_it_is_matters_to_music_flamingo_alone(tmp_path: Path) -> None:
    for family in ("music-flamingo", "audio-flamingo"):
        _, worker, spec = opened(family, tmp_path / family)
        first, second = (dataclasses.replace(a_piece(spec, spec.piece), ordinal=ordinal) for ordinal in (0, 1))
        ear = worker.sight._organs[-1].tower()
        assert torch.equal(ear(first).rows, ear(second).rows) == (family == "audio-flamingo")
        engine = engine_for(worker)
        for ordinal in (1, 40, 1 << 40, -1):
            sound = dataclasses.replace(first, ordinal=ordinal)
            prompt = prompt_with(spec, [3, sound, 2])
            if (family, ordinal) == ("music-flamingo", 1):
                run(engine, [(prompt, greedily(1))])
                continue
            with pytest.raises(UsageError, match="sounds"):
                engine.add("it", prompt, greedily(1))
        digests = {Sound.of(first.values, first.frames, first.heard, first.bins, i).digest for i in (0, 1, 2)}
        assert len(digests) == 3


# ---- spectrograms ----


def spec_of(family: str, **audio: Any) -> HearingSpec:
    """As published, but for the layers."""
    config = config_of(family).to_dict()
    own = {"num_mel_bins": 128, "n_window": 100, "max_source_positions": 1500, "max_position_embeddings": 1500}
    config["audio_config"] |= {key: value for key, value in own.items() if key in config["audio_config"]} | audio
    config["architectures"] = [ARCHITECTURES[family]]
    settings = {"chunk_length": 300 if family == "qwen2.5-omni" else 30, "feature_size": 128}
    return EARS[ARCHITECTURES[family]].read(ConfigReader(config, "config.json"), ConfigReader(settings, "preprocessor"))


def frames_of(sound: Sound) -> np.ndarray:
    return np.frombuffer(sound.values, "<f4").reshape(sound.frames, sound.bins)


@pytest.mark.parametrize("count", [2001, 480_000, 480_161, 1_000_003])
@pytest.mark.parametrize("family", ["audio-flamingo", "music-flamingo", "glm-asr"])
def test_half_minutes_are_heard_each_by_itself(family: str, count: int) -> None:
    """As their processors cut sounds, and count tokens."""
    spec, samples = spec_of(family), noise(count).astype(np.float32) * np.linspace(1, 9, count, dtype=np.float32)
    clip = read_sound(saved(samples, bits=32, kind=3), spec, "it")
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    parts = [samples[at : at + 480_000] for at in range(0, count, 480_000)]
    given = extractor(parts, sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    heard = given["attention_mask"].sum(-1).tolist()
    name = {"audio-flamingo": "AudioFlamingo3", "music-flamingo": "MusicFlamingo", "glm-asr": "GlmAsr"}[family]
    kind = getattr(transformers, f"{name}Processor")
    tokens = int(kind._get_audio_token_length(None, torch.tensor([sum(heard)]))[0])
    assert spec.num_tokens(clip) == tokens
    assert [each.ordinal for each in clip.images] == [i if family == "music-flamingo" else 0 for i in range(len(clip.images))]
    kept = [i for i, frames in enumerate(heard) if spec.tower.num_made(frames)]  # the last may be too short for a token
    assert [(each.frames, each.heard) for each in clip.images] == [(3000, heard[i]) for i in kept]
    for sound, i in zip(clip.images, kept, strict=True):
        np.testing.assert_allclose(frames_of(sound), given["input_features"][i].T, atol=1e-4)


@pytest.mark.parametrize("count", [1600, 31_999, 32_160, 320_159, 320_321])
def test_pieces_are_those_of_qwen2_5_omni(count: int) -> None:
    """Whose feature extractor fills up five minutes with silence."""
    spec, samples = spec_of("qwen2.5-omni"), noise(count).astype(np.float32)
    clip = read_sound(saved(samples, bits=32, kind=3), spec, "it")
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    given = extractor(samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np", padding="max_length")
    heard = int(given["attention_mask"].sum())
    assert (spec.piece, spec.most) == (200, 150)
    found = np.concatenate(list(map(frames_of, clip.images)))
    assert heard - len(found) == (heard % 200 if heard % 200 < 3 else 0)  # too short for a token
    np.testing.assert_allclose(found, given["input_features"][0].T[: len(found)], atol=1e-4)
    assert spec.num_tokens(clip) == ((heard - 1) // 2 + 1 - 2) // 2 + 1


@pytest.mark.parametrize(("family", "seconds"), [
    ("audio-flamingo", 600), ("music-flamingo", 1200), ("glm-asr", 630), ("qwen2.5-omni", 300),
])  # fmt: skip
def test_what_is_longer_than_they_hear_is_refused(family: str, seconds: int) -> None:
    spec = spec_of(family)
    assert spec.most * spec.piece * HOP == seconds * RATE
    with pytest.raises(UsageError, match=f"longer than the {seconds} seconds"):
        read_sound(saved(np.zeros(RATE * (seconds + 2), np.float32), bits=8), spec, "it")


# ---- configs that are not as they should be ----

BROKEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[NanovllmError], str]] = {
    "odd windows": ("qwen2.5-omni", {"n_window": 11}, {}, UnsupportedError, "an odd number"),
    "long windows": ("qwen2.5-omni", {"n_window": 26}, {}, CheckpointError, "more than 25 positions"),
    "endless windows": ("qwen2.5-omni", {"n_window": 1 << 20, "max_source_positions": 1 << 30}, {}, CheckpointError, "more than"),
    "another decoder": ("qwen2.5-omni", {"output_dim": 47}, {}, CheckpointError, "a decoder of 48"),
    "short rows": ("qwen2.5-omni", {"d_model": 2, "encoder_attention_heads": 1}, {}, CheckpointError, "too short"),
    "no seconds": ("qwen2.5-omni", {"n_window": 24}, {"chunk_length": 1 << 30}, CheckpointError, "not believed"),
    "another rate": ("qwen2.5-omni", {}, {"sampling_rate": 8000}, UnsupportedError, "sampling_rate 8000"),
    "rows joined": ("glm-asr", {"intermediate_size": 96}, {}, CheckpointError, "don't make 96"),
    "fewer keys": ("glm-asr", {"num_key_value_heads": 1}, {}, UnsupportedError, "num_key_value_heads"),
    "odd turns": ("glm-asr", {"rope_parameters": {"partial_rotary_factor": 0.2}}, {}, CheckpointError, "can't turn in pairs"),
    "no turns": ("glm-asr", {"rope_parameters": {"partial_rotary_factor": 0.01}}, {}, CheckpointError, "can't turn in pairs"),
    "more turns": ("glm-asr", {"rope_parameters": {"partial_rotary_factor": 2}}, {}, CheckpointError, "can't turn in pairs"),
    "other turns": ("glm-asr", {"rope_parameters": {"rope_type": "yarn"}}, {}, UnsupportedError, "'yarn'"),
    "positions": ("glm-asr", {"max_position_embeddings": 1 << 20}, {}, CheckpointError, "not believed"),
    "seconds": ("glm-asr", {}, {"chunk_length": 30}, CheckpointError, "pieces of 3000 frames"),
    "layers": ("audio-flamingo", {"num_hidden_layers": 1 << 20}, {}, CheckpointError, "at most 1024"),
    "a scale": ("audio-flamingo", {"scale_embedding": True}, {}, UnsupportedError, "scale_embedding"),
    "bands": ("audio-flamingo", {}, {"feature_size": 80}, UnsupportedError, "feature_size 80"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_no_tower_can_be_are_refused_by_name(name: str) -> None:
    family, audio, settings, kind, told = BROKEN[name]
    config = config_of(family).to_dict()
    config["audio_config"] |= audio
    config["architectures"] = [ARCHITECTURES[family]]
    with pytest.raises(kind) as caught:
        EARS[ARCHITECTURES[family]].read(ConfigReader(config, "config.json"), ConfigReader(settings, "preprocessor_config.json"))
    assert told in caught.value.message


@pytest.mark.parametrize(("changed", "kind", "told"), [
    ({"rope_parameters": {"rope_theta": 5.0}}, CheckpointError, "not believed"),
    ({"rope_parameters": {"rope_theta": 1e9}}, CheckpointError, "not believed"),
    ({"rope_parameters": {"rope_theta": 1200.5}}, CheckpointError, "not believed"),
    ({"rope_parameters": {"rope_type": "linear"}}, UnsupportedError, "'linear'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.6}}, CheckpointError, "can't turn"),
    ({"rope_parameters": {"partial_rotary_factor": 0.01}}, CheckpointError, "can't turn"),
    ({"audio_frame_step": 0.02}, UnsupportedError, "audio_frame_step 0.02"),
])  # fmt: skip
def test_times_that_no_row_can_turn_by_are_refused(changed: dict[str, Any], kind: type[NanovllmError], told: str) -> None:
    config = config_of("music-flamingo").to_dict() | changed | {"architectures": [ARCHITECTURES["music-flamingo"]]}
    with pytest.raises(kind) as caught:
        EARS[ARCHITECTURES["music-flamingo"]].read(ConfigReader(config, "config.json"), ConfigReader({}, "it"))
    assert told in caught.value.message


def test_what_is_told_of_a_tower_crosses_to_other_processes_as_it_is() -> None:
    import msgspec

    from test_hearing_granite import NAMES
    from test_hearing_granite import config_of as granite

    told = [(ARCHITECTURES[family], config_of(family)) for family in FAMILIES]
    told += [(f"{NAMES[kind]}ForConditionalGeneration", granite(kind)) for kind in NAMES]
    for architecture, config in told:
        read = ConfigReader(config.to_dict() | {"architectures": [architecture]}, "config.json")
        spec = EARS[architecture].read(read, ConfigReader({}, "it"))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=HearingSpec) == spec
        assert hash(spec)
    sound = Sound.of(b"", 0, 0, 9, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sound), type=Sound) == sound
