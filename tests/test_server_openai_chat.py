"""/v1/chat/completions against OpenAI's description and what its clients rely on, over scripted answers."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai_spec
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import context, logprobs
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.ports import Reading, Timings
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.server.sse import EventStream, Frames
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.tool_calls import ToolCallDelta
from server_fakes import FakeGenerates, FakeModels, FakePool, Script, event
from server_requests import Answer, Door

HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = [
    [event("Let me see.", reasoning="Hm.")],
    [event(text="<t", calls=[ToolCallDelta(0, "call_1", "weather", "")])],
    [event(text="x", calls=[ToolCallDelta(0, None, None, '{"city":')])],
    [event(text="y", calls=[ToolCallDelta(0, None, None, '"Köln"}'), ToolCallDelta(1, "call_2", "now", "{}")])],
    [event(finish="tool_calls")],
]


def ask(script: Any = None, models: FakeModels | None = None, **fields: Any) -> tuple[Answer, FakeGenerates]:
    generates = FakeGenerates(script, models)
    return Door(generates).post("/v1/chat/completions", {**HELLO, **fields}), generates


def chunks_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = answer.events()
    for chunk in chunks:
        openai_spec.check("CreateChatCompletionStreamResponse", chunk)
    return chunks


def message_of(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.text
    openai_spec.check("CreateChatCompletionResponse", answer.json)
    message: dict[str, Any] = answer.json["choices"][0]["message"]
    return message


def asked_with(**fields: Any) -> Any:
    answer, generates = ask(**fields)
    assert answer.status == 200, answer.text
    return generates.asked[0]


def refused(**fields: Any) -> dict[str, Any]:
    answer, generates = ask(**fields)
    assert answer.status == 400, answer.text
    openai_spec.check("ErrorResponse", answer.json)
    assert generates.asked == []
    error: dict[str, Any] = answer.json["error"]
    return error


# ---- answers ----


def test_an_answer_is_what_was_drawn() -> None:
    answer, generates = ask(Script.of("Hel", "lo", cached_tokens=3, reasoning_tokens=2))
    assert message_of(answer) == {"role": "assistant", "content": "Hello", "refusal": None}
    body = answer.json
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 5,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert generates.generations[0].closed
    assert generates.models.in_use == 0


def test_several_answers_stand_in_their_order() -> None:
    steps = [[event("b", index=1)], [event("a", index=0, finish="stop")], [event("b", index=1, finish="length")]]
    answer, _ = ask(Script(steps), n=2)
    openai_spec.check("CreateChatCompletionResponse", answer.json)
    told = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer.json["choices"]]
    assert told == [(0, "a", "stop"), (1, "bb", "length")]


def test_reasoning_and_calls_are_apart_from_the_content() -> None:
    answer, _ = ask(Script(CALLS), tools=[TOOL, NOW])
    message = message_of(answer)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"


def test_content_is_null_where_there_are_only_calls() -> None:
    steps = [[event(text="x", calls=[ToolCallDelta(0, "call_1", "now", "{}")])], [event(finish="tool_calls")]]
    assert message_of(ask(Script(steps), tools=[NOW])[0])["content"] is None


def test_reasoning_can_be_left_out() -> None:
    answer, _ = ask(Script(CALLS), include_reasoning=False)
    assert "reasoning_content" not in message_of(answer)
    streamed, _ = ask(Script(CALLS), include_reasoning=False, stream=True)
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks_of(streamed))


def test_a_call_that_was_cut_off_ends_with_length() -> None:
    steps = [[event(text="x", calls=[ToolCallDelta(0, "call_1", "now", '{"a')])], [event(finish="length")]]
    assert ask(Script(steps), tools=[NOW])[0].json["choices"][0]["finish_reason"] == "length"
    chunks = chunks_of(ask(Script(steps), tools=[NOW], stream=True)[0])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


# ---- streams ----


def test_the_role_comes_first_and_once() -> None:
    chunks = chunks_of(ask(Script.of("Hel", "lo"), stream=True)[0])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_each_of_several_answers_has_its_role() -> None:
    steps = [[event("a", index=0), event("b", index=1)], [event("c", index=1, finish="stop")], [event(index=0, finish="stop")]]
    chunks = chunks_of(ask(Script(steps), n=2, stream=True)[0])
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == {0: "a", 1: "bc"}


def test_a_step_without_text_makes_no_chunk() -> None:
    chunks = chunks_of(ask(Script([[event("a")], [event("", token_ids=[200])], [event("b", finish="stop")]]), stream=True)[0])
    assert len(chunks) == 4


def test_calls_stream_by_index_and_begin_with_id_and_name() -> None:
    chunks = chunks_of(ask(Script(CALLS), tools=[TOOL, NOW], stream=True)[0])
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert pieces[0] == {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert pieces[1] == {"index": 0, "function": {"arguments": '{"city":'}}
    assert pieces[3]["id"] == "call_2"
    assert all(type(piece["index"]) is int for piece in pieces)
    assert json.loads("".join(p["function"]["arguments"] for p in pieces if p["index"] == 0)) == {"city": "Köln"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["Hm."]


def test_usage_comes_last_and_alone_where_it_is_asked_for() -> None:
    answer, _ = ask(Script.of("Hello", cached_tokens=4), stream=True, stream_options={"include_usage": True})
    *others, last = chunks_of(answer)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 11
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all(chunk["usage"] is None for chunk in others)


def test_usage_can_stand_on_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(ask(Script.of("Hel", "lo"), stream=True, stream_options=options)[0])
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 3, 5, 5, 5]


def test_timings_are_llama_servers() -> None:
    """Names and meanings of its `result_timings`; guesses only where there were any."""
    expected = {
        "cache_n": 4, "prompt_n": 2, "prompt_ms": 500.0, "prompt_per_token_ms": 250.0, "prompt_per_second": 4.0,
        "predicted_n": 5, "predicted_ms": 2000.0, "predicted_per_token_ms": 400.0, "predicted_per_second": 2.5,
    }  # fmt: skip
    answer, _ = ask(Script.of("Hel", "lo", cached_tokens=4))
    assert message_of(answer)["content"] == "Hello"
    assert answer.json["timings"] == expected
    guessed, _ = ask(Script.of("Hel", "lo", cached_tokens=4, timings=Timings(0.5, 2.0, 7, 3)))
    assert guessed.json["timings"] == {**expected, "draft_n": 7, "draft_n_accepted": 3}
    nothing, _ = ask(Script([[event("", finish="stop")]], cached_tokens=6, timings=Timings()))
    assert [nothing.json["timings"][name] for name in ("prompt_per_second", "predicted_per_token_ms")] == [None, None]


@pytest.mark.parametrize(
    ("fields", "having"),
    [
        ({}, [False, False, False, True]),
        ({"n": 2}, [False] * 7 + [True]),
        ({"stream_options": {"include_usage": True}}, [False] * 4 + [True]),
        ({"timings_per_token": True}, [True] * 4),
        ({"timings_per_token": True, "stream_options": {"include_usage": True}}, [True] * 5),
    ],
)
def test_a_streams_timings_are_on_its_last_chunk_or_on_all(fields: dict[str, Any], having: list[bool]) -> None:
    indices = range(fields.get("n", 1))
    steps = [[event(text, index=i) for i in indices] for text in ("Hel", "lo")]
    steps += [[event(finish="stop", index=i)] for i in indices]
    chunks = chunks_of(ask(Script(steps), stream=True, **fields)[0])
    assert ["timings" in chunk for chunk in chunks] == having
    assert chunks[-1]["timings"]["predicted_ms"] == 2000.0


READ = Script([[], *Script.of("Hel", "lo").steps], cached_tokens=2, reading=Reading(3, 0.25))
"""A step that only reads the prompt, and two with words."""


@pytest.mark.parametrize("more", [{}, {"timings_per_token": True}, {"stream_options": {"include_usage": True}}])
def test_a_stream_tells_how_far_the_prompt_is_read(more: dict[str, Any]) -> None:
    answer, generates = ask(READ, stream=True, return_progress=True, **more)
    assert generates.asked[0].tells_reading
    chunks = chunks_of(answer)
    assert [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk] == [
        {"total": 6, "cache": 2, "processed": 3, "time_ms": 250.0}
    ]
    assert chunks[0]["choices"][0]["delta"] == {}
    assert ("timings" in chunks[0]) == ("timings_per_token" in more)
    texts = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(filter(None, texts)) == "Hello"
    assert not ask(Script.of("Hello"), stream=True)[1].asked[0].tells_reading
    whole, generates = ask(READ, return_progress=True)
    assert (message_of(whole)["content"], generates.asked[0].tells_reading) == ("Hello", False)


def test_a_stream_is_pinged_as_its_request_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    class Told(EventStream):
        def __init__(self, frames: Frames, **more: Any) -> None:
            told.append(more["ping_seconds"])
            super().__init__(frames, **more)

    monkeypatch.setattr(context, "EventStream", Told)
    for path in ("/v1/chat/completions", "/v1/completions", "/completion"):
        for asked in (None, 3, -1):
            body: dict[str, Any] = HELLO if "chat" in path else {"prompt": "a"}
            assert Door(FakeGenerates()).post(path, {**body, "stream": True, "sse_ping_interval": asked}).status == 200
    assert told == [ServeSettings().ping_seconds, 3, math.inf] * 3


def test_a_refusal_before_the_first_event_has_a_status() -> None:
    script = Script([], refuses=ApiError(400, "too long", code="context_length_exceeded", param="messages"))
    answer, _ = ask(script, stream=True)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    answer, _ = ask(Script([], error=ApiError(503, "the engine died", retry_after=1)), stream=True)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_a_failure_in_mid_stream_is_an_event_then_the_end() -> None:
    script = Script([[event("Hel")]], error=ApiError(503, "the engine died"))
    answer, generates = ask(script, stream=True)
    assert answer.status == 200
    *_, last = answer.events(errors=True)
    assert last["error"]["message"] == "the engine died"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert generates.generations[0].closed


def test_the_same_failure_without_a_stream_has_a_status() -> None:
    answer, generates = ask(Script([[event("Hel")]], error=ApiError(503, "the engine died")))
    assert answer.status == 503
    assert generates.generations[0].closed


# ---- log-probabilities ----


def drawn(text: str, *, top: int = 0) -> list[TokenLogprobs]:
    """Of tokens that are bytes: the n-th one has the log-probability -n, and the ones after it the next."""
    ids = [byte_tokenizer().encode(character)[0] for character in text]
    return [TokenLogprobs(i, -float(n), 1, tuple((i + k, -float(n + k)) for k in range(top))) for n, i in enumerate(ids)]


def bytes_of(text: str) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -1.0, 1, ()) for i in byte_tokenizer().encode(text)]


def test_logprobs_name_each_token_and_the_likeliest() -> None:
    answer, generates = ask(Script([[event("ab", logprobs=drawn("ab", top=2), finish="length")]]), logprobs=True, top_logprobs=2)
    message_of(answer)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert content[1] == {
        "token": "b",
        "logprob": -1.0,
        "bytes": [98],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}, {"token": "c", "logprob": -2.0, "bytes": [99]}],
    }
    assert generates.asked[0].params.logprobs == 2


def test_the_tokens_of_logprobs_joined_are_the_text() -> None:
    text = "Grüße 🎉"
    end = TokenLogprobs(0, -1.0, 1, ())  # what ends the answer is no part of the text
    one_a_step = [[event(text[:0], logprobs=[entry])] for entry in bytes_of(text)]
    steps = [*one_a_step, [event(text, logprobs=[end], finish="stop")]]
    for stream in (False, True):
        answer, _ = ask(Script(steps), logprobs=True, stream=stream)
        choices = [chunk["choices"][0] for chunk in chunks_of(answer)] if stream else answer.json["choices"]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text


def test_tokens_behind_a_stop_string_are_left_out() -> None:
    steps = [[event("one", logprobs=drawn("oneSTO"))], [event(" ", logprobs=drawn("P"), finish="stop", stop_reason="STOP")]]
    for stream in (False, True):
        answer, _ = ask(Script(steps), logprobs=True, stop=["STOP"], stream=stream)
        choices = [chunk["choices"][0] for chunk in chunks_of(answer)] if stream else answer.json["choices"]
        tokens = [entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert tokens[:3] == ["o", "n", "e"]
        assert len(tokens) == 4  # the text has four characters
        assert choices[-1]["stop_reason"] == "STOP"


def test_what_is_impossible_has_a_number_all_the_same() -> None:
    entry = TokenLogprobs(65, float("-inf"), 9, ((66, -0.0),))
    answer, _ = ask(Script([[event("A", logprobs=[entry], finish="length")]]), logprobs=True)
    assert answer.json["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_log_probabilities_of_a_whole_answer_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions take seconds to write: not on the event loop."""
    raw, on_loop = logprobs._raw, []

    def watched(value: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return raw(value)

    monkeypatch.setattr(logprobs, "_raw", watched)
    given = [None, TokenLogprobs(105, -0.25, 2, ((104, -0.125),))]
    steps = [[event("ab", logprobs=drawn("ab", top=2), finish="length")]]
    ask(Script(steps, prompt_logprobs=given), logprobs=True, top_logprobs=2, prompt_logprobs=1)
    texts = Door(FakeGenerates(Script(steps, prompt_logprobs=given)))
    assert texts.post("/v1/completions", {"prompt": "x", "logprobs": 2, "prompt_logprobs": 1}).status == 200
    assert on_loop == [False] * 6


def test_prompt_logprobs_come_by_id() -> None:
    given = [None, TokenLogprobs(65, -2.0, 3, ((66, -1.0),))]
    answer, _ = ask(Script.of("x", prompt_logprobs=given), prompt_logprobs=1)
    first, second = answer.json["prompt_logprobs"]
    assert first is None
    assert second == {
        "66": {"logprob": -1.0, "rank": 1, "decoded_token": byte_tokenizer().id_to_bytes(66).decode("utf-8", "replace")},
        "65": {"logprob": -2.0, "rank": 3, "decoded_token": byte_tokenizer().id_to_bytes(65).decode("utf-8", "replace")},
    }


# ---- what is asked of the engine ----


def test_what_a_request_leaves_out_is_the_models_own() -> None:
    models = FakeModels(default_params=SamplingParams(temperature=0.6, top_k=20, max_tokens=99))
    _, generates = ask(models=models, top_p=0.5, temperature=None)
    params = generates.asked[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.5, 99)


def test_log_probabilities_that_a_server_gives_can_be_switched_off() -> None:
    models = FakeModels(default_params=SamplingParams(logprobs=2))
    for asked_for, meant in ((None, 2), (False, None), (True, 0)):
        script = Script([[event("H", logprobs=drawn("H"))], [event(finish="stop")]])
        answer, generates = ask(script, models, logprobs=asked_for)
        assert generates.asked[0].params.logprobs == meant
        assert (answer.json["choices"][0]["logprobs"] is None) == (meant is None)


def test_a_requests_biases_leave_those_of_the_model_to_other_tokens() -> None:
    models = FakeModels(default_params=SamplingParams(logit_bias={5: -100, 7: -100}))
    _, generates = ask(models=models, logit_bias={"7": 0, "9": 1})
    assert generates.asked[0].params.logit_bias == {5: -100.0, 7: 0.0, 9: 1.0}


@pytest.mark.parametrize(
    ("field", "value", "ours", "meant"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("top_k", -1, "top_k", 0),
        ("min_p", 0.1, "min_p", 0.1),
        ("typical_p", 0.9, "typical_p", 0.9),
        ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("repeat_penalty", 1.2, "repetition_penalty", 1.2),
        ("repeat_last_n", 64, "penalty_last_n", 64),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("dry_multiplier", 0.8, "dry_multiplier", 0.8),
        ("dry_base", 2, "dry_base", 2.0),
        ("dry_allowed_length", 3, "dry_allowed_length", 3),
        ("dry_penalty_last_n", 9, "dry_penalty_last_n", 9),
        ("dry_sequence_breakers", ["\n"], "dry_sequence_breakers", ("\n",)),
        ("xtc_probability", 0.5, "xtc_probability", 0.5),
        ("xtc_threshold", 0.2, "xtc_threshold", 0.2),
        ("logit_bias", {"5": -100, "7": 1.5}, "logit_bias", {5: -100.0, 7: 1.5}),
        ("logit_bias", [[5, False], [7, 1.5]], "logit_bias", {5: -100.0, 7: 1.5}),
        ("logit_bias", {"5": False, "ab": 2, "\u00e9": 1}, "logit_bias", {5: -100.0, 64: 2.0, 65: 2.0, 127: 1.0, 102: 1.0}),
        ("logit_bias", [["ab", 2.5], ["7", -1], [65, 3]], "logit_bias", {64: 2.5, 65: 3.0, 22: -1.0}),
        ("logit_bias", {"5": 0, "6": 0.0, "7": False}, "logit_bias", {5: 0.0, 6: 0.0, 7: -100.0}),
        ("logit_bias", [[5, 0], [6, 0.0]], "logit_bias", {5: 0.0, 6: 0.0}),
        ("logit_bias", {}, "logit_bias", {}),
        ("lora", [], "temperature", 1.0),
        ("length_penalty", 1.5, "length_penalty", 1.5),
        ("num_beams", 4, "num_beams", 4),
        ("use_beam_search", False, "num_beams", 1),
        ("use_beam_search", True, "temperature", 0.0),
        ("samplers", ["top_k", "temperature"], "samplers", ("top_k", "temperature")),
        ("samplers", "pt", "samplers", ("top_p", "temperature")),
        ("mirostat", 2, "mirostat", 2),
        ("mirostat_tau", 3, "mirostat_tau", 3.0),
        ("mirostat_eta", 0.2, "mirostat_eta", 0.2),
        ("dynatemp_range", 0.5, "dynatemp_range", 0.5),
        ("dynatemp_exponent", 2, "dynatemp_exponent", 2.0),
        ("adaptive_target", 0.3, "adaptive_target", 0.3),
        ("adaptive_target", -0.5, "adaptive_target", -1.0),
        ("adaptive_decay", 0.5, "adaptive_decay", 0.5),
        ("repetition_detection", {"max_pattern_size": 9, "min_count": 4}, "max_repeats", 4),
        ("repetition_detection", {"max_pattern_size": 9, "min_count": 4}, "max_repeat_size", 9),
        ("repetition_detection", {"max_pattern_size": 9, "min_count": 4, "min_pattern_size": 2}, "min_repeat_size", 2),
        ("repetition_detection", {}, "max_repeats", 0),
        ("n_cmpl", 3, "n", 3),
        ("top_logprobs", 0, "logprobs", None),
        ("bad_words", ["no"], "bad_words", ("no",)),
        ("allowed_token_ids", [1, 2], "allowed_token_ids", (1, 2)),
        ("seed", 7, "seed", 7),
        ("seed", -(2**63), "seed", 2**63),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
        ("min_tokens", 4, "min_tokens", 4),
        ("no_repeat_ngram_size", 3, "no_repeat_ngram_size", 3),
        ("source_language", "en", "source_language", "en"),
        ("target_language", "German", "target_language", "German"),
        ("max_tokens", 5, "max_tokens", 5),
        ("max_tokens", -1, "max_tokens", None),
        ("n_predict", 5, "max_tokens", 5),
        ("n_predict", -1, "max_tokens", None),
        ("grammar", "", "constraint", None),
        ("dynatemp_range", 0.0, "temperature", 1.0),
        ("top_n_sigma", -1.0, "top_n_sigma", 0.0),
        ("max_completion_tokens", 6, "max_tokens", 6),
        ("stop", "END", "stop", ("END",)),
        ("stop", ["a", "b"], "stop", ("a", "b")),
        ("stop_token_ids", [3], "stop_token_ids", (3,)),
        ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
        ("ignore_eos", True, "ignore_eos", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("prompt_logprobs", 2, "prompt_logprobs", 2),
        ("n", 3, "n", 3),
    ],
)
def test_a_sampling_parameter_reaches_the_engine(field: str, value: Any, ours: str, meant: Any) -> None:
    assert getattr(asked_with(**{field: value}).params, ours) == meant


def test_messages_go_on_as_they_came() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4", "unknown": {"kept": True}},
    ]
    assert asked_with(messages=messages).messages == messages


def test_the_last_answer_can_go_on() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    assert asked_with(messages=messages, continue_final_message=True, add_generation_prompt=False).continues
    assert not asked_with(messages=messages).continues
    assert refused(continue_final_message=True)["param"] == "continue_final_message"
    assert refused(messages=messages, continue_final_message=True, add_generation_prompt=True)["code"] == "invalid_value"
    assert refused(add_generation_prompt=False)["code"] == "unsupported"


def test_priority_salt_and_template_variables_go_on() -> None:
    asked = asked_with(priority=-3, cache_salt="me", chat_template_kwargs={"custom": 1})
    assert (asked.priority, asked.cache_salt, dict(asked.template_kwargs)) == (-3, "me", {"custom": 1})


# ---- reasoning ----


def test_thinking_and_budgets() -> None:
    assert asked_with().thinking is None
    assert asked_with(enable_thinking=False).thinking is False
    assert asked_with().reasoning_budget is None
    llama_server = ("thinking_budget_tokens", "reasoning_budget_tokens")
    for name in ("thinking_budget", "reasoning_budget", "thinking_token_budget", *llama_server):
        assert asked_with(**{name: 0}).reasoning_budget == 0
        assert asked_with(**{name: -1}).reasoning_budget == -1
        assert refused(**{name: -2})["param"] == name
    assert not asked_with(reasoning_format="none").splits_reasoning


def test_an_effort_is_the_templates_variable_or_its_switch_or_refused() -> None:
    knows = FakeModels(template="{{ reasoning_effort }}")
    assert asked_with(models=knows, reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}
    switch = FakeModels(thinking_switch="enable_thinking")
    assert asked_with(models=knows, reasoning={"effort": "low"}).template_kwargs == {"reasoning_effort": "low"}  # Ollama's
    assert asked_with(models=switch, reasoning_effort="none").thinking is False
    assert asked_with(models=switch, reasoning_effort="high").thinking is True
    assert asked_with(reasoning_effort="none").thinking is None
    assert refused(reasoning_effort="high") == {
        "message": "fake knows no reasoning_effort",
        "type": "invalid_request_error",
        "param": "reasoning_effort",
        "code": "unsupported",
    }


# ---- tools ----


def test_tools_and_their_choice_go_on() -> None:
    assert asked_with(tools=[TOOL]).tool_choice == "auto"
    for choice in ("none", "auto", "required"):
        assert asked_with(tools=[TOOL], tool_choice=choice).tool_choice == choice
    named = asked_with(tools=[TOOL, NOW], tool_choice={"type": "function", "function": {"name": "now"}})
    assert (named.tool_choice, named.tools, named.parallel) == ("now", [TOOL, NOW], True)
    assert asked_with(tools=[TOOL], parallel_tool_calls=False).parallel is False


def test_some_tools_can_be_allowed() -> None:
    selection = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": selection}
    asked = asked_with(tools=[TOOL, NOW], tool_choice=allowed)
    assert (asked.tools, asked.tool_choice) == ([NOW], "required")


NAMED = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED},
        {"tools": [TOOL], "tool_choice": "weather"},
        {"tools": [TOOL, TOOL]},
        {"tools": [{"type": "function", "function": {"name": "auto"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": "{}"}}]},
        {"tools": [TOOL] * 513},
        {"tools": "weather"},
    ],
)
def test_tools_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields)["param"].startswith("tool")


# ---- the form of an answer ----

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"type": "null"}]}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": '{"type":"object"}'}, "json_schema", {"type": "object"}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": "start: /a/"}, "lark", "start: /a/"),
        ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "gbnf", 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
    ],
)
def test_a_form_is_tried_out_and_goes_on(fields: dict[str, Any], kind: str, text: Any) -> None:
    generates, pool = FakeGenerates(), FakePool()
    answer = Door(generates, pool).post("/v1/chat/completions", {**HELLO, **fields})
    assert answer.status == 200, answer.text
    form = generates.asked[0].form  # type: ignore[union-attr]
    assert isinstance(form, Constraint)
    assert form.kind == kind
    assert (form.text if isinstance(text, str) else json.loads(form.text)) == text
    assert pool.checked == [form]


