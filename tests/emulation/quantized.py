"""Random weights of a format, packed for a GPU, and what they mean."""

from __future__ import annotations

import torch

from emulation.compare import GENERATOR, random
from nanovllm_cli.kernels import packed
from nanovllm_cli.kernels.packed import Packed
from nanovllm_cli.quant import format as formats
from nanovllm_cli.quant.format import SCALE_TYPES, Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows, Nf4Rows


def quantized(
    form: Format, outputs: int, width: int, dtype: torch.dtype = torch.bfloat16, *, ordered: bool = False
) -> tuple[Packed, torch.Tensor]:
    """A random weight of a format, packed, and what it means in float64. nf4's values are rounded to the type that is computed
    in, as on a CPU."""
    rows = form.quantize(random(outputs, width, scale=width**-0.5))
    if isinstance(rows, Fp8Rows):
        assert isinstance(form, Fp8)
        weight = packed.empty("fp8", outputs, width, form.block, torch.float32, zeros=False, ordered=False, device="cpu")
        packed.pack_rows(weight, 0, rows.codes, rows.scales)
        return weight, form.dequantize(rows).double()
    if isinstance(rows, Nf4Rows):
        assert isinstance(form, Nf4)
        weight = packed.empty("nf4", outputs, width, form.group, torch.float32, zeros=False, ordered=False, device="cpu")
        packed.pack_rows(weight, 0, rows.codes, rows.scales)
        values = torch.tensor(formats.NF4).to(dtype)[rows.codes.long()].double()
        return weight, values * rows.scales.double().repeat_interleave(form.group, 1)
    assert isinstance(form, Integer)
    assert isinstance(rows, IntegerRows)
    if ordered:
        rows = rows._replace(order=torch.randperm(width, generator=GENERATOR).int())
    weight = packed.empty(
        "int8" if form.bits == 8 else "int4", outputs, width, form.group, SCALE_TYPES[form.scales], zeros=form.zeros,
        ordered=ordered, device="cpu",
    )  # fmt: skip
    packed.pack_rows(weight, 0, *rows)
    return weight, form.dequantize(rows).double()
