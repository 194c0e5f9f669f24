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
from gguf.constants import GGUFValueType, PoolingType
from gguf.gguf_writer import GGUFValue
from gguf.metadata import Metadata
from gguf.utility import size_label

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.deepseek4 import window_rope
from nanovllm_cli.models.experts import gguf_fields
from nanovllm_cli.models.families import spec_from_gguf, text_config
from nanovllm_cli.models.family import Family, GGUFField
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.state_spec import ScanSpec
from nanovllm_cli.text.gguf_export import gguf_vocabulary
from nanovllm_cli.weights.checkpoint import SAMPLING_KEYS, SUPPRESSED_KEY, Checkpoint
from nanovllm_cli.weights.convert_names import activation_of, attention_of, differences
from nanovllm_cli.weights.convert_rope import (
    SayableRope,
    divisor_tensors,
    sayable_in_gguf,
    unusual_yarn,
    yarn_of_one_share,
)
from nanovllm_cli.weights.files import some
from nanovllm_cli.weights.further import as_gguf, gguf_sayable, read_further
from nanovllm_cli.weights.gguf_writer import Header, HeaderBuilder
from nanovllm_cli.weights.heads import gguf_head
from nanovllm_cli.weights.pooling import GGUF_POOLINGS, Embedding, embedding_of, use_of
from nanovllm_cli.weights.reading import gguf_reading
from nanovllm_cli.weights.tokenizer import declared_ends

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
    "top_k_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts", "routed_scaling_factor",
    "first_k_dense_replace", "n_group", "topk_group", "use_qk_norm", "moe_num_experts", "moe_k", "moe_num_shared_experts",
    "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "num_dense_layers", "use_expert_bias",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "rope_interleave",
    "topk_method", "scoring_func", "moe_layer_freq", "mlp_layer_types", "index_n_heads", "index_head_dim", "index_topk",
    "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "indexer_rope_interleave",
    "block_configs", "num_key_value_heads_per_layer",
    "shared_intermediate_size", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "position_embedding_type", "swiglu_limit", "swiglu_alpha",
    "conv_L_cache", "norm_eps", "qkv_bias", "moe_norm_min", "block_ff_dim", "block_auto_adjust_ff_dim", "block_multiple_of",
    "block_ffn_dim_multiplier", "time_step_limit", "layer_norm_eps", "logit_scale",
    "rotary_dim", "qk_norm_type", "use_routing_bias", "attn_type_list", "clip_qkv", "num_shared_experts", "route_norm",
    "route_scale", "score_func", "mup_enabled", "global_attn_every_n_layers",
    "layer_rope_theta", "moe_topk", "num_shared_expert", "moe_layer_num_skipped", "use_mixed_mlp_moe", "use_cla",
    "cla_share_factor", "use_mla", "group_limited_greedy", "position_embedding_xdrope", "attention_head_dim", "norm_type",
    "use_rotary_pos_emb", "qk_norm", "post_norm", "use_qkv_bias", "score_function", "norm_head", "use_rmsnorm",
    "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "compress_rates", "compress_ratios", "o_groups",
    "hybrid_override_pattern", "layers_block_type", "mamba_num_heads", "mamba_head_dim", "mamba_hidden_act", "n_groups",
    "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias", "expand", "mlp_hidden_act", "layer_norm_epsilon",
    "moe_latent_size", "mtp_num_hidden_layers", "num_nextn_predict_layers",
    "type_vocab_size", "local_attention", "global_rope_theta", "local_rope_theta", "norm_bias", "dim", "n_layers", "n_heads",
    "hidden_dim", "activation", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "rotary_emb_base", "rotary_emb_fraction",
    "activation_function", "prenorm", "use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved",
    "rotary_scaling_factor", "rotary_emb_scale_base", "is_decoder", "cls_token_id", "sep_token_id", "mask_token_id",
    "classifier_pooling", "classifier_activation", "activation_sparsity_pattern", "altup_active_idx", "altup_correct_scale",
    "altup_num_inputs", "laurel_rank", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias",
    "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier", "attention_in_multiplier",
    "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "norm_epsilon", "rotary_pct", "use_parallel_residual",
    "qk_layernorm", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "n_ctx", "multi_query",
    "linear_attn_config", "linear_head_dim", "linear_num_heads", "model_max_length", "moe_renormalize",
    "num_expert_group", "num_experts_per_token", "moe_router_activation_func", "mla_use_nope",
    "use_grouped_topk", "bias", "num_layers", "scale_emb", "scale_depth", "dim_model_base", "lm_head_bias",
    "num_heads", "state_size", "time_step_rank", "mixer_rms_eps", "mamba_dt_rank", "attn_layer_period", "attn_layer_offset",
    "expert_layer_period", "expert_layer_offset", "compress_rate_csa", "compress_rate_hca", "num_hash_layers", "o_lora_rank",
    "router_scaling_factor", "moe_router_use_sigmoid", "gate_attn_act_mode", "headwise_attn_output_gate", "intermediate_size_mlp",
    "nope_on_global_attention", "moe_ffn_hidden_size", "moe_num_primary_experts", "moe_num_active_primary_experts",
    "moe_primary_router_apply_softmax", "moe_enable_early_router", "moe_enable_secondary_experts", "moe_layer_layout",
    "sliding_window_layout", "sliding_window_size", "rope_layout", "moe_shared_primary_experts",
    "shared_expert_combination_strategy", "expert_selection_fn", "prefix_dense_sliding_window_pattern",
    "H_cycles", "L_cycles", "num_layers_per_stack", "embedding_scale", "kda_lower_bound", "kda_safe_gate", "layer_group_size",
    "short_conv_kernel_size", "no_kda_lora", "gated_attention_proj_granularity_type", "expert_swiglu_limit_list",
    "share_expert_swiglu_limit_list", "hc_mult", "hc_eps", "hc_magnitude", "num_loops", "skip_loop_final_norm",
    "embedding_dim", "compress_rope_theta", "hc_sinkhorn_iters",
    "a_low_rank_dim", "v_low_rank_dim", "decay_low_rank_dim", "gate_low_rank_dim", "norm_first", "value_dim", "hidden_ratio",
    "prefix_dense_intermediate_size", "output_vocab_size", "qk_scale_factor", "output_multiplier", "post_norm_eps",
}  # fmt: skip
_ONLY = "llama.cpp reads them of gemma-embedding alone"
_SEES = ("hy_v3", "jamba")
"""Architectures of which llama.cpp sees by a layer's tensors whether it has experts."""
# Of training, or of the library that wrote them: nothing that runs a model reads them.
_OF_NO_USE = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "_name_or_path",
    "resid_pdrop", "embd_pdrop", "cache_implementation", "chunk_size", "time_step_floor", "hidden_dropout", "num_logits_to_keep",
    "router_dtype", "output_dropout", "L_bp_cycles",
    "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels", "mamba_ssm_cache_dtype", "mtp_layers_block_type",
    "moe_shared_expert_overlap", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "mamba_chunk_size",
    "time_step_min", "time_step_max", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout",
    "gradient_checkpointing", "embedding_dropout", "mlp_dropout", "dropout", "qa_dropout", "seq_classif_dropout",
    "sinusoidal_pos_embds", "decoder_bias", "initializer_cutoff_factor", "sparse_pred_ignore_index", "sparse_prediction",
    # Of parts that SmallThinker's configs describe and its models do not have.
    "model_name", "dense_ffn_hidden_size", "moe_num_secondary_experts", "moe_secondary_expert_size",
    "max_trained_positions", "pretraining_tp", "is_causal", "_attn_implementation", "_from_model_config", "do_sample", "auto_map",
    "altup_coef_clip", "input_jitter_noise", "enable_moe_fp32_combine", "use_mambapy", "use_associative_scan",
    "time_step_init_scheme", "time_step_scale", "mamba_inner_layernorms", "calc_logits_for_entire_prompt", "d_model", "d_inner",
    "fused_add_norm", "fuse_norm", "fuse_cross_entropy", "use_l2warp", "attn_mode", "rms_norm", "pad_vocab_size_multiple",
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
    file_type: int,
    predicts_further: bool = False,
) -> GGUFHeader:
    """`name`: of the model, `org/name` or a folder's; `names`: what the file's tensors will be called; `predicts_further`:
    whether a layer for that is among them, behind the model's own.

    Raises UnsupportedError for what GGUF cannot say of this family.
    """
    _check_places(family, names)
    builder = HeaderBuilder(family.gguf_name or family.name)
    own = family.config(text_config(checkpoint.config))
    config = {**family.defaults, **own}
    learned = spec.reads_both_ways or spec.entry is not None
    context_length = spec.max_position if learned else config.get("max_position_embeddings", 2048)
    keys = _keys(spec, family, own) | gguf_reading(checkpoint, spec)
    if predicts_further:
        keys |= {"nextn_predict_layers": 1}
        if isinstance(flags := keys.get("attention.recurrent_layers"), list):
            keys["attention.recurrent_layers"] = [*map(bool, flags), False]
    sayable = _sayable_rope(spec, family, keys, context_length)
    of_scores = "rope.scaling.yarn_log_multiplier" in keys and attention_of(spec).latent is not None  # angles don't grow then
    said = replace(sayable.spec, attention_factor=None) if of_scores else sayable.spec
    tensors = divisor_tensors(sayable.spec) | {name: torch.tensor(row) for name, row in family.gguf_tables(spec).items()}
    notes = [*sayable.notes, *_unused_keys(checkpoint)]
    builder.add_type("model")
    notes += _add_card(builder, checkpoint, folder, name, spec)
    _add_sampling(builder, checkpoint.generation_config)
    notes += [f"{key}, which is not what it should be" for key in builder.dropped()]
    _add_model(builder, spec, family, keys, context_length)
    notes += _add_pooling(builder, embedding := use_of(embedding_of(checkpoint), spec))
    tensors |= _add_dense(builder, checkpoint, embedding, family)
    if spec.entry is not None and spec.entry.segments:
        builder.add_token_type_count(spec.entry.segments)
    if spec.attentions and (spec.entry is None or not spec.entry.positions):
        _add_rope(builder, said, context_length)
    builder.add_file_type(file_type)
    builder.add_quantization_version(QUANTIZATION_VERSION)
    end_ids = declared_ends(checkpoint.generation_config, spec.vocab_size)
    vocabulary = gguf_vocabulary(folder, spec.vocab_size, end_ids, config)
    header = builder.header() | {key: _typed(value) for key, value in vocabulary.fields.items()}
    _check(header, spec, family, names | tensors.keys(), tensors, sayable.spec)
    windows = ["sliding_window"] if family.full_every is None and _windows(spec) and attention_of(spec).shared is None else []
    unread = [*windows, *(f"rope {name}" for name in unusual_yarn(said))]
    is_said = "leading_dense_block_count" in keys or builder.arch in _SEES
    if spec.mixture is not None and spec.dense_mlp is not None and not is_said:
        unread.append("layers without experts")
    unread += ["hidden_activation"] if "hidden_activation" in keys else []  # for which llama.cpp has a SiLU there
    if unread:
        notes.append(f"{', '.join(unread)}: written, but llama.cpp does not read it for this architecture")
    if spec.mixture is not None and spec.mixture.nearness is not None:
        notes.append("norms and weights of experts: llama.cpp computes others for this architecture")
    if any(isinstance(mixer, ScanSpec) and mixer.eps not in (None, spec.norm.eps) for mixer in spec.mixers):
        notes.append("the eps of norms inside of state spaces: llama.cpp has that of the other norms there")
    return GGUFHeader(header, tensors, notes + vocabulary.notes)


