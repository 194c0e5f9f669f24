"""The parts of the command line that need no process of their own."""

from __future__ import annotations

import io
import json
import os
import pwd
import stat
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from nanovllm_cli import folders
from nanovllm_cli.cli import config as config_command
from nanovllm_cli.cli import history, parsers, settings_view
from nanovllm_cli.cli.answer import first_code_block
from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.failures import explanation
from nanovllm_cli.cli.files import WholeFile, is_special, stem_of
from nanovllm_cli.cli.inputs import decode, read_file, standard_input
from nanovllm_cli.cli.options import MemoryOptions, ModelOptions
from nanovllm_cli.cli.output import Console, Stream, one_line
from nanovllm_cli.cli.program import PROGRAM, build
from nanovllm_cli.cli.progress_line import duration, size
from nanovllm_cli.cli.results import Results
from nanovllm_cli.cli.settings import (
    MAX_BYTES,
    Settings,
    SettingsFile,
    as_words,
    load_settings,
    project_file,
    user_file,
)
from nanovllm_cli.config import EngineConfig, RopeChange
from nanovllm_cli.errors import AccessRefusedError, ModelNotFoundError, OutputError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.control_filter import ControlFilter
from nanovllm_cli.weights import hub, shapes

# ---- sizes, biases, escapes, names ----


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("25.6k", 25600),
        ("32K", 32768),
        ("1.5K", 1536),
        ("1M", 1 << 20),
        (".5k", 500),
        ("0", 0),
        ("-1", -1),
    ],
)
def test_token_counts(text: str, tokens: int) -> None:
    assert parsers.count(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "k", "-5", "1.5", "12x", "1e3", "NaN", "32KB", "9" * 40, "1_000", "٣", "0x10", "1 000"]
)
def test_bad_token_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parsers.count(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        ("1.5GiB", 3 << 29),
        ("800MB", 800_000_000),
        ("64k", 65536),
        ("100", 100),
        ("9B", 9),
    ],
)
def test_memory_sizes(text: str, num_bytes: int) -> None:
    assert parsers.memory(text) == num_bytes


@pytest.mark.parametrize("text", ["0", "-1", "lots", "1.5", "G", "10PB", "99999999999T"])
def test_bad_memory_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parsers.memory(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [("auto", "auto"), ("bf16", "bfloat16"), ("FP8", "fp8"), ("fp8_e4m3", "fp8"), ("Int8", "int8"), ("q8_0", "int8")],
)
def test_cache_types_have_the_names_of_llama_cpp_and_vllm_too(text: str, name: str) -> None:
    assert parsers.cache_type(text) == name


@pytest.mark.parametrize(
    ("text", "words"), [("q4_0", "int8 and fp8 take the least"), ("fp8_e5m2", "fp8 is e4m3"), ("", r"known|not a KV")]
)
def test_other_cache_types_are_refused_with_the_nearest(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsers.cache_type(text)


def test_as_many_threads_as_there_are_is_said_as_in_llama_cpp() -> None:
    assert MemoryOptions(threads=-1).config(ModelOptions()) == MemoryOptions().config(ModelOptions())
    assert MemoryOptions(threads=3).config(ModelOptions()).threads == 3


def test_logit_biases() -> None:
    assert parsers.logit_bias("15043+1") == (15043, 1.0)
    assert parsers.logit_bias("2-1.5") == (2, -1.5)


@pytest.mark.parametrize("text", ["", "5", "+1", "a+1", "5+", "5+x", "5=1", "-5+1", "5+1e999999", "5+inf", "5+nan"])
def test_bad_logit_biases_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="token id with a bias"):
        parsers.logit_bias(text)


def test_escapes_are_few() -> None:
    assert parsers.escaped(r"\n\t\\n\d\\") == "\n\t\\n\\d\\"


