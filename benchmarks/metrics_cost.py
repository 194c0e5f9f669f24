"""What counting costs: microseconds a token for the server's metrics, and for one observation of prometheus_client's histogram.

    python benchmarks/metrics_cost.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.exposition import Exposition
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.metrics import NEXT_TOKEN_SECONDS, Metrics

TIMES = 200_000


def microseconds(call: Callable[[], object], times: int = TIMES) -> float:
    """The best of five rounds."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, time.perf_counter() - start)
    return best / times * 1e6


def main() -> None:
    metrics = Metrics()
    watch = metrics.accepted("model", "chat", 10, SamplingParams(), None)
    output = Output(1, [Piece(0, " token", [5])], False, 0)
    print(f"a token: {microseconds(lambda: watch.output(output)):.2f} us")
    theirs = TheirHistogram("seconds", "between tokens", buckets=NEXT_TOKEN_SECONDS, registry=CollectorRegistry())
    print(f"prometheus_client, one observation: {microseconds(lambda: theirs.observe(0.02)):.2f} us")
    print(f"a scrape: {microseconds(Exposition(metrics, dict).text, 200):.0f} us")


if __name__ == "__main__":
    main()
