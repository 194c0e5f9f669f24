"""Models that hear against transformers: tiny random models of each family, written as transformers writes them; and that no bit
of an answer depends on steps, neighbours or what was found again."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, save, worker_for
from hearing import TOKEN, a_sound, config_of, heard_by_transformers, prompt_with, random_ear
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec, Senses
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import Sound, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import ear_parts, hearing_bytes, load_ear, read_hearing

pytest.importorskip("transformers")
FAMILIES = ["voxtral", "qwen2-audio", "qwen3-asr"]
greedy = functools.partial(SamplingParams, temperature=0.0)


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@functools.cache
def model_of(family: str) -> Any:
    return random_ear(family)


def opened(family: str, folder: Path, **settings: Any) -> tuple[Any, Worker, HearingSpec]:
    worker = worker_for(save(model_of(family), folder), dtype="float32", **settings)
    assert worker.sight is not None
    assert isinstance(worker.sight.senses.hearing, HearingSpec)
    return model_of(family), worker, worker.sight.senses.hearing


def parts_of(spec: HearingSpec) -> list[int | Sound]:
    """Sounds of different lengths, and two of one behind each other."""
    whole = spec.piece
    lengths = (whole, whole, whole) if spec.padded and not spec.framed else (whole, 7, 33)
    first, second, third = (a_sound(spec, heard, seed) for seed, heard in enumerate(lengths))
    return [5, first, 3, second, 2, third, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_sounds_is_what_transformers_has(family: str, tmp_path: Path) -> None:
    model, worker, spec = opened(family, tmp_path)
    prompt = prompt_with(spec, parts_of(spec))
    (output,) = run(engine_for(worker), [(prompt, greedily(12, logprobs=0))])
    answer = output.outputs[0]
    whole = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**heard_by_transformers(spec, whole)).logits[0, len(prompt) - 1 : -1]
    assert len(answer.token_ids) == 12, "a step that fails leaves none"
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), expected, rtol=1e-3, atol=1e-3)
    other = prompt_with(spec, [5, a_sound(spec, spec.piece, 9), *parts_of(spec)[2:]])
    (different,) = run(engine_for(worker), [(other, greedily(12, logprobs=0))])
    assert logprobs_of(different) != logprobs_of(output), "it matters what is heard"


def test_pieces_of_a_long_sound_are_what_transformers_makes_of_all_of_it(tmp_path: Path) -> None:
    model, worker, spec = opened("qwen3-asr", tmp_path)
    values = np.random.default_rng(3).normal(0, 0.7, (493, 9)).astype("<f4")
    cut = [Sound.of(values[at : at + 200].tobytes(), n, n, 9) for at, n in ((0, 200), (200, 200), (400, 93))]
    ear = worker.sight._organs[0].tower()  # type: ignore[union-attr]
    with torch.inference_mode():
        found = torch.cat([ear(each).rows for each in cut])  # type: ignore[operator]
        padded = torch.nn.functional.pad(torch.from_numpy(values).T, (0, 7))[None]
        mask = (torch.arange(500) < 493).long()[None]
        expected = model.model.get_audio_features(padded, input_features_mask=mask).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert sum(spec.tower.num_made(each.heard) for each in cut) == len(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_steps_nor_neighbours_change_a_bit(family: str, tmp_path: Path) -> None:
    """Alone in one step, cut anywhere, beside others, behind a found prefix, and computed again after a preemption."""
    _, worker, spec = opened(family, tmp_path, num_blocks=64)
    parts = parts_of(spec)
    prompts = [prompt_with(spec, parts), prompt_with(spec, [*parts[:4], 9]), prompt_with(spec, [7])]
    prompts.append(TokenIds([*prompts[0], *range(2, 22)], prompts[0].images))
    requests = [(prompt, greedily(24, logprobs=0)) for prompt in prompts]
    check_that_no_bit_changes(worker, requests, sum(-(-len(prompt) // 16) for prompt in prompts) + 2)


def test_a_found_prefix_is_of_the_same_sound(tmp_path: Path) -> None:
    """Tokens of two sounds are the same; what is cached of them is not. What lies in front of them is shared."""
    _, worker, spec = opened("qwen3-asr", tmp_path)
    sounds = [[a_sound(spec, 200, seed) for seed in seeds] for seeds in ((1, 2, 3, 4), (1, 2, 3, 5), (9, 2, 3, 4))]
    engine, hits = engine_for(worker), []
    for pieces in (*sounds, sounds[0]):
        before = engine.stats().prefix_hit_tokens
        run(engine, [(prompt_with(spec, [32, *pieces, 40]), greedily(4))])
        hits.append(engine.stats().prefix_hit_tokens - before)
    each = spec.tower.num_made(200)
    assert hits == [0, (32 + 3 * each) // 16 * 16, 32, (32 + 4 * each + 40 - 1) // 16 * 16]


def test_a_sound_is_heard_a_layer_a_step_while_others_draw(tmp_path: Path) -> None:
    _, worker, spec = opened("voxtral", tmp_path)
    sight = worker.sight
    assert sight is not None
    prompt = prompt_with(spec, [4, a_sound(spec, 50), 4])
    alone = run(engine_for(worker), [(prompt, greedily(6, logprobs=0))])[0]
    sight._kept.clear()
    engine = engine_for(worker, token_work=spec.tower.layer_work(a_sound(spec, 50)) // 9, max_num_batched_tokens=10)
    computed = sight.num_computed
    both = run(engine, [(prompt, greedily(6, logprobs=0)), ([5, 6, 7], greedily(20))])
    assert logprobs_of(both[0]) == logprobs_of(alone)
    assert sight.num_computed == computed + 1


def test_sounds_that_do_not_fit_their_prompt_are_refused(tmp_path: Path) -> None:
    _, worker, spec = opened("qwen3-asr", tmp_path)
    sound = a_sound(spec, 200)
    good = prompt_with(spec, [4, sound, 4])
    placed = good.images[0]
    wrong = [
        [placed._replace(start=9)],
        [placed, placed],
        [placed._replace(columns=placed.columns - 1)],
        [placed._replace(image=dataclasses.replace(sound, values=sound.values[:-1]))],
        [placed._replace(image=dataclasses.replace(sound, heard=201))],
        [placed._replace(image=dataclasses.replace(sound, bins=8))],
        [spec.placed(a_sound(spec, 201), 4)],  # longer than a piece
        [spec.placed(Sound.of(b"", 0, 0, 9), 4)],
    ]
    engine = engine_for(worker)
    for sounds in wrong:
        with pytest.raises(UsageError, match="sounds"):
            engine.add("it", TokenIds(good, sounds), greedily(1))
    with pytest.raises(UnsupportedError, match="hears nothing"):
        checked_images(None, good, tuple(good), None)
    for tokens in (list(good), [*good, TOKEN], good[:-5]):
        with pytest.raises(UsageError, match="stand for sounds"):
            checked_images(Seeing(Senses(hearing=spec), None, TOKEN, 1), tokens, tuple(tokens), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_of_sixteen_bits_hears_nearly_the_same(family: str, tmp_path: Path) -> None:
    save(model_of(family), tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        exact, short = (load_ear(checkpoint, spec, dtype) for dtype in (torch.float32, torch.bfloat16))
        plain = load_ear(checkpoint, spec, torch.float64)
        assert hearing_bytes(spec, torch.float32) == sum(
            part.numel() * 4 for name, part in model_of(family).state_dict().items()
            if "audio_tower" in name or "projector" in name
        ) + (spec.tower.num_layers * 32 * 4 if not spec.tower.key_bias else 0)  # fmt: skip
    sound = a_sound(spec, spec.piece)
    rows = exact(sound).rows
    torch.testing.assert_close(plain(sound).rows.to(torch.float32), rows, rtol=1e-3, atol=1e-3)  # torch's products and attention
    near = torch.nn.functional.cosine_similarity(short(sound).rows.to(torch.float32), rows, dim=-1)
    assert near.min() > 0.99


def test_folders_as_they_were_first_published(tmp_path: Path) -> None:
    """Of a Qwen3-ASR: all of it is inside of a thinker, and the projector is the tower's."""
    from safetensors.torch import load_file, save_file

    now, then = save(model_of("qwen3-asr"), tmp_path / "now"), tmp_path / "then"
    then.mkdir()
    config = json.loads((now / "config.json").read_text())
    inner = {key: config.pop(key) for key in ("audio_config", "text_config")}
    theta = inner["text_config"].pop("rope_parameters")["rope_theta"]
    inner["text_config"] |= {"rope_scaling": {"mrope_section": [4, 4, 4], "rope_type": "default", "interleaved": True},
                             "rope_theta": theta}  # fmt: skip
    (then / "config.json").write_text(json.dumps(config | {"thinker_config": inner}))
    tensors = {}
    for name, tensor in load_file(now / "model.safetensors").items():
        name = name.replace("model.multi_modal_projector.linear_", "model.audio_tower.proj")
        tensors["thinker." + name.replace("model.language_model", "model").replace("model.audio_tower", "audio_tower")] = tensor
    save_file(tensors, then / "model.safetensors")
    answers = []
    for folder in (now, then):
        worker = worker_for(folder, dtype="float32")
        assert worker.sight is not None
        spec = worker.sight.senses.hearing
        assert isinstance(spec, HearingSpec)
        answers.append(run(engine_for(worker), [(prompt_with(spec, parts_of(spec)), greedily(8, logprobs=0))])[0])
    assert logprobs_of(answers[0]) == logprobs_of(answers[1])


