"""What `reasoning_effort` means with a model: it is the template that knows how hard to think, if anybody does."""

from __future__ import annotations

from typing import Any

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.ports import ServedModel


def effort_of(
    effort: str | None, thinking: bool | None, model: ServedModel, param: str
) -> tuple[bool | None, dict[str, Any]]:
    """Whether to reason, and variables of the template that say how much. thinking: what was asked for beside it.

    A template with a switch and no effort takes `none` as off and the rest as on. Raises ApiError 400 for an effort that the
    model knows nothing of.
    """
    if effort is None:
        return thinking, {}
    if reads(model, "reasoning_effort"):
        return thinking, {"reasoning_effort": effort}
    if model.thinking_switch is not None:
        return effort != "none" if thinking is None else thinking, {}
    if effort == "none":
        return thinking, {}
    raise ApiError(400, f"{model.id} knows no {param}", code="unsupported", param=param)


def reads(model: ServedModel, variable: str) -> bool:
    """Whether the model's template has something to do with a variable."""
    return model.chat_template is not None and variable in model.chat_template.source
