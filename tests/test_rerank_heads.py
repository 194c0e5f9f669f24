"""Heads of rerankers in folders against transformers' own classes, of encoders in GGUF files against float64; what they read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from embedders import END, SIZES, body, write_json, write_modules, write_tokenizer
from engines import greedy, random_model, save
from nanovllm_cli import LLM
from nanovllm_cli.cli.serve import _asked
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.server import engine_process
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.further import read_further
from nanovllm_cli.weights.heads import Head, head_of
from nanovllm_cli.weights.scoring import scoring_of
from test_convert import converted
from test_reranking import post
from test_tokenizer_encoders import bert, xlm_roberta

ONE = {"num_labels": 1, "pad_token_id": 0}
DECODERS: dict[str, Any] = {
    "Qwen3ForSequenceClassification": Qwen3Config(**SIZES | ONE | {"tie_word_embeddings": True}),
    "Qwen2ForSequenceClassification": Qwen2Config(**SIZES | ONE),
    "LlamaForSequenceClassification": LlamaConfig(**SIZES | ONE),
    "GemmaForSequenceClassification": GemmaConfig(**SIZES | ONE),
    "MistralForSequenceClassification": MistralConfig(**SIZES | ONE),
}
SMALL = {
    "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "num_labels": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
ENCODERS: dict[str, Any] = {
    "BertForSequenceClassification": BertConfig(**SMALL),
    "RobertaForSequenceClassification": RobertaConfig(**SMALL),
    "XLMRobertaForSequenceClassification": XLMRobertaConfig(**SMALL),
    "MPNetForSequenceClassification": MPNetConfig(**SMALL),
    "ModernBertForSequenceClassification": ModernBertConfig(**SMALL),
    "ModernBert by the mean": ModernBertConfig(
        **SMALL, classifier_pooling="mean", classifier_bias=True, norm_bias=True, classifier_activation="relu", norm_eps=1e-3
    ),
}
DOCUMENTS = ["a cat", "the moon", "seven\ndogs"]
ROLES = """<|im_start|>user
{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}:
{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>
"""


def classifier(config: PreTrainedConfig, folder: Path) -> Any:
    """transformers' model with a head, whose numbers are all random, saved as it saves it."""
    model = random_model(config, auto=AutoModelForSequenceClassification)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "score" in name or "classifier" in name or "head." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    model.save_pretrained(folder)
    return model.eval()


def opened(path: Path, **given: Any) -> LLM:
    return LLM(path, config=EngineConfig(threads=2, num_blocks=64), **given)


def logits(model: Any, prompts: Sequence[Any]) -> list[float]:
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits.double()) for ids in prompts]


def sigmoid(numbers: Sequence[float]) -> list[float]:
    return torch.tensor(numbers, dtype=torch.float64).sigmoid().tolist()  # type: ignore[no-any-return]


def near(found: Sequence[float], wanted: Sequence[float]) -> None:
    assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model") / "m"
    found = classifier(DECODERS["Qwen3ForSequenceClassification"], folder)
    write_tokenizer(folder)
    return found, folder


@pytest.fixture
def folder(model: tuple[Any, Path], tmp_path: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(model[1], tmp_path / "m"))


