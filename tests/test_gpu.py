"""What only a GPU can show: recorded steps, addresses in a table, tokens that are the same however they are launched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from emulation.compare import random
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.executor import InProcessExecutor
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.kernels import blocks, norm
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.launcher import CudaLauncher, why_unavailable
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint

_reason = why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=_reason.message if _reason else "")
PROMPTS = [[3, 4, 5], [7], list(range(20, 91)), [100, 101, 102, 103]]
SHAPE = SMALL | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4,
                 "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def answers(folder: Path, params: SamplingParams, programmatic_launch: bool = False, **settings) -> list[tuple[int, ...]]:
    config = EngineConfig(**{"num_blocks": 128, "max_num_seqs": 4, "dtype": "bfloat16"} | settings)
    platform = CudaPlatform(config, CudaDevice(0, programmatic_launch))
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, platform=platform)
    engine = Engine(
        InProcessExecutor(worker), config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, ahead=worker.ahead,
    )  # fmt: skip
    found = [output.outputs[0].token_ids for output in run(engine, [(prompt, params) for prompt in PROMPTS])]
    decode = worker.runner.decode
    assert (decode is not None and decode.num_graphs > 0) == (not settings)
    return found


@pytest.mark.parametrize(
    "params",
    [greedy(40), SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
def test_recorded_programmatic_and_eager_steps_have_the_same_tokens(folder: Path, params: SamplingParams) -> None:
    eager = answers(folder, params, eager=True)
    assert answers(folder, params) == eager
    assert answers(folder, params, programmatic_launch=True) == eager


def test_blocks_are_copied_gathered_and_scattered() -> None:
    launcher = CudaLauncher()
    layers = [tuple(random(9, 3, 16, dim, dtype=torch.bfloat16).cuda() for _ in range(2)) for dim in (64, 24)]
    before = [tensor.clone() for layer in layers for tensor in layer]
    regions = blocks.cache_regions(launcher, layers)
    blocks.copy_blocks(launcher, regions, [(8, 0), (8, 1), (5, 2)])
    for tensor, old in zip([tensor for layer in layers for tensor in layer], before, strict=True):
        old[0], old[1], old[2] = old[8].clone(), old[8].clone(), old[5].clone()
        assert torch.equal(tensor, old)
    for pinned in (False, True):
        device = torch.device("cpu") if pinned else launcher.device
        staging = torch.zeros(2, regions.staged_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        blocks.gather_blocks(launcher, regions, [7, 4], staging)
        blocks.scatter_blocks(launcher, regions, [0, 1], staging)
        torch.cuda.synchronize()
        for layer in layers:
            for tensor in layer:
                assert torch.equal(tensor[0], tensor[7])
                assert torch.equal(tensor[1], tensor[4])


def test_a_recorded_kernel_reads_what_lies_there_at_its_replay() -> None:
    device = CudaDevice(0, programmatic_launch=True)
    x, weight = random(4, 256, dtype=torch.bfloat16).cuda(), random(256, dtype=torch.bfloat16).cuda()
    norm.add_rms_norm(device.launcher, x, None, weight, 1e-6, 0.0)
    graph, out = device.capture(lambda: norm.add_rms_norm(device.launcher, x, None, weight, 1e-6, 0.0))
    for _ in range(3):
        x.copy_(random(4, 256, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(out, norm.add_rms_norm(device.launcher, x, None, weight, 1e-6, 0.0))
