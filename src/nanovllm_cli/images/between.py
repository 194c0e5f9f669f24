"""Images made another size linearly between the middles of the four nearest pixels, also where they become smaller, as torch does
it without antialiasing. Pillow reads all pixels then, which gives other colours."""

from __future__ import annotations

import numpy as np
from PIL import Image as pillow

_LINES_TOGETHER = 256


def between_four(picture: pillow.Image, height: int, width: int) -> pillow.Image:
    """RGB, of these sides."""
    pixels = np.asarray(picture)
    upper, lower, share = _between(picture.height, height)
    left, right, part = (each[None, :, None] for each in _between(picture.width, width))
    out = np.empty((height, width, 3), np.uint8)
    for first in range(0, height, _LINES_TOGETHER):  # in float32 all lines at once are several times as much
        own = slice(first, first + _LINES_TOGETHER)
        lines = [pixels[each].astype(np.float32) for each in (upper[own], lower[own])]
        above, below = (
            np.take(each, left[0, :, 0], axis=1) * (1 - part) + np.take(each, right[0, :, 0], axis=1) * part for each in lines
        )
        down = share[own, None, None]
        out[own] = np.rint(above * (1 - down) + below * down)
    return pillow.fromarray(out)


def _between(own: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each place, the pixels on both sides, and how near it is to the second, float32, as torch computes it."""
    scale = np.float32(own) / np.float32(wanted)
    places = np.maximum((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    first = np.minimum(places.astype(np.int64), own - 1)
    return first, np.minimum(first + 1, own - 1), (places - first).astype(np.float32).clip(0, 1)
