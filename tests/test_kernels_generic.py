"""The kernels' path for processors without AVX-512, compiled and run on this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for an older x86-64")
def test_matmul_on_a_processor_without_avx512(tmp_path: Path) -> None:
    settings = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("generic_cpu.py")
    done = subprocess.run([sys.executable, str(script)], env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for an older x86-64")
def test_integer_matmul_on_a_processor_without_avx512_gives_the_same_bits(tmp_path: Path) -> None:
    settings = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    script = str(Path(__file__).with_name("generic_cpu_integer.py"))
    digests = []
    for arguments, environment in ((["generic"], os.environ | settings), ([], dict(os.environ))):
        done = subprocess.run(
            [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1]
