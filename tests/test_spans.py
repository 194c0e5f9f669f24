"""What labels of tokens mark: against all paths there are, transformers' pipeline, a text read whole; `redact`, the library."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, Qwen3Config, XLMRobertaConfig, pipeline

from embedders import SIZES, write_tokenizer
from label_models import BIOES, marker, privacy_filter
from nanovllm_cli import LLM, judging
from nanovllm_cli.cli.serve import _asked
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.server import engine_process
from nanovllm_cli.text.spans import Marking, Span, windows
from nanovllm_cli.text.tokenizer import Placed
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_classify import post
from test_convert import converted
from test_rerank_heads import SMALL, configured
from test_tokenizer_encoders import bert, xlm_roberta

IOB = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TEXT = "The quick brown fox, jumping over 3 lazy dogs' backs; jumps over the lazy dog and you and hello world"


def opened(path: Path, **config: Any) -> LLM:
    return LLM(path, config=EngineConfig(**{"threads": 2, "num_blocks": 64, "dtype": "float32"} | config))


@pytest.fixture(scope="module")
def privacy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model") / "privacy"
    return privacy_filter(folder), folder


# ---- what follows what ----


def valid(path: tuple[str, ...]) -> bool:
    """Written down once more: B opens what E of its kind closes, with I of it between; O and S stand alone."""
    inside = None
    for role, kind in ((label[0], label[2:]) for label in path):
        if inside is None:
            if role in "IE":
                return False
            inside = kind if role == "B" else None
        else:
            if role in "OBS" or kind != inside:
                return False
            inside = None if role == "E" else kind
    return inside is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_likeliest_of_all_paths_is_found(count: int) -> None:
    generator = np.random.default_rng(count)
    paths = [path for path in itertools.product(range(len(BIOES)), repeat=count) if valid(tuple(BIOES[i] for i in path))]
    for _ in range(20):
        numbers = 3 * generator.standard_normal((count, len(BIOES)))
        logs = torch.tensor(numbers).log_softmax(1).numpy()
        best = max(paths, key=lambda path: sum(logs[token, label] for token, label in enumerate(path)))
        text = "".join(chr(97 + i) for i in range(count))
        placed = Placed([0] * count, [(i, i + 1) for i in range(count)], [None] * count)
        wanted, first = [], 0
        for token, label in enumerate(best):
            if BIOES[label][0] in "BS":
                first = token
            if BIOES[label][0] in "ES":
                score = np.exp([logs[i, best[i]] for i in range(first, token + 1)]).mean()
                wanted.append(Span(BIOES[label][2:], first, token + 1, pytest.approx(score)))  # type: ignore[arg-type]
        assert Marking.of(BIOES).spans(text, placed, numbers) == wanted


def spans_of(labels: tuple[str, ...], path: list[str], words: list[int | None] | None = None) -> list[tuple[str, int, int]]:
    numbers = np.array([[9.0 if label == each else 0.0 for label in labels] for each in path])
    placed = Placed([0] * len(path), [(2 * i, 2 * i + 2) for i in range(len(path))], words or [None] * len(path))
    return [(each.label, each.start, each.end) for each in Marking.of(labels).spans("a " * len(path), placed, numbers)]


def test_parts_begin_go_on_and_end() -> None:
    assert spans_of(IOB, ["B-PER", "I-PER", "O", "B-LOC"]) == [("PER", 0, 3), ("LOC", 6, 7)]
    assert spans_of(IOB, ["B-PER", "B-PER", "I-LOC", "I-LOC"]) == [("PER", 0, 1), ("PER", 2, 3), ("LOC", 4, 7)]
    assert spans_of(IOB, ["I-PER", "I-PER"]) == [("PER", 0, 3)]
    assert spans_of(IOB, ["B-PER", "O", "B-LOC"], [0, 0, 1]) == [("PER", 0, 3), ("LOC", 4, 5)]
    assert spans_of(("O", "mail"), ["mail", "mail", "O", "mail"]) == [("mail", 0, 3), ("mail", 6, 7)]
    assert spans_of(("O", "B_x", "I_x", "L_x", "U_x"), ["B_x", "I_x", "L_x", "U_x"]) == [("x", 0, 5), ("x", 6, 7)]
    assert spans_of(("a", "b"), ["a", "b"]) == [("a", 0, 1), ("b", 2, 3)]
    assert spans_of(IOB, []) == []
    assert Marking.of(BIOES).names == ("a", "b")
    assert Marking.of(IOB).spans(" ", Placed([0], [(0, 1)], [None]), np.eye(5)[1:2]) == []  # of space alone


@pytest.mark.parametrize(("count", "size"), [(0, 8), (1, 8), (8, 8), (9, 8), (100, 16), (7, 1), (5, 2)])
def test_each_token_is_looked_at_once_and_mostly_has_neighbours(count: int, size: int) -> None:
    found = list(windows(count, size))
    assert [token for each in found for token in range(each.first, each.last)] == list(range(count))
    assert all(0 <= each.start <= each.first < each.last <= each.end <= count and each.end - each.start <= size for each in found)
    margin = size // 8
    assert all(each.start == 0 or each.first - each.start == margin for each in found)
    assert all(each.end == count or each.end - each.last == margin for each in found)


# ---- models ----


@pytest.mark.parametrize(("kind", "strategy"), [("bert", "first"), ("xlm-roberta", "simple")])
def test_names_are_found_as_transformers_does(kind: str, strategy: str, tmp_path: Path) -> None:
    theirs = bert(tmp_path) if kind == "bert" else xlm_roberta(tmp_path)
    make = BertConfig if kind == "bert" else XLMRobertaConfig
    own = {"pad_token_id": 1, "type_vocab_size": 1} if kind == "xlm-roberta" else {}
    sizes = {key: value for key, value in SMALL.items() if key != "num_labels"}
    marker(make(**sizes | {"vocab_size": len(theirs), "max_position_embeddings": 200} | own), IOB, tmp_path)
    judge: Any = pipeline("token-classification", model=str(tmp_path), aggregation_strategy=strategy)
    wanted: list[tuple[Any, ...]] = []
    for each in judge(TEXT):  # of which some begin with a space, or within the one before
        start = max(each["start"] + (TEXT[each["start"]] == " "), wanted[-1][2] if wanted else 0)
        wanted.append((each["entity_group"], start, each["end"], pytest.approx(float(each["score"]), abs=1e-4)))
    with opened(tmp_path) as llm:
        (found,) = llm.spans(TEXT)
        assert [tuple(each) for each in found] == wanted
        assert found
        assert llm.spans([TEXT, "", "hello", TEXT])[0::3] == [found, found]


def test_a_decoder_labels_tokens_too_chunked_and_preempted(tmp_path: Path) -> None:
    """Its rows come a chunk at a time."""
    model = marker(Qwen3Config(**SIZES), IOB, tmp_path)
    write_tokenizer(tmp_path)
    ids = [[5, 9, 77, 300] * 9, [44, 100, 7] * 8, [12]]
    with opened(tmp_path, max_num_batched_tokens=7, num_blocks=4) as llm:
        found = llm.pooled(ids, "each", None)
    for each, numbers in zip(ids, found, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([each])).logits[0]
        assert np.array(numbers).reshape(-1, 5) == pytest.approx(wanted.numpy(), rel=1e-3, abs=1e-4)


def test_the_privacy_filter_sees_a_window_on_either_side(privacy: tuple[Any, Path]) -> None:
    model, folder = privacy
    ids = [[5, 9, 77, 300, 4000, 12] * 5, [44]]
    with opened(folder) as llm:
        found = llm.pooled(ids, "each", None)
        for each, numbers in zip(ids, found, strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([each])).logits[0]
            assert np.array(numbers).reshape(-1, len(BIOES)) == pytest.approx(wanted.numpy(), rel=1e-3, abs=1e-4)


def test_a_long_text_in_pieces_is_as_it_is_whole(privacy: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pieces share more than a token can see."""
    text = " ".join([TEXT] * 10)
    with opened(privacy[1]) as llm:
        assert llm.classes is not None
        count = len(llm.tokenizer.placed(text).ids)
        (whole,) = llm.spans(text)
        monkeypatch.setattr(judging, "WINDOW", 104 + len(llm.tokenizer.around([])))
        assert count > 2 * 104
        (pieces,) = llm.spans(text)
        assert [each[:3] for each in pieces] == [each[:3] for each in whole]
        assert [each.score for each in pieces] == pytest.approx([each.score for each in whole], abs=1e-4)
        assert len(whole) > 20


