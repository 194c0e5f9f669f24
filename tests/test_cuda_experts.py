"""Mixtures of experts in the GPU's engine on emulated kernels: the CPU's answers, from steps that are recorded."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AfmoeConfig,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LagunaConfig,
    Lfm2MoeConfig,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    ZayaConfig,
)

from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from emulation.late import LateDevice
from emulation.on_gpu import know_addresses, reads_tasks
from engines import greedy, random_model, save, worker_for
from nanovllm_cli.engine.decode_step import DecodeStep
from nanovllm_cli.kernels import cuda_mixture
from nanovllm_cli.kernels.cuda_mixture import CudaMixture
from nanovllm_cli.kernels.experts import FEW_ROWS
from nanovllm_cli.kernels.route import route
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.cuda_packed import CudaPacked
from nanovllm_cli.quant.dense_cuda import CudaDense
from nanovllm_cli.quant.format_names import parse_format
from test_cuda_engine import (
    PROMPTS,
    SHAPE,
    depend_on_the_request_alone,
    engine_on,
    kernels_not_rehearsed,
    launches_of_a_decode_step,
    tokens,
)
from test_cuda_quantized import worker_on
from test_late_device import serve
from test_quant_engine import difference, expected_logits, logits_of

pytestmark = needs_emulation
QWEN = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, Any] = {
    "qwen3": Qwen3MoeConfig(**SHAPE, **QWEN),
    "qwen3 odd": Qwen3MoeConfig(**SHAPE, **QWEN | {"num_experts": 9, "moe_intermediate_size": 40, "norm_topk_prob": False}),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=3),
    "glm4": Glm4MoeConfig(
        **SHAPE, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, attention_bias=True,
        routed_scaling_factor=1.5,
    ),
    "ernie": Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=48),
    "granite": GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.22),
    "lfm2": Lfm2MoeConfig(
        **SHAPE, layer_types=["conv", "full_attention"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        num_dense_layers=1,
    ),
    "llama4": Llama4TextConfig(
        **SHAPE | {"intermediate_size": 64}, intermediate_size_mlp=48, num_local_experts=4, no_rope_layers=[1, 0], floor_scale=8,
        attn_scale=0.5, attention_chunk_size=128,
    ),
    "afmoe": AfmoeConfig(
        **SHAPE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, num_shared_experts=1, sliding_window=10,
        global_attn_every_n_layers=2, mup_enabled=True,
    ),
    "laguna": LagunaConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=48,
        moe_routed_scaling_factor=1.5,
        num_attention_heads_per_layer=[4, 6], layer_types=["full_attention", "sliding_attention"], sliding_window=10,
    ),
    "mimo": MiMoV2FlashConfig(
        **SHAPE | {"head_dim": 96}, v_head_dim=40, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        sliding_window=10, layer_types=["full_attention", "sliding_attention"],
    ),
    "zaya": ZayaConfig(**{name: value for name, value in SHAPE.items() if name != "intermediate_size"} | {
        "num_experts": 4, "moe_intermediate_size": 64, "router_hidden_size": 32, "tie_word_embeddings": True,
        "sliding_window": 10, "layer_types": ["hybrid", "hybrid_sliding"],
    }),
    "gpt-oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}
FORMATS = ("int8", "fp8", "int4:group=32", "q8_0")  # one for each kind of kernel


@pytest.fixture(autouse=True)
def whose_addresses_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    know_addresses(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["qwen3"], dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu_and_steps_are_recorded(family: str, tmp_path: Path) -> None:
    random = random_model(FAMILIES[family], dtype=torch.bfloat16)
    model, prompts = save(random, tmp_path), [prompt[:12] for prompt in PROMPTS]
    recorded, eager = EmulatedDevice(), EmulatedDevice()
    answers = tokens(engine_on(model, recorded), greedy(6))
    assert recorded.graphs
    assert tokens(engine_on(model, eager, eager=True), greedy(6)) == answers
    assert not eager.graphs
    assert [own[:4] for own in answers] == [own[:4] for own in tokens(engine_on(model, None), greedy(6))]
    assert difference(logits_of(worker_on(model, EmulatedDevice()), prompts), expected_logits(random.float(), prompts)) < 0.05


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE | {"num_hidden_layers": 1, "hidden_size": 64}
    model = save(random_model(Qwen3MoeConfig(**shape, **QWEN), dtype=torch.bfloat16), tmp_path)
    by_tasks, on_cpu = worker_on(model, EmulatedDevice(), quant=name), worker_for(model, quant=name, dtype="bfloat16")
    monkeypatch.setattr(cuda_mixture, "MAX_EXPERTS", 0)
    one_by_one = worker_on(model, EmulatedDevice(), quant=name)
    monkeypatch.undo()
    for prompts in (PROMPTS[:1], [[i, i + 1, 2 * i, i, i] for i in range(3, 15)]):
        logits = logits_of(by_tasks, prompts)
        assert difference(logits, logits_of(one_by_one, prompts)) < 0.03
        assert difference(logits, logits_of(on_cpu, prompts)) < 0.15  # which rounds activations in other groups
    device = EmulatedDevice()
    recorded = tokens(engine_on(model, device, quant=name), greedy(4))
    assert device.graphs
    assert tokens(engine_on(model, EmulatedDevice(), quant=name, eager=True), greedy(4)) == recorded


def test_a_decode_step_has_ten_launches_a_layer_and_six(folder: Path) -> None:
    assert launches_of_a_decode_step(folder) <= 10 * SHAPE["num_hidden_layers"] + 6


def test_steps_that_the_host_has_to_divide_are_launched_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens' pairs are few for five experts, four tokens' are not."""
    expected = tokens(engine_on(folder, None), greedy(4))
    monkeypatch.setattr(CudaDense, "task_rows", FEW_ROWS)  # as of other formats
    monkeypatch.setattr(cuda_mixture, "LEAST_ROWS", 1)
    monkeypatch.setattr(cuda_mixture, "READ_MEANWHILE", 0)
    recorded: list[int] = []
    record = DecodeStep._record
    monkeypatch.setattr(DecodeStep, "_record", lambda self, key, sampler: recorded.append(key[0]) or record(self, key, sampler))
    engine = engine_on(folder, EmulatedDevice())
    assert tokens(engine, greedy(4)) == expected
    assert [tokens(engine, greedy(4), two) for two in (PROMPTS[:2], PROMPTS[2:])] == [expected[:2], expected[2:]]
    assert recorded
    assert max(recorded) == 2


