"""`run --url` against a scripted server: what is asked, what comes out, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from nanovllm_cli.client.http import Server
from nanovllm_cli.client.wire import chat_body
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError
from openai_server import OpenAIServer, Reply, Request, Script
from test_cli_driver import Result, environment, nanovllm

QUIET = ("-q", "--no-save")


def pieces(*texts: str, reasoning: str = "", finish: str = "stop", **choice: Any) -> Script:
    """An answer in these pieces, with usage: 7 tokens of prompt, a token a piece."""

    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        if reasoning:
            await reply.event({"choices": [{"index": 0, "delta": {"role": "assistant", "reasoning_content": reasoning}}]})
        for text in texts:
            await reply.piece(text)
        await reply.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish, **choice}]})
        await reply.usage(7, len(texts))
        await reply.done()

    return answer


def refusing(status: str, error: Any, *headers: str, times: int = 10**9) -> Script:
    """So often; then it answers."""

    async def answer(reply: Reply, request: Request) -> None:
        if request.index < times:
            await reply.whole(status, {"error": error}, *headers)
        else:
            await pieces("at last")(reply, request)

    return answer


def run(home: Path, server: OpenAIServer | str, *args: str, **more: Any) -> Result:
    url = server if isinstance(server, str) else server.url
    return nanovllm(home, "run", "--url", url, *args, **more)


def asked(home: Path, *args: str, **more: Any) -> tuple[dict[str, Any], Request]:
    """The body of the one request that these arguments make."""
    with OpenAIServer(pieces("ok")) as server:
        result = run(home, server, *QUIET, *args, **more)
    assert (result.code, result.err) == (0, "")
    [reply] = server.replies
    return reply.request.body, reply.request


# ---- what is asked ----


def test_a_chat_with_what_was_asked_for_and_nothing_else(tmp_path: Path) -> None:
    body, request = asked(tmp_path, "Once", "upon", "-sys", "be brief")
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert body == {
        "model": "fake",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Once upon"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_every_sampling_option_has_its_name(tmp_path: Path) -> None:
    flags = """-n 9 --temp 0.5 --top-k 4 --top-p 0.8 --min-p 0.1 --top-nsigma 1 --typical 0.9 -s 3
        --repeat-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --repeat-last-n 64
        --dry-multiplier 0.4 --dry-base 1.5 --dry-allowed-length 3 --dry-penalty-last-n 5 --dry-sequence-breaker x
        --xtc-probability 0.1 --xtc-threshold 0.2 -l 5+1 -l 6-2.5 --ignore-eos --stop END --stop \\n
        --bad-word no --min-tokens 2 -N 2 --logprobs 3 --json"""
    body, _ = asked(tmp_path, "hi", *flags.split())
    for known in ("model", "messages", "stream", "stream_options"):
        del body[known]
    assert body == {
        "max_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.8, "min_p": 0.1, "top_n_sigma": 1.0, "typical_p": 0.9,
        "seed": 3, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "penalty_last_n": 64,
        "dry_multiplier": 0.4, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 5, "dry_sequence_breakers": ["x"],
        "xtc_probability": 0.1, "xtc_threshold": 0.2, "logit_bias": {"5": 1.0, "6": -2.5}, "ignore_eos": True,
        "stop": ["END", "\n"], "bad_words": ["no"], "min_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip


def test_a_new_seed_is_the_servers_to_draw(tmp_path: Path) -> None:
    assert "seed" not in asked(tmp_path, "hi", "--seed", "-1")[0]


def test_plain_text_goes_to_completions_as_far_as_the_context(tmp_path: Path) -> None:
    body, request = asked(tmp_path, "--raw", "Once", "--logprobs", "2", "--json")
    assert request.path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["logprobs"]) == ("Once", None, 2)
    assert asked(tmp_path, "--raw", "Once", "-n", "5")[0]["max_tokens"] == 5


def test_thinking_and_template_variables(tmp_path: Path) -> None:
    body, _ = asked(tmp_path, "hi", "--think", "off", "--chat-template-kwargs", '{"tone": "dry"}')
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "tone": "dry"}


def test_the_form_of_an_answer_is_asked_for(tmp_path: Path) -> None:
    body, _ = asked(tmp_path, "hi", "--json-schema", '{"type": "null"}', "--reasoning-budget", "5")
    schema = {"name": "answer", "schema": {"type": "null"}, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert body["reasoning_budget"] == 5
    for form, fields in (
        (Constraint("json_object"), {"response_format": {"type": "json_object"}}),
        (Constraint("regex", "a+"), {"structured_outputs": {"regex": "a+"}}),
        (Constraint("choice", '["a", "b"]'), {"structured_outputs": {"choice": ["a", "b"]}}),
        (Constraint("gbnf", 'root ::= "a"'), {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        (Constraint("lark", 'start: "a"'), {"structured_outputs": {"grammar": 'start: "a"'}}),
    ):
        plain = chat_body("m", [], {})
        assert chat_body("m", [], {"constraint": form, "reasoning_budget": -1}) == plain | fields


@pytest.mark.parametrize(
    ("models", "args", "model", "prompt"),
    [
        (("one",), ("one", "hi", "you"), "one", "hi you"),
        (("one",), ("hi", "you"), "one", "hi you"),
        (("one", "two"), ("two", "hi"), "two", "hi"),
        (("one", "two"), ("-m", "two", "two", "hi"), "two", "two hi"),
        (("one",), ("-m", "not-listed", "hi"), "not-listed", "hi"),
    ],
)
def test_which_model_is_asked(tmp_path: Path, models: tuple[str, ...], args: tuple[str, ...], model: str, prompt: str) -> None:
    with OpenAIServer(pieces("ok"), models) as server:
        assert run(tmp_path, server, *QUIET, *args).out == "ok\n"
    body = server.replies[0].request.body
    assert (body["model"], body["messages"][0]["content"]) == (model, prompt)


def test_a_model_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    with OpenAIServer(pieces("ok"), ("qwen3:8b", "tiny")) as server:
        several = run(tmp_path, server, "hello")
        slip = run(tmp_path, server, "qwen3:8", "hello")
    assert (several.code, slip.code) == (2, 2)
    assert several.err == "error: the server has several models: qwen3:8b, tiny\nhint: name one of them first, or by -m\n"
    assert slip.err.endswith("hint: did you mean qwen3:8b? -m qwen3:8b leaves no doubt\n")
    assert server.replies == []


def test_the_forms_of_a_url(tmp_path: Path) -> None:
    with OpenAIServer(pieces("ok")) as server:
        host = server.url.removeprefix("http://")
        named = f"http://{host.replace('127.0.0.1', 'localhost')}"
        for form in (host, f"http://{host}/", f"http://{host}/v1", f"http://{host}/v1/", named):
            assert run(tmp_path, form, *QUIET, "hi").out == "ok\n"
        assert nanovllm(tmp_path, "run", *QUIET, "hi", NANOVLLM_URL=server.url).out == "ok\n"
        # a file in a folder that somebody only looks at does not say who reads what is asked
        (tmp_path / "nanovllm.toml").write_text(f'[run]\nurl = "{server.url}"\n')
        assert "'url' is no setting" in nanovllm(tmp_path, "run", *QUIET, "hi").err
        (tmp_path / "nanovllm.toml").unlink()
        # nothing is between a client and its server, whatever the environment says of proxies
        dead = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
        assert run(tmp_path, server, *QUIET, "hi", **dead).out == "ok\n"
    assert [reply.request.path for reply in server.replies] == ["/v1/chat/completions"] * 7
    assert run(tmp_path, "http://a:b@c", "hi").code == 2
    for form in ("ftp://x", "http://", "http://a:b@c", "http://x/?q=1", "unix:relative", "unix:///\0", "http://x:99999"):
        with pytest.raises(UsageError):
            Server.at(form)


def test_a_unix_socket(tmp_path: Path) -> None:
    with OpenAIServer(pieces("ok"), socket=tmp_path / "s") as server:
        assert run(tmp_path, server, *QUIET, "hi").out == "ok\n"
    assert server.replies[0].request.headers["host"] == "localhost"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_is_checked(tmp_path: Path) -> None:
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "1")
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(["openssl", "req", "-x509", *key, *name], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with OpenAIServer(pieces("ok"), context=context) as server:
        unknown = run(tmp_path, server, *QUIET, "hi")
        assert run(tmp_path, server, *QUIET, "hi", SSL_CERT_FILE=str(tmp_path / "cert.pem")).out == "ok\n"
    assert unknown.code == 1
    assert "certificate" in unknown.err
    assert "SSL_CERT_FILE" in unknown.err


class NothingHere(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address, without its scheme, of a server that has none of these paths and speaks no TLS."""
    with http.server.HTTPServer(("127.0.0.1", 0), NothingHere) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_tls_where_none_is_spoken(tmp_path: Path, elsewhere: str) -> None:
    mistaken = run(tmp_path, f"https://{elsewhere}", *QUIET, "hi")
    assert mistaken.code == 1
    assert mistaken.err.endswith("/v1/models: that port does not speak TLS\nhint: try http:// instead of https://\n")


