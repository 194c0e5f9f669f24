"""What the prefix cache holds, on disk, so that nobody reads it again: a prompt with its answer, or all of it.

    magic "nnvllmKV", length of the header (u32, little-endian), header (JSON), its tag
    then each stretch of blocks: K and V of all layers of each, as the cache has them, and a tag
                                 then, of a model that keeps states, the one behind the last of them, and a tag

A stretch goes on from nothing, or from a block of an earlier one; of a model that keeps states, from an earlier one's end, which
alone has one. A tag is HMAC-SHA256 (RFC 2104) of what it stands behind, of its place, and of the header's tag, under a key that
this user's state folder holds and no file does. So a file that was damaged, cut, put together from others, or made by anybody
else, is not used. The header names what the numbers depend on: `identity` is a digest of model, settings and program. Whatever
doesn't fit, the file is left aside with a reason in the log, and the tokens are computed anew; `load` never fails because of a
file.

Which tokens are in the cache is `block_manager.py`'s matter, where blocks lie in memory the worker's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import stat
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from importlib.metadata import version
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.executor import Executor
from nanovllm_cli.engine.prefix_cache import ROOT_UID, Entry
from nanovllm_cli.engine.sequence import Request, Salt, Sequence
from nanovllm_cli.errors import NanovllmError, OutputError
from nanovllm_cli.folders import state_folder
from nanovllm_cli.prompts import num_equal
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.json_file import parse_json
from nanovllm_cli.weights.writer import OutputFile, check_room

logger = logging.getLogger(__name__)

MAGIC = b"nnvllmKV"
TAG_BYTES = KEY_BYTES = 32
MAX_HEADER_BYTES = 32 << 20
MOST_TOKENS = 3_000_000
"""Of the stretches but the last, that their ids fit into a header."""
SLICE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<q")


class Stretch(NamedTuple):
    """Full blocks in a row. behind: the number in the file of the block that they go on from, or -1. salt, lora: see `Salt`.
    has_state: whether the state behind the last one is there. lacks: which of them are there without their near parts (see
    `near.py`). token_ids: their own."""

    behind: int
    salt: str | None
    lora: list[float]
    has_state: bool
    lacks: list[int]
    token_ids: list[int]


class Header(NamedTuple):
    """identity: see the module. stretches: what was used last comes first, but behind what it goes on from."""

    identity: str
    block_size: int
    block_bytes: int
    state_bytes: int
    stretches: list[Stretch]

    def ends(self) -> Iterator[tuple[int, int]]:
        """How many blocks, and how many states, there are up to the end of each stretch."""
        blocks = states = 0
        for stretch in self.stretches:
            blocks += len(stretch.token_ids) // self.block_size
            states += stretch.has_state
            yield blocks, states

    def bytes_of(self, blocks: int, states: int) -> int:
        """What so many take in the file."""
        return blocks * (self.block_bytes + TAG_BYTES) + states * (self.state_bytes + TAG_BYTES)


class _NotUsed(Exception):
    """Why a file is left aside."""


def program_digest() -> str:
    """Of the code that makes the numbers and lays them out, and of the libraries under it."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(" ".join(version(name) for name in ("torch", "numba", "numpy")).encode())
    for room in ("attention", "distributed", "kernels", "layers", "models", "quant"):
        for source in sorted((package / room).iterdir()):
            if source.suffix in (".py", ".cu", ".cuh"):
                digest.update(source.read_bytes())
    return digest.hexdigest()


