"""OLMo 2 and 3: norms of what attention and MLP add, none of what they read, and norms of all heads of q, and of k, together.
Most layers of an OLMo 3 have a window, and positions as they are, whatever those of the others are stretched by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import AttentionSpec, ModelSpec, RopeSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.families import FULL
from nanovllm_cli.models.family import Family, GGUFField
from nanovllm_cli.models.names import POST_HF_NAMES, SANDWICH_GGUF_NAMES


def _olmo(spec: ModelSpec) -> ModelSpec:
    return spec.in_order("post").with_attention(qk_norm_of="all heads")


def _with_local(spec: ModelSpec, change: Callable[[RopeSpec], RopeSpec]) -> ModelSpec:
    """The same with positions of layers with a window as `change` makes them of what they are."""
    whole = next((attention.rope for attention in spec.attentions if attention.window is None), None)

    def local(layer: int, attention: AttentionSpec) -> AttentionSpec:
        if attention.window is None or attention.rope is None:
            return attention
        rope = change(attention.rope)
        length = rope.original_len if whole is None or rope.scaling != "none" else whole.original_len  # of no meaning there
        return replace(attention, rope=replace(rope, original_len=length))

    return spec.each_attention(local)


def _plain(rope: RopeSpec) -> RopeSpec:
    return RopeSpec(rope.dim, rope.theta, rope.interleaved, original_len=rope.original_len)


def _third_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """ "rope_scaling" is of layers without a window alone; "rope_parameters" has a section for each kind."""
    if not isinstance(sections := read.values.get("rope_parameters"), Mapping):
        return _with_local(_olmo(spec), _plain)
    if FULL not in sections:
        raise CheckpointError(f"{read.where}: 'rope_parameters' says nothing of {FULL}", BROKEN)
    return _with_local(_olmo(spec), lambda rope: rope)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Both: a file with a window is of an OLMo 3."""
    theta = key("rope.freq_base_swa")
    return _with_local(_olmo(spec), lambda rope: replace(_plain(rope), theta=read.number(theta, rope.theta)))


def _third_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    local = [a.rope.theta for a in spec.attentions if a.window is not None and a.rope is not None]
    return {"rope.freq_base_swa": local[0], **window_pattern(spec)} if local else {}


OLMO2 = Family(
    "olmo2",
    qk_norm=True,
    full_every=4,
    defaults={"rms_norm_eps": 1e-5},
    hf_names=POST_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=lambda spec, read: _olmo(spec),
    gguf=_from_gguf,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    gguf_name="olmo2",
    has_window=True,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    hf=_third_from_hf,
    gguf_keys=_third_keys,
)
