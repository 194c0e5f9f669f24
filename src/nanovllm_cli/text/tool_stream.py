"""Text that comes in pieces, read as if it were whole: what every reader of tool calls works on.

A reader is a generator that walks through the text once, from left to right, and yields wherever it needs to see more. So
it reads like the format's grammar, and its time is linear in the text: nothing is looked at again but a tag's length at the
end of a piece. What a reader has taken for a call and could not finish becomes content again (`Broken`), to the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import NamedTuple, TypeVar

from nanovllm_cli.text.tool_calls import ToolCallDelta, is_object, joined_calls, new_call_id, placed

T = TypeVar("T")
Reading = Generator[None, None, T]
Reader = Callable[["CallStream"], Reading[None]]

MAX_HEADER_CHARS = 256
"""Most characters of a name, a key or an id in a call."""


class Broken(Exception):
    """What looked like a call is none."""


class CutOff(Exception):
    """The text ended inside a call."""


class Found(NamedTuple):
    """What one piece of text decided."""

    content: str
    calls: tuple[ToolCallDelta, ...]


class Pieces:
    """Text that waits in pieces. How long it is is asked at each new one, so it is known."""

    def __init__(self, text: str = "") -> None:
        self._pieces, self.size = [text], len(text)

    def __str__(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.size += len(text)


class CallStream:
    """One answer's text behind its reasoning. `push` and `finish` are its outside; the rest is for readers.

    whole: a call is given out once it is complete, so that a broken one is content; otherwise its arguments stream, and what
    follows the place where they break is content. single: only the first call counts. hidden: tags that no reader of the
    answer sees, where they turn out not to belong to a call.
    """

    def __init__(
        self,
        read: Reader,
        *,
        whole: bool = False,
        single: bool = False,
        hidden: tuple[str, ...] = (),
        id_chars: int = 24,
    ) -> None:
        self.text, self.position, self.ended = "", 0, False
        self.num_calls = 0
        self.broke_off = False  # the text ended within the arguments of a call
        self._whole, self._single, self._hidden, self._id_chars = whole, single, hidden, id_chars
        self._marked: list[str] | None = None  # what was read since the mark, before `text`
        self._mark = 0
        self._in_call = False
        self._arguments: list[str] = []  # of the call that has begun
        self._ids: set[str] = set()
        self._content: list[str] = []
        self._num_chars = 0  # of it
        self._calls: list[ToolCallDelta] = []
        self._held: list[ToolCallDelta] = []  # of a call that is not complete, where calls are given out whole
        self._space = Pieces()  # white space at the end of the content: a call's, if one follows
        self._waits = Pieces()  # a call, if a tag does not come
        self._behind_call = False
        self._reading = self._to_the_end(read)

    # ---- outside ----

    def push(self, text: str) -> Found:
        """What this piece decided."""
        if self._marked is not None:
            self._marked.append(self.text[self._mark : self.position])
        self.text = self.text[self.position :] + text
        self.position = self._mark = 0
        next(self._reading, None)
        return self._found()

    def finish(self) -> Found:
        """What was held back, once no more text comes. A call that was cut off stays as far as it came."""
        self.ended = True
        next(self._reading, None)
        self._content.append(str(self._space))
        return self._found()

    @property
    def saw_calls(self) -> bool:
        """Whether a call was found, or has begun."""
        return self.num_calls > 0 or self._in_call

    @property
    def num_held(self) -> int:
        """Characters at the end of what was pushed that are neither content nor a call's so far."""
        return len(self.text) - self.position + self._space.size + self._waits.size

    # ---- reading ----

    def peek(self) -> Reading[str]:
        """The next character. Raises CutOff at the end."""
        while self.position == len(self.text):
            if self.ended:
                raise CutOff
            yield
        return self.text[self.position]

    def take(self, count: int = 1) -> str:
        """The next characters, which a reader knows to be there."""
        self.position += count
        return self.text[self.position - count : self.position]

    def skip_space(self) -> Reading[str]:
        """The next character that is no white space."""
        while (char := (yield from self.peek())).isspace():
            self.position += 1
        return char

    def match(self, *tags: str) -> Reading[str]:
        """The longest of `tags` that stands here, taken; or nothing. Raises CutOff where the end leaves that open."""
        if not tags:
            return ""
        while True:
            rest = self.text[self.position : self.position + max(map(len, tags))]
            if not self.ended and any(len(tag) > len(rest) and tag.startswith(rest) for tag in tags):
                yield
                continue
            found = max((tag for tag in tags if rest.startswith(tag)), key=len, default="")
            if not found and self.ended and any(tag.startswith(rest) for tag in tags):
                raise CutOff
            self.position += len(found)
            return found

    def accept(self, *tags: str) -> Reading[str]:
        """`match`, behind white space: for what closes a call, which models forget."""
        yield from self.skip_space()
        return (yield from self.match(*tags))

    def expect(self, *tags: str) -> Reading[str]:
        """`accept`. Raises Broken where none of them stands."""
        found = yield from self.accept(*tags)
        if not found:
            raise Broken
        return found

    def until(self, *tags: str) -> Reading[tuple[str, str]]:
        """A short text and the tag that ends it; the tag is taken. Raises Broken where the text is too long for a header."""
        pieces: list[str] = []
        while True:
            yield from self.peek()
            if found := (yield from self.match(*tags)):
                return "".join(pieces), found
            if len(pieces) == MAX_HEADER_CHARS:
                raise Broken
            pieces.append(self.take())

    def word(self, goes_on: Callable[[str], bool], most: int) -> Reading[str]:
        """The next characters, as long as each of them goes on. Raises Broken where they are more than `most`."""
        pieces: list[str] = []
        while goes_on((yield from self.peek())):
            pieces.append(self.take())
            if len(pieces) > most:
                raise Broken
        return "".join(pieces)

    def pass_to(self, give: Callable[[str], None], *tags: str) -> Reading[str]:
        """Gives out text as it comes, up to one of `tags`, which is taken and returned. Raises CutOff."""
        firsts = frozenset(tag[0] for tag in tags)
        while True:
            yield from self.peek()
            start = at = self.position
            while at < len(self.text) and self.text[at] not in firsts:
                at += 1
            if at > start:
                give(self.take(at - start))
                continue
            if found := (yield from self.match(*tags)):
                return found
            give(self.take())

    def content_to(self, *tags: str) -> Reading[str]:
        """`pass_to` the content, where half a tag at the end is content, too."""
        try:
            return (yield from self.pass_to(self.content, *tags))
        except CutOff:
            self.content(self.take(len(self.text) - self.position))
            raise

    def hold_to(self, tag: str, begun: str) -> Reading[bool]:
        """Whether `tag` comes, which is taken; what stands in front of it, from `begun` on, is content then, and is next to be
        read where it does not come."""
        self._waits = Pieces(begun)
        try:
            yield from self.pass_to(self._waits.add, tag)
        except CutOff:
            self.text, self.position = str(self._waits) + self.take(len(self.text) - self.position), 0
            return False
        else:
            self.content(str(self._waits))
            return True
        finally:
            self._waits = Pieces()

    def attempt(self, reading: Reading[None], tag: str = "") -> Reading[None]:
        """A call, behind its tag. What turns out to be none is content."""
        self.mark(tag)
        try:
            yield from reading
            self.settle()
        except Broken:
            self.give_back()
        except CutOff:
            self.cut()

    def mark(self, tag: str = "") -> None:
        """What is read from here on, and the tag just taken, becomes content if the reader says Broken."""
        self._marked, self._mark = [], self.position - len(tag)

    def settle(self) -> None:
        """Nothing that was read so far becomes content any more."""
        self._marked = None

    def give_back(self) -> None:
        """What was read since the mark is content."""
        if self._marked is not None:
            text = "".join(self._marked) + self.text[self._mark : self.position]
            if self._in_call and not self._whole:  # it is out and can't be taken back
                self.num_calls += 1
            self._marked, self._in_call, self._held = None, False, []
            for tag in self._hidden:
                text = text.replace(tag, "")
            self.content(text)

    # ---- writing ----

    def content(self, text: str) -> None:
        """Text for the reader of the answer. White space next to a call belongs to the call."""
        if self._behind_call:
            text = text.lstrip()
            if not text:
                return
            self._behind_call = False
        kept = text.rstrip()
        if not kept:
            self._space.add(text)
            return
        self._content += (str(self._space), kept)
        self._num_chars += self._space.size + len(kept)
        self._space = Pieces(text[len(kept) :])

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins: its name is known. call_id: the model's, which counts if it is the first of that name."""
        self._in_call, self._arguments = True, []
        if not call_id or call_id in self._ids:
            call_id = new_call_id(self._id_chars)
        self._ids.add(call_id)
        self._give(ToolCallDelta(self.num_calls, call_id, name, ""))

    def arguments(self, piece: str) -> None:
        """A piece of the JSON text of the arguments of the call that has begun."""
        if piece:
            self._arguments.append(piece)
            self._give(ToolCallDelta(self.num_calls, None, None, piece))

    def end(self) -> None:
        """The call is complete."""
        if not (self._single and self.num_calls):
            self._calls += placed(self._held, self._num_chars)
        self._held, self._marked, self._in_call, self._space = [], None, False, Pieces()
        self.num_calls += 1
        self._behind_call = True

    def drop(self) -> None:
        """What was read since the mark is neither a call for the caller nor content."""
        self.settle()
        self._space, self._behind_call = Pieces(), True

    def cut(self) -> None:
        """The text ended: a call that has begun stays as far as it came; what only looked like one is content."""
        self.position = len(self.text)
        if self._in_call:
            self.broke_off = not is_object("".join(self._arguments))
            self.end()
        else:
            self.give_back()

    def _to_the_end(self, read: Reader) -> Reading[None]:
        with suppress(CutOff):
            yield from read(self)

    def _give(self, delta: ToolCallDelta) -> None:
        if self._whole:
            self._held.append(delta)
        else:
            if not (self._single and self.num_calls):
                self._calls += placed([delta], self._num_chars)
            self._space = Pieces()
            self.mark()

    def _found(self) -> Found:
        content, self._content, self._num_chars = "".join(self._content), [], 0
        calls, self._calls = self._calls, []
        return Found(content, joined_calls(calls))
