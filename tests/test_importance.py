"""Importance matrices: measured as transformers' layers see it, read as llama.cpp writes them, weighed by the K-quants."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from engines import random_model, save
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant.gguf_encode import encode
from nanovllm_cli.quantization.importance import from_file, measured
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.pipeline import Method, _identity, quantize_model
from nanovllm_cli.quantization.plan import Choices, make_plan
from nanovllm_cli.quantization.texts import NamedText
from nanovllm_cli.quantization.walk import Walk
from nanovllm_cli.weights.imatrix import ImportanceFile, read_importance
from quantizing import TINY, quantize
from test_cli_driver import nanovllm
from test_convert import SETTINGS
from test_experts import SHAPE
from test_models import DELTA

WIDE = SHAPE | {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
TEXT = NamedText("a text", "\n".join(f"Lily saw {i} birds and {i * 7 % 31} trees near the house." for i in range(60)))
Means = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 is dense, layer 1 has experts. Channels differ, as those of trained models do."""
    config = Qwen3MoeConfig(
        **WIDE, num_experts=3, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=256, mlp_only_layers=[0],
    )
    model = random_model(config)
    spread = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.mul_(torch.randn(norm.weight.shape, generator=spread).exp())
    return with_tokenizer(save(model, tmp_path_factory.mktemp("mixture")))


def with_tokenizer(folder: Path) -> Path:
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder


def measured_of(folder: Path, to: str = "q4_k_m") -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    with open_original("m", folder) as original:
        texts = Method("imatrix", TEXT).sequences(original)
        plan = make_plan(original, Choices(to, tensor_types=(("blk.*", "q4_k"),)))
        return measured(plan, Walk(original, texts, NullProgress()), NullProgress()), texts


def test_what_is_measured_is_what_transformers_layers_read(mixture: Path) -> None:
    found, texts = measured_of(mixture)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    routes: list[torch.Tensor] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, *rest: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]).double())

    for i, layer in enumerate(model.model.layers):
        linear = {"q": layer.self_attn.q_proj, "o": layer.self_attn.o_proj}
        if i == 0:
            linear |= {"up": layer.mlp.up_proj, "down": layer.mlp.down_proj}
        for name, module in linear.items():
            module.register_forward_pre_hook(note(f"blocks.{i}.{name}.weight"))
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(note("rows"))
    experts.register_forward_pre_hook(lambda module, args: routes.append(args[1]))
    with torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))
    rows, chosen = torch.cat(seen.pop("rows")), torch.cat(routes)
    for expert in range(3):
        own = rows[(chosen == expert).any(1)]
        assert len(own) > 256, "or others are counted beside them"
        gate, up = (own @ experts.gate_up_proj[expert].double().T).chunk(2, -1)
        seen[f"blocks.1.experts.{expert}.up.weight"] = [own]
        seen[f"blocks.1.experts.{expert}.down.weight"] = [torch.nn.functional.silu(gate) * up]
    for name, inputs in seen.items():
        expected = torch.cat(inputs).square().mean(0)
        np.testing.assert_allclose(found[name].double().numpy(), expected.detach().numpy(), rtol=2e-3, err_msg=name)
    for alike, one in (("k", "q"), ("v", "q"), ("gate", "up")):
        assert torch.equal(found[f"blocks.0.{alike}.weight"], found[f"blocks.0.{one}.weight"])


def test_blocks_are_those_of_a_search_that_weighs_and_outputs_are_nearer(mixture: Path, tmp_path: Path) -> None:
    importance, _ = measured_of(mixture)
    options: dict[str, Any] = {"tensor_types": (("blk.*", "q4_k"),)}
    with open_original("m", mixture) as original:
        plan = make_plan(original, Choices("q4_k_m", **options))
        quantize_model(original, plan, Method("imatrix", TEXT), tmp_path / "w.gguf", None, NullProgress())
        up = torch.cat(list(original.rows("model.layers.0.mlp.up_proj.weight")))
    quantize("q4_k_m", tmp_path / "r.gguf", mixture, **options)
    weighed, nearest = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name).tensors} for name in ("w.gguf", "r.gguf")
    )
    own = importance["blocks.0.up.weight"]
    assert np.array_equal(np.array(weighed["blk.0.ffn_up.weight"].data), encode("Q4_K", up, own).numpy())
    errors = []
    for tensors in (weighed, nearest):
        q4 = GGMLQuantizationType.Q4_K
        numbers = gguf.quants.dequantize(np.array(tensors["blk.0.ffn_up.weight"].data), q4)
        errors.append(float(((torch.from_numpy(numbers) - up).double().square() * own.double()).sum()))
    assert errors[0] < 0.8 * errors[1]
    with open_original("m", mixture) as original:
        experts = [torch.cat(list(original.rows(f"model.layers.1.mlp.experts.{e}.down_proj.weight"))) for e in range(3)]
    for expert, rows in enumerate(experts):
        expected = encode("Q4_K", rows, importance[f"blocks.1.experts.{expert}.down.weight"]).numpy()
        assert np.array_equal(np.array(weighed["blk.1.ffn_down_exps.weight"].data)[expert], expected)


