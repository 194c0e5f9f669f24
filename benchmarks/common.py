"""What benchmarks share: prompts that nobody has written, sides in processes of their own, and where results go."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def made_up(count: int, salt: int, vocab_size: int) -> list[int]:
    """Token ids of a prompt; another salt gives others."""
    return [(7919 * (i + 1) + 104729 * salt) % vocab_size for i in range(count)]


def said_by(*words: object) -> Any:
    """The JSON in the last line that this Python prints for a command."""
    done = subprocess.run([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, words))} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each side, and each of its numbers, over its rounds."""
    return {side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in rounds.items()}


def save(path: Path | None, result: dict[str, Any]) -> None:
    """As JSON, behind the machine and the command; nothing where no path was given."""
    if path is None:
        return
    from nanovllm_cli.bench.machine import this_machine

    machine = asdict(this_machine()) | {"command": shlex.join(["python", *sys.argv])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine} | result, indent=1) + "\n")
