"""The models behind one address: loaded when they are asked for, and put to sleep when others need the room or nobody asks.

Each has an engine process of its own; asleep it has none, and what stays is its tokenizer and template.

Where all that there is room for are in use, requests for another wait in line: one of those in use takes nobody new, and makes
room when its answers are finished. Who asks for that one meanwhile stands behind them in the line. So under any load everybody's
turn comes, and all who wait for a model share one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, draining
from nanovllm_cli.server.engine_client import EngineClient
from nanovllm_cli.server.messages import Loading, Start
from nanovllm_cli.server.model_files import read_files
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.server.ports import (
    ChatDefaults,
    EnginePort,
    EngineState,
    FileFacts,
    ModelAbout,
    ModelCard,
    ServedModel,
    TextSide,
    spellings,
)
from nanovllm_cli.text.answer_format import AnswerFormat, model_format
from nanovllm_cli.text.chat_template import ChatTemplate, check_variables
from nanovllm_cli.text.reasoning import thinking_switch
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.classes import classes_of
from nanovllm_cli.weights.reading import own_settings
from nanovllm_cli.weights.scoring import scoring_of
from nanovllm_cli.weights.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model to serve. names: what clients may call it, the first in its answers. path: its files, on this machine.

    given: fields of SamplingParams over the model's own defaults. tool_format, reasoning_format: names that count instead of
    what its template says. thinking, chat: what counts in conversations whose requests do not say. kept: the file that keeps what
    the model has read while it is not loaded.
    """

    names: tuple[str, ...]
    path: Path
    config: EngineConfig
    chat_template: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning_format: str | None = None
    thinking: bool | None = None
    chat: ChatDefaults = field(default_factory=ChatDefaults)
    kept: Path | None = None


@dataclass
class _Turn:
    """A model's place in the line for room, until it is loaded."""

    has_room: asyncio.Future[None]
    task: asyncio.Task[None]


class _Asked(NamedTuple):
    """What a name means: a model, or an adapter that its requests choose."""

    slot: _Slot
    adapter: str | None = None


class _Slot:
    """users: who uses the model. waiting: who does as soon as it is loaded. unload: a task in which it is put to sleep."""

    def __init__(self, settings: ModelSettings, engine: EngineClient) -> None:
        self.settings = settings
        self.engine = engine
        self.created = int(time.time())
        self.text: TextSide | None = None
        self.files: FileFacts | None = None
        self.users: set[object] = set()
        self.waiting: set[object] = set()
        self.turn: _Turn | None = None
        self.unload: asyncio.Task[None] | None = None
        self.used = 0.0

    @property
    def is_ending(self) -> bool:
        return self.unload is not None and not self.unload.done()

    @property
    def is_loaded(self) -> bool:
        return not self.is_ending and self.engine.state in (EngineState.READY, EngineState.STUCK, EngineState.RESTARTING)

    @property
    def context_len(self) -> int | None:
        return self.engine.facts.context_len if self.engine.facts is not None else None

    @property
    def modalities(self) -> tuple[str, ...] | None:
        facts = self.engine.facts
        if facts is None:
            return None
        video = facts.vision is not None and facts.vision.video is not None
        return "text", *["image"] * (facts.vision is not None), *["audio"] * (facts.hearing is not None), *["video"] * video

    def admit(self) -> None:
        self.users |= self.waiting
        self.waiting.clear()


