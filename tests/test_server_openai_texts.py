"""/v1/completions, /infill, /v1/embeddings and /v1/rerank against OpenAI's description, over scripted answers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from typing import Any

import pytest

pytest.importorskip("fastapi")

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import openai_spec
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.samplers import ORDER
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import logprobs
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.fim import fill_in_the_middle
from nanovllm_cli.server.ports import Reading
from nanovllm_cli.text.answer_format import model_format
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.vocabulary import TokenizerParts
from server_fakes import FakeGenerates, FakeModels, FakePool, Script, event
from server_requests import Answer, Door

IDS = byte_tokenizer()


def ask(script: Any = None, fakes: FakeModels | None = None, path: str = "/v1/completions", **fields: Any) -> Any:
    generates = FakeGenerates(script, fakes)
    body = {"prompt": "Once", **fields} if path == "/v1/completions" else fields
    return Door(generates).post(path, body), generates


def chunks_of(answer: Answer, *, echo: bool = False) -> list[dict[str, Any]]:
    """Of a stream. Each choice ends once, in its last chunk."""
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = answer.events()
    for chunk in chunks:
        openai_spec.check_text(chunk, chunk=True, echo=echo)
    reasons: dict[int, list[str | None]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert all(each.count(None) == len(each) - 1 and each[-1] is not None for each in reasons.values())
    return chunks


def choices_of(answer: Answer, *, echo: bool = False) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    openai_spec.check_text(answer.json, echo=echo)
    choices: list[dict[str, Any]] = answer.json["choices"]
    return choices


def refused(param: str, **fields: Any) -> dict[str, Any]:
    answer, generates = ask(**fields)
    assert answer.status == 400, answer.text
    openai_spec.check("ErrorResponse", answer.json)
    assert answer.json["error"]["param"].startswith(param)
    assert generates.asked == []
    error: dict[str, Any] = answer.json["error"]
    return error


def with_tokens(*added: str) -> Tokenizer:
    """Bytes, and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    return Tokenizer(TokenizerParts(backend))


def entries(text: str) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -0.5, 1, ((i, -0.5), (0, -3.0))) for i in IDS.encode(text)]


# ---- completions ----


def test_tags_that_a_text_shows_are_among_its_tokens() -> None:
    """Special tokens, too: what a stop string cut off is found by where in the text tokens begin."""
    tokenizer = with_tokens("[THINK]", "[/THINK]", "<end>")
    fakes = FakeModels(tokenizer=tokenizer, format=model_format(tokenizer, ChatTemplate("[THINK]")))
    ids = tokenizer.encode("[THINK]a[/THINK]b<end>STOP")
    text = "[THINK]a[/THINK]b"
    steps = [[event(text, logprobs=[TokenLogprobs(i, -1.0, 1, ()) for i in ids], finish="stop", stop_reason="STOP")]]
    for stream in (False, True):
        answer, _ = ask(Script(steps), fakes, logprobs=0, stop=["STOP"], stream=stream)
        [told] = [c["logprobs"] for a in (chunks_of(answer) if stream else [answer.json]) for c in a["choices"] if c["logprobs"]]
        assert told["tokens"] == ["[THINK]", "a", "[/THINK]", "b"]
        assert told["text_offset"] == [0, 7, 8, 16]


def test_a_text_goes_on() -> None:
    answer, generates = ask(Script.of(" upon", " a", cached_tokens=2))
    [choice] = choices_of(answer)
    ended = {"finish_reason": "stop", "stop_reason": None, "completion_tokens": 7}
    assert choice == {"index": 0, "text": " upon a", "logprobs": None, **ended}
    assert answer.json["object"] == "text_completion"
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert generates.asked[0].prompt == "Once"
    assert generates.asked[0].params.max_tokens is None


@pytest.mark.parametrize(("prompt", "asked"), [([79, 80], [[79, 80]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])])
def test_a_prompt_is_a_text_or_ids_or_several(prompt: Any, asked: Any) -> None:
    answer, generates = ask(Script.of("x"), prompt=prompt)
    assert len(choices_of(answer)) == len(asked)
    assert [one.prompt for one in generates.asked] == asked


