"""block_gemv.cu, emulated: against float64 products of rounded rows with what `gguf.quants` reads."""

from __future__ import annotations

import pytest
import torch

from emulation.compare import close_to_rounding, random, relative_error
from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.kernels import block_gemv as module
from nanovllm_cli.kernels import block_records as records
from nanovllm_cli.kernels import reference
from nanovllm_cli.kernels.block_gemv import block_gemv
from nanovllm_cli.kernels.block_records import PackedBlocks
from nanovllm_cli.kernels.ops import Normed
from nanovllm_cli.quant import block_layout
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.gguf_blocks import BLOCKS, decompose
from nanovllm_cli.quant.rows import BlockRows
from test_cpu_integer import rounded
from test_gguf_blocks import any_bytes, expected
from test_kernel_gemv import normed

pytestmark = needs_emulation
BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
# Groups of 16 and 32, offsets, each kind of scale and low; planes and tables are test_kernel_block_unpack.py's matter.
SEVERAL = ("Q1_0", "Q2_0", "TQ2_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "MXFP4", "NVFP4")
# rows, outputs, width of Q4_K: fused and not, one record and many, tails of tiles, more tiles than blocks
SHAPES = [
    (1, 1, 256), (2, 17, 512), (1, 700, 256), (3, 33, 1024), (4, 16, 2304), (8, 40, 512), (19, 35, 256),
    (32, 16, 512), (49, 30, 256),
]  # fmt: skip


def weights(name: str, outputs: int, width: int, seed: int = 0) -> tuple[PackedBlocks, torch.Tensor]:
    """Random blocks whose scales are numbers, and these numbers in float64."""
    data = torch.from_numpy(any_bytes(name, outputs, width // BLOCKS[name].block_len, seed))
    blocks = data.view(-1, BLOCKS[name].block_bytes)
    parts = decompose(name, data)
    places = {"Q3_K": [108], "Q2_K": [80, 82], "Q6_K": [208], "TQ2_0": [64]}.get(name, [0, 2] if parts.dmin is not None else [0])
    for place in places:
        if name == "MXFP4":
            blocks[:, place] = blocks[:, place] % 8 + 120
        else:
            blocks[:, place + 1] = blocks[:, place + 1] & 0x83 | 0x28  # f16 with exponents of 2^-5 to 2^-4
    weight = block_layout.empty(Blocks(name), outputs, width, CPU)
    values = torch.from_numpy(expected(name, data.numpy())).double()
    factors = torch.linspace(0.5, 1.5, outputs) * 2**-8 if name == "NVFP4" else None
    block_layout.pack_rows(weight, 0, BlockRows(data, factors))
    return weight, values if factors is None else values * factors.double()[:, None]


def product(x: torch.Tensor, values: torch.Tensor, group: int) -> torch.Tensor:
    return rounded(x.float(), group) @ values.T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
def test_product_is_added_to_the_residual_with_one_rounding(rows: int, outputs: int, width: int, order: int) -> None:
    weight, values = weights("Q4_K", outputs, width)
    x, bias, residual = (random(*shape, dtype=BF16) for shape in ((rows, width), (outputs,), (rows, outputs)))
    want = residual.double() + product(x, values, 32) + bias.double()
    got = block_gemv(Emulator(order), x, weight, bias, residual=residual)
    assert got is residual
    close_to_rounding(got, want)


@pytest.mark.parametrize("name", SEVERAL)
def test_types(name: str) -> None:
    block = BLOCKS[name].block_len
    for order, outputs, width in zip(ORDERS, (35, 16, 1), (9 * block, 2048, block), strict=False):
        weight, values = weights(name, outputs, width, order)
        x = random(1, width, dtype=BF16)
        close_to_rounding(block_gemv(Emulator(order), x, weight, None), product(x, values, min(BLOCKS[name].group, 32)))


def test_rows_of_nvfp4_end_within_a_record() -> None:
    """As the 2,688 columns of a Nemotron 3 Nano do: 21 times 128, ten records of 256 and half of one."""
    weight, values = weights("NVFP4", 17, 320)
    x = random(3, 320, dtype=BF16)
    close_to_rounding(block_gemv(Emulator(), x, weight, None), product(x, values, 16))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 48, 256), (2, 32, 1024), (7, 48, 256), (17, 16, 256)])
