"""A video's bytes, made into the frames that a tower takes, of one size, and what is written around them.

Anybody may have sent them: what would take long or much memory is found before, or while it is decoded, in a process of its own
(`video_decoding.py`). Frames come one by one, so that no more of them are held at their own size.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nanovllm_cli.images.reading import check_size, frame_of
from nanovllm_cli.images.video_decoding import Film, opened
from nanovllm_cli.images.video_sampling import sampled
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.images.video_texts import texts_of
from nanovllm_cli.sent import Recent
from nanovllm_cli.video_spec import VideoSpec
from nanovllm_cli.vision_spec import Image, Video

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

_Each = TypeVar("_Each")


def read_sent(sent: str, spec: VideoSpec, where: str, salt: str | None = None) -> Video:
    """What a model sees of a video as a client sent it; see `Medium.bytes_of`. salt: who has another one can't tell by the time
    it takes whether the video was read before."""
    return _recent.get(sent, (spec, salt), lambda: read_video(VIDEO.bytes_of(sent, where), spec, where))


_recent: Recent[Video] = Recent(lambda video: video.num_bytes)


def read_video(data: bytes, spec: VideoSpec, where: str) -> Video:
    """What a model sees of a file. where: what an error calls it.

    Raises UsageError for what is no video, is damaged, has no pictures or too many, UnsupportedError for what is not read.
    """
    with opened(data, VIDEO.known(data, where), where) as film:
        numbers = sampled(spec, len(film.times), film.rate)
        numbers += numbers[-1:] * (-len(numbers) % spec.step)
        frames = _frames(film, [film.shown_at(number / film.rate) for number in numbers], spec, where)
    images = tuple(map(_joined, _together(frames, spec.step)))
    times = [[number / film.rate for number in each] for each in _together(numbers, spec.step)]
    texts, axis = texts_of(spec.wording, times, film.seconds), _on_axis(spec, len(images), film, len(numbers))
    return Video(images, texts, axis, film.seconds)


def _frames(film: Film, numbers: list[int], spec: VideoSpec, where: str) -> list[Image]:
    """One that is wanted several times is decoded once."""
    each_once = sorted(set(numbers))
    made: dict[int, Image] = {}
    with closing(film.take(each_once)) as taken:
        first: Pixels | None = None
        for number, frame in zip(each_once, taken, strict=False):
            if first is None:
                first = frame
                check_size(frame.width, frame.height, where)
            elif frame.size != first.size:  # as some change theirs
                frame = frame.resize(first.size)
            made[number] = frame_of(frame, spec.frame_size(len(numbers)))
    return [made[number] for number in numbers]


def _together(each: list[_Each], step: int) -> list[list[_Each]]:
    return [each[first : first + step] for first in range(0, len(each), step)]


def _joined(frames: list[Image]) -> Image:
    """As one image to a tower."""
    if len(frames) == 1:
        return frames[0]
    height, width = frames[0].height, frames[0].width
    return Image.of(height, width, b"".join(each.pixels for each in frames), frames=len(frames))


def _on_axis(spec: VideoSpec, count: int, film: Film, num_frames: int) -> tuple[int, ...]:
    """See `Video.times`; in the single precision of models' own code."""
    if spec.pace is None:
        return ()
    pace = np.float32(spec.pace) * np.float32(spec.step * film.seconds / num_frames) if spec.pace else np.float32(1)
    return tuple(int(np.float32(i) * pace) for i in range(count))
