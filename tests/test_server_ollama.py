"""Ollama's API over scripted answers. What fields there are, of which types, is written down from Ollama's api/types.go
(v0.32.15); what is sent and answered below is from its docs/api.md."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

import pytest

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.ports import ChatAsked, EngineState, TextAsked, Timings
from nanovllm_cli.text.answer_format import answer_format
from nanovllm_cli.text.tool_calls import ToolCallDelta as Call
from server_client import ServerClient
from server_fakes import CONTEXT_LEN, FILES, TEMPLATE, FakeGenerates, FakeModels, Script, event
from test_server_openai_texts import with_tokens

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
THINKS = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}</think>"

TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
METRICS: dict[str, Any] = dict.fromkeys((*TIMES, "prompt_eval_count", "eval_count"), int)
ANSWER: dict[str, Any] = METRICS | {"model": str, "created_at": str, "done": bool, "done_reason": str, "logprobs": list}
CHAT_FIELDS: dict[str, Any] = ANSWER | {"message": dict}
GENERATE_FIELDS: dict[str, Any] = ANSWER | {"response": str, "thinking": str, "context": list}
MESSAGE: dict[str, Any] = {"role": str, "content": str, "thinking": str, "tool_calls": list}
DETAILS: dict[str, Any] = {
    "parent_model": str, "format": str, "family": str, "families": list, "parameter_size": str, "quantization_level": str,
    "context_length": int, "embedding_length": int,
}  # fmt: skip
LISTED: dict[str, Any] = {
    "name": str, "model": str, "modified_at": str, "size": int, "digest": str, "details": dict, "capabilities": list,
}  # fmt: skip
RUNNING: dict[str, Any] = {
    "name": str, "model": str, "size": int, "digest": str, "details": dict, "expires_at": str, "size_vram": int,
    "context_length": int,
}  # fmt: skip
SHOWN: dict[str, Any] = {
    "parameters": str, "template": str, "details": dict, "model_info": dict, "capabilities": list, "modified_at": str,
}  # fmt: skip


def client(script: Any = None, **models: Any) -> ServerClient:
    return ServerClient(FakeGenerates(script, FakeModels(**models)))


def chat(messages: Any = HI, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": messages, "stream": False, **more}


def prompt(text: str = "Why?", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": text, "stream": False, **more}


def asked_for(path: str, body: Any, **models: Any) -> Any:
    served = client(**models)
    served.post(path, body)
    return served.generates.asked[-1]


def error_of(path: str, body: Any, status: int = 400, **models: Any) -> str:
    answer = client(**models).post(path, body, status)
    assert answer.keys() == {"error"}, answer
    error: str = answer["error"]
    return error


def check(value: Any, fields: dict[str, Any], *, all_there: bool = False) -> None:
    assert value.keys() <= fields.keys()
    assert not all_there or value.keys() == fields.keys()
    for name, each in value.items():
        assert type(each) is fields[name], (name, each)


def thinking_models() -> dict[str, Any]:
    return {"template": THINKS, "thinking_switch": "enable_thinking", "format": answer_format(THINKS)}


# ---- what is answered ----


def test_a_stream_is_what_is_wanted_where_nobody_says() -> None:
    body = chat()
    del body["stream"]
    lines = client(Script.of("Hello", " there")).lines(CHAT, body)
    for line in lines:
        check(line, CHAT_FIELDS)
        check(line["message"], MESSAGE)
        assert (line["model"], line["message"]["role"]) == ("fake", "assistant")
        assert datetime.fromisoformat(line["created_at"]).utcoffset() is not None
    assert [(line["message"]["content"], line["done"]) for line in lines] == [("Hello", False), (" there", False), ("", True)]
    assert all(line.keys() & {"done_reason", *METRICS} == set() for line in lines[:-1])
    assert lines[-1].keys() >= {"done_reason", *METRICS}


def test_an_answer_without_a_stream_has_all_of_it() -> None:
    script = Script.of("Hello", " there", cached_tokens=4, timings=Timings(prompt=0.25, answer=1.5))
    answer = client(script).post(CHAT, chat())
    check(answer, CHAT_FIELDS)
    assert answer["message"] == {"role": "assistant", "content": "Hello there"}
    counts = {name: answer[name] for name in ("done", "done_reason", "prompt_eval_count", "eval_count")}
    assert counts == {"done": True, "done_reason": "stop", "prompt_eval_count": 6, "eval_count": 11}
    assert (answer["prompt_eval_duration"], answer["eval_duration"]) == (250_000_000, 1_500_000_000)
    assert 0 < answer["load_duration"] < answer["total_duration"] < 60e9


@pytest.mark.parametrize("finish", ["length", "repetition"])
def test_a_generated_text_and_its_context(finish: str) -> None:
    served = client(Script.of("Be", "cause", finish=finish))
    answer = served.post(GENERATE, prompt("Why?"))
    check(answer, GENERATE_FIELDS)
    assert (answer["response"], answer["done_reason"]) == ("Because", "length")
    assert answer["context"] == [*served.generates.generations[-1].prompt_ids, *b"Because"]
    lines = served.lines(GENERATE, prompt("Why?", stream=True))
    assert [line["response"] for line in lines] == ["Be", "cause", ""]
    assert lines[-1]["context"] == answer["context"]
    assert not any("context" in line for line in lines[:-1])


def test_what_has_no_conversation_has_no_context() -> None:
    assert "context" not in client().post(GENERATE, prompt(raw=True))
    assert "context" not in client().post(GENERATE, prompt(images=["aGk="]))
    assert "context" not in client().post(CHAT, chat())


def test_thinking_is_told_apart() -> None:
    script = Script([[event(reasoning="Hm")], [event(reasoning=".")], [event("Yes", finish="stop")]])
    message = client(script).post(CHAT, chat())["message"]
    assert message == {"role": "assistant", "content": "Yes", "thinking": "Hm."}
    answer = client(script).post(GENERATE, prompt())
    assert (answer["response"], answer["thinking"]) == ("Yes", "Hm.")
    lines = client(script).lines(CHAT, chat(stream=True))
    told = [(line["message"].get("thinking"), line["message"]["content"]) for line in lines]
    assert told == [("Hm", ""), (".", ""), (None, "Yes"), (None, "")]


def test_calls_are_whole_and_their_arguments_objects() -> None:
    calls = [Call(0, "call_a", "get_weather", '{"place":"Rome"}'), Call(1, "call_b", "get_weather", '{"place":"Oslo"}')]
    script = Script([[event("Let me look.")], [event(calls=calls)], [event(finish="tool_calls")]])
    expected = [
        {"id": id, "function": {"index": index, "name": "get_weather", "arguments": {"place": place}}}
        for index, (id, place) in enumerate((("call_a", "Rome"), ("call_b", "Oslo")))
    ]
    answer = client(script).post(CHAT, chat(tools=[WEATHER]))
    assert answer["message"] == {"role": "assistant", "content": "Let me look.", "tool_calls": expected}
    assert answer["done_reason"] == "stop"  # Ollama has no other word
    lines = client(script).lines(CHAT, chat(tools=[WEATHER], stream=True))
    assert [line["message"].get("tool_calls") for line in lines] == [None, expected, None]
    asked = asked_for(CHAT, chat(tools=[WEATHER], stream=False))
    assert (asked.tools, asked.tool_choice, asked.whole_calls) == ([WEATHER], "auto", True)


def test_a_call_that_was_cut_off_has_what_was_complete() -> None:
    calls = [Call(0, "c", "get_weather", '{"place":"Rome","days":[1,2')]
    answer = client(Script([[event(calls=calls, finish="length")]])).post(CHAT, chat(tools=[WEATHER]))
    assert answer["message"]["tool_calls"][0]["function"]["arguments"]["place"] == "Rome"


def test_log_probabilities_stand_beside_what_they_are_of() -> None:
    drawn = [TokenLogprobs(72, -0.5, 1, ((72, -0.5), (74, -1.5)))], [TokenLogprobs(73, -0.25, 1, ((73, -0.25), (75, -2.5)))]
    script = Script([[event("H", logprobs=drawn[0])], [event("I", logprobs=drawn[1], finish="length")]])
    asked = {"logprobs": True, "top_logprobs": 2}
    served = client(script, tokenizer=None)
    lines = served.lines(GENERATE, prompt(stream=True, **asked))
    token = served.generates.models.served["fake"].tokenizer.id_to_bytes
    first = {
        "token": token(72).decode(), "logprob": -0.5, "bytes": list(token(72)),
        "top_logprobs": [
            {"token": token(72).decode(), "logprob": -0.5, "bytes": list(token(72))},
            {"token": token(74).decode(), "logprob": -1.5, "bytes": list(token(74))},
        ],
    }  # fmt: skip
    assert lines[0]["logprobs"] == [first]
    assert [len(line.get("logprobs", ())) for line in lines] == [1, 1, 0]
    assert served.post(GENERATE, prompt(**asked))["logprobs"] == lines[0]["logprobs"] + lines[1]["logprobs"]
    assert served.generates.asked[-1].params.logprobs == 2
    assert "logprobs" not in client(script).post(CHAT, chat(logprobs=False, top_logprobs=0))
    assert "top_logprobs" in error_of(CHAT, chat(top_logprobs=2))


def test_an_answer_without_a_step_ends() -> None:
    assert client(Script([])).post(CHAT, chat())["message"]["content"] == ""
    assert len(client(Script([])).lines(CHAT, chat(stream=True))) == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (GENERATE, prompt())])
def test_a_failure_is_an_error_of_its_form(path: str, body: dict[str, Any]) -> None:
    refused = Script([], refuses=ApiError(503, "no room", code="no_room"))
    assert client(refused).post(path, body, 503) == {"error": "no room"}
    assert client(refused).post(path, body | {"stream": True}, 503) == {"error": "no room"}
    late = Script([[event("He")]], error=ApiError(500, "gone"))
    assert client(late).post(path, body, 500) == {"error": "gone"}
    served = client(late)
    lines = served.lines(path, body | {"stream": True})
    assert (served.generates.generations[-1].closed, served.generates.models.in_use) == (True, 0)
    assert (len(lines), lines[0]["done"], lines[1]) == (2, False, {"error": "gone"})


# ---- what is asked ----


def test_messages_are_those_of_other_apis() -> None:
    call = {"function": {"name": "get_weather", "arguments": {"place": "Rome"}}}
    named = {"id": "mine", "function": {"index": 1, "name": "get_time", "arguments": {}}}
    given = [
        {"role": "System", "content": "Be kind."},
        {"role": "user", "content": "How is it?", "images": ["AAAA", "BBBB"]},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, named]},
        {"role": "tool", "tool_call_id": "mine", "content": "noon"},
        {"role": "tool", "tool_name": "get_weather", "content": "11 degrees"},
    ]
    asked = asked_for(CHAT, chat(given))
    system, user, assistant, time, weather = asked.messages
    assert system == {"role": "system", "content": "Be kind."}
    assert [part["type"] for part in user["content"]] == ["image_url", "image_url", "text"]
    assert [part["image_url"]["url"] for part in user["content"][:2]] == ["AAAA", "BBBB"]
    assert asked.image_paths == ["messages[1].images[0]", "messages[1].images[1]"]
    first, second = assistant["tool_calls"]
    assert assistant["reasoning_content"] == "Hm."
    assert (first["function"], second["id"]) == ({"name": "get_weather", "arguments": {"place": "Rome"}}, "mine")
    assert (time["tool_call_id"], time["name"]) == ("mine", "get_time")
    assert (weather["tool_call_id"], weather["name"]) == (first["id"], "get_weather")
    assert first["id"] != "mine"
    assert asked.continues is False


def test_results_without_a_name_belong_to_calls_in_their_order() -> None:
    calls = [{"function": {"name": name}} for name in ("a", "b")]
    given = [*HI, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    asked = asked_for(CHAT, chat(given))
    ids = [call["id"] for call in asked.messages[1]["tool_calls"]]
    assert [(message["tool_call_id"], message["name"]) for message in asked.messages[2:]] == list(zip(ids, "ab", strict=True))
    stray = asked_for(CHAT, chat([*HI, {"role": "tool", "tool_name": "f", "content": "1"}]))
    assert stray.messages[-1] == {"role": "tool", "content": "1", "name": "f"}


def test_an_answer_that_has_begun_goes_on() -> None:
    assert asked_for(CHAT, chat([*HI, {"role": "assistant", "content": "I am"}])).continues is True


def test_a_prompt_is_a_users_message() -> None:
    asked = asked_for(GENERATE, prompt("Why?", system="Be brief.", context=[5, 6], images=["AAAA"][:0]))
    assert isinstance(asked, ChatAsked)
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert (list(asked.before), asked.param) == ([5, 6], "prompt")
    seen = asked_for(GENERATE, prompt("", images=["AAAA"]))
    assert seen.messages[0]["content"] == [{"type": "image_url", "image_url": {"url": "AAAA"}}]
    assert seen.image_paths == ["images[0]"]
    empty = asked_for(GENERATE, prompt("Why?", system="", suffix="", template="", context=[], images=[], format="", raw=False))
    assert (empty.messages, empty.form) == ([{"role": "user", "content": "Why?"}], None)


def test_raw_prompts_and_models_without_a_template_get_the_text() -> None:
    asked = asked_for(GENERATE, prompt("<x>Why", raw=True))
    assert isinstance(asked, TextAsked)
    assert asked.prompt == "<x>Why"
    assert asked_for(GENERATE, prompt("Why"), template=None).prompt == "Why"


def test_what_lies_between_two_texts() -> None:
    tokenizer = with_tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    pre, suf, mid = (tokenizer.token_to_id(name) for name in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    for more in ({}, {"raw": True}):
        asked = asked_for(GENERATE, prompt("a", suffix="b", **more), tokenizer=tokenizer)
        assert asked.prompt == [pre, *a, suf, *b, mid]
    assert asked_for(GENERATE, prompt("", suffix="b"), tokenizer=tokenizer).prompt == [pre, suf, *b, mid]
    assert "filling in the middle" in error_of(GENERATE, prompt("a", suffix="b"))


OPTIONS = {
    "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "typical_p": 0.5, "repeat_last_n": 9,
    "repeat_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 11, "stop": ["END"],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (GENERATE, prompt), (GENERATE, lambda **o: prompt(raw=True, **o))])
def test_options_are_over_the_models_own(path: str, body: Any) -> None:
    own = SamplingParams(temperature=0.9, top_k=5, n=2, logprobs=1)
    params = asked_for(path, body(options=OPTIONS), default_params=own).params
    assert params == SamplingParams(
        max_tokens=7, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, typical_p=0.5, penalty_last_n=9,
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25, seed=11, stop=("END",),
    )  # fmt: skip
    without = asked_for(path, body(options=None), default_params=own).params
    assert (without.temperature, without.top_k, without.n, without.logprobs) == (0.9, 5, 1, None)


def test_numbers_are_taken_as_clients_send_them() -> None:
    options = {"num_ctx": 2048.0, "top_k": 40.0, "num_predict": -1.0, "seed": -1.0, "temperature": 1, "num_gpu": 99, "x": []}
    asked = asked_for(CHAT, chat(options=options), default_params=SamplingParams(max_tokens=5))
    assert (asked.params.max_tokens, asked.params.top_k, asked.params.seed, asked.most_tokens) == (None, 40, None, 2048)
    assert asked_for(CHAT, chat(options={"num_predict": -2})).params.max_tokens is None
    assert asked_for(CHAT, chat(options={"num_predict": 0})).params.max_tokens is None
    assert asked_for(CHAT, chat(options={"top_k": 40.7})).params.top_k == 40
    assert asked_for(CHAT, chat(options={"stop": "x", "seed": -5})).params.seed == 2**64 - 5
    assert asked_for(GENERATE, prompt(raw=True, options={"num_ctx": 64})).most_tokens == 64
    assert asked_for(CHAT, chat(options={"num_ctx": 0, "mirostat": 0, "tfs_z": 1.0})).most_tokens is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "options.temperature"), ({"temperature": "hot"}, "options.temperature"),
        ({"top_k": -2.5}, "options.top_k"), ({"top_p": 2}, "options.top_p"), ({"num_predict": "7"}, "options.num_predict"),
        ({"num_predict": -3}, "options.num_predict"), ({"num_ctx": -1}, "options.num_ctx"), ({"stop": 5}, "options.stop"),
        ({"stop": [""]}, "options.stop"), ({"repeat_penalty": 0}, "options.repeat_penalty"), ({"seed": 2**64}, "options.seed"),
        ({"mirostat": 3}, "options.mirostat"), ({"mirostat_tau": -1}, "options.mirostat_tau"),
        ({"tfs_z": 0.5}, "options.tfs_z"), ("hot", "options"), ([], "options"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_named(options: Any, named: str) -> None:
    for path, body in ((CHAT, chat), (GENERATE, prompt)):
        assert error_of(path, body(options=options)).startswith(named + ": ")


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None), ("", None), ("json", Constraint("json_object")), ({}, Constraint("json_schema", "{}")),
        ({"type": "object"}, Constraint("json_schema", '{"type":"object"}')),
    ],
)  # fmt: skip
def test_the_form_of_an_answer(form: Any, expected: Constraint | None) -> None:
    assert asked_for(CHAT, chat(format=form)).form == expected
    assert asked_for(GENERATE, prompt(format=form)).form == expected


def test_forms_that_are_none_are_refused() -> None:
    for wrong in ("yaml", 5, ["json"]):
        assert error_of(CHAT, chat(format=wrong)).startswith("format: must be 'json'")
    told = error_of(CHAT, chat(format={"type": "refuse"}, stream=True))
    assert told == "format: the schema cannot be enforced"


@pytest.mark.parametrize(
    ("think", "expected"),
    [(None, (None, {})), (True, (True, {})), (False, (False, {})), ("low", (True, {})), ("max", (True, {}))],
)
def test_thinking_goes_by_the_models_switch(think: Any, expected: Any) -> None:
    asked = asked_for(CHAT, chat(think=think), **thinking_models())
    assert (asked.thinking, asked.template_kwargs) == expected
    assert asked.reasoning_budget is None
    assert asked_for(GENERATE, prompt(think=think), **thinking_models()).thinking == expected[0]


def test_levels_go_to_templates_that_know_them() -> None:
    template = THINKS.replace("enable_thinking", "reasoning_effort") + "{# max 1 call #}"
    models = {"template": template, "format": answer_format(template)}
    for level, told in (("low", "low"), ("high", "high"), ("max", "high")):
        assert asked_for(CHAT, chat(think=level), **models).template_kwargs == {"reasoning_effort": told}
    knows_max = {**models, "template": template + "{% if reasoning_effort == 'max' %}!{% endif %}"}
    assert asked_for(CHAT, chat(think="max"), **knows_max).template_kwargs == {"reasoning_effort": "max"}


def test_a_model_that_always_thinks_is_stopped_where_it_must_not() -> None:
    template = TEMPLATE + "<think>"
    asked = asked_for(CHAT, chat(think=False), template=template, format=answer_format(template))
    assert (asked.thinking, asked.reasoning_budget) == (False, 0)


def test_a_model_that_cannot_think_says_so() -> None:
    for think in (True, "high"):
        assert "does not support thinking" in error_of(CHAT, chat(think=think))
        assert "does not support thinking" in error_of(GENERATE, prompt(think=think))
    assert asked_for(CHAT, chat(think=False)).thinking is False
    for wrong in ("much", 1, "true"):
        assert error_of(CHAT, chat(think=wrong)).startswith("think: must be")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {}, "model: must be there"), (CHAT, {"model": ""}, "model: "), (CHAT, [], "the body must be a JSON object"),
        (CHAT, chat("hi"), "messages: "), (CHAT, chat([{"content": "x"}]), "messages[0].role: must be there"),
        (CHAT, chat([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content: "),
        (CHAT, chat([{"role": "user", "images": "AAAA"}]), "messages[0].images: "),
        (CHAT, chat([{"role": "assistant", "tool_calls": [{"function": {}}]}]), "messages[0].tool_calls[0].function.name: "),
        (CHAT, chat([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]),
         "messages[0].tool_calls[0].function.arguments: "),
        (CHAT, chat(tools=[{"function": {"name": "a b"}}]), "tools[0].function.name: "),
        (CHAT, chat(tools=[WEATHER, WEATHER]), "two tools have the same name"),
        (CHAT, chat(stream="yes"), "stream: "), (CHAT, chat(keep_alive="soon"), "keep_alive: "),
        (CHAT, chat(keep_alive=[]), "keep_alive: "), (CHAT, chat(top_logprobs=21, logprobs=True), "top_logprobs: "),
        (CHAT, chat(_debug_render_only=True), "_debug_render_only: "),
        (GENERATE, prompt(5), "prompt: "), (GENERATE, prompt(template="{{ .Prompt }}"), "template: "),
        (GENERATE, prompt(raw=True, system="x"), "raw: system "), (GENERATE, prompt(raw=True, context=[1]), "raw: context "),
        (GENERATE, prompt(raw=True, images=["AAAA"]), "raw: images "), (GENERATE, prompt(raw=True, think=True), "raw: think "),
        (GENERATE, prompt(suffix="b", system="x"), "suffix: system "), (GENERATE, prompt(context=[-1]), "context[0]: "),
        (GENERATE, prompt(context=[1], images=["AAAA"]), "context: does not go with images"),
        (GENERATE, prompt(width=64), "width is not supported"),
        ("/api/embed", {"model": "fake", "input": 5}, "input: must be a text"),
        ("/api/embed", {"model": "fake", "input": [[1, 2]]}, "input: must be a text"),
        ("/api/embed", {"model": "fake", "input": "a", "dimensions": -1}, "dimensions: "),
        ("/api/embeddings", {"model": "fake", "prompt": ["a"]}, "prompt: "), ("/api/show", {}, "model: must be there"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path: str, body: Any, told: str) -> None:
    assert error_of(path, body).startswith(told)


def test_what_other_doors_say_has_the_same_form() -> None:
    guarded = ServerClient(FakeGenerates(), api_keys=("a-key-for-tests",))
    assert guarded.post(CHAT, chat(), 401)["error"].startswith("an API key is needed")
    guarded.key = "a-key-for-tests"
    assert guarded.post(CHAT, chat())["done"] is True
    assert isinstance(guarded.get("/api/nothing", 404)["error"], str)
    assert guarded.get(CHAT, 405) == {"error": "this path takes POST"}
    assert guarded.get("/apical", 404)["error"]["code"] == "unknown_path"  # not Ollama's


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", [CHAT, "/api/show", "/api/embed"])
def test_programs_need_not_call_a_body_json(path: str, kind: str | None) -> None:
    """curl's -d calls it a form, LiteLLM says nothing. A page of another site can do so as well, but cannot hide that it did."""
    body, named = json.dumps(chat() | {"input": "a"}), {} if kind is None else {"content-type": kind}
    served = client()
    assert served.send(path, body, named).status_code == 200
    for header in ("origin", "sec-fetch-site"):
        refused = served.send(path, body, {**named, header: "null"})
        assert (refused.status_code, refused.json().keys()) == (415, {"error"})
        assert served.send(path, body, {"content-type": "application/json", header: "null"}).status_code == 200
    assert served.send("/v1/chat/completions", body, named).status_code == 415


