"""/v1/responses over scripted answers: what a request means, what is answered, and what is kept of it. Bodies are held against
OpenAI's specification."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import msgspec
import pytest

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.logprobs import ContentTokens
from nanovllm_cli.server.ports import ChatAsked, Event
from nanovllm_cli.server.responses_store import ResponseStore, StoredResponse
from nanovllm_cli.text.answer_format import answer_format
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.detokenizer import Detokenizer
from nanovllm_cli.text.tool_calls import ToolCallDelta as Call
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.source import resolve
from nanovllm_cli.weights.tokenizer import load_tokenizer
from openai_spec import check
from server_client import ServerClient
from server_fakes import FakeGenerates, FakeModels, Script, event

PATH = "/v1/responses"
UNKNOWN = {"type": "function", "name": "f"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
CALL = [Call(0, "call_1", "get_weather", ""), Call(0, None, None, '{"place":'), Call(0, None, None, '"Rome"}')]
REASONING_TEMPLATE = "{{ reasoning_effort }}{{ verbosity }}{{ messages[0].content }}"


def client(script: Any = None, **models: Any) -> ServerClient:
    return ServerClient(FakeGenerates(script, FakeModels(**models)))


def asked_for(body: dict[str, Any], **models: Any) -> ChatAsked:
    """What the engine is asked for."""
    served = client(**models)
    served.post(PATH, body)
    asked = served.generates.asked[-1]
    assert isinstance(asked, ChatAsked)
    return asked


def called() -> Script:
    return Script([[event(reasoning="Look it up.")], [event(calls=CALL, finish="tool_calls")]])


# ---- what is answered ----


def test_an_answer_is_a_message_in_a_response() -> None:
    response = client(Script.of("Hello", " there", cached_tokens=3)).post(PATH, {"model": "fake", "input": "hi"})
    check("Response", response)
    (message,) = response["output"]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "Hello there")
    assert (response["status"], response["incomplete_details"], response["model"]) == ("completed", None, "fake")
    assert response["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 11,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
    }


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    script = Script([[event(reasoning="Hm.")], [event("Let me look.")], [event(calls=CALL)], [event(finish="tool_calls")]])
    response = client(script).post(PATH, {"input": "hi", "tools": [WEATHER]})
    check("Response", response)
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me look."
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "get_weather", '{"place":"Rome"}')
    assert {item["status"] for item in response["output"]} == {"completed"}


def test_calls_side_by_side_are_two_items() -> None:
    calls = [Call(0, "call_1", "get_weather", "{}"), Call(1, "call_2", "get_weather", '{"place":1}')]
    response = client(Script([[event(calls=calls, finish="tool_calls")]])).post(PATH, {"input": "x", "tools": [WEATHER]})
    assert [(i["call_id"], i["arguments"]) for i in response["output"]] == [("call_1", "{}"), ("call_2", '{"place":1}')]


def test_what_came_together_keeps_its_order() -> None:
    calls = [Call(0, "c0", "f", "{}", place=1), Call(1, "c1", "f", "{}", place=1)]
    response = client(Script([[event("ab", calls=calls, finish="tool_calls")]])).post(PATH, {"input": "x", "tools": [WEATHER]})
    said = [item["content"][0]["text"] if item["type"] == "message" else item["call_id"] for item in response["output"]]
    assert said == ["a", "c0", "c1", "b"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    response = client(Script.of("Once", finish="length")).post(PATH, {"input": "hi", "max_output_tokens": 16})
    check("Response", response)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_a_call_that_was_cut_off_is_no_part_of_the_conversation() -> None:
    """Whether the server kept it or the client brings it back, if nobody says what became of it."""
    script = Script([[event("I look.")], [event(calls=CALL[:2], finish="length")]])
    served = client(script)
    first = served.post(PATH, {"input": "hi", "tools": [WEATHER]})
    assert [item["status"] for item in first["output"]] == ["completed", "incomplete"]
    served.post(PATH, {"input": "Go on", "previous_response_id": first["id"]})
    served.post(PATH, {"input": [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "Go on"}]})
    for asked in served.generates.asked[1:]:
        assert isinstance(asked, ChatAsked)
        assert [(each["role"], each["content"]) for each in asked.messages] == [
            ("user", "hi"), ("assistant", "I look."), ("user", "Go on")
        ]  # fmt: skip
        assert not any("tool_calls" in each for each in asked.messages)


def test_a_broken_call_that_somebody_answers_is_told_to_the_model() -> None:
    """Which is how clients say what was wrong with it; whether they had it from here, or bring it along."""
    script = Script([[event(calls=CALL[:2], finish="length")]])
    served = client(script)
    first = served.post(PATH, {"input": "hi", "tools": [WEATHER]})
    output = {"type": "function_call_output", "call_id": "call_1", "output": "that was no JSON"}
    served.post(PATH, {"input": [output], "previous_response_id": first["id"]})
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"place":'}
    served.post(PATH, {"input": [{"role": "user", "content": "hi"}, call, output]})
    for asked in served.generates.asked[1:]:
        assert isinstance(asked, ChatAsked)
        assert [each["role"] for each in asked.messages] == ["user", "assistant", "tool"]
        assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"place":'
    refused = served.post(PATH, {"input": [{**output, "call_id": "nobody"}], "previous_response_id": first["id"]}, status=400)
    assert "no function call 'nobody'" in refused["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"place":', '{"place": Rome}', ""])
def test_a_call_that_is_broken_is_no_part_of_the_conversation(arguments: str) -> None:
    """A model that is held to nothing may write one, and a stop string may break it off."""
    calls = [Call(0, "call_1", "get_weather", arguments)]
    served = client(Script([[event(calls=calls, finish="stop", stop_reason="x")]]))
    first = served.post(PATH, {"input": "hi", "tools": [WEATHER]})
    assert [item["status"] for item in first["output"]] == ["incomplete"]
    served.post(PATH, {"input": "Go on", "previous_response_id": first["id"]})
    asked = served.generates.asked[-1]
    assert isinstance(asked, ChatAsked)
    assert asked.param == "input"
    assert [each["role"] for each in asked.messages] == ["user", "user"]


def test_a_call_that_the_end_came_behind_can_be_answered() -> None:
    served = client(Script([[event(calls=CALL, finish="length")]]))
    first = served.post(PATH, {"input": "hi", "tools": [WEATHER]})
    output = {"type": "function_call_output", "call_id": "call_1", "output": "warm"}
    served.post(PATH, {"input": [output], "previous_response_id": first["id"]})
    asked = served.generates.asked[-1]
    assert isinstance(asked, ChatAsked)
    assert [each["role"] for each in asked.messages] == ["user", "assistant", "tool"]


def test_an_answer_without_a_word_has_a_message() -> None:
    response = client(Script.of("")).post(PATH, {"input": "hi"})
    assert response["output"][0]["content"][0]["text"] == ""


def test_settings_are_sent_back() -> None:
    body = {
        "input": "hi", "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 99,
        "metadata": {"a": "b"}, "user": "u", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"},
        "parallel_tool_calls": False, "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "truncation": "disabled",
    }  # fmt: skip
    response = client().post(PATH, body)
    check("Response", response)
    sent_back = {name: value for name, value in body.items() if name not in ("input", "service_tier")}
    assert {name: response[name] for name in sent_back} == sent_back


def test_a_tool_without_more_than_its_name_is_read_as_it_is_and_sent_back_whole() -> None:
    assert asked_for({"input": "hi", "tools": [UNKNOWN]}).tools[0]["function"].keys() == {"name", "parameters"}
    response = client().post(PATH, {"input": "hi", "tools": [UNKNOWN]})
    check("Response", response)
    (tool,) = response["tools"]
    assert (tool["description"], tool["strict"]) == (None, False)


def test_what_is_drawn_with_by_default_is_said() -> None:
    response = client(default_params=SamplingParams(temperature=0.7, top_p=0.8)).post(PATH, {"input": "hi"})
    assert (response["temperature"], response["top_p"]) == (0.7, 0.8)


def test_a_response_is_one_answer_whatever_the_default() -> None:
    served = client(default_params=SamplingParams(n=3))
    served.post(PATH, {"input": "hi"})
    assert served.generates.asked[-1].params.n == 1


def test_logprobs_are_those_of_the_text() -> None:
    def step(drawn: str, content: str, **more: Any) -> list[Event]:
        ids = byte_tokenizer().encode(drawn)
        logprobs = [TokenLogprobs(i, -0.5, 1, ((i, -0.5), (0, -2.0))) for i in ids]
        return [event(content, text=drawn, token_ids=ids, logprobs=logprobs, **more)]

    script = Script([step("<t>hm", "", reasoning="hm"), step("</t>", ""), step("He", "He"), step("y", "y", finish="stop")])
    served = client(script)
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = served.post(PATH, body)
    check("Response", response)
    entries = response["output"][1]["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"]) for entry in entries] == [("H", -0.5), ("e", -0.5), ("y", -0.5)]
    assert entries[0]["top_logprobs"] == [{"token": "H", "logprob": -0.5, "bytes": [72]}]
    streamed = [e.data for e in served.stream(PATH, body) if e.name == "response.output_text.delta"]
    assert [entry for delta in streamed for entry in delta["logprobs"]] == entries


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("1, 2, 3, 4\n\n", "1, 2, 3, 4\n\n"), ("  a  b \n c", "  a  b \n c"), ("é < <t </th x <", "é < <t </th x <"),
        ("<think>1, 2</think>\n\n1, 2, 3 ", "1, 2, 3 "), ("<think>so</think> hello there you", "hello there you"),
        (" \n<think>\n\n</think>\n\nthe <the", "the <the"), ("< < a", "< < a"), ("< <tool", "< <tool"), ("<<<x", "<<<x"),
        ("<think>< a</think>< < a", "< < a"), ("<think>so</think> <<a", "<<a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", [(), ("theme", "rest", "1, 2, 4", "< <b")], ids=["", "stop"])
def test_logprobs_are_those_of_the_content_in_whatever_pieces_it_comes(
    answer: str, content: str, stop: tuple[str, ...]
) -> None:
    """White space is held back where it may be the end, half a tag where it may be one, and what may become a stop string: a part
    of a token's text, too."""
    with open_checkpoint(resolve("tiny").path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode(answer, add_special_tokens=False, parse_special=False)
    ends = list(itertools.accumulate(len(tokenizer.id_to_bytes(i)) for i in ids))
    start = len(answer.encode()) - len(content.encode())
    expected = [i for i, end in zip(ids, ends, strict=True) if end > start]
    for seed in range(30):
        r = random.Random(seed)
        parser, detokenizer = answer_format("<think>").parser(""), Detokenizer(tokenizer, stop=stop)
        tokens, found, left = ContentTokens(tokenizer, SamplingParams(logprobs=0), ()), list[Any](), ids
        while left:
            piece, left = (left[: (count := r.choice((1, 1, 2, 5, 30)))], left[count:])
            text = detokenizer.push(piece) + (detokenizer.finish() if not left else "")
            deltas = [parser.push(text), *([parser.finish()] if not left else [])]
            num_held = parser.num_held if left else 0
            found += tokens.take(
                event(
                    "".join(delta.content for delta in deltas), reasoning="".join(delta.reasoning for delta in deltas), text=text,
                    token_ids=piece, logprobs=[TokenLogprobs(i, -1.0, 1, ()) for i in piece], finish=None if left else "length",
                    num_held=num_held,
                )
            )  # fmt: skip
        assert [msgspec.json.decode(entry)["bytes"] for entry in found] == [list(tokenizer.id_to_bytes(i)) for i in expected]


# ---- what is asked for ----


def test_items_become_a_conversation() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "Weather in Rome?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"place":"Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "none"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "Oslo?"}]},
    ]

    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}

    assert list(asked_for({"input": items, "instructions": "Be brief."}).messages) == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Look.",
            "tool_calls": [call("c1", '{"place":"Rome"}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c2", "name": "get_weather", "content": "none"},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "sunny"},
        {"role": "user", "content": "And\nOslo?"},
    ]


def test_instructions_in_mid_conversation_stay_where_they_are() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    assert [m["role"] for m in asked_for({"input": items}).messages] == ["user", "developer", "user"]


def test_only_functions_are_tools() -> None:
    tools = [{"type": "local_shell"}, WEATHER, {"type": "web_search"}, {"type": "custom", "name": "x"}]
    asked = asked_for({"input": "hi", "tools": tools})
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    assert list(asked.tools) == [{"type": "function", "function": function}]
    assert (asked.tool_choice, asked.parallel) == ("auto", True)


@pytest.mark.parametrize(
    ("choice", "expected", "left"),
    [
        ("none", "none", ["get_weather", "other"]),
        ("required", "required", ["get_weather", "other"]),
        ({"type": "function", "name": "other"}, "other", ["get_weather", "other"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}, "required", ["other"]),
    ],
)
def test_tool_choice(choice: Any, expected: str, left: list[str]) -> None:
    tools = [WEATHER, {"type": "function", "name": "other"}]
    asked = asked_for({"input": "hi", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False})
    assert (asked.tool_choice, asked.parallel) == (expected, False)
    assert [tool["function"]["name"] for tool in asked.tools] == left


def test_a_format_is_a_constraint_and_is_tried_out() -> None:
    served = client()
    served.post(PATH, {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}})
    served.post(PATH, {"input": "x", "text": {"format": {"type": "json_object"}}})
    served.post(PATH, {"input": "x", "text": {"format": {"type": "text"}}})
    forms = [Constraint("json_schema", '{"type":"object"}'), Constraint("json_object")]
    assert [asked.form for asked in served.generates.asked] == [*forms, None]
    assert served.pool.checked == forms


