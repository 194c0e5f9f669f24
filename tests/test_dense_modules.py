"""Dense layers behind the pooling of models that embed: sentence-transformers' modules, llama.cpp's tensors, against float64."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFValue
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from embedders import SIZES, body, write_json, write_pooling, write_tokenizer
from nanovllm_cli import LLM
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.server import engine_process
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_tensors import Step
from nanovllm_cli.weights.further import TORCH_NAMES, DenseLayer, Further
from nanovllm_cli.weights.gguf_writer import header_of
from nanovllm_cli.weights.pooling import Embedding, embedding_of, use_of
from test_convert import converted
from test_embedding_models import references

IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


def write_dense(folder: Path, size: tuple[int, int], activation: str | None = IDENTITY, *, bias: bool = False) -> None:
    """As sentence-transformers saves it. size: out, in."""
    generator = torch.Generator().manual_seed(sum(size))
    tensors = {"linear.weight": torch.randn(size, generator=generator) / math.sqrt(size[1])}
    if bias:
        tensors["linear.bias"] = torch.randn(size[0], generator=generator)
    said = {"in_features": size[1], "out_features": size[0], "bias": bias}
    write_json(folder / "config.json", said | ({} if activation is None else {"activation_function": activation}))
    save_file(tensors, folder / "model.safetensors")


def write_chain(folder: Path, *modules: str) -> None:
    """modules: folders, of which the last word says the kind."""
    places = {"Normalize": "9_Normalize", "Pooling": "1_Pooling"}
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    listed += [
        {"idx": i, "name": str(i), "path": places.get(name, name), "type": f"sentence_transformers.models.{name.split('_')[-1]}"}
        for i, name in enumerate(modules, 1)
    ]
    write_json(folder / "modules.json", listed)


def opened(path: Path) -> LLM:
    return LLM(path, config=EngineConfig(threads=2, num_blocks=64))


def settings(path: Path) -> Embedding:
    with open_checkpoint(path) as checkpoint:
        return embedding_of(checkpoint)


def through(vectors: list[torch.Tensor], *layers: tuple[Path, Any], unit: bool = False) -> list[torch.Tensor]:
    """float64: W x + b of each folder, and what is behind it. unit: of vectors of length 1."""
    for folder, behind in layers:
        there = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        vectors = [vector / vector.norm() for vector in vectors] if unit else vectors
        vectors = [behind(there["linear.weight"] @ vector + there.get("linear.bias", 0.0)) for vector in vectors]
    return vectors


def near(found: list[list[float]], wanted: list[torch.Tensor]) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), torch.stack(wanted), rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Qwen3's body by the mean, 48 -> 80 -> 40, as EmbeddingGemma has it."""
    folder = tmp_path_factory.mktemp("model") / "m"
    found = body(Qwen3Config(**SIZES), folder)
    write_tokenizer(folder)
    write_pooling(folder, "mean")
    write_dense(folder / "2_Dense", (80, 48))
    write_dense(folder / "3_Dense", (40, 80))
    write_chain(folder, "Pooling", "2_Dense", "3_Dense", "Normalize")
    return found, folder


@pytest.fixture
def folder(model: tuple[Any, Path], tmp_path: Path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(model[1], tmp_path / "m"))


# ---- what they compute ----


def test_vectors_pass_through_all_of_them(model: tuple[Any, Path]) -> None:
    transformer, folder = model
    plain = references(transformer, folder, "mean")
    wanted = through(plain, (folder / "2_Dense", lambda x: x), (folder / "3_Dense", lambda x: x))
    with opened(folder) as llm:
        near(llm.embed(("Once upon a time", "a cat\nsat", "")), wanted)
        assert llm.vector_size == len(wanted[0]) == 40
        assert engine_process._facts(llm, EngineConfig()).vector_size == 40
        (by_last,) = llm.embed("Once upon a time", "last")
    last = references(transformer, folder, "last")[:1]
    near([by_last], through(last, (folder / "2_Dense", lambda x: x), (folder / "3_Dense", lambda x: x)))


