"""gemv.cu, emulated, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import GENERATOR, close_to_rounding, gains, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import gemv as module
from nanovllm_cli.kernels import reference
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.kernels.gemv import gemv
from nanovllm_cli.kernels.ops import Normed

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
# rows, outputs, width: every number of loads and of strips, more tiles than blocks, tails of all kinds.
SHAPES = [
    (1, 1, 16), (8, 17, 24), (3, 33, 80), (2, 64, 1024), (5, 129, 100), (7, 513, 128), (1, 48, 2056), (8, 24, 513), (4, 700, 40),
]  # fmt: skip


def weights(outputs: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return random(outputs, width, dtype=dtype, scale=width**-0.5)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def normed(rows: int, width: int, dtype: torch.dtype, offset: float = 1.0) -> tuple[Normed, torch.Tensor]:
    """Rows to be normalised, and the same rows normalised in float64, then rounded. The rows are such that the mean of their
    squares is four, so that every order of sums has the same bits, and no gain brings a number so near to the middle of two that
    what a GPU's rsqrt is off by could send it the other way."""
    eight = torch.tensor([4.0, 3, 2, 1, 1, 1, 0, 0])
    values = torch.cat((eight.repeat(width // 8), torch.full((width % 8,), 2.0)))
    signs = random(rows, width).sign()
    x = (torch.stack([values[torch.randperm(width, generator=GENERATOR)] for _ in range(rows)]) * signs).to(dtype)
    gain = gains(width, dtype, offset, eight[:4] / 2)
    return Normed(x, gain, 0.0, offset), (x.double() / 2 * (offset + gain.double())).to(dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_product_is_added_to_the_residual_with_one_rounding(rows: int, outputs: int, width: int, order: int) -> None:
    x, weight, bias = random(rows, width, dtype=BF16), weights(outputs, width, BF16), random(outputs, dtype=BF16)
    residual = random(rows, outputs, dtype=BF16)
    expected = residual.double() + product(x, weight, bias)
    got = gemv(Emulator(order), x, weight, bias, residual=residual)
    assert got is residual
    close_to_rounding(got, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES[:7])
def test_normalised_rows_and_a_bias(rows: int, outputs: int, width: int, order: int) -> None:
    hidden, x = normed(rows, width, FP16)
    weight, bias = weights(outputs, width, FP16), random(outputs, dtype=FP16)
    before = hidden.rows.clone()
    got = gemv(Emulator(order), hidden, weight, bias)
    assert torch.equal(hidden.rows, before)
    close_to_rounding(got, product(x, weight, bias))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 513, 128), (2, 17, 1024), (5, 33, 2056), (8, 1, 24)])
def test_logits_are_not_rounded(rows: int, outputs: int, width: int, order: int) -> None:
    hidden, x = normed(rows, width, BF16, offset=0.0)
    weight = weights(outputs, width, BF16)
    got = gemv(Emulator(order), hidden, weight, None, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, product(x, weight)) <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 64, 1024), (3, 129, 128), (8, 17, 16), (2, 1, 2056)])
def test_gated_is_what_two_kernels_leave(rows: int, outputs: int, width: int, order: int) -> None:
    hidden, x = normed(rows, width, BF16)
    weight, bias = weights(2 * outputs, width, BF16), random(2 * outputs, dtype=BF16)
    both = product(x, weight, bias)
    got = gemv(Emulator(order), hidden, weight, bias, activation="silu")
    gate, up = both.to(BF16).double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    others = got != expected.to(BF16)  # where a gate, an up or the result lies near the middle of two numbers
    assert others.sum() <= max(1, 0.02 * others.numel())
    assert ((got.double() - expected).abs() <= 2.0**-6 * (gate * up).abs() + 1e-5).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 65, 1024), (3, 130, 128), (8, 17, 16)])
