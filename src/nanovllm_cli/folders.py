"""Where this program keeps files of its own, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """What should outlast this run: conversations, the last run. $XDG_STATE_HOME/nanovllm."""
    return _base("XDG_STATE_HOME", "~/.local/state") / "nanovllm"


def cache_folder() -> Path:
    """What can be made again: compiled kernels, measurements. $XDG_CACHE_HOME/nanovllm."""
    return _base("XDG_CACHE_HOME", "~/.cache") / "nanovllm"


def in_home(path: str) -> Path:
    """`~/...` of this user; somewhere that does not exist where nobody knows a home (a container's user by number alone, without
    HOME): Python would leave a relative path, and a folder called ~ in the working folder."""
    found = os.path.expanduser(path)
    return Path(found if found.startswith("/") else "/nonexistent" + path.removeprefix("~"))


def _base(variable: str, default: str) -> Path:
    """Relative paths in these variables are to be ignored, says the specification."""
    home = os.environ.get(variable, "")
    return Path(home) if home.startswith("/") else in_home(default)