def _windows(spec: ModelSpec) -> set[int]:
    """As files have them: on both sides together, where tokens see those behind them."""
    given = {(attention.window, attention.both_ways) for attention in spec.attentions if attention.window is not None}
    return {2 * (window - 1) if both_ways else window for window, both_ways in given}


def _keys(spec: ModelSpec, family: Family, config: Mapping[str, Any]) -> dict[str, GGUFField]:
    """What is said of heads, MLPs and experts, and what only some families say, by keys without the architecture."""
    assert family.gguf_keys is not None
    if not spec.attentions:
        return dict(family.gguf_keys(spec))
    keys: dict[str, GGUFField] = {"attention.head_count_kv": attention_of(spec).num_kv_heads}
    size = config.get("intermediate_size") if spec.dense_mlp is None else spec.dense_mlp.intermediate_size
    if type(size) is int and size > 0:  # llama.cpp's converter has it also where no layer reads it
        keys["feed_forward_length"] = size
    return {**keys, **gguf_fields(spec, family.experts), **family.gguf_keys(spec)}


def _sayable_rope(spec: ModelSpec, family: Family, keys: Mapping[str, GGUFField], context_length: int) -> SayableRope:
    if not spec.attentions:
        return SayableRope(RopeSpec(0), [])
    attention = attention_of(spec)
    if attention.shared is not None:  # what stretches positions of other layers is among the keys
        return SayableRope(window_rope(spec), [])
    if attention.rope is not None:
        rope = replace(attention.rope, interleaved=family.interleaved_gguf)
        is_latent = attention.latent is not None
        rope, notes = yarn_of_one_share(rope, family.gguf_name or family.name) if is_latent else (rope, [])
        says_shares = not is_latent and "rope.scaling.yarn_log_multiplier" in keys
        plain = replace(rope, mscale=0.0, mscale_all_dim=0.0) if says_shares else rope
        found = sayable_in_gguf(plain, context_length, notes, truncate=family.gguf_truncates)
        if says_shares:
            found = found._replace(spec=replace(found.spec, mscale=rope.mscale, mscale_all_dim=rope.mscale_all_dim))
        has_sections = "rope.dimension_sections" in keys
        return found._replace(spec=replace(found.spec, sections=rope.sections, woven=rope.woven)) if has_sections else found
    has_others = (spec.entry is not None and spec.entry.positions) or spec.distances is not None
    if attention.latent is not None:  # which llama.cpp does not rotate in the one architecture that has none
        return SayableRope(RopeSpec(attention.latent.rotary_dim), [])
    if keys.get("rope.scaling.finetuned", True) and not has_others:
        raise UnsupportedError(f"GGUF cannot say this of a {family.name} model: no positions", "keep the model as a folder")
    return SayableRope(RopeSpec(attention.head_dim), [])


