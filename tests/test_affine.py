"""Codes with a scale and a minimum a group (MLX's "affine"): the format, what a CPU and a GPU (emulated) make of it, against
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulation.compare import random, relative_error
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_stacked import CpuStacked
from nanovllm_cli.quant.cpu_values import CpuValues
from nanovllm_cli.quant.cuda_blocks import CudaBlocks
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.format import SCALE_TYPES, Affine, Blocks
from nanovllm_cli.quant.rows import AffineRows, take_rows
from test_cpu_integer import error, rounded

BITS = (2, 3, 4, 5, 6, 8)
FORMS = [*(Affine(bits, 64) for bits in BITS), Affine(4, 32), Affine(4, 128, "float16"), Affine(8, 32, "float32"), Affine(6, 16),
         Affine(3, 512)]  # fmt: skip


def drawn(form: Affine, n: int, width: int, seed: int = 0) -> tuple[AffineRows, torch.Tensor]:
    """Codes over their whole range, scales of either sign and some that are 0; and what they are, float64."""
    g, kind = torch.Generator().manual_seed(seed), SCALE_TYPES[form.scales]
    codes = torch.randint(0, 1 << form.bits, (n, width), generator=g).to(torch.uint8)
    scales = (torch.randn(n, width // form.group, generator=g) / 2**form.bits).to(kind)
    scales[::7, 0] = 0
    minima = torch.randn(n, width // form.group, generator=g).to(kind)
    values = codes.double().view(n, -1, form.group) * scales.double().unsqueeze(-1) + minima.double().unsqueeze(-1)
    return AffineRows(codes, scales, minima), values.view(n, width)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{form.scales}")
def test_numbers_are_what_the_formula_says(form: Affine) -> None:
    rows, values = drawn(form, 9, 512)
    assert relative_error(form.dequantize(rows), values) < 1e-7
    part = take_rows(rows, slice(2, 5))
    assert torch.equal(form.dequantize(part), form.dequantize(rows)[2:5])  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_off_by_half_a_step_at_most(bits: Any) -> None:
    form, values = Affine(bits, 32, "float32"), torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    rows = form.quantize(values)
    step = rows.scales.repeat_interleave(32, 1)
    assert ((form.dequantize(rows) - values).abs() <= step * 0.5001).all()
    assert rows.codes.max() == form.most
    constant = form.quantize(torch.full((1, 32), 0.5))
    assert torch.equal(form.dequantize(constant), torch.full((1, 32), 0.5))


def test_bytes_of_a_row_are_those_of_the_published_format() -> None:
    assert Affine(4, 64).row_bytes(4096) == 4096 / 2 + 64 * 4
    assert Affine(3, 32, "float32").row_bytes(4096) == 4096 * 3 / 8 + 128 * 8
    assert Affine(4, 64).name == "affine4:group=64"
    with pytest.raises(UnsupportedError, match="rows of 96 don't divide into groups of 64"):
        Affine(4, 64).check_width(96)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{form.scales}")
def test_a_cpu_multiplies_rounded_activations(form: Affine) -> None:
    rows, values = drawn(form, 70, 1024)
    storage = make_storage(form, 70, 1024, torch.bfloat16, rounds=True)
    assert isinstance(storage, CpuInteger)
    for first, last in ((0, 23), (23, 70)):
        storage.load_rows(first, take_rows(rows, slice(first, last)))
    for tokens in (1, 4, 9):
        x = random(tokens, 1024, dtype=torch.bfloat16)
        want = rounded(x.float(), min(form.group, 256)) @ values.T
        assert error(storage.matmul(x, None, torch.float32), want) < 1e-6
    ids = torch.tensor([69, 0, 7])
    assert torch.equal(storage.rows(ids, None), form.dequantize(rows)[ids].to(torch.bfloat16))
    assert storage.num_bytes < 128 * form.row_bytes(1024) * (1.09 if form.group < 256 else 1.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{form.scales}")
def test_a_cpu_multiplies_activations_as_they_are(form: Affine, dtype: torch.dtype) -> None:
    rows, values = drawn(form, 65, 512)
    storage = make_storage(form, 65, 512, dtype, rounds=False)
    assert isinstance(storage, CpuValues)
    storage.load_rows(0, rows)
    for tokens in (1, 3, 10):
        x = random(tokens, 512, dtype=dtype)
        assert error(storage.matmul(x, None, torch.float32), x.double() @ values.T) < 1e-6
    assert torch.equal(storage.rows(torch.tensor([64, 3]), None), form.dequantize(rows)[[64, 3]].to(dtype))


def test_parts_of_several_widths_of_codes_write_one_result() -> None:
    forms = [Affine(4, 64), Affine(6, 64), Affine(4, 32), Blocks("Q8_0")]
    parts = [make_storage(form, 64, 256, torch.bfloat16, rounds=True) for form in forms]
    stacked = CpuStacked(parts, torch.bfloat16)
    x, wanted = random(2, 256, dtype=torch.bfloat16), []
    for i, form in enumerate(forms):
        floats = random(64, 256) + i
        stacked.load_rows(64 * i, floats)
        group = form.group if isinstance(form, Affine) else 32
        wanted.append(rounded(x.float(), group) @ form.dequantize(form.quantize(floats)).double().T)
    assert error(stacked.matmul(x, None, torch.float32), torch.cat(wanted, 1)) < 1e-6


@needs_emulation
@pytest.mark.parametrize("form", FORMS[:-2], ids=lambda form: f"{form.name}-{form.scales}")
def test_a_gpu_multiplies_rounded_activations(form: Affine) -> None:
    """Of 32 columns each, whatever the group: as many as a matrix instruction multiplies."""
    for order, (tokens, width) in zip(ORDERS, ((1, 384), (3, 1024), (17, 128)), strict=False):
        rows, values = drawn(form, 35, width, order)
        storage = CudaBlocks(form, 35, width, torch.bfloat16, Emulator(order), False, True)
        storage.load_rows(0, rows)
        x = random(tokens, width, dtype=torch.bfloat16)
        got = storage.matmul(x, None, torch.float32)
        assert relative_error(got, rounded(x.float(), 32) @ values.T) < 2e-6


@needs_emulation
@pytest.mark.parametrize("form", FORMS[:-2], ids=lambda form: f"{form.name}-{form.scales}")
def test_a_gpu_unpacks_the_same_numbers(form: Affine) -> None:
    """In the order of the formula, one rounding a step."""
    rows, values = drawn(form, 37, 1024)
    values = (rows.codes.float().view(37, -1, form.group) * rows.scales.float().unsqueeze(-1)
              + rows.minima.float().unsqueeze(-1)).view(37, 1024)  # fmt: skip
    launcher = Emulator()
    storage = CudaBlocks(form, 37, 1024, torch.bfloat16, launcher, False, False)
    storage.load_rows(0, take_rows(rows, slice(0, 16)))
    storage.load_rows(16, take_rows(rows, slice(16, 37)))
    ids = torch.tensor([36, 0, 17, 5])
    assert torch.equal(storage.rows(ids, None), values[ids].to(torch.bfloat16))
    x = random(70, 1024, dtype=torch.bfloat16)
    got = storage.matmul(x, None, torch.float32)
    assert relative_error(got, x.double() @ values.to(torch.bfloat16).double().T) < 1e-5
    assert "block_unpack" in launcher.launches


def test_a_gpu_has_a_storage_for_it() -> None:
    storage = CudaFormats(Emulator(), rounds=True, deterministic=False).make(Affine(4, 64), 64, 256, torch.float16)
    assert isinstance(storage, CudaBlocks)
    assert storage.num_bytes == 64 * (128 + 4 * 4)