# ---- names, and models ----


def test_answers_call_a_model_as_the_request_does() -> None:
    served = client()
    assert served.post(CHAT, chat(model="fake:latest"))["model"] == "fake:latest"
    assert served.post("/api/embed", {"model": "fake:latest", "input": "a"})["model"] == "fake:latest"


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat()), (CHAT, chat([])), (GENERATE, prompt()), (GENERATE, prompt("", keep_alive=0)), ("/api/show", {}),
     ("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})],
)  # fmt: skip
def test_a_model_that_is_not_here_is_404(path: str, body: dict[str, Any]) -> None:
    assert "model 'nope' not found" in error_of(path, body | {"model": "nope"}, 404)


def test_models_are_listed_as_they_are_asked_for() -> None:
    served = ServerClient(FakeGenerates(models=FakeModels("qwen3:0.6b", "broken", "other")))
    served.generates.models.unreadable.add("broken")
    listed = served.get("/api/tags")["models"]
    for each in listed:
        check(each, LISTED, all_there=True)
        check(each["details"], DETAILS, all_there=True)
        assert served.post(CHAT, chat(model=each["model"]))["done"] is True
    assert [(each["name"], each["model"]) for each in listed] == [("qwen3:0.6b",) * 2, ("other",) * 2]
    assert listed[0]["details"] == {
        "parent_model": "", "format": "gguf", "family": "qwen3", "families": ["qwen3"], "parameter_size": "494.03M",
        "quantization_level": "Q4_K", "context_length": CONTEXT_LEN, "embedding_length": 4,
    }  # fmt: skip
    assert (listed[0]["size"], listed[0]["digest"]) == (1000, FILES.digest)
    assert listed[0]["modified_at"] == "2023-11-14T22:13:20.500000Z"


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (7_615_616_512, "7.6B"), (8_000_000_000, "8B"), (494_032_768, "494.03M"), (3_000_000, "3M"), (292_800, "293K"),
        (999, "999"),
    ],
)  # fmt: skip
def test_sizes_are_written_as_ollama_writes_them(count: int, told: str) -> None:
    served = client()
    served.generates.models.files = FILES._replace(num_parameters=count)
    assert served.post("/api/show", {"model": "fake"})["details"]["parameter_size"] == told


