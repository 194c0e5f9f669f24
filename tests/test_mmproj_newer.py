"""What Llama 4, Kimis, dots.ocr and Janus see by, as llama.cpp's converter writes it and as we do, against their folders.
llama.cpp itself made the same rows of our files, once, but for two: it reads a Llama 4's tokens column by column, and turns a
Kimi-VL's heads in another order than that was trained with."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from seeing import kimi_vl
from test_mmproj import opened
from test_tower_dots import dots_folder
from test_towers import FREE_SIZES, SIZES, all_rows, draw, image, make, open_tower
from towers_gguf import Tensors, write_mmproj

FAMILIES = ["llama4", "kimi", "kimi_vl", "dots", "janus"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name; each is made once."""

    def get(name: str) -> Path:
        place = tmp_path_factory.mktemp(name)
        if name == "dots":
            return dots_folder(place)
        if name == "kimi_vl":
            return kimi_vl(made("kimi"), place / "it")
        return make(name, place).folder

    made = functools.cache(get)
    return made


def rows(tower: Any, name: str) -> torch.Tensor:
    return torch.cat([all_rows(tower(image(draw(*size)))) for size in SIZES.get(name, FREE_SIZES)], dim=1)


def written(source: Path, target: Path) -> Path:
    with open_checkpoint(source) as checkpoint:
        file = tower_file(checkpoint, "auto", "it")
        assert file is not None
        return file.write(target, replace=True, progress=NullProgress()).path


@pytest.mark.parametrize("by", ["llama.cpp's converter", "ours"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_specs_are_those_of_the_folder(name: str, by: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = folder(name)
    path = written(source, tmp_path / "it.gguf") if by == "ours" else write_mmproj(source, tmp_path / "mmproj.gguf")
    spec, tower = opened(path)
    wanted, reference = open_tower(source)
    assert torch.equal(rows(tower, name), rows(reference, name))
    alike: dict[str, Any] = {"eps": 0, "projector_eps": 0, "stored": "axes" if name == "kimi" else wanted.tower.stored}
    assert replace(spec.tower, eps=0, projector_eps=0) == replace(wanted.tower, **alike)
    assert (spec.tower.eps, spec.tower.projector_eps) == pytest.approx((wanted.tower.eps, wanted.tower.projector_eps))
    assert (spec.size, spec.has_grid) == (wanted.size, False)
    assert replace(spec.tokens, instead="") == wanted.tokens
    assert (*spec.mean, *spec.std) == pytest.approx((*wanted.mean, *wanted.std))


def headers(path: Path) -> dict[str, Any]:
    with open_checkpoint(path, of_tower=True) as file:
        return {key: value for key, value in file.config.items() if key.startswith("clip.")}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_we_write_is_what_llama_cpps_converter_does(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Keys that it has, and all names and numbers of tensors."""
    ours, theirs = written(folder(name), tmp_path / "it.gguf"), write_mmproj(folder(name), tmp_path / "mmproj.gguf")
    own = headers(ours)
    for key, value in headers(theirs).items():
        if key in ("clip.vision.projection_dim", "clip.vision.attention.layer_norm_epsilon", "clip.vision.image_size"):
            continue  # of the decoder; of what needs none; 0, or of images of any size
        assert own[key] == (pytest.approx(value) if isinstance(value, (float, list)) else value), key
    with open_checkpoint(ours, of_tower=True) as one, open_checkpoint(theirs, of_tower=True) as other:
        assert sorted(one.names()) == sorted(other.names())
        for each in one.names():
            assert torch.equal(one.tensor(each).float(), other.tensor(each).float()), each


@pytest.mark.parametrize(("name", "images"), [
    ("llama4", {"max_patches": 4}), ("kimi_vl", {"in_token_limit": 1024}),
    ("kimi", {"size": {"max_height": 64, "max_width": 64}}), ("janus", {"min_size": 20}),
])  # fmt: skip
def test_what_no_file_says_is_as_published(
    name: str, images: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, target = folder(name), tmp_path / "it"
    target.mkdir()
    for each in source.iterdir():
        (target / each.name).write_bytes(each.read_bytes())
    said = json.loads((source / "preprocessor_config.json").read_text())
    (target / "preprocessor_config.json").write_text(json.dumps(said | images))
    with pytest.raises(UnsupportedError, match="a GGUF file can't say this of a tower"):
        written(target, tmp_path / "it.gguf")


@pytest.mark.parametrize("name", ["vipllava", "videollama3", "deepseek_vl", "hyperclovax"])
def test_towers_that_llama_cpp_has_not_are_refused(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no file is written of what such a model sees by"):
        written(folder(name), tmp_path / "it.gguf")


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def shaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(("name", "change", "keys", "error", "words"), [
    ("llama4", without("mm.model.fc.weight"), {}, CheckpointError, "'mm.model.fc.weight' is missing"),
    ("llama4", without("v.class_embd"), {}, CheckpointError, "1 missing: v.class_embd"),
    ("llama4", shaped("v.position_embd.weight", (144, 32)), {}, CheckpointError, "of the wrong shape: v.position_embd.weight"),
    ("llama4", lambda tensors: None, {"clip.vision.attention.layer_norm_epsilon": 1e-3}, UnsupportedError, "norm_eps"),
    ("llama4", lambda tensors: None, {"clip.vision.projector.scale_factor": 3}, CheckpointError, "'intermediate_size'|must be"),
    ("kimi", shaped("v.position_embd.weight", (5, 4, 32)), {}, CheckpointError, "no square of positions"),
    ("kimi", shaped("v.position_embd.weight", (25, 32)), {}, CheckpointError, "no square of positions"),
    ("kimi_vl", shaped("v.position_embd.weight", (24, 32)), {}, CheckpointError, "must be a square, not 24"),
    ("kimi_vl", without("mm.input_norm.bias"), {}, CheckpointError, "1 missing: mm.input_norm.bias"),
    ("dots", without("mm.post_norm.weight"), {}, CheckpointError, "1 missing: mm.post_norm.weight"),
    ("dots", lambda tensors: None, {"clip.vision.image_max_pixels": 1 << 30}, CheckpointError, "at most"),
    ("janus", without("mm.1.weight"), {}, CheckpointError, "'mm.1.weight' is missing"),
    ("janus", lambda tensors: None, {"clip.vision.image_size": 50}, CheckpointError, "don't divide"),
])  # fmt: skip
def test_files_that_are_broken(
    name: str, change: Callable[[Tensors], Any], keys: dict[str, Any], error: type[Exception], words: str,
    folder: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    path = write_mmproj(folder(name), tmp_path / "mmproj.gguf", keys, change)
    with pytest.raises(error, match=words):
        opened(path)
