"""Checkpoints that hold all experts of a layer in one tensor, as if each expert's were tensors of their own.

    GGUF        blk.3.ffn_gate_exps.weight [E, N, K]            blk.3.ffn_gate_exps.5.weight [N, K]; biases [E, N] alike
    gpt-oss     mlp.experts.gate_up_proj_blocks [E, 2 N, …]     mlp.experts.5.gate_proj_blocks [N, …], its rows 0, 2, 4, …, and
                                                                up_proj_blocks, those between; scales and biases alike
                mlp.experts.gate_up_proj [E, K, 2 N], plain     mlp.experts.5.gate_proj [N, K], turned over

So readers, loader and formats know nothing of it. What is taken out is a view of the mapped file.

Legend: E experts, N rows, K columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.experts import MAX_EXPERTS
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, TensorInfo
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN

MAX_PARTS = 1 << 17  # the largest models that are published have some 60,000
_GGUF = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down)_exps)\.(weight|bias)")
_GPT_OSS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj(_blocks|_scales|_bias|)")
_DIMS = {"weight": 3, "bias": 2, "": 3, "_blocks": 4, "_scales": 3, "_bias": 2}


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensor of one expert: each step-th row, from the first on, of its part of a stack. turned: that is [K, N]."""

    stack: str
    expert: int
    first: int = 0
    step: int = 1
    turned: bool = False
    is_last: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.first, None, self.step)


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where nothing is stacked. CheckpointError for more experts, or tensors of them, than are believed."""
    parts: dict[str, _Part] = {}
    for name in checkpoint.names():
        found = (_GGUF if checkpoint.format == "gguf" else _GPT_OSS).fullmatch(name)
        if found is None:
            continue
        shape = checkpoint.info(name).shape
        if len(shape) != _DIMS[found.groups()[-1]]:
            continue  # it stays under its name, which is none of the model's
        if shape[0] > MAX_EXPERTS:
            most = f"at most {MAX_EXPERTS} are believed"
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has {shape[0]} experts; {most}", DOWNLOAD_AGAIN)
        if len(parts) > MAX_PARTS:
            raise CheckpointError(f"{checkpoint.path}: more than {MAX_PARTS} tensors of experts are not believed", DOWNLOAD_AGAIN)
        for e in range(shape[0]):
            parts.update(_parts(found, name, e, is_last=e == shape[0] - 1))
    return _Unstacked(checkpoint, parts) if parts else checkpoint


def _parts(found: re.Match[str], name: str, e: int, *, is_last: bool) -> Iterator[tuple[str, _Part]]:
    """What one expert has of a stack, by name."""
    place, *which, kind = found.groups()
    if not which:
        yield f"{place}.{e}.{kind}", _Part(name, e, is_last=is_last)
    elif which == ["down"]:
        yield f"{place}.{e}.down_proj{kind}", _Part(name, e, turned=not kind, is_last=is_last)
    else:
        yield f"{place}.{e}.gate_proj{kind}", _Part(name, e, 0, 2, turned=not kind)
        yield f"{place}.{e}.up_proj{kind}", _Part(name, e, 1, 2, turned=not kind, is_last=is_last)


class _Unstacked(CheckpointView):
    """`parts` by their names."""

    def __init__(self, inner: Checkpoint, parts: dict[str, _Part]) -> None:
        super().__init__(inner)
        self._parts = parts
        stacks = {part.stack for part in parts.values()}
        self._names = [*(name for name in inner.names() if name not in stacks), *parts]

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._parts:
            return super().info(name)
        part = self._parts[name]
        info = self._inner.info(part.stack)
        num_rows, *others = info.shape[:0:-1] if part.turned else info.shape[1:]
        own_rows = len(range(num_rows)[part.rows])
        own_bytes = info.num_bytes // info.shape[0] * own_rows // max(1, num_rows)
        return TensorInfo(name, (own_rows, *others), info.dtype_name, own_bytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._parts:
            return super().tensor(name, rows)
        part = self._parts[name]
        own = self._inner.tensor(part.stack, (part.expert, part.expert + 1))[0]
        own = (own.T if part.turned else own)[part.rows]
        return own if rows is None else own[rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return super().raw(name)
        part = self._parts[name]
        assert not part.turned, "bytes of plain numbers"
        num_experts, num_rows, *_ = self._inner.info(part.stack).shape
        return self._inner.raw(part.stack).flatten().view(num_experts, num_rows, -1)[part.expert, part.rows]

    def release(self, name: str) -> None:
        """A stack's pages go when its last expert is read: those of two experts may lie on one."""
        if name not in self._parts:
            super().release(name)
        elif self._parts[name].is_last:
            self._inner.release(self._parts[name].stack)
