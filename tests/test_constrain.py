"""Constraints by themselves: what may be drawn, token by token, against re, json, jsonschema and grammars read by hand."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm_cli.constrain.grammar import compiled, grammars_of
from nanovllm_cli.constrain.guide import MAX_ROLLBACK, Guide
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary, byte_vocabulary
from nanovllm_cli.constraint import Constraint, ReasoningPhase
from nanovllm_cli.errors import RequestError, UnmeetableError, UsageError
from nanovllm_cli.kernels.cpu_sampling import has_bit

WORDS = [b"{\"", b"\":", b" \"", b"true", b"</", b"think", b">{", b"<thi", b"nk>", b"ab", "é".encode(), b"\xe2\x82", b"yes"]
THINK, END_THINK, STOP, OTHER_STOP, NOTHING = range(256 + len(WORDS), 261 + len(WORDS))
TOKENS = [*(bytes([i]) for i in range(256)), *WORDS, b"<think>", b"</think>", b"<|stop|>", b"</s>", b""]
SPECIAL = (STOP, OTHER_STOP)
STOP_IDS = (STOP, OTHER_STOP)


def longest_first(text: str) -> list[int]:
    """A tokenizer that takes the longest token."""
    data, ids = text.encode(), []
    by_length = sorted((i for i, token in enumerate(TOKENS) if token and i not in SPECIAL), key=lambda i: -len(TOKENS[i]))
    while data:
        ids.append(next(i for i in by_length if data.startswith(TOKENS[i])))
        data = data[len(TOKENS[ids[-1]]) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, SPECIAL, longest_first)


def guide(kind: str | None, text: str = "", reasoning: ReasoningPhase | None = None) -> Guide:
    matcher = None
    if kind is not None:
        matcher = Matcher(compiled(Constraint(kind, text), VOCABULARY).deep_copy(), VOCABULARY)  # type: ignore[arg-type]
    return Guide(VOCABULARY, matcher, reasoning, STOP_IDS)


def ids_of(words: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def accepts(followed: Guide, text: str) -> bool:
    """Whether this answer, token by token, is allowed and may end there."""
    for token_id in longest_first(text):
        if followed.is_complete or token_id not in ids_of(followed.allowed_mask()):
            return False
        followed.accept(token_id)
    return followed.is_complete or STOP in ids_of(followed.allowed_mask()) or followed.is_complete


def sample(followed: Guide, pick: Callable[[list[int]], int], most: int = 400) -> bytes | None:
    """Any tokens that are allowed, until the end; None where it does not come."""
    text = b""
    for _ in range(most):
        if followed.is_complete:
            return text
        words = followed.allowed_mask()
        if followed.is_complete:
            return text
        allowed = sorted(range(len(TOKENS)) if words is None else ids_of(words))
        token_id = pick(allowed)
        if token_id in STOP_IDS:
            return text
        followed.accept(token_id)
        text += TOKENS[token_id]
    return None


REGEXES = [
    r"abc", r"a|ab", r"(a|b)*abb", r"[a-c]{2,4}x?", r"\d{3}-\d{4}", r"yes|no", r"(yes)+|true", r"[^{}]*", r"é+", r"a?b?c?",
    r"\{\"[a-z]+\":(true|false)\}", r"(?i)yes", r"a.c", r"[/\\]x", r"^ab$", r"\w+\s\w+", "",
]  # fmt: skip
TEXTS = [
    "", "a", "ab", "abc", "abb", "aabb", "babb", "bca", "cabx", "555-1234", "5551-234", "yes", "no", "yesyes", "trueno", "true",
    "éé", "é", "e", "ac", '{"ab":true}', '{"ab":tru}', "YeS", "a\nc", "a/c", "/x", "\\x", "ab cd", "ab  cd", "{", "a}b",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_allows_what_re_matches_whole(regex: str) -> None:
    for text in TEXTS:
        assert accepts(guide("regex", regex), text) == (re.fullmatch(regex, text) is not None), text


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("regex", [each for each in REGEXES if "\\w" not in each])  # Unicode's \w has marks, re's has not
def test_what_a_regex_lets_through_matches(regex: str, seed: int) -> None:
    text = sample(guide("regex", regex), random.Random(seed).choice)
    if text is not None:
        assert re.fullmatch(regex, text.decode()) is not None


class Gbnf:
    """A random grammar, and what it says, as far as four letters: read off its parts while they are written."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rules: list[tuple[str, str, set[str]]] = []
        text, self.words = self._ways(3)
        self.text = f"root ::= {text}\n" + "".join(f"{name} ::= {text}\n" for name, text, _ in self.rules)

    def _ways(self, depth: int) -> tuple[str, set[str]]:
        parts = [self._sequence(depth) for _ in range(self.rng.choice([1, 1, 2, 3]))]
        return " | ".join(text for text, _ in parts), set().union(*(words for _, words in parts))

    def _sequence(self, depth: int) -> tuple[str, set[str]]:
        texts, words = [], {""}
        for _ in range(self.rng.randrange(4)):
            text, more = self._repeated(depth)
            texts.append(text)
            words = joined(words, more)
        return " ".join(texts) or '""', words

    def _repeated(self, depth: int) -> tuple[str, set[str]]:
        text, words = self._part(depth)
        often = [("*", 0, 5), ("+", 1, 5), ("?", 0, 1), ("{2}", 2, 2), ("{1,3}", 1, 3), ("{0,1}", 0, 1), ("{2,}", 2, 6)]
        sign, low, high = self.rng.choice([("", 1, 1)] * 4 + often)
        power, found = {""}, set()
        for times in range(high + 1):
            found |= power if times >= low else set()
            power = joined(power, words)
        return text + sign, found

    def _part(self, depth: int) -> tuple[str, set[str]]:
        kind = self.rng.randrange(6 if depth else 3)
        if kind < 3:
            letters = [("[ab]", {"a", "b"}), ("[^a]", {"b", "c"}), (".", {"a", "b", "c"}), ("[]", set())]
            return self.rng.choice([('"a"', {"a"}), ('"ab"', {"ab"}), ('""', {""}), *letters])
        if kind < 5 or len(self.rules) > 3:
            text, words = self._ways(depth - 1)
            return f"({text})", words
        if not self.rules or self.rng.random() < 0.6:
            text, words = self._ways(depth - 1)
            self.rules.append((f"r-{len(self.rules)}", text, words))
        name, _, words = self.rng.choice(self.rules)
        return name, words


