"""How functions are compiled that only compiled ones call.

Numba makes a library of each, with all that it calls, optimizes it and has machine code made of it; and then again as a part of
who calls it. Here what nobody asks the address of stays as it was lowered (`whole_kernels`): LLVM sees it once, in the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target


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


@contextlib.contextmanager
def whole_kernels() -> Iterator[None]:
    """What is compiled in here takes three quarters of the time."""
    generator = cpu_target.target_context.codegen()
    with global_compiler_lock:
        generator._library_class, generator.set_env = _Library, lambda name, env: _set_env(generator, name, env)
        try:
            yield
        finally:
            del generator._library_class, generator.set_env  # those of its class are back


def _set_env(generator: Any, name: str, env: Any) -> None:
    """For functions that have an address; those of kernels from the cache never had one for what they call, either."""
    if generator._engine.is_symbol_defined(name):
        type(generator).set_env(generator, name, env)


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Optimized, and made machine code of, when the address of one of its functions is asked for, or its object code."""

    _only_links = _is_made = False

    def finalize(self) -> None:
        self._only_links = True
        try:
            super().finalize()
        finally:
            self._only_links = False

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if any(function.name == name for function in self.get_defined_functions()):
            self._make()
        return int(super().get_pointer_to_function(name))

    def _get_compiled_object(self) -> Any:
        self._make()
        return super()._get_compiled_object()

    def _make(self) -> None:
        if not self._is_made:
            self._dynamic_globals.clear()  # looked for once more
            self._optimize_final_module()
            self._final_module.verify()
            self._finalize_final_module()

    def _optimize_final_module(self) -> None:
        if not self._only_links:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        """Of what comes from the cache, too."""
        if self._only_links:
            self._finalize_dynamic_globals()
            self._finalized = True
        else:
            super()._finalize_final_module()
            self._is_made = True
