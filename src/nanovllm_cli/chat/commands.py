"""Slash commands: a table of what can be written in place of a message. What they say goes through the display."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nanovllm_cli.chat import sampling
from nanovllm_cli.chat.clipboard import copy
from nanovllm_cli.chat.conversation import Message
from nanovllm_cli.chat.export import CUT, as_json, as_markdown, fenced
from nanovllm_cli.chat.loop import Chat, Leave
from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.cli.inputs import checked, decode, read_file
from nanovllm_cli.cli.progress_line import counted, size
from nanovllm_cli.cli.question import WORDS, kind_of
from nanovllm_cli.cli.table import aligned, shortened
from nanovllm_cli.cli.unused import notes_on
from nanovllm_cli.errors import UsageError
from nanovllm_cli.images.source import IMAGE
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.sent import Medium
from nanovllm_cli.sounds.source import SOUND

if TYPE_CHECKING:
    from nanovllm_cli.cli.shared_options import Choice

MAX_FILE_BYTES = 4 << 20
Run = Callable[[Chat, str], None]
Candidates = Iterable[tuple[str, str]]


class Command(NamedTuple):
    """names: the first is the one that is shown. complete: what its argument could be, given what is there of it."""

    names: tuple[str, ...]
    arguments: str
    help: str
    run: Run
    complete: Callable[[Chat, str], Candidates] = lambda chat, begun: ()


def run(chat: Chat, line: str) -> None:
    """`/name argument`. Raises UsageError for a name that is none, with the nearest ones."""
    word, argument = [*line[1:].split(maxsplit=1), "", ""][:2]
    command = _BY_NAME.get(word)
    if command is None:
        near = difflib.get_close_matches(word, _BY_NAME, n=3)
        meant = f"did you mean {' or '.join('/' + name for name in near)}?" if near else "/help lists them"
        if word in _HABITS:
            meant = f"here it is /{_HABITS[word]}"
        raise UsageError(f"there is no command /{word[:40]}", f"{meant} (//… sends a message that begins with /)")
    argument = argument.strip()
    if argument and not command.arguments:
        raise UsageError(f"/{word} takes nothing behind it")
    command.run(chat, argument)


def complete(chat: Chat, text: str) -> Candidates:
    """What could stand in place of the last word of `text`, which is what stands before the cursor."""
    if not text.startswith("/") or text.startswith("//"):
        return []
    name, space, rest = text[1:].partition(" ")
    if not space:
        return [(f"/{each.names[0]}", each.help) for each in COMMANDS if any(n.startswith(name) for n in each.names)]
    command = _BY_NAME.get(name)
    if command is None or " " in rest:
        return []
    return [(word, help) for word, help in command.complete(chat, rest) if word.startswith(rest)]


# ---- what they do ----


def _help(chat: Chat, argument: str) -> None:
    wanted = [each for each in COMMANDS if argument.lstrip("/") in ("", *each.names)]
    if not wanted:
        raise UsageError(f"there is no command {argument[:40]}", "/help lists them")
    lines = aligned([(f"/{', /'.join(each.names)} {each.arguments}".rstrip(), each.help) for each in wanted], left=(0, 1))
    if not argument:
        several = '"""…""" sends several lines as one message'
        keys = ["Alt-Enter, Ctrl-J and Enter behind a \\ begin a new line"] if chat.edits else []
        lines += ["", "//… sends a message that begins with /", several, *keys]
    chat.display.say("\n".join(lines))


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        _say_settings(chat)
        return
    chosen = sampling.setting(name)
    unused: list[str] = []
    if value.strip():
        given = sampling.changed(chat.model.settings.given, chosen, value.strip())
        settled = chat.model.settled(given)
        chat.model.settings.given = given
        if value.strip() != sampling.DEFAULT:
            unused = [note.replace("--", "") for note in notes_on({chosen.option: chosen.name}, *settled)]
    chat.display.say("\n".join([f"{chosen.name} = {chat.model.shown(chosen)}", *unused]))


def _say_settings(chat: Chat) -> None:
    given = chat.model.settings.given
    rows = [
        (each.name, chat.model.shown(each) + ("  (set)" if each.is_in(given) else ""))
        for each in dict.fromkeys(sampling.settings().values())
        if not each.is_read_from_a_file
    ]
    chat.display.say("\n".join(aligned(rows, left=(0, 1))))


def _show(chat: Chat, argument: str) -> None:
    if argument in ("", "model"):
        chat.display.say(f"model: {chat.model.facts}")
    if argument in ("", "system"):
        chat.display.say(f"system: {chat.conversation.system or 'none'}")
    if argument in ("", "settings"):
        chat.display.say(f"think: {chat.model.settings.think or 'as the template has it'}")
        chat.display.say(f"when the context is full: {'shift' if chat.model.settings.shifts else 'error'}")
        _say_settings(chat)
    if argument == "template":
        chat.display.say(chat.model.template)
    elif argument not in ("", "model", "system", "settings"):
        meant = _SHOWN_AS.get(argument)
        told = f"here it is /show {meant}" if meant else "/show settings, template, system or model"
        raise UsageError(f"/show {argument[:40]}?", told)


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.tell(None if argument in sampling.NOTHING else checked(argument))
    chat.display.say(f"system: {chat.conversation.system or 'none'}")


def _load(chat: Chat, argument: str) -> None:
    if not argument:
        names = chat.sessions.names()
        chat.display.say("\n".join(names) if names else "there are no sessions yet")
        return
    name = chat.sessions.find(argument)
    if name is None:
        raise UsageError(f"there is no session {argument[:40]}", "/load lists them")
    if chat.session is not None and chat.session.exists and name == chat.session.name:
        raise UsageError(f"{name} is this session")
    chat.resume(name, keeps=chat.session is not None)
    say_session(chat, name)


def say_session(chat: Chat, name: str) -> None:
    """Which session this is, and how far it has come."""
    messages = counted(len(chat.conversation.messages), "message")
    kept = "" if chat.session is not None else "; what follows is not kept"
    chat.display.say(f"session {name}: {messages}; /history shows them{kept}")


def _save(chat: Chat, argument: str) -> None:
    if chat.session is None:
        chat.keep(argument or None)
    elif argument:
        chat.session.rename(argument)
    assert chat.session is not None
    when = "" if chat.session.exists else ", from the first message on"
    chat.display.say(f"kept as {chat.session.name} ({chat.session.path}){when}")


def _export(chat: Chat, argument: str) -> None:
    kind, _, target = argument.partition(" ")
    if kind not in ("md", "json"):
        raise UsageError("a conversation is exported as md or json", "/export md [FILE]")
    name = chat.session.name if chat.session is not None else "conversation"
    path = _path(target.strip() or f"{name}.{kind}")
    if os.path.exists(path):  # which, unlike Path.exists, takes any text for a name
        raise UsageError(f"{path} exists", f"name another file: /export {kind} FILE")
    model = chat.model.name
    text = as_markdown(chat.conversation, model) if kind == "md" else as_json(chat.conversation, model)
    write_whole(path, text)
    chat.display.say(f"written to {path}")


def _history(chat: Chat, argument: str) -> None:
    messages = chat.conversation.messages
    if not messages:
        chat.display.say("nothing has been said yet")
        return
    chat.display.say("\n".join(_line_of(chat, number, each) for number, each in enumerate(messages, start=1)))


def _line_of(chat: Chat, number: int, message: Message) -> str:
    text = shortened(message.shown(" ".join(message.content.split())), 100)
    remarks = [] if message.cut is None else [CUT[message.cut]]
    branches = chat.conversation.num_branches(message)
    if branches > 1:
        remarks.append(f"one of {branches}")
    who = {"user": "you", "assistant": "model"}.get(message.role, message.role)
    text = " ".join([text, *(f"[{each.name}]" for each in message.calls)]).strip()
    return f"{number:3} {who:5}  {text}" + (f"  ({', '.join(remarks)})" if remarks else "")


def _clear(chat: Chat, argument: str) -> None:
    chat.clear()
    chat.display.say("a new conversation; the system prompt stays")


def _undo(chat: Chat, argument: str) -> None:
    question = chat.undo()
    chat.display.say(f"taken back: {shortened(question.shown(' '.join(question.content.split())), 60)}")


def _file(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("which file?", "/file PATH")
    path = _named(argument)
    data = read_file(str(path))
    for command, medium in _MEDIA.items():
        if b"\0" in data and medium.kind_of(data) is not None:
            raise UsageError(f"{path} is {medium.name}", f"/{command} PATH sends it")
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has {len(data) >> 20} MiB; at most {MAX_FILE_BYTES >> 20} are taken")
    if b"\0" in data:
        raise UsageError(f"{path} is no text")
    text = decode(data, str(path))
    tokens, limit = chat.model.tokens_of([text]), chat.model.limit
    if tokens is not None and limit is not None and tokens >= limit:
        raise UsageError(f"{path} has {tokens} tokens, the context holds {limit}")
    chat.attachments.append(f"{path.name}:\n{fenced(text.removesuffix(chr(10)))}")
    long = counted(len(text), "character") if tokens is None else counted(tokens, "token")
    chat.display.say(f"{path} ({long}) goes with the next message")


def _attach(command: str) -> Run:
    """/image, /audio or /video."""
    medium = _MEDIA[command]

    def attach(chat: Chat, argument: str) -> None:
        if not argument:
            raise UsageError(f"which {medium.noun}?", f"/{command} PATH")
        if argument in sampling.NOTHING:
            chat.images[:] = [url for url in chat.images if WORDS[kind_of(url)] != medium.noun]
            chat.display.say(f"no {medium.noun} goes with the next message")
            return
        path = _named(argument)
        data = read_file(str(path))
        if data and medium.kind_of(data) is None and b"\0" not in data:
            told = f"{path} is no {medium.noun} of a kind that is read here"
            raise UsageError(told, f"what is read is {medium.kinds}; /file sends a text")
        say_attached(chat, medium.data_url(data, str(path)), str(path))

    return attach


def say_attached(chat: Chat, url: str, name: str) -> None:
    """An image, a sound or a video, as a data URL, goes with the next message."""
    tokens = chat.attach(url, name)
    long = size(len(url) * 3 / 4) if tokens is None else counted(tokens, "token")
    chat.display.say(f"{name} ({long}) goes with the next message")


def _named(path: str) -> Path:
    return _path(path if os.path.exists(_path(path)) else _unquoted(path))


def _path(text: str) -> Path:
    """With the home folder that ~ stands for; where there is none, as it is."""
    return Path(os.path.expanduser(text))


def _unquoted(path: str) -> str:
    """As a terminal writes a file that was dropped on it."""
    try:
        words = shlex.split(path)
    except ValueError:
        return path
    return words[0] if len(words) == 1 else path


def _think(chat: Chat, argument: str) -> None:
    if argument:
        choice = _CHOICES.get(argument)
        if choice is None:
            raise UsageError(f"/think is on or off, not {argument[:40]!r}")
        chat.think(choice)
    chat.display.say(f"think: {chat.model.settings.think or 'as the template has it'}")


def _model(chat: Chat, argument: str) -> None:
    if argument:
        chat.switch_model(argument)
    chat.display.say(f"model: {chat.model.name}")


def _stats(chat: Chat, argument: str) -> None:
    if chat.statistics is None:
        chat.display.say("nothing has been answered yet")
        return
    chat.display.say(chat.statistics.line())
    chat.display.say(f"{counted(chat.num_answers, 'answer')} of {counted(chat.num_answer_tokens, 'token')} since it was started")


def _context(chat: Chat, argument: str) -> None:
    used, size = chat.context_used, chat.model.limit
    if used is None or size is None:
        limit = "" if size is None else f"; the context holds {size:,}"
        chat.display.say("the server has not said how many tokens that is" if used is None else f"{used:,} tokens used{limit}")
        return
    messages = chat.conversation.messages
    texts: dict[str, list[str]] = {
        "system": [chat.conversation.system or ""],
        "you": [each.content for each in messages if each.role == "user"],
        "answers": [each.content for each in messages if each.role == "assistant"],
        "results of tools": [each.content for each in messages if each.role == "tool"],
    }
    lines = [f"{used:,} of {size:,} tokens used ({used / size:.0%}), {max(size - used, 0):,} left"]
    texts = {name: text for name, text in texts.items() if text or name != "results of tools"}
    parts = {name: tokens for name, text in texts.items() if (tokens := chat.model.tokens_of(text)) is not None}
    seen = [url for each in messages for url in each.images]
    if parts:
        parts |= {_name_of(seen): _image_tokens(chat, seen)} if seen else {}
        has_tools = chat.model.settings.tools is not None
        parts[f"template{', tools' if has_tools else ''} and reasoning"] = max(used - sum(parts.values()), 0)
        parts |= {f"{_name_of(chat.images)} of the next message": _image_tokens(chat, chat.images)} if chat.images else {}
    if chat.attachments and (tokens := chat.model.tokens_of(chat.attachments)) is not None:
        parts["files for the next message"] = tokens
    chat.display.say("\n".join([*lines, *(f"  {name:26} {tokens:8,}" for name, tokens in parts.items())]))


def _image_tokens(chat: Chat, urls: Sequence[str]) -> int:
    return sum(chat.model.tokens_of_image(url, f"a conversation's {WORDS[kind_of(url)]}") or 0 for url in urls)


def _name_of(urls: Sequence[str]) -> str:
    return " and ".join(f"{word}s" for kind, word in WORDS.items() if kind in map(kind_of, urls))


def _tools(chat: Chat, argument: str) -> None:
    tools = chat.model.settings.tools
    if tools is None or not tools.tools:
        raise UsageError("there are no tools", "nanovllm chat --mcp FILE names servers that have some")
    rows = [("NAME", "SERVER", "RUNS", "WHAT IT DOES")]
    for each in tools.tools:
        runs = "unasked" if tools.needs_no_asking(each.name) else "if allowed"
        rows.append((each.name, each.origin, runs, shortened(" ".join(each.description.split()), 60)))
    chat.display.say("\n".join(aligned(rows, left=range(4))))


def _copy(chat: Chat, argument: str) -> None:
    said = (each for each in reversed(chat.conversation.messages) if each.role == "assistant" and each.content.strip())
    if (answer := next(said, None)) is None:  # what called a tool and said nothing is none
        raise UsageError("there is no answer to copy")
    chat.display.say(f"copied with {copy(answer.content)}")


def _leave(chat: Chat, argument: str) -> None:
    raise Leave


_MEDIA: dict[str, Medium] = {"image": IMAGE, "audio": SOUND, "video": VIDEO}
_SHOWN = ("settings", "template", "system", "model")
_CHOICES: dict[str, Choice] = {"on": "on", "off": "off"}


def _words(*words: str) -> Callable[[Chat, str], Candidates]:
    return lambda chat, begun: [(word, "") for word in words]


def _command_names(chat: Chat, begun: str) -> Candidates:
    return [(each.names[0], each.help) for each in COMMANDS]


def _setting_names(chat: Chat, begun: str) -> Candidates:
    return [(each.name, each.help) for each in dict.fromkeys(sampling.settings().values())]


def _session_names(chat: Chat, begun: str) -> Candidates:
    return [(entry.name, entry.title) for entry in chat.sessions.entries()]


def _model_names(chat: Chat, begun: str) -> Candidates:
    return chat.model.names()


def _paths(chat: Chat, begun: str) -> Candidates:
    """Files and folders beside what is there; hidden ones where that begins with a dot."""
    name = begun.rpartition("/")[2]
    beginning = begun[: len(begun) - len(name)]
    try:
        paths = sorted(_path(beginning or ".").iterdir())
    except OSError:
        return []
    shown = [path for path in paths if name.startswith(".") or not path.name.startswith(".")]
    return [(f"{beginning}{path.name}{'/' if os.path.isdir(path) else ''}", "") for path in shown]


# fmt: off
COMMANDS: tuple[Command, ...] = (
    Command(("help",), "[COMMAND]", "What can be written here.", _help, _command_names),
    Command(("set",), "[NAME [VALUE]]", "A sampling option, such as temp 0.3; temp default: the model's.", _set, _setting_names),
    Command(("show",), "[WHAT]", "The settings, template, system prompt or model.", _show, _words(*_SHOWN)),
    Command(("system",), '[TEXT]', 'What the model is told first; "" leaves it out.', _system),
    Command(("load",), "[SESSION]", "Go on with a saved session; without a name, list them.", _load, _session_names),
    Command(("save",), "[NAME]", "Name this session; where nothing is kept, keep it.", _save),
    Command(("export",), "md|json [FILE]", "Write the conversation to a file.", _export, _words("md", "json")),
    Command(("history",), "", "What was said, a line each.", _history),
    Command(("clear",), "", "Start anew; the session keeps what was said.", _clear),
    Command(("regen",), "", "Another answer to the last message.", lambda chat, argument: chat.regenerate()),
    Command(("edit",), "[TEXT]", "Change the last message and send it again.", lambda chat, argument: chat.edit(argument)),
    Command(("undo",), "", "Take the last message and its answer back.", _undo),
    Command(("continue",), "", "Go on with the last answer.", lambda chat, argument: chat.go_on()),
    Command(("file",), "PATH", "Send a text file with the next message.", _file, _paths),
    Command(("image",), "PATH", 'Send an image with the next message; "" sends none.', _attach("image"), _paths),
    Command(("audio",), "PATH", 'Send a sound with the next message; "" sends none.', _attach("audio"), _paths),
    Command(("video",), "PATH", 'Send a video with the next message; "" sends none.', _attach("video"), _paths),
    Command(("think",), "[on|off]", "Whether the model reasons first.", _think, _words("on", "off")),
    Command(("model",), "[NAME]", "Another model for the same conversation.", _model, _model_names),
    Command(("stats",), "", "How fast the last answer was.", _stats),
    Command(("ctx",), "", "How much of the context is used, by what.", _context),
    Command(("tools",), "", "What the model may call.", _tools),
    Command(("copy",), "", "The last answer to the clipboard.", _copy),
    Command(("exit", "bye", "quit"), "", "Leave.", _leave),
)
# fmt: on
_HABITS = {
    "?": "help", "h": "help", "retry": "regen", "regenerate": "regen", "reset": "clear", "new": "clear", "read": "file",
    "q": "exit", "info": "show", "context": "ctx", "tokens": "ctx", "sessions": "load", "sys": "system", "verbose": "stats",
    "list": "model NAME; nanovllm models list shows what is here", "ls": "model NAME; nanovllm models list shows what is here",
}  # fmt: skip
"""What other programs' chats call them."""
_SHOWN_AS = {"info": "model", "license": "model", "parameters": "settings"}
"""What Ollama's `/show` calls what ours has."""
_BY_NAME = {name: command for command in COMMANDS for name in command.names}
