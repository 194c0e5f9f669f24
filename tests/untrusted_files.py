"""Reading a checkpoint that may be anything, as a loader does."""

from __future__ import annotations

from pathlib import Path

from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.weights.checkpoint import open_checkpoint


def open_and_read(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names():
            checkpoint.tensor(name)
            checkpoint.raw(name)
            checkpoint.release(name)


def refusal(path: Path) -> str:
    """What is said when it is refused; nothing when it is read after all."""
    try:
        open_and_read(path)
    except NanovllmError as error:
        return error.message
    return ""
