"""Models that give labels to texts: against transformers' own classes and its pipeline, from folders and GGUF files, as a command
and over HTTP."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Gemma2Config, GPT2Config, Phi3Config, Qwen3Config, pipeline

from embedders import SIZES, write_tokenizer
from label_models import ENCODERS, NAMES, THREE, encoder
from nanovllm_cli import LLM
from nanovllm_cli.cli.serve import _asked
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.server import engine_process
from nanovllm_cli.server.generation import Generator
from nanovllm_cli.server.observer import Observer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.heads import head_of
from server_fakes import MODEL, FakeEngine, FakeModels, FakePool
from server_requests import Door
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_convert import converted
from test_rerank_heads import classifier, configured

TEXTS = ["the quick brown fox", "a dog", "jumps over the lazy dog, again and again", "you and hello world"]
DECODERS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES | THREE),
    "gemma2": Gemma2Config(**SIZES | THREE | {"head_dim": 12}),
    "phi3": Phi3Config(**SIZES | THREE),
    "gpt2": GPT2Config(vocab_size=4100, n_embd=48, n_layer=2, n_head=4, n_positions=256, **THREE),
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)


def opened(path: Path, **config: Any) -> LLM:
    return LLM(path, config=EngineConfig(threads=2, num_blocks=64, dtype="float32", **config))


def decoder(folder: Path, config: Any) -> Path:
    classifier(config, folder)
    write_tokenizer(folder)
    return folder


def by_pipeline(folder: Path, texts: list[Any]) -> list[list[float]]:
    """What transformers makes of each, in the order of the labels."""
    judge: Any = pipeline("text-classification", model=str(folder), top_k=None)
    labels = list(judge.model.config.id2label.values())
    told = [judge(text) for text in texts]  # of a text, and not of a pair, in a list of their own
    scores = [{each["label"]: each["score"] for each in (one[0] if isinstance(one[0], list) else one)} for one in told]
    return [[each[label] for label in labels] for each in scores]


def near(found: list[Any], wanted: list[list[float]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.probs == pytest.approx(other, rel=2e-4, abs=2e-5)


@pytest.fixture(scope="module")
def moods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("model") / "moods", "bert")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder(tmp_path_factory.mktemp("model") / "judge", DECODERS["qwen3"])


# ---- what it says ----


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_classifies_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """Texts, and pairs of them; a whole batch, and one alone."""
    folder = encoder(tmp_path, kind)
    pairs = [("a dog", "the lazy dog"), ("hello world", "a fox")]
    with opened(folder) as llm:
        found = llm.classify(TEXTS)
        near(found, by_pipeline(folder, TEXTS))
        assert [llm.classify(text)[0] for text in TEXTS] == found
        assert {each.label for each in found} <= set(NAMES.values())
        assert [each.label for each in found] == [NAMES[each.probs.index(max(each.probs))] for each in found]
        assert max(found[0].probs) - min(found[0].probs) > 1e-3
        wanted = by_pipeline(folder, [{"text": one, "text_pair": other} for one, other in pairs])
        near(llm.classify(pairs), wanted)
        near(llm.classify(pairs[0]), wanted[:1])


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_classifies_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = decoder(tmp_path / "m", DECODERS[name])
    with opened(folder) as llm:
        near(llm.classify(TEXTS), by_pipeline(folder, TEXTS))
        assert (llm.spec.has_head, llm.embedding.ranks, llm.embedding.labels) == (False, False, tuple(NAMES.values()))
        in_a_row = AutoTokenizer.from_pretrained(folder)("a dog", " and a cat").input_ids
        assert llm.classify(("a dog", " and a cat")) == llm.classify([in_a_row])


@pytest.mark.parametrize(
    ("kind", "said"),
    [("multi_label_classification", "sigmoid"), ("regression", "identity"), ("single_label_classification", "softmax")],
)
def test_what_its_numbers_are_the_config_says(kind: str, said: str, moods: Path, tmp_path: Path) -> None:
    folder = configured(Path(shutil.copytree(moods, tmp_path / "m")), problem_type=kind)
    with opened(folder) as llm:
        assert llm.classes is not None
        assert llm.classes.shares == said
        near(llm.classify(TEXTS), by_pipeline(folder, TEXTS))


def test_the_numbers_may_be_asked_for_and_a_label_alone_is_a_score(moods: Path, tmp_path: Path) -> None:
    with opened(moods) as llm:
        raw = llm.classify(TEXTS, activation=False)
        assert [each.label for each in raw] == [each.label for each in llm.classify(TEXTS)]
        shares = [torch.tensor(each.probs, dtype=torch.float64).softmax(0).tolist() for each in raw]
        near(llm.classify(TEXTS), shares)
    folder = encoder(tmp_path / "m", "bert", id2label={0: "good"}, label2id={"good": 0}, num_labels=1)
    with opened(folder) as llm:
        (found,) = llm.classify("a dog")
        near([found], by_pipeline(folder, ["a dog"]))
        assert (found.label, found.num_classes, llm.embedding.ranks) == ("good", 1, True)
        assert llm.rank("a dog", ["a fox"])[0] == llm.classify(("a dog", "a fox"))[0].probs[0]
    with opened(configured(folder, problem_type="regression")) as llm:
        near(llm.classify("a dog"), by_pipeline(folder, ["a dog"]))


def test_a_model_of_rewards_has_two_layers(judge: Path, tmp_path: Path) -> None:
    """As Qwen2.5-Math-RM has them; the number itself is the reward."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config

    folder = decoder(tmp_path / "m", Qwen2Config(**SIZES | {"num_labels": 1, "pad_token_id": 0}))
    generator = torch.Generator().manual_seed(1)
    shapes = {"score.0.weight": (48, 48), "score.0.bias": (48,), "score.2.weight": (1, 48), "score.2.bias": (1,)}
    head = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name != "score.weight"}
    from transformers import AutoModel

    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(torch.tensor([[5, 9, 77]])).last_hidden_state[0, -1].double()
    inner = torch.relu(head["score.0.weight"].double() @ hidden + head["score.0.bias"].double())
    save_file(tensors | head, folder / "model.safetensors")
    with opened(configured(folder, architectures=["Qwen2ForRewardModel"])) as llm:
        (found,) = llm.classify([[5, 9, 77]])
    wanted = head["score.2.weight"].double() @ inner + head["score.2.bias"].double()
    near([found], [wanted.tolist()])


