"""One rank: a loaded model, its KV cache and a runner. In-process for now; the same object is what another process would hold."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nanovllm_cli.attention.kv_cache import KVCache, block_bytes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.constrain.compiler import Compiler, vocabulary_maker
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.executor import RunsAhead
from nanovllm_cli.engine.memory import check_weights_fit, size_cache
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.launcher import has_driver, why_unavailable
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.model_spec import ModelSpec, MoESpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.format import Format, Fp8, Integer
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.low_rank import Beside, padded, side_by_side
from nanovllm_cli.quant.storage import WeightStorage
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.adapted import Sums, adapt
from nanovllm_cli.weights.adapter import stamps
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import WeightFormats, load_weights, read_spec
from nanovllm_cli.weights.quantized import open_reader

EncodeText = Callable[[str], list[int]]
TokenBytes = Callable[[], Sequence[bytes]]


class Worker:
    """Loads a checkpoint and executes plans.

    encode: text -> ids without special tokens, token_bytes: the bytes of every token, control_ids: tokens that no text spells;
    for sampling parameters that are given as text (bad_words, DRY's breakers, constraints).
    platform: where; by default what `config.device` says.
    formats: how many numbers of its matrices are kept in which format; None is the compute type. num_multiplied_whole: how many
    are multiplied as whole numbers, int8 by int8.
    Raises what the loader raises, and DoesNotFitError before it takes memory that isn't there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        encode: EncodeText | None = None,
        token_bytes: TokenBytes | None = None,
        control_ids: Collection[int] = (),
        progress: LoadProgress | None = None,
        platform: Platform | None = None,
    ) -> None:
        self._config = config
        self._beside: Sums = {}
        progress = progress or NullProgress()
        self.platform = platform = platform or select_platform(config, progress)
        reader = open_reader(checkpoint)
        self.spec: ModelSpec = read_spec(checkpoint, reader)
        if config.lora:
            checkpoint, self._beside = adapt(checkpoint, reader, self.spec, config.lora)
            reader = open_reader(checkpoint)
        self._lora = [(each.scale, stamps(Path(each.name))) for each in config.lora]
        self.dtype = platform.resolve_dtype(
            {checkpoint.info(n).dtype_name for n in checkpoint.names() if len(checkpoint.info(n).shape) > 1}
        )
        platform.enter()
        self._formats = WeightFormats(checkpoint, reader, None if config.quant is None else parse_format(config.quant))
        needed = self._formats.num_bytes(self.dtype, platform.dense_bytes) + self._beside_bytes()
        check_weights_fit(needed, platform.available_bytes())
        platform.compile(self.dtype)
        self._storages: list[WeightStorage] = []
        self.formats: Counter[Format | None] = Counter()
        self.num_multiplied_whole = 0
        backend = platform.backend(self.spec, self.dtype)
        self.model = Decoder(self.spec, Kit(self.dtype, self._make_storage, platform.ops, backend))
        if config.activations != "auto" and set(self.formats) == {None}:
            progress.note("activations changes nothing: no weight of this model is quantized")
        load_weights(self.model, checkpoint, reader, progress)
        self._beside = {}
        heads = self.spec.kv_heads_and_dims
        self.block_bytes = block_bytes(heads, backend)
        self.num_blocks, self.max_model_len = size_cache(
            config, self.spec.max_position, self.block_bytes, platform.cache_budget(self.model)
        )
        cache = KVCache(self.num_blocks, heads, backend)
        self._compiler: Compiler | None = None
        if encode is not None and token_bytes is not None:
            self._compiler = Compiler(vocabulary_maker(token_bytes, control_ids, encode))
        sampler = Sampler(self.spec.vocab_size, encode=encode, token_bytes=token_bytes, compiler=self._compiler)
        recordable = all(storage.recordable for storage in self._storages) and self._experts_are_alike()
        self.runner = platform.make_runner(self.model, cache, sampler, recordable)

    @property
    def weight_bytes(self) -> int:
        """Memory of all matrices; norms and biases are too small to count."""
        return sum(storage.num_bytes for storage in self._storages)

    @property
    def read_bytes(self) -> int:
        """Of the matrices that a step reads whole: all but an embedding that is not the head as well, and experts that nobody
        takes."""
        return self.weight_bytes - (0 if self.spec.tied_head else self.model.embedding.weight.num_bytes)

    @property
    def expert_bytes(self) -> int:
        """Of these, the bytes of experts, of which a token takes `spec.expert_share`."""
        return sum(block.mlp.expert_bytes for block in self.model.blocks if isinstance(block.mlp, MoE))

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint that the model uses."""
        return sum(torch.Size(slot.shape).numel() for slot in self.model.slots().values())

    @property
    def ahead(self) -> RunsAhead | None:
        """This worker as one that starts a step before the last one's tokens are read, where its runner can."""
        return _Ahead(self.platform, weakref.proxy(self.runner)) if isinstance(self.runner, RunsAhead) else None

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """See Prepare."""
        return self._compiler.prepare(params) if self._compiler is not None else None

    def execute(self, plan: Plan) -> StepOutput:
        """See PlanRunner.run. May be called from any one thread at a time."""
        self.platform.enter()
        with torch.inference_mode():
            return self.runner.run(plan)

    @property
    def cache_kind(self) -> dict[str, object]:
        """What a block of the cache depends on beside weights and tokens: settings, layout, and what computes it."""
        config = self._config
        k, v = self.model.backend.cache_dtypes
        return {
            "processor": self.platform.processor,
            "deterministic": config.deterministic,
            "quant": config.quant,
            "lora": self._lora,
            "dtypes": [str(self.dtype), str(k), str(v)],
            "heads": self.spec.kv_heads_and_dims,
            "block": [config.block_size, self.block_bytes],
        }

    def read_blocks(self, blocks: list[int]) -> memoryview:
        """See Executor."""
        self.platform.enter()
        return self.runner.cache.blocks.take_out(blocks).flatten().numpy().data

    def write_blocks(self, blocks: list[int], data: memoryview) -> None:
        """See Executor."""
        self.platform.enter()
        rows = torch.frombuffer(data, dtype=torch.uint8).view(len(blocks), self.block_bytes)
        self.runner.cache.blocks.put_in(blocks, rows)

    def close(self) -> None:
        """Lets go of weights and cache; the worker is of no use afterwards."""
        self._storages = []
        if self._compiler is not None:
            self._compiler.close()
        del self.model, self.runner

    def _experts_are_alike(self) -> bool:
        """Whether the experts of each layer are in the same formats."""
        return all(
            len({tuple(self._formats.of(f"blocks.{i}.experts.{e}.{part}.weight") for part in ("gate", "up", "down"))
                 for e in range(block.mlp.num_experts)}) == 1
            for i, block in enumerate(self.spec.blocks)
            if isinstance(block.mlp, MoESpec)
        )  # fmt: skip

    def _make_storage(self, parts: dict[str, int], width: int) -> WeightStorage:
        """Parts in the same format are one storage."""
        runs: list[tuple[Format | None, int]] = []
        for name, num_rows in parts.items():
            form = self._formats.of(name)
            if form is not None:
                form.check_width(width)
            self.formats[form] += num_rows * width
            if runs and runs[-1][0] == form and not _stays_apart(form):
                runs[-1] = (form, runs[-1][1] + num_rows)
            else:
                runs.append((form, num_rows))
        storages = [self.platform.make_storage(form, num_rows, width, self.dtype) for form, num_rows in runs]
        weight = storages[0] if len(storages) == 1 else self.platform.stack(storages, self.dtype)
        if not self._beside.keys().isdisjoint(parts):
            weight = self._with_adapters(weight, parts)
        self._storages.append(weight)
        whole = sum(storage.num_rows for storage in storages if isinstance(storage, CpuInteger))
        self.num_multiplied_whole += whole * width
        return weight

    def _beside_bytes(self) -> int:
        """At most: as if each weight had two others behind it, with adapters of the same ranks."""
        total = 0
        for sums in self._beside.values():
            rank = padded(3 * sum(each.down.shape[0] for each in sums))
            total += self.platform.dense_bytes(rank, sums[0].down.shape[1], self.dtype)
            total += self.platform.dense_bytes(sums[0].up.shape[0], rank, self.dtype)
        return total

    def _with_adapters(self, weight: WeightStorage, parts: dict[str, int]) -> WeightStorage:
        """With the products of adapters beside those of a weight that is stored quantized."""
        added = [[Beside(each.down, each.up.float() * each.scale) for each in self._beside.get(name, ())] for name in parts]
        sides = side_by_side(list(parts.values()), added, weight.width)
        largest = sides.up.to(self.dtype).abs().float() @ sides.down.to(self.dtype).abs().float().sum(1)
        if not bool(largest.isfinite().all()):
            raise CheckpointError(f"an adapter of {next(iter(parts))} has values that {self.dtype} cannot hold")

        def kept(side: torch.Tensor) -> WeightStorage:
            storage = self.platform.make_storage(None, side.shape[0], side.shape[1], self.dtype)
            storage.load_rows(0, side)
            return storage

        return self.platform.with_product(weight, kept(sides.down), kept(sides.up), self.dtype)


