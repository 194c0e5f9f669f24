"""How a checkpoint's encoder reads a text: see `reading_spec.py`."""

from __future__ import annotations

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.reading_spec import ReadingSpec, TextTower
from nanovllm_cli.weights.checkpoint import Checkpoint


def gguf_reading(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, int]:
    """What GGUF files say of it, by keys without the architecture."""
    reading = read_reading(checkpoint, spec)
    return {} if reading is None else {"decoder_start_token_id": reading.begins[0]}


def read_reading(checkpoint: Checkpoint, spec: ModelSpec) -> ReadingSpec | None:
    """None where it has no encoder of texts. The decoder begins with "decoder_start_token_id"; files that say nothing of it mean
    the padding, as T5 was trained. CheckpointError for a token that is none."""
    if spec.encoder is None:
        return None
    if checkpoint.format == "gguf":
        arch = checkpoint.config["general.architecture"]
        read, padding = ConfigReader(checkpoint.config, "GGUF metadata"), "tokenizer.ggml.padding_token_id"
        start = f"{arch}.decoder_start_token_id"
    else:
        said = {**checkpoint.config, **{key: value for key, value in checkpoint.generation_config.items() if value is not None}}
        read, start, padding = ConfigReader(said, "config.json"), "decoder_start_token_id", "pad_token_id"
    token = read.integer(start, read.integer(padding, 0, least=0), least=0)
    if token >= spec.vocab_size:
        raise CheckpointError(f"{read.where}: {start!r} is {token}, of {spec.vocab_size} tokens", BROKEN)
    return ReadingSpec(TextTower(spec.encoder.num_layers, spec.encoder.read_work // spec.encoder.num_layers), (token,))
