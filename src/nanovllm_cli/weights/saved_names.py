"""Folders that transformers has saved with other names, or rows, than those that are published, and one that it renames.

    OLMo Hybrid  layers.3.feedforward_layer_norm.weight      of a layer with attention: layers.3.post_attention_layernorm.weight
                 linear_attn.q_conv1d.weight, k_…, v_…       of any lengths: taps of q, k and v behind each other
    Kimi Linear  layers.0.block_sparse_moe.up_proj.weight    of a layer without experts: layers.0.mlp.up_proj.weight
    Mamba        backbone.embedding.weight                   backbone.embeddings.weight

What is published is read as it is. Not covered: pickles.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import torch

from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo

_NORM = re.compile(r"(model\.layers\.\d+)\.post_feedforward_layernorm\.weight")
_TAPS = re.compile(r"(model\.layers\.\d+\.linear_attn)\.q_conv1d\.weight")
_DENSE = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\..+)")

_FIRST_EMBEDDING = "backbone.embedding.weight"


class _Piece(NamedTuple):
    """Rows of a tensor of the files; end None: all."""

    stored: str
    first: int
    end: int | None


def by_published_names(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` itself where nothing differs."""
    kind = checkpoint.config.get("model_type")
    if checkpoint.format != "hf" or kind not in ("olmo_hybrid", "kimi_linear", "mamba"):
        return checkpoint
    names = set(checkpoint.names())
    pieces: dict[str, list[_Piece]] = {}
    for name in names:
        if kind == "mamba":
            if name == _FIRST_EMBEDDING:
                pieces["backbone.embeddings.weight"] = [_Piece(name, 0, None)]
        elif kind == "kimi_linear" and (found := _DENSE.fullmatch(name)):
            pieces[f"{found[1]}.mlp.{found[2]}"] = [_Piece(name, 0, None)]
        elif found := _NORM.fullmatch(name):
            saved, published = (f"{found[1]}.{norm}.weight" for norm in ("feedforward_layer_norm", "post_attention_layernorm"))
            if saved in names and published not in names:
                pieces[published] = [_Piece(saved, 0, None)]
        elif kind == "olmo_hybrid" and (found := _TAPS.fullmatch(name)):
            pieces |= _divided(checkpoint, names, [f"{found[1]}.{part}_conv1d.weight" for part in "qkv"])
    return _Published(checkpoint, pieces) if pieces else checkpoint


def _divided(checkpoint: Checkpoint, names: set[str], taps: list[str]) -> dict[str, list[_Piece]]:
    """Of a layer's three, which transformers divides evenly, whatever they are of. Empty where they are as they should be."""
    keys = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    said = [checkpoint.config.get(f"linear_{key}") for key in keys]
    if not names.issuperset(taps) or any(type(each) is not int or not 0 < each < 1 << 20 for each in said):
        return {}
    num_keys, key_dim, num_values, value_dim = (int(each or 0) for each in said)
    wanted = [num_keys * key_dim, num_keys * key_dim, num_values * value_dim]
    shapes = [checkpoint.info(name).shape for name in taps]
    there = [shape[0] if shape else 0 for shape in shapes]
    if there == wanted or sum(there) != sum(wanted) or len({shape[1:] for shape in shapes}) > 1:
        return {}
    starts, ends = ([0, *itertools.accumulate(counts)] for counts in (there, wanted))
    found: dict[str, list[_Piece]] = {}
    for name, begin, end in zip(taps, ends, ends[1:], strict=False):
        found[name] = []
        for stored, own, behind in zip(taps, starts, starts[1:], strict=False):
            first, last = max(begin, own), min(end, behind)
            if first < last:
                found[name].append(_Piece(stored, first - own, last - own))
    return found


class _Published(CheckpointView):
    def __init__(self, inner: Checkpoint, pieces: dict[str, list[_Piece]]) -> None:
        super().__init__(inner)
        self._pieces = pieces
        gone = {piece.stored for each in pieces.values() for piece in each}
        self._names = [*(name for name in inner.names() if name not in gone), *pieces]

    def close(self) -> None:
        self._inner.close()

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._pieces:
            return super().info(name)
        infos = [(super(_Published, self).info(piece.stored), piece) for piece in self._pieces[name]]
        counts = [info.shape[0] if piece.end is None else piece.end - piece.first for info, piece in infos]
        num_bytes = sum(info.num_bytes // info.shape[0] * count for (info, _), count in zip(infos, counts, strict=True))
        return TensorInfo(name, (sum(counts), *infos[0][0].shape[1:]), infos[0][0].dtype_name, num_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._pieces:
            return super().tensor(name, rows)
        (first, *others) = self._pieces[name]
        if not others and first.end is None:
            return super().tensor(first.stored, rows)
        whole = torch.cat([super(_Published, self).tensor(piece.stored)[piece.first : piece.end] for piece in (first, *others)])
        return whole if rows is None else whole[rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        if name not in self._pieces:
            return super().raw(name)
        (first, *others) = self._pieces[name]
        return super().raw(first.stored) if not others and first.end is None else self.tensor(name).contiguous().view(torch.uint8)

    def release(self, name: str) -> None:
        """Pages of what lies in several tensors go with the file."""
        pieces = self._pieces.get(name, [_Piece(name, 0, None)])
        if len(pieces) == 1 and pieces[0].end is None:
            super().release(pieces[0].stored)