def test_without_a_gate_it_is_what_two_kernels_leave(rows: int, outputs: int, width: int, order: int) -> None:
    hidden, x = normed(rows, width, BF16)
    weight, bias = weights(outputs, width, BF16), random(outputs, dtype=BF16)
    got = gemv(Emulator(order), hidden, weight, bias, activation="relu2")
    assert torch.equal(got, reference.gated_activation(gemv(Emulator(), hidden, weight, bias), "relu2"))
    expected = product(x, weight, bias).relu().square()
    assert ((got.double() - expected).abs() <= 2.0**-6 * expected + 1e-5).all(), "three roundings at most"


@pytest.mark.parametrize(
    "activation", ["gelu_tanh", "gelu", "swiglu_oai", "relu2", "relu2_gated", "relu_gated", "lone_gelu", "lone_gelu_tanh"]
)
def test_activations(activation: str) -> None:
    x, weight = torch.eye(8, 16, dtype=FP16), 3 * random(34, 16, dtype=FP16)
    got = gemv(Emulator(), x, weight, None, activation=activation)
    close_to_rounding(got, reference.gated_activation(product(x, weight).float(), activation).double())


def test_rows_are_alone_in_their_bits() -> None:
    """Whatever other rows there are, and however many."""
    width, outputs = 136, 40
    rows, gain = random(8, width, dtype=BF16), random(width, dtype=BF16)
    weight, residual = weights(outputs, width, BF16), random(8, outputs, dtype=BF16)

    def all_kinds(part: slice) -> list[torch.Tensor]:
        hidden = Normed(rows[part], gain, 1e-6, 1.0)
        return [
            gemv(Emulator(), rows[part], weight, None, residual=residual[part].clone()),
            gemv(Emulator(), hidden, weight, None, out_dtype=torch.float32),
            gemv(Emulator(), hidden, weight, None, activation="silu"),
        ]

    together = all_kinds(slice(0, 8))
    for first, last in [(0, 1), (7, 8), (3, 5), (2, 5), (1, 6), (0, 7)]:
        for alone, among in zip(all_kinds(slice(first, last)), together, strict=True):
            assert torch.equal(alone, among[first:last])


@pytest.mark.parametrize(("width", "rows"), [(4096, 5), (13248, 1), (13249, None), (1 << 20, None)])
def test_a_row_that_does_not_fit_shared_memory_beside_its_gains_is_refused(width: int, rows: int | None) -> None:
    """Of Turing's 64 KiB a block the kernel has 52; elements have 2 bytes, and a row is padded to 64 of them and 32 more."""
    if rows is None:
        with pytest.raises(UnsupportedError, match="does not fit this GPU's shared memory"):
            module.rows_at_once(module.padded(width), 75)
    else:
        assert module.rows_at_once(module.padded(width), 75) == rows


def test_rows_that_do_not_fit_shared_memory_take_several_launches() -> None:
    hidden, x = normed(8, 4096, FP16)
    weight = weights(9, 4096, FP16)
    small, large = Emulator(capability=75), Emulator(capability=90)
    got = gemv(small, hidden, weight, None)
    assert small.launches == {"gemv": 2}
    assert torch.equal(got, gemv(large, hidden, weight, None))
    assert large.launches == {"gemv": 1}
    close_to_rounding(got, product(x, weight))