def test_the_choices_of_several_prompts_are_counted_through() -> None:
    def script(asked: Any) -> Script:
        return Script([[event(f"{asked.prompt}{i}", index=i, finish="stop") for i in (0, 1)]])

    answer, generates = ask(script, prompt=["a", "b"], n=2)
    assert [(c["index"], c["text"]) for c in choices_of(answer)] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert answer.json["usage"]["prompt_tokens"] == 2
    assert all(generation.closed for generation in generates.generations)
    streamed, _ = ask(script, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = chunks_of(streamed)
    told = sorted((chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks)
    assert told == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)


def test_a_failure_of_one_prompt_ends_them_all() -> None:
    def script(asked: Any) -> Script:
        return Script([[event("x")]], error=ApiError(503, "died") if asked.prompt == "b" else None)

    answer, generates = ask(script, prompt=["a", "b"])
    assert answer.status == 503
    assert all(generation.closed for generation in generates.generations)
    streamed, generates = ask(script, prompt=["a", "b"], stream=True)
    assert streamed.events(errors=True)[-1]["error"]["message"] == "died"
    assert all(generation.closed for generation in generates.generations)


def test_a_stream_of_text() -> None:
    answer, _ = ask(Script.of(" upon", " a"), stream=True)
    chunks = chunks_of(answer)
    assert [c["choices"][0]["text"] for c in chunks] == [" upon", " a"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_logprobs_in_the_old_form() -> None:
    script = Script([[event("ab", logprobs=entries("ab"))], [event("ü", logprobs=entries("ü"), finish="length")]])
    answer, generates = ask(script, logprobs=1)
    [choice] = choices_of(answer)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 2]  # both bytes of ü stand at 2
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    assert generates.asked[0].params.logprobs == 1
    streamed = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks_of(ask(script, logprobs=1, stream=True)[0])]
    assert streamed == [[0, 1], [2, 2]]


def test_an_echo_stands_before_the_answer() -> None:
    answer, _ = ask(Script.of(" upon"), echo=True)
    assert choices_of(answer)[0]["text"] == "Once upon"
    chunks = chunks_of(ask(Script.of(" upon"), echo=True, stream=True)[0])
    assert [c["choices"][0]["text"] for c in chunks] == ["Once", " upon"]
    assert choices_of(ask(Script.of("!"), echo=True, prompt=IDS.encode("Hé"))[0])[0]["text"] == "Hé!"


