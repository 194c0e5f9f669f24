"""The last run, for `--continue`: one file under the XDG state folder, readable by its owner alone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm_cli.cli.files import write_whole
from nanovllm_cli.config import AS_TRAINED, EngineConfig, Lora, RopeChange
from nanovllm_cli.errors import NanovllmError, OutputError, UsageError
from nanovllm_cli.folders import state_folder
from nanovllm_cli.overrides import Override

log = logging.getLogger(__name__)

Message = dict[str, Any]
_VECTORS = ("control_vectors", "control_vector_layers")


@dataclass(frozen=True, slots=True)
class LastRun:
    """What was said. messages: a chat, its last answer included. text: prompt and answer of a run without a
    template. lora: names and scales of the model's adapters. changes: what else makes it another model, as `Answerer.changes` has
    it."""

    model: str
    messages: list[Message] | None = None
    text: str | None = None
    lora: list[tuple[str, float]] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)

    def beside(self, config: EngineConfig) -> EngineConfig:
        """`config` with adapters and changes where it says nothing of its own. Raises UsageError for what is none."""
        own: dict[str, Any] = {"lora": tuple(Lora(*each) for each in self.lora)} if self.lora and not config.lora else {}
        if not config.control_vectors:
            own |= {name: self.changes[name] for name in _VECTORS if name in self.changes}
        if config.rope == AS_TRAINED and "rope" in self.changes:
            own["rope"] = RopeChange(*self.changes["rope"])
        if not config.overrides and "overrides" in self.changes:
            own["overrides"] = tuple(Override(tuple(path), value) for path, value in self.changes["overrides"])
        return replace(config, **own)


def last_run_file() -> Path:
    return state_folder() / "last-run.json"


def save(run: LastRun) -> None:
    """Keeps `run` as the last one. Failing to is no reason to fail the run, and leaves none: the one before is not the last."""
    path = last_run_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(run), ensure_ascii=False) + "\n", mode=0o600)
    except (OSError, OutputError) as failure:
        log.info("this run cannot be continued later: %s", failure)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def load() -> LastRun:
    """The last run. Raises UsageError where there is none, or none that can be read."""
    path = last_run_file()
    try:
        fields = json.loads(path.read_bytes())
        run = LastRun(**fields)
        if not _is_whole(run):
            raise ValueError("unexpected fields")
        run.beside(EngineConfig())
    except FileNotFoundError as failure:
        raise UsageError("there is no run to continue", _why_none(path)) from failure
    except (OSError, ValueError, TypeError, RecursionError, NanovllmError) as failure:
        raise UsageError(
            f"the last run in {path} cannot be read: {failure}", "start anew, without --continue"
        ) from failure
    return run


def _why_none(path: Path) -> str:
    there = next(folder for folder in path.parents if os.path.exists(folder))
    if not os.access(there, os.W_OK):
        return f"nothing can be kept in {path.parent}; XDG_STATE_HOME names another place"
    return "run something first, without --continue; with -v it says why it could not be kept"


def _is_whole(run: LastRun) -> bool:
    if not isinstance(run.model, str):
        return False
    if not (isinstance(run.lora, list) and all(isinstance(each, list) and len(each) == 2 for each in run.lora)):
        return False
    if not isinstance(run.changes, dict) or run.changes.keys() - {*_VECTORS, "rope", "overrides"}:
        return False
    if run.messages is None:
        return isinstance(run.text, str)
    return isinstance(run.messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in run.messages
    )