def test_gated_is_what_two_kernels_leave(rows: int, outputs: int, width: int, order: int) -> None:
    hidden, x = normed(rows, width, BF16)
    weight, values = weights("Q4_K", 2 * outputs, width)
    bias = random(2 * outputs, dtype=BF16)
    both = product(x, values, 32) / 64 + 0.0
    weight.data[..., -64:].view(torch.float16).mul_(1 / 64)  # both supers
    got = block_gemv(Emulator(order), hidden, weight, bias, activation="silu")
    gate, up = (both + bias.double()).to(BF16).double().chunk(2, dim=-1)
    want = gate * torch.sigmoid(gate) * up
    assert (got == want.to(BF16)).double().mean() > 0.98  # but where a gate or an up lies near the middle of two numbers
    assert ((got.double() - want).abs() <= 2.0**-6 * (gate * up).abs() + 1e-5).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 49, 256), (19, 17, 512)])
def test_without_a_gate_it_is_what_two_kernels_leave(rows: int, outputs: int, width: int, order: int) -> None:
    """Of any number of rows."""
    (weight, values), emulator = weights("Q4_K", outputs, width), Emulator(order)
    x, bias = random(rows, width, dtype=BF16), random(outputs, dtype=BF16)
    got = block_gemv(emulator, x, weight, bias, activation="relu2")
    assert "gated_activation" not in emulator.launches
    assert torch.equal(got, reference.gated_activation(block_gemv(Emulator(), x, weight, bias), "relu2"))
    expected = (product(x, values, 32) + bias.double()).relu().square()
    assert ((got.double() - expected).abs() <= 2.0**-6 * expected + 1e-4).all(), "three roundings at most"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 33), (8, 144)])
def test_a_lone_gelu_is_what_two_kernels_leave(rows: int, outputs: int, order: int) -> None:
    weight, values = weights("Q4_K", outputs, 512)
    x, bias = random(rows, 512, dtype=BF16), random(outputs, dtype=BF16)
    got = block_gemv(Emulator(order), x, weight, bias, activation="lone_gelu")
    before = block_gemv(Emulator(), x, weight, bias)
    close_to_rounding(got, reference.gated_activation(before.double(), "lone_gelu"))
    exact = torch.nn.functional.gelu(product(x, values, 32) + bias.double())
    assert ((got.double() - exact).abs() <= 2.0**-6 * exact.abs() + 1e-4 + 2.0**-8 * before.double().abs()).all(), "two roundings"


def test_up_that_begins_within_a_tile_takes_two_kernels() -> None:
    weight, values = weights("Q4_K", 2 * 17, 256)
    x, emulator = random(1, 256, dtype=BF16), Emulator()
    want = reference.gated_activation(product(x, values, 32).to(BF16), "silu")
    close_to_rounding(block_gemv(emulator, x, weight, None, activation="silu"), want.double(), sums=1e-2)
    assert emulator.launches == {"block_gemv": 1, "gated_activation": 1}


def test_normalised_rows_as_logits() -> None:
    hidden, x = normed(2, 512, BF16, offset=0.0)
    weight, values = weights("Q4_K", 35, 512)
    got = block_gemv(Emulator(), hidden, weight, None, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, product(x, values, 32)) < 1e-6


def test_rows_are_alone_in_their_bits() -> None:
    """Whatever other rows there are, and however many; rounded by a block for itself, or before."""
    weight, _ = weights("Q4_K", 40, 1024)
    x, gain = random(70, 1024, dtype=BF16), random(1024, dtype=BF16)
    residual = random(70, 40, dtype=BF16)

    def result(part: slice) -> torch.Tensor:
        return block_gemv(Emulator(), Normed(x[part], gain, 1e-6, 1.0), weight, None)

    def added(part: slice) -> torch.Tensor:
        return block_gemv(Emulator(), x[part], weight, None, residual=residual[part].clone())

    for compute in (result, added):
        together = compute(slice(0, 70))
        for first, last in [(0, 1), (48, 49), (3, 5), (2, 6), (1, 8), (5, 26)]:
            assert torch.equal(compute(slice(first, last)), together[first:last])


