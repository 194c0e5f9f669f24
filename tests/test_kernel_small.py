"""scale.cu, ranks.cu, activation.cu, embedding.cu, blocks.cu: against float64, and byte for byte where nothing is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from emulation.compare import behind_nan, close_to_rounding, random
from emulation.emulator import ORDERS, Emulator, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import activation, blocks, cpu, embedding, reference, scale
from nanovllm_cli.kernels.ranks import scale_ranks

pytestmark = needs_emulation
BF16, HALF = torch.bfloat16, torch.float16
DTYPES = (BF16, HALF)
# Widths for 16-byte loads and for single elements alone: each other vector would be a compilation more.
WIDTHS = [8, 64, 264, 2056, 4096, 1, 17, 33, 301]


def untouched_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which only what is written takes memory; a system that wants it all to be there skips the test."""
    try:
        return cpu.zeros(numel, dtype)
    except OSError:
        pytest.skip(f"no address space of {numel * dtype.itemsize >> 30} GiB")


# ---- scale ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scale_is_one_rounding_from_float64(dtype: torch.dtype, cap: float, order: int) -> None:
    for tokens, width in zip((1, 3, 2, 5, 1, 4, 7, 1, 2), WIDTHS, strict=True):
        x = random(tokens, width, dtype=dtype, scale=4.0)
        expected = reference.scale(x.double(), 0.22, cap)
        got = scale.scale(Emulator(order), x, 0.22, cap)
        assert got is x
        close_to_rounding(got, expected)


def test_scale_goes_no_further_than_its_numbers() -> None:
    memory = torch.ones(301, dtype=BF16)
    scale.scale(Emulator(), memory[:33], 2.0)
    assert memory.tolist() == [2.0] * 33 + [1.0] * 268


def test_numbers_that_begin_on_no_boundary_of_a_load_are_scaled() -> None:
    memory, others = torch.ones(12, dtype=BF16), torch.ones(8, dtype=BF16)
    scale.scale(Emulator(), memory[1:9], 2.0)
    scale.add(Emulator(), others, memory[1:9], 1.0)
    assert memory.tolist() == [1.0] + [2.0] * 8 + [1.0] * 3
    assert others.tolist() == [3.0] * 8


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 0.22])
def test_a_sum_times_a_factor_is_rounded_once(dtype: torch.dtype, factor: float, order: int) -> None:
    for tokens, width in zip((1, 3, 2, 5, 1, 4, 7, 1, 2), WIDTHS, strict=True):
        x, y = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype, scale=100.0)
        expected = (x.double() + y.double()) * factor
        got = scale.add(Emulator(order), x, y, factor)
        assert got is x
        close_to_rounding(got, expected, sums=0.0 if dtype != torch.float32 else 2.0**-22)


def test_a_sum_goes_no_further_than_its_numbers() -> None:
    memory, more = torch.ones(301, dtype=BF16), torch.full((301,), 3.0, dtype=BF16)
    scale.add(Emulator(), memory[:33], more[:33], 0.5)
    assert memory.tolist() == [2.0] * 33 + [1.0] * 268
    assert (more == 3.0).all()


def test_a_sum_of_other_numbers_is_refused() -> None:
    x = random(3, 8, dtype=BF16)
    for y in (x.half(), x[:2].clone(), x.T.contiguous().T, x.view(8, 3)):
        with pytest.raises(AssertionError):
            scale.add(Emulator(), x, y, 2.0)


# ---- ranks ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rows_take_is_one_rounding_from_float64(dtype: torch.dtype, order: int) -> None:
    """Of some they take nothing, and one of these would be infinite."""
    shapes = ((1, 16, 1), (3, 48, 2), (2, 272, 5), (5, 1, 3), (4, 33, 64), (1, 301, 4), (7, 512, 2), (9, 257, 7))
    for tokens, width, count in shapes:
        x, scales = random(tokens, width, scale=4.0), random(tokens, count) * (random(tokens, count) > 0)
        modules = torch.arange(width, dtype=torch.int32) % count
        x[:, :1] = torch.where(scales[:, :1] == 0, torch.inf, x[:, :1])
        got = scale_ranks(Emulator(order), x, scales, modules, dtype)
        close_to_rounding(got, reference.scale_ranks(x.double(), scales.double(), modules, torch.float64))


# ---- activation ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(filter(None, activation.ACTIVATIONS)))
def test_activation_is_one_rounding_from_float64(kind: str, dtype: torch.dtype, order: int) -> None:
    for tokens, width in zip((1, 3, 2, 5, 1, 4, 7, 1, 2), WIDTHS, strict=True):
        x = random(tokens, 2 * width, dtype=dtype, scale=4.0)
        got = activation.gated_activation(Emulator(order), x, kind)
        close_to_rounding(got, reference.gated_activation(x.double(), kind))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("wide_gate", "wide_up"), [(0, 0), (0, 3), (1, 0), (1, 2)], ids=str)
