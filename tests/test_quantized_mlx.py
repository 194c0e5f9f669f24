"""MLX's folders: weights packed by hand from the description, vectors that MLX 0.32 gave, whole models in the names that mlx-lm
writes against transformers with the same weights, GGUF files made of them, and what is refused. Against MLX itself where it is
installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from engines import engine_for, greedy, random_model, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.quant.format import Affine, Blocks
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.quantized_weight import unpack
from quantized_checkpoints import (
    NAME,
    Made,
    Maker,
    Tensors,
    e4m3,
    e4m3_codes,
    module,
    open_quantized,
    packed,
    read_weight,
    small_slices,
)
from test_convert import SETTINGS, TINY
from test_quantized_models import EXPERTS, PROMPTS, SIZES, worst_difference

WEIGHT = f"{NAME}.weight"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP MX 1.0, section 5.3.3
BITS = (1, 2, 3, 4, 5, 6, 8)


def affine(bits: int, group: int = 64, dtype: torch.dtype = torch.bfloat16) -> Maker:
    """Scales of either sign."""

    def make(rows: int, columns: int, random: np.random.Generator) -> Made:
        codes = random.integers(0, 1 << bits, (rows, columns))
        size = 4 / (1 << bits) / columns**0.5
        scales = torch.from_numpy(random.uniform(0.5, 1, (rows, columns // group)) * random.choice([-1, 1], (rows, 1)) * size)
        scales = scales.to(dtype)
        biases = (scales.double() * -(1 << bits) / 2 * torch.from_numpy(random.uniform(0.8, 1, scales.shape))).to(dtype)
        words = torch.from_numpy(packed(codes.T, bits).T.copy()).view(torch.uint32)
        spread = [np.repeat(each.double().numpy(), group, 1) for each in (scales, biases)]
        return {"weight": words, "scales": scales, "biases": biases}, codes * spread[0] + spread[1]

    return make


def mxfp4(rows: int, columns: int, random: np.random.Generator) -> Made:
    codes = random.integers(0, 16, (rows, columns))
    scales = random.integers(118, 124, (rows, columns // 32)).astype(np.uint8)
    words = torch.from_numpy(packed(codes.T, 4).T.copy()).view(torch.uint32)
    return {"weight": words, "scales": torch.from_numpy(scales)}, FP4[codes] * np.repeat(2.0 ** (scales - 127.0), 32, 1)


def nvfp4(rows: int, columns: int, random: np.random.Generator) -> Made:
    codes = random.integers(0, 16, (rows, columns))
    scales = (torch.from_numpy(random.uniform(0.02, 0.1, (rows, columns // 16)))).to(torch.float8_e4m3fn)
    words = torch.from_numpy(packed(codes.T, 4).T.copy()).view(torch.uint32)
    return {"weight": words, "scales": scales.view(torch.uint8)}, FP4[codes] * np.repeat(scales.double().numpy(), 16, 1)


def mxfp8(rows: int, columns: int, random: np.random.Generator) -> Made:
    codes = e4m3_codes(random, rows, columns)
    scales = random.integers(112, 118, (rows, columns // 32)).astype(np.uint8)
    words = torch.from_numpy(codes.view("<u4")).view(torch.uint32)
    return {"weight": words, "scales": torch.from_numpy(scales)}, e4m3(codes) * np.repeat(2.0 ** (scales - 127.0), 32, 1)


def settings(bits: int = 4, group: int = 64, mode: str = "affine", **layers: Any) -> dict[str, Any]:
    return {"group_size": group, "bits": bits, "mode": mode, **layers}


def write(folder: Path, tensors: Tensors, quantization: Any, config: dict[str, Any] | None = None) -> Path:
    """As mlx-lm does: both keys, and no table of metadata."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": None}
    kinds = {torch.uint32: "U32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
             torch.int32: "I32"}  # fmt: skip
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        where = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": where}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    said = {} if quantization is None else {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**(config or {}), **said}))
    return folder


def drawn(maker: Maker, rows: int = 140, columns: int = 256) -> Made:
    return maker(rows, columns, np.random.default_rng(1))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "dtype"), [(32, torch.float32), (64, torch.bfloat16), (128, torch.float16)])
