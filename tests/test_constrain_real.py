"""Schemas and grammars that people wrote: real tokens, what the mask accepts and refuses, and what it lets through."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.constrain.grammar import compiled
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TINY = Path(__file__).resolve().parents[1] / "src" / "nanovllm_cli" / "assets" / "tiny"
SCHEMAS = DATA / "schemas" / "maskbench_sample.jsonl"
EVERY = 9  # of the schemas; benchmarks/constraints.py takes all

needs_schemas = pytest.mark.skipif(not SCHEMAS.exists(), reason="needs the schemas of jsonschemabench")
needs_grammars = pytest.mark.skipif(not (DATA / "grammars").exists(), reason="needs llama.cpp's grammars")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    tokens = [tokenizer.id_to_bytes(i) for i in range(tokenizer.vocab_size)]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    return Vocabulary(tokens, tokenizer.control_ids, encode)


def guide(vocabulary: Vocabulary, constraint: Constraint, stop_ids: tuple[int, ...]) -> Guide:
    return Guide(vocabulary, Matcher(compiled(constraint, vocabulary).deep_copy(), vocabulary), None, stop_ids)


def accepts(followed: Guide, ids: list[int], stop_id: int) -> bool:
    for token_id in ids:
        words = None if followed.is_complete else followed.allowed_mask()
        if words is None or not words[token_id >> 5] >> np.uint32(token_id & 31) & 1:
            return False
        followed.accept(token_id)
    if followed.is_complete:
        return True
    words = followed.allowed_mask()
    assert words is not None
    return followed.is_complete or bool(words[stop_id >> 5] >> np.uint32(stop_id & 31) & 1)


def sample(followed: Guide, rng: random.Random, tokens: Vocabulary, stop_id: int, most: int = 250) -> bytes | None:
    """What a model with random logits would say; None where it does not end. Closing brackets come oftener, so that more do."""
    text = b""
    for _ in range(most):
        words = None if followed.is_complete else followed.allowed_mask()
        if words is None or followed.is_complete:
            return text
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if stop_id in allowed:
            return text
        closing = [i for i in allowed if tokens.tokens[i][:1] in b'"}],:']
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        followed.accept(token_id)
        text += tokens.tokens[token_id]
    return None


def rows() -> list[dict[str, Any]]:
    with SCHEMAS.open() as file:
        return [json.loads(line) for number, line in enumerate(file) if number % EVERY == 0]


@needs_schemas
def test_schemas_accept_and_refuse_what_llguidance_alone_does(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Against its matcher, which takes whole tokens without a mask and without our bound on white space."""
    stop_id = tokenizer.eos_ids[0]
    ours: list[bool] = []
    theirs: list[bool] = []
    num_compiled = 0
    for row in rows():
        text = json.dumps(row["schema"])
        own = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
        try:
            compiled(Constraint("json_schema", text), vocabulary)
        except UsageError:
            assert own.is_error()
            continue
        num_compiled += 1
        for test in row["tests"]:
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)
            ours.append(accepts(guide(vocabulary, Constraint("json_schema", text), (stop_id,)), ids, stop_id) == test["valid"])
            fresh = own.deep_copy()
            theirs.append((fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting()) == test["valid"])
    assert num_compiled > 18
    assert len(ours) > 40
    assert sum(ours) >= sum(theirs)


