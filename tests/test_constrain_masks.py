"""Masks of a step on several threads: the same as one by one, whatever was started before."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from nanovllm_cli.constrain import masks, matcher
from nanovllm_cli.constrain.compiler import Compiler
from nanovllm_cli.constrain.grammar import compiled
from nanovllm_cli.constrain.guide import Guide
from nanovllm_cli.constrain.masks import MaskThreads
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.vocabulary import Vocabulary, byte_vocabulary
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import RequestError, UnmeetableError
from nanovllm_cli.sampling_params import SamplingParams

EXPRESSIONS = ["[a-m]{2,9}", "(ab|cd)+x", "[^q]*", "forced text", "[0-9]+(\\.[0-9]+)?"]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(lambda: byte_vocabulary(["<|stop|>"]))


def guides_of(compiler: Compiler, count: int) -> dict[int, Guide]:
    found = {}
    for seq_id in range(count):
        params = SamplingParams(constraint=Constraint("regex", EXPRESSIONS[seq_id % len(EXPRESSIONS)]))
        guide = compiler.guide(params, (256,))
        assert guide is not None
        found[seq_id] = guide
    return found


def check(threads: MaskThreads, guides: dict[int, Guide]) -> None:
    for seq_id, guide in guides.items():
        expected, words = guide.copy().allowed_mask(), threads.mask(seq_id, guide)
        assert words is not None
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("processors", [1, 2, 4, 64])
@pytest.mark.parametrize("started", [0, 1, 7, 40])
def test_masks_are_those_of_one_by_one(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, processors: int, started: int
) -> None:
    monkeypatch.setattr(masks, "num_processors", lambda: processors)
    threads, guides = MaskThreads(), guides_of(compiler, 40)
    for _ in range(2):
        if started:
            threads.start({seq_id: guides[seq_id] for seq_id in range(started)})
        threads.finish(guides)
        check(threads, guides)
        for guide in guides.values():
            words = guide.allowed_mask()
            assert words is not None
            guide.accept(int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]))
    assert len(threads._pool._threads) <= max(1, min(processors - 1, masks.MAX_HELPERS))


def test_what_a_failed_step_began_is_not_taken_for_the_next_ones(compiler: Compiler) -> None:
    threads, later = MaskThreads(), guides_of(compiler, 3)
    later[0].accept(ord("a"))
    later[2].accept(ord("x"))
    threads.start(guides_of(compiler, 3))
    threads.start(later)
    threads.finish(later)
    check(threads, later)
    threads.finish(guides_of(compiler, 3))  # and nobody asks for them
    threads.finish(later)
    check(threads, later)


def test_matchers_that_are_waited_for_are_shared_out(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at a barrier: neither comes on without the other."""
    monkeypatch.setattr(masks, "num_processors", lambda: 2)
    threads, guides, barrier = MaskThreads(), guides_of(compiler, 2), threading.Barrier(2, timeout=30)

    class Waits:
        def is_stopped(self) -> bool:
            return False

        def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
            barrier.wait()

    for guide in guides.values():
        assert guide.matcher is not None
        guide.matcher.inner = Waits()  # type: ignore[assignment]
    threads.finish(guides)
    assert not barrier.broken


def test_a_matcher_that_gives_up_costs_its_own_sequence_only(compiler: Compiler) -> None:
    threads, guides = MaskThreads(), guides_of(compiler, 3)
    assert guides[1].matcher is not None
    guides[1].matcher.inner.consume_token(ord("z"))  # not in its language
    threads.finish(guides)
    check(threads, {0: guides[0], 2: guides[2]})
    with pytest.raises(RequestError, match="constraint"):
        threads.mask(1, guides[1])


def members(count: int, letter: str = "p") -> dict[str, object]:
    return {"type": "object", "properties": {f"{letter}{i}": {"type": "string", "pattern": "a+"} for i in range(count)}}


def test_a_schema_of_hundreds_of_members_is_followed_in_a_large_vocabulary() -> None:
    """Whose many tokens that begin an object, or go on in one, each come to all of the members."""
    blanks = [" " * i + "\n" * j + " " * k for i in range(2) for j in range(2) for k in range(12)]
    tokens = [bytes([i]) for i in range(256)] + [f"{a}{blank}{b}".encode() for a in "[{,:" for blank in blanks for b in '"{[pq']
    large = Vocabulary(tokens, (), lambda text: list(text.encode()))
    schema = {"type": "array", "items": {"anyOf": [members(300), members(300, "q")]}}
    followed = Matcher(compiled(Constraint("json_schema", json.dumps(schema)), large).deep_copy(), large)
    for byte in b'[{"p1": "a", "p299": "aa"}, {"q7":"a"}]':
        assert followed.allowed_mask()[byte // 32] >> np.uint32(byte % 32) & np.uint32(1), byte
        followed.accept(byte)
    assert followed.is_complete


def test_a_grammar_that_takes_seconds_a_step_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter can be read in so many more ways that others would wait for minutes; a copy has what the original used."""
    monkeypatch.setattr(matcher, "SLOW", 0.005)
    monkeypatch.setattr(matcher, "MAX_SLOW_SECONDS", 0.1)
    tokens = [bytes([i]) for i in range(256)] + [f"{a}{b}".encode() for a in "abcdefgh " for b in "abcdefghijklm "]
    vocabulary, began = Vocabulary(tokens, (), lambda text: list(text.encode())), time.process_time()
    followed = Matcher(compiled(Constraint("gbnf", 'root ::= (root root | [a-z ]+ | " "*)'), vocabulary), vocabulary)
    def follow(followed: Matcher) -> None:
        for letter in b"once upon a time there was a small girl who lived beside a green lake":
            followed = followed.copy()
            followed.accept(letter)
            followed.allowed_mask()

    with pytest.raises(UnmeetableError, match="takes too long"):
        follow(followed)
    assert time.process_time() - began < 2.0
