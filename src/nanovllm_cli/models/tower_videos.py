"""How models see videos that do: their configs -> VideoSpec. See `towers.py`, and `video_spec.py`.

A video's settings are in a file of their own (video_preprocessor_config.json, or a section of processor_config.json), or, where a
folder has none, in those of images. What they leave out is as published models have it, or transformers' processors; Qwens'
frames are no larger than their own code makes them (qwen-vl-utils), which transformers is to do, too. A model is here if it was
trained with videos. Not covered: a video's sound, and videos of Omnis, which have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.tower_configs import MAX_PIXELS, check_same, resample_of
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.video_spec import VideoSpec
from nanovllm_cli.vision_spec import ImageTokens, VisionSpec

ReadVideo = Callable[[ConfigReader, ConfigReader, VisionSpec], VideoSpec]
"""Of config.json, a video's settings, and how the model sees images."""
MOST_FRAMES = 768
"""That are taken of a video, whatever files say."""
MAX_FPS = 240
_QWEN_TOKENS = ImageTokens("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
_OMNI_TOKEN = "<|audio_start|>"
"""Of a Qwen3-Omni, whose GGUF files are otherwise those of a Qwen3-VL."""
_QWEN_SHARE = 768
"""Tokens that a frame has at most, and with those that are one image together."""
_QWEN2_SHARED = 128_000 * 9 // 10
"""Tokens of all of them, if each has its share."""


def with_video(spec: VisionSpec, read: ReadVideo | None, config: ConfigReader, settings: ConfigReader) -> VisionSpec:
    """read: of a family that sees videos."""
    if read is None:
        return spec
    video = read(config, settings, spec)
    return replace(spec, video=video, tower=replace(spec.tower, films=video.step > 1))


def qwen2(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """All images share a grid, and follow each other on its first axis."""
    area = spec.tower.cell**2
    size = _area(settings, spec, ("min_pixels", 4 * area), ("max_pixels", _QWEN_SHARE * area))
    shared = _QWEN2_SHARED * area * spec.tower.frames
    return VideoSpec(
        _QWEN_TOKENS, replace(size, max_pixels=min(size.max_pixels, _QWEN_SHARE * area)), "even", "qwen2",
        step=spec.tower.frames, most_pixels=shared, share_floor=int(size.min_pixels * 1.05), pace=0.0, **_frames(settings, 4),
    )  # fmt: skip


def qwen2_5(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """The same, as far apart there as in time."""
    pace = config.section("vision_config").number("tokens_per_second", 4)
    return replace(qwen2(config, settings, spec), pace=min(pace, 1e4))


def exaone4_5(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """The same, whose tokens have the positions of a text's."""
    tokens = ImageTokens("<|video_pad|>", "<|video_pad|>")
    return replace(qwen2(config, settings, spec), tokens=tokens, wording="plain", pace=None)


def qwen3(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """Each image is one of its own, with its time before it. Pixels are counted of all frames."""
    area = spec.tower.cell**2
    whole = _area(settings, spec, ("min_pixels", 4 * area), ("max_pixels", 24 * 1024 * area))
    cap = settings.integer("max_video_tokens", _QWEN_SHARE) * area
    size = replace(whole, min_pixels=0, max_pixels=min(cap, MAX_PIXELS), small="floor")
    return VideoSpec(
        _QWEN_TOKENS, size, "spaced", "qwen3", step=spec.tower.frames, least_pixels=whole.min_pixels,
        most_pixels=whole.max_pixels, share_floor=int(whole.min_pixels * 1.05), unless=_OMNI_TOKEN, **_frames(settings, 4),
    )  # fmt: skip


def glm4v(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """Each image is one of its own, with its second behind it, and what stands for it stands for a frame."""
    whole = _area(settings, spec, ("", 112 * 112), ("", 28 * 28 * 2 * 30000))
    size = replace(whole, min_pixels=0, small="floor")
    return VideoSpec(
        replace(spec.tokens, marker="<|video|>"), size, "seconds", "glm", step=spec.tower.frames,
        least_pixels=whole.min_pixels, most_pixels=whole.max_pixels, **_frames(settings, 1),
    )  # fmt: skip


def glm4_6v(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """The same, of fewer frames a second the longer it is, with its tenths of a second."""
    return replace(glm4v(config, settings, spec), sampling="dynamic", wording="glm4.6", fps=0.0)


def smolvlm(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """A frame is an image in one piece."""
    own = settings.section("video_sampling")
    side = spec.size.tile
    longest = own.section("video_size").integer("longest_edge", settings.section("size").integer("longest_edge", side))
    if not side <= longest <= spec.size.longest_side:
        longest = side
    size = replace(spec.size, most_tiles=1, longest_side=longest)
    most = min(own.integer("max_frames", settings.integer("num_frames", 64)), MOST_FRAMES)
    fps = min(own.number("fps", settings.number("fps", 1)), MAX_FPS)
    return VideoSpec(_of_images(spec, "<video>"), size, "trimmed", "smolvlm", fps=fps, most_frames=most)


def internvl(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """A frame is an image in one piece, with its number before it."""
    size = SizeRule("square", spec.tower.cell, longest_side=spec.size.tile, resample=spec.size.resample)
    frames = {"num_frames": 8, **_frames(settings, 1)}
    return VideoSpec(_of_images(spec, "<video>"), size, "middles", "internvl", **frames)


def gemma4(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """A frame is a small image, with its time before it."""
    check_same(settings, patch_size=spec.tower.patch_size, pooling_kernel_size=spec.tower.merge)
    most = settings.integer("max_soft_tokens", 70)
    size = replace(spec.size, max_pixels=min(most * spec.tower.cell**2, MAX_PIXELS))
    frames = {"num_frames": 32, **_frames(settings, 1)}
    return VideoSpec(ImageTokens("<|video|>", "<|video|>"), size, "even", "gemma4", **frames)


def perception_lm(config: ConfigReader, settings: ConfigReader, spec: VisionSpec) -> VideoSpec:
    """A frame is an image in one piece, and nothing is between them. Files don't say of how many frames; it is what published
    models are asked with."""
    side = spec.size.tile or spec.size.longest_side
    size = SizeRule("square", spec.tower.cell, longest_side=side, resample=resample_of(settings, 3))
    frames = {"num_frames": 32, **_frames(settings, 1)}
    return VideoSpec(ImageTokens("<|video|>", "<|video|>"), size, "even", "plain", **frames)


def _of_images(spec: VisionSpec, marker: str) -> ImageTokens:
    """What stands for a frame stands for an image."""
    tokens = spec.tokens
    return ImageTokens(marker, tokens.token, instead=tokens.instead, line=tokens.line)


def _area(settings: ConfigReader, spec: VisionSpec, least: tuple[str, int], most: tuple[str, int]) -> SizeRule:
    """Pixels that settings say, by a name of their own or as a size, or these."""
    check_same(settings, patch_size=spec.tower.patch_size, merge_size=spec.tower.merge, temporal_patch_size=spec.tower.frames)
    size = settings.section("size")
    few, many = (
        settings.integer(name, size.integer(edge, usual)) if name else size.integer(edge, usual)
        for (name, usual), edge in ((least, "shortest_edge"), (most, "longest_edge"))
    )
    if not few <= many <= MOST_FRAMES * MAX_PIXELS:
        raise CheckpointError(f"{settings.where}: frames of {few} to {many} pixels; the second must be the larger", BROKEN)
    return SizeRule("area", spec.tower.cell, min_pixels=few, max_pixels=many, resample=resample_of(settings, 3))


def _frames(settings: ConfigReader, least: int) -> dict[str, Any]:
    """How many, as fields of a VideoSpec. least: of settings that don't say."""
    most = min(settings.integer("max_frames", MOST_FRAMES), MOST_FRAMES)
    fewest = settings.integer("min_frames", least)
    if fewest > most:
        raise CheckpointError(f"{settings.where}: {fewest} to {most} frames; the second must be the larger", BROKEN)
    numbers = {"least_frames": fewest, "most_frames": most, "fps": min(settings.number("fps", 2.0), MAX_FPS)}
    return {**numbers, "num_frames": min(settings.integer("num_frames"), most)} if settings.has("num_frames") else numbers
