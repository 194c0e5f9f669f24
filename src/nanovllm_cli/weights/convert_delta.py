"""The delta rule's tensors as llama.cpp's converter has them: value heads dealt out to key heads in turn, decays without their
logarithm."""

from __future__ import annotations

import re

import torch

from nanovllm_cli.model_spec import DeltaSpec, ModelSpec
from nanovllm_cli.weights.convert_tensors import Step

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")
_BY_HEAD = ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a", "attn_gate")
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")


def has_own_order(delta: DeltaSpec) -> bool:
    """Whether a file's value heads are not in a folder's order."""
    return delta.num_values != delta.num_keys and not delta.mamba


def with_heads_in_turn(step: Step, spec: ModelSpec) -> Step:
    """`step`, of a folder's tensor; that of another layer as it is."""
    found = _BLOCK.match(step.name)
    mixer = spec.blocks[int(found[1])].mixer if found else None
    if found is None or not isinstance(mixer, DeltaSpec):
        return step
    delta, part = mixer, found[2]

    def rows_in_turn(rows: torch.Tensor) -> torch.Tensor:
        by_key = rows.reshape(delta.num_keys, delta.num_values // delta.num_keys, -1, *rows.shape[1:])
        return by_key.transpose(0, 1).reshape(rows.shape)

    def behind_keys(rows: torch.Tensor) -> torch.Tensor:
        keys = delta.channels - delta.values
        return torch.cat([rows[:keys], rows_in_turn(rows[keys:])])

    def columns_in_turn(rows: torch.Tensor) -> torch.Tensor:
        return rows_in_turn(rows.T).T.contiguous()

    if part == "ssm_a":
        return step._replace(reorder=lambda rows: rows_in_turn(-rows.float().exp()))
    if not has_own_order(delta):
        return step
    if part == "ssm_out":
        return step._replace(reorder=columns_in_turn)
    if part in _BY_HEAD:
        return step._replace(reorder=rows_in_turn, rows_together=step.shape[0])
    if part in _BEHIND_KEYS:
        return step._replace(reorder=behind_keys, rows_together=step.shape[0])
    return step
