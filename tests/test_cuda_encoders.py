"""Encoders in the GPU's engine on emulated kernels: texts computed whole, near to transformers' vectors in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, Gemma3TextConfig, ModernBertConfig, MPNetConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice
from engines import random_model, save
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels.activation import ACTIVATIONS
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.weights.checkpoint import open_checkpoint

pytestmark = needs_emulation
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 90,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "modernbert": ModernBertConfig(
        **SIZES | ENDS | {"num_hidden_layers": 3}, local_attention=20, global_attn_every_n_layers=2, cls_token_id=1,
        sep_token_id=2,
    ),
    "mpnet": MPNetConfig(**SIZES | {"max_position_embeddings": 92, "pad_token_id": 1}),
    "gemma": Gemma3TextConfig(
        **SIZES, num_key_value_heads=1, head_dim=24, sliding_window=20, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
NAMES = (*CONFIGS, "gemma 2", "privacy filter")
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(5, 300, (count,), generator=GENERATOR).tolist() for count in (1, 2, 9, 70, 1, 17, 90)]


def gemma_2() -> Any:
    """Not among the others, which a GPU's own tests take: a machine with one may have an older transformers."""
    from transformers.models.embedding_gemma2.configuration_embedding_gemma2 import EmbeddingGemma2TextConfig

    return EmbeddingGemma2TextConfig(
        **SIZES, num_key_value_heads=1, head_dim=24, global_head_dim=40, num_global_key_value_heads=2, sliding_window=10,
        sliding_window_pattern=2, hidden_size_per_layer_input=16, embedding_dim=64,
    )  # fmt: skip


def privacy_filter() -> Any:
    """Not among the others for the same reason. A learned sink for each head, and mixtures."""
    from transformers.models.openai_privacy_filter.configuration_openai_privacy_filter import OpenAIPrivacyFilterConfig

    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 45, "truncate": False, "rope_theta": 150000.0}
    return OpenAIPrivacyFilterConfig(
        **SIZES | ENDS, num_key_value_heads=1, head_dim=32, sliding_window=10, num_local_experts=6, num_experts_per_tok=2,
        rope_parameters=rope,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """transformers' models and their folders; weights in bfloat16."""
    configs = CONFIGS | {"gemma 2": gemma_2(), "privacy filter": privacy_filter()}
    models = {name: random_model(config, seed=1, dtype=torch.bfloat16, auto=AutoModel) for name, config in configs.items()}
    torch.nn.init.eye_(models["gemma 2"].embedding_projection.weight)  # which is no part of the engine
    folders = {name: save(model, tmp_path_factory.mktemp("model")) for name, model in models.items()}
    return {name: (model.float(), folders[name]) for name, model in models.items()}


def engine_on(folder: Path, device: Device | None, **settings: Any) -> Engine:
    """On the CPU where device is None. Its steps hold less than the longest texts."""
    defaults = {"num_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 24, "dtype": "bfloat16"}
    config = EngineConfig(**defaults | settings | ({"device": "cpu", "threads": 2} if device is None else {}))
    platform = None if device is None else CudaPlatform(config, device)
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, platform=platform)
    return Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len, num_blocks=worker.num_blocks,
        ahead=worker.ahead, draws=worker.spec.has_head, embeds_whole=worker.spec.reads_both_ways,
    )  # fmt: skip


def embed(engine: Engine, texts: list[list[int]] = TEXTS, pooling: Pooled = "mean") -> list[tuple[float, ...]]:
    for i, ids in enumerate(texts):
        engine.embed(str(i), ids, pooling)
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: output.pooled for output in engine.step() if output.finished}
    assert engine.stats().used_blocks == 0
    return [found[str(i)] for i in range(len(texts))]


