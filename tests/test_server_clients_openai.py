"""OpenAI's own package against a real server on the bundled model."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from live_server import LiveServer, live_server
from node_client import told_by

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def openai() -> Any:
    """Not imported by processes that run other files."""
    return pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny") as server:
        yield server


@pytest.fixture
def client(openai: Any, server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


class Animal(BaseModel):
    """No numbers and no free text: a small model would go on for ever."""

    kind: bool
    legs: list[bool] | None


def test_a_batch_of_requests(client: Any) -> None:
    lines = [
        {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": {**ASK, "max_tokens": tokens}}
        for i, tokens in enumerate((4, -9))
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(content), "batch")
    assert client.files.retrieve(file.id) == file
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    (wrong,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("request-0", 200)
    alone = client.chat.completions.create(**{**ASK, "max_tokens": 4})
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("request-1", 400)
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert [each.purpose for each in client.files.list()] == ["batch_output", "batch_output", "batch"]
    assert [client.files.delete(each.id).deleted for each in client.files.list()] == [True] * 3


def test_models(openai: Any, client: Any) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat_streamed_and_whole_are_the_same(client: Any) -> None:
    whole = client.chat.completions.create(**ASK)
    assert whole.usage.completion_tokens <= 16
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_the_packages_own_stream_helper(client: Any) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}  # it does not parse what was cut off
    with client.chat.completions.stream(**ask) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content


def test_a_seed_gives_the_same_answers_again(client: Any) -> None:
    ask = {**ASK, "temperature": 1.0, "seed": 7, "n": 2}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]


def test_logprobs_joined_are_the_text(client: Any) -> None:
    answer = client.chat.completions.create(**{**ASK, "logprobs": True, "top_logprobs": 3})
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token


def test_stop_ends_an_answer(client: Any) -> None:
    text = client.chat.completions.create(**ASK).choices[0].message.content
    stop = text[5:8]
    stopped = client.chat.completions.create(**ASK, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_form_is_parsed(client: Any) -> None:
    answer = client.chat.completions.parse(**{**ASK, "max_tokens": 200}, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_json_object(client: Any) -> None:
    answer = client.chat.completions.create(
        **{**ASK, "max_tokens": 300},
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": WEATHER["function"]["parameters"]},  # type: ignore[index]
        },
    )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Oslo")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called(client: Any, choice: Any) -> None:
    ask = {**ASK, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**ask).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    deltas = [c.choices[0].delta.tool_calls for c in client.chat.completions.create(**ask, stream=True) if c.choices]
    pieces = [piece for delta in deltas for piece in delta or []]
    assert pieces[0].function.name == "get_weather"
    assert pieces[0].id
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    history = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert client.chat.completions.create(**{**ASK, "messages": history}).choices[0].finish_reason in ("stop", "length")


def test_completions(client: Any) -> None:
    ask = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**ask, echo=True, logprobs=2)
    assert whole.choices[0].text.startswith("Once upon a time")
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == whole.choices[0].text
    assert logprobs.text_offset[0] == 0
    assert logprobs.token_logprobs[0] is None
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
    assert "Once upon a time" + streamed == whole.choices[0].text
    several = client.completions.create(**{**ask, "prompt": ["Once", "The"], "n": 2, "temperature": 1})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_embeddings_as_numbers_and_as_base64(client: Any) -> None:
    texts = ["a cat", "a dog", "a cat"]
    answer = client.embeddings.create(model="tiny", input=texts)  # the package asks for base64 by itself
    vectors = [entry.embedding for entry in answer.data]
    assert math.sqrt(math.fsum(x * x for x in vectors[0])) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] == vectors[2]
    assert vectors[0] != vectors[1]
    plain = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
    short = client.embeddings.create(model="tiny", input=texts[0], dimensions=8).data[0].embedding
    assert len(short) == 8
    assert math.sqrt(math.fsum(x * x for x in short)) == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.total_tokens > 0


def test_errors_are_the_packages_own(openai: Any, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**ASK, "temperature": -1})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": "word " * 20_000}]})
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ASK, "model": "gpt-9"})


def test_raw_answers_have_request_ids(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASK)
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with client.chat.completions.with_streaming_response.create(**ASK, stream=True) as streaming:
        assert streaming.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert list(streaming.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_many_at_once_by_the_asynchronous_client(openai: Any, server: LiveServer) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as client:

            async def one(i: int) -> str:
                ask = {**ASK, "messages": [{"role": "user", "content": f"Story number {i}."}]}
                stream = await client.chat.completions.create(**ask, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            first = await asyncio.gather(*(one(i) for i in range(8)))
            assert await one(3) == first[3]

    asyncio.run(scenario())


def test_leaving_a_stream_ends_the_answer(server: LiveServer, client: Any) -> None:
    with client.chat.completions.create(**{**ASK, "max_tokens": 2000}, extra_body={"ignore_eos": True}, stream=True) as stream:
        next(iter(stream))
    for _ in range(1000):
        if server.get("/status.json")[1]["models"][0]["running"] == 0:
            return
    raise AssertionError("it still runs")


NODE = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: "tiny", messages: [{ role: "user", content: "Tell me a story." }], max_tokens: 16, temperature: 0 };
(async () => {
  const whole = await client.chat.completions.create(ask);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
    streamed += chunk.choices[0].delta.content ?? "";
  const embedding = await client.embeddings.create({ model: "tiny", input: "a cat" });
  const text = await client.completions.create({ model: "tiny", prompt: "Once", max_tokens: 4 });
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  let refused = "";
  try { await client.chat.completions.create({ ...ask, temperature: -1 }); } catch (error) { refused = error.constructor.name; }
  console.log(JSON.stringify({
    whole: whole.choices[0].message.content, streamed, size: embedding.data[0].embedding.length,
    text: text.choices[0].text, models, refused,
  }));
})();
"""


def test_the_package_for_node(server: LiveServer, tmp_path: Path) -> None:
    told = told_by(NODE, "openai", server.base_url, tmp_path)
    assert told["whole"] == told["streamed"] != ""
    assert told["models"] == ["tiny"]
    assert told["refused"] == "BadRequestError"
    assert told["size"] > 0
    assert told["text"]


def test_base64_is_float32(server: LiveServer) -> None:
    body = {"model": "tiny", "input": "a cat", "encoding_format": "base64"}
    data = server.post("/v1/embeddings", body)[1]["data"][0]["embedding"]
    body["encoding_format"] = "float"
    assert len(base64.b64decode(data)) == 4 * len(server.post("/v1/embeddings", body)[1]["data"][0]["embedding"])
