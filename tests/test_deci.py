"""DeciLM, whose layers differ, against transformers' Llama: heads of keys that are equal are one, and zeros are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from engines import SMALL, add_shape, engine_for, greedy, random_model, run, worker_for
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from test_convert_families import fields, make_gguf, tensors
from test_models import prompts, rope
from test_quant_engine import difference, expected_logits, logits_of

HEADS, HIDDEN, WIDE = 6, 96, 768
TOKENS = {"eos_token_id": 4089, "bos_token_id": 4087, "vocab_size": 4100}
CONFIG = {name: value for name, value in SMALL.items() if name != "head_dim"} | TOKENS | {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": WIDE,
}  # fmt: skip


class Layer(NamedTuple):
    """Queries that share a key, and the factor of an MLP's width; None: there is none."""

    group: int | None
    factor: float | None

    @property
    def width(self) -> int:
        return 0 if self.factor is None else {1.0: 256, 5.25: 512, 12.0: WIDE}[self.factor]

    @property
    def config(self) -> dict[str, Any]:
        """As Nemotron's have it."""
        attention = {"n_heads_in_group": self.group, "no_op": self.group is None, "replace_with_linear": False,
                     "num_sink_tokens": None, "sparsify": None, "window_length": None}  # fmt: skip
        ffn = {"ffn_mult": self.factor, "no_op": self.factor is None, "replace_with_linear": False, "sparsify": None}
        return {"attention": attention, "ffn": ffn}