class ServedModels:
    """See ports.Models. max_loaded: most models in memory at once. room_seconds: how long a request waits for others to make room
    for its model. sleep_idle: seconds without a request after which one is put to sleep; None never does."""

    def __init__(
        self,
        models: Sequence[ModelSettings],
        *,
        max_loaded: int = 1,
        room_seconds: float = 60.0,
        sleep_idle: float | None = None,
        observer: Observer | None = None,
        on_loading: Callable[[str, Loading], None] | None = None,
    ) -> None:
        self._max_loaded = max_loaded
        self._room_seconds = room_seconds
        self._sleep_idle = sleep_idle
        self._observer = observer or Observer()
        self._tell = on_loading or (lambda _name, _progress: None)
        self._slots = [_Slot(each, self._engine(each)) for each in models]
        self._by_name = {name: _Asked(slot) for slot in self._slots for name in slot.settings.names}
        self._by_name |= {name: _Asked(slot, name) for slot in self._slots for name, _ in slot.settings.config.lora_modules}
        self._first = self._slots[:max_loaded]
        for slot in self._first:
            slot.engine.announce()
        self._room = asyncio.Lock()  # the line: who holds it is its first
        self._leaving: _Slot | None = None  # takes nobody new, to make room for the first of the line
        self._news = asyncio.Event()  # for the first of the line: somebody has left
        self._is_started = self._is_closed = False
        self._sleeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads as many as may be loaded, in their order. Raises what loading raises."""
        for slot in self._first:
            await self._read_text(slot)
            await self._load(slot)
        self._is_started = True
        if self._sleep_idle is not None:
            self._sleeper = asyncio.create_task(self._put_to_sleep(self._sleep_idle))

    async def close(self) -> None:
        """Once models have kept what they have read, also those just put to sleep. Called again, it waits no more."""
        is_first, self._is_closed = not self._is_closed, True
        self._news.set()
        if self._sleeper is not None:
            self._sleeper.cancel()
        if is_first and (unloads := [slot.unload for slot in self._slots if slot.unload is not None]):
            await asyncio.wait(unloads)
        for slot in self._slots:
            await slot.engine.unload(EngineState.STOPPED, keeps=is_first)
        await asyncio.gather(*(slot.turn.task for slot in self._slots if slot.turn is not None), return_exceptions=True)

    def cards(self) -> list[ModelCard]:
        return [
            ModelCard(
                name, slot.created, self._state_of(slot), slot.context_len, adapter and slot.settings.names[0], slot.modalities
            )
            for name, (slot, adapter) in self._by_name.items()
        ]

    def _state_of(self, slot: _Slot) -> EngineState:
        """Nobody can wake the others up before the first ones are there."""
        state = slot.engine.state
        return EngineState.LOADING if state is EngineState.ASLEEP and not self._is_started else state

    def is_without_template(self, name: str) -> bool:
        """Whether its files were read, and it has none."""
        text = self._by_name[name][0].text
        return text is not None and text.chat_template is None

    async def about(self, name: str) -> ModelAbout:
        slot, adapter = self._find(name)
        first = slot.settings.names[0]
        try:
            await self._read_text(slot)
            if slot.files is None:
                slot.files = await asyncio.to_thread(read_files, slot.settings.path, slot.settings.config, slot.created)
        except NanovllmError as error:
            raise ApiError(503, f"the files of the model {first!r} cannot be read", code="model_load_failed") from error
        assert slot.text is not None
        sleeps = None
        if self._sleep_idle is not None and slot.is_loaded:
            idle = 0.0 if slot.users else time.monotonic() - slot.used
            sleeps = time.time() + max(0.0, self._sleep_idle - idle)
        parent = None if adapter is None else first
        return ModelAbout(name, self._state_of(slot), slot.text, slot.files, slot.engine.facts, parent, sleeps)

    async def put_to_sleep(self, name: str) -> None:
        slot = self._find(name).slot
        if self._state_of(slot) in (EngineState.ASLEEP, EngineState.FAILED, EngineState.STOPPED):
            return
        # In a task: it must be finished once it has begun, and who asks may leave.
        if not await asyncio.shield(asyncio.create_task(self._sleep(slot, 0.0))):
            raise ApiError(503, "the model is in use, or being loaded", code="model_in_use", retry_after=5)

    def engines(self) -> Mapping[str, EnginePort]:
        return {slot.settings.names[0]: slot.engine for slot in self._slots}

    def use(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        return self._use(self._find(name))

    def peek(self, name: str | None) -> AbstractAsyncContextManager[ServedModel]:
        asked = self._find(name)
        was_loaded = asked.slot.text is not None and asked.slot.engine.facts is not None
        return nullcontext(self._served(asked)) if was_loaded else self._use(asked)

    @asynccontextmanager
    async def _use(self, asked: _Asked) -> AsyncIterator[ServedModel]:
        slot = asked.slot
        user = object()
        is_let_in = slot.is_loaded and slot is not self._leaving
        (slot.users if is_let_in else slot.waiting).add(user)
        slot.used = time.monotonic()
        try:
            if not is_let_in:
                await self._wait_for(slot)
            yield self._served(asked)
        finally:
            slot.users.discard(user)
            slot.waiting.discard(user)
            slot.used = time.monotonic()
            self._news.set()

    def _find(self, name: str | None) -> _Asked:
        if name is None:
            return _Asked(self._slots[0])
        for each in spellings(name):
            if each in self._by_name:
                return self._by_name[each]
        message = f"model {name[:100]!r} not found: it is not served here; these are: {', '.join(self._by_name)}"
        raise ApiError(404, message, code="model_not_found", param="model")

    def _served(self, asked: _Asked) -> ServedModel:
        slot, adapter = asked
        engine, text = slot.engine, slot.text
        if engine.facts is None or text is None:
            raise ApiError(503, f"the model is {engine.state}", code="model_not_ready", retry_after=2)
        name, modules = slot.settings.names[0], tuple([module.name for module in slot.settings.config.lora_modules])
        if adapter is not None:
            name, text = adapter, text._replace(default_params=replace(text.default_params, lora=(Lora(adapter),)))
        return ServedModel(name, slot.created, engine, engine.facts, *text, modules)

    async def _wait_for(self, slot: _Slot) -> None:
        """Until it is loaded and this request is one of its users."""
        if not self._is_started:
            raise ApiError(503, "the model is being loaded", code="model_not_ready", retry_after=2)
        if slot.turn is None or slot.turn.task.done():
            has_room = asyncio.get_running_loop().create_future()
            slot.turn = _Turn(has_room, asyncio.create_task(self._take_turn(slot, has_room)))
            slot.turn.task.add_done_callback(_hear)
        turn = slot.turn
        await asyncio.wait((turn.has_room, turn.task), timeout=self._room_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not (turn.has_room.done() or turn.task.done()):
            raise _no_room()
        await asyncio.shield(turn.task)

    async def _take_turn(self, slot: _Slot, has_room: asyncio.Future[None]) -> None:
        """Loads it when its turn comes, for all who wait for it by then. Raises ApiError 503."""
        async with self._room:
            try:
                if not slot.is_loaded:
                    await self._read_text(slot)
                    await self._make_room(slot)
                    if self._is_closed:
                        raise draining()
                    if not slot.waiting:
                        return
                    has_room.set_result(None)
                    await self._load(slot)
            except NanovllmError as error:
                message = f"the model {slot.settings.names[0]!r} could not be loaded"
                raise ApiError(503, message, code="model_load_failed", retry_after=30) from error
            slot.admit()

    async def _make_room(self, wanted: _Slot) -> None:
        """Until there is room for one more: puts the one to sleep that nobody uses and that was not asked for longest; where all
        are in use, waits, while one of them takes nobody new. That must end: there may be answers that never do.

        Returns early where nobody wants the room any more, and where the server ends.
        """
        until = asyncio.get_running_loop().time() + self._room_seconds
        try:
            while wanted.waiting and not self._is_closed:
                unloaded = (EngineState.ASLEEP, EngineState.FAILED)
                others = [slot for slot in self._slots if slot is not wanted and slot.engine.state not in unloaded]
                if len(others) < self._max_loaded:
                    return
                idle = [slot for slot in others if not slot.users]
                if idle:  # however long it takes to keep what that one has read
                    await self._unload(min(idle, key=attrgetter("used")))
                    continue
                self._leaving = self._leaving or min(others, key=attrgetter("used"))
                self._news.clear()
                async with asyncio.timeout_at(until):
                    await self._news.wait()
        except TimeoutError:
            raise _no_room() from None
        finally:
            self._leaving = None

    async def _read_text(self, slot: _Slot) -> None:
        if slot.text is None:
            slot.text = await asyncio.to_thread(open_text_side, slot.settings)

    async def _load(self, slot: _Slot) -> None:
        assert slot.text is not None
        facts = await slot.engine.load()
        slot.used = time.monotonic()
        slot.text.default_params.check_vocabulary(facts.vocab_size)

    async def _put_to_sleep(self, idle_seconds: float) -> None:
        while True:
            for slot in self._slots:
                await self._sleep(slot, idle_seconds)
            await asyncio.sleep(min(1.0, idle_seconds / 4))

    async def _sleep(self, slot: _Slot, idle_seconds: float) -> bool:
        """Unloads it if nobody has used it for so long."""
        async with self._room:  # who asks for it from now on waits until it is gone, and loads it again
            idle = not slot.users and time.monotonic() - slot.used >= idle_seconds
            if slot.engine.state is not EngineState.READY or not idle:
                return False
            await self._unload(slot)
            return True

    async def _unload(self, slot: _Slot) -> None:
        """In a task: who waits for it may be cancelled, and that would cut off what it keeps."""
        slot.unload = asyncio.create_task(slot.engine.unload())
        await asyncio.shield(slot.unload)

    def _engine(self, settings: ModelSettings) -> EngineClient:
        name = settings.names[0]
        return EngineClient(
            name,
            Start(
                str(settings.path),
                settings.config,
                settings.chat_template,
                settings.tool_format,
                settings.reasoning_format,
                None if settings.kept is None else str(settings.kept),
            ),
            on_loading=lambda progress: self._tell(name, progress),
            on_restart=lambda: self._observer.engine_restarted(name),
        )


def _no_room() -> ApiError:
    return ApiError(503, "other models are in use, and there is no room for this one", code="no_room", retry_after=5)


def _hear(task: asyncio.Task[None]) -> None:
    """What a turn raises is told to those who wait for it. There may be none, which asyncio would complain of."""
    if not task.cancelled():
        task.exception()


def open_text_side(settings: ModelSettings) -> TextSide:
    """Reads everything but the weights. Raises as `LLM` does."""
    with open_checkpoint(settings.path, overrides=settings.config.overrides) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        generation_config = own_settings(checkpoint, tokenizer.languages)
        scoring = scoring_of(checkpoint, tokenizer, settings.chat_template)
        classes = classes_of(checkpoint)
    template = None
    if settings.chat_template is not None or "default" in tokenizer.chat_templates:
        template = ChatTemplate.of(tokenizer, settings.chat_template)
    known = model_format(tokenizer, template, settings.tool_format, settings.reasoning_format)
    params = SamplingParams.from_generation_config(generation_config, vocab_size=tokenizer.vocab_size)
    switch = None if template is None else thinking_switch(template.source)
    chat = _chat_defaults(settings, switch, known)
    return TextSide(tokenizer, template, params.under(settings.given), switch, known, scoring, classes, chat, generation_config)


def _chat_defaults(settings: ModelSettings, switch: str | None, known: AnswerFormat | None) -> ChatDefaults:
    """Raises UsageError for what has no effect on any conversation with this model."""
    chat, name = settings.chat, settings.names[0]
    check_variables(chat.variables)
    if known is None and (chat.variables or settings.thinking is not None):
        raise UsageError(f"--chat-template-kwargs and --think have no meaning: {name} has no chat template")
    if chat.reasoning_budget is not None and (known is None or not known.thinks):
        raise UsageError(f"--reasoning-budget has no meaning: {name} does not mark its reasoning")
    if settings.thinking is None:
        return chat
    if switch is None:
        raise UsageError(f"--think has no meaning: the template of {name} has no such switch")
    return replace(chat, variables={switch: settings.thinking, **chat.variables})
