"""The options of `run` that say how a sound is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import TRANSCRIPT, option
from nanovllm_cli.cli.question import TranscriptWishes
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.spoken import LANGUAGES, language_of, told
from nanovllm_cli.text.transcripts import LANGUAGES as OTHERS
from nanovllm_cli.text.wishes import RISE, Wishes, default_wish

EVERY_LANGUAGE = {**LANGUAGES, **OTHERS}
"""That one of the models knows: what none does is told before one is loaded."""


def _option(*flags: str, help: str, **more: Any) -> Any:
    return option(*flags, help=help, panel=TRANSCRIPT, envvar=None, **more)


def _bound(name: str, *flags: str, help: str) -> Any:
    told = f"{help}; none: not asked. [{default_wish(name)}]"
    return _option(*flags, help=told, parser=parsers.bound, metavar="NUMBER")


@dataclass(frozen=True, slots=True)
class TranscriptOptions:
    """All but the first are a Whisper's alone. Those of fields of `Wishes` are called as these."""

    language: str | None = _option(
        "--language", help="Of a sound that is written down, a code or a name: en, German. [heard by the model]", metavar="NAME"
    )
    translate: bool = _option("--translate", help="A Whisper writes in English what is said.", default=False)
    subtitles: Literal["srt", "vtt"] | None = _option(
        "--subtitles", help="A Whisper's transcript with its times: srt or vtt.", metavar="KIND"
    )
    max_words: int | None = _option(
        "--max-words", help="Most words of a subtitle, which then begins and ends with them. [as they come]", metavar="N"
    )
    max_line_width: int | None = _option(
        "-ml", "--max-line-width", help="Most characters of a subtitle, but for a longer word. [as they come]", metavar="N"
    )
    word_times: bool = _option("--word-times", help="When each word is said, in --json and --jsonl.", default=False)
    rise: float | None = _option(
        "-tpi", "--temp-inc",
        help=f"By how much the temperature rises up to 1 while a text is not good; 0 tries once. [{RISE:g}, with --temp 0]",
        metavar="NUMBER",
    )
    tries: int | None = _option(
        "-bo", "--best-of", help=f"Texts side by side at temperatures above 0. [{default_wish('tries')}]", metavar="N"
    )
    most_squeezed: float | None = _bound(
        "most_squeezed", "--compression-ratio-threshold", help="How many times as long as compressed a good text is at most"
    )
    least_likely: float | None = _bound(
        "least_likely", "-lpt", "--logprob-threshold", help="The least mean log-probability of a good text's tokens"
    )
    silent: float | None = _bound(
        "silent", "-nth", "--no-speech-threshold", help="From which probability on an unlikely text is taken for silence"
    )
    conditioned: bool | None = _option(
        "--condition-on-previous-text/--no-condition-on-previous-text",
        help="What was written so far stands in front of the next half minute. [yes]",
    )
    carried: bool = _option(
        "--carry-initial-prompt", help="The prompt stands in front of each half minute, not of the first alone.", default=False
    )

    def wishes(self) -> TranscriptWishes:
        """What was asked for. Raises UsageError for numbers without a meaning."""
        for flag, value in (("--max-words", self.max_words), ("--max-line-width", self.max_line_width)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} is 1 or more, not {value}")
            if value is not None and self.subtitles is None:
                raise UsageError(f"{flag} has no meaning without --subtitles", "add --subtitles srt, or vtt")
        if (language := told(self.language)) is not None:
            language_of(language, EVERY_LANGUAGE)
        bounds = {name: None if math.isinf(value) else value for name in ("most_squeezed", "least_likely", "silent")
                  if (value := getattr(self, name)) is not None}  # fmt: skip
        others = {name: value for name in ("rise", "tries", "conditioned") if (value := getattr(self, name)) is not None}
        own = {**others, **bounds, **({"carried": True} if self.carried else {})}
        Wishes(**own)
        return TranscriptWishes(
            self.language, self.translate, self.subtitles, self.max_words, self.max_line_width, self.word_times, own
        )
