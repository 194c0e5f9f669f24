"""DeepSeek-V4: attention with one key for all heads over a window, and in most layers over digests of what lies further back, all
of them or those that an indexer chooses; residual streams that are mixed; experts that the first layers choose by a table of
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm_cli.digest_spec import DigestIndexerSpec, DigestSpec, SharedSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import MAX_DIM
from nanovllm_cli.models.experts import ExpertKeys, check_scoring, limited, limits_in_gguf
from nanovllm_cli.models.families import MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_none, weight_keys
from nanovllm_cli.models.hunyuan4 import MAX_STREAMS
from nanovllm_cli.models.names import BIAS_NAME, SHARED_NAMES
from nanovllm_cli.models.rotary import rope_from_hf
from nanovllm_cli.models.sparse import MOST_CHOSEN
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.streams_spec import ConnectionsSpec

CHOSEN, ALL = "compressed_sparse_attention", "heavily_compressed_attention"
BY_TABLE, BY_SCORE = "hash_moe", "moe"
_RATES = {CHOSEN: 4, ALL: 128}
_OF_RATIOS = {0: SLIDING, 4: CHOSEN, 128: ALL}
"""What "compress_ratios" says of a layer."""
_HASHED = 3
"""Layers that go by a table, where a config says nothing of it."""
MAX_RATE, MAX_WINDOW, MAX_ROUNDS, MAX_RANK = 1 << 14, 1 << 20, 1000, 1 << 16
_ROPES = "main", "compress"


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what transformers makes of it. "rope_parameters" are those of layers with digests, "window_rope" those of the others;
    lists of layers may speak of those that guess, too."""
    found = {**config, "intermediate_size": config.get("moe_intermediate_size", _DEFAULTS["moe_intermediate_size"])}
    layers = config.get("num_hidden_layers", _DEFAULTS["num_hidden_layers"])
    if type(layers) is int and 0 < layers <= MAX_LAYERS:
        found["layer_types"] = _kinds(config, layers)
        if config.get("mlp_layer_types") is None:
            first = config.get("num_hash_layers", _HASHED)
            first = first if type(first) is int else _HASHED
            found["mlp_layer_types"] = [BY_TABLE if i < first else BY_SCORE for i in range(layers)]
        for key in ("layer_types", "mlp_layer_types"):
            found[key] = found[key][:layers] if isinstance(found[key], list) else found[key]
    return found | _ropes(config)


def _kinds(config: Mapping[str, Any], layers: int) -> Any:
    ratios = config.get("compress_ratios")
    if config.get("layer_types") is not None:
        return config["layer_types"]
    if ratios is None:
        return [ALL if i < 2 or i % 2 == 0 else CHOSEN for i in range(layers)]
    if not isinstance(ratios, list) or len(ratios) < layers or not all(type(each) is int for each in ratios):
        raise CheckpointError(f"config.json: 'compress_ratios' must be a list of {layers} whole numbers", BROKEN)
    if unknown := [each for each in ratios[:layers] if each not in _OF_RATIOS]:
        raise UnsupportedError(f"config.json: a layer with one row for {unknown[0]} tokens", "known: 0, 4 and 128 tokens")
    return [_OF_RATIOS[each] for each in ratios[:layers]]