def test_affine(bits: int, group: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: Any) -> None:
    small_slices(monkeypatch)
    tensors, expected = drawn(affine(bits, group, dtype))
    reader = open_quantized(write(tmp_path, module(tensors), settings(bits, group)))
    assert reader.names() == {WEIGHT}
    assert reader.format(WEIGHT) == Affine(max(bits, 2), group, str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    assert reader.num_bytes(WEIGHT) == 140 * (32 * bits + 2 * 256 // group * dtype.itemsize)
    np.testing.assert_allclose(read_weight(reader), expected, rtol=1e-6, atol=1e-7)


# mlx.core.quantize of ((7 i i + 3 i) % 64 - 20) / 32, i from 0 to 31: words, scale, bias, and the first eight of mx.dequantize.
VECTORS: dict[int, tuple[list[int], float, float, list[float]]] = {
    1: ([3268479156], 1.9375, -0.625, [-0.625, -0.625, 1.3125, -0.625, 1.3125, 1.3125, -0.625, 1.3125]),
    2: ([3194642651, 1273432489], -0.65625, 1.3125, [-0.65625, 0.0, 0.65625, -0.65625, 1.3125, 1.3125, 0.0, 0.65625]),
    3: ([760745207, 727891925, 1728028163], -0.26249998807907104, 1.3125,
        [-0.525, -0.2625, 0.525, -0.2625, 1.3125, 1.3125, -0.2625, 0.7875]),
    4: ([1258346447, 2916759977, 11836051, 1655635069], -0.13124999403953552, 1.3125,
        [-0.65625, -0.2625, 0.39375, -0.39375, 1.3125, 1.3125, -0.13125, 0.7875]),
    5: ([1948511, 1405801294, 3662131001, 3674747033, 1764351977], -0.0625, 1.3125,
        [-0.625, -0.3125, 0.4375, -0.375, 1.25, 1.3125, -0.1875, 0.75]),
    6: ([48094591, 1533496080, 2946394938, 1386142030, 1467418636, 1821015039], -0.030523255467414856, 1.3125,
        [-0.610465, -0.305233, 0.427326, -0.366279, 1.251454, 1.3125, -0.18314, 0.763081]),
    8: ([3732133631, 1254490120, 982824349, 2917656493, 2645922874, 134268490, 4292244446, 1797367279], -0.007586705032736063,
        1.3125, [-0.62211, -0.311055, 0.440029, -0.371749, 1.251806, 1.3125, -0.189668, 0.751084]),
}  # fmt: skip
FP4_VECTORS = {
    "mxfp4": ([1500951468, 196104449, 1737822229, 1175243323], [125], [-0.5, -0.25, 0.375, -0.375, 1.0, 1.5, -0.125, 0.75]),
    "nvfp4": ([1517794493, 213934737, 2007308582, 1176296267], [38, 38],
              [-0.65625, -0.328125, 0.4375, -0.328125, 1.3125, 1.3125, -0.21875, 0.65625]),
}  # fmt: skip


@pytest.mark.parametrize("bits", BITS)
def test_vectors_of_mlx(bits: int, tmp_path: Path) -> None:
    words, scale, bias, expected = VECTORS[bits]
    tensors = {"weight": torch.tensor([words], dtype=torch.uint32), "scales": torch.tensor([[scale]])}
    tensors["biases"] = torch.tensor([[bias]])
    read = read_weight(open_quantized(write(tmp_path, module(tensors), settings(bits, 32))))
    np.testing.assert_allclose(read[0, :8], expected, atol=1e-6)
    original = ((7 * np.arange(32) ** 2 + 3 * np.arange(32)) % 64 - 20) / 32
    assert np.abs(read[0] - original).max() <= abs(scale) * 0.51


@pytest.mark.parametrize("mode", FP4_VECTORS)
def test_vectors_of_its_four_bit_modes(mode: str, tmp_path: Path) -> None:
    words, scales, expected = FP4_VECTORS[mode]
    tensors = {"weight": torch.tensor([words], dtype=torch.uint32), "scales": torch.tensor([scales], dtype=torch.uint8)}
    if mode == "nvfp4":
        tensors = {name: tensor.repeat(1, 2) for name, tensor in tensors.items()}  # blocks are of 64
    read = read_weight(open_quantized(write(tmp_path, module(tensors), settings(4, 32, mode))))
    np.testing.assert_array_equal(read[0, :8], expected)


@pytest.mark.parametrize("bits", [1, 3, 5, 6])
def test_codes_across_bytes(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96))
    data = torch.from_numpy(packed(codes.T, bits).T.copy()).view(torch.uint8)
    for count in (96, 95, 1):
        np.testing.assert_array_equal(unpack(data, bits, count).numpy(), codes[:, :count])


def test_four_bit_modes_with_and_without_a_number_for_all(tmp_path: Path) -> None:
    first, second, third = (NAME.replace("q_proj", f"{part}_proj") for part in "qkv")
    made = [drawn(mxfp4), drawn(nvfp4), drawn(nvfp4)]
    whole = {"global_scale": torch.tensor(2.5)}
    tensors = module(made[0][0], first) | module(made[1][0], second) | module(made[2][0] | whole, third)
    own = {first: settings(4, 32, "mxfp4"), third: settings(4, 16, "nvfp4") | {"global_scale": True}}
    reader = open_quantized(write(tmp_path, tensors, settings(4, 16, "nvfp4", **own)))
    kinds = [reader.format(f"{name}.weight") for name in (first, second, third)]
    assert kinds == [Blocks("MXFP4"), Blocks("NVFP4"), Blocks("NVFP4")]
    np.testing.assert_array_equal(read_weight(reader, f"{first}.weight"), made[0][1])
    np.testing.assert_array_equal(read_weight(reader, f"{second}.weight"), made[1][1])
    np.testing.assert_allclose(read_weight(reader, f"{third}.weight"), made[2][1] * 2.5 / (448 * 6), rtol=1e-6)


@pytest.mark.parametrize("said", [settings(8, 32, "mxfp8"), settings(4, 64)])
def test_mxfp8_are_numbers_that_bfloat16_holds(said: dict[str, Any], tmp_path: Path) -> None:
    """Whether the mode is said or the scales show it."""
    tensors, expected = drawn(mxfp8)
    reader = open_quantized(write(tmp_path, module(tensors), said))
    assert (reader.names(), reader.format(WEIGHT), reader.stored_as(WEIGHT)) == ({WEIGHT}, None, "mxfp8:e4m3")
    rows = torch.cat([rows for rows, _ in reader.slices(WEIGHT)])  # type: ignore[misc]
    np.testing.assert_array_equal(rows.double().numpy(), expected)
    assert torch.equal(rows.bfloat16().float(), rows)


def test_each_expert_of_a_stack_has_its_own_number(tmp_path: Path) -> None:
    made = [nvfp4(64, 128, np.random.default_rng(e)) for e in range(3)]
    tensors: Tensors = {name: torch.stack([each[name] for each, _ in made]) for name in ("weight", "scales")}
    stack = module(tensors | {"global_scale": torch.tensor([1.0, 2.0, 3.5])}, "model.layers.1.mlp.switch_mlp.up_proj")
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    reader = open_quantized(write(tmp_path, stack, settings(4, 16, "nvfp4"), config))
    names = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    assert reader.names() == set(names)
    for name, (_, expected), number in zip(names, made, (1.0, 2.0, 3.5), strict=True):
        np.testing.assert_allclose(read_weight(reader, name), expected * number / 2688, rtol=1e-6)


def test_a_module_has_its_own_settings_or_those_of_all(tmp_path: Path) -> None:
    """And one that is not quantized has none, whatever is said of it."""
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    made = [drawn(maker) for maker in (affine(4), affine(8, 32), affine(3))]
    tensors: Tensors = {f"{names[3]}.weight": torch.ones(4, 64), "model.norm.bias": torch.ones(64)}
    for name, (each, _) in zip(names, made, strict=False):
        tensors |= module(each, name)
    own = {names[1]: settings(8, 32), names[2]: {"group_size": 64, "bits": 3}, names[0]: True, names[3]: False}
    for key in ("quantization", "quantization_config"):
        write(tmp_path, tensors, None, {key: settings(**own)})
        reader = open_quantized(tmp_path)
        for name, (_, expected) in zip(names, made, strict=False):
            np.testing.assert_allclose(read_weight(reader, f"{name}.weight"), expected, rtol=1e-6, atol=1e-7)
        assert reader.format(f"{names[3]}.weight") is None


def test_as_mlx_quantizes_and_dequantizes(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    weight = mx.array(np.random.default_rng(4).standard_normal((70, 256)).astype(np.float32)).astype(mx.bfloat16)
    modes = [("affine", bits, group) for bits in BITS for group in (32, 64, 128)] + [("mxfp4", 4, 32), ("nvfp4", 4, 16)]
    for mode, bits, group in modes:
        made = mx.quantize(weight, group, bits, mode=mode)
        codes, scales, *biases = made
        wide = [each.astype(mx.float32) for each in (scales, *biases)] if biases else [scales, None]  # or it rounds to bfloat16
        expected = np.array(mx.dequantize(codes, *wide, group, bits, mode=mode, dtype=mx.float32))
        tensors = module(dict(zip(("weight", "scales", "biases"), made, strict=False)))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        (tmp_path / "config.json").write_text(json.dumps({"quantization": settings(bits, group, mode)}))
        np.testing.assert_allclose(read_weight(open_quantized(tmp_path)), expected, rtol=1e-6, atol=1e-6)


# ---- whole models ----

TEXT = SIZES | {"head_dim": 32, "num_attention_heads": 4}
HYBRID = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
LFM = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"layer_types": ["conv", "full_attention"],
       "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}  # fmt: skip
MIXED = {"model.layers.1.self_attn.o_proj": settings(6, 32), "model.embed_tokens": settings(8, 64)}
ROUTED = {f"model.layers.{i}.mlp.gate": settings(8, 64) for i in range(4)}
OSS = {f"model.layers.{i}.mlp.experts.{part}_proj": settings(4, 32, "mxfp4") for i in range(2) for part in ("gate", "up", "down")}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama, head of its own, mixed": (LlamaConfig(**TEXT), settings(**MIXED)),
    "qwen3, tied, 3 bits": (Qwen3Config(**TEXT | {"tie_word_embeddings": True}), settings(3, 128)),
    "gemma3, 8 bits": (Gemma3TextConfig(**TEXT | {"tie_word_embeddings": True}), settings(8, 64)),
    "phi3, one matrix for several": (
        Phi3Config(**{k: v for k, v in TEXT.items() if k != "head_dim"} | {"pad_token_id": 0}), settings(),
    ),
    "qwen3_moe": (Qwen3MoeConfig(**TEXT, **EXPERTS), settings(**ROUTED)),
    "gpt_oss": (GptOssConfig(**TEXT | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
                             layer_types=["sliding_attention", "full_attention"], rope_parameters={"rope_type": "default",
                             "rope_theta": 1e4}), settings(8, 32, **OSS)),
    "qwen3_next": (Qwen3NextConfig(**TEXT | HYBRID | EXPERTS | {"num_hidden_layers": 4, "num_experts": 4},
                                   shared_expert_intermediate_size=64), settings(**ROUTED)),
    "qwen3_5": (Qwen3_5TextConfig(**TEXT | HYBRID | {"num_hidden_layers": 4}), settings(5)),
    "lfm2": (Lfm2Config(**LFM), settings(6, 32)),
    "llama, mxfp8": (LlamaConfig(**TEXT), settings(8, 32, "mxfp8")),
    "lfm2_moe": (
        Lfm2MoeConfig(**LFM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, num_dense_layers=1), settings(),
    ),
}  # fmt: skip
_NOT_QUANTIZED = ("conv1d", "conv.conv", "A_log", "dt_bias", "sinks", "expert_bias", "e_score")


def mlx_names(name: str, tensor: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """What mlx-lm makes of a tensor of transformers' (`sanitize`): several, stacked or turned."""
    place, _, last = name.rpartition(".")
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return {name: tensor.movedim(1, 2)}
    raised = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")
    if kind in ("qwen3_next", "qwen3_5_text") and place.endswith(raised):
        return {name: tensor + 1}
    if kind == "gpt_oss" and ".experts." in name:
        part, _, is_bias = last.partition("_proj")
        end = "bias" if is_bias else "weight"
        turned = tensor if is_bias else tensor.transpose(1, 2)
        if part == "gate_up":
            return {f"{place}.gate_proj.{end}": turned[:, ::2], f"{place}.up_proj.{end}": turned[:, 1::2]}
        return {f"{place}.{part}_proj.{end}": turned}
    if ".experts." in name and tensor.dim() == 3:
        stack = place.removesuffix(".experts") + ".switch_mlp"
        if last == "gate_up_proj":
            return {f"{stack}.gate_proj.weight": tensor.chunk(2, 1)[0], f"{stack}.up_proj.weight": tensor.chunk(2, 1)[1]}
        return {f"{stack}.{last}.weight": tensor}
    if kind == "lfm2_moe":
        for w, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            name = name.replace(f"feed_forward.{w}.", f"feed_forward.{part}_proj.")
    return {name: tensor}


def save_mlx(folder: Path, config: Any, quantization: dict[str, Any] | None, prefix: Callable[[str], str] = str) -> Any:
    """A model in a folder of MLX's, and transformers' with the same weights."""
    reference = random_model(config)
    kind, random = config.model_type, np.random.default_rng(5)
    tensors: Tensors = {}
    for name, parameter in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for theirs, part in mlx_names(name, parameter.detach(), kind).items():
            plain = part.dim() < 2 or quantization is None or any(each in theirs for each in _NOT_QUANTIZED)
            if plain or theirs.endswith("bias"):
                tensors[prefix(theirs)] = part
                continue
            base = theirs.removesuffix(".weight")
            own = quantization.get(base, quantization)
            kinds = {"mxfp4": mxfp4, "mxfp8": mxfp8}
            maker = kinds.get(own["mode"]) or affine(own["bits"], own["group_size"], torch.float32)
            made, weight = maker(int(np.prod(part.shape[:-1])), part.shape[-1], random)
            stacked = {suffix: tensor.view(*part.shape[:-1], -1) for suffix, tensor in made.items()}
            tensors |= module(stacked, prefix(base))
            part.copy_(torch.from_numpy(weight).view(part.shape))  # a view of the model's, but for what is added to below
    write(folder, tensors, quantization, {**config.to_dict(), "architectures": [type(reference).__name__], "dtype": "float32"})
    return reference


@pytest.mark.parametrize("case", MODELS)
def test_models_are_what_transformers_makes_of_their_weights(case: str, tmp_path: Path) -> None:
    config, quantization = MODELS[case]
    reference = save_mlx(tmp_path, config, quantization)
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    together = run(engine_for(worker, max_num_batched_tokens=20), [(ids, greedy(10)) for ids in PROMPTS])
    for ids, output in zip(PROMPTS, together, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + list(output.outputs[0].token_ids)])).logits[0]
        assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("case", ["llama, head of its own, mixed", "qwen3_moe"])