def test_what_a_model_is() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, stop=("END",))
    told = client(default_params=defaults).post("/api/show", {"model": "fake:latest", "verbose": True})
    check(told, SHOWN, all_there=True)
    assert told["template"] == TEMPLATE
    assert told["model_info"] == {
        "general.architecture": "qwen3", "general.basename": "fake", "general.parameter_count": 494_032_768,
        "qwen3.context_length": CONTEXT_LEN, "qwen3.embedding_length": 4, "qwen3.block_count": 2,
    }  # fmt: skip
    parameters = [line.split() for line in told["parameters"].splitlines()]
    assert parameters == [["temperature", "0.6"], ["top_k", "20"], ["stop", '"END"']]
    assert client().post("/api/show", {"name": "fake"})["parameters"] == ""


def test_the_context_of_a_model_that_was_never_loaded_is_its_own() -> None:
    served = client()
    served.generates.models.served["fake"].engine.facts = None  # type: ignore[misc]
    assert served.post("/api/show", {"model": "fake"})["model_info"]["qwen3.context_length"] == FILES.context_len


def test_capabilities_follow_from_the_model() -> None:
    def told(files: dict[str, Any] | None = None, **models: Any) -> Any:
        served = client(**models)
        served.generates.models.files = FILES._replace(**(files or {}))
        served.generates.models.served["fake"].engine.facts = None  # type: ignore[misc]
        return served.post("/api/show", {"model": "fake"})["capabilities"]

    assert told() == ["completion"]
    assert told(template=None) == ["completion"]
    assert told(template=TEMPLATE + "{{ tools }}") == ["completion", "tools"]
    assert told(tokenizer=with_tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")) == ["completion", "insert"]
    assert told(**thinking_models()) == ["completion", "thinking"]
    assert told({"reads_images": True}) == ["completion", "vision"]
    assert told({"has_head": False, "embeds": True}, **thinking_models()) == ["embedding"]


def test_what_is_loaded_is_told_once() -> None:
    served = client()
    models = served.generates.models
    (running,) = served.get("/api/ps")["models"]
    check(running, RUNNING, all_there=True)
    assert (running["size"], running["size_vram"], running["context_length"]) == (4000 + 65536, 0, CONTEXT_LEN)
    assert datetime.fromisoformat(running["expires_at"]).year > 2300  # it stays
    models.sleeps = 1_700_000_060.0
    assert served.get("/api/ps")["models"][0]["expires_at"] == "2023-11-14T22:14:20.000000Z"
    models.served["fake"].engine.state = EngineState.ASLEEP  # type: ignore[misc]
    assert served.get("/api/ps") == {"models": []}


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "-0m", "0h0m0s"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat([])), (GENERATE, prompt(""))])
def test_no_time_without_a_prompt_unloads(path: str, body: dict[str, Any], keep_alive: Any) -> None:
    served = client()
    answer = served.post(path, body | {"keep_alive": keep_alive})
    check(answer, CHAT_FIELDS if path == CHAT else GENERATE_FIELDS)
    assert (answer["done"], answer["done_reason"]) == (True, "unload")
    assert served.generates.models.served["fake"].engine.state is EngineState.ASLEEP
    served.generates.models.in_use = 1
    assert served.post(path, body | {"keep_alive": keep_alive}, 503) == {"error": "the model is in use"}


