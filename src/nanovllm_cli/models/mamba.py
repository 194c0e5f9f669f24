"""What configs say of Mamba-2's state spaces, and what their tensors are called."""

from __future__ import annotations

import math
from collections.abc import Callable

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, GGUFField
from nanovllm_cli.state_spec import DeltaSpec

MAX_TAPS = 64
_NO_LIMITS = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])

MAMBA_GGUF_NAMES = {
    "blocks.{i}.mamba_in.weight": "blk.{i}.ssm_in.weight",
    "blocks.{i}.mamba_out.weight": "blk.{i}.ssm_out.weight",
    "blocks.{i}.delta.taps": "blk.{i}.ssm_conv1d.weight",
    "blocks.{i}.delta.taps_bias": "blk.{i}.ssm_conv1d.bias",
    "blocks.{i}.delta.decay": "blk.{i}.ssm_a",
    "blocks.{i}.delta.decay_bias": "blk.{i}.ssm_dt.bias",
    "blocks.{i}.delta.skip": "blk.{i}.ssm_d",
    "blocks.{i}.delta.norm.weight": "blk.{i}.ssm_norm.weight",
}


def mamba_hf_names(place: str) -> dict[str, str]:
    """Of a folder where a layer's are at `place`."""
    return {
        "blocks.{i}.mamba_in.weight": f"{place}.in_proj.weight",
        "blocks.{i}.mamba_out.weight": f"{place}.out_proj.weight",
        "blocks.{i}.delta.taps": f"{place}.conv1d.weight",
        "blocks.{i}.delta.taps_bias": f"{place}.conv1d.bias",
        "blocks.{i}.delta.decay": f"{place}.A_log",
        "blocks.{i}.delta.decay_bias": f"{place}.dt_bias",
        "blocks.{i}.delta.skip": f"{place}.D",
        "blocks.{i}.delta.norm.weight": f"{place}.norm.weight",
    }


def check_kind(read: ConfigReader, activation: str = "hidden_act") -> None:
    """UnsupportedError for another activation, which configs call so, and time steps that stay within bounds. What these begin
    with in training is no bound."""
    if (said := read.text(activation, "silu")) not in ("silu", "swish"):
        raise UnsupportedError(f"a state space behind {said[:40]!r}", "known: silu")
    if (limit := read.values.get("time_step_limit")) not in _NO_LIMITS:
        raise UnsupportedError(f"time steps of a state space that are bounded by {str(limit)[:80]}", ANOTHER)


def checked_mamba(mamba: DeltaSpec, inner: int, read: ConfigReader) -> DeltaSpec:
    """`mamba` itself. CheckpointError where its heads don't make `inner` numbers, or can't share its groups."""
    if mamba.values != inner or not 2 <= mamba.width <= MAX_TAPS:
        shape = f"{mamba.num_values} heads of {mamba.value_dim}, for {inner} numbers, and {mamba.width} taps"
        raise CheckpointError(f"{read.where}: a state space can't have {shape}", BROKEN)
    if mamba.num_values % mamba.num_keys:
        heads = f"{mamba.num_values} heads of a state space can't share {mamba.num_keys} groups evenly"
        raise CheckpointError(f"{read.where}: {heads}", BROKEN)
    return mamba


def mamba_from_hf(read: ConfigReader, inner: int, *, normed: bool = True) -> DeltaSpec:
    """By the keys of a model that has attention as well. inner: numbers that its heads make together."""
    check_kind(read)
    heads, size = read.integer("mamba_n_heads"), read.values.get("mamba_d_head", "auto")
    mamba = DeltaSpec(
        read.integer("mamba_n_groups"), read.integer("mamba_d_state"), heads,
        inner // heads if size in (None, "auto") else read.integer("mamba_d_head"), read.integer("mamba_d_conv"), mamba=True,
        conv_bias=read.flag("mamba_conv_bias", True), normed=normed,
    )  # fmt: skip
    return checked_mamba(mamba, inner, read)


def mamba_from_gguf(read: ConfigReader, key: Callable[[str], str]) -> DeltaSpec:
    """By metadata, which has nothing for a convolution without a bias."""
    inner, heads = read.integer(key("ssm.inner_size")), read.integer(key("ssm.time_step_rank"))
    mamba = DeltaSpec(
        read.integer(key("ssm.group_count"), 1), read.integer(key("ssm.state_size")), heads, inner // heads,
        read.integer(key("ssm.conv_kernel")), log_decay=False, mamba=True, conv_bias=True,
    )  # fmt: skip
    return checked_mamba(mamba, inner, read)


def mamba_gguf_keys(mamba: DeltaSpec) -> dict[str, GGUFField]:
    """What files say of it, by keys without the architecture."""
    return {
        "ssm.conv_kernel": mamba.width, "ssm.state_size": mamba.key_dim, "ssm.group_count": mamba.num_keys,
        "ssm.inner_size": mamba.values, "ssm.time_step_rank": mamba.num_values,
    }  # fmt: skip
