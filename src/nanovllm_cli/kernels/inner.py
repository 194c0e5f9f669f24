"""How functions are compiled that only compiled ones call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from numba import njit
from numba.core.registry import CPUDispatcher


class _Inner(CPUDispatcher):  # type: ignore[misc]
    """Without what Python would need it has no way in: numba would jump to address 0."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self.py_func.__name__} can be called by compiled functions alone")


def inner(function: Callable[..., Any] | None = None, **options: object) -> Any:
    """Compile without what Python would need, and so without machine code of its own: a tenth less time for all kernels.

    @inner, or with more of numba's options @inner(fastmath=...).
    """
    if function is None:
        return lambda function: inner(function, **options)
    compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    compiled.__class__ = _Inner
    return compiled
