"""Vocabularies of models that translate or sum up, against transformers' own tokenizers of them, by tiny files of pieces; and
languages by what they are called."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.text.languages import language_code
from nanovllm_cli.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
LETTERS = "abcdeäö"


def words(seed: int, letters: str = LETTERS) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(letters, k=generator.randint(1, 7))) for _ in range(300)]


def pieces(kind: str = "unigram", seed: int = 0, size: int = 180, **options: Any) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    generator, own = random.Random(seed), words(seed)
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(generator.choices(own, k=12)) for _ in range(400)), model_writer=buffer, vocab_size=size,
        hard_vocab_limit=False, model_type=kind, minloglevel=2, **options,
    )  # fmt: skip
    return buffer.getvalue()


def listed(model: bytes) -> list[str]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def texts() -> list[str]:
    generator, own = random.Random(1), words(0) + words(9)
    plain = ["", "a", "  a  b ", "abc xyz", "äö ab", "ß", "aßb ab", "zzz", "a\tb\nc", "Ａb ｃ", "a\u200bb", "…", "e\u0308", "▁a",
             "漢字 ab"]  # fmt: skip
    return plain + [" ".join(generator.choices(own, k=generator.randint(1, 9))) for _ in range(200)]


def marian(folder: Path, kind: str = "unigram", **config: Any) -> Path:
    """Some pieces have no id, in others' place there are some of the other side's."""
    source, target = pieces(kind), pieces(kind, 5)
    own = [piece for piece in listed(source)[3:] if len(piece) < 3 or hash_of(piece) % 7]
    others = [piece for piece in listed(target)[3:] if piece not in listed(source)]
    generator = random.Random(2)
    both = [*own, *others, "ß", "▁xyz"]
    generator.shuffle(both)
    vocab = {token: i for i, token in enumerate(["</s>", "<unk>", *both, ">>deu<<", ">>pt_br<<", "<pad>"])}
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer", **config}))
    return folder


def hash_of(piece: str) -> int:
    return sum(map(ord, piece))


def m2m100(folder: Path) -> Path:
    model = pieces("bpe")
    own = [piece for piece in listed(model)[3:] if len(piece) < 3 or hash_of(piece) % 7]
    random.Random(2).shuffle(own)
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *own, "madeup"])}
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "M2M100Tokenizer"}))
    return folder


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_marians_texts_are_cut_as_transformers_cuts_them(kind: str, tmp_path: Path) -> None:
    theirs, ours = transformers.MarianTokenizer.from_pretrained(marian(tmp_path, kind)), Tokenizer.from_folder(tmp_path)
    some_unknown = 0
    for text in [*texts(), ">>deu<< abc ab", ">>pt_br<<a", "a</s>b"]:
        wanted = theirs(text)["input_ids"]
        assert ours.encode(text) == wanted, text
        some_unknown += theirs.unk_token_id in wanted
        if not text.startswith(">>") and theirs.unk_token_id not in wanted:
            assert ours.decode(wanted).strip() == theirs.decode(wanted, skip_special_tokens=True).strip()
    assert some_unknown > 10
    assert ours.vocab_size == len(theirs.encoder)
    assert ours.languages is not None
    assert set(ours.languages.codes) == {"deu", "pt_br"}


def test_m2m100s_texts_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    theirs, ours = transformers.M2M100Tokenizer.from_pretrained(m2m100(tmp_path)), Tokenizer.from_folder(tmp_path)
    for text in texts():
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.languages is not None
    assert ours.languages.codes == theirs.lang_code_to_id
    assert ours.vocab_size == len(theirs.encoder) + 100


def fairseq(folder: Path, kind: str, **config: Any) -> Path:
    """As published: pieces whose first three are what fairseq has others for."""
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **config}))
    return folder


def pegasus(folder: Path) -> Path:
    (folder / "spiece.model").write_bytes(pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PegasusTokenizer"}))
    return folder


def by_sentencepiece(folder: Path, kind: str, text: str, theirs: list[int]) -> list[int]:
    """Its pieces by their ids in the model, between what transformers has around them."""
    import sentencepiece

    name, first, own = ("spiece.model", 103, 0) if kind == "PegasusTokenizer" else ("sentencepiece.bpe.model", 1, 1)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
    before, after = {"PegasusTokenizer": (0, 1), "MBartTokenizer": (0, 2), "MBart50Tokenizer": (1, 1)}[kind]
    found = [3 if own and i == processor.unk_id() else i + first for i in processor.encode(text)]
    return [*theirs[:before], *found, *theirs[len(theirs) - after :]]


@pytest.mark.parametrize("kind", ["MBartTokenizer", "MBart50Tokenizer", "PegasusTokenizer"])
@pytest.mark.parametrize("saved", [False, True])
def test_others_texts_are_cut_as_transformers_cuts_them(kind: str, saved: bool, tmp_path: Path) -> None:
    """By pieces alone, as SentencePiece cuts them, and by the tokenizer.json that transformers makes of them, which keeps spaces
    at an end."""
    folder = pegasus(tmp_path) if kind == "PegasusTokenizer" else fairseq(tmp_path, kind)
    theirs = getattr(transformers, kind).from_pretrained(folder)
    if saved:
        folder = tmp_path / "saved"
        theirs.save_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in texts():
        own = theirs(text)["input_ids"]
        assert ours.encode(text) == (own if saved else by_sentencepiece(folder, kind, text, own)), text
    assert ours.vocab_size == len(theirs)
    if kind == "PegasusTokenizer":
        assert ours.languages is None
        return
    assert ours.languages is not None
    for code in ("de_DE", "zh_CN", *(["gl_ES"] if "50" in kind else [])):
        assert ours.languages.codes[code] == theirs.convert_tokens_to_ids(code)
        theirs.src_lang = code
        wanted = theirs("ab cde")["input_ids"]
        assert ours.languages.source != "none"
        assert ours.languages.placed(ours.encode("ab cde"), ours.languages.codes[code], ours.languages.source) == wanted


FLORES = ("ace_Latn", "arb_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "nob_Latn", "pes_Arab", "zho_Hans", "zho_Hant", "yue_Hant")
OTHERS = ("de", "en", "fr", "no", "zh", "tl", "pt_br", "pt_PT")


@pytest.mark.parametrize(
    ("given", "known", "wanted"),
    [
        ("deu_Latn", FLORES, "deu_Latn"), ("DEU_latn", FLORES, "deu_Latn"), ("de", FLORES, "deu_Latn"),
        ("de-AT", FLORES, "deu_Latn"), ("German", FLORES, "deu_Latn"), (" german ", FLORES, "deu_Latn"),
        ("deu", FLORES, "deu_Latn"), ("no", FLORES, "nob_Latn"), ("fas", FLORES, "pes_Arab"), ("ar", FLORES, "arb_Arab"),
        ("zh-Hans", FLORES, "zho_Hans"), ("cmn_hant", FLORES, "zho_Hant"), ("cantonese", FLORES, "yue_Hant"),
        ("deu", OTHERS, "de"), ("deu_Latn", OTHERS, "de"), ("nob", OTHERS, "no"), ("fil", OTHERS, "tl"),
        ("pt-BR", OTHERS, "pt_br"),
    ],
)  # fmt: skip
def test_languages_have_many_names(given: str, known: tuple[str, ...], wanted: str) -> None:
    assert language_code(given, known) == wanted


@pytest.mark.parametrize(
    ("given", "known", "said", "hint"),
    [
        ("zh", FLORES, "in several ways", "zho_Hans, zho_Hant"), ("portuguese", OTHERS, "in several ways", "pt_br, pt_PT"),
        ("germann", FLORES, "does not know", "german (deu_Latn)"), ("deu_Latm", FLORES, "does not know", "deu_Latn"),
        ("es", FLORES, "does not know", ""), ("", FLORES, "does not know", ""), ("x" * 999, OTHERS, "does not know", "known are"),
    ],
)  # fmt: skip
def test_words_that_are_no_language_are_refused_with_those_that_are_near(
    given: str, known: tuple[str, ...], said: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=said) as error:
        language_code(given, known)
    assert hint in str(error.value.hint)
    assert len(error.value.message) < 120


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("vocab.json", "[]", CheckpointError, "not a JSON object"),
        ("vocab.json", '{"</s>": 0, "<unk>": 2}', CheckpointError, "not the numbers from 0 on"),
        ("vocab.json", '{"</s>": 0, "<unk>": "1"}', CheckpointError, "not the numbers from 0 on"),
        ("vocab.json", '{"</s>": 0, "a": 1}', CheckpointError, "no <unk>"),
        ("vocab.json", '{"<unk>": 0, "a": 1}', CheckpointError, "no </s>"),
        ("tokenizer_config.json", '{"separate_vocabs": true}', UnsupportedError, "for each side"),
        ("source.spm", "no pieces", CheckpointError, ""),
    ],
)  # fmt: skip
def test_files_that_make_no_sense_are_refused(
    name: str, content: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    (marian(tmp_path) / name).write_text(content)
    with pytest.raises(error, match=said):
        Tokenizer.from_folder(tmp_path)


def test_a_pegasus_and_its_kin_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    told = {"tokenizer_class": "PegasusTokenizer", "offset": 10**9}
    (pegasus(tmp_path) / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="offset"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "spiece.model").write_bytes(pieces())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PegasusTokenizer"}))
    with pytest.raises(CheckpointError, match="third piece"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("told", [{"tokenizer_class": "BartTokenizer"}, None])
def test_a_barts_texts_are_between_two_tokens(told: dict[str, str] | None, tmp_path: Path) -> None:
    """Of vocab.json and merges.txt, as older folders have them, also where the model's kind alone says whose they are."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    merges = [("a", "b"), ("c", "d"), ("\u0120", "ab"), ("ab", "cd")]
    names = ["<s>", "<pad>", "</s>", "<unk>", *letters, *map("".join, merges), "<mask>"]
    vocab = {name: i for i, name in enumerate(names)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    if told is None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    mask = transformers.AddedToken("<mask>", lstrip=True, special=True, normalized=False)
    theirs = transformers.BartTokenizer(vocab=vocab, merges=merges, mask_token=mask)
    ours = Tokenizer.from_folder(tmp_path)
    for text in [*texts(), "ab abcd", "a <mask> b", "a</s>b"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode_pair("ab", "cd").ids == theirs("ab", "cd")["input_ids"]
    assert ours.eos_id == 2


def test_pieces_of_fairseqs_that_lie_otherwise_are_refused(tmp_path: Path) -> None:
    """CamemBERT's file has the same name, and other tokens in front."""
    with pytest.raises(UnsupportedError, match="CamembertTokenizer"):
        Tokenizer.from_folder(fairseq(tmp_path, "CamembertTokenizer"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedError, match="not said"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mbart"}))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.languages is not None
    assert (len(ours.languages.codes), ours.languages.source, ours.languages.target) == (25, "last", "instead")


def test_nllbs_languages_stand_where_it_was_trained_to_have_them(tmp_path: Path) -> None:
    """In front of a text, or behind it where the file asks for how it once was."""
    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces("bpe"))
    codes = ["eng_Latn", "deu_Latn", "zho_Hans"]
    for legacy in (False, True):
        config = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": codes, "legacy_behaviour": legacy}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = Tokenizer.from_folder(tmp_path)
        assert ours.languages is not None
        assert set(ours.languages.codes) == set(codes)
        ids, english = ours.encode("ab cde"), ours.languages.codes["eng_Latn"]
        text = ours.encode("ab cde", add_special_tokens=False)
        assert ids == ([*text, ours.eos_id, english] if legacy else [english, *text, ours.eos_id])
        assert (ours.languages.source, ours.languages.target) == ("last" if legacy else "first", "begun")