def test_plain_text_has_no_form() -> None:
    assert asked_with(response_format={"type": "text"}).form is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"refuse": 1}}}}, "response_format"),
        ({"guided_regex": "refuse"}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * (2**18 + 1)}, "guided_regex"),
        ({"guided_json": {"a": "b" * 2**18}}, "guided_json"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields)["param"].startswith(param)


# ---- what of several answers and of ids is told ----


def test_each_answer_tells_how_many_tokens_it_has() -> None:
    steps = [[event("ab"), event("c", index=1)], [event("d", finish="stop"), event("", index=1, finish="length")]]
    whole, _ = ask(Script(steps), n=2)
    message_of(whole)
    assert [choice["completion_tokens"] for choice in whole.json["choices"]] == [3, 1]
    streamed = chunks_of(ask(Script(steps), n=2, stream=True)[0])
    ends = [choice for chunk in streamed for choice in chunk["choices"] if choice["finish_reason"] is not None]
    assert [(choice["index"], choice["completion_tokens"]) for choice in ends] == [(0, 3), (1, 1)]


def test_token_ids_are_shown_where_they_are_asked_for() -> None:
    """As vLLM shows them: those of a step without text, too."""
    steps = [[event("", token_ids=[7])], [event("ab", token_ids=[8, 9])], [event("", token_ids=[2], finish="stop")]]
    whole, generates = ask(Script(steps), return_token_ids=True)
    prompt_ids = generates.generations[0].prompt_ids
    assert message_of(whole)["content"] == "ab"
    assert (whole.json["prompt_token_ids"], whole.json["choices"][0]["token_ids"]) == (prompt_ids, [7, 8, 9, 2])
    chunks = chunks_of(ask(Script(steps), return_token_ids=True, stream=True)[0])
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt_ids] + [None] * (len(chunks) - 1)
    assert [each for chunk in chunks for choice in chunk["choices"] for each in choice.get("token_ids", [])] == [7, 8, 9, 2]
    plain, _ = ask(Script(steps), stream=True)
    assert "token_ids" not in plain.text


