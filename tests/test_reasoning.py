"""Reasoning and content told apart, in one piece or in many."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli.constraint import ReasoningPhase
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.reasoning import (
    HARMONY,
    MUSE,
    THINK,
    prompt_opens_reasoning,
    reasoning_format,
    split,
)
from nanovllm_cli.text.reasoning_harmony import HarmonyParser, MuseParser
from nanovllm_cli.text.reasoning_parsers import BlockParser, ReasoningParser, ReasoningSplitter

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "data" / "templates"


def run(parser: ReasoningSplitter, *pieces: str) -> tuple[str, str]:
    deltas = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


CASES = [
    ("<think>hm</think>yes", False, ("hm", "yes")),
    ("  <think>\nhm\n\nhm\n</think>\n\nyes\n", False, ("hm\n\nhm", "yes\n")),
    ("no tags at all", False, ("", "no tags at all")),
    ("  space stays", False, ("", "  space stays")),
    ("<thinking>not the tag", False, ("", "<thinking>not the tag")),
    ("yes, <think> is a tag", False, ("", "yes, <think> is a tag")),
    ("hm</think>yes", True, ("hm", "yes")),
    ("<think>hm</think>yes", True, ("hm", "yes")),  # the model repeats the tag of the prompt
    ("never closed ", True, ("never closed", "")),
    ("<think>cut </thi", False, ("cut </thi", "")),
    ("<thi", False, ("", "<thi")),
    ("<think>a</think>b</think>c <think>d</think>", False, ("a", "b</think>c <think>d</think>")),
    ("a </b> </thin </think> c", True, ("a </b> </thin", "c")),
    ("", False, ("", "")),
    ("<think></think>", False, ("", "")),
    ("orphan</think> yes", False, ("", "orphanyes")),
]


@pytest.mark.parametrize(("text", "inside", "expected"), CASES)
def test_text_is_split_at_its_tags_however_it_arrives(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert run(ReasoningParser(starts_inside=inside), text) == expected
    assert run(ReasoningParser(starts_inside=inside), *text) == expected
    for size in (2, 3, 5, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert run(ReasoningParser(starts_inside=inside), *pieces) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n", "b c"]), max_size=12),
    st.lists(st.integers(1, 9), max_size=10),
    st.booleans(),
)
def test_the_pieces_do_not_matter(parts: list[str], sizes: list[int], inside: bool) -> None:
    text, position, pieces = "".join(parts), 0, []
    for size in [*sizes, len(text)]:
        pieces.append(text[position : position + size])
        position += size
    assert run(ReasoningParser(starts_inside=inside), *pieces) == run(ReasoningParser(starts_inside=inside), text)


def test_reasoning_is_given_out_as_it_comes() -> None:
    parser = ReasoningParser()
    assert parser.push("<think>") == ("", "")
    assert parser.push("one ") == ("one", "")
    assert parser.push("two</") == (" two", "")
    assert parser.push("think>\n") == ("", "")
    assert parser.push("yes") == ("", "yes")


def test_prompts_that_open_the_block_are_recognized() -> None:
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n")
    assert not prompt_opens_reasoning("<think> in a question\n<|im_start|>assistant\n")
    assert run(THINK.parser("x<think>\n"), "hm</think>yes") == ("hm", "yes")
    closed = THINK.parser("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert run(closed, "\nthe tag </think> ends it") == ("", "the tag </think> ends it")


def test_a_whole_answer_with_a_lone_closing_tag() -> None:
    assert split("hm\n</think>\nyes") == ("hm", "yes")
    assert split("<think>hm</think>yes") == ("hm", "yes")
    assert split("just text") == ("", "just text")
    assert split("a </think> b", THINK, prompt="<think>\n\n</think>\n\n") == ("", "a </think> b")


FORMATS = {
    "{{ '<think>' }}": "think",
    "x[THINK]y": "mistral",
    "<|START_THINKING|>": "cohere",
    "<seed:think>": "seed",
    "<|channel>thought": "gemma",
    "<|channel|>analysis<|message|>": "harmony",
    "'<|start|>assistant to=self<|message|>' + reasoning": "muse",
    "<|im_start|>": None,
}


@pytest.mark.parametrize(("source", "name"), FORMATS.items())
def test_the_format_follows_from_the_template(source: str, name: str | None) -> None:
    known = reasoning_format(source)
    assert (known.name if known else None) == name


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the real templates are not here")
def test_real_templates_and_their_prompts() -> None:
    def opened(name: str, **options: bool) -> tuple[str | None, bool]:
        source = (TEMPLATES / f"{name}.jinja").read_text()
        known = reasoning_format(source)
        prompt = ChatTemplate(source).render([{"role": "user", "content": "Hi <think>"}], **options)
        return (known.name if known else None), prompt_opens_reasoning(prompt, known or THINK)

    assert opened("Qwen-Qwen3-0.6B") == ("think", False)
    assert opened("Qwen-QwQ-32B", enable_thinking=True) == ("think", True)
    assert opened("Qwen3.5-4B") == ("think", True)
    assert opened("Qwen3.5-4B", enable_thinking=False) == ("think", False)
    assert opened("deepseek-ai-DeepSeek-V3.1", thinking=True) == ("think", True)
    assert opened("openai-gpt-oss-120b") == ("harmony", False)
    assert opened("Qwen-Qwen2.5-7B-Instruct") == (None, False)
    assert opened("google-gemma-2-2b-it") == (None, False)


HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>The user says hi.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
)
LONG = "<|channel|>analysis<|message|>a<|start|>{}<|message|>b"
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARMONY_ANSWER, ("The user says hi.", "Hello!")),
        (HARMONY_ANSWER.removesuffix("<|return|>"), ("The user says hi.", "Hello!")),
        ("<|channel|>analysis<|message|>cut", ("cut", "")),
        ("<|channel|>analysis<|message|>a<|end|>" + CALL, ("a", CALL)),
        ("<|channel|>commentary<|message|>I will look.<|end|>" + CALL, ("", "I will look." + CALL)),
        ("<|channel|>final<|message|>a < b <| c<|return", ("", "a < b <| c<|return")),
        ("no format at all", ("", "no format at all")),
        ("<|channel|>analysis", ("", "")),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|end|>", ("a", "")),
        ("<|start|>assistant to=assistant<|channel|>final<|message|>b", ("", "b")),
        ("x" * 5000, ("", "x" * 5000)),
        ("<|channel|>" + "x" * 5000, ("", "<|channel|>" + "x" * 5000)),
        ("<|channel|>final<|message|>a<|channel|>" + "x" * 5000, ("", "a<|channel|>" + "x" * 5000)),
        (LONG.format("x" * 4076), ("a", "b")),
        (LONG.format("x" * 4077), ("a", "<|start|>" + "x" * 4077 + "<|message|>b")),
    ],
)
def test_harmony_channels(text: str, expected: tuple[str, str]) -> None:
    assert run(HarmonyParser(), text) == expected
    assert run(HarmonyParser(), *text) == expected
    assert run(HARMONY.parser("<|start|>assistant"), text) == expected


def test_headers_without_messages_are_read_in_time() -> None:
    """An answer that says a mark, and goes on, was read forever, and everybody waited."""
    for text in ("<|channel|>", "<|channel|>analysis<|message|", "<|start|>"):
        start = time.process_time()
        found = run(HarmonyParser(), text * 20_000)
        assert time.process_time() - start < 5
        pieces = run(HarmonyParser(), *[text] * 20_000)
        assert found == pieces
        assert text * 19_000 in found[1]


def test_harmony_prompt_that_begins_a_channel() -> None:
    parser = HARMONY.parser("<|start|>assistant<|channel|>analysis<|message|>")
    assert run(parser, "hm<|end|><|start|>assistant<|channel|>final<|message|>yes") == ("hm", "yes")


TO_SELF, TO_USER = " to=self<|message|>", " to=user<|message|>"
TO_TOOL = '<|start|>assistant to=now<|message|><atem:function_calls>\n</atem:function_calls><|eot|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TO_SELF}hm<|eom|><|start|>assistant{TO_USER}yes<|eot|>", ("hm", "yes")),
        (f"{TO_SELF}a<|eom|><|start|>assistant{TO_SELF}b<|eom|><|start|>assistant{TO_USER}yes", ("ab", "yes")),
        (f"{TO_USER}yes, to=self <|eot|>", ("", "yes, to=self ")),
        ("<|message|>yes<|eot|>", ("", "yes")),
        (f"{TO_SELF[1:]}hm<|eom|><|start|>assistant{TO_USER}yes<|eot|>", ("hm", "yes")),
        (f"{TO_SELF}so it must end{TO_USER}yes<|eot|>", ("so it must end", "yes")),
        (f"{TO_SELF}cut to=user<|mess", ("cut to=user<|mess", "")),
        (f"{TO_SELF}hm<|eom|>{TO_TOOL}", ("hm", TO_TOOL)),
        (f"{TO_SELF}hm<|eom|><|start|>assistant to=us", ("hm", "")),
        ("no format at all", ("", "no format at all")),
        ("x" * 5000, ("", "x" * 5000)),
    ],
)
def test_messages_of_a_muse(text: str, expected: tuple[str, str]) -> None:
    """As llama.cpp's template of Muse Glimmer has them."""
    assert run(MUSE.parser("<|start|>assistant"), text) == expected
    assert run(MUSE.parser("<|start|>assistant"), *text) == expected
    assert split(text, MUSE, "<|start|>assistant") == expected
    for cut in range(min(len(text), 99)):
        assert run(MUSE.parser(), text[:cut], text[cut:]) == expected


