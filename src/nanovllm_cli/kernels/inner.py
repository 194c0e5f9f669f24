"""How functions are compiled that only compiled ones call."""

from __future__ import annotations

import functools
from typing import Any

from numba import njit

inner: Any = functools.partial(njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Without what Python would need of them, and so without machine code of their own: an eighth to a third of the time to compile.
@inner, or with more of numba's options @inner(fastmath=...)."""
