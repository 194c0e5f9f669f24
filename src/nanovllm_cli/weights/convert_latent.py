"""Rows of latent attention, and of what chooses the tokens that it sees, whose rotary pairs lie side by side in the files of a
family and apart in its folders, or the other way round. Those of other attention are `convert_names.py`'s."""

from __future__ import annotations

import re

import torch

from nanovllm_cli.mixer_spec import LatentSpec, attention_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.family import Family
from nanovllm_cli.weights.convert_names import halves_to_pairs, pairs_to_halves
from nanovllm_cli.weights.convert_tensors import Step

_PARTS = re.compile(r"blk\.(\d+)\.(attn_q|attn_q_b|attn_kv_a_mqa|indexer\.(?:attn_q_b|attn_k|k_norm))\.(?:weight|bias)")


def with_pairs_as_in_files(step: Step, spec: ModelSpec, family: Family) -> Step:
    """`step`, of a folder's tensor; any other as it is. family: the file's."""
    found = _PARTS.fullmatch(step.name)
    attention = attention_in(spec.blocks[int(found[1])].mixer) if found is not None else None
    if found is None or attention is None or attention.latent is None or attention.rope is None:
        return step
    dim, first, are_pairs = _place(found[2], attention.latent, attention.rope.interleaved)
    to_be_pairs = not family.gguf_indexer_apart if found[2].startswith("indexer.") else family.interleaved_gguf
    if are_pairs == to_be_pairs:
        return step
    turned, rotary = halves_to_pairs if to_be_pairs else pairs_to_halves, attention.latent.rotary_dim

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        heads = rows.reshape(-1, dim, *rows.shape[1:]).clone()
        own = heads[:, first : first + rotary]
        heads[:, first : first + rotary] = turned(own.flatten(0, 1), rotary, rotary).view(own.shape)
        return heads.view(rows.shape)

    return step._replace(reorder=reorder, rows_together=dim)


def _place(part: str, latent: LatentSpec, interleaved: bool) -> tuple[int, int, bool]:
    """Of one head: its rows, the first of those that rotate, and whether pairs lie side by side."""
    if part.startswith("indexer."):
        assert latent.indexer is not None
        last = latent.indexer.last_rotate
        return latent.indexer.dim, latent.indexer.dim - last if last else 0, latent.indexer.interleaved
    dim = latent.rank + latent.rotary_dim if part == "attn_kv_a_mqa" else latent.query_dim
    return dim, dim - latent.rotary_dim, interleaved
