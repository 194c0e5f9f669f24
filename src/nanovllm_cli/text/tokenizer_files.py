"""Tokenizers from a model's folder, in the layouts of the Hugging Face hub.

Tried in this order: `tokenizer.json`; `tokenizer.model` or `spiece.model` (SentencePiece); `tekken.json` (Mistral's);
`source.spm` with `vocab.json` (Marian's); `sentencepiece.bpe.model` (fairseq's); `vocab.json` with `merges.txt` (byte-level BPE);
`tiktoken.model` (Moonshot's); `rwkv_vocab_v20230424.txt`. Beside them: `tokenizer_config.json`,
`special_tokens_map.json`, `added_tokens.json` and chat templates. The files are untrusted: sizes are capped, and what is broken
raises CheckpointError with the file's name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from nanovllm_cli.errors import AccessRefusedError, CheckpointError
from nanovllm_cli.text import byte_ranks, tekken, translators, world
from nanovllm_cli.text.charsmap import check_charsmap
from nanovllm_cli.text.pre_tokenizers import pre_tokenization
from nanovllm_cli.text.sentencepiece import PieceVocabulary, build_pieces, read_model, special_pieces
from nanovllm_cli.text.token_bytes import SPACE_MARK
from nanovllm_cli.text.vocabulary import TokenizerParts, guard_library

MAX_VOCABULARY_BYTES = 512 << 20
MAX_CONFIG_BYTES = 32 << 20
MAX_TEMPLATE_BYTES = 1 << 20
_MAX_TEMPLATES = 32
_SINGLE_TEMPLATE = "chat_template.jinja"
_T5, _MOST_MARKS = "spiece.model", 1000
_BEGIN = ("molmo2",)
"""Models whose processor puts a BOS, or an EOS where there is none, in front of all texts, whatever the tokenizer does."""
_OWN_TEMPLATES = {"k2_horizon": "chat_template_generation.jinja"}
"""Of kinds of models that have what they are served with beside an older one. Elsewhere such a file is for training."""
_MAX_STEPS, _MAX_WRITTEN, _MAX_GROWTH = 1000, 64, 16  # of a normalizer

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SURROUNDED = ("BartTokenizer", "RobertaTokenizer", "bart", "roberta")
"""Classes, and kinds of models where none is named, whose texts stand between two tokens."""
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
_LETTERS = {"do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"}
_OF_NO_FAMILY = ("PreTrainedTokenizerFast", "TokenizersBackend")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def load_folder(folder: Path) -> TokenizerParts:
    """Backend, special ids and chat templates of the folder's tokenizer."""
    config = _read_object(folder / "tokenizer_config.json")
    roles = {**_read_object(folder / "special_tokens_map.json"), **config}
    parts = _vocabulary(folder, config, roles)
    backend, legacy = parts.backend, _read_object(folder / "added_tokens.json")
    if parts.is_world:
        legacy = world.without_known(backend, legacy)
        config = {**config, "added_tokens_decoder": world.without_known(backend, config.get("added_tokens_decoder"))}
    with guard_library("the added tokens of the tokenizer"):
        _add_listed(backend, config, legacy)
        _add_roles(backend, roles)
    for role in ("bos", "eos", "pad", "unk", "cls", "sep", "mask"):
        declared = f"{role}_token" in roles
        content = _content(roles.get(f"{role}_token"))
        token_id = (world.id_of(backend, content) if parts.is_world else backend.token_to_id(content)) if content else None
        if declared or token_id is not None:
            setattr(parts, f"{role}_id", token_id)
    kind = _read_object(folder / "config.json").get("model_type")
    translators.told_languages(parts, config, kind)
    _surround(parts, config)
    if kind in _BEGIN and not parts.prefix_ids:
        first = parts.eos_id if parts.bos_id is None else parts.bos_id
        parts.prefix_ids = () if first is None else (first,)
    _lower(backend, _read_object(folder / "sentence_bert_config.json"))
    parts.chat_templates = _templates(folder, config) or parts.chat_templates
    return parts


