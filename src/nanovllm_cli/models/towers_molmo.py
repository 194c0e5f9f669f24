"""How Molmo 2 sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SigLIP 2's layers
up to the last layer that is read; rows of two layers are read side by side, and 2 x 2 patches become one (`tower_pool.py`).

An image is a `Mosaic` whose squares overlap. All tokens of all images of a prompt see each other in it, also those of an image
further behind: one image is read here, whose tokens see all of it. Videos are not read.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    MOST_TILES,
    activation_of,
    check_divides,
    check_only,
    check_same,
    check_squares,
    check_width,
    colours_of,
    depth_of,
    heads_of,
    key_heads_of,
    resample_of,
    side_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.resampler_spec import PoolSpec
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_READ = [24, 18]
_START, _WHOLE_START = "<im_start>", "<low_res_im_start>"
_TOKENS = ImageTokens("<|image|>", "<im_patch>", marks=(_WHOLE_START, "<im_col>", "<im_end>", _START))
_RENAMED = {
    "image_default_input_size": "image_size", "image_patch_size": "patch_size", "vit_layers": "vision_feature_layer",
    "image_num_pos": "num_position_embeddings",
}  # fmt: skip
"""Keys of published configs -> transformers'."""


def molmo2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings, with the processor's own in "processor"."""
    config = _renamed(config)
    vision, adapter = vision_section(config, "molmo2_vision"), config.section("adapter_config")
    side, patch = side_of(vision, "image_size", 378), side_of(vision, "patch_size", 14)
    check_divides(vision, side, patch, f"patches of {patch}")
    count = (side // patch) ** 2
    if (said := vision.integer("num_position_embeddings", count)) != count:
        raise CheckpointError(f"{vision.where}: {said} positions for images of {count} patches", BROKEN)
    hidden = vision.integer("hidden_size", 1152)
    heads = heads_of(vision, "num_attention_heads", hidden, parts=1)
    check_only(vision, head_dim=hidden // heads, attention_bias=True)
    reads = _reads(config, adapter, depth_of(vision, "num_hidden_layers", 25))
    pool = _pool(adapter)
    check_only(adapter, hidden_act="silu", mlp_bias=False)
    tower = TowerSpec(
        patch_size=patch,
        merge=1,
        hidden_size=hidden,
        num_layers=max(reads),
        num_heads=heads,
        key_heads=key_heads_of(vision, heads, heads),
        intermediate_size=vision.integer("intermediate_size", 4304),
        out_size=adapter.integer("text_hidden_size", 3584),
        activation=activation_of(vision, "gelu_pytorch_tanh"),
        norm="layer",
        eps=vision.number("layer_norm_eps", 1e-6),
        projector="attended",
        projector_eps=0.0,
        projector_size=adapter.integer("intermediate_size", 18944),
        projector_bias=adapter.flag("attention_bias", True),
        patch_bias=True,
        positions=count,
        reads=reads,
        pool=pool,
    )
    check_width(config, tower)
    check_squares(images, side)
    check_same(images, patch_size=patch)
    own = images.section("processor")
    check_only(own, image_use_col_tokens=True)
    tokens = _TOKENS
    if not own.does("use_single_crop_start_token", True):
        tokens = replace(tokens, marks=(_START, *tokens.marks[1:]))
    rule = _rule(images, side, patch, ends=own.does("use_single_crop_col_tokens", True))
    return VisionSpec(tower, rule, tokens, *colours_of(images, HALVES), whole=True, added=True, most_images=1)


def _renamed(config: ConfigReader) -> ConfigReader:
    """By transformers' keys. Published configs count layers of a tower that the folders lack."""
    old = "vit_config" in config.values and "vision_config" not in config.values
    values = {**config.values, **({"vision_config": config.values["vit_config"]} if old else {})}
    for section in ("vision_config", "adapter_config"):
        own = ConfigReader(values, config.where).section(section).values
        kind = {"model_type": "molmo2_vision"} if old and section == "vision_config" else {}
        values[section] = {**{_RENAMED.get(key, key): value for key, value in own.items()}, **kind}
    return ConfigReader(values, config.where)


def _reads(config: ConfigReader, adapter: ConfigReader, depth: int) -> tuple[int, ...]:
    """So many layers are behind what is read, in the order in which it is."""
    said = adapter.values.get("vision_feature_layer")
    said = _READ if said is None else said
    if not isinstance(said, list) or not 0 < len(said) <= MAX_LAYERS or not all(type(each) is int for each in said):
        raise CheckpointError(f"{adapter.where}: 'vision_feature_layer' must be a list of layers", BROKEN)
    counts = tuple(each + 1 if each >= 0 else depth + each + 1 for each in said)
    if not all(0 < each <= depth for each in counts):
        raise CheckpointError(f"{adapter.where}: 'vision_feature_layer' is {str(said)[:40]} in a tower of {depth} layers", BROKEN)
    return counts


def _pool(adapter: ConfigReader) -> PoolSpec:
    heads, width, head_dim = adapter.integer("num_attention_heads", 16), adapter.integer("hidden_size", 1152), 72
    head_dim = adapter.integer("head_dim", head_dim)
    if heads * head_dim > 1 << 20:
        raise CheckpointError(f"{adapter.where}: {heads} heads of {head_dim} dimensions are not believed", BROKEN)
    return PoolSpec(heads, key_heads_of(adapter, heads, heads), head_dim, width)


def _rule(images: ConfigReader, side: int, patch: int, *, ends: bool) -> SizeRule:
    most = images.integer("max_crops", 8)
    if most > MOST_TILES or (most + 1) * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{images.where}: {most} pieces of {side} x {side} pixels are not believed", BROKEN)
    check_only(images, pooling_size=[2, 2])
    margins = images.values.get("overlap_margins") or [4, 4]
    if not isinstance(margins, list) or len(margins) != 2 or not all(type(each) is int for each in margins):
        raise CheckpointError(f"{images.where}: 'overlap_margins' must be two numbers of patches", BROKEN)
    if margins[0] != margins[1] or margins[0] < 1:
        raise UnsupportedError(f"{images.where}: overlap_margins {margins} are not supported", "known: two alike, of 1 or more")
    if 2 * margins[0] >= side // patch:
        raise CheckpointError(f"{images.where}: margins of {margins[0]} patches leave none of {side // patch}", BROKEN)
    if images.integer("resample", 2, least=0) != 2:
        raise UnsupportedError(f"{images.where}: resample other than 2 (bilinear) is not supported", ANOTHER)
    resample_of(images, 2)
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    return SizeRule("mosaic", patch, resample="nearest four", tile=side, grids=tuple(grids), margin=margins[0], ends=ends)


_LAYER = "vision_tower.layers.{i}"
MOLMO2_NAMES = weights_and_biases({
    "patch": "vision_tower.patch_embedding",
    "layers.{i}.attention_norm": f"{_LAYER}.attention_norm",
    "layers.{i}.qkv": tuple(f"{_LAYER}.attention.w{part}" for part in "qkv"),
    "layers.{i}.out": f"{_LAYER}.attention.wo",
    "layers.{i}.mlp_norm": f"{_LAYER}.ffn_norm",
    "layers.{i}.up": f"{_LAYER}.feed_forward.w1",
    "layers.{i}.down": f"{_LAYER}.feed_forward.w2",
    "pool.q": "multi_modal_projector.image_pooling_2d.wq",
    "pool.kv": tuple(f"multi_modal_projector.image_pooling_2d.w{part}" for part in "kv"),
    "pool.out": "multi_modal_projector.image_pooling_2d.wo",
    "projector.up": ("multi_modal_projector.image_projector.w1", "multi_modal_projector.image_projector.w3"),
    "projector.down": "multi_modal_projector.image_projector.w2",
}) | {"positions.weight": ("vision_tower.positional_embedding",)}  # fmt: skip