def test_it_does_nothing_else(privacy: tuple[Any, Path], tmp_path: Path) -> None:
    folder = privacy[1]
    with opened(folder) as llm:
        for call, says in (
            (lambda: llm.embed("a"), "it gives each token a label"),
            (lambda: llm.classify("a"), "gives each token a label, and a text none"),
            (lambda: llm.generate("a"), "no head"),
        ):
            with pytest.raises(UnsupportedError, match=says):
                call()
        for wrong in (3, [3], [b"a"], None):
            with pytest.raises(UsageError, match="a text is wanted"):
                llm.spans(wrong)  # type: ignore[arg-type]
        assert llm.spans([]) == []
    with opened(Path("tiny")) as llm:
        with pytest.raises(UnsupportedError, match="gives tokens no labels"):
            llm.spans("a")
        with pytest.raises(UsageError, match="unknown pooling 'each'"):
            llm.embed("a", "each")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError):
        converted(folder, tmp_path / "m.gguf", "gguf")
    for path, fields in (("/classify", {"input": "a"}), ("/v1/embeddings", {"input": "a"})):
        answer = post(folder, path, **fields)
        assert (answer.status, "labels tokens" in answer.json["error"]["message"]) == (400, True), answer.text


def test_the_server_finds_the_same(privacy: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT, "", " ".join([TEXT] * 8)]
    monkeypatch.setattr("nanovllm_cli.server.routes_classify.WINDOW", 106)
    monkeypatch.setattr(judging, "WINDOW", 106)
    with opened(privacy[1]) as llm:
        wanted = llm.spans(texts)
        facts = engine_process._facts(llm, EngineConfig())
        assert _asked("m", facts, completes=False)[0] == "spans"
    answer = post(privacy[1], "/v1/spans", input=texts)
    assert answer.status == 200, answer.text
    for text, spans, entry in zip(texts, wanted, answer.json["data"], strict=True):
        assert [(each["label"], each["start"], each["end"], each["text"]) for each in entry["spans"]] == [
            (span.label, span.start, span.end, text[span.start : span.end]) for span in spans
        ]
        assert [each["score"] for each in entry["spans"]] == pytest.approx([span.score for span in spans], rel=1e-5)
    assert answer.json["usage"]["prompt_tokens"] > 200
    assert post(privacy[1], "/v1/spans", input=TEXT).json["data"] == answer.json["data"][:1]
    for fields in ({}, {"input": 3}, {"input": [3]}, {"input": "dog " * 9000}):
        refused = post(privacy[1], "/v1/spans", **fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, "input"), fields
    assert post(privacy[1], "/v1/spans", input=[]).json["data"] == []


