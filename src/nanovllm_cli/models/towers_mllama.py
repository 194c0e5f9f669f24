"""How Llama 3.2 sees (11B, 90B): its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`, and
`tower_tiles.py` for what its tower is. An image is laid on tiles in its own shape, and never as a whole beside them."""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_PIXELS,
    activation_of,
    check_divides,
    check_squares,
    colours_of,
    depth_of,
    heads_of,
    resample_of,
    side_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.tiles_spec import TilesSpec
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

MOST_TILES = 64
"""That are believed: each grid of so many at the most has tables of its own."""
_READ = [3, 7, 15, 23, 30]
_TOKENS = ImageTokens("<|image|>", "<|image|>")


def mllama(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "mllama_vision_model")
    side, patch = side_of(vision, "image_size", 448), side_of(vision, "patch_size", 14)
    check_divides(vision, side, patch, f"patches of {patch}")
    num_local = depth_of(vision, "num_hidden_layers", 32)
    num_global = 0 if vision.integer("num_global_layers", 8, least=0) == 0 else depth_of(vision, "num_global_layers", 8)
    hidden, tiles = vision.integer("hidden_size", 1280), _tiles(vision, images, side, num_global, num_local)
    if (said := vision.integer("vision_output_dim", 7680)) != hidden * (1 + len(tiles.reads)):
        told = f"{vision.where}: 'vision_output_dim' is {said}, where {1 + len(tiles.reads)} layers of {hidden} are read"
        raise CheckpointError(told, BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=1,
        hidden_size=hidden,
        num_layers=num_local + num_global,
        num_heads=heads_of(vision, "attention_heads", hidden, vision.integer("num_attention_heads", 16), parts=1),
        intermediate_size=vision.integer("intermediate_size", 5120),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu"),
        norm="layer",
        eps=vision.number("norm_eps", 1e-5),
        projector="joined",
        projector_eps=0.0,
        positions=(side // patch) ** 2,
        tiles=tiles,
    )
    check_squares(images, side)
    resample = resample_of(images, 2, ("do_resize", "do_rescale", "do_normalize", "do_pad"))
    rule = SizeRule("canvas", patch, resample=resample, tile=side, least_tiles=1, most_tiles=tiles.most, nearest="size",
                    kept=True, together=True)  # fmt: skip
    return VisionSpec(tower, rule, _TOKENS, *colours_of(images, HALVES))


def _tiles(vision: ConfigReader, images: ConfigReader, side: int, num_global: int, num_local: int) -> TilesSpec:
    count = vision.integer("max_num_tiles", 4)
    if count > MOST_TILES or count * side**2 > MAX_PIXELS:
        raise CheckpointError(f"{vision.where}: {count} tiles of {side} x {side} pixels are not believed", BROKEN)
    if (said := images.integer("max_image_tiles", count)) != count:
        raise CheckpointError(f"{images.where}: 'max_image_tiles' is {said}, and the tower's {count}", BROKEN)
    layers = vision.values.get("intermediate_layers_indices")
    layers = _READ if layers is None else layers
    if not isinstance(layers, list) or not all(type(each) is int and 0 <= each < num_local for each in layers):
        told = f"{vision.where}: 'intermediate_layers_indices' must be a list of layers, of {num_local}"
        raise CheckpointError(told, BROKEN)
    if layers != sorted(set(layers)):
        raise UnsupportedError(f"{vision.where}: 'intermediate_layers_indices' that are not in order, each once", ANOTHER)
    spec = TilesSpec(count, num_global, tuple(layers))
    ratios = vision.values.get("supported_aspect_ratios")
    if ratios is not None and ratios != [list(grid) for grid in spec.grids]:
        raise UnsupportedError(f"{vision.where}: 'supported_aspect_ratios' other than all of {count} tiles at the most", ANOTHER)
    return spec


def _layers(ours: str, theirs: str) -> dict[str, str | tuple[str, ...]]:
    return {
        f"{ours}.attention_norm": f"{theirs}.input_layernorm",
        f"{ours}.qkv": tuple(f"{theirs}.self_attn.{part}_proj" for part in "qkv"),
        f"{ours}.out": f"{theirs}.self_attn.o_proj",
        f"{ours}.mlp_norm": f"{theirs}.post_attention_layernorm",
        f"{ours}.up": f"{theirs}.mlp.fc1",
        f"{ours}.down": f"{theirs}.mlp.fc2",
    }


_GLOBAL = "vision_model.global_transformer.layers.{i}"
_POSITIONS = "vision_model.gated_positional_embedding"
MLLAMA_NAMES = weights_and_biases({
    "patch": "vision_model.patch_embedding",
    "pre_norm": "vision_model.layernorm_pre",
    **_layers("layers.{i}", "vision_model.transformer.layers.{i}"),
    **_layers("globals.{i}", _GLOBAL),
    "post_norm": "vision_model.layernorm_post",
    "projector.out": "multi_modal_projector",
}) | {
    "lead.weight": ("vision_model.class_embedding",),
    "positions.weight": (f"{_POSITIONS}.embedding",),
    "positions.table": (f"{_POSITIONS}.tile_embedding.weight",),
    "positions.gate": (f"{_POSITIONS}.gate",),
    "before.table": ("vision_model.pre_tile_positional_embedding.embedding.weight",),
    "before.gate": ("vision_model.pre_tile_positional_embedding.gate",),
    "behind.table": ("vision_model.post_tile_positional_embedding.embedding.weight",),
    "behind.gate": ("vision_model.post_tile_positional_embedding.gate",),
    "globals.{i}.attention_scale.weight": (f"{_GLOBAL}.gate_attn",),
    "globals.{i}.mlp_scale.weight": (f"{_GLOBAL}.gate_ffn",),
}  # fmt: skip
