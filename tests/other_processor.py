"""Run by test_kernels_generic.py and test_kernels_arm.py in a process of its own: kernels as NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES have them compiled.

Prints a digest of what integer matmuls give, which are whole numbers times scales and so the same bits on any processor, and the
largest relative errors of the others; with the argument `integers` those are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import llvmlite
import numba
import numpy as np
import torch

from nanovllm_cli.folders import cache_folder
from nanovllm_cli.kernels import cpu, integer, reference, simd, simd_compact, simd_products
from nanovllm_cli.kernels.compact import Compact
from nanovllm_cli.kernels.record_kinds import F16, NO_LOW, RecordLayout
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.cpu_records import pack_rows
from nanovllm_cli.quant.format import Fp8, Nf4
from test_cpu_records import CODEBOOKS, KINDS, codebook_layout, random_rows
from test_kernels_cpu import Paged

STEP = 6 if os.environ.get("CI") else 1
"""Each kind is compiled by itself: where nothing is kept of it, every sixth one must do."""


def kept(settings: dict[str, str], *sources: Path) -> dict[str, str]:
    """The settings, and the folder of what was compiled with them of the same sources, by the same versions: it takes half a
    minute. sources: besides the package's kernels."""
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, np.__version__, sorted(settings.items()))).encode())
    for source in (*sorted(Path(cpu.__file__).parent.glob("*.py")), *sources):
        digest.update(source.read_bytes())
    return settings | {"NUMBA_CACHE_DIR": str(cache_folder() / "other_processors" / digest.hexdigest()[:16])}


def integers() -> str:
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)
    x = torch.randn(9, 288, generator=generator).bfloat16()
    x[:, 7] = 40.0  # the largest activation, of either sign
    x[0, :64] = -40.0
    layouts = [RecordLayout(130, 288, *kind[:4], offset=kind[4]) for kind in KINDS[::STEP]]
    layouts += [RecordLayout(130, 288, 4, 32, F16, NO_LOW, table=table) for table in (tuple(range(0, 256, 17)), tuple(range(16)))]
    for layout in layouts:
        weight = integer.empty(layout)
        pack_rows(layout, weight.data, 0, random_rows(layout))
        for tokens in (1, 2, 9):
            out = torch.empty(tokens, 130)
            integer.matmul(integer.quantize(x[:tokens], integer.Rounding(layout.group, False, None)), weight, None, out)
            assert out.isfinite().all()
            assert out.any(1).all()
            digest.update(out.numpy().tobytes())
    for index_bits, length, signs in CODEBOOKS[::STEP]:
        layout = codebook_layout(70, 288, index_bits, length, signs)
        weight = integer.empty(layout)
        pack_rows(layout, weight.data, 0, random_rows(layout))
        out = torch.empty(3, 70)
        integer.matmul(integer.quantize(torch.ones(3, 288).bfloat16(), integer.Rounding(32, False, None)), weight, None, out)
        digest.update(out.numpy().tobytes())
    return digest.hexdigest()


def floats() -> float:
    """The largest relative error of matmuls in bf16 and fp32. And a row's bits are the same whatever the number of rows, and
    whether its weights are kept in 12 bits."""
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for n, k in ((70, 34), (130, 620)):
            weight = torch.randn(n, k, generator=generator).to(dtype)
            packed = torch.zeros(cpu.packed_size(n, k, dtype), dtype=dtype)
            cpu.pack_rows(packed, 0, weight)
            x = torch.randn(11, k, generator=generator).to(dtype)
            whole = cpu.matmul(x, packed, n, None, torch.float32)
            expected = reference.matmul(x, weight, None, torch.float64)
            worst = max(worst, float((whole - expected).norm() / expected.norm()))
            kept = Compact(n, k) if dtype == torch.bfloat16 and simd_compact.AVAILABLE else None
            if kept is not None:
                kept.load_rows(0, weight)
            for tokens in range(1, 12):
                some = x[:tokens].contiguous()
                assert torch.equal(cpu.matmul(some, packed, n, None, torch.float32), whole[:tokens])
                assert kept is None or torch.equal(kept.matmul(some, None, torch.float32), whole[:tokens])
    return worst


def values() -> float:
    """The largest relative error of bf16 times fp8 and nf4; a row's bits are the same whatever the number of rows."""
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for form in (Fp8(128, "none"), Nf4()):
        weight = make_storage(form, 70, 320, torch.bfloat16, rounds=False)
        weight.load_rows(0, torch.randn(70, 320, generator=generator))
        x = torch.randn(11, 320, generator=generator).bfloat16()
        whole = weight.matmul(x, None, torch.float32)
        expected = x.double() @ weight.rows(torch.arange(70), None).double().T  # whose numbers are rounded to bf16
        worst = max(worst, float((whole - expected).norm() / expected.norm()))
        for tokens in range(1, 5):
            assert torch.equal(weight.matmul(x[:tokens].contiguous(), None, torch.float32), whole[:tokens])
    return worst


def attention() -> float:
    """The largest relative error of attention in bf16, one chunk of 70 tokens and one of 20."""
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for window in (0, 20):
        cache = Paged([70, 20], 2, 80, torch.bfloat16)
        q, out = cache.step(torch.randn(90, 640, generator=generator).bfloat16(), [70, 20], [70, 20], 4, window=window)
        for sequence, rows in ((0, slice(0, 70)), (1, slice(70, 90))):
            k, v = cache.history(sequence, rows.stop - rows.start)
            expected = reference.attention(q[rows].float(), k, v, 0, 80**-0.5, window, 0.0, None)
            worst = max(worst, float((out[rows].reshape(expected.shape) - expected).norm() / expected.norm()))
    return worst


if __name__ == "__main__":
    found = {
        "bf16 dot": simd.HAS_BF16_DOT, "wide": simd.WIDE, "byte dot": simd_products.HAS_BYTE_DOT, "integers": integers(),
    }  # fmt: skip
    errors = {} if "integers" in sys.argv else {"floats": floats(), "attention": attention(), "values": values()}
    print(json.dumps(found | errors))
