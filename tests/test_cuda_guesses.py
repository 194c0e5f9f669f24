"""Speculation by looking up on a GPU: the same answers, in fewer steps, of which those with guesses are recorded, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice
from engines import greedy, random_model, run, save
from nanovllm_cli.engine import decode_work
from nanovllm_cli.engine.assistant import AssistantDraft
from nanovllm_cli.engine.eagle import EagleDraft
from nanovllm_cli.engine.plan import Plan, Scheduled
from nanovllm_cli.engine.strategy import MOST_ROWS, Drafted, Lookup, Pace
from nanovllm_cli.sampling_params import SamplingParams
from test_assistant import pair, sure_pair
from test_cuda_engine import SHAPE, engine_on
from test_eagle import pair as eagle_pair
from test_lookup import ASKED, PROMPT, answers, broken_off_once, few
from test_mtp import sure_model

pytestmark = needs_emulation
SETTINGS = {"max_num_seqs": 3, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def short(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens)


KINDS = [(PROMPT[: 7 + 4 * (i % 5)], short(params, 16 + i)) for i, params in enumerate(ASKED.values())]
FEW_KINDS = KINDS[::3]


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[Any], int]:
    """Answers, and in how many steps."""
    engine = engine_on(folder, EmulatedDevice(), deterministic=True, **SETTINGS)
    return answers(engine, KINDS), engine.stats().steps


@pytest.mark.parametrize(
    "more",
    [{}, {"max_num_batched_tokens": 7, "num_speculative_tokens": 4}, {"num_blocks": 6, "max_num_batched_tokens": 13}],
    ids=["roomy", "small steps", "few blocks"],
)
def test_a_deterministic_gpu_gives_the_same_to_the_bit(more: dict[str, Any], folder: Path, plain: tuple[list[Any], int]) -> None:
    """Guesses beside chunks of prompts, constraints and draws on the host; with blocks so few that sequences lose theirs."""
    engine = engine_on(folder, EmulatedDevice(), **SETTINGS | {"deterministic": True, "num_speculative_tokens": 8} | more)
    assert answers(engine, KINDS) == plain[0]
    assert engine.stats().used_blocks == 0
    assert (engine.stats().preemptions > 0) == ("num_blocks" in more)
    assert more or engine.stats().steps < plain[1]


@pytest.mark.parametrize(
    ("params", "draws"),
    [({"temperature": 0.0}, 1), ({}, 2), ({"logprobs": 0}, 3), ({"temperature": 0.0, "presence_penalty": 1e-9}, 9)],
    ids=["greedy", "random", "logprobs", "penalty"],
)
def test_a_step_with_guesses_is_one_graph_and_draws_at_once_what_it_can(
    params: dict[str, Any], draws: int, folder: Path
) -> None:
    """With a penalty each draw waits for the one before it."""
    device = EmulatedDevice()
    engine = engine_on(folder, device, num_speculative_tokens=8, **SETTINGS)
    engine.add("a", PROMPT, few(allowed_token_ids=(49,), max_tokens=90, **params))
    while engine.stats().steps < 9:
        engine.step()
    graphs, before = len(device.graphs), device.launcher.num_launches
    answered = engine.stats().generated_tokens
    engine.step()
    assert engine.stats().generated_tokens - answered == 9, "eight guesses, and a token behind them"
    assert len(device.graphs) == graphs
    assert device.launcher.num_launches - before == len(device.graphs[-1].launches) + draws


@pytest.mark.parametrize("name", ["greedy", "filtered", "schema"])
def test_without_determinism_the_cpus_tokens_all_the_same(name: str, folder: Path) -> None:
    """Where no near-tie is decided by other kernels' rounding."""
    asked = [(PROMPT, short(ASKED[name], 30)), (PROMPT[:9], short(ASKED[name], 20))]
    settings = SETTINGS | ({"max_num_seqs": MOST_ROWS + 1} if name == "filtered" else {})
    found = answers(engine_on(folder, EmulatedDevice(), num_speculative_tokens=8, **settings), asked)
    assert [each[0] for each in found] == [each[0] for each in answers(engine_on(folder, None, **SETTINGS), asked)]


