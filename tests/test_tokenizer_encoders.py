"""Encoders' tokenizers (BERT, XLM-RoBERTa, RoBERTa, ModernBERT) in folders and in GGUF files, one way and the other, against
transformers' own of the same vocabularies; pairs of texts; normalization rules that are broken."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, BertTokenizer, RobertaTokenizer, XLMRobertaTokenizer

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.text.charsmap import check_charsmap
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.gguf_export import PROBES, gguf_vocabulary
from nanovllm_cli.text.hf_export import hf_tokenizer
from nanovllm_cli.text.sentencepiece import read_model
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.convert_gguf import _typed
from nanovllm_cli.weights.gguf import GGUFFile

TEXTS = (
    *PROBES,
    "",
    "  \t\n ",
    "The QUICK brown fox, jumping over 3 lazy dogs' backs!",
    "naïve Ångström ÉCOLE e\u0301 İstanbul ﬁne ½ Ⅷ ①",
    "你好world，한국어 안녕 नमस्ते दुनिया สวัสดี",
    "a\u00adb\u200bc\u0000d\ufffde\u00a0f\u3000g\u2028h",
    "x" * 101 + " " + "y" * 100,
    "#hash ##sharp [brackets] [x] $5 ^_^ a_b ▁c",
    "[CLS] and [SEP] <s> and </s>, [MASK] or <mask>; [UNK] <unk>",
)
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "jumping jumped jumps over and under", "you the and hello world"]
PAIRS = (("what is a fox?", "The quick brown fox."), ("", "x"), ("你好", "naïve"))


def bert(folder: Path, *, lowercase: bool = True) -> Any:
    """A small BERT's tokenizer, as transformers saves one; it is returned."""
    trained = Backend(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    vocab = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    theirs = BertTokenizer(vocab=dict(vocab), do_lower_case=lowercase)
    theirs.save_pretrained(folder)
    return theirs


def xlm_roberta(folder: Path) -> Any:
    vocabulary = read_model(unigram_model())
    own = list(zip(vocabulary.pieces, vocabulary.scores, strict=True))[3:]
    vocab = [*[(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")], *own, ("<mask>", 0.0)]
    theirs = XLMRobertaTokenizer(vocab=vocab, _spm_precompiled_charsmap=vocabulary.charsmap)
    theirs.save_pretrained(folder)
    return theirs


def unigram_model(**options: Any) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in CORPUS if line.strip()] * 3), model_writer=buffer, vocab_size=400,
        hard_vocab_limit=False, model_type="unigram", minloglevel=2, **options,
    )  # fmt: skip
    return buffer.getvalue()


def byte_level(folder: Path, kind: str) -> Any:
    """RoBERTa's and ModernBERT's."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    if kind == "roberta":
        names = ["<s>", "<pad>", "</s>", "<unk>", *model["vocab"], "<mask>"]
        mask = AddedToken("<mask>", lstrip=True, normalized=False)  # as in roberta-base's files
        theirs = RobertaTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=merges, mask_token=mask)
        theirs.save_pretrained(folder)
        return theirs
    backend = Backend(models.BPE(model["vocab"], merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    backend.add_special_tokens([AddedToken(name, normalized=False, lstrip=name == "[MASK]") for name in roles.values()])
    ends = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends)
    backend.save(str(folder / "tokenizer.json"))
    names_of = ["input_ids", "attention_mask"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names_of, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


KINDS = ("bert", "cased bert", "xlm-roberta", "roberta", "modernbert")
TYPES = {"bert": 2, "cased bert": 2}
FIELDS = {"general.architecture": "some-bert"}  # of which an encoder's masks are known


def made(kind: str, folder: Path) -> Any:
    folder.mkdir()
    if kind in TYPES:
        return bert(folder, lowercase=kind == "bert")
    return xlm_roberta(folder) if kind == "xlm-roberta" else byte_level(folder, kind)


def fields_of(folder: Path, kind: str, theirs: Any) -> dict[str, Any]:
    config = {"type_vocab_size": TYPES[kind]} if kind in TYPES else {"type_vocab_size": 1}
    vocabulary = gguf_vocabulary(folder, len(theirs) + 2, (), config)
    assert vocabulary.notes == []
    return vocabulary.fields


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_pairs_are_transformers_in_a_folder_in_gguf_and_back(tmp_path: Path, kind: str) -> None:
    theirs = made(kind, tmp_path / "there")
    fields = fields_of(tmp_path / "there", kind, theirs)
    (tmp_path / "back").mkdir()
    for name, data in hf_tokenizer(FIELDS | fields, 512).files.items():
        (tmp_path / "back" / name).write_bytes(data)
    again = AutoTokenizer.from_pretrained(tmp_path / "back")
    wanted = [theirs(text)["input_ids"] for text in TEXTS]
    assert [again(text)["input_ids"] for text in TEXTS] == wanted
    folders = [Tokenizer.from_folder(tmp_path / name) for name in ("there", "back")]
    for ours in (*folders, Tokenizer.from_gguf(FIELDS | fields)):
        assert [ours.encode(text) for text in TEXTS] == ours.encode_batch(TEXTS) == wanted
        assert ours.reads_pairs
        for first, second in PAIRS:
            both, found = theirs(first, second, return_token_type_ids=True), ours.encode_pair(first, second)
            assert found.ids == both["input_ids"] == again(first, second)["input_ids"]
            assert found.second == len(found.ids) - len(theirs(second)["input_ids"]) + 1
            if kind in TYPES:
                types = [0] * found.second + [1] * (len(found.ids) - found.second)
                assert both["token_type_ids"] == types == again(first, second)["token_type_ids"]
    assert gguf_vocabulary(tmp_path / "back", len(theirs) + 2, (), {"type_vocab_size": TYPES.get(kind, 1)}).fields == fields


@pytest.mark.parametrize("kind", KINDS)
def test_roles_in_gguf_are_those_that_llama_cpps_converter_finds(tmp_path: Path, kind: str) -> None:
    theirs = made(kind, tmp_path / "there")
    fields = fields_of(tmp_path / "there", kind, theirs)
    roles = gguf.SpecialVocab(tmp_path / "there")
    spelled = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    for role, token_id in roles.special_token_ids.items():
        assert fields[f"tokenizer.ggml.{spelled.get(role, role)}_token_id"] == token_id, role
    assert len(roles.special_token_ids) == 7
    for role, adds in roles.add_special_token.items():
        assert fields[f"tokenizer.ggml.add_{role}_token"] is adds, role
    assert len(roles.add_special_token) == 3


def test_bert_in_gguf_marks_what_begins_a_word(tmp_path: Path) -> None:
    theirs = made("bert", tmp_path / "there")
    fields = fields_of(tmp_path / "there", "bert", theirs)
    names = theirs.convert_ids_to_tokens(range(len(theirs)))
    control = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert fields["tokenizer.ggml.tokens"][: len(names)] == [
        name if name in control else name[2:] if name.startswith("##") else f"\u2581{name}" for name in names
    ]
    size = len(names)
    assert fields["tokenizer.ggml.tokens"][size:] == [f"\u2581[PAD{size}]", f"\u2581[PAD{size + 1}]"]
    assert fields["tokenizer.ggml.token_type"] == [*[3 if name in control else 1 for name in names], 5, 5]
    assert "\u2581[unused0]" in fields["tokenizer.ggml.tokens"]
    assert fields["tokenizer.ggml.model"] == "bert"
    assert fields["tokenizer.ggml.token_type_count"] == 2
    assert fields["tokenizer.ggml.normalizer.lowercase"] is fields["tokenizer.ggml.normalizer.strip_accents"] is True


def test_xlm_roberta_in_gguf_has_the_folders_scores_and_rules(tmp_path: Path) -> None:
    theirs = made("xlm-roberta", tmp_path / "there")
    fields = fields_of(tmp_path / "there", "xlm-roberta", theirs)
    state = json.loads((tmp_path / "there" / "tokenizer.json").read_text())
    pieces = state["model"]["vocab"]
    assert fields["tokenizer.ggml.model"] == "t5"
    assert fields["tokenizer.ggml.tokens"][: len(pieces)] == [piece for piece, _ in pieces]
    assert fields["tokenizer.ggml.scores"] == pytest.approx([*[score for _, score in pieces], -10000.0, -10000.0])
    assert fields["tokenizer.ggml.token_type"] == [3, 3, 3, 2, *[1] * (len(pieces) - 5), 3, 5, 5]
    assert fields["tokenizer.ggml.precompiled_charsmap"] == base64.b64decode(state["normalizer"]["precompiled_charsmap"])
    assert fields["tokenizer.ggml.add_space_prefix"] is fields["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert fields["tokenizer.ggml.token_type_count"] == 1


@pytest.mark.parametrize(("kind", "name"), [("roberta", "roberta-bpe"), ("modernbert", "modern-bert")])
def test_byte_level_encoders_get_their_own_pre_tokenizers_name(tmp_path: Path, kind: str, name: str) -> None:
    assert fields_of(tmp_path / "there", kind, made(kind, tmp_path / "there"))["tokenizer.ggml.pre"] == name


def written(fields: dict[str, Any], path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "bert")
    for key, value in fields.items():
        typed = _typed(value)
        writer.add_key_value(key, typed.value, typed.type, sub_type=typed.sub_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_a_file_of_them_is_read_as_it_was_written(tmp_path: Path, rules: bytes, kind: str) -> None:
    fields = fields_of(tmp_path / "there", kind, made(kind, tmp_path / "there"))
    if kind == "xlm-roberta":
        fields["tokenizer.ggml.precompiled_charsmap"] = rules
    metadata = GGUFFile(written(fields, tmp_path / "vocabulary.gguf")).metadata
    ours, read = Tokenizer.from_gguf(fields), Tokenizer.from_gguf(metadata)
    assert ours.encode_batch(TEXTS) == read.encode_batch(TEXTS)
    if kind == "xlm-roberta":
        field = gguf.GGUFReader(tmp_path / "vocabulary.gguf").get_field("tokenizer.ggml.precompiled_charsmap")
        assert field is not None
        assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8]


@pytest.mark.parametrize("kind", ["bert", "cased bert", "xlm-roberta", "roberta"])
def test_llama_cpp_makes_the_same_tokens_of_a_file_of_them(tmp_path: Path, kind: str) -> None:
    """But for what `gguf_tokenizer.py` says it has otherwise."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    fields = fields_of(tmp_path / "there", kind, made(kind, tmp_path / "there"))
    model = llama_cpp.Llama(str(written(fields, tmp_path / "vocabulary.gguf")), vocab_only=True, verbose=False)
    ours = Tokenizer.from_gguf(FIELDS | fields)
    others = "" if kind == "xlm-roberta" else "नสं안"
    for text in TEXTS[:-1]:
        if not any(char in text for char in others) and "x" * 101 not in text and "▁" not in text:
            assert model.tokenize(text.encode(), add_bos=True, special=True) == ours.encode(text), text


def bert_fields(**changes: Any) -> dict[str, Any]:
    """As older converters wrote them: `[name]` without a mark, no flags, no BOS."""
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world", "ing", "▁work", "s", "▁[", "[", "▁]"]
    fields = {
        "model": "bert", "tokens": tokens, "token_type": [3, 1, 3, 3, 3, 3, *[1] * 8], "unknown_token_id": 2,
        "cls_token_id": 3, "seperator_token_id": 4, "padding_token_id": 0, "mask_token_id": 5, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def test_older_files_say_less_and_mean_the_same() -> None:
    tokenizer = Tokenizer.from_gguf(bert_fields())
    assert tokenizer.encode("Hello [working]") == [3, 6, 11, 9, 8, 13, 4]
    assert tokenizer.encode_pair("hello", "world works") == ([3, 6, 4, 7, 9, 10, 4], 3)
    assert tokenizer.id_to_token(1) == "[unused0]"
    assert tokenizer.id_to_token(12) == "##["
    assert tokenizer.vocab_size == 14
    assert Tokenizer.from_gguf(bert_fields(add_bos_token=False, add_eos_token=True, eos_token_id=4)).encode("s") == [3, 2, 4]


def test_what_no_normalizer_key_says_is_lowercased_and_a_cased_file_is_not() -> None:
    cased = bert_fields(**{"normalizer.lowercase": False})
    assert Tokenizer.from_gguf(cased).encode("Hello hello héllo") == [3, 2, 6, 2, 4]
    strips = bert_fields(**{"normalizer.lowercase": False, "normalizer.strip_accents": True})
    assert Tokenizer.from_gguf(strips).encode("Hello hello héllo") == [3, 2, 6, 6, 4]
    assert Tokenizer.from_gguf(bert_fields()).encode("HÉLLO") == [3, 6, 4]


def test_word_pieces_are_text_again_whole_and_as_a_stream(tmp_path: Path) -> None:
    theirs = made("cased bert", tmp_path / "there")
    tokenizer = Tokenizer.from_gguf(fields_of(tmp_path / "there", "cased bert", theirs))
    text = "the quick brown fox jumping over naïve backs"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = Detokenizer(tokenizer)
    assert "".join([*[stream.push([i]) for i in ids], stream.finish()]) == text
    unstripped = tokenizer.decode(ids, skip_special_tokens=False)
    assert unstripped == theirs.decode(ids) == f"[CLS] {text} [SEP]"


@pytest.mark.parametrize(("flags", "between"), [({}, [2, 2]), ({"add_sep_token": False}, [2]), ({"add_sep_token": True}, [2, 2])])
def test_xlm_roberta_parts_texts_twice_where_its_file_says_nothing(
    tmp_path: Path, flags: dict[str, bool], between: list[int]
) -> None:
    fields = fields_of(tmp_path / "there", "xlm-roberta", made("xlm-roberta", tmp_path / "there"))
    for key in ("add_sep_token", "seperator_token_id"):  # files of 2024 have neither
        del fields[f"tokenizer.ggml.{key}"]
    tokenizer = Tokenizer.from_gguf(fields | {f"tokenizer.ggml.{key}": value for key, value in flags.items()})
    ids = tokenizer.encode("fox")[1:-1]
    assert tokenizer.encode_pair("fox", "fox") == ([0, *ids, *between, *ids, 2], 1 + len(ids) + len(between))


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_a_pair_are_text(tmp_path: Path, kind: str) -> None:
    theirs = made(kind, tmp_path / "there")
    fields = fields_of(tmp_path / "there", kind, theirs)
    spelled = TEXTS[-1]
    for ours in (Tokenizer.from_folder(tmp_path / "there"), Tokenizer.from_gguf(FIELDS | fields)):
        allowed = {ours.unk_id}
        ids, second = ours.encode_pair(spelled, spelled)
        plain = ours.encode(spelled, add_special_tokens=False, parse_special=False)
        assert plain == ids[1 : 1 + len(plain)] == ids[second:-1]
        assert not ours.control_ids.intersection(plain) - allowed
        assert ours.control_ids.intersection(ours.encode(spelled, add_special_tokens=False)) - allowed


def test_a_control_token_of_characters_that_are_none_is_text_as_well() -> None:
    """T5's vocabulary has no "<", so that "</s>" spelled out costs more than any token."""
    fields = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "\u2581", "a", "s", "/", ">"],
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -2.0, -2.0, -2.0],
    }
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("a</s>") == [3, 4, 1, 1]
    assert tokenizer.encode("a</s>", parse_special=False) == [3, 4, 2, 6, 5, 7, 1]


