"""Tokenizers from folders made here: layouts, precedence, SentencePiece models, and files that are wrong."""

import base64
import contextlib
import io
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from nanovllm_cli.errors import CheckpointError, PromptTooLongError, UnsupportedError, UsageError
from nanovllm_cli.text.sentencepiece import build_pieces, read_model
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.tokenizer_files import MAX_CONFIG_BYTES

WORDS = ["a", "b", "c", "ab", "\u0120", "\u0120ab"]


def byte_level() -> Backend:
    backend = Backend(models.BPE({word: i for i, word in enumerate(WORDS)}, [("a", "b"), ("\u0120", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def folder_with(tmp_path: Path, backend: Backend, **config: Any) -> Path:
    write(tmp_path, "tokenizer.json", backend.to_str())
    write(tmp_path, "tokenizer_config.json", config)
    return tmp_path


def test_configured_tokens_are_added_with_their_ids_and_flags(tmp_path: Path) -> None:
    listed = {
        "7": {"content": "<|eot_id|>", "special": True},
        "6": {"content": "<|begin|>", "special": True},
        "8": {"content": "<tool>", "special": False},
    }
    folder = folder_with(tmp_path, byte_level(), added_tokens_decoder=listed, bos_token="<|begin|>", eos_token="c")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("ab<|begin|>ab<tool><|eot_id|>") == [3, 6, 3, 8, 7]
    assert tokenizer.special_ids == {2, 6, 7}  # EOS counts as special although nothing flags it
    assert tokenizer.eos_ids == (2, 7)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "c")
    assert tokenizer.decode([3, 6, 8, 5]) == "ab<tool> ab"
    assert tokenizer.decode([3, 6, 8, 5], skip_special_tokens=False) == "ab<|begin|><tool> ab"


def test_special_tokens_around_a_text_come_from_the_file_unless_configured(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 6), ("</s>", 7)])
    roles = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    assert Tokenizer.from_folder(folder_with(tmp_path, backend, **roles)).encode("ab") == [6, 3, 7]
    assert Tokenizer.from_folder(folder_with(tmp_path, backend, **roles)).encode("") == [6, 7]
    configured = folder_with(tmp_path, backend, **roles, add_eos_token=False)
    assert Tokenizer.from_folder(configured).encode("ab") == [6, 3]
    assert Tokenizer.from_folder(configured).encode("ab", add_special_tokens=False) == [3]
    assert Tokenizer.from_folder(configured).encode_batch(["ab", ""]) == [[6, 3], [6]]


def test_an_end_that_is_not_eos_stays_whatever_is_configured_of_bos(tmp_path: Path) -> None:
    """As Qwen3-Embedding has it; and what e5-mistral's folder says, whose tokenizer.json lacks the end."""
    backend = byte_level()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    backend.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 8)])
    roles = {"bos_token": None, "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for more in ({}, {"add_bos_token": False}, {"add_bos_token": False, "add_eos_token": False}):
        folder = folder_with(tmp_path, backend, **roles, **more)
        found = Tokenizer.from_folder(folder)
        assert found.encode("ab") == [3, 8] == AutoTokenizer.from_pretrained(folder)("ab").input_ids
    assert found.truncated(found.encode("abab"), 2) == [3, 8]
    assert found.truncated([3, 8], 2) == [3, 8]
    assert found.truncated(found.encode("abab"), 1) == [8]
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 6)])
    mistral = folder_with(tmp_path, backend, bos_token="<s>", eos_token="</s>", add_eos_token=True)
    assert Tokenizer.from_folder(mistral).encode("ab") == [6, 3, 7]


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert Tokenizer.from_folder(folder_with(tmp_path, backend)).encode("cccc") == [2, 2, 2, 2]


def test_roles_may_stand_in_the_special_tokens_map(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level())
    write(folder, "special_tokens_map.json", {"eos_token": "c", "pad_token": {"content": "b"}})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 1)


