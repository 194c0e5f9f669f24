"""`nanovllm verify`: it finds the layer and the token where something was changed, and nothing where nothing was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forked import run
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.verify import Trace, compare, trace, trace_transformers
from nanovllm_cli.quantization.verify_text import PROBES, OurWords, TransformersWords, differences
from quantizing import TINY, quantize

IDS = [4087, 11, 250, 3000, 17, 900, 12, 45, 77, 1200, 5, 9, 31, 33, 35, 2, 4]


def traced(path: Path, dtype: Any = "float32") -> Trace:
    return trace(path, IDS, dtype, NullProgress())


def changed_copy(folder: Path, name: str, change: Any) -> Path:
    shutil.copytree(TINY, folder)
    tensors = load_file(TINY / "model.safetensors")
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_model_equals_itself() -> None:
    found = compare(traced(TINY), traced(TINY), [])
    assert found.equal
    assert found.same_bits
    names = ["embedding", "layer 0", "layer 1", "layer 2", "layer 3, norm", "head"]
    assert [layer.name for layer in found.layers] == names
    assert all(layer.worst == 0.0 for layer in found.layers)
    assert found.same_top == 1.0


def test_streams_and_logits_are_transformers(tmp_path: Path) -> None:
    ours, theirs = traced(TINY), trace_transformers(TINY, IDS)
    found = compare(ours, theirs, [])
    assert found.equal
    assert found.tolerance == 1e-3
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-3)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_the_layer_that_was_changed_is_found(tmp_path: Path, layer: int) -> None:
    other = changed_copy(tmp_path / "m", f"model.layers.{layer}.mlp.down_proj.weight", lambda w: w * 1.1)
    found = compare(traced(TINY), traced(other), [])
    assert found.first_layer is not None
    assert found.first_layer.name == (f"layer {layer}" if layer < 3 else "layer 3, norm")
    assert not found.equal


def test_the_token_that_was_changed_is_found(tmp_path: Path) -> None:
    def change(table: torch.Tensor) -> torch.Tensor:
        table[IDS[6]] += 0.5
        return table

    found = compare(traced(TINY), traced(changed_copy(tmp_path / "m", "model.embed_tokens.weight", change)), [])
    assert found.first_layer is not None
    assert (found.first_layer.name, found.first_layer.first_token) == ("embedding", 6)


def test_a_dtype_counts_as_equal_and_coarse_numbers_do_not(tmp_path: Path) -> None:
    assert compare(traced(TINY, "bfloat16"), traced(TINY), []).equal
    quantize("q4_0", tmp_path / "m.gguf")
    assert not compare(traced(tmp_path / "m.gguf"), traced(TINY), []).equal
    assert compare(traced(tmp_path / "m.gguf"), traced(TINY), [], tolerance=2.0).equal


def test_errors_are_relative_lengths_and_a_near_tie_is_none() -> None:
    b = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    a = b + torch.tensor([[0.0, 0.5], [0.0, 0.0]])
    logits = torch.tensor([[1.0, 1.001, -5.0], [1.0, 3.0, 0.0]])
    flipped = torch.tensor([[1.001, 1.0, -5.0], [4.0, 3.0, 0.0]])
    found = compare(Trace([a, b], flipped, torch.float32), Trace([b, b], logits, torch.float32), [], tolerance=0.05)
    first = found.layers[0]
    assert (first.mean, first.worst, first.worst_token, first.first_token) == (pytest.approx(0.05), 0.1, 0, 0)
    assert found.top is not None
    assert (found.top.token, found.top.a, found.top.b) == (1, 0, 1)
    assert found.same_top == 0.0


def test_a_head_that_chooses_alike_but_is_another_is_found() -> None:
    rows, logits = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 9.0], [4.0, 3.0, 2.0]])
    other = logits.clone()
    other[1, 2] = 1.0
    found = compare(Trace([rows, rows], other, torch.float32), Trace([rows, rows], logits, torch.float32), [])
    assert found.top is None
    assert found.first_layer is not None
    assert (found.first_layer.name, found.first_layer.first_token) == ("head", 1)
    assert found.first_layer.worst == pytest.approx(29**-0.5)
    close = compare(Trace([rows, rows], other, torch.float32), Trace([rows, rows], logits, torch.float32), [], tolerance=1.0)
    assert (close.equal, close.same_bits) == (True, False)


def test_a_nan_is_a_difference() -> None:
    good = torch.ones(2, 3)
    bad = good.clone()
    bad[1, 1] = float("nan")
    found = compare(Trace([bad, good], good, torch.float32), Trace([good, good], good, torch.float32), [])
    assert found.first_layer is not None
    assert found.first_layer.first_token == 1


def test_models_of_other_shapes_and_foreign_tokens_are_refused() -> None:
    one, other = torch.ones(2, 3), torch.ones(2, 4)
    with pytest.raises(UsageError, match="layer by layer"):
        compare(Trace([one, one], one, torch.float32), Trace([other, other], one, torch.float32), [])
    with pytest.raises(UsageError, match="4096"):
        trace(TINY, [4096, 1], "float32", NullProgress())


def test_transformers_failures_are_told(tmp_path: Path) -> None:
    other = Path(shutil.copytree(TINY, tmp_path / "m"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "no such thing"}))
    with pytest.raises(UnsupportedError, match="transformers can't load"):
        trace_transformers(other, IDS)
    for read in (TransformersWords, lambda path: trace_transformers(path, IDS)):
        with pytest.raises(UnsupportedError, match="GGUF") as refused:
            read(TINY / "m.gguf")  # not the folder's own model, which lies beside it
        assert "convert" in str(refused.value.hint)


# ---- tokenizers ----


def test_tokenizers_agree_with_themselves_and_with_transformers(tmp_path: Path) -> None:
    assert differences(OurWords(TINY), OurWords(TINY)) == []
    assert differences(OurWords(TINY), TransformersWords(TINY)) == []
    quantize("q8_0", tmp_path / "m.gguf")
    assert differences(OurWords(TINY), OurWords(tmp_path / "m.gguf")) == []


def test_what_generation_config_alone_ends_an_answer_by_is_an_end(tmp_path: Path) -> None:
    """A GGUF file has it among its tokenizer's own."""
    folder, file = tmp_path / "m", tmp_path / "m.gguf"
    shutil.copytree(TINY, folder)
    ends = [*OurWords(TINY).tokenizer.eos_ids, 5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    quantize("q8_0", file, folder)
    assert OurWords(folder).ends == set(ends)
    assert differences(OurWords(folder), OurWords(file)) == []
    assert any("tokens that end" in line for line in differences(OurWords(TINY), OurWords(folder)))


def test_a_changed_tokenizer_or_template_is_found(tmp_path: Path) -> None:
    other = tmp_path / "m"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:200]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("<|im_end|>", "<|im_end|> "))
    lines = differences(OurWords(TINY), OurWords(other))
    assert any(line.startswith("the text") for line in lines)
    assert any(line.startswith("the template") for line in lines)


