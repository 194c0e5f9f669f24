"""The ids of a conversation's next turn: the template's text, and what was read before not read again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli import LLM
from nanovllm_cli.chat.local_model import LocalModel
from nanovllm_cli.chat.loop import Chat
from nanovllm_cli.chat.model import Settings
from nanovllm_cli.chat.prompt import graft
from nanovllm_cli.chat.session import Sessions
from nanovllm_cli.cli.model import Loaded
from nanovllm_cli.config import BLOCK_SIZE, EngineConfig
from nanovllm_cli.errors import PromptTooLongError, UsageError

# ---- graft ----

VOCABULARY = [b"a", b"b", b"ab", b"ba", b"aab", b"", b"<>", b"</>", b" ", b"c", b" c"]
EMPTY = re.compile(rb"<>\s*</>\s*")
ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=24)


def text(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY[i] for i in tokens)


@given(ids, ids)
@settings(max_examples=300, deadline=None)
def test_what_is_grafted_says_the_same(kept: list[int], fresh: list[int]) -> None:
    assert text(graft(kept, fresh, VOCABULARY.__getitem__)) == text(fresh)
    with_blocks = graft(kept, fresh, VOCABULARY.__getitem__, EMPTY)
    assert EMPTY.sub(b"", text(with_blocks)) == EMPTY.sub(b"", text(fresh))


@given(ids, ids, ids)
@settings(max_examples=200, deadline=None)
def test_equal_beginnings_stay_as_they_were_read(beginning: list[int], kept: list[int], fresh: list[int]) -> None:
    grafted = graft([*beginning, *kept], [*beginning, *fresh], VOCABULARY.__getitem__, EMPTY)
    assert grafted[: len(beginning)] == beginning


def test_an_answer_keeps_the_tokens_that_were_drawn() -> None:
    # "abab" was drawn letter by letter; the tokenizer would take it in pairs
    assert graft([9, 0, 1, 0, 1], [9, 2, 2, 9], VOCABULARY.__getitem__) == [9, 0, 1, 0, 1, 9]
    # "aab" next: where the new text has no border, the last common one counts
    assert graft([9, 0, 0], [9, 4, 9], VOCABULARY.__getitem__) == [9, 4, 9]


def test_an_empty_block_stays_where_the_new_text_leaves_it_out() -> None:
    kept = [9, 6, 8, 7, 8, 0, 1]  # c<> </> ab
    assert graft(kept, [9, 2, 9], VOCABULARY.__getitem__, EMPTY) == [*kept, 9]
    assert graft(kept, [9, 2, 9], VOCABULARY.__getitem__) == [9, 2, 9]
    # another answer to the same question: the block is in both
    assert graft(kept, [9, 6, 8, 7, 8], VOCABULARY.__getitem__, EMPTY) == [9, 6, 8, 7, 8]
    # the white space behind it may be a part of a word's token: " c"
    assert graft([0, 6, 7, 10, 0], [0, 9, 2], VOCABULARY.__getitem__, EMPTY) == [0, 6, 7, 10, 2]
    # a block with something in it is another text
    assert graft([9, 6, 0, 7, 0, 1], [9, 2, 9], VOCABULARY.__getitem__, EMPTY) == [9, 2, 9]


# ---- with the bundled model ----


class Screen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.answers: list[str] = []
        self.thoughts = ""

    def begin(self) -> None:
        self.answers.append("")

    def progress(self, done: int, total: int) -> None:
        pass

    def reasoning(self, text: str) -> None:
        self.thoughts += text

    def content(self, text: str) -> None:
        self.answers[-1] += text

    def tool(self, line: str, *, is_asked: bool = False) -> None:
        pass

    def end(self, remark: str | None = None, *, goes_on: bool = False) -> None:
        self.said.append(f"end: {remark}")

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(f"warning: {text}")

    def fail(self, what: str, hint: str | None = None) -> None:
        self.said.append(f"failed: {what} ({hint})")


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with room for 8,192 tokens, which it was not made for: only counts matter here."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with resources.as_file(resources.files("nanovllm_cli") / "assets" / "tiny") as tiny:
        shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def llm(longer: Path) -> Iterator[LLM]:
    model = LLM(longer, config=EngineConfig(max_num_seqs=1, threads=2))
    yield model
    model.close()


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """A context of 1,024 tokens."""
    with LLM("tiny", config=EngineConfig(max_num_seqs=1, threads=2, max_model_len=1024)) as model:
        yield model


@pytest.fixture
def chat(llm: LLM, tmp_path: Path) -> Chat:
    return open_chat(llm, tmp_path)


def local(chat: Chat) -> LocalModel:
    assert isinstance(chat.model, LocalModel)
    return chat.model


def open_chat(llm: LLM, folder: Path, **more: object) -> Chat:
    given = {"max_tokens": 12, "seed": 5}
    model = LocalModel(lambda name: lambda: Loaded(llm, 0.0), Settings(given, **more))  # type: ignore[arg-type]
    chat = Chat(model, Sessions(folder), Screen(), interactive=True)
    chat.model.open("tiny")
    return chat


WORDS = "The small cat sat on the wall and saw a red bird fly over the quiet river. "


def read(chat: Chat) -> tuple[int, int]:
    """Of the last turn: tokens of the prompt, and how many of them were computed."""
    assert chat.statistics is not None
    return chat.statistics.prompt_tokens, chat.statistics.prompt_tokens - chat.statistics.cached_tokens


def grow(chat: Chat, tokens: int) -> None:
    if not chat.conversation.messages:
        chat.ask(WORDS * (tokens // 25))
    while chat.context_used < tokens:
        chat.ask(WORDS * 10)


def test_the_next_turn_reads_only_what_is_new(chat: Chat) -> None:
    grow(chat, 4000)
    before = chat.context_used
    question = "And what did the bird say?"
    chat.ask(question)
    prompt, computed = read(chat)
    new = prompt - before
    assert prompt > 4000
    assert (
        new < len(local(chat).prompts.prompting.llm.tokenizer.encode(question)) + 16
    )  # the question in the template's words
    assert computed < new + BLOCK_SIZE + 1  # and the block that was not full, or whose last token was not fed


def test_branches_read_only_what_is_new(chat: Chat) -> None:
    grow(chat, 1000)
    chat.ask("One?")
    chat.ask("Two?")
    for again in (chat.regenerate, lambda: chat.edit("Three?"), lambda: (chat.undo(), chat.undo(), chat.ask("Four?"))):
        again()
        prompt, computed = read(chat)
        assert prompt > 1000
        assert computed < 20 + BLOCK_SIZE + 1
    texts = [message.content for message in chat.conversation.messages if message.role == "user"]
    assert texts[-1] == "Four?"


def test_going_on_with_an_answer_reads_nothing_again(chat: Chat) -> None:
    grow(chat, 500)
    chat.ask("Tell me a story.")
    first = chat.conversation.messages[-1]
    assert first.cut == "length"
    chat.go_on()
    assert read(chat)[1] <= BLOCK_SIZE + 1
    longer = chat.conversation.messages[-1]
    assert longer.content.startswith(first.content)
    assert longer.content != first.content
    assert longer.parent == first.parent
    # what it goes on with is what one answer of that length would have been
    chat.model.settings.given["max_tokens"] = 24
    chat.model.settings.given["temperature"] = 0.0
    chat.regenerate()
    whole = chat.conversation.messages[-1].content
    chat.model.settings.given["max_tokens"] = 12
    chat.regenerate()
    chat.go_on()
    assert chat.conversation.messages[-1].content == whole


def test_the_text_is_what_the_template_makes_of_the_conversation(chat: Chat, llm: LLM) -> None:
    """transformers renders the history; the empty block is what this one leaves out of past answers."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(llm.resolved.path)
    chat.tell("You are brief. <|im_end|> is only a word here.")
    for question in ("Who are you?", "Why <think>\n\n</think>?", "Good."):
        chat.ask(question)
    history = [{"role": "system", "content": chat.conversation.system}]
    history += [message.for_template() for message in chat.conversation.messages[:-1]]
    expected = theirs.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
    ids = local(chat).prompts.next(chat.conversation.system, chat.conversation.messages[:-1]).ids
    shown = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.replace("<think>\n\n</think>\n\n", "") == expected.replace("<think>\n\n</think>\n\n", "")
    control = [i for i in ids if i == llm.tokenizer.token_to_id("<|im_end|>")]
    assert len(control) == 6  # one a message, and none that a message wrote


