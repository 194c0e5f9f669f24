"""What configs say of how a model sees videos: those of published models, where they matter, and broken ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.sizes import fitted
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.video_spec import VideoSpec
from nanovllm_cli.vision_spec import ImageTokens
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.vision import read_vision
from test_vision_config import CONFIGS, GEMMA3_4B, IMAGES, QWEN2_5_VL_7B, QWEN2_VL_2B, QWEN3_VL_4B, write

QWEN_TOKENS = ImageTokens("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
QWEN3_VIDEOS = {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "video_processor_type": "Qwen3VLVideoProcessor",
}  # fmt: skip
QWEN3 = VideoSpec(
    QWEN_TOKENS, SizeRule("area", 32, max_pixels=768 * 32**2, small="floor"), "spaced", "qwen3", least_frames=4, step=2,
    least_pixels=4096, most_pixels=25165824, share_floor=4300, unless="<|audio_start|>",
)  # fmt: skip
QWEN2_5 = VideoSpec(
    QWEN_TOKENS, SizeRule("area", 28, 3136, 768 * 28**2), "even", "qwen2", least_frames=4, step=2,
    most_pixels=128_000 * 9 // 10 * 28**2 * 2, share_floor=3292, pace=2.0,
)  # fmt: skip


def read(folder: Path) -> VideoSpec | None:
    with open_checkpoint(folder) as checkpoint:
        found = read_vision(checkpoint)
    assert found is not None
    assert found.tower.films == (found.video is not None and found.video.step > 1)
    return found.video


def folder_of(folder: Path, config: dict[str, Any], images: dict[str, Any], videos: Any = None) -> Path:
    write(folder, config, images)
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def test_published_configs_are_read(tmp_path: Path) -> None:
    assert read(folder_of(tmp_path, QWEN3_VL_4B, IMAGES["qwen3"], QWEN3_VIDEOS)) == QWEN3
    (tmp_path / "video_preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()
    assert read(tmp_path) == QWEN3, "what a folder does not say is as published"
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": QWEN3_VIDEOS | {"fps": 4, "max_frames": 12}}))
    assert read(tmp_path) == replace(QWEN3, fps=4.0, most_frames=12)


@pytest.mark.parametrize(("config", "pace"), [(QWEN2_5_VL_7B, 2.0), (QWEN2_VL_2B, 0.0)])
def test_a_folder_without_settings_of_videos_has_those_of_images(config: dict[str, Any], pace: float, tmp_path: Path) -> None:
    name = next(name for name, each in CONFIGS.items() if each is config)
    assert read(folder_of(tmp_path, config, IMAGES[name])) == replace(QWEN2_5, pace=pace)
    small = read(folder_of(tmp_path, config, IMAGES[name] | {"min_pixels": 5000, "max_pixels": 90_000}))
    assert small is not None
    assert (small.size.min_pixels, small.size.max_pixels) == (5000, 90_000)


def smart(height: int, width: int, least: float, most: float, factor: int) -> tuple[int, int]:
    """qwen-vl-utils' smart_resize."""
    tall, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if tall * wide > most:
        beta = math.sqrt(height * width / most)
        tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif tall * wide < least:
        beta = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return tall, wide


@pytest.mark.parametrize("count", [2, 8, 32, 100, 768])
@pytest.mark.parametrize(("height", "width"), [(720, 1280), (1920, 1080), (48, 64), (100, 900), (2160, 3840)])
def test_frames_are_as_large_as_their_share(count: int, height: int, width: int) -> None:
    """As transformers 5.24 has it with cap_pixels_per_frame, and qwen-vl-utils."""
    area = 32**2
    cap = max(min(768 * area, 25165824 // count), int(4096 * 1.05))
    assert fitted(QWEN3.frame_size(count), height, width).whole == smart(height, width, 4096 / count, cap, 32)
    area = 28**2
    cap = max(min(768 * area, int(128_000 * area * 0.9) * 2 // count), int(3136 * 1.05))
    assert fitted(QWEN2_5.frame_size(count), height, width).whole == smart(height, width, 3136, cap, 28)


@pytest.mark.parametrize("videos", [
    {"size": {"longest_edge": 10, "shortest_edge": 20}}, {"size": {"longest_edge": "many"}}, {"patch_size": 14},
    {"temporal_patch_size": 4}, {"max_frames": 2}, {"fps": -1}, {"max_video_tokens": 0}, [], {"min_frames": 10**6},
    {"size": {"longest_edge": 1 << 60, "shortest_edge": 1}},
])  # fmt: skip
def test_broken_settings_are_told(videos: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(folder_of(tmp_path, QWEN3_VL_4B, IMAGES["qwen3"], videos))


def test_what_is_not_done_to_frames_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="do_resize"):
        read(folder_of(tmp_path, QWEN3_VL_4B, IMAGES["qwen3"], {"do_resize": False}))


def test_models_that_were_not_trained_with_videos_have_no_form_for_them(tmp_path: Path) -> None:
    assert read(folder_of(tmp_path, GEMMA3_4B, IMAGES["gemma3"], QWEN3_VIDEOS)) is None


def test_limits_of_whoever_asks() -> None:
    asked = QWEN3.limited(100, 32, 5.0, 9)
    assert (asked.fps, asked.num_frames, asked.most_frames, asked.size.max_pixels) == (5.0, 0, 8, 100 * 32**2)
    assert replace(QWEN3, num_frames=8).limited(100, 32, None, 999).num_frames == 8
