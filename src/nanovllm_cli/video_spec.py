"""How a model sees a video, as plain values: which of its frames, how large, and what is written around them.

A video is images behind each other in a prompt, each of a frame or, where a patch's kernel has several, of as many. Which
frames are taken: `images/video_sampling.py`; what is written: `images/video_texts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.tokens_spec import ImageTokens

Sampling = Literal["spaced", "even", "middles", "seconds", "dynamic", "trimmed"]
Wording = Literal["plain", "qwen2", "qwen3", "glm", "glm4.6", "internvl", "gemma4", "smolvlm"]


@dataclass(frozen=True, slots=True)
class VideoSpec:
    """tokens: `marker` is what a template writes for a video, `token` as often as there are rows of the tower's output. sampling:
    which frames are taken: fps of them a second, or num_frames, if that is not 0, from least_frames to most_frames. step: so many
    are one image to the tower. size: of a frame, which has no more than its share of most_pixels of all frames, if that is not 0,
    nor less than that of least_pixels; share_floor: but no share makes it smaller than this. pace: positions that a second takes
    on the first axis of a grid that all of a video's images share; 0: an image takes one; None: each has a grid of its own, or
    there are none. unless: a token of vocabularies whose models see videos in another way."""

    tokens: ImageTokens
    size: SizeRule
    sampling: Sampling
    wording: Wording
    fps: float = 2.0
    num_frames: int = 0
    least_frames: int = 1
    most_frames: int = 768
    step: int = 1
    least_pixels: int = 0
    most_pixels: int = 0
    share_floor: int = 0
    pace: float | None = None
    unless: str = ""

    def limited(self, most_tokens: int, cell: int, fps: float | None, most_frames: int) -> VideoSpec:
        """The same for frames of at most so many tokens of `cell` pixels on a side, of which there are no more than most_frames;
        fps: of somebody who says how many a second."""
        asked = self if fps is None else replace(self, fps=fps, num_frames=0)
        most = max(self.step, min(self.most_frames, most_frames) // self.step * self.step)
        size = self.size.limited(most_tokens, cell)
        return replace(asked, size=size, most_frames=most, least_frames=min(self.least_frames, most))

    def frame_size(self, count: int) -> SizeRule:
        """Of one of so many frames."""
        size, least, most = self.size, self.size.min_pixels, self.size.max_pixels
        if self.least_pixels:
            least = -(-self.least_pixels // count)
        if self.most_pixels:
            most = min(most, max(self.most_pixels // count, self.share_floor))
        return replace(size, min_pixels=min(least, most), max_pixels=most)


class Moment(NamedTuple):
    """Of an image of a video: where it lies on the first axis of a grid that several share, and how many positions they all take,
    if it is the last of them, or 0. One that has its own is the first and the last."""

    time: int
    extent: int


class Filmed(NamedTuple):
    """Such an image in a prompt: its tokens, and its lines and columns; alone: positions that it takes by itself."""

    start: int
    end: int
    rows: int
    columns: int
    alone: int
    moment: Moment | None


MOST_TIME = 1 << 24
"""That is believed."""


def are_moments(images: Iterable[Filmed]) -> bool:
    """Whether images that share a grid are whole videos, each right behind the one before, and as large."""
    before: Filmed | None = None
    for each in images:
        moment = each.moment
        if before is None:
            if moment is None or moment == (0, each.alone):
                continue
            if moment.time:
                return False
        else:
            is_next = each.start == before.end and (each.rows, each.columns) == (before.rows, before.columns)
            if not is_next or moment is None or before.moment is None or moment.time < before.moment.time:
                return False
        if moment.extent not in (0, max(moment.time + 1, each.rows, each.columns)) or moment.time > MOST_TIME:
            return False
        before = None if moment.extent else each
    return before is None