def joined(first: set[str], second: set[str]) -> set[str]:
    return {a + b for a in first for b in second if len(a + b) <= 4}


@pytest.mark.parametrize("seed", range(40))
def test_gbnf_allows_what_it_says_as_an_expression_and_letter_by_letter(seed: int) -> None:
    grammar = Gbnf(seed)
    texts = grammars_of(Constraint("gbnf", grammar.text))
    assert len(texts) == 2
    every = ["".join(letters) for count in range(5) for letters in itertools.product("abc", repeat=count)]
    for text in texts:
        base = llguidance.LLMatcher(VOCABULARY.tokenizer, text, log_level=0)
        if base.is_error():
            assert not grammar.words
            continue
        found = set()
        for word in every:
            matcher = base.deep_copy()
            if matcher.try_consume_tokens(list(word.encode())) == len(word) and matcher.is_accepting():
                found.add(word)
        assert found == grammar.words, grammar.text


def test_rules_that_refer_to_themselves_or_grow_too_large_are_read_letter_by_letter() -> None:
    doubled = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(12))
    deep = "".join(f"r{i} ::= r{i + 1}\n" for i in range(300))
    for text, count in [
        ('root ::= "" | "a" root "b"', 1),
        ('root ::= x\nx ::= "(" y ")"\ny ::= x | "a"', 1),
        (f'root ::= r0\n{doubled}r12 ::= "a" | [b-d]', 1),
        (f'root ::= r0\n{deep}r300 ::= "a"', 1),
        ('root ::= x\nx ::= "a"{3,2000}\nunused ::= unused "b"', 2),
    ]:
        texts = grammars_of(Constraint("gbnf", text))
        assert len(texts) == count, text
        assert not llguidance.LLMatcher(VOCABULARY.tokenizer, texts[0], log_level=0).is_error()


def test_choices_are_taken_letter_by_letter() -> None:
    choices = ["yes", "yes and no", "a|b", "(", ".*", "é", ""]
    for text in [*choices, "ye", "yes and", "a", "b", "x", "yesyes"]:
        assert accepts(guide("choice", json.dumps(choices)), text) == (text in choices), text
    drawn = {sample(guide("choice", json.dumps(choices)), random.Random(seed).choice) for seed in range(60)}
    assert drawn <= {choice.encode() for choice in choices}
    assert len(drawn) > 3