def test_order_biases_and_activations_count(model: tuple[Any, Path], folder: Path) -> None:
    """Without a word on it the activation is tanh, and vectors of length 1 go in where a Normalize stands before."""
    write_dense(folder / "2_Dense", (30, 48), None, bias=True)
    write_chain(folder, "Pooling", "Normalize", "2_Dense")
    plain = references(*model, "mean")
    with opened(folder) as llm:
        near(llm.embed(("Once upon a time", "a cat\nsat", "")), through(plain, (folder / "2_Dense", torch.tanh), unit=True))
    write_chain(folder, "Pooling", "2_Dense", "Normalize")
    with opened(folder) as llm:
        near(llm.embed(("Once upon a time", "a cat\nsat", "")), through(plain, (folder / "2_Dense", torch.tanh)))


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_activations_are_torchs_own(name: str) -> None:
    kind = getattr(torch.nn, name.rpartition(".")[2])
    generator = torch.Generator().manual_seed(7)
    weight, bias, vector = (torch.randn(*shape, generator=generator) for shape in ((17, 31), (17,), (31,)))
    found = Further([DenseLayer(weight, bias, TORCH_NAMES[name])])(vector.tolist())
    wanted = kind()(weight.double() @ vector.double() + bias.double())
    assert found == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-5)


def test_nothing_stays_nothing() -> None:
    layer = DenseLayer(torch.eye(3), None, "identity", unit=True)
    assert Further([layer])([0.0, 0.0, 0.0]) == (0.0, 0.0, 0.0)
    assert Further([layer])([3e-6, 0.0, 4e-6]) == pytest.approx((0.6, 0.0, 0.8), rel=1e-6)


def test_facts_name_the_width_without_reading_weights(model: tuple[Any, Path]) -> None:
    with open_checkpoint(model[1]) as checkpoint:
        facts = facts_of(checkpoint)
    assert facts.embedding == settings(model[1])
    assert (facts.embedding.width(facts.spec.hidden_size), facts.spec.hidden_size) == (40, 48)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model[0].parameters())
    assert Embedding().width(48) == 48


# ---- what is refused ----

ORDERS = {
    "before the pooling": ("2_Dense", "Pooling"),
    "without one": ("2_Dense",),
    "of two poolings": ("Pooling", "Pooling", "2_Dense"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_layers_that_stand_elsewhere_are_refused(name: str, folder: Path) -> None:
    write_chain(folder, *ORDERS[name])
    assert isinstance(settings(folder).refusal, UnsupportedError)
    with pytest.raises(UnsupportedError, match=r"an order that is not supported: Transformer, .*Dense"):
        opened(folder)


CONFIGS: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "activation": ({"activation_function": "os.system"}, UnsupportedError, r"the activation os\.system"),
    "no name": ({"activation_function": 3}, UnsupportedError, "the activation 3"),
    "of tokens": ({"module_input_name": "token_embeddings"}, UnsupportedError, "module_input_name"),
    "residual": ({"use_residual": True}, UnsupportedError, "use_residual"),
    "no width": ({"in_features": "48"}, CheckpointError, "not the config of a dense layer"),
    "none at all": ({"out_features": 0}, CheckpointError, "not the config of a dense layer"),
    "a flag": ({"bias": 1}, CheckpointError, "not the config of a dense layer"),
    "another width": ({"in_features": 50}, CheckpointError, r"linear\.weight is \[80, 48\], and should be \[80, 50\]"),
    "a bias": ({"bias": True}, CheckpointError, r"linear\.bias is missing"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_other_layers_are_refused_by_name(name: str, folder: Path) -> None:
    keys, kind, words = CONFIGS[name]
    path = folder / "2_Dense" / "config.json"
    write_json(path, json.loads(path.read_text()) | keys)
    with pytest.raises(kind, match=words) as refused:
        opened(folder)
    assert type(refused.value) is kind
    assert refused.value.hint


def test_names_of_newer_configs_are_fine(folder: Path) -> None:
    path = folder / "2_Dense" / "config.json"
    write_json(path, json.loads(path.read_text()) | {"module_input_name": "sentence_embedding", "module_output_name": None})
    assert settings(folder).width(48) == 40


def test_weights_that_are_none_are_refused(folder: Path) -> None:
    file = folder / "2_Dense" / "model.safetensors"
    weight = load_file(file)["linear.weight"]
    weight[3, 5] = math.nan
    for tensors, words in (
        ({"linear.weight": weight}, "NaN"),
        ({"linear.weight": weight, "other": torch.ones(3)}, "not part of a dense layer: other"),
        ({"linear.weight": torch.ones(80, 48, dtype=torch.int32)}, "int32"),
        ({"other": weight}, r"linear\.weight is missing"),
    ):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=words):
            opened(folder)
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="safetensors"):
        opened(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense/model\.safetensors: no such file"):
        opened(folder)
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="2_Dense: pickled weights"):
        opened(folder)


def test_widths_must_fit_each_other(folder: Path) -> None:
    write_dense(folder / "3_Dense", (40, 81))
    with pytest.raises(CheckpointError, match=r"3_Dense/model\.safetensors: a layer for vectors of 81 numbers, which gets 80"):
        opened(folder)
    write_chain(folder, "Pooling", "3_Dense")
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="81 numbers, which gets 48"):
        facts_of(checkpoint)


