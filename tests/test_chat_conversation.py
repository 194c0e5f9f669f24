"""Conversations as trees, and sessions on the disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli.chat.conversation import Conversation, Event
from nanovllm_cli.chat.export import as_json, as_markdown
from nanovllm_cli.chat.session import Sessions, kept_ids
from nanovllm_cli.errors import OutputError, SessionError, UsageError


def said(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages]


def two_turns() -> tuple[Conversation, list[Event]]:
    events: list[Event] = []
    conversation = Conversation(events.append)
    for question, answer in (("one", "1"), ("two", "2")):
        conversation.ask(question)
        conversation.answer(answer)
    return conversation, events


def test_to_take_back_to_answer_anew_and_to_clear_are_ways_to_go_on_from_earlier() -> None:
    conversation, _ = two_turns()
    assert conversation.undo().content == "two"
    assert said(conversation) == ["one", "1"]
    conversation.ask("three")
    conversation.answer("3", reasoning="hm", cut="interrupted", model="m")
    assert conversation.back_to_question().content == "three"
    conversation.answer("4")
    assert said(conversation) == ["one", "1", "three", "4"]
    assert conversation.num_branches(conversation.messages[-1]) == 2
    assert conversation.num_branches(conversation.messages[2]) == 2
    assert conversation.before_answer().content == "4"
    conversation.answer("4 and more")
    assert said(conversation)[-1] == "4 and more"
    conversation.clear()
    assert said(conversation) == []
    assert conversation.title == "one"
    for impossible in (conversation.undo, conversation.back_to_question, conversation.before_answer):
        with pytest.raises(UsageError):
            impossible()


def test_nothing_that_was_said_is_lost_from_the_events() -> None:
    conversation, events = two_turns()
    conversation.back_to_question()
    conversation.answer("two again")
    conversation.clear()
    texts = [event["content"] for event in events if event["event"] == "message"]
    assert texts == ["one", "1", "two", "2", "two again"]


OPERATIONS = (
    lambda conversation, text: conversation.ask(text),
    lambda conversation, text: conversation.answer(text, reasoning=text, cut="length"),
    lambda conversation, text: conversation.undo(),
    lambda conversation, text: conversation.back_to_question(),
    lambda conversation, text: conversation.clear(),
    lambda conversation, text: conversation.tell(text or None),
)


@given(st.lists(st.tuples(st.integers(0, 5), st.text(max_size=5)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_same_events_give_the_same_conversation(operations: list[tuple[int, str]]) -> None:
    events: list[Event] = []
    conversation = Conversation(events.append)
    for operation, text in operations:
        try:
            OPERATIONS[operation](conversation, text)
        except UsageError:
            continue
    written = json.loads(json.dumps(events))
    for copy in (Conversation.replay(written), Conversation.replay(conversation.events())):
        assert copy.messages == conversation.messages
        assert copy.system == conversation.system
        assert copy.title == conversation.title


@pytest.mark.parametrize(
    "event",
    [
        {"event": "message", "id": 1, "parent": 7, "role": "user", "content": "x"},
        {"event": "message", "id": 1, "parent": None, "role": "system", "content": "x"},
        {"event": "message", "id": 1, "parent": None, "role": ["user"], "content": "x"},
        {"event": "message", "id": True, "parent": None, "role": "user", "content": "x"},
        {"event": "message", "id": 1, "parent": None, "role": "user", "content": 5},
        {"event": "message", "id": 1, "parent": None, "role": "user", "content": "half \ud800 pair"},
        {"event": "message", "id": 1, "parent": None, "role": "user"},
        {"event": "message", "id": 1, "parent": None, "role": "assistant", "content": "x", "cut": "bored"},
        {"event": "message", "parent": None, "role": "user", "content": "x"},
        {"event": "at", "id": 3},
        {"event": "at", "id": [1]},
        {"event": "system", "content": 3},
    ],
)
def test_events_that_make_no_sense_are_refused(event: Event) -> None:
    with pytest.raises(SessionError):
        Conversation.replay([event])


def test_a_message_stands_for_itself_once() -> None:
    message = {"event": "message", "id": 1, "parent": None, "role": "user", "content": "x"}
    with pytest.raises(SessionError):
        Conversation.replay([message, message])


def test_what_a_template_is_given() -> None:
    conversation, _ = two_turns()
    conversation.ask("why")
    conversation.answer("so", reasoning="because", cut="interrupted")
    assert conversation.messages[-1].for_template() == {
        "role": "assistant", "content": "so", "reasoning_content": "because",
    }  # fmt: skip
    assert conversation.messages[0].for_template() == {"role": "user", "content": "one"}


def test_exports() -> None:
    conversation, _ = two_turns()
    conversation.tell("be brief")
    conversation.ask("why")
    conversation.answer("so", reasoning="first\nsecond", cut="interrupted", model="other")
    text = as_markdown(conversation, "tiny")
    assert text.startswith("# one\n\nModel: tiny\n\n## System\n\nbe brief\n\n## You\n\none\n\n## tiny\n\n1\n\n")
    assert text.endswith("## other\n\n> first\n> second\n\nso\n\n*(stopped)*\n")
    record = json.loads(as_json(conversation, "tiny"))
    assert [message["role"] for message in record["messages"]] == ["system", *["user", "assistant"] * 3]
    assert record["messages"][-1] == {
        "role": "assistant", "content": "so", "reasoning_content": "first\nsecond", "cut": "interrupted",
    }  # fmt: skip


# ---- on the disk ----


def fill(sessions: Sessions, name: str | None = None, text: str = "hello") -> str:
    session = sessions.new("tiny", name)
    conversation = Conversation(session.append)
    conversation.ask(text)
    conversation.answer("hi", model="tiny")
    session.close()
    return session.name


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions")
    name = fill(sessions, "first")
    session, events = sessions.open(name)
    conversation = Conversation.replay(events)
    conversation.record = session.append
    assert said(conversation) == ["hello", "hi"]
    conversation.undo()
    conversation.ask("bye")
    session.append({"event": "kv", "model": "tiny", "ids": [1, 2, 3]})
    session.close()
    _, events = sessions.open(name)
    assert said(Conversation.replay(events)) == ["bye"]
    assert kept_ids(events) == [1, 2, 3]
    assert stat.S_IMODE(session.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(sessions.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("ids", [None, "12", [1, "2"], [True], [-1]])
def test_saved_tokens_that_make_no_sense_are_none(ids: object) -> None:
    assert kept_ids([{"event": "kv", "ids": [5]}, {"event": "kv", "ids": ids}]) == []


def test_a_session_without_a_message_leaves_no_file(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions")
    sessions.new("tiny").close()
    assert not sessions.folder.exists()
    assert sessions.entries() == []


def test_names_are_unique_and_their_beginnings_will_do(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    first, second = fill(sessions), fill(sessions)
    assert first != second
    for name in ("work", "work-notes", "holiday"):
        fill(sessions, name)
    assert sessions.find("work") == "work"
    assert sessions.find("hol") == "holiday"
    assert sessions.find("nothing") is None
    with pytest.raises(UsageError, match=r"work-notes") as refused:
        sessions.find("wor")
    assert refused.value.hint
    session, _ = sessions.open("holiday")
    with pytest.raises(UsageError, match="already"):
        session.rename("work")
    session.rename("trip")
    session.append({"event": "system", "content": "x"})
    session.close()
    assert sessions.names()[0] == "trip"
    assert sessions.find("holiday") is None


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a" * 65, "a b", "a\n", "\x1b[31m"])
def test_names_that_could_mean_something_else_are_refused(tmp_path: Path, name: str) -> None:
    sessions = Sessions(tmp_path)
    with pytest.raises(UsageError):
        sessions.new("tiny", name)
    with pytest.raises(UsageError):
        sessions.find(name)


def test_half_a_line_at_the_end_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    name = fill(sessions)
    path = tmp_path / f"{name}.jsonl"
    whole = path.read_bytes()
    for cut in (1, 5, 40):
        path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:cut])
        assert sessions.entries()[0].turns == 1
        session, events = sessions.open(name)
        assert said(Conversation.replay(events)) == ["hello", "hi"]
        session.append({"event": "system", "content": "x"})
        session.close()
        session, events = sessions.open(name)
        session.close()
        assert Conversation.replay(events).system == "x"


def test_what_is_no_session_is_refused_by_name_and_line(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    fill(sessions, "good")
    lines = (tmp_path / "good.jsonl").read_text().splitlines(keepends=True)
    cases = {
        "empty": "",
        "foreign": '{"some": "json"}\n',
        "binary": "\x00\x01\n\x02\n",
        "deep": "[" * 100_000 + "\n",
        "newer": lines[0].replace('"version": 1', '"version": 2'),
        "damaged": lines[0] + "{not json}\n" + lines[1],
        "list": lines[0] + "[]\n",
    }
    for name, text in cases.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
        with pytest.raises(SessionError, match=name) as refused:
            sessions.open(name)
        assert refused.value.hint
        assert (tmp_path / f"{name}.jsonl").read_text() == text
    with pytest.raises(SessionError, match="line 2"):
        sessions.open("damaged")
    (tmp_path / "orphan.jsonl").write_text(lines[0] + '{"event": "at", "id": 9}\n')
    titles = {entry.name: entry.title for entry in sessions.entries()}
    assert titles.pop("good") == "hello"
    assert set(titles.values()) == {"(cannot be read)"}


def test_two_processes_do_not_write_into_one_session(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    name = fill(sessions)
    code = (
        "import sys\nfrom pathlib import Path\nfrom nanovllm_cli.chat.session import Sessions\n"
        f"opened = Sessions(Path({str(tmp_path)!r})).open({name!r})\nprint('open', flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"open\n"
    with pytest.raises(SessionError, match="another terminal"):
        sessions.open(name)
    with pytest.raises(SessionError, match="another terminal"):
        sessions.delete(name)
    other.communicate(b"")
    sessions.open(name)[0].close()
    sessions.delete(name)
    assert sessions.names() == []
    with pytest.raises(UsageError):
        sessions.delete(name)


def test_the_index_is_made_again_where_it_is_damaged_or_stale(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    fill(sessions, "a", text="\n  what is this?\nmore")
    time.sleep(0.01)
    fill(sessions, "b", text="x" * 100)
    good = sessions.entries()
    assert [(entry.name, entry.turns, entry.model) for entry in good] == [("b", 1, "tiny"), ("a", 1, "tiny")]
    assert good[1].title == "what is this?"
    assert len(good[0].title) == 60
    index = tmp_path / "index.json"
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    for damage in ("", "[]", '{"sessions": {"a": {"stamp": [1, 2]}}}', '{"sessions": 5}', "\x00"):
        index.write_text(damage)
        assert sessions.entries() == good
    index.unlink()
    assert sessions.entries() == good
    lie = json.loads(index.read_text())
    lie["sessions"]["a"]["entry"]["title"] = "as the index says"
    index.write_text(json.dumps(lie))
    assert sessions.entries()[1].title == "as the index says"  # it is read
    for time_of_none in (1e300, float("nan")):
        lie["sessions"]["a"]["entry"]["updated"] = time_of_none
        index.write_text(json.dumps(lie))
        assert sessions.entries() == good
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert sessions.entries()[1].title == "what is this?"  # and not trusted for a file that has changed
    (tmp_path / "b.jsonl").unlink()
    assert [entry.name for entry in sessions.entries()] == ["a"]


def test_a_full_disk_leaves_no_half_line_in_the_middle(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in the place of a full disk."""
    code = f"""
import resource, signal
from pathlib import Path
from nanovllm_cli.chat.session import Sessions
from nanovllm_cli.errors import OutputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
session = Sessions(Path({str(tmp_path)!r})).new("tiny", "s")
session.append({{"event": "system", "content": "fits"}})
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
try:
    session.append({{"event": "system", "content": "x" * 1000}})
except OutputError as error:
    print(error.message)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
session.append({{"event": "system", "content": "later"}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    _, events = Sessions(tmp_path).open("s")
    assert [event.get("content") for event in events[1:]] == ["fits", "later"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "sessions").write_text("a file")
    session = Sessions(tmp_path / "sessions").new("tiny")
    with pytest.raises(OutputError, match="sessions"):
        session.append({"event": "system", "content": "x"})
