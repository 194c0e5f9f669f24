"""What configs say of mixtures of experts: which layers have one, how many experts of what size, how the router weighs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, MAX_NUMBER, ConfigReader

MAX_EXPERTS = 1024
BY_SOFTMAX, BY_SIGMOID, BY_ROOT = 1, 2, 4
"""What GGUF files call the functions that routers score by."""
KINDS_OF_MLPS = ("dense", "sparse")


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """How one family's config.json calls things."""

    count: tuple[str, ...]  # the first of these that is there
    size: str  # of an expert
    norm_topk: str | bool  # a flag's key, or what it always is
    switch: str | None = None  # what is false, or 0, where there are none
    taken: str = "num_experts_per_tok"
    first: str | None = None  # layers before it have none
    step: str = "decoder_sparse_step"  # each so many-th layer has some
    shared: str | None = None  # experts of the same size that every token takes
    shared_size: str | None = None  # or one of another size, which each token weighs
    scale: str | None = None  # of weights
    groups: tuple[str, str] | None = None  # how many there are, and how many of them are looked at
    scoring: Literal["softmax", "sigmoid", "root softplus"] = "softmax"  # see `MoESpec`
    scoring_key: str | None = None  # what names it, and `scoring` is what GGUF files mean that say nothing
    selection_bias: bool = False  # see `MoESpec`
    norm_in_gguf: bool = False  # GGUF files say whether a token's weights are made 1 together
    length_in_gguf: bool = False  # and how wide what every token takes is


QWEN_KEYS = ExpertKeys(("num_experts", "num_local_experts"), "moe_intermediate_size", "norm_topk_prob")
MIXTRAL_KEYS = ExpertKeys(("num_local_experts",), "intermediate_size", True)
DEEPSEEK_KEYS = ExpertKeys(
    ("n_routed_experts",), "moe_intermediate_size", "norm_topk_prob", first="first_k_dense_replace",
    shared="n_shared_experts", scale="routed_scaling_factor", groups=("n_group", "topk_group"),
    norm_in_gguf=True, scoring="sigmoid", selection_bias=True,
)  # fmt: skip


def mlps_from_hf(read: ConfigReader, keys: ExpertKeys | None, dense: MLPSpec, layers: int) -> list[MLPSpec | MoESpec]:
    """Of each layer. dense: of those that have no experts."""
    if keys is None or (keys.switch is not None and not read.values.get(keys.switch)):
        return [dense] * layers
    count = read.integer(next(filter(read.has, keys.count), keys.count[0]))
    norm = keys.norm_topk if isinstance(keys.norm_topk, bool) else read.flag(keys.norm_topk, False)
    expert = replace(dense, intermediate_size=read.integer(keys.size))
    mixture = _mixture(read, count, read.integer(keys.taken), expert, norm, keys)
    if keys.scoring_key is not None:
        mixture = replace(mixture, scoring=_scoring(read, keys.scoring_key))
    if keys.scale is not None:
        mixture = replace(mixture, scale=read.number(keys.scale, 1.0))
    if keys.shared is not None and (shared := read.integer(keys.shared, 0, least=0)):
        mixture = replace(mixture, shared=replace(expert, intermediate_size=shared * expert.intermediate_size))
    if keys.shared_size is not None and (size := read.integer(keys.shared_size, 0, least=0)):
        mixture = replace(mixture, shared=replace(expert, intermediate_size=size), shared_gate=True)
    if keys.groups is not None:
        groups, taken = (read.integer(key, 1) for key in keys.groups)
        mixture = _in_groups(mixture, groups, taken, read)
    first = 0 if keys.first is None else read.integer(keys.first, 0, least=0)
    step, excepted = read.integer(keys.step, 1), read.values.get("mlp_only_layers") or []
    if not isinstance(excepted, list) or not all(type(layer) is int for layer in excepted):
        raise CheckpointError(f"{read.where}: 'mlp_only_layers' must be a list of layers", BROKEN)
    return [mixture if (i + 1) % step == 0 and i >= first and i not in excepted else dense for i in range(layers)]


