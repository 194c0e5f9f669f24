"""RWKV's "world" vocabulary: bytes, of which a text is cut into the longest ones that are tokens, from its beginning on.

Folders have it as a text file, a token a line: its id, the token as a literal of Python's (of a string, or of bytes), and how
many bytes it has. GGUF files have what such bytes look like within a literal. Id 0 is in neither: it ends texts. The library that
others' vocabularies are for gets them as tokens, by the characters that stand for bytes in GPT-2's.

Not covered: vocabularies of earlier RWKVs (tokenizer.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import tokenizers
from tokenizers import AddedToken, Token, decoders, models, pre_tokenizers

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.text import byte_ranks
from nanovllm_cli.text.byte_ranks import MAX_TOKENS
from nanovllm_cli.text.token_bytes import byte_characters
from nanovllm_cli.text.vocabulary import TokenizerParts, guard_library

FILE = "rwkv_vocab_v20230424.txt"
END = "<|rwkv_tokenizer_end_of_text|>"
"""What its publisher's folders call the token that ends texts."""
MAX_TOKEN_BYTES = 1 << 10
_BEGINNING = 4
"""Characters by which longer pieces are found."""
_LINE = re.compile(r"(\d{1,7}) (b?)('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\") (\d{1,4})")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_CHARACTERS = byte_characters()
_broken = partial(byte_ranks.broken, FILE)


class LongestPieces:
    """A pre-tokenizer for `PreTokenizer.custom`, of texts whose characters stand for bytes. It gives tokens at once: cut into
    pieces that the library looks up, a text takes three times as long. ids: of the pieces that there are, of all single
    characters too. A step takes as many look-ups as pieces that begin with the same four characters have lengths, and three for
    shorter ones."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._pieces = {piece: (i, len(piece.encode())) for piece, i in ids.items()}
        lengths: dict[str, set[int]] = {}
        for piece in ids:
            if len(piece) > _BEGINNING:
                lengths.setdefault(piece[:_BEGINNING], set()).add(len(piece))
        self._lengths = {beginning: sorted(found, reverse=True) for beginning, found in lengths.items()}

    def pre_tokenize(self, text: Any) -> None:
        """What the library calls, with a PreTokenizedString, of which what is a token already stays."""
        text.tokenize(self._tokens)

    def _tokens(self, text: str) -> list[Token]:
        found, begin, place = [], 0, 0
        for end in self.ends(text):
            piece = text[begin:end]
            token_id, num_bytes = self._pieces[piece]
            found.append(Token(token_id, piece, (place, place + num_bytes)))
            begin, place = end, place + num_bytes
        return found

    def ends(self, text: str) -> list[int]:
        """Where the pieces of a text end."""
        found, end, pieces, lengths, all_of_it = [], 0, self._pieces, self._lengths, len(text)
        while end < all_of_it:
            beginning = text[end : end + _BEGINNING]
            for length in lengths.get(beginning, ()):
                if text[end : end + length] in pieces:
                    end += length
                    break
            else:
                while beginning not in pieces and len(beginning) > 1:
                    beginning = beginning[:-1]
                end += len(beginning)
            found.append(end)
        return found


def read_world(text: str, config: Mapping[str, Any], roles: Mapping[str, Any]) -> TokenizerParts:
    """text: the file's. config, roles: tokenizer_config.json, and with it special_tokens_map.json, which name id 0, and what ends
    an answer: often an empty line, which stays a token like others. Raises CheckpointError where the file is broken."""
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if len(lines) >= MAX_TOKENS:
        raise _broken(f"it has more than {MAX_TOKENS} tokens")
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        token = None if found is None else _literal(found[3][1:-1], raw=bool(found[2]))
        if found is None or token is None or len(token) != int(found[4]) or int(found[1]) in tokens:
            raise _broken(f"its line {number} is not a token by its id, its literal and its length")
        tokens[int(found[1])] = token
    if not tokens or sorted(tokens) != [*range(1, len(tokens) + 1)]:
        raise _broken("its ids are not 1, 2, …")
    parts = TokenizerParts(build(tokens, {_name_of_end(config, roles): 0}, FILE), bos_id=0, eos_id=0, pad_id=0, is_world=True)
    by_bytes = {token: i for i, token in tokens.items()}
    declared = _content(roles.get("eos_token"))
    own = None if declared is None else by_bytes.get(declared.encode("utf-8", "replace"))
    parts.end_ids = [0] if own is None else [own, 0]
    return parts


def without_known(backend: tokenizers.Tokenizer, listed: Any) -> Any:
    """Of added tokens, by text or by id, those that are no tokens of the vocabulary: the library that has written them gives each
    a number of its own, which its model has never seen."""
    if not isinstance(listed, dict):
        return listed
    texts = {key: _content(value) if isinstance(value, dict) else key for key, value in listed.items()}
    vocab = backend.get_vocab(False)
    return {key: value for key, value in listed.items() if spelled((texts[key] or "").encode("utf-8", "replace")) not in vocab}


def id_of(backend: tokenizers.Tokenizer, text: str) -> int | None:
    """Of the token that a text is."""
    own = backend.token_to_id(text)
    return backend.token_to_id(spelled(text.encode("utf-8", "replace"))) if own is None else own


def build(
    tokens: Mapping[int, bytes], special: Mapping[str, int], file: str, others: Mapping[str, int] | None = None
) -> tokenizers.Tokenizer:
    """tokens: by their ids; special: names of those that end a text, or the like; others: of these and of what no text becomes.
    Raises CheckpointError for a vocabulary that can't spell all texts, or has a token twice."""
    ids = {spelled(token): i for i, token in tokens.items()}
    if len(ids) < len(tokens) or not all(0 < len(token) <= MAX_TOKEN_BYTES for token in tokens.values()):
        why = f"it has a token twice, or one that is empty or has more than {MAX_TOKEN_BYTES} bytes"
        raise byte_ranks.broken(file, why)
    if missing := [byte for byte, character in enumerate(_CHARACTERS) if character not in ids]:
        raise byte_ranks.broken(file, f"no token is the byte {missing[0]}")
    if clash := [name for name in others or special if name in ids]:
        raise byte_ranks.broken(file, f"it has {clash[0][:40]!r} twice")
    with guard_library(file):
        backend = tokenizers.Tokenizer(models.BPE(ids | dict(others or special), [], ignore_merges=True))
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        longest = pre_tokenizers.PreTokenizer.custom(LongestPieces(ids))
        backend.pre_tokenizer = pre_tokenizers.Sequence([spelling, longest])
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return backend


