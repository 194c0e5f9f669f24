"""A GPU as a platform: weights in all formats, paged attention by our kernels, recorded decode steps, memory by a profile run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.attention.encoded import EncodedRows
from nanovllm_cli.attention.kv_cache import CacheLayout, KVCache, block_bytes, cache_dtypes, near_bytes, state_bytes
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.cross_spec import LEAD
from nanovllm_cli.distributed.cuda_group import CudaGroup
from nanovllm_cli.distributed.group import Group, Meeting
from nanovllm_cli.engine.cuda_runner import CudaRunner
from nanovllm_cli.engine.decode_step import DecodeStep
from nanovllm_cli.engine.device_sampler import DeviceSampler
from nanovllm_cli.engine.memory import GIB, OVERHEAD_BYTES, available_bytes, least_bytes, near_of
from nanovllm_cli.engine.placement import Part, Placement, asked_for, bytes_of, fitted, in_words
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.runner import pooled_sums
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.step_batch import MIN_TABLE, build_batch
from nanovllm_cli.engine.strategy import MOST_ROWS, most_guesses
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels.connections import NO_DIGESTS, NO_GATED_STREAMS
from nanovllm_cli.kernels.cuda_ops import CudaOps
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.rope_cache import BLOCK_SIZES
from nanovllm_cli.layers.kit import Share
from nanovllm_cli.leading import Glance, Lead
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.text_encoder import TextEncoder
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.quant.cuda_divided import CudaDivided
from nanovllm_cli.quant.cuda_far import FarMemory
from nanovllm_cli.quant.cuda_formats import CudaFormats
from nanovllm_cli.quant.cuda_low_rank import CudaLowRank
from nanovllm_cli.quant.cuda_stacked import CudaStacked
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.low_rank import Beside, Chosen
from nanovllm_cli.quant.storage import WeightStorage
from nanovllm_cli.streams_spec import GatedStreamsSpec
from nanovllm_cli.vision_spec import Sound

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
AMPERE = 80
# Of each sequence: for every token of the vocabulary its logit, the logit as it is drawn from, a count, and bits of masks; and
# the sampling kernels' scratch and lists.
TOKEN_BYTES, ROW_BYTES = 4 + 4 + 2 + 1, 48 << 10
# Recorded steps: their tensors between kernels, one batch after another in the same memory, and the graphs themselves.
GRAPH_BYTES = 256 << 20
# What is kept free beside weights before a step has been run: a context of so many tokens, a token's rows between kernels by the
# model's width, and pieces of weights that are unpacked.
LEAST_CONTEXT, STEP_ROWS, STEP_BYTES = 4096, 12, 384 << 20
TOO_LARGE = "try a smaller model, a smaller --batch-size, or --device cpu"


class CudaPlatform:
    """See `platform.Platform`."""

    def __init__(self, config: EngineConfig, device: Device, progress: LoadProgress | None = None) -> None:
        if config.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UnsupportedError(f"a KV cache with blocks of {config.block_size} tokens on a GPU", f"known: {sizes}")
        k, v = config.cache_types
        if k != v:
            raise UnsupportedError(f"a KV cache of {k} keys and {v} values on a GPU", "give both the same --kv-cache-dtype")
        if config.activations == "rounded":
            raise UnsupportedError(
                "a GPU rounds activations of int8, fp8 and GGUF's formats alone", "leave --activations out, or add --device cpu"
            )
        self.config = config
        self.progress = progress or NullProgress()
        self.device = device
        self.launcher = device.launcher
        self.ops = CudaOps(self.launcher, config.deterministic)
        rounds = config.activations != "exact"
        self._formats = CudaFormats(self.launcher, rounds=rounds, deterministic=config.deterministic)
        self._far_memory = FarMemory(device)
        self._largest_far = 0

    @property
    def processor(self) -> str:
        return f"cuda {self.launcher.capability}"

    @property
    def kind(self) -> str:
        capability, count = self.launcher.capability, self.launcher.num_multiprocessors
        return f"{count} multiprocessors of capability {capability // 10}.{capability % 10}"

    @property
    def most_drafted(self) -> int:
        """As many as are recorded: the step waits for its weights. An estimate."""
        return MOST_ROWS

    @property
    def shares_memory(self) -> bool:
        return False

    def group(self, meeting: Meeting) -> CudaGroup:
        return CudaGroup(meeting, self.device)

    def resolve_dtype(self, stored: set[str], spec: ModelSpec) -> torch.dtype:
        """auto: float16 for matrices that are, unless the model outgrows it, else bfloat16; float16 on a GPU without bfloat16."""
        name = self.config.dtype
        if name == "auto":
            is_half = stored == {"F16"} and not _outgrows_half(spec)
            name = "float16" if is_half or self.launcher.capability < AMPERE else "bfloat16"
        if name not in _DTYPES:
            raise UnsupportedError(f"{name} is not computed on a GPU", "use --dtype bfloat16, --dtype float16 or --device cpu")
        if name == "bfloat16" and self.launcher.capability < AMPERE:
            raise UnsupportedError("this GPU has no bfloat16", "use --dtype float16")
        return _DTYPES[name]

    def enter(self) -> None:
        self.device.enter()

    def check(self) -> None:
        self.device.check()

    def compile(self, dtype: torch.dtype) -> None:
        """Nothing yet: which kernels a model needs is known when it runs, in `cache_budget` and `make_runner`."""

    def available_bytes(self) -> int:
        return self.device.memory().free

    def place(
        self, spec: ModelSpec, layout: CacheLayout, needed: int, sizes: Callable[[], Mapping[Part, int]], organs: int = 0
    ) -> Placement:
        """All on the GPU where it has room beside the cache of a context, or as much as was asked for, or as fits."""
        config, memory, layers = self.config, self.device.memory(), spec.num_layers
        share = int(memory.total * config.gpu_memory_utilization) - (memory.total - memory.free)
        room = share - self._beside_weights(spec, layout) - organs
        far = asked_for(config, layers)
        if far and config.tensor_parallel_size > 1:
            raise UnsupportedError(
                "weights in the machine's memory, of a model that several GPUs compute",
                "leave --n-gpu-layers and --n-cpu-moe out, or --tensor-parallel-size",
            )
        by_group: Mapping[Part, int] = {}
        if far or (needed > room and config.n_gpu_layers is None):
            by_group = sizes()
        if config.n_gpu_layers is None and needed > room and config.tensor_parallel_size == 1:
            far = fitted(by_group, far, layers, needed, room)
        num_far = bytes_of(far, by_group)
        if far != asked_for(config, layers):
            self.progress.note(
                f"{num_far / GIB:.1f} of {needed / GIB:.1f} GiB of weights stay in the machine's memory, as the GPU has room for "
                f"{max(0, room) / GIB:.1f} ({in_words(far, spec)})"
            )
        self._check_room(needed - num_far, num_far, memory.free)
        return Placement(far, spec.tied_head)

    def _beside_weights(self, spec: ModelSpec, layout: CacheLayout) -> int:
        """Bytes that a step and a cache need at the least. An estimate: they are measured when the weights are there."""
        config, size = self.config, self.config.block_size
        length = config.max_model_len or min(spec.max_position, LEAST_CONTEXT)
        blocks = -(-length // size) if config.num_blocks is None else config.num_blocks
        near = near_of(spec, config, near_bytes(spec.mixers, layout)) if config.num_blocks is None else None
        keys = least_bytes(blocks, block_bytes(spec.mixers, layout), size, near)
        cache = config.kv_cache_bytes or keys + state_bytes(spec.mixers, layout)
        widest = max((mlp.intermediate_size for mlp in spec.mlps), default=0)
        step = self._step_tokens(spec) * (STEP_ROWS * spec.hidden_size + 3 * widest) * 2
        return cache + step + self._sampling_bytes(spec) + GRAPH_BYTES + STEP_BYTES

    def _check_room(self, near: int, far: int, free: int) -> None:
        if near + STEP_BYTES > free:
            raise DoesNotFitError(
                f"the weights need {near / GIB:.1f} GiB of the GPU's memory, and {free / GIB:.1f} GiB are free",
                "leave --n-gpu-layers out, and as much as fits is there" if self.config.n_gpu_layers else TOO_LARGE,
            )
        if far + OVERHEAD_BYTES > available_bytes():
            raise DoesNotFitError(
                f"{far / GIB:.1f} GiB of weights that the GPU has no room for need the machine's memory, and "
                f"{available_bytes() / GIB:.1f} GiB of that are free",
                "try a smaller model, or fewer bits with --quant",
            )

    def make_storage(
        self, form: Format | None, num_rows: int, width: int, dtype: torch.dtype, *, far: bool = False
    ) -> WeightStorage:
        try:
            storage = self._formats.make(form, num_rows, width, dtype, self._far_memory if far else None)
            self._largest_far = max(self._largest_far, storage.num_bytes) if far else self._largest_far
            return storage
        except torch.OutOfMemoryError:
            raise self._too_large("the weights do not fit") from None

    def dense_bytes(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        return num_rows * width * dtype.itemsize

    def stack(self, parts: list[WeightStorage], dtype: torch.dtype) -> WeightStorage:
        return CudaStacked(parts, dtype, self.launcher)

    def divided(self, own: WeightStorage, share: Share, group: Group, dtype: torch.dtype) -> WeightStorage:
        assert isinstance(group, CudaGroup)
        return CudaDivided(own, share.division, group, dtype, share.gathers)

    def with_adapters(
        self, weight: WeightStorage, sides: Sequence[Beside], dtype: torch.dtype, chosen: Chosen | None
    ) -> WeightStorage:
        def keep(matrix: torch.Tensor) -> WeightStorage:
            storage = self.make_storage(None, matrix.shape[0], matrix.shape[1], dtype)
            storage.load_rows(0, matrix)
            return storage

        return CudaLowRank(weight, sides, keep, dtype, self.launcher, chosen)

    def backend(self, spec: ModelSpec, dtype: torch.dtype) -> CudaAttention:
        if isinstance(spec.streams, GatedStreamsSpec):
            raise UnsupportedError(*NO_GATED_STREAMS)
        if any(attention.shared is not None for attention in spec.attentions):
            raise UnsupportedError(*NO_DIGESTS)
        if (mixture := spec.mixture) is not None and mixture.seen is not None:
            raise UnsupportedError("experts for images alone (ERNIE 4.5 VL) on a GPU are not supported yet", "add --device cpu")
        cache_dtype, _ = cache_dtypes(self.config.cache_types, dtype)
        longest = self._longest(spec.max_position)
        chunk = spec.chunk if spec.chunk is not None and longest > spec.chunk else None
        if (most := spec.most_seen) is not None and longest > most:
            raise UnsupportedError(
                f"sparse attention, whose tokens see {most} of up to {longest}, on a GPU",
                f"shorten the context to those with --ctx-size {most}, or add --device cpu",
            )
        attentions = spec.attentions + ([] if spec.encoder is None else spec.encoder.attentions)
        encoded = spec.cross or spec.looks
        return CudaAttention(
            self.launcher, attentions, dtype, cache_dtype, self.config.block_size, self.config.max_num_seqs,
            self._table_width(spec.max_position) * self.config.block_size, self.config.deterministic, most_guesses(self.config),
            by_distance=spec.distances is not None, chunk=chunk, encoded=None if encoded is None else encoded.attention,
            cross=spec.cross if spec.cross is not None and spec.cross.rows else None,
        )  # fmt: skip

    def cache_budget(self, *models: Decoder) -> int:
        """What is left of the GPU's share beside the weights, the largest step, and what sampling and graphs take."""
        self.progress.stage("preparing kernels for this GPU", None, "tensors")
        try:
            step = max(map(self._profile, models))
        except torch.OutOfMemoryError:
            tokens = max(self._step_tokens(model.spec) for model in models)
            whole = "texts are computed whole: shorten them with --ctx-size, or add --device cpu"
            hint = whole if tokens > self.config.max_num_batched_tokens else TOO_LARGE
            raise self._too_large(f"a step of {tokens} tokens does not fit", hint) from None
        finally:
            self.progress.done()
        memory = self.device.memory()
        used = memory.total - memory.free
        sampling = sum(self._sampling_bytes(model.spec) for model in models)
        share = int(memory.total * self.config.gpu_memory_utilization)
        return max(0, share - used - step - sampling - (GRAPH_BYTES + self._largest_far) * len(models))

    def make_runner(
        self, model: Decoder, cache: KVCache, sampler: Sampler, recordable: bool, *, keeps_rows: bool = False
    ) -> CudaRunner:
        rows, backend = self.config.max_num_seqs, model.backend
        assert isinstance(backend, CudaAttention)
        width = min(self._table_width(model.spec.max_position), cache.num_blocks)
        reads_lengths = any(rope.scaling == "dynamic" for rope in model.ropes)  # on the host, for their angles
        recordable = recordable and not reads_lengths and not self.config.eager
        guesses = self.config.max_guesses > 0
        most = model.most_unread if recordable else 0
        modules = 0 if model.chosen is None else len(self.config.lora_modules)
        decode = DecodeStep(self.device, model, backend, cache, rows, guesses, width, most, keeps_rows, modules)
        vocab_size, most_rows = model.spec.vocab_size, MOST_ROWS if guesses else 0
        on_device = DeviceSampler(self.device, vocab_size, rows, decode.drawn_tokens, sampler.guide, most_rows)
        on_device.buffers.rows = decode.sampling_rows
        self.progress.stage("preparing decode kernels for this GPU", None, "tensors")
        with torch.inference_mode():
            decode.warm_up(on_device)
        self.progress.done()
        together = self.config.tensor_parallel_size > 1
        return CudaRunner(model, cache, sampler, on_device, decode, self.config.block_size, together)

    def _sampling_bytes(self, spec: ModelSpec) -> int:
        rows = self.config.max_num_seqs + (MOST_ROWS if self.config.max_guesses else 0)
        return rows * (spec.vocab_size * TOKEN_BYTES + ROW_BYTES)

    def _table_width(self, max_position: int) -> int:
        """Blocks of the longest sequence, and as many more as make a power of two; no fewer than `build_batch` gives a table."""
        return max(MIN_TABLE, 1 << (-(-self._longest(max_position) // self.config.block_size) - 1).bit_length())

    def _longest(self, max_position: int) -> int:
        """Tokens of the longest sequence."""
        return min(max_position, self.config.max_model_len or max_position)

    def _step_tokens(self, spec: ModelSpec) -> int:
        """Most tokens of a step. A text that is computed whole has one of its own where it is longer than others may be."""
        longest, most = self._longest(spec.max_position), self.config.max_num_batched_tokens
        return min(max(longest, most) if spec.reads_both_ways else most, self.config.max_num_seqs * longest)

    def _profile(self, model: Decoder) -> int:
        """Bytes that the largest prefill of a step takes beside weights and cache, by running it."""
        size, tokens = self.config.block_size, self._step_tokens(model.spec)
        lead = _lead_of(model.spec, self._longest(model.spec.max_position))
        longest = min(tokens, self._longest(model.spec.max_position) - lead.num_tokens) + lead.num_tokens
        blocks = list(range(-(-longest // size)))  # all have the same: nobody reads what they compute
        cache = KVCache(len(blocks), model.own_mixers, model.backend)

        # Where requests choose adapters, a step of those that do is the larger one; of others kernels do more at once.
        chosen = (1.0,) * len(self.config.lora_modules) if model.chosen is not None else ()

        def step(num_tokens: int, start: int = 0, lora: tuple[float, ...] = chosen) -> list[Scheduled]:
            """As few sequences as have so many tokens from `start` on, embedded where the model does nothing else."""
            start += lead.num_tokens
            most = max(1, longest - start)
            whole = Scheduled(
                0, [0] * most, start, blocks, (0,), prompt_len=longest, lora=lora, shift=-lead.num_tokens,
                lead=lead if lead.glances else None,
            )  # fmt: skip
            whole = whole if model.spec.has_head else whole._replace(draws=(), pooling="mean")
            return [whole._replace(token_ids=[0] * min(most, num_tokens - first)) for first in range(0, num_tokens, most)]

        def chunks(lora: tuple[float, ...] = chosen) -> list[list[Scheduled]]:
            """Their attention has other kernels than a whole prompt's, and each size may have matmuls of its own."""
            return [step(1 << i, 1, lora) for i in range(1, (tokens - 1).bit_length())]

        def alone_and_beside(lora: tuple[float, ...]) -> list[list[Scheduled]]:
            """Where some layers are of whoever looks at something alone, steps in which not all do have kernels of their own."""
            if model.spec.looks is None or tokens < 4:
                return []
            (share, *_) = step(2, lora=lora)
            return [[share, share._replace(lead=None)], [share._replace(lead=None)]]

        def run(steps: list[list[Scheduled]]) -> None:
            for shares in steps:
                batch, owners = build_batch(shares, size)
                if model.reads_hidden:
                    batch = replace(batch, hidden=model.no_rows(batch.num_tokens))
                with torch.inference_mode():
                    hidden = model.run(_with_encoded(model, model.prepare(batch)), cache)
                    if model.spec.has_head:
                        model.logits(hidden)
                    for _ in pooled_sums(model, hidden, owners):
                        pass

        def rehearse() -> None:
            for lora in {(), chosen}:
                run([*chunks(lora), step(tokens, lora=lora), *alone_and_beside(lora)])
            with torch.inference_mode():
                model.rehearse_experts(tokens)
                if model.encoder is not None:
                    _read_texts(TextEncoder(model.encoder, size), min(model.encoder.spec.max_position, longest))

        self.launcher.rehearse(rehearse)
        self.device.forget_peak()
        before = self.device.memory().allocated
        run([*chunks()[:1], step(tokens)])
        if 0 < model.most_unread < tokens:  # of no more, all experts' rows are there at once; of more, an expert's at a time
            run([step(int(model.most_unread))])
        return max(0, self.device.memory().peak - before)

    def _too_large(self, what: str, hint: str = TOO_LARGE) -> DoesNotFitError:
        memory = self.device.memory()
        return DoesNotFitError(
            f"{what}: {memory.free / GIB:.1f} of the GPU's {memory.total / GIB:.1f} GiB are free", hint
        )


def _outgrows_half(spec: ModelSpec) -> bool:
    """Whether numbers between its layers may be larger than float16 holds: where norms are behind what joins the residual stream
    (Gemma 2 and 3, GLM-4, PLaMo 2: vLLM computes none of them in float16), and of T5s, whose last matrices of MLPs transformers
    keeps in float32."""
    return spec.blocks[0].order == "sandwich" or (spec.encoder is not None and spec.distances is not None)


def _lead_of(spec: ModelSpec, longest: int) -> Lead:
    """What is in front of a text for which a step's memory is measured, where something is: of an encoder's rows."""
    if spec.cross is not None and spec.cross.rows:
        return Lead(spec.cross.lead, ())
    if (spec.cross or spec.looks) is None:
        return Lead(0, ())
    return Lead(LEAD, (Glance(0, 0, LEAD),)) if longest > LEAD else Lead(0, (Glance(0, 0, 1),))


def _read_texts(encoder: TextEncoder, longest: int) -> None:
    """Of 1, 2, 4, … tokens, up to so many: their steps have kernels of their own."""
    for count in (*(1 << i for i in range((longest - 1).bit_length())), longest):
        for _ in encoder.stages(Sound.of_text([0] * count)):
            pass


def _with_encoded(model: Decoder, inputs: StepInputs) -> StepInputs:
    """The same, of a step that keeps as many rows of an encoder's as it has tokens."""
    if (model.spec.cross or model.spec.looks) is None:
        return inputs
    slots, rows = inputs.batch.slots, model.no_rows(inputs.batch.num_tokens)
    return inputs._replace(encoded=EncodedRows(rows, slots, torch.ones_like(slots, dtype=torch.int32), inputs.batch.lora))
