"""Files of saved KV and near parts: what a file has of a prefix comes back, whatever the cache has lost of it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import cast

import pytest

from nanovllm_cli.engine import near
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.executor import Executor
from nanovllm_cli.engine.kv_file import KvFiles
from nanovllm_cli.engine.near import NearRoom
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.sampling_params import SamplingParams

SIZE, BYTES, REACH = 4, 8, 8


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are short here, and the key is this test's own."""
    monkeypatch.setattr(near, "TILE", SIZE)
    monkeypatch.setattr(near, "SLACK", 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Memory:
    """Blocks and near parts that hold a digest of all that they stand for, or zeros."""

    block_bytes = 2 * BYTES
    state_bytes = 0

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.parts: dict[int, bytes] = {}

    def read_blocks(self, blocks: list[int], parts: list[int]) -> memoryview:
        pairs = zip(blocks, parts, strict=True)
        return memoryview(b"".join(self.blocks[block] + self.parts.get(part, bytes(BYTES)) for block, part in pairs))

    def write_blocks(self, blocks: list[int], parts: list[int], data: memoryview) -> None:
        for i, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            both = bytes(data[i * 2 * BYTES : (i + 1) * 2 * BYTES])
            self.blocks[block] = both[:BYTES]
            if part >= 0:
                self.parts[part] = both[BYTES:]


def digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(repr(ids).encode(), digest_size=BYTES).digest()


class Engine:
    """A cache without a model. num_parts: 0 where all blocks have theirs."""

    def __init__(self, num_blocks: int, num_parts: int) -> None:
        self.manager = BlockManager(num_blocks, SIZE, near=NearRoom(num_parts, REACH if num_parts else 0))
        self.memory = Memory()
        self.files = KvFiles(self.manager, cast(Executor, self.memory))

    def sequence(self, ids: list[int]) -> Sequence:
        return Sequence(1, Request("r", tuple(ids), SamplingParams(), len(ids), (), 0.0), 0, 0, list(ids))

    def use(self, ids: list[int]) -> None:
        """Reads a prompt, a block a step, behind what is found of it."""
        sequence = self.sequence(ids)
        assert self.manager.admit(sequence, 0)
        while sequence.num_computed < len(ids):
            end = min(len(ids), sequence.num_computed + SIZE)
            self.manager.slide([sequence])
            assert not self.manager.lacks(sequence, end)
            assert self.manager.grow(sequence, end) is None
            index = (end - 1) // SIZE
            block = sequence.block_table[index]
            self.memory.blocks[block] = digest(ids[:end])
            self.memory.parts[sequence.near_table[index] if self.manager.near.num_parts else block] = digest(ids[:end])
            sequence.num_computed = end
            self.manager.register(sequence)
        self.manager.release(sequence)

    def found(self, ids: list[int]) -> int:
        """How many tokens of a prompt can be gone on behind; blocks, and near parts within reach, have what belongs into them."""
        blocks = [entry.block for entry in self.manager.findable(self.sequence(ids))]
        for i, (block, part) in enumerate(zip(blocks, self.manager.near.parts_of(blocks), strict=True)):
            expected = digest(ids[: (i + 1) * SIZE])
            assert self.memory.blocks[block] == expected
            if (i + 1) * SIZE > len(blocks) * SIZE - REACH:
                assert self.memory.parts[part] == expected
        return len(blocks) * SIZE


def test_a_file_brings_back_what_a_cache_has_lost_of_what_it_knows(tmp_path: Path) -> None:
    """Where all blocks are known, and some without their parts, as of a conversation that is taken up again."""
    engine = Engine(60, 12)
    ids = list(range(40))
    engine.use(ids)
    assert engine.files.save(tmp_path / "kv", "me") == 40
    for first in (50, 60, 70):
        engine.use([first] * 14)  # each leaves the part of a block that is not full
    assert engine.found(ids) < 40
    assert len(engine.manager.known(engine.sequence(ids))) == 10
    assert engine.files.load(tmp_path / "kv", "me") == 40
    assert engine.found(ids) == 40
    assert engine.manager.num_used == 0


def test_of_more_parts_than_there_is_room_for_those_used_last_are_kept(tmp_path: Path) -> None:
    first, second = Engine(60, 40), Engine(60, 6)
    prompts = [[i] * 12 for i in range(8)]
    for ids in prompts:
        first.use(ids)
    assert first.files.save(tmp_path / "kv", "me") == 96
    second.files.load(tmp_path / "kv", "me")
    assert [second.found(ids) for ids in prompts[-2:]] == [12, 12]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_found_behind_a_file_has_what_belongs_there(tmp_path: Path, seed: int) -> None:
    r = random.Random(seed)
    engines = [Engine(r.choice([30, 60, 200]), r.choice([0, 8, 12, 40])) for _ in range(3)]
    prompts: list[list[int]] = []
    saved = 0
    for _ in range(60):
        ids = r.choice(prompts) if prompts and r.random() < 0.7 else []
        ids = ids[: r.randint(0, len(ids))] + [r.randint(0, 2) for _ in range(r.randint(1, 40))]
        prompts.append(ids[:90])
        engine = r.choice(engines)
        engine.use(prompts[-1])
        if r.random() < 0.3:
            saved += engine.files.save(tmp_path / "kv", "me") > 0
        if saved and r.random() < 0.4:
            (other := r.choice(engines)).files.load(tmp_path / "kv", "me", r.choice([None, r.choice(prompts)]))
            for each in prompts:
                other.found(each)
    assert saved
