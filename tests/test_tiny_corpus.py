"""The grammar that the bundled model is trained on: deterministic, disjoint splits, everything in it parses."""

import json
import re
import sys
from itertools import islice
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tiny_chat as chats
import tiny_corpus as corpus
import tiny_stories as stories
import tiny_tools as tools
import tiny_words as words

TOOL_CALL = re.compile(r"<tool_call>\n(\{.*\})\n</tool_call>")


@pytest.fixture(scope="module")
def train() -> list[corpus.Document]:
    return list(islice(corpus.documents("train", seed=7), 1500))


@pytest.fixture(scope="module")
def held_out() -> list[corpus.Document]:
    return list(islice(corpus.documents("held_out", seed=7), 60))


def texts(documents: list[corpus.Document]) -> list[str]:
    return [document.text for document in documents]


def test_the_same_seed_gives_the_same_documents(train: list[corpus.Document]) -> None:
    assert list(islice(corpus.documents("train", seed=7), 50)) == train[:50]
    assert texts(list(islice(corpus.documents("train", seed=8), 50))) != texts(train[:50])


def test_held_out_documents_are_never_trained_on(train: list[corpus.Document], held_out: list[corpus.Document]) -> None:
    assert not set(texts(train)) & set(texts(held_out))
    assert all(corpus.is_held_out(text) for text in texts(held_out))
    assert not any(corpus.is_held_out(text) for text in texts(train))


def test_documents_hardly_repeat(train: list[corpus.Document]) -> None:
    assert len(set(texts(train))) > 0.9 * len(train)


def test_every_kind_occurs(train: list[corpus.Document]) -> None:
    assert {document.kind for document in train} == set(corpus.KINDS)
    assert any(document.thinking for document in train)
    assert any(document.tools and document.kind == "chat" for document in train), "tools that are not needed"


def test_segments_make_up_the_text_and_the_answer_is_learnt(train: list[corpus.Document]) -> None:
    for document in train:
        learnt = [segment for segment in document.segments if segment.weight == corpus.ANSWER_WEIGHT]
        assert learnt, document.text
        assert learnt[-1].text.endswith((corpus.TURN_END, corpus.END_OF_TEXT))
        assert not learnt[-1].skip_first


def test_tool_calls_name_a_given_tool_and_its_arguments(train: list[corpus.Document]) -> None:
    seen = 0
    for document in train:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in document.tools}
        for answer in (segment.text for segment in document.segments if segment.weight == corpus.ANSWER_WEIGHT):
            for body in TOOL_CALL.findall(answer):
                call = json.loads(body)
                assert list(call) == ["name", "arguments"]
                parameters = schemas[call["name"]]
                assert set(parameters.get("required", ())) <= set(call["arguments"]) <= set(parameters["properties"])
                seen += 1
    assert seen > 100


def test_listed_tools_are_functions_as_json(train: list[corpus.Document]) -> None:
    for document in train:
        if document.tools:
            listed = document.text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
            assert [json.loads(line) for line in listed] == list(document.tools)
            assert all(tool["type"] == "function" for tool in document.tools)


def test_arguments_stand_in_what_the_user_said() -> None:
    for i in range(300):
        request = tools.request(Random(i))
        for value in request.call.values():
            spoken = str(value).split() if isinstance(value, str) else [str(value)]
            assert all(word in request.user for word in spoken), request


def test_reserved_tool_names_never_occur_in_training(train: list[corpus.Document]) -> None:
    reserved = {tools.held_out(Random(i)).name for i in range(200)}
    named = {tool["function"]["name"] for document in train for tool in document.tools}
    assert len(reserved) > 100
    assert not reserved & named


def test_json_answers_parse_and_have_the_keys_asked_for() -> None:
    for i in range(300):
        turn = chats.json_object(Random(i), "Tiny")[0]
        value = json.loads(turn.answer.removeprefix("```json\n").removesuffix("\n```"))
        assert isinstance(value, dict)
        assert all(key in turn.think for key in value)


def test_code_answers_are_python() -> None:
    for i in range(100):
        turn = chats.code(Random(i), "Tiny")[0]
        (block,) = re.findall(r"```python\n(.*?)\n```", turn.answer, re.S)
        compile(block, "answer", "exec")


def test_sums_are_right() -> None:
    seen = 0
    for i in range(200):
        for turn in chats.sums(Random(i), "Tiny"):
            x, op, y, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (-?\d+)", turn.answer).groups()  # type: ignore[union-attr]
            assert {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[op] == int(result)
            seen += 1
    assert seen > 200


def test_stories_keep_their_hero_and_leave_no_blank() -> None:
    for i in range(300):
        story = stories.tell(Random(i))
        assert story.text.count(story.hero) >= 2
        assert story.kind in story.text
        assert not re.search(r"[{}]|\b[Aa] [aeiou](?!ni)", story.text), story.text
        assert story.text[-1] in '.!"'


@pytest.mark.parametrize("about", ["fox", "dragon", "castle", "flonder", *words.THINGS[:5]])
def test_a_story_is_about_what_was_asked(about: str) -> None:
    assert all(about in stories.tell(Random(i), about).text for i in range(50))


def test_a_story_can_be_given_a_name() -> None:
    assert all("Zorbax" in stories.tell(Random(i), "cat", name="Zorbax").text for i in range(20))
