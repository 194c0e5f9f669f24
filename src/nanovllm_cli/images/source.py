"""How an image is sent: as a data URL (RFC 2397), made of the bytes of a file, and read into them again.

Nothing here follows an address or opens a path out of a request: whoever sends one would reach this machine's network and files.
"""

from __future__ import annotations

import base64
import re

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.sent import SCHEME, bytes_in

MAX_IMAGE_BYTES = 64 << 20
KINDS = "PNG, JPEG, WebP, GIF or BMP"
_BEGINNINGS = re.compile(
    rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<webp>RIFF.{4}WEBP)|(?P<gif>GIF8[79]a)|(?P<bmp>BM.{12}.\0{3})",
    re.DOTALL,
)
_SEND = "send the image itself, as a data URL: data:image/png;base64,…"
_CONVERT = f"convert it: what is read is {KINDS}"
_SHRINK = f"an image may have {MAX_IMAGE_BYTES >> 20} MiB"


def kind_of(data: bytes) -> str | None:
    """png, jpeg, webp, gif or bmp, by its first bytes; None for anything else."""
    found = _BEGINNINGS.match(data)
    return found.lastgroup if found else None


def data_url(data: bytes, where: str = "the image") -> str:
    """An image's file as a message has it. where: what an error calls it. Raises UsageError for what is no image."""
    kind = kind_of(data)
    if kind is None:
        raise no_image(where, data)
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def image_bytes(url: str, where: str) -> bytes:
    """What a data URL holds, or base64 without its head, as Ollama's clients send it. where: what an error calls it.

    The type that its head names is not relied on: many are wrong. Raises UsageError, and UnsupportedError for other addresses.
    """
    if len(url) > 2 * MAX_IMAGE_BYTES:  # base64 is a third longer than what it holds; there may be line ends
        raise _too_large(where)
    scheme = SCHEME.match(url)
    if scheme is None:
        data = bytes_in(url)
        if data is None or kind_of(data) is None:
            raise UsageError(f"{where} is neither a data URL nor an image in base64", _SEND)
    elif scheme[1].lower() == "data":
        head, comma, body = url[scheme.end() :].partition(",")
        if not comma or not re.fullmatch(r"image/[^,]*;\s*base64\s*", head, re.IGNORECASE):
            raise UsageError(f"{where} is a data URL, but not of an image in base64", _SEND)
        data = bytes_in(body)
        if data is None:
            raise UsageError(f"{where} is not valid base64", _SEND)
    else:
        raise UnsupportedError(f"{where} is an address ({scheme[1].lower()}:), and none is opened here", _SEND)
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where)
    return data


def no_image(where: str, data: bytes) -> UsageError:
    if not data:
        return UsageError(f"{where} is empty", _CONVERT)
    return UsageError(f"{where} is no image of a kind that is read here", _CONVERT)


def _too_large(where: str) -> UsageError:
    return UsageError(f"{where} is too large", _SHRINK)
