"""decode_attention.cu and decode_attention_any.cu, emulated, against the formula in float64; what they do to heads beforehand
against rope_cache.cu, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from emulation.compare import behind_nan, close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels import decode_attention as kernels
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention
from nanovllm_cli.kernels.rope_cache import Projected, rope_and_cache

pytestmark = needs_emulation
BF16, HALF, FP8, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
LENS = [1, 15, 16, 0, 17, 33, 130, 517]


@dataclass
class Step:
    """Inputs of a decode step. Everything in the caches that no query may see is NaN, or has a scale of NaN, and so is the newest
    token's place, unless the cache is another layer's. sequences: see `decode_attention`."""

    projected: Projected
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    options: dict
    sequences: torch.Tensor | None = None

    def run(self, emulator: Emulator, scratch: DecodeScratch) -> torch.Tensor:
        lens, options = (self.block_tables, self.kv_lens), self.options | {"sequences": self.sequences}
        return decode_attention(emulator, self.projected, self.k_cache, self.v_cache, *lens, scratch, **options)

    def rows(self, *rows: int, width: int) -> Step:
        """These sequences alone, with tables of another width."""
        index = torch.tensor(rows, dtype=torch.long)
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        columns = min(width, self.block_tables.shape[1])
        tables[:, :columns] = self.block_tables[index, :columns]
        mine = {name: getattr(self.projected, name)[index] for name in ("qkv", "cos", "sin")}
        return replace(self, projected=self.projected._replace(**mine), block_tables=tables, kv_lens=self.kv_lens[index])

    @property
    def is_int8(self) -> bool:
        return self.k_cache.dtype == INT8

    def with_own_caches(self) -> Step:
        scales = {name: self.options[name].clone() for name in ("k_scale", "v_scale") if self.is_int8}
        return replace(self, k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone(), options=self.options | scales)

    def as_tokens(self, counts: list[int], padding: int = 0) -> Step:
        """The last tokens of each sequence, so many, as rows with a length each, behind them rows of padding."""
        lens = [length - count + 1 + i for length, count in zip(self.kv_lens.tolist(), counts, strict=True) for i in range(count)]
        rows, (_, heads, _, dim, *_) = len(lens) + padding, self.projected
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        queries, angles = random(rows, heads * dim, dtype=self.projected.qkv.dtype), torch.empty(rows, 0)
        return replace(
            self,
            projected=self.projected._replace(qkv=queries, cos=angles, sin=angles),
            kv_lens=torch.tensor(lens + [0] * padding, dtype=torch.int32),
            sequences=torch.cat([numbers, torch.zeros(padding)]).int(),
        )

    def with_own_tables(self) -> Step:
        assert self.sequences is not None
        return replace(self, block_tables=self.block_tables[self.sequences.long()], sequences=None)

    def scratch(self, emulator: Emulator, most: int | None = None, fixed: bool = False) -> DecodeScratch:
        """most: sequences."""
        _, heads, kv_heads, dim, *_ = self.projected
        tokens = self.block_tables.shape[1] * self.k_cache.shape[2]
        scratch = DecodeScratch(emulator, most or len(self.kv_lens), heads, kv_heads, dim, tokens, fixed)
        scratch.partials.fill_(torch.nan)
        scratch.sums.fill_(torch.nan)
        return scratch

    def slots(self) -> torch.Tensor:
        """Of the newest tokens; -1 for padding."""
        last, size = self.kv_lens.long() - 1, self.k_cache.shape[2]
        block = self.block_tables.gather(1, (last.clamp_min(0) // size)[:, None])[:, 0].long()
        return torch.where(last < 0, -1, block * size + last % size)

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, H, D]; k and v [B, K, D] as the cache has them. For heads that are neither normed nor rotated."""
        qkv, heads, kv_heads, dim, *_ = self.projected
        if self.projected.shared:
            k, v = (cache.transpose(1, 2).flatten(0, 1)[self.slots()] for cache in (self.k_cache, self.v_cache))
            return qkv.view(-1, heads, dim), k, v
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        if self.is_int8:
            k, v = (reference.int8_rows(x.float())[0] for x in (k, v))
        elif self.options["k_scale"] is not None:
            k, v = ((x.float() / self.options[name][:, None]).clamp(-448, 448) for x, name in ((k, "k_scale"), (v, "v_scale")))
        return q, k.to(self.k_cache.dtype), v.to(self.k_cache.dtype)

    def expected_caches(self) -> list[torch.Tensor]:
        caches = [self.k_cache.clone(), self.v_cache.clone()]
        for cache, rows in zip(caches, self.split()[1:], strict=True):
            reference.write_cache(cache, rows, self.slots(), None)
        return caches

    def expected_scales(self) -> list[torch.Tensor]:
        """Of int8, those of the newest tokens, too."""
        _, heads, kv_heads, dim, *_ = self.projected
        found = [self.options["k_scale"].clone(), self.options["v_scale"].clone()]
        if self.projected.shared:
            return found
        _, *newest = self.projected.qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        for scales, rows in zip(found, newest, strict=True):
            reference.write_cache(scales[..., None], reference.int8_rows(rows.float())[1][..., None], self.slots(), None)
        return found

    def expected(self) -> torch.Tensor:
        """float64 [B, H * D]."""
        options = self.options
        scales = [scale[..., None] for scale in self.expected_scales()] if self.is_int8 else []
        group = self.projected.heads // self.projected.kv_heads
        rows = []
        queries, *newest = self.split()
        for row, (q, table, length) in enumerate(zip(queries.double(), self.block_tables, self.kv_lens.tolist(), strict=True)):
            if length == 0:
                rows.append(torch.zeros(q.numel(), dtype=torch.float64))
                continue
            first = max(0, length - options["window"]) if options["window"] else 0
            old = (_tokens(cache, table, first, length - 1) for cache in (self.k_cache, self.v_cache))
            k, v = (torch.cat((before, last[row].double()[None])) for before, last in zip(old, newest, strict=True))
            if scales:
                k, v = (side * _tokens(scale, table, first, length) for side, scale in zip((k, v), scales, strict=True))
            elif options["k_scale"] is not None:
                k, v = k * options["k_scale"][:, None].double(), v * options["v_scale"][:, None].double()
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            scores = torch.einsum("hd,lhd->hl", q, k) * options["scale"]
            if options["softcap"]:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if options["distances"] is not None:
                own = (options["distances"].shape[1] - 64) // 2
                scores += options["distances"][:, own + first + 1 - length : own + 1]
            if options["sinks"] is not None:
                scores = torch.cat((scores, options["sinks"].double()[:, None]), dim=1)
            weights = torch.softmax(scores, dim=1)[:, : length - first]
            rows.append(torch.einsum("hl,lhd->hd", weights, v).flatten())
        return torch.stack(rows)


