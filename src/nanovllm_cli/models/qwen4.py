"""Qwen4-Exp (Qwen 2026): Qwen3.5's layers with experts over gated residual streams; attention to blocks of tokens that an indexer
chooses; and in front of some layers embeddings of n-grams, whose rows are told by hashes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.index_spec import BlockIndexerSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import MAX_DIM
from nanovllm_cli.models.family import ANOTHER, ReadValues, no_file
from nanovllm_cli.models.names import NGRAM_BUFFERS
from nanovllm_cli.models.qwen_next import (
    ATTENTION,
    FULL_EVERY,
    LINEAR,
    MAX_TAPS,
    QWEN3_NEXT,
    SECTIONS,
    check_activation,
    delta_from_hf,
    hybrid,
    kinds_of_layers,
)
from nanovllm_cli.models.rotary import woven
from nanovllm_cli.models.sparse import MOST_CHOSEN
from nanovllm_cli.state_spec import DeltaSpec, NGramSpec
from nanovllm_cli.streams_spec import GatedStreamsSpec

INDEXED = "indexed_attention"
"""What ATTENTION is called, too: both have an indexer if the config has one."""
MAX_STREAMS, MAX_RANK = 16, 1 << 16
MAX_LONGEST, MAX_ROWS, MAX_PARTS = 8, 256, 1 << 16
"""Of n-grams: tokens of the longest, rows of a token, parts of a table."""
_INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_MASK = (1 << 64) - 1
_GAMMA, _MIX = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Of SplitMix64 (Steele, Lea and Flood 2014)."""
_SEED_STEP = 10007
_WITNESSES = (2, 3, 5, 7, 11, 13)
"""By which Miller and Rabin's test is right of all numbers below 3 * 10**12 (Jaeschke 1993)."""


