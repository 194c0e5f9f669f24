"""AWQ: columns that see large activations are scaled up before a weight is rounded, and what feeds them is scaled down.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration". The float model computes what
it did: a scale goes into the norm or the rows of the weight before. Then each group's largest weights are clipped as far as that
lowers the error. What comes out is floats, to be rounded to nearest in any format.

    attention norm -> q, k, v      norm -> gate, up      v -> o      up -> down, by their roots where up is squared
    norm -> conv_in                the part of conv_in that multiplies the convolution -> conv_out
    norm -> mamba_in               the state space's norm -> mamba_out
    norm -> scan_in
    norm -> q or q_a, kv_a         the norm of q_a -> q_b

Legend: n rows of a weight (outputs), K columns (inputs), G groups of c columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec, PairSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import BlockSpec
from nanovllm_cli.quant.format import Format, Integer, Nf4
from nanovllm_cli.quant.statistics import InputStatistics, mean_output_error
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec

# Scales are mean |x| ** exponent; 0 is none.
EXPONENTS = tuple(i / 10 for i in range(10))
# Of a group's largest weight: where it is clipped, while scales are looked for and in the end.
COARSE_SHARES = (1.0, 0.92, 0.84, 0.76, 0.68)
SHARES = tuple(1.0 - 0.02 * i for i in range(26))
CLIP_PASSES = 2


class _Fold(NamedTuple):
    """Scales of the columns of `readers` that go into `source`: a norm, or the rows of a matrix and its bias. Where a block has
    no such weight (norms without gains), columns are clipped alone. input: where the statistics of what they read are. heads:
    (key-value heads, query heads each serves) where one row of the source is read by several columns. rows: those of the source
    that it is about. power: of what the source's rows give, as the readers read it."""

    source: str
    readers: tuple[str, ...]
    input: str
    heads: tuple[int, int] = (1, 1)
    rows: slice = slice(None)
    power: int = 1


def scale_and_clip(
    weights: Mapping[str, torch.Tensor],
    seen: Mapping[str, InputStatistics],
    spec: BlockSpec,
    norm_offset: float,
    formats: Mapping[str, Format | None],
) -> dict[str, torch.Tensor]:
    """The slots of a block, float32, changed so that rounding its matrices to their formats costs the outputs less.

    weights: all slots of the block by name ("q.weight", "attention_norm.weight"). seen: by input ("qkv", "o", "gate_up", "down"),
    of these weights. formats: of each matrix by slot name; what has none is neither scaled for nor clipped. norm_offset: see
    NormSpec. But for the clipping, the block computes what it did.
    """
    result = {name: weight.float().clone() for name, weight in weights.items()}
    hessians = {name: statistics.hessian for name, statistics in seen.items()}
    for fold in _folds(spec):
        formed = {name: form for name in fold.readers if (form := formats.get(f"{name}.weight")) is not None}
        if not formed or f"{fold.source}.weight" not in result:
            continue
        scales = _search([(result[f"{name}.weight"], form) for name, form in formed.items()], seen[fold.input], fold)
        _apply(result, fold, scales, norm_offset)
        wide = _spread(scales, fold)
        hessians[fold.input] = hessians[fold.input] / wide / wide[:, None]
    for fold in _folds(spec):
        for name in fold.readers:
            form = formats.get(f"{name}.weight")
            if form is not None and (group := _group_of(form)):
                result[f"{name}.weight"] = _clip(result[f"{name}.weight"], hessians[fold.input], form, group)
    return result


def _folds(spec: BlockSpec) -> list[_Fold]:
    mlp = _mlp_folds(spec.mlp)
    if spec.order in ("parallel", "post", "original"):  # its MLP reads what attention does, or the residual stream as it is
        mlp = mlp[1:]
    return [*_mixer_folds(spec), *mlp]


