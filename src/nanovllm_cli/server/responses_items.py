"""Items of /v1/responses: what a client sends, as the items that are kept and listed, and those as messages of a conversation.

Kept items have OpenAI's form of a resource: an id, a type, and texts as lists of parts. Everything between two of the user's or
tools' items (reasoning, texts, calls) is one turn of the assistant.

`encrypted_content` of reasoning is how clients that keep conversations themselves (`store: false`) bring reasoning back. Here it
is not encrypted, only opaque: PREFIX and base64 of the text. Somebody else's is skipped, since nobody here can read it.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from nanovllm_cli.server.chat_turns import ChatTurns, Conversation, Picture, Said
from nanovllm_cli.server.reading import described, invalid, kind_of, listed, read, shown, unsupported
from nanovllm_cli.server.schemas_common import ImageDetail
from nanovllm_cli.text.tool_calls import is_object

Item = dict[str, Any]

MAX_ITEMS = 16384
PREFIX = "nanovllm:"
_MAX_PARTS = 4096
_ID = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_NAME = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


# ---- what a client sends ----


class _Part(msgspec.Struct, tag_field="type"):
    pass


class _InputText(_Part, tag="input_text"):
    text: str


class _OutputText(_Part, tag="output_text"):
    text: str


class _PlainText(_Part, tag="text"):
    text: str


class _Refusal(_Part, tag="refusal"):
    refusal: str


class _InputImage(_Part, tag="input_image"):
    """image_url: a data URL. detail: without effect, an image is made the size that the model was trained with. file_id: no files
    are kept here."""

    image_url: str
    detail: ImageDetail | None = None
    file_id: None = None


class _InputFile(_Part, tag="input_file"):
    pass


class _InputAudio(_Part, tag="input_audio"):
    pass


_Parts = Annotated[
    list[_InputText | _OutputText | _PlainText | _Refusal | _InputImage | _InputFile | _InputAudio],
    msgspec.Meta(max_length=_MAX_PARTS),
]


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts
    id: _ID | None = None


class _FunctionCall(msgspec.Struct):
    call_id: _ID
    name: _NAME
    arguments: str
    id: _ID | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: _ID
    output: str | _Parts
    id: _ID | None = None


class _Text(msgspec.Struct):
    text: str


class _Reasoning(msgspec.Struct):
    summary: Annotated[list[_Text], msgspec.Meta(max_length=_MAX_PARTS)] = []
    content: Annotated[list[_Text], msgspec.Meta(max_length=_MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    id: _ID | None = None


class _Reference(msgspec.Struct):
    id: _ID


def read_items(value: Any, find: Callable[[str], Item | None]) -> list[Item]:
    """The `input` of a request. find: a stored item by its id. Raises ApiError 400."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid("input", "must be a string or a list of items")
    token = secrets.token_hex(20)
    referred: set[str] = set()
    given = enumerate(listed(value, "input", MAX_ITEMS))
    return [_read_item(each, f"input[{place}]", f"{token}{place:08x}", find, referred) for place, each in given]


def _read_item(value: Any, path: str, token: str, find: Callable[[str], Item | None], referred: set[str]) -> Item:
    """token: for the id of one that has none. referred: gets the ids of stored ones."""
    kind = kind_of(value, path, default="message" if isinstance(value, Mapping) and "role" in value else None)
    if kind == "item_reference":
        item_id = read(_Reference, value, path).id
        if item_id in referred:  # a line of a request would bring a megabyte each time
            raise invalid(f"{path}.id", "refers to an item that is there already")
        referred.add(item_id)
        found = find(item_id)
        if found is None:
            raise invalid(f"{path}.id", "no such item is stored")
        return found
    if kind not in _KINDS:
        raise unsupported(f"{path}.type", f"items of type {shown(kind)} are not supported")
    prefix, struct, fields_of = _KINDS[kind]
    given = read(struct, value, path)
    own_id = f"{prefix}_{token}" if given.id is None else given.id
    return {"id": own_id, "type": kind, "status": "completed", **fields_of(given, path)}


def _message(given: _Message, path: str) -> Item:
    path = f"{path}.content"
    if given.role == "assistant":
        texts = _texts(_kept(given.content, path), path)
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    else:
        content = _kept(given.content, path)
    return {"role": given.role, "content": content}


def _function_call(given: _FunctionCall, path: str) -> Item:
    status = "incomplete" if given.status == "incomplete" else "completed"
    return {"status": status, "call_id": given.call_id, "name": given.name, "arguments": given.arguments}


def _function_call_output(given: _FunctionCallOutput, path: str) -> Item:
    output = _kept(given.output, f"{path}.output")
    has_images = any(part["type"] == "input_image" for part in output)
    return {"call_id": given.call_id, "output": output if has_images else "\n".join([part["text"] for part in output])}


