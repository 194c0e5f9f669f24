"""Checkpoints that hold several matrices in one tensor, as if each were a tensor of its own.

    GPT-2       h.3.attn.c_attn.weight [K, 3 N], c_proj, c_fc   the same [3 N, K], turned over
    GPT-NeoX    attention.query_key_value.weight [3 N, K]       the same, q, k and v of all heads behind each other; of each head
                                                                they lie together; bias alike. Falcon: see InternLM2
    GGUF        blk.3.ffn_gate_exps.weight [E, N, K]            blk.3.ffn_gate_exps.5.weight [N, K]; biases [E, N] alike, and
                                                                attn_k_b and attn_v_b of latent attention, Gemma 3n's
                                                                altup_proj and altup_unembd_proj
    gpt-oss     mlp.experts.gate_up_proj_blocks [E, 2 N, …]     mlp.experts.5.gate_proj_blocks [N, …], its rows 0, 2, 4, …, and
                                                                up_proj_blocks, those between; scales and biases alike
                mlp.experts.gate_up_proj [E, K, 2 N], plain     mlp.experts.5.gate_proj [N, K], turned over; of the privacy filter
                                                                gate is the first half
    Qwen3-VL    mlp.experts.gate_up_proj [E, K, 2 N]            mlp.experts.5.gate_proj.weight [N, K], turned over, its first
                                                                half, and up_proj.weight, the other
    Qwen3.5     mlp.experts.gate_up_proj [E, 2 N, K]            the same, not turned over
    Gemma 4     experts.gate_up_proj [E, 2 N, K]                experts.5.gate_proj.weight [N, K], halves as well; GGUF's
                                                                ffn_gate_up_exps too
    Granite     block_sparse_moe.input_linear.weight [E, 2 N, K]  block_sparse_moe.experts.5.gate_proj.weight [N, K] and
                                                                up_proj.weight, halves as well; output_linear is down_proj
                shared_mlp.input_linear.weight [2 N, K]         shared_mlp.gate_proj.weight [N, K] and up_proj.weight
    Mistral 4   mlp.experts.gate_up_proj_scale_inv [E, 2, 1]    mlp.experts.0.gate_proj.weight_scale_inv and up_proj…, [1]; [E] is
                                                                one for both; …_activation_scale alike
    ERNIE VL    mlp.experts.64.up_proj.weight, 64 for texts     mlp.vision.experts.0.up_proj.weight; routers are turned over, and
                                                                of biases that choose the second row is of these
    Llama 4     feed_forward.experts.gate_up_proj [E, K, 2 N]   feed_forward.experts.0.gate_proj.weight and up_proj.weight, [N, K]
    Granite SWA block_sparse_moe.experts.gate_up_proj as Gemma 4's; GGUF's ffn_up_shexp.weight [2 N, K] is ffn_gate_shexp and
                ffn_up_shexp
    LFM2        conv.conv.weight [N, 1, K]                  conv.conv.weight [N, K]; Qwen3.5's linear_attn.conv1d.weight,
                                                                Granite's and Nemotron's mamba.conv1d.weight alike
    Mamba-2     blk.3.ssm_a [N, 1], ssm_norm.weight [G, N]      the same [N] and [G N], which some files have anyway; ssm_d alike,
                                                                and ERNIE's exp_probs_b.bias [1, E]
    Kimi Linear self_attn.A_log [1, 1, H, 1]                the same [H]; GGUF's ssm_a, and ssm_conv1d_q.weight [1, N, 1, K],
                                                                whose ones are not always there
    Qwen3-Next  linear_attn.in_proj_qkvz.weight [N, K]      linear_attn.in_proj_qkv.weight and in_proj_z.weight: of each key head
                                                                its q and k, and v and z of the value heads that share it
                linear_attn.in_proj_ba.weight [N, K]        in_proj_b.weight and in_proj_a.weight alike; GGUF's ssm_ba too
                blk.3.ffn_gate_inp_shexp.weight [K]         blk.3.ffn_gate_inp_shexp.weight [1, K]
    LaraMini    linear_attn.in_proj.weight [N, K]           in_proj_qkv.weight, in_proj_z, in_proj_b and in_proj_a, in this order
    InternLM2   attention.wqkv.weight [(H + 2 G) D, K]          attention.wq, wk and wv, where of each of G key-value heads its
                                                                queries, its key and its value lie together; biases alike
    Ling 1      attention.query_key_value.weight [(H + 2 G) D, K]   attention.q_proj, k_proj and v_proj, one behind the other
    Step        moe.gate_proj.weight [E, N, K]                  moe.gate_proj.5.weight [N, K]; scales in FP8 and NVFP4 alike, and
                                                                of weight_scale_2 and input_scale [E] a number each
    RWKV-7      attn.x_x [6, K]                                 attn.x_r, x_w, … [K]; GGUF's time_mix_lerp_fused.weight
                                                                [6, 1, 1, K] is time_mix_lerp_r.weight, …
                attn.x_r [1, 1, K], attn.r_k [H, D]             the same [K]
    BART        final_logits_bias [1, N]                        the same [N]
    Moonshine   mlp.fc1.weight [2 N, K]                         mlp.up_proj.weight, and behind it mlp.gate_proj; biases alike, and
                                                                GTE's mlp.up_gate_proj.weight
    ERNIE       mlp.moe_statics.e_score_correction_bias [1, E]  mlp.moe_statics.e_score_correction_bias.0 [E], of [2, E] as well

So readers, loader and formats know nothing of it. What is taken out is a view of the mapped file. Of matrices that others
quantized it is done to what they stand for (`quantized_rows.py`).

Legend: E experts, N rows, K columns; H heads of queries, G of keys, of D numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.experts import MAX_EXPERTS
from nanovllm_cli.models.falcon import key_heads
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo
from nanovllm_cli.weights.folded import folded
from nanovllm_cli.weights.folder_config import quantization_of
from nanovllm_cli.weights.key_heads import rows_of
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.stacked_parts import ALL as _ALL
from nanovllm_cli.weights.stacked_parts import MAX_PARTS, delta_parts, shares_of_before
from nanovllm_cli.weights.stacked_parts import Config as _Config
from nanovllm_cli.weights.stacked_parts import Part as _Part
from nanovllm_cli.weights.stacked_parts import Parts as _Parts
from nanovllm_cli.weights.stacked_parts import parts_by_key_head as _key_heads

_HALF, _DELTA = "{part}_proj.weight", r"(model\.layers\.\d+\.linear_attn)"
_EVEN, _ODD = slice(0, None, 2), slice(1, None, 2)
_TURNED = "gpt2", "ernie4_5_vl_moe", "ernie4_5_moe_vl"


def _gguf(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, kind = found.groups()
    for e in range(shape[0]):
        yield f"{place}.{e}.{kind}", _Part(stack, e, _ALL)


def _gpt_oss(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, which, kind = found.groups()
    if "language_model." in place and _inner_kind(config) != "gpt_oss":
        return
    if _has_halves(config):
        yield from _halves(f"{place}.{{e}}.{_HALF}", stack, shape[0], None if which == "down" else shape[1])
        return
    parts = {"down": _ALL} if which == "down" else {"gate": _EVEN, "up": _ODD}
    if which != "down" and config.get("model_type") == "openai_privacy_filter":
        parts = {"gate": slice(0, shape[-1] // 2), "up": slice(shape[-1] // 2, None)}
    for e in range(shape[0]):
        for part, rows in parts.items():
            yield f"{place}.{e}.{part}_proj{kind}", _Part(stack, e, rows, turned=not kind)


def _qwen_vl(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    """Turned over in what is published; not so, by its width, in what transformers has made."""
    place, which = found.groups()
    if _inner_kind(config) == "gpt_oss":
        return
    text = config.get("text_config")
    width = text.get("hidden_size") if isinstance(text, Mapping) else None
    turned = shape[2 if which == "down" else 1] == width and not _has_halves(config)
    num_rows = None if which == "down" else shape[2 if turned else 1]
    yield from _halves(f"{place}.{{e}}.{_HALF}", stack, shape[0], num_rows, turned=turned)


def _numbers(kind: str, found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    """Scales beside stacked codes in FP8: one an expert, or one for gate and one for up."""
    place, which = found.groups()
    each = math.prod(shape[1:])
    if not _has_halves(config) or shape[0] > MAX_EXPERTS or each not in ((1,) if which == "down" else (1, 2)):
        return
    parts = {"down": 0} if which == "down" else {"gate": 0, "up": each - 1}
    for e in range(shape[0]):
        for part, row in parts.items():
            yield f"{place}.{e}.{part}_proj.{kind}", _Part(stack, e, slice(row, row + 1), number=True)


def _number_each(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, kind = found.groups()
    for e in range(min(shape[0], MAX_EXPERTS)):
        yield f"{place}.{e}.{kind}", _Part(stack, e, slice(0, 1), number=True)


def _inner_kind(config: _Config) -> Any:
    inner = config.get("text_config")
    return inner.get("model_type") if isinstance(inner, Mapping) else None


def _has_halves(config: _Config) -> bool:
    """Whether gate lies in front of up, and nothing is turned over, whatever the shapes are."""
    kinds = [config.get("model_type"), _inner_kind(config)]
    known = ("qwen3_5", "qwen3_next", "qwen4_exp", "mistral4", "lara_mini", "hy_v4", "zaya", "deepseek_v4")
    return any(str(kind).startswith(known) for kind in kinds)


def _gguf_halves(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    return _halves(f"{found[1]}.ffn_{{part}}_exps.{{e}}.weight", stack, shape[0], shape[1])


def _gguf_shared_halves(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    if config.get("general.architecture") == "granite_swa":
        yield from _halves(f"{found[1]}.ffn_{{part}}_shexp.weight", stack, None, shape[0])


def _gemma4(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, which = found.groups()
    return _halves(f"{place}.{{e}}.{_HALF}", stack, shape[0], None if which == "down" else shape[1])


def _llama4(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, which = found.groups()
    return _halves(f"{place}.{{e}}.{_HALF}", stack, shape[0], None if which == "down" else shape[2], turned=True)


def _granite(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, which = found.groups()
    return _halves(f"{place}.experts.{{e}}.{_HALF}", stack, shape[0], None if which == "output" else shape[1])


def _granite_shared(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    (place,) = found.groups()
    return _halves(f"{place}.{_HALF}", stack, None, shape[0])


def _of_one_row(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    if shape[0] == (2 if config.get("model_type") in _TURNED else 1):  # the second is of images
        for row in range(shape[0]):
            yield f"{stack}.{row}", _Part(stack, row, _ALL)


def _of_images(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    """They have numbers behind those of experts for texts."""
    inner = config.get("text_config")
    said = (inner if isinstance(inner, Mapping) else config).get("moe_num_experts", 64)
    count = said[0] if isinstance(said, list) and said else said
    if config.get("model_type") in _TURNED and type(count) is int and int(found[2]) >= count:
        yield f"{found[1]}.vision.experts.{int(found[2]) - count}.{found[3]}", _Part(stack, None, _ALL)


def _moonshine(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    half = shape[0] // 2
    for part, rows in (("up", slice(0, half)), ("gate", slice(half, None))):
        yield f"{found[1]}.{part}_proj.{found[2]}", _Part(stack, None, rows)


def _as_a_vector(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    yield stack, _Part(stack, None, _ALL, whole=True)


def _of_one_column(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    if len(shape) == 4 and shape[0] == shape[2] == 1:
        yield stack, _Part(stack, 0, _ALL, flat=True)
    elif len(shape) < 4 and shape[1] == 1:
        yield stack, _Part(stack, None, _ALL, flat=True)


def _a_row(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    yield stack, _Part(stack, None, _ALL, lying=True)


def _turned_over(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    if str(config.get("model_type", "gpt2")) in _TURNED:  # others have its names, and matrices as usual
        yield stack, _Part(stack, None, _ALL, turned=True)


def _qkv_by_head(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    heads = config.get("num_attention_heads", config.get("n_head"))
    if rows := rows_of(heads, key_heads(config), shape[0]):
        yield stack, _Part(stack, None, rows)


def _by_key_head(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    place, kind = found.groups()
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    heads: Any = text.get("num_attention_heads")
    keys: Any = text.get("num_key_value_heads") or heads
    if rows := rows_of(heads, keys, shape[0]):
        own, of_keys = (count * shape[0] // (heads + 2 * keys) for count in (heads, keys))
        for part, first, end in (("q", 0, own), ("k", own, own + of_keys), ("v", own + of_keys, None)):
            yield f"{place}.w{part}.{kind}", _Part(stack, None, rows[first:end])


def _parts_of_ling(found: re.Match[str], stack: str, shape: tuple[int, ...], config: _Config) -> _Parts:
    """Of the first ones: of the second, whose "model_type" is the same, they are one tensor here, too."""
    heads: Any = config.get("num_attention_heads")
    keys: Any = config.get("num_key_value_heads") or heads
    if config.get("architectures") == ["BailingMoeForCausalLM"] and rows_of(heads, keys, shape[0]):
        own, of_keys = (count * shape[0] // (heads + 2 * keys) for count in (heads, keys))
        for part, first, end in (("q", 0, own), ("k", own, own + of_keys), ("v", own + of_keys, None)):
            yield f"{found[1]}.{part}_proj.weight", _Part(stack, None, slice(first, end))


def _halves(name: str, stack: str, num_experts: int | None, num_rows: int | None, *, turned: bool = False) -> _Parts:
    """Gate and up, of so many rows together, or down. name: of each, with places for {e} and {part}."""
    parts = {"down": _ALL} if num_rows is None else {"gate": slice(0, num_rows // 2), "up": slice(num_rows // 2, None)}
    for e in [None] if num_experts is None else range(num_experts):
        for part, rows in parts.items():
            yield name.format(e=e, part=part), _Part(stack, e, rows, turned)


_MIXTURE = r"((?:language_model\.)?model\.(?:language_model\.)?layers\.\d+\.mlp\.experts)"
_Layout = tuple[re.Pattern[str], dict[str, int] | int | None, Callable[[re.Match[str], str, tuple[int, ...], _Config], _Parts]]
"""Names, how many dims such tensors have (by the name's last group, or any), and what is in them."""
_LAYOUTS: dict[str, list[_Layout]] = {
    "gguf": [
        (re.compile(r"(blk\.\d+\.(?:ffn_(?:gate|up|down)|attn_v)_exps)\.(weight|bias)"), {"weight": 3, "bias": 2}, _gguf),
        (re.compile(r"(blk\.\d+)\.ffn_gate_up_exps\.weight"), 3, _gguf_halves),
        (re.compile(r"(blk\.\d+)\.ffn_up_shexp\.weight"), 2, _gguf_shared_halves),
        (re.compile(r"(blk\.\d+\.attn_[kv]_b|altup_(?:unembd_)?proj)\.(weight)"), 3, _gguf),
        (re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight"), 1, _a_row),
        (re.compile(r"(blk\.\d+)\.(ssm_ba)\.weight"), 2, _key_heads),
        (re.compile(r"blk\.\d+\.ssm_[ad]"), 2, _of_one_column),
        (re.compile(r"blk\.\d+\.ssm_a"), 4, _as_a_vector),
        (re.compile(r"blk\.\d+\.ssm_conv1d_[qkv]\.weight"), 3, _of_one_column),
        (re.compile(r"blk\.\d+\.ssm_conv1d_[qkv]\.weight"), 4, _of_one_column),
        (re.compile(r"blk\.\d+\.(?:ssm_norm\.weight|exp_probs_b\.bias)"), 2, _as_a_vector),
        (re.compile(r"(blk\.\d+\.time_mix_lerp_)fused\.weight"), 4, partial(shares_of_before, ".weight")),
    ],
    "hf": [
        (re.compile(r"(?:transformer\.)?h\.\d+\.(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight"), 2, _turned_over),
        (re.compile(r"model\.layers\.\d+\.mlp\.gate\.weight(?:_1)?"), 2, _turned_over),
        (re.compile(r"(?:(?:gpt_neox\.)?layers\.\d+\.attention|(?:transformer\.)?h\.\d+\.self_attention)"
                    r"\.query_key_value\.(weight|bias)"), {"weight": 2, "bias": 1}, _qkv_by_head),
        (re.compile(r"((?:language_model\.)?model\.layers\.\d+\.attention)\.wqkv\.(weight|bias)"), {"weight": 2, "bias": 1},
         _by_key_head),
        (re.compile(r"(model\.layers\.\d+\.attention)\.query_key_value\.weight"), 2, _parts_of_ling),
        (re.compile(r"(model\.layers\.\d+\.moe\.(?:gate|up|down)_proj)\.(weight(?:_scale(?:_inv)?)?)"), 3, _gguf),
        (re.compile(r"(model\.layers\.\d+\.moe\.(?:gate|up|down)_proj)\.(weight_scale_2|input_scale)"), 1, _number_each),
        (
            re.compile(r"((?:(?:(?:language_model\.)?model|model\.language_model|mtp)\.)?layers\.\d+\.mlp\.experts)"
                       r"\.(gate_up|down)_proj(_blocks|_scales|_bias|)"),
            {"": 3, "_blocks": 4, "_scales": 3, "_bias": 2}, _gpt_oss,
        ),
        (re.compile(rf"{_MIXTURE}\.(gate_up|down)_proj_scale_inv"), None, partial(_numbers, "weight_scale_inv")),
        (re.compile(rf"{_MIXTURE}\.(gate_up|down)_proj_activation_scale"), None, partial(_numbers, "activation_scale")),
        (re.compile(r"((?:model\.language_model|language_model\.model)\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj"), 3,
         _qwen_vl),
        (re.compile(r"(model\.(?:language_model\.)?layers\.\d+\.(?:block_sparse_moe\.)?experts)\.(gate_up|down)_proj"), 3,
         _gemma4),
        (re.compile(r"((?:language_model\.)?model\.(?:language_model\.)?layers\.\d+\.feed_forward\.experts)\.(gate_up|down)_proj"),
         3, _llama4),
        (re.compile(r"(model\.layers\.\d+\.block_sparse_moe)\.(input|output)_linear\.weight"), 3, _granite),
        (re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(\d{1,6})\.(.+)"), None, _of_images),
        (re.compile(r"model\.layers\.\d+\.mlp\.moe_statics\.e_score_correction_bias"), 2, _of_one_row),
        (re.compile(r"(?:model\.(?:language_model\.)?)?layers\.\d+\.(?:conv\.conv|self_attn\.qkv_proj\.conv_qk_depthwise|"
                    r"(?:linear_attn|ple|mamba|self_attn|attention)\.(?:[qkv]_)?conv1d)\.weight"), 3, _of_one_column),
        (re.compile(r"model\.layers\.\d+\.self_attn\.A_log"), 4, _as_a_vector),
        (re.compile(r"final_logits_bias"), 2, _as_a_vector),
        (re.compile(r"(model\.decoder\.layers\.\d+\.mlp)\.fc1\.(weight|bias)"), {"weight": 2, "bias": 1}, _moonshine),
        (re.compile(r"((?:gte\.|new\.)?encoder\.layer\.\d+\.mlp)\.up_gate_proj\.(weight)"), 2, _moonshine),
        (re.compile(r"(model\.layers\.\d+\.attn\.x_)x"), 2, partial(shares_of_before, "")),
        (re.compile(r"model\.layers\.\d+\.(?:attn|ffn)\.x_[rwkvag]"), 3, _as_a_vector),
        (re.compile(r"model\.layers\.\d+\.attn\.r_k"), 2, _as_a_vector),
        (re.compile(r"(?:(?:(?:language_)?model\.)?backbone|model)\.layers\.\d+\.mixer\.conv1d\.weight"), 3, _of_one_column),
        (re.compile(rf"{_DELTA}\.in_proj_(qkvz|ba)\.weight"), 2, _key_heads),
        (re.compile(rf"{_DELTA}\.in_proj\.weight"), 2, delta_parts),
        (re.compile(r"(model\.layers\.\d+\.shared_mlp)\.input_linear\.weight"), 2, _granite_shared),
        (re.compile(r"((?:bert\.)?encoder\.layer\.\d+\.mlp)\.gated_layers\.weight"), 2, _granite_shared),
    ],
}  # fmt: skip


_OF_ROWS = _turned_over, _qkv_by_head, _by_key_head, _parts_of_ling, _key_heads, delta_parts, _granite_shared, _moonshine
"""Of matrices, which may be quantized."""


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where nothing is stacked, or is no more, and `folded` does nothing. Matrices that others quantized
    stay what they are: see `rows_apart`. CheckpointError for more experts, or tensors of them, than are believed."""
    checkpoint = folded(checkpoint)
    parts: dict[str, _Part] = {}
    names = [] if checkpoint.apart else checkpoint.names()
    coded = _coded(checkpoint, names)
    for name in names:
        for pattern, dims, take in _LAYOUTS[checkpoint.format]:
            found = pattern.fullmatch(name)
            if found is None or (take in _OF_ROWS and name in coded):
                continue
            shape = checkpoint.info(name).shape
            if dims is not None and len(shape) != (dims if isinstance(dims, int) else dims[found.groups()[-1]]):
                continue  # it stays under its name, which is none of the model's
            if len(shape) > 2 and take is not _of_one_column and shape[0] > MAX_EXPERTS:
                most = f"at most {MAX_EXPERTS} are believed"
                raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has {shape[0]} experts; {most}", DOWNLOAD_AGAIN)
            if len(parts) > MAX_PARTS:
                most = f"more than {MAX_PARTS} tensors of experts are not believed"
                raise CheckpointError(f"{checkpoint.path}: {most}", DOWNLOAD_AGAIN)
            parts.update(take(found, name, shape, checkpoint.config))
    return _Unstacked(checkpoint, parts) if parts else checkpoint


def _coded(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Weights of a quantized folder that have tensors beside them that say what they mean."""
    if checkpoint.format == "gguf" or quantization_of(checkpoint.config) is None:
        return set()
    beside = (name for name in names if not name.endswith((".weight", ".bias")))
    return {f"{name.partition('.weight.')[0] if '.weight.' in name else name.rpartition('.')[0]}.weight" for name in beside}


def rows_apart(name: str, shape: tuple[int, ...], config: _Config) -> dict[str, slice | tuple[int, ...]]:
    """The same of a matrix of a folder whatever it is stored as: parts' names, and which rows they are. None are turned over, as
    tools quantize what GPT-2 has [K, N] as a matrix like others."""
    for pattern, _, take in _LAYOUTS["hf"]:
        if take in _OF_ROWS and (found := pattern.fullmatch(name)):
            return {own: part.rows for own, part in take(found, name, shape, config)}
    return {}


def holds_several(checkpoint: Checkpoint) -> bool:
    """Whether a tensor is more than one of the model's."""
    parts = unstacked(checkpoint)
    return isinstance(parts, _Unstacked) and not all(part.flat or part.lying or part.whole for part in parts.parts.values())


def stack_of(checkpoint: Checkpoint, name: str) -> str:
    """The tensor of the files that `name` is a part of; itself where it is one."""
    return checkpoint.parts[name].stack if isinstance(checkpoint, _Unstacked) and name in checkpoint.parts else name


def expert_of(checkpoint: Checkpoint, name: str) -> int | None:
    """Which of a stack `name` is; None where it is none of one."""
    return checkpoint.parts[name].expert if isinstance(checkpoint, _Unstacked) and name in checkpoint.parts else None


class _Unstacked(CheckpointView):
    """`parts` by their names."""

    def __init__(self, inner: Checkpoint, parts: dict[str, _Part]) -> None:
        super().__init__(inner)
        self.apart = True
        self.parts = parts
        self._last = {part.stack: name for name, part in parts.items()}
        self._names = [*(name for name in inner.names() if name not in self._last), *parts]

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self.parts:
            return super().info(name)
        part = self.parts[name]
        info, shape = self._inner.info(part.stack), self._shape(part)
        if part.lying or part.whole:
            own = (1, *info.shape) if part.lying else (math.prod(shape[1:]),)
            return TensorInfo(name, own, info.dtype_name, info.num_bytes // shape[0])
        if part.number:
            return TensorInfo(name, (1,), info.dtype_name, info.num_bytes // math.prod(info.shape))
        num_rows, *others = shape[:0:-1] if part.turned else shape[1:]
        others = others[1:] if part.flat else others
        own_rows = len(range(num_rows)[part.rows] if isinstance(part.rows, slice) else part.rows)
        own_bytes = info.num_bytes // shape[0] * own_rows // max(1, num_rows)
        return TensorInfo(name, (own_rows, *others), info.dtype_name, own_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self.parts:
            return super().tensor(name, rows)
        part = self.parts[name]
        if part.expert is None:
            own = self._inner.tensor(part.stack)
            own = own[:, 0] if part.flat else own[None] if part.lying else own.flatten() if part.whole else own
        else:
            own = self._inner.tensor(part.stack, (part.expert, part.expert + 1))[0]
            own = own[:, 0] if part.flat else own.flatten() if part.whole else own
        own = own.T if part.turned else own
        own = own.flatten() if part.number else own
        if isinstance(part.rows, tuple):
            return own[list(part.rows if rows is None else part.rows[rows[0] : rows[1]])]
        own = own[part.rows]
        own = own if rows is None else own[rows[0] : rows[1]]
        return own.contiguous() if part.turned else own

    def raw(self, name: str) -> torch.Tensor:
        if name not in self.parts:
            return super().raw(name)
        part = self.parts[name]
        if part.turned:
            kind = self._inner.info(part.stack).dtype_name
            raise UnsupportedError(f"{self.path}: tensor {part.stack!r} turned over in {kind}", ANOTHER)
        num_experts, num_rows, *_ = self._shape(part)
        own = self._inner.raw(part.stack).flatten().view(num_experts, num_rows, -1)[part.expert or 0]
        return own[part.rows if isinstance(part.rows, slice) else list(part.rows)]

    def _shape(self, part: _Part) -> tuple[int, ...]:
        """[E, …] of its stack."""
        shape = self._inner.info(part.stack).shape
        return (1, *shape) if part.expert is None else shape

    def release(self, name: str) -> None:
        """A stack's pages go when its last expert is read: those of two experts may lie on one."""
        if name not in self.parts:
            super().release(name)
        elif self._last[self.parts[name].stack] == name:
            self._inner.release(self.parts[name].stack)
