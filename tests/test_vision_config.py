"""What configs say of how a model sees: those of published models, word for word where they matter, and broken ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Image, ImageTokens, TowerSpec, VisionSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.vision import check_tower, read_vision, vision_bytes

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

QWEN3_VL_4B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 2560, "model_type": "qwen3_vl_text"},
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024,
        "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl", "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {"hidden_size": 5120, "model_type": "qwen3_5_text"},
    "vision_config": {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3,
        "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16, "num_position_embeddings": 2304,
        "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN3_IMAGES = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    **HALVES, "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 3584,
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2_VL_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "hidden_size": 1536,
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN2_IMAGES = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP,
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
GEMMA3_IMAGES = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True, **HALVES,
    "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "pan_and_scan_max_num_crops": None,
    "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}  # fmt: skip
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {"hidden_size": 5120, "model_type": "mistral", "rms_norm_eps": 1e-05},
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
        "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
MISTRAL_IMAGES = {
    **CLIP, "do_resize": True, "patch_size": 14, "image_processor_type": "PixtralImageProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
}  # fmt: skip
PIXTRAL = {
    "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10, "model_type": "llava",
    "projector_hidden_act": "gelu", "text_config": {"hidden_size": 5120, "model_type": "mistral", "rms_norm_eps": 1e-05},
    "vision_config": {"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral", "patch_size": 16,
                      "rope_theta": 10000.0},
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
}  # fmt: skip
"""Of mistral-community/pixtral-12b."""
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3_VL_4B,
    "qwen3_5": QWEN3_5_27B,
    "qwen2_5": QWEN2_5_VL_7B,
    "qwen2": QWEN2_VL_2B,
    "gemma3": GEMMA3_4B,
    "mistral3": MISTRAL_SMALL,
    "pixtral": PIXTRAL,
}
IMAGES: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3_IMAGES, "qwen3_5": QWEN3_IMAGES, "qwen2_5": QWEN2_IMAGES, "qwen2": QWEN2_IMAGES, "gemma3": GEMMA3_IMAGES,
    "mistral3": MISTRAL_IMAGES, "pixtral": MISTRAL_IMAGES | {"patch_size": 16, "size": {"longest_edge": 1024}},
}  # fmt: skip

MERGER: dict[str, Any] = {"merge": 2, "num_heads": 16, "eps": 1e-6, "projector": "merger", "projector_eps": 1e-6,
                          "frames": 2, "theta": 1e4}  # fmt: skip
QWEN3_TOWER: dict[str, Any] = MERGER | {
    "patch_size": 16, "activation": "gelu_tanh", "norm": "layer", "positions": 2304, "patch_bias": True,
}  # fmt: skip
QWEN_TOKENS = ImageTokens("<|image_pad|>", "<|image_pad|>")
CLIP_COLOURS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF_COLOURS = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
QWEN3_SIZES = SizeRule("area", 32, 65536, 16777216)
QWEN2_SIZES = SizeRule("area", 28, 3136, 12845056)
SPECS = {
    "qwen3": VisionSpec(
        TowerSpec(hidden_size=1024, num_layers=24, intermediate_size=4096, out_size=2560, deep=(5, 11, 17), **QWEN3_TOWER),
        QWEN3_SIZES, QWEN_TOKENS, *HALF_COLOURS, has_grid=True,
    ),
    "qwen3_5": VisionSpec(
        TowerSpec(hidden_size=1152, num_layers=27, intermediate_size=4304, out_size=5120, **QWEN3_TOWER),
        QWEN3_SIZES, QWEN_TOKENS, *HALF_COLOURS, has_grid=True,
    ),
    "qwen2_5": VisionSpec(
        TowerSpec(
            patch_size=14, hidden_size=1280, num_layers=32, intermediate_size=3420, out_size=3584, activation="silu",
            norm="rms", gated=True, window=4, full=(7, 15, 23, 31), **MERGER,
        ),
        QWEN2_SIZES, QWEN_TOKENS, *CLIP_COLOURS, has_grid=True,
    ),
    "qwen2": VisionSpec(
        TowerSpec(
            patch_size=14, hidden_size=1280, num_layers=32, intermediate_size=5120, out_size=1536, activation="quick_gelu",
            norm="layer", **MERGER,
        ),
        QWEN2_SIZES, QWEN_TOKENS, *CLIP_COLOURS, has_grid=True,
    ),
    "gemma3": VisionSpec(
        TowerSpec(
            patch_size=14, merge=4, hidden_size=1152, num_layers=27, num_heads=16, intermediate_size=4304, out_size=2560,
            activation="gelu_tanh", norm="layer", eps=1e-6, projector="pooled", projector_eps=1e-6, patch_bias=True,
            positions=4096, post_norm=True,
        ),
        SizeRule("square", 896, longest_side=896, resample="bilinear"),
        ImageTokens("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"),
        *HALF_COLOURS, whole=True,
    ),
    "mistral3": VisionSpec(
        TowerSpec(
            patch_size=14, merge=2, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096, out_size=5120,
            activation="silu", norm="rms", eps=1e-5, projector="patch_merger", projector_eps=1e-5, gated=True, bias=False,
            theta=1e4, dealt=True, pre_norm=True,
        ),
        SizeRule("longest", 28, longest_side=1540),
        ImageTokens("[IMG]", "[IMG]", line_end="[IMG_BREAK]", last_end="[IMG_END]"),
        *CLIP_COLOURS,
    ),
    "pixtral": VisionSpec(
        TowerSpec(
            patch_size=16, merge=1, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096, out_size=5120,
            activation="silu", norm="rms", eps=1e-5, projector="joined", projector_eps=0.0, projector_size=5120,
            projector_bias=True, gated=True, bias=False, theta=1e4, dealt=True, pre_norm=True,
        ),
        SizeRule("longest", 16, longest_side=1024),
        ImageTokens("[IMG]", "[IMG]", line_end="[IMG_BREAK]", last_end="[IMG_END]"),
        *CLIP_COLOURS,
    ),
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], images: Any = None, file: str = "preprocessor_config.json") -> Path:
    """A folder that has something of a tower."""
    name = "visual" if "Qwen" in config["architectures"][0] else "vision_tower"
    save_file({f"{name}.patch_embed.proj.weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if images is not None:
        (folder / file).write_text(json.dumps(images))
    return folder


def read(folder: Path) -> VisionSpec | None:
    """Without videos, which test_video_config.py has."""
    with open_checkpoint(folder) as checkpoint:
        found = read_vision(checkpoint)
    return None if found is None else replace(found, video=None, tower=replace(found.tower, films=False))


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_are_read(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path, CONFIGS[name], IMAGES[name])) == SPECS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_says_nothing_of_images_has_those_of_its_family(name: str, tmp_path: Path) -> None:
    assert read(write(tmp_path, CONFIGS[name])) == SPECS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_newer_folders_say_of_images_is_in_another_file(name: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS[name], {"resample": 0})
    write(tmp_path, CONFIGS[name], {"image_processor": IMAGES[name], "processor_class": "A"}, "processor_config.json")
    assert read(tmp_path) == SPECS[name]


def test_a_file_of_a_processor_without_the_images_says_nothing_of_them(tmp_path: Path) -> None:
    write(tmp_path, GEMMA3_4B, GEMMA3_IMAGES | {"image_mean": [0, 1, 2]})
    spec = read(write(tmp_path, GEMMA3_4B, {"image_seq_length": 256}, "processor_config.json"))
    assert spec is not None
    assert spec.mean == (0.0, 1.0, 2.0)


@pytest.mark.parametrize(("images", "pixels"), [
    ({"min_pixels": 1000, "max_pixels": 5000}, (1000, 5000)),
    ({"size": {"shortest_edge": 1000, "longest_edge": 5000}}, (1000, 5000)),
    ({"size": {"min_pixels": 1000, "max_pixels": 5000}}, (1000, 5000)),
    ({"min_pixels": 1000, "size": {"shortest_edge": 7, "longest_edge": 5000}}, (1000, 5000)),
    ({"max_pixels": 5000}, (3136, 5000)),
    ({"size": None, "min_pixels": None}, (3136, 12845056)),
])  # fmt: skip
def test_bounds_of_pixels_have_several_names(images: dict[str, Any], pixels: tuple[int, int], tmp_path: Path) -> None:
    spec = read(write(tmp_path, QWEN2_VL_2B, images))
    assert spec is not None
    assert (spec.size.min_pixels, spec.size.max_pixels) == pixels


def test_layers_that_a_tower_lacks_are_left_out(tmp_path: Path) -> None:
    """A smaller one than its config's list was written for."""
    config = QWEN2_5_VL_7B | {"vision_config": QWEN2_5_VL_7B["vision_config"] | {"depth": 9}}  # type: ignore[operator]
    spec = read(write(tmp_path, config))
    assert spec is not None
    assert spec.tower.full == (7,)


