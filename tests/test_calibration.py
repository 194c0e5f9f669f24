"""Calibration against transformers: what its linear layers see, by hooks on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import Llama4TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from engines import SMALL, random_model, save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import LLAMA, QWEN2, QWEN3, spec_from_hf
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.gptq import quantize_gptq
from nanovllm_cli.quant.statistics import InputStatistics
from nanovllm_cli.quantization import calibration as module
from nanovllm_cli.quantization.algorithms import by_gptq
from nanovllm_cli.quantization.calibration import Calibration, Routed
from nanovllm_cli.quantization.original import Original, open_original
from nanovllm_cli.quantization.walk import Walk

FAMILIES = {"qwen3": (Qwen3Config, QWEN3), "qwen2": (Qwen2Config, QWEN2), "llama": (LlamaConfig, LLAMA)}
LENGTHS = (17, 1, 33, 64, 5)
INPUTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
HOOKED = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_proj", "down": "mlp.down_proj"}
PLACES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def block_weights(model: Any, i: int) -> dict[str, torch.Tensor]:
    """Our slots of one block."""
    state = model.state_dict()
    found = {
        f"{ours}.{kind}": state.get(f"model.layers.{i}.{theirs}.{kind}")
        for ours, theirs in PLACES.items()
        for kind in ("weight", "bias")
    }
    return {name: value.clone() for name, value in found.items() if value is not None}


def set_weight(model: Any, i: int, name: str, value: torch.Tensor) -> None:
    ours, _, kind = name.rpartition(".")
    module = model.model.layers[i].get_submodule(PLACES[ours])
    getattr(module, kind).data.copy_(value)


def seen_by_hooks(model: Any, sequences: Sequence[list[int]]) -> dict[tuple[int, str], torch.Tensor]:
    """Inputs [T, K] in float64 of every layer's linears."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def hook(key: tuple[int, str]) -> Any:
        return lambda _module, args: seen.setdefault(key, []).append(args[0][0].double())

    modules = {(i, k): layer.get_submodule(m) for i, layer in enumerate(model.model.layers) for k, m in HOOKED.items()}
    handles = [module.register_forward_pre_hook(hook(key)) for key, module in modules.items()]
    with torch.no_grad():
        for ids in sequences:
            model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {key: torch.cat(rows) for key, rows in seen.items()}


def check(found: InputStatistics, rows: torch.Tensor) -> None:
    expected = rows.T @ rows / len(rows)
    assert torch.allclose(found.hessian.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert torch.allclose(found.mean_abs.double(), rows.abs().mean(0), rtol=1e-3, atol=1e-5)
    distance = torch.cdist(found.sample.double(), rows).amin(1)
    assert float(distance.max()) < 1e-3 * float(rows.norm(dim=1).mean())


def setting(family: str) -> tuple[Any, ModelSpec, list[list[int]], Calibration]:
    config, ours = FAMILIES[family]
    model = random_model(config(**SMALL))
    spec = spec_from_hf({**model.config.to_dict(), "rope_theta": 10000.0}, ours)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 513, (n,), generator=generator).tolist() for n in LENGTHS]
    platform = CpuPlatform(EngineConfig(threads=2, dtype="float32"), None)
    embedding = model.state_dict()["model.embed_tokens.weight"]
    return model, spec, sequences, Calibration(spec, sequences, embedding, platform, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_see_what_they_see_in_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 60)  # several batches, one with several sequences, one longer
    model, spec, sequences, calibration = setting(family)
    expected = seen_by_hooks(model, sequences)
    assert calibration.num_tokens == sum(LENGTHS)
    for i in range(spec.num_layers):
        assert calibration.layer == i
        calibration.load(block_weights(model, i))
        found = calibration.observe()
        assert found.keys() == INPUTS.keys()
        for name, statistics in found.items():
            check(statistics, expected[i, name])
        calibration.advance()


