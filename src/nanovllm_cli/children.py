"""Child processes of this program, which are to run this very package."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """This process's, with this package in front, wherever it was imported from."""
    root = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if not others else f"{root}{os.pathsep}{others}"}