def test_activation_of_columns_is_one_rounding_from_float64(
    wide_gate: int, wide_up: int, dtype: torch.dtype, order: int
) -> None:
    """Of tensors so many times wider, the last columns of each; also from an odd place on."""
    for tokens, width in zip((1, 3, 2, 5, 1, 4, 7, 1, 2), WIDTHS, strict=True):
        gate = behind_nan(random(tokens, width, dtype=dtype, scale=4.0), wide_gate * width)
        up = behind_nan(random(tokens, width, dtype=dtype), wide_up * width + (wide_up == 2))
        got = activation.gated(Emulator(order), gate, up, "gelu_tanh")
        close_to_rounding(got, reference.gated_activation(torch.cat([gate, up], 1).double(), "gelu_tanh"))
        assert got.is_contiguous()


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_columns_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    stride, tokens = 1 << 27, 34
    memory = untouched_memory(tokens * stride, BF16).view(tokens, stride)
    up, gate = memory[:, 5:22], random(tokens, 17, dtype=BF16)
    up[-1] = random(17, dtype=BF16)
    got = activation.gated(Emulator(bugs=bugs, only_block=tokens - 1), gate, up, "silu")[-1:]
    expected = reference.gated_activation(torch.cat([gate[-1:], up[-1:]], 1), "silu")
    assert torch.allclose(got.float(), expected.float(), rtol=0.01) == (not bugs)


@pytest.mark.parametrize(
    "bad",
    [lambda x: x.half(), lambda x: x[:2], lambda x: x[:, :7], lambda x: x.T.contiguous().T],
    ids=["type", "rows", "columns", "strides"],
)
def test_activation_of_columns_refuses_what_it_would_misread(bad: Any) -> None:
    x = random(3, 8, dtype=BF16)
    for gate, up in ((bad(x), x), (x, bad(x))):
        with pytest.raises(AssertionError):
            activation.gated(Emulator(), gate, up, "silu")


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "swiglu_oai"])
def test_activation_far_from_zero(kind: str) -> None:
    """Its tail keeps all its digits, and an exponential that overflows gives zero."""
    below = [-1e30, -60000.0, -100.0, -80.0, -20.0, -9.0, -5.0, -3.0, -1e-3, -0.0]
    gates = torch.tensor([*below, 1e-3, 5.0, 90.0, 100.0, 60000.0, 1e30])
    x = torch.cat((gates, torch.ones(16)))[None].to(BF16)
    got = activation.gated_activation(Emulator(), x, kind)
    # In float64 from forms without cancellation: torch's own have one.
    gate = x[0, :16].double()
    if kind == "swiglu_oai":
        gate = gate.clamp(max=7.0)
    cubic = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    sigmoid = {"silu": gate, "gelu_tanh": cubic, "swiglu_oai": 1.702 * gate}
    expected = gate * (torch.special.erfc(-gate / 2**0.5) / 2 if kind == "gelu" else sigmoid[kind].sigmoid())
    close_to_rounding(got[0], 2 * expected if kind == "swiglu_oai" else expected, sums=0.0)


def test_gpt_oss_bounds_the_gate_from_above_and_up_from_both_sides() -> None:
    gates, ups = torch.tensor([6.5, 7.0, 7.5, 1e30, -7.5, -9.0, 2.0]), torch.tensor([-1e30, -7.5, -7.0, -1.0, 7.0, 7.5, 1e30])
    x = torch.stack((gates.repeat_interleave(7), ups.repeat(7))).view(1, 98).to(BF16)
    got = activation.gated_activation(Emulator(), x, "swiglu_oai")
    gate, up = (half.double() for half in x.chunk(2, dim=-1))
    gate, up = gate.minimum(torch.tensor(7.0)), up.maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
    close_to_rounding(got, gate / (1 + (-1.702 * gate).exp()) * (up + 1), sums=0.0)


