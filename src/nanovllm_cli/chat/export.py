"""A conversation for others to read: Markdown for people, JSON with messages as the field writes them."""

from __future__ import annotations

import json
import re
from typing import Any

from nanovllm_cli.chat.conversation import Conversation, Cut
from nanovllm_cli.cli.question import WORDS, kind_of

CUT: dict[Cut, str] = {
    "interrupted": "stopped",
    "length": "cut off at its limit",
    "repetition": "cut off where it repeated itself",
    "context": "cut off: the context was full",
    "error": "cut off by an error",
}


def as_markdown(conversation: Conversation, model: str) -> str:
    """A heading for each message. Reasoning is a quotation before its answer; images, sounds and videos are only noted: they are
    megabytes of base64."""
    parts = [f"# {conversation.title or 'Conversation'}", f"Model: {model}"]
    if conversation.system is not None:
        parts += ["## System", conversation.system]
    for message in conversation.messages:
        who = {"user": "You", "tool": f"Tool: {message.name}"}.get(message.role, message.model or model)
        parts.append(f"## {who}")
        if message.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in message.reasoning.splitlines()))
        parts.append(" ".join([f"*({WORDS[kind_of(url)]})*" for url in message.images]))
        parts.append(fenced(message.content) if message.role == "tool" else message.content)
        parts += [f"*(calls {each.name})*\n\n{fenced(each.arguments)}" for each in message.calls]
        if message.cut is not None:
            parts.append(f"*({CUT[message.cut]})*")
    return "\n\n".join(part for part in parts if part) + "\n"


def fenced(text: str) -> str:
    """As a block of code, whatever fences are in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def as_json(conversation: Conversation, model: str) -> str:
    """{"model", "title", "messages": [{"role", "content"}, …]}, where an answer may have "reasoning_content" and "cut",
    and content is parts where there are images."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for message in conversation.messages:
        cut = {} if message.cut is None else {"cut": str(message.cut)}
        messages.append(message.for_template() | cut)
    record = {"model": model, "title": conversation.title, "messages": messages}
    return json.dumps(record, ensure_ascii=False, indent=2) + "\n"
