"""Which full blocks of tokens have their K and V in the cache, found by what they hold.

A block is known by a chain: its digest covers its tokens, the images that they stand for, and the digest of the block before it,
the first one the request's salt and adapters. Digests are keyed with a secret of the process, so nobody outside can aim for a
collision; should one happen anyway, the entry's tokens, salt and parent are compared and it is a miss. This file knows digests
and block numbers; whether a block is in use, free or evicted is `block_manager.py`'s business.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nanovllm_cli.engine.sequence import Salt, Sequence
from nanovllm_cli.vision_spec import PlacedImage

DIGEST_BYTES = 16
ROOT_UID = 0
TOKEN_BYTES = 8


class Entry(NamedTuple):
    """One findable block. uid: never used twice, so that `parent_uid` names exactly one chain of tokens. tokens: int64 each, in
    this machine's order, and digests of the images that are among them."""

    uid: int
    parent_uid: int
    digest: bytes
    tokens: bytes
    salt: Salt
    block: int
    has_images: bool


class PrefixCache:
    """Digest -> entry, and block -> entry. Every operation is O(1) per block."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._key = hashlib.sha256(secret).digest() if secret else secrets.token_bytes(32)
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._next_uid = ROOT_UID + 1

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_made(self) -> int:
        """Entries that there ever were."""
        return self._next_uid - ROOT_UID - 1

    def entries(self) -> Mapping[int, Entry]:
        """By their blocks."""
        return self._by_block

    def match(self, sequence: Sequence, limit: int) -> list[Entry]:
        """Entries of the first blocks of `sequence`, as far as they are known without a gap, at most `limit`."""
        found: list[Entry] = []
        parent_uid = ROOT_UID
        for index in range(limit):
            entry = self._find(sequence, index, parent_uid)
            if entry is None:
                break
            found.append(entry)
            parent_uid = entry.uid
        return found

    def may_know(self, sequence: Sequence, index: int) -> bool:
        """Whether a walk to block `index` of `sequence` can be worth its time."""
        return self._digest(sequence, index) in self._by_digest

    def register(self, sequence: Sequence, num_blocks: int, is_whole: Callable[[int], bool]) -> list[int]:
        """Makes the first `num_blocks` blocks of `sequence` findable; where an equal block already is, that one stays, unless it
        is not whole, and the sequence's is.

        Returns blocks that lost their entry to a newer one (a colliding digest, an orphan of an evicted chain, or not whole).
        """
        ousted: list[int] = []
        parent_uid = sequence.last_uid
        for index in range(sequence.num_registered, num_blocks):
            entry = self._find(sequence, index, parent_uid)
            if entry is None:
                digest, block = self._digest(sequence, index), sequence.block_table[index]
                rival = self._by_digest.get(digest)
                if rival is not None:
                    self.forget(rival.block)
                    ousted.append(rival.block)
                tokens = self._tokens(sequence, index)
                has_images = len(tokens) > self._block_size * TOKEN_BYTES
                entry = Entry(self._next_uid, parent_uid, digest, tokens, sequence.salt, block, has_images)
                self._next_uid += 1
                self._by_digest[digest] = self._by_block[block] = entry
            elif not is_whole(entry.block) and is_whole(own := sequence.block_table[index]):
                ousted.append(entry.block)
                del self._by_block[entry.block]
                entry = self._by_digest[entry.digest] = self._by_block[own] = entry._replace(block=own)
            parent_uid = entry.uid
        sequence.num_registered, sequence.last_uid = num_blocks, parent_uid
        return ousted

    def forget(self, block: int) -> None:
        """The block's content is no longer to be found (evicted, or not to be trusted). Unknown blocks are fine."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_digest[entry.digest]

    def _find(self, sequence: Sequence, index: int, parent_uid: int) -> Entry | None:
        entry = self._by_digest.get(self._digest(sequence, index))
        if entry is None or entry.parent_uid != parent_uid or entry.salt != sequence.salt:
            return None
        return entry if entry.tokens == self._tokens(sequence, index) else None

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        digests = sequence.block_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else self._root(sequence.salt)
            digests.append(self._hash(parent + self._tokens(sequence, len(digests))))
        return digests[index]

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        start = index * self._block_size
        tokens = array("q", sequence.token_ids[start : start + self._block_size]).tobytes()
        images = sequence.request.images_within(start, start + self._block_size)
        return tokens + b"".join([each.image.digest + _seen_with(each, sequence.token_ids) for each in images])

    def _root(self, salt: Salt) -> bytes:
        text, lora = salt
        root = self._hash(b"no salt" if text is None else b"salt:" + text.encode("utf-8", "surrogatepass"))
        return self._hash(root + array("d", lora).tobytes()) if lora else root

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()


def _seen_with(image: PlacedImage, token_ids: list[int]) -> bytes:
    """Where it begins, or lies on a canvas or in time, and what else its tokens see."""
    seen = token_ids[image.end - image.behind : image.end]
    return array("q", [image.start, *(image.canvas or ()), *(image.moment or ()), *seen]).tobytes()
