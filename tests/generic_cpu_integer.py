"""Run by test_kernels_generic.py in a process of its own: integer matmuls as a processor without AVX-512 compiles them (see
generic_cpu.py). Prints a digest of results, which are whole numbers times scales: equal to the bit on any processor that rounds
fused multiply-adds alike.
"""

from __future__ import annotations

import hashlib
import sys

import llvmlite.binding as llvm
import torch

if sys.argv[1:] == ["generic"]:
    llvm.get_host_cpu_features = lambda: {"avx2": True, "fma": True}

from nanovllm_cli.kernels import integer, simd_int, simd_ir
from nanovllm_cli.kernels.record_kinds import F16, NO_LOW, SUB_I8, SUB_MIN, SUB_U8, RecordLayout
from nanovllm_cli.quant.cpu_records import pack_rows
from test_cpu_records import CODEBOOKS, codebook_layout, random_rows

assert sys.argv[1:] != ["generic"] or not (simd_ir.HAS_BYTE_DOT or simd_int.WIDE)
generator = torch.Generator().manual_seed(0)
digest = hashlib.sha256()
for bits, group, scale, low, table in (
    (4, 32, F16, NO_LOW, None), (6, 16, SUB_I8, NO_LOW, None), (5, 32, SUB_U8, SUB_MIN, None), (8, 256, F16, NO_LOW, None),
    (4, 32, F16, NO_LOW, tuple(range(0, 256, 16))),
):  # fmt: skip
    layout = RecordLayout(130, 288, bits, group, scale, low, table=table)
    data = torch.randint(0, 60, (layout.num_bytes,), generator=generator, dtype=torch.uint8)
    weight = integer.Packed(layout, data, None if table is None else torch.tensor(table, dtype=torch.uint8))
    x = torch.randn(8, 288, generator=generator).bfloat16()
    out = torch.empty(8, 130)
    integer.matmul(integer.quantize(x, integer.Rounding(group, False, None)), weight, None, out)
    assert out.isfinite().all()
    assert out.any(1).all()
    digest.update(out.numpy().tobytes())
for index_bits, length, signs in CODEBOOKS:
    layout = codebook_layout(70, 288, index_bits, length, signs)
    weight = integer.empty(layout)
    pack_rows(layout, weight.data, 0, random_rows(layout))
    out = torch.empty(3, 70)
    integer.matmul(integer.quantize(torch.ones(3, 288).bfloat16(), integer.Rounding(32, False, None)), weight, None, out)
    digest.update(out.numpy().tobytes())
print(digest.hexdigest())
