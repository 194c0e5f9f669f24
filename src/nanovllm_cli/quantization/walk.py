"""A model walked through block by block with its calibration texts, its weights coming from files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.layers.entry import entry_of
from nanovllm_cli.layers.kit import Kit, Share
from nanovllm_cli.layers.per_layer import PerLayerInputs
from nanovllm_cli.mixer_spec import PairSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import EntrySpec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quantization.calibration import Calibration, EntryRows, PerLayerRows, Routed
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.state_spec import WkvSpec
from nanovllm_cli.weights.scoring import scoring_of, second_text_of
from nanovllm_cli.weights.tensor_names import checkpoint_name, matrix_types, names_of


class Walk:
    """A Calibration that finds the weights itself. sequences: token ids. UnsupportedError for some kinds of them."""

    def __init__(self, original: Original, sequences: Sequence[Sequence[int]], progress: LoadProgress) -> None:
        mixtures = [block.mlp for block in original.spec.blocks if isinstance(block.mlp, MoESpec)]
        if any(mixture.apart or mixture.routed_early for mixture in mixtures):
            name = original.spec.architecture
            raise UnsupportedError(
                f"a {name} model with experts is not calibrated yet: its router reads what they do not", "use --algorithm rtn"
            )
        if any(mixture.router is not None for mixture in mixtures):
            name = original.spec.architecture
            raise UnsupportedError(
                f"a {name} model is not calibrated yet: its routers read what those of other layers made", "use --algorithm rtn"
            )
        if any(isinstance(mixer, PairSpec) and mixer.ahead is not None for mixer in original.spec.mixers):
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated yet: its layers share weights", "use --algorithm rtn")
        if any(attention.values is not None for attention in original.spec.attentions):
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated yet: its values are of experts", "use --algorithm rtn")
        if original.spec.looks is not None:
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated: texts alone pass some layers by", "use --algorithm rtn")
        if original.spec.streams is not None:
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated yet: it has several streams", "use --algorithm rtn")
        if original.spec.passes is not None:
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated yet: its layers run several times", "use --algorithm rtn")
        if any(isinstance(mixer, WkvSpec) for mixer in original.spec.mixers):
            name = original.spec.architecture
            raise UnsupportedError(f"a {name} model is not calibrated yet: layers read the first's values", "use --algorithm rtn")
        self._original = original
        self._weights: dict[str, torch.Tensor] = {}
        self._routed: Routed | None = None
        self._names = names_of(original.checkpoint)
        platform = CpuPlatform(EngineConfig(device="cpu"), progress)
        dtype = platform.resolve_dtype(matrix_types(original.checkpoint), original.spec)
        platform.enter()
        platform.compile(dtype)
        embedding = torch.cat([rows.to(dtype) for rows in original.rows(self._names["embedding.weight"])])
        per_layer = self._per_layer_rows(sequences, platform, dtype) if original.spec.per_layer_width else None
        entry = None if original.spec.entry is None else self._entry_rows(original.spec.entry, platform, dtype)
        second_text = None
        if original.spec.tells_texts_apart:
            tokenizer = original.tokenizer()
            second_text = second_text_of(scoring_of(original.checkpoint, tokenizer), tokenizer, original.spec)
        self.calibration = Calibration(
            original.spec, sequences, embedding, platform, dtype, per_layer, entry, second_text
        )

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
        return self.calibration.observe_expert(expert, source, self.routed).hessian

    @property
    def routed(self) -> Routed:
        """Who takes which of the current block's experts."""
        self._routed = self._routed or self.calibration.routed()
        return self._routed

    def _entry_rows(self, entry: EntrySpec, platform: CpuPlatform, dtype: torch.dtype) -> EntryRows:
        spec = self._original.spec
        layer = entry_of(entry, spec.hidden_size, Kit(dtype, _dense(dtype), platform.ops, platform.backend(spec, dtype)))
        for slot, target in layer.slots().items():
            target.load(torch.cat(list(self._original.rows(self._names[slot]))), 0)

        @torch.inference_mode()
        def rows(x: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
            return layer(x, positions, segments)

        return rows

    def _per_layer_rows(
        self, sequences: Sequence[Sequence[int]], platform: CpuPlatform, dtype: torch.dtype
    ) -> PerLayerRows:
        """Of the table, which is as large as the rest of the model, only rows of tokens that occur are kept."""
        tokens = torch.tensor(sorted({token for sequence in sequences for token in sequence}))
        spec = replace(self._original.spec, vocab_size=len(tokens))
        inputs = PerLayerInputs(spec, Kit(dtype, _dense(dtype), platform.ops, platform.backend(spec, dtype)))
        for slot, target in inputs.slots().items():
            slices = self._original.rows(self._names[slot])
            target.load(_chosen(slices, tokens) if slot == "per_layer_embedding.weight" else torch.cat(list(slices)), 0)

        @torch.inference_mode()
        def rows(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return inputs(torch.searchsorted(tokens, ids), None, x)

        return rows

    def _floats(self, layer: int) -> dict[str, torch.Tensor]:
        there = self._original.reader.names()
        names = {slot: checkpoint_name(f"blocks.{layer}.{slot}", self._names) for slot in self.calibration.slots()}
        return {slot: torch.cat(list(self._original.rows(name))) for slot, name in names.items() if name in there}


def _dense(dtype: torch.dtype) -> Callable[[dict[str, int], int, Share | None], DenseStorage]:
    return lambda parts, width, share: DenseStorage(sum(parts.values()), width, dtype)


def _chosen(slices: Iterable[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """These of a matrix's rows, which comes in slices. rows: ascending."""
    found, first = [], 0
    for part in slices:
        own = rows[(rows >= first) & (rows < first + len(part))]
        found.append(part[own - first].clone())
        first += len(part)
    return torch.cat(found)
