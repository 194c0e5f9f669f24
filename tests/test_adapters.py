"""LoRA adapters against PEFT in fp32 and llama.cpp: added to plain weights, beside quantized ones, in both formats' files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    ExaoneConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from hub_server import environment, serving
from live_server import live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.errors import (
    AccessRefusedError,
    CheckpointError,
    ModelNotFoundError,
    NanovllmError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.adapted import merged
from nanovllm_cli.weights.adapter import open_adapter
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.source import resolve
from test_cli_driver import Result
from test_cli_driver import nanovllm as driven
from test_cli_real import nanovllm as real
from test_cuda_engine import engine_on, kernels_not_rehearsed
from test_cuda_quantized import SHAPE, worker_on
from test_experts import write_gguf as write_experts
from test_models import CASES as TEXTS
from test_models import prompts
from test_models_gguf import CASES as FILES
from test_models_gguf import fused, nothing, write
from test_quant_engine import dequantized, difference, expected_logits, logits_of, write_gguf
from tiny_adapter import write_adapter

if TYPE_CHECKING:
    from peft import PeftModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # what PEFT asks transformers
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
EVEN = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Widths that GGUF's blocks divide."""
QUERY_AND_VALUE = ("q_proj", "v_proj")
MIXED = ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
"""Those of attention and of state spaces."""
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SMALL), {}),
    "llama, queries and values": (LlamaConfig(**SMALL), {"target_modules": list(QUERY_AND_VALUE)}),
    "qwen2, rank-stabilized": (Qwen2Config(**SMALL), {"use_rslora": True}),
    "qwen3, a rank and an alpha for some": (
        Qwen3Config(**SMALL),
        {
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 9},
            "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 30, "v_proj": 1},
        },
    ),
    "phi3": (Phi3Config(**SMALL | {"head_dim": 8, "pad_token_id": 0}), {}),
    "lfm2": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]), {}),
    "lfm3": (TEXTS["lfm3"], {}),
    "zamba2": (
        TEXTS["zamba2, two shared"],
        {"target_modules": ["in_proj", "out_proj", "linear"]},
    ),
    "zaya": (
        TEXTS["zaya, 1 of 5 or none"],
        {"target_modules": ["q_proj", "k_proj", "v_proj_current", "v_proj_delayed", "o_proj"]},
    ),
    "laguna": (TEXTS["laguna, 2 of 5 and shared"], {}),
    "exaone": (ExaoneConfig(**SMALL), {}),
    "gemma4": (TEXTS["gemma4, keys of other layers"], {}),
    "granite 4 h": (TEXTS["granite 4 h"], {"target_modules": MIXED}),
    "nemotron h": (TEXTS["nemotron h"], {"target_modules": ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"]}),
    "falcon h1": (TEXTS["falcon h1"], {"target_modules": ["in_proj", *MIXED[2:], "down_proj"]}),
    "jamba": (TEXTS["jamba"], {"target_modules": [*MIXED, "x_proj", "down_proj"]}),
    "youtu": (TEXTS["youtu"], {}),
    "kimi linear": (
        TEXTS["kimi linear, 3 of 5 and shared"],
        {"target_modules": ["q_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj",
                            "kv_a_proj_with_mqa", "kv_b_proj", "down_proj"]},
    ),
    "a.x k2": (
        TEXTS["a.x k2, 9 of what is before"],
        {"target_modules": ["q_a_proj", "q_gate_proj", "kv_a_proj_with_mqa", "o_proj", "fc1", "fc2"]},
    ),
    "hy 4": (
        TEXTS["hy 4, a layer goes by another"],
        {"target_modules": ["q_a_proj", "q_b_proj", "self_attn.gate_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
    "ling 3": (
        TEXTS["ling 3, 3 of 8 in two of four groups"],
        {"target_modules": ["q_proj", "v_proj", "f_proj", "b_proj", "g_proj", "o_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
    ),
    "hrm": (TEXTS["hrm, twice three and one"], {"target_modules": ["q_proj", "self_attn.gate_proj", "o_proj", "down_proj"]}),
    "dory": (
        TEXTS["dory, two layers thrice"],
        {"target_modules": ["q_proj", "self_attn.gate_proj", "o_proj", "mlp.gate_proj", "down_proj"]},
    ),
    "olmo hybrid": (
        TEXTS["olmo hybrid"],
        {"target_modules": ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj", "down_proj"]},
    ),
    "lara mini": (
        TEXTS["lara mini, 3 of 5 and shared"],
        {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "o_proj"]},
    ),
    "pythia": (TEXTS["pythia"], {}),
    "olmo": (TEXTS["olmo, clipped"], {}),
    "nanochat": (TEXTS["nanochat"], {}),
    "kolibri": (TEXTS["kolibri, 2 of 5 and shared"], {}),
    "flint": (TEXTS["flint, 2 of 5 and shared"], {}),
    "hy v3": (TEXTS["hy v3, 3 of 5 and shared"], {}),
    "phimoe": (TEXTS["phimoe, 2 of 5"], {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "gpt2": (TEXTS["gpt2"], {"fan_in_fan_out": True}),
    "gpt2, untied": (TEXTS["gpt2, exact gelu, untied"], {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gemma3": (Gemma3TextConfig(**SMALL | {"sliding_window": 20, "query_pre_attn_scalar": 17}), {}),
    "qwen3, the head": (Qwen3Config(**SMALL), {"target_modules": ["lm_head", "down_proj"]}),
    "qwen3-moe, attention": (
        Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
        {"target_modules": [*QUERY_AND_VALUE, "o_proj"]},
    ),
}


def trained(config: Any, folder: Path, seed: int = 1, base: Any = None, **settings: Any) -> PeftModel:
    """A random model and a random adapter of it, saved there, both of whose sides matter."""
    from peft import LoraConfig, get_peft_model  # takes seconds, in each process that collects this file

    wanted = {"r": 4, "lora_alpha": 7, "target_modules": "all-linear", "init_lora_weights": False} | settings
    torch.manual_seed(seed)
    model = get_peft_model(base or random_model(config), LoraConfig(task_type="CAUSAL_LM", **wanted)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


def logits_with(folder: Path, *lora: Any, vocab_size: int = SMALL["vocab_size"], **settings: Any) -> torch.Tensor:
    return logits_of(worker_for(folder, lora=lora, **settings), prompts(vocab_size))


@pytest.mark.parametrize("case", CASES)
def test_equal_to_peft(case: str, tmp_path: Path) -> None:
    config, settings = CASES[case]
    save(random_model(config), tmp_path / "base")
    model = trained(config, tmp_path / "adapter", **settings)
    actual = logits_with(tmp_path / "base", str(tmp_path / "adapter"))
    assert difference(actual, expected_logits(model, prompts(config.vocab_size))) < 1e-4
    assert difference(actual, expected_logits(random_model(config), prompts(config.vocab_size))) > 0.01


@pytest.mark.parametrize("case", ["pythia", "gpt2"])
def test_a_folder_of_pefts_fits_a_file_whose_rows_lie_otherwise(case: str, tmp_path: Path) -> None:
    """Than those of the folder that it was trained on."""
    arch, config, add = FILES[case]
    model = trained(config, tmp_path / "adapter", fan_in_fan_out=case == "gpt2")
    actual = logits_with(write(tmp_path / "m.gguf", arch, random_model(config), add), str(tmp_path / "adapter"))
    assert difference(actual, expected_logits(model, prompts(config.vocab_size))) < 1e-4


def test_of_a_glm_with_the_code_that_it_was_first_published_with(tmp_path: Path) -> None:
    """Added by hand, to a file that has q, k and v as one."""
    arch, config, add = FILES["glm"]
    base, model, draw = random_model(config), random_model(config), torch.Generator().manual_seed(1)
    sides = {}
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        changed = {
            "self_attention.query_key_value": [attention.q_proj, attention.k_proj, attention.v_proj],
            "self_attention.dense": [attention.o_proj], "mlp.dense_h_to_4h": [layer.mlp.gate_up_proj],
            "mlp.dense_4h_to_h": [layer.mlp.down_proj],
        }  # fmt: skip
        for name, parts in changed.items():
            rows = [part.weight.shape[0] for part in parts]
            up, down = (0.2 * torch.randn(*shape, generator=draw) for shape in ((sum(rows), 4), (4, parts[0].weight.shape[1])))
            for part, added in zip(parts, (up.double() @ down.double() * 7 / 4).split(rows), strict=True):
                part.weight.data = (part.weight.double() + added).float()
            place = f"base_model.model.transformer.encoder.layers.{i}.{name}"
            sides |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 7, "target_modules": ["query_key_value"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(sides, tmp_path / "adapter_model.safetensors")
    file = fused(write(tmp_path / "whole.gguf", arch, base, add), tmp_path / "m.gguf", arch)
    actual = logits_with(file, str(tmp_path))
    assert difference(actual, expected_logits(model, prompts(config.vocab_size))) < 1e-4


# ---- quantized weights ----


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A Llama, whose files have the rows of a rotary pair side by side, as GGUF of a type."""
    folder = tmp_path_factory.mktemp("blocks")
    plain = write(folder / "f32.gguf", "llama", random_model(LlamaConfig(**EVEN)), nothing)

    def of(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            with open_checkpoint(plain) as source:
                convert.write(source, convert.plan(source, "gguf", kind), path)
        return path

    return of


def rounded(kind: str, config: Any = None) -> Any:
    """The same Llama, or another model, with each matrix rounded by a type of GGUF's."""
    model, form = random_model(config or LlamaConfig(**EVEN)), Blocks(kind)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = form.dequantize(form.quantize(parameter.data))
    return model


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("targets", ["all-linear", list(QUERY_AND_VALUE), ["up_proj", "down_proj"]], ids=str)
def test_beside_the_blocks_of_a_gguf_file(kind: str, targets: Any, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    base = random_model(LlamaConfig(**EVEN)) if kind == "f32" else rounded(kind.upper())
    model = trained(LlamaConfig(**EVEN), tmp_path, base=base, target_modules=targets)
    actual = logits_with(blocks(kind), str(tmp_path), dtype="float32")
    assert difference(actual, expected_logits(model, prompts(EVEN["vocab_size"]))) < 1e-4


@pytest.mark.parametrize("case", ["gemma4, keys are values", "granite 4 h"])
def test_beside_blocks_whose_rows_lie_otherwise_in_a_layer(case: str, tmp_path: Path) -> None:
    even = {"hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 96, "mamba_n_heads": 4, "head_dim": 16}
    even |= {"global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    values = {name: value for name, value in FILES[case][1].to_dict().items() if name not in ("per_layer_config", "mamba_d_head")}
    config = type(FILES[case][1])(**values | {name: value for name, value in even.items() if name in values or "dim" in name})
    plain = write(tmp_path / "f32.gguf", FILES[case][0], random_model(config), FILES[case][2])
    with open_checkpoint(plain) as source:
        convert.write(source, convert.plan(source, "gguf", "q8_0"), tmp_path / "m.gguf")
    base = random_model(config)
    form = Blocks("Q8_0")
    for parameter in base.parameters():
        if parameter.dim() == 2:
            parameter.data = form.dequantize(form.quantize(parameter.data))
    model = trained(config, tmp_path / "adapter", base=base, target_modules=MIXED)
    actual = logits_with(tmp_path / "m.gguf", str(tmp_path / "adapter"), dtype="float32", activations="exact")
    assert difference(actual, expected_logits(model, prompts(config.vocab_size))) < 1e-4


def adapter_writer(path: Path, arch: str, alpha: float) -> Any:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    return writer


def closed(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapter_file(path: Path, folder: Path, arch: str, config: Any, *, pairs: bool, alpha: float) -> Path:
    """PEFT's adapter as llama.cpp's converter writes it: names by the gguf package, up's rows in the order of the weight's."""
    writer = adapter_writer(path, arch, alpha)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for key, values in load_file(folder / "adapter_model.safetensors").items():
        module, _, side = key.removeprefix("base_model.model.").removesuffix(".weight").partition(".lora_")
        name = names.get_name(module)
        numbers = values.numpy()
        if pairs and side == "B" and name.endswith(("attn_q", "attn_k")):
            halves = numbers.reshape(-1, 2, config.head_dim // 2, numbers.shape[1])
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
        writer.add_tensor(f"{name}.weight.lora_{side.lower()}", numbers)
    return closed(writer, path)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_an_adapter_of_llama_cpp_is_the_same(kind: str, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    """On a GGUF file and on a folder, and an adapter of PEFT's on both: four ways to one model."""
    config = LlamaConfig(**EVEN)
    trained(config, tmp_path / "peft")
    file = adapter_file(tmp_path / "lora.gguf", tmp_path / "peft", "llama", config, pairs=True, alpha=7)
    assert difference(logits_with(blocks(kind), str(file)), logits_with(blocks(kind), str(tmp_path / "peft"))) < 1e-6
    if kind == "f32":
        save(random_model(config), tmp_path / "base")
        on_a_folder = [logits_with(tmp_path / "base", str(adapter)) for adapter in (file, tmp_path / "peft")]
        assert difference(*on_a_folder) < 1e-6
        assert difference(on_a_folder[0], logits_with(blocks(kind), str(file))) < 1e-5


@pytest.mark.parametrize(("kind", "relative"), [("f32", 1e-3), ("q8_0", 0.02)])
def test_llama_cpp_computes_the_same(kind: str, relative: float, tmp_path: Path) -> None:
    """On the bundled model, as llama.cpp wants a tokenizer."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = tmp_path / "tiny.gguf"
    with convert.open_source(resolve("tiny").path) as source:
        convert.write(source, convert.plan(source, "gguf", kind), path)
    with open_checkpoint(path) as checkpoint:
        arch = checkpoint.config["general.architecture"]
        shapes = {name: checkpoint.info(name).shape for name in checkpoint.names() if name.startswith("blk.")}
    writer = adapter_writer(tmp_path / "lora.gguf", arch, alpha=5)
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 2:
            for side, dims in (("a", (3, shape[1])), ("b", (shape[0], 3))):
                writer.add_tensor(f"{name}.lora_{side}", (0.1 * draw.standard_normal(dims)).astype(np.float32))
    file = closed(writer, tmp_path / "lora.gguf")
    ids = list(range(100, 160))
    plain = logits_of(worker_for(path, dtype="float32"), [ids])
    for scale in (1.0, 0.5):
        peer = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False, lora_path=str(file), lora_scale=scale)
        peer.eval(ids)
        expected = torch.from_numpy(np.array(peer.scores[: len(ids)]))
        actual = logits_of(worker_for(path, lora=[(str(file), scale)], dtype="float32"), [ids])
        assert difference(actual, expected) < relative
        assert difference(actual, plain) > 5 * relative, "the adapter matters"


# ---- what is asked of one, and of several ----


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, and two adapters of it, `one` and `two`."""
    folder = tmp_path_factory.mktemp("qwen")
    save(random_model(Qwen3Config(**EVEN)), folder / "base")
    for seed, name in enumerate(("one", "two"), 1):
        trained(Qwen3Config(**EVEN), folder / name, seed)
    return folder


def adapted_by_hand(folder: Path, *lora: tuple[str, float], base: Any = None) -> Any:
    """The model with each adapter's product added, by the formula, in float64."""
    model = base or random_model(Qwen3Config(**EVEN))
    weights = dict(model.named_parameters())
    for name, scale in lora:
        sides = load_file(folder / name / "adapter_model.safetensors")
        for key in [key for key in sides if "lora_A" in key]:
            added = sides[key.replace("lora_A", "lora_B")].double() @ sides[key].double()
            weight = weights[key.removeprefix("base_model.model.").replace(".lora_A", "")]
            weight.data = (weight.data.double() + scale * 7 / 4 * added).float()
    return model


def test_several_with_scales_of_their_own(qwen: Path) -> None:
    lora = (("one", 0.5), ("two", -1.25), ("one", 1.0))
    actual = logits_with(qwen / "base", *((str(qwen / name), scale) for name, scale in lora))
    assert difference(actual, expected_logits(adapted_by_hand(qwen, *lora), prompts(EVEN["vocab_size"]))) < 1e-4


def test_several_beside_the_same_weights(blocks: Callable[[str], Path], tmp_path: Path) -> None:
    for seed, targets in ((1, "all-linear"), (2, list(QUERY_AND_VALUE))):
        trained(LlamaConfig(**EVEN), tmp_path / str(seed), seed, target_modules=targets)
    lora = (("1", 0.5), ("2", -2.0))
    actual = logits_with(blocks("q8_0"), *((str(tmp_path / name), scale) for name, scale in lora), dtype="float32")
    expected = adapted_by_hand(tmp_path, *lora, base=rounded("Q8_0"))
    assert difference(actual, expected_logits(expected, prompts(EVEN["vocab_size"]))) < 1e-4


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_one_of_scale_0_changes_no_bit(kind: str, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    trained(LlamaConfig(**EVEN), tmp_path)
    assert torch.equal(logits_with(blocks(kind), (str(tmp_path), 0), dtype="float32"), logits_with(blocks(kind), dtype="float32"))


def test_it_is_added_before_weights_are_rounded(qwen: Path) -> None:
    """Steps of int4 are wider than what it adds: beside rounded weights it would count in full, and rounded into them hardly."""
    actual = logits_with(qwen / "base", str(qwen / "one"), quant="int8", dtype="float32")
    expected = dequantized(adapted_by_hand(qwen, ("one", 1.0)), "int8")
    assert difference(actual, expected_logits(expected, prompts(EVEN["vocab_size"]))) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_the_batch(dtype: str, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    """Recorded steps too, which are all after the first."""
    trained(LlamaConfig(**EVEN), tmp_path)
    requests = [(ids, greedy(20)) for ids in prompts(EVEN["vocab_size"])]
    worker = worker_for(blocks("q4_0"), lora=(str(tmp_path),), dtype=dtype)
    assert worker.model.blocks[0].mixer.qkv.weight.recordable

    def answers(*groups: Any) -> list[Any]:
        return [output.outputs[0].token_ids for group in groups for output in run(engine_for(worker), list(group))]

    assert answers(requests) == answers(*([request] for request in requests))


def test_a_bias_is_added_once(tmp_path: Path) -> None:
    config = Qwen2Config(**EVEN)
    write(tmp_path / "f32.gguf", "qwen2", random_model(config), nothing)
    with open_checkpoint(tmp_path / "f32.gguf") as source:
        convert.write(source, convert.plan(source, "gguf", "q8_0"), tmp_path / "q8.gguf")
    model = trained(config, tmp_path / "adapter", base=rounded("Q8_0", config))
    actual = logits_with(tmp_path / "q8.gguf", str(tmp_path / "adapter"), dtype="float32")
    assert difference(actual, expected_logits(model, prompts(config.vocab_size))) < 1e-4


def test_memory_is_counted(blocks: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 4 for each of q, k and v, and for gate and up; the first matrices are padded to 16 ranks, in float32."""
    trained(LlamaConfig(**EVEN), tmp_path)
    with_it, without = (worker_for(blocks("q8_0"), lora=lora, dtype="float32") for lora in ((str(tmp_path),), ()))
    first, second = 16 * (3 * 64 + 96), 4 * (4 * 64 + 2 * 96)
    assert with_it.weight_bytes > without.weight_bytes + 3 * 4 * (first + second)


@needs_emulation
def test_on_a_gpu(tmp_path: Path) -> None:
    """Beside quantized weights of several types and added to plain ones; recorded, and with every kernel compiled beforehand."""
    path, adapter = tmp_path / "model.gguf", tmp_path / "adapter"
    write_gguf(path, random_model(Qwen3Config(**SHAPE)), ["Q4_0", "Q8_0", "F16"])
    trained(Qwen3Config(**SHAPE), adapter)
    lora = (str(adapter),)
    few, many = [[3, 4, 5]], [[3, 4, 5], [7], list(range(20, 41))]
    on_gpu = worker_on(path, EmulatedDevice(), lora=lora)
    on_cpu, plain = (worker_for(path, lora=each, dtype="float32", num_blocks=16) for each in (lora, ()))
    for tokens in (few, many):
        expected = logits_of(on_cpu, tokens)
        assert difference(logits_of(on_gpu, tokens), expected) < 0.07
        assert difference(logits_of(plain, tokens), expected) > 0.2
    device = EmulatedDevice()
    answers = [
        [output.outputs[0].token_ids for output in run(engine, [(prompt, greedy(5)) for prompt in many])]
        for engine in (engine_on(path, device, lora=lora), engine_on(path, EmulatedDevice(), lora=lora, eager=True))
    ]
    assert device.graphs
    assert answers[0] == answers[1]
    assert kernels_not_rehearsed(path, lora=lora) == set()


def test_the_part_that_writes_of_a_model_that_sees(tmp_path: Path) -> None:
    """PEFT names a weight by where it lies in the whole model."""
    text = SMALL | {"sliding_window": 20, "query_pre_attn_scalar": 17}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    save(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "base")
    trained(Gemma3TextConfig(**text), tmp_path / "text")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "adapter_config.json").write_bytes((tmp_path / "text" / "adapter_config.json").read_bytes())
    sides = load_file(tmp_path / "text" / "adapter_model.safetensors")
    for place in ("model.language_model.", "language_model.model."):
        renamed = {name.replace("base_model.model.model.", f"base_model.model.{place}", 1): side for name, side in sides.items()}
        save_file(renamed, tmp_path / "whole" / "adapter_model.safetensors")
        actual, expected = (logits_with(tmp_path / "base", str(tmp_path / name)) for name in ("whole", "text"))
        assert torch.equal(actual, expected)


def test_keys_that_were_kept_are_not_those_of_another_adapter(qwen: Path, tmp_path: Path) -> None:
    kinds = [
        worker_for(qwen / "base", lora=lora).cache_kind
        for lora in ((), (str(qwen / "one"),), ((str(qwen / "one"), 0.5),), (str(qwen / "two"),))
    ]
    stronger = changed(qwen / "one", tmp_path / "x", {}, lambda sides: None)
    for alpha in (7, 70):
        config = json.loads((stronger / "adapter_config.json").read_text())
        (stronger / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
        kinds.append(worker_for(qwen / "base", lora=(str(stronger),)).cache_kind)
    assert len({json.dumps(kind) for kind in kinds}) == 6


# ---- writing it into a model ----


@pytest.mark.parametrize("config", [Qwen3Config(**EVEN), Lfm2Config(**EVEN, full_attn_idxs=[1])], ids=["qwen3", "lfm2"])
def test_merged_as_peft_merges(config: Any, tmp_path: Path) -> None:
    save(random_model(config), tmp_path / "base")
    expected = trained(config, tmp_path / "one").merge_and_unload().state_dict()
    with open_checkpoint(tmp_path / "base") as base:
        adapted = merged(base, [Lora(str(tmp_path / "one"))])
        assert set(adapted.names()) == set(expected)
        for name in adapted.names():
            assert difference(adapted.tensor(name), expected[name]) < 1e-6
            assert torch.equal(adapted.tensor(name, (3, 17)), adapted.tensor(name)[3:17])
            assert adapted.raw(name).flatten().tolist() == adapted.tensor(name).contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("target", ["hf", "gguf"])
def test_what_convert_writes_is_the_model_with_it(target: str, tiny: Path, tmp_path: Path) -> None:
    """In both formats, from the bundled model's bfloat16, to which it is rounded once."""
    bundled, adapter = resolve("tiny").path, tiny / "adapter"
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    done = driven(tmp_path, "convert", "tiny", "--to", target, "-o", str(out), "--lora", str(adapter))
    assert done.code == 0, done.err
    ids = [list(range(100, 150))]
    written, at_once, plain = (
        logits_of(worker_for(path, lora=lora, dtype="bfloat16"), ids)
        for path, lora in ((out, ()), (bundled, (str(adapter),)), (bundled, ()))
    )
    assert torch.equal(written, at_once)
    assert difference(plain, at_once) > 0.05


@pytest.mark.parametrize(("outtype", "error"), [("f32", 1e-6), ("f16", 2**-11), ("bf16", 2**-8), ("auto", 2**-8)])
def test_the_sum_is_rounded_once_to_what_is_written(outtype: str, error: float, tiny: Path, tmp_path: Path) -> None:
    """Of a bfloat16 model a float32 file has more than bfloat16's numbers where an adapter was added."""
    out, name = tmp_path / "out", "model.layers.1.mlp.down_proj.weight"
    args = ("--to", "hf", "--outtype", outtype, "-o", str(out), "--lora", str(tiny / "adapter"), "--json")
    done = driven(tmp_path, "convert", "tiny", *args)
    assert done.code == 0, done.err
    sides = load_file(tiny / "adapter" / "adapter_model.safetensors")
    down, up = (sides[f"base_model.model.{name.replace('weight', side)}.weight"].double() for side in ("lora_A", "lora_B"))
    with open_checkpoint(resolve("tiny").path) as base, open_checkpoint(out) as written:
        expected = base.tensor(name).double() + up @ down
        found, stored = written.tensor(name), base.info(name)
    assert found.dtype == {"f32": torch.float32, "f16": torch.float16}.get(outtype, torch.bfloat16)
    assert bool(((found.double() - expected).abs() <= error * expected.abs() + 1e-7).all())
    matrices = next(row for row in json.loads(done.out)["tensors"] if stored.dtype_name in row["from"])
    assert "F32" not in matrices["from"]


def test_it_is_not_written_into_blocks(blocks: Callable[[str], Path], tmp_path: Path) -> None:
    trained(LlamaConfig(**EVEN), tmp_path)
    with open_checkpoint(blocks("q8_0")) as base, pytest.raises(UnsupportedError, match="rounded away"):
        merged(base, [Lora(str(tmp_path))])


def test_alphas_are_those_of_peft_whatever_the_patterns(tmp_path: Path) -> None:
    """A dot in a pattern is any character, and the first pattern that means a module counts."""
    from peft.utils.other import get_pattern_key

    places = [f"{i}.{part}" for i in (1, 11) for part in ("self_attn.q_proj", "mlp.up_proj")]
    modules = ["lm_head", *(f"model.{inner}layers.{place}" for inner in ("", "language_model.") for place in places)]
    patterns = [
        "q_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "1.self_attn.q_proj", "proj", "^", "", "q^proj", "^q_proj",
        "^model.layers.1.self_attn.q_proj", "model.layers.1", "lm_head", "^lm_head", "^lm.head", ".q_proj", "q.proj", "q_pro.",
        "m.p.up_proj", "...11.mlp.up_proj", "layers.1..mlp.up_proj",
    ]  # fmt: skip
    sides = {f"base_model.model.{name}.lora_{side}.weight": torch.ones(1, 1) for name in modules for side in "AB"}
    save_file(sides, tmp_path / "adapter_model.safetensors")
    random = np.random.default_rng(0)
    for some in [[pattern] for pattern in patterns] + [list(random.choice(patterns, 3, replace=False)) for _ in range(50)]:
        alphas = {str(pattern): 10 + place for place, pattern in enumerate(some)}
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 5, "alpha_pattern": alphas}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        found = {name: added.scale for name, added in open_adapter(tmp_path, 1.0).weights.items()}
        assert found == {f"{name}.weight": alphas.get(get_pattern_key(list(alphas), name), 5) for name in modules}, some


# ---- what is refused ----


def changed(source: Path, folder: Path, settings: dict[str, Any], tensors: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of an adapter with other settings (None takes one out) and other tensors."""
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    sides = load_file(source / "adapter_model.safetensors")
    tensors(sides)
    save_file(sides, folder / "adapter_model.safetensors")
    return folder


Q = "base_model.model.model.layers.1.self_attn.q_proj"
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "of the kind 'LOHA'"),
    "no kind": ({"peft_type": None}, "no 'peft_type'"),
    "DoRA": ({"use_dora": True}, "use_dora is set"),
    "a switch of tomorrow": ({"use_something": True}, "use_something is set"),
    "turned": ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
    "biases": ({"bias": "all"}, r"biases of the base model are changed too \('all'\)"),
    "parts trained whole": ({"modules_to_save": ["norm"]}, "modules_to_save is set"),
    "parameters of experts": ({"target_parameters": ["experts.down_proj"]}, "target_parameters is set"),
    "from certain tokens on": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is set"),
    "another base, in other letters": ({"init_lora_weights": "OLoRA"}, "changes the base model"),
    "a variant": ({"arrow_config": {"top_k": 3}}, "arrow_config is set"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    "an alpha that is none": ({"lora_alpha": "7"}, "'lora_alpha' must be a number"),
    "a huge alpha": ({"lora_alpha": 1e30}, "'lora_alpha' must be a number"),
    "patterns that are none": ({"alpha_pattern": [1]}, "'alpha_pattern' must be an object"),
    "an expression that never ends": ({"alpha_pattern": {"(a+)+$": 3}}, "the pattern"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_mean_something_else(case: str, qwen: Path, tmp_path: Path) -> None:
    settings, told = SETTINGS[case]
    folder = changed(qwen / "one", tmp_path / "x", settings, lambda sides: None)
    with pytest.raises((UnsupportedError, CheckpointError), match=told):
        logits_with(qwen / "base", str(folder))


def put(name: str, *shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Any]], None]:
    return lambda sides: sides.__setitem__(name, torch.full(shape, value).to(dtype))


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "one side": (lambda sides: sides.__delitem__(f"{Q}.lora_A.weight"), "one side only"),
    "none": (lambda sides: sides.clear(), "no side of a LoRA"),
    "sides of other ranks": (put(f"{Q}.lora_A.weight", 5, 64), "don't fit"),
    "rows of another model": (put(f"{Q}.lora_B.weight", 65, 4), r"\[65, 64\], and in the model \[64, 64\]"),
    "columns of another model": (put(f"{Q}.lora_A.weight", 4, 72), r"\[64, 72\], and in the model \[64, 64\]"),
    "a rank of 0": (
        lambda sides: sides.update({f"{Q}.lora_A.weight": torch.zeros(0, 64), f"{Q}.lora_B.weight": torch.zeros(64, 0)}), "rank 0"
    ),
    "a rank of 10,000": (
        lambda sides: sides.update({f"{Q}.lora_A.weight": torch.zeros(10000, 1), f"{Q}.lora_B.weight": torch.zeros(1, 10000)}),
        "rank 10000",
    ),
    "a vector": (put(f"{Q}.lora_A.weight", 64), "not a matrix"),
    "NaN": (put(f"{Q}.lora_A.weight", 4, 64, value=float("nan")), "NaN or infinite"),
    "whole numbers": (put(f"{Q}.lora_A.weight", 4, 64, dtype=torch.int32), "torch.int32"),
    "eight bits": (put(f"{Q}.lora_A.weight", 4, 64, dtype=torch.float8_e4m3fn), "float8"),
    "magnitudes": (put(f"{Q}.lora_magnitude_vector", 64), "no side of a LoRA"),
    "a bias": (put("base_model.model.model.layers.1.self_attn.q_proj.bias", 64), "no side of a LoRA"),
    "a side twice": (put(f"{Q}.lora_A.default.weight", 4, 64), "there twice"),
    "a weight by two names": (
        lambda sides: sides.update(
            {name.replace("base_model.model.", "base_model.model.language_model."): side.clone() for name, side in sides.items()}
        ),
        "there twice",
    ),
    "a whole weight twice": (
        lambda sides: sides.update({f"base_model.model.lm_head{x}.weight": torch.ones(1) for x in ("", ".base_layer")}),
        "there twice",
    ),
    "an embedding as if it were a matrix": (
        lambda sides: sides.update({
            "base_model.model.model.embed_tokens.lora_A.weight": torch.ones(1, 64),
            "base_model.model.model.embed_tokens.lora_B.weight": torch.ones(513, 1),
        }),
        "an adapter of the embedding",
    ),
    "an embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 513), "no side of a LoRA"),
    "a weight of its own": (put("base_model.model.lm_head.weight", 513, 64), "another lm_head.weight"),
    "a weight that is not in the model": (put("base_model.model.score.weight", 2, 64), "another score.weight"),
    "a layer too many": (
        lambda sides: sides.update({name.replace("layers.1.", "layers.7."): side.clone() for name, side in sides.items()}),
        r"no such weights in .*layers\.7\.",
    ),
    "a norm": (
        lambda sides: sides.update({f"base_model.model.model.norm.lora_{x}.weight": torch.ones(1, 1) for x in "AB"}),
        "no such weights",
    ),
    "what overflows times nothing": (
        lambda sides: sides.update({f"{Q}.lora_A.weight": torch.zeros(4, 64), f"{Q}.lora_B.weight": torch.full((64, 4), 3e38)}),
        "cannot hold",
    ),
    "what overflows": (put(f"{Q}.lora_B.weight", 64, 4, value=3e38), "cannot hold"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_what_they_should_be(case: str, qwen: Path, tmp_path: Path) -> None:
    change, told = TENSORS[case]
    folder = changed(qwen / "one", tmp_path / "x", {}, change)
    with pytest.raises(NanovllmError, match=told):
        logits_with(qwen / "base", str(folder))


def test_files_that_are_not_adapters(qwen: Path, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "adapter_model.safetensors").write_bytes((qwen / "one" / "adapter_model.safetensors").read_bytes())
    (tmp_path / "two").mkdir()
    for name in "ab":
        (tmp_path / "two" / f"{name}.gguf").write_bytes(b"GGUF")
    (tmp_path / "x.txt").write_text("x")
    writer = adapter_writer(tmp_path / "other.gguf", "gemma3", 1)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((1, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((64, 1), np.float32))
    closed(writer, tmp_path / "other.gguf")
    writer = adapter_writer(tmp_path / "embedding.gguf", "llama", 1)
    writer.add_tensor("token_embd.weight.lora_a", np.ones((513, 1), np.float32))
    writer.add_tensor("token_embd.weight.lora_b", np.ones((64, 1), np.float32))
    closed(writer, tmp_path / "embedding.gguf")
    writer = adapter_writer(tmp_path / "experts.gguf", "llama", 1)
    writer.add_tensor("blk.0.ffn_up_exps.weight.lora_a", np.ones((2, 1, 64), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight.lora_b", np.ones((2, 64, 1), np.float32))
    closed(writer, tmp_path / "experts.gguf")
    for path, kind, told in (
        (tmp_path / "none", ModelNotFoundError, "no such file"), (tmp_path / "pickle", UnsupportedError, "pickled"),
        (tmp_path / "bare", UnsupportedError, "no adapter_config.json"),
        (tmp_path / "bare" / "adapter_model.safetensors", CheckpointError, "no adapter_config.json beside it"),
        (tmp_path / "two", UsageError, "has several GGUF files: a.gguf, b.gguf"),
        (tmp_path, UsageError, "several GGUF files"), (tmp_path / "x.txt", UnsupportedError, "not an adapter's file"),
        (blocks("q8_0"), UnsupportedError, "a model, not an adapter"), (tmp_path / "other.gguf", UsageError, "of gemma3 models"),
        (tmp_path / "experts.gguf", UnsupportedError, "not a matrix"),
        (tmp_path / "embedding.gguf", UnsupportedError, "an adapter of the embedding"),
    ):  # fmt: skip
        with pytest.raises(kind, match=told):
            logits_with(blocks("f32"), str(path))
    with pytest.raises(UsageError, match=r"of gemma3 models, and .* is qwen3"):
        logits_with(qwen / "base", str(tmp_path / "other.gguf"))


@pytest.mark.parametrize("value", [1e20, 3e38])
def test_what_overflows_beside_quantized_weights(value: float, blocks: Callable[[str], Path], tmp_path: Path) -> None:
    trained(LlamaConfig(**EVEN), tmp_path / "a")
    folder = changed(tmp_path / "a", tmp_path / "x", {}, lambda sides: [side.fill_(value) for side in sides.values()])
    with pytest.raises(CheckpointError, match=r"an adapter of .* cannot hold"):
        logits_with(blocks("q8_0"), str(folder))


def test_an_adapter_with_a_hundred_thousand_patterns(qwen: Path, tmp_path: Path) -> None:
    """Each is looked at once: for each weight it would take minutes."""
    folder = changed(qwen / "one", tmp_path / "x", {"alpha_pattern": {f"x{i}": 1 for i in range(100_000)}}, lambda sides: None)
    assert torch.equal(logits_with(qwen / "base", str(folder)), logits_with(qwen / "base", str(qwen / "one")))


def test_on_a_gguf_file_of_mixtral_whose_family_there_is_llama(tmp_path: Path) -> None:
    config = MixtralConfig(**EVEN, num_local_experts=4, num_experts_per_tok=2)
    save(random_model(config), tmp_path / "base")
    write_experts(tmp_path / "m.gguf", random_model(config), ["F32"])
    trained(config, tmp_path / "adapter", target_modules=[*QUERY_AND_VALUE, "o_proj"])
    both = [logits_with(tmp_path / name, str(tmp_path / "adapter"), dtype="float32") for name in ("base", "m.gguf")]
    assert difference(*both) < 1e-5


def test_of_a_head_that_is_quantized(blocks: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT saves the head with it, which the model has only rounded."""
    model = trained(LlamaConfig(**EVEN), tmp_path / "a", base=rounded("Q8_0"), target_modules=["lm_head", "q_proj"])
    actual = logits_with(blocks("q8_0"), str(tmp_path / "a"), dtype="float32")
    assert difference(actual, expected_logits(model, prompts(EVEN["vocab_size"]))) < 1e-4
    other = changed(tmp_path / "a", tmp_path / "x", {}, lambda sides: sides["base_model.model.lm_head.base_layer.weight"].neg_())
    with pytest.raises(UnsupportedError, match="another lm_head"):
        logits_with(blocks("q8_0"), str(other))


def test_experts_that_are_quantized(tmp_path: Path) -> None:
    """Plain ones are changed like any weight; to quantized ones nothing can be added beside."""
    config = Qwen3MoeConfig(**EVEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    save(random_model(config), tmp_path / "base")
    sides = {}
    for part, (rows, width) in (("gate_proj", (32, 64)), ("down_proj", (64, 32))):
        place = f"base_model.model.model.layers.1.mlp.experts.2.{part}"
        sides |= {f"{place}.lora_A.weight": torch.randn(2, width), f"{place}.lora_B.weight": torch.randn(rows, 2)}
    (tmp_path / "adapter").mkdir()
    save_file(sides, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2}))
    lora = (str(tmp_path / "adapter"),)
    assert difference(logits_with(tmp_path / "base"), logits_with(tmp_path / "base", *lora)) > 0.01
    write_experts(tmp_path / "experts.gguf", random_model(config), ["Q8_0"])
    with pytest.raises(UnsupportedError, match="an adapter of quantized experts"):
        logits_with(tmp_path / "experts.gguf", *lora)


@pytest.mark.parametrize("lora", [3, [3], ["a", ""], [("a", "b")], [("a", True)], [("a", math.nan)], [("a", math.inf)], [None]])
def test_configs_that_name_none(lora: Any) -> None:
    with pytest.raises(UsageError, match="lora"):
        EngineConfig(lora=lora)


def test_configs_that_do() -> None:
    assert EngineConfig(lora="a").lora == (Lora("a", 1.0),)  # type: ignore[arg-type]
    assert EngineConfig(lora=["a", ("b", 2)]).lora == (Lora("a"), Lora("b", 2.0))  # type: ignore[arg-type]


def test_one_that_may_not_be_read(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr("nanovllm_cli.weights.adapter._open", refuse)
    with pytest.raises(AccessRefusedError):
        logits_with(qwen / "base", str(qwen / "one"))


# ---- by name, and from the command line ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of the bundled model, `adapter`."""
    folder = tmp_path_factory.mktemp("tiny")
    write_adapter(folder / "adapter")
    return folder


def test_run_says_what_the_library_says(tiny: Path) -> None:
    prompt, params = "Once upon a time", SamplingParams(temperature=0, max_tokens=24)
    said = {}
    for scale in (0.0, 0.5, 1.0):
        with LLM("tiny", config=EngineConfig(lora=((str(tiny / "adapter"), scale),), max_model_len=256)) as llm:  # type: ignore[arg-type]
            said[scale] = llm.generate(prompt, params)[0].outputs[0].text
    assert len(set(said.values())) == 3, "each scale matters"
    for flags, scale in ((["--lora", "adapter"], 1.0), (["--lora-scaled", "adapter:0.5"], 0.5)):
        done = real(tiny, "run", "tiny", "--raw", "--temp", "0", "-n", "24", prompt, *flags)
        assert (done.returncode, done.stdout.rstrip("\n")) == (0, said[scale].rstrip("\n")), done.stderr
        assert "with the adapter adapter" in done.stderr
        assert ("times 0.5" in done.stderr) == (scale == 0.5)


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["run", "tiny", "--lora", "nothere", "x"], 3, "no adapter nothere"),
        (["run", "tiny", "--lora", "org/none", "--offline", "x"], 3, "org/none is not in the cache"),
        (["run", "tiny", "--lora-scaled", "adapter", "x"], 2, "'adapter' is not an adapter with its scale"),
        (["run", "tiny", "--lora-scaled", "adapter:nan", "x"], 2, "is not an adapter with its scale"),
        (["run", "tiny", "--lora-scaled", ":2", "x"], 2, "is not an adapter with its scale"),
        (["run", "tiny", "--adapter-path", "adapter", "x"], 2, "here it is --lora"),
        (["chat", "tiny", "--lora-modules", "a=adapter"], 2, "did you mean --lora"),
        (["run", "--url", "http://127.0.0.1:1", "--lora", "adapter", "x"], 2, "--lora has no meaning with --url"),
        (["serve", "tiny", "tiny", "--alias", "a,b", "--lora", "adapter"], 2, "--lora has no meaning with several models"),
        (["convert", "tiny", "--lora", "adapter", "--to", "hf", "-o", "adapter", "--force"], 2, "is an adapter that is read"),
        (["run", "tiny", "--lora", "adapter,nothere", "x"], 3, "no adapter nothere"),
        (["run", "tiny", "--lora-scaled", "adapter:1,b", "x"], 2, "'b' is not an adapter with its scale"),
        (["convert", "tiny", "--lora", "nothere"], 3, "no adapter nothere"),
    ],
)  # fmt: skip
def test_what_a_command_says(args: list[str], code: int, told: str, tiny: Path) -> None:
    done = driven(tiny, *args)
    assert (done.code, done.out) == (code, ""), done.err
    assert told in done.err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["run", "tiny", "--lora", ".", "x"], "no adapter_model.safetensors in it"),
        (["run", "adapter", "x"], "name its base model first, and then --lora adapter"),
    ],
)
def test_what_a_command_says_of_files(args: list[str], told: str, tiny: Path) -> None:
    done = real(tiny, *args)
    assert (done.returncode, done.stdout) == (6, ""), done.stderr
    assert told in done.stderr


def test_a_run_goes_on_with_it(tiny: Path) -> None:
    """Where it was is kept, not how it was called."""
    room = ["-c", "8000"]
    first = driven(tiny, "run", "tiny", "config", "--lora-scaled", "adapter:0.5,adapter:2", *room)
    again = driven(tiny, "run", "--continue", "-p", "config", *room)
    assert [done.code for done in (first, again)] == [0, 0], again.err
    kept = [f"Lora(name={str(tiny / 'adapter')!r}, scale={scale})" for scale in (0.5, 2.0)]
    assert all(text in again.out for text in kept)
    new = driven(tiny, "run", "tiny", "--continue", "-p", "config", *room)
    assert "lora=()" in new.out, "whoever names a model names its adapters"


def test_a_project_does_not_say_which_files_are_read(tiny: Path, tmp_path: Path) -> None:
    for key in ("lora", "lora-scaled"):
        (tmp_path / "nanovllm.toml").write_text(f'[default]\n{key} = ["{tiny}/adapter:1"]\n')
        refused = driven(tmp_path, "run", "tiny", "hello")
        assert refused.code == 2
        assert key in refused.err
    (tmp_path / "nanovllm.toml").unlink()
    done = driven(tmp_path, "convert", "tiny", "--dry-run", NANOVLLM_LORA=str(tiny / "adapter"))
    assert (done.code, "adapter" in done.err) == (0, False)


def test_a_server_with_one(tiny: Path) -> None:
    """Behind HTTP it is the same model."""
    with LLM("tiny", config=EngineConfig(lora=(str(tiny / "adapter"),), max_model_len=256)) as llm:  # type: ignore[arg-type]
        expected = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
    with live_server("tiny", "--lora", str(tiny / "adapter"), "-c", "256") as server:
        status, answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0})
        assert (status, answer["choices"][0]["text"]) == (200, expected)


def test_one_on_the_hub_is_downloaded(tiny: Path, tmp_path: Path) -> None:
    """Its own files and no others, once; then it is there offline."""
    sides = {file.name: file.read_bytes() for file in (tiny / "adapter").iterdir()}
    repos = {
        "org/adapter": sides | {"README.md": b"read me", "tokenizer.json": b"{}"},
        "org/files": {"a.gguf": b"GGUFa", "b.gguf": b"GGUFb"},
        "org/model": {"config.json": b"{}", "model.safetensors": b"x"},
        "org/pickle": {"adapter_config.json": b"{}", "adapter_model.bin": b"x"},
    }
    with serving(repos) as hub:

        def convert_with(name: str, *more: str) -> Result:
            extra = environment(tmp_path / "hf", hub.url)
            extra = {key: extra[key] for key in extra if key.startswith(("HF_", "DO_NOT"))}
            return driven(tmp_path, "convert", "tiny", "--dry-run", "--lora", name, *more, **extra)

        done = convert_with("org/adapter")
        assert (done.code, hub.downloaded()) == (0, set(sides)), done.err
        hub.forget()
        assert convert_with("org/adapter", "--offline").code == 0
        assert convert_with("org/adapter@main").code == 0
        assert hub.downloaded() == set()
        for name, code, told in (
            ("org/files", 2, "several GGUF files: a.gguf, b.gguf"), ("org/files/b.gguf", 1, "b.gguf"),
            ("org/model", 6, "not an adapter"), ("org/pickle", 6, "pickled"), ("org/nothing", 3, "org/nothing"),
        ):  # fmt: skip
            done = convert_with(name)
            assert (done.code, told in done.err) == (code, True), done.err


def test_a_gguf_adapter_is_no_model(tmp_path: Path) -> None:
    writer = adapter_writer(tmp_path / "lora.gguf", "llama", 1)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((1, 64), np.float32))
    path = closed(writer, tmp_path / "lora.gguf")
    with pytest.raises(UnsupportedError, match="an adapter, not a model"):
        open_checkpoint(path)
