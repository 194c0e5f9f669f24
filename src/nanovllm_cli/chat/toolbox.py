"""Tools that a model may call in a conversation: what there is, who may be called unasked, and what came of it.

A model's calls are untrusted: what it calls, and with what, follows from all that it has read. So a person is asked before each,
unless they have said that this tool needs no asking.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm_cli.chat.conversation import Call, counted_images
from nanovllm_cli.cli.answering import Answer
from nanovllm_cli.cli.question import WORDS, kind_of
from nanovllm_cli.cli.table import shortened
from nanovllm_cli.errors import NanovllmError, RequestError, UnsupportedError
from nanovllm_cli.text.tool_calls import is_object, new_call_id

MAX_RESULT_CHARS = 200_000
MAX_IMAGES = 16
"""Of one result."""
MAX_ROUNDS = 50
"""Of calls behind one message; a model may call tools for ever."""

REFUSED = "The user did not allow this call."
NAMELESS = "nameless"
"""A tool that a server's call does not name: there is none, which its model is told."""


class Outcome(NamedTuple):
    """Of a call. images: data URLs, of sounds, too."""

    text: str
    images: tuple[str, ...] = ()


class Tool(NamedTuple):
    """name: by which the model calls it. origin: whose it is. parameters: the JSON schema of its arguments."""

    name: str
    origin: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolSource(Protocol):
    """Where tools run."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The first time they may have to be waited for. Raises NanovllmError."""

    def check(self) -> None:
        """Raises NanovllmError where it is known that they do not come."""

    def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """What it gives. Raises NanovllmError where it fails, and KeyboardInterrupt, which stops it."""


def not_shown(url: str) -> None:
    """To a model of which nobody knows whether it could be shown anything."""
    raise UnsupportedError("not shown here")


@dataclass
class Toolbox:
    """allowed: names and patterns of names that need no asking. ask: for a person's answer, behind what `show` has shown of the
    call; None where nobody can be asked. tell: what happens, for who wants to know. look: at a data URL, whether the model can be
    shown it; raises NanovllmError where it cannot. after_stop: what goes on with a call that was stopped."""

    source: ToolSource
    allowed: Sequence[str] = ()
    ask: Callable[[], str | None] = lambda: None
    show: Callable[[str], None] = lambda line: None
    tell: Callable[[str], None] = lambda line: None
    look: Callable[[str], object] = not_shown
    after_stop: str = "; /continue goes on with it"
    _always: set[str] = field(default_factory=set, init=False)

    @property
    def tools(self) -> Sequence[Tool]:
        return self.source.tools

    def for_template(self) -> list[dict[str, Any]]:
        return [each.for_template() for each in self.tools]

    def needs_no_asking(self, name: str) -> bool:
        return name in self._always or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allowed)

    def forget(self) -> None:
        """What a person allowed always was for one conversation."""
        self._always.clear()

    def follow(
        self, calls: Sequence[Call], take: Callable[[Call, Outcome], object], again: Callable[[], Sequence[Call]], hint: str
    ) -> None:
        """Runs an answer's calls, hands each result to `take` and has the model answer `again`, which says what that calls; until
        it calls nothing. Raises RequestError, with the hint, where that does not end, and KeyboardInterrupt."""
        for _ in range(MAX_ROUNDS):
            if not calls:
                return
            self.run_all(calls, take)
            calls = again()
        if calls:
            raise RequestError(f"the model has called tools {MAX_ROUNDS} times", hint)

    def run_all(self, calls: Sequence[Call], take: Callable[[Call, Outcome], object]) -> None:
        """One behind the other."""
        for call in calls:
            take(call, self.run(call))

    def run(self, call: Call) -> Outcome:
        """What the model is told of its call, and shown. Raises KeyboardInterrupt."""
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return self._failed(call, "the arguments are no JSON object")
        tool = next((each for each in self.tools if each.name == call.name), None)
        if tool is None:
            return self._failed(call, f"there is no tool {call.name}")
        try:
            if self.needs_no_asking(call.name):
                self.tell(f"calling {call.name} {_shown(arguments)}")
            elif not self._is_allowed(tool, arguments):
                return Outcome(REFUSED)
            result = self.source.call(call.name, arguments)
        except KeyboardInterrupt:
            self.tell(f"{call.name} was stopped{self.after_stop}")
            raise
        except NanovllmError as error:
            return self._failed(call, error.message)
        seen = self._seen(result)
        if seen.images:
            self.tell(f"{call.name} showed {counted_images(seen.images)}")
        return seen

    def _seen(self, found: Outcome) -> Outcome:
        """With those images that the model can be shown, and of the others, that they were there."""
        lines, images = [found.text] if found.text else [], list[str]()
        for url in found.images:
            try:
                if len(images) == MAX_IMAGES:
                    raise UnsupportedError(f"of one result {MAX_IMAGES} are shown")
                self.look(url)
            except NanovllmError as error:
                lines.append(f"[{WORDS[kind_of(url)]}: {error.message}]")
            else:
                images.append(url)
        return Outcome(_bounded("\n".join(lines)), tuple(images))

    def _is_allowed(self, tool: Tool, arguments: dict[str, Any]) -> bool:
        """By a person, who is shown all of the call: a line each, as one of many could hide the rest."""
        name = tool.name
        for line in f"{name}, of {tool.origin}: {_shown(arguments, indent=2)}".split("\n"):
            self.show(line)
        while True:
            try:
                said = self.ask()
            except EOFError:
                said = "no"
            if said is None:
                self.tell(f"{name} was not run: nobody can be asked here; --allow {name} lets it run")
                return False
            word = said.strip().lower()
            if word in ("a", "always"):
                self._always.add(name)
            if word in ("y", "yes", "a", "always"):
                return True
            if word in ("", "n", "no"):
                self.tell(f"{name} was not run")
                return False

    def _failed(self, call: Call, why: str) -> Outcome:
        self.tell(f"{shortened(call.name, 100)} failed: {shortened(' '.join(why.split()), 300)}")
        return Outcome(_bounded(f"Error: {why}"))


def calls_of(answer: Answer, *, is_whole: bool) -> list[Call]:
    """What an answer calls; of one that was cut, what came as a whole."""
    whole = [each for each in answer.calls if is_whole or is_object(each.arguments)]
    return [Call(each.id or new_call_id(), each.name or NAMELESS, each.arguments) for each in whole]


def _bounded(result: str) -> str:
    if len(result) <= MAX_RESULT_CHARS:
        return result
    return f"{result[:MAX_RESULT_CHARS]}\n[cut: the result has {len(result):,} characters]"


def _shown(arguments: dict[str, Any], indent: int | None = None) -> str:
    """As JSON in which nothing is hidden: what is not printed, such as marks that turn a text's direction, is escaped."""
    text = json.dumps(arguments, ensure_ascii=False, indent=indent)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
