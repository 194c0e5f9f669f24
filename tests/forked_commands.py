"""Not tests: real commands, each in a process of its own that is forked from one in which everything is imported already.

The machine that they plan for reads 20 GB/s, and multiplies 100, 200 and 400 * 10^9 operations a second in fp32, bf16 and int8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

_SERVER = """
import json, os, sys
import huggingface_hub, numba, torch
import nanovllm_cli.cli.plan, nanovllm_cli.cli.program, nanovllm_cli.llm, nanovllm_cli.planning.check
import nanovllm_cli.weights.hub_cache, nanovllm_cli.weights.hub_headers
from nanovllm_cli.bench import roofline
from nanovllm_cli.cli.app import main
from nanovllm_cli.weights import hub
hub.RETRY_WAITS = (0.05, 0.05)
roofline.roofline = lambda *_, **__: roofline.Roofline(20.0, {"fp32": 100.0, "bf16": 200.0, "int8": 400.0})
for line in sys.stdin:
    words, folder, environ = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(environ)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(null, 0)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        main(words)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
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
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, *words: str, **environ: str) -> Result:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([words, folder, environ]), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            out, err = (Path(folder, name).read_text() if os.path.exists(f"{folder}/{name}") else "" for name in ("out", "err"))
        assert "\x1b" not in out + err
        assert "Traceback" not in err
        return Result(code, out, err)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)
