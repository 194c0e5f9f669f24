"""Conversations as clients send them, made into what chat templates read.

Clients speak OpenAI's form: content that is null or a list of parts, arguments of calls as JSON text, `developer` messages, nulls
wherever something is not there. Templates were written for plain text and objects, and each knows some of it. Roles that a
template knows by name pass.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.content_parts import IMAGES, Content, ImagePart, content_of, take_images, together
from nanovllm_cli.text.template_probes import (
    EMPTY_TOOL,
    RESULTS,
    keeps_null,
    needed_of_tools,
    refused_turns,
    refuses_thoughts_beside_content,
    takes_broken_arguments,
    wants_results_within,
    wants_text_arguments,
    writes_content_last,
    writes_one_call,
)
from nanovllm_cli.text.told_tools import tells_tools, told
from nanovllm_cli.text.tool_calls import LETTERS
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_formats import tool_format

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INSTRUCT = frozenset({"system", "developer"})
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def template_messages(
    messages: Any,
    template: ChatTemplate,
    images: list[ImagePart] | None = None,
    reads: Collection[str] = (IMAGES,),
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    known: ToolFormat | None = None,
) -> list[dict[str, Any]]:
    """The conversation as `template` wants it. images: gets those that messages have, in their order, and sounds, as far as
    `reads` says so; None where there may be none.

    Text parts become one text, a line each; beside images they stay parts. Arguments become objects, or text where the template
    wants that; those of a call that was no JSON stay text. Ids of calls become nine letters where the template insists on it, the
    same for a call and its result. Where it writes one call a message, each call of several gets a message of its own, and its
    result behind it. Where it refuses what was said beside reasoning and calls, that is the end of the reasoning. Where it writes
    content behind calls, what was said before them is a message of its own; where it wants results in the message of their calls,
    they are there. Where it refuses two messages of a role in a row, or leaves one out,
    they become one; where it does so with a system's, that is the beginning of the user's behind it, or a user's by itself.
    Behind the first, a developer's that it leaves out is a system's. Where it wants an answer between a tool's result and a
    user's message, there is an empty one. What it would leave out of tools, calls and results is told in the messages, in the
    form of `known`, or of what the template asks for.

    Raises UsageError for what is not a conversation, UnsupportedError for parts of other kinds.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of objects")
    if not messages:
        raise UsageError("there are no messages", 'give at least one: {"role": "user", "content": "…"}')
    reads = () if images is None else reads
    plain = [_message(message, f"messages[{place}]", template, reads) for place, message in enumerate(messages)]
    plain = told(plain, tools, template, known or tool_format(template.source))
    if any(map(_thinks_and_says, plain)) and refuses_thoughts_beside_content(template):
        plain = [_said_in_thought(message) if _thinks_and_says(message) else message for message in plain]
    if any(len(message.get("tool_calls", ())) > 1 for message in plain) and writes_one_call(template):
        plain = _one_call_each(plain)
    if any("tool_calls" in message and message["content"] for message in plain) and writes_content_last(template):
        plain = [part for message in plain for part in _content_first(message)]
    if any(message["role"] == "tool" for message in plain) and wants_results_within(template):
        plain = _results_within(plain)
    plain = _in_turns(plain, template)
    if images is not None:
        images += take_images(plain)
    return plain


def template_tools(
    tools: Sequence[Mapping[str, Any]], template: ChatTemplate, known: ToolFormat | None = None
) -> list[dict[str, Any]] | None:
    """Tools as `template` wants them: nulls are left out, and what it fails without is there, and empty. None where the messages
    tell them."""
    if tells_tools(template, known or tool_format(template.source)):
        return None
    needed = needed_of_tools(template)
    return [_tool(tool, needed) for tool in tools]


