"""Stand-ins below the server's routes: models that are there at once, and answers that a test writes down.

    script = Script.of("Hello", " there", finish="stop")
    generates = FakeGenerates(script)              # every request gets this script; `generates.asked` is what was asked for
    models = FakeModels()                          # one model, "fake", with a vocabulary of bytes
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm_cli.config import Lora
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Facts, Pooled
from nanovllm_cli.server.ports import (
    LATEST,
    Caller,
    ChatAsked,
    EngineState,
    Event,
    FileFacts,
    ModelAbout,
    ModelCard,
    Reading,
    ServedModel,
    Stream,
    TextAsked,
    TextSide,
    Timings,
    Usage,
)
from nanovllm_cli.text.answer_format import AnswerFormat
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.tool_calls import ToolCallDelta

MODEL = "fake"
CONTEXT_LEN = 4096
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def event(
    content: str = "",
    *,
    index: int = 0,
    reasoning: str = "",
    text: str | None = None,
    calls: Sequence[ToolCallDelta] = (),
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
    finish: Any = None,
    stop_reason: str | int | None = None,
    num_held: int = 0,
) -> Event:
    """One event; token ids are the content's bytes unless they are given."""
    drawn = reasoning + content if text is None else text
    ids = list(drawn.encode()) if token_ids is None else list(token_ids)
    kept = None if logprobs is None else list(logprobs)
    return Event(index, drawn, reasoning, content, tuple(calls), ids, kept, finish, stop_reason, num_held)


FILES = FileFacts(
    "gguf", "qwen3", 494_032_768, 1000, "Q4_K", 8192, 4, 2, True, False, False, "0123456789abcdef" * 4, 1_700_000_000.5
)
"""Longer than what is served."""
TIMINGS = Timings(prompt=0.5, answer=2.0)


@dataclass
class Script:
    """What a request gets: steps of events. error: raised behind them. waits: the answer stands still before step `waits_at`
    until the test sets it. reading: what a step without events tells."""

    steps: Sequence[Sequence[Event]]
    error: ApiError | None = None
    refuses: ApiError | None = None
    waits: asyncio.Event | None = None
    waits_at: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    timings: Timings = TIMINGS
    reading: Reading | None = None

    @classmethod
    def of(cls, *pieces: str, finish: Any = "stop", **more: Any) -> Script:
        """Pieces of content, one a step; the last one ends the answer."""
        last = len(pieces) - 1
        return cls([[event(piece, finish=finish if i == last else None)] for i, piece in enumerate(pieces)], **more)


class FakeGeneration:
    """A Generation that follows a script. closed: aclose or cut was called; finished: the script was read to its end."""

    def __init__(self, model: ServedModel, prompt_ids: list[int], script: Script) -> None:
        self.model, self.prompt_ids, self.prompt_logprobs = model, prompt_ids, script.prompt_logprobs
        self.reading = script.reading
        self.closed = self.finished = self.was_cut = False
        self._script = script
        self._drawn = 0

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_ids), self._script.cached_tokens, self._drawn, self._script.reasoning_tokens)

    @property
    def timings(self) -> Timings:
        return self._script.timings

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        for position, step in enumerate(self._script.steps):
            if self._script.waits is not None and position == self._script.waits_at:
                await self._script.waits.wait()
            self._drawn += sum(len(one.token_ids) for one in step)
            yield list(step)
            await asyncio.sleep(0)
        if self._script.error is not None:
            raise self._script.error
        self.finished = True

    async def cut(self) -> None:
        self.was_cut = True
        await self.aclose()

    async def aclose(self) -> None:
        self.closed = True


