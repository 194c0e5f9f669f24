"""A program: a video on standard input, and on standard output its frames.

It reads a line of JSON (how many bytes the file has, FFmpeg's name of its container) and the file, and answers with a line: the
time base, the shape of a pixel, when each frame is shown, and for how long the last one is, counted in that base; or a text, why
there are none. Then it reads a line, the times of frames that are wanted, and answers for each with a line (width, height, and
how many quarters it is to be turned to the left), and its pixels, RGB, line by line. Status 3: there is no PyAV here.

In a process of its own, so that a file which breaks a decoder breaks nothing else, what decoders write to standard error goes
nowhere, and whoever waits can end it. FFmpeg finds neither another container than the named one nor another file. Imports nothing
of the package: it starts with every video.
"""

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from io import BytesIO
from typing import Any, NamedTuple

SECONDS, BYTES = 600, 6 << 30
"""Of a processor, and of memory; see `limited.py`."""
NO_LIBRARY = 3
NO_PICTURES, TOO_MANY = "no pictures", "too many frames"
"""Why there are none; else it is the name of a codec."""
MAX_FRAMES = 1 << 20
"""Of a video: five hours at 60 a second."""
MAX_PIXELS = 1 << 26
"""Of a frame."""
CODECS = (
    "h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "theora", "prores", "h263", "flv1",
    "dnxhd", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2", "vc1", "wmv3", "ffv1", "png", "vp6f", "svq3", "cinepak", "rawvideo",
    "dvvideo",
)  # fmt: skip
_THREADS = 4
_FAR = 300
"""Frames that are left out, if a keyframe is so far ahead."""
_SEEKS = "mov", "matroska"
"""Containers that know where their frames are."""


class Listed(NamedTuple):
    """When frames are shown, by number where one has no time, in order; how long the last one is; which are keyframes."""

    times: list[int]
    last: int
    keys: list[int]
    are_timed: bool


def main() -> int:
    try:
        import av
    except ImportError:
        return NO_LIBRARY
    num_bytes, container = json.loads(sys.stdin.buffer.readline(200))
    data = sys.stdin.buffer.read(num_bytes)
    if len(data) != num_bytes:
        return 1
    with _opened(av, data, container) as file:
        stream, why = _stream_of(file)
        listed = None if stream is None else _listed(file, stream)
        if listed is None or not listed.times:
            _say(why or NO_PICTURES if listed is None or not listed.last else TOO_MANY)
            return 0
        base = stream.time_base if listed.are_timed else 1 / (stream.average_rate or Fraction(25))
        shape = stream.sample_aspect_ratio or Fraction(1)
        _say([base.numerator, base.denominator, shape.numerator, shape.denominator, listed.times, listed.last])
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    with _opened(av, data, container) as file:
        stream, _ = _stream_of(file)
        _show(file, stream, json.loads(line), listed, seeks=container in _SEEKS and listed.are_timed)
    return 0


def _opened(av: Any, data: bytes, container: str) -> Any:
    return av.open(BytesIO(data), format=container, io_open=_nothing_else, metadata_errors="replace")


def _nothing_else(*_: Any) -> Any:
    raise OSError("a video is one file")


def _stream_of(file: Any) -> tuple[Any, str]:
    """The first one that is no cover of a sound, or why there is none."""
    stream = next((each for each in file.streams.video if not each.disposition & type(each.disposition).attached_pic), None)
    if stream is None or stream.codec_context is None:
        return None, NO_PICTURES
    if (name := stream.codec_context.codec.canonical_name) not in CODECS:
        return None, name[:40]
    stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
    stream.codec_context.thread_type = "AUTO"
    stream.codec_context.thread_count = _THREADS
    return stream, ""


def _listed(file: Any, stream: Any) -> Listed:
    """Nothing is decoded. Of too many there are no times."""
    found = []
    for packet in file.demux(stream):
        if packet.size and not packet.is_discard:
            found.append((packet.pts, packet.duration or 0, packet.is_keyframe))
            if len(found) > MAX_FRAMES:
                return Listed([], len(found), [], False)
    are_timed = all(time is not None for time, *_ in found)
    if not are_timed:
        found = [(number, 1, is_key) for number, (*_, is_key) in enumerate(found)]
    found.sort()
    keys = [time for time, _, is_key in found if is_key]
    return Listed([time for time, *_ in found], found[-1][1] if found else 0, keys, are_timed)


def _show(file: Any, stream: Any, wanted: list[int], listed: Listed, *, seeks: bool) -> None:
    """Those that are shown at these times, or next; of those behind the last one, it."""
    left, last, place = wanted[::-1], None, 0
    frames = _decoded(file, stream)
    while left and (frame := next(frames, None)) is not None:
        time = frame.pts if listed.are_timed and frame.pts is not None else listed.times[min(place, len(listed.times) - 1)]
        last, place = frame, place + 1
        while left and time >= left[-1]:
            _write(frame)
            left.pop()
        if left and seeks and (key := _key_before(left[-1], time, listed)) is not None:
            file.seek(key, stream=stream)
            frames = _decoded(file, stream)
    while left and last is not None:
        _write(last)
        left.pop()


def _key_before(wanted: int, time: int, listed: Listed) -> int | None:
    """A keyframe from which it is far nearer."""
    at = bisect_right(listed.keys, wanted) - 1
    if at < 0 or bisect_right(listed.times, listed.keys[at]) - bisect_right(listed.times, time) <= _FAR:
        return None
    return listed.keys[at]


def _decoded(file: Any, stream: Any) -> Iterator[Any]:
    for packet in file.demux(stream):
        yield from packet.decode()


def _write(frame: Any) -> None:
    plain = frame.reformat(format="rgb24")
    _say([plain.width, plain.height, round(frame.rotation / 90) % 4])
    plane, width, long = memoryview(plain.planes[0]), 3 * plain.width, plain.planes[0].line_size
    for line in range(plain.height):
        sys.stdout.buffer.write(plane[line * long : line * long + width])
    sys.stdout.buffer.flush()


def _say(told: Any) -> None:
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
