"""What a model takes, and how fast it can be at most, before it is loaded: memory as the engine counts it, speed by the roofline.

Speed. A step has to read every matrix that is multiplied once, however many sequences are in it, and each sequence's K and V;
and it has to multiply. It takes at least the longer of the two:

    seconds >= max(bytes / read_gb_s, operations / gflops)            Williams, Waterman, Patterson, CACM 2009

A multiply-add is two operations: 2 a token and weight, and 4 a token, key, head and dim for attention. These are limits: what
is left out (launching kernels, sampling, Python) is little beside some hundred million weights, and all there is to tiny models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import CacheLayout, block_bytes, near_bytes, state_bytes
from nanovllm_cli.config import Activations, EngineConfig
from nanovllm_cli.distributed.heads import own_spec
from nanovllm_cli.engine.memory import OVERHEAD_BYTES, Near, near_of
from nanovllm_cli.mixer_spec import state_in
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.outline import matrices_of, shapes_of
from nanovllm_cli.planning.facts import Facts, TensorClass
from nanovllm_cli.quant.format import Affine, Blocks, Format, Integer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import DenseBytes, WeightFormats, is_by_head
from nanovllm_cli.weights.tensor_names import checkpoint_name, names_of
from nanovllm_cli.weights.weight_reader import WeightReader

CONTEXTS = (4096, 8192, 32768)
BATCHES = (1, 8, 32)
PROMPT_LEN = 512
_RATES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Speed(NamedTuple):
    """What the machine can do: 10^9 bytes read a second, 10^9 operations a second by what is multiplied (bench/roofline.py)."""

    read_gb_s: float
    gflops: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Weights in one format. num_bytes: all of them. read_bytes: what a step reads; an embedding that is not the head as well is
    looked up by row. multiplies: what its matmuls count in, a key of Speed.gflops. expert_bytes: of read_bytes, those of experts,
    of which a token takes a share."""

    format: str
    num_bytes: int
    read_bytes: int
    multiplies: str
    expert_bytes: float = 0.0


def plan_weights(
    facts: Facts,
    checkpoint: Checkpoint,
    reader: WeightReader | None,
    dtype: torch.dtype,
    wanted: Format | None,
    dense_bytes: DenseBytes,
    activations: Activations = "auto",
) -> WeightPlan:
    """Weights as they are stored (wanted None) or rounded while loading. reader: see `facts.reader_of`. dense_bytes: see
    `Platform.dense_bytes`. activations: see `EngineConfig`.

    UsageError where stored and wanted contradict each other, UnsupportedError for widths that the format can't have.
    """
    name = facts.stored if wanted is None else wanted.name
    if reader is None:
        counts = facts.spec.num_drawn, facts.spec.vocab_size
        head, outer = (dense_bytes(count, facts.spec.hidden_size, dtype) for count in counts)
        plain = {each.name: each.count * (head if each.name == "head" else outer) for each in facts.classes if _is_plain(each)}
        kept = {each.name: plain.get(each.name, each.num_bytes) for each in facts.classes}
        numbers = {each.name: each.numbers for each in facts.classes}
        kept.pop("n-grams", 0)
        total = sum(kept.values()) + _excess_of_heads(facts.spec, checkpoint, dtype)
        skipped = 0 if facts.spec.tied_head else kept.get("embedding", 0)
        skipped += kept.get("per layer", 0) * facts.spec.num_by_token // max(1, numbers.get("per layer", 0))
        mixtures = (block.mlp for block in facts.spec.blocks if isinstance(block.mlp, MoESpec))
        routed = sum(mixture.num_routed(facts.spec.hidden_size) for mixture in mixtures)
        share = routed / max(1, numbers.get("mlp", 0))
        return WeightPlan(name, total, total - skipped, _RATES[dtype], share * kept.get("mlp", 0))
    formats, names = WeightFormats(checkpoint, reader, wanted), names_of(checkpoint)
    shapes = shapes_of(facts.spec)
    layers: Counter[Format | None] = Counter()
    for ours, (num_rows, width) in matrices_of(facts.spec).items():
        form = formats.of(ours)
        if form is not None and form == wanted:
            form.check_width(width)
        if ours.startswith("blocks."):
            layers[form] += num_rows * width
    unread = {"per_layer_embedding.weight"} | (set() if facts.spec.tied_head else {"embedding.weight"})
    unread |= {each for each in shapes if each.startswith("encoder.")}
    parts = [each for each in shapes if each in unread], [each for each in shapes if ".experts." in each]
    skipped, experts = (formats.num_bytes(dtype, dense_bytes, [checkpoint_name(each, names) for each in part]) for part in parts)
    total = formats.num_bytes(dtype, dense_bytes)
    return WeightPlan(name, total, total - skipped, _multiplies(layers.most_common(1)[0][0], dtype, activations), experts)


