"""`--url` against our own server: what comes out is what the same command says without it. `bench serve` counts what it does."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import Forked, run
from live_server import LiveServer, live_server
from nanovllm_cli.cli.question import new_question
from nanovllm_cli.cli.remote import RemoteAnswerer
from nanovllm_cli.client.endpoint import Endpoint
from nanovllm_cli.client.http import Server
from test_cli_driver import environment


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny", "-c", "1024") as running:
        yield running


def command(*args: str, stdin: str = "", home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """With the compiled kernels of this machine, and with nothing of what its user has set."""
    cache = environment(Path.home()).get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environ = environment(home or Path.home(), XDG_CACHE_HOME=cache)
    return run([sys.executable, "-m", "nanovllm_cli", *args], env=environ, input=stdin, capture_output=True, text=True)


def here_and_there(server: LiveServer, *args: str, stdin: str = "") -> tuple[str, str]:
    here = command(*args, "-c", "1024", stdin=stdin)
    there = command(*args, "--url", server.url, stdin=stdin)
    assert (here.returncode, there.returncode, there.stderr) == (0, 0, ""), here.stderr + there.stderr
    return here.stdout, there.stdout


def test_a_batch_of_everything_is_the_same(server: LiveServer, tmp_path: Path) -> None:
    """Greedy and seeded, several answers, stop strings, penalties, log-probabilities, forms, reasoning: to the last byte, but for
    what a server does not tell."""
    asked: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 40},
        {"prompt": "Once upon a time", "seed": 7, "max_tokens": 40, "top_k": 40, "min_p": 0.05},
        {"prompt": "hi", "seed": 3, "max_tokens": 16, "logprobs": 2},
        {"prompt": "hi", "seed": 4, "max_tokens": 16, "n": 2},
        {"prompt": "Once upon a time", "temperature": 0.0, "max_tokens": 40, "stop": ["the", "and"]},
        {"prompt": "hi", "seed": 5, "max_tokens": 16, "repetition_penalty": 1.3, "dry_multiplier": 0.8, "logit_bias": {"300": 5}},
        {"prompt": "Red or blue?", "seed": 6, "choice": ["red", "blue"], "reasoning_budget": 8},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ü 漢 🎉"}], "seed": 8},
    ]  # fmt: skip
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in asked))
    here, there = here_and_there(server, "run", "-q", "tiny", "--think", "on", "-n", "24", "--batch", str(source))
    records = list(zip(map(json.loads, here.splitlines()), map(json.loads, there.splitlines()), strict=True))
    assert any(answer["reasoning"] and answer["text"] for ours, _ in records for answer in ours["answers"])
    for ours, theirs in records:
        for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
            assert mine.pop("reasoning") == other.pop("reasoning", "")  # a server says that there is none by saying nothing
            if "logprobs" in mine:
                assert len(mine["logprobs"]) - len(other["logprobs"]) == (mine["finish_reason"] == "stop")  # the end has no text
                mine["logprobs"] = [_as_told(entry) for entry in mine["logprobs"][: len(other["logprobs"])]]
        for record in (ours, theirs):  # the cache knows what has been asked before
            del record["key"], record["usage"]["cached_tokens"]
        assert theirs == ours


def _as_told(entry: dict[str, Any]) -> dict[str, Any]:
    """A token's log-probabilities without ids and ranks."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top": top}


def test_text_is_the_same(server: LiveServer) -> None:
    here, there = here_and_there(server, "run", "-q", "--no-save", "--raw", "tiny", "Once upon", "-n", "30", "-s", "5")
    assert (here, len(here) > 20) == (there, True)


def test_how_far_a_long_prompt_is_read_is_known_before_it_is_answered(server: LiveServer) -> None:
    endpoint = Endpoint(Server.at(server.url))
    (model,) = asyncio.run(endpoint.models())
    assert model.tells_reading
    answerer = RemoteAnswerer(endpoint, model.id, raw=True, tells_reading=model.tells_reading)
    answering = answerer.ask(new_question("word " * 900, chats=False, system=None), {"max_tokens": 2})
    told = [(answering.num_read, answering.prompt_len) for _ in answering if not answering.began]
    answering.close()
    counts = [count for count, total in told if total is not None and 0 < count < total]
    assert counts, "at least between the first step and the last"
    assert counts == sorted(counts)
    assert answering.result.usage.prompt_tokens == max(total or 0 for _, total in told)