def test_log_probabilities_of_a_streamed_echo_hold_up_nobody_and_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long prompt take a tenth of a second, and each of several answers shows them: not on the event loop."""
    raw, on_loop = logprobs._raw, []

    def watched(value: Any) -> Any:
        on_loop.append(asyncio._get_running_loop() is not None)
        return raw(value)

    monkeypatch.setattr(logprobs, "_raw", watched)
    given = [None, *(TokenLogprobs(token_id, -0.25, 2, ((104, -0.125),)) for token_id in b"nce")]
    script = Script([[event("!", index=index, finish="length") for index in range(2)]], prompt_logprobs=given)
    chunks = chunks_of(ask(script, echo=True, logprobs=1, n=2, stream=True)[0], echo=True)
    firsts = {choice["index"]: choice for chunk in reversed(chunks) for choice in chunk["choices"]}
    assert {index: first["logprobs"]["tokens"] for index, first in firsts.items()} == {0: [*"Once"], 1: [*"Once"]}
    assert on_loop == [False] * 3


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {}], ids=["asked for", "the server's default"])
def test_an_echo_has_its_logprobs_too(asked: dict[str, Any]) -> None:
    prompt, fakes = [None, *entries("nce")], FakeModels(default_params=SamplingParams(logprobs=None if asked else 1))
    script = Script([[event(" u", logprobs=entries(" u"), finish="length")]], prompt_logprobs=prompt)
    answer, generates = ask(script, fakes, echo=True, **asked)
    logprobs = choices_of(answer, echo=True)[0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Once u"
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 5]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert generates.asked[0].params.prompt_logprobs == 1
    chunks = chunks_of(ask(script, fakes, echo=True, stream=True, **asked)[0], echo=True)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1, 2, 3], [4, 5]]


def test_offsets_count_what_was_drawn_where_a_stop_string_holds_half_a_token_back() -> None:
    models = FakeModels(tokenizer=with_tokens("abc"))
    drawn = [TokenLogprobs(256, -0.5, 1, ()), *entries("d")]
    steps = [[event("ab", token_ids=[256], logprobs=drawn[:1])], [event("cd", logprobs=drawn[1:], finish="length")]]
    asked: dict[str, Any] = {"logprobs": 0, "skip_special_tokens": False, "stop": ["cX"]}
    [choice] = choices_of(ask(Script(steps), models, **asked)[0])
    chunks = chunks_of(ask(Script(steps), models, stream=True, **asked)[0])
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert (choice["logprobs"]["text_offset"], offsets) == ([0, 3], [[0], [3]])


def test_a_text_can_be_scored_without_an_answer() -> None:
    script = Script([[event("x", logprobs=entries("x"), finish="length")]], prompt_logprobs=[None, *entries("nce")])
    answer, generates = ask(script, echo=True, logprobs=0, max_tokens=0)
    [choice] = choices_of(answer, echo=True)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Once", ["O", "n", "c", "e"])
    assert answer.json["usage"]["completion_tokens"] == 0
    assert generates.asked[0].params.max_tokens == 1
    assert refused("max_tokens", max_tokens=0)["code"] == "invalid_value"


def test_the_token_that_nobody_asked_for_does_not_end_a_scored_text() -> None:
    """One is drawn all the same; it may be the end of the text, or one to stop at."""
    script = Script([[event("", token_ids=[7], finish="stop", stop_reason=7)]], prompt_logprobs=[None, *entries("nce")])
    [choice] = choices_of(ask(script, echo=True, max_tokens=0)[0])
    last = chunks_of(ask(script, echo=True, max_tokens=0, stream=True)[0])[-1]["choices"][0]
    for each in (choice, last):
        assert (each["finish_reason"], each["stop_reason"], each["completion_tokens"]) == ("length", None, 0)


def test_the_best_of_several_is_the_likeliest_a_token() -> None:
    def drawn(index: int, text: str, logprob: float) -> Any:
        found = [TokenLogprobs(i, logprob, 1, ()) for i in IDS.encode(text)]
        return event(text, index=index, logprobs=found, finish="length")

    answer, generates = ask(Script([[drawn(0, "a", -1.0), drawn(1, "bbbb", -0.5), drawn(2, "c", -0.6)]]), best_of=3, n=2)
    assert [choice["text"] for choice in choices_of(answer)] == ["bbbb", "c"]
    assert all(choice["logprobs"] is None for choice in choices_of(answer))
    assert generates.asked[0].params.n == 3
    refused("best_of", best_of=2, n=3)
    refused("best_of", best_of=2, fakes=FakeModels(default_params=SamplingParams(n=3)))
    refused("best_of", best_of=2, stream=True)


def test_prompt_logprobs_stand_in_their_choice() -> None:
    answer, _ = ask(Script.of("x", prompt_logprobs=[None, *entries("nce")]), prompt_logprobs=0)
    assert len(choices_of(answer)[0]["prompt_logprobs"]) == 4


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": [1.5]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [2**31]}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": ["x"] * 513}),
        ("prompt_embeds", {"prompt_embeds": "x"}),
        ("logprobs", {"logprobs": 101}),
        ("logprobs", {"logprobs": True}),
        ("best_of", {"best_of": 129}),
        ("echo", {"echo": "yes"}),
        ("n", {"prompt": ["a"] * 512, "n": 9}),
        ("n", {"prompt": ["a"] * 512, "best_of": 9}),
        ("suffix", {"suffix": 5}),
        ("stream_options", {"stream_options": {}}),
        ("response_format", {"response_format": {"type": "xml"}}),
    ],
)
def test_nonsense_is_refused(param: str, fields: dict[str, Any]) -> None:
    refused(param, **fields)


# ---- ids ----


def test_token_ids_and_numbers_of_tokens_are_told_of_each_text() -> None:
    prompt_ids = IDS.encode("Once")
    script = Script([[event("ab"), event("c", index=1)], [event("d", finish="stop"), event("", index=1, finish="stop")]])
    whole, _ = ask(script, n=2, return_token_ids=True)
    told = [(each["token_ids"], each["prompt_token_ids"], each["completion_tokens"]) for each in choices_of(whole)]
    assert told == [(list(b"abd"), prompt_ids, 3), (list(b"c"), prompt_ids, 1)]
    streamed = chunks_of(ask(script, n=2, return_token_ids=True, stream=True)[0])
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    assert [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each] == [prompt_ids] * 2
    assert [each for choice in choices for each in choice["token_ids"] if choice["index"] == 0] == list(b"abd")
    assert [each["completion_tokens"] for each in choices if each["finish_reason"]] == [3, 1]


# ---- filling in ----


def test_a_suffix_needs_tokens_for_it() -> None:
    error = refused("suffix", suffix="end")
    assert error["code"] == "unsupported"


def test_a_suffix_becomes_the_models_own_prompt() -> None:
    tokenizer = with_tokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    ids = [tokenizer.token_to_id(name) for name in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")]
    answer, generates = ask(Script.of("x"), FakeModels(tokenizer=tokenizer), prompt="ab", suffix="<|fim_middle|>")
    choices_of(answer)
    suffix = list(IDS.encode("<|fim_middle|>"))
    assert generates.asked[0].prompt == [ids[0], *IDS.encode("ab"), ids[1], *suffix, ids[2]]
    answer, generates = ask(Script.of("x"), FakeModels(tokenizer=tokenizer), prompt=[5, 6], suffix="c")
    assert generates.asked[0].prompt == [ids[0], 5, 6, ids[1], *IDS.encode("c"), ids[2]]


def test_families_that_put_the_suffix_first() -> None:
    tokenizer = with_tokens("[PREFIX]", "[SUFFIX]")
    prefix, suffix = tokenizer.token_to_id("[PREFIX]"), tokenizer.token_to_id("[SUFFIX]")
    assert fill_in_the_middle(tokenizer, "a", "b") == [suffix, *IDS.encode("b"), prefix, *IDS.encode("a")]


def test_infill_is_what_llama_server_answers() -> None:
    tokenizer = with_tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
    pre, suf, mid, sep = (tokenizer.token_to_id(n) for n in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"))
    fakes = FakeModels(tokenizer=tokenizer)
    fields = {
        "input_prefix": "a",
        "input_suffix": "b",
        "prompt": "c",
        "input_extra": [{"filename": "f.py", "text": "x=1"}],
        "n_predict": 7,
        "samplers": ["top_k", "infill"],
        "temperature": 0.5,
    }
    answer, generates = ask(Script.of("mid", "dle"), fakes, "/infill", return_tokens=True, **fields)
    assert answer.status == 200, answer.text
    extra = [sep, *IDS.encode("f.py\nx=1"), sep]
    assert generates.asked[0].prompt == [*extra, pre, *IDS.encode("a"), suf, *IDS.encode("b"), mid, *IDS.encode("c")]
    assert (generates.asked[0].params.max_tokens, generates.asked[0].params.samplers) == (7, ("top_k",))
    body = answer.json
    assert body["generation_settings"]["samplers"] == ["top_k"]
    assert (body["content"], body["stop"], body["stop_type"], body["tokens_predicted"]) == ("middle", True, "eos", 6)
    assert body["tokens"] == list(b"middle")
    streamed, _ = ask(Script.of("mid", "dle"), fakes, "/infill", stream=True, **fields)
    pieces = [json.loads(frame.removeprefix("data: ")) for frame in streamed.text.removesuffix("\n\n").split("\n\n")]
    assert [(piece["content"], piece["stop"]) for piece in pieces] == [("mid", False), ("dle", False), ("", True)]


def test_a_stream_tells_how_far_the_prompt_is_read() -> None:
    script = Script([[], *Script.of("mid", "dle").steps], cached_tokens=1, reading=Reading(2, 0.5))
    expected = {"total": 4, "cache": 1, "processed": 2, "time_ms": 500.0}
    answer, generates = ask(script, prompt="Once", stream=True, return_progress=True)
    assert generates.asked[0].tells_reading
    chunks = chunks_of(answer)
    assert [chunk.get("prompt_progress") for chunk in chunks] == [expected, *[None] * (len(chunks) - 1)]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "middle"
    native, _ = ask(script, path="/completion", prompt=["Once", "Once"], stream=True, return_progress=True)
    pieces = native_pieces(native)
    told = {piece["index"]: piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece}
    assert told == {0: expected, 1: expected}
    assert all(piece["content"] == "" for piece in pieces if "prompt_progress" in piece)
    assert "".join(piece["content"] for piece in pieces if piece["index"] == 1) == "middle"
    assert not ask(script, path="/completion", prompt="Once", return_progress=True)[1].asked[0].tells_reading
    refused("return_progress", prompt="Once", stream=True, return_progress=True, echo=True)


def test_timings_are_those_of_one_prompt() -> None:
    answer, _ = ask(Script.of("mid", "dle"), prompt="a")
    assert (answer.json["timings"]["predicted_n"], answer.json["timings"]["predicted_per_second"]) == (6, 3.0)
    assert "timings" not in ask(Script.of("mid", "dle"), prompt=["a", "b"])[0].json
    assert "timings" not in ask(Script.of("x"), prompt="a", echo=True, max_tokens=0)[0].json
    native, _ = ask(Script.of("mid", "dle"), path="/completion", prompt="a")
    assert native.json["timings"] == answer.json["timings"]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_completion_is_what_llama_server_answers(path: str) -> None:
    script = Script([[event("mid")], [event("dle", finish="stop", stop_reason="END")]])
    answer, generates = ask(script, path=path, prompt="Once", n_predict=7, stop=["END"], cache_prompt=True, return_tokens=True)
    assert answer.status == 200, answer.text
    asked = generates.asked[0]
    assert (asked.prompt, asked.params.max_tokens, asked.params.stop) == ("Once", 7, ("END",))
    body = answer.json
    assert (body["content"], body["stop"], body["stop_type"], body["stopping_word"]) == ("middle", True, "word", "END")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens"]) == (6, 4, list(b"middle"))
    streamed, generates = ask(Script.of("mid", "dle"), path=path, prompt=[79, 110], stream=True, max_tokens=-1)
    pieces = [json.loads(frame.removeprefix("data: ")) for frame in streamed.text.removesuffix("\n\n").split("\n\n")]
    assert [(piece["content"], piece["stop"]) for piece in pieces] == [("mid", False), ("dle", False), ("", True)]
    assert (generates.asked[0].prompt, generates.asked[0].params.max_tokens) == ([79, 110], None)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {}), ("prompt", {"prompt": []}), ("prompt", {"prompt": {"a": "b"}}),
        ("prompt", {"prompt": [[]]}), ("prompt", {"prompt": ["a", -1]}), ("prompt", {"prompt": ["a", ["b", {}]]}),
        ("multimodal_data", {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}), ("prompt", {"prompt": ["a"] * 513}),
        ("prompt", {"prompt": [1, "how " * 200_000]}), ("prompt", {"prompt": [*[7] * 40_000, "b"]}),
        ("n_cmpl", {"prompt": ["a"] * 512, "n_cmpl": 9}), ("n_cmpl", {"prompt": "a", "n_cmpl": 0}),
        ("min_keep", {"prompt": "a", "min_keep": 3}),
        ("n_predict", {"prompt": "a", "n_predict": -2}), ("n_probs", {"prompt": "a", "n_probs": -1}),
        ("lora", {"prompt": "a", "lora": [{"id": 0}]}), ("samplers", {"prompt": "a", "samplers": ["top_k", "infill"]}),
        ("image_data", {"prompt": "a", "image_data": [{"data": "", "id": 1}]}),
        ("samplers", {"prompt": "a", "samplers": "pqt"}),
        ("post_sampling_probs", {"prompt": "a", "n_probs": 2, "post_sampling_probs": True}),
        ("response_fields", {"prompt": "a", "response_fields": "content"}),
    ],
)  # fmt: skip
def test_completion_refuses(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/completion", **fields)


def echoing(asked: Any) -> Script:
    return Script.of("about ", str(asked.prompt))


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["a", [7, 8], {"prompt_string": "c"}, [7, "d"]], ["a", [7, 8], "c", [7, *IDS.encode("d", add_special_tokens=False)]]),
        ({"prompt_string": "c"}, ["c"]),
        ([7, "d", 8], [[7, *IDS.encode("d", add_special_tokens=False), 8]]),
        (["d", 8], [[*IDS.encode("d"), 8]]),
    ],
)
def test_several_prompts_are_answered_by_a_list(prompt: Any, asked: Any) -> None:
    """As llama-server's README has them; ids and texts in one list are one prompt."""
    answer, generates = ask(echoing, path="/completion", prompt=prompt)
    assert [each.prompt for each in generates.asked] == asked
    bodies = answer.json if len(asked) > 1 else [answer.json]
    assert [(body["index"], body["content"]) for body in bodies] == [(i, f"about {each}") for i, each in enumerate(asked)]
    pieces = native_pieces(ask(echoing, path="/completion", prompt=prompt, stream=True)[0])
    for index, each in enumerate(asked):
        own = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["content"] for piece in own) == f"about {each}"
        assert [piece["stop"] for piece in own] == [False] * (len(own) - 1) + [True]


