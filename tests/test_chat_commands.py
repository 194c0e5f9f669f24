"""`nanovllm chat` from a pipe: a scripted conversation, every slash command, sessions by their flags."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm_cli.chat import commands
from nanovllm_cli.chat.commands import COMMANDS, complete
from nanovllm_cli.chat.conversation import Call, Conversation
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.loop import Chat
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.session import Sessions
from nanovllm_cli.errors import UsageError
from test_cli_driver import Result, nanovllm


def chat(home: Path, *lines: str, args: tuple[str, ...] = ("-q", "tiny"), **extra: str) -> Result:
    done = nanovllm(home, "chat", *args, stdin="".join(line + "\n" for line in lines), **extra)
    assert "\x1b" not in done.out + done.err
    return done


def sessions(home: Path) -> Path:
    return home / ".local/state/nanovllm/sessions"


def texts(path: Path) -> list[str]:
    """What was said in a session's file, in order of writing."""
    events = map(json.loads, path.read_text().splitlines())
    return [event["content"] for event in events if event["event"] == "message"]


def test_an_adapter_is_of_the_model_that_it_was_named_with(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    lines = ("config", "/model thinker", "config", "/model tiny", "config")
    said = chat(tmp_path, *lines, args=("-q", "--no-save", "--lora-scaled", "adapter:2", "tiny")).out.splitlines()
    assert ["lora=()" in line for line in said if "lora=" in line] == [False, True, False]


def test_each_line_is_a_message_and_only_answers_come_out(tmp_path: Path) -> None:
    done = chat(tmp_path, "say hi", "", "say bye\\n", "say one\\ntwo")
    assert (done.code, done.out, done.err) == (0, "hi\nbye\none\ntwo\n", "")
    loud = chat(tmp_path, "say hi", args=("tiny",))
    assert (loud.code, loud.out) == (0, "hi\n")
    assert loud.err == "tiny: org/fake@abc123 (1.0 MB)\n"


def test_the_history_goes_with_each_message(tmp_path: Path) -> None:
    assert chat(tmp_path, "say hi", "x", args=("-q", "-sys", "be", "tiny")).out == "hi\n[<s>be<u>say hi<a>hi<u>x<a>]\n"


def test_a_first_message_on_the_command_line_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file\n")
    assert (
        chat(tmp_path, args=("-q", "tiny", "-f", "a.txt", "and", "words")).out == "[<u>from a file\n\nand words<a>]\n"
    )
    (tmp_path / "a.c").write_text("// C\n")
    assert chat(tmp_path, args=("-q", "tiny", "-f", "a.c")).out == "[<u>// C<a>]\n"
    assert chat(tmp_path, "say 2", args=("-q", "-m", "tiny", "say", "1")).out == "1\n2\n"
    assert chat(tmp_path, "say 2", args=("-q", "-m", "tiny", "-p", "say 1")).out == "1\n2\n"


def test_several_lines_and_leading_slashes(tmp_path: Path) -> None:
    lines = (
        '"""a', "  b", 'c"""', "/clear", "//etc", "/clear", '"""one line"""', "/clear", '"""', "two", '"""',
        "/clear", '"""three""" and four', "/clear", '"""', 'def f(): """five"""', '"""',
    )  # fmt: skip
    assert chat(tmp_path, *lines).out.replace("a new conversation; the system prompt stays\n", "") == (
        "[<u>a\n  b\nc<a>]\n[<u>/etc<a>]\n[<u>one line<a>]\n[<u>two<a>]\n"
        '[<u>"""three""" and four<a>]\n[<u>"""\ndef f(): """five"""\n"""<a>]\n'
    )


def test_a_message_that_fails_is_told_and_the_next_one_follows(tmp_path: Path) -> None:
    done = chat(tmp_path, "fail", "say on", "/nothing", "say still")
    assert done.out == "half an answ\non\nstill\n"
    assert done.err.splitlines()[0] == "error: the answer failed: NaN logits"
    assert done.code == 1  # of the first failure
    assert chat(tmp_path, "/nothing", "fail").code == 2
    broken = nanovllm(tmp_path, "chat", "-q", "tiny", stdin=b"say hi\n\xff\nsay bye\n")
    assert (broken.code, broken.out) == (2, "hi\nbye\n")
    assert "not UTF-8" in broken.err
    lost = chat(tmp_path, "say hi", '"""never', "ended")
    assert (lost.code, lost.out) == (2, "hi\n")
    assert 'error: the message that began with """ has no end' in lost.err


def test_what_a_model_writes_cannot_drive_a_terminal(tmp_path: Path) -> None:
    evil = r"say \x1b[31mred\x1b]0;title\x07 \x9b5mblink\x08\x08 end"
    done = chat(tmp_path, evil, "/history", "/show system", "/system \x1b[2Jclear")
    assert "\x1b" not in done.out
    assert done.out.splitlines()[0] == "red blink end"


def test_reasoning_is_dropped_in_a_pipe_unless_asked_for(tmp_path: Path) -> None:
    line = "say <think>let me see</think>Forty-two."
    assert chat(tmp_path, line, args=("-q", "thinker")).out == "Forty-two.\n"
    shown = chat(tmp_path, line, args=("-q", "--reasoning", "show", "thinker"))
    assert (shown.out, shown.err) == ("Forty-two.\n", "let me see\n")
    saved = json.loads(sorted(sessions(tmp_path).glob("*.jsonl"))[0].read_text().splitlines()[-1])
    assert (saved["content"], saved["reasoning"]) == ("Forty-two.", "let me see")


# ---- slash commands ----


def test_help_names_every_command(tmp_path: Path) -> None:
    out = chat(tmp_path, "/help").out
    for command in COMMANDS:
        assert re.search(rf"^/{command.names[0]}\b.*  {re.escape(command.help)}$", out, re.MULTILINE)
    assert chat(tmp_path, "/help regen").out == "/regen   Another answer to the last message.\n".replace("   ", "  ")
    assert {"help", "set", "show", "system", "load", "save", "export", "history", "clear", "regen", "edit", "undo",
            "continue", "file", "think", "model", "stats", "ctx", "copy", "exit"} <= {c.names[0] for c in COMMANDS}  # fmt: skip


def test_an_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    done = chat(tmp_path, "/regn", "/zzz", "/clear up", "/ls", "/show parameters", "/set nohistory")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: there is no command /regn",
        "hint: did you mean /regen? (//… sends a message that begins with /)",
        "error: there is no command /zzz",
        "hint: /help lists them (//… sends a message that begins with /)",
        "error: /clear takes nothing behind it",
        "error: there is no command /ls",
        "hint: here it is /model NAME; nanovllm models list shows what is here (//… sends a message that begins with /)",
        "error: /show parameters?",
        "hint: here it is /show settings",
        "error: there is no setting 'nohistory'",
        "hint: here it is nanovllm chat --no-save",
    ]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("/?", "/help"), ("/retry", "/regen"), ("/reset", "/clear"), ("/read x", "/file"), ("/set temperature 1", "/set temp"),
     ("/set max_tokens 5", "/set predict"), ("/set parameter temp 1", "/set NAME VALUE"), ("/set nothink", "/think off"),
     ("/set system x", "/system TEXT"), ("/set format json", "/set json-object on")],
)  # fmt: skip
def test_what_other_programs_chats_call_otherwise_is_told(tmp_path: Path, typed: str, meant: str) -> None:
    done = chat(tmp_path, typed)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[1].startswith(f"hint: here it is {meant}")
    assert meant.split()[0][1:] in {name for command in COMMANDS for name in command.names}