def _add_model(
    builder: HeaderBuilder, spec: ModelSpec, family: Family, keys: Mapping[str, GGUFField], context_length: int
) -> None:
    activation = activation_of(spec)
    if activation not in ("silu", family.gguf_activation):
        what = f"the activation {activation} has no place in GGUF, which knows silu only here"
        raise UnsupportedError(what, "keep the model as a Hugging Face folder")
    builder.add_vocab_size(spec.vocab_size)
    further = keys.get("nextn_predict_layers", 0)
    assert isinstance(further, int)
    if "block_count" not in keys:
        builder.add_block_count(spec.num_layers + further)
    builder.add_context_length(context_length)
    builder.add_embedding_length(spec.hidden_size)
    if spec.attentions:
        _add_heads(builder, attention_of(spec), says_lengths="attention.key_length" not in keys)
    (builder.add_layer_norm_eps if spec.norm.centered else builder.add_layer_norm_rms_eps)(spec.norm.eps)
    for window in _windows(spec):
        builder.add_sliding_window(window)
    if spec.reads_both_ways:
        builder.add_causal_attention(False)
    add = {float: builder.add_float32, int: builder.add_uint32, bool: builder.add_bool, list: builder.add_array,
           str: builder.add_string}  # fmt: skip
    for key, value in keys.items():
        add[type(value)](key[1:] if key.startswith(".") else f"{builder.arch}.{key}", value)


