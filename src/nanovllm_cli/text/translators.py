"""Vocabularies of models that translate or sum up (Marian, M2M100, mBART, NLLB, Pegasus): SentencePiece files whose pieces have
other ids in the model than in the file, and tokens that name languages.

    Marian      source.spm cuts a text, vocab.json has the ids, of what the other side writes, too
    M2M100      sentencepiece.bpe.model and vocab.json alike; behind them a token for each language
    mBART, NLLB sentencepiece.bpe.model, whose pieces are behind four tokens of fairseq's; behind them languages and a mask
    Pegasus     spiece.model, whose pieces are behind tokens for what was left out in training

As transformers' tokenizers of these names have it, without sacremoses. Not covered: Marian with a vocabulary for each side.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.reading_spec import LanguageTokens
from nanovllm_cli.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, UNUSED, PieceVocabulary, build_pieces
from nanovllm_cli.text.vocabulary import FOREIGN, TokenizerParts

MARIAN, FAIRSEQ, VOCAB = "source.spm", "sentencepiece.bpe.model", "vocab.json"
_RARE = -1e6
"""Score of a letter that only the other side's model has a piece for: it is taken where nothing else is there."""
_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig "
    "ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl "
    "so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
"""In the order of their tokens, as in fairseq; WMT21's models have fewer, and mBART-50 more than mBART."""
_WMT21 = "en ha is ja cs ru zh de"
_MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MBART_50 = (
    f"{_MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE "
    "ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_OF_FAIRSEQ = {"MBartTokenizer": _MBART, "MBart50Tokenizer": _MBART_50, "NllbTokenizer": ""}
_UNKNOWN, _SPECIAL = "<unk>", ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_MASKED = 103
"""Tokens in front of a Pegasus' pieces, less the two that these begin with."""


class _Kind(NamedTuple):
    """pattern: of tokens that are languages, the code in a group. home: what a text is taken for that nothing is said of."""

    pattern: re.Pattern[str]
    source: Literal["none", "first", "last"]
    target: Literal["read", "begun", "instead"]
    home: str = ""


_FLORES, _REGIONS = re.compile(r"([a-z]{3}_[A-Z][a-z]{3})"), re.compile(r"([a-z]{2,3}_[A-Z]{2})")
_KINDS = {
    "NllbTokenizer": _Kind(_FLORES, "first", "begun", "eng_Latn"),
    "MBartTokenizer": _Kind(_REGIONS, "last", "instead", "en_XX"),
    "MBart50Tokenizer": _Kind(_REGIONS, "first", "begun", "en_XX"),
    "M2M100Tokenizer": _Kind(re.compile(r"__([a-z]{2,3})__"), "first", "begun", "en"),
    "MarianTokenizer": _Kind(re.compile(r">>([\w-]{2,32})<<"), "none", "read"),
}  # fmt: skip
"""By transformers' classes, as tokenizer_config.json names them."""


def class_of(config: Mapping[str, Any]) -> str:
    """That of tokenizer_config.json, whether it is written in Rust or not."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def read_marian(source: PieceVocabulary, vocab: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerParts:
    if config.get("separate_vocabs"):
        raise UnsupportedError("a Marian with a vocabulary for each side", "take a model with one for both, as most have")
    return _ended(_by_name(source, _checked(vocab), []), "</s>", "<pad>", "<unk>")


def read_m2m100(pieces: PieceVocabulary, vocab: Mapping[str, Any], config: Mapping[str, Any]) -> TokenizerParts:
    codes = (_WMT21 if config.get("language_codes") == "wmt21" else _M2M100).split()
    return _ended(_by_name(pieces, _checked(vocab), [f"__{code}__" for code in codes]), "</s>", "<pad>", "<unk>", "<s>")


def read_fairseq(
    pieces: PieceVocabulary, config: Mapping[str, Any], model_type: object, listed: Sequence[str]
) -> TokenizerParts:
    """listed: languages as the files have them; none: those of mBART, or of mBART-50, by the tokenizer's class."""
    kind = class_of(config) or {"mbart": "MBartTokenizer", "m2m_100": "NllbTokenizer"}.get(str(model_type), "")
    if kind not in _OF_FAIRSEQ:
        told = f"{FAIRSEQ} of a tokenizer that is none of {', '.join(_OF_FAIRSEQ)}: {kind[:40] or 'its class is not said'}"
        raise UnsupportedError(told, "take a folder with a tokenizer.json; transformers makes one")
    codes = [each for each in listed if _KINDS[kind].pattern.fullmatch(each)] or _OF_FAIRSEQ[kind].split()
    before = ["<s>", "<pad>", "</s>", "<unk>"]
    parts = _behind(pieces, before, 3, [*codes, "<mask>"], unknown=3)
    return _ended(parts, "</s>", "<pad>", "<unk>", "<s>", "<mask>")


def read_pegasus(pieces: PieceVocabulary, config: Mapping[str, Any]) -> TokenizerParts:
    offset = config.get("offset", _MASKED)
    if type(offset) is not int or not 0 <= offset <= 10 * _MASKED:
        raise CheckpointError(f"tokenizer_config.json: 'offset' must be a number up to {10 * _MASKED}, not {str(offset)[:40]}")
    before = ["<pad>", "</s>"]
    if offset:
        before += ["<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, offset))]
    if pieces.unknown_id is None or pieces.unknown_id < 2:
        raise CheckpointError("spiece.model: a Pegasus' unknown is its third piece, or one behind")
    parts = _behind(pieces, before, 2, [], unknown=pieces.unknown_id + len(before) - 2)
    return _ended(parts, "</s>", "<pad>", "<unk>", *before[2:])


def surrounded(parts: TokenizerParts) -> TokenizerParts:
    """A RoBERTa's or a BART's vocabulary: a text is between two tokens, and two of the last are between two texts."""
    begin = parts.backend.token_to_id("<s>")
    parts = _ended(parts, "</s>", *_SPECIAL[:-1])
    if parts.backend.token_to_id("<mask>") is not None:
        parts.backend.add_tokens([AddedToken("<mask>", special=True, normalized=False, lstrip=True)])
    if begin is None:
        raise CheckpointError(f"{VOCAB} has no <s>", "download the model again")
    assert parts.eos_id is not None
    parts.bos_id, parts.prefix_ids, parts.between_ids = begin, (begin,), (parts.eos_id,) * 2
    return parts


def told_languages(parts: TokenizerParts, config: Mapping[str, Any], model_type: object) -> None:
    """Sets `languages`, and what goes around a text of the language that the files take it for, as transformers' classes do,
    whatever tokenizer.json says."""
    vocab = parts.backend.get_vocab(True) if (kind := _kind(parts.backend, config, model_type)) is not None else {}
    if kind is None:
        return
    found = {match[1]: i for token, i in vocab.items() if (match := kind.pattern.fullmatch(token)) is not None}
    if not found:
        return
    source: Literal["none", "first", "last"] = kind.source
    if class_of(config) == "NllbTokenizer" and config.get("legacy_behaviour") is True:
        source = "last"
    parts.languages = LanguageTokens(tuple(sorted(found.items(), key=lambda each: each[1])), source, kind.target)
    home = config.get("src_lang") or kind.home
    named = found.get(home, vocab.get(home)) if isinstance(home, str) else None
    if source != "none" and named is not None and parts.eos_id is not None:
        parts.prefix_ids, parts.suffix_ids = ((named,), (parts.eos_id,)) if source == "first" else ((), (parts.eos_id, named))


def _kind(backend: Tokenizer, config: Mapping[str, Any], model_type: object) -> _Kind | None:
    """By what tokenizer_config.json says, or what the model is."""
    if (named := _KINDS.get(class_of(config))) is not None:
        return named
    if model_type == "m2m_100":
        return _KINDS["M2M100Tokenizer" if backend.token_to_id("__en__") is not None else "NllbTokenizer"]
    return {"mbart": _KINDS["MBartTokenizer"], "marian": _KINDS["MarianTokenizer"]}.get(str(model_type))


def _checked(vocab: Mapping[str, Any]) -> list[str]:
    """Tokens in the order of their ids."""
    if not all(type(i) is int for i in vocab.values()) or sorted(vocab.values()) != list(range(len(vocab))):
        raise CheckpointError(f"{VOCAB}: its ids are not the numbers from 0 on", "download the model again")
    return sorted(vocab, key=vocab.__getitem__)


def _by_name(pieces: PieceVocabulary, known: list[str], behind: list[str]) -> TokenizerParts:
    """Ids are those of `known` tokens, and of others behind them. Pieces that are none of these come last, and are unknown ones:
    texts are cut by all pieces, and by no others, which have another name for that."""
    if _UNKNOWN not in known:
        raise CheckpointError(f"{VOCAB} has no {_UNKNOWN}", "download the model again")
    ordinary = {piece: i for i, (piece, kind) in enumerate(zip(pieces.pieces, pieces.types, strict=True))
                if kind not in (CONTROL, UNKNOWN)}  # fmt: skip
    languages = [token for token in known if _KINDS["MarianTokenizer"].pattern.fullmatch(token)]
    special = {*_SPECIAL, *behind, *languages}
    there = {*known, *behind}
    names, scores, types = list[str](), list[float](), list[int]()
    for name in (*known, *behind, *(piece for piece in ordinary if piece not in there)):
        i = ordinary.get(name)
        is_foreign = i is None and len(name) > 1 and name not in special
        names.append(FOREIGN + name if is_foreign else name)
        scores.append(_RARE if i is None else pieces.scores[i])
        types.append(pieces.types[i] if i is not None else NORMAL if pieces.unigram else CONTROL)
    whole = replace(pieces, pieces=names, scores=scores, types=types, unknown_id=known.index(_UNKNOWN))
    backend = build_pieces(whole)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*behind, *languages)])
    return TokenizerParts(backend, unk_id=whole.unknown_id, num_known=len(known) + len(behind))