def test_template_files_decide_over_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    folder = folder_with(tmp_path, byte_level(), chat_template=named)
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "rag": "B"}
    write(folder, "chat_template.jinja", "C")
    (folder / "additional_chat_templates").mkdir()
    write(folder / "additional_chat_templates", "tool_use.jinja", "D")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "C", "rag": "B", "tool_use": "D"}


def test_vocab_and_merges_make_the_same_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "vocab.json", {word: i for i, word in enumerate(WORDS)})
    write(tmp_path, "merges.txt", "#version: 0.2\na b\n\u0120 ab\n")
    write(tmp_path, "added_tokens.json", {"<|im_end|>": 6})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("ab ab c<|im_end|>") == [*byte_level().encode("ab ab c").ids, 6]


def test_what_both_lists_have_is_as_the_newer_one_says(tmp_path: Path) -> None:
    write(tmp_path, "vocab.json", {word: i for i, word in enumerate(WORDS)})
    write(tmp_path, "merges.txt", "#version: 0.2\na b\n\u0120 ab\n")
    write(tmp_path, "added_tokens.json", {"<img>": 6, "<b>": 7})
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {"6": {"content": "<img>", "special": True} | flags, "7": {"content": "<b>", "special": False} | flags}
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert "<img>" in tokenizer.control_tokens
    assert tokenizer.special_ids == {6}
    assert tokenizer.encode("ab<img><b>")[-2:] == [6, 7]


def test_deepseek_style_tokens_are_control_although_not_flagged(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<\uff5cUser\uff5c>", "<think>"])
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, backend))
    assert tokenizer.encode("<\uff5cUser\uff5c><think>ab") == [6, 7, 3]
    assert tokenizer.encode("<\uff5cUser\uff5c><think>ab", parse_special=False) == [7, 3]
    assert tokenizer.decode([6, 3]) == "<\uff5cUser\uff5c>ab"  # shown, as transformers shows it


def test_ids_above_a_gap_are_tokens_like_others(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1, "c": 7, "ab": 8}, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    file = folder_with(tmp_path, backend) / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["vocab"]["ab"] = 4_000_000_000  # the library writes gaps id by id
    file.write_text(json.dumps(stored))
    backend, tokenizer = Backend.from_file(str(file)), Tokenizer.from_folder(tmp_path)
    ids = backend.encode("cab").ids
    assert tokenizer.encode("cab") == ids == [7, 4_000_000_000]
    assert tokenizer.decode(ids) == backend.decode(ids) == "cab"
    assert [tokenizer.id_to_bytes(i) for i in (2, 8, -1, 2**32, 10**30)] == [b""] * 5


