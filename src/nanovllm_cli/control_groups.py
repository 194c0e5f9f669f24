"""What Linux's control groups leave to this process: a container's limits, a service's, a user's session's.

A process lies in a group, and that in others; any of them may set a limit. Of version 2 there is one tree of them, of version 1
(distributions such as RHEL 8) one for each kind of thing that is counted. In a container its own group is the root. Files are
those of the kernel's "Control Group v2" and "CFS Bandwidth Control". Where there is nothing to read, there is no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 62


def memory_left() -> int:
    """Bytes that may still be taken; NO_LIMIT where nobody counts."""
    second = [_memory_left(group, "memory.max", "memory.current", "inactive_file") for group in _groups("")]
    first = [
        _memory_left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for group in _groups("memory")
    ]
    return min([NO_LIMIT, *second, *first])


def processors() -> int:
    """How many are kept busy within the time that is granted, one that is granted in part included; NO_LIMIT without a limit."""
    shares = [tuple(_words(group / "cpu.max")) for group in _groups("")]
    shares += [(*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")) for group in _groups("cpu")]
    return min([NO_LIMIT, *map(_processors, shares)])


def _groups(counted: str) -> Iterator[Path]:
    """The process's and all that it lies in, in the tree of version 1 that counts this; '' for version 2."""
    paths: dict[str, str] = {}
    for line in _text(OWN_GROUP).splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        paths |= dict.fromkeys(names.split(","), path.lstrip("/"))
    root = GROUPS / counted
    own = root / paths.get(counted, "")
    return (each for each in (own, *own.parents) if each.is_relative_to(root))


def _memory_left(group: Path, limit: str, used: str, droppable: str) -> int:
    """droppable: what `memory.stat` calls pages of files that were read, such as a model's, and are dropped where memory is
    short."""
    most, taken = _text(group / limit).strip(), _text(group / used).strip()
    if not most.isdecimal() or not taken.isdecimal():
        return NO_LIMIT
    words = _words(group / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    kept = int(taken) - int(stat.get(droppable, 0))
    return max(0, int(most) - max(0, kept))


def _processors(share: tuple[str, ...]) -> int:
    """share: microseconds of each so many; 'max' or -1 for all."""
    if len(share) != 2 or not all(number.isdecimal() for number in share) or "0" in share:
        return NO_LIMIT
    quota, period = map(int, share)
    return math.ceil(quota / period)


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeError):
        return ""
