"""RWKV's world vocabulary: texts cut into the longest tokens, of folders and of GGUF files.

What a published vocabulary (65,529 tokens) makes of texts was held once against its publisher's own code (rwkv 0.8.32) and
llama.cpp's (llama-cpp-python 0.3.36): the same ids.
"""

from __future__ import annotations

import codecs
import json
import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.constrain.vocabulary import Vocabulary
from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.gguf_export import gguf_vocabulary, same_tokens
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.world import END, FILE, LongestPieces, escaped, spelled, unescaped

LONGER = ["ab", "abc", "bc", "cab", "\n\n", "the", "  ", "    ", "é", "世界", "界a", "'\"", "\\n", "\t\t", "<s", "User"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in LONGER), b"\xe4\xb8", b"\xff\xfe"]
TEXTS = ["abcab\n\nthe  cat é世界ü\\'\"\t", "", "ababcabc", "世界a世", "\\n\n\\\n\n\n", " " * 33, "<s <s", "\x00\x7f",
         "User: hi\n\nAssistant:"]  # fmt: skip


def line(number: int, token: bytes) -> str:
    """As the published file has it: a string where there is one."""
    try:
        written = repr(token.decode())
    except UnicodeDecodeError:
        written = repr(token)
    return f"{number} {written} {len(token)}"


LINES = [line(number, token) for number, token in enumerate(TOKENS, 1)]


def folder_of(folder: Path, lines: list[str] = LINES, **config: Any) -> Path:
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(folder_of(tmp_path_factory.mktemp("world"), bos_token=END, eos_token="\n\n"))


def by_hand(data: bytes) -> list[int]:
    """The longest token that the rest begins with, one after the other."""
    ids = []
    while data:
        token = max((token for token in TOKENS if data.startswith(token)), key=len)
        ids.append(1 + TOKENS.index(token))
        data = data[len(token) :]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_cut_into_the_longest_tokens(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert ids == by_hand(text.encode())
    assert tokenizer.decode(ids) == text


def test_where_a_long_text_is_cut_first_does_not_matter(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    text = "".join(draw.choice("aabc \n世界é'\"\\") for _ in range(5000))
    assert tokenizer.encode(text) == by_hand(text.encode())
    assert tokenizer.encode_batch([text[:n] for n in range(40)]) == [by_hand(text[:n].encode()) for n in range(40)]


def test_pieces_that_begin_alike_are_tried_from_the_longest_on() -> None:
    pieces = LongestPieces({piece: i for i, piece in enumerate(("a", "b", "c", "abcc", "ab", "ccc", "abccabc", "abccabcc"))})
    assert pieces.ends("abcabccab") == [2, 3, 7, 9]
    assert pieces.ends("abccabccabcccc") == [8, 12, 13, 14]
    assert pieces.ends("abccabca") == [7, 8]
    assert pieces.ends("") == []


def test_the_library_knows_where_each_token_stands(tokenizer: Tokenizer) -> None:
    """In characters of the text, of which a token may have a part."""
    backend = tokenizer._backend
    for text in ("ab c世\n\nxé", "", "世"):
        found = backend.encode(text, add_special_tokens=False)
        assert all(text[begin:end] for begin, end in found.offsets)
        assert len(found.offsets) == len(found.ids) == len(by_hand(text.encode()))
        assert not text or (found.offsets[0][0], found.offsets[-1][1]) == (0, len(text))


def test_half_a_character_waits_for_the_other_half(tokenizer: Tokenizer) -> None:
    half, rest = 1 + TOKENS.index(b"\xe4\xb8"), 1 + 0x96
    stream = Detokenizer(tokenizer)
    assert [stream.push([half]), stream.push([rest]), stream.push([98]), stream.finish()] == ["", "世"[:1], "a", ""]
    stream = Detokenizer(tokenizer)
    assert stream.push([half]) + stream.finish() == "\ufffd"


def test_every_token_is_known_by_its_bytes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_bytes(i) for i in range(1, 1 + len(TOKENS))] == TOKENS
    assert tokenizer.vocab_size == 1 + len(TOKENS)
    assert tokenizer.id_to_bytes(0) == END.encode()
    tokens = [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)]
    vocabulary = Vocabulary(tokens, tokenizer.special_ids, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert vocabulary.ids_of("abc") == [1 + TOKENS.index(b"abc")]


def test_what_ends_a_text_is_text_where_a_user_writes_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"{END}a") == [0, 98]
    assert tokenizer.encode(f"{END}a", parse_special=False) == by_hand(f"{END}a".encode())
    assert tokenizer.decode([0, 98]) == "a"
    assert tokenizer.control_tokens == {END: 0}