def test_an_address_that_is_none_of_an_api(tmp_path: Path, elsewhere: str) -> None:
    mistaken = run(tmp_path, f"{elsewhere}/v1/chat/completions", *QUIET, "hi")
    assert mistaken.code == 1
    assert "lists no model (HTTP 404)\nhint: --url is what stands before /v1" in mistaken.err


class MovedAway(NothingHere):
    def do_GET(self) -> None:
        self.send_response(308)
        self.send_header("Location", "https://elsewhere.example/v1/models")
        self.end_headers()


def test_a_server_that_has_moved_is_not_followed_but_named(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), MovedAway) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        result = run(tmp_path, f"http://127.0.0.1:{server.server_port}", *QUIET, "hi")
        server.shutdown()
    assert result.code == 1
    assert "/v1/models has moved to https://elsewhere.example/v1/models\nhint: the key goes nowhere but to --url" in result.err
    with OpenAIServer(refusing("307 Temporary Redirect", "there", "Location: https://elsewhere.example/v1/")) as moved:
        result = run(tmp_path, moved, *QUIET, "hi")
    assert (result.code, len(moved.replies)) == (1, 1)
    assert "/v1/chat/completions has moved to https://elsewhere.example/v1/\n" in result.err


def test_which_key_counts_and_that_none_is_shown(tmp_path: Path) -> None:
    keys = {"OPENAI_API_KEY": "third"}
    for args, environ, expected in (
        ((), {}, None),
        ((), keys, "Bearer third"),
        ((), keys | {"NANOVLLM_API_KEY": "second"}, "Bearer second"),
        (("--api-key", "first"), keys | {"NANOVLLM_API_KEY": "second"}, "Bearer first"),
    ):
        _, request = asked(tmp_path, "hi", *args, **environ)
        assert request.headers.get("authorization") == expected
    bad = run(tmp_path, "http://127.0.0.1:1", "hi", "--api-key", "a\nb", "--debug")
    assert bad.code == 2
    assert "a\nb" not in bad.err


