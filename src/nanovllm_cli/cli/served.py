"""What is said of models in processes of their own, for those commands that have some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine, size

if TYPE_CHECKING:
    from nanovllm_cli.server.messages import Facts, Loading


def short_name(name: str) -> str:
    """What clients call a model where no alias says: its name, and of a path only the last part."""
    path = Path(name)
    if os.path.exists(path) or path.is_absolute() or name.startswith((".", "~")):
        return path.resolve().name.removesuffix(".gguf") or "model"
    return name


def teller(screen: Console) -> Callable[[str, Loading], None]:
    """Loading as the progress line shows it, though it happens in another process; in a log each stage is a line."""
    progress = ProgressLine(screen)
    at, done = ("", ""), 0
    logged: dict[str, str] = {}

    def tell(name: str, loading: Loading) -> None:
        nonlocal at, done
        if loading.note:
            progress.note(f"{name}: {loading.note}")
            return
        if not screen.err.is_terminal and logged.get(name) != loading.stage:
            logged[name] = loading.stage
            screen.say(f"{name}: {loading.stage}")
        if at != (name, loading.stage):
            at, done = (name, loading.stage), 0
            unit: Any = loading.unit or "tokens"
            progress.stage(f"{name}: {loading.stage}", loading.total or None, unit)
        progress.advance(loading.done - done)
        done = loading.done

    return tell


def told_of(name: str, facts: Facts) -> str:
    return (
        f"{name}: {facts.num_parameters / 1e6:,.0f} M parameters, {facts.dtype}, {facts.device}; "
        f"context {facts.context_len:,} tokens; KV cache {size(facts.kv_bytes)}"
    )
