"""Models that read images in the GPU's engine on emulated kernels: what a tower, which is torch's, makes is read in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, HunYuanVLConfig, Qwen3VLConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, run, save
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.vision_spec import Image, TokenIds, VisionSpec
from test_cuda_engine import SHAPE, engine_on

pytestmark = needs_emulation
NUMBERS = np.random.default_rng(0)
IMAGE, CELL = 255, 8
TEXT = SHAPE | {"vocab_size": 256}
CONFIGS: dict[str, Any] = {
    "qwen3-vl": Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}},
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "hidden_size": 32,
                       "intermediate_size": 40, "out_hidden_size": 32, "num_position_embeddings": 16,
                       "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE, video_token_id=254, vision_start_token_id=253, vision_end_token_id=252,
    ),
    "hunyuan-vl": HunYuanVLConfig(
        text_config=TEXT | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0,
                                                "mrope_section": [12, 8, 8, 4]}},
        vision_config={"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "patch_size": 4, "max_image_size": 16},
        image_token_id=IMAGE,
    ),
    "gemma3": Gemma3Config(
        text_config=TEXT | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 32, "patch_size": 4},
        image_token_index=IMAGE, mm_tokens_per_image=16,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(CONFIGS[request.param], seed=3, dtype=torch.bfloat16, auto=AutoModelForImageTextToText)
    return save(model, tmp_path_factory.mktemp("model"))


def prompt_of(vision: VisionSpec, first: int, behind: int) -> TokenIds:
    image = Image.of(32, 32, NUMBERS.integers(0, 256, 3 * 32 * 32, np.uint8).tobytes())
    ids = NUMBERS.integers(2, 250, first + behind).tolist()
    placed = vision.placed(image, first)
    return TokenIds([*ids[:first], *[IMAGE] * placed.num_rows, *ids[first:]], [placed])


def prompts_for(engine: Engine) -> list[TokenIds]:
    worker = engine._executor
    assert isinstance(worker, Worker)
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    return [prompt_of(vision, 5, 9), prompt_of(vision, 20, 3), TokenIds([7, 8, 9])]


def answers(engine: Engine, prompts: list[TokenIds]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(8)) for prompt in prompts])]


def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    prompts = prompts_for(engine)
    assert answers(engine, prompts) == answers(engine_on(folder, None), prompts)
    assert device.graphs


def test_a_deterministic_gpu_gives_the_same_to_the_bit(folder: Path) -> None:
    """Each alone; together, in small steps, twice, so that prefixes are found, and with guesses."""
    alone = engine_on(folder, EmulatedDevice(), deterministic=True, max_num_batched_tokens=64)
    prompts = prompts_for(alone)
    expected = [answers(alone, [prompt])[0] for prompt in prompts]
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, max_num_batched_tokens=13, num_speculative_tokens=2)
    for _ in range(2):
        assert answers(engine, prompts) == expected
