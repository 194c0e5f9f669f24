"""Tokenizers from the metadata of GGUF files (the `tokenizer.*` keys, as llama.cpp writes and reads them).

Models: `llama` (SentencePiece BPE, merges derived from scores), `gpt2` (byte-level BPE), `gemma4` (BPE on raw
characters), `t5` (SentencePiece unigram: XLM-RoBERTa's files have it), `bert` (WordPiece), `plamo2` (pieces whose scores add
up to the most), `rwkv` (the longest ones first). Not covered: vocabulary-less files.

Where llama.cpp lets ordinary text merge into a control or byte token of the same spelling, this does not. Encoders' texts are put
into the form that the models were trained with: see `_bert` and `pre_tokenizers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Regex as TokenizerRegex

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.text.best_pieces import BestPieces
from nanovllm_cli.text.builtin_templates import builtin_template
from nanovllm_cli.text.pre_tokenizers import PARTED_TWICE, pre_tokenization
from nanovllm_cli.text.sentencepiece import (
    CONTROL,
    MAX_PIECE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    PieceVocabulary,
    build_pieces,
)
from nanovllm_cli.text.token_bytes import SPACE_MARK
from nanovllm_cli.text.vocabulary import END_TOKENS, GEMMA_TAGS, TokenizerParts, guard_library
from nanovllm_cli.text.world import build as build_world
from nanovllm_cli.text.world import unescaped

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_MAX_TEMPLATES = 32
_MAX_NEWLINES = 64
_NAMED_TEMPLATES = {"rwkv-world": "rwkv"}
"""What llama.cpp's converter writes in place of a template -> which of `builtin_templates.py` it means."""
_OF_CHARACTERS = {"granite-embed-multi-311m": True, "sarvam-moe": False}
"""Whose runs of newlines stay whole, where they are tokens."""


def load_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Backend, special ids and chat templates of a GGUF file's metadata."""
    fields = _Fields(metadata)
    model = fields.text("model", "")
    builders = {"llama": _llama, "gpt2": _gpt2, "gemma4": _gemma4, "t5": _t5, "bert": _bert, "plamo2": _plamo2,
                "rwkv": _rwkv}  # fmt: skip
    if model not in builders:
        raise UnsupportedError(
            f"unknown tokenizer model {model!r} in tokenizer.ggml.model; known: {', '.join(builders)}"
            if model
            else "the GGUF file has no tokenizer (tokenizer.ggml.model is missing)",
            "use the model's original folder with its tokenizer.json",
        )
    with guard_library(f"the GGUF {model} vocabulary"):
        parts = builders[model](fields)
        parts.sep_id, parts.mask_id = fields.token_id("seperator_token_id"), fields.token_id("mask_token_id")
        parts.cls_id = fields.token_id("cls_token_id")
        _add_special(parts.backend, fields)
    declared = (parts.eos_id, fields.token_id("eot_token_id"), fields.token_id("eom_token_id"))
    parts.end_ids = [token_id for token_id in declared if token_id is not None]
    parts.pad_id = fields.token_id("padding_token_id")
    parts.chat_templates = _templates(metadata)
    return parts


