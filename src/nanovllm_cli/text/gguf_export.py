"""A Hugging Face folder's tokenizer as the `tokenizer.*` keys of a GGUF file, under the names that llama.cpp's converter gives.

Byte-level BPE becomes `gpt2` with the name of its pre-tokenizer, SentencePiece-like BPE becomes `llama` with scores, or `gemma4`
with merges where it is Gemma 4's; WordPiece becomes `bert`, Unigram `t5`, and RWKV's vocabulary `rwkv`. What was made is read
again and compared on varied text: a vocabulary that would mean something else in GGUF is refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.text.gguf_tokenizer import load_gguf
from nanovllm_cli.text.pre_tokenizers import names_cutting_like, pre_tokenization
from nanovllm_cli.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_model
from nanovllm_cli.text.token_bytes import SPACE_MARK, byte_rule
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.tokenizer_files import MAX_VOCABULARY_BYTES, load_folder
from nanovllm_cli.text.vocabulary import GEMMA_TAGS, TokenizerParts, looks_like_control
from nanovllm_cli.text.world import escaped

PROBES = (
    "Once upon a time, there was a little girl named Lily. She couldn't believe it!",
    "def f(x):\n    return {'a': x[1:-1], \"b\": 3.14e-10}  # comment\n\n\tdone\r\n",
    "  leading and  double   spaces, tabs\t\tand trailing  \n\n\n ",
    "12345 6,789.01 0x1F 1st 2nd 3rd ١٢٣ ½",
    "I'M here, you'LL see; it's WE'RE they'd ’tis",
    "Straße, naïve café, İstanbul, Слово, λόγος, აბ",
    "你好，世界。こんにちは 안녕 สว\u0e31สด\u0e35 नमस\u094dत\u0947 مرحبا",
    "😀👨\u200d👩\u200d👧 $100 50% a/b\\c <b>x</b> …“q” ~^|`",
    "<0x0A> <unk> ▁x [PAD1] \x00\x01 \ufffd",
    "camelCase HTTPServer snake_case __init__ //// ---- ====",
)
"""Texts whose tokens must be the same in both forms of a vocabulary."""

_MAX_CANDIDATES = 4
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0  # llama.cpp's converter gives these
_ROLES = {"bos_id": "bos", "eos_id": "eos", "unk_id": "unknown", "pad_id": "padding"}
_PAIR_ROLES = {"sep_id": "seperator", "cls_id": "cls", "mask_id": "mask"}  # spelled as the format has it


_FORMS = {("BPE", "byte_level"), ("BPE", "sentencepiece"), ("WordPiece", "wordpiece"), ("Unigram", "sentencepiece")}


class GGUFVocabulary(NamedTuple):
    """`fields`: metadata keys with plain values. `notes`: what could not be carried, a line each."""

    fields: dict[str, Any]
    notes: list[str]


def gguf_vocabulary(
    folder: Path, vocab_size: int, end_ids: Sequence[int] = (), config: Mapping[str, Any] = MappingProxyType({})
) -> GGUFVocabulary:
    """The tokenizer of `folder` for a model of `vocab_size` rows; `end_ids` are what generation_config.json ends with.
    `config` is config.json, which names the roles of ids that the tokenizer's files don't.

    Raises CheckpointError (broken, or more tokens than rows), UnsupportedError (no such vocabulary in GGUF).
    """
    parts = load_folder(folder)
    source = Tokenizer(parts)
    # Each id is looked at, of a vocabulary with gaps too: the library writes one out in memory that grows with the highest.
    num_ids = max(source.vocab_size, *(token_id + 1 for token_id in parts.backend.get_vocab(True).values()))
    if num_ids > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {num_ids} tokens and the model {vocab_size}",
            "the folder mixes files of different models",
        )
    notes: list[str] = []
    common = _tokens(parts, vocab_size) | _around(parts, config, vocab_size, notes) | _templates(parts)
    if parts.is_world:
        fields = _world(common, source)
        _check(source, fields)
        _add_ends(fields, end_ids, notes)
        return GGUFVocabulary(fields, notes)
    state = json.loads(parts.backend.to_str())
    kind = byte_rule(parts.backend).kind
    model = state["model"]["type"]
    if (model, kind) not in _FORMS:
        raise UnsupportedError(
            f"a {model} vocabulary has no place in the GGUF of this architecture",
            "known: byte-level BPE, SentencePiece BPE, WordPiece, Unigram",
        )
    if model == "WordPiece":
        fields = _word_pieces(common, state, config)
        _check(source, fields)
    elif model == "Unigram":
        fields = _unigram(common, state, source, config)
    elif kind == "byte_level":
        fields = _byte_level(common, parts, state, source, notes)
    elif source.control_tokens.keys() >= GEMMA_TAGS or str(config.get("model_type")).startswith("gemma4"):
        fields = _raw_characters(common, state)
        if not source.adds_bos and parts.bos_id is not None:
            source = Tokenizer(replace(parts, prefix_ids=(parts.bos_id,)))
            notes.append("tokenizer: BOS comes before every text, as everywhere in GGUF with this vocabulary")
        _check(source, fields)
    else:
        fields = _pieces(common, folder, state, source)
        _check(source, fields)
        if _differs(source, Tokenizer(load_gguf(fields)), [f"{text}x y" for text in source.control_tokens]):
            notes.append("tokenizer: text right after a control token gets a space before it, as everywhere in GGUF")
    _add_ends(fields, end_ids, notes)
    if flagged := _flagged(parts, fields):
        what = ", ".join(flagged[:3]) + (f" and {len(flagged) - 3} more" if len(flagged) > 3 else "")
        notes.append(f"tokenizer: lstrip, rstrip or single_word of {what}")
    return GGUFVocabulary(fields, notes)


def _flagged(parts: TokenizerParts, fields: Mapping[str, Any]) -> list[str]:
    """Added tokens that depend on what is beside them in a text, but for the mask of encoders, which readers know to."""
    added = parts.backend.get_added_tokens_decoder().items()
    mask = fields.get("tokenizer.ggml.mask_token_id")
    return [each.content for id_, each in added if (each.lstrip or each.rstrip or each.single_word) and id_ != mask]


def vocabulary_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts out of a vocabulary's own tokens, about two thousand of them."""
    step = max(1, tokenizer.vocab_size // 2000)
    ids = range(0, tokenizer.vocab_size, step)
    for first in range(0, len(ids), 100):
        yield tokenizer.decode(ids[first : first + 100])


def same_tokens(source: Tokenizer, other: Tokenizer, texts: Sequence[str] = PROBES) -> str | None:
    """None where both make the same ids of these texts and of their own vocabulary; else a text that they differ on."""
    return _differs(source, other, [*texts, *vocabulary_texts(source)])


def _differs(source: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> str | None:
    pairs = zip(texts, source.encode_batch(texts), other.encode_batch(texts), strict=True)
    return next((text for text, wanted, found in pairs if wanted != found), None)


def _check(source: Tokenizer, fields: dict[str, Any]) -> None:
    text = same_tokens(source, Tokenizer(load_gguf(fields)))
    if text is not None:
        raise UnsupportedError(
            f"the tokenizer has no equal in GGUF: {text[:60]!r} would become other tokens",
            "keep the model as a Hugging Face folder",
        )


def _tokens(parts: TokenizerParts, vocab_size: int) -> dict[str, Any]:
    """Tokens and their types in id order; ids without a token get one that no text becomes."""
    backend = parts.backend
    added = backend.get_added_tokens_decoder()
    tokens: list[str] = []
    types: list[int] = []
    for token_id in range(vocab_size):
        token = backend.id_to_token(token_id)
        tokens.append(f"[PAD{token_id}]" if token is None else token)
        if token is None:
            types.append(UNUSED)
        elif token_id in added:
            control = added[token_id].special or looks_like_control(token)
            types.append(CONTROL if control else USER_DEFINED)
        else:
            types.append(NORMAL)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def _around(parts: TokenizerParts, config: Mapping[str, Any], vocab_size: int, notes: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    before, between, after = list(parts.prefix_ids), list(parts.between_ids), list(parts.suffix_ids)
    if len(before) == 1 and parts.bos_id is None:  # BERT's CLS, as llama.cpp's converter has it
        parts = replace(parts, bos_id=before[0])
    if len(after) == 1 and after != [parts.eos_id]:  # as llama.cpp's converter has it of Qwen3-Embedding
        if parts.eos_id is not None:
            fields["tokenizer.ggml.eot_token_id"] = parts.eos_id
        parts = replace(parts, eos_id=after[0])
    twice = between == [*after, parts.eos_id if parts.sep_id is None else parts.sep_id]
    if twice and parts.sep_id is None:
        parts = replace(parts, sep_id=parts.eos_id)
    for attribute, name in (_ROLES | (_PAIR_ROLES if between else {})).items():
        token_id = getattr(parts, attribute)
        if token_id is None:
            token_id = config.get(attribute.replace("_id", "_token_id"))
        if type(token_id) is int and 0 <= token_id < vocab_size:
            fields[f"tokenizer.ggml.{name}_token_id"] = token_id
    if before not in ([], [parts.bos_id]) or after not in ([], [parts.eos_id]):
        raise UnsupportedError(
            f"the tokenizer puts {before} before and {after} after a text; GGUF knows one BOS and one EOS only"
        )
    fields["tokenizer.ggml.add_bos_token"] = bool(before)
    if after:
        fields["tokenizer.ggml.add_eos_token"] = True
    if between:
        fields["tokenizer.ggml.add_sep_token"] = twice
        if between != after and not twice:
            notes.append(f"tokenizer: {between} between two texts that are read together")
    return fields


def _templates(parts: TokenizerParts) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, template in parts.chat_templates.items():
        fields["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = template
    named = [name for name in parts.chat_templates if name != "default"]
    if named:
        fields["tokenizer.chat_templates"] = named
    return fields


def _byte_level(
    common: dict[str, Any], parts: TokenizerParts, state: dict[str, Any], source: Tokenizer, notes: list[str]
) -> dict[str, Any]:
    """`gpt2`: merges, and the pre-tokenizer's name. Of several names the one whose other rules fit comes first, and among those
    an encoder's where texts are read in pairs."""
    model, normalizer = state["model"], state.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise UnsupportedError(f"the tokenizer's normalizer has no place in GGUF: {json.dumps(normalizer)[:120]}")
    merges = _merges(state)
    wanted = (normalizer is not None, bool(model.get("ignore_merges")))
    names = names_cutting_like(parts.backend.pre_tokenizer)
    rules = {name: pre_tokenization(name) for name in names}

    def unlike(name: str) -> tuple[bool, bool, bool]:
        rule = rules[name]
        return rule.ignore_merges != wanted[1], rule.nfc != wanted[0], ("bert" in name) != source.reads_pairs

    ranked = sorted(names, key=unlike)
    failure: UnsupportedError | None = None
    for name in ranked[:_MAX_CANDIDATES]:
        fields = {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, **common, "tokenizer.ggml.merges": merges
        }  # fmt: skip
        lost_nfc = wanted[0] and not rules[name].nfc
        try:
            _check(source, fields)
        except UnsupportedError as error:
            failure = failure or error
            continue
        if lost_nfc:
            notes.append("tokenizer: Unicode text is not put into NFC before it is cut")
        return fields
    raise failure or UnsupportedError(
        "the tokenizer cuts text as no pre-tokenizer that llama.cpp has a name for",
        "keep the model as a Hugging Face folder",
    )


def _world(common: dict[str, Any], source: Tokenizer) -> dict[str, Any]:
    """`rwkv`: bytes as a literal has them. What ends a text is id 0, and of an answer, too, what a folder calls so."""
    types = common["tokenizer.ggml.token_type"]
    tokens = [escaped(source.id_to_bytes(i)) if kind == NORMAL else token
              for i, (token, kind) in enumerate(zip(common["tokenizer.ggml.tokens"], types, strict=True))]  # fmt: skip
    ends = {"tokenizer.ggml.eot_token_id": source.eos_id} if source.eos_id else {}
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": source.adds_bos}
    return {"tokenizer.ggml.model": "rwkv", **common, "tokenizer.ggml.tokens": tokens, **ids, **ends}


def _pieces(common: dict[str, Any], folder: Path, state: dict[str, Any], source: Tokenizer) -> dict[str, Any]:
    """`llama`: a score for each token. They come from tokenizer.model, or say the order of the merges."""
    tokens, types = common["tokenizer.ggml.tokens"], common["tokenizer.ggml.token_type"]
    scores = _model_scores(folder, tokens) or _merge_scores(tokens, state["model"]["merges"])
    unknown = common.get("tokenizer.ggml.unknown_token_id")
    for position, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if position == unknown:
            types[position] = UNKNOWN
        elif kind == NORMAL and _is_byte(token):
            types[position] = BYTE
        elif kind == UNUSED:
            scores[position] = _UNUSED_SCORE
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **common, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": source.strips_leading_space,
    }  # fmt: skip


def _raw_characters(common: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """`gemma4`: merges, and scores that say nothing."""
    tokens, types = common["tokenizer.ggml.tokens"], common["tokenizer.ggml.token_type"]
    for position, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token in GEMMA_TAGS:
            types[position] = USER_DEFINED
        elif kind == NORMAL and _is_byte(token):
            types[position] = BYTE
    return {
        "tokenizer.ggml.model": "gemma4", **common, "tokenizer.ggml.scores": [_ADDED_SCORE] * len(tokens),
        "tokenizer.ggml.merges": _merges(state), "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip


def _word_pieces(common: dict[str, Any], state: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`bert`: what begins a word gets a mark before it, in place of the mark that what continues one had."""
    model, normalizer = state["model"], state.get("normalizer") or {}
    prefix = model["continuing_subword_prefix"]
    if normalizer.get("type") != "BertNormalizer" or prefix != "##":
        raise UnsupportedError(
            f"WordPiece with the normalizer {normalizer.get('type')} and the prefix {prefix!r} has no place in GGUF",
            "keep the model as a Hugging Face folder",
        )
    if not (common["tokenizer.ggml.add_bos_token"] and common.get("tokenizer.ggml.add_eos_token")):
        raise UnsupportedError(
            "WordPiece whose texts have no beginning or no end has no place in GGUF", "keep the model as a Hugging Face folder"
        )
    lowercase = bool(normalizer["lowercase"])
    strips = normalizer.get("strip_accents")
    # What files without tokenizer_config.json don't say.
    roles = {"seperator": common["tokenizer.ggml.eos_token_id"], "unknown": model["vocab"].get(model["unk_token"])}
    told = {f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in roles.items() if token_id is not None}
    marked = [
        token if kind == CONTROL else token[2:] if token.startswith(prefix) else SPACE_MARK + token
        for token, kind in zip(common["tokenizer.ggml.tokens"], common["tokenizer.ggml.token_type"], strict=True)
    ]
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.pre": "default", **(told | common), "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": lowercase if strips is None else bool(strips), **_token_types(config),
    }  # fmt: skip


def _unigram(
    common: dict[str, Any], state: dict[str, Any], source: Tokenizer, config: Mapping[str, Any]
) -> dict[str, Any]:
    """`t5`: scores, and the rules that texts are normalized by. Whether spaces are merged shows in what texts become."""
    tokens, types = common["tokenizer.ggml.tokens"], common["tokenizer.ggml.token_type"]
    own = [float(score) for _, score in state["model"]["vocab"]]
    scores = [own[i] if i < len(own) else _ADDED_SCORE for i in range(len(tokens))]
    unknown = state["model"].get("unk_id")
    for position, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if position == unknown:
            types[position] = UNKNOWN
        elif kind == NORMAL and state["model"].get("byte_fallback") and _is_byte(token):
            types[position] = BYTE
        if kind == UNUSED:
            scores[position] = _UNUSED_SCORE
        elif types[position] in (CONTROL, UNKNOWN):
            scores[position] = 0.0
    charsmaps = _charsmaps(state.get("normalizer"))
    if len(charsmaps) > 1:
        raise UnsupportedError("the tokenizer has two lists of normalization rules, and GGUF has place for one")
    fields = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.pre": "default", **common, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": source.strips_leading_space, **_token_types(config),
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }  # fmt: skip
    if unknown is not None:
        fields["tokenizer.ggml.unknown_token_id"] = unknown
    if charsmaps:
        fields["tokenizer.ggml.precompiled_charsmap"] = charsmaps[0]
    if same_tokens(source, Tokenizer(load_gguf(fields))) is not None:
        fields["tokenizer.ggml.remove_extra_whitespaces"] = False
        _check(source, fields)
    return fields


def _charsmaps(normalizer: Any) -> list[bytes]:
    if isinstance(normalizer, dict) and normalizer.get("type") == "Precompiled":
        return [base64.b64decode(normalizer["precompiled_charsmap"])]
    steps = normalizer.get("normalizers", []) if isinstance(normalizer, dict) else []
    return [charsmap for step in steps for charsmap in _charsmaps(step)]


def _token_types(config: Mapping[str, Any]) -> dict[str, Any]:
    count = config.get("type_vocab_size", 1)
    return {"tokenizer.ggml.token_type_count": count if type(count) is int and count > 0 else 1}


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _merges(state: dict[str, Any]) -> list[str]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    if not merges:  # an array of none is no field, and readers want one
        raise UnsupportedError("BPE without any merges has no place in GGUF", "keep the model as a Hugging Face folder")
    return merges


def _model_scores(folder: Path, tokens: list[str]) -> list[float] | None:
    """Scores of tokenizer.model, where there is one of the same pieces; tokens added to it get what llama.cpp gives them."""
    path = folder / "tokenizer.model"
    if not path.is_file() or path.stat().st_size > MAX_VOCABULARY_BYTES:
        return None
    try:
        vocabulary = read_model(path.read_bytes())
    except (CheckpointError, UnsupportedError):  # tekken and tiktoken vocabularies have the same file name
        return None
    if vocabulary.unigram or vocabulary.pieces != tokens[: len(vocabulary.pieces)]:
        return None
    return vocabulary.scores + [_ADDED_SCORE] * (len(tokens) - len(vocabulary.pieces))


def _merge_scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """The earlier a token is merged, the better its score. Tokens that no merge makes are never compared."""
    rank: dict[str, int] = {}
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        rank.setdefault(left + right, len(rank))
    return [-float(rank.get(token, len(rank))) for token in tokens]


def _add_ends(fields: dict[str, Any], end_ids: Sequence[int], notes: list[str]) -> None:
    """Ends of an answer that only generation_config.json declares, in the two keys that GGUF has for them."""
    if "tokenizer.ggml.eos_token_id" not in fields and end_ids:
        fields["tokenizer.ggml.eos_token_id"] = end_ids[0]
    known = Tokenizer(load_gguf(fields)).eos_ids
    lost = [token_id for token_id in end_ids if token_id not in known]
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        if lost and key not in fields:
            fields[key] = lost.pop(0)
    if lost:
        notes.append(f"generation_config.json: eos_token_id {', '.join(map(str, lost))}")
