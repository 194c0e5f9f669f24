"""Files of rerankers, as llama.cpp's converter makes them of Qwen3-Reranker, against transformers' model with a head."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFValue
from transformers import AutoTokenizer, Qwen3Config

from embedders import SIZES, write_tokenizer
from engines import random_model, save
from nanovllm_cli import LLM
from nanovllm_cli.cli.serve import _asked
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.model_spec import Pooling
from nanovllm_cli.server import engine_process
from nanovllm_cli.server.ports import Caller
from nanovllm_cli.server.served_models import ModelSettings, open_text_side
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_tensors import Step
from nanovllm_cli.weights.heads import head_of
from nanovllm_cli.weights.scoring import Scoring, in_a_row
from server_fakes import FakeGenerates, FakeModels
from server_requests import Answer, Door

TEMPLATE = "<|im_start|>Judge.<|im_end|>\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
YES, NO = 300, 400
DOCUMENTS = ["a cat", "the moon", "{query} <|im_end|> seven", "dogs"]


def write_reranker(folder: Path, path: Path, **keys: Any) -> None:
    """The folder as a GGUF file, with the rows of its head for two tokens in place of the head."""
    rank = {
        "qwen3.pooling_type": GGUFValue(int(gguf.PoolingType.RANK), GGUFValueType.UINT32),
        "qwen3.classifier.output_labels": GGUFValue(["yes", "no"], GGUFValueType.ARRAY, GGUFValueType.STRING),
        "tokenizer.chat_template.rerank": GGUFValue(TEMPLATE, GGUFValueType.STRING),
        "tokenizer.chat_templates": GGUFValue(["rerank"], GGUFValueType.ARRAY, GGUFValueType.STRING),
    }
    with open_checkpoint(folder) as checkpoint:
        made = convert.plan(checkpoint, "gguf")
        made.header |= rank | keys
        rows = checkpoint.tensor("lm_head.weight")[[YES, NO]].clone()
        made.steps = [step for step in made.steps if step.name != "output.weight"]
        made.steps.append(Step.made("cls.output.weight", rows))
        made.is_known = False
        convert.write(checkpoint, made, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save(random_model(Qwen3Config(**SIZES)), tmp_path_factory.mktemp("model") / "m")
    write_tokenizer(found)
    return found


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    write_reranker(folder, folder.parent / "m.gguf")
    return folder.parent / "m.gguf"


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, float]:
    return probabilities(folder)


def probabilities(folder: Path) -> dict[str, float]:
    """Of yes against no behind each prompt, of the documents without control tokens, which are text there."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def ids(document: str) -> list[int]:
        text = TEMPLATE.replace("{document}", document, 1).replace("{query}", "animals", 1)
        found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return found

    with torch.no_grad():
        logits = {each: model(torch.tensor([ids(each)])).logits[0, -1].double() for each in DOCUMENTS if "<|" not in each}
    return {each: float(row[[YES, NO]].softmax(0)[0]) for each, row in logits.items()}


class Generates(FakeGenerates):
    """Embeds by the model itself."""

    def __init__(self, llm: LLM, scoring: Scoring) -> None:
        super().__init__(models=WithScoring(llm, scoring))
        self.llm = llm

    async def embed(
        self,
        model: str | None,
        texts: Sequence[str | Sequence[int]],
        pooling: Pooling,
        caller: Caller,
        *,
        priority: int = 0,
        normalize: bool = True,
        most: int | None = None,
    ) -> tuple[list[Sequence[float]], int]:
        assert (pooling, normalize) == ("last", False)
        for i, text in enumerate(texts):
            self.llm.engine.embed(str(i), list(text), pooling)  # type: ignore[arg-type]
        done: dict[str, Sequence[float]] = {}
        while self.llm.engine.has_unfinished():
            done |= {output.request_id: output.pooled for output in self.llm.engine.step() if output.pooled is not None}
        return [done[str(i)] for i in range(len(texts))], sum(map(len, texts))


class WithScoring(FakeModels):
    def __init__(self, llm: LLM, scoring: Scoring) -> None:
        super().__init__(tokenizer=llm.tokenizer, pooling=llm.pooling)
        self._scoring = scoring

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Any]:
        import dataclasses

        async with super().use(name) as model:
            yield dataclasses.replace(model, scoring=self._scoring)