def test_an_empty_line_ends_an_answer_and_stays_a_token(tokenizer: Tokenizer) -> None:
    line_id = 1 + TOKENS.index(b"\n\n")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (0, line_id, (line_id, 0))
    assert tokenizer.encode("\n\n") == [line_id]
    assert tokenizer.special_ids == {0}


def test_numbers_that_the_library_added_are_left_out(tmp_path: Path) -> None:
    """The hub's class gives "\\n\\n" another number where it is named as the end of a text; its model has never seen that one."""
    added = {"0": {"content": END, "special": True}, "275": {"content": "\n\n", "special": True},
             "276": {"content": "<more>", "special": False}}  # fmt: skip
    listed = {str(i if i == 0 else i - 1): entry for i, entry in ((int(key), entry) for key, entry in added.items())}
    folder = folder_of(tmp_path, bos_token="<s>", eos_token={"content": "\n\n"}, added_tokens_decoder=listed)
    (folder / "added_tokens.json").write_text(json.dumps({"\n\n": 275}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("\n\n<more>") == [1 + TOKENS.index(b"\n\n"), 275]
    assert tokenizer.control_tokens == {END: 0}


@pytest.mark.parametrize(
    ("config", "end", "ends"),
    [({}, END, (0,)), ({"bos_token": "<s>"}, "<s>", (0,)), ({"pad_token": {"content": "<e>"}}, "<e>", (0,)),
     ({"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": True}, "<s>", (0,))],
)  # fmt: skip
def test_how_the_end_of_a_text_is_called(config: dict[str, Any], end: str, ends: tuple[int, ...], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, **config))
    assert tokenizer.control_tokens == {end: 0}
    assert tokenizer.eos_ids == ends
    assert tokenizer.encode("a") == ([0, 98] if config.get("add_bos_token") else [98])


BROKEN = {
    "no token": (lambda lines: [*lines[:-1], "258"], "its line 274 is not a token"),
    "a number for a token": (lambda lines: [*lines[:-1], "274 12 2"], "its line 274"),
    "a call": (lambda lines: [*lines[:-1], "274 __import__('os') 2"], "its line 274"),
    "two literals": (lambda lines: [*lines[:-1], "274 'a' 'b' 2"], "its line 274"),
    "another length": (lambda lines: [*lines[:-1], "274 'ab' 3"], "its line 274"),
    "a surrogate": (lambda lines: [*lines[:-1], r"274 '\ud800' 3"], "its line 274"),
    "half an escape": (lambda lines: [*lines[:-1], r"274 b'\x4' 1"], "its line 274"),
    "a name": (lambda lines: [*lines[:-1], r"274 '\N{BULLET}' 3"], "its line 274"),
    "letters beside bytes": (lambda lines: [*lines[:-1], "274 b'é' 2"], "its line 274"),
    "an id twice": (lambda lines: [*lines[:-1], "273 'xyz' 3"], "its line 274"),
    "a gap": (lambda lines: [*lines[:-1], "275 'xyz' 3"], "its ids are not 1, 2"),
    "a token twice": (lambda lines: [*lines[:-1], "274 'ab' 2"], "a token twice"),
    "an empty token": (lambda lines: [*lines[:-1], "274 '' 0"], "one that is empty"),
    "a byte that is missing": (lambda lines: ["1 'xy' 2", *lines[1:]], "no token is the byte 0"),
    "nothing": (lambda lines: [], "its line 1"),
    "the end of a text": (lambda lines: [*lines[:-1], f"274 '{END}' {len(END)}"], "twice"),
    "a token of 9,999 bytes": (lambda lines: [*lines[:-1], f"274 '{'x' * 9999}' 9999"], "more than 1024 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    folder = folder_of(tmp_path, change(LINES))  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match=f"{FILE} is broken.*{message}"):
        Tokenizer.from_folder(folder)


def test_literals_mean_what_python_says() -> None:
    """Of all that `repr` writes."""
    draw = random.Random(2)
    for _ in range(2000):
        data = bytes(draw.choice(b"ab\\'\"\n\r\t\x00\x7f\xff\xe4 x") for _ in range(draw.randint(1, 8)))
        assert unescaped(escaped(data)) == codecs.escape_decode(escaped(data))[0] == data  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["a\\", "\\x4", "\\xg0", "\\x"])
def test_half_an_escape_of_a_file_is_named(text: str) -> None:
    with pytest.raises(CheckpointError, match="which is no escaped bytes"):
        unescaped(text)


# ---- GGUF ----


def metadata(**more: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it, with one token that only fills the vocabulary up."""
    tokens = ["<s>", *map(escaped, TOKENS), "[PAD275]"]
    return {
        "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, *[1] * len(TOKENS), 5],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 261,
    } | more  # fmt: skip


def test_a_file_makes_the_same_tokens(tokenizer: Tokenizer) -> None:
    other = Tokenizer.from_gguf(metadata())
    assert same_tokens(tokenizer, other, TEXTS) is None
    assert other.eos_ids == (0, 261)
    assert other.control_tokens == {"<s>": 0}
    assert other.encode("<s>[PAD275]") == [0, *by_hand(b"[PAD275]")]


def test_a_template_that_is_a_name(tokenizer: Tokenizer) -> None:
    """What llama.cpp's converter writes where a folder has none; the prompt is that of its `rwkv-world`."""
    other = Tokenizer.from_gguf(metadata() | {"tokenizer.chat_template": "rwkv-world"})
    said = (("system", "Be kind."), ("user", " Hi\n"), ("assistant", "Ho"), ("user", "So?"))
    messages = [{"role": role, "content": content} for role, content in said]
    template = ChatTemplate(other.chat_templates["default"], bos_token="", eos_token="")
    assert template.render(messages) == "System: Be kind.\n\nUser: Hi\n\nAssistant: Ho\n\nUser: So?\n\nAssistant:"
    with pytest.raises(NanovllmError, match="this chat format takes system, user and assistant messages"):
        template.render([{"role": "tool", "content": "x"}])


def test_a_folder_becomes_a_file_that_llama_cpp_reads(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By the names that its converter gives."""
    folder = folder_of(tmp_path, bos_token=END, eos_token="\n\n", chat_template="{{ 'x' }}")
    fields = gguf_vocabulary(folder, 280).fields
    assert fields["tokenizer.ggml.model"] == "rwkv"
    assert fields["tokenizer.ggml.tokens"][:3] == [END, "\\x00", "\\x01"]
    assert fields["tokenizer.ggml.tokens"][-1] == "[PAD279]"
    line_id = 1 + TOKENS.index(b"\n\n")
    assert fields["tokenizer.ggml.tokens"][line_id] == "\\n\\n"
    ids = [fields[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "eot")]
    assert ids == [0, 0, line_id]
    assert same_tokens(tokenizer, Tokenizer.from_gguf(fields), TEXTS) is None
    assert gguf_vocabulary(folder, 280, [7]).fields["tokenizer.ggml.eom_token_id"] == 7
    with pytest.raises(CheckpointError, match="the tokenizer has 275 tokens and the model 274"):
        gguf_vocabulary(folder, 274)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({5: "\\x03"}, "twice"), ({5: "\\x0"}, "no escaped bytes"), ({5: "xyzw"}, "no token is the byte 4"),
     ({5: "y" * 2000}, "more than 1024 bytes")],
)  # fmt: skip
def test_a_broken_files_vocabulary_is_named(changes: dict[int, str], message: str) -> None:
    broken = metadata()
    broken["tokenizer.ggml.tokens"] = [changes.get(i, token) for i, token in enumerate(broken["tokenizer.ggml.tokens"])]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(broken)


def test_characters_that_stand_for_bytes_are_never_two_alike() -> None:
    assert len({spelled(bytes([byte])) for byte in range(256)}) == 256
