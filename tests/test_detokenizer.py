"""Streams of ids to text: equal to decoding at once, whatever the ids and however they arrive."""

import random
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.detokenizer import Detokenizer, StopMatcher
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.vocabulary import TokenizerParts
from nanovllm_cli.weights.gguf import GGUFFile

TOKENIZERS = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers"
REAL = [
    name for name in ("gpt-2", "falcon", "llama-spm", "phi-3") if (TOKENIZERS / f"ggml-vocab-{name}.gguf").is_file()
]
SPECIAL = 256


@cache
def tokenizer_named(name: str) -> Tokenizer:
    if name == "bytes":
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({character: i for i, character in enumerate(characters)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|end|>"])
        return Tokenizer(TokenizerParts(backend))
    if name == "pieces":
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{value:02X}>" for value in range(256)),
            "\u2581a",
            "b",
            "\u2581",
            "\u00e9",
        ]
        fields = {
            "model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens),
            "token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
        }  # fmt: skip
        return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    file = GGUFFile(TOKENIZERS / f"ggml-vocab-{name}.gguf")
    metadata = dict(file.metadata)
    file.close()
    return Tokenizer.from_gguf(metadata)


def stream(detokenizer: Detokenizer, ids: list[int], sizes: list[int] | None = None) -> list[str]:
    pieces, position = [], 0
    for size in sizes or []:
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    pieces += [detokenizer.push([token_id]) for token_id in ids[position:]]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", ["bytes", "pieces", *REAL])
def test_pieces_joined_are_the_decoded_text(name: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = st.lists(
        st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, min(600, tokenizer.vocab_size)), max_size=40
    )

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ids, st.lists(st.integers(0, 5), max_size=6), st.booleans())
    def check(ids: list[int], sizes: list[int], skip: bool) -> None:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join(stream(detokenizer, ids, sizes)) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert detokenizer.num_tokens == len(ids)

    check()


@pytest.mark.parametrize("name", REAL)
def test_decoding_equals_the_librarys_own_for_real_text(name: str) -> None:
    """The bytes of the tokens joined are what the vocabulary's decoder makes of them."""
    tokenizer = tokenizer_named(name)
    backend = tokenizer._backend
    text = (TOKENIZERS / "ggml-vocab-gpt-2.gguf.inp").read_text()
    for line in [text, *text.split("\n__ggml_vocab_test__\n")]:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True) == line
        detokenizer = Detokenizer(tokenizer)
        assert "".join(stream(detokenizer, ids)) == line


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = tokenizer_named("bytes")
    ids = tokenizer.encode("a\U0001f642b")
    assert stream(Detokenizer(tokenizer), ids) == ["a", "", "", "", "\U0001f642", "b", ""]


def test_bytes_that_never_become_a_character_are_replaced() -> None:
    tokenizer = tokenizer_named("bytes")
    ids = tokenizer.encode("\U0001f642")
    assert stream(Detokenizer(tokenizer), ids[:3]) == ["", "", "", "\ufffd"]
    assert stream(Detokenizer(tokenizer), [*ids[:2], *tokenizer.encode("x")]) == ["", "", "\ufffdx", ""]


def test_the_prefix_space_belongs_to_the_beginning_only() -> None:
    tokenizer = tokenizer_named("pieces")
    a, b = tokenizer.token_to_id("\u2581a"), tokenizer.token_to_id("b")
    assert a is not None
    assert b is not None
    assert "".join(stream(Detokenizer(tokenizer), [a, a, b])) == "a ab"
    assert "".join(stream(Detokenizer(tokenizer, prompt_ids=[1]), [a, a, b])) == "a ab"  # <s> has no text
    assert "".join(stream(Detokenizer(tokenizer, prompt_ids=[1, b]), [a, a, b])) == " a ab"


def test_a_token_without_text_is_not_the_beginning() -> None:
    tokenizer = tokenizer_named("pieces")
    a, nothing = tokenizer.token_to_id("\u2581a"), tokenizer.vocab_size + 1
    assert stream(Detokenizer(tokenizer), [nothing, a, a]) == ["", "a", " a", ""]


def test_a_character_that_the_prompt_began_is_finished() -> None:
    tokenizer = tokenizer_named("bytes")
    ids = tokenizer.encode("x\u4f60y")
    for cut in range(len(ids)):
        detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:cut])
        whole = "x\u4f60y"
        already = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert "".join(stream(detokenizer, ids[cut:])) == whole[len(already) :]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokenizer = tokenizer_named("bytes")
    ids = tokenizer.encode("a<|end|>b")
    assert SPECIAL in ids
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "ab"
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "a<|end|>b"
    assert "".join(stream(Detokenizer(tokenizer, visible_ids=[SPECIAL]), ids)) == "a<|end|>b"