def test_a_session_with_its_kv_goes_on_at_once(llm: LLM, longer: Path, tmp_path: Path) -> None:
    chat = open_chat(llm, tmp_path, saves_kv=True)
    chat.keep("story")
    grow(chat, 4000)
    used = chat.context_used
    chat.end_session()
    with LLM(longer, config=EngineConfig(max_num_seqs=1, threads=2)) as other:
        later = open_chat(other, tmp_path)
        later.resume("story")
        assert later.context_used <= used
        later.ask("And then?")
        prompt, computed = read(later)
        assert prompt > 4000
        assert computed < prompt - used + BLOCK_SIZE + 1
        later.end_session()


def test_a_full_context_is_an_error_with_both_counts(small: LLM, tmp_path: Path) -> None:
    chat = open_chat(small, tmp_path)
    said = chat.display.said  # type: ignore[attr-defined]
    grow(chat, 700)
    assert not [line for line in said if line.startswith("warning")]
    grow(chat, 830)
    warnings = [line for line in said if line.startswith("warning")]
    assert len(warnings) == 1
    assert "% of the context is used" in warnings[0]
    messages = chat.conversation.messages
    with pytest.raises(PromptTooLongError, match=r"the prompt has 1\d\d\d tokens, the context holds 1024") as refused:
        chat.ask(WORDS * 20)
    assert "--context-overflow shift" in str(refused.value.hint)
    assert chat.conversation.messages == messages
    chat.model.settings.given |= {"max_tokens": None, "ignore_eos": True}
    chat.ask("short")
    assert chat.conversation.messages[-1].cut == "context"
    assert "the context of 1024 tokens is full" in said[-1]
    chat.undo()
    chat.undo()
    assert chat.context_used < 0.8 * 1024