def test_how_to_draw_reaches_the_engine() -> None:
    body = {"input": "x", "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 7, "top_k": 3, "seed": 5, "stop": ["\n"]}
    params = asked_for({**body, "cache_salt": "s", "priority": 0}).params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k, params.seed) == (0.25, 0.5, 7, 3, 5)
    assert params.stop == ("\n",)


def test_effort_and_verbosity_are_the_templates() -> None:
    body = {"input": "x", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
    assert asked_for(body, template=REASONING_TEMPLATE).template_kwargs == {"reasoning_effort": "low", "verbosity": "low"}
    assert asked_for({"input": "x", "reasoning": {"effort": "low"}}, thinking_switch="enable_thinking").thinking is True
    assert asked_for({"input": "x", "reasoning": {"effort": "none"}}, thinking_switch="enable_thinking").thinking is False
    assert asked_for({"input": "x", "reasoning": {"summary": "auto"}}).thinking is None


def test_counting_is_of_the_same_prompt() -> None:
    served = client()
    response = served.post(PATH, {"input": "hello", "instructions": "Be brief."})
    counted = served.post(f"{PATH}/input_tokens", {"input": "hello", "instructions": "Be brief."})
    check("TokenCountsResource", counted)
    assert counted["input_tokens"] == response["usage"]["input_tokens"]


# ---- what is kept ----


def test_a_conversation_goes_on_from_a_response() -> None:
    served = client(called())
    first = served.post(PATH, {"input": "Weather?", "tools": [WEATHER], "instructions": "One."})
    served.generates.script = Script.of("Sunny.")
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
    second = served.post(PATH, {"input": [output], "previous_response_id": first["id"], "tools": [WEATHER]})
    served.post(PATH, {"input": "Thanks", "previous_response_id": second["id"], "instructions": "Three."})
    messages = served.generates.asked[-1].messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert messages[0]["content"] == "Three."  # instructions are of one request
    assert messages[2]["reasoning_content"] == "Look it up."
    assert messages[2]["tool_calls"][0]["id"] == "call_1"
    assert messages[4]["content"] == "Sunny."
    assert second["previous_response_id"] == first["id"]


def test_a_kept_response_can_be_read_and_deleted() -> None:
    served = client()
    response = served.post(PATH, {"input": "hi"})
    path = f"{PATH}/{response['id']}"
    assert served.get(path) == response
    assert served.delete(path) == {"id": response["id"], "object": "response", "deleted": True}
    assert served.get(path, status=404)["error"]["code"] == "response_not_found"
    served.delete(path, status=404)
    body = {"input": "x", "previous_response_id": response["id"]}
    assert served.post(PATH, body, status=400)["error"]["code"] == "previous_response_not_found"


def test_input_items_are_listed_in_pages() -> None:
    served = client()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    items = [said[0], call, output, *said[1:]]
    path = f"{PATH}/{served.post(PATH, {'input': items})['id']}/input_items"
    whole = served.get(f"{path}?order=asc")
    check("ResponseItemList", whole)
    kinds = [item["type"] for item in whole["data"]]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    assert served.get(path)["data"] == whole["data"][::-1]
    page = served.get(f"{path}?order=asc&limit=2&after={whole['first_id']}")
    assert (page["data"], page["has_more"]) == (whole["data"][1:3], True)
    assert served.get(f"{path}?limit=0", status=400)["error"]["param"] == "limit"
    assert served.get(f"{path}?after=nothing", status=400)["error"]["param"] == "after"


def test_a_stored_item_can_be_named() -> None:
    served = client()
    item = served.post(PATH, {"input": "hi"})["output"][0]
    reference = {"type": "item_reference", "id": item["id"]}
    served.post(PATH, {"input": [reference, {"role": "user", "content": "go on"}]})
    assert served.generates.asked[-1].messages[0] == {"role": "assistant", "content": "Hello there"}


@pytest.mark.parametrize("gone", [0, 1], ids=["older", "newer"])
def test_an_item_that_two_responses_hold_is_there_while_one_of_them_is(gone: int) -> None:
    served = client()
    first = served.post(PATH, {"input": "hi"})
    named = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "go on"}]}
    both = [first, served.post(PATH, named)]
    served.delete(f"{PATH}/{both.pop(gone)['id']}")
    both.append(served.post(PATH, named))
    for each in both:
        served.delete(f"{PATH}/{each['id']}")
    served.post(PATH, named, status=400)


