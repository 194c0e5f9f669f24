"""llama-bench's table: which tests are run, what work they are, how they are timed, and that others can read the results."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import sqlite3
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.bench.formats import Csv, Json, JsonLines, Markdown, Sql, explained
from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.record import LLAMA_BENCH_FIELDS, Record, read_results
from nanovllm_cli.bench.roofline import Roofline
from nanovllm_cli.bench.sweep import Setup, Sweep, Trial, numbers, pair
from nanovllm_cli.bench.table import Loaded, Procedure, check_room, greedy, run_sweep
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_cli.engine.placement import NEAR
from nanovllm_cli.errors import DoesNotFitError, RequestError, UnsupportedError, UsageError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.sampling_params import SamplingParams
from test_cli_driver import nanovllm

# ---- sweeps ----


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512", [512]),
        ("0", [0]),
        ("1,2,4", [1, 2, 4]),
        ("1-4", [1, 2, 3, 4]),
        ("1-8+3", [1, 4, 7]),
        ("0-10+5", [0, 5, 10]),
        ("4-64*2", [4, 8, 16, 32, 64]),
        ("3-30*3", [3, 9, 27]),
        ("7-7", [7]),
        ("1, 16-32*2", [1, 16, 32]),
    ],
)
def test_ranges_are_llama_benchs(text: str, values: list[int]) -> None:
    assert numbers(text) == values


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "1,", "1.5", "1-", "8-1", "1-8+0", "1-8*1", "0-8*2", "1-2-3", "1-100000000", "1" * 30, "1-8/2"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|before|never|more than"):
        numbers(text)


def test_pairs() -> None:
    assert pair("512,128") == (512, 128)
    for text in ("512", "1,2,3", "a,b", "1;2"):
        with pytest.raises(ValueError, match="is not a prompt and an answer"):
            pair(text)


def test_every_combination_is_measured() -> None:
    pairs, depths, sizes = ((16, 4), (5, 0)), (0, 64), (64, 128)
    sweep = Sweep(("a", "b"), (32, 0), (8,), pairs, depths=depths, parallel=(1, 4), batch_sizes=sizes)
    assert list(sweep.setups()) == [Setup(model, None, size) for model in "ab" for size in (64, 128)]
    expected = []
    for depth in (0, 64):
        expected += [Trial(32, 0, depth)]
        expected += [Trial(0, 8, depth, 1), Trial(0, 8, depth, 4)]
        expected += [Trial(16, 4, depth, 1), Trial(16, 4, depth, 4), Trial(5, 0, depth)]
    assert sweep.trials() == expected


def test_a_step_has_the_smaller_of_both_sizes() -> None:
    assert Setup("m", batch_size=512).step_size == 512
    assert Setup("m", batch_size=512, ubatch_size=64).step_size == 64
    assert Setup("m", batch_size=64, ubatch_size=512).step_size == 64


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_prompts": (0,), "num_gens": (0,)}, "nothing to measure"),
        ({"depths": (100,)}, "depth of 100"),
        ({"parallel": (0,)}, "-npl takes numbers from 1 on"),
        ({"batch_sizes": (0,)}, "-b takes"),
        ({"ubatch_sizes": (0,)}, "-ub takes"),
        ({"threads": (0,)}, "-t takes"),
        ({"parallel": (2,), "num_gens": (0,)}, "-npl is about generating"),
        ({"num_prompts": tuple(range(1, 1002))}, "more than 1000"),
        ({"embeds": True, "depths": (16,)}, "-embd is about texts alone"),
        ({"embeds": True, "num_prompts": (0,)}, "nothing to measure"),
    ],
)
def test_sweeps_without_sense_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Sweep(("m",), **given)


# ---- running ----

VOCAB = 31


class FakeLLM:
    """Answers as an engine with a prefix cache would, and advances the clock by a microsecond a computed token."""

    def __init__(self) -> None:
        self.now = 0
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []
        self.seen: set[tuple[int, ...]] = set()
        self.closed = False
        self.free_blocks = 0
        self.error: str | None = None
        self.forgets = False
        attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=None)
        self.spec = ModelSpec("qwen3", VOCAB, 64, (BlockSpec(attention, MLPSpec(96)),) * 3, NormSpec(1e-6), 4096)
        self.resolved = types.SimpleNamespace(path="/models/fake.gguf")
        self.weight_bytes, self.read_bytes, self.num_parameters = 5_000_000_000, 4_000_000, 751_632_384
        self.expert_bytes = 0
        self.kv_dtypes = (torch.bfloat16, torch.int8)
        self.dtype, self.formats, self.threads = torch.bfloat16, {None: 10, Integer(8): 90}, 3
        self.placement = NEAR
        self.multiplies_whole, self.senses = True, None

    def stats(self) -> Any:
        return types.SimpleNamespace(free_blocks=self.free_blocks)

    def clock(self) -> int:
        return self.now

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        assert params.max_tokens is not None
        return [self._answer(prompt, params.max_tokens) for prompt in prompts]

    pooling = "mean"

    def pooled(self, prompts: list[list[int]], pooling: str, progress: None) -> None:
        self.calls.append((prompts, greedy(1)))
        self.now += sum(1000 * len(prompt) for prompt in prompts)

    def _answer(self, prompt: list[int], count: int) -> RequestOutput:
        blocks = [tuple(prompt[:end]) for end in range(16, len(prompt), 16)]
        cached = 0 if self.forgets else max((len(block) for block in blocks if block in self.seen), default=0)
        self.seen.update(tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16))
        self.now += 1000 * (len(prompt) - cached + count - 1)
        answer = CompletionOutput(0, "", tuple(range(count)), "", (), finish_reason="length", error=self.error)
        return RequestOutput("r", tuple(prompt), (answer,), True, RequestMetrics(0.0, num_cached_tokens=cached))

    def close(self) -> None:
        self.closed = True


def run(llm: FakeLLM, sweep: Sweep, **more: Any) -> list[Record]:
    procedure = Procedure(clock=llm.clock, **more)
    roofline = Roofline(100.0, {"bf16": 1000.0, "int8": 2000.0})
    return list(run_sweep(sweep, lambda setup, trials: Loaded(llm, roofline), lambda: Machine(cpu="c", version="1"), procedure))


def test_trials_are_the_work_that_llama_bench_does() -> None:
    """Steps of one token: n for tg n, with nothing before them; a prompt and then n steps for pg."""
    llm = FakeLLM()
    sweep = Sweep(("m",), (17,), (5,), ((20, 4),), depths=(0, 32), parallel=(1, 3))
    records = run(llm, sweep, repetitions=3)
    assert [record.test for record in records] == [
        "pp17", "tg5", "tg5 x3", "pp20+tg4", "pp20+tg4 x3",
        "pp17 @ d32", "tg5 @ d32", "tg5 x3 @ d32", "pp20+tg4 @ d32", "pp20+tg4 x3 @ d32",
    ]  # fmt: skip
    for record in records:
        assert record.samples_ns == (1000 * (record.n_prompt + record.n_gen) * record.n_parallel,) * 3
        assert record.samples_ts == pytest.approx([1e6] * 3)
    assert llm.closed
    timed = [call for call in llm.calls if len(call[0][0]) != 32]
    assert len(timed) == 10 * 4
    assert all(params.is_greedy and params.ignore_eos for _, params in timed)
    beginnings = [tuple(prompt[:16]) for prompts, _ in timed for prompt in prompts if len(prompt) >= 16]
    assert len(set(beginnings)) == len(beginnings)  # no prompt is known from before, none shares its blocks


def test_texts_are_embedded_alone_and_together() -> None:
    llm = FakeLLM()
    llm.spec = dataclasses.replace(llm.spec, has_head=False)
    records = run(llm, Sweep(("m",), (17, 64), parallel=(1, 3), embeds=True), repetitions=2)
    assert [record.test for record in records] == ["pp17", "pp17 x3", "pp64", "pp64 x3"]
    for record in records:
        assert record.samples_ts == pytest.approx([1e6] * 2)
    with pytest.raises(UnsupportedError, match="no head to draw tokens from") as refused:
        run(llm, Sweep(("m",)))
    assert "-embd 1" in str(refused.value.hint)


def test_work_of_a_text_that_is_embedded_is_counted_by_hand() -> None:
    """Each token looks at all, of an encoder, and no row is left out of the last layer."""
    spec = FakeLLM().spec
    for both_ways, looks in ((False, (48 + 1) / 2), (True, 48)):
        work = ModelWork.of(spec.with_attention(both_ways=both_ways), 4e6, (torch.bfloat16, torch.bfloat16))
        found = work.of_token(Trial(48, 0, 0, 2, embeds=True), 512)
        matrices = 3 * (64 * (32 + 16 + 16) + 32 * 64 + 3 * 64 * 96)
        assert found.flops == 2 * matrices + 2 * 3 * 2 * 32 * looks
        assert found.num_bytes == 4e6 / 96 + 3 * 2 * 16 * 2


def test_the_first_repetition_warms_up() -> None:
    counts = {}
    for warm_up, repetitions in itertools.product((True, False), (1, 4)):
        llm = FakeLLM()
        (record,) = run(llm, Sweep(("m",), (8,), (0,)), repetitions=repetitions, warm_up=warm_up)
        assert len(record.samples_ns) == repetitions
        counts[warm_up, repetitions] = len(llm.calls)
    assert counts == {(True, 1): 2, (True, 4): 5, (False, 1): 1, (False, 4): 4}


def test_a_delay_is_before_each_test_and_not_timed() -> None:
    llm, slept = FakeLLM(), []
    records = run(llm, Sweep(("m",), (8,), (4,)), repetitions=1, delay=2.5, sleep=slept.append)
    assert slept == [2.5, 2.5]
    assert [record.avg_ns for record in records] == [8000, 4000]


def test_other_work_than_the_tests_is_no_result() -> None:
    llm = FakeLLM()
    llm.forgets = True
    with pytest.raises(RequestError, match="5 behind 16 were to be, with none"):
        run(llm, Sweep(("m",), (0,), (5,), depths=(16,)))
    assert llm.closed
    llm = FakeLLM()
    llm.error = "NaN logits"
    with pytest.raises(RequestError, match="pp8: NaN logits"):
        run(llm, Sweep(("m",), (8,)))


def test_a_test_without_room_is_refused_before_it_runs() -> None:
    llm = FakeLLM()
    trials = Sweep(("m",), (33,), (5,), depths=(32,), parallel=(1, 3)).trials()
    assert max(trial.num_blocks for trial in trials) == 3 * 3  # 32 + 1 + 5 + 1 tokens each; a prompt has 32 + 33 + 1 once
    llm.free_blocks = 9
    check_room(llm, trials)  # type: ignore[arg-type]
    llm.free_blocks = 8
    with pytest.raises(DoesNotFitError, match="tg5 x3 @ d32 needs a KV cache of 144 tokens; there is room for 128"):
        check_room(llm, trials)  # type: ignore[arg-type]


def test_a_record_says_what_was_run() -> None:
    (record,) = run(FakeLLM(), Sweep(("m",), (8,), (0,), batch_sizes=(64,), ubatch_sizes=(32,)), repetitions=2)
    assert record.model_type == "qwen3 0.8B int8"
    assert record.formats == "int8, bf16"
    assert (record.model_filename, record.backends, record.n_threads) == ("/models/fake.gguf", "CPU", 3)
    assert (record.type_k, record.type_v, record.n_batch, record.n_ubatch) == ("bf16", "int8", 64, 32)
    assert (record.build_commit, record.n_gpu_layers, record.roofline_gflops) == ("1", 0, 2000.0)
    assert (record.deterministic, record.activations) == (False, "auto")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.test_time)


# ---- what a token costs ----


def test_work_of_a_token_is_counted_by_hand() -> None:
    """Every token of a test one by one, as the formulas of a transformer read, in a model of 2 layers."""
    heads, kv_heads, dim, hidden, inner, vocab, layers = 4, 2, 8, 24, 40, 50, 2
    attention = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=None)
    spec = ModelSpec("x", vocab, hidden, (BlockSpec(attention, MLPSpec(inner)),) * layers, NormSpec(1e-6), 512)
    model = ModelWork.of(spec, 1000.0, (torch.bfloat16, torch.int8))
    matrices = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim)]
    matrices += [(inner, hidden), (inner, hidden), (hidden, inner)]

    def token(context: int, draws: bool) -> float:
        flops = layers * sum(2 * rows * columns for rows, columns in matrices)
        flops += layers * heads * (2 * dim * context + 2 * dim * context)  # scores, and the mean of the values
        return flops + (2 * vocab * hidden if draws else -3 * 2 * inner * hidden)  # or it ends before the last layer's MLP

    kv = layers * kv_heads * dim * (2 + 1)
    decode = model.of_token(Trial(0, 3, 16, 2), 512)
    assert decode.flops == pytest.approx(np.mean([token(context, True) for context in (17, 18, 19)]))
    assert decode.num_bytes == pytest.approx((3 * 1000 + 2 * kv * (17 + 18 + 19)) / 6)
    prefill = model.of_token(Trial(10, 0, 16), 4)  # steps of 4, 4 and 2 tokens
    assert prefill.flops == pytest.approx(np.mean([token(16 + i, i == 10) for i in range(1, 11)]))
    assert prefill.num_bytes == pytest.approx((3 * 1000 + kv * (20 + 24 + 26)) / 10)
    both = model.of_token(Trial(10, 3), 512)
    assert both.num_bytes == pytest.approx((4 * 1000 + kv * (10 + 11 + 12 + 13)) / 13)


# ---- formats ----


def a_record(**changes: Any) -> Record:
    given: dict[str, Any] = {
        "model_filename": "it's a \"model\".gguf", "model_type": "qwen3 0.6B bf16", "model_size": 1_300_000_000,
        "model_n_params": 596_049_920, "n_prompt": 512, "n_gen": 0, "samples_ns": (1_000_000_000, 1_100_000_000),
        "build_commit": "abc1234", "build_number": 17, "n_threads": 8, "n_batch": 512, "type_k": "bf16",
        "machine": Machine(cpu="c"),
    }  # fmt: skip
    return Record(**(given | changes))


RECORDS = [a_record(), a_record(n_prompt=0, n_gen=128, n_depth=512, n_parallel=16, deterministic=True)]


def printed(printer: Any) -> str:
    return "".join([printer.header(), *map(printer.row, RECORDS), printer.footer()])


def read_table(text: str) -> tuple[list[dict[str, str]], list[bool], str]:
    """What a reader of llama-bench's markdown sees: rows by heading, which columns stand on the right, the build."""
    lines = text.splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    heads, rules, *rows = cells
    assert all(re.fullmatch(r"-+:?", rule) for rule in rules)
    build = re.search(r"^build: (\S+) \((\d+)\)$", text, re.MULTILINE)
    assert build is not None
    return [dict(zip(heads, row, strict=True)) for row in rows], [rule.endswith(":") for rule in rules], build[1]


