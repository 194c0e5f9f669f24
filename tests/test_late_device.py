"""The GPU's engine on a device that does everything as late as it may (emulation/late.py): the same answers, to the bit of their
logprobs, as on one that has done it when a call returns. What is planted here, only the late one notices."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from emulation.late import LateDevice, LateEvent
from engines import greedy, random_model, save
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.attention.cuda_blocks import CudaBlocks
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine import device_sampler
from nanovllm_cli.engine.decode_tables import Tables
from nanovllm_cli.engine.device_sampler import DeviceSampler
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels import blocks, sampling_table
from nanovllm_cli.sampling_params import SamplingParams
from test_cuda_engine import SHAPE, engine_on

pytestmark = needs_emulation
DIGITS, DATE = Constraint("regex", "[0-9]{9}"), Constraint("regex", "[0-9]{2}-[0-9]{2}")
BEGINNING = list(range(60, 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(Qwen3Config(**SHAPE), dtype=torch.bfloat16), tmp_path_factory.mktemp("model"))


def filtered(seed: int, max_tokens: int = 9, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=seed, max_tokens=max_tokens, **options)


def kinds(seed: int) -> list[SamplingParams]:
    """On the device, under a mask, on the host; some end when nobody expects it."""
    ends = tuple(range(0, SHAPE["vocab_size"], 9))
    return [
        greedy(12),
        greedy(20, frequency_penalty=1.5),
        filtered(seed, 14, ignore_eos=True),
        filtered(seed, 40, stop_token_ids=ends),
        filtered(seed, 40, stop_token_ids=ends, n=3),
        greedy(9, constraint=DIGITS),
        filtered(seed, 12, constraint=DATE, n=2),
        filtered(seed, 6, logprobs=3),
        filtered(seed, 3, logprobs=1, prompt_logprobs=1),
        greedy(6, repetition_penalty=1.5, penalty_last_n=3),
        SamplingParams(max_tokens=7, seed=seed, constraint=DATE),
    ]


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> None:
    """Its constraint is compiled before: when that is done is no part of what is compared."""
    if engine._prepare is not None and (prepared := engine._prepare(params)) is not None:
        prepared.result()
    engine.add(name, prompt, params)


Answers = dict[str, list[Any]]


def serve(engine: Engine, seed: int, file: Path) -> tuple[Answers, list[bytes]]:
    """What is said to requests that come, end and are aborted at random, and what was saved of the cache meanwhile."""
    r = random.Random(seed)
    answers: Answers = {}
    saved: list[bytes] = []

    def step() -> None:
        for output in engine.step():
            answers[output.request_id] = [
                output.prompt_logprobs, output.metrics.num_preemptions, output.metrics.num_cached_tokens,
                *((each.token_ids, each.logprobs, each.finish_reason, each.error) for each in output.outputs),
            ]  # fmt: skip

    for i in range(11):
        prompt = BEGINNING[: r.choice((0, 0, 16, 33))] + [r.randrange(2, 513) for _ in range(r.randint(1, 12))]
        if i % 5 == 4:
            engine.embed(str(i), prompt, "mean")
        else:
            ask(engine, str(i), prompt, r.choice(kinds(i)))
        for _ in range(r.choice((0, 0, 1, 4, 9))):
            step()
        if r.random() < 0.2:
            engine.abort(str(r.randint(0, i)))
        if r.random() < 0.4 and engine.kv_files.save(file, "me", BEGINNING):
            saved.append(file.read_bytes())
            engine.kv_files.load(file, "me")
    while engine.has_unfinished():
        step()
    assert engine.stats().used_blocks == 0
    return answers, saved


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("seed", "settings"),
    [(3, {}), (6, {"num_blocks": 5}), (6, {"num_blocks": 5, "eager": True}), (5, {"deterministic": True}),
     (1, {"max_num_seqs": 9, "max_num_batched_tokens": 64})],
)  # fmt: skip
def test_answers_do_not_depend_on_when_the_device_gets_to_it(
    seed: int, settings: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaAttention, "long_prompt", 20)
    expected = serve(engine_on(folder, EmulatedDevice(), **settings), seed, tmp_path / "kv")
    with LateDevice() as device:
        found = serve(engine_on(folder, device, **settings), seed, tmp_path / "kv")
    assert found == expected
    assert device.races == []
    answers, saved = expected
    assert saved
    assert any(cached for _, _, cached, *_ in answers.values())
    assert any(preempted for _, preempted, *_ in answers.values()) == ("num_blocks" in settings)


def decode(engine: Engine) -> list[Any]:
    """Steps that run ahead while sequences come, end, take another block and follow a form."""
    ask(engine, "a", BEGINNING[:14], greedy(20))
    ask(engine, "b", [7], filtered(1, 8, ignore_eos=True))
    ask(engine, "c", [8], greedy(12, constraint=DIGITS))
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            done[output.request_id] = output.outputs
        if "b" in done and "d" not in done:
            done["d"] = None
            ask(engine, "d", [9] * 15, filtered(2, 8, ignore_eos=True))
    return sorted(done.items())


@pytest.fixture(scope="module")
def decoded(folder: Path) -> list[Any]:
    return decode(engine_on(folder, EmulatedDevice()))


def noticed(folder: Path, work: Callable[[Engine], object], expected: object, *, only_late: bool = True) -> bool:
    """Whether the late device gives other answers, or tells of a race. only_late: the one that does all at once does not."""
    assert not only_late or work(engine_on(folder, EmulatedDevice())) == expected
    with LateDevice() as device:
        try:
            return work(engine_on(folder, device)) != expected or device.races != []
        except Exception:
            return True


def saves(file: Path) -> Callable[[Engine], object]:
    def work(engine: Engine) -> bytes:
        engine.add("a", BEGINNING, greedy(2))
        while engine.has_unfinished():
            engine.step()
        engine.kv_files.save(file, "me", BEGINNING)
        return file.read_bytes()

    return work


def test_nothing_is_noticed_where_nothing_is_planted(folder: Path, decoded: list[Any]) -> None:
    assert not noticed(folder, decode, decoded)


def test_one_readout_for_all_steps_is_noticed(folder: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "STEPS_IN_FLIGHT", 1)
    assert noticed(folder, decode, decoded, only_late=False)


def test_tokens_that_are_read_too_early_are_noticed(folder: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEvent, "synchronize", lambda event: None)
    assert noticed(folder, decode, decoded)


def test_host_memory_that_is_written_too_early_is_noticed(
    folder: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uploads, "take", lambda uploads: uploads._turns[-1][0])
    assert noticed(folder, decode, decoded)


def test_block_tables_that_are_copied_from_where_they_are_kept_are_noticed(
    folder: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload(mine: Tables, tables: list[list[int]]) -> None:
        kept, _ = mine._uploads._turns[0]
        rows = kept[: mine.there.numel()].view_as(mine.there)
        for row, table in enumerate(tables):
            rows[row, : len(table)] = torch.tensor(table)
        mine.there.copy_(rows, non_blocking=True)

    monkeypatch.setattr(Tables, "upload", upload)
    assert noticed(folder, decode, decoded)


def test_slots_that_are_written_from_one_place_are_noticed(
    folder: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = DeviceSampler.__init__

    def init(sampler: DeviceSampler, device: Any, *args: Any) -> None:
        make(sampler, device, *args)
        place = device.host_buffer(1 << 16, torch.uint8)

        def fill(target: torch.Tensor, values: Any) -> None:
            source = place[: values.nbytes].view(target.dtype)
            source.copy_(torch.from_numpy(values))
            target[:, : len(values)].copy_(source, non_blocking=True)

        monkeypatch.setattr(sampling_table, "_fill", fill)

    monkeypatch.setattr(DeviceSampler, "__init__", init)
    assert noticed(folder, decode, decoded)


def test_saved_blocks_that_nobody_waited_for_are_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = saves(tmp_path / "kv")
    expected = work(engine_on(folder, EmulatedDevice()))
    assert not noticed(folder, work, expected)

    def take_out(mover: CudaBlocks, which: list[int]) -> torch.Tensor:
        staging = torch.empty(len(which), mover._regions.staged_bytes, dtype=torch.uint8, device=mover._launcher.device)
        blocks.gather_blocks(mover._launcher, mover._regions, which, staging)
        return staging.to("cpu", non_blocking=True)

    monkeypatch.setattr(CudaBlocks, "take_out", take_out)
    assert noticed(folder, work, expected)


def test_host_memory_is_written_anew_when_its_copy_is_done() -> None:
    """Also behind steps that were interrupted, whose tokens nobody waited for."""
    with LateDevice() as device:
        uploads = Uploads(device, 4, torch.int64)
        targets = [torch.zeros(4, dtype=torch.int64, device=device.launcher.device) for _ in range(5)]
        for value, target in enumerate(targets):
            uploads.copy(uploads.take().fill_(value), target)
        assert device.stream.queue, "nobody waits for the last"
        assert [target.tolist() for target in targets] == [[value] * 4 for value in range(5)]
    assert not device.races


@pytest.mark.parametrize("device_class", [EmulatedDevice, LateDevice])
@pytest.mark.parametrize("every", [4, 7])
def test_a_step_that_is_broken_off_draws_nothing(
    every: int, device_class: type[EmulatedDevice], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the host waits: who goes on draws the same tokens, with the same penalties, along the same form."""
    expected, _ = answers_when_interrupted(folder, EmulatedDevice(), 0, monkeypatch)
    device = device_class()
    with device if isinstance(device, LateDevice) else contextlib.nullcontext():
        found, count = answers_when_interrupted(folder, device, every, monkeypatch)
    assert count == 6
    assert found == expected


