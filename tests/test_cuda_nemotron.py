"""Nemotron in the GPU's engine on emulated kernels: layers that are one sublayer, state spaces of several groups, MLPs and
experts without a gate, in plain and in rounded weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, Mamba2Config, NemotronHConfig

from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from emulation.on_gpu import reads_tasks
from engines import greedy, random_model, run, save, worker_for
from nanovllm_cli.engine import states
from nanovllm_cli.kernels import cuda_mixture, reference
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.cuda_low_rank import CudaLowRank
from nanovllm_cli.quant.cuda_stacked import CudaStacked
from nanovllm_cli.quant.dense_cuda import CudaDense
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.low_rank import Beside
from test_cuda_delta import check_nothing_is_lost
from test_cuda_engine import PROMPTS, SHAPE, engine_on, kernels_not_rehearsed, launches_of_a_decode_step, tokens
from test_cuda_quantized import worker_on
from test_models import FALCON_H1, MAMBA2, NEMOTRON, NEMOTRON_EXPERTS
from test_quant_engine import difference, expected_logits, logits_of

pytestmark = needs_emulation
COMMON = NEMOTRON | {name: value for name, value in SHAPE.items() if name != "num_hidden_layers"}
MODELS = {
    "mlps": NemotronHConfig(**COMMON | {"hybrid_override_pattern": "M-*-"}),
    "experts": NemotronHConfig(
        **COMMON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "ME*E", "n_groups": 2, "moe_intermediate_size": 40,
                                       "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 20},
    ),
    "side by side": FalconH1Config(**FALCON_H1 | SHAPE),
    "states alone": Mamba2Config(**MAMBA2 | {"num_hidden_layers": 2, "vocab_size": SHAPE.get("vocab_size", 512)}),
}  # fmt: skip
EVEN = {"hidden_size": 64, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "intermediate_size": 96,
        "mamba_head_dim": 16, "mamba_num_heads": 4, "n_groups": 2}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _short_texts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "FIRST_KEPT", 16)
        patch.setattr(states, "KEPT_EVERY", 32)
        patch.setattr(states, "LATEST_EVERY", 16)
        yield


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """With a seed whose answers have no near ties."""
    return random_model(MODELS[request.param], seed=4, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("model"))


def test_tokens_are_those_of_the_cpu_and_steps_are_recorded(model: Any, folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    assert tokens(engine, greedy(8)) == tokens(engine_on(folder, None), greedy(8))
    assert device.graphs
    check_nothing_is_lost(engine)
    prompts = [prompt[:12] for prompt in PROMPTS]
    assert difference(logits_of(worker_on(folder, EmulatedDevice()), prompts), expected_logits(model.float(), prompts)) < 0.05


def test_a_deterministic_gpu_gives_the_same_to_the_bit(folder: Path) -> None:
    """With guesses, and few blocks."""
    asked = [(prompt, greedy(8, logprobs=2)) for prompt in (PROMPTS[1], PROMPTS[2], list(range(60, 100)))]
    asked.append(([9, 8, 7] * 6, greedy(20, logprobs=2, allowed_token_ids=(8, 9))))
    settings = {"num_speculative_tokens": 4, "num_blocks": 6, "max_num_batched_tokens": 13}
    plain, engine = (engine_on(folder, EmulatedDevice(), deterministic=True, **more) for more in ({}, settings))
    alone = [run(plain, [each], salt=str(i))[0].outputs[0] for i, each in enumerate(asked)]
    found = [output.outputs[0] for output in run(engine, asked)]
    assert [(each.token_ids, each.logprobs) for each in found] == [(each.token_ids, each.logprobs) for each in alone]
    check_nothing_is_lost(engine)


@pytest.mark.parametrize("model", ["experts"], indirect=True)
def test_large_tasks_and_experts_that_the_host_gives_rows_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(engine_on(folder, EmulatedDevice()), greedy(4))
    monkeypatch.setattr(cuda_mixture, "LEAST_ROWS", 2)
    monkeypatch.setattr(cuda_mixture, "READ_MEANWHILE", 0)
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(4)) == expected
    assert any(kernel.stem == "gemm" and reads_tasks(kernel) for kernel in device.launcher.launched)
    monkeypatch.setattr(cuda_mixture, "MAX_EXPERTS", 0)
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(4)) == expected
    assert not any(reads_tasks(kernel) for kernel in device.launcher.launched)


def test_launches_of_a_decode_step(model: Any, folder: Path) -> None:
    """Five of a state space, three of attention, two of an MLP; of experts eight, with their norm and the shared one's two, and
    two more where they read fewer numbers. Side by side they are one more."""
    of_two_layers = 4 if getattr(model.config, "moe_latent_size", None) else 0
    assert launches_of_a_decode_step(folder) <= 6 * 4 + 6 + of_two_layers


def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4:group=32", "q8_0"])
def test_in_rounded_weights(name: str, tmp_path: Path) -> None:
    """One format for each kind of kernel."""
    config = NemotronHConfig(**COMMON | NEMOTRON_EXPERTS | EVEN | {"hybrid_override_pattern": "ME*-"})
    folder = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    on_gpu, on_cpu = worker_on(folder, EmulatedDevice(), quant=name), worker_for(folder, quant=name, dtype="bfloat16")
    for prompts in (PROMPTS[:1], PROMPTS):
        assert difference(logits_of(on_gpu, prompts), logits_of(on_cpu, prompts)) < 0.15  # rounds in other groups
    device = EmulatedDevice()
    recorded = tokens(engine_on(folder, device, quant=name), greedy(4))
    assert device.graphs
    assert tokens(engine_on(folder, EmulatedDevice(), quant=name, eager=True), greedy(4)) == recorded


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [None, "int8", "fp8", "int4:group=32", "nf4", "q8_0"])
def test_each_storage_squares_what_it_projects(name: str | None, deterministic: bool) -> None:
    """Of few rows, and of many."""
    launcher, form = Emulator(), None if name is None else parse_format(name)
    storage = CudaFormats(launcher, rounds=True, deterministic=deterministic).make(form, 48, 256, torch.bfloat16)
    storage.load_rows(0, torch.randn(48, 256, generator=torch.Generator().manual_seed(0)) / 16)
    for count in (1, 5, 19, 70):
        x = torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).bfloat16()
        expected = reference.gated_activation(storage.matmul(x, None, torch.bfloat16), "relu2")
        assert torch.equal(storage.gated_matmul(x, None, "relu2"), expected)


def test_so_do_stacked_and_adapted_weights() -> None:
    launcher, bf16, generator = Emulator(), torch.bfloat16, torch.Generator().manual_seed(0)

    def dense(rows: int, width: int) -> CudaDense:
        weight = CudaDense(rows, width, bf16, launcher, False)
        weight.load_rows(0, torch.randn(rows, width, generator=generator) / width**0.5)
        return weight

    stacked = CudaStacked([dense(10, 32), dense(23, 32)], bf16, launcher)
    side = Beside(torch.randn(16, 32, generator=generator) / 6, torch.randn(33, 16, generator=generator) / 4)

    def keep(matrix: torch.Tensor) -> CudaDense:
        weight = CudaDense(*matrix.shape, bf16, launcher, False)
        weight.load_rows(0, matrix)
        return weight

    adapted = CudaLowRank(dense(33, 32), [side], keep, bf16, launcher)
    x = torch.randn(5, 32, generator=generator).bfloat16()
    for weight in (stacked, adapted):
        expected = reference.gated_activation(weight.matmul(x, None, bf16), "relu2")
        assert torch.equal(weight.gated_matmul(x, None, "relu2"), expected)
