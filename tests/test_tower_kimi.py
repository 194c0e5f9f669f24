"""Kimi-VL and Kimi K2.5: configs as published, sizes of images and pixels as transformers has them, a Kimi-VL's rows, and what is
refused. Rows and answers of a K2.5: test_towers.py, test_vision.py."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from safetensors.torch import load_file, save_file

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.vision import turned_as
from seeing import kimi_vl
from test_image_pieces import read
from test_images import colours, saved
from test_towers import difference, draw, image, make, open_tower

TEXT = {"model_type": "deepseek_v3", "hidden_size": 2048}
KIMI_VL: dict[str, Any] = {
    "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "media_placeholder_token_id": 163605,
    "text_config": TEXT,
    "vision_config": {
        "model_type": "moonvit", "patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 1152,
        "intermediate_size": 4304, "merge_kernel_size": [2, 2], "init_pos_emb_height": 64, "init_pos_emb_width": 64,
    },
}  # fmt: skip
VL_IMAGES: dict[str, Any] = {
    "in_token_limit": 4096, "patch_size": 14, "num_pooled_tokens": 1024, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "pad_input": True, "merge_kernel_size": [2, 2],
}  # fmt: skip
K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "media_placeholder_token_id": 163605,
    "text_config": TEXT | {"model_type": "kimi_k2", "hidden_size": 7168},
    "vision_config": {
        "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger", "patch_size": 14,
        "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 7168,
        "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152, "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
    },
}  # fmt: skip
K25_IMAGES: dict[str, Any] = {"media_proc_cfg": {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
    "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
}}  # fmt: skip


def navit_resize_of_transformers() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Out of a module that can't be imported without torchvision."""
    found = importlib.util.find_spec("transformers.models.kimi_k25")
    assert found is not None
    assert found.submodule_search_locations is not None
    module = ast.parse((Path(found.submodule_search_locations[0]) / "image_processing_kimi_k25.py").read_text())
    module.body = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == "navit_resize"]
    scope: dict[str, Any] = {"math": math}
    exec(compile(module, "transformers", "exec"), scope)
    return scope["navit_resize"]  # type: ignore[no-any-return]


navit_resize = navit_resize_of_transformers()


