"""PLaMo 2 and 3 (Preferred Networks), of which GGUF files alone are read: norms of heads, and of what attention and MLP read and
add. Some layers of PLaMo 2 have a state space in place of attention, in which channels of a head share a time step and a decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family
from nanovllm_cli.models.names import SANDWICH_GGUF_NAMES
from nanovllm_cli.models.scan import SCAN_GGUF_NAMES, scan_from_gguf

_LEAST_RANK, _WIDTH_PER_RANK = 64, 16
"""Of what time steps are made of, which no key says."""
_WITHOUT_ENDING = ("post_attention_norm", "post_ffw_norm", "ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
"""As llama.cpp's converter calls them."""


def _names(names: Mapping[str, str]) -> dict[str, str]:
    bare = {ours: theirs.removesuffix(".weight") for ours, theirs in names.items()}
    return {ours: bare[ours] if bare[ours].endswith(_WITHOUT_ENDING) else theirs for ours, theirs in names.items()}


def check_dims_in_windows(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> None:
    """UnsupportedError where another part of a head rotates in layers with a window."""
    for dim in {rope.dim for rope in spec.ropes}:
        if (local := read.integer(key("rope.dimension_count_swa"), dim)) != dim:
            what = f"{local} rotary dims in layers with a window, where others have {dim}"
            raise UnsupportedError(f"{read.where}: {what}", ANOTHER)


def _plamo2_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Heads of queries may be a list, too, with a 0 for layers that have a state space."""
    read = ConfigReader(metadata, "GGUF metadata").with_firsts("plamo2.attention.head_count")
    return read.values


def _plamo2_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.integer(key("ssm.group_count"), 0, least=0):
        raise UnsupportedError(f"{read.where}: a PLaMo 2 whose states are in groups", ANOTHER)
    found = scan_from_gguf(read, key, "gains")
    heads, rank = found.rank, max(_LEAST_RANK, spec.hidden_size // _WIDTH_PER_RANK)
    if found.channels % heads:
        raise CheckpointError(f"{read.where}: {heads} heads of a state space can't share {found.channels} channels", BROKEN)
    scan = replace(found, rank=rank, heads=heads, conv_bias=False)
    scans = read.zeros(key("attention.head_count_kv"), spec.num_layers)
    if all(scans):
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    return spec.with_mixers(scan if own else mixer for mixer, own in zip(spec.mixers, scans, strict=True))


def _plamo3_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    value_dim = read.integer(key("attention.value_length"), spec.attention.head_dim)
    if value_dim > spec.attention.head_dim:
        raise UnsupportedError(f"{read.where}: values of {value_dim} numbers, which are wider than keys", ANOTHER)
    check_dims_in_windows(spec, read, key)
    return spec.with_attention(value_dim=None if value_dim == spec.attention.head_dim else value_dim)


PLAMO2 = Family(
    "plamo2",
    order="sandwich",
    attention={"qk_norm": True, "qk_norm_of": "each head", "fused_qkv": True},
    fused_qkv=True,
    fused_mlp=True,
    convolutions=True,
    metadata=_plamo2_metadata,
    gguf_names=_names(SANDWICH_GGUF_NAMES | SCAN_GGUF_NAMES),
    gguf=_plamo2_from_gguf,
    gguf_keys=None,
)
PLAMO3 = Family(
    "plamo3",
    order="sandwich",
    qk_norm=True,
    has_window=True,
    full_every=8,
    local_theta=10000.0,
    narrow_values=True,
    fused_qkv=True,
    fused_mlp=True,
    gguf_names=_names(SANDWICH_GGUF_NAMES),
    gguf=_plamo3_from_gguf,
    gguf_keys=None,
)