@pytest.mark.parametrize("keep_alive", [None, 300, -1, "5m", "-1s", "1h30m", ".5s", 0.5])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat([])), (CHAT, chat(None)), (GENERATE, prompt(""))])
def test_nothing_to_answer_loads(path: str, body: dict[str, Any], keep_alive: Any) -> None:
    served = client()
    answer = served.post(path, body | {"keep_alive": keep_alive, "stream": True})
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert answer.get("response", "") == answer.get("message", {"content": ""})["content"] == ""
    assert served.generates.models.served["fake"].engine.state is EngineState.READY
    assert served.generates.asked == []


def test_a_request_that_is_answered_unloads_nothing() -> None:
    served = client()
    served.post(CHAT, chat(keep_alive=0))
    assert served.generates.models.served["fake"].engine.state is EngineState.READY


def test_the_version_is_one_that_clients_can_compare() -> None:
    version = client().get("/api/version")["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # what Copilot asks for


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [
        ("post", "/api/pull", "nanovllm models pull"), ("post", "/api/push", "push"), ("post", "/api/copy", "--alias"),
        ("post", "/api/create", "nanovllm quantize"), ("delete", "/api/delete", "nanovllm models rm"),
        ("post", "/api/blobs/sha256:0", "PATH"),
    ],
)  # fmt: skip
def test_models_are_managed_elsewhere(method: str, path: str, word: str) -> None:
    more = {"body": {"model": "x"}} if method == "post" else {}
    answer = getattr(client(), method)(path, status=400, **more)
    assert answer.keys() == {"error"}
    assert word in answer["error"]


