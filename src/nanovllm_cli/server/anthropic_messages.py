"""Anthropic's messages as a conversation in OpenAI's form of chat messages.

One message of theirs can be several of ours: results of tools become messages of the role `tool`, ahead of what the user says
beside them. Turns of the same role that follow each other are one, as Anthropic reads them. Blocks of text are a line each.
`redacted_thinking` is skipped: it is encrypted, and nobody here can read it. Images are the user's, or a tool's; which kind one
is, its bytes say, whatever its media_type.

The billing line. Claude Code begins `system` with a block `x-anthropic-billing-header: cc_version=…; cch=…;`, whose `cch` is
another in each request, so that no prompt has a prefix in the cache. It is a header of HTTP that was put into the body, and says
nothing to a model: a line at the beginning of `system` that begins so is not read to it. Every other text is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from nanovllm_cli.server.chat_turns import ChatTurns, Conversation, Picture
from nanovllm_cli.server.function_tools import NAME, Tool, function_tool
from nanovllm_cli.server.reading import (
    described,
    invalid,
    json_text,
    kind_of,
    listed,
    object_schema,
    read,
    shown,
    unsupported,
)
from nanovllm_cli.server.schemas_common import MAX_MESSAGES
from nanovllm_cli.text.tool_calls import MAX_TOOLS

BILLING_HEADER = "x-anthropic-billing-header:"
MAX_BLOCKS = 1 << 16


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Text(msgspec.Struct):
    text: str


class _Base64(msgspec.Struct, tag_field="type", tag="base64"):
    media_type: str
    data: str


class _Url(msgspec.Struct, tag_field="type", tag="url"):
    """A data URL."""

    url: str


class _Image(msgspec.Struct):
    source: _Base64 | _Url


class _Thinking(msgspec.Struct):
    thinking: str


_ID = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _ToolUse(msgspec.Struct):
    id: _ID
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    input: dict[str, Any]


class _ToolResult(msgspec.Struct):
    tool_use_id: _ID
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_SEEN = described({"text": _Text, "image": _Image})
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_BLOCKS, "items": described({"text": _Text})}]}
_RESULT = object_schema(
    {"type": {"const": "tool_result"}, "tool_use_id": {"type": "string", "minLength": 1, "maxLength": 128}},
    {
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "maxItems": MAX_BLOCKS, "items": _SEEN}]},
        "is_error": {"type": ["boolean", "null"]},
    },
)


class _Redacted(msgspec.Struct):
    pass


def _turn_schema(role: str, blocks: Sequence[Any]) -> dict[str, Any]:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": blocks}}]}
    return object_schema({"role": {"const": role}, "content": content})


_SAID = {"text": _Text, "thinking": _Thinking, "redacted_thinking": _Redacted, "tool_use": _ToolUse}
SYSTEM_SCHEMA: dict[str, Any] = {
    **_TEXTS,
    "description": f"A line at its beginning that begins with `{BILLING_HEADER}` is not read to the model: it is a client's "
    "header, differs in every request, and would keep every prompt out of the cache.",
}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "anyOf": [
            _turn_schema("user", [*_SEEN["anyOf"], _RESULT]),
            _turn_schema("assistant", described(_SAID)["anyOf"]),
            _turn_schema("system", described({"text": _Text})["anyOf"]),
        ]
    },
}


class _Tool(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": f"^{NAME}$"})]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


TOOLS_SCHEMA: dict[str, Any] = {"type": "array", "maxItems": MAX_TOOLS, "items": described({"custom": _Tool}, default="custom")}


def chat_messages(system: Any, messages: Any) -> Conversation:
    """Raises ApiError 400, also for a result without its call. A last message of the assistant is to be continued."""
    conversation = _Conversation()
    if system is not None:
        conversation.system(_without_billing(_texts(system, "system")))
    for place, message in enumerate(listed(messages, "messages", MAX_MESSAGES)):
        conversation.add(read(_Turn, message, f"messages[{place}]"), f"messages[{place}].content")
    found = conversation.turns.conversation()
    last = found.messages[-1] if found.messages else {"role": "system"}
    if last["role"] == "system":
        raise invalid("messages", "must hold at least one message of the user")
    if last.get("tool_calls"):
        raise invalid("messages", "the last message calls tools; send their results behind it")
    return found


def chat_tools(tools: Any) -> list[Tool]:
    """Raises ApiError 400; Anthropic's own tools (web_search_…, bash_…) are such a case: only its own models know them."""
    found = []
    for place, tool in enumerate(listed([] if tools is None else tools, "tools", MAX_TOOLS)):
        path = f"tools[{place}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise unsupported(f"{path}.type", f"{shown(kind)} is not supported; give it as a tool with an input_schema")
        given = read(_Tool, tool, path)
        schema = given.input_schema
        if given.input_examples:
            schema = {**schema, "examples": given.input_examples}
        found.append(function_tool(given.name, given.description, schema, given.strict, path))
    return found