class Side:
    """Words as one of two sides has them: a token a character, from `first` on."""

    def __init__(self, first: int = 0, ends: Any = None, controls: Any = None, prompt: str | None = "<u>") -> None:
        self.first, self.ends, self.controls, self.prompt = first, ends, controls, prompt

    def encode(self, text: str) -> list[int]:
        return [ord(letter) + (self.first if i > 1 else 0) for i, letter in enumerate(text)]

    def render(self, messages: Any) -> str | None:
        return self.prompt


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (Side(ends={1, 2}), Side(ends={2, 3}), "tokens that end an answer: [1, 2] and [2, 3]"),
        (Side(ends={1}), Side(ends=None), None),
        (Side(controls={"<a>": 1, "<b>": 2, "<c>": 4}), Side(controls={"<a>": 1, "<b>": 3}), "control tokens: <b>, <c>"),
        (Side(controls=None), Side(controls={"<a>": 1}), None),
        (Side(controls={"<a>": 1}), Side(controls=None), None),
        (Side(prompt="<u>hi"), Side(prompt="<u>ho"), "the template, for 'Hello': character 4, 'i' and 'o'"),
        (Side(prompt="<u>"), Side(prompt="<u>\n"), "the template, for 'Hello': character 3, '' and '\\n'"),
        (Side(prompt=None), Side(), "the template, for 'Hello': nothing and a prompt"),
        (Side(), Side(prompt=None), "the template, for 'Hello': a prompt and nothing"),
        (Side(prompt=None), Side(prompt=None), None),
    ],
)
def test_what_differs_is_said_once_and_where(one: Side, other: Side, says: str | None) -> None:
    assert differences(one, other) == ([] if says is None else [says])


def test_the_first_text_with_other_tokens_is_told_with_those_around_the_first() -> None:
    (line,) = differences(Side(), Side(first=1000))
    text = next(text for text in PROBES if len(text) > 2)
    codes = [ord(letter) for letter in text[2:5]]
    assert line == f"the text {text[:40]!r}: token 2 of {codes} … and {[code + 1000 for code in codes]} …"


# ---- the command ----


def verify(*words: str, input: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanovllm_cli", "verify", *words]
    return run(command, input=input, capture_output=True, text=True, timeout=250)


def test_exit_codes_say_equal_or_different(tmp_path: Path) -> None:
    other = changed_copy(tmp_path / "m", "model.layers.1.self_attn.o_proj.weight", lambda w: -w)
    same = verify("tiny", "--text", "-", "--json", input="Once upon a time there was a fox.")
    assert (same.returncode, json.loads(same.stdout)["equal"]) == (0, True)
    assert json.loads(same.stdout)["tokens"] < 32
    different = verify("tiny", str(other), "--tokens", "32")
    assert different.returncode == 7
    assert "different: first at layer 1, token 0" in different.stdout
    assert different.stderr == ""


def test_what_cannot_be_compared_is_not_called_different(tmp_path: Path) -> None:
    """As in diff(1): a script must be able to tell a damaged file from a changed one."""
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    for name, code in (("cut.gguf", 1), ("none.gguf", 3)):
        done = verify("tiny", str(tmp_path / name), "--tokens", "2")
        assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no model was named"),
        (["tiny", "tiny", "-m", "tiny"], "more than two"),
        (["tiny", "--against", "model"], "contradict"),
        (["tiny", "tiny", "--against", "transformers"], "contradict"),
    ],
)
def test_contradictions_are_usage_errors(words: list[str], says: str) -> None:
    done = verify(*words)
    assert done.returncode == 2
    assert says in done.stderr