@pytest.mark.parametrize("flags", ["--quant int8", "-c 100", "--threads 2", "--offline", "--chat-template chatml"])
def test_what_only_a_model_here_could_do_is_refused_by_name(tmp_path: Path, flags: str) -> None:
    refused = run(tmp_path, "http://127.0.0.1:1", "hi", *flags.split())
    assert refused.code == 2
    name = {"-c": "--ctx-size"}.get(flags.split()[0], flags.split()[0])
    assert refused.err.startswith(f"error: {name} has no meaning with --url")


def test_of_a_server_only_what_it_was_told_is_known_to_change_nothing(tmp_path: Path) -> None:
    with OpenAIServer(pieces("ok")) as server:
        sure = run(tmp_path, server, "--no-stats", "--temp", "0", "--top-k", "4", "hi")
        unsure = run(tmp_path, server, "--no-stats", "--repeat-last-n", "4", "--dry-base", "2", "--xtc-threshold", "0.2", "hi")
    assert sure.err == "--top-k changes nothing: at --temp 0 the likeliest token is taken\n"
    assert unsure.err == ""


def test_defaults_for_models_here_do_not_concern_a_server(tmp_path: Path) -> None:
    asked(tmp_path, "hi", NANOVLLM_CTX_SIZE="100", NANOVLLM_QUANT="int8")
    for flags in (["--api-key", "x"], ["--timeout", "5"]):
        refused = nanovllm(tmp_path, "run", "tiny", "hi", *flags)
        assert (refused.code, refused.err) == (2, f"error: {flags[0]} has no meaning without --url\n")
    assert run(tmp_path, "http://127.0.0.1:1", "--raw", "-sys", "x", "hi").err.startswith("error: --system-prompt has no meaning")
    for timeout in ("0", "-1", "nan"):
        assert run(tmp_path, "http://127.0.0.1:1", "--timeout", timeout, "hi").code == 2


# ---- what comes out ----


