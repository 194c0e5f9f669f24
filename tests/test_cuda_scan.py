"""Mamba's first rule in the GPU's engine on emulated kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import JambaConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, run, save
from nanovllm_cli.engine import states
from test_cuda_delta import check_nothing_is_lost
from test_cuda_engine import PROMPTS, SHAPE, engine_on, kernels_not_rehearsed, tokens
from test_cuda_quantized import worker_on
from test_models import JAMBA
from test_quant_engine import difference, expected_logits, logits_of

pytestmark = needs_emulation


def test_a_jamba_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of transformers, tokens those of a CPU, by recorded steps; on a deterministic GPU the same to the bit
    together, with guesses and few blocks. Nothing is compiled late."""
    for name, size in {"FIRST_KEPT": 16, "KEPT_EVERY": 32, "LATEST_EVERY": 16}.items():
        monkeypatch.setattr(states, name, size)
    shape = {name: value for name, value in (JAMBA | SHAPE).items() if name not in ("head_dim", "tie_word_embeddings")}
    own = {"num_hidden_layers": 2, "attn_layer_period": 2, "mamba_dt_rank": 5, "num_experts": 1}
    model = random_model(JambaConfig(**shape | own), seed=4, dtype=torch.bfloat16)
    folder = save(model, tmp_path)
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
    assert difference(logits_of(worker_on(folder, EmulatedDevice()), prompts), expected_logits(model.float(), prompts)) < 0.05
