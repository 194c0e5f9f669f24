"""The masks of one step, computed in a thread while the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import llguidance
import numpy as np

from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.vocabulary import Words


class MaskThread:
    """start() before the model runs, mask() after it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor: llguidance.LLExecutor | None = None
        self._running: Future[None] | None = None
        self._rows: dict[int, Words] = {}

    def start(self, guides: Mapping[int, Guide]) -> None:
        """guides: by sequence id."""
        if self._running is not None:  # of a step that failed: its matchers are still in use
            wait([self._running])
        self._rows, self._running = {}, None
        asking = {seq_id: guide.matcher.inner for seq_id, guide in guides.items() if guide.matcher and guide.asks_matcher}
        if not asking:
            return
        num_words = next(iter(guides.values())).num_words
        table = np.zeros((len(asking), num_words), dtype=np.uint32)
        self._rows = dict(zip(asking, table, strict=True))
        matchers = [(matcher, row) for row, matcher in enumerate(asking.values())]
        self._running = self._thread.submit(self._fill, matchers, table)

    def mask(self, seq_id: int, guide: Guide) -> Words | None:
        """Of a sequence, in the state in which it was started. Raises RequestError where its matcher gave up."""
        if self._running is not None:
            self._running.result()
        words = self._rows.pop(seq_id, None)
        if words is not None and guide.matcher is not None:
            guide.matcher.check()
        return guide.allowed_mask(words)

    def _fill(self, matchers: list[tuple[llguidance.LLMatcher, int]], table: Words) -> None:
        row_bytes = table.strides[0]
        if len(matchers) == 1:
            matchers[0][0].unsafe_compute_mask_ptr(table.ctypes.data, row_bytes)
            return
        self._executor = self._executor or llguidance.LLExecutor()
        self._executor.unsafe_compute_mask_ptr(matchers, table.ctypes.data, row_bytes, len(table))
