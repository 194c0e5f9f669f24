"""RWKV-7 in the GPU's engine on emulated kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, run
from nanovllm_cli.engine import states
from rwkvs import Shape, logits, random_weights, save_folder
from test_cuda_delta import check_nothing_is_lost
from test_cuda_engine import PROMPTS, engine_on, kernels_not_rehearsed, tokens
from test_cuda_quantized import worker_on
from test_quant_engine import difference, logits_of

pytestmark = needs_emulation
SHAPE = Shape(vocab=513, layers=2, hidden=64, head_dim=16, inner=80)


def test_an_rwkv_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the formulas, tokens those of a CPU, by recorded steps; on a deterministic GPU the same to the bit
    together, with guesses and few blocks. Nothing is compiled late."""
    for name, size in {"FIRST_KEPT": 16, "KEPT_EVERY": 32, "LATEST_EVERY": 16}.items():
        monkeypatch.setattr(states, name, size)
    weights = random_weights(SHAPE)
    folder = save_folder(tmp_path / "model", SHAPE, weights, torch.bfloat16, torch_dtype="bfloat16")
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    assert tokens(engine, greedy(8)) == tokens(engine_on(folder, None), greedy(8))
    assert device.graphs
    check_nothing_is_lost(engine)
    asked = [(prompt, greedy(8, logprobs=2)) for prompt in (PROMPTS[1], PROMPTS[2], list(range(60, 100)))]
    asked.append(([9, 8, 7] * 6, greedy(20, logprobs=2, allowed_token_ids=(8, 9))))
    settings = {"num_speculative_tokens": 4, "num_blocks": 6, "max_num_batched_tokens": 13}
    plain, engine = (engine_on(folder, EmulatedDevice(), deterministic=True, **more) for more in ({}, settings))
    alone = [run(plain, [each], salt=str(i))[0].outputs[0] for i, each in enumerate(asked)]
    found = [output.outputs[0] for output in run(engine, asked)]
    assert [(each.token_ids, each.logprobs) for each in found] == [(each.token_ids, each.logprobs) for each in alone]
    assert not kernels_not_rehearsed(folder)
    prompts = [prompt[:12] for prompt in PROMPTS]
    rounded = {name: each.bfloat16().float() for name, each in weights.items()}
    assert difference(logits_of(worker_on(folder, EmulatedDevice()), prompts), logits(SHAPE, rounded, prompts)) < 0.05
