"""What an engine process tells, and when: every token once, in order, though much is held back. Who passes the turnstile when."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from nanovllm_cli.engine.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.server.engine_stream import joined
from nanovllm_cli.server.gate import Gate, Turnstile
from nanovllm_cli.server.messages import Embedded, Output
from nanovllm_cli.server.outbox import LONGEST_HOLD_SECONDS, WRITES_PER_SECOND, Outbox
from nanovllm_cli.server.protocol import Together

LOGPROBS = [TokenLogprobs(i, -i / 7, 1, ()) for i in range(50)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Requests that are put, whenever a step has moved them on."""

    def __init__(self) -> None:
        self._now: dict[str, RequestOutput] = {}
        self._taken: dict[str, RequestOutput] = {}

    def put(self, number: int, lens: list[int], ends: dict[int, FinishReason] | None = None, **more: object) -> None:
        """A request whose answers have so many tokens; token i of every answer is i, and its text is `i,`."""
        ends = ends or {}
        answers = [
            CompletionOutput(index, text(0, size), range(size), "", (), LOGPROBS[:size], ends.get(index))
            for index, size in enumerate(lens)
        ]
        self._now[str(number)] = RequestOutput(
            str(number), (1, 2), tuple(answers), len(ends) == len(lens), RequestMetrics(5.0, 6.0, 7.0, None, 16, 2, 1), **more
        )  # type: ignore[arg-type]

    @property
    def moved(self) -> dict[str, bool]:
        return {request_id: output.finished for request_id, output in self._now.items()}

    def take(self, request_id: str) -> RequestOutput:
        output = self._now.pop(request_id)
        taken = self._taken.get(request_id)
        answers = []
        for answer in output.outputs:
            before = 0 if taken is None else taken.outputs[answer.index].num_tokens
            new = range(before, answer.num_tokens)
            answers.append(replace(answer, delta_ids=tuple(new), delta_text=text(before, answer.num_tokens)))
        self._taken[request_id] = output
        return output._replace(outputs=tuple(answers))


def text(first: int, end: int) -> str:
    return "".join(f"{i}," for i in range(first, end))


def opened(count: int) -> tuple[Outbox, Engine, Clock]:
    clock, engine = Clock(), Engine()
    outbox = Outbox(engine, clock)
    for number in range(count):
        outbox.open(str(number))
    clock.now += 1
    assert outbox.take() == []  # the hold begins here
    return outbox, engine, clock


def texts(outputs: list[Output | Embedded] | None) -> dict[int, list[str]] | None:
    return None if outputs is None else {each.request_id: [piece.text for piece in each.pieces] for each in outputs}


def test_first_words_leave_at_once_and_the_next_ones_together() -> None:
    outbox, engine, clock = opened(17)
    hold = 17 / WRITES_PER_SECOND
    engine.put(3, [1])
    assert texts(outbox.take()) == {3: ["0,"]}
    for size in (2, 3, 4):
        clock.now += hold / 4
        engine.put(3, [size])
        assert outbox.take() is None
    clock.now += hold / 3
    assert texts(outbox.take()) == {3: ["1,2,3,"]}


def test_the_end_of_an_answer_does_not_wait_and_others_stay_held() -> None:
    outbox, engine, clock = opened(17)
    engine.put(1, [1])
    engine.put(2, [1])
    outbox.take()
    clock.now += 1e-4
    engine.put(1, [2])
    engine.put(2, [3], {0: "length"})
    told = outbox.take()
    assert texts(told) == {2: ["1,2,"]}
    assert told is not None
    assert told[0].finished
    assert told[0].pieces[0].finish_reason == "length"
    assert outbox.take() is None
    assert texts(outbox.take(everything=True)) == {1: ["1,"]}


@pytest.mark.parametrize("streams", [1, 31, 10_000])
def test_nobody_waits_longer_than_the_longest_hold(streams: int) -> None:
    outbox, engine, clock = opened(streams)
    engine.put(0, [1])
    outbox.take()
    clock.now += min(streams / WRITES_PER_SECOND, LONGEST_HOLD_SECONDS) - 1e-6
    engine.put(0, [2])
    assert outbox.take() is None
    clock.now += 2e-6
    assert texts(outbox.take()) == {0: ["1,"]}


def test_how_far_a_prompt_is_read_is_told_to_who_asked_until_there_are_words() -> None:
    outbox, engine, clock = opened(17)
    outbox.open("20", tells_reading=True)
    clock.now = 106.5
    for number in (3, 20):
        engine.put(number, [0])
    metrics = RequestMetrics(5.0, 100.0, None, None, 16, 48)
    engine._now["20"] = engine._now["20"]._replace(metrics=metrics)
    told = outbox.take()
    assert told is not None
    (output,) = told
    assert isinstance(output, Output)
    assert (output.request_id, output.pieces, output.num_cached_tokens, output.reading) == (20, [], 16, (48, 6.5))
    engine.put(20, [1])
    engine._now["20"] = engine._now["20"]._replace(metrics=metrics._replace(first_scheduled=None))
    (output,) = outbox.take(everything=True) or ()
    assert isinstance(output, Output)
    assert (texts([output]), output.reading) == ({20: ["0,"]}, None)
    engine.put(20, [1])
    assert outbox.take(everything=True) == []  # a step without news, of words that have begun
    waiting = Output(20, [], False, 0, reading=(16, 0.5))
    assert joined(waiting, Output(20, [], False, 0, reading=(32, 1.0))).reading == (32, 1.0)
    assert joined(waiting, output).reading is None


def test_what_was_dropped_is_not_told() -> None:
    outbox, engine, clock = opened(17)
    engine.put(5, [1])
    outbox.take()
    engine.put(5, [2])
    engine.take("5")
    outbox.drop("5")
    outbox.drop("5")
    clock.now += 1
    assert outbox.take() == []


