"""How a Gemma 4 hears, against transformers: tiny random towers, written as transformers writes them, and read; spectrograms,
pieces and tokens; and what its configs say."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from engines import engine_for, run, save, worker_for
from hearing import prompt_with
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import ConformerSpec, HearingSpec, Senses
from nanovllm_cli.models.ear import Ear
from nanovllm_cli.models.tower_layers import next_stage
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.sounds.reading import cut, read_sent
from nanovllm_cli.text.chat_template import ChatTemplate, prepare_chat
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.transcripts import asks
from nanovllm_cli.vision_spec import Clip, Sound, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import ear_parts, hearing_bytes, load_ear, read_hearing
from sounding import in_base64, noise
from sounding import wav as saved
from test_llm import write_byte_tokenizer
from test_models import CASES
from test_sounds import QWEN3
from test_tower_gemma4 import VISION
from test_towers import TEXT, copy
from test_towers import draw as colours
from test_towers import image as shown

transformers = pytest.importorskip("transformers")
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor  # noqa: E402
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: E402
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor  # noqa: E402

BINS = 34
AUDIO = {
    "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "subsampling_conv_channels": [36, 5],
    "output_proj_dims": 20, "rms_norm_eps": 1e-3, "attention_logit_cap": 3.0,
}  # fmt: skip
MADE: dict[str, dict[str, Any]] = {
    "as published": AUDIO,
    "nothing clipped": AUDIO | {"use_clipped_linears": False, "attention_context_left": 8, "attention_chunk_size": 8,
                                "conv_kernel_size": 4, "residual_weight": 0.3, "gradient_clipping": 1.5},
}  # fmt: skip
LENGTHS = (1, 2, 4, 5, 27, 49, 50, 101, 333)
"""Of frames."""


class Made(NamedTuple):
    """A folder, and what transformers makes of frames, some of whose batch are longer."""

    folder: Path
    rows: Callable[[np.ndarray], torch.Tensor]


def draw(model: Any) -> Any:
    """Numbers for a model, of which all matter; bounds cut some of what they bound."""
    generator = torch.Generator().manual_seed(1)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        drawn = torch.randn(tensor.shape, generator=generator)
        if key.endswith(("_min", "_max")):
            tensor.data = (0.5 + drawn.abs()) * (1 if key.endswith("max") else -1)
        elif tensor.dim() and "inv_" not in key:
            tensor.data = 1 + drawn / 4 if tensor.dim() == 1 else drawn / tensor[0].numel() ** 0.5
    return model.eval()


def make(audio: dict[str, Any], folder: Path) -> Made:
    text = TEXT | {"hidden_size_per_layer_input": 0}
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=audio)
    model = draw(transformers.Gemma4ForConditionalGeneration(config))
    model.save_pretrained(folder)
    Gemma4AudioFeatureExtractor(feature_size=BINS).save_pretrained(folder)

    def rows(values: np.ndarray) -> torch.Tensor:
        padded = torch.nn.functional.pad(torch.from_numpy(values), (0, 0, 0, 13))[None]
        mask = (torch.arange(len(values) + 13) < len(values))[None]
        with torch.inference_mode():
            found = model.model.get_audio_features(padded, mask)
        return found.pooler_output[found.attention_mask]  # type: ignore[no-any-return]

    return Made(folder, rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """By name; each is made once."""
    return functools.cache(lambda name: make(MADE[name], tmp_path_factory.mktemp("made")))


def open_ear(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[HearingSpec, Ear]:
    with open_checkpoint(folder) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        return spec, load_ear(checkpoint, spec, dtype)


def frames(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(-2, 1.5, (count, BINS)).astype("<f4")


def sound_of(values: np.ndarray) -> Sound:
    return Sound.of(values.tobytes(), len(values), len(values), values.shape[1])


@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_transformers(name: str, made: Callable[[str], Made]) -> None:
    spec, ear = open_ear(made(name).folder)
    for count in LENGTHS:
        found, expected = ear(sound_of(frames(count))).rows, made(name).rows(frames(count))
        assert len(found) == spec.tower.num_made(count)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float64, 1e-5)])
@pytest.mark.parametrize("name", MADE)
def test_other_types_stay_near(name: str, dtype: torch.dtype, near: float, made: Callable[[str], Made]) -> None:
    found = open_ear(made(name).folder, dtype)[1](sound_of(frames(101))).rows
    assert found.dtype == dtype
    expected = made(name).rows(frames(101))
    assert (found.float() - expected).norm() < near * expected.norm()


def test_nothing_overflows_in_sixteen_bits(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Numbers are cut off where norms read them: what the last MLP adds to rows is beyond float16 here."""
    from safetensors.torch import load_file

    tensors = load_file(made("nothing clipped").folder / "model.safetensors")
    for i in range(3):
        tensors[f"model.audio_tower.layers.{i}.feed_forward2.post_layer_norm.weight"] *= 1e6
    folder = copy(made("nothing clipped").folder, tmp_path, tensors, {})
    assert open_ear(folder, torch.float16)[1](sound_of(frames(49))).rows.isfinite().all()