def _tool(tool: Mapping[str, Any], needed: frozenset[str]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    said = {name: value for name, value in function.items() if value is not None}
    return {**tool, "function": {**said, **{name: EMPTY_TOOL[name] for name in EMPTY_TOOL if name in needed - said.keys()}}}


def _message(message: Any, where: str, template: ChatTemplate, reads: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is not an object with a role and a content")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["role"] = _role(plain.get("role"), where, template.source)
    if isinstance(plain.get("reasoning"), str):  # vLLM's name; templates know the other one
        plain.setdefault("reasoning_content", plain["reasoning"])
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _calls(calls, where, template)
    if "content" in plain:
        plain["content"] = content_of(plain["content"], where, reads=reads)
    elif calls and plain["role"] == "assistant" and keeps_null(template):
        plain["content"] = None
    else:
        plain["content"] = ""
    if isinstance(plain.get("tool_call_id"), str):
        plain["tool_call_id"] = _call_id(plain["tool_call_id"], template)
    return plain


def _role(role: Any, where: str, source: str) -> str:
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role", f"known: {', '.join(ROLES)}")
    if role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
        raise UsageError(f"{where} has the unknown role {role[:64]!r}", f"known: {', '.join(ROLES)}")
    if role == "developer" and role not in source:
        return "system"
    return "tool" if role == "function" else role


def _calls(calls: Any, where: str, template: ChatTemplate) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise UsageError(f"the tool_calls of {where} are not a list")
    return [_call(call, f"{where}.tool_calls[{place}]", template) for place, call in enumerate(calls)]


def _call(call: Any, where: str, template: ChatTemplate) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} has no function with a name", 'write {"function": {"name": "…", "arguments": "{}"}}')
    arguments = _arguments(function.get("arguments"), where, template)
    plain = {**call, "type": "function", "function": {**function, "arguments": arguments}}
    if isinstance(plain.get("id"), str):
        plain["id"] = _call_id(plain["id"], template)
    return plain


def _arguments(given: Any, where: str, template: ChatTemplate) -> Any:
    """What a call was given: an object, or the JSON text of one; nothing is an empty one. Other text is a model's own broken
    call, and stays the text that it is, unless it is lost where an object would not be."""
    value = given
    if given is None or (isinstance(given, str) and not given.strip()):
        value = {}
    elif isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False) if wants_text_arguments(template) else value
    if isinstance(given, str) and takes_broken_arguments(template):
        return given
    takes = ", and this chat template takes nothing else" if isinstance(given, str) else ""
    raise UsageError(f"the arguments of {where} are not a JSON object{takes}", "leave out a call that was cut off")


def _call_id(given: str, template: ChatTemplate) -> str:
    if tool_format(template.source).id_chars != 9 or _SHORT_ID.fullmatch(given):
        return given
    digest = hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=9).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest)


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    apart: list[dict[str, Any]] = []
    waiting: dict[Any, deque[dict[str, Any]]] = {}  # by id: a message's calls, but the first, whose results have not come
    for message in messages:
        if message["role"] != "tool":
            apart += chain.from_iterable(waiting.values())
            waiting = {}
        elif found := waiting.get(_id_of(message, "tool_call_id")):
            apart.append(found.popleft())
        first, *others = message.get("tool_calls") or [None]
        apart.append(message if not others else {**message, "tool_calls": [first]})
        for call in others:
            alone = {"role": "assistant", "content": "", "tool_calls": [call]}
            waiting.setdefault(_id_of(call, "id") or len(waiting), deque()).append(alone)
    return [*apart, *chain.from_iterable(waiting.values())]


