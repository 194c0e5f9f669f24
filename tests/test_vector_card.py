"""Quality cards of models that embed or rank: statistics against loops in float64, what is read against transformers' tokenizers,
and cards against vectors and scores that are made anew."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config

from embedders import END, SIZES, body, write_json, write_modules, write_pooling, write_tokenizer
from nanovllm_cli import LLM
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import DoesNotFitError, RequestError, UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization import card as cards
from nanovllm_cli.quantization.logits import ON_CPU, MeasuredModel
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.passages import DOCUMENTS, PASSAGE, Cut, Reading, embeds, passages, reading_of
from nanovllm_cli.quantization.perplexity import compare_vectors
from nanovllm_cli.quantization.pipeline import Method, Verification, quantize_model
from nanovllm_cli.quantization.plan import Choices, make_plan
from nanovllm_cli.quantization.texts import NamedText, bundled_text
from nanovllm_cli.quantization.vector_quality import score_quality, vector_quality
from nanovllm_cli.text.tokenizer import Tokenizer
from quantizing import quantize
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_dense_modules import write_chain, write_dense
from test_rerank_heads import DECODERS, ENCODERS, classifier
from test_tokenizer_encoders import bert

TEXT = bundled_text("verification")
FLOATS = EngineConfig(threads=2, num_blocks=64, dtype="float32")


# ---- statistics ----


def by_loops(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], count: int) -> tuple[list[float], float, float]:
    """Cosines; the share of equal nearest ones; the share that is kept of `count` nearest."""

    def cosine(u: Sequence[float], v: Sequence[float]) -> float:
        return math.fsum(map(lambda x, y: x * y, u, v)) / math.hypot(*u) / math.hypot(*v)

    def nearest(vectors: Sequence[Sequence[float]], i: int) -> list[int]:
        others = [j for j in range(len(vectors)) if j != i]
        return sorted(others, key=lambda j: -cosine(vectors[i], vectors[j]))[:count]

    pairs = [(nearest(before, i), nearest(after, i)) for i in range(len(before))]
    same = sum(one[0] == other[0] for one, other in pairs) / len(pairs)
    kept = sum(len(set(one) & set(other)) for one, other in pairs) / len(pairs) / count
    return [cosine(u, v) for u, v in zip(before, after, strict=True)], same, kept


@pytest.mark.parametrize(("count", "nearest"), [(3, 1), (20, 9), (21, 10), (300, 10)])
def test_vectors_are_compared_as_loops_compare_them(count: int, nearest: int) -> None:
    """300: more than are worked on at once."""
    rng = np.random.default_rng(count)
    u = rng.normal(size=(count, 7)) * 3
    v = u + rng.normal(size=u.shape) * 0.7
    found = vector_quality(torch.from_numpy(u), torch.from_numpy(v), 99)
    cosines, same, kept = by_loops(u.tolist(), v.tolist(), nearest)
    assert (found.passages, found.tokens, found.nearest) == (count, 99, nearest)
    assert found.cosine_mean == pytest.approx(np.mean(cosines), rel=1e-12)
    assert found.cosine_p1 == pytest.approx(np.percentile(cosines, 1), rel=1e-12)
    assert found.cosine_min == pytest.approx(min(cosines), rel=1e-12)
    assert (found.same_nearest, found.nearest_kept) == (pytest.approx(same), pytest.approx(kept))
    assert found.is_finite
    assert 0 < found.nearest_kept <= 1


def test_vectors_that_are_the_same_but_for_their_length_have_lost_nothing() -> None:
    u = torch.from_numpy(np.random.default_rng(1).normal(size=(30, 5)))
    for v in (u, u * 4):
        found = vector_quality(u, v, 1)
        assert (found.cosine_mean, found.cosine_min, found.same_nearest, found.nearest_kept) == (1.0, 1.0, 1.0, 1.0)
        assert found.loss == ("1 minus the mean cosine", 0.0)
    turned = vector_quality(u, -u, 1)
    assert (turned.cosine_mean, turned.same_nearest) == (pytest.approx(-1.0), 1.0)


def test_vectors_that_are_no_numbers_are_not_finite_and_zeros_are() -> None:
    u = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 4)))
    broken = u.clone()
    broken[2, 1] = math.nan
    assert not vector_quality(u, broken, 1).is_finite
    broken[2] = 0
    assert vector_quality(u, broken, 1).is_finite


def test_scores_are_compared_as_numpy_does() -> None:
    rng = np.random.default_rng(4)
    before = rng.normal(size=(40, 4)) * 2
    after = before + rng.normal(size=before.shape)

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    found = score_quality(before, after, lambda number: float(sigmoid(number)), 7)
    assert (found.queries, found.documents, found.tokens) == (40, 4, 7)
    assert found.margin_mean == pytest.approx(np.abs(before - after).mean())
    assert found.margin_max == pytest.approx(np.abs(before - after).max())
    assert found.score_mean == pytest.approx(np.abs(sigmoid(before) - sigmoid(after)).mean())
    assert found.score_max == pytest.approx(np.abs(sigmoid(before) - sigmoid(after)).max())
    best = [max(range(4), key=lambda j: row[j]) for row in before.tolist()]
    other = [max(range(4), key=lambda j: row[j]) for row in after.tolist()]
    assert found.same_best == pytest.approx(sum(a == b for a, b in zip(best, other, strict=True)) / 40)
    assert 0 < found.same_best < 1
    assert found.loss == ("the mean difference of scores", found.score_mean)


# ---- what is read ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Qwen3's body by the last token, which is what its tokenizer puts behind a text."""
    folder = tmp_path_factory.mktemp("model") / "m"
    reference = body(Qwen3Config(**SIZES), folder)
    write_tokenizer(folder)
    write_pooling(folder, "last")
    return reference, folder


