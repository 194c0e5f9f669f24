"""Quantized checkpoints for tests: codes and scales drawn at random, packed from the formats' descriptions, and what they mean.

A maker takes (rows, columns, generator) and returns a module's tensors by suffix, and the weight that they stand for, float64,
computed from the drawn codes. Nothing here is shared with the readers under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.weights import weight_reader
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.weight_reader import WeightReader

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, np.ndarray]
Maker = Callable[[int, int, np.random.Generator], Made]
NAME = "model.layers.0.self_attn.q_proj"


def write(folder: Path, tensors: Tensors, quantization: Any, config: dict[str, Any] | None = None) -> Path:
    """A folder with these tensors and this quantization_config."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": quantization}))
    return folder


def module(tensors: Tensors, name: str = NAME) -> Tensors:
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def open_quantized(folder: Path) -> WeightReader:
    return open_reader(open_checkpoint(folder))


def read_weight(reader: WeightReader, name: str = f"{NAME}.weight") -> np.ndarray:
    """float64 [N, K], put together from slices."""
    form = reader.format(name)
    assert form is not None
    rows, expected_first = [], 0
    for slice_, first in reader.slices(name):
        assert first == expected_first
        values = form.dequantize(slice_)  # type: ignore[arg-type]
        rows.append(values.double().numpy())
        expected_first += len(values)
    result = np.concatenate(rows)
    assert result.shape == (int(np.prod(reader.shape(name)[:-1])), reader.shape(name)[-1])
    return result


def small_slices(monkeypatch: Any) -> None:
    """Slices of 128 rows."""
    monkeypatch.setattr(weight_reader, "SLICE_BYTES", 1)


def assert_reads(folder: Path, tensors: Tensors, quantization: Any, expected: np.ndarray) -> WeightReader:
    """One module, read whole."""
    reader = open_quantized(write(folder, module(tensors), quantization))
    assert reader.names() == {f"{NAME}.weight"}
    assert reader.num_bytes(f"{NAME}.weight") == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=0)
    return reader


def check_refused(
    folder: Path, tensors: Tensors, quantization: Any, error: type[NanovllmError], words: str
) -> None:
    """Opening such a module, or reading it, is an error of this type that says these words and has a hint."""
    write(folder, module(tensors), quantization)
    with pytest.raises(NanovllmError) as raised:
        for _ in open_quantized(folder).slices(f"{NAME}.weight"):
            pass
    assert type(raised.value) is error
    assert words in raised.value.message
    assert raised.value.hint


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [words, X] of codes [count, X]: each column is one long number, code i at bit i * bits, cut into words."""
    words = -(-codes.shape[0] * bits // 32)
    columns = []
    for column in codes.T:
        number = sum(int(code) << (bits * i) for i, code in enumerate(column))
        columns.append(np.frombuffer(number.to_bytes(words * 4, "little"), "<i4"))
    return np.stack(columns, 1)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """By OCP's 8-bit floating point specification: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities."""
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes >> 7 == 1, -value, value)


def e4m3_codes(random: np.random.Generator, *shape: int) -> np.ndarray:
    codes = random.integers(0, 256, shape, np.uint8)
    return np.where((codes & 0x7F) == 0x7F, 0, codes).astype(np.uint8)


def fp8(
    layout: str, scale_name: str = "weight_scale", static: bool = False, scale_dtype: torch.dtype = torch.float32
) -> Maker:
    """layout: tensor, row or block."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        codes = e4m3_codes(random, rows, columns)
        shape = {"tensor": (1,), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[layout]
        scales = torch.from_numpy(random.uniform(0.5, 2, shape) / 200 / columns**0.5).to(scale_dtype)
        numbers = scales.double().numpy()
        if layout == "block":
            numbers = np.repeat(np.repeat(numbers, 128, 0), 128, 1)[:rows, :columns]
        tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), scale_name: scales}
        if static:
            tensors["input_scale"] = torch.tensor([0.02])
        return tensors, e4m3(codes) * numbers

    return make


def _integers(bits: int, rows: int, groups: int, columns: int, symmetric: bool, random: np.random.Generator) -> Any:
    codes = random.integers(0, 1 << bits, (rows, columns))
    scales = torch.from_numpy(random.uniform(0.5, 2, (rows, groups)) / (1 << bits) / columns**0.5 * 4).half()
    zeros = np.full((rows, groups), 1 << (bits - 1)) if symmetric else random.integers(1, 1 << bits, (rows, groups))
    return codes, scales, zeros


def gptq(bits: int, group: int, symmetric: bool = True, order: bool = False, version: int = 1) -> Maker:
    """group: 0 for one a row."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        groups = columns // group if group else 1
        codes, scales, zeros = _integers(bits, rows, groups, columns, symmetric, random)
        ids = np.repeat(np.arange(groups), columns // groups)
        if order:
            random.shuffle(ids)
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": torch.from_numpy(packed(codes.T, bits)),
            "qzeros": torch.from_numpy(packed(stored, bits).T.copy()),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(ids.astype(np.int32)),
        }
        return tensors, (codes - zeros[:, ids]) * scales.double().numpy()[:, ids]

    return make


def gptq_config(bits: int, group: int, symmetric: bool = True, order: bool = False, version: int = 1) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "damp_percent": 0.01, "true_sequential": True,
    }  # fmt: skip


def awq(group: int) -> Maker:
    def words(codes: np.ndarray) -> torch.Tensor:
        """int32 [X, count / 8] of [X, count]: nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7."""
        eight = codes.reshape(len(codes), -1, 8)
        result = np.zeros(eight.shape[:2], np.int64)
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            result |= eight[:, :, output].astype(np.int64) << (4 * nibble)
        return torch.from_numpy(result.astype(np.uint32).view(np.int32))

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        groups = columns // group if group else 1
        codes, scales, zeros = _integers(4, rows, groups, columns, False, random)
        tensors = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.t().contiguous()}
        ids = np.repeat(np.arange(groups), columns // groups)
        return tensors, (codes - zeros[:, ids]) * scales.double().numpy()[:, ids]

    return make


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}


def nvfp4(kind: str) -> Maker:
    """kind: "modelopt" or "compressed"."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        codes = random.integers(0, 16, (rows, columns))
        scales = random.integers(0x48, 0x7F, (rows, columns // 16), dtype=np.uint8)  # 4 to 448
        factor, names = np.float32(random.uniform(0.5, 1.5) / 8192), ("weight", "weight_scale_2", "input_scale")
        if kind == "compressed":
            factor, names = 1 / factor, ("weight_packed", "weight_global_scale", "input_global_scale")
        tensors = {
            names[0]: torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
            "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
            names[1]: torch.tensor([factor]) if kind == "compressed" else torch.tensor(factor),
            names[2]: torch.tensor([3.0]),
        }
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = np.concatenate([numbers, -numbers])[codes] * np.repeat(e4m3(scales), 16, 1)
        return tensors, values / float(factor) if kind == "compressed" else values * float(factor)

    return make