def _add_heads(builder: HeaderBuilder, attention: AttentionSpec, *, says_lengths: bool) -> None:
    builder.add_head_count(attention.num_heads)
    if says_lengths:
        builder.add_key_length(attention.head_dim)
        builder.add_value_length(attention.head_dim if attention.latent is None else attention.latent.rank)


def _add_pooling(builder: HeaderBuilder, embedding: Embedding) -> list[str]:
    """How it makes vectors of texts. Prompts have no place, a line for them."""
    if embedding.refusal is not None:
        return [f"how it makes vectors of texts: {embedding.refusal.message}"]
    if embedding.pooling is not None:
        builder.add_pooling_type(GGUF_POOLINGS[embedding.pooling_of_texts])
    prompts = sorted(name for name, text in embedding.prompts.items() if text)
    notes = [f"prompts of texts to be embedded: {some(prompts)}"] if prompts else []
    unread = embedding.layers and not builder.arch.startswith("gemma-embedding")
    return [*notes, f"dense layers: written, but {_ONLY}"] if unread else notes


def _add_dense(
    builder: HeaderBuilder, checkpoint: Checkpoint, embedding: Embedding, family: Family
) -> dict[str, torch.Tensor]:
    """What vectors pass through behind the pooling. UnsupportedError for what has no place: most of it."""
    further = read_further(checkpoint, embedding.layers)
    if (matrix := family.vector_names.get("gguf")) is not None and len(embedding.layers) == 1:
        assert further is not None
        weight = further.layers[0].weight
        builder.add_uint32(f"{builder.arch}.embedding_length_out", len(weight))
        return {matrix: weight}
    if embedding.judges:
        assert further is not None
        builder.add_pooling_type(PoolingType.RANK)
        if not embedding.ranks:
            builder.add_array(f"{builder.arch}.classifier.output_labels", list(embedding.labels))
        return gguf_head(checkpoint, further.layers, builder.arch)
    if not gguf_sayable(embedding.layers) or matrix is not None:
        raise UnsupportedError(f"{checkpoint.path}: GGUF has no place for its dense layers", "keep the model as a folder")
    tensors, sizes = ({}, {}) if further is None else as_gguf(further)
    for key, size in sizes.items():
        builder.add_uint32(f"{builder.arch}.{key}", size)
    return tensors


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


