"""A Gemma 4's ears in a GGUF file, beside what it sees by: what `convert` writes against what llama.cpp's converter does (its
tensors' names, shapes and numbers; conversion/gemma.py of llama.cpp), and what is read against the folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ear import Ear
from nanovllm_cli.models.ears_gguf import hearing_from_gguf
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_or_note
from nanovllm_cli.weights.mmproj import load_ear_gguf, open_mmproj, read_mmproj
from test_hearing_gemma4 import AUDIO, changed, draw, frames, open_ear, sound_of
from test_tower_gemma4 import VISION
from test_towers import TEXT

transformers = pytest.importorskip("transformers")
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor  # noqa: E402

PUBLISHED = AUDIO | {"rms_norm_eps": 1e-6, "attention_logit_cap": 50.0}
"""What no file says is as all have it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders, by name; each is made once. They see by what files take for granted."""

    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        sees = VISION | {"use_clipped_linears": True} if name != "hears alone" else None
        audio = PUBLISHED | {"use_clipped_linears": name != "nothing clipped"}
        config = transformers.Gemma4Config(
            text_config=TEXT | {"hidden_size_per_layer_input": 0}, vision_config=sees, audio_config=audio
        )
        draw(transformers.Gemma4ForConditionalGeneration(config)).save_pretrained(folder)
        Gemma4AudioFeatureExtractor(feature_size=34).save_pretrained(folder)
        return folder

    return functools.cache(get)


def written(folder: Path, output: Path, outtype: str = "f32") -> tuple[Path, list[str]]:
    """And what is told of it."""
    with open_checkpoint(folder) as checkpoint:
        tower, notes = tower_or_note(checkpoint, outtype, "m")
        assert tower is not None
        wrote = tower.write(output, replace=False, progress=NullProgress())
        kinds = {"vision": "sees", "audio": "hears"}
        assert wrote.does == " and ".join(kinds[each] for each in kinds if any(each in name for name in tower.names))
        return wrote.path, notes


def open_file(path: Path) -> tuple[HearingSpec, Ear]:
    with open_mmproj(path) as file:
        spec = hearing_from_gguf(ConfigReader(file.config, "m"), {name: file.info(name).shape for name in file.names()})
        return spec, load_ear_gguf(file, spec, torch.float32)


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder's tensors for sounds, as llama.cpp's converter renames and shapes them, by the gguf package's own map."""
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3), {}
    for name, numbers in load_file(folder / "model.safetensors").items():
        if "audio" not in name:
            continue
        own = name.replace("model.audio_tower.", "conformer.").replace(".linear.", ".")
        numbers = numbers.view(1) if not numbers.dim() else numbers
        if own.endswith("per_dim_scale"):
            own, numbers = f"{own}.weight", torch.nn.functional.softplus(numbers)
        if "depthwise_conv1d" in own:
            numbers = numbers.view(len(numbers), -1)
        theirs = names.get_name(own, (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min"))
        assert theirs is not None, own
        tensors[theirs] = numbers
    return tensors


@pytest.mark.parametrize("name", ["both", "nothing clipped", "hears alone"])
def test_a_folder_becomes_the_file_that_llama_cpp_makes(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    path, notes = written(made(name), tmp_path / "m-Q4_0.gguf")
    assert (path.name, notes) == ("mmproj-m-F32.gguf", [])
    file, wanted = gguf.GGUFReader(path), expected(made(name))
    found = {tensor.name: tensor.data for tensor in file.tensors if not tensor.name.startswith(("v.", "mm.input"))}
    assert found.keys() == wanted.keys()
    assert [each for each in wanted if not np.array_equal(found[each], wanted[each].numpy())] == []
    assert (name == "hears alone") == (len(found) == len(file.tensors))
    fields = {key: field.contents() for key, field in file.fields.items()}
    said = {
        "clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a", "clip.audio.projection_dim": 24,
        "clip.audio.embedding_length": 40, "clip.audio.feed_forward_length": 160, "clip.audio.block_count": 3,
        "clip.audio.attention.head_count": 2, "clip.audio.num_mel_bins": 34,
    }  # fmt: skip
    if name != "hears alone":
        said |= {"clip.has_vision_encoder": True, "clip.vision.projector_type": "gemma4v"}
    assert {key: fields.get(key) for key in said} == said
    assert "clip.projector_type" not in fields


def test_what_llama_cpp_convolves_is_in_float32(made: Callable[[str], Path], tmp_path: Path) -> None:
    """conversion/gemma.py's `tensor_force_quant`; its other matrices are in the type that was asked for."""
    path, _ = written(made("both"), tmp_path / "m.gguf", "f16")
    assert path.name == "mmproj-m-F16.gguf"
    whole = ("a.conv1d.", "a.input_projection.", "a.blk.0.conv_dw.")
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith(("a.", "mm.a.")) and "blk.1" not in tensor.name and "blk.2" not in tensor.name:
            is_whole = len(tensor.shape) < 2 or tensor.name.startswith(whole)
            assert tensor.tensor_type.name == ("F32" if is_whole else "F16"), tensor.name


@pytest.mark.parametrize("name", ["both", "nothing clipped", "hears alone"])
def test_a_file_is_the_folders_tower_to_the_bit(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    path, _ = written(made(name), tmp_path / "m.gguf")
    spec, ear = open_file(path)
    wanted, reference = open_ear(made(name))
    assert spec == wanted
    assert torch.equal(ear(sound_of(frames(101))).rows, reference(sound_of(frames(101))).rows)
    with open_mmproj(path) as file:
        senses = read_mmproj(file)
    assert (senses.vision is None, senses.hearing) == (name == "hears alone", spec)


def test_an_epsilon_that_was_written_by_mistake_is_not_believed(made: Callable[[str], Path], tmp_path: Path) -> None:
    path, _ = written(made("both"), tmp_path / "m.gguf")
    other = written_anew(path, tmp_path / "other.gguf", {"clip.audio.attention.layer_norm_epsilon": 1e-5})
    assert open_file(other)[0].tower.eps == 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize(("keys", "drop", "kind", "words"), [
    ({}, "a.blk.1.attn_k.output_max", CheckpointError, r"1 missing: a\.blk\.1\.attn_k\.output_max"),
    ({}, "a.blk.0.per_dim_scale.weight", CheckpointError, "1 missing"),
    ({}, "mm.a.input_projection.weight", CheckpointError, "1 missing"),
    ({}, "a.conv1d.1.weight", CheckpointError, "is missing"),
    ({}, "a.blk.0.conv_dw.weight", CheckpointError, "is no matrix"),
    ({"clip.audio.attention.head_count": 3}, "", CheckpointError, "3 heads can't share 40"),
    ({"clip.audio.feed_forward_length": 80}, "", CheckpointError, "rows of 40 become 80"),
    ({"clip.audio.num_mel_bins": 80}, "", CheckpointError, "80 bands become 20"),
    ({"clip.audio.block_count": 2}, "", CheckpointError, "not part of it"),
    ({"clip.audio.block_count": 4}, "", CheckpointError, "missing"),
    ({"clip.audio.projection_dim": 25}, "", CheckpointError, "of the wrong shape: mm.a.input_projection"),
    ({"clip.audio.projector_type": "gemma4ua"}, "", UnsupportedError, "projector 'gemma4ua'"),
])  # fmt: skip
def test_files_that_are_broken(
    keys: dict[str, Any], drop: str, kind: type[Exception], words: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    path, _ = written(made("both"), tmp_path / "m.gguf")
    with pytest.raises(kind, match=words):
        open_file(written_anew(path, tmp_path / "broken.gguf", keys, [drop]))


def test_bounds_that_are_no_numbers(made: Callable[[str], Path], tmp_path: Path) -> None:
    path, _ = written(made("both"), tmp_path / "m.gguf")
    other = {"a.blk.1.ffn_up_1.output_max": np.array([np.nan], np.float32)}
    with pytest.raises(CheckpointError, match="bounds that are NaN"):
        open_file(written_anew(path, tmp_path / "broken.gguf", tensors=other))


@pytest.mark.parametrize(("change", "words"), [
    ({"attention_logit_cap": 30.0}, "softcap"), ({"attention_context_left": 9, "attention_chunk_size": 8}, "window"),
    ({"residual_weight": 1.0}, "share"), ({"rms_norm_eps": 1e-5}, "eps"), ({"hidden_act": "gelu"}, "activation"),
    ({"gradient_clipping": 100.0}, "limit"),
])  # fmt: skip
def test_ears_that_no_file_can_say_are_told_and_what_it_sees_by_is_written(
    change: dict[str, Any], words: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(made("both"), tmp_path, change)
    path, notes = written(folder, tmp_path / "m.gguf")
    assert notes == [f"what it hears by: a GGUF file can't say this of a tower: {words}"]
    assert not any(tensor.name.startswith(("a.", "mm.a.")) for tensor in gguf.GGUFReader(path).tensors)
    with open_checkpoint(changed(made("hears alone"), tmp_path, change)) as checkpoint:
        assert tower_or_note(checkpoint, "f32", "m") == (None, notes)
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"] is None
