"""Languages that a model translates between, by what somebody calls them: the code of its own vocabulary ("deu_Latn", "de_DE",
"de"), another standard's (ISO 639-1 and 639-3), with or without a region, or an English name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.spoken import CODES

_THREE: Mapping[str, str] = {
    "af": "afr", "am": "amh", "ar": "arb", "as": "asm", "az": "azj", "ba": "bak", "be": "bel", "bg": "bul", "bn": "ben",
    "bo": "bod", "bs": "bos", "ca": "cat", "cs": "ces", "cy": "cym", "da": "dan", "de": "deu", "el": "ell", "en": "eng",
    "eo": "epo", "es": "spa", "et": "est", "eu": "eus", "fa": "pes", "ff": "fuv", "fi": "fin", "fo": "fao", "fr": "fra",
    "ga": "gle", "gd": "gla", "gl": "glg", "gn": "grn", "gu": "guj", "ha": "hau", "he": "heb", "hi": "hin", "hr": "hrv",
    "ht": "hat", "hu": "hun", "hy": "hye", "id": "ind", "ig": "ibo", "is": "isl", "it": "ita", "ja": "jpn", "jv": "jav",
    "jw": "jav", "ka": "kat", "kk": "kaz", "km": "khm", "kn": "kan", "ko": "kor", "ku": "kmr", "ky": "kir", "lb": "ltz",
    "lg": "lug", "ln": "lin", "lo": "lao", "lt": "lit", "lv": "lvs", "mg": "plt", "mi": "mri", "mk": "mkd", "ml": "mal",
    "mn": "khk", "mr": "mar", "ms": "zsm", "mt": "mlt", "my": "mya", "ne": "npi", "nl": "nld", "nn": "nno", "no": "nob",
    "nb": "nob", "ny": "nya", "oc": "oci", "om": "gaz", "or": "ory", "pa": "pan", "pl": "pol", "ps": "pbt", "pt": "por",
    "qu": "quy", "ro": "ron", "ru": "rus", "rw": "kin", "sa": "san", "sd": "snd", "si": "sin", "sk": "slk", "sl": "slv",
    "sm": "smo", "sn": "sna", "so": "som", "sq": "als", "sr": "srp", "ss": "ssw", "st": "sot", "su": "sun", "sv": "swe",
    "sw": "swh", "ta": "tam", "te": "tel", "tg": "tgk", "th": "tha", "ti": "tir", "tk": "tuk", "tl": "tgl", "tn": "tsn",
    "tr": "tur", "ts": "tso", "tt": "tat", "ug": "uig", "uk": "ukr", "ur": "urd", "uz": "uzn", "vi": "vie", "wo": "wol",
    "xh": "xho", "yi": "ydd", "yo": "yor", "zh": "zho", "zu": "zul",
}  # fmt: skip
"""ISO 639-1 -> 639-3; of a group of languages the one that FLORES-200 has."""
_ALSO = {"cmn": "zho", "ara": "arb", "aze": "azj", "fas": "pes", "lav": "lvs", "mlg": "plt", "mon": "khk", "msa": "zsm",
         "nep": "npi", "nor": "nob", "ori": "ory", "orm": "gaz", "pus": "pbt", "sqi": "als", "swa": "swh", "uzb": "uzn",
         "yid": "ydd", "kur": "kmr", "ekk": "est", "iw": "heb", "fil": "tgl"}  # fmt: skip
"""What groups are called in ISO 639-3, and older codes."""
_MOST_TOLD, _SCRIPT = 12, 4
"""Codes in an error, and letters of a script's (ISO 15924): one that a model has not is another language, a region is not."""


def language_code(given: str, known: Collection[str]) -> str:
    """Which of the `known` codes is meant. Raises UsageError for none and for several, with those that are near."""
    word = given.strip().lower().replace("-", "_")
    written = {code.lower(): code for code in known}
    if word in written:
        return written[word]
    stem, _, rest = CODES.get(word.replace("_", " "), word).partition("_")
    same = _same(stem)
    for other in sorted(same):
        if rest and f"{other}_{rest}" in written:
            return written[f"{other}_{rest}"]
    found = []
    for lower, code in sorted(written.items()):
        own, _, script = lower.partition("_")
        is_another = len(rest) == len(script) == _SCRIPT
        if not is_another and not same.isdisjoint(_same(own)):
            found.append(code)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"this model knows {given[:40]!r} in several ways", f"say which: {', '.join(found[:_MOST_TOLD])}")
    raise UsageError(f"this model does not know the language {given[:40]!r}", _near(word, written))


def _same(stem: str) -> set[str]:
    """All codes of one language."""
    three = _THREE.get(stem) or _ALSO.get(stem) or stem
    others = (code for table in (_THREE, _ALSO) for code, own in table.items() if own == three)
    return {stem, three, *others}


def _near(word: str, written: Mapping[str, str]) -> str:
    names = {name: code for name, short in CODES.items()
             for lower, code in written.items() if lower.partition("_")[0] in _same(short)}  # fmt: skip
    near = difflib.get_close_matches(word[:40], [*names, *written], n=3)
    if near:
        return f"near it: {', '.join(f'{name} ({names[name]})' if name in names else written[name] for name in near)}"
    every = sorted(written.values())
    more = "" if len(every) <= _MOST_TOLD else f", … ({len(every)} of them)"
    return f"known are {', '.join(every[:_MOST_TOLD])}{more}"