def test_a_piece_is_heard_a_layer_at_a_time(made: Callable[[str], Made]) -> None:
    spec, ear = open_ear(made("as published").folder)
    stages = ear.stages(sound_of(frames(50)))
    steps = [next_stage(stages) for _ in range(spec.tower.num_layers)]
    assert steps[:-1] == [None] * 2
    assert steps[-1] is not None
    assert torch.equal(steps[-1].rows, ear(sound_of(frames(50))).rows)


def test_a_row_sees_nothing_that_comes_later(made: Callable[[str], Made]) -> None:
    """But for the two convolutions in front, by whose kernels it sees half a row more."""
    ear, values = open_ear(made("as published").folder)[1], frames(200)
    torch.testing.assert_close(ear(sound_of(values[:103])).rows[:25], ear(sound_of(values)).rows[:25], rtol=0, atol=2e-6)


def test_the_bytes_told_are_those_of_the_weights(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm_cli.weights.hearing.Ear", lambda spec, tensors: tensors)
    spec, tensors = open_ear(made("as published").folder, torch.bfloat16)
    assert hearing_bytes(spec, torch.bfloat16) == sum(each.nbytes for each in tensors.values())  # type: ignore[attr-defined]


def test_a_spec_crosses_to_other_processes(made: Callable[[str], Made]) -> None:
    for spec in (open_ear(made("as published").folder)[0], QWEN3):
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=HearingSpec)
        assert there == spec
        assert type(there.tower) is type(spec.tower)


# ---- spectrograms, pieces, tokens ----


@pytest.mark.parametrize("bins", [128, BINS])
def test_spectrograms_and_numbers_of_tokens_are_those_of_transformers(bins: int, made: Callable[[str], Made]) -> None:
    spec = hearing_of(made("as published").folder, bins)
    extractor = Gemma4AudioFeatureExtractor(feature_size=bins)
    processor = SimpleNamespace(feature_extractor=extractor, audio_seq_length=750, boa_token="", eoa_token="", audio_token="a")
    for count in (161, 320, 321, 1600, 4801, 16_001, 63_999, 480_000):
        samples = noise(count, count).astype(np.float32)
        (sound,) = cut(samples, spec)
        given = extractor([samples], return_tensors="np")
        expected = given["input_features"][0][given["input_features_mask"][0]]
        found = np.frombuffer(sound.values, "<f4").reshape(sound.frames, bins)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
        placed = spec.placed(sound, 3)
        assert placed.num_tokens == spec.num_tokens(Clip((sound,), count / 16_000))
        assert placed.num_tokens == Gemma4Processor._compute_audio_num_tokens(processor, samples, 16_000)
        assert placed.num_tokens == len(Gemma4Processor.replace_audio_token(processor, given, 0))
        assert spec.fits([placed], placed.end)


def hearing_of(folder: Path, bins: int) -> HearingSpec:
    spec, _ = open_ear(folder)
    assert isinstance(spec.tower, ConformerSpec)
    return replace(spec, tower=spec.tower._replace(num_bins=bins))


def test_a_long_sound_is_further_pieces_and_none_of_it_is_lost(made: Callable[[str], Made]) -> None:
    """Half a minute is all that transformers hears of it."""
    spec, _ = open_ear(made("as published").folder)
    samples = noise(480_000 + 20_011).astype(np.float32)
    clip = read_sent(in_base64(saved(samples, bits=32, kind=3)), spec, "it")
    assert [sound.heard for sound in clip.images] == [2999, 125]
    assert spec.num_tokens(clip) == 750 + 32
    assert clip.images == cut(samples[:480_000], spec) + cut(samples[480_000:], spec)
    assert len(cut(samples[: 480_000 + 160], spec)) == 1, "there is no frame in the rest"
    assert len(cut(samples[: 480_000 + 161], spec)) == 2