@pytest.mark.parametrize("kind", ["silu", "swiglu_oai", "relu2_gated", "relu_gated"])
def test_activation_passes_nan_on(kind: str) -> None:
    x = torch.ones(1, 32, dtype=BF16)
    x[0, 3] = x[0, 20] = torch.nan
    got = activation.gated_activation(Emulator(), x, kind)
    assert got.isnan().nonzero()[:, 1].tolist() == [3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_above_zero_is_squared(dtype: torch.dtype) -> None:
    """To infinity, where that is too large; a NaN stays one."""
    x = torch.tensor([[-torch.inf, -1e4, -3.0, -1e-7, -0.0, 0.0, 1e-7, 2.0, 3.5, 1e4, torch.inf, torch.nan]], dtype=dtype)
    before = x.clone()
    got = activation.gated_activation(Emulator(), x, "relu2")
    assert got.shape == x.shape
    assert torch.equal(x[:, :-1], before[:, :-1])
    assert got[0, -1].isnan()
    assert torch.equal(got[:, :-1], x.double().relu().square().to(dtype)[:, :-1])
    ups = torch.full_like(x, 0.5)
    gated = activation.gated_activation(Emulator(), torch.cat([x, ups], 1), "relu2_gated")
    assert torch.equal(gated[:, :-1], (x.double().relu().square() / 2).to(dtype)[:, :-1])
    assert gated[0, -1].isnan()
    gated = activation.gated_activation(Emulator(), torch.cat([x, ups], 1), "relu_gated")
    assert torch.equal(gated[:, :-1], (x.double().relu() / 2).to(dtype)[:, :-1])
    assert gated[0, -1].isnan()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["lone_gelu", "lone_gelu_tanh"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 17), (2, 96), (1, 3000)])
def test_gelu_without_a_gate(tokens: int, width: int, kind: str, order: int) -> None:
    for dtype in DTYPES:
        x = 3 * random(tokens, width, dtype=dtype)
        before = x.clone()
        close_to_rounding(activation.gated_activation(Emulator(order), x, kind), reference.gated_activation(x.double(), kind))
        assert torch.equal(x, before)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_without_a_gate_is_that_of_a_gate_whose_up_is_one(kind: str) -> None:
    """Far from zero, too, and for a NaN."""
    gates = torch.tensor([[-torch.inf, -1e30, -100.0, -9.0, -5.0, -1e-3, -0.0, 1e-3, 5.0, 1e30, torch.inf, torch.nan]]).to(BF16)
    got = activation.gated_activation(Emulator(), gates, f"lone_{kind}")
    with_gate = activation.gated_activation(Emulator(), torch.cat((gates, torch.ones_like(gates)), 1), kind)
    assert torch.equal(got.nan_to_num(7.0), with_gate.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["relu2", "lone_gelu"])
def test_what_has_no_gate_is_not_taken_for_one(kind: str) -> None:
    x, other = (random(3, 8, dtype=BF16) for _ in range(2))
    with pytest.raises(AssertionError):
        activation.gated(Emulator(), x, other, kind)


def test_activation_without_a_mask_is_found() -> None:
    """Threads past the end of a row would take the next row's elements, and write there."""
    x = random(4, 2 * 17, dtype=BF16)
    memory = torch.zeros(4 * 17 + 64, dtype=BF16)
    correct = activation.gated_activation(Emulator(), x, "silu")
    wrong = []
    for order in ORDERS:
        emulator = Emulator(order, bugs=("UNMASKED_TAIL",))
        longer = torch.cat((x.flatten(), torch.zeros(64, dtype=BF16)))
        args = (longer, longer[17:], memory, np.int64(34), np.int64(34), np.int32(17), np.int32(activation.ACTIVATIONS["silu"]))
        emulator.launch(activation.variant(BF16, 1), (4, 1, 1), (32, 1, 1), args)
        wrong.append(not torch.equal(memory[: 4 * 17].view(4, 17), correct))
    assert any(wrong)


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x[:, :63].contiguous(),
        lambda x: x.T,
        lambda x: x.view(torch.int16),
    ],
    ids=["odd", "strides", "type"],
)
def test_activation_refuses_what_it_would_misread(bad: Any) -> None:
    with pytest.raises((AssertionError, KeyError)):
        activation.gated_activation(Emulator(), bad(random(3, 64, dtype=BF16)), "silu")


def test_activation_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="relu"):
        activation.gated_activation(Emulator(), random(3, 64, dtype=BF16), "relu")


# ---- embedding ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 45.25, 8.001])
def test_embedding_is_torchs(dtype: torch.dtype, scale: float, order: int) -> None:
    for tokens, width in zip((1, 3, 2, 5, 1, 4, 7, 1, 2), WIDTHS, strict=True):
        weight, ids = random(11, width, dtype=dtype), torch.randint(0, 11, (tokens,))
        got = embedding.embedding(Emulator(order), ids, weight, scale)
        rows = weight[ids]
        rows *= scale
        assert torch.equal(got, rows)
        assert torch.equal(got, reference.embedding(ids, weight, scale))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 17])
