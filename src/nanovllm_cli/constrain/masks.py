"""The masks of one step: while the model runs, where processors are left for that, and else behind it, on all of them.

Beside a model that has every processor a mask costs more time than it takes: the tree of tokens is pushed out of the caches
between one and the next, and a thread of the model that had to make room is waited for by the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Words
from nanovllm_cli.processors import num_processors

MAX_HELPERS = 7
"""Threads beside the caller's. A batch's masks take a few milliseconds of processor time."""


class MaskThreads:
    """start() before the model runs, or not; finish() and mask() after it."""

    def __init__(self) -> None:
        self._num_helpers = min(num_processors() - 1, MAX_HELPERS)
        self._pool = ThreadPoolExecutor(max(1, self._num_helpers), "masks")
        self._helping: list[Future[None]] = []
        self._waiting = deque[tuple[Matcher, Words]]()
        self._rows: dict[int, Words] = {}

    def start(self, guides: Mapping[int, Guide]) -> None:
        """Begins, in one thread. guides: by sequence id."""
        self._waiting.clear()  # of a step that failed, whose matchers may be in use yet
        wait(self._helping)
        self._helping, self._rows = [], {}
        self._add(guides)
        if self._waiting:
            self._help()

    def finish(self, guides: Mapping[int, Guide]) -> None:
        """All that was started, and what these need besides, on all threads."""
        if not self._helping:
            self._rows = {}  # nothing was started; these are of a step that failed
        self._add({seq_id: guide for seq_id, guide in guides.items() if seq_id not in self._rows})
        for _ in range(min(self._num_helpers - len(self._helping), len(self._waiting) - 1)):
            self._help()
        self._compute()
        helping, self._helping = self._helping, []
        for each in helping:
            each.result()

    def mask(self, seq_id: int, guide: Guide) -> Words | None:
        """Of a sequence, as of `finish`. Raises RequestError where its matcher gave up."""
        words = self._rows.pop(seq_id, None)
        if words is not None and guide.matcher is not None:
            guide.matcher.check()
        return guide.allowed_mask(words)

    def _add(self, guides: Mapping[int, Guide]) -> None:
        for seq_id, guide in guides.items():
            if guide.matcher is not None and guide.asks_matcher:
                self._rows[seq_id] = np.zeros(guide.num_words, dtype=np.uint32)
                self._waiting.append((guide.matcher, self._rows[seq_id]))

    def _help(self) -> None:
        self._helping.append(self._pool.submit(self._compute))

    def _compute(self) -> None:
        while True:
            try:
                matcher, words = self._waiting.popleft()
            except IndexError:
                return
            matcher.fill(words)