@pytest.fixture(scope="module")
def tokenizer(model: tuple[Any, Path]) -> Tokenizer:
    return Tokenizer.from_folder(model[1])


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("limit", [9, 64])
def test_passages_are_all_of_a_text_in_pieces_that_fit(limit: int, model: tuple[Any, Path], tokenizer: Tokenizer) -> None:
    """Their ids are those of transformers' tokenizer, its end behind each."""
    theirs = AutoTokenizer.from_pretrained(model[1])
    words = "".join(f"word{i} " for i in range(90))
    text = "One. Two! Is this three?  Yes\n\n" + words + "".join(f"{i:03}" for i in range(100)) + "。你好。世界"
    found = list(passages(tokenizer, [text], limit))
    assert squeezed("".join(each.text for each in found)) == squeezed(text)
    for each in found:
        assert each.ids == theirs(each.text).input_ids
        assert each.ids[-1] == END
        assert len(each.ids) <= limit
    assert sum(len(each.ids) for each in found) / len(found) > limit / 2


def test_a_passage_ends_with_a_sentence_or_a_line_and_stands_there_once(tokenizer: Tokenizer) -> None:
    sentences = [f"The cat number {i} sat on a red mat." for i in range(12)]
    text = " ".join(sentences[:6]) + "\n" + "\n".join(sentences[6:])
    found = [each.text for each in passages(tokenizer, [text], 40)]
    assert all(each.endswith("mat.") for each in found)
    assert len(found) < 12, "several sentences go into one"
    assert [each.text for each in passages(tokenizer, ["Hello.", "Hello.", " \n", "", "Bye."], 40)] == ["Hello.", "Bye."]


def reading(folder: Path, text: str, cut: Cut | None = None, name: str = "a.txt") -> Reading:
    with open_original("m", folder) as original:
        cut = cut or Cut()
        return reading_of(original.checkpoint, original.spec, original.tokenizer(), NamedText(name, text), cut, "a hint")


