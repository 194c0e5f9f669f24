"""Talkie: published folders and GGUF files as llama.cpp's converter makes them, against float64, and what is refused of either.
transformers has none; the rules are those of talkie-lm's own code, and of llama.cpp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from calibrating import check_walk
from emulation.emulator import needs_emulation
from engines import greedy, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from quantizing import quantize
from same_answers import check_chunks_and_prefixes, check_guesses_and_few_blocks
from test_convert import SETTINGS, TINY
from test_convert_families import fields, make_gguf, same, tensors
from test_cuda_engine import depend_on_the_request_alone, engine_on, kernels_not_rehearsed, recorded_tokens, tokens
from test_models import prompts
from test_quant_engine import difference, logits_of

SHAPE = {
    "vocab_size": 4096, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 3,
    "head_dim": 32, "max_position_embeddings": 512, "rope_theta": 1e6,
}  # fmt: skip
CONFIG = SHAPE | {"architectures": ["TalkieForCausalLM"], "model_type": "talkie", "dtype": "float32", "rms_norm_eps": 1e-6}
EPS = float(np.finfo(np.float32).eps)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """By published names, whose gains are far from one."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    vocab, hidden, inner = (int(SHAPE[key]) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    found = {"model.embed.weight": drawn(vocab, hidden), "lm_head": drawn(vocab, hidden)}
    found["lm_head_gain.w_g"] = torch.tensor([1.75])
    for i in range(3):
        block = f"model.blocks.{i}"
        found |= {f"{block}.attn.attn_{part}.weight": drawn(hidden, hidden) for part in ("query", "key", "value", "resid")}
        found |= {f"{block}.mlp.mlp_{part}.weight": drawn(inner, hidden) for part in ("gate", "linear")}
        found[f"{block}.mlp.mlp_resid.weight"] = drawn(hidden, inner)
        found[f"{block}.attn.head_gain.head_g"] = 2 + torch.arange(3.0) + i
        found[f"{block}.attn_gain.a_g"] = torch.tensor([0.6 + 0.2 * i])
        found[f"{block}.mlp_gain.a_g"] = torch.tensor([1.5 - 0.3 * i])
        found[f"{block}.embed_skip.a_g"] = torch.tensor([0.4 * (i - 1)])
    return found


def expected(found: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits of every token, float64, one step after the other as talkie-lm's code has them."""
    own = {name: tensor.double() for name, tensor in found.items()}
    heads, dim, base = 3, 32, 1e6

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(ids)).double()[:, None] * base ** (-torch.arange(0, dim, 2).double() / dim)
        one, other = x.view(len(ids), heads, 2, dim // 2).unbind(2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([one * cos + other * sin, other * cos - one * sin], -1)

    x = entry = normed(own["model.embed.weight"][ids])
    unseen = torch.ones(len(ids), len(ids)).triu(1).bool()
    for i in range(3):
        block = f"model.blocks.{i}"
        h = normed(x)
        q, k, v = (h @ own[f"{block}.attn.attn_{part}.weight"].T for part in ("query", "key", "value"))
        q = normed(turned(q)) * own[f"{block}.attn.head_gain.head_g"][:, None]
        scores = torch.einsum("qhd,khd->hqk", q, normed(turned(k))) / dim**0.5
        seen = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", seen, v.view(len(ids), heads, dim)).reshape(len(ids), -1)
        x = x + out @ own[f"{block}.attn.attn_resid.weight"].T * own[f"{block}.attn_gain.a_g"]
        h = normed(x)
        gate, up = (h @ own[f"{block}.mlp.mlp_{part}.weight"].T for part in ("gate", "linear"))
        found_here = (torch.nn.functional.silu(gate) * up) @ own[f"{block}.mlp.mlp_resid.weight"].T
        x = x + found_here * own[f"{block}.mlp_gain.a_g"] + entry * own[f"{block}.embed_skip.a_g"]
    return normed(x) @ own["lm_head"].T * own["lm_head_gain.w_g"]


def folder_of(path: Path, found: dict[str, torch.Tensor], **changes: Any) -> Path:
    path.mkdir(parents=True)
    save_file(found, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    for name in SETTINGS:
        shutil.copy(TINY / name, path / name)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("talkie") / "folder", weights())


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    make_gguf(folder, path := folder.parent / "talkie.gguf")
    return path


def check(path: Path, found: dict[str, torch.Tensor]) -> None:
    asked = prompts(int(SHAPE["vocab_size"]))
    wanted = torch.cat([expected(found, ids) for ids in asked])
    assert difference(logits_of(worker_for(path), asked).double(), wanted) < 2e-6


def test_a_published_folder(folder: Path) -> None:
    check(folder, weights())


def test_a_folder_by_other_names_and_with_the_gain_in_its_head(tmp_path: Path) -> None:
    """As talkie-lm's own checkpoint calls its tensors, and as somebody who serves it has folded them."""
    found = weights()
    folded = {name.removeprefix("model."): tensor for name, tensor in found.items() if not name.startswith("lm_head")}
    check(folder_of(tmp_path / "m", folded | {"lm_head.weight": found["lm_head"] * found["lm_head_gain.w_g"]}), found)


def test_what_a_config_leaves_out_is_that_of_the_13b() -> None:
    config = {"architectures": ["TalkieForCausalLM"]}
    spec = spec_from_hf(config, hf_family(config))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position) == (65540, 5120, 40, 2048)
    assert spec.norm.eps == EPS
    assert spec.dense_mlp is not None
    assert spec.dense_mlp.intermediate_size == 13696


