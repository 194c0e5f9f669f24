"""An executor without a model, which notices every mistake in block tables, copies and sharing.

What it keeps for a position is (token, chain), where the chain is a hash of every token up to there: like a real K
and V it depends on the whole prefix. Each step it reads the prefix of each sequence through its block table and
recomputes the chain; the next token is a function of the chain (and of the seed, where the request is not greedy).
"""

from __future__ import annotations

from collections.abc import Callable

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.executor import Prepare
from nanovllm_cli.engine.near import NearRoom
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import DRAWN_BEFORE, Drawn, NewSequence, Plan, Scheduled, StepOutput, TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


class FakeModel:
    """`violations` stays empty while the engine is right. Faults are injected by hooks.

    before, midway: called with each plan before anything is done and when everything is written; may raise.
    draw_error: message for a sequence, or None. drop, empty: sequences without a draw, and with one of no token.
    script: the answer of every sequence, instead of what the chain says. repeats: answers mostly go on as they went before, so
    that guesses hold. near: what layers with a window keep, which is checked apart, and may be there of so many blocks.
    """

    def __init__(
        self, block_size: int, *, max_tokens: int = 10**9, max_seqs: int = 10**9, near: NearRoom = NearRoom()
    ) -> None:
        self.block_size, self.num_states, self.near = block_size, 0, near
        self.near_memory: dict[int, dict[int, tuple[int, int]]] = {}
        self.max_tokens, self.max_seqs = max_tokens, max_seqs
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.known: dict[int, NewSequence] = {}
        self.forgotten: list[int] = []
        self.plans: list[Plan] = []
        self.violations: list[str] = []
        self.before: Callable[[Plan], None] = lambda plan: None
        self.midway: Callable[[Plan], None] = lambda plan: None
        self.draw_error: Callable[[Scheduled, int], str | None] = lambda scheduled, seq_id: None
        self.drop: set[int] = set()
        self.empty: set[int] = set()
        self.script: list[int] | None = None
        self.repeats = False
        self.closed = False

    def execute(self, plan: Plan) -> StepOutput:
        self.plans.append(plan)
        self._expect(bool(plan.scheduled), "an empty plan")
        self._expect(sum(len(each.token_ids) for each in plan.scheduled) <= self.max_tokens, "too many tokens")
        self._expect(len(plan.scheduled) <= self.max_seqs, "too many sequences")
        self._expect(len({each.seq_id for each in plan.scheduled}) == len(plan.scheduled), "a sequence twice")
        self.before(plan)
        for seq_id in plan.finished:
            self.known.pop(seq_id, None)
            self.forgotten.append(seq_id)
        for new in plan.new:
            self.known[new.seq_id] = new
        for source, target, source_part, target_part in plan.copies:
            for offset in range(self.block_size):
                self.memory.pop((target, offset), None)
                if (source, offset) in self.memory:
                    self.memory[target, offset] = self.memory[source, offset]
            if self.near.num_parts:
                self.near_memory[target_part] = dict(self.near_memory.get(source_part, {}))
        for scheduled in plan.scheduled:
            self._write(scheduled)
        self.midway(plan)
        drawn: list[Drawn] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for scheduled in plan.scheduled:
            chains = self._read(scheduled)
            wanted = [seq_id for seq_id in scheduled.draws if seq_id not in self.drop]
            drawn.extend(self._draw(scheduled, seq_id, chains) for seq_id in wanted)
            if scheduled.prompt_logprobs is not None:
                logprobs[scheduled.seq_id] = [TokenLogprobs(each, -1.0, 1, ()) for each in scheduled.targets]
        return StepOutput(drawn, logprobs)

    def close(self) -> None:
        self.closed = True

    def _write(self, scheduled: Scheduled) -> None:
        self._expect(bool(scheduled.token_ids), "nothing to feed")
        end = scheduled.start + len(scheduled.token_ids)
        needed = -(-end // self.block_size)
        self._expect(len(scheduled.block_table) == needed, "a block table of the wrong length")
        self._expect(len(set(scheduled.block_table)) == needed, "a block twice in a table")
        chain = self._at(scheduled, scheduled.start - 1)[1] if scheduled.start else 0
        for position, token in enumerate(scheduled.token_ids, start=scheduled.start):
            chain = hash((chain, token))
            block, offset = divmod(position, self.block_size)
            self.memory[scheduled.block_table[block], offset] = (token, chain)
            if self.near.num_parts:
                self._expect(0 <= scheduled.near_table[block] < self.near.num_parts, "a part that is not there")
                self.near_memory.setdefault(scheduled.near_table[block], {})[offset] = (token, chain)

    def _read(self, scheduled: Scheduled) -> list[int]:
        """The chain at each position."""
        chain, chains = 0, list[int]()
        for position in range(scheduled.start + len(scheduled.token_ids)):
            token, kept = self._at(scheduled, position)
            chain = hash((chain, token))
            chains.append(chain)
            if kept != chain:
                self._expect(False, f"sequence {scheduled.seq_id} reads foreign K and V at {position}")
            if self.near.num_parts and position > scheduled.start - self.near.reach:
                block, offset = divmod(position, self.block_size)
                near = self.near_memory.get(scheduled.near_table[block], {}).get(offset)
                self._expect(near == (token, kept), f"sequence {scheduled.seq_id} lacks what a window sees at {position}")
        return chains

    def _at(self, scheduled: Scheduled, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_size)
        return self.memory.get((scheduled.block_table[block], offset), (-1, -1))

    def _draw(self, scheduled: Scheduled, seq_id: int, chains: list[int]) -> Drawn:
        if seq_id not in self.known:
            self._expect(False, f"sequence {seq_id} draws without being introduced")
            return Drawn(seq_id, [], None, "unknown")
        error = self.draw_error(scheduled, seq_id)
        if error is not None:
            return Drawn(seq_id, [], None, error)
        if seq_id in self.empty:
            return Drawn(seq_id, [])
        params, tokens, rows = self.known[seq_id].params, list[int](), list[TokenLogprobs]()
        for guess in (*scheduled.guesses, None):
            end = len(chains) - scheduled.num_guesses + len(tokens)
            tokens.append(self._token(self.known[seq_id], chains[end - 1], end, self._at(scheduled, end - 1)[0]))
            others = [(tokens[-1] + i) % VOCAB for i in range(params.logprobs or 0)]
            top = tuple([(token, -0.5 - i - chains[end - 1] % 89 / 99) for i, token in enumerate(others)])
            rows.append(TokenLogprobs(tokens[-1], -0.5, 1, top))
            if tokens[-1] != guess:
                break
        return Drawn(seq_id, tokens, None if params.logprobs is None else rows)

    def _token(self, new: NewSequence, chain: int, end: int, last: int) -> int:
        """What follows the first `end` tokens of a sequence, of which this is the last."""
        if self.script is not None:
            return self.script[end - len(new.prompt_ids)]
        drawn = chain if new.params.is_greedy else hash((chain, new.seed))
        return (last + 1) % 5 if self.repeats and drawn % 8 else drawn % VOCAB

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.violations.append(message)


class FakeDevice:
    """Runs a FakeModel as a device would that takes steps before the last one's tokens are read.

    log: "submit" and "read" in the order in which they came.
    """

    def __init__(self, model: FakeModel) -> None:
        self.model = model
        self.log: list[str] = []
        self._drawn: dict[int, int] = {}

    def draws_unseen(self, params: SamplingParams) -> bool:
        return params.logprobs is None and params.prompt_logprobs is None

    def submit(self, plan: Plan) -> Callable[[], StepOutput]:
        self.log.append("submit")
        scheduled = [
            each._replace(token_ids=[self._drawn[each.seq_id]]) if each.token_ids == [DRAWN_BEFORE] else each
            for each in plan.scheduled
        ]
        output = self.model.execute(plan._replace(scheduled=scheduled))
        self._drawn.update({each.seq_id: each.token_ids[0] for each in output.drawn if each.token_ids})

        def read() -> StepOutput:
            self.log.append("read")
            return output

        return read


class FakeClock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 10_000,
    eos_ids: tuple[int, ...] = (),
    clock: Callable[[], float] | None = None,
    factory: object = None,
    ahead: bool = False,
    prepare: Prepare | None = None,
    near: NearRoom = NearRoom(),
    **settings: object,
) -> tuple[Engine, FakeModel]:
    config = EngineConfig(block_size=block_size, **settings)  # type: ignore[arg-type]
    model = FakeModel(block_size, max_tokens=config.max_num_batched_tokens, max_seqs=config.max_num_seqs, near=near)
    engine = Engine(
        model,
        config,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        eos_ids=eos_ids,
        detokenizer_factory=factory,  # type: ignore[arg-type]
        clock=clock or FakeClock(),
        ahead=FakeDevice(model) if ahead else None,
        prepare=prepare,
    )
    return engine, model


def drain(engine: Engine, most_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Steps until nothing is left, and returns the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(most_steps):
        if not engine.has_unfinished():
            return last
        for output in engine.step():
            last[output.request_id] = output
    raise AssertionError("it does not end")


def expected_tokens(prompt: list[int], count: int, seed: int | None = None) -> tuple[int, ...]:
    """What the fake model answers, computed without any engine."""
    chain, out = 0, []
    for token in prompt:
        chain = hash((chain, token))
    for _ in range(count):
        token = (chain if seed is None else hash((chain, seed))) % VOCAB
        out.append(token)
        chain = hash((chain, token))
    return tuple(out)
