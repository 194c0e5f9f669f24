"""What a message says: a text, or parts. Parts of text become one; images, sounds and videos stay where they are between them.

An image is looked at by nobody here, and a sound heard: its sender's address of it is handed on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.own_text import joined

Content = str | list[dict[str, Any]]
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "video": "video",
    "file": "files",
    "input_file": "files",
}
IMAGES, SOUNDS, VIDEOS = "images", "audio", "video"
PARTS = {each: frozenset(kind for kind, what in _OTHER_PARTS.items() if what == each) for each in (IMAGES, SOUNDS, VIDEOS)}
"""Kinds of parts, by what they are."""
PART_TYPES = {IMAGES: "image", SOUNDS: "audio", VIDEOS: "video"}
"""As templates call them."""
BY_MMPROJ = "a GGUF model sees and hears by a file of its own, --mmproj FILE"
_REFUSED = {IMAGES: "reads no images", SOUNDS: "hears no audio", VIDEOS: "reads no videos"}
AS_FRAMES = "it reads images: send frames of the video as such, or take a model that reads videos (docs/senses.md has a list)"
_IMAGE = "image part"
_AS_TEMPLATES_HAVE: dict[str, dict[str, Any]] = {kind: {"type": type_} for kind, type_ in PART_TYPES.items()}
_AS_TEMPLATES_HAVE[SOUNDS]["audio"] = ""  # which some look for


class ImagePart(NamedTuple):
    """An image of a message, a sound or a video, as its sender wrote it, and where that stands. kind: which of them."""

    url: str
    where: str
    kind: str = IMAGES


def content_of(content: Any, where: str, *, reads: Collection[str]) -> Content:
    """reads: which of IMAGES, SOUNDS and VIDEOS the model does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"the content of {where} is neither text nor a list of parts")
    parts: list[str | ImagePart] = []
    for place, part in enumerate(content):
        at = f"{where}.content[{place}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        what = _OTHER_PARTS.get(kind) if isinstance(kind, str) else None
        parts.append(_IN_PARTS[what](part, at) if what in _IN_PARTS and what in reads else _part(part, at, reads))
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {**_AS_TEMPLATES_HAVE[part.kind], _IMAGE: part}
        for part in parts
    ]


def take_images(messages: list[dict[str, Any]]) -> Iterator[ImagePart]:
    """The images, sounds or videos of messages, where a template sees that they are."""
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if _IMAGE in part:
                yield part.pop(_IMAGE)


def together(contents: Sequence[Content]) -> Content:
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return joined("\n\n", texts)
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return list(chain.from_iterable(parts))


def _image(part: Mapping[str, Any], where: str) -> ImagePart:
    """Its address is a text, or an object's `url`, under any of the names that it is called by."""
    given = next((part[name] for name in ("image_url", "image", "url") if part.get(name) is not None), None)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise UsageError(f"{where} has no image", 'write {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}')
    return ImagePart(url, where)


def _sound(part: Mapping[str, Any], where: str) -> ImagePart:
    """Base64 in an object's `data`, or an address: a text, or an object's `url`."""
    given = next((part[name] for name in ("input_audio", "audio_url", "audio", "url") if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("data", given.get("url"))
    if not isinstance(given, str):
        form = 'write {"type": "input_audio", "input_audio": {"data": "…base64…", "format": "wav"}}'
        raise UsageError(f"{where} has no sound", form)
    return ImagePart(given, where, SOUNDS)


def _video(part: Mapping[str, Any], where: str) -> ImagePart:
    """Its address is a text, or an object's `url`."""
    given = next((part[name] for name in ("video_url", "video", "url") if part.get(name) is not None), None)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise UsageError(f"{where} has no video", 'write {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,…"}}')
    return ImagePart(url, where, VIDEOS)


_IN_PARTS = {IMAGES: _image, SOUNDS: _sound, VIDEOS: _video}


def _part(part: Any, where: str, reads: Collection[str]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        if (what := _OTHER_PARTS[kind]) in _REFUSED:
            told = f"this model {_REFUSED[what]} ({where} is of type {kind!r})"
            raise UnsupportedError(told, AS_FRAMES if what == VIDEOS and IMAGES in reads else f"take one that does; {BY_MMPROJ}")
        raise UnsupportedError(f"{where} is of type {kind!r}: models here read no {_OTHER_PARTS[kind]}", "send its text instead")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise UsageError(f"{where} is no part of a message", 'write {"type": "text", "text": "…"}')
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise UsageError(f"{where} has no {_TEXT_PARTS[kind]}", 'write {"type": "text", "text": "…"}')
    return text
