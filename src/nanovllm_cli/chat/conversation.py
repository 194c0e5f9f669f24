"""What was said, as a tree: every change adds to it and nothing is lost.

A message knows the one before it. The conversation is the way from the first message to the current one; to take a turn
back, to answer anew or to edit is to go on from an earlier message. Each change is an `Event`, plain JSON, and the same
events give the same conversation again: `session.py` keeps them. No files, models or tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from nanovllm_cli.cli.progress_line import counted
from nanovllm_cli.cli.question import SOUND, VIDEO, WORDS, kind_of, said
from nanovllm_cli.cli.table import shortened
from nanovllm_cli.errors import SessionError, UsageError
from nanovllm_cli.text.tool_calls import is_object

Event = dict[str, Any]
"""{"event": "message", …} adds one, {"event": "at", "id": …} goes to one (null: before the first), {"event": "system",
"content": …} changes what the model is told first."""

Role = Literal["user", "assistant", "tool"]
Cut = Literal["interrupted", "length", "repetition", "context", "error"]
"""Why an answer is not whole: Ctrl-C, the limit that was asked for, the context, a failure."""

TITLE_CHARS = 60


@dataclass(frozen=True, slots=True)
class Call:
    """Of a tool, by a model. arguments: JSON text of an object, as it was written."""

    id: str
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Templates and servers refuse arguments that are no object: that they were none is told in its result."""
        arguments = self.arguments if is_object(self.arguments) else "{}"
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn's half. `parent`: the message before it. `cut`: why an answer is not whole. `model`: who answered. `images`: data
    URLs, of a person's message or a tool's, of sounds and videos, too; they stand before its text. `calls`: of an answer, whose
    results are messages behind it, of a tool; `call_id`: of such a message, the call's, and `name` the tool's."""

    id: int
    parent: int | None
    role: Role
    content: str
    reasoning: str = ""
    cut: Cut | None = None
    model: str | None = None
    images: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        plain: dict[str, Any] = said(self.content, self.images) | {"role": self.role}
        if self.reasoning:
            plain["reasoning_content"] = self.reasoning
        if self.calls:
            plain["tool_calls"] = [each.for_template() for each in self.calls]
        return plain | {"tool_call_id": self.call_id, "name": self.name} if self.role == "tool" else plain

    def shown(self, text: str) -> str:
        """`text`, which is of its content, behind a mark that stands for its images."""
        told = counted_images(self.images)
        return f"[{told.removeprefix('1 ')}] {text}".rstrip() if self.images else text


def counted_images(urls: Sequence[str]) -> str:
    """In words: how many images, sounds and videos."""
    kinds = [kind_of(url) for url in urls]
    return " and ".join(counted(kinds.count(kind), word) for kind, word in WORDS.items() if kind in kinds)


class Conversation:
    """Messages, and where among them it goes on. record: told about each event before it takes effect."""

    def __init__(self, record: Callable[[Event], None] = lambda event: None) -> None:
        self.record = record
        self.system: str | None = None
        self._all: dict[int, Message] = {}
        self._at: int | None = None

    @classmethod
    def replay(cls, events: Iterable[Event]) -> Conversation:
        """What these events come to; others than ours are passed over. Raises SessionError for events that make no sense."""
        conversation = cls()
        for event in events:
            conversation._apply(event)
        return conversation

    # ---- what there is ----

    @property
    def messages(self) -> list[Message]:
        """The conversation, oldest first."""
        found = []
        at = self._at
        while at is not None:
            found.append(self._all[at])
            at = self._all[at].parent
        return found[::-1]

    @property
    def last(self) -> Message | None:
        return None if self._at is None else self._all[self._at]

    @property
    def question(self) -> Message | None:
        """The last message that a person wrote."""
        return next((each for each in reversed(self.messages) if each.role == "user"), None)

    def asked(self) -> Message:
        """The same, where there has to be one. Raises UsageError."""
        if self.question is None:
            raise UsageError("nothing has been said yet")
        return self.question

    def answered(self) -> Message:
        """The last message, which has to be an answer. Raises UsageError."""
        if self.last is None or self.last.role != "assistant":
            raise UsageError("there is no answer to go on with", "say something first")
        return self.last

    @property
    def num_turns(self) -> int:
        return sum(each.role == "user" for each in self.messages)

    @property
    def title(self) -> str:
        """The first line that was ever written, shortened; "" before one."""
        first = next((each for each in self._all.values() if each.role == "user"), None)
        if first is None:
            return ""
        line = next((line.strip() for line in first.content.splitlines() if line.strip()), "")
        return shortened(first.shown(line), TITLE_CHARS)

    def num_branches(self, message: Message) -> int:
        """How many messages have stood in this one's place, itself included."""
        return sum(each.parent == message.parent and each.role == message.role for each in self._all.values())

    def events(self) -> list[Event]:
        """Events that lead here, from nothing."""
        found: list[Event] = [] if self.system is None else [{"event": "system", "content": self.system}]
        return [*found, *map(_event_of, self._all.values()), {"event": "at", "id": self._at}]

    # ---- what can be done ----

    def ask(self, content: str, images: Iterable[str] = ()) -> Message:
        return self._add("user", content, images=tuple(images))

    def answer(
        self, content: str, *, reasoning: str = "", cut: Cut | None = None, model: str | None = None, calls: Iterable[Call] = ()
    ) -> Message:
        return self._add("assistant", content, reasoning=reasoning, cut=cut, model=model, calls=tuple(calls))

    @property
    def open_calls(self) -> list[Call]:
        """Calls of the last answer that have no result yet."""
        done, messages = set[str | None](), self.messages
        while messages and messages[-1].role == "tool":
            done.add(messages.pop().call_id)
        return [each for each in messages[-1].calls if each.id not in done] if messages else []

    def take_result(self, call: Call, content: str, images: Iterable[str] = ()) -> Message:
        """What came of a call of the last answer's."""
        return self._add("tool", content, call_id=call.id, name=call.name, images=tuple(images))

    def undo(self) -> Message:
        """Takes the last question and its answer back, and returns the question. Raises UsageError where there is none."""
        question = self.asked()
        self._go(question.parent)
        return question

    def back_to_question(self) -> Message:
        """Takes the last answer back, for another one. Raises UsageError where there is no question."""
        question = self.asked()
        self._go(question.id)
        return question

    def before_answer(self) -> Message:
        """Takes the last answer back, for a longer one, and returns it. Raises UsageError where the last message is none."""
        answer = self.answered()
        self._go(answer.parent)
        return answer

    def clear(self) -> None:
        """Starts anew; the system prompt stays."""
        self._go(None)

    def tell(self, system: str | None) -> None:
        """Changes the system prompt; None leaves it out."""
        self._do({"event": "system", "content": system})

    def _add(self, role: Role, content: str, **more: Any) -> Message:
        message = Message(max(self._all, default=0) + 1, self._at, role, content, **more)
        self._do(_event_of(message))
        return message

    def _go(self, at: int | None) -> None:
        if at != self._at:
            self._do({"event": "at", "id": at})

    def _do(self, event: Event) -> None:
        self.record(event)
        self._apply(event)

    def _apply(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "message":
            message = _message_of(event)
            if message.id in self._all or not (message.parent is None or message.parent in self._all):
                raise SessionError(f"message {message.id} has no place in the conversation")
            self._all[message.id] = message
            self._at = message.id
        elif kind == "at":
            at = event.get("id")
            if at is not None and (not is_int(at) or at not in self._all):
                raise SessionError("the conversation goes on from a message that it does not have")
            self._at = at
        elif kind == "system":
            if not isinstance(event.get("content"), str | None):
                raise SessionError("a system prompt is no text")
            self.system = event.get("content")


def _event_of(message: Message) -> Event:
    fields = asdict(message)
    return {"event": "message"} | {name: fields[name] for name in fields if fields[name] or name in _ALWAYS}


def _message_of(event: Mapping[str, Any]) -> Message:
    """A message from a file: every field checked."""
    fields = {name: event[name] for name in Message.__slots__ if event.get(name) is not None}
    texts = all(_is_text(fields.get(name, "")) for name in ("content", "reasoning", "model", "call_id", "name"))
    ids = is_int(fields.get("id")) and (fields.get("parent") is None or is_int(fields["parent"]))
    kinds = fields.get("role") in get_args(Role) and fields.get("cut", "error") in get_args(Cut)
    images = fields.setdefault("images", ())
    seen = isinstance(images, list | tuple) and all(_is_text(each) and each.startswith(_IMAGE) for each in images)
    calls = fields.setdefault("calls", ())
    called = isinstance(calls, list | tuple) and all(map(_is_call, calls))
    if not (texts and ids and kinds and seen and called and "content" in fields):
        raise SessionError("a message has fields that make no sense")
    owners = {"images": ("user", "tool"), "calls": ("assistant",), "call_id": ("tool",), "name": ("tool",)}
    if any(fields.get(name) and fields["role"] not in roles for name, roles in owners.items()):
        raise SessionError("a message has fields that are another role's")
    if fields["role"] == "tool" and not (fields.get("call_id") and fields.get("name")):
        raise SessionError("a tool's result is of no call")
    fields |= {"images": tuple(images), "calls": tuple([Call(**each) for each in calls])}
    return Message(**{"parent": None} | fields)


def _is_call(value: object) -> bool:
    names = set(Call.__slots__)
    return isinstance(value, dict) and value.keys() == names and all(map(_is_text, value.values())) and bool(value["id"])


_ALWAYS = ("id", "parent", "content")
_IMAGE = "data:image/", SOUND, VIDEO


def is_int(value: object) -> bool:
    """And not true or false, which Python takes for numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Half a surrogate pair is none: no tokenizer takes it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
