"""What both directions of a conversion need to know: how tensors are called on either side, in which order the rows of q and k
lie, how numbers come back from float32, and whether two model specs mean the same model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec, attention_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.outline import Shapes, mtp_shapes_of, shapes_of
from nanovllm_cli.models.qwen_next import QWEN2_MOE
from nanovllm_cli.weights.tensor_names import checkpoint_name

_IGNORED = ("architecture", "dtype", "max_position", "interleaved", "tiled", "log_decay", "by_head", "has_head",
            "per_layer_rows", "backwards")  # fmt: skip
TO_HF = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
_CLOSE = 1e-6  # GGUF keeps numbers in float32


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """The attention that all layers have, but for windows, and what those with one or without positions have of their own."""
    turned = [each for each in spec.attentions if each.rope is not None]
    return next((each for each in turned if each.window is None), turned[0] if turned else spec.attention)


def activation_of(spec: ModelSpec) -> str:
    """Of all layers' MLPs and experts; of none, what most have."""
    mlp = spec.dense_mlp if spec.mixture is None else spec.mixture.expert
    return "silu" if mlp is None else mlp.activation


def rotary_heads(gguf_name: str, spec: ModelSpec) -> int | None:
    """How many heads the rows of a tensor divide into whose rotary pairs lie differently on the two sides; else None.

    GGUF of these families has the pairs side by side, (2i, 2i + 1), Hugging Face has halves, (i, dim / 2 + i).
    """
    attention = attention_of(spec)
    part = gguf_name.split(".")[-2] if "." in gguf_name else ""
    if (layer := re.match(r"blk\.(\d+)\.", gguf_name)) is not None and int(layer[1]) < spec.num_layers:
        attention = attention_in(spec.mixers[int(layer[1])]) or attention
    return {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}.get(part)


def rotary_dims(attention: AttentionSpec) -> tuple[int, int]:
    """Of a head, and of what is ordered in pairs of it: all, where nothing rotates."""
    return attention.head_dim, attention.head_dim if attention.rope is None else attention.rope.dim


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
    """The fields in which two specs differ, but for those that do not change a number: names, dtype, order of rows."""
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


def gguf_family_of(family: Family, spec: ModelSpec) -> Family:
    """Whose GGUF files hold such a model. UnsupportedError for those that are read, but not written."""
    family = family.gguf_like(spec) if family.gguf_like is not None else family
    if family.gguf_keys is None:
        raise UnsupportedError(f"GGUF files of {family.name} models are not written", "llama.cpp's converter knows them")
    return family


def hf_family_of(family: Family, spec: ModelSpec) -> Family:
    """Whose folders hold a GGUF file's model: llama.cpp has one architecture for Llama, Mistral and Mixtral. UnsupportedError for
    families whose folders are read, but not written."""
    if family is LLAMA:
        return MIXTRAL if spec.mixture is not None else LLAMA if attention_of(spec).window is None else MISTRAL
    if family not in TO_HF:
        raise UnsupportedError(
            f"folders of {family.name} models are not made of GGUF files",
            f"known: {', '.join(known.name for known in TO_HF)}; take the publisher's own folder",
        )
    return family


def text_alone(spec: ModelSpec) -> tuple[ModelSpec, list[str]]:
    """As a model that doesn't see, and a line for what that leaves out, if anything."""
    if not any(rope.sections for rope in spec.ropes):
        return spec, []
    return spec.each_rope(lambda rope: replace(rope, sections=(), woven=False)), ["positions in images: it will read texts alone"]


def named_on_both_sides(
    spec: ModelSpec, hf_names: Mapping[str, str], gguf_names: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every weight of a model: its Hugging Face name -> its GGUF name, and its shape."""
    return _on_both_sides(shapes_of(spec), hf_names, gguf_names)


def unread_on_both_sides(
    spec: ModelSpec, hf_names: Mapping[str, str], family: Family, there: Iterable[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same of keys and values that no layer reads, where `there` are some and files of the family have them."""
    if not family.gguf_unread:
        return {}
    whole = named_on_both_sides(spec.with_attention(reads=None), hf_names, family.names("gguf"))
    own = tensor_shapes(spec, hf_names)
    return {name: both for name, both in whole.items() if name not in own and name in set(there)}


def mtp_on_both_sides(
    spec: ModelSpec, hf_names: Mapping[str, str], gguf_names: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same of a layer that predicts further tokens. spec: `mtp_spec`; names: `mtp_names_of`."""
    return _on_both_sides(mtp_shapes_of(spec), hf_names, gguf_names)


def _on_both_sides(
    shapes: Shapes, hf_names: Mapping[str, str], gguf_names: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {checkpoint_name(ours, hf_names): (checkpoint_name(ours, gguf_names), shape) for ours, shape in shapes.items()}


def tensor_shapes(spec: ModelSpec, names: Mapping[str, str]) -> Shapes:
    """Every weight of a model under its name in a checkpoint (`names_of`). A tied head has none of its own."""
    return {checkpoint_name(ours, names): shape for ours, shape in shapes_of(spec).items()}


def mtp_shapes(spec: ModelSpec, names: Mapping[str, str]) -> Shapes:
    """The same of a layer that predicts further tokens. spec: `mtp_spec`; names: `mtp_names_of`."""
    return {checkpoint_name(ours, names): shape for ours, shape in mtp_shapes_of(spec).items()}
