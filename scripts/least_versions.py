"""Prints constraints for pip: of each dependency the least version that pyproject.toml asks for.

    python scripts/least_versions.py > least.txt
    make test VENV=.venv-least PIP_CONSTRAINT=least.txt

A bound of two numbers stands for the last patch of it. Left out are those of which the tests' own packages want newer ones.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
NEWER_IN_TESTS = {"huggingface-hub", "tokenizers"}
"""By transformers."""


def constraints() -> list[str]:
    found = []
    for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        known = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line)
        if known is None:
            sys.exit(f"no least version in {line!r}")
        name, version = known.groups()
        if name not in NEWER_IN_TESTS:
            found.append(f"{name}=={version}{'' if version.count('.') > 1 else '.*'}")
    return found


if __name__ == "__main__":
    print("\n".join(constraints()))
