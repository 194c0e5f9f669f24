"""EngineConfig: everything that is decided once, before the first token. Frozen; nothing writes to it later.

What depends on the machine or the model (dtype "auto", how many KV blocks fit) is resolved by `engine/worker.py` into new
values; this file only says what was asked for, and refuses what makes no sense.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

from nanovllm_cli.errors import UsageError
from nanovllm_cli.overrides import Override, as_overrides
from nanovllm_cli.vllm_names import SETTING_HINTS, SETTINGS, is_so_anyway
from nanovllm_cli.vllm_names import setting as value_of

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
Activations = Literal["auto", "rounded", "exact"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
Policy = Literal["fcfs", "priority"]

# By annotation: what a value must be, what that is called, and what it becomes; numpy's numbers are Integral and Real, too.
_TYPES: dict[str, tuple[type, str, type]] = {
    "int": (Integral, "a whole number", int),
    "float": (Real, "a number", float),
    "bool": (bool, "True or False", bool),
    "bytes": (bytes, "bytes", bytes),
}

_CHECKED_APART = ("lora", "lora_modules", "control_vectors", "control_vector_layers", "rope", "overrides")

BLOCK_SIZE = 16
MAX_GUESSES = 64
MAX_PROCESSES = 64
DRAFTED_TOKENS = 8
MTP_TOKENS = 4
"""A layer that guesses by its own guesses is right less and less."""
MAX_SCALE = 1e6
MAX_VIDEO_FPS = 240
MAX_LORA_MODULES = 64
MAX_LORA_NAME = 200
RopeKind = Literal["none", "linear", "dynamic", "yarn"]


class Lora(NamedTuple):
    """An adapter by its path, or its name on the hub. scale: what its products are multiplied by, beside its own factor."""

    name: str
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name if self.scale == 1 else f"{self.name}, times {self.scale:g}"


class LoraModule(NamedTuple):
    """An adapter that requests may choose, and what they call it. path: as `Lora.name`."""

    name: str
    path: str


class ControlVector(NamedTuple):
    """What leads a model into a direction (`weights/control_vector.py`), by its file's path. scale: of what is added; below 0 it
    leads away from there."""

    path: str
    scale: float = 1.0

    def __str__(self) -> str:
        return self.path if self.scale == 1 else f"{self.path}, times {self.scale:g}"


class RopeChange(NamedTuple):
    """Other rotary positions than a model's files say; None: as they have it. scaling: how positions behind those of its training
    are turned. scale: to how many times that length. base: of the angles. original_len: of what YaRN stretches, in tokens."""

    scaling: RopeKind | None = None
    scale: float | None = None
    base: float | None = None
    original_len: int | None = None


AS_TRAINED = RopeChange()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Lengths are in tokens, memory in bytes.

    device: cpu, cuda, cuda:N, or auto, which is a GPU where one can be used.
    max_model_len: longest prompt plus answer; None takes the model's own limit.
    rope: rotary positions for longer contexts than a model was trained for, where its publisher says that it takes them.
    overrides: other settings than the model's files have, of config.json or of a GGUF's metadata: a mapping, of mappings too.
    max_num_seqs: most sequences in one step.
    max_num_batched_tokens: most tokens in one step, decodes and prefill chunks together.
    num_blocks: size of the KV cache in blocks; None sizes it from kv_cache_bytes, or from free memory.
    kv_cache_bytes: memory for the KV cache; None takes what `memory_utilization` of the free memory allows (on a GPU what
        gpu_memory_utilization leaves), and never more than max_num_seqs sequences of max_model_len need.
    quant: format that plain weights are rounded to when they are loaded ("int8", "int4:group=64"); None keeps them.
    lora: adapters that are added to the weights, all at once; a name alone is one of scale 1.
    lora_modules: adapters that each request may choose one or several of (`SamplingParams.lora`); nobody who doesn't has them.
        A mapping of names to paths will do.
    control_vectors: what is added to the residual stream behind layers, all at once; a path alone is one of scale 1.
    control_vector_layers: the first and the last layer, counted from 0, behind which they are added; None: where they have
        something for. Nothing is added behind layer 0.
    activations: whether rows that meet a quantized weight are "rounded" to 8 bits where its format says so, or stay "exact".
        "auto" rounds, except in float32, which is asked for to have exact sums. On a CPU.
    kv_cache_dtype: what K and V are kept as. "auto" is the compute type, which may also be named; "int8" and "fp8" (e4m3) take
        about half of bfloat16, with a scale for each token and head; on a GPU int8 alone has one.
    cache_type_k, cache_type_v: the same for K and V apart, where they differ (on a CPU); None is kv_cache_dtype.
    gpu_memory_utilization: share of a GPU's memory for weights, KV cache and one step.
    n_gpu_layers: how many of the last layers, counting the head as one, have their weights on the GPU; it reads those of the
        others from the machine's memory, and an embedding's rows. None: as many as fit. n_cpu_moe: of how many of the first
        layers it reads the experts from there, at least.
    programmatic_launch: kernels on a GPU may start before the one ahead of them ends (from compute capability 9.0 up).
    eager: every step on a GPU runs launch by launch, none is recorded as a graph.
    num_speculative_tokens: most tokens that a step guesses for a sequence, by what followed the same words before, by a draft
        model or by a layer for it; 0: none, or where there is one DRAFTED_TOKENS or MTP_TOKENS.
    draft_model: a smaller one of the same vocabulary, which guesses; a path, or a name on the hub. draft_quant: its `quant`.
    mtp: the model's own layer for further tokens guesses, where it has one (`models/mtp.py`).
    mmproj: what a GGUF model sees by, in a file of its own: a path, or a name on the hub. None takes one that lies beside the
        model, if mmproj_auto.
    image_max_tokens: most tokens that an image is made into, where a model takes images of many sizes, and a frame of a video.
    video_fps: frames of a video that are taken of each second; None: as the model was trained. video_max_frames: of all of it.
    draft_min_p: the least probability that a token has for the draft model, or that layer, to guess it; 0 guesses always.
    cache_salt_secret: key of the prefix cache's hash chain; None draws one for this process.
    threads: of the CPU, of all processes together; None is one a processor.
    tensor_parallel_size: processes that compute the model together, each with its part of the weights and, where heads can be
        divided, the KV cache: on a GPU each, from the one that device names on, or with a part of the threads each, for machines
        with several memories beside some of the processors.
    deterministic: a request's tokens and logprobs must not depend on the batch (see docs/architecture.md).
    """

    dtype: DTypeName = "auto"
    device: str = "auto"
    quant: str | None = None
    lora: tuple[Lora, ...] = ()
    lora_modules: tuple[LoraModule, ...] = ()
    control_vectors: tuple[ControlVector, ...] = ()
    control_vector_layers: tuple[int, int] | None = None
    activations: Activations = "auto"
    max_model_len: int | None = None
    rope: RopeChange = AS_TRAINED
    overrides: tuple[Override, ...] = ()
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    cache_type_k: KVCacheDType | None = None
    cache_type_v: KVCacheDType | None = None
    memory_utilization: float = 0.5
    gpu_memory_utilization: float = 0.9
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    policy: Policy = "fcfs"
    aging_seconds: float = 10.0
    threads: int | None = None
    tensor_parallel_size: int = 1
    deterministic: bool = False
    eager: bool = False
    programmatic_launch: bool = True
    num_speculative_tokens: int = 0
    draft_model: str | None = None
    draft_quant: str | None = None
    mtp: bool = False
    mmproj: str | None = None
    mmproj_auto: bool = True
    image_max_tokens: int = 4096
    video_fps: float | None = None
    video_max_frames: int = 32
    draft_min_p: float = 0.75
    cache_salt_secret: bytes | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in _CHECKED_APART:
                self._check_type(field.name, str(field.type))
        object.__setattr__(self, "lora", tuple(Lora(*_scaled("lora", "adapters", each)) for each in _listed(self.lora)))
        vectors = [ControlVector(*_scaled("control_vectors", "files", each)) for each in _listed(self.control_vectors)]
        object.__setattr__(self, "control_vectors", tuple(vectors))
        object.__setattr__(self, "control_vector_layers", _layers(self.control_vector_layers, bool(vectors)))
        object.__setattr__(self, "lora_modules", _modules(self.lora_modules))
        object.__setattr__(self, "rope", _rope(self.rope))
        object.__setattr__(self, "overrides", as_overrides(self.overrides))
        if self.dtype not in get_args(DTypeName):
            raise UsageError(f"unknown dtype {self.dtype!r}", f"known: {', '.join(get_args(DTypeName))}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size", "image_max_tokens",
                     "video_max_frames"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.video_fps is not None and not 0 < self.video_fps <= MAX_VIDEO_FPS:
            raise UsageError(f"video_fps must be above 0 and at most {MAX_VIDEO_FPS}, not {self.video_fps}")
        if self.tensor_parallel_size > MAX_PROCESSES:
            raise UsageError(f"tensor_parallel_size must be at most {MAX_PROCESSES}, not {self.tensor_parallel_size}")
        if not 0 <= self.num_speculative_tokens <= MAX_GUESSES:
            raise UsageError(f"num_speculative_tokens must lie between 0 and {MAX_GUESSES}, not {self.num_speculative_tokens}")
        for name in ("max_model_len", "num_blocks", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        for name in ("n_gpu_layers", "n_cpu_moe"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} must be at least 0, not {value}")
        if not 0 <= self.draft_min_p < 1:
            raise UsageError(f"draft_min_p must be at least 0 and below 1, not {self.draft_min_p}")
        if self.draft_model is None and self.draft_quant is not None:
            raise UsageError("draft_quant has no meaning without draft_model", "name a draft model too")
        if self.mtp and self.draft_model is not None:
            raise UsageError("mtp and draft_model contradict each other: one of them guesses", "leave one of them out")
        for name in ("memory_utilization", "gpu_memory_utilization"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise UsageError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device) is None:
            raise UsageError(f"{self.device!r} is not a device", "known: auto, cpu, cuda, cuda:N")
        for kind in (self.kv_cache_dtype, *self.cache_types):
            if kind not in get_args(KVCacheDType):
                raise UsageError(f"unknown KV cache type {kind!r}", f"known: {', '.join(get_args(KVCacheDType))}")
        if self.activations not in get_args(Activations):
            raise UsageError(f"unknown activations {self.activations!r}", f"known: {', '.join(get_args(Activations))}")
        if not self.aging_seconds > 0:
            raise UsageError(f"aging_seconds must be positive, not {self.aging_seconds}")
        if self.policy not in ("fcfs", "priority"):
            raise UsageError(f"unknown scheduling policy {self.policy!r}", "known: fcfs, priority")

    def _check_type(self, name: str, annotation: str) -> None:
        """Numbers, switches and names that are of another type. What names may say is checked where they are known."""
        value, (kind, *others) = getattr(self, name), annotation.split(" | ")
        if value is None and others:
            return
        expected, called, become = _TYPES.get(kind, (str, "a name", str))
        if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
            raise UsageError(f"{name} must be {called}, not {value!r}")
        object.__setattr__(self, name, become(value))

    @property
    def max_guesses(self) -> int:
        """Most tokens that a step guesses for a sequence."""
        return self.num_speculative_tokens or (MTP_TOKENS if self.mtp else 0 if self.draft_model is None else DRAFTED_TOKENS)

    @property
    def cache_types(self) -> tuple[KVCacheDType, KVCacheDType]:
        """What K and V are to be kept as."""
        return self.cache_type_k or self.kv_cache_dtype, self.cache_type_v or self.kv_cache_dtype


def engine_config(config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The config, or one of settings by their names here or in vLLM. UsageError for both together, and for other names."""
    if config is not None and not isinstance(config, EngineConfig):
        raise UsageError(f"config is an EngineConfig, not {type(config).__name__}")
    if config is not None and settings:
        raise UsageError(f"config is given, and {next(iter(settings))} beside it", "put all of it into EngineConfig(…)")
    known, ours = [field.name for field in fields(EngineConfig)], dict[str, Any]()
    for name, value in settings.items():
        own = SETTINGS.get(name, name)
        if own not in known:
            if is_so_anyway(name, value):
                continue
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"there is no setting {name!r}", SETTING_HINTS.get(name, hint))
        if own in ours:
            raise UsageError(f"{own} is given twice")
        ours[own] = value_of(own, value)
    return EngineConfig(**ours) if config is None else config


def _rope(given: object) -> RopeChange:
    if not isinstance(given, RopeChange):
        raise UsageError(f"rope must be a RopeChange, not {given!r}")
    if given.scaling is not None and given.scaling not in get_args(RopeKind):
        raise UsageError(f"unknown scaling of rotary positions {given.scaling!r}", f"known: {', '.join(get_args(RopeKind))}")
    bounds = {"scale": 1e-3, "base": 1.001, "original length": 2}
    for (name, least), value in zip(bounds.items(), given[1:], strict=True):
        kind = int if name == "original length" else int | float
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= 1e12):
            raise UsageError(f"the {name} of rotary positions must be a number from {least:g} to 1e12, not {value!r}")
    return given


def _modules(given: object) -> tuple[LoraModule, ...]:
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list | tuple):
        raise UsageError(f"lora_modules are names and paths of adapters, not {given!r}")
    modules = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) and text for text in pair):
            raise UsageError(f"lora_modules are names and paths of adapters, not {pair!r}")
        modules.append(LoraModule(*pair))
    names = [module.name for module in modules]
    if len(names) > MAX_LORA_MODULES:
        raise UsageError(f"{len(names)} adapters are to be chosen from; at most {MAX_LORA_MODULES} are")
    for name in names:
        if len(name) > MAX_LORA_NAME or not name.isprintable():
            raise UsageError(f"an adapter's name has 1 to {MAX_LORA_NAME} characters that can be printed, not {name[:80]!r}")
        if names.count(name) > 1:
            raise UsageError(f"two adapters are called {name!r}")
    return tuple(modules)


def _listed(named: object) -> list[object]:
    """A name alone is one of them."""
    if isinstance(named, str) or not isinstance(named, Iterable):
        return [named]
    return list(named)


def _scaled(field: str, what: str, each: object) -> tuple[str, float]:
    """A name, or one with its scale."""
    name, scale = (each, 1.0) if not isinstance(each, list | tuple) or len(each) != 2 else each
    if not isinstance(name, str) or not name or isinstance(scale, bool) or not isinstance(scale, int | float):
        raise UsageError(f"{field} must be names of {what}, or names and scales" + (f", not {each!r}" if name else ""))
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        raise UsageError(f"{field}: the scale of {name} must lie between -{MAX_SCALE:g} and {MAX_SCALE:g}, not {scale}")
    return name, float(scale)


def _layers(given: object, has_vectors: bool) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or [type(each) for each in given] != [int, int]:
        raise UsageError(f"control_vector_layers must be two whole numbers, the first and the last, not {given!r}")
    first, last = given
    if not 1 <= first <= last:
        raise UsageError(f"control_vector_layers must be the first, from 1 on, and the last, not {first} and {last}")
    if not has_vectors:
        raise UsageError("control_vector_layers has no meaning without control_vectors", "name a control vector too")
    return first, last
