"""What goes in: standard input first, then files, then the words of the command line, with a blank line between.

All text is UTF-8; what is not is refused with the place of the first bad byte, never guessed at.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nanovllm_cli.cli.output import Console
from nanovllm_cli.errors import AccessRefusedError, UsageError
from nanovllm_cli.sent import Medium
from nanovllm_cli.sounds.source import SOUND

MAX_INPUT_BYTES = 64 << 20
MAX_SOUND_BYTES = 1 << 30
"""Four hours of WAV at 16 kHz and one channel are half of it; a conversation takes `sent.MAX_BYTES`."""
STANDARD_INPUT = "-"
_WAIT_SECONDS = 1.0
_NO_TEXTS = {
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP": "it is an image: --image of run, and /image of chat, take one",
    rb"RIFF....WAVE|fLaC|OggS|ID3": "it is a sound: --audio of run, and /audio of chat, take one",
    rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ": "it is a video: --video of run, and /video of chat, take one",
    rb"%PDF-": "it is a PDF: pdftotext makes a text of it",
    rb"GGUF": "it is a model: nanovllm run FILE",
}
"""What files begin with that are taken for texts, and where they belong."""


class Attached(NamedTuple):
    """A file that goes with a prompt, called `name` in errors."""

    medium: Medium
    data: bytes
    name: str

    @property
    def is_sound(self) -> bool:
        return self.medium is SOUND

    @property
    def url(self) -> str:
        """As messages have it. Raises UsageError for what is too large for one."""
        return self.medium.data_url(self.data, self.name)


def attached(
    images: Sequence[str], sounds: Sequence[str], others: Sequence[str], videos: Sequence[str] = ()
) -> list[Attached]:
    """Files of images, sounds and videos; `-` is standard input, which none of `others` is then. Raises UsageError,
    AccessRefusedError."""
    from nanovllm_cli.images.source import IMAGE
    from nanovllm_cli.images.video_source import VIDEO

    flag = "--image" if STANDARD_INPUT in images else "--audio" if STANDARD_INPUT in sounds else "--video"
    media = [*images, *sounds, *videos]
    if [*media, *others].count(STANDARD_INPUT) > 1 and STANDARD_INPUT in media:
        raise UsageError(f"standard input can be one thing only, and {flag} - is it", "name a file for the others")
    found = []
    for name, medium in zip(media, [IMAGE] * len(images) + [SOUND] * len(sounds) + [VIDEO] * len(videos), strict=True):
        most = MAX_SOUND_BYTES if medium is SOUND else MAX_INPUT_BYTES
        if name == STANDARD_INPUT:
            source, name = standard_input(), "standard input"
            data = b"" if source is None else _bounded(source.read(most + 1), name, most)
        else:
            data = read_file(name, most)
        medium.known(data, name)
        found.append(Attached(medium, data, name))
    return found


def assemble(words: Sequence[str], files: Sequence[str], console: Console, *, reads_stdin: bool = True) -> str:
    """The prompt, "" where nothing was said. `-` among `words` or `files` asks for standard input even from a
    terminal; without it standard input is read when it is no terminal, unless something else has it. One newline at the end of it
    and of each file is not part of the prompt."""
    read = _read(words, files, console, exact=False, reads_stdin=reads_stdin)
    parts = [part.removesuffix("\n").removesuffix("\r") for part in read]
    parts.append(_said(words))
    return "\n\n".join(part for part in parts if part)


def as_it_is(words: Sequence[str], files: Sequence[str], console: Console) -> str | None:
    """The same without a change: every newline and byte order mark is there, and nothing between the parts. None where
    nothing was given, not even an empty standard input."""
    parts = _read(words, files, console, exact=True, reads_stdin=True)
    if not (parts or words):
        return None
    return "".join([*parts, _said(words)])


def _read(words: Sequence[str], files: Sequence[str], console: Console, *, exact: bool, reads_stdin: bool) -> list[str]:
    parts = []
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if reads_stdin and (STANDARD_INPUT in words or STANDARD_INPUT in files or is_piped):
        parts.append(read_standard_input(console, exact=exact))
    return parts + [read_text(name, exact=exact) for name in files if name != STANDARD_INPUT]


def _said(words: Sequence[str]) -> str:
    return " ".join(checked(word) for word in words if word != STANDARD_INPUT)


def standard_input() -> BinaryIO | None:
    """Its bytes; None where it is closed or, as nohup leaves it, open for writing alone. Another program may have left it so that
    it does not wait for what is to come (Node does)."""
    if sys.stdin is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stdin.fileno()
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            return None
        os.set_blocking(descriptor, True)
    return sys.stdin.buffer


def read_standard_input(console: Console, *, exact: bool = False) -> str:
    source = standard_input()
    if source is None:
        return ""
    if not say_if_typed(console) and not _has_data(_WAIT_SECONDS):
        console.say("waiting for standard input to end (</dev/null leaves it out)")
    try:
        data = source.read(MAX_INPUT_BYTES + 1)
    except OSError as failure:
        raise UsageError(f"cannot read standard input: {failure.strerror}") from failure
    return decode(_bounded(data, "standard input"), "standard input", exact=exact)


def say_if_typed(console: Console) -> bool:
    """Tells a person that standard input is theirs to type, and how that ends; False where it is no terminal."""
    typed = sys.stdin is not None and sys.stdin.isatty()
    if typed:
        console.say("reading from the terminal; Ctrl-D on an empty line ends it")
    return typed


def read_file(name: str, most: int = MAX_INPUT_BYTES) -> bytes:
    """The bytes of a file that the user named. Raises UsageError or AccessRefusedError, which name it."""
    with _telling(name), open(name, "rb") as file:
        return _bounded(file.read(most + 1), name, most)


def read_text(name: str, *, exact: bool = False) -> str:
    """The text of such a file. exact: as of `decode`."""
    return decode(read_file(name), name, exact=exact)


@contextlib.contextmanager
def open_input(name: str, console: Console) -> Iterator[BinaryIO]:
    """A file that the user named, or standard input for `-`, to be read in pieces. Raises as `read_file` does."""
    if name != STANDARD_INPUT:
        with _telling(name), open(name, "rb") as file:
            yield file
        return
    source = standard_input()
    if source is None:
        raise UsageError("standard input is closed")
    say_if_typed(console)
    with _telling("standard input"):
        yield source


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """Turns what the system says about a file into an error that names the file."""
    try:
        yield
    except PermissionError as failure:
        raise AccessRefusedError(f"cannot read {name}: {failure.strerror}") from failure
    except FileNotFoundError as failure:
        raise UsageError(f"there is no file {name}", _near_files(Path(name))) from failure
    except IsADirectoryError as failure:
        raise UsageError(f"{name} is a folder, not a file") from failure
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        raise UsageError(f"cannot read {name!r}: {reason}") from failure


def decode(data: bytes, name: str, *, exact: bool = False) -> str:
    """The text of a file. exact: with the byte order mark that may stand before it."""
    begin = 3 if not exact and data.startswith(b"\xef\xbb\xbf") else 0
    try:
        return data[begin:].decode("utf-8")
    except UnicodeDecodeError as failure:
        offset = failure.start + begin
        encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"
        hint = f"if it is {encoding}, convert it: iconv -f {encoding} -t UTF-8"
        kind = next((told for magic, told in _NO_TEXTS.items() if re.match(magic, data, re.DOTALL)), None)
        if kind is not None:
            hint = kind
        elif encoding != "UTF-16" and b"\0" in data:
            hint = "it holds zero bytes: it is no text"
        elif failure.reason == "unexpected end of data":
            hint = f"it ends within a character, as what was cut off does; {hint}"
        raise UsageError(f"{name} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}", hint) from failure


def checked(word: str, what: str = "the prompt") -> str:
    """`word`, unless it holds what is no text: bytes of an argument that are not UTF-8, or half a surrogate pair of
    JSON."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise UsageError(f"{what} is not valid Unicode at character {failure.start}") from failure
    return word


def _bounded(data: bytes, name: str, most: int = MAX_INPUT_BYTES) -> bytes:
    if len(data) > most == MAX_SOUND_BYTES:
        hint = "take the sound alone: ffmpeg -i FILE -vn -ac 1 -ar 16000 talk.flac"
        raise UsageError(f"{name} is longer than {most >> 20} MiB", hint)
    if len(data) > most:
        raise UsageError(f"{name} is longer than {most >> 20} MiB, more than any context holds")
    return data


def _has_data(seconds: float) -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):
        return True


def _near_files(path: Path) -> str | None:
    try:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=3)
    except OSError:
        return None
    return "near it: " + ", ".join(str(path.parent / name) for name in near) if near else None