def test_prompt_logprobs_are_told_once() -> None:
    outbox, engine, _ = opened(17)
    engine.put(0, [1], prompt_logprobs=(None, LOGPROBS[0]))
    first = outbox.take()
    engine.put(0, [2], prompt_logprobs=(None, LOGPROBS[0]))
    second = outbox.take(everything=True)
    assert first is not None
    assert second is not None
    assert first[0].prompt_logprobs == [None, LOGPROBS[0]]
    assert second[0].prompt_logprobs is None


def test_outputs_that_are_joined_keep_what_is_told_once() -> None:
    told = Output(1, [], False, 0, prompt_logprobs=[None, LOGPROBS[0]])
    both = msgspec.structs.replace(told, finished=True)
    assert joined(told, Output(1, [], True, 0)) == both
    assert joined(Output(1, [], False, 0), both) == both


def test_a_request_that_only_read_its_prompt_says_nothing() -> None:
    outbox, engine, _ = opened(17)
    engine.put(0, [0])
    assert outbox.take() == []


@pytest.mark.parametrize("seed", range(5))
def test_all_that_is_told_is_what_was_drawn(seed: int) -> None:
    """Random steps of requests with one to three answers, at random times."""
    chosen = random.Random(seed)
    outbox, engine, clock = opened(9)
    goals = {number: [chosen.randint(1, 20) for _ in range(chosen.randint(1, 3))] for number in range(9)}
    lens = {number: [0] * len(goal) for number, goal in goals.items()}
    ended: dict[int, dict[int, FinishReason]] = {number: {} for number in goals}
    told: dict[int, Output] = {}
    while any(lens[number] != goals[number] for number in goals):
        for number, goal in goals.items():
            if lens[number] == goal or chosen.random() < 0.3:
                continue
            for index, size in enumerate(goal):
                if lens[number][index] < size and chosen.random() < 0.8:
                    lens[number][index] += 1
                    if lens[number][index] == size:
                        ended[number][index] = "stop"
            engine.put(number, lens[number], ended[number])
        clock.now += chosen.random() * 0.01
        for each in outbox.take(everything=chosen.random() < 0.1) or []:
            assert each.pieces, "an output without news"
            told[each.request_id] = each if each.request_id not in told else joined(told[each.request_id], each)
    for number, goal in goals.items():
        assert told[number].finished
        assert told[number].times == (1.0, 2.0, None)
        pieces = {piece.index: piece for piece in told[number].pieces}
        assert [pieces[index].token_ids for index in range(len(goal))] == [list(range(size)) for size in goal]
        assert all(piece.text == "".join(f"{i}," for i in piece.token_ids) for piece in pieces.values())
        assert all(piece.logprobs == LOGPROBS[: len(piece.token_ids)] for piece in pieces.values())
        assert all(piece.finish_reason == "stop" for piece in pieces.values())


# ---- the gate and the turnstile ----


def test_a_gate_is_empty_when_the_last_one_has_left() -> None:
    async def run() -> None:
        gate = Gate()
        assert not gate.draining
        await asyncio.wait_for(gate.drain(), 5)  # nobody is there
        assert gate.draining
        gate = Gate()
        with gate.passing():
            with gate.passing():
                drained = asyncio.ensure_future(gate.drain())
                await asyncio.sleep(0)
                assert (gate.in_flight, gate.draining) == (2, True)
            await asyncio.sleep(0)
            assert (gate.in_flight, drained.done()) == (1, False)
        await asyncio.wait_for(drained, 5)
        assert gate.in_flight == 0

    asyncio.run(run())


def test_one_passes_in_each_round_and_other_work_comes_between() -> None:
    order: list[str] = []

    async def scenario() -> None:
        turnstile = Turnstile()

        async def passing(number: int) -> None:
            await turnstile.turn()
            order.append(str(number))

        async def other() -> None:
            while len(order) < 9:
                order.append("-")
                await asyncio.sleep(0)

        await asyncio.gather(*(passing(number) for number in range(5)), other())

    asyncio.run(scenario())
    assert [each for each in order if each != "-"] == list("01234")
    assert all("-" in order[order.index(a) : order.index(b)] for a, b in ("12", "23", "34"))


def test_who_leaves_the_queue_does_not_stop_it() -> None:
    async def scenario() -> list[int]:
        turnstile, passed = Turnstile(), []

        async def passing(number: int) -> None:
            await turnstile.turn()
            passed.append(number)

        tasks = [asyncio.create_task(passing(number)) for number in range(6)]
        await asyncio.sleep(0)
        for number in (1, 2, 5):
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(turnstile.turn(), 1)
        return passed

    assert asyncio.run(scenario()) == [0, 3, 4]


# ---- an answer's head ----


class Transport:
    """Keeps what is written to it, a list item a write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def test_a_head_is_one_packet_with_what_comes_at_once_and_alone_where_nothing_does() -> None:
    async def scenario() -> None:
        quick, slow, empty, gone = [Transport() for _ in range(4)]
        each = [Together(cast(Any, transport), asyncio.get_running_loop()) for transport in (quick, slow, empty, gone)]
        for together in each:
            together.write(b"head ")
        each[0].write(b"body ")
        each[2].close()
        gone.close()
        assert (quick.written, slow.written, empty.written) == ([b"head body "], [], [b"head "])
        assert each[2].is_closing()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert slow.written == [b"head "]
        each[0].write(b"more")
        each[1].write(b"body")
        assert (quick.written, slow.written) == ([b"head body ", b"more"], [b"head ", b"body"])

    asyncio.run(scenario())
