"""Embedding models built on decoders: folders without a head, what they pool by, GGUF files of them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFValue
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from embedders import END, SIZES, body, write_json, write_modules, write_pooling, write_tokenizer
from engines import engine_for, greedy, run, save, worker_for
from engines import random_model as random_causal
from nanovllm_cli import LLM
from nanovllm_cli.cli.serve import _asked
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.server import engine_process
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.files import choose
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.pooling import Embedding, embedding_of
from nanovllm_cli.weights.quantized import open_reader
from test_convert import converted, tensors
from test_delta import DELTA, DELTA_LAYERS, SHAPE
from test_embeddings import embed, near

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, Any] = {
    "Qwen3Model": Qwen3Config(**SIZES),
    "Qwen2Model": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "LlamaModel": LlamaConfig(**SIZES),
    "MistralModel": MistralConfig(**SIZES | {"sliding_window": 20}),
    "Gemma2Model": Gemma2Config(**SIZES | {"sliding_window": 20}),
    "Gemma3TextModel": Gemma3TextConfig(**SIZES | {"sliding_window": 20}),
    "MixtralModel": MixtralConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3MoeModel": Qwen3MoeConfig(**SIZES | EXPERTS),
    "Qwen2MoeModel": Qwen2MoeConfig(**SIZES | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Qwen3_5TextModel": Qwen3_5TextConfig(**SHAPE | {"vocab_size": 4100}, **DELTA, layer_types=DELTA_LAYERS),
}
TEXTS = ("Once upon a time", "a cat\nsat", "")


def pooled(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """hidden [T, H]."""
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]


def references(model: Any, folder: Path, pooling: str) -> list[torch.Tensor]:
    """transformers' tokens, through its model, pooled."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        each = [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].double() for text in TEXTS]
    return [pooled(hidden, pooling) for hidden in each]


def opened(path: Path) -> LLM:
    return LLM(path, config=EngineConfig(threads=2, num_blocks=64))


def head_of(path: Path) -> bool:
    with open_checkpoint(path) as checkpoint:
        return read_spec(checkpoint, open_reader(checkpoint)).has_head


def settings(path: Path) -> Embedding:
    with open_checkpoint(path) as checkpoint:
        return embedding_of(checkpoint)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Qwen3's body, of the last token, with an end behind each text."""
    folder = tmp_path_factory.mktemp("model") / "m"
    found = body(FAMILIES["Qwen3Model"], folder)
    write_tokenizer(folder)
    write_pooling(folder, "last")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Find: ", "document": ""}})
    return found, folder


@pytest.fixture
def folder(model: tuple[Any, Path], tmp_path: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(model[1], tmp_path / "m"))


@pytest.fixture(scope="module")
def file(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    made = converted(model[1], path, "gguf")
    assert made.notes == ["prompts of texts to be embedded: query"]
    return path


# ---- loading ----


@pytest.mark.parametrize("name", FAMILIES)
def test_a_body_embeds_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    model = body(FAMILIES[name], tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == [name]
    assert not any(key.startswith("model.") for key in load_file(tmp_path / "m" / "model.safetensors"))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, 4000, (count,), generator=generator).tolist() for count in (1, 17, 33)]
    worker = worker_for(tmp_path / "m")
    poolings: tuple[Pooling, ...] = ("mean", "last", "cls")
    for pooling in poolings:
        with torch.no_grad():
            wanted = [pooled(model(torch.tensor([text])).last_hidden_state[0].double(), pooling) for text in texts]
        near(embed(engine_for(worker), texts, pooling), wanted)


