"""Languages that Whisper was trained to write down, by the codes in its vocabulary (ISO 639, and "jw"), and what else they
are called.

As OpenAI's code and transformers' have them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from nanovllm_cli.errors import UsageError

LANGUAGES: Mapping[str, str] = {
    "af": "afrikaans", "am": "amharic", "ar": "arabic", "as": "assamese", "az": "azerbaijani", "ba": "bashkir",
    "be": "belarusian", "bg": "bulgarian", "bn": "bengali", "bo": "tibetan", "br": "breton", "bs": "bosnian", "ca": "catalan",
    "cs": "czech", "cy": "welsh", "da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish",
    "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fo": "faroese", "fr": "french", "gl": "galician",
    "gu": "gujarati", "ha": "hausa", "haw": "hawaiian", "he": "hebrew", "hi": "hindi", "hr": "croatian",
    "ht": "haitian creole", "hu": "hungarian", "hy": "armenian", "id": "indonesian", "is": "icelandic", "it": "italian",
    "ja": "japanese", "jw": "javanese", "ka": "georgian", "kk": "kazakh", "km": "khmer", "kn": "kannada", "ko": "korean",
    "la": "latin", "lb": "luxembourgish", "ln": "lingala", "lo": "lao", "lt": "lithuanian", "lv": "latvian", "mg": "malagasy",
    "mi": "maori", "mk": "macedonian", "ml": "malayalam", "mn": "mongolian", "mr": "marathi", "ms": "malay", "mt": "maltese",
    "my": "myanmar", "ne": "nepali", "nl": "dutch", "nn": "nynorsk", "no": "norwegian", "oc": "occitan", "pa": "punjabi",
    "pl": "polish", "ps": "pashto", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sa": "sanskrit", "sd": "sindhi",
    "si": "sinhala", "sk": "slovak", "sl": "slovenian", "sn": "shona", "so": "somali", "sq": "albanian", "sr": "serbian",
    "su": "sundanese", "sv": "swedish", "sw": "swahili", "ta": "tamil", "te": "telugu", "tg": "tajik", "th": "thai",
    "tk": "turkmen", "tl": "tagalog", "tr": "turkish", "tt": "tatar", "uk": "ukrainian", "ur": "urdu", "uz": "uzbek",
    "vi": "vietnamese", "yi": "yiddish", "yo": "yoruba", "yue": "cantonese", "zh": "chinese",
}  # fmt: skip
_OTHERS = {
    "burmese": "my", "castilian": "es", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb", "mandarin": "zh",
    "moldavian": "ro", "moldovan": "ro", "panjabi": "pa", "pushto": "ps", "sinhalese": "si", "valencian": "ca",
}  # fmt: skip
CODES = {**{name: code for code, name in LANGUAGES.items()}, **_OTHERS}
"""By the names that languages have in English."""


def told(given: str | None) -> str | None:
    """A language that somebody names; None where it is to be heard: of nothing, as forms send that, and of whisper.cpp's "auto".
    """
    return None if given is None or given.strip().lower() in ("", "auto") else given


def language_of(given: str, known: Collection[str]) -> str:
    """The code of a language that is among `known` codes, by its code ("en", "en-US") or a name. Raises UsageError."""
    word = given.strip().lower()
    code = CODES.get(word) or word.replace("_", "-").partition("-")[0]
    if code not in known:
        raise UsageError(f"this model does not know the language {given[:40]!r}", nearest(word, known))
    return code


def nearest(word: str, known: Collection[str]) -> str:
    """What is said of a word that is no language: those whose names are like it, or all codes."""
    names = {name: code for name, code in CODES.items() if code in known}
    near = difflib.get_close_matches(word[:40], names, n=3)
    if near:
        return f"near it: {', '.join(f'{name} ({names[name]})' for name in near)}"
    return f"known are {', '.join(sorted(known))}"
