"""What all that guess in a worker (`draft.py`, `mtp.py`, `eagle.py`, `assistant.py`) do alike."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.plan import Drawn, NewSequence, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.platform import KeptRows
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import WeightFormats
from nanovllm_cli.weights.quantized import open_reader


class LoadedGuesser(LoadedModel):
    """What guesses out of `loaded`, on its platform and in its type. config: its own. table: of the names of its weights, where
    they are not the model's own. spec, own_spec and model are for the subclass to set."""

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, table: dict[str, str] | None = None
    ) -> None:
        self.platform, self._group, self._beside, self._chosen = loaded.platform, None, {}, None
        self.dtype = loaded.dtype
        self._reader = open_reader(checkpoint)
        wanted = None if config.quant is None else parse_format(config.quant)
        self._formats = WeightFormats(checkpoint, self._reader, wanted, table)

    def _num_bytes(self, names: Collection[str] | None = None) -> int:
        """Of all its weights, or of these."""
        return self._formats.num_bytes(self.dtype, self.platform.dense_bytes, names)


class Guesser(ABC):
    """A guess is the likeliest token; one that is less likely than config.draft_min_p is none, and ends them. cache: of what
    guesses. keeps_rows: whether it guesses by its own rows, too."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, config: EngineConfig, *, keeps_rows: bool) -> None:
        self.weight_bytes = loaded.weight_bytes
        sampler = Sampler(loaded.spec.vocab_size)
        self._runner = loaded.platform.make_runner(loaded.model, cache, sampler, loaded.recordable, keeps_rows=keeps_rows)
        self._keeps_rows = keeps_rows
        self._block_size = config.block_size
        self._least_logprob = math.log(config.draft_min_p) if config.draft_min_p else None
        self._params = SamplingParams(temperature=0.0, logprobs=0 if config.draft_min_p else None)

    def fill(self, plan: Plan) -> tuple[Plan, dict[int, list[int]]]:
        """`plan` with guesses in place of DRAFTED, and these by sequence id: as many as there is room for, or fewer."""
        self._begin(plan)
        going = {share.seq_id: share for share in plan.scheduled if share.num_guesses}
        guesses: dict[int, list[int]] = {seq_id: [] for seq_id in going}
        drawn = self._draw_first(plan.scheduled)
        for count in range(1, 1 + max((share.num_guesses for share in going.values()), default=0)):
            sure = {each.seq_id: each.token_ids[0] for each in drawn if each.seq_id in going and self._is_sure(each)}
            for seq_id, token in sure.items():
                guesses[seq_id].append(token)
            going = {seq_id: going[seq_id] for seq_id in sure if going[seq_id].num_guesses > count}
            if not going:
                break
            drawn = self._draw_more(going, sure, count)
        return plan._replace(scheduled=[self._filled(share, guesses.get(share.seq_id, [])) for share in plan.scheduled]), guesses

    def settle(self) -> None:  # noqa: B027  # most have nothing to do
        """Before blocks are moved: all is to be in them that belongs there."""

    def follow(self, kept: Sequence[KeptRows], output: StepOutput) -> None:  # noqa: B027
        """What the model made of a step's tokens. kept: rows of its shares. output: what was drawn, which tells the guesses that
        held."""

    @abstractmethod
    def _begin(self, plan: Plan) -> None:
        """Forgets what has finished, and makes copies."""

    @abstractmethod
    def _draw_first(self, scheduled: Sequence[Scheduled]) -> Sequence[Drawn]:
        """Draws once for each share that has room for guesses, and can be guessed for."""

    @abstractmethod
    def _draw_more(self, going: Mapping[int, Scheduled], tokens: Mapping[int, int], count: int) -> Sequence[Drawn]:
        """Once more for these, by sequence id: their shares, the newest guess of each, and how many each has by now."""

    def _known(self, share: Scheduled, tokens: list[int], start: int) -> Scheduled:
        table = self._blocks(share, start + len(tokens))
        return Scheduled(share.seq_id, tokens, start, table, (), prompt_len=share.prompt_len, state=share.state)

    def _drawing(self, share: Scheduled, tokens: list[int], start: int, num_drawn: int) -> Scheduled:
        """num_drawn: since the sequence was new. Steps of a token or two are recorded."""
        return self._known(share, tokens, start)._replace(
            draws=(share.seq_id,), prompt_len=start + len(tokens) - num_drawn, every_row=len(tokens) <= 2,
            drafted=num_drawn > 0, keeps_hidden=self._keeps_rows,
        )  # fmt: skip

    def _new(self, seq_ids: Iterable[int]) -> list[NewSequence]:
        """These, which begin to draw."""
        return [NewSequence(seq_id, [], self._params, 0, ()) for seq_id in seq_ids]

    def _filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        """`share` with these in place of DRAFTED."""
        if not share.num_guesses:
            return share
        table = self._blocks(share, share.start + len(share.known) + len(guesses))
        return share._replace(
            token_ids=[*share.known, *guesses], num_guesses=len(guesses), block_table=table,
            near_table=share.near_table[: len(table)],
        )  # fmt: skip

    def _blocks(self, share: Scheduled, num_tokens: int) -> list[int]:
        """Those of the first tokens of the share's sequence."""
        return share.block_table[: -(-num_tokens // self._block_size)]

    def _is_sure(self, drawn: Drawn) -> bool:
        return drawn.error is None and (
            self._least_logprob is None or (drawn.logprobs or [])[0].logprob >= self._least_logprob
        )