def test_in_bfloat16_a_row_has_the_same_bits_alone_and_in_a_batch(case: str, tmp_path: Path) -> None:
    config, quantization = MODELS[case]
    reference = save_mlx(tmp_path, config, quantization)
    worker = worker_for(tmp_path, dtype="bfloat16")
    assert worst_difference(worker, reference) < 0.3
    asked = [(ids, greedy(12)) for ids in PROMPTS]
    together = run(engine_for(worker), asked)
    for each, output in zip(asked, together, strict=True):
        assert run(engine_for(worker), [each])[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "lfm2", "qwen3_moe"])
def test_folders_that_are_not_quantized(case: str, tmp_path: Path) -> None:
    """What a convolution looks like shows that norms are raised."""
    config, _ = MODELS[case]
    reference = save_mlx(tmp_path, config, None)
    assert worst_difference(worker_for(tmp_path), reference) < 1e-4


def test_the_part_that_writes_of_a_qwen_that_sees(tmp_path: Path) -> None:
    """As mlx-vlm names it; the tower's tensors are those that transformers has, its patches turned."""
    config, quantization = MODELS["qwen3_5"]

    def prefix(name: str) -> str:
        return f"language_model.{name}"

    reference = save_mlx(tmp_path, config, quantization, prefix)
    told = json.loads((tmp_path / "config.json").read_text())
    ours = {key: told.pop(key) for key in ("quantization", "quantization_config")}
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": told, **ours}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    assert worst_difference(worker_for(tmp_path, dtype="float32"), reference) < 1e-4
    with open_checkpoint(tmp_path) as checkpoint:
        assert all(name.startswith(("model.language_model.", "lm_head.")) for name in checkpoint.names())
    patches = torch.arange(2 * 2 * 4 * 4 * 3, dtype=torch.float32).view(2, 2, 4, 4, 3)
    write(tmp_path / "sees", {"vision_tower.patch_embed.proj.weight": patches}, settings(), {"model_type": "qwen3_5"})
    with open_checkpoint(tmp_path / "sees") as checkpoint:
        name = "model.visual.patch_embed.proj.weight"
        assert checkpoint.info(name).shape == (2, 3, 2, 4, 4)
        assert torch.equal(checkpoint.tensor(name), patches.permute(0, 4, 1, 2, 3))
        assert torch.equal(checkpoint.raw(name).flatten().view(torch.float32), patches.permute(0, 4, 1, 2, 3).flatten())


