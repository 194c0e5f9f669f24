"""What is sent to a server and what is made of its chunks, as the API references of OpenAI, vLLM and llama-server write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm_cli.client.events import EventReader, StreamError, error_text
from nanovllm_cli.client.wire import AnswerStream, Delta, Timings, TokenLogprob, chat_body, text_body
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError

ALWAYS = {"stream": True, "stream_options": {"include_usage": True}}
USER = {"role": "user", "content": "Hi"}


def read(*chunks: Any) -> tuple[AnswerStream, list[Delta]]:
    stream = AnswerStream()
    return stream, [delta for chunk in chunks for delta in stream.read(chunk if isinstance(chunk, str) else json.dumps(chunk))]


def delta_of(**choice: Any) -> Delta:
    (delta,) = read({"choices": [choice]})[1]
    return delta


# ---- requests ----


def test_what_was_not_asked_for_is_not_sent() -> None:
    assert chat_body("m", [USER], {}) == {"model": "m", "messages": [USER], **ALWAYS}
    unset = {"seed": -1, "top_k": None, "reasoning_budget": -1, "constraint": None}
    assert chat_body("m", [USER], unset) == {"model": "m", "messages": [USER], **ALWAYS}
    assert text_body("m", "Once", unset) == {"model": "m", "prompt": "Once", "max_tokens": None, **ALWAYS}


def test_servers_that_can_are_asked_how_far_a_prompt_is_read() -> None:
    assert chat_body("m", [USER], {}, tells_reading=True)["return_progress"] is True
    assert text_body("m", "Once", {}, tells_reading=True)["return_progress"] is True
    chunk = {"choices": [{"index": 0, "delta": {}}], "prompt_progress": {"total": 90, "cache": 16, "processed": 48, "time_ms": 5}}
    stream, deltas = read(chunk)
    assert (stream.prompt_tokens, stream.read_tokens) == (90, 48)
    assert [(delta.content, delta.reasoning) for delta in deltas] == [("", "")]
    for odd in (5, {}, {"total": "90", "processed": 4}, {"total": -1, "processed": 4}, {"total": True}):
        stream, _ = read({"prompt_progress": odd})
        assert (stream.prompt_tokens, stream.read_tokens) == (None, None)
    assert read(chunk, {"prompt_progress": {"total": 90, "processed": [7]}})[0].read_tokens == 48


def test_what_was_asked_for_has_the_apis_names() -> None:
    given = {"seed": 1, "temperature": 0.0, "stop": ("a", "b"), "logprobs": 0, "logit_bias": {5: -100.0}, "reasoning_budget": 0}
    wanted = {"seed": 1, "temperature": 0.0, "stop": ["a", "b"], "logit_bias": {"5": -100.0}, "reasoning_budget": 0}
    wanted |= {"logprobs": True, "top_logprobs": 0}
    body = chat_body("m", [USER], given, template_kwargs={"enable_thinking": False})
    assert body == {"model": "m", "messages": [USER], **ALWAYS, **wanted, "chat_template_kwargs": {"enable_thinking": False}}
    text = text_body("m", "Once", {"max_tokens": 3, "logprobs": 2})
    assert text == {"model": "m", "prompt": "Once", "max_tokens": 3, "logprobs": 2, **ALWAYS}
    with pytest.raises(UsageError, match="budget"):
        text_body("m", "Once", {"reasoning_budget": 0})


def test_an_answer_at_the_end_is_gone_on_with() -> None:
    body = chat_body("m", [USER, {"role": "assistant", "content": "He"}], {})
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert not chat_body("m", [{"role": "assistant", "content": "He"}, USER], {}).keys() & {"continue_final_message"}
    assert chat_body("m", [], {})["messages"] == []


@pytest.mark.parametrize(
    ("form", "field", "value"),
    [
        (Constraint("json_object", ""), "response_format", {"type": "json_object"}),
        (
            Constraint("json_schema", '{"type": "object"}'), "response_format",
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}},
        ),
        (Constraint("regex", "[0-9]+"), "structured_outputs", {"regex": "[0-9]+"}),
        (Constraint("choice", '["a", "b"]'), "structured_outputs", {"choice": ["a", "b"]}),
        (Constraint("lark", 'start: "a"'), "structured_outputs", {"grammar": 'start: "a"'}),
        (Constraint("gbnf", 'root ::= "a"'), "structured_outputs", {"grammar": 'root ::= "a"'}),
    ],
)  # fmt: skip
def test_a_form_is_said_in_openais_words_or_vllms(form: Constraint, field: str, value: dict[str, Any]) -> None:
    body = chat_body("m", [USER], {"constraint": form})
    assert body == {"model": "m", "messages": [USER], **ALWAYS, field: value}


# ---- answers ----


def test_a_chunk_of_a_chat_and_one_of_a_text() -> None:
    chat = delta_of(index=1, delta={"role": "assistant", "content": "Hi"}, finish_reason=None)
    assert chat == Delta(1, "", "Hi", None, None, None, None)
    assert delta_of(text="Hi", finish_reason="stop", stop_reason=7) == Delta(0, "", "Hi", None, None, "stop", 7)
    assert delta_of(delta={"refusal": "No."}).content == "No."
    assert delta_of(delta={"reasoning_content": None, "reasoning": "hm"}).reasoning == "hm"
    assert delta_of(delta={"reasoning_content": "hm", "content": ""}) == Delta(0, "hm", "", None, None, None, None)
    assert delta_of(text="a", token_ids=[], completion_tokens=3) == Delta(0, "", "a", (), None, None, None, 3)
    assert delta_of(text="a", token_ids=[5, 6]).token_ids == (5, 6)
    assert delta_of(text="\ud83d").content == "?"


@pytest.mark.parametrize(
    "chunk", [{}, {"choices": None}, {"choices": [3, None, "a"]}, {"choices": {}}, {"usage": 3, "timings": []}]
)
def test_a_chunk_without_a_choice_is_passed_over(chunk: dict[str, Any]) -> None:
    stream, deltas = read(chunk)
    assert (deltas, stream.timings, stream.prompt_tokens, stream.is_whole(1)) == ([], None, None, False)


@pytest.mark.parametrize(
    "choice",
    [
        {"text": 3}, {"delta": {"content": ["a"], "reasoning": 1}}, {"token_ids": [1, "2"]}, {"token_ids": 5, "finish_reason": 1},
        {"stop_reason": [1]}, {"finish_reason": ""}, {"completion_tokens": -1}, {"logprobs": 3}, {"logprobs": {"tokens": ["a"]}},
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_missing(choice: dict[str, Any]) -> None:
    assert delta_of(**choice) == Delta(0, "", "", None, None, None, None)


def test_parts_of_what_is_said_are_joined() -> None:
    """Mistral's servers stream them where a model reasons."""
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "well"}, {"type": "text", "text": ", well"}, 3, "no"]}
    said = [thinking, {"type": "text", "text": "4"}, {"type": "text", "text": "2"}, {"type": "image_url"}, None, 7]
    delta = delta_of(index=0, delta={"content": said})
    assert (delta.reasoning, delta.content) == ("well, well", "42")
    for odd in ([], [[]], [{"type": "thinking", "thinking": "no"}], [{"text": 3}]):
        delta = delta_of(index=0, delta={"content": odd})
        assert (delta.reasoning, delta.content) == ("", "")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ('event: error\ndata: {"message": "out of memory", "code": 500}\n\n', "the server failed: out of memory"),
        ("event: error\ndata: out of memory\n\n", "the server failed: out of memory"),
        ('event:error\ndata: {"error": {"message": "no"}}\n\n', "the server failed: no"),
        ("event: error\ndata: {}\n\n", "the server failed: nothing more"),
        ('event: error\ndata: {"message": "n", "code": 400}\n\n', "the server refuses the request: n"),
        ('data: {"choices": []}\nevent: error\n\n', "the server failed: "),
    ],
)
def test_an_event_that_calls_itself_an_error_is_one(event: str, told: str) -> None:
    """Whatever is in it, and however it is cut; the next one is none."""
    reader = EventReader()
    (data,) = [found for each in event.encode() for found in reader.feed(bytes([each]))]
    with pytest.raises(StreamError, match=told):
        AnswerStream().read(data)
    assert reader.feed(b"data: {}\n\n") == ["{}"]
    assert reader.feed(b"event: error\n\ndata: {}\n\nevent: errors\ndata: {}\n\n") == ["{}", "{}"]


