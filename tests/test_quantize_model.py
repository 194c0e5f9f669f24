"""Whole models: what is planned, what is written, who can read it, and what happens when it goes wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import forked
from engines import SMALL, random_model, save
from kill_points import NUM_POINTS
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, OutputError, UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quantization.original import Original, open_original
from nanovllm_cli.quantization.pipeline import Method, check_apart, quantize_model
from nanovllm_cli.quantization.plan import Choices, Plan, make_plan
from nanovllm_cli.quantization.texts import bundled_text
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import TINY, digest_of, plan_of, quantize

IDS = [4087, 11, 250, 3000, 17, 900, 12, 45]


class StopAt(NullProgress):
    """Interrupts once so many bytes are done in a stage."""

    def __init__(self, name: str, num_bytes: int, error: BaseException) -> None:
        self.name, self.left, self.error = name, num_bytes, error
        self.current = ""

    def stage(self, name: str, total: int | None, unit: Any) -> None:
        self.current = name

    def advance(self, n: int) -> None:
        if self.current.startswith(self.name):
            self.left -= n
            if self.left < 0:
                raise self.error


# ---- plans ----


def test_a_folder_keeps_embedding_and_head_unless_asked() -> None:
    plan = plan_of("int8")
    kept = [item.weight.output for item in plan.items if item.format is None]
    assert kept == ["model.embed_tokens.weight"]
    assert len(plan.items) == 1 + 4 * 7
    assert plan.bytes_before == sum(tensor.nbytes for tensor in load_file(TINY / "model.safetensors").values())


def test_the_first_tensor_type_that_fits_counts() -> None:
    plan = plan_of(
        "int4:group=32", tensor_types=((r"layers\.0\..*down", "int8"), ("down_proj", "keep"), ("v_proj", "fp8"))
    )
    formats = {item.weight.output.removeprefix("model.layers."): item.format for item in plan.items}
    assert formats["0.mlp.down_proj.weight"] == parse_format("int8")
    assert formats["1.mlp.down_proj.weight"] is None
    assert formats["2.self_attn.v_proj.weight"] == parse_format("fp8")
    assert formats["2.mlp.up_proj.weight"] == parse_format("int4:group=32")
    assert plan.notes == ("vLLM keeps q, k, v of a layer as one weight, and won't load them in several formats",)


def test_a_weight_of_one_layer_that_differs_from_what_is_fused_with_it_is_noted() -> None:
    notes = plan_of("int4:group=32", tensor_types=((r"layers\.2\.mlp\.up", "int8"),)).notes
    assert notes == ("vLLM keeps gate, up of a layer as one weight, and won't load them in several formats",)
    assert plan_of("int4:group=32", tensor_types=(("mlp", "int8"),)).notes == ()


def test_the_rows_of_the_closing_table_count_numbers_and_bytes() -> None:
    """Of four layers with 256 hidden columns, q and o of 256 rows, k and v of 128, gate and up of 640, in bfloat16."""
    plan = plan_of("int8", tensor_types=(("_proj", "int8"),), head="keep")
    rows = {row.format: row for row in plan.rows()}
    assert list(rows) == ["as they are", "int8"]
    numbers = 4 * 256 * (256 + 128 + 128 + 256 + 3 * 640)
    assert rows["as they are"][1:] == (1, 4096 * 256, 2 * 4096 * 256, 2 * 4096 * 256)
    scales = 4 * 2 * (256 + 128 + 128 + 256 + 640 + 640 + 256)
    assert rows["int8"][1:] == (28, numbers, 2 * numbers, numbers + scales)
    assert rows["as they are"].bits == 16
    assert rows["int8"].bits == pytest.approx(8 + 8 * scales / numbers)


def test_q4_k_m_gives_layers_the_types_that_llama_cpp_does() -> None:
    plan = plan_of("q4_k_m")
    formats = {item.weight.output: item.format for item in plan.items}
    assert formats["token_embd.weight"] == Blocks("Q6_K")
    assert [formats[f"blk.{i}.attn_v.weight"] for i in range(4)] == [
        Blocks(t) for t in ("Q4_K", "Q4_K", "Q6_K", "Q6_K")
    ]
    assert [formats[f"blk.{i}.ffn_down.weight"] for i in range(4)] == [
        Blocks(t) for t in ("Q5_0", "Q5_0", "Q8_0", "Q8_0")
    ]
    assert len(plan.notes) == 4


@pytest.mark.parametrize(
    ("choices", "error", "words"),
    [
        ({"to": "int9"}, UsageError, "int9"),
        ({"to": "nf4"}, UnsupportedError, "nf4"),
        ({"to": "int3"}, UnsupportedError, "int3"),
        ({"to": "int8", "tensor_types": (("(", "int8"),)}, UsageError, "regular expression"),
        ({"to": "int8", "tensor_types": (("no_such_weight", "fp8"),)}, UsageError, "no_such_weight"),
        ({"to": "int8", "tensor_types": ((".", "keep"),)}, UsageError, "nothing"),
        ({"to": "q8_0", "tensor_types": (("ffn", "int8"),)}, UsageError, "GGUF"),
        ({"to": "int8", "tensor_types": (("up", "q8_0"),)}, UnsupportedError, "q8_0"),
        ({"to": "int8", "embedding": "int8"}, UnsupportedError, "embedding"),
        ({"to": "int8", "head": "banana"}, UsageError, "banana"),
        ({"to": "int4:group=256"}, UnsupportedError, "640"),
    ],
)
def test_choices_that_mean_nothing_are_told(choices: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan_of(**choices)


def test_a_mix_that_is_almost_right_is_suggested() -> None:
    with pytest.raises(UsageError) as refused:
        plan_of("q4_k_mm")
    assert str(refused.value.hint).startswith("did you mean q4_k_m? ")


# ---- folders ----


@pytest.mark.parametrize(
    ("spec", "head"), [("int8", None), ("fp8", None), ("int4:group=32", None), ("int8-weight-only", "int8")]
)
def test_transformers_computes_with_the_weights_that_were_chosen(tmp_path: Path, spec: str, head: str | None) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    quantize(spec, out, head=head)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        got = loaded(torch.tensor([IDS])).logits  # the first call decompresses the weights
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            form = parse_format(spec) if name != "lm_head" else parse_format(head) if head else None
            weight = module.weight.detach()
            wanted = weight if form is None else form.dequantize(form.quantize(weight))
            assert torch.allclose(loaded.get_submodule(name).weight, wanted, rtol=1e-6, atol=0), name
            module.weight = torch.nn.Parameter(wanted)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits
    # it rounds activations to 8 bits where the format says so; e4m3 has three of them behind the leading one
    limit = {"int8": 0.03, "fp8": 0.1}.get(spec, 0.03 if head else 1e-5)
    assert float((got - expected).norm() / expected.norm()) < limit


def test_everything_but_the_weights_is_the_originals(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize("int8", out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (TINY / name).read_bytes()
    before, after = json.loads((TINY / "config.json").read_text()), json.loads((out / "config.json").read_text())
    assert {key: after[key] for key in before} == before
    original, written = load_file(TINY / "model.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in original.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(written[name], tensor)
    assert "## Quantized with nanovllm" in (out / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_tied_head_in_a_format_of_its_own_is_untied(tmp_path: Path) -> None:
    quantize("int8", tmp_path / "out", head="int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" not in config["quantization_config"]["ignore"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.int8
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


# ---- GGUF ----


@pytest.mark.parametrize("spec", ["q8_0", "q4_k"])
def test_a_gguf_file_has_each_weight_in_its_planned_type(tmp_path: Path, spec: str) -> None:
    out = tmp_path / "m.gguf"
    quantize(spec, out)
    originals = load_file(TINY / "model.safetensors")
    with open_checkpoint(out) as written:
        for item in plan_of(spec).items:
            assert isinstance(item.format, Blocks)
            assert written.info(item.weight.output).dtype_name == item.format.type
            found = written.tensor(item.weight.output).double()
            error = (found - originals[item.weight.source].double()).norm() / found.norm()
            assert error < (0.01 if item.format.type == "Q8_0" else 0.1)
        assert written.config["general.file_type"] == {"q8_0": 7, "q4_k": 15}[spec]


@pytest.mark.parametrize("spec", ["q8_0", "q4_0", "q4_k_m", "q6_k"])
def test_llama_cpp_loads_it_and_says_what_we_say(tmp_path: Path, spec: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from nanovllm_cli.quantization.logits import ON_CPU, MeasuredModel

    out = tmp_path / "m.gguf"
    quantize(spec, out)
    theirs = llama_cpp.Llama(str(out), n_ctx=64, logits_all=True, verbose=False, n_threads=2)
    theirs.eval(IDS)
    expected = torch.from_numpy(theirs.scores[: len(IDS)].copy()).double()
    with open_checkpoint(out) as checkpoint:
        model = MeasuredModel(checkpoint, 64, replace(ON_CPU, dtype="float32"))
        found = model.logits(model.hidden(IDS)).double()
    # it rounds activations to 8 bits
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert float((found.argmax(-1) == expected.argmax(-1)).double().mean()) >= 0.75


def test_quantizing_what_is_quantized_needs_a_word(tmp_path: Path) -> None:
    quantize("q8_0", tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="quantized already"):
        quantize("q4_0", tmp_path / "n.gguf", tmp_path / "m.gguf")
    quantize("q4_0", tmp_path / "n.gguf", tmp_path / "m.gguf", requantize=True)
    with open_checkpoint(tmp_path / "n.gguf") as written:
        assert written.info("blk.0.attn_q.weight").dtype_name == "Q4_0"
    assert any("q8_0 already" in note for note in plan_of("q4_0", tmp_path / "m.gguf", requantize=True).notes)
    assert not plan_of("q4_0").notes
    with pytest.raises(UnsupportedError, match="is a GGUF file"):
        quantize("int8", tmp_path / "folder", tmp_path / "n.gguf")


@pytest.mark.parametrize("first", ["int8", "int4:group=32:zeros"])
def test_a_quantized_folder_can_become_another(tmp_path: Path, first: str) -> None:
    """Its weights are what the first format stands for; none of its tensors is left."""
    quantize(first, tmp_path / "first", head="int8")
    (tmp_path / "first" / "quantize_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is int8"):
        quantize("fp8", tmp_path / "second", tmp_path / "first", requantize=True)
    quantize("fp8", tmp_path / "second", tmp_path / "first", requantize=True, head="int8-weight-only")
    quantize("fp8", tmp_path / "at-once", head="int8-weight-only")
    name = "model.layers.1.mlp.down_proj.weight"
    with open_original("first", tmp_path / "first") as one, open_original("second", tmp_path / "second") as two:
        form = parse_format("fp8")
        expected = form.dequantize(form.quantize(torch.cat(list(one.rows(name)))))
        assert torch.equal(torch.cat(list(two.rows(name))), expected)
        with open_checkpoint(tmp_path / "at-once") as at_once:
            assert sorted(two.checkpoint.names()) == sorted(at_once.names())
        assert two.reader.format("lm_head.weight") == parse_format("int8-weight-only")
    assert not (tmp_path / "second" / "quantize_config.json").exists()


# ---- the quality card ----


def test_the_card_is_kept_beside_the_weights(tmp_path: Path) -> None:
    card = quantize("q8_0", tmp_path / "m.gguf", verify_tokens=600)
    assert card is not None
    assert card.quality.kl_mean < 0.002
    assert card.quality.same_top >= 0.98
    kept = json.loads((tmp_path / "m.quality.json").read_text())
    assert kept["quality"]["kl_mean"] == card.quality.kl_mean
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.quality.json"}


def test_a_card_never_takes_anothers_place(tmp_path: Path) -> None:
    """What stands behind a dot belongs to a file's name, and a card that is there already is refused as the file would be."""
    for name, form in (("m.q8", "q8_0"), ("m.q4", "q4_0")):
        quantize(form, tmp_path / name, verify_tokens=50)
        assert json.loads((tmp_path / f"{name}.quality.json").read_text())["format"] == form
    (tmp_path / "n.quality.json").write_text("mine")
    with pytest.raises(UsageError, match=r"n\.quality\.json exists already"):
        quantize("q8_0", tmp_path / "n.gguf", verify_tokens=50)
    made = ("m.q4", "m.q4.quality.json", "m.q8", "m.q8.quality.json", "n.quality.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == list(made), "nothing was begun"
    assert (tmp_path / "n.quality.json").read_text() == "mine"
    quantize("q8_0", tmp_path / "n.gguf")
    assert (tmp_path / "n.quality.json").read_text() == "mine", "no card was asked for"
    quantize("q8_0", tmp_path / "n.gguf", verify_tokens=50, replace=True)
    assert json.loads((tmp_path / "n.quality.json").read_text())["format"] == "q8_0"
    quantize("q4_0", tmp_path / "n.gguf", replace=True)
    assert not (tmp_path / "n.quality.json").exists(), "it was that of another file"


def test_a_folder_has_its_card_twice_behind_what_its_readme_begins_with(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "README.md").write_text("---\nlicense: mit\n---\n\n# Tiny\n\nabove\n---\nbelow\n")
    card = quantize("int8", tmp_path / "out", source, verify_tokens=50)
    assert card is not None
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["quality"]["kl_mean"] == card.quality.kl_mean
    front, section, rest = (tmp_path / "out" / "README.md").read_text().partition(card.as_markdown())
    assert (front, rest) == ("---\nlicense: mit\n---\n\n", "\n# Tiny\n\nabove\n---\nbelow\n")
    assert f"| same most likely token | {card.quality.same_top:.2%} |" in section


@pytest.mark.parametrize("readme", ["# Tiny\n\nabove\n---\nbelow\n", "---\nno end of it\n", ""])
def test_a_readme_without_settings_comes_behind_the_card(tmp_path: Path, readme: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "README.md").write_text(readme)
    quantize("int8", tmp_path / "out", source, tensor_types=(("1.mlp.down", "int8"), (".", "keep")))
    written = (tmp_path / "out" / "README.md").read_text()
    assert written == f"## Quantized with nanovllm\n\ntiny in int8; not measured.\n\n{readme}"


def test_the_card_of_unchanged_weights_is_clean(tmp_path: Path) -> None:
    """Q8_0 of numbers that Q8_0 can say: both models are the same, to the bit."""
    quantize("q8_0", tmp_path / "m.gguf")
    card = quantize("q8_0", tmp_path / "n.gguf", tmp_path / "m.gguf", requantize=True, verify_tokens=100)
    assert card is not None
    assert (card.quality.kl_max, card.quality.same_top) == (0.0, 1.0)


# ---- what goes wrong ----


def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    quantize("int4:group=32", whole)
    for left in (0, 2_000_000):
        with pytest.raises(KeyboardInterrupt):
            quantize("int4:group=32", resumed, progress=StopAt("quantizing", left, KeyboardInterrupt()))
        assert not resumed.exists()
    with pytest.raises(KeyboardInterrupt):
        quantize("int4:group=32", resumed, progress=StopAt("writing", 1_000_000, KeyboardInterrupt()))
    assert {path.name for path in tmp_path.iterdir()} == {"whole", ".resumed.quantizing"}
    quantize("int4:group=32", resumed)
    assert digest_of(resumed) == digest_of(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "resumed"}


class Notes(StopAt):
    def __init__(self) -> None:
        super().__init__("", 1 << 60, KeyboardInterrupt())
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_a_run_says_what_an_earlier_one_has_finished(tmp_path: Path) -> None:
    first, second = Notes(), Notes()
    first.name, first.left = "quantizing", 1_000_000  # a block has 1.4 MB
    with pytest.raises(KeyboardInterrupt):
        quantize("int8", tmp_path / "out", progress=first)
    assert first.notes == []
    part = tmp_path / ".out.quantizing" / "blocks.0.safetensors"
    quantize("int8", tmp_path / "out", progress=second)
    assert second.notes == ["an earlier run has finished 1 of 4 parts: going on from there"]
    assert not part.exists()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_other_files_beside_the_original_change_nothing(tmp_path: Path, form: str) -> None:
    """Of several quantizations in the original's own folder, as users have them, one that was stopped goes on."""
    shutil.copytree(TINY, tmp_path / "folder")
    source = tmp_path / "folder"
    if form == "gguf":
        source = tmp_path / "folder" / "tiny.gguf"
        quantize("q8_0", source)
    stop, again = StopAt("writing", 0, KeyboardInterrupt()), Notes()
    with pytest.raises(KeyboardInterrupt):
        quantize("q4_0", tmp_path / "folder" / "a.gguf", source, requantize=True, progress=stop)
    for name in ("b.gguf", "b.quality.json"):
        (tmp_path / "folder" / name).write_text("another")
    quantize("q4_0", tmp_path / "folder" / "a.gguf", source, requantize=True, progress=again)
    assert any("an earlier run has finished" in note for note in again.notes)


@pytest.mark.parametrize("changed", [{"num_samples": 3}, {"text": "calibration"}])
def test_parts_are_of_their_calibration(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Where it has one: rounding to nearest goes on whatever these say."""
    layer = ((r"layers\.0\.self_attn\.q", "int4:group=32"), (".", "keep"))

    def run(algorithm: Any, stop: bool = False, text: str = "verification", num_samples: int = 2) -> Notes:
        progress = Notes()
        progress.name, progress.left = ("writing", 0) if stop else ("", 1 << 60)
        with open_original("tiny", TINY) as original:
            plan = make_plan(original, Choices("int4", layer))
            method = Method(algorithm, bundled_text(text), num_samples)  # type: ignore[arg-type]
            with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
                quantize_model(original, plan, method, tmp_path / algorithm, None, progress)
        return progress

    for algorithm, going_on in (("gptq", 0), ("rtn", 1)):
        run(algorithm, stop=True)
        assert len(run(algorithm, stop=True).notes) == 1, "the same work goes on"
        assert len(run(algorithm, **changed).notes) == going_on


def test_a_disk_without_room_for_parts_and_output_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output has 4.2 MB, and the parts have a byte for each of 2.75 million weights."""
    for free, fits in ((6_000_000, False), (8_000_000, True)):
        usage = shutil._ntuple_diskusage(10**9, 10**9, free)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        with contextlib.nullcontext() if fits else pytest.raises(DoesNotFitError, match="MB left"):
            quantize("int8", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == (["out"] if fits else [])


def test_finished_parts_are_not_taken_for_other_work(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize("int4:group=32", tmp_path / "out", progress=StopAt("writing", 0, KeyboardInterrupt()))
    quantize("int8", tmp_path / "out")
    quantize("int8", tmp_path / "other")
    assert digest_of(tmp_path / "out") == digest_of(tmp_path / "other")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "journal"])
def test_a_damaged_part_is_made_again(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize("int8", tmp_path / "out", progress=StopAt("writing", 0, KeyboardInterrupt()))
    part, journal = (tmp_path / ".out.quantizing" / name for name in ("blocks.2.safetensors", "journal.jsonl"))
    data = bytearray(part.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        part.write_bytes(data)
    elif damage == "cut":
        part.write_bytes(data[:-100])
    elif damage == "remove":
        part.unlink()
    else:
        journal.write_text(journal.read_text()[:-20])
    quantize("int8", tmp_path / "out")
    quantize("int8", tmp_path / "other")
    assert digest_of(tmp_path / "out") == digest_of(tmp_path / "other")


def test_links_to_nowhere_are_no_failure_to_write(tmp_path: Path) -> None:
    """As in a cache whose blobs were tidied away: what is no setting is left out, a setting that is gone is missed by name."""
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "notes.json").symlink_to("gone")
    quantize("int8", tmp_path / "first", source)
    (source / "generation_config.json").unlink()
    (source / "generation_config.json").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: no such file"):
        quantize("int8", tmp_path / "second", source)
    assert not (tmp_path / "second").exists()


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(TINY, source)
    before = digest_of(source)
    (tmp_path / "link").symlink_to(source)
    for output in (source, source / "inside", tmp_path, tmp_path / "link"):
        with pytest.raises(UsageError, match="where the model itself is"):
            quantize("int8", output, source, replace=True)
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(UsageError, match="where the model itself is"):
            quantize("q8_0", source / name, source, replace=True)
    quantize("q8_0", tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="where the model itself is"):
        quantize("q4_0", tmp_path / "m.gguf", tmp_path / "m.gguf", replace=True, requantize=True)
    assert digest_of(source) == before


def test_a_part_of_a_split_input_is_no_output(tmp_path: Path) -> None:
    """Nor is what its names lead to, as they do in the hub's cache."""
    (tmp_path / "blobs").mkdir()
    for i in range(1, 4):
        (tmp_path / "blobs" / f"{i}").touch()
        (tmp_path / f"m-0000{i}-of-00003.gguf").symlink_to(tmp_path / "blobs" / f"{i}")
    path = tmp_path / "m-00001-of-00003.gguf"
    original = cast(Original, SimpleNamespace(checkpoint=SimpleNamespace(path=path, format="gguf"), folder=tmp_path))
    plan = cast(Plan, SimpleNamespace(kind="gguf"))
    for name in ("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"):
        with pytest.raises(UsageError, match="where the model itself is"):
            check_apart(original, plan, tmp_path / name)
    check_apart(original, plan, tmp_path / "m-00004-of-00004.gguf")


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    quantize("int8", tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        quantize("fp8", tmp_path / "out")
    quantize("fp8", tmp_path / "out", replace=True)
    assert "float-quantized" in (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "out" / "diary.doc").write_text("mine")
    with pytest.raises(UsageError, match=r"diary\.doc"):
        quantize("int8", tmp_path / "out", replace=True)


def test_bad_numbers_and_missing_tensors_are_named(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(TINY, source)
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize("int8", tmp_path / "out", source)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize("int8", tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [300_000, 2_000_000])
def test_a_full_disk_is_told_and_leaves_nothing_under_the_name(tmp_path: Path, limit: int) -> None:
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from quantizing import quantize
from pathlib import Path
from nanovllm_cli.errors import OutputError
try:
    quantize("int8", Path({str(tmp_path / "out")!r}))
except OutputError as error:
    print(error.message, error.hint)
    sys.exit(9)
"""
    done = forked.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert "cannot write" in done.stdout
    assert not (tmp_path / "out").exists()
    quantize("int8", tmp_path / "out")
    quantize("int8", tmp_path / "other")
    assert digest_of(tmp_path / "out") == digest_of(tmp_path / "other")


_KILLED = """
import sys
from pathlib import Path
import torch
from kill_points import killed_at_random_points
from quantizing import digest_of, quantize
torch.set_num_threads(1)
to, out, good, source = sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
original = digest_of(source)

def check(number):
    assert digest_of(source) == original
    if out.exists():
        assert digest_of(out) == good
        for path in out.rglob("*") if out.is_dir() else []:
            path.unlink()
        out.rmdir() if out.is_dir() else out.unlink()

killed = killed_at_random_points(lambda: quantize(to, out, source), check)
quantize(to, out, source)
assert digest_of(out) == good
assert sorted(path.name for path in out.parent.iterdir()) == [out.name]
print("killed", killed)
"""


@pytest.mark.parametrize(("spec", "name"), [("int4:group=32", "out"), ("q4_0", "out.gguf")])
def test_killed_at_many_points_the_output_is_absent_or_whole(tmp_path: Path, spec: str, name: str) -> None:
    """Each run goes on with what the killed ones before it have finished."""
    quantize(spec, tmp_path / name)
    (tmp_path / "work").mkdir()
    arguments = [spec, str(tmp_path / "work" / name), digest_of(tmp_path / name), str(TINY)]
    done = forked.run([sys.executable, "-c", _KILLED, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 0.5 * NUM_POINTS


def test_output_error_is_what_a_missing_folder_gives(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        quantize("int8", tmp_path / "no" / "such" / "folder")


def random_llama(folder: Path, tied: bool) -> Path:
    """With the bundled model's tokenizer."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**(SMALL | sizes | {"vocab_size": 4096, "head_dim": 32, "tie_word_embeddings": tied}))
    save(random_model(config), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_llamas_q_and_k_go_where_gguf_has_them(tmp_path: Path, tied: bool) -> None:
    from nanovllm_cli.quantization.verify import compare, trace

    source = random_llama(tmp_path / "llama", tied)
    out = tmp_path / "m.gguf"
    quantize("q8_0", out, source)
    found = compare(*(trace(path, IDS, "float32", NullProgress()) for path in (out, source)), [], tolerance=0.1)
    assert found.first_layer is None, found.first_layer


def test_a_head_of_its_own_beside_a_tied_embedding_in_gguf(tmp_path: Path) -> None:
    from nanovllm_cli.quantization.verify import compare, trace

    out = tmp_path / "m.gguf"
    quantize("q8_0", out, head="q6_k", embedding="q4_0", tensor_types=(("ffn_up", "keep"),))
    with open_checkpoint(out) as written:
        kinds = [
            written.info(name).dtype_name for name in ("output.weight", "token_embd.weight", "blk.0.ffn_up.weight")
        ]
    assert kinds == ["Q6_K", "Q4_0", "BF16"]
    found = compare(*(trace(path, IDS, "float32", NullProgress()) for path in (out, TINY)), [], tolerance=0.3)
    assert found.first_layer is None, found.first_layer