def test_fields_are_called_by_options_that_there_are() -> None:
    there = {flag for each in page(get_command(build()), PROGRAM).every() for option in each.options for flag in option.flags}
    assert set(parsers.FLAGS.values()) <= there
    named = {field.name for field in (*fields(SamplingParams), *fields(EngineConfig))}
    assert {name for name in named - set(parsers.FLAGS) if "--" + name.replace("_", "-") in there} == {"reasoning"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("min_tokens (9) must not be above max_tokens (5)", "--min-tokens (9) must not be above --predict (5)"),
        ("n must be a whole number, not 'n'", "--num-answers must be a whole number, not 'n'"),
        ("top_k of 'a top_p' and \"a top_p's\", a model's top_p", "--top-k of 'a top_p' and \"a top_p's\", a model's --top-p"),
        (r"top_k, not 'it\'s top_p'", r"--top-k, not 'it\'s top_p'"), ("it's top_k, it's top_p", "it's --top-k, it's --top-p"),
        ("block_size must be at least 1, not num_blocks", "block_size must be at least 1, not num_blocks"),
        ("reasoning must be a phase", "reasoning must be a phase"), ("no stop", "no stop"), ("unknown dtype", "unknown dtype"),
    ],
)  # fmt: skip
def test_a_message_says_what_was_typed(message: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught, parsers.by_their_flags():
        raise UsageError(message)
    assert (caught.value.message, str(caught.value)) == (expected, expected)


# ---- code blocks ----


@pytest.mark.parametrize(
    ("answer", "code", "closed"),
    [
        ("text\n```python\nx = 1\n\ny\n```\nmore\n```\nno\n```", "x = 1\n\ny\n", True),
        ("```\na\n````\n", "a\n", True),
        ("````\n```\nin\n```\n````", "```\nin\n```\n", True),
        ("~~~ sh\nls `x`\n~~~", "ls `x`\n", True),
        ("1. so:\n   ```c\n   int x;\n     y\n   ```", "int x;\n  y\n", True),
        ("```\n```", "", True),
        ("```py\nhalf", "half", False),
        ("``` not`a fence\n```\nyes\n```", "yes\n", True),
    ],
)
def test_first_code_block(answer: str, code: str, closed: bool) -> None:
    block = first_code_block(answer)
    assert block is not None
    assert (block.text, block.closed) == (code, closed)


@pytest.mark.parametrize("answer", ["", "no code", "`one` ``two``", "`` `\nx\n``"])
def test_answers_without_code(answer: str) -> None:
    assert first_code_block(answer) is None


# ---- what a terminal must not see ----


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcödé 語\n\t", "plain ünïcödé 語\n\t"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice\x1b\\x", "x"),
        ("a\x9b31mb\x9dtitle\x9cc", "abc"),
        ("\x1b]0;never ends\nnext line", "\nnext line"),
        ("bell\x07 back\x08 return\rdel\x7f nul\x00", "bell back returndel nul"),
        ("\x1bcreset\x1b(Bset", "resetset"),
        ("\x1b\x1b[2Jx", "x"),
        ("\x1b[\n31mx", "\n31mx"),
        ("if \u202eevil\u202c and \u2066more\u2069 \u200dhere", "if evil and more \u200dhere"),
    ],
)
def test_control_sequences_are_stripped_however_they_are_cut(text: str, shown: str) -> None:
    assert ControlFilter().feed(text) == shown
    pieces = ControlFilter()
    assert "".join(map(pieces.feed, text)) == shown