def test_what_stands_around_a_text_counts_as_a_token(tmp_path: Path) -> None:
    """So that a model with fewer rows is refused before anything is looked up in it."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 100_000)])
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, backend))
    assert (tokenizer.encode("ab"), tokenizer.vocab_size) == ([100_000, 3], 100_001)


GROWING = {
    "one step": normalizers.Replace(Regex("."), "x" * 65),
    "a prefix": normalizers.Prepend("x" * 65),
    "by two, forty times": normalizers.Sequence([normalizers.Replace("a", "aa")] * 40),
    "one feeds the next": normalizers.Sequence(
        [normalizers.Replace(Regex("[0-9]"), "bb"), *[normalizers.Replace("b", "cc"), normalizers.Replace("c", "bb")] * 20]
    ),
    "between all characters": normalizers.Sequence([normalizers.Replace(Regex(""), "x")] * 40),
    "steps without end": normalizers.Sequence([normalizers.NFC()] * 1001),
}


@pytest.mark.parametrize("case", GROWING)
def test_a_normalizer_that_makes_texts_grow_without_end_is_refused(tmp_path: Path, case: str) -> None:
    backend = byte_level()
    backend.normalizer = GROWING[case]
    with pytest.raises(CheckpointError, match="normalizer"):
        Tokenizer.from_folder(folder_with(tmp_path, backend))


def test_normalizers_of_real_models_are_none_of_those(tmp_path: Path) -> None:
    backend = byte_level()
    quotes = [normalizers.Replace(char, "\u00ab" * 3) for char in "\u2018\u2019\u201c\u201d\u201e"]
    marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"), normalizers.Replace(Regex(" {2,}"), "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.NFKD(), *quotes, normalizers.Sequence(marks)])
    assert Tokenizer.from_folder(folder_with(tmp_path, backend)).encode("\u2581ab") == backend.encode("\u2581ab").ids


def train(kind: str, **options: Any) -> tuple[Any, bytes]:
    sentencepiece = pytest.importorskip("sentencepiece")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcde\u00e9\uc5b4", k=generator.randint(1, 7))) for _ in range(300)]
    lines = (" ".join(generator.choices(words, k=12)) for _ in range(400))
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=buffer, vocab_size=420, hard_vocab_limit=False, model_type=kind,
        user_defined_symbols=["<sep>"], minloglevel=2, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue()), buffer.getvalue()


def precompiled(rules: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("rules", [b"\xff" * 8, b"\x04\0\0\0", b"\x05\0\0\0abcd", b"\x01"])
def test_normalization_rules_that_are_cut_off_are_seen_before_the_library_takes_memory_for_them(
    tmp_path: Path, rules: bytes, nested: bool
) -> None:
    """Gigabytes, and the end of the process where there are none."""
    state = json.loads(byte_level().to_str())
    steps = [{"type": "NFC"}, {"type": "Sequence", "normalizers": [precompiled(rules)]}]
    state["normalizer"] = {"type": "Sequence", "normalizers": steps} if nested else precompiled(rules)
    write(tmp_path, "tokenizer.json", json.dumps(state).replace("_charsmap", r"\u005fcharsmap"))
    with pytest.raises(CheckpointError, match="cut off"):
        Tokenizer.from_folder(tmp_path)


def test_normalization_rules_that_are_whole_are_the_librarys(tmp_path: Path) -> None:
    _, proto = train("unigram", normalization_rule_name="nmt_nfkc")
    backend = build_pieces(read_model(proto))
    assert "precompiled_charsmap" in backend.to_str()
    assert Tokenizer.from_folder(folder_with(tmp_path, backend)).encode("\uff41b  c") == backend.encode("\uff41b  c").ids


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("rules", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("extra_space", [True, False])
def test_sentencepiece_model_encodes_as_sentencepiece_does(
    tmp_path: Path, kind: str, byte_fallback: bool, rules: str, extra_space: bool
) -> None:
    theirs, proto = train(
        kind, byte_fallback=byte_fallback, normalization_rule_name=rules, remove_extra_whitespaces=not extra_space,
        add_dummy_prefix=byte_fallback,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(proto)
    ours = Tokenizer.from_folder(tmp_path)
    generator = random.Random(1)
    alphabet = [*"abcde \n\tz", "\u00e9", "\uc5b4", "  ", "\uff3a", "\ufb01", "\u00bd", "\U0001f642"]
    for _ in range(200):
        text = "".join(generator.choices(alphabet, k=generator.randint(0, 30)))
        ids = theirs.encode(text)
        mine = ours.encode(text, add_special_tokens=False)
        if kind == "unigram" and mine != ids:  # two segmentations may have the same score
            assert sum(map(theirs.get_score, mine)) == pytest.approx(sum(map(theirs.get_score, ids)), abs=1e-4)
            assert ours.decode(mine) == theirs.decode(ids)
            continue
        assert mine == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), text
    assert (ours.bos_id, ours.eos_id, ours.unk_id) == (theirs.bos_id(), theirs.eos_id(), theirs.unk_id())


def test_dummy_prefix_only_at_the_beginning_where_the_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train("bpe", byte_fallback=True)[1])
    write(tmp_path, "tokenizer_config.json", {"legacy": False, "bos_token": "<s>", "add_bos_token": True})
    tokenizer = Tokenizer.from_folder(tmp_path)
    newer = [tokenizer.id_to_token(i) for i in tokenizer.encode("</s>b")]
    assert newer == ["<s>", "</s>", "b"]
    # Guarded text is not a beginning either.
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode_guarded("</s>b<s>", {5})][:2] == ["</s>", "b"]
    write(tmp_path, "tokenizer_config.json", {})
    older = Tokenizer.from_folder(tmp_path)
    assert [older.id_to_token(i) for i in older.encode("</s>b")] == ["<s>", "</s>", "\u2581b"]


def test_broken_sentencepiece_models_are_typed_errors(tmp_path: Path) -> None:
    proto = train("bpe", byte_fallback=True)[1]
    generator = random.Random(3)
    for size in [0, 1, 2, 10, len(proto) // 2, len(proto) - 1]:
        with pytest.raises(CheckpointError):
            read_model(proto[:size])
    for _ in range(300):
        damaged = bytearray(proto)
        for _ in range(3):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with contextlib.suppress(CheckpointError, UnsupportedError):
            Tokenizer.from_folder(tmp_path).encode("ab cd")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "Martian"}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": 5}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"99": {"content": "<gap>"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {"content": "a"}}}'),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_broken_files_are_typed_errors(tmp_path: Path, name: str, content: str) -> None:
    folder_with(tmp_path, byte_level())
    write(tmp_path, name, content)
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(tmp_path)


def test_damaged_files_never_raise_anything_else(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 6), ("</s>", 7)])
    folder_with(tmp_path, backend, bos_token="<s>")
    whole, generator = (tmp_path / "tokenizer.json").read_bytes(), random.Random(5)
    values: list[Any] = [None, True, -1, 10**12, 1.5, "", "a", [], {}, ["a"], {"a": 1}, "<s>", 7]
    loaded = 0
    for turn in range(400):
        content: Any = json.loads(whole)
        node, depth = content, generator.randint(1, 5)
        for _ in range(depth):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = generator.choice(keys)
            if not isinstance(node[key], dict | list) or turn % 7 == 0:
                node[key] = generator.choice(values)
                break
            node = node[key]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with contextlib.suppress(CheckpointError):
            tokenizer = Tokenizer.from_folder(tmp_path)
            tokenizer.encode("ab <s>c")
            tokenizer.encode("ab <s>", parse_special=False)
            tokenizer.decode(range(12))
            loaded += 1
    assert 50 < loaded < 400


def test_wrongly_typed_roles_are_no_roles(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level(), eos_token=5, bos_token=["a"], chat_template=7, extra_special_tokens={})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.chat_templates) == ((), None, {})


def test_files_that_are_too_large_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    folder_with(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(CheckpointError, match="larger"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_others_go_on_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A tenth of a second of work and more: who holds Python's lock all the while lets nobody count."""
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, byte_level()))
    count, done = 0, threading.Event()

    def counting() -> None:
        nonlocal count
        while not done.wait(0.001):
            count += 1

    other = threading.Thread(target=counting, daemon=True)
    other.start()
    try:
        for parse_special in (True, False):
            before = count
            tokenizer.encode("ab cd " * 100_000, parse_special=parse_special)
            assert count - before > 10
    finally:
        done.set()


def test_what_fits_is_never_called_too_long(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, byte_level()))
    for text in ("", "ab cd " * 50, " " * 3000, "ab" * 3000):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        tokenizer.check_fits(text, max(count, 1))
        if len(text) > 1000:
            with pytest.raises(PromptTooLongError):
                tokenizer.check_fits(text, count // 100)


def test_the_longest_token_bounds_how_short_a_text_can_be(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, byte_level()))
    assert tokenizer.longest_token == max(len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_a_usage_error(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, byte_level()))
    for parse_special in (True, False):
        with pytest.raises(UsageError, match="surrogate"):
            tokenizer.encode(text, parse_special=parse_special)
        with pytest.raises(UsageError, match="surrogate"):
            tokenizer.encode_batch(["a", text], parse_special=parse_special)
    with pytest.raises(UsageError, match="string"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="string"):
        tokenizer.encode(("a", "b"))  # type: ignore[arg-type]
