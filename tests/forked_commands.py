"""Not tests: commands that ask a hub and plan, each in a process of its own.

The machine that they plan for reads 20 GB/s (40 where it is measured anew), and multiplies 100, 200 and 400 * 10^9 operations
a second in fp32, bf16 and int8.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

from forked import run

_COMMAND = """
from nanovllm_cli.bench import roofline
from nanovllm_cli.cli.app import main
from nanovllm_cli.weights import hub
hub.RETRY_WAITS = (0.05, 0.05)
RATES = {"fp32": 100.0, "bf16": 200.0, "int8": 400.0}
roofline.roofline = lambda *_, fresh, **__: roofline.Roofline(40.0 if fresh else 20.0, RATES)
main()
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    """run(words): the `nanovllm` command. environ: of all of them."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ

    def run(self, *words: str, **environ: str) -> Result:
        done = run(
            [sys.executable, "-c", _COMMAND, *words], env=self._environ | environ, text=True, stdin=subprocess.DEVNULL,
            capture_output=True,
        )  # fmt: skip
        assert "\x1b" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return Result(done.returncode, done.stdout, done.stderr)