def test_a_conversation_is_the_same(server: LiveServer) -> None:
    lines = "Hello\nTell me a story.\n/continue\n/regen\n/undo\nAnd now?\n"
    here, there = here_and_there(server, "chat", "-q", "--no-save", "tiny", "-n", "12", "--temp", "0", stdin=lines)
    assert (here, len(here.splitlines()) >= 5) == (there, True)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["-m", "nope", "hi"], 3, "hint: it has tiny"),
        (["word " * 1500], 5, "hint: shorten the prompt"),
        (["hi", "--logprobs", "50", "--json"], 2, "the server refuses the request"),
    ],
)
def test_refusals_have_their_exit_codes(server: LiveServer, args: list[str], code: int, says: str) -> None:
    refused = command("run", "-q", "--no-save", "--url", server.url, *args)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert says in refused.stderr


NOTHING_LEFT = {"messages": [{"role": "user", "content": "hi"}], "guided_choice": ["Hello!"], "bad_words": ["!"]}


def test_what_turns_out_to_be_unmeetable_ends_a_stream_as_its_clients_fault(server: LiveServer) -> None:
    told = {"message": "what is asked for cannot be had: no token is left to draw: every one is banned",
            "type": "invalid_request_error", "param": None, "code": "unmeetable"}  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(NOTHING_LEFT | {"stream": True}).encode(),
        {"content-type": "application/json"},
    )
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as refused:  # the server knew of the end before it had sent anything
        answer = refused
    with answer:
        said = answer.read().decode()
    if answer.status == 200:
        *frames, error, done, rest = said.split("\n\n")
        deltas = [json.loads(frame.removeprefix("data: "))["choices"][0]["delta"] for frame in frames]
        assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
        assert json.loads(error.removeprefix("data: ")) == {"error": told}
        assert (done, rest) == ("data: [DONE]", "")
    else:
        assert (answer.status, json.loads(said)) == (400, {"error": told})
    assert server.post("/v1/chat/completions", NOTHING_LEFT) == (400, {"error": told})


def test_a_request_that_cannot_be_met_is_the_same_here_and_there_and_ends_no_batch(server: LiveServer, tmp_path: Path) -> None:
    asked = ("run", "-q", "--no-save", "-m", "tiny", "hi", "--choice", "Hello!", "--bad-word", "!")
    # A server that knows of the end before it has sent anything refuses the whole.
    for more, texts in (((), ("Hello\n",)), (("--url", server.url), ("Hello\n", ""))):
        done = command(*asked, *more)
        assert (done.returncode, done.stdout in texts) == (2, True), done.stdout
        assert "no token is left to draw" in done.stderr
    lines = [{"prompt": "hi", "choice": ["Hello!"], "bad_words": ["!"]}, {"prompt": "hi", "choice": ["Hello!"]}]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = command("run", "-q", "-m", "tiny", "--url", server.url, "--batch", str(tmp_path / "lines"))
    records = {record["line"]: record for record in map(json.loads, batch.stdout.splitlines())}
    assert (batch.returncode, records[2]["answers"][0]["text"]) == (1, "Hello!")
    assert "no token is left to draw" in records[1]["error"]["message"]


def metric(server: LiveServer, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        found = re.search(rf"^nanovllm:{name}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_an_interrupt_ends_the_answer_on_the_server(server: LiveServer, tmp_path: Path) -> None:
    args = ["run", "-q", "--url", server.url, "hi", "-n", "1000", "--ignore-eos"]
    process = Forked(
        [sys.executable, "-m", "nanovllm_cli", *args], env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    process.stdout.close()
    deadline = time.monotonic() + 10
    while metric(server, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(server, "num_requests_running") == 0
    assert metric(server, "generation_tokens_total") < 10_000


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_counts_what_the_server_counts(server: LiveServer, endpoint: str) -> None:
    before = metric(server, "prompt_tokens_total"), metric(server, "generation_tokens_total")
    load = ("--num-prompts", "6", "--warmup", "0", "--input-len", "24", "--output-len", "8", "--ignore-eos")
    done = command("bench", "serve", "--url", server.url, "--endpoint", endpoint, *load, "--max-concurrency", "2,6", "-o", "json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [each["settings"]["max_concurrency"] for each in results] == [2, 6]
    for metrics in (each["metrics"] for each in results):
        assert (metrics["completed"], metrics["failed"], metrics["total_output_tokens"]) == (6, 0, 48)
        assert 0 < metrics["mean_ttft_ms"] <= metrics["mean_e2el_ms"]  # equal where a busy machine reads whole answers at once
    after = metric(server, "prompt_tokens_total"), metric(server, "generation_tokens_total")
    assert after[0] - before[0] == sum(each["metrics"]["total_input_tokens"] for each in results)
    assert after[1] - before[1] == 2 * 48
    assert "without usage" not in done.stderr
