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
BF16, HALF, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENS = [1, 15, 16, 0, 17, 33, 130, 517]


@dataclass
class Step:
    """Inputs of a decode step. Everything in the caches that no query may see is NaN, and so is the newest token's place."""

    projected: Projected
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    options: dict

    def run(self, emulator: Emulator, scratch: DecodeScratch) -> torch.Tensor:
        lens = (self.block_tables, self.kv_lens)
        return decode_attention(emulator, self.projected, self.k_cache, self.v_cache, *lens, scratch, **self.options)

    def rows(self, *rows: int, width: int) -> Step:
        """These sequences alone, with tables of another width."""
        index = torch.tensor(rows, dtype=torch.long)
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        columns = min(width, self.block_tables.shape[1])
        tables[:, :columns] = self.block_tables[index, :columns]
        mine = {name: getattr(self.projected, name)[index] for name in ("qkv", "cos", "sin")}
        return replace(self, projected=self.projected._replace(**mine), block_tables=tables, kv_lens=self.kv_lens[index])

    def with_own_caches(self) -> Step:
        return replace(self, k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())

    def scratch(self, emulator: Emulator) -> DecodeScratch:
        _, heads, kv_heads, dim, *_ = self.projected
        tokens = self.block_tables.shape[1] * self.k_cache.shape[2]
        scratch = DecodeScratch(emulator, len(self.kv_lens), heads, kv_heads, dim, tokens)
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
        q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        if self.options["k_scale"] is not None:
            k, v = ((x.float() / self.options[name][:, None]).clamp(-448, 448) for x, name in ((k, "k_scale"), (v, "v_scale")))
        return q, k.to(self.k_cache.dtype), v.to(self.k_cache.dtype)

    def expected_caches(self) -> list[torch.Tensor]:
        caches = [self.k_cache.clone(), self.v_cache.clone()]
        for cache, rows in zip(caches, self.split()[1:], strict=True):
            reference.write_cache(cache, rows, self.slots(), None)
        return caches

    def expected(self) -> torch.Tensor:
        """float64 [B, H * D]."""
        options = self.options
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
            if options["k_scale"] is not None:
                k, v = k * options["k_scale"][:, None].double(), v * options["v_scale"][:, None].double()
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            scores = torch.einsum("hd,lhd->hl", q, k) * options["scale"]
            if options["softcap"]:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
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
    caches = [torch.full(shape, torch.nan).to(types[1]) for _ in range(2)]
    for row, length in enumerate(lens):
        for i in range(needed[row]):
            tables[row, i] = order.pop()
        first = max(0, length - options["window"]) if options.get("window") else 0
        for token in range(first, length - 1):
            for cache in caches:
                cache[tables[row, token // block_size], :, token % block_size] = random(kv_heads, dim).to(types[1])
    scales = {name: (torch.rand(kv_heads) + 0.5 if types[1] == FP8 else None) for name in ("k_scale", "v_scale")}
    options = {"scale": dim**-0.5, "window": 0, "softcap": 0.0, "sinks": None} | scales | options
    if options["sinks"]:
        options["sinks"] = random(kv_heads * group)
    qkv, angles = random(len(lens), kv_heads * (group + 2) * dim, dtype=types[0]), torch.empty(len(lens), 0)
    projected = Projected(qkv, kv_heads * group, kv_heads, dim, None, None, 0.0, 0.0, angles, angles, False)
    return Step(projected, *caches, tables, torch.tensor(lens, dtype=torch.int32), options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


STEPS = {
    "bf16": lambda: step((BF16, BF16), (2, 2, 128), LENS),
    "bf16, group of 1, window": lambda: step((BF16, BF16), (2, 1, 128), LENS, window=40),
    "half, group of 7, blocks of 64, window": lambda: step((HALF, HALF), (2, 7, 64), LENS, block_size=64, window=200),
    "fp8, group of 3, sinks": lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True),
    "fp8, group of 16, softcap": lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0),
    "192 dims, group of 12": lambda: step((BF16, BF16), (1, 12, 192), LENS, window=100),
    "192 dims, group of 20": lambda: step((BF16, BF16), (1, 20, 192), [40, 3]),
    "17 dims, group of 3": lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0),
    "100 dims, fp8, group of 9": lambda: step((HALF, FP8), (1, 9, 100), LENS, sinks=True, window=33),
    "half keys to bf16 queries": lambda: step((BF16, HALF), (2, 1, 24), LENS, softcap=1.0, window=7),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", STEPS)
def test_each_row_is_one_rounding_from_float64(name: str, order: int) -> None:
    inputs = STEPS[name]()
    emulator, caches = Emulator(order), inputs.expected_caches()
    close_to_rounding(inputs.run(emulator, inputs.scratch(emulator)), inputs.expected())
    assert same_bits(inputs.k_cache, caches[0])
    assert same_bits(inputs.v_cache, caches[1])


ROTATED: dict[str, tuple[Callable[[], Step], int, bool, str]] = {
    # What is rotated, of which dims, interleaved or not, and what is normed.
    "bf16": (lambda: step((BF16, BF16), (2, 2, 128), LENS), 128, False, "qk"),
    "bf16, window": (lambda: step((BF16, BF16), (2, 1, 128), LENS, window=40), 64, True, "k"),
    "half, blocks of 64": (lambda: step((HALF, HALF), (2, 7, 64), LENS, block_size=64, window=200), 32, False, ""),
    "fp8, sinks": (lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True), 16, True, "qk"),
    "fp8, group of 16, softcap": (lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0), 80, False, "q"),
    "192 dims, group of 20": (lambda: step((BF16, BF16), (1, 20, 192), [40, 17, 3]), 192, False, "qk"),
    "256 dims, 100 rotated": (lambda: step((BF16, BF16), (1, 8, 256), [33, 0, 130]), 100, False, "qk"),
    "17 dims, group of 3": (lambda: step((BF16, BF16), (2, 3, 17), LENS, softcap=3.0), 16, True, "qk"),
    "100 dims, fp8, group of 9": (lambda: step((HALF, FP8), (1, 9, 100), LENS, sinks=True, window=33), 100, False, "qk"),
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


@pytest.mark.parametrize("bug", ["BARRIER", "PAGE", "TAIL", "COUNTER", "INT32"])
def test_planted_bugs_are_found(bug: str) -> None:
    inputs = far_step() if bug == "INT32" else step((BF16, FP8), (2, 3, 32), [517, 20])
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
        needs_80 = kernel.stem == "decode_attention" and ("KV_DTYPE", "bf16") in kernel.constants
        assert kernel.min_capability == (80 if needs_80 else 75)
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
