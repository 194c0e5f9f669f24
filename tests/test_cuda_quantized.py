"""Quantized models in the GPU's engine on emulated kernels: against transformers on the weights that the format's own arithmetic
dequantized, and the same whether steps are recorded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_cuda_engine import engine_on
from test_quant_engine import dequantized, difference, expected_logits, logits_of

pytestmark = needs_emulation
SHAPE = SMALL | {"num_hidden_layers": 1, "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
FEW, MANY = [[3, 4, 5]], [[3, 4, 5], [7], list(range(20, 41))]
# What is lost by rounding activations to int8 or e4m3, and by bfloat16.
FORMATS = {"int8": 0.05, "fp8": 0.15, "fp8-weight-only": 0.03, "int8-weight-only": 0.03}


class Notes(NullProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def worker_on(path: Path, device: EmulatedDevice, progress: Notes | None = None, **settings: Any) -> Worker:
    config = EngineConfig(**{"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "dtype": "bfloat16"} | settings)
    with open_checkpoint(path) as checkpoint:
        return Worker(checkpoint, config, platform=CudaPlatform(config, device, progress))


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_while_loading(name: str, tmp_path: Path) -> None:
    model = random_model(Qwen3Config(**SHAPE | {"tie_word_embeddings": name != "int8"}))
    worker = worker_on(save(model, tmp_path), EmulatedDevice(), quant=name)
    model = dequantized(model, name)
    for tokens in (FEW, MANY):
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < FORMATS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_steps_are_those_that_run(name: str, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE | {"tie_word_embeddings": True})), tmp_path)
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(5)) for prompt in MANY])]
        for engine in (engine_on(folder, device, quant=name), engine_on(folder, EmulatedDevice(), quant=name, eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]
