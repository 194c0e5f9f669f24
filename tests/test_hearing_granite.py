"""Granite Speech against transformers: tiny random ones, with rows of one layer and of several for their queries; spectrograms as
torchaudio defines them, in float64; and that no bit depends on steps, neighbours or what was found again."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, random_model, run, save, worker_for
from hearing import TEXT, TOKEN, prompt_with
from hearing_kin import values_of
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import RATE, HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.sounds.reading import read_sound
from nanovllm_cli.vision_spec import Sound, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import ear_parts, load_ear, read_hearing
from sounding import noise
from sounding import wav as saved

transformers = pytest.importorskip("transformers")
NAMES = {"plain": "GraniteSpeech", "plus": "GraniteSpeechPlus"}
TOWER = {
    "input_dim": 18, "num_layers": 4, "hidden_dim": 32, "num_heads": 2, "output_dim": 5, "context_size": 6, "max_pos_emb": 9,
    "conv_kernel_size": 5, "feedforward_mult": 3,
}  # fmt: skip


def config_of(kind: str, **changed: Any) -> Any:
    """Blocks of six rows, and windows of six, of which two queries make two."""
    tower = TOWER | ({"cat_hidden_layers": [0, 2]} if kind == "plus" else {})
    asked = {
        "model_type": "blip_2_qformer", "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40,
        "num_hidden_layers": 2, "encoder_hidden_size": 96 if kind == "plus" else 32, "cross_attention_frequency": 1,
    }  # fmt: skip
    given = {
        "encoder_config": tower, "projector_config": asked, "text_config": TEXT | {"model_type": "granite"}, "window_size": 6,
        "downsample_rate": 3, "audio_token_index": TOKEN, "has_lora_adapter": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return getattr(transformers, f"{NAMES[kind]}Config")(**(given | changed))


@functools.cache
def model_of(kind: str) -> Any:
    family = getattr(transformers, f"{NAMES[kind]}ForConditionalGeneration")

    class Made:
        from_config = staticmethod(lambda config, attn_implementation: family._from_config(config, attn_implementation="eager"))

    model = random_model(config_of(kind), auto=Made)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():  # which such a model learns, too
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def greedily(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)


def opened(kind: str, folder: Path, **settings: Any) -> tuple[Any, Any, HearingSpec]:
    worker = worker_for(save(model_of(kind), folder), dtype="float32", **settings)
    assert worker.sight is not None
    assert isinstance(worker.sight.senses.hearing, HearingSpec)
    return model_of(kind), worker, worker.sight.senses.hearing


def a_sound(frames: int, seed: int = 0) -> Sound:
    values = np.random.default_rng(seed).normal(0, 0.7, (frames, 9)).astype("<f4")
    return Sound.of(values.tobytes(), frames, frames, 9)


def heard(sound: Sound) -> torch.Tensor:
    """[1, rows, 18]."""
    return values_of(sound).T.reshape(1, -1, 18)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("frames", [2, 12, 24, 34, 58])  # of a block less than one, one, two, some, and a row more
def test_rows_are_those_of_transformers(kind: str, frames: int, tmp_path: Path) -> None:
    model, worker, spec = opened(kind, tmp_path)
    sound = a_sound(frames)
    with torch.inference_mode():
        found = worker.sight._organs[-1].tower()(sound).rows
        expected = model.model.get_audio_features(heard(sound), return_dict=True).pooler_output[0]
    assert len(found) == spec.tower.num_made(frames) == -(-frames // 12) * 2
    assert expected.std() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NAMES)
def test_what_follows_a_sound_is_what_transformers_has(kind: str, tmp_path: Path) -> None:
    model, worker, spec = opened(kind, tmp_path)
    sound = a_sound(58)
    prompt = prompt_with(spec, [5, sound, 6])
    (output,) = run(engine_for(worker), [(prompt, greedily(12))])
    answer = output.outputs[0]
    everything = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.inference_mode():
        given = {"input_ids": everything, "attention_mask": torch.ones_like(everything), "input_features": heard(sound)}
        logits = model(**given).logits[0, len(prompt) - 1 : -1]
    assert len(answer.token_ids) == 12
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    torch.testing.assert_close(
        torch.tensor(logprobs_of(output)), logits.log_softmax(-1).max(-1).values, rtol=1e-3, atol=1e-3
    )
    (other,) = run(engine_for(worker), [(prompt_with(spec, [5, a_sound(58, 1), 6]), greedily(12))])
    assert logprobs_of(other) != logprobs_of(output), "it matters what is heard"


def test_neither_steps_nor_neighbours_change_a_bit(tmp_path: Path) -> None:
    _, worker, spec = opened("plus", tmp_path, num_blocks=64)
    parts: list[int | Sound] = [5, a_sound(70), 3, a_sound(25, 1), 6]
    prompts = [prompt_with(spec, parts), prompt_with(spec, [*parts[:2], 9]), prompt_with(spec, [7])]
    prompts.append(TokenIds([*prompts[0], *range(2, 22)], prompts[0].images))
    requests = [(prompt, greedily(24)) for prompt in prompts]
    check_that_no_bit_changes(worker, requests, sum(-(-len(prompt) // 16) for prompt in prompts) + 2)


def test_a_tower_of_sixteen_bits_hears_nearly_the_same(tmp_path: Path) -> None:
    save(model_of("plus"), tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        exact, short, plain = (load_ear(checkpoint, spec, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
    rows = exact(a_sound(58)).rows
    torch.testing.assert_close(plain(a_sound(58)).rows.to(torch.float32), rows, rtol=1e-3, atol=1e-3)
    near = torch.nn.functional.cosine_similarity(short(a_sound(58)).rows.to(torch.float32), rows, dim=-1)
    assert near.min() > 0.99


# ---- spectrograms ----


def mel_by_torchaudios_formulas(samples: np.ndarray, bins: int) -> np.ndarray:
    """[frames, bins] float64: its MelSpectrogram of 512 points, windows of 400 and steps of 160, HTK's bands without an area."""
    signal, window = torch.from_numpy(samples.astype(np.float64)), torch.hann_window(400, dtype=torch.float64)
    spectrum = torch.stft(signal, 512, 160, 400, window, center=True, pad_mode="reflect", return_complex=True)
    power = spectrum.abs().numpy().T ** 2

    def hertz(mels: np.ndarray) -> np.ndarray:
        return 700 * (10 ** (mels / 2595) - 1)

    top = 2595 * np.log10(1 + 8000 / 700)
    edges, frequencies = hertz(np.linspace(0, top, bins + 2)), np.linspace(0, 8000, 257)
    bands = np.zeros((257, bins))
    for i in range(bins):
        low, middle, high = edges[i : i + 3]
        bands[:, i] = np.clip(np.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle)), 0, None)
    logs = np.log10(np.clip(power @ bands, 1e-10, None))
    return np.maximum(logs, logs.max() - 8) / 4 + 1