def _ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of both kinds. What stretches positions is of layers with digests alone, and their angles don't grow."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        raise CheckpointError("config.json: 'rope_parameters' must be an object", BROKEN)
    window, further = (said.get(name) for name in _ROPES)
    if isinstance(window, Mapping) and isinstance(further, Mapping):
        return {"rope_parameters": {**further}, "window_rope": {**window}, "rope_scaling": None}
    dim, whole = config.get("qk_rope_head_dim"), config.get("head_dim", _DEFAULTS["head_dim"])
    share = config.get("partial_rotary_factor")
    if share is None:
        is_said = type(dim) is int and type(whole) is int and whole > 0
        share = dim / whole if is_said else _DEFAULTS["partial_rotary_factor"]
    theta, further_theta = (config.get(key, _DEFAULTS[key]) for key in ("rope_theta", "compress_rope_theta"))
    stretch = {key: value for key, value in said.items() if key not in _ROPES}
    if stretch.get("rope_type", stretch.get("type")) == "yarn":
        stretch.setdefault("attention_factor", 1.0)
    return {
        "rope_parameters": {**stretch, "rope_theta": further_theta, "partial_rotary_factor": share},
        "window_rope": {"rope_theta": theta, "partial_rotary_factor": share}, "rope_scaling": None,
    }  # fmt: skip


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """spec: whose rotary positions are those of layers with digests."""
    for key in ("attention_bias", "mlp_bias"):
        if read.flag(key, False):
            raise UnsupportedError(f"{read.where}: {key!r} of a DeepSeek-V4", ANOTHER)
    if read.integer("num_key_value_heads") != 1:
        raise UnsupportedError(f"{read.where}: {read.integer('num_key_value_heads')} keys for the heads of a layer", "known: 1")
    if read.integer("n_shared_experts") != 1:
        raise UnsupportedError(f"{read.where}: {read.integer('n_shared_experts')} experts for all tokens", "known: 1")
    check_scoring(read, "sqrtsoftplus")
    kinds = read.kinds("layer_types", spec.num_layers, SLIDING, CHOSEN, ALL)
    routes = read.kinds("mlp_layer_types", spec.num_layers, BY_TABLE, BY_SCORE)
    assert kinds is not None
    assert routes is not None
    of_windows = rope_from_hf(
        ConfigReader({**read.values, "rope_parameters": read.values["window_rope"]}, f"{read.where}: {_ROPES[0]}"),
        spec.attention.head_dim, read.integer("max_position_embeddings"),
    )  # fmt: skip
    limits = [read.number("swiglu_limit")] * spec.num_layers
    return _made(spec, read, kinds, routes, replace(of_windows, interleaved=True), [limits, limits])


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """By the keys that folders have for the same."""
    found = ConfigReader({ours: read.values.get(key(theirs)) for ours, theirs in _GGUF_KEYS.items()}, read.where)
    ratios, layers = read.values.get(key("attention.compress_ratios")), spec.num_layers
    if not isinstance(ratios, list | tuple):
        raise CheckpointError(f"{read.where} lacks {key('attention.compress_ratios')!r}", BROKEN)
    kinds = _kinds({"compress_ratios": list(ratios)}, layers)
    first = read.integer(key("hash_layer_count"), 0, least=0)
    limits = [limits_in_gguf(read, key(f"swiglu_clamp_{name}"), layers) for name in ("exp", "shexp")]
    rope, theta = spec.attention.rope, read.number(key("attention.compress_rope_freq_base"))
    assert rope is not None
    further = replace(rope, theta=theta, attention_factor=1.0 if rope.scaling == "yarn" else None)
    of_windows = RopeSpec(rope.dim, rope.theta, interleaved=True, original_len=max(2, spec.max_position))
    routes = [BY_TABLE if i < first else BY_SCORE for i in range(layers)]
    spec = spec.each_rope(lambda own: further)
    return _made(spec, found, kinds, routes, of_windows, [limits[0], limits[1] if any(limits[1]) else limits[0]])


def _made(
    spec: ModelSpec, read: ConfigReader, kinds: list[str], routes: list[str], of_windows: RopeSpec,
    limits: Sequence[Sequence[float | None]],
) -> ModelSpec:  # fmt: skip
    """limits: of each layer, at what activations of its experts are held, and of the one that all tokens take."""
    attentions = {kind: _attention(spec.attention, kind, of_windows, read) for kind in {*kinds}}
    streams = _streams(read)

    def of_layer(block: BlockSpec, kind: str, route: str, limit: float | None, of_all: float | None) -> BlockSpec:
        mixture = block.mlp
        if not isinstance(mixture, MoESpec) or mixture.shared is None:
            raise UnsupportedError(f"{read.where}: a layer without experts, or without one for all tokens", ANOTHER)
        expert, shared = _held(mixture.expert, limit), _held(mixture.shared, of_all)
        mixture = replace(mixture, expert=expert, shared=shared, selection_bias=route == BY_SCORE,
                          table_rows=spec.vocab_size if route == BY_TABLE else 0)  # fmt: skip
        return replace(block, mixer=attentions[kind], mlp=mixture, streams=streams)

    return replace(spec, blocks=tuple(map(of_layer, spec.blocks, kinds, routes, *limits)))


