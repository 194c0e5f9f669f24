"""Where this program keeps files of its own, by the XDG base directory specification."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import time
from pathlib import Path

UNUSED_SECONDS = 90 * 86_400
"""Since anybody asked for a compiled kernel that is still kept."""


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


def note_use(kept: Path) -> None:
    """For `remove_unused`, which goes by the time of the last change."""
    with contextlib.suppress(OSError):  # in an image that may only be read, where nothing is removed either
        os.utime(kept)


@functools.cache
def remove_unused(place: Path) -> None:
    """Files and folders in there that are named by a digest and were not used for long: kernels of versions before this one. Once
    a process. place: a folder of this program's alone."""
    with contextlib.suppress(OSError):
        for path in [path for path in place.iterdir() if re.fullmatch("[0-9a-f]{16,64}", path.name)]:
            if path.lstat().st_mtime > time.time() - UNUSED_SECONDS:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _base(variable: str, default: str) -> Path:
    """Relative paths in these variables are to be ignored, says the specification."""
    home = os.environ.get(variable, "")
    return Path(home) if home.startswith("/") else in_home(default)
