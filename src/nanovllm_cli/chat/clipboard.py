"""Text to the clipboard: by the desktop's own program, else by way of the terminal (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Mapping

from nanovllm_cli import system
from nanovllm_cli.errors import OutputError

MAX_OSC_BYTES = 74_994
"""Of base64: what xterm takes, and others after it."""

_TIMEOUT_SECONDS = 5
_MACOS = ["pbcopy"]
"""It takes the text's encoding from the locale."""


def copy(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Copies, and returns what did it. Raises OutputError where nothing could."""
    command = _program(environ)
    if command is None:
        _by_terminal(text, environ)
        return "the terminal (OSC 52)"
    try:
        # Such programs stay behind to serve the text, so what they write is not waited for.
        done = subprocess.run(
            command,
            input=text.encode(),
            env={**environ, "LC_ALL": "en_US.UTF-8"} if command == _MACOS else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise OutputError(f"{command[0]} does not take the text: {failure}") from failure
    if done.returncode != 0:
        raise OutputError(f"{command[0]} does not take the text (exit code {done.returncode})")
    return command[0]


def _program(environ: Mapping[str, str]) -> list[str] | None:
    """The clipboard of the desktop that this process is on."""
    choices: list[tuple[bool, list[str]]] = [
        (system.is_macos(), _MACOS),
        (bool(environ.get("WAYLAND_DISPLAY")), ["wl-copy"]),
        (bool(environ.get("DISPLAY")), ["xclip", "-selection", "clipboard"]),
        (bool(environ.get("DISPLAY")), ["xsel", "--clipboard", "--input"]),
    ]
    path = environ.get("PATH")
    return next((command for is_here, command in choices if is_here and shutil.which(command[0], path=path)), None)


def _by_terminal(text: str, environ: Mapping[str, str]) -> None:
    if environ.get("TERM", "") in ("", "dumb"):
        raise OutputError("there is no clipboard here", "/export md FILE writes the conversation to a file")
    data = base64.b64encode(text.encode())
    if len(data) > MAX_OSC_BYTES:
        raise OutputError("the answer is too long for the terminal's clipboard", "/export md FILE writes it to a file")
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError as failure:
        raise OutputError(
            "there is no clipboard and no terminal here", "/export md FILE writes it to a file"
        ) from failure
    try:
        os.write(terminal, b"\x1b]52;c;" + data + b"\x07")
    finally:
        os.close(terminal)
