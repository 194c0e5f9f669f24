"""A conversation that is interfered with: Ctrl-C in every phase, requests to end, closed pipes, kill -9. Nothing said is lost."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pexpect
import pytest

import test_cli_driver
from forked import Forked, Terminal
from nanovllm_cli.chat.conversation import Conversation, Message
from nanovllm_cli.chat.session import Sessions
from test_cli_driver import environment, nanovllm

DRIVER = [sys.executable, test_cli_driver.__file__]
REAL = [sys.executable, "-m", "nanovllm_cli"]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are

Spawn = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    """On a terminal that only prints; TERM=xterm gives the line editor."""

    def start(*args: str, command: list[str] = DRIVER, **extra: str) -> pexpect.spawn[str]:
        return Terminal(
            command[0], [*command[1:], "chat", *args], light=command is DRIVER, cwd=str(tmp_path),
            env=environment(tmp_path, **{"TERM": "dumb"} | extra), timeout=30, encoding="utf-8", dimensions=(24, 80),
        )  # fmt: skip

    return start


def finish(child: pexpect.spawn[str]) -> tuple[int, str]:
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None
    assert "Traceback" not in (child.before or "")
    return child.exitstatus or 0, child.before or ""


def say(child: pexpect.spawn[str], text: str) -> None:
    child.expect(">>> ")
    child.sendline(text)


def said(home: Path) -> list[Message]:
    """The conversation of the one session there is."""
    sessions = Sessions(home / ".local/state/nanovllm/sessions")
    [name] = sessions.names()
    session, events = sessions.open(name)
    session.close()
    return Conversation.replay(events).messages


# ---- Ctrl-C ----


def test_an_answer_that_is_stopped_stays_and_is_marked(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("tiny")
    say(child, "slowly")
    child.expect("slow but steady slow")
    child.sendintr()
    child.expect(r"\(stopped; /continue goes on\)")
    say(child, "say on")
    child.expect("\non\r\n")
    say(child, "/exit")
    assert finish(child)[0] == 0
    messages = said(tmp_path)
    assert [message.role for message in messages] == ["user", "assistant"] * 2
    assert messages[1].cut == "interrupted"
    assert messages[1].content.startswith("slow but steady slow")
    assert messages[3].cut is None


def test_a_message_that_is_stopped_while_it_is_read_is_not_sent(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("slowreader")
    say(child, "say first " + "x" * 300)
    child.expect("loading|x" * 300)
    time.sleep(0.5)
    child.sendintr()
    child.expect("the message was not sent")
    say(child, "/history")
    child.expect("nothing has been said yet")
    say(child, "say hi")
    child.expect("\nhi\r\n")
    child.sendeof()
    assert finish(child)[0] == 0
    assert [message.content for message in said(tmp_path)] == ["say hi", "hi"]


def test_what_was_not_sent_is_offered_again(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("say no" + " " * 1200)
    child = spawn("slowreader", "-f", "long.txt", TERM="xterm-256color")
    child.expect("reading the prompt .* tokens of 1,")
    child.sendintr()
    child.expect("the message was not sent")
    child.expect("› ")
    child.expect("say no")
    child.sendcontrol("e")
    child.sendcontrol("u")
    child.send("say yes\r")
    child.expect("\nyes\r\n|myes\x1b|yes\r\n")
    child.expect("› ")
    child.sendeof()
    assert finish(child)[0] == 0
    assert [message.content for message in said(tmp_path)] == ["say yes", "yes"]


def test_idle_it_takes_two_to_leave(spawn: Spawn) -> None:
    child = spawn("tiny")
    child.expect(">>> ")
    child.sendintr()
    child.expect(r"\r\nCtrl-C again, Ctrl-D or /exit leaves")
    say(child, "say still here")
    child.expect("still here\r\n")
    child.expect(">>> ")
    child.sendintr()
    child.expect("Ctrl-C again")
    child.expect(">>> ")
    child.sendintr()
    code, rest = finish(child)
    assert (code, rest[-2:]) == (0, "\r\n"), "the shell's prompt begins a line"


def test_an_old_answer_stays_where_another_one_is_stopped_before_it_begins(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("slowreader")
    say(child, "say once " + "x" * 200)
    child.expect("once x+\r\n")
    say(child, "/regen")
    time.sleep(0.4)
    child.sendintr()
    child.expect("not sent")
    say(child, "/exit")
    finish(child)
    assert [message.role for message in said(tmp_path)] == ["user", "assistant"]


def test_an_interrupt_while_loading(spawn: Spawn) -> None:
    child = spawn("tiny", FAKE_SLEEP_IN_LOAD="1")
    child.expect("loading weights")
    child.sendintr()
    assert finish(child)[0] == 130


def test_an_interrupt_while_another_model_is_loaded_goes_back(spawn: Spawn) -> None:
    child = spawn("tiny", FAKE_LOAD_SECONDS="1")
    say(child, "/model thinker")
    child.expect("loading thinker")
    child.sendintr()
    time.sleep(0.4)
    child.sendintr()  # again, while the first one comes back
    say(child, "/model")
    child.expect("model: tiny")
    child.expect(">>> ")
    child.sendeof()
    assert finish(child)[0] == 0


def test_a_conversation_that_is_left_without_a_model_has_failed(spawn: Spawn) -> None:
    """Neither the next one nor the one before it again can be had."""
    child = spawn("tiny", FAKE_LOADS_ONCE="1")
    say(child, "/model odd")
    code, rest = finish(child)
    assert code == 5
    assert "needs 900 GiB" in rest


def test_a_sign_of_life_comes_before_anything_is_loaded(spawn: Spawn) -> None:
    child = spawn("tiny", TERM="xterm-256color", FAKE_SLEEP_IN_LOAD="1")
    child.expect("starting")
    child.expect("loading tiny")
    child.sendintr()
    assert finish(child)[0] == 130


def test_what_is_typed_while_a_model_is_loaded_is_sent_then(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("tiny", TERM="xterm-256color", FAKE_LOAD_SECONDS="1")
    child.expect("loading tiny")
    time.sleep(0.3)
    child.send("say one\rsay two\r/model thinker\r")
    child.expect("model: thinker")
    child.expect("› ")
    child.sendeof()
    assert finish(child)[0] == 0
    assert [message.content for message in said(tmp_path)] == ["say one", "one", "say two", "two"]


def test_a_signal_waits_for_the_end_of_a_step() -> None:
    code = """