def _excess_of_heads(spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What weights that are kept in the compute type take beyond what is stored of them, whatever they are packed into."""
    names = names_of(checkpoint)
    numbers = {checkpoint_name(ours, names).removesuffix(".weight"): math.prod(shape)
               for ours, shape in shapes_of(spec).items() if is_by_head(ours)}  # fmt: skip
    stored = sum(checkpoint.info(name).num_bytes for name in checkpoint.names() if name.rpartition(".")[0] in numbers)
    return sum(numbers.values()) * dtype.itemsize - stored


def _is_plain(outer: TensorClass) -> bool:
    """An embedding or a head that others left as it was."""
    return outer.name in ("embedding", "head") and set(outer.types) <= {"BF16", "F16", "F32"}


def _multiplies(form: Format | None, dtype: torch.dtype, activations: Activations) -> str:
    """Whole numbers where weights and activations are (quant/cpu_formats.py), else the compute type."""
    can_round = isinstance(form, Affine | Blocks) or (isinstance(form, Integer) and form.activation == "int8")
    rounds = {"auto": dtype != torch.float32, "rounded": True, "exact": False}[activations]
    return "int8" if can_round and rounds else _RATES[dtype]


class UnitBytes(NamedTuple):
    """Of a block of the KV cache, of a state, and of what layers with a window keep of a block (see `engine/near.py`)."""

    block: int
    state: int
    near: int


def unit_bytes(spec: ModelSpec, layout: CacheLayout, processes: int) -> UnitBytes:
    """In so many processes together: what they don't divide each of them has."""
    each = [own_spec(spec, rank, processes).mixers for rank in range(processes)]
    return UnitBytes(*[sum(of_unit(mixers, layout) for mixers in each) for of_unit in (block_bytes, state_bytes, near_bytes)])


def kv_bytes(spec: ModelSpec, layout: CacheLayout, config: EngineConfig, context: int, batch: int) -> int:
    """The least of a cache that holds `batch` sequences of `context` tokens, and their states."""
    units = unit_bytes(spec, layout, config.tensor_parallel_size)
    blocks, near = batch * -(-context // config.block_size), near_of(spec, config, units.near)
    gone = 0 if near is None else (blocks - near.needed(config.block_size, batch, blocks)) * near.num_bytes
    return blocks * units.block - gone + batch * units.state


def total_bytes(weight_bytes: int, cache_bytes: int, processes: int = 1) -> int:
    """With what processes take beside weights and cache."""
    return weight_bytes + cache_bytes + processes * OVERHEAD_BYTES


def contexts(spec: ModelSpec, own: int | None = None) -> list[int]:
    """Lengths worth knowing the KV cache of: the usual ones below the model's limit, that limit, and the user's own."""
    found = {length for length in CONTEXTS if length < spec.max_position} | {spec.max_position}
    return sorted(found | ({own} if own else set()))


def cache_room(config: EngineConfig, free: int, weight_bytes: int, *, is_cpu: bool) -> int:
    """Bytes that the KV cache gets beside the weights, as the engine has it: what was asked for where that is free, else a share
    of what is (on a GPU all: `free` is a share already)."""
    share = config.memory_utilization if is_cpu else 1.0
    wanted = int((free - weight_bytes) * share) if config.kv_cache_bytes is None else config.kv_cache_bytes
    return max(0, min(wanted, free - total_bytes(weight_bytes, 0, config.tensor_parallel_size)))


def longest_context(room: int, units: UnitBytes, near: Near | None, block_size: int, answers: int, most: int) -> int:
    """Tokens of the longest context that so many answers can have at once."""
    room -= answers * units.state
    if not units.block:
        return most if room >= 0 else 0
    blocks = max(0, room) // units.block
    if near is not None:
        wanted, far = answers * -(-most // block_size), units.block - near.num_bytes
        left = max(-1, room - near.needed(block_size, answers, wanted) * near.num_bytes)
        blocks = max(blocks, left // far if far else wanted if left >= 0 else 0)
    return min(most, blocks // answers * block_size)


def read_bytes(spec: ModelSpec, layout: CacheLayout, block_size: int, depth: int) -> float:
    """Of a cache, for one token `depth` tokens into its context: keys and values of all before it, the inputs of convolutions of
    a few, and states, which are written as well."""
    keys = block_bytes(spec.attentions, layout) / block_size
    return depth * keys + state_bytes(spec.mixers, layout)


def decode_rate(facts: Facts, weights: WeightPlan, cache_bytes: float, speed: Speed, depth: int = PROMPT_LEN) -> float:
    """Most tokens a second of one sequence, `depth` tokens into its context. cache_bytes: see `read_bytes`."""
    read = (_step_bytes(facts.spec, weights, 1) + cache_bytes) / (speed.read_gb_s * 1e9)
    work = (_matmul(facts.spec, with_head=True) + _attention(facts.spec, depth)) / _operations(speed, weights)
    return 1.0 / max(read, work)


def prefill_rate(facts: Facts, weights: WeightPlan, speed: Speed, step_tokens: int) -> float:
    """Most tokens a second of a prompt of PROMPT_LEN tokens, read in steps of step_tokens."""
    steps = -(-PROMPT_LEN // step_tokens)
    read = steps * _step_bytes(facts.spec, weights, min(step_tokens, PROMPT_LEN)) / (speed.read_gb_s * 1e9)
    needed = facts.spec.for_prompts
    work = PROMPT_LEN * (_matmul(needed, with_head=False) + _attention(needed, PROMPT_LEN / 2))
    return PROMPT_LEN / max(read, work / _operations(speed, weights))


def _step_bytes(spec: ModelSpec, weights: WeightPlan, num_tokens: int) -> float:
    """Of weights that a step of so many tokens reads, which choose experts evenly and each by itself."""
    return weights.read_bytes - weights.expert_bytes * (1 - spec.expert_share) ** num_tokens


def _operations(speed: Speed, weights: WeightPlan) -> float:
    return speed.gflops[weights.multiplies] * 1e9


def _matmul(spec: ModelSpec, *, with_head: bool) -> float:
    """Operations of a token; the head is multiplied for those that are drawn from."""
    return 2.0 * (multiplied(spec) + with_head * spec.num_drawn * spec.hidden_size)


def multiplied(spec: ModelSpec) -> int:
    """Multiply-adds of a token with the layers' matrices and states."""
    found = 0 if spec.streams is None else spec.streams.num_outer(spec.hidden_size)
    for block in spec.computed:
        found += block.num_active(spec.hidden_size)
        found += 0 if block.mlp is None else 3 * spec.hidden_size * spec.per_layer_width
        found += 0 if (state := state_in(block.mixer)) is None else 3 * state.key_dim * state.values
    return found


def _attention(spec: ModelSpec, keys: float) -> float:
    """Operations of a token that sees so many keys: scores and weighted values."""
    seen = min(keys, spec.most_seen or keys)
    both = ((each, 2.0 * each.num_heads * (each.head_dim + each.found_dim)) for each in spec.attentions)
    looks = sum(work * each.num_seen(seen) for each, work in both)
    ranks = keys > seen or any(each.shared is not None for each in spec.attentions)
    return looks + (sum(2.0 * each.index_products for each in spec.attentions) * keys if ranks else 0.0)