def test_it_pools_as_its_files_say_and_draws_nothing(model: tuple[Any, Path]) -> None:
    transformer, folder = model
    with opened(folder) as llm:
        assert (llm.pooling, llm.spec.has_head) == ("last", False)
        assert llm.tokenizer.encode("")[-1] == END
        near([torch.tensor(v, dtype=torch.float64) for v in llm.embed(TEXTS)], references(transformer, folder, "last"))
        near([torch.tensor(v, dtype=torch.float64) for v in llm.embed(TEXTS, "mean")], references(transformer, folder, "mean"))
        done: list[tuple[int, int]] = []
        llm.embed(TEXTS, progress=lambda *counts: done.append(counts))
        assert done == [(1, 3), (2, 3), (3, 3)]
        for refused in (lambda: llm.generate("hello"), lambda: list(llm.stream("hello"))):
            with pytest.raises(UnsupportedError, match="embeds, ranks or labels"):
                refused()
        assert not llm.engine.has_unfinished()


def renamed(folder: Path, bare: Path, **config: Any) -> Path:
    """A model with a head, whose tensors lose their prefix, and an untied head altogether."""
    shutil.copytree(folder, bare)
    there = load_file(folder / "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in there.items() if k != "lm_head.weight"}, bare / "model.safetensors")
    write_json(bare / "config.json", json.loads((folder / "config.json").read_text()) | config)
    return bare


def test_a_tied_head_needs_no_prefix_to_draw(tmp_path: Path) -> None:
    whole = save(random_causal(Qwen3Config(**SIZES | {"tie_word_embeddings": True})), tmp_path / "whole")
    bare = renamed(whole, tmp_path / "bare")
    assert head_of(bare)
    answers = [run(engine_for(worker_for(each)), [([5, 6, 7], greedy(8))])[0].outputs[0].token_ids for each in (whole, bare)]
    assert answers[0] == answers[1]


def test_a_head_that_is_missing_is_no_matter_of_embedding_models_alone(tmp_path: Path) -> None:
    """Under the names that a model with a head has, an untied one is missed, unless the folder says that it embeds."""
    whole = save(random_causal(Qwen3Config(**SIZES)), tmp_path / "whole")
    assert head_of(whole)
    assert not head_of(renamed(whole, tmp_path / "bare"))
    there = load_file(whole / "model.safetensors")
    del there["lm_head.weight"]
    save_file(there, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        worker_for(whole)
    write_pooling(whole, "last")
    assert not head_of(whole)
    worker_for(whole)


def test_it_guesses_nothing(model: tuple[Any, Path]) -> None:
    with pytest.raises(UnsupportedError, match="which guesses nothing"):
        LLM("tiny", config=EngineConfig(threads=2, num_blocks=64, draft_model=str(model[1])))


def test_a_server_is_told(model: tuple[Any, Path]) -> None:
    with opened(model[1]) as llm:
        facts = engine_process._facts(llm, EngineConfig())
    assert (facts.pooling, facts.has_head, facts.ranks) == ("last", False, False)
    assert _asked("", facts, completes=False)[0] == "embeddings"


# ---- how it pools ----

CONFIGS: dict[str, tuple[dict[str, Any], Pooling]] = {
    "a flag": ({"pooling_mode_lasttoken": True}, "last"),
    "one of several flags": ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
    "by name": ({"pooling_mode": "lasttoken"}, "last"),
    "by a short name": ({"pooling_mode": "mean"}, "mean"),
    "a list": ({"pooling_mode": ["cls"]}, "cls"),
    "nothing said": ({"word_embedding_dimension": 48}, "mean"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_poolings_by_their_words(name: str, folder: Path) -> None:
    config, pooling = CONFIGS[name]
    write_json(folder / "1_Pooling" / "config.json", config)
    assert settings(folder).pooling == pooling
    (folder / "modules.json").unlink()
    assert settings(folder).pooling == pooling


def test_modules_name_the_folder_of_the_pooling(folder: Path) -> None:
    (folder / "1_Pooling").rename(folder / "2_Pool")
    write_modules(folder, "Pooling", package="sentence_transformers.sentence_transformer.modules")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "2_Pool"
    write_json(folder / "modules.json", modules)
    assert settings(folder).pooling == "last"
    write_modules(folder)
    assert settings(folder).pooling is None
    with opened(folder) as llm:
        assert llm.pooling == "mean"


BROKEN: dict[str, tuple[str, Any, type[NanovllmError], str]] = {
    "dense": ("modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "2_Dense", "type": "x.Dense"}], UnsupportedError,
              "Dense"),
    "outside": ("modules.json", [{"path": "../other", "type": "x.Pooling"}], CheckpointError, "modules"),
    "no list": ("modules.json", {"a": 1}, CheckpointError, "modules"),
    "no types": ("modules.json", [{"path": "1_Pooling"}], CheckpointError, "modules"),
    "not there": ("modules.json", [{"path": "9_Pooling", "type": "x.Pooling"}], CheckpointError, "no such file"),
    "two modes": ("1_Pooling/config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, UnsupportedError,
                  "mean_tokens"),
    "another mode": ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, UnsupportedError, "max_tokens"),
    "another name": ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, UnsupportedError, "weightedmean"),
    "no mode": ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, CheckpointError, "no mode"),
    "no object": ("1_Pooling/config.json", [1], CheckpointError, "object"),
    "prompts": ("config_sentence_transformers.json", {"prompts": {"query": 3}}, CheckpointError, "prompts"),
    "default": ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "q"}, CheckpointError, "default"),
    "defaults": ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": ["q"]}, CheckpointError, "default"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_vectors_are_made_by_otherwise_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    path, value, kind, words = BROKEN[name]
    write_json(folder / path, value)
    with pytest.raises(kind, match=words) as refused:
        opened(folder)
    with open_checkpoint(folder) as checkpoint, pytest.raises(kind, match=words):
        facts_of(checkpoint)
    with pytest.raises(kind, match=words):
        converted(folder, tmp_path / "m.gguf", "gguf")
    assert type(refused.value) is kind
    assert refused.value.hint


