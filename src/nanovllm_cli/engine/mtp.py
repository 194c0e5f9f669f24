"""Speculation by a layer of the model's own (`models/mtp.py`): it says what comes next, and the model computes all of that in one
step and draws from each row.

The layer reads tokens and, of each, what the model made of the token before it. Its K and V lie in blocks beside the model's, at
the same places. Before a step it is fed what the last one was fed, with the rows that this gave, then the token that was drawn,
and guesses: so whatever fails or is broken off, nothing has been drawn yet. What it was fed of guesses is written over when the
model's rows of them are there. A row that nobody has any more, as of a prefix that was found, is zeros: a guess may then be
worse, but a guess changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.drafting import Guesser, LoadedGuesser
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.memory import check_weights_fit
from nanovllm_cli.engine.plan import Drawn, NewSequence, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.platform import KeptRows
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.mtp import MTP, mtp_spec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import head_name, load_mtp
from nanovllm_cli.weights.tensor_names import mtp_names_of, of_that_layer

MOST_UNFED = 16
"""Tokens of a sequence that nobody guesses behind: several at once take little longer than one."""


class _Unfed(NamedTuple):
    """Tokens of a sequence that the layer has still to be fed, from position `start` on, and the model's rows of the tokens
    before each of them and of the last: [1 + len(tokens), hidden]."""

    start: int
    tokens: list[int]
    rows: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Fed(NamedTuple):
    """A share of a step for the layer, and the rows that it reads beside the share's tokens."""

    share: Scheduled
    rows: torch.Tensor


class LoadedMTP(LoadedGuesser):
    """The layer behind a model's own that predicts further tokens, of `loaded`'s checkpoint: it has that model's embedding and
    head. UnsupportedError where the checkpoint has none, or one of a family whose is not known; otherwise as LoadedModel."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, progress: LoadProgress) -> None:
        table = mtp_names_of(checkpoint)
        if table is None:
            hint = "leave --mtp out; --speculate N and --draft-model NAME guess without one"
            if loaded.spec.architecture.startswith("gemma4"):
                hint = "Gemma 4's is a model of its own: --draft-model NAME-assistant, such as google/gemma-4-E2B-it-assistant"
            raise UnsupportedError(f"{checkpoint.path} has no layer that predicts further tokens (MTP)", hint)
        super().__init__(checkpoint, config, loaded, table)
        self.spec = self.own_spec = mtp_spec(loaded.spec)
        needed = self._num_bytes(of_that_layer(table, self._reader.names()))
        needed += self._num_bytes([head_name(table, self.spec)]) * self.spec.vocab_size // loaded.spec.vocab_size
        check_weights_fit(needed, self.platform.available_bytes())
        self.model = MTP(self.spec, self._kit(), loaded.model)
        self.platform.compile(self.dtype)
        load_mtp(self.model, checkpoint, self._reader, table, progress)
        self._count()


class MTPDraft(Guesser):
    """cache: of as many blocks as the model's."""

    def __init__(self, loaded: LoadedGuesser, cache: KVCache, config: EngineConfig) -> None:
        super().__init__(loaded, cache, config, keeps_rows=True)
        self._nothing = loaded.model.no_rows(1)
        self._unfed: dict[int, _Unfed] = {}
        self._last: tuple[Sequence[KeptRows], StepOutput] | None = None

    def follow(self, kept: Sequence[KeptRows], output: StepOutput) -> None:
        self._last = kept, output

    def settle(self) -> None:
        """Feeds the layer what is left of the last step."""
        if self._last is None:
            return
        (kept, output), self._last = self._last, None
        num_drawn = {each.seq_id: len(each.token_ids) for each in output.drawn}
        feeding: list[Fed] = []
        for share, rows in kept:
            num_known = len(share.known)
            num_valid = num_known + min(share.num_guesses, max(0, num_drawn.get(share.seq_id, 0) - 1))
            tokens, rows = share.token_ids[:num_valid], rows[:num_valid]
            before = self._unfed.pop(share.seq_id, None)
            if before is not None and before.end == share.start + num_known:  # fed what is known, to guess behind it
                unfed = _Unfed(before.end, tokens[num_known:], rows[num_known - 1 :].clone())
            elif before is not None and before.end == share.start:
                unfed = _Unfed(before.start, [*before.tokens, *tokens], torch.cat([before.rows, rows]))
            else:
                unfed = _Unfed(share.start, tokens, torch.cat([self._nothing, rows]))
            if unfed.tokens and (num_known > 1 or len(share.draws) != 1 or self._is_due(unfed)):
                feeding.append(Fed(self._known(share, unfed.tokens, unfed.start), unfed.rows))
                unfed = _Unfed(unfed.end, [], unfed.rows[-1:].clone())
            self._unfed.update(dict.fromkeys(share.draws or (share.seq_id,), unfed))
        if feeding:
            self._run(feeding)

    def _begin(self, plan: Plan) -> None:
        self.settle()
        for seq_id in plan.finished:
            self._unfed.pop(seq_id, None)
        self._runner.run(Plan([], [], plan.finished, plan.copies))

    def _draw_first(self, scheduled: Sequence[Scheduled]) -> list[Drawn]:
        wanted = [share for share in scheduled if share.num_guesses]
        feeding = []
        for share in wanted:
            before = self._unfed.get(share.seq_id)
            if before is None or before.end != share.start:
                before = _Unfed(share.start, [], self._nothing)
            feeding.append(Fed(self._drawing(share, [*before.tokens, *share.known], before.start, 0), before.rows))
            self._unfed[share.seq_id] = _Unfed(share.start + len(share.known), [], self._nothing)  # until `follow`
        return self._run(feeding, self._new(share.seq_id for share in wanted)) if wanted else []

    def _draw_more(self, going: Mapping[int, Scheduled], tokens: Mapping[int, int], count: int) -> list[Drawn]:
        """Behind guesses, of which the layer's own rows tell."""
        rows = {share.seq_id: rows[-1:] for share, rows in self._runner.hidden}
        return self._run(
            [Fed(self._drawing(share, [tokens[i]], share.start + count, count), rows[i]) for i, share in going.items()]
        )

    def _run(self, feeding: list[Fed], new: Sequence[NewSequence] = ()) -> list[Drawn]:
        rows = torch.cat([each.rows[: len(each.share.token_ids)] for each in feeding])
        return self._runner.run(Plan([each.share for each in feeding], list(new), [], []), rows).drawn

    def _is_due(self, unfed: _Unfed) -> bool:
        """Where a block is full it may be found by others."""
        size = self._block_size
        return unfed.start // size != unfed.end // size or len(unfed.tokens) >= MOST_UNFED

    def _filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        return super()._filled(share._replace(keeps_hidden=share.pooling is None), guesses)
