"""Gemma 4's vision tower against transformers: tiny random models, written as transformers writes them, and read; and what its
configs say."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models import tower_attention
from nanovllm_cli.models.tower_attention import TorchAttention
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Image, ImageTokens, TowerSpec, VisionSpec
from nanovllm_cli.weights.vision import vision_bytes
from test_towers import TEXT, Made, Rows, copy, difference, draw, image, open_tower
from test_vision_config import read, write

VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "patch_size": 4, "position_embedding_size": 30, "rms_norm_eps": 1e-3,
}  # fmt: skip
AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 2]}
MADE: dict[str, dict[str, Any]] = {
    "small": {"vision_config": VISION | {"use_clipped_linears": True}, "audio_config": AUDIO},
    "large": {
        "vision_config": VISION | {"standardize": True, "pooling_kernel_size": 2, "hidden_size": 40, "head_dim": 20},
        "audio_config": None,
    },
}
GRIDS = [(1, 1), (3, 5), (7, 2), (1, 9)]
"""Of tokens, lines first."""


def make(name: str, folder: Path) -> Made:
    bidirectional = "vision" if name == "large" else None
    text = TEXT | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": bidirectional}
    model = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=text, **MADE[name])).eval()
    generator = torch.Generator().manual_seed(1)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        drawn = torch.randn(tensor.shape, generator=generator)
        if key.endswith("_min"):
            tensor.data = -0.5 - drawn.abs()
        elif key.endswith("_max"):
            tensor.data = 0.5 + drawn.abs()
        elif "inv_freq" not in key:
            is_gain = tensor.dim() == 1 and not key.endswith("std_bias")
            tensor.data = 1 + drawn / 4 if is_gain else drawn / (tensor.shape[-1] ** 0.5 if key.endswith("weight") else 1)
    model.save_pretrained(folder)
    pooled = model.config.vision_config.pooling_kernel_size
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=pooled, max_soft_tokens=70)
    images.save_pretrained(folder)

    def rows(pixels: np.ndarray) -> Rows:
        given = images(images=[pixels], do_resize=False, return_tensors="pt")
        with torch.no_grad():
            found = model.model.get_image_features(given["pixel_values"], given["image_position_ids"]).pooler_output
        return torch.cat(list(found)), []

    return Made(folder, rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """By name; each is made once."""
    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("by", ["our kernels", "torch"])
@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_transformers(
    name: str, by: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "torch":  # as on a GPU
        monkeypatch.setattr(tower_attention, "PagedAttention", lambda *given: TorchAttention(*given[:3], given[4]))
    spec, tower = open_tower(made(name).folder)
    cell = spec.tower.cell
    assert cell == (12 if name == "small" else 8)
    for rows, columns in GRIDS:
        pixels = draw(rows * cell, columns * cell)
        found = tower(image(pixels)).rows
        assert len(found) == rows * columns
        assert difference(found, made(name).rows(pixels)[0]) < 1e-5


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(name: str, dtype: torch.dtype, made: Callable[[str], Made]) -> None:
    spec, tower = open_tower(made(name).folder, dtype)
    pixels = draw(5 * spec.tower.cell, 3 * spec.tower.cell)
    found = tower(image(pixels)).rows
    assert found.dtype == dtype
    expected = made(name).rows(pixels)[0]
    assert (found.float() - expected).norm() < (0.04 if dtype == torch.bfloat16 else 0.006) * expected.norm()


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_bytes_told_are_those_of_the_weights(
    name: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm_cli.weights.vision.tower_of", lambda spec, tensors, *others: tensors)
    spec, tensors = open_tower(made(name).folder, torch.bfloat16)
    assert vision_bytes(spec, torch.bfloat16) == sum(each.nbytes for each in tensors.values())  # type: ignore[attr-defined]


def test_an_mlp_is_computed_in_parts(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm_cli.models.tower.ROWS_TOGETHER", 7)
    spec, tower = open_tower(made("small").folder)
    pixels = draw(2 * spec.tower.cell, 3 * spec.tower.cell)
    assert difference(tower(image(pixels)).rows, made("small").rows(pixels)[0]) < 1e-5


NAMES = [("model.", ""), ("model.vision_tower.", "vision_tower."), ("model.embed_vision.", "embed_vision.")]


@pytest.mark.parametrize(("old", "new"), NAMES)
def test_tensors_are_found_under_every_prefix(old: str, new: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    tensors = load_file(made("small").folder / "model.safetensors")
    assert any(name.startswith("model.audio_tower.") for name in tensors)  # which is left aside
    renamed = {name.replace(old, new, 1) if "vision" in name else name: tensor for name, tensor in tensors.items()}
    folder = copied(made("small").folder, tmp_path, renamed)
    pixels = image(draw(24, 36))
    assert torch.equal(open_tower(folder)[1](pixels).rows, open_tower(made("small").folder)[1](pixels).rows)


def copied(source: Path, folder: Path, tensors: dict[str, torch.Tensor], vision: dict[str, Any] | None = None) -> Path:
    config = json.loads((source / "config.json").read_text())
    return copy(source, folder, tensors, {"vision_config": config["vision_config"] | (vision or {})})


LAYER = "model.vision_tower.encoder.layers.1."
BOUND, TABLE = f"{LAYER}mlp.up_proj.output_max", "model.vision_tower.patch_embedder.position_embedding_table"


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop(BOUND), "1 missing: vision_tower.*mlp.up_proj.output_max"),
    (lambda t: t.update({BOUND: torch.ones(2)}), r"1 of the wrong shape: .*up_proj.output_max \(expected \[1\], found \[2\]"),
    (lambda t: t.update({BOUND: torch.tensor(math.nan)}), "NaN, among .*up_proj"),
    (lambda t: t.update({TABLE: t[TABLE][:, :-1].contiguous()}), r"expected \[2, 30, 32\], found \[2, 29, 32\]"),
    (lambda t: t.update({TABLE: t[TABLE][:1].contiguous()}), "of the wrong shape"),
    (lambda t: t.pop("model.embed_vision.embedding_projection.weight"), "1 missing: embed_vision.embedding_projection.weight"),
    (lambda t: t.update({"model.vision_tower.std_bias": torch.zeros(32)}), "1 not part of it: model.vision_tower.std_bias"),
    (lambda t: t.update({f"{LAYER}self_attn.q_norm.weight": torch.ones(32)}), r"expected \[16\], found \[32\]"),
])  # fmt: skip
def test_tensors_that_do_not_match_are_told(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    tensors = load_file(made("small").folder / "model.safetensors")
    change(tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_tower(copied(made("small").folder, tmp_path, tensors))
    assert caught.value.hint


def test_bounds_that_are_infinite_are_none(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As in what transformers makes anew."""
    tensors = load_file(made("small").folder / "model.safetensors")
    bounds = [name for name in tensors if "vision" in name and name.endswith(("_min", "_max"))]
    assert len(bounds) == 3 * 7 * 4
    free = {name: torch.full((), math.copysign(math.inf, tensors[name])) for name in bounds}
    (without := tmp_path / "without").mkdir()
    plain = copied(made("small").folder, without, {name: each for name, each in tensors.items() if name not in free},
                   {"use_clipped_linears": False})  # fmt: skip
    pixels = image(draw(24, 36))
    found = [open_tower(folder)[1](pixels).rows for folder in (copied(made("small").folder, tmp_path, tensors | free), plain)]
    assert difference(*found) < 1e-6
    assert difference(found[0], open_tower(made("small").folder)[1](pixels).rows) > 0.1