def answers_when_interrupted(
    folder: Path, device: EmulatedDevice, every: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Answers, int]:
    """Answers, and how many waits were broken off: one in so many, the first few."""
    engine, waits, broken_off = engine_on(folder, device), itertools.count(1), 0
    event_class = type(device.event())
    synchronize = event_class.synchronize

    def wait(event: Any) -> None:
        nonlocal broken_off
        if every and broken_off < 6 and next(waits) % every == 0:
            broken_off += 1
            raise KeyboardInterrupt
        synchronize(event)

    for name, prompt, params in (
        ("seeded", [3, 4, 5], filtered(5, 12, ignore_eos=True)),
        ("penalties", [7], greedy(14, frequency_penalty=1.5)),
        ("form", list(range(20, 41)), filtered(6, 12, constraint=DIGITS)),
        ("logprobs", [100, 101, 102, 103], greedy(9, logprobs=2)),
    ):
        ask(engine, name, prompt, params)
    answers: Answers = {}
    with monkeypatch.context() as patch:
        patch.setattr(event_class, "synchronize", wait)
        while engine.has_unfinished():
            with contextlib.suppress(KeyboardInterrupt):
                answers |= {output.request_id: [*output.outputs[0].token_ids] for output in engine.step()}
    assert engine.stats().used_blocks == 0
    return answers, broken_off


