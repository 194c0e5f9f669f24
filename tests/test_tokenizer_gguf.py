"""GGUF tokenizers built from metadata made here: models, special tokens, and files that are wrong."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from tokenizers import AddedToken, BertWordPieceTokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.text.gguf_export import PROBES, gguf_vocabulary
from nanovllm_cli.text.hf_export import hf_tokenizer
from nanovllm_cli.text.pre_tokenizers import pre_tokenization
from nanovllm_cli.text.tokenizer import Tokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def spm_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["\u2581", "a", "b", "ab", "\u2581ab", "c"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, "<|im_end|>", "<think>"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0, -6.0] + [0.0, 0.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 6, 3, 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def gpt2_metadata(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "\u0120", "\u0120ab", "<|endoftext|>"],
        "token_type": [1, 1, 1, 1, 1, 3],
        "merges": ["a b", "\u0120 ab"],
        "bos_token_id": 5,
        "eos_token_id": 5,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def test_spm_takes_the_best_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    names = [tokenizer.id_to_token(i) for i in tokenizer.encode("ab c\u00e9")]
    assert names == ["<s>", "\u2581ab", "\u2581", "c", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab c\u00e9")) == "ab c\u00e9"
    assert tokenizer.id_to_bytes(3 + 0xC3) == b"\xc3"


def test_space_prefix_and_bos_follow_the_metadata() -> None:
    bare = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert [bare.id_to_token(i) for i in bare.encode("ab")] == ["ab", "</s>"]
    assert bare.decode(bare.encode(" ab")) == " ab"
    assert not bare.adds_bos


def test_tokens_of_each_type_are_read_only_where_they_should_be() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata())
    end, think = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<think>")
    assert end in tokenizer.eos_ids
    assert end in tokenizer.encode("a<|im_end|>")
    assert end not in tokenizer.encode("a<|im_end|>", parse_special=False)
    assert think in tokenizer.encode("a<think>", parse_special=False)  # user-defined, not control
    assert tokenizer.decode([end, think]) == "<think>"


def test_text_that_spells_a_byte_or_control_token_is_not_that_token() -> None:
    spelled = ["<", "0", "x", "A", ">", "<0", "x0", "A>", "<0x0", "s", "/", "</", "s>"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *spelled]
    fields = spm_metadata(
        tokens=tokens,
        scores=[0.0] * 259 + [float(-position) for position in range(len(spelled))],
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(spelled)],
        add_space_prefix=False,
        add_bos_token=False,
    )
    tokenizer = Tokenizer.from_gguf(fields)
    for text, parts in (("<0x0A>", ["<0x0", "A>"]), ("</s>", ["</", "s>"])):
        ids = tokenizer.encode(text, parse_special=False)
        assert [tokenizer.id_to_token(i) for i in ids] == parts
        assert tokenizer.decode(ids) == text


def test_what_merges_make_is_text_even_where_it_looks_like_an_end() -> None:
    """Qwen's vocabularies have "</s>" among their words, as they have other tags."""
    tokens = ["<", "/", "s", ">", "</", "</s", "</s>", "<|im_end|>"]
    fields = gpt2_metadata(tokens=tokens, token_type=[1] * 8, merges=["< /", "</ s", "</s >"], bos_token_id=None, eos_token_id=7)
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("</s>") == [4, 2, 3]
    assert tokenizer.eos_ids == (7,)
    assert set(tokenizer.control_tokens) == {"<|im_end|>"}
    unmerged = Tokenizer.from_gguf(fields | {"tokenizer.ggml.merges": ["< /"]})
    assert unmerged.encode("</s>") == [6]
    assert set(unmerged.eos_ids) == {6, 7}


def test_phi3_by_name_swallows_space_after_control_tokens() -> None:
    fields = spm_metadata()
    plain = Tokenizer.from_gguf(fields).encode("<|im_end|>  ab")
    phi = Tokenizer.from_gguf({**fields, "general.name": "Phi-3 mini"}).encode("<|im_end|>  ab")
    assert len(phi) < len(plain)
    assert [Tokenizer.from_gguf(fields).id_to_token(i) for i in phi] == ["<s>", "<|im_end|>", "\u2581ab"]