@pytest.mark.parametrize(
    ("outputs", "width", "parts", "strips"), [(1100, 40, 1, 2), (513, 40, 2, 2), (260, 104, 4, 2), (40, 40, 8, 1)]
)
def test_warps_of_a_block_share_rows_or_take_others(outputs: int, width: int, parts: int, strips: int) -> None:
    emulator = Emulator(num_multiprocessors=1 if strips == 2 else 5)
    assert module.strips_of(outputs, 8, emulator.num_multiprocessors) == strips
    assert module.parts_of(outputs, width, 8 * strips, 128 // strips, emulator.num_multiprocessors) == parts
    x, weight = random(3, width, dtype=BF16), weights(outputs, width, BF16)
    expected = product(x, weight)
    close_to_rounding(gemv(emulator, x, weight, None, residual=torch.zeros(3, outputs, dtype=BF16)), expected)


@pytest.mark.parametrize(
    ("outputs", "width"), [(151936, 1024), (1024, 2048), (4096, 1024), (4096, 12288), (5120, 5120)]
)
def test_an_h200_is_filled(outputs: int, width: int) -> None:
    num_multiprocessors = 132
    strips = module.strips_of(outputs, 8, num_multiprocessors)
    parts = module.parts_of(outputs, width, 8 * strips, 128 // strips, num_multiprocessors)
    tiles = -(-outputs // (8 // parts * 8 * strips))
    assert tiles / (-(-tiles // num_multiprocessors) * num_multiprocessors) > 0.95


def fails(bug: str, kind: str) -> bool:
    """True if the planted bug is seen in one order at least."""
    for order in ORDERS:
        hidden, x = normed(3, 100 if kind == "tail" else 136, BF16)
        source, x = (hidden, x) if kind == "normed" else (hidden.rows, hidden.rows)
        weight, residual = weights(33, x.shape[1], BF16), torch.zeros(3, 33, dtype=BF16)
        try:
            if kind == "normed":
                got = gemv(Emulator(order, bugs=(bug,)), source, weight, None, out_dtype=torch.float32)
            else:
                got = gemv(Emulator(order, bugs=(bug,)), source, weight, None, residual=residual)
            close_to_rounding(got, product(x, weight))
        except (AssertionError, KernelFailed):
            return True
    return False


@pytest.mark.parametrize(("bug", "kind"), [("NO_BARRIER", "plain"), ("NORM_BARRIER", "normed"), ("TAIL", "tail")])
def test_planted_bugs_are_seen(bug: str, kind: str) -> None:
    assert fails(bug, kind)


@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_elements(bug: tuple[str, ...]) -> None:
    width, outputs = 16384, 131080  # the last eight rows begin at 2^31
    emulator = Emulator(num_multiprocessors=1 << 16, bugs=bug)
    emulator.only_block = -(-outputs // (8 * module.strips_of(outputs, 8, 1 << 16))) - 1
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are zeros
    weight = zeros(below + outputs * width, BF16)[below:].view(outputs, width)
    weight[-8:] = weights(8, width, BF16)
    x, residual = random(1, width, dtype=BF16), torch.zeros(1, outputs, dtype=BF16)
    gemv(emulator, x, weight, None, residual=residual)
    if bug:
        assert not residual.any()
    else:
        close_to_rounding(residual[:, -8:], product(x, weight[-8:]))


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w, b, r: (x[:, ::2], w[:, ::2].contiguous(), b, r),
        lambda x, w, b, r: (x, w[:, :-1].contiguous(), b, r),
        lambda x, w, b, r: (x, w.half(), b, r),
        lambda x, w, b, r: (x.float(), w.float(), b, r),
        lambda x, w, b, r: (x, w, b[:-1], r),
        lambda x, w, b, r: (x, w, b.float(), r),
        lambda x, w, b, r: (x, w, b, r[:1]),
        lambda x, w, b, r: (x, w, b, r.float()),
        lambda x, w, b, r: (x.repeat(3, 1), w, b, r.repeat(3, 1)),
    ],
    ids=["strides", "width", "type", "float32", "bias", "bias type", "residual rows", "residual type", "nine rows"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    x, weight, bias, residual = bad(
        random(3, 64, dtype=BF16), random(9, 64, dtype=BF16), random(9, dtype=BF16), random(3, 9, dtype=BF16)
    )
    with pytest.raises((AssertionError, KeyError)):
        gemv(Emulator(), x, weight, bias, residual=residual)


def test_turing_has_no_bfloat16() -> None:
    with pytest.raises(UnsupportedError):
        gemv(Emulator(capability=75), random(1, 16, dtype=BF16), random(8, 16, dtype=BF16), None)
