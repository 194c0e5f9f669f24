"""n-grams that an answer may not have twice (Paulus et al. 2018; transformers' `no_repeat_ngram_size`): which tokens would
complete one that is there already, in what came before or in the answer."""

from __future__ import annotations

from collections.abc import Iterable, Set


class WrittenNgrams:
    """Of a sequence of tokens, which grows. size: tokens of an n-gram, 1 or more."""

    def __init__(self, size: int, tokens: Iterable[int] = ()) -> None:
        self._size = size
        self._last: tuple[int, ...] = ()
        self._behind: dict[tuple[int, ...], set[int]] = {}
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        if len(self._last) == self._size - 1:
            self._behind.setdefault(self._last, set()).add(token_id)
        self._last = (*self._last, token_id)[-(self._size - 1) :] if self._size > 1 else ()

    @property
    def banned(self) -> Set[int]:
        """What can't come next."""
        return self._behind.get(self._last, frozenset()) if len(self._last) == self._size - 1 else frozenset()
