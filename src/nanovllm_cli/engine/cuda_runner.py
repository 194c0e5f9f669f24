"""Plans on a GPU. A step of decodes is a `DecodeStep`, recorded and replayed; any other step runs launch by launch. In both some
sequences may draw on the host, from their rows of the logits.

`submit` returns before the device is done, so that the next step can be planned and started meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.engine.decode_step import DecodeStep
from nanovllm_cli.engine.device_sampler import DeviceSampler
from nanovllm_cli.engine.plan import Drawn, Plan, Scheduled, StepOutput, TokenLogprobs
from nanovllm_cli.engine.runner import pooled_of, prompt_logprobs_of
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden, take_rows
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.sampling_params import SamplingParams

Read = Callable[[], list[Drawn]]


class CudaRunner:
    """decode: None where every step runs launch by launch (a deterministic GPU). sampler draws on the host, on_device there."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        on_device: DeviceSampler,
        decode: DecodeStep | None,
        block_size: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.on_device = on_device
        self.decode = decode
        self.block_size = block_size
        self._rows_before: dict[int, int] = {}

    def run(self, plan: Plan) -> StepOutput:
        """See PlanRunner.run."""
        return self.submit(plan)()

    def draws_unseen(self, params: SamplingParams) -> bool:
        """See RunsAhead. Stop ids only matter to the sampler with min_tokens, and then may be too many for it."""
        sees_prompt = params.prompt_logprobs is not None
        return self.decode is not None and not sees_prompt and not params.min_tokens and self.on_device.takes(params, ())

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        """See RunsAhead."""
        for seq_id in plan.finished:
            self.sampler.remove(seq_id)
            self.on_device.remove(seq_id)
        for new in plan.new:
            where = self.on_device if self.on_device.takes(new.params, new.stop_ids) else self.sampler
            where.add(new)
        self.cache.copy_blocks(plan.copies)
        if not plan.scheduled:
            return lambda: StepOutput([], {})
        if self.decode is not None and all(map(_is_plain_decode, plan.scheduled)):
            return self._decode(self.decode, plan.scheduled)
        return self._step(plan.scheduled)

    def _decode(self, decode: DecodeStep, scheduled: list[Scheduled]) -> Callable[[], StepOutput]:
        there = [share for share in scheduled if share.seq_id in self.on_device]
        here = [share for share in scheduled if share.seq_id not in self.on_device]
        seq_ids, others = [share.seq_id for share in there], [share.seq_id for share in here]
        self.sampler.start_masks(others)
        logits = decode.run(there + here, self._rows_before, self.on_device.seat(seq_ids), self.on_device)
        self._rows_before = {}
        read = self._read(seq_ids)
        drawn = self.sampler.sample(others, logits[len(there) : len(scheduled)]) if others else []
        return lambda: StepOutput(drawn + read(), {})

    def _step(self, scheduled: list[Scheduled]) -> Callable[[], StepOutput]:
        batch, owners = build_batch(scheduled, self.block_size)
        draws = [
            (seq_id, first + len(share.wanted_rows) - 1) for share, first in owners for seq_id in share.draws
        ]
        here = [draw for draw in draws if draw[0] not in self.on_device]
        there = [draw for draw in draws if draw[0] in self.on_device]
        # One part, but where a prompt has more answers than there are seats.
        most = self.on_device.max_rows
        parts = [there[first : first + most] for first in range(0, len(there), most)]
        if parts:
            self._seat(parts[0])  # its copies wait for the device, which has nothing to do yet
        self.sampler.start_masks([seq_id for seq_id, _ in here])
        hidden = self.model.run(self.model.prepare(batch), self.cache)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {
            share.seq_id: prompt_logprobs_of(self.model, self.sampler, hidden, first, share)
            for share, first in owners
            if share.prompt_logprobs is not None
        }
        pooled = pooled_of(self.model, hidden, owners)
        logits = self._logits(hidden, here) if here else None  # if there is no room for them, nothing has been drawn
        self._rows_before = {}
        drawn: list[Drawn] = []
        read: Read = list
        for part in parts:
            if part is not parts[0]:
                drawn += read()
                self._seat(part)
            seq_ids = [seq_id for seq_id, _ in part]
            self.on_device.draw(self._logits(hidden, part), *self.on_device.needs(seq_ids))
            read = self._read(seq_ids)
        if logits is not None:
            drawn += self.sampler.sample([seq_id for seq_id, _ in here], logits)
        return lambda: StepOutput(drawn + read(), prompt_logprobs, pooled)

    def _logits(self, hidden: Hidden, draws: list[tuple[int, int]]) -> torch.Tensor:
        return self.model.logits(take_rows(hidden, [row for _, row in draws]))

    def _seat(self, draws: list[tuple[int, int]]) -> None:
        slots = torch.tensor(self.on_device.seat([seq_id for seq_id, _ in draws]), dtype=torch.int32)
        self.on_device.buffers.rows[: len(draws)].copy_(slots)

    def _read(self, seq_ids: list[int]) -> Read:
        if not seq_ids:
            return list
        self._rows_before = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        return self.on_device.read(seq_ids, self.on_device.needs(seq_ids)[1])


def _is_plain_decode(share: Scheduled) -> bool:
    return share.draws == (share.seq_id,) and len(share.token_ids) == 1 and share.prompt_logprobs is None
