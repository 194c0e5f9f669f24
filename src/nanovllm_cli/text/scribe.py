"""What a Whisper is told, and by what rules it writes: the tokens of its vocabulary, and what its generation_config.json says.

Nothing here is asked of a model (`dictation.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nanovllm_cli.constraint import TranscriptRules
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import Sound, TokenIds

if TYPE_CHECKING:
    from nanovllm_cli.text.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
SECONDS = 0.02
"""From one of the tokens that are times to the next: two frames of a spectrogram."""
ENGLISH_VOCABULARY = 51864
"""Tokens of those that know English alone, where their files don't say so."""
MAX_SUPPRESSED = 2048
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


class Scribe(NamedTuple):
    """Ids of tokens. start: of what an answer is given to begin with; end: of an answer; sound: stands for what is heard;
    untimed: says that there are no times, which are the tokens behind it; previous: in front of what was written before; nothing:
    means that nobody speaks; None where a vocabulary has none. tasks, languages: by name and by code; none of a model that knows
    English alone. bans, first_bans, latest: see `TranscriptRules`. text_len: most tokens of a text, with what it begins with.
    heads: see `Alignment`."""

    start: int
    end: int
    sound: int
    untimed: int
    previous: int | None
    nothing: int | None
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    bans: tuple[int, ...]
    first_bans: tuple[int, ...]
    latest: int | None
    text_len: int
    heads: tuple[tuple[int, int], ...]

    @property
    def first_time(self) -> int:
        return self.untimed + 1

    def begins(self, language: str | None, task: Task, *, timed: bool) -> list[int]:
        """What a text begins with. language: its code, which a model that knows several is always told. UnsupportedError for what
        the model was not made for."""
        if not self.languages:
            if task == "translate":
                raise UnsupportedError("this model knows English alone, and translates nothing", "take one that knows more")
            told = []
        else:
            if task not in self.tasks:
                raise UnsupportedError(f"this model's vocabulary has no <|{task}|>")
            assert language is not None
            told = [self.languages[language], self.tasks[task]]
        return [self.start, *told, *([] if timed else [self.untimed])]

    def rules(self, *, timed: bool) -> TranscriptRules:
        first = self.first_time if timed else None
        return TranscriptRules(self.end, self.bans, self.first_bans, first, self.latest if timed else None)

    def prompt(self, spec: HearingSpec, window: Sound, text: Sequence[int]) -> TokenIds:
        """With what is heard in front of a text's beginning."""
        placed = spec.placed(window, 0)
        beside = placed.num_tokens - placed.num_rows  # which no layer reads
        return TokenIds([self.sound] * placed.num_rows + [self.start] * beside + list(text), [placed])


def scribe_of(hearing: HearingSpec | None, tokenizer: Tokenizer, config: Mapping[str, Any], max_len: int) -> Scribe | None:
    """config: generation_config.json. max_len: most tokens of a prompt and an answer, what stands for a sound included. None of a
    model that is no Whisper. Raises CheckpointError for a vocabulary or a config that can't be one's."""
    if hearing is None or not hearing.leads:
        return None
    wanted = ("startoftranscript", "endoftext", "notimestamps")
    start, end, untimed, sound = (tokenizer.token_to_id(token) for token in (*(f"<|{w}|>" for w in wanted), hearing.tokens.token))
    if start is None or end is None or untimed is None or sound is None or not end < start < untimed:
        raise CheckpointError("the vocabulary is no Whisper's: it lacks <|startoftranscript|>, <|endoftext|> or <|notimestamps|>")
    tasks = {name: found for name in ("transcribe", "translate") if (found := tokenizer.token_to_id(f"<|{name}|>")) is not None}
    named = ((match[1], each) for each in range(start + 1, untimed)
             if (match := _LANGUAGE.fullmatch(tokenizer.id_to_token(each) or "")) is not None)  # fmt: skip
    is_multilingual = config.get("is_multilingual", tokenizer.vocab_size != ENGLISH_VOCABULARY)
    if not isinstance(is_multilingual, bool):
        raise CheckpointError("generation_config.json: 'is_multilingual' must be true or false")
    latest = config.get("max_initial_timestamp_index")
    if latest is not None and (type(latest) is not int or not 0 <= latest < 2**31):
        raise CheckpointError("generation_config.json: 'max_initial_timestamp_index' must be a whole number")
    nothing = tokenizer.token_to_id("<|nospeech|>")
    rows = hearing.placed(hearing.window(Sound.of(b"", 0, 0, hearing.tower.num_bins), 0), 0).num_tokens
    return Scribe(
        start, end, sound, untimed,
        previous=tokenizer.token_to_id("<|startofprev|>"),
        nothing=tokenizer.token_to_id("<|nocaptions|>") if nothing is None else nothing,
        tasks=tasks if is_multilingual else {},
        languages=dict(named) if is_multilingual else {},
        bans=_ids(config, "suppress_tokens"),
        first_bans=_ids(config, "begin_suppress_tokens"),
        latest=latest,
        text_len=max_len - rows,
        heads=_heads(config.get("alignment_heads"), *hearing.decoder),
    )  # fmt: skip


def _heads(listed: Any, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Where the files name none, all in the later half of the layers, as OpenAI's code has it."""
    if listed is None:
        return tuple([(layer, head) for layer in range(layers // 2, layers) for head in range(heads)])

    def is_head(pair: Any) -> bool:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        return is_pair and 0 <= pair[0] < layers and 0 <= pair[1] < heads

    if not isinstance(listed, list) or not 1 <= len(listed) <= layers * heads or not all(map(is_head, listed)):
        told = f"must be a list of [layer, head], of {layers} layers and {heads} heads"
        raise CheckpointError(f"generation_config.json: 'alignment_heads' {told}")
    return tuple([(layer, head) for layer, head in listed])


def _ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    listed = config.get(key) or []
    if not isinstance(listed, list) or len(listed) > MAX_SUPPRESSED or not all(type(each) is int for each in listed):
        raise CheckpointError(f"generation_config.json: {key!r} must be a list of token ids")
    return tuple(each for each in listed if 0 <= each < 2**31)