def _held(mlp: MLPSpec, limit: float | None) -> MLPSpec:
    return replace(limited(mlp, limit), gate_held=limit is not None)


def _streams(read: ConfigReader) -> ConnectionsSpec:
    count, rounds = read.integer("hc_mult"), read.integer("hc_sinkhorn_iters")
    if not 2 <= count <= MAX_STREAMS:
        raise UnsupportedError(f"{read.where}: {count} residual streams", f"from 2 to {MAX_STREAMS} are known")
    _believe(read, (("rounds that make a matrix even", rounds, MAX_ROUNDS),))
    return ConnectionsSpec(count, read.number("hc_eps"), 2.0, rounds)


def _attention(attention: AttentionSpec, kind: str, of_windows: RopeSpec, read: ConfigReader) -> AttentionSpec:
    heads, dim, groups = attention.num_heads, attention.head_dim, read.integer("o_groups")
    query_rank, out_rank, window = (read.integer(key) for key in ("q_lora_rank", "o_lora_rank", "sliding_window"))
    _believe(read, (
        ("numbers that queries are made of", query_rank, MAX_RANK), ("numbers of a group of heads", out_rank, MAX_RANK),
        ("tokens in a window", window, MAX_WINDOW), ("numbers of a head", dim, MAX_DIM),
    ))  # fmt: skip
    if heads % groups:
        raise CheckpointError(f"{read.where}: {heads} heads don't make {groups} groups", BROKEN)
    for rank in (query_rank, out_rank):
        if rank % 2:
            raise UnsupportedError(f"{read.where}: a rank of {rank} is not an even number", ANOTHER)
    digests = None if kind == SLIDING else _digests(kind, read)
    rope = of_windows if digests is None else attention.rope
    assert rope is not None
    if digests is not None and rope.depends_on_length:
        raise UnsupportedError(f"{read.where}: digests whose angles depend on a text's length", "known: default, yarn")
    if digests is not None and (indexer := digests.indexer) is not None and indexer.dim < rope.dim:
        what = f"an indexer's heads of {indexer.dim} numbers, of which {rope.dim} turn"
        raise CheckpointError(f"{read.where}: {what}", BROKEN)
    shared = SharedSpec(query_rank, groups, out_rank, digests)
    return replace(attention, num_kv_heads=1, rope=rope, window=window, sinks=True, shared=shared)


def _digests(kind: str, read: ConfigReader) -> DigestSpec:
    rate = read.section("compress_rates").integer(kind, _RATES[kind])
    rate = read.integer("compress_rate_csa" if kind == CHOSEN else "compress_rate_hca", rate)
    _believe(read, (("tokens of a digest", rate, MAX_RATE),))
    if kind == ALL:
        return DigestSpec(rate)
    indexer = DigestIndexerSpec(*(read.integer(key) for key in ("index_n_heads", "index_head_dim", "index_topk")))
    _believe(read, (
        ("heads of an indexer", indexer.heads, MAX_DIM), ("numbers of its heads", indexer.dim, MAX_DIM),
        ("digests that a token sees", indexer.most, MOST_CHOSEN),
    ))  # fmt: skip
    if indexer.dim % 2:
        raise UnsupportedError(f"{read.where}: an indexer's heads of {indexer.dim} numbers, which are not even", ANOTHER)
    return DigestSpec(rate, True, indexer)


def _believe(read: ConfigReader, numbers: tuple[tuple[str, int, int], ...]) -> None:
    for name, number, most in numbers:
        if number > most:
            raise CheckpointError(f"{read.where}: {number} {name}; at most {most} are believed", BROKEN)