def _vocabulary(folder: Path, config: dict[str, Any], roles: dict[str, Any]) -> TokenizerParts:
    fast, pieces, vocab = folder / "tokenizer.json", folder / "tokenizer.model", folder / "vocab.json"
    if fast.is_file():
        text = _read_text(fast, MAX_VOCABULARY_BYTES)
        with guard_library(fast.name):
            if "recompiled" in text or "\\u00" in text:  # any spelling of it; reading megabytes for nothing would be felt
                json.loads(text, object_pairs_hook=_check_charsmaps)
            backend = tokenizers.Tokenizer.from_str(text)
            backend.no_truncation()
            backend.no_padding()
            _check_normalizer(backend.normalizer)
            _set_letters(backend, config)
            before, between, after = _ids_around(backend)
        return TokenizerParts(backend, prefix_ids=before, suffix_ids=after, between_ids=between)
    if pieces.is_file() or (pieces := folder / _T5).is_file():
        vocabulary = read_model(_read_bytes(pieces, MAX_VOCABULARY_BYTES))
        with guard_library(pieces.name):
            if pieces.name == _T5 and translators.class_of(config) == "PegasusTokenizer":
                return translators.read_pegasus(vocabulary, config)
            parts = _from_pieces(vocabulary, config)
            if pieces.name == _T5:
                _add_marks(parts.backend, config)
            return parts
    if (own := folder / tekken.FILE).is_file():
        return tekken.read_tekken(_read_object(own, byte_ranks.MAX_FILE_BYTES))
    for name in (translators.MARIAN, translators.FAIRSEQ):
        if (pieces := folder / name).is_file():
            return _translator(folder, pieces, config, roles)
    if vocab.is_file() and (folder / "merges.txt").is_file():
        return _from_vocab_and_merges(folder, config)
    if (own := folder / byte_ranks.TIKTOKEN).is_file():
        return byte_ranks.read_tiktoken(_read_text(own, byte_ranks.MAX_FILE_BYTES), config)
    if (own := folder / world.FILE).is_file():
        return world.read_world(_read_text(own, byte_ranks.MAX_FILE_BYTES), config, roles)
    raise CheckpointError(
        f"no tokenizer in {folder.name}: neither tokenizer.json, tokenizer.model, {_T5}, tekken.json, "
        f"{translators.MARIAN}, {translators.FAIRSEQ}, vocab.json with merges.txt, {byte_ranks.TIKTOKEN} nor {world.FILE}",
        "copy the tokenizer files of the original model into the folder",
    )


def _from_pieces(vocabulary: PieceVocabulary, config: dict[str, Any]) -> TokenizerParts:
    backend = build_pieces(vocabulary)
    if vocabulary.add_dummy_prefix and config.get("legacy") is False and backend.normalizer is not None:
        # Newer conversions put the prefix before the text only, not after every special token.
        vocabulary.add_dummy_prefix = False
        without_prefix = build_pieces(vocabulary).normalizer
        assert without_prefix is not None
        backend.normalizer = without_prefix
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    backend.add_tokens(special_pieces(vocabulary))
    bos, eos = vocabulary.bos_id, vocabulary.eos_id
    parts = TokenizerParts(backend, bos, eos, vocabulary.pad_id, vocabulary.unknown_id)
    if vocabulary.unigram:  # the T5 family ends a text, the Llama family begins one
        parts.suffix_ids = () if eos is None else (eos,)
    else:
        parts.prefix_ids = () if bos is None else (bos,)
    return parts


