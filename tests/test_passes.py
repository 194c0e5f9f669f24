"""Layers that are gone through several times, in the GPU's engine on emulated kernels, and what is refused of such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HrmTextConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.passes_spec import PassesSpec, Run
from test_cuda_engine import SHAPE, engine_on, kernels_not_rehearsed, tokens
from test_cuda_guesses import FEW_KINDS, SETTINGS
from test_lookup import answers
from test_models import HRM

CONFIG = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(HrmTextConfig(**CONFIG), seed=2, dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


@needs_emulation
def test_greedy_tokens_are_those_of_the_cpu(folder: Path) -> None:
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(8)) == tokens(engine_on(folder, None), greedy(8))
    assert device.graphs


@needs_emulation
def test_a_deterministic_gpu_gives_the_same_to_the_bit(folder: Path) -> None:
    """With guesses, and few blocks."""
    plain = answers(engine_on(folder, EmulatedDevice(), deterministic=True, **SETTINGS), FEW_KINDS)
    few = {"num_blocks": 6, "max_num_batched_tokens": 13}
    engine = engine_on(folder, EmulatedDevice(), **SETTINGS | {"deterministic": True, "num_speculative_tokens": 4} | few)
    assert answers(engine, FEW_KINDS) == plain
    assert engine.stats().used_blocks == 0


@needs_emulation
def test_no_kernel_is_compiled_late(folder: Path) -> None:
    assert not kernels_not_rehearsed(folder)


def test_a_layer_has_a_cache_for_each_time_that_it_is_computed(folder: Path) -> None:
    worker = worker_for(folder)
    assert len(worker.model.blocks) == 2
    assert len(worker.runner.cache.layers) == 6
    assert len({layer[0].data_ptr() for layer in worker.runner.cache.layers}) == 6


def test_the_order_of_runs() -> None:
    fast, slow = Run(0, 2, slow=False), Run(2, 3, slow=True)
    passes = PassesSpec((fast, fast, slow, fast, fast, slow))
    assert passes.order == (0, 1, 0, 1, 2, 0, 1, 0, 1, 2)
    assert passes.joints == {2: False, 4: False, 5: True, 7: False, 9: False}


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"attention_bias": True}, UnsupportedError, "attention_bias"),
    ({"mlp_bias": True}, UnsupportedError, "mlp_bias"),
    ({"H_cycles": 129}, CheckpointError, "at most 1024 layers are believed"),
    ({"L_cycles": 0}, CheckpointError, "L_cycles"),
    ({"num_layers_per_stack": "2"}, CheckpointError, "num_hidden_layers"),
])  # fmt: skip
def test_configs_that_can_not_be_run(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    config = HrmTextConfig(**HRM).to_dict() | {"architectures": ["HrmTextForCausalLM"]} | changes
    with pytest.raises(error, match=message):
        spec_from_hf(config, hf_family(config))
