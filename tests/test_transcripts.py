"""Transcripts: what models are asked by, what becomes of their answers, forms, and the route; at the end a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from hearing import FIRST, TEMPLATE, WORDS, hearing_model
from live_server import LiveServer, live_server
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.cli.model import Prompting
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec, Transcript
from nanovllm_cli.models import ears
from nanovllm_cli.server import routes_audio, routes_chat
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.engine_stream import EngineStream
from nanovllm_cli.server.exchange import Exchange
from nanovllm_cli.server.forms import MAX_PARTS, parse_form
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.server.schemas_audio import TranscriptionRequest
from nanovllm_cli.server.schemas_openai import ChatRequest
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.sounds.source import SOUND as MEDIUM
from nanovllm_cli.text.answer_format import answer_format, model_format
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.reasoning import ASR, split
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.transcripts import LANGUAGES, asks, language_of
from nanovllm_cli.vision_spec import ImageTokens, TokenIds
from server_fakes import FakeEngine, FakeModels, FakePool
from sounding import noise
from sounding import wav as saved
from test_llm import write_byte_tokenizer
from test_sounds import QWEN3

SOUND = saved(noise(16_000))
PART = {"type": "audio_url", "audio_url": {"url": "data:"}}
MARKS = ("<asr_text>", "[TRANSCRIBE]")
PATH = "/v1/audio/transcriptions"
FORM = "multipart/form-data; boundary=xx"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, (*WORDS, *MARKS))
    return Tokenizer.from_folder(folder)


# ---- what is asked ----


def test_languages_are_those_that_transformers_knows() -> None:
    from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

    assert dict(LANGUAGES) == LANGUAGE_CODE_TO_NAME


@pytest.mark.parametrize(
    ("said", "code"),
    [("en", "en"), ("EN", "en"), ("English", "en"), ("en-US", "en"), ("zh_CN", "zh"), (" cantonese ", "yue"), ("fil", "fil")],
)
def test_languages_by_any_of_their_names(said: str, code: str) -> None:
    assert language_of(said) == code


@pytest.mark.parametrize("said", ["xx", "engl", "language English<asr_text>", "en]", "{name}", "\n", "e" * 5000])
def test_other_words_are_no_languages(said: str) -> None:
    with pytest.raises(UsageError, match="no model here knows the language") as caught:
        language_of(said)
    assert len(caught.value.message) < 100


def test_families_are_asked_as_they_were_trained(tokenizer: Tokenizer) -> None:
    def begun(known: Transcript, *more: str | None) -> tuple[list[dict[str, Any]], str]:
        messages, begins = asks(known, tokenizer, PART, *more)
        return messages, tokenizer.decode(begins, skip_special_tokens=False)

    user = {"role": "user", "content": [PART]}
    for nothing in (None, "", "auto"):
        assert begun(ears._QWEN3_TRANSCRIPT, nothing) == ([user], "")
    assert begun(ears._QWEN3_TRANSCRIPT, "de") == ([user], "language German<asr_text>")
    subject = {"role": "system", "content": "Names: Ada"}
    assert begun(ears._QWEN3_TRANSCRIPT, "ja", "Names: Ada") == ([subject, user], "language Japanese<asr_text>")
    assert begun(ears._VOXTRAL_TRANSCRIPT) == ([user], "[TRANSCRIBE]")
    assert begun(ears._VOXTRAL_TRANSCRIPT, "English") == ([user], "lang:en[TRANSCRIBE]")
    (message,), begins = begun(ears._QWEN2_TRANSCRIPT, "fr")
    assert (message["content"][0], begins) == (PART, "")
    assert "French" in message["content"][1]["text"]
    (message,), _ = begun(ears._QWEN2_TRANSCRIPT, None, "Sum it up.")
    assert message["content"][1:] == [{"type": "text", "text": "Sum it up."}]
    with pytest.raises(UnsupportedError, match="takes no prompt"):
        begun(ears._VOXTRAL_TRANSCRIPT, None, "Names: Ada")


def test_marks_are_tokens_or_there_is_no_transcript(tokenizer: Tokenizer, tmp_path: Path) -> None:
    marks = FIRST + len(WORDS), FIRST + len(WORDS) + 1
    assert asks(ears._QWEN3_TRANSCRIPT, tokenizer, PART, "en").begins == [*b"language English", marks[0]]
    assert asks(ears._VOXTRAL_TRANSCRIPT, tokenizer, PART).begins == [marks[1]]
    write_byte_tokenizer(tmp_path, tuple(WORDS))
    without = Tokenizer.from_folder(tmp_path)
    assert asks(ears._QWEN3_TRANSCRIPT, without, PART).begins == []
    for known in (ears._QWEN3_TRANSCRIPT, ears._VOXTRAL_TRANSCRIPT):
        with pytest.raises(UnsupportedError, match="vocabulary has no"):
            asks(known, without, PART, "en")


# ---- what is answered ----


@pytest.mark.parametrize(
    ("answer", "prompt", "language", "text"),
    [
        ("language English<asr_text>Hello there.", "assistant\n", "English", "Hello there."),
        ("language Chinese<asr_text>\u4f60\u597d", "assistant\n", "Chinese", "\u4f60\u597d"),
        ("language None<asr_text>", "assistant\n", "None", ""),
        ("Hello there.", "assistant\n", "", "Hello there."),
        ("Hello there.", "language English<asr_text>", "", "Hello there."),
        ("language arts are taught here", "language English<asr_text>", "", "language arts are taught here"),
        ("languages", "assistant\n", "", "languages"),
        ("", "assistant\n", "", ""),
    ],
)
def test_a_language_is_parted_from_the_text(answer: str, prompt: str, language: str, text: str) -> None:
    assert split(answer, ASR, prompt) == (language, text)
    parser = ASR.parser(prompt)
    pieces = [*(parser.push(letter) for letter in answer), parser.finish()]
    assert ("".join(each.reasoning for each in pieces), "".join(each.content for each in pieces)) == (language, text)


def test_qwen3_asr_is_known_by_its_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate(TEMPLATE)
    known = model_format(tokenizer, template)
    assert known is not None
    assert known.reasoning == ASR
    assert known.visible_ids(calls=False) == [FIRST + len(WORDS)]
    assert model_format(tokenizer, template, reasoning="none").reasoning is None  # type: ignore[union-attr]
    write_byte_tokenizer(tmp_path, tuple(WORDS))
    assert model_format(Tokenizer.from_folder(tmp_path), template).reasoning is None  # type: ignore[union-attr]
    assert answer_format("Say it in the language of the user.").reasoning is None
    assert (known.thinks, answer_format("<think>").thinks, answer_format("").thinks) == (False, True, False)


def test_the_command_line_knows_it_too(live: LiveServer, folder: Path) -> None:
    openai = pytest.importorskip("openai")  # two seconds of imports
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=16)) as llm:
        prompting = Prompting(llm)
        assert prompting.reasoning() == ASR
        make = prompting.parser_for(prompting.encode([{"role": "user", "content": "x"}]))
        assert make is not None
        assert make().push("language English<asr_text>Hello").content == "Hello"
    with pytest.raises(openai.BadRequestError, match="does not reason aloud"):
        openai.OpenAI(base_url=live.base_url, api_key="none").chat.completions.create(
            model="hearing", messages=[{"role": "user", "content": "x"}], extra_body={"enable_thinking": True}
        )


# ---- forms ----


def form(*parts: tuple[str, bytes] | tuple[str, bytes, str], boundary: str = "xx") -> bytes:
    out = b""
    for name, data, *file in parts:
        said = f'; filename="{file[0]}"' if file else ""
        out += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{said}\r\n\r\n'.encode() + data + b"\r\n"
    return out + f"--{boundary}--\r\n".encode()


def test_a_form_is_its_parts() -> None:
    binary = bytes(range(256)) * 9 + b"\r\n--x\r\n--\r\n-"
    body = form(("file", binary, "a.wav"), ("language", "d\u00e9".encode()), ("empty", b""), ("a[]", b"1"), ("a[]", b"2"))
    told = {"language": "d\u00e9", "empty": "", "a": ["1", "2"]}
    assert parse_form(body, b"xx") == {"file": binary, "file.name": "a.wav", **told}
    both = form(("a[]", b"1", "x"), ("a[]", b"2", "y"), ("b", b"3", "\u00e4" * 2000))
    named = {"a": [b"1", b"2"], "b": b"3", "b.name": "\ufffd" * 1024}
    assert parse_form(both.replace("\u00e4".encode(), b"\xe4"), b"xx") == named


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "ends in the middle"),
        (form(("a", b"1"))[:-8], "ends in the middle"),
        (form(("a", b"1"), ("b", b"2"))[:-2].replace(b"--xx--", b""), "ends in the middle"),
        (b"a=1&b=2", "parts are not as"),
        (form(("a", b"1"), boundary="yy"), "parts are not as"),
        (form(("a", b"1")).replace(b'; name="a"', b""), "parts are not as"),
        (form(("a", b"1")).replace(b"form-data", b"f\r\n" * 9), "parts are not as"),
        (form(("a", b"1"), ("a", b"2")), "'a' twice"),
        (form(("a", b"1"), ("a[]", b"2")), "'a' twice"),
        (form(("a", b"1", "a.wav"), ("a[]", b"2")), "'a' twice"),
        (form(("a[]", b"1"), ("a", b"2")), "'a' twice"),
        (form(("a", b"\xff")), "'a' is not UTF-8"),
        (form(*[("a[]", b"1")] * (MAX_PARTS + 1)), f"more than {MAX_PARTS} parts"),
        (b"--xx\r\n" + b"a: b\r\n" * 100 + b"\r\n1\r\n--xx--\r\n", "parts are not as"),
        (b"--xx\r\nContent-Disposition: " + b"a" * 100_000 + b"\r\n\r\n1\r\n--xx--\r\n", "parts are not as"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        parse_form(body, b"xx")
    assert (caught.value.status, caught.value.code) == (400, "invalid_form")


def test_a_form_leaves_nothing_behind() -> None:
    """Collections come seldom in a server, so that no circle may hold a file."""
    data = bytes(1 << 20)
    bodies = [form(("file", data, "a.wav")), form(("file", data, "a.wav"))[:-8], form(("a", b"1"), ("a", data))]
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(3):
            for body in bodies:
                with contextlib.suppress(ApiError):
                    parse_form(body, b"xx")
        assert tracemalloc.get_traced_memory()[0] < len(data)
    finally:
        tracemalloc.stop()
        gc.enable()


# ---- the route ----


class Engine(FakeEngine):
    """Says what a test wrote down."""

    def __init__(self, facts: Any) -> None:
        super().__init__(EngineState.READY, facts)
        self.says, self.finish = ["language English<asr_", "text>Hello", " there."], "stop"
        self.prompts: list[tuple[Sequence[int], SamplingParams]] = []

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> EngineStream:
        self.prompts.append((prompt_ids, params))
        stream = EngineStream(lambda: None)
        for i, text in enumerate(self.says):
            last = i == len(self.says) - 1
            stream.feed(Output(1, [Piece(0, text, [65], finish_reason=self.finish if last else None)], last, 0))  # type: ignore[arg-type]
        return stream


class Server:
    def __init__(self, tokenizer: Tokenizer, hearing: HearingSpec | None, settings: ServeSettings | None = None) -> None:
        self.models = FakeModels(tokenizer=tokenizer, template=TEMPLATE, format=model_format(tokenizer, ChatTemplate(TEMPLATE)))
        model = self.models.served["fake"]
        facts = msgspec.structs.replace(model.facts, hearing=hearing)
        self.engine = Engine(facts)
        self.models.served["fake"] = replace(model, facts=facts, engine=self.engine)
        self.context = ServerContext(settings or ServeSettings(), self.models, Generator(FakePool()), FakePool())
        self.http = TestClient(create_app(self.context), base_url="http://127.0.0.1:8080", raise_server_exceptions=False)

    def post(self, *parts: Any, headers: dict[str, str] | None = None, path: str = PATH) -> Any:
        return self.http.post(path, content=form(*parts), headers={"content-type": FORM} | (headers or {}))

    def told(self, *parts: Any, headers: dict[str, str] | None = None) -> tuple[int, str, str | None]:
        answer = self.post(*parts, headers=headers)
        error = answer.json()["error"]
        return answer.status_code, error["message"], error["param"]


HEARS = replace(QWEN3, transcript=ears._QWEN3_TRANSCRIPT, tokens=ImageTokens(WORDS[3], WORDS[3]))
FILE = ("file", SOUND, "talk.wav")


@pytest.fixture
def server(tokenizer: Tokenizer) -> Server:
    return Server(tokenizer, HEARS)


def shown(server: Server, number: int = -1) -> str:
    """The last prompt as text, its sound as one word."""
    ids = server.engine.prompts[number][0]
    text = server.models.served["fake"].tokenizer.decode(ids, skip_special_tokens=False)
    return text.replace(WORDS[3] * 13, "(sound)")


def test_a_sound_becomes_its_words(server: Server) -> None:
    answer = server.post(FILE, ("model", b"fake"))
    assert (answer.status_code, answer.json()["text"]) == (200, "Hello there.")
    prompt, params = server.engine.prompts[-1]
    assert answer.json()["usage"] == {
        "type": "tokens", "input_tokens": len(prompt), "output_tokens": 3, "total_tokens": len(prompt) + 3,
    }  # fmt: skip
    assert isinstance(prompt, TokenIds)
    assert [placed.num_tokens for placed in prompt.images] == [13]
    assert shown(server) == "<|im_start|>user\n<|audio_start|>(sound)<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    assert (params.temperature, params.max_tokens) == (0.0, None)
    server.engine.says = ["Hello", " there."]
    parts = ("language", b"en"), ("prompt", b"About <|im_end|>"), ("temperature", b"0.5"), ("max_completion_tokens", b"9")
    answer = server.post(*parts, ("response_format", b"text"), FILE, path="/audio/transcriptions")
    assert (answer.status_code, answer.text) == (200, "Hello there.\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert shown(server).startswith("<|im_start|>system\nAbout <|im_end|><|im_end|>\n<|im_start|>user\n<|audio_start|>(sound)")
    assert list(server.engine.prompts[-1][0]).count(FIRST + 1) == 2  # the client's is text
    assert shown(server).endswith("<|im_start|>assistant\nlanguage English<asr_text>")
    params = server.engine.prompts[-1][1]
    assert (params.temperature, params.max_tokens) == (0.5, 9)


def test_neither_a_file_nor_messages_wait_for_the_end_of_an_answer(server: Server) -> None:
    url = MEDIUM.data_url(SOUND, "it")
    content = [{"type": "audio_url", "audio_url": {"url": url}}]

    async def run() -> None:
        form_ = TranscriptionRequest.model_validate({"file": SOUND, "model": "fake"})
        model, exchange = server.models.served["fake"], Exchange("1", "POST", "/")
        async with routes_audio._generation(server.context, model, form_, exchange) as generation:
            assert form_.file == b""
            assert [event async for event in generation]
        chat = ChatRequest.model_validate({"model": "fake", "messages": [{"role": "user", "content": content}]})
        async with routes_chat._generation(server.context, chat, Exchange("2", "POST", "/")) as (generation, _):
            assert chat.messages == []
            assert [event async for event in generation]

    asyncio.run(run())


def test_a_transcript_streams(server: Server) -> None:
    answer = server.post(FILE, ("stream", b"true"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    *deltas, last = map(json.loads, events)
    assert "".join(each["delta"] for each in deltas) == "Hello there."
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert (last["type"], last["text"], last["usage"]["output_tokens"]) == ("transcript.text.done", "Hello there.", 3)


def test_what_cannot_be_transcribed_is_told(server: Server, tokenizer: Tokenizer) -> None:
    for parts, told, param in (
        ((), "must be there", "file"),
        ((("file", b"", "a.wav"),), "is empty", "file"),
        ((("file", b"text", "a.wav"),), "no sound of a kind", "file"),
        ((("file", SOUND[:60], "a.wav"),), "shorter than 0.1 seconds", "file"),
        ((FILE, ("model", b"another")), "model 'another' not found", "model"),
        ((FILE, ("language", b"klingon")), "the language 'klingon'; known are ar, cs", "language"),
        ((FILE, ("temperature", b"hot")), "number", "temperature"),
        ((FILE, ("temperature", b"9e9")), "at most 100", "temperature"),
        ((FILE, ("stream", b"perhaps")), "true or false", "stream"),
        ((FILE, ("response_format", b"srt")), "has times", "response_format"),
        ((FILE, ("response_format", b"verbose_json")), "has times", "response_format"),
        ((FILE, ("response_format", b"diarized_json")), "has speakers", "response_format"),
        ((FILE, ("response_format", b"yaml")), "'json', 'text'", "response_format"),
        ((FILE, ("timestamp_granularities[]", b"word")), "verbose_json", "timestamp_granularities"),
        ((FILE, ("timestamp_granularities[]", b"segment")), "verbose_json", "timestamp_granularities"),
        ((FILE, ("languages[]", b"en"), ("languages[]", b"de")), "not supported", "languages"),
        ((FILE, ("keywords[]", b"Ljubljana")), "keywords is not supported", "keywords"),
        ((FILE, ("include[]", b"logprobs")), "not supported", "include"),
        ((FILE, ("language", b"en"), ("language", b"de")), "'language' twice", None),
    ):  # fmt: skip
        status, message, found = server.told(*parts)
        assert (status, told in message, found) == (404 if param == "model" else 400, True, param), (parts, message)
    assert server.engine.prompts == []
    server.engine.finish = "length"
    assert "longer than this server's limits" in server.told(FILE)[1]
    assert server.post(FILE, ("max_completion_tokens", b"3")).json()["text"] == "Hello there."
    assert "context_length_exceeded" in server.post(FILE, ("stream", b"true")).text
    assert Server(tokenizer, None).told(FILE) == (400, "the model 'fake' hears nothing", "model")
    answer = server.post(FILE, path="/v1/audio/translations")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "no Whisper" in answer.json()["error"]["message"]


def test_only_forms_and_only_from_here(server: Server, tokenizer: Tokenizer) -> None:
    for kind in ("application/json", "application/x-www-form-urlencoded", "text/plain", ""):
        status, message, _ = server.told(FILE, headers={"content-type": kind})
        assert (status, "must be a form" in message) == (415, True)
    assert server.told(FILE, headers={"content-type": "multipart/form-data"})[0] == 400
    assert server.told(FILE, headers={"content-type": "multipart/form-data; boundary=" + "x" * 999})[0] == 400
    page, other = {"origin": "https://site.example"}, {"origin": "https://other.example"}
    allowing = Server(tokenizer, HEARS, ServeSettings(cors_origins=("https://site.example",)))
    for headers, status in (
        (page, 403), (page | {"sec-fetch-site": "cross-site"}, 403), ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403), ({"sec-fetch-site": "same-origin"}, 200), ({"sec-fetch-mode": "cors"}, 200),
    ):  # fmt: skip
        assert server.post(FILE, headers=headers).status_code == status, headers
    assert [allowing.post(FILE, headers=headers).status_code for headers in (page, other)] == [200, 403]


def test_it_is_described(server: Server) -> None:
    described = server.http.get("/openapi.json").json()
    operation = described["paths"][PATH]["post"]
    (kind,) = operation["requestBody"]["content"]
    assert kind == "multipart/form-data"
    name = operation["requestBody"]["content"][kind]["schema"]["$ref"].rpartition("/")[2]
    assert described["components"]["schemas"][name]["properties"]["file"]["format"] == "binary"


# ---- a real server ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing_model(tmp_path_factory.mktemp("model") / "hearing", words=(*WORDS, MARKS[0]))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "hearing") as server:
        yield server


def test_openais_client_gets_what_the_model_writes(live: LiveServer, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        prompt = llm.encode_chat([{"role": "user", "content": [{"type": "audio", "audio": MEDIUM.data_url(SOUND)}]}])
        begins = [*b"language English", FIRST + len(WORDS)]
        (output,) = llm.generate(prompt + begins, SamplingParams(temperature=0.0, max_tokens=12))
    client = openai.OpenAI(base_url=live.base_url, api_key="none")
    asked: dict[str, Any] = {"model": "hearing", "file": ("talk.wav", SOUND), "language": "en"}
    more = {"max_completion_tokens": 12}
    done = client.audio.transcriptions.create(**asked, extra_body=more)
    assert done.text == output.outputs[0].text
    assert done.usage.input_tokens == len(prompt) + len(begins)  # type: ignore[union-attr]
    assert client.audio.transcriptions.create(**asked, extra_body=more, response_format="text") == done.text + "\n"
    events = list(client.audio.transcriptions.create(**asked, extra_body=more, stream=True))
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == done.text
    assert events[-1].type == "transcript.text.done"
    with pytest.raises(openai.BadRequestError, match="has times"):
        client.audio.transcriptions.create(**asked, response_format="srt")
