"""What a folder's config.json says, as if all tools put it in one place; and generation_config.json.

    thinker_config, llm_config, language_config     of models that see or hear: what others have outside, or in text_config
    text_config.quantization_config                 Kimi K2.5's: outside, where others have it
    hf_quant_config.json                            NVIDIA's Model Optimizer's, before it wrote the same into config.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file

SETTINGS = ("quantization_config", "compression_config")
"""What says how a folder is quantized; the second, early versions of compressed-tensors wrote."""
_MODELOPT_CONFIG = "hf_quant_config.json"
_LLAVAS = [["LlavaForConditionalGeneration"], ["LlavaOnevisionForConditionalGeneration"]]


def read_config(folder: Path) -> dict[str, Any]:
    """CheckpointError where there is none, or it is broken."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no config.json beside the weights", "download the whole model, with its config.json"
        )
    config = read_json_file(folder / "config.json", MAX_CONFIG_BYTES, infinity=True)
    thinker = config.get("thinker_config")  # in which the first Qwen3-ASR folders have what others have outside
    config = {**thinker, **config} if isinstance(thinker, dict) else config
    language = config.get("language_config")
    if isinstance(language, dict) and config.get("architectures") in (["DeepseekOCRForCausalLM"], ["DeepseekOCR2ForCausalLM"]):
        config = {**language, **config}  # those with code of their own
    llm = config.get("llm_config")  # the same of InternVLs with code of their own
    if isinstance(llm, dict):
        tied = llm.get("tie_word_embeddings")
        config = {"text_config": llm, **config, **({} if tied is None else {"tie_word_embeddings": tied})}
    if config.get("architectures") == ["InternVLForConditionalGeneration"]:
        config.setdefault("tie_word_embeddings", True)  # which a head of its own overrules
    text, names = config.get("text_config"), config.get("architectures")
    if isinstance(text, dict) and text.get("tie_word_embeddings") is True and isinstance(names, list) and names[:1] in _LLAVAS:
        config["tie_word_embeddings"] = True  # as transformers has it, whatever the whole says
    config = _quantized_outside(config)
    beside = folder / _MODELOPT_CONFIG
    if config.get("quantization_config") is None and beside.is_file():
        said = read_json_file(beside, MAX_CONFIG_BYTES).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo") is not None:
            config["quantization_config"] = {"quant_method": "modelopt", **said}
    return config


def _quantized_outside(config: dict[str, Any]) -> dict[str, Any]:
    """With what the text model's part says of quantization, as Kimi K2.5's does, where others say it."""
    text = config.get("text_config")
    is_said = any(config.get(key) is not None for key in (*SETTINGS, "quantization"))
    if is_said or not isinstance(text, dict) or text.get("quantization_config") is None:
        return config
    rest = {key: value for key, value in text.items() if key != "quantization_config"}
    return {**config, "text_config": rest, "quantization_config": text["quantization_config"]}


def quantization_of(config: Mapping[str, Any]) -> Any:
    """What it says of how others quantized the folder, whatever that is; None where it says nothing."""
    return next((config[key] for key in SETTINGS if config.get(key)), None)


def as_published(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that was read from a folder, for another one: without a copy of what it says elsewhere."""
    if config.get("llm_config") is None or config.get("text_config") != config["llm_config"]:
        return config
    return {key: value for key, value in config.items() if key != "text_config"}


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the folder has none, the ends that config.json names, as in transformers' `GenerationConfig.from_model_config`."""
    path, inner = folder / "generation_config.json", config.get("text_config")
    if path.exists():
        return read_json_file(path, MAX_CONFIG_BYTES)
    named = [each.get("eos_token_id") for each in (config, inner) if isinstance(each, Mapping)]
    return next(({"eos_token_id": ends} for ends in named if ends is not None), {})