def test_an_item_is_named_once() -> None:
    """Else a request of 16384 short lines would be a prompt of gigabytes, put together before anybody sees how long it is."""
    served = client()
    item = served.post(PATH, {"input": "hi"})["output"][0]
    reference = {"type": "item_reference", "id": item["id"]}
    refused = served.post(PATH, {"input": [reference, {"role": "user", "content": "x"}, reference]}, status=400)
    assert refused["error"]["param"] == "input[2].id"


def test_nothing_is_kept_without_store() -> None:
    served = client()
    response = served.post(PATH, {"input": "hi", "store": False})
    served.get(f"{PATH}/{response['id']}", status=404)
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    assert served.post(PATH, {"input": [reference]}, status=400)["error"]["param"] == "input[0].id"


def test_api_keys_do_not_see_each_others_responses() -> None:
    served = ServerClient(FakeGenerates(), api_keys=("key-of-one", "key-of-two"))
    served.key = "key-of-one"
    response = served.post(PATH, {"input": "hi"})
    served.key = "key-of-two"
    served.get(f"{PATH}/{response['id']}", status=404)
    served.delete(f"{PATH}/{response['id']}", status=404)
    served.post(PATH, {"input": "x", "previous_response_id": response["id"]}, status=400)
    served.post(PATH, {"input": [{"type": "item_reference", "id": response["output"][0]["id"]}]}, status=400)
    served.key = "key-of-one"
    served.get(f"{PATH}/{response['id']}")


