"""Small random RWKV-7s: folders as flash-linear-attention names them, files as llama.cpp's converter writes them, and their
logits by formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from wkvs import float64_rule

Weights = dict[str, torch.Tensor]


class Shape(NamedTuple):
    vocab: int = 263
    layers: int = 3
    hidden: int = 96
    head_dim: int = 32
    inner: int = 160
    decay: int = 12
    rate: int = 10
    value: int = 7
    gate: int = 17


def config_of(shape: Shape, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "attn": None, "attn_mode": "chunk", "hidden_act": "sqrelu",
        "vocab_size": shape.vocab, "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "head_dim": shape.head_dim,
        "intermediate_size": shape.inner, "hidden_ratio": 4.0, "decay_low_rank_dim": shape.decay, "a_low_rank_dim": shape.rate,
        "v_low_rank_dim": shape.value, "gate_low_rank_dim": shape.gate, "norm_first": True, "norm_bias": True, "norm_eps": 2e-5,
        "tie_word_embeddings": False, "max_position_embeddings": 2048, "fuse_norm": False, "torch_dtype": "float32",
    } | more  # fmt: skip


def random_weights(shape: Shape, seed: int = 0) -> Weights:
    """So large that every part of a model matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    hidden, found = shape.hidden, Weights()

    def matrix(name: str, rows: int, width: int) -> None:
        found[name] = torch.randn(rows, width, generator=generator) * width**-0.5 * 1.3

    def vector(name: str, scale: float, *size: int) -> None:
        found[name] = torch.randn(*size, generator=generator) * scale

    def norm(name: str) -> None:
        found[f"{name}.weight"] = 0.5 + torch.rand(hidden, generator=generator)
        vector(f"{name}.bias", 0.3, hidden)

    matrix("model.embeddings.weight", shape.vocab, hidden)
    norm("model.layers.0.pre_norm")
    for i in range(shape.layers):
        place = f"model.layers.{i}"
        for name in ("attn_norm", "ffn_norm"):
            norm(f"{place}.{name}")
        for part in "rwkvag":
            found[f"{place}.attn.x_{part}"] = torch.rand(1, 1, hidden, generator=generator)
        for part in "rkvo":
            matrix(f"{place}.attn.{part}_proj.weight", hidden, hidden)
        for part, rank in (("w", shape.decay), ("a", shape.rate), ("v", shape.value), ("g", shape.gate)):
            if part == "v" and i == 0:
                continue
            matrix(f"{place}.attn.{part}_lora.lora.0.weight", rank, hidden)
            matrix(f"{place}.attn.{part}_lora.lora.2.weight", hidden, rank)
            if part != "g":
                vector(f"{place}.attn.{part}_lora.lora.2.bias", 1.0, hidden)
        for part in ("k_k", "k_a"):
            found[f"{place}.attn.{part}"] = 0.5 + torch.rand(hidden, generator=generator)
        vector(f"{place}.attn.r_k", 0.3, hidden // shape.head_dim, shape.head_dim)
        norm(f"{place}.attn.g_norm")
        found[f"{place}.ffn.x_k"] = torch.rand(hidden, generator=generator)
        matrix(f"{place}.ffn.key.weight", shape.inner, hidden)
        matrix(f"{place}.ffn.value.weight", hidden, shape.inner)
    norm("model.norm")
    matrix("lm_head.weight", shape.vocab, hidden)
    return found


def save_folder(folder: Path, shape: Shape, weights: Weights, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: each.to(dtype).contiguous() for name, each in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(shape, **config)))
    return folder