def test_what_outputs_are_named_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-1.5").mkdir()
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "some-0.5b-00001-of-00003.gguf").symlink_to("blob")
    monkeypatch.chdir(tmp_path / "model-1.5")
    assert stem_of("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen2.5-0.5B-Instruct"
    assert stem_of("gpt2.5") == "gpt2.5"
    assert stem_of(".") == stem_of("../model-1.5/") == "model-1.5"
    assert stem_of("..") == tmp_path.name
    assert stem_of("../some-0.5b-00001-of-00003.gguf") == "some-0.5b"


def test_a_user_without_a_home_gets_no_folder_called_like_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user by number alone, where HOME is not set: what Python makes of `~/.cache` is relative."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert folders.cache_folder() == Path("/nonexistent/.cache/nanovllm")
    assert folders.state_folder() == Path("/nonexistent/.local/state/nanovllm")
    assert hub.cache_folder() == Path("/nonexistent/.cache/huggingface/hub")
    assert settings_view.short(tmp_path / "x") == "x"
    assert settings_view.short(Path("/etc/x")) == "/etc/x"
    with pytest.raises(ModelNotFoundError, match="~/mine"):
        shapes.shape_config("~/mine")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub.cache_folder() == Path("/nonexistent/hf/hub")


def test_a_run_that_cannot_be_kept_leaves_none_before_it_to_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history.save(history.LastRun("tiny", text="one"))
    assert history.load().text == "one"

    def full(*_: object, **__: object) -> None:
        raise OutputError("no space left")

    monkeypatch.setattr(history, "write_whole", full)
    history.save(history.LastRun("tiny", text="two"))
    with pytest.raises(UsageError, match="there is no run to continue"):
        history.load()


def test_a_run_goes_on_with_what_made_its_model_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said = EngineConfig(rope=RopeChange("yarn", 4.0), overrides={"a": {"b": 1}, "c": "x"})  # type: ignore[arg-type]
    changes = {"rope": list(said.rope), "overrides": [list(each) for each in said.overrides]}
    history.save(history.LastRun("tiny", text="one", changes=changes))
    assert history.load().beside(EngineConfig()) == said
    other = EngineConfig(rope=RopeChange("linear", 2.0), overrides={"d": 2})  # type: ignore[arg-type]
    assert history.load().beside(other) == other, "what is said anew counts"


def test_messages_stay_on_one_line() -> None:
    assert one_line("a\nb\x1b[31m\tc\r") == "a b?[31m c"


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def reconfigure(self, **options: str) -> None:
        pass


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"TERM": "xterm", "FORCE_COLOR": "0"}, True, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_who_gets_colour(environ: dict[str, str], terminal: bool, pipe: bool) -> None:
    assert Stream(FakeTerminal(), "x", required=False, environ=environ).color is terminal
    assert Stream(io.StringIO(), "x", required=False, environ=environ).color is pipe


def test_a_status_line_comes_and_goes_without_a_trace() -> None:
    environ = {"TERM": "xterm"}
    screen = FakeTerminal()
    console = Console(
        Stream(screen, "out", required=True, environ=environ), Stream(screen, "err", required=False, environ=environ)
    )
    console.status("loading")
    console.status("loading more")
    console.answer("Hello")
    console.say("note")
    console.answer("again")
    console.end_answer()
    assert screen.getvalue() == "loading\r\x1b[Kloading more\r\x1b[KHello\nnote\nagain\n"


def test_no_status_line_where_the_reader_of_a_pipe_may_write() -> None:
    """`| jq` may write what it has read at any moment."""
    reading, writing = os.pipe()
    screen = FakeTerminal()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        out = Stream(pipe, "out", required=True)
        console = Console(out, Stream(screen, "err", required=False, environ={"TERM": "xterm"}))
        console.status("loading")
        console.answer("first\n")
        console.status("second")
        console.say("note")
        console.status("third")
    assert screen.getvalue() == "loading\r\x1b[Knote\n"


def test_a_status_line_leaves_room_for_what_ctrl_c_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    screen = FakeTerminal()
    console = Console(err=Stream(screen, "err", required=False, environ={"TERM": "xterm"}))
    console.status("x" * 50)
    assert screen.getvalue() == "x" * 17


def test_a_closed_stdout_is_an_error_and_a_closed_stderr_is_none() -> None:
    with pytest.raises(OutputError, match="standard output is closed"):
        Stream(None, "standard output", required=True).write("x")
    Stream(None, "standard error", required=False).write("x")


def test_sizes_and_times_for_people() -> None:
    sizes = [size(n) for n in (0, 1023, 1536, 150 << 20, 3 << 30, 5 << 40)]
    assert sizes == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "150 MiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [duration(s) for s in (-1, 5.4, 65, 3700)] == ["0 s", "5 s", "1 min 5 s", "1 h 1 min"]
    assert [duration(s) for s in (59.6, 119.7, 3599.9)] == ["1 min 0 s", "2 min 0 s", "1 h 0 min"]


# ---- input ----


