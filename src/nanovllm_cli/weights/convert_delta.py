"""Tensors of the delta rule, of Mamba and of Mamba-2 as llama.cpp's converter has them: value heads dealt out to key heads in
turn, but for Qwen3-Next; decays without their logarithm, and without their sign where they have a floor; numbers of a head or a
group as matrices of one column or one row."""

from __future__ import annotations

import re
from functools import partial

import torch

from nanovllm_cli.mixer_spec import state_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.family import Family
from nanovllm_cli.state_spec import DeltaSpec, ScanSpec, WkvSpec
from nanovllm_cli.weights.convert_tensors import Step

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
_BY_HEAD = ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a", "attn_gate")
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")
_COLUMNS = ("ssm_a", "ssm_d")
_TAPS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")


def has_own_order(delta: DeltaSpec, family: Family) -> bool:
    """Whether the value heads of a family's files are not in a folder's order."""
    return family.gguf_heads_dealt and delta.num_values != delta.num_keys


def columns_in_turn(delta: DeltaSpec, rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, values] of what reads all value heads, whose columns are in a folder's order: in a file's."""
    return _in_turn(delta, rows.T).T.contiguous()


def _in_turn(delta: DeltaSpec, rows: torch.Tensor) -> torch.Tensor:
    """As many rows of each value head, one head after the other: dealt out to key heads."""
    by_key = rows.reshape(delta.num_keys, delta.num_values // delta.num_keys, -1, *rows.shape[1:])
    return by_key.transpose(0, 1).reshape(rows.shape)


def as_llama_cpp_has_it(step: Step, spec: ModelSpec, family: Family) -> Step:
    """`step`, of a folder's tensor; that of another layer as it is. family: the file's."""
    found = _BLOCK.match(step.name)
    delta = state_in(spec.blocks[int(found[1])].mixer) if found else None
    if found is None or delta is None:
        return step
    part = found[2]
    if isinstance(delta, WkvSpec):
        return step
    if isinstance(delta, ScanSpec):
        return step._replace(reorder=lambda rows: -rows.float().exp()) if part == "ssm_a" else step

    rows_in_turn = partial(_in_turn, delta)

    def behind_keys(rows: torch.Tensor) -> torch.Tensor:
        keys = delta.channels - delta.values
        return torch.cat([rows[:keys], rows_in_turn(rows[keys:])])

    if delta.channel_rank and part in _TAPS:
        return step._replace(shape=(step.shape[0], 1, step.shape[1]))
    if (delta.mamba or delta.channel_rank) and part in _COLUMNS:
        step = step._replace(shape=(*step.shape, 1))
    if delta.mamba and part == "ssm_norm":  # one row a group
        step = step._replace(shape=(delta.num_keys, step.shape[0] // delta.num_keys))
    if part == "ssm_a":
        turned, sign = rows_in_turn if has_own_order(delta, family) else torch.Tensor.clone, 1 if delta.floor else -1
        return step._replace(reorder=lambda rows: turned(sign * rows.float().exp()))
    if not has_own_order(delta, family):
        return step
    if part == "ssm_out":
        return step._replace(reorder=partial(columns_in_turn, delta))
    if part in _BY_HEAD:
        return step._replace(reorder=rows_in_turn, rows_together=step.shape[0])
    if part in _BEHIND_KEYS:
        return step._replace(reorder=behind_keys, rows_together=step.shape[0])
    return step
