"""Checkpoints of HQQ: packed by hand from what its packing does, in both directions of groups; whole models against transformers
with the same weights; and what is refused. Eighty-four layers that hqq 0.2.8 had made gave its own numbers in float32, to the bit
but for one rounding of groups in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.config import Lora
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.quant.format import Affine
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.plan import Choices, make_plan
from quantized_checkpoints import (
    NAME,
    Made,
    Maker,
    Tensors,
    check_refused,
    module,
    open_quantized,
    read_weight,
    small_slices,
    write,
)
from test_quantized_models import PROMPTS, SIZES, build, worst_difference

WEIGHT = f"{NAME}.weight"
BITS = (1, 2, 3, 4, 5, 6, 8)
PACKING = {3: "3bit_32", 4: "4bit_u8", 2: "2bit_u8", 1: "1bit_u8"}
SAID = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
    "weight_quant_params": {"nbits": 4, "channel_wise": True, "group_size": 64, "optimize": True, "round_zero": False, "axis": 1,
                            "view_as_float": False},
    "scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}}  # fmt: skip


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """[R, S] in bytes, or words for three bits: row i of the first share has the highest bits."""
    share = {1: 8, 2: 4, 3: 10, 4: 2}.get(bits, 1)
    whole = np.pad(codes, ((0, -len(codes) % share), (0, 0))).astype(np.int64)
    parts = whole.reshape(share, -1, codes.shape[1])
    number = sum(part << bits * (share - 1 - i) for i, part in enumerate(parts))
    return np.asarray(number).astype(np.uint32).view(np.int32) if bits == 3 else np.asarray(number).astype(np.uint8)


def hqq(bits: int, size: int, axis: int = 1, dtype: torch.dtype = torch.float16, as_float: bool = False) -> Maker:
    """size: 0 for all of a row or column."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        group = size or (columns if axis == 1 else rows)
        codes = random.integers(0, 1 << bits, (rows, columns))
        flat = codes.reshape((-1, group) if axis == 1 else (group, -1))
        shape = (len(flat), 1) if axis == 1 else (1, flat.shape[1])
        scales = torch.from_numpy(random.uniform(0.5, 2, shape) / (1 << bits) / columns**0.5 * 3).to(dtype)
        zeros = torch.from_numpy(random.uniform(0.2, 0.8, shape) * ((1 << bits) - 1)).to(dtype)
        data = torch.from_numpy(packed(flat, bits))
        said = {"nbits": bits, "group_size": group, "axis": axis}
        tensors: Tensors = {name: torch.tensor(value, dtype=torch.int32) for name, value in said.items()}
        for flag in ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
                     "channel_wise", "optimize", "round_zero"):  # fmt: skip
            tensors[flag] = torch.tensor(int(flag in ("channel_wise", "optimize")), dtype=torch.uint8)
        for name, text in (("packing", PACKING.get(bits, "8bit_u8")), ("unpack_view_dtype", "torch.uint8"),
                           ("compute_dtype", "torch.float16")):  # fmt: skip
            tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        tensors |= {"W_q": data.view(dtype) if as_float else data, "scale": scales, "zero": zeros}
        tensors["shape"] = torch.tensor([rows, columns])
        values = (flat - zeros.double().numpy()) * scales.double().numpy()
        return tensors, values.reshape(rows, columns)

    return make


def drawn(maker: Maker, rows: int = 160, columns: int = 256) -> Made:
    return maker(rows, columns, np.random.default_rng(1))


def read(folder: Path, tensors: Tensors) -> np.ndarray:
    reader = open_quantized(write(folder, module(tensors), SAID))
    if reader.format(WEIGHT) is not None:
        return read_weight(reader)
    return np.concatenate([rows.double().numpy() for rows, _ in reader.slices(WEIGHT)])  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float16), (16, torch.bfloat16), (0, torch.float32)])