def _translator(folder: Path, file: Path, config: dict[str, Any], roles: dict[str, Any]) -> TokenizerParts:
    pieces, vocab = read_model(_read_bytes(file, MAX_VOCABULARY_BYTES)), folder / translators.VOCAB
    ids = _read_object(vocab, MAX_VOCABULARY_BYTES)
    with guard_library(file.name):
        if file.name == translators.MARIAN:
            return translators.read_marian(pieces, ids, config)
        if vocab.is_file():
            return translators.read_m2m100(pieces, ids, config)
        named = [_content(each) for key in _FURTHER for each in _listed(roles.get(key))]
        kind = _read_object(folder / "config.json").get("model_type")
        return translators.read_fairseq(pieces, config, kind, [each for each in named if each])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _add_marks(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens behind the pieces of a T5's, which stand for what is left out of a text, the first one last: so transformers'
    T5Tokenizer has it."""
    count = config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= _MOST_MARKS:
        raise CheckpointError(f"tokenizer_config.json: 'extra_ids' must be a number up to {_MOST_MARKS}, not {str(count)[:40]}")
    names = (f"<extra_id_{i}>" for i in reversed(range(count)))
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])


def _from_vocab_and_merges(folder: Path, config: dict[str, Any]) -> TokenizerParts:
    vocab = _read_object(folder / "vocab.json", MAX_VOCABULARY_BYTES)
    lines = _read_text(folder / "merges.txt", MAX_VOCABULARY_BYTES).split("\n")
    if lines and lines[0].startswith("#version"):
        del lines[0]
    merges = [tuple(line.rstrip("\r").split(" ")) for line in lines if line.strip()]
    if not all(len(pair) == 2 for pair in merges):
        raise CheckpointError(f"{folder.name}/merges.txt holds a line that is not a pair")
    rule = pre_tokenization("qwen2" if "Qwen2" in str(config.get("tokenizer_class", "")) else "gpt-2")
    with guard_library("vocab.json with merges.txt"):
        parts = TokenizerParts(rule.backend(vocab, merges))  # type: ignore[arg-type]
        kind = translators.class_of(config) or _read_object(folder / "config.json").get("model_type")
        return translators.surrounded(parts) if kind in _SURROUNDED else parts


def _check_charsmaps(pairs: list[tuple[str, Any]]) -> None:
    """CheckpointError where an object of the file has precompiled rules that are broken."""
    for name, value in pairs:
        if name == "precompiled_charsmap" and isinstance(value, str):
            check_charsmap(base64.b64decode(value))


def _set_letters(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """What tokenizer_config.json says of a BERT's letters counts, whatever tokenizer.json does: so transformers' class has it."""
    normalizer: Any = backend.normalizer
    if not isinstance(normalizer, normalizers.BertNormalizer) or config.get("tokenizer_class") in _OF_NO_FAMILY:
        return
    for key, name in _LETTERS.items():
        if key in config and (config[key] is not None or key == "strip_accents"):  # whose null is what do_lower_case says
            setattr(normalizer, name, config[key])


def _lower(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Texts are made lower case before anything else where sentence-transformers does that."""
    if not isinstance(said := config.get("do_lower_case") or False, bool):
        raise CheckpointError(f"sentence_bert_config.json: 'do_lower_case' must be true or false, not {str(said)[:40]}")
    own = backend.normalizer
    if said and not (isinstance(own, normalizers.BertNormalizer) and own.lowercase):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if own is None else [own])])


def _check_normalizer(normalizer: normalizers.Normalizer | None) -> None:
    """CheckpointError where any text could grow without end: what its steps write into a text is sent through all of them."""
    steps = _steps(normalizer)
    states = [json.loads(step.__getstate__()) for step in steps[:_MAX_STEPS]]
    written = [state.get("content", state.get("prepend", "")) for state in states]
    text = "".join(written)
    most = _MAX_GROWTH * (len(text) + _MAX_WRITTEN)
    grows = len(steps) > _MAX_STEPS or any(len(part) > _MAX_WRITTEN for part in written)
    for step in [] if grows else steps:
        text = step.normalize_str(text)
        if grows := len(text) > most:
            break
    if grows:
        raise CheckpointError("tokenizer.json: its normalizer makes a text many times as long", "do not use this model")