@pytest.mark.parametrize(
    ("outputs", "width", "parts"), [(40, 2048, 8), (16, 1024, 4), (700, 512, 2), (1100, 256, 1)]
)
def test_warps_of_a_block_share_rows_or_take_others(outputs: int, width: int, parts: int) -> None:
    emulator = Emulator(num_multiprocessors=1)
    assert module.parts_of(outputs, width // 256, 1) == parts
    weight, values = weights("Q4_K", outputs, width)
    x = random(1, width, dtype=BF16)
    residual = torch.zeros(1, outputs, dtype=BF16)
    close_to_rounding(block_gemv(emulator, x, weight, None, residual=residual), product(x, values, 32))


def test_every_gpu_has_room_for_eight_rows() -> None:
    for layout in records.KINDS.values():
        for capability in (75, 80, 86, 89, 90, 100, 120):
            assert module.rows_at_once(layout, 8, True, capability) == 8
    assert module.rows_at_once(records.KINDS["Q6_K"], 64, False, 90) == 32
    assert module.rows_at_once(records.KINDS["Q6_K"], 64, False, 75) == 16


@pytest.mark.parametrize(
    ("outputs", "width", "least"),
    [(4096, 4096, 0.95), (6144, 4096, 0.7), (24576, 4096, 0.95), (4096, 12288, 0.95), (151936, 4096, 0.98)],
)
def test_an_h200_is_filled(outputs: int, width: int, least: float) -> None:
    """The share of block rounds that have work."""
    parts = module.parts_of(outputs, width // 256, 132)
    blocks, tiles = 2 * 132, -(-outputs // (16 * (8 // parts)))
    assert tiles / (-(-tiles // blocks) * blocks) > least


def test_a_bad_number_shows_in_its_row_alone() -> None:
    weight, _ = weights("Q4_K", 20, 512)
    x = random(3, 512, dtype=BF16)
    good = block_gemv(Emulator(), x, weight, None)
    x[1, 300] = float("inf")
    got = block_gemv(Emulator(), x, weight, None)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], good[[0, 2]])


def fails(bug: str, rows: int) -> bool:
    for order in ORDERS:
        weight, values = weights("Q4_K", 80, 1024)
        x = random(rows, 1024, dtype=BF16)
        residual = torch.zeros(rows, 80, dtype=BF16)
        try:
            block_gemv(Emulator(order, num_multiprocessors=1, bugs=(bug,)), x, weight, None, residual=residual)
            close_to_rounding(residual, product(x, values, 32))
        except (AssertionError, KernelFailed):
            return True
    return False


@pytest.mark.parametrize("bug", ["NO_WARP_BARRIER", "NO_ROUNDING_BARRIER", "NO_BARRIER"])
def test_planted_bugs_are_seen(bug: str) -> None:
    assert fails(bug, 1)


@pytest.mark.parametrize(
    "bad",
    [
        lambda x, w, b, r: (x[:, ::2], w, b, r),
        lambda x, w, b, r: (x[:, :256].contiguous(), w, b, r),
        lambda x, w, b, r: (x.float(), w, b, r),
        lambda x, w, b, r: (x, w._replace(data=w.data[:1]), b, r),
        lambda x, w, b, r: (x, w, b[:-1], r),
        lambda x, w, b, r: (x, w, b.float(), r),
        lambda x, w, b, r: (x, w, b, r[:1]),
        lambda x, w, b, r: (x, w, b, r.float()),
    ],
    ids=["strides", "width", "type", "data", "bias", "type of bias", "residual", "type of residual"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    weight, _ = weights("Q8_0", 20, 512)
    x, weight, bias, residual = bad(
        random(3, 512, dtype=BF16), weight, random(20, dtype=BF16), random(3, 20, dtype=BF16)
    )
    with pytest.raises((AssertionError, KeyError)):
        block_gemv(Emulator(), x, weight, bias, residual=residual)
