"""Random weights of real models' shapes, as one GGUF file that both sides of a comparison load.

    python benchmarks/shapes.py --tokenizer FOLDER model.gguf

With a tokenizer the file can chat and be held to JSON: FOLDER has tokenizer.json and tokenizer_config.json of a byte-level BPE,
such as Qwen2's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.lfm2 import LFM2
from nanovllm_cli.weights import shapes
from nanovllm_cli.weights.random_weights import RandomCheckpoint


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "layers": "num_hidden_layers", "hidden": "hidden_size", "inner": "intermediate_size", "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads", "dim": "head_dim", "vocab": "vocab_size",
    }  # fmt: skip
    return {name: config[key] for name, key in keys.items()}


def _lfm2(config: Mapping[str, Any]) -> dict[str, Any]:
    """attention: the layers that have it; the others have convolutions."""
    rows = spec_from_hf(config, LFM2).blocks[0].mlp.intermediate_size
    return _plain(config) | {"inner": rows, "attention": config["full_attn_idxs"]}


def _qwen35(config: Mapping[str, Any]) -> dict[str, Any]:
    """delta: heads and dims of keys, then of values; attention as above."""
    every = config["full_attention_interval"]
    sizes = tuple(config[f"linear_{name}"] for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim"))
    return _plain(config) | {"attention": range(every - 1, config["num_hidden_layers"], every), "delta": sizes}


SHAPES = {
    "qwen3-0.6b": _plain(shapes.SHAPES["qwen3-0.6b"]),
    "lfm2-350m": _lfm2(shapes.SHAPES["lfm2-350m"]),
    "lfm2-1.2b": _lfm2(shapes.SHAPES["lfm2-1.2b"]),
    "qwen3.5-0.8b": _qwen35(shapes.SHAPES["qwen3.5-0.8b"]),
    "qwen3.5-2b": _qwen35(shapes.SHAPES["qwen3.5-2b"]),
    "qwen3.5-4b": _qwen35(shapes.SHAPES["qwen3.5-4b"]),
    "small": {"layers": 4, "hidden": 256, "inner": 768, "heads": 4, "kv_heads": 2, "dim": 64, "vocab": 4096},
}
CONTEXT = 40960
TAPS, DELTA_TAPS = 3, 4


def write_converted(path: Path, shape_name: str, layers: int | None = None) -> Path:
    """A model of any shape that we know, or its first layers, in bfloat16, as `convert` writes it."""
    config = shapes.shape_config(shape_name)
    if layers is not None:
        config["num_hidden_layers"] = layers
        config |= {key: config[key][:layers] for key in ("layer_types",) if key in config}
    source = RandomCheckpoint(config)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        save_file({name: source.tensor(name).clone() for name in source.names()}, Path(folder) / "model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(config))
        letters = {chr(code): i for i, code in enumerate((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)))}
        tokenizer = Tokenizer(models.BPE(letters | {"ab": len(letters)}, [("a", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text("{}")
        command = [sys.executable, "-m", "nanovllm_cli", "convert", folder, "--to", "gguf", "-o", str(path), "-q"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def write_adapter(path: Path, model: Path, rank: int, seed: int = 0) -> Path:
    """A LoRA adapter of all matrices in the blocks of a Qwen3 model's GGUF file, in fp16, as llama.cpp has them."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", rank)
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            width, rows = (int(size) for size in tensor.shape)
            for side, dims in (("a", (rank, width)), ("b", (rows, rank))):
                values = 0.02 * rng.standard_normal(dims, np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{side}", values.astype(np.float16))
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 as uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_gguf(path: Path, shape_name: str, seed: int = 0, tokenizer: Path | None = None) -> Path:
    """A Qwen3, Qwen3.5 or LFM2 model with a tied head, BF16 matrices and F32 norms, and a vocabulary of made-up tokens, or that
    of `tokenizer`."""
    shape = SHAPES[shape_name]
    hidden, inner, dim = shape["hidden"], shape["inner"], shape["dim"]
    q, kv = shape["heads"] * dim, shape["kv_heads"] * dim
    rng = np.random.default_rng(seed)
    attends = [i in shape.get("attention", range(shape["layers"])) for i in range(shape["layers"])]
    delta = shape.get("delta")
    arch = "qwen35" if delta else "qwen3" if all(attends) else "lfm2"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"random {shape_name}")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv([shape["kv_heads"] * own for own in attends] if arch == "lfm2" else shape["kv_heads"])
    if arch == "lfm2":
        writer.add_shortconv_l_cache(TAPS)
    elif delta:
        _add_delta(writer, delta, dim, attends)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    if tokenizer is None:
        _add_made_up_tokens(writer, shape["vocab"])
    else:
        _add_tokens(writer, tokenizer, shape["vocab"])
    writer.add_add_bos_token(False)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = to_bf16(rng.standard_normal((rows, columns), np.float32) * 0.02)
        writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("token_embd.weight", shape["vocab"], hidden)
    for i in range(shape["layers"]):
        norm(f"blk.{i}.attn_norm.weight", hidden)
        if attends[i]:
            gated = 2 * q if delta else q
            for name, rows, columns in (("q", gated, hidden), ("k", kv, hidden), ("v", kv, hidden), ("output", hidden, q)):
                matrix(f"blk.{i}.attn_{name}.weight", rows, columns)
            for name in ("q", "k"):
                norm(f"blk.{i}.attn_{name}_norm.weight", dim)
        elif delta:
            keys, values = delta[0] * delta[1], delta[2] * delta[3]
            parts = (("attn_qkv", 2 * keys + values), ("attn_gate", values), ("ssm_beta", delta[2]), ("ssm_alpha", delta[2]))
            for name, rows in parts:
                matrix(f"blk.{i}.{name}.weight", rows, hidden)
            matrix(f"blk.{i}.ssm_out.weight", hidden, values)
            writer.add_tensor(f"blk.{i}.ssm_conv1d.weight", rng.standard_normal((2 * keys + values, DELTA_TAPS), np.float32))
            writer.add_tensor(f"blk.{i}.ssm_a", -np.exp(rng.standard_normal(delta[2], np.float32)))
            writer.add_tensor(f"blk.{i}.ssm_dt.bias", rng.standard_normal(delta[2], np.float32))
            norm(f"blk.{i}.ssm_norm.weight", delta[3])
        else:
            matrix(f"blk.{i}.shortconv.in_proj.weight", 3 * hidden, hidden)
            matrix(f"blk.{i}.shortconv.out_proj.weight", hidden, hidden)
            writer.add_tensor(f"blk.{i}.shortconv.conv.weight", rng.standard_normal((hidden, TAPS), np.float32))
        norm(f"blk.{i}.{'post_attention' if delta else 'ffn'}_norm.weight", hidden)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            matrix(f"blk.{i}.ffn_{name}.weight", rows, columns)
    norm("token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight", hidden)
    return _written(writer, path)