def test_the_first_bad_byte_is_named() -> None:
    with pytest.raises(UsageError, match=r"notes is not UTF-8: byte 0xe9 at offset 3") as caught:
        decode(b"caf\xe9", "notes")
    assert "ISO-8859-1" in str(caught.value.hint)
    with pytest.raises(UsageError, match="0xff at offset 0") as caught:
        decode("hi".encode("utf-16"), "notes")
    assert "UTF-16" in str(caught.value.hint)
    assert decode(b"\xef\xbb\xbfbom", "notes") == "bom"


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ("\N{GRINNING FACE}".encode()[:3], "it ends within a character, as what was cut off does; if it is ISO-8859-1"),
        (b"a\0\xff", "it holds zero bytes: it is no text"), (b"\x89PNG\r\n\x1a\n\0", "it is an image: --image of run"),
        (b"RIFF\n\xff\0\0WEBPVP8", "it is an image: --image of run"), (b"\xff\xd8\xff\xe0\0", "it is an image: --image of run"),
        (b"RIFF\x24\xff\0\0WAVEfmt", "it is a sound: --audio of run"), (b"%PDF-1.7\n%\xe2\xe3", "it is a PDF: pdftotext"),
        (b"GGUF\3\0\xff", "it is a model: nanovllm run FILE"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_told_where_it_belongs(data: bytes, hint: str) -> None:
    with pytest.raises(UsageError, match="notes is not UTF-8: byte 0x") as caught:
        decode(data, "notes")
    assert str(caught.value.hint).startswith(hint)
    with pytest.raises(UsageError, match="offset 4"):
        decode(b"\xef\xbb\xbfa\xff", "notes")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("x")
    with pytest.raises(UsageError, match="there is no file") as caught:
        read_file(str(tmp_path / "promt.txt"))
    assert "prompt.txt" in str(caught.value.hint)
    with pytest.raises(UsageError, match="is a folder"):
        read_file(str(tmp_path))
    with pytest.raises(UsageError, match="cannot read"):
        read_file("nul\0byte")
    with pytest.raises(UsageError, match="longer than 64 MiB"):
        read_file("/dev/zero")


def test_standard_input_that_another_program_has_left_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, encoding="utf-8") as stdin, open(writing, "wb"):
        monkeypatch.setattr("sys.stdin", stdin)
        assert standard_input() is stdin.buffer
        assert os.get_blocking(reading)  # else read() gives None before anything has come


def test_no_stream_loses_what_finds_no_room() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(writing, "w") as file, open(reading, "rb"):
        Stream(file, "standard output", required=True)
        assert os.get_blocking(writing)


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(AccessRefusedError, match=r"cannot read secret\.txt: Permission denied"):
        read_file("secret.txt")


# ---- output files ----


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    with WholeFile(path) as file:
        file.write("half")
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []
    with WholeFile(path) as file:
        file.write("whole\n")
        file.commit()
    assert path.read_text() == "whole\n"
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    path, link = tmp_path / "real", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with WholeFile(link) as file:
        file.write("new")
        file.commit()
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_devices_are_written_and_not_replaced() -> None:
    with WholeFile(Path("/dev/null")) as file:
        file.write("gone")
        file.commit()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_names_below_devices_that_are_files(tmp_path: Path) -> None:
    assert is_special(Path("/dev/stdout"))
    assert is_special(Path("/dev/nosuch"))
    assert not is_special(Path("/dev/shm/answer.txt"))  # a folder in memory
    assert not is_special(tmp_path / (300 * "a"))  # the system has no such name


def test_a_place_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file") as caught:
        WholeFile(tmp_path / "no" / "answer.txt")
    assert caught.value.hint == "create its folder first"
    with pytest.raises(OutputError, match="Is a directory"):
        WholeFile(tmp_path)


def test_a_full_disk_leaves_nothing() -> None:
    with WholeFile(Path("/dev/full")) as file, pytest.raises(OutputError, match="No space left"):
        file.write("x" * 100_000)


# ---- results of a batch ----


def record(key: str, **more: object) -> str:
    return json.dumps({"key": key, **more})


