"""The openai package on /v1/responses and the anthropic package on /v1/messages, against one real server on the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from live_server import LiveServer, live_server
from responses_spec import check_event

STORY = "Tell me a story about a little girl"
MESSAGES: Any = [{"role": "user", "content": STORY}]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"name": "get_weather", "description": "The weather of a place", "input_schema": PARAMETERS}


GREEDY: Any = {"extra_body": {"temperature": 0}}
"""For anthropic's package, which does not know the field any more."""


class Weather(BaseModel):
    """Small enough for the bundled model to come to its end."""

    sunny: bool
    windy: bool


@pytest.fixture(scope="module")
def openai() -> Any:
    """Not imported by processes that run other files."""
    return pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Not imported by processes that run other files."""
    return pytest.importorskip("anthropic", reason="the anthropic package is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny") as server:
        yield server


@pytest.fixture(scope="module")
def oai(openai: Any, server: LiveServer) -> Any:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(anthropic: Any, server: LiveServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


# ---- openai ----


def test_create(oai: Any) -> None:
    response = oai.responses.create(model="tiny", input=STORY, max_output_tokens=24, temperature=0)
    assert response.output_text.startswith("Once upon a time")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.usage.total_tokens) == (24, response.usage.input_tokens + 24)


def test_create_as_a_stream(oai: Any) -> None:
    """Every event of a real generation is as specified, and the last one has what the others told."""
    whole = oai.responses.create(model="tiny", input=STORY, temperature=0, max_output_tokens=200)
    events = list(oai.responses.create(model="tiny", input=STORY, temperature=0, max_output_tokens=200, stream=True))
    for event in events:
        check_event(event.to_dict())
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.completed"
    assert text == events[-1].response.output_text == whole.output_text


def test_the_stream_helper(oai: Any) -> None:
    with oai.responses.stream(model="tiny", input=STORY, temperature=0, max_output_tokens=300) as stream:
        shown = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == shown


def test_parse(oai: Any) -> None:
    response = oai.responses.parse(model="tiny", input="Weather?", text_format=Weather, temperature=0, max_output_tokens=512)
    assert isinstance(response.output_parsed, Weather)


def test_a_tool_that_must_be_called_and_its_result(oai: Any) -> None:
    first = oai.responses.create(
        model="tiny", input="Weather in Rome?", tools=[FUNCTION, {"type": "web_search"}], tool_choice="required", temperature=0,
        max_output_tokens=128, parallel_tool_calls=False,
    )  # fmt: skip
    call = next(item for item in first.output if item.type == "function_call")
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"place", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = oai.responses.create(
        model="tiny", input=[result], previous_response_id=first.id, tools=[FUNCTION], max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_named_tool_as_a_stream(oai: Any) -> None:
    with oai.responses.stream(
        model="tiny", input="Weather?", tools=[FUNCTION], temperature=0, max_output_tokens=128,
        tool_choice={"type": "function", "name": "get_weather"},
    ) as stream:  # fmt: skip
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = next(item for item in stream.get_final_response().output if item.type == "function_call")
    assert "".join(pieces) == call.arguments


def test_retrieve_delete_and_input_items(openai: Any, oai: Any) -> None:
    response = oai.responses.create(model="tiny", input=STORY, max_output_tokens=4)
    assert oai.responses.retrieve(response.id).output_text == response.output_text
    assert [item.content[0].text for item in oai.responses.input_items.list(response.id)] == [STORY]
    oai.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(response.id)


def test_counting_input_tokens(oai: Any) -> None:
    counted = oai.responses.input_tokens.count(model="tiny", input=STORY)
    assert counted.input_tokens == oai.responses.create(model="tiny", input=STORY, max_output_tokens=1).usage.input_tokens


def test_logprobs(oai: Any) -> None:
    response = oai.responses.create(
        model="tiny", input=STORY, max_output_tokens=8, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = response.output[0].content[0]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_errors(openai: Any, oai: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        oai.responses.create(model="tiny", input="story " * 3000, max_output_tokens=4)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        oai.responses.create(model="unknown", input="hi")
    schema: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError):
        oai.responses.create(model="tiny", input="hi", text=schema)


def test_async_streams_side_by_side(openai: Any, server: LiveServer) -> None:
    async def one(client: Any) -> str:
        text = ""
        async for event in await client.responses.create(
            model="tiny", input=STORY, temperature=0, max_output_tokens=24, stream=True
        ):
            text += event.delta if event.type == "response.output_text.delta" else ""
        return text

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    assert texts[0].startswith("Once upon a time")


# ---- anthropic ----


def test_messages(claude: Any) -> None:
    message = claude.messages.create(model="tiny", max_tokens=24, messages=MESSAGES, **GREEDY, system="Be brief.")
    assert message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)


def test_messages_end_by_themselves_or_at_a_sequence(claude: Any) -> None:
    whole = claude.messages.create(model="tiny", max_tokens=400, messages=MESSAGES, **GREEDY)
    assert whole.stop_reason == "end_turn"
    cut = claude.messages.create(model="tiny", max_tokens=400, messages=MESSAGES, **GREEDY, stop_sequences=["tiny"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "tiny")
    assert whole.content[0].text.startswith(cut.content[0].text + "tiny")


def test_the_stream_helper_of_messages(claude: Any) -> None:
    whole = claude.messages.create(model="tiny", max_tokens=24, messages=MESSAGES, **GREEDY)
    with claude.messages.stream(model="tiny", max_tokens=24, messages=MESSAGES, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert (message.usage.output_tokens, message.stop_reason) == (24, "max_tokens")


def test_thinking_of_messages(claude: Any) -> None:
    """Off unless asked for; stopped at its budget."""
    thinking: Any = {"type": "enabled", "budget_tokens": 8}
    with claude.messages.stream(model="tiny", max_tokens=64, messages=MESSAGES, thinking=thinking, **GREEDY) as stream:
        first, second, *_ = stream.get_final_message().content
    assert (first.type, second.type) == ("thinking", "text")
    assert 0 < len(first.thinking.split()) <= 8


def test_a_message_is_continued(claude: Any) -> None:
    start: Any = [*MESSAGES, {"role": "assistant", "content": "Once upon a time, a little"}]
    message = claude.messages.create(model="tiny", max_tokens=8, messages=start, **GREEDY)
    assert not message.content[0].text.startswith("Once")
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10


def test_tools_and_their_results(claude: Any) -> None:
    ask: Any = [{"role": "user", "content": "Weather in Rome?"}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = claude.messages.create(
        model="tiny", max_tokens=128, messages=ask, tools=[{**TOOL, "strict": True}], tool_choice=choice, **GREEDY
    )
    call = next(block for block in first.content if block.type == "tool_use")
    assert (first.stop_reason, call.name, set(call.input)) == ("tool_use", "get_weather", {"place", "days"})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    answers: Any = [*ask, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = claude.messages.create(model="tiny", max_tokens=16, messages=answers, tools=[TOOL])
    assert second.usage.cache_read_input_tokens > 0


def test_tools_as_a_stream(claude: Any) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    with claude.messages.stream(
        model="tiny", max_tokens=128, messages=MESSAGES, tools=[TOOL], tool_choice=choice, **GREEDY
    ) as stream:
        call = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert set(call.input) == {"place", "days"}


def test_a_schema_for_messages(claude: Any) -> None:
    message = claude.messages.parse(model="tiny", max_tokens=512, messages=MESSAGES, **GREEDY, output_format=Weather)
    assert isinstance(message.parsed_output, Weather)


def test_count_tokens(claude: Any) -> None:
    counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES, tools=[TOOL], system="Be brief.")
    usage = claude.messages.create(model="tiny", max_tokens=1, messages=MESSAGES, tools=[TOOL], system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_changing_billing_header_finds_the_prompt_in_the_cache(claude: Any) -> None:
    def usage(nonce: str) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={nonce};"
        system: Any = [{"type": "text", "text": header}, {"type": "text", "text": "You are a helper. " * 20}]
        return claude.messages.create(model="tiny", max_tokens=1, messages=MESSAGES, system=system).usage

    first, second = usage("fa690"), usage("0aaa9")
    assert second.cache_read_input_tokens >= first.input_tokens - 32


def test_models_for_anthropics_client(anthropic: Any, claude: Any) -> None:
    [model] = list(claude.models.list(limit=1))
    assert (model.id, model.type) == ("tiny", "model")
    assert claude.models.retrieve("tiny").created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nope")


def test_errors_of_messages(anthropic: Any, claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": "story " * 3000}])
    assert "prompt is too long" in str(refused.value)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude-sonnet", max_tokens=4, messages=MESSAGES)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": [image]}])


def test_async_messages(anthropic: Any, server: LiveServer) -> None:
    async def several() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.messages.stream(model="tiny", max_tokens=24, messages=MESSAGES, **GREEDY) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert len(set(asyncio.run(several()))) == 1
