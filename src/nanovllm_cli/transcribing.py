"""What is said in a sound, by a loaded Whisper, or a Moonshine (`transcribe`): each question of `text/dictation.py` is one to the
engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from nanovllm_cli.errors import RequestError, UnmeetableError, UnsupportedError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.dictation import Align, Answered, Ask, Dictation, Heard, Passage, Reply, joined
from nanovllm_cli.text.plain_dictation import AnyScribe, PlainScribe, any_scribe_of, check_plain, dictate_by
from nanovllm_cli.text.wishes import Wishes

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.vision_spec import Clip

OTHERS = "a model that hears and chats is asked in a message: nanovllm run MODEL --audio FILE, LLM.chat"


class Transcript(NamedTuple):
    """language: its code, None of a model that knows one. seconds: of the sound."""

    text: str
    language: str | None
    seconds: float
    passages: list[Passage]


def transcribe(llm: LLM, sound: bytes | str, wishes: Wishes = Wishes()) -> Transcript:
    """sound: a file's bytes, or a data URL. Raises as `passages_of`."""
    heard, passages = Heard(None, 0.0), []
    for step in passages_of(llm, sound, wishes):
        if isinstance(step, Heard):
            heard = step
        else:
            passages += step
    return Transcript(joined([each.text for each in passages]), heard.language, heard.seconds, passages)


def passages_of(
    llm: LLM,
    sound: bytes | str,
    wishes: Wishes,
    told: Callable[[RequestOutput], object] | None = None,
    where: str = "the sound",
) -> Iterator[Heard | list[Passage]]:
    """What the sound is, then passages of each window. told: each answer's output, for who counts tokens. where: what errors call
    the sound.

    Raises UsageError for what is no sound, or an unknown language, UnsupportedError for a model that is neither, or what it
    can't do, RequestError where the model fails.
    """
    scribe = scribe_for(llm)
    assert llm.hearing is not None
    if isinstance(scribe, PlainScribe):
        check_plain(wishes)  # before anything is decoded
    wishes_of_a_model(llm, wishes)
    way = dictate_by(scribe, llm.hearing, llm.tokenizer, clip_of(llm, sound, where), wishes)
    return driven(way, lambda ask: _aligned(llm, ask) if isinstance(ask, Align) else _answered(llm, ask, told))


def wishes_of_a_model(llm: LLM, wishes: Wishes) -> None:
    """Raises UsageError for fields of SamplingParams that its vocabulary has not, UnsupportedError for times that it won't tell.
    """
    from nanovllm_cli.engine.pooling import check_times

    if wishes.words:
        check_times(llm.tensor_parallel_size)
    llm.default_params.under(wishes.sampling).check_vocabulary(llm.spec.vocab_size)


def driven(dictation: Dictation, answer: Callable[[Ask | Align], Reply]) -> Iterator[Heard | list[Passage]]:
    """A dictation whose questions are answered."""
    given: Reply = None
    while True:
        try:
            step = dictation.send(given)
        except StopIteration:
            return
        given = answer(step) if isinstance(step, Ask | Align) else None
        if not isinstance(step, Ask | Align):
            yield step


def scribe_for(llm: LLM) -> AnyScribe:
    """UnsupportedError for a model that is none."""
    from nanovllm_cli.weights.checkpoint import open_checkpoint

    with open_checkpoint(llm.resolved.path) as checkpoint:
        scribe = any_scribe_of(llm.hearing, llm.tokenizer, checkpoint.generation_config, llm.context_len)
    if scribe is None:
        told = f"{llm.name} hears nothing" if llm.hearing is None else f"{llm.name} is neither a Whisper nor a Moonshine"
        raise UnsupportedError(told, OTHERS if llm.hearing is not None else "take a model that hears: whisper:tiny")
    return scribe


def clip_of(llm: LLM, sound: bytes | str, where: str) -> Clip:
    from nanovllm_cli.sounds.reading import read_sent, read_sound

    assert llm.hearing is not None
    return read_sound(sound, llm.hearing, where) if isinstance(sound, bytes) else read_sent(sound, llm.hearing, where)


def _aligned(llm: LLM, ask: Align) -> list[float]:
    (found,) = llm.pooled([ask.prompt], ask.alignment, None, SamplingParams(lora=ask.lora).lora)
    return found


def _answered(llm: LLM, ask: Ask, told: Callable[[RequestOutput], object] | None) -> list[Answered]:
    (output,) = llm.generate(ask.prompt, ask.params)
    if told is not None:
        told(output)
    for answer in output.outputs:
        if answer.error is not None:
            what = f"the transcript failed: {answer.error}"
            raise UnmeetableError(what) if answer.unmeetable else RequestError(what)
    return [Answered(answer.token_ids, [each.logprob for each in answer.logprobs or ()]) for answer in output.outputs]