def test_what_quantizing_costs_is_told_of_tokens(doors: Doors, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    marker(Qwen3Config(**SIZES), BIOES, tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    words = ["-o", str(tmp_path / "q"), "--to", "int8", "--verify-tokens", "300"]
    code, out, err = doors.command("quantize", str(tmp_path / "m"), *words)
    assert code == 0, err
    assert "9 labels of each of" in out + err
    with opened(tmp_path / "q") as llm:
        assert llm.spans(TEXT)[0]


# ---- the command ----


class Redact:
    """The command, in this process."""

    def __init__(self, doors: Doors, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._doors, self._folder, self._patch = doors, folder, monkeypatch

    def __call__(self, *words: str, stdin: bytes | None = None, model: Path | None = None) -> tuple[int, str, str]:
        source = io.TextIOWrapper(io.BytesIO(stdin or b""))
        self._patch.setattr(sys, "stdin", source)
        if stdin is None:
            self._patch.setattr(source, "isatty", lambda: True)
        return self._doors.command("redact", str(model or self._folder), *words, "-t", "2", "--dtype", "float32")

    def text(self, *words: str, **more: Any) -> str:
        code, out, err = self(*words, **more)
        assert code == 0, err
        return out


@pytest.fixture
def redact(doors: Doors, privacy: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> Redact:
    return Redact(doors, privacy[1], monkeypatch)


def without(text: str, spans: list[Span], instead: str = "[{}]") -> str:
    for span in reversed(spans):
        text = text[: span.start] + instead.format(span.label) + text[span.end :]
    return text


def test_all_else_comes_out_as_it_went_in(redact: Redact, privacy: tuple[Any, Path], tmp_path: Path) -> None:
    text = f"\ufeff\n  {TEXT}\r\n\n\tÄpfel \u00a0und Öl,\u2028 {TEXT}\n"
    with opened(privacy[1]) as llm:
        (spans,) = llm.spans(text)
    assert redact.text(stdin=text.encode()) == without(text, spans)
    (tmp_path / "in.txt").write_bytes(text.encode())
    assert redact.text("-f", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.txt")) == ""
    assert (tmp_path / "out.txt").read_bytes().decode() == without(text, spans)
    only = [span for span in spans if span.label == "b" and span.score >= 0.4]
    words = ("--label", "B", "--min-score", "0.4", "--with", "<{label}>")
    assert redact.text(*words, stdin=text.encode()) == without(text, only, "<{}>")
    assert 0 < len(only) < len(spans)
    record = json.loads(redact.text("--json", stdin=text.encode()))
    assert record["text"] == without(text, spans)
    assert [(each["label"], each["start"], each["end"], each["text"]) for each in record["spans"]] == [
        (span.label, span.start, span.end, text[span.start : span.end]) for span in spans
    ]
    assert redact.text(stdin=b"") == ""
    with opened(privacy[1]) as llm:
        assert redact.text(TEXT, "more") == without(f"{TEXT} more", llm.spans(f"{TEXT} more")[0]) + "\n"


def test_the_same_words_have_the_same_number(redact: Redact) -> None:
    text = f"{TEXT}\n" * 2
    one, other = redact.text("--lines", "--with", "<{label}{n}>", stdin=text.encode()).splitlines()
    assert one == other
    assert "<a1>" in one
    assert "<a2>" in one
    assert redact.text("--with", "{n}{x}{{label}}", "--lines", "hello") in ("hello\n", "1{x}{a}\n", "1{x}{b}\n")


def test_lines_are_looked_at_alone_and_long_texts_in_parts(
    redact: Redact, privacy: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm_cli.cli import redact as command

    lines = [TEXT + "\r\n", "\n", "hello world"]
    with opened(privacy[1]) as llm:
        wanted = [without(line, llm.spans(line)[0]) for line in lines]
    assert redact.text("--lines", stdin="".join(lines).encode()) == "".join(wanted)
    monkeypatch.setattr(command, "_BLOCK", 110)
    assert list(command._blocks("".join(lines))) == [TEXT + "\r\n\n", "hello world"]
    assert list(command._blocks("x" * 250)) == ["x" * 110, "x" * 110, "x" * 30]
    with opened(privacy[1]) as llm:
        blocks = [without(block, llm.spans(block)[0]) for block in (TEXT + "\r\n\n", "hello world")]
    assert redact.text(stdin="".join(lines).encode()) == "".join(blocks)
    record = json.loads(redact.text("--json", stdin="".join(lines).encode()))
    assert all("".join(lines)[each["start"] : each["end"]] == each["text"] for each in record["spans"])


def test_what_can_not_be_is_refused(redact: Redact, privacy: tuple[Any, Path], tmp_path: Path) -> None:
    cases: list[tuple[int, str, list[str], dict[str, Any]]] = [
        (2, "the model has no label 'c'\nhint: there are: a, b", ["--label", "c", "x"], {}),
        (2, "there is no text to read", [], {}),
        (2, "--json and --lines", ["--json", "--lines"], {"stdin": b"a"}),
        (2, "standard input is not UTF-8: byte 0xff at offset 1", [], {"stdin": b"a\xff"}),
        (2, "line 2 of standard input is not UTF-8", ["--lines"], {"stdin": b"a\nb\xff\n"}),
        (2, "there is no file", ["-f", str(tmp_path / "nothere")], {}),
        (2, "--min-score", ["--min-score", "2", "x"], {}),
        (6, "gives tokens no labels, and marks nothing", ["x"], {"model": Path("tiny")}),
    ]
    for code, says, words, more in cases:
        found, _, err = redact(*words, **more)
        assert (found, says in err) == (code, True), (words, err)
        assert "Traceback" not in err
    code, _, err = redact("-f", str(tmp_path / "x"), "-o", str(tmp_path / "no" / "x"))
    assert code == 2


def test_labels_alone_are_as_good(privacy: tuple[Any, Path], doors: Doors, tmp_path: Path) -> None:
    folder = configured(Path(shutil.copytree(privacy[1], tmp_path / "m")), id2label={str(i): f"L{i}" for i in range(9)})
    with opened(folder) as llm:
        assert {span.label for span in llm.spans(TEXT)[0]} <= {f"L{i}" for i in range(9)}
    code, out, _ = doors.command("models", "show", str(folder))
    assert (code, "it labels tokens: nanovllm redact" in out) == (0, True)
    code, _, err = doors.command("classify", str(folder), "a")
    assert (code, "labels tokens, and no texts" in err) == (6, True)
