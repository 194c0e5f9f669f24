"""The KV of a conversation on disk, so that going on with it needs no prefill: `save` and `load`.

    magic "nnvllmKV", length of the header (u32, little-endian), header (JSON), its tag,
    then for each full block of tokens: K and V of all layers as the cache has them, and a tag
    then, of a model that keeps states, the one behind the last of these blocks, and a tag

A tag is HMAC-SHA256 of everything since the tag before, and of that tag (RFC 2104), under a key that this user's state folder
holds and no file does. So a file that was damaged, cut, put together from others, or made by anybody else, is not used. The
header names what the numbers depend on: `identity` is a digest of model, settings and program. Whatever doesn't fit, the
file is left aside with a reason in the log, and the tokens are computed anew; `load` never fails because of a file.

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
from collections.abc import Callable, Iterator
from importlib.metadata import version
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.executor import Executor
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.errors import NanovllmError, OutputError
from nanovllm_cli.folders import state_folder
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.json_file import parse_json
from nanovllm_cli.weights.writer import OutputFile, check_room

logger = logging.getLogger(__name__)

MAGIC = b"nnvllmKV"
TAG_BYTES = KEY_BYTES = 32
MAX_HEADER_BYTES = 32 << 20  # three million tokens
SLICE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class Header(NamedTuple):
    """identity: see the module. salt: the prefix cache's. state_bytes: 0 where there is none. token_ids: of full blocks, in
    order."""

    identity: str
    salt: str | None
    block_size: int
    block_bytes: int
    state_bytes: int
    token_ids: list[int]

    @property
    def num_blocks(self) -> int:
        return len(self.token_ids) // self.block_size


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


def save(
    path: Path, token_ids: list[int], salt: str | None, identity: str, blocks: BlockManager, executor: Executor
) -> int:
    """Writes the full blocks of these tokens that the prefix cache has, up to the first that it lacks; for its owner's eyes only.

    Returns how many tokens that are; 0 leaves the path as it was. A file that is there is replaced, whole or not at all.
    Raises OutputError, DoesNotFitError (disk).
    """
    found = blocks.findable(_stand_in(token_ids, salt))
    if not found:
        return 0
    state = blocks.states.pool.behind(found[-1])
    header = Header(
        identity, salt, blocks.block_size, executor.block_bytes, 0 if state is None else executor.state_bytes,
        token_ids[: len(found) * blocks.block_size],
    )  # fmt: skip
    text = json.dumps(header._asdict(), separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise OutputError(f"{path}: {len(header.token_ids)} tokens are too many to keep in one file")
    check_room(path, len(found) * (header.block_bytes + TAG_BYTES) + header.state_bytes + TAG_BYTES + len(text))
    key = _own_key()
    with OutputFile(path, replace=True) as output:
        os.fchmod(output.file.fileno(), 0o600)
        start = MAGIC + _LENGTH.pack(len(text)) + text
        tag = hmac.digest(key, start, "sha256")
        output.file.write(start + tag)
        step = _blocks_at_once(header)
        for first in range(0, len(found), step):
            data = executor.read_blocks(found[first : first + step])
            for i in range(min(step, len(found) - first)):
                block = data[i * header.block_bytes : (i + 1) * header.block_bytes]
                tag = _tag(key, tag, block)
                output.file.write(block)
                output.file.write(tag)
        if state is not None:
            block = executor.read_state(state)
            output.file.write(block)
            output.file.write(_tag(key, tag, block))
        output.commit()
    return len(header.token_ids)


def load(
    path: Path, identity: str, expected_salt: Callable[[int], str | None], blocks: BlockManager, executor: Executor
) -> int:
    """Puts what a file holds into the prefix cache, as if the request that computed it had just finished.

    expected_salt: of a prompt of so many tokens. Returns how many tokens can be found now: the whole file, or the beginning that
    the cache has room for. 0, and a line in the log, where the file is of no use.
    """
    try:
        if not blocks.finds_prefixes:
            raise _NotUsed("the prefix cache is switched off")
        with _open(path) as file:
            return _load(_Reader(file, _own_key()), identity, expected_salt, blocks, executor)
    except FileNotFoundError:
        logger.info("%s: no such file; the conversation is computed anew", path)
    except (_NotUsed, NanovllmError, OSError) as reason:
        what = reason.message if isinstance(reason, NanovllmError) else getattr(reason, "strerror", None) or reason
        logger.warning("%s: not used: %s", path, what)
    return 0


def _load(
    reader: _Reader, identity: str, expected_salt: Callable[[int], str | None], blocks: BlockManager, executor: Executor
) -> int:
    header = reader.header
    if (
        header.identity != identity
        or header.block_size != blocks.block_size
        or header.block_bytes != executor.block_bytes
        or header.state_bytes != (executor.state_bytes if blocks.states.num_states else 0)
    ):
        raise _NotUsed("it was saved with another model, other settings, or another version")
    if header.salt != expected_salt(len(header.token_ids) + 1):
        raise _NotUsed("its positions were rotated for another length")
    count = min(header.num_blocks, blocks.num_available)
    if count == 0:
        raise _NotUsed("the KV cache has no free block")
    if header.state_bytes and count < header.num_blocks:
        raise _NotUsed("the KV cache has no room for all of it, and its state is of no use behind less")
    sequence = _stand_in(header.token_ids[: count * header.block_size], header.salt)
    if not blocks.admit(sequence, headroom=0):  # as many blocks as are available
        raise _NotUsed("no state is free")
    try:
        known = sequence.num_computed // header.block_size
        for first, last, data in reader.slices(count):
            table = sequence.block_table[first:last]
            skipped = min(max(0, known - first), len(table))  # the cache has these already
            if skipped < len(table):
                executor.write_blocks(table[skipped:], data[skipped * header.block_bytes :])
        if header.state_bytes:
            blocks.states.forget_source(sequence)
            executor.write_state(sequence.state, reader.state())
        sequence.num_computed = len(sequence.token_ids)
        blocks.register(sequence)
    finally:
        blocks.release(sequence)
    return len(sequence.token_ids)


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
        self._last_tag = self._read(TAG_BYTES)
        if not hmac.compare_digest(self._last_tag, hmac.digest(key, bytes(start + text), "sha256")):
            raise _NotUsed("it is damaged, or was not saved by this user on this machine")
        fields = parse_json(bytes(text), "header")
        if fields.keys() != set(Header._fields):
            raise _NotUsed("it was saved by another version")
        self.header = Header(**fields)
        end = file.tell() + self.header.num_blocks * (self.header.block_bytes + TAG_BYTES)
        end += self.header.state_bytes + TAG_BYTES if self.header.state_bytes else 0
        if os.fstat(file.fileno()).st_size != end:
            raise _NotUsed(f"it is damaged: {end} bytes are expected")

    def slices(self, count: int) -> Iterator[tuple[int, int, memoryview]]:
        """(number of the first block, of the one behind the last, blocks), some at a time, checked."""
        size, step = self.header.block_bytes, _blocks_at_once(self.header)
        for first in range(0, count, step):
            last = min(first + step, count)
            data = memoryview(bytearray((last - first) * size))
            for i in range(last - first):
                self._fill(data[i * size : (i + 1) * size], f"block {first + i}")
            yield first, last, data

    def state(self) -> memoryview:
        """What comes behind all blocks, checked."""
        data = memoryview(bytearray(self.header.state_bytes))
        self._fill(data, "its state")
        return data

    def _fill(self, part: memoryview, what: str) -> None:
        if self._file.readinto(part) != len(part):
            raise _NotUsed("it is damaged: it ends too early")
        self._last_tag = _tag(self._key, self._last_tag, part)
        if not hmac.compare_digest(self._read(TAG_BYTES), self._last_tag):
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


def _tag(key: bytes, before: bytes, block: memoryview) -> bytes:
    code = hmac.new(key, before, "sha256")
    code.update(block)
    return code.digest()


def _blocks_at_once(header: Header) -> int:
    return max(1, SLICE_BYTES // max(1, header.block_bytes))


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


def _stand_in(token_ids: list[int], salt: str | None) -> Sequence:
    """A sequence that nobody runs, for the block manager."""
    request = Request("kv", tuple(token_ids), SamplingParams(), len(token_ids), (), 0.0, cache_salt=salt)
    return Sequence(-1, request, 0, 0, token_ids)
