"""`nanovllm embed` as its users see it, on a random model of the last token whose numbers are transformers'."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

from embedders import END, SIZES, body, write_json, write_pooling, write_tokenizer
from nanovllm_cli.cli import habits
from nanovllm_cli.server.schemas_openai_answers import EmbeddingAnswer
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors

CONTEXT = 64


class Model(NamedTuple):
    folder: Path
    reference: Any

    def vector(self, text: str, pooling: str = "last", *, limit: int | None = None) -> list[float]:
        """transformers' tokens (the last one of a text that is cut is its end), through its model, pooled."""
        ids = AutoTokenizer.from_pretrained(self.folder)(text).input_ids
        ids = ids if limit is None else [*ids[: limit - 1], END]
        with torch.no_grad():
            hidden = self.reference(torch.tensor([ids])).last_hidden_state[0].double()
        return {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling].tolist()  # type: ignore[no-any-return]

    def unit(self, text: str, **how: Any) -> list[float]:
        vector = self.vector(text, **how)
        return [number / math.hypot(*vector) for number in vector]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model") / "embedder"
    reference = body(Qwen3Config(**SIZES), folder)
    write_tokenizer(folder)
    write_pooling(folder, "last")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Find: ", "passage": "P: ", "none": ""}})
    return Model(folder, reference)


