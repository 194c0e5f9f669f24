"""How DeepSeek-VL (1.3B) and Janus see: their configs -> VisionSpec, and what their folders call a tower's tensors. See
`towers.py`. SigLIP in squares of one size, in whose middle an image lies, on the mean of all images' colours. What Janus draws by
is not read, nor are the larger DeepSeek-VLs, which have a SAM beside.
"""

from __future__ import annotations

from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    SIGLIP_NAMES,
    check_divides,
    check_only,
    check_squares,
    check_width,
    colours_of,
    resample_of,
    side_of,
    siglip_shape,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_PART = "<image_placeholder>"
_TOKENS = ImageTokens(_PART, _PART)
_JANUS_TOKENS = ImageTokens(_PART, _PART, before="<begin_of_image>", after="<end_of_image>")


def deepseek_vl(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "siglip_vision_model")
    shape = siglip_shape(config, vision)
    return _vision(vision, images, shape, text_width(config), _TOKENS, (224, 16))


def janus(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a Janus, whose MLPs are as wide as "mlp_ratio" has it."""
    vision = vision_section(config, "janus_vision_model")
    check_only(vision, use_qk_norm=False, depth=2)
    usual = {"hidden_act": "gelu", **vision.values}
    hidden = vision.integer("hidden_size", 1024)
    usual["intermediate_size"] = int(hidden * vision.number("mlp_ratio", 4))
    shape = siglip_shape(config, ConfigReader(usual, vision.where), 1024, 16, layers=24)
    shape |= {"out_size": (out := vision.integer("projection_dim", 2048)), "qkv_bias": vision.flag("attention_bias", True)}
    spec = _vision(vision, images, shape, out, _JANUS_TOKENS, (384, 16))
    check_width(config, spec.tower)
    return spec


def _vision(
    vision: ConfigReader, images: ConfigReader, shape: dict[str, Any], out: int, tokens: ImageTokens, usual: tuple[int, int]
) -> VisionSpec:
    """shape: of the tower; out: rows between the projector's layers; usual: an image's side and a patch's."""
    side, patch = side_of(vision, "image_size", usual[0]), side_of(vision, "patch_size", usual[1])
    check_divides(vision, side, patch, f"patches of {patch}")
    check_squares(images, side, "images")
    if not images.does("do_pad", True):
        raise UnsupportedError(f"{images.where}: do_pad false is not supported", ANOTHER)
    if (least := images.integer("min_size", 14)) > side:
        raise CheckpointError(f"{images.where}: 'min_size' is {least} in images of {side} x {side} pixels", BROKEN)
    tower = TowerSpec(
        patch_size=patch, merge=1, positions=(side // patch) ** 2, projector="joined", projector_eps=0.0, projector_size=out,
        **shape,
    )  # fmt: skip
    mean, std = colours_of(images, CLIP)
    red, green, blue = (min(255, max(0, int(255 * each))) for each in mean)
    rule = SizeRule(
        "framed", patch, longest_side=side, resample=resample_of(images, 3), least_side=least, around=(red, green, blue)
    )
    return VisionSpec(tower, rule, tokens, mean, std)


_NAMES = {
    ours: tuple(each.replace("vision_tower.", "vision_model.") for each in theirs)
    for ours, theirs in weights_and_biases(SIGLIP_NAMES).items()
}
DEEPSEEK_VL_NAMES = _NAMES | weights_and_biases({"projector.up": "aligner.linear1", "projector.down": "aligner.linear2"})
JANUS_NAMES = _NAMES | weights_and_biases({
    "layers.{i}.out": "vision_model.encoder.layers.{i}.self_attn.projection_layer",
    "projector.up": "aligner.fc1",
    "projector.down": "aligner.hidden_layers.0",
})  # fmt: skip