def multipliers_of(vocab_size: int, longest: int, place: int, seed: int) -> tuple[int, ...]:
    """Odd numbers by which ids are multiplied, the token's own first, of the layer at this place among those with n-grams: ids
    times them stay below 2**63. As transformers makes them."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    found = []
    for i in range(1, longest + 1):
        value = seed + _SEED_STEP * place + (i + 1) * _GAMMA & _MASK
        for shift, factor in _MIX:
            value = (value ^ value >> shift) * factor & _MASK
        found.append(2 * ((value ^ value >> 31) % bound) + 1)
    return tuple(found)


def primes_from(least: int) -> Iterator[int]:
    """Those of `least` and above, ascending."""
    number = max(2, least)
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % small == 0 for small in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        x = pow(witness, odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    def usual(i: int) -> str:
        return LINEAR if (i + 1) % read.integer("full_attention_interval", FULL_EVERY) else ATTENTION

    is_linear = [kind == LINEAR for kind in kinds_of_layers(read, spec.num_layers, usual, INDEXED)]
    if read.flag("attention_bias", False):
        raise UnsupportedError("gated attention with biases is not supported", ANOTHER)
    check_activation(read)
    gate = read.text("output_gate_type", "silu")
    if gate not in ("silu", "swish", "sigmoid"):
        raise UnsupportedError(f"{read.where}: gates by {gate[:80]!r} behind the delta rule", "known: silu, sigmoid")
    delta = replace(delta_from_hf(read), by_sigmoid=gate == "sigmoid")
    spec = hybrid(spec, delta, is_linear, True, 0.0, read.where)
    spec = woven(_with_indexer(spec, read), SECTIONS)
    streams = _streams(read)
    spec = replace(spec, blocks=tuple(replace(block, streams=streams) for block in spec.blocks), ends_normed=False)
    return _with_ngrams(spec, read, streams.count, is_linear)


def _streams(read: ConfigReader) -> GatedStreamsSpec:
    count, rank = read.integer("hc_count", 4), read.integer("hc_lowrank", 320)
    if not 2 <= count <= MAX_STREAMS:
        raise UnsupportedError(f"{read.where}: {count} residual streams", f"from 2 to {MAX_STREAMS} are known")
    if rank > MAX_RANK:
        raise CheckpointError(f"{read.where}: streams mixed by way of {rank} numbers; at most {MAX_RANK} are believed", BROKEN)
    return GatedStreamsSpec(count, rank)


def _with_indexer(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Where the config has an indexer: all of it then."""
    if not any(map(read.has, _INDEXER)):
        return spec
    heads, keys, dim, budget, ratio = map(read.integer, _INDEXER)
    if keys != 1:
        raise UnsupportedError(f"{read.where}: an indexer with {keys} keys of a token", "known: 1")
    if budget % ratio:
        raise CheckpointError(f"{read.where}: {budget} tokens are no whole blocks of {ratio}", BROKEN)
    for name, number, most in (("heads", heads, MAX_DIM), ("dims", dim, MAX_DIM), ("tokens", budget, MOST_CHOSEN)):
        if number > most:
            raise CheckpointError(f"{read.where}: an indexer of {number} {name}; at most {most} are believed", BROKEN)
    rope = spec.attention.rope
    assert rope is not None
    if dim % 2 or dim < rope.dim:
        raise UnsupportedError(f"{read.where}: an indexer's heads of {dim} dims, of which {rope.dim} rotate", ANOTHER)
    return spec.with_attention(blocks=BlockIndexerSpec(heads, dim, budget // ratio, ratio))


def _with_ngrams(spec: ModelSpec, read: ConfigReader, streams: int, is_linear: list[bool]) -> ModelSpec:
    """In the layers of "ple_layer_ids", which count from 1."""
    listed = read.values.get("ple_layer_ids") or []
    if not isinstance(listed, list) or not all(type(each) is int and 1 <= each <= spec.num_layers for each in listed):
        what = f"must be a list of layers from 1 to {spec.num_layers}"
        raise CheckpointError(f"{read.where}: 'ple_layer_ids' {what}", BROKEN)
    layers = sorted({each - 1 for each in listed})
    if not layers:
        return spec
    if others := [layer + 1 for layer in layers if not is_linear[layer]]:
        raise UnsupportedError(f"{read.where}: n-grams in front of layer {others[0]}, which has attention", ANOTHER)
    longest, heads = read.integer("ngram_size", 3, least=2), read.integer("heads_per_ngram", 8)
    every, width = (longest - 1) * heads, read.integer("ple_embed_dim", spec.hidden_size)
    taps, parts = read.integer("ple_conv_kernel_size", 4), read.integer("split_ngram_parts", 512)
    numbers = (("tokens of an n-gram", longest, MAX_LONGEST), ("rows of a token", every, MAX_ROWS), ("taps", taps, MAX_TAPS),
               ("parts of a table", parts, MAX_PARTS), ("numbers of a token", width, MAX_DIM * MAX_ROWS))  # fmt: skip
    for name, number, most in numbers:
        if number > most:
            raise CheckpointError(f"{read.where}: {number} {name}; at most {most} are believed", BROKEN)
    if width % every:
        raise CheckpointError(f"{read.where}: {width} numbers of a token are not {every} rows of a table", BROKEN)
    end, seed = _end(read), read.integer("seed", 1234, least=0)
    primes = primes_from(read.integer("ngram_vocab_size_base", 20_000_000))
    padded = read.integer("make_ngram_vocab_size_divisible_by", 128)
    mixers = list(spec.mixers)
    for place, layer in enumerate(layers):
        sizes = tuple(next(primes) for _ in range(every))
        count = -(-sum(sizes) // padded) * padded
        own = NGramSpec(
            longest, width, end, multipliers_of(spec.vocab_size, longest, place, seed), sizes, _shards(count, parts), streams,
            spec.hidden_size, taps,
        )  # fmt: skip
        delta = mixers[layer]
        assert isinstance(delta, DeltaSpec)
        mixers[layer] = replace(delta, ngrams=own)
    return spec.with_mixers(mixers)


def _end(read: ConfigReader) -> int:
    """The first that ends a text."""
    said = read.values.get("eos_token_id")
    first = said[0] if isinstance(said, list) and said else said
    if type(first) is not int or not 0 <= first < 1 << 31:
        raise CheckpointError(f"{read.where}: n-grams begin anew behind 'eos_token_id', which it lacks", BROKEN)
    return first


def _shards(count: int, parts: int) -> tuple[int, ...]:
    """Rows of each, as transformers divides a table."""
    rows = -(-count // parts)
    return tuple(min(rows, count - first) for first in range(0, count, rows))


def _with_buffers(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    """With multipliers and sizes as the checkpoint has them, where it does."""
    return spec.with_mixers(
        replace(mixer, ngrams=_as_stored(mixer.ngrams, i, values, where))
        if isinstance(mixer, DeltaSpec) and mixer.ngrams is not None else mixer
        for i, mixer in enumerate(spec.mixers)
    )  # fmt: skip


def _as_stored(ngrams: NGramSpec, layer: int, values: ReadValues, where: str) -> NGramSpec:
    place = f"layers.{layer}.ple.ple_embedding"
    found = []
    for buffer in NGRAM_BUFFERS:
        every = (values(f"{outer}{place}{buffer}") for outer in ("model.", "model.language_model."))
        found.append(next((each for each in every if each is not None), None))
    if not all(type(each) is int and 0 <= each < 1 << 63 for own in found for each in own or ()):
        raise CheckpointError(f"{where}: what tells rows of n-grams in layer {layer} is no whole numbers", BROKEN)
    multipliers, sizes, offsets = (None if each is None else tuple(map(int, each)) for each in found)
    own = replace(ngrams, multipliers=multipliers or ngrams.multipliers, sizes=sizes or ngrams.sizes)
    same = len(own.multipliers) == ngrams.longest and len(own.sizes) == len(ngrams.sizes)
    fits = all(size > 0 for size in own.sizes) and sum(own.sizes) <= sum(ngrams.shards)
    if not (same and fits and offsets in (None, own.offsets)):
        raise CheckpointError(f"{where}: what tells rows of n-grams in layer {layer} does not fit its table", BROKEN)
    return own


_LAYER, _PLE = "model.layers.{i}", "model.layers.{i}.ple"
_CONNECTION = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight"}
_DEFAULTS: dict[str, Any] = {**QWEN3_NEXT.defaults, "num_hidden_layers": 40, "vocab_size": 248320}
_DEFAULTS.pop("partial_rotary_factor")
QWEN4_EXP = replace(
    QWEN3_NEXT,
    name="qwen4_exp",
    gguf_name="",
    gguf_like=no_file("Qwen4-Exp"),
    defaults=_DEFAULTS,
    hf=_from_hf,
    tensors=_with_buffers,
    mtp_names={},
    hf_names=dict(QWEN3_NEXT.hf_names) | {
        **{f"blocks.{{i}}.{half}_connection.{ours}.weight": f"{_LAYER}.{place}.{theirs}.weight"
           for half, place in (("attention", "attn_hyper_connection"), ("mlp", "mlp_hyper_connection"))
           for ours, theirs in _CONNECTION.items()},
        **{f"last_connection.{ours}.weight": f"model.hyper_connection_mixer.{theirs}.weight"
           for ours, theirs in _CONNECTION.items()},
        "blocks.{i}.index_qk.weight": f"{_LAYER}.self_attn.indexer.index_qk_proj.weight",
        **{f"blocks.{{i}}.index_{part}_norm.weight": f"{_LAYER}.self_attn.indexer.{part}_layernorm.weight" for part in "qk"},
        "blocks.{i}.ngram_key.weight": f"{_PLE}.key_proj.weight",
        "blocks.{i}.ngram_value.weight": f"{_PLE}.value_proj.weight",
        **{f"blocks.{{i}}.ngram_{ours}_norm.weight": f"{_PLE}.norm_{theirs}.weight"
           for ours, theirs in (("key", "key"), ("stream", "query"), ("taps", "conv"))},
        "blocks.{i}.ngram_taps": f"{_PLE}.conv1d.weight",
        "blocks.{i}.shards.{e}.weight": f"{_PLE}.ple_embedding.ngram_embedding.shard_{{e}}.weight",
    },
)  # fmt: skip