def test_with_a_head_it_answers_all_the_same(tmp_path: Path) -> None:
    """As a reranker's folder, which is a model that chats with a module behind it."""
    folder = save(random_causal(Qwen3Config(**SIZES)), tmp_path / "m")
    write_tokenizer(folder)
    write_modules(folder, "LogitScore", package="sentence_transformers.cross_encoder.modules.logit_score")
    with opened(folder) as llm:
        assert len(llm.generate("hello", greedy(3))[0].outputs[0].token_ids) == 3
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="a module that is not supported: LogitScore"):
                llm.embed("hello")
        assert not llm.engine.has_unfinished()
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).embedding.refusal is not None
    notes = converted(folder, tmp_path / "m.gguf", "gguf").notes
    assert [note.split(":")[0] for note in notes] == ["how it makes vectors of texts"]


def test_prompts_by_name() -> None:
    found = Embedding("mean", {"query": "Q: ", "document": ""}, "query")
    assert [found.prompt(name, "mean") for name in (None, "query", "document")] == ["Q: ", "Q: ", ""]
    assert Embedding().prompt(None, "mean") == ""
    with pytest.raises(UsageError, match="no prompt 'passage'") as refused:
        found.prompt("passage", "mean")
    assert "document, query" in str(refused.value.hint)
    apart = found._replace(pools_prompt=False)
    assert apart.prompt("query", "last") == "Q: "
    assert apart.prompt("document", "mean") == ""
    with pytest.raises(UnsupportedError, match="not to be part of the mean"):
        apart.prompt("query", "mean")


def test_the_hub_is_asked_for_all_that_says_so() -> None:
    inner = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    named = [*inner, "config.json", "config_sentence_transformers.json", "modules.json", "tokenizer.json"]
    others = ["0_Model/model.safetensors", "2_Dense/other.bin", "onnx/model.onnx", "sub/config.json", "1_Pooling/other.json"]
    assert choose([*named, *others, "model.safetensors"], "r").files == (*named, "model.safetensors")


# ---- GGUF ----


def with_keys(file: Path, path: Path, **keys: Any) -> Path:
    """The same with other metadata."""
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32}
    with convert.open_source(file) as source:
        made = convert.plan(source, "gguf")
        made.header |= {key: GGUFValue(value, kinds[type(value)]) for key, value in keys.items()}
        with path.open("wb") as out:
            GGUFPartWriter(out, made.header, made.gguf_tensors()).write_all(convert._slices(source, made), _Silent())
    return path


