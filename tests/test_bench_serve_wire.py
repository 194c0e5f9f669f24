"""What comes over the wire: HTTP answers and server-sent events, cut anywhere, and broken in every way."""

from __future__ import annotations

import json

import pytest

from nanovllm_cli.bench.serve_client import AnswerReader
from nanovllm_cli.client.events import EventReader, StreamError
from nanovllm_cli.client.http import HttpError, ResponseReader, Server
from nanovllm_cli.errors import UsageError

STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\nevent: message\r\ndata: one\r\n\r\ndata:two\r\ndata:  and more\r\n\n\n"
    b"id: 7\rdata: three\r\rretry: 5\n\ndata\n\ndata: f\xc3\xbcnf\n\ndata: [DONE]\n\ndata: unfinished"
)
EVENTS = ["one", "two\n and more", "three", "fünf", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 1000])
def test_events_are_the_same_wherever_the_bytes_are_cut(size: int) -> None:
    reader = EventReader()
    found = [event for i in range(0, len(STREAM), size) for event in reader.feed(STREAM[i : i + size])]
    assert [event for event in found if event] == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_events_with_one_cut_and_an_empty_read(cut: int) -> None:
    reader = EventReader()
    found = reader.feed(STREAM[:cut]) + reader.feed(b"") + reader.feed(STREAM[cut:])
    assert [event for event in found if event] == EVENTS


def test_an_event_has_a_limit() -> None:
    for endless in (b"x" * 50, b"data: x\n" * 20, b"data:\n" * 20, b"data: " + b"x" * 30 + b"\ndata: " + b"y" * 30):
        reader = EventReader(max_event_bytes=40)
        parts = [endless[i : i + 10] for i in range(0, len(endless), 10)]
        with pytest.raises(StreamError, match="more than 40 bytes"):
            list(map(reader.feed, parts))
    assert len(EventReader(max_event_bytes=40).feed(b"data: x\n\n" * 20)) == 20


def test_what_is_a_piece_of_an_answer() -> None:
    reader = AnswerReader()
    events: list[tuple[dict[str, object], bool]] = [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True),
        ({"choices": [{"delta": {"content": "yes"}}], "usage": None}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"text": "plain"}]}, True),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, False),
        ({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}, False),
    ]
    assert [reader.read(json.dumps(event)) for event, _ in events] == [expected for _, expected in events]
    assert (reader.num_pieces, reader.input_tokens, reader.output_tokens) == (4, 5, 4)
    assert reader.finished
    assert not reader.done
    reader.read("[DONE]")
    assert reader.done


def test_usage_that_makes_no_sense_is_none() -> None:
    reader = AnswerReader()
    reader.read('{"usage": {"prompt_tokens": -1, "completion_tokens": true}}')
    reader.read('{"usage": [1], "choices": 5}')
    reader.read('{"usage": {"prompt_tokens": 1e3, "completion_tokens": 99999999999999999999}, "choices": [7, null]}')
    assert (reader.input_tokens, reader.output_tokens) == (None, None)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "no object"),
        ('{"error": {"message": "out\\nof memory", "code": 500}}', "the server failed: out of memory"),
        ('{"object": "error", "message": "gone"}', "the server failed: gone"),
        ('{"error": "plain words"}', "plain words"),
    ],
)
def test_an_event_that_is_an_error(data: str, says: str) -> None:
    with pytest.raises(StreamError, match=says):
        AnswerReader().read(data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ANSWERS = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n,\r\nC\r\n and world!!\r\n0\r\nTrailer: x\r\n\r\n",
    "length": HEAD + b"Content-Length: 18\r\n\r\nhello, and world!!",
    "until the end": HEAD + b"\r\nhello, and world!!",
    "after interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + HEAD + b"content-length:18\r\n\r\nhello, and world!!",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_the_same_wherever_the_bytes_are_cut(kind: str) -> None:
    content = ANSWERS[kind]
    for size in (1, 2, 7, len(content)):
        reader = ResponseReader()
        body = b"".join(reader.feed(content[i : i + size]) for i in range(0, len(content), size))
        assert reader.complete is (kind != "until the end")
        reader.end()
        assert (reader.status, body) == (200, b"hello, and world!!")
        assert reader.headers["content-type"] == "text/event-stream"


def read_all(content: bytes) -> None:
    reader = ResponseReader()
    reader.feed(content)
    reader.end()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999999\r\n\r\n",
        HEAD + b"Content-Length: 5\r\n\r\nfour",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
    ],
)
def test_an_answer_that_is_broken(content: bytes) -> None:
    with pytest.raises(HttpError):
        read_all(content)


def test_where_a_server_is() -> None:
    urls = {
        "http://localhost:8000": "http://localhost:8000/v1",
        "localhost:8000/v1/": "http://localhost:8000/v1",
        "https://example.org/some/api": "https://example.org:443/some/api/v1",
        "http://[::1]:80": "http://[::1]:80/v1",
    }
    assert {url: Server.at(url).url for url in urls} == urls
    for bad in ("ftp://x", "http://", "http://me:secret@host", "http://h:99999", "http://h/?q=1", "http://h/#x",
                "http://h/\r\nX: y", "http://h/ü", "http://a b/"):  # fmt: skip
        with pytest.raises(UsageError) as refused:
            Server.at(bad)
        assert "secret" not in str(refused.value)
