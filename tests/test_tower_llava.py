"""LLaVA 1.5, NeXT (1.6) and OneVision: their configs as published, how an image becomes squares and these become rows, a
conversation, and what is refused. Answers to prompts: test_vision.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.images.source import data_url
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.vision_spec import Image, PlacedImage, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.vision import load_tower, read_vision
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_vision import MODELS

CLIP_336 = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}  # fmt: skip
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "projector_hidden_act": "gelu", "vision_config": CLIP_336,
    "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
}  # fmt: skip
"""config.json of llava-hf/llava-1.5-7b-hf."""
LLAVA_IMAGES: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "resample": 3, "size": {"shortest_edge": 336},
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
NEXT: dict[str, Any] = LLAVA | {
    "architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": PINPOINTS,
    "text_config": {"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
                    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None,
                    "vocab_size": 32064},
}  # fmt: skip
NEXT_IMAGES = LLAVA_IMAGES | {"do_pad": True, "image_grid_pinpoints": PINPOINTS}
SIDES = [384 * i for i in range(1, 7)]
ONEVISION: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"], "vision_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": [[height, width] for height in SIDES for width in SIDES],
    "text_config": {"model_type": "qwen2", "hidden_size": 896, "tie_word_embeddings": True}, "vision_feature_layer": -1,
    "vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                      "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False},
    "vision_feature_select_strategy": "full",
}  # fmt: skip
"""config.json of llava-hf/llava-onevision-qwen2-0.5b-ov-hf."""
SHAPES = [(300, 400), (37, 700), (700, 37), (64, 64), (1, 150), (333, 16)]


def changed(config: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return config | own | {"vision_config": config["vision_config"] | vision}


def test_they_are_as_published() -> None:
    older, newer, onevision = read(LLAVA, LLAVA_IMAGES), read(NEXT, NEXT_IMAGES), read(ONEVISION)
    for tower in older.tower, newer.tower:
        assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1024, 23, 16, 4096)
        assert (tower.activation, tower.eps, tower.lead, tower.norm_placed) == ("quick_gelu", 1e-5, True, True)
        assert tower.out_size == tower.projector_size == 4096
    assert (older.size.kind, older.size.tile, older.least_tokens, older.tower.squares) == ("middle", 336, 576, 0)
    assert newer.size.grids == ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    assert (onevision.tower.num_layers, onevision.tower.squares, onevision.tower.lead) == (26, 9, False)
    assert onevision.least_tokens == 27 * 27 + 1
    assert (most_tokens(newer), len(onevision.size.grids)) == (576 * 5 + 48, 36)
    names = [hf_family(each).name for each in (LLAVA, NEXT, ONEVISION, LLAVA | {"text_config": {"model_type": "qwen2"}})]
    assert names == ["llama", "llava", "qwen2", "qwen2"]
    vicuna, mistral = (spec_from_hf(each, hf_family(each)) for each in (LLAVA, NEXT))
    assert (vicuna.num_layers, vicuna.hidden_size, vicuna.vocab_size, vicuna.attention.num_kv_heads) == (32, 4096, 32064, 32)
    assert (mistral.num_layers, mistral.attention.num_kv_heads, mistral.attention.window) == (32, 8, None)


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([NEXT, ONEVISION]), st.integers(1, 6000))
@example(336, 672, NEXT, 6000)
@example(2304, 2304, ONEVISION, 30000)
@example(1, 200, ONEVISION, 30000)
@settings(max_examples=400, deadline=None)
def test_squares_and_tokens_are_as_many_as_transformers_has(height: int, width: int, config: dict[str, Any], most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    spec = read(config)
    tile, side = spec.size.tile, spec.size.tile // 14
    best = select_best_resolution((height, width), config["image_grid_pinpoints"])
    found = fitted(spec.size, height, width)
    assert found.pieces == best
    assert found.grid is not None
    mosaic = Mosaic(*found.grid, height, width)
    images = SimpleNamespace(image_grid_pinpoints=config["image_grid_pinpoints"])
    if config is NEXT:
        processor: Any = LlavaNextProcessor.__new__(LlavaNextProcessor)
        processor.patch_size, processor.num_additional_image_tokens, processor.image_processor = 14, 0, images
    else:
        processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
        processor.num_image_tokens, processor.vision_aspect_ratio, processor.image_processor = side**2, "anyres_max_9", images
    count = mosaic.num_rows(side, spec.tower.squares)
    assert count == processor._get_number_of_features(height, width, tile, tile)
    assert count <= most_tokens(spec) <= most_rows(spec)
    assert mosaic.num_squares * (side * 14) ** 2 <= most_rows(spec) * 14**2
    limited = spec.limited(most)
    found = fitted(limited.size, height, width)
    count = Mosaic(*(found.grid or (0, 0)), height, width).num_rows(side, spec.tower.squares)
    assert count <= max(most, spec.least_tokens)


@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_are_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    size: Any = {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}}
    plain: Any = {"do_rescale": False, "do_normalize": False} | size
    vision = {"image_size": 30, "patch_size": 7}
    own = {"size": {"shortest_edge": 30}, "crop_size": 30}
    theirs: Any = CLIPImageProcessorPil(**plain)(images=[picture])["pixel_values"][0]
    (ours,) = read_image(saved(picture, "PNG"), read(changed(LLAVA, vision), own), "it").images
    assert (ours.height, ours.width) == (28, 28)  # no patch has what is cut off
    np.testing.assert_array_equal(np.frombuffer(ours.pixels, np.uint8).reshape(28, 28, 3), theirs[:, :28, :28].transpose(1, 2, 0))
    grids = [[30, 60], [60, 30], [60, 60], [30, 30]]
    config = changed(NEXT, vision, image_grid_pinpoints=grids)
    seen: Any = LlavaNextImageProcessorPil(**plain, image_grid_pinpoints=grids)(images=[picture])["pixel_values"][0]
    (ours,) = read_image(saved(picture, "PNG"), read(config, own), "it").images
    assert ours.mosaic is not None
    assert ours.mosaic[2:4] == shape
    pixels = np.frombuffer(ours.pixels, np.uint8).reshape(-1, 28, 28, 3).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(pixels, seen[..., :28, :28])


@pytest.mark.parametrize("name", ["llava-next", "llava-onevision"])
def test_rows_are_transformers_whatever_an_images_shape(name: str, tmp_path: Path) -> None:
    """OneVision's are made fewer where they would be many."""
    model = random_model(MODELS[name], auto=AutoModelForImageTextToText)
    with open_checkpoint(save(model, tmp_path)) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        tower = load_tower(checkpoint, spec, torch.float32)
    side = spec.size.tile
    size = {"height": side, "width": side}
    made = LlavaOnevisionImageProcessorPil if name == "llava-onevision" else LlavaNextImageProcessorPil
    processor: Any = made(size=size, crop_size=size, image_grid_pinpoints=MODELS[name].image_grid_pinpoints)
    for shape in SHAPES:
        picture = pillow.fromarray(colours(*shape, 3))
        seen = processor(images=[picture], return_tensors="pt")
        with torch.inference_mode():
            expected = model.model.get_image_features(seen["pixel_values"], seen["image_sizes"]).pooler_output[0]
        (image,) = read_image(saved(picture, "PNG"), spec, "it").images
        found = tower(image).rows
        assert len(found) == spec.placed(image, 0).num_tokens
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_image_for_which_there_is_room_for_one_square(tmp_path: Path) -> None:
    model = random_model(MODELS["llava-next"], auto=AutoModelForImageTextToText)
    with open_checkpoint(save(model, tmp_path)) as checkpoint:
        whole = read_vision(checkpoint)
        assert whole is not None
        tower = load_tower(checkpoint, whole, torch.float32)
    spec = whole.limited(20)
    (image,) = read_image(saved(pillow.fromarray(colours(30, 40, 3)), "PNG"), spec, "it").images
    assert image.mosaic == Mosaic(0, 0, 30, 40)
    found = tower(image).rows
    values = torch.from_numpy(np.frombuffer(image.pixels, np.uint8).reshape(1, 16, 16, 3).copy()).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (spec.mean, spec.std))
    with torch.inference_mode():
        seen = model.model.vision_tower((values - mean) / std, output_hidden_states=True).hidden_states[-2][0, 1:]
        first = model.model.multi_modal_projector(seen)
    torch.testing.assert_close(found, torch.cat([first, model.model.image_newline[None]]), rtol=1e-4, atol=1e-5)


