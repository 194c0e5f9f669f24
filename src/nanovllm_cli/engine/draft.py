"""Speculation by a smaller model of the same vocabulary (Leviathan et al. 2023, Chen et al. 2023): it says what comes next, and
the large one computes all of that in one step and draws from each row.

The small model's K and V lie in blocks beside the large one's, at the same places: what the scheduler does to a block it does to
both, and what the large model is fed the small one is fed too, in the same step or when the block is full. So it knows every
prefix that is found, and every sequence that comes back. Its guesses are its likeliest tokens, up to the first that it is not
sure of. As a guess counts only where the large model draws the same, nothing here changes a token; at worst it costs time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.drafting import Guesser
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.plan import Drawn, Plan, Scheduled
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.tensor_names import family_of
from nanovllm_cli.weights.tokenizer import load_tokenizer

COMPARED_TOKENS = 4096
MOST_OTHERS = 0.01  # a family's later models may have a few tokens more


class _Unfed(NamedTuple):
    """What a sequence has been fed behind what the draft model was: `tokens` from `start` on."""

    start: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Draft(Guesser):
    """cache: of as many blocks as the large model's. vocab_size: the large model's, which may have fewer tokens."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, config: EngineConfig, vocab_size: int) -> None:
        super().__init__(loaded, cache, config, keeps_rows=False)
        self._max_position = loaded.spec.max_position
        self._vocab_size = min(vocab_size, loaded.spec.vocab_size)
        self._has_states = cache.states is not None
        self._unfed: dict[int, _Unfed] = {}

    def _begin(self, plan: Plan) -> None:
        for seq_id in plan.finished:
            self._unfed.pop(seq_id, None)
        self._feed_before_copies(plan)
        self._runner.run(Plan([], [], plan.finished, plan.copies, plan.state_copies if self._has_states else []))

    def _draw_first(self, scheduled: Sequence[Scheduled]) -> list[Drawn]:
        """Feeds what is known, and draws for those that want guesses. What nobody guesses behind waits for the end of its block,
        as several tokens take little longer than one."""
        shares = []
        for share in scheduled:
            if _end(share) > self._max_position:
                continue
            start, tokens = share.start, share.known
            before = self._unfed.pop(share.seq_id, None)
            if before is not None and before.end == start and len(tokens) == 1:
                start, tokens = before.start, [*before.tokens, *tokens]
            end = start + len(tokens)
            if share.num_guesses:
                shares.append(self._drawing(share, tokens, start, 0))
            elif len(share.known) == 1 and share.start >= share.prompt_len and end % self._block_size:
                self._unfed[share.seq_id] = _Unfed(start, tokens)
            else:
                shares.append(self._known(share, tokens, start))
        new = self._new(seq_id for share in shares for seq_id in share.draws)
        return self._known_drawn(self._runner.run(Plan(shares, new, [], [])).drawn) if shares else []

    def _draw_more(self, going: Mapping[int, Scheduled], tokens: Mapping[int, int], count: int) -> list[Drawn]:
        more = [self._drawing(share, [tokens[i]], share.start + count, count) for i, share in going.items()]
        return self._known_drawn(self._runner.run(Plan(more, [], [], [])).drawn)

    def _known_drawn(self, drawn: list[Drawn]) -> list[Drawn]:
        """Without tokens that the large model has not."""
        return [each for each in drawn if each.error is not None or each.token_ids[0] < self._vocab_size]

    def _feed_before_copies(self, plan: Plan) -> None:
        """What is copied of a sequence's state is to be behind all its tokens."""
        copied = {source for source, _ in plan.state_copies}
        late = [
            self._known(share, unfed.tokens, unfed.start)
            for share in plan.scheduled
            if share.state in copied and (unfed := self._unfed.pop(share.seq_id, None)) is not None
        ]
        if late:
            self._runner.run(Plan(late, [], [], []))

    def _known(self, share: Scheduled, tokens: list[int], start: int) -> Scheduled:
        """What stands for images may be beyond its vocabulary."""
        return super()._known(share, [token if token < self._vocab_size else 0 for token in tokens], start)

    def _filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        if guesses:
            self._unfed[share.seq_id] = _Unfed(_end(share) - share.num_guesses + len(guesses) - 1, guesses[-1:])  # if all hold
        return super()._filled(share, guesses)


def assists(path: str) -> str:
    """How what guesses reads of the model that it guesses for, if it does nothing by itself: see `Family`. Raises what opening it
    raises."""
    with open_checkpoint(path) as checkpoint:
        return family_of(checkpoint).assists


def check_vocabulary(path: str, tokenizer: Tokenizer) -> None:
    """Whether the model at `path` can draft for the tokenizer's model: as good as all tokens mean the same to both.
    Raises what opening it raises, and UsageError."""
    if assists(path):  # which is made for one model, and may come without a tokenizer
        return
    with open_checkpoint(path) as checkpoint:
        other = load_tokenizer(checkpoint)
    least = min(tokenizer.vocab_size, other.vocab_size)
    ids = range(0, least, -(-least // COMPARED_TOKENS))
    num_others = sum(tokenizer.id_to_bytes(i) != other.id_to_bytes(i) for i in ids)
    if num_others > MOST_OTHERS * len(ids):
        raise UsageError(
            f"{path} cannot draft for this model: of {len(ids)} tokens compared, {num_others} are others there",
            "a draft model has the large one's vocabulary, as a smaller one of the same family",
        )


def _end(share: Scheduled) -> int:
    return share.start + len(share.token_ids)
