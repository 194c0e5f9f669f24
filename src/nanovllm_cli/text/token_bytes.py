"""The bytes behind a token: what the decoder of a `tokenizers.Tokenizer` amounts to.

The library decodes a list of tokens in steps. Here they become a function of one token, which is what lets a stream be decoded
token by token. So only decoders are taken under which the text of a sequence is the texts of its tokens joined, but for one space
at its very start. Others raise UnsupportedError: BPEDecoder, whose last token differs; CTC, which leaves repeated tokens out.
Clean-up of spaces before punctuation (`clean_up_tokenization_spaces`, and WordPiece's own) is not done; it changes what a model
wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders

from nanovllm_cli.errors import UnsupportedError

SPACE_MARK = "\u2581"  # SentencePiece's visible space

Kind = Literal["byte_level", "sentencepiece", "wordpiece", "words", "other"]
Step = Callable[[str], str]


@dataclass(frozen=True)
class ByteRule:
    """How one token's text turns into bytes.

    kind: what other formats know it as. strips_space: one leading space of the whole text is not part of it (it stands for
    SentencePiece's dummy prefix). before, after: what happens to a token's text, around the place where `<0x0A>` is a byte.
    byte_level: its characters stand for bytes. swaps: single characters of the joined text.
    """

    kind: Kind
    strips_space: bool = False
    before: tuple[Step, ...] = ()
    byte_fallback: bool = False
    after: tuple[Step, ...] = ()
    byte_level: bool = False
    swaps: tuple[tuple[bytes, bytes], ...] = ()

    def to_bytes(self, token: str) -> bytes:
        raw = self._bytes(token)
        for old, new in self.swaps:
            raw = raw.replace(old, new)
        return raw

    def _bytes(self, token: str) -> bytes:
        for step in self.before:
            token = step(token)
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token that was never mapped
                return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for step in self.after:
            token = step(token)
        return token.encode()


def byte_rule(backend: tokenizers.Tokenizer) -> ByteRule:
    """The rule that the backend's decoder amounts to. Raises UnsupportedError where there is none."""
    if backend.decoder is None:
        return ByteRule("words", strips_space=True, before=(lambda token: f" {token}",))
    steps = _flatten(json.loads(backend.decoder.__getstate__())) or [{"type": "Fuse"}]
    if steps[0]["type"] == "WordPiece" and all(step["type"] == "Fuse" for step in steps[1:]):
        return ByteRule("wordpiece", strips_space=True, before=(_word_piece(steps[0].get("prefix", "##")),))
    chain = _Chain()
    for step in steps:
        if not chain.takes(step):
            raise UnsupportedError(
                f"the decoder of tokenizer.json has a step that text cannot be streamed through: {json.dumps(step)[:200]}",
                "known: ByteLevel, Metaspace, ByteFallback, Fuse, WordPiece, and Replace and Strip in their usual places",
            )
    return chain.rule()


class _Chain:
    """A decoder's steps, one after the other. Once the tokens are fused, a step sees one text."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._before: list[Step] | None = None  # those before bytes were read
        self._fused = self._byte_level = self._strips_space = False
        self._swaps: list[tuple[bytes, bytes]] = []
        self._spaces: list[str] = []  # what became a space
        self._usual = True

    def takes(self, step: Mapping[str, Any]) -> bool:
        """Adds a step. False where it has no meaning for a token by itself."""
        match step["type"]:
            case "Fuse":
                self._fused = True
                return True
            case "ByteLevel" if not self._fused and self._before is None:
                self._fused = self._byte_level = True
                return True
            case "ByteFallback" if not self._fused and self._before is None:
                self._before, self._steps = self._steps, []
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
        elif self._usual and (self._spaces == [SPACE_MARK] or (self._before is not None and not self._spaces)):
            kind = "sentencepiece"
        before, after = (self._steps, []) if self._before is None else (self._before, self._steps)
        fallback = self._before is not None
        return ByteRule(
            kind, self._strips_space, tuple(before), fallback, tuple(after), self._byte_level, tuple(self._swaps)
        )

    def _replace(self, old: str, new: str) -> bool:
        if self._fused:
            # Half a character is no character: of bytes only those of ASCII can be looked for in one token.
            if len(old) != 1 or (self._byte_level and not old.isascii()):
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
        if self._fused:
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
        if self._before is not None:  # bytes that follow each other are one token to it
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


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: a printable byte stands for itself, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_characters()
