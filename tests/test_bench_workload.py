"""Requests for benchmarks: as many, as long and as alike as was asked for, and the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanovllm_cli.bench.workload import prefix_repetition, prompts_file, random_lengths, sharegpt
from nanovllm_cli.errors import UsageError


def test_random_prompts_have_the_lengths_asked_for() -> None:
    found = random_lengths(50, 17, 5, vocab_size=31, seed=3)
    assert len(found) == 50
    assert {len(request.prompt) for request in found} == {17}
    assert {request.max_tokens for request in found} == {5}
    assert {token for request in found for token in request.prompt} == set(range(31))
    assert list(random_lengths(50, 17, 5, vocab_size=31, seed=3)) == list(found)
    assert list(random_lengths(50, 17, 5, vocab_size=31, seed=4)) != list(found)


@pytest.mark.parametrize(("reserved", "instead"), [(7, 6), (0, 1)])
def test_a_reserved_token_is_in_no_prompt_and_all_others_stay(reserved: int, instead: int) -> None:
    plain = [*random_lengths(20, 17, 5, vocab_size=9), *prefix_repetition(20, 9, 8, 5, vocab_size=9)]
    found = [*random_lengths(20, 17, 5, vocab_size=9, reserved={reserved}),
             *prefix_repetition(20, 9, 8, 5, vocab_size=9, reserved={reserved})]  # fmt: skip
    assert any(reserved in request.prompt for request in plain)
    for before, after in zip(plain, found, strict=True):
        assert after.prompt == [instead if token == reserved else token for token in before.prompt]


def test_a_range_of_lengths_is_used_whole() -> None:
    found = list(random_lengths(2000, 10, 4, range_ratio=0.5, vocab_size=9))
    assert {len(request.prompt) for request in found} == set(range(5, 16))
    assert {request.max_tokens for request in found} == set(range(2, 7))


def test_without_a_vocabulary_prompts_are_words() -> None:
    (request,) = random_lengths(1, 12, 3)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 12


@pytest.mark.parametrize("vocab_size", [1000, None])
def test_prefixes_are_shared_and_ends_are_not(vocab_size: int | None) -> None:
    found = list(prefix_repetition(20, 30, 7, 2, num_prefixes=4, vocab_size=vocab_size))
    prompts = [request.prompt.split() if isinstance(request.prompt, str) else request.prompt for request in found]
    assert {len(prompt) for prompt in prompts} == {37}
    beginnings = [tuple(prompt[:30]) for prompt in prompts]
    assert sorted(beginnings.count(each) for each in set(beginnings)) == [5, 5, 5, 5]
    assert beginnings != sorted(beginnings, key=beginnings.index)  # groups are mixed
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 20


def conversations(path: Path, pairs: list[tuple[object, object]]) -> Path:
    path.write_text(json.dumps([{"conversations": [{"value": a}, {"value": b}]} for a, b in pairs]))
    return path


def test_conversations_give_questions_and_lengths(tmp_path: Path) -> None:
    """Tokens are characters here: bounds on both sides are vLLM's."""
    kept = [("q" * 4, "a" * 4), ("q" * 1024, "a" * 1024), ("q" * 10, "a" * 2038)]
    lens = [(3, 50), (50, 3), (1025, 5), (11, 2038)]
    dropped = [*(("q" * asked, "a" * said) for asked, said in lens), (1, "x" * 9), ("y" * 9, None)]
    path = conversations(tmp_path / "dump.json", kept + dropped)
    found = sharegpt(path, 3, tokens=len)
    assert sorted(found) == sorted((question, len(answer)) for question, answer in kept)
    fixed = sharegpt(path, 3, output_len=2, tokens=len)
    assert {request.max_tokens for request in fixed} == {2}
    with pytest.raises(UsageError, match="has 3 usable prompts, 4 were asked for"):
        sharegpt(path, 4, tokens=len)


def test_other_entries_of_a_dump_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    good = {"conversation": [{"value": "q" * 20}] * 2}
    path.write_text(json.dumps([1, {}, {"conversations": [1, 2]}, {"conversations": []}, good]))
    assert list(sharegpt(path, 1)) == [("q" * 20, 5)]


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('one\n\n{"prompt": "two", "max_tokens": 7}\n{"prompt": "three"}\n')
    assert list(prompts_file(path, None, 5)) == [("one", 5), ("two", 7), ("three", 5)]
    assert list(prompts_file(path, 1, 5)) == [("one", 5)]
    with pytest.raises(UsageError, match="has 3 usable prompts"):
        prompts_file(path, 4, 5)


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    """JSON may hold other ends of lines as they are, and so may a text."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\na\fb\x85\u2029c\r\n'.encode())
    assert list(prompts_file(path, None, 5)) == [("a\u2028b", 5), ("a\fb\x85\u2029c", 5)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "0 usable prompts, some were asked for"),
        ("{", "prompts:1 is not JSON"),
        ('ok\n{"max_tokens": 3}', 'prompts:2 has no text under "prompt"'),
        ('{"prompt": ""}', "no text"),
        ('{"prompt": "x", "max_tokens": 0}', "not a number of tokens"),
        ('{"prompt": "x", "max_tokens": true}', "not a number of tokens"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=says):
        prompts_file(path, None, 5)


def test_bad_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="input len must be at least 1"):
        random_lengths(1, 0, 1)
    with pytest.raises(UsageError, match="count must be at least 1"):
        random_lengths(0, 1, 1)
    with pytest.raises(UsageError, match="range ratio"):
        random_lengths(1, 1, 1, range_ratio=1.0)
    with pytest.raises(UsageError, match="num prefixes"):
        prefix_repetition(1, 1, 1, 1, num_prefixes=0)
    with pytest.raises(UsageError, match="cannot read"):
        sharegpt(tmp_path / "none", 1)
    (tmp_path / "object").write_text("{}")
    with pytest.raises(UsageError, match="not a list"):
        sharegpt(tmp_path / "object", 1)
