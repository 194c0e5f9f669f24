"""Which frames of a video are shown to a model: as each was trained. The rules are those of transformers' video processors, for
frames that follow each other evenly; of others, what is shown at those times is taken.

Each rule takes how many frames there are and how many a second, and gives their numbers in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nanovllm_cli.video_spec import Sampling, VideoSpec

_DYNAMIC = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""GLM-4.6V: of a video that is so many seconds long, images a second; each is of two frames."""
_MOST_DYNAMIC = 640
_LONGEST_GLM = 300
"""Seconds, of a GLM-4.1V's, beyond which frames are further apart."""
_SKIPPED = 1
"""Seconds at a SmolVLM's beginning and end, of a video that is long."""


def sampled(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """One at least, and no more than the spec allows."""
    found = sorted({min(max(number, 0), total - 1) for number in _RULES[spec.sampling](spec, total, rate)}) or [0]
    if len(found) > spec.most_frames:
        found = [found[place] for place in np.linspace(0, len(found) - 1, spec.most_frames).round().astype(int)]
    return found


def _asked(spec: VideoSpec, total: int, rate: float) -> float:
    return spec.num_frames or total / rate * spec.fps


def _spaced(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """From the first to the last one (Qwen3-VL)."""
    count = min(max(int(_asked(spec, total, rate)), spec.least_frames), spec.most_frames, total)
    return [int(number) for number in np.linspace(0, total - 1, count).round()]


def _even(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """Of parts of one length, the first of each (Qwen2-VL, Gemma 4)."""
    most = min(spec.most_frames, total) // spec.step * spec.step
    count = math.floor(min(max(_asked(spec, total, rate), spec.least_frames), most) / spec.step) * spec.step
    return [int(np.float32(i * total / count)) for i in range(count)]


def _middles(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """The one in the middle of each (InternVL)."""
    count = min(max(int(_asked(spec, total, rate)), spec.least_frames), spec.most_frames, total)
    return [int(np.float32(total / count / 2 + i * total / count)) for i in range(count)]


def _seconds(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """So many a second (GLM-4.1V, 4.5V)."""
    seconds = total / rate
    if seconds <= _LONGEST_GLM:
        return [math.ceil(i * rate / spec.fps) for i in range(max(1, math.floor(seconds * spec.fps)))]
    count = int(_LONGEST_GLM * spec.fps)
    return list(range(total)) if count >= total else [math.ceil(each * rate) for each in np.linspace(0, seconds, count)]


def _dynamic(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """So many a second, the fewer the longer it is (GLM-4.6V); as many as are asked for, if they are."""
    seconds = total / rate
    heard = min(seconds, _DYNAMIC[-1][0])
    fps = spec.fps or 2 * next(each for longest, each in _DYNAMIC if heard <= longest)
    count = min(int(heard * fps), _MOST_DYNAMIC)
    if total < count:
        return list(range(total))
    found, next_second, last = [], 0.0, int(seconds)
    for number in range(total):
        if number / rate >= next_second:
            next_second += 1 / fps
            found.append(number)
            if next_second >= last:
                break
    if len(found) == count or not count:
        return found
    first, end = (found[0], found[-1]) if len(found) < count else (0, total - 1)
    return [int(number) for number in np.linspace(first, end, count, dtype=int)]


def _trimmed(spec: VideoSpec, total: int, rate: float) -> list[int]:
    """From the first to the last one, or without a second at either end (SmolVLM)."""
    seconds, first, end = total / rate, 0, total - 1
    if seconds - 2 * _SKIPPED > spec.most_frames * spec.fps:
        first, end = int(_SKIPPED * rate), min(end, int(total - _SKIPPED * rate))
        first, end = (first, end) if first < end else (0, total - 1)
    count = max(1, min(round(spec.fps * seconds), spec.most_frames))
    return [int(number) for number in np.linspace(first, end, count, dtype=int)]


_RULES: dict[Sampling, Callable[[VideoSpec, int, float], list[int]]] = {
    "spaced": _spaced, "even": _even, "middles": _middles, "seconds": _seconds, "dynamic": _dynamic, "trimmed": _trimmed,
}  # fmt: skip
