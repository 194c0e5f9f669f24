"""Each CPU kernel against `kernels/reference.py`, at odd sizes, in bf16 and fp32; and the bit-level promises."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm_cli.kernels import cpu, cpu_attention, gates, norms, reference
from nanovllm_cli.kernels.cpu_mixture import add_onto
from nanovllm_cli.kernels.ops import Normed

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
GENERATOR = torch.Generator().manual_seed(7)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.zeros(cpu.packed_size(*weight.shape, weight.dtype), dtype=weight.dtype)
    cpu.pack_rows(packed, 0, weight)
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(1, 64, 64), (2, 17, 33), (5, 513, 31), (7, 100, 24), (97, 130, 80), (200, 65, 256)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul_equals_reference(tokens: int, n: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(tokens, k, dtype=dtype), randn(n, k, dtype=dtype)
    for out_dtype in {dtype, torch.float32}:
        bias = randn(n, dtype=out_dtype) if with_bias else None
        actual = cpu.matmul(x, pack(weight), n, bias, out_dtype)
        assert error(actual, reference.matmul(x, weight, bias, torch.float64)) < TOLERANCE[out_dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [33, 256, 1000])
def test_a_row_of_matmul_has_the_same_bits_in_any_batch(k: int, dtype: torch.dtype) -> None:
    x, packed = randn(211, k, dtype=dtype), pack(randn(150, k, dtype=dtype))
    whole = cpu.matmul(x, packed, 150, None, torch.float32)
    for first, last in [(0, 1), (5, 6), (3, 5), (0, 7), (90, 101), (13, 211)]:
        assert torch.equal(cpu.matmul(x[first:last].contiguous(), packed, 150, None, torch.float32), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_come_back_and_can_be_packed_in_parts(dtype: torch.dtype) -> None:
    weight = randn(135, 37, dtype=dtype)
    packed = torch.zeros_like(pack(weight))
    for first, last in [(0, 50), (50, 51), (51, 135)]:
        cpu.pack_rows(packed, first, weight[first:last].contiguous())
    assert torch.equal(packed, pack(weight))
    ids = torch.tensor([134, 0, 77, 77])
    assert torch.equal(cpu.unpack_rows(packed, ids, 37), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [17, 64, 1000])
@pytest.mark.parametrize(("with_residual", "centered"), [(False, False), (True, False), (True, True)])
def test_add_rms_norm_equals_reference(width: int, with_residual: bool, centered: bool, dtype: torch.dtype) -> None:
    x, weight = randn(9, width, dtype=dtype) + 2, randn(width, dtype=dtype)
    residual = randn(9, width, dtype=dtype) if with_residual else None
    expected_residual = residual.clone() if residual is not None else None
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6, 1.0, centered)
    actual = norms.add_rms_norm(x, residual, weight, 1e-6, 1.0, centered)
    assert error(actual, expected) < TOLERANCE[dtype]
    if residual is not None and expected_residual is not None:
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [17, 64, 1000])
@pytest.mark.parametrize(("adds", "shifts"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_stream_is_normed_in_its_place(width: int, adds: bool, shifts: bool, dtype: torch.dtype) -> None:
    x, stream = (randn(9, width, dtype=dtype) + 2 for _ in range(2))
    weight, shift = randn(2, width, dtype=dtype)
    expected = reference.norm_sum(x if adds else None, stream, weight, shift if shifts else None, 1e-12)
    norms.norm_sum(x if adds else None, stream, weight, shift if shifts else None, 1e-12)
    assert error(stream, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [17, 64])
def test_columns_are_normed_in_their_place(width: int, dtype: torch.dtype) -> None:
    whole, weight = randn(5, 3 * width + 1, dtype=dtype), randn(width, dtype=dtype)
    columns = slice(width + 1, 2 * width + 1)
    expected = whole.clone()
    expected[:, columns] = reference.add_rms_norm(whole[:, columns], None, weight, 1e-6, 0.0)
    norms.norm_columns(whole[:, columns], weight, 1e-6, 0.0)
    assert error(whole, expected) < TOLERANCE[dtype]
    expected[:, columns] = whole[:, columns]
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scale_equals_reference(cap: float, dtype: torch.dtype) -> None:
    """More numbers than a task has, and fewer."""
    for rows, width in ((3, 17), (5, 4099)):
        x = randn(rows, width, dtype=dtype) * 4
        expected = reference.scale(x, 0.22, cap)
        assert gates.scale(x, 0.22, cap) is x
        assert error(x, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2", "relu2_gated", "relu_gated", "lone_gelu", "lone_gelu_tanh"]
)
def test_gated_activation_equals_reference(activation: str, dtype: torch.dtype) -> None:
    x = randn(5, 2 * 37, dtype=dtype) * 8
    x[0, :3] = torch.tensor([-20.0, 0.0, 20.0], dtype=dtype)
    expected = reference.gated_activation(x, activation)
    assert error(gates.gated_activation(x, activation), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", [(0.8, 1.3, 0.5, -1e-6), (3.0, 0.1, -0.25, -0.75), (0.5, 2.0, 0.5, 0.5)])
def test_xielu_equals_reference(factors: tuple[float, float, float, float], dtype: torch.dtype) -> None:
    """In more numbers than a task has; next to 0 to the digit, and a NaN stays one."""
    x = randn(5, 1037, dtype=dtype) * 4
    x[0, :6] = torch.tensor([-1e4, -1e-3, -1e-6, 0.0, 1e-6, 1e4], dtype=dtype)
    expected = reference.xielu(x.double(), *factors)
    assert gates.xielu(x, *factors) is x
    assert error(x, expected.to(dtype)) < TOLERANCE[dtype]
    if factors[3] < 0:  # else what is near 0 is so, too
        assert x[0, 1:5].tolist() == pytest.approx(expected[0, 1:5].tolist(), rel=2e-7 if dtype == torch.float32 else 5e-3)
    x[3, 5] = torch.nan
    assert gates.xielu(x, *factors).isnan().nonzero().tolist() == [[3, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_queries_that_grow_equal_reference(offset: int, dtype: torch.dtype) -> None:
    """Columns of a wider tensor; before the first step they stay as they are."""
    whole, positions = randn(7, 100, dtype=dtype), torch.tensor([0, 15, 16, 31, 32, 47, 1 << 20])
    expected, before = whole.double(), whole.clone()
    expected[:, 3:40] = reference.temper(expected[:, 3:40], positions, 16, 0.3, offset)
    gates.temper(whole[:, 3:40], positions, 16, 0.3, offset)
    assert error(whole, expected.to(dtype)) < TOLERANCE[dtype]
    assert torch.equal(whole[: 2 - offset], before[: 2 - offset])
    assert not torch.equal(whole[2, 3:40], before[2, 3:40])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_best_expert_reads_equals_reference(dtype: torch.dtype) -> None:
    for rows, width, experts in ((1, 16, 1), (5, 37, 16), (3, 100, 128)):
        x, logits = randn(rows, width, dtype=dtype), randn(rows, experts) * 4
        assert error(gates.best_gate(x, logits), reference.best_gate(x.double(), logits.double()).to(dtype)) < TOLERANCE[dtype]
    logits[1, 77] = torch.nan
    assert gates.best_gate(x, logits).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_clipped_equals_torch(dtype: torch.dtype) -> None:
    """Columns of a wider tensor; what is no number stays none."""
    whole = randn(7, 100, dtype=dtype)
    whole[2, 3:6] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    expected, limit = whole.clone(), torch.tensor(0.7, dtype=dtype).item()
    expected[:, 3:40] = expected[:, 3:40].double().clamp(-limit, limit).to(dtype)
    gates.clip(whole[:, 3:40], -0.7, 0.7)
    assert whole.isnan().nonzero().tolist() == [[2, 3]]
    assert torch.equal(whole.nan_to_num(9.0), expected.nan_to_num(9.0))
    positive = whole.relu()
    assert torch.equal(gates.clip(whole, 0.0, math.inf).nan_to_num(9.0), positive.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 17), (5, 33), (70, 1000), (0, 16)])
def test_a_row_is_added_to_each_and_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, row = randn(*shape, dtype=dtype), randn(shape[1], dtype=torch.float32)
    row[3] = 1e30
    expected = (x.double() + row.double()).float().to(dtype)
    alone = x[:1].clone()
    gates.add_row(x, row)
    assert torch.equal(x, expected)
    gates.add_row(alone, row)
    assert torch.equal(alone, expected[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_rows_are_normed_by_themselves(dtype: torch.dtype) -> None:
    x, weight = randn(7, 3 * 37, dtype=dtype), randn(3 * 37, dtype=dtype)
    found = norms.add_rms_norm(x.view(21, 37), None, weight, 1e-6, 0.5).view(7, 111)
    for part in (slice(37 * i, 37 * i + 37) for i in range(3)):
        expected = reference.add_rms_norm(x[:, part].double(), None, weight[part], 1e-6, 0.5)
        assert error(found[:, part], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 33), (3, 1000)])
def test_two_norms_and_a_sum_equal_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, gains, weight = (randn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,), (width,)))
    wanted = residual.float().clone()
    expected = reference.join_and_norm(x.float(), gains.float(), wanted, 0.7, weight.float(), 1e-6, 0.5)
    before = residual.clone()
    out = norms.join_and_norm(Normed(x, gains, 1e-6, 0.5), residual, 0.7, weight, 1e-6, 0.5)
    assert expected is not None
    assert error(residual, wanted) < TOLERANCE[dtype]
    assert error(out, expected) < TOLERANCE[dtype]
    norms.join(Normed(x, gains, 1e-6, 0.5), before, 0.7)
    assert torch.equal(before, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sides_of_a_gate_may_be_columns_of_others(dtype: torch.dtype) -> None:
    left, right = randn(5, 90, dtype=dtype), randn(5, 64, dtype=dtype)
    gate, up = left[:, 20:57], right[:, 3:40]
    expected = reference.gated_activation(torch.cat([gate, up], 1), "gelu_tanh")
    assert error(gates.gated(gate, up, "gelu_tanh"), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_sum_is_scaled_before_it_is_rounded(factor: float, dtype: torch.dtype) -> None:
    x, y = randn(7, 33, dtype=dtype), randn(7, 33, dtype=dtype)
    expected = ((x.float() + y.float()) * factor).to(dtype)
    assert add_onto(x, y, factor) is x
    assert error(x, expected) < (1e-7 if dtype == torch.float32 else 1e-9)


def test_activation_of_extremes_is_finite_and_nan_stays_nan() -> None:
    x = torch.tensor([[200.0, -200.0, float("nan"), 0.0, 1.0, 1.0, 1.0, 1.0]])
    out = gates.gated_activation(x, "silu")[0]
    assert out[0] == 200.0
    assert out[1].abs() < 1e-30
    assert out[2].isnan()
    assert out[3] == 0.0


def test_squares_of_relu_are_what_their_formula_says() -> None:
    """In more numbers than a task has, too."""
    numbers = [3.0, -3.0, 0.5, -0.0, float("inf"), -float("inf"), float("nan")]
    for gated in (gates.gated_activation, reference.gated_activation):
        out = gated(torch.tensor([numbers * 1000]), "relu2").view(1000, 7)
        assert out[:, :6].tolist() == [[9.0, 0.0, 0.25, 0.0, float("inf"), 0.0]] * 1000
        assert out[:, 6].isnan().all()


def test_the_clamped_activation_is_what_its_formula_says() -> None:
    """Gates of 1, 9 and -9 beside ups of -9, 2 and 9, by hand: x * sigmoid(1.702 x) * (1 + up), both clamped at 7."""
    x = torch.tensor([[1.0, 9.0, -9.0, float("nan"), 1.0, -9.0, 2.0, 9.0, 1.0, float("nan")]])
    sigmoid = lambda z: 1 / (1 + math.exp(-1.702 * z))
    expected = [sigmoid(1) * -6, 7 * sigmoid(7) * 3, -9 * sigmoid(-9) * 8]
    for gated in (gates.gated_activation, reference.gated_activation):
        out = gated(x, "swiglu_oai")[0]
        assert out[:3].tolist() == pytest.approx(expected, rel=1e-5)
        assert out[3:].isnan().all()


class Paged:
    """A paged cache with `lens` tokens of history per sequence, its blocks in random order, stale memory poisoned."""

    def __init__(self, lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None) -> None:
        self.lens, self.kv_heads, self.dim, self.dtype, self.value_dim = lens, kv_heads, dim, dtype, value_dim or dim
        width = max(-(-n // 16) for n in lens)
        blocks = torch.randperm(width * len(lens) + 3, generator=GENERATOR).to(torch.int32)
        self.tables = blocks[: width * len(lens)].reshape(len(lens), width).contiguous()
        k_shape, v_shape = cpu.cache_shapes(len(blocks), kv_heads, dim, dtype, value_dim=value_dim)
        self.k = torch.full(k_shape, float("nan"), dtype=dtype)
        self.v = torch.full(v_shape, float("nan"), dtype=dtype)

    def step(
        self, qkv: torch.Tensor, query_lens: list[int], kv_lens: list[int], heads: int, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write and attend; returns (q after rope, output)."""
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, kv_lens, strict=True)])
        seq = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
        slots = self.tables[seq, positions // 16].long() * 16 + positions % 16
        starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        run = torch.cat([torch.arange(q, 0, -1) for q in query_lens]).int()
        half = int(options.get("half", self.dim // 2))  # type: ignore[call-overload]
        angles = positions[:, None].float() / 100 ** (torch.arange(half) / half)
        norms = (options.get(f"{part}_norm") for part in "qkv")
        q = cpu.rope_and_cache(
            qkv, heads, self.kv_heads, self.dim, *norms, 1e-6, float(options.get("norm_offset", 0)),  # type: ignore[arg-type]
            angles.cos(), angles.sin(), bool(options.get("interleaved", False)), slots, run, self.k, self.v,
            bool(options.get("reads", False)), bool(options.get("norm_last", False)), self.value_dim,
        )  # fmt: skip
        tiles = cpu.attention_tiles(starts, torch.tensor(kv_lens, dtype=torch.int32), heads // self.kv_heads)
        out = cpu.paged_attention(
            q, self.k, self.v, tiles, self.tables, self.dim**-0.5, int(options.get("window", 0)),  # type: ignore[call-overload]
            float(options.get("softcap", 0.0)), options.get("sinks"),  # type: ignore[arg-type]
            both_ways=bool(options.get("both_ways", False)), distances=options.get("distances"),  # type: ignore[arg-type]
            value_dim=self.value_dim,
        )  # fmt: skip
        return q, out

    def history(self, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [length, kv_heads, dim] as the cache holds them."""
        blocks = self.tables[seq].long()
        k = self.k[blocks].permute(0, 3, 1, 2, 4).reshape(-1, self.kv_heads, self.dim)
        v = self.v[blocks].permute(0, 2, 4, 1, 3).reshape(-1, self.kv_heads, self.v.shape[3])
        return k[:length], v[:length, :, : self.value_dim]


CASES = [
    # heads, kv_heads, dim, lens, options
    (2, 1, 24, [33, 1, 17], {}),
    (8, 8, 80, [70, 129], {"interleaved": True}),
    (6, 2, 64, [5, 100, 64, 16], {"half": 16}),
    (8, 1, 128, [150], {"window": 20}),
    (4, 2, 64, [200, 31], {"softcap": 5.0}),
    (3, 1, 32, [65, 3], {"sinks": True, "window": 64}),
    (8, 2, 512, [19, 70], {"v_norm": True}),
    (4, 1, 24, [33], {"v_norm": True, "half": 6, "window": 10}),
    (6, 2, 48, [70, 1030], {"v_norm": True, "values": 18, "sinks": True}),
    (4, 2, 24, [33, 2], {"norm_last": True, "v_norm": True, "half": 10}),
    (4, 4, 32, [70, 1, 129, 600], {"both_ways": True}),
    (6, 2, 24, [17, 300, 64], {"both_ways": True, "window": 33, "sinks": True}),
    (2, 1, 16, [1030], {"both_ways": True, "window": 520, "softcap": 5.0}),
    (12, 12, 24, [1, 70, 129, 600], {"both_ways": True, "distances": True}),
    (6, 2, 32, [65, 3, 1030], {"both_ways": True, "distances": True}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 17, 20])
def test_a_value_that_is_not_finite_is_seen_by_those_behind_it_alone(place: int, bad: float, dtype: torch.dtype) -> None:
    """In the same step, and in one that comes before it is written over, as of a guess that did not hold."""
    heads, kv_heads, dim, length = 4, 2, 24, 21
    qkv = randn(length, (heads + 2 * kv_heads) * dim, dtype=dtype)
    _, expected = Paged([length], kv_heads, dim, dtype).step(qkv, [length], [length], heads)
    spoilt = qkv.clone()
    spoilt[place, (heads + kv_heads) * dim + 3] = bad  # of the first head's value
    _, found = Paged([length], kv_heads, dim, dtype).step(spoilt, [length], [length], heads)
    assert torch.equal(found[:place], expected[:place])
    half = heads // kv_heads * dim  # whose queries have that head
    assert found[place:, :half].isnan().all()
    assert torch.equal(found[place:, half:], expected[place:, half:])

    again = Paged([length], kv_heads, dim, dtype)
    again.step(spoilt[: place + 1], [place + 1], [place + 1], heads)
    _, alone = again.step(qkv[place : place + 1], [1], [place + 1], heads)
    assert torch.equal(alone[0], expected[place]), "what was there is gone"
    if place + 1 < length:
        again.step(spoilt[place : place + 1].repeat(2, 1), [2], [place + 2], heads)
        _, alone = again.step(qkv[place : place + 1], [1], [place + 1], heads)
        assert torch.equal(alone[0], expected[place]), "and of one behind it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "lens", "options"), CASES)
def test_rope_cache_and_attention_equal_reference(
    heads: int, kv_heads: int, dim: int, lens: list[int], options: dict[str, object], dtype: torch.dtype
) -> None:
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = randn(heads)
    if options.get("distances"):
        options["distances"] = 3 * randn(heads, 2 * max(lens) + 64)
    own = (heads, dim) if options.get("norm_last") else (dim,)
    options |= {"q_norm": randn(*own, dtype=dtype), "k_norm": randn(dim, dtype=dtype), "norm_offset": 0.5}
    value_dim, before = int(options.get("values", dim)), (heads + kv_heads) * dim  # type: ignore[call-overload]
    if options.get("v_norm"):
        options["v_norm"] = randn(value_dim, dtype=dtype)
    paged = Paged(lens, kv_heads, dim, dtype, value_dim)
    qkv = randn(sum(lens), before + kv_heads * value_dim, dtype=dtype)
    q, out = paged.step(qkv, lens, lens, heads, **options)
    row = 0
    for seq, length in enumerate(lens):
        rows = slice(row, row + length)
        split, values = qkv[rows, :before].reshape(length, -1, dim), qkv[rows, before:].reshape(length, -1, value_dim)
        half = int(options.get("half", dim // 2))  # type: ignore[call-overload]
        angles = torch.arange(length)[:, None].float() / 100 ** (torch.arange(half) / half)

        def normed(part: torch.Tensor, norm: str) -> torch.Tensor:
            gains = options[norm].float()  # type: ignore[attr-defined]
            return reference.add_rms_norm(part.float(), None, gains, 1e-6, 0.5)

        def turned(part: torch.Tensor, norm: str, angles: torch.Tensor = angles) -> torch.Tensor:
            interleaved = bool(options.get("interleaved"))
            if options.get("norm_last"):
                return normed(reference.rope(part.float(), angles.cos(), angles.sin(), interleaved), norm)
            return reference.rope(normed(part, norm), angles.cos(), angles.sin(), interleaved)

        k, v = paged.history(seq, length)
        assert error(q[rows], turned(split[:, :heads], "q_norm")) < TOLERANCE[dtype]
        assert error(k, turned(split[:, heads:], "k_norm")) < TOLERANCE[dtype]
        if options.get("v_norm") is None:
            assert torch.equal(v, values)
        else:
            assert error(v, normed(values, "v_norm")) < TOLERANCE[dtype]
        expected = reference.attention(
            q[rows].float(), k, v, 0, dim**-0.5, int(options.get("window", 0)), float(options.get("softcap", 0.0)),  # type: ignore[call-overload, arg-type]
            options.get("sinks"), bool(options.get("both_ways")), options.get("distances"),  # type: ignore[arg-type]
        )  # fmt: skip
        assert error(out[rows].reshape(length, heads, value_dim), expected) < TOLERANCE[dtype]
        row += length
    kept = paged.k.clone(), paged.v.clone()
    alone = paged.step(qkv[:, : heads * dim], lens, lens, heads, **options, reads=True)
    assert all(torch.equal(found, wanted) for found, wanted in zip(alone, (q, out), strict=True)), "queries alone"
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip((paged.k, paged.v), kept, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_nan_is_seen_by_all_that_see_it_and_nobody_else(dtype: torch.dtype) -> None:
    length, tables = 150, torch.arange(10, dtype=torch.int32)[None].contiguous()
    k, v = (randn(*shape, dtype=dtype) for shape in cpu.cache_shapes(10, 1, 32, dtype))
    tiles = cpu.attention_tiles(torch.tensor([0, length]), torch.tensor([length]), 1)
    q = randn(length, 1, 32, dtype=dtype)
    for place in (0, 17, 63, 64, 149):
        broken = k.clone()
        broken[place // 16, 0, :, place % 16] = float("nan")
        out = cpu.paged_attention(q, broken, v, tiles, tables, 0.2, 0, 0.0, None)
        assert out.isnan().any(1).tolist() == [position >= place for position in range(length)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_row_that_sees_only_minus_infinity_has_the_softmax_of_that(has_sinks: bool, dtype: torch.dtype) -> None:
    """And nothing of the head before, whose sums lie where its own would."""
    tables = torch.zeros(1, 1, dtype=torch.int32)
    k, v = (randn(*shape, dtype=dtype) for shape in cpu.cache_shapes(1, 2, 16, dtype))
    q, sinks = torch.ones(3, 2, 16, dtype=dtype), torch.zeros(2) if has_sinks else None
    q[:, 1], k[:, 1] = 1e30, -1e30
    if has_sinks:
        v[:, 0] = torch.nan
    out = cpu.paged_attention(q, k, v, torch.tensor([[0, 0, 3, 0, 3]]), tables, 1.0, 0, 0.0, sinks)[:, 16:]
    assert not out.any() if has_sinks else out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [-3.0, -0.01, 0.0, 0.01, 0.07, 0.08, 0.3, 6.0, 90.0])
def test_scores_may_rise_and_fall_as_they_like(step: float, dtype: torch.dtype) -> None:
    """From key to key, so that from one tile to the next what they are measured by stays, or rises; up to where exp overflows."""
    length, dim = 300, 16
    scores, values = (torch.arange(length) * step).to(dtype), randn(length, dim, dtype=dtype)
    q, k = torch.zeros(2, length, dim, dtype=dtype)
    q[:, 9], k[:, 9] = 4, scores  # dims that are not turned; 4 is the root of 16
    paged = Paged([length], 1, dim, dtype)
    _, out = paged.step(torch.cat([q, k, values], 1), [length], [length], 1, half=2)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.double()[None].expand(length, length).masked_fill(~seen, -torch.inf).softmax(-1)
    assert error(out.view(length, dim), (weights @ values.double()).float()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(4, 2, 24, 0), (4, 2, 24, 37), (8, 4, 8, 0), (2, 1, 16, 0)])
def test_attention_gives_the_same_bits_whatever_the_chunks(
    heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype
) -> None:
    lens = [150, 83]
    qkv = [randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype) for n in lens]
    whole = Paged(lens, kv_heads, dim, dtype)
    _, expected = whole.step(torch.cat(qkv), lens, lens, heads, window=window)
    for chunk in (1, 7, 64):
        parts = Paged(lens, kv_heads, dim, dtype)
        outs: list[list[torch.Tensor]] = [[], []]
        for begin in range(0, max(lens), chunk):
            ends = [min(n, begin + chunk) for n in lens]
            alive = [s for s in (0, 1) if ends[s] > begin]
            sub = Paged([lens[s] for s in alive], kv_heads, dim, dtype)
            sub.k, sub.v, sub.tables = parts.k, parts.v, parts.tables[alive].contiguous()
            _, out = sub.step(
                torch.cat([qkv[s][begin : ends[s]] for s in alive]), [ends[s] - begin for s in alive],
                [ends[s] for s in alive], heads, window=window,
            )  # fmt: skip
            for s, piece in zip(alive, out.split([ends[s] - begin for s in alive]), strict=True):
                outs[s].append(piece)
        assert torch.equal(torch.cat([torch.cat(o) for o in outs]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 600}, {"softcap": 5.0, "sinks": randn(6)}, {"both_ways": True, "window": 600}],
    ids=["", "window", "sinks", "both ways"],
)
def test_long_sequences_have_the_same_bits_in_parts_side_by_side(
    options: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim, lens = 6, 2, 24, [1500, 513, 512, 40]
    paged = Paged(lens, kv_heads, dim, dtype)
    qkv = randn(sum(lens), (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, whole = paged.step(qkv, lens, lens, heads, **options)
    ends = torch.tensor(lens).cumsum(0) - 1
    for seq, length in enumerate(lens):
        expected = reference.attention(
            q[ends[seq] : ends[seq] + 1].float(), *paged.history(seq, length), length - 1, dim**-0.5,
            int(options.get("window", 0)), float(options.get("softcap", 0.0)), options.get("sinks"),  # type: ignore[call-overload, arg-type]
        )  # fmt: skip
        assert error(whole[ends[seq]].view(1, heads, dim), expected) < TOLERANCE[dtype]
    launched = []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda kernel, *args: (launched.append(kernel), launch(kernel, *args)))
    for tasks, in_parts in ((0, False), (1000, True)):
        launched.clear()
        monkeypatch.setattr(cpu, "TASKS_A_THREAD", tasks)
        _, out = paged.step(qkv[ends].contiguous(), [1] * len(lens), lens, heads, **options)
        assert torch.equal(out, whole[ends])
        assert (cpu_attention.join_parts in launched) == in_parts


CROSSING = """
import hashlib, sys, torch
from nanovllm_cli.kernels import cpu, gates, norms
cpu.set_num_threads(2)
g = torch.Generator().manual_seed(0)
x, weight = torch.randn(50, 144, generator=g), torch.randn(72, generator=g)
made = [norms.add_rms_norm(x[:, :72].contiguous(), None, weight, 1e-6, 0.0), gates.gated_activation(x, "silu")]
tensors = [t for part in made for t in (part if isinstance(part, tuple) else (part,)) if t is not None]
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(), "numba.np.linalg" in sys.modules)
"""


def test_a_kernel_from_the_cache_has_the_bits_of_one_just_compiled(tmp_path: Path) -> None:
    """numba optimises a parallel kernel once more before it is kept: nothing may be left to its discretion. What it loads to
    compile stays away then."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", CROSSING], env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
            check=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    (digest, compiles), (again, loads) = (done.stdout.split() for done in runs)
    assert (digest, compiles, loads) == (again, "True", "False")
