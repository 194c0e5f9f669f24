"""Ctrl-C at any line of the engine's books: what it interrupts ends, and no other stream loses or doubles a token."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanovllm_cli
from fake_model import expected_tokens, make_engine
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.engine.interrupts import held, let_in
from nanovllm_cli.engine.readers import Readers
from test_engine_core import LETTERS
from test_readers import add, greedy, read

ROOT = Path(nanovllm_cli.__file__).parent
# Not `readers`: a tracer also comes between the end of a `with` and its lock, where a signal never does.
BOOKS = tuple(str(ROOT / "engine" / f"{name}.py") for name in ("scheduler", "block_manager", "engine", "answer", "stepper"))


@pytest.fixture(autouse=True)
def _as_python_has_it() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupted_at(line: int, files: tuple[str, ...], action: Callable[[], object]) -> bool:
    """Whether the action got as far as that line, counted over all that it executes in these files; there Ctrl-C comes."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert left <= 0
    finally:
        sys.settrace(None)
    return left <= 0


def test_ctrl_c_in_one_stream_takes_nothing_from_another() -> None:
    line = num_lines = 0
    while True:
        line += 13
        engine, model = make_engine(num_blocks=24, max_num_batched_tokens=12, factory=LETTERS)
        readers = Readers(engine)
        add(readers, "open", [1, 2, 3], greedy(12, n=2))
        outputs = readers.step(["open"])

        def ask(readers: Readers = readers) -> None:
            add(readers, "interrupted", [4] * 15, greedy(6, n=2))
            read(readers, "interrupted")

        came = interrupted_at(line, BOOKS, ask)
        readers.drop(["interrupted"])
        outputs += read(readers, "open")
        for index in range(2):
            got = [output.outputs[index] for output in outputs]
            assert got[-1].token_ids == expected_tokens([1, 2, 3], 12), line
            assert sum((each.delta_ids for each in got), ()) == got[-1].token_ids, line
            assert "".join(each.delta_text for each in got) == got[-1].text, line
        assert (model.violations, engine.stats().used_blocks, engine.has_unfinished()) == ([], 0, False)
        if not came:
            break
        num_lines = line
    assert num_lines > 500


def test_ctrl_c_while_a_model_draws_takes_nothing_from_another_stream() -> None:
    """What a sampler remembers of a sequence, such as counts for its penalties, goes together with what the sequence has."""
    files = (*BOOKS, *(str(ROOT / "engine" / f"{name}.py") for name in ("runner", "sampler", "sampling_state")))
    config = EngineConfig(num_blocks=64, threads=1, deterministic=True)
    params = SamplingParams(seed=5, max_tokens=6, frequency_penalty=0.7, ignore_eos=True)
    with LLM("tiny", config=config, offline=True) as llm:
        (right,) = llm.generate("Once upon a time", params)
        for line in range(200, 4_000, 950):
            stream = llm.stream("Once upon a time", params)
            drawn = list(next(stream).outputs[0].delta_ids)
            interrupted_at(line, files, lambda: llm.generate("The cat", SamplingParams(max_tokens=3)))
            drawn += [token for output in stream for token in output.outputs[0].delta_ids]
            assert tuple(drawn) == tuple(right.outputs[0].token_ids), line
            assert not llm.engine.has_unfinished()


def test_ctrl_c_while_a_request_is_added_leaves_none_behind() -> None:
    """Of an iterator, too, which names its requests itself."""
    config = EngineConfig(num_blocks=64, threads=1)
    with LLM("tiny", config=config, offline=True) as llm:
        requests = [(str(i), [5, 6, 7], SamplingParams(max_tokens=3)) for i in range(3)]
        for line in range(1, 150, 7):
            assert interrupted_at(line, BOOKS[2:3], lambda: list(llm.generate_iter(iter(requests))))
            assert not llm.engine.has_unfinished(), line
            assert not llm.engine.moved, line


def test_held_waits_for_the_end_and_the_second_one_does_not() -> None:
    done = []

    def once() -> None:
        with held(), held():
            signal.raise_signal(signal.SIGINT)
            done.append("once")

    def twice() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("twice")

    for work in (once, twice):
        with pytest.raises(KeyboardInterrupt):
            work()
    with held():
        done.append("behind")
    assert done == ["once", "behind"]


def test_computing_is_broken_off_at_once() -> None:
    done = []

    def within() -> None:
        with held(), let_in():
            signal.raise_signal(signal.SIGINT)
            done.append("within")

    def before() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            done.append("before")
            with let_in():
                done.append("let in")

    def outside() -> None:
        with let_in():
            signal.raise_signal(signal.SIGINT)

    for work in (within, before, outside):
        with pytest.raises(KeyboardInterrupt):
            work()
    assert done == ["before"]


def test_another_handler_hears_once_and_an_ignored_signal_stays_ignored() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    for context in (held, let_in):
        with held(), context():
            signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_threads_beside_the_main_one_leave_handlers_alone() -> None:
    found: list[object] = []

    def work() -> None:
        with held(), let_in():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