def test_a_muse_whose_prompt_begins_a_message() -> None:
    assert run(MUSE.parser(f"<|start|>assistant{TO_SELF}"), f"hm<|eom|><|start|>assistant{TO_USER}yes") == ("hm", "yes")
    assert run(MUSE.parser(f"<|start|>user<|message|>{TO_SELF}<|eot|><|start|>assistant"), f"{TO_USER}yes") == ("", "yes")
    for form in (True, False):
        assert MUSE.phase(f"<|start|>assistant{TO_USER}", 9, to_content=form) is None
    for prompt, begun in (("<|start|>assistant", False), (f"<|start|>assistant{TO_SELF}", True)):
        assert MUSE.phase(prompt, 9, to_content=True) == ReasoningPhase(TO_SELF, TO_USER, True, 9)
        assert MUSE.phase(prompt, 9, to_content=False) == ReasoningPhase(TO_SELF, "<|eom|>", begun, 9)


GEMMA = reasoning_format("{{ '<|channel>thought\\n<channel|>' }}")
MODEL = "<|turn>model\n"
NO_THOUGHT = "<|channel>thought\n<channel|>"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (MODEL, "<|channel>thought\nhm\n\nhm\n<channel|>Yes.\n", ("hm\n\nhm", "Yes.\n")),
        (MODEL, f"{NO_THOUGHT}Yes.", ("", "Yes.")),
        (MODEL + NO_THOUGHT, "Yes.", ("", "Yes.")),
        (MODEL + NO_THOUGHT, f"{NO_THOUGHT}\nYes.", ("", "Yes.")),
        (f"{MODEL}<|channel>thought\n", "hm<channel|>Yes.", ("hm", "Yes.")),
        (f"{MODEL}<|channel>thought\n", "<|channel>thought\nhm<channel|>Yes.", ("hm", "Yes.")),
        (MODEL, f"Yes.\n{NO_THOUGHT}", ("", "Yes.")),
        (MODEL, "Yes.<channel|>", ("", "Yes.")),
        (MODEL, "Yes, <channel|>or <|channel>no <|channel>", ("", "Yes, or no ")),
        (MODEL, "<|channel><|channel>thought\na<channel|>b \n<|channel>thought\nc<channel|> d", ("a\n\nc", "b\n\nd")),
        (MODEL, "<|channel>thought\ncut <chann", ("cut <chann", "")),
        (MODEL, "  Yes <|chan", ("", "  Yes <|chan")),
        (MODEL, "Yes <|channel>thou", ("", "Yes ")),
        (MODEL, " \n", ("", " \n")),
        (MODEL, "", ("", "")),
    ],
)
def test_gemma_thinks_anywhere(prompt: str, text: str, expected: tuple[str, str]) -> None:
    assert GEMMA is not None
    assert run(GEMMA.parser(prompt), text) == expected
    assert run(GEMMA.parser(prompt), *text) == expected
    for cut in range(len(text)):
        assert run(GEMMA.parser(prompt), text[:cut], text[cut:]) == expected
    assert split(text, GEMMA, prompt) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<|channel>", "thought\n", "<channel|>", "<", "a", " ", "\n", "b c"]), max_size=12),
    st.lists(st.integers(1, 9), max_size=10),
)
def test_the_pieces_of_gemmas_blocks_do_not_matter(parts: list[str], sizes: list[int]) -> None:
    assert GEMMA is not None
    text, position, pieces = "".join(parts), 0, []
    for size in [*sizes, len(text)]:
        pieces.append(text[position : position + size])
        position += size
    reasoning, content = run(GEMMA.parser(), text)
    assert run(GEMMA.parser(), *pieces) == (reasoning, content)
    assert "<channel|>" not in reasoning + content
    assert len(reasoning + content) <= len(text) + 2 * len(parts)


def test_gemmas_tags_stay_in_the_text_for_the_parser() -> None:
    """The first of them is a token and a word behind it."""
    assert GEMMA is not None
    assert GEMMA.visible == ("<|channel>", "<channel|>")
    assert GEMMA.phase(MODEL + NO_THOUGHT, to_content=True) is None


@pytest.mark.parametrize(
    "piece", [" ", "<", "</think", "<thin", "a", "\n<", "<|channel>", "<channel|>", "<|channel>thought"]
)
@pytest.mark.parametrize("inside", [True, False])
def test_any_stream_is_read_in_linear_time(piece: str, inside: bool) -> None:
    blocks = BlockParser("<|channel>thought", "<channel|>", marker="<|channel>", starts_inside=inside)
    blocks.push(piece * 20_000)
    for parser in (ReasoningParser(starts_inside=inside), HarmonyParser(), MuseParser("analysis"), blocks):
        began = time.thread_time()
        for _ in range(20_000):
            parser.push(piece)
            assert parser.num_held >= 0
        parser.finish()
        assert time.thread_time() - began < 2