def _tokens(cache: torch.Tensor, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """[tokens, K, D] from the cache, one by one."""
    size = cache.shape[2]
    found = [cache[int(table[i // size]), :, i % size] for i in range(first, last)]
    return torch.stack(found).double() if found else torch.empty(0, cache.shape[1], cache.shape[3], dtype=torch.float64)


def step(
    types: tuple[torch.dtype, torch.dtype],
    heads: tuple[int, int, int],
    lens: list[int],
    block_size: int = 16,
    width: int | None = None,
    shared: bool = False,
    **options,
) -> Step:
    """heads: kv heads, group, head dim; they are neither normed nor rotated. Tables are shuffled; width is that of the longest
    sequence and one more."""
    kv_heads, group, dim = heads
    needed = [-(-length // block_size) for length in lens]
    width = width or max(needed) + 1
    order = (torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(5)) + 1).tolist()
    tables = torch.zeros(len(lens), width, dtype=torch.int32)
    shape = (len(order) + 1, kv_heads, block_size, dim)
    caches = [torch.full(shape, 99 if types[1] == INT8 else torch.nan).to(types[1]) for _ in range(2)]
    scales: dict[str, torch.Tensor | None] = {"k_scale": None, "v_scale": None}
    if types[1] in (FP8, INT8):
        scales = {name: torch.full(shape[:3], torch.nan) if types[1] == INT8 else torch.rand(kv_heads) + 0.5 for name in scales}
    for row, length in enumerate(lens):
        for i in range(needed[row]):
            tables[row, i] = order.pop()
        first = max(0, length - options["window"]) if options.get("window") else 0
        for token in range(first, length if shared else length - 1):
            for cache, scale, size in zip(caches, scales.values(), (0.3, 1.0), strict=True):
                rows, place = random(kv_heads, dim), (tables[row, token // block_size], slice(None), token % block_size)
                if types[1] == INT8:
                    assert scale is not None
                    rows, scale[place] = reference.int8_rows(rows * 10 ** (size * random(kv_heads, 1)))
                cache[place] = rows.to(types[1])
    options = {"scale": dim**-0.5, "window": 0, "softcap": 0.0, "sinks": None, "distances": None} | scales | options
    options["distances"] = random(kv_heads * group, 2 * max(lens) + 64) if options["distances"] else None
    if options["sinks"]:
        options["sinks"] = random(kv_heads * group)
    qkv = random(len(lens), kv_heads * (group + (0 if shared else 2)) * dim, dtype=types[0])
    angles = torch.empty(len(lens), 0)
    projected = Projected(qkv, kv_heads * group, kv_heads, dim, None, None, None, 0.0, 0.0, angles, angles, False, shared)
    return Step(projected, *caches, tables, torch.tensor(lens, dtype=torch.int32), options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


STEPS = {
    "bf16": lambda: step((BF16, BF16), (2, 2, 128), LENS),
    "bf16, group of 1, window": lambda: step((BF16, BF16), (2, 1, 128), LENS, window=40),
    "half, group of 7, blocks of 64, window": lambda: step((HALF, HALF), (2, 7, 64), LENS, block_size=64, window=200),
    "fp8, group of 3, sinks": lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True),
    "fp8, group of 16, softcap": lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0),
    "int8, group of 16, softcap": lambda: step((BF16, INT8), (1, 16, 80), LENS, softcap=2.0),
    "half and int8, blocks of 64, window": lambda: step((HALF, INT8), (2, 2, 128), LENS, block_size=64, window=40),
    "192 dims, group of 12": lambda: step((BF16, BF16), (1, 12, 192), LENS, window=100),
    "192 dims, group of 20": lambda: step((BF16, BF16), (1, 20, 192), [40, 3]),
    "17 dims, group of 3": lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0),
    "100 dims, fp8, group of 9": lambda: step((HALF, FP8), (1, 9, 100), LENS, sinks=True, window=33),
    "100 dims, int8, group of 9": lambda: step((HALF, INT8), (1, 9, 100), LENS, sinks=True, window=33),
    "half keys to bf16 queries": lambda: step((BF16, HALF), (2, 1, 24), LENS, softcap=1.0, window=7),
    "512 dims": lambda: step((BF16, BF16), (2, 1, 512), LENS),
    "512 dims, half, group of 2, window": lambda: step((HALF, HALF), (1, 2, 512), LENS, window=40),
    "512 dims, fp8, group of 8, blocks of 64": lambda: step((BF16, FP8), (1, 8, 512), LENS, block_size=64),
    "by distance": lambda: step((BF16, BF16), (4, 1, 64), LENS, distances=True),
    "by distance, int8, group of 12, window": lambda: step((BF16, INT8), (2, 12, 64), LENS, distances=True, window=100),
    "by distance, 100 dims": lambda: step((HALF, HALF), (3, 1, 100), LENS, distances=True),
    "511 dims, group of 3": lambda: step((BF16, BF16), (1, 3, 511), [17, 0, 33], sinks=True),
}
SHARED = {
    "bf16": lambda: step((BF16, BF16), (2, 2, 128), LENS, shared=True),
    "bf16, group of 1, window": lambda: step((BF16, BF16), (2, 1, 128), LENS, window=40, shared=True),
    "half, blocks of 64, window": lambda: step((HALF, HALF), (2, 7, 64), LENS, block_size=64, window=200, shared=True),
    "fp8, group of 3, sinks": lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True, shared=True),
    "fp8, group of 16, softcap": lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0, shared=True),
    "int8, 256 dims, window": lambda: step((BF16, INT8), (2, 4, 256), LENS, window=128, shared=True),
    "17 dims, group of 3": lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0, shared=True),
    "100 dims, fp8, group of 9": lambda: step((HALF, FP8), (1, 9, 100), LENS, sinks=True, window=33, shared=True),
    "512 dims": lambda: step((BF16, BF16), (2, 1, 512), LENS, shared=True),
    "512 dims, half, group of 2, window": lambda: step((HALF, HALF), (1, 2, 512), LENS, window=40, shared=True),
    "512 dims, group of 8": lambda: step((BF16, BF16), (1, 8, 512), LENS, shared=True),
    "512 dims, fp8, group of 4, blocks of 64": lambda: step((BF16, FP8), (2, 4, 512), LENS, block_size=64, shared=True),
    "576 dims, group of 5": lambda: step((HALF, HALF), (1, 5, 576), LENS, shared=True),
    "576 dims, fp8, group of 1": lambda: step((BF16, FP8), (1, 1, 576), LENS, shared=True),
}
"""Of layers that read another's cache."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [*STEPS, *(f"shared, {name}" for name in SHARED)])
def test_each_row_is_one_rounding_from_float64(name: str, order: int) -> None:
    inputs = STEPS[name]() if name in STEPS else SHARED[name.removeprefix("shared, ")]()
    emulator, caches, expected = Emulator(order), inputs.expected_caches(), inputs.expected()
    scales = inputs.expected_scales() if inputs.is_int8 else []
    close_to_rounding(inputs.run(emulator, inputs.scratch(emulator)), expected)
    assert same_bits(inputs.k_cache, caches[0])
    assert same_bits(inputs.v_cache, caches[1])
    assert all(same_bits(inputs.options[name], wanted) for name, wanted in zip(("k_scale", "v_scale"), scales, strict=False))


ROTATED: dict[str, tuple[Callable[[], Step], int, bool, str]] = {
    # What is rotated, of which dims, interleaved or not, and what is normed.
    "bf16": (lambda: step((BF16, BF16), (2, 2, 128), LENS), 128, False, "qk"),
    "values too": (lambda: step((BF16, BF16), (2, 2, 128), LENS), 128, False, "qkv"),
    "values alone, fp8": (lambda: step((BF16, FP8), (2, 3, 32), LENS), 32, False, "v"),
    "values, no keys, 256 dims": (lambda: step((BF16, BF16), (1, 4, 256), [33, 0, 130], window=100), 256, False, "qv"),
    "values, 17 dims": (lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0), 16, True, "kv"),
    "512 dims": (lambda: step((BF16, BF16), (1, 2, 512), [33, 0, 130]), 512, False, "qkv"),
    "512 dims, fp8, 128 rotated": (lambda: step((HALF, FP8), (1, 4, 512), [33, 0, 130]), 128, False, "qkv"),
    "bf16, window": (lambda: step((BF16, BF16), (2, 1, 128), LENS, window=40), 64, True, "k"),
    "half, blocks of 64": (lambda: step((HALF, HALF), (2, 7, 64), LENS, block_size=64, window=200), 32, False, ""),
    "fp8, sinks": (lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True), 16, True, "qk"),
    "fp8, group of 16, softcap": (lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0), 80, False, "q"),
    "192 dims, group of 20": (lambda: step((BF16, BF16), (1, 20, 192), [40, 17, 3]), 192, False, "qk"),
    "256 dims, 100 rotated": (lambda: step((BF16, BF16), (1, 8, 256), [33, 0, 130]), 100, False, "qk"),
    "17 dims, group of 3": (lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0), 16, True, "qk"),
    "100 dims, fp8, group of 9": (lambda: step((HALF, FP8), (1, 9, 100), LENS, sinks=True, window=33), 100, False, "qk"),
    "turned first, bf16": (lambda: step((BF16, BF16), (2, 2, 128), LENS), 128, False, "qk"),
    "turned first, 17 dims": (lambda: step((BF16, BF16), (2, 3, 17), LENS), 16, True, "qk"),
}


@pytest.mark.parametrize("splits", [1, 9], ids=["a split", "splits"])
@pytest.mark.parametrize("name", ROTATED)
def test_bits_are_those_of_rope_and_cache_and_then_attention(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of what is neither normed nor rotated takes the other's results: angles of 0 change nothing."""
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64 if splits > 1 else 1024)
    make, rotary, interleaved, normed = ROTATED[name]
    inputs, emulator = make(), Emulator(7, num_multiprocessors=132)
    plain, dim, count = inputs.projected, inputs.projected.dim, len(inputs.kv_lens)
    gains = {f"{head}_norm": random(dim, dtype=plain.qkv.dtype) for head in normed}
    angles = random(count, rotary // 2, scale=100)
    if plain.kv_heads > 1:  # as behind gates
        plain = plain._replace(qkv=behind_nan(plain.qkv, plain.heads * dim))
    turned = plain._replace(**gains, eps=1e-6, norm_offset=0.5, cos=angles.cos(), sin=angles.sin(), interleaved=interleaved)
    if name.startswith("turned first"):  # each head of q has its own gains then
        turned = turned._replace(turned=True, q_norm=random(plain.heads, dim, dtype=plain.qkv.dtype))
    scales = [None, None]
    if inputs.options["k_scale"] is not None:  # powers of two, which can be multiplied with again
        scales = [2.0 ** torch.randint(-2, 3, (plain.kv_heads,)).float() for _ in "kv"]
    inputs.options |= dict(zip(("k_scale", "v_scale"), scales, strict=True))

    before, fused = inputs.with_own_caches(), replace(inputs.with_own_caches(), projected=turned)
    q = rope_and_cache(emulator, turned, inputs.slots(), inputs.k_cache, inputs.v_cache, *scales)
    stored = [cache.transpose(1, 2).flatten(0, 1)[inputs.slots()] for cache in (inputs.k_cache, inputs.v_cache)]
    factors = (1.0 if scale is None else scale[:, None] for scale in scales)
    k, v = ((rows.float() * factor).to(q.dtype) for rows, factor in zip(stored, factors, strict=True))
    qkv = torch.cat((q, k, v), dim=1).flatten(1)
    before.projected = plain._replace(qkv=qkv, cos=torch.ones_like(angles), sin=torch.zeros_like(angles))

    expected = before.run(emulator, before.scratch(emulator))
    assert torch.equal(fused.run(emulator, fused.scratch(emulator)), expected)
    assert same_bits(fused.k_cache, inputs.k_cache)
    assert same_bits(fused.v_cache, inputs.v_cache)

    reading = turned._replace(qkv=turned.qkv[:, : plain.heads * dim].contiguous(), shared=True)
    if plain.kv_heads > 1:
        reading = reading._replace(qkv=behind_nan(reading.qkv, plain.heads * dim))
    again = replace(fused, projected=reading)  # a layer that finds what another has written
    assert torch.equal(again.run(emulator, again.scratch(emulator)), expected)
    assert same_bits(fused.k_cache, inputs.k_cache)
    assert same_bits(fused.v_cache, inputs.v_cache)


@pytest.mark.parametrize("order", ORDERS)
def test_many_splits_are_combined_and_scratch_may_be_used_again(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64)
    emulator = Emulator(order, num_multiprocessors=132)
    inputs = step((BF16, FP8), (2, 3, 32), LENS, sinks=True)
    scratch = inputs.scratch(emulator)
    for window in (0, 300, 64):
        inputs.options["window"] = window
        close_to_rounding(inputs.run(emulator, scratch), inputs.expected())
        assert not scratch.counters.any()
    smaller = inputs.rows(7, 2, 6, width=33)
    close_to_rounding(smaller.run(emulator, scratch), smaller.expected())


TOKENS = {
    "bf16, group of 2": lambda: step((BF16, BF16), (1, 2, 512), [130, 1, 33, 517], shared=True),
    "half, group of 1, window": lambda: step((HALF, HALF), (2, 1, 512), [130, 1, 33, 517], shared=True),
    "fp8, group of 8, blocks of 64": lambda: step((BF16, FP8), (1, 8, 512), [130, 1, 33, 517], block_size=64, shared=True),
    "17 dims, sinks": lambda: step((BF16, BF16), (1, 3, 17), [130, 1, 33, 517], sinks=True, shared=True),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_prompts_are_rows_of_their_own(name: str, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a prompt's, a decode, the end of a chunk, and two that are cut into several splits; padding is nobody's."""
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64)
    inputs = TOKENS[name]().as_tokens([3, 1, 33, 2], padding=2)
    inputs.options["window"] = 40 if "window" in name else 0
    emulator = Emulator(order, num_multiprocessors=32)
    got = inputs.run(emulator, inputs.scratch(emulator))
    close_to_rounding(got, inputs.with_own_tables().expected())
    assert not got[-2:].any()


def test_tokens_of_prompts_have_one_kernel_where_decodes_have_tensor_cores() -> None:
    inputs, emulator = step((BF16, BF16), (1, 5, 80), [130, 1, 33, 517], shared=True).as_tokens([3, 1, 33, 2]), Emulator()
    close_to_rounding(inputs.run(emulator, inputs.scratch(emulator)), inputs.with_own_tables().expected())
    assert emulator.launches == {"decode_attention_any": 1}


@pytest.mark.parametrize("fixed", [False, True])
def test_where_the_scratch_is_small_rows_take_several_launches(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64)
    monkeypatch.setattr(kernels, "FIXED_SPLIT", 64)
    whole = TOKENS["bf16, group of 2"]().as_tokens([3, 1, 33, 2], padding=2)
    for inputs in (whole, whole.with_own_tables()):
        emulator, at_once = Emulator(num_multiprocessors=32), Emulator(num_multiprocessors=32)
        expected = inputs.run(at_once, inputs.scratch(at_once, fixed=fixed))
        assert torch.equal(inputs.run(emulator, inputs.scratch(emulator, 1, fixed)), expected)
        assert at_once.launches["decode_attention_any"] == 1
        assert emulator.launches["decode_attention_any"] > 2


@pytest.mark.parametrize("most", [4, 64], ids=["longer splits", "splits"])
@pytest.mark.parametrize("name", TOKENS)
def test_with_fixed_splits_a_tokens_bits_are_its_own(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch, with any table, on any GPU, decoded or in a prompt; also where the grid has fewer splits than it takes."""
    monkeypatch.setattr(kernels, "FIXED_SPLIT", 64)
    monkeypatch.setattr(kernels, "MAX_SPLITS", most)
    inputs = TOKENS[name]().as_tokens([3, 1, 33, 2], padding=2)
    inputs.options["window"] = 300 if "window" in name else 0
    emulator = Emulator(num_multiprocessors=132)
    expected = inputs.run(emulator, inputs.scratch(emulator, fixed=True))
    for row in (0, 3, 5, 37, 38):
        width = -(-int(inputs.kv_lens[row]) // inputs.k_cache.shape[2])
        for more, multiprocessors in ((0, 4), (3, 300)):
            alone, emulator = inputs.with_own_tables().rows(row, width=width + more), Emulator(7, 90, multiprocessors)
            got = alone.run(emulator, alone.scratch(emulator, fixed=True))
            assert torch.equal(got, expected[row : row + 1])


def test_every_number_of_splits_covers_every_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LEAST_SPLIT", 64)
    inputs = step((BF16, FP8), (1, 1, 32), [1, 63, 64, 65, 300, 517])
    for multiprocessors in range(1, 7):
        emulator = Emulator(num_multiprocessors=multiprocessors)
        close_to_rounding(inputs.run(emulator, inputs.scratch(emulator)), inputs.expected())


def far_step() -> Step:
    """Two sequences, one of which has its tokens beyond 2^31 elements into the caches."""
    inputs = step((BF16, FP8), (1, 3, 32), [20, 20])
    num_blocks = 2**31 // (16 * 32) + 4
    caches = [cpu.zeros(num_blocks * 16 * 32, torch.uint8).view(FP8).view(num_blocks, 1, 16, 32) for _ in range(2)]
    for cache, small in zip(caches, (inputs.k_cache, inputs.v_cache), strict=True):
        cache[: len(small)] = small.view(torch.uint8).view(FP8)
        for i in range(2):
            cache[num_blocks - 2 + i] = small[inputs.block_tables[1, i]]
    inputs.block_tables[1, :2] = torch.tensor([num_blocks - 2, num_blocks - 1])
    return replace(inputs, k_cache=caches[0], v_cache=caches[1])


def test_caches_beyond_two_to_the_31_elements() -> None:
    inputs, emulator = far_step(), Emulator()
    close_to_rounding(inputs.run(emulator, inputs.scratch(emulator)), inputs.expected())


@pytest.mark.parametrize("bug", ["BARRIER", "PAGE", "TAIL", "COUNTER", "INT32", "DISTANCE"])
def test_planted_bugs_are_found(bug: str) -> None:
    inputs = far_step() if bug == "INT32" else step((BF16, FP8), (2, 3, 32), [517, 20], distances=bug == "DISTANCE")
    found = 0
    for order in ORDERS:
        emulator = Emulator(order, bugs=(bug,))
        scratch = inputs.scratch(emulator)
        try:
            for _ in range(2):
                inputs.projected.qkv.neg_()  # so that an output that was not written is not right by chance
                close_to_rounding(inputs.run(emulator, scratch), inputs.expected())
        except (AssertionError, KernelFailed):
            found += 1
    assert found


def test_old_gpus_have_tensor_cores_for_half_only() -> None:
    assert kernels.choose(75, BF16, BF16, 128, 4, 16)[0].stem == "decode_attention_any"
    assert kernels.choose(75, HALF, HALF, 128, 4, 16)[0].stem == "decode_attention"
    assert kernels.choose(75, BF16, FP8, 128, 4, 16)[0].stem == "decode_attention"
    assert kernels.choose(80, BF16, BF16, 128, 4, 16)[0].stem == "decode_attention"
    for kernel in kernels.variants():
        constants = dict(kernel.constants)
        needs_80 = kernel.stem == "decode_attention" and constants["KV_DTYPE"] == "bf16"
        has_codes = constants["KV_DTYPE"] in ("fp8", "int8_t")
        needs_89 = has_codes and (constants["HEAD_DIM"], constants["ROWS"]) in ((512, 4), (576, 2))
        assert kernel.min_capability == (80 if needs_80 else 89 if needs_89 else 75)
    assert [kernels.choose(each, BF16, FP8, 512, 8, 16)[1] for each in (75, 86, 89, 90)] == [2, 2, 4, 4]
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        kernels.choose(70, HALF, HALF, 128, 4, 16)


def test_splits_fill_the_gpu_and_no_more() -> None:
    h200 = Emulator(num_multiprocessors=132)
    for batch, expected in ((1, 64), (32, 7), (128, 2), (256, 1)):
        assert kernels.num_splits(h200, batch * 8, 40960) == expected
    assert kernels.num_splits(h200, 8, 16) == 1


def test_no_sequences_is_no_launch() -> None:
    emulator = Emulator()
    inputs = step((BF16, BF16), (2, 2, 128), [5]).rows(width=2)
    assert inputs.run(emulator, DecodeScratch(emulator, 1, 4, 2, 128, 64)).shape == (0, 512)
    assert not emulator.launches


def spoil_projected(inputs: Step, **fields: object) -> None:
    inputs.projected = inputs.projected._replace(**fields)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: spoil_projected(s, qkv=s.projected.qkv.T.contiguous().T),
        lambda s: spoil_projected(s, heads=3),
        lambda s: spoil_projected(s, qkv=s.projected.qkv.float()),
        lambda s: spoil_projected(s, k_norm=torch.ones(64, dtype=BF16)),
        lambda s: spoil_projected(s, cos=torch.ones(2, 80), sin=torch.ones(2, 80)),
        lambda s: spoil_projected(s, sin=torch.ones(1, 0)),
        lambda s: setattr(s, "v_cache", s.v_cache.half()),
        lambda s: setattr(s, "k_cache", s.k_cache.transpose(1, 2)),
        lambda s: setattr(s, "kv_lens", s.kv_lens.long()),
        lambda s: setattr(s, "block_tables", s.block_tables[:, ::2]),
        lambda s: s.options.update(sinks=torch.zeros(3)),
        lambda s: s.options.update(k_scale=torch.ones(4)),
    ],
    ids=[
        "strides", "heads", "type", "norm", "angles", "sines", "cache types", "cache strides", "lengths", "tables", "sinks",
        "scales",
    ],
)
def test_what_the_kernel_would_misread_is_refused(spoil) -> None:
    emulator = Emulator()
    inputs = step((BF16, BF16), (2, 2, 128), [5, 40])
    scratch = inputs.scratch(emulator)
    spoil(inputs)
    with pytest.raises((AssertionError, KeyError)):
        inputs.run(emulator, scratch)


def test_scratch_for_less_is_refused() -> None:
    emulator = Emulator(num_multiprocessors=132)
    inputs = step((BF16, FP8), (2, 3, 32), [517, 20])
    with pytest.raises(AssertionError, match="scratch"):
        inputs.run(emulator, DecodeScratch(emulator, 1, 6, 2, 32, 128))
