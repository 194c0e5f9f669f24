"""GGUF files of what others quantized: the same numbers, by gguf's own reading, where GGUF has a type for them; where it has
none, the numbers that they stand for; and models that answer the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3MoeConfig

from engines import engine_for, greedy, run, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.quantized_weight import unpack
from quantized_checkpoints import Made, Maker, awq, awq_config, fp8, gptq, gptq_config, nvfp4, read_weight
from test_convert import SETTINGS, TINY
from test_quantized_hqq import SAID as HQQ
from test_quantized_hqq import hqq
from test_quantized_mlx import converted
from test_quantized_models import EXPERTS, FP8, NVFP4, PROMPTS, SIZES, build, compressed
from test_quantized_quark import GROUPS, MXFP4, integers, mxfp4, settings, spec

LLAMA = LlamaConfig(**SIZES | {"vocab_size": 4100, "eos_token_id": 4087, "bos_token_id": None})
NAMES = {"blk.1.ffn_down": "model.layers.1.mlp.down_proj", "blk.0.attn_v": "model.layers.0.self_attn.v_proj"}


def halves(maker: Maker) -> Maker:
    """With scales that float16 has; the weight is only near."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        tensors, weight = maker(rows, columns, random)
        return tensors | {"weight_scale": tensors["weight_scale"].half().float()}, weight

    return make


def folder_of(folder: Path, maker: Maker, said: dict[str, Any], config: Any = LLAMA) -> Path:
    build(folder, config, maker, said)
    told = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(told))
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder


INT8 = settings(spec("int8", **GROUPS))
CASES: dict[str, tuple[Maker, dict[str, Any], str]] = {
    "gptq 4": (gptq(4, 32), gptq_config(4, 32), "Q4_0"),
    "gptq 4, one group a row": (gptq(4, 0), gptq_config(4, 0), "Q4_0"),
    "gptq 3": (gptq(3, 64), gptq_config(3, 64), "Q4_0"),
    "gptq 2": (gptq(2, 64), gptq_config(2, 64), "Q4_0"),
    "gptq 8": (gptq(8, 64), gptq_config(8, 64), "Q8_0"),
    "quark int8": (halves(integers("int8", "per_group")), INT8, "Q8_0"),
    "quark int4": (halves(integers("int4", "per_group")), settings(spec("int4", **GROUPS)), "Q4_0"),
    "mxfp4": (mxfp4, settings(MXFP4), "MXFP4"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case: str, tmp_path: Path) -> None:
    maker, said, kind = CASES[case]
    folder = folder_of(tmp_path / "m", maker, said)
    made = converted(folder, tmp_path / "m.gguf")
    assert not any("weights" in note for note in made.notes)
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with open_checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        for theirs, ours in NAMES.items():
            tensor = found[f"{theirs}.weight"]
            assert tensor.tensor_type.name == kind
            np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), read_weight(reader, f"{ours}.weight"))
    workers = [worker_for(path, dtype="float32") for path in (folder, tmp_path / "m.gguf")]
    outputs = [run(engine_for(worker), [(ids, greedy(8)) for ids in PROMPTS]) for worker in workers]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(("maker", "said"), [(awq(64), awq_config(64)), (hqq(4, 64), HQQ), (hqq(3, 32), HQQ),
                                             (gptq(4, 32, symmetric=False), gptq_config(4, 32, False))])  # fmt: skip
def test_zero_points_become_minima(maker: Maker, said: dict[str, Any], tmp_path: Path) -> None:
    """Of which float16 has eleven digits; codes and scales stay."""
    folder = folder_of(tmp_path / "m", maker, said)
    made = converted(folder, tmp_path / "m.gguf")
    assert any(note.endswith("what is added is rounded to float16: 14") for note in made.notes)
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with open_checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        for theirs, ours in NAMES.items():
            tensor = found[f"{theirs}.weight"]
            assert tensor.tensor_type.name == "Q4_1"
            expected = read_weight(reader, f"{ours}.weight")
            read = dequantize(tensor.data, tensor.tensor_type)
            assert 0 < np.abs(read - expected).max() < np.abs(expected).max() * 2.0**-10


@pytest.mark.parametrize(("maker", "said", "kind"), [
    (fp8("row"), FP8, "BF16"), (fp8("tensor", static=True), FP8 | {"activation_scheme": "static"}, "BF16"),
    (gptq(4, 32, order=True), gptq_config(4, 32, order=True), "BF16"), (nvfp4("modelopt"), NVFP4, "BF16"),
    (hqq(4, 64, 0), HQQ, "F16"), (hqq(8, 64), HQQ, "F16"), (*compressed("int-quantized"), "BF16"),
])  # fmt: skip
def test_others_become_the_numbers_that_they_stand_for(maker: Maker, said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Rounded to the model's type, or that of HQQ's scales."""
    folder = folder_of(tmp_path / "m", maker, said)
    tensors = load_file(folder / "model.safetensors")
    cache = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file(tensors | cache, folder / "model.safetensors")
    made = converted(folder, tmp_path / "m.gguf")
    assert any(note.endswith(f"become numbers of {kind}: 14") for note in made.notes)
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with open_checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        for theirs, ours in NAMES.items():
            name, tensor = f"{ours}.weight", found[f"{theirs}.weight"]
            form = reader.format(name)
            rows = torch.cat([rows if isinstance(rows, torch.Tensor) else form.dequantize(rows)  # type: ignore[union-attr]
                              for rows, _ in reader.slices(name)])  # fmt: skip
            assert tensor.tensor_type.name == kind
            wanted = rows.to(torch.bfloat16 if kind == "BF16" else torch.float16).float().numpy()
            np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(wanted.shape), wanted)


def test_experts_of_a_layer_become_one_tensor(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES | {"vocab_size": 4100, "eos_token_id": 4087, "bos_token_id": None}, **EXPERTS)
    folder = folder_of(tmp_path / "m", gptq(4, 32), gptq_config(4, 32), config)
    converted(folder, tmp_path / "m.gguf")
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert found["blk.0.ffn_gate_exps.weight"].tensor_type.name == "Q4_0"
    workers = [worker_for(path, dtype="float32") for path in (folder, tmp_path / "m.gguf")]
    outputs = [run(engine_for(worker), [(ids, greedy(8)) for ids in PROMPTS]) for worker in workers]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_what_is_bad_in_a_folder_is_told_of_before_a_file_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", gptq(4, 32), gptq_config(4, 32))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.scales' is missing"):
        converted(folder, tmp_path / "m.gguf")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(UnsupportedError, match="quantized by 'aqlm'"):
        converted(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_nibbles_are_those_of_the_codes() -> None:
    """What the tests above rest on, for one block: code i beside code i + 16."""
    from nanovllm_cli.quant.format import Integer
    from nanovllm_cli.quant.rows import IntegerRows
    from nanovllm_cli.weights.quantized_gguf import integer_blocks

    codes = torch.arange(32, dtype=torch.uint8).reshape(1, 32) % 16
    data = integer_blocks(IntegerRows(codes, torch.tensor([[0.5]]).half()), Integer(4, 32))
    assert data.shape == (1, 18)
    assert unpack(data[0, 2:], 4, 32).reshape(16, 2).t().flatten().tolist() == codes[0].tolist()