def test_text_goes_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    with OpenAIServer(pieces("Hel", "lo", reasoning="hm\n")) as server:
        plain = run(tmp_path, server, "hi")
        shown = run(tmp_path, server, "-q", "--reasoning", "show", "hi")
    assert (plain.code, plain.out) == (0, "Hello\n")
    assert plain.err.startswith("prompt 7 tokens | answer 2 tokens")
    assert "memory" not in plain.err
    assert (shown.out, shown.err) == ("Hello\n", "hm\n")


def test_json_has_what_the_server_tells(tmp_path: Path) -> None:
    with OpenAIServer(pieces("Hel", "lo", reasoning="hm", stop_reason="END")) as server:
        whole = json.loads(run(tmp_path, server, *QUIET, "--json", "hi").out)
        hidden = json.loads(run(tmp_path, server, *QUIET, "--json", "--reasoning", "hide", "hi").out)
        *steps, end = map(json.loads, run(tmp_path, server, *QUIET, "--jsonl", "hi").out.splitlines())
    answer = {"index": 0, "text": "Hello", "reasoning": "hm", "finish_reason": "stop", "stop_reason": "END", "num_tokens": 2}
    usage = {"prompt_tokens": 7, "cached_tokens": None, "answer_tokens": 2}
    assert {name: whole[name] for name in ("model", "answers", "usage")} == {
        "model": "fake", "answers": [answer], "usage": usage,
    }  # fmt: skip
    assert "reasoning" not in hidden["answers"][0]
    assert [(step["event"], step["text"], step.get("reasoning")) for step in steps] == [
        ("token", "", "hm"), ("token", "Hel", None), ("token", "lo", None), ("token", "", None),
    ]  # fmt: skip
    assert (end["event"], end["usage"], end["answers"][0]["num_tokens"]) == ("end", usage, 2)
    assert whole["statistics"]["seconds"] >= whole["statistics"]["time_to_first_token"] > 0
    assert not {"weight_bytes", "kv_bytes", "load_seconds"} & set(whole["statistics"])


def in_writes(*writes: str) -> Script:
    """A token a letter, what belongs together in one write; the last one ends it. 0.2 s between them."""

    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        whole = "".join(writes)
        end = [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(whole)}}]
        end.insert(0, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        for write in writes:
            if write is not writes[0]:
                await asyncio.sleep(0.2)
            events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in write]
            parts = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events + end * (write is writes[-1])]
            await reply.raw(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))
        await reply.done()

    return answer


def test_a_rate_is_told_only_where_there_was_time_to_measure(tmp_path: Path) -> None:
    with OpenAIServer(in_writes("Hello")) as server:
        at_once = json.loads(run(tmp_path, server, *QUIET, "--json", "hi").out)
        told = run(tmp_path, server, "--no-save", "hi")
    assert at_once["usage"]["answer_tokens"] == 5
    assert at_once["statistics"]["answer_tokens_per_second"] is None
    assert told.err.startswith("prompt 7 tokens | answer 5 tokens | first token")
    with OpenAIServer(in_writes("Hell", "o")) as server:
        found = json.loads(run(tmp_path, server, *QUIET, "--json", "hi").out)["statistics"]
    # one token came later than the first ones, after the 0.2 s
    assert 0 < found["answer_tokens_per_second"] * (found["seconds"] - found["time_to_first_token"]) < 2


def with_timings(timings: Any) -> Script:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("Hel")
        await reply.piece("lo")
        await reply.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await reply.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}, "timings": timings})
        await reply.done()

    return answer


def test_rates_are_the_servers_where_it_says_them(tmp_path: Path) -> None:
    """The prompt's of what was computed, the answer's without its first token, as of a model in this process."""
    timings = {"cache_n": 1, "prompt_n": 8, "prompt_ms": 200.0, "predicted_n": 5, "predicted_ms": 2000}
    timings |= {"draft_n": 3, "draft_n_accepted": 2}
    with OpenAIServer(with_timings(timings)) as server:
        found = json.loads(run(tmp_path, server, *QUIET, "--json", "hi").out)["statistics"]
        line = run(tmp_path, server, "--no-save", "hi").err
    assert (found["prompt_tokens_per_second"], found["answer_tokens_per_second"]) == (40.0, 2.0)
    assert (found["guessed_tokens"], found["held_tokens"]) == (3, 2)
    assert line.startswith("prompt 9 tokens, 40.0 tok/s | answer 5 tokens (2 of 3 guesses held), 2.0 tok/s | first token")