def test_ids_outside_the_vocabulary_mean_none() -> None:
    tokenizer = Tokenizer.from_gguf(spm_metadata(padding_token_id=4294967295))
    assert tokenizer.pad_id is None
    assert tokenizer.id_to_bytes(10**9) == b""
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.decode([10**9, -5]) == ""


def test_templates_are_found_by_name() -> None:
    fields = {**spm_metadata(), "tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    assert Tokenizer.from_gguf(fields).chat_templates == {"default": "A", "tool_use": "B"}


def test_harmony_does_not_end_at_the_end_of_a_channel() -> None:
    extra = ["<|return|>", "<|call|>", "<|end|>"]
    fields = gpt2_metadata(tokens=["a", "b", "ab", *extra], token_type=[1, 1, 1, 3, 3, 3], merges=["a b"],
                           bos_token_id=None, eos_token_id=3)  # fmt: skip
    assert Tokenizer.from_gguf(fields).eos_ids == (3, 4)


def test_llama3_takes_whole_words_before_merging() -> None:
    fields = gpt2_metadata(pre="llama-bpe", tokens=["a", "b", "c", "ab", "abc", "<|eot_id|>"], merges=["a b"])
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("abc", add_special_tokens=False) == [4]
    assert tokenizer.adds_bos


def test_bert_equals_the_usual_word_piece_of_the_same_words() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ing", "work", "##s", "!", "a", "##b"]
    tokens = [
        word if word.startswith("[") else word[2:] if word.startswith("##") else f"\u2581{word}" for word in words
    ]
    fields = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 2, 3, 3, *[1] * 8],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    ours = Tokenizer.from_gguf(fields)
    theirs = BertWordPieceTokenizer({word: position for position, word in enumerate(words)})
    for text in ("Hello WORLD!", "working works, ab", "", "h\u00e9llo zzz a"):
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode("hello working")) == "hello working"


