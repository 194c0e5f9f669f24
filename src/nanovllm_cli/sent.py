"""What images and sounds that come with a message have in common before anybody looks at them: base64 in a text, and what was
made of those that were read last."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")
"""What an address begins with."""
REMEMBERED_BYTES = 64 << 20
MOST_REMEMBERED = 1 << 10

_Made = TypeVar("_Made")


def bytes_in(text: str) -> bytes | None:
    """What a text holds in base64, percent-encoded or not; None where it is not valid."""
    try:
        plain = text.encode("ascii").translate(None, b" \t\r\n")
        for code, sign in ((b"%3D", b"="), (b"%3d", b"="), (b"%2B", b"+"), (b"%2b", b"+"), (b"%2F", b"/"), (b"%2f", b"/")):
            plain = plain.replace(code, sign)
        return base64.b64decode(plain, validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None


class Recent(Generic[_Made]):
    """What was read last: a conversation brings its own again with each turn, and a photograph takes a fifth of a second. By a
    digest of what was sent, which may be twenty times as long. size: bytes of what was made."""

    def __init__(self, size: Callable[[_Made], int]) -> None:
        self._lock = threading.Lock()
        self._size = size
        self._made: OrderedDict[tuple[bytes, Hashable], _Made] = OrderedDict()

    def get(self, text: str, spec: Hashable, make: Callable[[], _Made]) -> _Made:
        """spec: what else it depends on, and who may know of it."""
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest(), spec
        with self._lock:
            found = self._made.pop(key, None)
        if found is None:
            found = make()
        with self._lock:
            self._made[key] = found
            while len(self._made) > MOST_REMEMBERED or sum(map(self._size, self._made.values())) > REMEMBERED_BYTES:
                self._made.popitem(last=False)
        return found