def test_the_table_is_read_as_llama_benchs() -> None:
    rows, right, build = read_table(printed(Markdown([], on_cpu=True)))
    assert list(rows[0]) == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert right == [False, True, True, False, True, True, True]
    assert build == "abc1234"
    speed = f"{np.mean([512, 512 / 1.1]):.2f} ± {np.std([512, 512 / 1.1], ddof=1):.2f}"
    assert rows[0] == {
        "model": "qwen3 0.6B bf16", "size": "1.21 GiB", "params": "596.05 M", "backend": "CPU", "threads": "8", "test": "pp512",
        "t/s": speed,
    }  # fmt: skip
    assert rows[1]["test"] == "tg128 x16 @ d512"


def test_a_row_is_llama_benchs_to_the_column() -> None:
    """A table of llama-bench's README ("Different prefilled context"): 7340.20 ± 23.45 are two samples 33.16 apart."""
    record = a_record(
        model_type="qwen2 7B Q4_K - Medium", model_size=4677120000, model_n_params=7615616512, backends="CUDA", n_gpu_layers=-1,
        samples_ns=tuple(round(512e9 / speed) for speed in (7340.20 - 16.58, 7340.20 + 16.58)),
    )  # fmt: skip
    printer = Markdown([], on_cpu=False)
    theirs = """
| model                          |       size |     params | backend    | ngl |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | --------------: | -------------------: |
| qwen2 7B Q4_K - Medium         |   4.36 GiB |     7.62 B | CUDA       |  -1 |           pp512 |      7340.20 ± 23.45 |
"""
    assert printer.header() + printer.row(record) == theirs.lstrip()