def test_no_more_is_read_than_is_asked_for(model: tuple[Any, Path]) -> None:
    whole = reading(model[1], TEXT.text)
    assert max(map(len, whole.ids)) <= PASSAGE
    some = reading(model[1], TEXT.text, Cut(num_tokens=1000))
    assert some.ids == whole.ids[: len(some.ids)]
    assert 1000 - PASSAGE < some.num_tokens <= 1000
    assert reading(model[1], TEXT.text, Cut(most=5)).ids == whole.ids[:5]
    assert max(map(len, reading(model[1], TEXT.text, Cut(20)).ids)) <= 20
    lines = "\n".join(json.dumps({"text": f"text number {i}"}) for i in range(9))
    assert len(reading(model[1], lines, name="a.jsonl").ids) == 9
    raw = reading(model[1], lines, Cut(30, reads_lines=False), name="a.jsonl").ids
    assert Tokenizer.from_folder(model[1]).decode(raw[0]).startswith('{"text": "text number 0"}')


@pytest.mark.parametrize(
    ("text", "cut", "says"),
    [
        ("", Cut(), "a.txt is too short: 0 passages of at most 64 tokens, and 3 are needed"),
        ("One.\nTwo.", Cut(), "1 passages"),
        (TEXT.text, Cut(num_tokens=2), "0 passages"),
        (TEXT.text, Cut(most=2), "2 passages"),
        (TEXT.text, Cut(1), "a passage of 1 tokens has no room for a text"),
        ("a b. " * 500, Cut(5), "too short"),
    ],
)
def test_what_is_too_short_is_refused(text: str, cut: Cut, says: str, model: tuple[Any, Path]) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        reading(model[1], text, cut)
    assert caught.value.hint == "a hint"


# ---- rerankers ----


def encoder(folder: Path, name: str = "BertForSequenceClassification", **changes: Any) -> Path:
    """A reranker whose tokenizer tells two texts apart."""
    folder.mkdir()
    theirs = bert(folder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = ENCODERS[name].to_dict() | {"vocab_size": len(theirs), "max_position_embeddings": 200} | changes
    classifier(type(ENCODERS[name])(**config), folder)
    for file, content in kept.items():
        folder.joinpath(file).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("ranker") / "m")


