"""Images in the server's APIs: what reaches the engine of them, in which order, and what is refused; at the end a real server."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from live_server import LiveServer, live_server
from nanovllm_cli.images import reading
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.source import data_url
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import chat_prompt
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.engine_stream import EngineStream
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Facts, Output, Piece
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.server.settings import IMAGES_BODY, TEXTS_BODY, ServeSettings
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.text.answer_format import answer_format
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import ImageTokens, Picture, TokenIds, TowerSpec, VisionSpec
from seeing import FIRST, TEMPLATE, WORDS, png, seeing_model
from server_fakes import FakeEngine, FakeModels, FakePool
from test_llm import write_byte_tokenizer

VISION = VisionSpec(
    TowerSpec(
        patch_size=4, merge=2, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8, out_size=8, activation="silu",
        norm="rms", eps=1e-6, projector="merger", projector_eps=1e-6,
    ),
    SizeRule("area", 8, min_pixels=16 * 16, max_pixels=64 * 64),
    ImageTokens("<|image_pad|>", "<|image_pad|>"), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), has_grid=True,
)  # fmt: skip
FACTS = Facts(512, FIRST + len(WORDS), 4, 16, 1, 1, 1, "float32", "cpu", 8, vision=VISION)
PAD = FIRST + WORDS.index("<|image_pad|>")

FILES = {"A": png(40, 17), "B": png(10, 60, seed=1), "C": png(24, 24, seed=2)}
"""By names that a prompt shows them as."""
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
SEEN = "<|vision_start|>[{}]<|vision_end|>"
ASSISTANT = "<|im_start|>assistant\n"
CALL = {"call_id": "c", "name": "look", "arguments": "{}"}
LOOKS = '{"name": "look", "arguments": {}}'
"""What is told of it, as the template here writes no calls."""


class Engine(FakeEngine):
    """Takes every prompt, and says little."""

    def __init__(self) -> None:
        super().__init__(EngineState.READY, FACTS)
        self.prompts: list[Sequence[int]] = []

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> EngineStream:
        self.prompts.append(prompt_ids)
        stream = EngineStream(lambda: None)
        stream.feed(Output(1, [Piece(0, "seen", [65], finish_reason="stop")], True, 0))
        return stream


class Server:
    """An application with everything behind it but an engine. `prompt`: what the last one was asked, images by their names."""

    def __init__(self, tokenizer: Tokenizer, settings: ServeSettings | None = None) -> None:
        self.engine, self.models = Engine(), FakeModels(tokenizer=tokenizer, template=TEMPLATE)
        self.tokenizer = tokenizer
        self.facts = FACTS
        generator, pool = Generator(FakePool()), FakePool()
        app = create_app(ServerContext(settings or ServeSettings(), self.models, generator, pool))
        self.state = app.state
        self.http = TestClient(app, base_url="http://127.0.0.1:8080", raise_server_exceptions=False)

    @property
    def facts(self) -> Facts:
        return self.models.served["fake"].facts

    @facts.setter
    def facts(self, facts: Facts) -> None:
        served = self.models.served["fake"]
        self.engine.facts = facts
        form = answer_format(TEMPLATE)
        self.models.served["fake"] = replace(served, engine=self.engine, facts=facts, format=form)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.http.post(path, json={"model": "fake", **body})
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def prompt(self) -> str:
        return shown(self.engine.prompts[-1], self.tokenizer)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the place of each image that is decoded. None is remembered at first."""
    places: list[str] = []

    def noting(data: bytes, vision: VisionSpec, where: str) -> Picture:
        places.append(where)
        return read_image(data, vision, where)

    monkeypatch.setattr(reading, "read_image", noting)
    monkeypatch.setattr(reading, "_recent", reading._Recent())
    return places