E4B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {"hidden_size": 2560, "model_type": "gemma4_text", "use_bidirectional_attention": None},
    "vision_config": {
        "attention_bias": False, "default_output_length": 280, "global_head_dim": 64, "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 3072,
        "max_position_embeddings": 131072, "model_type": "gemma4_vision", "num_attention_heads": 12, "num_hidden_layers": 16,
        "num_key_value_heads": 12, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240,
        "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False,
        "use_clipped_linears": True,
    },
    "vision_soft_tokens_per_image": 280,
}  # fmt: skip
LARGER = E4B["vision_config"] | {
    "global_head_dim": 72, "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "standardize": True, "use_clipped_linears": False,
}  # fmt: skip
A4B: dict[str, Any] = E4B | {
    "text_config": {"hidden_size": 2816, "model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
    "vision_config": LARGER,
}
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280, "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 0.00392156862745098,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "patch_size": 16, "merge": 3, "activation": "gelu_tanh", "norm": "rms", "eps": 1e-6, "projector": "scaled",
    "projector_eps": 1e-6, "gated": True, "bias": False, "positions": 10240, "by_axis": True, "theta": 100.0, "normed": True,
}  # fmt: skip
SIZES = SizeRule("largest", 48, max_pixels=280 * 48 * 48, longest_side=10239 * 16)
COMMON = SIZES, ImageTokens("<|image|>", "<|image|>", "<|image>", "<image|>"), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
SMALL_TOWER = TowerSpec(
    hidden_size=768, num_layers=16, num_heads=12, intermediate_size=3072, out_size=2560, clipped=True, **TOWER
)
LARGE_TOWER = TowerSpec(
    hidden_size=1152, num_layers=27, num_heads=16, intermediate_size=4304, out_size=2816, standardized=True, **TOWER
)
PUBLISHED = {
    "E4B": (E4B, VisionSpec(SMALL_TOWER, *COMMON)),
    "26B-A4B": (A4B, VisionSpec(LARGE_TOWER, *COMMON, whole=True, whole_in_windows=True)),
}


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json", None])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str, file: str | None, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]
    images = IMAGES if file != "processor_config.json" else {"image_processor": IMAGES, "audio_seq_length": 750}
    assert read(write(tmp_path, config) if file is None else write(tmp_path, config, images, file)) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_published_towers_are_counted(name: str) -> None:
    config, spec = PUBLISHED[name]
    width = config["text_config"]["hidden_size"]
    with torch.device("meta"):
        tower = transformers.Gemma4VisionModel(transformers.Gemma4VisionConfig(**config["vision_config"]))
    numbers = sum(each.numel() for each in tower.state_dict().values()) + width * spec.tower.hidden_size
    assert vision_bytes(spec, torch.float32) == 4 * numbers