@pytest.mark.parametrize(
    "timings", [None, [], "fast", {}, {"prompt_n": -1, "prompt_ms": "1", "predicted_n": True, "predicted_ms": 1e300}]
)
def test_timings_that_say_nothing_are_no_rates(timings: Any, tmp_path: Path) -> None:
    with OpenAIServer(with_timings(timings)) as server:
        found = json.loads(run(tmp_path, server, *QUIET, "--json", "hi").out)
    assert found["answers"][0]["text"] == "Hello"
    assert found["statistics"]["prompt_tokens_per_second"] is None
    assert found["statistics"]["guessed_tokens"] is None


def test_several_answers_and_their_logprobs(tmp_path: Path) -> None:
    async def two(reply: Reply, request: Request) -> None:
        await reply.begin()
        for index, text in ((1, "B"), (0, "A")):
            top = [{"token": text, "logprob": -0.5}, {"token": "?", "logprob": -9999.0}]
            logprobs = {"content": [{"token": text, "logprob": -0.5, "bytes": [1], "top_logprobs": top}]}
            await reply.event({"choices": [{"index": index, "delta": {"content": text}, "logprobs": logprobs}]})
            await reply.event({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]})
        await reply.usage(3, 2)
        await reply.done()

    with OpenAIServer(two) as server:
        record = json.loads(run(tmp_path, server, *QUIET, "-N", "2", "--logprobs", "2", "--json", "hi").out)
        text = run(tmp_path, server, *QUIET, "-N", "2", "hi").out
    assert text == "A\n---\nB\n"
    assert [(each["text"], each["num_tokens"]) for each in record["answers"]] == [("A", None), ("B", None)]
    assert record["answers"][1]["logprobs"] == [
        {"token": "B", "logprob": -0.5, "top": [{"token": "B", "logprob": -0.5}, {"token": "?", "logprob": None}]}
    ]


def test_logprobs_of_a_text(tmp_path: Path) -> None:
    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        logprobs = {"tokens": ["A"], "token_logprobs": [-0.5], "top_logprobs": [{"A": -0.5, "B": -2.0}], "text_offset": [0]}
        await reply.event({"choices": [{"index": 0, "text": "A", "logprobs": logprobs, "finish_reason": "length"}]})
        await reply.done()

    with OpenAIServer(answer) as server:
        record = json.loads(run(tmp_path, server, *QUIET, "--raw", "--logprobs", "2", "--json", "hi").out)
    [entry] = record["answers"][0]["logprobs"]
    assert entry == {"token": "A", "logprob": -0.5, "top": [{"token": "A", "logprob": -0.5}, {"token": "B", "logprob": -2.0}]}
    assert record["usage"] == {"prompt_tokens": None, "cached_tokens": None, "answer_tokens": None}


def test_a_file_a_code_block_and_a_limit(tmp_path: Path) -> None:
    with OpenAIServer(pieces("see\n```py\nx = 1\n", "```\n", finish="length")) as server:
        cut = run(tmp_path, server, "--no-stats", "hi")
        told = run(tmp_path, server, "--no-stats", "-n", "5", "hi")
        assert run(tmp_path, server, *QUIET, "-x", "hi").out == "x = 1\n"
        assert run(tmp_path, server, *QUIET, "-o", "out.txt", "hi").out == ""
    assert (tmp_path / "out.txt").read_text() == "see\n```py\nx = 1\n```\n"
    assert cut.err == "cut off: the limit is the server's own, or its context is full; -n asks for more\n"
    assert told.err == ""


def test_the_last_run_is_continued(tmp_path: Path) -> None:
    with OpenAIServer(pieces("one")) as server:
        run(tmp_path, server, "-q", "first")
        run(tmp_path, server, "-q", "--continue", "second")
        run(tmp_path, server, "-q", "--continue")
        run(tmp_path, server, "-q", "--raw", "text")
        assert run(tmp_path, server, "-q", "--raw", "--continue").out == "one\n"
    bodies = [reply.request.body for reply in server.replies]
    said = [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "one")]
    assert [(each["role"], each["content"]) for each in bodies[1]["messages"]] == said[:3]
    assert [(each["role"], each["content"]) for each in bodies[2]["messages"]] == said
    assert (bodies[2]["continue_final_message"], bodies[2]["add_generation_prompt"]) == (True, False)
    assert bodies[4]["prompt"] == "textone"