def test_the_form_of_answers_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "any.json").write_text('{"type": "object"}\n')

    def rows(*lines: str) -> dict[str, str]:
        shown = chat(tmp_path, *lines, "/set").out.splitlines()[len(lines) :]
        return {row.split()[0]: " ".join(row.split()[1:]) for row in shown}

    nothing = {"json-schema": "none", "json-object": "off", "regex": "none", "choice": "none", "grammar": "none"}
    assert nothing.items() <= rows().items()
    assert (nothing | {"regex": "[0-9]+ (set)"}).items() <= rows("/set regex [0-9]+").items()
    assert (nothing | {"json-object": "on (set)"}).items() <= rows("/set regex a", "/set json-object on").items()
    assert (nothing | {"choice": '["a", "b c"] (set)'}).items() <= rows("/set choice a 'b c'").items()
    assert (nothing | {"grammar": 'start: "a" (set)'}).items() <= rows('/set grammar start: "a"').items()
    of_file = rows(f"/set json-schema-file {tmp_path / 'any.json'}")
    assert (nothing | {"json-schema": '{"type": "object"} (set)'}).items() <= of_file.items()
    assert not [name for name in of_file if name.endswith("-file")]
    assert nothing.items() <= rows("/set regex a", "/set regex default").items()


def test_settings_by_their_flags(tmp_path: Path) -> None:
    done = chat(
        tmp_path, "/set temp 0.3", "/set --top-k 5", "/set n 3", "/set stop 'a b' END \\n", "/set logit-bias 5+1 6-2.5",
        "/set ignore-eos on", "/set seed 4", "params", "/set stop default", "/set stop", "/set temp", "/set temp default",
    )  # fmt: skip
    assert done.code == 0
    assert done.out.splitlines()[:3] == ["temp = 0.3", "top-k = 5", "predict = 3"]
    assert "stop = 'a b' END '\\n'" in done.out
    assert "logit-bias = 5+1 6-2.5" in done.out
    assert "Sam" in done.out  # three tokens of the parameters' repr
    assert done.out.splitlines()[-3:] == ["stop = none", "temp = 0.3", "temp = 1"]