def test_frequencies_have_a_place_of_their_own_in_newer_configs(tmp_path: Path) -> None:
    vision = QWEN2_5_VL_7B["vision_config"] | {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}  # type: ignore[operator]
    spec = read(write(tmp_path, QWEN2_5_VL_7B | {"vision_config": vision}))
    assert spec is not None
    assert spec.tower.theta == 500.0


def test_experts_do_not_change_how_a_model_sees(tmp_path: Path) -> None:
    for name, other in [("qwen3", "Qwen3VLMoeForConditionalGeneration"), ("qwen3_5", "Qwen3_5MoeForConditionalGeneration")]:
        assert read(write(tmp_path, CONFIGS[name] | {"architectures": [other]}, IMAGES[name])) == SPECS[name]


@pytest.mark.parametrize("change", [
    {"architectures": ["Qwen3ForCausalLM"]},
    {"architectures": ["Gemma4UnifiedForCausalLM"]},
    {"architectures": []},
    {"architectures": None},
    {"architectures": [["Qwen3VLForConditionalGeneration"]]},
    {"vision_config": None},
])  # fmt: skip
def test_models_that_do_not_see(change: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, QWEN3_VL_4B)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_4B | change))
    assert read(tmp_path) is None


def test_folders_without_a_tower_do_not_see_whatever_their_config_says(tmp_path: Path) -> None:
    write(tmp_path, QWEN3_VL_4B | {"vision_config": {"depth": -1}})
    save_file({"model.language_model.norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read(tmp_path) is None


BAD_VISION: list[tuple[str, str, Any]] = [
    *[("qwen3", key, value) for key in ("depth", "hidden_size", "num_heads", "patch_size", "spatial_merge_size")
      for value in (0, -1, 1 << 40, "16", 2.5, True, [16])],
    *[("qwen3", "num_position_embeddings", value) for value in (0, -4, 2303, "2304", [48, 48])],
    *[("qwen3", "deepstack_visual_indexes", value)
      for value in (5, "5", [-1], [5, 5], [11, 5], ["5"], [5.5], [True], {"5": 1}, [5] * 2000)],
    *[("qwen3", key, -1) for key in ("intermediate_size", "out_hidden_size", "temporal_patch_size")],
    ("qwen3", "depth", 1025),
    ("qwen3", "num_heads", 3),
    ("qwen3", "num_heads", 512),
    ("qwen3", "out_hidden_size", 2048),
    ("qwen3", "hidden_act", 3),
    ("qwen3", "in_channels", "3"),
    ("qwen3", "rope_parameters", 10000),
    ("qwen3", "rope_parameters", {"rope_theta": 0}),
    ("qwen3", "rope_parameters", {"rope_theta": "10000"}),
    ("qwen2", "embed_dim", 0),
    ("qwen2", "mlp_ratio", -4),
    ("qwen2", "mlp_ratio", "4"),
    ("qwen2", "hidden_size", 1280),
    *[("qwen2_5", "window_size", value) for value in (0, 27, -112, "112", 1e9)],
    *[("qwen2_5", "fullatt_block_indexes", value) for value in (7, [-7], [None], "7,15")],
    *[("gemma3", "image_size", value) for value in (0, -896, 895, 1 << 30, [896, 896], 896.0)],
    *[("gemma3", "patch_size", value) for value in (0, 13, -14, {"height": 14})],
    ("gemma3", "layer_norm_eps", 0),
    ("gemma3", "num_attention_heads", 7),
    ("gemma3", "num_hidden_layers", 1 << 20),
    *[("mistral3", key, 0) for key in ("patch_size", "image_size", "hidden_size", "intermediate_size", "rope_theta")],
    ("mistral3", "image_size", 1 << 20),
    ("mistral3", "num_attention_heads", 1024),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), BAD_VISION)
def test_broken_configs_are_refused(name: str, key: str, value: Any, tmp_path: Path) -> None:
    config = CONFIGS[name] | {"vision_config": CONFIGS[name]["vision_config"] | {key: value}}
    with pytest.raises(CheckpointError, match=r"vision_config|preprocessor_config|decoder of") as caught:
        read(write(tmp_path, config))
    assert caught.value.hint


@pytest.mark.parametrize(("name", "change"), [
    ("qwen3", {"vision_config": 5}),
    ("qwen3", {"vision_config": []}),
    ("qwen3", {"vision_config": "none"}),
    ("qwen3", {"text_config": {}}),
    ("qwen3", {"text_config": {"hidden_size": "2560"}}),
    ("gemma3", {"mm_tokens_per_image": 0}),
    ("gemma3", {"mm_tokens_per_image": 255}),
    ("gemma3", {"mm_tokens_per_image": 121}),
    ("gemma3", {"mm_tokens_per_image": "256"}),
    ("gemma3", {"mm_tokens_per_image": 1 << 40}),
    ("mistral3", {"spatial_merge_size": 0}),
    ("mistral3", {"spatial_merge_size": 1 << 20}),
    ("mistral3", {"spatial_merge_size": "2"}),
    ("mistral3", {"text_config": {"hidden_size": 5120, "rms_norm_eps": -1}}),
])  # fmt: skip
def test_what_broken_configs_say_of_the_whole_model_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(write(tmp_path, CONFIGS[name] | change))


@pytest.mark.parametrize(("name", "images"), [
    *[("qwen2", {"min_pixels": value}) for value in (0, -1, 1 << 40, "3136", 3136.0, 12845057, True)],
    *[("qwen2", {"max_pixels": value}) for value in (0, -1, 1 << 29, "1", [1], 3135)],
    *[("qwen2", {"size": value}) for value in (5, [1, 2], {"longest_edge": -1}, {"shortest_edge": "1"})],
    *[("qwen2", {"image_mean": value}) for value in (0.5, [0.5], [0.5] * 4, ["a", 1, 1], [1e30, 0, 0], [None] * 3, {"r": 1})],
    *[("qwen2", {"image_std": value}) for value in (0.5, [0.5], [0, 1, 1], [-1, 1, 1], [1, 1, 1e-30], "111", [True] * 3)],
    *[("qwen2", {"resample": value}) for value in (-1, "bicubic", 2.0)],
    *[("qwen2", {"rescale_factor": value}) for value in (0, -1, "1/255")],
    ("qwen2", {"do_normalize": 1}),
    *[("gemma3", {"size": value}) for value in (896, {"height": 224, "width": 224}, {"width": 1}, {"height": "1"})],
    *[("mistral3", {"size": {"longest_edge": value}}) for value in (0, -1, 27, 1 << 15, "1540", 1e3)],
    ("mistral3", []),
    ("mistral3", "x"),
])  # fmt: skip
def test_broken_settings_of_images_are_refused(name: str, images: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        read(write(tmp_path, CONFIGS[name], images))


@pytest.mark.parametrize(("size", "side"), [({"height": 770, "width": 770}, 770), ({"height": 5, "longest_edge": 700}, 700)])
def test_a_square_bounds_an_image_as_its_longest_side_does(size: dict[str, int], side: int, tmp_path: Path) -> None:
    spec = read(write(tmp_path, PIXTRAL, {"size": size}))
    assert spec is not None
    assert spec.size.longest_side == side


@pytest.mark.parametrize("whole", [{"image_processor": 5}, {"image_processor": {"image_mean": [1]}}, [], None])
def test_broken_settings_in_the_other_file_are_refused(whole: Any, tmp_path: Path) -> None:
    write(tmp_path, GEMMA3_4B)
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"processor_config\.json"):
        read(tmp_path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    write(tmp_path, GEMMA3_4B)
    (tmp_path / "preprocessor_config.json").write_text('{"size": NaN}')
    with pytest.raises(CheckpointError, match="NaN"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "change", "images"), [
    ("qwen3", {"vision_config": {"in_channels": 1}}, {}),
    ("qwen3", {"vision_config": {"hidden_act": "relu"}}, {}),
    ("qwen3", {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, {}),
    ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, {}),
    ("gemma3", {}, {"do_pan_and_scan": True}),
    ("gemma3", {}, {"resample": 0}),
    ("gemma3", {}, {"rescale_factor": 1.0}),
    ("gemma3", {}, {"do_normalize": False}),
    ("qwen2", {}, {"do_resize": False}),
    ("qwen2", {}, {"do_rescale": False}),
    *[("qwen2", {}, {key: None}) for key in ("do_resize", "do_rescale", "do_normalize")],  # to transformers that is false
    ("mistral3", {}, {"size": {"height": 1540, "width": 770}}),
    ("mistral3", {"vision_config": {"model_type": "siglip_vision_model"}}, {}),
    ("mistral3", {"vision_feature_layer": -2}, {}),
    ("mistral3", {"vision_feature_layer": [-1, -2]}, {}),
    ("mistral3", {"projector_hidden_act": "silu"}, {}),
    ("mistral3", {"multimodal_projector_bias": True}, {}),
    ("pixtral", {"vision_config": {"model_type": "clip_vision_model"}}, {}),
    ("pixtral", {"vision_feature_layer": -2}, {}),
    ("pixtral", {"vision_feature_layer": None}, {}),
    ("pixtral", {"vision_feature_select_strategy": "default"}, {}),
    ("pixtral", {"projector_hidden_act": "silu"}, {}),
])  # fmt: skip
def test_what_no_tower_here_can_be_is_told(name: str, change: dict[str, Any], images: Any, tmp_path: Path) -> None:
    config = CONFIGS[name] | change
    config["vision_config"] = CONFIGS[name]["vision_config"] | change.get("vision_config", {})
    with pytest.raises(UnsupportedError) as caught:
        read(write(tmp_path, config, images))
    assert caught.value.hint


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_without_its_weights_is_told_by_names_and_takes_no_memory(name: str, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, CONFIGS[name])) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        with pytest.raises(NanovllmError, match=r"\d+ missing"):
            check_tower(checkpoint, spec)


@pytest.mark.parametrize(("name", "millions"), [("qwen3", 414.6), ("gemma3", 419.8), ("qwen2_5", 675.8), ("mistral3", 439.0)])
def test_weights_of_published_towers_are_counted(name: str, millions: float) -> None:
    assert vision_bytes(SPECS[name], torch.float32) / 4e6 == pytest.approx(millions, abs=0.1)


def test_an_image_has_as_many_tokens_as_cells() -> None:
    placed = SPECS["mistral3"].placed(Image(28 * 3, 28 * 5, b"", b""), 7)
    assert (placed.rows, placed.columns, placed.num_tokens, placed.end) == (3, 5, 18, 25)
    assert SPECS["gemma3"].placed(Image(896, 896, b"", b""), 0).num_tokens == 256
    placed = SPECS["qwen3"].placed(Image(768, 1024, b"", b""), 0)
    assert (placed.num_tokens, placed.extent) == (768, 32)
