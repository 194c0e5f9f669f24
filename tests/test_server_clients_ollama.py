"""The ollama package against a real server on the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live_server
from node_client import told_by
from seeing import png, seeing_model

ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")

HI = [{"role": "user", "content": "hi"}]
FEW = {"num_predict": 12, "temperature": 0, "num_ctx": 8192}
CITIES = {"city": {"enum": ["Paris", "Oslo"]}}
PLACE = {"type": "object", "properties": CITIES, "required": ["city"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny", "-c", "1K") as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Any:
    return ollama.Client(host=server.url, timeout=60)


def test_it_chats(client: Any) -> None:
    whole = client.chat("tiny", HI, options=FEW)
    assert (whole.done, whole.message.role) == (True, "assistant")
    assert whole.message.content
    assert whole.eval_count <= 12
    assert 0 <= whole.load_duration < whole.total_duration
    assert 0 < whole.prompt_eval_duration + whole.eval_duration <= whole.total_duration
    parts = list(client.chat("tiny:latest", HI, stream=True, options=FEW))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert last.done_reason == whole.done_reason


def test_it_is_what_openais_form_of_the_same_gets(client: Any, server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *HI]
    theirs = client.chat("tiny", messages, options=FEW)
    status, ours = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
    assert status == 200
    assert theirs.message.content == ours["choices"][0]["message"]["content"]
    assert theirs.prompt_eval_count == ours["usage"]["prompt_tokens"]
    generated = client.generate("tiny", "hi", system="Be kind.", options=FEW)
    assert generated.response == theirs.message.content


def test_it_goes_on_with_a_conversation(client: Any) -> None:
    first = client.generate("tiny", "Tell me a story.", options=FEW)
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    alone = client.generate("tiny", "Go on.", options=FEW)
    second = client.generate("tiny", "Go on.", context=first.context, options=FEW)
    assert second.prompt_eval_count == len(first.context) + alone.prompt_eval_count
    assert second.context[: len(first.context)] == first.context


def test_raw_prompts_are_what_completions_get(client: Any, server: LiveServer) -> None:
    theirs = client.generate("tiny", "Once upon", raw=True, options={"num_predict": 8, "temperature": 0})
    _, ours = server.post("/v1/completions", {"prompt": "Once upon", "temperature": 0, "max_tokens": 8})
    assert theirs.response == ours["choices"][0]["text"]
    assert theirs.context is None


def test_options_count(client: Any) -> None:
    def answer(**options: Any) -> str:
        return str(client.generate("tiny", "Once", raw=True, options=options).response)

    assert answer(seed=3, num_predict=12, temperature=2.0) == answer(seed=3, num_predict=12, temperature=2.0)
    assert answer(seed=3, num_predict=12, temperature=2.0) != answer(seed=4, num_predict=12, temperature=2.0)
    whole = answer(temperature=0, num_predict=12)
    assert answer(temperature=0, num_predict=12, stop=[whole[5:9]]) == whole[:5]
    few = client.generate("tiny", "Once", raw=True, options={"num_ctx": 6, "temperature": 0})
    assert (few.prompt_eval_count + few.eval_count, few.done_reason) == (6, "length")


def test_answers_have_the_form_that_is_asked_for(client: Any) -> None:
    found = client.chat("tiny", HI, format=PLACE, options={"temperature": 0})
    assert json.loads(found.message.content)["city"] in ("Paris", "Oslo")
    parts = client.generate("tiny", "Where?", format=PLACE, stream=True, options={"temperature": 0})
    assert json.loads("".join(part.response for part in parts))["city"] in ("Paris", "Oslo")
    some = client.chat("tiny", HI, format="json", options={"num_predict": 3})
    assert some.message.content.lstrip().startswith("{")


def test_it_calls_tools(client: Any) -> None:
    def find(city: str) -> str:
        """Find a place.

        Args:
            city: Its name
        """
        return city

    conversation: list[Any] = [{"role": "user", "content": "Where is it?"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"city": "Oslo"}}}]}
    conversation += [call, {"role": "tool", "tool_name": "find", "content": "north"}]
    answer = client.chat("tiny", conversation, tools=[find], options=FEW)
    without = client.chat("tiny", conversation, options=FEW)
    assert answer.prompt_eval_count > without.prompt_eval_count  # the model has read of it
    for each in answer.message.tool_calls or ():
        assert isinstance(each.function.arguments, dict)


def test_it_thinks_where_it_is_told_to(client: Any) -> None:
    thought = client.chat("tiny", HI, think=True, options=FEW)
    plain = client.chat("tiny", HI, think=False, options=FEW)
    assert thought.prompt_eval_count != plain.prompt_eval_count
    assert not plain.message.thinking


def test_log_probabilities(client: Any) -> None:
    answer = client.generate("tiny", "Once", raw=True, logprobs=True, top_logprobs=3, options={"num_predict": 4})
    assert "".join(each.token for each in answer.logprobs) == answer.response
    assert all(len(each.top_logprobs) == 3 for each in answer.logprobs)
    assert all(each.logprob <= 0 for each in answer.logprobs)


def test_vectors(client: Any, server: LiveServer) -> None:
    both = client.embed("tiny", ["a cat", "a dog"])
    _, ours = server.post("/v1/embeddings", {"input": ["a cat", "a dog"]})
    assert both.embeddings == [each["embedding"] for each in ours["data"]]
    assert both.prompt_eval_count == ours["usage"]["prompt_tokens"]
    old = client.embeddings("tiny", "a cat").embedding
    length = sum(number * number for number in old) ** 0.5
    assert [number / length for number in old] == pytest.approx(both.embeddings[0], abs=1e-6)
    assert len(client.embed("tiny", "a cat", dimensions=8).embeddings[0]) == 8
    cut = client.embed("tiny", "word " * 3000)
    assert cut.prompt_eval_count == 1024
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed("tiny", "word " * 3000, truncate=False)
    assert caught.value.status_code == 400


def test_it_lists_what_is_served(client: Any) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details.family, listed.details.parameter_size) == ("tiny", "qwen3", "3.80M")
    (running,) = client.ps().models
    assert (running.name, running.digest, running.context_length) == ("tiny", listed.digest, 1024)
    shown = client.show(listed.model)
    assert shown.modelinfo["qwen3.context_length"] == 1024
    assert set(shown.capabilities) >= {"completion", "tools"}
    assert "<|im_start|>" in shown.template


def test_a_model_is_unloaded_and_loaded_again(client: Any) -> None:
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.show("tiny").modelinfo["qwen3.context_length"] == 1024  # without waking it
    assert client.ps().models == []
    loaded = client.chat("tiny", [], keep_alive="10m")
    assert (loaded.done, loaded.done_reason) == (True, "load")
    assert len(client.ps().models) == 1
    client.generate("tiny", keep_alive=0)
    woken = client.chat("tiny", HI, options=FEW)
    assert 0.1e9 < woken.load_duration < woken.total_duration


def test_it_knows_what_is_wrong(client: Any) -> None:
    def error(call: Any) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        return caught.value.status_code, caught.value.error

    status, text = error(lambda: client.chat("gpt-9", HI))
    assert (status, "not found" in text) == (404, True)
    status, text = error(lambda: list(client.chat("gpt-9", HI, stream=True)))
    assert status == 404
    status, text = error(lambda: client.chat("tiny", [{"role": "user", "content": "word " * 3000}], options={"num_ctx": 4096}))
    assert (status, "1024" in text, "-c" in text) == (400, True, True)
    status, text = error(lambda: client.chat("tiny", HI, options={"num_ctx": 5}))
    assert (status, "5 tokens" in text) == (400, True)
    assert error(lambda: client.chat("tiny", HI, options={"temperature": -1}))[0] == 400
    assert error(lambda: client.generate("tiny", "a", suffix="b")) == (
        400, "this model has no tokens for filling in the middle; leave the suffix out"
    )  # fmt: skip
    for call in (
        lambda: client.pull("x"), lambda: client.create("x", from_="tiny"), lambda: list(client.push("x", stream=True)),
        lambda: client.copy("tiny", "x"), lambda: client.delete("tiny"),
    ):  # fmt: skip
        status, text = error(call)
        assert (status, "models are not managed by this server" in text) == (400, True)


def test_clients_look_whether_anybody_is_there(server: LiveServer) -> None:
    import httpx

    for method, path in (("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/version"), ("HEAD", "/api/tags")):
        assert httpx.request(method, server.url + path).status_code == 200


def test_it_chats_asynchronously(server: LiveServer) -> None:
    async def said() -> str:
        client = ollama.AsyncClient(host=server.url)
        return "".join([part.message.content async for part in await client.chat("tiny", HI, stream=True, options=FEW)])

    assert asyncio.run(said())


NODE = """
const { Ollama } = require("ollama");
(async () => {
  const client = new Ollama({ host: process.argv[2] });
  const ask = { model: "tiny", messages: [{ role: "user", content: "hi" }], options: { num_predict: 12, temperature: 0 } };
  const whole = await client.chat(ask);
  let streamed = "";
  for await (const part of await client.chat({ ...ask, stream: true })) streamed += part.message.content;
  const { models } = await client.list();
  const { embeddings } = await client.embed({ model: "tiny", input: "a cat" });
  let refused = "";
  try { await client.chat({ ...ask, model: "gpt-9" }); } catch (error) { refused = error.message; }
  console.log(JSON.stringify({
    whole: whole.message.content, streamed, models: models.map(each => each.name), size: embeddings[0].length, refused,
  }));
})();
"""


def test_the_package_for_node(server: LiveServer, tmp_path: Path) -> None:
    told = told_by(NODE, "ollama", server.url, tmp_path)
    assert told["whole"] == told["streamed"] != ""
    assert (told["models"], told["size"] > 8) == (["tiny"], True)
    assert "not found" in told["refused"]


def test_a_key_is_sent_and_asked_for_and_signs_of_life_are_read_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server("tiny", "--api-key", "a-key-for-tests", "--ping-interval", "0.0005") as guarded:
        with pytest.raises(ollama.ResponseError) as caught:
            ollama.Client(host=guarded.url).list()
        assert (caught.value.status_code, "API key" in caught.value.error) == (401, True)
        monkeypatch.setenv("OLLAMA_API_KEY", "a-key-for-tests")
        client = ollama.Client(host=guarded.url)
        assert len(client.list().models) == 1
        parts = list(client.chat("tiny", HI, stream=True, options=FEW))
        assert "".join(part.message.content for part in parts) == client.chat("tiny", HI, options=FEW).message.content


def test_it_shows_images(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(40, 17))
    with live_server(str(seeing_model(tmp_path / "seeing"))) as seeing:
        client = ollama.Client(host=seeing.url)
        assert "vision" in client.show("seeing").capabilities
        message = {"role": "user", "content": "what is it?", "images": [file]}
        seen = client.chat("seeing", [message], options=FEW)
        blind = client.chat("seeing", [{"role": "user", "content": "what is it?"}], options=FEW)
        assert seen.prompt_eval_count > blind.prompt_eval_count
        generated = client.generate("seeing", "what is it?", images=[file.read_bytes()], options=FEW)
        assert (generated.response, generated.context) == (seen.message.content, None)
