"""StableLM 2 and what Stability made before it: Llama with layer norms and a part of each head rotated; attention and MLP side by
side in some."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, usual_keys


def _stablelm(spec: ModelSpec, read: ConfigReader, has_norms: bool) -> ModelSpec:
    if has_norms:  # as the one of 12B does, with gains of each head's own
        raise UnsupportedError(f"{read.where}: layer norms of heads of q and k", ANOTHER)
    return spec


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = spec.with_attention(qkv_bias=read.flag("use_qkv_bias", False))
    spec = spec.in_order("parallel" if read.flag("use_parallel_residual", False) else "pre")
    return _stablelm(spec, read, read.flag("qk_layernorm", False))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _stablelm(spec, read, spec.attention.qk_norm)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, head_of_its_own=not spec.tied_head)
    return {"use_parallel_residual": spec.blocks[0].order == "parallel"}


_KEYS = {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"}
"""Of StableLM Epoch, the first ones' name."""
STABLELM = Family(
    "stablelm",
    config=lambda config: {**config, **usual_keys(config, _KEYS)},
    layer_norm=True,
    shifted=True,
    qkv_bias=False,
    gguf_parallel=True,
    defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)
