"""Sparse attention by blocks on the CPU: keys of blocks, which of them are chosen, and attention to their tokens, against the
formulas in any steps; gated streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulation.compare import close_to_rounding, random
from nanovllm_cli.attention.backend import HeadNorms
from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.index_spec import BlockIndexerSpec
from nanovllm_cli.kernels import block_rules, connections, reference
from nanovllm_cli.kernels.block_index import BlockIndexInputs
from nanovllm_cli.kernels.cpu_attention import MAX_TILE_ROWS
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.rope_spec import RopeSpec

ROTARY = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "tokens", "width"), [(2, 1, 16), (3, 5, 33), (4, 17, 600)])
def test_streams_are_normed_and_mixed_by_the_formula(count: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    streams, gains = random(count, tokens, width, dtype=dtype), random(count * width, dtype=dtype)
    normed = connections.norm_streams(streams, gains, 1e-6, 1.0)
    close_to_rounding(normed, reference.norm_streams(streams.double(), gains.double(), 1e-6, 1.0))
    gates, weights = random(tokens, count * width, dtype=dtype), random(tokens, count, dtype=torch.float32)
    for written in (weights, None):
        mean, told = reference.mix_streams(normed.double(), gates.double(), count, None if written is None else written.double())
        found = None if written is None else written.clone()
        close_to_rounding(connections.mix_streams(normed, gates, count, found), mean)
        assert found is None or (found - told).abs().max() < 1e-5
    one = connections.mix_streams(normed[-1:].clone(), gates[-1:].clone(), count, None)
    assert torch.equal(one, connections.mix_streams(normed, gates, count, None)[-1:])


class Sequences:
    """Some whole texts, and attention to them in steps."""

    def __init__(
        self, blocks: BlockIndexerSpec, lens: list[int], dtype: torch.dtype = torch.float32, kept: torch.dtype | None = None
    ) -> None:
        self.blocks, self.lens, self.dtype = blocks, lens, dtype
        self.spec = AttentionSpec(4, 2, 24, RopeSpec(ROTARY, 1e4), blocks=blocks)
        total = sum(lens)
        self.qkv = random(total, (4 + 2 * 2) * 24, dtype=dtype)
        self.projected = random(total, (blocks.heads + 1) * blocks.dim, dtype=dtype)
        self.gains = random(2, blocks.dim, dtype=dtype)
        angles = random(total, ROTARY // 2, dtype=torch.float32) * 3
        self.cos, self.sin = angles.cos(), angles.sin()
        self.kept = (kept or dtype,) * 2

    def found(self, cuts: int, table_width: int = 0) -> torch.Tensor:
        """In steps of so many tokens of each text."""
        width = max(table_width, -(-max(self.lens) // 16))
        tables = (torch.randperm(width * len(self.lens)) + 1).int().view(-1, width)
        backend = CpuAttention({2, MAX_TILE_ROWS}, self.dtype, self.kept)
        layer = KVCache(width * len(self.lens) + 1, [self.spec], backend).layers[0]
        begins = torch.tensor([0, *self.lens]).cumsum(0)[:-1].tolist()
        out = torch.empty(len(self.qkv), 4 * 24, dtype=self.dtype)
        for first in range(0, max(self.lens), cuts):
            there = [i for i, own in enumerate(self.lens) if own > first]
            ends = [min(self.lens[i], first + cuts) for i in there]
            rows = torch.cat([torch.arange(begins[i] + first, begins[i] + end) for i, end in zip(there, ends, strict=True)])
            places = torch.cat([torch.arange(first, end) for end in ends])
            owners = torch.cat([torch.full((end - first,), i) for i, end in zip(there, ends, strict=True)])
            lens = torch.tensor(ends).int()
            batch = Batch(
                token_ids=rows, positions=places, rope_lens=places, kv_lens=lens, known_lens=lens, logit_rows=rows[:0],
                query_starts=torch.tensor([0, *(end - first for end in ends)]).cumsum(0).int(),
                slots=tables[owners, places // 16].long() * 16 + places % 16, block_tables=tables[there], states=lens,
            )  # fmt: skip
            index = BlockIndexInputs(self.projected[rows], *self.gains, 1e-6, 1.0)
            angles = self.cos[rows].contiguous(), self.sin[rows].contiguous()
            step: Any = backend.prepare(batch, batch)
            out[rows] = backend.attend(self.spec, self.qkv[rows], HeadNorms(), angles, None, layer, step, None, index)
        return out

    def expected(self) -> torch.Tensor:
        """In float64."""
        blocks, out, begin = self.blocks, [], 0
        for own in self.lens:
            part = slice(begin, begin + own)
            cos, sin = self.cos[part].double(), self.sin[part].double()
            q, k, v = reference.qk_norm_rope(self.qkv[part].double(), 4, 2, None, None, None, 0.0, 0.0, cos, sin, False)
            index = self.projected[part].double().view(own, blocks.heads + 1, blocks.dim)
            keys = block_rules.block_keys(index[:, -1], cos, sin, self.gains[1], 1e-6, 1.0, blocks.ratio)
            queries = reference.add_rms_norm(index[:, :-1], None, self.gains[0].double(), 1e-6, 1.0)
            scores = block_rules.block_scores(reference.rope(queries, cos, sin, False), keys, blocks.ratio)
            for token in range(own):
                seen = block_rules.seen_tokens(scores, token, blocks.most, blocks.ratio)
                found = torch.einsum("hd,shd->hs", q[token], k[seen].repeat_interleave(2, 1)) * 24**-0.5
                out.append(torch.einsum("hs,shd->hd", found.softmax(-1), v[seen].repeat_interleave(2, 1)).flatten())
            begin += own
        return torch.stack(out)


@pytest.mark.parametrize(
    ("blocks", "lens"),
    [
        (BlockIndexerSpec(6, 16, 3, 4), [1, 15, 16, 47, 90]),
        (BlockIndexerSpec(5, 10, 2, 7), [13, 14, 21, 77]),
        (BlockIndexerSpec(9, 8, 1, 1), [3, 40]),
        (BlockIndexerSpec(4, 16, 2, 33), [66, 98, 99, 100, 230]),
        (BlockIndexerSpec(6, 24, 70, 2), [141, 142, 300]),
    ],
)
def test_equal_to_the_formula(blocks: BlockIndexerSpec, lens: list[int]) -> None:
    sequences = Sequences(blocks, lens)
    assert (sequences.found(10_000).double() - sequences.expected()).norm() < 1e-5 * sequences.expected().norm()


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8),
                                             (torch.float32, torch.float8_e4m3fn)])  # fmt: skip
@pytest.mark.parametrize("blocks", [BlockIndexerSpec(3, 16, 3, 5), BlockIndexerSpec(2, 8, 2, 16)])
def test_the_same_bits_in_any_steps(blocks: BlockIndexerSpec, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    sequences = Sequences(blocks, [19, 64, 75], dtype, kept)
    whole = sequences.found(1000)
    for cuts in (1, 7, 16):
        assert torch.equal(sequences.found(cuts), whole)
    assert torch.equal(sequences.found(1000, table_width=64), whole)


def test_other_types_are_close() -> None:
    """What is chosen may differ by rounding, so that all is."""
    for dtype, kept, bound in ((torch.bfloat16, None, 0.02), (torch.float32, torch.int8, 0.02)):
        sequences = Sequences(BlockIndexerSpec(3, 16, 20, 5), [19, 64, 104], dtype, kept)
        expected = sequences.expected()
        assert (sequences.found(9, table_width=30).double() - expected).norm() < bound * expected.norm()