def spelled(token: bytes) -> str:
    """By the characters that stand for bytes."""
    return "".join([_CHARACTERS[byte] for byte in token])


def escaped(token: bytes) -> str:
    """As GGUF files have it: within a literal of bytes."""
    return repr(token)[2:-1]


def unescaped(text: str) -> bytes:
    """The way back, as llama.cpp reads it. Raises CheckpointError for one that ends in the middle."""
    found = _literal(text, raw=True, lenient=True)
    if found is None:
        raise CheckpointError(f"tokenizer.ggml.tokens holds {text[:40]!r}, which is no escaped bytes", "download the model again")
    return found


def _name_of_end(config: Mapping[str, Any], roles: Mapping[str, Any]) -> str:
    listed = config.get("added_tokens_decoder")
    entries = [listed.get("0") if isinstance(listed, dict) else None, roles.get("bos_token"), roles.get("pad_token")]
    return next(filter(None, map(_content, entries)), END)


def _content(value: Any) -> str | None:
    """A token is written as a string or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _literal(text: str, *, raw: bool, lenient: bool = False) -> bytes | None:
    """What stands within a literal's quotation marks; None for what Python would not take, or has no need to write. raw: of
    bytes. lenient: any character may stand behind a backslash for itself, and others than those of ASCII for their UTF-8."""
    found, position = bytearray(), 0
    for escape in _ESCAPE.finditer(text):
        between, kind = text[position : escape.start()], escape[1]
        position = escape.end()
        if "\\" in between:
            return None
        found += between.encode("utf-8", "surrogatepass")
        if len(kind) > 1:
            code = int(kind[1:], 16)
            if (raw and kind[0] != "x") or code > 0x10FFFF or 0xD800 <= code < 0xE000:
                return None
            found += bytes([code]) if raw else chr(code).encode()
        elif (letter := _LETTERS.get(kind, kind if lenient and kind not in "x" else None)) is not None:
            found += letter.encode()
        else:
            return None
    rest = text[position:]
    if "\\" in rest or (raw and not lenient and not text.isascii()):
        return None
    return bytes(found + rest.encode("utf-8", "surrogatepass"))
