"""FastVLM: its config as published, pixels and prompts, answers about an image, what is refused; and the tower that tests compare
with against timm's, where that is installed. Rows, steps: test_towers.py, test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import fastvit
from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.fastvit_spec import FastVitSpec
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import most_rows, most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.vision_spec import Image, TowerSpec
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_sees_by_no_file, with_merges
from test_tower_memory import Held
from test_vision import MODELS

FAST: dict[str, Any] = {
    "architectures": ["FastVlmForConditionalGeneration"], "image_seq_length": 256, "image_token_index": 151646,
    "model_type": "fast_vlm", "multimodal_projector_bias": True, "projector_hidden_act": "gelu",
    "text_config": {"hidden_size": 896, "intermediate_size": 4864, "model_type": "qwen2", "num_attention_heads": 14,
                    "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1e6, "vocab_size": 152000},
    "tie_word_embeddings": True, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    "vision_config": {"architecture": "fastvit_mci3", "do_pooling": True, "global_pool": "avg", "hidden_size": 3072,
                      "model_args": {"inference_mode": True}, "model_type": "timm_wrapper", "num_classes": 0},
}  # fmt: skip
"""config.json of a FastVLM of 0.5B as transformers has it, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "crop_size": {"height": 1024, "width": 1024}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0], "resample": 3,
    "size": {"shortest_edge": 1024},
}  # fmt: skip
SMALL_IMAGES = IMAGES | {"crop_size": {"height": 128, "width": 128}, "size": {"shortest_edge": 128}}
WORDS = ["<image>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return FAST | own | {"vision_config": FAST["vision_config"] | vision}


def told(**arguments: Any) -> dict[str, Any]:
    return changed({"model_args": {"inference_mode": True} | arguments})


def test_it_is_as_published() -> None:
    spec = read(FAST, IMAGES)
    tower, fast = spec.tower, spec.tower.fastvit
    assert fast == FastVitSpec((2, 12, 24, 4, 2), (96, 192, 384, 768, 1536))
    assert (tower.cell, tower.num_stages, tower.hidden_size, tower.out_size, tower.projector_size) == (64, 44, 3072, 896, 896)
    assert (spec.size.kind, spec.size.tile, spec.mean, spec.std) == ("middle", 1024, (0, 0, 0), (1, 1, 1))
    assert spec.least_tokens == most_rows(spec) == most_tokens(spec) == 256
    shapes = tower_shapes(tower)
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("projector.")}
    assert sum(int(np.prod(shape)) for name, shape in shapes.items() if not name.endswith((".mean", ".variance"))) == 122_714_208
    assert len(shapes) == 584  # both as timm has it
    assert read(changed({"architecture": "fastvit_mci3.apple_mclip2_dfndr2b"}), IMAGES) == spec
    text = spec_from_hf(FAST, hf_family(FAST))
    assert (text.num_layers, text.attention.num_kv_heads, text.tied_head) == (24, 2, True)


@pytest.mark.parametrize("shape", [(61, 97), (300, 150), (64, 64)])
def test_pixels_are_those_of_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    theirs: Any = CLIPImageProcessorPil(**SMALL_IMAGES | {"do_rescale": False, "do_normalize": False})
    (expected,) = theirs(images=[picture])["pixel_values"]
    (found,) = read_image(saved(picture, "PNG"), read(FAST, SMALL_IMAGES), "it").images
    assert found.pixels == expected.astype(np.uint8).transpose(1, 2, 0).tobytes()