class KvFiles:
    """Files of what one engine's cache holds."""

    def __init__(self, blocks: BlockManager, executor: Executor) -> None:
        self._blocks, self._executor = blocks, executor

    @property
    def num_registered(self) -> int:
        """Blocks that ever became findable: where there are more than there were, there is more to save."""
        return self._blocks.num_registered

    def save(self, path: Path, identity: str, token_ids: list[int] | None = None, salt: str | None = None) -> int:
        """Writes what the cache holds of the beginning of these tokens, or all of it; for its owner's eyes only.

        Returns how many tokens that are: full blocks that a prompt without images can go on from. 0 leaves the path as it was. A
        file that is there is replaced, whole or not at all. Raises OutputError, DoesNotFitError (disk).
        """
        wanted = None if token_ids is None else _stand_in(token_ids, (salt, ()))
        rows = _rows(self._blocks.findable(wanted), self._blocks)
        if not rows:
            return 0
        stretches, sizes = [stretch for stretch, _ in rows], self._sizes
        header = Header(identity, *sizes, stretches)
        text = json.dumps(header._asdict(), separators=(",", ":")).encode()
        *_, end = header.ends()
        num_tokens = len({block for _, row in rows for block in row}) * header.block_size
        if len(text) > MAX_HEADER_BYTES:
            raise OutputError(f"{path}: {num_tokens} tokens are too many to keep in one file")
        check_room(path, header.bytes_of(*end) + len(text))
        key = _own_key()
        with OutputFile(path, replace=True) as output:
            os.fchmod(output.file.fileno(), 0o600)
            start = MAGIC + _LENGTH.pack(len(text)) + text
            seal = hmac.digest(key, start, "sha256")
            output.file.write(start + seal)
            for place, data in self._parts(rows):
                output.file.write(data)
                output.file.write(_tag(key, seal, place, data))
            output.commit()
        return num_tokens

    def load(self, path: Path, identity: str, wanted: list[int] | None = None) -> int:
        """Puts what a file holds into the prefix cache, as if the requests that computed it had just finished.

        wanted: a prompt, where only what it begins with is of use. Returns how many tokens of the file are in the cache now: all,
        or those from its beginning on that there was room for. 0, and a line in the log, where it is of no use.
        """
        try:
            if not self._blocks.finds_prefixes:
                raise _NotUsed("the prefix cache is switched off")
            with _open(path) as file:
                reader = _Reader(file, _own_key())
                if reader.header.identity != identity or reader.header[1:4] != self._sizes:
                    raise _NotUsed("it was saved with another model, other settings, or another version")
                return _Loading(reader, self._blocks, self._executor).run(wanted)
        except FileNotFoundError:
            logger.info("%s: no such file; all is computed anew", path)
        except (_NotUsed, NanovllmError, OSError) as reason:
            what = reason.message if isinstance(reason, NanovllmError) else getattr(reason, "strerror", None) or reason
            logger.warning("%s: not used: %s", path, what)
        return 0

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """As a header has them."""
        state_bytes = self._executor.state_bytes if self._blocks.states.num_states else 0
        return self._blocks.block_size, self._executor.block_bytes, state_bytes

    def _parts(self, rows: list[tuple[Stretch, list[int]]]) -> Iterator[tuple[int, memoryview]]:
        """What a file has behind its header, each with its place (see `_tag`)."""
        place, size, step = 0, self._executor.block_bytes, _at_once(self._executor.block_bytes)
        for stretch, row in rows:
            for first in range(0, len(row), step):
                some = row[first : first + step]
                data = self._executor.read_blocks(some, self._blocks.near.parts_of(some))
                for i in range(len(some)):
                    yield place + i, data[i * size : (i + 1) * size]
                place += len(some)
            if stretch.has_state:
                state = self._blocks.states.pool.behind(row[-1])
                assert state is not None, "nothing has run since"
                yield -place, self._executor.read_state(state)


def _rows(entries: list[Entry], blocks: BlockManager) -> list[tuple[Stretch, list[int]]]:
    """The stretches of a file, and where their blocks lie in memory. Of a model that keeps states each ends with one; of others
    with a block that none goes on from."""
    keeps_states = blocks.states.num_states > 0
    known = _from_the_beginning(entries)
    if keeps_states:
        ends = [entry for entry in known.values() if blocks.states.pool.behind(entry.block) is not None]
    else:
        parents = {entry.parent_uid for entry in known.values()}
        ends = [entry for entry in known.values() if entry.uid not in parents]
    rows = []
    places: dict[int, int] = {}
    """Numbers in the file of what others can go on from."""
    count = 0
    for end in ends:
        if count * blocks.block_size >= MOST_TOKENS:
            break
        own, uid = [], end.uid
        while uid != ROOT_UID and uid not in places:
            own.append(known[uid])
            uid = own[-1].parent_uid
        own.reverse()
        text, lora = end.salt
        token_ids = array("q", b"".join([entry.tokens for entry in own])).tolist()
        lacks = [i for i, entry in enumerate(own) if not blocks.near.has(entry.block)]
        stretch = Stretch(places.get(uid, -1), text, list(lora), keeps_states, lacks, token_ids)
        rows.append((stretch, [entry.block for entry in own]))
        numbered = {entry.uid: count + i for i, entry in enumerate(own)}
        places |= {end.uid: numbered[end.uid]} if keeps_states else numbered
        count += len(own)
    return rows


def _from_the_beginning(entries: list[Entry]) -> dict[int, Entry]:
    """By uid, in their order, but each behind those that it goes on from; without those behind an image, or one that is gone."""
    usable = {entry.uid: entry for entry in entries if not entry.has_images}
    found: dict[int, Entry] = {}
    for entry in entries:
        chain, uid = list[Entry](), entry.uid
        while uid in usable and uid not in found:
            chain.append(usable[uid])
            uid = chain[-1].parent_uid
        if uid == ROOT_UID or uid in found:
            found |= {each.uid: each for each in reversed(chain)}
    return found


