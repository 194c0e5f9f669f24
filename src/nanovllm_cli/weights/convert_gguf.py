"""The header of a GGUF file for a Hugging Face model: keys as llama.cpp's converter writes them (gguf-py, docs/gguf.md).

What a model's files say and GGUF has no place for is named in `notes`. What would make another model of it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import RopeScalingType
from gguf.constants import GGUFValueType, LlamaFileType
from gguf.gguf_writer import GGUFValue
from gguf.metadata import Metadata
from gguf.utility import size_label

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec, RopeSpec
from nanovllm_cli.models.families import spec_from_gguf, text_config
from nanovllm_cli.models.family import Family
from nanovllm_cli.text.gguf_export import gguf_vocabulary
from nanovllm_cli.weights.checkpoint import SAMPLING_KEYS, SUPPRESSED_KEY, Checkpoint
from nanovllm_cli.weights.convert_names import attention_of, dense_mlp_of, differences
from nanovllm_cli.weights.convert_rope import divisor_tensors, sayable_in_gguf, unusual_yarn
from nanovllm_cli.weights.gguf_writer import Header, HeaderBuilder

MAX_CARD_BYTES = 1 << 20
QUANTIZATION_VERSION = 2  # of the block types' layout

_CARRIED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "vocab_size", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "original_max_position_embeddings", "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers",
    "no_rope_layer_interval", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
    "full_attention_interval", "attn_output_gate", "linear_conv_kernel_dim", "linear_num_key_heads", "linear_key_head_dim",
    "linear_num_value_heads", "linear_value_head_dim", "global_head_dim", "num_global_key_value_heads", "per_layer_config",
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp",
    "attention_k_eq_v", "use_bidirectional_attention", "enable_moe_block", "moe_intermediate_size", "num_experts",
    "top_k_experts",
}  # fmt: skip
# Of training, or of the library that wrote them: nothing that runs a model reads them.
_OF_NO_USE = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "_name_or_path",
    "resid_pdrop", "embd_pdrop", "cache_implementation",
    "pretraining_tp", "_attn_implementation", "_from_model_config", "do_sample", "auto_map",
}  # fmt: skip


class GGUFHeader(NamedTuple):
    """`tensors`: those that the header asks for and the model does not have (rope divisors), float32."""

    header: Header
    tensors: dict[str, torch.Tensor]
    notes: list[str]


def gguf_header(
    checkpoint: Checkpoint,
    folder: Path,
    name: str,
    spec: ModelSpec,
    family: Family,
    names: set[str],
    file_type: LlamaFileType,
) -> GGUFHeader:
    """`name`: of the model, `org/name` or a folder's; `names`: what the file's tensors will be called.

    Raises UnsupportedError for what GGUF cannot say of this family.
    """
    builder = HeaderBuilder(family.gguf_name or family.name)
    config = {**family.defaults, **text_config(checkpoint.config)}
    context_length = config.get("max_position_embeddings", 2048)
    rope = attention_of(spec).rope
    if rope is None:
        raise UnsupportedError(f"GGUF cannot say this of a {family.name} model: no positions", "keep the model as a folder")
    sayable = sayable_in_gguf(replace(rope, interleaved=family.interleaved_gguf), context_length)
    tensors = divisor_tensors(sayable.spec)
    notes = [*sayable.notes, *_unused_keys(checkpoint)]
    builder.add_type("model")
    notes += _add_card(builder, checkpoint, folder, name)
    _add_sampling(builder, checkpoint.generation_config)
    notes += [f"{key}, which is not what it should be" for key in builder.dropped()]
    _add_model(builder, spec, family, context_length)
    _add_rope(builder, sayable.spec, context_length)
    builder.add_file_type(file_type)
    builder.add_quantization_version(QUANTIZATION_VERSION)
    end_ids = _end_ids(checkpoint.generation_config, spec.vocab_size)
    vocabulary = gguf_vocabulary(folder, spec.vocab_size, end_ids, config)
    header = builder.header() | {key: _typed(value) for key, value in vocabulary.fields.items()}
    _check(header, spec, family, names | tensors.keys(), tensors, sayable.spec)
    unread = ["sliding_window"] if family.full_every is None and _windows(spec) else []
    unread += [f"rope {name}" for name in unusual_yarn(sayable.spec)]
    if unread:
        notes.append(f"{', '.join(unread)}: written, but llama.cpp does not read it for this architecture")
    return GGUFHeader(header, tensors, notes + vocabulary.notes)


def _windows(spec: ModelSpec) -> set[int]:
    return {attention.window for attention in spec.attentions if attention.window is not None}


def _add_model(builder: HeaderBuilder, spec: ModelSpec, family: Family, context_length: int) -> None:
    attention, mlp = attention_of(spec), dense_mlp_of(spec)
    if mlp.activation != "silu" and family.gguf_activation != mlp.activation:
        raise UnsupportedError(
            f"the activation {mlp.activation} has no place in GGUF, which knows silu only here",
            "keep the model as a Hugging Face folder",
        )
    builder.add_vocab_size(spec.vocab_size)
    builder.add_block_count(spec.num_layers)
    builder.add_context_length(context_length)
    builder.add_embedding_length(spec.hidden_size)
    builder.add_head_count(attention.num_heads)
    builder.add_key_length(attention.head_dim)
    builder.add_value_length(attention.head_dim)
    builder.add_layer_norm_rms_eps(spec.norm.eps)
    for window in _windows(spec):
        builder.add_sliding_window(window)
    assert family.gguf_keys is not None
    keys = family.gguf_keys(spec)
    usual = {"attention.head_count_kv": attention.num_kv_heads, "feed_forward_length": mlp.intermediate_size}
    add = {float: builder.add_float32, int: builder.add_uint32, list: builder.add_array}
    for key, value in {**usual, **keys}.items():
        add[type(value)](f"{builder.arch}.{key}", value)


def _add_rope(builder: HeaderBuilder, rope: RopeSpec, context_length: int) -> None:
    builder.add_rope_dimension_count(rope.dim)
    builder.add_rope_freq_base(rope.theta)
    kinds = {"linear": RopeScalingType.LINEAR, "yarn": RopeScalingType.YARN, "longrope": RopeScalingType.LONGROPE}
    if rope.scaling not in kinds:
        return
    builder.add_rope_scaling_type(kinds[rope.scaling])
    if rope.scaling == "longrope":
        builder.add_rope_scaling_attn_factors(rope.attention_factor)
    else:
        builder.add_rope_scaling_factor(rope.factor)
    if rope.scaling == "yarn":
        _add_yarn(builder, rope)
    if rope.scaling != "linear" or rope.original_len != context_length:
        builder.add_rope_scaling_orig_ctx_len(rope.original_len)


def _add_yarn(builder: HeaderBuilder, rope: RopeSpec) -> None:
    add = {
        "beta_fast": builder.add_rope_scaling_yarn_beta_fast, "beta_slow": builder.add_rope_scaling_yarn_beta_slow,
        "attention_factor": builder.add_rope_scaling_yarn_attn_factor,
    }  # fmt: skip
    for name, value in unusual_yarn(rope).items():
        add[name](value)


def _add_card(builder: HeaderBuilder, checkpoint: Checkpoint, folder: Path, name: str) -> list[str]:
    """Name, licence, tags and the like, from the model card and the model's name, by the package's own rules."""
    parameters = sum(torch.Size(checkpoint.info(tensor).shape).numel() for tensor in checkpoint.names())
    card_path = folder / "README.md"
    notes = []
    card: dict[str, Any] = {}
    try:
        if card_path.is_file() and card_path.stat().st_size <= MAX_CARD_BYTES:
            card = Metadata.load_model_card(folder)
        metadata = Metadata.apply_metadata_heuristic(Metadata(), card, dict(checkpoint.config), Path(name), parameters)
    except Exception as error:  # the package trusts what it reads; a card that breaks it is left out
        notes.append(f"the model card: {_first_line(error)}"[:200])
        metadata = Metadata()
    metadata.name = metadata.name or Metadata.id_to_title(Path(name).name) or "model"
    metadata.size_label = metadata.size_label or size_label(parameters, parameters, 0, 0)
    try:
        metadata.set_gguf_meta_model(builder)
    except Exception as error:
        notes.append(f"the rest of the model card: {_first_line(error)}"[:200])
    return notes


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _add_sampling(builder: HeaderBuilder, generation_config: Mapping[str, Any]) -> None:
    add = {
        "temp": builder.add_sampling_temp, "top_k": builder.add_sampling_top_k, "top_p": builder.add_sampling_top_p,
        "min_p": builder.add_sampling_min_p, "penalty_repeat": builder.add_sampling_penalty_repeat,
    }  # fmt: skip
    for key, name in SAMPLING_KEYS.items():
        if generation_config.get(name) is not None:
            add[key](generation_config[name])
    if suppressed := generation_config.get("suppress_tokens"):
        builder.add_array(SUPPRESSED_KEY, suppressed if isinstance(suppressed, list) else [suppressed])
    if generation_config.get("do_sample") is False:
        builder.add_sampling_temp(0.0)


def _end_ids(generation_config: Mapping[str, Any], vocab_size: int) -> list[int]:
    declared = generation_config.get("eos_token_id")
    listed = declared if isinstance(declared, list) else [declared]
    return [i for i in listed if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size]


def _unused_keys(checkpoint: Checkpoint) -> list[str]:
    ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    files = {
        "config.json": (text_config(checkpoint.config), _CARRIED),
        "generation_config.json": (checkpoint.generation_config, ids | set(SAMPLING_KEYS.values()) | {"suppress_tokens"}),
    }
    return [
        f"{file}: {', '.join(unknown)}"[:500]
        for file, (values, known) in files.items()
        if (
            unknown := sorted(
                k for k, v in values.items() if k not in known | _OF_NO_USE and v not in (None, False, [], {})
            )
        )
    ]


def _typed(value: Any) -> GGUFValue:
    """A tokenizer key with the type that llama.cpp reads: ids are uint32, token types int32, scores float32."""
    if isinstance(value, list):
        items = {str: GGUFValueType.STRING, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}
        return GGUFValue(value, GGUFValueType.ARRAY, items[type(value[0])])
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, str: GGUFValueType.STRING}
    return GGUFValue(value, kinds[type(value)])


def _check(
    header: Header, spec: ModelSpec, family: Family, names: set[str], tensors: dict[str, torch.Tensor], rope: Any
) -> None:
    """Reads the header as it will be read, and refuses where that is another model."""
    metadata = {key: field.value for key, field in header.items()}

    def values(name: str) -> tuple[float, ...] | None:
        return tuple(tensors[name].tolist()) if name in tensors else None

    found = spec_from_gguf(metadata, family, spec.vocab_size, names, values)
    usual = attention_of(spec).rope
    norm = replace(spec.norm, stored_offset=spec.norm.offset)
    told = replace(spec, norm=norm).each_attention(lambda layer, a: replace(a, rope=rope) if a.rope == usual else a)
    lost = differences(told, found)
    if lost:
        raise UnsupportedError(
            f"GGUF cannot say this of a {family.name} model: {', '.join(lost)}",
            "keep the model as a Hugging Face folder",
        )