def test_control_tokens_in_a_text_are_text(moods: Path, judge: Path) -> None:
    """What is judged cannot end itself."""
    with opened(judge) as llm:
        assert llm.classes is not None
        ids = llm.classes.prompt(llm.tokenizer, "a dog<|im_end|>")
        assert llm.tokenizer.decode(ids[:-1], skip_special_tokens=False) == "a dog<|im_end|>"
        assert 4089 not in ids
        assert llm.classify("a dog<|im_end|>") != llm.classify([llm.tokenizer.encode("a dog<|im_end|>")])
    with opened(moods) as llm:
        assert llm.classes is not None
        assert len(llm.tokenizer.encode("a [SEP] dog")) < len(llm.classes.prompt(llm.tokenizer, "a [SEP] dog"))


def test_it_does_nothing_else(moods: Path) -> None:
    with opened(moods) as llm:
        facts = engine_process._facts(llm, EngineConfig())
        assert (facts.has_head, facts.ranks, facts.classifies) == (False, False, True)
        assert _asked("m", facts, completes=False)[0] == "classify"
        for call in (lambda: llm.embed("a"), lambda: llm.rank("a", ["b"])):
            with pytest.raises(UnsupportedError, match="a classifier gives labels in place of a vector"):
                call()
        with pytest.raises(UnsupportedError, match="is no reranker"):
            llm.scores([[1]])
        for wrong, says in ((3, "prompts are a list"), ([("a", 3)], "which are integers"), ([b"a"], "a prompt is text")):
            with pytest.raises(UsageError, match=says):
                llm.classify(wrong)  # type: ignore[arg-type]
        assert llm.classify([]) == []
        with pytest.raises(UsageError, match="no argument 'use_activation'"):
            llm.classify("a", use_activation=False)  # type: ignore[call-arg]
    with opened(Path("tiny")) as llm, pytest.raises(UnsupportedError, match="has no labels"):
        llm.classify("a")


# ---- broken heads ----