class _Fields:
    """Checked access to the `tokenizer.ggml.*` values."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        tokens = self.array("tokens", str)
        self.tokens = [token or f"[EMPTY_{position}]" for position, token in enumerate(tokens)]
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(self.ids) != len(self.tokens):
            twice = next(token for position, token in enumerate(self.tokens) if self.ids[token] != position)
            raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} twice")
        types = self.array("token_type", int) or [NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens")
        tags = GEMMA_TAGS if self.text("model", "") == "gemma4" else frozenset()
        ends = {
            token
            for token, kind in zip(self.tokens, types, strict=True)
            if token in END_TOKENS | tags and kind in (NORMAL, USER_DEFINED)
        }
        if "<|tool_response>" in self.ids:
            ends.discard("</s>")  # a tag like others in this vocabulary
        if self.text("model", "") == "rwkv":
            ends = set()
        if ends:  # Qwen's "</s>" is text like other tags: it is merged
            merges = set(self.array("merges", str))
            ends = {end for end in ends if merges.isdisjoint(f"{end[:cut]} {end[cut:]}" for cut in range(1, len(end)))}
        self.types = list(types)
        for end in ends:
            self.types[self.ids[end]] = CONTROL

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{_PREFIX}{key} must be a string, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(_PREFIX + key, default))

    def array(self, key: str, kind: type) -> list[Any]:
        value = self.metadata.get(_PREFIX + key, [])
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise CheckpointError(f"{_PREFIX}{key} must be an array")
        if not all(issubclass(found, kind) for found in set(map(type, value))):
            raise CheckpointError(f"{_PREFIX}{key} must hold {kind.__name__} values only")
        return list(value)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """An id by its key. Ids outside the vocabulary stand for "none" in real files (4294967295)."""
        value = self.metadata.get(_PREFIX + key, default)
        return int(value) if isinstance(value, int) and 0 <= value < len(self.tokens) else default

    def scores(self) -> list[float]:
        values = [float(score) for score in self.array("scores", float | int)]  # type: ignore[arg-type]
        if len(values) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.scores has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def merges(self) -> list[tuple[str, str]]:
        merges = self.array("merges", str)
        if not merges:
            raise CheckpointError("the GGUF file has no tokenizer.ggml.merges")
        pairs = []
        for merge in merges:
            left, space, right = merge.partition(" ")
            if not left:  # a piece may itself begin with a space
                first, space, right = right.partition(" ")
                left = f" {first}"
            if not space:
                raise CheckpointError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair")
            pairs.append((left, right))
        return pairs

    def around(
        self, bos: int | None, eos: int | None, *, add_bos: bool, add_eos: bool = False, add_sep: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ids before and after a text and between two, by `add_bos_token`, `add_eos_token` and `add_sep_token`: two texts are
        BOS a EOS SEP b EOS, without those that are not added."""
        prefix = (bos,) if bos is not None and self.flag("add_bos_token", add_bos) else ()
        suffix = (eos,) if eos is not None and self.flag("add_eos_token", add_eos) else ()
        sep = self.token_id("seperator_token_id", eos)
        parted = suffix and sep is not None and self.flag("add_sep_token", add_sep)
        return prefix, suffix, (*suffix, sep) if parted and sep is not None else suffix


def _llama(fields: _Fields) -> TokenizerParts:
    bos, eos = fields.token_id("bos_token_id", 1), fields.token_id("eos_token_id", 2)
    unknown = fields.token_id("unknown_token_id", 0)
    vocabulary = PieceVocabulary(fields.tokens, fields.scores(), fields.types, unknown)
    vocabulary.add_dummy_prefix = fields.flag("add_space_prefix", True)
    vocabulary.remove_extra_whitespaces = False
    return TokenizerParts(build_pieces(vocabulary), bos, eos, None, unknown, *fields.around(bos, eos, add_bos=True))


def _t5(fields: _Fields) -> TokenizerParts:
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id", 1)
    unknown = fields.token_id("unknown_token_id", 2)
    # Rules are looked up as Hugging Face's library does: a character's marks go where it is replaced. llama.cpp keeps those.
    vocabulary = PieceVocabulary(fields.tokens, fields.scores(), fields.types, unknown, unigram=True)
    vocabulary.add_dummy_prefix = fields.flag("add_space_prefix", True)
    vocabulary.remove_extra_whitespaces = fields.flag("remove_extra_whitespaces", False)
    charsmap = fields.metadata.get(_PREFIX + "precompiled_charsmap")
    if charsmap is not None:
        vocabulary.charsmap = bytes(value & 0xFF for value in charsmap)
    # XLM-RoBERTa's, which begin a text with BOS, part two by EOS SEP, T5's by EOS. Older files don't say so.
    around = fields.around(bos, eos, add_bos=False, add_eos=True, add_sep=fields.flag("add_bos_token", False))
    return TokenizerParts(build_pieces(vocabulary), bos, eos, None, unknown, *around)


