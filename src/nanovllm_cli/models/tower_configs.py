"""What configs say of a vision tower, whichever family it is of: sizes, the activation, what is done to an image's colours.

Everything here is bounded: CheckpointError for what is broken, UnsupportedError for what no tower here can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import EarSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS, text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

MAX_SIDE = 1 << 14
MAX_PIXELS = MAX_SIDE**2
"""Of an image that a tower reads, whatever its files say."""
ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
MOST_TILES = 1 << 10
"""That an image is cut into, whatever files say."""
RESAMPLES: dict[int, Literal["bilinear", "bicubic", "lanczos"]] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""By the numbers that Pillow has for them."""

Three = tuple[float, float, float]
HALVES: tuple[Three, Three] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP: tuple[Three, Three] = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIGLIP_NAMES: dict[str, str | tuple[str, ...]] = {
    "patch": "vision_tower.embeddings.patch_embedding",
    "positions": "vision_tower.embeddings.position_embedding",
    "layers.{i}.attention_norm": "vision_tower.encoder.layers.{i}.layer_norm1",
    "layers.{i}.qkv": tuple(f"vision_tower.encoder.layers.{{i}}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "vision_tower.encoder.layers.{i}.self_attn.out_proj",
    "layers.{i}.mlp_norm": "vision_tower.encoder.layers.{i}.layer_norm2",
    "layers.{i}.up": "vision_tower.encoder.layers.{i}.mlp.fc1",
    "layers.{i}.down": "vision_tower.encoder.layers.{i}.mlp.fc2",
    "post_norm": "vision_tower.post_layernorm",
}
"""Of modules, as several families' folders have them."""


def vision_section(config: ConfigReader, kind: str | None = None) -> ConfigReader:
    """kind: the only "model_type" of a tower that the family has."""
    vision = config.section("vision_config")
    if kind is not None and (said := vision.text("model_type", kind)) != kind:
        raise UnsupportedError(f"{vision.where}: a tower of the kind {said[:40]!r} is not supported", f"known: {kind}")
    for key in ("in_channels", "in_chans", "num_channels"):
        if vision.integer(key, 3) != 3:
            raise UnsupportedError(f"{vision.where}: images of other than three colours are not supported", ANOTHER)
    return vision


def check_only(read: ConfigReader, **only: Any) -> None:
    """UnsupportedError where a key says something else than all that is computed here; a list of that alone is the same."""
    for key, known in only.items():
        if (said := read.values.get(key, known)) not in (known, [known]):
            raise UnsupportedError(f"{read.where}: {key} {str(said)[:40]!r} is not supported", f"known: {known}")


def depth_of(vision: ConfigReader, key: str, usual: int) -> int:
    if (depth := vision.integer(key, usual)) > MAX_LAYERS:
        raise CheckpointError(f"{vision.where} asks for {depth} layers; at most {MAX_LAYERS} are believed", BROKEN)
    return depth


def heads_of(vision: ConfigReader, key: str, hidden: int, usual: int = 16, *, parts: int) -> int:
    """parts: that a head's dimensions fall into, of one size."""
    heads = vision.integer(key, usual)
    if hidden % (heads * parts):
        raise CheckpointError(f"{vision.where}: {heads} heads can't share {hidden} dimensions evenly", BROKEN)
    return heads


def key_heads_of(vision: ConfigReader, heads: int, usual: int = 8) -> int:
    """Of keys and values, which so many of queries share evenly."""
    key_heads = vision.integer("num_key_value_heads", usual)
    if heads % key_heads:
        raise CheckpointError(f"{vision.where}: {heads} heads of queries can't share {key_heads} of keys evenly", BROKEN)
    return key_heads


def activation_of(
    vision: ConfigReader, usual: str, key: str = "hidden_act"
) -> Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]:
    if (said := vision.text(key, usual)) not in ACTIVATIONS:
        raise UnsupportedError(
            f"{vision.where}: activation {said[:80]!r} is not supported", f"known: {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[said]


def siglip_shape(
    config: ConfigReader,
    vision: ConfigReader,
    hidden: int = 768,
    heads: int = 12,
    *,
    inner: int = 3072,
    layers: int = 12,
    parts: int = 2,
) -> dict[str, Any]:
    """Fields of a TowerSpec, of all that SigLIP's towers have in common. hidden, heads, inner, layers: where a config does not
    say. parts: see `heads_of`."""
    hidden = vision.integer("hidden_size", hidden)
    return {
        "hidden_size": hidden,
        "num_layers": depth_of(vision, "num_hidden_layers", layers),
        "num_heads": heads_of(vision, "num_attention_heads", hidden, heads, parts=parts),
        "intermediate_size": vision.integer("intermediate_size", inner),
        "out_size": text_width(config),
        "activation": activation_of(vision, "gelu_pytorch_tanh"),
        "norm": "layer",
        "eps": vision.number("layer_norm_eps", 1e-6),
        "patch_bias": True,
        "post_norm": True,
    }


def side_of(vision: ConfigReader, key: str, usual: int) -> int:
    """Of a square: a number, or the same one twice."""
    said = vision.values.get(key, usual)
    if not isinstance(said, list):
        return vision.integer(key, usual)
    sides = {ConfigReader({key: each}, vision.where).integer(key) for each in said}
    if len(said) != 2 or len(sides) != 1:
        raise UnsupportedError(f"{vision.where}: {key!r} other than of a square is not supported", ANOTHER)
    return sides.pop()


def check_divides(vision: ConfigReader, side: int, size: int, parts: str) -> None:
    """CheckpointError for images of a side that is not believed, or does not divide into parts of this size."""
    if side > MAX_SIDE or side % size:
        raise CheckpointError(f"{vision.where}: images of {side} x {side} pixels don't divide into {parts}", BROKEN)


def check_squares(images: ConfigReader, side: int, what: str = "pieces") -> None:
    """CheckpointError where settings have another size than the squares that a tower reads."""
    size = images.section("size")
    keys = ("shortest_edge",) if size.has("shortest_edge") else ("height", "width")
    if (made := {size.integer(key, side) for key in keys}) != {side}:
        raise CheckpointError(f"{images.where}: the tower reads {what} of {side} x {side} pixels, not {sorted(made)}", BROKEN)


def pieces_of(images: ConfigReader, side: int, least: int, most: int) -> tuple[int, int]:
    """How many squares an image is cut into, the fewest and the most; of settings that say nothing, these."""
    least, most = images.integer("min_patches", least), images.integer("max_patches", most)
    if not least <= most <= MOST_TILES or most * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{images.where}: {least} to {most} pieces of {side} x {side} pixels are not believed", BROKEN)
    return least, most


def positions_of(vision: ConfigReader, side: int, patch: int) -> int:
    """Rows of a table of positions: patches of an image of this side."""
    if not patch <= side <= MAX_SIDE:
        raise CheckpointError(f"{vision.where}: images of {side} x {side} pixels in patches of {patch} are not believed", BROKEN)
    return (side // patch) ** 2


def theta_of(vision: ConfigReader, usual: float = 1e4) -> float:
    rope = vision.section("rope_parameters")
    if (kind := rope.text("rope_type", "axial")) not in ("axial", "default"):
        raise UnsupportedError(f"{vision.where}: rotary positions of the type {kind[:40]!r} are not supported", ANOTHER)
    return rope.number("rope_theta", vision.number("rope_theta", usual))


def layers_of(vision: ConfigReader, key: str, usual: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """A list of some of so many layers; defaults may name others, which are left out."""
    said = vision.values.get(key)
    if said is None:
        return tuple(layer for layer in usual if layer < depth)
    if not isinstance(said, list) or len(said) > MAX_LAYERS:
        raise CheckpointError(f"{vision.where}: {key!r} must be a list of layers", BROKEN)
    layers = [ConfigReader({key: layer}, vision.where).integer(key, least=0) for layer in said]
    return tuple(layer for layer in layers if layer < depth)


def deep_of(vision: ConfigReader, usual: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Layers whose rows are added behind the decoder's first ones."""
    deep = layers_of(vision, "deepstack_visual_indexes", usual, depth)
    if list(deep) != sorted(set(deep)):
        raise CheckpointError(f"{vision.where}: 'deepstack_visual_indexes' must be in order, and each once", BROKEN)
    return deep


def square(read: ConfigReader, number: int, key: str = "num_position_embeddings") -> int:
    if math.isqrt(number) ** 2 != number:
        raise CheckpointError(f"{read.where}: {key!r} must be a square, not {number}", BROKEN)
    return number


def text_width(config: ConfigReader) -> int:
    values = {**hf_family(config.values).defaults, **text_config(config.values)}
    return ConfigReader(values, config.where).integer("hidden_size")


def check_width(config: ConfigReader, tower: TowerSpec | EarSpec) -> None:
    if (width := text_width(config)) != tower.out_size:
        raise CheckpointError(
            f"{config.where}: the tower makes rows of {tower.out_size} numbers for a decoder of {width}", BROKEN
        )


def check_same(images: ConfigReader, **made: int) -> None:
    """CheckpointError where an image processor's settings say another number than the tower has."""
    for key, number in made.items():
        if (said := images.integer(key, number)) != number:
            raise CheckpointError(f"{images.where}: {key!r} is {said}, and the tower's {number}", BROKEN)


def of_any_area(
    config: ConfigReader,
    images: ConfigReader,
    tower: TowerSpec,
    tokens: ImageTokens,
    colours: tuple[Three, Three],
    pixels: tuple[int, int],
    small: Literal["", "floor", "round"] = "",
    frames: int = 1,
) -> VisionSpec:
    """Of images whose pixels are counted, as Qwens have it. colours: mean and deviation; pixels: the fewest and the most, all of
    settings that say nothing. small: see `SizeRule`. frames: in which an image's pixels are counted."""
    check_width(config, tower)
    check_same(images, patch_size=tower.patch_size, merge_size=tower.merge, temporal_patch_size=max(1, tower.frames))
    size = images.section("size")
    least, most = (
        images.integer(f"{bound}_pixels", size.integer(edge, size.integer(f"{bound}_pixels", usual)))
        for bound, edge, usual in (("min", "shortest_edge", pixels[0]), ("max", "longest_edge", pixels[1]))
    )
    if not least <= most <= MAX_PIXELS or most < frames:
        raise CheckpointError(
            f"{images.where}: images of {least} to {most} pixels; the second must be the larger, and at most {MAX_PIXELS}", BROKEN
        )
    least, most = -(-least // frames), most // frames
    rule = SizeRule("area", tower.cell, min_pixels=least, max_pixels=most, resample=resample_of(images, 3), small=small)
    return VisionSpec(tower, rule, tokens, *colours_of(images, colours), has_grid=True)


def resample_of(
    images: ConfigReader, usual: int, done: tuple[str, ...] = ("do_resize", "do_rescale", "do_normalize")
) -> Literal["bilinear", "bicubic", "lanczos"]:
    """And what else must be so in an image processor's settings. done: what it must do."""
    for key in done:
        if not images.does(key, True):
            raise UnsupportedError(f"{images.where}: {key} false is not supported", ANOTHER)
    if abs(images.number("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
        raise UnsupportedError(f"{images.where}: a rescale_factor other than 1/255 is not supported", ANOTHER)
    if (said := images.integer("resample", usual, least=0)) not in RESAMPLES:
        known = ", ".join(f"{number} ({name})" for number, name in RESAMPLES.items())
        raise UnsupportedError(f"{images.where}: resample {said} is not supported", f"known: {known}")
    return RESAMPLES[said]


def colours_of(images: ConfigReader, usual: tuple[Three, Three]) -> tuple[Three, Three]:
    return _three(images, "image_mean", usual[0], positive=False), _three(images, "image_std", usual[1], positive=True)


def _three(images: ConfigReader, key: str, usual: Three, *, positive: bool) -> Three:
    said = images.values.get(key)
    if said is None:
        return usual
    if not isinstance(said, list) or len(said) != 3:
        raise CheckpointError(f"{images.where}: {key!r} must be a list of three numbers", BROKEN)
    red, green, blue = (ConfigReader({key: each}, images.where).number(key, positive=positive) for each in said)
    return red, green, blue


def weights_and_biases(names: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Names of modules -> of their weights and biases; what reads a patch's frames apart is what reads them as one."""
    modules = {**names, **({"film": names["patch"]} if "patch" in names else {})}
    return {
        f"{ours}.{kind}": tuple(f"{each}.{kind}" for each in ((theirs,) if isinstance(theirs, str) else theirs))
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }
