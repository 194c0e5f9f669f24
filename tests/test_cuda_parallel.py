"""A model that several GPUs compute gives what one gives, to the bit: a process each, on emulated kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Qwen3Config
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config

from emulation.device import EmulatedDevice
from emulation.emulator import emulation_alone
from emulation.late import LateDevice
from engines import engine_for, random_model, run, save
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine import platforms, ranks
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import DoesNotFitError, LostProcessError, UnsupportedError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from rank_server import RankServer
from rwkvs import random_weights, save_folder
from test_cuda_delta import MODELS as DELTA_MODELS
from test_cuda_encoded import made
from test_cuda_engine import PROMPTS, SHAPE, engine_on
from test_cuda_experts import FAMILIES as EXPERTS
from test_cuda_families import OTHERS
from test_cuda_latent import MODELS as LATENT_MODELS
from test_cuda_wkv import SHAPE as RWKV
from test_late_device import serve
from test_step import TEXT as STEP

pytestmark = emulation_alone
PLAIN: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
REQUESTS = [
    (PROMPTS[2], SamplingParams(max_tokens=9, logprobs=3, **PLAIN)),
    (PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=2)),
    (PROMPTS[3], SamplingParams(max_tokens=4, prompt_logprobs=2, **PLAIN)),
    (PROMPTS[1], SamplingParams(temperature=0.7, seed=1, max_tokens=7, ignore_eos=True, presence_penalty=0.5)),
]
FAMILIES: dict[str, Any] = (
    {name: OTHERS[name] for name in ("gemma2", "lfm2", "olmo2", "bloom", "gpt2", "apertus 1.5", "starcoder2")}
    | {name: EXPERTS[name] for name in ("qwen3", "gpt-oss", "laguna", "mimo")}
    | {name: LATENT_MODELS[name] for name in ("deepseek v3", "youtu", "hy 4, all are seen")}
    | DELTA_MODELS
)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    server = RankServer(has_gpu=True)
    yield server
    server.close()


@pytest.fixture
def quick(server: RankServer, monkeypatch: pytest.MonkeyPatch) -> RankServer:
    """The other process is one that is there already."""
    monkeypatch.setattr(ranks, "start_process", server.start)
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = SHAPE | {"hidden_size": 64, "intermediate_size": 256}
    return save(random_model(Qwen3Config(**wide), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def answers(folder: Path, device: EmulatedDevice, requests: list[Any] = REQUESTS, **settings: Any) -> list[Any]:
    engine = engine_on(folder, device, **{"deterministic": True} | settings)
    outputs = run(engine, requests)
    worker = engine._executor
    assert isinstance(worker, Worker)
    worker.close()
    return [([(each.token_ids, each.logprobs) for each in output.outputs], output.prompt_logprobs) for output in outputs]


def gives_the_same(folder: Path, requests: list[Any] = REQUESTS, size: int = 2, **settings: Any) -> EmulatedDevice:
    device = EmulatedDevice()
    together = answers(folder, device, requests, tensor_parallel_size=size, **settings)
    assert together == answers(folder, EmulatedDevice(), requests, **settings)
    assert device.launcher.launches["gather"] > 0
    return device


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, tmp_path: Path, quick: RankServer) -> None:
    assert gives_the_same(save(random_model(FAMILIES[name], dtype=torch.bfloat16), tmp_path)).graphs


def test_rwkvs_rule_is_computed_by_each(tmp_path: Path, quick: RankServer) -> None:
    folder = save_folder(tmp_path / "model", RWKV, random_weights(RWKV), torch.bfloat16, torch_dtype="bfloat16")
    assert gives_the_same(folder).graphs


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_what_an_encoder_has_made(kind: str, tmp_path: Path, quick: RankServer) -> None:
    """Each process attends to its part of it."""
    model = made(kind, tmp_path)
    params = SamplingParams(max_tokens=5, logprobs=0, **PLAIN)
    gives_the_same(model.folder, [(prompt, params) for prompt in model.prompts(engine_on(model.folder, None))])


def test_experts_one_after_another(tmp_path: Path, quick: RankServer) -> None:
    """Where no kernel takes their tasks: Step 3.5's, whose activations are held."""
    config = Step3p7Config(text_config=STEP, vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2})
    gives_the_same(save(random_model(config, dtype=torch.bfloat16, auto=AutoModelForImageTextToText), tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"deterministic": False}, {"eager": True}, {"quant": "fp8", "kv_cache_dtype": "fp8"},
        {"quant": "q8_0", "kv_cache_dtype": "int8"}, {"num_speculative_tokens": 3}, {"num_blocks": 4}, {"max_num_seqs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting(settings: dict[str, Any], folder: Path, quick: RankServer) -> None:
    device = gives_the_same(folder, **settings)
    assert bool(device.graphs) != settings.get("eager", False)


@pytest.mark.parametrize("quant", ["int4:group=32", "int8", "nf4:group=32"])
def test_sums_whose_order_depends_on_the_number_of_outputs(quant: str, folder: Path, quick: RankServer) -> None:
    asked = [(list(range(30, 60)), SamplingParams(max_tokens=1, prompt_logprobs=1, **PLAIN))]

    def likelihoods(size: int) -> list[float]:
        ((_, found),) = answers(folder, EmulatedDevice(), asked, quant=quant, tensor_parallel_size=size)
        return [each.logprob for each in found if each is not None]

    assert likelihoods(2) == pytest.approx(likelihoods(1), abs=0.05)


def test_three_processes(folder: Path, tmp_path: Path, quick: RankServer, server: RankServer) -> None:
    second = RankServer(has_gpu=True)
    starts = iter([server.start, second.start])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "start_process", lambda *args: next(starts)(*args))
        wide = SHAPE | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
        gives_the_same(save(random_model(Qwen3Config(**wide), dtype=torch.bfloat16), tmp_path), size=3)
    second.close()


def test_who_draws_where(folder: Path, quick: RankServer) -> None:
    """On the device, on the device under a mask, and on the host: a step computes them in that order, whatever the plan's."""
    form = Constraint("regex", "[0-9]{2}-[0-9]{2}")
    requests = [
        (PROMPTS[0], SamplingParams(max_tokens=8, repetition_penalty=1.5, penalty_last_n=3, **PLAIN)),
        (PROMPTS[1], SamplingParams(max_tokens=8, temperature=0.0, constraint=form)),
        (PROMPTS[2], SamplingParams(max_tokens=8, **PLAIN)),
        (PROMPTS[3], SamplingParams(max_tokens=8, dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=(), **PLAIN)),
    ]
    gives_the_same(folder, requests)


def test_more_answers_than_seats(folder: Path, quick: RankServer) -> None:
    requests = [(PROMPTS[0], SamplingParams(max_tokens=4, n=5, seed=2, temperature=1.0, ignore_eos=True)), *REQUESTS]
    gives_the_same(folder, requests, max_num_seqs=3)


def test_adapters_that_requests_choose(folder: Path, tmp_path: Path, quick: RankServer) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = {}
    with open_checkpoint(folder) as checkpoint:
        for part in ("self_attn.q_proj", "mlp.down_proj", "self_attn.o_proj", "mlp.up_proj"):
            rows, width = checkpoint.info(f"model.layers.1.{part}.weight").shape
            place = f"base_model.model.model.layers.1.{part}"
            sides[f"{place}.lora_A.weight"] = torch.randn(2, width, generator=generator)
            sides[f"{place}.lora_B.weight"] = 0.2 * torch.randn(rows, 2, generator=generator)
    save_file(sides, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    modules = (Lora("one", str(tmp_path)),)
    requests = [(PROMPTS[0], SamplingParams(max_tokens=6, lora="one", **PLAIN)), *REQUESTS[:1]]
    gives_the_same(folder, requests, lora_modules=modules)


@pytest.mark.parametrize(
    ("seed", "settings"), [(3, {}), (6, {"num_blocks": 5}), (5, {"deterministic": True, "eager": True})]
)  # fmt: skip
def test_whatever_comes_and_goes(
    seed: int, settings: dict[str, Any], folder: Path, tmp_path: Path, quick: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at random, aborted, preempted, embedded, blocks saved and loaded; on a device that does all as late as it may."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    alone = engine_on(folder, EmulatedDevice(), **settings)
    alone._ahead = None
    expected, saved = serve(alone, seed, tmp_path / "one")
    with LateDevice() as device:
        found, together = serve(engine_on(folder, device, tensor_parallel_size=2, **settings), seed, tmp_path / "two")
    assert found == expected
    assert device.races == []
    assert [len(each) for each in together] == [len(each) for each in saved]


# ---- how it ends ----


def worker_on(folder: Path, device: EmulatedDevice, **settings: Any) -> Worker:
    config = EngineConfig(**{"num_blocks": 16, "max_num_seqs": 2, "tensor_parallel_size": 2, "device": "cuda"} | settings)
    with open_checkpoint(folder) as checkpoint:
        return Worker(checkpoint, config, platform=CudaPlatform(config, device))


def test_the_gpu_with_the_least_room_says_how_large_the_cache_is(
    folder: Path, quick: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps half of a block."""
    measured = CudaPlatform.cache_budget
    monkeypatch.setattr(CudaPlatform, "cache_budget", lambda self, *models: min(1 << 20, measured(self, *models)))

    def num_blocks(size: int) -> int:
        worker = worker_on(folder, EmulatedDevice(), num_blocks=None, max_num_seqs=64, tensor_parallel_size=size)
        worker.close()
        return worker.num_blocks

    assert num_blocks(2) == 2 * num_blocks(1) == 128
    shares = ranks.Ranks.least_share
    monkeypatch.setattr(ranks.Ranks, "least_share", lambda self: min(50.5, shares(self)))
    assert num_blocks(2) == 50


def test_near_parts_leave_no_gpu_with_too_little_room(
    quick: RankServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where one has a draft model, too, each block takes more of it than of the others, and each near part does not."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 20}
    shape = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 8192}
    windowed = save(random_model(Qwen3Config(**shape | kinds), dtype=torch.bfloat16), tmp_path / "windowed")
    draft = save(random_model(Qwen3Config(**shape), dtype=torch.bfloat16), tmp_path / "draft")
    room = 1 << 21
    monkeypatch.setattr(CudaPlatform, "cache_budget", lambda self, *models: room)
    monkeypatch.setattr(ranks.Ranks, "least_share", lambda self: room / self._sizes[0].block_bytes)

    def room_taken(**settings: Any) -> tuple[int, int]:
        told = {"num_blocks": None, "max_num_seqs": 2, "max_num_batched_tokens": 64}
        worker = worker_on(windowed, EmulatedDevice(), **told | settings)
        worker.close()
        return sum(taken), worker.near.num_parts

    taken = list[int]()
    make = KVCache.__init__

    def counted(cache: KVCache, *args: Any) -> None:
        make(cache, *args)
        taken.append(sum(side.nbytes for layer in cache.layers for side in layer))

    monkeypatch.setattr(KVCache, "__init__", counted)
    num_bytes, num_parts = room_taken()
    assert num_parts
    assert 0.9 * room < num_bytes <= room
    taken.clear()
    num_bytes, num_parts = room_taken(draft_model=str(draft), num_speculative_tokens=2)
    assert 0.9 * room < num_bytes <= room
    assert not num_parts


def test_a_process_that_is_lost_ends_the_step(folder: Path, quick: RankServer) -> None:
    worker = worker_on(folder, EmulatedDevice())
    assert worker._ranks is not None
    engine = engine_for(worker)
    worker._ranks._others[0]._line.end()
    with pytest.raises(LostProcessError, match="has ended"):
        run(engine, REQUESTS)
    worker.close()


def test_gpus_of_several_kinds_are_refused(folder: Path, quick: RankServer) -> None:
    with pytest.raises(UnsupportedError, match=r"several kinds.*: 8 multiprocessors of capability 9.0; 4 multiprocessors of"):
        worker_on(folder, EmulatedDevice(num_multiprocessors=8))


def test_weights_in_the_machines_memory_are_refused(folder: Path, quick: RankServer) -> None:
    for settings in ({"n_gpu_layers": 1}, {"n_cpu_moe": 1}):
        with pytest.raises(UnsupportedError, match="of a model that several GPUs compute"):
            worker_on(folder, EmulatedDevice(), **settings)
    worker_on(folder, EmulatedDevice(), n_gpu_layers=99).close()  # all on the GPUs, as many type it


def test_weights_that_do_not_fit_are_not_put_elsewhere(folder: Path, quick: RankServer) -> None:
    with pytest.raises(DoesNotFitError, match="of the GPU's memory"):
        worker_on(folder, EmulatedDevice(free=1 << 20))


@pytest.mark.parametrize(
    ("device", "count", "found"),
    [
        ("cpu", 4, "cpu"), ("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cuda", 3, "cuda:0"), ("cuda:1", 3, "cuda:1"),
        ("auto", 1, "2 processes compute on a GPU each, from cuda:0 on: no device cuda:1"),
        ("cuda:2", 3, "2 processes compute on a GPU each, from cuda:2 on: no device cuda:3"),
        ("cuda", 0, "from cuda:0 on: no device cuda:0"),
    ],
)  # fmt: skip
def test_which_gpus(device: str, count: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(index: int) -> UnsupportedError | None:
        return UnsupportedError(f"no device cuda:{index}") if index >= count else None

    monkeypatch.setattr(platforms, "why_unavailable", reason)
    config = EngineConfig(device=device, tensor_parallel_size=2)
    if found.startswith(("cpu", "cuda")):
        assert platforms.resolved_device(config) == found
        assert ranks.gpu_of(EngineConfig(device="cuda:1"), 2) == "cuda:3"
    else:
        with pytest.raises(UnsupportedError, match=found):
            platforms.resolved_device(config)