# ---- the engine ----


def test_tokens_are_the_same_in_chunks_behind_prefixes_and_alone(folder: Path) -> None:
    check_chunks_and_prefixes(worker_for(folder, deterministic=True), prompts(4000))


def test_guesses_and_few_blocks_change_nothing(folder: Path) -> None:
    check_guesses_and_few_blocks(folder, "auto")


def test_in_fewer_bits(folder: Path) -> None:
    asked = prompts(500)
    wanted = logits_of(worker_for(folder), asked)
    for settings, most in (({"dtype": "bfloat16"}, 0.06), ({"quant": "int8"}, 0.06)):
        assert difference(logits_of(worker_for(folder, **settings), asked), wanted) < most


def test_a_calibration_sees_what_the_model_computes(folder: Path) -> None:
    check_walk(folder, 500)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = {name: tensor.bfloat16() for name, tensor in weights(2).items()}
    return folder_of(tmp_path_factory.mktemp("bf16") / "m", found, dtype="bfloat16")


@needs_emulation
def test_a_gpus_tokens_are_those_of_the_cpu_and_steps_are_recorded(bf16: Path) -> None:
    assert recorded_tokens(bf16) == tokens(engine_on(bf16, None), greedy(6))
    depend_on_the_request_alone(bf16)


@needs_emulation
def test_no_kernel_is_compiled_late(bf16: Path) -> None:
    assert not kernels_not_rehearsed(bf16)


# ---- GGUF ----