def test_half_a_surrogate_pair_is_a_question_mark() -> None:
    half = "\ud800"
    choice = {"delta": {"content": half, "reasoning": half}, "finish_reason": half, "stop_reason": half}
    (delta,) = read({"choices": [choice]})[1]
    assert (delta.content, delta.reasoning, delta.finish_reason, delta.stop_reason) == ("?", "?", "?", "?")
    assert error_text({"error": {"message": half}}) == "?"


@pytest.mark.parametrize("index", [-1, 65536, "0", 1.0, None])
def test_an_answer_has_a_number(index: object) -> None:
    assert delta_of(index=65535, text="a").index == 65535
    with pytest.raises(StreamError, match="an answer of number"):
        read({"choices": [{"index": index, "text": "a"}]})


def test_a_stream_is_whole_where_it_says_so_or_all_answers_have_ended() -> None:
    ends = [{"choices": [{"index": i, "text": "", "finish_reason": "length"}]} for i in (1, 1, 0)]
    assert [read(*ends[:n])[0].is_whole(2) for n in range(4)] == [False, False, False, True]
    stream, deltas = read(" [DONE] ")
    assert (stream.is_whole(5), deltas) == (True, [])


def test_usage_is_what_was_said_last() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    stream, _ = read(
        {"usage": {"prompt_tokens": 9, "completion_tokens": 1} | details},
        {"usage": {"completion_tokens": 2, "prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": True}}},
        {"usage": None},
    )
    assert (stream.prompt_tokens, stream.answer_tokens, stream.cached_tokens) == (9, 2, 4)


