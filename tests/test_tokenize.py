"""`nanovllm tokenize`: ids are those of transformers, sentencepiece and llama.cpp, texts are cut and come back byte for byte."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.cli.app import _invoke
from nanovllm_cli.cli.output import console
from nanovllm_cli.text.gguf_export import PROBES
from quantizing import TINY
from test_cli_driver import Result, nanovllm

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers"
TEXT = "Once upon a time,\n  naïve 語 🙂\u202e<|im_end|>\r\n"


def tokenize(home: Path, *words: str, stdin: str | bytes | None = None) -> Result:
    return nanovllm(home, "tokenize", *words, stdin=stdin)


def call(*words: str) -> None:
    """The same in this process, without a standard input."""
    console.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert _invoke(["tokenize", "tiny", *words]) == 0


def said(home: Path, *words: str, stdin: str | bytes | None = None) -> Any:
    """The JSON that comes out."""
    result = tokenize(home, *words, stdin=stdin)
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


# ---- which tokens ----


def test_ids_are_transformers(tmp_path: Path, theirs: Any) -> None:
    text = "\n".join(PROBES)
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = said(tmp_path, "tiny", "-f", "a.txt", "--json")
    assert found["ids"] == theirs(text).input_ids
    assert (found["model"], found["count"]) == ("tiny", len(found["ids"]))
    whole = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in found["pieces"])
    assert whole.decode() == text


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "gpt-2", "falcon", "deepseek-llm"])
def test_ids_of_vocabularies_are_llama_cpps(tmp_path: Path, name: str) -> None:
    file = DATA / f"ggml-vocab-{name}.gguf"
    if not file.exists():
        pytest.skip("llama.cpp's vocabularies are not beside this project")
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in Path(f"{file}.out").read_text().splitlines()]
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    (tmp_path / "a.txt").write_bytes(texts[longest].encode())
    assert said(tmp_path, str(file), "--no-bos", "--ids", "-f", "a.txt") == wanted[longest]


def test_bos_is_in_front_as_sentencepiece_has_it_or_not_at_all(tmp_path: Path) -> None:
    file = DATA / "ggml-vocab-llama-spm.gguf"
    if not file.exists():
        pytest.skip("llama.cpp's vocabularies are not beside this project")
    assert said(tmp_path, str(file), "Hello world", "--json")["pieces"] == ["<s>", " Hello", " world"]
    assert said(tmp_path, str(file), "Hello world", "--ids", "--no-bos") == [15043, 3186]  # as llama.cpp's .out has it


def test_control_tokens_in_a_text_are_what_they_name_unless_asked(tmp_path: Path, theirs: Any) -> None:
    text = "a<|im_end|>b"
    assert said(tmp_path, "tiny", text, "--ids") == theirs(text).input_ids
    plain = said(tmp_path, "tiny", text, "--ids", "--no-parse-special")
    assert plain == theirs(text, split_special_tokens=True).input_ids
    assert theirs.convert_tokens_to_ids("<|im_end|>") not in plain


# ---- which text ----


@pytest.mark.parametrize(
    ("words", "stdin", "text"),
    [
        (["tiny", "one", "two"], None, "one two"),
        (["-m", "tiny", "one", "two"], None, "one two"),
        (["tiny", "-p", "one", "two"], None, "one two"),
        (["tiny"], "one\n\n", "one\n\n"),
        (["tiny", "-"], "one\r\n", "one\r\n"),
        (["tiny"], "", ""),
        (["tiny", ""], None, ""),
        (["tiny", "-f", "a.txt"], None, "A\n"),
        (["tiny", "-f", "bom.txt"], None, "\ufeffB"),
        (["tiny", "-f", "a.txt", "-f", "bom.txt", "words"], "in\n", "in\nA\n\ufeffBwords"),
        (["tiny", "--", "-5"], None, "-5"),
    ],
)
def test_a_text_is_cut_as_it_is(tmp_path: Path, words: list[str], stdin: str | None, text: str) -> None:
    (tmp_path / "a.txt").write_text("A\n")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfB")
    at = words.index("--") if "--" in words else len(words)
    pieces = said(tmp_path, *words[:at], "--json", *words[at:], stdin=stdin)["pieces"]
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces).decode() == text


def test_a_message_is_what_run_would_give_the_model(tmp_path: Path, theirs: Any) -> None:
    def wanted(messages: list[dict[str, str]]) -> list[int]:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(theirs(text).input_ids)

    user = {"role": "user", "content": "Hello"}
    assert said(tmp_path, "tiny", "--chat", "--ids", stdin="Hello\n") == wanted([user]), "as run does: without the last newline"
    system = {"role": "system", "content": "Be brief."}
    assert said(tmp_path, "tiny", "--chat", "--ids", "-sys", "Be brief.", "Hello") == wanted([system, user])
    plain = said(tmp_path, "tiny", "--chat", "--json", "a<|im_end|>b")["pieces"]
    assert "".join(plain).count("<|im_end|>") > plain.count("<|im_end|>"), "what a user writes is no control token"


def test_a_template_and_its_variables_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% if enable_thinking %}T{% endif %}{{ mood }}:{{ messages[-1].content }}")

    def pieces(*words: str) -> str:
        return "".join(said(tmp_path, "tiny", "--chat", "--json", "--chat-template", "./own.jinja", *words, "x")["pieces"])

    assert pieces() == ":x"
    assert pieces("--think", "on") == "T:x"
    assert pieces("--think", "off", "--chat-template-kwargs", '{"mood": "glad"}') == "glad:x"
    itself = ["--chat-template", "<{% for m in messages %}{{ m.content }}{% endfor %}>"]  # as llama.cpp and vLLM take it too
    assert "".join(said(tmp_path, "tiny", "--chat", "--json", *itself, "x")["pieces"]) == "<x>"


# ---- what is written ----


def test_a_line_is_a_token_and_holds_nothing_that_a_terminal_obeys(tmp_path: Path, theirs: Any) -> None:
    text = TEXT + "\x1b[31m\x07\x9b"
    result = tokenize(tmp_path, "tiny", text)
    lines = result.out.split("\n")
    assert (result.code, result.err, lines.pop()) == (0, "", "")
    assert all(line.isprintable() for line in lines)
    ids = theirs(text).input_ids
    assert [int(line.split(" -> ")[0]) for line in lines] == ids
    assert len({line.index("->") for line in lines}) == 1, "aligned"
    shown = [eval(line.split(" -> ", 1)[1]) for line in lines]
    assert any(isinstance(piece, bytes) for piece in shown), "🙂 is several tokens"
    assert b"".join(piece if isinstance(piece, bytes) else piece.encode() for piece in shown).decode() == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_tokens_are_dimmed_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call("-q", "a<|im_end|>")
    plain = capsys.readouterr().out
    first, second = plain.splitlines()
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    call("-q", "a<|im_end|>")
    assert sys.stdout.getvalue() == f"{first}\n\x1b[2m{second}\x1b[0m\n"  # type: ignore[attr-defined]
    assert "\x1b" not in plain


def test_a_count_is_a_number_and_ids_are_a_list(tmp_path: Path, theirs: Any) -> None:
    ids = theirs("Once upon a time").input_ids
    assert tokenize(tmp_path, "tiny", "--count", "Once upon a time").out == f"{len(ids)}\n"
    assert tokenize(tmp_path, "tiny", "--ids", "Once upon a time").out == f"{ids}\n"
    assert tokenize(tmp_path, "tiny", "--count", stdin="").out == "0\n"
    assert tokenize(tmp_path, "tiny", stdin="").out == ""


# ---- back ----


def test_ids_become_their_text_byte_for_byte(capsysbinary: pytest.CaptureFixture[bytes], theirs: Any) -> None:
    def decoded(*words: str) -> bytes:
        call("--decode", *words)
        return capsysbinary.readouterr().out

    ids = theirs(TEXT).input_ids
    assert decoded(*map(str, ids)) == TEXT.encode()
    assert decoded(f"{ids}\n") == TEXT.encode()
    assert decoded(", ".join(map(str, ids))) == TEXT.encode()
    part = next(ids[:i] for i in range(1, len(ids)) if "\ufffd" in theirs.decode(ids[:i]))
    found = decoded(*map(str, part))
    assert TEXT.encode().startswith(found)
    with pytest.raises(UnicodeDecodeError):
        found.decode()
    assert decoded("[]") == b""


def test_ids_are_read_from_standard_input_and_nothing_is_added(tmp_path: Path) -> None:
    ids = tokenize(tmp_path, "tiny", "--ids", TEXT).out
    assert tokenize(tmp_path, "tiny", "--decode", stdin=ids).out == TEXT
    assert tokenize(tmp_path, "tiny", "--decode", "--", "-", "2671", stdin="808\n").out == "Hellohi"


def test_the_space_that_a_vocabulary_puts_in_front_is_no_text(tmp_path: Path) -> None:
    file = DATA / "ggml-vocab-llama-spm.gguf"
    if not file.exists():
        pytest.skip("llama.cpp's vocabularies are not beside this project")
    assert tokenize(tmp_path, str(file), "--decode", "15043 3186").out == "Hello world"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1", "x", "y"], "'x' is not a token id"),
        (["[1, 2.5]"], "'2.5' is not a token id"),
        (["[1, 2"], "'[1' is not a token id"),
        (["1,,2"], "'' is not a token id"),
        (["1 4095 5000 6000"], "tiny has no token 5000"),
        (["9" * 5000], "tiny has no token 999"),
        (["true"], "'true' is not a token id"),
        (["٣"], "'٣' is not a token id"),
        (["--", "-1"], "'-1' is not a token id"),
    ],
)
def test_the_first_bad_id_is_named(tmp_path: Path, words: list[str], says: str) -> None:
    result = tokenize(tmp_path, "tiny", "--decode", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {says}")
    assert result.err.count("\n") == 2


# ---- what is refused, and what is not needed ----


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["tiny", "x", "--ids", "--json"], 2, "--ids and --json cannot be used together"),
        (["tiny", "x", "-sys", "y"], 2, "--system-prompt has no meaning without --chat"),
        (["tiny", "x", "--think", "on"], 2, "--think has no meaning without --chat"),
        (["tiny", "x", "--chat", "--chat-template", "chatml", "--think", "on"], 2, "--think has no meaning: the template"),
        (["tiny", "x", "--chat", "--no-bos"], 2, "--no-bos has no meaning with --chat"),
        (["tiny", "x", "--chat", "--chat-template-kwargs", "[1]"], 2, "--chat-template-kwargs is not a JSON object"),
        (["tiny", "x", "--chat", "--chat-template-kwargs", '{"tools": 1}'], 2, "tools is not a variable"),
        (["tiny", "--decode", "1", "--ids"], 2, "--ids has no meaning with --decode"),
        (["tiny", "--decode", "1", "--no-bos"], 2, "--no-bos has no meaning with --decode"),
        (["tiny", "--chat"], 2, "there is no text"),
        (["tiny", "x", "--chat", "--chat-template", "{{ x"], 1, "the chat template does not compile"),
        (["tiny", "--decode"], 2, "there are no ids\nhint: for example: nanovllm tokenize tiny --decode 9 10 11"),
        (["tiny", "-f", "missing.txt"], 2, "there is no file missing.txt"),
        (["tiny", "-f", "latin.txt"], 2, "latin.txt is not UTF-8: byte 0xfc at offset 2"),
        (["no/such/model", "x"], 3, "no/such/model is not in the cache"),
        (["x", "y"], 3, ""),
        ([], 2, "no model was named"),
    ],
)
def test_mistakes_are_told_in_two_lines(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1"))
    result = tokenize(tmp_path, *words)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"error: {says}")
    assert result.err.count("\n") <= 2


def test_a_model_without_a_template_is_no_chat(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(TINY, folder, copy_function=os.link)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    result = tokenize(tmp_path, "./base", "--chat", "x")
    assert (result.code, result.err.splitlines()[0]) == (2, "error: ./base has no chat template")
    assert tokenize(tmp_path, "./base", "--chat", "--chat-template", "chatml", "x", "--count").code == 0


def test_no_weight_is_read(tmp_path: Path) -> None:
    """Where they are is nothing but a hole: all NaN or all zero, nobody looks."""
    folder = tmp_path / "m"
    shutil.copytree(TINY, folder)
    data = (TINY / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(data[:header])
        file.truncate(len(data))
    assert tokenize(tmp_path, "./m", "Hello").out == tokenize(tmp_path, "tiny", "Hello").out
