"""The CPU as a platform: threads, compiled kernels, memory of the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

import torch

from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import CacheLayout, KVCache, cache_dtypes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.distributed.group import CpuGroup, Group, Meeting
from nanovllm_cli.engine.memory import available_bytes, check_weights_fit
from nanovllm_cli.engine.placement import NEAR, Part, Placement
from nanovllm_cli.engine.runner import Runner
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.strategy import most_guesses
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import ahead, cpu, dense, simd_planes
from nanovllm_cli.kernels.cpu_attention import MAX_TILE_ROWS
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.kernels.warm import Kind, warm_up
from nanovllm_cli.layers.kit import Share
from nanovllm_cli.mixer_spec import state_in
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.processors import THREADS_VARIABLE, default_threads, num_processors
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_low_rank import CpuLowRank
from nanovllm_cli.quant.cpu_stacked import CpuStacked
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.divided import Divided
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.low_rank import Beside, Chosen
from nanovllm_cli.quant.storage import WeightStorage
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec
from nanovllm_cli.streams_spec import GatedStreamsSpec

MOST_DRAFTED = 4 if simd_planes.SEVERAL else 8
"""Where four rows are multiplied in one pass they take half as long again as one, and eight two and a half times as long.
Elsewhere a row more costs about an eighth of a step. The guess for it has cost a step of the draft model."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CpuPlatform:
    """See `platform.Platform`."""

    def __init__(self, config: EngineConfig, progress: LoadProgress | None) -> None:
        if config.block_size != cpu.BLOCK:
            raise UnsupportedError(f"the CPU's KV cache has blocks of {cpu.BLOCK} tokens, not {config.block_size}")
        self.config = config
        self.progress = progress or NullProgress()
        self.threads = _num_threads(config, self.progress)
        self._thread: int | None = None
        self._kinds: dict[str, None] = {}
        """Of kernels beside those of every model, by `kernels.warm`, that weights and layers made so far need."""
        self._made: WeakSet[CpuStorage] = WeakSet()
        """Weights of which no runner has been made yet. Who walks through a model layer by layer makes none, and lets them go."""
        self.ops = CpuOps()

    @property
    def processor(self) -> str:
        """Compiled code depends on the instructions that there are."""
        return f"cpu {cpu.processor_name()}"

    @property
    def kind(self) -> str:
        return self.processor

    @property
    def most_drafted(self) -> int:
        return MOST_DRAFTED

    @property
    def shares_memory(self) -> bool:
        return True

    def group(self, meeting: Meeting) -> CpuGroup:
        return CpuGroup(meeting)

    def resolve_dtype(self, stored: set[str], spec: ModelSpec) -> torch.dtype:
        """auto: float32 for matrices that are, else bfloat16."""
        name = self.config.dtype
        if name == "auto":
            name = "float32" if stored == {"F32"} else "bfloat16"
        if name not in _DTYPES:
            raise UnsupportedError(f"{name} is not computed on a CPU", "use --dtype bfloat16 or --dtype float32")
        return _DTYPES[name]

    def enter(self) -> None:
        """The kernels' thread count is a setting of the calling thread, and another model may have changed it."""
        if self._thread != threading.get_ident() or cpu.num_threads() != self.threads:
            cpu.set_num_threads(self.threads)
            self._thread = threading.get_ident()

    def check(self) -> None: ...

    def compile(self, dtype: torch.dtype) -> None:
        kinds = [Kind("all", (dtype, *cache_dtypes(self.config.cache_types, dtype)))]
        kinds += [Kind(name, (dtype,)) for name in self._kinds]
        is_new = not all(kind.is_compiled for kind in kinds)
        if is_new:
            self.progress.stage("compiling kernels for this processor (kept for later runs)", None, "tensors")
        with self.progress.starting():
            warm_up(kinds)
        if is_new:
            self.progress.done()

    def available_bytes(self) -> int:
        return available_bytes()

    def place(
        self, spec: ModelSpec, layout: CacheLayout, needed: int, sizes: Callable[[], Mapping[Part, int]], organs: int = 0
    ) -> Placement:
        """All of them in the one memory that there is."""
        check_weights_fit(needed, self.available_bytes(), self.config.tensor_parallel_size)
        return NEAR

    def make_storage(
        self, form: Format | None, num_rows: int, width: int, dtype: torch.dtype, *, far: bool = False
    ) -> WeightStorage:
        assert not far, "a CPU's weights are all alike"
        rounds = {"auto": dtype != torch.float32, "rounded": True, "exact": False}[self.config.activations]
        storage: CpuStorage
        if form is None:
            storage = DenseStorage(num_rows, width, dtype)
        else:
            storage = make_storage(form, num_rows, width, dtype, rounds=rounds)
        if isinstance(storage, CpuInteger):
            self._kinds["integer"] = None
        self._made.add(storage)
        return storage

    def dense_bytes(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        return dense.num_bytes(num_rows, width, dtype)

    def stack(self, parts: list[WeightStorage], dtype: torch.dtype) -> WeightStorage:
        return CpuStacked(parts, dtype)

    def divided(self, own: WeightStorage, share: Share, group: Group, dtype: torch.dtype) -> WeightStorage:
        return Divided(own, share.division, group, dtype, share.gathers)

    def with_adapters(
        self, weight: WeightStorage, sides: Sequence[Beside], dtype: torch.dtype, chosen: Chosen | None
    ) -> WeightStorage:
        self._kinds["adapters"] = None
        return CpuLowRank(weight, sides, dtype, chosen)

    def backend(self, spec: ModelSpec, dtype: torch.dtype) -> CpuAttention:
        states = [state_in(mixer) for mixer in spec.mixers]
        has_ngrams = any(isinstance(state, DeltaSpec) and state.ngrams is not None for state in states)
        if isinstance(spec.streams, GatedStreamsSpec) and self.config.tensor_parallel_size > 1:
            hint = "leave --tensor-parallel-size out"
            raise UnsupportedError(f"a {spec.architecture} model is not divided among processes: it has gated streams", hint)
        is_shared = any(attention.shared is not None for attention in spec.attentions)
        if is_shared:
            _check_that_it_is_dense(spec, self.config, dtype)
        if has_ngrams and most_guesses(self.config):
            what = f"guesses of a {spec.architecture} model's tokens: what it keeps of n-grams cannot be taken back"
            raise UnsupportedError(what, "leave --speculate, --draft-model and --mtp out")
        is_latent = any(attention.latent is not None for attention in spec.attentions)
        is_convolved = any(attention.convolved is not None for attention in spec.attentions)
        needed = {
            "experts": any(isinstance(block.mlp, MoESpec) for block in spec.blocks),
            "conv": any(isinstance(mixer, ConvSpec) for mixer in spec.mixers) or is_convolved,
            "compressed": is_convolved or spec.logit_factor is not None,
            "scan": any(isinstance(state, ScanSpec) for state in states),
            "wkv": any(isinstance(state, WkvSpec) for state in states),
            "delta": any(isinstance(state, DeltaSpec) for state in states),
            "latent": is_latent,
            "sparse": any(attention.indexer is not None for attention in spec.attentions),
            "blocks": any(attention.blocks is not None for attention in spec.attentions),
            "digests": is_shared,
            "gated": isinstance(spec.streams, GatedStreamsSpec),
            "ngrams": has_ngrams,
        }
        self._kinds |= dict.fromkeys(name for name, is_needed in needed.items() if is_needed)
        if is_latent:
            _check_that_keys_are_values(*self.config.cache_types)
        groups = {attention.queries_a_key for attention in spec.attentions}
        groups |= {MAX_TILE_ROWS} if spec.most_seen is not None or is_shared else set()
        groups |= {each.attention.queries_a_key for each in (spec.cross, spec.looks) if each is not None}
        kept = cache_dtypes(self.config.cache_types, dtype)
        cross = spec.cross if spec.cross is not None and spec.cross.rows else None
        return CpuAttention(groups, dtype, kept, most_guesses(self.config), spec.chunk, cross)

    def cache_budget(self, *models: Decoder) -> int:
        return int(available_bytes() * self.config.memory_utilization)

    def make_runner(
        self, model: Decoder, cache: KVCache, sampler: Sampler, recordable: bool, *, keeps_rows: bool = False
    ) -> Runner:
        ahead.choose([(weight.asking_bytes, weight.multiply_one) for weight in self._made])
        self._made.clear()
        processes = self.config.tensor_parallel_size
        return Runner(
            model, cache, sampler, self.config.block_size, recordable,
            has_free_processor=num_processors() > processes * self.threads, can_be_broken_off=processes == 1,
        )  # fmt: skip


def _num_threads(config: EngineConfig, progress: LoadProgress) -> int:
    """As many as asked for, or as are best; never more than there are."""
    there = min(num_processors(), cpu.most_threads())
    if config.threads is not None and config.threads > there:
        most = f"{num_processors()} processors, and {there} threads at most ({THREADS_VARIABLE})"
        progress.note(f"{config.threads} threads were asked for; this process has {most}")
    return min(config.threads or default_threads(), there)


def _check_that_it_is_dense(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> None:
    """What attention with one shared key keeps is not rounded."""
    if any(kept != dtype for kept in cache_dtypes(config.cache_types, dtype)):
        raise UnsupportedError(
            f"a KV cache of {' and '.join(dict.fromkeys(config.cache_types))} of a {spec.architecture} model",
            "leave --kv-cache-dtype, --cache-type-k and --cache-type-v out: it keeps little of a token",
        )


def _check_that_keys_are_values(of_keys: str, of_values: str) -> None:
    """Latent attention keeps one vector for both; what is kept of values is not said, or the same."""
    if of_values not in ("auto", of_keys):
        raise UnsupportedError(
            f"values kept as {of_values} where keys are as {of_keys}: latent attention has one vector for both",
            "say it with --kv-cache-dtype, or --cache-type-k alone",
        )
