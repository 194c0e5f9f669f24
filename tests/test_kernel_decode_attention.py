"""decode_attention.cu and decode_attention_any.cu, emulated, against the formula in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from emulation.compare import close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels import decode_attention as kernels
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention

pytestmark = needs_emulation
BF16, HALF, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENS = [1, 15, 16, 0, 17, 33, 130, 517]


@dataclass
class Step:
    """Inputs of a decode step. Everything in the caches that no query may see is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    options: dict

    def run(self, emulator: Emulator, scratch: DecodeScratch) -> torch.Tensor:
        lens = (self.block_tables, self.kv_lens)
        return decode_attention(emulator, self.q, self.k_cache, self.v_cache, *lens, scratch, **self.options)

    def rows(self, *rows: int, width: int) -> Step:
        """These sequences alone, with tables of another width."""
        index = torch.tensor(rows, dtype=torch.long)
        tables = torch.zeros(len(rows), width, dtype=torch.int32)
        columns = min(width, self.block_tables.shape[1])
        tables[:, :columns] = self.block_tables[index, :columns]
        return Step(self.q[index], self.k_cache, self.v_cache, tables, self.kv_lens[index], self.options)

    def scratch(self, emulator: Emulator, deterministic: bool = False) -> DecodeScratch:
        (batch, heads, dim), kv_heads = self.q.shape, self.k_cache.shape[1]
        tokens = self.block_tables.shape[1] * self.k_cache.shape[2]
        scratch = DecodeScratch(emulator, batch, heads, kv_heads, dim, tokens, deterministic)
        scratch.partials.fill_(torch.nan)
        scratch.sums.fill_(torch.nan)
        return scratch

    def expected(self) -> torch.Tensor:
        """float64 [B, H * D]."""
        options = self.options
        heads, kv_heads = self.q.shape[1], self.k_cache.shape[1]
        rows = []
        for q, table, length in zip(self.q.double(), self.block_tables, self.kv_lens.tolist(), strict=True):
            if length == 0:
                rows.append(torch.zeros(q.numel(), dtype=torch.float64))
                continue
            first = max(0, length - options["window"]) if options["window"] else 0
            k, v = (_tokens(cache, table, first, length) for cache in (self.k_cache, self.v_cache))
            if options["k_scale"] is not None:
                k, v = k * options["k_scale"][:, None].double(), v * options["v_scale"][:, None].double()
            k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
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
    return torch.stack([cache[int(table[i // size]), :, i % size] for i in range(first, last)]).double()


def step(
    types: tuple[torch.dtype, torch.dtype],
    heads: tuple[int, int, int],
    lens: list[int],
    block_size: int = 16,
    width: int | None = None,
    **options,
) -> Step:
    """heads: kv heads, group, head dim. Tables are shuffled; width is that of the longest sequence and one more."""
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
        for token in range(first, length):
            for cache in caches:
                cache[tables[row, token // block_size], :, token % block_size] = random(kv_heads, dim).to(types[1])
    scales = {name: (torch.rand(kv_heads) + 0.5 if types[1] == FP8 else None) for name in ("k_scale", "v_scale")}
    options = {"scale": dim**-0.5, "window": 0, "softcap": 0.0, "sinks": None} | scales | options
    if options["sinks"]:
        options["sinks"] = random(kv_heads * group)
    q = random(len(lens), kv_heads * group, dim, dtype=types[0])
    return Step(q, *caches, tables, torch.tensor(lens, dtype=torch.int32), options)


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


@pytest.mark.parametrize("deterministic", [False, True], ids=["filling", "deterministic"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", STEPS)
def test_each_row_is_one_rounding_from_float64(name: str, order: int, deterministic: bool) -> None:
    inputs = STEPS[name]()
    emulator = Emulator(order)
    close_to_rounding(inputs.run(emulator, inputs.scratch(emulator, deterministic)), inputs.expected())


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


@pytest.mark.parametrize("types", [(BF16, FP8), (BF16, BF16)], ids=["tensor cores", "CUDA cores"])
def test_deterministic_bits_depend_on_the_sequence_alone(types: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FIXED_SPLIT", 64)
    monkeypatch.setattr(kernels, "FIXED_SPLITS", 5)  # reached by the longest, whose splits are longer then
    dims = (2, 3, 32 if types[1] == FP8 else 17)
    inputs = step(types, dims, LENS)
    for window in (0, 150):
        inputs.options["window"] = window
        everything = Emulator(7, num_multiprocessors=132)
        together = inputs.run(everything, inputs.scratch(everything, deterministic=True))
        close_to_rounding(together, inputs.expected())
        for rows, width, order in (((7,), 33, 0), ((6,), 200, 1), ((6, 7, 5), 64, 7)):
            few = Emulator(order, num_multiprocessors=1)
            alone = inputs.rows(*rows, width=width)
            assert torch.equal(alone.run(few, alone.scratch(few, deterministic=True)), together[list(rows)])


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
    return Step(inputs.q, *caches, inputs.block_tables, inputs.kv_lens, inputs.options)


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
                inputs.q.neg_()  # so that an output that was not written is not right by chance
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
        assert kernels.num_splits(h200, batch * 8, 40960, False) == expected
    assert kernels.num_splits(h200, 8, 16, False) == 1
    assert {kernels.num_splits(h200, pairs, 40960, True) for pairs in (8, 256, 2048)} == {33}


def test_no_sequences_is_no_launch() -> None:
    emulator = Emulator()
    inputs = step((BF16, BF16), (2, 2, 128), [5]).rows(width=2)
    assert inputs.run(emulator, DecodeScratch(emulator, 1, 4, 2, 128, 64)).shape == (0, 512)
    assert not emulator.launches


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: setattr(s, "q", s.q.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda s: setattr(s, "q", s.q[:, :3].contiguous()),
        lambda s: setattr(s, "q", s.q.float()),
        lambda s: setattr(s, "v_cache", s.v_cache.half()),
        lambda s: setattr(s, "k_cache", s.k_cache.transpose(1, 2)),
        lambda s: setattr(s, "kv_lens", s.kv_lens.long()),
        lambda s: setattr(s, "block_tables", s.block_tables[:, ::2]),
        lambda s: s.options.update(sinks=torch.zeros(3)),
        lambda s: s.options.update(k_scale=torch.ones(4)),
    ],
    ids=["strides", "heads", "query type", "cache types", "cache strides", "lengths", "tables", "sinks", "scales"],
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
