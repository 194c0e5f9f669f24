"""Videos for tests, made by PyAV, and images that move, by Pillow: green above a grey that becomes lighter."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest


def frame(number: int, count: int, size: tuple[int, int]) -> np.ndarray:
    """[height, width, 3], of which the lower half's grey says how far it is, and the upper half is green."""
    width, height = size
    made = np.full((height, width, 3), 20 + number * 200 // max(1, count - 1), np.uint8)
    made[: height // 2] = 0, 200, 0
    return made


def clip(
    count: int = 50,
    *,
    rate: int = 25,
    size: tuple[int, int] = (64, 48),
    codec: str = "mpeg4",
    container: str = "mp4",
    turned: int = 0,
    shape: Fraction | None = None,
    times: Sequence[int] | None = None,
    **options: str,
) -> bytes:
    """times: of frames, in parts of rate; else they follow each other. turned: to the left, in degrees, when it is shown. shape:
    of a pixel."""
    av: Any = pytest.importorskip("av", reason="PyAV decodes videos: pip install av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt, stream.options, stream.bit_rate = "yuv420p", options, 8_000_000
        stream.time_base = stream.codec_context.time_base = Fraction(1, rate)
        if shape is not None:
            stream.sample_aspect_ratio = shape
        if turned:
            stream.set_display_rotation(turned)
        for number in range(count):
            shown = av.VideoFrame.from_ndarray(frame(number, count, size), format="rgb24")
            shown.pts, shown.time_base = number if times is None else times[number], Fraction(1, rate)
            out.mux(stream.encode(shown))
        out.mux(stream.encode())
    return file.getvalue()


def sound_alone() -> bytes:
    """An MP4 without pictures."""
    av: Any = pytest.importorskip("av", reason="PyAV decodes videos: pip install av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=16000, layout="mono")
        heard = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        heard.sample_rate = 16000
        out.mux(stream.encode(heard))
        out.mux(stream.encode())
    return file.getvalue()


def moving(count: int = 10, *, kind: str = "GIF", milliseconds: int = 100, size: tuple[int, int] = (64, 48)) -> bytes:
    """An image of so many frames; a PNG's are exact."""
    from PIL import Image

    frames = [Image.fromarray(frame(number, count, size)) for number in range(count)]
    file = io.BytesIO()
    exact = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, **exact)
    return file.getvalue()