def _reasoning(given: _Reasoning, path: str) -> Item:
    texts = [part.text for part in given.content or ()]
    if not texts and given.encrypted_content is not None:
        texts = opened(given.encrypted_content)
    return {
        "summary": [{"type": "summary_text", "text": part.text} for part in given.summary],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
    }


# By type: what ids begin with, how it comes, and what is kept of it.
_KINDS: dict[str, tuple[str, type[Any], Callable[[Any, str], Item]]] = {
    "message": ("msg", _Message, _message),
    "function_call": ("fc", _FunctionCall, _function_call),
    "function_call_output": ("fco", _FunctionCallOutput, _function_call_output),
    "reasoning": ("rs", _Reasoning, _reasoning),
}
_ITEM_SCHEMA = described(
    {kind: struct for kind, (_, struct, _) in _KINDS.items()} | {"item_reference": _Reference},
    default="message",
    without=(_InputFile, _InputAudio),
)
INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_ITEMS, "items": _ITEM_SCHEMA}]
}


def _kept(content: str | Sequence[_Part], path: str) -> list[Item]:
    """Parts as they are kept, each where it was."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    parts: list[Item] = []
    for place, part in enumerate(content):
        if isinstance(part, _InputText | _OutputText | _PlainText):
            parts.append({"type": "input_text", "text": part.text})
        elif isinstance(part, _Refusal):
            parts.append({"type": "input_text", "text": part.refusal})
        elif isinstance(part, _InputImage):
            parts.append({"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto", "file_id": None})
        else:
            kind = type(part).__struct_config__.tag
            raise unsupported(f"{path}[{place}]", f"{kind} is not supported; this server reads text and images")
    return parts


def _texts(parts: Sequence[Item], path: str) -> list[str]:
    for place, part in enumerate(parts):
        if part["type"] == "input_image":
            raise unsupported(f"{path}[{place}]", "an assistant shows no images; send them as the user's")
    return [part["text"] for part in parts]


def without_images(item: Item) -> Item:
    """The same, without what images are made of."""
    return {
        name: [{**part, "image_url": None} if part["type"] == "input_image" else part for part in value]
        if name in ("content", "output") and isinstance(value, list)
        else value
        for name, value in item.items()
    }


def sealed(text: str) -> str:
    """`encrypted_content` of a text."""
    return PREFIX + base64.b64encode(text.encode()).decode()


def opened(sealed_text: str) -> list[str]:
    """The text, if it is one of ours."""
    if not sealed_text.startswith(PREFIX):
        return []
    try:
        return [base64.b64decode(sealed_text[len(PREFIX) :], validate=True).decode()]
    except (binascii.Error, ValueError):
        return []


# ---- as messages ----


def conversation_of(before: Sequence[Item], items: Sequence[Item], instructions: str | None = None) -> Conversation:
    """Of what was said before, and of what a request brings, without calls that were cut off and nobody answers. Raises ApiError
    400 for an output that answers no call, and where there is nothing."""
    placed = [(item, None) for item in before] + [(item, f"input[{place}]") for place, item in enumerate(items)]
    answered = {item["call_id"] for item, _ in placed if item["type"] == "function_call_output"}
    turns = ChatTurns()
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    if instructions is not None:
        turns.say("system", instructions)
    for item, path in placed:
        if item["type"] == "function_call":
            if _is_cut_off(item) and item["call_id"] not in answered:
                continue
            names[item["call_id"]] = item["name"]
            turns.call(item["call_id"], item["name"], item["arguments"])
        elif item["type"] == "function_call_output":
            if item["call_id"] not in names:
                raise invalid("input", f"there is no function call {shown(item['call_id'])} for this output")
            turns.result(item["call_id"], names[item["call_id"]], _said(item["output"], path and f"{path}.output"))
        elif item["type"] == "message":
            turns.say(item["role"], _said(item["content"], path and f"{path}.content"))
        elif text := "\n".join([part["text"] for part in item["content"]]):
            turns.say("assistant", text, "reasoning_content")
    conversation = turns.conversation()
    if not conversation.messages:
        raise invalid("input", "must hold at least one item that says something")
    return conversation


def _said(content: str | Sequence[Item], path: str | None) -> Said:
    """path: None for what this request does not bring itself."""
    if isinstance(content, str):
        return content
    return [
        Picture(part["image_url"], "previous_response_id" if path is None else f"{path}[{place}]")
        if part["type"] == "input_image"
        else part["text"]
        for place, part in enumerate(content)
    ]


def _is_cut_off(call: Item) -> bool:
    """Whether the answer ended within its arguments, so that nobody followed it; some tell the model so."""
    return call["status"] == "incomplete" and not is_object(call["arguments"])