def _mixer_folds(spec: BlockSpec) -> list[_Fold]:
    match spec.mixer:
        case None:
            return []
        case ConvSpec() as conv:
            middle = slice(conv.channels, 2 * conv.channels)
            return [_Fold("attention_norm", ("conv_in",), "conv_in"), _Fold("conv_in", ("conv_out",), "conv_out", rows=middle)]
        case PairSpec() as pair:
            gains = [_Fold("delta.norm", ("mamba_out",), "mamba_out")] if pair.state.normed else []
            return [_Fold("attention_norm", ("q", "k", "v", "mamba_in"), "qkv"), _behind_values(pair.attention), *gains]
        case WkvSpec():
            return []
        case ScanSpec():
            return [_Fold("attention_norm", ("scan_in",), "scan_in")]
        case DeltaSpec(mamba=True):
            return [_Fold("attention_norm", ("mamba_in",), "mamba_in"), _Fold("delta.norm", ("mamba_out",), "mamba_out")]
        case DeltaSpec() as delta:
            parts = ("delta_q", "delta_k", "delta_v") if delta.apart else ("delta_qkv",)
            gates = ("delta_b", "delta_f_a", "delta_g_a") if delta.channel_rank else ("delta_z", "delta_b", "delta_a")
            gates = ("delta_b", "delta_f", "delta_g") if delta.at_once else gates
            return [_Fold("attention_norm", (*parts, *gates), "delta_qkv")]
        case AttentionSpec(latent=LatentSpec(query_rank=None)):
            gate = ("attention_gate",) if spec.mixer.gated else ()
            return [_Fold("attention_norm", (*gate, "q", "kv_a"), "qkv")]
        case AttentionSpec(latent=LatentSpec() as latent):
            chooses = latent.own_indexer is not None
            of_rows = ("q_a", "kv_a", "index_k", "index_weights") if chooses else ("q_a", "kv_a")
            of_rows = ("attention_gate", *of_rows) if spec.mixer.gated and not spec.mixer.gates_in_queries else of_rows
            of_queries = ("q_b", "index_q") if chooses else ("q_b",)
            behind = [] if latent.beside else [_Fold("q_a_norm", of_queries, "q_b")]
            return [_Fold("attention_norm", of_rows, "qkv"), *behind]
        case AttentionSpec(value_norm=True) as attention:  # which takes a scale of values off again
            kept = () if attention.reads is not None else ("k",) if attention.keys_are_values else ("k", "v")
            return [_Fold("attention_norm", ("q", *kept), "qkv")]
        case attention:
            if spec.order in ("post", "original"):  # what reads the residual stream has nothing before it to take scales
                return [_behind_values(attention)]
            gate = ("attention_gate",) if attention.gate_apart else ()
            beside = _mlp_folds(spec.mlp)[0].readers if spec.order == "parallel" else ()
            return [_Fold("attention_norm", (*gate, "q", "k", "v", *beside), "qkv"), _behind_values(attention)]


def _behind_values(attention: AttentionSpec) -> _Fold:
    if attention.found_norm or attention.clip is not None:  # limits that hold values would hold others once they are scaled
        return _Fold("found_norm", ("o",), "o")
    return _Fold("v", ("o",), "o", (attention.num_kv_heads, attention.queries_a_key))


def _mlp_folds(mlp: MLPSpec | MoESpec | None) -> list[_Fold]:
    if mlp is None:
        return []
    if isinstance(mlp, MLPSpec) and not mlp.gated:
        behind = [_Fold("up", ("down",), "down", power=2)] if mlp.activation == "relu2" else []  # a GELU passes no scale on
        return [_Fold("mlp_norm", ("up",), "gate_up"), *behind]
    inner = _Fold("inner_norm" if isinstance(mlp, MLPSpec) and mlp.normed else "up", ("down",), "down")
    return [_Fold("mlp_norm", ("gate", "up"), "gate_up"), inner]


