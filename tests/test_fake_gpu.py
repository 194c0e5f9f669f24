"""The GPU's engine on a device that is not this machine's memory: nothing of the host's meets what lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from emulation.fake_gpu import CUDA, FakeGpu, fake_cuda
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constraint import ReasoningPhase
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.quant import block_layout
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.quant.rows import BlockRows
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_models import CASES

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built for CPUs only")
SHAPE = SMALL | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
                 "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PROMPTS = [[i, i + 1, 2 * i] for i in range(3, 14)]
BYTES = [bytes([i]) for i in range(256)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=256)
    return save(random_model(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("experts"))


def test_what_is_not_on_the_device_is_noticed() -> None:
    with fake_cuda():
        there = torch.zeros(3, device=CUDA)
        assert there.device == torch.ones(3).to(CUDA).device == CUDA
        with pytest.raises(RuntimeError, match="device"):
            there + torch.ones(3)


@pytest.mark.parametrize("count", [3, 11])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"deterministic": True},
        *({"n_gpu_layers": 0, "quant": quant} for quant in (None, "int8", "int4", "q4_k")),
        {"num_speculative_tokens": 4},
        {"draft_model": "itself", "draft_quant": "int8", "num_speculative_tokens": 4},
        *({"quant": name} for name in ("fp8", "fp8:block=128", "int8", "int4", "nf4", "q4_k", "q6_k")),
    ],
    ids=str,
)
def test_steps_need_nothing_of_the_host(settings: dict[str, Any], count: int, folder: Path) -> None:
    serve(settings, count, folder)


@pytest.mark.parametrize(
    "settings", [{}, {"deterministic": True}, *({"quant": name} for name in ("fp8:block=128", "int8", "int4", "q4_k"))], ids=str
)
def test_steps_of_experts_need_nothing_of_the_host(settings: dict[str, Any], of_experts: Path) -> None:
    serve(settings, 11, of_experts)


def serve(settings: dict[str, Any], count: int, folder: Path) -> None:
    if "draft_model" in settings:
        settings = settings | {"draft_model": str(folder)}
    config = EngineConfig(**{"num_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 64, "dtype": "bfloat16"} | settings)
    device = FakeGpu()
    with fake_cuda():
        with open_checkpoint(folder) as checkpoint:
            platform = CudaPlatform(config, device)
            worker = Worker(checkpoint, config, lambda text: list(text.encode()), lambda: BYTES, platform=platform)
        engine = Engine(
            worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
            num_blocks=worker.num_blocks, ahead=worker.ahead,
        )  # fmt: skip
        params = [
            greedy(6),
            SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True, logprobs=3),
            greedy(6, reasoning=ReasoningPhase("<t>", "</t>", starts_inside=True, budget=9)),
        ]
        outputs = run(engine, [(prompt, params[i % 3]) for i, prompt in enumerate(PROMPTS[:count])])
    assert [output.outputs[0].error for output in outputs] == [None] * count
    assert [output.outputs[0].token_ids for output in outputs] == [(0,) * 6] * count
    assert device.graphs > 0


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_packed_for_the_device(name: str) -> None:
    rows = torch.zeros(32, int(Blocks(name).row_bytes(512)), dtype=torch.uint8)
    with fake_cuda():
        for source in (rows, rows.to(CUDA)) if name not in block_layout.LOOKED_UP else (rows,):
            weight = block_layout.empty(Blocks(name), 48, 512, CUDA)
            block_layout.pack_rows(weight, 16, BlockRows(source))
            assert weight.data.device == CUDA


FAMILIES = [
    "dory, two layers thrice", "hrm, twice three and one", "zaya, 1 of 5 or none", "zamba2, two shared", "mamba2", "mamba",
    "falcon h1", "lfm2", "granite 4 h", "kimi linear, 3 of 5 and shared", "olmo hybrid", "qwen3.5 moe, 2 of 5 and shared",
    "gemma3n", "gemma4, keys of other layers", "gpt-oss, 2 of 5", "deepseek v3, 3 of 5 and shared", "mimo v2, 2 of 5", "bitnet",
]  # fmt: skip
"""Of those of test_models.py, what has layers of its own."""


@pytest.mark.parametrize("case", FAMILIES)
def test_layers_of_all_kinds_need_nothing_of_the_host(case: str, tmp_path: Path) -> None:
    folder = save(random_model(CASES[case], dtype=torch.bfloat16), tmp_path)
    for settings in ({}, {"deterministic": True, "kv_cache_dtype": "int8"}, {"num_speculative_tokens": 3}):
        serve(settings, 11, folder)
