"""SentencePiece vocabularies: reading `tokenizer.model`, and building a backend that encodes as SentencePiece does.

A vocabulary is a list of pieces with scores. For the BPE type the pair whose joined piece has the best score is merged
first (Kudo and Richardson 2018, section 3.1); the ranked merge list that `tokenizers` wants follows from the scores.
For the unigram type the best-scoring segmentation is taken. Characters without a piece fall back to byte pieces.

The model file is a protocol buffer; the few fields needed are read directly (encoding: protobuf.dev, "Encoding").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Regex as TokenizerRegex

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.text.charsmap import check_charsmap
from nanovllm_cli.text.token_bytes import SPACE_MARK

# Piece types; GGUF's token types have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_PIECE = 1024
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass
class PieceVocabulary:
    """Pieces in id order with their scores and types, and how text is normalized before it is cut."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unknown_id: int | None
    unigram: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""  # precompiled normalization rules; empty is the identity
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None

    @property
    def has_bytes(self) -> bool:
        return BYTE in self.types


def build_pieces(vocabulary: PieceVocabulary) -> tokenizers.Tokenizer:
    """A backend that cuts text as SentencePiece does. Special pieces are left to the caller, but for their ids."""
    unknown = None if vocabulary.unknown_id is None else vocabulary.pieces[vocabulary.unknown_id]
    model: models.Model
    if vocabulary.unigram:
        entries = [
            (piece, score if kind in (NORMAL, USER_DEFINED) else -1e6)
            for piece, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        ]
        model = models.Unigram(entries, vocabulary.unknown_id, byte_fallback=vocabulary.has_bytes)
    else:
        ids = {piece: position for position, piece in enumerate(vocabulary.pieces)}
        model = models.BPE(
            ids, score_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=vocabulary.has_bytes
        )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        check_charsmap(vocabulary.charsmap)
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(TokenizerRegex(r"\A +| +\z"), ""),
            normalizers.Replace(TokenizerRegex(" {2,}"), " "),
        ]
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    undo: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_dummy_prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(undo)
    return backend


def score_merges(vocabulary: PieceVocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best-scored result first.

    Only ordinary pieces merge: text that spells a control or byte piece stays text.
    """
    ids = {
        piece: position
        for position, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind in (NORMAL, UNUSED)
    }
    ranked = []
    for piece, position in ids.items():
        score = -vocabulary.scores[position]
        if len(piece) > MAX_PIECE:  # what its parts take to look up grows with its square
            raise CheckpointError(f"the vocabulary has a piece of {len(piece)} characters, at most {MAX_PIECE} are read")
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((score, left, right))
    ranked.sort()
    return [(vocabulary.pieces[left], vocabulary.pieces[right]) for _, left, right in ranked]


def read_model(data: bytes) -> PieceVocabulary:
    """A `tokenizer.model` file. Raises CheckpointError where it is broken, UnsupportedError for word or char models."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece, score, kind = _piece(value)
            pieces.append(piece)
            scores.append(score)
            types.append(kind)
        elif number == 2 and isinstance(value, bytes):
            trainer = {key: item for key, item in _fields(value) if isinstance(item, int)}
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces:
        raise CheckpointError("the SentencePiece model holds no pieces")
    model_type = _MODEL_TYPES.get(trainer.get(3, 1), "unknown")
    if model_type not in ("unigram", "bpe"):
        raise UnsupportedError(f"SentencePiece model type {model_type!r}; known: unigram, bpe")
    charsmap = normalizer.get(2, b"")
    return PieceVocabulary(
        pieces,
        scores,
        types,
        unknown_id=types.index(UNKNOWN) if UNKNOWN in types else None,
        unigram=model_type == "unigram",
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        bos_id=_optional_id(trainer.get(41, 1), len(pieces)),
        eos_id=_optional_id(trainer.get(42, 2), len(pieces)),
        pad_id=_optional_id(trainer.get(43, -1), len(pieces)),
    )


def special_pieces(vocabulary: PieceVocabulary) -> list[AddedToken]:
    """The pieces that are cut out of a text before anything else."""
    return [
        AddedToken(piece, special=kind != USER_DEFINED, normalized=False)
        for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            try:
                text = value.decode()
            except UnicodeDecodeError:
                raise CheckpointError("the SentencePiece model holds a piece that is not UTF-8") from None
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message: number, and an int for varints or the raw bytes for everything else."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise CheckpointError(f"the SentencePiece model is broken at byte {position} (wire type {wire})")
        if position + size > end:
            raise CheckpointError(f"the SentencePiece model is cut off at byte {end}")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise CheckpointError(f"the SentencePiece model is broken at byte {position} (number without end)")


def _optional_id(value: int, size: int) -> int | None:
    """Negative ids ("none") arrive as large unsigned numbers."""
    return value if 0 <= value < size else None
