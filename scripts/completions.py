"""Writes the completion scripts into `completions/`. `tests/test_completions.py` fails where they are not what this writes.

python scripts/completions.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from typer.main import get_command

from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.completion_scripts import SHELLS, script
from nanovllm_cli.cli.program import PROGRAM, build

FOLDER = Path(__file__).resolve().parents[1] / "completions"
STALE = "run: python scripts/completions.py"
NAMES = {"bash": "nanovllm", "zsh": "_nanovllm", "fish": "nanovllm.fish"}  # as the shells look for them in share/


def scripts() -> dict[str, str]:
    """File name -> text."""
    root = page(get_command(build()), PROGRAM)
    return {NAMES[shell]: script(shell, root) for shell in SHELLS}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in scripts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(NAMES)} scripts in {FOLDER.name}/", file=sys.stderr)


if __name__ == "__main__":
    main()
