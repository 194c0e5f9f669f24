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
from test_quant_engine import dequantized, difference, expected_logits, logits_of, write_gguf

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


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
BLOCKS = {"Q4_0": ["Q4_0"], "mixed": ["Q8_0", "Q4_1", "F16", "Q5_0", "Q4_0"]}


@pytest.mark.parametrize("mix", BLOCKS)
def test_gguf_files(mix: str, tmp_path: Path) -> None:
    """q, k and v, gate and up in types of their own."""
    model, path = random_model(Qwen3Config(**SHAPE)), tmp_path / "model.gguf"
    write_gguf(path, model, BLOCKS[mix])
    worker = worker_on(path, EmulatedDevice())
    for tokens in (FEW, MANY):
        assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 0.07
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(5)) for prompt in MANY])]
        for engine in (engine_on(path, device), engine_on(path, EmulatedDevice(), eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]


def test_formats_without_kernels_are_unpacked_and_the_user_is_told(tmp_path: Path) -> None:
    model, path = random_model(Qwen3Config(**SHAPE | WIDE)), tmp_path / "model.gguf"
    write_gguf(path, model, ["TQ2_0"])
    progress = Notes()
    worker = worker_on(path, EmulatedDevice(), progress)
    assert difference(logits_of(worker, MANY), expected_logits(model, MANY)) < 0.03
    (note,) = progress.notes
    assert note.startswith("weights in tq2_0 have no kernels on a GPU: unpacked to 16 bits they take 0.0 GiB more")


@pytest.mark.parametrize("name", ["int8", "fp8", "q4_0"])
def test_deterministic_answers_depend_on_the_request_alone(name: str, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SHAPE)), tmp_path)

    def answers(prompts: list[list[int]]) -> list[Any]:
        engine = engine_on(folder, EmulatedDevice(), quant=name, deterministic=True)
        return [output.outputs[0].logprobs for output in run(engine, [(prompt, greedy(4, logprobs=1)) for prompt in prompts])]

    together = answers(MANY)
    assert [answers([prompt])[0] for prompt in MANY] == together