def kept(name: str, size: int, previous: str | None = None) -> StoredResponse:
    return StoredResponse(name, b"x" * size, [{"id": f"item of {name}"}], 1, previous)


def test_the_store_forgets_what_was_used_least_recently() -> None:
    size = kept("a", 100).size
    store = ResponseStore(max_bytes=3 * size, max_responses=10)
    for name in ("a", "b", "c"):
        store.put(None, kept(name, 100))
    assert store.get(None, "a") is not None
    store.put(None, kept("d", 100))
    assert [name for name in "abcd" if store.get(None, name)] == ["a", "c", "d"]
    assert (store.num_bytes, store.item(None, "item of b")) == (3 * size, None)
    store.put(None, kept("huge", 4 * size))
    assert (len(store), store.get(None, "huge")) == (3, None)


def test_who_fills_the_store_takes_nothing_from_others() -> None:
    size = kept("0", 100).size
    for limits in ({"max_bytes": 4 * size, "max_responses": 99}, {"max_bytes": 99 * size, "max_responses": 4}):
        store = ResponseStore(**limits)
        for name in ("first", "other"):
            store.put(name, kept("0", 100))
        for number in range(1, 9):
            store.put("first", kept(str(number), 100))
        assert store.get("other", "0") is not None
        assert [number for number in range(9) if store.get("first", str(number))] == [6, 7, 8]
        assert (len(store), store.num_bytes) == (4, 4 * size)
        assert all(store.delete(*key) for key in [("other", "0"), ("first", "6"), ("first", "7"), ("first", "8")])
        assert (len(store), store.num_bytes, store.item("first", "item of 8")) == (0, 0, None)


