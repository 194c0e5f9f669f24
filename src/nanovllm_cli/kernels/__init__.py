"""Kernels. `reference` says what each op means; `cpu` is the CPU's side of it, on compiled code of `cpu_*` and `simd`; the GPU's
side is `x.cu` with `x.py` beside it."""

from nanovllm_cli.processors import check_thread_limit

check_thread_limit()  # before any of these files imports numba
