"""MXFP4 as gpt-oss stores it: against transformers' reading, and against gguf's of the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.weights.quantized_mxfp4 import mxfp4_blocks
from quantized_checkpoints import open_quantized, read_weight, small_slices, write

NAME = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
GATE = "model.layers.0.mlp.experts.1.gate_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def random_experts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """shape: experts, rows, blocks a row."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)


def test_equal_to_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    """Experts lie in one tensor, and rows of gate and up by turns: here each is a weight of its own."""
    codes, scales = random_experts(3, 134, 2)
    expected = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).transpose(1, 2).double().numpy()
    bias = torch.arange(3 * 134).view(3, 134).float()
    down, down_scales = random_experts(3, 5, 2)
    tensors = {f"{NAME}_blocks": codes, f"{NAME}_scales": scales, f"{NAME}_bias": bias, f"{DOWN}_blocks": down,
               f"{DOWN}_scales": down_scales}  # fmt: skip
    reader = open_quantized(write(tmp_path, tensors, CONFIG))
    place = NAME.removesuffix("gate_up_proj")
    assert reader.names() == {f"{place}{e}.{part}_proj{kind}" for e in range(3) for part, kind in
                              (("gate", ""), ("gate", "_bias"), ("up", ""), ("up", "_bias"), ("down", ""))}  # fmt: skip
    for e in range(3):
        for part, first in (("gate", 0), ("up", 1)):
            name = f"{place}{e}.{part}_proj"
            assert reader.shape(name) == (67, 64)
            assert reader.format(name) == Blocks("MXFP4")
            assert reader.num_bytes(name) == 67 * 2 * 17
            np.testing.assert_array_equal(read_weight(reader, name), expected[e, first::2])
            [(rows, _)] = reader.slices(f"{name}_bias")
            assert torch.equal(rows, bias[e, first::2])  # type: ignore[arg-type]
    expected = convert_moe_packed_tensors(down, down_scales, dtype=torch.float32).transpose(1, 2).double().numpy()
    np.testing.assert_array_equal(read_weight(reader, f"{place}1.down_proj"), expected[1])


def test_the_smallest_and_largest_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scales = torch.tensor([0, 1, 2, 3, 126, 127, 128, 200, 251, 252, 4, 5, 6, 7, 8, 9], dtype=torch.uint8).reshape(
        16, 1
    )
    blocks = dequantize(mxfp4_blocks(codes, scales).numpy(), GGMLQuantizationType.MXFP4).astype(np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX 1.0, table 6
    numbers = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(16, 32)
    np.testing.assert_array_equal(blocks, values[numbers] * 2.0 ** (scales.numpy().astype(np.float64) - 127))


CODES, SCALES = random_experts(2, 5, 2)
BAD = {
    "no scales": ({f"{NAME}_blocks": CODES}, f"{GATE.replace('1', '0')}_scales' is missing"),
    "no codes": ({f"{NAME}_scales": SCALES}, f"{GATE.replace('1', '0')}_blocks' is missing"),
    "scales of other rows": ({f"{NAME}_blocks": CODES, f"{NAME}_scales": SCALES[:, :4]}, "expected [3, 2]"),
    "short blocks": (
        {f"{NAME}_blocks": CODES[..., :8], f"{NAME}_scales": SCALES},
        "_blocks' has the shape [3, 2, 8]",
    ),
    "nothing": ({f"{NAME}_blocks": CODES[:0], f"{NAME}_scales": SCALES[:0]}, "_blocks' has the shape [0, 5, 2, 16]"),
    "floats": ({f"{NAME}_blocks": CODES.float(), f"{NAME}_scales": SCALES}, "holds F32"),
    "a scale that is NaN": (
        {f"{NAME}_blocks": CODES, f"{NAME}_scales": SCALES | 255},
        "_scales' has scales that are NaN",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    tensors, words = BAD[case]
    write(tmp_path, tensors, CONFIG)
    with pytest.raises(NanovllmError) as raised:
        for _ in open_quantized(tmp_path).slices(GATE):
            pass
    assert type(raised.value) is CheckpointError
    assert words in raised.value.message
    assert raised.value.hint