def test_several_answers_to_several_prompts() -> None:
    both = [event("x", index=0), event("yy", index=1)]
    ends = [event(index=1, finish="length"), event("z", index=0, finish="stop")]
    for name in ("n_cmpl", "n"):
        answer, generates = ask(Script([both, ends]), path="/completion", prompt=["a", "b"], **{name: 2})
        assert [each.params.n for each in generates.asked] == [2, 2]
        found = [(each["index"], each["content"], each["tokens_predicted"], each["stop_type"]) for each in answer.json]
        assert found == [(0, "xz", 2, "eos"), (1, "yy", 2, "limit"), (2, "xz", 2, "eos"), (3, "yy", 2, "limit")]


def test_one_that_fails_of_several_prompts_is_the_requests_failure() -> None:
    def script(asked: Any) -> Script:
        return Script.of("x") if asked.prompt == "a" else Script([[event("y")]], error=ApiError(503, "gone"))

    answer, generates = ask(script, path="/completion", prompt=["a", "b"])
    assert (answer.status, [each.closed for each in generates.generations]) == (503, [True, True])


def test_an_answer_says_what_it_was_asked() -> None:
    fields = ["prompt", "generation_settings/n_predict", "generation_settings/n_ctx", "generation_settings/temperature"]
    answer, _ = ask(path="/completion", prompt="Once", n_predict=7, temperature=0.5, response_fields=fields)
    assert answer.json == dict(zip(fields, ["Once", 7, 4096, 0.5], strict=True))
    told = ask(path="/completion", prompt="a", repeat_penalty=1.5, repeat_last_n=9, n_probs=2)[0].json["generation_settings"]
    assert (told["repeat_penalty"], told["repeat_last_n"], told["n_probs"], told["samplers"]) == (1.5, 9, 2, list(ORDER))
    streamed = native_pieces(ask(path="/completion", prompt="Once", stream=True)[0])
    assert ["prompt" in piece for piece in streamed] == [False, False, True]
    assert streamed[-1]["generation_settings"]["n_predict"] == -1
    assert ask(path="/completion", prompt="a", n_predict=0)[0].json["generation_settings"]["n_predict"] == 0


