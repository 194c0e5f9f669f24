"""Run by test_kernels_generic.py in a process of its own: the kernels as a processor without AVX-512 compiles them.

The features that LLVM reports for this machine are replaced before the kernels are imported, and numba is told to compile for
an older one. Prints the largest relative error against the reference.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import torch

llvm.get_host_cpu_features = lambda: {"avx2": True, "fma": True}

from nanovllm_cli.kernels import cpu, reference, simd  # noqa: E402

assert not simd.HAS_BF16_DOT
assert simd.TILE_VECTORS == 1
generator = torch.Generator().manual_seed(0)
worst = 0.0
for dtype in (torch.bfloat16, torch.float32):
    for tokens, n, k in ((1, 70, 34), (7, 130, 96)):
        x, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((tokens, k), (n, k)))
        packed = torch.zeros(cpu.packed_size(n, k, dtype), dtype=dtype)
        cpu.pack_rows(packed, 0, weight)
        actual = cpu.matmul(x, packed, n, None, torch.float32)
        expected = reference.matmul(x, weight, None, torch.float64)
        worst = max(worst, float((actual - expected).norm() / expected.norm()))
        assert torch.equal(cpu.matmul(x[:1].contiguous(), packed, n, None, torch.float32), actual[:1])
print(worst)
