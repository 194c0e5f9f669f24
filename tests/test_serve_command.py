"""`nanovllm serve` as a command: what its options come to, what it says, and one real server with the bundled model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("uvicorn")

from live_server import LiveServer, live_server
from nanovllm_cli.cli import serve as command
from nanovllm_cli.cli import served
from nanovllm_cli.cli.examples import EXAMPLES
from nanovllm_cli.cli.output import Console, Stream
from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.messages import Loading
from nanovllm_cli.server.ports import ChatDefaults
from nanovllm_cli.server.served_models import ModelSettings
from nanovllm_cli.server.settings import ServeSettings
from test_cli_driver import environment
from tiny_adapter import write_adapter

KEY = "a-key-that-is-long-enough"


class Served(NamedTuple):
    """What a command line would have served."""

    models: list[ModelSettings]
    settings: ServeSettings
    options: Any
    otlp_endpoint: str | None


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Served]:
    """Reads a command line up to where the server would begin; raises what the command raises."""
    seen: list[Served] = []

    def stop(models: Any, settings: Any, listener: Any, options: Any, otlp_endpoint: Any, screen: Any) -> None:
        seen.append(Served(models, settings, options, otlp_endpoint))

    monkeypatch.setattr(command, "_run", stop)
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def parse(*words: str) -> Served:
        from typer.main import get_command

        from nanovllm_cli.cli.program import PROGRAM, build

        line = ["serve", *words, *([] if "--port" in words or "--unix-socket" in words else ["--port", "0"])]
        click = get_command(build())
        with click.make_context(PROGRAM, line) as ctx:
            click.invoke(ctx)
        return seen.pop()

    return parse


def failure(parse: Callable[..., Served], *words: str) -> str:
    with pytest.raises(Exception) as raised:
        parse(*words)
    assert raised.value.exit_code == 2, raised.value  # type: ignore[attr-defined]
    return f"{raised.value} {getattr(raised.value, 'hint', '')}"


def test_models_come_as_words_and_by_m_and_are_called_as_they_were_named(parsed: Callable[..., Served]) -> None:
    served = parsed("tiny", "-c", "512", "-np", "3", "--temp", "0.5", "--quant", "int8")
    (model,) = served.models
    assert model.names == ("tiny",)
    assert (model.config.max_model_len, model.config.max_num_seqs, model.config.quant) == (512, 3, "int8")
    assert model.given == {"temperature": 0.5}
    assert parsed("-m", "tiny").models[0].names == ("tiny",)
    two = parsed("tiny", "--model", "tiny", "-a", "first", "--alias", "second").models
    assert [each.names for each in two] == [("first",), ("second",)]


def test_a_path_does_not_show_in_a_name(parsed: Callable[..., Served], tmp_path: Path) -> None:
    import nanovllm_cli

    folder = Path(nanovllm_cli.__file__).parent / "assets/tiny"
    assert parsed(str(folder)).models[0].names == ("tiny",)
    (tmp_path / "mine").symlink_to(folder)
    assert parsed("./mine").models[0].names == ("tiny",)


def test_one_model_may_have_several_names(parsed: Callable[..., Served]) -> None:
    assert parsed("tiny", "-a", "gpt-4,fast", "--served-model-name", "slow").models[0].names == ("gpt-4", "fast", "slow")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no model"), (["tiny", "tiny"], "--alias"), (["tiny", "tiny", "-a", "one"], "1 alias"),
        (["tiny", "-a", ""], "--alias"), (["tiny", "--host", "0.0.0.0"], "--api-key"),
        (["tiny", "--port", "99999"], "port"), (["tiny", "--api-key", "short"], "key"),
        (["tiny", "--max-models", "0"], "--max-models"), (["tiny", "--sleep-idle", "0"], "--sleep-idle"),
        (["tiny", "--sleep-idle", "nan"], "--sleep-idle"), (["tiny", "--ssl-key-file", "x"], "--ssl-cert-file"),
        (["tiny", "--temp", "-1"], "--temp must"), (["tiny", "-c", "-5"], "-5"), (["tiny", "--timeout", "0"], "--timeout"),
        (["tiny", "--max-requests", "0"], "--max-requests"), (["tiny", "--api-key-file", os.devnull], "no key"),
        (["tiny", "--api-key-file", "nowhere"], "nowhere"), (["tiny", "--api-key-file", "."], "directory"),
        (["tiny", "--swap-timeout", "0"], "--swap-timeout"), (["tiny", "--swap-timeout", "inf"], "--swap-timeout"),
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_is_told_before_anything_is_loaded(parsed: Callable[..., Served], words: list[str], told: str) -> None:
    assert told in failure(parsed, *words)


def test_loading_is_told_of_each_model_by_its_name() -> None:
    """Also where one begins with the stage that the other has ended with."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    streams = [Stream(shown, "x", required=False, environ={"TERM": "dumb"}) for _ in range(2)]
    tell = served.teller(Console(*streams))
    for name in ("one", "two"):
        tell(name, Loading(stage="weights", done=0, total=10, unit="B"))
        tell(name, Loading(stage="weights", done=10, total=10, unit="B"))
    assert [line.split("  ")[0] for line in shown.getvalue().splitlines()] == ["one: weights", "two: weights"]


