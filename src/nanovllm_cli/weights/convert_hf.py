"""The small files of a Hugging Face folder for a GGUF model: config.json, generation_config.json and the tokenizer's.

What the file says and a folder has no place for is named in `notes`. What would make another model of it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, spec_from_hf
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.qwen_next import QWEN2_MOE
from nanovllm_cli.models.registry import HF_ARCHITECTURES, HF_BODIES, hf_family
from nanovllm_cli.text.hf_export import HFTokenizer, hf_tokenizer
from nanovllm_cli.weights.checkpoint import SAMPLING_KEYS, Checkpoint
from nanovllm_cli.weights.convert_names import activation_of, attention_of, differences, shortest
from nanovllm_cli.weights.convert_rope import scaling_for_config
from nanovllm_cli.weights.pooling import embedding_of, folder_files
from nanovllm_cli.weights.writer import as_json

_MODEL_TYPES = {
    LLAMA: "llama", MISTRAL: "mistral", MIXTRAL: "mixtral", QWEN2: "qwen2", QWEN2_MOE: "qwen2_moe", QWEN3: "qwen3",
    QWEN3_MOE: "qwen3_moe",
}  # fmt: skip
# What has no meaning outside of a GGUF file, or is what the file holds anyway.
_OF_THE_FILE = {
    "general.architecture", "general.type", "general.file_type", "general.quantization_version", "general.size_label",
    "general.alignment", "tokenizer.chat_templates", "tokenizer.ggml.pre", "split.no", "split.count", "split.tensors.count",
}  # fmt: skip
# GGUF keys -> what a model card calls them, where the `gguf` package looks for them (gguf/metadata.py)
_CARD = {
    **{f"general.{key}": key for key in ("name", "author", "version", "organization", "finetune", "basename", "description")},
    "general.license": "license", "general.license.name": "license_name", "general.license.link": "license_link",
    "general.tags": "tags", "general.languages": "language",
}  # fmt: skip
# Models and data that a model was made from: the card names repositories of the hub, and the package makes the rest of the name.
_ORIGINS = {"general.base_model": "base_model", "general.dataset": "datasets"}
_ORIGIN = re.compile(r"(general\.[a-z_]+)\.(\d{1,4})\.(name|organization|version|repo_url)")
_HUB = "https://huggingface.co/"
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scale_linear", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "pooling_type",
}  # fmt: skip
_READ_TOKENIZER = {
    "model", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    *(f"{role}_token_id" for role in ("bos", "eos", "unknown", "padding", "eot", "eom")),
}  # fmt: skip


class HFFiles(NamedTuple):
    """`files`: name -> content."""

    files: dict[str, bytes]
    tokenizer: HFTokenizer
    notes: list[str]


def hf_files(checkpoint: Checkpoint, spec: ModelSpec, family: Family, dtype: torch.dtype) -> HFFiles:
    """Everything of the folder but the weights, which will be of `dtype`."""
    metadata = checkpoint.config
    arch = metadata["general.architecture"]
    context_length = _integer(metadata.get(f"{arch}.context_length", 2048))
    tokenizer = hf_tokenizer(metadata, context_length)
    config = _config(spec, family, context_length, dtype) | _mlp_config(spec, family, metadata.get(f"{arch}.feed_forward_length"))
    ids = {"bos_token_id": tokenizer.tokenizer.bos_id, "eos_token_id": tokenizer.tokenizer.eos_id}
    config |= {key: value for key, value in ids.items() if value is not None}
    _check(config, spec)
    embedding = embedding_of(checkpoint)
    if embedding.refusal is not None or embedding.layers:
        what = "how it ranks" if embedding.ranks else "which dense layers it has"
        raise UnsupportedError(f"{checkpoint.path}: no folder is made that says {what}", "keep the model as GGUF")
    pooling = embedding.pooling
    files = {
        "config.json": as_json(config),
        "generation_config.json": as_json(_generation(checkpoint, tokenizer)),
        **tokenizer.files,
        **({} if pooling is None else folder_files(embedding.pooling_of_texts, spec.hidden_size)),
    }
    said = {name: metadata[key] for key, name in _CARD.items() if isinstance(metadata.get(key), str | list)}
    origins = _origins(metadata)
    if card := said | {_ORIGINS[prefix]: repositories for prefix, repositories in origins.items()}:
        files["README.md"] = _front_matter(card)
    unused = [key for key in _unused_keys(metadata) if not (_CARD.get(key) in said or _is_origin(key, origins))]
    notes = [f"GGUF metadata: {', '.join(unused)}"[:1000]] if unused else []
    return HFFiles(files, tokenizer, notes + tokenizer.notes)


def _config(spec: ModelSpec, family: Family, context_length: int, dtype: torch.dtype) -> dict[str, Any]:
    attention, rope = attention_of(spec), attention_of(spec).rope
    assert rope is not None
    config: dict[str, Any] = {
        "architectures": [_architecture(family, spec)],
        "model_type": _MODEL_TYPES[family],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": activation_of(spec),
        "max_position_embeddings": context_length,
        "rms_norm_eps": shortest(spec.norm.eps),
        "rope_theta": shortest(rope.theta),
        "rope_scaling": scaling_for_config(rope, context_length),
        "tie_word_embeddings": spec.tied_head and spec.has_head,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope.dim != attention.head_dim:
        config["partial_rotary_factor"] = rope.dim / attention.head_dim
    if family.qkv_bias is None:
        config["attention_bias"] = attention.out_bias
    if family is LLAMA:
        config["mlp_bias"] = spec.dense_mlp is not None and spec.dense_mlp.bias
    if family.has_window:
        config["sliding_window"] = attention.window
    if family.window_switch is not None:
        config |= {family.window_switch: attention.window is not None, "max_window_layers": 0}
    return config


def _architecture(family: Family, spec: ModelSpec) -> str:
    known = HF_ARCHITECTURES if spec.has_head else HF_BODIES
    return next(name for name, each in known.items() if each is family)


def _mlp_config(spec: ModelSpec, family: Family, said: Any) -> dict[str, Any]:
    """Sizes and experts, under the names that the family has for them. said: by the file, of layers without experts."""
    mixture, keys = spec.mixture, family.experts
    size = 0 if spec.dense_mlp is None else spec.dense_mlp.intermediate_size
    if mixture is None or keys is None:
        return {"intermediate_size": size}
    if size and family is MIXTRAL:
        raise UnsupportedError("config.json cannot say this of a Mixtral: layers without experts", "keep the model as GGUF")
    config: dict[str, Any] = {
        "intermediate_size": said if size or type(said) is int else mixture.expert.intermediate_size,
        keys.size: mixture.expert.intermediate_size,
        keys.count[0]: mixture.num_experts,
        keys.taken: mixture.experts_per_token,
    }
    if isinstance(keys.norm_topk, str):
        config[keys.norm_topk] = mixture.norm_topk
    if keys.shared_size is not None:
        config[keys.shared_size] = 0 if mixture.shared is None else mixture.shared.intermediate_size
    if size:
        config["mlp_only_layers"] = [i for i, block in enumerate(spec.blocks) if isinstance(block.mlp, MLPSpec)]
    return config


def _check(config: dict[str, Any], spec: ModelSpec) -> None:
    """Reads the config as it will be read, and refuses where that is another model."""
    found = spec_from_hf(config, hf_family(config))
    found = replace(found, tied_head=found.tied_head or not spec.has_head)
    theirs, ours = attention_of(found).rope, attention_of(spec).rope
    assert theirs is not None
    if (
        ours is not None and ours.scaling == "divisors" and theirs.scaling in ("llama3", "longrope")
    ):  # verified when chosen
        spec = spec.with_attention(rope=theirs)
    lost = differences(spec, found)
    if lost:
        raise UnsupportedError(
            f"config.json cannot say this of {config['architectures'][0]}: {', '.join(lost)}", "keep the model as GGUF"
        )


def _generation(checkpoint: Checkpoint, tokenizer: HFTokenizer) -> dict[str, Any]:
    ours = tokenizer.tokenizer
    ids = {"bos_token_id": ours.bos_id, "eos_token_id": list(ours.eos_ids) or None, "pad_token_id": ours.pad_id}
    sampling = {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in checkpoint.generation_config.items()
    }
    greedy = sampling.get("temperature") == 0
    if greedy:
        del sampling["temperature"]  # transformers wants it positive, and says greedy by do_sample
    return {
        **{key: value for key, value in ids.items() if value is not None},
        **({"do_sample": not greedy} if sampling.keys() & SAMPLING_KEYS.values() or greedy else {}),
        **sampling,
    }


def _front_matter(card: Mapping[str, Any]) -> bytes:
    """A model card that says what the file says of itself; JSON values are YAML values."""
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in card.items()]
    return "\n".join(["---", *lines, "---", ""]).encode()


def _origins(metadata: Mapping[str, Any]) -> dict[str, list[str]]:
    """Keys of _ORIGINS -> org/name of each, in order, where all of them are on the hub."""
    urls: dict[str, dict[int, str]] = {prefix: {} for prefix in _ORIGINS}
    for key, value in metadata.items():
        if (match := _ORIGIN.fullmatch(key)) and match[3] == "repo_url" and match[1] in urls:
            urls[match[1]][int(match[2])] = str(value)
    return {
        prefix: [found[i].removeprefix(_HUB) for i in sorted(found)]
        for prefix, found in urls.items()
        if found and all(url.startswith(_HUB) for url in found.values())
        and metadata.get(f"{prefix}.count") == len(found)
    }  # fmt: skip


def _is_origin(key: str, origins: Mapping[str, list[str]]) -> bool:
    """Whether the names of `origins` say what this key says."""
    match = _ORIGIN.fullmatch(key)
    return (match[1] if match else key.removesuffix(".count")) in origins


def _unused_keys(metadata: Mapping[str, Any]) -> list[str]:
    architecture = metadata["general.architecture"]
    known = (
        _OF_THE_FILE | {f"{architecture}.{key}" for key in _READ} | {f"tokenizer.ggml.{key}" for key in _READ_TOKENIZER}
    )
    prefixes = ("general.sampling.", "tokenizer.chat_template")
    return sorted(key for key in metadata if key not in known and not key.startswith(prefixes))


def _integer(value: Any) -> int:
    assert isinstance(value, int), "read_spec has checked it"
    return value
