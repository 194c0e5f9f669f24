"""A plan: what one model would take on this machine, and how fast it could be at most, as plain values.

It is made of headers (`facts.py`) and the engine's own arithmetic; the machine's speed is given to it. `check.py` compares it
with what happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanovllm_cli.attention.kv_cache import CacheLayout
from nanovllm_cli.config import EngineConfig, KVCacheDType
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.memory import context_of, near_of
from nanovllm_cli.engine.placement import bytes_of, sizes_of
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.engine.platforms import select_platform
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.outline import shapes_of
from nanovllm_cli.models.rotary import rescaled
from nanovllm_cli.planning import estimate
from nanovllm_cli.planning.estimate import BATCHES, Speed, UnitBytes
from nanovllm_cli.planning.facts import Facts, facts_of, reader_of
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.tensor_names import matrix_types

FORMATS = {
    "int8": ("int8",), "fp8": ("fp8",), "int4": ("int4", "int4:group=64", "int4:group=32"), "nf4": ("nf4", "nf4:group=32"),
}  # fmt: skip
"""By what they are called, and of each the first that a model's rows divide into."""
CACHE_TYPES: tuple[KVCacheDType, ...] = ("auto", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Weights in one format. quant: what --quant would say, None as they are stored. total_bytes, fits: with the KV cache of the
    plan's answers and context. longest_context: of each answer. decode, prefill: most tokens a second of one sequence, None
    where the machine was not measured, or a GPU reads far_bytes of the weights from the machine's memory."""

    quant: str | None
    format: str
    weight_bytes: int
    total_bytes: int
    fits: bool
    longest_context: int
    decode: float | None
    prefill: float | None
    far_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheRow:
    """The KV cache of the plan's batches, of one length, and whether each fits beside the weights as they are stored."""

    cache_type: str
    context: int
    num_bytes: tuple[int, ...]
    fits: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """answers, context: how many are to run at once, of how many tokens each. free_bytes: memory that can be had now, where
    `processor` computes. units: what the KV cache is made of. cache_room: what the cache gets beside
    the first format's weights. left_out: of usual formats that this model can't have, why not."""

    facts: Facts
    answers: int
    context: int
    batches: tuple[int, ...]
    processor: str
    dtype: str
    free_bytes: int
    units: UnitBytes
    cache_room: int
    formats: tuple[FormatRow, ...]
    cache: tuple[CacheRow, ...]
    speed: Speed | None
    left_out: tuple[str, ...] = ()
    processes: int = 1

    @property
    def cache_bytes(self) -> int:
        """Of the first format."""
        return self.formats[0].total_bytes - estimate.total_bytes(self.formats[0].weight_bytes, 0, self.processes)

    @property
    def fits(self) -> bool:
        """As it would be run: in the first format."""
        return self.formats[0].fits

    def as_json(self) -> dict[str, Any]:
        spec = self.facts.spec
        return {
            "architecture": spec.architecture, "parameters": self.facts.num_parameters,
            "active_parameters": self.facts.num_active, "stored": self.facts.stored,
            "stored_bytes": self.facts.num_bytes, "disk_bytes": self.facts.disk_bytes,
            "context": spec.max_position, "layers": spec.num_layers,
            "processor": self.processor, "dtype": self.dtype, "free_bytes": self.free_bytes, "fits": self.fits,
            "processes": self.processes, "planned_for": {"answers": self.answers, "context": self.context},
            "kv_cache_room_bytes": self.cache_room,
            "weights": [asdict(row) for row in self.formats], "left_out": list(self.left_out),
            "kv_cache": [asdict(row) | {"batches": list(self.batches)} for row in self.cache],
            "roofline": None if self.speed is None else {
                "read_gb_s": self.speed.read_gb_s, "gflops": dict(self.speed.gflops)
            },
        }  # fmt: skip


def make_plan(
    checkpoint: Checkpoint,
    config: EngineConfig,
    formats: Sequence[str] | None,
    speed: Speed | None,
    *,
    answers: int = 1,
    headers_only: bool = False,
    progress: LoadProgress | None = None,
) -> Plan:
    """formats: those that --quant asks for; None compares the usual ones with what is stored. answers: how many at once.
    headers_only: see `facts_of`. progress: hears of settings that change nothing here.

    Raises what opening a model raises, UsageError or UnsupportedError for a format that was asked for and can't be, and
    DoesNotFitError for a context that the model does not have.
    """
    platform = select_platform(config, progress)
    facts = facts_of(checkpoint, headers_only=headers_only)
    facts = replace(facts, spec=rescaled(facts.spec, config.rope).reaching(config.max_model_len))
    reader = reader_of(checkpoint, headers_only=headers_only)
    dtype = compute_type(checkpoint, facts.spec, platform)
    layout = platform.backend(facts.spec, dtype)
    processes = config.tensor_parallel_size
    units = estimate.unit_bytes(facts.spec, layout, processes)
    gpus = 1 if platform.shares_memory else processes  # taken to be alike: this one is looked at
    free, usable = gpus * platform.available_bytes(), gpus * _usable(platform)
    size, most = config.block_size, facts.spec.max_position
    context_of(config, most)  # refuses a context that the model does not have
    lengths = estimate.contexts(facts.spec, config.max_model_len)
    context = config.max_model_len or lengths[0]
    cache_bytes = estimate.kv_bytes(facts.spec, layout, config, context, answers)
    behind = near_of(facts.spec, config, units.near)
    cache_read = estimate.read_bytes(facts.spec, layout, size, estimate.PROMPT_LEN)

    def weights_in(quant: str | None) -> estimate.WeightPlan:
        wanted = _format(quant, platform, facts, dtype)
        return estimate.plan_weights(facts, checkpoint, reader, dtype, wanted, platform.dense_bytes, config.activations)

    found: list[tuple[str | None, estimate.WeightPlan]] = []
    left_out: list[str] = []
    if formats is None:
        for names in _candidates(facts, platform):
            possible, reason = _first_possible(names, weights_in)
            found += possible
            left_out += [] if possible else [reason]
    else:
        found = [(quant, weights_in(quant)) for quant in formats]
    rows, rooms = [], []
    for quant, weights in found:
        total = estimate.total_bytes(weights.num_bytes, cache_bytes, processes)
        far = _far_bytes(platform, facts.spec, layout, weights.num_bytes // gpus)
        near = weights.num_bytes - (far or 0)
        room = estimate.cache_room(config, usable, near, is_cpu=kind_of(platform) == "cpu")
        context_len = estimate.longest_context(room, units, behind, size, answers, most)
        told = None if far else speed
        decode = None if told is None or not facts.spec.has_head else estimate.decode_rate(facts, weights, cache_read, told)
        prefill = None if told is None else estimate.prefill_rate(facts, weights, told, config.max_num_batched_tokens)
        fits = cache_bytes <= room and far is not None
        sizes = (weights.num_bytes, total, fits, context_len)
        rows.append(FormatRow(quant, weights.format, *sizes, decode, prefill, far or 0))
        rooms.append(room)
    batches = tuple(sorted({*BATCHES, answers}))
    cache = tuple(_cache_rows(facts.spec, config, dtype, lengths, batches, rooms[0]))
    name = str(dtype).removeprefix("torch.")
    return Plan(
        facts, answers, context, batches, kind_of(platform), name, free, units, rooms[0], tuple(rows), cache,
        speed, tuple(left_out), processes,
    )  # fmt: skip


def device_of(config: EngineConfig) -> str:
    """Where `config` would have it computed: cpu, cuda or cuda:N. UnsupportedError where there is no such GPU."""
    kind = kind_of(select_platform(config, None))
    return config.device if config.device.startswith(kind) else kind


def compute_type(checkpoint: Checkpoint, spec: ModelSpec, platform: Platform) -> torch.dtype:
    """What `platform` would compute this model in."""
    return platform.resolve_dtype(matrix_types(checkpoint), spec)


def kind_of(platform: Platform) -> str:
    """cpu or cuda."""
    return platform.processor.split(" ")[0]


def _candidates(facts: Facts, platform: Platform) -> list[tuple[str | None, ...]]:
    """As they are stored; and rounded, where they are plain numbers and the device has something for that."""
    is_plain = facts.stored in ("F32", "F16", "BF16", "F64")
    return [(None,), *FORMATS.values()] if is_plain and kind_of(platform) == "cpu" else [(None,)]


def _first_possible(
    names: Sequence[str | None],
    weights_in: Callable[[str | None], estimate.WeightPlan],
) -> tuple[list[tuple[str | None, estimate.WeightPlan]], str]:
    """The first of these formats that the model can have, if there is one, and why it can't have the one tried before."""
    reason = ""
    for quant in names:
        try:
            return [(quant, weights_in(quant))], reason
        except UnsupportedError as error:
            reason = error.message
    return [], reason


def _format(quant: str | None, platform: Platform, facts: Facts, dtype: torch.dtype) -> Format | None:
    form = None if quant is None else parse_format(quant)
    if form is not None and kind_of(platform) != "cpu":
        platform.make_storage(form, 1, facts.spec.hidden_size, dtype)  # says why not
    return form


def _far_bytes(platform: Platform, spec: ModelSpec, layout: CacheLayout, num_bytes: int) -> int | None:
    """Of weights of so many bytes, those that the platform's GPU has no room for, as if all numbers took as many; None where the
    machine has none either."""
    if not isinstance(platform, CudaPlatform):
        return 0
    each = num_bytes / sum(map(math.prod, shapes_of(spec).values()))
    sizes = sizes_of(spec, lambda _, num_rows, width: num_rows * width * each)
    try:
        return bytes_of(platform.place(spec, layout, num_bytes, lambda: sizes).far, sizes)
    except DoesNotFitError:
        return None


def _usable(platform: Platform) -> int:
    """Memory that the engine may take now: of a GPU no more than its share."""
    if not isinstance(platform, CudaPlatform):
        return platform.available_bytes()
    memory = platform.device.memory()
    return memory.free - int(memory.total * (1.0 - platform.config.gpu_memory_utilization))


def _cache_rows(
    spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, lengths: list[int], batches: tuple[int, ...], room: int
) -> Iterator[CacheRow]:
    """Of the types that were asked for, or of those that there are. room: bytes beside the weights."""
    types = {(kind, kind): replace(config, kv_cache_dtype=kind) for kind in (CACHE_TYPES if spec.attentions else CACHE_TYPES[:1])}
    for names, settings in types.items() if config.cache_types == ("auto", "auto") else [(config.cache_types, config)]:
        try:
            layout = select_platform(settings, None).backend(spec, dtype)
        except UnsupportedError:
            if names == config.cache_types:  # it was asked for
                raise
            continue
        shown = [str(kept).removeprefix("torch.") if name == "auto" else name
                 for name, kept in zip(names, layout.cache_dtypes, strict=True)]  # fmt: skip
        for length in lengths:
            sizes = tuple(estimate.kv_bytes(spec, layout, config, length, batch) for batch in batches)
            yield CacheRow(", ".join(dict.fromkeys(shown)), length, sizes, tuple(size <= room for size in sizes))


def needed_bytes(checkpoint: Checkpoint, context: int) -> tuple[Facts, int]:
    """What a model is, and the memory that it takes on the CPU, as it is stored, with one context of so many tokens at most."""
    config = EngineConfig(device="cpu")
    platform = select_platform(config, None)
    facts = facts_of(checkpoint)
    dtype = compute_type(checkpoint, facts.spec, platform)
    weights = estimate.plan_weights(facts, checkpoint, reader_of(checkpoint), dtype, None, platform.dense_bytes)
    layout = platform.backend(facts.spec, dtype)
    length = min(context, facts.spec.max_position)
    cache = estimate.kv_bytes(facts.spec, layout, config, length, 1)
    return facts, estimate.total_bytes(weights.num_bytes, cache)