def _steps(normalizer: Any) -> list[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        return [step for i in range(len(normalizer)) for step in _steps(normalizer[i])]
    return [] if normalizer is None else [normalizer]


def _ids_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What the backend's post-processor puts before a text, between two of them, and after one, read off an example."""
    for example in ("a", "1", ".", "\n", *filter(None, map(backend.id_to_token, range(8)))):
        encoding = backend.encode(example, add_special_tokens=True)
        own = [position for position, special in enumerate(encoding.special_tokens_mask) if not special]
        if own:
            before, after = tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
            text = encoding.ids[own[0] : own[-1] + 1]
            return before, _ids_between(backend.encode(example, example, add_special_tokens=True).ids, before, text, after), after
    return (), (), ()


def _ids_between(
    pair: list[int], before: tuple[int, ...], text: list[int], after: tuple[int, ...]
) -> tuple[int, ...]:
    """What stands between a text and itself in `pair`; nothing where a text has no end, or where other ids go around a pair."""
    start, end = [*before, *text], [*text, *after]
    usual = pair[: len(start)] == start and pair[len(pair) - len(end) :] == end and len(pair) > len(start) + len(end)
    return tuple(pair[len(start) : len(pair) - len(end)]) if after and usual else ()


def _surround(parts: TokenizerParts, config: dict[str, Any]) -> None:
    """An explicit `add_bos_token` or `add_eos_token` decides over what the vocabulary file says of that token. Where it is false,
    another token that the file puts there stays: Qwen3-Embedding ends a text with one that is not its EOS."""
    parts.prefix_ids = _decided(parts.prefix_ids, parts.bos_id, config.get("add_bos_token"))
    parts.suffix_ids = _decided(parts.suffix_ids, parts.eos_id, config.get("add_eos_token"))


def _decided(ids: tuple[int, ...], own: int | None, adds: Any) -> tuple[int, ...]:
    if adds is None or own is None:
        return ids
    return (own,) if adds else tuple(each for each in ids if each != own)


def _add_listed(backend: tokenizers.Tokenizer, config: dict[str, Any], legacy: dict[str, Any]) -> None:
    """Tokens that only the configuration lists, in the order of their ids."""
    listed: list[tuple[int, AddedToken]] = []
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, value in decoder.items():
            if not key.isascii() or not key.isdigit() or not isinstance(value, dict) or not _content(value):
                raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder has a broken entry {key!r}")
            listed.append((int(key), _added_token(value, bool(value.get("special")))))
    known_ids = {token_id for token_id, _ in listed}
    listed += [
        (value, AddedToken(content, normalized=False))
        for content, value in legacy.items()
        if isinstance(value, int) and value not in known_ids
    ]
    present = backend.get_added_tokens_decoder()
    for token_id, token in sorted(listed, key=lambda entry: entry[0]):
        if token_id in present and present[token_id].content == token.content:
            continue
        known = backend.token_to_id(token.content)
        if known is None and token_id != backend.get_vocab_size(True):
            raise CheckpointError(f"tokenizer_config.json: the id {token_id} of {token.content!r} leaves a gap")
        if known is not None and known != token_id:
            raise CheckpointError(f"{token.content!r} has two ids: {known} and {token_id}")
        backend.add_tokens([token])


def _add_roles(backend: tokenizers.Tokenizer, roles: dict[str, Any]) -> None:
    """BOS, EOS and the like are special even where the vocabulary file does not flag them."""
    named: list[Any] = [roles.get(role) for role in _ROLES]
    for key in _FURTHER:
        named += _listed(roles.get(key))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for value in named:
        content = _content(value)
        if content and content not in special and backend.token_to_id(content) is not None:
            backend.add_tokens([_added_token(value, True)])


def _added_token(value: Any, special: bool) -> AddedToken:
    flags = {"normalized": False}
    if isinstance(value, dict):
        flags = {flag: bool(value.get(flag, False)) for flag in _FLAGS}
    return AddedToken(_content(value) or "", special=special, **flags)


def _content(value: Any) -> str | None:
    """A token is written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; the files decide over the configuration, as on the hub."""
    found: dict[str, str] = {}
    kind = _read_object(folder / "config.json").get("model_type")
    own = [name for model_type, name in _OWN_TEMPLATES.items() if model_type == kind]
    listed = config.get("chat_template") or _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        entries: Iterable[Any] = listed[:_MAX_TEMPLATES]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name", "default"))] = entry["template"]
    for name in (_SINGLE_TEMPLATE, *own):
        if (single := folder / name).is_file():
            found["default"] = _read_text(single, MAX_TEMPLATE_BYTES)
    for directory in ("chat_templates", "additional_chat_templates"):
        for path in sorted((folder / directory).glob("*.jinja"))[:_MAX_TEMPLATES]:
            found[path.stem] = _read_text(path, MAX_TEMPLATE_BYTES)
    return {name: _begun(source) for name, source in found.items()} if kind in _BEGIN else found


def _begun(source: str) -> str:
    """Which begins as the model's processor has it where the template does not."""
    return source if "bos_token" in source else f"{{{{ bos_token or eos_token }}}}{source}"


def _read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path, limit))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {str(error)[:200]}", "download the model again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", "download the model again")
    return value


def _read_text(path: Path, limit: int) -> str:
    try:
        return _read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path.name} is not UTF-8 text", "download the model again") from None


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except PermissionError:
        raise AccessRefusedError(f"{path} may not be read") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > limit:
        raise CheckpointError(f"{path.name} is larger than {limit >> 20} MiB")
    return data
