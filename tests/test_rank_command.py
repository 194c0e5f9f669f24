"""`nanovllm embed --query` with a model that ranks, as its users see it: a folder with a head, a file that says yes or no."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer, Qwen3Config

from embedders import SIZES, body, write_json, write_tokenizer
from engines import random_model, save
from nanovllm_cli.cli import habits
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_dense_modules import write_chain, write_dense
from test_rerank_heads import DECODERS, ROLES, classifier, logits, sigmoid
from test_reranking import probabilities, write_reranker

CONTEXT = 64
TEXTS = ["a cat", "the moon", "seven", "a dog ran\thome"]


class Ranker(NamedTuple):
    folder: Path
    reference: Any

    def scores(self, query: str, texts: list[str]) -> dict[str, float]:
        """transformers' tokenizer and model."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        found = sigmoid(logits(self.reference, [tokenizer(query, text).input_ids for text in texts]))
        return dict(zip(texts, found, strict=True))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Ranker:
    folder = tmp_path_factory.mktemp("model") / "ranker"
    reference = classifier(DECODERS["Qwen3ForSequenceClassification"], folder)
    write_tokenizer(folder)
    return Ranker(folder, reference)


class Rank:
    """The command, in this process."""

    def __init__(self, doors: Doors, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._doors, self._folder, self._patch = doors, folder, monkeypatch

    def __call__(self, *words: str, stdin: str = "", model: Path | None = None) -> tuple[int, str, str]:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return self._doors.command("embed", str(model or self._folder), *words, "-t", "2", "-c", str(CONTEXT))

    def found(self, *words: str, stdin: str = "", model: Path | None = None) -> list[tuple[float, str]]:
        code, out, err = self(*words, stdin=stdin, model=model)
        assert code == 0, err
        pairs = (line.split("\t") for line in out.splitlines())
        return [(float(score), text) for score, text in pairs]

    def refused(self, code: int, *words: str, **more: Any) -> str:
        found, out, err = self(*words, **more)
        assert (found, out) == (code, ""), err
        assert "error: " in err
        assert "Traceback" not in err
        return err


@pytest.fixture
def rank(doors: Doors, ranker: Ranker, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(doors, ranker.folder, monkeypatch)


def best_first(scores: dict[str, float]) -> list[tuple[Any, str]]:
    ordered = sorted(scores, key=lambda text: -scores[text])
    return [(pytest.approx(scores[text], abs=1e-4), " ".join(text.split())) for text in ordered]


# ---- what comes out ----


def test_texts_are_scored_beside_the_query(rank: Rank, ranker: Ranker, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    scores = ranker.scores("animals", TEXTS)
    assert rank.found("--query", "animals", "-f", str(tmp_path / "a.txt")) == best_first(scores)
    assert rank.found("--query", "animals", "--top", "2", stdin="\n".join(TEXTS)) == best_first(scores)[:2]
    code, out, err = rank("--query", "animals", "--json", *TEXTS)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["index"] for line in lines] == sorted(range(4), key=lambda i: -scores[TEXTS[i]])
    assert [line["score"] for line in lines] == [pytest.approx(scores[line["text"]], abs=1e-4) for line in lines]
    assert "4 texts, " in err


def test_many_texts_go_in_parts(rank: Rank, ranker: Ranker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nanovllm_cli.cli import embed as command

    monkeypatch.setattr(command, "TOGETHER", 3)
    texts = [f"text {i}" for i in range(8)]
    path = tmp_path / "out.txt"
    assert rank("--query", "q", "-o", str(path), *texts)[:2] == (0, "")
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert {text: float(score) for score, text in lines} == pytest.approx(ranker.scores("q", texts), abs=1e-4)


def test_a_prefix_stands_before_each_text_alone(rank: Rank, ranker: Ranker) -> None:
    ((score, text),) = rank.found("--query", "animals", "--prefix", "See ", "a cat")
    assert (score, text) == (pytest.approx(ranker.scores("animals", ["See a cat"])["See a cat"], abs=1e-4), "a cat")


def test_a_template_may_be_given(rank: Rank, ranker: Ranker, tmp_path: Path) -> None:
    (tmp_path / "rank.jinja").write_text(ROLES)
    messages = [{"role": "query", "content": "animals"}, {"role": "document", "content": "a cat"}]
    ids = AutoTokenizer.from_pretrained(ranker.folder).apply_chat_template(
        messages, chat_template=ROLES, tokenize=True, return_dict=False
    )
    ((score, _),) = rank.found("--query", "animals", "a cat", "--chat-template", str(tmp_path / "rank.jinja"))
    assert score == pytest.approx(sigmoid(logits(ranker.reference, [ids]))[0], abs=1e-4)
    assert "no messages of the roles" in rank.refused(2, "--query", "animals", "a cat", "--chat-template", "chatml")


def test_a_file_that_says_yes_or_no_ranks_as_well(rank: Rank, tmp_path: Path) -> None:
    folder = save(random_model(Qwen3Config(**SIZES)), tmp_path / "m")
    write_tokenizer(folder)
    write_reranker(folder, tmp_path / "m.gguf")
    scores = probabilities(folder)
    found = rank.found("--query", "animals", *scores, model=tmp_path / "m.gguf")
    assert found == best_first(scores)
    assert all(0 < score < 1 for score, _ in found)


# ---- what is refused ----

REFUSED = {
    "no query": (6, (), "is a reranker, which makes no vectors"),
    "pooling": (2, ("--query", "x", "--pooling", "mean"), "--pooling is given, and a reranker makes no vectors"),
    "dimensions": (2, ("--query", "x", "--dimensions", "5"), "--dimensions is given"),
    "a prompt": (2, ("--query", "x", "--prompt-name", "query"), "--prompt-name is given"),
    "numbers": (2, ("--query", "x", "--raw"), "prints no vectors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_of_a_reranker_is_refused(name: str, rank: Rank) -> None:
    code, words, told = REFUSED[name]
    err = rank.refused(code, "a cat", *words)
    assert told in err
    assert "hint: " in err


def test_a_template_is_for_rerankers(rank: Rank) -> None:
    err = rank.refused(2, "a cat", "--query", "x", "--chat-template", "chatml", model=Path("tiny"))
    assert "--chat-template is given, and the model is no reranker" in err


def test_what_is_too_long_is_named_or_cut(rank: Rank, ranker: Ranker) -> None:
    long = "word " * CONTEXT
    err = rank.refused(5, "--query", "animals", stdin=f"short\n{long}\n")
    assert "line 2 of standard input has " in err
    assert "--truncate cuts what is too long" in err
    code, out, err = rank("--query", "animals", "--truncate", "short", long)
    assert (code, "1 of 2 texts are cut to 64 tokens" in err) == (0, True)
    assert len(out.splitlines()) == 2
    err = rank.refused(5, "--query", long, "--truncate", "short")
    assert "the query alone takes too many" in err


# ---- around it ----


def test_it_is_shown_for_what_it_is(doors: Doors, ranker: Ranker, tmp_path: Path) -> None:
    code, out, err = doors.command("run", str(ranker.folder), "hello", "-t", "2", "-c", str(CONTEXT))
    assert (code, out) == (6, "")
    assert "embeds, ranks or labels texts" in err
    out = doors.command("models", "show", str(ranker.folder))[1]
    assert "none, it ranks: nanovllm embed --query, or /v1/rerank of a server" in out
    shown = json.loads(doors.command("models", "show", str(ranker.folder), "--json")[1])["embedding"]
    assert (shown["ranks"], shown["numbers"], shown["only"]) == (True, None, True)


def test_a_quantized_one_still_ranks(doors: Doors, rank: Rank, ranker: Ranker, tmp_path: Path) -> None:
    code, out, err = doors.command("quantize", str(ranker.folder), "--to", "int8", "-o", str(tmp_path / "q"))
    assert (code, out) == (0, f"{tmp_path}/q\n"), err
    assert f'nanovllm embed {tmp_path}/q "Once upon a time" --query "a story"' in err
    ((score, _),) = rank.found("--query", "animals", "a cat", model=tmp_path / "q")
    assert score == pytest.approx(ranker.scores("animals", ["a cat"])["a cat"], abs=0.02)


def test_dimensions_are_those_behind_dense_layers(doors: Doors, ranker: Ranker, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    body(Qwen3Config(**SIZES), folder)
    write_tokenizer(folder)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write_dense(folder / "2_Dense", (80, 48))
    write_chain(folder, "Pooling", "2_Dense", "Normalize")
    code, out, _ = doors.command("embed", str(folder), "a cat", "-t", "2", "--dimensions", "80")
    assert (code, len(json.loads(out)["embedding"])) == (0, 80)
    code, _, err = doors.command("embed", str(folder), "a cat", "-t", "2", "--dimensions", "81")
    assert (code, "have 80" in err) == (2, True)
    assert "through dense layers: 48 to 80" in doors.command("models", "show", str(folder))[1]
    assert json.loads(doors.command("models", "show", str(folder), "--json")[1])["embedding"]["numbers"] == 80


def test_peers_words_lead_here() -> None:
    assert "nanovllm embed MODEL -f FILE --query TEXT" in str(habits.command_hint("rerank"))
    for flag in ("--rerank", "--reranking", "--pooling"):
        assert "nanovllm embed" in str(habits.option_hint(flag, []))