def test_numbers_past_the_last_float_are_an_error_of_their_text(folder: Path) -> None:
    file = folder / "3_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.full((40, 80), 3e38)}, file)
    with opened(folder) as llm, pytest.raises(NanovllmError, match="not finite"):
        llm.embed("Once upon a time")


# ---- GGUF ----


@pytest.fixture(scope="module")
def file(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    assert converted(model[1], path, "gguf").notes == ["dense layers: written, but llama.cpp reads them of gemma-embedding alone"]
    return path


def changed(file: Path, path: Path, keys: dict[str, Any] | None = None, drop: str = "", **tensors: torch.Tensor) -> Path:
    """A copy with other keys (None: without it) and tensors; a name's dots are underscores that are doubled."""
    with open_checkpoint(file) as checkpoint:
        made = convert.plan(checkpoint, "gguf")
        header = header_of(checkpoint.config, checkpoint.metadata_types)
        for key, value in (keys or {}).items():
            header.pop(key, None)
            if value is not None:
                header[key] = GGUFValue(value, GGUFValueType.UINT32)
        made.header, made.is_known = header, False
        made.steps = [step for step in made.steps if step.name != drop]
        made.steps += [Step.made(name.replace("__", "."), tensor) for name, tensor in tensors.items()]
        convert.write(checkpoint, made, path)
    return path


def test_a_file_has_llama_cpps_names_and_makes_the_same_vectors(model: tuple[Any, Path], file: Path) -> None:
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for part, inner in (("dense_2", "2_Dense"), ("dense_3", "3_Dense")):
        wanted = load_file(model[1] / inner / "model.safetensors")["linear.weight"]
        assert torch.equal(torch.from_numpy(tensors[f"{part}.weight"].copy()), wanted)
        sizes = [int(reader.fields[f"qwen3.{part}_feat_{side}"].parts[-1][0]) for side in ("out", "in")]
        assert sizes == list(wanted.shape)
    with opened(model[1]) as llm, opened(file) as other:
        assert other.vector_size == 40
        found = other.embed(("Once upon a time", "a cat"))
        near(found, [torch.tensor(vector, dtype=torch.float64) for vector in llm.embed(("Once upon a time", "a cat"))])


def test_a_bias_of_the_first_one_counts(model: tuple[Any, Path], file: Path, tmp_path: Path) -> None:
    bias = torch.linspace(-1, 1, 80)
    path = changed(file, tmp_path / "m.gguf", dense_2__bias=bias)
    first, second = (load_file(model[1] / f"{i}_Dense" / "model.safetensors")["linear.weight"].double() for i in (2, 3))
    plain = references(*model, "mean")[:1]
    with opened(path) as llm:
        near(llm.embed(("Once upon a time",)), [second @ (first @ vector + bias.double()) for vector in plain])


BROKEN = {
    "another size": ({"qwen3.dense_2_feat_out": 81}, "", r"dense_2\.weight is \[80, 48\], its keys say \[81, 48\]"),
    "no tensor": ({}, "dense_3.weight", r"'dense_3\.weight' is missing"),
    "the first": ({"qwen3.dense_3_feat_in": None}, "dense_2.weight", r"'dense_2\.weight' is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_contradict_themselves_are_refused(name: str, file: Path, tmp_path: Path) -> None:
    keys, drop, words = BROKEN[name]
    with pytest.raises(CheckpointError, match=words):
        opened(changed(file, tmp_path / "m.gguf", keys, drop))


def test_one_layer_less_is_another_model_and_of_other_widths_none(file: Path, tmp_path: Path) -> None:
    keys = {f"qwen3.dense_{i}_feat_{side}": None for i in (2, 3) for side in ("in", "out")}
    assert settings(changed(file, tmp_path / "first.gguf", keys, "dense_3.weight")).width(48) == 80
    with open_checkpoint(changed(file, tmp_path / "second.gguf", keys, "dense_2.weight")) as checkpoint:
        embedding = embedding_of(checkpoint)
        with pytest.raises(CheckpointError, match=r"dense_3\.weight: a layer for vectors of 80 numbers, which gets 48"):
            facts_of(checkpoint)
    assert embedding.layers[0].shape == (40, 80)


def test_such_tensors_are_part_of_no_model_that_does_not_pool(file: Path, tmp_path: Path) -> None:
    path = changed(file, tmp_path / "m.gguf", {"qwen3.pooling_type": int(gguf.PoolingType.NONE)})
    with pytest.raises(CheckpointError, match=r"not part of the model: dense_2\.weight, dense_3\.weight"):
        opened(path)


def test_what_has_no_place_is_refused(model: tuple[Any, Path], folder: Path, file: Path, tmp_path: Path) -> None:
    write_dense(folder / "2_Dense", (80, 48), TANH)
    with pytest.raises(UnsupportedError, match="GGUF has no place for its dense layers"):
        converted(folder, tmp_path / "m.gguf", "gguf")
    with pytest.raises(UnsupportedError, match="no folder is made that says which dense layers it has"):
        converted(file, tmp_path / "again", "hf")


# ---- copies ----


def test_copies_keep_them(model: tuple[Any, Path], file: Path, tmp_path: Path) -> None:
    assert converted(model[1], tmp_path / "copy", "hf", "bf16").notes == []
    assert [layer.shape for layer in settings(tmp_path / "copy").layers] == [(80, 48), (40, 80)]
    converted(file, tmp_path / "copy.gguf", "gguf")
    assert settings(tmp_path / "copy.gguf") == settings(file)


def test_pickled_ones_become_safetensors(folder: Path, tmp_path: Path) -> None:
    wanted = {}
    for path in (folder, folder / "2_Dense", folder / "3_Dense"):
        tensors = load_file(path / "model.safetensors")
        wanted[path.name] = tensors
        torch.save(tensors, path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    with convert.open_source(folder) as source:
        made = convert.plan(source, "hf")
        convert.write(source, made, tmp_path / "made")
    assert made.notes == []
    for inner in ("2_Dense", "3_Dense"):
        found = load_file(tmp_path / "made" / inner / "model.safetensors")
        assert torch.equal(found["linear.weight"], wanted[inner]["linear.weight"])
    assert use_of(settings(tmp_path / "made"), facts_spec(tmp_path / "made")).width(48) == 40


def facts_spec(path: Path) -> Any:
    with open_checkpoint(path) as checkpoint:
        return facts_of(checkpoint).spec