def test_pairs_are_the_beginning_of_a_passage_and_what_is_left_of_it_and_the_next(ranker: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(ranker)
    tokenizer = Tokenizer.from_folder(ranker)
    texts = [each.text for each in passages(tokenizer, [TEXT.text], PASSAGE)]
    read = reading(ranker, TEXT.text, Cut(num_tokens=2000))
    assert read.num_tokens <= 2000
    assert len(read.ids) % DOCUMENTS == 0
    for i in range(len(read.ids) // DOCUMENTS):
        at = texts[i].index(" ", len(texts[i]) // 4)
        query, own = texts[i][:at], texts[i][at:].strip()
        pair = theirs(query, own)
        assert read.ids[i * DOCUMENTS] == pair.input_ids
        assert read.seconds[i * DOCUMENTS] == pair.token_type_ids.index(1)
        assert [len(each) for each in read.ids[i * DOCUMENTS + 1 : (i + 1) * DOCUMENTS]] > [0] * (DOCUMENTS - 1)
    words = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog")
    without_spaces = reading(ranker, "".join(f"{one},{other}。" for one in words for other in words), Cut(20)).ids
    assert max(map(len, without_spaces)) <= 40


def test_a_document_is_cut_for_a_context_that_has_no_room_for_all_of_it(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "m", max_position_embeddings=70)
    assert {len(ids) for ids in reading(folder, TEXT.text, Cut(most=9)).ids} <= set(range(71))
    template = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} " + "a " * 80
        + "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    }  # fmt: skip
    write_json(folder / "tokenizer_config.json", template)
    with pytest.raises(DoesNotFitError, match=r"a query and nothing beside it takes \d+ tokens, and the model's"):
        reading(folder, TEXT.text)


@pytest.mark.parametrize(("text", "says"), [("One. Two. Three.", "0 queries"), ("", "0 queries")])
def test_too_few_pairs_are_refused(text: str, says: str, ranker: Path) -> None:
    with pytest.raises(UsageError, match=f"{says} of at most 64 tokens, and 2 are needed"):
        reading(ranker, text)


# ---- cards ----


def in_float32(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) in ("float32", None)
    return folder


def through(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([list(ids)])).last_hidden_state[0].double()


def test_a_card_says_what_transformers_and_the_library_embed(model: tuple[Any, Path], tmp_path: Path) -> None:
    """In the folder, in its README.md, and as it is returned; the original's vectors are transformers'."""
    reference, folder = model
    card = quantize("int8", tmp_path / "q", in_float32(folder), verify_tokens=1500)
    assert card is not None
    read = reading(folder, TEXT.text, Cut(num_tokens=1500))
    before = [through(reference, ids)[-1].tolist() for ids in read.ids]
    with LLM(tmp_path / "q", config=FLOATS) as llm:
        after = llm.embed(read.ids)
    cosines, same, kept = by_loops(before, after, 10)
    quality = json.loads((tmp_path / "q" / "quality.json").read_text())["quality"]
    assert quality == card.as_json()["quality"]
    assert (quality["passages"], quality["tokens"], quality["nearest"]) == (len(read.ids), read.num_tokens, 10)
    assert 1 - quality["cosine_mean"] == pytest.approx(1 - np.mean(cosines), rel=1e-3)
    assert 1 - quality["cosine_min"] == pytest.approx(1 - min(cosines), rel=1e-3)
    assert 1 - quality["cosine_p1"] == pytest.approx(1 - np.percentile(cosines, 1), rel=1e-3)
    assert quality["same_nearest"] == pytest.approx(same, abs=0.04)
    assert quality["nearest_kept"] == pytest.approx(kept, abs=0.02)
    assert quality["cosine_mean"] < 0.99999
    readme = (tmp_path / "q" / "README.md").read_text()
    assert f"| cosine, mean | {quality['cosine_mean']:.5f} |" in readme
    told = f"{len(read.ids)} passages of the bundled verification text, {read.num_tokens} tokens"
    assert f"Measured on {told}.\n" in readme


def test_vectors_go_through_the_dense_layers_of_each_models_files(tmp_path: Path) -> None:
    """And a head that is there besides is not asked for its probabilities."""
    folder = tmp_path / "m"
    reference = body(Qwen3Config(**SIZES | {"tie_word_embeddings": True}), folder)
    write_tokenizer(folder)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]})
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_pooling(folder, "mean")
    write_dense(folder / "2_Dense", (80, 48), bias=True)
    write_chain(folder, "Pooling", "2_Dense", "Normalize")
    card = quantize("fp8", tmp_path / "q", folder, verify_tokens=1000)
    assert card is not None
    with open_original("m", folder) as original:
        assert (original.spec.has_head, embeds(original.checkpoint, original.spec)) == (True, True)
    read = reading(folder, TEXT.text, Cut(num_tokens=1000))
    dense = {name: tensor.double() for name, tensor in load_file(folder / "2_Dense" / "model.safetensors").items()}
    before = [(dense["linear.weight"] @ through(reference, ids).mean(0) + dense["linear.bias"]).tolist() for ids in read.ids]
    with LLM(tmp_path / "q", config=FLOATS) as llm:
        after = llm.embed(read.ids)
    cosines, _, _ = by_loops(before, after, 5)
    quality = card.as_json()["quality"]
    assert 1 - quality["cosine_mean"] == pytest.approx(1 - np.mean(cosines), rel=1e-2)
    assert len(after[0]) == 80


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_rerankers_card_says_what_transformers_and_the_library_score(kind: str, ranker: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = ranker
    if kind == "decoder":
        folder = tmp_path / "m"
        classifier(DECODERS["Qwen3ForSequenceClassification"], folder)
        write_tokenizer(folder)
    card = quantize("int8", tmp_path / "q", in_float32(folder), verify_tokens=2500)
    assert card is not None
    read = reading(folder, TEXT.text, Cut(num_tokens=2500))
    reference: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    before = []
    for ids, second in zip(read.ids, read.seconds, strict=True):
        types = {"token_type_ids": (torch.arange(len(ids)) >= second).long()[None]} if kind == "encoder" else {}
        with torch.no_grad():
            before.append(float(reference(input_ids=torch.tensor([ids]), **types).logits[0, 0]))
    with LLM(tmp_path / "q", config=FLOATS) as llm:
        scores = np.array(llm.scores(read.ids)).reshape(-1, DOCUMENTS)
    margins = np.array(before).reshape(-1, DOCUMENTS)
    away = np.abs(margins - np.log(scores / (1 - scores)))
    quality = card.as_json()["quality"]
    assert (quality["queries"], quality["documents"], quality["tokens"]) == (len(margins), DOCUMENTS, read.num_tokens)
    assert quality["margin_mean"] == pytest.approx(away.mean(), rel=2e-2)
    assert quality["margin_max"] == pytest.approx(away.max(), rel=2e-2)
    assert quality["score_mean"] == pytest.approx(np.abs(1 / (1 + np.exp(-margins)) - scores).mean(), rel=2e-2)
    assert quality["score_max"] == pytest.approx(np.abs(1 / (1 + np.exp(-margins)) - scores).max(), rel=2e-2)
    assert quality["same_best"] == pytest.approx((margins.argmax(1) == scores.argmax(1)).mean(), abs=0.1)
    assert quality["margin_mean"] > 1e-4
    assert "| same best passage |" in (tmp_path / "q" / "README.md").read_text()


def test_a_gguf_files_card_lies_beside_it(model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    body(Qwen3Config(**SIZES | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}), folder)
    write_tokenizer(folder)
    write_pooling(folder, "last")
    card = quantize("q8_0", tmp_path / "q.gguf", folder, verify_tokens=1000)
    assert card is not None
    assert json.loads((tmp_path / "q.quality.json").read_text()) == card.as_json()
    read = reading(folder, TEXT.text, Cut(num_tokens=1000))
    with LLM(folder, config=FLOATS) as one, LLM(tmp_path / "q.gguf", config=FLOATS) as other:
        cosines, _, _ = by_loops(one.embed(read.ids), other.embed(read.ids), 5)
    assert 1 - card.as_json()["quality"]["cosine_mean"] == pytest.approx(1 - np.mean(cosines), rel=1e-2)


def test_one_model_is_in_memory_at_a_time(model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Counted(MeasuredModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert all(each() is None for each in made)
            super().__init__(*args, **options)
            made.extend(weakref.ref(each) for each in (self, self.model.embedding, self.model.blocks[0], self._cache))

    monkeypatch.setattr(cards, "MeasuredModel", Counted)
    with open_original("m", model[1]) as original:
        read = reading(model[1], TEXT.text, Cut(most=20))
        found = cards.measure_vectors(original.checkpoint, original.checkpoint, read, NullProgress())
    assert len(made) == 8
    assert found.loss[1] == 0.0


def test_what_can_not_embed_here_is_refused_before_anything_is_done(model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[1], tmp_path / "m"))
    write_modules(folder, "Pooling", "CNN")
    with pytest.raises(UnsupportedError, match="a module that is not supported: CNN") as caught:
        quantize("int8", tmp_path / "q", folder, verify_tokens=1000)
    assert caught.value.hint == "--no-verify leaves the quality card out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    assert quantize("int8", tmp_path / "q", folder) is None
    with open_original("m", model[1]) as original:
        plan, method = make_plan(original, Choices("int8")), Method("rtn", TEXT)
        with pytest.raises(UsageError, match="b is too short") as short:
            quantize_model(original, plan, method, tmp_path / "r", Verification(NamedText("b", "One.")), NullProgress())
    assert short.value.hint == "give a longer --verify-text, more --verify-tokens, or --no-verify"
    assert not (tmp_path / "r").exists()


def test_numbers_that_are_none_are_told(model: tuple[Any, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model[1], tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.down_proj.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with open_original("a", model[1]) as one, open_original("b", folder) as other, pytest.raises(RequestError, match="vectors"):
        compare_vectors(one, other, TEXT, Cut(most=3), NullProgress(), ON_CPU)


# ---- the commands ----


def test_the_command_tells_and_compares(doors: Doors, model: tuple[Any, Path], tmp_path: Path) -> None:
    """quantize --json has the card; perplexity makes the same of the two, and fails above a bound."""
    source, output = str(model[1]), str(tmp_path / "q")
    code, out, err = doors.command("quantize", source, "--to", "int8", "-o", output, "--verify-tokens", "800", "--json")
    assert code == 0, err
    card = json.loads(out)["card"]
    quality = card["quality"]
    told = f"{quality['passages']} passages of the bundled verification text, {quality['tokens']} tokens"
    assert f"against the original, {told}:" in err
    assert "kept of the" in err
    assert "KL divergence" not in err
    words = ["perplexity", source, output, "--chunks", str(quality["passages"])]
    code, out, err = doors.command(*words, "--json", "--dtype", "float32")
    assert code == 0, err
    record = json.loads(out)
    assert record["quality"] == pytest.approx(quality, rel=1e-6)
    assert (record["model"], record["other"], record["ctx_size"]) == (source, output, PASSAGE)
    loss = 1 - quality["cosine_mean"]
    code, out, err = doors.command(*words, "--fail-above", f"{loss * 1.1}")
    assert (code, out.splitlines()[0].split()) == (0, ["cosine,", "mean", f"{quality['cosine_mean']:.5f}"])
    assert out.splitlines()[-1].startswith("compared")
    code, out, err = doors.command(*words, "--fail-above", f"{loss * 0.9}")
    assert code == 7
    assert err.splitlines()[-1] == f"error: 1 minus the mean cosine is {loss:.5f}, above {loss * 0.9:g}"
    assert out.startswith("cosine, mean")
    code, out, _ = doors.command(*words, "--json", "-c", "20")
    assert json.loads(out)["quality"]["tokens"] < quality["tokens"]


def test_rerankers_are_compared_by_the_command(doors: Doors, ranker: Path, tmp_path: Path) -> None:
    code, _, err = doors.command("quantize", str(ranker), "--to", "int8", "-o", str(tmp_path / "q"), "--verify-tokens", "1500")
    assert code == 0, err
    assert "queries with 4 passages each, of the bundled verification text" in err
    assert "difference before the sigmoid, mean" in err
    words = ["perplexity", str(ranker), str(tmp_path / "q"), "--chunks", "3", "--fail-above"]
    assert doors.command(*words, "0.5")[0] == 0
    code, _, err = doors.command(*words, "0")
    assert (code, "error: the mean difference of scores is" in err) == (7, True)


def test_what_can_not_be_compared_is_refused(doors: Doors, model: tuple[Any, Path], ranker: Path, tmp_path: Path) -> None:
    source = str(model[1])
    wide = tmp_path / "wide"
    body(Qwen3Config(**SIZES | {"hidden_size": 96}), wide)
    write_tokenizer(wide)
    write_pooling(wide, "last")
    decoder = tmp_path / "decoder"
    classifier(DECODERS["Qwen3ForSequenceClassification"], decoder)
    write_tokenizer(decoder)
    few = ["--chunks", "3"]
    for code, says, words in (
        (6, "embeds or ranks: it gives no probabilities", [source]),
        (6, "embeds or ranks: it gives no probabilities", [str(ranker)]),
        (2, "embeds or ranks, and the other model writes text", [source, "tiny"]),
        (2, "embeds or ranks, and the other model writes text", ["tiny", str(ranker)]),
        (2, "one model makes vectors and the other scores", [source, str(decoder), *few]),
        (2, "the two tokenizers cut the text otherwise", [str(decoder), str(ranker), *few]),
        (2, "one model makes 48 numbers of a text and the other 96", [source, str(wide), *few]),
        (2, "--all is given, and nothing is scored", [source, source, "--all"]),
        (2, "is too short: 2 passages", [source, source, "--chunks", "2"]),
        (2, "a passage of 1 tokens has no room", [source, source, "-c", "1"]),
    ):
        found, out, err = doors.command("perplexity", *words)
        assert (found, out, says in err) == (code, "", True), err
