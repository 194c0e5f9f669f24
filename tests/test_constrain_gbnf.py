"""GBNF whose rules refer to themselves: with lexemes as long as they can be it says what it says letter by letter."""

from __future__ import annotations

import random

import llguidance
import numpy as np
import pytest

from nanovllm_cli.constrain.gbnf import grammars_of_gbnf
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import byte_vocabulary
from nanovllm_cli.errors import RequestError

VOCABULARY = byte_vocabulary()


def allowed_bytes(inner: llguidance.LLMatcher) -> list[int] | None:
    """None where llguidance gives up: some of these grammars can be read in too many ways."""
    try:
        words = Matcher(inner, VOCABULARY).allowed_mask()
    except RequestError:
        return None
    found = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return [int(i) for i in found if i < VOCABULARY.end_id]


class Recursive:
    """A random grammar whose rules refer to each other and to themselves."""

    PARTS = (
        '"a"', '"b"', '"("', '")"', '","', '":"', '"ab"', '"aab"', '""', "[ab]", "([ab]+)", '"cc"', "[bc]", "[^a-z(),:]",
        "[0-9]", "([0-9]+)", '("-"? [0-9]{1,3})', '"é"', "[é-ü]", '("\\"" [^"]* "\\"")', '" "', "([ \\n]*)", '"true"', "([a-z]+)",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = ["root", *(f"r{i}" for i in range(self.rng.randint(1, 4)))]
        self.text = "".join(f"{name} ::= {self._ways(2)}\n" for name in self.names)

    def _ways(self, depth: int) -> str:
        return " | ".join(self._sequence(depth) for _ in range(self.rng.choice([1, 1, 2, 2, 3])))

    def _sequence(self, depth: int) -> str:
        repeats = [""] * 8 + ["*", "+", "?", "{2}", "{1,3}", "{0,1}", "{2,}"]
        return " ".join(self._part(depth) + self.rng.choice(repeats) for _ in range(self.rng.randrange(1, 5)))

    def _part(self, depth: int) -> str:
        kind = self.rng.randrange(9 if depth else 6)
        if kind < 4:
            return self.rng.choice(self.PARTS)
        return self.rng.choice(self.names) if kind < 6 else f"({self._ways(depth - 1)})"


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_longer_lexemes_allow_letter_by_letter_what_single_ones_do(first: int) -> None:
    """At every place of walks through random grammars the same bytes may come; single letters are checked above."""
    steps = 0
    for seed in range(first, first + 10):
        texts = grammars_of_gbnf(Recursive(seed).text)
        if len(texts) == 1 or not texts[0].startswith("%llguidance"):
            continue
        rng = random.Random(seed)
        pair = [llguidance.LLMatcher(VOCABULARY.tokenizer, text, log_level=0) for text in texts]
        for _ in range(40):
            if any(each.is_error() or each.is_stopped() for each in pair):
                break
            allowed, other = (allowed_bytes(each) for each in pair)
            if not allowed or other is None:
                break
            assert allowed == other, Recursive(seed).text
            assert pair[0].is_accepting() == pair[1].is_accepting()
            token_id = rng.choice([i for i in allowed if chr(i) in 'ab(),:"0- '] or allowed)
            for each in pair:
                each.consume_token(token_id)
            steps += 1
    assert steps > 20


@pytest.mark.parametrize(
    ("text", "lexemes"),
    [
        # the end of a name, of a number, and of a string is seen by the letter behind it
        ('root ::= x\nx ::= [a-z]+ | [0-9]{2,3} | "(" x ("," x)* ")"', ["(?:[a-z]){1,}", "(?:[0-9]){2,3}"]),
        ('root ::= "[" v ("," v)* "]"\nv ::= s | root\n'
         's ::= "\\"" ([^"\\\\] | "\\\\" .)* "\\"" " "?', ["\\x{22}(?:(?:[^", "(?:\\x{20}){0,1}"]),
        # a space behind a word may be the word's own, or what the line ends with
        ('root ::= x " \\n" | "(" root ")"\nx ::= w | "[" x "]"\nw ::= [a-z]+ [ ]*', ["/(?:[a-z]){1,}/"]),
        # "true" is a name, too; whichever goes on is right
        ('root ::= t x | n y\nx ::= "1" | "(" x ")"\ny ::= "2" | "[" y "]"\nt ::= "true"\nn ::= [a-z]+',
         ["/(?:[a-z]){1,}/", "/true/"]),
    ],
)  # fmt: skip
def test_what_refers_to_nothing_is_one_lexeme_where_its_end_is_certain(text: str, lexemes: list[str]) -> None:
    lark, single = grammars_of_gbnf(text)
    for lexeme in lexemes:
        assert lexeme in lark
        assert lexeme not in single


@pytest.mark.parametrize(
    "text",
    [
        'root ::= [ab]* x\nx ::= "a" | "(" x ")"',  # which a is the last is seen behind it
        'root ::= [a-z]+ root | "b"',
        'root ::= [à-é]+ x\nx ::= "è" | "(" x ")"',
        'root ::= [à-é]+ x\nx ::= "ü" | "(" x ")"',  # the first of its bytes may be either's
        'root ::= x root | "1"\nx ::= "a" | "ab" | "abc" root | "bc"',  # three ways to read abc
    ],
)
def test_lexemes_whose_end_is_not_certain_are_single_letters(text: str) -> None:
    assert len(grammars_of_gbnf(text)) == 1


def test_what_comes_behind_either_of_two_lexemes_that_were_both_read() -> None:
    """A text that begins with "ax" may be in t1 or in t2; "xyz" of the one must not take the letters of the other."""
    texts = grammars_of_gbnf("""
        root ::= "a" t1 | [ab] t2
        t1 ::= "xyz" | "(" t1 ")"
        t2 ::= "x" t3 | "[" t2 "]"
        t3 ::= "yw" | "{" t3 "}"
        """)
    assert len(texts) == 2
    for text in texts:
        for said in ("axyz", "axyw", "bxyw", "ax{yw}", "a[xyw]"):
            matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, text, log_level=0)
            assert matcher.try_consume_tokens(list(said.encode())) == len(said), said
            assert matcher.is_accepting()


def test_looking_for_lexemes_is_bounded() -> None:
    """Grammars that are too much for it are read letter by letter."""
    wide = "root ::= " + " | ".join(f'"{i:x}" root "x{i}" [a-z]+' for i in range(3000))
    many = "root ::= r0\n" + "".join(f'r{i} ::= "(" r{i + 1} [a-z]+ ")" r{i % 7}\n' for i in range(2000)) + "r2000 ::= root"
    for text, num_texts in ((wide, 1), (many, 2)):
        assert len(grammars_of_gbnf(text)) == num_texts