def _content_first(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "tool_calls" in message and message["content"]:
        yield {"role": message["role"], "content": message["content"]}
        message = {**message, "content": ""}
    yield message


def _thinks_and_says(message: Mapping[str, Any]) -> bool:
    """Before it calls."""
    texts = message.get("reasoning_content"), message.get("content")
    return "tool_calls" in message and all(isinstance(text, str) and text for text in texts)


def _said_in_thought(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": f"{message['reasoning_content']}\n\n{message['content']}", "content": ""}


def _results_within(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content of such a message is the answer to the results."""
    within: list[dict[str, Any]] = []
    for message in messages:
        calling = within[-1] if within and "tool_calls" in within[-1] else None
        if message["role"] == "tool" and calling is not None and isinstance(message["content"], str):  # images stay outside
            results = calling.setdefault(RESULTS, [])
            name = _name_of_result(message, calling["tool_calls"], len(results))
            results.append({"name": name, "response": message["content"]})
        elif calling is not None and RESULTS in calling and not calling["content"] and _is_answer(message):
            calling["content"] = message["content"]
        else:
            within.append(message)
    return within


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _name_of_result(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], place: int) -> Any:
    """Of the call with its id; what it says itself; that of the call in its place."""
    call_id = _id_of(message, "tool_call_id")
    by_id = [call["function"]["name"] for call in calls if call_id is not None and call.get("id") == call_id]
    return next(iter(by_id), None) or message.get("name") or calls[min(place, len(calls) - 1)]["function"]["name"]


def _id_of(plain: Mapping[str, Any], name: str) -> str | None:
    return plain[name] if isinstance(plain.get(name), str) else None


def _in_turns(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Only texts are put together: a message with more to it than its content stays as it is."""
    roles = [message["role"] for message in messages]
    if _INSTRUCT.isdisjoint(roles) and not any(map(_may_be_refused, messages, messages[1:])):
        return messages
    refused = refused_turns(template)
    turns: list[tuple[dict[str, Any], list[Content]]] = []  # with texts that are joined once: there may be 100,000 of them
    for message in _with_roles_that_are_read(messages, refused):
        turn, texts = message, [message["content"]]
        while turns and _are_one(turns[-1][0], turn, refused, at_start=len(turns) == 1):
            before, texts_before = turns.pop()
            texts_before += texts
            turn, texts = turn if turn["role"] == "user" else before, texts_before
        turns.append((turn, texts))
    joined = [turn if len(texts) == 1 else {**turn, "content": together(texts)} for turn, texts in turns]
    return list(_with_answers(joined)) if "user behind a result" in refused else joined


def _may_be_refused(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first["role"] == second["role"] or _is_unanswered(first, second)


def _is_unanswered(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return second["role"] == "user" and (first["role"] == "tool" or "tool_calls" in first)


def _with_answers(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Where a user interrupted the assistant, behind a tool's result or a call without one, what it said is nothing."""
    for message, following in zip_longest(messages, messages[1:]):
        yield message
        if following and _is_unanswered(message, following):
            yield {"role": "assistant", "content": ""}


def _with_roles_that_are_read(messages: list[dict[str, Any]], refused: frozenset[str]) -> list[dict[str, Any]]:
    """Behind the first, a developer's that the template leaves out is a system's. A system's that it leaves out is a user's, if
    none follows that it could be the beginning of."""
    if "later developer" in refused:
        behind = ({**each, "role": "system"} if each["role"] == "developer" else each for each in messages[1:])
        messages = [messages[0], *behind]
    read: list[dict[str, Any]] = []
    at_start = True
    for message, following in zip_longest(messages, messages[1:]):
        at_start = at_start and message["role"] in _INSTRUCT
        where = "first system" if at_start and following else "later system"
        begins = following and following["role"] in ("system", "user") and _is_text(message) and _is_text(following)
        is_lost = message["role"] == "system" and where in refused and not begins and len(messages) > 1
        read.append({**message, "role": "user"} if is_lost else message)
    return read


def _is_text(message: Mapping[str, Any]) -> bool:
    return message.keys() <= {"role", "content"}


def _are_one(first: Mapping[str, Any], second: Mapping[str, Any], refused: frozenset[str], *, at_start: bool) -> bool:
    if not (_is_text(first) and _is_text(second)):
        return False
    if first["role"] == second["role"] or (first["role"] == "developer" and second["role"] == "system"):
        return second["role"] in refused
    return (first["role"], second["role"]) == ("system", "user") and ("first" if at_start else "later") + " system" in refused