def test_answers_about_an_image_are_transformers(tmp_path: Path) -> None:
    config = type(MODELS["fastvlm"]).from_dict(MODELS["fastvlm"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_index = 1024, 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    (folder / "preprocessor_config.json").write_text(json.dumps(SMALL_IMAGES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[2], chat_template=TEMPLATE)
    picture = pillow.fromarray(colours(90, 60, 3))
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    said = [{"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    seen = CLIPImageProcessorPil(**SMALL_IMAGES)(images=[picture], return_tensors="pt")
    names: Any = LlavaProcessor.__new__(LlavaProcessor)
    names.image_token, names.patch_size, names.num_additional_image_tokens = "<image>", 64, 0
    names.vision_feature_select_strategy = "full"
    assert names.replace_image_token(seen, 0) == "<image>" * 4
    ids = [257, *b"user\n", *[256] * 4, *b"\nWhat is it?", 258, *b"\n", 257, *b"assistant\n"]
    assert list(prompt) == ids
    answer = model.generate(
        torch.tensor([ids]), pixel_values=seen["pixel_values"], max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    check_sees_by_no_file(with_merges(folder, WORDS))


def test_what_is_compared_with_is_timms() -> None:
    timm = pytest.importorskip("timm")
    arguments = fastvit.vision()["model_args"]
    ours = fastvit.FastViTHD(arguments["layers"], arguments["embed_dims"]).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in ours.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    theirs = timm.create_model("fastvit_mci3", num_classes=0, **arguments).eval()
    theirs.load_state_dict(ours.state_dict())
    for sides in ((64, 64), (192, 128)):
        image = torch.rand(1, 3, *sides, generator=generator)
        with torch.inference_mode():
            torch.testing.assert_close(ours(image), theirs.forward_features(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", [(8, 16, 32, 32, 64), (96, 96, 96, 96, 96)])
def test_what_it_takes_is_told(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    fast = FastVitSpec((1, 1, 1, 1, 1), widths)
    spec = TowerSpec(64, 1, 2 * widths[-1], 5, 1, 1, 24, "gelu", "layer", 1e-5, "joined", 0.0, projector_size=24, fastvit=fast)
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, image = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(256, 256, bytes(3 * 256 * 256))
    with torch.inference_mode(), Held() as held:
        tower(image)
    assert held.most <= work_bytes(spec, 256 * 256, dtype) <= 1.5 * held.most


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({"architecture": "resnet50"}), {}, UnsupportedError, "a tower of the architecture 'resnet50'"),
    (changed({"model_type": "clip_vision_model"}), {}, UnsupportedError, "a tower of the kind 'clip_vision_model'"),
    (changed({"model_args": {}}), {}, UnsupportedError, "branches of training"),
    (told(inference_mode=False), {}, UnsupportedError, "branches of training"),
    (told(features_only=True), {}, UnsupportedError, "'features_only' is not supported"),
    (changed({}, vision_feature_layer=-2), {}, UnsupportedError, "vision_feature_layer '-2'"),
    (changed({}, vision_feature_select_strategy="default"), {}, UnsupportedError, "vision_feature_select_strategy 'default'"),
    (changed({}, projector_hidden_act="relu"), {}, UnsupportedError, "projector_hidden_act 'relu'"),
    (changed({}, multimodal_projector_bias=False), {}, UnsupportedError, "multimodal_projector_bias 'False'"),
    (FAST, {"do_center_crop": False}, UnsupportedError, "do_center_crop false"),
    (FAST, {"do_pad": True}, UnsupportedError, "do_pad"),
    (changed({"architecture": None}), {}, CheckpointError, "has no 'architecture'"),
    (changed({"hidden_size": 768}), {}, CheckpointError, "'hidden_size' is 768, and the tower's 3072"),
    (told(layers=[2, 12]), {}, CheckpointError, "'layers' must be a list of 5 numbers"),
    (told(layers=[2, 12, 24, 4, 1 << 20]), {}, CheckpointError, "asks for 1048618 layers"),
    (told(embed_dims=[96, 192, 384, 768, 1000]), {}, CheckpointError, "'embed_dims' must be multiples"),
    (told(embed_dims=[8, 16, 24, 48, 48]), {}, CheckpointError, "the last two of 32"),
    (FAST, {"crop_size": {"height": 1000, "width": 1000}}, CheckpointError, "1000 x 1000 pixels don't divide"),
    (FAST, {"crop_size": {"height": 1024, "width": 512}}, CheckpointError, "1024 x 1024 pixels, not 512"),
    (FAST, {"size": {"shortest_edge": 512}}, CheckpointError, "1024 x 1024 pixels, not 512"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
