"""What a person sees of a conversation and types into it, in a real terminal (tmux): keys, resizes, signals, what is left."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import chat_driver
from nanovllm_cli.chat.flow import text_width
from nanovllm_cli.chat.keys import AnswerKeys
from nanovllm_cli.chat.surface import Status
from nanovllm_cli.chat.toolbar import toolbar
from tmux import Tmux

SOURCE = str(Path(chat_driver.__file__).parent.parent / "src")


class Chat(Tmux):
    """A shell in which the driver has been started."""

    def __init__(self, folder: Path, *flags: str, width: int = 80, height: int = 24, **extra: str) -> None:
        environ = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "tmux-256color", "LANG": "C.UTF-8", "PYTHONPATH": SOURCE,
        }  # fmt: skip
        super().__init__(folder, environ | extra, width, height)
        self.log = folder / "log"
        (folder / "go").unlink(missing_ok=True)
        self.run_and_wait("stty -a > before; echo ready", "ready")
        self.run([sys.executable, chat_driver.__file__, str(self.log), *flags])
        self.expect("context 83%" if "loading" not in flags else "\nloading")

    def run_and_wait(self, command: str, word: str) -> None:
        self.type(command + "\n")
        self.expect(lambda screen: word in screen.split("\n"))

    @property
    def received(self) -> list[str]:
        """Whole lines: one may be on its way."""
        return [json.loads(line) for line in self.log.read_text().split("\n")[:-1]] if self.log.exists() else []

    def expect_received(self, *messages: str) -> None:
        end = time.monotonic() + 20
        while self.received != list(messages) and time.monotonic() < end:
            time.sleep(0.03)
        assert self.received == list(messages)

    def is_whole(self, code: int | None) -> None:
        """The program has ended with `code`, which a shell may not show, and left the terminal as it found it."""
        self.expect(f"code={code}\n$" if code is not None else "the end\n$")
        self.run_and_wait("stty -a > after; echo compared", "compared")
        folder = self.log.parent
        assert (folder / "after").read_text() == (folder / "before").read_text()
        assert self.shows_cursor
        assert "\x1b" not in self.styled.split("compared")[-1]  # no attribute is left over
        self.type("echo visible\n")
        self.expect("$ echo visible\nvisible")

    def pid(self) -> int:
        panes = self("list-panes", "-F", "#{pane_pid}").strip()
        children = Path(f"/proc/{panes}/task/{panes}/children").read_text().split()
        return int(children[0])

    def go_on(self) -> None:
        """The model goes on with what it has stopped in."""
        (self.log.parent / "go").touch()


Start = Callable[..., Chat]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[Chat] = []

    def begin(*flags: str, **options: object) -> Chat:
        begun.append(Chat(tmp_path, *flags, **options))  # type: ignore[arg-type]
        return begun[-1]

    yield begin
    for chat in begun:
        chat.close()


def test_messages_of_one_line_and_of_several(start: Start) -> None:
    chat = start()
    chat.type("hello\n")
    chat.expect("› hello\nanswered\n\n›")
    chat.type("one")
    chat.press("C-j")
    chat.type("two")
    chat.press("M-Enter")
    chat.type("three\n")
    chat.expect_received("hello", "one\ntwo\nthree")
    chat.type("edit\n")
    chat.expect("› a draft")
    chat.type(" changed\n")
    chat.expect_received("hello", "one\ntwo\nthree", "edit", "a draft changed")
    chat.press("C-d")
    chat.expect("the end")
    chat.is_whole(0)


def test_lines_as_llama_cpp_and_ollama_have_them_go_on(start: Start) -> None:
    chat = start()
    chat.type("one\\\ntwo\n")
    chat.expect("› one\n  two\nanswered")
    chat.type('"""three\nfour\n"""\n')
    chat.expect_received("one\ntwo", "three\nfour")
    chat.type('"""five""" and """six""" \\ seven\n')
    chat.expect_received("one\ntwo", "three\nfour", '"""five""" and """six""" \\ seven')
    chat.press("C-d")
    chat.is_whole(0)


def test_ten_thousand_pasted_lines_arrive_whole_and_stay_short_on_the_screen(start: Start) -> None:
    chat = start()
    text = "\n".join(f"line {i}\t of the paste" for i in range(10_000))
    chat.paste(text)
    chat.expect(f"› [text 1: 10,000 lines, {len(text):,} characters]")
    chat.type(" and more\n")
    chat.expect_received(text + " and more")
    chat.paste("two\nlines")
    chat.expect("› two\n  lines")
    chat.type("\n")
    chat.expect_received(text + " and more", "two\nlines")
    assert len(chat.screen.split("\n")) < 20
    chat.press("Up", "Up", "Up")  # two lines of the last message, then the one before
    chat.expect(lambda screen: screen.count("[text 1: 10,000 lines") == 2)
    chat.press("C-c", "C-d")
    chat.is_whole(0)


def test_history_is_kept_for_its_owner_alone_and_searched(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "state" / "history"
    chat = start()
    chat.type("the first message\n")
    chat.type("another\n")
    chat.expect_received("the first message", "another")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    chat.press("C-d")
    chat.expect("code=0")
    chat.run([sys.executable, chat_driver.__file__, str(chat.log)])
    chat.expect(lambda screen: screen.count("context 83%") == 1)
    chat.press("C-r")
    chat.type("first")
    chat.expect("the first message")
    chat.press("Enter")
    chat.press("Enter")
    chat.expect_received("the first message", "another", "the first message")
    chat.type("anot")
    chat.expect("› another")  # suggested
    chat.press("Right", "Enter")
    chat.expect_received("the first message", "another", "the first message", "another")


def test_commands_are_completed(start: Start) -> None:
    chat = start()
    chat.type("/h")
    chat.expect("what can be done")
    chat.press("Tab")
    chat.press("Tab")
    chat.expect("› /history")
    chat.press("Enter")  # takes it
    chat.expect(lambda screen: "what was said" not in screen)
    assert chat.received == []
    chat.press("Enter")
    chat.expect_received("/history")
    chat.type("no /h")
    chat.expect("› no /h")
    time.sleep(0.2)
    assert "what can be done" not in chat.screen


def test_ctrl_c_clears_a_line_and_interrupts_an_empty_one(start: Start) -> None:
    chat = start()
    chat.type("something")
    chat.expect("› something")
    chat.press("C-c")
    chat.expect(lambda screen: "something" not in screen)
    assert "interrupted" not in chat.screen
    chat.press("C-c")
    chat.expect("interrupted while idle\n›")
    chat.type("x")
    chat.press("C-d")  # deletes; leaves only on an empty line
    chat.press("C-h", "C-d")
    chat.expect("the end")
    chat.is_whole(0)


@pytest.mark.parametrize(
    ("kind", "seen"), [("count", "word9"), ("prefill", "reading the prompt"), ("think", "thought 9")]
)
def test_ctrl_c_stops_an_answer_in_every_phase(start: Start, kind: str, seen: str) -> None:
    chat = start()
    chat.type(f"{kind}\n")
    chat.expect(seen)
    chat.press("C-c")
    screen = chat.expect("(stopped)\n\n›")
    assert "^C" not in screen
    assert "reading the prompt" not in screen
    chat.type("hello\n")
    chat.expect("› hello\nanswered")
    chat.press("C-d")
    chat.is_whole(0)


def test_what_is_typed_during_an_answer_waits_for_the_prompt(start: Start) -> None:
    chat = start()
    chat.type("count\n")
    chat.expect("word9")
    chat.type("next é")
    chat.paste("pas\nted")
    time.sleep(0.2)
    assert "next" not in chat.screen
    chat.go_on()
    chat.expect("word29\n\n› next épas\n  ted")
    assert chat.received == ["count"]
    chat.press("Enter")
    chat.expect_received("count", "next épas\nted")


def test_a_message_is_sent_ahead(start: Start) -> None:
    chat = start()
    chat.type("count\n")
    chat.expect("word9")
    chat.type("ahead\nmore")
    chat.paste("x\n" * 5000)
    chat.go_on()
    chat.expect_received("count", "ahead")
    chat.expect("› more[text 1: 5,001 lines")


def test_what_is_typed_while_a_model_is_loaded_is_sent_to_it(start: Start) -> None:
    chat = start("loading")
    chat.type("early\nearlier")
    time.sleep(0.2)
    assert "early" not in chat.screen
    chat.go_on()
    chat.expect("› early\nanswered\n\n› earlier")
    chat.expect_received("early")
    chat.press("C-c", "C-d")
    chat.is_whole(0)


def test_what_is_entered_before_the_keyboard_is_watched_was_entered() -> None:
    """While Python starts, the terminal makes a new line of Enter, which at the prompt is another key."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, b"one\rtwo\rhal")
        assert select.select([theirs], [], [], 20)[0]
        keys = AnswerKeys(theirs)
        keys.watch()
        os.write(ours, b"f\r")
        typed = keys.take()
        while len(typed) < len("one two half "):  # what is written to one end is at the other a moment later
            assert select.select([theirs], [], [], 20)[0], typed
            typed += keys.take()
        assert typed == b"one\rtwo\rhalf\r"
        keys.release()
        os.write(ours, b"\x04")
        assert select.select([theirs], [], [], 20)[0]
        keys.watch()
        assert keys.take() == b"\x04"
        keys.release()
    finally:
        os.close(ours)
        os.close(theirs)


