"""Checkpoints that hold all experts of a layer in one tensor, as if each expert's were tensors of their own.

    GGUF        blk.3.ffn_gate_exps.weight [E, N, K]        blk.3.ffn_gate_exps.5.weight [N, K]

So readers, loader and formats know nothing of it. What is taken out is a view of the mapped file.

Legend: E experts, N rows, K columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.experts import MAX_EXPERTS
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN

_STACKED = re.compile(r"(?P<stack>blk\.\d+\.ffn_(?:gate|up|down)_exps)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensor of one expert."""

    stack: str
    expert: int
    is_last: bool


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself where nothing is stacked. CheckpointError for more experts than are believed."""
    parts: dict[str, _Part] = {}
    for name in checkpoint.names():
        found = _STACKED.fullmatch(name)
        if found is None:
            continue
        shape = checkpoint.info(name).shape
        num_experts = shape[0] if shape else 0
        if num_experts > MAX_EXPERTS:
            most = f"at most {MAX_EXPERTS} are believed"
            raise CheckpointError(f"{checkpoint.path}: tensor {name!r} has {num_experts} experts; {most}", DOWNLOAD_AGAIN)
        for e in range(num_experts):
            parts[f"{found['stack']}.{e}.{found['kind']}"] = _Part(name, e, e == num_experts - 1)
    return _Unstacked(checkpoint, parts) if parts else checkpoint


class _Unstacked(Checkpoint):
    """A view of `inner`, which stays the one to close."""

    def __init__(self, inner: Checkpoint, parts: dict[str, _Part]) -> None:
        self.format = inner.format
        self.path = inner.path
        self.config = inner.config
        self.generation_config = inner.generation_config
        self._inner = inner
        self._parts = parts
        stacks = {part.stack for part in parts.values()}
        self._names = [*(name for name in inner.names() if name not in stacks), *parts]

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        if name not in self._parts:
            return self._inner.info(name)
        info = self._inner.info(self._parts[name].stack)
        return TensorInfo(name, info.shape[1:], info.dtype_name, info.num_bytes // info.shape[0])

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._parts:
            return self._inner.tensor(name, rows)
        part = self._parts[name]
        own = self._inner.tensor(part.stack, (part.expert, part.expert + 1))[0]
        return own if rows is None else own[rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return self._inner.raw(name)
        part = self._parts[name]
        data = self._inner.raw(part.stack)
        num_rows = data.shape[0] // self._inner.info(part.stack).shape[0]
        return data[part.expert * num_rows : (part.expert + 1) * num_rows]

    def release(self, name: str) -> None:
        """A stack's pages go when its last expert is read: those of two experts may lie on one."""
        if name not in self._parts:
            self._inner.release(name)
        elif self._parts[name].is_last:
            self._inner.release(self._parts[name].stack)
