"""Control vectors: logits as transformers has them with the same added to its layers' outputs, and files that are none, are broken
or are of another model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.config import ControlVector, EngineConfig
from nanovllm_cli.errors import CheckpointError, ModelNotFoundError, UnsupportedError, UsageError
from nanovllm_cli.weights.control_vector import read_directions
from test_models import CASES, prompts, whole_batch

KINDS = ["llama"]


def write_vector(path: Path, directions: dict[str, Any], architecture: str = "controlvector") -> str:
    """A control vector's file, as llama.cpp's cvector-generator writes one."""
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


@contextmanager
def led(reference: Any, directions: dict[int, torch.Tensor]) -> Iterator[None]:
    """Within, transformers adds these to what its layers give."""
    count = reference.config.num_hidden_layers
    layers = next(each for each in reference.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == count)
    with ExitStack() as stack:
        for layer, direction in directions.items():

            def hook(_module: Any, _inputs: Any, output: Any, added: torch.Tensor = direction) -> Any:
                return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

            stack.callback(layers[layer].register_forward_hook(hook).remove)
        yield


def test_equal_to_transformers_all(tmp_path: Path) -> None:
    import os
    for case in os.environ["TRY"].split(";") if os.environ.get("TRY") else CASES:
        try:
            check(case, tmp_path / str(abs(hash(case))))
            print("OK  ", case)
        except BaseException as e:
            print("FAIL", case, repr(e)[:200])


def check(case: str, folder: Path) -> None:
    """Prompts in one step, and then tokens that steps give which only the last layers' rows of some are asked of."""
    config = CASES[case]
    reference = random_model(config)
    save(reference, folder)
    width = config.hidden_size
    directions = random_directions(width, config.num_hidden_layers)
    vector = write_vector(folder / "vector.gguf", named(directions))
    worker = worker_for(folder, control_vectors=[(vector, -0.75)])
    added = {layer: each * -0.75 for layer, each in directions.items()}
    tokens = prompts(config.vocab_size)
    with torch.inference_mode(), led(reference, added):
        hidden = worker.model.run(worker.model.prepare(whole_batch(tokens)), worker.runner.cache)
        actual = worker.model.logits(hidden).split([len(ids) for ids in tokens])
        for ids, rows in zip(tokens, actual, strict=True):
            expected = reference(torch.tensor([ids])).logits[0]
            assert float((rows - expected).norm() / expected.norm()) < 1e-4
