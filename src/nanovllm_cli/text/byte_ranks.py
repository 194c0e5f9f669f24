"""Vocabularies of bytes by rank, as tiktoken has them: two pieces become one where their bytes together are a token, the one of
the lowest rank first. As merges that is every way to part a token in two. `tekken.py` reads Mistral's file; Moonshot's is read
here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.text.pre_tokenizers import PreTokenization, pre_tokenization
from nanovllm_cli.text.token_bytes import byte_characters
from nanovllm_cli.text.vocabulary import TokenizerParts, guard_library

TIKTOKEN = "tiktoken.model"
MAX_FILE_BYTES = 128 << 20
MAX_TOKENS, MAX_TOKEN_BYTES = 1 << 20, 256
_KIMI, _RESERVED = "TikTokenTokenizer", 256


def read_tiktoken(text: str, config: Mapping[str, Any]) -> TokenizerParts:
    """tiktoken.model of Moonlight and Kimi: lines of base64 and rank. Behind them are 256 tokens, which config, the folder's
    tokenizer_config.json, names as far as they have names.

    Raises CheckpointError where it is broken, UnsupportedError for other models' files, whose code says how texts are cut.
    """
    if config.get("tokenizer_class") != _KIMI:
        told = f"{TIKTOKEN} is read of Moonlight and Kimi ({_KIMI}); how others cut texts is in code that is not run"
        raise UnsupportedError(told, "use the model's GGUF file")
    lines = [line.split(" ") for line in text.splitlines() if line]
    if [line[1:] for line in lines] != [[str(rank)] for rank in range(len(lines))]:
        raise broken(TIKTOKEN, "its lines are not a token and its rank, in their order")
    ranks = ranks_of([line[0] for line in lines], TIKTOKEN)
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    special: list[AddedToken] = []
    for number in range(len(ranks), len(ranks) + _RESERVED):
        entry = listed.get(str(number))
        name = entry.get("content") if isinstance(entry, dict) else None
        flag = not isinstance(entry, dict) or entry.get("special") is not False
        content = name if isinstance(name, str) and name else f"<|reserved_token_{number}|>"
        with guard_library("tokenizer_config.json"):
            special.append(AddedToken(content, special=flag, normalized=False))
    if len({token.content for token in special}) < len(special):
        raise broken("tokenizer_config.json", "it has a control token twice")
    return TokenizerParts(build(ranks, pre_tokenization("kimi-k2"), special, len(ranks), TIKTOKEN))


def ranks_of(texts: Sequence[str], file: str) -> dict[bytes, int]:
    """Of tokens in base64, by their order. Raises CheckpointError, also where a byte has none."""
    if len(texts) > MAX_TOKENS:
        raise broken(file, f"it has more than {MAX_TOKENS} tokens")
    try:
        tokens = [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError):
        raise broken(file, "it has tokens that are not base64") from None
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or not all(0 < len(token) <= MAX_TOKEN_BYTES for token in tokens):
        raise broken(file, f"it has a token twice, or one that is empty or has more than {MAX_TOKEN_BYTES} bytes")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise broken(file, f"no token is the byte {missing[0]}")
    return ranks


def build(
    ranks: Mapping[bytes, int], rule: PreTokenization, special: Sequence[AddedToken], first: int, file: str
) -> tokenizers.Tokenizer:
    """first: the id of the first special token, which are in front of the others, or behind them. Raises CheckpointError."""
    characters = byte_characters()
    names = {token: "".join([characters[byte] for byte in token]) for token in ranks}
    offset = 0 if first else len(special)
    vocabulary = {names[token]: offset + rank for token, rank in ranks.items()}
    if clash := [token.content for token in special if token.content in vocabulary]:
        raise broken(file, f"it has {clash[0][:40]!r} twice")
    vocabulary |= {token.content: first + number for number, token in enumerate(special)}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    with guard_library(file):
        backend = PreTokenization(rule.patterns, ignore_merges=True).backend(vocabulary, merges)
        backend.add_tokens(list(special))
    return backend


def broken(file: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is broken: {why}", "download the model again")


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Of the token that is merged first, first; of one token's, that of the earlier pieces."""
    for token in ranks:
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        yield from sorted(halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
