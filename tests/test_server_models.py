"""Several models behind one address: loaded when they are asked for, put to sleep when others need the room."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import nanovllm_cli
from nanovllm_cli.config import EngineConfig, LoraModule
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.errors import CheckpointError, UsageError
from nanovllm_cli.server import served_models
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Facts, Start
from nanovllm_cli.server.ports import ChatDefaults, EngineState, FileFacts
from nanovllm_cli.server.served_models import ModelSettings, ServedModels, open_text_side
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakePool

TINY = Path(nanovllm_cli.__file__).parent / "assets" / "tiny"
CONFIG = EngineConfig(num_blocks=64, threads=1)
FACTS = Facts(2048, 4096, 256, 16, 1, 1, 1, "bfloat16", "cpu", 8)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class StandIn:
    """An engine without a process; test_server_engine has the real one. Those whose name begins with "bad" cannot be loaded."""

    def __init__(self, name: str, start: Start, **_: Any) -> None:
        self.name = name
        self.state = EngineState.ASLEEP
        self.facts: Facts | None = None
        self.stats: EngineStats | None = None
        self.num_loads = 0
        self.is_ending = False

    def announce(self) -> None:
        self.state = EngineState.LOADING

    async def load(self) -> Facts:
        assert not self.is_ending
        self.num_loads += 1
        self.state = EngineState.LOADING
        await asyncio.sleep(0.02)
        if self.name.startswith("bad"):
            self.state = EngineState.FAILED
            raise CheckpointError("/secret/path is broken")
        self.state, self.facts = EngineState.READY, FACTS
        return FACTS

    async def unload(self, state: EngineState = EngineState.ASLEEP, *, keeps: bool = True) -> None:
        self.state, self.is_ending = state, True
        await asyncio.sleep(0.01)
        self.is_ending = False


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "EngineClient", StandIn)


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


def settings(*names: str, path: Path = TINY) -> ModelSettings:
    return ModelSettings(names, path, CONFIG)


def test_what_counts_in_conversations_is_settled_with_the_template() -> None:
    def of(**more: Any) -> ChatDefaults:
        return open_text_side(dataclasses.replace(settings("m"), **more)).chat_defaults

    assert of() == ChatDefaults()
    assert of(thinking=False).variables == {"enable_thinking": False}
    both = of(thinking=True, chat=ChatDefaults({"style": "terse"}, 5))
    assert both == ChatDefaults({"enable_thinking": True, "style": "terse"}, 5)
    for more, told in [
        ({"thinking": True, "chat_template": "chatml"}, "--think has no meaning: the template of m has no such switch"),
        ({"chat": ChatDefaults({}, 5), "chat_template": "chatml"}, "--reasoning-budget has no meaning"),
        ({"chat": ChatDefaults({"messages": []})}, "messages is not a variable"),
    ]:
        with pytest.raises(UsageError, match=told):
            of(**more)


def states(models: ServedModels) -> dict[str, EngineState]:
    return {name: engine.state for name, engine in models.engines().items()}


async def answers(models: ServedModels, name: str | None) -> str:
    async with models.use(name) as model:
        assert model.engine.state is EngineState.READY
        return model.id


def test_latest_may_be_left_out_or_added() -> None:
    models = ServedModels([settings("tiny", "alias"), settings("qwen3:0.6b"), settings("org/name:latest")])
    for name, meant in (
        ("tiny", "tiny"), ("tiny:latest", "tiny"), ("alias:latest", "tiny"), ("qwen3:0.6b", "qwen3:0.6b"),
        ("org/name", "org/name:latest"), ("org/name:latest", "org/name:latest"),
    ):  # fmt: skip
        assert models._find(name).slot.engine.name == meant
    for name in ("qwen3", "qwen3:latest", "tiny:1b", ":latest", "name", "TINY"):
        with pytest.raises(ApiError, match=f"model '{name}' not found: it is not served here; these are: tiny, ") as caught:
            models.use(name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


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
            async with models.peek("a") as model:
                assert (model.id, model.facts, model.tokenizer.encode("hi") != []) == ("a", FACTS, True)
            assert (engine.state, engine.num_loads) == (EngineState.ASLEEP, 1)  # type: ignore[attr-defined]
            assert await answers(models, None) == "a"
        finally:
            await models.close()

    run(scenario())


def test_what_counts_tokens_or_looks_leaves_a_sleeping_model_asleep(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1)
        generates = Generator(FakePool())
        app = create_app(ServerContext(ServeSettings(), models, generates, FakePool()))
        messages = [{"role": "user", "content": "hi"}]
        await models.start()
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                await answers(models, "b")
                for method, path, body in (
                    ("GET", "/health", None), ("GET", "/v1/models", None), ("GET", "/v1/models/a", None),
                    ("GET", "/metrics", None), ("GET", "/status.json", None), ("GET", "/props?model=a", None),
                    ("POST", "/tokenize", {"content": "hi"}), ("POST", "/tokenize", {"messages": messages}),
                    ("POST", "/detokenize", {"tokens": [300]}), ("POST", "/apply-template", {"messages": messages}),
                    ("POST", "/v1/messages/count_tokens", {"messages": messages}),
                    ("POST", "/v1/responses/input_tokens", {"input": "hi"}),
                ):  # fmt: skip
                    answer = await client.request(method, path, json=None if body is None else {"model": "a", **body})
                    assert (path, answer.status_code) == (path, 200), answer.text
                assert states(models) == {"a": EngineState.ASLEEP, "b": EngineState.READY}
                assert models.engines()["a"].num_loads == 1  # type: ignore[attr-defined]
        finally:
            await models.close()

    run(scenario())


def test_one_that_was_never_loaded_is_loaded_for_a_look_at_it(run: Run) -> None:
    """Its facts are not known before."""

    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1)
        await models.start()
        try:
            async with models.peek("b") as model:
                assert model.facts == FACTS
            assert states(models)["b"] is EngineState.READY
        finally:
            await models.close()

    run(scenario())


def test_before_it_has_started_nobody_is_served(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")])
        assert list(states(models).values()) == [EngineState.LOADING, EngineState.ASLEEP]
        starting = asyncio.create_task(models.start())
        await asyncio.sleep(0)
        assert {card.state for card in models.cards()} == {EngineState.LOADING}  # and /health says so
        with pytest.raises(ApiError) as caught:
            await answers(models, "a")
        assert (caught.value.status, caught.value.code) == (503, "model_not_ready")
        await starting
        assert [card.state for card in models.cards()] == [EngineState.READY, EngineState.ASLEEP]
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


def test_who_asks_while_all_are_in_use_waits_for_room(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1)
        await models.start()
        async with models.use("a"):
            waiting = [asyncio.create_task(answers(models, "b")) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting)
            assert states(models) == {"a": EngineState.READY, "b": EngineState.ASLEEP}
        assert await asyncio.gather(*waiting) == ["b"] * 3
        assert models.engines()["b"].num_loads == 1  # type: ignore[attr-defined]
        await models.close()

    run(scenario())


def test_those_who_wait_are_not_overtaken_and_go_together(run: Run) -> None:
    """However many ask for the model that is loaded: those who came behind the first for another one come behind it."""

    async def scenario() -> None:
        models = ServedModels([settings("b"), settings("a")], max_loaded=1)
        await models.start()
        assert await answers(models, "a") == "a"
        ended: list[str] = []

        async def ask(name: str) -> None:
            async with models.use(name) as model:
                assert model.engine.state is EngineState.READY
                await asyncio.sleep(0.1)
            ended.append(name)

        tasks = []
        for name in "aababbaab":
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        assert "".join(ended) == "aabbbbaaa"
        assert [engine.num_loads for engine in models.engines().values()] == [2, 2]  # type: ignore[attr-defined]
        await models.close()

    run(scenario())


def test_the_first_that_is_free_makes_room_and_others_are_used_on(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b"), settings("c")], max_loaded=2)
        await models.start()
        async with models.use("a"):
            async with models.use("b"):
                waiting = asyncio.create_task(answers(models, "c"))
                await asyncio.sleep(0.02)  # a takes nobody new, being the one that was not asked for longest
                assert await answers(models, "b") == "b"
            assert await waiting == "c"
            assert await asyncio.wait_for(asyncio.create_task(answers(models, "a")), 1) == "a"
        assert states(models)["b"] is EngineState.ASLEEP
        await models.close()

    run(scenario())


def test_who_waits_too_long_is_told_when_to_come_back_and_holds_up_nobody(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1, room_seconds=0.1)
        await models.start()
        async with models.use("a"):  # an answer that does not end
            for _ in range(2):
                asked = [asyncio.create_task(answers(models, name)) for name in ("b", "a")]
                with pytest.raises(ApiError) as caught:
                    await asked[0]
                assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "no_room", 5)
                assert await asyncio.wait_for(asked[1], 0.05) == "a"
            gone = asyncio.create_task(answers(models, "b"))
            await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.sleep(0.01)
            assert await asyncio.wait_for(asyncio.create_task(answers(models, "a")), 0.05) == "a"
        assert models.engines()["b"].num_loads == 0  # type: ignore[attr-defined]
        assert await answers(models, "b") == "b"
        await models.close()

    run(scenario())


def test_one_that_makes_room_is_not_cut_off_while_it_keeps_what_it_has_read(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1, room_seconds=0.05)
        await models.start()
        await models.about("b")  # its tokenizer is there
        engine = models.engines()["a"]
        kept = []

        async def unload(state: EngineState = EngineState.ASLEEP, *, keeps: bool = True) -> None:
            engine.state = state  # type: ignore[misc]
            await asyncio.sleep(0.2)  # gigabytes, to a slow disk
            kept.append(state)

        engine.unload = unload  # type: ignore[attr-defined]
        with pytest.raises(ApiError) as caught:
            await answers(models, "b")
        assert (caught.value.status, caught.value.code, kept) == (503, "no_room", [])
        await asyncio.sleep(0.3)
        assert kept == [EngineState.ASLEEP]
        assert await answers(models, "b") == "b"
        await models.close()

    run(scenario())


@pytest.mark.parametrize("is_hurried", [False, True])
def test_the_end_waits_for_one_that_keeps_what_it_has_read_unless_it_is_hurried(is_hurried: bool, run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a")], sleep_idle=0.05)
        await models.start()
        engine = models.engines()["a"]
        told: list[Any] = []

        async def unload(state: EngineState = EngineState.ASLEEP, *, keeps: bool = True) -> None:
            told.append((state, keeps))
            if state is EngineState.STOPPED:
                return
            engine.state = state  # type: ignore[misc]
            await asyncio.sleep(0.3)  # gigabytes, to a slow disk
            told.append("kept")

        engine.unload = unload  # type: ignore[attr-defined]
        while not told:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(models.close())
        if is_hurried:
            await asyncio.sleep(0.05)
            closing.cancel()
            await models.close()
        else:
            await closing
        end = [(EngineState.STOPPED, False)] if is_hurried else ["kept", (EngineState.STOPPED, True)]
        assert told == [(EngineState.ASLEEP, True), *end]

    run(scenario())


def test_who_keeps_asking_for_one_that_gets_no_room_shuts_nobody_out(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b")], max_loaded=1, room_seconds=0.2)
        await models.start()

        async def insist() -> None:
            while True:
                asyncio.create_task(answers(models, "b")).add_done_callback(lambda task: task.exception())
                await asyncio.sleep(0.02)

        async with models.use("a"):
            insisting = asyncio.create_task(insist())
            for _ in range(3):
                assert await asyncio.create_task(answers(models, "a")) == "a"
            insisting.cancel()
        await models.close()

    run(scenario())


def test_one_that_nobody_uses_can_be_put_to_sleep(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a", "alias"), settings("b")], max_loaded=1)
        with pytest.raises(ApiError) as early:
            await models.put_to_sleep("a")  # about to be loaded
        await models.start()
        try:
            async with models.use("a"):
                with pytest.raises(ApiError) as caught:
                    await models.put_to_sleep("alias")
            assert states(models)["a"] is EngineState.READY
            await models.put_to_sleep("alias")
            await models.put_to_sleep("a")  # it does
            assert states(models) == {"a": EngineState.ASLEEP, "b": EngineState.ASLEEP}
            assert await answers(models, "a") == "a"
            with pytest.raises(ApiError) as unknown:
                await models.put_to_sleep("nobody")
        finally:
            await models.close()
        assert [each.value.status for each in (early, caught, unknown)] == [503, 503, 404]

    run(scenario())


def test_who_wants_one_put_to_sleep_and_leaves_leaves_nothing_half_done(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a")])
        await models.start()
        try:
            asking = asyncio.create_task(models.put_to_sleep("a"))
            while not models.engines()["a"].is_ending:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            asking.cancel()
            assert await answers(models, "a") == "a"
        finally:
            await models.close()

    run(scenario())


def test_what_a_model_is_can_be_told_while_it_sleeps(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        models = ServedModels(
            [settings("a", "alias"), settings("b"), settings("broken", path=tmp_path)], max_loaded=1, sleep_idle=60.0
        )
        await models.start()
        try:
            loaded, asleep = await models.about("alias"), await models.about("b")
            assert (loaded.id, loaded.state, loaded.facts) == ("alias", EngineState.READY, FACTS)
            assert loaded.sleeps is not None
            assert 0 < loaded.sleeps - time.time() <= 60
            assert (asleep.state, asleep.facts, asleep.sleeps) == (EngineState.ASLEEP, None, None)
            assert asleep.text.chat_template is not None
            assert asleep.files == loaded.files
            assert asleep.files._replace(digest="", modified=0.0) == FileFacts(
                "safetensors", "qwen3", 3_803_904, 2 * 3_803_904, "BF16", 2048, 256, 4, True, False, False, "", 0.0
            )  # as nanovllm models show tiny has it
            for name, status in (("broken", 503), ("nobody", 404)):
                with pytest.raises(ApiError) as caught:
                    await models.about(name)
                assert (caught.value.status, str(tmp_path) in caught.value.message) == (status, False)
            assert states(models) == {"a": EngineState.READY, "b": EngineState.ASLEEP, "broken": EngineState.ASLEEP}
        finally:
            await models.close()

    run(scenario())


def test_an_adapter_is_told_of_as_its_models(run: Run) -> None:
    async def scenario() -> None:
        config = dataclasses.replace(CONFIG, lora_modules=(LoraModule("sql", "/adapter"),))
        models = ServedModels([ModelSettings(("a",), TINY, config)])
        await models.start()
        try:
            adapter, own = await models.about("sql"), await models.about("a")
            assert (adapter.id, adapter.parent, own.parent) == ("sql", "a", None)
            assert adapter.files == own.files
            await models.put_to_sleep("sql")
            assert states(models) == {"a": EngineState.ASLEEP}
        finally:
            await models.close()

    run(scenario())


def test_who_asks_while_a_model_is_put_to_sleep_waits_until_it_is_back(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a")], sleep_idle=0.01)
        await models.start()
        for _ in range(4):
            while states(models)["a"] is not EngineState.ASLEEP:
                await asyncio.sleep(0)
            assert await answers(models, "a") == "a"
        await models.close()

    run(scenario())


def test_the_end_is_told_to_those_who_wait_and_nothing_is_loaded_behind_it(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b"), settings("c")], max_loaded=1)
        await models.start()
        async with models.use("a"):
            waiting = [asyncio.create_task(answers(models, name)) for name in "bcb"]
            await asyncio.sleep(0.01)
            await models.close()
            for task in waiting:
                with pytest.raises(ApiError) as caught:
                    await task
                assert (caught.value.status, caught.value.code) == (503, "draining")
        assert set(states(models).values()) == {EngineState.STOPPED}

    run(scenario())


def test_one_load_that_fails_is_told_to_all_who_wait_for_it(run: Run) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("bad")])
        await models.start()
        failed = await asyncio.gather(*(answers(models, "bad") for _ in range(5)), return_exceptions=True)
        assert [error.code for error in failed if isinstance(error, ApiError)] == ["model_load_failed"] * 5
        assert models.engines()["bad"].num_loads == 1  # type: ignore[attr-defined]
        await models.close()

    run(scenario())


def test_one_whose_files_are_broken_puts_nobody_to_sleep(run: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        models = ServedModels([settings("a"), settings("b", path=tmp_path)], max_loaded=1)
        await models.start()
        with pytest.raises(ApiError, match="could not be loaded"):
            await answers(models, "b")
        assert states(models)["a"] is EngineState.READY
        await models.close()

    run(scenario())


def test_any_mix_of_requests_is_answered_within_the_room_that_there_is(run: Run) -> None:
    async def scenario() -> None:
        rng = random.Random(4)
        models = ServedModels([settings(name) for name in "abcd"], max_loaded=2, sleep_idle=0.02)
        await models.start()
        most = 0

        async def ask(name: str, seconds: float, patience: float | None) -> None:
            nonlocal most
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience), models.use(name) as model:
                    assert model.engine.state is EngineState.READY
                    await asyncio.sleep(seconds)
                    assert model.engine.state is EngineState.READY
                    loaded = [state for state in states(models).values() if state is not EngineState.ASLEEP]
                    most = max(most, len(loaded))

        tasks = []
        for _ in range(150):
            patience = 0.05 * rng.random() if rng.random() < 0.2 else None
            tasks.append(asyncio.create_task(ask(rng.choice("aaabbcd"), 0.02 * rng.random(), patience)))
            await asyncio.sleep(0.005 * rng.random())
        await asyncio.gather(*tasks)
        assert most == 2
        assert not any(slot.users or slot.waiting for slot in models._slots)
        await models.close()

    run(scenario())
