"""T5 from the command line, the library and a server, by a tiny model with a vocabulary of pieces as published ones have it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import LiveServer, live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights import aliases
from reading import END, expected, t5_folder, with_pieces
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors

pytest.importorskip("transformers")
ARGS = ("-t", "2", "--kv-cache", "8M", "-q", "--temp", "0", "-n", "12", "--ignore-eos")
TEXTS = ("abe cab", "dec dea cab ab a e d c b a b c d e", "a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_pieces(t5_folder(tmp_path_factory.mktemp("t5") / "model"))


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, str]:
    """What transformers answers to each of TEXTS, and both read as pieces by its own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer, answers = AutoTokenizer.from_pretrained(folder), {}
    for text in TEXTS:
        source, written = tuple(tokenizer(text)["input_ids"]), list[int]()
        assert source[-1] == END
        for _ in range(12):
            written.append(int(expected("flan-t5", source, tuple(written))[-1].argmax()))
        answers[text] = str(tokenizer.decode(written, skip_special_tokens=True))
    return answers


def test_pieces_are_read_as_transformers_reads_them(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "ab <extra_id_0> cd<extra_id_99>", "  a  b ", "", "</s>", "x"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.vocab_size == len(theirs)
    for count, given in ((0, 0), (3, 3)):
        (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": given}))
        assert Tokenizer.from_folder(tmp_path).vocab_size == ours.vocab_size - 100 + count
    for bad in (-1, 10**6, "100", True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": bad}))
        with pytest.raises(CheckpointError, match="extra_ids"):
            Tokenizer.from_folder(tmp_path)


def test_run_answers_what_the_encoder_read(folder: Path, told: dict[str, str], doors: Doors, tmp_path: Path) -> None:
    for text in TEXTS[:2]:
        assert doors.command("run", str(folder), text, *ARGS)[:2] == (0, told[text] + "\n")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    code, out, _ = doors.command("run", str(folder), "--batch", str(tmp_path / "in.jsonl"), *ARGS)
    assert code == 0
    assert [json.loads(line)["answers"][0]["text"] for line in out.splitlines()] == list(told.values())


def test_the_library_tells_the_prompt_as_it_was_given(folder: Path, told: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    with LLM(folder, threads=2, num_blocks=64) as llm:
        outputs = llm.generate(list(TEXTS), params)
        assert [output.outputs[0].text for output in outputs] == list(told.values())
        assert [output.prompt_token_ids for output in outputs] == [tuple(llm.tokenizer.encode(text)) for text in TEXTS]
        assert all(len(output.outputs[0].logprobs or ()) == 12 for output in outputs)
        (last, *_) = llm.stream(TEXTS[0], params)
        assert last.prompt_token_ids == outputs[0].prompt_token_ids
        assert 2 * llm.read_bytes < llm.weight_bytes + llm.read_bytes, "a step reads no encoder"
        assert (llm.vision, llm.hearing) == (None, None)
        with pytest.raises(UnsupportedError, match="answers what its encoder reads, and embeds nothing"):
            llm.embed("hello")


FORMS = {
    "a choice": ("--choice", "cd", {"cd"}),
    "an expression": ("--regex", "(cde|dea) ab", {"cde ab", "dea ab"}),
    "a grammar": ("--grammar", 'root ::= "ab " ("dea" | "cd")', {"ab dea", "ab cd"}),
    "Lark": ("--grammar", 'start: NAME "ab"\nNAME: /[cd]a /', {"ca ab", "da ab"}),
}


@pytest.mark.parametrize("case", FORMS)
def test_answers_have_the_form_that_is_asked_for(case: str, folder: Path, doors: Doors) -> None:
    """T5's tokenizer puts a space in front of every text, and takes a line break there away."""
    option, asked, possible = FORMS[case]
    code, out, err = doors.command("run", str(folder), TEXTS[0], option, asked, *ARGS)
    assert (code, out.strip() in possible) == (0, True), (out, err)


def test_an_answer_of_some_form_begins_as_texts_do(folder: Path) -> None:
    """With the tokens that the model was trained to write, whose first one has a space."""
    form = Constraint("choice", '["cd", "dea"]')
    with LLM(folder, threads=2, num_blocks=64) as llm:
        (output,) = llm.generate([TEXTS[0]], SamplingParams(temperature=0.0, max_tokens=12, constraint=form))
        answer = output.outputs[0]
        assert answer.text in ("cd", "dea")
        assert llm.tokenizer.id_to_bytes(answer.token_ids[0]).startswith(b" ")
        found = answer.token_ids[: -1 if answer.token_ids[-1] == END else None]
        assert b"".join(map(llm.tokenizer.id_to_bytes, found)).decode() == f" {answer.text}"


@pytest.mark.parametrize(
    ("words", "said", "codes"),
    [
        (("chat", "MODEL"), "has no chat template", (2,)),
        (("run", "--continue", "MODEL", "more", *ARGS), "--continue", (2,)),
        (("embed", "MODEL", "a"), "embeds nothing", (6,)),
        (("perplexity", "MODEL", "-c", "64"), "answers to others", (6,)),
        (("quantize", "MODEL", "--to", "int8", "-o", "OUT"), "answers to others", (6,)),
        (("convert", "MODEL", "-o", "OUT.gguf"), "distances that differ beyond 128", (6,)),
        (("bench", "MODEL", "-p", "16", "-n", "4", "-d", "16", "-r", "1"), "leave -d out", (6,)),
        (("run", "MODEL", "a", "--image", "IMAGE", *ARGS), "--image has no meaning", (2,)),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, codes: tuple[int, ...], folder: Path, doors: Doors, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    places = {"MODEL": str(folder), "OUT": str(tmp_path / "out"), "OUT.gguf": str(tmp_path / "out.gguf"),
              "IMAGE": str(tmp_path / "a.png")}  # fmt: skip
    code, _, err = doors.command(*(places.get(each, each) for each in words))
    assert code in codes, err
    assert said in err


def test_it_is_shown_planned_and_measured(folder: Path, doors: Doors) -> None:
    code, out, _ = doors.command("models", "show", str(folder), "--json")
    shown = json.loads(out)
    assert (code, shown["layers"], shown["encoder_layers"], shown["architecture"]) == (0, 3, 2, "t5")
    assert "2 layers of 48, which read what is asked" in doors.command("models", "show", str(folder))[1]
    assert "3 layers behind an encoder of 2" in doors.command("plan", str(folder))[1]
    code, out, err = doors.command("bench", str(folder), "-p", "20", "-n", "6", "-r", "1", "-t", "2")
    assert code == 0, err
    assert "pp20" in out
    assert "tg6" in out


def test_aliases_are_published_names() -> None:
    named = {"flan-t5:large": "google/flan-t5-large", "madlad400:3b": "google/madlad400-3B-mt", "t5:small": "google-t5/t5-small"}
    for name, theirs in named.items():
        assert aliases.ALIASES[name].lower() == theirs.lower()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server(str(folder), "--alias", "t5") as server:
        yield server


def test_a_server_completes_and_does_not_chat(live: LiveServer, told: dict[str, str], folder: Path) -> None:
    asked: dict[str, Any] = {"model": "t5", "prompt": list(TEXTS), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    done = httpx.post(f"{live.base_url}/completions", json=asked, timeout=60).json()
    assert [choice["text"] for choice in done["choices"]] == list(told.values())
    tokenizer = Tokenizer.from_folder(folder)
    assert done["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in TEXTS)
    echoed = httpx.post(f"{live.base_url}/completions", json={**asked, "echo": True, "logprobs": 1}, timeout=60)
    assert (echoed.status_code, "an encoder reads" in echoed.text) == (400, True), echoed.text
    chat = {"model": "t5", "messages": [{"role": "user", "content": "a"}]}
    refused = httpx.post(f"{live.base_url}/chat/completions", json=chat, timeout=60)
    assert (refused.status_code, "no chat template" in refused.text) == (400, True)


def test_the_line_to_copy_asks_for_what_it_does(live: LiveServer) -> None:
    done = subprocess.run(["bash", "-c", live.line("curl ").strip()], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["object"] == "text_completion"