class _Loaded(NamedTuple):
    """Of a stretch what is in the cache. start: tokens in front of it; token_ids: those with its own."""

    start: int
    token_ids: list[int]


class _Loading:
    """Of one file. Raises _NotUsed where it is of no use."""

    def __init__(self, reader: _Reader, blocks: BlockManager, executor: Executor) -> None:
        self._reader, self._header, self._blocks, self._executor = reader, reader.header, blocks, executor
        self._most = blocks.num_available
        self._own: set[int] = set()
        """Blocks of the cache that have what is in the file: they make no room for each other."""
        pool = blocks.states.pool
        self._states_left = pool.num_free + pool.num_kept
        self._parts_left = blocks.near.num_available
        self._firsts = [0, *(end for end, _ in self._header.ends())]
        self._loaded: list[_Loaded] = []

    def run(self, wanted: list[int] | None) -> int:
        if self._most == 0:
            raise _NotUsed("the KV cache has no free block")
        done: list[Sequence] = []
        for index, stretch in enumerate(self._header.stretches):
            before = self._before(stretch.behind)
            sequence = None if before is None else self._take(index, before, wanted)
            if before is None or sequence is None:
                self._loaded.append(_Loaded(0, []))
            else:
                self._loaded.append(_Loaded(len(before), sequence.token_ids))
                self._own.update(entry.block for entry in self._blocks.known(sequence))
                done.append(sequence)
        for sequence in reversed(done):
            self._blocks.use(sequence)
        if not done and wanted is None:
            raise _NotUsed("the KV cache has no room for it")
        return len(self._own) * self._header.block_size

    def _before(self, block: int) -> list[int] | None:
        """The tokens up to the end of a block of the file; None where it isn't in the cache."""
        if block < 0:
            return []
        index = bisect_right(self._firsts, block) - 1
        loaded = self._loaded[index]
        end = loaded.start + (block - self._firsts[index] + 1) * self._header.block_size
        return loaded.token_ids[:end] if end <= len(loaded.token_ids) else None

    def _take(self, index: int, before: list[int], wanted: list[int] | None) -> Sequence | None:
        """Puts into the cache what a stretch has behind these tokens: a sequence that ends there, None where that can't be."""
        stretch, size = self._header.stretches[index], self._header.block_size
        salt = stretch.salt, tuple(stretch.lora)
        count = len(stretch.token_ids)
        if wanted is not None:
            is_begun = wanted[: len(before)] == before
            count = num_equal(stretch.token_ids, wanted[len(before) :]) // size * size if is_begun else 0
        token_ids = before + stretch.token_ids[:count]
        known = self._blocks.known(_stand_in(token_ids, salt))
        if len(known) * size < len(before):
            return None  # what it goes on from is gone
        room = self._most - len(self._own | {entry.block for entry in known})
        end = min(len(token_ids), (len(known) + room) * size)
        is_whole = end == len(before) + len(stretch.token_ids)
        if end <= len(before) or (stretch.has_state and not is_whole and wanted is None):
            return None  # nothing can go on behind less
        sequence = _stand_in(token_ids[:end], salt)
        if len(self._blocks.findable(sequence)) * size == end:
            self._blocks.use(sequence)  # others that come must not take its place
            return sequence
        if stretch.lacks and not self._blocks.near.num_parts:
            return None  # here all blocks are taken to be whole
        if (stretch.has_state and not self._states_left) or not self._blocks.admit(sequence, 0, brings_state=True):
            return None
        brings_state = stretch.has_state and is_whole  # else a prompt will see where it parts from another
        begin, there = len(before) // size, sequence.num_computed // size
        try:
            start, whole = self._missing(stretch, sequence, begin)
            for first, data in self._reader.blocks(index, start - begin, end // size - begin):
                row = sequence.block_table[begin + first : begin + first + _at_once(self._header.block_bytes)]
                for i, block in enumerate(row, first):
                    if i in whole or begin + i >= there:
                        self._blocks.near.fill(block, is_whole=i in whole)
                self._executor.write_blocks(row, self._blocks.near.parts_of(row), data)
            if brings_state:
                self._executor.write_state(sequence.state, self._reader.state(index))
                self._states_left -= 1
            sequence.num_computed = end
            self._blocks.register(sequence)
        finally:
            self._blocks.release(sequence, has_sound_state=brings_state)
        return sequence

    def _missing(self, stretch: Stretch, sequence: Sequence, begin: int) -> tuple[int, set[int]]:
        """The first of the sequence's blocks that is not there, or has lost the near part that the stretch, which begins at
        `begin`, has; and which of the stretch's are to get theirs: the last ones, where there are fewer than it has."""
        blocks, near = sequence.block_table[begin:], self._blocks.near
        kept = [i for i in range(len(blocks)) if i not in set(stretch.lacks)]
        there = sequence.num_computed // self._header.block_size
        start = next((i for i in kept if begin + i < there and not near.has(blocks[i])), there - begin)
        whole = [i for i in kept if i >= start][-self._parts_left :] if self._parts_left else []
        self._parts_left -= len(whole) if near.num_parts else 0
        return begin + start, set(whole)


class _Reader:
    """A file whose header is whole. Raises _NotUsed for everything that is not as it was written."""

    def __init__(self, file: BufferedReader, key: bytes) -> None:
        self._file = file
        self._key = key
        start = self._read(len(MAGIC) + _LENGTH.size)
        if not start.startswith(MAGIC):
            raise _NotUsed("it is no file of saved KV")
        (length,) = _LENGTH.unpack(start[len(MAGIC) :])
        if length > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise _NotUsed("it is damaged: the header is longer than it can be")
        text = self._read(length)
        self._seal = self._read(TAG_BYTES)
        if not hmac.compare_digest(self._seal, hmac.digest(key, bytes(start + text), "sha256")):
            raise _NotUsed("it is damaged, or was not saved by this user on this machine")
        fields = parse_json(bytes(text), "header")
        if fields.keys() != set(Header._fields):
            raise _NotUsed("it was saved by another version")
        self.header = Header(**fields | {"stretches": [Stretch(*each) for each in fields["stretches"]]})
        self._start = file.tell()
        self._ends = [(0, 0), *self.header.ends()]
        end = self._start + self.header.bytes_of(*self._ends[-1])
        if os.fstat(file.fileno()).st_size != end:
            raise _NotUsed(f"it is damaged: {end} bytes are expected")

    def blocks(self, stretch: int, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """Of a stretch from one of its blocks to before another, some at a time, checked: number of the first, and the blocks."""
        size, step = self.header.block_bytes, _at_once(self.header.block_bytes)
        place, states = self._ends[stretch]
        self._file.seek(self._start + self.header.bytes_of(place + first, states))
        for begin in range(first, last, step):
            count = min(step, last - begin)
            data = memoryview(bytearray(count * size))
            for i in range(count):
                number = place + begin + i
                self._fill(data[i * size : (i + 1) * size], number, f"block {number}")
            yield begin, data

    def state(self, stretch: int) -> memoryview:
        """The one behind a stretch, checked."""
        place, states = self._ends[stretch + 1]
        self._file.seek(self._start + self.header.bytes_of(place, states - 1))
        data = memoryview(bytearray(self.header.state_bytes))
        self._fill(data, -place, f"the state behind block {place - 1}")
        return data

    def _fill(self, part: memoryview, place: int, what: str) -> None:
        if self._file.readinto(part) != len(part):
            raise _NotUsed("it is damaged: it ends too early")
        if not hmac.compare_digest(self._read(TAG_BYTES), _tag(self._key, self._seal, place, part)):
            raise _NotUsed(f"it is damaged in {what}")

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise _NotUsed("it is damaged: it ends too early")
        return data


def _open(path: Path) -> BufferedReader:
    """Only a regular file: anything else could keep us waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _NotUsed("it is not a file")
    return os.fdopen(handle, "rb")


def _tag(key: bytes, seal: bytes, place: int, data: memoryview) -> bytes:
    """place: a block's number; of a state the number of blocks before it, below zero."""
    code = hmac.new(key, seal + _PLACE.pack(place), "sha256")
    code.update(data)
    return code.digest()


def _at_once(block_bytes: int) -> int:
    return max(1, SLICE_BYTES // max(1, block_bytes))


def _own_key() -> bytes:
    """This user's key, made when it is first wanted. Raises OutputError."""
    path = state_folder() / "kv.key"
    try:
        key = path.read_bytes() if path.exists() else b""
        if not key:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # two processes that want their first one get the same
                key = file.read()
                if not key:
                    key = os.urandom(KEY_BYTES)
                    file.write(key)
    except OSError as failure:
        raise OutputError(f"cannot keep {path}: {failure.strerror or failure}", "KV is saved only with it") from failure
    if len(key) != KEY_BYTES:
        raise OutputError(f"{path} is damaged", "delete it; KV that was saved with it is of no use any more")
    return key


def _stand_in(token_ids: list[int], salt: Salt) -> Sequence:
    """A sequence that nobody runs, for the block manager."""
    text, lora = salt
    request = Request("kv", tuple(token_ids), SamplingParams(), len(token_ids), (), 0.0, cache_salt=text, lora=lora)
    return Sequence(-1, request, 0, 0, token_ids)
