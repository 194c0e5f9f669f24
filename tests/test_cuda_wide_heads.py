"""Heads whose sums warps of prefill_attention share, and layers that read what another keeps, in the GPU's engine on emulated
kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice
from engines import greedy, random_model, run, save
from nanovllm_cli.errors import UnsupportedError
from test_cuda_engine import PROMPTS, SHAPE, engine_on, kernels_not_rehearsed, tokens

pytestmark = needs_emulation
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
BEHIND = greedy(20, logprobs=2)
LONG = [*PROMPTS[1:], [9, 8, 7] * 12]


def config(**more: Any) -> Gemma4TextConfig:
    own = {"num_hidden_layers": 4, "layer_types": LAYERS, "sliding_window": 10, "tie_word_embeddings": True}
    numbers = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SHAPE["vocab_size"]}
    return Gemma4TextConfig(**SHAPE | own | numbers | {"global_head_dim": 320} | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(config(), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


KINDS: dict[str, dict[str, Any]] = {
    "wide": {},
    "all are wide": {"layer_types": ["full_attention"] * 4},
    "none is": {"global_head_dim": 128},
    "keys are values": {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_cpu(kind: str, deterministic: bool, tmp_path: Path) -> None:
    model = save(random_model(config(**KINDS[kind]), dtype=torch.bfloat16), tmp_path)
    device, on_cpu = EmulatedDevice(), tokens(engine_on(model, None), greedy(6), PROMPTS[:3])
    assert tokens(engine_on(model, device, deterministic=deterministic), greedy(6), PROMPTS[:3]) == on_cpu
    assert device.graphs


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """What a deterministic GPU answers to each, in eager steps."""
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, eager=True)
    return [run(engine, [(prompt, BEHIND)], salt=str(i))[0].outputs[0] for i, prompt in enumerate(LONG)]


@pytest.mark.parametrize(
    "more",
    [{}, {"num_blocks": 6, "max_num_batched_tokens": 13}, {"max_num_batched_tokens": 5}, {"num_speculative_tokens": 4}],
    ids=["roomy", "few blocks", "small steps", "guesses"],
)
def test_a_deterministic_gpu_gives_the_same_to_the_bit(more: dict[str, Any], folder: Path, alone: list[Any]) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device, deterministic=True, **more)
    for one, expected in zip(run(engine, [(prompt, BEHIND) for prompt in LONG]), alone, strict=True):
        assert one.outputs[0].token_ids == expected.token_ids
        assert one.outputs[0].logprobs == expected.logprobs
    assert device.graphs
    assert (engine.stats().preemptions > 0) == ("num_blocks" in more)


def test_a_late_device_gives_the_same(folder: Path) -> None:
    settings = {"deterministic": True, "num_speculative_tokens": 4}
    expected = tokens(engine_on(folder, EmulatedDevice(), **settings), greedy(8), LONG)
    with LateDevice() as device:
        assert tokens(engine_on(folder, device, **settings), greedy(8), LONG) == expected
    assert device.races == []


def test_attention_of_a_decode_step_is_a_launch_a_layer(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device, eager=True)
    engine.add("a", [3, 4, 5], greedy(20))
    for _ in range(4):
        engine.step()
    before = dict(device.launcher.launches)
    engine.step()
    more = {entry: count - before.get(entry, 0) for entry, count in device.launcher.launches.items()}
    assert (more["decode_attention"], more["decode_attention_any"], more["rope_and_cache"]) == (2, 2, 0)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"num_speculative_tokens": 16}], ids=str)
def test_no_answer_waits_for_the_compiler(settings: dict[str, Any], folder: Path) -> None:
    assert kernels_not_rehearsed(folder, **settings) == set()


def test_wider_heads_are_refused_when_a_model_is_loaded(tmp_path: Path) -> None:
    model = save(random_model(config(global_head_dim=514), dtype=torch.bfloat16), tmp_path)
    with pytest.raises(UnsupportedError, match="514 dims"):
        engine_on(model, EmulatedDevice())
