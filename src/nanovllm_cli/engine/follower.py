"""What a process does that computes a model with others and is not the first: each step that this one does, on its share of the
weights. It draws nothing, and knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import torch

from nanovllm_cli.attention.kv_cache import BlockMover, KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.distributed.group import Meeting
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.plan import Drawn, NewSequence, Scheduled, TokenLogprobs
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.engine.platforms import platform_of
from nanovllm_cli.engine.rank_messages import (
    Begin,
    Failed,
    Line,
    Loaded,
    Make,
    Measure,
    Measured,
    Put,
    Run,
    Take,
    Taken,
    ToRank,
)
from nanovllm_cli.engine.sampler import Mask, Sampler
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.weights.checkpoint import open_checkpoint


def end_process() -> None:
    """At once, in the midst of a step too: nobody waits for it."""
    os._exit(0)


def follow(
    fd: int,
    handle: int,
    at_end: Callable[[], None] = end_process,
    make_platform: Callable[[EngineConfig, LoadProgress | None], Platform] = platform_of,
) -> None:
    """Until the other end of the connection is closed, when at_end is called. fd: this end; handle: of the shared memory."""
    line: Line[ToRank] = Line(fd, ToRank, at_end, parent=os.getppid())
    try:
        begin = line.receive()
    except (EOFError, OSError):
        return
    assert isinstance(begin, Begin)
    meeting = Meeting(begin.rank, begin.config.tensor_parallel_size, handle)
    try:
        try:
            platform = make_platform(begin.config, None)
            with open_checkpoint(begin.model, overrides=begin.config.overrides) as checkpoint:
                model = LoadedModel(checkpoint, begin.config, platform, NullProgress(), platform.group(meeting))
            line.send(Loaded(model.sizes, platform.kind))
            make = line.receive()
            if isinstance(make, Measure):
                line.send(Measured(platform.cache_budget(model.model)))
                make = line.receive()
        except NanovllmError as error:
            meeting.break_off()
            with contextlib.suppress(OSError, EOFError):  # the first process may have found the same
                line.send(Failed(type(error).__name__, error.message, error.hint))
                line.receive()
            return
        except (EOFError, OSError):
            return
        assert isinstance(make, Make)
        _Follower(model, make, line).run()
    finally:  # whatever it was, the others are not to wait
        meeting.break_off()


class _Follower:
    def __init__(self, model: LoadedModel, make: Make, line: Line[ToRank]) -> None:
        self._platform = model.platform
        self._cache = KVCache(
            make.num_blocks, model.own_spec.mixers, model.model.backend, make.num_states, make.num_parts
        )
        sampler = _NoSampler(model.spec.vocab_size)
        self._runner = model.platform.make_runner(model.model, self._cache, sampler, model.recordable)
        self._sight = model.sight
        if model.sight is not None:
            self._runner.see = model.sight.rows
        self._line = line

    def run(self) -> None:
        """Until the line ends."""
        while True:
            try:
                message = self._line.receive()
            except (EOFError, OSError):
                return
            self._platform.enter()
            match message:
                case Run(plan):
                    with torch.inference_mode():
                        if plan.look is not None:
                            assert self._sight is not None
                            self._sight.look(plan.look)
                        self._runner.run(plan)
                case Take(which, parts):
                    found = self._states.take_out(which) if parts is None else self._cache.take_out(which, parts)
                    self._line.send(Taken(found.numpy().tobytes()))
                case Put(which, parts, data):
                    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(which), -1)
                    if parts is None:
                        self._states.put_in(which, rows)
                    else:
                        self._cache.put_in(which, parts, rows)
                case _:
                    raise ValueError(f"a {type(message).__name__} in the midst of it")

    @property
    def _states(self) -> BlockMover:
        assert self._cache.states is not None
        return self._cache.states


class _NoSampler(Sampler):
    """Draws nothing: the first process does."""

    def add(self, new: NewSequence) -> None:
        raise AssertionError("nobody tells of them")

    def keep(self, scheduled: Sequence[Scheduled]) -> None:
        pass

    def start_masks(self, seq_ids: Sequence[int]) -> None:
        pass

    def sample(
        self,
        seq_ids: Sequence[int],
        logits: torch.Tensor,
        rows: Sequence[int] | None = None,
        masks: Sequence[Mask] | None = None,
    ) -> list[Drawn]:
        return [Drawn(seq_id, []) for seq_id in seq_ids]

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], num: int) -> list[TokenLogprobs]:
        return []