def shown(prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt's text, with [A] where image A is."""
    assert isinstance(prompt, TokenIds)
    names = {read_image(data, VISION, "it").images[0].digest: name for name, data in FILES.items()}
    text, start = "", 0
    for placed in prompt.images:
        assert set(prompt[placed.start : placed.end]) == {PAD}
        text += tokenizer.decode(prompt[start : placed.start], skip_special_tokens=False) + f"[{names[placed.image.digest]}]"
        start = placed.end
    return text + tokenizer.decode(prompt[start:], skip_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, tuple(WORDS))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def application(tokenizer: Tokenizer) -> Server:
    return Server(tokenizer)


@pytest.fixture
def server(application: Server) -> Server:
    application.facts = FACTS
    application.engine.prompts.clear()
    return application


def url(name: str) -> str:
    return data_url(FILES[name])


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat_image(address: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, **more}}


def chat_with(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def input_image(address: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": address, **more}


def input_with(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def block(name: str) -> dict[str, Any]:
    return block_of(base64.b64encode(FILES[name]).decode())


def block_of(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def url_block(address: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": address}}


def message_with(*blocks: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [{"role": "user", "content": list(blocks)}]}


# ---- what reaches the engine ----


def test_a_chat_shows_its_images_where_they_are(server: Server) -> None:
    messages = [
        {"role": "user", "content": [text("first "), chat_image(url("A"), detail="low"), text(" then "), chat_image(url("B"))]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "image_url", "image_url": url("A")}, text("again")]},
    ]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    first = f"first {SEEN.format('A')} then {SEEN.format('B')}"
    turns = [("user", first), ("assistant", "yes"), ("user", f"{SEEN.format('A')}again")]
    assert server.prompt == "".join(TURN.format(*turn) for turn in turns) + ASSISTANT
    assert answer["usage"]["prompt_tokens"] == len(server.engine.prompts[0])
    assert answer["choices"][0]["message"]["content"] == "seen"


def test_a_response_shows_images_of_users_and_of_functions(server: Server) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, input_image(url("A"), detail="high")]},
        {"type": "function_call", **CALL},
        {
            "type": "function_call_output", "call_id": "c",
            "output": [input_image(url("B")), {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"role": "user", "content": [input_image(url("C")), input_image(url("A"))]},
    ]  # fmt: skip
    server.post("/v1/responses", {"input": items})
    expected = [
        ("user", f"look{SEEN.format('A')}"), ("assistant", LOOKS), ("tool", f"{SEEN.format('B')}a\nb"),
        ("user", SEEN.format("C") + SEEN.format("A")),
    ]  # fmt: skip
    assert server.prompt == "".join(TURN.format(*turn) for turn in expected) + ASSISTANT
    counted = server.post("/v1/responses/input_tokens", {"input": items})
    assert counted["input_tokens"] == len(server.engine.prompts[0])


def test_a_kept_response_shows_its_images_again(server: Server) -> None:
    first = server.post("/v1/responses", input_with({"type": "input_text", "text": "look"}, input_image(url("A"))))
    items = server.get(f"/v1/responses/{first['id']}/input_items")["data"]
    part = {"type": "input_image", "image_url": None, "detail": "auto", "file_id": None}
    assert items[0]["content"] == [{"type": "input_text", "text": "look"}, part]
    for name in ("include", "include[]"):
        listed = server.get(f"/v1/responses/{first['id']}/input_items?{name}=message.input_image.image_url")
        assert listed["data"][0]["content"][1] == {**part, "image_url": url("A")}
    items.append({"role": "user", "content": [{"type": "input_text", "text": "and"}, input_image(url("B"))]})
    following = {"input": [{"type": "item_reference", "id": items[0]["id"]}, items[1]]}
    server.post("/v1/responses", following)
    both = TURN.format("user", f"look{SEEN.format('A')}") + TURN.format("user", f"and{SEEN.format('B')}")
    assert server.prompt == both + ASSISTANT
    server.post("/v1/responses", {"input": [items[1]], "previous_response_id": first["id"]})
    said = TURN.format("user", f"look{SEEN.format('A')}") + TURN.format("assistant", "seen")
    assert server.prompt == said + TURN.format("user", f"and{SEEN.format('B')}") + ASSISTANT


def test_a_message_shows_images_of_users_and_of_tools(server: Server) -> None:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [block("B"), text("dark")]}
    messages = [
        {"role": "user", "content": [text("a"), text("b"), block("A"), text("c")]},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [url_block(url("C")), result, text("now?")]},
    ]
    server.post("/v1/messages", {"max_tokens": 4, "messages": messages})
    expected = [
        ("user", f"a\nb{SEEN.format('A')}c\n\nd"), ("assistant", LOOKS), ("tool", f"Error: {SEEN.format('B')}dark"),
        ("user", f"{SEEN.format('C')}now?"),
    ]  # fmt: skip
    assert server.prompt == "".join(TURN.format(*turn) for turn in expected) + ASSISTANT
    counted = server.post("/v1/messages/count_tokens", {"messages": messages})
    assert counted["input_tokens"] == len(server.engine.prompts[0])


