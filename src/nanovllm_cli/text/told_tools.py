"""Tools, calls and results for chat templates that know nothing of them: told in the messages, as text.

A template may list the tools and leave out an assistant's calls, or the other way round: each is looked at by itself. Calls are
written as the family's format has it, and read from answers by the same: what the messages tell is what `tool_formats` finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.own_text import OwnText, Piece, callers, joined, own
from nanovllm_cli.text.template_probes import reads_tools, writes_calls, writes_results
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_sections import DEEPSEEK

_TOLD = "You can call functions. Each of these lines describes one as JSON:\n\n"
_FORM = "\n\nTo call one, answer with nothing but this, with the function's own name and parameters:\n\n"
_REST = "\n\nSeveral calls follow each other. Their results come in the next message. If no function helps, answer as usual."


class _Call(NamedTuple):
    """arguments: JSON text, or what was to become that."""

    name: str
    arguments: str


_EXAMPLE = _Call("FUNCTION", '{"PARAMETER": "VALUE"}')


def tells_tools(template: ChatTemplate, known: ToolFormat) -> bool:
    """Whether the tools of a request have to be told in a message, and can be."""
    return known.name in _WRITERS and not reads_tools(template)


def told(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template: ChatTemplate, known: ToolFormat
) -> list[dict[str, Any]]:
    """A conversation in which is told what `template` would leave out. messages: as `template_messages` makes them."""
    write = _WRITERS.get(known.name)
    if write is None:
        return messages
    if known.name == "glm4" and "metadata" in template.source:
        messages = list(_with_metadata(messages))
    calls = any("tool_calls" in message for message in messages) and not writes_calls(template)
    results = any(message["role"] == "tool" for message in messages) and not writes_results(template)
    if calls or results:
        messages = list(_as_texts(messages, write if calls else None, results))
    return _with_tools(messages, tools, write) if tools and tells_tools(template, known) else messages


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], write: _Write
) -> list[dict[str, Any]]:
    """The tools in the system's message, behind what it says."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = OwnText([own(_TOLD), callers(lines), own(_FORM), *write([_EXAMPLE]), own(_REST)])
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": _with_text(messages[0]["content"], text)}, *messages[1:]]


def _as_texts(messages: Sequence[dict[str, Any]], write: _Write | None, results: bool) -> Iterator[dict[str, Any]]:
    """write: of calls, where they are to become texts. results: these are to."""
    names: dict[str, str] = {}  # of calls, by their ids
    last = ""
    for message in messages:
        calls = message.get("tool_calls", ())
        for call in calls:
            last = call["function"]["name"]
            if isinstance(call.get("id"), str):
                names[call["id"]] = last
        if calls and write is not None:
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            text = OwnText(write([_call(call["function"]) for call in calls]))
            yield {**rest, "content": _with_text(message["content"] or "", text)}
        elif message["role"] == "tool" and results:
            name = names.get(message.get("tool_call_id", ""), message.get("name") or last)
            yield {"role": "user", "content": _result(name, message["content"])}
        else:
            yield message


def _with_metadata(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As GLM-4's templates know calls and results: the name beside a message's role, and a role for what is observed."""
    for message in messages:
        calls = message.get("tool_calls", ())
        if calls and message["content"]:
            yield {"role": "assistant", "content": message["content"]}
        for name, arguments in (_call(call["function"]) for call in calls):
            yield {"role": "assistant", "metadata": name, "content": arguments}
        if message["role"] == "tool":
            yield {"role": "observation", "content": message["content"]}
        elif not calls:
            yield message


def _call(function: Mapping[str, Any]) -> _Call:
    given = function["arguments"]
    return _Call(function["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _result(name: str, content: Any) -> Any:
    if isinstance(content, str):
        said = json.dumps({"name": name, "content": content}, ensure_ascii=False)
        return f"<tool_response>\n{said}\n</tool_response>"
    begin, end = ({"type": "text", "text": text} for text in (f"<tool_response>\n{name}:", "</tool_response>"))
    return [begin, *content, end]


def _with_text(content: Any, text: str) -> Any:
    """Content of either kind, and a text behind it."""
    if isinstance(content, str):
        return joined("\n\n", (content, text) if content else (text,))
    return [*content, {"type": "text", "text": text}]


# ---- calls, as families write them ----

_Write = Callable[[Sequence[_Call]], list[Piece]]


def _object(call: _Call, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}}}'


def _objects(between: str, key: str = "arguments") -> _Write:
    return lambda calls: [callers(between.join(_object(call, key) for call in calls))]


def _each_between(open: str, close: str, key: str = "arguments") -> _Write:
    def write(calls: Sequence[_Call]) -> list[Piece]:
        pieces: list[Piece] = []
        for call in calls:
            pieces += [callers("\n")] if pieces else []
            pieces += [own(open), callers(_object(call, key)), own(close)]
        return pieces

    return write


def _granite(calls: Sequence[_Call]) -> list[Piece]:
    return [own("<|tool_call|>"), callers(f"[{', '.join(map(_object, calls))}]")]


def _lfm2(calls: Sequence[_Call]) -> list[Piece]:
    return [own("<|tool_call_start|>"), callers(f"[{', '.join(map(_as_python, calls))}]"), own("<|tool_call_end|>")]


def _as_python(call: _Call) -> str:
    given = _given(call)
    if given is None:
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _given(call: _Call) -> dict[str, Any] | None:
    try:
        given = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _deepseek(before: str, between: str, after: str, separator: str) -> _Write:
    def write(calls: Sequence[_Call]) -> list[Piece]:
        pieces = [own(DEEPSEEK.begin)]
        for place, call in enumerate(calls):
            pieces += [own((separator if place else "") + DEEPSEEK.call + before), callers(call.name)]
            pieces += [own(between), callers(call.arguments), own(after + DEEPSEEK.call_end)]
        return [*pieces, own(DEEPSEEK.end)]

    return write


def _tagged(mark: str, block: str) -> _Write:
    """DeepSeek's from V3.2 on; see `tool_formats_tagged`."""

    def write(calls: Sequence[_Call]) -> list[Piece]:
        pieces = [own(f"<{mark}{block}>\n")]
        for call in calls:
            given = _given(call)
            pieces += [own(f'<{mark}invoke name="'), callers(call.name), own('">\n')]
            for key, value in ({"arguments": call.arguments} if given is None else given).items():
                is_text = isinstance(value, str)
                pieces += [own(f'<{mark}parameter name="'), callers(key), own(f'" string="{"true" if is_text else "false"}">')]
                pieces.append(callers(value if is_text else json.dumps(value, ensure_ascii=False)))
                pieces.append(own(f"</{mark}parameter>\n"))
            pieces.append(own(f"</{mark}invoke>\n"))
        return [*pieces, own(f"</{mark}{block}>")]

    return write


def _glm4(calls: Sequence[_Call]) -> list[Piece]:
    return [callers("\n".join(f"{call.name}\n{call.arguments}" for call in calls))]


_WRITERS: dict[str, _Write] = {
    "glm4": _glm4,
    "json": _objects("\n"),
    "llama": _objects("; ", "parameters"),
    "hermes": _each_between("<tool_call>\n", "\n</tool_call>"),
    "granite": _granite,
    "lfm2": _lfm2,
    "internlm": _each_between("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "deepseek": _deepseek("", DEEPSEEK.name, "", ""),
    "deepseek_r1": _deepseek(f"function{DEEPSEEK.name}", "\n```json\n", "\n```", "\n"),
    "deepseek_v32": _tagged("｜DSML｜", "function_calls"),
    "deepseek_v4": _tagged("｜DSML｜", "tool_calls"),
}
