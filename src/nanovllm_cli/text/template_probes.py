"""What a chat template does with messages, tools, calls and results, found by trying: templates don't say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from nanovllm_cli.errors import TemplateError
from nanovllm_cli.text.chat_template import ChatTemplate

EMPTY_TOOL: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""What OpenAI's clients may leave out of a tool."""
RESULTS = "tool_responses"
_ASKED: dict[str, Any] = {"role": "user", "content": "where?"}
_KEEPS_NULL = re.compile(r"[.'\"]content['\"\]]*\s+is\s+not\s+none")


def keeps_null(template: ChatTemplate) -> bool:
    """Whether it tells a message without content from one whose content is empty."""
    return _KEEPS_NULL.search(template.source) is not None


@lru_cache(maxsize=16)
def reads_tools(template: ChatTemplate) -> bool:
    """Whether a template writes the tools that it is given, or can't be asked."""
    tool = {"name": "needle", "description": "needle", "parameters": EMPTY_TOOL["parameters"]}
    with_it = _rendered(template, [_ASKED], tools=[{"type": "function", "function": tool}])
    return "needle" in with_it if with_it is not None else _rendered(template, [_ASKED]) is None


@lru_cache(maxsize=16)
def writes_calls(template: ChatTemplate) -> bool:
    """Whether a template writes the calls of a message, or anything of them."""
    calls = [("haystack", _pin(template))]
    return writes(template, "haystack", calls) or writes(template, "needle", calls)


@lru_cache(maxsize=16)
def writes_results(template: ChatTemplate) -> bool:
    """Whether a template writes a tool's result, behind a call."""
    result = {"role": "tool", "name": "haystack", "tool_call_id": "abcdefgh0", "content": "needlework"}
    return "needlework" in (_rendered(template, [_ASKED, _with_pin(template), result]) or "")


@lru_cache(maxsize=16)
def refused_turns(template: ChatTemplate) -> frozenset[str]:
    """What a template refuses or leaves out, by trying: roles of which it writes one message and not two in a row; "first
    system", where it takes none of a system; "later system" and "later developer", where it takes one at the beginning alone;
    "user behind a result", where an answer has to come first."""
    tried = {
        "system": ("su", "ssu"),
        "user": ("u", "uu"),
        "assistant": ("uau", "uaau"),
        "first system": ("u", "su"),
        "later system": ("suau", "suasu"),
        "later developer": ("suau", "sduadu"),
        "user behind a result": ("uctau", "uctu"),
    }
    refused = {name for name, (one, other) in tried.items() if _takes_roles(template, one) and not _takes_roles(template, other)}
    return frozenset(refused | {"system", "later system"} if "first system" in refused else refused)


def _takes_roles(template: ChatTemplate, initials: str) -> bool:
    kinds: dict[str, dict[str, Any]] = {
        "s": {"role": "system"},
        "d": {"role": "developer"},
        "u": {"role": "user"},
        "a": {"role": "assistant"},
        "c": _with_pin(template) if "c" in initials else {},
        "t": {"role": "tool", "name": "haystack", "tool_call_id": "abcdefgh0"},
    }
    messages = [{"content": f"needle{place}", **kinds[initial]} for place, initial in enumerate(initials)]
    prompt = _rendered(template, messages)
    return prompt is not None and all((message["content"] or "") in prompt for message in messages)


@lru_cache(maxsize=16)
def writes_one_call(template: ChatTemplate) -> bool:
    """Whether a template refuses a second call in a message, or leaves it out: tried out."""
    arguments = _pin(template)
    one, two = ("haystack", arguments), ("pincushion", arguments)
    return writes(template, "haystack", [one]) and not writes(template, "pincushion", [one, two])


@lru_cache(maxsize=16)
def writes_content_last(template: ChatTemplate) -> bool:
    """Whether a template that has a place for results in a message, as Gemma 4's have, writes what it says behind its calls."""
    if RESULTS not in template.source:
        return False
    written = _rendered(template, [_ASKED, {**_with_pin(template), "content": "straw"}]) or ""
    return -1 < written.find("needle") < written.find("straw")


@lru_cache(maxsize=16)
def refuses_thoughts_beside_content(template: ChatTemplate) -> bool:
    """Whether a template refuses a message with calls that has both, as gpt-oss's does: it writes either as analysis."""
    calling = {**_with_pin(template), "content": "straw"}
    thinking = {**calling, "reasoning_content": "hay"}
    return _rendered(template, [_ASKED, thinking]) is None and _rendered(template, [_ASKED, calling]) is not None


@lru_cache(maxsize=16)
def wants_results_within(template: ChatTemplate) -> bool:
    """Whether a template writes the result of a call otherwise where it is part of the call's message, as Gemma 4's first do."""
    if RESULTS not in template.source:
        return False
    calling = _with_pin(template)
    apart = _rendered(template, [_ASKED, calling, {"role": "tool", "tool_call_id": "abcdefgh0", "content": "straw"}])
    within = _rendered(template, [_ASKED, {**calling, RESULTS: [{"name": "haystack", "response": "straw"}]}])
    return within is not None and within != apart


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except TemplateError:
        return None


@lru_cache(maxsize=16)
def needed_of_tools(template: ChatTemplate) -> frozenset[str]:
    """What of a tool a template fails without, although OpenAI's clients may leave it out: tried out."""
    if not _takes(template, {"name": "needle", **EMPTY_TOOL}):
        return frozenset()
    found = (name for name in EMPTY_TOOL if not _takes(template, {"name": "needle", **EMPTY_TOOL, name: None}))
    return frozenset(found)


def _takes(template: ChatTemplate, function: Mapping[str, Any]) -> bool:
    said = {name: value for name, value in function.items() if value is not None}
    return _rendered(template, [_ASKED], tools=[{"type": "function", "function": said}]) is not None


@lru_cache(maxsize=16)
def wants_text_arguments(template: ChatTemplate) -> bool:
    """Whether a template writes the arguments of calls only if they are text: tried out, because templates don't say."""
    as_object = writes(template, "needle", [("haystack", {"needle": "pin"})])
    return not as_object and writes(template, "needle", [("haystack", '{"needle": "pin"}')])


@lru_cache(maxsize=16)
def takes_broken_arguments(template: ChatTemplate) -> bool:
    """Whether a template writes arguments that are text and no JSON, or no calls at all."""
    written = writes(template, "needle", [("haystack", '{"needle')])
    return written or not writes(template, "needle", [("haystack", _pin(template))])


def writes(template: ChatTemplate, word: str, calls: Sequence[tuple[str, Any]]) -> bool:
    """Whether a word of some calls is in what a template writes of them."""
    return word in (_rendered(template, [_ASKED, _calling(template, calls)], add_generation_prompt=False) or "")


def _calling(template: ChatTemplate, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    plain = [
        {"id": f"abcdefgh{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None if keeps_null(template) else "", "tool_calls": plain}


def _with_pin(template: ChatTemplate) -> dict[str, Any]:
    return _calling(template, [("haystack", _pin(template))])


def _pin(template: ChatTemplate) -> Any:
    return '{"needle": "pin"}' if wants_text_arguments(template) else {"needle": "pin"}
