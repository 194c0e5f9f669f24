"""`nanovllm run` with the bundled model: few runs, as each imports torch. What needs no model is tested beside this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from forked import Terminal, run
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.weights.source import resolve
from test_cli_driver import environment

MODEL = os.environ.get("TEST_NANOVLLM_MODEL", "tiny")
COMMAND = [sys.executable, "-m", "nanovllm_cli"]
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are


@pytest.fixture(scope="module", autouse=True)
def model() -> str:
    """The model's name, once its kernels are compiled."""
    try:
        resolve(MODEL, offline=True)
    except NanovllmError as missing:
        pytest.skip(f"no model to run: {missing}")
    subprocess.run([*COMMAND, "run", "-q", "--no-save", MODEL, "hello", "-n", "2"], timeout=280, capture_output=True)
    return MODEL


def nanovllm(home: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = run(
        [*COMMAND, *args], cwd=home, env=environment(home, XDG_CACHE_HOME=CACHE), input=stdin, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done


def test_a_story_and_its_statistics(tmp_path: Path, model: str) -> None:
    done = nanovllm(tmp_path, "run", model, "Once upon a time", "-n", "40", "-s", "1", "-v")
    assert done.returncode == 0
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 20
    told, first, *_, last = done.stderr.splitlines()
    assert re.fullmatch(r"info: (bfloat16|float32) on \d+ threads; context of \d+ tokens, KV cache of [\d.]+ MiB", told)
    assert first.startswith(f"{model}: ")
    assert last.startswith("prompt ")
    assert " tok/s | answer " in last


def test_a_kv_cache_of_int8_takes_about_half_and_tells_a_story(tmp_path: Path, model: str) -> None:
    args = ["run", model, "Once upon a time", "-n", "40", "--temp", "0", "--dtype", "bfloat16", "--json"]
    dense = json.loads(nanovllm(tmp_path, *args).stdout)
    small = json.loads(nanovllm(tmp_path, *args, "-ctk", "int8", "-ctv", "int8").stdout)
    assert small["statistics"]["kv_dtypes"] == ["int8", "int8"]
    assert 0.5 < small["statistics"]["kv_bytes"] / dense["statistics"]["kv_bytes"] < 0.6
    assert small["answers"][0]["text"][:20] == dense["answers"][0]["text"][:20]


def test_the_same_seed_gives_the_same_answer_in_every_form(tmp_path: Path, model: str) -> None:
    args = ["run", "-q", model, "Once upon a time", "-n", "20", "-s", "7", "--temp", "0.8", "--logprobs", "2"]
    whole = json.loads(nanovllm(tmp_path, *args, "--json").stdout)
    *events, end = map(json.loads, nanovllm(tmp_path, *args, "--jsonl").stdout.splitlines())
    answer = whole["answers"][0]
    assert "".join(event["text"] for event in events) == answer["text"]
    assert [entry for event in events for entry in event["logprobs"]] == answer["logprobs"]
    assert len(answer["logprobs"]) == answer["num_tokens"] == len([i for event in events for i in event["token_ids"]])
    assert end["answers"][0]["finish_reason"] == answer["finish_reason"]
    assert whole["statistics"]["time_to_first_token"] > 0
    batch = [
        {"prompt": "Once upon a time"},
        {"prompt": "long " * 20_000},
        {"prompt": "x", "logit_bias": {"99999999": 1}},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in batch)
    args = ["run", "-q", model, "-n", "20", "-s", "7", "--temp", "0.8", "--batch", "-"]
    done = nanovllm(tmp_path, *args, stdin=lines)
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert first["answers"][0]["text"] == answer["text"]
    assert second["error"]["type"] == "PromptTooLongError"
    assert "outside the vocabulary" in third["error"]["message"]


def test_a_prompts_tokens_have_the_likelihood_that_they_have_in_an_answer(tmp_path: Path, model: str) -> None:
    args = ["run", "-q", model, "--raw", "--temp", "0", "-n", "1", "--dtype", "bfloat16", "--batch", "-"]
    line = json.dumps({"prompt": "Once upon a", "logprobs": 1}) + "\n"
    [answer] = json.loads(nanovllm(tmp_path, *args, stdin=line).stdout)["answers"]
    line = json.dumps({"prompt": f"Once upon a{answer['text']}", "prompt_logprobs": 1}) + "\n"
    first, *others = json.loads(nanovllm(tmp_path, *args, stdin=line).stdout)["prompt_logprobs"]
    assert first is None
    assert others[-1:] == answer["logprobs"]


@pytest.mark.parametrize(
    ("args", "stdin", "code", "says"),
    [
        (["./no-such-model", "hi"], "", 3, "no-such-model"),
        ([MODEL], "long " * 100_000, 5, "tokens, the context holds"),
        ([MODEL, "-c", "100M", "hi"], "", 5, "was asked for"),
        ([MODEL, "-l", "99999999+1", "hi"], "", 2, "--logit-bias: token id 99999999 is outside the vocabulary"),
        ([".", "hi"], "", None, "error: "),
    ],
)
def test_failures_of_the_library_are_told(
    tmp_path: Path, args: list[str], stdin: str, code: int | None, says: str
) -> None:
    done = nanovllm(tmp_path, "run", *args, stdin=stdin)
    assert done.returncode == code or (code is None and done.returncode > 0)
    assert done.stdout == ""
    assert says in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda:1"], "error: no NVIDIA driver on this machine (libcuda.so.1)"),
        (["--device", "cpu", "--dtype", "bfloat16", "-ctv", "f16"], "error: a KV cache of float16 where bfloat16 is computed"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(tmp_path: Path, model: str, flags: list[str], message: str) -> None:
    done = nanovllm(tmp_path, "run", model, "hi", "--no-save", *flags)
    assert done.returncode == 6
    assert done.stdout == ""
    assert done.stderr.splitlines()[-2] == message


def test_ctrl_c_keeps_what_was_said_and_continue_goes_on(tmp_path: Path, model: str) -> None:
    args = [*COMMAND[1:], "run", model, "Once upon a time", "--ignore-eos", "-t", "1"]
    child = Terminal(
        COMMAND[0],
        args,
        cwd=str(tmp_path),
        env=environment(tmp_path, XDG_CACHE_HOME=CACHE),
        timeout=60,
        encoding="utf-8",
        codec_errors="replace",
    )
    child.expect("reading the prompt")
    child.expect_exact("\x1b[K")
    child.expect(r"\S")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    if child.exitstatus == 0:
        pytest.skip("it had finished before it could be interrupted")
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    done = nanovllm(tmp_path, "run", model, "--continue", "-n", "5")
    assert done.returncode == 0
    assert len(json.loads((tmp_path / ".local/state/nanovllm/last-run.json").read_text())["model"]) > 0


@pytest.mark.parametrize("delay", [0.5, 1.5, 2.5])
def test_ctrl_c_at_any_moment_of_loading(tmp_path: Path, model: str, delay: float) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", model, "Once upon a time", "--ignore-eos"],
        env=environment(tmp_path, XDG_CACHE_HOME=CACHE), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode in (130, 0)
    assert b"Traceback" not in err
    assert b"error" not in err
