"""What both directions of a conversion need to know: how tensors are called on either side, in which order the rows of q and k
lie, how numbers come back from float32, and whether two model specs mean the same model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from nanovllm_cli.model_spec import AttentionSpec, MLPSpec, ModelSpec
from nanovllm_cli.models.families import GGUF_NAMES, HF_NAMES

_IGNORED = ("architecture", "dtype", "max_position", "interleaved")
_CLOSE = 1e-6  # GGUF keeps numbers in float32


def gguf_name(hf_name: str) -> str | None:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight; None for a tensor that GGUF has no name for."""
    parts = hf_name.split(".")
    number = next((part for part in parts if part.isdecimal()), "")
    pattern = ".".join("{i}" if part == number else part for part in parts) if number else hf_name
    return _TO_GGUF[pattern].replace("{i}", number) if pattern in _TO_GGUF else None


_TO_GGUF = {HF_NAMES[ours]: GGUF_NAMES[ours] for ours in HF_NAMES}


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """The attention that all layers have. Conversions are for families whose layers differ in their windows at most."""
    attention = spec.blocks[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def rotary_heads(gguf_name: str, spec: ModelSpec) -> int | None:
    """How many heads the rows of a tensor divide into whose rotary pairs lie differently on the two sides; else None.

    GGUF of these families has the pairs side by side, (2i, 2i + 1), Hugging Face has halves, (i, dim / 2 + i).
    """
    attention = attention_of(spec)
    part = gguf_name.split(".")[-2] if "." in gguf_name else ""
    return {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}.get(part)


def halves_to_pairs(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Rows of whole heads, [heads * head_dim, ...]: from Hugging Face's order to that of GGUF's llama."""
    return _reorder(rows, head_dim, rotary_dim, (2, rotary_dim // 2))


def pairs_to_halves(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """The way back."""
    return _reorder(rows, head_dim, rotary_dim, (rotary_dim // 2, 2))


def _reorder(rows: torch.Tensor, head_dim: int, rotary_dim: int, grid: tuple[int, int]) -> torch.Tensor:
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    turned = heads[:, :rotary_dim].reshape(len(heads), *grid, *rows.shape[1:]).transpose(1, 2)
    turned = turned.reshape(len(heads), rotary_dim, *rows.shape[1:])
    return torch.cat([turned, heads[:, rotary_dim:]], 1).reshape(rows.shape)


def differences(wanted: ModelSpec, found: ModelSpec) -> list[str]:
    """The fields in which two specs differ, but for those that do not change a number: names, dtype, order of rotary rows."""
    return list(dict.fromkeys(_differences("", asdict(wanted), asdict(found))))


def _differences(name: str, wanted: Any, found: Any) -> Iterable[str]:
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        for key in wanted:
            if key not in _IGNORED:
                yield from _differences(key, wanted[key], found[key])
    elif isinstance(wanted, list | tuple) and isinstance(found, list | tuple) and len(wanted) == len(found):
        for one, other in zip(wanted, found, strict=True):
            yield from _differences(name, one, other)
    elif isinstance(wanted, float) and isinstance(found, float):
        if not math.isclose(wanted, found, rel_tol=_CLOSE):
            yield name
    elif wanted != found:
        yield name


def shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32: GGUF's 9.999999974752427e-07 is 1e-06."""
    return float(str(np.float32(value)))


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of a model under its Hugging Face name. A tied head has none of its own."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        HF_NAMES["embedding.weight"]: (spec.vocab_size, hidden),
        HF_NAMES["norm.weight"]: (hidden,),
    }
    if not spec.tied_head:
        shapes[HF_NAMES["head.weight"]] = (spec.vocab_size, hidden)
    for i, block in enumerate(spec.blocks):
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, AttentionSpec)
        assert isinstance(mlp, MLPSpec)
        q_rows, kv_rows = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows, "o": hidden, "gate": mlp.intermediate_size}
        rows |= {"up": mlp.intermediate_size, "down": hidden}
        columns = {"o": q_rows, "down": mlp.intermediate_size}
        biased = {**dict.fromkeys("qkv", attention.qkv_bias), "o": attention.out_bias}
        for part, count in rows.items():
            shapes[HF_NAMES[f"blocks.{{i}}.{part}.weight"].replace("{i}", str(i))] = (count, columns.get(part, hidden))
            if biased.get(part, mlp.bias):
                shapes[HF_NAMES[f"blocks.{{i}}.{part}.bias"].replace("{i}", str(i))] = (count,)
        norms = {"attention_norm": hidden, "mlp_norm": hidden}
        if attention.qk_norm:
            norms |= {"q_norm": attention.head_dim, "k_norm": attention.head_dim}
        for part, count in norms.items():
            shapes[HF_NAMES[f"blocks.{{i}}.{part}.weight"].replace("{i}", str(i))] = (count,)
    return shapes