# ---- configs and folders that are not as they should be ----

BROKEN = {
    "heads": ("qwen3-asr", {"encoder_attention_heads": 3}, {}, CheckpointError, "can't share"),
    "windows": ("qwen3-asr", {"n_window_infer": 201}, {}, CheckpointError, "don't divide"),
    "long windows": ("qwen3-asr", {"n_window_infer": 1 << 20}, {}, CheckpointError, "don't divide"),
    "another window": ("qwen3-asr", {}, {"n_window": 40}, CheckpointError, "'n_window' is 40"),
    "another decoder": ("qwen3-asr", {"output_dim": 47}, {}, CheckpointError, "a decoder of 48"),
    "long silence": ("qwen3-asr", {}, {"min_length": 1 << 20}, CheckpointError, "not believed"),
    "layers": ("voxtral", {"num_hidden_layers": 1 << 20}, {}, CheckpointError, "at most 1024"),
    "rows": ("voxtral", {"intermediate_size": 100}, {}, CheckpointError, "don't make 100"),
    "bands": ("voxtral", {"num_mel_bins": 1 << 20}, {}, CheckpointError, "1048576 bands"),
    "no bands": ("voxtral", {"num_mel_bins": 0}, {}, CheckpointError, "num_mel_bins"),
    "positions": ("voxtral", {"max_source_positions": 1 << 20}, {}, CheckpointError, "not believed"),
    "seconds": ("voxtral", {}, {"chunk_length": 30}, CheckpointError, "pieces of 3000 frames"),
    "an activation": ("voxtral", {"activation_function": "tanh"}, {}, UnsupportedError, "'tanh'"),
    "a scale": ("qwen2-audio", {"scale_embedding": True}, {}, UnsupportedError, "scale_embedding"),
    "a rate": ("qwen2-audio", {}, {"sampling_rate": 8000}, UnsupportedError, "sampling_rate 8000"),
    "other bands": ("qwen2-audio", {}, {"feature_size": 80}, UnsupportedError, "feature_size 80"),
    "noise": ("qwen3-asr", {}, {"dither": 1e-5}, UnsupportedError, "dither 1e-05"),
    "no silence": ("voxtral", {}, {"padding_value": -1}, UnsupportedError, "padding_value -1"),
    "a late beginning": ("voxtral", {}, {"padding_side": "left"}, UnsupportedError, "padding_side 'left'"),
    "normalized": ("qwen2-audio", {}, {"do_normalize": True}, UnsupportedError, "do_normalize"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_no_tower_can_be_are_refused_by_name(name: str) -> None:
    family, audio, settings, kind, told = BROKEN[name]
    config = config_of(family).to_dict()
    config["audio_config"] |= audio
    architecture = {"voxtral": "Voxtral", "qwen2-audio": "Qwen2Audio", "qwen3-asr": "Qwen3ASR"}[family]
    config["architectures"] = [f"{architecture}ForConditionalGeneration"]
    given = ConfigReader(config, "config.json"), ConfigReader(settings, "preprocessor_config.json")
    with pytest.raises(kind) as caught:
        EARS[config["architectures"][0]].read(*given)
    assert isinstance(caught.value, NanovllmError)
    assert told in caught.value.message


def test_a_folder_without_all_of_its_tower_reads_texts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from nanovllm_cli.progress import NullProgress

    class Notes(NullProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    save(model_of("voxtral"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = [name for name in tensors if name.endswith("conv1.bias")]
    assert named
    tensors[named[0] + "es"] = tensors.pop(named[0])
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        with pytest.raises(CheckpointError, match=r"1 missing: .*conv1\.bias.*1 not part of it"):
            ear_parts(checkpoint, spec)
    worker = worker_for(tmp_path, dtype="float32")
    assert worker.sight is None
    save_file({name: each for name, each in tensors.items() if "tower" not in name and "projector" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    with open_checkpoint(tmp_path) as checkpoint:
        assert read_hearing(checkpoint) is None
