"""How a checkpoint's encoder reads a text, and what its files say of the answers: see `reading_spec.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.reading_spec import LanguageTokens, ReadingSpec, TextTower
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.tensor_names import family_of

_MOST_BANNED = 1 << 10


def gguf_reading(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, int]:
    """What GGUF files say of it, by keys without the architecture."""
    reading = read_reading(checkpoint, spec)
    return {} if reading is None else {"decoder_start_token_id": reading.begins[0]}


def read_reading(checkpoint: Checkpoint, spec: ModelSpec) -> ReadingSpec | None:
    """None where it has no encoder of texts. The decoder begins with "decoder_start_token_id"; files that say nothing of it mean
    the padding, as T5 was trained. Behind it "forced_bos_token_id", where there is one. CheckpointError for tokens that are none,
    UnsupportedError for banned words of several."""
    if spec.encoder is None:
        return None
    never: tuple[int, ...] = ()
    if checkpoint.format == "gguf":
        arch = checkpoint.config["general.architecture"]
        read, padding = ConfigReader(checkpoint.config, "GGUF metadata"), "tokenizer.ggml.padding_token_id"
        start = f"{arch}.decoder_start_token_id"
    else:
        read, start, padding = ConfigReader(_said(checkpoint), "config.json"), "decoder_start_token_id", "pad_token_id"
        never = _banned(_own(checkpoint).get("bad_words_ids"), spec.vocab_size)
    begins = [(start, read.integer(start, read.integer(padding, 0, least=0), least=0))]
    if forces := read.has("forced_bos_token_id"):
        begins.append(("forced_bos_token_id", read.integer("forced_bos_token_id", least=0)))
    for key, token in begins:
        if token >= spec.vocab_size:
            raise CheckpointError(f"{read.where}: {key!r} is {token}, of {spec.vocab_size} tokens", BROKEN)
    most_read, most_written = _places(spec.encoder), _places(spec)
    if most_written is not None and most_written <= 2:
        raise CheckpointError(f"{read.where}: a decoder with {most_written} positions", BROKEN)
    tower = TextTower(spec.encoder.num_layers, spec.encoder.read_work // spec.encoder.num_layers)
    tokens = tuple([token for _, token in begins])
    return ReadingSpec(tower, tokens, most_read, most_written, never, tells_start=read.has(start), tells_target=forces)


def own_settings(checkpoint: Checkpoint, languages: LanguageTokens | None) -> dict[str, Any]:
    """What generation_config.json says, or, where there is none, config.json, as older folders have it. Where an encoder reads
    texts, lengths are of what is written: "max_new_tokens" and "min_new_tokens", less what the decoder begins with, which
    transformers counts among its "max_length" and "min_length"."""
    if checkpoint.format == "gguf" or not family_of(checkpoint).has_encoder:
        return dict(checkpoint.generation_config)
    said, begun = _own(checkpoint), 1
    if _said(checkpoint).get("forced_bos_token_id") is not None or (languages is not None and languages.target == "begun"):
        begun += 1
    for kind in ("max", "min"):
        length, own = said.get(f"{kind}_length"), f"{kind}_new_tokens"
        if said.get(own) is None and type(length) is int and length > begun:
            said[own] = length - begun
    return said


def _places(spec: ModelSpec) -> int | None:
    """Positions that it has; None: any."""
    return None if spec.entry is None else spec.entry.positions - spec.entry.first_position


def _own(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of a folder without generation_config.json, whose ends alone are known under that name, config.json."""
    return dict(checkpoint.generation_config if checkpoint.generation_config.keys() - {"eos_token_id"} else _said(checkpoint))


def _said(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return {**checkpoint.config, **{key: value for key, value in checkpoint.generation_config.items() if value is not None}}


def _banned(words: object, vocab_size: int) -> tuple[int, ...]:
    """Tokens of "bad_words_ids": Marian's padding, whose logit is that of nothing."""
    if words is None:
        return ()
    if not isinstance(words, list) or len(words) > _MOST_BANNED or not all(isinstance(word, list) and word for word in words):
        raise CheckpointError("generation_config.json: 'bad_words_ids' must be lists of tokens", BROKEN)
    if any(len(word) > 1 for word in words):
        told = "generation_config.json bans words of several tokens ('bad_words_ids')"
        raise UnsupportedError(told, "take these out of the file; bad_words of a request does it")
    ids = [word[0] for word in words]
    if not all(type(each) is int and 0 <= each < vocab_size for each in ids):
        raise CheckpointError(f"generation_config.json: 'bad_words_ids' must be of {vocab_size} tokens", BROKEN)
    return tuple(dict.fromkeys(ids))
