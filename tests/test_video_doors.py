"""Videos from the library, the command line, conversations and a server, by a tiny Qwen3-VL. They are PNGs that move, which need
no library to be decoded, and one MP4."""

from __future__ import annotations

import base64
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

from filming import clip, frame, moving
from live_server import LiveServer, live_server
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.chat.conversation import Conversation
from nanovllm_cli.chat.export import as_json, as_markdown
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.loop import Chat
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.session import Sessions
from nanovllm_cli.cli.model import Loaded
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.images.source import IMAGE
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.server.messages import Facts, Generate
from nanovllm_cli.text.content_parts import IMAGES, content_of
from nanovllm_cli.text.image_tokens import Sent, with_marks
from nanovllm_cli.vision_spec import Image, ImageTokens, Picture, Video
from seeing import FIRST, TEMPLATE, png, seeing_model
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_chat_prompt import Screen

FILMS = [moving(20, kind="PNG", size=(32, 24)), moving(9, kind="GIF", size=(24, 24)), moving(30, kind="PNG", size=(16, 32))]
URLS = [VIDEO.data_url(each) for each in FILMS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ARGS = ("-t", "2", "-n", "8", "--temp", "0", "-q")
PAD, START, END = FIRST + 5, FIRST + 2, FIRST + 4
OTHERS = "{% else %}{{ part.text }}"
WITH_VIDEOS = TEMPLATE.replace(OTHERS, "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>" + OTHERS)


def part_of(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": VIDEO.data_url(data)}}


def asked(*videos: bytes, text: str = "What?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part_of, videos), {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = seeing_model(tmp_path_factory.mktemp("model") / "seeing")
    videos = {"size": {"shortest_edge": 8 * 64, "longest_edge": 48 * 64}, "patch_size": 4, "merge_size": 2}
    (made / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, config=EngineConfig(max_num_seqs=2, threads=2, num_blocks=256)) as model:
        yield model


def text_of(llm: LLM, messages: Any) -> str:
    return llm.chat(messages, GREEDY)[0].outputs[0].text


def test_a_file_is_what_transformers_makes_of_it(folder: Path, llm: LLM) -> None:
    """From a file to tokens, by hand: 20 frames of a tenth of a second each are two seconds, of which four frames are taken, each
    with its share of 48 tokens' pixels, two at a time, with the time in their middle."""
    import transformers
    from PIL import Image

    prompt = llm.encode_chat(asked(FILMS[0]))
    sides = 32, 24  # 768 pixels, and 4 x 768 are 48 tokens of 64
    frames = [np.asarray(Image.fromarray(frame(number, 20, (32, 24))).resize(sides, 3)) for number in (0, 6, 13, 19)]
    said = "<|im_start|>user\n<0.3 seconds><|vision_start|>{}<|vision_end|><1.6 seconds><|vision_start|>{}<|vision_end|>What?"
    text = llm.tokenizer.decode(list(prompt), skip_special_tokens=False)
    assert text.startswith(said.format(*["<|video_pad|>" * 12] * 2) + "<|im_end|>")
    assert [(each.rows, each.columns) for each in prompt.images] == [(3, 4)] * 2
    values = (torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    cells = values.view(2, 2, 3, 3, 2, 4, 4, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(2 * 48, -1)
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    whole = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(
            input_ids=whole, pixel_values_videos=cells, video_grid_thw=torch.tensor([[2, 6, 8]]),
            mm_token_type_ids=2 * (whole == PAD).int(),
        ).logits[0, len(prompt) - 1 : -1]  # fmt: skip
    assert logits.argmax(-1).tolist() == list(output.outputs[0].token_ids)


def test_a_template_that_knows_videos_says_the_same_as_one_that_does_not(folder: Path, llm: LLM) -> None:
    mixed = [{"role": "user", "content": [
        {"type": "text", "text": "a"}, part_of(FILMS[1]), {"type": "image_url", "image_url": {"url": IMAGE.data_url(png())}},
        part_of(FILMS[0]), {"type": "text", "text": "b"},
    ]}]  # fmt: skip
    prompt = llm.encode_chat(mixed)
    kinds = [(placed.image.frames, placed.moment is not None) for placed in prompt.images]  # type: ignore[union-attr]
    assert kinds == [(2, True)] * 2 + [(1, False)] + [(2, True)] * 2
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=16), chat_template=WITH_VIDEOS) as knows:
        other = knows.encode_chat(mixed)
    assert (list(other), other.images) == (list(prompt), prompt.images)
    assert text_of(llm, mixed)


def test_frames_that_stand_as_images_do_are_in_the_order_of_the_template() -> None:
    """Which writes videos before images, whatever a message has first; both are of the same token."""
    still, film = (Image.of(8, 8, bytes([value]) * 192) for value in (1, 2))
    sent: list[Sent] = [Picture((still,)), Video((film, film), ("1:", "2:", "."), (), 1.0)]
    marks = {"images": ImageTokens("<image>", "<image>"), "video": ImageTokens("<video>", "<image>")}
    made = with_marks("<video> <image>", [], marks, sent)
    assert made.text == "1:<image>2:<image>. <image>"
    assert made.sent == sent[::-1]


def test_parts_of_several_forms_are_one_video(llm: LLM) -> None:
    prompts = [
        llm.encode_chat([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}])
        for part in (
            part_of(FILMS[0]), {"type": "video_url", "video_url": URLS[0]}, {"type": "video", "video": URLS[0]},
            {"type": "video", "video": base64.b64encode(FILMS[0]).decode()},
        )
    ]  # fmt: skip
    assert all(list(each) == list(prompts[0]) and each.images == prompts[0].images for each in prompts)
    assert text_of(llm, asked(FILMS[0])) != text_of(llm, asked(FILMS[2]))


REFUSED: list[tuple[dict[str, Any], type[NanovllmError], str]] = [
    ({"type": "video_url"}, UsageError, "has no video"),
    ({"type": "video_url", "video_url": {"url": 5}}, UsageError, "has no video"),
    ({"type": "video_url", "video_url": {"url": ""}}, UsageError, "is empty"),
    ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, UnsupportedError, "none is opened here"),
    ({"type": "video", "video": "file:///etc/passwd"}, UnsupportedError, "none is opened here"),
    ({"type": "video", "video": "/etc/passwd"}, UsageError, "nor a video in base64"),
    ({"type": "video", "path": "/etc/passwd"}, UsageError, "has no video"),
    ({"type": "video", "video": ["data:image/png;base64,AA"]}, UsageError, "has no video"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, UsageError, "no video of a kind"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, UnsupportedError, "hears no audio"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_parts_that_are_no_videos_are_refused(llm: LLM, number: int) -> None:
    part, kind, told = REFUSED[number]
    with pytest.raises(kind, match=told) as caught:
        llm.encode_chat([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert "messages[0].content[1]" in caught.value.message


def test_a_text_that_looks_like_a_video_is_a_text(llm: LLM) -> None:
    prompt = llm.encode_chat(asked(FILMS[0], text="<|vision_start|><|video_pad|><|vision_end|>"))
    assert len(prompt.images) == 2
    assert list(prompt).count(PAD) == sum(placed.num_tokens for placed in prompt.images)


def test_a_model_that_reads_no_videos_says_what_to_do() -> None:
    (message,) = asked(FILMS[0])
    for reads, hint in (((IMAGES,), "send frames of the video as such"), ((), "take one that does")):
        with pytest.raises(UnsupportedError, match="this model reads no videos") as caught:
            content_of(message["content"], "messages[0]", reads=reads)
        assert hint in str(caught.value.hint)


def test_settings_say_how_many_frames(folder: Path) -> None:
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=16, video_fps=5.0, video_max_frames=6)) as few:
        assert len(few.encode_chat(asked(FILMS[0])).images) == 3
    with LLM(folder, config=EngineConfig(threads=2, num_blocks=16, image_max_tokens=4)) as small:
        assert {each.num_tokens for each in small.encode_chat(asked(FILMS[2])).images} == {2}
    for wrong in ({"video_fps": 0.0}, {"video_fps": 1e4}, {"video_fps": float("nan")}, {"video_max_frames": 0}):
        with pytest.raises(UsageError, match="video_"):
            EngineConfig(**wrong)  # type: ignore[arg-type]


def test_videos_and_what_they_are_seen_by_cross_to_other_processes(llm: LLM) -> None:
    prompt = llm.encode_chat(asked(*FILMS[:2]))
    message = Generate(5, list(prompt), GREEDY, 0, None, list(prompt.images))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Generate)
    assert tuple(again.images) == prompt.images
    facts = Facts(512, 300, 3, 16, 1, 1, 1, "float32", "cpu", 8, vision=llm.vision)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=Facts) == facts
    assert facts.senses == llm.senses


# ---- the command line ----


@pytest.fixture
def run(doors: Doors, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, data in zip("ab", FILMS, strict=False):
        (tmp_path / f"{name}.png").write_bytes(data)

    def command(*words: str, stdin: bytes = b"", model: str = str(folder)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code, out, err = doors.command("run", model, *words, *ARGS)
        return code, out.removesuffix("\n"), err

    return command


def test_run_sees_files_and_standard_input(run: Any, llm: LLM) -> None:
    expected = text_of(llm, asked(*FILMS[:2])).removesuffix("\n")
    assert run("--video", "a.png", "--video", "b.png", "What?")[:2] == (0, expected)
    one = run("--video", "a.png", "What?")
    assert one[:2] == run("--video", "-", "What?", stdin=FILMS[0])[:2]
    assert run("--video", "a.png", "--video-fps", "10", "--video-max-frames", "20", "What?")[:2] != one[:2]
    assert run("--continue", "And?")[0] == 0


def test_run_sees_an_mp4(run: Any, tmp_path: Path, llm: LLM) -> None:
    film = clip(20, rate=10, size=(32, 24))
    (tmp_path / "a.mp4").write_bytes(film)
    assert run("--video", "a.mp4", "What?")[:2] == (0, text_of(llm, asked(film)).removesuffix("\n"))


def test_run_tells_what_it_cannot_see(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "cut.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + b"\xff" * 400)
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (
        asked(FILMS[0]), [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://here/a"}}]}],
    )))  # fmt: skip
    for words, told in (
        (("--video", "a.txt"), "a.txt is no video of a kind"), (("--video", "none.mp4"), "there is no file none.mp4"),
        (("--video", "-"), "standard input is empty"), (("--video", "-", "-f", "-"), "--video - is it"),
        (("--raw", "--video", "a.png"), "--video has no meaning without"),
        (("--batch", "lines.jsonl", "--video", "a.png"), "--batch has its prompts in its file"),
        (("--video", "a.png", "--video-fps", "0"), "video-fps"), (("-f", "cut.mp4"), "--video of run"),
    ):  # fmt: skip
        code, out, err = run(*words, *(() if "--batch" in words else ("What?",)))
        assert (code, out) == (2, ""), words
        assert told in err, err
    code, _, err = run("--video", "a.png", "What?", model="tiny")
    assert (code, "this model reads no videos" in err) == (6, True)
    code, out, _ = run("--batch", "lines.jsonl")
    seen, refused = map(json.loads, out.splitlines())
    assert code == 1
    assert seen["answers"][0]["text"] == run("--video", "a.png", "What?")[1]
    assert "none is opened here" in json.dumps(refused)


# ---- conversations ----


@pytest.fixture
def chat(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    monkeypatch.chdir(tmp_path)
    for number, data in enumerate(FILMS):
        (tmp_path / f"{number}.png").write_bytes(data)
    (tmp_path / "still.png").write_bytes(png())
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


def test_a_conversation_sees_videos(chat: Chat) -> None:
    assert "0.png (24 tokens) goes with the next message" in told(chat, "/video 0.png")
    told(chat, "What?")
    told(chat, "/video 1.png", "/image still.png", "And this?")
    messages = chat.conversation.messages
    assert [each.images for each in messages[::2]] == [(URLS[0],), (URLS[1], IMAGE.data_url(png()))]
    assert any("images and videos" in line for line in told(chat, "/ctx"))
    for line, expected in (
        ("/video", "which video?"), ("/video nowhere.mp4", "there is no file"), ("/audio 0.png", "no sound of a kind"),
    ):  # fmt: skip
        assert expected in told(chat, line)[-1]
    told(chat, "/video 0.png")
    assert told(chat, '/image ""', '/video ""') == ["no image goes with the next message", "no video goes with the next message"]
    assert chat.images == []


def test_a_conversation_is_kept_with_its_videos() -> None:
    conversation = Conversation()
    conversation.ask("what?", URLS[:2])
    conversation.answer("a film")
    assert conversation.title == "[2 videos] what?"
    assert "*(video)* *(video)*" in as_markdown(conversation, "m")
    assert json.loads(as_json(conversation, "m"))["messages"][0]["content"][0] == part_of(FILMS[0])
    again = Conversation.replay(json.loads(json.dumps(conversation.events())))
    assert again.messages == conversation.messages


# ---- a server ----


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "seeing", "--video-max-frames", "8") as server:
        yield server


def test_a_server_sees_what_clients_send(live: LiveServer, llm: LLM) -> None:
    body = {"model": "seeing", "max_tokens": 8, "temperature": 0}
    expected = text_of(llm, asked(*FILMS[:2]))
    for _ in range(2):
        status, answer = live.post("/v1/chat/completions", body | {"messages": asked(*FILMS[:2])})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)
    status, tokens = live.post("/tokenize", {"model": "seeing", "messages": asked(FILMS[0])})
    assert tokens["tokens"] == list(llm.encode_chat(asked(FILMS[0])))
    assert live.get("/v1/models")[1]["data"][0]["architecture"] == {"input_modalities": ["text", "image", "video"]}
    assert live.get("/props")[1]["modalities"] == {"vision": True, "audio": False, "video": True}
    opened = {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/a.mp4"}}
    cut = {"type": "video_url", "video_url": {"url": VIDEO.data_url(FILMS[1][:300])}}
    refused: list[tuple[list[dict[str, Any]], str, str]] = [
        ([opened], "none is opened here", "messages[0].content[0]"), ([cut], "damaged", "messages[0].content[0]"),
        ([part_of(FILMS[0])] * 65, "64 images and videos", "messages[0].content[64]"),
        ([{"type": "video_url", "video_url": {"url": 5}}], "", "messages[0].content[0].video_url"),
    ]  # fmt: skip
    for parts, said_of_it, param in refused:
        status, answer = live.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": parts}]})
        assert status == 400, answer
        assert said_of_it in answer["error"]["message"]
        assert answer["error"]["param"].startswith(param.partition(".video_url")[0])
