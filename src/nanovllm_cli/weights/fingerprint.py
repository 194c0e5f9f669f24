"""Telling models apart by their files: what somebody kept of one must never be taken for another's.

Reading all weights would take as long as loading them. A few KiB of every tensor tell apart whatever was trained, merged or
quantized differently; sizes and times of the files tell apart what was edited in place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_cli.weights.files import ADAPTER_CONFIG, folder_of, is_setting, split_parts
from nanovllm_cli.weights.shapes import RANDOM

if TYPE_CHECKING:
    from nanovllm_cli.weights.checkpoint import Checkpoint

Stamps = list[tuple[str, int, int]]

SAMPLE_BYTES = 4096


def file_stamps(path: Path) -> Stamps:
    """(name, size, time of the last change in ns) of a model's files of tensors. Raises OSError where there are none to ask;
    made-up weights have none."""
    if str(path).startswith(RANDOM):
        return []
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".gguf"))
    else:
        files = [path.with_name(part) for part in split_parts(path.name)]
    return stamps_of(files)


def setting_stamps(path: Path) -> Stamps:
    """The same of what a model or an adapter has beside its tensors: config, tokenizer, template. A GGUF file has them within."""
    if str(path).startswith(RANDOM) or path.suffix == ".gguf":
        return []
    return stamps_of(sorted(file for file in folder_of(path).iterdir() if is_setting(file.name) or file.name == ADAPTER_CONFIG))


def stamps_of(files: Iterable[Path]) -> Stamps:
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of config, names, shapes and types, and of the beginning, middle and end of each tensor's bytes."""
    digest = hashlib.sha256(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode())
    for name in sorted(checkpoint.names()):
        digest.update(repr(checkpoint.info(name)).encode())
        data = checkpoint.raw(name).reshape(-1)
        for first in (0, (len(data) - SAMPLE_BYTES) // 2, len(data) - SAMPLE_BYTES):
            first = max(0, first)
            digest.update(data[first : first + SAMPLE_BYTES].numpy().tobytes())
        checkpoint.release(name)
    return digest.hexdigest()