def test_who_goes_on_without_the_server_is_told_whose_the_model_was(tmp_path: Path) -> None:
    with OpenAIServer(pieces("one"), models=("missing",)) as server:
        run(tmp_path, server, "-q", "first")
        nanovllm(tmp_path, "chat", "--url", server.url, "-q", stdin="hi\n")
    for words in (("run", "-q", "--continue", "-p", "second"), ("chat", "-q", "--continue")):
        told = nanovllm(tmp_path, *words)
        assert (told.code, told.err.split("\n")[0]) == (3, "error: no model named missing")
        assert "if it was a server's, say --url" in told.err
    assert "--url" not in nanovllm(tmp_path, "run", "-q", "--continue", "-m", "missing", "-p", "second").err


def test_no_torch_is_needed(tmp_path: Path) -> None:
    code = (
        "import os, sys; import nanovllm_cli.cli.app as app\n"
        "app._leave = lambda code: (print(code, 'torch' in sys.modules, 'numpy' in sys.modules), os._exit(0))\n"
        "app.main(sys.argv[1:])"
    )
    with OpenAIServer(pieces("ok")) as server:
        command = [sys.executable, "-c", code, "run", "--url", server.url, *QUIET, "--json", "hi"]
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout.splitlines()[-1] == "0 False False", done


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("status", "error", "code", "says", "hint"),
    [
        ("401 Unauthorized", {"message": "no key"}, 4, "HTTP 401: no key", "NANOVLLM_API_KEY"),
        ("403 Forbidden", "not you", 4, "HTTP 403: not you", "--api-key"),
        ("404 Not Found", {"message": "gone", "code": "model_not_found"}, 3, "the server has no model nope", "it has fake"),
        ("400 Bad Request", {"message": "9 > 8 tokens", "code": "context_length_exceeded"}, 5, "9 > 8 tokens", "-n"),
        ("400 Bad Request", {"message": "This model's maximum context length is 8"}, 5, "maximum context length", "shorten"),
        ("400 Bad Request", {"message": "long", "type": "exceed_context_size_error"}, 5, "long", "shorten"),
        ("400 Bad Request", {"message": "n is\n1 to 8"}, 2, "refuses the request: n is 1 to 8", ""),
        ("422 Unprocessable", "odd", 2, "refuses the request: odd", ""),
        ("500 Internal Server Error", {"message": "boom"}, 1, "HTTP 500: boom", ""),
        ("302 Found", None, 1, "HTTP 302", ""),
    ],
)  # fmt: skip
def test_a_refusal_is_a_typed_error(tmp_path: Path, status: str, error: Any, code: int, says: str, hint: str) -> None:
    with OpenAIServer(refusing(status, error)) as server:
        result = run(tmp_path, server, *QUIET, "-m", "nope", "hi")
    assert (result.code, result.out) == (code, "")
    assert says in result.err.splitlines()[0]
    assert hint in result.err
    assert len(server.replies) == 1


def test_a_wrong_path_is_not_a_missing_model(tmp_path: Path) -> None:
    with OpenAIServer(refusing("404 Not Found", "nothing here")) as server:
        result = run(tmp_path, server, *QUIET, "hi")
    assert (result.code, "no such endpoint: nothing here" in result.err) == (1, True)


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path, status: str) -> None:
    with OpenAIServer(refusing(status, {"message": "a model is loaded"}, "Retry-After: 0.2", times=2)) as server:
        result = run(tmp_path, server, "--no-save", "--no-stats", "hi")
    assert (result.code, result.out) == (0, "at last\n")
    assert f"HTTP {status[:3]}: a model is loaded; the server is asked again in 0.2 s" in result.err
    came = [reply.request.came for reply in server.replies]
    assert all(after - before >= 0.2 for before, after in itertools.pairwise(came))


def test_a_busy_server_is_not_asked_for_ever(tmp_path: Path) -> None:
    for headers, times in ((["Retry-After: 0"], 5), (["Retry-After: 0", "x-should-retry: false"], 1), (["Retry-After: 3600"], 1)):
        with OpenAIServer(refusing("503 Service Unavailable", {"message": "loading"}, *headers)) as server:
            result = run(tmp_path, server, *QUIET, "hi")
        assert (result.code, "HTTP 503: loading\nhint: try again in a while" in result.err) == (1, True)
        assert len(server.replies) == times


def test_nobody_is_there(tmp_path: Path) -> None:
    for args in (("hi",), ("-m", "x", "hi")):
        refused = run(tmp_path, "http://127.0.0.1:1", *QUIET, *args)
        assert refused.code == 1
        assert "connection refused" in refused.err
        assert "hint: is it running? nanovllm serve" in refused.err
        assert run(tmp_path, "http://no-such-host.invalid", *QUIET, *args).code == 1
        assert "no such file" in run(tmp_path, f"unix://{tmp_path}/none", *QUIET, *args).err