def post(file: Path, path: str, **fields: Any) -> Answer:
    scoring = open_text_side(ModelSettings(("m",), file, EngineConfig())).scoring
    assert scoring is not None
    with LLM(file, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        answer: Answer = Door(Generates(llm, scoring)).post(path, fields)
    return answer


def test_scores_are_the_probability_of_yes(file: Path, wanted: dict[str, float]) -> None:
    answer = post(file, "/v1/rerank", query="animals", documents=DOCUMENTS)
    assert answer.status == 200, answer.text
    scores = {each["document"]["text"]: each["relevance_score"] for each in answer.json["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert {text: scores[text] for text in wanted} == pytest.approx(wanted, rel=1e-4)
    assert 0 < scores[DOCUMENTS[2]] < 1
    assert len(post(file, "/v1/rerank", query="animals", documents=DOCUMENTS, top_n=2).json["results"]) == 2
    of_pairs = post(file, "/v1/score", text_1="animals", text_2=DOCUMENTS).json["data"]
    assert {text: each["score"] for text, each in zip(DOCUMENTS, of_pairs, strict=True)} == scores


def test_control_tokens_are_the_templates_alone(file: Path) -> None:
    with LLM(file, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        assert llm.scoring is not None
        ids = llm.scoring.prompt(llm.tokenizer, "<|im_end|>", "{query}<|im_start|>")
        text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == TEMPLATE.replace("{document}", "{query}<|im_start|>").replace("{query}", "<|im_end|>", 1)
    assert [ids.count(control) for control in (4088, 4089)] == [2, 2]


def test_it_makes_no_vectors_and_draws_nothing(file: Path, tmp_path: Path) -> None:
    for path, fields in (("/v1/embeddings", {"input": "a"}), ("/embeddings", {"content": "a"})):
        answer = post(file, path, **fields)
        assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported")
    assert post(file, "/v1/rerank", query="a", documents=["b"], pooling="mean").json["error"]["param"] == "pooling"
    with LLM(file, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        facts = engine_process._facts(llm, EngineConfig())
        assert (facts.has_head, facts.ranks, _asked("r", facts, completes=True)[0]) == (False, True, "rerank")
        with pytest.raises(UnsupportedError, match="a reranker gives a score"):
            llm.embed("hello")
        with pytest.raises(UnsupportedError, match="no head"):
            llm.generate("hello")
    with convert.open_source(file) as source:
        with pytest.raises(NanovllmError, match="how it ranks"):
            convert.plan(source, "hf")
        convert.write(source, convert.plan(source, "gguf"), tmp_path / "copy.gguf")
    with open_checkpoint(tmp_path / "copy.gguf") as checkpoint, open_checkpoint(file) as before:
        assert head_of(checkpoint) == head_of(before)


OTHERS = {
    "labels": {"qwen3.classifier.output_labels": GGUFValue(["no", "yes"], GGUFValueType.ARRAY, GGUFValueType.STRING)},
    "template": {"tokenizer.chat_template.rerank": GGUFValue("{query} alone", GGUFValueType.STRING)},
    "twice": {"tokenizer.chat_template.rerank": GGUFValue("{query}{query}{document}", GGUFValueType.STRING)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    write_reranker(folder, tmp_path / "m.gguf", **OTHERS[name])
    with pytest.raises(UnsupportedError, match="a reranker that does not answer yes or no"):
        LLM(tmp_path / "m.gguf", config=EngineConfig(threads=2, num_blocks=64))


def test_such_rows_are_part_of_no_other_model(folder: Path, tmp_path: Path) -> None:
    last = GGUFValue(int(gguf.PoolingType.LAST), GGUFValueType.UINT32)
    write_reranker(folder, tmp_path / "m.gguf", **{"qwen3.pooling_type": last})
    with pytest.raises(CheckpointError, match=r"not part of the model: cls\.output\.weight"):
        LLM(tmp_path / "m.gguf", config=EngineConfig(threads=2, num_blocks=64))


def test_scores_stay_in_bounds() -> None:
    of_two, of_one = Scoring("yes", in_a_row), Scoring("sigmoid", in_a_row)
    assert [of_two.score([1000 * x, -1000 * x]) for x in (1.0, 0.0, -1.0)] == [1.0, 0.5, 0.0]
    assert [of_one.score([1000 * x]) for x in (1.0, 0.0, -1.0)] == [1.0, 0.5, 0.0]
    assert of_one.score([0.7]) == pytest.approx(1 / (1 + math.exp(-0.7)), rel=1e-12)
    assert Scoring("identity", in_a_row).score([-3.5]) == -3.5
