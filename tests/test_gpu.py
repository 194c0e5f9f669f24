"""What only a GPU can show: recorded steps, addresses in a table, tokens that are the same however they are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, Qwen3Config

from emulation.compare import random
from engines import SMALL, greedy, poison_what_is_out_of_reach, random_model, run, save
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine import ranks
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.kernels import blocks, norm
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.launcher import CudaLauncher, why_unavailable
from nanovllm_cli.quant.cuda_far import FarMemory
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.storage import WeightStorage
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_cuda_encoders import CONFIGS, TEXTS, embed, engine_on, far

_reason = why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=_reason.message if _reason else "")
BF16 = torch.bfloat16
PROMPTS = [[3, 4, 5], [7], list(range(20, 91)), [100, 101, 102, 103]]
SHAPE = SMALL | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4,
                 "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def opened(folder: Path, programmatic_launch: bool = False, **settings: Any) -> tuple[Engine, Worker]:
    config = EngineConfig(**{"num_blocks": 128, "max_num_seqs": 4, "dtype": "bfloat16"} | settings)
    platform = CudaPlatform(config, CudaDevice(0, programmatic_launch))
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, platform=platform)
    engine = Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, ahead=worker.ahead,
    )  # fmt: skip
    return engine, worker


def outputs(
    folder: Path, params: SamplingParams, programmatic_launch: bool = False, **settings: Any
) -> tuple[list[RequestOutput], int]:
    """And how many graphs were made."""
    engine, worker = opened(folder, programmatic_launch, **settings)
    found = run(engine, [(prompt, params) for prompt in PROMPTS])
    return found, worker.runner.decode.num_graphs


def answers(folder: Path, params: SamplingParams, programmatic_launch: bool = False, **settings: Any) -> list[tuple[int, ...]]:
    found, num_graphs = outputs(folder, params, programmatic_launch, **settings)
    assert (num_graphs > 0) == (not settings)
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.parametrize(
    "params",
    [greedy(40), SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True)],
    ids=["greedy", "seeded"],
)
def test_recorded_programmatic_and_eager_steps_have_the_same_tokens(folder: Path, params: SamplingParams) -> None:
    eager = answers(folder, params, eager=True)
    assert answers(folder, params) == eager
    assert answers(folder, params, programmatic_launch=True) == eager


def test_layers_with_a_window_answer_alike_from_parts_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and eager; memory out of reach is NaNs (see `test_cuda_near.py`)."""
    windows = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "use_sliding_window": True, "sliding_window": 20}
    windowed = save(random_model(Qwen3Config(**SHAPE | windows), dtype=torch.bfloat16), tmp_path)
    told = {"deterministic": True, "max_num_batched_tokens": 32, "max_model_len": 500}
    prompts = [[(i * i + n) % 509 for i in range(260 + 40 * n)] for n in range(2)]
    found = []
    behind = poison_what_is_out_of_reach(monkeypatch)
    for settings in ({}, {"eager": True}):
        for room in ({"num_blocks": 128}, {"num_blocks": None, "kv_cache_bytes": 2 << 20}):
            engine, worker = opened(windowed, **told | settings | room)
            assert (worker.near.num_parts > 0) == ("kv_cache_bytes" in room)
            found.append([each.outputs[0].token_ids for each in run(engine, [(prompt, greedy(60)) for prompt in prompts])])
    assert found == found[:1] * 4
    assert max(behind) >= 12


def test_flash_attention_of_whole_prompts_gives_what_our_kernel_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as Hopper takes it; anywhere else both sides are our kernel."""
    params = replace(greedy(1), prompt_logprobs=1)
    found = []
    for long_prompt in (1, 1 << 30):
        monkeypatch.setattr(CudaAttention, "long_prompt", long_prompt)
        logprobs = [output.prompt_logprobs for output in outputs(folder, params)[0]]
        found.append([entry.logprob for each in logprobs for entry in each or () if entry is not None])
    assert len(found[0]) == sum(map(len, PROMPTS)) - len(PROMPTS)
    assert max(abs(flash - ours) for flash, ours in zip(*found, strict=True)) < 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_that_see_all_of_themselves_have_the_vectors_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's attention, as far as Hopper takes it, and by ours."""
    model = random_model(CONFIGS[name], seed=1, dtype=BF16, auto=AutoModel)
    save(model, tmp_path)
    model.float()
    for long_prompt in (1, 1 << 30):
        monkeypatch.setattr(CudaAttention, "long_prompt", long_prompt)
        assert far(embed(engine_on(tmp_path, CudaDevice(0, False))), model) < 0.03
    engine = engine_on(tmp_path, CudaDevice(0, False), deterministic=True)
    together = embed(engine)
    assert far(together, model) < 0.03
    assert [embed(engine, [ids])[0] for ids in TEXTS] == together


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_what_an_encoder_has_made_is_attended_to_as_on_the_cpu(kind: str, tmp_path: Path) -> None:
    from test_cuda_encoded import answers as encoded_answers
    from test_cuda_encoded import check_near, made

    model = made(kind, tmp_path)
    expected = encoded_answers(model, None)
    for settings in ({}, {"deterministic": True}, {"eager": True}):
        check_near(encoded_answers(model, CudaDevice(0, False), **settings), expected)