# ---- bounds ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("n", 2**63), ("n", "1"), ("n", True), ("n", 1.5),
        ("temperature", -0.1), ("temperature", 1e9), ("temperature", "hot"), ("top_p", 1.1), ("top_k", -2), ("min_p", 2),
        ("seed", 2**64), ("seed", -(2**63) - 1), ("max_tokens", 0), ("max_tokens", -2), ("max_tokens", 2**63),
        ("n_predict", 0), ("n_probs", 3),
        ("max_completion_tokens", 0), ("min_tokens", -1), ("stop", ""), ("stop", ["x"] * 65), ("stop", ["x" * 1025]),
        ("stop", [1]), ("stop", {"a": 1}), ("stop_token_ids", [2**40]), ("stop_token_ids", [0] * 1025),
        ("logit_bias", {"": 1}), ("logit_bias", {"12345678901": 1}), ("logit_bias", {"-5": 1}), ("logit_bias", {"4096": 1}),
        ("samplers", ["frobnicate"]), ("samplers", "k" * 65), ("samplers", ["infill"]), ("samplers", "kz"),
        ("samplers", 5), ("n_indent", 4), ("t_max_predict_ms", 5), ("adaptive_target", 1.5), ("return_progress", 5),
        ("verbose", True), ("grammar_lazy", True), ("grammar_triggers", [{}]), ("logprob_token_ids", [1]),
        ("repetition_detection", {"max_pattern_size": 5}), ("repetition_detection", {"max_pattern_size": 5, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 5, "min_count": 3, "min_pattern_size": 6}),
        ("repetition_detection", {"max_pattern_size": 1025, "min_count": 3}),
        ("watermarking", True), ("length_penalty", 8.5), ("num_beams", 65), ("use_beam_search", 2),
        ("return_prompt_text", True), ("reasoning_control", True),
        ("media_io_kwargs", {"image": {}}), ("reasoning_budget_message", "enough"), ("parse_tool_calls", False),
        ("reasoning", {"effort": "huge"}),
        ("sse_ping_interval", 0), ("min_keep", 1), ("post_sampling_probs", True), ("allowed_token_ids", [4096]),
        ("logit_bias", {"a" * 257: 1}), ("logit_bias", {"1": True}),
        ("logit_bias", {"1": 101}), ("logit_bias", {"1": None}), ("logit_bias", [[1, 2, 3]]),
        ("logit_bias", [["hello", "1"]]), ("logit_bias", [["", 1]]), ("logit_bias", [[f"t{i}", 1] for i in range(257)]),
        ("logit_bias", [[1, True]]), ("logit_bias", [[True, 1]]), ("logit_bias", [[1.0, 1.5]]),
        ("logit_bias", [[1, 101]]), ("logit_bias", [[1, 1]] * 1025), ("echo", True), ("add_special_tokens", True),
        ("return_tokens_as_token_ids", True), ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}),
        ("top_n_sigma", 101), ("dynatemp_range", -0.5), ("vllm_xargs", {"a": 1}), ("kv_transfer_params", {}),
        ("logit_bias", {str(i): 1 for i in range(1025)}), ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 1),
        ("prompt_logprobs", 101), ("priority", 2**40), ("cache_salt", "x" * 5000), ("messages", []), ("messages", "hi"),
        ("messages", [{"role": "user", "content": 5}]), ("messages", [{"content": "x"}]), ("messages", [{"role": "alien"}]),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("model", ""), ("model", 5), ("modalities", ["audio"]),
        ("chat_template_kwargs", [1]), ("mirostat", 3),
        ("mirostat_eta", 11), ("adaptive_decay", 1.5), ("verbosity", "low"), ("reasoning_effort", "huge"),
        ("presence_penalty", 2.1),
        ("no_repeat_ngram_size", 65), ("target_language", ""), ("source_language", "x" * 65),
        ("bad_words", [""]), ("allowed_token_ids", []), ("dry_sequence_breakers", ["x"] * 17), ("parallel_tool_calls", "no"),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0].partition(".")[0] == ("messages" if field == "messages" else field)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("echo", True, "echo: must be false"),
        ("messages", [], "messages: must not be empty"),
        ("messages", [5], "messages[0]: must be an object"),
        ("messages", [{"content": "x"}], "messages[0].role: must be there"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content: must be a string or a list"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]: must be an object"),
        ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type: must be there"),
        ("stream_options", [], "stream_options: must be an object"),
        ("stream", "yes", "stream: must be true or false"),
        ("temperature", "hot", "temperature: must be a number"),
        ("temperature", -1, "temperature: must be at least 0"),
        ("top_k", 1.5, "top_k: must be a whole number"),
        ("top_logprobs", 21, "top_logprobs: must be at most 20"),
        ("model", "", "model: must not be empty"),
        ("cache_salt", "x" * 5000, "cache_salt: must have at most 4096 characters"),
        ("bad_words", ["x"] * 257, "bad_words: must have at most 256 entries"),
        ("logit_bias", [[1, 2, 3]], "logit_bias[0]: must have at most 2 entries"),
        ("logit_bias", {"1": 101}, "logit_bias.1: must be at most 100 or false"),
        ("reasoning_format", "x", "reasoning_format: must be 'none', 'auto' or 'deepseek'"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name: must match ^[A-Za-z"),
    ],
)
def test_what_may_stand_there_is_said_as_json_says_it(field: str, value: Any, message: str) -> None:
    """In our words, not in those of whatever validates."""
    assert refused(**{field: value})["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_choice": []}, "guided_choice: must not be empty"),
        ({"guided_regex": ""}, "the regular expression is empty; leave it out"),
        ({"guided_grammar": ""}, "the grammar is empty; leave it out"),
        ({"guided_json": ""}, "the JSON schema is empty; leave it out"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: must not be empty"),
        ({"structured_outputs": {"regex": ""}}, "the regular expression is empty; leave it out"),
    ],
)
def test_a_form_that_is_empty_is_none(fields: dict[str, Any], message: str) -> None:
    """But for llama.cpp's clients, which say by an empty grammar that there is none."""
    assert refused(**fields)["message"].startswith(message)
    assert asked_with(grammar="").form is None


