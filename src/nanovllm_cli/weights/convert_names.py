"""What both directions of a conversion need to know: how tensors are called on either side, in which order the rows of q and k
lie, how numbers come back from float32, and whether two model specs mean the same model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec, ConvSpec, DeltaSpec, LatentSpec, MixerSpec, PairSpec, ScanSpec
from nanovllm_cli.model_spec import BlockSpec, MLPSpec, ModelSpec, NormSpec, StreamsSpec
from nanovllm_cli.models.families import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.qwen_next import QWEN2_MOE
from nanovllm_cli.weights.tensor_names import checkpoint_name

_IGNORED = ("architecture", "dtype", "max_position", "interleaved", "tiled", "log_decay", "by_head", "has_head",
            "per_layer_rows")  # fmt: skip
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
    hf, gguf = tensor_shapes(spec, hf_names), tensor_shapes(spec, gguf_names)
    return {name: (theirs, shape) for (name, shape), theirs in zip(hf.items(), gguf, strict=True)}


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
    """The same of a layer that predicts further tokens; see `mtp_shapes`."""
    hf, gguf = mtp_shapes(spec, hf_names), mtp_shapes(spec, gguf_names)
    return {name: (theirs, shape) for (name, shape), theirs in zip(hf.items(), gguf, strict=True)}


def tensor_shapes(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Every weight of a model under its name in a checkpoint (`names_of`). A tied head has none of its own."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (spec.vocab_size, hidden)}
    if spec.ends_normed:
        shapes |= _norm_shapes("norm", spec.norm, hidden)
    if (entry := spec.entry) is not None:
        tables = {"positions.weight": entry.positions, "segments.weight": entry.segments}
        shapes |= {name: (rows, hidden) for name, rows in tables.items() if rows}
        shapes |= {} if entry.norm is None else _norm_shapes("entry_norm", entry.norm, hidden)
    if (distances := spec.distances) is not None and distances.buckets:
        shapes["distances.weight"] = (distances.buckets, spec.attentions[0].num_heads)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.num_drawn, hidden)
    if spec.head_bias:
        shapes["head.bias"] = (spec.num_drawn,)
    if spec.per_layer_width:
        every = spec.per_layer_width * spec.num_layers
        rows = spec.per_layer_rows or spec.vocab_size
        shapes |= {"per_layer_embedding.weight": (rows, every), "per_layer_projection.weight": (every, hidden)}
        shapes["per_layer_norm.weight"] = (spec.per_layer_width,)
    if spec.streams is not None:
        pairs = [f"altup_{side}.{i}.weight" for side in ("in", "out") for i in range(spec.streams.count - 1)]
        shapes |= dict.fromkeys(pairs, (hidden, hidden))
    named = {checkpoint_name(name, names): shape for name, shape in shapes.items()}
    for i, block in enumerate(spec.blocks):
        own = _block_shapes(block, spec.norm, hidden)
        if (width := spec.per_layer_width) > 0:
            own |= {"per_layer_gate.weight": (width, hidden), "per_layer_out.weight": (hidden, width)}
            own["after_per_layer_norm.weight"] = (hidden,)
        named |= {checkpoint_name(f"blocks.{i}.{name}", names): shape for name, shape in own.items()}
    return named


def mtp_shapes(spec: ModelSpec, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The same of a layer that predicts further tokens. spec: `mtp_spec`; names: `mtp_names_of`."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("embedding_norm.weight", "hidden_norm.weight", "norm.weight"), (hidden,))
    shapes |= _linear("join", hidden, 2 * hidden, False)
    shapes |= {f"blocks.0.{name}": shape for name, shape in _block_shapes(spec.blocks[0], spec.norm, hidden).items()}
    return {checkpoint_name(name, names): shape for name, shape in shapes.items()}


def _block_shapes(block: BlockSpec, norm: NormSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    mlp = block.mlp
    shapes = {} if block.mixer is None else _mixer_shapes(block.mixer, hidden)
    if isinstance(mlp, MLPSpec):
        shapes |= _mlp_shapes("", mlp, hidden)
    elif mlp is not None:
        shapes |= _linear("router", mlp.num_experts, hidden, mlp.router_bias)
        if mlp.selection_bias:
            shapes["router.selection_bias"] = (mlp.num_experts,)
        if mlp.expert_scale:
            shapes["router.expert_scale"] = (mlp.num_experts,)
        if mlp.apart:
            norms = ("router.norm", "experts_norm", "after_shared_norm", "after_experts_norm")
            shapes |= {f"{name}.weight": (hidden,) for name in norms}
        if mlp.shared is not None:
            shapes |= _mlp_shapes("shared.", mlp.shared, hidden)
        if mlp.shared_gate:
            shapes |= _linear("shared.gate_row", 1, hidden, False)
        if (latent := mlp.latent_size) is not None:
            shapes |= _linear("latent_in", latent, hidden, False) | _linear("latent_out", hidden, latent, False)
        for e in range(mlp.num_experts):
            shapes |= _mlp_shapes(f"experts.{e}.", mlp.expert, mlp.width(hidden))
    for name in block.norms:
        shapes |= _norm_shapes(name, norm, hidden)
    if block.scaled:
        shapes["scale"] = (1,)
    return shapes if block.streams is None else shapes | _stream_shapes(block.streams, hidden)


def _stream_shapes(streams: StreamsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    count, rank = streams.count, streams.rank
    names = ("altup_router_norm.weight", "altup_scale", "laurel_norm.weight")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (hidden,))
    shapes |= _linear("altup_router", count, hidden, False) | _linear("altup_predict", count**2, count, False)
    shapes |= _linear("altup_correct", count, count, False)
    return shapes | _linear("laurel_left", rank, hidden, False) | _linear("laurel_right", hidden, rank, False)


def _norm_shapes(name: str, norm: NormSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    parts = {"weight": norm.gains, "bias": norm.shifted}
    return {f"{name}.{part}": (hidden,) for part, there in parts.items() if there}


def _mixer_shapes(mixer: MixerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    match mixer:
        case ConvSpec():
            return _conv_shapes(mixer, hidden)
        case DeltaSpec():
            return _delta_shapes(mixer, hidden)
        case ScanSpec():
            return _scan_shapes(mixer, hidden)
        case PairSpec():
            return _attention_shapes(mixer.attention, hidden) | _delta_shapes(mixer.state, hidden)
    return _attention_shapes(mixer, hidden)


def _attention_shapes(attention: AttentionSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    if attention.latent is not None:
        return _latent_shapes(attention.num_heads, attention.latent, hidden)
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    shapes = _linear("o", hidden, q, attention.out_bias)
    apart = {"attention_gate": attention.num_gates, "q": q} if attention.gate_apart else {"q": q * (1 + attention.gated)}
    if attention.reads is None:
        apart |= {"k": kv} if attention.keys_are_values else {"k": kv, "v": kv}
    for name, rows in ({"qkv": q + 2 * kv} if attention.fused_qkv else apart).items():
        shapes |= _linear(name, rows, hidden, attention.qkv_bias)
    if attention.found_norm:
        shapes["found_norm.weight"] = (q,)
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    return shapes | {f"{part}_norm.weight": (size,) for part, size in attention.qk_norm_sizes.items()}


def _latent_shapes(heads: int, latent: LatentSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    queries = heads * latent.query_dim
    shapes = _linear("o", hidden, heads * latent.value_dim, False) | {"kv_a_norm.weight": (latent.rank,)}
    shapes |= _linear("kv_a", latent.rank + latent.rotary_dim, hidden, False)
    if (rank := latent.query_rank) is None:
        shapes |= _linear("q", queries, hidden, False)
    else:
        shapes |= _linear("q_a", rank, hidden, False) | _linear("q_b", queries, rank, False) | {"q_a_norm.weight": (rank,)}
    if not latent.by_head:
        return shapes | _linear("kv_b", heads * (latent.key_dim + latent.value_dim), latent.rank, False)
    for head in range(heads):
        shapes |= _linear(f"k_b.{head}", latent.rank, latent.key_dim, False)
        shapes |= _linear(f"v_b.{head}", latent.value_dim, latent.rank, False)
    return shapes


def _conv_shapes(conv: ConvSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _linear("conv_in", 3 * conv.channels, hidden, conv.bias) | _linear("conv_out", hidden, conv.channels, conv.bias)
    return shapes | _linear("conv", conv.channels, conv.width, conv.bias)


def _delta_shapes(delta: DeltaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    if delta.mamba:
        return _mamba_shapes(delta, hidden)
    read = {"q": delta.keys, "k": delta.keys, "v": delta.values} if delta.apart else {"qkv": delta.channels}
    rank, decays = delta.channel_rank, delta.num_values * (delta.key_dim if delta.channel_rank else 1)
    gates = {"f_a": rank, "g_a": rank} if rank else {"z": delta.values, "a": delta.num_values}
    shapes = _linear("delta_out", hidden, delta.values, False)
    for part, count in (read | {"b": delta.num_values} | gates).items():
        shapes |= _linear(f"delta_{part}", count, hidden, False)
    if rank:
        shapes |= _linear("delta_f_b", decays, rank, False) | _linear("delta_g_b", delta.values, rank, False)
    tables = {"decay": delta.num_values, "decay_bias": decays, "norm.weight": delta.value_dim}
    shapes |= {f"delta.{name}": (size,) for name, size in tables.items()}
    taps = {f"{part}_taps": count for part, count in read.items()} if delta.apart else {"taps": delta.channels}
    return shapes | {f"delta.{name}": (count, delta.width) for name, count in taps.items()}


def _mamba_shapes(mamba: DeltaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _linear("mamba_in", mamba.channels + mamba.values + mamba.num_values, hidden, False)
    shapes |= _linear("mamba_out", hidden, mamba.values, False)
    tables = dict.fromkeys(("decay", "decay_bias", "skip"), (mamba.num_values,))
    if mamba.normed:
        tables["norm.weight"] = (mamba.values,)
    if mamba.conv_bias:
        tables["taps_bias"] = (mamba.channels,)
    shapes |= {f"delta.{name}": shape for name, shape in tables.items()}
    return shapes | {"delta.taps": (mamba.channels, mamba.width)}


def _scan_shapes(scan: ScanSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    channels = scan.channels
    shapes = _linear("scan_in", 2 * channels, hidden, False) | _linear("scan_x", scan.num_parts, channels, False)
    shapes |= _linear("scan_dt", channels, scan.rank, False) | _linear("scan_out", hidden, channels, False)
    tables: dict[str, tuple[int, ...]] = dict.fromkeys(("rate_bias", "skip"), (channels,))
    if scan.conv_bias:
        tables["taps_bias"] = (channels,)
    if scan.norms == "gains":
        sizes = {"dt": scan.rank, "b": scan.key_dim, "c": scan.key_dim}
        tables |= {f"{part}_norm.weight": (size,) for part, size in sizes.items()}
    tables |= {"taps": (channels, scan.width), "decay": (channels, scan.key_dim)}
    return shapes | {f"scan.{name}": shape for name, shape in tables.items()}


def _mlp_shapes(place: str, mlp: MLPSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = _linear(f"{place}down", hidden, mlp.intermediate_size, mlp.bias or mlp.down_bias)
    for name, rows in mlp.parts.items():
        shapes |= _linear(f"{place}{name}", rows, hidden, mlp.bias)
    if mlp.normed:
        shapes[f"{place}inner_norm.weight"] = (mlp.intermediate_size,)
    return shapes


def _linear(name: str, rows: int, columns: int, biased: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if biased else weight