class Embed:
    """The command, in this process."""

    def __init__(self, doors: Doors, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self._doors, self._model, self._patch = doors, model, monkeypatch

    def __call__(self, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return self._doors.command("embed", str(self._model.folder), *words, "-t", "2", "-c", str(CONTEXT))

    def lines(self, *words: str, stdin: bytes = b"") -> list[Any]:
        code, out, err = self(*words, stdin=stdin)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def vector(self, *words: str) -> list[float]:
        (line,) = self.lines(*words)
        return line["embedding"]  # type: ignore[no-any-return]

    def refused(self, code: int, *words: str, stdin: bytes = b"") -> str:
        found, out, err = self(*words, stdin=stdin)
        assert (found, out) == (code, ""), err
        assert "error: " in err
        assert "Traceback" not in err
        return err


@pytest.fixture
def embed(doors: Doors, model: Model, monkeypatch: pytest.MonkeyPatch) -> Embed:
    return Embed(doors, model, monkeypatch)


def near(vector: list[float]) -> Any:
    return pytest.approx(vector, rel=2e-4, abs=2e-5)


# ---- what goes in, and in which order it comes out ----


def test_lines_then_files_then_arguments_each_a_line_of_json(embed: Embed, model: Model, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffa cat\r\n\r\n  \n two words".encode())
    lines = embed.lines("-f", str(tmp_path / "a.txt"), "last\nwords", "", stdin=b"first\n\nsecond\n")
    texts = ["first", "second", "a cat", " two words", "last\nwords", ""]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(texts))
    for line in lines:
        assert line["embedding"] == near(model.unit(line["text"]))
        assert math.hypot(*line["embedding"]) == pytest.approx(1)


def test_whole_files_are_one_text_and_called_by_their_name(embed: Embed, model: Model, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    lines = embed.lines("--whole", "-f", str(tmp_path / "a.txt"), "-f", "-", "word", stdin=b"three\nfour\n")
    assert [line["text"] for line in lines] == ["standard input", str(tmp_path / "a.txt"), "word"]
    assert [line["embedding"] for line in lines] == [near(model.unit(text)) for text in ("three\nfour", "one\n\ntwo", "word")]


def test_no_text_and_what_is_none(embed: Embed, tmp_path: Path) -> None:
    assert "no text to embed" in embed.refused(2)
    assert "no text to embed" in embed.refused(2, stdin=b"\n  \n")
    assert "there is no file" in embed.refused(2, "-f", str(tmp_path / "a.txt"))
    assert "not UTF-8" in embed.refused(2, stdin=b"\xff\n")
    assert "not valid Unicode" in embed.refused(2, "a\udcffb")


def test_models_that_are_not_there_and_texts_that_have_no_tokens(doors: Doors) -> None:
    assert doors.command("embed", "./nowhere", "text")[0] == 3
    code, out, err = doors.command("embed", "tiny", "some text", "", "-t", "2")
    assert (code, out) == (2, "")
    assert "text 2 has no tokens" in err


def test_what_was_not_made_to_embed_does_by_the_mean(doors: Doors) -> None:
    from nanovllm_cli import LLM
    from nanovllm_cli.config import EngineConfig

    code, out, _ = doors.command("embed", "tiny", "some text", "-t", "2", "--no-normalize")
    assert code == 0
    with LLM("tiny", config=EngineConfig(threads=2)) as llm:
        assert json.loads(out)["embedding"] == llm.embed("some text", "mean")[0]


# ---- what vectors are made of ----


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_poolings_and_lengths(pooling: str, embed: Embed, model: Model) -> None:
    words = ("some words", "--pooling", pooling)
    assert embed.vector(*words, "--no-normalize") == near(model.vector("some words", pooling))
    few = model.vector("some words", pooling)[:5]
    assert embed.vector(*words, "--dimensions", "5", "--no-normalize") == near(few)
    assert embed.vector(*words, "--dimensions", "5") == near([number / math.hypot(*few) for number in few])


def test_prompts_stand_before_each_text(embed: Embed, model: Model) -> None:
    assert embed.vector("a cat", "--prompt-name", "query") == near(model.unit("Find: a cat"))
    assert embed.vector("a cat", "--prompt-name", "none") == near(model.unit("a cat"))
    assert embed.vector("a cat", "--prefix", "See ") == near(model.unit("See a cat"))
    err = embed.refused(2, "a cat", "--prompt-name", "quary")
    assert "no prompt 'quary'" in err
    assert "none, passage, query" in err


def test_a_default_prompt_is_said(embed: Embed, model: Model) -> None:
    path = model.folder / "config_sentence_transformers.json"
    before = path.read_text()
    try:
        write_json(path, {"prompts": {"q": "Find: "}, "default_prompt_name": "q"})
        code, out, err = embed("a cat")
        assert json.loads(out)["embedding"] == near(model.unit("Find: a cat"))
        assert (code, "each text stands behind the model's prompt 'q'" in err) == (0, True)
        assert embed.vector("a cat", "--prefix", "") == near(model.unit("a cat"))
    finally:
        path.write_text(before)


REFUSED = {
    "too many numbers": (("--dimensions", "49"), "have 48"),
    "no number": (("--dimensions", "0"), "dimensions"),
    "another pooling": (("--pooling", "max"), "pooling"),
    "two forms": (("--json", "--raw"), "cannot be used together"),
    "two prompts": (("--prompt-name", "query", "--prefix", "x"), "cannot be used together"),
    "nothing sought": (("--top", "3"), "nothing is sought"),
    "no vectors to write": (("--query", "x", "--raw"), "prints no vectors"),
    "no vectors to scale": (("--query", "x", "--no-normalize"), "prints no vectors"),
    "no name": (("-o", ""), "-o needs"),
    "a place that is none": (("-o", "./no/such/file"), "cannot write"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str, embed: Embed) -> None:
    words, told = REFUSED[name]
    assert told in embed.refused(1 if "such" in words[-1] else 2, "a cat", *words)


# ---- how it is written ----


def test_openais_form_and_numbers_alone(embed: Embed, model: Model) -> None:
    (answer,) = embed.lines("a cat", "two", "--json")
    EmbeddingAnswer.model_validate(answer, strict=True)
    tokens = AutoTokenizer.from_pretrained(model.folder)
    count = sum(len(tokens(text).input_ids) for text in ("a cat", "two"))
    assert (answer["object"], answer["model"]) == ("list", str(model.folder))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    vectors = [near(model.unit(text)) for text in ("a cat", "two")]
    assert answer["data"] == [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    code, out, err = embed("a cat", "two", "--raw")
    assert (code, [list(map(float, line.split(" "))) for line in out.splitlines()]) == (0, vectors)
    assert "2 texts, " in err
    assert embed("a cat", "-q")[2] == ""


def test_many_texts_keep_their_order(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm_cli.cli import embed as command

    monkeypatch.setattr(command, "TOGETHER", 3)
    texts = [f"text {i}" for i in range(8)]
    lines = embed.lines(stdin="\n".join(texts).encode())
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(texts))
    (answer,) = embed.lines("--json", stdin="\n".join(texts).encode())
    assert [each["embedding"] for each in answer["data"]] == [line["embedding"] for line in lines]


def test_a_file_appears_whole_or_not_at_all(embed: Embed, tmp_path: Path) -> None:
    path = tmp_path / "vectors.jsonl"
    assert embed("a cat", "-o", str(path))[:2] == (0, "")
    there = path.read_text()
    assert json.loads(there)["text"] == "a cat"
    embed.refused(5, "word " * CONTEXT, "-o", str(path))
    assert path.read_text() == there
    embed.refused(2, "a cat", "--dimensions", "99", "-o", str(tmp_path / "other"))
    assert [file.name for file in tmp_path.iterdir()] == ["vectors.jsonl"]


# ---- what is too long ----


def test_a_text_that_is_too_long_is_named_before_anything_is_computed(embed: Embed, tmp_path: Path) -> None:
    long = "word " * CONTEXT
    err = embed.refused(5, stdin=f"short\n\n{long}\n".encode())
    assert "line 3 of standard input has " in err
    assert "64 fit into the context" in err
    assert "--truncate" in err
    (tmp_path / "a.txt").write_text(long)
    assert f"{tmp_path}/a.txt has " in embed.refused(5, "--whole", "-f", str(tmp_path / "a.txt"))
    assert "text 2 has " in embed.refused(5, "short", long)
    assert "--query has " in embed.refused(5, "short", "--query", long)


def test_or_cut_with_its_end_behind_it(embed: Embed, model: Model) -> None:
    long = "word " * CONTEXT
    code, out, err = embed("--truncate", "short", long)
    assert (code, "1 of 2 texts are cut to 64 tokens" in err) == (0, True)
    first, second = (json.loads(line)["embedding"] for line in out.splitlines())
    assert first == near(model.unit("short"))
    assert second == near(model.unit(long, limit=64))


# ---- what is nearest ----


def test_the_nearest_texts_come_first(embed: Embed, model: Model) -> None:
    texts = ["a cat", "the moon", "seven", "a dog ran\thome"]
    query = model.unit("Find: animals")
    scores = {text: sum(a * b for a, b in zip(query, model.unit(f"P: {text}"), strict=True)) for text in texts}
    best = sorted(texts, key=lambda text: -scores[text])
    stdin = "\n".join(texts).encode()
    code, out, _ = embed("--query", "animals", stdin=stdin)
    found = [line.split("\t") for line in out.splitlines()]
    assert (code, [text for _, text in found]) == (0, [" ".join(text.split()) for text in best])
    assert [float(score) for score, _ in found] == pytest.approx([scores[text] for text in best], abs=1e-4)
    assert embed("--query", "animals", "--top", "2", stdin=stdin)[1] == "".join(out.splitlines(keepends=True)[:2])
    lines = embed.lines("--query", "animals", "--json", "--top", "9", stdin=stdin)
    assert [(line["index"], line["text"]) for line in lines] == [(texts.index(text), text) for text in best]
    assert [line["score"] for line in lines] == pytest.approx([scores[text] for text in best], abs=1e-4)


# ---- around it ----


def test_it_draws_nothing_and_is_shown_for_what_it_is(doors: Doors, model: Model) -> None:
    code, out, err = doors.command("run", str(model.folder), "hello", "-t", "2", "-c", str(CONTEXT))
    assert (code, out) == (6, "")
    assert "this model embeds, ranks or labels texts" in err
    assert "nanovllm embed" in err
    code, out, _ = doors.command("models", "show", str(model.folder))
    assert "embedding     by the last token; prompts query, passage, none; nothing else: it has no head" in out
    shown = json.loads(doors.command("models", "show", str(model.folder), "--json")[1])["embedding"]
    assert (shown["pooling"], shown["only"], shown["default_prompt"]) == ("last", True, None)
    assert "embedding" not in doors.command("models", "show", "tiny")[1].split("tensors")[0]


def test_a_quantized_one_still_embeds(doors: Doors, model: Model, tmp_path: Path) -> None:
    code, out, err = doors.command("quantize", str(model.folder), "--to", "int8", "-o", str(tmp_path / "q"))
    assert (code, out) == (0, f"{tmp_path}/q\n"), err
    assert "cosine, mean" in err
    assert "nanovllm embed" in err
    code, out, _ = doors.command("embed", str(tmp_path / "q"), "a cat", "--prompt-name", "query", "-t", "2", "-c", str(CONTEXT))
    wanted = model.unit("Find: a cat")
    assert sum(a * b for a, b in zip(json.loads(out)["embedding"], wanted, strict=True)) > 0.99
    code, _, err = doors.command("quantize", str(model.folder), "--to", "int8", "--head", "int8", "-o", str(tmp_path / "other"))
    assert (code, "--head has no meaning" in err) == (2, True)


def test_peers_words_lead_here() -> None:
    for name in ("llama-embedding", "embedding", "embeddings"):
        assert habits.command_hint(name, ["embed"]) == "here it is nanovllm embed"
    for flag in ("--pooling", "--embd-normalize", "--embd-output-format", "--embd-separator"):
        assert "nanovllm embed" in str(habits.option_hint(flag, []))