BROKEN: dict[str, Any] = {
    "closed": (lambda reply: reply.raw(b"5\r\nhal"), "lost in the middle"),
    "reset": (lambda reply: _reset(reply), "lost"),
    "refused midway": (
        lambda reply: reply.event({"error": {"message": "no token", "type": "invalid_request_error", "code": "unmeetable"}}),
        "the server refuses the request: no token",
    ),
    "refused by vLLM": (
        lambda reply: reply.event({"error": {"message": "bad", "type": "BadRequestError", "code": 400}}),
        "the server refuses the request: bad",
    ),
    "told": (lambda reply: reply.event({"error": {"message": "out of memory"}}), "the server failed: out of memory"),
    "no JSON": (lambda reply: reply.chunk(b"data: {oops\n\n"), "not JSON"),
    "early end": (lambda reply: reply.raw(b"0\r\n\r\n"), "ended before it was complete"),
    "not HTTP": (lambda reply: reply.raw(b"zz\r\n"), "a chunk of size"),
    "number": (lambda reply: reply.event({"choices": [{"index": 10**9, "delta": {}}]}), "an answer of number"),
}


async def _reset(reply: Reply) -> None:
    reply.writer.transport.abort()


@pytest.mark.parametrize("kind", BROKEN)
def test_an_answer_that_breaks_off_leaves_what_came(tmp_path: Path, kind: str) -> None:
    breaks, says = BROKEN[kind]

    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        await reply.piece("half an")
        if request.index % 2 or kind in ("reset", "not HTTP"):  # in one piece with what breaks it, and apart
            await asyncio.sleep(0.05)
        await breaks(reply)

    with OpenAIServer(answer) as server:
        result = run(tmp_path, server, "-q", "hi")
        assert run(tmp_path, server, "-q", "hi") == result
        to_file = run(tmp_path, server, "-q", "--json", "-o", "out", "hi")
    code = 2 if kind.startswith("refused") else 1
    assert (result.code, result.out) == (code, "half an\n")
    assert says in result.err
    assert (to_file.code, to_file.out, (tmp_path / "out").exists()) == (code, "", False)
    last = json.loads((tmp_path / ".local/state/nanovllm/last-run.json").read_text())
    assert last["messages"][-1] == {"role": "assistant", "content": "half an"}  # --continue goes on with it


def test_what_is_no_stream_is_said(tmp_path: Path) -> None:
    async def page(reply: Reply, request: Request) -> None:
        await reply.whole("200 OK", b"<html>", "Content-Type: text/html")

    with OpenAIServer(page) as server:
        result = run(tmp_path, server, *QUIET, "hi")
    assert (result.code, "does not stream: its answer is of the type 'text/html'" in result.err) == (1, True)


def test_the_name_of_a_stream_has_any_case(tmp_path: Path) -> None:
    """RFC 9110, section 8.3.1."""

    async def named(reply: Reply, request: Request) -> None:
        await reply.begin(kind="Text/Event-Stream;charset=UTF-8")
        await reply.piece("Hello", "stop")
        await reply.done()

    with OpenAIServer(named) as server:
        result = run(tmp_path, server, *QUIET, "hi")
    assert (result.code, result.out) == (0, "Hello\n")


def test_silence_has_a_limit_and_signs_of_life_count(tmp_path: Path) -> None:
    async def slow(reply: Reply, request: Request) -> None:
        await reply.begin()
        for _ in range(5):
            await asyncio.sleep(0.2)
            await reply.chunk(b": ping\n\n")
        await reply.piece("now", "stop")
        if request.index:
            await asyncio.sleep(30)
        await reply.done()

    with OpenAIServer(slow) as server:
        patient = run(tmp_path, server, *QUIET, "--timeout", "0.6", "hi")
        late = run(tmp_path, server, *QUIET, "--timeout", "0.6", "hi")
    assert (patient.code, patient.out) == (0, "now\n")
    assert (late.code, late.out) == (1, "now\n")
    assert "nothing came from" in late.err
    assert "--timeout waits longer" in late.err


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_closes_the_connection(tmp_path: Path, stop: signal.Signals, code: int, begins: bool) -> None:
    came, gone = threading.Event(), threading.Event()

    async def endless(reply: Reply, request: Request) -> None:
        if begins:
            await reply.begin()
            await reply.piece("half")
        came.set()
        await reply.gone()
        gone.set()

    with OpenAIServer(endless) as server:
        command = [sys.executable, "-m", "nanovllm_cli", "run", "-q", "--url", server.url, "hi"]
        process = Forked(
            command, light=True, env=environment(tmp_path), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert came.wait(20)
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 4) if begins else b""
        process.send_signal(stop)
        began = time.monotonic()
        out, err = process.communicate(timeout=10)
        assert gone.wait(5)
    assert time.monotonic() - began < 8
    assert (process.returncode, first + out, err) == (code, b"half\n" if begins else b"", b"")