@needs_schemas
def test_what_schemas_let_through_is_valid(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    stop_id = tokenizer.eos_ids[0]
    num_ended = 0
    for number, row in enumerate(rows()):
        try:
            followed = guide(vocabulary, Constraint("json_schema", json.dumps(row["schema"])), (stop_id,))
        except UsageError:
            continue
        text = sample(followed, random.Random(number), vocabulary, stop_id)
        if text is not None:
            num_ended += 1
            validator = jsonschema.validators.validator_for(row["schema"])(row["schema"])
            validator.validate(json.loads(text))
    assert num_ended > 9


GRAMMARS: dict[str, tuple[list[str], list[str]]] = {
    "arithmetic": (["1=1\n", "1+2=3\n4=4\n", "x_1 *(2 -( y))=z\n\n"], ["1=1", "=1\n", "1=+\n", "", "1+ 2=3\n", "1=x +y\n"]),
    "c": (
        ["", "int main(){return  0;}", "float f(int a){for(i = 0; i<3; i = i+1){x = f(a, 2);}}", "int f(){//x\n/* a*b */}"],
        ["int main()", "int main(){", "double f(){}", "int 1f(){}", "int f(){/* **/}"],
    ),
    "chess": (["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O bxa8=Q+\n9. a1 b2#\n"], ["1. e4 e5\n", "1. e9 e5\n2. a1 a1\n", "e4"]),
    "english": (["Hello, world!", "a\nb\tc"], ["", " a", "a  b", "é", "a "]),
    "japanese": (["ひらがな カタカナ", "漢字。"], ["", "abc", "ひ ", "ひ  ら"]),
    "json": (
        ['{"a": [1, 2.5e+1, -0, "\\u00e9\\n"], "b": {"c": null}}', "{}", '{"a":true}', '{ "a":\n\t{}}'],
        ["[]", '{"a":01}', '{"a":1,}', '{"a":"\n"}', '{"a":tru}', "{}}", '{"a":1'],
    ),
    "json_arr": (["[\n1,\n2]", '[\n{"a": [1]}]'], ["[1]", "[\n1, 2]", "{}", "[\n1] "]),
    "list": (["- a\n", "- one\n- two é\n"], ["", "- \n", "- a", "a\n", "- a\u2028\n"]),
}


@needs_grammars
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_of_llama_cpp(name: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Both lists were made by reading the grammar."""
    text = (DATA / "grammars" / f"{name}.gbnf").read_text()
    stop_id = tokenizer.eos_ids[0]
    good, bad = GRAMMARS[name]
    for answer in (*good, *bad):
        ids = tokenizer.encode(answer, add_special_tokens=False)
        assert accepts(guide(vocabulary, Constraint("gbnf", text), (stop_id,)), ids, stop_id) == (answer in good), answer
    for seed in range(3):
        said = sample(guide(vocabulary, Constraint("gbnf", text), (stop_id,)), random.Random(seed), vocabulary, stop_id, 60)
        if said is not None and name in ("json", "json_arr"):
            json.loads(said)


@needs_grammars
def test_every_grammar_is_in_the_list() -> None:
    assert {path.stem for path in (DATA / "grammars").glob("*.gbnf")} == set(GRAMMARS)


READINGS: list[tuple[str, Callable[[str], bool]]] = [
    ('root ::= [a-z]* "b"', lambda text: text.endswith("b")),
    ('root ::= ("a" | "ab") ("c" | "bc")', lambda text: text in ("ac", "abc", "abbc")),
    ('root ::= "" | "a" root "b"', lambda text: text == "a" * (len(text) // 2) + "b" * (len(text) // 2)),
    ('root ::= x{2,3} "b"? # end\nx ::= "a"', lambda text: text in ("aa", "aaa", "aab", "aaab")),
    ("root ::= [^a-b\\x63]{2}", lambda text: len(text) == 2 and not set(text) & set("abc")),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "matches"), READINGS)
def test_gbnf_reads_a_text_in_every_way(
    grammar: str, matches: Callable[[str], bool], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    stop_id = tokenizer.eos_ids[0]
    rng = random.Random(0)
    texts = {"".join(rng.choices("abc", k=rng.randrange(7))) for _ in range(60)} | {"aabb", "abbc", "xy", "é\n"}
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert accepts(guide(vocabulary, Constraint("gbnf", grammar), (stop_id,)), ids, stop_id) == matches(text), text


def test_the_bundled_model_says_what_its_schema_says() -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    with LLM("tiny") as llm:
        params = SamplingParams(constraint=Constraint("json_schema", json.dumps(schema)), n=8, seed=0, max_tokens=300)
        for answer in llm.chat([{"role": "user", "content": "Describe an animal."}], params)[0].outputs:
            jsonschema.validate(json.loads(answer.text), schema)
