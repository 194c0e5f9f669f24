"""The shapes of `--json`, `--jsonl` and `--batch`, and the statistics of a run.

--json     {"model", "answers": [answer, …], "usage", "statistics"}
--jsonl    {"event": "token", "index", "text", "token_ids"} for each step,
           then {"event": "end"} with what --json has but for texts
--batch    {"id", "line", "model", "answers", "usage", "key"},
           or {"id", "line", "error": {"type", "message"}, "key"}
answer     {"index", "text", "finish_reason", "stop_reason", "num_tokens"},
           and "reasoning", "logprobs" where there are any
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.progress_line import size
from nanovllm_cli.errors import NanovllmError

if TYPE_CHECKING:
    import torch

    from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
    from nanovllm_cli.engine.plan import TokenLogprobs
    from nanovllm_cli.llm import LLM

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Statistics:
    """How fast it went. Counts in tokens, times in seconds, rates in tokens a second; None where there was nothing to
    measure.

    A prompt's rate counts what was computed, not what came from the prefix cache; an answer's rate leaves out its
    first token, which belongs to the prompt's time.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    prompt_tokens_per_second: float | None
    answer_tokens_per_second: float | None
    time_to_first_token: float | None
    seconds: float | None
    load_seconds: float | None
    peak_memory_bytes: int
    weight_bytes: int
    kv_bytes: int
    kv_dtypes: tuple[str, str]

    @classmethod
    def of(cls, output: RequestOutput, llm: LLM, load_seconds: float | None, now: float) -> Statistics:
        """Of one request, finished or cut off at `now` (time.monotonic's clock)."""
        metrics = output.metrics
        prompt, cached = len(output.prompt_ids), metrics.num_cached_tokens
        answers = sum(len(answer.token_ids) for answer in output.outputs)
        started, first, end = metrics.first_scheduled, metrics.first_token, metrics.finished or now
        reading = first - started if first is not None and started is not None else None
        writing = end - first if first is not None else None
        later = answers - len(output.outputs)
        return cls(
            prompt_tokens=prompt,
            cached_tokens=cached,
            answer_tokens=answers,
            prompt_tokens_per_second=_rate(prompt - cached, reading),
            answer_tokens_per_second=_rate(later, writing),
            time_to_first_token=_rounded(first - metrics.arrival if first is not None else None),
            seconds=_rounded(end - metrics.arrival),
            load_seconds=_rounded(load_seconds),
            peak_memory_bytes=peak_memory_bytes(),
            weight_bytes=llm.weight_bytes,
            kv_bytes=llm.kv_bytes,
            kv_dtypes=(_name(llm.kv_dtypes[0]), _name(llm.kv_dtypes[1])),
        )

    def line(self) -> str:
        """For a person, on one line."""
        prompt = f"prompt {self.prompt_tokens} tokens"
        if self.cached_tokens:
            prompt += f" ({self.cached_tokens} cached)"
        parts = [
            prompt + _per_second(self.prompt_tokens_per_second),
            f"answer {self.answer_tokens} tokens" + _per_second(self.answer_tokens_per_second),
        ]
        if self.time_to_first_token is not None:
            parts.append(f"first token {self.time_to_first_token:.2f} s")
        memory = f"memory {size(self.peak_memory_bytes)}"
        kinds = " and ".join(dict.fromkeys(self.kv_dtypes))
        parts.append(f"{memory} (weights {size(self.weight_bytes)}, KV cache {size(self.kv_bytes)} of {kinds})")
        return " | ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def dumps(record: Record) -> str:
    """One line, no newline at its end."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def answer_record(answer: CompletionOutput, text: str, reasoning: str | None, llm: LLM) -> Record:
    """One answer. `reasoning` is None for a model that has none, or where it is hidden."""
    record: Record = {"index": answer.index, "text": text}
    if reasoning is not None:
        record["reasoning"] = reasoning
    record |= {
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_tokens": len(answer.token_ids),
    }
    if answer.logprobs is not None:
        record["logprobs"] = logprob_records(answer.logprobs, llm)
    if answer.error is not None:
        record["error"] = answer.error
    return record


def result_record(output: RequestOutput, answers: Iterable[Record], model: str) -> Record:
    """A request's whole result."""
    return {
        "model": model,
        "answers": list(answers),
        "usage": {
            "prompt_tokens": len(output.prompt_ids),
            "cached_tokens": output.metrics.num_cached_tokens,
            "answer_tokens": sum(len(answer.token_ids) for answer in output.outputs),
        },
    }


def error_record(error: Exception) -> Record:
    """What went wrong, as a value. Names no more than the message does."""
    record: Record = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, NanovllmError) and error.hint:
        record["hint"] = error.hint
    return record


def statistics_record(statistics: Statistics) -> Record:
    return asdict(statistics)


def logprob_records(entries: Sequence[TokenLogprobs], llm: LLM) -> list[Record]:
    """Natural logarithms, most likely first; a token's text is what it is by itself."""

    def text(token_id: int) -> str:
        return llm.tokenizer.decode([token_id], skip_special_tokens=False)

    return [
        {
            "token": text(entry.token_id),
            "token_id": entry.token_id,
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "top": [{"token": text(i), "token_id": i, "logprob": _finite(value)} for i, value in entry.top],
        }
        for entry in entries
    ]


def _finite(value: float) -> float | None:
    """JSON has no infinity: None stands for a probability of zero."""
    return value if value == value and abs(value) != float("inf") else None


def _rate(count: int, seconds: float | None) -> float | None:
    return round(count / seconds, 2) if seconds and count > 0 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _per_second(rate: float | None) -> str:
    return f", {rate:,.1f} tok/s" if rate is not None else ""