def changed(config: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return config | own | {"vision_config": config["vision_config"] | vision}


def test_both_as_published() -> None:
    small, large = read(KIMI_VL, VL_IMAGES), read(K25, K25_IMAGES)
    for spec in small, large:
        tower = spec.tower
        assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1152, 27, 16, 4304)
        assert (tower.cell, tower.positions, tower.stretch, tower.theta) == (28, 4096, "bicubic", 1e4)
        assert tower.activation == "gelu_tanh"
        assert (spec.mean, spec.std, spec.has_grid, spec.least_tokens) == ((0.5,) * 3, (0.5,) * 3, False, 1)
        assert (spec.size.kind, spec.size.longest_side, spec.size.resample) == ("padded", 512 * 14, "bicubic")
    assert (small.tower.out_size, small.size.most_tiles) == (2048, 4096)
    assert (large.tower.out_size, large.size.most_tiles) == (7168, 16384)
    theirs = read(K25 | {"projection_hidden_size": 1152, "projection_layer_norm_eps": 1e-6},
                  {"max_patches": 4096, "size": {"max_height": 256, "max_width": 256}})  # fmt: skip
    assert (theirs.size.most_tiles, theirs.size.longest_side, theirs.tower.projector_eps) == (4096, 256 * 14, 1e-6)
    assert [hf_family(each).name for each in (KIMI_VL, K25)] == ["deepseek3", "deepseek3"]


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([1, 5, 64, 1000, 4096, 16384]))
@example(8192, 8192, 16384)
@example(9000, 45, 16384)
@example(27, 5400, 16)
@settings(max_examples=400, deadline=None)
def test_sizes_are_those_of_transformers_and_bounded(height: int, width: int, most: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    spec = read(KIMI_VL, VL_IMAGES | {"in_token_limit": most})
    found = fitted(spec.size, height, width)
    assert (found.first, found.whole) == navit_resize(height, width, 14, 2, most, 512)
    tokens = math.prod(found.whole) // 28**2
    assert tokens <= most_rows(spec) == most_tokens(spec)
    assert most_rows(spec) < 1.5 * most / 4 + 30 * math.sqrt(most) + 30


@pytest.mark.parametrize("tokens", [20, 100, 1000])
@given(st.integers(1, 9000), st.integers(1, 9000))
@settings(max_examples=100, deadline=None)
def test_an_image_has_no_more_tokens_than_asked_for(tokens: int, height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    spec = read(KIMI_VL, VL_IMAGES).limited(tokens)
    assert math.prod(fitted(spec.size, height, width).whole) // 28**2 <= tokens
    assert most_tokens(spec) <= tokens


@pytest.mark.parametrize(("height", "width"), [(700, 380), (30, 1111), (56, 56), (5, 9), (1400, 1500)])
def test_pixels_are_filled_up_with_black(height: int, width: int) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    (found,) = read_image(saved(picture, "PNG"), read(KIMI_VL, VL_IMAGES | {"in_token_limit": 1000}), "it").images
    (tall, wide), whole = navit_resize(height, width, 14, 2, 1000, 512)
    canvas = np.zeros((*whole, 3), np.uint8)
    canvas[:tall, :wide] = np.asarray(picture.resize((wide, tall), pillow.Resampling.BICUBIC))
    assert ((found.height, found.width), found.pixels) == (whole, canvas.tobytes())


def test_a_kimi_vls_rows_are_those_of_the_same_tower(tmp_path: Path) -> None:
    (tmp_path / "k25").mkdir()
    made = make("kimi", tmp_path / "k25")
    folder = kimi_vl(made.folder, tmp_path / "vl")
    spec, tower = open_tower(folder)
    assert (spec.tower.projector_eps, spec.size.most_tiles) == (1e-5, 4096)
    _, same = open_tower(made.folder)
    pixels = image(draw(24, 40))
    assert difference(tower(pixels).rows, same(pixels).rows) < 0.02  # whose projector's norm has another epsilon
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"vision_tower.patch_embed.pos_emb.time_weight": torch.ones(4, 1, 32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 not part of it"):
        open_tower(folder)
    tensors = load_file(made.folder / "model.safetensors")
    save_file(tensors | {"vision_tower.patch_embed.pos_emb.time_weight": torch.ones(4, 1, 32)}, made.folder / "model.safetensors")
    assert torch.equal(open_tower(made.folder)[1](pixels).rows, same(pixels).rows)


def test_rows_of_heads_in_every_order() -> None:
    """8 numbers of a head: of columns a, b and of lines c, d, each a pair of 0 and 1."""
    names = {
        "halves": ["c0", "d0", "a0", "b0", "c1", "d1", "a1", "b1"], "axes": ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"],
        "pairs": ["a0", "a1", "c0", "c1", "b0", "b1", "d0", "d1"],
    }  # fmt: skip
    known = sorted(names["halves"])
    for stored in names:
        for wanted in names:
            rows = torch.tensor([[known.index(name) + 10.0 * head] for head in range(2) for name in names[stored]])
            expected = torch.tensor([[known.index(name) + 10.0 * head] for head in range(2) for name in names[wanted]])
            assert torch.equal(turned_as(rows, 2, stored, wanted), expected)  # type: ignore[arg-type]
            assert torch.equal(turned_as(rows[:, 0], 2, stored, wanted), expected[:, 0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed(KIMI_VL, {"model_type": "siglip_vision_model"}), VL_IMAGES, "a tower of the kind 'siglip_vision_model'"),
    (changed(KIMI_VL, {"init_pos_emb_width": 32}), VL_IMAGES, "positions of other than a square"),
    (changed(KIMI_VL, {"merge_kernel_size": [2, 1]}), VL_IMAGES, "'merge_kernel_size' other than of a square"),
    (KIMI_VL, VL_IMAGES | {"pad_input": False}, "pad_input false"),
    (changed(K25, {"merge_type": "another"}), K25_IMAGES, "merge_type 'another'"),
    (changed(K25, {"mm_projector_type": "mlp"}), K25_IMAGES, "mm_projector_type 'mlp'"),
    (changed(K25, {"projector_hidden_act": "relu"}), K25_IMAGES, "projector_hidden_act 'relu'"),
    (K25, {"media_proc_cfg": K25_IMAGES["media_proc_cfg"] | {"fixed_output_tokens": 64}}, "fixed_output_tokens"),
    (K25, {"size": {"max_height": 512, "max_width": 256}}, "no square"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed(KIMI_VL, {"init_pos_emb_height": 1 << 20, "init_pos_emb_width": 1 << 20}), VL_IMAGES, "are not believed"),
    (changed(KIMI_VL, {"num_attention_heads": 5}), VL_IMAGES, "5 heads can't share 1152"),
    (KIMI_VL, VL_IMAGES | {"patch_size": 16}, "'patch_size' is 16"),
    (KIMI_VL, VL_IMAGES | {"in_token_limit": 1 << 24}, "are not believed"),
    (changed(K25, {"vt_num_hidden_layers": 10**6}), K25_IMAGES, "are believed"),
    (K25 | {"projection_hidden_size": 1024}, K25_IMAGES, "'projection_hidden_size' is 1024"),
    (K25, {"media_proc_cfg": K25_IMAGES["media_proc_cfg"] | {"patch_limit_on_one_side": 1 << 12}}, "are not believed"),
])  # fmt: skip
def test_what_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
