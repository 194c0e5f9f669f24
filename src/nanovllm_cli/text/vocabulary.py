"""What the ids of a vocabulary mean: the bytes behind a token, the tokens that end a turn, the tokens that are control.

The bytes follow from the decoder that a `tokenizers.Tokenizer` carries. Only decoders under which the text of a
sequence is the texts of its tokens joined are modelled (byte-level BPE, SentencePiece with and without byte fallback,
WordPiece, plain words): that is what lets a stream be decoded token by token. Clean-up of spaces before punctuation
(`clean_up_tokenization_spaces`) is not done; it changes what a model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from nanovllm_cli.errors import CheckpointError, NanovllmError

SPACE_MARK = "\u2581"  # SentencePiece's visible space

# Tokens that end an answer in one of the known prompt formats; llama.cpp keeps the same list ("end of generation").
END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
        "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<|file_sep|>",
    }
)  # fmt: skip


@dataclass
class TokenizerParts:
    """What a loader found: a backend with every added token, and the roles of some ids.

    `prefix_ids` and `suffix_ids` go around a text that is encoded with its special tokens; the backend's own
    post-processor is not used. `end_ids` are those that the files declare as ends of an answer.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    end_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)


def end_token_ids(control: Mapping[str, int], declared: list[int]) -> tuple[int, ...]:
    """Ids that end an answer: what the files declare, first, then what the known formats end with.

    `control` maps the vocabulary's added tokens to ids. Two formats use an end token of another format inside an
    answer: with `<|return|>` and `<|call|>`, `<|end|>` closes only a channel; with `<|tool_response>`, `</s>` is a
    plain tag.
    """
    found = END_TOKENS & control.keys()
    calls = bool({"<|call|>", "<|calls|>"} & found)
    if calls and ("<|return|>" in found or "<|flush|>" in found):
        found -= {"<|end|>"}
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return tuple(dict.fromkeys([*declared, *sorted(control[text] for text in found)]))


def looks_like_control(text: str) -> bool:
    """`<|…|>`, in ASCII or in DeepSeek's full-width bars: control in every known format, whatever the files flag."""
    return len(text) > 4 and text[:2] in ("<|", "<\uff5c") and text[-2:] in ("|>", "\uff5c>")


@contextmanager
def guard_library(what: str) -> Iterator[None]:
    """Whatever the tokenizer library raises over what a model's files made of it is that model's broken file.

    Its panics do not derive from Exception.
    """
    try:
        yield
    except (NanovllmError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(f"{what} is broken: {reason}", "download the model again, or use another copy") from error


@dataclass(frozen=True)
class ByteRule:
    """How one token's text turns into bytes.

    `strips_space`: one leading space of the whole text is not part of it (it stands for SentencePiece's dummy prefix).
    """

    kind: str  # "byte_level" | "sentencepiece" | "wordpiece" | "words" | "plain"
    byte_fallback: bool = False
    strips_space: bool = False
    space_mark: str = SPACE_MARK
    prefix: str = "##"

    def to_bytes(self, token: str) -> bytes:
        if self.kind == "byte_level":
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token that was never mapped
                return token.encode()
        if self.kind == "sentencepiece":
            if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace(self.space_mark, " ").encode()
        if self.kind == "wordpiece":
            return token[len(self.prefix) :].encode() if token.startswith(self.prefix) else f" {token}".encode()
        return f" {token}".encode() if self.kind == "words" else token.encode()


def byte_rule(backend: tokenizers.Tokenizer) -> ByteRule:
    """The rule that the backend's decoder amounts to."""
    if backend.decoder is None:
        return ByteRule("words", strips_space=True)
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    by_type = {step.get("type"): step for step in steps}
    if "ByteLevel" in by_type:
        return ByteRule("byte_level")
    if "WordPiece" in by_type:
        return ByteRule("wordpiece", strips_space=True, prefix=by_type["WordPiece"].get("prefix", "##"))
    fallback = "ByteFallback" in by_type
    if "Metaspace" in by_type:
        state = by_type["Metaspace"]
        strips = state.get("prepend_scheme", "always") != "never"
        return ByteRule("sentencepiece", fallback, strips, state.get("replacement", SPACE_MARK))
    to_space = [step for step in steps if step.get("type") == "Replace" and step["content"] == " "]
    marks = [step["pattern"].get("String") for step in to_space]
    strip = by_type.get("Strip", {})
    strips = strip.get("content") == " " and strip.get("start", 0) > 0
    if fallback or (marks and marks[0]):
        return ByteRule("sentencepiece", fallback, strips, marks[0] if marks and marks[0] else SPACE_MARK)
    return ByteRule("plain", strips_space=strips)


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
