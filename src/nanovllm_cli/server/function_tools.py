"""Functions that a model may call, in the one form that templates and constraints read, whatever API they came by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.reading import invalid, shown
from nanovllm_cli.text.tool_calls import ToolChoice, tools_of

Tool = Mapping[str, Any]

NAME = r"[A-Za-z0-9_.:/-]{1,128}"
CHOICES = ("none", "auto", "required")


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None, path: str
) -> Tool:
    """parameters: a JSON schema of an object; None takes no arguments. In the order that models know, and without what nobody
    said: templates show all of it. Raises ApiError 400."""
    if not re.fullmatch(NAME, name):
        raise invalid(f"{path}.name", "must be 1 to 128 letters, digits, _, -, ., : and /")
    schema = {"type": "object", "properties": {}} if parameters is None else dict(parameters)
    function = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {"type": "function", "function": {field: value for field, value in function.items() if value is not None}}


def name_of(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as far as they came: of one that was cut off, what was complete, as the stream helpers of clients have
    it."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def checked_tools(
    tools: Sequence[Tool], choice: ToolChoice, allowed: Sequence[str] | None = None
) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools that may be called, and whether one must be. allowed: names of some; None allows all.

    Raises ApiError 400 for tools that do not go together, and for a choice that is not among them.
    """
    try:
        names = {tool.name for tool in tools_of(tools)}
    except UsageError as error:
        raise ApiError.of(error, "tools") from None
    if taken := names.intersection(CHOICES):
        raise invalid("tools", f"{min(taken)} is what tool_choice says, and no name for a tool")
    chosen = [choice] if choice not in CHOICES else []
    for name in (*chosen, *(allowed or ())):
        if name not in names:
            raise invalid("tool_choice", f"no tool is called {shown(name)}")
    if allowed is not None:
        tools = [tool for tool in tools if name_of(tool) in allowed]
    if choice == "required" and not tools:
        raise invalid("tool_choice", "there is no function that could be called")
    return tools, choice
