"""block_unpack.cu, emulated, against `gguf.quants`, on any bytes; and the layout that it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulation.emulator import ORDERS, Emulator, KernelFailed, needs_emulation
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.kernels import block_records as records
from nanovllm_cli.kernels.block_records import PackedBlocks
from nanovllm_cli.kernels.block_unpack import block_rows, unpack
from nanovllm_cli.kernels.cpu import zeros
from nanovllm_cli.quant import block_layout
from nanovllm_cli.quant.cpu_integer import layout_of
from nanovllm_cli.quant.format import Affine, Blocks
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.quant.rows import BlockRows
from test_gguf_blocks import any_bytes, expected

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
# One of each plane, scale, low and table; the other types differ from these by a number.
SEVERAL = ("Q1_0", "Q2_0", "TQ1_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4", "IQ2_XXS")
AFFINE = {form.name: form for form in (Affine(4, 32), Affine(4, 64), Affine(8, 64))}


def some_blocks(name: str, rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [rows, …], and the numbers they are, fp32; NaN and infinities among them."""
    data = any_bytes(name, rows, width // BLOCKS[name].block_len, seed)
    if name == "MXFP4":
        data[:, ::17] |= 4  # exponents of which no number is denormal in 16 bits, which a GPU takes for zero
    return torch.from_numpy(data), torch.from_numpy(expected(name, data))


def packed(name: str, data: torch.Tensor, width: int) -> PackedBlocks:
    weight = block_layout.empty(Blocks(name), data.shape[0], width, CPU)
    block_layout.pack_rows(weight, 0, BlockRows(data))
    return weight


def same(got: torch.Tensor, values: torch.Tensor) -> bool:
    """To the bit, NaN for NaN."""
    return torch.equal(got.float().nan_to_num(nan=12345.0), values.to(got.dtype).float().nan_to_num(nan=12345.0))


@needs_emulation
@pytest.mark.parametrize("name", SEVERAL)
def test_blocks_are_what_gguf_says(name: str) -> None:
    block = BLOCKS[name].block_len
    for order, rows, width in zip(ORDERS, (1, 35, 16), (block, 11 * block if block < 256 else 512, 9 * 256), strict=False):
        data, values = some_blocks(name, rows, width, order)
        assert same(unpack(Emulator(order), packed(name, data, width), 0, rows, BF16), values)


@needs_emulation
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (15, 2), (16, 16), (3, 30), (33, 4), (7, 0)])
def test_a_range_of_rows(first: int, count: int, order: int) -> None:
    data, values = some_blocks("Q4_K", 37, 512)
    emulator, weight = Emulator(order), packed("Q4_K", data, 512)
    assert same(unpack(emulator, weight, first, count, BF16), values[first : first + count])
    assert emulator.launches == ({"block_unpack": 1} if count else {})


@needs_emulation
@pytest.mark.parametrize("order", ORDERS)
def test_rows_by_their_ids(order: int) -> None:
    width = 65 * 256  # a block's records and one more
    data, values = some_blocks("Q6_K", 21, width)
    weight, ids = packed("Q6_K", data, width), torch.tensor([20, 0, 8, 8, -1, 15, 21])
    rows = torch.cat((values[[20, 0, 8, 8]], torch.zeros(1, width), values[15:16], torch.zeros(1, width)))
    assert same(block_rows(Emulator(order), weight, ids, BF16), rows)
    tokens, places = torch.tensor([8, 20, -1]), torch.tensor([1, 3, 0, 2, -1])
    rows = torch.cat((values[20:21], torch.zeros(1, width), values[8:9], torch.zeros(2, width)))
    assert same(block_rows(Emulator(order), weight, places, BF16, tokens=tokens), rows)


@needs_emulation
def test_sixteen_bits_of_the_other_kind() -> None:
    data, values = some_blocks("Q4_K", 3, 256)
    assert same(unpack(Emulator(), packed("Q4_K", data, 256), 0, 3, FP16), values)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q6_K", "Q8_0", "IQ4_NL", "Q2_K", "Q1_0"])
def test_rows_may_come_in_any_pieces(name: str) -> None:
    data, _ = some_blocks(name, 53, 512)
    pieces = block_layout.empty(Blocks(name), 53, 512, CPU)
    for first, last in [(20, 33), (0, 3), (33, 53), (3, 16), (16, 20)]:
        block_layout.pack_rows(pieces, first, BlockRows(data[first:last]))
    assert torch.equal(pieces.data, packed(name, data, 512).data)


@pytest.mark.parametrize("name", list(records.KINDS))
def test_a_weight_takes_little_more_than_its_file(name: str) -> None:
    """Types with codebooks take up to twice as much: their points become codes."""
    form = AFFINE.get(name) or Blocks(name)
    weight = block_layout.empty(form, 64, 4096, CPU)
    assert weight.data.nbytes <= 1.05 * form.row_bytes(4096) * 64


def test_the_gate_builds_the_layouts_that_types_have() -> None:
    for name, layout in records.KINDS.items():
        assert layout == layout_of(AFFINE.get(name) or Blocks(name), 1, 256)


def test_widths_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="260"):
        block_layout.empty(Blocks("Q4_K"), 16, 260, CPU)
    weight = block_layout.empty(Blocks("Q8_0"), 16, 64, CPU)
    with pytest.raises(CheckpointError):
        block_layout.pack_rows(weight, 0, BlockRows(torch.zeros(16, 67, dtype=torch.uint8)))


@needs_emulation
@pytest.mark.parametrize("bug", [(), ("INT32",)], ids=["right", "planted bug"])
def test_weights_past_two_to_the_31_bytes(bug: tuple[str, ...]) -> None:
    width, row = 1 << 20, 5 * 16
    below = 1 << 31 if bug else 0  # a wrapped index points there, and what it finds are zeros
    layout = layout_of(Blocks("Q6_K"), (1 << 31) // (width // 256 * 3360) * 16 + 32, width)
    _, across, size = shape = records.shape(layout)
    row = layout.num_rows - 16
    weight = PackedBlocks("Q6_K", layout, zeros(below + int(np.prod(shape)), torch.uint8)[below:].view(shape))
    data, values = some_blocks("Q6_K", 1, width)
    weight.data[row // 16] = packed("Q6_K", data, width).data[0]
    assert row // 16 * across * size >= 1 << 31
    got = block_rows(Emulator(bugs=bug), weight, torch.tensor([row]), BF16)
    assert same(got, values) is not bool(bug)


@needs_emulation
@pytest.mark.parametrize(
    "bad",
    [
        lambda w: unpack(Emulator(), w, 0, 18, BF16),
        lambda w: unpack(Emulator(), w, -1, 2, BF16),
        lambda w: unpack(Emulator(), w, 0, 2, torch.float64),
        lambda w: unpack(Emulator(), w._replace(data=w.data[:1]), 0, 2, BF16),
        lambda w: block_rows(Emulator(), w, torch.tensor([1], dtype=torch.int32), BF16),
        lambda w: block_rows(Emulator(), w, torch.tensor([[1]]), BF16),
    ],
    ids=["too many rows", "before the first", "type", "data", "type of ids", "shape of ids"],
)
def test_what_the_kernel_would_misread_is_refused(bad) -> None:
    with pytest.raises((AssertionError, KeyError, KernelFailed)):
        bad(packed("Q8_0", some_blocks("Q8_0", 17, 64)[0], 64))
