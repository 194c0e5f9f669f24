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
        index = torch.tensor(rows)
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
    "half, group of 7, window": lambda: step((HALF, HALF), (2, 7, 64), LENS, window=200),
    "half, block of 64": lambda: step((HALF, HALF), (1, 8, 64), LENS, block_size=64),
    "fp8, group of 3, sinks": lambda: step((BF16, FP8), (2, 3, 32), LENS, sinks=True),
    "fp8, group of 16, softcap": lambda: step((BF16, FP8), (1, 16, 80), LENS, softcap=2.0),
    "three parts, group of 12": lambda: step((BF16, BF16), (1, 12, 192), LENS, window=100),
    "three parts, group of 20": lambda: step((BF16, BF16), (1, 20, 192), [40, 3]),
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