def test_hostile_answers_do_no_harm(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"choices": [{"index": 0, "delta": {"content": 5, "reasoning_content": ["x"]}}]},
        {"choices": [{"index": 0, "delta": [], "logprobs": 3}]},
        {"choices": "x", "usage": {"prompt_tokens": "many"}},
        {"choices": [{"index": 0, "delta": {"content": "\ud800\x1b[31mred"}}]},
        {"choices": [{"index": 0, "delta": {"content": "!"}, "logprobs": {"content": [{"token": 1, "top_logprobs": 2}, 7]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": {}}]},
    ]

    async def answer(reply: Reply, request: Request) -> None:
        await reply.begin()
        for event in odd:
            await reply.event(event)
        await reply.done()

    with OpenAIServer(answer) as server:
        text = run(tmp_path, server, *QUIET, "hi")
        record = json.loads(run(tmp_path, server, *QUIET, "--json", "--logprobs", "1", "hi").out)
    assert (text.code, text.err) == (0, "")
    assert record["answers"][0]["text"] == "?\x1b[31mred!"
    assert record["answers"][0]["logprobs"] == [{"token": "", "logprob": None, "top": []}]


# ---- batches ----


def lines(path: Path, *values: Any) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


async def echo(reply: Reply, request: Request) -> None:
    said = request.body.get("prompt") or request.body["messages"][-1]["content"]
    if said == "bad":
        await reply.whole("400 Bad Request", {"error": {"message": "bad words"}})
        return
    await asyncio.sleep(0.05 if said.endswith("0") else 0.0)  # out of order
    await pieces(f"<{said}>")(reply, request)


def test_a_batch_is_asked_all_at_once_and_told_in_order(tmp_path: Path) -> None:
    many = [{"prompt": f"p{i}", "id": i} for i in range(70)]
    chat = {"messages": [{"role": "user", "content": "m"}], "temperature": 0.5}
    source = lines(tmp_path / "in", *many, chat, {"prompt": "bad"})
    with OpenAIServer(echo) as server:
        result = run(tmp_path, server, "--batch", source, "-sys", "s")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 1
    assert [each["answers"][0]["text"] for each in records[:-1]] == [f"<p{i}>" for i in range(70)] + ["<m>"]
    assert records[-1]["error"]["message"] == "the server refuses the request: bad words"
    assert 1 < server.most_at_once <= 32
    assert next(each for each in server.replies if each.request.body.get("temperature") == 0.5)
    assert all(each.request.body["messages"][0] == {"role": "system", "content": "s"} for each in server.replies)
    assert "72 lines (0 kept, 1 failed)" in result.err


def test_a_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    source = lines(tmp_path / "in", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "bad"})
    with OpenAIServer(echo, socket=tmp_path / "s") as server:
        assert run(tmp_path, server, "--batch", source, "-o", "out").code == 1
        assert "2 of 3 results are there already" in run(tmp_path, server, "--batch", source, "-o", "out").err
    assert [reply.request.body["messages"][0]["content"] for reply in server.replies][3:] == ["bad"]
    gone = run(tmp_path, f"unix://{tmp_path}/s", "--batch", source, "-o", "out", "-m", "fake")
    assert gone.code == 1
    assert "cannot reach" in gone.err  # the batch, not each of its lines
    assert len((tmp_path / "out").read_text().splitlines()) == 3


def test_a_plain_batch(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "m"}]
    source = lines(tmp_path / "in", {"prompt": "one"}, {"messages": messages}, {"prompt": "x", "prompt_logprobs": 0})
    with OpenAIServer(echo) as server:
        first, second, third = map(json.loads, run(tmp_path, server, "-q", "--raw", "--batch", source).out.splitlines())
    assert first["answers"][0]["text"] == "<one>"
    assert "messages need a chat template" in second["error"]["message"]
    assert third["error"]["message"] == "prompt_logprobs are not read from a server"
