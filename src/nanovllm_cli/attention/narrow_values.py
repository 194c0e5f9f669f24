"""Values that are narrower than keys, for kernels in which they are not: with zeros behind them. What heads find of zeros is cut
off again."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.mixer_spec import AttentionSpec


def values_widened(launcher: Launcher, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """qkv [T, (H + K) * D + K * V], which may be columns of a wider tensor, as [T, (H + 2 K) * D]."""
    heads, dim, narrow = spec.num_kv_heads, spec.head_dim, spec.found_dim
    before = (spec.num_heads + heads) * dim
    wide = torch.empty(len(qkv), before + heads * dim, dtype=qkv.dtype, device=qkv.device)

    def fill() -> None:
        wide[:, :before].copy_(qkv[:, :before])
        values = _by_head(wide[:, before:], heads)
        values[..., :narrow].copy_(_by_head(qkv[:, before:], heads))
        values[..., narrow:].zero_()

    launcher.torch_op(fill)
    return wide


def values_narrowed(launcher: Launcher, found: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """found [T, H * D] as [T, H * V]."""
    heads, narrow = spec.num_heads, spec.found_dim
    out = torch.empty(len(found), heads * narrow, dtype=found.dtype, device=found.device)
    launcher.torch_op(lambda: _by_head(out, heads).copy_(_by_head(found, heads)[..., :narrow]))
    return out


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Columns of a tensor as [T, heads, …], without a copy."""
    width = rows.shape[1] // heads
    return rows.as_strided((len(rows), heads, width), (rows.stride(0), width, 1))