def test_what_was_loaded_last_is_what_the_next_layer_sees() -> None:
    model, _, sequences, calibration = setting("qwen2")
    weights = block_weights(model, 0)
    changed = {
        "v.weight": weights["v.weight"] * 0.3,
        "v.bias": weights["v.bias"] + 1,
        "mlp_norm.weight": weights["mlp_norm.weight"] * 2,
    }
    calibration.load(weights)
    before = calibration.observe(("o",))
    calibration.load(changed)
    after = calibration.observe(("o", "gate_up"))
    calibration.advance()
    calibration.load(block_weights(model, 1))
    check(before["o"], seen_by_hooks(model, sequences)[0, "o"])
    for name, value in changed.items():
        set_weight(model, 0, name, value)
    expected = seen_by_hooks(model, sequences)
    check(after["o"], expected[0, "o"])
    check(after["gate_up"], expected[0, "gate_up"])
    check(calibration.observe(("qkv",))["qkv"], expected[1, "qkv"])


def test_the_sample_is_spread_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_ROWS", 30)
    monkeypatch.setattr(module, "BATCH_TOKENS", 16)  # the first sequence is longer
    model, _, sequences, calibration = setting("qwen3")
    calibration.load(block_weights(model, 0))
    sample = calibration.observe(("qkv",))["qkv"].sample
    rows = seen_by_hooks(model, sequences)[0, "qkv"][::4].float()  # 120 tokens for 30 places
    assert sample.shape == rows.shape
    assert torch.allclose(sample, rows, atol=1e-3)


def test_a_scaled_embedding_is_what_goes_through_the_layers() -> None:
    model, spec, sequences, _ = setting("llama")
    embedding = model.state_dict()["model.embed_tokens.weight"].clone()
    platform = CpuPlatform(EngineConfig(threads=2, dtype="float32"), None)
    calibration = Calibration(replace(spec, embedding_scale=7.0), sequences, embedding, platform, torch.float32)
    calibration.load(block_weights(model, 0))
    model.get_input_embeddings().weight.data *= 7
    check(calibration.observe(("gate_up",))["gate_up"], seen_by_hooks(model, sequences)[0, "gate_up"])


def test_a_walk_passes_blocks_as_they_are_or_as_they_were_changed(tmp_path: Path) -> None:
    model, _, sequences, _ = setting("qwen2")
    with open_original("m", save(model, tmp_path)) as original:
        walk = Walk(original, sequences, NullProgress())
        weights = walk.enter(1)  # nobody entered block 0
        assert weights.keys() == block_weights(model, 1).keys()
        check(walk.calibration.observe(("down",))["down"], seen_by_hooks(model, sequences)[1, "down"])
        changed = weights["down.weight"] * -2
        walk.calibration.load({"down.weight": changed})
        walk.enter(2)
        set_weight(model, 1, "down.weight", changed)
        check(walk.calibration.observe(("down",))["down"], seen_by_hooks(model, sequences)[2, "down"])


def test_experts_see_the_tokens_that_take_them(tmp_path: Path) -> None:
    """In the second of two blocks, by hooks in transformers; those whom few take see others beside them."""
    config = Qwen3MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True)
    model = random_model(config, dtype=torch.float32)
    sequences = [[(7 * i + i * i + 13 * k) % config.vocab_size for i in range(n)] for k, n in enumerate(LENGTHS)]
    mixture, seen = model.model.layers[1].mlp, []
    mixture.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    for ids in sequences:
        model(torch.tensor([ids]))
    rows = torch.cat(seen)
    chosen = mixture.gate(rows)[-1]
    with open_original("m", save(model, tmp_path)) as original:
        walk = Walk(original, sequences, NullProgress())
        walk.enter(1)
        routed = walk.calibration.routed()
        assert torch.equal(routed.chosen.sort().values, chosen.sort().values)
        for expert in range(6):
            taken = (chosen == expert).any(1)
            own = routed.of(expert)
            assert len(own) == max(int(taken.sum()), min(config.hidden_size, len(rows)))
            assert torch.allclose(own[: int(taken.sum())], rows[taken], rtol=1e-4, atol=1e-5)
            gate, up = mixture.experts.gate_up_proj[expert].chunk(2)
            inner = torch.nn.functional.silu(own @ gate.T) * (own @ up.T)
            for source, expected in (("gate_up", own), ("down", inner)):
                hessian = walk.calibration.observe_expert(expert, source, routed).hessian
                assert torch.allclose(hessian, expected.T @ expected / len(own), rtol=1e-3, atol=1e-6)