def mlps_from_gguf(
    read: ConfigReader, key: Callable[[str], str], keys: ExpertKeys | None, dense: MLPSpec, layers: int, names: set[str]
) -> list[MLPSpec | MoESpec]:
    """The same of GGUF metadata. llama.cpp makes the weights of a token's experts 1 together in all architectures that are read
    here, but for those whose files say so. names: the file's tensors, which tell what layers have a router."""
    count = read.integer(key("expert_count"), 0, least=0)
    if count == 0:
        return [dense] * layers
    by_sigmoid, by_root = (keys is not None and keys.scoring == kind for kind in ("sigmoid", "root softplus"))
    scale = read.number(key("expert_weights_scale"), 0.0, positive=False) or 1.0
    says_norm = by_sigmoid or by_root or (keys is not None and keys.norm_in_gguf)
    if scale != 1.0 and not says_norm:
        raise UnsupportedError(f"{read.where}: weights of experts times {scale:g}", "known: 1")
    either = keys is not None and keys.scoring_key is not None
    # Nothing; softmax; sigmoid; softmax of the chosen ones; root of a softplus.
    known = (0, 1, 2) if either else (0, 2) if by_sigmoid else (0, 4) if by_root else (0, 1, 3)
    if (function := read.integer(key("expert_gating_func"), 0, least=0)) not in known:
        others = "root of a softplus" if by_root else "softmax"
        name = "softmax or a sigmoid" if either else "sigmoid" if by_sigmoid else others
        raise UnsupportedError(f"{read.where}: experts that are not weighed by a {name}", f"known: {name}")
    groups = read.integer(key("expert_group_count"), 1)
    if groups > 1 and (keys is None or keys.groups is None):
        raise UnsupportedError(f"{read.where}: experts that are chosen by groups", "known: one group")
    size = read.integer(key("expert_feed_forward_length"), dense.intermediate_size)
    expert = replace(dense, intermediate_size=size, bias="blk.0.ffn_gate_exps.bias" in names)
    always = keys is not None and keys.norm_topk is True
    norm = read.flag(key("expert_weights_norm"), False) if says_norm and not always else True
    mixture = _mixture(read, count, read.integer(key("expert_used_count")), expert, norm, keys)
    if either and function:
        mixture = replace(mixture, scoring="softmax" if function == BY_SOFTMAX else "sigmoid")
    mixture = _in_groups(mixture, groups, read.integer(key("expert_group_used_count"), groups), read)
    shared = size * read.integer(key("expert_shared_count"), 0, least=0)
    shared = read.integer(key("expert_shared_feed_forward_length"), shared, least=0)
    if shared and keys is not None and (keys.shared or keys.shared_size) is not None:
        mixture = replace(mixture, shared=replace(expert, intermediate_size=shared), shared_gate=keys.shared_size is not None)
    chooses = mixture.selection_bias and any(name.endswith((".exp_probs_b.bias", ".exp_probs_b")) for name in names)
    mixture = replace(mixture, router_bias="blk.0.ffn_gate_inp.bias" in names, selection_bias=chooses, scale=scale)
    return [mixture if f"blk.{i}.ffn_gate_inp.weight" in names else dense for i in range(layers)]


def layers_without_experts(config: Mapping[str, Any], num_dense: int) -> list[int]:
    """Of those whose "mlp_layer_types" say it; so many first ones where nothing does."""
    said, layers = config.get("mlp_layer_types"), config.get("num_hidden_layers")
    if said is None:
        return list(range(num_dense))
    if not isinstance(said, list) or len(said) != layers or not all(kind in KINDS_OF_MLPS for kind in said):
        what = f"must be a list of {layers} of {', '.join(KINDS_OF_MLPS)}"
        raise CheckpointError(f"config.json: 'mlp_layer_types' {what}", BROKEN)
    return [layer for layer, kind in enumerate(said) if kind == "dense"]


