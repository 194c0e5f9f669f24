"""Models that translate or sum up from the command line, the library and a server, by tiny models with vocabularies as published
ones have them, against transformers."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from barts import bart_folder
from engines import random_model, save
from live_server import LiveServer, live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import PromptTooLongError, UnsupportedError, UsageError
from nanovllm_cli.weights.files import choose
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_translators import fairseq, m2m100, marian

transformers = pytest.importorskip("transformers")
ARGS = ("-t", "2", "--kv-cache", "8M", "-q", "--temp", "0", "-n", "12", "--ignore-eos")
TEXTS = ("abc cab", "dec dea cab ab a e d c b a b c d e", "a")
SHAPE = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 70, "decoder_ffn_dim": 70, "max_position_embeddings": 96,
}  # fmt: skip


def of_fairseq(kind: str) -> Callable[[Path], Path]:
    return functools.partial(fairseq, kind=kind)


def translator(folder: Path, kind: str) -> Path:
    """With a model as large as its vocabulary."""
    make, name, tokenizer, own = {
        "m2m100": (m2m100, "M2M100", "M2M100Tokenizer", {}),
        "mbart50": (of_fairseq("MBart50Tokenizer"), "MBart", "MBart50Tokenizer", {"decoder_start_token_id": 2}),
        "mbart": (of_fairseq("MBartTokenizer"), "MBart", "MBartTokenizer", {}),
        "marian": (marian, "Marian", "MarianTokenizer", {"scale_embedding": True}),
    }[kind]
    theirs = getattr(transformers, tokenizer).from_pretrained(make(folder))
    ids = {"pad_token_id": theirs.pad_token_id, "eos_token_id": theirs.eos_token_id, "forced_eos_token_id": None}
    if kind == "marian":
        own = {**own, "decoder_start_token_id": theirs.pad_token_id, "bad_words_ids": None}
    if kind == "mbart":
        own = {"decoder_start_token_id": theirs.convert_tokens_to_ids("ro_RO")}
    size = len(theirs) + (100 if kind == "m2m100" else 0)  # which doesn't count languages there
    config = getattr(transformers, f"{name}Config")(vocab_size=size, **SHAPE, **ids, **own)
    model = random_model(config, 3, auto=transformers.AutoModelForSeq2SeqLM)
    for half in (model.model.encoder, model.model.decoder):
        if hasattr(half.embed_positions, "create_weight"):
            half.embed_positions.weight = torch.nn.Parameter(half.embed_positions.create_weight())
    save(model, folder)
    return folder


def told(folder: Path, text: str, source: str | None = None, target: str | None = None, count: int = 12) -> str:
    """What transformers' own tokenizer and model make of it. source, target: codes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    if source is not None:
        tokenizer.src_lang = source
    start = model.generation_config.decoder_start_token_id
    written = [start if start is not None else model.config.decoder_start_token_id]
    if target is not None:
        token = tokenizer.get_lang_id(target) if hasattr(tokenizer, "get_lang_id") else tokenizer.convert_tokens_to_ids(target)
        written = [token] if type(tokenizer).__name__ == "MBartTokenizer" else [*written, token]
    begun, source_ids = len(written), torch.tensor([tokenizer(text)["input_ids"]])
    banned = [tokenizer.pad_token_id] if type(tokenizer).__name__ == "MarianTokenizer" else []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=source_ids, decoder_input_ids=torch.tensor([written])).logits[0, -1]
            logits[banned] = -torch.inf
            written.append(int(logits.argmax()))
    text = str(tokenizer.decode(written[begun:], skip_special_tokens=True))
    return re.sub(r"__[a-z]{2,3}__", "", text).strip()  # an M2M100's languages are not special to it


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: translator(tmp_path_factory.mktemp(kind), kind) for kind in ("m2m100", "mbart50", "mbart", "marian")}


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize(
    ("kind", "source", "target", "codes"),
    [
        ("m2m100", None, "de", (None, "de")),
        ("m2m100", "fr", "German", ("fr", "de")),
        ("m2m100", "fra_Latn", "deu", ("fr", "de")),
        ("mbart50", None, "de", (None, "de_DE")),
        ("mbart50", "Polish", "gl-ES", ("pl_PL", "gl_ES")),
        ("mbart", "de_DE", "fr", ("de_DE", "fr_XX")),
        ("mbart", None, None, (None, None)),
    ],
)
def test_languages_are_told_as_transformers_tells_them(
    kind: str, source: str | None, target: str | None, codes: tuple[str | None, str | None], folders: dict[str, Path]
) -> None:
    with LLM(folders[kind], threads=2, num_blocks=64, dtype="float32") as llm:
        params = SamplingParams(source_language=source, target_language=target, **GREEDY)
        outputs = llm.generate(list(TEXTS), params)
        assert [output.outputs[0].text.strip() for output in outputs] == [told(folders[kind], text, *codes) for text in TEXTS]
        assert [output.prompt_token_ids for output in outputs] == [tuple(llm.tokenizer.encode(text)) for text in TEXTS]


