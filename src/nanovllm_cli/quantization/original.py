"""The model that is to be quantized, opened once for all that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.overrides import Override
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm_cli.weights.files import folder_of
from nanovllm_cli.weights.folded import folded
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tokenizer import load_tokenizer
from nanovllm_cli.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class Original:
    """name: what the user calls it."""

    name: str
    checkpoint: Checkpoint
    reader: WeightReader
    spec: ModelSpec

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return folder_of(self.checkpoint.path)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.checkpoint)

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """A weight of the checkpoint in float32, some MiB at a time; dequantized where it is stored otherwise."""
        form = self.reader.format(name)
        for rows, _ in self.reader.slices(name):
            if isinstance(rows, torch.Tensor):
                yield rows.float()
            else:
                assert form is not None
                yield form.dequantize(rows)


@contextmanager
def open_original(name: str, path: Path, overrides: Sequence[Override] = ()) -> Iterator[Original]:
    """overrides: see `open_checkpoint`. Raises what that, `open_reader` and `read_spec` raise."""
    with open_checkpoint(path, overrides=overrides) as checkpoint:
        reader = open_reader(checkpoint)
        checkpoint = folded(checkpoint)  # what is copied is as what is read
        yield Original(name, checkpoint, reader, read_spec(checkpoint, reader))