def only_behind_the_first(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """The same; UnsupportedError where "mlp_layer_types" has experts in other layers than all behind the first ones."""
    kinds = read.values.get("mlp_layer_types")
    if kinds is not None and kinds != [("sparse" if isinstance(b.mlp, MoESpec) else "dense") for b in spec.blocks]:
        what = "experts in other layers than all behind the first ones are not supported"
        raise UnsupportedError(f"{read.where}: {what}", "known: 'sparse' in all layers behind 'dense' ones")
    return spec


def with_shared(spec: ModelSpec, size: int) -> ModelSpec:
    """The same with an expert of this size that every token takes."""

    def shared(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        return replace(mlp, shared=replace(mlp.expert, intermediate_size=size)) if isinstance(mlp, MoESpec) else mlp

    return spec.each_mlp(shared)


def limits_of(read: ConfigReader, key: str, layers: int) -> list[float | None]:
    """At what activations of each layer are held (`MLPSpec.limit`); 0 is none. Further ones are of layers that guess."""
    listed = read.values.get(key)
    if listed is None:
        return [None] * layers
    whole = isinstance(listed, list | tuple) and len(listed) >= layers
    if not whole or not all(each is None or (type(each) in (int, float) and 0 <= each <= MAX_NUMBER) for each in listed):
        raise CheckpointError(f"{read.where}: {key!r} must be a list of {layers} numbers", BROKEN)
    return [float(each) if each else None for each in listed[:layers]]


def limits_in_gguf(read: ConfigReader, key: str, layers: int) -> list[float | None]:
    """The same of GGUF files, where a single number is of all layers."""
    said = read.values.get(key)
    return limits_of(ConfigReader({key: [said] * layers}, read.where) if type(said) in (int, float) else read, key, layers)


def held(spec: ModelSpec, limits: list[float | None], shared: list[float | None]) -> ModelSpec:
    """The same with these of each layer's experts, and of what every token takes, which an MLP without experts is, too."""

    def of_layer(mlp: MLPSpec | MoESpec | None, limit: float | None, of_all: float | None) -> MLPSpec | MoESpec | None:
        if isinstance(mlp, MoESpec):
            own = None if mlp.shared is None else limited(mlp.shared, of_all)
            return replace(mlp, expert=limited(mlp.expert, limit), shared=own)
        return None if mlp is None else limited(mlp, of_all)

    each = zip(spec.blocks, limits, shared, strict=True)
    return replace(spec, blocks=tuple(replace(block, mlp=of_layer(block.mlp, *own)) for block, *own in each))


def limited(mlp: MLPSpec, limit: float | None) -> MLPSpec:
    """The same with this limit; UnsupportedError for another activation than the one that is known with one."""
    if limit is not None and mlp.activation != "silu":
        raise UnsupportedError(f"activation {mlp.activation!r} that is held at {limit:g} is not supported", "known: silu")
    return replace(mlp, limit=limit)


def scored_by_sigmoids(spec: ModelSpec, read: ConfigReader, key: str = "scoring_func") -> ModelSpec:
    """The same; UnsupportedError where its config names another function of the router's logits."""
    check_scoring(read, "sigmoid", key)
    return spec


def check_scoring(read: ConfigReader, known: str, key: str = "scoring_func") -> None:
    if (name := read.text(key, known)) != known:
        raise UnsupportedError(f"{read.where}: experts that are weighed by {name[:40]!r}", f"known: {known}")


def _scoring(read: ConfigReader, key: str) -> Literal["softmax", "sigmoid"]:
    match read.text(key):
        case "softmax" | "sigmoid" as name:
            return name
        case name:
            raise UnsupportedError(f"{read.where}: experts that are weighed by {name[:40]!r}", "known: softmax, sigmoid")


def _in_groups(mixture: MoESpec, groups: int, taken: int, read: ConfigReader) -> MoESpec:
    """The same with these groups of experts, and those that a token's are taken from."""
    if groups == 1:
        return mixture
    size, ranked_by = mixture.num_experts // groups, 2 if mixture.scoring == "sigmoid" else 1
    if mixture.num_experts % groups or size < ranked_by:
        raise CheckpointError(f"{read.where}: {mixture.num_experts} experts don't make {groups} groups", BROKEN)
    if taken > groups or taken * size < mixture.experts_per_token:
        raise CheckpointError(
            f"{read.where}: a token can't take {mixture.experts_per_token} experts of {taken} of {groups} groups", BROKEN
        )
    return replace(mixture, groups=groups, groups_taken=taken)


def gguf_fields(spec: ModelSpec, keys: ExpertKeys | None) -> dict[str, float]:
    """What a family's GGUF files say of experts, as llama.cpp's converter has it, by keys without the architecture. A family adds
    what only it has (`Family.gguf_keys`)."""
    mixture = spec.mixture
    if mixture is None or keys is None:
        return {}
    fields: dict[str, float] = {"expert_count": mixture.num_experts, "expert_used_count": mixture.experts_per_token}
    size, shared = mixture.expert.intermediate_size, 0 if mixture.shared is None else mixture.shared.intermediate_size
    if keys.size != "intermediate_size":  # else it is the feed_forward_length
        fields["expert_feed_forward_length"] = size
    if keys.shared is not None:
        fields["expert_shared_count"] = shared // size
    if keys.shared_size is not None or (keys.length_in_gguf and shared):
        fields["expert_shared_feed_forward_length"] = shared
    if keys.first is not None:
        fields["leading_dense_block_count"] = [isinstance(block.mlp, MoESpec) for block in spec.blocks].index(True)
    if keys.groups is not None:
        fields |= {"expert_group_count": mixture.groups, "expert_group_used_count": mixture.groups_taken}
    if mixture.scoring in (codes := {"sigmoid": BY_SIGMOID, "root softplus": BY_ROOT}):
        fields["expert_gating_func"] = codes[mixture.scoring]
    elif keys.scoring_key is not None:
        fields["expert_gating_func"] = BY_SOFTMAX
    return fields


def _mixture(
    read: ConfigReader, count: int, chosen: int, expert: MLPSpec, norm_topk: bool, keys: ExpertKeys | None
) -> MoESpec:
    if count > MAX_EXPERTS:
        raise CheckpointError(f"{read.where} asks for {count} experts; at most {MAX_EXPERTS} are believed", BROKEN)
    if chosen > count:
        raise CheckpointError(f"{read.where}: a token can't take {chosen} of {count} experts", BROKEN)
    mixture = MoESpec(count, chosen, expert, norm_topk)
    return mixture if keys is None else replace(mixture, scoring=keys.scoring, selection_bias=keys.selection_bias)
