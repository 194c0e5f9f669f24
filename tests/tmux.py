"""A terminal for tests: tmux without its configuration, one server a test, and what is on its screen."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

SECONDS = 20.0


class Tmux:
    """A shell in a window of `width` by `height`; tests type into it and look at it."""

    def __init__(self, folder: Path, environ: Mapping[str, str], width: int = 80, height: int = 24) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed")
        self._socket = str(folder / "tmux")
        self._folder = folder
        shell = "env -i " + " ".join(shlex.quote(f"{key}={value}") for key, value in environ.items()) + " bash --norc"
        self("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "-c", str(folder), shell)
        self("set-option", "-g", "history-limit", "20000")
        self.type("PS1='$ '\n")
        self.expect("$ ")

    def __call__(self, *args: str) -> str:
        return subprocess.run(
            ["tmux", "-S", self._socket, *args], check=True, capture_output=True, text=True, timeout=SECONDS
        ).stdout

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True)

    def type(self, text: str) -> None:
        """Characters; a newline is the key Enter."""
        for number, part in enumerate(text.split("\n")):
            if number:
                self("send-keys", "Enter")
            if part:
                self("send-keys", "-l", part)

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: C-c, M-Enter, Up."""
        self("send-keys", *keys)

    def paste(self, text: str) -> None:
        path = self._folder / "paste.txt"
        path.write_text(text)
        self("load-buffer", str(path))
        self("paste-buffer", "-p")

    def resize(self, width: int, height: int) -> None:
        self("resize-window", "-x", str(width), "-y", str(height))

    def run(self, command: Sequence[str]) -> None:
        self.type(" ".join(map(shlex.quote, command)) + "; echo code=$?\n")

    @property
    def screen(self) -> str:
        """What is seen, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self("capture-pane", "-p").split("\n")).rstrip("\n")

    @property
    def styled(self) -> str:
        """What is seen, with its styles."""
        return self("capture-pane", "-p", "-e")

    @property
    def all(self) -> str:
        """Everything since the beginning, without the terminal's wrapping."""
        return self("capture-pane", "-p", "-J", "-S", "-").rstrip("\n")

    @property
    def shows_cursor(self) -> bool:
        return self("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def expect(self, wanted: str | Callable[[str], bool], seconds: float = SECONDS) -> str:
        """Waits until the screen has it, and returns the screen."""
        end = time.monotonic() + seconds
        while True:
            screen = self.screen
            if wanted in screen if isinstance(wanted, str) else wanted(screen):
                return screen
            assert time.monotonic() < end, f"{wanted!r} does not come:\n{screen}"
            time.sleep(0.03)
