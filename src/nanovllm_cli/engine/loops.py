"""Whether an answer has come to say the same over and over, as models that are small, or rounded too far, do."""

from __future__ import annotations

from collections import defaultdict

from nanovllm_cli.sampling_params import SamplingParams


class Loop:
    """Of one answer's tokens, one at a time. A token costs as much time as it occurs among the last `max_repeat_size`."""

    def __init__(self, params: SamplingParams) -> None:
        self._times = params.max_repeats
        self._least, self._most = params.min_repeat_size, params.max_repeat_size
        self._count = 0
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._runs: dict[int, int] = {}
        """By size: how many tokens up to the last one were the same so many before."""

    @classmethod
    def of(cls, params: SamplingParams) -> Loop | None:
        """None where it is not looked for."""
        return cls(params) if params.max_repeats else None

    def closes(self, token_id: int) -> bool:
        """Whether the last tokens, with this one, are the same so many times over. The definition is vLLM's
        (`repetition_detection`)."""
        places, runs = self._places[token_id], dict[int, int]()
        for place in reversed(places):
            size = self._count - place
            if size > self._most:
                break
            runs[size] = self._runs.get(size, 0) + 1
        places.append(self._count)
        self._count += 1
        self._runs = runs
        return any(run >= size * (self._times - 1) for size, run in runs.items() if size >= self._least)
