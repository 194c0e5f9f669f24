"""A GGUF file's tokenizer as the files of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat templates, and
for SentencePiece vocabularies tokenizer.model, which alone keeps their scores."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanovllm_cli.text.gguf_tokenizer import load_gguf
from nanovllm_cli.text.sentencepiece import UNUSED
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.vocabulary import TokenizerParts, guard_library

_FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)


class HFTokenizer(NamedTuple):
    """`files`: name -> content. `ids`: bos, eos, pad and the ends of an answer, for config.json. `notes`: what is lost."""

    files: dict[str, bytes]
    tokenizer: Tokenizer
    notes: list[str]


def hf_tokenizer(metadata: Mapping[str, Any], max_len: int) -> HFTokenizer:
    """The tokenizer files of a GGUF's metadata; `max_len` is the model's context in tokens.

    Raises what reading the vocabulary raises: CheckpointError, UnsupportedError.
    """
    parts = load_gguf(metadata)
    tokenizer = Tokenizer(parts)
    notes: list[str] = []
    state = json.loads(parts.backend.to_str())
    _drop_unused(state, parts, metadata)
    types = metadata.get("tokenizer.ggml.token_type_count", 1)
    has_types = isinstance(types, int) and types > 1
    state["post_processor"] = _post_processor(parts, second=int(has_types))
    config = _config(parts, max_len)
    if has_types:
        config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    files = {"tokenizer.json": _json(state, indent=None), "tokenizer_config.json": _json(config)}
    if metadata.get("tokenizer.ggml.model") == "llama":
        files["tokenizer.model"] = _sentencepiece_model(metadata, parts)
    for name, template in parts.chat_templates.items():
        if name == "default":
            files["chat_template.jinja"] = template.encode()
        elif _FILE_NAME.fullmatch(name):
            files[f"additional_chat_templates/{name}.jinja"] = template.encode()
        else:
            notes.append(f"the chat template {name[:60]!r}, whose name is no file name")
    return HFTokenizer(files, tokenizer, notes)


def _config(parts: TokenizerParts, max_len: int) -> dict[str, Any]:
    roles = {"bos_token": parts.bos_id, "eos_token": parts.eos_id, "pad_token": parts.pad_id, "unk_token": parts.unk_id}
    pairs = {"cls_token": parts.cls_id, "sep_token": parts.sep_id, "mask_token": parts.mask_id}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(parts.prefix_ids),
        "add_eos_token": bool(parts.suffix_ids),
        **{role: None if i is None else parts.backend.id_to_token(i) for role, i in roles.items()},
        **{role: parts.backend.id_to_token(i) for role, i in pairs.items() if i is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
    }


def _drop_unused(state: dict[str, Any], parts: TokenizerParts, metadata: Mapping[str, Any]) -> None:
    """Takes out what only pads a vocabulary to the size of the embedding: `[PADn]` of id n, at the end."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    vocab = state["model"]["vocab"]
    if len(types) != len(metadata["tokenizer.ggml.tokens"]):
        return
    for position in range(len(types) - 1, -1, -1):
        name = f"[PAD{position}]"
        if types[position] != UNUSED or parts.backend.id_to_token(position) != name:
            return
        vocab.pop(name if isinstance(vocab, dict) else position)


def _post_processor(parts: TokenizerParts, second: int) -> dict[str, Any] | None:
    """What puts BOS and EOS around a text, in the form that tokenizer.json has for it. second: the token type of what comes
    second of two texts that are read together."""
    if not parts.prefix_ids and not parts.suffix_ids:
        return None
    names = {i: parts.backend.id_to_token(i) or "" for i in (*parts.prefix_ids, *parts.between_ids, *parts.suffix_ids)}

    def special(ids: tuple[int, ...], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": names[i], "type_id": type_id}} for i in ids]

    def around(sequence: str, before: tuple[int, ...], type_id: int, after: tuple[int, ...]) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*special(before, type_id), middle, *special(after, type_id)]

    single = around("A", parts.prefix_ids, 0, parts.suffix_ids)
    if parts.between_ids:
        pair = around("A", parts.prefix_ids, 0, parts.between_ids) + around("B", (), second, parts.suffix_ids)
    else:
        pair = single + around("B", parts.prefix_ids, 1, parts.suffix_ids)
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()},
    }


def _sentencepiece_model(metadata: Mapping[str, Any], parts: TokenizerParts) -> bytes:
    """A SentencePiece model of the pieces, scores and types (sentencepiece_model.proto; encoding: protobuf.dev)."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    bpe, byte_fallback = 2, 6 in types
    roles = {40: parts.unk_id, 41: parts.bos_id, 42: parts.eos_id, 43: parts.pad_id}
    trainer = _field(3, bpe) + _field(4, len(tokens)) + _field(35, int(byte_fallback))
    trainer += b"".join(_field(number, -1 if i is None else i) for number, i in roles.items())
    if parts.unk_id is not None:
        trainer += _field(45, tokens[parts.unk_id].encode())
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer = _field(1, b"identity") + _field(3, int(prefix)) + _field(4, 0) + _field(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | bytes) -> bytes:
    """One field of a message: a varint, or bytes with their length."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _json(value: dict[str, Any], indent: int | None = 2) -> bytes:
    with guard_library("the tokenizer"):
        return (json.dumps(value, ensure_ascii=False, indent=indent) + "\n").encode()