def test_groups_of_a_row(bits: int, size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = drawn(hqq(bits, size, dtype=dtype))
    reader = open_quantized(write(tmp_path, module(tensors), SAID))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Affine(max(bits, 2), size or 256, "float32")  # type: ignore[arg-type]
    assert reader.num_bytes(WEIGHT) == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_allclose(read(tmp_path, tensors), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("size", "axis"), [(32, 0), (0, 0), (8, 1)])
def test_groups_that_no_kernel_has_are_numbers(bits: int, size: int, axis: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Of columns, and of fewer than 16."""
    small_slices(monkeypatch)
    tensors, expected = drawn(hqq(bits, size, axis))
    reader = open_quantized(write(tmp_path, module(tensors), SAID))
    assert reader.format(WEIGHT) is None
    assert reader.stored_as(WEIGHT) == f"hqq{bits}:group={size or 160}"
    np.testing.assert_allclose(read(tmp_path, tensors), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bits", "size"), [(4, 96), (3, 48), (8, 384)])
def test_groups_are_divided_into_those_that_kernels_have(bits: int, size: int, tmp_path: Path) -> None:
    tensors, expected = drawn(hqq(bits, size), columns=384)
    form = open_quantized(write(tmp_path, module(tensors), SAID)).format(WEIGHT)
    assert isinstance(form, Affine)
    assert size % form.group == 0
    np.testing.assert_allclose(read(tmp_path, tensors), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("bits", "axis"), [(4, 1), (3, 1), (2, 0)])
def test_codes_that_are_labelled_as_floats(bits: int, axis: int, tmp_path: Path) -> None:
    tensors, expected = drawn(hqq(bits, 64, axis, torch.bfloat16, as_float=True), rows=320)
    np.testing.assert_allclose(read(tmp_path, tensors), expected, rtol=1e-5, atol=1e-7)


def test_biases_and_what_is_not_quantized_stay(tmp_path: Path) -> None:
    tensors, expected = drawn(hqq(4, 64))
    others = {f"{NAME}.bias": torch.ones(160), "lm_head.weight": torch.ones(3, 4), "model.norm.weight": torch.ones(4)}
    reader = open_quantized(write(tmp_path, module(tensors) | others, SAID))
    assert reader.names() == {WEIGHT, *others}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-5, atol=1e-7)


CASES: dict[str, tuple[Any, Maker]] = {
    "4 bits": (LlamaConfig(**SIZES), hqq(4, 64, dtype=torch.float32)),
    "3 bits": (LlamaConfig(**SIZES), hqq(3, 32, dtype=torch.float32)),
    "2 bits, by columns": (LlamaConfig(**SIZES), hqq(2, 16, 0, dtype=torch.float32)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_models_are_what_transformers_makes_of_their_weights(case: str, tmp_path: Path) -> None:
    config, maker = CASES[case]
    reference = build(tmp_path, config, maker, SAID)
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    together = run(engine_for(worker, max_num_batched_tokens=20), [(ids, greedy(8)) for ids in PROMPTS])
    for ids, output in zip(PROMPTS, together, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + list(output.outputs[0].token_ids)])).logits[0]
        assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


def test_numbers_may_be_rounded_again_and_others_not(tmp_path: Path) -> None:
    """What becomes plain numbers is as good as a model in them."""
    config, maker = CASES["2 bits, by columns"]
    reference = build(tmp_path / "columns", config, maker, SAID)
    assert worst_difference(worker_for(tmp_path / "columns", dtype="bfloat16", quant="int8"), reference) < 0.3
    with pytest.raises(UsageError, match="is hqq2:group=16"), open_original("columns", tmp_path / "columns") as original:
        make_plan(original, Choices("int8"))
    build(tmp_path / "rows", *CASES["4 bits"], SAID)
    with pytest.raises(UsageError, match="affine4:group=64 already"):
        worker_for(tmp_path / "rows", quant="int8")


@pytest.mark.parametrize("case", ["4 bits", "2 bits, by columns"])
def test_adapters_lie_beside_codes_and_beside_numbers_that_were_codes(case: str, tmp_path: Path) -> None:
    reference = build(tmp_path / "m", *CASES[case], SAID)
    generator = torch.Generator().manual_seed(3)
    name = "model.layers.1.self_attn.q_proj"
    down, up = torch.randn(4, 128, generator=generator), torch.randn(256, 4, generator=generator)
    (tmp_path / "a").mkdir()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(said))
    tensors = {f"base_model.model.{name}.lora_A.weight": down * 0.1, f"base_model.model.{name}.lora_B.weight": up * 0.1}
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    reference.get_submodule(name).weight.data += 2 * (up * 0.1) @ (down * 0.1)
    worker = worker_for(tmp_path / "m", dtype="float32", lora=(Lora(str(tmp_path / "a")),))
    assert worst_difference(worker, reference) < 1e-4


# ---- what is refused ----


def changed(maker: Maker, **others: Any) -> Tensors:
    tensors, _ = drawn(maker, 32, 128)
    return {name: tensor for name, tensor in (tensors | others).items() if tensor is not None}


def number(value: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


FOUR, ONE = hqq(4, 64), hqq(1, 64)
BAD: dict[str, tuple[Tensors, type[NanovllmError], str]] = {
    "no codes": (changed(FOUR, W_q=None), CheckpointError, "W_q' is missing"),
    "no scales": (changed(FOUR, scale=None), CheckpointError, "scale' is missing"),
    "no zeros": (changed(FOUR, zero=None), CheckpointError, "zero' is missing"),
    "no shape": (changed(FOUR, shape=None), CheckpointError, "shape' is missing"),
    "no bits": (changed(FOUR, nbits=None), CheckpointError, "nbits' is missing"),
    "7 bits": (changed(FOUR, nbits=number(7)), UnsupportedError, "says 7"),
    "1.58 bits": (changed(FOUR, nbits=number(1.58, torch.float32)), UnsupportedError, "says 1.58"),
    "8 bits, which are not there": (changed(FOUR, nbits=number(8), packing=None), CheckpointError, "bytes, expected 4096"),
    "another packing": (changed(FOUR, nbits=number(8)), CheckpointError, "says '4bit_u8', expected '8bit_u8'"),
    "axis 2": (changed(FOUR, axis=number(2)), CheckpointError, "says 2, expected 0 or 1"),
    "groups of 48": (changed(FOUR, group_size=number(48)), CheckpointError, "says 48, which 32 x 128"),
    "groups of 0": (changed(FOUR, group_size=number(0)), CheckpointError, "says 0"),
    "groups below 0": (changed(FOUR, group_size=number(-64)), CheckpointError, "says -64"),
    "a shape of nothing": (changed(FOUR, shape=torch.tensor([0, 128])), CheckpointError, "says that the weight is 0 x 128"),
    "another shape": (changed(FOUR, shape=torch.tensor([64, 128])), CheckpointError, "expected 4096 for 128 groups"),
    "a shape without end": (changed(FOUR, shape=torch.tensor([1 << 40, 128])), CheckpointError, "says that the weight is"),
    "scales of other groups": (changed(FOUR, scale=torch.ones(7, 1)), CheckpointError, "scale' has the shape [7, 1]"),
    "a scale is NaN": (changed(FOUR, scale=torch.full((64, 1), np.nan)), CheckpointError, "NaN or infinite"),
    "a zero is infinite": (changed(FOUR, zero=torch.full((64, 1), np.inf)), CheckpointError, "NaN or infinite"),
    "products that are infinite": (
        changed(FOUR, zero=torch.full((64, 1), 1e30), scale=torch.full((64, 1), 1e30)), CheckpointError, "infinite, or above",
    ),
    "one scale for all": (changed(FOUR, channel_wise=number(0)), UnsupportedError, "one scale is for all numbers"),
    "scales that are quantized": (changed(FOUR, scale_q=torch.ones(4), scale=None), UnsupportedError, "quantized themselves"),
    "groups that bytes don't hold": (changed(hqq(1, 64), shape=torch.tensor([31, 128])), CheckpointError, "W_q' has"),
    "codes of six bits that have eight": (
        changed(hqq(6, 64), W_q=torch.full((64, 64), 255, dtype=torch.uint8)), CheckpointError, "codes of more than 6 bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, error, words = BAD[case]
    check_refused(tmp_path, tensors, SAID, error, words)