def _plamo2(fields: _Fields) -> TokenizerParts:
    """Pieces are cut before the library's model looks them up, which makes bytes of what is none."""
    if (longest := max(map(len, fields.tokens), default=0)) > MAX_PIECE:  # what it takes to look one up grows with its square
        raise CheckpointError(f"the vocabulary has a piece of {longest} characters, at most {MAX_PIECE} are read")
    pieces = zip(fields.tokens, fields.scores(), fields.types, strict=True)
    cut = BestPieces({piece: score for piece, score, kind in pieces if kind in (NORMAL, USER_DEFINED, UNUSED)})
    if lacking := [name for value in range(256) if (name := f"<0x{value:02X}>") not in fields.ids]:
        raise CheckpointError(f"the vocabulary has no token for the byte {lacking[0]}")
    backend = tokenizers.Tokenizer(models.BPE(fields.ids, [], byte_fallback=True, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(cut)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    bos, eos = fields.token_id("bos_token_id", 1), fields.token_id("eos_token_id", 2)
    around = fields.around(bos, eos, add_bos=False)
    return TokenizerParts(backend, bos, eos, None, fields.token_id("unknown_token_id", 0), *around)


def _rwkv(fields: _Fields) -> TokenizerParts:
    """What is no plain token has a name: the end of a text, and what fills a vocabulary up."""
    kinds = [*enumerate(zip(fields.tokens, fields.types, strict=True))]
    tokens = {i: unescaped(token) for i, (token, kind) in kinds if kind == NORMAL}
    names = {token: i for i, (token, kind) in kinds if kind != NORMAL}
    backend = build_world(tokens, {name: i for name, i in names.items() if fields.types[i] != UNUSED}, "the vocabulary", names)
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    around = fields.around(bos, eos, add_bos=False)
    return TokenizerParts(backend, bos, eos, None, fields.token_id("unknown_token_id"), *around, is_world=True)


def _gpt2(fields: _Fields) -> TokenizerParts:
    """Some of the names are of vocabularies of raw characters, as Gemma 4's."""
    name = fields.text("pre", "default") or "default"
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    if name in _OF_CHARACTERS:
        backend, adds_bos = _of_characters(fields, runs=_OF_CHARACTERS[name]), False
    else:
        rule = pre_tokenization(name)
        backend, adds_bos = rule.backend(fields.ids, fields.merges()), rule.add_bos
    around = fields.around(bos, eos, add_bos=adds_bos, add_sep=name in PARTED_TWICE)
    return TokenizerParts(backend, bos, eos, None, fields.token_id("unknown_token_id"), *around)


def _gemma4(fields: _Fields) -> TokenizerParts:
    backend = _of_characters(fields, runs=True)
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    _, suffix, between = fields.around(bos, eos, add_bos=True)
    prefix = () if bos is None else (bos,)
    return TokenizerParts(backend, bos, eos, None, fields.token_id("unknown_token_id"), prefix, suffix, between)


def _of_characters(fields: _Fields, *, runs: bool) -> tokenizers.Tokenizer:
    """Merges over raw characters, spaces made visible, cut only at runs of newlines; unknown characters as bytes. runs: one that
    is a token stays whole, whether the file has merges for it or not."""
    unknown = fields.token_id("unknown_token_id")
    merges = fields.merges()
    listed = {pair for pair in merges if not pair[0].strip("\n")}
    model = models.BPE(
        fields.ids,
        merges + [pair for pair in (_newline_merges(fields.ids) if runs else ()) if pair not in listed],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else fields.tokens[unknown],
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.pre_tokenizer = pre_tokenizers.Split(TokenizerRegex(r"[^\n]+|[\n]+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _newline_merges(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    runs = [number for number in range(1, _MAX_NEWLINES + 1) if "\n" * number in ids]
    pairs = [(left, total - left) for total in runs for left in runs if total - left in runs]
    return [("\n" * left, "\n" * right) for left, right in pairs]


def _bert(fields: _Fields) -> TokenizerParts:
    """WordPiece, as BERT's own tokenizer has it. CLS and SEP go around every text, whatever the flags say, as in llama.cpp.

    llama.cpp differs where accents are stripped from Korean (of a syllable it keeps the first letter) and from Indian scripts (it
    strips vowel signs as well, BERT marks without a width of their own alone), and where a word has more than 100 characters (it
    goes on, BERT has one unknown token). A cased model whose file does not say so is lowercased, as there: older files can't say.
    """
    fields.tokens = [_word_piece(token, kind) for token, kind in zip(fields.tokens, fields.types, strict=True)]
    vocab = {token: token_id for token_id, token in enumerate(fields.tokens)}
    if len(vocab) != len(fields.tokens):
        twice = next(token for token_id, token in enumerate(fields.tokens) if vocab[token] != token_id)
        raise CheckpointError(f"tokenizer.ggml.tokens holds the piece {twice!r} twice")
    unknown, separate = fields.token_id("unknown_token_id", 100), fields.token_id("seperator_token_id", 102)
    classify = fields.token_id("bos_token_id", fields.token_id("cls_token_id", 101))
    if unknown is None or classify is None or separate is None or max(unknown, classify, separate) >= len(vocab):
        raise CheckpointError("a bert vocabulary without unknown, classification or separator token")
    lowercase = fields.flag("normalizer.lowercase", True)
    model = models.WordPiece(vocab, unk_token=fields.tokens[unknown], max_input_chars_per_word=100)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=fields.flag("normalizer.strip_accents", lowercase)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    around = ((classify,), (separate,), (separate,))
    return TokenizerParts(backend, classify, fields.token_id("eos_token_id"), None, unknown, *around)


def _word_piece(token: str, kind: int) -> str:
    """A token in the usual form: files mark what begins a word, by U+2581, and the usual form marks what continues one, by `##`.
    Control tokens have no mark in files, older ones have none at any `[name]`."""
    if kind != CONTROL and len(token) > 1 and token.startswith(SPACE_MARK):
        return token[1:]
    named = token.startswith("[") and token.endswith("]")
    return f"##{token}" if kind == NORMAL and not named else token


def _add_special(backend: tokenizers.Tokenizer, fields: _Fields) -> None:
    """Control, unknown and user-defined tokens are cut out of a text before anything else."""
    name = str(fields.metadata.get("general.name", "")).lower()
    eats_space = "phi-3" in name or "phi3" in name  # the file has no place for this; llama.cpp goes by the name too
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    # RoBERTa's, XLM-RoBERTa's and ModernBERT's mask takes the space before it along, BERT's does not.
    encodes = "bert" in str(fields.metadata.get("general.architecture", "")) and fields.text("model", "") != "bert"
    mask = fields.token_id("mask_token_id") if encodes else None
    added = [
        AddedToken(
            token,
            special=kind != USER_DEFINED,
            normalized=False,
            lstrip=token_id == mask,
            rstrip=eats_space and token not in keeps_space,
        )
        for token_id, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    backend.add_tokens(added)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` as "default", `tokenizer.chat_template.NAME` by name."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if not isinstance(value, str) or len(found) >= _MAX_TEMPLATES:
            continue
        if key == _TEMPLATE:
            found["default"] = builtin_template(_NAMED_TEMPLATES[value]) if value in _NAMED_TEMPLATES else value
        elif key.startswith(_TEMPLATE + "."):
            found[key[len(_TEMPLATE) + 1 :]] = value
    return found
