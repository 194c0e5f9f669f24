"""One rank: a loaded model, its KV cache and a runner. In-process for now; the same object is what another process would hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch

from nanovllm_cli.attention.cpu import CpuAttention
from nanovllm_cli.attention.kv_cache import KVCache, block_bytes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.memory import available_bytes, check_weights_fit, size_cache
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.engine.runner import Runner
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, warm
from nanovllm_cli.kernels.cpu_ops import CpuOps
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.model_spec import AttentionSpec, ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import load_weights, read_spec

EncodeText = Callable[[str], list[int]]
TokenBytes = Callable[[], Sequence[bytes]]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Worker:
    """Loads a checkpoint and executes plans on the CPU.

    encode: text -> ids without special tokens, token_bytes: the bytes of every token, for sampling parameters that are given
    as text (bad_words, DRY's breakers).
    Raises what the loader raises, and DoesNotFitError before it takes memory that isn't there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        encode: EncodeText | None = None,
        token_bytes: TokenBytes | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        if config.device not in ("cpu", "auto"):
            raise UnsupportedError(f"device {config.device!r} is not supported yet", "use --device cpu")
        if config.block_size != cpu.BLOCK:
            raise UnsupportedError(f"the CPU's KV cache has blocks of {cpu.BLOCK} tokens, not {config.block_size}")
        self.spec: ModelSpec = read_spec(checkpoint)
        self.dtype = _resolve_dtype(config, checkpoint)
        self.threads = _num_threads(config, progress)
        self._thread: int | None = None
        self._claim_thread()
        check_weights_fit(self._estimate_bytes(checkpoint), available_bytes())
        _compile(self.dtype, progress)
        self._storages: list[DenseStorage] = []
        backend = CpuAttention(_groups(self.spec))
        self.model = Decoder(self.spec, Kit(self.dtype, self._make_storage, CpuOps(), backend))
        load_weights(self.model, checkpoint, progress)
        heads = [
            (b.attention.num_kv_heads, b.attention.head_dim)
            for b in self.spec.blocks
            if isinstance(b.attention, AttentionSpec)
        ]
        self.block_bytes = block_bytes(heads, self.dtype)
        self.num_blocks, self.max_model_len = size_cache(
            config, self.spec.max_position, self.block_bytes, available_bytes()
        )
        cache = KVCache(self.num_blocks, heads, self.dtype)
        sampler = Sampler(self.spec.vocab_size, encode=encode, token_bytes=token_bytes)
        recordable = all(storage.recordable for storage in self._storages)
        self.runner = Runner(self.model, cache, sampler, config.block_size, recordable)

    @property
    def weight_bytes(self) -> int:
        """Memory of all matrices; norms and biases are too small to count."""
        return sum(storage.num_bytes for storage in self._storages)

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint that the model uses."""
        return sum(torch.Size(slot.shape).numel() for slot in self.model.slots().values())

    def execute(self, plan: Plan) -> StepOutput:
        """See Runner.run. May be called from any one thread at a time."""
        self._claim_thread()
        with torch.inference_mode():
            return self.runner.run(plan)

    def close(self) -> None:
        """Lets go of weights and cache; the worker is of no use afterwards."""
        self._storages = []
        del self.model, self.runner

    def _claim_thread(self) -> None:
        """The kernels' thread count is a setting of the calling thread."""
        if self._thread != threading.get_ident():
            cpu.set_num_threads(self.threads)
            self._thread = threading.get_ident()

    def _make_storage(self, num_rows: int, width: int) -> DenseStorage:
        storage = DenseStorage(num_rows, width, self.dtype)
        self._storages.append(storage)
        return storage

    def _estimate_bytes(self, checkpoint: Checkpoint) -> int:
        return sum(torch.Size(checkpoint.info(n).shape).numel() for n in checkpoint.names()) * self.dtype.itemsize


def _num_threads(config: EngineConfig, progress: LoadProgress | None) -> int:
    """As many as asked for, or as this process may use; never more than there are."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.threads is not None and config.threads > there and progress is not None:
        progress.note(f"{config.threads} threads were asked for; this process has {there} processors and uses {there}")
    return min(config.threads or there, there)


def _compile(dtype: torch.dtype, progress: LoadProgress | None) -> None:
    """Kernels before weights: the first run on a machine waits for the compiler, and says so."""
    if progress is None or warm.is_compiled(dtype):
        warm.warm_up(dtype)
        return
    progress.stage("compiling kernels for this processor (first run only)", None, "tensors")
    warm.warm_up(dtype)
    progress.done()


def _groups(spec: ModelSpec) -> set[int]:
    attentions = (block.attention for block in spec.blocks)
    return {a.num_heads // a.num_kv_heads for a in attentions if isinstance(a, AttentionSpec)}


def _resolve_dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """auto: float32 for a checkpoint whose matrices are float32, else bfloat16."""
    name = config.dtype
    if name == "auto":
        matrices = {checkpoint.info(n).dtype_name for n in checkpoint.names() if len(checkpoint.info(n).shape) > 1}
        name = "float32" if matrices == {"F32"} else "bfloat16"
    if name not in _DTYPES:
        raise UnsupportedError(f"{name} is not computed on a CPU", "use --dtype bfloat16 or --dtype float32")
    return _DTYPES[name]