def test_marian_is_told_in_front_of_the_text(folders: dict[str, Path]) -> None:
    folder = folders["marian"]
    config = json.loads((folder / "generation_config.json").read_text())
    pad = transformers.AutoTokenizer.from_pretrained(folder).pad_token_id
    (folder / "generation_config.json").write_text(json.dumps(config | {"bad_words_ids": [[pad]]}))
    with LLM(folder, threads=2, num_blocks=64, dtype="float32") as llm:
        plain, named, inside = (
            llm.generate(text, SamplingParams(target_language=target, **GREEDY))[0].outputs[0].text.strip()
            for text, target in (("abc cab", None), ("abc cab", "German"), (">>pt_br<< abc cab", "de"))
        )
        assert plain == told(folder, "abc cab")
        assert named == inside == told(folder, ">>deu<< abc cab")
        with pytest.raises(UsageError, match="only into which"):
            llm.generate("abc", SamplingParams(source_language="en", target_language="de"))
        with pytest.raises(PromptTooLongError, match="96"):
            llm.generate("a b c d e " * 40)


def test_an_mbart_whose_files_begin_with_no_language_has_to_be_told_one(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["mbart"], tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text())
        said.pop("decoder_start_token_id", None)
        (folder / name).write_text(json.dumps(said))
    with LLM(folder, threads=2, num_blocks=32, dtype="float32") as llm:
        with pytest.raises(UsageError, match="into which"):
            llm.generate("abc", SamplingParams(**GREEDY))
        (output,) = llm.generate("abc", SamplingParams(target_language="de", **GREEDY))
        assert output.outputs[0].text.strip() == told(folders["mbart"], "abc", None, "de_DE")


def test_a_text_whose_language_leaves_no_room_is_refused(folders: dict[str, Path]) -> None:
    """Ids that fill two blocks fill three with the language in front, which they lack; and these are all that there is."""
    with LLM(folders["m2m100"], threads=2, num_blocks=16, max_model_len=32) as llm:
        text = llm.tokenizer.encode("a " * 40, add_special_tokens=False)
        assert llm.context_len == 48
        params = SamplingParams(target_language="de", source_language="en", **GREEDY)
        assert llm.generate([text[:31]], params)[0].finished
        with pytest.raises(PromptTooLongError, match="50 tokens, the context holds 48"):
            llm.generate([text[:32]], params)


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        ({}, "nothing says into which", "target_language"),
        ({"target_language": "germann"}, "does not know the language 'germann'", "german (de)"),
        ({"target_language": "xx"}, "does not know the language 'xx'", ""),
        ({"target_language": "de", "source_language": "Klingon"}, "source_language: this model does not know", ""),
    ],
)
def test_what_names_no_language_is_refused(fields: dict[str, str], said: str, hint: str, folders: dict[str, Path]) -> None:
    with LLM(folders["m2m100"], threads=2, num_blocks=64) as llm, pytest.raises(UsageError, match=said) as error:
        llm.generate("abc", SamplingParams(**fields, **GREEDY))
    assert hint in str(error.value.hint)