def configured(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | keys
    write_json(folder / "config.json", {key: value for key, value in config.items() if value is not None})
    return folder


# ---- decoders ----


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_ranks_by_its_last_token(name: str, tmp_path: Path) -> None:
    """As transformers' own tokenizer makes one of two texts."""
    reference = classifier(DECODERS[name], tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == [name]
    write_tokenizer(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    prompts = [tokenizer("animals ", document).input_ids for document in DOCUMENTS]
    assert all(ids[-1] == END for ids in prompts)
    with opened(tmp_path / "m") as llm:
        done: list[tuple[int, int]] = []
        found = llm.rank("animals ", DOCUMENTS, progress=lambda *counts: done.append(counts))
        assert (llm.spec.has_head, llm.embedding.ranks, done[-1]) == (False, True, (3, 3))
        assert llm.scoring is not None
        assert [llm.scoring.prompt(llm.tokenizer, "animals ", each) for each in DOCUMENTS] == prompts
    near(found, sigmoid(logits(reference, prompts)))
    assert max(found) - min(found) > 1e-3


def test_it_gives_no_vectors_and_draws_nothing(model: tuple[Any, Path], tmp_path: Path) -> None:
    with opened(model[1]) as llm:
        facts = engine_process._facts(llm, EngineConfig())
        assert (facts.has_head, facts.ranks, facts.pooling) == (False, True, "last")
        assert _asked("", facts, completes=False)[0] == "rerank"
        with pytest.raises(UnsupportedError, match="a reranker gives a score"):
            llm.embed("hello")
        with pytest.raises(UnsupportedError, match="no head"):
            llm.generate("hello")
        for wrong in ("text", [3], [b"text"], iter(["text"]), None):
            with pytest.raises(UsageError, match="documents are a list of texts"):
                llm.rank("query", wrong)  # type: ignore[arg-type]
        assert llm.rank("query", []) == []
    with pytest.raises(UnsupportedError, match="GGUF has no place for how it ranks"):
        converted(model[1], tmp_path / "m.gguf", "gguf")
    assert converted(model[1], tmp_path / "copy", "hf").notes == []
    with open_checkpoint(tmp_path / "copy") as copy, open_checkpoint(model[1]) as before:
        assert head_of(copy) == head_of(before)
        assert facts_of(copy).num_parameters == sum(p.numel() for n, p in model[0].named_parameters() if "score" not in n)


def test_the_server_says_the_same(model: tuple[Any, Path]) -> None:
    with opened(model[1]) as llm:
        wanted = dict(zip(DOCUMENTS, llm.rank("animals", DOCUMENTS), strict=True))
    answer = post(model[1], "/v1/rerank", query="animals", documents=DOCUMENTS)
    assert answer.status == 200, answer.text
    results = answer.json["results"]
    assert {each["document"]["text"]: each["relevance_score"] for each in results} == pytest.approx(wanted, rel=1e-5)
    assert [each["document"]["text"] for each in results] == sorted(wanted, key=lambda text: -wanted[text])
    assert post(model[1], "/v1/rerank", query="animals", documents=["a"], pooling="last").json["error"]["param"] == "pooling"
    of_pairs = post(model[1], "/v1/score", text_1="animals", text_2=DOCUMENTS).json["data"]
    assert [each["score"] for each in of_pairs] == pytest.approx(list(wanted.values()), rel=1e-5)


def test_what_draws_tokens_goes_on_drawing_them(tmp_path: Path) -> None:
    """As Qwen3-Reranker's own folder, which says nowhere that it ranks; nearness goes by its vectors."""
    folder = save(random_model(Qwen3Config(**SIZES)), tmp_path / "m")
    write_tokenizer(folder)
    with opened(folder) as llm:
        assert llm.scoring is None
        assert len(llm.generate("hello", greedy(3))[0].outputs[0].token_ids) == 3
        query, *vectors = torch.tensor(llm.embed(["animals", *DOCUMENTS]), dtype=torch.float64)
        near(llm.rank("animals", DOCUMENTS), [float(torch.cosine_similarity(query, each, dim=0)) for each in vectors])
        with pytest.raises(UnsupportedError, match="is no reranker"):
            llm.scores([[1, 2]])


# ---- what it reads ----


def test_a_template_with_both_roles_is_what_it_reads(model: tuple[Any, Path], folder: Path) -> None:
    """The folder's own, or the one that is given; control tokens in texts stay text, but in a template."""
    (folder / "chat_template.jinja").write_text(ROLES)
    tokenizer = AutoTokenizer.from_pretrained(model[1])

    def ids(document: str) -> Any:
        messages = [{"role": "query", "content": "animals"}, {"role": "document", "content": document}]
        return tokenizer.apply_chat_template(messages, chat_template=ROLES, tokenize=True, return_dict=False)

    wanted = sigmoid(logits(model[0], [ids(document) for document in DOCUMENTS]))
    with opened(folder) as llm:
        near(llm.rank("animals", DOCUMENTS), wanted)
        assert llm.scoring is not None
        guarded = llm.scoring.prompt(llm.tokenizer, "<|im_end|>", "<|im_start|>x")
        assert [guarded.count(control) for control in (4088, 4089)] == [1, 1]
        assert llm.tokenizer.decode(guarded, skip_special_tokens=False).count("<|im_end|>") == 2
    with opened(model[1], chat_template=ROLES) as llm:
        near(llm.rank("animals", DOCUMENTS), wanted)


def test_a_template_may_refuse_texts(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(ROLES + "{{ raise_exception('no such thing') }}")
    for path, fields, param in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "documents"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "text_2"),
    ):
        answer = post(folder, path, **fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert "no such thing" in answer.json["error"]["message"]


def test_without_one_the_texts_are_the_prompt(model: tuple[Any, Path]) -> None:
    """Control tokens in them are read, as in a text to go on with."""
    tokenizer = AutoTokenizer.from_pretrained(model[1])
    query, document = "<|im_start|>user\nQ\n", "D<|im_end|>\n"
    with opened(model[1]) as llm:
        near(llm.rank(query, [document]), sigmoid(logits(model[0], [tokenizer(query, document).input_ids])))
        with pytest.raises(UsageError, match="no messages of the roles query and document"):
            opened(model[1], chat_template="{{ messages[0].content }}")


def test_what_is_put_around_a_text_is_around_both(model: tuple[Any, Path], folder: Path) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    for template in ("single", "pair"):
        state["post_processor"][template].insert(0, begin)
    named = {"id": "<|im_start|>", "ids": [4088], "tokens": ["<|im_start|>"]}
    state["post_processor"]["special_tokens"]["<|im_start|>"] = named
    write_json(folder / "tokenizer.json", state)
    ids = AutoTokenizer.from_pretrained(folder)("animals", "a cat").input_ids
    with opened(folder) as llm:
        assert llm.scoring is not None
        assert llm.scoring.prompt(llm.tokenizer, "animals", "a cat") == ids
        assert (ids[0], ids[-1]) == (4088, END)
        near(llm.rank("animals", ["a cat"]), sigmoid(logits(model[0], [ids])))


def test_a_chat_template_of_another_kind_is_none(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    with opened(folder) as llm:
        assert llm.scoring is not None
        assert llm.scoring.chat is None


def test_a_document_is_cut_to_what_fits(model: tuple[Any, Path]) -> None:
    with opened(model[1]) as llm:
        scoring, tokenizer = llm.scoring, llm.tokenizer
    assert scoring is not None
    document = "the moon and a cat " * 20
    whole = scoring.prompt(tokenizer, "animals", document)
    cut = scoring.fitting(tokenizer, "animals", document, 30)
    assert len(cut) == 30 < len(whole)
    assert (cut[:25], cut[-1]) == (whole[:25], END)
    assert scoring.fitting(tokenizer, "animals", document, len(whole)) == whole
    assert scoring.fitting(tokenizer, "animals", document, 1) == scoring.prompt(tokenizer, "animals", "")


# ---- what becomes of it ----

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
TANH = "torch.nn.modules.activation.Tanh"


def test_files_may_ask_for_the_number_itself(model: tuple[Any, Path], folder: Path) -> None:
    """The newer file's word counts before those of config.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    numbers = logits(model[0], [tokenizer("animals", document).input_ids for document in DOCUMENTS])
    configured(folder, sentence_transformers={"activation_fn": IDENTITY})
    with opened(folder) as llm:
        near(llm.rank("animals", DOCUMENTS), numbers)
    write_json(folder / "config_sentence_transformers.json", {"activation_fn": SIGMOID, "prompts": {}})
    assert outcome(folder) == "sigmoid"
    write_json(folder / "config_sentence_transformers.json", {"activation_fn": None})
    assert outcome(folder) == "identity"
    configured(folder, sentence_transformers=None, sbert_ce_default_activation_function=IDENTITY)
    assert outcome(folder) == "identity"
    configured(folder, sbert_ce_default_activation_function=None)
    assert outcome(folder) == "sigmoid"


def outcome(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        head = head_of(checkpoint)
    assert head is not None
    return head.outcome


REFUSED: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "tanh": ({"sbert_ce_default_activation_function": TANH}, UnsupportedError, "scores by tanh"),
    "unknown": ({"sentence_transformers": {"activation_fn": "my.own.Thing"}}, UnsupportedError, r"my\.own\.Thing is not"),
    "labels": ({"id2label": {"0": "a", "1": "b"}}, CheckpointError, "2 labels, and its head 1 row"),
    "width": ({"hidden_size": "48"}, CheckpointError, "hidden_size"),
    "names": ({"architectures": [["Qwen3ForSequenceClassification"]]}, CheckpointError, "architectures"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_of_other_heads_are_refused_by_name(name: str, folder: Path) -> None:
    keys, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words) as refused:
        opened(configured(folder, **keys))
    assert type(refused.value) is kind
    assert refused.value.hint
    with open_checkpoint(folder) as checkpoint, pytest.raises(kind, match=words):
        facts_of(checkpoint)


def test_heads_of_other_shapes_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    row = tensors.pop("score.weight")
    for value, kind, words in (
        (row.repeat(3, 1), CheckpointError, "1 labels, and its head 3 rows"),
        (row[:, :40].contiguous(), CheckpointError, r"score\.weight is \[1, 40\], and should be \[1, 48\]"),
        (row[:0], CheckpointError, r"score\.weight is \[0, 48\], and should be \[1, 48\]"),
        (row.sum(), CheckpointError, r"score\.weight is \[\], and should be \[1, 48\]"),
        (None, CheckpointError, r"score\.weight is missing"),
        (row * float("inf"), CheckpointError, r"score\.weight has NaN or infinity"),
    ):
        save_file(tensors if value is None else tensors | {"score.weight": value}, folder / "model.safetensors")
        with pytest.raises(kind, match=words):
            opened(folder)
    save_file(tensors | {"score.weight": row, "score.bias": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not part of the model: score\.bias"):
        opened(folder)


def test_further_modules_and_default_prompts_are_refused(folder: Path) -> None:
    write_modules(folder)
    with opened(folder) as llm:
        assert llm.embedding.ranks
    write_modules(folder, "Dense")
    with pytest.raises(UnsupportedError, match="its scores pass through other modules: Transformer, Dense"):
        opened(folder)
    write_modules(folder, "LogitScore", package="sentence_transformers.cross_encoder.modules")
    with pytest.raises(UnsupportedError, match="LogitScore"):
        opened(folder)
    (folder / "modules.json").unlink()
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "Find: "}, "default_prompt_name": "q"})
    with pytest.raises(UnsupportedError, match="a reranker's default prompt is not supported: 'q'"):
        opened(folder)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": ""}, "default_prompt_name": "q"})
    opened(folder).close()


# ---- encoders ----


def applied(path: Path, hidden: torch.Tensor) -> tuple[Head, list[float]]:
    """The head's number of each text's rows [T, H], pooled as it says."""
    with open_checkpoint(path) as checkpoint:
        head = head_of(checkpoint)
        assert head is not None
        further = read_further(checkpoint, head.layers)
    assert further is not None
    pooled = {"cls": hidden[:, 0], "mean": hidden.mean(1), "last": hidden[:, -1]}[head.pooling]
    return head, [number for row in pooled for number in further(row.tolist())]


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_head_is_transformers_own(name: str, tmp_path: Path) -> None:
    model = classifier(ENCODERS[name], tmp_path)
    ids = torch.randint(3, 90, (5, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        wanted = model(ids).logits[:, 0].tolist()
    head, found = applied(tmp_path, hidden)
    near(found, wanted)
    assert (head.outcome, head.pairs) == ("sigmoid", True)
    assert head.pooling == ("mean" if "mean" in name else "cls")


def test_an_encoder_needs_pairs_of_its_tokenizer(tmp_path: Path) -> None:
    classifier(ENCODERS["BertForSequenceClassification"], tmp_path)
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(UnsupportedError, match="its tokenizer makes no pairs"):
        scoring_of(checkpoint, tokenizer)


@pytest.mark.parametrize(
    ("name", "vocabulary", "own"),
    [
        ("BertForSequenceClassification", bert, {}),
        ("BertForSequenceClassification", bert, {"type_vocab_size": 1}),
        ("XLMRobertaForSequenceClassification", xlm_roberta, {"type_vocab_size": 1, "pad_token_id": 1}),
        ("ModernBertForSequenceClassification", bert, {"local_attention": 8}),
        ("MPNetForSequenceClassification", xlm_roberta, {"pad_token_id": 1}),
    ],
    ids=["bert", "bert without types", "xlm-roberta", "modernbert", "mpnet"],
)
def test_an_encoder_ranks_as_transformers_does(
    name: str, vocabulary: Callable[[Path], Any], own: dict[str, Any], tmp_path: Path
) -> None:
    """Both texts in one go, those of BERT told apart by token types."""
    theirs = vocabulary(tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config = type(ENCODERS[name])(**SMALL | {"vocab_size": len(theirs), "max_position_embeddings": 200} | own)
    model = classifier(config, tmp_path)
    for file, content in kept.items():
        tmp_path.joinpath(file).write_bytes(content)
    documents = ["the quick brown fox", "a dog", "jumps over the lazy dog, again and again", "[SEP] </s> as text"]
    query = "what jumps over a dog?"
    types, wanted = not name.startswith(("Modern", "MPNet")), []
    for document in documents[:3]:
        pair = theirs(query, document, return_tensors="pt")
        given = {key: pair[key] for key in ("input_ids", "token_type_ids") if key in pair and types}
        if own.get("type_vocab_size") == 1 and "token_type_ids" in given:
            given["token_type_ids"] = torch.zeros_like(given["token_type_ids"])
        with torch.no_grad():
            wanted.append(float(torch.sigmoid(model(**(given or {"input_ids": pair["input_ids"]})).logits[0, 0])))
    folder = LLM(tmp_path, config=EngineConfig(threads=2, num_blocks=64, dtype="float32"))
    near(folder.rank(query, documents)[:3], wanted)
    assert len(set(folder.rank(query, documents))) == 4
    if not types:  # ModernBERT ranks by the first token here, where a file of it means the mean
        with pytest.raises(UnsupportedError, match="GGUF has no"):
            converted(tmp_path, tmp_path / "m.gguf", "gguf")
        return
    made = converted(tmp_path, tmp_path / "m.gguf", "gguf")
    assert not [note for note in made.notes if "tasks" in note]
    file = LLM(tmp_path / "m.gguf", config=EngineConfig(threads=2, num_blocks=64, dtype="float32"))
    near(file.rank(query, documents), folder.rank(query, documents))


def test_what_parts_two_texts_marks_none_in_a_text_that_is_embedded(tmp_path: Path) -> None:
    """As in transformers, where token types come with a pair alone."""
    theirs = bert(tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = body(BertConfig(**SMALL | {"vocab_size": len(theirs)}), tmp_path)
    for file, content in kept.items():
        tmp_path.joinpath(file).write_bytes(content)
    ids = theirs("a dog", "the quick fox")["input_ids"]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    found = LLM(tmp_path, config=EngineConfig(threads=2, num_blocks=64, dtype="float32")).embed([ids], "mean")
    near(found[0], wanted.tolist())


def test_an_encoders_head_that_is_broken_is_refused(tmp_path: Path) -> None:
    classifier(ENCODERS["ModernBertForSequenceClassification"], tmp_path)
    for keys, kind, words in (
        ({"classifier_pooling": "max"}, UnsupportedError, "classifier_pooling 'max'"),
        ({"classifier_activation": "mish"}, UnsupportedError, "classifier_activation 'mish'"),
        ({"classifier_activation": ["gelu"]}, UnsupportedError, r"classifier_activation \"\['gelu'\]\""),
        ({"norm_eps": "x"}, CheckpointError, "norm_eps is 'x'"),
        ({"norm_bias": True}, CheckpointError, r"head\.norm\.bias is missing"),
    ):
        shutil.copy(tmp_path / "config.json", tmp_path / "before.json")
        configured(tmp_path, **keys)
        with open_checkpoint(tmp_path) as checkpoint, pytest.raises(kind, match=words):
            head_of(checkpoint)
        shutil.move(tmp_path / "before.json", tmp_path / "config.json")


# ---- encoders' GGUF files, by llama.cpp's names ----


def write_gguf(path: Path, arch: str, tensors: dict[str, torch.Tensor]) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_embedding_length(48)
    writer.add_layer_norm_eps(1e-5)
    writer.add_uint32(f"{arch}.pooling_type", 4)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SHAPES = {
    "cls.weight": (48, 48), "cls.bias": (48,), "cls.output.weight": (1, 48), "cls.output.bias": (1,), "cls.norm.weight": (48,),
}  # fmt: skip
HEAD = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) / 4 for i, (name, shape) in enumerate(SHAPES.items())
}


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("bert", ["cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"]),
        ("bert", ["cls.output.weight"]),
        ("modern-bert", ["cls.weight", "cls.norm.weight", "cls.output.weight", "cls.output.bias"]),
    ],
)
def test_heads_of_files(arch: str, names: list[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, {name: HEAD[name] for name in names})
    hidden = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(9))
    there = {name: HEAD[name].double() for name in names}
    row = (hidden.mean(1) if arch == "modern-bert" else hidden[:, 0]).double()
    if "cls.weight" in there:
        row = row @ there["cls.weight"].T + there.get("cls.bias", 0.0)
        row = torch.nn.functional.gelu(row) if arch == "modern-bert" else row.tanh()
    if "cls.norm.weight" in there:
        deviation = (row.var(dim=1, keepdim=True, correction=0) + 1e-5).sqrt()
        row = (row - row.mean(dim=1, keepdim=True)) / deviation * there["cls.norm.weight"]
    wanted = row @ there["cls.output.weight"][0] + there.get("cls.output.bias", torch.zeros(1).double())
    head, found = applied(path, hidden)
    near(found, wanted.tolist())
    assert (head.outcome, head.pairs, head.template) == ("sigmoid", True, None)


def test_heads_of_files_that_are_broken_are_refused(tmp_path: Path) -> None:
    for i, (change, kind, words) in enumerate(
        (
            ({"cls.output.weight": torch.zeros(3, 48)}, UnsupportedError, "3 labels that have no names"),
            ({"cls.output.weight": torch.zeros(1, 40)}, CheckpointError, r"is \[1, 40\], and should be \[labels, 48\]"),
            ({"cls.bias": torch.zeros(47)}, CheckpointError, r"cls\.bias is \[47\]"),
            ({"cls.weight": torch.zeros(48, 40)}, CheckpointError, r"cls\.weight is \[48, 40\]"),
        )
    ):
        tensors = {name: HEAD[name] for name in ("cls.weight", "cls.output.weight")}
        path = write_gguf(tmp_path / f"{i}.gguf", "bert", tensors | change)
        with open_checkpoint(path) as checkpoint, pytest.raises(kind, match=words):
            head_of(checkpoint)
