"""Sounds from the library, the command line, conversations and a server, by a tiny model that hears."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hearing import hearing_model
from live_server import LiveServer, live_server
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.chat.conversation import Conversation
from nanovllm_cli.chat.export import as_json, as_markdown
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.loop import Chat
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.session import Sessions
from nanovllm_cli.cli.model import Loaded
from nanovllm_cli.cli.question import said
from nanovllm_cli.errors import NanovllmError, SessionError, UnsupportedError, UsageError
from nanovllm_cli.server.messages import Facts, Generate
from nanovllm_cli.sounds.source import SOUND
from seeing import png
from sounding import noise, sound_part
from sounding import wav as saved
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_chat_prompt import Screen

RATE = 16_000
SOUNDS = [saved(noise(RATE, seed)) for seed in range(2)] + [saved(noise(50_000), 44_100)]
URLS = [SOUND.data_url(each) for each in SOUNDS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ARGS = ("-t", "2", "-n", "8", "--temp", "0", "-q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing_model(tmp_path_factory.mktemp("model") / "hearing")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, config=EngineConfig(max_num_seqs=2, threads=2, num_blocks=256)) as model:
        yield model


def asked(*sounds: bytes, text: str = "What?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(sound_part, sounds), {"type": "text", "text": text}]}]


def text_of(llm: LLM, messages: Any) -> str:
    return llm.chat(messages, GREEDY)[0].outputs[0].text


def test_a_file_is_what_transformers_makes_of_it(folder: Path, llm: LLM) -> None:
    """From a WAV file to tokens: its feature extractor, template and model."""
    import transformers

    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=9, min_length=800)
    samples = np.round(noise(RATE * 3 + 77, 5) * (2**15 - 1)).astype(np.float32) / 2**15
    prompt = llm.encode_chat(asked(saved(noise(RATE * 3 + 77, 5))))
    given = extractor(samples, sampling_rate=RATE, padding=True, return_attention_mask=True)
    text = llm.tokenizer.decode([each for each in prompt if each != 259], skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n<|audio_start|><|audio_end|>What?<|im_end|>")
    assert [placed.num_tokens for placed in prompt.images] == [26, 13]
    assert list(prompt).count(259) == 39
    assert prompt.images[0].start == list(prompt).index(259)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    (output,) = llm.generate(prompt, GREEDY)
    whole = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
    with torch.inference_mode():
        logits = model(
            input_ids=whole, attention_mask=torch.ones_like(whole), input_features=torch.as_tensor(given["input_features"]),
            input_features_mask=torch.as_tensor(given["attention_mask"]),
        ).logits[0, len(prompt) - 1 : -1]  # fmt: skip
    assert logits.argmax(-1).tolist() == list(output.outputs[0].token_ids)


def test_parts_of_several_forms_are_one_sound(llm: LLM) -> None:
    prompts = [
        llm.encode_chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}])
        for part in (
            sound_part(SOUNDS[0]), {"type": "audio_url", "audio_url": {"url": URLS[0]}}, {"type": "audio", "audio": URLS[0]},
            {"type": "input_audio", "input_audio": {"data": URLS[0]}},
        )
    ]  # fmt: skip
    assert all(list(each) == list(prompts[0]) and each.images == prompts[0].images for each in prompts)
    assert [each.image.heard for each in llm.encode_chat(asked(SOUNDS[2])).images] == [113]  # type: ignore[union-attr]
    assert text_of(llm, asked(SOUNDS[0])) != text_of(llm, asked(SOUNDS[1]))


REFUSED: list[tuple[dict[str, Any], type[NanovllmError], str]] = [
    ({"type": "input_audio"}, UsageError, "has no sound"),
    ({"type": "input_audio", "input_audio": {"data": 5}}, UsageError, "has no sound"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, UsageError, "is empty"),
    ({"type": "input_audio", "input_audio": {"data": "????"}}, UsageError, "nor a sound in base64"),
    ({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}, UnsupportedError, "none is opened here"),
    ({"type": "audio", "audio": "file:///etc/passwd"}, UnsupportedError, "none is opened here"),
    ({"type": "audio", "path": "/etc/passwd"}, UsageError, "has no sound"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, UnsupportedError, "reads no images"),
    ({"type": "video_url", "video_url": {"url": URLS[0]}}, UnsupportedError, "reads no videos"),
    (sound_part(png()), UsageError, "nor a sound in base64 of a kind"),
    ({"type": "audio", "audio": "data:audio/wav;base64,AAAA"}, UsageError, "no sound of a kind"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_parts_that_are_no_sounds_are_refused(llm: LLM, number: int) -> None:
    part, kind, told = REFUSED[number]
    with pytest.raises(kind, match=told) as caught:
        llm.encode_chat([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert "messages[0].content[1]" in caught.value.message


def test_a_text_that_looks_like_a_sound_is_a_text(llm: LLM) -> None:
    prompt = llm.encode_chat(asked(SOUNDS[0], text="<|audio_pad|>"))
    assert len(prompt.images) == 1
    assert list(prompt).count(259) == prompt.images[0].num_tokens


def test_a_model_that_hears_nothing_says_so() -> None:
    with LLM("tiny", config=EngineConfig(threads=2, num_blocks=16)) as tiny:
        assert tiny.hearing is None
        with pytest.raises(UnsupportedError, match="this model hears no audio"):
            tiny.encode_chat(asked(SOUNDS[0]))


def test_sounds_and_what_they_are_heard_by_cross_to_other_processes(llm: LLM) -> None:
    prompt = llm.encode_chat(asked(*SOUNDS[:2]))
    message = Generate(5, list(prompt), GREEDY, 0, None, list(prompt.images))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Generate)
    assert tuple(again.images) == prompt.images
    facts = Facts(512, 300, 3, 16, 1, 1, 1, "float32", "cpu", 8, hearing=llm.hearing)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=Facts) == facts
    assert facts.senses == llm.senses


# ---- the command line ----


@pytest.fixture
def run(doors: Doors, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, data in zip("ab", SOUNDS, strict=False):
        (tmp_path / f"{name}.wav").write_bytes(data)

    def command(*words: str, stdin: bytes = b"", model: str = str(folder)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code, out, err = doors.command("run", model, *words, *ARGS)
        return code, out.removesuffix("\n"), err

    return command


def test_run_hears_files_and_standard_input(run: Any, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.chat(asked(*SOUNDS[:2]), params)[0].outputs[0].text.removesuffix("\n")
    assert run("--audio", "a.wav", "--audio", "b.wav", "What?")[:2] == (0, expected)
    one = run("--audio", "b.wav", "What?")
    assert one[:2] == run("--audio", "-", "What?", stdin=SOUNDS[1])[:2]
    assert one[1] != expected
    code, out, _ = run("--continue", "And?")
    turns = [*asked(SOUNDS[1]), {"role": "assistant", "content": one[1]}, {"role": "user", "content": "And?"}]
    assert (code, out) == (0, llm.chat(turns, params)[0].outputs[0].text.removesuffix("\n"))


def test_run_tells_what_it_cannot_hear(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (
        asked(SOUNDS[0]), [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "http://here/a"}}]}],
    )))  # fmt: skip
    for words, told in (
        (("--audio", "a.txt"), "a.txt is no sound of a kind"), (("--audio", "none.wav"), "there is no file none.wav"),
        (("--audio", "-"), "standard input is empty"), (("--audio", "-", "-f", "-"), "--audio - is it"),
        (("--image", "-", "--audio", "-"), "--image - is it"), (("--raw", "--audio", "a.wav"), "--audio has no meaning without"),
        (("--batch", "lines.jsonl", "--audio", "a.wav"), "--batch has its prompts in its file"),
    ):  # fmt: skip
        code, out, err = run(*words, *(() if "--batch" in words else ("What?",)))
        assert (code, out) == (2, ""), words
        assert told in err
    (tmp_path / "a.png").write_bytes(png())
    code, _, err = run("--image", "a.png", "What?")
    assert (code, "reads no images" in err) == (6, True)
    code, _, err = run("--audio", "a.wav", "What?", model="tiny")
    assert (code, "this model hears no audio" in err) == (6, True)
    code, out, _ = run("--batch", "lines.jsonl")
    heard, refused = map(json.loads, out.splitlines())
    assert code == 1
    assert heard["answers"][0]["text"] == run("--audio", "a.wav", "What?")[1]
    assert "none is opened here" in json.dumps(refused)


# ---- conversations ----


@pytest.fixture
def chat(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    monkeypatch.chdir(tmp_path)
    for number, data in enumerate(SOUNDS):
        (tmp_path / f"{number}.wav").write_bytes(data)
    (tmp_path / "a.png").write_bytes(png())
    model = LocalModel(lambda name: lambda: Loaded(llm, 0.0), Settings({"max_tokens": 8, "temperature": 0.0}))
    chat = Chat(model, Sessions(tmp_path / "sessions"), Screen(), interactive=True, edits=True)
    chat.model.open("it")
    return chat


def told(chat: Chat, *lines: str) -> list[str]:
    display = chat.display
    assert isinstance(display, Screen)
    before = len(display.said)
    for line in lines:
        try:
            chat.handle(line)
        except NanovllmError as error:
            display.said.append(f"failed: {error.message} ({error.hint})")
    return display.said[before:]


def test_a_conversation_hears(chat: Chat, llm: LLM) -> None:
    assert "0.wav (13 tokens) goes with the next message" in told(chat, "/audio 0.wav")
    told(chat, "What?")
    told(chat, "/audio 1.wav", "And this?")
    messages = chat.conversation.messages
    assert [each.images for each in messages[::2]] == [(URLS[0],), (URLS[1],)]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first = [said("What?", URLS[:1]), {"role": "assistant", "content": messages[1].content}, said("And this?", URLS[1:2])]
    assert llm.chat(first, params)[0].outputs[0].text == messages[3].content
    assert any("sounds" in line for line in told(chat, "/ctx"))
    for line, expected in (
        ("/audio", "which sound?"), ("/audio a.png", "no sound of a kind"), ("/audio nowhere.wav", "there is no file"),
        ("/image a.png", "reads no images"), ("/file 0.wav", "is a sound (/audio PATH sends it)"),
    ):  # fmt: skip
        assert expected in told(chat, line)[-1]
    told(chat, "/audio 0.wav")
    assert told(chat, '/audio ""') == ["no sound goes with the next message"]
    assert chat.images == []


def test_a_conversation_is_kept_with_its_sounds() -> None:
    conversation = Conversation()
    conversation.ask("what?", URLS[:2])
    conversation.answer("a bell")
    assert conversation.title == "[2 sounds] what?"
    assert "*(sound)* *(sound)*" in as_markdown(conversation, "m")
    assert json.loads(as_json(conversation, "m"))["messages"][0]["content"][0] == sound_part(SOUNDS[0])
    again = Conversation.replay(json.loads(json.dumps(conversation.events())))
    assert again.messages == conversation.messages
    event = {"event": "message", "id": 1, "parent": None, "role": "user", "content": "x", "images": ["http://here/a.wav"]}
    with pytest.raises(SessionError):
        Conversation.replay([event])


def test_a_conversation_with_sounds_is_no_matter_for_a_model_that_hears_nothing(chat: Chat) -> None:
    told(chat, "/audio 0.wav", "What?")
    llm = chat.model.llm  # type: ignore[attr-defined]
    before, llm.hearing = llm.hearing, None
    try:
        assert "hears nothing (/model NAME" in told(chat, "/audio 0.wav")[-1]
        hint = '/model NAME takes another model; /undo, /clear or /audio "" leaves sounds out'
        assert f"has sounds ({hint})" in told(chat, "more")[-1]
    finally:
        llm.hearing = before


# ---- a server ----


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "hearing") as server:
        yield server


def test_a_server_hears_what_clients_send(live: LiveServer, llm: LLM) -> None:
    body = {"model": "hearing", "max_tokens": 8, "temperature": 0}
    expected = llm.chat(asked(*SOUNDS[:2]), SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text
    for _ in range(2):
        status, answer = live.post("/v1/chat/completions", body | {"messages": asked(*SOUNDS[:2])})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)
    status, tokens = live.post("/tokenize", {"model": "hearing", "messages": asked(SOUNDS[0])})
    assert tokens["tokens"] == list(llm.encode_chat(asked(SOUNDS[0])))
    assert live.get("/v1/models")[1]["data"][0]["architecture"] == {"input_modalities": ["text", "audio"]}
    assert live.get("/props")[1]["modalities"] == {"vision": False, "audio": True, "video": False}
    seen = {"type": "image_url", "image_url": {"url": "data:"}}
    refused: list[tuple[str, dict[str, Any], str, str | None]] = [
        ("/v1/chat/completions", {"messages": asked(SOUNDS[0][:60])}, "shorter than 0.1 seconds", "messages[0].content[0]"),
        ("/v1/chat/completions", {"messages": asked(saved(noise(RATE * 90)))}, "tokens", "messages"),
        ("/v1/chat/completions", {"messages": asked(*[SOUNDS[0]] * 65)}, "64 sounds", "messages[0].content[64]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [seen]}]}, "reads no images", "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "AA"}}]}]}, "reads no images", None),
    ]  # fmt: skip
    for path, more, said_of_it, param in refused:
        status, answer = live.post(path, body | more)
        assert status == 400, answer
        assert said_of_it in answer["error"]["message"]
        assert param is None or answer["error"]["param"] == param