def distance(found: list[tuple[float, ...]], wanted: list[Any]) -> float:
    """The largest, as a share of the second's length."""
    pairs = [(torch.as_tensor(one).double(), torch.as_tensor(other).double()) for one, other in zip(found, wanted, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def far(found: list[tuple[float, ...]], model: Any, texts: list[list[int]] = TEXTS, pooling: Pooled = "mean") -> float:
    """From transformers' vectors."""
    wanted = []
    for ids in texts:
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        wanted.append({"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0], "each": hidden.flatten()}[pooling])
    return distance(found, wanted)


def most(name: str) -> float:
    """What rounding costs; more where scores are not scaled, and where a token may come to another expert."""
    return 0.06 if name in ("gemma 2", "privacy filter") else 0.03


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_transformers(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    """Texts of a token and of as many as there are positions, beside each other or in steps of their own."""
    model, folder = made[name]
    engine = engine_on(folder, EmulatedDevice())
    for pooling in ("mean", "cls", "each"):
        assert far(embed(engine, pooling=pooling), model, pooling=pooling) < most(name)
    assert far(embed(engine, [[7], [9]], "last"), model, [[7], [9]], "last") < most(name)


def test_half_precision_on_old_gpus_is_nearer(made: dict[str, tuple[Any, Path]]) -> None:
    model, folder = made["modernbert"]
    assert far(embed(engine_on(folder, EmulatedDevice(capability=75), dtype="float16")), model) < 0.006


@pytest.mark.parametrize("name", ["modernbert", "gemma"])
def test_an_fp8_cache_costs_what_it_does_on_a_cpu(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    model, folder = made[name]
    found, wanted = (far(embed(engine_on(folder, device, kv_cache_dtype="fp8")), model) for device in (EmulatedDevice(), None))
    assert found < 2 * wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_deterministic_gpu_gives_a_text_the_same_bits_whatever_is_beside_it(
    name: str, made: dict[str, tuple[Any, Path]]
) -> None:
    model, folder = made[name]
    engine = engine_on(folder, EmulatedDevice(), deterministic=True)
    together = embed(engine)
    assert far(together, model) < most(name)
    assert [embed(engine, [ids])[0] for ids in TEXTS] == together
    settings = {"deterministic": True, "num_blocks": 7, "max_num_batched_tokens": 128}
    pressed = engine_on(folder, EmulatedDevice(num_multiprocessors=64), **settings)
    assert embed(pressed, TEXTS[::-1])[::-1] == together


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_device_that_is_late_gives_the_same(name: str, made: dict[str, tuple[Any, Path]]) -> None:
    _, folder = made[name]
    expected = embed(engine_on(folder, EmulatedDevice()))
    with LateDevice() as device:
        found = embed(engine_on(folder, device))
    assert found == expected
    assert device.races == []


@pytest.mark.parametrize("quant", ["int8", "int4:group=32", "q8_0"])
def test_quantized_it_is_what_the_cpu_has_it(quant: str, made: dict[str, tuple[Any, Path]]) -> None:
    """Of few tokens the kernel that makes an MLP's inner numbers applies GELU to them, too."""
    _, folder = made["bert"]
    device = EmulatedDevice()
    found, wanted = (embed(engine_on(folder, where, quant=quant)) for where in (device, None))
    assert distance(found, wanted) < 0.03
    kind = ("ACTIVATION", ACTIVATIONS["lone_gelu"])
    assert [kernel.stem for kernel in device.launcher.launched if kind in kernel.constants]


def test_whole_texts_on_hopper_go_to_torch(made: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the layers have windows."""
    monkeypatch.setattr(CudaAttention, "long_prompt", 9)
    texts = [ids for ids in TEXTS if len(ids) >= 9]
    for name, goes in (("bert", True), ("modernbert", False)):
        model, folder = made[name]
        device = EmulatedDevice(capability=90)
        engine = engine_on(folder, device)
        before = device.launcher.launches["prefill_attention"]
        assert far(embed(engine, texts), model, texts) < 0.03
        assert (device.launcher.launches["prefill_attention"] == before) == goes


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 200}, {"max_model_len": 70}, {"deterministic": True}], ids=str
)
def test_no_step_is_larger_than_what_was_measured_and_none_waits_for_the_compiler(
    settings: dict[str, Any], made: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text longer than a step holds has one of its own, and several together may be longer than any."""
    _, folder = made["bert"]
    sizes, prepare = [], Decoder.prepare

    def noted(model: Decoder, batch: Any) -> Any:
        sizes.append(batch.num_tokens)
        return prepare(model, batch)

    monkeypatch.setattr(Decoder, "prepare", noted)
    device = EmulatedDevice()
    engine = engine_on(folder, device, **settings)
    measured = max(sizes)
    sizes.clear()
    longest = settings.get("max_model_len", 90)
    embed(engine, [ids[:longest] for ids in TEXTS])
    assert longest <= max(sizes) <= measured
    assert measured <= max(longest, settings.get("max_num_batched_tokens", 24))
    assert {str(kernel) for kernel in device.launcher.launched - device.launcher.rehearsed} == set()


@pytest.mark.parametrize(("tokens", "hint"), [(24, "--ctx-size"), (200, "--batch-size")])
def test_a_step_without_room_says_whether_its_texts_or_their_number_are_too_large(
    tokens: int, hint: str, made: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Decoder, "run", has_no_room)
    with pytest.raises(DoesNotFitError, match=f"a step of {max(90, tokens)} tokens does not fit") as refused:
        engine_on(made["bert"][1], EmulatedDevice(), max_num_batched_tokens=tokens)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"latent": LatentSpec(None, 64, 32, 16, 32)}, "latent attention"), ({"reads": 0}, "another layer's keys")],
)
def test_what_is_not_computed_in_both_directions_is_refused(changes: dict[str, Any], word: str) -> None:
    spec = AttentionSpec(2, 1, 64, None, both_ways=True, **changes)
    with pytest.raises(UnsupportedError, match=f"{word} in both directions on a GPU"):
        CudaAttention(EmulatedDevice().launcher, [spec], torch.bfloat16, torch.bfloat16, 16, 4, 128, False)
