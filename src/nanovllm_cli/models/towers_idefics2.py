"""How Idefics 2 sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. SigLIP, by images
of any shape, and queries that look at what it makes of one (`ResamplerSpec`), so that any has as many tokens; an image is read
in its quarters, each of about the size that all of it has, and once more in whole (Laurençon et al. 2024).

Behind an image's last token transformers from 5 on writes a space in front of a word. As the published tokenizer.json begins any
text behind a control token with one, none is written here.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower_configs import (
    HALVES,
    MAX_SIDE,
    SIGLIP_NAMES,
    check_only,
    colours_of,
    depth_of,
    positions_of,
    resample_of,
    siglip_shape,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_tiled import AROUND
from nanovllm_cli.resampler_spec import ResamplerSpec
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_KINDS = "idefics2_vision", "idefics2"
_TOKENS = ImageTokens("<image>", "<image>", before=AROUND, after=AROUND, piece_end=AROUND, shares_ends=True)
_MOST_QUERIES = 1 << 12


def idefics2(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings."""
    vision = vision_section(config)
    if (said := vision.text("model_type", _KINDS[0])) not in _KINDS:
        told = f"{vision.where}: a tower of the kind {said[:40]!r} is not supported"
        raise UnsupportedError(told, f"known: {', '.join(_KINDS)}")
    shape, patch = siglip_shape(config, vision), vision.integer("patch_size", 32)
    tower = TowerSpec(
        patch_size=patch,
        merge=1,
        positions=positions_of(vision, vision.integer("image_size", 224), patch),
        stretch="steps",
        projector="resampled",
        projector_eps=0.0,
        resampler=_resampler(config),
        **shape,
    )
    return VisionSpec(tower, _rule(tower, images), _TOKENS, *colours_of(images, HALVES))


def _resampler(config: ConfigReader) -> ResamplerSpec:
    text = ConfigReader({**hf_family(config.values).defaults, **text_config(config.values)}, config.where)
    read, width = config.section("perceiver_config"), text_width(config)
    check_only(text, hidden_act="silu")
    check_only(read, hidden_act="silu")
    eps = read.number("rms_norm_eps", 1e-6)
    if read.integer("hidden_size", 4096) != width:  # which transformers doesn't believe then, nor the norms beside it
        eps = text.number("rms_norm_eps", 1e-5)
    spec = ResamplerSpec(
        queries=read.integer("resampler_n_latents", 64),
        num_layers=depth_of(read, "resampler_depth", 3),
        num_heads=read.integer("resampler_n_heads", 16),
        key_heads=read.integer("num_key_value_heads", 4),
        head_dim=read.integer("resampler_head_dim", 96),
        between=text.integer("intermediate_size"),
        eps=eps,
    )
    if spec.num_heads % spec.key_heads:
        told = f"{read.where}: {spec.num_heads} heads of queries can't share {spec.key_heads} of keys evenly"
        raise CheckpointError(told, BROKEN)
    if spec.queries > _MOST_QUERIES:
        raise CheckpointError(f"{read.where}: {spec.queries} tokens of an image are not believed", BROKEN)
    return spec


def _rule(tower: TowerSpec, images: ConfigReader) -> SizeRule:
    size = images.section("size")
    if size.has("height") or size.has("width"):
        raise UnsupportedError(f"{images.where}: images of one size (height, width) are not supported", ANOTHER)
    least, longest = size.integer("shortest_edge", 378), size.integer("longest_edge", 980)
    if not tower.patch_size <= least <= longest <= MAX_SIDE:
        told = f"{images.where}: images with sides of {least} to {longest} pixels, in patches of {tower.patch_size}"
        raise CheckpointError(f"{told}, are not believed", BROKEN)
    most = 4 if images.does("do_image_splitting", False) else 1
    resample = resample_of(images, 2)
    return SizeRule("bounded", tower.cell, longest_side=longest, least_side=least, resample=resample, most_tiles=most)


_PERCEIVER = "connector.perceiver_resampler"
_LAYER = f"{_PERCEIVER}.layers.{{i}}"
IDEFICS2_NAMES = {
    ours: tuple(each.replace("vision_tower.", "vision_model.") for each in theirs)
    for ours, theirs in weights_and_biases(SIGLIP_NAMES).items()
} | weights_and_biases({
    "projector.up": tuple(f"connector.modality_projection.{part}_proj" for part in ("gate", "up")),
    "projector.down": "connector.modality_projection.down_proj",
    "resampler.norm": f"{_PERCEIVER}.norm",
    "resampler.{i}.query_norm": f"{_LAYER}.input_latents_norm",
    "resampler.{i}.norm": f"{_LAYER}.input_context_norm",
    "resampler.{i}.q": f"{_LAYER}.self_attn.q_proj",
    "resampler.{i}.kv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "kv"),
    "resampler.{i}.out": f"{_LAYER}.self_attn.o_proj",
    "resampler.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "resampler.{i}.up": tuple(f"{_LAYER}.mlp.{part}_proj" for part in ("gate", "up")),
    "resampler.{i}.down": f"{_LAYER}.mlp.down_proj",
}) | {"resampler.queries.table": (f"{_PERCEIVER}.latents",)}  # fmt: skip
