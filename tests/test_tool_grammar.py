"""Grammars of tool calls, followed by llguidance itself over a real vocabulary and over bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.text.answer_format import AnswerFormat, answer_format
from nanovllm_cli.text.tool_calls import Tool, tools_of
from tool_answers import ONE

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")

VOCABULARY = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers" / "qwen2.tokenizer.json"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return tools_of([{"type": "function", "function": function}])[0]


TOOLS = (tool("weather", PLACE), tool("now"))
STRICT = (tool("weather", PLACE, strict=True), tool("now"))


class Bytes:
    """A vocabulary of bytes and some special tokens behind them."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        names = [b"<end>", *(name.encode() for name in special)]
        self.tokens = [bytes([i]) for i in range(256)] + names
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.ids = {name: 257 + i for i, name in enumerate(special)}

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """Special tokens as such."""
        ids: list[int] = []
        while text:
            name = next((name for name in self.ids if text.startswith(name)), None)
            ids += [self.ids[name]] if name else list(text[0].encode())
            text = text[len(name) if name else 1 :]
        return ids


def follows(grammar: str, tokenizer: Any, ids: list[int]) -> bool:
    """Whether a whole answer of these ids is allowed."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def allows(known: AnswerFormat, answer: str, choice: str = "required", tools: Any = TOOLS, **options: Any) -> bool:
    """Over bytes, once with the tags as special tokens and once as text; both agree."""
    given = []
    tags = HARMONY_TAGS if known.name == "harmony" else tuple(tag for tag in known.tools.tags if tag[-1] in ">]")
    for special in ((), tags):
        vocabulary = Bytes(special)
        form = AnswerFormat(known.reasoning, known.tools, vocabulary.ids)
        constraint = form.constraint(tools, choice, **options)
        assert constraint is not None
        assert constraint.kind == "lark"
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        given.append(follows(constraint.text, tokenizer, vocabulary.encode(answer)))
    assert given[0] == given[1]
    return given[0]


HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")


def known(name: str, reasoning: str = "none") -> AnswerFormat:
    return answer_format("", tools=name, reasoning=reasoning)


@pytest.mark.parametrize("name", ONE)
def test_a_demanded_call_is_allowed_and_others_are_not(name: str) -> None:
    call = ONE[name]
    assert allows(known(name), call)
    assert allows(known(name), call, "weather")
    assert not allows(known(name), call, "now")
    assert not allows(known(name), call.replace("weather", "whether"))
    assert not allows(known(name), call.replace("3", "few"))
    assert not allows(known(name), call.replace("days", "weeks"))
    assert not allows(known(name), "It is raining.")
    assert not allows(known(name), "")


@pytest.mark.parametrize("name", ONE)
def test_free_choice_holds_only_strict_tools(name: str) -> None:
    call = ONE[name]
    assert known(name).constraint(TOOLS, "auto") is None
    assert known(name).constraint(TOOLS, "none") is None
    free = "<|channel|>final<|message|>It is raining {a} [b]." if name == "harmony" else "It is raining {a} [b]."
    assert allows(known(name), free, "auto", STRICT)
    assert allows(known(name), call, "auto", STRICT)
    assert not allows(known(name), call.replace("weather", "whether"), "auto", STRICT)
    assert not allows(known(name), call.replace("3", "few"), "auto", STRICT)
