"""Readers that split an answer into its reasoning and its content while it streams, one for each way to mark them.

Everything here is a scan in one pass for fixed strings: the text is a model's, and a cleverer regular expression over it could be
made slow. Text that may turn out to be the beginning of a tag waits until it is decided.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from nanovllm_cli.text.tool_stream import Pieces


class ReasoningDelta(NamedTuple):
    """What one piece of text decided."""

    reasoning: str
    content: str


class ReasoningSplitter(Protocol):
    """One answer, split while it comes."""

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that are not decided."""

    def push(self, text: str) -> ReasoningDelta:
        """What this piece of text decided."""

    def finish(self) -> ReasoningDelta:
        """What was held back, once no more text comes."""


class ReasoningParser:
    """Splits at one pair of tags. Reasoning comes first in an answer or not at all; later tags are content.

    White space around the tags is dropped. A closing tag without a block (the model's, or one that the prompt opened)
    is dropped from the content: what came before it has been given out. `split` knows the whole answer and does better.
    """

    def __init__(
        self,
        open: str = "<think>",
        close: str = "</think>",
        *,
        starts_inside: bool = False,
        starts_after: bool = False,
        calls: tuple[str, ...] = (),
        ends: str = "",
    ) -> None:
        """starts_inside: the prompt opened the block. starts_after: it closed it, too. calls: what begins a tool call, which a
        closing tag behind it is part of. ends: what begins one in reasoning, too, where nothing closes that any more."""
        self._open, self._close, self._calls = open, close, calls
        self._turns = (close, ends) if ends else (close,)
        self._state = "inside" if starts_inside else "content" if starts_after else "before"
        self._seen_block = starts_after
        self._may_repeat = starts_inside  # a model may write the tag that the prompt wrote once more
        self._trim = True  # white space at the beginning of a part is the tag's, not the part's
        self._held = ""  # perhaps the beginning of a tag
        self._space = Pieces()  # white space whose side is not known yet
        self._call = Pieces()  # inside of reasoning

    @property
    def num_held(self) -> int:
        return len(self._held) + self._space.size + self._call.size

    def push(self, text: str) -> ReasoningDelta:
        held, self._held = self._held + text, ""
        reasoning = content = ""
        if self._state == "before":
            held = self._before(held)
        if self._state == "inside":
            reasoning, held = self._inside(held)
        if self._state == "call":
            more, held = self._in_call(held)
            reasoning += more
        if self._state == "content":
            content = self._content(held)
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        """An unfinished tag is text; an unclosed block is reasoning."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return ReasoningDelta(self._reason(held), "")
        if self._state == "call":
            return ReasoningDelta("", str(self._call) + held)
        if self._state == "before":
            held = str(self._space) + held
        return ReasoningDelta("", self._trimmed(held) if self._state == "content" else held)

    def _before(self, text: str) -> str:
        """Only white space so far: decides whether a block begins, and returns what is left to read."""
        start = text.lstrip()
        self._space.add(text[: len(text) - len(start)])
        if start.startswith(self._open):
            self._state, self._space = "inside", Pieces()
            return start[len(self._open) :]
        if self._open.startswith(start):
            self._held = start
            return ""
        self._state, self._trim = "content", False
        space, self._space = str(self._space), Pieces()
        return space + start

    def _inside(self, text: str) -> tuple[str, str]:
        """Reasoning, and what follows it once it is closed."""
        if self._may_repeat:
            start = text.lstrip()
            if self._open.startswith(start) and start != self._open:
                self._held = start
                return "", ""
            text, self._may_repeat = start.removeprefix(self._open), False
        found = [place for tag in self._turns if (place := text.find(tag)) >= 0]
        cut = min(found, default=len(text) - max(overlap(text, tag) for tag in self._turns))
        reasoning, text = self._reason(text[:cut]), text[cut:]
        if not found:
            self._held = text
            return reasoning, ""
        if text.startswith(self._close):
            return reasoning, self._closed(text)
        self._state = "call"
        return reasoning, text

    def _in_call(self, text: str) -> tuple[str, str]:
        """As `_inside`: what looks like a call was reasoning if that is closed behind it."""
        at = text.find(self._close)
        if at < 0:
            cut = len(text) - overlap(text, self._close)
            self._call.add(text[:cut])
            self._held = text[cut:]
            return "", ""
        reasoning, self._call = self._reason(str(self._call) + text[:at]), Pieces()
        return reasoning, self._closed(text[at:])

    def _closed(self, text: str) -> str:
        """What is behind the closing tag."""
        self._state, self._seen_block, self._trim, self._space = "content", True, True, Pieces()
        return text.removeprefix(self._close)

    def _content(self, text: str) -> str:
        if self._seen_block:
            return self._trimmed(text)
        before, close, behind = text.partition(self._close)
        if any(tag in before for tag in self._calls):
            self._seen_block = True
            return self._trimmed(text)
        if close:
            before, self._seen_block, self._trim = self._trimmed(before), True, True
            return before + self._trimmed(behind)
        cut = len(text) - max(overlap(text, tag) for tag in (self._close, *self._calls))
        self._held = text[cut:]
        return self._trimmed(text[:cut])

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text

    def _reason(self, text: str) -> str:
        """Reasoning without the white space next to its tags: what ends a piece waits for what follows."""
        text = self._trimmed(text)
        kept = text.rstrip()
        if not kept:
            if text:
                self._space.add(text)
            return ""
        out = str(self._space) + kept
        self._space = Pieces(text[len(kept) :])
        return out


class BlockParser:
    """Splits at every pair of tags: Gemma 4 also thinks in the middle of an answer, or opens and closes a thought without a word.

    White space around a block is dropped, and two parts of a kind are a paragraph each. A tag without its other half, and a
    `marker` that begins no block, are nothing.
    """

    def __init__(self, open: str, close: str, *, marker: str, starts_inside: bool = False) -> None:
        """`marker`: the special token that `open` begins with."""
        self._open, self._close = open, close
        self._tags = re.compile("|".join(re.escape(tag) for tag in (open, close, marker)))
        self._marker = marker
        self._inside = starts_inside
        self._trim = starts_inside  # white space at the beginning of a part is the tag's, not the part's
        self._has_given = {True: False, False: False}
        self._held = ""  # perhaps the beginning of a tag
        self._space = Pieces()  # white space that is dropped if a tag follows

    @property
    def num_held(self) -> int:
        return len(self._held) + self._space.size

    def push(self, text: str) -> ReasoningDelta:
        text, position = self._held + text, 0
        given: dict[bool, list[str]] = {True: [], False: []}
        while match := self._tags.search(text, position):
            if match.group() == self._marker and self._open.startswith(text[match.start() :]):
                break
            self._give(text[position : match.start()], given)
            self._turn(match.group())
            position = match.end()
        rest = text[position:]
        cut = len(rest) - max(overlap(rest, self._open), overlap(rest, self._close))
        self._give(rest[:cut], given)
        self._held = rest[cut:]
        return ReasoningDelta("".join(given[True]), "".join(given[False]))

    def finish(self) -> ReasoningDelta:
        """An unfinished tag is text; an unclosed block is reasoning."""
        held, self._held = self._held, ""
        given: dict[bool, list[str]] = {True: [], False: []}
        self._give("" if held.startswith(self._marker) else held, given)
        if not self._inside:
            given[False].append(str(self._space))
        return ReasoningDelta("".join(given[True]), "".join(given[False]))

    def _turn(self, tag: str) -> None:
        """A tag that changes nothing is taken out, and that is all."""
        inside = tag == self._open
        if tag != self._marker and inside != self._inside:
            self._inside, self._trim, self._space = inside, True, Pieces()

    def _give(self, text: str, given: dict[bool, list[str]]) -> None:
        if self._trim:
            text = text.lstrip()
            if not text:
                return
            self._trim, self._space = False, Pieces("\n\n" if self._has_given[self._inside] else "")
        kept = text.rstrip()
        if kept:
            given[self._inside] += (str(self._space), kept)
            self._has_given[self._inside], self._space = True, Pieces()
        self._space.add(text[len(kept) :])


class Wrap(NamedTuple):
    """Tags that some models put around their content. opens: any of them may begin it; where there are none, it is known to have
    begun. close: ends it."""

    opens: tuple[str, ...]
    close: str


class Unwrapper:
    """Takes such tags away, and the white space next to them. Content that does not begin with one stays as it is."""

    def __init__(self, wrap: Wrap) -> None:
        self._opens, self._close = sorted(wrap.opens, key=len, reverse=True), wrap.close
        self._state = "before" if wrap.opens else "inside"
        self._trim = False  # white space at the beginning is a tag's
        self._held = ""  # perhaps the beginning of a tag
        self._space = Pieces()  # white space that is dropped if a tag follows

    @property
    def num_held(self) -> int:
        return len(self._held) + self._space.size

    def push(self, text: str) -> str:
        given: list[str] = []
        text, self._held = self._held + text, ""
        while text:
            if self._state == "before":
                text = self._open(text)
            elif self._state == "inside":
                text = self._to_close(text, given)
            else:
                self._rest(text, given)
                break
        return "".join(given)

    def finish(self) -> str:
        """An unfinished tag is text."""
        space = "" if self._trim and not self._held else str(self._space)
        held, self._held, self._space = space + self._held, "", Pieces()
        return held

    def _open(self, text: str) -> str:
        """What is left behind the tag that begins here; all of it where none does."""
        start = text.lstrip()
        self._space.add(text[: len(text) - len(start)])
        if any(tag.startswith(start) and tag != start for tag in self._opens):
            self._held = start
            return ""
        space, self._space = str(self._space), Pieces()
        for tag in self._opens:
            if start.startswith(tag):
                self._state, self._trim = "inside", True
                return start[len(tag) :]
        self._state = "plain"
        return space + start

    def _rest(self, text: str, given: list[str]) -> None:
        """What stands in no tags. White space behind the last one counts where something follows it."""
        if self._trim:
            self._space.add(text)
            if text.isspace():
                return
            text, self._space, self._trim = str(self._space), Pieces(), False
        given.append(text)

    def _to_close(self, text: str, given: list[str]) -> str:
        """What is left behind the tag that ends the content, if it is here."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        at = text.find(self._close)
        end = at if at >= 0 else len(text) - overlap(text, self._close)
        kept = text[:end].rstrip()
        if kept:
            given += (str(self._space), kept)
            self._space = Pieces()
        if at >= 0:
            self._space, self._trim = Pieces(), True
            self._state = "before" if self._opens else "plain"
            return text[at + len(self._close) :]
        self._space.add(text[len(kept) : end])
        self._held = text[end:]
        return ""


class WrappedParser:
    """Another's parts, the content without the tags around it."""

    def __init__(self, inner: ReasoningSplitter, wrap: Wrap) -> None:
        self._inner, self._unwrapper = inner, Unwrapper(wrap)

    @property
    def num_held(self) -> int:
        return self._inner.num_held + self._unwrapper.num_held

    def push(self, text: str) -> ReasoningDelta:
        reasoning, content = self._inner.push(text)
        return ReasoningDelta(reasoning, self._unwrapper.push(content))

    def finish(self) -> ReasoningDelta:
        reasoning, content = self._inner.finish()
        return ReasoningDelta(reasoning, self._unwrapper.push(content) + self._unwrapper.finish())


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` are a beginning of `tag`, short of all of it."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