class _Conversation:
    def __init__(self) -> None:
        self.turns = ChatTurns(joins=("user", "assistant", "system"))
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls
        self._num_blocks = 0

    def system(self, texts: Sequence[str]) -> None:
        text = "\n".join([text for text in texts if text])
        if text:
            self.turns.say("system", text)

    def add(self, turn: _Turn, path: str) -> None:
        self._num_blocks += 1 if isinstance(turn.content, str) else len(turn.content)
        if self._num_blocks > MAX_BLOCKS:
            raise invalid("messages", f"more than {MAX_BLOCKS} blocks")
        if turn.role == "system":
            self.system(_texts(turn.content, path))
        elif isinstance(turn.content, str):
            self.turns.say(turn.role, turn.content)
        elif turn.role == "user":
            self._user(turn.content, path)
        else:
            self._assistant(turn.content, path)

    def _user(self, blocks: Sequence[Any], path: str) -> None:
        said: list[str | Picture] = []
        for place, block in enumerate(blocks):
            at = f"{path}[{place}]"
            if kind_of(block, at) == "tool_result":
                self._result(read(_ToolResult, block, at), at)
            else:
                said.append(_seen(block, at))
        if said:
            self.turns.say("user", said)

    def _result(self, result: _ToolResult, path: str) -> None:
        name = self._names.get(result.tool_use_id)
        if name is None:
            raise invalid(f"{path}.tool_use_id", "no tool_use before it has this id")
        content = result.content or ""
        said: list[str | Picture] = [content] if isinstance(content, str) else _all_seen(content, f"{path}.content")
        self.turns.result(result.tool_use_id, name, _as_error(said) if result.is_error else said)

    def _assistant(self, blocks: Sequence[Any], path: str) -> None:
        for place, block in enumerate(blocks):
            at = f"{path}[{place}]"
            kind = kind_of(block, at)
            if kind == "tool_use":
                use = read(_ToolUse, block, at)
                self._names[use.id] = use.name
                self.turns.call(use.id, use.name, json_text(use.input))
            elif kind == "thinking":
                self.turns.say("assistant", read(_Thinking, block, at).thinking, "reasoning_content")
            elif kind != "redacted_thinking":
                self.turns.say("assistant", _text(block, at))


def _as_error(said: list[str | Picture]) -> list[str | Picture]:
    """Templates have no other way to say it."""
    first, *rest = said if said and isinstance(said[0], str) else ["", *said]
    told = str(first)[:16].lower().startswith(("error", "<tool_use_error>"))
    return [first if told else f"Error: {first}", *rest]


def _all_seen(blocks: list[dict[str, Any]], path: str) -> list[str | Picture]:
    return [_seen(block, f"{path}[{place}]") for place, block in enumerate(listed(blocks, path, MAX_BLOCKS))]


def _seen(block: Any, path: str) -> str | Picture:
    """A text, or an image."""
    if kind_of(block, path) != "image":
        return _text(block, path)
    kind = kind_of(block.get("source"), f"{path}.source")
    if kind not in ("base64", "url"):
        raise unsupported(f"{path}.source.type", f"{shown(kind)} is not supported; send the image itself, in base64")
    source = read(_Image, block, path).source
    return Picture(source.data if isinstance(source, _Base64) else source.url, path)


def _texts(content: Any, path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{path}[{place}]") for place, block in enumerate(listed(content, path, MAX_BLOCKS))]


def _text(block: Any, path: str) -> str:
    kind = kind_of(block, path)
    if kind != "text":
        instead = "images are a user's or a tool's" if kind == "image" else "send its text"
        raise unsupported(f"{path}.type", f"{shown(kind)} is not supported here; {instead}")
    return read(_Text, block, path).text


def _without_billing(texts: Sequence[str]) -> list[str]:
    """Without the line that a client put before its instructions."""
    if not texts or not texts[0].startswith(BILLING_HEADER):
        return list(texts)
    return [texts[0].partition("\n")[2], *texts[1:]]
