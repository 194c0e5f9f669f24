"""`nanovllm run-batch`: OpenAI's form of a batch, by a server that a test writes, by the server's own routes, and by the bundled
model. The example lines are those of OpenAI's guide to batches and of vLLM's run-batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.cli.batch_requests import read_requests
from nanovllm_cli.cli.output import Console
from nanovllm_cli.errors import UsageError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.in_process import Routes
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text.batch_form import EXAMPLE, usage_of
from openai_server import OpenAIServer, Reply, Request
from server_fakes import FakeGenerates, FakePool, Script
from test_cli_driver import CACHE, Result, nanovllm

CHAT = {
    "custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions",
    "body": {
        "model": "gpt-4o-mini",
        "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello world!"}],
        "max_tokens": 1000,
    },
}  # fmt: skip
EMBEDDING = {
    "custom_id": "request-2", "method": "POST", "url": "/v1/embeddings",
    "body": {"model": "text-embedding-3-small", "input": "You are a helpful assistant."},
}  # fmt: skip
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def asking(custom_id: str, **body: Any) -> dict[str, Any]:
    return {**CHAT, "custom_id": custom_id, "body": body}


def answering(
    refusals: dict[str, tuple[str, Any, list[str]]] | None = None,
) -> Callable[[Reply, Request], Awaitable[None]]:
    """A server that repeats what was asked. refusals: by the request's `user`: a status, a body and headers."""
    refusals = refusals or {}

    async def script(reply: Reply, request: Request) -> None:
        status, body, headers = refusals.get(request.body.get("user", ""), ("200 OK", None, []))
        answer = {"asked": request.body, "usage": USAGE} if body is None else body
        await reply.whole(status, answer, f"x-request-id: req_{request.index}", *headers)

    return script


# ---- lines ----


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("nonsense", "line 1: not JSON", None),
        ("[1]", "line 1: not a JSON object", f"write {EXAMPLE}"),
        ({**CHAT, "custom_id": None}, "custom_id must be there", f"a line is {EXAMPLE}"),
        ({**CHAT, "custom_id": ""}, "custom_id must be there", None),
        ({**CHAT, "custom_id": 5}, "custom_id must be there", None),
        ({**CHAT, "custom_id": "x" * 513}, "at most 512 characters", None),
        ({"prompt": "Hello"}, "it has no body and no custom_id", "nanovllm run MODEL --batch FILE runs"),
        ({**CHAT, "method": "GET"}, 'method is "GET"', None),
        ({**CHAT, "url": "/v1/chat/completion"}, 'url is "/v1/chat/completion"', "did you mean /v1/chat/completions?"),
        ({**CHAT, "url": "/v1/files"}, 'url is "/v1/files"', None),
        ({**CHAT, "url": "/metrics"}, 'url is "/metrics"', "these are: /v1/chat/completions"),
        ({**CHAT, "url": None}, "url is null", None),
        ({**CHAT, "url": ["/v1/completions"]}, 'url is ["/v1/completions"]', None),
        ({**CHAT, "body": "Hello"}, "body must be there", None),
        ({**CHAT, "params": {}}, "unknown field 'params'", "what is asked stands in body"),
        ({**CHAT, "bodi": {}}, "unknown field 'bodi'", "did you mean body?"),
        (asking("a", stream=True), "body.stream: answers of a batch come whole", "leave it out"),
        ('{"custom_id": "a", "body": ' + "[" * 100_000, "nested too deeply", None),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"temperature": NaN}}', "NaN is not JSON", None),
    ],
)  # fmt: skip
def test_what_can_be_no_request_fails_alone(line: Any, message: str, hint: str | None, tmp_path: Path) -> None:
    first, second = read_requests(write(tmp_path / "in.jsonl", line, EMBEDDING), Console())
    assert first.broken is not None
    assert second.broken is None
    assert message in first.broken.message
    assert hint is None or (first.broken.hint or "").startswith(hint)


def test_lines_are_told_apart_and_the_same_id_is_nobodys(tmp_path: Path) -> None:
    found = read_requests(write(tmp_path / "in.jsonl", CHAT, "", EMBEDDING, {**EMBEDDING, "custom_id": "request-1"}), Console())
    assert [each.number for each in found] == [1, 3, 4]
    assert found[2].broken is not None
    assert found[2].broken.message == "line 4: custom_id 'request-1' is that of line 1, too"
    assert found[0].asking("m").body == {**CHAT["body"], "model": "m"}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="has no requests"):
        read_requests(write(tmp_path / "none.jsonl", "", " "), Console())


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (USAGE, (3, 2)), ({"input_tokens": 4, "output_tokens": 5, "total_tokens": 9}, (4, 5)), ({"total_tokens": 7}, (7, 0)),
        (None, (0, 0)), ({"prompt_tokens": "3"}, (0, 0)), ([], (0, 0)),
    ],
)  # fmt: skip
def test_tokens_are_counted_by_any_name(usage: Any, expected: tuple[int, int]) -> None:
    assert usage_of({"response": {"status_code": 200, "body": {"usage": usage}}}) == expected
    assert usage_of({"response": None}) == (0, 0)


