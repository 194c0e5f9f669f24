"""A loaded model, its KV cache and a runner, and the other processes that compute it together with this one, if there are any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm_cli.attention.kv_cache import BlockMover, KVCache, parts_of
from nanovllm_cli.config import AS_TRAINED, EngineConfig
from nanovllm_cli.constrain.compiler import Compiler, vocabulary_maker
from nanovllm_cli.engine.assistant import AssistantDraft, LoadedAssistant
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.draft import Draft, assists
from nanovllm_cli.engine.drafting import Guesser, LoadedGuesser
from nanovllm_cli.engine.eagle import EagleDraft, LoadedEagle
from nanovllm_cli.engine.executor import RunsAhead
from nanovllm_cli.engine.interrupts import let_in
from nanovllm_cli.engine.loaded_model import LoadedModel, Sizes
from nanovllm_cli.engine.memory import near_of, size_cache
from nanovllm_cli.engine.mtp import LoadedMTP, MTPDraft
from nanovllm_cli.engine.near import NearRoom
from nanovllm_cli.engine.plan import Plan, StepOutput
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.engine.platforms import resolved_device, select_platform
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.sight import Sight
from nanovllm_cli.errors import LostProcessError, UnsupportedError
from nanovllm_cli.images.sizes import most_tokens
from nanovllm_cli.overrides import check_asked
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm_cli.weights.fingerprint import file_stamps

if TYPE_CHECKING:
    from nanovllm_cli.engine.ranks import Ranks

EncodeText = Callable[[str], list[int]]
TokenBytes = Callable[[], Sequence[bytes]]


class Worker(LoadedModel):
    """Loads a checkpoint and executes plans.

    encode: text -> ids without special tokens, token_bytes: the bytes of every token, control_ids: tokens that no text spells;
    for sampling parameters that are given as text (bad_words, DRY's breakers, constraints).
    platform: where; by default what `config.device` says. A draft model that the config names has a block beside each of this
    one's, which block_bytes counts.
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
        progress = progress or NullProgress()
        if platform is None:
            config = replace(config, device=resolved_device(config))
        on_gpus = config.device != "cpu" if platform is None else not platform.shares_memory
        self._ranks = ranks = _started_ranks(checkpoint, config, on_gpus)
        with ExitStack() as undone:
            if ranks is not None:
                undone.callback(ranks.close)
                config = ranks.config
            self._config = config
            platform = platform or select_platform(config, progress)
            super().__init__(checkpoint, config, platform, progress, None if ranks is None else platform.group(ranks.meeting))
            if ranks is not None:
                ranks.wait(platform.kind)
            guesser = self._loaded_guesser(checkpoint, progress)
            for note in check_asked(checkpoint.config):
                progress.note(note)
            self._make_caches([self] if guesser is None or isinstance(guesser, LoadedAssistant) else [self, guesser])
            self._compiler: Compiler | None = None
            if encode is not None and token_bytes is not None:
                begins = self.spec.encoder is not None
                self._compiler = Compiler(vocabulary_maker(token_bytes, control_ids, encode, begins=begins))
            sampler = Sampler(self.spec.vocab_size, encode=encode, token_bytes=token_bytes, compiler=self._compiler)
            keeps_rows = isinstance(guesser, LoadedGuesser)
            self.runner = platform.make_runner(self.model, self._caches[0], sampler, self.recordable, keeps_rows=keeps_rows)
            if self.sight is not None:
                self.runner.see = self.sight.rows
            self._draft: Guesser | None = None
            match guesser:
                case LoadedMTP():
                    self._draft = MTPDraft(guesser, self._caches[1], config)
                case LoadedEagle():
                    self._draft = EagleDraft(guesser, self._caches[1], config)
                case LoadedAssistant():
                    self._draft = AssistantDraft(guesser, self._caches[0], config)
                case LoadedModel():
                    self._draft = Draft(guesser, self._caches[1], config, self.spec.vocab_size)
            undone.pop_all()

    def _loaded_guesser(self, checkpoint: Checkpoint, progress: LoadProgress) -> LoadedModel | None:
        """What guesses for this model, where something does."""
        config = self._config
        if (self.spec.cross or self.spec.looks) is not None and config.draft_model is not None:
            told = "a draft model beside one whose layers attend to what it hears, or sees"
            raise UnsupportedError(told, "--speculate guesses without one")
        if config.mtp:
            return LoadedMTP(checkpoint, config, self, progress)
        if config.draft_model is None:
            return None
        with open_checkpoint(config.draft_model) as draft:
            own = replace(config, quant=config.draft_quant, lora=(), lora_modules=(), control_vectors=(),
                          control_vector_layers=None, mmproj=None, n_gpu_layers=None, n_cpu_moe=0, rope=AS_TRAINED)  # fmt: skip
            match assists(config.draft_model):
                case "cache":
                    return LoadedAssistant(draft, own, self, progress)
                case "rows":
                    return LoadedEagle(draft, own, self, progress)
            try:
                guesser = LoadedModel(draft, own, self.platform, progress, sees=False)
            except UnsupportedError as error:
                raise UnsupportedError(f"the draft model {config.draft_model}: {error.message}", error.hint) from None
        if not guesser.spec.has_head:
            raise UnsupportedError(f"{config.draft_model} is an embedding model, which guesses nothing", "take another one")
        if guesser.spec.has_states and not self.spec.has_states:
            raise UnsupportedError(
                f"a {guesser.spec.architecture} model can't draft for a {self.spec.architecture} model, which keeps no states",
                "take one of the same architecture",
            )
        return guesser

    def _make_caches(self, models: list[LoadedModel]) -> None:
        """Of this model and of what guesses for it, of as many blocks; and those of the other processes."""
        config, ranks = self._config, self._ranks
        self._others = Sizes(*[0] * len(Sizes._fields)) if ranks is None else ranks.sizes
        self._block_parts = [*(each.block_bytes for each in models), self._others.block_bytes]
        self.block_bytes = sum(self._block_parts)
        self._state_parts = [*(each.state_bytes for each in models), self._others.state_bytes]
        self.state_bytes = sum(self._state_parts)
        shares = self.platform.shares_memory
        if ranks is not None and not shares:
            ranks.measure()
        budget = self.platform.cache_budget(*(each.model for each in models))
        if self.sight is not None and (shares or ranks is None):  # elsewhere they are there already
            # half at least is for the cache: nobody may ever send an image
            budget = max(budget // 2, budget - self.sight.num_bytes * config.tensor_parallel_size)
        if ranks is not None and not shares:
            self.platform.check()  # the others wait for what is under way here
            own = self.block_bytes + self.state_bytes - self._others.block_bytes - self._others.state_bytes
            budget = int(min(budget / own, ranks.least_share()) * (self.block_bytes + self.state_bytes))
        near = near_of(self.spec, config, self.near_bytes + self._others.near_bytes, self._longest_image)
        if ranks is not None and not shares and not ranks.are_like(sum(self._block_parts[:-1]), self.near_bytes):
            near = None  # what of one's block is no near part is a larger share than of another's
        whole = self.spec.reads_both_ways
        size = size_cache(config, self.spec.max_position, self.block_bytes, budget, self.state_bytes, near, whole=whole)
        self.num_blocks, self.max_model_len, self.num_states, num_near = size
        self.near = NearRoom() if near is None or not num_near else NearRoom(num_near, near.reach)
        self.kv_bytes: int = size.num_bytes(self.block_bytes, self.state_bytes, 0 if near is None else near.num_bytes)
        self._caches = [  # what guesses has all parts
            KVCache(self.num_blocks, each.own_spec.mixers, each.model.backend, self.num_states, num_near if each is self else 0)
            for each in models
        ]
        if ranks is not None:
            ranks.make_caches(self.num_blocks, self.num_states, num_near)

    @property
    def _longest_image(self) -> int:
        """Tokens of the longest one that no step may cut."""
        vision = None if self.sight is None else self.sight.senses.vision
        if vision is None or not vision.whole:
            return 0
        return vision.prefix or most_tokens(vision)

    @property
    def weight_bytes(self) -> int:
        """Of all processes, as the next two."""
        return super().weight_bytes + self._others.weight_bytes

    @property
    def read_bytes(self) -> int:
        return super().read_bytes + self._others.read_bytes

    @property
    def expert_bytes(self) -> int:
        return super().expert_bytes + self._others.expert_bytes

    @property
    def num_threads(self) -> int | None:
        """Of all processes; None on a GPU."""
        platform = self.platform
        return platform.threads * self._config.tensor_parallel_size if isinstance(platform, CpuPlatform) else None

    @property
    def draft_bytes(self) -> int:
        """Memory of the matrices of what guesses."""
        return 0 if self._draft is None else self._draft.weight_bytes

    @property
    def most_drafted(self) -> int:
        """See Executor."""
        return self.platform.most_drafted

    @property
    def ahead(self) -> RunsAhead | None:
        """This worker as one that starts a step before the last one's tokens are read, where its runner can, nobody drafts, and
        no other process has to be told the tokens."""
        can = isinstance(self.runner, RunsAhead) and self._draft is None and self._ranks is None
        return _Ahead(self.platform, weakref.proxy(self.runner), self.sight) if can else None

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """See Prepare."""
        return self._compiler.prepare(params) if self._compiler is not None else None

    def check(self) -> None:
        """Raises LostError where another process that computes the model has ended, or the device can't be used any more."""
        self.platform.check()
        if self._ranks is not None:
            self._ranks.check()

    def execute(self, plan: Plan) -> StepOutput:
        """See PlanRunner.run. May be called from any one thread at a time. Raises LostError where no step can be any more."""
        self.platform.enter()
        with _telling_of_losses(self.platform), torch.inference_mode():
            if self._draft is None:
                return self._run(plan)
            plan, guesses = self._draft.fill(plan)
            output = self._run(plan)._replace(guesses=guesses)
            self._draft.follow(self.runner.hidden, output)
            return output

    def _run(self, plan: Plan) -> StepOutput:
        ranks = self._ranks
        if ranks is None:
            return self._computed(plan)
        plan = self.runner.arranged(plan)
        try:
            ranks.run(plan)
            output = self._computed(plan)
        except BaseException as failure:  # the others are in the midst of the step, and nobody can tell where
            ranks.meeting.break_off()
            if isinstance(failure, Exception) and not isinstance(failure, LostProcessError):
                raise LostProcessError(f"a step failed ({failure!r}), which the other processes can't leave") from failure
            raise
        ranks.check()
        return output

    def _computed(self, plan: Plan) -> StepOutput:
        if plan.look is None:
            return self.runner.run(plan)
        assert self.sight is not None
        with let_in() if self._ranks is None else nullcontext():  # the others can't leave a step in its midst
            left = self.sight.look(plan.look)
        return self.runner.run(plan)._replace(stages_left=left)

    @property
    def _drafted_by(self) -> list[object]:
        """What tells one draft model from another; an assistant keeps nothing."""
        path, quant = self._config.draft_model, self._config.draft_quant
        return [] if path is None or isinstance(self._draft, AssistantDraft) else [quant, file_stamps(Path(path)) or path]

    @property
    def cache_kind(self) -> dict[str, object]:
        """What a block of the cache depends on beside weights and tokens: settings, layout, and what computes it."""
        config = self._config
        k, v = self.model.backend.cache_dtypes
        return {
            "processor": self.platform.processor,
            "deterministic": config.deterministic,
            "quant": config.quant,
            "lora": self.lora,
            "lora_modules": [file_stamps(Path(module.path)) for module in config.lora_modules],
            "control_vectors": [self.led_by, config.control_vector_layers],
            "draft_model": ["mtp"] if config.mtp else self._drafted_by,
            "dtypes": [str(self.dtype), str(k), str(v)],
            "layers": [str(parts_of(mixer, self.model.backend)) for mixer in self.own_spec.mixers],
            "rope": list(config.rope),
            "overrides": list(config.overrides),
            "processes": config.tensor_parallel_size,
            "block": [config.block_size, self.block_bytes],
        }

    def _enter_settled(self) -> None:
        """Whoever moves blocks is to find all in them that belongs there."""
        self.platform.enter()
        if self._draft is not None:
            with torch.inference_mode():
                self._draft.settle()

    def read_blocks(self, blocks: list[int], parts: list[int]) -> memoryview:
        """See Executor."""
        self._enter_settled()
        if not self.block_bytes:
            return memoryview(b"")
        found = [cache.take_out(blocks, parts) for cache in self._caches]
        others = [] if self._ranks is None else self._ranks.take(blocks, parts)
        return torch.cat([*found, *others], dim=1).flatten().numpy().data

    def write_blocks(self, blocks: list[int], parts: list[int], data: memoryview) -> None:
        """See Executor."""
        self._enter_settled()
        if not self.block_bytes:
            return
        rows = torch.frombuffer(data, dtype=torch.uint8).view(len(blocks), self.block_bytes)
        *own, others = torch.split(rows, self._block_parts, dim=1)
        for cache, data_of_it in zip(self._caches, own, strict=True):
            cache.put_in(blocks, parts, data_of_it)
        if self._ranks is not None:
            self._ranks.put(blocks, parts, others)

    def read_state(self, state: int) -> memoryview:
        """See Executor."""
        self.platform.enter()
        found = [states.take_out([state]) for states in self._movers]
        others = [] if self._ranks is None else self._ranks.take([state], None)
        return torch.cat([*found, *others], dim=1).flatten().numpy().data

    def write_state(self, state: int, data: memoryview) -> None:
        """See Executor."""
        self.platform.enter()
        row = torch.frombuffer(data, dtype=torch.uint8).view(1, self.state_bytes)
        *parts, others = torch.split(row, self._state_parts, dim=1)
        for states, part in zip(self._movers, [part for part in parts if part.numel()], strict=True):
            states.put_in([state], part.contiguous())
        if self._ranks is not None:
            self._ranks.put([state], None, others)

    @property
    def _movers(self) -> list[BlockMover]:
        return [cache.states for cache in self._caches if cache.states is not None]

    def close(self) -> None:
        """Lets go of weights and cache; the worker is of no use afterwards."""
        self._storages = []
        if self._ranks is not None:
            self._ranks.close()
        if self._compiler is not None:
            self._compiler.close()
        del self.model, self.runner, self._caches, self._draft


@dataclass(frozen=True, eq=False)
class _Ahead:
    """See RunsAhead. The runner, in the surroundings that `Worker.execute` gives it; a proxy of it, as `Worker.close` lets go of
    the memory."""

    platform: Platform
    runner: RunsAhead
    sight: Sight | None

    def draws_unseen(self, params: SamplingParams) -> bool:
        return self.runner.draws_unseen(params)

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        self.platform.enter()
        left = 0
        with torch.inference_mode():
            if plan.look is not None:
                assert self.sight is not None
                left = self.sight.look(plan.look)
            output = self.runner.submit(plan)

        def read() -> StepOutput:
            with _telling_of_losses(self.platform):
                return output()._replace(stages_left=left)

        return read


@contextmanager
def _telling_of_losses(platform: Platform) -> Iterator[None]:
    """Where the device is lost, that is what a step's failure comes to."""
    try:
        yield
    except Exception:
        platform.check()
        raise


def _started_ranks(checkpoint: Checkpoint, config: EngineConfig, on_gpus: bool) -> Ranks | None:
    """The other processes. config: names the first GPU, if they compute on GPUs."""
    if config.tensor_parallel_size == 1:
        return None
    if config.mtp:
        raise UnsupportedError(
            "a layer that predicts further tokens (MTP) is not divided among processes",
            "leave --mtp or --tensor-parallel-size out",
        )
    if config.draft_model is not None and assists(config.draft_model):
        raise UnsupportedError(
            "what such a drafter reads of a model is not divided among processes",
            "leave --draft-model or --tensor-parallel-size out",
        )
    from nanovllm_cli.engine.ranks import Ranks  # and its library of messages, which only this needs

    return Ranks(str(checkpoint.path), config, on_gpus=on_gpus)
