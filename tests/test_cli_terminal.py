"""`nanovllm run` on a terminal: what shows, what stays, and what signals leave behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import termios
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

import test_cli_driver
from forked import Forked, Terminal
from test_cli_driver import environment, nanovllm

DRIVER = [sys.executable, test_cli_driver.__file__]
SGR = re.compile(r"\x1b\[[0-9;]*m")

Spawn = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    def start(*args: str, stdout: str | None = None, **extra: str) -> pexpect.spawn[str]:
        command = [*DRIVER, *args]
        if stdout is not None:
            command = ["bash", "-c", f'"$@" > {stdout}', "bash", *command]
        opened = functools.partial(Terminal, light=True) if stdout is None else pexpect.spawn
        return opened(
            command[0], command[1:], cwd=str(tmp_path), env=environment(tmp_path, **extra), timeout=20,
            encoding="utf-8", dimensions=(24, 80),
        )  # fmt: skip

    return start


def finish(child: pexpect.spawn[str]) -> tuple[int, str]:
    """The exit code and everything that is left to read."""
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None
    return child.exitstatus or 0, child.before or ""


def seen(text: str) -> str:
    """What remains on the screen: lines after every erasure of the status line."""
    lines = [line.rsplit("\r\x1b[K", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    return SGR.sub("", "\n".join(lines))


def test_a_sign_of_life_comes_first_and_leaves_no_trace(spawn: Spawn) -> None:
    code, text = finish(spawn("run", "tiny", "say hello"))
    assert code == 0
    assert text.startswith("starting\r\x1b[Kloading tiny")
    lines = seen(text).splitlines()
    assert lines[0] == "tiny: org/fake@abc123 (1.0 MB)"
    assert lines[1] == "hello"
    assert lines[2].startswith("prompt 15 tokens")
    assert "\x1b[2mprompt 15" in text


def test_without_colour_or_cursor(spawn: Spawn) -> None:
    assert not SGR.search(finish(spawn("run", "tiny", "say hello", NO_COLOR="1"))[1])
    dumb = finish(spawn("run", "tiny", "say hello", TERM="dumb"))[1]
    assert "\x1b" not in dumb
    assert dumb.replace("\r\n", "\n").startswith("loading tiny\n")
    assert "\nhello\n" in dumb.replace("\r\n", "\n")
    assert finish(spawn("run", "-q", "tiny", "say hello"))[1] == "hello\r\n"
    assert finish(spawn("run", "tiny", "say hello", NANOVLLM_QUIET="1"))[1] == "starting\r\x1b[Khello\r\n"


def test_an_error_on_a_terminal(spawn: Spawn) -> None:
    code, text = finish(spawn("run", "missing", "hi"))
    assert code == 3
    assert text.endswith(
        "\r\x1b[K\x1b[1;31merror:\x1b[0m no model named missing\r\n\x1b[36mhint:\x1b[0m did you mean tiny?\r\n"
    )


def test_colour_in_a_pipe_only_where_it_is_forced(tmp_path: Path) -> None:
    for extra, colour in (({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)):
        failed = nanovllm(tmp_path, "run", "missing", "hi", **extra)
        assert ("\x1b[1;31m" in failed.err) is colour
        assert "\x1b[K" not in failed.err
        assert nanovllm(tmp_path, "run", "tiny", "say hi", **extra).out == "hi\n"


def test_a_model_cannot_write_to_the_terminal_what_is_no_text(spawn: Spawn, tmp_path: Path) -> None:
    prompt = r"say \x1b[31mred\x1b]0;title\x07 \x9b5mblink\x08\x08 end"
    assert finish(spawn("run", "-q", "tiny", prompt))[1] == "red blink end\r\n"
    finish(spawn("run", "-q", "tiny", prompt, stdout="out.txt"))
    assert (tmp_path / "out.txt").read_text() == "\x1b[31mred\x1b]0;title\x07 \x9b5mblink\x08\x08 end\n"


def test_stdout_and_stderr_are_judged_apart(spawn: Spawn, tmp_path: Path) -> None:
    text = finish(spawn("run", "tiny", "slowly", "-n", "40", stdout="out.txt"))[1]
    assert re.search(r"writing  \d+ tokens", text)
    assert (tmp_path / "out.txt").read_text() == ("slow but steady " * 50)[:40] + "\n"


def test_a_pipe_may_lead_to_the_same_screen(spawn: Spawn) -> None:
    text = finish(spawn("run", "--no-stats", "tiny", "slowly", "-n", "40", stdout="/dev/stdout | cat"))[1]
    assert "writing" not in text
    assert ("slow but steady " * 50)[:40] in seen(text)
    text = finish(spawn("run", "--no-stats", "thinker", "say <think>let me see</think>Yes.", stdout="/dev/stdout | cat"))[1]
    assert text.endswith("\x1b[2mlet me see\x1b[0m\r\nYes.\r\n")


def test_reasoning_is_dimmed_on_stderr(spawn: Spawn, tmp_path: Path) -> None:
    prompt = "say <think>let me see</think>Forty-two."
    text = finish(spawn("run", "--no-stats", "thinker", prompt))[1]
    assert re.search(r"\x1b\[2mlet me see\x1b\[0m\r\nForty-two\.\r\n$", text)
    text = finish(spawn("run", "--no-stats", "thinker", prompt, stdout="out.txt"))[1]
    assert "let me see" in text
    assert (tmp_path / "out.txt").read_text() == "Forty-two.\n"


def test_it_never_asks_back(spawn: Spawn) -> None:
    code, text = finish(spawn("run", "tiny"))
    assert code == 2
    assert "there is no prompt" in text
    assert 'nanovllm run tiny "Once upon a time"' in text


def test_a_dash_reads_the_terminal_until_its_end(spawn: Spawn) -> None:
    child = spawn("run", "--no-stats", "tiny", "-")
    child.expect("Ctrl-D on an empty line ends it")
    child.sendline("say hello")
    child.sendeof()
    assert "hello" in finish(child)[1].split("say hello")[-1]


def test_a_pipe_that_says_nothing_is_named(tmp_path: Path) -> None:
    process = Forked(
        [*DRIVER, "run", "tiny", "say hi"], light=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(tmp_path), text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "waiting for standard input to end" in process.stderr.readline()
    out, _ = process.communicate(timeout=20)
    assert out == "hi\n"


def test_prefill_shows_how_far_it_is_and_can_be_interrupted(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 1500)
    child = spawn("run", "slowreader", "-f", "long.txt")
    child.expect(r"reading the prompt  ━+─+   \d+%  \d+ tokens of 1,506 tokens")
    child.sendintr()
    assert finish(child)[0] == 130


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_answer_stays(spawn: Spawn, tmp_path: Path, stop: signal.Signals, code: int) -> None:
    child = spawn("run", "tiny", "slowly")
    child.expect("slow but steady slow")
    before = termios.tcgetattr(child.child_fd)
    if stop == signal.SIGINT:
        child.sendintr()
    else:
        child.kill(stop)
    exit_code, rest = finish(child)
    assert exit_code == code
    assert "Traceback" not in rest
    assert "error" not in rest
    assert rest.endswith("\r\n")
    assert before[3] & termios.ECHO
    saved = (tmp_path / ".local/state/nanovllm/last-run.json").read_text()
    assert '"content": "slow but steady slow' in saved


def test_an_interrupt_while_loading(spawn: Spawn) -> None:
    child = spawn("run", "tiny", "say hi", FAKE_SLEEP_IN_LOAD="1")
    child.expect("loading weights")
    child.sendintr()
    code, rest = finish(child)
    assert code == 130
    assert rest.replace("^C", "").endswith("\r\x1b[K")


def test_an_interrupted_answer_leaves_no_file(tmp_path: Path) -> None:
    command = [*DRIVER, "run", "tiny", "-o", "out.txt", "slowly"]
    process = Forked(command, light=True, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir() if path.name != ".local"] == []


def test_interrupts_in_a_pipe_leave_whole_lines(tmp_path: Path) -> None:
    for flags in ([], ["--jsonl"], ["--json"]):
        process = Forked(
            [*DRIVER, "run", "-q", "tiny", *flags, "slowly"], light=True, env=environment(tmp_path), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        if flags != ["--json"]:
            os.read(process.stdout.fileno(), 1)
        else:
            time.sleep(0.7)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
        assert process.returncode == 143
        assert out.endswith(b"\n") or flags == ["--json"]
        assert out == b"" or flags != ["--json"]


@pytest.mark.parametrize("module", ["nanovllm_cli.cli.app", "nanovllm_cli.cli.signals", "atexit"])
def test_ctrl_c_while_the_first_modules_are_imported(tmp_path: Path, module: str) -> None:
    """Before the program has a handler: it ends without a word, as what the shell knows for 130."""
    code = (
        "import importlib.abc, os, signal, sys\n"
        "class Strike(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Strike())\n"
        "from nanovllm_cli.__main__ import main\n"
        "sys.exit(main(['--version']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_command_begins_where_ctrl_c_is_quiet() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"nanovllm": "nanovllm_cli.__main__:main"}


def test_a_signal_at_whatever_moment_it_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanovllm_cli", "run", "./no-such-model", "hi"]
    for delay in (0.1, 0.2, 0.5):
        for stop, codes in ((signal.SIGINT, (130, -2)), (signal.SIGTERM, (143, -15))):
            process = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE)
            time.sleep(delay)
            process.send_signal(stop)
            _, err = process.communicate(timeout=20)
            # Python's own first steps, before the program begins, are beyond its reach.
            ours = b"nanovllm_cli/cli" in err
            assert not ours
            if b"Traceback" not in err and b"no such file" not in err:
                assert process.returncode in codes