import os, signal
from nanovllm_cli.cli import signals
signals.install()
try:
    with signals.held():
        with signals.held():
            os.kill(os.getpid(), signal.SIGINT)
            signals.check()
        print("still inside")
    print("never")
except KeyboardInterrupt:
    print("at its end")
signals.forgive()
signals.check()
try:
    with signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        print("inside")
except signals.Terminated as stop:
    print(stop.signum)
signals.forgive()
try:
    with signals.held(firmly=False):
        with signals.held():
            os.kill(os.getpid(), signal.SIGINT)
        print("firmly inside")
        os.kill(os.getpid(), signal.SIGINT)
        print("never")
except KeyboardInterrupt:
    print("the second did not wait")
try:
    signals.check()
except signals.Terminated:
    print("a request to end stays one")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(Path("/")), check=True
    )
    assert (
        done.stdout
        == "still inside\nat its end\ninside\n15\nfirmly inside\nthe second did not wait\na request to end stays one\n"
    )


# ---- requests to end ----


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_a_request_to_end_keeps_what_was_said(
    spawn: Spawn, tmp_path: Path, stop: signal.Signals, code: int, term: str
) -> None:
    prompt = ">>> " if term == "dumb" else "› "
    end = "\n" if term == "dumb" else "\r"
    child = spawn("tiny", TERM=term)
    child.expect(prompt)
    child.send("say hi" + end)
    child.expect("hi\r\n")
    child.expect(prompt)
    child.send("slowly" + end)
    child.expect("slow but steady slow")
    child.kill(stop)
    assert finish(child)[0] == code
    messages = said(tmp_path)
    assert [message.cut for message in messages] == [None, None, None, "interrupted"]
    child = spawn("--continue", TERM=term)
    child.expect("4 messages")
    child.expect(prompt)
    child.kill(stop)  # idle
    assert finish(child)[0] == code
    assert said(tmp_path) == messages


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_a_terminal_that_is_closed_loses_nothing(tmp_path: Path, term: str) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execve(DRIVER[0], [*DRIVER, "chat", "tiny"], environment(tmp_path, TERM=term))

    def wait_for(text: str) -> None:
        seen = b""
        while text.encode() not in seen:
            assert select.select([terminal], [], [], 20)[0], seen
            seen += os.read(terminal, 1 << 16)

    wait_for(">>> " if term == "dumb" else "› ")
    time.sleep(0.2)
    os.write(terminal, b"slowly\r")
    wait_for("slow but steady slow")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert [message.cut for message in said(tmp_path)] == [None, "interrupted"]


