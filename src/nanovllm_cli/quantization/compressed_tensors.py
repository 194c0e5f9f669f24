"""Quantized weights as a Hugging Face folder holds them, in the compressed-tensors form that vLLM and transformers load.

    int8                            int-quantized      weight int8 [N, K], weight_scale [N, 1]
    int8-weight-only, int8:group    pack-quantized     weight_packed int32 [N, K * bits / 32], weight_scale [N, G],
    int4                                               weight_shape [2], weight_zero_point int32 [N * bits / 32, G]
    fp8                             float-quantized    weight e4m3 [N, K], weight_scale [N, 1]
    fp8:block=128                   float-quantized    weight e4m3 [N, K], weight_scale [N / 128, K / 128]

Packed codes lie in words of 32 bits, the first in the lowest bits; zero points likewise, down the rows. Codes are stored from 0
up there, and around 0 in int8. Files say whether activations are rounded: int8 and fp8 a token, fp8 blocks 128 columns at a
time; 4 bits and the weight-only formats leave them.

The format: https://github.com/vllm-project/compressed-tensors. Not covered: reading it (`weights/`), writing files.

Legend: N rows, K columns, G groups along a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.format import FP8_BLOCK, SCALE_TYPES, Format, Fp8, Integer
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows, QuantizedRows
from nanovllm_cli.weights.quantized_weight import num_words
from nanovllm_cli.weights.writer import TensorOut

PACKED_BITS = (4, 8)


class _Scheme(NamedTuple):
    """format: what the tensors look like. weights and activations: config.json's words for them."""

    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None


def check_writable(form: Format) -> None:
    """UnsupportedError for formats that such a folder has no place for."""
    _scheme(form)


def tensors_of(form: Format, name: str, shape: tuple[int, ...]) -> list[TensorOut]:
    """What the weight `name` (it ends with ".weight") of shape (N, K) becomes."""
    rows, width = shape
    if isinstance(form, Fp8):
        scales = (-(-rows // FP8_BLOCK), form.num_groups(width)) if form.block else (rows, 1)
        return [TensorOut(name, shape, torch.float8_e4m3fn), TensorOut(f"{name}_scale", scales, torch.float32)]
    assert isinstance(form, Integer)
    groups = form.num_groups(width)
    scale = TensorOut(f"{name}_scale", (rows, groups), SCALE_TYPES[form.scales])
    if not _packed(form):
        return [TensorOut(name, shape, torch.int8), scale]
    packed = [
        TensorOut(f"{name}_packed", (rows, num_words(width, form.bits)), torch.int32),
        scale,
        TensorOut(f"{name}_shape", (2,), torch.int64),
    ]
    if form.zeros:
        packed.append(TensorOut(f"{name}_zero_point", (num_words(rows, form.bits), groups), torch.int32))
    return packed


def encode(form: Format, rows: QuantizedRows) -> list[torch.Tensor]:
    """A whole weight, as the tensors of `tensors_of`, in their order."""
    if isinstance(form, Fp8):
        assert isinstance(rows, Fp8Rows)
        return [rows.codes.view(torch.float8_e4m3fn), rows.scales[::FP8_BLOCK] if form.block else rows.scales]
    assert isinstance(form, Integer)
    assert isinstance(rows, IntegerRows)
    assert rows.order is None, "there is no place for an order of columns"
    if not _packed(form):
        return [(rows.codes ^ 0x80).view(torch.int8), rows.scales]
    packed = [_pack(rows.codes, form.bits), rows.scales, torch.tensor(rows.codes.shape, dtype=torch.int64)]
    if rows.zeros is not None:
        packed.append(_pack(rows.zeros.T.contiguous(), form.bits).T.contiguous())
    return packed


def quantization_config(formats: dict[str, Format | None]) -> dict[str, Any]:
    """config.json's "quantization_config" for all linear layers of a model, by module ("model.layers.0.mlp.up_proj"); None for
    those that stay as they are."""
    groups: dict[Format, list[str]] = {}
    for module, form in formats.items():
        if form is not None:
            groups.setdefault(form, []).append(module)
    schemes = {form: _scheme(form) for form in groups}
    names = {scheme.format for scheme in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if len(groups) == 1 else modules,
                "weights": schemes[form].weights,
                "input_activations": schemes[form].activations,
                "output_activations": None,
                "format": schemes[form].format,
            }
            for i, (form, modules) in enumerate(groups.items())
        },
        "ignore": [module for module, form in formats.items() if form is None],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(form: Format) -> _Scheme:
    if isinstance(form, Fp8):
        strategy: dict[str, Any] = {"strategy": "channel"}
        activations: dict[str, Any] = {"strategy": "token"}
        if form.block:
            strategy = {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
            activations = {"strategy": "group", "group_size": FP8_BLOCK}
        if form.activation == "none":
            return _Scheme("naive-quantized", _numbers("float", 8) | strategy, None)
        return _Scheme(
            "float-quantized", _numbers("float", 8) | strategy, _numbers("float", 8) | {"dynamic": True} | activations
        )
    if not isinstance(form, Integer) or form.bits not in PACKED_BITS:
        raise UnsupportedError(
            f"{form.name} has no place in a Hugging Face folder that vLLM loads",
            "known: int8, int8-weight-only, fp8, int4; GGUF's types (q4_k_m, q8_0, …) are written to a GGUF file",
        )
    weights = _numbers("int", form.bits) | {"symmetric": not form.zeros}
    weights |= {"strategy": "group", "group_size": form.group} if form.group else {"strategy": "channel"}
    if _packed(form):
        return _Scheme("pack-quantized", weights, None)
    return _Scheme("int-quantized", weights, _numbers("int", 8) | {"strategy": "token", "dynamic": True})


def _numbers(kind: str, bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "group_size": None}


def _packed(form: Integer) -> bool:
    """vLLM's int8 matmul has one scale a row and no zero points; everything else is weight-only, in words."""
    return form.bits != 8 or form.activation == "none" or bool(form.group) or form.zeros


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, count] of `bits` -> int32 [n, words], the first code in the lowest bits."""
    n, count = codes.shape
    words = codes.new_zeros(n, num_words(count, bits) * 32 // bits)
    words[:, :count] = codes
    if bits == 4:
        words = words[:, ::2] | (words[:, 1::2] << 4)
    return words.contiguous().view(torch.int32)