def _stays_apart(form: Format | None) -> bool:
    """Parts of one storage share the order of their columns, and the scale of their input."""
    match form:
        case Integer():
            return form.ordered
        case Fp8():
            return form.activation == "static"
    return False


class _Ahead:
    """See RunsAhead. The runner, in the surroundings that `Worker.execute` gives it; a proxy of it, as `Worker.close` lets go of
    the memory."""

    def __init__(self, platform: Platform, runner: RunsAhead) -> None:
        self._platform = platform
        self._runner = runner

    def draws_unseen(self, params: SamplingParams) -> bool:
        return self._runner.draws_unseen(params)

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        self._platform.enter()
        with torch.inference_mode():
            return self._runner.submit(plan)


def select_platform(config: EngineConfig, progress: LoadProgress | None) -> Platform:
    """The platform behind `config.device`: cpu, cuda, cuda:N, or auto, which is a GPU where one can be used.

    UnsupportedError says why a GPU that was asked for can't be.
    """
    progress = progress or NullProgress()
    if config.device == "cpu":
        return _cpu(config, progress)
    kind, _, number = config.device.partition(":")
    index = int(number or 0)
    reason = why_unavailable(index)
    if reason is None:
        _tell_unused(config, progress, on_gpu=True)
        return CudaPlatform(config, CudaDevice(index, config.programmatic_launch), progress)
    if kind != "auto":
        raise reason
    if has_driver():
        progress.note(f"the GPU is not used: {reason.message}" + (f" ({reason.hint})" if reason.hint else ""))
    return _cpu(config, progress)


def _cpu(config: EngineConfig, progress: LoadProgress) -> CpuPlatform:
    _tell_unused(config, progress, on_gpu=False)
    return CpuPlatform(config, progress)


def _tell_unused(config: EngineConfig, progress: LoadProgress, *, on_gpu: bool) -> None:
    """Notes for settings that change nothing here. They may be somebody's defaults for all machines, so nothing is refused."""
    plain = EngineConfig()

    def is_changed(name: str) -> bool:
        return bool(getattr(config, name) != getattr(plain, name))

    others, here = ("CPUs", "GPU") if on_gpu else ("GPUs", "CPU")
    for name in ("threads",) if on_gpu else ("eager", "programmatic_launch", "gpu_memory_utilization"):
        if is_changed(name):
            progress.note(f"{name.replace('_', '-')} is for {others}, and changes nothing on a {here}")
    if on_gpu and is_changed("gpu_memory_utilization") and config.kv_cache_bytes is not None:
        progress.note("gpu-memory-utilization changes nothing: the KV cache has a size of its own")
    if is_changed("kv_cache_dtype") and config.cache_type_k is not None and config.cache_type_v is not None:
        progress.note("kv-cache-dtype changes nothing: keys and values have types of their own")
