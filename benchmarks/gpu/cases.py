"""Kernels on inputs of real sizes: what is launched, and the bytes and operations that it can't do without.

Nothing here times anything, or asks for a GPU: the tests run each kind of case once on the emulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpu.shapes import Shape
from gpu.timing import copies_for
from nanovllm_cli.kernels import activation, altup, embedding, norm, prefill_attention, rope_cache, sampling
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention
from nanovllm_cli.kernels.gated_conv import gated_conv
from nanovllm_cli.kernels.gated_delta import gated_delta
from nanovllm_cli.kernels.gemv import gemv
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.kernels.sampling_table import SamplingBuffers, SamplingTable
from nanovllm_cli.kernels.sigmoid_gate import sigmoid_gate
from nanovllm_cli.kernels.states import States
from nanovllm_cli.kernels.xielu import xielu
from nanovllm_cli.sampling_params import SamplingParams

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
TITLES = {BF16: "bf16", FP8: "fp8", INT8: "int8"}
BLOCK = 16
STREAMS = 4  # of a Gemma 3n


class Case(NamedTuple):
    """calls: the same work on inputs of its own each. library: the same by torch, where it has it."""

    name: str
    num_bytes: float
    flops: float
    calls: list[Callable[[], object]]
    library: Sequence[Callable[[], object]] = ()


def randn(launcher: Launcher, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    """Made in slices: one of a cache of gigabytes in float32 would be larger than the cache."""
    out = torch.empty(shape, dtype=dtype, device=launcher.device)
    for part in out.view(-1).split(1 << 26):
        part.copy_(torch.randn(part.shape, device=launcher.device) * scale)
    return out


# ---- attention ----


class Heads(NamedTuple):
    """A layer's. window: 0 for none. norms_values: v has gains, too. shared: another layer has written k and v."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    norms_values: bool = False
    shared: bool = False

    @classmethod
    def of(cls, shape: Shape) -> Heads:
        return cls(shape.heads, shape.kv_heads, shape.dim)


GEMMA_4_E4B = {
    "all": Heads(8, 2, 512, norms_values=True),
    "all, shared": Heads(8, 2, 512, shared=True),
    "window": Heads(8, 2, 256, 512, norms_values=True),
    "window, shared": Heads(8, 2, 256, 512, shared=True),
}
"""By what a layer sees."""