def test_columns_in_another_order_have_their_own_importance(tmp_path: Path) -> None:
    """Of Qwen3.5 a file has value heads in turn: what is measured in a folder is that of the file that is made of it."""
    config = Qwen3_5TextConfig(
        **WIDE | {"layer_types": ["linear_attention", "full_attention"]},
        **DELTA | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 64},
    )
    folder = with_tokenizer(save(random_model(config), tmp_path / "m"))
    assert nanovllm(tmp_path, "convert", str(folder), "-q", "-o", "plain.gguf").code == 0
    of_folder, _ = measured_of(folder)
    of_file, _ = measured_of(tmp_path / "plain.gguf")
    assert of_folder.keys() == of_file.keys()
    for name, values in of_folder.items():
        np.testing.assert_allclose(values.numpy(), of_file[name].numpy(), rtol=1e-3, err_msg=name)
    mean = of_folder["blocks.0.delta_out.weight"]
    assert not torch.allclose(mean.view(4, 64)[1], mean.view(4, 64)[2], rtol=1e-2), "or any order would do"


# ---- llama.cpp's files ----


def written(path: Path, means: Means, counts: int = 7, kind: str = "imatrix") -> Path:
    """As llama-imatrix writes it. means: [K], or [experts, K], whose experts have seen 7, 8, … tokens."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_array("imatrix.datasets", ["a.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, mean in means.items():
        rows = np.atleast_2d(mean).astype(np.float32)
        seen = np.arange(counts, counts + len(rows), dtype=np.float32)[:, None]
        writer.add_tensor(f"{name}.in_sum2", rows * seen)
        writer.add_tensor(f"{name}.counts", seen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def older(path: Path, means: Means, calls: int = 5) -> Path:
    data = struct.pack("<i", len(means))
    for name, mean in means.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, mean.size)
        data += (mean * calls).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 3, 5) + b"a.txt")
    return path


@pytest.mark.parametrize("write", [written, older])
def test_a_file_of_llama_cpp_is_taken(write: Callable[[Path, Means], Path], mixture: Path, tmp_path: Path) -> None:
    """The same numbers give the same file, however they came."""
    importance, _ = measured_of(mixture)
    theirs_of = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    theirs_of |= {name: f"ffn_{name}" for name in ("gate", "up", "down")}
    means = {}
    for i in (0, 1):
        for own, theirs in theirs_of.items():
            experts = [importance.get(f"blocks.{i}.experts.{e}.{own}.weight") for e in range(3)]
            if experts[0] is not None:
                means[f"blk.{i}.{theirs}_exps.weight"] = np.stack(experts)  # type: ignore[arg-type]
            elif f"blocks.{i}.{own}.weight" in importance:
                means[f"blk.{i}.{theirs}.weight"] = importance[f"blocks.{i}.{own}.weight"].numpy()
    file = read_importance(write(tmp_path / "imatrix", means))
    with open_original("m", mixture) as original:
        plan = make_plan(original, Choices("q4_k_m", tensor_types=(("blk.*", "q4_k"),)))
        found = from_file(plan, file, NullProgress())
        assert found.keys() == importance.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values.numpy(), importance[name].numpy(), rtol=1e-6, err_msg=name)
        other = file._replace(digest="another")
        assert _identity(original, plan, Method("imatrix", TEXT, importance=file)) != _identity(
            original, plan, Method("imatrix", TEXT, importance=other)
        ), "or a run with another file would go on with this one's parts"


def test_what_a_file_does_not_know_counts_alike_and_is_told() -> None:
    file = ImportanceFile("f", {"blk.0.ffn_up.weight": torch.tensor([1.0, 2.0, 0.0, 0.0])}, "")
    assert file.of("blk.0.ffn_up.weight", 2, 0, 2).tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    assert file.of("blk.0.ffn_up.weight", 2, 1, 2) is None, "an expert that nothing came to"
    assert file.of("blk.1.ffn_up.weight", 2, 0, 1) is None
    with pytest.raises(CheckpointError, match="4 numbers for 3 columns"):
        file.of("blk.0.ffn_up.weight", 3, 0, 1)


GOOD = {"blk.0.ffn_up.weight": np.ones(256, np.float32)}
BROKEN: dict[str, tuple[Callable[[Path], object], type[NanovllmError], str]] = {
    "a model": (lambda path: written(path, GOOD, kind="model"), UnsupportedError, "no importance matrix"),
    "not a number": (lambda path: written(path, {"a": np.full(4, np.nan)}), CheckpointError, "no mean of squares"),
    "negative": (lambda path: older(path, {"a": np.full(4, -1.0)}), CheckpointError, "no mean of squares"),
    "cut": (lambda path: path.write_bytes(older(path, GOOD).read_bytes()[:200]), CheckpointError, "columns would be 256"),
    "cut in a number": (lambda path: path.write_bytes(b"\1\0\0"), CheckpointError, "ends before the number of entries"),
    "cut in a name": (lambda path: path.write_bytes(struct.pack("<ii", 1, 9) + b"blk"), CheckpointError, "ends before"),
    "another file": (lambda path: path.write_text("Once upon a time"), CheckpointError, "no importance matrix"),
    "twice": (lambda path: path.write_bytes(b"\2\0\0\0" + 2 * older(path, GOOD).read_bytes()[4:-13]), CheckpointError, "twice"),
    "no rows": (lambda path: written(path, {"a": np.ones((0, 4))}), CheckpointError, "a has no numbers"),
    "no columns": (lambda path: written(path, {"a": np.ones((1, 0))}), CheckpointError, "a has no numbers"),
    "nothing": (lambda path: older(path, {}), CheckpointError, "no weight is in it"),
    "empty": (lambda path: path.write_bytes(b""), CheckpointError, "the file is empty"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_told(case: str, tmp_path: Path) -> None:
    write, error, says = BROKEN[case]
    write(tmp_path / "f")
    with pytest.raises(error, match=says):
        read_importance(tmp_path / "f")


def test_sums_without_counts_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "f", GOOD)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes().replace(b".counts", b".cuonts"))
    with pytest.raises(CheckpointError, match="no counts"):
        read_importance(tmp_path / "f")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_sums_of_as_many_matrices_as_counts_are_read(count: int, tmp_path: Path) -> None:
    """One matrix of 8 columns is not two of 4, whatever its counts say."""
    writer = gguf.GGUFWriter(tmp_path / "f", "")
    writer.add_type("imatrix")
    writer.add_tensor("a.in_sum2", np.ones((1, 8), np.float32))
    writer.add_tensor("a.counts", np.arange(1, count + 1, dtype=np.float32)[None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="no counts that go with them"):
        read_importance(tmp_path / "f")


def test_the_command(tmp_path: Path) -> None:
    """By a file and by a calibration; what does not go together is refused."""
    written(tmp_path / "i.gguf", {f"blk.{i}.ffn_up.weight": np.linspace(0.5, 2, 256, dtype=np.float32) for i in range(2)})
    written(tmp_path / "other.gguf", {"blk.0.ffn_up.weight": np.ones(64, np.float32)})
    written(tmp_path / "none.gguf", {"blk.99.ffn_up.weight": np.ones(256, np.float32)})
    common = ("quantize", "tiny", "--to", "q4_k_m", "--no-verify")
    done = nanovllm(tmp_path, *common, "--imatrix", "i.gguf", "-o", "file.gguf", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["algorithm"] == "imatrix"
    assert "says nothing of" in done.err
    done = nanovllm(tmp_path, *common, "--algorithm", "imatrix", "--num-samples", "2", "-o", "own.gguf", "--json")
    assert (done.code, json.loads(done.out)["algorithm"]) == (0, "imatrix")
    assert nanovllm(tmp_path, *common, "-o", "plain.gguf").code == 0
    assert len({(tmp_path / name).read_bytes() for name in ("file.gguf", "own.gguf", "plain.gguf")}) == 3
    for words, code, says in (
        (("--imatrix", "i.gguf", "--algorithm", "awq"), 2, "awq goes by other numbers"),
        (("--imatrix", "i.gguf", "--num-samples", "3"), 2, "nothing is calibrated"),
        (("--imatrix", "nowhere.gguf"), 2, "there is no file nowhere.gguf"),
        (("--imatrix", "other.gguf"), 1, "64 numbers for 256 columns"),
        (("--imatrix", "none.gguf"), 2, "says nothing of this model's weights"),
        (("--to", "q8_0", "--algorithm", "imatrix"), 6, "nothing becomes one of these"),
        (("--to", "int8", "--algorithm", "imatrix"), 6, "nothing becomes one of these"),
        (("--to", "q4_0", "--algorithm", "imatrix"), 6, "nothing becomes one of these"),
    ):
        done = nanovllm(tmp_path, *common, *words, "-o", "x.gguf" if "int8" not in words else "x")
        assert done.code == code, done.err
        assert says in done.err
        assert not (tmp_path / "x.gguf").exists()


def test_a_plan_without_such_weights_is_refused_by_the_library() -> None:
    with open_original("tiny", TINY) as original, pytest.raises(UnsupportedError, match="weighs the columns of q2_k to q6_k"):
        from_file(make_plan(original, Choices("q8_0")), ImportanceFile("f", {}, ""), NullProgress())
    with open_original("tiny", TINY) as original, pytest.raises(UsageError, match="says nothing"):
        from_file(make_plan(original, Choices("q4_k_m")), ImportanceFile("f", {}, ""), NullProgress())
