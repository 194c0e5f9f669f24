"""Transcripts by a Whisper, or a Moonshine: each question of `text/dictation.py` is a request to the engine, and passages become
what OpenAI's API has for them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from nanovllm_cli.errors import CheckpointError, NanovllmError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.chat_prompt import MOST_AT_ONCE
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.exchange import Exchange
from nanovllm_cli.server.ports import ServedModel, TextAsked
from nanovllm_cli.server.schemas_audio import SAMPLING, SoundRequest
from nanovllm_cli.sounds.reading import read_while_wanted
from nanovllm_cli.text.dictation import Align, Answered, Ask, Heard, Passage, Reply, Step, joined
from nanovllm_cli.text.dictation import Dictation as Dictating
from nanovllm_cli.text.plain_dictation import AnyScribe, PlainScribe, any_scribe_of, check_plain, dictate_by
from nanovllm_cli.text.scribe import Task
from nanovllm_cli.text.spoken import LANGUAGES
from nanovllm_cli.text.subtitles import subtitles
from nanovllm_cli.text.wishes import Wishes
from nanovllm_cli.vision_spec import Clip

TIMED = ("srt", "vtt", "verbose_json")
"""What has times."""


MOST_WAITING = 1 << 30
"""Bytes of files that wait for their turn."""
_READERS = 2


class Turns:
    """Of MOST_AT_ONCE dictations, and of one beside them whose spectrogram is so long that such are taken one by one.

    Sounds are read in threads of their own, so that nothing else waits behind them; where nobody waits for one any more, its
    reading ends soon. Used from one event loop.
    """

    def __init__(self) -> None:
        self._short, self._long = asyncio.Semaphore(MOST_AT_ONCE), asyncio.Semaphore(1)
        self._threads = ThreadPoolExecutor(_READERS, "sounds")
        self._waiting = 0

    @asynccontextmanager
    async def turn(self, body: SoundRequest, hearing: HearingSpec) -> AsyncIterator[Clip]:
        """A request's, with what is heard of its file, which is let go of. Raises ApiError 429 where too much waits, and typed
        errors for what is no sound."""
        async with AsyncExitStack() as turn:
            with self._waits(len(body.file)):
                await turn.enter_async_context(self._short)
                clip = await self._read(body.file, hearing, if_short=True)
                if clip is None:
                    await turn.aclose()  # short ones go by
                    await turn.enter_async_context(self._long)
                    clip = await self._read(body.file, hearing, if_short=False)
                body.file = b""
            assert clip is not None
            yield clip

    @contextmanager
    def _waits(self, size: int) -> Iterator[None]:
        if self._waiting and self._waiting + size > MOST_WAITING:
            raise ApiError(429, "too many sounds wait to be heard", code="too_many_bytes", retry_after=1)
        self._waiting += size
        try:
            yield
        finally:
            self._waiting -= size

    async def _read(self, data: bytes, hearing: HearingSpec, *, if_short: bool) -> Clip | None:
        gone = threading.Event()
        read = partial(read_while_wanted, data, hearing, "file", lambda: not gone.is_set(), if_short=if_short)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            gone.set()


def words_in(passages: Sequence[Passage]) -> list[dict[str, Any]]:
    """Words and their times as OpenAI's API has them, without the blanks around them; blanks alone are none."""
    words = [word for each in passages for word in each.words if word.text.strip()]
    return [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]