LAYERS = {
    "super": [Layer(3, 5.25), Layer(None, 1.0), Layer(2, 12.0), Layer(6, None)],
    "the first has nothing": [Layer(None, None), Layer(None, 5.25), Layer(1, 1.0)],
    "the last has no attention": [Layer(2, 1.0), Layer(None, 12.0)],
    "stretched": [Layer(3, 1.0), Layer(None, None), Layer(3, 5.25)],
}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def llama(case: str) -> Any:
    """What computes the same: with copies of keys and values, and zeros in what makes a part's output."""
    layers = LAYERS[case]
    model = random_model(LlamaConfig(**CONFIG | {"num_hidden_layers": len(layers)} | (LLAMA3 if case == "stretched" else {})))
    for layer, module in zip(layers, model.model.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        if layer.group is None:
            attention.o_proj.weight.data.zero_()
        else:
            for weight in (attention.k_proj.weight, attention.v_proj.weight):
                heads = weight.data.view(HEADS // layer.group, layer.group, -1, HIDDEN)
                heads[:] = heads[:, :1].clone()
        mlp.down_proj.weight.data[:, layer.width :] = 0
    return model


def own_tensors(case: str, model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith("model.layers."):
            layer = LAYERS[case][int(name.split(".")[2])]
            is_of_attention = "self_attn" in name or "input_layernorm" in name
            if (layer.group is None) if is_of_attention else (layer.factor is None):
                continue
            if "k_proj" in name or "v_proj" in name:
                assert layer.group is not None
                value = value.view(HEADS // layer.group, layer.group, -1, HIDDEN)[:, 0].reshape(-1, HIDDEN)
            elif "gate_proj" in name or "up_proj" in name:
                value = value[: layer.width]
            elif "down_proj" in name:
                value = value[:, : layer.width]
        found[name] = value.contiguous().clone()
    return found


def config_of(case: str, model: Any) -> dict[str, Any]:
    config = model.config.to_dict() | {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas"}
    config |= {"block_configs": [layer.config for layer in LAYERS[case]], "intermediate_size": None, "num_key_value_heads": None}
    return {name: value for name, value in config.items() if name not in ("head_dim", "dtype")}


def folder_of(case: str, model: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(own_tensors(case, model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(case, model)))
    return folder


@pytest.mark.parametrize("case", LAYERS)
def test_logits_are_those_of_a_llama(case: str, tmp_path: Path) -> None:
    model, tokens = llama(case), prompts(4000)[:6]
    folder = folder_of(case, model, tmp_path / "m")
    assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5


def test_keys_by_layer_alone(tmp_path: Path) -> None:
    """DeciLM 7B."""
    LAYERS["7b"] = [Layer(3, 12.0), Layer(2, 12.0), Layer(6, 12.0)]
    try:
        model, tokens = llama("7b"), prompts(4000)[:4]
        folder = folder_of("7b", model, tmp_path / "m")
        config = config_of("7b", model) | {"num_key_value_heads_per_layer": [2, 3, 1], "intermediate_size": WIDE}
        del config["block_configs"]
        (folder / "config.json").write_text(json.dumps(config))
        assert difference(logits_of(worker_for(folder, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5
    finally:
        del LAYERS["7b"]


def test_answers_do_not_depend_on_others(tmp_path: Path) -> None:
    """From recordings too, of layers without attention."""
    folder, asked = folder_of("super", llama("super"), tmp_path / "m"), prompts(4000)[1:5]
    whole, cut = (engine_for(worker_for(folder), **settings) for settings in ({}, {"max_num_batched_tokens": 7}))
    answers = [[out.outputs[0].token_ids for out in run(each, [(ids, greedy(12)) for ids in asked])] for each in (whole, cut)]
    assert answers[0] == answers[1]
    assert [run(whole, [(ids, greedy(12))])[0].outputs[0].token_ids for ids in asked] == answers[0]


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs side by side, as llama.cpp has them."""
    return rows.view(heads, 2, -1, HIDDEN).transpose(1, 2).reshape(rows.shape)


def write(path: Path, case: str, model: Any, **keys: Any) -> Path:
    """As llama.cpp's converter does, with its names."""
    writer, layers = gguf.GGUFWriter(path, "deci"), LAYERS[case]
    add_shape(writer, model.config)
    own: dict[str, Any] = {
        "attention.head_count": [0 if layer.group is None else HEADS for layer in layers],
        "attention.head_count_kv": [0 if layer.group is None else HEADS // layer.group for layer in layers],
        "feed_forward_length": [layer.width for layer in layers],
    }
    writer.add_tokenizer_model("no_vocab")
    for name, value in (own | keys).items():
        writer.kv_data[0].pop(f"deci.{name}", None)
        if value is not None:
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"deci.{name}", value)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in own_tensors(case, model).items():
        stem = name.removesuffix(".weight")
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.weight", value.numpy())
            continue
        _, _, layer, *rest = stem.split(".")
        part = ".".join(rest)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            group = LAYERS[case][int(layer)].group
            assert group is not None
            value = halves(value, HEADS if part == "self_attn.q_proj" else HEADS // group)
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", [case for case in LAYERS if case != "stretched"])
def test_a_gguf_file_is_read_and_written(case: str, tmp_path: Path) -> None:
    model, tokens = llama(case), prompts(4000)[:5]
    expected = write(tmp_path / "expected.gguf", case, model)
    assert difference(logits_of(worker_for(expected, dtype="float32"), tokens), expected_logits(model, tokens)) < 1e-5
    make_gguf(folder_of(case, model, tmp_path / "m"), tmp_path / "made.gguf")
    wanted, found = tensors(expected), tensors(tmp_path / "made.gguf")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if (found[name] != wanted[name]).any()] == []
    said = fields(tmp_path / "made.gguf")
    for key, value in fields(expected).items():
        if key.startswith("deci.attention.head_count") or key == "deci.feed_forward_length":
            assert said[key] == value, key


def test_a_stretched_one_is_written_and_read(tmp_path: Path) -> None:
    model, tokens = llama("stretched"), prompts(4000)[:5]
    make_gguf(folder_of("stretched", model, tmp_path / "m"), tmp_path / "made.gguf")
    worker = worker_for(tmp_path / "made.gguf", dtype="float32")
    assert difference(logits_of(worker, tokens), expected_logits(model, tokens)) < 1e-5


def changed(part: str, **values: Any) -> dict[str, Any]:
    layers = [layer.config for layer in LAYERS["super"]]
    layers[0][part] |= values
    return {"block_configs": layers}


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        (changed("attention", replace_with_linear=True), UnsupportedError, "'replace_with_linear' is not supported"),
        (changed("ffn", replace_with_linear=True), UnsupportedError, "'replace_with_linear' is not supported"),
        (changed("attention", window_length=64), UnsupportedError, "'window_length' is not supported"),
        (changed("attention", n_heads_in_group=4), CheckpointError, "6 heads don't make groups of 4"),
        (changed("attention", n_heads_in_group=0), CheckpointError, "'n_heads_in_group' must be"),
        (changed("ffn", ffn_mult=-1), CheckpointError, "'ffn_mult' must be"),
        ({"block_configs": [LAYERS["super"][0].config]}, CheckpointError, "'block_configs' must be a list of 4 layers"),
        ({"block_configs": [None] * 4}, CheckpointError, "each of 'block_configs' must be an object"),
        ({"block_configs": [{}] * 4}, UnsupportedError, "no layer has attention"),
        ({"block_configs": [Layer(None, 1.0).config] * 4}, UnsupportedError, "no layer has attention"),
        (
            {"block_configs": None, "num_key_value_heads_per_layer": [3, 3, 4, 3], "intermediate_size": 64},
            CheckpointError, "6 heads don't share 4 of keys",
        ),
    ],
    ids=str,
)
def test_configs_that_can_not_be_followed(changes: dict[str, Any], kind: type[NanovllmError], said: str) -> None:
    config = config_of("super", llama("super")) | changes
    with pytest.raises(kind, match=said):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"attention.head_count_kv": [2, 0, 0, 1]}, UnsupportedError, "a matrix in place of attention"),
        ({"attention.head_count_kv": [2, 0]}, CheckpointError, "a number for each of 4 layers"),
        ({"attention.head_count_kv": [4, 0, 3, 1]}, CheckpointError, "heads"),
        ({"feed_forward_length": [512, 256, 1024, 0]}, CheckpointError, "ffn"),
    ],
    ids=str,
)
def test_gguf_keys_that_can_not_be_followed(keys: dict[str, Any], kind: type[NanovllmError], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "super", llama("super"), **keys)
    with pytest.raises(kind, match=said):
        worker_for(path, dtype="float32")
