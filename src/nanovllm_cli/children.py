"""Child processes of this program: those that are to run this very package, and those that decode strangers' files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from nanovllm_cli import limited


def child_environment() -> dict[str, str]:
    """This process's, with this package in front, wherever it was imported from."""
    root = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if not others else f"{root}{os.pathsep}{others}"}


def start_decoder(program: ModuleType) -> subprocess.Popen[bytes]:
    """What reads a file on standard input, within its SECONDS and BYTES; see `limited.py`."""
    words = str(limited.__file__), str(program.__file__), str(program.SECONDS), str(program.BYTES)
    return subprocess.Popen(
        [sys.executable, "-P", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