def test_thinking_is_folded_and_shown(start: Start) -> None:
    chat = start()
    chat.type("think\n")
    chat.expect("thought 9")
    assert re.search(r"\x1b\[2m.*thought 1", chat.styled)
    chat.press("C-t")
    chat.expect(lambda screen: re.search(r"^thinking  \d s  20 words$", screen, re.MULTILINE) is not None)
    chat.go_on()
    screen = chat.expect("word29")
    assert re.search(r"^thought for \d s$", screen, re.MULTILINE)
    assert "last thought" not in screen
    chat.expect("\n›")
    chat.press("C-t")  # the last one, afterwards
    chat.expect("\n\nlast thought\n›")
    chat.press("C-t")
    chat.expect("thinking is folded")
    chat.type("think\n")
    chat.expect(lambda screen: len(re.findall("thought for", screen)) == 2)


def test_thinking_is_folded_and_unfolded_while_it_lasts_and_behind_it(start: Start) -> None:
    chat = start()
    chat.type("think\n")
    chat.expect("thought 9")
    chat.press("C-t")
    chat.expect("words")
    chat.press("C-t")
    chat.expect(lambda screen: "words" not in screen)
    chat.go_on()
    screen = chat.expect("word29\n\n›")
    assert screen.count("thought 3") == 1
    assert "thought 9\nlast thought\n\nword0" in screen
    (chat.log.parent / "go").unlink()
    chat.type("count\n")
    chat.expect(lambda screen: "word9" in screen.partition("› count\n")[2])
    chat.press("C-t")
    chat.go_on()
    screen = chat.expect(lambda screen: "word29\n\n›" in screen.partition("› count\n")[2])
    body = screen.partition("› count\n")[2].split("\n\n›")[0]
    assert body.split() == [f"word{i}" for i in range(30)]  # nothing was written in the middle of it
    chat.type("silent\n")
    chat.expect("› silent\nanswered")  # thinking of nothing is not worth a line


