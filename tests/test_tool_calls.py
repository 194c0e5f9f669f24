"""Tool calls of every family, whole and in pieces, sound and broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.text.answer_format import AnswerFormat, answer_format
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.messages import template_messages, template_tools
from tool_answers import MESSAGES, NOW, ONE, TOOL_LIST, TOOLS, answer, form, read

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "data" / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

WEATHER = ("weather", {"city": "Köln", "days": 3})
TRICKY: dict[str, Any] = {
    "city": 'K"ö\\ln }]> </tool_call> 東京 \U0001f600\n{"a": 1}',
    "days": -3,
    "exact": True,
    "factor": 2.5e-7,
    "place": {"deep": [1, None, {"b": "]"}], "": False},
    "tags": ["a", "'", ""],
    "note": None,
    "unit": "C",
    "level": 2,
}


# ---- every family ----


@pytest.mark.parametrize("name", ONE)
def test_a_call(name: str) -> None:
    assert answer(form(name), ONE[name]) == ("", "", [WEATHER])


@pytest.mark.parametrize("name", ONE)
def test_a_call_behind_reasoning_that_speaks_of_calls(name: str) -> None:
    if name in MESSAGES:
        thinks, between = MESSAGES[name]
        text = f"{thinks}I could call weather.{between}{ONE[name]}{between.partition('<|start|>')[0]}"
        assert answer(form(name, name), text) == ("I could call weather.", "", [WEATHER])
    else:
        text = f"<think>\nNot {ONE[name]} yet.\n</think>\n\n{ONE[name]}"
        assert answer(form(name, "think"), text) == (f"Not {ONE[name]} yet.", "", [WEATHER])


@pytest.mark.parametrize("name", ONE)
def test_without_tools_or_in_reasoning_that_stays_open_nothing_is_a_call(name: str) -> None:
    if name in MESSAGES:
        return
    assert answer(form(name), ONE[name], tools=()) == ("", ONE[name], [])
    if name in ("kimi", "qwen3_coder", "deepseek_v32"):
        return
    assert answer(form(name, "think"), f"<think>{ONE[name]}") == (ONE[name], "", [])
    assert answer(form(name, "think"), ONE[name], prompt="<think>\n") == (ONE[name], "", [])


@pytest.mark.parametrize("name", ["kimi", "qwen3_coder", "deepseek_v32"])
def test_models_that_forget_to_close_their_reasoning_call_all_the_same(name: str) -> None:
    """As llama.cpp and vLLM have it, but for reasoning that is closed behind what looks like a call."""
    assert answer(form(name, "think"), f"<think>Hm.\n\n{ONE[name]}\n") == ("Hm.", "", [WEATHER])
    assert answer(form(name, "think"), f"Hm. {ONE[name]}", prompt="<think>\n") == ("Hm.", "", [WEATHER])
    assert answer(form(name, "think"), f"Hm. {ONE[name]}", prompt="<think>\n", tools=()) == (f"Hm. {ONE[name]}", "", [])
    assert answer(form(name, "think"), f"<think>{ONE[name]} or</think>No.") == (f"{ONE[name]} or", "No.", [])
    left = {"splits_reasoning": False}
    assert answer(form(name, "think"), f"<think>Hm.\n\n{ONE[name]}\n", **left) == ("", "<think>Hm.", [WEATHER])
    assert answer(form(name, "think"), f"Hm. {ONE[name]} <think>", prompt="<think>\n", **left) == ("", "Hm.<think>", [WEATHER])
    closed = f"<think>{ONE[name]} or</think>No."
    assert answer(form(name, "think"), closed, **left) == ("", closed, [])
    begun = ONE[name][: ONE[name].index("weather")]
    assert answer(form(name, "think"), f"<think>Hm. {begun}") == ("Hm.", begun, [])
    parser = form(name, "think").parser("", TOOLS)
    assert parser.push(f"<think>Hm. {ONE[name]}").reasoning == "Hm."
    assert parser.num_held == len(ONE[name]) + 1
    parser = form(name, "think").parser("", TOOLS, splits_reasoning=False)
    assert parser.push(f"<think>Hm. {ONE[name]}").content == "<think>Hm."
    assert parser.num_held == len(ONE[name]) + 1


@pytest.mark.parametrize("name", ONE)
def test_a_call_that_is_cut_off_stays_as_far_as_it_came(name: str) -> None:
    """Whatever its length, the answer is the content so far, or a call whose arguments begin the whole ones."""
    _, _, [(tool, whole)] = read(form(name).parser("", TOOLS), ONE[name])
    for length in range(len(ONE[name])):
        for pieces in ([ONE[name][:length]], list(ONE[name][:length])):
            _, content, calls = read(form(name).parser("", TOOLS), *pieces)
            if calls:
                assert [call for call, _ in calls] == [tool]
                assert whole.startswith(calls[0][1])
                assert content == ""
            elif name not in MESSAGES:
                assert content == ONE[name][:length]


@pytest.mark.parametrize("name", ONE)
def test_only_the_first_call_where_they_are_not_parallel(name: str) -> None:
    text = ONE[name] + MESSAGES.get(name, ("", ""))[1] + ONE[name]
    assert answer(form(name), text, parallel=False)[2] == [WEATHER]


@pytest.mark.parametrize("name", ONE)
def test_arguments_stream(name: str) -> None:
    """The city is given out before it is complete."""
    parser = form(name).parser("", TOOLS)
    before = "".join(call.arguments for char in ONE[name].partition("ln")[0] for call in parser.push(char).calls)
    assert before == '{"city": "Kö'
    whole = form(name).parser("", TOOLS, whole_calls=True)
    assert not any(whole.push(char).calls for char in ONE[name].partition("ln")[0])


# ---- templates ----


def rendered(name: str, calls: list[dict[str, Any]], **message: Any) -> tuple[AnswerFormat, str, str]:
    """The format, the prompt and the answer that the model's own template writes for calls."""
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), eos_token="<END>")
    asked: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
    said = {"role": "assistant", "content": None, "tool_calls": calls, **message}
    tools = [NOW] if name.startswith("Nous") else TOOL_LIST  # that template can't write two types
    shaped = template_tools(tools, template)
    prompt = template.render(template_messages(asked, template, tools=tools), tools=shaped)
    talk = template_messages([*asked, said], template, tools=tools)
    full = template.render(talk, tools=shaped, add_generation_prompt=False)
    for opened in (
        "<think>\n</think>",
        "<think></think>",
        "<think>\n",
    ):  # written into the prompt, not into the history
        if not full.startswith(prompt):
            prompt = prompt.removesuffix(opened)
    assert full.startswith(prompt)
    return answer_format(template.source), prompt, full[len(prompt) :]


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize("left_out", ["description", "parameters"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tool_may_leave_out_what_is_optional(name: str, left_out: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())
    function = {**NOW["function"], left_out: None}
    for said in (function, {key: value for key, value in function.items() if value is not None}):
        tools = template_tools([{"type": "function", "function": said}], template)
        prompt = template.render([{"role": "user", "content": "How is it?"}], tools=tools)
        assert prompt.count("None") == 0


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize("name", NAMES)
def test_roles_may_follow_themselves(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())
    words = {"kiwi": "system", "lime": "system", "mango": "user", "nut": "user", "olive": "assistant", "pear": "assistant"}
    words |= {"quince": "user", "rue": "assistant", "sorrel": "system", "tansy": "user"}
    talk = [{"role": role, "content": word} for word, role in words.items()]
    prompt = template.render(template_messages(talk, template), tools=[NOW] if name.startswith("Nous") else None)
    assert set(words) <= set(re.findall("[a-z]+", prompt))


ENDS = (
    "<END>", "<|im_end|>", "<|eot_id|>", "<|call|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "\n"
)  # fmt: skip


def without_end(answered: str) -> str:
    """An answer as the parser gets it: the token that ends it is not text."""
    while answered.endswith(ENDS):
        for end in ENDS:
            answered = answered.removesuffix(end)
    return answered


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_comes_back(name: str) -> None:
    one, two = call("weather", TRICKY, "call_1"), call("now", {}, "abcDEF123")
    for calls in ([one], [two], [one, two], [two, one, two]):
        if len(calls) > 1 and name.startswith(("meta-llama", "openai")):
            continue  # they write one call a turn
        known, prompt, text = rendered(name, calls)
        expected = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
        assert answer(known, without_end(text), prompt) == ("", "", expected)


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize(
    "name",
    [
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "GLM-4.6",
        "deepseek-ai-DeepSeek-V3.1",
    ],
)
def test_content_before_calls_comes_back(name: str) -> None:
    known, prompt, text = rendered(name, [call("now", {}, "call_1")], content="Let me look.")
    assert answer(known, without_end(text), prompt)[1:] == ("Let me look.", [("now", {})])


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
def test_the_format_follows_from_the_template() -> None:
    found = {name: answer_format((TEMPLATES / f"{name}.jinja").read_text()).name for name in NAMES}
    assert found == {
        "GLM-4.6": "glm",
        "HuggingFaceTB-SmolLM3-3B": "json",
        "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
        "Qwen-QwQ-32B": "hermes",
        "Qwen-Qwen2.5-7B-Instruct": "hermes",
        "Qwen-Qwen3-0.6B": "hermes",
        "Qwen3-Coder": "qwen3_coder",
        "Qwen3.5-4B": "qwen3_coder",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_r1",
        "deepseek-ai-DeepSeek-V3.1": "deepseek",
        "google-gemma-2-2b-it": "json",
        "ibm-granite-granite-3.3-2B-Instruct": "granite",
        "meta-llama-Llama-3.1-8B-Instruct": "llama",
        "meta-llama-Llama-3.2-3B-Instruct": "llama",
        "microsoft-Phi-3.5-mini-instruct": "json",
        "mistralai-Mistral-Nemo-Instruct-2407": "mistral_list",
        "openai-gpt-oss-120b": "harmony",
    }
