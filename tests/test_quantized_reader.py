"""What all quantized checkpoints have in common: the choice by method, and configs that nobody should believe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.quantized import FAMILIES
from nanovllm_cli.weights.quantized_weight import unpack, unpack_columns
from nanovllm_cli.weights.weight_reader import PlainReader
from quantized_checkpoints import NAME, gptq, gptq_config, module, open_quantized, packed, read_weight, write

PLAIN = {"lm_head.weight": torch.ones(3, 5)}


@pytest.mark.parametrize("quantization", [None, {}])
def test_no_quantization_is_a_plain_checkpoint(quantization: Any, tmp_path: Path) -> None:
    assert type(open_quantized(write(tmp_path, PLAIN, quantization))) is PlainReader


@pytest.mark.parametrize("method", ["aqlm", "quip", "exl2", "vptq", "quanto", "spqr", "x" * 5000])
def test_a_method_that_is_not_known_is_named_with_those_that_are(method: str, tmp_path: Path) -> None:
    write(tmp_path, PLAIN, {"quant_method": method})
    with pytest.raises(UnsupportedError) as raised:
        open_quantized(tmp_path)
    assert method[:40] in raised.value.message
    assert len(raised.value.message) < 300
    assert raised.value.hint is not None
    for known in FAMILIES:
        assert known in raised.value.hint


@pytest.mark.parametrize(
    "quantization", [[1], "fp8", 7, {"bits": 4}, {"quant_method": None}, {"quant_method": ["fp8"]}]
)
def test_a_config_that_is_none(quantization: Any, tmp_path: Path) -> None:
    write(tmp_path, PLAIN, quantization)
    with pytest.raises(NanovllmError) as raised:
        open_quantized(tmp_path)
    assert type(raised.value) is CheckpointError
    assert raised.value.hint


@pytest.mark.parametrize("section", ["text_config", "llm_config"])
def test_what_the_text_models_part_says_counts_where_nobody_else_says_it(section: str, tmp_path: Path) -> None:
    """As Kimi K2.5's config has it."""
    tensors, expected = gptq(4, 32)(128, 64, np.random.default_rng(0))
    own = {"quantization_config": gptq_config(4, 32), "model_type": "it"}
    reader = open_quantized(write(tmp_path, module(tensors), None, {section: own}))
    assert reader.names() == {f"{NAME}.weight"}
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6)
    assert "quantization_config" not in reader.checkpoint.config["text_config"]
    said = {"quant_method": "fp8"}
    assert open_checkpoint(write(tmp_path, PLAIN, said, {section: own})).config["quantization_config"] == said
    with pytest.raises(CheckpointError, match="must be an object"):
        open_quantized(write(tmp_path, PLAIN, None, {section: own | {"quantization_config": [1]}}))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 8, 9, 31, 33, 64, 100])
def test_codes_are_cut_out_of_a_stream_of_bits(bits: int, count: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (count, 5))
    words = torch.from_numpy(packed(codes, bits).T.copy())
    np.testing.assert_array_equal(unpack(words.view(torch.uint8), bits, count).numpy(), codes.T)
    for first in range(0, count, 32):
        end = min(first + 32, count)
        np.testing.assert_array_equal(unpack_columns(words, bits, first, end).numpy(), codes[first:end])