def test_items_of_one_name_are_forgotten_in_time() -> None:
    """Clients choose the names. Each item was looked for among all others of its name: a quarter of a minute for these."""
    store = ResponseStore()
    for name in ("a", "b", "c"):
        store.put(None, StoredResponse(name, b"", [{"id": "item", "text": f"{name}{number}"} for number in range(16384)], 16384))
    start = time.process_time()
    assert store.delete(None, "b")
    assert time.process_time() - start < 1
    assert store.item(None, "item") == {"id": "item", "text": "c16383"}
    assert store.delete(None, "c")
    assert store.item(None, "item") == {"id": "item", "text": "a16383"}
    assert store.delete(None, "a")
    assert (store.item(None, "item"), store.num_bytes) == (None, 0)


def test_the_store_counts_responses() -> None:
    store = ResponseStore(max_bytes=1 << 20, max_responses=2)
    for name in ("a", "b", "c"):
        store.put(None, kept(name, 1))
    assert [name for name in "abc" if store.get(None, name)] == ["b", "c"]


def test_a_conversation_whose_beginning_is_gone_is_gone() -> None:
    store = ResponseStore()
    store.put(None, kept("a", 1))
    store.put(None, kept("b", 1, "a"))
    assert store.conversation(None, "b") == [{"id": "item of a"}, {"id": "item of b"}]
    store.delete(None, "a")
    assert store.conversation(None, "b") is None


