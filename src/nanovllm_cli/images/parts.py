"""Images that are made to keep a server busy: files of many parts, each of which costs Pillow far more than its few bytes.

What a file is made of is walked through as Pillow does it, and no further than it may go. Nothing is decoded here.
"""

from __future__ import annotations

import re

MAX_SCANS = 100
"""Of a JPEG: each is a pass over all of its pixels, and need not have 100 bytes. Photographs have a dozen at most."""
MAX_PARTS = 1 << 16
"""Of which each takes a microsecond or several, and some a hundred bytes: the largest file that is read, in pieces of 1 KB."""
# Of those behind which libjpeg reads a length, and the image's end. Behind others it reads none, or no further; in a scan it
# passes FF02 to FFBF as if they were not there.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xdd\xe0-\xef\xfe])")


def too_many_parts(data: bytes, kind: str) -> str | None:
    """Of which a file of this kind has too many; None where it is fine, or can't be told."""
    if kind == "jpeg":
        return _of_jpeg(data)
    walk = {"png": _png_has_many, "gif": _gif_has_many}.get(kind)
    return f"{MAX_PARTS} parts" if walk is not None and walk(data) else None


def _of_jpeg(data: bytes) -> str | None:
    """Each piece of EXIF data copies all before it; photographs have one. What fills the space before a marker is read byte by
    byte, up to the first scan."""
    if data.count(b"Exif\0\0") > MAX_SCANS:
        return f"{MAX_SCANS} parts"
    scans, parts, place = 0, 0, 2
    while scans <= MAX_SCANS and (found := _JPEG_MARKER.search(data, place)):
        if found[1] == b"\xd9":
            break
        parts += 1 if scans else 1 + found.start() - place
        if parts > MAX_PARTS:
            return f"{MAX_PARTS} parts"
        scans += found[1] == b"\xda"
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return f"{MAX_SCANS} parts" if scans > MAX_SCANS else None


def _png_has_many(data: bytes) -> bool:
    place = 8
    for _ in range(MAX_PARTS):
        if place >= len(data) or data[place + 4 : place + 8] == b"IEND":
            return False
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return True


def _gif_has_many(data: bytes) -> bool:
    """Before its first image: extensions of blocks that have 255 bytes at most, and bytes that are none and are passed."""
    colours = 3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 128 else 0
    place, within = 13 + colours, False
    for _ in range(MAX_PARTS):
        if place >= len(data):
            return False
        byte = data[place]
        if within:
            place, within = place + 1 + byte, byte > 0
        elif byte == ord("!"):
            place, within = place + 2, True
        elif byte in b",;":
            return False
        else:
            place += 1
    return True
