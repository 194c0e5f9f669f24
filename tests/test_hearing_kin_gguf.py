"""What an Audio Flamingo 3 hears by in a file of its own, as llama.cpp's converter writes it, and what no such file says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ears_gguf import write_ear
from engines import save
from hearing_kin import a_piece
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears_gguf import ear_label, hearing_from_gguf
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file, tower_or_note
from nanovllm_cli.weights.hearing import load_ear, read_hearing
from nanovllm_cli.weights.mmproj import load_ear_gguf, open_mmproj, read_mmproj
from test_hearing_kin import model_of

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")


def test_a_file_is_the_folders_tower_to_the_bit(tmp_path: Path) -> None:
    folder = save(model_of("audio-flamingo"), tmp_path / "model")
    with open_checkpoint(folder) as checkpoint, open_mmproj(write_ear(folder, tmp_path / "mmproj.gguf")) as file:
        spec, found = read_hearing(checkpoint), read_mmproj(file).hearing
        assert spec is not None
        assert found is not None
        assert found == dataclasses.replace(spec, tower=dataclasses.replace(spec.tower, eps=found.tower.eps))  # type: ignore[type-var]
        assert found.tower.eps == pytest.approx(spec.tower.eps)
        sound = a_piece(spec, 33)
        expected = load_ear(checkpoint, spec, torch.float32)(sound).rows
        assert torch.equal(load_ear_gguf(file, spec, torch.float32)(sound).rows, expected)


def test_a_folder_becomes_the_file_that_llama_cpp_makes(tmp_path: Path) -> None:
    """In full: its converter takes no float16 for what was trained in bfloat16."""
    folder = save(model_of("audio-flamingo"), tmp_path / "model")
    reference = gguf.GGUFReader(write_ear(folder, tmp_path / "reference.gguf"))
    with open_checkpoint(folder) as checkpoint:
        made = tower_file(checkpoint, "f32", "m")
        assert made is not None
        found = gguf.GGUFReader(made.write(tmp_path / "m-F32.gguf", replace=False, progress=NullProgress()).path)
    tensors, wanted = ({tensor.name: tensor for tensor in file.tensors} for file in (found, reference))
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert list(tensors[name].shape) == list(tensor.shape), name
        assert tensors[name].tensor_type.name == "F32"
        np.testing.assert_array_equal(tensors[name].data, tensor.data)
    fields = {key: field.contents() for key, field in found.fields.items()}
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert fields[key] == pytest.approx(field.contents()), key


@pytest.mark.parametrize("family", ["music-flamingo", "glm-asr"])
def test_what_no_file_is_written_of_is_told(family: str, tmp_path: Path) -> None:
    """Files of llama.cpp's have neither rotary positions nor times by which rows turn."""
    with open_checkpoint(save(model_of(family), tmp_path / "model")) as checkpoint:
        tower, (note,) = tower_or_note(checkpoint, "f32", "m")
    assert tower is None
    assert "no file is written of what such a model hears by" in note


BROKEN: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "more layers": ({"clip.audio.block_count": 4}, CheckpointError, "15 missing"),
    "wider rows": ({"clip.audio.projection_dim": 49}, CheckpointError, "between the projector's layers"),
    "bands": ({"clip.audio.num_mel_bins": 10}, CheckpointError, "a.conv1d.1.weight"),
    "another projector": ({"clip.projector_type": "glma"}, UnsupportedError, "projector 'glma'"),
    "windows": ({"clip.projector_type": "qwen2.5o"}, CheckpointError, "mm.a.fc"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_no_tower_can_be_are_refused_by_name(name: str, tmp_path: Path) -> None:
    keys, kind, told = BROKEN[name]
    path = write_ear(save(model_of("audio-flamingo"), tmp_path / "model"), tmp_path / "mmproj.gguf", keys)
    with open_mmproj(path) as file, pytest.raises(kind) as caught:
        load_ear_gguf(file, read_mmproj(file).hearing, torch.float32)  # type: ignore[arg-type]
    assert told in caught.value.message


@pytest.mark.parametrize(("both", "audio", "sees", "label"), [
    ("qwen2.5o", "none", True, "qwen2.5o"), ("qwen2.5o", "none", False, "qwen2.5o"), ("none", "gemma4a", True, "gemma4a"),
    ("gemma4v", "gemma4a", True, "gemma4a"), ("voxtral", "none", False, "voxtral"), ("none", "none", True, "none"),
])  # fmt: skip
def test_one_name_may_be_of_both_towers(both: str, audio: str, sees: bool, label: str) -> None:
    said = {"clip.has_audio_encoder": True, "clip.has_vision_encoder": sees}
    said |= {key: name for key, name in (("clip.projector_type", both), ("clip.audio.projector_type", audio)) if name != "none"}
    assert ear_label(ConfigReader(said, "it")) == label


def test_a_qwen2_5_omnis_windows_are_as_published() -> None:
    keys = {"embedding_length": 32, "block_count": 1, "attention.head_count": 2, "feed_forward_length": 64, "num_mel_bins": 128,
            "projection_dim": 48}  # fmt: skip
    said = {f"clip.audio.{key}": value for key, value in keys.items()} | {"clip.has_audio_encoder": True}
    spec = hearing_from_gguf(ConfigReader(said | {"clip.projector_type": "qwen2.5o"}, "it"), {})
    assert (spec.piece, spec.most, spec.framed, spec.tower.num_made(200)) == (200, 150, True, 50)