WORDS = ("<bos>", "<turn|>", "<|turn>", "<|audio|>", "<|audio>", "<audio|>")
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'audio' %}<|audio|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<turn|>
{% endfor %}"""
BARE = TEMPLATE[: TEMPLATE.index("{% for part")] + "{{ message.content }}{% endif %}<turn|>\n{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, BARE])
def test_tokens_of_a_sound_lie_between_its_beginning_and_its_end(
    template: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """As its processor has it, also by a template that knows nothing of sounds; what a text has of them is a text."""
    spec, _ = open_ear(made("as published").folder)
    write_byte_tokenizer(tmp_path, WORDS)
    tokenizer = Tokenizer.from_folder(tmp_path)
    clip = Clip(cut(noise(480_000 + 5000).astype(np.float32), spec), 30.3)
    asked = asks(spec.transcript, tokenizer, {"type": "audio"}, "de")
    messages = [*asked.messages, {"role": "user", "content": "<|audio|>"}]
    prompt = prepare_chat(tokenizer, ChatTemplate(template), messages, images=[clip], senses=Senses(hearing=spec))
    ids = list(prompt.ids)
    token, begin, end = (tokenizer.control_tokens[word] for word in WORDS[3:])
    first = ids.index(token)
    assert [(placed.start, placed.num_tokens) for placed in prompt.ids.images] == [(first, 750), (first + 750, 8)]
    assert ids[ids.index(begin) + 1 : ids.index(end)] == [token] * 758
    assert (ids.count(begin), ids.count(end), ids.count(token)) == (1, 1, 758)
    assert "in German into German text" in prompt.text
    assert prompt.text.count("<|audio|>") == 3


# ---- in an engine ----


def test_what_follows_sounds_is_what_transformers_has(tmp_path: Path) -> None:
    """Of a model that sees nothing, whose layers have numbers of each token: those of sounds have the padding's."""
    text = CASES["gemma4, keys of other layers"].to_dict() | {"pad_token_id": 0}
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=AUDIO, audio_token_id=TOKEN)
    model = draw(transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    Gemma4AudioFeatureExtractor(feature_size=BINS).save_pretrained(tmp_path)
    worker = worker_for(save(model, tmp_path), dtype="float32")
    assert worker.sight is not None
    spec = worker.sight.senses.hearing
    assert isinstance(spec, HearingSpec)
    sounds = [sound_of(frames(count)) for count in (101, 7, 50)]
    prompt = prompt_with(spec, [5, sounds[0], 3, sounds[1], sounds[2], 6], token=TOKEN)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    answers = []
    for settings in ({}, {"max_num_batched_tokens": 7}, {"token_work": spec.tower.layer_work(sounds[0]) // 9}):
        (output,) = run(engine_for(worker, **settings), [(prompt, greedy)])
        drawn = output.outputs[0]
        answers.append([(token, each.logprob) for token, each in zip(drawn.token_ids, drawn.logprobs, strict=True)])
        worker.sight._kept.clear()
    assert answers[0] == answers[1] == answers[2]
    whole = TokenIds([*prompt, *output.outputs[0].token_ids], prompt.images)
    values = torch.stack([torch.from_numpy(np.resize(frames(each.heard), (101, BINS))) for each in sounds])
    mask = torch.tensor([[i < each.heard for i in range(101)] for each in sounds])
    ids = torch.tensor([list(whole)])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), input_features=values, input_features_mask=mask).logits
    expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1).max(-1)
    assert [token for token, _ in answers[0]] == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor([each for _, each in answers[0]]), expected.values, rtol=1e-3, atol=1e-3)