def logits(shape: Shape, weights: Weights, texts: Sequence[Sequence[int]], eps: float = 2e-5) -> torch.Tensor:
    """[all tokens, vocab] in float64, each text by itself."""
    w = {name: each.double() for name, each in weights.items()}

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (shape.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def shifted(x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return torch.lerp(x, F.pad(x, (0, 0, 1, -1)), share.flatten())

    rows = []
    for ids in texts:
        x = normed(w["model.embeddings.weight"][list(ids)], "model.layers.0.pre_norm")
        first = None
        for i in range(shape.layers):
            place = f"model.layers.{i}."
            h, at = normed(x, f"{place}attn_norm"), f"{place}attn."
            of = {part: shifted(h, w[f"{at}x_{part}"]) for part in "rwkvag"}
            r, k, v = (of[part] @ w[f"{at}{part}_proj.weight"].T for part in "rkv")

            def narrow(part: str, squash: Any = lambda x: x, at: str = at, of: dict[str, torch.Tensor] = of) -> torch.Tensor:
                lora = f"{at}{part}_lora.lora."
                return squash(of[part] @ w[f"{lora}0.weight"].T) @ w[f"{lora}2.weight"].T

            mixes = None if i == 0 else narrow("v")
            tables = [w[f"{at}w_lora.lora.2.bias"], w[f"{at}a_lora.lora.2.bias"],
                      torch.zeros(shape.hidden) if i == 0 else w[f"{at}v_lora.lora.2.bias"], w[f"{at}k_k"], w[f"{at}k_a"],
                      w[f"{at}r_k"].flatten(), w[f"{at}g_norm.weight"], w[f"{at}g_norm.bias"]]  # fmt: skip
            state = torch.zeros(shape.hidden // shape.head_dim, shape.head_dim, shape.head_dim, dtype=torch.float64)
            gates = narrow("g", torch.sigmoid)
            decays, rates, of_heads = narrow("w", torch.tanh), narrow("a"), eps * shape.head_dim
            found, _ = float64_rule(r, k, v, gates, decays, rates, mixes, first, torch.stack(tables), state, of_heads)
            first = v if first is None else first
            x = x + found @ w[f"{at}o_proj.weight"].T
            h = shifted(normed(x, f"{place}ffn_norm"), w[f"{place}ffn.x_k"])
            x = x + F.relu(h @ w[f"{place}ffn.key.weight"].T).square() @ w[f"{place}ffn.value.weight"].T
        rows.append(normed(x, "model.norm") @ w["lm_head.weight"].T)
    return torch.cat(rows).float()


_PARTS = {"r_proj.weight": "receptance", "k_proj.weight": "key", "v_proj.weight": "value", "o_proj.weight": "output",
          "k_k": "k_k", "k_a": "k_a"}  # fmt: skip


def gguf_tensors(shape: Shape, weights: Weights) -> dict[str, np.ndarray[Any, Any]]:
    """By the names and shapes that llama.cpp asks for. The first layer has values' matrices that nothing reads."""
    found = {"token_embd.weight": weights["model.embeddings.weight"], "output.weight": weights["lm_head.weight"]}
    for kind in ("weight", "bias"):
        found[f"token_embd_norm.{kind}"] = weights[f"model.layers.0.pre_norm.{kind}"]
        found[f"output_norm.{kind}"] = weights[f"model.norm.{kind}"]
    for i in range(shape.layers):
        place, to = f"model.layers.{i}.", f"blk.{i}."
        for kind in ("weight", "bias"):
            found[f"{to}attn_norm.{kind}"] = weights[f"{place}attn_norm.{kind}"]
            found[f"{to}attn_norm_2.{kind}"] = weights[f"{place}ffn_norm.{kind}"]
            found[f"{to}time_mix_ln.{kind}"] = weights[f"{place}attn.g_norm.{kind}"]
        fused = [weights[f"{place}attn.x_{part}"] for part in "rwkvag"]
        found[f"{to}time_mix_lerp_fused.weight"] = torch.stack(fused)
        for theirs, ours in _PARTS.items():
            found[f"{to}time_mix_{ours}.weight"] = weights[f"{place}attn.{theirs}"]
        found[f"{to}time_mix_r_k.weight"] = weights[f"{place}attn.r_k"].flatten()
        for part in "wavg":
            lora = f"{place}attn.{'a' if part == 'v' and i == 0 else part}_lora.lora."
            found[f"{to}time_mix_{part}1.weight"] = weights[f"{lora}0.weight"]
            found[f"{to}time_mix_{part}2.weight"] = weights[f"{lora}2.weight"]
            if part != "g":
                found[f"{to}time_mix_{part}0.weight"] = weights[f"{lora}2.bias"]
        found[f"{to}channel_mix_lerp_k.weight"] = weights[f"{place}ffn.x_k"]
        found[f"{to}channel_mix_key.weight"] = weights[f"{place}ffn.key.weight"]
        found[f"{to}channel_mix_value.weight"] = weights[f"{place}ffn.value.weight"]
    return {name: each.float().numpy() for name, each in found.items()}


def write_gguf(path: Path, shape: Shape, weights: Weights, tokens: Sequence[str] | None = None, eps: float = 2e-5) -> Path:
    """All float32. tokens: of its vocabulary, the first being a control token; None for no vocabulary."""
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_layer_norm_eps(eps)
    writer.add_wkv_head_size(shape.head_dim)
    writer.add_decay_lora_rank(shape.decay)
    writer.add_iclr_lora_rank(shape.rate)
    writer.add_value_residual_mix_lora_rank(shape.value)
    writer.add_gate_lora_rank(shape.gate)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(0)
    if tokens is not None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(list(tokens))
        writer.add_token_types([3, *[1] * (len(tokens) - 1)])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    for name, each in gguf_tensors(shape, weights).items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


