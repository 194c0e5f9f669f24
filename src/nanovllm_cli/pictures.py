"""What a tower takes, an image, a piece of a sound or a text, and what somebody sent, which is one of these or several.
Plain values."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_cli.mosaic import Mosaic


class Image(NamedTuple):
    """As a tower takes it, of a size that its `SizeRule` gives: RGB, a byte a colour, line by line. mosaic: of squares one below
    the other, which are one image to the tower. frames: of a video, so many that follow each other and are one image to the
    tower. digest: of all that."""

    height: int
    width: int
    pixels: bytes
    digest: bytes
    mosaic: Mosaic | None = None
    frames: int = 1

    @classmethod
    def of(cls, height: int, width: int, pixels: bytes, mosaic: Mosaic | None = None, frames: int = 1) -> Image:
        """With its digest."""
        sides = b"".join(each.to_bytes(4, "big") for each in (height, width, *(mosaic or ())))
        several = b"" if frames == 1 else b"frames" + frames.to_bytes(4, "big")
        digest = hashlib.blake2b(several + sides + pixels, digest_size=16).digest()
        return cls(height, width, pixels, digest, mosaic, frames)

    @property
    def num_squares(self) -> int:
        """That are computed apart from each other."""
        return 1 if self.mosaic is None else self.mosaic.num_squares

    @property
    def num_bytes(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True, slots=True)
class Sound:
    """A piece of a sound, as a tower takes it (`hearing_spec.py`), which stands where images do: `frames` of a spectrogram behind
    each other, float32 of `bins` bands each, of which the first `heard` count. digest: of all that. ordinal: which of its sound's
    pieces it is, from 0 on, where a tower goes by that.

    Of no bands it is a text, as an encoder reads it (`reading_spec.py`): values are its tokens. One class, as messages between
    processes tell an array and an object apart, and no two objects."""

    frames: int
    heard: int
    bins: int
    values: bytes
    digest: bytes
    ordinal: int = 0

    @classmethod
    def of(cls, values: bytes, frames: int, heard: int, bins: int, ordinal: int = 0) -> Sound:
        """With its digest."""
        sizes = b"sound" + b"".join(each.to_bytes(4, "big") for each in (frames, heard, bins, ordinal))
        digest = hashlib.blake2b(sizes, digest_size=16)
        digest.update(values)  # which may be gigabytes
        return cls(frames, heard, bins, values, digest.digest(), ordinal)

    @classmethod
    def of_text(cls, ids: Sequence[int]) -> Sound:
        return cls.of(array("q", ids).tobytes(), len(ids), len(ids), 0)

    @property
    def is_text(self) -> bool:
        return self.bins == 0

    @property
    def ids(self) -> list[int]:
        """Of a text."""
        return array("q", self.values).tolist()

    @property
    def num_bytes(self) -> int:
        return len(self.values)


class Clip(NamedTuple):
    """A sound as somebody sent it, in the pieces that a tower reads, which follow each other."""

    images: tuple[Sound, ...]
    seconds: float


class Picture(NamedTuple):
    """An image as somebody sent it, in the images that a tower reads: `rows` lines of `columns` pieces, where it is divided, and
    all of it in one, in the order of their tokens."""

    images: tuple[Image, ...]
    rows: int = 0
    columns: int = 0

    @property
    def num_pixels(self) -> int:
        return sum(image.height * image.width for image in self.images)


class Video(NamedTuple):
    """A video as somebody sent it, in the images that a tower reads, each of a frame or of a few. texts: what is written in front
    of each, and behind the last one. times: of images that share one grid of positions, where each lies on its first axis; none
    where each has its own. seconds: that it lasts."""

    images: tuple[Image, ...]
    texts: tuple[str, ...]
    times: tuple[int, ...]
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(image.num_bytes for image in self.images)