# ---- a server's answers ----


def test_answers_have_openais_form_and_the_order_of_the_lines(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", CHAT, EMBEDDING, {**CHAT, "custom_id": "3", "url": "/rerank", "body": {"query": "a"}})
    with OpenAIServer(answering()) as server:
        result = nanovllm(tmp_path, "run-batch", "--url", server.url, "in.jsonl")
    assert (result.code, len(result.out.splitlines())) == (0, 3), result.err
    assert "3 lines (0 kept, 0 failed)" in result.err
    assert "prompts 9 tokens | answers 6 tokens" in result.err
    by_path = {reply.request.path: reply.request for reply in server.replies}
    assert set(by_path) == {"/v1/chat/completions", "/v1/embeddings", "/v1/rerank"}
    assert by_path["/v1/chat/completions"].body == CHAT["body"]
    first, second, _ = records(result.out)
    assert list(first) == ["id", "custom_id", "response", "error"]
    index = by_path["/v1/chat/completions"].index
    body = {"asked": CHAT["body"], "usage": USAGE}
    assert first["response"] == {"status_code": 200, "request_id": f"req_{index}", "body": body}
    assert (first["custom_id"], first["error"], second["custom_id"]) == ("request-1", None, "request-2")
    assert first["id"].startswith("batch_req_")
    assert first["id"] != second["id"]


def test_what_failed_is_asked_again_and_nothing_else(tmp_path: Path) -> None:
    wrong = {"error": {"message": "bad", "type": "invalid_request_error"}}
    refusals = {
        "refused": ("400 Bad Request", wrong, []), "unread": ("200 OK", b"<html>", []),
        "busy": ("429 Too Many", wrong, ["x-should-retry: false"]),
    }  # fmt: skip
    lines = [asking("a"), *(asking(user, user=user) for user in refusals), asking("b")]
    write(tmp_path / "in.jsonl", *lines)
    with OpenAIServer(answering(refusals)) as server:
        result = nanovllm(tmp_path, "run-batch", "--url", server.url, "-i", "in.jsonl", "-o", "out.jsonl")
        assert (result.code, result.out, len(server.replies)) == (1, "", 5)
        assert "error: 3 of 5 lines failed" in result.err
        first, refused, unread, busy, last = records((tmp_path / "out.jsonl").read_text())
        assert [each["custom_id"] for each in (first, last)] == ["a", "b"]
        assert refused["response"] == {"status_code": 400, "request_id": refused["response"]["request_id"], "body": wrong}
        assert refused["error"] is None
        assert (unread["response"], unread["error"]) == (None, {"code": "invalid_answer", "message": "HTTP 200, and no JSON"})
        assert busy["response"]["status_code"] == 429
        refusals.clear()
        again = nanovllm(tmp_path, "run-batch", "--url", server.url, "in.jsonl", "-o", "out.jsonl")
        assert (again.code, len(server.replies)) == (0, 8), again.err
        assert "2 of 5 results are there already" in again.err
        found = records((tmp_path / "out.jsonl").read_text())
        assert [each["custom_id"] for each in found] == ["a", "refused", "unread", "busy", "b"]
        other = nanovllm(tmp_path, "run-batch", "--url", server.url, "-m", "other", "in.jsonl", "-o", "out.jsonl")
        assert (other.code, len(server.replies)) == (2, 8)
        assert "holds results of other prompts, another model or other settings" in other.err
        of_openai = {"id": "batch_req_123", "custom_id": "a", "response": {"status_code": 200}, "error": None}
        write(tmp_path / "theirs.jsonl", of_openai)
        lost = nanovllm(tmp_path, "run-batch", "--url", server.url, "in.jsonl", "-o", "theirs.jsonl")
        assert (lost.code, len(server.replies)) == (2, 8)


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_everybody_ends_it(tmp_path: Path) -> None:
    busy = ["503 Busy", "429 Busy", "200 OK"]
    write(tmp_path / "in.jsonl", asking("a"))

    async def script(reply: Reply, request: Request) -> None:
        status = busy.pop(0) if busy else "401 Unauthorized"
        await reply.whole(status, {"error": {"message": "wait"}}, "Retry-After: 0")

    with OpenAIServer(script) as server:
        result = nanovllm(tmp_path, "run-batch", "-q", "--url", server.url, "in.jsonl")
        assert (result.code, len(server.replies)) == (0, 3), result.err
        refused = nanovllm(tmp_path, "run-batch", "-q", "--url", server.url, "in.jsonl", "-o", "out.jsonl")
    assert (refused.code, refused.out) == (4, "")
    assert "HTTP 401: wait" in refused.err
    gone = nanovllm(tmp_path, "run-batch", "--url", "http://127.0.0.1:9", "in.jsonl")
    assert gone.code != 0
    assert "cannot reach http://127.0.0.1:9/v1" in gone.err


def test_the_model_that_is_named_counts_and_lines_may_come_from_standard_input(tmp_path: Path) -> None:
    line = json.dumps(CHAT).encode() + b"\n"
    with OpenAIServer(answering()) as server:
        result = nanovllm(tmp_path, "run-batch", "-q", "--url", server.url, "-m", "mine", stdin=line)
    assert records(result.out)[0]["response"]["body"]["asked"] == {**CHAT["body"], "model": "mine"}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tiny", "a", "b"), "one file of requests at a time: a and b are two"),
        (("tiny", "a", "-i", "b"), "one file of requests at a time"),
        (("tiny",), "standard input has no requests"),
        (("tiny", "missing.jsonl"), "there is no file missing.jsonl"),
        (("tiny", "in.jsonl", "--overwrite"), "--overwrite has no meaning without -o"),
        (("--url", "http://127.0.0.1:9", "--temp", "0", "in.jsonl"), "--temp has no meaning with --url"),
        (("--url", "http://127.0.0.1:9", "--think", "on", "in.jsonl"), "--think has no meaning with --url"),
        (("tiny", "in.jsonl", "--temp", "-1"), "--temp"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_told_first(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", CHAT)
    result = nanovllm(tmp_path, "run-batch", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "loading" not in result.err


def test_a_file_of_requests_is_no_file_of_prompts(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", CHAT, EMBEDDING)
    result = nanovllm(tmp_path, "run", "tiny", "--batch", "in.jsonl")
    assert (result.code, result.out) == (2, "")
    assert "hint: nanovllm run-batch MODEL FILE runs requests" in result.err


# ---- the server's routes ----


def routes(generates: FakeGenerates, **settings: Any) -> Routes:
    context = ServerContext(ServeSettings(**settings), generates.models, generates, FakePool())
    return Routes(create_app(context))


def test_routes_answer_as_they_do_over_http() -> None:
    asked = routes(FakeGenerates(Script.of("Hello", " there", finish="stop")))

    async def ask() -> None:
        answer = await asked.post("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]})
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "Hello there"
        assert (answer.status, answer.request_id[:4]) == (200, "req_")
        wrong = await asked.post("/v1/completions", {"prompt": 5.5})
        assert (wrong.status, json.loads(wrong.body)["error"]["type"]) == (400, "invalid_request_error")
        missing = await asked.post("/v1/completions", {"model": "other", "prompt": "a"})
        assert missing.status == 404

    asyncio.run(ask())


def test_what_is_busy_is_waited_for_and_what_is_broken_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm_cli.server import in_process

    monkeypatch.setattr(in_process, "RETRY_SECONDS", 0.0)
    asked = routes(FakeGenerates(Script.of("Hello")))
    answers = [429] * 30 + [200]
    calls = 0

    async def post(path: str, content: bytes) -> in_process.Answered:
        nonlocal calls
        calls += 1
        return in_process.Answered(answers.pop(0) if answers else 503, "", b"")

    monkeypatch.setattr(asked, "_post", post)
    assert asyncio.run(asked.post("/v1/completions", {})).status == 200
    assert calls == 31
    assert asyncio.run(asked.post("/v1/completions", {})).status == 503
    assert calls == 31 + 1 + in_process.MOST_RETRIES


def test_the_bundled_model_answers_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """The likeliest tokens are those of `run`."""
    greedy = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    lines = [
        asking("chat", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, model="gpt-4o-mini"),
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": greedy},
        {"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": -5}},
        EMBEDDING,
    ]
    write(tmp_path / "in.jsonl", *lines)

    def run(*more: str) -> Result:
        return nanovllm(tmp_path, "run-batch", "tiny", "in.jsonl", "-o", "out.jsonl", *more, XDG_CACHE_HOME=CACHE)

    result = run()
    assert (result.code, result.out) == (1, ""), result.err
    assert "lines that ask for gpt-4o-mini, text-embedding-3-small are answered by tiny" in result.err
    chat, text, wrong, embedding = records((tmp_path / "out.jsonl").read_text())
    assert chat["response"]["body"]["model"] == "tiny"
    assert text["response"]["body"]["choices"][0]["text"] == ", a tiny boy named Pablo"
    assert (wrong["response"]["status_code"], wrong["response"]["body"]["error"]["param"]) == (400, "max_tokens")
    assert len(embedding["response"]["body"]["data"][0]["embedding"]) > 8
    write(tmp_path / "in.jsonl", lines[1], lines[0], lines[3])
    again = run()
    assert again.code == 0, again.err
    assert "3 of 3 results are there already" in again.err
    assert "weights" not in again.err, "nothing is left to be asked"
    found = records((tmp_path / "out.jsonl").read_text())
    assert [each["id"] for each in found] == [each["id"] for each in (text, chat, embedding)]
    assert run("--temp", "0.5").code == 2
