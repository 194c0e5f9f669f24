"""llama.cpp's mixes of block types: which tensor of a GGUF file gets which, by the rules that its `llama-quantize` publishes.

    q4_k_m      Q4_K, but Q6_K for half of the layers' attn_v and ffn_down
    q4_k_s      Q4_K, but Q5_K for attn_v of four layers and the first eighth of ffn_down
    q5_k_m      Q5_K, but Q6_K where q4_k_m has it        q5_k_s    Q5_K
    q3_k_m      Q3_K, but Q4_K or Q5_K for attn_v, attn_output, ffn_down        q3_k_s, q3_k_l alike, with fewer and more bits
    q2_k_m      Q2_K, but Q3_K for attn_output and ffn_down, Q3_K or Q4_K for attn_v: llama.cpp's "Q2_K"
    q4_k, …     one type

In all of them the head, or an embedding that is the head as well, is Q6_K, or Q8_0 in q8_0. What a row's width doesn't allow
falls back to a type of 32 columns. A tensor that values share with queries and keys is as attn_v. In a model of 8 experts, which
have most of its numbers, attn_k and attn_v are Q8_0, and attn_output is Q5_K in mixes of fewer bits. A Falcon has fewer bits in
attn_output and ffn_down, and Q8_0 for the head. The rules:
https://github.com/ggml-org/llama.cpp, src/llama-quant.cpp (the exception that it makes for Llama 2's 70B is left out).
"""

from __future__ import annotations

from nanovllm_cli.mixer_spec import MixerSpec, attention_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.quant.format_names import BLOCK_TYPES
from nanovllm_cli.quant.gguf_blocks import block_type
from nanovllm_cli.quant.gguf_types import FILE_TYPES
from nanovllm_cli.state_spec import DeltaSpec
from nanovllm_cli.weights.convert_tensors import NARROW

_BASES = {
    **{name.lower(): name for name in BLOCK_TYPES},
    **{name: name[:4].upper() for name in ("q2_k_m", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m")},
}
MIXES = tuple(_BASES)
_OF_ONE_TYPE = ("q2_k", "q3_k", "q4_k", "q5_k")  # here; llama.cpp's names for mixes
_FEW_BITS = ("q2_k_m", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")
_FALCON = "falcon"
_FILE_TYPES = {"q2_k_m": "MOSTLY_Q2_K", "q3_k": "MOSTLY_Q3_K_M", "q4_k": "MOSTLY_Q4_K_M", "q5_k": "MOSTLY_Q5_K_M"}


def file_type(mix: str) -> int:
    """What `general.file_type` says of a file in this mix."""
    return FILE_TYPES[_FILE_TYPES.get(mix, f"MOSTLY_{mix.upper()}")]


def type_of(mix: str, ours: str, width: int, spec: ModelSpec) -> str | None:
    """The type of the weight `ours` ("blocks.3.v.weight", "embedding.weight", "head.weight") with rows of `width`; None where no
    type has rows of such a width."""
    wanted = _BASES[mix]
    part = "values" if ".values." in ours else ours.split(".")[-2]
    if part == "head" or (part in ("embedding", "per_layer_embedding") and spec.tied_head):
        wanted = "Q8_0" if wanted == "Q8_0" or spec.architecture == _FALCON else "Q6_K"
    elif ours.startswith("blocks."):
        wanted = _in_block(mix, part, int(ours.split(".")[1]), spec) or wanted
    if not _fits(wanted, width):
        wanted = NARROW.get(wanted, wanted)
    return wanted if _fits(wanted, width) else None


def _fits(name: str, width: int) -> bool:
    return width % block_type(name).block_len == 0


def _in_block(mix: str, part: str, layer: int, spec: ModelSpec) -> str | None:
    """The type that differs from the mix's own, for a part of a layer: "q", "down", …"""
    part = {"qkv": "v", "delta_qkv": "v", "delta_q": "q", "delta_k": "k", "delta_v": "v"}.get(part, part)
    part = "o" if part == "delta_out" and _is_apart(spec, layer) else part
    if spec.mixture is not None and spec.mixture.num_experts == 8 and mix not in _OF_ONE_TYPE:
        if part in ("k", "v"):
            return "Q8_0"
        if part == "o":
            return "Q5_K" if mix in _FEW_BITS else None
    if part == "v":  # those without are not counted
        having = [i for i, mixer in enumerate(spec.mixers) if _has_values(mixer)]
        layer, layers = having.index(layer), len(having)
    else:
        layers = spec.num_layers
        if part == "down" and spec.mixture is None:  # those are counted, but all layers as well
            layer -= [block.mlp for block in spec.blocks[:layer]].count(None)
    many = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if spec.architecture == _FALCON and part in ("o", "down"):
        return _in_falcon(mix, part, many, is_first=layer < layers // 16)
    match mix, part:
        case (("q4_k_m" | "q5_k_m"), ("v" | "down")) if many:
            return "Q6_K"
        case ("q4_k_s", "v") if layer < 4:
            return "Q5_K"
        case ("q4_k_s", "down") if layer < layers // 8:
            return "Q5_K"
        case "q3_k_m", "v":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "q3_k_m", "down":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "q3_k_m", "o":
            return "Q4_K"
        case "q3_k_l", ("v" | "o" | "down"):
            return "Q5_K"
        case "q2_k_m", ("o" | "down"):
            return "Q3_K"
        case "q2_k_m", "v":
            return "Q4_K" if _queries_a_key(spec) >= 4 else "Q3_K"
    return None


def _in_falcon(mix: str, part: str, many: bool, *, is_first: bool) -> str | None:
    """The same of attn_output and ffn_down of a Falcon. many: whether the layer is one of those with more bits."""
    match mix, part:
        case "q4_k_m", "down":
            return "Q6_K" if is_first else "Q5_K" if many else None
        case "q5_k_m", "down":
            return "Q6_K" if many else None
        case "q3_k_m", "down":
            return "Q5_K" if is_first else "Q4_K" if many else None
        case "q3_k_l", _:
            return "Q4_K"
        case "q2_k_m", "down":
            return "Q3_K"
    return None


def _is_apart(spec: ModelSpec, layer: int) -> bool:
    """Whether a file calls what reads a layer's states as it calls what reads values of attention."""
    mixer = spec.mixers[layer]
    return isinstance(mixer, DeltaSpec) and mixer.apart


def _has_values(mixer: MixerSpec | None) -> bool:
    """Whether a layer has a weight that makes values of its own."""
    if (attention := attention_in(mixer)) is not None:
        of_one = attention.reads is None and attention.values is None
        return of_one and not attention.keys_are_values and attention.latent is None
    return isinstance(mixer, DeltaSpec) and not mixer.mamba


def _queries_a_key(spec: ModelSpec) -> int:
    """llama.cpp's, which looks at the first layer: 0 where that has no keys."""
    first = spec.mixers[0]
    has_keys = attention_in(first) is not None or (isinstance(first, DeltaSpec) and not first.mamba)
    return spec.attention.queries_a_key if has_keys else 0