def _search(readers: list[tuple[torch.Tensor, Format]], seen: InputStatistics, fold: _Fold) -> torch.Tensor:
    """Scales, one for each row of the source, with the least error of the readers' outputs."""
    kv_heads, group = fold.heads
    activity = seen.mean_abs.view(kv_heads, group, -1).mean(1).flatten()
    activity = activity.clamp_min(max(1e-4 * float(activity.max()), 1e-30))
    best, least = torch.ones_like(activity), float("inf")
    for exponent in EXPONENTS:
        scales = activity**exponent
        scales /= (scales.max() * scales.min()).sqrt()
        wide = _spread(scales, fold)
        hessian = seen.hessian / wide / wide[:, None]
        error = sum(
            mean_output_error(_rounded(weight * wide, hessian, form) / wide - weight, seen) for weight, form in readers
        )
        if error < least:
            best, least = scales, error
    return best


def _spread(scales: torch.Tensor, fold: _Fold) -> torch.Tensor:
    """Scales of the source's rows as those of the readers' columns."""
    kv_heads, group = fold.heads
    return scales.view(kv_heads, 1, -1).expand(-1, group, -1).flatten()


def _apply(weights: dict[str, torch.Tensor], fold: _Fold, scales: torch.Tensor, norm_offset: float) -> None:
    for name in fold.readers:
        weights[f"{name}.weight"] *= _spread(scales, fold)
    scales, source = scales ** (1 / fold.power), f"{fold.source}.weight"
    if weights[source].dim() == 1:
        weights[source] = (weights[source] + norm_offset) / scales - norm_offset
    else:
        weights[source][fold.rows] /= scales[:, None]
    if (bias := f"{fold.source}.bias") in weights:
        weights[bias][fold.rows] /= scales


def _group_of(form: Format) -> int:
    """Columns that share a scale, if they are few enough for clipping to pay."""
    return form.group if isinstance(form, Integer | Nf4) else 0


def _rounded(weight: torch.Tensor, hessian: torch.Tensor, form: Format) -> torch.Tensor:
    """About what the weight becomes: clipped, each group for itself, and rounded. All floats [n, K]."""
    group = _group_of(form)
    if not group:
        return form.dequantize(form.quantize(weight))
    n, width = weight.shape
    grouped = weight.view(n, -1, group)
    groups = torch.arange(width).view(-1, group)
    own = hessian[groups[:, :, None], groups[:, None, :]]
    best, least = grouped, torch.full((n, width // group), float("inf"))
    for share in COARSE_SHARES:
        rounded = form.dequantize(form.quantize(_clipped(grouped, share).view(n, width))).view(n, -1, group)
        off = (rounded - grouped).transpose(0, 1)
        error = ((off @ own) * off).sum(-1).T
        better = error < least
        best = torch.where(better[:, :, None], rounded, best)
        least = torch.where(better, error, least)
    return best.reshape(n, width)


def _clip(weight: torch.Tensor, hessian: torch.Tensor, form: Format, group: int) -> torch.Tensor:
    """weight [n, K] with each group's largest values cut where that lowers the error of the whole row's output: group by group,
    while the others are as they were left."""
    result = weight.clone()
    off = form.dequantize(form.quantize(weight)) - weight
    for first in [*range(0, weight.shape[1], group)] * CLIP_PASSES:
        part = slice(first, first + group)
        columns, own = weight[:, part], hessian[part, part]
        others = off @ hessian[:, part] - off[:, part] @ own
        clipped = _clipped(columns, torch.tensor(SHARES)[:, None, None])
        change = form.dequantize(form.quantize(clipped.flatten(0, 1))).view_as(clipped) - columns
        best = ((change @ own + 2 * others) * change).sum(-1).argmin(0), torch.arange(len(weight))
        result[:, part], off[:, part] = clipped[best], change[best]
    return result


def _clipped(groups: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
    largest = groups.abs().amax(-1, keepdim=True) * share
    return groups.minimum(largest).maximum(-largest)
