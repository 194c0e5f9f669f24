"""Apertus' learned numbers of its activations: where folders and GGUF files have them, and what is refused of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import random_model, save, worker_for
from nanovllm_cli.curve_spec import XieluSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.random_weights import RandomCheckpoint
from nanovllm_cli.weights.weight_reader import PlainReader
from test_convert_families import make_gguf, with_tokenizer
from test_models import CASES

PLACE = "model.layers.1.mlp.act_fn."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(with_tokenizer(CASES["apertus"])), tmp_path_factory.mktemp("apertus") / "folder")


@pytest.fixture(scope="module")
def metadata(folder: Path) -> dict[str, Any]:
    make_gguf(folder, folder.parent / "m.gguf")
    with open_checkpoint(folder.parent / "m.gguf") as checkpoint:
        return dict(checkpoint.config)


def curves(path: Path) -> list[XieluSpec | None]:
    with open_checkpoint(path) as checkpoint:
        return [mlp.curve for mlp in read_spec(checkpoint, PlainReader(checkpoint)).mlps]


def test_a_folder_has_them_as_tensors_and_a_file_as_lists(folder: Path, metadata: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    parts = ("alpha_p", "alpha_n", "beta", "eps")
    expected = [XieluSpec(*(float(tensors[f"model.layers.{i}.mlp.act_fn.{part}"]) for part in parts)) for i in range(3)]
    assert len({curve.alpha_p for curve in expected}) == 3, "layers that differ"
    assert curves(folder) == expected
    assert curves(folder.parent / "m.gguf") == expected
    assert metadata["xielu.alpha_n"] == pytest.approx([curve.alpha_n for curve in expected])


BROKEN = {
    "none": (lambda t: None, "must hold one number"),
    "two": (lambda t: t.repeat(2), "must hold one number"),
    "far too many": (lambda t: t.repeat(1 << 17), "holds 131072 numbers"),
    "not a number": (lambda t: t * torch.nan, "must lie between -1000 and 1000"),
    "too large": (lambda t: t + 1e4, "must lie between"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("part", ["alpha_p", "eps"])
def test_tensors_that_are_none_of_an_activation(part: str, case: str, folder: Path, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(PLACE + part).reshape(1))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors | ({} if changed is None else {PLACE + part: changed}), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        worker_for(tmp_path)


@pytest.mark.parametrize("value", [None, [0.1, 0.2], [0.1, 0.2, "x"], [0.1, 0.2, True], "x", [0.1, 0.2, float("inf")], [1e9] * 3])
def test_lists_that_are_none_of_an_activation(value: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"'xielu.alpha_p' must be a number, or a list of 3|must lie between"):
        spec_from_gguf(metadata | {"xielu.alpha_p": value}, gguf_family(metadata), 513, set(), lambda name: None)


def test_one_number_may_be_of_all_layers(metadata: dict[str, Any]) -> None:
    spec = spec_from_gguf(metadata | {"xielu.beta": 0.25}, gguf_family(metadata), 513, set(), lambda name: None)
    assert [mlp.curve.beta for mlp in spec.mlps if mlp.curve] == [0.25] * 3


def test_made_up_weights_have_those_that_a_training_begins_with() -> None:
    """As the paper, and transformers, set them."""
    checkpoint = RandomCheckpoint(CASES["apertus"].to_dict() | {"architectures": ["ApertusForCausalLM"]})
    spec = read_spec(checkpoint, PlainReader(checkpoint))
    assert all(mlp.curve and mlp.curve.factors == pytest.approx((0.8, 0.8, 0.5, -1e-6)) for mlp in spec.mlps)


@pytest.mark.parametrize("said", [{"post_norm": True}, {"qk_norm": False}, {"hidden_act": "relu2"}])
def test_others_of_its_name_are_refused(said: dict[str, Any]) -> None:
    config = CASES["apertus"].to_dict() | {"architectures": ["ApertusForCausalLM"]} | said
    with pytest.raises(UnsupportedError, match=r"an Apertus with norms elsewhere|activation 'relu2' is not supported"):
        spec_from_hf(config, hf_family(config))
