"""The token ids of the next turn, chosen so that what the engine has read before is not read again.

The text is what the chat template makes of the conversation. The ids of its beginning are taken from the last turn where the
text there is the same: the engine finds their K and V in its prefix cache, and the tokens of an answer stay those that the
model drew, though they may not be how a tokenizer would write its text. A template that leaves the reasoning of earlier turns
out changes the text, and what follows is read again; only an empty block of reasoning stays where it was (`graft`). Tokens that
stand for an image mean the same only as those of the same image in the same place.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanovllm_cli.chat.conversation import Call, Message
from nanovllm_cli.cli.question import LACKS, WORDS, kind_of
from nanovllm_cli.errors import NanovllmError, PromptTooLongError, UsageError
from nanovllm_cli.prompts import num_equal
from nanovllm_cli.senses import kinds_of, read_parts
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, VIDEOS, ImagePart
from nanovllm_cli.vision_spec import PlacedImage, TokenIds

if TYPE_CHECKING:
    from nanovllm_cli.cli.model import MakeSplitter, Prompting, Splitter

# Where the context is full, a quarter of it is made free: the next turns find the rest in the prefix cache.
_FREE_SHARE = 4
_COMMANDS = {IMAGES: "image", SOUNDS: "audio", VIDEOS: "video"}
NOT_RUN = "This was not run."
OVERFLOW_HINT = "/undo or /clear makes room; --context-overflow shift drops the oldest turns; -c raises the limit"


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids, with their images, and what splits the answer to them. num_dropped: messages at the beginning that found no room."""

    ids: TokenIds
    splitter: MakeSplitter | None
    num_dropped: int = 0


