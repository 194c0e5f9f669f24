"""Qwen's Omnis, of which the part that thinks is read, with its eyes and ears: against transformers, from folders of that part
alone and of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import engine_for, random_model, run, save, worker_for
from hearing import a_sound
from hearing_kin import heard_by_transformers
from nanovllm_cli.hearing_spec import HearingSpec, Senses
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears_gguf import hearing_from_gguf
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import Image, Sound, TokenIds, VisionSpec
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.hearing import load_ear, read_hearing
from nanovllm_cli.weights.mmproj import load_ear_gguf, load_mmproj, open_mmproj, read_mmproj
from nanovllm_cli.weights.tensor_names import left_aside
from nanovllm_cli.weights.vision import load_tower, read_vision
from test_quant_engine import logits_of

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
from test_mmproj import with_merges  # noqa: E402
from test_models import QWEN_TEXT  # noqa: E402
from test_vision import QWEN_TOWER, an_image, seen_by_transformers  # noqa: E402

IMAGE, SOUND, LOOK, LISTEN = 512, 511, 510, 509
OUT = {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48}
EARS = {
    "encoder_layers": 3, "encoder_attention_heads": 2, "d_model": 32, "encoder_ffn_dim": 64, "num_mel_bins": 9, "n_window": 50,
    "n_window_infer": 200, "output_dim": 48,
}  # fmt: skip
IDS = {"vision_start_token_id": LOOK, "audio_start_token_id": LISTEN}
THINKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-omni": ("Qwen2_5Omni", {
        "text_config": QWEN_TEXT, "audio_config": EARS | {"n_window": 10, "max_source_positions": 25}, **IDS,
        "image_token_index": IMAGE, "video_token_index": 508, "audio_token_index": SOUND,
        "vision_config": QWEN_TOWER | OUT | {"window_size": 16, "fullatt_block_indexes": [2]},
    }),
    "qwen3-omni": ("Qwen3OmniMoe", {
        "text_config": QWEN_TEXT | {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 34},
        "audio_config": EARS | {"downsample_hidden_size": 5}, **IDS,
        "image_token_id": IMAGE, "video_token_id": 508, "audio_token_id": SOUND,
        "vision_config": QWEN_TOWER | OUT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    }),
}  # fmt: skip


def thinker_of(name: str) -> Any:
    family, config = THINKERS[name]
    kind = getattr(transformers, f"{family}ThinkerForConditionalGeneration")

    class Made:
        from_config = staticmethod(lambda config, attn_implementation: kind._from_config(config, attn_implementation="eager"))

    return random_model(getattr(transformers, f"{family}ThinkerConfig")(**config), auto=Made)


def as_published(folder: Path, architecture: str, **texts: Any) -> None:
    """The whole, with a part that speaks."""
    from safetensors.torch import load_file, save_file

    thinker = json.loads((folder / "config.json").read_text())
    del thinker["tie_word_embeddings"]
    thinker["text_config"] = {k: v for k, v in thinker["text_config"].items() if k != "tie_word_embeddings"} | texts
    whole = {"architectures": [architecture], "thinker_config": thinker, "talker_config": {"text_config": {"hidden_size": 8}}}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    spoken = "talker.model.layers.0.self_attn.k_proj.weight", "talker.model.norm.weight", "code2wav.decoder.0.conv.bias"
    save_file(tensors | {each: torch.ones(8) for each in spoken}, folder / "model.safetensors")


def prompt_with(senses: Senses, parts: list[int | Image | Sound]) -> TokenIds:
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(2, 500, (part,), generator=torch.Generator().manual_seed(len(ids))).tolist()
            continue
        if not (isinstance(part, Sound) and ids and ids[-1] == SOUND):  # a sound's further piece
            ids.append(LISTEN if isinstance(part, Sound) else LOOK)
        images.append(senses.by(part).placed(part, len(ids)))
        token = SOUND if isinstance(part, Sound) else IMAGE
        ids += [token] * images[-1].num_tokens
    return TokenIds(ids, images)


def perceived_by_transformers(model: Any, vision: VisionSpec, prompt: TokenIds) -> dict[str, torch.Tensor]:
    pictures = TokenIds(prompt, [each for each in prompt.images if isinstance(each.image, Image)])
    given = seen_by_transformers(model, vision, pictures, IMAGE) | {"attention_mask": torch.ones(1, len(prompt)).long()}
    del given["mm_token_type_ids"]
    sounds = TokenIds(prompt, [each for each in prompt.images if isinstance(each.image, Sound)])
    heard = heard_by_transformers("qwen2.5-omni", sounds)
    return given | {key: heard[key] for key in ("input_features", "feature_attention_mask")}


@pytest.mark.parametrize(("name", "whole"), [
    ("qwen2.5-omni", ""), ("qwen2.5-omni", "Qwen2_5OmniModel"), ("qwen3-omni", ""),
    ("qwen3-omni", "Qwen3OmniMoeForConditionalGeneration"),
])  # fmt: skip
def test_what_follows_is_what_transformers_has(name: str, whole: str, tmp_path: Path) -> None:
    model = thinker_of(name)
    save(model, tmp_path)
    if whole:
        as_published(tmp_path, whole)
    with open_checkpoint(tmp_path) as checkpoint:
        own = {each for each in checkpoint.names() if each.removeprefix("thinker.").startswith(("model.", "lm_head."))}
        assert left_aside(checkpoint, checkpoint.names()) == set(checkpoint.names()) - own
    worker = worker_for(tmp_path, dtype="float32")
    assert worker.sight is not None
    senses = worker.sight.senses
    vision, hearing = senses.vision, senses.hearing
    assert vision is not None
    parts: list[int | Image | Sound] = [5, an_image(vision, 3, 4), 2, an_image(vision, 5, 2), 6]
    assert isinstance(hearing, HearingSpec)
    long, short = ([20, 20, 13], 17) if name == "qwen2.5-omni" else ([133], 60)
    parts[2:2] = [3, *(a_sound(hearing, length) for length in long)]
    parts += [a_sound(hearing, short, 1), 2]
    prompt = prompt_with(senses, parts)
    asked = prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0)
    first, output = (run(engine_for(worker, token_work=work), [asked])[0] for work in (None, 10**12))
    answer = output.outputs[0]
    assert answer == first.outputs[0], "when all are read in one step, too"
    assert len(answer.token_ids) == 9
    assert answer.logprobs is not None
    rest = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**perceived_by_transformers(model, vision, rest)).logits[0, len(prompt) - 1 : -1]
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    actual = torch.tensor([each.logprob for each in answer.logprobs])
    torch.testing.assert_close(actual, logits.log_softmax(-1).max(-1).values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", THINKERS)
def test_a_file_made_of_it_answers_as_the_folder(name: str, tmp_path: Path) -> None:
    """And has what it sees by beside it, and the second's hears by. Its head is the embedding twice, as a config may have it."""
    folder = tmp_path / "model"
    thinker = thinker_of(name)
    if name == "qwen2.5-omni":  # with the windows that no file says
        thinker.config.audio_config.n_window, thinker.config.audio_config.max_source_positions = 100, 1500
    save(thinker, folder)
    with_merges(folder, ["<|image_pad|>", "<|IMAGE|>", "<|audio_pad|>"])
    as_published(folder, f"{THINKERS[name][0]}ForConditionalGeneration", tie_word_embeddings=True)
    with open_checkpoint(folder) as checkpoint:
        made = convert.plan(checkpoint, "gguf", "f32")
        convert.write(checkpoint, made, tmp_path / "model.gguf")
        prompt = list(range(3, 40))
        expected = logits_of(worker_for(folder, dtype="float32"), [prompt])
        assert torch.equal(logits_of(worker_for(tmp_path / "model.gguf", dtype="float32"), [prompt]), expected)
        assert made.tower is not None
        vision, hearing = read_vision(checkpoint), read_hearing(checkpoint)
        assert vision is not None
        assert hearing is not None
        image = an_image(vision, 4, 6)
        path = made.tower.write(tmp_path / "model.gguf", replace=False, progress=NullProgress()).path
        with open_mmproj(path) as file:
            tower = load_mmproj(file, vision, torch.float32)
            assert torch.equal(tower(image).rows, load_tower(checkpoint, vision, torch.float32)(image).rows)
            found = read_mmproj(file)
            assert found.vision is not None
            assert (found.hearing is not None) == (name == "qwen2.5-omni")
            if found.hearing is None:
                return
            sound = a_sound(hearing, 97)
            expected = load_ear(checkpoint, hearing, torch.float32)(sound).rows
            made_of_file = load_ear_gguf(file, found.hearing, torch.float32)(sound).rows  # whose convolutions are in float16
            torch.testing.assert_close(made_of_file, expected, rtol=0, atol=5e-3)
    check_against_llama_cpp(path, folder)