@pytest.mark.parametrize(("count", "frames"), [(1600, 10), (1759, 10), (1760, 12), (48_001, 300)])
def test_a_spectrogram_is_that_of_its_feature_extractor(count: int, frames: int) -> None:
    """And as many tokens stand for it as that counts."""
    config = config_of("plain").to_dict() | {"window_size": 15, "downsample_rate": 5, "architectures": ["GraniteSpeech"]}
    config["encoder_config"]["input_dim"] = 160
    spec = EARS["GraniteSpeechForConditionalGeneration"].read(
        ConfigReader(config | {"architectures": ["GraniteSpeechForConditionalGeneration"]}, "config.json"), ConfigReader({}, "it")
    )
    samples = noise(count).astype(np.float32)
    clip = read_sound(saved(samples, bits=32, kind=3), spec, "it")
    (sound,) = clip.images
    assert (sound.frames, sound.heard, sound.bins) == (frames, frames, 80)
    expected = mel_by_torchaudios_formulas(samples, 80)[:frames]
    np.testing.assert_allclose(values_of(sound).T.numpy(), expected, atol=1e-4)
    extractor = type("Counting", (), {"melspec_kwargs": {"hop_length": 160}, "projector_window_size": 15,
                                      "projector_downsample_rate": 5})  # fmt: skip
    kind = transformers.models.granite_speech.feature_extraction_granite_speech.GraniteSpeechFeatureExtractor
    assert kind._get_num_audio_features(extractor, [count]) == [spec.num_tokens(clip)]


def test_what_is_longer_than_it_hears_is_refused(tmp_path: Path) -> None:
    _, _, spec = opened("plain", tmp_path)
    with pytest.raises(UsageError, match="longer than the 300 seconds"):
        read_sound(saved(np.zeros(RATE * 300 + 400, np.float32), bits=8), spec, "it")