# What rounding activations costs: to int8, to e4m3, or not at all.
LOST = {"int8": 0.012, "fp8": 0.04, "fp8:block=128": 0.04, "q4_k": 0.012, "q6_k": 0.012, "q8_0": 0.012}
FORMATS = (None, *LOST, "int8-weight-only", "fp8-weight-only", "int4", "int4:group=32", "nf4")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_products_in_every_format_are_those_of_its_numbers(name: str | None, deterministic: bool) -> None:
    """Whole storages, and so torch's own matmuls too, at all ways that numbers of rows take."""
    launcher, (outputs, width) = CudaLauncher(), (544, 512)
    weight = random(outputs, width, scale=width**-0.5)
    storage, numbers = stored(launcher, name, weight, deterministic)
    bias = random(outputs, dtype=BF16)
    for rows in (1, 2, 8, 9, 17, 70, 200):
        x, residual = random(rows, width, dtype=BF16), random(rows, outputs, dtype=BF16)
        expected = x.double() @ numbers.T + bias.double()
        there, own_bias = x.cuda(), bias.cuda()
        close(storage.matmul(there, own_bias, BF16), expected, name)
        close(storage.matmul(there, own_bias, torch.float32), expected, name)
        added = residual.cuda()
        storage.add_matmul(there, own_bias, added)
        close(added, residual.double() + expected, name)
        gate, up = expected.bfloat16().double().chunk(2, 1)
        close(storage.gated_matmul(there, own_bias, "silu"), torch.nn.functional.silu(gate) * up, name, times=3)
    ids = torch.tensor([5, 0, outputs - 1, -1])
    taken = storage.rows(ids.cuda(), None).cpu()
    twice = 2**-7 if name == "nf4" else 0.0  # whose quantiles are rounded to 16 bits before their scale is multiplied
    torch.testing.assert_close(taken[:3].double(), numbers[ids[:3]].to(BF16).double(), rtol=twice, atol=0.0)
    assert not taken[3].any()


def stored(launcher: Launcher, name: str | None, weight: torch.Tensor, deterministic: bool) -> tuple[WeightStorage, torch.Tensor]:
    """And the numbers that are left of the weight, in float64."""
    form = None if name is None else parse_format(name)
    quantized = weight.bfloat16() if form is None else form.quantize(weight)
    storage = CudaFormats(launcher, rounds=True, deterministic=deterministic).make(form, *weight.shape, BF16)
    storage.load_rows(0, quantized)
    return storage, (weight.bfloat16() if form is None else form.dequantize(quantized)).double()


@pytest.mark.parametrize("name", [None, "int4", "fp8", "q4_k"])  # all ways that rows take
def test_products_that_overlap_are_those_of_one_after_the_other(name: str | None) -> None:
    """Launched and recorded."""
    device, weight = CudaDevice(0, programmatic_launch=True), random(768, 768, scale=768**-0.5)
    storage, _ = stored(device.launcher, name, weight, deterministic=False)
    for rows in (1, 17, 70):
        start = random(rows, 768, dtype=BF16).cuda()
        expected = chain(storage, start, torch.cuda.synchronize)
        for _ in range(3):
            assert torch.equal(chain(storage, start), expected), rows
        graph, recorded = device.capture(lambda start=start: chain(storage, start))
        for _ in range(3):
            graph.replay()
            assert torch.equal(recorded, expected), rows


@pytest.mark.parametrize("name", [None, "int4", "fp8", "q4_k"])
def test_weights_in_the_machines_memory_are_read_there_and_copied(name: str | None) -> None:
    """Launched, with kernels that overlap, and recorded: to the bit as on the GPU."""
    device, weight = CudaDevice(0, programmatic_launch=True), random(768, 768, scale=768**-0.5)
    formats, form = CudaFormats(device.launcher, rounds=True, deterministic=False), None if name is None else parse_format(name)
    near, there = (formats.make(form, *weight.shape, BF16, memory) for memory in (None, FarMemory(device)))
    for storage in (near, there):
        for first in (0, 256):
            storage.load_rows(first, weight[first : first + 512 if first else 256].bfloat16())
    assert there.task_tensors[0] is not None
    assert torch.equal(there.task_tensors[0].cpu(), near.task_tensors[0].cpu())
    for rows in (1, 8, 70):
        start = random(rows, 768, dtype=BF16).cuda()
        expected = chain(near, start)
        assert torch.equal(chain(there, start), expected), rows
        graph, recorded = device.capture(lambda start=start: chain(there, start))
        for _ in range(3):
            graph.replay()
            assert torch.equal(recorded, expected), rows


def test_a_model_that_is_in_the_machines_memory_has_the_same_tokens(folder: Path) -> None:
    expected = answers(folder, greedy(40))
    found, num_graphs = outputs(folder, greedy(40), n_gpu_layers=0)
    assert [output.outputs[0].token_ids for output in found] == expected
    assert num_graphs > 0


def chain(storage: WeightStorage, start: torch.Tensor, between: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Products that read what the one ahead has just written, and write where it has read: x becomes x + (x @ W.T) @ W.T."""
    x = start.clone()
    for _ in range(12):
        y = storage.matmul(x, None, BF16)
        between()
        storage.add_matmul(y, None, x)
        between()
    return x


def close(got: torch.Tensor, expected: torch.Tensor, name: str | None, times: float = 1.0) -> None:
    error = (got.cpu().double() - expected).norm() / expected.norm()
    assert error < times * LOST.get(name or "", 0.004), (name, tuple(got.shape), got.dtype, float(error))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("eager", [False, True])
def test_two_processes_have_the_tokens_of_one(eager: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each where there are two; else by turns on the one that there is."""
    pytest.importorskip("msgspec")
    count = torch.cuda.device_count()
    monkeypatch.setattr(ranks, "gpu_of", lambda config, rank: f"cuda:{rank % count}")
    alone, together = (
        outputs(folder, greedy(12), tensor_parallel_size=size, deterministic=True, gpu_memory_utilization=0.4, eager=eager)
        for size in (1, 2)
    )
    assert [each.outputs[0].token_ids for each in together[0]] == [each.outputs[0].token_ids for each in alone[0]]
    assert (together[1] > 0) != eager


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