def test_shifting_drops_the_oldest_turns_and_says_so(small: LLM, tmp_path: Path) -> None:
    chat = open_chat(small, tmp_path, shifts=True)
    chat.tell("Remember the bird.")
    grow(chat, 750)
    said = chat.display.said  # type: ignore[attr-defined]
    assert not [line for line in said if "of the conversation's beginning" in line]
    chat.ask(WORDS * 20)
    assert len([line for line in said if "of the conversation's beginning" in line]) == 1
    next_one = local(chat).prompts.next(chat.conversation.system, chat.conversation.messages)
    assert next_one.num_dropped > 0
    assert next_one.num_dropped % 2 == 0
    assert read(chat)[0] <= 1024 * 3 // 4
    assert small.tokenizer.decode(next_one.ids).count("Remember the bird.") == 1
    assert chat.conversation.messages[0].content == WORDS * (750 // 25)  # nothing is lost
    told = len(said)
    chat.ask("short")  # what was dropped stays so, and is not told twice
    assert not [line for line in said[told:] if "of the conversation's beginning" in line]
    assert read(chat)[1] < 20 + BLOCK_SIZE + 1
    with pytest.raises(PromptTooLongError):
        chat.ask(WORDS * 100)


def test_reasoning_is_kept_apart_and_can_be_gone_on_with(llm: LLM, tmp_path: Path) -> None:
    chat = open_chat(llm, tmp_path)
    chat.think("on")
    chat.model.settings.given |= {"max_tokens": 4, "temperature": 0.0}
    chat.ask("What is 2 + 3?")
    first = chat.conversation.messages[-1]
    if not first.reasoning or first.content:
        pytest.skip("the bundled model does not think aloud about this")
    chat.model.settings.given["max_tokens"] = 200
    chat.go_on()
    whole = chat.conversation.messages[-1]
    assert whole.reasoning.startswith(first.reasoning)
    assert whole.content
    assert "</think>" not in whole.content
    chat.regenerate()
    assert chat.conversation.messages[-1].content == whole.content
    assert chat.conversation.messages[-1].reasoning == whole.reasoning
    chat.ask("And 3 + 3?")
    ids = local(chat).prompts.next(None, chat.conversation.messages[:-1]).ids
    assert whole.reasoning not in llm.tokenizer.decode(ids)


class AtEnd:
    """A Reader behind what was said first."""

    def read(self, draft: str = "") -> str:
        raise EOFError

    def close(self) -> None:
        pass


def test_another_model_has_the_conversation_and_a_bad_one_leaves_the_old(llm: LLM, tmp_path: Path) -> None:
    log: list[str] = []
    broken = {"bad"}

    def find_model(name: str) -> Callable[[], Loaded]:
        if name == "typo":
            raise UsageError("no such model")

        def open_model() -> Loaded:
            log.append(name)
            if name in broken:
                raise UsageError("a broken model")
            return Loaded(llm, 0.0)

        return open_model

    llm.close, close = lambda: log.append("closed"), llm.close  # type: ignore[method-assign]
    try:
        chat = Chat(LocalModel(find_model, Settings({"max_tokens": 5})), Sessions(tmp_path), Screen(), interactive=True)
        chat.model.open("one")
        chat.ask("hello")
        chat.switch_model("two")
        with pytest.raises(UsageError, match="a broken model"):
            chat.switch_model("bad")
        assert log == ["one", "closed", "two", "closed", "bad", "two"]
        chat.ask("still there?")
        assert len(chat.conversation.messages) == 4
        kept = chat.model.kept
        with pytest.raises(UsageError, match="no such model"):
            chat.switch_model("typo")
        assert log[6:] == []
        assert chat.model.kept == kept != ()
        assert chat.lost is None
        broken.add("two")
        chat.run(AtEnd(), ["/model bad", "nobody is left to answer"])
        assert (log[6:], len(chat.conversation.messages)) == (["closed", "bad", "two"], 4)
        assert chat.lost is not None
        assert "a broken model" in chat.lost.message
    finally:
        llm.close = close  # type: ignore[method-assign]