class Dictation:
    """One request's, of such a model. Its file is let go of as soon as it is read; its spectrogram stays to the end.
    """

    def __init__(
        self,
        context: ServerContext,
        model: ServedModel,
        body: SoundRequest,
        task: Task,
        exchange: Exchange,
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._context, self._model, self._exchange = context, model, exchange
        self._task, self._body = task, body
        self._heard = Heard(None, 0.0)
        self._passages: list[Passage] = []
        self._scribe = _scribe(model)
        self._prompt_tokens = self._completion_tokens = 0

    @property
    def text(self) -> str:
        return joined([each.text for each in self._passages])

    @property
    def usage(self) -> dict[str, Any]:
        total = self._prompt_tokens + self._completion_tokens
        tokens = {"input_tokens": self._prompt_tokens, "output_tokens": self._completion_tokens, "total_tokens": total}
        return {"type": "tokens", **tokens}

    @property
    def verbose(self) -> dict[str, Any]:
        """See `VerboseAnswer`."""
        heard, language = self._heard, "en" if self._task == "translate" else self._heard.language or "en"
        segments = [
            {
                "id": i, "seek": each.seek, "start": _rounded(each.start), "end": _rounded(each.end), "text": each.text,
                "tokens": list(each.token_ids), "temperature": each.temperature, "avg_logprob": each.mean_logprob,
                "compression_ratio": each.squeezed, "no_speech_prob": each.silent or 0.0,
            }
            for i, each in enumerate(self._passages)
        ]  # fmt: skip
        usage = {"type": "duration", "seconds": math.ceil(heard.seconds)}
        told = {"task": self._task, "language": LANGUAGES.get(language, language), "duration": _rounded(heard.seconds)}
        kinds = self._body.timestamp_granularities or ["segment"]
        found: dict[str, Any] = {"segments": segments} if "segment" in kinds else {}
        if "word" in kinds:
            found["words"] = words_in(self._passages)
        return {**told, "text": self.text, **found, "usage": usage}

    def written(self) -> str:
        """As text, or as subtitles."""
        form = self._body.response_format
        return subtitles(self._passages, form) if form in ("srt", "vtt") else self.text + "\n"

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text, as it comes. Raises ApiError."""
        hearing = self._model.facts.hearing
        assert hearing is not None
        async with AsyncExitStack() as turn:
            try:
                wishes = _wishes(self._body, self._task, self._model)
                if isinstance(self._scribe, PlainScribe):
                    check_plain(wishes)
            except NanovllmError as error:
                raise ApiError.of(error) from None
            try:
                clip = await turn.enter_async_context(self._turns.turn(self._body, hearing))
            except NanovllmError as error:
                raise ApiError.of(error, "file") from None
            way = dictate_by(self._scribe, hearing, self._model.tokenizer, clip, wishes)
            async with aclosing(self._pieces(way)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self, way: Dictating) -> AsyncGenerator[str, None]:
        body = self._body
        given: Reply = None
        while True:
            try:
                step = await asyncio.to_thread(_next, way, given)
            except UsageError as error:
                raise ApiError.of(error, "language") from None
            except NanovllmError as error:
                raise ApiError.of(error, "prompt" if body.prompt and "prompt" in error.message else "model") from None
            given = None
            match step:
                case None:
                    return
                case Ask():
                    given = await self._answered(step)
                case Align():
                    given = await self._context.generates.align(self._model, step.prompt, step.alignment, self._exchange.caller)
                case Heard():
                    self._heard = step
                case list():
                    begun = bool(self._passages)
                    self._passages += step
                    text = "".join(each.text for each in step)
                    yield text if begun else text.lstrip()

    async def _answered(self, ask: Ask) -> list[Answered]:
        asked = TextAsked(ask.prompt, ask.params)
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(ask.params.n)]
        async with self._context.generation(self._model, asked, self._exchange) as generation:
            async for events in generation:
                for event in events:
                    ids, logprobs = found[event.index]
                    ids += event.token_ids
                    logprobs += [each.logprob for each in event.logprobs or ()]
        self._prompt_tokens += generation.usage.prompt_tokens
        self._completion_tokens += generation.usage.completion_tokens
        return [Answered(*each) for each in found]


async def whole(dictation: Dictation) -> None:
    """To its end."""
    async with aclosing(dictation.pieces()) as pieces:
        async for _ in pieces:
            pass


def _next(way: Dictating, given: Reply) -> Step | None:
    try:
        return way.send(given)
    except StopIteration:
        return None


def _scribe(model: ServedModel) -> AnyScribe:
    facts = model.facts
    try:
        scribe = any_scribe_of(facts.hearing, model.tokenizer, model.generation_config, facts.context_len)
    except CheckpointError as error:
        raise ApiError.of(error, "model") from None
    assert scribe is not None, "a route asks no others"
    return scribe


def _wishes(body: SoundRequest, task: Task, model: ServedModel) -> Wishes:
    """A temperature of 0 is where one begins, as OpenAI has it."""
    sampling: dict[str, Any] = {
        name: value for name in SAMPLING if name != "temperature" and (value := getattr(body, name)) is not None
    }
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    if model.default_params.lora:
        sampling["lora"] = model.default_params.lora
    timed = body.response_format in TIMED
    words = "word" in (body.timestamp_granularities or ())
    return Wishes(body.language, task, body.prompt, timed, body.temperature or None, sampling=sampling, words=words)


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
