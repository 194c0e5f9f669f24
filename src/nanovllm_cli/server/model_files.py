"""What the files of a model say to those who list models: nothing is loaded for it, and no weight is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.server.ports import FileFacts
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.fingerprint import file_stamps
from nanovllm_cli.weights.mmproj import what_comes_by
from nanovllm_cli.weights.source import resolve


def read_files(path: Path, config: EngineConfig, created: float) -> FileFacts:
    """created: counts as their time where weights are made up, and have no files. Raises NanovllmError."""
    with open_checkpoint(path, overrides=config.overrides) as checkpoint:
        facts = facts_of(checkpoint)
    spec = facts.spec
    stamps = file_stamps(path)
    told = repr((spec, stamps, config.quant)).encode()
    return FileFacts(
        "gguf" if checkpoint.format == "gguf" else "safetensors",
        spec.architecture,
        facts.num_parameters,
        facts.num_bytes,
        config.quant or facts.stored,
        min(spec.max_position, config.max_model_len or spec.max_position),
        spec.hidden_size,
        spec.num_layers,
        spec.has_head and not facts.embedding.judges,
        not facts.embedding.judges and (facts.embedding.pooling is not None or not spec.has_head),
        facts.vision is not None or _sees_by_mmproj(path, config),
        hashlib.sha256(told).hexdigest(),
        max((time / 1e9 for _, _, time in stamps), default=created),
    )


def _sees_by_mmproj(path: Path, config: EngineConfig) -> bool:
    """Whether there is a file that it will be loaded with, and not to hear by."""
    found: str | Path | None = config.mmproj
    if found is None and config.mmproj_auto:
        found = resolve(str(path), offline=True).mmproj
    return found is not None and "images" in what_comes_by(Path(found))
