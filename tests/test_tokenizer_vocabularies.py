"""Real vocabularies against what llama.cpp and transformers make of the same texts."""

import heapq
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.gguf import GGUFFile

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TOKENIZERS = DATA / "tokenizers"
pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="the real vocabularies are not here")

GGUF_NAMES = ("deepseek-llm", "falcon", "gpt-2", "llama-spm", "phi-3")


@cache
def metadata(path: Path) -> dict[str, Any]:
    file = GGUFFile(path)
    fields = dict(file.metadata)
    file.close()
    return fields


@cache
def gguf_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(TOKENIZERS / f"ggml-vocab-{name}.gguf"))


@cache
def qwen2_parts() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TOKENIZERS / "qwen2.tokenizer.json").read_text())
    return content


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    shutil.copy(TOKENIZERS / "qwen2.tokenizer.json", folder / "tokenizer.json")
    shutil.copy(TOKENIZERS / "qwen2.tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


def qwen2_metadata() -> dict[str, Any]:
    """What a converter would write for Qwen2: the same vocabulary as GGUF metadata."""
    content = qwen2_parts()
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") and ids[token] >= 151643 else 1 for token in tokens],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 151645,
        "tokenizer.ggml.padding_token_id": 151643,
        "tokenizer.ggml.bos_token_id": 151643,
        "tokenizer.ggml.add_bos_token": False,
    }


def published_cases(name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's texts and ids. The ids are those without BOS."""
    base = TOKENIZERS / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{base}.out").read_text().split("\n")
    return [(text, [int(word) for word in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_gguf_vocabulary_gives_the_ids_that_llama_cpp_publishes(name: str) -> None:
    tokenizer = gguf_tokenizer(name)
    cases = published_cases(name)
    assert len(cases) == 47
    assert [tokenizer.encode(text, add_special_tokens=False) for text, _ in cases] == [ids for _, ids in cases]


def test_qwen2_gives_the_published_ids_from_its_folder_and_from_gguf(qwen2_folder: Path) -> None:
    cases = published_cases("qwen2")
    expected = [ids for _, ids in cases]
    for tokenizer in (Tokenizer.from_folder(qwen2_folder), Tokenizer.from_gguf(qwen2_metadata())):
        assert [tokenizer.encode(text) for text, _ in cases] == expected


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_decoding_gives_the_text_back(name: str) -> None:
    tokenizer = gguf_tokenizer(name)
    for text, ids in published_cases(name):
        assert tokenizer.decode(ids) == text
        assert (
            b"".join(map(tokenizer.id_to_bytes, ids)).decode().removeprefix(" " if "spm" in name else "").endswith(text)
        )


def test_ids_with_a_role_are_those_of_the_files(qwen2_folder: Path) -> None:
    spm, phi3, falcon = gguf_tokenizer("llama-spm"), gguf_tokenizer("phi-3"), gguf_tokenizer("falcon")
    assert (spm.bos_id, spm.eos_ids, spm.unk_id, spm.vocab_size) == (1, (2,), 0, 32000)
    assert spm.encode("Hello") == [1, 15043]
    assert falcon.encode("Hello") == falcon.encode("Hello", add_special_tokens=False)
    # llama.cpp's end-of-generation set of this file: <|endoftext|>, <|end|> and </s>
    assert set(phi3.eos_ids) == {2, 32000, 32007}
    assert "default" in phi3.chat_templates
    qwen2 = Tokenizer.from_folder(qwen2_folder)
    assert qwen2.eos_ids == (151645, 151643)
    assert (qwen2.bos_id, qwen2.pad_id, qwen2.vocab_size) == (None, 151643, 151646)
    assert qwen2.special_ids == {151643, 151644, 151645}


def test_qwen2_encodes_and_decodes_as_transformers_does(qwen2_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(qwen2_folder), Tokenizer.from_folder(qwen2_folder)
    texts = (DATA / "text" / "multilingual.utf8").read_text(errors="ignore")[:60_000]
    pieces = [texts[start : start + 3000] for start in range(0, len(texts), 3000)]
    pieces += ["", " ", "e\u0301 NFD", "<|im_start|>user\nhi<|im_end|>", "a<|endoftext|> b"]
    assert ours.encode_batch(pieces) == [theirs(piece)["input_ids"] for piece in pieces]
    for piece in pieces:
        ids = ours.encode(piece)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_merges_follow_the_scores_as_in_llama_cpp() -> None:
    """Against the algorithm itself: a queue of neighbours by the score of what they would become, leftmost first."""
    generator = random.Random(7)
    corpus = (DATA / "text" / "multilingual.utf8").read_text(errors="ignore")
    for name in ("llama-spm", "phi-3"):
        fields, tokenizer = metadata(TOKENIZERS / f"ggml-vocab-{name}.gguf"), gguf_tokenizer(name)
        tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
        kinds = fields["tokenizer.ggml.token_type"]
        ids = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (1, 6)}
        for turn in range(300):
            start = generator.randrange(len(corpus) - 200)
            alphabets = ("aab  \n<>/s\t.0", "".join(generator.choices(tokens[259:], k=8)).replace("\u2581", " "))
            text = (
                corpus[start : start + generator.randint(1, 120)]
                if turn % 3 == 0
                else "".join(generator.choices(alphabets[turn % 3 - 1], k=generator.randint(1, 40)))
            )
            expected = merge_by_score(text, ids, scores)
            assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == expected, text


def merge_by_score(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    symbols = list((" " + text).replace(" ", "\u2581"))
    before, after = list(range(-1, len(symbols) - 1)), [*range(1, len(symbols)), -1]
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (joined := ids.get(symbols[left] + symbols[right])) is not None:
            heapq.heappush(queue, (-scores[joined], left, right, len(symbols[left]) + len(symbols[right])))

    for position in range(1, len(symbols)):
        consider(position - 1, position)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left], symbols[right] = symbols[left] + symbols[right], ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    pieces = [symbol for symbol in symbols if symbol]
    as_bytes = [[f"<0x{byte:02X}>" for byte in piece.encode()] if piece not in ids else [piece] for piece in pieces]
    return [ids[token] for part in as_bytes for token in part]


@pytest.mark.parametrize("name", [*GGUF_NAMES, "qwen2"])
def test_control_tokens_in_plain_text_stay_text(name: str, qwen2_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen2_folder) if name == "qwen2" else gguf_tokenizer(name)
    assert tokenizer.control_tokens
    for token, token_id in tokenizer.control_tokens.items():
        text = f"a {token}b{token}"
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert token_id not in plain
        assert not tokenizer.special_ids.intersection(plain)
        assert tokenizer.decode(plain) == text
        assert tokenizer.encode(text, add_special_tokens=False).count(token_id) == 2


def test_guarded_encoding_reads_only_the_control_tokens_it_may(qwen2_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen2_folder)
    text = "<|im_start|>user\nhi <|im_end|><|im_end|>\n"
    assert tokenizer.encode_guarded(text, ()) == tokenizer.encode(text)
    guarded = tokenizer.encode_guarded(text, {text.index("<|im_end|>")})
    assert guarded[0] == 151644
    assert guarded.count(151645) == 1
    assert tokenizer.decode(guarded, skip_special_tokens=False) == text
    everywhere = tokenizer.encode_guarded(text, range(len(text)))
    assert everywhere == tokenizer.encode(text, parse_special=False)