def _behind(pieces: PieceVocabulary, before: list[str], first: int, after: list[str], *, unknown: int) -> TokenizerParts:
    """The file's pieces from `first` on, between other tokens."""
    names = [*before, *pieces.pieces[first:], *after]
    types = [*[UNUSED] * len(before), *pieces.types[first:], *[UNUSED] * len(after)]
    scores = [*[_RARE] * len(before), *pieces.scores[first:], *[_RARE] * len(after)]
    if len(set(names)) < len(names):
        raise CheckpointError("the SentencePiece model has pieces that are the model's own tokens", "download the model again")
    backend = build_pieces(replace(pieces, pieces=names, scores=scores, types=types, unknown_id=unknown))
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in after])
    return TokenizerParts(backend, unk_id=unknown)


def _ended(parts: TokenizerParts, end: str, *others: str) -> TokenizerParts:
    """With these as tokens that no text is made of, and an end behind each."""
    there: Collection[str] = [each for each in (end, *others) if parts.backend.token_to_id(each) is not None]
    if end not in there:
        raise CheckpointError(f"the vocabulary has no {end}", "download the model again")
    parts.backend.add_tokens([AddedToken(each, special=True, normalized=False) for each in there])
    parts.eos_id = parts.backend.token_to_id(end)
    parts.pad_id = parts.backend.token_to_id("<pad>")
    assert parts.eos_id is not None
    parts.suffix_ids = (parts.eos_id,)
    return parts