class _Silent:
    def advance(self, n: int) -> None:
        pass


def test_a_file_says_what_llama_cpp_reads(file: Path, model: tuple[Any, Path]) -> None:
    """gguf-py's reader and enumeration; the end of a text becomes EOS, EOS an end of turn, as llama.cpp's converter has it."""
    reader = gguf.GGUFReader(file)
    said = {key: field.contents() for key, field in reader.fields.items()}
    assert said["qwen3.pooling_type"] == gguf.PoolingType.LAST
    assert (said["tokenizer.ggml.add_eos_token"], said["tokenizer.ggml.eos_token_id"]) == (True, END)
    assert said["tokenizer.ggml.eot_token_id"] == 4089
    assert "output.weight" not in {tensor.name for tensor in reader.tensors}
    transformer, folder = model
    with opened(file) as llm:
        assert (llm.pooling, llm.spec.has_head) == ("last", False)
        near([torch.tensor(v, dtype=torch.float64) for v in llm.embed(TEXTS)], references(transformer, folder, "last"))
        assert set(llm.tokenizer.eos_ids) == {END, 4089}
        with pytest.raises(UnsupportedError, match="embeds, ranks or labels"):
            llm.generate("hello")


def test_a_file_becomes_the_folder_that_it_was(file: Path, model: tuple[Any, Path], tmp_path: Path) -> None:
    transformer, folder = model
    back = tmp_path / "back"
    assert converted(file, back, "hf").notes == []
    before, after = tensors(folder), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((back / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["Qwen3Model"], False)
    assert settings(back) == Embedding("last")
    assert not head_of(back)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(back)(ids).last_hidden_state
        torch.testing.assert_close(theirs, transformer(ids).last_hidden_state)
    assert AutoTokenizer.from_pretrained(back)("a cat").input_ids == AutoTokenizer.from_pretrained(folder)("a cat").input_ids


@pytest.mark.parametrize(
    ("kind", "pooling"), [(gguf.PoolingType.MEAN, "mean"), (gguf.PoolingType.CLS, "cls"), (gguf.PoolingType.NONE, None)]
)
def test_poolings_of_files(kind: gguf.PoolingType, pooling: str | None, file: Path, tmp_path: Path) -> None:
    """One that says nothing has a tied head, by what GGUF means."""
    path = with_keys(file, tmp_path / "m.gguf", **{"qwen3.pooling_type": int(kind)})
    assert (settings(path).pooling, head_of(path)) == (pooling, pooling is None)


def test_rerankers_of_another_kind_and_other_numbers_are_refused(file: Path, tmp_path: Path) -> None:
    """A file without the rows and the prompt."""
    with pytest.raises(UnsupportedError, match="a reranker that does not answer yes or no"):
        opened(with_keys(file, tmp_path / "rank.gguf", **{"qwen3.pooling_type": int(gguf.PoolingType.RANK)}))
    with pytest.raises(CheckpointError, match="pooling_type is 9"):
        opened(with_keys(file, tmp_path / "nine.gguf", **{"qwen3.pooling_type": 9}))


def test_a_copy_keeps_its_files_and_says_what_it_leaves(folder: Path, tmp_path: Path) -> None:
    assert converted(folder, tmp_path / "half", "hf", "bf16").notes == []
    assert settings(tmp_path / "half") == settings(folder)
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"x")
    (folder / "2_Dense" / "other.txt").write_bytes(b"x")
    assert converted(folder, tmp_path / "again", "hf").notes == ["files: 2_Dense/other.txt"]
    assert (tmp_path / "again" / "2_Dense" / "model.safetensors").read_bytes() == b"x"


def test_facts_name_it(model: tuple[Any, Path]) -> None:
    with open_checkpoint(model[1]) as checkpoint:
        facts = facts_of(checkpoint)
    assert facts.embedding == settings(model[1])
    assert facts.num_parameters == sum(parameter.numel() for parameter in model[0].parameters())
    assert not dataclasses.asdict(facts)["spec"]["has_head"]
