"""Who shares an engine: threads, readers that are late, streams that nobody holds any more, processes that were forked."""

from __future__ import annotations

import os
import threading
import tracemalloc
import warnings

import pytest

from fake_model import GREEDY, drain, expected_tokens, make_engine
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.engine.readers import Readers
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams
from test_engine_core import LETTERS


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def add(readers: Readers, request_id: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
    readers.use(lambda engine: engine.add(request_id, prompt, params))


def read(readers: Readers, request_id: str) -> list[RequestOutput]:
    """Until it is finished."""
    outputs: list[RequestOutput] = []
    while not outputs or not outputs[-1].finished:
        outputs += readers.step([request_id])
    return outputs


def test_what_nobody_read_comes_as_one_output() -> None:
    engine, _ = make_engine(factory=LETTERS)
    readers = Readers(engine)
    add(readers, "late", [1, 2, 3], greedy(9, n=2, logprobs=0))
    add(readers, "early", [4], greedy(20))
    (begun,) = readers.step(["late"])
    assert len(read(readers, "early")) == 19 + 1
    (rest,) = read(readers, "late")
    for first, last in zip(begun.outputs, rest.outputs, strict=True):
        assert first.delta_ids + last.delta_ids == last.token_ids == expected_tokens([1, 2, 3], 9)
        assert first.delta_text + last.delta_text == last.text
        assert (len(first.text), len(last.delta_ids)) == (1, 8)
        assert last.delta_logprobs == (last.logprobs or ())[1:]


def test_threads_run_together_and_get_their_own() -> None:
    engine, model = make_engine(num_blocks=200)
    readers = Readers(engine)
    barrier = threading.Barrier(5)
    found: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(3):
            name = f"{number} {turn}"
            add(readers, name, [number, turn], greedy(40))
            found[10 * number + turn] = read(readers, name)[-1].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {10 * number + turn: expected_tokens([number, turn], 40) for number in range(5) for turn in range(3)}
    assert not model.violations
    assert (engine.stats().used_blocks, engine.has_unfinished()) == (0, False)


def test_stream_that_the_garbage_collector_closes_within_a_step_ends_behind_it() -> None:
    engine, model = make_engine()
    readers = Readers(engine)
    add(readers, "kept", [1], greedy(8))
    add(readers, "lost", [2] * 9, greedy(100))

    def collect(plan: Plan) -> None:
        if len(model.plans) == 3:
            readers.drop(["lost"])
            assert engine.stats().running == 2

    model.midway = collect
    readers.step(["kept"])
    assert engine.stats().running == 2
    while len(model.plans) < 3:
        readers.step(["kept"])
    assert engine.stats().running == 1
    assert read(readers, "kept")[-1].outputs[0].token_ids == expected_tokens([1], 8)
    assert (engine.stats().used_blocks, model.violations) == (0, [])


def test_dropped_twice_or_never_there_is_no_matter() -> None:
    engine, _ = make_engine()
    readers = Readers(engine)
    add(readers, "a", [1], greedy(8))
    for _ in range(2):
        readers.drop(["a", "b"])
        assert engine.stats().used_blocks == 0


def test_closed_engine_says_so_and_closes_once() -> None:
    engine, model = make_engine()
    readers = Readers(engine)
    add(readers, "a", [1])
    readers.close()
    assert model.closed
    model.closed = False
    readers.close()
    readers.drop(["a"])
    assert not model.closed
    for action in (lambda: add(readers, "b", [1]), lambda: readers.step(["a"])):
        with pytest.raises(UsageError, match="closed"):
            action()


def test_forked_process_is_refused_instead_of_waiting_for_threads_that_it_does_not_have() -> None:
    engine, _ = make_engine()
    readers = Readers(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            readers.drop(["a"])
            add(readers, "a", [1])
        except UsageError as error:
            os._exit(42 if "forked" in error.message else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def kept_bytes(engine: Engine) -> int:
    """Memory of an answer, all of whose outputs are kept."""
    tracemalloc.start()
    kept = []
    while engine.has_unfinished():
        kept += engine.step()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[-1].outputs[0].token_ids) == len(kept)
    return size


def test_outputs_take_no_more_for_a_long_answer_than_for_short_ones() -> None:
    """Nothing is copied at each step that grows with the answer."""
    sizes = []
    for length in (150, 600):
        engine, model = make_engine(num_blocks=400)
        model.script = [5] * length
        model.before = lambda plan, plans=model.plans: plans.clear()  # type: ignore[misc]
        engine.add("a", [1], greedy(length, logprobs=0))
        sizes.append(kept_bytes(engine))
    assert sizes[1] < 5 * sizes[0]
    assert not drain(engine)
