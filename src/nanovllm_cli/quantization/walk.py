"""A model walked through block by block with its calibration texts, its weights coming from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import DeltaSpec, MoESpec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.calibration import Calibration
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.weights.tensor_names import checkpoint_name, names_of


class Walk:
    """A Calibration that finds the weights itself. sequences: token ids. UnsupportedError for some kinds of them."""

    def __init__(self, original: Original, sequences: Sequence[Sequence[int]], progress: LoadProgress) -> None:
        if any(isinstance(block.mlp, MoESpec) for block in original.spec.blocks):
            raise UnsupportedError(
                "a model with experts is not calibrated yet: many of them would see few of the texts", "use --algorithm rtn"
            )
        if any(attention.value_norm for attention in original.spec.attentions):
            name = original.spec.architecture
            raise UnsupportedError(
                f"a {name} model is not calibrated yet: its layers read what others have", "use --algorithm rtn"
            )
        if any(attention.latent is not None for attention in original.spec.attentions):
            raise UnsupportedError("a model with latent attention is not calibrated yet", "use --algorithm rtn")
        if any(isinstance(mixer, DeltaSpec) and mixer.mamba for mixer in original.spec.mixers):
            raise UnsupportedError("a model with state spaces is not calibrated yet", "use --algorithm rtn")
        self._original = original
        self._names = names_of(original.checkpoint)
        platform = CpuPlatform(EngineConfig(device="cpu"), progress)
        names = original.checkpoint.names()
        dtype = platform.resolve_dtype({original.checkpoint.info(name).dtype_name for name in names})
        platform.enter()
        platform.compile(dtype)
        embedding = torch.cat([rows.to(dtype) for rows in original.rows(self._names["embedding.weight"])])
        self.calibration = Calibration(original.spec, sequences, embedding, platform, dtype)

    def enter(self, layer: int) -> dict[str, torch.Tensor]:
        """The floats of a block by slot ("q.weight"), loaded. Blocks before it that nobody has left are as they were."""
        while self.calibration.layer < layer:
            self.calibration.load(self._weights(self.calibration.layer))
            self.calibration.advance()
        weights = self._weights(layer)
        self.calibration.load(weights)
        return weights

    def leave(self, changed: Mapping[str, torch.Tensor]) -> None:
        """On to the next block, through this one with these slots changed."""
        self.calibration.load(changed)
        self.calibration.advance()

    def _weights(self, layer: int) -> dict[str, torch.Tensor]:
        there = self._original.reader.names()
        names = {slot: checkpoint_name(f"blocks.{layer}.{slot}", self._names) for slot in self.calibration.slots()}
        return {slot: torch.cat(list(self._original.rows(name))) for slot, name in names.items() if name in there}