def test_llama_servers_timings_are_in_milliseconds() -> None:
    said = {"prompt_n": 8, "prompt_ms": 250, "predicted_n": 0, "predicted_ms": 0.0, "draft_n": 6, "draft_n_accepted": 5}
    stream, _ = read({"timings": said}, {})
    assert stream.timings == Timings(8, 0.25, 0, 0.0, 6, 5)
    odd = {"prompt_n": "8", "prompt_ms": True, "predicted_n": 1.5, "predicted_ms": -1, "draft_n": None}
    assert read({"timings": odd})[0].timings == Timings(None, None, None, None, None, None)
    assert read({"timings": {"prompt_ms": "1", "predicted_ms": 1e12}})[0].timings == Timings(None, None, None, None, None, None)


def test_logprobs_of_a_chat() -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -9999.0}, 3]
    content = [{"token": "a", "logprob": -0.5, "top_logprobs": top}, "none", {"token": "c", "logprob": 0, "top_logprobs": None}]
    assert delta_of(delta={"content": "ac"}, logprobs={"content": content}).logprobs == [
        TokenLogprob("a", -0.5, (("a", -0.5), ("b", None))),
        TokenLogprob("c", 0.0, ()),
    ]


@pytest.mark.parametrize("number", [None, True, "x", 0.5, float("nan"), -9999.0, -1e9])
def test_what_is_no_logarithm_of_a_probability_is_none(number: object) -> None:
    (entry,) = delta_of(text="a", logprobs={"tokens": ["a"], "token_logprobs": [number]}).logprobs or []
    assert entry == TokenLogprob("a", None, ())


def test_logprobs_of_a_text() -> None:
    lists = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -2.0]}
    tops = [{"a": -0.5, "x": -1.0}, None]
    assert delta_of(text="ab", logprobs=lists | {"top_logprobs": tops}).logprobs == [
        TokenLogprob("a", -0.5, (("a", -0.5), ("x", -1.0))),
        TokenLogprob("b", -2.0, ()),
    ]
    for short in (None, tops[:1]):
        found = delta_of(text="ab", logprobs=lists | {"top_logprobs": short}).logprobs
        assert found == [TokenLogprob("a", -0.5, ()), TokenLogprob("b", -2.0, ())]