def test_an_expert_sees_rows_as_the_router_scales_them(tmp_path: Path) -> None:
    """Of a Llama 4, in the second of its blocks; the shared one sees them as they are."""
    config = Llama4TextConfig(**SMALL | {"num_hidden_layers": 2, "intermediate_size": 40}, num_local_experts=3)
    model, seen = random_model(config), []
    sequences = [[(7 * i + i * i + 13 * k) % config.vocab_size for i in range(n)] for k, n in enumerate(LENGTHS)]
    model.model.layers[1].feed_forward.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    for ids in sequences:
        model(torch.tensor([ids]))
    rows = torch.cat(seen)
    best = model.model.layers[1].feed_forward.router(rows)[1].max(1)
    with open_original("m", save(model, tmp_path)) as original:
        walk = Walk(original, sequences, NullProgress())
        walk.enter(1)
        routed = walk.calibration.routed()
        for expert in range(3):
            taken = best.indices == expert
            expected = rows[taken] * best.values[taken, None].sigmoid()
            assert torch.allclose(routed.of(expert)[: int(taken.sum())], expected, rtol=1e-4, atol=1e-5)
        shared = walk.calibration.observe_expert(None, "gate_up", routed).hessian
        assert torch.allclose(shared, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-5)


def test_an_expert_that_nobody_takes_sees_tokens_that_are_spread_over_all() -> None:
    rows = torch.arange(100.0)[:, None].expand(-1, 8)
    found = Routed(rows, torch.zeros(100, 1, dtype=torch.int64)).of(3)
    assert found[:, 0].tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(Routed(rows[:5], torch.zeros(5, 1, dtype=torch.int64)).of(3)) == 5


@pytest.mark.parametrize("kept", [(), ("k", "o", "gate", "up")])
def test_gptq_goes_through_a_block_in_the_order_of_its_computation(kept: tuple[str, ...]) -> None:
    """Each linear is rounded for what it sees behind the rounded ones before it; what stays as it is, is read as it is."""
    model, _, sequences, calibration = setting("qwen2")
    weights = block_weights(model, 0)
    form = Integer(4, 0)
    formats = {f"{part}.weight": None if part in kept else form for parts in INPUTS.values() for part in parts}
    calibration.load(weights)
    walk = SimpleNamespace(
        calibration=calibration, hessian=lambda source, _: calibration.observe((source,))[source].hessian
    )
    found = by_gptq(cast(Walk, walk), "blocks.0", weights, formats, cast(Original, None))
    assert found.keys() == {slot for slot, each in formats.items() if each is not None}
    for source, parts in INPUTS.items():  # the model's own rows, with what comes before in the computation rounded
        rows = seen_by_hooks(model, sequences)[0, source]
        hessian = (rows.T @ rows / len(rows)).float()
        for slot in (f"{part}.weight" for part in parts if part not in kept):
            expected = form.dequantize(quantize_gptq(weights[slot], hessian, form))
            off = (form.dequantize(found[slot]) - expected).norm() / expected.norm()
            assert off < 0.02, "a code here and there, where float32 sums part"
        for slot in found.keys() & {f"{part}.weight" for part in parts}:
            set_weight(model, 0, slot, form.dequantize(found[slot]))


def test_observing_twice_gives_the_same_bits() -> None:
    model, _, _, calibration = setting("llama")
    calibration.load(block_weights(model, 0))
    first, second = calibration.observe(), calibration.observe()
    assert all(torch.equal(first[name].hessian, second[name].hessian) for name in INPUTS)
