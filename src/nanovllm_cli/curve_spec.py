"""Activations of MLPs by name, and numbers of one that checkpoints bring, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal[
    "silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2", "lone_gelu", "lone_gelu_tanh", "lone_relu", "lone_silu", "xielu",
    "relu2_gated", "relu_gated",
]  # fmt: skip
"""See `MLPSpec`."""
GATED: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2_gated", "relu_gated")
"""Those that are of a gate, whose result another number is multiplied with."""


@dataclass(frozen=True, slots=True)
class XieluSpec:
    """The numbers of an MLP's xIELU (Huang and Schlag 2024), as checkpoints have them: two are learned, and made positive."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """positive, negative, slope and edge, as `kernels.reference.xielu` has them."""
        positive, negative = (math.log1p(math.exp(-abs(each))) + max(each, 0.0) for each in (self.alpha_p, self.alpha_n))
        return positive, self.beta + negative, self.beta, self.eps