def test_an_editor_gets_the_whole_text(start: Start, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nwc -l < "$1" > lines\nprintf " edited\\nhere" >> "$1"\n')
    editor.chmod(0o755)
    chat = start(VISUAL=str(editor))
    chat.type("text")
    chat.press("C-g")
    chat.expect("› text edited\n  here")
    chat.press("Enter")
    chat.expect_received("text edited\nhere")
    chat.paste("x\n" * 100)
    chat.expect("[text 1: 101 lines")
    chat.press("C-g")
    chat.expect("[text 2: 102 lines")
    assert (tmp_path / "lines").read_text().strip() == "100"
    chat.press("Enter")
    chat.expect_received("text edited\nhere", "x\n" * 100 + " edited\nhere")


def test_a_resize_in_mid_answer_and_at_the_prompt(start: Start) -> None:
    chat = start()
    chat.type("count\n")
    chat.expect("word9")
    chat.resize(30, 20)
    chat.expect(lambda screen: max(map(len, screen.split("\n"))) <= 30)
    time.sleep(0.4)  # tmux tells the program a little later
    chat.go_on()
    screen = chat.expect("\n\n›")
    body = screen.split("› count\n")[-1].split("\n\n›")[0]
    assert body.split() == [f"word{i}" for i in range(30)]
    assert all(len(line) <= 30 for line in screen.split("\n"))
    assert screen.rstrip("\n").split("\n")[-1].startswith(" fake-model  context 83%")
    chat.resize(100, 24)
    chat.expect("696 of 4,096 tokens left")
    chat.type("hello\n")
    chat.expect("› hello\nanswered")
    chat.resize(12, 5)
    chat.expect(" fake-model")
    chat.resize(80, 24)
    chat.expect("696 of 4,096 tokens left")
    chat.press("C-d")
    chat.expect("the end")
    chat.is_whole(0)


def test_an_answer_is_rendered(start: Start) -> None:
    chat = start()
    chat.type("demo\n")
    screen = chat.expect("\n\n›")
    assert "› demo\nTitle\n\nSome bold text, code and 漢字.\n\n• one\n• two\n\n```python\nx = 1\n```\n\n›" in screen
    assert re.search(r"\x1b\[(0;)?1m\S*bold", chat.styled)
    chat.expect("context 83%")
    assert re.search(r"\x1b\[(\d+;)*33m\S*context", chat.styled), chat.styled.encode()


def test_without_colours_and_without_markdown(start: Start) -> None:
    chat = start("plain", NO_COLOR="1")
    chat.type("demo\n")
    chat.expect("# Title\n\nSome **bold** text, `code`")
    assert not re.search(r"\x1b\[(\d+;)*[34]\d", chat.styled.replace("\x1b[39m", "").replace("\x1b[49m", ""))
    chat.press("C-d")
    chat.is_whole(0)


def test_text_cannot_drive_the_terminal(start: Start) -> None:
    chat = start()
    chat.type("evil\n")
    screen = chat.expect("\n\n›")
    assert "abcd\n" in screen
    assert "ef\n" in screen
    assert "\nerror: g?[2Jh i\nhint: j?ck\n" in screen
    assert chat.shows_cursor


@pytest.mark.parametrize(
    ("when", "stop", "code"),
    [
        ("idle", signal.SIGTERM, 143),
        ("count", signal.SIGTERM, 143),
        ("prefill", signal.SIGTERM, 143),
        ("think", signal.SIGTERM, 143),
        ("idle", signal.SIGHUP, 129),
        ("count", signal.SIGHUP, 129),
    ],
)
def test_requests_to_end_leave_the_terminal_whole(start: Start, when: str, stop: signal.Signals, code: int) -> None:
    chat = start()
    if when == "idle":
        chat.type("half a line")
        chat.expect("half a line")
    else:
        chat.type(f"{when}\n")
        chat.expect({"count": "word9", "prefill": "reading the prompt", "think": "thought 9"}[when])
    os.kill(chat.pid(), stop)
    chat.is_whole(code)
    assert "Traceback" not in chat.all


@pytest.mark.parametrize("when", ["idle", "count"])
def test_a_terminal_that_is_closed_ends_the_program(start: Start, when: str) -> None:
    chat = start()
    chat.type("count\n" if when == "count" else "half a line")
    chat.expect("word9" if when == "count" else "half a line")
    pid = chat.pid()
    chat.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_an_exception_leaves_the_terminal_whole(start: Start) -> None:
    chat = start()
    chat.type("crash\n")
    chat.expect("before **the\n\nerror: internal error: RuntimeError: broken")
    chat.is_whole(1)


def test_stopped_and_continued(start: Start) -> None:
    chat = start()
    chat.type("half")
    chat.press("C-z")
    chat.expect("Stopped")
    chat.type("fg\n")
    chat.expect(lambda screen: screen.split("\n")[-2] == "› half")
    chat.press("C-c")
    chat.type("count\n")
    chat.expect("word9")
    chat.press("C-z")
    chat.expect(lambda screen: screen.count("Stopped") == 2)
    chat.type("fg\n")
    chat.expect(lambda screen: screen.count("$ fg") == 2)
    time.sleep(0.2)
    chat.type("ahead")
    chat.go_on()
    chat.expect("word29\n\n› ahead")
    chat.press("C-c", "C-d")
    chat.is_whole(None)


# ---- the toolbar ----


def shown(columns: int, **changes: object) -> str:
    fields = {
        "model": "qwen3:0.6b", "context_used": 1234, "context_size": 4096, "tokens_per_second": 12.34, "memory_bytes": 3 << 29,
        "session": "monday",
    }  # fmt: skip
    return "".join(text for _, text in toolbar(Status(**(fields | changes)), columns))  # type: ignore[arg-type]


def test_the_toolbar_shows_what_fits() -> None:
    assert shown(200) == " qwen3:0.6b  context 30%  ━━━───────  2,862 of 4,096 tokens left  12.3 tok/s  1.5 GiB  monday"
    assert shown(80) == " qwen3:0.6b  context 30%  ━━━───────  2,862 of 4,096 tokens left  12.3 tok/s"
    assert shown(70) == " qwen3:0.6b  context 30%  2,862 of 4,096 tokens left  12.3 tok/s"
    assert shown(40) == " qwen3:0.6b  context 30%  12.3 tok/s"
    assert shown(12) == " qwen3:0.6b"
    assert shown(6) == " qwen3"
    for columns in range(1, 120):
        assert text_width(shown(columns)) <= max(columns, 2)
        assert text_width(shown(columns, model="漢字のモデル")) <= max(columns, 3)


def test_the_toolbar_before_an_answer_and_with_strange_names() -> None:
    assert shown(200, tokens_per_second=None, session=None, context_used=0) == (
        " qwen3:0.6b  context 0%  ──────────  4,096 of 4,096 tokens left  1.5 GiB"
    )
    assert "\x1b" not in shown(200, model="a\x1b[2Jb", session="c\nd")
    assert "0 of 0" in shown(200, context_size=0, context_used=0)
    assert "0 of 100 tokens left" in shown(200, context_used=120, context_size=100)


@pytest.mark.parametrize(("used", "style"), [(3276, ""), (3277, "full"), (4096, "full")])
def test_the_toolbar_warns_from_four_fifths_on(used: int, style: str) -> None:
    status = Status("m", used, 4096, None, 0, None)
    assert {name for name, text in toolbar(status, 200) if "context" in text or "left" in text} == {style}
