"""Models with experts between folders and GGUF files: the file that llama.cpp's converter makes, transformers' logits, types as
llama.cpp's quantizer chooses them, folders that transformers loads."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import test_experts as experts
from engines import SMALL, random_model, save, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import CheckpointView, open_checkpoint
from quantizing import plan_of
from quantizing import quantize as quantize_model
from test_convert import SETTINGS, TINY, converted
from test_convert_families import fields, make_gguf, tensors, with_tokenizer
from test_models import CASES as TEXTS
from test_models import GRANITE, GRANITE_4, GRANITE_4_H, prompts
from test_quant_engine import difference, expected_logits, logits_of

BOTH_WAYS = {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100}  # of the bundled tokenizer, and four rows more
GRANITE_4_MOE = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 33}


def changed(config: Any, **values: Any) -> Any:
    return type(config)(**config.to_dict() | values)


def matrices_of(path: Path) -> dict[str, np.ndarray]:
    """Without the 1s that a shape may have at either end: some converters leave them, some do not."""
    return {name: data.squeeze() for name, data in tensors(path).items()}


# ---- folder to GGUF ----


@pytest.mark.parametrize(
    "family",
    [experts.qwen, experts.qwen2, experts.mixtral, experts.granite, experts.gpt_oss, experts.glm, experts.ernie, experts.lfm2,
     experts.olmoe, experts.minimax, experts.dots, experts.solar, experts.exaone, experts.phimoe, experts.hy_v3],
)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(family: Any, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(family().config))
    expected = experts.write_gguf(tmp_path / "expected.gguf", model, ["F32"])
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    wanted = {name: data for name, data in matrices_of(expected).items() if ".nextn." not in name}
    found = matrices_of(tmp_path / "made.gguf")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
    keys, further = fields(tmp_path / "made.gguf"), ("block_count", "nextn_predict_layers")
    guesses = keys["general.architecture"] == "glm4moe"
    for key, value in fields(expected).items():
        if not key.startswith(("GGUF.", "tokenizer.")) and not (guesses and key.endswith(further)):
            assert keys[key] == pytest.approx(value), key


WRITTEN = {
    "qwen3 moe, 3 of 5, a dense layer between": "qwen3moe",
    "qwen2 moe, 2 of 5 and shared": "qwen2moe",
    "qwen3.5 moe, 2 of 5 and shared": "qwen35moe",
    "qwen3-next, 3 of 5 and shared": "qwen3next",
    "kimi linear, 3 of 5 and shared": "kimi-linear",
    "glm4 moe, 2 of 5 and shared": "glm4moe",
    "glm4 moe, norms of heads": "glm4moe",
    "gpt-oss, 2 of 5": "gpt-oss",
    "ernie 4.5, 2 of 5 and shared": "ernie4_5-moe",
    "lfm2 moe, 2 of 5": "lfm2moe",
    "granite moe, 2 of 5": "granitemoe",
    "granite 4 h": "granitehybrid",
    "bamba": "granitehybrid",
    "granite moe shared, 2 of 5": "granitemoe",
    "granite 4 h, 2 of 5 and shared": "granitehybrid",
    "gemma4, 2 of 5 beside": "gemma4",
    "jamba, 2 of 5, three taps, tied": "jamba",
    "falcon h1": "falcon-h1",
    "bitnet": "bitnet",
    "mixtral, 2 of 4, window": "llama",
    "afmoe, 2 of 5 and shared": "afmoe",
    "mellum, of one base": "mellum",
    "mimo v2, 2 of 5": "mimo2",
    "granite swa, positions in some layers": "granite_swa",
    "hunyuan moe, 3 of 5 and shared, another base": "hunyuan-moe",
    "sarvam moe, 3 of 8 in two of four groups": "bailingmoe2",
    "apertus": "apertus",
    "command a+, 2 of 5 and shared": "cohere2moe",
    "command a+, 2 of 5 by a softmax": "cohere2moe",
    "llama4, as published": "llama4",
    "mistral4, 3 of 5 and shared": "mistral4",
}


@pytest.mark.parametrize("case", WRITTEN)
def test_the_file_gives_the_logits_that_transformers_gives_of_the_folder(case: str, tmp_path: Path) -> None:
    model = random_model(with_tokenizer(TEXTS[case]))
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")["general.architecture"] == WRITTEN[case]
    tokens = prompts(512)
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), tokens), expected_logits(model, tokens)) < 1e-4


def test_a_granite_4_without_states_keeps_the_mlp_beside_its_experts(tmp_path: Path) -> None:
    config = GraniteMoeHybridConfig(**GRANITE_4 | GRANITE_4_MOE, **GRANITE, position_embedding_type="rope")
    model = random_model(with_tokenizer(config))
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    assert fields(tmp_path / "made.gguf")["general.architecture"] == "granitemoe"
    tokens = prompts(512)
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), tokens), expected_logits(model, tokens)) < 1e-4


def test_an_mlp_beside_experts_of_a_granite_with_windows_is_not_written(tmp_path: Path) -> None:
    config = TEXTS["granite moe swa, 3 of 5 and shared"]
    folder = save(random_model(with_tokenizer(config)), tmp_path / "shared")
    with pytest.raises(UnsupportedError, match="GGUF files of a Granite SWA with an MLP beside its experts are not written"):
        make_gguf(folder, tmp_path / "m.gguf")
    model = random_model(with_tokenizer(changed(config, shared_intermediate_size=0)))
    make_gguf(save(model, tmp_path / "alone"), tmp_path / "m.gguf")
    assert {"blk.0.ffn_gate_up_exps.weight", "blk.0.attn_sinks.weight"} <= tensors(tmp_path / "m.gguf").keys()
    tokens = prompts(512)
    assert difference(logits_of(worker_for(tmp_path / "m.gguf"), tokens), expected_logits(model, tokens)) < 1e-4


def test_groups_of_experts_are_said(tmp_path: Path) -> None:
    config = changed(experts.glm().config, n_routed_experts=6, n_group=3, topk_group=2)
    model = random_model(with_tokenizer(config))
    make_gguf(save(model, tmp_path / "folder"), tmp_path / "made.gguf")
    keys = fields(tmp_path / "made.gguf")
    assert [keys[f"glm4moe.expert_group_{name}"] for name in ("count", "used_count")] == [3, 2]
    tokens = prompts(512)
    assert difference(logits_of(worker_for(tmp_path / "made.gguf"), tokens), expected_logits(model, tokens)) < 1e-4


@pytest.mark.parametrize(("case", "stacks"), [("gemma4, 2 of 5 beside", 2), ("qwen3.5 moe, 2 of 5 and shared", 3)])
def test_gate_and_up_are_one_tensor_in_gemma4_alone(case: str, stacks: int, tmp_path: Path) -> None:
    """By the gguf package's table of what an architecture's files have."""
    arch = WRITTEN[case]
    make_gguf(save(random_model(with_tokenizer(TEXTS[case])), tmp_path / "folder"), tmp_path / "made.gguf")
    found = [name for name in tensors(tmp_path / "made.gguf") if name.startswith("blk.0.") and "_exps.weight" in name]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = {gguf.TENSOR_NAMES[each].format(bid=0) + ".weight" for each in gguf.MODEL_TENSORS[kind]}
    assert set(found) <= known
    assert len(found) == stacks


def test_what_decides_and_biases_are_in_float32(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(experts.gpt_oss().config)), tmp_path / "folder")
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    converted(folder, tmp_path / "m.gguf", "gguf", "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {kinds[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"Q8_0"}
    assert {kinds[f"blk.0.ffn_{part}_exps.bias"] for part in ("gate", "up", "down")} == {"F32"}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == "Q8_0"


def test_layers_without_experts_that_llama_cpp_does_not_expect_are_said(tmp_path: Path) -> None:
    notes = {}
    for case in ("qwen3 moe, 3 of 5, a dense layer between", "glm4 moe, 2 of 5 and shared"):
        folder = save(random_model(with_tokenizer(TEXTS[case])), tmp_path / case)
        notes[WRITTEN[case]] = [note for note in make_gguf(folder, tmp_path / f"{case}.gguf") if "layers without experts" in note]
    assert [len(found) for found in notes.values()] == [1, 0]


def mxfp4_folder(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """gpt-oss as it is published; its experts' codes by their names, as numbers."""
    model = random_model(with_tokenizer(experts.gpt_oss().config), dtype=torch.bfloat16)
    own = load_file(save(model, folder) / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    draw, numbers = torch.Generator().manual_seed(5), {}
    for name in [name for name, tensor in own.items() if tensor.dim() == 3]:
        count, columns, rows = own.pop(name).shape
        codes = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 125, codes.shape[:-1], generator=draw, dtype=torch.uint8)
        own |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        halves = values[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
        numbers[name] = (halves * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)
    save_file(own, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder, numbers


@pytest.mark.parametrize("outtype", ["auto", "q8_0"])
def test_mxfp4_stays_mxfp4_with_every_code(outtype: str, tmp_path: Path) -> None:
    """llama.cpp's converter keeps it whatever --outtype says. Numbers by the gguf package, of the file; by the table of OCP's MX
    1.0, of the folder."""
    folder, numbers = mxfp4_folder(tmp_path / "folder")
    converted(folder, tmp_path / "m.gguf", "gguf", outtype)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for i in range(2):
        gate_up = numbers[f"model.layers.{i}.mlp.experts.gate_up_proj"]
        parts = {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": numbers[f"model.layers.{i}.mlp.experts.down_proj"]}
        for part, expected in parts.items():
            tensor = found[f"blk.{i}.ffn_{part}_exps.weight"]
            assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
            assert np.array_equal(dequantize(np.array(tensor.data), tensor.tensor_type), expected.numpy())
    assert found["blk.0.attn_q.weight"].tensor_type.name == ("BF16" if outtype == "auto" else "Q8_0")
    if outtype == "auto":
        assert fields(tmp_path / "m.gguf")["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
        tokens = prompts(512)[:4]
        both = (logits_of(worker_for(path, dtype="float32"), tokens) for path in (folder, tmp_path / "m.gguf"))
        assert difference(*both) < 1e-5


def test_a_scale_that_is_no_number_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    folder, _ = mxfp4_folder(tmp_path / "folder")
    own = load_file(folder / "model.safetensors")
    own["model.layers.1.mlp.experts.down_proj_scales"][4, -1, 0] = 255
    save_file(own, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has scales that are NaN"):
        converted(folder, tmp_path / "m.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_no_more_than_an_expert_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written at once is at most a matrix of one expert, or of all tokens."""
    folder = save(random_model(with_tokenizer(experts.qwen().config)), tmp_path / "folder")
    sizes: list[int] = []
    write = convert.GGUFPartWriter.write

    def measured(self: Any, name: str, slices: Any) -> None:
        def each() -> Any:
            for piece in slices:
                if "_exps" in name:
                    sizes.append(piece.numel())
                yield piece

        write(self, name, each())

    monkeypatch.setattr(convert.GGUFPartWriter, "write", measured)
    make_gguf(folder, tmp_path / "m.gguf")
    assert len(sizes) == 2 * 3 * 5
    assert set(sizes) == {64 * 128}


def test_pages_of_a_stack_are_let_go_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(random_model(with_tokenizer(experts.granite().config)), tmp_path / "folder")
    released: list[str] = []
    release = CheckpointView.release
    monkeypatch.setattr(CheckpointView, "release", lambda self, name: (released.append(name), release(self, name))[1])
    make_gguf(folder, tmp_path / "m.gguf")
    assert released.count("model.layers.0.block_sparse_moe.input_linear.weight") == 2 * 5


def test_what_a_llama_4_says_of_layers_with_a_window_is_of_those_with_chunks(tmp_path: Path) -> None:
    """Which are all that rotate: llama.cpp has the base for them."""
    make_gguf(save(random_model(with_tokenizer(TEXTS["llama4, as published"])), tmp_path / "folder"), base := tmp_path / "m.gguf")
    spec = worker_for(written_anew(base, tmp_path / "changed.gguf", {"llama4.rope.freq_base_swa": 333.0})).spec
    assert {None if each.rope is None else each.rope.theta for each in spec.attentions} == {None, 333.0}
    assert spec.each_rope(lambda rope: replace(rope, theta=5e5)) == worker_for(base).spec


def test_weights_of_a_hy3s_experts_are_1_together_where_its_file_says_so(tmp_path: Path) -> None:
    """llama.cpp reads it of this architecture, and means no where nothing is said."""
    folder = save(random_model(with_tokenizer(TEXTS["hy v3, 3 of 5 and shared"])), tmp_path / "folder")
    make_gguf(folder, base := tmp_path / "m.gguf")

    def norms(value: bool | None) -> set[bool]:
        spec = worker_for(written_anew(base, tmp_path / "changed.gguf", {"hy_v3.expert_weights_norm": value})).spec
        return {block.mlp.norm_topk for block in spec.blocks if isinstance(block.mlp, MoESpec)}

    assert (norms(True), norms(False), norms(None)) == ({True}, {False}, {False})


CAN_NOT_BE_SAID: dict[str, tuple[Any, str]] = {
    "weights of all experts": (lambda: experts.qwen(norm_topk_prob=False).config, "a qwen3_moe model: norm_topk"),
    "weights that are scaled": (
        lambda: changed(experts.lfm2().config, routed_scaling_factor=1.5), "a lfm2_moe model: scale",
    ),
    "weights that are made 1 together": (
        lambda: changed(experts.qwen2().config, norm_topk_prob=True), "a qwen2_moe model: norm_topk",
    ),
    "windows in the last layers": (
        lambda: TEXTS["dots1, weights as they are, a window in the last layers"], "a dots1 model: window",
    ),
    "embeddings as they are": (
        lambda: changed(TEXTS["afmoe, 2 of 5 and shared"], mup_enabled=False), "a afmoe model: embedding_scale",
    ),
    "bases of layers": (
        lambda: changed(TEXTS["granite swa, positions in some layers"], layer_rope_theta=[1e4, 500.0, 1e4]),
        "a granite_swa model: theta",
    ),
    "another share of a Phi": (lambda: TEXTS["phimoe, 2 of 5"], "a phimoe model: nearness"),
    "a Qwen3-Next of attention alone": (
        lambda: changed(TEXTS["qwen3-next, 3 of 5 and shared"], layer_types=["full_attention"] * 3, mlp_only_layers=[]),
        "a qwen3_next model: attention in all layers",
    ),
    "an ERNIE with experts in every second layer": (
        lambda: TEXTS["ernie 4.5, none shared, every second layer"], "experts in all layers behind the first with some",
    ),
    "experts that no bias chooses": (
        lambda: changed(experts.lfm2().config, use_expert_bias=False), "a lfm2_moe model: .*biases of the choice of experts",
    ),
    "a gpt-oss without biases": (
        lambda: changed(experts.gpt_oss().config, attention_bias=False), "a gpt_oss model: .*biases of attention",
    ),
    "a bias behind the attention of a Qwen": (
        lambda: changed(experts.qwen().config, attention_bias=True), "a qwen3_moe model: blk.0.attn_output.bias",
    ),
    "a bias behind the attention of a Hunyuan": (
        lambda: changed(TEXTS["hunyuan moe, 3 of 5 and shared, another base"], attention_bias=True),
        "a hunyuan_v1_moe model: blk.0.attn_output.bias",
    ),
    "a clipped OLMoE": (lambda: TEXTS["olmoe, clipped"], "a olmoe model: .*clip"),
    "weights of an OLMoE that are": (lambda: changed(experts.olmoe().config, norm_topk_prob=True), "a olmoe model: norm_topk"),
}  # fmt: skip


@pytest.mark.parametrize("case", CAN_NOT_BE_SAID)
def test_what_a_file_can_not_say_is_refused(case: str, tmp_path: Path) -> None:
    config, words = CAN_NOT_BE_SAID[case]
    folder = save(random_model(with_tokenizer(config())), tmp_path / "folder")
    with pytest.raises(UnsupportedError, match=f"GGUF cannot say this of .*{words}"):
        make_gguf(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_folder_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    folder = save(random_model(with_tokenizer(experts.qwen().config)), tmp_path / "folder")
    own = load_file(folder / "model.safetensors")
    del own["model.layers.1.mlp.experts.4.down_proj.weight"]
    save_file(own, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model.layers.1.mlp.experts.4.down_proj.weight"):
        make_gguf(folder, tmp_path / "m.gguf")


# ---- GGUF to folder ----

BACK = {
    "qwen3": lambda: experts.qwen().config,
    "qwen3, a dense layer": lambda: experts.qwen(mlp_only_layers=[1]).config,
    "mixtral": lambda: experts.mixtral().config,
    "mixtral, window": lambda: changed(experts.mixtral().config, sliding_window=20),
    "qwen2": lambda: experts.qwen2().config,
}


@pytest.mark.parametrize("case", BACK)
def test_there_and_back_loses_nothing_and_transformers_loads_it(case: str, tmp_path: Path) -> None:
    folder = save(random_model(changed(BACK[case](), **BOTH_WAYS), dtype=torch.bfloat16), tmp_path / "folder")
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    converted(folder, tmp_path / "m.gguf", "gguf")
    notes = converted(tmp_path / "m.gguf", tmp_path / "back", "hf").notes
    assert notes == []
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert after.keys() == before.keys()
    assert [name for name in before if after[name].dtype != torch.bfloat16 or not torch.equal(after[name], before[name])] == []
    models, tokens = [], prompts(512)
    for each in (folder, tmp_path / "back"):
        model, told = AutoModelForCausalLM.from_pretrained(each, output_loading_info=True, dtype=torch.float32)
        assert not any(told.values())
        model.config._experts_implementation = "eager"
        models.append(model.eval())
    assert type(models[0]) is type(models[1])
    logits = [expected_logits(model, tokens) for model in models]
    assert torch.equal(*logits)
    assert difference(logits_of(worker_for(tmp_path / "back", dtype="float32"), tokens), logits[0]) < 1e-4


def test_folders_of_other_families_are_not_made(tmp_path: Path) -> None:
    path = experts.write_gguf(tmp_path / "m.gguf", experts.glm(), ["F32"])
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match="folders of glm4_moe models are not made"):
        convert.plan(checkpoint, "hf")


# ---- quantized ----


def quantized(config: Any, mix: str, folder: Path, **choices: Any) -> Path:
    source = save(random_model(config), folder / "source")
    for name in SETTINGS:
        shutil.copy(TINY / name, source / name)
    quantize_model(mix, folder / "made.gguf", source, **choices)
    return folder / "made.gguf"


@pytest.mark.parametrize(
    "make",
    [lambda: experts.qwen().config, lambda: TEXTS["gemma4, 2 of 5 beside"],
     lambda: changed(experts.gpt_oss().config, intermediate_size=96),
     lambda: changed(TEXTS["granite 4 h, 2 of 5 and shared"], hidden_size=64, mamba_n_heads=8, mamba_d_head=16,
                     intermediate_size=96)],
    ids=["qwen3", "gemma4", "gpt-oss", "granite 4 h"],
)  # fmt: skip
def test_experts_are_rounded_one_by_one_and_lie_in_their_order(make: Any, tmp_path: Path) -> None:
    """What stands in the quantized file is near what `convert` writes, expert by expert and row by row."""
    config = changed(with_tokenizer(make()), hidden_size=64, moe_intermediate_size=96, shared_intermediate_size=96)
    path = quantized(config, "q8_0", tmp_path)
    make_gguf(tmp_path / "source", tmp_path / "plain.gguf")
    plain = tensors(tmp_path / "plain.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.keys() == plain.keys()
    stacks = [name for name in plain if name.endswith("_exps.weight")]
    assert len(stacks) >= 4
    for name in stacks:
        assert found[name].tensor_type.name == "Q8_0"
        numbers = dequantize(np.array(found[name].data), found[name].tensor_type)
        assert numbers.shape == plain[name].shape
        error = np.abs(numbers - plain[name])
        assert (error <= np.abs(plain[name]).max(-1, keepdims=True) / 127).all(), name


@pytest.mark.parametrize(
    "make",
    [lambda: experts.qwen().config,
     lambda: changed(TEXTS["gemma4, 2 of 5 beside"], hidden_size=64, intermediate_size=96, moe_intermediate_size=96)],
    ids=["qwen3", "gemma4"],
)  # fmt: skip
def test_a_folder_and_its_file_are_quantized_alike(make: Any, tmp_path: Path) -> None:
    """F32 to Q8_0 in one go, and by way of a file."""
    config = with_tokenizer(make())
    path = quantized(config, "q8_0", tmp_path)
    make_gguf(tmp_path / "source", tmp_path / "plain.gguf")
    quantize_model("q8_0", tmp_path / "again.gguf", tmp_path / "plain.gguf")
    files = (path, tmp_path / "again.gguf")
    found = [{tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(file).tensors} for file in files]
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    tokens = prompts(512)[:3]
    assert torch.equal(*(logits_of(worker_for(file, dtype="float32"), tokens) for file in files))


def test_a_tensor_type_is_of_a_whole_layer(tmp_path: Path) -> None:
    config = with_tokenizer(experts.qwen().config)
    path = quantized(config, "q8_0", tmp_path, tensor_types=((r"blk\.0\.ffn_up_exps", "q4_0"), (r"blk\.1\.ffn_up_exps", "keep")))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert [kinds[f"blk.{i}.ffn_up_exps.weight"] for i in range(2)] == ["Q4_0", "F32"]
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q8_0"
    plan = plan_of("q8_0", tmp_path / "source").as_json()["weights"]
    assert plan["blk.0.ffn_down_exps.weight"]["shape"] == [5, 128, 64]
    assert plan["blk.0.ffn_down_exps.weight"]["bytes"] == 5 * 128 * 64 * 34 // 32


WIDE = SMALL | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1,
                "num_hidden_layers": 8}  # fmt: skip
NARROW = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
QUANTIZED: dict[str, Any] = {
    "qwen3, 8": lambda: Qwen3MoeConfig(**WIDE | NARROW, num_experts=8, norm_topk_prob=True),
    "qwen3, 5": lambda: Qwen3MoeConfig(**WIDE | NARROW, num_experts=5, norm_topk_prob=True),
    "mixtral, 8, tied": lambda: MixtralConfig(
        **WIDE | {"tie_word_embeddings": True}, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt-oss": lambda: GptOssConfig(
        **WIDE, num_local_experts=5, num_experts_per_tok=2, sliding_window=20,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "lfm2": lambda: Lfm2MoeConfig(
        **WIDE | NARROW | {"tie_word_embeddings": True}, layer_types=["conv", "conv", "full_attention", "conv"] * 2,
        num_experts=5, num_dense_layers=2,
    ),
    "granite": lambda: GraniteMoeConfig(**WIDE, num_local_experts=5, num_experts_per_tok=2, **GRANITE),
    "granite 4 h": lambda: GraniteMoeHybridConfig(
        **GRANITE_4_H | WIDE | {
            "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 256, "mamba_d_head": 64,
            "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_state": 128,
        }, **GRANITE,
    ),
}  # fmt: skip
_ALIKE = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_SHARED = {"shared_expert_intermediate_size": 256}
QUANTIZED |= {
    "qwen2": lambda: Qwen2MoeConfig(
        **{name: value for name, value in (WIDE | NARROW | _SHARED).items() if name != "head_dim"}, num_experts=5
    ),
    "qwen3-next": lambda: changed(
        TEXTS["qwen3-next, 3 of 5 and shared"], **WIDE | NARROW | _SHARED | _ALIKE, mlp_only_layers=[],
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
    ),
    "glm": lambda: Glm4MoeConfig(**WIDE | NARROW, n_routed_experts=6, first_k_dense_replace=2, n_group=2, topk_group=1),
    "ernie": lambda: Ernie4_5_MoeConfig(**WIDE, moe_num_experts=6, moe_k=2, moe_intermediate_size=256),
}  # fmt: skip
QUANTIZED |= {
    "hunyuan": lambda: changed(TEXTS["hunyuan moe, 3 of 5 and shared, another base"], **WIDE),
    "ling": lambda: changed(TEXTS["sarvam moe, 3 of 8 in two of four groups"], **WIDE | NARROW),
    "llama 4": lambda: changed(
        TEXTS["llama4, as published"], **WIDE, intermediate_size_mlp=512, moe_layers=None, layer_types=None, no_rope_layers=None,
    ),
    "apertus": lambda: changed(TEXTS["apertus"], **WIDE),
    "command a+": lambda: changed(
        TEXTS["command a+, 2 of 5 and shared"], **WIDE | {"intermediate_size": 256}, prefix_dense_intermediate_size=512,
        layer_types=None, mlp_layer_types=["dense", *["sparse"] * 7],
    ),
}  # fmt: skip
MIXES = {"q4_k_m": 15, "q4_k_s": 14, "q5_k_m": 17, "q3_k_m": 12, "q6_k": 18, "q8_0": 7, "q2_k_m": 10, "q4_0": 2}


@pytest.mark.parametrize("case", QUANTIZED)
def test_types_are_those_of_llama_cpps_quantizer(case: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    folder = save(random_model(with_tokenizer(QUANTIZED[case]())), tmp_path / "folder")
    make_gguf(folder, tmp_path / "plain.gguf")
    for mix, number in MIXES.items():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = number
        names = [str(tmp_path / f"{name}.gguf").encode() for name in ("plain", "theirs")]
        assert llama_cpp.llama_model_quantize(*names, settings) == 0
        theirs = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "theirs.gguf").tensors}
        ours = {name: items[0].format for name, items in plan_of(mix, folder).by_output().items()}
        assert {name: form.type for name, form in ours.items()} == {name: theirs[name] for name in ours}
        kept = {name for name in theirs.keys() - ours.keys() if ".ssm_ba." not in name}  # which decides of states: F32 here
        assert {theirs[name] for name in kept} == {"F32"}


PEER = [
    "glm4 moe, 2 of 5 and shared", "ernie 4.5, 2 of 5 and shared", "granite moe, 2 of 5", "granite 4 h",
    "granite 4 h, 2 of 5 and shared", "hunyuan moe, 3 of 5 and shared, another base",
    "sarvam moe, 3 of 8 in two of four groups", "apertus", "command a+, 2 of 5 and shared", "command a+, 2 of 5 by a softmax",
    "mistral4, 3 of 5 and shared", "ministral3, queries that grow", "llama4, as published",
]  # fmt: skip


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "qwen2", "gpt-oss", "lfm2", *PEER])
def test_llama_cpp_gives_the_logits_of_the_file(case: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    ours = {"qwen3": experts.qwen, "mixtral": experts.mixtral, "qwen2": experts.qwen2, "gpt-oss": experts.gpt_oss,
            "lfm2": experts.lfm2}  # fmt: skip
    config = ours[case]().config if case in ours else TEXTS[case]
    if case == "lfm2":
        config = changed(config, tie_word_embeddings=True)
    make_gguf(save(random_model(with_tokenizer(config)), tmp_path / "folder"), tmp_path / "m.gguf")
    ids = prompts(512)[3]
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0)
    theirs.eval(ids)
    expected = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert math.isfinite(float(expected.sum()))
    assert difference(logits_of(worker_for(tmp_path / "m.gguf", dtype="float32"), [ids]), expected) < 1e-4