def window_rope(spec: ModelSpec) -> RopeSpec:
    """Of layers without digests; what no layer has turns by the usual base."""
    own = (each.rope for each in spec.attentions if each.rope is not None and each.digest_rope is None)
    (rope, *_) = spec.ropes
    return next(own, RopeSpec(rope.dim, _DEFAULTS["rope_theta"], interleaved=True, original_len=spec.max_position))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What llama.cpp's converter writes."""
    every = [own.shared for own in spec.attentions if own.shared is not None]
    digests = [0 if shared.digests is None else shared.digests.rate for shared in every]
    overlaps = [shared.digests is not None and shared.digests.indexer is not None for shared in every]
    ratios = {SLIDING: 0, **_RATES}
    tables = [isinstance(block.mlp, MoESpec) and block.mlp.table_rows > 0 for block in spec.blocks]
    further = next((own.rope for own in spec.attentions if own.digest_rope is not None), None)
    has_none(
        "a DeepSeek-V4", digests_of_other_numbers_of_tokens=not {*digests} <= {*ratios.values()} or overlaps != [
            rate == ratios[CHOSEN] for rate in digests], experts_by_a_table_behind_others=tables != sorted(tables, reverse=True),
        other_angles_than_plain_or_stretched_ones=further is not None and (
            further.scaling not in ("none", "yarn") or (further.scaling == "yarn" and further.attention_factor != 1.0)),
    )  # fmt: skip
    streams, indexer = spec.blocks[0].streams, next((own.digests.indexer for own in every if own.digests is not None and
                                                     own.digests.indexer is not None), None)  # fmt: skip
    assert isinstance(streams, ConnectionsSpec)
    mixtures = [block.mlp for block in spec.blocks if isinstance(block.mlp, MoESpec)]
    limits = [mixture.expert.limit or 0.0 for mixture in mixtures]
    keys: dict[str, GGUFField] = {
        "attention.q_lora_rank": every[0].query_rank, "attention.output_group_count": every[0].groups,
        "attention.output_lora_rank": every[0].out_rank, "attention.compress_ratios": digests,
        "attention.compress_rope_freq_base": _DEFAULTS["compress_rope_theta"] if further is None else further.theta,
        "hyper_connection.count": streams.count, "hyper_connection.sinkhorn_iterations": streams.rounds,
        "hyper_connection.epsilon": streams.least, "hash_layer_count": sum(tables),
        "attention.indexer.head_count": _DEFAULTS["index_n_heads"] if indexer is None else indexer.heads,
        "attention.indexer.key_length": _DEFAULTS["index_head_dim"] if indexer is None else indexer.dim,
        "attention.indexer.top_k": _DEFAULTS["index_topk"] if indexer is None else indexer.most, "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }  # fmt: skip
    if further is not None and further.scaling == "yarn":
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": further.factor,
            "rope.scaling.original_context_length": further.original_len, "rope.scaling.yarn_beta_fast": further.beta_fast,
            "rope.scaling.yarn_beta_slow": further.beta_slow,
        }  # fmt: skip
    return keys | weight_keys(spec)


