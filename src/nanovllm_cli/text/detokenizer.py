"""A stream of token ids to a stream of text, with stop strings.

What is pushed out is final: half a UTF-8 character waits for its other half, and text that may turn out to be the
beginning of a stop string waits until it is decided. The pieces joined are `Tokenizer.decode` of all ids. Each token
costs a time that does not depend on how many came before. End-of-turn *ids* are the scheduler's matter.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tokenizer import Tokenizer


class Detokenizer:
    """One answer's decoding. `stopped` is the stop string that ended it, or None."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        visible_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`visible_ids`: special tokens that appear in the text all the same (tags that a parser behind this reads).

        `min_tokens`: stop strings are not looked for in the text of that many first tokens. `prompt_ids`: what the
        answer continues; with it, a leading space of the answer is kept, and a character that the prompt left
        unfinished is completed. Without it the text is that of the ids alone. Raises UsageError for an empty stop
        string.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(visible_ids) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._at_start = tokenizer.strips_leading_space
        self.num_tokens = 0  # ids read; once stopped, those up to the one that completed the stop string
        self.stopped: str | None = None
        self._continue(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """Reads more ids and returns the text that they decided. After a stop, reads nothing and returns nothing."""
        out: list[str] = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if token_id not in self._skipped:
                text = self._strip(self._utf8.decode(self._tokenizer.id_to_bytes(token_id)))
                out.append(self._through_stops(text))
        return "".join(out)

    def finish(self) -> str:
        """The text still held back, now that no more ids come."""
        if self.stopped is not None:
            return ""
        out = [self._through_stops(self._strip(self._utf8.decode(b"", True)))]
        if self._matcher is not None:
            out.append(self._matcher.flush())
        return "".join(out)

    def _continue(self, prompt_ids: Sequence[int]) -> None:
        """Takes up where the prompt's text ends: whether it has any, and which bytes of a character it left open."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.id_to_bytes(token_id) + tail
                if len(tail) >= 4:
                    break
        if tail:
            self._at_start = False
            self._utf8.decode(tail[-4:])  # what it returns belongs to the prompt; what it keeps, to us

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def _through_stops(self, text: str) -> str:
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return text
        passed, found = self._matcher.push(text)
        if found is None:
            return passed
        self.stopped = found
        return passed + found if self._include_stop else passed


class StopMatcher:
    """Finds the first of several strings to be completed in a stream, in one pass (Aho and Corasick 1975).

    Of strings completed by the same character, the longest is found. States are prefixes of the strings; the length of
    the current one is exactly how much text has to wait.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise UsageError("a stop string is empty", "leave it out")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self._fall = self._link()
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can't belong to a match any more, and the string found, if any; what follows a match is dropped."""
        state = self._state
        for position, char in enumerate(text):
            while state and char not in self._next[state]:
                state = self._fall[state]
            state = self._next[state].get(char, 0)
            found = self._found[state]
            if found is not None:
                seen = self._held + text[: position + 1]
                self._state, self._held = 0, ""
                return seen[: len(seen) - len(found)], found
        self._state = state
        seen = self._held + text
        cut = len(seen) - self._depth[state]
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """What was waiting, once no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = self._next[state][char]
        self._found[state] = string

    def _link(self) -> list[int]:
        """For each prefix its longest proper suffix that is also a prefix, breadth first."""
        fall = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                back = fall[state]
                while back and char not in self._next[back]:
                    back = fall[back]
                fall[child] = self._next[back].get(char, 0)
                if self._found[child] is None:
                    self._found[child] = self._found[fall[child]]
        return fall
