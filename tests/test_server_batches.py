"""/v1/files and /v1/batches: what OpenAI's guide says of them, by the application itself; its own client asks a real server in
test_server_clients_openai.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from nanovllm_cli.server import batches
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.middleware import ADMITTED
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakePool, Script

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"messages": MESSAGES, **body}}) + "\n"


class Asked:
    """A client of an application. key: the API key that it sends."""

    def __init__(self, client: httpx.AsyncClient, key: str | None = None) -> None:
        self.client = client
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def __call__(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        answer = await self.client.request(method, path, headers=self.headers, **more)
        assert answer.status_code == status, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    async def upload(self, content: str | bytes, status: int = 200, **form: Any) -> Any:
        files = {"file": ("in.jsonl", content if isinstance(content, bytes) else content.encode())}
        return await self("POST", "/v1/files", status, files=files, data={"purpose": "batch", **form})

    async def begin(self, content: str | bytes, endpoint: str = CHAT, **more: Any) -> Any:
        file = await self.upload(content)
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **more}
        return await self("POST", "/v1/batches", json=body)

    async def over(self, batch: Any) -> Any:
        for _ in range(500):
            found = await self("GET", f"/v1/batches/{batch['id']}")
            if found["status"] in ("completed", "failed", "cancelled"):
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(found)

    async def lines(self, file_id: str) -> list[Any]:
        text = await self("GET", f"/v1/files/{file_id}/content")
        return [json.loads(each) for each in text.splitlines()]


def asking(test: Callable[[Asked], Awaitable[None]], generates: FakeGenerates, key: str | None = None, **settings: Any) -> None:
    async def run() -> None:
        context = ServerContext(ServeSettings(**settings), generates.models, generates, FakePool())  # type: ignore[arg-type]
        transport = httpx.ASGITransport(create_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            await test(Asked(client, key))

    asyncio.run(run())


def test_a_batch_is_answered_line_by_line() -> None:
    generates = FakeGenerates(Script.of("Hello", " there", finish="stop"))
    content = line("a") + "\n" + line("bad", max_tokens=-5) + line("b", model="fake")

    async def test(ask: Asked) -> None:
        begun = await ask.begin(content, metadata={"job": "nightly"})
        assert (begun["status"], begun["object"], begun["endpoint"]) == ("validating", "batch", CHAT)
        assert (begun["completion_window"], begun["metadata"]) == ("24h", {"job": "nightly"})
        done = await ask.over(begun)
        assert (done["status"], done["errors"]) == ("completed", None)
        assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
        first, second = await ask.lines(done["output_file_id"])
        assert [each["custom_id"] for each in (first, second)] == ["a", "b"]
        assert (first["error"], first["response"]["status_code"]) == (None, 200)
        assert first["response"]["body"]["choices"][0]["message"]["content"] == "Hello there"
        spent = [each["response"]["body"]["usage"] for each in (first, second)]
        assert done["usage"]["input_tokens"] == sum(each["prompt_tokens"] for each in spent)
        assert done["usage"]["total_tokens"] == sum(each["total_tokens"] for each in spent)
        (bad,) = await ask.lines(done["error_file_id"])
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "max_tokens"
        files = (await ask("GET", "/v1/files"))["data"]
        assert [each["purpose"] for each in files] == ["batch_output", "batch_output", "batch"]
        assert files[2]["filename"] == "in.jsonl"
        assert files[2]["bytes"] == len(content)
        assert (await ask("GET", "/v1/batches"))["data"] == [done]

    asking(test, generates)


@pytest.mark.parametrize(
    ("content", "code", "message", "at"),
    [
        (line("a") + "nonsense\n", "invalid_request", "line 2: not JSON", 2),
        (line("a") + line("a"), "invalid_request", "custom_id 'a' is that of line 1, too", 2),
        (line("a", url="/v1/completions"), "mismatched_url", "its url is /v1/completions", 1),
        (line("a", url="/metrics"), "invalid_request", 'url is "/metrics"', 1),
        (line("a", stream=True), "invalid_request", "answers of a batch come whole", 1),
        ('{"custom_id": "a", "body": ' + "[" * 100_000, "invalid_request", "nested more than", 1),
        ("\n \n", "empty_file", "the file has no requests", None),
        (b"\xff\xfe", "invalid_request", "not JSON", 1),
    ],
)  # fmt: skip
def test_a_file_with_something_wrong_is_not_asked(content: str | bytes, code: str, message: str, at: int | None) -> None:
    generates = FakeGenerates(Script.of("Hello"))

    async def test(ask: Asked) -> None:
        done = await ask.over(await ask.begin(content))
        (fault,) = done["errors"]["data"]
        assert (done["status"], fault["code"], fault["line"]) == ("failed", code, at)
        assert message in fault["message"]
        assert done["output_file_id"] is None
        assert generates.asked == []

    asking(test, generates)


def test_a_batch_is_cancelled_and_keeps_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_AT_ONCE", 1)
    scripts = iter([Script.of("One"), Script.of("Two"), Script.of("Never", waits=asyncio.Event())])
    generates = FakeGenerates(lambda asked: next(scripts))

    async def test(ask: Asked) -> None:
        batch = await ask.begin("".join(line(each) for each in "abcd"))
        waiting = await ask.begin(line("later"))
        while (await ask("GET", f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 2:
            await asyncio.sleep(0.01)
        assert (await ask("GET", f"/v1/batches/{waiting['id']}"))["status"] == "validating", "one at a time"
        assert (await ask("POST", f"/v1/batches/{waiting['id']}/cancel"))["status"] == "cancelling"
        assert (await ask.over(waiting))["output_file_id"] is None
        assert (await ask("POST", f"/v1/batches/{batch['id']}/cancel"))["status"] == "cancelling"
        done = await ask.over(batch)
        assert (done["status"], done["request_counts"]) == ("cancelled", {"total": 4, "completed": 2, "failed": 0})
        assert [each["custom_id"] for each in await ask.lines(done["output_file_id"])] == ["a", "b"]
        told = await ask("POST", f"/v1/batches/{batch['id']}/cancel", 400)
        assert told["error"]["code"] == "batch_is_over"

    asking(test, generates)


def test_files_are_listed_read_and_deleted() -> None:
    async def test(ask: Asked) -> None:
        files = [await ask.upload(f"{i}") for i in range(3)]
        page = await ask("GET", "/v1/files?limit=2")
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([files[2]["id"], files[1]["id"]], True)
        rest = await ask("GET", f"/v1/files?after={files[1]['id']}&purpose=batch")
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([files[0]["id"]], False)
        assert (await ask("GET", "/v1/files?purpose=batch_output"))["data"] == []
        assert await ask("GET", f"/v1/files/{files[0]['id']}/content") == "0"
        assert await ask("DELETE", f"/v1/files/{files[0]['id']}") == {"id": files[0]["id"], "object": "file", "deleted": True}
        for path in (f"/v1/files/{files[0]['id']}", "/v1/files/x/content", "/v1/batches/x"):
            assert "there is no" in (await ask("GET", path, 404))["error"]["message"]
        assert (await ask("GET", "/v1/files?after=x", 400))["error"]["param"] == "after"
        for purpose in ("assistants", ""):
            assert (await ask.upload("a", 400, purpose=purpose))["error"]["param"] == "purpose"
        wrong = {"input_file_id": files[1]["id"], "endpoint": "/v1/files"}
        assert (await ask("POST", "/v1/batches", 400, json=wrong))["error"]["param"] == "endpoint"
        assert (await ask("POST", "/v1/batches", 404, json=wrong | {"endpoint": CHAT, "input_file_id": "x"}))["error"]["code"]

    asking(test, FakeGenerates(Script.of("a")))


def test_what_has_no_room_is_told_and_nothing_goes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ask: Asked) -> None:
        monkeypatch.setattr(batches, "MOST_AT_ONCE", 1)
        kept = await ask.upload(line("a") + line("b") + line("c"))
        body = {"input_file_id": kept["id"], "endpoint": CHAT}
        whole = await ask.over(await ask("POST", "/v1/batches", json=body))
        size = (await ask("GET", f"/v1/files/{whole['output_file_id']}"))["bytes"]
        await ask("DELETE", f"/v1/files/{whole['output_file_id']}")
        monkeypatch.setattr(batches, "MAX_BYTES", kept["bytes"] + size - 1)
        done = await ask.over(await ask("POST", "/v1/batches", json=body))
        assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "no_room_for_files")
        assert [each["custom_id"] for each in await ask.lines(done["output_file_id"])] == ["a", "b"], "these were answered"
        assert (await ask.upload("c" * size, 400))["error"]["code"] == "no_room_for_files"
        await ask("DELETE", f"/v1/files/{done['output_file_id']}")
        await ask.upload("c" * (size - 1))
        monkeypatch.setattr(batches, "MAX_FILES", 2)
        assert (await ask.upload("", 400))["error"]["code"] == "no_room_for_files"
        assert len((await ask("GET", "/v1/files"))["data"]) == 2

    asking(test, FakeGenerates(Script.of("a")))


def test_each_key_sees_its_own_and_answers_count_as_its() -> None:
    generates = FakeGenerates(Script.of("Hello"))

    async def test(ask: Asked) -> None:
        other = Asked(ask.client, "second-key")
        batch = await ask.begin(line("a"))
        done = await ask.over(batch)
        assert done["request_counts"]["completed"] == 1, "it needs no key of its own"
        for path in (f"files/{done['output_file_id']}", f"batches/{batch['id']}", f"files/{batch['input_file_id']}/content"):
            await other("GET", f"/v1/{path}", 404)
        assert (await other("GET", "/v1/files"))["data"] == (await other("GET", "/v1/batches"))["data"] == []
        await other("POST", "/v1/batches", 404, json={"input_file_id": batch["input_file_id"], "endpoint": CHAT})
        await Asked(ask.client)("GET", "/v1/files", 401)
        assert (await ask.client.get("/v1/files", headers={ADMITTED: "first-key"})).status_code == 401

    asking(test, generates, key="first-key", api_keys=("first-key", "second-key"))


def test_a_fault_of_ours_ends_the_batch_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ask: Asked) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batches, "answer_of", lambda *args: 1 / 0)
            done = await ask.over(await ask.begin(line("a")))
            assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "server_error")
        assert (await ask.over(await ask.begin(line("a"))))["status"] == "completed"

    asking(test, FakeGenerates(Script.of("a")))
