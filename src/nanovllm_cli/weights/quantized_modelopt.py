"""Checkpoints of NVIDIA's Model Optimizer ("modelopt"): NVFP4, FP8 and MXFP8, also several of them.

    NVFP4, W4A16_NVFP4              see quantized_nvfp4.py; inputs are kept finer than the first has them
    FP8                             weight e4m3, weight_scale and input_scale one each
    FP8_PER_CHANNEL_PER_TOKEN       weight_scale [N]; inputs are scaled as they come
    FP8_PB_WO                       a scale a block of 128 x 128; inputs stay as they are
    MXFP8                           see quantized_microscaled.py; inputs are kept finer

What each module holds shows in its tensors, so the config's lists of layers are not needed; `quant_algo` says what else there is
that changes what numbers mean, and that is refused.
"""

from __future__ import annotations

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_fp8 import fp8_weight, is_fp8
from nanovllm_cli.weights.quantized_microscaled import mxfp8_weight
from nanovllm_cli.weights.quantized_mxfp4 import SCALE_TYPES
from nanovllm_cli.weights.quantized_nvfp4 import nvfp4_weight
from nanovllm_cli.weights.quantized_weight import BYTES, Module, QuantizedWeight, modules

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "MIXED_PRECISION")
SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


def read_modelopt(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    _check_algorithms(config)
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        if module.has("pre_quant_scale"):
            raise module.any("pre_quant_scale").unsupported("scales what goes into a layer", "take a model without it")
        if module.has("weight_scale_2") or (module.has("weight") and module.any("weight").dtype_name in BYTES):
            weight: QuantizedWeight = nvfp4_weight(module, "weight", "weight_scale_2", "input_scale", divides=False)
        elif is_fp8(module):
            weight = _fp8(module)
        else:
            continue
        weights[module.weight_name] = weight
    return weights


def _check_algorithms(config: ConfigReader) -> None:
    named = [config.text("quant_algo")]
    layers = config.section("quantized_layers")
    named += [layers.section(name).text("quant_algo") for name in layers.values]
    for name in named:
        if name.upper() not in ALGORITHMS:
            raise UnsupportedError(f"{config.where}: the algorithm {name[:40]!r}", f"known: {', '.join(ALGORITHMS)}")


def _fp8(module: Module) -> QuantizedWeight:
    """By its scales; where there is one of its inputs it counts."""
    if module.has("weight_scale") and module.any("weight_scale").dtype_name in SCALE_TYPES:
        return mxfp8_weight(module)
    blocks = module.has("weight_scale") and len(module.any("weight_scale").shape) == 2
    if module.has("input_scale"):
        return fp8_weight(module, "weight_scale", blocks, "static")
    return fp8_weight(module, "weight_scale", blocks, "none" if blocks else "dynamic")