def test_padding_takes_no_expert(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sequences in a step for four."""
    taken: list[int] = []

    def watched(*arguments: Any) -> Any:
        tasks, weights = route(*arguments)
        taken.append(int(tasks.words.view(torch.int32)[:, 16].sum()))
        return tasks, weights

    monkeypatch.setattr(cuda_mixture, "route", watched)
    engine = engine_on(folder, EmulatedDevice(), eager=True)
    for i in range(3):
        engine.add(str(i), [3 + i, 4, 5], greedy(4))
    while engine.has_unfinished():
        engine.step()
    assert taken[-1] == 3 * QWEN["num_experts_per_tok"]


def test_large_tasks_give_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three pairs an expert and more, in steps that are recorded too."""
    expected = tokens(engine_on(folder, None), greedy(4))
    monkeypatch.setattr(cuda_mixture, "LEAST_ROWS", 2)
    monkeypatch.setattr(cuda_mixture, "READ_MEANWHILE", 0)
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(4)) == expected
    large = {kernel for kernel in device.launcher.launched if kernel.stem == "gemm" and reads_tasks(kernel)}
    assert {dict(kernel.constants)["EXPERTS"] for kernel in large} == {1, 2}
    assert device.graphs


@pytest.mark.parametrize("quant", [None, "q8_0"])
def test_deterministic_answers_depend_on_the_request_alone(quant: str | None, folder: Path) -> None:
    depend_on_the_request_alone(folder, quant=quant)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"num_speculative_tokens": 16}], ids=str)
def test_no_answer_waits_for_the_compiler(settings: dict[str, Any], folder: Path) -> None:
    assert kernels_not_rehearsed(folder, **settings) == set()


@pytest.mark.parametrize("name", ["int8", "int8-weight-only"])
def test_nor_do_experts_that_the_host_gives_rows_to(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many that are."""
    monkeypatch.setattr(cuda_mixture, "LEAST_ROWS", 1)
    monkeypatch.setattr(cuda_mixture, "READ_MEANWHILE", 0)
    assert kernels_not_rehearsed(folder, quant=name) == set()


def test_guesses_change_no_token(folder: Path) -> None:
    expected = tokens(engine_on(folder, None), greedy(8))
    assert tokens(engine_on(folder, EmulatedDevice(), num_speculative_tokens=4), greedy(8)) == expected


def test_answers_do_not_depend_on_when_the_device_gets_to_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    expected = serve(engine_on(folder, EmulatedDevice()), 3, tmp_path / "kv")
    with LateDevice() as device:
        assert serve(engine_on(folder, device), 3, tmp_path / "kv") == expected
    assert device.races == []


def mixture(formats: list[str | None], launcher: Emulator, count: int = 0) -> CudaMixture:
    """Of an expert for each format, or of the first as often as count."""
    maker = CudaFormats(launcher, rounds=True, deterministic=False)

    def matrix(name: str | None, rows: int, width: int) -> Any:
        form = None if name is None else parse_format(name)
        return SimpleNamespace(weight=maker.make(form, rows, width, torch.bfloat16), bias=None)

    experts = [
        SimpleNamespace(gate_up=matrix(name, 64, 32), down=matrix(name, 32, 32), activation="silu", held=None)
        for name in formats
    ]
    return CudaMixture(launcher, False, experts * count if count else experts, 1, True)  # type: ignore[arg-type]


def test_only_experts_that_are_alike_have_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mixture, "READ_MEANWHILE", 0)
    launcher = Emulator()
    assert mixture([None] * 3, launcher).most_unread == math.inf
    alike = [["int8"] * 3, ["nf4:group=32"] * 3, ["q8_0"] * 3]
    assert all(mixture(formats, launcher).most_unread == 48 for formats in alike)
    others = [[None, "int8"], ["int8", "q8_0"], ["int4:group=32", "nf4:group=32"], ["int4:group=32", "int4:group=32:zeros"]]
    assert all(mixture(formats, launcher).most_unread == 0 for formats in others)


def test_more_experts_than_the_router_has_registers_for_have_none() -> None:
    assert mixture([None], Emulator(), 512).most_unread == math.inf
    assert mixture([None], Emulator(), 513).most_unread == 0


@pytest.mark.parametrize(("num_bytes", "rows"), [(1_200_000, 666), (4_800_000, 166), (60_000_000, 16)])
def test_tasks_are_small_while_their_reading_is_cheaper_than_launches(
    num_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an expert with matrices of 25 us, by memory of 4 TB/s, as many rows as eight for each of its five launches."""
    monkeypatch.setattr(CudaPacked, "num_bytes", num_bytes / 2)
    assert mixture(["int4:group=32"] * 4, Emulator()).most_unread == 4 * rows
