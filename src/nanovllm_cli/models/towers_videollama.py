"""How VideoLLaMA 3 sees images: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SigLIP
with rotary positions instead of learned ones, which reads images of any shape, a token a patch, with a text's positions."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.tower_configs import (
    HALVES,
    SIGLIP_NAMES,
    of_any_area,
    side_of,
    siglip_shape,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<image>", "<image>", line="\n")


def video_llama3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings, which are refused where they join patches of images."""
    vision = vision_section(config, "video_llama_3_vision")
    tower = TowerSpec(
        patch_size=side_of(vision, "patch_size", 16),
        merge=1,
        projector="joined",
        projector_eps=0.0,
        projector_size=text_width(config),
        theta=theta_of(vision),
        **siglip_shape(config, vision, parts=4),
    )
    return replace(of_any_area(config, images, tower, _TOKENS, HALVES, (56 * 56, 28 * 28 * 1280)), has_grid=False)


VIDEO_LLAMA3_NAMES = {
    ours: tuple(each.replace("vision_tower.", "vision_model.") for each in theirs)
    for ours, theirs in weights_and_biases(
        SIGLIP_NAMES | {"projector.up": "projector.readout.0", "projector.down": "projector.readout.2"}
    ).items()
}