def test_results_come_in_order(tmp_path: Path) -> None:
    written: list[str] = []
    with Results(None, False, 3, written.append) as results:
        results.put(2, "c")
        assert written == []
        results.put(0, "a")
        results.put(1, "b")
    assert written == ["a\n", "b\n", "c\n"]


def test_an_interrupted_batch_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, False, 3, print) as results:
        assert results.resume(["k0", "k1", "k2"], [1, 2, 4]) == 0
        results.put(2, record("k2"))
        results.put(0, record("k0", error={}))
    assert not path.exists()
    with (tmp_path / "out.jsonl.partial").open("a") as journal:
        journal.write('{"key": "k1", "torn')
    with Results(path, False, 3, print) as results:
        assert results.resume(["k0", "k1", "k2"], [1, 2, 4]) == 1
        assert [results.has(i) for i in range(3)] == [False, False, True]
        results.put(0, record("k0"))
        results.put(1, record("k1"))
        results.finish()
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["k0", "k1", "k2"]
    assert list(tmp_path.iterdir()) == [path]


def test_equal_lines_have_a_result_each(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("k", n=1, line=1) + "\n" + record("k", n=2, line=3) + "\n")
    with Results(path, False, 3, print) as results:
        assert results.resume(["k", "k", "k"], [1, 2, 4]) == 2
        results.put(2, record("k", n=3, line=4))
        results.finish()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["n"], each["line"]) for each in written] == [(1, 1), (2, 2), (3, 4)], "lines are as they are numbered now"


@pytest.mark.parametrize(
    "content", ["important notes\n", '{"prompt": "the input itself"}\n', record("other") + "\n", "[1]\n", "{" * 3000]
)
def test_what_is_no_result_of_this_batch_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with Results(path, False, 1, print) as results, pytest.raises(UsageError, match="holds"):
        results.resume(["k"], [1])
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        Results(tmp_path / "out", False, 1, print),
        pytest.raises(OutputError, match="another batch"),
    ):
        Results(tmp_path / "out", False, 1, print)


# ---- settings ----

FLAGS = {"run": {"temp": "temperature", "ctx-size": "ctx_size"}, "serve": {"port": "port", "temp": "temperature"}}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project, home = tmp_path / "project", tmp_path / "home" / "nanovllm"
    (project / "deep").mkdir(parents=True)
    home.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.parent))
    monkeypatch.chdir(project / "deep")
    return tmp_path


def defaults(settings: Settings, command: str, model: str | None) -> dict[str, object]:
    param = SimpleNamespace(nargs=1)
    return {name: as_words(origin.value, param) for name, origin in settings.origins(command, model).items()}