# ---- folders and configs that are not as they should be ----


def test_with_an_adapter_for_sounds_it_reads_texts(tmp_path: Path) -> None:
    folder = save(model_of("plain"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"has_lora_adapter": True}))
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="LoRA adapter"):
        read_hearing(checkpoint)
    worker = worker_for(folder, dtype="float32")
    assert worker.sight is None


def test_a_folder_without_all_of_its_tower_is_told_of(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(model_of("plain"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (lost,) = (name for name in tensors if name.endswith("layers.1.conv.batch_norm.running_var"))
    tensors[f"{lost}s"] = tensors.pop(lost)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        with pytest.raises(CheckpointError, match=r"1 missing: .*running_var.*1 not part of it"):
            ear_parts(checkpoint, spec)


BROKEN: dict[str, tuple[str, dict[str, Any], type[NanovllmError], str]] = {
    "layers": ("encoder_config", {"num_layers": 1 << 20}, CheckpointError, "at most 1024"),
    "one layer": ("encoder_config", {"num_layers": 1}, UnsupportedError, "one layer"),
    "heads": ("encoder_config", {"num_heads": 3}, CheckpointError, "can't share"),
    "wide heads": ("encoder_config", {"dim_head": 32}, UnsupportedError, "2 heads of 32 dimensions"),
    "an odd number of bands": ("encoder_config", {"input_dim": 17}, CheckpointError, "17 bands"),
    "bands": ("encoder_config", {"input_dim": 1 << 20}, CheckpointError, "1048576 bands"),
    "wide blocks": ("encoder_config", {"context_size": 10}, CheckpointError, "blocks of 10 rows"),
    "endless blocks": ("encoder_config", {"context_size": 1 << 20, "max_pos_emb": 1 << 20}, CheckpointError, "not believed"),
    "classes": ("encoder_config", {"output_dim": 1 << 20}, CheckpointError, "output_dim 1048576"),
    "a wide kernel": ("encoder_config", {"conv_kernel_size": 1 << 20}, CheckpointError, "conv_kernel_size"),
    "kept out of order": ("encoder_config", {"cat_hidden_layers": [2, 0]}, CheckpointError, "in order"),
    "kept above all": ("encoder_config", {"cat_hidden_layers": [4]}, CheckpointError, "below 4"),
    "kept, a word": ("encoder_config", {"cat_hidden_layers": "all"}, CheckpointError, "list of layers"),
    "another width": ("encoder_config", {"cat_hidden_layers": [1]}, CheckpointError, "of 32 numbers, and the tower's have 64"),
    "queries of texts": ("projector_config", {"use_qformer_text_input": True}, UnsupportedError, "use_qformer_text_input"),
    "queries that look seldom": ("projector_config", {"cross_attention_frequency": 2}, UnsupportedError, "one of 2 layers"),
    "queries' heads": ("projector_config", {"num_attention_heads": 5}, CheckpointError, "can't share"),
    "windows": ("", {"window_size": 7}, CheckpointError, "don't become one evenly"),
    "endless windows": ("", {"window_size": 3 << 20}, CheckpointError, "window_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_no_tower_can_be_are_refused_by_name(name: str) -> None:
    section, changed, kind, told = BROKEN[name]
    config = config_of("plain").to_dict() | {"architectures": ["GraniteSpeechForConditionalGeneration"]}
    (config[section] if section else config).update(changed)
    with pytest.raises(kind) as caught:
        EARS["GraniteSpeechForConditionalGeneration"].read(ConfigReader(config, "config.json"), ConfigReader({}, "it"))
    assert told in caught.value.message


@pytest.mark.parametrize("settings", [
    {"sampling_rate": 8000}, {"melspec_kwargs": {"n_fft": 400}}, {"melspec_kwargs": {"n_mels": 80}},
    {"projector_window_size": 15},
])  # fmt: skip
def test_other_settings_are_refused(settings: dict[str, Any]) -> None:
    config = config_of("plain").to_dict() | {"architectures": ["GraniteSpeechForConditionalGeneration"]}
    with pytest.raises(UnsupportedError, match="is not supported"):
        EARS["GraniteSpeechForConditionalGeneration"].read(ConfigReader(config, "config.json"), ConfigReader(settings, "it"))