@pytest.mark.parametrize(
    "more",
    [{}, {"max_num_batched_tokens": 7, "num_speculative_tokens": 4}, {"num_blocks": 6}],
    ids=["roomy", "small steps", "few blocks"],
)
def test_a_draft_model_changes_nothing_but_the_steps(more: dict[str, Any], folder: Path, plain: tuple[list[Any], int]) -> None:
    """Here the model drafts for itself, so that its guesses hold."""
    device = EmulatedDevice()
    drafting = {"deterministic": True, "draft_model": str(folder), "draft_min_p": 0.0}
    engine = engine_on(folder, device, **SETTINGS | drafting | more)
    assert answers(engine, KINDS) == plain[0]
    assert engine.stats().used_blocks == 0
    (output,) = run(engine, [(PROMPT[:5], replace(ASKED["greedy"], allowed_token_ids=None, max_tokens=19))])
    assert output.metrics.num_guessed_tokens == output.metrics.num_held_tokens >= 12
    assert device.graphs


def test_a_layer_of_the_models_own_changes_nothing_but_the_steps(tmp_path: Path) -> None:
    """One that is right as long as it is fed what it is to be fed; weights are rounded, so that near-ties may fall otherwise."""
    folder = sure_model(tmp_path, "qwen3.5", torch.bfloat16)
    asked = [(PROMPT[: 7 + 4 * i], short(ASKED[name], 24)) for i, name in enumerate(("greedy", "penalties", "schema", "several"))]
    settings = SETTINGS | {"deterministic": True}
    plain = answers(engine_on(folder, EmulatedDevice(), **settings), asked)
    device = EmulatedDevice()
    engine = engine_on(folder, device, **settings, mtp=True, draft_min_p=0.0)
    assert answers(engine, asked) == plain
    (output,) = run(engine, [(PROMPT[:5], replace(ASKED["greedy"], allowed_token_ids=None, max_tokens=40))])
    assert 22 < output.metrics.num_held_tokens <= output.metrics.num_guessed_tokens
    assert output.metrics.num_held_tokens > 0.9 * output.metrics.num_guessed_tokens
    assert len(device.graphs) > 3


def test_an_assistant_changes_nothing_but_the_steps(tmp_path: Path) -> None:
    saved = sure_pair(tmp_path, torch.bfloat16)
    asked = [(PROMPT[: 7 + 4 * i], short(ASKED[name], 24)) for i, name in enumerate(("greedy", "penalties", "schema", "several"))]
    settings = SETTINGS | {"deterministic": True}
    plain = answers(engine_on(saved.folder, EmulatedDevice(), **settings), asked)
    device = EmulatedDevice()
    engine = engine_on(saved.folder, device, **settings, draft_model=str(saved.draft), draft_min_p=0.0)
    assert answers(engine, asked) == plain
    (output,) = run(engine, [(PROMPT[:5], replace(ASKED["greedy"], allowed_token_ids=None, max_tokens=40))])
    assert 22 < output.metrics.num_held_tokens <= output.metrics.num_guessed_tokens
    assert output.metrics.num_held_tokens > 0.9 * output.metrics.num_guessed_tokens
    assert len(device.graphs) > 3


@pytest.mark.parametrize("kind", [AssistantDraft, EagleDraft])
def test_a_drafter_reads_there_what_it_reads_on_a_cpu(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows = {"fc_norm": True, "norm_output": True}
    saved: Any = eagle_pair(tmp_path, "gemma3, ropes of two bases", dtype=torch.bfloat16, **of_rows)
    if kind is AssistantDraft:
        saved = pair("layers read others' keys", tmp_path, dtype=torch.bfloat16)
    found: list[list[int]] = []
    fill = kind.fill

    def spying(draft: Any, plan: Plan) -> Any:
        filled, guesses = fill(draft, plan)
        found.extend(guesses.values())
        return filled, guesses

    monkeypatch.setattr(kind, "fill", spying)
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Drafted, "begin_sequence", lambda _: Pace(2))
    params = greedy(24, allowed_token_ids=(2,))  # so that both read the same whatever near-ties they see
    firsts, devices = [], (EmulatedDevice(), None)
    for device in devices:
        settings = SETTINGS | {"draft_model": str(saved.draft), "draft_min_p": 0.0}
        run(engine_on(saved.folder, device, **settings), [([i % 6 for i in range(29)], params)])
        firsts.append([guesses[0] for guesses in found])
        found.clear()
    assert len(firsts[0]) == len(firsts[1]) > 7
    assert sum(one == other for one, other in zip(*firsts, strict=True)) >= 0.8 * len(firsts[0])
    assert devices[0].graphs