@pytest.mark.parametrize("typed", ["'Bob: é' 用户:", r"\n\t END", r"'a\\b'", """ 'it'"'"'s' """.strip(), "😀"])
def test_a_list_of_texts_is_shown_as_it_can_be_typed_again(tmp_path: Path, typed: str) -> None:
    for name in ("stop", "dry-sequence-breaker"):
        shown = chat(tmp_path, f"/set {name} {typed}").out.removeprefix(f"{name} = ").splitlines()[0]
        again, params = chat(tmp_path, f"/set {name} {shown}", "params").out, chat(tmp_path, f"/set {name} {typed}", "params").out
        assert again.splitlines()[0] == f"{name} = {shown}"
        assert again.splitlines()[-1] == params.splitlines()[-1]
        assert not re.search(r"\\[xuU]", shown)


def test_settings_reach_the_model(tmp_path: Path) -> None:
    out = chat(tmp_path, "/set temp 0.25", "/set repeat-penalty 1.5", "params").out
    assert "temperature=0.25" in out
    assert "repetition_penalty=1.5" in out


def test_a_setting_that_changes_nothing_beside_the_others_says_so(tmp_path: Path) -> None:
    told = chat(
        tmp_path, "/set temp 0", "/set top-k 40", "/set xtc-threshold 0.2", "/set temp 0.7", "/set top-k 40", "/set seed default"
    )
    assert told.out.splitlines() == [
        "temp = 0", "top-k = 40", "top-k changes nothing: at temp 0 the likeliest token is taken",
        "xtc-threshold = 0.2", "xtc-threshold changes nothing: xtc-probability is 0", "temp = 0.7", "top-k = 40", "seed = none",
    ]  # fmt: skip


