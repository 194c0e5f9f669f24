"""Functions that a model may call, in the one form that templates and constraints read, whatever API they came by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm_cli.server.ports import ToolChoice
from nanovllm_cli.server.reading import invalid, shown

Tool = Mapping[str, Any]

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_RESERVED = ("none", "auto", "required")


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool, path: str
) -> Tool:
    """parameters: a JSON schema of an object; None takes no arguments. Raises ApiError 400."""
    if not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", "must be 1 to 128 letters, digits, _, - and .")
    if name in _RESERVED:
        raise invalid(f"{path}.name", f"{name} is what tool_choice says, and no name for a tool")
    schema = {"type": "object", "properties": {}} if parameters is None else dict(parameters)
    function: dict[str, Any] = {"name": name, "parameters": schema, "strict": strict}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def name_of(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def check_names(tools: Sequence[Tool]) -> None:
    """Raises ApiError 400 where two share one."""
    names = [name_of(tool) for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise invalid("tools", f"two tools are called {name}")


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raises ApiError 400 where what must be called is not there."""
    if choice in ("none", "auto"):
        return
    if not tools:
        raise invalid("tool_choice", "there is no function that could be called")
    if choice != "required" and choice not in map(name_of, tools):
        raise invalid("tool_choice", f"no tool is called {shown(choice)}")