NAN = b'{"messages":[{"role":"user","content":"x"}],"temperature":%s}'


@pytest.mark.parametrize("body", [NAN % b"NaN", NAN % b"1e999", b"[]", b"5", b""])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    answer = Door(FakeGenerates()).post("/v1/chat/completions", body)
    assert answer.status == 400
    openai_spec.check("ErrorResponse", answer.json)
    if body[:1] in b"[5" and body:
        assert answer.json["error"]["message"] == "the body must be a JSON object"


@pytest.mark.parametrize(
    "name", ["audio", "web_search_options", "functions", "function_call", "chat_template", "documents", "vllm_xargs"]
)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    assert refused(**{name: {"a": 1}}) == {
        "message": f"{name} is not supported",
        "type": "invalid_request_error",
        "param": name,
        "code": "unsupported",
    }


def test_labels_and_what_nobody_knows_are_tolerated() -> None:
    asked_with(user="me", metadata={"a": "b"}, store=True, service_tier="auto", prediction={"type": "content", "content": "x"})
    asked_with(frobnicate=[1, 2, 3], messages=[{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}])


def test_every_field_may_be_null() -> None:
    from nanovllm_cli.server.schemas_openai import ChatRequest

    asked_with(**{name: None for name in ChatRequest.model_fields if name != "messages"})


def test_an_unknown_model_is_404() -> None:
    for stream in (False, True):
        answer, _ = ask(model="gpt-9", stream=stream)
        assert answer.status == 404
        assert answer.json["error"]["code"] == "model_not_found"


def test_answers_are_held_against_openais_description() -> None:
    if not openai_spec.SPEC.exists():
        pytest.skip("OpenAI's API description is not beside the repository: shapes are not held against it")
    with pytest.raises(AssertionError, match="usage"):
        openai_spec.check("CreateChatCompletionResponse", {**ask()[0].json, "usage": 5})


@pytest.mark.parametrize("path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"])
def test_the_tokens_of_a_chats_prompt_are_counted(path: str) -> None:
    """As llama-server has it; nothing is drawn."""
    generates = FakeGenerates()
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert Door(generates).post(path, asked).json == {"object": "response.input_tokens", "input_tokens": 9}
    assert generates.asked == []
    assert Door(generates).post(path, {"messages": []}).status == 400
