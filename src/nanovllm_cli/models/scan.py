"""What configs say of Mamba's first state spaces, and what their tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, GGUFField
from nanovllm_cli.models.mamba import MAX_TAPS, check_kind
from nanovllm_cli.models.names import projections
from nanovllm_cli.state_spec import ScanSpec

MAX_STATE = 1024
"""Numbers of a channel's state; those that are published have 16."""
NormKind = Literal["none", "plain", "gains"]
_PARTS = ("in", "x", "dt", "out")
_NORMS = ("dt", "b", "c")

SCAN_GGUF_NAMES = {
    **{f"blocks.{{i}}.scan_{part}.weight": f"blk.{{i}}.ssm_{part}.weight" for part in _PARTS},
    "blocks.{i}.scan.taps": "blk.{i}.ssm_conv1d.weight",
    "blocks.{i}.scan.taps_bias": "blk.{i}.ssm_conv1d.bias",
    "blocks.{i}.scan.decay": "blk.{i}.ssm_a",
    "blocks.{i}.scan.rate_bias": "blk.{i}.ssm_dt.bias",
    "blocks.{i}.scan.skip": "blk.{i}.ssm_d",
    **{f"blocks.{{i}}.scan.{part}_norm.weight": f"blk.{{i}}.ssm_{part}_norm.weight" for part in _NORMS},
}


def scan_hf_names(place: str) -> dict[str, str]:
    """Of a folder where a layer's are at `place`."""
    return {
        **projections("blocks.{i}.scan_", f"{place}.", _PARTS),
        "blocks.{i}.scan.taps": f"{place}.conv1d.weight",
        "blocks.{i}.scan.taps_bias": f"{place}.conv1d.bias",
        "blocks.{i}.scan.decay": f"{place}.A_log",
        "blocks.{i}.scan.rate_bias": f"{place}.dt_proj.bias",
        "blocks.{i}.scan.skip": f"{place}.D",
        **{f"blocks.{{i}}.scan.{part}_norm.weight": f"{place}.{part}_layernorm.weight" for part in _NORMS},
    }


def scan_from_hf(read: ConfigReader, hidden: int, norms: NormKind, **keys: str) -> ScanSpec:
    """keys: what a family's configs call expand, size, rank, width, conv_bias and bias. A rank of "auto": width / 16."""
    if read.flag(keys["bias"], False):
        raise UnsupportedError(f"a Mamba with biases of its projections ({keys['bias']})", ANOTHER)
    check_kind(read)
    rank = -(-hidden // 16) if read.values.get(keys["rank"], "auto") == "auto" else read.integer(keys["rank"])
    return _checked(
        ScanSpec(
            read.integer(keys["expand"]) * hidden, read.integer(keys["size"]), rank, read.integer(keys["width"]),
            read.flag(keys["conv_bias"], True), norms,
        ),
        read,
    )  # fmt: skip


def scan_from_gguf(read: ConfigReader, key: Callable[[str], str], norms: NormKind) -> ScanSpec:
    """By metadata, which has nothing for a convolution without a bias."""
    channels, size = read.integer(key("ssm.inner_size")), read.integer(key("ssm.state_size"))
    rank, width = read.integer(key("ssm.time_step_rank")), read.integer(key("ssm.conv_kernel"))
    return replace(_checked(ScanSpec(channels, size, rank, width, norms=norms), read), log_decay=False)


def _checked(scan: ScanSpec, read: ConfigReader) -> ScanSpec:
    """Itself. CheckpointError for sizes that nobody means."""
    if not 2 <= scan.width <= MAX_TAPS or not 2 <= scan.key_dim <= MAX_STATE or scan.rank > scan.channels:
        what = f"{scan.channels} channels, states of {scan.key_dim}, steps of {scan.rank} numbers and {scan.width} taps"
        raise CheckpointError(f"{read.where}: a state space can't have {what}", BROKEN)
    return scan


def scan_gguf_keys(scan: ScanSpec) -> dict[str, GGUFField]:
    """What files say of it, by keys without the architecture."""
    return {
        "ssm.conv_kernel": scan.width, "ssm.state_size": scan.key_dim, "ssm.inner_size": scan.channels,
        "ssm.time_step_rank": scan.rank,
    }  # fmt: skip
