"""tekken.json: ids as tiktoken and transformers have them, prompts as mistral-common writes them, and what is broken."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers.integrations.mistral.tokenizer import MistralConverter

from engines import random_model, save
from hearing import config_of
from nanovllm_cli import LLM, EngineConfig
from nanovllm_cli.errors import CheckpointError, TemplateError
from nanovllm_cli.sounds.source import SOUND
from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat
from nanovllm_cli.text.messages import template_messages, template_tools
from nanovllm_cli.text.pre_tokenizers import pre_tokenization
from nanovllm_cli.text.tekken import _FIRST, read_tekken
from nanovllm_cli.text.token_bytes import byte_characters
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.transcripts import asks
from nanovllm_cli.weights.files import choose
from sounding import noise, wav

GOLDENS = json.loads((Path(__file__).parent / "tekken_conversations.json").read_text())
MORE = ["[ARGS]", "[CALL_ID]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[THINK]", "[/THINK]"]
NUM_SPECIAL = 40
PATTERN = pre_tokenization("tekken").patterns[0]
TEXTS = [
    "Hello world", "  a\n\n b\tc  \r\n", "CamelCase parseHTTPResponse 3.14159 2026\u00b2", "def f(x):\n    return x ** 2\n\n\n",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u00f1and\u00fa \U0001f642\U0001f642", "aaaaaaaaaaaaa abababababab",
    "\u0301\u200b\x00\x7f", "", " ", "[INST]",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    """Of a vocabulary that another library has learned from this project's sources, bytes first and merges behind."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = byte_characters()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train([str(path) for path in sorted(Path(__file__).parent.glob("test_s*.py"))], trainer)
    byte_of = {character: byte for byte, character in enumerate(alphabet)}
    learned = sorted((number, name) for name, number in backend.get_vocab().items() if len(name) > 1)
    return [*(bytes([byte]) for byte in range(256)), *(bytes(byte_of[each] for each in name) for _, name in learned)]


