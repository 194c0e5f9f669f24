"""Hyper-connections (Zhu et al. 2024, with weights of each token as in Hy4): several residual streams, of which attention and MLP
read a weighted sum, and to each of which what they make is added times a weight.

    g     = (matrix @ x) / rms(x) * scale + base        x: all streams of a token, one behind the other
    read    sum over s of (sigmoid(g_s) + least) x_s
    write   x_s += (most * sigmoid(g_S+s) + least) y    y: what attention or MLP has made of what was read

Streams lie one behind the other, [S, T, hidden]. All begin as the embedding; behind the last layer they are read once more. What
decides is fp32. With rounds (`ConnectionsSpec`) streams are mixed where they are written,

    write   x_k = most * sigmoid(g_S+k) y + sum over j of M_jk x_j      M: `mixing_rules.mixing` of g_2S and all behind it
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.layers.gated_streams import GatedConnection
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.streams_spec import ConnectionsSpec, GatedStreamsSpec


class Connection:
    """Of one half of a layer; without writes of what stands behind all layers. Legend: S streams, T tokens."""

    def __init__(
        self, spec: ConnectionsSpec, norm: NormSpec, hidden_size: int, kit: Kit, name: str, *, writes: bool = True
    ) -> None:
        shares = spec.num_shares if writes else spec.count
        self.spec, self.eps, self.name = spec, norm.eps, name
        self.ops: Ops = kit.ops
        self.matrix = kit.zeros(shares, spec.count * hidden_size, dtype=torch.float32)
        self.base = kit.zeros(shares, dtype=torch.float32)
        self.scale = kit.zeros(spec.num_scales if writes else 1, dtype=torch.float32)

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, T, hidden] -> what a half of the layer reads [T, hidden], and by what weights it writes, fp32 [T, S] or more."""
        spec = self.spec
        return self.ops.read_streams(streams, self.matrix, self.base, self.scale, self.eps, spec.least, spec.most, spec.rounds)

    def slots(self) -> Slots:
        tables = {"weight": self.matrix, "base": self.base, "scale": self.scale}
        return {f"{self.name}.{part}": table_slot(table) for part, table in tables.items()}


def connection_of(
    spec: ConnectionsSpec | GatedStreamsSpec, norm: NormSpec, hidden_size: int, kit: Kit, name: str, *, writes: bool = True
) -> Connection | GatedConnection:
    """What a half of a layer reads several streams by, and by what weights it writes them; of either kind."""
    kind = Connection if isinstance(spec, ConnectionsSpec) else GatedConnection
    return kind(spec, norm, hidden_size, kit, name, writes=writes)  # type: ignore[arg-type]


class Connections:
    """All streams out of one, and one out of all."""

    def __init__(self, spec: ConnectionsSpec | GatedStreamsSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.ops, self.count = kit.ops, spec.count
        self.last = connection_of(spec, norm, hidden_size, kit, "last_connection", writes=False)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [S, T, hidden]."""
        return self.ops.spread(x, self.count)

    def leave(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, T, hidden] -> [T, hidden]."""
        return self.last.read(streams)[0]

    def slots(self) -> Slots:
        return self.last.slots()