def test_loading_is_a_line_a_stage_in_a_log() -> None:
    """Two models that load at once; the first run on a machine compiles for half a minute."""
    shown = io.StringIO()
    streams = [Stream(shown, "x", required=False, environ={"TERM": "xterm"}) for _ in range(2)]
    tell = served.teller(Console(*streams))
    for done in (0, 5, 10):
        tell("one", Loading(stage="compiling", done=done, total=10))
        tell("two", Loading(stage="weights", done=done, total=10, unit="B"))
    tell("one", Loading(stage="weights", done=0, total=10, unit="B"))
    assert shown.getvalue() == "one: compiling\ntwo: weights\none: weights\n"


def test_what_counts_in_conversations(parsed: Callable[..., Served]) -> None:
    words = ["--think", "off", "--chat-template-kwargs", '{"style": "terse"}', "--reasoning-budget", "5"]
    model = parsed("tiny", *words).models[0]
    assert (model.thinking, model.chat) == (False, ChatDefaults({"style": "terse"}, 5))
    nothing = parsed("tiny", "--reasoning-budget", "-1").models[0]
    assert (nothing.thinking, nothing.chat) == (None, ChatDefaults())
    two = ["tiny", "tiny", "-a", "a", "-a", "b"]
    for flag, value in zip(words[::2], words[1::2], strict=True):
        assert f"{flag} has no meaning with several models" in failure(parsed, *two, flag, value)
    for said, told in [
        ("--reasoning-budget -2", "--reasoning-budget is a number"), ("--chat-template-kwargs {", "is not JSON"),
        ("--chat-template-kwargs [1]", "is not a JSON object"),
        ('--think on --chat-template-kwargs {"enable_thinking":true}', "say the same thing"),
    ]:  # fmt: skip
        assert told in failure(parsed, "tiny", *said.split(" ", 3 if said.startswith("--think") else 1))