@dataclass
class Prompts:
    """Makes prompts for one model. `kept`: what the engine has read last, answer included."""

    prompting: Prompting
    shifts: bool
    kept: Sequence[int] = ()
    _num_dropped: int = field(default=0, init=False)

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer together."""
        return self.prompting.llm.max_model_len

    def start_over(self) -> None:
        """Other messages than before: the first of them has room again."""
        self._num_dropped = 0

    def next(self, system: str | None, messages: Sequence[Message]) -> Prompt:
        """For an answer to the last message. Raises PromptTooLongError where it has no room, TemplateError, UsageError."""
        ids, dropped = self._fitting(system, messages, self._encode)
        return Prompt(self._grafted(ids), self.prompting.parser_for(ids), dropped)

    def going_on(self, system: str | None, messages: Sequence[Message]) -> Prompt:
        """For more of the last message, which is an answer. Raises as `next` does."""
        ids, dropped = self._fitting(system, messages, self._encode_unfinished)
        last = messages[-1]
        if last.content or not last.reasoning:
            return Prompt(self._grafted(ids), self.prompting.parser_for(ids), dropped)
        splitter = self.prompting.parser_for(self._opened(self._encode(system, messages[dropped:-1])))
        assert splitter is not None, "there was reasoning"

        def within() -> Splitter:
            parser = splitter()
            parser.push(last.reasoning)
            return parser

        return Prompt(self._grafted(ids), within, dropped)

    def count(self, system: str | None, messages: Sequence[Message]) -> int:
        """Tokens that the conversation has now; where the template refuses it as it is, of its texts alone."""
        messages = messages[min(self._num_dropped, len(messages)) :]
        if not messages and system is None:
            return 0
        try:
            return len(self._encode(system, messages))
        except NanovllmError:
            return self.tokens_of([system or "", *(each.content for each in messages)])

    def tokens_of(self, texts: Iterable[str]) -> int:
        encode = self.prompting.llm.tokenizer.encode
        return sum(len(encode(text, add_special_tokens=False, parse_special=False)) for text in texts if text)

    def tokens_of_image(self, url: str, where: str) -> int:
        """0 where the model reads none. Raises UsageError for what is no image, or damaged."""
        senses, kind = self.prompting.llm.senses, kind_of(url)
        if senses is None or kind not in kinds_of(senses):
            return 0
        (image,) = read_parts([ImagePart(url, where, kind)], senses)
        return senses.num_tokens(image)

    def _fitting(
        self,
        system: str | None,
        messages: Sequence[Message],
        encode: Callable[[str | None, Sequence[Message]], list[int]],
    ) -> tuple[list[int], int]:
        """Ids with room for an answer, and how many messages were dropped for it."""
        starts = [at for at, each in enumerate(messages) if each.role == "user"] or [0]
        first = bisect.bisect_left(starts, self._num_dropped) if self.shifts else 0
        first = min(first, len(starts) - 1)
        ids = encode(system, messages[starts[first] :])
        if len(ids) >= self.limit and self.shifts:
            goal = self.limit - self.limit // _FREE_SHARE
            later = range(first + 1, len(starts))
            at = bisect.bisect_left(later, True, key=lambda n: len(encode(system, messages[starts[n] :])) <= goal)
            first = min(first + 1 + at, len(starts) - 1)
            ids = encode(system, messages[starts[first] :])
        if len(ids) >= self.limit:
            raise PromptTooLongError(len(ids), self.limit, None if self.shifts else OVERFLOW_HINT)
        self._num_dropped = starts[first]
        return ids, starts[first]

    def _encode(self, system: str | None, messages: Sequence[Message]) -> list[int]:
        return self.prompting.encode(self._told(system, messages))

    def _encode_unfinished(self, system: str | None, messages: Sequence[Message]) -> list[int]:
        *before, last = messages
        if last.content or not last.reasoning:
            return self.prompting.encode_unfinished([*self._told(system, before), last.for_template()])
        tokenizer = self.prompting.llm.tokenizer
        opened = self._opened(self._encode(system, before))
        return opened + tokenizer.encode(last.reasoning, add_special_tokens=False, parse_special=False)

    def _told(self, system: str | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """As the template takes it. Raises UsageError for images, sounds or videos of a conversation that was with another
        model."""
        llm = self.prompting.llm
        does = {IMAGES: llm.vision, SOUNDS: llm.hearing, VIDEOS: None if llm.vision is None else llm.vision.video}
        for kind in (kind_of(url) for each in messages for url in each.images):
            if does[kind] is None:
                name, command = f"{WORDS[kind]}s", _COMMANDS[kind]
                hint = f'/model NAME takes another model; /undo, /clear or /{command} "" leaves {name} out'
                raise UsageError(f"{llm.name} {LACKS[kind]}, and the conversation has {name}", hint)
        return for_template(system, messages)

    def _opened(self, ids: list[int]) -> list[int]:
        """A prompt that ends where reasoning begins."""
        from nanovllm_cli.text.reasoning import prompt_opens_reasoning

        known = self.prompting.reasoning()
        if known is None or known.messages is not None:
            raise UsageError("the answer was cut in its reasoning", "/regen asks for another one")
        if prompt_opens_reasoning(self.prompting.tail(ids), known):
            return ids
        return ids + self.prompting.llm.tokenizer.encode(known.open + "\n", add_special_tokens=False)

    def _grafted(self, ids: list[int]) -> TokenIds:
        known = self.prompting.reasoning()
        empty = None
        if known is not None:
            empty = re.compile(re.escape(known.open.encode()) + rb"\s*" + re.escape(known.close.encode()) + rb"\s*")
        return graft(self.kept, ids, self.prompting.llm.tokenizer.id_to_bytes, empty)


def graft(
    kept: Sequence[int], fresh: Sequence[int], piece: Callable[[int], bytes], empty: re.Pattern[bytes] | None = None
) -> TokenIds:
    """`fresh` with as much of its beginning as possible replaced by ids of `kept` that mean the same: text, and the same images
    in it.

    piece: the bytes of a token. empty: a block without a content that `kept` may have where `fresh` has nothing, such as the
    empty reasoning that templates write before an answer and leave out once it is past: it stays, because without it
    everything behind would have to be read again. Time is linear.
    """
    ours, theirs = images_of(kept), images_of(fresh)
    i = j = 0  # kept[:i] means what fresh[:j] does, and has as many images
    for image, other in zip([*ours, None], [*theirs, None], strict=False):
        end = len(kept) if image is None else image.start, len(fresh) if other is None else other.start
        same = _same_text(kept[i : end[0]], fresh[j : end[1]], piece, empty)
        i, j = i + same[0], j + same[1]
        if image is None or other is None or (i, j) != end or image._replace(start=other.start) != other:
            break
        i, j = image.end, other.end
    moved = [other._replace(start=other.start + i - j) for other in theirs if other.start >= j]
    return TokenIds([*kept[:i], *fresh[j:]], [*(image for image in ours if image.start < i), *moved])


def images_of(ids: Sequence[int]) -> tuple[PlacedImage, ...]:
    """Those that some of these tokens stand for."""
    return ids.images if isinstance(ids, TokenIds) else ()


def _same_text(
    kept: Sequence[int], fresh: Sequence[int], piece: Callable[[int], bytes], empty: re.Pattern[bytes] | None
) -> tuple[int, int]:
    """How many tokens of `kept` say what so many of `fresh` do: the most at which both have a border. See `graft`."""
    same = num_equal(kept, fresh)
    rest = b"".join(map(piece, fresh[same:]))
    starts = {0: same}  # offset in `rest` -> token of `fresh` that begins there
    at = 0
    for index in range(same, len(fresh)):
        at += len(piece(fresh[index]))
        starts.setdefault(at, index + 1)
    blocks = _blocks(kept, piece, empty) if empty is not None else {}
    index, at, best, passed_by = same, 0, (same, same), 0
    while index < len(kept):
        text = piece(kept[index])[passed_by:]
        if text and rest.startswith(text, at):
            index, at, passed_by = index + 1, at + len(text), 0
            if at in starts:
                best = (index, starts[at])
        elif index in blocks and not passed_by:
            index, passed_by = blocks[index]
        else:
            break
    return best


def _blocks(
    ids: Sequence[int], piece: Callable[[int], bytes], pattern: re.Pattern[bytes]
) -> dict[int, tuple[int, int]]:
    """For matches of `pattern` that begin with a token: that token -> the one where they end, and how many of its bytes they
    take (the white space behind a block may belong to a word)."""
    starts = [0, *itertools.accumulate(len(piece(token_id)) for token_id in ids)]
    found = {}
    for match in pattern.finditer(b"".join(map(piece, ids))):
        first = bisect.bisect_left(starts, match.start())
        last = bisect.bisect_right(starts, match.end()) - 1
        if starts[first] == match.start():
            found[first] = (last, match.end() - starts[last])
    return found


def for_template(system: str | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as templates and servers take it: each call of a tool has a result, if only that there is none."""
    told: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    waiting: dict[str | None, Call] = {}

    def missing() -> list[dict[str, Any]]:
        results = [Message(0, None, "tool", NOT_RUN, call_id=call.id, name=call.name) for call in waiting.values()]
        return [each.for_template() for each in results]

    for each in messages:
        if each.role != "tool":
            told += missing()
            waiting = {call.id: call for call in each.calls}
        waiting.pop(each.call_id, None)
        told.append(each.for_template())
    return told + missing()
