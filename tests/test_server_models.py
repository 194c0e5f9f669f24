"""Several models behind one address: loaded when they are asked for, put to sleep when others need the room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import nanovllm_cli
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.server import served_models
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Facts, Start
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.server.served_models import ModelSettings, ServedModels

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"
CONFIG = EngineConfig(num_blocks=64, threads=1)
FACTS = Facts(2048, 2048, 4096, 256, 64, 16, 1, 1, 1, "bfloat16", "cpu", 8)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class StandIn:
    """An engine without a process; test_server_engine has the real one. Those whose name begins with "bad" cannot be loaded."""

    def __init__(self, name: str, start: Start, **_: Any) -> None:
        self.name = name
        self.state = EngineState.ASLEEP
        self.facts: Facts | None = None
        self.num_loads = 0

    def announce(self) -> None:
        self.state = EngineState.LOADING

    async def load(self) -> Facts:
        self.num_loads += 1
        self.state = EngineState.LOADING
        await asyncio.sleep(0.02)
        if self.name.startswith("bad"):
            self.state = EngineState.FAILED
            raise CheckpointError("/secret/path is broken")
        self.state, self.facts = EngineState.READY, FACTS
        return FACTS

    async def unload(self, state: EngineState = EngineState.ASLEEP) -> None:
        self.state = state


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "EngineClient", StandIn)


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


def settings(*names: str, path: Path = TINY) -> ModelSettings:
    return ModelSettings(names, path, CONFIG)


def states(models: ServedModels) -> dict[str, EngineState]:
    return {name: engine.state for name, engine in models.engines().items()}


async def answers(models: ServedModels, name: str | None) -> str:
    async with models.use(name) as model:
        assert model.engine.state is EngineState.READY
        return model.id


def test_the_one_used_least_recently_makes_room(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a", "alias"), settings("b"), settings("c")], max_loaded=2)
        await models.start()
        try:
            assert list(states(models).values()) == [EngineState.READY, EngineState.READY, EngineState.ASLEEP]
            assert await answers(models, "alias") == "a"  # b is now the older one
            assert await asyncio.gather(answers(models, "c"), answers(models, "c")) == ["c", "c"]
            assert models.engines()["c"].num_loads == 1  # type: ignore[attr-defined]
            assert states(models) == {"a": EngineState.READY, "b": EngineState.ASLEEP, "c": EngineState.READY}
            async with models.use("a"), models.use("c"):
                with pytest.raises(ApiError) as caught:
                    await answers(models, "b")
                assert (caught.value.status, caught.value.retry_after) == (503, 5)
            with pytest.raises(ApiError) as caught:
                await answers(models, "nobody")
            assert (caught.value.status, caught.value.code) == (404, "model_not_found")
            assert [card.id for card in models.cards()] == ["a", "alias", "b", "c"]
        finally:
            await models.close()
        assert set(states(models).values()) == {EngineState.STOPPED}

    run(scenario())


def test_who_asks_for_a_model_and_leaves_while_it_loads_keeps_nobody_from_it(run: Run) -> None:
    """What goes on loading is no other model that is in the way."""

    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1)
        await models.start()
        try:
            first = asyncio.create_task(answers(models, "b"))
            while states(models)["b"] is not EngineState.LOADING:
                await asyncio.sleep(0)
            first.cancel()
            assert await answers(models, "b") == "b"
        finally:
            await models.close()

    run(scenario())


def test_who_is_not_asked_sleeps_and_wakes(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a")], sleep_idle=0.1)
        await models.start()
        try:
            engine = models.engines()["a"]
            async with models.use("a"):
                await asyncio.sleep(0.3)
                assert engine.state is EngineState.READY  # in use
            while engine.state is not EngineState.ASLEEP:
                await asyncio.sleep(0.02)
            assert await answers(models, None) == "a"
        finally:
            await models.close()

    run(scenario())


def test_before_it_has_started_nobody_is_served(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")])
        assert list(states(models).values()) == [EngineState.LOADING, EngineState.ASLEEP]
        starting = asyncio.create_task(models.start())
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await answers(models, "a")
        assert (caught.value.status, caught.value.code) == (503, "model_not_ready")
        await starting
        assert await answers(models, "a") == "a"
        await models.close()

    run(scenario())


def test_one_that_cannot_be_loaded_fails_at_the_start_and_later(run: Run) -> None:
    async def scenario() -> None:
        with pytest.raises(CheckpointError):
            await ServedModels([settings("bad")]).start()
        models = ServedModels([settings("a"), settings("bad")])
        await models.start()
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await answers(models, "bad")
            assert (caught.value.status, caught.value.code) == (503, "model_load_failed")
            assert "secret" not in caught.value.message
        assert await answers(models, "a") == "a"

    run(scenario())
