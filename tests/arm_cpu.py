"""Run by test_kernels_arm.py in a process of its own: another script, with kernels built for ARM (NUMBA_CPU_FEATURES says so) and
its instructions written out for this processor."""

from __future__ import annotations

import runpy
import sys

import arm_intrinsics
from nanovllm_cli.kernels import simd_ir

assert simd_ir.NEON
simd_ir.known_function = arm_intrinsics.known_function
simd_ir.opaque = lambda builder, register: register
runpy.run_path(sys.argv[1], run_name="__main__")
