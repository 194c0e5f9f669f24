"""Asking a model for what is said in a sound: the conversation that is put to it, and what its answer is given to begin with.

How each family is asked is in its HearingSpec. What is said of languages is ISO 639's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import Transcript
from nanovllm_cli.text.spoken import nearest, told

if TYPE_CHECKING:
    from nanovllm_cli.text.tokenizer import Tokenizer

LANGUAGES: Mapping[str, str] = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
    "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
"""Those that one of the models here was trained to write down, by their codes."""
_MARK = re.compile(r"<\w+>|\[[A-Z]+\]")
_CODES = {name.lower(): code for code, name in LANGUAGES.items()}


class Asked(NamedTuple):
    """messages: in OpenAI's form. begins: ids that the answer is given to begin with."""

    messages: list[dict[str, Any]]
    begins: list[int]


def asks(
    known: Transcript, tokenizer: Tokenizer, sound: Mapping[str, Any], language: str | None = None, prompt: str | None = None
) -> Asked:
    """sound: a part of a message. language: a code ("en", "en-US") or a name. prompt: what whoever asks says of it.

    Raises UsageError for an unknown language, UnsupportedError for a prompt or a language that the model was not made for.
    """
    said: dict[str, str] = {}
    if (language := told(language)) is not None:
        code = language_of(language)
        said = {"code": code, "name": LANGUAGES[code]}
    question = (known.question_in if said else known.question).format(**said)
    messages: list[dict[str, Any]] = []
    if prompt and known.own == "nothing":
        raise UnsupportedError("this model writes down what is said, and takes no prompt beside it", "leave the prompt out")
    if prompt and known.own == "question":
        question = prompt
    elif prompt:
        messages.append({"role": "system", "content": prompt})
    messages.append({"role": "user", "content": [sound, *([{"type": "text", "text": question}] if question else [])]})
    begins = (known.begins_in if said else known.begins).format(**said)
    if missing := [mark for mark in _MARK.findall(begins) if tokenizer.token_to_id(mark) is None]:
        raise UnsupportedError(f"this model's vocabulary has no {missing[0]}, which a transcript begins behind")
    return Asked(messages, tokenizer.encode(begins, add_special_tokens=False))


def language_of(given: str) -> str:
    """The code of a language, by whatever of it was said."""
    word = given.strip().lower()
    code = _CODES.get(word) or word.replace("_", "-").partition("-")[0]
    if code not in LANGUAGES:
        raise UsageError(f"no model here knows the language {given[:40]!r}", nearest(word, LANGUAGES))
    return code