def as_llama_cpp_has_them(found: dict[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Its converter's rules: second halves of heads of q and k negated, gains as tensors of one number or one a head."""
    names = {
        "attn.attn_query": "attn_q", "attn.attn_key": "attn_k", "attn.attn_value": "attn_v", "attn.attn_resid": "attn_output",
        "mlp.mlp_gate": "ffn_gate", "mlp.mlp_linear": "ffn_up", "mlp.mlp_resid": "ffn_down",
    }  # fmt: skip
    tables = {"token_embd.weight": found["model.embed.weight"], "output.weight": found["lm_head"]}
    signs = torch.ones(3, 2, 16, 1)
    signs[:, 1] = -1
    for i in range(3):
        for theirs, name in names.items():
            rows = found[f"model.blocks.{i}.{theirs}.weight"]
            tables[f"blk.{i}.{name}.weight"] = rows * signs.view(96, 1) if name in ("attn_q", "attn_k") else rows
        tables[f"blk.{i}.attn_q_norm.weight"] = found[f"model.blocks.{i}.attn.head_gain.head_g"][:, None]
        tables[f"blk.{i}.attn_output.scale"] = found[f"model.blocks.{i}.attn_gain.a_g"]
        tables[f"blk.{i}.ffn_down.scale"] = found[f"model.blocks.{i}.mlp_gain.a_g"]
        tables[f"blk.{i}.layer_output_scale.weight"] = found[f"model.blocks.{i}.embed_skip.a_g"]
    return {name: tensor.numpy() for name, tensor in tables.items()}


def test_a_folder_becomes_the_file_that_llama_cpp_makes(folder: Path, made: Path) -> None:
    wanted, found, keys = as_llama_cpp_has_them(weights()), tensors(made), fields(made)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
    said = {"block_count": 3, "attention.head_count": 3, "attention.head_count_kv": 3, "rope.freq_base": 1e6,
            "rope.dimension_count": 32, "logit_scale": 1.75, "attention.layer_norm_rms_epsilon": EPS,
            "context_length": 512}  # fmt: skip
    assert {key: keys[f"talkie.{key}"] for key in said} == pytest.approx(said)
    same(folder, made)


@pytest.mark.parametrize(("to", "most"), [("q8_0", 0.12), ("q5_1", 0.4)])
def test_a_quantized_file(to: str, most: float, folder: Path, tmp_path: Path) -> None:
    """Whose blocks of mirrored rows are negated ones, so that nothing is rounded twice."""
    quantize(to, tmp_path / "m.gguf", folder)
    asked = prompts(int(SHAPE["vocab_size"]))
    assert difference(logits_of(worker_for(tmp_path / "m.gguf"), asked), logits_of(worker_for(folder), asked)) < most


def test_an_adapter_of_a_folder_beside_a_file(folder: Path, made: Path, tmp_path: Path) -> None:
    """Whose rows are mirrored, and so are the adapter's."""
    generator = torch.Generator().manual_seed(5)
    parts = {f"blocks.{i}.attn.attn_{part}": (96, 96) for i in range(3) for part in ("query", "key", "value", "resid")}
    parts |= {f"blocks.{i}.mlp.mlp_{part}": (160, 96) for i in range(3) for part in ("gate", "linear")}
    added = {}
    for name, (rows, columns) in parts.items():
        for side, shape in (("A", (4, columns)), ("B", (rows, 4))):
            added[f"base_model.model.model.{name}.lora_{side}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(added, tmp_path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": sorted({name.split(".")[-1] for name in parts})}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    found = weights()
    for name in parts:
        down, up = (added[f"base_model.model.model.{name}.lora_{side}.weight"] for side in "AB")
        found[f"model.{name}.weight"] += up @ down
    asked = prompts(int(SHAPE["vocab_size"]))
    wanted = torch.cat([expected(found, ids) for ids in asked])
    for path in (folder, made):
        assert difference(logits_of(worker_for(path, lora=[(str(tmp_path), 1.0)]), asked).double(), wanted) < 5e-6


def test_a_file_without_factors_of_what_joins(made: Path, tmp_path: Path) -> None:
    """llama.cpp takes ones for them."""
    found = weights() | {f"model.blocks.{i}.{part}_gain.a_g": torch.ones(1) for i in range(3) for part in ("attn", "mlp")}
    reader = gguf.GGUFReader(made)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "talkie")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if not tensor.name.endswith((".attn_output.scale", ".ffn_down.scale")):
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check(tmp_path / "m.gguf", found)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.blocks.1.attn.head_gain.head_g": torch.ones(2)}, r"'model.blocks.1.attn.head_gain.head_g' must hold 3 numbers"),
        ({"model.blocks.2.embed_skip.a_g": torch.ones(2)}, r"'model.blocks.2.embed_skip.a_g' must hold 1 number(?!s)"),
        ({"model.blocks.0.mlp_gain.a_g": None}, r"'model.blocks.0.mlp_gain.a_g' must hold 1 number(?!s)"),
        ({"model.blocks.0.attn_gain.a_g": torch.tensor([torch.nan])}, r"gains of a Talkie must lie between -1000 and 1000"),
        ({"lm_head_gain.w_g": torch.tensor([0.0])}, r"'lm_head_gain.w_g' must hold a number above 0"),
    ],
)
def test_gains_that_are_missing_or_none(change: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    found = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        worker_for(folder_of(tmp_path / "m", found))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"attention_bias": True}, "a Talkie whose 'attention_bias' is true"),
        ({"tie_word_embeddings": True}, "a Talkie whose 'tie_word_embeddings' is true"),
        ({"partial_rotary_factor": 0.5}, "a Talkie that rotates 16 of 32 dims"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
    ],
)
def test_configs_of_others(said: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        spec_from_hf(CONFIG | said, hf_family(CONFIG))


def test_a_file_whose_heads_turn_in_part(made: Path) -> None:
    """Rows are mirrored in whole heads."""
    keys = fields(made) | {"talkie.rope.dimension_count": 16}
    with pytest.raises(UnsupportedError, match="a Talkie that rotates 16 of 32 dims"):
        spec_from_gguf(keys, gguf_family(keys), 4096, set(tensors(made)), lambda name: None)
