"""How PaliGemma 1 and 2 see: their config -> VisionSpec, and what their folders call a tower's tensors. See `towers.py`. SigLIP,
each patch of which is a token; image and prompt see all of each other, and what is answered sees what is before it.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    SIGLIP_NAMES,
    check_divides,
    check_same,
    check_squares,
    colours_of,
    resample_of,
    siglip_shape,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<image>", "<image>")
_LONGEST = 1 << 20


def paligemma(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "siglip_vision_model")
    if config.section("text_config").values.get("use_bidirectional_attention") is False:
        raise UnsupportedError(f"{config.where}: a PaliGemma whose prompt does not see all of itself is not supported", ANOTHER)
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 14)
    check_divides(vision, side, patch, f"patches of {patch}")
    if (width := config.integer("projection_dim", vision.integer("projection_dim", 2048))) != text_width(config):
        raise CheckpointError(f"{config.where}: rows of {width} numbers for a decoder of {text_width(config)}", BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=1,
        positions=(side // patch) ** 2,
        projector="joined",
        projector_eps=0.0,
        projector_bias=True,
        **siglip_shape(config, vision, 1152, 16, inner=4096, layers=27),
    )
    check_squares(images, side, "images")
    check_same(images, image_seq_length=tower.positions)
    rule = SizeRule("square", patch, longest_side=side, resample=resample_of(images, 3))
    return VisionSpec(tower, rule, _TOKENS, *colours_of(images, HALVES), whole=True, prefix=_LONGEST)


PALIGEMMA_NAMES = weights_and_biases(SIGLIP_NAMES | {"projector.out": "multi_modal_projector.linear"})
