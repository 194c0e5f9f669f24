"""A folder's tower for sounds as llama.cpp's converter writes it: names by the gguf package's own map, keys by its writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

PROJECTORS = {"Voxtral": "voxtral", "Qwen2Audio": "qwen2a", "Qwen3ASR": "qwen3a", "AudioFlamingo3": "musicflamingo"}


def write_ear(
    folder: Path, path: Path, keys: dict[str, Any] | None = None, change: Callable[[dict[str, Any]], Any] = lambda tensors: None
) -> Path:
    """keys: instead of those that the converter writes, None: none at all. change: of the tensors by their names in the file."""
    config = json.loads((folder / "config.json").read_text())
    name, audio = config["architectures"][0].removesuffix("ForConditionalGeneration"), config["audio_config"]
    said = {
        "clip.has_audio_encoder": True, "clip.projector_type": PROJECTORS[name],
        "clip.audio.projection_dim": config["text_config"]["hidden_size"],
        "clip.audio.embedding_length": audio.get("hidden_size", audio.get("d_model")),
        "clip.audio.feed_forward_length": audio.get("intermediate_size", audio.get("encoder_ffn_dim")),
        "clip.audio.block_count": audio.get("num_hidden_layers", audio.get("encoder_layers")),
        "clip.audio.attention.head_count": audio.get("num_attention_heads", audio.get("encoder_attention_heads")),
        "clip.audio.num_mel_bins": audio["num_mel_bins"], "clip.audio.attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    if name == "Voxtral":
        said["clip.audio.projector.stack_factor"] = audio["intermediate_size"] // audio["hidden_size"]
    if name == "Qwen3ASR":
        said["clip.audio.projector_type"] = said.pop("clip.projector_type")
    tensors = dict(_tensors(folder, said["clip.audio.block_count"]))
    if name == "Qwen3ASR":
        tensors["a.position_embd.weight"] = np.zeros((1500, said["clip.audio.embedding_length"]), np.float32)
    change(tensors)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (said | (keys or {})).items():
        if value is not None:
            by_type[type(value)](key, value)  # type: ignore[operator]
    for each, numbers in tensors.items():
        writer.add_tensor(each, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(folder: Path, depth: int) -> Any:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth + 1)  # convolutions are counted from 1
    for name, numbers in load_file(folder / "model.safetensors").items():
        own = name.removeprefix("model.")
        if own.startswith("multi_modal_projector"):
            own = f"audio.{own}"
        elif not own.startswith("audio_tower"):
            continue
        theirs = names.get_name(own, (".weight", ".bias"))
        assert theirs is not None, own
        if "conv1d" in theirs and theirs.endswith("bias"):
            numbers = numbers[:, None]
        if "conv2d" in theirs and theirs.endswith("bias"):
            numbers = numbers[:, None, None]
        yield theirs, np.ascontiguousarray(numbers, np.float32)
