"""`nanovllm quantize` as a process: what goes where, exit codes, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked

COMMAND = [sys.executable, "-m", "nanovllm_cli", "quantize"]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forked.run([*COMMAND, *words], capture_output=True, text=True, cwd=cwd, timeout=250)


def test_the_path_goes_to_stdout_and_the_table_to_stderr(tmp_path: Path) -> None:
    done = run("tiny", "--to", "q8_0", "--verify-tokens", "100", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "tiny-Q8_0.gguf\n")
    assert "KL divergence, mean" in done.stderr
    assert "bits a weight" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-Q8_0.gguf", "tiny-Q8_0.quality.json"}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = run("tiny", "--to", "int4:group=32", "--dry-run", "--json", "--tensor-type", "down_proj=int8", cwd=tmp_path)
    record = json.loads(done.stdout)
    assert (done.returncode, record["written"], record["output"]) == (0, False, "tiny-int4-g32")
    assert record["weights"]["model.layers.0.mlp.down_proj.weight"]["format"] == "int8"
    assert "model.layers.3.mlp.up_proj.weight" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["tiny"], 2, "--to is missing"),
        (["--to", "int8"], 2, "no model was named"),
        (["tiny", "--to", "int44"], 2, "did you mean int4"),
        (["tiny", "--to", "int8", "-o", ""], 2, "-o needs the name of a file"),
        (["tiny", "--to", "int8", "-o", "-"], 2, "a model is not written to standard output"),
        (["tiny", "--to", "q8_0", "--algorithm", "gptq", "--dry-run"], 6, "gptq chooses codes of int and fp8 formats"),
        (["tiny", "--to", "int8", "--target-bpw", "nan"], 2, "'--target-bpw': must be at most 16"),
        (["tiny", "--to", "int8", "--num-samples", "0"], 2, "'--num-samples': must be at least 1"),
        (["tiny", "--to", "nf4"], 6, "nf4"),
        (["tiny", "--to", "int8", "--tensor-type", "down_proj"], 2, "REGEX=FORMAT"),
        (["tiny", "--to", "int8", "--algorithm", "magic"], 2, "magic"),
        (["tiny", "--to", "int8", "--calibration", "text.txt"], 2, "--algorithm gptq, awq or imatrix"),
        (["tiny", "--to", "int8", "--num-samples", "9"], 2, "--num-samples is given, and nothing is calibrated"),
        (["tiny", "--to", "int8", "--no-verify", "--verify-text", "text.txt"], 2, "leave one of them out"),
        (["tiny", "--to", "int8", "-o", "tiny.gguf"], 2, "called like a GGUF file"),
        (["tiny", "--to", "mxfp4"], 2, "convert MODEL --outtype mxfp4"),
        (["tiny", "--to", "int8", "--verify-text", "missing.txt"], 2, "missing.txt"),
        (["random:qwen3-8b", "--to", "q4_0"], 2, "nanovllm bench --random-weights qwen3-8b --quant FORMAT"),
        (["no/such/model", "--to", "int8", "--offline"], 3, "not in the cache"),
    ],
)
def test_mistakes_are_told_in_two_lines(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--calibration", "--verify-text"])
def test_a_text_that_is_too_short_is_told_before_anything_is_quantized(tmp_path: Path, flag: str) -> None:
    """And leaves nothing: there is nothing that another run could go on from."""
    (tmp_path / "short.txt").write_text("a")
    done = run("tiny", "--to", "int4:group=32", "--algorithm", "gptq", flag, "short.txt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "short.txt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tiny-int8").mkdir()
    done = run("tiny", "--to", "int8", cwd=tmp_path)
    assert done.returncode == 2
    assert "exists already" in done.stderr


def test_ctrl_c_leaves_only_what_the_next_run_goes_on_from(tmp_path: Path) -> None:
    words = ["tiny", "--to", "int8", "-o", "out", "--verify-tokens", "1000000"]
    child = forked.Forked([*COMMAND, *words], cwd=tmp_path, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (tmp_path / ".out.partial" / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {".out.quantizing"}
    done = run("tiny", "--to", "int8", "-o", "out", "--no-verify", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert "an earlier run has finished 4 of 4 parts" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
