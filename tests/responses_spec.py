"""Events of /v1/responses against OpenAI's published description."""

from __future__ import annotations

from functools import cache
from typing import Any

import openai_spec


def check_event(event: dict[str, Any]) -> None:
    """Fails where it is not what the description has for an event of this type. Holds nothing without the description."""
    if openai_spec.SPEC.exists():
        openai_spec.check(_names()[event["type"]], event)


@cache
def _names() -> dict[str, str]:
    """The type of an event -> the name of its schema."""
    schemas = openai_spec.components()["schemas"]
    names = [choice["$ref"].rpartition("/")[2] for choice in schemas["ResponseStreamEvent"]["anyOf"]]
    return {kind: name for name in names for kind in schemas[name]["properties"]["type"]["enum"]}
