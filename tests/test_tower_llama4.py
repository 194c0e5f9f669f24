"""Llama 4: its config as published, which tiles an image is cut into, pixels, the text around tiles, and what is refused. Rows
and answers: test_towers.py, test_vision.py. transformers' image processor can't be imported without torchvision: its arithmetic
is taken out of its module, and Pillow makes the images."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers.models.llama4.processing_llama4 import Llama4Processor

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.vision_spec import Picture
from test_image_pieces import blank, read
from test_images import colours, saved

LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "image_token_index": 200092,
    "text_config": {"model_type": "llama4_text", "hidden_size": 5120},
    "vision_config": {
        "hidden_act": "gelu", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False, "norm_eps": 1e-5, "num_attention_heads": 16, "num_channels": 3,
        "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0,
        "projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000,
        "vision_feature_select_strategy": "default", "vision_output_dim": 4096,
    },
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "max_patches": 16, "resample": 2, "rescale_factor": 1 / 255, "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
}  # fmt: skip


class Size(NamedTuple):
    height: int
    width: int


def of_transformers() -> dict[str, Any]:
    found = importlib.util.find_spec("transformers.models.llama4")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = (Path(found.submodule_search_locations[0]) / "image_processing_llama4.py").read_text()
    names = "get_factors", "get_max_res_without_distortion", "find_supported_resolutions", "get_best_fit"
    module = ast.parse(source)
    module.body = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name in names]
    scope: dict[str, Any] = {"torch": torch, "math": math, "defaultdict": defaultdict, "lru_cache": lru_cache, "SizeDict": object}
    exec(compile(module, "transformers", "exec"), scope)
    return scope


THEIRS = of_transformers()


@lru_cache
def canvases(most: int, side: int) -> torch.Tensor:
    """Heights and widths of all that an image may be laid on."""
    found: torch.Tensor = torch.tensor(THEIRS["find_supported_resolutions"](max_num_chunks=most, patch_size=Size(side, side)))
    return found


def laid(height: int, width: int, most: int, side: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sides of the canvas, and of what of it the image takes, as `Llama4ImageProcessor._preprocess` has them."""
    tall, wide = THEIRS["get_best_fit"]((height, width), canvases(most, side)).tolist()
    room = min(max(height, side), tall), min(max(width, side), wide)
    inner_tall, inner_wide = THEIRS["get_max_res_without_distortion"]((height, width), room)
    return (tall, wide), (max(inner_tall, 1), max(inner_wide, 1))


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return LLAMA4 | own | {"vision_config": LLAMA4["vision_config"] | vision}


def test_it_is_as_published() -> None:
    spec = read(LLAMA4, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size, tower.out_size) == (
        1408, 34, 16, 5632, 5120,
    )  # fmt: skip
    assert (tower.cell, tower.positions, tower.projector_size, tower.theta, tower.lead) == (28, 576, 4096, 1e4, True)
    assert (spec.size.tile, spec.size.most_tiles, spec.size.resample, spec.has_grid) == (336, 16, "bilinear", False)
    assert (spec.least_tokens, most_rows(spec), most_tokens(spec)) == (144, 144, 17 * 144)
    assert hf_family(LLAMA4).name == "llama4"
    assert most_tokens(spec.limited(5 * 144)) == 5 * 144


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 17))
@example(300, 300, 16)
@example(672, 672, 4)
@example(5376, 336, 16)
@settings(max_examples=400, deadline=None)
def test_an_image_is_laid_out_as_transformers_does_it(height: int, width: int, most: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    rule = read(LLAMA4, IMAGES | {"max_patches": most}).size
    found, (canvas, inner) = fitted(rule, height, width), laid(height, width, most, 336)
    assert found.whole == (336, 336)
    assert found.pieces == (None if canvas == (336, 336) else canvas)
    assert found.first == inner


@pytest.mark.parametrize(("height", "width"), [(700, 380), (300, 1111), (200, 200), (50, 400), (336, 336), (1400, 1500)])
def test_pixels_are_laid_on_black_and_cut(height: int, width: int) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    found = read_image(saved(picture, "PNG"), read(LLAMA4, IMAGES), "it")
    (tall, wide), (inner_tall, inner_wide) = laid(height, width, 16, 336)
    canvas = np.zeros((tall, wide, 3), np.uint8)
    canvas[:inner_tall, :inner_wide] = np.asarray(picture.resize((inner_wide, inner_tall), pillow.Resampling.BILINEAR))
    rows, columns = tall // 336, wide // 336
    tiles = [canvas[i * 336 : i * 336 + 336, j * 336 : j * 336 + 336] for i in range(rows) for j in range(columns)]
    if len(tiles) > 1:
        assert (found.rows, found.columns) == (rows, columns)
        tiles.append(np.asarray(picture.resize((336, 336), pillow.Resampling.BILINEAR)))
    assert [each.pixels for each in found.images] == [each.tobytes() for each in tiles]


@pytest.mark.parametrize("picture", [blank(1), blank(3, 1, 2), blank(13, 4, 3), blank(5, 4, 1)])
def test_the_text_around_tiles_is_transformers(picture: Picture) -> None:
    """Of tokens for a tile there is one, as for an image in ours."""
    processor: Any = Llama4Processor.__new__(Llama4Processor)
    shape = (picture.rows, picture.columns) if picture.rows else (1, 1)
    assert read(LLAMA4, IMAGES).tokens.text(picture) == processor._prompt_split_image(shape, 1)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"hidden_act": "silu"}), IMAGES, "hidden_act 'silu'"),
    (changed({"norm_eps": 1e-6}), IMAGES, "norm_eps '1e-06'"),
    (changed({"multi_modal_projector_bias": True}), IMAGES, "multi_modal_projector_bias 'True'"),
    (changed({"model_type": "clip_vision_model"}), IMAGES, "a tower of the kind 'clip_vision_model'"),
    (changed({"rope_parameters": {"rope_type": "yarn"}}), IMAGES, "rotary positions of the type 'yarn'"),
    (LLAMA4, IMAGES | {"resize_to_max_canvas": True}, "resize_to_max_canvas"),
    (LLAMA4, IMAGES | {"do_resize": False}, "do_resize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"pixel_shuffle_ratio": 0.3}), IMAGES, "'pixel_shuffle_ratio' must be"),
    (changed({"pixel_shuffle_ratio": 1e-9}), IMAGES, "'pixel_shuffle_ratio' must be"),
    (changed({"intermediate_size": 4096}), IMAGES, "'intermediate_size' is 4096, where 5632 numbers are read"),
    (changed({"projector_input_dim": 1024}), IMAGES, "'projector_input_dim' is 1024, where 4096"),
    (changed({"vision_output_dim": 7680}), IMAGES, "'vision_output_dim' is 7680, where 4096"),
    (changed({"image_size": 350}), IMAGES, "don't divide into tokens"),
    (changed({"image_size": 1 << 20}), IMAGES, "don't divide"),
    (changed({"num_attention_heads": 9}), IMAGES, "9 heads can't share 1408"),
    (LLAMA4, IMAGES | {"size": {"height": 448, "width": 448}}, r"pieces of 336 x 336 pixels, not \[448\]"),
    (LLAMA4, IMAGES | {"max_patches": 1 << 12}, "are not believed"),
])  # fmt: skip
def test_what_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
