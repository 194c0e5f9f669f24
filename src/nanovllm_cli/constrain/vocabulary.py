"""A model's tokens as llguidance reads them.

llguidance's vocabulary is the model's and one token behind it, `end_id`, which stands for the end of an answer: whether a grammar
may end is a bit of every mask, and which of the model's tokens end an answer is each request's own matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from threading import Lock

import llguidance
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
"""A mask: token 32 * i + j is bit j of word i."""

_GUARD = "\n"
_END_NAME = b"<end of the answer>"
_MAX_KNOWN = 4096
_MAX_KNOWN_CHARS = 200


class Vocabulary:
    """tokens: the bytes of every token by id, empty for what is no token. special_ids: tokens that no text spells; a grammar
    names them (`<|name|>`, `<[id]>`). encode: text to ids, special tokens in it as text. begins: whether answers begin a text
    instead of going on with a prompt; a space that the tokenizer puts there is `begins_with_space`, and no part of the text.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Collection[int],
        encode: Callable[[str], list[int]],
        *,
        begins: bool = False,
    ) -> None:
        self.tokens = tokens
        self.special_ids = frozenset(special_ids)
        self.encode = encode
        self.end_id = len(tokens)
        self.num_words = len(tokens) // 32 + 1
        self.begins_with_space = begins and self.bytes_of(next(iter(encode("a")), self.end_id)).startswith(b" ")
        self._lock = Lock()
        self._towards: dict[bytes, Words] = {}

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """Built when it is first needed: half a second for 150,000 tokens, in which no other Python code runs."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped(self)))

    def bytes_of(self, token_id: int) -> bytes:
        """Of what a model may draw: its embedding can have more rows than there are tokens, and those have none."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a tag: the token that is called so, or else its text's."""
        name = text.encode()
        if name in self._by_name:
            return [self._by_name[name]]
        return self.encode(text)

    def bytewise(self, data: bytes) -> list[int]:
        """Tokens that spell these bytes; which, is no matter to a grammar."""
        return self.tokenizer.tokenize_bytes(data)

    def towards(self, text: bytes) -> Words:
        """The tokens with which `text` may begin: beginnings of it, and what begins with it."""
        with self._lock:
            if text not in self._towards:
                ids = [i for i, token in enumerate(self.tokens) if token and text.startswith(token)]
                ids += [i for i, token in enumerate(self.tokens) if token.startswith(text)]
                self._towards[text] = self.mask(ids)
            return self._towards[text]

    def mask(self, token_ids: Collection[int]) -> Words:
        """Of these tokens and no other; ids outside the vocabulary are nothing."""
        bits = np.zeros(self.num_words * 32, dtype=np.bool_)
        bits[[i for i in token_ids if 0 <= i < len(self.tokens)]] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @cached_property
    def everything(self) -> Words:
        """All tokens, but not the ids that are none."""
        return self.mask([i for i, token in enumerate(self.tokens) if token])

    @cached_property
    def _by_name(self) -> dict[bytes, int]:
        """Tokens that a person sees as a tag; of equal ones the last, as added tokens come last."""
        return {token: i for i, token in enumerate(self.tokens) if token[:1] in b"<[" and token[-1:] in b">]" and len(token) > 2}


class _Wrapped:
    """What `llguidance.TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_id
        self.tokens = [*vocabulary.tokens, _END_NAME]
        self.special_token_ids = [*sorted(vocabulary.special_ids), vocabulary.end_id]
        self._encode = vocabulary.encode
        # llguidance asks in every place where a text is forced, and grammars force the same texts again and again.
        self._known_ids = lru_cache(_MAX_KNOWN)(self._ids)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self._known_ids(text) if len(text) <= _MAX_KNOWN_CHARS else self._ids(text))

    def _ids(self, text: str) -> list[int]:
        """Tokens that spell exactly this text: SentencePiece would put a space before it."""
        data, ids = text.encode(), self._encode(text)
        if self._spelt(ids) != data:
            ids = self._encode(_GUARD + text)
            while ids and self._spelt(ids) != data:
                del ids[0]
        return ids or self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """The same of a tokenizer that takes spaces and line breaks away, as T5's does: the longest tokens, from the beginning
        on; none where a part of it is no token."""
        found, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest_token), place, -1)
            token_id = next((own for end in ends if (own := self._by_bytes.get(data[place:end])) is not None), None)
            if token_id is None:
                return []
            found.append(token_id)
            place += len(self.tokens[token_id])
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    def _spelt(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[i] for i in ids])


def byte_vocabulary(names: Collection[str] = ()) -> Vocabulary:
    """A token for every byte, and special ones of these names: enough to see whether a grammar compiles where no model is at
    hand."""
    tokens = [*(bytes([i]) for i in range(256)), *(name.encode() for name in names)]
    return Vocabulary(tokens, range(256, len(tokens)), lambda text: list(text.encode()))
