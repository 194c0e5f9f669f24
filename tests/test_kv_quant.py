"""The quantized KV cache of the CPU: what is stored against a straight reading in numpy and torch, attention against float64 on
what the stored bytes mean, and a row's bits whatever it is computed with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import KVCache, block_bytes, cache_dtypes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError, UsageError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.mixer_spec import AttentionSpec
from test_kernels_cpu import GENERATOR, Paged, error, randn

BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, FP32: 1e-5}
# Compute type, K, V: every way to unpack in both compute types, alike, mixed, and one side only.
KINDS = [(BF16, INT8, INT8), (BF16, FP8, FP8), (FP32, INT8, FP8), (BF16, BF16, FP8)]
PAIRS = {BF16: 2, FP32: 1}


def quantized(row: np.ndarray, kind: torch.dtype) -> tuple[np.ndarray, np.float32]:
    """(codes, scale) of one row of fp32 by the definition: the largest magnitude gets the largest code."""
    most = np.float32(127 if kind == INT8 else 448)
    scale = np.float32(np.abs(row).max()) / most
    if not np.isfinite(row).all():
        return np.zeros(row.size, np.int8), np.float32(np.nan)
    if scale < np.finfo(np.float32).tiny:
        return np.zeros(row.size, np.int8), np.float32(0)
    if kind == INT8:
        return np.rint(row / scale).astype(np.int8), scale
    return torch.from_numpy(row / scale).to(FP8).view(INT8).numpy(), scale


class QuantizedPaged(Paged):
    """A cache whose stale memory is poisoned: every scale in it is a NaN."""

    def __init__(self, lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
        super().__init__(lens, kv_heads, dim, dtype)
        self.kept = (k, v)
        shapes = cpu.cache_shapes(self.k.shape[0], kv_heads, dim, dtype, self.kept)
        dense = (self.k, self.v)
        self.k, self.v = (
            old if kind == dtype else torch.full((math.prod(shape) // 4,), torch.nan).view(kind).view(shape)
            for old, shape, kind in zip(dense, shapes, self.kept, strict=True)
        )

    def history(self, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [length, kv_heads, dim] float64: what the stored bytes mean."""
        pair, blocks = PAIRS[self.dtype], self.tables[seq].long()
        padded = -(-self.dim // 16) * 16
        k = self._cells(self.k, blocks, (self.dim // pair, 16, pair)).permute(0, 3, 1, 2, 4)
        v = self._cells(self.v, blocks, (16 // pair, padded, pair)).permute(0, 2, 4, 1, 3)
        k, v = k.reshape(-1, self.kv_heads, self.dim), v.reshape(-1, self.kv_heads, padded)[..., : self.dim]
        return k[:length] * self._scales(self.k, blocks)[:length], v[:length] * self._scales(self.v, blocks)[:length]

    def _cells(self, cache: torch.Tensor, blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if cache.dtype == self.dtype:
            return cache[blocks].double()
        codes = cache.view(INT8)[blocks][..., :-64].contiguous().view(cache.dtype)
        return codes.to(torch.float64).reshape(len(blocks), self.kv_heads, *shape)

    def _scales(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        if cache.dtype == self.dtype:
            return torch.ones(1, 1, 1, dtype=torch.float64).expand(len(blocks) * 16, self.kv_heads, 1)
        scales = cache.view(INT8)[blocks][..., -64:].contiguous().view(FP32)  # [blocks, kv_heads, 16]
        return scales.double().permute(0, 2, 1).reshape(-1, self.kv_heads, 1)


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention of one whole sequence in float64, by the formula. q [T, H, D]; k, v [T, K, D]."""
    tokens, heads, _ = q.shape
    keys, values = (side.repeat_interleave(heads // k.shape[1], dim=1) for side in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    scores = scores.masked_fill((distance < 0) | ((distance >= window) if window else distance < 0), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(heads, tokens, 1)), dim=-1)
    return torch.einsum("htl,lhd->thd", torch.softmax(scores, dim=-1)[..., :tokens], values)


# ---- what is stored ----


@pytest.mark.parametrize(("dtype", "k_kind", "v_kind"), KINDS[:3])
@pytest.mark.parametrize("dim", [24, 80])
def test_a_token_is_stored_as_its_definition_says(dim: int, dtype: torch.dtype, k_kind: torch.dtype, v_kind: torch.dtype) -> None:
    tokens, kv_heads = 37, 3
    paged = QuantizedPaged([tokens], kv_heads, dim, dtype, k_kind, v_kind)
    qkv = randn(tokens, 3 * kv_heads, dim) * torch.logspace(-6, 6, tokens)[:, None, None]
    qkv *= 10 ** (3 * randn(tokens, 3 * kv_heads, dim))  # so wide that most of a row lies in the last steps of its type
    qkv[3], qkv[5], qkv[7, :, 4] = 0.0, 1e-40, -3e38
    qkv = qkv.to(dtype)
    paged.step(qkv.reshape(tokens, -1), [tokens], [tokens], kv_heads, half=0)
    found = paged.history(0, tokens)
    for side, kind, first in ((0, k_kind, kv_heads), (1, v_kind, 2 * kv_heads)):
        for t in range(tokens):
            for head in range(kv_heads):
                codes, scale = quantized(qkv[t, first + head].float().numpy(), kind)
                expected = torch.from_numpy(codes).view(kind).double() * float(scale)
                assert torch.equal(found[side][t, head], expected), (t, head)


@pytest.mark.parametrize(("dtype", "k_kind", "v_kind"), KINDS[:3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_comes_out_as_nan(
    bad: float, dtype: torch.dtype, k_kind: torch.dtype, v_kind: torch.dtype
) -> None:
    for part in (1, 2):
        paged = QuantizedPaged([3], 1, 16, dtype, k_kind, v_kind)
        qkv = randn(3, 3, 16, dtype=dtype)
        qkv[1, part, 5] = bad
        paged.step(qkv[:1].reshape(1, -1), [1], [1], 1)
        _, out = paged.step(qkv[1:].reshape(2, -1), [2], [3], 1)
        assert out.isnan().all(), part


@pytest.mark.parametrize(("dtype", "k_kind", "v_kind"), KINDS[:3])
def test_every_code_is_read_as_what_it_means(dtype: torch.dtype, k_kind: torch.dtype, v_kind: torch.dtype) -> None:
    """One key, so its value comes out as it is; the codes are put into the cache by hand."""
    codes = torch.arange(-128, 128).to(INT8)
    values = codes.view(v_kind).float()
    codes = torch.where(values.isnan(), torch.zeros_like(codes), codes)
    paged = QuantizedPaged([1], 1, 256, dtype, k_kind, v_kind)
    paged.step(torch.zeros(1, 3 * 256, dtype=dtype), [1], [1], 1)
    record = paged.v.view(INT8)[int(paged.tables[0, 0]), 0]
    record[:-64].view(16 // PAIRS[dtype], 256, PAIRS[dtype])[0, :, 0] = codes
    record[-64:].view(FP32)[0] = 0.5
    tiles = cpu.attention_tiles(torch.tensor([0, 1]), torch.tensor([1]), 1)
    out = cpu.paged_attention(torch.zeros(1, 1, 256, dtype=dtype), paged.k, paged.v, tiles, paged.tables, 1.0, 0, 0.0, None)
    assert torch.equal(out[0].float(), codes.view(v_kind).float() * 0.5)


# ---- attention ----

CASES = [
    # heads, kv_heads, dim, lens, options
    (3, 1, 24, [33, 1, 17], {}),
    (2, 2, 80, [70, 129], {"window": 37}),
    (8, 1, 128, [150, 64], {"softcap": 5.0}),
    (6, 2, 128, [65, 16, 200], {"sinks": True, "window": 64}),
]


@pytest.mark.parametrize(("dtype", "k_kind", "v_kind"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "lens", "options"), CASES)
def test_attention_equals_float64_on_what_is_stored(
    heads: int, kv_heads: int, dim: int, lens: list[int], options: dict[str, float],
    dtype: torch.dtype, k_kind: torch.dtype, v_kind: torch.dtype,
) -> None:  # fmt: skip
    given: dict[str, object] = dict(options)
    sinks = randn(heads) if options.get("sinks") else None
    given |= {"sinks": sinks, "q_norm": randn(dim, dtype=dtype), "k_norm": randn(dim, dtype=dtype)}
    paged = QuantizedPaged(lens, kv_heads, dim, dtype, k_kind, v_kind)
    # Rows of very different sizes: an answer that forgets a scale, or takes a neighbour's, is far off.
    qkv = (randn(sum(lens), heads + 2 * kv_heads, dim) * torch.exp(randn(sum(lens), 1, 1))).to(dtype)
    q, out = paged.step(qkv.reshape(sum(lens), -1), lens, lens, heads, **given)
    for seq, rows in enumerate(torch.arange(sum(lens)).split(lens)):
        k, v = paged.history(seq, lens[seq])
        window, softcap = int(options.get("window", 0)), float(options.get("softcap", 0.0))
        expected = attention64(q[rows], k, v, dim**-0.5, window, softcap, sinks)
        assert error(out[rows].reshape(lens[seq], heads, dim), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "k_kind", "v_kind"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(6, 2, 24, 0), (8, 1, 80, 37)])
def test_the_same_bits_whatever_the_chunks(
    heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype, k_kind: torch.dtype, v_kind: torch.dtype
) -> None:
    lens = [150, 83]
    qkv = [randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype) for n in lens]
    whole = QuantizedPaged(lens, kv_heads, dim, dtype, k_kind, v_kind)
    _, expected = whole.step(torch.cat(qkv), lens, lens, heads, window=window)
    for chunk in (1, 7, 64):
        parts = QuantizedPaged(lens, kv_heads, dim, dtype, k_kind, v_kind)
        outs: list[list[torch.Tensor]] = [[], []]
        tables = parts.tables
        for begin in range(0, max(lens), chunk):
            ends = [min(n, begin + chunk) for n in lens]
            alive = [s for s in (0, 1) if ends[s] > begin]
            parts.tables = tables[alive].contiguous()
            counts = [ends[s] - begin for s in alive]
            rows = torch.cat([qkv[s][begin : ends[s]] for s in alive])
            _, out = parts.step(rows, counts, [ends[s] for s in alive], heads, window=window)
            for s, piece in zip(alive, out.split(counts), strict=True):
                outs[s].append(piece)
        assert torch.equal(torch.cat([torch.cat(o) for o in outs]), expected)


# ---- the cache as memory ----


@pytest.mark.parametrize(
    ("dtype", "names", "expected"),
    [
        (BF16, ("auto", "auto"), 2 * 2 * 128),
        (BF16, ("int8", "int8"), 2 * (128 + 4)),
        (BF16, ("int8", "bfloat16"), (128 + 4) + 2 * 128),
        (FP32, ("fp8", "auto"), (128 + 4) + 4 * 128),
    ],
)
def test_bytes_of_a_token(dtype: torch.dtype, names: tuple[str, str], expected: int) -> None:
    layout = CpuAttention({2}, dtype, cache_dtypes(names, dtype))
    assert block_bytes([heads(3, 128), heads(1, 128)], layout) == 16 * (3 + 1) * expected


def heads(count: int, dim: int) -> AttentionSpec:
    return AttentionSpec(count, count, dim, None)


@pytest.mark.parametrize("kinds", [(INT8, INT8), (FP8, BF16), (BF16, INT8)])
def test_a_copied_block_takes_its_scales_along(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    cache = KVCache(5, [heads(2, 24), heads(1, 80)], CpuAttention({1}, BF16, kinds))
    assert [tuple(side.dtype for side in layer) for layer in cache.layers] == [kinds, kinds]
    memory = [side.view(torch.uint8) for layer in cache.layers for side in layer]
    for side in memory:
        side.copy_(torch.randint(0, 256, side.shape, generator=GENERATOR))
    before = [side.clone() for side in memory]
    cache.copy_blocks([(3, 0, 3, 0), (1, 4, 1, 4)])
    for side, old in zip(memory, before, strict=True):
        assert torch.equal(side, old[[3, 1, 2, 3, 1]])


# ---- what is refused ----


def test_types_that_do_not_exist_or_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown KV cache type 'q4_0'") as unknown:
        EngineConfig(cache_type_v="q4_0")  # type: ignore[arg-type]
    assert unknown.value.hint is not None
    assert all(name in unknown.value.hint for name in ("auto", "int8", "fp8"))
    with pytest.raises(UnsupportedError, match="float16 where bfloat16"):
        cache_dtypes(("auto", "float16"), BF16)
    assert EngineConfig(kv_cache_dtype="int8", cache_type_v="fp8").cache_types == ("int8", "fp8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"cache_type_v": "int8"}, "auto keys and int8 values on a GPU"), ({"cache_type_k": "fp8"}, "fp8 keys and auto values on")],
)
def test_a_gpu_refuses_what_it_can_not_do(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        CudaPlatform(EngineConfig(**settings), device=None)  # type: ignore[arg-type]


def test_memory_that_cannot_be_had_is_told() -> None:
    """As under `ulimit -v`: less than is free, and more than the process may have."""
    layout = CpuAttention({1}, BF16, (BF16, BF16))
    with pytest.raises(DoesNotFitError, match=r"a KV cache of 4294967296\.0 GiB can't be had"):
        layout.empty_cache(1 << 62)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_narrower_than_keys_are_as_with_zeros_behind_them(dtype: torch.dtype, kept: torch.dtype) -> None:
    heads, kv_heads, dim, narrow, tokens = 6, 2, 48, 18, 70
    before, positions = (heads + kv_heads) * dim, torch.arange(tokens)
    qkv = torch.randn(tokens, before + kv_heads * narrow, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.zeros(tokens, before + kv_heads * dim, dtype=dtype)
    wide[:, :before] = qkv[:, :before]
    wide[:, before:].view(tokens, kv_heads, dim)[..., :narrow] = qkv[:, before:].view(tokens, kv_heads, narrow)
    angles = positions[:, None].float() / 100 ** (torch.arange(dim // 2) / (dim // 2))
    tables, run = torch.arange(8, dtype=torch.int32)[None], torch.arange(tokens, 0, -1, dtype=torch.int32)
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    found = []
    for rows, width in ((qkv, narrow), (wide, dim)):
        k, v = (torch.zeros(shape, dtype=kept) for shape in cpu.cache_shapes(8, kv_heads, dim, dtype, (kept, kept), width))
        q = cpu.rope_and_cache(
            rows, heads, kv_heads, dim, None, None, None, 1e-6, 0.0, angles.cos(), angles.sin(), False, positions, run, k, v,
            value_dim=width,
        )  # fmt: skip
        tiles = cpu.attention_tiles(ends, ends[1:], heads // kv_heads)
        out = cpu.paged_attention(q, k, v, tiles, tables, dim**-0.5, 0, 0.0, None, value_dim=width)
        found.append(out.view(tokens, heads, width)[..., :narrow])
    assert torch.equal(*found)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_that_is_not_finite_spoils_nobody_before_it(dtype: torch.dtype, kept: torch.dtype) -> None:
    heads, dim, tokens, place = 2, 16, 21, 18
    positions, angles = torch.arange(tokens), torch.zeros(tokens, dim // 2)
    qkv = torch.randn(tokens, (heads + 2) * dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    spoilt = qkv.clone()
    spoilt[place, -1] = torch.nan
    ends, run = torch.tensor([0, tokens], dtype=torch.int32), torch.arange(tokens, 0, -1, dtype=torch.int32)
    found = []
    for rows in (qkv, spoilt):
        k, v = (torch.zeros(shape, dtype=kept) for shape in cpu.cache_shapes(2, 1, dim, dtype, (kept, kept)))
        q = cpu.rope_and_cache(
            rows, heads, 1, dim, None, None, None, 1e-6, 0.0, angles.cos(), angles.sin(), False, positions, run, k, v
        )
        tiles, table = cpu.attention_tiles(ends, ends[1:], heads), torch.arange(2, dtype=torch.int32)[None]
        found.append(cpu.paged_attention(q, k, v, tiles, table, dim**-0.5, 0, 0.0, None))
    assert torch.equal(found[1][:place], found[0][:place])
    assert found[1][place:].isnan().all()
