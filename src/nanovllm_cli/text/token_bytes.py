"""The bytes behind a token: what the decoder of a `tokenizers.Tokenizer` amounts to.

The library decodes a list of tokens in steps. Here they become a function of one token, which is what lets a stream be decoded
token by token. So only decoders are taken under which the text of a sequence is the texts of its tokens joined, but for one space
at its very start. Others raise UnsupportedError: BPEDecoder, whose last token differs; CTC, which leaves repeated tokens out.
Clean-up of spaces before punctuation (`clean_up_tokenization_spaces`, and WordPiece's own) is not done; it changes what a model
wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders

from nanovllm_cli.errors import UnsupportedError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library takes a sign for a digit

SPACE_MARK = "\u2581"  # SentencePiece's visible space

Kind = Literal["byte_level", "sentencepiece", "wordpiece", "words", "other"]
Step = Callable[[str], str]


@dataclass(frozen=True)
class ByteRule:
    """How one token's text turns into bytes.

    kind: what other formats know it as. strips_space: one leading space of the whole text is not part of it (it stands for
    SentencePiece's dummy prefix). steps: what happens to a token's text. byte_fallback: `<0x0A>` is a byte then. byte_level: its
    characters stand for bytes. swaps: single characters of what there is then, of bytes too.
    """

    kind: Kind
    strips_space: bool = False
    steps: tuple[Step, ...] = ()
    byte_fallback: bool = False
    byte_level: bool = False
    swaps: tuple[tuple[bytes, bytes], ...] = ()

    def to_bytes(self, token: str) -> bytes:
        raw = self._bytes(token)
        for old, new in self.swaps:
            raw = raw.replace(old, new)
        return raw

    def _bytes(self, token: str) -> bytes:
        for step in self.steps:
            token = step(token)
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token that was never mapped
                return token.encode()
        if self.byte_fallback and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        return token.encode()


def byte_rule(backend: tokenizers.Tokenizer) -> ByteRule:
    """The rule that the backend's decoder amounts to. Raises UnsupportedError where there is none."""
    if backend.decoder is None:
        return ByteRule("words", strips_space=True, steps=(lambda token: f" {token}",))
    steps = _flatten(json.loads(backend.decoder.__getstate__())) or [{"type": "Fuse"}]
    if steps[0]["type"] == "WordPiece" and all(step["type"] == "Fuse" for step in steps[1:]):
        return ByteRule("wordpiece", strips_space=True, steps=(_word_piece(steps[0].get("prefix", "##")),))
    chain = _Chain()
    for step in steps:
        if not chain.takes(step):
            raise UnsupportedError(
                f"the decoder of tokenizer.json has a step that text cannot be streamed through: {json.dumps(step)[:200]}",
                "known: ByteLevel, Metaspace, ByteFallback, Fuse, WordPiece, and Replace and Strip in their usual places",
            )
    return chain.rule()


class _Chain:
    """A decoder's steps, one after the other. Once the tokens are fused, a step sees one text; once bytes are read, those that
    follow each other are one token to it."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._fused = self._byte_level = self._byte_fallback = self._strips_space = False
        self._swaps: list[tuple[bytes, bytes]] = []
        self._spaces: list[str] = []  # what became a space
        self._usual = True

    def takes(self, step: Mapping[str, Any]) -> bool:
        """Adds a step. False where it has no meaning for a token by itself."""
        match step["type"]:
            case "Fuse":
                self._fused = True
                return True
            case "ByteLevel" if not self._fused and not self._byte_fallback:
                self._fused = self._byte_level = True
                return True
            case "ByteFallback" if not self._fused and not self._byte_fallback:
                self._byte_fallback = True
                return True
            case "Strip":
                return self._strip(step["content"], step["start"], step["stop"])
            case "Metaspace" if not self._fused and not self._strips_space:
                self._strips_space = step.get("prepend_scheme", "always") != "never"
                return self._replace(step["replacement"], " ")
            case "Replace" if not self._strips_space:
                if "String" in step["pattern"]:
                    return self._replace(step["pattern"]["String"], step["content"])
                return self._replace_matches(step["pattern"]["Regex"], step["content"])
        return False

    def rule(self) -> ByteRule:
        kind: Kind = "other"
        if self._byte_level:
            kind = "byte_level" if self._usual and not self._spaces else "other"
        elif self._usual and (self._spaces == [SPACE_MARK] or (self._byte_fallback and not self._spaces)):
            kind = "sentencepiece"
        steps, swaps = tuple(self._steps), tuple(self._swaps)
        return ByteRule(kind, self._strips_space, steps, self._byte_fallback, self._byte_level, swaps)

    def _replace(self, old: str, new: str) -> bool:
        if self._fused or self._byte_fallback:
            # Half a character is no character: of bytes only those of ASCII can be looked for in one token. The mark is a token
            # of every vocabulary that has it, and not spelled in bytes.
            in_bytes = self._byte_level or (self._byte_fallback and old != SPACE_MARK)
            if len(old) != 1 or (in_bytes and not old.isascii()):
                return False
            self._swaps.append((old.encode(), new.encode()))
        else:
            self._steps.append(lambda token: token.replace(old, new))
        if new == " ":
            self._spaces.append(old)
        else:
            self._usual = False
        return True

    def _replace_matches(self, pattern: str, new: str) -> bool:
        """In the library's dialect, by the library."""
        if self._fused or self._byte_fallback:
            return False
        replace = decoders.Replace(Regex(pattern), new)
        self._steps.append(lambda token: replace.decode([token]))
        self._usual = False
        return True

    def _strip(self, char: str, start: int, stop: int) -> bool:
        if start == stop == 0:
            return True
        if self._fused:
            usual = (char, start, stop) == (" ", 1, 0) and not self._strips_space
            self._strips_space = True
            return usual
        if self._byte_fallback:
            return False
        self._steps.append(lambda token: _stripped(token, char, start, stop))
        self._usual = False
        return True


def _stripped(token: str, char: str, start: int, stop: int) -> str:
    begin = len(token[:start]) - len(token[:start].lstrip(char))
    end = len(token) - (len(token[-stop:]) - len(token[-stop:].rstrip(char)) if stop else 0)
    return token[begin:end]


def _word_piece(prefix: str) -> Step:
    return lambda token: token[len(prefix) :] if token.startswith(prefix) else f" {token}"


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state.get("type") == "Sequence":
        return [step for part in state["decoders"] for step in _flatten(part)]
    return [state]


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: a printable one stands for itself, the others for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF_CHAR = {character: byte for byte, character in enumerate(byte_characters())}
