"""Near parts on a GPU, by emulated kernels: layers with a window keep what is within reach alone, and no answer knows of it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Llama4TextConfig, Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, poison_what_is_out_of_reach, random_model, run, save
from nanovllm_cli.attention.reach import near_reach
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.memory import Near
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.sampling_params import SamplingParams
from test_cuda_engine import SHAPE, engine_on
from test_cuda_vision import CONFIGS, prompt_of

pytestmark = needs_emulation
REACH, STEP = 20, 32
LONG = SHAPE | {"max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    windows = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": REACH}
    return save(random_model(Qwen3Config(**LONG | windows), dtype=torch.bfloat16), tmp_path_factory.mktemp("windowed"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return poison_what_is_out_of_reach(monkeypatch)


def worker_of(engine: Engine) -> Worker:
    worker = engine._executor
    assert isinstance(worker, Worker)
    return worker


def with_parts(folder: Path, device: EmulatedDevice, *, context: int = 256, answers: int = 2, **settings: Any) -> Engine:
    """As many near parts as so many answers never wait for each other with."""
    told = {"max_num_batched_tokens": STEP, "max_num_seqs": answers, "deterministic": True}
    plain = worker_of(engine_on(folder, EmulatedDevice(), **told | settings))
    near_of_it = Near(plain.near_bytes, near_reach(plain.spec.mixers), (told | settings)["max_num_batched_tokens"])
    room = context // 16 * answers * (plain.block_bytes - plain.near_bytes)
    room += near_of_it.needed(16, answers, 1000) * plain.near_bytes
    sizes = {"num_blocks": None, "kv_cache_bytes": room, "max_model_len": context}
    engine = engine_on(folder, device, **told | settings | sizes)
    worker = worker_of(engine)
    assert 0 < worker.near.num_parts < worker.num_blocks
    assert worker.kv_bytes <= room
    return engine


def told(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in run(engine, requests)]


def asked(count: int, **params: Any) -> list[tuple[list[int], SamplingParams]]:
    return [
        ([(i * i + n) % 509 for i in range(150 + 30 * n)], SamplingParams(max_tokens=40, ignore_eos=True, **params))
        for n in range(count)
    ]


GREEDY = {"temperature": 0.0, "logprobs": 1}


@pytest.mark.parametrize(
    "settings", [{}, {"eager": True}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}, {"deterministic": False}], ids=str
)
def test_tokens_are_those_of_a_cache_that_keeps_all(settings: dict[str, Any], folder: Path, poisoned: list[int]) -> None:
    device = EmulatedDevice()
    engine = with_parts(folder, device, **settings)
    expected = told(engine_on(folder, EmulatedDevice(), max_num_batched_tokens=STEP, max_num_seqs=2,
                              **{"deterministic": True} | settings), asked(2, **GREEDY))  # fmt: skip
    assert told(engine, asked(2, **GREEDY)) == expected
    assert bool(device.graphs) is ("eager" not in settings)
    assert max(poisoned) >= 4


def test_answers_that_begin_in_one_block_get_parts_of_their_own(folder: Path, poisoned: list[int]) -> None:
    """Three of a prompt that ends within a block; again when its beginning can be found, and beside another."""
    requests = asked(2, temperature=1.0, n=3, seed=4)
    plain = engine_on(folder, EmulatedDevice(), max_num_batched_tokens=STEP, deterministic=True)
    expected = told(plain, requests[:1]) + told(plain, requests[1:])
    engine = with_parts(folder, EmulatedDevice(), answers=4)
    assert told(engine, requests) == expected
    assert told(engine, requests) == expected
    assert not engine._blocks.near._holders


def test_steps_are_begun_before_the_last_ones_tokens_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in which a sequence takes a block and a part."""
    engine = with_parts(folder, EmulatedDevice())
    planned = []
    plan_ahead = engine._scheduler.plan_ahead
    monkeypatch.setattr(engine._scheduler, "plan_ahead", lambda: planned.append(plan_ahead()) or planned[-1])
    run(engine, asked(1, temperature=0.0))
    assert sum(plan is None for plan in planned) == 5, "behind four pieces of the prompt, and at the end"
    assert len({len(plan.scheduled[0].block_table) for plan in planned if plan is not None}) >= 3


def test_guesses_are_taken_back(folder: Path, poisoned: list[int]) -> None:
    requests = [(ids[:60] * 3, params) for ids, params in asked(2, **GREEDY)]
    expected = told(engine_on(folder, EmulatedDevice(), max_num_batched_tokens=STEP, deterministic=True), requests)
    engine = with_parts(folder, EmulatedDevice(), num_speculative_tokens=4)
    assert told(engine, requests) == expected
    assert max(poisoned) >= 4


def test_chunks_are_found_in_parts(tmp_path: Path, poisoned: list[int]) -> None:
    """Llama 4: two layers of three see no further than 64 tokens."""
    config = Llama4TextConfig(
        **SMALL | {"intermediate_size": 64, "hidden_size": 64, "head_dim": 64, "num_attention_heads": 2},
        num_local_experts=2, attention_chunk_size=64, floor_scale=30, no_rope_layers=[1, 0, 1],
    )  # fmt: skip
    folder = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    requests = [(ids * 2, params) for ids, params in asked(1, **GREEDY)]
    expected = told(engine_on(folder, EmulatedDevice(), max_num_batched_tokens=STEP, deterministic=True), requests)
    assert told(with_parts(folder, EmulatedDevice(), context=400, answers=1), requests) == expected
    assert max(poisoned) >= 8


def test_images_are_seen_whole_in_parts(tmp_path: Path, poisoned: list[int]) -> None:
    """Gemma 3: tokens of an image see those behind them in layers with a window, too."""
    config = deepcopy(CONFIGS["gemma3"])
    config.text_config.max_position_embeddings = 512
    folder = save(random_model(config, seed=3, dtype=torch.bfloat16, auto=AutoModelForImageTextToText), tmp_path)
    plain = engine_on(folder, EmulatedDevice(), max_num_batched_tokens=STEP, deterministic=True)
    sight = worker_of(plain).sight
    assert sight is not None
    requests = [(prompt_of(sight.senses.vision, first, 20), SamplingParams(max_tokens=8, **GREEDY)) for first in (5, 150)]
    expected = told(plain, requests)
    assert told(with_parts(folder, EmulatedDevice()), requests) == expected
    assert max(poisoned) >= 4


def test_saved_kv_comes_back(folder: Path, poisoned: list[int], tmp_path: Path) -> None:
    (prompt, params), _ = asked(2, **GREEDY)
    first = with_parts(folder, EmulatedDevice())
    ((answer, _),), = told(first, [(prompt, params)])
    longer = [*prompt, *answer, 5]
    assert first.kv_files.save(tmp_path / "kv", "me", longer) == 176
    second = with_parts(folder, EmulatedDevice())
    assert second.kv_files.load(tmp_path / "kv", "me") == 176
    (found,) = run(second, [(longer, params)])
    assert found.metrics.num_cached_tokens == 176
    ((expected, _),), = told(first, [(longer, params)])
    assert found.outputs[0].token_ids == expected