def test_what_does_not_fit_a_recorded_step_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(PROMPT, short(ASKED["greedy"], 25)), (PROMPT[:9], short(ASKED["logprobs"], 15))]
    settings = SETTINGS | {"deterministic": True, "num_speculative_tokens": 8}
    expected = answers(engine_on(folder, EmulatedDevice(), **settings), asked)
    assert answers(engine_on(folder, EmulatedDevice(), eager=True, **settings), asked) == expected
    device = EmulatedDevice()
    engine = engine_on(folder, device, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(decode_work, "LEAST_ITEMS", 1 << 20)
        assert answers(engine, asked) == expected
    assert not device.graphs
    monkeypatch.setattr("nanovllm_cli.engine.decode_step.MOST_ROWS", 4)
    assert answers(engine_on(folder, EmulatedDevice(), **settings), asked) == expected


def test_a_late_device_draws_the_same(folder: Path) -> None:
    asked = [(PROMPT, short(ASKED[name], 20)) for name in ("greedy", "penalties", "schema")]
    settings = SETTINGS | {"deterministic": True, "num_speculative_tokens": 8}
    expected = answers(engine_on(folder, EmulatedDevice(), **settings), asked)
    with LateDevice() as device:
        assert answers(engine_on(folder, device, **settings), asked) == expected
    assert device.races == []


@pytest.mark.parametrize("more", [{"kv_cache_dtype": "fp8"}, {}], ids=["fp8 cache", "angles by the length"])
def test_other_caches_and_angles(more: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    if not more:
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = Qwen3Config(**SHAPE | {"max_position_embeddings": 16, "rope_parameters": scaling})
        folder = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    asked = [(PROMPT[:9], short(ASKED["greedy"], 20)), (PROMPT[:7], short(ASKED["logprobs"], 9))]
    settings = SETTINGS | {"deterministic": True} | more
    expected = answers(engine_on(folder, EmulatedDevice(), **settings), asked)
    assert answers(engine_on(folder, EmulatedDevice(), num_speculative_tokens=8, **settings), asked) == expected


@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_is_broken_off_behind_a_guess_has_drawn_nothing(
    after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither here nor there: of these some draw at once, some row by row, some under a mask, some on the host."""
    asked = [(PROMPT, short(ASKED[name], 24)) for name in ("greedy", "dry", "bias", "schema", "logprobs")]
    asked.append((PROMPT, few(frequency_penalty=0.2, max_tokens=24)))
    settings = SETTINGS | {"deterministic": True, "max_num_seqs": 6}
    expected = answers(engine_on(folder, EmulatedDevice(), **settings), asked)
    left = broken_off_once(monkeypatch, after)
    assert answers(engine_on(folder, EmulatedDevice(), num_speculative_tokens=8, **settings), asked) == expected
    assert not left


@pytest.mark.parametrize("on_gpu", [False, True])
def test_who_enters_behind_cached_blocks_guesses_nothing_in_that_step(
    on_gpu: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once, each with one token left: with guesses of their own the step would have more rows than there is room for."""
    prompt = (PROMPT * 4)[:65]
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_speculative_tokens": 8}
    engine = engine_on(folder, EmulatedDevice() if on_gpu else None, **settings)
    run(engine, [(prompt, few(max_tokens=1))])
    begin, plans = Lookup.begin, list[list[Scheduled]]()

    def counted(self: Lookup, num_decodes: int) -> None:  # the plan is filled behind it
        plans.append(engine._scheduler._scheduled)
        begin(self, num_decodes)

    monkeypatch.setattr(Lookup, "begin", counted)
    asked = [(prompt, few(max_tokens=9, temperature=0.0)) for _ in range(10)]
    answered = run(engine, asked)
    assert [each.metrics.num_cached_tokens for each in answered] == [64] * 10
    assert max(sum(len(share.token_ids) for share in plan) for plan in plans) <= MOST_ROWS
