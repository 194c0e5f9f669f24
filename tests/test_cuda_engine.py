"""The GPU's engine on emulated kernels: the same answers as the CPU's, recorded or not, ahead or not."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli import LLM
from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.batch import Batch
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.engine import decode_work, platforms
from nanovllm_cli.engine import worker as workers
from nanovllm_cli.engine.checked_images import Seeing
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import DoesNotFitError, LostDeviceError, RequestError, UnsupportedError
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.prefill_attention import prefill_tiles
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader

pytestmark = needs_emulation
SHAPE = SMALL | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 64,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
BYTES = [bytes([i]) for i in range(256)]
PROMPTS = [[3, 4, 5], [7], list(range(20, 41)), [100, 101, 102, 103]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def forks_and_found_prefixes(folder: Path, max_tokens: int) -> Engine:
    """Three answers to a prompt begin in one block, or state; the step ahead may have written a token too far into it. The engine
    that gave, twice, what each prompt gives alone."""
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=max_tokens, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[2], list(range(60, 100))]
    expected = []
    for prompt in prompts:
        (output,) = run(engine_on(folder, EmulatedDevice(), deterministic=True), [(prompt, params)])
        expected.append([each.token_ids for each in output.outputs])
    engine = engine_on(folder, EmulatedDevice(), deterministic=True)
    for _ in range(2):
        outputs = run(engine, [(prompt, params) for prompt in prompts])
        assert [[each.token_ids for each in output.outputs] for output in outputs] == expected
    assert outputs[2].metrics.num_cached_tokens == 32
    return engine


def engine_on(folder: Path, device: EmulatedDevice | None, **settings: Any) -> Engine:
    """On the CPU where device is None, on a machine with a GPU too."""
    defaults = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "dtype": "bfloat16"}
    config = EngineConfig(**defaults | settings | ({"device": "cpu"} if device is None else {}))
    platform = None if device is None else CudaPlatform(config, device)
    with open_checkpoint(folder) as checkpoint:
        worker = Worker(checkpoint, config, lambda text: list(text.encode()), lambda: BYTES, platform=platform)
    return Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, ahead=worker.ahead, prepare=worker.prepare,
        seeing=worker.sight and Seeing(worker.sight.senses, None, None, worker.spec.prompt_work),
    )  # fmt: skip


def tokens(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in run(engine, [(prompt, params) for prompt in prompts])]


def recorded_tokens(folder: Path, count: int = 6) -> list[tuple[int, ...]]:
    """Greedy ones of a GPU that records steps, which are those of one that does not."""
    recorded = EmulatedDevice()
    answers = tokens(engine_on(folder, recorded), greedy(count))
    assert recorded.graphs
    assert tokens(engine_on(folder, EmulatedDevice(), eager=True), greedy(count)) == answers
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    return tokens(engine_on(folder, None), greedy(8))


def test_greedy_tokens_are_those_of_the_cpu(folder: Path, expected: list[tuple[int, ...]]) -> None:
    device = EmulatedDevice()
    assert tokens(engine_on(folder, device), greedy(8)) == expected
    assert device.graphs


@pytest.mark.parametrize("more", [{}, {"deterministic": True, "num_blocks": 4}], ids=str)
def test_a_cache_of_int8_gives_the_cpus_tokens(more: dict[str, Any], folder: Path) -> None:
    """Each token and head has a scale of its own on both; a block is as large as on a CPU, and its scales move with it."""
    device = EmulatedDevice()
    on_cpu, engine = (engine_on(folder, on, kv_cache_dtype="int8", **more) for on in (None, device))
    prompts = [PROMPTS[0], PROMPTS[1], list(range(60, 81)), PROMPTS[3]]
    assert tokens(engine, greedy(8), prompts) == tokens(on_cpu, greedy(8), prompts)
    assert device.graphs
    worker = engine._executor
    assert worker.block_bytes == on_cpu._executor.block_bytes == 2 * 2 * 2 * 16 * (64 + 4)
    kept = bytes(worker.read_blocks([1], [1]))
    worker.write_blocks([2], [2], memoryview(bytearray(kept)))
    assert bytes(worker.read_blocks([2], [2])) == kept


def test_seeded_tokens_are_those_of_the_cpu(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=6, repetition_penalty=1.2)
    assert tokens(engine_on(folder, EmulatedDevice()), params) == tokens(engine_on(folder, None), params)


def test_eager_steps_and_failed_captures_give_the_same(
    folder: Path, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    eager = EmulatedDevice()
    assert tokens(engine_on(folder, eager, eager=True), greedy(8)) == expected
    assert not eager.graphs
    failing = EmulatedDevice(capture_fails=True)
    assert tokens(engine_on(folder, failing), greedy(8)) == expected
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        "the decode step could not be recorded and runs without graphs: no memory for a graph"
    ]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_lost_gpu_is_told_and_blames_no_request(ahead: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's engine process ends over it, and is started again: every call of CUDA's fails from then on."""

    def lost(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = EmulatedDevice()
    engine = engine_on(folder, device, eager=True, num_speculative_tokens=0 if ahead else 2)
    engine.add("a", PROMPTS[0], greedy(8))
    engine.step()
    monkeypatch.setattr(device.launcher, "launch", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(device, "check", lambda: CudaDevice.check(device))
    with pytest.raises(LostDeviceError, match="does nothing more for this process: CUDA error: an illegal memory"):
        run(engine, [(PROMPTS[1], greedy(8))])


def test_angles_that_depend_on_the_length_are_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = Qwen3Config(**SHAPE | {"max_position_embeddings": 16, "rope_parameters": scaling})
    model = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    device = EmulatedDevice()
    assert tokens(engine_on(model, device), greedy(4), PROMPTS[:2]) == tokens(engine_on(model, None), greedy(4), PROMPTS[:2])
    assert not device.graphs
    assert not caplog.records


def launches_of_a_decode_step(folder: Path) -> int:
    """In one that is replayed."""
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    engine.add("a", [3, 4, 5], greedy(20))
    for _ in range(4):
        engine.step()
    before = device.launcher.num_launches
    engine.step()
    assert len(device.graphs) == 1
    assert device.launcher.num_launches - before == len(device.graphs[0].launches)
    return len(device.graphs[0].launches)


def test_a_decode_step_has_five_launches_a_layer_and_six(folder: Path) -> None:
    assert launches_of_a_decode_step(folder) <= 5 * SHAPE["num_hidden_layers"] + 6


def test_a_bucket_has_one_graph_whoever_is_in_it(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    for prompts in (PROMPTS[:3], PROMPTS[1:], PROMPTS):
        tokens(engine, greedy(4), prompts)
    assert len(device.graphs) == 2, "three and four sequences share one; the longest prompt's last tokens come alone"


def test_more_rows_than_gemv_takes(folder: Path) -> None:
    prompts = [[i, i + 1, 2 * i] for i in range(3, 14)]
    device = EmulatedDevice()
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 64}
    assert tokens(engine_on(folder, device, **settings), greedy(5), prompts) == tokens(
        engine_on(folder, None, **settings), greedy(5), prompts
    )
    assert device.graphs


def test_what_the_device_cannot_draw_is_drawn_on_the_host(folder: Path) -> None:
    mixed = [
        (PROMPTS[0], greedy(6, repetition_penalty=1.5, penalty_last_n=3)),
        (PROMPTS[1], greedy(7)),
        (PROMPTS[2], greedy(5, dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=())),
        (PROMPTS[3], SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=4)),
    ]
    found = [
        [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in run(engine_on(folder, device), mixed)]
        for device in (None, EmulatedDevice())
    ]
    assert found[0] == found[1]


def test_answers_that_the_host_draws_leave_steps_recorded(folder: Path) -> None:
    """One request for JSON in a batch must not take the graphs from all the others."""
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    form = Constraint("regex", "[0-9]{30}")
    for name, params in (("here", SamplingParams(max_tokens=20, seed=1, constraint=form)), ("there", greedy(20))):
        engine.add(name, PROMPTS[0], params)
    for _ in range(6):
        engine.step()
    graphs, launches = len(device.graphs), device.launcher.num_launches
    engine.step()
    assert device.launcher.num_launches - launches == len(device.graphs[-1].launches)
    assert len(device.graphs) == graphs


FORM = Constraint("regex", "[0-9]{2}-[0-9]{2}")
FILTERED = SamplingParams(temperature=1.5, top_k=30, top_p=0.95, seed=4, max_tokens=12)


def answers_under_constraints(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    outputs = [answer for output in run(engine, asked) for answer in output.outputs]
    return [(each.token_ids, each.finish_reason, each.error) for each in outputs]


@pytest.mark.parametrize("settings", [{}, {"eager": True}, {"deterministic": True}])
def test_constraints_are_followed_by_whoever_draws(folder: Path, settings: dict[str, Any]) -> None:
    """Greedy and filtered draws on the device, one without filters on the host, and free ones beside them."""
    asked = (
        (PROMPTS[0], SamplingParams(constraint=FORM, seed=1)),
        (PROMPTS[1], greedy(7)),
        (PROMPTS[2], greedy(9, constraint=FORM, repetition_penalty=1.3)),
        (PROMPTS[3], replace(FILTERED, constraint=FORM)),
        (PROMPTS[0], replace(FILTERED, constraint=FORM, seed=5, allowed_token_ids=tuple(b"-13579"))),
        (PROMPTS[1], replace(FILTERED, constraint=FORM, n=3, logit_bias={ord("7"): 3.0})),
    )
    device = EmulatedDevice()
    found = answers_under_constraints(engine_on(folder, device, **settings), list(asked))
    assert found == answers_under_constraints(engine_on(folder, None), list(asked))
    for index in (0, 2, 3, 4, 5, 6, 7):
        token_ids, reason, _ = found[index]
        assert re.fullmatch(FORM.text.encode(), bytes(token_ids)), index
        assert reason == "stop"
    assert set(found[4][0]) <= set(b"-13579")


def test_the_next_step_is_under_way_while_a_mask_is_made(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    engine.add("a", [3, 4, 5], greedy(12, constraint=Constraint("regex", "[0-9]{6}")))
    under_way = []
    while engine.has_unfinished():
        engine.step()
        under_way.append(engine._stepper._flight is not None)
    assert under_way == [True] * 6, "that the last digit is the last is known when the step behind it has begun"


def test_a_masked_draw_is_two_launches_behind_a_recorded_step(folder: Path) -> None:
    device = EmulatedDevice()
    engine = engine_on(folder, device)
    engine.add("guided", PROMPTS[0], replace(FILTERED, constraint=Constraint("regex", "[0-9]{30}"), max_tokens=30))
    engine.add("free", PROMPTS[0], greedy(30))
    for _ in range(6):
        engine.step()
    graphs, launches = len(device.graphs), device.launcher.num_launches
    engine.step()
    assert device.launcher.num_launches - launches == len(device.graphs[-1].launches) + 2
    assert len(device.graphs) == graphs


def test_reasoning_ends_by_its_budget_on_a_device(folder: Path) -> None:
    phase = ReasoningPhase("<t>", "</t>", starts_inside=True, budget=3)
    asked = [
        (PROMPTS[0], greedy(16, reasoning=phase)),
        (PROMPTS[1], replace(FILTERED, reasoning=phase, constraint=FORM, max_tokens=20)),
        (PROMPTS[2], SamplingParams(temperature=0.1, reasoning=phase, seed=3, max_tokens=9)),
    ]
    found = answers_under_constraints(engine_on(folder, EmulatedDevice()), asked)
    assert found == answers_under_constraints(engine_on(folder, None), asked)
    assert all(token_ids[3:7] == tuple(b"</t>") for token_ids, _, _ in found)
    assert re.fullmatch(FORM.text.encode(), bytes(found[1][0][7:]))


@pytest.mark.parametrize(("name", "call", "drawn"), [("__init__", 0, 0), ("allowed_mask", 1, 1), ("accept", 2, 2)])
def test_a_constraint_that_fails_ends_its_own_answer(
    name: str, call: int, drawn: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it begins, where its mask is made, and where it is told what was drawn; others in the step go on."""
    asked = [(PROMPTS[0], greedy(5, constraint=FORM)), (PROMPTS[1], greedy(5)), (PROMPTS[2], greedy(5, constraint=FORM))]
    whole = answers_under_constraints(engine_on(folder, EmulatedDevice()), asked)
    working = getattr(Guide, name)
    calls: dict[int, int] = {}

    def fails(guide: Guide, *args: Any) -> Any:
        count = calls[id(guide)] = calls.get(id(guide), -1) + 1
        if id(guide) == next(iter(calls)) and count == call:
            raise RequestError("it gave up")
        return working(guide, *args)

    monkeypatch.setattr(Guide, name, fails)
    found = answers_under_constraints(engine_on(folder, EmulatedDevice()), asked)
    assert found[0] == (whole[0][0][:drawn], "error", "it gave up")
    assert found[1:] == whole[1:]


def test_a_constraint_that_cannot_be_met_says_so(folder: Path) -> None:
    asked = [(PROMPTS[0], greedy(5, constraint=FORM, allowed_token_ids=(200, 201))), (PROMPTS[1], greedy(5, constraint=FORM))]
    found = answers_under_constraints(engine_on(folder, EmulatedDevice()), asked)
    assert found == answers_under_constraints(engine_on(folder, None), asked)
    assert found[0][1] == "error"


@pytest.mark.parametrize("device", [EmulatedDevice, lambda: None], ids=["gpu", "cpu"])
def test_that_no_token_is_left_is_what_was_asked_for_and_that_numbers_are_none_is_not(
    device: Callable[[], EmulatedDevice | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(folder, device())
    (unmeetable,) = run(engine, [(PROMPTS[0], greedy(5, constraint=FORM, allowed_token_ids=(200, 201)))])
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda model, hidden: logits(model, hidden).fill_(float("nan")))
    (broken,) = run(engine, [(PROMPTS[0], greedy(5))])
    errors = [(output.outputs[0].error, output.outputs[0].unmeetable) for output in (unmeetable, broken)]
    assert [unmeetable for _, unmeetable in errors] == [True, False]
    assert "no token is left" in str(errors[0][0])
    assert "not finite" in str(errors[1][0])


def test_guided_answers_outlive_preemption_and_want_more_seats_than_there_are(folder: Path) -> None:
    """Slots are written anew in the middle of an answer. The seed lies away from near-ties, which bf16's rounding
    may decide otherwise on either device."""
    form = Constraint("regex", "([0-9]{2}-){9}")
    asked = replace(FILTERED, seed=9, constraint=form, n=6, max_tokens=30)
    wanted = [(PROMPTS[2], asked), (PROMPTS[0], greedy(30, constraint=form))]
    settings = {"num_blocks": 7, "block_size": 16}
    outputs = run(engine_on(folder, EmulatedDevice(), **settings), wanted)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    found = [answer.token_ids for output in outputs for answer in output.outputs]
    assert found == [each[0] for each in answers_under_constraints(engine_on(folder, None, **settings), wanted)]
    assert all(re.fullmatch(form.text.encode(), bytes(token_ids)) for token_ids in found)


def test_logprobs_are_those_of_the_cpu(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=5)
    ours, theirs = (
        run(engine_on(folder, device), [(PROMPTS[2], params), (PROMPTS[0], greedy(5))]) for device in (EmulatedDevice(), None)
    )
    assert [found[1].outputs[0].logprobs for found in (ours, theirs)] == [None, None], "nobody asked for them"
    ours, theirs = (found[0].outputs[0].logprobs for found in (ours, theirs))
    assert ours is not None
    assert theirs is not None
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
        assert mine.logprob == pytest.approx(other.logprob, abs=0.05), "bf16 steps apart"
        assert mine.top[0][0] == other.top[0][0]
        tops = [[logprob for _, logprob in each.top] for each in (mine, other)]
        assert tops[0] == pytest.approx(tops[1], abs=0.05)


def test_several_answers_to_a_prompt_and_preemption(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=30, ignore_eos=True)
    wanted = [(PROMPTS[2], params), (PROMPTS[0], params)]

    def answers(engine: Engine) -> list[list[tuple[int, ...]]]:
        return [[answer.token_ids for answer in output.outputs] for output in run(engine, wanted)]

    pressed = engine_on(folder, EmulatedDevice(), num_blocks=6, deterministic=True)
    assert answers(pressed) == answers(engine_on(folder, EmulatedDevice(), deterministic=True))
    assert pressed.stats().preemptions > 0
    assert pressed.stats().used_blocks == 0


def test_more_answers_to_a_prompt_than_seats(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=5, max_tokens=4, ignore_eos=True)

    def answers(seats: int) -> list[tuple[int, ...]]:
        (output,) = run(engine_on(folder, EmulatedDevice(), max_num_seqs=seats, deterministic=True), [(PROMPTS[0], params)])
        return [answer.token_ids for answer in output.outputs]

    assert answers(2) == answers(5)


def test_beams_find_the_same_beside_drawn_answers(folder: Path) -> None:
    """Each of a search's sequences is told what it has drawn already."""
    asked = [(PROMPTS[2], SamplingParams(num_beams=3, n=3, max_tokens=6, ignore_eos=True)), (PROMPTS[0], greedy(9))]
    (cpu,) = run(engine_on(folder, None), asked[:1])
    (alone,) = run(engine_on(folder, EmulatedDevice(), deterministic=True), asked[:1])
    assert alone.outputs[0].token_ids == cpu.outputs[0].token_ids
    engine = engine_on(folder, EmulatedDevice(), deterministic=True)
    for _ in range(2):
        assert [each.token_ids for each in run(engine, asked)[0].outputs] == [each.token_ids for each in alone.outputs]
    assert engine.stats().prefix_hit_tokens > 0


def test_a_closed_engine_holds_no_memory_of_the_device(folder: Path) -> None:
    engine = engine_on(folder, EmulatedDevice())
    tokens(engine, greedy(2), PROMPTS[:1])
    runner = weakref.ref(engine._executor.runner)
    engine.close()
    gc.collect()
    assert runner() is None


def kernels_not_rehearsed(folder: Path, **settings: Any) -> set[str]:
    """Of prompts, chunks of any length and any number of answers; but a copied block's, which is small and seldom."""
    device = EmulatedDevice()
    engine = engine_on(folder, device, max_num_seqs=9, max_num_batched_tokens=45, **settings)
    asked = [
        (PROMPTS[0], replace(FILTERED, constraint=FORM)), (PROMPTS[3], greedy(4, logprobs=2, repetition_penalty=1.2)),
        (PROMPTS[2], replace(FILTERED, n=7, max_tokens=4)), (PROMPTS[1], greedy(9)), ([5] * 44, greedy(2)), ([6] * 33, greedy(2)),
        ([9] * 50, greedy(2)),
    ]  # fmt: skip
    run(engine, asked)
    assert device.launcher.launched
    return {str(kernel) for kernel in device.launcher.launched - device.launcher.rehearsed if kernel.stem != "blocks"}


@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_dtype": "fp8"}, {"deterministic": True}, {"num_speculative_tokens": 16}], ids=str
)
def test_no_answer_waits_for_the_compiler(settings: dict[str, Any], folder: Path) -> None:
    assert kernels_not_rehearsed(folder, **settings) == set()


def test_a_step_is_under_way_while_the_last_one_is_read(folder: Path) -> None:
    engine = engine_on(folder, EmulatedDevice())
    engine.add("a", [3, 4, 5], greedy(6))
    under_way = []
    while engine.has_unfinished():
        engine.step()
        under_way.append(engine._stepper._flight is not None)
    assert under_way == [True] * 5 + [False]


def depend_on_the_request_alone(folder: Path, **more: Any) -> None:
    """Tokens and logprobs of a deterministic engine."""
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=5)

    def answers(prompts: list[list[int]], **settings: Any) -> list[Any]:
        engine = engine_on(folder, EmulatedDevice(), deterministic=True, **more, **settings)
        return [output.outputs[0].logprobs for output in run(engine, [(prompt, params) for prompt in prompts])]

    together = answers(PROMPTS)
    assert [answers([prompt])[0] for prompt in PROMPTS] == together
    assert answers(PROMPTS, max_num_batched_tokens=7) == together
    assert answers(PROMPTS[::-1], num_blocks=4)[::-1] == together


def test_deterministic_answers_depend_on_the_request_alone(folder: Path) -> None:
    depend_on_the_request_alone(folder)


def test_deterministic_steps_are_recorded_by_the_room_that_their_attention_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window and without have items of their own. A sequence grows into another split of its keys; two at once have
    more items then than there may be room for, and are not recorded any longer."""
    monkeypatch.setitem(prefill_tiles.__kwdefaults__, "split_keys", 64)
    monkeypatch.setattr("nanovllm_cli.kernels.prefill_attention.MIN_SPLIT_KEYS", 64)
    monkeypatch.setattr(decode_work, "LEAST_ITEMS", 1)
    monkeypatch.setattr(decode_work, "SCRATCH_BYTES", 0)
    windows = {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}
    config = Qwen3Config(**SHAPE | {"max_position_embeddings": 192} | windows)
    folder = save(random_model(config, dtype=torch.bfloat16), tmp_path)
    long, short = list(range(3, 126)), [7]
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=10, ignore_eos=True)

    def answers(device: EmulatedDevice, prompts: list[list[int]], **settings: Any) -> list[Any]:
        engine = engine_on(folder, device, deterministic=True, **{"max_num_seqs": 2, "max_num_batched_tokens": 64} | settings)
        return [output.outputs[0].logprobs for output in run(engine, [(prompt, params) for prompt in prompts])]

    alone, beside, crowded = (EmulatedDevice(num_multiprocessors=32) for _ in range(3))
    expected = answers(EmulatedDevice(num_multiprocessors=32), [long, short], eager=True)
    assert answers(alone, [long]) == expected[:1]
    # Prompts in one step, so that there are no graphs of other numbers of rows.
    assert answers(beside, [short, short], max_num_batched_tokens=256) == expected[1:] * 2
    assert answers(crowded, [long, long], max_num_batched_tokens=256) == expected[:1] * 2
    assert [len(device.graphs) for device in (alone, beside, crowded)] == [2, 1, 1], "alone of two items, then of three"


def test_whole_prompts_on_hopper_go_to_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaAttention, "long_prompt", 3)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    hopper, ampere = EmulatedDevice(capability=90), EmulatedDevice(capability=80)
    settings = {"max_num_batched_tokens": 64}
    engine = engine_on(folder, hopper, **settings)
    warm = hopper.launcher.launches["prefill_attention"]
    assert warm == SHAPE["num_hidden_layers"], "chunks are to come"
    found = tokens(engine, greedy(4), prompts)
    assert found == tokens(engine_on(folder, ampere, **settings), greedy(4), prompts)
    assert hopper.launcher.launches["prefill_attention"] == warm
    assert ampere.launcher.launches["prefill_attention"] > 2 * warm


def test_a_short_context_in_large_blocks(folder: Path) -> None:
    """One token a sequence, drawn on the host: a step that is no decode step but has its attention."""
    params = greedy(3, repetition_penalty=1.5, penalty_last_n=3)
    large = tokens(engine_on(folder, EmulatedDevice(), block_size=64, max_model_len=64, num_blocks=8), params, PROMPTS[:2])
    assert large == tokens(engine_on(folder, EmulatedDevice()), params, PROMPTS[:2])


def test_an_fp8_cache_and_half_precision_answer_close_by(folder: Path, expected: list[tuple[int, ...]]) -> None:
    half = tokens(engine_on(folder, EmulatedDevice(), dtype="float16"), greedy(3))
    eight = tokens(engine_on(folder, EmulatedDevice(), kv_cache_dtype="fp8"), greedy(3))
    same = [sum(a[:3] == b for a, b in zip(expected, other, strict=True)) for other in (half, eight)]
    assert min(same) >= 2, "random weights: near-ties are common"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "float32 is not computed on a GPU"),
        ({"activations": "rounded"}, "a GPU rounds activations of int8, fp8"),
        ({"block_size": 8}, "a KV cache with blocks of 8 tokens on a GPU"),
    ],
)
def test_what_a_gpu_does_not_do_is_said(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        engine_on(folder, EmulatedDevice(), **settings)


def test_old_gpus_compute_in_half_precision(folder: Path) -> None:
    turing = EmulatedDevice(capability=75)
    with pytest.raises(UnsupportedError, match="no bfloat16"):
        engine_on(folder, turing)
    with open_checkpoint(folder) as checkpoint:
        config = EngineConfig(num_blocks=16, max_num_seqs=2)
        assert Worker(checkpoint, config, platform=CudaPlatform(config, turing)).dtype == torch.float16


@pytest.mark.parametrize(("order", "dtype"), [("pre", torch.float16), ("sandwich", torch.bfloat16)])
def test_what_outgrows_half_precision_is_computed_in_another(order: Any, dtype: torch.dtype, folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        spec = read_spec(checkpoint, open_reader(checkpoint)).in_order(order)
    assert CudaPlatform(EngineConfig(), EmulatedDevice()).resolve_dtype({"F16"}, spec) == dtype
    assert CudaPlatform(EngineConfig(dtype="float16"), EmulatedDevice()).resolve_dtype({"BF16"}, spec) == torch.float16
    assert CudaPlatform(EngineConfig(), EmulatedDevice(capability=75)).resolve_dtype({"F16"}, spec) == torch.float16


def test_a_cache_is_sized_by_what_is_left(folder: Path) -> None:
    def blocks(free: int, share: float = 0.5) -> int:
        config = EngineConfig(
            max_num_seqs=64, dtype="bfloat16", gpu_memory_utilization=share, max_num_batched_tokens=32
        )
        with open_checkpoint(folder) as checkpoint:
            return Worker(checkpoint, config, platform=CudaPlatform(config, EmulatedDevice(free=free))).num_blocks

    assert blocks(1 << 30) == 64 * 8, "no more than all sequences need"
    assert 0 < blocks((512 << 20) + (10 << 20)) < 64 * 8
    with pytest.raises(DoesNotFitError, match="no room for the KV cache"):
        blocks(1 << 30, 0.25)


def test_prompts_that_fill_a_step_together_are_measured_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is as long as a step."""
    sizes, prepare = [], Decoder.prepare

    def noted(model: Decoder, batch: Batch) -> StepInputs:
        sizes.append(batch.num_tokens)
        return prepare(model, batch)

    monkeypatch.setattr(Decoder, "prepare", noted)
    engine = engine_on(folder, EmulatedDevice(), max_model_len=10, max_num_batched_tokens=40)
    measured = max(sizes)
    sizes.clear()
    tokens(engine, greedy(1), [[i] * 9 for i in range(4)])
    assert max(sizes) == 36 <= measured == 40


def test_the_bundled_model_tells_the_same_story(monkeypatch: pytest.MonkeyPatch) -> None:
    def stories(device: str) -> list[str]:
        llm = LLM("tiny", config=EngineConfig(device=device, max_model_len=128, max_num_seqs=4, num_blocks=32))
        outputs = llm.generate(["Once upon a time", "One day a"], SamplingParams(temperature=0.0, max_tokens=12))
        return [output.outputs[0].text for output in outputs]

    expected = stories("cpu")
    device = EmulatedDevice()
    monkeypatch.setattr(workers, "select_platform", lambda config, progress: CudaPlatform(config, device, progress))
    assert stories("cuda") == expected
    assert device.graphs


class Notes(NullProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.mark.parametrize(("settings", "said"), [
    ({"threads": 2}, ["threads is for CPUs, and changes nothing on a GPU"]),
    ({"gpu_memory_utilization": 0.5, "eager": True, "programmatic_launch": False}, []),
    ({"gpu_memory_utilization": 0.5, "kv_cache_bytes": 1 << 20}, ["gpu-memory-utilization changes nothing: the KV cache has"]),
])  # fmt: skip
def test_what_changes_nothing_on_a_gpu_is_said(
    settings: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "why_unavailable", lambda index: None)
    monkeypatch.setattr(platforms, "CudaDevice", lambda *_: EmulatedDevice())
    progress = Notes()
    assert isinstance(platforms.select_platform(EngineConfig(device="cuda", **settings), progress), CudaPlatform)
    assert [note[: len(line)] for note, line in zip(progress.notes, said, strict=True)] == said


@pytest.mark.parametrize("has_driver", [True, False])
def test_auto_says_why_a_gpu_that_is_there_is_not_used(has_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "why_unavailable", lambda index: UnsupportedError("no CuPy", "install it"))
    monkeypatch.setattr(platforms, "has_driver", lambda: has_driver)
    progress = Notes()
    assert isinstance(platforms.select_platform(EngineConfig(), progress), CpuPlatform)
    assert progress.notes == (["the GPU is not used: no CuPy (install it)"] if has_driver else [])
    with pytest.raises(UnsupportedError, match="no CuPy"):
        platforms.select_platform(EngineConfig(device="cuda"), progress)
