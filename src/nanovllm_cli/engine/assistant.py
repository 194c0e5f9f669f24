"""Speculation by an assistant (`models/assistant.py`): it reads what the model keeps and says what comes next, and the model
computes all of that in one step and draws from each row.

It keeps nothing itself. Of each sequence it needs the model's row of the token before the one that was drawn last, which the step
gave that drew it. Where that is not there, as of a sequence that somebody else's step has led on, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import BorrowedCache, KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.drafting import Guesser, LoadedGuesser
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.memory import check_weights_fit
from nanovllm_cli.engine.plan import Drawn, NewSequence, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.platform import KeptRows
from nanovllm_cli.models.assistant import Assistant
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import load_weights, read_assistant


class _Last(NamedTuple):
    """Of a sequence: where its last drawn token stands, and the model's row of the token before it, [1, hidden]."""

    place: int
    row: torch.Tensor


class LoadedAssistant(LoadedGuesser):
    """For `loaded`, whose embedding and cache it reads. UnsupportedError where it is made for another model; otherwise as
    LoadedModel."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, progress: LoadProgress) -> None:
        super().__init__(checkpoint, config, loaded)
        self.spec = self.own_spec = read_assistant(checkpoint, self._reader, loaded.spec)
        check_weights_fit(self._num_bytes(), self.platform.available_bytes())
        self.model = Assistant(self.spec, self._kit(), loaded.model)
        self.platform.compile(self.dtype)
        load_weights(self.model, checkpoint, self._reader, progress)
        self._count()


class AssistantDraft(Guesser):
    """cache: the model's."""

    def __init__(self, loaded: LoadedAssistant, cache: KVCache, config: EngineConfig) -> None:
        super().__init__(loaded, BorrowedCache(cache, loaded.spec.mixers), config, keeps_rows=True)
        self._last: dict[int, _Last] = {}

    def follow(self, kept: Sequence[KeptRows], output: StepOutput) -> None:
        num_drawn = {each.seq_id: len(each.token_ids) for each in output.drawn if each.error is None}
        for share, rows in kept:
            for seq_id in share.draws:
                held = min(num_drawn.get(seq_id, 0) - 1, share.num_guesses)
                self._last.pop(seq_id, None)
                if held >= 0:
                    place = share.start + len(share.known) + held
                    row = len(rows) - 1 - share.num_guesses + held  # behind those of a prompt whose rows are all wanted
                    self._last[seq_id] = _Last(place, rows[row : row + 1].clone())

    def _begin(self, plan: Plan) -> None:
        for seq_id in plan.finished:
            self._last.pop(seq_id, None)
        self._runner.run(Plan([], [], plan.finished, []))

    def _draw_first(self, scheduled: Sequence[Scheduled]) -> list[Drawn]:
        able = {share.seq_id: share for share in scheduled if share.num_guesses and self._knows(share)}
        rows = {seq_id: self._last[seq_id].row for seq_id in able}
        return self._draw(able, {seq_id: share.known[-1] for seq_id, share in able.items()}, 0, rows, self._new(able))

    def _draw_more(self, going: Mapping[int, Scheduled], tokens: Mapping[int, int], count: int) -> list[Drawn]:
        """By its own rows."""
        return self._draw(going, tokens, count, {share.seq_id: rows for share, rows in self._runner.hidden})

    def _knows(self, share: Scheduled) -> bool:
        last = self._last.get(share.seq_id)
        return last is not None and last.place == share.start and len(share.known) == 1

    def _draw(
        self, shares: Mapping[int, Scheduled], tokens: Mapping[int, int], num_drawn: int, rows: Mapping[int, torch.Tensor],
        new: Sequence[NewSequence] = (),
    ) -> list[Drawn]:  # fmt: skip
        """What it draws behind `tokens`. num_drawn: since the sequences were new. Every guess stands where the last known token
        does, and sees what is kept, which is what lies before that."""
        if not shares:
            return []
        fed = [
            Scheduled(
                seq_id, [tokens[seq_id]], share.start - 1, self._blocks(share, share.start), (seq_id,),
                prompt_len=share.start - num_drawn, every_row=True, keeps_hidden=True, near_table=self._parts(share),
            )
            for seq_id, share in shares.items()
        ]  # fmt: skip
        return self._runner.run(Plan(fed, list(new), [], []), torch.cat([rows[seq_id] for seq_id in shares])).drawn

    def _parts(self, share: Scheduled) -> Sequence[int]:
        """Beside its blocks: this reads what the model keeps."""
        return share.near_table[: len(self._blocks(share, share.start))]

    def _filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        return super()._filled(share._replace(keeps_drawn=bool(share.draws)), guesses)