def native_pieces(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.text
    return [json.loads(frame.removeprefix("data: ")) for frame in answer.text.removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_no_tokens_are_a_prompt_in_the_cache(path: str, stream: bool) -> None:
    """What llama.vim sends before there is anything to complete. One token is drawn, and is nobody's."""
    tokenizer = with_tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    script = Script([[event("m", finish="stop", stop_reason="m")]])
    fields = {"prompt": "Once", "stream": stream, "return_tokens": True, "n_probs": 1}
    answer, generates = ask(script, FakeModels(tokenizer=tokenizer), path, n_predict=0, **fields)
    (body,) = native_pieces(answer)
    assert (body["content"], body["tokens"], body["tokens_predicted"], body["stop_type"]) == ("", [], 0, "limit")
    assert (body["stop"], body["stopping_word"], body["completion_probabilities"]) == (True, "", [])
    assert body["tokens_evaluated"] >= 4
    assert (body["timings"]["predicted_n"], body["timings"]["predicted_ms"]) == (0, 0)
    assert generates.asked[0].params.max_tokens == 1


def test_probabilities_are_llama_servers() -> None:
    drawn = [TokenLogprobs(39, -0.5, 1, ((39, -0.5), (40, -1.0), (41, -2.0))), TokenLogprobs(72, -math.inf, 9, ((39, -0.1),))]
    steps = [[event("H", logprobs=drawn[:1])], [event("i", logprobs=drawn[1:])], [event(finish="length")]]
    answer, generates = ask(Script(steps), path="/completion", prompt="a", n_probs=2)
    assert generates.asked[0].params.logprobs == 2
    found = answer.json["completion_probabilities"]
    assert found == [
        {
            "id": 39, "token": "H", "bytes": [72], "logprob": -0.5,
            "top_logprobs": [
                {"id": 39, "token": "H", "bytes": [72], "logprob": -0.5}, {"id": 40, "token": "I", "bytes": [73], "logprob": -1.0}
            ],
        },
        {
            "id": 72, "token": "i", "bytes": [105], "logprob": -9999.0,
            "top_logprobs": [{"id": 39, "token": "H", "bytes": [72], "logprob": -0.1}],
        },
    ]  # fmt: skip
    pieces = native_pieces(ask(Script(steps), path="/completion", prompt="a", n_probs=2, stream=True)[0])
    assert [entry for piece in pieces for entry in piece["completion_probabilities"]] == found
    given = FakeModels(default_params=SamplingParams(logprobs=2))
    assert "completion_probabilities" not in ask(Script(steps), given, "/completion", prompt="a", n_probs=0)[0].json
    assert ask(Script(steps), path="/completion", prompt="a", logprobs=2)[0].json["completion_probabilities"] == found


def test_a_stream_of_pieces_has_every_token() -> None:
    """Also of those that only began a character."""
    half, rest = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    script = Script([[event(token_ids=half)], [event("\u00e9", token_ids=rest)], [event(token_ids=[7], finish="stop")]])
    pieces = native_pieces(ask(script, path="/completion", prompt="a", stream=True)[0])
    assert [(piece["content"], piece["tokens"]) for piece in pieces] == [("\u00e9", [195, 169]), ("", [7])]


@pytest.mark.parametrize("stream", [False, True])
def test_of_an_answer_the_fields_that_are_wanted(stream: bool) -> None:
    fields = ["content", "timings/predicted_n", "timings/nothing", "content/x", "nothing", "", "stop"]
    answer, _ = ask(Script.of("mid", "dle"), path="/completion", prompt="a", stream=stream, response_fields=fields)
    last = native_pieces(answer)[-1]
    assert last == {"content": "" if stream else "middle", "timings/predicted_n": 6, "stop": True}
    assert native_pieces(ask(path="/completion", prompt="a", response_fields=[""])[0]) == [{}]


def test_infill_ends_at_its_time_limit_once_a_line_is_whole() -> None:
    tokenizer = with_tokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    script = Script([[event("a")], [event("b\n")], *[[event("c")] for _ in range(5_000)]])
    answer, generates = ask(script, FakeModels(tokenizer=tokenizer), "/infill", t_max_predict_ms=1)
    assert answer.json["stop_type"] == "limit"
    assert answer.json["content"].startswith("ab\n")
    assert not generates.generations[0].finished
    assert generates.generations[0].closed


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_a_line_that_is_not_indented_enough(stream: bool) -> None:
    """As llama-server has it: the first line is the prompt's, and blanks of the last one stay."""
    pieces = ["if a:\n  ", "  b\n\t", "\tc\n", " ", " d\n    e"]
    script = Script([*([event(piece)] for piece in pieces), [event("f", finish="stop")]])
    for indent, content in ((0, "".join(pieces) + "f"), (2, "".join(pieces) + "f"), (3, "if a:\n    b\n"), (9, "if a:\n    ")):
        answer, generates = ask(script, path="/completion", prompt="a", n_indent=indent, stream=stream)
        told = native_pieces(answer)
        text = "".join(piece["content"] for piece in told)
        assert text == (content if indent != 3 else content + "\t\t")
        assert told[-1]["stop_type"] == ("eos" if indent < 3 else "limit")
        assert generates.generations[0].was_cut
    assert ask(Script.of("a\n\n  b"), path="/completion", prompt="a", n_indent=1)[0].json["content"] == "a\n"


@pytest.mark.parametrize("joined", [1, 4, 50])
def test_where_indentation_ends_an_answer_the_tokens_behind_it_do_not_count(joined: int) -> None:
    drawn = "if a:\n  b\nc = 1\n"
    parts = [drawn[start : start + joined] for start in range(0, len(drawn), joined)]
    steps = [[event(part, token_ids=IDS.encode(part), logprobs=entries(part))] for part in parts]
    told = ask(Script(steps), path="/completion", prompt="a", n_indent=1, n_probs=1, return_tokens=True)[0].json
    assert (told["content"], told["tokens_predicted"]) == ("if a:\n  b\n", 10)
    assert len(told["tokens"]) == len(told["completion_probabilities"]) == 10


def test_who_is_late_is_closed_while_others_go_on() -> None:
    generates = FakeGenerates()

    class Waiting(list[Any]):
        """Steps of one that goes on until the first is closed, or for long."""

        def __iter__(self) -> Any:
            yield from ([event("x")] for _ in range(20_000) if not generates.generations[0].closed)
            yield [event(finish="stop" if generates.generations[0].closed else "length")]

    late = [[event("a\n")], *[[event("c")] for _ in range(30_000)]]
    generates.script = lambda asked: Script(late if asked.prompt == "late" else Waiting())
    answer = Door(generates).post("/completion", {"prompt": ["late", "b"], "t_max_predict_ms": 1})
    assert [each["stop_type"] for each in answer.json] == ["limit", "eos"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [("n", {"n": 0}), ("n_predict", {"n_predict": -2}), ("input_extra", {"input_extra": ["x"]})],
)
def test_infill_refuses(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/infill", **fields)


NORMS = {
    None: [0.6, 0.8, 0.0, 0.0], 2: [0.6, 0.8, 0.0, 0.0], -1: [1.2, 1.6, 0.0, 0.0], 1: [3 / 7, 4 / 7, 0.0, 0.0],
    0: [24570.0, 32760.0, 0.0, 0.0], 3: [3 / 91 ** (1 / 3), 4 / 91 ** (1 / 3), 0.0, 0.0],
}  # fmt: skip


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("norm", NORMS)
def test_embeddings_as_llama_server_has_them(path: str, norm: int | None) -> None:
    """Norms by hand, of (3, 4): its 3-norm is the third root of 27 + 64."""
    answer, _ = ask(path=path, content=["a", "x"], embd_normalize=norm)
    first, second = answer.json
    assert (first["index"], second["index"]) == (0, 1)
    assert first["embedding"] == [pytest.approx(NORMS[norm])]
    assert len(second["embedding"]) == 1
    assert ask(path=path, input="a", embd_normalize=norm)[0].json == [first]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("content", {}), ("input", {"content": "a", "input": "b"}), ("content", {"content": ""}), ("input", {"input": []}),
        ("embd_normalize", {"input": "a", "embd_normalize": -2}), ("input", {"input": ["a", [1]]}),
    ],
)  # fmt: skip
def test_embeddings_refuse(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/embeddings", **fields)


def test_infill_needs_tokens_for_it() -> None:
    answer, _ = ask(path="/infill", input_prefix="a")
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported")


# ---- embeddings ----


def embed(**fields: Any) -> Answer:
    answer: Answer = ask(path="/v1/embeddings", **fields)[0]
    return answer


@pytest.mark.parametrize(("given", "count"), [("abc", 1), ([1, 2, 3], 1), (["abc", "xyz"], 2), ([[1], [2, 3]], 2)])
def test_each_text_has_a_vector(given: Any, count: int) -> None:
    answer = embed(input=given, model="fake")
    assert answer.status == 200, answer.text
    openai_spec.check("CreateEmbeddingResponse", answer.json)
    assert [entry["index"] for entry in answer.json["data"]] == list(range(count))
    assert answer.json["data"][0]["embedding"] == [0.6, 0.8, 0.0, 0.0]
    assert answer.json["usage"]["prompt_tokens"] == answer.json["usage"]["total_tokens"] > 0


def test_vectors_can_come_as_base64() -> None:
    data = embed(input="abc", encoding_format="base64").json["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(data)) == pytest.approx((0.6, 0.8, 0, 0))


def test_fewer_dimensions_are_of_length_one_again() -> None:
    assert embed(input="abc", dimensions=1).json["data"][0]["embedding"] == [1.0]
    two = embed(input="abc", dimensions=2).json["data"][0]["embedding"]
    assert math.hypot(*two) == pytest.approx(1.0)
    assert embed(input="abc", dimensions=5).json["error"]["param"] == "dimensions"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": ""}), ("input", {"input": []}), ("input", {"input": ["a", ""]}), ("input", {"input": [[]]}),
        ("input", {"input": None}), ("input", {}), ("input", {"input": ["a"] * 2049}), ("input", {"input": [1, "a"]}),
        ("dimensions", {"input": "a", "dimensions": 0}), ("encoding_format", {"input": "a", "encoding_format": "int8"}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": "all"}),
        ("embed_dtype", {"input": "a", "embed_dtype": "int8"}),
        ("pooling", {"input": "a", "pooling": "max"}), ("normalize", {"input": "a", "normalize": False}),
        ("embd_normalize", {"input": "a", "embd_normalize": -1}), ("use_activation", {"input": "a", "use_activation": False}),
        ("truncation_side", {"input": "a", "truncation_side": "left"}),
    ],
)  # fmt: skip
def test_embeddings_that_make_no_sense_are_refused(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/v1/embeddings", **fields)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_nearness(path: str) -> None:
    answer, _ = ask(path=path, query="a", documents=["x1", {"text": "b"}, "x2"], top_n=2)
    assert answer.status == 200, answer.text
    first, second = answer.json["results"]
    assert (first["index"], first["document"]) == (1, {"text": "b"})
    assert first["relevance_score"] == pytest.approx(1.0)
    assert (second["index"], second["relevance_score"]) == (0, pytest.approx(0.8))
    assert "document" not in ask(path=path, query="a", documents=["b"], return_documents=False)[0].json["results"][0]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_texts_are_scored_in_pairs_or_beside_one(path: str) -> None:
    def scores(one: Any, two: Any) -> list[float]:
        answer, _ = ask(path=path, text_1=one, text_2=two)
        assert answer.status == 200, answer.text
        data = answer.json["data"]
        assert [(each["index"], each["object"]) for each in data] == [(i, "score") for i in range(len(data))]
        return [each["score"] for each in data]

    ranked = ask(path="/v1/rerank", query="a", documents=["x1", "b", "x2"])[0].json["results"]
    of_documents = [each["relevance_score"] for each in sorted(ranked, key=lambda each: each["index"])]
    assert scores("a", ["x1", "b", "x2"]) == scores(["a"], ["x1", "b", "x2"]) == of_documents
    assert scores(["a", "x1"], ["b", "x1"]) == [of_documents[1], pytest.approx(1.0)]
    assert scores("a", "x1") == of_documents[:1]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("text_1", {"text_1": ["a", "b"], "text_2": "a"}), ("text_1", {"text_1": ["a", "b"], "text_2": ["a"] * 3}),
        ("text_1", {"text_1": "", "text_2": "a"}), ("text_2", {"text_1": "a", "text_2": []}), ("text_2", {"text_1": "a"}),
        ("text_2", {"text_1": "a", "text_2": [1]}), ("text_2", {"text_1": "a", "text_2": ["a"] * 2049}),
        ("truncate_prompt_tokens", {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 0.5}),
        ("max_tokens_per_query", {"text_1": "a", "text_2": "a", "max_tokens_per_query": 9}),
        ("instruction", {"text_1": "a", "text_2": "a", "instruction": "nearest"}),
        ("use_activation", {"text_1": "a", "text_2": "a", "use_activation": False}),
    ],
)  # fmt: skip
def test_pairs_that_make_no_sense_are_refused(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/v1/score", **fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("query", {"query": "", "documents": ["a"]}),
        ("documents", {"query": "a", "documents": []}),
        ("documents", {"query": "a", "documents": [""]}),
        ("documents", {"query": "a", "documents": [{"title": "x"}]}),
        ("top_n", {"query": "a", "documents": ["a"], "top_n": 0}),
        ("max_tokens_per_doc", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}),
        ("instruction", {"query": "a", "documents": ["a"], "instruction": "nearest"}),
    ],
)
def test_ranking_that_makes_no_sense_is_refused(param: str, fields: dict[str, Any]) -> None:
    refused(param, path="/v1/rerank", **fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/embeddings", {"input": "a"}), ("/embeddings", {"content": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]}),
     ("/v1/score", {"text_1": "a", "text_2": "b"})],
)  # fmt: skip
def test_a_model_pools_as_it_does_unless_a_request_says_otherwise(path: str, fields: dict[str, Any]) -> None:
    assert ask(path=path, **fields)[1].poolings == ["mean"]
    assert ask(fakes=FakeModels(pooling="last"), path=path, **fields)[1].poolings == ["last"]
    assert ask(fakes=FakeModels(pooling="last"), path=path, pooling="cls", **fields)[1].poolings == ["cls"]


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})]
)
def test_texts_have_a_priority_too(path: str, fields: dict[str, Any]) -> None:
    assert ask(path=path, priority=-3, **fields)[1].priorities == [-3]
    assert ask(path=path, **fields)[1].priorities == [0]
    refused("priority", path=path, priority=2**31 + 1, **fields)


def test_no_route_knows_a_model_that_is_not_here() -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/infill", {}),
    ):
        answer = Door(FakeGenerates(), FakePool()).post(path, {"model": "gpt-9", **body})
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found"), path


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/embeddings", {"content": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/api/embed", {"model": "fake", "input": "a"}),
        ("/api/embeddings", {"model": "fake", "prompt": "a"}),
    ],
)
def test_who_asks_for_vectors_is_handed_on(path: str, fields: dict[str, Any]) -> None:
    """A span belongs to its caller's trace, and has the request's id."""
    answer, generates = ask(path=path, **fields)
    assert answer.status == 200, answer.text
    assert [caller.request_id for caller in generates.callers] == [answer.headers["x-request-id"]]
