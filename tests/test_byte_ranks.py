"""tiktoken.model of Moonlight and Kimi: ids as tiktoken has them with the pattern and the names that their code has."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.files import choose
from test_tekken import TEXTS
from test_tekken import ranks as ranks

# moonshotai/Kimi-Linear-48B-A3B-Instruct, tokenization_kimi.py
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
PATTERN = "|".join([
    r"[\p{Han}]+", CASED % ("*", "+"), CASED % ("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+",
    r"\s+(?!\S)", r"\s+",
])  # fmt: skip
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 10: "<|im_user|>", 200: "[PAD]"}
MIXED = "\u6f22\u5b57abc \u3042\u308a\u304c\u3068\u3046\u4e16\u754cWorld's we'LL 12345\u6f221"


def lines_of(ranks: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))


def config_of(ranks: list[bytes], **changes: Any) -> dict[str, Any]:
    listed = {str(len(ranks) + i): {"content": name, "special": name != "<|im_user|>"} for i, name in NAMED.items()}
    return {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "added_tokens_decoder": listed, "chat_template": "{{ messages[0].content }}",
    } | changes  # fmt: skip


def saved(folder: Path, text: str, config: dict[str, Any]) -> Tokenizer:
    (folder / "tiktoken.model").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def test_ids_are_tiktokens(ranks: list[bytes], tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, lines_of(ranks), config_of(ranks))
    names = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    by_rank = {token: rank for rank, token in enumerate(ranks)}
    expected = tiktoken.Encoding("t", pat_str=PATTERN, mergeable_ranks=by_rank, special_tokens=names)
    for text in [*TEXTS, MIXED, Path(__file__).read_text()]:
        assert tokenizer.encode(text, parse_special=False) == expected.encode_ordinary(text)
    for text in ("[BOS]a<|im_user|>b<|im_end|>", f"x<|reserved_token_{len(ranks) + 3}|>[EOS]"):
        assert tokenizer.encode(text) == expected.encode(text, allowed_special="all")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOS]", "[EOS]")
    assert {tokenizer.id_to_token(each) for each in range(len(ranks), len(ranks) + 256)} == names.keys()
    assert tokenizer.chat_templates == {"default": "{{ messages[0].content }}"}


def test_it_is_fetched() -> None:
    names = ["config.json", "model.safetensors", "tiktoken.model", "tokenization_moonshot.py"]
    assert choose(names, "here").files == ("config.json", "tiktoken.model", "model.safetensors")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda text: "", CheckpointError, "no token is the byte 0"),
        (lambda text: text.replace(" 7\n", " 8\n"), CheckpointError, "not a token and its rank"),
        (lambda text: text.replace(" 7\n", "\n"), CheckpointError, "not a token and its rank"),
        (lambda text: text.replace("AA== 0", "? 0"), CheckpointError, "not base64"),
        (lambda text: text.replace("AA== 0", "AQ== 0"), CheckpointError, "a token twice"),
    ],
)
def test_broken_files_are_told(change: Any, kind: type[NanovllmError], says: str, ranks: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(kind) as caught:
        saved(tmp_path, change(lines_of(ranks)), config_of(ranks))
    assert says in str(caught.value)


def listing(place: int, name: str) -> Any:
    return lambda count: {"added_tokens_decoder": {str(count + place): {"content": name.format(count + place + 1)}}}


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (lambda count: {"tokenizer_class": "QWenTokenizer"}, UnsupportedError, "code that is not run"),
        (lambda count: {"tokenizer_class": None}, UnsupportedError, "code that is not run"),
        (listing(3, "a"), CheckpointError, "has 'a' twice"),
        (listing(3, "<|reserved_token_{}|>"), CheckpointError, "twice"),
        (listing(3, "\ud800"), CheckpointError, "tokenizer_config.json is broken"),
        (listing(999, "<x>"), CheckpointError, "leaves a gap"),
    ],
)
def test_broken_settings_are_told(
    changes: Any, kind: type[NanovllmError], says: str, ranks: list[bytes], tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        saved(tmp_path, lines_of(ranks), config_of(ranks, **changes(len(ranks))))
    assert says in str(caught.value)
