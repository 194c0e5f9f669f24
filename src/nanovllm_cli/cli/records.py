"""The shapes of `--json`, `--jsonl` and `--batch`, and the statistics of a run.

--json     {"model", "answers": [answer, …], "usage", "statistics"}
--jsonl    {"event": "token", "index", "text", "token_ids"} for each step, {"event": "call", "index", and what a call has},
           then {"event": "end"} with what --json has but for texts
--batch    {"id", "line", "model", "answers", "usage", "key"}, and "prompt_logprobs" where a line asks for them,
           or {"id", "line", "error": {"type", "message"}, "key"}
answer     {"index", "text", "finish_reason", "stop_reason", "num_tokens"},
           and "reasoning", "logprobs", "language", "segments", "calls" where there are any
call       {"name", "arguments", "result"} of a tool, before the answer; "arguments" as the model wrote them, JSON as a rule.
           "images": how many images and sounds the model was shown, where there were any. With
           --json "said": the text of the answer that it is in, with the first of these calls
segment    {"start", "end", "text"} of a transcript, in seconds, how it was found, and "words" where they are asked for
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.progress_line import counted, size
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.system import peak_memory_bytes

if TYPE_CHECKING:
    import torch

    from nanovllm_cli.cli.answering import Answer, Result, Usage
    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.engine.plan import TokenLogprobs
    from nanovllm_cli.llm import LLM

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process that has loaded a model: the most that it has had, and what of it is for weights and the KV cache."""

    peak_memory_bytes: int
    weight_bytes: int
    kv_bytes: int
    kv_dtypes: tuple[str, str]

    def line(self) -> str:
        kinds = " and ".join(dict.fromkeys(self.kv_dtypes))
        cache = f"KV cache {size(self.kv_bytes)} of {kinds}"
        return f"memory {size(self.peak_memory_bytes)} (weights {size(self.weight_bytes)}, {cache})"


@dataclass(frozen=True, slots=True)
class Statistics:
    """How fast it went. Counts in tokens, times in seconds, rates in tokens a second; None where there was nothing to
    measure, or where a server does not say.

    A prompt's rate counts what was computed, not what came from the prefix cache; an answer's rate leaves out its
    first token, which belongs to the prompt's time. guessed_tokens, held_tokens: of --speculate.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    answer_tokens: int | None
    prompt_tokens_per_second: float | None
    answer_tokens_per_second: float | None
    time_to_first_token: float | None
    seconds: float | None
    load_seconds: float | None = None
    memory: Memory | None = None
    guessed_tokens: int | None = None
    held_tokens: int | None = None

    @classmethod
    def of(cls, output: RequestOutput, llm: LLM, load_seconds: float | None, now: float) -> Statistics:
        """Of one request, finished or cut off at `now` (time.monotonic's clock)."""
        metrics = output.metrics
        prompt, cached = len(output.prompt_token_ids), metrics.num_cached_tokens
        answers = sum(answer.num_tokens for answer in output.outputs)
        started, first, end = metrics.first_scheduled, metrics.first_token, metrics.finished or now
        reading = first - started if first is not None and started is not None else None
        writing = end - first if first is not None else None
        later = answers - len(output.outputs)
        return cls(
            prompt_tokens=prompt,
            cached_tokens=cached,
            answer_tokens=answers,
            prompt_tokens_per_second=rate(prompt - cached, reading),
            answer_tokens_per_second=rate(later, writing),
            time_to_first_token=_rounded(first - metrics.arrival if first is not None else None),
            seconds=_rounded(end - metrics.arrival),
            load_seconds=_rounded(load_seconds),
            memory=Memory(
                peak_memory_bytes(), llm.weight_bytes, llm.kv_bytes, (_name(llm.kv_dtypes[0]), _name(llm.kv_dtypes[1]))
            ),
            guessed_tokens=metrics.num_guessed_tokens,
            held_tokens=metrics.num_held_tokens,
        )

    @classmethod
    def of_server(
        cls,
        usage: Usage,
        rates: tuple[float | None, float | None],
        asked: float,
        first: float | None,
        end: float,
        guesses: tuple[int | None, int | None] = (None, None),
    ) -> Statistics:
        """As a client sees it: times are those of the whole way there and back. rates: of the prompt's and the answer's tokens,
        where the server says them, or there was anything to measure. asked, first, end: on one clock."""
        return cls(
            *usage,
            prompt_tokens_per_second=rates[0],
            answer_tokens_per_second=rates[1],
            time_to_first_token=_rounded(first - asked if first is not None else None),
            seconds=_rounded(end - asked),
            guessed_tokens=guesses[0],
            held_tokens=guesses[1],
        )

    def line(self) -> str:
        """For a person, on one line."""
        parts = []
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"prompt {counted(self.prompt_tokens, 'token')}{cached}" + _per_second(self.prompt_tokens_per_second))
        if self.answer_tokens is not None:
            guesses = f" ({self.held_tokens} of {self.guessed_tokens} guesses held)" if self.guessed_tokens else ""
            parts.append(f"answer {counted(self.answer_tokens, 'token')}{guesses}" + _per_second(self.answer_tokens_per_second))
        if self.time_to_first_token is not None:
            parts.append(f"first token {self.time_to_first_token:.2f} s")
        if self.memory is not None:
            parts.append(self.memory.line())
        return " | ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dumps(record: Record) -> str:
    """One line, no newline at its end."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def answer_record(answer: Answer, reasoning: str | None) -> Record:
    """One answer. `reasoning` is None for a model that has none, or where it is hidden."""
    record: Record = {"index": answer.index, "text": answer.content}
    if reasoning is not None:
        record["reasoning"] = reasoning
    record |= {
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_tokens": answer.num_tokens,
    }
    if answer.logprobs is not None:
        record["logprobs"] = answer.logprobs
    if answer.language is not None:
        record["language"] = answer.language
    if answer.segments is not None:
        record["segments"] = answer.segments
    if answer.error is not None:
        record["error"] = answer.error
    return record


def result_record(result: Result, model: str, *, keeps_reasoning: bool) -> Record:
    """A whole result."""
    shows = result.splits and keeps_reasoning
    answers = [answer_record(answer, answer.reasoning if shows else None) for answer in result.answers]
    record = {"model": model, "answers": answers, "usage": result.usage._asdict()}
    return record if result.prompt_logprobs is None else record | {"prompt_logprobs": result.prompt_logprobs}


def end_record(result: Result, model: str) -> Record:
    """A result without its texts."""
    record = result_record(result, model, keeps_reasoning=False)
    for answer in record["answers"]:
        del answer["text"]
        answer.pop("logprobs", None)
        answer.pop("segments", None)
    return record


def error_record(error: Exception) -> Record:
    """What went wrong, as a value. Names no more than the message does."""
    record: Record = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, NanovllmError) and error.hint:
        record["hint"] = error.hint
    return record


def statistics_record(statistics: Statistics) -> Record:
    """Flat; without what is of a model in this process where there is none."""
    fields = asdict(statistics)
    memory = fields.pop("memory")
    if memory is None:
        del fields["load_seconds"]
    return fields | (memory or {})


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
    return value if math.isfinite(value) else None


def rate(count: int, seconds: float | None) -> float | None:
    """Tokens a second; None where nothing can be said."""
    return round(count / seconds, 2) if seconds and count > 0 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _per_second(rate: float | None) -> str:
    return f", {rate:,.1f} tok/s" if rate is not None else ""
