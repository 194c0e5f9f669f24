"""One answer's way through its reasoning and its constraint: what may be drawn next.

Three parts. `opening`: the answer may begin with the tag that opens reasoning, or with what the constraint allows; both are
followed until one of them is ruled out. `inside`: everything goes, but where there is a constraint, the end. When the budget is
used up, the tokens of the closing tag are forced, one by one. `answer`: what the constraint allows; the ids that end an answer
are allowed where its grammar may end, and at no other time.

A grammar that is fulfilled and cannot go on ends the answer, without a token that says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal, NamedTuple, Self

import numpy as np

from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary, Words
from nanovllm_cli.constraint import ReasoningPhase
from nanovllm_cli.errors import RequestError

MAX_ROLLBACK = 64
"""Tokens that can be taken back: more than anybody guesses ahead."""

Part = Literal["opening", "inside", "answer"]


class _Place(NamedTuple):
    """Where an answer is. text: what may be the beginning of a tag. forced: tokens that come next. num_reasoning: tokens inside.
    num_followed: tokens that the matcher has taken; follows: whether it takes the next. led: those of the opening."""

    part: Part
    text: bytes = b""
    forced: tuple[int, ...] = ()
    num_reasoning: int = 0
    num_followed: int = 0
    follows: bool = True
    led: tuple[int, ...] = ()


class Guide:
    """matcher: at its beginning, and this guide's own; None without a constraint. stop_ids: what ends the answer.

    Raises RequestError or UnmeetableError where it can't go on; only this answer is lost.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: Matcher | None,
        reasoning: ReasoningPhase | None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.matcher = matcher
        self._vocabulary = vocabulary
        self._reasoning = reasoning
        self._stops = vocabulary.mask(stop_ids)
        self._stop_ids = frozenset(stop_ids)
        self._past: deque[_Place] = deque(maxlen=MAX_ROLLBACK)
        self._ended = False
        if reasoning is None:
            self._place = _Place("answer")
        elif reasoning.starts_inside:
            self._place = self._inside(b"", 0)
        else:
            self._place = _Place("opening")

    @property
    def num_words(self) -> int:
        return self._vocabulary.num_words

    @property
    def asks_matcher(self) -> bool:
        """Whether the next mask needs the matcher's."""
        place = self._place
        return self.matcher is not None and place.part != "inside" and place.follows and not self.is_complete

    @property
    def may_say(self) -> bool:
        """Whether `allows` is worth a question."""
        place = self._place
        if self.matcher is None or place.forced:
            return False
        return place.part == "inside" or (place.part == "answer" and self.asks_matcher)

    def allows(self, token_id: int) -> bool | None:
        """Whether the next mask allows a token, in some microseconds. None: only the mask can say."""
        if self.matcher is None or not self.may_say or token_id in self._stop_ids:
            return None
        if not (0 <= token_id < self._vocabulary.end_id) or token_id in self._vocabulary.special_ids:
            return None
        if self._place.part == "inside":
            return True if self._vocabulary.tokens[token_id] else None
        return self.matcher.allows(token_id)

    @property
    def is_complete(self) -> bool:
        """The answer is what the constraint asks for, and nothing can follow."""
        if self.matcher is None or self._place.part != "answer":
            return False
        return self._ended or self.matcher.is_complete

    def allowed_mask(self, words: Words | None = None) -> Words | None:
        """The tokens that may be drawn next; None for all. words: the matcher's mask, if it was computed already; it is changed.

        Nothing but the end is left: then `is_complete` is true afterwards.
        """
        place = self._place
        if place.forced:
            return self._vocabulary.mask(place.forced[:1])
        if self.matcher is None:
            return None
        if place.part == "inside":
            return self._vocabulary.everything & ~self._stops
        if not self.asks_matcher:
            words = self._vocabulary.mask(())
        elif words is None:
            words = self.matcher.allowed_mask()
        self._put_ends(words)
        if place.part == "opening" and self._reasoning is not None:
            words |= self._vocabulary.towards(self._reasoning.open.encode()[len(place.text) :])
        return words

    def accept(self, token_id: int) -> None:
        """What was drawn."""
        self._past.append(self._place)
        self._place = self._after(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens, MAX_ROLLBACK at the most."""
        assert 0 <= num_tokens <= len(self._past)
        was, began_anew = self._place, False
        for _ in range(num_tokens):
            began_anew |= self._place.part == "inside"
            self._place = self._past.pop()
        self._ended = False
        if self.matcher is None:
            return
        if self._place.part == "opening" and began_anew:
            self.matcher.rollback(was.num_followed)
            for token_id in self._place.led[: self._place.num_followed]:
                self.matcher.accept(token_id)
        else:
            self.matcher.rollback(was.num_followed - self._place.num_followed)

    def copy(self) -> Self:
        """Another answer at the same place."""
        twin = type(self)(self._vocabulary, self.matcher and self.matcher.copy(), self._reasoning, self._stop_ids)
        twin._place, twin._past, twin._ended = self._place, self._past.copy(), self._ended
        return twin

    def _put_ends(self, words: Words) -> None:
        """The grammar's end becomes the ids that end this answer."""
        index, bit = divmod(self._vocabulary.end_id, 32)
        may_end = bool(words[index] >> np.uint32(bit) & np.uint32(1))
        words[index] &= ~np.uint32(1 << bit)
        words &= ~self._stops
        if may_end:
            self._ended = self._place.part == "answer" and not words.any()
            words |= self._stops

    def _after(self, token_id: int) -> _Place:
        place = self._place
        if token_id in self._stop_ids and not place.forced:
            return place
        if place.part == "opening" and self._reasoning is not None:
            return self._after_opening(place, token_id, self._reasoning)
        if place.part == "inside" and self._reasoning is not None:
            return self._after_inside(place, token_id, self._reasoning)
        if self.matcher is None:
            return place
        self.matcher.accept(token_id)
        return place._replace(num_followed=place.num_followed + 1)

    def _after_opening(self, place: _Place, token_id: int, reasoning: ReasoningPhase) -> _Place:
        tag, text = reasoning.open.encode(), place.text + self._vocabulary.bytes_of(token_id)
        if self.matcher is None:
            text = text.lstrip()
        elif place.follows and self.matcher.try_accept(token_id):
            place = place._replace(num_followed=place.num_followed + 1, led=(*place.led, token_id))
        else:
            place = place._replace(follows=False)
        if text.startswith(tag):
            if self.matcher is not None:
                self.matcher.rollback(place.num_followed)
            return self._inside(text[len(tag) :], 0)
        if tag.startswith(text):
            return place._replace(text=text)
        if self.matcher is not None and not place.follows:
            raise RequestError("the answer left its constraint")
        return _Place("answer", num_followed=place.num_followed)

    def _after_inside(self, place: _Place, token_id: int, reasoning: ReasoningPhase) -> _Place:
        tag, text = reasoning.close.encode(), place.text + self._vocabulary.bytes_of(token_id)
        _, found, rest = text.partition(tag)
        if found or len(place.forced) == 1:
            return self._answer(rest.lstrip())
        if place.forced:
            return place._replace(text=text, forced=place.forced[1:])
        return self._inside(text, place.num_reasoning + 1)

    def _inside(self, text: bytes, num_reasoning: int) -> _Place:
        assert self._reasoning is not None
        tag, budget = self._reasoning.close, self._reasoning.budget
        begun = max(size for size in range(len(tag)) if text.endswith(tag[:size].encode()))
        forced: tuple[int, ...] = ()
        if budget is not None and num_reasoning >= budget:
            forced = tuple(self._vocabulary.ids_of(tag[begun:]))
        return _Place("inside", tag[:begun].encode(), forced, num_reasoning)

    def _answer(self, text: bytes) -> _Place:
        """text: what the token that closed the reasoning holds behind the tag."""
        begun = self._vocabulary.bytewise(text) if text and self.matcher is not None else []
        for token_id in begun:
            assert self.matcher is not None
            self.matcher.accept(token_id)
        return _Place("answer", num_followed=len(begun))