def test_a_message_of_ollamas_shows_its_images_ahead_of_its_text(server: Server) -> None:
    bare = base64.b64encode(FILES["B"]).decode()  # as its clients send it
    messages = [
        {"role": "user", "content": "look", "images": [url("A"), bare]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "see", "arguments": {}}}]},
        {"role": "tool", "tool_name": "see", "content": "dark", "images": [bare]},
    ]
    server.post("/api/chat", {"messages": messages, "stream": False})
    expected = [
        ("user", f"{SEEN.format('A')}{SEEN.format('B')}look"), ("assistant", LOOKS.replace("look", "see")),
        ("tool", f"{SEEN.format('B')}dark"),
    ]  # fmt: skip
    assert server.prompt == "".join(TURN.format(*turn) for turn in expected) + ASSISTANT
    server.post("/api/generate", {"prompt": "look", "images": [bare], "stream": False})
    assert server.prompt == TURN.format("user", f"{SEEN.format('B')}look") + ASSISTANT
    for path, body, place in (
        ("/api/chat", {"messages": [*messages, {"role": "user", "images": [bare, "bm9uZQ=="]}]}, "messages[3].images[1]"),
        ("/api/generate", {"prompt": "look", "images": ["https://example.com/a.png"]}, "images[0]"),
    ):
        assert server.post(path, body, status=400)["error"].startswith(f"{place} is ")


def test_the_tokenizer_and_the_template_show_images_too(server: Server) -> None:
    body = chat_with(text("what "), chat_image(url("A")), text("?"))
    server.post("/v1/chat/completions", body)
    assert server.post("/tokenize", body)["tokens"] == list(server.engine.prompts[0])
    rendered = server.post("/apply-template", body)["prompt"]
    assert rendered == TURN.format("user", "what <|vision_start|><|image_pad|><|vision_end|>?") + ASSISTANT
    counted = server.post("/v1/chat/completions/input_tokens", body)
    assert counted["input_tokens"] == len(server.engine.prompts[0])


def test_clients_are_told_whether_images_are_read(server: Server) -> None:
    assert server.get("/props")["modalities"] == {"vision": True, "audio": False, "video": False}
    assert server.state.max_body_bytes() == IMAGES_BODY
    server.facts = msgspec.structs.replace(FACTS, vision=None)
    assert server.get("/props")["modalities"] == {"vision": False, "audio": False, "video": False}
    assert server.state.max_body_bytes() == TEXTS_BODY
    server.engine.facts = None  # nobody knows yet
    assert server.state.max_body_bytes() == IMAGES_BODY


def test_a_bound_on_bodies_that_was_given_holds_for_images(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, ServeSettings(max_body_bytes=300))
    refused = server.post("/v1/chat/completions", chat_with(chat_image(url("A"))), status=413)
    assert refused["error"]["message"] == "the body has more than 300 bytes"


# ---- what is refused ----

BAD = base64.b64encode(FILES["A"][:400] + b"nonsense").decode()
IN_CHAT, IN_INPUT = "messages[0].content[1]", "input[0].content[1]"
REFUSED: list[tuple[str, str, str]] = [
    ("http://127.0.0.1/a.png", "none is opened here; send the image itself, as a data URL", "unsupported"),
    ("file:///etc/passwd", "none is opened here", "unsupported"),
    ("/etc/passwd", "is neither a data URL nor an image in base64", ""),
    ("data:image/png;base64,#", "is not valid base64", ""),
    ("data:image/png;base64,AAAA", "is no image of a kind that is read here", ""),
    ("data:text/plain;base64,AAAA", "but not of an image", ""),
    ("data:image/png;base64," + BAD, "is damaged", ""),
]