def test_swept_settings_have_columns_and_a_gpu_has_layers() -> None:
    rows, *_ = read_table(printed(Markdown(["n_batch", "type_k"], on_cpu=True)))
    assert list(rows[0]) == ["model", "size", "params", "backend", "threads", "n_batch", "type_k", "test", "t/s"]
    rows, *_ = read_table(printed(Markdown([], on_cpu=False)))
    assert list(rows[0]) == ["model", "size", "params", "backend", "ngl", "test", "t/s"]


def test_csv_is_read_by_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(printed(Csv()))))
    assert list(rows[0])[: len(LLAMA_BENCH_FIELDS)] == list(LLAMA_BENCH_FIELDS)
    assert rows[0]["model_filename"] == "it's a \"model\".gguf"
    assert float(rows[0]["avg_ts"]) == RECORDS[0].avg_ts
    assert [row["deterministic"] for row in rows] == ["0", "1"]


@pytest.mark.parametrize("printer", [Json, JsonLines])
def test_json_is_read_by_json(printer: Any, tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_text(printed(printer()))
    assert read_results(path) == RECORDS
    assert json.loads("".join([Json().header(), Json().footer()])) == []


def test_sql_is_run_by_sqlite() -> None:
    base = sqlite3.connect(":memory:")
    base.executescript(printed(Sql()))
    base.executescript(printed(Sql()))  # the table is there already
    rows = base.execute("SELECT model_filename, avg_ts, n_gen, deterministic, typeof(avg_ts), typeof(n_gen) FROM llama_bench")
    assert rows.fetchall()[:2] == [
        ("it's a \"model\".gguf", RECORDS[0].avg_ts, 0, 0, "real", "integer"),
        ("it's a \"model\".gguf", RECORDS[1].avg_ts, 128, 1, "real", "integer"),
    ]


def test_the_limit_is_said() -> None:
    known = a_record(bytes_per_token=1e7, flops_per_token=1e9, roofline_gb_s=100.0, roofline_gflops=1000.0)
    assert explained(known) == "pp512: 10 MB and 1 GFLOP a token; 489 GFLOP/s, 49% of the 1000 that compute allows"
    assert explained(a_record()).endswith("0.0 GB/s, 0 GFLOP/s")
    beyond = explained(a_record(bytes_per_token=1e8, roofline_gb_s=20.0))
    assert beyond.endswith("when it was measured (--roofline measure)")


# ---- the command ----


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_mistakes_end_with_two(home: Path) -> None:
    for words, says in {
        "bench": "no model was named",
        "bench tiny -p 0 -n 0": "nothing to measure",
        "bench tiny -r 0": "-r takes a number from 1 on",
        "bench tiny --delay -1": "--delay takes seconds",
        "bench tiny -p 8-1": "ends before it begins",
        "bench tiny -d 5": "depth of 5",
        "bench tiny -ctk q9": "not a KV cache type",
        "bench tiny -o xml": "xml",
        "bench tiny -ngl most": "is not a list of numbers",
        "bench tiny -pg 5": "not a prompt and an answer",
    }.items():
        result = nanovllm(home, *words.split())
        assert (result.code, result.out) == (2, ""), words
        assert says in result.err, words
    assert nanovllm(home, "bench", "missing").code == 3


def test_settings_of_several_values(home: Path) -> None:
    (home / "nanovllm.toml").write_text('[bench]\nthreads = "12-1"\n')
    try:
        assert "'12-1' ends before it begins" in nanovllm(home, "bench", "tiny").err
        (home / "nanovllm.toml").write_text('[bench]\nbatch-size = ["16", "0"]\n')
        assert "-b takes numbers from 1 on" in nanovllm(home, "bench", "tiny").err
    finally:
        (home / "nanovllm.toml").unlink()
