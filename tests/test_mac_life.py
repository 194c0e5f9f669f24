"""The commands in a Python that has what macOS' has and no more (`like_a_mac/sitecustomize.py`), in it and in its children. What
this does not see: another processor, another C library, and the libraries' builds for Macs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from live_server import live_server

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
PAGES = 500_000
"""That are free there."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (TESTS / "like_a_mac", TESTS, SOURCE)))
    return {**os.environ, "PYTHONPATH": paths, "XDG_STATE_HOME": str(tmp_path / "state")}


RUN = """
import json, sys
from pathlib import Path

from nanovllm_cli.cli import app, signals

signals.install()
assert app._invoke(["run", "tiny", "-q", "--temp", "0", "-n", "8", "-t", "2", "Once upon a time"]) == 0

import numba
from nanovllm_cli import system
from nanovllm_cli.bench import machine, roofline
from nanovllm_cli.chat import clipboard
from nanovllm_cli.weights.pickled import PickledCheckpoint

pickled = PickledCheckpoint(Path(sys.argv[1]))
told = {
    "threads": numba.threading_layer(), "cpu": machine.this_machine([]).cpu, "available": system.available_bytes(),
    "tensor": pickled.tensor("a").tolist(), "bandwidth": roofline._buffer_bytes(),
    "clipboard": clipboard.copy("F\\u00fc\\u00dfe", {"PATH": sys.argv[1], "DISPLAY": ":0", "LC_ALL": "C"}),
}
pickled.close()
print(json.dumps(told))
"""


def test_a_model_answers_and_the_machine_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "pbcopy").write_text('#!/bin/sh\n{ echo "$LC_ALL"; /bin/cat; } >"${0%/*}/copied"\n')
    (tmp_path / "pbcopy").chmod(0o755)
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    *answer, told = done.stdout.splitlines()
    assert "".join(answer)
    available = PAGES * os.sysconf("SC_PAGE_SIZE")
    assert json.loads(told) == {
        "threads": "workqueue", "cpu": "Apple M2", "available": available, "tensor": [[0, 1, 2], [3, 4, 5]],
        "bandwidth": available // 4, "clipboard": "pbcopy",
    }  # fmt: skip
    assert (tmp_path / "copied").read_text() == "en_US.UTF-8\nFüße"


def test_a_server_answers_in_a_form(environment: dict[str, str]) -> None:
    """Of the form's grammar, which a child of limits of its own tries out, and an engine in a process of its own follows."""
    name = {"enum": ["Ada", "Bo"]}
    schema = {"type": "object", "properties": {"name": name}, "required": ["name"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 24}
    with live_server("tiny", env=environment) as server:
        status, answer = server.post("/v1/chat/completions", body | {"response_format": form})
        assert status == 200, answer
        assert json.loads(answer["choices"][0]["message"]["content"])["name"] in ("Ada", "Bo")
        status, answer = server.post("/v1/chat/completions", body | {"grammar": "root ::= [a"})
        assert (status, "not closed" in answer["error"]["message"]) == (400, True)


def test_a_child_that_tries_constraints_gets_a_gigabyte_beyond_what_it_has(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "nanovllm_cli.constrain.checker", "5"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["message"] is None
        limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
        soft, hard = next(line for line in limits if line.startswith("Max address space")).split()[3:5]
        mapped = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        child.stdin.close()
    assert soft == hard
    assert mapped + (1 << 30) - (1 << 26) <= int(soft) <= mapped + (1 << 30) + (1 << 27)
