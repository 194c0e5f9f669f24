"""benchmarks/fuzz_engine.py finds nothing in the engine as it is, and what is planted there."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fuzz_engine
from fuzz_engine import Asked, Session
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.engine.block_manager import BlockManager
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.kernels import cpu

Plant = Callable[[pytest.MonkeyPatch], None]
FIRST_SEED = 5
"""One of a short session, where sequences lose blocks, prefixes are found and guesses hold."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for each other by spinning, which takes long where other tests run beside this one."""
    monkeypatch.setattr(cpu, "most_threads", lambda: 1)


def sessions(only: str) -> Iterator[Session]:
    """Of such models, those that are not refused."""
    every = (fuzz_engine.fuzz(seed, only) for seed in itertools.count(FIRST_SEED))
    return (session for session in every if session.refused is None)


@pytest.mark.parametrize("only", ["llama, linear", "lfm2, four taps", "glm4 moe, 2 of 5 and shared, with MTP"])
def test_nothing_is_found(only: str) -> None:
    session = next(sessions(only))
    assert session.found == []
    assert session.counts["requests"] == fuzz_engine.REQUESTS
    assert session.counts["generated_tokens"] > 100


def draw_from_a_neighbours_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def wrong(sampler: Sampler, seq_ids: Any, logits: Any, rows: Any = None, masks: Any = None) -> Any:
        rows = list(range(len(seq_ids)) if rows is None else rows)
        return sample(sampler, seq_ids, logits, [*rows[:-1], rows[0]], masks)

    monkeypatch.setattr(Sampler, "sample", wrong)


def change_a_bit_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    put_logprobs = Sampler._put_logprobs

    def wrong(sampler: Sampler, draws: Any, logits: Any) -> None:
        put_logprobs(sampler, draws, logits)
        for draw in draws if len(draws) > 1 else ():
            draw.logprobs = draw.logprobs and [each._replace(logprob=math.nextafter(each.logprob, 0)) for each in draw.logprobs]

    monkeypatch.setattr(Sampler, "_put_logprobs", wrong)


def lose_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def wrong(blocks: BlockManager, sequence: Any, **more: Any) -> None:
        sequence.block_table = sequence.block_table[:-1]
        release(blocks, sequence, **more)

    monkeypatch.setattr(BlockManager, "release", wrong)


def copy_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "copy_blocks", lambda *_: None)


@pytest.mark.parametrize("plant", [draw_from_a_neighbours_row, change_a_bit_beside_others, lose_a_block, copy_no_block])
def test_what_is_planted_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(session.found for session in itertools.islice(sessions("llama, linear"), 8))


@pytest.mark.parametrize("what", [None, "answer 0: token_ids[3]: (5,) instead of (4,)"])
def test_what_is_found_is_told_with_its_seed(
    what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fuzz(seed: int, only: str) -> Session:
        session = Session(seed)
        session.settings["model"] = only
        if what is not None:
            session.report(what, Asked([2, 3], {"top_k": 7}, "a salt"))
        return session

    monkeypatch.setattr(fuzz_engine, "fuzz", fuzz)
    words = ["--seconds", "0", "--seed", "17", "--only", "mamba", "--output", str(tmp_path / "fuzz.json")]
    monkeypatch.setattr(sys, "argv", ["fuzz_engine.py", *words])
    with pytest.raises(SystemExit) as ended:
        fuzz_engine.main()
    assert ended.value.code == (what is not None)
    kept = json.loads((tmp_path / "fuzz.json").read_text())
    assert kept["seeds"] == [17, 17]
    assert [(found["what"], found["settings"]["seed"]) for found in kept["found"]] == ([(what, 17)] if what else [])
    told = capsys.readouterr().out
    assert all((part in told) == (what is not None) for part in ("instead of", "'seed': 17", "'top_k': 7"))