def test_ids_and_indices_out_of_range_are_rows_of_zeros(width: int, dtype: torch.dtype, order: int) -> None:
    weight = random(7, width, dtype=dtype)
    weight[0] = torch.nan
    ids = torch.tensor([6, -1, 7, 3, 2**40, -(2**33), 2**32 + 1, 5])
    got = embedding.embedding(Emulator(order), ids, weight, 2.0)
    assert torch.equal(got, reference.embedding(ids, weight, 2.0))
    assert got.any(dim=1).nonzero().flatten().tolist() == [0, 3, 7]
    tokens, slots = torch.tensor([3, -1, 6, 7, 1]), torch.tensor([2, -1, 0, 1, 5, 3, 2**32, 4, 2])
    got = embedding.embedding(Emulator(order), slots, weight, 1.0, tokens)
    assert torch.equal(got, reference.embedding(slots, weight, 1.0, tokens))
    assert got.any(dim=1).nonzero().flatten().tolist() == [0, 2, 7, 8]


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_an_embedding_past_four_billion_elements(bugs: tuple[str, ...]) -> None:
    width = 2**16
    weight = untouched_memory((2**16 + 2) * width, BF16).view(-1, width)
    weight[2**16 + 1] = row = random(width, dtype=BF16)
    got = embedding.embedding(Emulator(bugs=bugs), torch.tensor([2**16 + 1]), weight)
    assert torch.equal(got[0], row) == (not bugs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", torch.zeros(3, dtype=torch.int32)),
        ("ids", torch.zeros(6, dtype=torch.int64)[::2]),
        ("weight", torch.ones(4, 8, dtype=torch.int16)),
        ("weight", torch.ones(8, 4, dtype=BF16).T),
        ("tokens", torch.zeros(4, dtype=torch.int32)),
    ],
)
def test_embedding_refuses_what_it_would_misread(name: str, value: torch.Tensor) -> None:
    args = {"ids": torch.zeros(3, dtype=torch.int64), "weight": torch.ones(4, 8, dtype=BF16), name: value}
    with pytest.raises((AssertionError, KeyError)):
        embedding.embedding(Emulator(), **args)


# ---- blocks ----

Layers = list[tuple[torch.Tensor, torch.Tensor]]
CACHES = [
    (5, [(1, 16, 17)], BF16),
    (9, [(2, 16, 64), (1, 16, 24), (3, 16, 128)], BF16),
    (4, [(8, 16, 128)] * 3, HALF),
    (3, [(5, 16, 100), (1, 16, 1)], torch.float8_e4m3fn),
    (6, [(4, 32, 72)] * 2, torch.float8_e4m3fn),
]
"""Blocks, layers and type; from 16 bytes a block to more than two chunks, with and without a rest."""


def make_layers(num_blocks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Layers:
    return [(random(num_blocks, *shape, dtype=dtype), random(num_blocks, *shape, dtype=dtype)) for shape in shapes]


def bits(layers: Layers) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for layer in layers for tensor in layer]


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_blocks", "shapes", "dtype"), CACHES)
def test_blocks_are_copied_in_all_layers(num_blocks: int, shapes: Any, dtype: torch.dtype, order: int) -> None:
    layers = make_layers(num_blocks, shapes, dtype)
    expected = bits(layers)
    pairs = [(num_blocks - 1, 0), (num_blocks - 1, 1)]
    for tensor in expected:
        tensor[0] = tensor[1] = tensor[-1]
    emulator = Emulator(order)
    blocks.copy_blocks(emulator, blocks.cache_regions(emulator, layers), pairs)
    assert same(bits(layers), expected)
    assert emulator.launches == {"copy_blocks": 1}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_blocks", "shapes", "dtype"), CACHES)
def test_blocks_go_out_and_come_in_elsewhere(num_blocks: int, shapes: Any, dtype: torch.dtype, order: int) -> None:
    layers = make_layers(num_blocks, shapes, dtype)
    before = bits(layers)
    emulator = Emulator(order)
    regions = blocks.cache_regions(emulator, layers)
    staging = torch.full((2, regions.staged_bytes), 0xFF, dtype=torch.uint8)
    blocks.gather_blocks(emulator, regions, [2, 0], staging)
    assert same(bits(layers), before)
    for i, block in enumerate((2, 0)):
        assert torch.equal(staging[i], torch.cat([tensor[block].flatten() for tensor in before]))
    expected = [tensor.clone() for tensor in before]
    for tensor, old in zip(expected, before, strict=True):
        tensor[num_blocks - 1], tensor[1] = old[2], old[0]
    blocks.scatter_blocks(emulator, regions, [num_blocks - 1, 1], staging)
    assert same(bits(layers), expected)
    assert emulator.launches == {"swap_blocks": 2}


