"""Decoders of tokenizer.json: a stream is what the library's own decoder makes of all the tokens, or the file is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.tokenizer import Tokenizer

WORDS = [
    "a", "b", "x_", "_y", "##c", "d</w>", "e f", " g", "h ", "aab", "~", "7", "|",
    "\u00e9", "\u4f60", "\u2581", "\u2581i", "j\u2581k", "\u0120l",
]  # fmt: skip
BYTES = [f"<0x{value:02X}>" for value in "\u4f60 !".encode()]
ALMOST_BYTES = [
    "<0x+1>", "<0x-1>", "<0x 1>", "<0x1 >", "<0x1_>", "<0x4a>", "<0X41>", "<0x\u0663\u0664>", "<0x041>", "<0x4>", "<0x\t7>",
]  # fmt: skip

FUSE, BYTE_FALLBACK = {"type": "Fuse"}, {"type": "ByteFallback"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def matches(pattern: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}


def strip(content: str, start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": content, "start": start, "stop": stop}


def metaspace(scheme: str, mark: str = "\u2581") -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": True}


def word_piece(prefix: str = "##") -> dict[str, Any]:
    return {"type": "WordPiece", "prefix": prefix, "cleanup": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def tokenizer_of(decoder: dict[str, Any] | None, folder: Path) -> Tokenizer:
    tokens = ["<s>", *WORDS, *BYTES, *ALMOST_BYTES]
    state = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "added_tokens": [],
        "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<s>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return Tokenizer.from_folder(folder)


MARKS = replace("\u2581", " ")
LLAMA = (MARKS, BYTE_FALLBACK, FUSE, strip(" ", 1, 0))
TAKEN = {
    "none": None,
    "byte level": BYTE_LEVEL,
    "byte level in a sequence": sequence(sequence(BYTE_LEVEL), FUSE),
    "byte level behind a replacement": sequence(replace("\u2581", "\u0120"), BYTE_LEVEL),
    "byte level before a replacement": sequence(BYTE_LEVEL, replace("|", "")),
    "byte level before a strip": sequence(BYTE_LEVEL, strip(" ", 1, 0)),
    "word piece": word_piece(),
    "word piece fused": sequence(word_piece("_"), FUSE),
    "metaspace": metaspace("always"),
    "metaspace at the first word": metaspace("first"),
    "metaspace that adds none": metaspace("never"),
    "metaspace of another mark": metaspace("never", "_"),
    "metaspace behind bytes": sequence(BYTE_FALLBACK, metaspace("always"), FUSE),
    "llama": sequence(*LLAMA),
    "llama nested": sequence(sequence(MARKS, sequence(BYTE_FALLBACK)), sequence(FUSE, sequence(strip(" ", 1, 0)))),
    "gemma": sequence(MARKS, BYTE_FALLBACK, FUSE),
    "bytes and nothing else": BYTE_FALLBACK,
    "fused and nothing else": FUSE,
    "an empty sequence": sequence(),
    "a replacement by itself": replace("</w>", " "),
    "several replacements": sequence(replace("_", " "), replace("~", "\n"), replace("a", "bb"), FUSE),
    "replacements in their order": sequence(replace("a", "b"), replace("b", "\u4f60")),
    "a replacement by nothing": replace("\u2581", ""),
    "replacements around bytes": sequence(replace("_", "-"), BYTE_FALLBACK, replace("<", "("), FUSE),
    "a pattern": matches("a+|[0-9]", "*"),
    "a pattern before bytes": sequence(matches("^j", " "), BYTE_FALLBACK, FUSE),
    "a replacement of what bytes stand for": sequence(BYTE_FALLBACK, replace("!", "?"), replace(" ", "")),
    "replacements of replacements behind bytes": sequence(BYTE_FALLBACK, replace("!", "a~"), replace("a", "\u4f60"), FUSE),
    "marks behind bytes": sequence(BYTE_FALLBACK, MARKS, FUSE),
    "a replacement behind the joint": sequence(BYTE_FALLBACK, FUSE, replace("!", "?")),
    "marks behind the joint": sequence(FUSE, MARKS, strip(" ", 1, 0)),
    "tokens stripped": sequence(strip("b", 0, 1), strip("a", 2, 0)),
    "tokens stripped of spaces": sequence(strip(" ", 1, 1), FUSE),
    "nothing stripped": sequence(FUSE, strip("a", 0, 0)),
}
REFUSED = {
    "BPEDecoder": {"type": "BPEDecoder", "suffix": "</w>"},
    "BPEDecoder in a sequence": sequence({"type": "BPEDecoder", "suffix": "</w>"}, FUSE),
    "CTC": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    "the end stripped": sequence(FUSE, strip(" ", 0, 1)),
    "two spaces stripped": sequence(FUSE, strip(" ", 2, 0)),
    "a letter stripped": sequence(FUSE, strip("a", 1, 0)),
    "stripped twice": sequence(FUSE, strip(" ", 1, 0), strip(" ", 1, 0)),
    "runs of bytes stripped": sequence(BYTE_FALLBACK, strip(" ", 1, 0)),
    "a text of several tokens replaced": sequence(FUSE, replace("ab", "c")),
    "a pattern over several tokens": sequence(FUSE, matches("a+", "b")),
    "a text of several bytes replaced": sequence(BYTE_FALLBACK, replace(" !", "c"), FUSE),
    "nothing replaced behind bytes": sequence(BYTE_FALLBACK, replace("", "c"), FUSE),
    "a pattern over several bytes": sequence(BYTE_FALLBACK, matches("!+", "b"), FUSE),
    "a character of several bytes replaced": sequence(BYTE_FALLBACK, replace("\u4f60", "c"), FUSE),
    "a character of several bytes replaced behind the joint": sequence(BYTE_FALLBACK, FUSE, replace("\u4f60", "c")),
    "half a character replaced": sequence(BYTE_LEVEL, replace("\u00e9", "e")),
    "replaced behind a strip": sequence(FUSE, strip(" ", 1, 0), replace(" ", "_")),
    "bytes of the whole text": sequence(FUSE, BYTE_FALLBACK),
    "byte level of the whole text": sequence(FUSE, BYTE_LEVEL),
    "byte level of bytes": sequence(BYTE_FALLBACK, BYTE_LEVEL),
    "metaspace of the whole text": sequence(FUSE, metaspace("always")),
    "word piece of a part": sequence(MARKS, word_piece()),
    "word piece behind the joint": sequence(FUSE, word_piece()),
}


def sequences(tokenizer: Tokenizer, backend: Backend) -> list[list[int]]:
    """Random ids, bytes in runs that are UTF-8. Left out is where the library differs by intent: at the start it takes off every
    mark of the first token and no space (SentencePiece itself: one space, whatever it is of), and leaves a first `##`."""
    draw = random.Random(5)
    ids = backend.get_vocab()
    runs = [*([each] for each in WORDS + ALMOST_BYTES), BYTES[:3], *([each] for each in BYTES[3:])]
    first = [[word] for word in WORDS if word[0] not in "#_ " and "\u2581" not in word[1:]]
    drawn = [[draw.choice(first), *draw.choices(runs, k=draw.randrange(1, 12))] for _ in range(150)]
    return [[ids[token] for run in each for token in run] for each in [[], *([each] for each in first), *drawn]]


@pytest.mark.parametrize("name", TAKEN)
def test_a_stream_is_what_the_librarys_decoder_makes_of_it(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(TAKEN[name], tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    texts = set()
    for ids in sequences(tokenizer, backend):
        expected = backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected, ids
        detokenizer = Detokenizer(tokenizer)
        assert "".join([*(detokenizer.push([each]) for each in ids), detokenizer.finish()]) == expected
        texts.add(expected)
    assert len(texts) > 100


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="decoder") as caught:
        tokenizer_of(REFUSED[name], tmp_path)
    assert caught.value.hint is not None


def test_every_decoder_of_the_library_is_among_them() -> None:
    known = {name for name in dir(decoders) if isinstance(getattr(decoders, name), type)}
    seen = json.dumps([*TAKEN.values(), *REFUSED.values()])
    assert {name for name in known - {"Decoder", "DecodeStream"} if f'"type": "{name}"' not in seen} == set()