def test_a_mosaic_that_nobody_made_is_refused() -> None:
    spec = read(NEXT, NEXT_IMAGES)
    pixels = bytes(3 * 336 * 336 * 3)
    fine = Image.of(336 * 3, 336, pixels, Mosaic(1, 2, 30, 40))
    placed = spec.placed(fine, 5)
    assert spec.fits([placed], placed.end)
    for wrong in (
        fine._replace(mosaic=None), fine._replace(mosaic=Mosaic(2, 1, 0, 40)), fine._replace(mosaic=Mosaic(1, 2, -1, 40)),
        fine._replace(mosaic=Mosaic(1, 1, 30, 40)), fine._replace(mosaic=Mosaic(1, 4, 30, 40)),
        fine._replace(width=168, height=2016),
    ):  # fmt: skip
        assert not spec.fits([PlacedImage(wrong, 5, 1, placed.columns)], placed.end)
    assert not spec.fits([placed._replace(columns=placed.columns - 1)], placed.end)
    assert not read(LLAVA, LLAVA_IMAGES).fits([placed], placed.end)
    assert fine.digest != Image.of(336 * 3, 336, pixels, Mosaic(1, 2, 30, 41)).digest


WORDS = ["<image>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|end|>"
)


def test_a_chat_about_two_images_is_transformers(tmp_path: Path) -> None:
    config = type(MODELS["llava-next"]).from_dict(MODELS["llava-next"].to_dict())
    config.text_config.vocab_size, config.image_token_index = 256 + len(WORDS), 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path)
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[1], chat_template=TEMPLATE)
    pictures = [pillow.fromarray(colours(30, 40, 3)), pillow.fromarray(colours(50, 9, 3))]
    urls = [data_url(saved(picture, "PNG")) for picture in pictures]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = [{"role": "user", "content": [parts[0], {"type": "text", "text": "and"}, parts[1]]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    size = {"height": 16, "width": 16}
    images: Any = LlavaNextImageProcessorPil(size=size, crop_size=size, image_grid_pinpoints=config.image_grid_pinpoints)
    seen = images(images=pictures, return_tensors="pt")
    processor: Any = LlavaNextProcessor.__new__(LlavaNextProcessor)
    processor.patch_size, processor.num_additional_image_tokens, processor.image_processor = 4, 1, images
    processor.vision_feature_select_strategy, processor.image_token = "default", "<image>"
    first, last = (processor.replace_image_token(seen, place).count("<image>") for place in range(2))
    ids = [*[256] * first, *b"\nand", *[256] * last, *b"\n", 257]
    assert list(prompt) == ids
    assert isinstance(prompt, TokenIds)
    given = {"input_ids": torch.tensor([ids]), "pixel_values": seen["pixel_values"], "image_sizes": seen["image_sizes"]}
    answer = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed(LLAVA, {"model_type": "eva"}), {}, "a tower of the kind 'eva'"),
    (LLAVA | {"vision_feature_layer": [-2, -5]}, {}, r"rows of 2 layers \(vision_feature_layer\)"),
    (LLAVA | {"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy 'full'"),
    (LLAVA | {"multimodal_projector_bias": False}, {}, "multimodal_projector_bias 'False'"),
    (LLAVA | {"text_config": {"model_type": "phi", "hidden_size": 8}}, {}, "unknown architecture 'phi'"),
    (LLAVA, LLAVA_IMAGES | {"do_pad": True}, "filled up to squares"),
    (LLAVA, LLAVA_IMAGES | {"do_center_crop": False}, "do_center_crop false"),
    (ONEVISION | {"vision_aspect_ratio": "anyres"}, {}, "vision_aspect_ratio 'anyres'"),
    (ONEVISION | {"vision_feature_select_strategy": "default"}, {}, "vision_feature_select_strategy 'default'"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (LLAVA | {"vision_feature_layer": -25}, {}, "'vision_feature_layer' is -25 in a tower of 24 layers"),
    (LLAVA | {"vision_feature_layer": 25}, {}, "'vision_feature_layer' is 25"),
    (LLAVA | {"vision_feature_layer": "last"}, {}, "'vision_feature_layer' is last"),
    (changed(LLAVA, {"image_size": 13}), {}, "images of 13 x 13 pixels in patches of 14"),
    (LLAVA, LLAVA_IMAGES | {"crop_size": 224}, "the tower reads 336 x 336 pixels, not 224"),
    (LLAVA, LLAVA_IMAGES | {"size": {"height": 336, "width": 448}}, "not 448"),
    (NEXT, NEXT_IMAGES | {"image_grid_pinpoints": PINPOINTS[1:]}, "'image_grid_pinpoints' are not those of config.json"),
    (NEXT | {"image_grid_pinpoints": []}, {}, "must be a list of heights and widths"),
    (NEXT | {"image_grid_pinpoints": [[336, 400]]}, {}, r"an image of \[336, 400\] pixels doesn't divide"),
    (NEXT | {"image_grid_pinpoints": [[0, 336]]}, {}, r"an image of \[0, 336\]"),
    (NEXT | {"image_grid_pinpoints": [[336 * 99, 336 * 99]]}, {}, "are not believed"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
