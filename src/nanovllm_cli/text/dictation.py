"""From a sound to what is said in it, by a Whisper: the way through it, window by window (Radford et al. 2022, 4.5, and
OpenAI's code).

A window is half a minute. Where a text has times, the next one begins where the last passage that was written to its end has
ended; else behind it. In front of a window's text stands what was written before, unless that was drawn at a high
temperature. A text that repeats itself, by how small it is when compressed, or that the model itself takes to be unlikely, is
drawn again, at higher and higher temperatures, several times at each; a window in which probably nobody speaks is left out.

Whoever has a model drives a `dictate`: it yields what is to be asked, and is sent what the model answered; and passages, as
they come. Nothing here knows engines.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.hearing_spec import HOP, RATE, HearingSpec
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.scribe import SECONDS, Scribe
from nanovllm_cli.text.spoken import language_of, told
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.text.words import Said, Word, spoken
from nanovllm_cli.vision_spec import Clip, TokenIds

STEP = round(SECONDS * RATE / HOP)
"""Frames between two times."""
SEED = 0
"""Of what is drawn, where nobody names one: a sound has one transcript."""
FORGETS_ABOVE = 0.5
"""The temperature from which on a text is no beginning of the next."""


class Ask(NamedTuple):
    """What a model is to be asked for: as many answers as params say."""

    prompt: TokenIds
    params: SamplingParams


class Align(NamedTuple):
    """Of what text it is to be asked when its tokens are said. lora: see SamplingParams."""

    prompt: TokenIds
    alignment: Alignment
    lora: Sequence[Any] = ()


class Answered(NamedTuple):
    """What it answered: ids, the one that ended the answer left out or not, and log-probabilities of all that were drawn."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Passage(NamedTuple):
    """What is said from one moment to another, in seconds. token_ids: as drawn, times included. seek: frames in front of its
    window. The next four are its window's: temperature, the mean of log-probabilities, how many times as long as compressed the
    text is, and how probably nobody speaks, None where that is not known. logprobs: of token_ids. words: where they are wanted.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    seek: int
    temperature: float
    mean_logprob: float
    squeezed: float
    silent: float | None
    logprobs: tuple[float, ...] = ()
    words: tuple[Word, ...] = ()


class Heard(NamedTuple):
    """language: its code, told or heard; None of a model that knows one. seconds: of the sound."""

    language: str | None
    seconds: float


Step = Ask | Align | list[Passage] | Heard
Reply = list[Answered] | Sequence[float] | None
Dictation = Generator[Step, Reply, None]
"""Yields what the sound is, then passages and what is to be asked, which is answered by `send`: `Ask` with all answers in order,
`Align` with what an Alignment finds."""


class _Text(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    temperature: float
    mean_logprob: float
    squeezed: float


def dictate(scribe: Scribe, spec: HearingSpec, tokenizer: Tokenizer, clip: Clip, wishes: Wishes) -> Dictation:
    """clip: of one piece, whose `heard` frames count. Raises UsageError for an unknown language, UnsupportedError for what the
    model can't do, before anything is asked."""
    (whole,) = clip.images
    prompted = "" if wishes.prompt is None else wishes.prompt.strip()
    given = tokenizer.encode(f" {prompted}", add_special_tokens=False, parse_special=False) if prompted else []
    if given and scribe.previous is None:
        raise UnsupportedError("this model's vocabulary has no <|startofprev|>, which a prompt stands behind", "leave it out")
    language = _language(scribe, wishes)
    scribe.begins(language or next(iter(scribe.languages), None), wishes.task, timed=False)  # refuses what there is not
    if language is None and scribe.languages:
        language = yield from _heard_language(scribe, spec, scribe.prompt(spec, spec.window(whole, 0), [scribe.start]))
    yield Heard(language, clip.seconds)
    timed = wishes.timed or wishes.words or whole.heard > spec.piece
    begins, plainly = (scribe.begins(language, wishes.task, timed=each) for each in (timed, False))
    room = scribe.text_len // 2 - 1  # as much for the text before as for this one
    ahead = given[-room:] if wishes.carried else []
    before, seek, until = [] if wishes.carried else given, 0, 0.0
    while seek < whole.heard:
        window, size = spec.window(whole, seek), min(spec.piece, whole.heard - seek)
        said = [*ahead, *before[max(0, len(before) - room + len(ahead)) :]]
        behind = [] if not said or scribe.previous is None else [scribe.previous, *said]
        silent = None
        if scribe.nothing is not None:
            asked = scribe.prompt(spec, window, [*behind, scribe.start])
            (drawn,) = yield from _asked(asked, _one_of(scribe.nothing))
            silent = _exp(drawn.logprobs[0])
        asked = scribe.prompt(spec, window, [*behind, *begins])
        text = yield from _written(scribe, tokenizer, asked, wishes, silent, timed=timed)
        is_silent = _is_silent(wishes, silent) and not _is_likely(wishes, text)
        found, further = ([], size) if is_silent else _passages(scribe, tokenizer, text, seek, size, silent)
        if found:
            if wishes.words:
                asked, rows = scribe.prompt(spec, window, plainly), max(1, size // STEP)
                found = yield from _with_words(scribe, tokenizer, asked, rows, found, language, wishes, until)
                until = next((each.end for each in reversed(found) if each.words), until)
            yield found
        if not is_silent:
            written = [each for passage in found for each in passage.token_ids]
            before = [*before, *written] if wishes.conditioned and text.temperature <= FORGETS_ABOVE else []
        seek += max(further, STEP)


def _language(scribe: Scribe, wishes: Wishes) -> str | None:
    """Its code, where it is told and matters."""
    if (given := told(wishes.language)) is None:
        return None
    code = language_of(given, scribe.languages or ("en",))
    return code if scribe.languages else None


def _asked(prompt: TokenIds, params: SamplingParams) -> Generator[Step, Reply, list[Answered]]:
    answered = yield Ask(prompt, params)
    assert isinstance(answered, list), "whoever drives this sends what was answered"
    return cast(list[Answered], answered)


def _one_of(*ids: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=ids, logprobs=0, ignore_eos=True)


def _heard_language(scribe: Scribe, spec: HearingSpec, prompt: TokenIds) -> Generator[Step, Reply, str]:
    """The likeliest of those that it knows."""
    (drawn,) = yield from _asked(prompt, _one_of(*scribe.languages.values()))
    return next(code for code, token in scribe.languages.items() if token == drawn.token_ids[0])


def _written(
    scribe: Scribe, tokenizer: Tokenizer, prompt: TokenIds, wishes: Wishes, silent: float | None, *, timed: bool
) -> Generator[Step, Reply, _Text]:
    """A window's text: the first that is good, or the last."""
    text = None
    for temperature in wishes.temperatures:
        usual = {"max_tokens": scribe.text_len // 2, "logprobs": 0, "seed": SEED}
        own = {**usual, **wishes.sampling, "temperature": temperature}
        own |= {"n": wishes.tries, "num_beams": 1} if temperature else {"n": 1}  # beams draw nothing
        params = SamplingParams(transcript=scribe.rules(timed=timed), stop_token_ids=(scribe.end,), **own)
        drawn = yield from _asked(prompt, params)
        text = max((_text(scribe, tokenizer, each, temperature) for each in drawn), key=_likelihood)
        is_bad = (wishes.most_squeezed is not None and text.squeezed > wishes.most_squeezed) or _is_unlikely(wishes, text)
        if not is_bad or (_is_silent(wishes, silent) and _is_unlikely(wishes, text)):
            break
    assert text is not None
    return text


def _text(scribe: Scribe, tokenizer: Tokenizer, drawn: Answered, temperature: float) -> _Text:
    ids = [each for each in drawn.token_ids if each != scribe.end]
    plain = tokenizer.decode([each for each in ids if each < scribe.end]).strip()
    count = len(ids) + 1  # with the end, which counts whether it came or not
    logprobs = [logprob for each, logprob in zip(drawn.token_ids, drawn.logprobs, strict=False) if each != scribe.end]
    return _Text(ids, logprobs, temperature, sum(drawn.logprobs) / count, squeezed(plain))


def _likelihood(text: _Text) -> float:
    """What tells which of several counts: in OpenAI's code the end is in the sum, and not among those it is divided by."""
    count = len(text.token_ids)
    mean = text.mean_logprob * (count + 1) / max(1, count)
    return -math.inf if math.isnan(mean) else mean


def _is_unlikely(wishes: Wishes, text: _Text) -> bool:
    return wishes.least_likely is not None and text.mean_logprob < wishes.least_likely


def _is_likely(wishes: Wishes, text: _Text) -> bool:
    """Whether it counts though probably nobody speaks."""
    return wishes.least_likely is not None and text.mean_logprob > wishes.least_likely


def _is_silent(wishes: Wishes, silent: float | None) -> bool:
    return wishes.silent is not None and silent is not None and silent > wishes.silent


def squeezed(text: str) -> float:
    """How many times as long as compressed it is."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data))


def _exp(logprob: float) -> float:
    return 0.0 if math.isnan(logprob) else min(1.0, math.exp(logprob))


def _passages(
    scribe: Scribe, tokenizer: Tokenizer, text: _Text, seek: int, size: int, silent: float | None
) -> tuple[list[Passage], int]:
    """Of a window's text, and how many frames further the next window begins."""
    ids, first = text.token_ids, scribe.first_time
    are_times = [each >= first for each in ids]
    ends = [i + 1 for i, (one, other) in enumerate(pairwise(are_times)) if one and other]
    ends_alone = are_times[-2:] == [False, True]
    offset, seconds = seek * HOP / RATE, size * HOP / RATE
    if ends:
        cuts = list(pairwise([0, *ends, *([len(ids)] if ends_alone else [])]))
        parts = [ids[start:end] for start, end in cuts]
        spans = [((part[0] - first) * SECONDS, (part[-1] - first) * SECONDS) for part in parts]
        further = size if ends_alone else (ids[ends[-1] - 1] - first) * STEP
    else:
        times = [each for each in ids if each >= first]
        last = (times[-1] - first) * SECONDS if times and times[-1] != first else seconds
        cuts, parts, spans, further = [(0, len(ids))], [ids], [(0.0, last)], size
    made = (
        Passage(
            offset + start, offset + end, tokenizer.decode([each for each in part if each < scribe.end]), tuple(part), seek,
            text.temperature, text.mean_logprob, text.squeezed, silent, tuple(text.logprobs[slice(*cut)]),
        )
        for part, cut, (start, end) in zip(parts, cuts, spans, strict=True)
    )  # fmt: skip
    return [each for each in made if each.end > each.start and each.text.strip()], further


def _with_words(
    scribe: Scribe,
    tokenizer: Tokenizer,
    prompt: TokenIds,
    rows: int,
    found: list[Passage],
    language: str | None,
    wishes: Wishes,
    until: float,
) -> Generator[Step, Reply, list[Passage]]:
    """prompt: up to where a text without times begins. rows: of the encoder, in which something is heard. until: when the last
    passage before these was over. The windows go on as if nobody had asked."""
    said = [_said(scribe, each) for each in found]
    ids = [each for passage in said for each in passage.token_ids]
    beside = len(prompt) - prompt.images[0].end
    asked = prompt + ids[: scribe.text_len - beside - 1] + [scribe.end]
    rows_of = yield Align(asked, Alignment(scribe.heads, beside - 1, rows), wishes.sampling.get("lora") or ())
    assert rows_of is not None, "whoever drives this sends what was found"
    begins = [SECONDS * cast(float, row) for row in rows_of]
    times = spoken(tokenizer, said, begins, found[0].seek * HOP / RATE, _of_words(wishes, language), until)
    return [each._replace(start=its.start, end=its.end, words=its.words) for each, its in zip(found, times, strict=True)]


def _said(scribe: Scribe, passage: Passage) -> Said:
    pairs = [(each, logprob) for each, logprob in zip(passage.token_ids, passage.logprobs, strict=True) if each < scribe.end]
    return Said([each for each, _ in pairs], [_exp(logprob) for _, logprob in pairs], passage.start, passage.end)


def _of_words(wishes: Wishes, language: str | None) -> str | None:
    """The language that is written."""
    return "en" if wishes.task == "translate" else language


def joined(texts: Sequence[str]) -> str:
    """The whole text of passages."""
    return "".join(texts).strip()