MISTAKES = [
    ("/set temp 101", "--temp must be a number from 0 to 100"),
    ("/set temp warm", "temp: 'warm' is not a number"),
    ("/set top-k 1.5", "top-k: '1.5' is not a whole number"),
    ("/set tmp 1", "there is no setting 'tmp'"),
    ("/set ignore-eos maybe", "ignore-eos is on or off"),
    ("/set logit-bias x", "logit-bias"),
    ("/set stop 'open", "stop: No closing quotation"),
    ("/set num-answers 3", "there is no setting"),
    ('/set regex ""', "regex is empty"),
    ("/set json-schema ''", "json-schema is empty"),
    ("/set min-tokens 5000000000", "--min-tokens"),
    ("/think maybe", "/think is on or off"),
    ("/think on", "no switch for thinking"),
    ("/show me", "/show me?"),
    ("/regen", "nothing has been said yet"),
    ("/undo", "nothing has been said yet"),
    ("/edit x", "nothing has been said yet"),
    ("/continue", "no answer to go on with"),
    ("/copy", "no answer to copy"),
    ("/export", "md or json"),
    ("/export pdf x", "md or json"),
    ("/file", "which file?"),
    ("/file nowhere.txt", "there is no file nowhere.txt"),
    ("/file .", "is a folder"),
    ("/file ~no-such-user/x", "there is no file ~no-such-user/x"),
    ("/export md ~no-such-user/x", "cannot write ~no-such-user/x"),
    ("/export md " + 300 * "a", "File name too long"),
    ("/file " + 300 * "a", "File name too long"),
    ("/image", "which image?"),
    ("/image nowhere.png", "there is no file nowhere.png"),
    ("/load nowhere", "there is no session nowhere"),
    ("/load ../../etc", "cannot be the name of a session"),
    ("/save a/b", "cannot be the name of a session"),
    ("/model missing", "no model named missing"),
    ("/model base", "base has no chat template"),
]


def test_mistakes_are_named_and_change_nothing(tmp_path: Path) -> None:
    done = chat(tmp_path, *(line for line, _ in MISTAKES), "say on")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(MISTAKES)
    for (line, told), error in zip(MISTAKES, errors, strict=True):
        assert told in error, line
    assert done.out == "on\n"
    assert done.code == 2


def test_branches(tmp_path: Path) -> None:
    done = chat(tmp_path, "say 1", "say 2", "/undo", "say 3", "/edit say 4", "/regen", "/history", "x")
    assert done.out.splitlines() == [
        "1", "2", "taken back: say 2", "3", "4", "4",
        "  1 you    say 1",
        "  2 model  1",
        "  3 you    say 4  (one of 3)",
        "  4 model  4  (one of 2)",
        "[<u>say 1<a>1<u>say 4<a>4<u>x<a>]",
    ]  # fmt: skip
    [path] = sessions(tmp_path).glob("*.jsonl")
    assert texts(path)[:-2] == ["say 1", "1", "say 2", "2", "say 3", "3", "say 4", "4", "4"]


def test_an_edit_that_failed_is_over_in_a_pipe(tmp_path: Path) -> None:
    """The next line is a message of its own, and takes nothing back."""
    done = chat(tmp_path, "say 1", "/edit " + 3000 * "x", "say 2", "x")
    assert done.out.splitlines()[-1] == "[<u>say 1<a>1<u>say 2<a>2<u>x<a>]"


def test_going_on_with_an_answer(tmp_path: Path) -> None:
    done = chat(
        tmp_path, "/set predict 4", "say abcdefgh", "/set predict default", "/continue", "/history", args=("tiny",)
    )
    assert done.out.splitlines()[1] == "abcd"
    assert "(cut off at 4 tokens; /continue goes on" in done.err
    history = done.out.splitlines()[-1]
    assert history == "  2 model  abcdabcdefgh<a>abcd  (one of 2)"


