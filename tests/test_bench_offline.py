"""Throughput and latency of an engine in this process: figures worked out by hand from what a fake engine says."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.offline import Batches, measure_latency, measure_throughput, peak_concurrency
from nanovllm_cli.bench.record import Record, Summary, read_results
from nanovllm_cli.bench.workload import Request, Workload
from nanovllm_cli.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_cli.errors import RequestError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.sampling_params import SamplingParams
from test_bench_real import bench
from test_cli_driver import nanovllm

MACHINE = Machine(cpu="c")


class FakeLLM:
    """Request i of a call is scheduled at i seconds, has its first token 1 s later and is done another 2 s later."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[list[list[int]], list[SamplingParams]]] = []
        self.steps: Iterator[float] = iter(())
        self.error: str | None = None
        self.name, self.max_model_len, self.threads = "fake", 40, 2
        self.dtype, self.formats, self.weight_bytes, self.kv_bytes = torch.bfloat16, {None: 1}, 11, 22
        self.spec, self.lora, self.control_vectors = types.SimpleNamespace(vocab_size=50), (), ()
        self.draft_model, self.mtp, self.senses = None, False, None
        self.tensor_parallel_size = 1
        self.tokenizer = types.SimpleNamespace(encode=lambda text: list(text.encode()))

    def clock(self) -> float:
        return self.now

    def stats(self) -> Any:
        done = len(self.calls)
        return types.SimpleNamespace(prefix_hit_tokens=7 * done, preemptions=done)

    def generate(self, prompts: list[list[int]], params: Any, *, progress: Any = None) -> list[RequestOutput]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self.calls.append((prompts, each))
        outputs = []
        for i, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
            answer = CompletionOutput(0, "", tuple(range(wanted.max_tokens)), "", (), finish_reason="length", error=self.error)
            at = self.now + i
            metrics = RequestMetrics(self.now, at, at + 1, at + 3)
            outputs.append(RequestOutput(f"request-{i}", tuple(prompt), (answer,), True, metrics))
            if progress is not None:
                progress(i + 1, len(prompts))
        self.now += next(self.steps, len(prompts) + 2)
        return outputs

    def close(self) -> None:
        pass


def test_throughput_by_hand() -> None:
    llm = FakeLLM()
    requests = [Request([1, 2], 9), Request([3] * 4, 5), Request("abc", 1), Request([5] * 9, 3)]
    found = measure_throughput(llm, Workload("mine", requests, {"x": 1}), MACHINE, [50.0], NullProgress(), clock=llm.clock)  # type: ignore[arg-type]
    assert [len(prompts) for prompts, _ in llm.calls] == [1, 3]
    assert [params.max_tokens for params in llm.calls[1][1]] == [5, 1, 3]
    assert all(params.is_greedy and params.ignore_eos for params in llm.calls[1][1])
    inputs, outputs, seconds = 4 + 3 + 9, 5 + 1 + 3, 5.0
    expected = {
        "completed": 3, "duration": seconds, "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": 3 / seconds, "input_throughput": inputs / seconds, "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds, "max_concurrent_requests": 3, "prefix_hit_tokens": 7,
        "preemptions": 1, "mean_ttft_ms": 2000.0, "median_ttft_ms": 2000.0, "p50_ttft_ms": 2000.0,
        "std_ttft_ms": 1e3 * np.std([1, 2, 3]), "mean_e2el_ms": 4000.0, "mean_tpot_ms": 1e3 * np.mean([2 / 4, 2 / 2]),
        "model_size": 11, "kv_cache": 22,
    }  # fmt: skip
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected)
    assert found.series["ttft_ms"] == pytest.approx([1000, 2000, 3000])
    assert found.series["output_tokens"] == [5, 1, 3]
    assert (found.kind, found.model, found.settings["dataset"], found.settings["x"]) == ("throughput", "fake", "mine", 1)


def test_latency_by_hand() -> None:
    llm = FakeLLM()
    llm.steps = iter([9.0, 9.0, 1.0, 2.0, 6.0])
    batches = Batches(3, 5, 4, repetitions=3, warm_up=2, seed=1)
    found = measure_latency(llm, batches, MACHINE, [0.0, 100.0], NullProgress(), clock=llm.clock)  # type: ignore[arg-type]
    assert len(llm.calls) == 5
    assert all([len(prompt) for prompt in prompts] == [5] * 3 for prompts, _ in llm.calls)
    assert len({tuple(prompt) for prompts, _ in llm.calls for prompt in prompts}) == 15  # nothing is known from before
    assert found.series["latency_ms"] == [1000.0, 2000.0, 6000.0]
    expected = {"mean_latency_ms": 3000.0, "median_latency_ms": 2000.0, "p0_latency_ms": 1000.0, "p100_latency_ms": 6000.0}
    expected |= {"output_throughput": 3 * 4 / 3, "total_token_throughput": 3 * 9 / 3}
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected)