def with_stops(text: str, *stop: str, **options: bool | int) -> tuple[list[str], Detokenizer]:
    tokenizer = tokenizer_named("bytes")
    detokenizer = Detokenizer(tokenizer, stop=stop, **options)  # type: ignore[arg-type]
    return stream(detokenizer, tokenizer.encode(text)), detokenizer


def test_a_stop_string_ends_the_text_before_it() -> None:
    pieces, detokenizer = with_stops("hello STOP more", "STOP")
    assert "".join(pieces) == "hello "
    assert detokenizer.stopped == "STOP"
    assert detokenizer.num_tokens == len("hello STOP")
    assert detokenizer.push([1, 2, 3]) == detokenizer.finish() == ""
    assert "".join(with_stops("hello STOP more", "STOP", include_stop_str_in_output=True)[0]) == "hello STOP"


def test_a_character_begun_behind_a_stop_string_is_not_shown() -> None:
    backend = Backend(models.BPE({".\u00e4\u00bd": 0}, []))  # one token: a dot, and two of the three bytes of U+4F60
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(TokenizerParts(backend))
    assert tokenizer.id_to_bytes(0) == b".\xe4\xbd"
    assert stream(Detokenizer(tokenizer, stop=["."]), [0]) == ["", ""]


def test_what_may_become_a_stop_string_waits() -> None:
    pieces, detokenizer = with_stops("aSTxSTO", "STOP")
    assert pieces == ["a", "", "", "STx", "", "", "", "STO"]
    assert detokenizer.stopped is None


def test_the_string_completed_first_wins() -> None:
    assert with_stops("one abcd", "abcd", "bc")[1].stopped == "bc"
    assert with_stops("one abcd", "bcd", "abcd")[1].stopped == "abcd"  # completed together: the longest
    assert with_stops("aab", "ab", "aac")[1].stopped == "ab"
    assert with_stops("x\u4f60y", "\u4f60")[0] == ["x", "", "", "", "", ""]


def test_stop_strings_wait_for_the_first_tokens() -> None:
    pieces, detokenizer = with_stops("..x..x", ".", min_tokens=3)
    assert "".join(pieces) == "..x"
    assert detokenizer.num_tokens == 4
    pieces, detokenizer = with_stops("..x..x", ".", min_tokens=4)
    assert "".join(pieces) == "..x."
    assert detokenizer.num_tokens == 5


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError):
        StopMatcher(["a", ""])


@settings(max_examples=400, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), max_size=8),
)
def test_the_matcher_finds_what_a_plain_search_finds(text: str, strings: list[str], sizes: list[int]) -> None:
    ends = [
        (end, -len(string), string)
        for string in strings
        for end in range(len(string), len(text) + 1)
        if text[:end].endswith(string)
    ]
    matcher = StopMatcher(strings)
    out, found, position = "", None, 0
    for size in [*sizes, len(text)]:
        piece, position = text[position : position + size], position + size
        passed, found = matcher.push(piece)
        out += passed
        if found is not None:
            break
        # Nothing that could begin a stop string has been given out.
        assert not any(text[:position].endswith(s[:k]) for s in strings for k in range(position - len(out) + 1, len(s)))
    if not ends:
        assert found is None
        assert out + matcher.flush() == text
    else:
        end, size, string = min(ends)
        assert (found, out) == (string, text[: end + size])


def test_time_per_token_does_not_grow() -> None:
    tokenizer = tokenizer_named("bytes")
    generator = random.Random(0)
    ids = [generator.randrange(256) for _ in range(40_000)]
    detokenizer = Detokenizer(tokenizer, stop=["a" * 500, "b" * 500 + "c"])
    began = time.thread_time()
    for token_id in ids[:10_000]:
        detokenizer.push([token_id])
    first = time.thread_time() - began
    for token_id in ids[10_000:]:
        detokenizer.push([token_id])
    assert time.thread_time() - began < 12 * max(first, 0.01)


def test_a_stream_of_near_matches_is_linear() -> None:
    tokenizer = tokenizer_named("bytes")
    a = tokenizer.encode("a")[0]
    began = time.thread_time()
    detokenizer = Detokenizer(tokenizer, stop=["a" * 2000 + "b"])
    text = "".join(detokenizer.push([a]) for _ in range(30_000)) + detokenizer.finish()
    assert text == "a" * 30_000
    assert time.thread_time() - began < 5
