"""Images in a conversation: kept with their messages, in sessions and in prompts, and never taken for one another."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url, sent
from nanovllm_cli.chat import session as session_file
from nanovllm_cli.chat.commands import complete
from nanovllm_cli.chat.conversation import Call, Conversation, Event
from nanovllm_cli.chat.export import as_json, as_markdown
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.loop import Chat
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.prompt import for_template, graft, images_of
from nanovllm_cli.chat.session import Sessions, kept_ids
from nanovllm_cli.chat.toolbox import Outcome, Tool, Toolbox
from nanovllm_cli.cli.model import Loaded, Prompting
from nanovllm_cli.cli.question import said
from nanovllm_cli.errors import NanovllmError, OutputError, SessionError, UnsupportedError, UsageError
from nanovllm_cli.images import reading
from nanovllm_cli.text.builtin_templates import builtin_template
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.vision_spec import Image, Picture, PlacedImage, TokenIds
from openai_server import OpenAIServer
from seeing import png, seeing_model
from test_chat_prompt import EMPTY, Screen
from test_cli_driver import nanovllm
from test_url import pieces

URLS = [data_url(png(seed=seed)) for seed in range(3)]
WIDE = data_url(png(48, 16))

# ---- what is kept ----


def test_a_message_has_its_images_before_its_text() -> None:
    events: list[Event] = []
    conversation = Conversation(events.append)
    conversation.ask("\n what\nis it?", URLS[:1])
    conversation.answer("a cat")
    conversation.ask("and these?", URLS)
    conversation.ask("thanks")
    assert [event.get("images") for event in events] == [tuple(URLS[:1]), None, tuple(URLS), None]
    for copy in (Conversation.replay(json.loads(json.dumps(events))), Conversation.replay(conversation.events())):
        assert copy.messages == conversation.messages
    assert for_template(None, conversation.messages) == [
        said("\n what\nis it?", URLS[:1]), {"role": "assistant", "content": "a cat"}, said("and these?", URLS),
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    assert conversation.title == "[image] what"
    assert [message.shown("x") for message in conversation.messages] == ["[image] x", "x", "[3 images] x", "x"]


@pytest.mark.parametrize("images", ["data:image/png;base64,AA", [5], [None], ["http://here/a.png"], ["/etc/passwd"], {}, 0, True,
                                    ["data:image/png;base64,\ud800"], [["data:image/png;base64,AA"]]])  # fmt: skip
def test_images_that_make_no_sense_are_refused(images: object) -> None:
    event = {"event": "message", "id": 1, "parent": None, "role": "user", "content": "x"}
    assert Conversation.replay([event | {"images": []}]).messages[0].images == ()
    assert Conversation.replay([event | {"images": None}]).messages[0].images == ()
    with pytest.raises(SessionError):
        Conversation.replay([event | {"images": images}])
    with pytest.raises(SessionError):
        Conversation.replay([event | {"role": "assistant", "images": URLS[:1]}])


def test_exports_note_images_for_people_and_have_them_for_programs() -> None:
    conversation = Conversation()
    conversation.ask("what?", URLS[:2])
    conversation.answer("cats")
    text = as_markdown(conversation, "m")
    assert "# [2 images] what?\n" in text
    assert "## You\n\n*(image)* *(image)*\n\nwhat?\n\n## m\n\ncats\n" in text
    assert json.loads(as_json(conversation, "m"))["messages"] == for_template(None, conversation.messages)


def test_a_photograph_survives_and_the_list_of_sessions_does_not_read_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(random.Random(0).randbytes(5 << 20)).decode()
    sessions = Sessions(tmp_path)
    session = sessions.new("tiny", "photos")
    conversation = Conversation(session.append)
    conversation.ask("what?", [url])
    conversation.answer("a cat")
    session.close()
    again, events = sessions.open("photos")
    again.close()
    assert Conversation.replay(events).messages == conversation.messages
    assert [entry.title for entry in sessions.entries()] == ["[image] what?"]
    monkeypatch.setattr(session_file, "_read", None)
    assert [entry.turns for entry in sessions.entries()] == [1]


def test_no_session_grows_beyond_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_file, "MAX_SESSION_BYTES", 3 * len(URLS[0]))
    sessions = Sessions(tmp_path)
    session = sessions.new("tiny", "photos")
    conversation = Conversation(session.append)
    conversation.ask("one", URLS[:1])
    with pytest.raises(OutputError, match="would be longer"):
        conversation.ask("two", URLS)
    session.close()
    assert [message.content for message in Conversation.replay(sessions.open("photos")[1]).messages] == ["one"]


# ---- graft ----

PAD = 13
VOCABULARY = [b"a", b"b", b"ab", b"ba", b"aab", b"", b"<>", b"</>", b" ", b"c", b" c", b"<im", b"g>", b"<img>"]
PICTURES = [Image.of(8, 8 * columns, bytes([seed] * 3 * 64 * columns)) for seed, columns in enumerate((1, 1, 2))]
parts = st.lists(st.lists(st.integers(0, PAD - 1), max_size=8) | st.sampled_from(PICTURES), max_size=8)


def placed(parts: list[Any]) -> TokenIds:
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Image):
            images.append(PlacedImage(part, len(ids), 1, part.width // 8))
        ids += [PAD] * images[-1].num_tokens if isinstance(part, Image) else part
    return TokenIds(ids, images)


def meaning(ids: TokenIds) -> list[bytes]:
    """Texts, and digests of the images between them."""
    found, end = [], 0
    for image in (*ids.images, None):
        start = len(ids) if image is None else image.start
        found.append(b"".join(VOCABULARY[token] for token in ids[end:start]))
        assert PAD not in ids[end:start], "a token of an image that is not there"
        if image is not None:
            end = image.end
            assert ids[start:end] == [PAD] * (image.image.width // 8)
            found.append(image.image.digest)
    return found


@given(parts, parts, parts)
@settings(max_examples=400, deadline=None)
def test_what_is_grafted_shows_the_same_images_in_the_same_text(beginning: list[Any], kept: list[Any], fresh: list[Any]) -> None:
    old, new = placed([*beginning, *kept]), placed([*beginning, *fresh])
    whole = graft(old, new, VOCABULARY.__getitem__)
    assert meaning(whole) == meaning(new)
    assert whole[: len(placed(beginning))] == placed(beginning)
    with_blocks = meaning(graft(old, new, VOCABULARY.__getitem__, EMPTY))
    assert [EMPTY.sub(b"", each) for each in with_blocks] == [EMPTY.sub(b"", each) for each in meaning(new)]


def in_pairs(part: Any) -> Any:
    """The same text in fewer tokens."""
    found: list[int] = []
    for token in part if isinstance(part, list) else ():
        pair = b"".join(VOCABULARY[each] for each in (*found[-1:], token))
        found[max(len(found) - 1, 0) :] = [VOCABULARY.index(pair)] if pair in VOCABULARY else [*found[-1:], token]
    return found if isinstance(part, list) else part


@given(st.lists(st.lists(st.sampled_from([0, 1, 8, 9]), max_size=6) | st.sampled_from(PICTURES), max_size=8), parts, parts)
@settings(max_examples=300, deadline=None)
def test_images_move_with_the_answers_before_them(common: list[Any], kept: list[Any], fresh: list[Any]) -> None:
    """Tokens of answers that were drawn stay, and so does every image between them, where it was read."""
    old, new = placed([*common, *kept]), placed([*map(in_pairs, common), *fresh])
    whole = graft(old, new, VOCABULARY.__getitem__)
    assert meaning(whole) == meaning(new)
    count = len(placed(common).images)
    assert whole.images[:count] == old.images[:count]


def test_images_are_where_their_tokens_are() -> None:
    a, b, c = PICTURES

    def grafted(kept: list[Any], fresh: list[Any]) -> tuple[list[int], list[tuple[Image, int]]]:
        result = graft(placed(kept), placed(fresh), VOCABULARY.__getitem__)
        return list(result), [(each.image, each.start) for each in result.images]

    # an answer between two images was drawn letter by letter, and the second one moves
    assert grafted([[9], a, [0, 1, 0, 1]], [[9], a, [2, 2, 9], c]) == ([9, PAD, 0, 1, 0, 1, 9, PAD, PAD], [(a, 1), (c, 7)])
    # before the first image, too; the same one is behind it
    assert grafted([[0, 1], a, [9]], [[2], a, [9, 9]]) == ([0, 1, PAD, 9, 9], [(a, 2)])
    # another image in its place, or none, or a new one: nothing behind it is taken
    assert grafted([[9], a, [0, 1]], [[9], b, [2]]) == ([9, PAD, 2], [(b, 1)])
    assert grafted([[9], a, [0, 1]], [[9, 2]]) == ([9, 2], [])
    assert grafted([[9, 0, 1, 9]], [[9], a, [2, 9]]) == ([9, PAD, 2, 9], [(a, 1)])
    # a text that looks like an image is none
    assert grafted([[9], a, [9]], [[9, 11, 12, 9], a]) == ([9, 11, 12, 9, PAD], [(a, 4)])
    # of a session's file only tokens come back
    assert list(graft([0, 1, PAD, 9], placed([[2], a, [9]]), VOCABULARY.__getitem__)) == [0, 1, PAD, 9]
    assert graft([0, 1, PAD, 9], placed([[2], a, [9]]), VOCABULARY.__getitem__).images == (placed([[0, 1], a]).images[0],)


# ---- with a model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In whose tokenizer two letters a are one token, in place of a byte that no text has."""
    folder = seeing_model(tmp_path_factory.mktemp("seeing"))
    told = json.loads((folder / "tokenizer.json").read_text())
    del told["model"]["vocab"]["ÿ"]
    told["model"]["vocab"]["aa"] = 255
    told["model"]["merges"] = [["a", "a"]]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, config=EngineConfig(max_num_seqs=1, threads=2, num_blocks=256)) as model:
        yield model


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[LLM]:
    """One that remembers nothing."""
    settings = EngineConfig(max_num_seqs=1, threads=2, num_blocks=256, enable_prefix_caching=False)
    with LLM(folder, config=settings) as model:
        yield model


