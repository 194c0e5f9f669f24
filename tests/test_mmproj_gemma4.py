"""A Gemma 4's tower in a GGUF file: what `convert` writes against what llama.cpp's converter does (its tensors' names, shapes and
numbers; conversion/gemma.py of llama.cpp), and what is read against the folder."""

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
from safetensors.numpy import load_file

from engines import random_model, save
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from test_mmproj import check_it_sees_as_its_folder_does, opened, with_merges, written
from test_tower_gemma4 import VISION, make
from test_towers import Made, draw, image, open_tower
from test_vision import MODELS, AutoModelForImageTextToText

LAYER = {
    "input_layernorm": "ln1", "pre_feedforward_layernorm": "ln2", "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Of a folder's modules, what a file calls them."""


def expected(folder: Path) -> dict[str, np.ndarray]:
    """Of a folder's tensors, as llama.cpp's converter renames and shapes them."""
    tensors = {}
    for name, numbers in load_file(folder / "model.safetensors").items():
        if name.startswith("model.vision_tower.encoder.layers."):
            number, module = name.removeprefix("model.vision_tower.encoder.layers.").split(".", 1)
            module, kind = module.replace(".linear.weight", ".weight").rsplit(".", 1)
            tensors[f"v.blk.{number}.{LAYER[module]}.{kind}"] = np.atleast_1d(numbers)
        elif name == "model.vision_tower.patch_embedder.input_proj.weight":
            side = VISION["patch_size"]
            tensors["v.patch_embd.weight"] = numbers.reshape(len(numbers), side, side, 3).transpose(0, 3, 1, 2)
        elif name == "model.vision_tower.patch_embedder.position_embedding_table":
            tensors["v.position_embd.weight"] = numbers
        elif name.startswith("model.vision_tower.std_"):
            tensors[name.replace("model.vision_tower.", "v.")] = numbers
        elif name == "model.embed_vision.embedding_projection.weight":
            tensors["mm.input_projection.weight"] = numbers
    return tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """By name; each is made once, for images of as many tokens as files take for granted."""

    def get(name: str) -> Made:
        found = make(name, tmp_path_factory.mktemp(name))
        settings = found.folder / "preprocessor_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_soft_tokens": 280}))
        return found

    return functools.cache(get)


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_folder_becomes_the_file_that_llama_cpp_makes(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = made(name).folder
    file = gguf.GGUFReader(written(folder, tmp_path / "m-Q4_0.gguf"))
    wanted = expected(folder)
    found = {tensor.name: tensor.data for tensor in file.tensors}
    assert found.keys() == wanted.keys()
    assert [each for each in wanted if not np.array_equal(found[each], wanted[each])] == []
    fields = {key: field.contents() for key, field in file.fields.items()}
    said = {
        "clip.has_vision_encoder": True, "clip.vision.projector_type": "gemma4v", "clip.vision.projection_dim": 24,
        "clip.vision.patch_size": 4, "clip.vision.feed_forward_length": 40, "clip.vision.block_count": 3,
        "clip.vision.attention.head_count": 2, "clip.vision.image_mean": [0.0] * 3, "clip.vision.image_std": [1.0] * 3,
    }  # fmt: skip
    assert {key: fields[key] for key in said} == said
    assert fields["clip.vision.attention.layer_norm_epsilon"] == pytest.approx(1e-3)
    assert fields["clip.vision.projector.scale_factor"] == (3 if name == "small" else 2)  # llama.cpp's has none, for 3
    assert fields["clip.use_gelu"]  # without it llama.cpp computes another, x * sigmoid(1.702 x)


@pytest.mark.parametrize("name", ["small", "large"])
def test_rows_are_those_of_the_folder(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """And a file as llama.cpp's converter writes it means the same, which has less to say."""
    folder = made(name).folder
    spec, tower = opened(written(folder, tmp_path / "m-Q4_0.gguf"))
    wanted, reference = open_tower(folder)
    cell = spec.tower.cell
    assert (spec.whole, spec.whole_in_windows, spec.size) == (wanted.whole, wanted.whole_in_windows, wanted.size)
    assert (*spec.mean, *spec.std) == pytest.approx((*wanted.mean, *wanted.std))
    for size in ((cell, 2 * cell), (3 * cell, cell)):
        assert torch.equal(tower(image(draw(*size))).rows, reference(image(draw(*size))).rows)
    bare = written_anew(tmp_path / "mmproj-m-F32.gguf", tmp_path / "bare.gguf", {"clip.use_gelu": None})
    assert torch.equal(opened(bare)[1](image(draw(cell, cell))).rows, tower(image(draw(cell, cell))).rows)


@pytest.mark.parametrize(("keys", "drop", "words"), [
    ({}, "v.blk.1.attn_k.output_max", r"1 missing: v\.blk\.1\.attn_k\.output_max"),
    ({}, "v.blk.0.attn_post_norm.weight", "1 missing"),
    ({}, "v.position_embd.weight", "is no two tables"),
    ({}, "mm.input_projection.weight", "is missing"),
    ({"clip.vision.attention.head_count": 3}, "", "3 heads can't share 32"),
    ({"clip.vision.attention.head_count": 0}, "", "head_count"),
    ({"clip.vision.projector.scale_factor": 0}, "", "scale_factor"),
    ({"clip.vision.block_count": 2}, "", "not part of it"),
    ({"clip.vision.embedding_length": 64}, "", "of the wrong shape|are no"),
])  # fmt: skip
def test_files_that_are_broken(
    keys: dict[str, Any], drop: str, words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    path = written(made("small").folder, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=words):
        opened(written_anew(path, tmp_path / "broken.gguf", keys, [drop]))


def test_bounds_that_are_no_numbers(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Infinite ones cut nothing off."""
    path = written(made("small").folder, tmp_path / "m.gguf")
    for value in (np.nan, np.inf):
        other = {"v.blk.1.ffn_up.output_max": np.array([value], np.float32)}
        broken = written_anew(path, tmp_path / f"{value}.gguf", tensors=other)
        if value == np.inf:
            assert opened(broken)[1](image(draw(12, 12))).rows.isfinite().all()
            continue
        with pytest.raises(CheckpointError, match="bounds that are NaN"):
            opened(broken)


@pytest.mark.parametrize(("settings", "vision", "words"), [
    ({"max_soft_tokens": 140}, {}, "max_pixels"), ({"resample": 2}, {}, "resample"),
    ({"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, {}, "mean, std"),
    ({}, {"hidden_activation": "gelu"}, "activation"), ({}, {"rope_parameters": {"rope_theta": 200.0}}, "theta"),
])  # fmt: skip
def test_a_tower_that_no_file_can_say(
    settings: dict[str, Any], vision: dict[str, Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    for file in made("small").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, change in (("config.json", vision), ("preprocessor_config.json", settings)):
        told = json.loads((tmp_path / name).read_text())
        (told["vision_config"] if name == "config.json" else told).update(change)
        (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(UnsupportedError, match=f"can't say this of a tower: {words}"):
        written(tmp_path, tmp_path / "m.gguf")


def test_converted_it_reads_images_as_its_folder_does(tmp_path: Path) -> None:
    config = MODELS["gemma4, whole in windows"]
    folder = save(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "folder")
    with_merges(folder, ["<|image|>", "<|image>", "<image|>"])
    check_it_sees_as_its_folder_does(folder, tmp_path / "m-F32.gguf")