class Cache(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def make_cache(launcher: Launcher, shape: Shape | Heads, blocks: int, dtype: torch.dtype) -> Cache:
    sizes = (blocks, shape.kv_heads, BLOCK, shape.dim)
    k, v = (randn(launcher, *sizes, dtype=dtype, scale=40.0 if dtype == INT8 else 1.0) for _ in "kv")
    return Cache(k, v, *(cache_scale(launcher, cache) for cache in (k, v)))


def cache_scale(launcher: Launcher, cache: torch.Tensor) -> torch.Tensor | None:
    """Of a cache [N, K, S, D], where its type has one."""
    if cache.dtype == INT8:
        return torch.full(cache.shape[:3], 1 / 40, device=launcher.device)
    return torch.ones(cache.shape[1], device=launcher.device) if cache.dtype == FP8 else None


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of a token and head, with its scale."""
    return dim * dtype.itemsize + (4 if dtype == INT8 else 0)


def make_tables(launcher: Launcher, batch: int, tokens: int, blocks: int, salt: int) -> torch.Tensor:
    """Blocks in no order, none in two sequences."""
    width = -(-tokens // BLOCK)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(salt))[: batch * width]
    return order.view(batch, width).to(torch.int32).to(launcher.device)


def decode_case(launcher: Launcher, name: str, shape: Shape | Heads, batch: int, tokens: int, dtype: torch.dtype) -> Case:
    """Attention of one layer in a decode step of `batch` sequences of `tokens` tokens, with what its kernel does beforehand: norm
    and rotation of heads, the write of the newest token."""
    heads, kv_heads, dim, window, norms_values, shared = shape if isinstance(shape, Heads) else Heads.of(shape)
    seen = min(tokens, window or tokens)
    read = 2.0 * batch * seen * kv_heads * row_bytes(dim, dtype)
    copies = copies_for(read)
    blocks = copies * batch * -(-tokens // BLOCK)
    cache = make_cache(launcher, shape, blocks, dtype)
    tables = make_tables(launcher, copies * batch, tokens, blocks, batch)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=launcher.device)
    qkv, gain = randn(launcher, batch, (heads + (0 if shared else 2 * kv_heads)) * dim), randn(launcher, dim)
    angles, norms = torch.rand(batch, dim // 2, device=launcher.device), (gain, gain, gain if norms_values else None)
    projected = rope_cache.Projected(qkv, heads, kv_heads, dim, *norms, 1e-6, 0.0, angles, angles, False, shared)
    scratch = DecodeScratch(launcher, batch, heads, kv_heads, dim, tokens + BLOCK)

    def call(table: torch.Tensor) -> Callable[[], object]:
        return lambda: decode_attention(
            launcher, projected, cache.k, cache.v, table, lens, scratch, dim**-0.5, window,
            k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip

    title = f"{name}, {TITLES[dtype]}, {batch} x {tokens}"
    flops = 4.0 * batch * seen * heads * dim
    return Case(title, read + 4.0 * batch * heads * dim, flops, [call(table) for table in tables.split(batch)])


def prefill_case(
    launcher: Launcher,
    name: str,
    shape: Shape | Heads,
    count: int,
    tokens: int,
    prefix: int,
    dtype: torch.dtype,
    fixed: bool = False,
) -> Case:
    """Attention of one layer over prompts of `tokens` tokens behind `prefix` that are cached. fixed: splits as a deterministic
    GPU has them."""
    heads, kv_heads, dim, window, *_ = shape if isinstance(shape, Heads) else Heads.of(shape)
    total, width = tokens + prefix, -(-(tokens + prefix) // BLOCK)
    cache = make_cache(launcher, shape, count * width, dtype)
    tables = make_tables(launcher, count, total, count * width, count)
    starts = np.arange(count + 1, dtype=np.int32) * tokens
    work = prefill_attention.prefill_tiles(
        launcher, starts, np.full(count, total, np.int32), heads, kv_heads, dim, BF16, dtype,
        window=window, deterministic=fixed,
    )  # fmt: skip
    work = work._replace(items=work.items.to(launcher.device))
    counters = prefill_attention.new_counters(launcher)
    q = randn(launcher, count * tokens, heads, dim)
    seen = np.minimum(np.arange(prefix + 1, total + 1), window or total)
    pairs = float(count * seen.sum())  # of a query and a key that it sees

    def call() -> object:
        return prefill_attention.prefill_attention(
            launcher, q, cache.k, cache.v, work, tables, counters,
            scale=dim**-0.5, k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip

    library: list[Callable[[], object]] = []
    if prefix == 0 and dtype == BF16 and window == 0:
        queries = q.view(count, tokens, heads, dim).transpose(1, 2)
        k, v = (randn(launcher, count, kv_heads, tokens, dim) for _ in range(2))
        attention = torch.nn.functional.scaled_dot_product_attention
        library.append(lambda: attention(queries, k, v, is_causal=True, enable_gqa=True))
    title = f"{name}, {TITLES[dtype]}, {count} x {tokens}" + (f" after {prefix}" if prefix else "")
    num_bytes = 2.0 * q.nbytes + 2.0 * count * total * kv_heads * row_bytes(dim, dtype)
    return Case(title + (", fixed splits" if fixed else ""), num_bytes, 4.0 * pairs * heads * dim, [call], library)


# ---- matmuls of few rows ----


def gemv_cases(launcher: Launcher, name: str, shape: Shape, rows: int) -> list[Case]:
    """A layer's four and the head's, as a decode step launches them."""
    heads, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
    return [
        _gemv_case(launcher, f"{name} qkv, {rows}", rows, heads + 2 * kv, shape.hidden, "norm"),
        _gemv_case(launcher, f"{name} o, {rows}", rows, shape.hidden, heads, "residual"),
        _gemv_case(launcher, f"{name} gate up, {rows}", rows, 2 * shape.inner, shape.hidden, "gate"),
        _gemv_case(launcher, f"{name} down, {rows}", rows, shape.hidden, shape.inner, "residual"),
        _gemv_case(launcher, f"{name} head, {rows}", rows, shape.vocab, shape.hidden, "logits"),
    ]


def _gemv_case(launcher: Launcher, title: str, rows: int, outputs: int, width: int, kind: str) -> Case:
    read = 2.0 * outputs * width
    weights = [randn(launcher, outputs, width, scale=width**-0.5) for _ in range(copies_for(read))]
    x = randn(launcher, rows, width)
    hidden = Normed(x, randn(launcher, width), 1e-6, 0.0)
    residual = torch.zeros(rows, outputs, dtype=BF16, device=launcher.device)

    def call(weight: torch.Tensor) -> Callable[[], object]:
        if kind == "residual":
            return lambda: gemv(launcher, x, weight, None, residual=residual)
        if kind == "gate":
            return lambda: gemv(launcher, hidden, weight, None, activation="silu")
        return lambda: gemv(launcher, hidden, weight, None, out_dtype=torch.float32 if kind == "logits" else None)

    def library(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.mm(x, weight.t())

    return Case(title, read, 2.0 * rows * outputs * width, [call(w) for w in weights], [library(w) for w in weights])


# ---- what is left of a step ----


def small_cases(launcher: Launcher, name: str, shape: Shape, rows: int) -> list[Case]:
    """One set of inputs each, from the L2 as in a step: the kernel before has just written them."""
    device = launcher.device
    heads, kv, dim = shape.heads, shape.kv_heads, shape.dim
    x, residual, gain = randn(launcher, rows, shape.hidden), randn(launcher, rows, shape.hidden), randn(launcher, shape.hidden)
    both = randn(launcher, rows, 2 * shape.inner)
    qkv, head_gain = randn(launcher, rows, (heads + 2 * kv) * dim), randn(launcher, dim)
    angles = torch.rand(rows, dim // 2, device=device)
    cache = make_cache(launcher, shape, rows, BF16)
    slots = torch.arange(rows, dtype=torch.int64, device=device) * BLOCK + 3
    table = randn(launcher, shape.vocab, shape.hidden)
    ids = torch.randint(0, shape.vocab, (rows,), device=device)
    logits = randn(launcher, rows, shape.vocab, dtype=torch.float32, scale=3.0)

    def drawn(temperature: float) -> Callable[[], object]:
        params = SamplingParams(temperature=temperature, seed=1) if temperature else SamplingParams(temperature=0.0)
        slots_table = SamplingTable(device, rows, shape.vocab)
        buffers = SamplingBuffers(device, rows, shape.vocab)
        for row in range(rows):
            slots_table.write(row, params, row, (), ())
        buffers.rows.copy_(torch.arange(rows, dtype=torch.int32))
        greedy = temperature == 0.0
        return lambda: sampling.sample(launcher, logits, slots_table, buffers, only_greedy=greedy, has_logprobs=False)

    def rotated() -> object:
        projected = rope_cache.Projected(qkv, heads, kv, dim, head_gain, head_gain, None, 1e-6, 0.0, angles, angles, False)
        return rope_cache.rope_and_cache(launcher, projected, slots, cache.k, cache.v)

    gated = torch.zeros_like(x)  # which stay zeros
    gates, taps, inputs = (randn(launcher, *sizes, shape.hidden) for sizes in ((rows, 3), (3,), (rows, BLOCK)))
    starts, lens, tables = (torch.arange(rows + 1, dtype=torch.int32, device=device), torch.full_like(ids, 9).int(),
                            torch.arange(rows, dtype=torch.int32, device=device)[:, None].contiguous())  # fmt: skip

    def convolved() -> object:
        return gated_conv(launcher, gates.flatten(1), taps, None, inputs, starts, lens, tables)

    streams = randn(launcher, STREAMS, rows, shape.hidden)
    weights, none = torch.rand(rows, STREAMS, device=device), torch.zeros(STREAMS * STREAMS, STREAMS, device=device)

    def predicted() -> object:
        return altup.altup_predict(launcher, streams, weights, none, 0.1)

    def corrected() -> object:
        return altup.altup_correct(launcher, streams, x, weights, none[:STREAMS], gain, 0.1)

    made: list[tuple[str, float, Callable[[], object]]] = [
        ("add and norm", 4.0 * x.nbytes, lambda: norm.add_rms_norm(launcher, x, residual, gain, 1e-6, 0.0)),
        ("norm of 8 groups", 2.0 * x.nbytes, lambda: norm.add_rms_norm(launcher, x.view(rows * 8, -1), None, gain, 1e-6, 0.0)),
        ("rope and cache", 2.0 * qkv.nbytes, rotated),
        ("short convolution", 7.0 * x.nbytes, convolved),
        ("gate of attention", 3.0 * x.nbytes, lambda: sigmoid_gate(launcher, gated, gates[:, 0])),
        ("silu and up", 1.5 * both.nbytes, lambda: activation.gated_activation(launcher, both, "silu")),
        ("four streams, predicted", 9.0 * x.nbytes, predicted),
        ("four streams, corrected", 10.0 * x.nbytes, corrected),
        ("xielu", 2.0 * both.nbytes, lambda: xielu(launcher, both, 0.8, 0.7, 0.5, -1e-6)),
        ("squared relu", 2.0 * both.nbytes, lambda: activation.gated_activation(launcher, both, "relu2")),
        ("embedding", 2.0 * x.nbytes, lambda: embedding.embedding(launcher, ids, table)),
        ("draw, greedy", float(logits.nbytes), drawn(0.0)),
        ("draw, temperature", float(logits.nbytes), drawn(0.6)),
    ]
    return [Case(f"{name} {kind}, {rows}", num_bytes, 0.0, [call]) for kind, num_bytes, call in made]


# ---- the gated delta rule, and Mamba-2's ----

DELTA_BEFORE, DELTA_TAPS = 128, 4  # tokens, of which a state is there


def delta_case(
    launcher: Launcher,
    count: int,
    tokens: int,
    keys: int = 16,
    values: int = 32,
    dim: int = 128,
    key_dim: int = 128,
    mamba: bool = False,
) -> Case:
    """Of one layer, with Qwen3.5's heads: `count` sequences of `tokens` new tokens each, behind others. A state is read and
    written once."""
    device, channels = launcher.device, 2 * keys * key_dim + values * dim
    num_bytes = 8.0 * count * values * key_dim * dim + 2.0 * count * tokens * (channels + 2 * values * dim)
    flops = (5.0 if mamba else 8.0) * count * tokens * values * key_dim * dim
    projected = randn(launcher, count * tokens, channels + values * dim)
    num_gates = values if mamba else 2 * values
    gates, taps = randn(launcher, count * tokens, num_gates, dtype=torch.float32), randn(launcher, DELTA_TAPS, channels)
    bias, gain = (randn(launcher, size, dtype=torch.float32) for size in (values, 0 if mamba else dim))
    skip, taps_bias = (randn(launcher, values, dtype=torch.float32), randn(launcher, channels)) if mamba else (None, None)
    decay = -torch.rand(values, device=device)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * tokens
    lens = torch.full((count,), DELTA_BEFORE + tokens, dtype=torch.int32, device=device)
    state_of = torch.arange(count, dtype=torch.int32, device=device)

    def call() -> Callable[[], object]:
        matrices = randn(launcher, count, 2, values, key_dim, dim, dtype=torch.float32)
        inputs = randn(launcher, count, 2, DELTA_TAPS - 1, channels)
        guesses = torch.zeros(count, 2, 0, channels, dtype=inputs.dtype, device=device)
        guess_gates = torch.zeros(count, 2, 0, num_gates, device=device)
        stamps = torch.zeros(count, 2, values, dtype=torch.int32, device=device)
        stamps[:, 0] = DELTA_BEFORE
        states = States(matrices, inputs, guesses, guess_gates, stamps, stamps.clone())
        weights = taps, decay, bias, gain, 1e-6, skip, taps_bias, False
        return lambda: gated_delta(launcher, projected, gates, *weights, states, starts, lens, lens, state_of)

    rule = "state space" if mamba else "delta rule"
    return Case(f"{rule}, {count} x {tokens}", num_bytes, flops, [call() for _ in range(copies_for(num_bytes))])


def state_space_case(launcher: Launcher, count: int, tokens: int, keys: int = 1, values: int = 48, dim: int = 64) -> Case:
    """The same of Mamba-2's rule, with Granite 4 H Tiny's heads."""
    return delta_case(launcher, count, tokens, keys, values, dim, mamba=True)