def test_gemma4_merges_raw_characters() -> None:
    fields = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [
            "<bos>",
            "<eos>",
            "<turn|>",
            *BYTES,
            "a",
            "b",
            "\u2581",
            "ab",
            "\u2581ab",
            "\n",
            "\n\n",
        ],
        "tokenizer.ggml.token_type": [3, 3, 3, *[6] * 256, *[1] * 7],
        "tokenizer.ggml.merges": ["a b", "\u2581 ab", "\n \n"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    tokenizer = Tokenizer.from_gguf(fields)
    ids = tokenizer.encode("ab ab\n\nb\u00e9")
    assert [tokenizer.id_to_token(i) for i in ids] == [
        "<bos>", "ab", "\u2581ab", "\n\n", "b", "<0xC3>", "<0xA9>"
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "ab ab\n\nb\u00e9"
    assert set(tokenizer.eos_ids) == {1, 2}


GEMMA_ROLES = {
    "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
    "soc_token": "<|channel>", "eoc_token": "<channel|>", "sot_token": "<|turn>", "eot_token": "<turn|>",
    "stc_token": "<|tool_call>", "etc_token": "<tool_call|>", "str_token": "<|tool_response>",
    "etr_token": "<tool_response|>", "escape_token": '<|"|>', "think_token": "<|think|>",
}  # fmt: skip
SHOWN = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}


def gemma4_folder(folder: Path, *, bos: bool) -> int:
    """Gemma 4's tokenizer in small, as transformers' class of it builds one; its number of tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *[role for role in GEMMA_ROLES.values() if "|" in role]]
    runs, characters = ["\n" * length for length in range(1, 6)], list("\u2581abcdehinoqrstuwyz.,<>/\u00e9")
    words = ["th", "the", "\u2581the", "an", "and", "\u2581and", "ou", "</", "</s", "</s>"]
    merges = [("\n" * left, "\n" * (total - left)) for total in range(2, 6) for left in range(1, total)]
    merges += [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "n"), ("an", "d"), ("\u2581", "and"), ("o", "u")]
    merges += [("<", "/"), ("</", "s"), ("</s", ">")]
    vocab = {token: position for position, token in enumerate([*special, *BYTES, *runs, *characters, *words])}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    if bos:
        ids = [("<bos>", vocab["<bos>"])]
        backend.post_processor = processors.TemplateProcessing("<bos> $A", pair="<bos> $A $B", special_tokens=ids)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer", **GEMMA_ROLES}))
    return len(vocab)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_what_added_tokens_take_along_and_files_have_no_place_for_is_noted(flag: str, tmp_path: Path) -> None:
    size = gemma4_folder(tmp_path, bos=True)
    assert gguf_vocabulary(tmp_path, size).notes == []
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<step>", normalized=False, **{flag: True})])
    backend.save(str(tmp_path / "tokenizer.json"))
    made = gguf_vocabulary(tmp_path, size + 1)
    assert made.notes == ["tokenizer: lstrip, rstrip or single_word of <step>"]
    text = "ou <step> anou" if flag != "single_word" else "ou<step>anou"
    folder, file = Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(made.fields)
    assert folder.encode(text) == backend.encode(text).ids != file.encode(text)


@pytest.mark.parametrize("bos", [True, False])
def test_gemma4_is_exported_as_llama_cpp_writes_it(tmp_path: Path, bos: bool) -> None:
    size = gemma4_folder(tmp_path, bos=bos)
    made = gguf_vocabulary(tmp_path, size)
    theirs = list(gguf.LlamaHfVocab(tmp_path).all_tokens())
    names = [name.decode() for name, _, _ in theirs]
    roles = gguf.SpecialVocab(tmp_path, load_merges=True)
    assert made.fields == {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [score for _, score, _ in theirs],
        "tokenizer.ggml.token_type": [
            4 if name in SHOWN else int(kind) for name, (_, _, kind) in zip(names, theirs, strict=True)
        ],
        "tokenizer.ggml.merges": roles.merges,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": roles.special_token_ids["bos"],
        "tokenizer.ggml.eos_token_id": roles.special_token_ids["eos"],
        "tokenizer.ggml.unknown_token_id": roles.special_token_ids["unk"],
        "tokenizer.ggml.padding_token_id": roles.special_token_ids["pad"],
    }
    assert ["BOS" in note for note in made.notes] == ([] if bos else [True])


@pytest.mark.parametrize("bos", [True, False])
def test_gemma4_makes_the_same_tokens_in_gguf_and_back(tmp_path: Path, bos: bool) -> None:
    fields = gguf_vocabulary(tmp_path, gemma4_folder(tmp_path, bos=bos)).fields
    (tmp_path / "back").mkdir()
    for name, data in hf_tokenizer(fields, 2048).files.items():
        (tmp_path / "back" / name).write_bytes(data)
    source = Tokenizer.from_folder(tmp_path)
    call = '<|channel>thought\n<channel|><|tool_call>call:the{a:<|"|>an</s><|"|>}<tool_call|><|tool_response>'
    for other in (Tokenizer.from_gguf(fields), Tokenizer.from_folder(tmp_path / "back")):
        assert other.adds_bos
        assert source.adds_bos is bos
        assert (other.eos_ids, other.control_tokens, other.special_ids) == (
            source.eos_ids, source.control_tokens, source.special_ids
        )  # fmt: skip
        for text in (*PROBES, call, "the and\n\n\nthe\n" + "\n" * 7):
            for reads in (True, False):
                ids = source.encode(text, parse_special=reads, add_special_tokens=False)
                assert other.encode(text, parse_special=reads, add_special_tokens=False) == ids
                assert other.decode(ids) == source.decode(ids)
    again = gguf_vocabulary(tmp_path / "back", len(fields["tokenizer.ggml.tokens"]))
    assert (again.fields, again.notes) == (fields, [])


def test_gemma4_tags_are_control_tokens_and_others_are_not(tmp_path: Path) -> None:
    """The file calls them user-defined, because llama.cpp would not show them otherwise."""
    fields = gguf_vocabulary(tmp_path, gemma4_folder(tmp_path, bos=True)).fields
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.control_tokens.keys() >= SHOWN
    assert not tokenizer.special_ids.intersection(tokenizer.encode("".join(SHOWN), parse_special=False)[1:])
    plain = tokenizer.token_to_id("</s>")
    assert tokenizer.encode("</s>") == [2, plain]
    assert plain not in tokenizer.eos_ids
    unmerged = {**fields, "tokenizer.ggml.merges": [merge for merge in fields["tokenizer.ggml.merges"] if merge != "</s >"]}
    assert tokenizer.token_to_id("</s>") not in Tokenizer.from_gguf(unmerged).special_ids


def test_gemma4_keeps_runs_of_newlines_whole_without_merges_for_them(tmp_path: Path) -> None:
    fields = gguf_vocabulary(tmp_path, gemma4_folder(tmp_path, bos=True)).fields
    words = [merge for merge in fields["tokenizer.ggml.merges"] if "\n" not in merge]
    tokenizer = Tokenizer.from_gguf({**fields, "tokenizer.ggml.merges": words})
    for length in range(1, 6):
        ids = tokenizer.encode("a" + "\n" * length + "b", add_special_tokens=False)
        assert [tokenizer.id_to_token(i) for i in ids] == ["a", "\n" * length, "b"]


@pytest.mark.parametrize(("name", "runs"), [("granite-embed-multi-311m", True), ("sarvam-moe", False)])
def test_names_of_other_vocabularies_of_raw_characters(name: str, runs: bool, tmp_path: Path) -> None:
    """Granite's multilingual embedder and Sarvam have Gemma's kind under the name of GPT-2's."""
    fields = gguf_vocabulary(tmp_path, gemma4_folder(tmp_path, bos=True)).fields
    words = [merge for merge in fields["tokenizer.ggml.merges"] if "\n" not in merge]
    fields |= {"tokenizer.ggml.merges": words, "tokenizer.ggml.add_bos_token": False}
    gemma = Tokenizer.from_gguf(fields)
    named = Tokenizer.from_gguf({**fields, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name})
    ids = named.encode("ab \u00e9b  a")
    assert gemma.encode("ab \u00e9b  a") == [gemma.prefix_ids[0], *ids]
    assert named.decode(ids) == "ab \u00e9b  a"
    assert named.encode("\n\n") == [named.token_to_id(each) for each in (["\n\n"] if runs else ["\n", "\n"])]


def test_every_known_pre_tokenizer_compiles_and_keeps_the_text() -> None:
    text = "I'm here, 12345 'LL\u017f  \n\n \u00c4pfel\u4f60\u597d \u0e01 1,2; FooBar\tx  "
    with pytest.raises(UnsupportedError) as caught:
        pre_tokenization("never-heard-of")
    assert "never-heard-of" in caught.value.message
    names = caught.value.message.partition("known: ")[2].split(", ")
    assert len(names) > 60
    for name in names:
        rule = pre_tokenization(name)
        pieces = rule.build().pre_tokenize_str(text)
        assert pieces[0][1][0] == 0
        assert all(left[1][1] == right[1][0] for left, right in itertools.pairwise(pieces)), name
        assert pieces[-1][1][1] == len(text)


KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Kimi's own tokenizer has it."""


def test_kimi_k2_cuts_as_another_engine_of_expressions_does() -> None:
    text = (
        "HTTPServer's camelCase don'T 12345 \u4f60\u597dWorld\u4e16\u754cABCdef\u3002 \u03ba\u03b1 \u01c4ora e\u0301 a/b//\n "
        "/c ...\r\n\n  x\u00a0y  \n z\ud55c\uad6d\uc5b4\u3072\u6f22\u5b57 'tis  --> {\"k\": [1.5e-10]}\t\tend   "
    )
    pieces = [text[begin:end] for _, (begin, end) in pre_tokenization("kimi-k2").build().pre_tokenize_str(text)]
    assert pieces == regex.findall(KIMI, text, regex.V1)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("spark2_5", "a 1234 .,\n\n\u4f60\u597d x\u00a0y\n \nz", "a| |1|2|3|4| .,|\n|\n|\u4f60\u597d| x|\u00a0y|\n| |\n|z"),
        ("chameleon", "IMGIMGABZ<sentinel:7>a    b\n\tx12, 3.", "IMGIMGABZ|<|sentinel|:|7|>|a|    |b|\n|\t|x|1|2|,| |3|."),
        ("ufakzeka", "Ankara'da 12 DON'T 'tis\n", "Ankara|'da| |1|2| DON|'T| '|tis|\n"),
    ],
)
def test_rules_that_llama_cpp_alone_names(name: str, text: str, pieces: str) -> None:
    """As its own splitter cuts them. It takes hy_v4 for a name of DeepSeek's rule, and talkie of GPT-4o's."""
    cut = pre_tokenization(name).build().pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces.split("|")
    assert pre_tokenization("hy_v4") == pre_tokenization("deepseek-v3")
    assert pre_tokenization("talkie") == pre_tokenization("gpt-4o")


