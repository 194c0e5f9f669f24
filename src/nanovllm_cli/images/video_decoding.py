"""Videos, decoded by `video_decoder.py` in a process of its own for each, and images that move, by Pillow."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, NoReturn

from nanovllm_cli.children import start_decoder
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.images import video_decoder
from nanovllm_cli.images.parts import too_many_parts
from nanovllm_cli.images.video_source import DEMUXERS, MOVING

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

MAX_SECONDS = 4 * 60 * 60
MAX_PIXELS = 1 << 26
"""Of a frame."""
MAX_MOVING_PIXELS = 1 << 31
"""Of all frames of an image that moves, which are decoded one by one, and in this process."""
MAX_SHAPE = 16
"""Of a pixel, how many times one side is as long as the other."""
_LONGEST_LINE = 24 * video_decoder.MAX_FRAMES
_USUAL_SECONDS = 1 / 25
"""Of a frame of which nobody says how long it is shown."""


@dataclass(frozen=True, slots=True)
class Film:
    """times: when its frames are shown, in seconds from the first one on; seconds: all of it. take: those of ascending numbers,
    upright, in RGB, with pixels that are squares. Closing that ends the process."""

    times: Sequence[float]
    seconds: float
    take: Callable[[Sequence[int]], Generator[Pixels, None, None]]

    @property
    def rate(self) -> float:
        """Frames a second, of all of it; without what sums of seconds are off by."""
        return round(len(self.times) / self.seconds, 9)

    def shown_at(self, seconds: float) -> int:
        """Which frame is; times may be rounded, by less than half of what most frames are shown for."""
        apart = sorted(after - before for before, after in itertools.pairwise(self.times))
        near = apart[len(apart) // 2] / 2 if apart else 0.0
        return max(0, bisect_right(self.times, seconds + near) - 1)


@contextlib.contextmanager
def opened(data: bytes, kind: str, where: str) -> Iterator[Film]:
    """kind: one of `video_source.VIDEO`'s. where: what an error calls it. Raises UsageError for what is damaged, has no pictures
    or is too long, here or while frames are taken, UnsupportedError for what there is nothing to decode it with."""
    if kind in MOVING:
        yield _moving(data, kind, where)
        return
    if find_spec("av") is None:
        told = f"{where} is a video, and PyAV is not installed"
        raise UnsupportedError(told, "pip install av, which brings FFmpeg along")
    child = start_decoder(video_decoder)
    try:
        yield _decoding(child, data, kind, where)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _decoding(child: subprocess.Popen[bytes], data: bytes, kind: str, where: str) -> Film:
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout
    with contextlib.suppress(BrokenPipeError):  # it is told below why
        stdin.write(json.dumps([len(data), DEMUXERS[kind]]).encode() + b"\n")
        stdin.write(data)
        stdin.flush()
    told = _line(stdout, where)
    if isinstance(told, str):
        _refuse(told, where)
    try:
        numerator, denominator, wide, tall, shown, last = told
        base, shape = numerator / denominator, wide / tall
        times = [(each - shown[0]) * base for each in shown]
        seconds = times[-1] + (last * base or (times[-1] / (len(times) - 1) if len(times) > 1 else _USUAL_SECONDS))
        is_sane = base > 0 and shown == sorted(shown) and seconds > 0 and 1 / MAX_SHAPE <= shape <= MAX_SHAPE
    except (ValueError, TypeError, ZeroDivisionError, IndexError) as failure:  # a decoder that was ended while it spoke
        raise _damaged(where) from failure
    if not is_sane:
        raise _damaged(where)
    _check_seconds(seconds, where)

    def take(numbers: Sequence[int]) -> Generator[Pixels, None, None]:
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps([shown[number] for number in numbers]).encode() + b"\n")
            stdin.flush()
        for _ in numbers:
            yield _frame(stdout, shape, where)

    return Film(times, seconds, take)


def _frame(stdout: IO[bytes], shape: float, where: str) -> Pixels:
    from PIL import Image as pillow

    told = _line(stdout, where)
    if not isinstance(told, list) or len(told) != 3 or not all(type(each) is int for each in told):
        raise _damaged(where)
    width, height, turns = told
    if width < 1 or height < 1 or width * height > MAX_PIXELS or turns not in range(4):
        raise _damaged(where)
    pixels = stdout.read(3 * width * height)
    if len(pixels) != 3 * width * height:
        raise _damaged(where)
    frame = pillow.frombytes("RGB", (width, height), pixels)
    if shape != 1 and (wide := round(width * shape)) * height <= MAX_PIXELS:
        frame = frame.resize((max(1, wide), height), pillow.Resampling.BICUBIC)
    turn = (None, pillow.Transpose.ROTATE_90, pillow.Transpose.ROTATE_180, pillow.Transpose.ROTATE_270)[turns]
    return frame if turn is None else frame.transpose(turn)


def _line(stdout: IO[bytes], where: str) -> Any:
    line = stdout.readline(_LONGEST_LINE)
    try:
        return json.loads(line)
    except ValueError as failure:
        raise _damaged(where) from failure


def _refuse(why: str, where: str) -> NoReturn:
    if why == video_decoder.NO_PICTURES:
        raise UsageError(f"{where} has no pictures", "send a sound as one: --audio, or a part input_audio")
    if why == video_decoder.TOO_MANY:
        raise UsageError(f"{where} has more than {video_decoder.MAX_FRAMES:,} frames", "cut it into pieces")
    raise UnsupportedError(f"{where} is of the codec {why!r}, which is not read here", "convert it: ffmpeg -i FILE out.mp4")


def _moving(data: bytes, kind: str, where: str) -> Film:
    """An image of several frames, or of one."""
    from PIL import Image as pillow

    from nanovllm_cli.images.reading import hush, rgb

    hush()
    if (too_many := too_many_parts(data, kind)) is not None:
        raise UsageError(f"{where} is a {kind.upper()} of more than {too_many}", "save it again, or as an MP4")

    def frames() -> Iterator[Pixels]:
        with _telling(where), pillow.open(BytesIO(data), formats=[kind.upper()]) as picture:
            for number in range(getattr(picture, "n_frames", 1)):
                picture.seek(number)
                picture.load()
                yield picture

    with _telling(where), pillow.open(BytesIO(data), formats=[kind.upper()]) as file:
        count, num_pixels = getattr(file, "n_frames", 1), file.width * file.height
        if num_pixels > MAX_PIXELS:
            raise UsageError(f"{where} has more than {MAX_PIXELS >> 20} million pixels", "make it smaller")
        if num_pixels * count > MAX_MOVING_PIXELS:
            told = f"{where} has {count} frames of {file.width} x {file.height} pixels, more than are read of an image"
            raise UsageError(told, "save it as an MP4, or make it smaller")
    times, seconds = [], 0.0
    for picture in frames():
        times.append(seconds)
        milliseconds = picture.info.get("duration")
        seconds += milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds > 0 else _USUAL_SECONDS
    _check_seconds(seconds, where)

    def take(numbers: Sequence[int]) -> Generator[Pixels, None, None]:
        wanted = list(numbers)
        for number, picture in enumerate(frames()):
            while wanted and wanted[0] == number:
                wanted.pop(0)
                yield rgb(picture)
            if not wanted:
                return

    return Film(times, seconds, take)


@contextlib.contextmanager
def _telling(where: str) -> Iterator[None]:
    """Whatever a damaged file leads to."""
    try:
        yield
    except (UsageError, UnsupportedError):
        raise
    except Exception as failure:  # which ones is not written down anywhere
        raise _damaged(where) from failure


def _check_seconds(seconds: float, where: str) -> None:
    if seconds > MAX_SECONDS:
        raise UsageError(f"{where} is longer than {MAX_SECONDS // 3600} hours", "cut it into pieces")


def _damaged(where: str) -> UsageError:
    return UsageError(f"{where} is damaged or cut off: it can't be decoded", "save or send it again")
