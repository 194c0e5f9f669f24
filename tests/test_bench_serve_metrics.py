"""`bench/metrics.py`: figures against sums done by hand, and against numpy-free formulas."""

from __future__ import annotations

import statistics

import pytest

from nanovllm_cli.bench.metrics import Trace, goals_of, latency_figures, summarize
from nanovllm_cli.errors import UsageError


def trace(sent: float, *pieces: tuple[float, int], done: float | None = None, error: str | None = None) -> Trace:
    end = done if done is not None else pieces[-1][0]
    return Trace(sent, sent, sent, pieces, end, input_tokens=10, error=error)


# Two requests. By hand, in milliseconds:
#   A: sent 0, tokens at 100, 150, 250            TTFT 100  TPOT (250-100)/2 = 75   ITL 50, 100   E2EL 250
#   B: sent 500, 3 tokens at 800, 2 tokens at 1700  TTFT 300  TPOT 900/4 = 225      ITL 900       E2EL 1200
A = trace(0.0, (0.1, 1), (0.15, 1), (0.25, 1))
B = trace(0.5, (0.8, 3), (1.7, 2))
LOST = trace(0.6, done=2.0, error="HTTP 500")


def test_figures_are_those_worked_out_by_hand() -> None:
    record = summarize([A, B, LOST], (50.0, 99.0), {"ttft": 200.0})
    expected = {
        "completed": 2, "failed": 1, "duration": 2.0, "total_input_tokens": 20, "total_output_tokens": 8,
        "request_throughput": 1.0, "output_throughput": 4.0, "total_token_throughput": 14.0, "request_goodput": 0.5,
        "max_output_tokens_per_s": 6.0,  # of the second from 0 to 1: three of A, three of B
        "max_concurrent_requests": 2,  # B and the one that was lost; A was done before
        "mean_ttft_ms": 200.0, "median_ttft_ms": 200.0, "std_ttft_ms": 100.0, "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 150.0, "std_tpot_ms": 75.0, "p50_tpot_ms": 150.0,
        "mean_itl_ms": 350.0, "median_itl_ms": 100.0, "p99_itl_ms": 100 + 0.98 * 800,
        "mean_e2el_ms": 725.0, "std_e2el_ms": 475.0, "p99_e2el_ms": 250 + 0.99 * 950,
        "mean_lateness_ms": 0.0,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert "mean_queueing_ms" not in record


def test_a_single_token_has_no_time_per_further_token() -> None:
    only = summarize([trace(0.0, (0.25, 1))], goals={"tpot": 1.0, "e2el": 250.0})
    assert only["request_goodput"] == 4.0, "one in a quarter of a second"
    assert not {"mean_tpot_ms", "mean_itl_ms"} & only.keys()
    assert summarize([trace(0.0, (0.251, 1))], goals={"e2el": 250.0})["request_goodput"] == 0


def test_nothing_but_failures() -> None:
    record = summarize([LOST])
    assert (record["completed"], record["failed"], record["output_throughput"]) == (0, 1, 0.0)
    assert "mean_ttft_ms" not in record
    assert summarize([])["request_throughput"] == 0.0


def test_one_that_ends_makes_room_for_one_that_begins() -> None:
    chain = [trace(start, (start + 1.0, 1)) for start in (0.0, 1.0, 2.0)]
    assert summarize(chain)["max_concurrent_requests"] == 1
    assert summarize([*chain, trace(0.5, (1.5, 1))])["max_concurrent_requests"] == 2


def test_queueing_is_told_where_a_limit_held_requests_back() -> None:
    held = Trace(scheduled=0.0, woken=0.002, sent=0.5, pieces=((0.6, 1),), done=0.6, input_tokens=1)
    record = summarize([held])
    assert record["mean_lateness_ms"] == pytest.approx(2.0)
    assert record["mean_queueing_ms"] == pytest.approx(498.0)
    assert record["mean_ttft_ms"] == pytest.approx(100.0)


@pytest.mark.parametrize("count", [1, 2, 17, 101])
def test_percentiles_are_those_of_the_standard_library(count: int) -> None:
    samples = [((i * 7919) % 1013) / 1000 for i in range(count)]
    figures = latency_figures("itl", samples, [float(p) for p in range(1, 100)])
    milliseconds = [1e3 * sample for sample in samples]
    assert figures["median_itl_ms"] == pytest.approx(statistics.median(milliseconds))
    assert figures["std_itl_ms"] == pytest.approx(statistics.pstdev(milliseconds))
    if count > 1:
        expected = statistics.quantiles(milliseconds, n=100, method="inclusive")
        assert [figures[f"p{p}_itl_ms"] for p in range(1, 100)] == pytest.approx(expected)


def test_goals() -> None:
    assert goals_of(["ttft:200", "e2el:1.5e3"]) == {"ttft": 200.0, "e2el": 1500.0}
    for words in (["itl:5"], ["ttft"], ["ttft:x"], ["ttft:-1"], ["ttft:nan"], ["ttft:inf"], ["ttft:1", "ttft:2"]):
        with pytest.raises(UsageError):
            goals_of(words)