def test_trinity_cuts_digits_by_threes_from_their_end() -> None:
    def pieces(text: str) -> list[str]:
        return [text[begin:end] for _, (begin, end) in pre_tokenization("afmoe").build().pre_tokenize_str(text)]

    for length in range(1, 9):
        digits = "1234567890"[:length]
        assert pieces(f"a {digits}.5") == ["a", " ", *f"{int(digits):_}".split("_"), ".", "5"]
    assert pieces("I'm \u4f60\u597d\u0e40\u0e41 don't!\n") == ["I", "'m", " ", "\u4f60\u597d\u0e40\u0e41", " don", "'t", "!\n"]
    assert max(map(len, pieces("7" * 100_000))) == 3, "and soon"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({}, UnsupportedError, "no tokenizer"),
        ({"tokenizer.ggml.model": "no_vocab"}, UnsupportedError, "no_vocab"),
        ({"tokenizer.ggml.model": "rwkv"}, CheckpointError, "no token is the byte 0"),
        (gpt2_metadata(pre="marsian"), UnsupportedError, "marsian"),
        (gpt2_metadata(merges=None), CheckpointError, "merges"),
        (gpt2_metadata(merges=["ab"]), CheckpointError, "not a pair"),
        (gpt2_metadata(merges=["a z"]), CheckpointError, "broken"),
        (gpt2_metadata(merges=[3]), CheckpointError, "str"),
        (gpt2_metadata(tokens=["a", "a"], token_type=None), CheckpointError, "twice"),
        (gpt2_metadata(token_type=[1]), CheckpointError, "token_type"),
        (gpt2_metadata(tokens="abc"), CheckpointError, "array"),
        (gpt2_metadata(tokens=[b"a"]), CheckpointError, "str"),
        (gpt2_metadata(pre=7), CheckpointError, "string"),
        (spm_metadata(scores=[1.0]), CheckpointError, "scores"),
        (spm_metadata(scores=None), CheckpointError, "scores"),
        (spm_metadata(tokens=None), CheckpointError, "token"),
        (spm_metadata(tokens=["a" * 300_000, "b"], scores=[0.0, 0.0], token_type=None), CheckpointError, "300000 characters"),
        (spm_metadata(model="t5", precompiled_charsmap=[255] * 8), CheckpointError, "cut off"),
        (spm_metadata(model="t5", precompiled_charsmap=[1]), CheckpointError, "cut off"),
    ],
)
def test_broken_metadata_is_a_typed_error(fields: dict[str, Any], error: type[NanovllmError], words: str) -> None:
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(fields)