def test_a_home_that_is_no_place_of_its_own_is_not_read(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_file() == config / "home/nanovllm/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "home")  # "All paths must be absolute" (XDG Base Directory Specification)
    assert user_file() is None


def test_a_settings_file_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("# " + "x" * (MAX_BYTES - 2))
    SettingsFile(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text("# " + "x" * (MAX_BYTES - 1))
    with pytest.raises(UsageError, match="longer than"):
        SettingsFile(tmp_path / "c.toml")


def test_the_nearer_and_the_more_special_setting_wins(config: Path) -> None:
    (config / "home/nanovllm/config.toml").write_text(
        '[default]\ntemp = 1\nport = 80\n[run]\nctx-size = "32K"\n[models.m]\ntemp = 3\n'
        '[aliases]\nmine = "m"\nother = "mine"\n'
    )
    settings = load_settings(FLAGS)
    assert defaults(settings, "run", None) == {"temperature": "1", "ctx_size": "32K"}
    assert defaults(settings, "run", "mine") == {"temperature": "3", "ctx_size": "32K"}
    assert defaults(settings, "serve", "x") == {"temperature": "1", "port": "80"}
    assert settings.resolve("other") == "m"
    assert settings.resolve("unknown") == "unknown"
    windows = "[default]\r\ntemp = 0.5\r\n".encode("utf-8-sig")  # as its editors write
    (config / "project/nanovllm.toml").write_bytes(windows)
    assert defaults(load_settings(FLAGS), "run", "m")["temperature"] == "0.5"


def test_a_project_ends_at_its_repository(tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text("")
    inner = tmp_path / "repository" / "folder"
    inner.mkdir(parents=True)
    assert project_file(inner) == tmp_path / "nanovllm.toml"
    (tmp_path / "repository" / ".git").mkdir()
    assert project_file(inner) is None


def test_a_folder_that_may_not_be_looked_into_has_no_settings(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's home, or a working folder inside it, as `sudo -u` and cron leave them."""
    asked = os.stat

    def refuse(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(str(config)):
            raise PermissionError(13, "Permission denied")
        return asked(path, *args, **more)

    monkeypatch.setenv("XDG_STATE_HOME", str(config / "home"))
    monkeypatch.setattr(os, "stat", refuse)
    assert load_settings(FLAGS).files == ()
    with pytest.raises(UsageError, match="there is no run to continue"):
        history.load()


def test_a_working_folder_that_is_gone_has_no_settings(config: Path) -> None:
    (config / "project/deep").rmdir()
    assert load_settings(FLAGS).files == ()
    assert settings_view.short(Path("/etc/x")) == "/etc/x"
    with pytest.raises(UsageError, match="this folder is not there any more"):
        config_command._file(config_command.FileOptions(project=True))


def test_a_folder_that_is_closed_is_no_fault_of_ours() -> None:
    told = explanation(PermissionError(13, "Permission denied", "/root/.cache/huggingface/hub"))
    assert (told.message, told.exit_code) == ("/root/.cache/huggingface/hub: permission denied", 4)
    assert explanation(PermissionError(1, "Operation not permitted")).message.startswith("internal error")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("temp = ", "not TOML"),
        ("temp = 1", "'temp' is no table"),
        ("[default]\ntmep = 1", "'tmep' is no setting in .default."),
        ("[runn]\n", "'runn' is no table"),
        ("[serve]\nctx-size = 1", "no setting in .serve."),
        ("[default.temp]\nx = 1", "is a table, not a value"),
        ("[aliases]\na = 1", "not the name of a model"),
        ("[models]\nm = 1", "is not a table"),
        ("run = 1", "is not a table"),
        ('[default]\ntemp = "\udcff"'.encode("utf-8", "surrogateescape").decode("latin-1"), r"nanovllm.toml:2: not UTF-8"),
        ('[default]\napi-key = "secret"', "'api-key' is no setting in .default."),
    ],
)
def test_settings_without_effect_are_refused(config: Path, text: str, says: str | None) -> None:
    (config / "project/nanovllm.toml").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=says):
        load_settings(FLAGS)


def test_aliases_in_a_circle(config: Path) -> None:
    (config / "project/nanovllm.toml").write_text('[aliases]\na = "b"\nb = "a"\nc = "c"\n')
    settings = load_settings(FLAGS)
    with pytest.raises(UsageError, match="in a circle"):
        settings.resolve("a")
    assert settings.resolve("c") == "c"


@pytest.mark.parametrize("kept", [b"[" * 100_000, b'{"model": [], "text": ""}', b"null", b"\xff", b"1" * 5000,
    b'{"model": "tiny", "text": "", "changes": {"rope": 5}}', b'{"model": "tiny", "text": "", "changes": {"overrides": [[1]]}}',
    b'{"model": "tiny", "text": "", "changes": {"device": "cuda"}}',
])  # fmt: skip
def test_a_damaged_last_run_is_none(kept: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history.last_run_file().parent.mkdir()
    history.last_run_file().write_bytes(kept)
    with pytest.raises(UsageError, match="cannot be read"):
        history.load()


def test_what_lies_where_a_batch_keeps_results_is_not_followed(tmp_path: Path) -> None:
    """Links to a file of the user's, as others may leave them in a shared folder; a pipe."""
    mine, journal = tmp_path / "mine", tmp_path / "out.jsonl.partial"
    mine.write_bytes(b"one line\nhalf a line")
    for place in (lambda: journal.symlink_to(mine), lambda: journal.hardlink_to(mine), lambda: os.mkfifo(journal)):
        place()
        with pytest.raises(OutputError, match="cannot write"):
            Results(tmp_path / "out.jsonl", False, 1, print)
        journal.unlink()
    assert mine.read_bytes() == b"one line\nhalf a line"
