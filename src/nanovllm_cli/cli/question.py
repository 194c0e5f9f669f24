"""What is asked: a conversation or a text, new or as a continuation of the last run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from nanovllm_cli.cli.history import LastRun, Message
from nanovllm_cli.cli.inputs import checked
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, VIDEOS
from nanovllm_cli.text.wishes import Wishes

SOUND, VIDEO = "data:audio/", "data:video/"
WORDS = {IMAGES: "image", SOUNDS: "sound", VIDEOS: "video"}
LACKS = {IMAGES: "reads no images", SOUNDS: "hears nothing", VIDEOS: "reads no videos"}
"""What is said of a model that does not."""
_OWN = {
    "rise": "--temp-inc", "tries": "--best-of", "most_squeezed": "--compression-ratio-threshold",
    "least_likely": "--logprob-threshold", "silent": "--no-speech-threshold",
    "conditioned": "--condition-on-previous-text", "carried": "--carry-initial-prompt",
}  # fmt: skip
_FLAGS = {IMAGES: "--image", SOUNDS: "--audio", VIDEOS: "--video"}


class TranscriptWishes(NamedTuple):
    """Of a sound. language: a code or a name; None: it is heard. subtitles: what it is written as, with so many words and
    characters at the most. word_times: when each word is said is told. own: fields of `Wishes`, as they were asked for."""

    language: str | None = None
    translate: bool = False
    subtitles: Literal["srt", "vtt"] | None = None
    max_words: int | None = None
    max_line_width: int | None = None
    word_times: bool = False
    own: Mapping[str, Any] = MappingProxyType({})

    @property
    def side_by_side(self) -> int:
        """Answers of one question, to a Whisper."""
        tries: int = self.own.get("tries", Wishes().tries)
        return tries

    @property
    def flags(self) -> list[str]:
        """Of what was asked for beside a language, which is a Whisper's alone."""
        found = {"--translate": self.translate, "--subtitles": self.subtitles is not None, "--word-times": self.word_times}
        return [*(flag for flag, asked in found.items() if asked), *(_OWN[name] for name in self.own)]


@dataclass(frozen=True, slots=True)
class Question:
    """messages: a conversation whose last message is to be answered, or is an answer to go on with. None: plain `text`, to be
    gone on with as it is; or, with sounds, as files' bytes or data URLs, these are to be written down, and text is what may come
    up in them.
    names: of these files. begins: ids that the answer is given to begin with."""

    messages: Sequence[Message] | None = None
    text: str = ""
    sounds: Sequence[str | bytes] = ()
    names: Sequence[str] = ()
    wishes: TranscriptWishes = TranscriptWishes()
    begins: Sequence[int] = ()

    @property
    def goes_on(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"  # type: ignore[index]


def new_question(text: str, *, chats: bool, system: str | None, images: Sequence[str] = ()) -> Question:
    """images: data URLs, of sounds and videos, too."""
    if not chats:
        _refuse_images(images)
        return Question(text=text)
    return Question(with_system([said(text, images)], system))


def said(text: str, images: Sequence[str] = ()) -> Message:
    """A user's message; images, sounds and videos, as data URLs, stand before what is said of them, as models have mostly read
    them."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = list(map(_part, images))
    return {"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}


def kind_of(url: str | bytes) -> str:
    """Of a data URL: IMAGES, SOUNDS or VIDEOS. Bytes are a sound's."""
    return SOUNDS if isinstance(url, bytes) or url.startswith(SOUND) else VIDEOS if url.startswith(VIDEO) else IMAGES


def _part(url: str) -> dict[str, Any]:
    if (kind := kind_of(url)) != SOUNDS:
        name = f"{WORDS[kind]}_url"
        return {"type": name, name: {"url": url}}
    head, _, data = url.partition(";base64,")
    return {"type": "input_audio", "input_audio": {"data": data, "format": head.removeprefix(SOUND)}}


def _refuse_images(images: Sequence[str]) -> None:
    if images:
        kind = kind_of(images[0])
        flag, what = _FLAGS[kind], f"{WORDS[kind]}s"
        raise UsageError(f"{flag} has no meaning without a chat template, which says where {what} stand", "leave --raw out")


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """`messages`, with the system prompt of the command line where they have none of their own."""
    if system is None or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def continued(run: LastRun, text: str, *, chats: bool, system: str | None, images: Sequence[str] = ()) -> Question:
    """The last run with a new prompt after it. In a chat: its messages; without a prompt the last is an answer to go
    on with. Without a template: the text so far and the new text right after it."""
    if chats:
        if run.messages is None:
            raise UsageError("the last run had no chat template, this one has", "continue it with --raw")
        messages = run.messages
        if system is not None:
            messages = with_system([message for message in messages if message.get("role") != "system"], system)
        if text or images:
            return Question([*messages, said(text, images)])
        if not messages or messages[-1].get("role") != "assistant" or not messages[-1].get("content"):
            raise UsageError("the last run has no answer to continue", "say something to answer")
        return Question(messages)
    _refuse_images(images)
    if run.text is None:
        raise UsageError(
            "the last run was a chat, this one has no chat template", "continue it without --raw, with a chat model"
        )
    return Question(text=run.text + text)


def checked_messages(value: object) -> list[Message]:
    """A conversation from a JSON line. Raises UsageError; what the roles mean is the template's business."""
    if not isinstance(value, list) or not value:
        raise UsageError("messages is not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError('a message is not an object with a "role"')
        if not isinstance(message.get("content"), str | list | None):
            raise UsageError('the "content" of a message is neither text nor a list of parts')
        _check_unicode(message)
    return value


def _check_unicode(value: object) -> None:
    if isinstance(value, str):
        checked(value, "a message")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(key)
            _check_unicode(item)
    elif isinstance(value, list):
        for item in value:
            _check_unicode(item)
