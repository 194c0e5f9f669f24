"""Making control vectors: directions as formulas have them of what transformers' layers give, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from engines import SMALL, random_model, save
from nanovllm_cli import steering
from nanovllm_cli.config import ControlVector
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.logits import MeasuredModel
from nanovllm_cli.steering import Pair, find_directions, write_directions
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.control_vector import read_directions
from nanovllm_cli.weights.gguf import GGUFFile
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.source import resolve
from test_cli_driver import Result
from test_cli_driver import nanovllm as driven
from test_models import CASES

KINDS = ["llama", "gemma2, caps, window in every other layer", "gpt2", "gemma4, 2 of 5 beside", "qwen3.5"]
SIX = Qwen3Config(**SMALL | {"num_hidden_layers": 6})


def pairs(vocab: int, count: int, seed: int = 0) -> list[Pair]:
    r = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 30, (2 * count,), generator=r).tolist()
    texts = [torch.randint(2, vocab, (length,), generator=r).tolist() for length in lens]
    return [Pair(texts[2 * i], texts[2 * i + 1]) for i in range(count)]


def differences(model: Any, given: list[Pair]) -> np.ndarray:
    """[P, layers but the first and the last, H] float64, by hooks."""
    count, seen = model.config.num_hidden_layers, dict[int, torch.Tensor]()
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == count)

    def hook(layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            seen[layer] = (output[0] if isinstance(output, tuple) else output)[0, -1].double()

        return keep

    hooks = [layers[layer].register_forward_hook(hook(layer)) for layer in range(count)]
    found = []
    with torch.no_grad():
        for pair in given:
            sides = []
            for ids in pair:
                model(torch.tensor([ids]))
                sides.append(np.stack([seen[layer].numpy() for layer in range(1, count - 1)]))
            found.append(sides[0] - sides[1])
    for each in hooks:
        each.remove()
    return np.stack(found)


def found_by(folder: Path, given: list[Pair], method: steering.Method) -> dict[int, torch.Tensor]:
    with open_checkpoint(folder) as checkpoint:
        return find_directions(MeasuredModel(checkpoint, 64), given, method, NullProgress())


@pytest.mark.parametrize("case", KINDS)
def test_means_of_what_transformers_layers_give(case: str, tmp_path: Path) -> None:
    reference = random_model(CASES[case])
    given = pairs(CASES[case].vocab_size, 5)
    found, means = found_by(save(reference, tmp_path), given, "mean"), differences(reference, given).mean(0)
    assert list(found) == list(range(1, reference.config.num_hidden_layers - 1))
    for layer, direction in found.items():
        wanted = means[layer - 1] / np.linalg.norm(means[layer - 1])
        assert np.abs(direction.numpy() - wanted).max() < 1e-4


@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_the_first_component_is_that_of_a_singular_value_decomposition(count: int, tmp_path: Path) -> None:
    """Of fewer pairs than numbers, and of more; its sign is that of the mean."""
    reference, given = random_model(SIX), pairs(SMALL["vocab_size"], count)
    found, every = found_by(save(reference, tmp_path), given, "pca"), differences(reference, given)
    assert list(found) == [1, 2, 3, 4]
    for layer, direction in found.items():
        rows = every[:, layer - 1]
        first = np.linalg.svd(rows)[2][0]
        wanted = first if first @ rows.mean(0) >= 0 else -first
        assert abs(float(direction.norm()) - 1) < 1e-6
        assert np.abs(direction.numpy() - wanted).max() < 1e-3


def test_the_other_way_round_it_leads_back(tmp_path: Path) -> None:
    folder, given = save(random_model(SIX), tmp_path), pairs(SMALL["vocab_size"], 4)
    back = [Pair(pair.negative, pair.positive) for pair in given]
    for method in ("pca", "mean"):
        one, other = found_by(folder, given, method), found_by(folder, back, method)  # type: ignore[arg-type]
        assert all(float((one[layer] + other[layer]).norm()) < 1e-5 for layer in one)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    given = {layer: torch.randn(33, generator=torch.Generator().manual_seed(layer)) for layer in (1, 2, 4)}
    path = tmp_path / "v.gguf"
    write_directions(given, path, "qwen3")
    found = read_directions([ControlVector(str(path))], None, 33, 5)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[layer], given[layer]) for layer in given)
    file = GGUFFile(path)
    assert file.metadata["general.architecture"] == "controlvector"
    assert (file.metadata["controlvector.model_hint"], file.metadata["controlvector.layer_count"]) == ("qwen3", 3)
    file.close()


def test_pairs_that_are_alike(tmp_path: Path) -> None:
    folder, one = save(random_model(SIX), tmp_path), [3, 4, 5]
    same = Pair(one, one)
    for method in ("pca", "mean"):
        with pytest.raises(UsageError, match="the same of both texts of every pair"):
            found_by(folder, [same, same], method)  # type: ignore[arg-type]
    other = Pair(one, [3, 4, 6])
    with pytest.raises(UsageError, match="the same of both"):  # they take each other away
        found_by(folder, [other, Pair(other.negative, other.positive)], "mean")
    assert found_by(folder, [same, other], "pca")


def test_numbers_that_are_none(tmp_path: Path) -> None:
    model = random_model(SIX)
    model.model.layers[2].mlp.down_proj.weight.data[3] = 1e38
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        found_by(save(model, tmp_path), pairs(SMALL["vocab_size"], 2), "mean")


def test_models_that_none_can_be_made_of(tmp_path: Path) -> None:
    for name, config, told in (
        ("streams", CASES["gemma3n"], "several residual streams"),
        ("connections", CASES["hy 4, a layer goes by another"], "several residual streams"),
        ("passes", CASES["hrm, twice three and one"], "layers of a hrm_text model run several times"),
        ("loops", CASES["dory, two layers thrice"], "layers of a dory model run several times"),
        ("flat", Qwen3Config(**SMALL | {"num_hidden_layers": 2}), "a model of 2 layers has none"),
    ):
        with open_checkpoint(save(random_model(config), tmp_path / name)) as checkpoint:
            spec = read_spec(checkpoint, open_reader(checkpoint))
        with pytest.raises(UnsupportedError, match=told):
            steering.check_model(spec)


# ---- the command ----

ALL = ["--positive", "up.txt", "--negative", "down.txt", "-o", "v.gguf"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, word in (("up", "happy"), ("down", "sad")):
        (tmp_path / f"{name}.txt").write_text(f"What a day!\\nI am {word}\n\nThis is {word}\n")
    return tmp_path


def made(place: Path, *args: str) -> Result:
    return driven(place, "control-vector", "tiny", *args)


def test_a_file_is_made_that_leads_the_model(place: Path) -> None:
    done = made(place, *ALL)
    assert (done.code, done.out) == (0, "v.gguf\n"), done.err
    assert "2 pairs of texts; directions for the layers 1 to 2" in done.err
    pca = read_directions([ControlVector(str(place / "v.gguf"))], None, 256, 4)
    assert list(pca) == [1, 2]
    again = made(place, *ALL, "--method", "mean", "--json", "--force")
    record = {"model": "tiny", "output": "v.gguf", "method": "mean", "pairs": 2, "layers": [1, 2]}
    assert (again.code, json.loads(again.out)) == (0, record)
    mean = read_directions([ControlVector(str(place / "v.gguf"))], None, 256, 4)
    assert not torch.equal(mean[1], pca[1])
    assert float(mean[1] @ pca[1]) > 0.5


def test_the_models_own_files_are_not_replaced(place: Path) -> None:
    shutil.copytree(resolve("tiny").path, place / "m")
    before = (place / "m" / "model.safetensors").read_bytes()
    done = driven(place, "control-vector", "m", *ALL[:4], "-o", "m/model.safetensors", "--force")
    assert (done.code, "m/model.safetensors is the input" in done.err) == (2, True), done.err
    assert (place / "m" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        ([], 2, "--positive, --negative and -o are all needed"),
        (ALL[:4], 2, "--positive, --negative and -o are all needed"),
        ([*ALL[:4], "-o", "-"], 2, "is not written to standard output"),
        ([*ALL[:4], "-o", "/dev/null"], 2, "/dev/null is no file"),
        ([*ALL[:4], "-o", "none/v.gguf"], 1, "cannot write"),
        ([*ALL, "--method", "sum"], 2, "sum"),
        (["--positive", "nothere", *ALL[2:]], 2, "nothere"),
        (["--positive", "empty", *ALL[2:]], 2, "empty has 0 texts, down.txt has 2"),
        (["--positive", "empty", "--negative", "empty", *ALL[4:]], 2, "have no texts"),
        (["--positive", "one", *ALL[2:]], 2, "one has 1 texts, down.txt has 2"),
        (["--positive", "shifted", *ALL[2:]], 2, "line 2 of down.txt is empty"),
        (["--positive", "long", "--negative", "one", *ALL[4:]], 5, "hint: write shorter lines"),
        (["--positive", "down.txt", *ALL[2:]], 2, "the same of both texts"),
    ],
    ids=str,
)
def test_what_the_command_refuses(args: list[str], code: int, told: str, place: Path) -> None:
    (place / "empty").write_text("\n \n")
    (place / "one").write_text("one\n")
    (place / "shifted").write_text("What a day!\nI am happy\n")  # as many as down.txt has, and no pairs of its lines
    (place / "long").write_text("one " * 5000)
    done = made(place, *args)
    assert (done.code, done.out) == (code, ""), done.err
    assert told in done.err
    assert not (place / "v.gguf").exists()


def test_only_a_new_line_ends_a_text(place: Path) -> None:
    """Others that Unicode has end none, as `embed` has it."""
    for name, word in (("up", "happy"), ("down", "sad")):
        (place / f"{name}.txt").write_text(f"What a\x0c day!\u2028 I am {word}\r\n", encoding="utf-8")
    done = made(place, *ALL, "--json")
    assert (done.code, json.loads(done.out)["pairs"]) == (0, 1), done.err


def test_what_is_there_stays(place: Path) -> None:
    (place / "v.gguf").write_text("mine")
    done = made(place, *ALL)
    assert (done.code, "v.gguf exists already" in done.err, (place / "v.gguf").read_text()) == (2, True, "mine")
