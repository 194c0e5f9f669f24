"""Folders of models whose configs have factors of weights (Falcon-H1): a checkpoint that has them in its weights, and ones in its
config. Numbers are multiplied in float32, and rounded to the type that they are stored in, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import Sections
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, as_bytes
from nanovllm_cli.weights.folder_config import quantization_of
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.tensor_names import names_of


def folded(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` itself where there are none. UnsupportedError where its weights are quantized."""
    if checkpoint.format != "hf":
        return checkpoint
    try:
        family, config = hf_family(checkpoint.config), text_config(checkpoint.config)
    except NanovllmError:  # what reads the model tells of it
        return checkpoint
    if family.folding is None:
        return checkpoint
    read = ConfigReader({**family.defaults, **config}, "config.json")
    sections = {name: rows for name, rows in family.folding.sections(read).items() if any(factor != 1 for _, factor in rows)}
    if not sections:
        return checkpoint
    if quantization_of(checkpoint.config) is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: quantized weights that its config has factors of",
            "take the unquantized model, or a GGUF file of it",
        )
    names = names_of(checkpoint)
    patterns = {re.escape(names[ours]).replace(r"\{i\}", r"\d{1,6}"): rows for ours, rows in sections.items()}
    found = {
        name: rows for name in checkpoint.names() for pattern, rows in patterns.items() if re.fullmatch(pattern, name)
    }
    without = family.folding.without(config)
    whole = without if config is checkpoint.config else {**checkpoint.config, "text_config": without}
    return _Folded(checkpoint, found, whole)


class _Folded(CheckpointView):
    def __init__(self, inner: Checkpoint, sections: Mapping[str, Sections], config: Mapping[str, object]) -> None:
        super().__init__(inner)
        self.config = config
        self._sections = sections

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        stored = super().tensor(name, rows)
        if name not in self._sections or not stored.is_floating_point():
            return stored
        first, end = (0, stored.shape[0]) if rows is None else rows
        factors = torch.cat([
            torch.tensor([factor]).expand(end if count is None else count) for count, factor in self._sections[name]
        ])[first:end]  # fmt: skip
        if len(factors) != stored.shape[0]:  # the loader tells which shape it should have
            return stored
        product = (stored.float() * factors.view(-1, *[1] * (stored.dim() - 1))).to(stored.dtype)
        if bool((stored.isfinite() & ~product.isfinite()).any()):
            what = f"times its factor, tensor {name!r} has values that {stored.dtype} cannot hold"
            raise CheckpointError(f"{self.path}: {what}", DOWNLOAD_AGAIN)
        return product

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name)) if name in self._sections else super().raw(name)
