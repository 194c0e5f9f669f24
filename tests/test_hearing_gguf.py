"""What a GGUF model hears by, in a file of its own: the same tower as the folder's, found beside the model and heard through a
template that knows nothing of sounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ears_gguf import write_ear
from engines import random_model, save
from hearing import WORDS, a_sound, config_of, hearing_model
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file, tower_or_note
from nanovllm_cli.weights.hearing import load_ear, read_hearing
from nanovllm_cli.weights.mmproj import checked_mmproj, load_ear_gguf, open_mmproj, read_mmproj
from sounding import noise, sound_part
from sounding import wav as saved
from test_hearing import FAMILIES, model_of
from test_mmproj import with_merges

transformers = pytest.importorskip("transformers")
PLAIN = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}<|im_end|>
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def converted(folder: Path, path: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, "gguf", "f32"), path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_folders_tower_to_the_bit(family: str, tmp_path: Path) -> None:
    folder = save(model_of(family), tmp_path / "model")
    with open_checkpoint(folder) as checkpoint, open_mmproj(write_ear(folder, tmp_path / "mmproj.gguf")) as file:
        spec, found = read_hearing(checkpoint), read_mmproj(file).hearing
        assert spec is not None
        if family == "qwen3-asr":  # which are said in no file
            assert (found.piece, found.least) == (800, 8000)  # type: ignore[union-attr]
        sound = a_sound(spec, spec.piece)
        expected = load_ear(checkpoint, spec, torch.float32)(sound).rows
        assert torch.equal(load_ear_gguf(file, found, torch.float32)(sound).rows, expected)  # type: ignore[arg-type]


BROKEN: dict[str, tuple[str, dict[str, Any], type[NanovllmError], str]] = {
    "another projector": ("voxtral", {"clip.projector_type": "ultravox"}, UnsupportedError, "projector 'ultravox'"),
    "no projector": ("voxtral", {"clip.projector_type": None}, UnsupportedError, "projector 'none'"),
    "no layers": ("voxtral", {"clip.audio.block_count": None}, CheckpointError, "block_count"),
    "more layers": ("voxtral", {"clip.audio.block_count": 4}, CheckpointError, "15 missing"),
    "rows joined": ("voxtral", {"clip.audio.projector.stack_factor": 3}, CheckpointError, "joined"),
    "nothing joined": ("voxtral", {"clip.audio.projector.stack_factor": None}, CheckpointError, "stack_factor"),
    "bands": ("qwen2-audio", {"clip.audio.num_mel_bins": 10}, CheckpointError, "a.conv1d.1.weight"),
    "heads": ("qwen3-asr", {"clip.audio.attention.head_count": 5}, CheckpointError, "can't share"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_no_tower_can_be_are_refused_by_name(name: str, tmp_path: Path) -> None:
    family, keys, kind, told = BROKEN[name]
    path = write_ear(save(model_of(family), tmp_path / "model"), tmp_path / "mmproj.gguf", keys)
    with open_mmproj(path) as file, pytest.raises(kind) as caught:
        load_ear_gguf(file, read_mmproj(file).hearing, torch.float32)  # type: ignore[arg-type]
    assert told in caught.value.message


def test_a_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = save(model_of("qwen3-asr"), tmp_path / "model")
    for lost in ("a.conv2d.1.weight", "a.blk.1.attn_k.bias", "mm.a.mlp.2.weight"):
        path = write_ear(folder, tmp_path / f"{lost}.gguf", change=lambda tensors, lost=lost: tensors.pop(lost))  # type: ignore[misc]
        with open_mmproj(path) as file, pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
            load_ear_gguf(file, read_mmproj(file).hearing, torch.float32)  # type: ignore[arg-type]


def test_a_gguf_model_hears_by_the_file_beside_it(tmp_path: Path) -> None:
    folder = with_merges(hearing_model(tmp_path / "model"), WORDS)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": PLAIN}))
    ours = tmp_path / "files" / "model-F32.gguf"
    ours.parent.mkdir()
    converted(folder, ours)
    write_ear(folder, ours.parent / "mmproj-model-F32.gguf")
    settings, greedy = EngineConfig(threads=2, num_blocks=64, dtype="float32"), SamplingParams(temperature=0.0, max_tokens=8)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, sound_part(saved(noise(16_000))),
                                             {"type": "text", "text": "<|audio_pad|>"}]}]  # fmt: skip
    answers, prompts = [], []
    for path in (folder, ours):
        with LLM(str(path), config=settings) as llm:
            assert llm.hearing is not None
            prompts.append(llm.encode_chat(messages))
            answers.append(llm.chat(messages, greedy)[0].outputs[0].token_ids)
            text = llm.tokenizer.decode(prompts[-1], skip_special_tokens=False)
            assert text.startswith("<|im_start|>user\na<|audio_start|>" + "<|audio_pad|>" * 13 + "<|audio_end|><|audio_pad|>")
            assert [placed.num_tokens for placed in prompts[-1].images] == [13]
    assert list(prompts[0]) == list(prompts[1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("family", "kind"), [("voxtral", "llama"), ("qwen2-audio", "qwen2"), ("qwen3-asr", "qwen3vl")])
def test_a_converted_model_is_of_the_kind_that_its_file_belongs_to(family: str, kind: str, tmp_path: Path) -> None:
    folder, ours = with_merges(hearing_model(tmp_path / "model", family=family), WORDS), tmp_path / "model.gguf"
    converted(folder, ours)
    mmproj = write_ear(folder, tmp_path / "mmproj.gguf")
    with open_checkpoint(ours) as model:
        assert model.config["general.architecture"] == kind
        assert isinstance(checked_mmproj(mmproj, model, 48).hearing, HearingSpec)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = with_merges(hearing_model(tmp_path / "model"), WORDS)
    ours = tmp_path / "model.gguf"
    converted(folder, ours)
    other = write_ear(save(model_of("voxtral"), tmp_path / "other"), tmp_path / "mmproj-other.gguf")
    wide = write_ear(folder, tmp_path / "mmproj-wide.gguf", {"clip.audio.projection_dim": 64})
    for path, told_of_it in ((other, "of models of the kind llama"), (wide, "rows of 64 numbers for a model of 48")):
        with pytest.raises(UsageError, match=told_of_it):
            LLM(str(ours), config=EngineConfig(threads=2, mmproj=str(path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(family: str, tmp_path: Path) -> None:
    folder = save(as_published(family), tmp_path / "model")
    reference = gguf.GGUFReader(write_ear(folder, tmp_path / "reference.gguf"))
    with open_checkpoint(folder) as checkpoint:
        made = tower_file(checkpoint, "f32", "m")
        assert made is not None
        wrote = made.write(tmp_path / "m-F32.gguf", replace=False, progress=NullProgress())
        assert (wrote.path.name, str(wrote)) == ("mmproj-m-F32.gguf", f"what it hears by: {wrote.path}")
        assert made.names == {name for name in checkpoint.names() if "tower" in name or "projector" in name}
    found = gguf.GGUFReader(wrote.path)
    tensors, wanted = ({tensor.name: tensor for tensor in file.tensors} for file in (found, reference))
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert list(tensors[name].shape) == list(tensor.shape), name
        is_short = name.startswith("a.conv") and name.endswith("weight")  # which llama.cpp wants in float16
        assert tensors[name].tensor_type.name == ("F16" if is_short else "F32")
        if name != "a.position_embd.weight" or tensor.data.any():
            near = {"rtol": 1e-3, "atol": 1e-7} if is_short else {"rtol": 0, "atol": 0}
            np.testing.assert_allclose(tensors[name].data, tensor.data, **near)
    fields = {key: field.contents() for key, field in found.fields.items()}
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert fields[key] == pytest.approx(field.contents()), key


def as_published(family: str) -> Any:
    """With the windows that no file says."""
    if family != "qwen3-asr":
        return model_of(family)
    config = config_of(family)
    config.audio_config.n_window_infer = 800
    return random_model(config, auto=transformers.AutoModelForMultimodalLM)


def test_what_no_file_says_is_told(tmp_path: Path) -> None:
    folder = save(model_of("qwen3-asr"), tmp_path / "model")
    with open_checkpoint(folder) as checkpoint:
        tower, notes = tower_or_note(checkpoint, "f32", "m")
    assert (tower, notes) == (None, ["what it hears by: a GGUF file can't say this of a tower: piece"])
