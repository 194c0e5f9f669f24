"""How VipLLaVA sees, and Video-LLaVA, of which images alone are read here: their configs -> VisionSpec, and what their folders
call a tower's tensors. See `towers.py`, and `towers_llava.py`, which they are built like."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.tower_configs import depth_of, vision_section, weights_and_biases
from nanovllm_cli.models.towers_llava import LLAVA_NAMES, llava
from nanovllm_cli.vision_spec import VisionSpec

_READ = [-2, -5, -8, -11, 6]


def vip_llava(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """Of config.json, and of the image processor's settings. A patch's rows behind several layers are read, side by side."""
    depth = depth_of(vision_section(config, "clip_vision_model"), "num_hidden_layers", 24)
    said = config.values.get("vision_feature_layer", config.values.get("vision_feature_layers", _READ))
    layers = said if isinstance(said, list) else [said]
    counts = [each if each >= 0 else depth + 1 + each for each in layers if type(each) is int]
    if not 0 < len(counts) == len(layers) <= MAX_LAYERS or not all(0 < count <= depth for count in counts):
        told = f"{config.where}: 'vision_feature_layer' is {str(said)[:40]} in a tower of {depth} layers"
        raise CheckpointError(told, BROKEN)
    own = {"vision_feature_layer": max(counts), "vision_feature_select_strategy": "default"}
    spec = llava(ConfigReader({**config.values, **own}, config.where), images)
    eps = config.number("projector_layernorm_eps", 1e-5)
    return replace(spec, tower=replace(spec.tower, reads=tuple(counts), projector_eps=eps))


def video_llava(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """The same of a Video-LLaVA, whose images are of another side where its config says nothing."""
    vision = config.section("vision_config")
    values = {**config.values, "vision_config": {"image_size": 224, **vision.values}}
    return llava(ConfigReader(values, config.where), images)


VIP_LLAVA_NAMES = LLAVA_NAMES | weights_and_biases({"projector.norm": "multi_modal_projector.projector_layernorm"})