def test_json_objects() -> None:
    for text in ("{}", '{"a":1}', '{"a": [true, null, -1.5e3], "é": {"b": "\\n"}}', json.dumps({"a": {"b": [1]}}, indent=4)):
        assert accepts(guide("json_object"), text), text
    for text in ("", "[]", "1", "{", '{"a"}', "{'a': 1}", '{"a":1,}', '{"a":01}', '{"a":1}x', ' {"a":1}', '{"a":"\n"}'):
        assert not accepts(guide("json_object"), text), text


def test_white_space_in_json_is_bounded() -> None:
    assert accepts(guide("json_object"), "{\n" + " " * 40 + "}")
    assert not accepts(guide("json_object"), "{\n" + " " * 41 + "}")
    assert not accepts(guide("json_object"), "{\n\n}")
    assert not accepts(guide("json_object"), "{" + " " * 2 + "}")


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None, 3]}}, "required": ["a"]},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                           "required": ["next"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{2}$"}, "minItems": 1, "maxItems": 3},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 17},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"const": {"a": [1, "é"]}},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 1}]},
]  # fmt: skip
INSTANCES = [
    {"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": "y"}, {"a": "1"}, {"b": 3}, {}, {"next": None}, {"next": {"next": None}},
    {"next": 1}, ["ab"], ["ab", "cc", "ba"], [], ["ab"] * 4, ["abc"], -3, 16, 17, -4, 1.5, "ab", "abcd", "a", "éé", True, [None],
    [None, 1], {"a": [1, "é"]}, {"a": [1]}, None,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_a_schema_allows_what_jsonschema_does(schema: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for instance in INSTANCES:
        text = json.dumps(instance, ensure_ascii=False)
        assert accepts(guide("json_schema", json.dumps(schema)), text) == validator.is_valid(instance), text


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_what_a_schema_lets_through_is_valid(schema: dict[str, Any]) -> None:
    found = 0
    for seed in range(12):
        text = sample(guide("json_schema", json.dumps(schema)), random.Random(seed).choice)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            found += 1
    assert found >= 6


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("choice", '["yes", "yesterday", "ab{\\"x"]'),
        ("lark", 'start: "a" <|stop|> "b" | /[a-c]+/ "thinking" ";"+'),
        ("json_schema", '{"type": "object", "properties": {"think": {"enum": ["true", "yes"]}, "a": {"type": "integer"}}}'),
        *(("regex", each) for each in REGEXES),
    ],
)
def test_asking_for_one_token_says_what_the_mask_says(kind: str, text: str) -> None:
    """Where texts are forced, too: a mask has only the beginning that the tokenizer would take."""
    for seed in range(3):
        followed, rng = guide(kind, text), random.Random(seed)
        for _ in range(12):
            asked = {i for i in range(-1, len(TOKENS) + 9) if followed.allows(i)}
            allowed = ids_of(followed.copy().allowed_mask())
            if followed.is_complete or not followed.may_say:
                assert not asked
                break
            assert asked == allowed - {STOP, OTHER_STOP}
            if not asked:
                break
            followed.accept(rng.choice(sorted(asked)))


@example(0, 29)  # an answer longer than its opening
@given(st.integers(0, 2**32), st.integers(0, MAX_ROLLBACK))
@settings(max_examples=40, deadline=None)
def test_rolling_back_leaves_no_trace(seed: int, taken_back: int) -> None:
    """Through a tag that opens late, a forced end of reasoning, and an answer."""
    rng = random.Random(seed)
    phase = ReasoningPhase("<think>", "</think>", budget=rng.choice([0, 3, None]))
    followed = guide("regex", r"(<thing>|ab|\{)*yes", phase)
    states: list[tuple[Any, bool]] = []
    drawn: list[int] = []
    for _ in range(30):
        words = followed.allowed_mask()
        states.append((None if words is None else words.tobytes(), followed.is_complete))
        if followed.is_complete:
            break
        likely = [i for i in (STOP, THINK, END_THINK, *range(256, 266)) if words is None or i in ids_of(words)]
        token_id = rng.choice(likely or sorted(ids_of(words)))
        if token_id in STOP_IDS:
            break
        followed.accept(token_id)
        drawn.append(token_id)
    taken_back = min(taken_back, len(drawn))
    twin = followed.copy()
    followed.rollback(taken_back)
    for at in range(len(drawn) - taken_back, len(states)):
        words = followed.allowed_mask()
        assert (None if words is None else words.tobytes(), followed.is_complete) == states[at]
        if at < len(drawn):
            followed.accept(drawn[at])
    assert twin.is_complete == followed.is_complete


