"""A model walked through block by block with its calibration texts, its weights coming from files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.calibration import Calibration, Routed
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.weights.tensor_names import checkpoint_name, names_of


class Walk:
    """A Calibration that finds the weights itself. sequences: token ids. UnsupportedError for some kinds of them."""

    def __init__(self, original: Original, sequences: Sequence[Sequence[int]], progress: LoadProgress) -> None:
        if any(attention.value_norm for attention in original.spec.attentions):
            name = original.spec.architecture
            raise UnsupportedError(
                f"a {name} model is not calibrated yet: its layers read what others have", "use --algorithm rtn"
            )
        self._original = original
        self._weights: dict[str, torch.Tensor] = {}
        self._routed: Routed | None = None
        self._names = names_of(original.checkpoint)
        platform = CpuPlatform(EngineConfig(device="cpu"), progress)
        names = original.checkpoint.names()
        dtype = platform.resolve_dtype({original.checkpoint.info(name).dtype_name for name in names})
        platform.enter()
        platform.compile(dtype)
        embedding = torch.cat([rows.to(dtype) for rows in original.rows(self._names["embedding.weight"])])
        self.calibration = Calibration(original.spec, sequences, embedding, platform, dtype)

    def enter(self, layer: int) -> dict[str, torch.Tensor]:
        """The original floats of a block by slot ("q.weight"), loaded when it is entered first. The stream has come through the
        blocks before it with what was loaded into them last."""
        while self.calibration.layer < layer:
            if not self._weights:
                self.calibration.load(self._floats(self.calibration.layer))
            self.calibration.advance()
            self._weights, self._routed = {}, None
        if not self._weights:
            self._weights = self._floats(layer)
            self.calibration.load(self._weights)
        return self._weights

    def hessian(self, source: str, expert: int | None = None) -> torch.Tensor:
        """Of what the current block's weights read, or an expert's: see EVERY_INPUT. Who takes which expert is found out once a
        block: when all before its mixture is loaded."""
        if expert is None:
            return self.calibration.observe((source,))[source].hessian
        self._routed = self._routed or self.calibration.routed()
        return self.calibration.observe_expert(expert, source, self._routed).hessian

    def _floats(self, layer: int) -> dict[str, torch.Tensor]:
        there = self._original.reader.names()
        names = {slot: checkpoint_name(f"blocks.{layer}.{slot}", self._names) for slot in self.calibration.slots()}
        return {slot: torch.cat(list(self._original.rows(name))) for slot, name in names.items() if name in there}