def test_a_mask_takes_the_space_before_it_along_in_files_of_encoders_alone(tmp_path: Path) -> None:
    fields = fields_of(tmp_path / "there", "modernbert", made("modernbert", tmp_path / "there"))
    encoder, other = (Tokenizer.from_gguf(fields | {"general.architecture": name}) for name in ("modern-bert", "qwen3"))
    assert len(other.encode("fox [MASK]")) == len(encoder.encode("fox [MASK]")) + 1


def test_a_tokenizer_that_parts_no_texts_says_so(tmp_path: Path) -> None:
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "bos_token_id": 0}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in tokens.items()})
    assert not tokenizer.reads_pairs
    with pytest.raises(UnsupportedError, match="between two texts"):
        tokenizer.encode_pair("a", "b")
    with pytest.raises(UsageError, match="surrogate"):
        Tokenizer.from_gguf(bert_fields()).encode_pair("a", "\ud800")
    trained = Backend(models.WordPiece({"a": 0, "[X]": 1, "[Y]": 2}, unk_token="a"))
    around = [("[X]", 1), ("[Y]", 2)]
    trained.post_processor = processors.TemplateProcessing("$A [X]", "$A [X] $B [Y]", special_tokens=around)
    trained.save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer.from_folder(tmp_path).reads_pairs, "a pair's end is another than a text's"
    trained.post_processor = processors.TemplateProcessing("[X] $A", "[X] $A [X] $B", special_tokens=around)
    trained.save(str(tmp_path / "tokenizer.json"))
    assert not Tokenizer.from_folder(tmp_path).reads_pairs, "Llama's begin anew"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ["[PAD]", "▁[PAD]", "[UNK]", "[CLS]", "[SEP]"], "token_type": [3, 1, 3, 3, 3]}, "'\\[PAD\\]' twice"),
        ({"unknown_token_id": None}, "unknown"),
        ({"cls_token_id": None}, "classification"),
        ({"seperator_token_id": None}, "separator"),
    ],
)
def test_broken_word_piece_files_are_typed_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_gguf(bert_fields(**changes))