# ---- vectors ----


def test_vectors_have_length_one_and_as_many_numbers_as_are_wanted() -> None:
    served = client()
    answer = served.post("/api/embed", {"model": "fake", "input": ["ab", "xyz"], "keep_alive": "5m"})
    assert answer["embeddings"] == [[0.6, 0.8, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert (answer["prompt_eval_count"], answer.keys()) == (
        5, {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"},
    )  # fmt: skip
    short = served.post("/api/embed", {"model": "fake", "input": "ab", "dimensions": 1})
    assert short["embeddings"] == [[1.0]]
    for all_of_it in (0, 4, 999):
        whole = served.post("/api/embed", {"model": "fake", "input": "ab", "dimensions": all_of_it})
        assert math.hypot(*whole["embeddings"][0]) == pytest.approx(1)
        assert len(whole["embeddings"][0]) == 4
    for nothing in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert served.post("/api/embed", {"model": "fake", **nothing})["embeddings"] == []


def test_texts_are_cut_unless_that_is_declined() -> None:
    served = client()
    for more in ({}, {"truncate": True}, {"truncate": False}, {"options": {"num_ctx": 16}}, {"options": {"num_ctx": 9999}}):
        served.post("/api/embed", {"model": "fake", "input": "ab", **more})
    assert served.generates.mosts == [CONTEXT_LEN, CONTEXT_LEN, None, 16, CONTEXT_LEN]


def test_the_older_vector_has_any_length() -> None:
    served = client()
    assert served.post("/api/embeddings", {"model": "fake", "prompt": "ab"}) == {"embedding": [1.2, 1.6, 0.0, 0.0]}
    assert served.post("/api/embeddings", {"model": "fake"}) == {"embedding": []}
    assert served.generates.mosts == [None]


def test_the_description_says_what_a_line_is() -> None:
    content = client().get("/openapi.json")["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "application/x-ndjson"}
    jsonschema = pytest.importorskip("jsonschema")
    calls = (Call(0, "call_1", "f", "{}"),)
    script = Script(
        [[event(reasoning="hm")], [event("He", logprobs=[TokenLogprobs(72, -0.5, 1, ((72, -0.5),))])], [event(calls=calls)]],
        error=ApiError(503, "gone"),
    )
    described = content["application/x-ndjson"]["schema"]
    strict = {"anyOf": [each | {"additionalProperties": False} for each in described["anyOf"]]}
    lines = client(script).lines(CHAT, chat(stream=True, logprobs=True))
    assert len(lines) == 4
    for line in (*lines, *client().lines(CHAT, chat(stream=True))):
        jsonschema.validate(json.loads(json.dumps(line)), strict)
