"""litellm, langchain-openai and instructor against a real server on the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from live_server import LiveServer, live_server

MESSAGES = [{"role": "user", "content": "hi"}]


class Place(BaseModel):
    """Where something is."""

    city: Literal["Paris", "Oslo"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny") as server:
        yield server


@pytest.fixture
def where(server: LiveServer) -> dict[str, Any]:
    """What litellm is told each time."""
    pytest.importorskip("litellm")
    return {"model": "openai/tiny", "api_base": server.base_url, "api_key": "none", "num_retries": 0, "timeout": 60}


def test_litellm_chats(where: dict[str, Any]) -> None:
    import litellm

    whole = litellm.completion(**where, messages=MESSAGES, temperature=0, max_tokens=20)
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**where, messages=MESSAGES, temperature=0, max_tokens=20, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content != ""


def test_litellm_chats_asynchronously(where: dict[str, Any]) -> None:
    import litellm

    answer = asyncio.run(litellm.acompletion(**where, messages=MESSAGES, max_tokens=4))
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_litellm_has_texts_and_vectors(where: dict[str, Any]) -> None:
    import litellm

    text = litellm.text_completion(**{**where, "model": "text-completion-openai/tiny"}, prompt="Once", max_tokens=4)
    assert text.choices[0].text
    vector = litellm.embedding(**where, input=["a cat"], encoding_format="float").data[0]["embedding"]
    assert len(vector) > 8


def test_litellm_knows_what_is_wrong(where: dict[str, Any]) -> None:
    import litellm

    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**where, messages=MESSAGES, temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**where, "model": "openai/gpt-9"}, messages=MESSAGES)


@pytest.fixture
def chat(server: LiveServer) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model="tiny", base_url=server.base_url, api_key="none", max_retries=0, temperature=0, max_completion_tokens=200
    )


def test_langchain_chats(chat: Any) -> None:
    whole = chat.invoke([("system", "Be kind."), ("human", "hi")])
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream([("system", "Be kind."), ("human", "hi")])) == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_a_form(chat: Any, method: str) -> None:
    assert chat.with_structured_output(Place, method=method).invoke("Where is it?").city in ("Paris", "Oslo")


def test_langchain_calls_tools(chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    question = HumanMessage("Where is it?")
    answer = chat.bind_tools([Place], tool_choice="required").invoke([question])
    assert answer.tool_calls[0]["name"] == "Place"
    history = [question, answer, *(ToolMessage("yes", tool_call_id=call["id"]) for call in answer.tool_calls)]
    assert isinstance(chat.invoke(history).content, str)


def test_langchain_has_vectors(server: LiveServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    embeddings = langchain_openai.OpenAIEmbeddings(
        model="tiny", base_url=server.base_url, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["a cat", "a dog"])
    assert len(first) == len(second)
    assert embeddings.embed_query("a cat") == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_instructor_parses_a_form(server: LiveServer, mode: str) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    place = client.chat.completions.create(
        model="tiny",
        response_model=Place,
        messages=[{"role": "user", "content": "Where is it?"}],
        max_retries=0,
        max_tokens=200,
        temperature=0,
    )
    assert place.city in ("Paris", "Oslo")


@pytest.fixture
def ollama_chat(server: LiveServer) -> Any:
    langchain_ollama = pytest.importorskip("langchain_ollama")
    return langchain_ollama.ChatOllama(model="tiny", base_url=server.url, temperature=0, num_predict=200, num_ctx=8192)


def test_langchain_chats_as_with_ollama(ollama_chat: Any, chat: Any) -> None:
    said = [("system", "Be kind."), ("human", "hi")]
    whole = ollama_chat.invoke(said)
    assert whole.content == chat.invoke(said).content
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["eval_count"] > 0
    assert "".join(chunk.content for chunk in ollama_chat.stream(said)) == whole.content


def test_langchain_uses_tools_and_forms_as_with_ollama(ollama_chat: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    parsed = ollama_chat.with_structured_output(Place, method="json_schema").invoke("Where is it?")
    assert parsed.city in ("Paris", "Oslo")
    call = {"name": "Place", "args": {"city": "Oslo"}, "id": "call_1", "type": "tool_call"}
    history = [HumanMessage("Where is it?"), AIMessage("", tool_calls=[call]), ToolMessage("yes", tool_call_id="call_1")]
    assert isinstance(ollama_chat.bind_tools([Place]).invoke(history).content, str)


def test_langchain_has_vectors_as_with_ollama(server: LiveServer) -> None:
    langchain_ollama = pytest.importorskip("langchain_ollama")
    embeddings = langchain_ollama.OllamaEmbeddings(model="tiny", base_url=server.url)
    first, second = embeddings.embed_documents(["a cat", "a dog"])
    assert len(first) == len(second)
    assert embeddings.embed_query("a cat") == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_litellm_chats_as_with_ollama(server: LiveServer, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    where: Any = {"model": f"{provider}/tiny", "api_base": server.url, "num_retries": 0, "timeout": 60}
    whole = litellm.completion(**where, messages=MESSAGES, temperature=0, max_tokens=20)
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**where, messages=MESSAGES, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content != ""
    vectors = litellm.embedding(**{**where, "model": "ollama/tiny"}, input=["a cat"]).data
    assert len(vectors[0]["embedding"]) > 8
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**where, "model": f"{provider}/gpt-9"}, messages=MESSAGES)
