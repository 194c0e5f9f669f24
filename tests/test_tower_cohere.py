"""Aya Vision and Command A Vision: their configs as published, how an image is cut, the text around its pieces, and what is
refused. Rows and answers: test_towers.py, test_vision.py."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Picture
from test_image_pieces import blank, read
from test_images import colours, saved, seeing

AYA: dict[str, Any] = {
    "architectures": ["AyaVisionForConditionalGeneration"], "model_type": "aya_vision", "downsample_factor": 2,
    "adapter_layer_norm_eps": 1e-06, "image_token_index": 255036, "vision_feature_layer": -1,
    "alignment_intermediate_size": 28672, "vision_feature_select_strategy": "full",
    "text_config": {"model_type": "cohere2", "hidden_size": 4096},
    "vision_config": {"hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
}  # fmt: skip
AYA_IMAGES: dict[str, Any] = {
    "crop_to_patches": True, "max_patches": 12, "min_patches": 1, "resample": 3, "size": {"height": 364, "width": 364},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
COMMAND: dict[str, Any] = {
    "architectures": ["Cohere2VisionForConditionalGeneration"], "alignment_intermediate_size": 36864, "downsample_factor": 2,
    "text_config": {"model_type": "cohere2", "hidden_size": 12288},
    "vision_config": {"hidden_size": 1152, "image_size": 512, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 16},
}  # fmt: skip
COMMAND_IMAGES: dict[str, Any] = {
    "crop_to_patches": True, "max_patches": 12, "min_patches": 1, "patch_size": 16, "size": {"height": 512, "width": 512},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def canvas_of_transformers() -> Callable[..., tuple[int, int]]:
    """How a Command A Vision's processor chooses, out of a module that can't be imported without torchvision."""
    found = importlib.util.find_spec("transformers.models.cohere2_vision")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = (Path(found.submodule_search_locations[0]) / "image_processing_cohere2_vision.py").read_text()
    names = "get_all_supported_aspect_ratios", "get_optimal_tiled_canvas"
    module = ast.parse(source)
    module.body = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name in names]
    scope: dict[str, Any] = {"np": np, "lru_cache": functools.lru_cache}
    exec(compile(module, "transformers", "exec"), scope)
    return scope[names[1]]


get_optimal_tiled_canvas = canvas_of_transformers()


def changed(config: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return config | own | {"vision_config": config["vision_config"] | vision}


def test_both_as_published() -> None:
    aya, command = read(AYA, AYA_IMAGES), read(COMMAND, COMMAND_IMAGES)
    for spec in aya, command:
        assert (spec.tower.hidden_size, spec.tower.num_layers, spec.tower.num_heads) == (1152, 27, 16)
        assert (spec.tower.joins, spec.mean, spec.std, spec.has_grid) == (4, (0.5,) * 3, (0.5,) * 3, False)
    assert (aya.tower.projector_size, aya.tower.projector_eps, aya.tower.post_norm) == (14336, 1e-6, False)
    assert (command.tower.projector_size, command.tower.projector_eps, command.tower.post_norm) == (18432, 0, True)
    assert (aya.least_tokens, command.least_tokens) == (13 * 13, 16 * 16)
    assert aya.size == SizeRule("canvas", 28, tile=364, least_tiles=1, most_tiles=12)
    assert command.size == SizeRule("canvas", 32, tile=512, least_tiles=1, most_tiles=12, nearest="size")
    assert read(COMMAND, COMMAND_IMAGES | {"crop_to_patches": False}).size.most_tiles == 1
    older = AYA | {"text_config": {"model_type": "cohere", "hidden_size": 8192}}
    assert [hf_family(each).name for each in (AYA, COMMAND, older)] == ["cohere2", "cohere2", "cohere"]


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 14))
@example(512, 512, 12)
@example(6144, 512, 12)
@settings(max_examples=400, deadline=None)
def test_how_an_image_is_cut_is_transformers(height: int, width: int, most: int) -> None:
    rule = replace(read(COMMAND, COMMAND_IMAGES).size, most_tiles=most)
    columns, rows = get_optimal_tiled_canvas((height, width), (512, 512), 1, most)
    found = fitted(rule, height, width)
    assert found.whole == (512, 512)
    assert found.pieces == ((rows * 512, columns * 512) if rows * columns > 1 else None)
    spec = replace(seeing(rule), size=rule)
    assert (1 + rows * columns) * 16**2 <= most_tokens(spec) or rows * columns == 1


@pytest.mark.parametrize(("height", "width"), [(700, 380), (300, 1111), (200, 200)])
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    ours = read_image(saved(picture, "PNG"), read(AYA, AYA_IMAGES), "it")
    theirs: Any = GotOcr2ImageProcessorPil(**AYA_IMAGES | {"do_rescale": False, "do_normalize": False})(images=[picture])
    assert [each.pixels for each in ours.images] == [each.transpose(1, 2, 0).tobytes() for each in theirs["pixel_values"]]
    ours = read_image(saved(picture, "PNG"), read(COMMAND, COMMAND_IMAGES), "it")
    columns, rows = get_optimal_tiled_canvas((height, width), (512, 512), 1, 12)
    assert len(ours.images) == (rows * columns + 1 if rows * columns > 1 else 1)
    large = picture.resize((columns * 512, rows * 512), pillow.Resampling.BICUBIC)
    for place, image in enumerate(ours.images[:-1]):
        row, column = divmod(place, columns)
        assert image.pixels == large.crop((column * 512, row * 512, column * 512 + 512, row * 512 + 512)).tobytes()
    assert ours.images[-1].pixels == picture.resize((512, 512), pillow.Resampling.BICUBIC).tobytes()


@pytest.mark.parametrize("picture", [blank(1), blank(3, 1, 2), blank(13, 4, 3)])
def test_the_text_around_pieces_is_transformers(picture: Picture) -> None:
    """Of tokens for a piece there is one, as for an image in ours."""
    aya: Any = AyaVisionProcessor.__new__(AyaVisionProcessor)
    aya.img_size, aya.patch_size, aya.img_patch_token, aya.tile_token = 1, 1, "<|IMG_PATCH|>", "TILE"
    aya.tile_global_token, aya.start_of_img_token, aya.end_of_img_token = "TILE_GLOBAL", "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    command: Any = Cohere2VisionProcessor.__new__(Cohere2VisionProcessor)
    command.patch_size, command.boi_token, command.eoi_token = 1, "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    command.image_token, command.img_line_break_token = "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"
    told = {"num_patches": [len(picture.images)]}
    for processor, config, images in (aya, AYA, AYA_IMAGES), (command, COMMAND, COMMAND_IMAGES):
        assert read(config, images).tokens.text(picture) == processor.replace_image_token(told, 0)


@pytest.mark.parametrize(("config", "images", "words"), [
    (AYA | {"vision_feature_layer": -2}, AYA_IMAGES, "vision_feature_layer '-2'"),
    (AYA | {"vision_feature_select_strategy": "default"}, AYA_IMAGES, "vision_feature_select_strategy 'default'"),
    (AYA | {"text_config": {"model_type": "llama", "hidden_size": 64}}, AYA_IMAGES, "unknown architecture 'llama'"),
    (changed(COMMAND, {"model_type": "clip_vision_model"}), COMMAND_IMAGES, "a tower of the kind 'clip_vision_model'"),
    (COMMAND, COMMAND_IMAGES | {"do_normalize": False}, "do_normalize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (AYA | {"alignment_intermediate_size": 7}, AYA_IMAGES, "'alignment_intermediate_size' must be even, not 7"),
    (AYA | {"downsample_factor": 4}, AYA_IMAGES, "images of 364 x 364 pixels don't divide into tokens of 56 x 56"),
    (changed(AYA, {"image_size": 1 << 20}), AYA_IMAGES, "don't divide"),
    (changed(AYA, {"num_attention_heads": 7}), AYA_IMAGES, "7 heads can't share 1152"),
    (AYA, AYA_IMAGES | {"size": {"height": 384, "width": 364}}, r"pieces of 364 x 364 pixels, not \[364, 384\]"),
    (COMMAND, COMMAND_IMAGES | {"patch_size": 14}, "'patch_size' is 14 for pieces of 16 x 16 tokens"),
    (COMMAND, COMMAND_IMAGES | {"min_patches": 13}, "13 to 12 pieces"),
    (COMMAND, COMMAND_IMAGES | {"max_patches": 1 << 12}, "are not believed"),
])  # fmt: skip
def test_what_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
