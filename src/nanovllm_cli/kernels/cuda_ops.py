"""A GPU's Ops."""

from __future__ import annotations

import math
from functools import partial

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels import (
    altup,
    best_gate,
    clip,
    compressed_rules,
    connection,
    gemv,
    join_norm,
    norm,
    rope_tables,
    scale,
    scan_parts,
    sigmoid_gate,
    sparse_gate,
    squash,
    temper,
    xielu,
)
from nanovllm_cli.kernels.connections import NO_GATED_STREAMS
from nanovllm_cli.kernels.cuda_mixture import CudaMixture
from nanovllm_cli.kernels.head_matmul import CudaHeadMatrices
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Addend, AnglesOf, Hidden, Normed, Squash


class CudaOps:
    """See `ops.Ops`. Of few rows the norm is left to the matmul behind it; a deterministic GPU has one way for any number."""

    def __init__(self, launcher: Launcher, deterministic: bool) -> None:
        self.launcher = launcher
        self.device = launcher.device
        self.deterministic = deterministic
        self.rope_tables = partial(rope_tables.rope_tables, launcher)
        self.mixture = partial(CudaMixture, launcher, deterministic)
        self.norm_sum = partial(norm.norm_sum, launcher)
        self.altup_predict = partial(altup.altup_predict, launcher)
        self.altup_correct = partial(altup.altup_correct, launcher)
        self.altup_enter = partial(altup.altup_enter, launcher)
        self.altup_match = partial(altup.altup_match, launcher)
        self.spread = partial(connection.spread, launcher)
        self.read_streams = partial(connection.read_streams, launcher)
        self.write_streams = partial(connection.write_streams, launcher)
        self.sparse_gate = partial(sparse_gate.sparse_gate, launcher)
        self.scan_parts = partial(scan_parts.scan_parts, launcher)
        self.head_matrices = partial(CudaHeadMatrices, launcher, deterministic)

    def angles(self, frequencies: torch.Tensor, attention_factor: float) -> AnglesOf:
        return partial(self.rope_tables, frequencies=frequencies, attention_factor=attention_factor)

    def add_rms_norm(
        self,
        x: Addend | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        centered: bool = False,
        shift: torch.Tensor | None = None,
    ) -> Hidden:
        if x is not None:
            if isinstance(x.rows, Normed):
                assert not centered, "no model centers behind a norm of what joins"
                return join_norm.join_and_norm(self.launcher, x.rows, residual, x.factor, weight, eps, offset)
            assert x.factor == 1.0, "no model has a factor without a norm"
            return norm.add_rms_norm(self.launcher, x.rows, residual, weight, eps, offset, centered, shift)
        if residual.shape[0] <= gemv.MAX_ROWS and not self.deterministic and not centered:
            return Normed(residual, weight, eps, offset)
        return norm.add_rms_norm(self.launcher, residual, None, weight, eps, offset, centered, shift)

    def join(self, x: Addend, residual: torch.Tensor) -> None:
        if isinstance(x.rows, Normed):
            join_norm.join(self.launcher, x.rows, residual, x.factor)
        else:
            scale.add(self.launcher, residual, x.rows, x.factor)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return norm.add_rms_norm(self.launcher, x, None, weight, eps, offset)

    def norm_columns(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return norm.norm_columns(self.launcher, x, weight, eps, offset)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
        return sigmoid_gate.sigmoid_gate(self.launcher, x, gate, softplus=softplus)

    def add(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return scale.add(self.launcher, x, y, factor)

    def add_row(self, x: torch.Tensor, row: torch.Tensor) -> None:
        self.launcher.torch_op(lambda: x.add_(row))

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return activations.gated(self.launcher, gate, up, activation)

    def best_gate(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return best_gate.best_gate(self.launcher, x, logits)

    def clip(self, x: torch.Tensor, least: float, most: float) -> torch.Tensor:
        return clip.clip(self.launcher, x, least, most)

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=self.device)

    def put_columns(self, x: torch.Tensor, wide: torch.Tensor, first: int) -> None:
        self.launcher.torch_op(lambda: wide[:, first : first + x.shape[1]].copy_(x))

    def temper(self, x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
        return temper.temper(self.launcher, x, positions, length, scale, offset)

    def xielu(self, x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
        return xielu.xielu(self.launcher, x, positive, negative, slope, edge)

    def scale(self, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
        return scale.scale(self.launcher, x, factor, cap)

    def rescale(self, x: torch.Tensor, shift: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        self.launcher.torch_op(lambda: x.copy_(compressed_rules.rescaled(x, shift, gains)))
        return x

    def with_open_gates(self, x: torch.Tensor, channels: int) -> torch.Tensor:
        out = self.room(x.shape[0], 3 * channels, x.dtype)
        self.launcher.torch_op(lambda: out.copy_(compressed_rules.with_open_gates(x, channels)))
        return out

    def of_the_best(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = self.room(logits.shape[0], logits.shape[1] - 1, logits.dtype)
        self.launcher.torch_op(lambda: out.copy_(compressed_rules.of_the_best(logits, bias)))
        return out

    def met_heads(
        self, projected: torch.Tensor, convolved: torch.Tensor, bias: torch.Tensor, before: torch.Tensor, gains: torch.Tensor,
        head_dim: int, num_keys: int, least: float,
    ) -> torch.Tensor:
        out, heads = torch.empty_like(projected), (head_dim, num_keys, least)
        rules = compressed_rules.met_heads
        self.launcher.torch_op(lambda: out.copy_(rules(projected, convolved, bias, before, gains, *heads)))
        return out

    def squash(self, x: torch.Tensor, kind: Squash, dtype: torch.dtype) -> torch.Tensor:
        return squash.squash(self.launcher, x, kind, dtype)

    def norm_streams(self, streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        raise UnsupportedError(*NO_GATED_STREAMS)

    def mix_streams(self, normed: torch.Tensor, gates: torch.Tensor, count: int, weights: torch.Tensor | None) -> torch.Tensor:
        raise UnsupportedError(*NO_GATED_STREAMS)

    def widened(self, x: torch.Tensor, count: int) -> torch.Tensor:
        wide = torch.empty(len(x), x.shape[1] + count, dtype=x.dtype, device=x.device)

        def fill() -> None:
            wide[:, : x.shape[1]].copy_(x)
            wide[:, x.shape[1] :].fill_(-math.inf)

        self.launcher.torch_op(fill)
        return wide