def test_a_default_of_the_environment_is_for_no_model_in_particular(
    parsed: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_THINK", "off")
    assert [each.thinking for each in parsed("tiny").models] == [False]
    assert [each.thinking for each in parsed("tiny", "tiny", "-a", "a", "-a", "b").models] == [None, None]


def test_keys_come_from_the_option_the_environment_and_a_file(
    parsed: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\n\nanother-long-key\n")
    served = parsed("tiny", "--host", "0.0.0.0", "--api-key", "given-on-the-line", "--api-key-file", "keys")
    assert served.settings.api_keys == ("given-on-the-line",)
    assert served.settings.key_file is not None
    assert served.settings.key_file.keys == (KEY, "another-long-key")
    monkeypatch.setenv("NANOVLLM_API_KEY", KEY)
    assert parsed("tiny").settings.api_keys == (KEY,)


def test_options_reach_the_settings(parsed: Callable[..., Served], tmp_path: Path) -> None:
    access = "tiny --unix-socket x.sock --cors-origin https://C/"
    limits = "--max-requests 7 --max-body 1M --timeout 9 --idle-timeout 8 --drain-timeout 6 --ping-interval 5"
    settings = parsed(*f"{access} {limits}".split()).settings
    assert (settings.unix_socket, settings.cors_origins) == ("x.sock", ("https://c",))
    assert parsed("tiny", "--allowed-host", "a", "--allowed-host", "b").settings.allowed_hosts == ("a", "b")
    assert (settings.max_requests, settings.max_body_bytes, settings.request_seconds) == (7, 1 << 20, 9)
    assert (settings.idle_seconds, settings.drain_seconds, settings.ping_seconds) == (8, 6, 5)
    engine = parsed("tiny", "--parallel", "3", "--scheduling-policy", "priority").models[0].config
    assert (engine.max_num_seqs, engine.policy) == (3, "priority")
    assert list(tmp_path.glob("*.sock")) == []  # removed again


def test_defaults_are_those_of_the_settings(parsed: Callable[..., Served]) -> None:
    assert parsed("tiny", "--port", "0").settings == ServeSettings(port=0)
    page = subprocess.run(
        [sys.executable, "-m", "nanovllm_cli", "serve", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    shown = " ".join(page.stdout.split())
    assert f"[{ServeSettings().port}]" in shown
    assert f"[{ServeSettings().host}]" in shown


@pytest.mark.parametrize("example", EXAMPLES["serve"])
def test_examples_are_command_lines(example: str, parsed: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(KEY)
    write_adapter(tmp_path / "adapter")
    aliases = "\n".join(f'"{name}" = "tiny"' for name in re.findall(r"qwen3:\S+", example))
    (tmp_path / "nanovllm.toml").write_text(f"[aliases]\n{aliases}\n")
    words = re.sub(r" --port \d+", "", example).split()[2:]
    if aliases:
        words += ["-a", "one", "-a", "two"]  # both are tiny here
    assert parsed(*words).models


# ---- one real server ----


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[contextlib.ExitStack, list[LiveServer]]]:
    with contextlib.ExitStack() as stack:
        yield stack, []


@pytest.fixture
def live(started: tuple[contextlib.ExitStack, list[LiveServer]], tmp_path: Path) -> LiveServer:
    """The last test's, if that has not ended it."""
    stack, servers = started
    if not servers or servers[-1].process.poll() is not None:
        log = tmp_path / "log.jsonl"
        options = ("-c", "512", "-np", "4", "--log-file", str(log), "--log-json", "--temp", "0", "--drain-timeout", "0.1")
        options += ("--device", "cpu", "--eager")
        servers.append(stack.enter_context(live_server("tiny", *options, env={"PYTHONPATH": os.pathsep.join(sys.path)})))
        servers[-1].log_path = log  # type: ignore[attr-defined]
    return servers[-1]


def test_it_says_where_it_listens_and_a_line_to_copy(live: LiveServer) -> None:
    said = "".join(live.log)
    assert f"listening at {live.url}" in said
    assert "context 512 tokens" in said
    assert "tiny: eager is for GPUs, and changes nothing on a CPU\n" in said  # what the engine's process has to say
    line = live.line("curl ").strip()
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_engine_reads_the_sampling_options_as_defaults(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answers = [live.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] for _ in range(2)]
    assert answers[0] == answers[1]  # --temp 0
    assert live.get("/props")[1]["default_generation_settings"]["params"]["temperature"] == 0.0


def test_a_request_is_a_line_of_the_json_log(live: LiveServer) -> None:
    request = urllib.request.Request(
        live.url + "/v1/completions",
        json.dumps({"prompt": "unspeakable secret", "max_tokens": 4}).encode(),
        {"content-type": "application/json", "x-request-id": "logged-1"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    text = ""
    while "logged-1" not in text:
        text = live.log_path.read_text()  # type: ignore[attr-defined]
    assert "unspeakable" not in text
    fields = next(line for line in map(json.loads, text.splitlines()) if line.get("request_id") == "logged-1")
    assert (fields["method"], fields["path"], fields["status"], fields["model"]) == ("POST", "/v1/completions", 200, "tiny")
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < fields["seconds"] < 60


def test_the_end_is_told_to_streams_and_takes_the_engine_along(live: LiveServer) -> None:
    """In the middle of an answer that takes longer than the server waits for one."""
    children = subprocess.run(["pgrep", "-P", str(live.process.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert children
    body = {"prompt": ["Once"] * 64, "max_tokens": 480, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{live.base_url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        live.process.send_signal(signal.SIGTERM)
        *_, last, done = [line for line in stream.read().split(b"\n") if line]
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "service_unavailable_error"
    assert done == b"data: [DONE]"
    assert live.process.wait(30) == 0
    for child in map(int, children):
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize("host", ["http://gpu.lan", "gpu.lan:8080", "*.lan", "gpu.lan.", "gpu.lan/", "a,b", "größe.lan", ""])
def test_what_no_request_can_call_this_machine_is_no_allowed_host(parsed: Callable[..., Served], host: str) -> None:
    with pytest.raises(UsageError, match="is no name of a machine"):
        parsed("tiny", "--allowed-host", host)
    for known in ("*", "gpu.lan", "GPU-1_a.Example.org", "192.168.1.5"):
        assert parsed("tiny", "--allowed-host", known).settings.allowed_hosts == (known,)


@pytest.mark.parametrize("origin", ["foo", "example.org", "https://example.org/page", '["*"]', ""])
def test_where_no_page_can_be_from_is_no_origin(parsed: Callable[..., Served], origin: str) -> None:
    with pytest.raises(UsageError, match="is where no page can be from") as refused:
        parsed("tiny", "--cors-origin", origin)
    assert "without a path; * is any" in str(refused.value.hint)
    for known in ("*", "null", "http://localhost:3000", "app://obsidian.md"):
        assert parsed("tiny", "--cors-origin", known).settings.cors_origins == (known,)