def test_a_config_that_says_nothing_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    spec = read(write(tmp_path, E4B | {"vision_config": {}}))
    assert spec == VisionSpec(replace(SMALL_TOWER, clipped=False), *COMMON)


def test_how_many_tokens_an_image_has_is_the_image_processors_choice(tmp_path: Path) -> None:
    spec = read(write(tmp_path, E4B, IMAGES | {"max_soft_tokens": 70}))
    assert spec is not None
    assert spec.size.max_pixels == 70 * 48 * 48
    placed = spec.placed(Image(48 * 5, 48 * 14, b"", b""), 3)
    assert (placed.rows, placed.columns, placed.end, placed.whole) == (5, 14, 73, False)


def test_colours_that_settings_change_are_changed_by_the_tower_as_well(tmp_path: Path) -> None:
    spec = read(write(tmp_path, E4B, IMAGES | {"do_normalize": True, "image_mean": [0.25, 0, 0.5], "image_std": [1, 0.5, 2]}))
    assert spec is not None
    assert (spec.mean, spec.std) == ((0.75, 0.25, 1.5), (0.5, 0.25, 1.0))


@pytest.mark.parametrize(("change", "images"), [
    *[({key: value}, {})
      for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "patch_size", "pooling_kernel_size",
                  "position_embedding_size", "intermediate_size", "head_dim", "num_key_value_heads")
      for value in (0, -1, 1 << 40, "16", 2.5, True)],
    *[({key: value}, {}) for key in ("use_clipped_linears", "standardize") for value in (1, "true", [])],
    *[({"rope_parameters": value}, {}) for value in (100, {"rope_theta": 0}, {"rope_theta": "100"})],
    ({"rms_norm_eps": 0}, {}),
    ({"num_hidden_layers": 1025}, {}),
    ({"num_attention_heads": 7}, {}),
    ({"num_attention_heads": 384}, {}),
    ({"position_embedding_size": 2}, {}),
    ({"pooling_kernel_size": 1 << 20}, {}),
    ({"patch_size": 1 << 20}, {}),
    *[({}, {"max_soft_tokens": value}) for value in (0, -1, "280", 1 << 20, 280.0)],
    ({}, {"patch_size": 14}),
    ({}, {"pooling_kernel_size": 4}),
    ({}, {"do_normalize": "no"}),
    ({}, {"do_normalize": True, "image_std": [0, 1, 1]}),
    ({}, {"resample": -1}),
])  # fmt: skip
def test_broken_configs_are_refused(change: dict[str, Any], images: dict[str, Any], tmp_path: Path) -> None:
    config = E4B | {"vision_config": E4B["vision_config"] | change}
    with pytest.raises(CheckpointError, match=r"vision_config|preprocessor_config") as caught:
        read(write(tmp_path, config, images))
    assert caught.value.hint


@pytest.mark.parametrize(("change", "images"), [
    ({"model_type": "gemma4_unified_vision"}, {}),
    ({"head_dim": 32}, {}),
    ({"num_key_value_heads": 6}, {}),
    ({"hidden_activation": "relu"}, {}),
    ({"num_channels": 1}, {}),
    ({"rope_parameters": {"rope_type": "yarn"}}, {}),
    ({}, {"do_resize": False}),
    ({}, {"do_rescale": False}),
    ({}, {"rescale_factor": 1.0}),
    ({}, {"resample": 0}),
])  # fmt: skip
def test_what_no_tower_here_can_be_is_told(change: dict[str, Any], images: dict[str, Any], tmp_path: Path) -> None:
    config = E4B | {"vision_config": E4B["vision_config"] | change}
    with pytest.raises(UnsupportedError) as caught:
        read(write(tmp_path, config, images))
    assert caught.value.hint
