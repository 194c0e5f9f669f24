"""From a sound to what is said in it, by a model that writes a text and nothing else (Moonshine): no times, no languages, nothing
of what was said before. Beside `dictation.py`, which is for Whispers; whoever drives the one drives the other.

A sound is cut into pieces of half a minute at the most, where it is quietest: of a longer one, somewhere in the last third of
that. A text that has not come to its end within the tokens that such a piece may take is one that goes round in circles, or its
language takes more of them: its piece is cut in two, and each half written by itself, down to a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import RATE, HearingSpec
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.dictation import SEED, Answered, Ask, Dictation, Heard, Passage, dictate, squeezed
from nanovllm_cli.text.scribe import Scribe, scribe_of
from nanovllm_cli.text.spoken import told
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.vision_spec import Clip, Sound, TokenIds

if TYPE_CHECKING:
    from nanovllm_cli.text.tokenizer import Tokenizer

TOKENS_A_SECOND = 13
"""At the most: what its publishers allow languages that take many (model cards of Flavors of Moonshine; 6.5 of English)."""
LEAST_TOKENS = 8
"""That any piece may take, however short."""
LEAST_CUT = 8 * RATE
"""Samples of a piece that may be cut in two: its halves are as long as what it was trained with, or nearly."""
LEAST_REST = 4 * RATE
"""That a cut leaves behind it; of what it was trained with, the shortest."""
QUIET, STEP = RATE // 10, RATE // 50
"""Samples of what is to be quiet, and from one such place to the next."""
_HINT = "leave it out, or take a Whisper: whisper:tiny"


class PlainScribe(NamedTuple):
    """Ids of what a text begins with, and of its end. text_len: tokens of the longest."""

    start: int
    end: int
    text_len: int

    def room(self, samples: int) -> int:
        """Tokens that a text of so many may take."""
        return max(1, min(self.text_len - 1, max(LEAST_TOKENS, samples * TOKENS_A_SECOND // RATE)))

    def prompt(self, spec: HearingSpec, piece: Sound) -> TokenIds:
        placed = spec.placed(piece, 0)
        return TokenIds([self.start] * (placed.num_tokens + 1), [placed])


AnyScribe = Scribe | PlainScribe


def any_scribe_of(
    hearing: HearingSpec | None, tokenizer: Tokenizer, config: Mapping[str, Any], max_len: int
) -> AnyScribe | None:
    """As `scribe_of`, for a model of either kind."""
    if hearing is None or not hearing.plain:
        return scribe_of(hearing, tokenizer, config, max_len)
    start, end = (tokenizer.token_to_id(token) for token in (hearing.tokens.token, "</s>"))
    if start is None or end is None:
        raise CheckpointError("the vocabulary is no Moonshine's: it lacks <s> or </s>")
    for key, found in (("decoder_start_token_id", start), ("eos_token_id", end)):
        if (said := config.get(key, found)) not in (found, [found]):
            raise CheckpointError(f"generation_config.json: {key!r} is {str(said)[:40]}, and the vocabulary has {found} for that")
    return PlainScribe(start, end, hearing.text_len)


def dictate_by(scribe: AnyScribe, spec: HearingSpec, tokenizer: Tokenizer, clip: Clip, wishes: Wishes) -> Dictation:
    """By a model of either kind. Raises as `dictate`."""
    if isinstance(scribe, Scribe):
        return dictate(scribe, spec, tokenizer, clip, wishes)
    return _dictate(scribe, spec, tokenizer, clip, wishes)


def check_plain(wishes: Wishes) -> None:
    """UnsupportedError for what such a model can't do, or that is of no use to it."""
    what = {
        "translations": wishes.task == "translate", "times": wishes.timed, "times of words": wishes.words,
        "a language that is named": told(wishes.language) is not None, "a prompt": bool((wishes.prompt or "").strip()),
    }  # fmt: skip
    if found := next((name for name, asked in what.items() if asked), None):
        raise UnsupportedError(f"this model writes down what is said, and knows nothing of {found}", _HINT)
    usual = Wishes()
    names = ("most_squeezed", "least_likely", "silent", "conditioned", "rise", "tries", "carried")
    if changed := next((name for name in names if getattr(wishes, name) not in (getattr(usual, name), None)), None):
        told_of = "it is asked once, and goes by nothing that was written before"
        raise UnsupportedError(f"{changed!r} has no meaning for this model: {told_of}", _HINT)


def _dictate(scribe: PlainScribe, spec: HearingSpec, tokenizer: Tokenizer, clip: Clip, wishes: Wishes) -> Dictation:
    check_plain(wishes)
    yield Heard(None, clip.seconds)
    (whole,) = clip.images
    values = np.frombuffer(whole.values, np.dtype("<f4"))
    pieces = [(first, end) for first, end in reversed(cut(values, spec.piece))]
    while pieces:
        first, end = pieces.pop()
        room = scribe.room(end - first)
        usual = {"max_tokens": room, "logprobs": 0, "seed": SEED}
        own = {**usual, **wishes.sampling, "temperature": wishes.temperature or 0.0, "n": 1}
        params = SamplingParams(stop_token_ids=(scribe.end,), **own)
        answered = yield Ask(scribe.prompt(spec, spec.part(whole, first, end)), params)
        (drawn,) = cast(list[Answered], answered)
        ids = [each for each in drawn.token_ids if each != scribe.end]
        if len(ids) >= room and params.max_tokens == room and end - first >= LEAST_CUT:
            middle = first + quietest(values[first:end], (end - first) // 3, (end - first) * 2 // 3)
            pieces += [(middle, end), (first, middle)]
            continue
        if text := tokenizer.decode(ids).strip():
            mean = sum(drawn.logprobs) / (len(ids) + 1)
            span, logprobs, temperature = (first / RATE, end / RATE), tuple(drawn.logprobs[: len(ids)]), wishes.temperature or 0.0
            yield [Passage(*span, f" {text}", tuple(ids), first, temperature, mean, squeezed(text), None, logprobs)]


def cut(values: np.ndarray, most: int) -> list[tuple[int, int]]:
    """[n] samples -> (first, end) of pieces of so many at the most, that follow each other: where one is cut, it is quiet."""
    pieces, first = [], 0
    while len(values) - first > most:
        latest = min(most, len(values) - first - LEAST_REST)
        end = first + quietest(values[first : first + latest], min(latest, most * 2 // 3), latest)
        pieces.append((first, end))
        first = end
    return [*pieces, (first, len(values))]


def quietest(values: np.ndarray, low: int, high: int) -> int:
    """[n] samples -> the middle of the quietest tenth of a second between two places; of several alike, the last."""
    if high - low <= QUIET:
        return high
    power = np.concatenate([[0.0], np.cumsum(np.square(values[low:high], dtype=np.float64))])
    starts = np.arange(0, high - low - QUIET + 1, STEP)
    sums = power[starts + QUIET] - power[starts]
    return low + int(starts[len(sums) - 1 - int(np.argmin(sums[::-1]))]) + QUIET // 2