def pipe(home: Path, *args: str, command: list[str] = DRIVER, **extra: str) -> subprocess.Popen[str]:
    return Forked(
        [*command, "chat", *args], light=command is DRIVER, cwd=home, env=environment(home, **extra), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def send(process: subprocess.Popen[str], *lines: str) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(line + "\n" for line in lines))
    process.stdin.flush()


def heard(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    got = ""
    while text not in got:
        new = os.read(process.stdout.fileno(), 1 << 16).decode()
        assert new, f"it ended with {got!r}"
        got += new


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_script_is_ended_by_signals_with_whole_lines(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    process = pipe(tmp_path, "-q", "tiny")
    send(process, "say hi", "slowly", "say never")
    heard(process, "slow but steady slow")
    process.send_signal(stop)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, "")
    assert out.endswith("\n")
    assert [message.cut for message in said(tmp_path)] == [None, None, None, "interrupted"]


def test_a_reader_that_has_gone_is_no_failure(tmp_path: Path) -> None:
    process = pipe(tmp_path, "-q", "tiny")
    send(process, "say hi")
    heard(process, "hi\n")
    assert process.stdout is not None
    process.stdout.close()
    send(process, "slowly", "say never")
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=20) == 0
    assert [message.content for message in said(tmp_path)][:3] == ["say hi", "hi", "slowly"]


# ---- kill -9 ----


def test_what_is_killed_goes_on_from_the_last_finished_turn(tmp_path: Path) -> None:
    process = pipe(tmp_path, "-q", "tiny")
    send(process, "say hi", "slowly")
    heard(process, "slow but")
    process.kill()
    process.communicate()
    again = nanovllm(tmp_path, "chat", "-q", "--continue", stdin="/history\nsay bye\n")
    assert again.out == "  1 you    say hi\n  2 model  hi\nbye\n"
    told = nanovllm(tmp_path, "chat", "--continue", stdin="/history\n")
    assert told.err.count("has had no answer") == 0  # it was dropped for good
    assert [message.content for message in said(tmp_path)] == ["say hi", "hi", "say bye", "bye"]


def test_the_message_of_the_turn_that_was_killed_is_offered_again(spawn: Spawn, tmp_path: Path) -> None:
    process = pipe(tmp_path, "-q", "tiny")
    send(process, "say hi", "slowly")
    heard(process, "slow but")
    process.kill()
    process.communicate()
    child = spawn("--continue", TERM="xterm-256color")
    child.expect("the last message has had no answer: here it is again")
    child.expect("slowly")
    child.sendcontrol("u")
    child.sendeof()
    assert finish(child)[0] == 0


def test_it_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    lines = [f"say answer {number}" for number in range(40)]
    whole = [text for number in range(40) for text in (f"say answer {number}", f"answer {number}")]
    moments = random.Random(5)
    for attempt in range(6):
        home = tmp_path / str(attempt)
        home.mkdir()
        process = pipe(home, "-q", "tiny")
        send(process, lines[0])
        heard(process, "answer 0\n")
        send(process, *lines[1:])
        time.sleep(moments.random() * 0.1)
        process.kill()
        out = "answer 0\n" + process.communicate()[0]
        kept = [message.content for message in said(home)]
        assert kept == whole[: len(kept)]
        finished = out.count("\n")  # an answer's newline comes after it is kept
        assert len(kept) >= 2 * finished
        assert nanovllm(home, "chat", "-q", "--continue", stdin="say on\n").out == "on\n"


