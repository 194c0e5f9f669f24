"""Control vectors' files, as llama.cpp's cvector-generator writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter


def write_vector(path: Path, directions: dict[str, Any], architecture: str = "controlvector") -> str:
    """Tensors by their names. Gives the path."""
    writer = GGUFWriter(path, architecture)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for name, each in directions.items():
        values = each.numpy() if isinstance(each, torch.Tensor) else each
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def random_directions(width: int, layers: int, seed: int = 0, size: float = 1.0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(width, generator=generator) * size for layer in range(1, layers)}


def named(directions: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"direction.{layer}": each for layer, each in directions.items()}