def test_run_and_batch_translate(folders: dict[str, Path], doors: Doors, tmp_path: Path) -> None:
    folder = str(folders["m2m100"])
    wanted = [told(folders["m2m100"], text, "fr", "de") for text in TEXTS]
    options = ("--source-language", "fr", "--target-language", "de", *ARGS)
    code, out, err = doors.command("run", folder, TEXTS[0], *options)
    assert (code, out.strip()) == (0, wanted[0]), err
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    code, out, err = doors.command("run", folder, "--batch", str(tmp_path / "in.jsonl"), *options)
    assert code == 0, err
    assert [json.loads(line)["answers"][0]["text"].strip() for line in out.splitlines()] == wanted
    lines = [{"prompt": TEXTS[0]}, {"prompt": TEXTS[0], "target_language": "Polish", "source_language": "en"}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = doors.command("run", folder, "--batch", str(tmp_path / "own.jsonl"), *options)
    assert code == 0, err
    of_its_own = told(folders["m2m100"], TEXTS[0], "en", "pl")
    assert [json.loads(line)["answers"][0]["text"].strip() for line in out.splitlines()] == [wanted[0], of_its_own]
    code, _, err = doors.command("run", folder, "abc", *ARGS)
    assert (code, "--target-language" in err) == (2, True)
    code, _, err = doors.command("run", folder, "abc", "--target-language", "germann", *ARGS)
    assert (code, "german (de)" in err) == (2, True)


@pytest.mark.parametrize("options", [("-tp", "2"), ("--speculate", "3"), ("--quant", "int8"), ("--beams", "3")])
def test_other_ways_to_compute_it(options: tuple[str, ...], folders: dict[str, Path], doors: Doors) -> None:
    """Of this model all of them say the same, a search apart, which is held against transformers elsewhere."""
    code, out, err = doors.command("run", str(folders["m2m100"]), TEXTS[1], "--target-language", "de", *options, *ARGS)
    assert code == 0, err
    assert out.strip() == told(folders["m2m100"], TEXTS[1], None, "de") or "--beams" in options


@pytest.mark.parametrize("kind", ["bart", "m2m100"])
def test_what_is_quantized_is_read_again(kind: str, folders: dict[str, Path], doors: Doors, tmp_path: Path) -> None:
    """Vocabulary, biases of logits and positions come along."""
    folder = folders[kind] if kind in folders else bart_folder(tmp_path / "model")
    code, _, err = doors.command("quantize", str(folder), "--to", "int8", "-o", str(tmp_path / "out"), "--no-verify")
    assert code == 0, err
    params = SamplingParams(target_language="de" if kind == "m2m100" else None, logprobs=0, **GREEDY)
    found = []
    for path in (folder, tmp_path / "out"):
        with LLM(path, threads=2, num_blocks=64, dtype="float32") as llm:
            (output,) = llm.generate(TEXTS[1], params)
            found.append([each.logprob for each in output.outputs[0].logprobs or ()])
    assert found[0] != found[1] == pytest.approx(found[0], abs=0.2)


def test_files_of_such_a_vocabulary_are_downloaded() -> None:
    for name in ("source.spm", "sentencepiece.bpe.model", "vocab.json"):
        assert name in choose(["config.json", "model.safetensors", name, "target.spm"], "a/b").files


def test_it_is_shown_and_planned(folders: dict[str, Path], doors: Doors) -> None:
    folder = str(folders["m2m100"])
    code, out, _ = doors.command("models", "show", folder, "--json")
    shown = json.loads(out)
    assert (code, shown["layers"], shown["encoder_layers"], len(shown["languages"])) == (0, 2, 2, 100)
    assert "100, told by --target-language" in doors.command("models", "show", folder)[1]
    assert "2 layers behind an encoder of 2" in doors.command("plan", folder)[1]
    code, out, err = doors.command("bench", folder, "-p", "20", "-n", "6", "-r", "1", "-t", "2")
    assert (code, "tg6" in out) == (0, True), err


@pytest.mark.parametrize(
    ("words", "said", "codes"),
    [
        (("chat", "MODEL"), "has no chat template", (2,)),
        (("run", "--continue", "MODEL", "more", *ARGS), "--continue", (2,)),
        (("run", "MODEL", "a", "--language", "de", *ARGS), "--target-language says into which", (2,)),
        (("embed", "MODEL", "a"), "embeds nothing", (6,)),
        (("perplexity", "MODEL", "-c", "64"), "answers to others", (6,)),
        (("convert", "MODEL", "-o", "OUT.gguf"), "llama.cpp knows none", (6,)),
        (("run", "MODEL", "a", "-c", "4000", *ARGS), "the model holds", (3, 4, 5, 6, 7)),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, codes: tuple[int, ...], folders: dict[str, Path], doors: Doors, tmp_path: Path
) -> None:
    places = {"MODEL": str(folders["mbart50"]), "OUT.gguf": str(tmp_path / "out.gguf")}
    code, _, err = doors.command(*(places.get(each, each) for each in words))
    assert said in err
    assert code in codes


def test_lengths_of_files_are_those_of_transformers(tmp_path: Path) -> None:
    """They count what the decoder begins with."""
    folder = bart_folder(tmp_path / "model")
    told = {"max_length": 20, "min_length": 9, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "num_beams": 4,
            "forced_bos_token_id": 0, "decoder_start_token_id": 2, "early_stopping": True}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(told))
    with LLM(folder, threads=2, num_blocks=32, dtype="float32") as llm:
        own = llm.default_params
        assert (own.max_tokens, own.min_tokens, own.length_penalty, own.no_repeat_ngram_size, own.num_beams) == (18, 7, 2.0, 3, 1)
        (output,) = llm.generate("abc", own.under({"temperature": 0.0}))
        assert 7 <= len(output.outputs[0].token_ids) <= 18
        beams = own.under({"num_beams": 4})
        assert (beams.min_tokens, beams.no_repeat_ngram_size, beams.length_penalty) == (7, 3, 2.0)
        unfeasible = SamplingParams.from_generation_config({"max_new_tokens": 5, "min_new_tokens": 9})
        assert (unfeasible.max_tokens, unfeasible.min_tokens) == (5, 5)
        with pytest.raises(UnsupportedError, match="embeds nothing"):
            llm.embed("hello")


@pytest.fixture(scope="module")
def live(folders: dict[str, Path]) -> Iterator[LiveServer]:
    with live_server(str(folders["m2m100"]), "--alias", "m2m", "--source-language", "fr") as server:
        yield server


def test_a_server_translates(live: LiveServer, folders: dict[str, Path]) -> None:
    asked: dict[str, Any] = {"model": "m2m", "prompt": list(TEXTS), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    done = httpx.post(f"{live.base_url}/completions", json=asked | {"target_language": "de"}, timeout=60).json()
    assert [choice["text"].strip() for choice in done["choices"]] == [told(folders["m2m100"], text, "fr", "de") for text in TEXTS]
    refused = httpx.post(f"{live.base_url}/completions", json=asked, timeout=60)
    assert (refused.status_code, "into which" in refused.text) == (400, True), refused.text
    refused = httpx.post(f"{live.base_url}/completions", json=asked | {"target_language": "germann"}, timeout=60)
    assert (refused.status_code, "germann" in refused.text) == (400, True), refused.text
    refused = httpx.post(f"{live.base_url}/completions", json=asked | {"target_language": "d" * 900}, timeout=60)
    assert refused.status_code in (400, 422)
    long = httpx.post(f"{live.base_url}/completions", json=asked | {"target_language": "de", "prompt": "abc " * 90}, timeout=60)
    assert (long.status_code, "96" in long.text) == (400, True), long.text


@pytest.mark.parametrize(("kind", "target"), [("marian", None), ("m2m100", "de"), ("mbart50", "de_DE")])
def test_an_answer_has_the_form_that_is_asked_for(kind: str, target: str | None, tmp_path: Path) -> None:
    """And begins as the model's texts do: with a space in its first token, as the tokenizer puts one in front of each."""
    folder = translator(tmp_path, kind)
    form = Constraint("choice", '["cab", "dea"]')
    params = SamplingParams(temperature=0.0, max_tokens=12, constraint=form, target_language=target)
    with LLM(folder, threads=2, num_blocks=64) as llm:
        (output,) = llm.generate([TEXTS[0]], params)
        answer = output.outputs[0]
        assert answer.text in ("cab", "dea")
        drawn = b"".join(map(llm.tokenizer.id_to_bytes, answer.token_ids))
        assert drawn.decode().replace("</s>", "") == f" {answer.text}"
