"""What a family's way to write tool calls is made of: a row of `tool_formats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm_cli.text.tool_grammar import CallGrammar, HarmonyGrammar
from nanovllm_cli.text.tool_harmony import ReadBody
from nanovllm_cli.text.tool_sections import ReadSection, Tools
from nanovllm_cli.text.tool_stream import CallStream, Reader, Reading


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. openers: what begins a call; tags: everything that must stay in the text for the reader.

    signs: a chat template with all of one of these writes it. section: reads what follows an opener. grammar: of calls that
    must come. bare: reads calls without a tag, at the beginning. id_chars: of an id's letters. by_token: so does a template
    that says nothing, of a model whose vocabulary has the opener as a special token. in_reasoning: what begins a call where its
    models forget to close their reasoning. opened: what ends a prompt behind which the first opener is left out.
    body: of families whose calls are messages of their own, reads one's body, and not section.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    section: ReadSection
    grammar: CallGrammar | HarmonyGrammar
    bare: ReadSection | None = None
    id_chars: int = 24
    by_token: bool = False
    in_reasoning: str = ""
    opened: str = ""
    body: ReadBody | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return self.openers + self.closers

    def reader(
        self,
        tools: Tools,
        hidden: Sequence[str] = (),
        kept: tuple[str, str] | None = None,
        starts_kept: bool = False,
        is_open: bool = False,
    ) -> Reader:
        """Reads an answer. hidden: tags to leave out of the content. kept: tags between which nothing is a call, and which are
        content; starts_kept: the prompt wrote the first of them. is_open: it wrote the first opener."""

        def read(stream: CallStream) -> Reading[None]:
            keeps = kept
            if keeps and starts_kept and not (yield from _keep(stream, keeps[1], self.in_reasoning)):
                keeps = None
            if is_open:
                yield from stream.attempt(self.section(stream, "", tools))
            if self.bare is not None:
                yield from stream.attempt(self.bare(stream, "", tools))
            while True:
                tag = yield from stream.content_to(*self.openers, *hidden, *(keeps[:1] if keeps else ()))
                if tag in self.openers:
                    yield from stream.attempt(self.section(stream, tag, tools), tag)
                elif keeps and tag == keeps[0]:
                    stream.content(tag)
                    keeps = keeps if (yield from _keep(stream, keeps[1], self.in_reasoning)) else None

        return read


def read_plain(hidden: Sequence[str]) -> Reader:
    """Leaves tags out of a text without calls."""

    def read(stream: CallStream) -> Reading[None]:
        while True:
            yield from stream.content_to(*hidden)

    return read


def _keep(stream: CallStream, close: str, begins: str) -> Reading[bool]:
    """Content up to the tag. begins: what begins a call all the same where the tag does not come any more; returns False then,
    and the call is next."""
    tag = yield from stream.content_to(*filter(None, (close, begins)))
    if tag != close and not (yield from stream.hold_to(close, tag)):
        return False
    stream.content(close)
    return True
