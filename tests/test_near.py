"""Near parts: layers with a window keep what is within reach alone, and no answer knows of it."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from engines import SMALL, engine_for, poison_what_is_out_of_reach, random_model, run, save, worker_for
from fake_model import drain, make_engine
from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import KVCache, near_bytes
from nanovllm_cli.attention.reach import near_reach
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine import near
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.memory import CacheSize, Near, near_of, size_cache
from nanovllm_cli.engine.near import NearParts, NearRoom
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.sampling_params import SamplingParams
from test_vision import an_image, opened, prompt_with

SIZE = 4


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are short here."""
    monkeypatch.setattr(near, "TILE", SIZE)
    monkeypatch.setattr(near, "SLACK", 0)


def asked(r: random.Random, told: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """A prompt, which may begin as another one, or go on from its answer."""
    before = r.choice(told) if told and r.random() < 0.6 else []
    ids = before[: r.randint(0, len(before))] + [r.randrange(90) for _ in range(r.randint(1, 60))]
    if r.random() < 0.2:
        return ids[:140], SamplingParams(num_beams=r.choice((2, 3, 5)), n=r.choice((1, 2)), max_tokens=r.randint(1, 20))
    params = SamplingParams(
        temperature=r.choice((0.0, 1.0)), seed=r.randrange(99), max_tokens=r.randint(1, 50), n=r.choice((1, 1, 1, 2, 3)),
        prompt_logprobs=r.choice((None, None, None, 0)),
    )  # fmt: skip
    return ids[:140], params


def check_accounts(engine: Engine) -> None:
    """Every part is held by those who say so, idle or free, and of one block at most; every block is held by those who say so."""
    blocks, parts, steps = engine._blocks, engine._blocks.near, engine._scheduler._steps
    holders, references = Counter[int](), Counter[int]()
    for each in engine._scheduler.running:
        held = range(each.near_start, each.near_end)
        assert [each.near_table[i] for i in held] == [parts._parts[each.block_table[i]] for i in held]
        holders.update(each.block_table[i] for i in held)
        references.update(each.block_table)
    pinned = [copy.source for step in steps for copy in step.copies]
    holders.update(pinned)
    references.update(pinned)
    assert holders == parts._holders
    assert references == {block: count for block, count in enumerate(blocks._references) if count}
    assert sorted(parts._parts) == sorted([*parts._holders, *parts._idle])
    assert sorted([*parts._parts.values(), *parts._free]) == list(range(parts.num_parts))


class BrokenOffError(BaseException):
    """Whoever waited for a step doesn't any more."""


@pytest.mark.parametrize("seed", range(30))
def test_nobody_lacks_a_part_within_reach_and_there_are_never_more(short: None, seed: int) -> None:
    """Whatever fails, is broken off, aborted, preempted, guessed or run ahead."""
    r = random.Random(seed)
    reach, tokens, ahead, fails = r.choice((3, 8, 21)), r.choice((2, 9, 40)), r.random() < 0.3, r.random() < 0.4
    settings: dict[str, Any] = {
        "num_blocks": r.choice((60, 90, 400)), "max_num_batched_tokens": tokens, "max_num_seqs": r.choice((3, 5, 20)),
        "num_speculative_tokens": 0 if ahead else r.choice((0, 4)), "policy": r.choice(("fcfs", "priority")),
    }  # fmt: skip
    room = NearRoom(Near(1, reach, tokens).least(SIZE) + r.choice((0, 3, 30)), reach)
    engine, model = make_engine(near=room, ahead=ahead, **settings)
    plain, plain_model = make_engine(**settings | {"num_blocks": 400})
    model.repeats = plain_model.repeats = r.random() < 0.5
    told, outputs, requests = list[list[int]](), dict[str, Any](), dict[str, tuple[list[int], SamplingParams]]()

    def fail(plan: Plan) -> None:
        if fails and r.random() < 0.03:
            raise r.choice((BrokenOffError, ValueError))

    model.before = model.midway = fail

    def step() -> None:
        with contextlib.suppress(BrokenOffError):
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
                    told.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
        check_accounts(engine)

    for number in range(25):
        name = str(number)
        requests[name] = asked(r, told)
        engine.add(name, *requests[name], priority=r.randint(-2, 2) if settings["policy"] == "priority" else 0)
        for _ in range(r.randint(0, 25)):
            step()
        if r.random() < 0.1:
            engine.abort(gone := r.choice(list(requests)))
            check_accounts(engine)
            requests.pop(gone)
            outputs.pop(gone, None)
    while engine.has_unfinished():
        step()
    assert not model.violations
    assert not engine._blocks.near._holders, "who has ended holds nothing"
    for name, (ids, params) in requests.items():
        plain.add(name, ids, params)
        (expected,) = drain(plain).values()
        for found, answer in zip(outputs[name].outputs, expected.outputs, strict=True):
            assert found.token_ids == answer.token_ids or (fails and found.finish_reason == "error")


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_parts_behind_a_long_step_are_there_for_others(short: None, steps: int) -> None:
    """Those that a prompt saw before its last step, and sees no more, before anybody makes way for somebody else."""
    engine, model = make_engine(near=NearRoom(15, 8), max_num_batched_tokens=40, num_blocks=400)
    engine.add("talks", list(range(8)), SamplingParams(temperature=1.0, seed=1, max_tokens=60, n=2))
    for _ in range(steps):
        engine.step()
    engine.add("reads", list(range(50, 90)) * 3, SamplingParams(temperature=0.0, max_tokens=9))
    drain(engine)
    assert not model.violations
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_long_answer_holds_no_more_than_it_sees(short: None, ahead: bool) -> None:
    engine, model = make_engine(near=NearRoom(30, 8), ahead=ahead, num_blocks=400)
    engine.add("long", [2] * 8, SamplingParams(temperature=0.0, max_tokens=100))
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append(len(engine._blocks.near._holders))
    assert max(held) == 3 + ahead  # blocks that 8 tokens may lie in, and that of the step that runs ahead
    assert not model.violations


@pytest.mark.parametrize("ahead", [False, True])
def test_who_lacks_parts_is_asked_again_when_there_are_more(short: None, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whenever others let go of one and take the next: each time costs a walk along a prompt, and a step that runs ahead."""
    asked = list[bool]()
    admit = BlockManager.admit
    monkeypatch.setattr(BlockManager, "admit", lambda *args, **told: asked.append(admit(*args, **told)) or asked[-1])
    engine, model = make_engine(near=NearRoom(15, 8), ahead=ahead, max_num_batched_tokens=40, num_blocks=400)
    for i in range(6):
        engine.add(str(i), [i] * (6 + i), SamplingParams(temperature=0.0, max_tokens=100))
    outputs = drain(engine)
    assert [len(each.outputs[0].token_ids) for each in outputs.values()] == [100] * 6
    assert sum(asked) == 6
    assert 1 <= asked.count(False) <= 6
    assert not model.violations


def sequence(*blocks: int) -> Sequence:
    request = Request("r", (), SamplingParams(), 100, (), 0.0)
    return Sequence(1, request, 0, 0, [0] * SIZE * len(blocks), block_table=list(blocks))


def test_whose_part_is_taken_and_what_comes_back(short: None) -> None:
    parts = NearParts(NearRoom(2, 4), SIZE)
    parts.hold(first := sequence(10, 11), 8)
    assert sorted(first.near_table) == [0, 1]
    of_10, of_11 = first.near_table
    parts.release(first)
    assert first.near_table == []
    parts.hold(second := sequence(12), 4)  # in the place of the one that was let go of first
    assert parts.parts_of([10, 11, 12]) == [of_10, -1, of_11]
    parts.release(second)
    parts.hold(third := sequence(10), 4)
    assert third.near_table == [of_10]
    assert parts.num_available == 1


def test_what_is_of_no_use_goes_first(short: None) -> None:
    parts = NearParts(NearRoom(3, 4), SIZE)
    for block in (10, 11, 12):
        parts.hold(each := sequence(block), 4)
        parts.release(each)
    parts.forget(12)
    parts.forget(13)  # which has none
    parts.hold(sequence(14), 4)
    assert [parts.has(block) for block in (10, 11, 12)] == [True, True, False]
    parts.hold(sequence(15), 4)
    assert [parts.has(block) for block in (10, 11)] == [False, True]


def test_what_is_copied_from_is_nobodys_until_it_has_been(short: None) -> None:
    parts = NearParts(NearRoom(3, 4), SIZE)
    parts.hold(parent := sequence(10), 2)
    child = sequence(10)
    child.token_ids, child.num_computed = child.token_ids[:2], 2
    parts.fork(parent, child)
    parts.release(parent)
    child.block_table = [11]
    source, target = parts.swap(child, 0, 10)
    assert child.near_table == [target] != [source]
    assert parts.num_available == 1
    parts.unpin(10)
    assert parts.num_available == 2
    parts.release(child)
    assert parts.parts_of([10, 11]) == [source, target]


def test_what_is_filled_from_outside_takes_the_place_of_what_is_idle(short: None) -> None:
    parts = NearParts(NearRoom(2, 4), SIZE)
    for block in (10, 11, 12):
        parts.fill(block, is_whole=True)
    assert parts.parts_of([10])[0] < 0
    assert sorted(parts.parts_of([11, 12])) == [0, 1]
    parts.fill(12, is_whole=False)
    parts.hold(held := sequence(13, 14), 8)
    assert parts.parts_of([11, 12]) == [-1, -1]
    parts.fill(15, is_whole=True)  # all are held
    assert parts.parts_of([13, 14, 15]) == [*held.near_table, -1]
    whole = NearParts(NearRoom(), SIZE)
    whole.fill(10, is_whole=False)
    assert whole.has(10)
    assert whole.parts_of([10, 3]) == [10, 3]


def test_a_conversation_goes_on_from_its_end(short: None) -> None:
    engine, model = make_engine(near=NearRoom(12, 8), max_num_batched_tokens=16)
    ids = list(range(60))
    engine.add("first", ids, SamplingParams(temperature=0.0, max_tokens=20))
    ids = [*ids, *drain(engine)["first"].outputs[0].token_ids, 1, 2, 3, 4]
    engine.add("second", ids, SamplingParams(temperature=0.0, max_tokens=3))
    output = drain(engine)["second"]
    assert output.metrics.num_cached_tokens == 76  # 79 were computed: whole blocks of these
    engine.add("third", list(range(40)), SamplingParams(temperature=0.0, max_tokens=3))
    assert drain(engine)["third"].metrics.num_cached_tokens == 0  # what it would have to see is gone
    assert not model.violations


def test_what_is_computed_again_can_be_found_again(short: None) -> None:
    """A block that is known without its part gives way to the one that somebody has with it."""
    engine, model = make_engine(near=NearRoom(9, 8), max_num_batched_tokens=8, num_blocks=200)
    shared = list(range(24))
    for name, ids in {"long": shared + [7] * 60, "again": shared + [8] * 3, "found": shared + [9] * 3}.items():
        engine.add(name, ids, SamplingParams(temperature=0.0, max_tokens=1))
        output = drain(engine)[name]
    assert output.metrics.num_cached_tokens == 24
    assert not model.violations


WINDOW = 40
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def windowed(**others: Any) -> Any:
    shape = SMALL | {"num_hidden_layers": 3, "max_position_embeddings": 2048}
    return random_model(Qwen3Config(**shape | others, layer_types=KINDS, use_sliding_window=True, sliding_window=WINDOW))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(windowed(), tmp_path_factory.mktemp("windowed"))


def block_bytes() -> tuple[int, int]:
    """Of a block, and of it in layers with a window, by hand: two heads of 24 numbers in K and, as the kernels have them, of 32
    in V, 16 tokens, 4 bytes."""
    layer = 2 * (24 + 32) * 16 * 4
    return 3 * layer, 2 * layer


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return poison_what_is_out_of_reach(monkeypatch)


def test_a_long_text_takes_what_its_layers_see(folder: Path, poisoned: list[int]) -> None:
    whole, part = block_bytes()
    room = 128 * (whole - part) + 26 * part
    near_worker = worker_for(folder, num_blocks=None, kv_cache_bytes=room, max_model_len=2000, max_num_batched_tokens=96)
    worker = worker_for(folder, max_num_batched_tokens=96)
    assert near_worker.block_bytes == whole
    assert near_worker.near_bytes == part
    assert near_worker.near.reach == WINDOW
    assert near_worker.num_blocks >= 125 > room // whole
    assert near_worker.kv_bytes <= room
    ids = [i * i % 509 for i in range(1200)]
    asked = [(ids, SamplingParams(temperature=0.0, max_tokens=200, logprobs=2, ignore_eos=True))]
    found = run(engine_for(near_worker, max_num_batched_tokens=96), asked)
    expected = run(engine_for(worker, max_num_batched_tokens=96), asked)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert found[0].outputs[0].logprobs == expected[0].outputs[0].logprobs
    assert max(poisoned) == (1400 - 1 - WINDOW - 64) // 64 * 64 // 16


def test_all_is_kept_as_long_as_there_is_room(folder: Path, poisoned: list[int]) -> None:
    whole, _ = block_bytes()
    config = EngineConfig(max_model_len=1000, max_num_seqs=2)
    near_of_it = Near(4000, WINDOW, 512)
    assert size_cache(config, 2048, whole, 126 * whole, 0, near_of_it) == (126, 1000, 0, 0)
    blocks, length, _, parts = size_cache(config, 2048, whole, 125 * whole, 0, near_of_it)
    assert (blocks, length) == (126, 1000)
    assert near_of_it.least(16) <= parts < 126
    assert CacheSize(blocks, length, 0, parts).num_bytes(whole, 0, 4000) <= 125 * whole
    assert size_cache(replace(config, num_blocks=9, max_model_len=None), 2048, whole, 0, 0, near_of_it).num_near == 0


@pytest.mark.parametrize("room", [10, 30, 45, 60, 90, 200, 1000])
def test_there_is_never_less_context_than_with_all_kept(room: int) -> None:
    for told in (None, 600):
        for seqs in (1, 4, 64):
            config, near_of_it = EngineConfig(max_model_len=told, max_num_seqs=seqs), Near(800, WINDOW, 64)
            try:
                plain = size_cache(config, 2000, 1000, room * 1000)
            except DoesNotFitError:
                plain = CacheSize(0, 0)
            try:
                found = size_cache(config, 2000, 1000, room * 1000, 0, near_of_it)
            except DoesNotFitError:
                assert plain.num_blocks == 0
                continue
            assert found.num_blocks >= plain.num_blocks
            assert found.max_model_len >= plain.max_model_len
            assert found.num_bytes(1000, 0, 800) <= room * 1000
            assert found.num_near == 0 or near_of_it.least(16) <= found.num_near < found.num_blocks


def test_a_context_that_does_not_fit_is_told_what_it_needs() -> None:
    near_of_it = Near(900_000, WINDOW, 64)
    with pytest.raises(DoesNotFitError, match=r"needs 74\.2 MiB of KV cache, and it gets 64\.0 MiB"):
        size_cache(EngineConfig(max_model_len=100_000), 100_000, 910_000, 1 << 26, 0, near_of_it)  # by hand: 6,250 and 17


def test_models_that_see_no_less_than_all_keep_all(tmp_path: Path, poisoned: list[int]) -> None:
    """Without windows, with states, and those that read a text as a whole."""
    plain = save(random_model(Qwen3Config(**SMALL)), tmp_path / "plain")
    assert worker_for(plain).near_bytes == 0
    spec = worker_for(save(windowed(), tmp_path / "windowed")).spec
    assert near_of(spec, EngineConfig(), 100) == Near(100, WINDOW, 512)
    assert near_of(spec, EngineConfig(), 0) is None
    blocks = tuple(replace(block, mixer=replace(block.mixer, both_ways=True)) for block in spec.blocks)
    assert near_of(replace(spec, blocks=blocks), EngineConfig(), 100) is None


def test_a_layer_that_others_read_from_the_beginning_keeps_all(poisoned: list[int]) -> None:
    window = AttentionSpec(4, 2, 16, None, window=8)
    reads = AttentionSpec(4, 2, 16, None, reads=0)
    layout = CpuAttention({2}, torch.float32, (torch.float32, torch.float32))
    side = 2 * 16 * 16 * 4
    assert near_bytes([window], layout) == 2 * side
    assert near_reach([window]) == 8
    assert near_bytes([window, reads], layout) == 0
    assert near_reach([window, reads]) == 0
    assert near_reach([window, replace(reads, window=20)]) == 20
    assert near_reach([window, replace(window, window=None, chunk=64)]) == 64


LAYOUT = CpuAttention({2}, torch.float32, (torch.float32, torch.float32))
WINDOWED, PLAIN = AttentionSpec(4, 2, 16, None, window=8), AttentionSpec(4, 2, 16, None)
MIXERS = [WINDOWED, PLAIN, replace(WINDOWED, reads=0)]


def filled(num_parts: int) -> KVCache:
    """Each block, and each part, of a number of its own."""
    cache = KVCache(6, MIXERS, LAYOUT, 1, num_parts)
    for i, layer in enumerate(cache.layers[:2]):
        for side in layer:
            side.flatten(1).copy_(torch.arange(len(side))[:, None] + 10 * i)
    return cache


def numbers(side: torch.Tensor) -> list[float]:
    return list(side.flatten(1)[:, 0].tolist())


def test_layers_with_a_window_have_parts_in_place_of_blocks() -> None:
    cache = filled(3)
    assert [len(layer[0]) for layer in cache.layers] == [3, 6, 3]
    assert cache.is_near == [True, False, True]
    assert KVCache(6, MIXERS, LAYOUT).is_near == [False] * 3


@pytest.mark.parametrize(("num_parts", "of_window"), [(3, [0, 1, 0]), (0, [0, 1, 2, 3, 4, 1])])
def test_a_copy_is_of_block_and_part(num_parts: int, of_window: list[int]) -> None:
    cache = filled(num_parts)
    cache.copy_blocks([(1, 5, 0, 2)])
    for windowed_side, side in zip(cache.layers[0], cache.layers[1], strict=True):
        assert numbers(side) == [10, 11, 12, 13, 14, 11]
        assert numbers(windowed_side) == of_window


def test_what_is_taken_out_fits_a_cache_with_parts_and_one_without() -> None:
    side = 2 * 16 * 16 * 4
    taken = filled(3).take_out([4, 2], [1, -1])
    assert taken.shape == (2, 4 * side)
    assert taken.view(torch.float32).view(2, 4, -1)[:, :, 0].tolist() == [[14, 14, 1, 1], [12, 12, 0, 0]]
    with_parts, without = filled(3), filled(0)
    with_parts.put_in([0, 1], [2, -1], taken)
    without.put_in([0, 1], [0, 1], taken)
    assert numbers(with_parts.layers[1][0])[:2] == numbers(without.layers[1][0])[:2] == [14, 12]
    assert numbers(with_parts.layers[0][1]) == [0, 1, 1]
    assert numbers(without.layers[0][1]) == [1, 0, 2, 3, 4, 5]
    with_parts.put_in([3], [-1], taken[1:])
    assert numbers(with_parts.layers[0][1]) == [0, 1, 1]


def test_saved_kv_comes_back_with_what_was_kept(folder: Path, poisoned: list[int], tmp_path: Path) -> None:
    whole, part = block_bytes()
    room = 128 * (whole - part) + 26 * part
    told = {"max_num_batched_tokens": 96}

    def engine(**others: Any) -> Engine:
        sizes = others if others else {"num_blocks": None, "kv_cache_bytes": room, "max_model_len": 2000}
        return engine_for(worker_for(folder, **sizes | told), **told)

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ids = [i * i % 509 for i in range(900)]
    first = engine()
    (answer,) = run(first, [(ids, params)])
    longer = [*ids, *answer.outputs[0].token_ids, 5]
    assert first.kv_files.save(tmp_path / "kv", "me", longer) == 896
    (expected,) = run(first, [(longer, params)])
    second = engine()
    assert second.kv_files.load(tmp_path / "kv", "me") == 896
    (found,) = run(second, [(longer, params)])
    assert found.metrics.num_cached_tokens == 896
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    (parted,) = run(second, [(ids[:400], params)])
    assert parted.metrics.num_cached_tokens == 0  # what it would see had been given back
    plain = engine(num_blocks=128)
    assert plain.kv_files.load(tmp_path / "kv", "me") == 0  # there blocks are whole



def test_images_that_no_step_may_cut_have_room(tmp_path: Path, poisoned: list[int]) -> None:
    """Steps of 7 tokens, and of 16 for an image."""
    _, plain, vision, token = opened("gemma3", tmp_path)
    wanted = Near(plain.near_bytes, 20, 7 + 16)
    room = 32 * (plain.block_bytes - plain.near_bytes) + (wanted.least(16) + 1) * plain.near_bytes
    told = {"max_num_batched_tokens": 7}
    sizes = {"num_blocks": None, "kv_cache_bytes": room, "max_model_len": 512}
    worker = worker_for(tmp_path, dtype="float32", **sizes, **told)
    assert worker.near.reach == 20
    assert wanted.least(16) <= worker.near.num_parts <= wanted.least(16) + 1
    parts = [150, an_image(vision, 4, 4), 90, an_image(vision, 4, 4), 100]
    asked = [(prompt_with(vision, parts, token), SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)) for _ in range(2)]
    found, expected = run(engine_for(worker, **told), asked), run(engine_for(plain), asked)
    assert max(poisoned)
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
