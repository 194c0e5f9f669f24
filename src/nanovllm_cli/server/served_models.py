"""The models behind one address: loaded when they are asked for, and put to sleep when others need the room or nobody asks.

Each has an engine process of its own; asleep it has none, and what stays is its tokenizer and template.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.llm import load_tokenizer
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.engine_client import EngineClient
from nanovllm_cli.server.messages import Facts, Loading, Start
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.ports import EnginePort, EngineState, ModelCard, ServedModel
from nanovllm_cli.text.answer_format import AnswerFormat, model_format
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.reasoning import thinking_switch
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint

_UNLOADED = (EngineState.ASLEEP, EngineState.FAILED, EngineState.LOADING)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model to serve. names: what clients may call it, the first in its answers. path: its files, on this machine.

    given: fields of SamplingParams over the model's own defaults. tool_format, reasoning_format: names that count instead of
    what its template says.
    """

    names: tuple[str, ...]
    path: Path
    config: EngineConfig
    chat_template: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning_format: str | None = None


class TextSide(NamedTuple):
    """What a model is beside its weights."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    format: AnswerFormat | None
    default_params: SamplingParams
    thinking_switch: str | None


class _Slot:
    def __init__(self, settings: ModelSettings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.created = int(time.time())
        self.loading = asyncio.Lock()
        self.text: TextSide | None = None
        self.num_users = 0
        self.used = 0.0

    @property
    def context_len(self) -> int | None:
        return self.engine.facts.context_len if self.engine.facts is not None else None


class ServedModels:
    """See ports.Models. max_loaded: most models in memory at once. sleep_idle: seconds without a request after which one is put
    to sleep; None never does."""

    def __init__(
        self,
        models: Sequence[ModelSettings],
        *,
        max_loaded: int = 1,
        sleep_idle: float | None = None,
        stuck_seconds: float = 120.0,
        observer: Observer | None = None,
        on_loading: Callable[[str, Loading], None] | None = None,
    ) -> None:
        self._max_loaded = max_loaded
        self._sleep_idle = sleep_idle
        self._observer = observer or Observer()
        self._tell = on_loading or (lambda _name, _progress: None)
        self._slots = [_Slot(each, self._engine(each, stuck_seconds)) for each in models]
        self._by_name = {name: slot for slot in self._slots for name in slot.settings.names}
        self._first = self._slots[:max_loaded]
        for slot in self._first:
            slot.engine.announce()
        self._room = asyncio.Lock()
        self._is_started = False
        self._sleeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads as many as may be loaded, in their order. Raises what loading raises."""
        for slot in self._first:
            await self._load(slot)
        self._is_started = True
        if self._sleep_idle is not None:
            self._sleeper = asyncio.create_task(self._put_to_sleep(self._sleep_idle))

    async def close(self) -> None:
        if self._sleeper is not None:
            self._sleeper.cancel()
        for slot in self._slots:
            await slot.engine.unload(EngineState.STOPPED)

    def cards(self) -> list[ModelCard]:
        return [
            ModelCard(name, slot.created, slot.engine.state, slot.context_len)
            for slot in self._slots
            for name in slot.settings.names
        ]

    def engines(self) -> Mapping[str, EnginePort]:
        return {slot.settings.names[0]: slot.engine for slot in self._slots}

    def use(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        return self._use(self._find(name))

    @asynccontextmanager
    async def _use(self, slot: _Slot) -> AsyncIterator[ServedModel]:
        slot.num_users += 1
        try:
            yield await self._ready(slot)
        finally:
            slot.num_users -= 1
            slot.used = time.monotonic()

    def _find(self, name: str | None) -> _Slot:
        if name is None:
            return self._slots[0]
        if name not in self._by_name:
            message = f"the model {name[:100]!r} is not served here; these are: {', '.join(self._by_name)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self._by_name[name]

    async def _ready(self, slot: _Slot) -> ServedModel:
        if slot.engine.state in _UNLOADED:
            if not self._is_started:
                raise ApiError(503, "the model is being loaded", code="model_not_ready", retry_after=2)
            async with slot.loading:
                if slot.engine.state in _UNLOADED:
                    await self._wake(slot)
        engine, text = slot.engine, slot.text
        if engine.facts is None or text is None:
            raise ApiError(503, f"the model is {engine.state}", code="model_not_ready", retry_after=2)
        return ServedModel(
            slot.settings.names[0],
            slot.created,
            engine,
            engine.facts,
            text.tokenizer,
            text.template,
            text.default_params,
            text.thinking_switch,
            text.format,
        )

    async def _wake(self, slot: _Slot) -> None:
        async with self._room:
            await self._make_room(slot)
            try:
                await self._load(slot)
            except NanovllmError as error:
                name = slot.settings.names[0]
                message = f"the model {name!r} could not be loaded"
                raise ApiError(503, message, code="model_load_failed", retry_after=30) from error

    async def _make_room(self, wanted: _Slot) -> None:
        """Puts the one to sleep that nobody has used for longest, until there is room for this one. It may be on its way into
        memory: who asked for it first has left."""
        unloaded = (EngineState.ASLEEP, EngineState.FAILED)
        awake = [slot for slot in self._slots if slot is not wanted and slot.engine.state not in unloaded]
        idle = sorted((slot for slot in awake if not slot.num_users), key=lambda slot: slot.used)
        for slot in idle[: max(0, len(awake) + 1 - self._max_loaded)]:
            await slot.engine.unload()
            awake.remove(slot)
        if len(awake) >= self._max_loaded:
            raise ApiError(503, "other models are in use, and there is no room for this one", retry_after=5)

    async def _load(self, slot: _Slot) -> None:
        if slot.text is None:
            slot.text = await asyncio.to_thread(open_text_side, slot.settings)
        facts = await slot.engine.load()
        slot.used = time.monotonic()
        check_vocabulary(slot.text, facts)

    async def _put_to_sleep(self, idle_seconds: float) -> None:
        while True:
            now = time.monotonic()
            for slot in self._slots:
                if slot.engine.state is EngineState.READY and not slot.num_users and now - slot.used >= idle_seconds:
                    await slot.engine.unload()
            await asyncio.sleep(min(1.0, idle_seconds / 4))

    def _engine(self, settings: ModelSettings, stuck_seconds: float) -> EngineClient:
        name = settings.names[0]
        return EngineClient(
            name,
            Start(str(settings.path), settings.config, settings.chat_template, settings.tool_format, settings.reasoning_format),
            stuck_seconds=stuck_seconds,
            on_loading=lambda progress: self._tell(name, progress),
            on_restart=lambda: self._observer.engine_restarted(name),
        )


def open_text_side(settings: ModelSettings) -> TextSide:
    """Reads everything but the weights. Raises as `LLM` does."""
    with open_checkpoint(settings.path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        generation_config = dict(checkpoint.generation_config)
    template = None
    if settings.chat_template is not None or "default" in tokenizer.chat_templates:
        template = ChatTemplate.of(tokenizer, settings.chat_template)
    known = model_format(tokenizer, template, settings.tool_format, settings.reasoning_format)
    params = SamplingParams.from_generation_config(generation_config)
    switch = None if template is None else thinking_switch(template.source)
    return TextSide(tokenizer, template, known, dataclasses.replace(params, **settings.given), switch)


def check_vocabulary(text: TextSide, facts: Facts) -> None:
    text.default_params.check_vocabulary(facts.vocab_size)
