"""`nanovllm chat` in a real terminal (tmux): every slash command, drafts, what is left of a conversation."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

import test_cli_driver
from nanovllm_cli.chat.commands import COMMANDS
from test_cli_driver import environment
from tmux import Tmux

FAKE = [sys.executable, test_cli_driver.__file__]
REAL = [sys.executable, "-m", "nanovllm_cli"]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are

Open = Callable[..., Tmux]


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Open]:
    begun: list[Tmux] = []

    def begin(*args: str, command: list[str] = FAKE, **extra: str) -> Tmux:
        environ = environment(tmp_path, **{"TERM": "tmux-256color", "LANG": "C.UTF-8"} | extra)
        begun.append(Tmux(tmp_path, environ))
        begun[-1].type("stty -a > before; clear\n")
        begun[-1].run([*command, "chat", *args])
        begun[-1].expect("\n›")
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def is_whole(screen: Tmux, folder: Path, code: int) -> None:
    screen.expect(f"code={code}\n$")
    screen.type("stty -a > after; clear\n")
    screen.expect(lambda text: text == "$")
    assert (folder / "after").read_text() == (folder / "before").read_text()
    assert screen.shows_cursor
    assert "\x1b" not in screen.styled


def test_every_command(chat: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("say from a file")
    screen = chat("tiny")
    told = {
        "say hi": "\nhi\n",
        "/help": "Leave.",
        "/set temp 0.5": "temp 0.5",
        "/show": "min-tokens",
        "/system be brief": "system",
        "/ctx": "answers",
        "/stats": "tok/s",
        "/history": "say hi",
        "/regen": "\nhi\n",
        "/continue": "hi<a>hi",
        "/undo": "taken back: say hi",
        "/file notes.txt": "notes.txt",
        "/audio nowhere.wav": "no file nowhere.wav",
        "/video nowhere.mp4": "no file nowhere.mp4",
        "/image nowhere.png": "no file nowhere.png",
        "/clear": "a new conversation",
        "say again": "say again<a>]",
        "/save kept": "kept",
        "/load": "kept",
        "/export md out.md": "out.md",
        "/think on": "no switch",
        "/model thinker": "thinker:",
        "/copy": "copied|clipboard",
        "/tools": "there are no tools",
        "/nothing": "error:",
    }
    for command, wanted in told.items():
        screen("clear-history")
        screen.press("C-l")
        screen.expect(lambda text: text.startswith("›"))
        screen.type(f"{command}\n")
        screen.expect(
            lambda text, wanted=wanted: re.search(wanted if "|" in wanted else re.escape(wanted), text) is not None
        )
        screen.expect(lambda text: text.split("\n")[-2:-1] == ["›"])  # the toolbar is below
    tested = {command.split()[0][1:] for command in told} | {"edit", "exit"}
    assert tested >= {command.names[0] for command in COMMANDS}
    assert "again" in (tmp_path / "out.md").read_text()
    screen.type("/bye\n")
    is_whole(screen, tmp_path, 0)


def test_a_message_is_edited_in_the_line(chat: Open, tmp_path: Path) -> None:
    screen = chat("tiny")
    screen.type("say one\n")
    screen.expect("\none\n")
    screen.type("/edit\n")
    screen.expect("› say one")
    screen.press("C-w")
    screen.type("two\n")
    screen.expect("› say two\ntwo\n")
    screen.type("/history\n")
    screen.expect("2 ")
    screen.type("/exit\n")
    is_whole(screen, tmp_path, 0)


def test_a_paste_that_is_too_long_comes_back_as_a_draft(chat: Open, tmp_path: Path) -> None:
    screen = chat("tiny")
    screen.paste("\n".join(f"line {i}" for i in range(10_000)))
    screen.expect("[text 1: 10,000 lines")
    screen.press("Enter")
    screen.expect(lambda text: "error:" in text and len(re.findall("10,000 lines", text)) == 2)
    screen.press("C-c")
    screen.type("say short\n")
    screen.expect("\nshort\n")
    screen.press("C-d")
    is_whole(screen, tmp_path, 0)


def test_what_was_pasted_comes_back_as_the_mark_it_was_and_leaves_the_error_in_sight(chat: Open, tmp_path: Path) -> None:
    screen = chat("tiny")
    screen.type("see: ")
    screen.paste("\n".join(f"line {i} of a text" for i in range(1000)) + "\n")  # less than a draft that is shown whole
    mark = "› see: [text 1: 1,001 lines, 18,890 characters]"
    screen.expect(mark)
    screen.press("Enter")
    screen.expect(lambda text: "error:" in text and text.count(mark) == 2)
    assert "line 999" not in screen.screen
    screen.press("C-c")
    screen.press("C-d")
    is_whole(screen, tmp_path, 0)


def test_arguments_are_completed(chat: Open) -> None:
    screen = chat("tiny")
    screen.type("/thi")
    screen.expect("Whether the model")
    screen.press("Tab")
    screen.expect("› /think")
    screen.type(" o")
    screen.expect(lambda text: re.search(r"^\s+on\b", text, re.MULTILINE) is not None)


def test_a_conversation_with_the_bundled_model(chat: Open, tmp_path: Path) -> None:
    # One thread: with more, the context of 2,048 tokens can be full before Ctrl-C.
    screen = chat("tiny", "--seed", "1", "--threads", "1", command=REAL, XDG_CACHE_HOME=CACHE)
    assert resources.files("nanovllm_cli").joinpath("assets/tiny").is_dir()
    screen.type("Once upon a time\n")
    screen.expect(lambda text: "tok/s" in text.split("\n")[-1])
    assert len(screen.screen.split("\n")) > 6
    screen.type("/set predict 2000\n")
    screen.expect("predict")
    screen.type("/set ignore-eos on\n")
    screen.type("Tell me more\n")
    screen.expect(lambda text: len(text.partition("› Tell me more")[2]) > 400)
    screen.press("C-c")
    screen.expect("(stopped; /continue goes on)\n\n›")
    screen.type("/continue\n")
    time.sleep(0.15)
    screen.resize(50, 20)
    time.sleep(0.15)
    screen.press("C-c")
    screen.expect("(stopped; /continue goes on)\n\n›")
    assert all(len(line) <= 50 for line in screen.screen.split("\n"))
    screen.resize(80, 24)
    screen.expect(lambda text: "tokens left" in text)
    screen.type("/regen\n")
    time.sleep(0.3)
    screen.press("C-c")
    screen.expect("(stopped; /continue goes on)\n\n›")
    screen.type("/undo\n")
    screen.expect("taken back: Tell me more")
    screen.press("C-d")
    is_whole(screen, tmp_path, 0)