@pytest.mark.parametrize(("address", "words", "code"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_an_image_that_is_none_is_named_by_its_place(server: Server, address: str, words: str, code: str) -> None:
    requests = [
        ("/v1/chat/completions", chat_with(text("a"), chat_image(address)), IN_CHAT),
        ("/v1/responses", input_with({"type": "input_text", "text": "a"}, input_image(address)), IN_INPUT),
        ("/tokenize", chat_with(text("a"), chat_image(address)), IN_CHAT),
    ]
    for path, body, param in requests:
        error = server.post(path, body, status=400)["error"]
        assert (error["param"], error["code"] or "") == (param, code)
        assert error["message"].startswith(f"{param} ")
        assert words in error["message"]
        assert len(error["message"]) < 300
    error = server.post("/v1/messages", message_with(text("a"), url_block(address)), status=400)["error"]
    assert error["message"].startswith(f"{IN_CHAT} ")
    assert words in error["message"]
    assert not server.engine.prompts


def test_images_deep_in_a_request_are_named_by_their_place(server: Server) -> None:
    wrong = "data:image/png;base64,AAAA"
    call = {"type": "function_call", **CALL}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_image(url("A")), input_image(wrong)]}
    error = server.post("/v1/responses", {"input": [call, output]}, status=400)["error"]
    assert error["param"] == "input[1].output[1]"
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block("A"), block_of("AAAA")]}
    messages = [
        {"role": "user", "content": [block("A")]}, {"role": "assistant", "content": [use]},
        {"role": "user", "content": [block("B"), result]},
    ]  # fmt: skip
    error = server.post("/v1/messages", {"max_tokens": 4, "messages": messages}, status=400)["error"]
    assert error["message"].startswith("messages[2].content[1].content[1] ")


def test_a_model_of_texts_refuses_images_and_names_them(server: Server) -> None:
    first = server.post("/v1/responses", input_with(input_image(url("A"))))
    server.engine.prompts.clear()
    server.facts = msgspec.structs.replace(FACTS, vision=None)
    for path, body, param in (
        ("/v1/chat/completions", chat_with(text("a"), chat_image(url("A"))), IN_CHAT),
        ("/tokenize", chat_with(text("a"), chat_image(url("A"))), IN_CHAT),
        ("/v1/responses", input_with({"type": "input_text", "text": "a"}, input_image(url("A"))), IN_INPUT),
        ("/v1/responses", {"input": "and?", "previous_response_id": first["id"]}, "previous_response_id"),
    ):
        error = server.post(path, body, status=400)["error"]
        assert (error["param"], error["code"]) == (param, "unsupported")
        assert "reads no images" in error["message"]
    error = server.post("/v1/messages", message_with(text("a"), block("A")), status=400)["error"]
    assert error["message"].startswith(f"{IN_CHAT}: the model 'fake' reads no images")
    error = server.post("/apply-template", chat_with(chat_image(url("A"))), status=400)["error"]
    assert error["code"] == "unsupported"
    assert not server.engine.prompts


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "huge"}}, "messages[0].content[0].image_url.detail"),
        ({"type": "image_url"}, "messages"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, "messages"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "messages"),
    ],
)
def test_parts_of_another_form_are_refused(server: Server, part: dict[str, Any], param: str) -> None:
    error = server.post("/v1/chat/completions", chat_with(part), status=400)["error"]
    assert error["param"] == param
    assert "messages[0].content[0]" in error["message"]


def test_what_is_read_is_what_is_described(server: Server) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    described, plain = server.get("/openapi.json"), {"type": "image_url", "image_url": url("A")}
    for name, right, wrong in (
        ("ChatRequest", chat_with(chat_image(url("A"), detail="low")), chat_with(chat_image(url("A"), detail="huge"))),
        ("ChatRequest", chat_with(plain), chat_with({**plain, "image_url": 5})),
        ("ResponsesRequest", input_with(input_image(url("A"))), input_with(input_image(url("A"), file_id="f"))),
        ("MessagesRequest", message_with(block("A"), url_block(url("A"))), message_with({"type": "image", "source": {}})),
    ):
        schema = {"$ref": f"#/components/schemas/{name}", **described}
        fits = [jsonschema.Draft202012Validator(schema).is_valid({"model": "fake", **body}) for body in (right, wrong)]
        assert fits == [True, False]
        path = {"ChatRequest": "/v1/chat/completions", "ResponsesRequest": "/v1/responses"}.get(name, "/v1/messages")
        server.post(path, right)
        server.post(path, wrong, status=400)


