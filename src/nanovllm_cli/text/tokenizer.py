"""Text to token ids and back, over one `tokenizers.Tokenizer`, wherever its vocabulary came from.

Here: encoding with control tokens read or left as text, decoding, the bytes of a token, the special ids. Building the
vocabulary is in `tokenizer_files.py` (Hugging Face folders, SentencePiece models) and `gguf_tokenizer.py`; decoding a
stream is in `detokenizer.py`. Which file a model's tokenizer is in is decided elsewhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Regex as TokenizerRegex

from nanovllm_cli.errors import CheckpointError, PromptTooLongError, UnsupportedError, UsageError
from nanovllm_cli.text.token_bytes import byte_rule
from nanovllm_cli.text.vocabulary import FOREIGN, TokenizerParts, end_token_ids, guard_library, looks_like_control

_IDS = 1 << 32  # that the library can be asked for
_PROBED_CHARS = 16
"""For each token that fits: few texts have so many characters a token."""


class Pair(NamedTuple):
    """Two texts that are read together. second: where the second text's own ids begin; a model that tells texts apart by token
    types has type 0 before and type 1 from there on, its end included."""

    ids: list[int]
    second: int


class Placed(NamedTuple):
    """A text's own tokens. places: where in the text the characters of each are; several may share one. words: which one each is
    a part of, where the vocabulary is one of words and their parts (WordPiece); else None."""

    ids: list[int]
    places: list[tuple[int, int]]
    words: list[int | None]


class Tokenizer:
    """A vocabulary with its rules. Immutable after construction, safe to share between threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        self._prefix_ids, self._suffix_ids = list(parts.prefix_ids), list(parts.suffix_ids)
        self._between_ids = list(parts.between_ids)
        self._num_known = parts.num_known
        self._rule = byte_rule(parts.backend)
        added = dict(sorted(parts.backend.get_added_tokens_decoder().items()))
        self._added: dict[int, AddedToken] = added
        around = (*parts.prefix_ids, *parts.suffix_ids)
        # Of a vocabulary whose ids have gaps there are others above it: to look at each takes a tenth of a second.
        size = parts.backend.get_vocab_size(True) if parts.num_known is None else parts.num_known
        self.vocab_size = max(size, *(i + 1 for i in (-1, *added, *around)))
        self._bytes: dict[int, bytes] = {}
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = parts.bos_id, parts.eos_id, parts.pad_id, parts.unk_id
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        named = {token.content: token_id for token_id, token in added.items()}
        ends = end_token_ids(named, [*([] if parts.eos_id is None else [parts.eos_id]), *parts.end_ids])
        self.eos_ids: tuple[int, ...] = ends
        # Texts that `parse_special` turns into control ids; a user's text must not be read for these.
        self.control_tokens: Mapping[str, int] = {
            text: token_id
            for text, token_id in named.items()
            if token_id in self.special_ids or token_id in ends or looks_like_control(text)
        }
        # Unguessable names by which `_plain` knows the control tokens.
        nonce = secrets.token_hex(12)
        self._aliases = {text: f"\ue000{nonce}.{position}\ue001" for position, text in enumerate(self.control_tokens)}
        self.chat_templates: dict[str, str] = dict(parts.chat_templates)
        self.languages = parts.languages

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a Hugging Face folder: `tokenizer.json`, else a SentencePiece model, else Mistral's
        own file, else vocab and merges.

        Raises CheckpointError where the files are missing, broken or contradict each other.
        """
        from nanovllm_cli.text.tokenizer_files import load_folder

        return cls(load_folder(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata: its keys to plain Python values, arrays as lists.

        Raises CheckpointError where the arrays contradict each other, UnsupportedError for an unknown model or
        pre-tokenizer.
        """
        from nanovllm_cli.text.gguf_tokenizer import load_gguf

        return cls(load_gguf(metadata))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: with the ids that the vocabulary puts around a text (BOS, rarely EOS). `parse_special`:
        control tokens written in the text become their ids; without it they are ordinary characters. Raises UsageError
        for a text that is not valid Unicode.
        """
        ids = self._known(_run(self._backend if parse_special else self._plain, text))
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[list[int]]:
        """`encode` of every text, in parallel."""
        encoded = _run_all(self._backend if parse_special else self._plain, texts)
        return [[*self._prefix_ids, *self._known(ids), *self._suffix_ids] for ids in encoded]

    def _known(self, ids: list[int]) -> list[int]:
        """The same with the unknown token for pieces that the model has no row for."""
        if self._num_known is None or self.unk_id is None or max(ids, default=0) < self._num_known:
            return ids
        return [i if i < self._num_known else self.unk_id for i in ids]

    @property
    def reads_pairs(self) -> bool:
        """Whether the vocabulary has something to put between two texts: `encode_pair`."""
        return bool(self._between_ids)

    def encode_pair(self, first: str, second: str) -> Pair:
        """Ids of two texts that a model reads together, with what the vocabulary puts around and between them.

        Control tokens written in the texts are ordinary characters. Raises UnsupportedError for a vocabulary that parts no texts,
        UsageError for a text that is not valid Unicode.
        """
        if not self._between_ids:
            raise UnsupportedError("the tokenizer has nothing to put between two texts", "take a model that reads pairs of texts")
        one, other = map(self._known, _run_all(self._plain, [first, second]))
        before = [*self._prefix_ids, *one, *self._between_ids]
        return Pair([*before, *other, *self._suffix_ids], len(before))

    def placed(self, text: str) -> Placed:
        """A text's ids, without what the vocabulary puts around it, with where each stands. Control tokens written in it are
        ordinary characters. Raises UsageError for a text that is not valid Unicode."""
        (found,) = _encoded(self._plain.encode_batch, [text])
        has_words = isinstance(self._backend.model, models.WordPiece)
        return Placed(self._known(found.ids), found.offsets, found.word_ids if has_words else [None] * len(found.ids))

    def around(self, ids: Sequence[int]) -> list[int]:
        """With what the vocabulary puts around a text."""
        return [*self._prefix_ids, *ids, *self._suffix_ids]

    def second_text(self, ids: Sequence[int]) -> int:
        """Where the second text's own ids begin, of a pair's; 0 of a text alone."""
        size = len(self._between_ids)
        parted = (i + size for i in range(len(ids) - size) if [*ids[i : i + size]] == self._between_ids)
        return next(parted, 0) if size else 0

    def truncated(self, ids: Sequence[int], limit: int) -> list[int]:
        """The first `limit` of a text's ids, what the vocabulary puts behind a text still behind them."""
        ends = self._suffix_ids[:limit] if len(ids) > limit else []
        return [*ids[: limit - len(ends)], *ends]

    def encode_guarded(self, text: str, plain_at: Collection[int]) -> list[int]:
        """Ids of `text` alone, where a control token that begins at an offset in `plain_at` stays text.

        The same ids as `encode` where no control token begins at such an offset.
        """
        pieces: list[str] = []
        guarded, start, position = False, 0, 0
        while match := self._control_pattern.search(text, position):
            if match.start() in plain_at:
                guarded, position = True, match.start() + 1
                continue
            pieces += [text[start : match.start()], self._aliases[match.group()]]
            start = position = match.end()
        if not guarded:
            return self.encode(text, add_special_tokens=False)
        pieces.append(text[start:])
        return self._known([self._id_of_alias.get(token_id, token_id) for token_id in _run(self._plain, "".join(pieces))])

    def check_fits(self, text: str, limit: int) -> None:
        """Raises PromptTooLongError, with a lower bound, for a text whose beginning alone has twice as many tokens: reading it
        all would be work for nothing. Others may be too long as well."""
        beginning = limit * _PROBED_CHARS
        if len(text) > beginning and (count := len(_run(self._backend, text[:beginning]))) >= 2 * limit:
            raise PromptTooLongError(count, limit)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.id_to_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def id_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            known = self._bytes[token_id] = self._rule.to_bytes(token)
        return known

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < _IDS else None
        return None if token is None else token.removeprefix(FOREIGN)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token written as the vocabulary writes it."""
        known = self._backend.token_to_id(token)
        return self._backend.token_to_id(FOREIGN + token) if known is None else known

    @cached_property
    def longest_token(self) -> int:
        """Its characters: a text of n characters has n / longest_token tokens at least, but for what a normalizer shortens."""
        return max(map(len, self._backend.get_vocab(True)))

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the very start of a text is the vocabulary's own and not part of it."""
        return self._rule.strips_space

    @property
    def bos_token(self) -> str:
        """The text of BOS, empty where there is none: what a chat template is given."""
        return "" if self.bos_id is None else self.id_to_token(self.bos_id) or ""

    @property
    def eos_token(self) -> str:
        """The text of EOS, empty where there is none."""
        return "" if self.eos_id is None else self.id_to_token(self.eos_id) or ""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What `encode` puts before a text: BOS, of most that put anything."""
        return tuple(self._prefix_ids)

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` puts BOS before a text."""
        return self.bos_id is not None and self.bos_id in self._prefix_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no plain text is made of: control tokens, and others that are flagged special."""
        return self.special_ids | frozenset(self.control_tokens.values())

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.control_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _id_of_alias(self) -> dict[int, int]:
        ids = {}
        for text, alias in self._aliases.items():
            alias_id = self._plain.token_to_id(alias)
            assert alias_id is not None
            ids[alias_id] = self.control_tokens[text]
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same vocabulary (shared, not copied), blind to control tokens but for their aliases."""
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if cuts := [cut for cut in (self._backend.pre_tokenizer, self._spelling_cut) if cut is not None]:
            plain.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
        plain.encode_special_tokens = True  # leaves tokens flagged special as text
        control = set(self.control_tokens.values())
        plain.add_tokens([_like(token, token.content, token_id in control) for token_id, token in self._added.items()])
        if any(plain.token_to_id(token.content) != token_id for token_id, token in self._added.items()):
            raise CheckpointError("the added tokens of the tokenizer contradict its vocabulary")
        plain.add_tokens(
            [_like(self._added[self.control_tokens[text]], alias, False) for text, alias in self._aliases.items()]
        )
        return plain

    @property
    def _spelling_cut(self) -> pre_tokenizers.PreTokenizer | None:
        """Cuts text behind the first character of what spells a control token, for models that take a piece by its spelling.
        Merges don't make one, so those of BPE need none of this."""
        rests: dict[str, list[str]] = {}
        for text in self.control_tokens:
            if len(text) > 1:
                rests.setdefault(_escaped(text[0]), []).append(_escaped(text[1:]))
        if not rests or isinstance(self._backend.model, models.BPE):
            return None
        spelled = "|".join(f"{first}(?={'|'.join(others)})" for first, others in rests.items())
        return pre_tokenizers.Split(TokenizerRegex(spelled), behavior="merged_with_previous")


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def _like(token: AddedToken, content: str, special: bool) -> AddedToken:
    """`token`'s way of matching, under another name."""
    return AddedToken(
        content,
        special=special,
        normalized=token.normalized and content == token.content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _run(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """As a batch of one: the library's `encode` holds Python's lock all the while, seconds for a long text."""
    return _run_all(backend, [text])[0]


def _run_all(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in _encoded(backend.encode_batch_fast, texts)]


def _encoded(encode: Callable[..., list[tokenizers.Encoding]], texts: Sequence[str]) -> list[tokenizers.Encoding]:
    if not all(isinstance(text, str) for text in texts):  # a pair of texts would be taken as well
        _check_texts(texts)
    with guard_library("the tokenizer"):
        try:
            return encode(list(texts), add_special_tokens=False)
        except TypeError:
            _check_texts(texts)
            raise


def _check_texts(texts: Iterable[object]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}",
                "send valid Unicode; JSON escapes of surrogates come in pairs",
            ) from None
