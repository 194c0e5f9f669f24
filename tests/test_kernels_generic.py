"""The kernels' ways for processors with fewer instructions than this one's, compiled and run on this one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

import other_processor

# Name: LLVM's name for a processor, and what it has of which the kernels know.
PROCESSORS = {
    "avx2": ("haswell", "avx2,fma,f16c"),
    "avx-vnni": ("alderlake", "avx2,fma,f16c,avxvnni"),
    "avx512": ("skylake-avx512", "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for another x86-64")
@pytest.mark.parametrize("name", ["avx2"] if os.environ.get("CI") else PROCESSORS)
def test_kernels_of_another_processor(name: str) -> None:
    """The others, most of a minute of compiling, have AVX2's ways in the width or with the products of this one: not in CI."""
    processor, features = PROCESSORS[name]
    if not all(llvm.get_host_cpu_features().get(feature) for feature in features.split(",")):
        pytest.skip("this processor has no such instructions")
    numbas = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features.split(","))}
    settings = other_processor.kept(numbas)
    # AVX-VNNI has products of bytes, and everything else as AVX2 has it; in CI the others' floats are compiled for ARM alone.
    integers = name == "avx-vnni" or bool(os.environ.get("CI"))
    command = [sys.executable, str(Path(other_processor.__file__)), *(["integers"] if integers else [])]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["bf16 dot"], found["wide"], found["byte dot"]) == (False, name == "avx512", name == "avx-vnni")
    assert found["integers"] == other_processor.integers()
    if not integers:
        assert found["floats"] < 1e-6
        assert found["attention"] < 4e-3
        assert found["values"] < 3e-3
