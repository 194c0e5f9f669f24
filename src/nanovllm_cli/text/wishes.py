"""What somebody wishes of a Whisper's transcript: its language, its times, and when a window's text is drawn again.

The numbers are those of OpenAI's code (`transcribe.py` of openai/whisper): Radford et al. 2022, section 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.scribe import Task

HOTTEST = 1.0
"""The temperature behind which nobody tries again."""
RISE = 0.2
"""From one temperature to the next."""
LEAST_RISE, MOST_TRIES = 0.01, 64
_OURS = (
    "temperature", "n", "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "transcript", "constraint", "reasoning",
)  # fmt: skip
"""Fields of SamplingParams that a transcript decides."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """language: a code or a name; None: it is heard. prompt: what may come up, or was said before the sound; carried: in front of
    each window, not the first alone. timed: whether times are wanted; of a sound longer than a window they are found in any case.
    words: those of words, too. conditioned: a window's text begins behind that of the one before. sampling: fields of
    SamplingParams, but for those that say how many texts there are, where they end and what is told of them; num_beams are of
    the first try alone, at temperature 0.

    temperature: of the first try; rise: by how much it is higher at the next, up to 1, where a text is not good; 0: there is one.
    Both None: 0 and 0.2; a temperature alone is the only one. tries: texts that are drawn side by side at temperatures above 0,
    of which the likeliest counts. Good is what repeats itself no more than `most_squeezed` (how many times as long as compressed
    it is), and whose tokens' log-probabilities have a mean of `least_likely` at least. Behind which probability `silent` nobody
    speaks, where the text is unlikely, too. None of these three: that is not asked.

    Raises UsageError for numbers without a meaning.
    """

    language: str | None = None
    task: Task = "transcribe"
    prompt: str | None = None
    timed: bool = False
    temperature: float | None = None
    most_squeezed: float | None = 2.4
    least_likely: float | None = -1.0
    silent: float | None = 0.6
    conditioned: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    rise: float | None = None
    tries: int = 5
    carried: bool = False
    words: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "most_squeezed", "least_likely", "silent", "rise"):
            value = getattr(self, name)
            is_number = type(value) in (int, float) and math.isfinite(value)
            if value is not None and not is_number:
                raise UsageError(f"{name} of a transcript is a number, not {str(value)[:40]}")
        if self.temperature is not None and self.temperature < 0:
            raise UsageError(f"a temperature is 0 or more, not {self.temperature:g}")
        if self.rise is not None and self.rise != 0 and self.rise < LEAST_RISE:
            raise UsageError(f"temperatures rise by {LEAST_RISE:g} at least, not by {self.rise:g}", "0 tries once")
        if unknown := [name for name in self.sampling if name in _OURS or name not in SamplingParams.__dataclass_fields__]:
            raise UsageError(f"a transcript's sampling has no {unknown[0]!r}", "temperature, rise and tries are fields of Wishes")
        if type(self.tries) is not int or not 1 <= self.tries <= MOST_TRIES:
            raise UsageError(f"a text is drawn 1 to {MOST_TRIES} times at a temperature, not {str(self.tries)[:40]}")
        if SamplingParams(**self.sampling).num_beams > 1 and self.temperature:  # what contradicts itself is refused there
            told = f"num_beams has no effect: a text is looked for at temperature 0, and here the first has {self.temperature:g}"
            raise UsageError(told, "leave one of them out")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of one try after another."""
        first = self.temperature or 0.0
        rise = self.rise if self.rise is not None else RISE if self.temperature is None else 0.0
        if not rise:
            return (first,)
        count = max(1, math.floor((HOTTEST - first) / rise + 1e-6) + 1)
        return tuple([round(first + i * rise, 6) for i in range(count)])


def default_wish(name: str) -> str:
    """What one of these is where nobody says: for a command's help."""
    return f"{next(each.default for each in fields(Wishes) if each.name == name):g}"
