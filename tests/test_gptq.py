"""GPTQ against the same method written straight in float64, and against what rounding to nearest loses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.quant import gptq
from nanovllm_cli.quant.format import Format, Fp8, Integer
from nanovllm_cli.quant.gptq import quantize_gptq

FORMATS: list[Integer | Fp8] = [
    Integer(4, 32, scales="float32"),
    Integer(4, 32, zeros=True, scales="float32"),
    Integer(3, 64, scales="float16"),
    Integer(2, 32, zeros=True),
    Integer(8, 0, scales="float32"),
    Fp8(),
    Fp8(128),
]


def problem(n: int = 7, width: int = 192, tokens: int = 500, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the Hessian of inputs that go together and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) * width**-0.5 + torch.eye(width)
    inputs = torch.randn(tokens, width, generator=generator) @ mix * torch.rand(width, generator=generator).mul(2).exp()
    return torch.randn(n, width, generator=generator) * 0.05, inputs.T @ inputs / tokens


def loss(weight: torch.Tensor, hessian: torch.Tensor, form: Format, rows: object) -> np.ndarray:
    """Of each row: d H d^T, in float64."""
    off = (form.dequantize(rows) - weight).double().numpy()  # type: ignore[arg-type]
    return np.einsum("nk,kj,nj->n", off, hessian.double().numpy(), off)


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are those of the largest weights, as in the paper."""
    monkeypatch.setattr(gptq, "SHARES", (1.0,))


def brute_force(weight: torch.Tensor, hessian: torch.Tensor, form: Integer) -> np.ndarray:
    """Optimal brain surgery, a column at a time, with the inverse of the Hessian of what is left: values [N, K] in float64."""
    w, h = weight.double().numpy().copy(), hessian.double().numpy()
    inverse = np.linalg.inv(h + 0.01 * np.mean(np.diag(h)) * np.eye(len(h)))
    group = form.group or w.shape[1]
    parts = [replace(form, group=0).quantize(part) for part in weight.split(group, 1)]
    scales = [part.scales[:, 0].double().numpy() for part in parts]
    values = np.zeros_like(w)
    for j in np.argsort(-np.diag(h), kind="stable").tolist():
        codes = np.clip(np.round(w[:, j] / scales[j // group]), -form.middle, form.most - form.middle)
        values[:, j] = codes * scales[j // group]
        error = (w[:, j] - values[:, j]) / inverse[j, j]
        w -= np.outer(error, inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, :] = inverse[:, j] = 0
    return values


@pytest.mark.parametrize("width", [64, 192, 320])
@pytest.mark.parametrize("group", [0, 32, 64])
def test_it_is_the_column_by_column_update_of_the_paper(width: int, group: int, largest: None) -> None:
    weight, hessian = problem(width=width)
    form = Integer(4, group, scales="float32")
    rows = quantize_gptq(weight, hessian, form)
    off = np.abs(form.dequantize(rows).double().numpy() - brute_force(weight, hessian, form))
    # A value that lies between two codes to the last bit of fp32 may go either way, and take its row with it.
    assert np.mean(off.max(axis=1) < 1e-4) > 0.8


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("search", [True, False])
def test_outputs_are_nearer_than_with_rounding_to_nearest(
    form: Integer | Fp8, search: bool, request: pytest.FixtureRequest
) -> None:
    if not search:
        request.getfixturevalue("largest")
    weight, hessian = problem()
    rows = quantize_gptq(weight, hessian, form)
    nearest = loss(weight, hessian, form, form.quantize(weight))
    found = loss(weight, hessian, form, rows)
    assert (found <= nearest * (1 + 1e-4)).all()
    assert found.sum() < 0.8 * nearest.sum()


def test_searched_scales_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(n=40, width=256)
    form = Integer(4, 0)
    searched = loss(weight, hessian, form, quantize_gptq(weight, hessian, form)).sum()
    monkeypatch.setattr(gptq, "SHARES", (1.0,))
    assert searched < 0.9 * loss(weight, hessian, form, quantize_gptq(weight, hessian, form)).sum()


@pytest.mark.parametrize("shares", [gptq.SHARES, (1.0,)], ids=["searched", "largest"])
def test_no_row_is_worse_than_rounded_to_nearest_where_errors_cannot_be_made_up_for(
    shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that have nothing to do with each other: GPTQ's damping changes nothing, and its scales may lose."""
    monkeypatch.setattr(gptq, "SHARES", shares)
    weight, _ = problem(n=64)
    form = Integer(2, 32)
    hessian = torch.eye(192)
    found = loss(weight, hessian, form, quantize_gptq(weight, hessian, form))
    assert (found <= loss(weight, hessian, form, form.quantize(weight)) * (1 + 1e-5)).all()


def test_a_row_of_several_weights_is_the_row_of_one() -> None:
    weight, hessian = problem(n=12)
    form = Integer(4, 64)
    both = quantize_gptq(weight, hessian, form)
    parts = [quantize_gptq(weight[part], hessian, form) for part in (slice(0, 5), slice(5, 12))]
    together = torch.cat([form.dequantize(part) for part in parts])
    assert torch.isclose(form.dequantize(both), together, atol=1e-5).float().mean() > 0.98


def test_the_same_input_gives_the_same_bytes() -> None:
    weight, hessian = problem(n=33, width=320)
    form = Integer(4, 32)
    first, second = (quantize_gptq(weight.clone(), hessian.clone(), form) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales)


def test_arguments_are_left_alone() -> None:
    weight, hessian = problem()
    before = weight.clone(), hessian.clone()
    quantize_gptq(weight, hessian, Integer(4, 32))
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


def test_columns_that_saw_nothing_are_rounded_to_nearest(largest: None) -> None:
    weight, hessian = problem()
    dead = torch.tensor([3, 64, 65, 191])
    hessian[dead] = 0
    hessian[:, dead] = 0
    form = Integer(8, 0, scales="float32")
    rows = quantize_gptq(weight, hessian, form)
    assert torch.equal(rows.codes[:, dead], form.quantize(weight).codes[:, dead])
    assert float(loss(weight, hessian, form, rows).sum()) < float(loss(weight, hessian, form, form.quantize(weight)).sum())


def test_fewer_tokens_than_columns_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = problem(tokens=5)
    form = Integer(4, 32)
    monkeypatch.setattr(gptq, "DAMPING", 1e-12)
    found = loss(weight, hessian, form, quantize_gptq(weight, hessian, form))
    assert found.sum() < 0.5 * loss(weight, hessian, form, form.quantize(weight)).sum()
    monkeypatch.setattr(gptq, "SHARES", (1.0,))
    silent = quantize_gptq(weight, torch.zeros(192, 192), form)
    assert torch.equal(silent.codes, form.quantize(weight).codes)


def test_a_hessian_that_is_none_is_refused() -> None:
    weight, hessian = problem()
    broken = hessian.clone()
    broken[5, 5] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        quantize_gptq(weight, broken, Integer(4, 32))
    with pytest.raises(CheckpointError, match="no inverse"):
        quantize_gptq(weight, hessian - 1e9 * torch.ones_like(hessian) + 1e9 * torch.eye(192), Integer(4, 32))


def test_rows_that_do_not_divide_into_groups_are_refused() -> None:
    weight, hessian = problem(width=200)
    with pytest.raises(UnsupportedError, match="groups of 64"):
        quantize_gptq(weight, hessian, Integer(4, 64))
