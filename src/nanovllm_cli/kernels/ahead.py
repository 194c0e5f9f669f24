"""How long before their use the lines of a weight are asked for by instruction, where few rows read it in order.

Processors fetch ahead what is read in order, some of them better without such instructions than with, some the other way round:
of two EPYCs of one kind one loses a third of its pace by them, and the other gains as much. So it is measured, on the weights of
the model that is there. It changes no number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

JUST_READ, FAR = -512, 4096
"""Distances in bytes. What has just been read is in the first cache, so that to ask for it does nothing."""
ENOUGH_BYTES = 48 << 20
"""Of weights, read one after the other: more than most processors' caches keep until they are read again."""
ROUNDS = 4
GAIN = 0.95
"""Of the time: what is less may be chance."""
_chosen: list[int] = []


def distance() -> int:
    """Of the line that a kernel asks for from the one that it is reading. In recorded steps it stays what it was."""
    return _chosen[0] if _chosen else JUST_READ


def choose(readers: Sequence[tuple[int, Callable[[], object]]]) -> None:
    """Measure it, once in a process. readers: bytes of weights, and what multiplies one row with them.

    Where there is little to read it is not measured: that stays in the caches.
    """
    total, used = 0, []
    for num_bytes, read in sorted(readers, key=lambda reader: -reader[0]):
        if total < ENOUGH_BYTES:
            total += num_bytes
            used.append(read)
    if _chosen or total < ENOUGH_BYTES:
        return
    least = {each: [float("inf")] * len(used) for each in (JUST_READ, FAR)}
    for turn in range(2 * ROUNDS):
        each = JUST_READ if turn % 4 in (0, 3) else FAR
        _chosen[:] = [each]
        for i, read in enumerate(used):
            begin = time.perf_counter()
            read()
            least[each][i] = min(least[each][i], time.perf_counter() - begin)
    _chosen[:] = [FAR if sum(least[FAR]) < GAIN * sum(least[JUST_READ]) else JUST_READ]