def _add_delta(writer: gguf.GGUFWriter, delta: tuple[int, ...], dim: int, attends: list[bool]) -> None:
    keys, key_dim, values, value_dim = delta
    writer.add_ssm_conv_kernel(DELTA_TAPS)
    writer.add_ssm_state_size(key_dim)
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * value_dim)
    writer.add_array("qwen35.attention.recurrent_layers", [not own for own in attends])
    writer.add_rope_dimension_count(dim // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_made_up_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_token_list(["t", "1", *(f"t{i}" for i in range(1, size - 1))])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


def _add_tokens(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """A folder's tokens, merges and chat template, filled up to `size` with tokens that no text has."""
    described = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids: dict[str, int] = dict(described["model"]["vocab"])
    special = {each["content"]: each["id"] for each in described["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for known, kind in ((ids, gguf.TokenType.NORMAL), (special, gguf.TokenType.CONTROL)):
        for token, token_id in known.items():
            tokens[token_id], types[token_id] = token, kind
    merges = described["model"]["merges"]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(special[config["eos_token"]])
    writer.add_chat_template(config["chat_template"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokenizer", type=Path, help="a folder; by default made-up tokens")
    options = parser.parse_args()
    write_gguf(options.file, options.shape, tokenizer=options.tokenizer)


if __name__ == "__main__":
    main()