def test_concurrency_counts_who_runs() -> None:
    def request(begin: float, end: float) -> RequestMetrics:
        return RequestMetrics(0.0, begin, begin, end)

    assert peak_concurrency([request(0, 1), request(1, 2), request(2, 3)]) == 1
    assert peak_concurrency([request(0, 5), request(1, 2), request(1.5, 3), request(4, 6)]) == 3


def test_what_does_not_fit_or_fails_is_said() -> None:
    llm = FakeLLM()
    with pytest.raises(UsageError, match=r"request 2 needs 39 \+ 2 tokens, the context holds 40"):
        measure_throughput(llm, Workload("w", [Request([1], 1), Request([1] * 39, 2)]), MACHINE, [50.0], NullProgress())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs 39"):
        measure_latency(llm, Batches(1, 39, 2, 1), MACHINE, [50.0], NullProgress())  # type: ignore[arg-type]
    assert not llm.calls
    llm.error = "NaN logits"
    with pytest.raises(RequestError, match="NaN logits"):
        measure_latency(llm, Batches(1, 3, 2, 1), MACHINE, [50.0], NullProgress())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("throughput", "no model was named"),
        ("throughput tiny --num-prompts 0", "--num-prompts takes a number from 1 on"),
        ("throughput tiny --random-weights qwen3-0.6b", "are two models"),
        ("throughput tiny --percentiles 101", "between 0 and 100"),
        ("throughput tiny --percentiles x", "is not a number"),
        ("throughput tiny --plot -o json", "--plot goes with -o md"),
        ("throughput tiny --max-num-seqs 0", "--max-num-seqs must be at least 1"),
        ("latency", "no model was named"),
        ("latency tiny -npl 0", "from 1 on"),
        ("latency tiny -r 0", "from 1 on"),
        ("tiny --plot -o json", "--plot goes with -o md"),
    ],
)
def test_mistakes(tmp_path: Path, words: str, says: str) -> None:
    result = nanovllm(tmp_path, "bench", *words.split())
    assert (result.code, result.out) == (2, "")
    assert says in result.err


def test_a_report_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    for words in (["tiny"], ["throughput", "tiny"], ["latency", "tiny"]):
        result = nanovllm(tmp_path, "bench", *words, "--report", "none/report.html")
        assert result.code == 1
        assert "create its folder first" in result.err


def measured(home: Path, line: str) -> str:
    done = bench(home, *line.split())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_model_is_measured(tmp_path: Path) -> None:
    lengths = "--num-prompts 5 --input-len 33 --output-len 4 --range-ratio 0.5 --max-num-seqs 2"
    shown = measured(tmp_path, f"throughput tiny {lengths} --save saved.json --report report.html")
    assert "| successful requests" in shown
    (summary,) = read_results(tmp_path / "saved.json")
    assert isinstance(summary, Summary)
    assert summary.metrics["max_concurrent_requests"] == 2
    assert summary.metrics["total_output_tokens"] == sum(summary.series["output_tokens"])
    assert summary.metrics["duration"] * 1e3 >= max(summary.series["e2el_ms"])
    assert "throughput" in (tmp_path / "report.html").read_text()
    (found,) = json.loads(measured(tmp_path, "latency tiny -npl 2 --input-len 5 --output-len 3 -r 2 -o json -q"))
    assert len(found["series"]["latency_ms"]) == 2


@pytest.mark.parametrize(("words", "told"), [("--batch-size 2", True), ("-npl 2 --batch-size 32", False), ("-npl 2", False)])
def test_vllms_batch_size_is_told_from_ours(tmp_path: Path, words: str, told: bool) -> None:
    """`vllm bench latency --batch-size 2` has two requests in a batch; here these are tokens in a step."""
    done = bench(tmp_path, "latency", "tiny", "--input-len", "3", "--output-len", "2", "-r", "1", "--warmup", "0", *words.split())
    assert done.returncode == 0, done.stderr
    assert ("a batch has 8 requests, as -npl says" in done.stderr) is told


def test_a_table_with_charts_and_a_report(tmp_path: Path) -> None:
    model = f"--random-weights {shape(tmp_path)} --roofline off"
    shown = measured(tmp_path, f"{model} -p 8 -n 3 -d 0,16 -r 1 --plot --report report.html")
    assert "| qwen3 " in shown
    assert "against depth" in shown
    assert "\x1b" not in shown
    assert "pp8" in (tmp_path / "report.html").read_text()
    (tmp_path / "saved.json").write_text(measured(tmp_path, f"{model} -p 8 -n 0 -r 2 -o json"))
    (record,) = read_results(tmp_path / "saved.json")
    assert isinstance(record, Record)
    assert record.test == "pp8"


def shape(folder: Path) -> Path:
    sizes = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(sizes))
    return path