def check_against_llama_cpp(path: Path, folder: Path) -> None:
    """Names by gguf-py's own map, and what llama.cpp's converter adds."""
    file = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in file.fields.items()}
    told = [keys[f"clip.{each}"] for each in ("projector_type", "has_vision_encoder", "has_audio_encoder")]
    assert told == ["qwen2.5o", True, True]
    assert not {"clip.audio.projector_type", "clip.vision.projector_type"} & keys.keys()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)
    with open_checkpoint(folder) as checkpoint:
        own = [each.removeprefix("thinker.") for each in checkpoint.names() if "audio_tower" in each and "bos_eos" not in each]
    wanted = {names.get_name(each, (".weight", ".bias")) for each in own} | {"a.position_embd.weight"}
    tensors = {tensor.name: tensor.data for tensor in file.tensors if tensor.name.startswith(("a.", "mm.a."))}
    assert tensors.keys() == wanted
    angles = np.arange(1500)[:, None] * np.exp(-np.log(10000) / 15 * np.arange(16))[None]
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(tensors["a.position_embd.weight"], waves, atol=1e-6)


def test_ears_of_a_file_that_sees_are_no_asrs() -> None:
    """Of which llama.cpp's files have the same tower."""
    keys = {f"clip.audio.{key}": value for key, value in {
        "embedding_length": 32, "block_count": 1, "attention.head_count": 2, "feed_forward_length": 64, "num_mel_bins": 9,
        "projection_dim": 48, "projector_type": "qwen3a",
    }.items()}  # fmt: skip
    shapes = {"a.conv2d.1.weight": (5, 1, 3, 3)}
    found = []
    for sees in (False, True):
        read = ConfigReader(keys | {"clip.has_audio_encoder": True, "clip.has_vision_encoder": sees}, "the file")
        found.append(hearing_from_gguf(read, shapes))
    assert [(each.least, each.transcript.own) for each in found] == [(8000, "subject"), (0, "question")]
    assert found[0].tower == found[1].tower