@pytest.mark.parametrize("change", ["prefix", "normalizer", "no normalizer"])
def test_a_word_piece_vocabulary_that_gguf_cannot_say_is_refused(tmp_path: Path, change: str) -> None:
    theirs = made("bert", tmp_path / "there")
    path = tmp_path / "there" / "tokenizer.json"
    state = json.loads(path.read_text())
    if change == "prefix":
        state["model"]["continuing_subword_prefix"] = "@@"
    else:
        state["normalizer"] = {"type": "Lowercase"} if change == "normalizer" else None
    path.write_text(json.dumps(state))
    with pytest.raises(UnsupportedError, match="WordPiece"):
        gguf_vocabulary(tmp_path / "there", len(theirs))


def test_a_word_piece_folder_of_one_file_says_enough(tmp_path: Path) -> None:
    theirs = made("bert", tmp_path / "there")
    (tmp_path / "there" / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_gguf(fields_of(tmp_path / "there", "bert", theirs))
    assert tokenizer.encode_batch(TEXTS[:-1]) == [theirs(text)["input_ids"] for text in TEXTS[:-1]]
    assert tokenizer.encode_pair("fox", "dog").ids == theirs("fox", "dog")["input_ids"]
    state = json.loads((tmp_path / "there" / "tokenizer.json").read_text())
    (tmp_path / "there" / "tokenizer.json").write_text(json.dumps(state | {"post_processor": None}))
    with pytest.raises(UnsupportedError, match="no beginning"):
        gguf_vocabulary(tmp_path / "there", len(theirs))


def test_texts_that_are_parted_as_gguf_has_no_word_for_are_told(tmp_path: Path) -> None:
    theirs = made("xlm-roberta", tmp_path / "there")
    path = tmp_path / "there" / "tokenizer.json"
    text = path.read_text()
    once = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    state = json.loads(text)
    state["post_processor"]["pair"].insert(2, once)
    path.write_text(json.dumps(state))
    vocabulary = gguf_vocabulary(tmp_path / "there", len(theirs))
    assert vocabulary.notes == ["tokenizer: [2, 2, 2] between two texts that are read together"]
    assert vocabulary.fields["tokenizer.ggml.add_sep_token"] is False


def test_chinese_that_is_not_cut_has_no_equal_in_gguf(tmp_path: Path) -> None:
    made("bert", tmp_path / "there")
    path = tmp_path / "there" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenize_chinese_chars": False}))
    with pytest.raises(UnsupportedError, match="other tokens"):
        gguf_vocabulary(tmp_path / "there", 800)


# Normalization rules


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small list of rules, as SentencePiece compiles it: A to a, B to bc, é to e, 가 to nothing."""
    path = tmp_path_factory.mktemp("rules") / "rules.tsv"
    path.write_text("41\t61\n42\t62 63\nE9\t65\nAC00\t\n")
    return read_model(unigram_model(normalization_rule_tsv=str(path))).charsmap


def units_of(rules: bytes) -> tuple[list[int], bytes]:
    size = int.from_bytes(rules[:4], "little")
    return list(struct.unpack(f"<{size // 4}I", rules[4 : 4 + size])), rules[4 + size :]


def rules_of(units: list[int], texts: bytes) -> bytes:
    return struct.pack(f"<{len(units) + 1}I", len(units) * 4, *units) + texts


def damaged(rules: bytes) -> Iterator[tuple[str, bytes]]:
    units, texts = units_of(rules)
    root, *others = units
    yield "no trie", rules_of([], texts)
    yield "a trie of half a number", struct.pack("<I", 6) + rules[4:10] + texts
    yield "half the trie", rules_of(units[: len(units) // 2], texts)
    yield "a root that leads out", rules_of([root | 0x1FFFFF << 10, *others], texts)
    node = next(i for i, unit in enumerate(units) if unit & 0x100 and not unit >> 31)
    yield "a byte that leads out", rules_of([*units[:node], units[node] | 0x300 | 0x1FFFFF << 10, *units[node + 1 :]], texts)
    value = next(i for i, unit in enumerate(units) if unit >> 31)
    for name, place in (("outside", len(texts)), ("far outside", 0x7FFFFFFF), ("inside another", texts.index(b"c"))):
        yield f"a replacement {name}", rules_of([*units[:value], 1 << 31 | place, *units[value + 1 :]], texts)
    yield "a replacement without end", rules_of(units, texts[:-1] + b"x")
    yield "no replacements", rules_of(units, b"")
    yield "replacements that are no text", rules_of(units, texts.replace(b"c", b"\xff"))
    yield "a replacement longer than any", rules_of(units, texts + b"x" * 257 + b"\0")


def test_rules_of_every_name_that_sentencepiece_has_are_whole(rules: bytes) -> None:
    check_charsmap(rules)
    assert normalizers.Precompiled(rules).normalize_str("ABé가c") == "abcec"
    for name in ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"):
        check_charsmap(read_model(unigram_model(normalization_rule_name=name)).charsmap)


def test_damaged_rules_are_a_typed_error_in_files_of_every_kind(tmp_path: Path, rules: bytes) -> None:
    fields = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<unk>", "</s>", "a"], "tokenizer.ggml.token_type": [2, 3, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0], "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    whole = fields | {"tokenizer.ggml.precompiled_charsmap": list(rules)}
    assert Tokenizer.from_gguf(whole | {"tokenizer.ggml.add_space_prefix": False}).encode("A") == [2, 1]
    backend = json.loads(Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).to_str())
    for name, broken in damaged(rules):
        with pytest.raises(CheckpointError, match=r"normalization rules lead nowhere") as caught:
            Tokenizer.from_gguf(fields | {"tokenizer.ggml.precompiled_charsmap": list(broken)})
        assert caught.value.hint, name
        state = backend | {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(broken).decode()}
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        with pytest.raises(CheckpointError, match=r"normalization rules lead nowhere"):
            Tokenizer.from_folder(tmp_path)
    for odd in ("abc", ["a"], 7, [None]):
        with pytest.raises(CheckpointError):
            Tokenizer.from_gguf(fields | {"tokenizer.ggml.precompiled_charsmap": odd})


def test_rules_that_pass_never_panic_in_a_text(rules: bytes) -> None:
    """Each bit of the rules turned around, and runs of random bytes: refused, or good for any text."""
    generator = random.Random(0)
    texts = "".join(chr(code) for code in (*range(0x20, 0x250), *range(0xAC00, 0xAC40), *range(0x1F600, 0x1F620)))
    passed = 0
    for round_ in range(3000):
        data = bytearray(rules)
        for _ in range(1 if round_ % 2 else generator.randint(2, 8)):
            position = generator.randrange(len(data))
            data[position] = data[position] ^ 1 << generator.randrange(8) if round_ % 2 else generator.randrange(256)
        try:
            check_charsmap(bytes(data))
        except NanovllmError:
            continue
        passed += 1
        normalizers.Precompiled(bytes(data)).normalize_str(texts)
    assert 100 < passed < 2900


@pytest.mark.parametrize("said", [
    {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}, {"do_lower_case": None},
    {"do_lower_case": False, "strip_accents": True}, {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"},
])  # fmt: skip
def test_letters_are_as_the_config_says_and_not_as_the_tokenizer_was_saved(said: dict[str, Any], tmp_path: Path) -> None:
    theirs = bert(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    theirs = theirs if None in said.values() else AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_letters_that_are_neither_large_nor_small_are_refused(tmp_path: Path) -> None:
    bert(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": "some"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_may_lower_a_text_before(kind: str, tmp_path: Path) -> None:
    theirs = made(kind, tmp_path / "there")
    path = tmp_path / "there" / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": 128, "do_lower_case": True}))
    ours = Tokenizer.from_folder(tmp_path / "there")
    for text in (each for each in TEXTS if "[" not in each):  # control tokens keep their letters
        assert ours.encode(text) == theirs(text.lower())["input_ids"], text
    path.write_text(json.dumps({"do_lower_case": "yes"}))
    with pytest.raises(CheckpointError, match="sentence_bert_config"):
        Tokenizer.from_folder(tmp_path / "there")


def test_a_vocabulary_that_reads_lower_case_has_no_equal_in_gguf(tmp_path: Path) -> None:
    made("cased bert", tmp_path / "there")
    (tmp_path / "there" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(UnsupportedError, match="no place in GGUF"):
        gguf_vocabulary(tmp_path / "there", 800)
