"""How a sound is sent: as the bytes of a file in base64, in a part of a message or in a data URL (RFC 2397).

Nothing here follows an address or opens a path out of a request: whoever sends one would reach this machine's network and files.
"""

from __future__ import annotations

import base64
import re

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.sent import SCHEME, bytes_in

MAX_SOUND_BYTES = 64 << 20
KINDS = "WAV, FLAC, OGG (Vorbis or Opus) or MP3"
_BEGINNINGS = re.compile(
    rb"(?P<wav>(?:RIFF|RF64).{4}WAVE)|(?P<flac>fLaC)|(?P<ogg>OggS)|(?P<mp3>ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb])", re.DOTALL
)
_SEND = 'send the sound itself: {"type": "input_audio", "input_audio": {"data": "…base64…", "format": "wav"}}'
_CONVERT = f"convert it: what is read is {KINDS}"
_SHRINK = f"a sound may have {MAX_SOUND_BYTES >> 20} MiB"


def kind_of(data: bytes) -> str | None:
    """wav, flac, ogg or mp3, by its first bytes; None for anything else."""
    found = _BEGINNINGS.match(data)
    return found.lastgroup if found else None


def data_url(data: bytes, where: str = "the sound") -> str:
    """A sound's file as a message has it. where: what an error calls it. Raises UsageError for what is no sound."""
    kind = kind_of(data)
    if kind is None:
        raise no_sound(where, data)
    if len(data) > MAX_SOUND_BYTES:
        raise _too_large(where)
    return f"data:audio/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def sound_bytes(sent: str, where: str) -> bytes:
    """What base64 holds, or a data URL. where: what an error calls it.

    What its sender calls it is not relied on. Raises UsageError, and UnsupportedError for other addresses.
    """
    if len(sent) > 2 * MAX_SOUND_BYTES:  # base64 is a third longer than what it holds; there may be line ends
        raise _too_large(where)
    scheme, body = SCHEME.match(sent), sent
    if scheme is not None:
        if scheme[1].lower() != "data":
            raise UnsupportedError(f"{where} is an address ({scheme[1].lower()}:), and none is opened here", _SEND)
        head, comma, body = sent[scheme.end() :].partition(",")
        if not comma or not re.fullmatch(r"(?:audio|video|application)/[^,]*;\s*base64\s*", head, re.IGNORECASE):
            raise UsageError(f"{where} is a data URL, but not of a sound in base64", _SEND)
    data = bytes_in(body)
    if data is None:
        raise UsageError(f"{where} is not valid base64", _SEND)
    if len(data) > MAX_SOUND_BYTES:
        raise _too_large(where)
    return data


def no_sound(where: str, data: bytes) -> UsageError:
    if not data:
        return UsageError(f"{where} is empty", _CONVERT)
    return UsageError(f"{where} is no sound of a kind that is read here", _CONVERT)


def _too_large(where: str) -> UsageError:
    return UsageError(f"{where} is too large", _SHRINK)
