"""Quantized matrices that are several of a model's, or whose rows lie in another order here: the models answer as those of the
numbers that codes stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    Qwen3NextConfig,
)

from engines import random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.quantized import open_reader
from quantized_checkpoints import (
    Maker,
    awq,
    awq_config,
    fp8,
    gptq,
    gptq_config,
    module,
    nvfp4,
    open_quantized,
    read_weight,
    small_slices,
    write,
)
from quantizing import plan_of
from test_convert import SETTINGS, TINY
from test_models import whole_batch
from test_quantized_hqq import SAID as HQQ
from test_quantized_hqq import hqq
from test_quantized_mlx import converted
from test_quantized_models import FP8, FP8_BLOCKS, NVFP4, PROMPTS, compressed
from test_quantized_quark import ROWS, integers, settings, spec

SIZES: dict[str, Any] = {"vocab_size": 263, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
GRANITE: dict[str, Any] = {
    "num_key_value_heads": 2, "intermediate_size": 64, "shared_intermediate_size": 160, "num_local_experts": 0,
    "num_experts_per_tok": 0, "layer_types": ["attention"] * 2, "position_embedding_type": "rope",
}  # fmt: skip
NEXT: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
INT8 = settings(spec("int8", **ROWS))
JOINED: dict[str, tuple[Any, str]] = {
    "gpt-neox": (GPTNeoXConfig(**SIZES, intermediate_size=96), "query_key_value"),
    "falcon": (FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2), "query_key_value"),
    "bloom": (BloomConfig(**SIZES), "query_key_value"),
    "granite": (GraniteMoeHybridConfig(**SIZES, **GRANITE), "input_linear"),
    "qwen3-next": (Qwen3NextConfig(**SIZES, **NEXT), "in_proj_qkvz"),
}
KINDS: dict[str, tuple[Maker, dict[str, Any]]] = {
    "fp8": (fp8("row"), FP8), "gptq": (gptq(4, 32, order=True), gptq_config(4, 32, order=True)), "awq": (awq(32), awq_config(32)),
    "int8": compressed("int-quantized"), "int4": compressed("pack-quantized"), "hqq": (hqq(4, 32), HQQ),
    "quark": (integers("int8", "per_channel"), INT8),
}  # fmt: skip


def folders(config: Any, ends: str, maker: Maker, said: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """A model whose matrices of this name are quantized, and one of the numbers that they stand for."""
    plain = save(random_model(config), folder / "plain")
    stored: dict[str, torch.Tensor] = {}
    numbers = load_file(plain / "model.safetensors")
    random = np.random.default_rng(3)
    for name, tensor in list(numbers.items()):
        if name.endswith(f"{ends}.weight"):
            made, weight = maker(*tensor.shape, random)  # type: ignore[arg-type]
            stored |= module(made, name.removesuffix(".weight"))
            numbers[name] = torch.from_numpy(weight).float()
        else:
            stored[name] = tensor
    assert len(stored) > len(numbers)
    save_file(numbers, plain / "model.safetensors")
    shutil.copytree(plain, folder / "coded")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "coded" / "model.safetensors")
    told = json.loads((plain / "config.json").read_text()) | {"quantization_config": said}
    (folder / "coded" / "config.json").write_text(json.dumps(told))
    return plain, folder / "coded"


def logits_of(folder: Path) -> torch.Tensor:
    worker = worker_for(folder, dtype="float32")
    with torch.inference_mode():
        return worker.model.logits(worker.model.run(worker.model.prepare(whole_batch(PROMPTS)), worker.runner.cache)).clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", JOINED)
def test_rows_are_where_the_model_has_them(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slices(monkeypatch)
    plain, coded = folders(*JOINED[case], *KINDS[kind], tmp_path)
    expected = logits_of(plain)
    assert float((logits_of(coded) - expected).norm() / expected.norm()) < 1e-4


def test_what_they_take_is_told_once(tmp_path: Path) -> None:
    _, coded = folders(*JOINED["qwen3-next"], *KINDS["gptq"], tmp_path)
    with open_checkpoint(coded) as checkpoint:
        reader, stored = open_reader(checkpoint), load_file(coded / "model.safetensors")
        place = "model.layers.0.linear_attn.in_proj_"
        names = {name for name in reader.names() if name.startswith((f"{place}qkv", f"{place}z"))}
        assert names == {f"{place}qkv.weight", f"{place}z.weight"}
        expected = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith(f"{place}qkvz."))
        assert sum(map(reader.num_bytes, names)) == expected
        assert {reader.stored_as(name) for name in names} == {"int4:group=32"}


@pytest.mark.parametrize("ends", ["in_proj_qkvz", "in_proj_ba"])
def test_files_have_what_llama_cpp_reads_in_one_piece(ends: str, tmp_path: Path) -> None:
    """b and a of a Qwen3-Next, quantized themselves or not."""
    config = Qwen3NextConfig(**SIZES | {"vocab_size": 4096}, **NEXT)
    paths = folders(config, ends, *KINDS["int8"], tmp_path)
    found = []
    for path in paths:
        for name in SETTINGS:
            shutil.copy(TINY / name, path / name)
        converted(path, tmp_path / f"{path.name}.gguf")
        found.append({each.name: each for each in gguf.GGUFReader(tmp_path / f"{path.name}.gguf").tensors})
    assert found[0].keys() == found[1].keys()
    assert "blk.0.ssm_ba.weight" in found[0]
    for one, other in zip(*(each.values() for each in found), strict=True):
        assert one.tensor_type == other.tensor_type
        np.testing.assert_allclose(one.data, other.data, rtol=1e-6)


def test_such_a_folder_is_not_written(tmp_path: Path) -> None:
    """A Falcon, of which nothing else is in another order."""
    _, coded = folders(*JOINED["falcon"], *KINDS["gptq"], tmp_path)
    with pytest.raises(UnsupportedError, match="holds several matrices in one tensor"):
        plan_of("int8", coded, requantize=True)


def test_gpt_2s_matrices_are_quantized_as_others(tmp_path: Path) -> None:
    """Its own have inputs first; what tools make of them has not."""
    config = GPT2Config(vocab_size=263, n_embd=64, n_head=4, n_layer=2, n_positions=128)
    plain = save(random_model(config), tmp_path / "plain")
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(numbers.items()):
        stored[name] = tensor
        if tensor.dim() == 2 and ".h." in name:
            made, weight = gptq(4, 32)(*tensor.T.shape, np.random.default_rng(3))  # type: ignore[arg-type]
            del stored[name]
            stored |= module(made, name.removesuffix(".weight"))
            numbers[name] = torch.from_numpy(weight.T.copy()).float()
    shutil.copytree(plain, tmp_path / "coded")
    save_file(numbers, plain / "model.safetensors")
    save_file(stored, tmp_path / "coded" / "model.safetensors")
    told = json.loads((plain / "config.json").read_text()) | {"quantization_config": gptq_config(4, 32)}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(told))
    expected = logits_of(plain)
    assert float((logits_of(tmp_path / "coded") - expected).norm() / expected.norm()) < 1e-4


def test_rows_that_share_a_scale_with_others_of_another_part_are_refused(tmp_path: Path) -> None:
    """Blocks of FP8 are of 128 rows; heads here are of 16."""
    _, coded = folders(*JOINED["gpt-neox"], fp8("block", "weight_scale_inv"), FP8_BLOCKS, tmp_path)
    with pytest.raises(UnsupportedError, match="scales of rows that belong to several heads") as caught:
        worker_for(coded)
    assert "query_key_value" in caught.value.message
    assert caught.value.hint


STACKED: dict[str, tuple[Maker, dict[str, Any]]] = {
    "fp8": (fp8("block", "weight_scale_inv"), FP8_BLOCKS), "nvfp4": (nvfp4("modelopt"), NVFP4),
}  # fmt: skip


@pytest.mark.parametrize("kind", STACKED)
def test_experts_of_a_step_lie_in_one_tensor_and_their_scales_as_well(kind: str, tmp_path: Path) -> None:
    """Step-3.5-Flash' folders in FP8 and in NVFP4, whose numbers of whole matrices are one tensor, too."""
    maker, said = STACKED[kind]
    made = [maker(160, 192, np.random.default_rng(e)) for e in range(3)]
    place = "model.layers.3.moe.up_proj"
    together = {
        name: torch.stack([tensors[name].view(torch.uint8) for tensors, _ in made]).view(tensor.dtype)
        if tensor.dim() > 1 else torch.stack([tensors[name].reshape(()) for tensors, _ in made])
        for name, tensor in made[0][0].items()
    }  # fmt: skip
    reader = open_quantized(write(tmp_path, module(together, place), said))
    assert reader.names() == {f"{place}.{e}.weight" for e in range(3)}
    for e, (_, expected) in enumerate(made):
        np.testing.assert_allclose(read_weight(reader, f"{place}.{e}.weight"), expected, rtol=1e-6)
    less = {name: tensor[:2] if tensor.dim() == 1 or name == "weight_scale_inv" else tensor for name, tensor in together.items()}
    with pytest.raises(CheckpointError, match=r"up_proj\.2\.(weight_scale_inv|weight_scale_2)' is missing"):
        open_quantized(write(tmp_path / "less", module(less, place), said))
