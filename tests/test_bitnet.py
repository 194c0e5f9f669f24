"""BitNet: weights of -1, 0 and 1 as folders have them, against the papers' formulas and transformers' packing, and models of
them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitNetConfig, LlamaConfig

from engines import SMALL, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantized_checkpoints import (
    NAME,
    assert_reads,
    check_refused,
    module,
    open_quantized,
    read_weight,
    small_slices,
    write,
)
from test_convert import SETTINGS, TINY
from test_convert_families import fields, with_tokenizer
from test_models import CASES, prompts
from test_quant_engine import difference, expected_logits, logits_of

OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = OFFLINE | {"quantization_mode": "online"}
DIVIDES = {"quant_method": "bitnet"}
WIDE = SMALL | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
                "tie_word_embeddings": True}  # fmt: skip


def ternary(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, (rows, columns))


def packed(codes: np.ndarray) -> torch.Tensor:
    """Four rows in a byte, a quarter of all rows apart: transformers' example, "the first value for 0b10100001"."""
    quarter = len(codes) // 4
    total = sum((codes[i * quarter : (i + 1) * quarter] + 1) << (2 * i) for i in range(4))
    return torch.from_numpy(np.asarray(total, np.uint8))


def test_the_example_of_transformers() -> None:
    found = packed(np.array([[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]))
    assert found.tolist() == [[0b10100001, 0b00011000], [0b10010000, 0b00001010]]


@pytest.mark.parametrize("shape", [(4, 1), (32, 33), (132, 17), (520, 256)])
@pytest.mark.parametrize("settings", [OFFLINE, DIVIDES], ids=["multiplied", "divided"])
def test_packed_weights(shape: tuple[int, int], settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    codes, number = ternary(*shape), 1.765625
    tensors = {"weight": packed(codes), "weight_scale": torch.tensor([number], dtype=torch.bfloat16)}
    reader = assert_reads(tmp_path, tensors, settings, codes * (1 / number if settings is DIVIDES else number))
    assert reader.format(f"{NAME}.weight") == Integer(2, 0, activation="int8", scales="float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trained_weights_are_rounded_by_their_mean(dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    """RoundClip(W / gamma, -1, 1), gamma the mean of |W| (Ma et al. 2024), of the whole matrix."""
    small_slices(monkeypatch)
    weight = torch.randn(300, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    gamma = weight.double().abs().mean()
    expected = (weight.double() / gamma).round().clamp(-1, 1) * gamma.to(dtype).double()
    reader = open_quantized(write(tmp_path, module({"weight": weight}), ONLINE))
    np.testing.assert_allclose(read_weight(reader), expected.numpy(), rtol=1e-6, atol=0)


def test_what_is_no_matrix_of_a_layer_or_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    names = ["model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"]
    tensors = {f"{name}.weight": torch.randn(8, 8) for name in names} | {"model.layers.0.input_layernorm.weight": torch.ones(8)}
    reader = open_quantized(write(tmp_path, tensors, ONLINE | {"modules_to_not_convert": ["down_proj"]}))
    assert [name for name in tensors if reader.format(name) is not None] == ["model.layers.0.mlp.up_proj.weight"]


GOOD = {"weight": packed(ternary(8, 4)), "weight_scale": torch.tensor([1.5])}
BAD: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], type, str]] = {
    "a fourth code": (GOOD | {"weight": torch.full((2, 4), 0xFF, dtype=torch.uint8)}, OFFLINE, CheckpointError, "none of -1, 0"),
    "no number": ({"weight": GOOD["weight"]}, OFFLINE, CheckpointError, "weight_scale' is missing"),
    "no weight": ({"weight_scale": GOOD["weight_scale"]}, OFFLINE, CheckpointError, "weight' is missing"),
    "two numbers": (GOOD | {"weight_scale": torch.ones(2)}, OFFLINE, CheckpointError, "has the shape [2]"),
    "zero": (GOOD | {"weight_scale": torch.zeros(1)}, DIVIDES, CheckpointError, "scales that are 0 or below"),
    "too small to divide by": (GOOD | {"weight_scale": torch.tensor([1e-42])}, DIVIDES, CheckpointError, "infinite or NaN"),
    "not a number": (GOOD | {"weight_scale": torch.tensor([torch.nan])}, OFFLINE, CheckpointError, "infinite or NaN"),
    "plain weights with a number": (GOOD | {"weight": torch.ones(8, 4)}, OFFLINE, CheckpointError, "holds F32, expected U8"),
    "another class": (GOOD, OFFLINE | {"linear_class": "x"}, UnsupportedError, "linear_class 'x'"),
    "another mode": (GOOD, OFFLINE | {"quantization_mode": "x"}, UnsupportedError, "quantization_mode 'x'"),
    "norms": (GOOD, OFFLINE | {"use_rms_norm": True}, UnsupportedError, "a norm before each"),
    "an infinite mean": ({"weight": torch.full((8, 4), torch.inf)}, ONLINE, CheckpointError, "NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *BAD[case])


# ---- models ----


def ternarized(model: Any) -> Any:
    """The same with each matrix of a layer as the paper rounds it."""
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() == 2:
            gamma = parameter.data.abs().mean()
            parameter.data = (parameter.data / gamma).round().clamp(-1, 1) * gamma
    return model


def folder_of(kind: str, config: Any, folder: Path) -> Path:
    """As it was trained, or packed."""
    save(random_model(config) if kind == "trained" else ternarized(random_model(config)), folder)
    said = json.loads((folder / "config.json").read_text())
    if kind == "packed":
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            if ".layers." not in name or tensor.dim() < 2:
                tensors[name] = tensor
                continue
            gamma = tensor.abs().max()
            tensors |= {name: packed((tensor / gamma).round().int().numpy()), name.replace("weight", "weight_scale"): gamma[None]}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": ONLINE if kind == "trained" else OFFLINE}))
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.mark.parametrize("kind", ["trained", "packed"])
@pytest.mark.parametrize("config", [BitNetConfig(**WIDE), LlamaConfig(**WIDE)], ids=["bitnet", "llama"])
def test_equal_to_transformers_and_their_files_too(kind: str, config: Any, tmp_path: Path) -> None:
    """In float32, where activations are as they are. A ternary type of GGUF's loses nothing but what float16 does of a scale."""
    config, tokens = with_tokenizer(config), prompts(512)[:5]
    expected = expected_logits(ternarized(random_model(config)), tokens)
    folder = folder_of(kind, config, tmp_path / "folder")
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected) < 1e-4
    for outtype, limit in (("f32", 1e-4), ("tq2_0", 3e-3), ("tq1_0", 3e-3)):
        with open_checkpoint(folder) as checkpoint:
            made = convert.plan(checkpoint, "gguf", outtype=outtype)
            convert.write(checkpoint, made, tmp_path / f"{outtype}.gguf")
        keys = fields(tmp_path / f"{outtype}.gguf")
        assert keys.get("bitnet.hidden_activation") == ("relu2" if isinstance(config, BitNetConfig) else None)
        assert any("hidden_activation" in note for note in made.notes) == isinstance(config, BitNetConfig)
        found = worker_for(tmp_path / f"{outtype}.gguf", dtype="float32")
        assert any(form is not None and form.name.lower() == outtype for form in found.formats) == (outtype != "f32")
        assert difference(logits_of(found, tokens), expected) < limit


def test_activations_are_rounded_to_eight_bits_a_token(tmp_path: Path) -> None:
    """As transformers' ActQuant has it: by the largest magnitude of the row."""
    config, tokens = with_tokenizer(BitNetConfig(**WIDE)), prompts(512)[:5]
    model = ternarized(random_model(config))
    exact = expected_logits(model, tokens)

    def rounded(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scale = 127 / inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return ((inputs[0] * scale).round().clamp(-128, 127) / scale,)

    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.register_forward_pre_hook(rounded)
    actual = logits_of(worker_for(folder_of("packed", config, tmp_path), dtype="float32", activations="rounded"), tokens)
    assert difference(actual, expected_logits(model, tokens)) < difference(actual, exact) / 5


def test_a_head_of_its_own_has_no_place_in_a_file(tmp_path: Path) -> None:
    folder = folder_of("packed", with_tokenizer(BitNetConfig(**WIDE | {"tie_word_embeddings": False})), tmp_path)
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="whose head is not its embedding"):
        convert.plan(checkpoint, "gguf")


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "tanh"])
def test_other_activations_are_refused(act: str) -> None:
    config = CASES["bitnet"].to_dict() | {"architectures": ["BitNetForCausalLM"], "hidden_act": act}
    with pytest.raises(UnsupportedError, match=f"activation '{act}'"):
        spec_from_hf(config, hf_family(config))