# ---- reasoning that clients keep ----


def test_reasoning_comes_back_as_it_was_sealed() -> None:
    served = client(called())
    body = {"input": "Weather?", "tools": [WEATHER], "store": False, "include": ["reasoning.encrypted_content"]}
    first = served.post(PATH, body)
    check("Response", first)
    sealed = [dict(item) for item in first["output"]]
    del sealed[0]["content"]  # Codex sends it back without
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
    served.post(PATH, {"input": [{"role": "user", "content": "Weather?"}, *sealed, output]})
    assert served.generates.asked[-1].messages[1]["reasoning_content"] == "Look it up."


@pytest.mark.parametrize("sealed", ["gAAAAABsomebody-elses", "nanovllm:", "nanovllm:%%%", "nanovllm:/w=="])
def test_sealed_reasoning_of_others_is_skipped(sealed: str) -> None:
    items = [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": [], "encrypted_content": sealed}]
    asked = asked_for({"input": [*items, {"role": "assistant", "content": "b"}]})
    assert "reasoning_content" not in asked.messages[1]


# ---- bad input ----


USER = {"role": "user", "content": "x"}


def message(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    (message({"type": "input_image", "file_id": None}), "input[0].content[0].image_url"),
    (message({"type": "input_image", "image_url": "data:", "file_id": "f"}), "input[0].content[0].file_id"),
    (message({"type": "input_image", "image_url": "data:", "detail": "huge"}), "input[0].content[0].detail"),
    ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]"),
    (message({"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "f"}), "input[0].content[1]"),
    (message({"type": "video"}), "input[0].content[0].type"),
    (message({"type": "input_text", "text": 5}), "input[0].content[0].text"),
    ({"input": [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "somebody else's"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": ""}] * 16385}, "input"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "context_management": [{"type": "compaction"}]}, "context_management"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "temperature": 2.5}, "temperature"),
    ({"input": "x", "temperature": "hot"}, "temperature"),
    ({"input": "x", "top_p": -0.1}, "top_p"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 2**63}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": True}, "max_output_tokens"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
    ({"input": "x", "include": ["everything"]}, "include[0]"),
    ({"input": "x", "metadata": {"k": 5}}, "metadata.k"),
    ({"input": "x", "metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),  # this model knows none
    ({"input": "x", "text": {"verbosity": "high"}}, "text.verbosity"),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": "refuse"}}}}, "text.format"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": "y" * 300_000}}}},
        "text.format.schema",
    ),
    ({"input": "x", "text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
    ({"input": "x", "tools": {}}, "tools"),
    ({"input": "x", "tools": [5]}, "tools[0]"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "auto"}]}, "tools"),
    (
        {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [UNKNOWN]}},
        "tool_choice",
    ),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools"),
    ({"input": "x", "tools": [{"type": "web_search"}] * 513}, "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
    ({"input": "x", "tools": [WEATHER], "top_logprobs": 1}, "include"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_input_is_named(body: dict[str, Any], param: str) -> None:
    served = client()
    for path in (PATH, f"{PATH}/input_tokens") if param.startswith("input") else (PATH,):
        error = served.post(path, body, status=400)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert len(error["message"]) < 400
    assert not served.generates.asked


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user"}, "input[0].content: must be there"),
        ({"role": "user", "content": 5}, "input[0].content: must be a string or a list"),
        ({"role": "robot", "content": "x"}, "input[0].role: must be 'user', 'assistant', 'system' or 'developer'"),
        ({"type": "function_call", "call_id": "", "name": "f", "arguments": ""}, "input[0].call_id: must not be empty"),
        ({"type": "function_call", "call_id": "x" * 129, "name": "f", "arguments": ""}, "input[0].call_id: must have at most 1"),
    ],
)
def test_what_is_wrong_with_an_item_is_said_in_our_words(item: dict[str, Any], message: str) -> None:
    assert client().post(PATH, {"input": [item]}, status=400)["error"]["message"].startswith(message)


def test_what_tool_choice_may_be_is_told() -> None:
    wrong = client().post(PATH, {"input": "x", "tools": [WEATHER], "tool_choice": "any"}, status=400)
    assert wrong["error"]["message"] == "tool_choice: must be none, auto, required, or an object that names a function"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"input": [{"role": "robot", "content": "x"}]}, {"input": [{"role": "user", "content": "x"}]}),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, {"input": [{"role": "user", "content": []}]}),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}]},
        ),
        ({"input": [{"type": "unheard_of"}]}, {"input": [USER, {"type": "reasoning", "summary": [{"text": "x"}]}]}),
        ({"input": "x", "tools": [{"type": "function"}]}, {"input": "x", "tools": [WEATHER, {"type": "web_search"}]}),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, {"input": "x", "tools": [WEATHER], "tool_choice": "required"}),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
        ),
    ],
)
def test_what_is_read_is_what_is_described(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    served = client()
    served.post(PATH, wrong, status=400)
    served.post(PATH, right)
    assert [served.fits("ResponsesRequest", body) for body in (wrong, right)] == [False, True]


def test_unknown_fields_are_let_by() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x", "news": 1}], "phase": "commentary"}]
    client().post(PATH, {"input": items, "client_metadata": {"x": 1}, "max_tool_calls": 3, "tools": [{**WEATHER, "defer": 1}]})


def test_numbers_of_any_size_pass_through_schemas() -> None:
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"n": {"maximum": 10**30}}}}
    assert client().post(PATH, {"input": "x", "tools": [tool]})["tools"][0]["parameters"] == tool["parameters"]


def test_a_refusal_is_an_http_error() -> None:
    refuses = ApiError(400, "the prompt has 9 tokens", code="context_length_exceeded", param="messages")
    served = client(Script([], refuses=refuses))
    for more in ({}, {"stream": True}):
        answer = served.post(PATH, {"input": "x", **more}, status=400)
        check("ErrorResponse", answer)
        assert answer["error"]["code"] == "context_length_exceeded"
    assert served.post(PATH, {"input": "x", "model": "unknown"}, status=404)["error"]["code"] == "model_not_found"


def test_a_failure_in_the_middle_is_an_http_error_without_a_stream() -> None:
    served = client(Script([[event("Hel")]], error=ApiError(500, "the engine died")))
    assert served.post(PATH, {"input": "x"}, status=500)["error"]["message"] == "the engine died"
    assert all(generation.closed for generation in served.generates.generations)
