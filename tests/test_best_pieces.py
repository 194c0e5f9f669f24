"""PLaMo's tokenizer: pieces whose scores add up to the most. Ids of `TEXTS` are those that llama.cpp makes of them by a file with
this vocabulary (llama-cpp-python 0.3.36)."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.text.best_pieces import UNKNOWN, BestPieces
from nanovllm_cli.text.gguf_tokenizer import load_gguf
from nanovllm_cli.text.tokenizer import Tokenizer

CONTROL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]
SCORES = {
    "a": -3.0, "b": -3.5, " ": -4.0, "aa": -4.0, "aaa": -7.0, "ab": -2.0, "ba": -2.0, "b a": -6.5, "  ": -8.0, "日": -5.0,
    "日本語": -4.5, "<0x4": -6.0, "1>": -1.0, "\n": -2.0,
}  # fmt: skip
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "plamo2",
    "tokenizer.ggml.tokens": [*CONTROL, *(f"<0x{value:02X}>" for value in range(256)), *SCORES],
    "tokenizer.ggml.scores": [0.0] * 260 + list(SCORES.values()),
    "tokenizer.ggml.token_type": [2, 3, 3, 3] + [6] * 256 + [1] * len(SCORES),
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip
TEXTS = {
    "aaaaa": [264, 263],
    "abab aab": [265, 265, 262, 260, 265],
    "a  b a": [260, 268, 267],
    "日本語": [270],
    "日本": [269, 234, 160, 176],
    "x語é": [124, 236, 174, 162, 199, 173],
    "<0x41>": [271, 272],
    "ba\n\nbab": [266, 273, 273, 266, 261],
    "   a": [268, 262, 260],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(load_gguf(METADATA))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_llama_cpp(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == TEXTS[text]
    assert tokenizer.decode(TEXTS[text]) == text


def test_control_tokens_are_read_only_where_they_should_be(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab<|plamo:eos|>ab", add_special_tokens=False) == [265, 2, 265]
    spelled = tokenizer.encode("ab<|plamo:eos|>", add_special_tokens=False, parse_special=False)
    assert 2 not in spelled
    assert tokenizer.decode(spelled) == "ab<|plamo:eos|>"


def test_several_texts_at_once(tokenizer: Tokenizer) -> None:
    texts = ["", *("ab " * count for count in range(50))]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_where_a_long_text_is_cut_first_does_not_matter(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    text = "".join(draw.choice("aab \n日本語x") for _ in range(6000))
    cuts = [0, *BestPieces(SCORES).ends(text)]
    whole = [text[first:end] for first, end in pairwise(cuts)]
    assert len(whole) > 3000
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = [tokenizer.id_to_token(token_id) for token_id in ids if token_id >= 260]
    assert found == [piece for piece in whole if piece in SCORES]
    assert tokenizer.decode(ids) == text


def test_no_other_pieces_have_a_better_sum() -> None:
    def best(text: str) -> tuple[int, list[int]]:
        """The cost, and lengths of pieces in the order in which they are to be preferred."""
        if not text:
            return 0, []
        found = []
        for length in range(len(text), 0, -1):
            piece = text[:length]
            if piece in SCORES or length == 1:
                cost, rest = best(text[length:])
                found.append((cost + (round(-1e4 * SCORES[piece]) if piece in SCORES else UNKNOWN), [-length, *rest]))
        return min(found)

    draw, pieces = random.Random(1), BestPieces(SCORES)
    for _ in range(300):
        text = "".join(draw.choice("aab 日本語x") for _ in range(draw.randint(1, 9)))
        lengths = [-length for length in best(text)[1]]
        assert pieces.ends(text) == [sum(lengths[: i + 1]) for i in range(len(lengths))]


def test_a_vocabulary_without_a_byte_is_broken() -> None:
    tokens = [token.replace("<0x41>", "<0x>") for token in METADATA["tokenizer.ggml.tokens"]]
    with pytest.raises(CheckpointError, match="no token for the byte <0x41>"):
        load_gguf(METADATA | {"tokenizer.ggml.tokens": tokens})


def test_a_piece_that_is_too_long_is_named() -> None:
    tokens = [*METADATA["tokenizer.ggml.tokens"][:-1], "a" * 5000]
    with pytest.raises(CheckpointError, match="a piece of 5000 characters"):
        load_gguf(METADATA | {"tokenizer.ggml.tokens": tokens})