def test_system_clear_and_context(tmp_path: Path) -> None:
    done = chat(tmp_path, "/system be brief", "x", "/clear", "y", '/system ""', "z", "/ctx", "/stats")
    lines = done.out.splitlines()
    assert lines[:2] == ["system: be brief", "[<s>be brief<u>x<a>]"]
    assert lines[3] == "[<s>be brief<u>y<a>]"
    assert lines[4] == "system: none"
    assert lines[5] == "[<u>y<a>[<s>be brief<u>y<a>]<u>z<a>]"
    used = len("<u>y<a>[<s>be brief<u>y<a>]<u>z<a>") + len(lines[5])
    assert lines[6] == f"{used} of 2,000 tokens used ({used / 2000:.0%}), {2000 - used:,} left"
    parts = {line[:28].strip(): int(line[28:]) for line in lines[7:11]}
    assert parts == {"system": 0, "you": 2, "answers": len(lines[3]) + len(lines[5]), "template and reasoning": 12}
    assert re.match(r"prompt 34 tokens.*\| answer ", lines[11])
    assert lines[12].startswith("3 answers of ")


def test_files_go_with_the_next_message(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('```')\n")
    (tmp_path / "big").write_text("x" * 3000)
    (tmp_path / "huge").write_bytes(b"x" * (5 << 20))
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    done = chat(tmp_path, "/file a.py", "/file big", "/file huge", "/file binary", "/file latin", "what is it?", "next")
    assert done.out.startswith(
        "a.py (13 tokens) goes with the next message\n[<u>a.py:\n````\nprint('```')\n````\n\nwhat is it?<a>]\n"
    )
    assert done.out.endswith("<u>next<a>]\n")
    told = [line for line in done.err.splitlines() if line.startswith("error")]
    assert told == [
        "error: big has 3000 tokens, the context holds 2000",
        "error: huge has 5 MiB; at most 4 are taken",
        "error: binary is no text",
        "error: latin is not UTF-8: byte 0xe9 at offset 3",
    ]


def test_files_with_spaces_in_their_names(tmp_path: Path) -> None:
    (tmp_path / "my file.txt").write_text("x")
    done = chat(tmp_path, "/file my file.txt", "/file 'my file.txt'", "/file my\\ file.txt", args=("-q", "tiny"))
    assert (done.code, done.out) == (0, "my file.txt (1 token) goes with the next message\n" * 3)


def test_what_could_stand_in_place_of_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("note.txt", "notes/deep.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    nanovllm(tmp_path, "chat", "-q", "--session", "work", "tiny", stdin="say hi\n")
    model = LocalModel(None, Settings())  # type: ignore[arg-type]
    talk = Chat(model, Sessions(tmp_path / ".local/state/nanovllm/sessions"), None, interactive=True)  # type: ignore[arg-type]

    def words(text: str) -> list[str]:
        return [word for word, _ in complete(talk, text)]

    assert words("/e") == ["/export", "/edit", "/exit"]
    assert words("/b") == ["/exit"]
    assert len(words("/")) == len(COMMANDS)
    assert words("hello /e") == words("//e") == words("") == words("/nothing x") == words("/set temp 0") == []
    assert words("/set te") == ["temp"]
    assert words("/think o") == ["on", "off"]
    assert words("/export ") == ["md", "json"]
    assert words("/load w") == ["work"]
    assert "tiny" in words("/model t")
    assert words("/file no") == ["note.txt", "notes/"]
    assert words("/file notes/") == ["notes/deep.txt"]
    assert words("/file .h") == [".hidden"]
    assert words("/file nowhere/") == []
    assert words("/file ~no-such-user/") == []


def test_exports_are_written_once(tmp_path: Path) -> None:
    done = chat(tmp_path, "say hi", "/export md out.md", "/export json out.json", "/export md out.md")
    assert done.code == 2
    assert "out.md exists" in done.err
    assert "## You\n\nsay hi\n\n## tiny\n\nhi\n" in (tmp_path / "out.md").read_text()
    assert json.loads((tmp_path / "out.json").read_text())["messages"] == [
        {"role": "user", "content": "say hi"}, {"role": "assistant", "content": "hi"},
    ]  # fmt: skip


def test_another_model_keeps_the_conversation(tmp_path: Path) -> None:
    done = chat(tmp_path, "say hi", "/model thinker", "/think on", "x", "/model missing", "y", "/model")
    assert done.out.splitlines() == [
        "hi", "model: thinker", "think: on",
        "[<{'enable_thinking': True}><u>say hi<a>hi<u>x<a>]",
        "[<{'enable_thinking': True}><u>say hi<a>hi<u>x<a>[<{'enable_thinking': True}><u>say hi<a>hi<u>x<a>]<u>y<a>]",
        "model: thinker",
    ]  # fmt: skip
    assert done.code == 3
    loud = chat(tmp_path, "/model missing", "say hi", "/model huge", args=("tiny",))
    assert loud.err.splitlines() == [
        "tiny: org/fake@abc123 (1.0 MB)", "error: no model named missing", "hint: did you mean tiny?",
        "tiny: org/fake@abc123 (1.0 MB)", "error: needs 900 GiB, 8 GiB free", "hint: try --ctx-size",
    ]  # fmt: skip
    # a model that cannot think goes back as well
    assert "no switch for thinking" in chat(tmp_path, "/think on", "/model tiny", "/model", args=("-q", "thinker")).err


def test_copying_says_how_or_that_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/wl-copy"
    program.write_text('#!/bin/sh\n/bin/cat > "$HOME/copied"\n')
    program.chmod(0o755)
    done = chat(tmp_path, "say hi", "/copy", PATH=str(tmp_path / "bin"), WAYLAND_DISPLAY="wayland-0")
    assert done.out == "hi\ncopied with wl-copy\n"
    assert (tmp_path / "copied").read_text() == "hi"
    program.write_text("#!/bin/sh\nexit 3\n")
    failed = chat(tmp_path, "say hi", "/copy", PATH=str(tmp_path / "bin"), WAYLAND_DISPLAY="wayland-0")
    assert failed.code == 1
    assert "wl-copy does not take the text (exit code 3)" in failed.err
    nowhere = chat(tmp_path, "say hi", "/copy", PATH="/nowhere", TERM="dumb")
    assert "there is no clipboard here" in nowhere.err


def test_what_was_said_last_is_copied_though_a_call_came_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(commands, "copy", lambda text: copied.append(text) or "something")
    conversation = Conversation()
    fake = SimpleNamespace(conversation=conversation, display=SimpleNamespace(say=lambda text: None))
    (command,) = (each for each in COMMANDS if "copy" in each.names)
    conversation.ask("look")
    conversation.answer("", calls=[Call("1", "read", "{}")])
    with pytest.raises(UsageError, match="no answer to copy"):
        command.run(fake, "")  # type: ignore[arg-type]
    conversation.answer("seen")
    conversation.ask("again")
    conversation.answer(" ", calls=[Call("2", "read", "{}")], cut="interrupted")
    command.run(fake, "")  # type: ignore[arg-type]
    assert copied == ["seen"]


def test_leaving(tmp_path: Path) -> None:
    for word in ("/exit", "/bye", "/quit"):
        assert chat(tmp_path, "say hi", word, "say no").out == "hi\n"


# ---- sessions ----


def test_a_conversation_is_gone_on_with(tmp_path: Path) -> None:
    chat(tmp_path, "say hi", args=("-q", "thinker", "-sys", "be brief"))
    assert chat(tmp_path, "x", args=("-q", "--continue")).out.endswith("<s>be brief<u>say hi<a>hi<u>x<a>]\n")
    again = chat(tmp_path, "/model", "/history", "/clear", "y", args=("-q", "--continue", "-sys", "else"))
    assert again.out.startswith("model: thinker\n  1 you    say hi\n")
    assert again.out.endswith("[<s>else<u>y<a>]\n")
    assert chat(tmp_path, "/model", args=("-q", "--continue", "tiny")).out == "model: tiny\n"
    assert len(list(sessions(tmp_path).glob("*.jsonl"))) == 1


def test_sessions_by_name(tmp_path: Path) -> None:
    chat(tmp_path, "say 1", args=("-q", "--session", "work", "tiny"))
    chat(tmp_path, "say 2", args=("-q", "--session", "holiday", "tiny"))
    chat(tmp_path, "say 3", args=("-q", "--session", "wo"))
    assert texts(sessions(tmp_path) / "work.jsonl") == ["say 1", "1", "say 3", "3"]
    switched = chat(tmp_path, "/load hol", "/history", "/load", "/load holiday", args=("-q", "--session", "work"))
    assert switched.out.splitlines() == [
        "session holiday: 2 messages; /history shows them", "  1 you    say 2", "  2 model  2", "work", "holiday",
    ]  # fmt: skip
    assert "holiday is this session" in switched.err
    listed = nanovllm(tmp_path, "chat", "--list-sessions")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["NAME", "work", "holiday"]
    assert listed.out.splitlines()[1].endswith("2      tiny   say 1")
    gone = nanovllm(tmp_path, "chat", "--delete-session", "work")
    assert (gone.code, gone.out, gone.err) == (0, "", "work is deleted\n")
    assert not (sessions(tmp_path) / "work.jsonl").exists()
    missing = nanovllm(tmp_path, "chat", "--delete-session", "work")
    assert (missing.code, missing.err.splitlines()[0]) == (2, "error: there is no session work")


def test_naming_and_keeping(tmp_path: Path) -> None:
    done = chat(tmp_path, "say hi", "/save mine", "say more", "/save", args=("-q", "tiny"))
    assert texts(sessions(tmp_path) / "mine.jsonl") == ["say hi", "hi", "say more", "more"]
    assert done.out.splitlines()[1].startswith("kept as mine (")
    chat(tmp_path, "say 1", "say 2", args=("-q", "--no-save", "tiny"))
    assert [path.name for path in sessions(tmp_path).glob("*.jsonl")] == ["mine.jsonl"]
    chat(tmp_path, "say 1", "/save late", "say 2", args=("-q", "--no-save", "tiny"))
    assert texts(sessions(tmp_path) / "late.jsonl") == ["say 1", "1", "say 2", "2"]
    assert "there is a session late already" in chat(tmp_path, "/save late").err


def test_what_is_not_to_be_kept_leaves_a_loaded_session_alone(tmp_path: Path) -> None:
    chat(tmp_path, "say 1", args=("-q", "--session", "work", "tiny"))
    before = (sessions(tmp_path) / "work.jsonl").read_bytes()
    done = chat(tmp_path, "/load work", "/undo", "say 2", args=("-q", "--no-save", "tiny"))
    assert done.out.splitlines()[0] == "session work: 2 messages; /history shows them; what follows is not kept"
    assert (sessions(tmp_path) / "work.jsonl").read_bytes() == before


def test_a_model_in_a_folder_is_found_again_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    chat(tmp_path, "say hi", args=("-q", "./mine"))
    assert chat(tmp_path, "/model", args=("-q", "--continue")).out == f"model: {tmp_path}/mine\n"


LINES = [
    "say one", "say two\\nthree", "slash", "//x", "fail", "long", "/undo", "/regen", "/continue", "/edit say four", "/clear",
    "/history", "/ctx", "/stats", "/set predict 5", "/set predict default", "/system be", '/system ""', "/file note", "/save",
    "/model thinker", "/model missing", "/model tiny", "/think on", "/show", "/help", "/load", "/nothing", '"""a', 'b"""', "",
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_written_in_whatever_order(tmp_path: Path, seed: int) -> None:
    """No fault of ours, and the session is the conversation."""
    (tmp_path / "note").write_text("a note")
    lines = random.Random(seed).choices(LINES, k=250)
    shifts = ("-q", "tiny", "--context-overflow", "shift")
    done = chat(tmp_path, *lines, 'x"""', "/export json all.json", args=shifts)
    assert "internal error" not in done.err
    exported = json.loads((tmp_path / "all.json").read_text())["messages"]
    store = Sessions(sessions(tmp_path))
    _, events = store.open(store.names()[0])
    kept = [
        message.for_template() | ({"cut": message.cut} if message.cut else {})
        for message in Conversation.replay(events).messages
    ]
    assert [each for each in exported if each["role"] != "system"] == kept
    assert len(kept) > 2


def test_nothing_said_leaves_nothing(tmp_path: Path) -> None:
    assert chat(tmp_path, "/help", "/system x").code == 0
    assert not list(tmp_path.glob(".local/**/*.jsonl"))


def test_a_disk_that_refuses_does_not_end_the_conversation(tmp_path: Path) -> None:
    sessions(tmp_path).parent.mkdir(parents=True)
    sessions(tmp_path).write_text("a file in the way")
    done = chat(tmp_path, "say hi", "say bye", "/history")
    assert done.out.splitlines()[:2] == ["hi", "bye"]
    assert len(done.out.splitlines()) == 6
    assert done.code == 1
    assert "nothing is kept from here on" in done.err.splitlines()[0]
    assert done.err.splitlines()[1] == "hint: --no-save asks for nothing to be kept"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "no model was named"),
        (("--continue",), "no conversation to go on with"),
        (("tiny", "--continue", "--session", "x"), "--continue and --session"),
        (("tiny", "--no-save", "--continue"), "--continue and --no-save"),
        (("tiny", "--no-save", "--save-kv"), "--save-kv and --no-save"),
        (("tiny", "--session", "a/b"), "cannot be the name"),
        (("tiny", "-N", "2"), "no such option: -N"),
        (("tiny", "--logprobs", "2"), "no such option: --logprobs"),
        (("tiny", "--temp", "-1"), "--temp must"),
        (("tiny", "--think", "on"), "no switch for thinking"),
        (("tiny", "-f", "nowhere"), "there is no file nowhere"),
        (("base",), "base has no chat template"),
        (("tiny", "--context-overflow", "cut"), "context-overflow"),
        (("tiny", "--list-sessions", "--delete-session", "x"), "cannot be used together"),
    ],
)
def test_flags_that_make_no_sense(tmp_path: Path, args: tuple[str, ...], told: str) -> None:
    done = chat(tmp_path, "say hi", args=args)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_settings_that_mean_nothing_in_a_conversation_are_left_to_run(tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text("[default]\nnum-answers = 2\nlogprobs = 1\n")
    assert chat(tmp_path, "say hi").out == "hi\n"
    assert nanovllm(tmp_path, "run", "-q", "tiny", "say hi").out == "hi\n---\nhi\n"


def test_a_message_where_a_models_name_stands_is_pointed_out(tmp_path: Path) -> None:
    hint = "hint: without MODEL the session's own is taken; a message to it stands behind -p\n"
    assert hint not in chat(tmp_path, args=("--session", "x", "missing")).err, "there is no session yet"
    chat(tmp_path, "say hi", args=("-q", "--session", "x", "tiny"))
    for args in (("--session", "x", "missing"), ("--continue", "missing", "words")):
        done = chat(tmp_path, args=args)
        assert (done.code, done.err.endswith(hint)) == (3, True)
    assert hint not in chat(tmp_path, args=("--continue", "-m", "missing")).err
    assert chat(tmp_path, args=("-q", "--continue", "-p", "say bye")).out == "bye\n"


def test_a_damaged_session_is_refused_and_left_alone(tmp_path: Path) -> None:
    chat(tmp_path, "say hi", args=("-q", "--session", "x", "tiny"))
    path = sessions(tmp_path) / "x.jsonl"
    damaged = path.read_text().replace('"message", "id": 1', '"message", "id": "1"')
    path.write_text(damaged)
    done = chat(tmp_path, "say no", args=("-q", "--session", "x", "tiny"))
    assert (done.code, done.out) == (1, "")
    assert path.read_text() == damaged
