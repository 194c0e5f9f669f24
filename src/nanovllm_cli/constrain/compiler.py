"""Compiling beside the engine's steps: in a thread (llguidance lets go of the interpreter meanwhile), once for equal constraints.

What was compiled is found again while somebody holds its future, and of the last ones longer; where memory is short, of the very
last alone: what llguidance learns of an expression stays with it, and may be hundreds of megabytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from weakref import WeakValueDictionary

import llguidance

from nanovllm_cli import system
from nanovllm_cli.constrain.grammar import CHECKED_STACK_BYTES, compiled, stack_of
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.sampling_params import SamplingParams

MAX_KEPT = 64
_SHORT = 8
"""Where less than this part of the memory is available."""

Compiled = llguidance.LLMatcher | None


class Compiler:
    """make_vocabulary: called once, when somebody needs it first, in this compiler's thread."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._thread = ThreadPoolExecutor(1, "constraints")
        with stack_of(2 * CHECKED_STACK_BYTES):
            self._thread.submit(int)
        self._vocabulary: Vocabulary | None = None
        self._known: WeakValueDictionary[Constraint | None, Future[Compiled]] = WeakValueDictionary()
        self._recent: OrderedDict[Constraint | None, Future[Compiled]] = OrderedDict()
        self._lock = Lock()

    def prepare(self, params: SamplingParams) -> Future[Compiled] | None:
        """Starts what `guide` needs, and says when it is there; None where it needs nothing. An exception of the future is a
        UsageError of the request. Hold on to the future until the guide is made."""
        if not params.is_guided:
            return None
        key = params.constraint
        with self._lock:
            future, most = self._known.get(key), MAX_KEPT
            if future is None:
                future = self._known[key] = self._thread.submit(self._compile, key)
                if system.available_bytes() < system.memory_bytes() // _SHORT:
                    most = 1
            self._recent[key] = future
            self._recent.move_to_end(key)
            while len(self._recent) > most:
                self._recent.popitem(last=False)
        return future

    def guide(self, params: SamplingParams, stop_ids: Collection[int]) -> Guide | None:
        """One answer's guide, at its beginning; None where it needs none. Waits for what `prepare` started."""
        future = self.prepare(params)
        if future is None:
            return None
        matcher = future.result()
        assert self._vocabulary is not None
        own = None if matcher is None else Matcher(matcher.deep_copy(), self._vocabulary)
        return Guide(self._vocabulary, own, params.reasoning, stop_ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint | None) -> Compiled:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return None if constraint is None else compiled(constraint, self._vocabulary)


def vocabulary_maker(
    token_bytes: Callable[[], Sequence[bytes]],
    special_ids: Collection[int],
    encode: Callable[[str], list[int]],
    *,
    begins: bool = False,
) -> Callable[[], Vocabulary]:
    return lambda: Vocabulary(token_bytes(), special_ids, encode, begins=begins)

