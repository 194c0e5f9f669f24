"""How FastVLM sees: its config -> VisionSpec, and what its folders call a tower's tensors. See `towers.py`. An image's middle, a
square, by a tower of convolutions (`FastVitSpec`), 64 x 64 pixels of which are a token.

Of the towers that timm has, which a config names, it is that alone: "fastvit_mci3", with its branches joined.
"""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.fastvit_spec import FastVitSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    check_divides,
    check_only,
    colours_of,
    text_width,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_llava import check_side, clip_rule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_TOKENS = ImageTokens("<image>", "<image>", line="\n")
_ARCHITECTURE = "fastvit_mci3"
_SIDE = 1024
_ARGUMENTS = {"inference_mode", "layers", "embed_dims"}


def fastvlm(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings, which alone say how large an image is."""
    check_only(config, projector_hidden_act="gelu", multimodal_projector_bias=True, vision_feature_layer=-1,
               vision_feature_select_strategy="full")  # fmt: skip
    vision = vision_section(config, "timm_wrapper")
    if (name := vision.text("architecture")).partition(".")[0] != _ARCHITECTURE:
        told = f"{vision.where}: a tower of the architecture {name[:40]!r} is not supported"
        raise UnsupportedError(told, f"known: {_ARCHITECTURE}")
    fastvit, width = _fastvit(vision.section("model_args")), text_width(config)
    hidden = 2 * fastvit.widths[-1]
    if (said := vision.integer("hidden_size", hidden)) != hidden:
        raise CheckpointError(f"{vision.where}: 'hidden_size' is {said}, and the tower's {hidden}", BROKEN)
    tower = TowerSpec(
        patch_size=2**fastvit.halvings,
        merge=1,
        hidden_size=hidden,
        num_layers=fastvit.num_blocks,
        num_heads=fastvit.widths[-1] // fastvit.head_dim,
        intermediate_size=fastvit.ratio * fastvit.widths[-1],
        out_size=width,
        activation="gelu",
        norm="layer",
        eps=fastvit.eps,
        projector="joined",
        projector_eps=0.0,
        projector_size=width,
        fastvit=fastvit,
    )
    side = images.section("crop_size").integer("height", _SIDE)
    check_divides(images, side, tower.cell, f"tokens of {tower.cell} x {tower.cell}")
    check_side(images, side)
    return VisionSpec(tower, clip_rule(images, tower.cell, side), _TOKENS, *colours_of(images, CLIP))


def _fastvit(arguments: ConfigReader) -> FastVitSpec:
    """Of what timm is told beside the architecture."""
    if unknown := sorted(arguments.values.keys() - _ARGUMENTS):
        known = ", ".join(sorted(_ARGUMENTS))
        raise UnsupportedError(f"{arguments.where}: {unknown[0][:40]!r} is not supported", f"known: {known}")
    if not arguments.flag("inference_mode", False):
        told = f"{arguments.where}: a tower with the branches of training (inference_mode false) is not supported"
        raise UnsupportedError(told, ANOTHER)
    usual = {"layers": [2, 12, 24, 4, 2], "embed_dims": [96, 192, 384, 768, 1536]}
    filled = ConfigReader({**usual, **{key: each for key, each in arguments.values.items() if each is not None}}, arguments.where)
    depths, widths = (tuple(filled.integers(key, len(numbers))) for key, numbers in usual.items())
    spec = FastVitSpec(depths, widths)
    if spec.num_blocks > MAX_LAYERS:
        raise CheckpointError(f"{arguments.where} asks for {spec.num_blocks} layers; at most {MAX_LAYERS} are believed", BROKEN)
    attending = spec.widths[-spec.attending :]
    is_odd = any(after % before for before, after in zip(spec.widths, spec.widths[1:], strict=False))
    if is_odd or any(each % spec.head_dim for each in attending):
        told = f"{arguments.where}: 'embed_dims' must be multiples of those before them, the last two of {spec.head_dim}"
        raise CheckpointError(told, BROKEN)
    return spec


_TOWER = "vision_tower.timm_model"
_STAGE = f"{_TOWER}.stages.{{i}}"
_BLOCK = f"{_STAGE}.blocks.{{j}}"
_OURS = "stages.{i}.blocks.{j}"
_NORM = {"weight": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
FASTVLM_NAMES = weights_and_biases({
    "patch": f"{_TOWER}.stem.0.reparam_conv",
    "stem.mix": f"{_TOWER}.stem.1.reparam_conv",
    "stem.out": f"{_TOWER}.stem.2.reparam_conv",
    "stages.{i}.shrink": f"{_STAGE}.downsample.proj.0.reparam_conv",
    "stages.{i}.join": f"{_STAGE}.downsample.proj.1.reparam_conv",
    "stages.{i}.places": f"{_STAGE}.pos_emb.reparam_conv",
    f"{_OURS}.mix": f"{_BLOCK}.token_mixer.reparam_conv",
    f"{_OURS}.attention_norm": f"{_BLOCK}.norm",
    f"{_OURS}.qkv": f"{_BLOCK}.token_mixer.qkv",
    f"{_OURS}.out": f"{_BLOCK}.token_mixer.proj",
    f"{_OURS}.spread": f"{_BLOCK}.mlp.conv.conv",
    f"{_OURS}.up": f"{_BLOCK}.mlp.fc1",
    f"{_OURS}.down": f"{_BLOCK}.mlp.fc2",
    "final": f"{_TOWER}.final_conv.reparam_conv",
    "weigh.up": f"{_TOWER}.final_conv.se.fc1",
    "weigh.down": f"{_TOWER}.final_conv.se.fc2",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
}) | {
    f"{_OURS}.scale.weight": (f"{_BLOCK}.layer_scale.gamma",),
    f"{_OURS}.attention_scale.weight": (f"{_BLOCK}.layer_scale_1.gamma",),
    f"{_OURS}.mlp_scale.weight": (f"{_BLOCK}.layer_scale_2.gamma",),
} | {f"{_OURS}.spread_norm.{ours}": (f"{_BLOCK}.mlp.conv.bn.{theirs}",) for ours, theirs in _NORM.items()}  # fmt: skip
