"""A search by beams through every door: the library, the command line, a server and its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.client.wire import text_body
from test_cli_driver import nanovllm

PROMPT = "Once upon a time"
PARAMS = SamplingParams(num_beams=3, n=2, max_tokens=12)


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    with LLM("tiny", max_model_len=256, threads=2, device="cpu") as llm:
        (output,) = llm.generate(PROMPT, PARAMS)
        *_, last = llm.stream(PROMPT, PARAMS)
        assert [each.text for each in last.outputs] == [each.text for each in output.outputs]
        (chatted,) = llm.chat([{"role": "user", "content": "hi"}], PARAMS)
        assert len({each.text for each in chatted.outputs}) == 2
        yield [each.text for each in output.outputs]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("tiny", "--device", "cpu", "-c", "256", "-t", "2") as server:
        yield server


def texts(server: LiveServer, **fields: Any) -> list[str]:
    status, answer = server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 12} | fields)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_a_server_finds_the_same(server: LiveServer, expected: list[str]) -> None:
    assert texts(server, num_beams=3, n=2) == expected
    assert texts(server, num_beams=3) == expected[:1]
    three = texts(server, use_beam_search=True, n=3)  # as vLLM has it
    assert three[:2] == expected
    assert texts(server, use_beam_search=True, num_beams=3, n=2) == expected
    assert texts(server, use_beam_search=True, best_of=3, n=2) == expected  # as it had it before
    greedy = texts(server, temperature=0)
    assert texts(server, use_beam_search=True) == texts(server, use_beam_search=False, temperature=0) == greedy


def test_what_no_search_has_is_refused_by_its_name(server: LiveServer) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "num_beams": 3}
    for fields, param in (
        ({"stop": ["x"]}, "stop"), ({"n": 4}, "n"), ({"use_beam_search": False}, "use_beam_search"),
        ({"logit_bias": {"5": 1}}, "logit_bias"), ({"best_of": 6}, "best_of"),
    ):  # fmt: skip
        status, answer = server.post("/v1/completions", asked | fields)
        assert (status, answer["error"]["param"]) == (400, param)
    status, answer = server.post("/v1/completions", asked | {"guided_choice": ["a", "b"]})
    assert status == 400
    assert "no part in a search by beams" in answer["error"]["message"]


def test_a_run_asks_a_server_and_gets_the_best(server: LiveServer, expected: list[str], tmp_path: Path) -> None:
    done = nanovllm(tmp_path, "run", "--url", server.url, "--raw", PROMPT, "--beams", "3", "-N", "2", "-n", "12", "--json")
    assert done.code == 0, done.err
    assert [answer["text"] for answer in json.loads(done.out)["answers"]] == expected


def test_other_servers_are_asked_in_vllms_words() -> None:
    asked = text_body("m", "p", {"num_beams": 4, "n": 2, "length_penalty": 0.5})
    assert (asked["num_beams"], asked["use_beam_search"], asked["n"], asked["length_penalty"]) == (4, True, 2, 0.5)
    assert text_body("m", "p", {"num_beams": 1})["use_beam_search"] is False
    assert "use_beam_search" not in text_body("m", "p", {})