# The device itself.


def test_what_is_queued_runs_up_to_the_event_that_is_waited_for() -> None:
    with LateDevice() as device:
        there, first, second = torch.ones(3, device=device.launcher.device), *(device.host_buffer(3, torch.float32) for _ in "ab")
        first.copy_(there, non_blocking=True)
        event = device.event()
        event.synchronize()
        assert first.isnan().all(), "it has not been recorded"
        event.record()
        second.copy_(there.add_(1), non_blocking=True)
        event.synchronize()
        assert first.tolist() == [1.0] * 3
        assert second.isnan().all()
        assert there.cpu().tolist() == second.tolist() == [2.0] * 3


def test_two_copies_to_one_place_leave_nothing_to_read_before_the_second_is_done() -> None:
    with LateDevice() as device:
        there, host = torch.ones(3, device=device.launcher.device), device.host_buffer(3, torch.float32)
        events = [device.event(), device.event()]
        for event in events:
            host.copy_(there.add_(1), non_blocking=True)
            event.record()
        events[0].synchronize()
        assert host.isnan().all()
        events[1].synchronize()
        assert host.tolist() == [3.0] * 3


def test_pinned_memory_is_read_when_it_is_copied_and_other_memory_at_once() -> None:
    with LateDevice() as device:
        where = device.launcher.device
        pinned, plain = device.host_buffer(3, torch.int32), torch.zeros(3, dtype=torch.int32)
        there = [host.to(where, non_blocking=True) for host in (pinned, plain)]
        pinned += 1
        plain += 1
        assert [each.tolist() for each in there] == [[1] * 3, [0] * 3]
        assert len(device.races) == 1


def test_a_replay_keeps_what_was_bound_and_reads_what_is_there() -> None:
    with LateDevice() as device:
        given, scalar = [torch.ones(3, device=device.launcher.device)], 2.0
        graph, product = device.capture(lambda: given[0] * scalar)
        scalar = 3.0
        given[0].fill_(5.0)
        assert product.isnan().all().item(), "nothing runs while it is recorded"
        graph.replay()
        given[0].fill_(7.0)
        assert product.tolist() == [10.0] * 3
        other, _ = device.capture(lambda: given[0] + 1)
        graph.replay()
        other.replay()
        assert product.isnan().all().item(), "the other one's memory is the same"
        given.clear()
        with pytest.raises(AssertionError, match="given back"):
            graph.replay()


def test_a_recorded_copy_reads_what_is_there_when_it_is_replayed() -> None:
    with LateDevice() as device:
        pinned = device.host_buffer(3, torch.float32)
        graph, there = device.capture(lambda: pinned.to(device.launcher.device, non_blocking=True))
        for value in (1.0, 2.0):
            pinned.fill_(value)
            graph.replay()
            assert there.tolist() == [value] * 3
    assert not device.races


def test_what_a_capture_cannot_hold_ends_it() -> None:
    with LateDevice() as device:
        there, event = torch.ones(3, device=device.launcher.device), device.event()
        steps: list[Callable[[], object]] = [
            there.cpu, there.tolist, event.record, event.synchronize, lambda: there.copy_(torch.ones(3), non_blocking=True),
        ]  # fmt: skip
        for step in steps:
            with pytest.raises(RuntimeError, match="while a graph is recorded"):
                device.capture(step)


def test_tensors_of_host_and_device_do_not_meet() -> None:
    with LateDevice() as device, LateDevice() as other:
        there = torch.ones(3, device=device.launcher.device)
        for stranger in (torch.ones(3), torch.ones(3, device=other.launcher.device)):
            with pytest.raises(RuntimeError, match="on the host and on the device"):
                there + stranger
        assert (there + torch.tensor(1.0)).tolist() == [2.0] * 3
        assert there[[0, 2]].tolist() == [1.0] * 2
    with pytest.raises(RuntimeError, match="outside"):
        there + 1
