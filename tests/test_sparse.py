"""Sparse attention on the CPU: tokens that heads of its own choose, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm_cli.attention.backend import IndexInputs, LatentWeights
from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels import cpu, reference
from nanovllm_cli.kernels.cpu_attention import MAX_TILE_ROWS
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.kernels.indexer import choose
from nanovllm_cli.mixer_spec import AttentionSpec, IndexerSpec, LatentSpec
from nanovllm_cli.rope_spec import RopeSpec

GENERATOR = torch.Generator().manual_seed(41)


def paged(rows: torch.Tensor, tables: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Keys [sequences, tokens, D] as a cache of one head has them, stale memory poisoned."""
    dim, pair = rows.shape[-1], 2 if rows.dtype == torch.bfloat16 else 1
    cache = torch.full((num_blocks, 1, dim // pair, cpu.BLOCK, pair), float("nan"), dtype=rows.dtype)
    for table, keys in zip(tables, rows, strict=True):
        for place, key in enumerate(keys):
            cache[table[place // cpu.BLOCK], 0, :, place % cpu.BLOCK] = key.view(dim // pair, pair)
    return cache


def best(scores: torch.Tensor, most: int) -> list[int]:
    """Of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    return sorted(order[:most])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "most", "counts"),
    [(1, 2, 1, [1]), (2, 8, 3, [2, 3, 4]), (7, 16, 16, [17, 64]), (64, 128, 5, [600]), (3, 34, 63, [65, 1, 130]),
     (13, 64, 100, [101]), (6, 10, 512, [513, 1100]), (5, 128, 2048, [2050])],
)  # fmt: skip
def test_the_highest_are_chosen(heads: int, dim: int, most: int, counts: list[int], dtype: torch.dtype) -> None:
    """Of whole numbers, so that sums are exact and many scores are equal; each sequence's last token asks."""
    small = lambda *shape: torch.randint(-2, 3, shape, generator=GENERATOR).to(dtype)
    q, weights, keys = small(len(counts), heads, dim), small(len(counts), heads).float(), small(len(counts), max(counts), dim)
    width = -(-max(counts) // cpu.BLOCK)
    tables = torch.randperm(width * len(counts), generator=GENERATOR).int().view(len(counts), width)
    tiles = torch.tensor([(seq, seq, 1, count - 1, count) for seq, count in enumerate(counts)])
    chosen = choose(q, weights, paged(keys, tables, tables.numel()), tiles, tables, most)
    for seq, count in enumerate(counts):
        products = torch.einsum("hd,sd->hs", q[seq].double(), keys[seq, :count].double()).relu()
        expected = best(weights[seq].double() @ products, most)
        assert chosen.places[seq, : len(expected)].tolist() == expected
        assert chosen.tiles[seq].tolist() == [seq, seq, 1, len(expected) - 1, len(expected)]


def test_negative_scores_and_infinities_have_their_order() -> None:
    count, table = 40, torch.arange(3, dtype=torch.int32)[None]
    keys = torch.zeros(1, count, 2)
    keys[0, :, 0] = torch.linspace(-4, 4, count)[torch.randperm(count, generator=GENERATOR)]
    keys[0, 7, 0] = float("inf")
    for sign in (1.0, -1.0):
        scores = sign * keys[0, :, 0].clamp_min(0)
        q, weights = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[sign]])
        chosen = choose(q, weights, paged(keys, table, 3), torch.tensor([[0, 0, 1, count - 1, count]]), table, 10)
        assert chosen.places[0].tolist() == best(scores, 10)


class Sequences:
    """Of one layer whose tokens choose, and one that goes by it; cut into any steps."""

    def __init__(self, indexer: IndexerSpec, lens: list[int], dtype: torch.dtype, kept: torch.dtype, heads: int = 3) -> None:
        self.lens, self.dtype, self.indexer = lens, dtype, indexer
        latent = self.latent = LatentSpec(24, 40, 18, 12, 22, indexer=indexer)
        rope = RopeSpec(latent.rotary_dim, 100.0, interleaved=True)
        self.specs = [
            AttentionSpec(heads, 1, 52, rope, scale=0.3, latent=replace(latent, indexer=replace(indexer, chooses=chooses)))
            for chooses in (True, False)
        ]
        random = lambda *shape: torch.randn(*shape, generator=GENERATOR).to(dtype)
        tokens = sum(lens)
        self.q, self.kept = random(2, tokens, heads * latent.query_dim), random(2, tokens, latent.rank + latent.rotary_dim)
        self.index = IndexInputs(
            random(tokens, indexer.heads * indexer.dim), random(tokens, indexer.dim), random(tokens, indexer.heads).float()
        )
        self.keys, self.values = random(heads, latent.rank, latent.key_dim) / 4, random(heads, latent.value_dim, latent.rank) / 6
        self.norm = torch.rand(latent.rank, generator=GENERATOR).to(dtype)
        matrices = [CpuOps().head_matrices(heads, *each.shape[1:], dtype) for each in (self.keys, self.values)]
        for made, rows in zip(matrices, (self.keys, self.values), strict=True):
            for head in range(heads):
                made.load(head, rows[head])
        self.weights = LatentWeights(self.norm, 1e-5, 0.5, *matrices)
        width = max(-(-n // cpu.BLOCK) for n in lens)
        blocks = torch.randperm(width * len(lens) + 3, generator=GENERATOR).int()
        self.tables = blocks[: width * len(lens)].reshape(len(lens), width).contiguous()
        self.backend = CpuAttention({heads, MAX_TILE_ROWS}, dtype, (kept, kept))
        self.caches = [
            tuple(
                torch.zeros(len(blocks), *shape, dtype=kind) if kind == torch.int8
                else torch.full((len(blocks), *shape), float("nan"), dtype=torch.float32).to(kind)
                for shape, kind in self.backend.block_parts(spec)
            )
            for spec in self.specs
        ]  # fmt: skip

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.latent.rotary_dim // 2
        turned = positions[:, None] / 100 ** (torch.arange(half) / half)
        return turned.cos(), turned.sin()

    def step(self, first: list[int], counts: list[int], width: int | None = None) -> list[list[torch.Tensor]]:
        """Of each sequence what both layers find for `counts` tokens from its first on. width: of block tables."""
        begins = np.cumsum([0, *self.lens])
        rows = torch.cat([torch.arange(b + f, b + f + n) for b, f, n in zip(begins, first, counts, strict=False)])
        positions = torch.cat([torch.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        sequences = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        lens = torch.tensor([f + n for f, n in zip(first, counts, strict=True)], dtype=torch.int32)
        batch = Batch(
            token_ids=rows, positions=positions, rope_lens=positions, known_lens=lens, kv_lens=lens, states=lens, logit_rows=rows,
            query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            block_tables=self.tables[:, :width].contiguous(),
            slots=self.tables[sequences, positions // cpu.BLOCK].long() * cpu.BLOCK + positions % cpu.BLOCK,
        )  # fmt: skip
        step = self.backend.prepare(batch, batch)
        found = [
            self.backend.attend_latent(
                spec, q[rows], kept[rows], self.weights, self.angles(positions), cache, step,
                IndexInputs(*(each[rows] for each in self.index)) if layer == 0 else None,
            )
            for layer, (spec, q, kept, cache) in enumerate(zip(self.specs, self.q, self.kept, self.caches, strict=True))
        ]  # fmt: skip
        return [list(both) for both in zip(*(each.split(counts) for each in found), strict=True)]

    def expected(self) -> list[list[torch.Tensor]]:
        found, begin = [], 0
        for count in self.lens:
            own = slice(begin, begin + count)
            begin += count
            angles = [each.double() for each in self.angles(torch.arange(count))]
            q, key, weights = (each[own].double() for each in self.index)
            both = torch.cat([q.view(count, self.indexer.heads, -1), key[:, None]], 1)
            turned = reference.rope(both, *angles, self.indexer.interleaved)
            # What is kept and multiplied is rounded: of random numbers in bf16 near-ties would fall either way.
            turned = turned.to(self.dtype).double()
            scores = reference.index_scores(turned[:, :-1], weights, turned[:, -1])
            unseen = torch.ones(count, count, dtype=torch.bool)
            for row in range(count):
                unseen[row, best(scores[row, : row + 1], self.indexer.most)] = False
            found.append([
                reference.latent_attention(
                    q[own].double(), kept[own].double(), self.norm.double(), 1e-5, 0.5, self.keys.double(), self.values.double(),
                    *angles, True, 0.3, unseen,
                )
                for q, kept in zip(self.q, self.kept, strict=True)
            ])  # fmt: skip
        return found


@pytest.mark.parametrize(
    ("indexer", "lens"),
    [
        (IndexerSpec(1, 12, 1), [3]),
        (IndexerSpec(4, 16, 7), [30, 5, 8]),
        (IndexerSpec(2, 12, 16, interleaved=True), [15, 16, 17, 40]),
        (IndexerSpec(8, 32, 33), [100]),
        (IndexerSpec(3, 20, 64, interleaved=True), [130, 64]),
        (IndexerSpec(64, 128, 90), [91, 89]),
    ],
)
def test_equal_to_the_formula(indexer: IndexerSpec, lens: list[int]) -> None:
    sequences = Sequences(indexer, lens, torch.float32, torch.float32)
    for found, expected in zip(sequences.step([0] * len(lens), lens), sequences.expected(), strict=True):
        for own, right in zip(found, expected, strict=True):
            assert (own.double() - right).norm() / right.norm() < 2e-6


@pytest.mark.parametrize(
    ("dtype", "kept", "bound"),
    [(torch.bfloat16, torch.bfloat16, 0.02), (torch.bfloat16, torch.int8, 0.03), (torch.float32, torch.int8, 0.02),
     (torch.float32, torch.float8_e4m3fn, 0.08), (torch.bfloat16, torch.float8_e4m3fn, 0.08)],
)  # fmt: skip
def test_other_types(dtype: torch.dtype, kept: torch.dtype, bound: float) -> None:
    """In bf16 the rotated queries' last bit decides some near-ties the other way, of few tokens."""
    sequences = Sequences(IndexerSpec(4, 16, 40), [100, 30], dtype, kept)
    for found, expected in zip(sequences.step([0, 0], [100, 30]), sequences.expected(), strict=True):
        for own, right in zip(found, expected, strict=True):
            errors = (own.double() - right).norm(dim=1) / right.norm(dim=1)
            assert errors.median() < bound
            assert (errors < 3 * bound).float().mean() > 0.9


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                                             (torch.bfloat16, torch.int8)])  # fmt: skip
def test_the_same_bits_in_any_steps(dtype: torch.dtype, kept: torch.dtype) -> None:
    """Whatever others do meanwhile, and whether a step's tables are so narrow that nobody chooses."""
    lens, indexer = [70, 5, 41], IndexerSpec(5, 16, 32)
    sequences = Sequences(indexer, lens, dtype, kept)
    at_once = [[each.clone() for each in both] for both in sequences.step([0, 0, 0], lens)]
    parts: list[list[list[torch.Tensor]]] = [[], [], []]
    done = [0, 0, 0]
    for most in (3, 1, 20, 2, 1, 1, 30, 100):
        counts = [min(most, n - d) for n, d in zip(lens, done, strict=True)]
        width = -(-max(d + c for d, c in zip(done, counts, strict=True)) // cpu.BLOCK)
        for own, found in zip(parts, sequences.step(done, counts, width), strict=True):
            own.append(found)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    for found, whole in zip(parts, at_once, strict=True):
        for layer in (0, 1):
            assert torch.equal(torch.cat([step[layer] for step in found]), whole[layer])
