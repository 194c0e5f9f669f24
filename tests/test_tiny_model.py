"""The bundled model in its folder, run by transformers, an engine that is not ours."""

import json
import math
import re
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tiny_corpus as corpus
import tiny_tools as tools
from tiny_export import CHAT_TEMPLATE

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[1] / "src" / "nanovllm_cli" / "assets" / "tiny"
FOLDER_BYTES_MAX = 12_000_000
PERPLEXITY_DOCUMENTS = 60
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompt: str, max_tokens: int = 120) -> str:
    """Greedy continuation, special tokens included; fails when it does not end."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    greedy = transformers.GenerationConfig.from_pretrained(FOLDER, do_sample=False, max_new_tokens=max_tokens)
    greedy.temperature = greedy.top_k = greedy.top_p = None
    new = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)[0, ids.shape[1] :]
    assert new[-1].item() in greedy.eos_token_id, f"did not end: {tokenizer.decode(new)}"
    text: str = tokenizer.decode(new[:-1])
    return text


def ask(
    model: Any, tokenizer: Any, *messages: str | dict[str, Any], tools: list[Any] | None = None, thinking: bool = False
) -> str:
    """The answer to a chat; plain strings alternate between the user and the assistant."""
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": m} if isinstance(m, str) else m for i, m in enumerate(messages)]
    prompt = tokenizer.apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return complete(model, tokenizer, prompt, max_tokens=300)


def calls_in(answer: str) -> list[dict[str, Any]]:
    return [json.loads(body) for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", answer, re.S)]


def held_out_documents(count: int) -> list[corpus.Document]:
    return list(islice(corpus.documents("held_out", seed=1), count))


def test_the_folder_is_small_and_complete() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors", "README.md",
    }  # fmt: skip
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= FOLDER_BYTES_MAX


def test_it_is_a_qwen3_with_tied_embeddings(model: Any) -> None:
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim == 64
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 6e6


def test_the_template_in_both_places_is_the_one_of_the_scripts() -> None:
    template = (FOLDER / "chat_template.jinja").read_text()
    assert template == CHAT_TEMPLATE.read_text()
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"] == template


def test_the_template_renders_what_the_corpus_trains_on(tokenizer: Any) -> None:
    seen = 0
    for document in held_out_documents(150):
        if not document.messages:
            continue
        messages = [dict(message) for message in document.messages]
        for message in messages:
            if not document.thinking and message["role"] == "assistant":
                message["reasoning_content"] = ""
        listed = list(document.tools) or None
        assert tokenizer.apply_chat_template(messages, tools=listed, tokenize=False) == document.text
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tools=listed, tokenize=False, add_generation_prompt=True, enable_thinking=document.thinking
        )
        assert document.text.startswith(prompt)
        seen += 1
    assert seen > 80


def test_segments_encode_like_the_whole_text(tokenizer: Any) -> None:
    for document in held_out_documents(60):
        parts = [i for s in document.segments for i in tokenizer(s.text, add_special_tokens=False).input_ids]
        assert parts == tokenizer(document.text, add_special_tokens=False).input_ids
        assert tokenizer.decode(parts) == document.text


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Grüße, 世界! 🙂\tx = [1, 23]\n\n  done…"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@torch.no_grad()
def test_held_out_perplexity_is_near_the_cards(model: Any, tokenizer: Any) -> None:
    card = (FOLDER / "README.md").read_text()
    stated = float(re.findall(r"^\| answers[^|]*\| ([0-9.]+) \|$", card, re.M)[0])
    total, count = 0.0, 0
    for document in held_out_documents(PERPLEXITY_DOCUMENTS):
        ids: list[int] = []
        counted: list[bool] = []
        for segment in document.segments:
            part = tokenizer(segment.text, add_special_tokens=False).input_ids
            ids += part
            answer = segment.weight == corpus.ANSWER_WEIGHT
            counted += [answer and not (segment.skip_first and i == 0) for i in range(len(part))]
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total += losses[torch.tensor(counted[1:])].sum().item()
        count += sum(counted[1:])
    assert math.exp(total / count) == pytest.approx(stated, rel=0.15)


def test_a_story_ends_and_is_made_of_known_words(model: Any, tokenizer: Any) -> None:
    story = "Once upon a time" + complete(model, tokenizer, "Once upon a time", max_tokens=400)
    known = {word for document in islice(corpus.documents("train", 1), 2000) for word in _words(document.text)}
    assert set(_words(story)) <= known
    assert len(_words(story)) > 40
    assert story.rstrip()[-1] in '.!"'


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_it_answers_a_chat(model: Any, tokenizer: Any) -> None:
    assert "Tiny" in ask(model, tokenizer, "What is your name?")
    assert ask(model, tokenizer, "Hello!").startswith("Hello")
    assert "Paris" in ask(model, tokenizer, "What is the capital of France?")
    assert re.fullmatch(r"2 \+ 2 = \d+\.?", ask(model, tokenizer, "What is 2 + 2?"))  # the form; its sums are a guess


def test_a_follow_up_refers_to_the_turn_before(model: Any, tokenizer: Any) -> None:
    first = ask(model, tokenizer, "What sound does a cow make?")
    assert "moo" in first
    assert "farm" in ask(model, tokenizer, "What sound does a cow make?", first, "And where does it live?")
    greeting = ask(model, tokenizer, "My name is Lily.")
    assert "Lily" in ask(model, tokenizer, "My name is Lily.", greeting, "What is my name?")


def test_it_thinks_when_asked_and_only_then(model: Any, tokenizer: Any) -> None:
    for question in ("What is 3 + 4?", "Hello", "Name three animals.", "What is the capital of Japan?"):
        thought = re.fullmatch(r"<think>\n.+\n</think>\n\n(.+)", ask(model, tokenizer, question, thinking=True), re.S)
        assert thought, question
        assert "think" not in ask(model, tokenizer, question)


def test_it_calls_the_tool_it_was_given(model: Any, tokenizer: Any) -> None:
    for thinking in (False, True):
        answer = ask(model, tokenizer, "What is the weather in Paris?", tools=[WEATHER], thinking=thinking)
        assert calls_in(answer) == [{"name": "get_weather", "arguments": {"city": "Paris"}}]


def test_it_calls_most_tools_whose_names_it_never_saw(model: Any, tokenizer: Any) -> None:
    right = 0
    for i in range(12):
        r = Random(f"unseen {i}")
        request = tools.held_out(r)
        answer = ask(model, tokenizer, request.user, tools=tools.toolbox(r, request, most=2))
        right += calls_in(answer) == [{"name": request.name, "arguments": request.call}]
    assert right >= 8


def test_it_answers_from_the_tools_response(model: Any, tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    answer = ask(
        model, tokenizer, "What is the weather in Paris?",
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"temperature": 21, "condition": "sunny"}'},
        tools=[WEATHER],
    )  # fmt: skip
    assert "sunny" in answer
    assert "21" in answer
    assert not calls_in(answer)


def test_it_calls_no_tool_when_none_fits(model: Any, tokenizer: Any) -> None:
    assert not calls_in(ask(model, tokenizer, "What is the weather in Paris?"))
    assert "<tool_call>" not in ask(model, tokenizer, "What is your name?", tools=[WEATHER])


def test_it_writes_json_objects(model: Any, tokenizer: Any) -> None:
    answer = ask(model, tokenizer, "Write a JSON object with the keys name, age and city.")
    assert set(json.loads(answer)) == {"name", "age", "city"}
    answer = ask(model, tokenizer, "Turn this into JSON: name Tom, age 7")
    assert json.loads(answer) == {"name": "Tom", "age": 7}


def test_it_writes_code_in_a_block(model: Any, tokenizer: Any) -> None:
    answer = ask(model, tokenizer, "Write a Python function that adds two numbers.")
    (block,) = re.findall(r"```python\n(.*?)\n```", answer, re.S)
    compile(block, "answer", "exec")
