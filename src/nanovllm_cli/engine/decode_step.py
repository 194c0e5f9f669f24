"""A step of decodes on a GPU: one token of each sequence, from the token that was drawn to the one that is drawn next; or one and
guesses behind it, up to their logits.

Everything it reads lies in buffers that never move, so the step is recorded once for each batch bucket (1, 2, 4, 8, …) and
replayed: embedding, layers, head and sampling in one graph. The rows behind the last sequence of a bucket are padding: they
write nothing and draw nothing. Nor do those of sequences that draw on the host, but they leave their logits. A bucket's first
step runs without a graph, so that nobody waits for the recording; its second is recorded. Where the host divides attention there
is a graph for each power of two of its items. A step with guesses has as many rows as tokens, and draws nothing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.attention.backend import Looking
from nanovllm_cli.attention.cuda import CudaAttention
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine.decode_tables import Tables, slots_of
from nanovllm_cli.engine.decode_work import DecodeWork
from nanovllm_cli.engine.decodes import looks_of
from nanovllm_cli.engine.device_sampler import DeviceSampler
from nanovllm_cli.engine.plan import DRAWN_BEFORE, Scheduled
from nanovllm_cli.engine.sight import rotary_positions
from nanovllm_cli.engine.step_batch import lora_rows
from nanovllm_cli.engine.strategy import MOST_ROWS
from nanovllm_cli.engine.uploads import Uploads
from nanovllm_cli.kernels.device import Device, Graph
from nanovllm_cli.models.decoder import Decoder

logger = logging.getLogger(__name__)

Sampling = tuple[bool, bool]
"""Whether all sequences that draw on the device are greedy; whether any of them wants logprobs."""
Key = tuple[int, int | None, Sampling | None, bool, bool]
"""Rows; room for attention's items, where the host divides it; None for a step with guesses; whether any row takes an adapter;
whether all see something in front of their texts."""
# Lines of the uploaded buffer, each of max_tokens numbers. Known tokens come first: they continue the table of drawn ones.
KNOWN, SOURCE, POSITION, ROPE_LEN, SLOT, NEAR_SLOT, KV_LEN, KNOWN_LEN, SAMPLING_ROW, START, STATE, LEAD, LOOK = range(13)
NUM_LINES = 13


class DecodeStep:
    """max_rows: most sequences of a step. guesses: whether any will be fed; a step has max_tokens tokens at most then.
    table_width: blocks of the longest sequence. most_recorded: of steps with so many tokens graphs are made. keeps_hidden:
    whether `hidden` has the rows [T, hidden] of the last step behind the last norm, to be used before the next. num_modules: of
    adapters that requests choose from."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        backend: CudaAttention,
        cache: KVCache,
        max_rows: int,
        guesses: bool,
        table_width: int,
        most_recorded: float,
        keeps_hidden: bool = False,
        num_modules: int = 0,
    ) -> None:
        self._device = device
        self._model = model
        self._backend = backend
        self._cache = cache
        self._max_rows = max_rows
        self.guesses = guesses
        self.max_tokens = max_tokens = max(max_rows, MOST_ROWS if guesses else 0)
        where = device.launcher.device
        # Drawn tokens by row, and behind them the lines that each step uploads in one copy.
        self._state = torch.zeros(max_rows + NUM_LINES * max_tokens, dtype=torch.int64, device=where)
        self._lines = self._state[max_rows:].view(NUM_LINES, max_tokens)
        self._tables = Tables(device, max_rows, table_width)
        self._near_tables = Tables(device, max_rows, table_width) if any(cache.is_near) else None
        self._logit_rows = torch.arange(max_tokens, dtype=torch.int64, device=where)
        self._uploads = Uploads(device, NUM_LINES * max_tokens, torch.int64)
        self._lora = torch.zeros(max_tokens, num_modules, device=where)
        self._lora_uploads = Uploads(device, max_tokens * num_modules, torch.float32)
        self._keeps_hidden = keeps_hidden
        self.hidden: torch.Tensor | None = None
        self._hidden_read = model.no_rows(max_tokens) if model.reads_hidden else None
        self._work = DecodeWork(device, backend, max_tokens) if backend.deterministic or guesses else None
        self._graphs: dict[Key, tuple[Graph, torch.Tensor, torch.Tensor | None]] = {}
        self._seen: set[Key] = set()
        self._most_recorded = most_recorded
        self.drawn_tokens = self._state[:max_rows]
        self.sampling_rows = self._lines[SAMPLING_ROW].view(torch.int32)[:max_rows]

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(
        self,
        scheduled: Sequence[Scheduled],
        rows_before: dict[int, int],
        slots: list[int],
        sampler: DeviceSampler,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rows_before: sequence id -> row of the step before in which it drew. slots: in the sampling table, of the first rows;
        the others are drawn from by the caller: returns logits [B, V], to be used before the next step. hidden: see Batch."""
        room = self._upload(scheduled, rows_before, slots)
        self._read_hidden(hidden)
        sampling = sampler.needs([share.seq_id for share in scheduled[: len(slots)]])
        bucket, lora, led = self._bucket(len(scheduled)), self._upload_lora(scheduled), self._are_led(scheduled)
        return self._run((bucket, room, sampling, lora, led), sampler)

    def run_guesses(
        self, scheduled: Sequence[Scheduled], sampler: DeviceSampler, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Several tokens of some sequences, max_tokens in all at most: logits [T, V], to be used before the next step."""
        room = self._upload(scheduled, {}, [])
        self._read_hidden(hidden)
        key = sum(len(each.token_ids) for each in scheduled), room, None, self._upload_lora(scheduled), self._are_led(scheduled)
        return self._run(key, sampler)

    def _read_hidden(self, rows: torch.Tensor | None) -> None:
        if rows is not None and self._hidden_read is not None:
            self._hidden_read[: len(rows)].copy_(rows)

    def _run(self, key: Key, sampler: DeviceSampler) -> torch.Tensor:
        recorded = self._graphs.get(key)
        if recorded is None and key[0] <= self._most_recorded and key in self._seen and key[1] != 0:
            recorded = self._record(key, sampler)
        self._seen.add(key)
        if recorded is None:
            return self._launch(key, sampler)
        graph, logits, self.hidden = recorded
        graph.replay()
        return logits

    def warm_up(self, sampler: DeviceSampler) -> None:
        """Compiles the kernels of every bucket, and launches those of the first on a row of padding: no answer is to wait for the
        compiler."""
        chooses = (False, True) if self._lora.numel() else (False,)
        led = (True,) if self._model.spec.cross is not None else (False,) if self._model.spec.looks is None else (False, True)
        kinds = list(itertools.product(chooses, led))
        if self.guesses:
            some = self._divide(np.array([2]), np.array([2]), np.array([2]))
            guesses: list[Key] = [(rows, some, None, *kind) for rows in (2, 4, 8, 16, MOST_ROWS) for kind in kinds]
            self._device.launcher.rehearse(lambda: [self._launch(key, sampler) for key in guesses])
        room = self._upload([], {}, [])
        first: list[Key] = [(1, room, (only_greedy, False), *kind) for only_greedy in (True, False) for kind in kinds]
        buckets = [self._bucket(1 << i) for i in range((self._max_rows - 1).bit_length() + 1)]
        keys = [*first, *((rows, room, (False, True), *kind) for rows in buckets for kind in kinds)]
        self._device.launcher.rehearse(lambda: [self._launch(key, sampler) for key in keys])
        for key in first:
            self._launch(key, sampler)
            self._seen.add(key)

    def _record(self, key: Key, sampler: DeviceSampler) -> tuple[Graph, torch.Tensor, torch.Tensor | None] | None:
        try:
            recorded = *self._device.capture(lambda: self._launch(key, sampler)), self.hidden
        except RuntimeError as error:
            self._most_recorded = 0
            reason = str(error).strip().partition("\n")[0]
            logger.warning("the decode step could not be recorded and runs without graphs: %s", reason)
            return None
        self._graphs[key] = recorded
        return recorded

    def _launch(self, key: Key, sampler: DeviceSampler) -> torch.Tensor:
        rows, room, sampling, chooses, led = key
        lines = self._lines
        batch = Batch(
            token_ids=lines[SOURCE, :rows],
            positions=lines[POSITION, :rows],
            rope_lens=lines[ROPE_LEN, :rows],
            query_starts=lines[START].view(torch.int32)[: rows + 1],
            kv_lens=lines[KV_LEN].view(torch.int32)[:rows],
            known_lens=lines[KNOWN_LEN].view(torch.int32)[:rows],
            slots=lines[SLOT, :rows],
            block_tables=self._tables.there[:rows],
            logit_rows=self._logit_rows[:rows],
            states=lines[STATE].view(torch.int32)[:rows],
            token_table=self._state[: self._max_rows + self.max_tokens],
            looks=lines[LOOK].view(torch.int32).view(-1, 2)[:rows] if led else None,
            leads=lines[LEAD].view(torch.int32)[:rows] if led else None,
            lora=self._lora[:rows] if chooses else None,
            hidden=None if self._hidden_read is None else self._hidden_read[:rows],
            near_slots=None if self._near_tables is None else lines[NEAR_SLOT, :rows],
            near_tables=None if self._near_tables is None else self._near_tables.there[:rows],
        )
        work = None if room is None or self._work is None else self._work.by_shape
        inputs = self._model.inputs(batch, self._backend.decode_step(batch, work))
        hidden = self._model.run(inputs._replace(looking=Looking(None) if led else None), self._cache)
        self.hidden = self._model.kept(hidden) if self._keeps_hidden else None
        logits = self._model.logits(hidden)
        if sampling is not None:
            sampler.draw(logits, *sampling)
        return logits

    def _upload(self, scheduled: Sequence[Scheduled], rows_before: dict[int, int], slots: list[int]) -> int | None:
        """See `DecodeWork.upload`; None where the device divides its attention."""
        upload = self._uploads.take()
        lines = upload.numpy().reshape(NUM_LINES, self.max_tokens)
        count, size = len(scheduled), self._backend.block_size
        fed = [(share, token) for share in scheduled for token in share.token_ids]
        lens = np.array([len(share.token_ids) for share in scheduled], np.int64)
        kv_len = np.array([share.start for share in scheduled], np.int64) + lens
        prompt_len = np.array([share.prompt_len for share in scheduled], np.int64)
        tables = [share.block_table for share in scheduled]
        near = None if self._near_tables is None else [share.near_table for share in scheduled]
        if len(fed) == count:
            position = kv_len - 1
        else:
            position = np.arange(len(fed)) + np.repeat(kv_len - np.cumsum(lens), lens)
            prompt_len = np.repeat(prompt_len, lens)
        known_at = self._max_rows
        source = [
            rows_before[share.seq_id] if token == DRAWN_BEFORE else known_at + row for row, (share, token) in enumerate(fed)
        ]
        lines[KNOWN, : len(fed)] = [token for _, token in fed]
        lines[SOURCE] = lines[SLOT] = lines[NEAR_SLOT] = -1
        lines[SOURCE, : len(fed)] = source
        lines[POSITION] = lines[ROPE_LEN] = lines[LEAD] = lines[LOOK] = 0
        lines[POSITION, : len(fed)] = rotary_positions(scheduled, position)
        lines[ROPE_LEN, : len(fed)] = np.maximum(position + 1, prompt_len)
        lines[SLOT, : len(fed)] = slots_of(tables, lens, position, size)
        if near is not None:
            lines[NEAR_SLOT, : len(fed)] = slots_of(near, lens, position, size)
        kv_lens, known_lens, sampling_rows, starts, states, leads, seen = (
            lines[line].view(np.int32) for line in (KV_LEN, KNOWN_LEN, SAMPLING_ROW, START, STATE, LEAD, LOOK)
        )
        states[:count] = [share.state for share in scheduled]
        kv_lens[:] = known_lens[:] = 0
        kv_lens[:count] = kv_len
        known_lens[:count] = [share.known_len for share in scheduled]
        sampling_rows[:] = -1
        sampling_rows[: len(slots)] = slots
        starts[: self.max_tokens + 1] = np.arange(self.max_tokens + 1)  # a row of padding is a sequence of its own
        if len(fed) > count:
            starts[: count + 1] = np.concatenate(([0], np.cumsum(lens)))
            starts[count + 1 : self.max_tokens + 1] = len(fed)
        looks = looks_of(scheduled, self._model.spec.cross)
        leads[:count], seen.reshape(-1, 2)[: len(fed)] = looks[:, 0], np.repeat(looks[:, 1:], lens, axis=0)
        self._uploads.copy(upload, self._state[self._max_rows :])
        if scheduled:
            self._tables.upload(tables)
            if self._near_tables is not None and near is not None:
                self._near_tables.upload(near)
        if not self._backend.deterministic and len(fed) == count:
            return None
        is_led = not scheduled or self._are_led(scheduled)  # without sequences either kind is prepared
        return self._divide(lens, kv_len - looks[:, 0], looks[:, 2] if is_led else None)

    def _are_led(self, scheduled: Sequence[Scheduled]) -> bool:
        """Whether these see something in front of their texts, of whom all do or none does."""
        return self._model.spec.cross is not None or any(share.lead is not None for share in scheduled)

    def _upload_lora(self, scheduled: Sequence[Scheduled]) -> bool:
        """What each token takes of each adapter; whether any takes any."""
        if (rows := lora_rows(scheduled)) is None:
            return False
        upload = self._lora_uploads.take()
        scales = upload.numpy().reshape(self._lora.shape)
        scales[: len(rows)], scales[len(rows) :] = rows, 0.0
        self._lora_uploads.copy(upload, self._lora.view(-1))
        return True

    def _divide(self, lens: np.ndarray, kv_lens: np.ndarray, seen: np.ndarray | None = None) -> int:
        assert self._work is not None
        return self._work.upload(np.concatenate(([0], np.cumsum(lens))), kv_lens, seen)

    def _bucket(self, count: int) -> int:
        return min(self._max_rows, 1 << (count - 1).bit_length())