def test_one_that_sees_too_does_both_in_one_prompt(tmp_path: Path) -> None:
    """An image and sounds in turns; in small steps and with parts of towers in steps of their own, the same."""
    text = CASES["gemma4, keys of other layers"].to_dict() | {"pad_token_id": 0}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=VISION | {"use_clipped_linears": True}, audio_config=AUDIO, audio_token_id=TOKEN,
        image_token_id=TOKEN + 1,
    )  # fmt: skip
    model = draw(transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    Gemma4AudioFeatureExtractor(feature_size=BINS).save_pretrained(tmp_path)
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)
    worker = worker_for(save(model, tmp_path), dtype="float32")
    assert worker.sight is not None
    vision, hearing, _ = worker.sight.senses
    assert vision is not None
    assert hearing is not None
    pixels, values = colours(2 * 12, 3 * 12), frames(27)
    sound, seen = sound_of(values), shown(pixels)
    ids = [5, *[TOKEN] * 7, 8, 9, *[TOKEN + 1] * 6, 4, *[TOKEN] * 7, 3]
    prompt = TokenIds(ids, [hearing.placed(sound, 1), vision.placed(seen, 10), hearing.placed(sound, 17)])
    assert worker.sight.senses.fits(prompt.images, len(prompt))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    answers = []
    for settings in ({}, {"max_num_batched_tokens": 7}, {"token_work": vision.tower.layer_work(seen) // 9}):
        (output,) = run(engine_for(worker, **settings), [(prompt, greedy)])
        drawn = output.outputs[0]
        answers.append([(token, each.logprob) for token, each in zip(drawn.token_ids, drawn.logprobs, strict=True)])
        worker.sight._kept.clear()
    assert answers[0] == answers[1] == answers[2]
    given = images(images=[pixels], do_resize=False, return_tensors="pt")
    whole = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
    with torch.inference_mode():
        logits = model(
            input_ids=whole, attention_mask=torch.ones_like(whole), pixel_values=given["pixel_values"],
            image_position_ids=given["image_position_ids"], input_features=torch.from_numpy(np.stack([values] * 2)),
            input_features_mask=torch.ones(2, len(values), dtype=torch.bool),
        ).logits  # fmt: skip
    expected = logits[0, len(prompt) - 1 : -1].log_softmax(-1).max(-1)
    assert [token for token, _ in answers[0]] == expected.indices.tolist()
    torch.testing.assert_close(torch.tensor([each for _, each in answers[0]]), expected.values, rtol=1e-3, atol=1e-3)


TOKEN = 300

# ---- configs and folders that are not as they should be ----

BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "another kind": ({"model_type": "gemma3n_audio"}, {}, UnsupportedError, "model_type 'gemma3n_audio'"),
    "what comes later": ({"attention_context_right": 2}, {}, UnsupportedError, "attention_context_right '2'"),
    "chunks": ({"attention_chunk_size": 9}, {}, UnsupportedError, "chunks of 9 rows"),
    "no context": ({"attention_context_left": 1}, {}, CheckpointError, "attention_context_left"),
    "all of it": ({"attention_context_left": 1 << 20}, {}, CheckpointError, "1048575 rows is not believed"),
    "a kernel": ({"conv_kernel_size": 1 << 20}, {}, CheckpointError, "1048576 rows are not believed"),
    "scores": ({"attention_invalid_logits_value": -50.0}, {}, UnsupportedError, "below -10000"),
    "no cap": ({"attention_logit_cap": 0.0}, {}, CheckpointError, "attention_logit_cap"),
    "heads": ({"num_attention_heads": 3}, {}, CheckpointError, "can't share"),
    "an odd size": ({"hidden_size": 41, "num_attention_heads": 1}, {}, CheckpointError, "must be even, not 41"),
    "layers": ({"num_hidden_layers": 1 << 20}, {}, CheckpointError, "at most 1024"),
    "channels": ({"subsampling_conv_channels": [36, 5, 2]}, {}, CheckpointError, "a list of two"),
    "no channels": ({"subsampling_conv_channels": [36, 0]}, {}, CheckpointError, "subsampling_conv_channels"),
    "bands": ({"subsampling_conv_channels": [40, 5]}, {}, CheckpointError, "34 bands become 9, and a matrix reads 10"),
    "an activation": ({"hidden_act": "relu"}, {}, UnsupportedError, "'relu'"),
    "clipped": ({"use_clipped_linears": "yes"}, {}, CheckpointError, "use_clipped_linears"),
    "a section": ({"rms_norm_eps": -1}, {}, CheckpointError, "rms_norm_eps"),
    "more bands": ({}, {"feature_size": 1 << 20}, CheckpointError, "1048576 bands"),
    "a rate": ({}, {"sampling_rate": 8000}, UnsupportedError, "sampling_rate 8000"),
    "longer frames": ({}, {"frame_length": 512}, UnsupportedError, "frame_length 512"),
    "longer frames, in time": ({}, {"frame_length_ms": 32.0}, UnsupportedError, "frame_length_ms 32"),
    "more points": ({}, {"fft_overdrive": True}, UnsupportedError, "fft_overdrive"),
    "preemphasis": ({}, {"preemphasis": 0.97}, UnsupportedError, "preemphasis 0.97"),
    "means": ({}, {"per_bin_mean": [0.0] * BINS}, UnsupportedError, "per_bin_mean"),
    "a floor": ({}, {"mel_floor": 1e-5}, UnsupportedError, "mel_floor 1e-05"),
    "frequencies": ({}, {"min_frequency": 125.0}, UnsupportedError, "min_frequency 125"),
}


def changed(source: Path, folder: Path, audio: dict[str, Any] | None, settings: dict[str, Any] | None = None) -> Path:
    """audio: of its section; None: there is none."""
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"] = None if audio is None else config["audio_config"] | audio
    (folder / "config.json").write_text(json.dumps(config))
    told = json.loads((folder / "preprocessor_config.json").read_text()) | (settings or {})
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_configs_that_no_tower_can_be_are_refused_by_name(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    audio, settings, kind, told = BROKEN[name]
    folder = changed(made("as published").folder, tmp_path, audio, settings)
    with open_checkpoint(folder) as checkpoint, pytest.raises(kind, match=told):
        read_hearing(checkpoint)


def test_settings_of_all_that_a_processor_does_are_read(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = changed(made("as published").folder, tmp_path, {}, {"feature_size": 1 << 20})
    extractor = json.loads((made("as published").folder / "preprocessor_config.json").read_text())
    whole = {"feature_extractor": extractor, "audio_seq_length": 750, "audio_ms_per_token": 40}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert open_ear(folder)[0] == open_ear(made("as published").folder)[0]


def test_a_model_without_such_a_tower_hears_nothing(made: Callable[[str], Made], tmp_path: Path) -> None:
    """26B-A4B and 31B say so; others may have lost it."""
    from safetensors.torch import load_file, save_file

    with open_checkpoint(changed(made("as published").folder, tmp_path, None)) as checkpoint:
        assert read_hearing(checkpoint) is None
    tensors = load_file(made("as published").folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if "audio" not in name}
    changed(made("as published").folder, tmp_path, {})
    save_file(kept, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert read_hearing(checkpoint) is None


LAYER = "model.audio_tower.layers.1."
BOUND, SCALE, KERNEL = (LAYER + name for name in (
    "self_attn.k_proj.output_max", "self_attn.per_dim_scale", "lconv1d.depthwise_conv1d.weight",
))  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop(BOUND), "1 missing: audio_tower.*k_proj.output_max"),
    (lambda t: t.pop(SCALE), "1 missing: audio_tower.*per_dim_scale"),
    (lambda t: t.pop("model.embed_audio.embedding_projection.weight"), "1 missing: embed_audio"),
    (lambda t: t.update({BOUND: torch.ones(2)}), r"1 of the wrong shape: .*k_proj.output_max \(expected \[1\], found \[2\]"),
    (lambda t: t.update({BOUND: torch.tensor(math.nan)}), "NaN, among .*k_proj"),
    (lambda t: t.update({KERNEL: t[KERNEL][:, :, :-1].contiguous()}), r"expected \[40, 1, 5\], found \[40, 1, 4\]"),
    (lambda t: t.update({f"{LAYER}other.weight": torch.ones(2)}), "1 not part of it: .*other.weight"),
])  # fmt: skip
def test_tensors_that_are_broken(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    changed(made("as published").folder, tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        spec = read_hearing(checkpoint)
        assert spec is not None
        with pytest.raises(CheckpointError, match=words):
            load_ear(checkpoint, spec, torch.float32)
        if "NaN" not in words:
            with pytest.raises(CheckpointError, match=words):
                ear_parts(checkpoint, spec)
