"""How Granite 4 Vision sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SigLIP; an
image is a `Mosaic`, as a LLaVA-NeXT's. Q-Formers in windows make rows of several of the tower's layers, which are added in front
of several of the decoder's.
"""

from __future__ import annotations

import re

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS, text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    MOST_TILES,
    SIGLIP_NAMES,
    check_divides,
    check_only,
    colours_of,
    siglip_shape,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_llava import mosaic_rule
from nanovllm_cli.vision_spec import ImageTokens, Query, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<image>", "<image>")
_CORNERS = 4
_HEAD_DIM = 64


def granite4(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config, "siglip_vision_model")
    usual = {"vision_feature_select_strategy": "default"}
    check_only(ConfigReader({**usual, **config.values}, config.where), vision_feature_select_strategy="full")
    asks = config.section("qformer_config")
    check_only(asks, num_hidden_layers=1, cross_attention_frequency=1, hidden_act="gelu", use_qformer_text_input=False)
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    queries, window = _rate(config)
    check_divides(vision, side, patch * window, f"windows of {window} patches of {patch}")
    shape = siglip_shape(config, vision)
    if shape["hidden_size"] % _HEAD_DIM:
        raise CheckpointError(f"{vision.where}: 'hidden_size' must be a multiple of {_HEAD_DIM}", BROKEN)
    tower = TowerSpec(
        patch_size=patch,
        merge=2,
        projector="queried",
        projector_eps=asks.number("layer_norm_eps", 1e-12),
        projector_size=asks.integer("intermediate_size", 3072),
        positions=(side // patch) ** 2,
        squares=MOST_TILES,
        query_side=queries,
        queries=_queries(config, shape["num_layers"]),
        **shape,
    )
    return VisionSpec(tower, mosaic_rule(config, images, tower, side), _TOKENS, *colours_of(images, CLIP))


def _rate(config: ConfigReader) -> tuple[int, int]:
    """Queries and patches on a side of a window."""
    said = config.text("downsample_rate")
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", said)
    if found is None or int(found[2]) != 2 * int(found[1]):
        raise UnsupportedError(f"{config.where}: downsample_rate {said[:40]!r} is not supported", "known: half of a side, as 4/8")
    return int(found[1]), int(found[2])


def _queries(config: ConfigReader, depth: int) -> tuple[Query, ...]:
    """What is added in front of which layers of the decoder, counted from 0, by which of the tower, counted from the patches' own
    rows on, or back from the last."""
    pairs = config.values.get("deepstack_layer_map")
    targets = config.values.get("spatial_target_layers") or [12, 15, 18, 21]
    is_list = isinstance(pairs, list) and len(pairs) <= MAX_LAYERS
    is_list = is_list and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs or ())
    if not is_list or not isinstance(targets, list) or len(targets) != _CORNERS:
        told = f"'deepstack_layer_map' must be a list of pairs of layers, 'spatial_target_layers' of {_CORNERS} layers"
        raise CheckpointError(f"{config.where}: {told}", BROKEN)
    assert isinstance(pairs, list)
    text = ConfigReader(text_config(config.values), config.where)
    layers = text.integer("num_hidden_layers", 32)
    spatial = config.values.get("spatial_vision_layer", -1)
    made = []
    corners = [((spatial, each), corner) for corner, each in enumerate(targets)]
    for (behind, before), corner in [*((pair, None) for pair in pairs), *corners]:
        if type(behind) is not int or type(before) is not int or not -depth <= behind <= depth or not 0 <= before < layers:
            told = f"layer {str(behind)[:20]} of a tower of {depth}, in front of {str(before)[:20]} of {layers}"
            raise CheckpointError(f"{config.where}: {told}", BROKEN)
        if behind == 0:
            raise UnsupportedError(f"{config.where}: rows of a tower's patches, behind none of its layers", ANOTHER)
        made.append(Query(behind - 1 if behind > 0 else depth + behind, before, corner))
    if len({query.before for query in made}) < len(made):
        raise UnsupportedError(f"{config.where}: several rows in front of one layer of the decoder", ANOTHER)
    return tuple(made)


def _names(kind: str) -> dict[str, tuple[str, ...]]:
    theirs = f"{kind}_projectors.{{i}}"
    layer = f"{theirs}.qformer.encoder.layer.0"
    modules: dict[str, str | tuple[str, ...]] = {
        "norm": f"{theirs}.norm",
        "in_norm": f"{theirs}.qformer.layernorm",
        "qkv": tuple(f"{layer}.attention.attention.{part}" for part in ("query", "key", "value")),
        "self_out": f"{layer}.attention.output.dense",
        "out_norm": f"{layer}.attention.output.LayerNorm",
        "cross_q": f"{layer}.crossattention.attention.query",
        "cross_kv": (f"{layer}.crossattention.attention.key", f"{layer}.crossattention.attention.value"),
        "cross_out": f"{layer}.crossattention.output.dense",
        "cross_norm": f"{layer}.crossattention.output.LayerNorm",
        "up": f"{layer}.intermediate_query.dense",
        "down": f"{layer}.output_query.dense",
        "mlp_norm": f"{layer}.output_query.LayerNorm",
        "out": f"{theirs}.out_linear",
    }
    names = weights_and_biases({f"{kind}.{{i}}.{ours}": each for ours, each in modules.items()})
    tables = {"query": "query", "places": "image_positions"}
    return names | {f"{kind}.{{i}}.{ours}.table": (f"{theirs}.{each}",) for ours, each in tables.items()}


GRANITE4_NAMES = weights_and_biases(SIGLIP_NAMES) | _names("layerwise") | _names("spatial") | {
    "line_end.weight": ("image_newline",)
}  # fmt: skip
