"""The line below the prompt: model, context, speed, memory, session; as much of it as the terminal is wide."""

from __future__ import annotations

from nanovllm_cli.chat.flow import cut, text_width
from nanovllm_cli.chat.surface import NEARLY_FULL, Status
from nanovllm_cli.cli.output import one_line
from nanovllm_cli.cli.progress_line import size

_BAR = 10
_GAP = "  "

Part = tuple[str, str]
"""The name of a style ("" or "full") and text."""


def toolbar(status: Status, columns: int) -> list[Part]:
    """The most important parts that fit; at the least the model's name, cut."""
    speed = f"{status.tokens_per_second:.1f} tok/s" if status.tokens_per_second is not None else ""
    # In the order in which they stand; the number says which go first where there is little room.
    parts = [
        (0, "", one_line(status.model)),
        *_context(status),
        (2, "", speed),
        (6, "", size(status.memory_bytes) if status.memory_bytes is not None else ""),
        (5, "", one_line(status.session or "")),
    ]
    parts = [part for part in parts if part[2]]
    while len(parts) > 1 and sum(text_width(text) for _, _, text in parts) + len(_GAP) * len(parts) > columns:
        parts.remove(max(parts))
    name, *others = [(style, text) for _, style, text in parts]
    shown = [(name[0], " " + cut(name[1], max(columns - 1, 1)))]
    for part in others:
        shown += [("", _GAP), part]
    return shown


def _context(status: Status) -> list[tuple[int, str, str]]:
    used, limit = status.context_used, status.context_size
    if used is None or limit is None:
        return [(1, "", f"context {used:,} tokens" if used is not None else "")]
    share = used / max(limit, 1)
    style = "full" if share >= NEARLY_FULL else ""
    filled = min(round(share * _BAR), _BAR)
    return [
        (1, style, f"context {share:.0%}"),
        (4, style, "━" * filled + "─" * (_BAR - filled)),
        (3, style, f"{max(limit - used, 0):,} of {limit:,} tokens left"),
    ]