class FakeGenerates:
    """`Generates` with one script for every request, or a function of what was asked."""

    def __init__(self, script: Any = None, models: FakeModels | None = None) -> None:
        self.script = script if script is not None else Script.of("Hello", " there")
        self.models = models or FakeModels()
        self.asked: list[ChatAsked | TextAsked] = []
        self.encoded: list[ChatAsked] = []
        self.callers: list[Caller] = []
        self.priorities: list[int] = []
        self.poolings: list[Pooled] = []
        self.mosts: list[int | None] = []
        self.generations: list[FakeGeneration] = []

    async def chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> FakeGeneration:
        return await self._begin(model, asked, caller, await self.encode_chat(model, asked, caller))

    async def complete(self, model: ServedModel, asked: TextAsked, caller: Caller) -> FakeGeneration:
        ids = byte_tokenizer().encode(asked.prompt) if isinstance(asked.prompt, str) else list(asked.prompt)
        return await self._begin(model, asked, caller, ids)

    async def encode_chat(self, model: ServedModel, asked: ChatAsked, caller: Caller) -> list[int]:
        self.encoded.append(asked)
        return [65] * sum(len(str(message.get("content") or "")) + 4 for message in asked.messages)

    async def embed(
        self,
        model: ServedModel,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooled,
        caller: Caller,
        *,
        priority: int = 0,
        normalize: bool = True,
        most: int | None = None,
    ) -> tuple[list[Sequence[float]], int]:
        """Of length 1: (3, 4) / 5, then zeros; texts that begin with "x" point along the second axis. Twice that long where
        they are not to be normalized."""
        self.priorities.append(priority)
        self.poolings.append(pooling)
        self.mosts.append(most)
        self.callers.append(caller)
        vectors = [[0.0, 1.0, 0.0, 0.0] if text[:1] == "x" else [0.6, 0.8, 0.0, 0.0] for text in texts]
        return [[number * (1 if normalize else 2) for number in each] for each in vectors], sum(len(text) for text in texts)

    async def _begin(
        self, model: ServedModel, asked: ChatAsked | TextAsked, caller: Caller, prompt_ids: list[int]
    ) -> FakeGeneration:
        script = self.script(asked) if callable(self.script) else self.script
        self.asked.append(asked)
        self.callers.append(caller)
        if script.refuses is not None:
            raise script.refuses
        generation = FakeGeneration(model, prompt_ids, script)
        self.generations.append(generation)
        return generation


@dataclass
class FakeEngine:
    """An EnginePort of which only the state and the numbers are real."""

    state: EngineState = EngineState.READY
    facts: Facts | None = None
    stats: EngineStats | None = field(default_factory=lambda: EngineStats(*[0] * 10))

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> Stream:
        raise ApiError(503, "this engine is a stand-in")

    async def embed(
        self, prompt_ids: Sequence[int], pooling: Pooled, *, priority: int = 0, lora: Sequence[Lora] = ()
    ) -> Sequence[float]:
        raise ApiError(503, "this engine is a stand-in")


class FakeModels:
    """`Models` with the given names; in_use counts who is inside `use`. files: of all; unreadable: names of those without any."""

    def __init__(
        self,
        *names: str,
        tokenizer: Tokenizer | None = None,
        template: str | None = TEMPLATE,
        default_params: SamplingParams | None = None,
        thinking_switch: str | None = None,
        pooling: Pooled = "mean",
        format: AnswerFormat | None = None,
    ) -> None:
        self.files = FILES
        self.sleeps: float | None = None
        self.unreadable: set[str] = set()
        facts = Facts(CONTEXT_LEN, 256, 4, 16, 1000, 4000, 65536, "float32", "cpu", 8, pooling)
        self.in_use = 0
        self.served = {
            name: ServedModel(
                name,
                1_700_000_000,
                FakeEngine(facts=facts),
                facts,
                tokenizer or byte_tokenizer(),
                None if template is None else ChatTemplate(template),
                default_params or SamplingParams(),
                thinking_switch,
                format,
            )
            for name in names or (MODEL,)
        }

    def cards(self) -> list[ModelCard]:
        return [ModelCard(name, model.created, model.engine.state, CONTEXT_LEN) for name, model in self.served.items()]

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        model = next(iter(self.served.values())) if name is None else self._find(name)
        self.in_use += 1
        try:
            yield model
        finally:
            self.in_use -= 1

    peek = use

    def _find(self, name: str) -> ServedModel:
        found = self.served.get(name.removesuffix(LATEST))
        if found is None:
            raise ApiError(404, f"model {name!r} not found", code="model_not_found", param="model")
        return found

    async def about(self, name: str) -> ModelAbout:
        if name in self.unreadable:
            raise ApiError(503, "its files cannot be read")
        served = self._find(name)
        text = TextSide(
            served.tokenizer, served.chat_template, served.default_params, served.thinking_switch, served.format
        )
        return ModelAbout(name, served.engine.state, text, self.files, served.engine.facts, sleeps=self.sleeps)

    async def put_to_sleep(self, name: str) -> None:
        model = self._find(name)
        if self.in_use:
            raise ApiError(503, "the model is in use", code="model_in_use")
        model.engine.state = EngineState.ASLEEP  # type: ignore[misc]

    def engines(self) -> Mapping[str, FakeEngine]:
        return {name: model.engine for name, model in self.served.items()}  # type: ignore[misc]


class FakePool:
    """Takes every constraint, but for those whose text holds "refuse"."""

    def __init__(self) -> None:
        self.checked: list[Constraint] = []

    async def check(self, constraint: Constraint) -> None:
        self.checked.append(constraint)
        if "refuse" in constraint.text:
            raise UsageError("the schema cannot be enforced")
