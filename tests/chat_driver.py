"""A conversation on a real terminal with a scripted model: LineEditor and TerminalDisplay, and what `nanovllm` does around them.

    python chat_driver.py LOG [plain] [fold] [loading]

Each message that arrives becomes a JSON line in LOG, and its first word says what the model does. A file `go` beside LOG lets it
go on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nanovllm_cli.cli import app, signals
from nanovllm_cli.cli.output import console

COMMANDS = {"/help": "what can be done", "/history": "what was said", "/exit": "leaves"}
DEMO = "# Title\n\nSome **bold** text, `code` and 漢字.\n\n- one\n- two\n\n```python\nx = 1\n```\n"


def converse(log: Path, flags: list[str]) -> None:
    from nanovllm_cli.chat.keys import AnswerKeys
    from nanovllm_cli.chat.line_editor import LineEditor
    from nanovllm_cli.chat.surface import Status
    from nanovllm_cli.chat.terminal import TerminalDisplay

    keys = AnswerKeys(0)
    display = TerminalDisplay(console(), markdown="plain" not in flags, folds_thinking="fold" in flags, keys=keys)
    while "loading" in flags and not (log.parent / "go").exists():
        console().status("loading")
        time.sleep(0.02)
    status = Status("fake-model", 3400, 4096, 12.5, 3 << 30, "a-session")
    editor = LineEditor(
        lambda text: [each for each in COMMANDS.items() if each[0].startswith(text)], lambda: status,
        display.toggle_thinking, keys=keys, history_file=log.parent / "state" / "history", color=console().out.color,
    )  # fmt: skip
    draft = ""
    try:
        while True:
            try:
                text = editor.read(draft)
            except KeyboardInterrupt:
                signals.forgive()
                display.warn("interrupted while idle")
                continue
            except EOFError:
                display.say("the end")
                return
            with log.open("a") as file:
                file.write(json.dumps(text) + "\n")
            draft = "a draft" if text == "edit" else ""
            display.begin()
            remark = None
            try:
                answer(display, (text.split() or [""])[0], log.parent / "go")
            except KeyboardInterrupt:
                signals.forgive()
                remark = "stopped"
            finally:
                display.end(remark)
    finally:
        editor.close()


def answer(display: object, kind: str, go: Path) -> None:
    """Stops half-way until there is a file `go`, so that tests need not be quick."""
    from nanovllm_cli.chat.terminal import TerminalDisplay

    def wait(show: Callable[[], None]) -> None:
        while not go.exists():
            show()
            time.sleep(0.02)

    assert isinstance(display, TerminalDisplay)
    if kind == "prefill":
        display.progress(1000, 4000)
        wait(lambda: display.progress(2000, 4000))
        display.progress(4000, 4000)
    if kind == "think":
        for i in range(10):
            display.reasoning(f"thought {i} ")
        wait(lambda: display.reasoning(""))
        display.reasoning("\n\nlast thought\n")
        display.reasoning("\n")
    if kind == "silent":
        display.reasoning("\n")
        display.reasoning("\n")
    if kind in ("count", "think"):
        for i in range(30):
            display.content(f"word{i} ")
            if i == 9:
                wait(lambda: display.content(""))
    elif kind == "demo":
        for character in DEMO:
            display.content(character)
    elif kind == "crash":
        display.content("before **the")
        raise RuntimeError("broken")
    elif kind == "evil":
        display.content("a\x1b[31mb\x1b]0;title\x07c\x1b[?25l\x1b[2Jd")
        display.say("e\x1b[?1049hf")
        display.fail("g\x1b[2Jh\ni", "j\x1bck")
    else:
        display.content("answered")


def main() -> None:
    """As app.main, with the conversation in place of the command line."""
    app._invoke = lambda words: converse(Path(sys.argv[1]), sys.argv[2:]) or 0  # type: ignore[assignment, func-returns-value]
    app.main(["chat"])


if __name__ == "__main__":
    main()