def _add_card(builder: HeaderBuilder, checkpoint: Checkpoint, folder: Path, name: str, spec: ModelSpec) -> list[str]:
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
    metadata.size_label = metadata.size_label or _size_label(parameters, spec)
    try:
        metadata.set_gguf_meta_model(builder)
    except Exception as error:
        notes.append(f"the rest of the model card: {_first_line(error)}"[:200])
    return notes


def _size_label(parameters: int, spec: ModelSpec) -> str:
    """ "7B", or by what an expert has of the model, "8x7B"."""
    mixtures = [block.mlp for block in spec.blocks if isinstance(block.mlp, MoESpec)]
    if not mixtures:
        return str(size_label(parameters, parameters, 0, 0))
    expert = sum(mixture.expert.num_weights(mixture.width(spec.hidden_size)) for mixture in mixtures)
    count = mixtures[0].num_experts
    return str(size_label(parameters, parameters - count * expert, expert, count))


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
    """A tokenizer key with the type that llama.cpp reads: ids are uint32, token types int32, scores float32, rules uint8."""
    if isinstance(value, bytes):
        return GGUFValue(list(value), GGUFValueType.ARRAY, GGUFValueType.UINT8)
    if isinstance(value, list):
        items = {str: GGUFValueType.STRING, int: GGUFValueType.INT32, float: GGUFValueType.FLOAT32}
        return GGUFValue(value, GGUFValueType.ARRAY, items[type(value[0])])
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, str: GGUFValueType.STRING}
    return GGUFValue(value, kinds[type(value)])


def _check_places(family: Family, names: set[str]) -> None:
    """Refuses what would make a file that llama.cpp doesn't open."""
    if homeless := sorted(name for name in names if name.endswith(family.gguf_homeless)):
        raise UnsupportedError(
            f"GGUF cannot say this of a {family.name} model: {some(homeless)}", "keep the model as a Hugging Face folder"
        )


def _check(
    header: Header, spec: ModelSpec, family: Family, names: set[str], tensors: dict[str, torch.Tensor], rope: Any
) -> None:
    """Reads the header as it will be read, and refuses where that is another model."""
    metadata = {key: field.value for key, field in header.items()}

    def values(name: str) -> tuple[float, ...] | None:
        return tuple(tensors[name].flatten().tolist()) if name in tensors else None

    found = spec_from_gguf(metadata, family, spec.vocab_size, names, values)
    usual = attention_of(spec).rope if spec.attentions else None
    norm = replace(spec.norm, stored_offset=spec.norm.offset)
    told = replace(spec, norm=norm)
    if (entry := spec.entry) is not None:
        told = replace(told, entry=replace(entry, positions=max(0, entry.positions - entry.first_position), first_position=0))
    if usual is not None and attention_of(spec).shared is None:
        told = told.each_attention(lambda layer, a: replace(a, rope=rope) if a.rope == usual else a)
    lost = differences(told, found)
    if lost:
        raise UnsupportedError(
            f"GGUF cannot say this of a {family.name} model: {', '.join(lost)}",
            "keep the model as a Hugging Face folder",
        )