@pytest.fixture
def chat(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(png(seed=seed))
    return open_chat(llm, tmp_path)


def open_chat(llm: LLM, folder: Path, *, edits: bool = True, interactive: bool = True, **more: Any) -> Chat:
    model = LocalModel(lambda name: lambda: Loaded(llm, 0.0), Settings({"max_tokens": 12, "temperature": 0.0}, **more))
    chat = Chat(model, Sessions(folder / "sessions"), Screen(), interactive=interactive, edits=edits)
    chat.model.open("it")
    return chat


def is_as_fresh(chat: Chat, fresh: LLM) -> bool:
    """Whether the last answer is that of an engine that is asked for it alone."""
    *before, answer = chat.conversation.messages
    params = SamplingParams(**chat.model.settings.given)
    (output,) = fresh.chat(for_template(chat.conversation.system, before), params)
    return output.outputs[0].text == answer.content


def told(chat: Chat, *lines: str) -> list[str]:
    """What these come to, apart from answers."""
    display = chat.display
    assert isinstance(display, Screen)
    before = len(display.said)
    for line in lines:
        try:
            chat.handle(line)
        except NanovllmError as error:
            display.fail(error.message, error.hint)
    return [each for each in display.said[before:] if not each.startswith("end: ")]


def seen(chat: Chat) -> list[int]:
    """Which images the model has been shown last, by number."""
    digests = [image.image.digest for image in images_of(chat.model.kept)]
    vision = chat.model.llm.vision  # type: ignore[attr-defined]
    known = [reading.read_sent(url, vision, "it")[0].images[0].digest for url in URLS]
    return [known.index(digest) for digest in digests]


def read(chat: Chat) -> tuple[int, int]:
    """Tokens of the last prompt, and how many of them were found."""
    assert chat.statistics is not None
    assert chat.statistics.prompt_tokens is not None
    assert chat.statistics.cached_tokens is not None
    return chat.statistics.prompt_tokens, chat.statistics.cached_tokens


def test_turns_behind_an_image_are_those_of_a_fresh_engine(chat: Chat, fresh: LLM) -> None:
    assert told(chat, "/image 0.png") == ["0.png (6 tokens) goes with the next message"]
    told(chat, "What is it? " * 10)
    assert (seen(chat), chat.images, is_as_fresh(chat, fresh)) == ([0], [], True)
    used = chat.context_used or 0
    for line in ("And then?", "/continue", "/regen"):
        told(chat, line)
        assert seen(chat) == [0]
        assert is_as_fresh(chat, fresh) or line == "/continue"
        assert read(chat)[1] > used - 48, "its image was found again"
    told(chat, "/image 1.png", "/image 2.png", "And these?")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([0, 1, 2], True)
    told(chat, "Compare them.")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([0, 1, 2], True)
    messages = chat.conversation.messages
    assert chat.model.count(None, messages) == len(fresh.encode_chat(for_template(None, messages)))


def test_going_on_with_an_answer_to_an_image_is_the_longer_answer(chat: Chat, fresh: LLM) -> None:
    chat.model.settings.given |= {"max_tokens": 5, "allowed_token_ids": list(b"bcdefghijklm")}
    told(chat, "/image 0.png", "What is it?", "/continue")
    assert seen(chat) == [0]
    chat.model.settings.given["max_tokens"] = 10
    assert is_as_fresh(chat, fresh)


def test_an_image_behind_an_answer_that_was_drawn_otherwise_stands_where_its_tokens_are(chat: Chat, fresh: LLM) -> None:
    model = chat.model
    assert isinstance(model, LocalModel)
    model.settings.given["allowed_token_ids"] = [ord("a")]
    told(chat, "/image 0.png", "x" * 40)
    assert chat.conversation.messages[-1].content == "a" * 12
    told(chat, "/image 1.png")
    del model.settings.given["allowed_token_ids"]
    told(chat, "y")
    prompt = TokenIds(model.kept[: read(chat)[0]], images_of(model.kept))
    written = fresh.encode_chat(for_template(None, chat.conversation.messages[:-1]))
    assert len(prompt) == len(written) + 6, "twelve tokens in place of six"
    assert [each.start for each in prompt.images] == [written.images[0].start, written.images[1].start + 6]
    for each in prompt.images:
        assert prompt[each.start - 1 : each.end + 1] == [258, *[259] * each.num_tokens, 260]
    assert prompt.count(259) == sum(each.num_tokens for each in prompt.images)
    assert fresh.tokenizer.decode(prompt, skip_special_tokens=False) == fresh.tokenizer.decode(written, skip_special_tokens=False)
    assert read(chat)[1] > prompt.images[0].end + 12
    (output,) = fresh.generate(prompt, SamplingParams(**model.settings.given))
    assert output.outputs[0].text == chat.conversation.messages[-1].content


class Camera:
    """A tool that gives an image, a damaged one and a sound."""

    tools = (Tool("look", "camera", "", {"type": "object"}),)

    def check(self) -> None:
        pass

    def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        return Outcome("seen", (URLS[1], data_url(png()[:100]), "data:audio/wav;base64,AAAA"))


def test_an_image_that_a_tool_gives_is_seen_as_a_persons_is(llm: LLM, fresh: LLM, tmp_path: Path) -> None:
    chat = open_chat(llm, tmp_path, tools=Toolbox(Camera(), "*"))
    tools = chat.model.settings.tools
    assert tools is not None
    tools.look = chat.model.look
    chat.conversation.ask("What is there?")
    chat.conversation.answer("", calls=[Call("c", "look", "{}")])
    told(chat, "/continue")
    result = chat.conversation.messages[2]
    assert result.images == (URLS[1],)
    assert result.content == "seen\n[image: it is damaged: it can't be decoded as PNG]\n[sound: this model hears no audio (" + (
        "it is of type 'input_audio')]"
    )
    *before, answer = chat.conversation.messages
    params = SamplingParams(**chat.model.settings.given)
    (output,) = fresh.chat(for_template(None, before), params, tools=tools.for_template())
    assert (seen(chat), answer.content) == ([1], output.outputs[0].text)


@pytest.mark.parametrize("template", ["chatml", "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"])
def test_a_template_that_shows_no_image_of_a_tool_is_known(llm: LLM, template: str) -> None:
    source = template if "{" in template else builtin_template(template)
    assert llm.chat_template is not None
    other = ChatTemplate(source, bos_token=None, eos_token=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "chat_template", other)
        with pytest.raises(UnsupportedError, match="the chat template writes 0 places"):
            Prompting(llm).look(URLS[0])
    Prompting(llm).look(URLS[0])


def test_what_becomes_of_a_messages_images(chat: Chat, fresh: LLM) -> None:
    told(chat, "/image 0.png", "first")
    answer = chat.conversation.messages[-1].content
    assert told(chat, "/undo") == ["taken back: [image] first"]
    told(chat, "second")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([], True)
    told(chat, "/undo", "/image 1.png", "first")  # another one in the same place
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([1], True)
    assert chat.conversation.messages[-1].content != answer
    told(chat, "/edit changed")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([1], True)
    told(chat, "/image 2.png", "/edit")
    told(chat, chat._take_draft() + " again")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([1, 2], True)
    told(chat, "/clear", "third")
    assert (seen(chat), is_as_fresh(chat, fresh)) == ([], True)
    assert told(chat, "/image 0.png", "/image 1.png", '/image ""')[-1] == "no image goes with the next message"
    told(chat, "fourth")
    assert seen(chat) == []
    told(chat, "/edit", "/regen", "fifth")  # another answer instead of another question
    assert [each.content for each in chat.conversation.messages[::2]] == ["third", "fourth", "fifth"]


def test_lines_about_images(chat: Chat) -> None:
    told(chat, "/image 0.png", "/image 1.png", "What?", "/image 2.png")
    assert told(chat, "/history")[0].splitlines()[0] == "  1 you    [2 images] What?"
    context = told(chat, "/ctx")[0].splitlines()
    found = {line[2:28].strip(): int(line[28:]) for line in context[1:]}
    assert (found["images"], found["images of the next message"], found["you"]) == (12, 6, 5)
    used = chat.context_used or 0
    assert sum(found.values()) == used + 6
    told(chat, "/export md out.md", "/export json out.json")
    assert "base64" not in Path("out.md").read_text()
    assert Path("out.json").read_text().count("data:image/png;base64,") == 2


def test_files_are_named_as_a_terminal_names_them(chat: Chat) -> None:
    Path("my cat.png").write_bytes(png())
    said = told(chat, "/image my cat.png", "/image 'my cat.png'", "/image my\\ cat.png", f"/image {Path.cwd()}/0.png")
    assert len([line for line in said if line.endswith("(6 tokens) goes with the next message")]) == len(said) == 4
    assert chat.images == [URLS[0]] * 4
    assert [word for word, _ in complete(chat, "/image m")] == ["my cat.png"]


def test_what_is_no_image_is_told_and_changes_nothing(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("note.txt").write_text("a note")
    Path("binary").write_bytes(b"\0\1")
    Path("empty").touch()
    Path("broken.png").write_bytes(png()[:-40])
    mistakes = {
        "/image": ("which image?", "/image PATH"),
        "/image nowhere.png": ("there is no file nowhere.png", ""),
        "/image .": (". is a folder", ""),
        "/image note.txt": ("note.txt is no image", "/file sends a text"),
        "/image binary": ("binary is no image", "convert it"),
        "/image empty": ("empty is empty", ""),
        "/image broken.png": ("broken.png is damaged", "save or send it again"),
        "/file 0.png": ("0.png is an image", "/image PATH sends it"),
    }
    for line, (what, hint) in mistakes.items():
        [failed] = told(chat, line)
        assert failed.startswith("failed: ")
        assert what in failed, line
        assert hint in failed, line
    assert (chat.images, chat.attachments) == ([], [])
    monkeypatch.setattr(chat.model.llm, "max_model_len", 6)  # type: ignore[attr-defined]
    [failed] = told(chat, "/image 0.png")
    assert "0.png has 6 tokens, the context holds 6" in failed


def test_a_model_without_eyes(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    told(chat, "/image 0.png", "What?", "/image 1.png")
    llm = chat.model.llm  # type: ignore[attr-defined]
    monkeypatch.setattr(llm, "vision", None)
    [refused] = told(chat, "/image 0.png")
    assert refused == f"failed: {llm.name} reads no images (/model NAME takes another model)"
    chat._used = None
    used = chat.context_used
    assert told(chat, "/ctx")[0].startswith(f"{used:,} of 1,024 tokens")
    for line in ("more", "/regen", "/continue"):
        [failed] = told(chat, line)
        assert "reads no images, and the conversation has images" in failed
        assert '/undo, /clear or /image ""' in failed
    assert len(chat.conversation.messages) == 2
    assert told(chat, "/undo", '/image ""', "more")[2:] == []
    assert [message.content for message in chat.conversation.messages[:-1]] == ["more"]


def test_what_fails_keeps_its_images_for_the_next_try_where_there_is_one(llm: LLM, tmp_path: Path) -> None:
    for interactive in (True, False):
        chat = open_chat(llm, tmp_path, interactive=interactive)
        chat.attach(URLS[0], "it")
        assert "the context holds 1024" in told(chat, "x" * 2000)[0]
        assert chat.images == (URLS[:1] if interactive else [])
        told(chat, "x")
        assert seen(chat) == ([0] if interactive else [])


def test_a_session_goes_on_with_its_images(folder: Path, llm: LLM, fresh: LLM, tmp_path: Path) -> None:
    """What was read in front of the first one is kept with it; the rest is read again."""
    first = open_chat(llm, tmp_path, saves_kv=True)
    first.keep("mine")
    told(first, "Some words. " * 8)
    first.attach(URLS[0], "it")
    told(first, "What is it?", "And then?")
    kept = first.model.kept
    first.end_session()
    with LLM(folder, config=EngineConfig(max_num_seqs=1, threads=2, num_blocks=256)) as other:
        later = open_chat(other, tmp_path)
        later.resume("mine")
        start = images_of(kept)[0].start
        assert later.model.kept == list(kept[:start])
        assert [message.images for message in later.conversation.messages if message.role == "user"] == [(), tuple(URLS[:1]), ()]
        told(later, "What else?")
        assert (seen(later), is_as_fresh(later, fresh)) == ([0], True)
        assert start - 16 <= read(later)[1] <= start
        later.end_session()
    events = [json.loads(line) for line in (tmp_path / "sessions/mine.jsonl").open()]
    assert 259 not in kept_ids(events)


@pytest.mark.parametrize("edits", [True, False])
def test_a_message_without_an_answer_comes_back_with_its_images_where_it_does(llm: LLM, tmp_path: Path, edits: bool) -> None:
    session = Sessions(tmp_path / "sessions").new("it", "mine")
    Conversation(session.append).ask("what?", URLS[:2])
    session.close()
    chat = open_chat(llm, tmp_path, edits=edits)
    chat.resume("mine")
    assert isinstance(chat.display, Screen)
    again = "here it is again, with 2 images" if edits else "and is left out"
    assert chat.display.said[-1].endswith(again)
    assert chat.images == (URLS[:2] if edits else [])
    chat.end_session()


def test_turns_that_are_left_out_take_their_images_along(llm: LLM, tmp_path: Path) -> None:
    chat = open_chat(llm, tmp_path, shifts=True)
    chat.model.settings.given["allowed_token_ids"] = list(b"bcdefghijklm")
    for number in range(3):
        chat.attach(URLS[number], "it")
        told(chat, "x" * 200)
    assert seen(chat) == [0, 1, 2]
    assert "of the conversation's beginning 4 messages are left out" in told(chat, "y" * 320)[0]
    assert seen(chat) == [2]
    assert [len(message.images) for message in chat.conversation.messages] == [1, 0, 1, 0, 1, 0, 0, 0]


# ---- an image is decoded once ----


def test_images_are_remembered_within_bounds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.vision is not None
    decoded = []
    read_image = reading.read_image

    def counted(data: bytes, spec: Any, where: str) -> Picture:
        decoded.append(where)
        return read_image(data, spec, where)

    monkeypatch.setattr(reading, "read_image", counted)
    monkeypatch.setattr(reading, "_recent", reading._Recent())
    size = len(reading.read_sent(URLS[0], llm.vision, "a")[0].images[0].pixels)
    monkeypatch.setattr(sent, "REMEMBERED_BYTES", 2 * size)
    for urls in (URLS[:2], [URLS[1], URLS[0]], [URLS[2]], URLS[:1]):
        images = [reading.read_sent(url, llm.vision, str(URLS.index(url)))[0] for url in urls]
        assert images == [read_image(png(seed=URLS.index(url)), llm.vision, "it") for url in urls]
    assert decoded == ["a", "1", "2"], "the one that was longest unused went"
    reading.read_sent(URLS[0], llm.vision.limited(4), "of another model")
    assert decoded[-1] == "of another model"
    with pytest.raises(UsageError, match="second is damaged"):
        reading.read_sent(data_url(png()[:-40]), llm.vision, "second")
    reading.read_sent(WIDE, llm.vision.limited(1 << 20), "large")
    monkeypatch.setattr(sent, "REMEMBERED_BYTES", 1)
    assert [reading.read_sent(WIDE, llm.vision, "large")[0].num_pixels > 0 for _ in range(2)] == [True, True]


# ---- from the command line ----


def test_flags(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "note.txt").write_text("a note")
    for args, error in (
        (("--image", "a.png"), "error: tiny reads no images"),
        (("--image", "nowhere.png"), "error: there is no file nowhere.png"),
        (("--image", "note.txt"), "error: note.txt is no image of a kind that is read here"),
    ):
        done = nanovllm(tmp_path, "chat", "-q", "tiny", *args, stdin="say hi\n")
        assert (done.code, done.out, done.err.splitlines()[0]) == (2, "", error)
    done = nanovllm(tmp_path, "chat", "-q", "tiny", stdin="/image a.png\nsay hi\n/file a.png\n")
    assert (done.code, done.out) == (2, "hi\n")
    assert [line for line in done.err.splitlines() if line.startswith("error")] == [
        "error: tiny reads no images", "error: a.png is an image",
    ]  # fmt: skip


def test_a_server_gets_them_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(seed=1))
    with OpenAIServer(pieces("a ", "cat"), ("one",)) as server:
        lines = ("/image b.png", "and this?", "/history")
        args = ("-q", "--image", "a.png", "--image", "b.png", "one", "what?")
        done = nanovllm(tmp_path, "chat", "--url", server.url, *args, stdin="".join(line + "\n" for line in lines))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:3] == ["a cat", f"b.png ({os.stat(tmp_path / 'b.png').st_size / 1024:.1f} KiB) goes with the "
                                         "next message", "a cat"]  # fmt: skip
    assert "[2 images] what?" in done.out
    asked = [reply.request.body["messages"] for reply in server.replies]
    assert asked[0] == [said("what?", URLS[:2])]
    assert asked[1] == [*asked[0], {"role": "assistant", "content": "a cat"}, said("and this?", URLS[1:2])]


def test_pillow_waits_for_an_image() -> None:
    rooms = "chat.commands, nanovllm_cli.chat.local_model, nanovllm_cli.chat.remote_model, nanovllm_cli.cli.chat"
    code = f"import sys, nanovllm_cli.{rooms}; sys.exit('PIL' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
