"""All that a prefix cache holds, in one file: what began alike stays shared, what was used last comes first."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import cast

import pytest

from nanovllm_cli import LLM
from nanovllm_cli.engine import kv_file
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.executor import Executor
from nanovllm_cli.engine.kv_file import KvFiles
from nanovllm_cli.engine.sequence import Request, Salt, Sequence
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import Image, PlacedImage
from test_kv_file import answer, folder, load, shared  # noqa: F401

SIZE, BYTES = 4, 24


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Memory:
    """Blocks and states that hold a digest of all that they stand for."""

    block_bytes = state_bytes = BYTES

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.states: dict[int, bytes] = {}
        self.num_read = self.num_written = 0

    def read_blocks(self, blocks: list[int], parts: list[int]) -> memoryview:
        self.num_read += len(blocks)
        return memoryview(b"".join(self.blocks[each] for each in blocks))

    def write_blocks(self, blocks: list[int], parts: list[int], data: memoryview) -> None:
        self.num_written += len(blocks)
        for i, block in enumerate(blocks):
            self.blocks[block] = bytes(data[i * BYTES : (i + 1) * BYTES])

    def read_state(self, state: int) -> memoryview:
        return memoryview(self.states[state])

    def write_state(self, state: int, data: memoryview) -> None:
        self.states[state] = bytes(data)


def digest(ids: list[int], salt: Salt) -> bytes:
    return hashlib.blake2b(repr((ids, salt)).encode(), digest_size=BYTES).digest()


class Engine:
    """A cache without a model."""

    def __init__(self, num_blocks: int, num_states: int = 0) -> None:
        self.manager = BlockManager(num_blocks, SIZE, num_states=num_states)
        self.memory = Memory()
        self.files = KvFiles(self.manager, cast(Executor, self.memory))

    def sequence(self, ids: list[int], salt: Salt = (None, ()), images: tuple[PlacedImage, ...] = ()) -> Sequence:
        text, lora = salt
        request = Request(
            "r", tuple(ids), SamplingParams(), len(ids), (), 0.0, cache_salt=text, lora=lora, images=images
        )
        return Sequence(1, request, 0, 0, list(ids))

    def read(self, ids: list[int], salt: Salt = (None, ()), images: tuple[PlacedImage, ...] = ()) -> Sequence:
        """A prompt of whole blocks, which goes on from what is found and stays running."""
        sequence = self.sequence(ids, salt, images)
        assert self.manager.admit(sequence, 0)
        self.manager.states.forget_source(sequence)
        for i in range(sequence.num_computed // SIZE, len(ids) // SIZE):
            self.memory.blocks[sequence.block_table[i]] = digest(ids[: (i + 1) * SIZE], salt)
        if self.manager.states.num_states:
            self.memory.states[sequence.state] = digest(ids, ("state", ()))
        sequence.num_computed = len(ids)
        self.manager.register(sequence)
        return sequence

    def use(self, ids: list[int], salt: Salt = (None, ())) -> None:
        self.manager.release(self.read(ids, salt))

    def found(self, ids: list[int], salt: Salt = (None, ())) -> int:
        """How many tokens of a prompt are there, each block with what belongs into it."""
        entries = self.manager.findable(self.sequence(ids, salt))
        for i, entry in enumerate(entries):
            assert self.memory.blocks[entry.block] == digest(ids[: (i + 1) * SIZE], salt)
        if entries and self.manager.states.num_states:
            behind = self.manager.states.pool.behind(entries[-1].block)
            assert behind is not None
            assert self.memory.states[behind] == digest(ids[: len(entries) * SIZE], ("state", ()))
        return len(entries) * SIZE


def prompts(r: random.Random, count: int) -> list[tuple[list[int], Salt]]:
    """Of whole blocks, many of which begin as others do."""
    found: list[tuple[list[int], Salt]] = []
    for _ in range(count):
        ids, salt = r.choice(found) if found and r.random() < 0.7 else ([], (r.choice([None, "a"]), r.choice([(), (1.0, 0.5)])))
        kept = r.randint(0, len(ids) // SIZE) * SIZE
        found.append((ids[:kept] + [r.randint(0, 2) for _ in range(SIZE * r.randint(1, 6))], salt))
    return found


@pytest.mark.parametrize("num_states", [0, 40])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_was_read_comes_back(tmp_path: Path, seed: int, num_states: int) -> None:
    r = random.Random(seed)
    first = Engine(r.choice([30, 200]), num_states)
    asked = prompts(r, 25)
    running = []
    for ids, salt in asked:
        if r.random() < 0.2 and len(running) < 2 and not num_states:
            running.append(first.read(ids, salt))  # it is still under way
        else:
            first.use(ids, salt)
    kept = first.files.save(tmp_path / "kv", "me")
    assert kept > 0
    second = Engine(first.manager.num_blocks, num_states)
    assert second.files.load(tmp_path / "kv", "me") <= kept
    for ids, salt in asked:
        assert second.found(ids, salt) == first.found(ids, salt)
    assert second.manager.num_used == 0
    second.files.save(tmp_path / "again", "me")  # as it was: the same can be had of it, and it was used in the same order
    third = Engine(first.manager.num_blocks, num_states)
    third.files.load(tmp_path / "again", "me")
    assert [third.found(*each) for each in asked] == [first.found(*each) for each in asked]


@pytest.mark.parametrize("num_states", [0, 40])
@pytest.mark.parametrize("seed", range(8))
def test_a_smaller_cache_has_what_was_used_last(tmp_path: Path, seed: int, num_states: int) -> None:
    r = random.Random(seed)
    first, asked = Engine(400, num_states), prompts(r, 30)
    for each in asked:
        first.use(*each)
    kept = first.files.save(tmp_path / "kv", "me")
    second = Engine(12, num_states)
    assert 0 < second.files.load(tmp_path / "kv", "me") <= min(kept, 12 * SIZE)
    assert second.found(*asked[-1]) == first.found(*asked[-1]) == len(asked[-1][0])
    for each in asked:
        assert second.found(*each) <= first.found(*each)
    assert second.manager.num_used == 0
    second.use([9] * SIZE)  # takes the place of what was used longest ago
    assert second.found(*asked[-1]) == len(asked[-1][0])


def test_answers_that_come_behind_what_was_kept_are_the_same(shared: LLM, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    begin = [(7 * i) % 251 for i in range(100)]
    asked = [[*begin, *range(i, i + 30)] for i in range(3)] + [list(range(60, 200))]
    expected = [answer(shared, ids)[0] for ids in asked]
    assert shared.save_kv(None, tmp_path / "kv") >= 96 + 3 * 32 + 128
    other = load(folder)
    other.load_kv(tmp_path / "kv")
    found = [(len(ids) - 1) // 16 * 16 for ids in asked]
    assert [answer(other, ids) for ids in asked] == list(zip(expected, found, strict=True))


def test_few_states_are_those_that_were_used_last(tmp_path: Path) -> None:
    first, second = Engine(50, 10), Engine(50, 3)
    for i in range(6):
        first.use([i] * 2 * SIZE)
    first.files.save(tmp_path / "kv", "me")
    assert second.files.load(tmp_path / "kv", "me") == 3 * 2 * SIZE
    assert [second.found([i] * 2 * SIZE) > 0 for i in range(6)] == [False] * 3 + [True] * 3


def test_only_what_a_prompt_begins_with_is_read(tmp_path: Path) -> None:
    first, second = Engine(50), Engine(50)
    for end in ([1] * 8, [2] * 8, [1] * 4 + [3] * 8):
        first.use([7] * 8 + end)
    first.use([5] * 40)
    assert first.files.save(tmp_path / "kv", "me") == 8 + 8 + 8 + 8 + 40
    wanted = [7] * 8 + [1] * 4 + [3] * 6
    assert second.files.load(tmp_path / "kv", "me", wanted) == 16
    assert second.memory.num_written == 4
    assert (second.found(wanted), second.manager.num_cached) == (16, 4)
    assert second.files.load(tmp_path / "kv", "me", [4] * 20) == 0
    assert second.files.load(tmp_path / "kv", "me", [5] * 10) == 8
    assert second.files.load(tmp_path / "kv", "me") == 72, "what is there already counts"
    assert second.found([5] * 40) == 40


def test_of_a_model_with_states_only_what_has_one_is_read(tmp_path: Path) -> None:
    first, second = Engine(50, 8), Engine(50, 8)
    first.use([7] * 8)
    first.use([7] * 16)
    first.use([7] * 8 + [1] * 8)
    first.files.save(tmp_path / "kv", "me")
    second.files.load(tmp_path / "kv", "me", [7] * 15)
    assert second.found([7] * 15) == 8
    assert second.files.load(tmp_path / "kv", "me", [7] * 17) == 16
    assert second.found([7] * 16) == 16
    assert second.found([7] * 8 + [1] * 8) == 8


def test_what_is_there_already_does_not_make_room_for_what_comes(tmp_path: Path) -> None:
    first, second = Engine(50), Engine(12)
    first.use([2] * 32)
    first.use([1] * 16)
    first.files.save(tmp_path / "kv", "me")
    second.use([1] * 16)
    second.use([9] * 32)
    assert second.files.load(tmp_path / "kv", "me") == 48
    assert (second.found([1] * 16), second.found([2] * 32), second.found([9] * 32)) == (16, 32, 0)


def test_more_than_a_header_can_name_leaves_out_what_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_file, "MOST_TOKENS", 20)
    first, second = Engine(50), Engine(50)
    for i in range(5):
        first.use([i] * 8)
    assert first.files.save(tmp_path / "kv", "me") == 24
    second.files.load(tmp_path / "kv", "me")
    assert [second.found([i] * 8) for i in range(5)] == [0, 0, 8, 8, 8]


def test_images_are_left_out_with_all_behind_them(tmp_path: Path) -> None:
    first, second = Engine(50), Engine(50)
    image = PlacedImage(Image.of(1, 1, bytes(3)), 9, 1, 2)
    ids = [7] * 24
    first.manager.release(first.read(ids, images=(image,)))
    first.use([7] * 4 + [8] * 8)
    assert first.files.save(tmp_path / "kv", "me") == 8 + 8
    assert second.files.load(tmp_path / "kv", "me") == 16
    assert second.found(ids) == 8
    assert second.found([7] * 4 + [8] * 8) == 12


def test_where_a_prompt_parts_from_one_in_the_file_is_seen(tmp_path: Path) -> None:
    """Of a model with states: blocks that nothing can go on behind tell that a state there would be worth keeping."""
    first, second = Engine(200, 8), Engine(200, 8)
    first.use([7] * 400)
    first.files.save(tmp_path / "kv", "me")
    assert second.files.load(tmp_path / "kv", "me", [7] * 201) == 200
    assert second.found([7] * 400) == 0
    sequence = second.sequence([7] * 200 + [1] * 8)
    assert second.manager.admit(sequence, 0)
    assert (sequence.num_computed, sequence.parting) == (0, 200)
