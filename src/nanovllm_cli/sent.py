"""What images and sounds that come with a message have in common before anybody looks at them: base64 in a text, and what was
made of those that were read last.

Nothing here follows an address or opens a path out of a request: whoever sends one would reach this machine's network and files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nanovllm_cli.errors import UnsupportedError, UsageError

SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")
"""What an address begins with."""
MAX_BYTES = 64 << 20
"""Of a file."""
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


@dataclass(frozen=True, slots=True)
class Medium:
    """How a file is sent: as its bytes in base64, by themselves or in a data URL (RFC 2397).

    name: with its article. kinds: that are read, in words. beginnings: of files, with a group for each kind. types: a pattern of
    what a data URL may begin with, what ours do first. send: an example, for whoever sent something else.
    """

    name: str
    kinds: str
    beginnings: re.Pattern[bytes]
    types: str
    send: str

    @property
    def noun(self) -> str:
        return self.name.split()[1]

    def kind_of(self, data: bytes) -> str | None:
        """By its first bytes; None for anything else."""
        found = self.beginnings.match(data)
        return found.lastgroup if found else None

    def known(self, data: bytes, where: str) -> str:
        """Its kind. where: what an error calls it. Raises UsageError for what has none."""
        kind = self.kind_of(data)
        if kind is None:
            told = f"is no {self.noun} of a kind that is read here" if data else "is empty"
            raise UsageError(f"{where} {told}", f"convert it: what is read is {self.kinds}")
        return kind

    def data_url(self, data: bytes, where: str = "") -> str:
        """A file as a message has it. Raises UsageError as `known`, and for what is too large."""
        where = where or f"the {self.noun}"
        kind = self.known(data, where)
        self._check_size(len(data), where)
        return f"data:{self.types.partition('|')[0]}/{kind};base64,{base64.b64encode(data).decode('ascii')}"

    def bytes_of(self, sent: str, where: str) -> bytes:
        """What was sent. The type that a data URL names is not relied on: many are wrong.

        Raises UsageError, and UnsupportedError for other addresses.
        """
        if not sent.strip():
            raise UsageError(f"{where} is empty", self.send)
        self._check_size(len(sent) // 2, where)  # base64 is a third longer than what it holds; there may be line ends
        scheme = SCHEME.match(sent)
        if scheme is None:
            data = bytes_in(sent)
            if data is None or self.kind_of(data) is None:
                told = f"{where} is neither a data URL nor {self.name} in base64 of a kind that is read here"
                raise UsageError(told, f"{self.send}; what is read is {self.kinds}")
        elif scheme[1].lower() == "data":
            head, comma, body = sent[scheme.end() :].partition(",")
            if not comma or not re.fullmatch(rf"(?:{self.types})/[^,]*;\s*base64\s*", head, re.IGNORECASE):
                raise UsageError(f"{where} is a data URL, but not of {self.name} in base64", self.send)
            data = bytes_in(body)
            if data is None:
                raise UsageError(f"{where} is not valid base64", self.send)
        else:
            raise UnsupportedError(f"{where} is an address ({scheme[1].lower()}:), and none is opened here", self.send)
        self._check_size(len(data), where)
        return data

    def _check_size(self, size: int, where: str) -> None:
        if size > MAX_BYTES:
            raise UsageError(f"{where} is too large", f"{self.name} may have {MAX_BYTES >> 20} MiB")


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
