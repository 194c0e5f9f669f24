"""Latent attention on a GPU: one tensor [N, 1, S, rotary + rank] a layer, a token's row of which is its key and, but for what is
rotated, its value; of int8 another, a scale a token.

Four launches a layer, or five: the rows and what is kept (latent_rows), each head's query turned into what its key is made of
(head_matmul), attention, which may leave its splits to be added up, and what values make of it (head_matmul). A step of decodes
has a row a sequence, whose lengths the device knows; any other has its tokens as rows, or, where the host divides the step
anyway, in groups that share what they read of the cache. A deterministic GPU has tokens as rows in every step, and splits of a
fixed size. What is not for latent_attention's tensor cores goes to decode_attention's kernels, which are told that keys are
values, too.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.attention.backend import Angles, HeadNorms, LatentWeights
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention
from nanovllm_cli.kernels.head_matmul import CudaHeadMatrices
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.latent_attention import (
    LatentScratch,
    LatentShape,
    groups_of,
    latent_attention,
    tiling,
    tokens_of_group,
)
from nanovllm_cli.kernels.latent_rows import latent_rows
from nanovllm_cli.kernels.rope_cache import Projected
from nanovllm_cli.mixer_spec import AttentionSpec

Groups = dict[int, torch.Tensor]
"""A step's tokens by how many share what they read: see `groups_of`."""


class CudaLatent:
    """Of a model's layers with latent attention. max_rows: tokens of a step of decodes, or of a launch where each is a row of its
    own; max_tokens: of a block table. scale [1]: of a cache of fp8, else None."""

    def __init__(
        self,
        launcher: Launcher,
        specs: list[AttentionSpec],
        cache_dtype: torch.dtype,
        max_rows: int,
        max_tokens: int,
        deterministic: bool,
        scale: torch.Tensor | None,
    ) -> None:
        self._launcher = launcher
        self._scale = scale
        self._scratch: dict[LatentShape, LatentScratch] = {}
        self._plain_scratch: dict[LatentShape, DecodeScratch] = {}
        self._together: dict[LatentShape, int] = {}
        for shape in dict.fromkeys(map(_shape, specs)):
            heads, rotary, rank = shape
            if tiling(launcher.capability, heads, shape, cache_dtype) is None:
                scratch = DecodeScratch(launcher, max_rows, heads, 1, rotary + rank, max_tokens, fixed=deterministic)
                self._plain_scratch[shape] = scratch
                continue
            self._scratch[shape] = LatentScratch(launcher, shape, cache_dtype, max_rows, max_tokens, deterministic)
            together = 1 if deterministic else tokens_of_group(launcher.capability, shape, cache_dtype)
            if together > 1:
                self._together[shape] = together

    def groups(self, query_starts: np.ndarray, kv_lens: np.ndarray) -> Groups:
        """Of a step, on the device; for layers whose tokens share what they read."""
        return {
            together: groups_of(query_starts, kv_lens, together).to(self._launcher.device, non_blocking=True)
            for together in dict.fromkeys(self._together.values())
        }

    def attend(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kept: torch.Tensor,
        weights: LatentWeights,
        angles: Angles,
        cache: LayerCache,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        lens: torch.Tensor,
        sequences: torch.Tensor | None,
        groups: Groups | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend_latent`. lens [T]: keys that each token sees; sequences [T]: its row of block_tables."""
        keys, values, shape, latent = weights.keys, weights.values, _shape(spec), spec.latent
        assert latent is not None
        assert isinstance(keys, CudaHeadMatrices)
        assert isinstance(values, CudaHeadMatrices)
        heads, rotary, rank = shape
        of_tokens, scale = cache if len(cache) > 1 else (cache[0], self._scale)
        rows = latent_rows(
            self._launcher, q, kept, heads, weights.norm, weights.eps, weights.offset, *angles, spec.interleaved, slots,
            of_tokens, scale,
        )  # fmt: skip
        keys.products_into(q, 0, latent.query_dim, rows, rotary, spec.head_dim)
        if shape in self._scratch:
            found = latent_attention(
                self._launcher, rows, shape, of_tokens, block_tables, lens, self._scratch[shape], spec.score_scale,
                kv_scale=scale, sequences=sequences, groups=(groups or {}).get(self._together.get(shape, 1)), sinks=sinks,
            )  # fmt: skip
            return values.products(found, 0, rank)
        nothing = torch.empty(len(rows), 0, device=rows.device)
        turned = Projected(rows, heads, 1, spec.head_dim, *HeadNorms(), nothing, nothing, False, shared=True)
        found = decode_attention(
            self._launcher, turned, of_tokens, of_tokens, block_tables, lens, self._plain_scratch[shape], spec.score_scale,
            sinks=sinks, k_scale=scale, v_scale=scale, sequences=sequences,
        )  # fmt: skip
        return values.products(found, rotary, spec.head_dim)


def _shape(spec: AttentionSpec) -> LatentShape:
    assert spec.latent is not None
    return LatentShape(spec.num_heads, spec.latent.rotary_dim, spec.latent.rank)