def told(ranks: list[bytes], version: str = "v3", **changes: Any) -> dict[str, Any]:
    """A file: its tokens are more than count, as in the published ones."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for rank, token in enumerate(ranks)
    ]
    config = {
        "pattern": PATTERN, "num_vocab_tokens": len(ranks), "default_vocab_size": NUM_SPECIAL + len(ranks) - 100,
        "default_num_special_tokens": NUM_SPECIAL, "version": version,
    }  # fmt: skip
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate([*_FIRST, *MORE])]
    return {"config": config, "vocab": vocabulary, **({} if version == "v3" else {"special_tokens": listed})} | changes


def saved(folder: Path, data: dict[str, Any]) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(data))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("version", ["v3", "v13"])
def test_ids_are_tiktokens_and_transformers(version: str, ranks: list[bytes], tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, told(ranks, version))
    counted = ranks[:-100]
    expected = tiktoken.Encoding(
        "t", pat_str=PATTERN, mergeable_ranks={token: i for i, token in enumerate(counted)}, special_tokens={}
    )
    texts = [*TEXTS, Path(__file__).read_text(), (Path(__file__).parents[1] / "README.md").read_text()]
    for text in texts:
        ids = [NUM_SPECIAL + each for each in expected.encode_ordinary(text)]
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, parse_special=False) == [1, *ids]
    if version == "v13":  # of the other, transformers asks mistral-common
        theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
        assert theirs.get_vocab_size() == NUM_SPECIAL + len(counted)
        for text in texts:
            assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    assert [tokenizer.id_to_token(each) for each in (0, 1, 2, 3, 11, 19, 39)] == [
        "<unk>", "<s>", "</s>", "[INST]", "<pad>", "[TOOL_CONTENT]", "<SPECIAL_39>",
    ]  # fmt: skip
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("[INST]a[/INST]")[:2] == [1, 3]
    assert tokenizer.control_ids >= set(range(NUM_SPECIAL))


CASES = [(version, name) for version, texts in GOLDENS["texts"].items() for name in texts]


@pytest.mark.parametrize(("version", "name"), CASES)
def test_conversations_are_mistral_commons(version: str, name: str, ranks: list[bytes], tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, told(ranks, version))
    template = ChatTemplate(
        tokenizer.chat_templates["default"], bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    given = GOLDENS["conversations"][name]
    tools = template_tools(GOLDENS["tools"], template) if given["tools"] else None
    ids = encode_chat(tokenizer, template, template_messages(given["messages"], template), tools=tools)
    assert tokenizer.decode(ids, skip_special_tokens=False) == GOLDENS["texts"][version][name]
    assert ids == tokenizer.encode(GOLDENS["texts"][version][name], add_special_tokens=False)


def test_templates_of_the_folder_come_first_and_unknown_versions_have_none(ranks: list[bytes], tmp_path: Path) -> None:
    assert saved(tmp_path, told(ranks, "v99")).chat_templates == {}
    assert saved(tmp_path, told(ranks, "v7")).chat_templates.keys() == {"default"}
    (tmp_path / "chat_template.jinja").write_text("own")
    assert saved(tmp_path, told(ranks, "v7")).chat_templates == {"default": "own"}


def test_roles_that_nobody_knows_are_refused(ranks: list[bytes], tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, told(ranks, "v11"))
    template = ChatTemplate(tokenizer.chat_templates["default"])
    with pytest.raises(TemplateError, match="takes system, user, assistant and tool messages"):
        template.render([{"role": "critic", "content": "x"}])


def test_a_voxtral_hears_with_nothing_but_it(ranks: list[bytes], tmp_path: Path) -> None:
    """As mistral-common has it: [BEGIN_AUDIO], then [AUDIO] as often as there are rows."""
    from transformers import AutoModelForMultimodalLM

    config = config_of("voxtral", vocab_size=NUM_SPECIAL + len(ranks) - 100, max_position_embeddings=256)
    config.audio_token_id = _FIRST.index("[TOOL_CONTENT]") + 1 + MORE.index("[AUDIO]")
    save(random_model(config, auto=AutoModelForMultimodalLM), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 9}))
    saved(tmp_path, told(ranks, "v7"))
    sound = {"type": "audio", "audio": SOUND.data_url(wav(noise(8000)))}
    with LLM(tmp_path, config=EngineConfig(threads=2, num_blocks=16)) as llm:
        assert llm.hearing is not None
        asked = asks(llm.hearing.transcript, llm.tokenizer, sound, "en")
        ids = llm.encode_chat(asked.messages) + asked.begins
        text = llm.tokenizer.decode(ids, skip_special_tokens=False)
        (placed,) = ids.images
        assert text == f"<s>[INST][BEGIN_AUDIO]{'[AUDIO]' * placed.num_tokens}[/INST]lang:en[TRANSCRIBE]"
        assert placed.start == 3


def test_it_is_fetched_where_there_is_no_other() -> None:
    names = ["config.json", "model.safetensors", "consolidated.safetensors", "params.json", "tekken.json"]
    assert choose(names, "here").files == ("config.json", "tekken.json", "model.safetensors")
    assert choose([*names, "tokenizer.json"], "here").files == ("config.json", "tokenizer.json", "model.safetensors")


Change = Callable[[dict[str, Any]], Any]
BROKEN: dict[str, tuple[Change, str]] = {
    "no pattern": (lambda data: data["config"].pop("pattern"), "no pattern"),
    "a pattern that is none": (lambda data: data["config"].update(pattern="("), "tekken.json"),
    "no config": (lambda data: data.pop("config"), "no pattern"),
    "no tokens": (lambda data: data.pop("vocab"), "no list of tokens"),
    "tokens of another kind": (lambda data: data["vocab"].__setitem__(0, [0]), "without rank and token_bytes"),
    "a rank that is true": (lambda data: data["vocab"][1].update(rank=True), "without rank"),
    "a gap": (lambda data: data["vocab"].pop(7), "leave gaps"),
    "ranks twice": (lambda data: data["vocab"][8].update(rank=7), "leave gaps"),
    "no base64": (lambda data: data["vocab"][7].update(token_bytes="?"), "not base64"),
    "a token twice": (lambda data: data["vocab"][300].update(token_bytes="YQ=="), "a token twice"),
    "an empty token": (lambda data: data["vocab"][300].update(token_bytes=""), "a token twice, or one that is empty"),
    "a long token": (lambda data: data["vocab"][300].update(token_bytes="YWFh" * 100), "more than 256 bytes"),
    "a byte without a token": (lambda data: data["vocab"][7].update(token_bytes="YWJjZGVm"), "no token is the byte 7"),
    "fewer tokens than said": (lambda data: data["config"].update(default_vocab_size=9999), "fewer tokens than it says"),
    "a size of none": (lambda data: data["config"].update(default_vocab_size="all"), "fewer tokens than it says"),
    "fewer special ones": (lambda data: data["config"].update(default_num_special_tokens=3), "more control tokens"),
    "far too many": (lambda data: data["config"].update(default_num_special_tokens=1 << 40), "more control tokens"),
    "a special one twice": (lambda data: data["special_tokens"][3].update(token_str="<s>"), "a control token twice"),
    "one without a name": (lambda data: data["special_tokens"][3].update(token_str=""), "without a name"),
    "one that is filled up": (lambda data: data["special_tokens"][3].update(token_str="<SPECIAL_30>"), "a control token twice"),
    "one that is no text": (lambda data: data["special_tokens"][3].update(token_str="\ud800"), "tekken.json is broken"),
    "one that is a token": (lambda data: data["special_tokens"][3].update(token_str="a"), "has 'a' twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_told(case: str, ranks: list[bytes]) -> None:
    data = json.loads(json.dumps(told(ranks, "v7")))
    change, says = BROKEN[case]
    change(data)
    with pytest.raises(CheckpointError) as caught:
        read_tekken(data)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null", '{"config": 5}'])
def test_other_files_are_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tekken\.json is (broken|not JSON|not a JSON object)"):
        Tokenizer.from_folder(tmp_path)
