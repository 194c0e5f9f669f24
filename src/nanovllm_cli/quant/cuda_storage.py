"""What all storages of a GPU have in common: a norm, a gate and a residual go with the product, or before and behind it.

Legend: M rows of x, K columns (inputs), N outputs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Self, Unpack

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels import norm
from nanovllm_cli.kernels.experts import FEW_ROWS, Tasks
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden, Normed
from nanovllm_cli.kernels.product import After, AfterFew
from nanovllm_cli.quant.rows import QuantizedRows


class CudaStorage(ABC):
    """A WeightStorage. dtype: what is computed in. deterministic: a row's bits may not depend on how many rows there are.
    What has a `place` has its weight there, if that is not the device. task_rows, is_far: see `kernels/cuda_mixture.py`."""

    recordable = True
    task_rows = FEW_ROWS
    is_far = False
    _weight: Any
    """A tensor, or several with what else there is to know in a tuple with names."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool) -> None:
        self.num_rows = num_rows
        self.width = width
        self._dtype = dtype
        self._launcher = launcher
        self._deterministic = deterministic

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None: ...

    @abstractmethod
    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor: ...

    @property
    @abstractmethod
    def task_form(self) -> Hashable:
        """See `kernels/cuda_mixture.py`; so the next four."""

    @property
    @abstractmethod
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]: ...

    @abstractmethod
    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor: ...

    @property
    def task_bytes(self) -> int:
        return self.num_bytes

    def task_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return bias

    @abstractmethod
    def _are_few(self, num_rows: int) -> bool:
        """Whether so many rows have a kernel of their own, with norm and gate in it."""

    @abstractmethod
    def _multiply_few(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[AfterFew]) -> torch.Tensor:
        """See `gemv.gemv`."""

    @abstractmethod
    def _multiply_many(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        """See `gemm.gemm`."""

    def elsewhere(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with all tensors of the weight where `move` puts them."""
        weight, other = self._weight, copy.copy(self)
        if isinstance(weight, torch.Tensor):
            other._weight = move(weight)
        else:
            moved = {name: move(each) for name, each in weight._asdict().items() if isinstance(each, torch.Tensor)}
            other._weight = weight._replace(**moved)
        return other

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        if bias is not None and bias.dtype != self._dtype:  # a router's: kernels add what has the type of their inputs
            y = self._multiply(x, None, out_dtype=out_dtype)
            self._launcher.torch_op(lambda: y.add_(bias))
            return y
        return self._multiply(x, bias, out_dtype=out_dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if self._are_few(count_rows(x)):
            return self._multiply_few(x, bias, activation=activation)
        return activations.gated_activation(self._launcher, self._multiply_many(x, bias), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        self._multiply(x, bias, residual=residual)

    def _multiply(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        multiply = self._multiply_few if self._are_few(count_rows(x)) else self._multiply_many
        return multiply(x, bias, **after)

    def _normed(self, x: Hidden) -> torch.Tensor:
        """x, by a kernel of its own where it is still to be normalised."""
        if isinstance(x, Normed):
            return norm.add_rms_norm(self._launcher, x.rows, None, x.weight, x.eps, x.offset)
        return x


def count_rows(x: Hidden) -> int:
    return (x.rows if isinstance(x, Normed) else x).shape[0]