# ---- bounds ----


def test_a_request_has_so_many_images_and_pixels(
    server: Server, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many are refused before one is looked at; too large ones together, before the next is."""
    monkeypatch.setattr(chat_prompt, "MAX_IMAGES", 3)
    error = server.post("/v1/chat/completions", chat_with(*[chat_image(url("C"))] * 4), status=400)["error"]
    assert (error["param"], read) == ("messages[0].content[3]", [])
    assert "3 images" in error["message"]
    monkeypatch.setattr(chat_prompt, "MAX_PIXELS", 2 * 24 * 24)  # C is shown as it is
    server.post("/v1/chat/completions", chat_with(*[chat_image(url("C"))] * 2))
    read.clear()
    error = server.post("/v1/responses", input_with(*[input_image(url("C"))] * 4), status=400)["error"]
    assert "3 images" in error["message"]
    others = [input_image(data_url(png(24, 24, seed))) for seed in (3, 4, 5)]
    error = server.post("/v1/responses", input_with(*others), status=400)["error"]
    assert "million pixels" in error["message"]
    assert (error["param"], len(read)) == ("input[0].content[2]", 3)


@pytest.mark.parametrize(("side", "most"), [(100, 64 * 64), (4, 4 * 4)])  # one is shown smaller, one larger than it is
def test_pixels_are_those_sent_or_those_shown(server: Server, monkeypatch: pytest.MonkeyPatch, side: int, most: int) -> None:
    monkeypatch.setattr(chat_prompt, "MAX_PIXELS", most)
    body = chat_with(chat_image(data_url(png(side, side))), chat_image(url("C")))
    error = server.post("/v1/chat/completions", body, status=400)["error"]
    assert error["param"] == "messages[0].content[0]"


def test_images_that_fill_the_context_are_no_further_read(server: Server, read: list[str]) -> None:
    server.facts = msgspec.structs.replace(FACTS, context_len=128)
    large = [chat_image(data_url(png(64, 64, seed))) for seed in range(5)]  # of 64 tokens
    error = server.post("/v1/chat/completions", chat_with(*large), status=400)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert len(read) == 2
    server.facts = msgspec.structs.replace(FACTS, context_len=256)
    server.post("/v1/chat/completions", chat_with(*large[:2]))


def test_images_of_earlier_turns_are_not_decoded_again(
    server: Server, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pixels count all the same: as many as were sent."""
    large = chat_image(data_url(png(100, 100)))
    messages = chat_with(large, chat_image(url("A")))["messages"]
    server.post("/v1/chat/completions", {"messages": messages})
    messages += [{"role": "assistant", "content": "seen"}, *chat_with(chat_image(url("A")), chat_image(url("B")))["messages"]]
    server.post("/v1/chat/completions", {"messages": messages})
    assert read == ["messages[0].content[0]", "messages[0].content[1]", "messages[2].content[1]"]
    prompt = server.engine.prompts[-1]
    assert isinstance(prompt, TokenIds)
    shown_now = [placed.image for placed in prompt.images]
    assert shown_now == [read_image(data, VISION, "it").images[0] for data in (png(100, 100), FILES["A"], FILES["A"], FILES["B"])]
    monkeypatch.setattr(chat_prompt, "MAX_PIXELS", 100 * 100 - 1)
    error = server.post("/v1/chat/completions", chat_with(large), status=400)["error"]
    assert "million pixels" in error["message"]
    assert len(read) == 3


def test_images_of_others_are_decoded_again(server: Server, read: list[str]) -> None:
    """How long an answer takes would else tell one API key what another one has sent; so it is with a salt."""
    server = Server(server.tokenizer, ServeSettings(api_keys=("key-of-one", "key-of-two")))

    def num_read(name: str, key: str, path: str, **more: str) -> int:
        read.clear()
        server.http.headers["authorization"] = f"Bearer {key}"
        server.post(path, {**chat_with(chat_image(url(name))), **more})
        return len(read)

    chat = "/v1/chat/completions"
    for name, path in (("A", chat), ("B", f"{chat}/input_tokens"), ("C", "/tokenize")):
        assert [num_read(name, key, path) for key in ("key-of-one", "key-of-two", "key-of-one")] == [1, 1, 0], path
        assert num_read(name, "key-of-two", chat) == 0  # its own, by whatever path
    assert [num_read("A", "key-of-one", chat, cache_salt=salt) for salt in ("a", "b", "a")] == [1, 1, 0]


def test_texts_do_not_wait_for_images(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, begun = threading.Event(), threading.Semaphore(0)

    def slow(data: bytes, vision: VisionSpec, where: str) -> Picture:
        begun.release()
        assert let_go.wait(20)
        return read_image(data, vision, where)

    monkeypatch.setattr(reading, "read_image", slow)
    monkeypatch.setattr(reading, "_recent", reading._Recent())
    with server.http, ThreadPoolExecutor(8) as pool:  # one event loop for all of them
        try:
            waiting = [
                pool.submit(server.post, "/v1/chat/completions", chat_with(chat_image(url("A")))) for _ in range(4)
            ]
            assert begun.acquire(timeout=20)
            assert pool.submit(server.post, "/v1/chat/completions", chat_with(text("a"))).result(20)
            assert not any(one.done() for one in waiting)
        finally:
            let_go.set()
        assert all(one.result(20) for one in waiting)


def test_no_image_gets_into_a_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.post("/v1/chat/completions", chat_with(chat_image(url("A"))))
    server.post("/v1/responses", input_with(input_image(url("A")), input_image("data:image/png;base64," + BAD)), status=400)
    server.post("/v1/messages", message_with(block("A"), {"type": "document"}), status=400)
    told = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "/v1/chat/completions" in told
    assert "base64" not in told
    assert BAD[:40] not in told


# ---- a real one ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "seeing") as server:
        yield server


def test_clients_get_what_the_model_says_of_an_image(folder: Path, live: LiveServer) -> None:
    openai = pytest.importorskip("openai")
    from nanovllm_cli import LLM

    def asked(name: str) -> Any:
        return [{"role": "user", "content": [text("what is "), chat_image(url(name)), text("?")]}]

    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(folder) as llm:
        outputs = llm.chat([asked("A"), asked("B")], greedy)
    expected = {name: output.outputs[0].text for name, output in zip("AB", outputs, strict=True)}
    assert expected["A"] != expected["B"]
    settings: Any = {"api_key": "none", "max_retries": 0, "timeout": 60}
    more: Any = {"model": "seeing", "temperature": 0}
    with openai.OpenAI(base_url=live.base_url, **settings) as client:
        for name, answer in expected.items():
            said = client.chat.completions.create(messages=asked(name), max_tokens=8, **more)
            assert said.choices[0].message.content == answer
            parts: Any = [{"type": "input_text", "text": "what is "}, input_image(url(name)), {"type": "input_text", "text": "?"}]
            response = client.responses.create(input=[{"role": "user", "content": parts}], max_output_tokens=8, **more)
            assert response.output_text == answer
        items = client.responses.input_items.list(response.id, include=["message.input_image.image_url"])
        assert items.data[0].content[1].image_url == url("B")
        with pytest.raises(openai.BadRequestError, match="none is opened here"):
            client.chat.completions.create(messages=chat_with(chat_image("https://example.com/a.png"))["messages"], **more)
        (model,) = client.models.list().data
        assert model.architecture == {"input_modalities": ["text", "image", "video"]}
    message = message_with(text("what is "), block("A"), text("?")) | {"model": "seeing", "max_tokens": 8, "temperature": 0}
    status, told = live.post("/v1/messages", message)
    assert (status, told["content"]) == (200, [text(expected["A"])])