def test_headers_alone_say_what_a_folder_is_made_of(tmp_path: Path) -> None:
    config, quantization = MODELS["qwen3_moe"]
    reference = save_mlx(tmp_path, config, quantization)
    with open_checkpoint(tmp_path) as checkpoint:
        facts = facts_of(checkpoint, headers_only=True)
    assert facts.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert facts.stored == "mlx"
    mlp = next(each for each in facts.classes if each.name == "mlp")
    assert set(mlp.types) == {"affine4:group=64", "affine8:group=64"}


# ---- GGUF ----


def with_tokenizer(folder: Path, maker_settings: dict[str, Any], dtype: torch.dtype) -> Path:
    """A llama with the bundled tokenizer, all of whose matrices are drawn."""
    config = LlamaConfig(**TEXT | {"vocab_size": 4100, "eos_token_id": 4087, "bos_token_id": None})
    save_mlx(folder, config, maker_settings)
    tensors = {name: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
    told = json.loads((folder / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    quantization = told.pop("quantization")
    write(folder, tensors, quantization, told)
    for name in SETTINGS:
        shutil.copy(TINY / name, folder / name)
    return folder


def converted(folder: Path, output: Path, target: str = "gguf", outtype: str = "auto") -> convert.Plan:
    with convert.open_source(folder) as checkpoint:
        made = convert.plan(checkpoint, target, outtype)  # type: ignore[arg-type]
        convert.write(checkpoint, made, output)
    return made


@pytest.mark.parametrize(("said", "kind"), [
    (settings(2), "Q4_1"), (settings(4), "Q4_1"), (settings(5, 32), "Q5_1"), (settings(4, 32, "mxfp4"), "MXFP4"),
])  # fmt: skip
def test_gguf_has_the_same_numbers(said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "m", said, torch.bfloat16)
    made = converted(folder, tmp_path / "m.gguf")
    assert not any("weights" in note for note in made.notes)
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with open_checkpoint(folder) as checkpoint:
        reader = open_reader(checkpoint)
        for theirs, ours in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens"),
                             ("output", "lm_head"), ("blk.0.attn_v", "model.layers.0.self_attn.v_proj")):  # fmt: skip
            tensor = found[f"{theirs}.weight"]
            assert tensor.tensor_type.name == kind
            np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type), read_weight(reader, f"{ours}.weight"))
    workers = [worker_for(path, dtype="float32") for path in (folder, tmp_path / "m.gguf")]
    outputs = [run(engine_for(worker), [(ids, greedy(8)) for ids in PROMPTS]) for worker in workers]
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_what_gguf_has_no_type_for_becomes_numbers_with_a_note(tmp_path: Path) -> None:
    """Six bits; and four whose scales are beyond float16's numbers."""
    folder = with_tokenizer(tmp_path / "m", settings(6), torch.bfloat16)
    made = converted(folder, tmp_path / "m.gguf")
    assert any("have no type in GGUF, and become numbers of BF16: 16" in note for note in made.notes)
    assert made.type_name == "BF16"
    other = with_tokenizer(tmp_path / "n", settings(4), torch.bfloat16)
    tensors = load_file(other / "model.safetensors")
    told = json.loads((other / "config.json").read_text())
    quantization = told.pop("quantization")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.scales"][3, 0] = 1.03e-7
    write(other, tensors, quantization, told)
    made = converted(other, tmp_path / "n.gguf")
    assert any(note.endswith("numbers of BF16: 1") for note in made.notes)
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "n.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == "BF16"
    assert kinds["blk.0.ffn_gate.weight"] == "Q4_1"


