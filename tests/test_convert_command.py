"""`nanovllm convert` as a command: what it prints, what it refuses, and what is left when it is stopped at any point."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest
import torch

import forked
from kill_points import NUM_POINTS
from nanovllm_cli.errors import DoesNotFitError, UsageError
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.source import resolve
from quantized_checkpoints import gptq, gptq_config, module, write
from test_cli_driver import SOURCE, environment, nanovllm

TINY = resolve("tiny").path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".cache")  # the home's, not the output's


def test_there_and_back_by_default(tmp_path: Path) -> None:
    there = nanovllm(tmp_path, "convert", "tiny")
    assert (there.code, there.out) == (0, "tiny-BF16.gguf\n")
    assert "nanovllm run tiny-BF16.gguf" in there.err
    assert any(line.startswith("total") and "46" in line for line in there.err.splitlines())
    back = nanovllm(tmp_path, "convert", "tiny-BF16.gguf", "-q")
    assert (back.code, back.out, back.err) == (0, "tiny-hf\n", "")
    assert names(tmp_path) == ["tiny-BF16.gguf", "tiny-hf"]
    assert (tmp_path / "tiny-hf" / "chat_template.jinja").read_bytes() == (TINY / "chat_template.jinja").read_bytes()


def test_json_says_what_was_done(tmp_path: Path) -> None:
    done = nanovllm(tmp_path, "convert", "tiny", "--outtype", "q8_0", "-o", "x.gguf", "--json")
    record = json.loads(done.out)
    assert done.code == 0
    assert record["output"] == "x.gguf"
    assert record["written"] is True
    assert record["not_carried"] == []
    assert {row["class"]: row["to"] for row in record["tensors"]}["mlp"] == "Q8_0"
    assert sum(row["count"] for row in record["tensors"]) == 46
    assert abs(record["bytes"] - (tmp_path / "x.gguf").stat().st_size) < 300_000


def test_words_of_a_quantized_folder_are_counted_as_the_weights_in_them(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 32)(48, 64, numpy.random.default_rng(0))
    write(tmp_path / "q", {**module(tensors), "model.norm.weight": torch.ones(64)}, gptq_config(4, 32))
    done = nanovllm(tmp_path, "convert", "q", "--to", "hf", "--dry-run", "--json")
    of = {row["class"]: row for row in json.loads(done.out)["tensors"]}
    assert {kind: row["weights"] for kind, row in of.items()} == {"attention": 48 * 64, "norms": 64}
    # Codes of 4 bits; for each of 2 groups, 16 bits of scale a row and 4 of zero; 32 bits of index a column.
    num_bits = 4 * 48 * 64 + 2 * 48 * (16 + 4) + 64 * 32
    assert (of["attention"]["to_bytes"] * 8, done.err.count(f"{num_bits / (48 * 64):.2f}")) == (num_bits, 1)
    total = next(line for line in done.err.splitlines() if line.startswith("total"))
    assert total.endswith(f"{(num_bits + 64 * 32) / (48 * 64 + 64):.2f}")


def test_words_that_nobody_here_reads_have_no_bits_a_weight(tmp_path: Path) -> None:
    write(tmp_path / "q", {"model.layers.0.mlp.up_proj.words": torch.ones(4, 4)}, {"quant_method": "unheard_of"})
    done = nanovllm(tmp_path, "convert", "q", "--to", "hf", "--dry-run", "--json")
    assert (done.code, [row["weights"] for row in json.loads(done.out)["tensors"]]) == (0, [None])
    assert [line.split()[-1] for line in done.err.splitlines() if line.startswith(("mlp", "total"))] == ["-", "-"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = nanovllm(tmp_path, "convert", "tiny", "--dtype", "float16", "--to", "safetensors", "--dry-run")
    assert (done.code, done.out) == (0, "")
    assert "would write tiny-f16" in done.err
    assert names(tmp_path) == []


def test_a_setting_that_is_a_link_to_nowhere_is_missed(tmp_path: Path) -> None:
    """As in a cache whose blobs were tidied away. What is no setting of the model may be gone."""
    shutil.copytree(TINY, tmp_path / "source")
    (tmp_path / "source" / "notes.md").symlink_to("gone")
    assert nanovllm(tmp_path, "convert", "source", "--to", "hf", "-o", "first").code == 0
    (tmp_path / "source" / "tokenizer.json").unlink()
    (tmp_path / "source" / "tokenizer.json").symlink_to("gone")
    missed = nanovllm(tmp_path, "convert", "source", "--to", "hf", "-o", "second")
    assert missed.code == 1
    assert "tokenizer.json: no such file" in missed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "source"]


def test_parts_make_a_folder(tmp_path: Path) -> None:
    done = nanovllm(tmp_path, "convert", "tiny", "--split-max-size", "2M", "-q")
    assert done.out == "tiny-BF16\n"
    assert all(name.endswith(".gguf") for name in names(tmp_path / "tiny-BF16"))
    assert nanovllm(tmp_path, "convert", "tiny-BF16", "--to", "gguf", "-o", "whole.gguf", "-q").code == 0
    with open_checkpoint(tmp_path / "whole.gguf") as whole, open_checkpoint(tmp_path / "tiny-BF16") as parts:
        assert whole.names() == parts.names()


def test_rounding_what_was_rounded_needs_a_word(tmp_path: Path) -> None:
    nanovllm(tmp_path, "convert", "tiny", "--outtype", "q4_0", "-o", "q4.gguf", "-q")
    words = ("convert", "q4.gguf", "--to", "gguf", "--outtype", "q2_k", "--dry-run")
    refused = nanovllm(tmp_path, *words)
    assert refused.code == 2
    assert "q4.gguf is quantized already" in refused.err
    assert "--allow-requantize" in refused.err
    assert nanovllm(tmp_path, *words, "--allow-requantize").code == 0


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    (tmp_path / "tiny-BF16.gguf").write_text("mine")
    refused = nanovllm(tmp_path, "convert", "tiny")
    assert refused.code == 2
    assert "exists already" in refused.err
    assert "--force" in refused.err
    assert (tmp_path / "tiny-BF16.gguf").read_text() == "mine"
    assert nanovllm(tmp_path, "convert", "tiny", "--force", "-q").code == 0
    assert (tmp_path / "tiny-BF16.gguf").stat().st_size > 1_000_000


def test_the_input_is_never_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source, output in ((TINY, "m.gguf"), (Path("m.gguf"), "folder")):
        with convert.open_source(source) as checkpoint:
            made = convert.plan(checkpoint, "hf" if output == "folder" else "gguf")
            convert.write(checkpoint, made, Path(output))
    os.link("m.gguf", "hard.gguf")
    Path("soft.gguf").symlink_to("m.gguf")
    cases: tuple[tuple[str, convert.Target, str], ...] = (
        ("m.gguf", "gguf", "m.gguf"), ("m.gguf", "gguf", "hard.gguf"), ("m.gguf", "gguf", "soft.gguf"),
        ("soft.gguf", "gguf", "m.gguf"), ("folder", "hf", "folder"), ("folder", "hf", "."), ("m.gguf", "hf", "."),
        ("folder/model.safetensors", "hf", "folder"), ("folder", "gguf", "folder/model.safetensors"),
        ("folder", "gguf", "folder/config.json"), ("folder", "gguf", "folder"),
    )  # fmt: skip
    for source_name, target, output in cases:
        with convert.open_source(Path(source_name)) as checkpoint, pytest.raises(UsageError, match="is the input"):
            convert.check_output(checkpoint, convert.plan(checkpoint, target), Path(output), replace=True)
    with convert.open_source(Path("m.gguf")) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, "gguf", split_bytes=3_000_000), Path("parts"))
    first, *_, last = sorted(Path("parts").iterdir())
    with convert.open_source(first) as checkpoint, pytest.raises(UsageError, match="is the input"):
        convert.check_output(checkpoint, convert.plan(checkpoint, "gguf"), last, replace=True)
    refused = nanovllm(tmp_path, "convert", "m.gguf", "--to", "gguf", "-o", "soft.gguf", "--force")
    assert refused.code == 2
    assert "is the input" in refused.err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ((), 2, "no model was named"),
        (("nothing-like-it",), 3, "no model"),
        (("random:qwen3-8b",), 2, "made-up weights"),
        (("tiny", "--outtype", "q9_z"), 2, "no type"),
        (("tiny", "--outtype", "q8_0", "--to", "hf"), 2, "--to gguf"),
        (("tiny", "--outtype", "Q4_K_M"), 2, "nanovllm quantize tiny --to q4_k_m"),
        (("tiny", "--to", "onnx"), 2, "onnx"),
        (("tiny", "-o", "m.safetensors"), 2, "-o m.gguf"),
        (("tiny", "--to", "hf", "-o", "m.gguf"), 2, "is a folder"),
        (("tiny", "--split-max-size", "2M", "-o", "m.gguf"), 2, "make a folder"),
        (("tiny", "-o", "-"), 2, "standard output"),
        (("tiny", "-o", ""), 2, "-o needs the name of a file"),
        (("tiny", "--split-max-size", "much"), 2, "much"),
        (("tiny", "-o", "no/such/folder.gguf"), 1, "create it first"),
        (("tiny", "-o", "/dev/null/x.gguf"), 1, "cannot write"),
        (("tiny", "--to", "hf", "-o", "notes", "--force"), 2, "diary.txt"),
        (("notes",), 1, "no .safetensors"),
        (("broken.gguf",), 1, "broken.gguf"),
    ],
)
def test_mistakes_are_one_line_with_a_hint(flags: tuple[str, ...], code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(8))
    done = nanovllm(tmp_path, "convert", *flags)
    assert done.code == code, done.err
    assert words in done.err
    assert len(done.err.strip().splitlines()) <= 2
    assert done.out == ""
    assert names(tmp_path) == ["broken.gguf", "notes"]


KILLS = """
import hashlib, os, shutil, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from kill_points import killed_at_random_points
from nanovllm_cli.weights import convert

