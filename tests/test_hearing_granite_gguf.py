"""What a Granite Speech hears by in a file of its own: as llama.cpp's converter writes it, made here by gguf-py's names and what
that does to tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from engines import save
from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from nanovllm_cli.weights.hearing import load_ear, read_hearing
from nanovllm_cli.weights.mmproj import load_ear_gguf, open_mmproj, read_mmproj
from test_hearing_granite import NAMES, a_sound, model_of

pytest.importorskip("transformers")
KEYS: dict[str, Any] = {
    "clip.has_audio_encoder": True, "clip.projector_type": "granite_speech", "clip.audio.projection_dim": 48,
    "clip.audio.embedding_length": 32, "clip.audio.feed_forward_length": 96, "clip.audio.block_count": 4,
    "clip.audio.attention.head_count": 2, "clip.audio.num_mel_bins": 18, "clip.audio.attention.layer_norm_epsilon": 1e-5,
    "clip.audio.chunk_size": 6, "clip.audio.conv_kernel_size": 5, "clip.audio.max_pos_emb": 9,
    "clip.audio.projector.window_size": 6, "clip.audio.projector.downsample_rate": 3, "clip.audio.projector.head_count": 2,
}  # fmt: skip


def reference(folder: Path, path: Path, kind: str, changed: dict[str, Any] | None = None, lost: str = "") -> Path:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 5)
    there = load_file(folder / "model.safetensors")
    tensors: dict[str, np.ndarray] = {}
    for name, numbers in there.items():
        own = name.removeprefix("model.")
        if not own.startswith(("encoder.", "projector.")) or own.endswith(("num_batches_tracked", "running_mean", "running_var")):
            continue
        parts = {own: numbers}
        if ".batch_norm." in own:
            gain, shift, mean, var = (there[name.rpartition(".")[0] + f".{each}"].astype(np.float64)
                                      for each in ("weight", "bias", "running_mean", "running_var"))  # fmt: skip
            scale = gain / np.sqrt(var + 1e-5)
            parts = {own: scale if own.endswith("weight") else shift - mean * scale}
        if ".to_kv." in own:
            keys, values = np.split(numbers, 2)
            parts = {own.replace("to_kv", "to_k"): keys, own.replace("to_kv", "to_v"): values}
        for each, part in parts.items():
            part = part.squeeze(2) if "up_conv.weight" in each or "down_conv.weight" in each else part
            part = part.squeeze(1) if "depth_conv" in each else part
            theirs = names.get_name(each, (".weight", ".bias"))
            assert theirs is not None, each
            if theirs != lost:
                tensors[theirs] = np.ascontiguousarray(part, np.float32)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}  # fmt: skip
    said = KEYS | ({"clip.audio.feature_layer": [0, 2]} if kind == "plus" else {}) | (changed or {})
    for key, value in said.items():
        if value is not None:
            by_type[type(value)](key, value)  # type: ignore[operator]
    for each, numbers in tensors.items():
        writer.add_tensor(each, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", NAMES)
def test_a_file_is_the_folders_tower(kind: str, tmp_path: Path) -> None:
    folder = save(model_of(kind), tmp_path / "model")
    with open_checkpoint(folder) as checkpoint, open_mmproj(reference(folder, tmp_path / "mmproj.gguf", kind)) as file:
        spec, found = read_hearing(checkpoint), read_mmproj(file).hearing
        assert spec is not None
        assert found is not None
        expected = load_ear(checkpoint, spec, torch.float32)(a_sound(58)).rows
        torch.testing.assert_close(load_ear_gguf(file, found, torch.float32)(a_sound(58)).rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NAMES)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(kind: str, tmp_path: Path) -> None:
    folder = save(model_of(kind), tmp_path / "model")
    wanted = gguf.GGUFReader(reference(folder, tmp_path / "reference.gguf", kind))
    with open_checkpoint(folder) as checkpoint:
        made = tower_file(checkpoint, "f32", "m")
        assert made is not None
        found = gguf.GGUFReader(made.write(tmp_path / "m-F32.gguf", replace=False, progress=NullProgress()).path)
        own = {each for each in checkpoint.names() if each.startswith(("model.encoder.", "model.projector."))}
        assert own - made.names == {each for each in own if each.endswith("num_batches_tracked")}
    tensors, theirs = ({tensor.name: tensor for tensor in file.tensors} for file in (found, wanted))
    assert tensors.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert list(tensors[name].shape) == list(tensor.shape), name
        np.testing.assert_allclose(tensors[name].data, tensor.data, rtol=1e-6, atol=1e-7)
    fields = {key: field.contents() for key, field in found.fields.items()}
    for key, field in wanted.fields.items():
        if not key.startswith("GGUF."):
            assert fields[key] == pytest.approx(field.contents()), key
    with open_checkpoint(folder) as checkpoint:
        short = tower_file(checkpoint, "f16", "m")
        assert short is not None
        types = {step.name: step.after for step in short.steps}
    assert (types["a.blk.0.ffn_up.weight"], types["a.blk.0.conv_dw.weight"], types["a.proj_query"]) == ("F16", "F32", "F32")


BROKEN: dict[str, tuple[dict[str, Any], str, type[NanovllmError], str]] = {
    "no blocks": ({"clip.audio.chunk_size": None}, "", CheckpointError, "chunk_size"),
    "wide blocks": ({"clip.audio.chunk_size": 10}, "", CheckpointError, "blocks of 10 rows"),
    "other distances": ({"clip.audio.max_pos_emb": 8}, "", CheckpointError, "attn_rel_pos_emb"),
    "inner rows": ({"clip.audio.feed_forward_length": 95}, "", CheckpointError, "layers of 95"),
    "more layers": ({"clip.audio.block_count": 5}, "", CheckpointError, "missing"),
    "bands": ({"clip.audio.num_mel_bins": 16}, "", CheckpointError, "a.input_projection.weight"),
    "a kernel": ({"clip.audio.conv_kernel_size": 7}, "", CheckpointError, "conv_dw"),
    "kept layers": ({"clip.audio.feature_layer": [1]}, "", CheckpointError, "cross_attn_k"),
    "kept words": ({"clip.audio.feature_layer": "all"}, "", CheckpointError, "list of layers"),
    "heads of queries": ({"clip.audio.projector.head_count": 5}, "", CheckpointError, "can't share"),
    "a norm": ({}, "a.blk.1.conv_norm.bias", CheckpointError, "a.blk.1.conv_norm.bias"),
    "queries": ({}, "a.proj_query", CheckpointError, "a.proj_query"),
    "classes": ({}, "a.enc_ctc_out.weight", CheckpointError, "a.enc_ctc_out.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_no_tower_can_be_are_refused_by_name(name: str, tmp_path: Path) -> None:
    changed, lost, kind, told = BROKEN[name]
    path = reference(save(model_of("plain"), tmp_path / "model"), tmp_path / "mmproj.gguf", "plain", changed, lost)
    with open_mmproj(path) as file, pytest.raises(kind) as caught:
        load_ear_gguf(file, read_mmproj(file).hearing, torch.float32)  # type: ignore[arg-type]
    assert told in caught.value.message