def test_equal_layers_are_staged_as_an_array() -> None:
    layers = make_layers(4, [(2, 16, 8)] * 3, BF16)
    emulator = Emulator()
    staging = torch.empty(3, 3 * 2 * 256 * 2, dtype=torch.uint8)
    blocks.gather_blocks(emulator, blocks.cache_regions(emulator, layers), [1, 1, 3], staging)
    staged = staging.view(BF16).view(3, 3, 2, 2, 16, 8)
    for i, block in enumerate((1, 1, 3)):
        for j, (k, v) in enumerate(layers):
            assert torch.equal(staged[i, j, 0], k[block])
            assert torch.equal(staged[i, j, 1], v[block])


@pytest.mark.parametrize("bugs", [(), ("INT32",)])
def test_blocks_past_four_billion_bytes(bugs: tuple[str, ...]) -> None:
    shape = (4, 16, 128)
    num_blocks = 2**32 // (4 * 16 * 128) + 2
    memory = untouched_memory((num_blocks + 1) * 4 * 16 * 128, torch.uint8).view(num_blocks + 1, *shape)
    memory[3], memory[4] = torch.randint(1, 255, (2, *shape), dtype=torch.uint8)
    emulator = Emulator(bugs=bugs)
    regions = blocks.cache_regions(emulator, [(memory[:-1], memory[1:])])
    blocks.copy_blocks(emulator, regions, [(3, num_blocks - 2)])
    assert (torch.equal(memory[-3], memory[3]) and torch.equal(memory[-2], memory[4])) == (not bugs)


def test_a_copy_past_the_end_of_a_block_is_found() -> None:
    layers = make_layers(4, [(1, 16, 17)], BF16)
    expected = bits(layers)
    for tensor in expected:
        tensor[1] = tensor[2]
    emulator = Emulator(bugs=("UNMASKED_TAIL",))
    blocks.copy_blocks(emulator, blocks.cache_regions(emulator, layers), [(2, 1)])
    assert not same(bits(layers), expected)


@pytest.mark.parametrize(
    "pairs", [[(0, 1), (2, 1)], [(0, 1), (1, 2)], [(1, 1)], [(0, 4)], [(-1, 2)]],
    ids=["target twice", "target and source", "itself", "past the end", "negative"],
)  # fmt: skip
def test_copies_whose_order_would_matter_are_refused(pairs: list[tuple[int, int]]) -> None:
    emulator = Emulator()
    regions = blocks.cache_regions(emulator, make_layers(4, [(1, 16, 8)], BF16))
    with pytest.raises(AssertionError):
        blocks.copy_blocks(emulator, regions, pairs)


def test_staging_that_does_not_fit_is_refused() -> None:
    emulator = Emulator()
    layers = make_layers(4, [(1, 16, 8)], BF16)
    regions = blocks.cache_regions(emulator, layers)
    good = torch.empty(2, 512, dtype=torch.uint8)
    bad = (good[:1], good[:, :256], good.view(torch.int8), torch.empty(2, 1024, dtype=torch.uint8)[:, ::2])
    for staging in bad:
        with pytest.raises(AssertionError):
            blocks.gather_blocks(emulator, regions, [0, 1], staging)
    for numbers in ([0, 0], [0, 4], [-1, 0]):
        with pytest.raises(AssertionError):
            blocks.scatter_blocks(emulator, regions, numbers, good)
    for broken in ([(layers[0][0], layers[0][1][:3])], [(layers[0][0].transpose(2, 3), layers[0][1])]):
        with pytest.raises(AssertionError):
            blocks.cache_regions(emulator, broken)
    stamps = torch.zeros(3, 2, 5, dtype=torch.int32)  # of states with five heads
    with pytest.raises(UnsupportedError, match="40 bytes"):
        blocks.cache_regions(emulator, [(stamps,)])


def test_nothing_to_do_is_no_launch() -> None:
    emulator = Emulator()
    regions = blocks.cache_regions(emulator, make_layers(2, [(1, 16, 8)], BF16))
    blocks.copy_blocks(emulator, regions, [])
    blocks.gather_blocks(emulator, regions, [], torch.empty(0, 512, dtype=torch.uint8))
    assert activation.gated_activation(emulator, torch.empty(0, 64, dtype=BF16), "silu").shape == (0, 32)
    assert embedding.embedding(emulator, torch.empty(0, dtype=torch.int64), torch.ones(4, 8, dtype=BF16)).shape == (0, 8)
    assert not emulator.launches