here, source, target = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
output = here / "out"

def work():
    with convert.open_source(source) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, target, "f32"), output, replace=True)

def content(path):
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(file.name, hashlib.sha256(file.read_bytes()).digest()) for file in files if file.is_file()]

original, whole = content(source), []

def check(number):
    assert content(source) == original, "the input changed"
    if number == 0:
        whole.extend(content(output))
    assert not output.exists() or content(output) == whole, "half an output"
    assert set(os.listdir(here)) <= {"out", ".out.partial", ".out.replaced", ".out.discarded"}
    if number % 2 == 0 and output.exists():
        shutil.rmtree(output) if output.is_dir() else output.unlink()

killed = killed_at_random_points(work, check)
work()
assert content(output) == whole
assert os.listdir(here) == ["out"], os.listdir(here)
print("killed", killed)
"""


@pytest.mark.parametrize("target", ["gguf", "hf"])
def test_killed_at_many_points_the_output_is_absent_or_whole(target: str, tmp_path: Path) -> None:
    """Every second time there is an older output to be replaced."""
    source = TINY
    if target == "hf":
        nanovllm(tmp_path, "convert", "tiny", "-q", "-o", "tiny.gguf")
        source = tmp_path / "tiny.gguf"
    here = tmp_path / "here"
    here.mkdir()
    done = forked.run(
        [sys.executable, "-c", KILLS, str(here), str(source), target], capture_output=True, text=True, timeout=200,
        env=environment(tmp_path) | {"TEST_NANOVLLM_KILLS": str(NUM_POINTS)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 0.8 * NUM_POINTS


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = forked.Forked(
        [sys.executable, "-m", "nanovllm_cli", "convert", "tiny", "--to", "gguf", "--outtype", "q4_0", "-o", "big.gguf"],
        cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / ".big.gguf.partial").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    if process.returncode == 0:  # it was faster than the signal
        assert names(tmp_path) == ["big.gguf"]
    else:
        assert process.returncode == 130
        assert names(tmp_path) == []


@pytest.mark.parametrize("target", ["gguf", "hf"])
def test_a_full_disk_is_an_error_and_leaves_nothing(target: str, tmp_path: Path) -> None:
    """A limit on the size of files, where the fourth megabyte does not fit."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3_072_000, 3_072_000));"
        "from nanovllm_cli.cli.app import main; main()"
    )
    words = ["convert", "tiny", "--to", target, "-o", "out"]
    done = forked.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "cannot write out" in done.stderr
    assert "; convert --split-max-size writes smaller ones" in done.stderr, "which quantize has not, whose files end so, too"
    assert len(done.stderr.strip().splitlines()) == 2
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))  # type: ignore[attr-defined]
    with convert.open_source(TINY) as source, pytest.raises(DoesNotFitError):
        convert.check_output(source, convert.plan(source, "gguf"), tmp_path / "x.gguf", replace=False)


def test_memory_stays_small(tmp_path: Path) -> None:
    """A model of 400 MB is converted within 150 MB above what the imports take."""
    script = textwrap.dedent("""
        import json, resource, sys, torch
        from pathlib import Path
        from nanovllm_cli.weights import convert
        from nanovllm_cli.weights.writer import SafetensorsWriter, TensorOut
        torch.set_num_threads(1)
        here = Path(sys.argv[1])
        (here / "m").mkdir()
        (here / "m" / "config.json").write_text('{"architectures": ["X"]}')
        with (here / "m" / "model.safetensors").open("wb") as file:
            writer = SafetensorsWriter(file, [TensorOut("a", (100_000, 1000), torch.float32)])
            writer.write("a", (torch.zeros(1000, 1000) for _ in range(100)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with convert.open_source(here / "m") as source:
            convert.write(source, convert.plan(source, "hf", "bf16"), here / "out")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) < 150, done.stderr
