"""A section about latent attention: its kernels by themselves, with the heads of DeepSeek-V2-Lite, GLM-4.7-Flash and DeepSeek-V3.
Cases, as those of cases.py, time nothing and ask for no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gpu.cases import BF16, BLOCK, FP8, INT8, TITLES, Case, cache_scale, make_tables, randn, row_bytes
from gpu.engines import overlaps
from gpu.sections import Output
from gpu.sweeps import attempt, best_of
from gpu.timing import copies_for
from nanovllm_cli.kernels import latent_attention as latent_attention_module
from nanovllm_cli.kernels.head_matmul import CudaHeadMatrices
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.latent_attention import (
    LatentScratch,
    LatentShape,
    groups_of,
    latent_attention,
    tokens_of_group,
)
from nanovllm_cli.kernels.latent_rows import latent_rows
from nanovllm_cli.kernels.launcher import CudaLauncher

ROTARY, RANK, KEY_DIM, VALUE_DIM = 64, 512, 128, 128
HEADS = (16, 20, 128)
DECODES = ((32, 2048), (1, 8192), (1, 32768), (128, 2048), (256, 1024))
"""Sequences and tokens of each."""
TOKENS = (1, 8, 32, 64, 256)
"""Of a product with a matrix of each head."""
PROMPTS = (512, 2048)
TUNED: tuple[tuple[str, tuple[int, ...]], ...] = (("BLOCKS_WANTED", (1, 2, 3, 4, 6)), ("LEAST_SPLIT", (64, 128, 256)))
"""Constants of attention that nothing but a GPU can decide, and what they may be."""
TOLD_BY = ((1, 2048), (1, 8192), (8, 4096), (32, 2048))
"""Sequences and tokens of each."""


def section(output: Output) -> None:
    launcher = CudaLauncher(programmatic_launch=overlaps())
    for heads in HEADS:
        for batch, tokens in DECODES:
            for dtype in (BF16, FP8, INT8) if heads != 20 else (BF16,):
                attempt(output, "decode", decode_case, launcher, heads, batch, tokens, dtype)
    for heads in (16, 128):
        for tokens in TOKENS:
            attempt(output, "products by head", products_cases, launcher, heads, tokens)
        attempt(output, "rows", rows_case, launcher, heads, 32)
    for heads in (16, 128):
        for tokens in PROMPTS:
            for fixed in (False, True):
                attempt(output, "prompts", prompt_case, launcher, heads, tokens, fixed)
    for constant, values in TUNED:
        for batch, tokens in TOLD_BY:
            title, case = f"{constant}, {batch} x {tokens}", (launcher, 16, batch, tokens, BF16)
            output.attempt(best_of, output, title, latent_attention_module, constant, values, decode_case, *case)


def decode_case(
    launcher: Launcher, heads: int, batch: int, tokens: int, dtype: torch.dtype, shape: tuple[int, int] = (ROTARY, RANK)
) -> Case:
    """Attention of one layer in a decode step of `batch` sequences of `tokens` tokens."""
    rotary, rank = shape
    dim = rotary + rank
    read = 1.0 * batch * tokens * row_bytes(dim, dtype)
    copies = copies_for(read)
    blocks = copies * batch * -(-tokens // BLOCK)
    cache = randn(launcher, blocks, 1, BLOCK, dim, dtype=dtype, scale=40.0 if dtype == INT8 else 1.0)
    kv_scale = cache_scale(launcher, cache)
    tables = make_tables(launcher, copies * batch, tokens, blocks, batch)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=launcher.device)
    rows, latent = randn(launcher, batch, heads * dim), LatentShape(heads, rotary, rank)
    scratch = LatentScratch(launcher, latent, dtype, batch, tokens + BLOCK)

    def call(table: torch.Tensor) -> Callable[[], object]:
        return lambda: latent_attention(launcher, rows, latent, cache, table, lens, scratch, dim**-0.5, kv_scale=kv_scale)

    title = f"{heads} heads, {TITLES[dtype]}, {batch} x {tokens}"
    flops = 2.0 * batch * tokens * heads * (dim + rank)
    return Case(title, read + 2.0 * batch * heads * (dim + rank), flops, [call(table) for table in tables.split(batch)])


def prompt_case(
    launcher: Launcher, heads: int, tokens: int, fixed: bool, shape: tuple[int, int] = (ROTARY, RANK)
) -> Case:
    """Attention of one layer over a prompt. fixed: each token by itself in splits as a deterministic GPU has them."""
    rotary, rank = shape
    dim, latent, device = rotary + rank, LatentShape(heads, *shape), launcher.device
    cache = randn(launcher, -(-tokens // BLOCK), 1, BLOCK, dim)
    tables = make_tables(launcher, 1, tokens, len(cache), 1)
    lens = torch.arange(1, tokens + 1, dtype=torch.int32, device=device)
    rows, scratch = randn(launcher, tokens, heads * dim), LatentScratch(launcher, latent, BF16, 128, tokens, fixed)
    together = 1 if fixed else tokens_of_group(launcher.capability, latent, BF16)
    sequences, groups = torch.zeros_like(lens), None
    if together > 1:
        groups = groups_of(np.array([0, tokens]), np.array([tokens]), together).to(device)

    def call() -> object:
        return latent_attention(
            launcher, rows, latent, cache, tables, lens, scratch, dim**-0.5, sequences=sequences, groups=groups
        )

    pairs = tokens * (tokens + 1) / 2
    title = f"{heads} heads, 1 x {tokens}{', fixed splits' if fixed else ''}"
    return Case(title, 2.0 * rows.nbytes + cache.nbytes, 2.0 * pairs * heads * (dim + rank), [call])


def products_cases(launcher: Launcher, heads: int, tokens: int, rank: int = RANK) -> list[Case]:
    """What a head's query becomes, in its place between others, and what values make of what it finds; by the library, too."""
    made = []
    for name, num_rows, width, step, out_step in (
        ("keys", rank, KEY_DIM, KEY_DIM + ROTARY, rank + ROTARY),
        ("values", VALUE_DIM, rank, rank, VALUE_DIM),
    ):
        read = 2.0 * heads * num_rows * width
        x, out = randn(launcher, tokens, heads * step), randn(launcher, tokens, heads * out_step)
        calls: list[Callable[[], object]] = []
        library: list[Callable[[], object]] = []
        for _ in range(copies_for(read)):
            matrices = CudaHeadMatrices(launcher, False, heads, num_rows, width, BF16)
            weight = randn(launcher, heads, num_rows, width, scale=width**-0.5)
            for head in range(heads):
                matrices.load(head, weight[head])
            calls.append(partial(matrices.products_into, x, 0, step, out, out_step - num_rows, out_step))
            library.append(_by_library(x.view(tokens, heads, step)[..., :width].transpose(0, 1), weight))
        moved = read + 2.0 * tokens * heads * (width + num_rows)
        title = f"{name} of {heads} heads, {tokens}"
        made.append(Case(title, moved, 2.0 * tokens * heads * num_rows * width, calls, library))
    return made


def _by_library(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.bmm(x, weight.transpose(1, 2))


def rows_case(launcher: Launcher, heads: int, tokens: int, rank: int = RANK) -> Case:
    """What is rotated of queries, and what is kept."""
    device, dim = launcher.device, ROTARY + rank
    q, kept = randn(launcher, tokens, heads * (KEY_DIM + ROTARY)), randn(launcher, tokens, dim)
    norm, angles = randn(launcher, rank), torch.rand(tokens, ROTARY // 2, device=device)
    cache = randn(launcher, tokens, 1, BLOCK, dim)
    slots = torch.arange(tokens, dtype=torch.int64, device=device) * BLOCK

    def call() -> object:
        return latent_rows(launcher, q, kept, heads, norm, 1e-6, 0.0, angles, angles, True, slots, cache)

    return Case(f"{heads} heads, {tokens}", 4.0 * tokens * (heads * ROTARY + dim), 0.0, [call])