# ---- special tokens, ends, reasoning ----


def test_a_special_token_is_no_text() -> None:
    followed = guide("regex", r"<\|stop\|>|</s>x")
    assert not {STOP, OTHER_STOP, NOTHING} & ids_of(followed.allowed_mask())
    assert accepts(guide("regex", r"<\|stop\|>"), "<|stop|>")  # spelt in letters
    named = Guide(VOCABULARY, Matcher(compiled(Constraint("lark", 'start: "a" </s> "b"'), VOCABULARY), VOCABULARY), None, (STOP,))
    for expected in (ord("a"), OTHER_STOP, ord("b")):
        assert ids_of(named.allowed_mask()) == {expected}
        named.accept(expected)
    assert named.is_complete


def test_an_end_id_is_allowed_only_where_the_grammar_may_end() -> None:
    followed = guide("lark", 'start: "a" </s> "b" | "a" "c"')  # an end inside would cut the answer short
    followed.accept(ord("a"))
    assert ids_of(followed.allowed_mask()) == {ord("c")}
    followed = guide("regex", "ab*")
    assert not set(STOP_IDS) & ids_of(followed.allowed_mask())
    followed.accept(ord("a"))
    assert ids_of(followed.allowed_mask()) == {ord("b"), *STOP_IDS}
    followed.accept(STOP)
    assert not followed.is_complete


@pytest.mark.parametrize("regex", ["ab", "(ab|a)", ""])
def test_a_grammar_that_cannot_go_on_is_complete(regex: str) -> None:
    followed = guide("regex", regex)
    for token_id in longest_first("ab" if regex else ""):
        assert not followed.is_complete
        followed.accept(token_id)
    followed.allowed_mask()
    assert followed.is_complete


def test_nothing_is_constrained_inside_reasoning_but_the_end() -> None:
    followed = guide("choice", '["yes"]', ReasoningPhase("<think>", "</think>", starts_inside=True))
    for token_id in (*longest_first("well {<think>"), ord("<"), *longest_first("/thin")):
        words = followed.allowed_mask()
        assert words is not None
        assert ids_of(words) == set(range(len(TOKENS))) - set(STOP_IDS) - {NOTHING}
        followed.accept(token_id)
    followed.accept(END_THINK)
    assert ids_of(followed.allowed_mask()) == {TOKENS.index(b"yes")}  # what must come, comes as it is usually tokenized


def test_a_closing_tag_in_several_tokens_and_what_its_last_one_says_already() -> None:
    phase = ReasoningPhase("<think>", "</think>", starts_inside=True)
    followed = guide("json_object", "", phase)
    for token in (b"a", b"<", b"</", b"think", b">{"):
        followed.accept(TOKENS.index(token))
    assert ord('"') in ids_of(followed.allowed_mask())
    followed.accept(ord("}"))
    assert followed.is_complete
    refused = guide("choice", '["yes"]', phase)
    refused.accept(TOKENS.index(b"</"))
    refused.accept(TOKENS.index(b"think"))
    with pytest.raises(RequestError):
        refused.accept(TOKENS.index(b">{"))


def test_a_model_may_open_reasoning_itself_or_begin_its_answer() -> None:
    phase = ReasoningPhase("<think>", "</think>")
    both = guide("regex", "(<thing>|yes)", phase)
    begins = {ord("<"), TOKENS.index(b"<thi"), THINK}
    assert ids_of(both.allowed_mask()) == begins | {ord("y"), TOKENS.index(b"yes")}
    both.accept(TOKENS.index(b"<thi"))
    assert ids_of(both.allowed_mask()) == {ord("n"), TOKENS.index(b"nk>")}
    both.accept(ord("n"))
    assert ids_of(both.allowed_mask()) == {ord("g"), ord("k")}
    tag, answer = both.copy(), both
    answer.accept(ord("g"))
    assert ids_of(answer.allowed_mask()) == {ord(">")}
    answer.accept(ord(">"))
    assert answer.is_complete
    tag.accept(ord("k"))
    tag.accept(ord(">"))
    assert ord("{") in ids_of(tag.allowed_mask())
    tag.accept(END_THINK)
    assert ids_of(tag.allowed_mask()) == {ord("<"), TOKENS.index(b"<thi"), ord("y"), TOKENS.index(b"yes")}


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("constrained", [True, False])
def test_a_budget_closes_reasoning(budget: int, constrained: bool) -> None:
    phase = ReasoningPhase("<think>", "</think>", starts_inside=True, budget=budget)
    followed = guide("choice" if constrained else None, '["yes"]', phase)
    for _ in range(budget):
        assert (followed.allowed_mask() is None) == (not constrained)
        followed.accept(ord("x"))
    assert ids_of(followed.allowed_mask()) == {END_THINK}
    followed.accept(END_THINK)
    if constrained:
        assert accepts(followed, "yes")
    else:
        assert followed.allowed_mask() is None


