"""The CPU's Ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import altups, compressed, connections, cpu, gates, norms, reference, scan, wkv
from nanovllm_cli.kernels.angles import KeptAngles
from nanovllm_cli.kernels.cpu_mixture import CpuMixture, add_onto
from nanovllm_cli.kernels.latent import CpuHeadMatrices
from nanovllm_cli.kernels.mixture import Expert, Scoring
from nanovllm_cli.kernels.ops import Addend, Normed


class CpuOps:
    """See `ops.Ops`. Norms are kernels of their own: a matmul never gets `Normed`. pool: where experts compute what is not
    recorded."""

    device = torch.device("cpu")
    rope_tables = staticmethod(reference.rope_tables)
    angles = KeptAngles
    head_matrices = CpuHeadMatrices
    add = staticmethod(add_onto)
    gated = staticmethod(gates.gated)
    add_row = staticmethod(gates.add_row)
    norm_columns = staticmethod(norms.norm_columns)
    norm_sum = staticmethod(norms.norm_sum)
    altup_predict = staticmethod(altups.altup_predict)
    altup_correct = staticmethod(altups.altup_correct)
    altup_enter = staticmethod(altups.altup_enter)
    altup_match = staticmethod(altups.altup_match)
    spread = staticmethod(connections.spread)
    read_streams = staticmethod(connections.read_streams)
    write_streams = staticmethod(connections.write_streams)
    norm_streams = staticmethod(connections.norm_streams)
    mix_streams = staticmethod(connections.mix_streams)
    sparse_gate = staticmethod(altups.sparse_gate)
    scan_parts = staticmethod(scan.scan_parts)
    squash = staticmethod(wkv.squash)
    rescale = staticmethod(compressed.rescale)
    with_open_gates = staticmethod(compressed.with_open_gates)
    of_the_best = staticmethod(compressed.of_the_best)
    met_heads = staticmethod(compressed.met_heads)

    def __init__(self, pool: cpu.Pool | None = None) -> None:
        self._pool = pool or cpu.MemoryPool()

    def mixture(
        self, experts: Sequence[Expert], num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
    ) -> CpuMixture:
        return CpuMixture(self._pool, experts, num_chosen, norm_topk, scoring)

    def add_rms_norm(
        self,
        x: Addend | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        centered: bool = False,
        shift: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x is None:
            return norms.add_rms_norm(residual, None, weight, eps, offset, centered, shift)
        if isinstance(x.rows, Normed):
            assert not centered, "no model centers behind a norm of what joins"
            return norms.join_and_norm(x.rows, residual, x.factor, weight, eps, offset)
        assert x.factor == 1.0, "no model has a factor without a norm"
        return norms.add_rms_norm(x.rows, residual, weight, eps, offset, centered, shift)

    def join(self, x: Addend, residual: torch.Tensor) -> None:
        if isinstance(x.rows, Normed):
            norms.join(x.rows, residual, x.factor)
        else:
            add_onto(residual, x.rows, x.factor)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return norms.add_rms_norm(x, None, weight, eps, offset)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
        return gates.sigmoid_gate(x, gate, softplus=softplus)

    def best_gate(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return gates.best_gate(x, logits)

    def clip(self, x: torch.Tensor, least: float, most: float) -> torch.Tensor:
        return gates.clip(x, least, most)

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return cpu.new_tensor((num_rows, width), dtype)

    def put_columns(self, x: torch.Tensor, wide: torch.Tensor, first: int) -> None:
        gates.put_columns(x, wide, first)

    def temper(self, x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
        return gates.temper(x, positions, length, scale, offset)

    def xielu(self, x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
        return gates.xielu(x, positive, negative, slope, edge)

    def scale(self, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
        return gates.scale(x, factor, cap)

    def widened(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, count), value=-math.inf)