_GGUF_KEYS = {
    "q_lora_rank": "attention.q_lora_rank", "o_groups": "attention.output_group_count", "hc_mult": "hyper_connection.count",
    "o_lora_rank": "attention.output_lora_rank", "sliding_window": "attention.sliding_window",
    "index_n_heads": "attention.indexer.head_count", "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k", "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
}  # fmt: skip
"""What folders call a setting -> what files do."""
_ATTENTION = "model.layers.{i}.self_attn"
_PARTS = {"k": "kv_proj.weight", "gate": "gate_proj.weight", "bias": "position_bias", "norm": "kv_norm.weight"}
"""Of what makes digests."""
_TABLES = {"weight": "fn", "base": "base", "scale": "scale"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "partial_rotary_factor": 0.125, "q_lora_rank": 1024, "num_experts_per_tok": 6,
    "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "max_position_embeddings": 1 << 20,
    "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
}  # fmt: skip
_LAYER = "blk.{i}"
_GGUF_NAMES = {
    "blocks.{i}.router_table.weight": f"{_LAYER}.ffn_gate_tid2eid.weight",
    "blocks.{i}.q_a.weight": f"{_LAYER}.attn_q_a.weight",
    "blocks.{i}.q_a_norm.weight": f"{_LAYER}.attn_q_a_norm.weight",
    "blocks.{i}.q_b.weight": f"{_LAYER}.attn_q_b.weight",
    "blocks.{i}.k.weight": f"{_LAYER}.attn_kv.weight",
    "blocks.{i}.k_norm.weight": f"{_LAYER}.attn_kv_a_norm.weight",
    "blocks.{i}.o_a.weight": f"{_LAYER}.attn_output_a.weight",
    "blocks.{i}.o.weight": f"{_LAYER}.attn_output_b.weight",
    "blocks.{i}.sinks": f"{_LAYER}.attn_sinks.weight",
    **{f"blocks.{{i}}.{kind}_{ours}.weight": f"{_LAYER}.{place}_compressor_{theirs}.weight"
       for ours, theirs in (("k", "kv"), ("gate", "gate"), ("bias", "ape"), ("norm", "norm"))
       for kind, place in (("digest", "attn"), ("index", "indexer"))},
    "blocks.{i}.index_q.weight": f"{_LAYER}.indexer.attn_q_b.weight",
    "blocks.{i}.index_weights.weight": f"{_LAYER}.indexer.proj.weight",
    **{f"blocks.{{i}}.{half}_connection.{ours}": f"{_LAYER}.hc_{place}_{theirs}.weight"
       for half, place in (("attention", "attn"), ("mlp", "ffn")) for ours, theirs in _TABLES.items()},
    **{f"last_connection.{ours}": f"output_hc_{theirs}.weight" for ours, theirs in _TABLES.items()},
}  # fmt: skip
DEEPSEEK4 = Family(
    "deepseek4",
    interleaved=True,
    template="deepseek-v4",
    experts=ExpertKeys(
        ("n_routed_experts",), "moe_intermediate_size", True, shared="n_shared_experts", scale="routed_scaling_factor",
        scoring="root softplus", selection_bias=True, norm_in_gguf=True,
    ),
    config=_config,
    defaults=_DEFAULTS,
    hf=_from_hf,
    gguf_names=_GGUF_NAMES,
    interleaved_gguf=True,
    gguf=_from_gguf,
    gguf_keys=_keys,
    hf_names=SHARED_NAMES | BIAS_NAME | {
        "blocks.{i}.router_table.weight": "model.layers.{i}.mlp.gate.tid2eid",
        "blocks.{i}.q_a.weight": f"{_ATTENTION}.q_a_proj.weight",
        "blocks.{i}.q_a_norm.weight": f"{_ATTENTION}.q_a_norm.weight",
        "blocks.{i}.q_b.weight": f"{_ATTENTION}.q_b_proj.weight",
        "blocks.{i}.k.weight": f"{_ATTENTION}.kv_proj.weight",
        "blocks.{i}.k_norm.weight": f"{_ATTENTION}.kv_norm.weight",
        "blocks.{i}.o_a.weight": f"{_ATTENTION}.o_a_proj.weight",
        "blocks.{i}.o.weight": f"{_ATTENTION}.o_b_proj.weight",
        "blocks.{i}.sinks": f"{_ATTENTION}.sinks",
        **{f"blocks.{{i}}.{kind}_{ours}.weight": f"{_ATTENTION}.{place}.{theirs}" for ours, theirs in _PARTS.items()
           for kind, place in (("digest", "compressor"), ("index", "compressor.indexer"))},
        "blocks.{i}.index_q.weight": f"{_ATTENTION}.compressor.indexer.q_b_proj.weight",
        "blocks.{i}.index_weights.weight": f"{_ATTENTION}.compressor.indexer.scorer.weights_proj.weight",
        **{f"blocks.{{i}}.{half}_connection.{ours}": f"model.layers.{{i}}.{place}.{theirs}"
           for half, place in (("attention", "attn_hc"), ("mlp", "ffn_hc")) for ours, theirs in _TABLES.items()},
        **{f"last_connection.{ours}": f"model.hc_head.hc_{theirs}" for ours, theirs in _TABLES.items()},
    },
)  # fmt: skip
