"""The GPU's engine on emulated kernels: the same answers as the CPU's, recorded or not, ahead or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.executor import InProcessExecutor
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint

pytestmark = needs_emulation
SHAPE = SMALL | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 64,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
PROMPTS = [[3, 4, 5], [7], list(range(20, 41)), [100, 101, 102, 103]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def engine_on(folder: Path, device: EmulatedDevice | None, **settings: Any) -> Engine:
    config = EngineConfig(**{"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "dtype": "bfloat16"} | settings)
    platform = None if device is None else CudaPlatform(config, device)
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, platform=platform)
    return Engine(
        InProcessExecutor(worker), config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, ahead=worker.ahead,
    )  # fmt: skip


def tokens(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in run(engine, [(prompt, params) for prompt in PROMPTS])]


def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    expected = tokens(engine_on(folder, None), greedy(8))
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(8)) == expected
    assert device.graphs