@pytest.mark.parametrize(
    ("keys", "kind", "says"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, CheckpointError, "has 2 labels, and its head 3 rows"),
        ({"id2label": {"0": "a", "1": "b", "3": "c"}}, CheckpointError, "has 3 labels, and its head 3 rows"),
        ({"id2label": ["a", "b", "c"]}, CheckpointError, "no table of labels"),
        ({"id2label": {"0": "a", "1": "b", "2": ["c"]}}, CheckpointError, "3 labels"),
        ({"id2label": None}, None, "LABEL_2"),
        ({"id2label": {"0": "a", "1": 7, "2": "\x1b[31mc\n"}}, None, " [31mc "),
        ({"id2label": {"0": "a", "1": "b", "2": "x" * 999}}, None, "x" * 200),
    ],
)
def test_labels_are_named_or_refused(
    keys: dict[str, Any], kind: type[NanovllmError] | None, says: str, moods: Path, tmp_path: Path
) -> None:
    folder = configured(Path(shutil.copytree(moods, tmp_path / "m")), **keys)
    with open_checkpoint(folder) as checkpoint:
        if kind is not None:
            with pytest.raises(kind, match=says):
                head_of(checkpoint)
            return
        head = head_of(checkpoint)
    assert head is not None
    assert head.labels[2] == says


# ---- GGUF files ----


def test_a_file_has_the_labels_where_llama_cpp_has_them(moods: Path, tmp_path: Path) -> None:
    made = tmp_path / "m.gguf"
    converted(moods, made, "gguf")
    with open_checkpoint(made) as checkpoint:
        assert checkpoint.config["bert.classifier.output_labels"] == list(NAMES.values())
        assert checkpoint.info("cls.output.weight").shape == (3, 48)
    with opened(made) as file, opened(moods) as folder:
        near(file.classify([*TEXTS, ("a", "b")]), [list(each.probs) for each in folder.classify([*TEXTS, ("a", "b")])])
        assert file.embedding.labels == folder.embedding.labels
    several = configured(Path(shutil.copytree(moods, tmp_path / "m")), problem_type="multi_label_classification")
    with pytest.raises(UnsupportedError, match="GGUF has no place for how it tells classes"):
        converted(several, tmp_path / "n.gguf", "gguf")


# ---- the command ----