def test_other_types_and_folders_are_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "m", settings(4), torch.bfloat16)
    with convert.open_source(folder) as checkpoint:
        assert convert.plan(checkpoint, "gguf", "q8_0").requantized, "what loses twice is told by name"
        with pytest.raises(UnsupportedError, match="MLX's weights in another folder") as caught:
            convert.plan(checkpoint, "hf")
    assert "--to gguf" in str(caught.value.hint)
    with pytest.raises(UsageError, match="affine4:group=64 already"):
        worker_for(folder, quant="int4")


# ---- what is refused ----


def refused(folder: Path, tensors: Tensors, quantization: Any, error: type[NanovllmError], words: str) -> None:
    write(folder, module(tensors), quantization)
    with pytest.raises(NanovllmError) as raised:
        for _ in open_quantized(folder).slices(WEIGHT):
            pass
    assert type(raised.value) is error
    assert words in raised.value.message
    assert raised.value.hint


def changed(**others: Any) -> Tensors:
    tensors, _ = drawn(affine(4))
    return {name: tensor for name, tensor in (tensors | others).items() if tensor is not None}


NAN, HUGE = torch.full((140, 4), float("nan"), dtype=torch.bfloat16), torch.full((140, 4), 2e38, dtype=torch.bfloat16)
BAD: dict[str, tuple[Tensors, Any, type[NanovllmError], str]] = {
    "7 bits": (changed(), settings(7), UnsupportedError, "MLX weights of 7 bits in groups of 64"),
    "groups of 48": (changed(), settings(4, 48), UnsupportedError, "groups of 48"),
    "groups of 2**40": (changed(), settings(4, 1 << 40), CheckpointError, "'group_size' must be"),
    "bits are a word": (changed(), settings("four"), CheckpointError, "'bits' must be a whole number"),  # type: ignore[arg-type]
    "mode is a number": (changed(), settings(mode=4), CheckpointError, "'mode' must be a string"),  # type: ignore[arg-type]
    "mxfp5": (changed(), settings(8, 32, "mxfp5"), UnsupportedError, "in MLX's mode 'mxfp5'"),
    "mxfp8, scales of others": (
        drawn(mxfp8)[0] | {"scales": torch.zeros(140, 4, dtype=torch.uint8)}, settings(8, 32, "mxfp8"), CheckpointError,
        "expected [140, 8]",
    ),
    "mxfp8 with biases": (
        drawn(mxfp8)[0] | {"biases": torch.ones(140, 8)}, settings(8, 32, "mxfp8"), CheckpointError, "belongs to no",
    ),
    "8 bits, says the config": (changed(), settings(8), CheckpointError, "has 32 words in a row, expected 64"),
    "groups of 32, says the config": (changed(), settings(4, 32), CheckpointError, "has 32 words in a row, expected 16"),
    "its own settings say so": (changed(), settings(**{NAME: settings(8)}), CheckpointError, "expected 64"),
    "no biases": (changed(biases=None), settings(), CheckpointError, f"'{NAME}.biases' is missing"),
    "no scales": (changed(scales=None, biases=None), settings(), CheckpointError, "scales' is missing"),
    "words of int32": (changed(weight=torch.zeros(140, 32, dtype=torch.int32)), settings(), CheckpointError, "holds I32"),
    "scales of another height": (changed(scales=torch.ones(7, 4).bfloat16()), settings(), CheckpointError, "the shape [7, 4]"),
    "biases of another type": (changed(biases=torch.ones(140, 4)), settings(), CheckpointError, "holds F32, expected BF16"),
    "scales of bytes": (
        changed(scales=torch.ones(140, 4, dtype=torch.uint8)), settings(**{NAME: settings()}), CheckpointError, "holds U8",
    ),
    "no rows": (changed(weight=torch.zeros(0, 32, dtype=torch.uint32)), settings(), CheckpointError, "holds nothing"),
    "a scale is NaN": (changed(scales=NAN), settings(), CheckpointError, "NaN or infinite"),
    "biases too large": (changed(biases=HUGE), settings(), CheckpointError, "or above"),
    "fp4 with biases": (
        drawn(mxfp4)[0] | {"biases": torch.ones(140, 8)}, settings(4, 32, "mxfp4"), CheckpointError, "belongs to no",
    ),
    "fp4, scales of others": (drawn(nvfp4)[0], settings(4, 32, "mxfp4"), CheckpointError, "expected [140, 8]"),
    "fp4, a scale is NaN": (drawn(mxfp4)[0] | {"scales": torch.full((140, 8), 255, dtype=torch.uint8)}, settings(4, 32, "mxfp4"),
                            CheckpointError, "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_weights(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *BAD[case])


def test_more_experts_than_are_believed(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.switch_mlp.up_proj.bias"
    config = MODELS["gpt_oss"][0].to_dict() | {"architectures": ["GptOssForCausalLM"]}
    write(tmp_path, {name: torch.zeros(70_000, 1)}, settings(), config)
    with pytest.raises(CheckpointError, match="70000 experts"):
        open_checkpoint(tmp_path)


# ---- latent attention, of which mlx-lm keeps two matrices a head in place of kv_b_proj ----

LATENT = DeepseekV3Config(
    **{name: value for name, value in SIZES.items() if name not in ("head_dim", "pad_token_id")}
    | {"num_key_value_heads": 4, "num_hidden_layers": 2},
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


def save_latent(folder: Path, own: dict[str, Any] | None) -> Any:
    """In float32, its two matrices a head quantized by these settings, or not at all."""
    reference = random_model(LATENT)
    tensors: Tensors = {}
    for name, parameter in reference.state_dict().items():
        base = name.rpartition(".kv_b_proj.")[0]
        if not base:
            tensors |= mlx_names(name, parameter.detach(), "deepseek_v3")
            continue
        whole = parameter.detach().view(4, 32 + 48, 64)
        for part, matrix in (("embed_q", whole[:, :32].transpose(1, 2)), ("unembed_out", whole[:, 32:])):
            if own is None or matrix.shape[2] % own["group_size"]:  # as mlx-lm leaves it
                tensors[f"{base}.{part}.weight"] = matrix.contiguous()
                continue
            maker, num_rows = affine(own["bits"], own["group_size"], torch.float32), matrix.shape[0] * matrix.shape[1]
            made, weight = maker(num_rows, matrix.shape[2], np.random.default_rng(3))
            tensors |= module({key: tensor.view(*matrix.shape[:2], -1) for key, tensor in made.items()}, f"{base}.{part}")
            matrix.copy_(torch.from_numpy(weight).view(matrix.shape))
    said = None if own is None else own
    write(folder, tensors, said, {**LATENT.to_dict(), "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32"})
    return reference


@pytest.mark.parametrize("own", [None, settings(4, 32), settings(8, 32), settings(4, 64)])
def test_latent_attention_as_mlx_has_it(own: dict[str, Any] | None, tmp_path: Path) -> None:
    reference = save_latent(tmp_path, own)
    worker = worker_for(tmp_path, dtype="float32")
    assert worst_difference(worker, reference) < 1e-4
    together = run(engine_for(worker, max_num_batched_tokens=20), [(ids, greedy(8)) for ids in PROMPTS])
    for ids, output in zip(PROMPTS, together, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + list(output.outputs[0].token_ids)])).logits[0]
        assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()
    with open_checkpoint(tmp_path) as checkpoint:
        reader = open_reader(checkpoint)
        name = "model.layers.1.self_attn.kv_b_proj.weight"
        assert reader.shape(name) == (4 * 80, 64)
        assert not any("embed_q" in name or "unembed" in name for name in reader.names())
        if own is None:
            assert torch.equal(checkpoint.raw(name).view(torch.float32).reshape(320, 64), checkpoint.tensor(name))
            assert torch.equal(checkpoint.tensor(name, (100, 130)), checkpoint.tensor(name)[100:130])


def latent(part: str, shape: tuple[int, int, int], **more: torch.Tensor) -> Tensors:
    heads, rows, columns = shape
    ones = torch.ones(heads, rows, columns // 32)
    made = {"weight": torch.zeros(heads, rows, columns // 8, dtype=torch.uint32), "scales": ones, "biases": ones}
    return module(made | more, f"model.layers.0.self_attn.{part}")


BAD_LATENT: dict[str, tuple[Tensors, dict[str, Any], type[NanovllmError], str]] = {
    "one of two": (latent("embed_q", (2, 64, 32)), settings(4, 32), CheckpointError, "self_attn.unembed_out.weight' beside it"),
    "ranks that differ": (latent("embed_q", (2, 64, 32)) | latent("unembed_out", (2, 48, 32)), settings(4, 32), CheckpointError,
                          "to [2, 48, 32]"),
    "heads that differ": (latent("embed_q", (2, 64, 32)) | latent("unembed_out", (3, 48, 64)), settings(4, 32), CheckpointError,
                          "to [3, 48, 64]"),
    "another mode": (latent("embed_q", (2, 64, 32)), settings(4, 32, "mxfp4"), UnsupportedError, "mode 'mxfp4'"),
    "words of another width": (latent("embed_q", (2, 64, 32)), settings(8, 32), CheckpointError, "expected [2, 64, 8]"),
    "no biases": ({name: tensor for name, tensor in latent("embed_q", (2, 64, 32)).items() if not name.endswith("biases")},
                  settings(4, 32), CheckpointError, "biases' is missing"),
    "a scale is NaN": (latent("embed_q", (2, 64, 32), scales=torch.full((2, 64, 1), np.nan)) | latent("unembed_out", (2, 48, 64)),
                       settings(4, 32), CheckpointError, "NaN or infinite"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LATENT)
def test_bad_latent_attention_is_told_of(case: str, tmp_path: Path) -> None:
    tensors, said, error, words = BAD_LATENT[case]
    write(tmp_path, tensors, said)
    with pytest.raises(NanovllmError) as raised:
        for _ in open_quantized(tmp_path).slices("model.layers.0.self_attn.kv_b_proj.weight"):
            pass
    assert type(raised.value) is error
    assert words in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (8, 16, 3, 3), (8, 3, 3, 3), (8, 3, 2, 14, 14), (8, 16, 16, 16)])
def test_kernels_of_towers_that_are_not_turned_stay_as_they_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of convolutions over single channels, over many, and over colours, as transformers has all of them."""
    kernel = torch.zeros(shape)
    write(tmp_path, {"model.vision_tower.stem.conv.weight": kernel}, None, {"model_type": "fastvlm"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.info("model.vision_tower.stem.conv.weight").shape == shape