def test_ids_behind_the_vocabulary_are_reasoning_without_text() -> None:
    """Embeddings are padded: where nothing is constrained but the budget, a model may draw such an id."""
    vocabulary = byte_vocabulary()
    guide = Guide(vocabulary, None, ReasoningPhase("<t>", "</t>", starts_inside=True, budget=2))
    for token_id in (vocabulary.end_id, vocabulary.end_id + 40, *b"</t>"):
        mask = guide.allowed_mask()
        assert mask is None or has_bit(mask, token_id)
        guide.accept(token_id)
    assert guide.allowed_mask() is None


def test_a_budget_finishes_a_tag_that_has_begun() -> None:
    phase = ReasoningPhase("<thought>", "</thought>", starts_inside=True, budget=2)
    followed = guide("choice", '["yes"]', phase)
    followed.accept(ord("x"))
    followed.accept(TOKENS.index(b"</"))
    for char in "thought>":
        assert ids_of(followed.allowed_mask()) == {ord(char)}
        followed.accept(ord(char))
    assert accepts(followed, "yes")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[]", "is an object"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "format": "planet"}', "planet"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
        ("json_schema", '{"$ref": "#"}', "nothing can match"),
        ("json_schema", "false", "is an object"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', ""),
        ("json_schema", '{"minimum": NaN}', "NaN"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a{2,1}", "repetition"),
        ("choice", "yes", "not JSON"),
        ("choice", "[]", "at least one"),
        ("choice", "[1]", "strings"),
        ("lark", "start: x", "x"),
        ("lark", 'start: <nobody> "a"', "unknown special token"),
        ("lark", "start: a\na: a", "nothing can match"),
        ("lark", "", ""),
        ("gbnf", "x ::= x", "root"),
        ("gbnf", "root ::= y", "'y'"),
        ("gbnf", 'root ::= "a', "not closed"),
        ("gbnf", "root ::= [a", "not closed"),
        ("gbnf", "root ::= (a", "not closed"),
        ("gbnf", 'root ::= "a"{3,2}', "repetitions"),
        ("gbnf", 'root ::= "a"\nroot ::= "b"', "second"),
        ("gbnf", 'root ::= "\\q"', "escape"),
        ("gbnf", "root ::= [z-a]", "backwards"),
        ("gbnf", "root = a", "line 1"),
        ("regex", "a\ud800", "surrogate"),
        ("json_schema", r'{"const": "\ud800"}', "surrogate"),
        ("json_schema", r'{"properties": {"\udc00": {}}}', "surrogate"),
        ("choice", r'["a", "\ud800"]', "surrogate"),
        ("json_schema", '{"enum": [1e400]}', "1e400"),
        ("regex", "(a?){500}a{500}", "too large"),
        ("regex", "a\\\\\\", "escape"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(kind: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        compiled(Constraint(kind, text), VOCABULARY)  # type: ignore[arg-type]
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_more_members_than_can_be_followed_are_the_askers_fault() -> None:
    member = {"type": "string", "pattern": "a+"}
    each = [{"properties": {f"{letter}{i}": member for i in range(500)}} for letter in "pqrstuvwxyzab"]
    with pytest.raises(UnmeetableError, match="too many ways"):
        accepts(guide("json_schema", json.dumps({"anyOf": each}, separators=(",", ":"))), '{"p1": "a"}')


def test_kinds_and_sizes_are_checked_before_anything_else() -> None:
    for make in (
        lambda: Constraint("yaml"),  # type: ignore[arg-type]
        lambda: Constraint("regex", "a" * (1 << 20)),
        lambda: Constraint("regex", 3),  # type: ignore[arg-type]
        lambda: ReasoningPhase("", "</think>"),
        lambda: ReasoningPhase("<think>", "x" * 65),
        lambda: ReasoningPhase("<think>", "</think>", budget=-1),
        lambda: ReasoningPhase("<think>", "</think>", budget=True),
    ):
        with pytest.raises(UsageError):
            make()