class Classify:
    """The command, in this process."""

    def __init__(self, doors: Doors, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._doors, self._folder, self._patch = doors, folder, monkeypatch

    def __call__(self, *words: str, stdin: str = "", model: Path | None = None) -> tuple[int, str, str]:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        flags = ("-t", "2", "-c", "64", "--dtype", "float32")
        return self._doors.command("classify", str(model or self._folder), *words, *flags)

    def lines(self, *words: str, **more: Any) -> list[list[str]]:
        code, out, err = self(*words, **more)
        assert code == 0, err
        return [line.split("\t") for line in out.splitlines()]


@pytest.fixture
def classify(doors: Doors, moods: Path, monkeypatch: pytest.MonkeyPatch) -> Classify:
    return Classify(doors, moods, monkeypatch)


def test_a_line_is_a_score_a_label_and_the_text(classify: Classify, moods: Path, tmp_path: Path) -> None:
    with opened(moods) as llm:
        wanted = llm.classify(TEXTS)
    assert classify.lines(stdin="\n".join(TEXTS)) == [
        [f"{max(each.probs):.6f}", each.label, text] for each, text in zip(wanted, TEXTS, strict=True)
    ]
    best, *others = sorted(zip(wanted[0].probs, NAMES.values(), strict=True), reverse=True)
    assert classify.lines("--top", "2", TEXTS[0]) == [[f"{p:.6f}", label, TEXTS[0]] for p, label in (best, others[0])]
    assert [line[1] for line in classify.lines("--label", "ANGRY", "--label", "sad", *TEXTS[:2])].count("Angry") == 2
    kept = classify.lines("--label", "sad", "--min-score", str(sorted(each.probs[2] for each in wanted)[2]), *TEXTS)
    assert 1 <= len(kept) <= 2
    (line,) = classify.lines("--second", "the lazy dog", "a dog")
    (pair,) = by_pipeline(moods, [{"text": "a dog", "text_pair": "the lazy dog"}])
    assert float(line[0]) == pytest.approx(max(pair), abs=1e-4)
    code, out, err = classify("--json", *TEXTS[:2], "-o", str(tmp_path / "out.jsonl"))
    assert (code, out) == (0, ""), err
    record, _ = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (record["index"], record["text"], record["label"]) == (0, TEXTS[0], wanted[0].label)
    assert {each["label"]: each["score"] for each in record["labels"]} == dict(zip(NAMES.values(), wanted[0].probs, strict=True))
    assert record["labels"] == sorted(record["labels"], key=lambda each: -each["score"])
    raw = json.loads(classify("--json", "--raw", TEXTS[0])[1])
    assert sum(each["score"] for each in raw["labels"]) != pytest.approx(1, abs=1e-3)


def test_labels_that_exclude_no_other_are_all_told_from_one_half_on(classify: Classify, moods: Path, tmp_path: Path) -> None:
    folder = configured(Path(shutil.copytree(moods, tmp_path / "m")), problem_type="multi_label_classification")
    with opened(folder) as llm:
        wanted = llm.classify(TEXTS)
    lines = classify.lines(*TEXTS, model=folder)
    for each, text in zip(wanted, TEXTS, strict=True):
        likely = {label for p, label in zip(each.probs, NAMES.values(), strict=True) if p >= 0.5} or {each.label}
        assert {label for _, label, shown in lines if shown == text} == likely


def test_conversations_are_read_by_the_template(classify: Classify, judge: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello"}]
    with LLM(judge, chat_template=CHAT, config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        ids = llm.encode_chat(messages, add_generation_prompt=False)
        (wanted,) = llm.classify([ids])
    line = json.dumps({"messages": messages})
    assert classify.lines("--chat", "--chat-template", CHAT, line, model=judge) == [
        [f"{max(wanted.probs):.6f}", wanted.label, " ".join(line.split())]
    ]
    for words, says in (
        (["--chat", "--chat-template", CHAT, "[1]"], "text 1: not a JSON object"),
        (["--chat", "--chat-template", CHAT, '{"messages": 3}'], "text 1: no list of messages"),
        (["--chat", "--chat-template", CHAT, '{"messages": []}'], "text 1: no list of messages"),
        (["--chat-template", CHAT, "a"], "--chat-template is given, and texts are read as they are"),
        (["--chat", "--second", "b", "{}"], "cannot be used together"),
    ):
        code, out, err = classify(*words, model=judge)
        assert (code, out, says in err) == (2, "", True), err
    refuses = "{{ raise_exception('no such talk') }}"
    code, out, err = classify("--chat", "--chat-template", refuses, line, model=judge)
    assert (code, out, "text 1: the chat template refuses the messages: no such talk" in err) == (1, "", True), err


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (2, "the model has no label 'happy'\nhint: there are: calm, Angry, sad", ["--label", "happy", "a"]),
        (2, "there is no text to classify", []),
        (2, "--top", ["--top", "0", "a"]),
        (5, "text 1 has 202 tokens, and 64 fit into the context\nhint: --truncate", ["dog " * 200]),
        (2, "no such option", ["--pooling", "mean", "a"]),
    ],
)
def test_what_can_not_be_is_refused(code: int, says: str, words: list[str], classify: Classify, tmp_path: Path) -> None:
    found, out, err = classify(*words)
    assert (found, out) == (code, "")
    assert says in err
    assert "Traceback" not in err


def test_long_texts_are_cut_where_that_is_wanted(classify: Classify, moods: Path) -> None:
    with opened(moods) as llm:
        assert llm.classes is not None
        ids = llm.classes.prompt(llm.tokenizer, "dog " * 200)
        (wanted,) = llm.classify([llm.tokenizer.truncated(ids, 64)])
    ((score, label, _),) = classify.lines("--truncate", "dog " * 200)
    assert (float(score), label) == (pytest.approx(max(wanted.probs), abs=1e-6), wanted.label)


def test_others_are_told_what_they_do_instead(classify: Classify, doors: Doors, moods: Path) -> None:
    code, _, err = classify("a", model=Path("tiny"))
    assert (code, "writes text, and has no labels" in err, "--choice" in err) == (6, True, True)
    code, _, err = doors.command("embed", str(moods), "a")
    assert (code, "nanovllm classify" in err) == (6, True)
    code, _, err = doors.command("run", str(moods), "a")
    assert code == 6
    code, out, _ = doors.command("models", "show", str(moods), "--json")
    assert (code, json.loads(out)["embedding"]["labels"]) == (0, list(NAMES.values()))
    code, out, _ = doors.command("models", "show", str(moods))
    assert "it classifies: nanovllm classify" in out


# ---- what quantizing costs ----


def test_quality_is_told_of_labels(doors: Doors, moods: Path, tmp_path: Path) -> None:
    words = ["-o", str(tmp_path / "q"), "--to", "int8", "--verify-tokens", "400"]
    code, out, err = doors.command("quantize", str(moods), *words)
    assert code == 0, err
    assert "same likeliest label" in out + err
    code, out, err = doors.command("perplexity", str(moods), str(tmp_path / "q"), "--chunks", "5", "--json")
    assert code == 0, err
    assert json.loads(out)["quality"]["labels"] == 3
    other = configured(Path(shutil.copytree(moods, tmp_path / "m")), id2label={"0": "x", "1": "y", "2": "z"})
    code, _, err = doors.command("perplexity", str(moods), str(other), "--chunks", "5")
    assert (code, "the two models have other labels" in err) == (2, True)


# ---- over HTTP ----


class Embeds(FakeEngine):
    """By the model itself."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(facts=engine_process._facts(llm, EngineConfig()))
        self._llm = llm

    async def embed(self, prompt_ids: Any, pooling: Any, **others: Any) -> tuple[float, ...]:
        (found,) = self._llm.pooled([list(prompt_ids)], pooling, None)
        return tuple(found)


def post(folder: Path, path: str = "/classify", template: str | None = None, **fields: Any) -> Any:
    with LLM(folder, chat_template=template, config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        engine, models, pool = Embeds(llm), FakeModels(), FakePool()
        models.served[MODEL] = dataclasses.replace(
            models.served[MODEL], engine=engine, facts=engine.facts, tokenizer=llm.tokenizer, chat_template=llm.chat_template,
            scoring=llm.scoring, classes=llm.classes,
        )  # fmt: skip
        generates: Any = Generator(pool, Observer())
        generates.models = models
        return Door(generates).post(path, fields)


def test_the_server_answers_as_vllm_does(moods: Path) -> None:
    with opened(moods) as llm:
        wanted = llm.classify(TEXTS)
        count = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    for path in ("/classify", "/v1/classify"):
        answer = post(moods, path, input=TEXTS)
        assert answer.status == 200, answer.text
        told = answer.json
        assert told["id"].startswith("classify-")
        assert (told["object"], told["usage"]["total_tokens"]) == ("list", count)
        for index, (each, found) in enumerate(zip(wanted, told["data"], strict=True)):
            assert found["probs"] == pytest.approx(each.probs, rel=1e-5)
            assert (found["index"], found["label"], found["num_classes"]) == (index, each.label, 3)
    raw = post(moods, input="a dog", use_activation=False).json["data"]
    with opened(moods) as llm:
        assert raw[0]["probs"] == pytest.approx(llm.classify("a dog", activation=False)[0].probs, rel=1e-5)
        ids = llm.tokenizer.encode("a dog")
    assert post(moods, input=ids).json["data"][0]["probs"] == post(moods, input="a dog").json["data"][0]["probs"]
    cut = post(moods, input="dog " * 300, truncate_prompt_tokens=-1)
    assert (cut.status, cut.json["usage"]["prompt_tokens"]) == (200, 200)


def test_the_server_reads_conversations(judge: Path, moods: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with LLM(judge, chat_template=CHAT, config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        wanted = [llm.classify([llm.encode_chat(messages, add_generation_prompt=opens)])[0] for opens in (False, True)]
    for opens, each in zip((None, True), wanted, strict=True):
        answer = post(judge, template=CHAT, messages=messages, add_generation_prompt=opens)
        assert answer.status == 200, answer.text
        assert answer.json["data"][0]["probs"] == pytest.approx(each.probs, rel=1e-5)
    assert "has no chat template" in post(moods, messages=messages).json["error"]["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {}),
        ("messages", {"input": "a", "messages": [{"role": "user", "content": "b"}]}),
        ("input", {"input": []}),
        ("input", {"input": ""}),
        ("input", {"input": "dog " * 300}),
        ("input", {"input": [999999]}),
        ("pooling", {"input": "a", "pooling": "mean"}),
        ("use_activation", {"input": "a", "use_activation": "no"}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 9999}),
        ("chat_template", {"messages": [{"role": "user", "content": "b"}], "chat_template": "x"}),
    ],
)
def test_the_server_refuses_by_name(param: str, fields: dict[str, Any], moods: Path) -> None:
    answer = post(moods, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.text


def test_other_routes_say_where_labels_are(moods: Path) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        answer = post(moods, path, **fields)
        assert (answer.status, "(POST /classify)" in answer.json["error"]["message"]) == (400, True)
    answer = post(moods, "/v1/chat/completions", messages=[{"role": "user", "content": "b"}])
    assert (answer.status, "tells classes of texts" in answer.json["error"]["message"]) == (400, True)