def test_two_processes_on_one_session(tmp_path: Path) -> None:
    process = pipe(tmp_path, "-q", "--session", "mine", "tiny")
    send(process, "say hi")
    heard(process, "hi\n")
    for flags in (["--session", "mine"], ["--continue"]):
        second = nanovllm(tmp_path, "chat", "-q", "tiny", *flags, stdin="say no\n")
        assert (second.code, second.out) == (1, "")
        assert second.err.startswith("error: the session mine is open in another terminal\nhint: ")
    other = nanovllm(tmp_path, "chat", "-q", "tiny", stdin="say yes\n/load mine\nsay still\n")
    assert (other.code, other.out) == (1, "yes\nstill\n")
    process.communicate()
    assert nanovllm(tmp_path, "chat", "-q", "--session", "mine", stdin="say on\n").out == "on\n"


# ---- with the bundled model ----


def test_a_scripted_conversation_with_the_bundled_model(tmp_path: Path) -> None:
    """Killed, gone on with, and kept with its KV: what the model had read is not read again."""
    extra = {"XDG_CACHE_HOME": CACHE}
    process = pipe(tmp_path, "tiny", "-q", "-s", "1", "--save-kv", "--session", "cat", command=REAL, **extra)
    out, err = process.communicate("Tell me a story about a cat.\nWhat was its name?\n/stats\n", timeout=280)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "cached) " in out or "cached), " in out
    first = said(tmp_path)
    assert len(first) == 4

    process = pipe(tmp_path, "-q", "--continue", "-s", "2", command=REAL, **extra)
    send(process, "Tell me another story.", "/set ignore-eos on", "Tell me a very long story.")
    heard(process, "ignore-eos = on\n")
    time.sleep(0.3)
    process.kill()
    process.communicate()

    process = pipe(tmp_path, "-q", "--continue", "-s", "3", command=REAL, **extra)
    out, err = process.communicate("/history\nAnd then?\n/stats\n", timeout=120)
    assert process.returncode == 0
    messages = said(tmp_path)
    assert messages[:4] == first
    assert messages[4].content == "Tell me another story."
    assert [message.content for message in messages[-2:-1]] == ["And then?"]
    cached = int(out.rsplit(" cached)", 1)[0].rsplit("(", 1)[1])
    events = [json.loads(line) for line in (tmp_path / ".local/state/nanovllm/sessions/cat.jsonl").open()]
    [kept] = [event["ids"] for event in events if event["event"] == "kv"]
    assert len(kept) - 32 < cached <= len(kept)  # whole blocks, and what this turn's template wrote another way


def test_ctrl_c_in_prefill_and_in_an_answer_leaves_the_engine_sound(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "longer"
    with resources.as_file(resources.files("nanovllm_cli") / "assets" / "tiny") as tiny:
        shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    (tmp_path / "long.txt").write_text("The cat saw a bird and the bird saw the cat. " * 2000)
    child = spawn(
        "./longer", "-f", "long.txt", "--temp", "0", command=REAL, TERM="xterm-256color", XDG_CACHE_HOME=CACHE
    )
    child.expect("reading the prompt", timeout=280)
    child.sendintr()
    child.expect("the message was not sent")
    child.expect("› ")
    child.sendintr()  # takes the offered text away
    child.send("Tell me a story.\r")
    child.expect("Once|One|There|A ")
    child.sendintr()
    child.expect(r"stopped; /continue|tokens left")
    child.send("/regen\r")
    child.expect("tok/s")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    fresh = pipe(tmp_path, "-q", "./longer", "--temp", "0", "--no-save", command=REAL, XDG_CACHE_HOME=CACHE)
    out, _ = fresh.communicate("Tell me a story.\n", timeout=120)
    assert said(tmp_path)[-1].content == out.removesuffix("\n")
