"""A model with its weights on a platform: what a worker runs, and what drafts for it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import block_bytes, near_bytes, state_bytes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.distributed.division import own_parts
from nanovllm_cli.distributed.group import Group
from nanovllm_cli.distributed.heads import own_spec
from nanovllm_cli.engine.placement import NEAR, sizes_of
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.engine.sight import Limits, Organ, Place, Sight, ears_of, eyes_of
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.layers.attention import gates_first
from nanovllm_cli.layers.delta import mamba_rows
from nanovllm_cli.layers.kit import Kit, Share
from nanovllm_cli.layers.latent import gates_before_queries
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec, PairSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.rotary import rescaled
from nanovllm_cli.models.text_encoder import TextEncoder
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.format import Format, Fp8, Integer
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.low_rank import Beside, Chosen, padded, side_by_side
from nanovllm_cli.quant.storage import WeightStorage
from nanovllm_cli.reading_spec import ReadingSpec
from nanovllm_cli.state_spec import DeltaSpec
from nanovllm_cli.streams_spec import GatedStreamsSpec
from nanovllm_cli.weights.adapted import Sums, adapt
from nanovllm_cli.weights.adapter import stamps
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.control_vector import LESS, Directions, check_led, read_directions
from nanovllm_cli.weights.fingerprint import stamps_of
from nanovllm_cli.weights.loader import WeightFormats, load_weights, read_spec
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.reading import read_reading
from nanovllm_cli.weights.tensor_names import matrix_types


class Sizes(NamedTuple):
    """Bytes of what a process has of a model: see LoadedModel."""

    weight_bytes: int
    read_bytes: int
    expert_bytes: int
    block_bytes: int
    state_bytes: int
    near_bytes: int


class LoadedModel:
    """Loads a checkpoint.

    own_spec: spec with what this process computes of each layer's heads; its KV cache is for these. group: the processes that
    compute the model together, if there are several.
    formats: how many numbers of its matrices are kept in which format; None is the compute type. num_multiplied_whole: how many
    are multiplied as whole numbers, int8 by int8. lora, led_by: scales and files of its adapters and of its control vectors.
    recordable: whether the weights' formats allow a step to be recorded. placement: where its weights are. sight: of a model that
    reads images.
    block_bytes: of one block of its KV cache over all layers; state_bytes: of one state. near_bytes: of a block in layers with a
    window.
    Raises what the loader raises, and DoesNotFitError before it takes memory that isn't there.
    """

    placement = NEAR

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        platform: Platform,
        progress: LoadProgress,
        group: Group | None = None,
        *,
        sees: bool = True,
    ) -> None:
        self.platform = platform
        self._group = group
        self._beside: Sums = {}
        reader = open_reader(checkpoint)
        self.spec: ModelSpec = rescaled(read_spec(checkpoint, reader), config.rope).reaching(config.max_model_len)
        if config.lora_modules and self.spec.encoder is not None:
            told = "adapters that requests choose, of a model whose encoder reads texts"
            raise UnsupportedError(told, "--lora FILE applies one to all requests")
        if (config.lora or config.lora_modules) and isinstance(self.spec.streams, GatedStreamsSpec):
            raise UnsupportedError(f"adapters of a {self.spec.architecture} model are not supported", "leave --lora out")
        if config.lora or config.lora_modules:
            checkpoint, self._beside = adapt(checkpoint, reader, self.spec, config.lora, config.lora_modules)
            reader = open_reader(checkpoint)
        self._chosen = Chosen() if config.lora_modules else None
        self.lora = [(each.scale, stamps(Path(each.name))) for each in config.lora]
        self.dtype = platform.resolve_dtype(matrix_types(checkpoint), self.spec)
        directions = self._directions(config)
        self.led_by = [(each.scale, stamps_of([Path(each.path)])) for each in config.control_vectors]
        platform.enter()
        self._formats = WeightFormats(checkpoint, reader, None if config.quant is None else parse_format(config.quant))
        self.own_spec = self.spec if group is None else own_spec(self.spec, group.rank, group.size)
        self.sight = self._sight(checkpoint, config, progress) if sees else None
        kit = self._kit()
        if group is None or group.rank == 0:  # the others load meanwhile
            needed = self._formats.num_bytes(self.dtype, platform.dense_bytes) + self._beside_bytes()
            needed //= 1 if group is None or platform.shares_memory else group.size
            sizes = partial(sizes_of, self.spec, self._matrix_bytes)
            organs = 0 if self.sight is None else self.sight.num_bytes
            self.placement = platform.place(self.spec, kit.backend, needed, sizes, organs)
        self.model = Decoder(self.spec, kit)
        platform.compile(self.dtype)
        if config.activations != "auto" and set(self.formats) == {None}:
            progress.note("activations changes nothing: no weight of this model is quantized")
        load_weights(self.model, checkpoint, reader, progress)
        if self.sight is not None and (reading := self.sight.senses.reading) is not None and reading.never:
            self.model.head.silence(reading.never)
        self.model.directions = {layer: each.to(self.model.device) for layer, each in directions.items()}
        self._beside = {}
        self._count()

    def _directions(self, config: EngineConfig) -> Directions:
        """Of control vectors, that can be added in the compute type."""
        if config.control_vectors:
            check_led(self.spec)
        width, layers = self.spec.hidden_size, len(self.spec.blocks)
        found = read_directions(config.control_vectors, config.control_vector_layers, width, layers)
        for layer, direction in found.items():
            if not direction.to(self.dtype).isfinite().all():
                raise CheckpointError(f"what control vectors add behind layer {layer} is too large for {self.dtype}", LESS)
        return found

    def _sight(self, checkpoint: Checkpoint, config: EngineConfig, progress: LoadProgress) -> Sight | None:
        """A model whose images or sounds nothing here can read still reads texts. Where several processes compute together
        towers are loaded now: what fails in the midst of a step ends all of them."""
        place, organs = Place(checkpoint, config.mmproj, self.dtype, self.platform.ops.device), []
        limits = Limits(config.image_max_tokens, config.video_fps, config.video_max_frames)
        parts = {"images are not read": partial(eyes_of, place, self.spec, limits),
                 "sounds are not heard": partial(ears_of, place, self.spec)}  # fmt: skip
        for otherwise, part in parts.items():
            try:
                organ = part()
                if organ is not None and self._group is not None:
                    organ.tower()
                organs += [] if organ is None else [organ]
            except (CheckpointError, UnsupportedError) as error:
                if config.mmproj is not None:
                    raise
                progress.note(f"{otherwise}: {error.message}")
        if (reading := read_reading(checkpoint, self.spec)) is not None:
            organs = [self._encoder_of(reading, config)]
        sight = Sight(*organs) if organs else None
        vision = None if sight is None else sight.senses.vision
        if vision is not None and vision.least_tokens > config.image_max_tokens:
            progress.note(f"an image has {vision.least_tokens} tokens at least: --image-max-tokens makes it no smaller")
        return sight

    def _encoder_of(self, reading: ReadingSpec, config: EngineConfig) -> Organ:
        """What reads texts: a part of the model, and loaded with it."""
        encoder = self.spec.encoder
        assert encoder is not None

        def load() -> TextEncoder:
            assert self.model.encoder is not None
            return TextEncoder(self.model.encoder, config.block_size)

        inner = max(mlp.intermediate_size * (1 + mlp.gated) for mlp in encoder.mlps)
        width = 4 * encoder.hidden_size + inner + 4 * encoder.attention.num_heads * encoder.attention.head_dim
        return Organ(reading, load, encoder.max_position * width * self.dtype.itemsize)

    def _kit(self) -> Kit:
        """For a model of own_spec, and whatever is known of its weights from now on."""
        self._storages: list[WeightStorage] = []
        self._encoder_bytes = 0
        self.formats: Counter[Format | None] = Counter()
        self.num_multiplied_whole = 0
        backend = self.platform.backend(self.own_spec, self.dtype)
        return Kit(self.dtype, self._make_storage, self.platform.ops, backend, group=self._group, chosen=self._chosen)

    def _count(self) -> None:
        """What depends on the weights' formats."""
        self.block_bytes = block_bytes(self.own_spec.mixers, self.model.backend)
        self.state_bytes = state_bytes(self.own_spec.mixers, self.model.backend)
        self.near_bytes = near_bytes(self.own_spec.mixers, self.model.backend)
        of_heads = sum(block.mixer.head_bytes for block in self.model.blocks if block.mixer is not None)
        self._own_bytes = of_heads + sum(storage.num_bytes for storage in self._storages)
        can = [storage.recordable for storage in self._storages]
        self.recordable = all(can) and all(each.recordable for block in self.model.blocks for each in block.mixtures)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.weight_bytes, self.read_bytes, self.expert_bytes, self.block_bytes, self.state_bytes, self.near_bytes)

    @property
    def weight_bytes(self) -> int:
        """Memory of all matrices; norms and biases are too small to count."""
        return self._own_bytes

    @property
    def read_bytes(self) -> int:
        """Of the matrices that a step reads whole: all but embeddings that are not the head as well, experts that nobody takes,
        and an encoder of texts."""
        embeddings = [] if self.spec.tied_head else [self.model.embedding]
        embeddings += [own] if (each := self.model.per_layer) is not None and (own := each.embedding) is not None else []
        return self._own_bytes - self._encoder_bytes - sum(embedding.weight.num_bytes for embedding in embeddings)

    @property
    def expert_bytes(self) -> int:
        """Of these, the bytes of experts, of which a token takes `spec.expert_share`."""
        return sum(each.expert_bytes for block in self.model.blocks for each in block.mixtures)

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint that the model uses."""
        return sum(torch.Size(slot.shape).numel() for slot in self.model.slots().values())

    def _make_storage(self, parts: dict[str, int], width: int, share: Share | None) -> WeightStorage:
        """Parts in the same format are one storage."""
        runs: list[tuple[Format | None, int]] = []
        if share is not None and not _keeps_blocks(share, [(self._formats.of(name), rows) for name, rows in parts.items()]):
            share = None
        ranges = [] if share is None or self._group is None else share.division.ranges(self._group.rank)
        own = parts if share is None else own_parts(parts, share.division.sections, list(map(len, ranges)))
        for name, num_rows in own.items():
            form = self._formats.of(name)
            if form is not None:
                form.check_width(width)
            self.formats[form] += parts[name] * width
            if runs and runs[-1][0] == form and not _stays_apart(form):
                runs[-1] = (form, runs[-1][1] + num_rows)
            else:
                runs.append((form, num_rows))
        far = self.placement.is_far(next(iter(parts)))
        storages = [self.platform.make_storage(form, num_rows, width, self.dtype, far=far) for form, num_rows in runs]
        weight = storages[0] if len(storages) == 1 else self.platform.stack(storages, self.dtype)
        if not self._beside.keys().isdisjoint(parts):
            weight = self._with_adapters(weight, parts, ranges)
        if share is not None and self._group is not None:
            weight = self.platform.divided(weight, share, self._group, self.dtype)
        self._storages.append(weight)
        self._encoder_bytes += weight.num_bytes if next(iter(parts)).startswith("encoder.") else 0
        whole = sum(storage.num_rows for storage in storages if isinstance(storage, CpuInteger))
        self.num_multiplied_whole += whole * width * sum(parts.values()) // sum(own.values())
        return weight

    def _matrix_bytes(self, name: str, num_rows: int, width: int) -> float:
        form = self._formats.of(name)
        return self.platform.dense_bytes(num_rows, width, self.dtype) if form is None else num_rows * form.row_bytes(width)

    def _beside_bytes(self) -> int:
        """At most: as if each weight had two others behind it, with adapters of the same ranks."""
        total = 0
        for sums in self._beside.values():
            ranks: Counter[int | None] = Counter()
            for each in sums:
                ranks[each.module] += 3 * each.down.shape[0]
            rank = sum(map(padded, ranks.values()))
            total += self.platform.dense_bytes(rank, sums[0].down.shape[1], self.dtype)
            total += self.platform.dense_bytes(sums[0].up.shape[0], rank, self.dtype)
        return total

    def _with_adapters(self, weight: WeightStorage, parts: dict[str, int], ranges: list[range]) -> WeightStorage:
        """With the products of adapters beside a weight's own: those that all rows have, and those that rows choose. ranges: its
        rows, if not all."""
        found = {each.module for name in parts for each in self._beside.get(name, ())}
        if None in found:
            weight = self.platform.with_adapters(weight, [self._side(weight, parts, ranges, None)], self.dtype, None)
        if modules := sorted(module for module in found if module is not None):
            sides = [self._side(weight, parts, ranges, module) for module in modules]
            weight = self.platform.with_adapters(weight, sides, self.dtype, self._chosen)
        return weight

    def _side(self, weight: WeightStorage, parts: dict[str, int], ranges: list[range], module: int | None) -> Beside:
        """What one module adds, or all of those that nobody chooses do."""
        added = [[Beside(each.down, self._rows_of(name, each.up.float(), count) * each.scale)
                  for each in self._beside.get(name, ()) if each.module == module] for name, count in parts.items()]  # fmt: skip
        side = side_by_side(list(parts.values()), added, weight.width, module or 0)
        largest = side.up.to(self.dtype).abs().float() @ side.down.to(self.dtype).abs().float().sum(1)
        if not bool(largest.isfinite().all()):
            raise CheckpointError(f"an adapter of {next(iter(parts))} has values that {self.dtype} cannot hold")
        return side._replace(up=torch.cat([side.up[own.start : own.stop] for own in ranges])) if ranges else side

    def _rows_of(self, name: str, up: torch.Tensor, count: int) -> torch.Tensor:
        """In the order in which the layer has the weight's, of which this one has so many."""
        place, _, part = name.removesuffix(".weight").rpartition(".")
        match part, self.spec.mixer_at(place) if part in ("q", "k", "q_b", "mamba_in") else None:
            case "q", AttentionSpec(gated=True, gate_apart=False) as mixer:
                return gates_first(up, mixer.head_dim)
            case "q_b", AttentionSpec(gated=True, gate_apart=False, gate_by_head=False, latent=LatentSpec() as latent):
                return gates_before_queries(up, latent)
            case "k", AttentionSpec(keys_are_values=True):
                return torch.cat([up, up])
            case "mamba_in", DeltaSpec() | PairSpec(state=DeltaSpec()) as mixer:
                state = mixer.state if isinstance(mixer, PairSpec) else mixer
                return next(rows for rows in mamba_rows(up, state) if len(rows) == count)
        return up


def _keeps_blocks(share: Share, parts: list[tuple[Format | None, int]]) -> bool:
    """Whether rows that a process quantizes by themselves come out as among all others of their part. Where they don't each can
    have all of them, unless these are heads. parts: their formats and rows."""
    begin, division = 0, share.division
    for form, num_rows in parts:
        if isinstance(form, Fp8) and form.block:
            every = (own for rank in range(division.size) for own in division.ranges(rank))
            starts = [own.start - begin for own in every if begin <= own.start < begin + num_rows]
            if any(start % form.block for start in starts):
                if share.gathers != "none":
                    return False
                raise UnsupportedError(
                    f"{form.name}: shares of the heads don't begin at multiples of {form.block} rows",
                    "take --quant fp8, or another number of processes",
                )
        begin += num_rows
    return True


def _stays_apart(form: Format | None) -> bool:
    """Parts of one storage share the order of their columns, and the scale of their input."""
    match form:
        case Integer():
            return form.ordered
        case Fp8():
            return form.activation == "static"
    return False
