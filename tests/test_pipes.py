"""What every command is in a pipe: not one escape sequence, nothing on stderr when quiet, no complaint when the reader has
enough, no need of a standard input. With the bundled model, as whole processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from label_models import encoder, privacy_filter
from nanovllm_cli.cli.command_tree import page
from nanovllm_cli.cli.program import PROGRAM, build
from openai_server import OpenAIServer, Reply, Request
from test_cli_driver import environment, nanovllm
from warm_command import warm_command

TREE = {each.name: each for each in page(get_command(build()), PROGRAM).every()}
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where compiled kernels are

# A short call of every command; one that is missing here fails a test.
CALLS = {
    "run": "run tiny Hello -n 4",
    "run-batch": "run-batch tiny requests.jsonl",
    "chat": "chat tiny Hello -n 4",
    "models.list": "models list",
    "models.show": "models show tiny",
    "models.pull": "models pull tiny",
    "models.rm": "models rm -y org/gone",
    "plan": "plan tiny",
    "convert": "convert tiny --dry-run --json",
    "quantize": "quantize tiny --to int8 --dry-run --json",
    "verify": "verify tiny --tokens 8",
    "tokenize": "tokenize tiny Hello",
    "embed": "embed tiny Hello",
    "classify": "classify ./classifying Hello",
    "redact": "redact ./marking Hello",
    "control-vector": "control-vector tiny --positive up.txt --negative down.txt -o v.gguf --force",
    "perplexity": "perplexity tiny -c 32 --chunks 1",
    "bench": "bench tiny -p 8 -n 2 -r 1 --no-warmup --roofline off",
    "bench.throughput": "bench throughput tiny --num-prompts 2 --input-len 8 --output-len 2",
    "bench.latency": "bench latency tiny --input-len 8 --output-len 2 --repetitions 1",
    "bench.serve": "bench serve --num-prompts 2",
    "bench.compare": "bench compare results.json again.json",
    "config": "config",
    "config.get": "config get temp",
    "config.set": "config set temp 0.5",
    "config.unset": "config unset stop",
    "config.path": "config path",
    "config.edit": "config edit",
    "completion": "completion bash",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With programs in `bin`, and what the calls read."""
    folder = tmp_path_factory.mktemp("pipes")
    with warm_command(folder):
        done = call(
            folder, "nanovllm bench tiny -q -p 8 -n 2 -r 1 -o json --roofline off | tee results.json >again.json"
        )
        assert done.returncode == 0, done.stderr
        for name, text in {"up": "What a wonderful day", "down": "What an awful day"}.items():
            (folder / f"{name}.txt").write_text(f"{text}\n")
        asked = '{"custom_id": "%d", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 2}}\n'
        encoder(folder / "classifying", "distilbert")
        privacy_filter(folder / "marking")
        (folder / "requests.jsonl").write_text("".join(asked % i for i in range(3)))
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIServer]:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece(" a")
        await reply.usage(7, 1)
        await reply.done()

    with OpenAIServer(answer) as running:
        yield running


def call(home: Path, text: str, **extra: str) -> subprocess.CompletedProcess[str]:
    settings = home / ".config/nanovllm/config.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text('[default]\ntemp = 0.7\nstop = ["x"]\n')
    for part in ("snapshots/abc", "refs"):  # what `models rm` takes away
        (home / "hub/hub/models--org--gone" / part).mkdir(parents=True, exist_ok=True)
    variables = environment(
        home, XDG_CACHE_HOME=CACHE, HF_HOME=str(home / "hub"), HF_HUB_OFFLINE="1", EDITOR="true", **extra
    )
    variables["PATH"] = f"{home}/bin:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-c", text], cwd=home, env=variables, capture_output=True, text=True, timeout=250, check=False
    )


def test_every_command_is_called() -> None:
    """But for one that does not end: tests/test_serve_command.py has it."""
    assert {name for name, each in TREE.items() if each.arguments or not each.commands} - {"serve"} <= CALLS.keys() <= TREE.keys()


def where(name: str, server: OpenAIServer) -> dict[str, str]:
    """The variable would send run and chat to the server as well."""
    return {"NANOVLLM_URL": server.url} if name == "bench.serve" else {}


@pytest.mark.parametrize("name", CALLS)
def test_a_pipe_gets_plain_text_and_quiet_is_quiet(name: str, home: Path, server: OpenAIServer) -> None:
    """With standard input closed, and where FORCE_COLOR asks for colour, which a standard output that is data never has."""
    text = f"nanovllm {CALLS[name]} -q <&- | cat; exit ${{PIPESTATUS[0]}}"
    done = call(home, text, FORCE_COLOR="1", **where(name, server))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


def test_a_library_behind_a_command_is_quiet_too(home: Path) -> None:
    pytest.importorskip("transformers")
    done = call(home, "nanovllm verify tiny --against transformers --tokens 8 -q")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("name", CALLS)
def test_a_reader_who_has_enough_is_no_failure(name: str, home: Path, server: OpenAIServer) -> None:
    text = f"nanovllm {CALLS[name]} </dev/null | head -1; exit ${{PIPESTATUS[0]}}"
    done = call(home, text, **where(name, server))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "error" not in done.stderr.lower()


@pytest.mark.parametrize("name", TREE)
def test_help_is_plain_and_says_all(name: str, tmp_path: Path) -> None:
    """At any width, with every flag; asked for as it is misread most often, without a word on stderr."""
    for columns in ("80", "120"):
        result = nanovllm(tmp_path, *TREE[name].words[1:], "--help", COLUMNS=columns, FORCE_COLOR="1")
        assert (result.code, result.err) == (0, "")
        assert "\x1b" not in result.out
        assert all(flag in result.out for each in TREE[name].options for flag in (*each.flags, *each.off))
        assert max(map(len, result.out.splitlines())) <= 120
