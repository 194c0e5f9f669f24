"""Which trials are run, and with which settings: every combination of what was asked for.

Numbers are written as llama-bench takes them: `512`, `1,2,4`, and ranges: `first-last`, `first-last+step`, `first-last*times`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_cli.config import BLOCK_SIZE
from nanovllm_cli.errors import UsageError

MAX_VALUES = 1000
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?:([+*])([0-9]{1,9}))?")


class Setup(NamedTuple):
    """How a model is loaded. n_gpu_layers: None is as many as fit. threads: None is one a processor. ubatch_size: None is
    batch_size; the smaller one counts."""

    model: str
    quant: str | None = None
    batch_size: int = 512
    ubatch_size: int | None = None
    cache_type_k: str = "auto"
    cache_type_v: str = "auto"
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    threads: int | None = None
    tensor_parallel_size: int = 1

    @property
    def step_size(self) -> int:
        """Most tokens in one step."""
        return min(self.batch_size, self.ubatch_size or self.batch_size)


class Trial(NamedTuple):
    """num_parallel sequences at once: each reads num_prompt tokens behind `depth` known ones, then draws num_gen. embeds: what it
    reads becomes a vector, and nothing is drawn."""

    num_prompt: int
    num_gen: int
    depth: int = 0
    num_parallel: int = 1
    embeds: bool = False

    @property
    def context_len(self) -> int:
        """Tokens of one sequence at the end, the one that opens a test without a prompt and the last drawn included."""
        return self.num_prompt if self.embeds else self.depth + max(self.num_prompt, 1) + self.num_gen + 1

    @property
    def num_blocks(self) -> int:
        """Of the KV cache, for all sequences."""
        return self.num_parallel * -(-self.context_len // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of each setting. num_prompts, num_gens: 0 is no test; pairs: (prompt, answer). embeds: prompts are embedded, and
    there are no other tests. Raises UsageError where there is nothing to do, or what cannot be done."""

    models: tuple[str, ...]
    num_prompts: tuple[int, ...] = (512,)
    num_gens: tuple[int, ...] = (128,)
    pairs: tuple[tuple[int, int], ...] = ()
    depths: tuple[int, ...] = (0,)
    parallel: tuple[int, ...] = (1,)
    quants: tuple[str | None, ...] = (None,)
    batch_sizes: tuple[int, ...] = (512,)
    ubatch_sizes: tuple[int | None, ...] = (None,)
    cache_types_k: tuple[str, ...] = ("auto",)
    cache_types_v: tuple[str, ...] = ("auto",)
    n_gpu_layers: tuple[int | None, ...] = (None,)
    n_cpu_moe: tuple[int, ...] = (0,)
    threads: tuple[int | None, ...] = (None,)
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    embeds: bool = False

    def __post_init__(self) -> None:
        for flag, values in (
            ("-npl", self.parallel),
            ("-b", self.batch_sizes),
            ("-ub", self.ubatch_sizes),
            ("-t", self.threads),
            ("-tp", self.tensor_parallel_sizes),
        ):
            if any(value is not None and value < 1 for value in values):
                raise UsageError(f"{flag} takes numbers from 1 on")
        if odd := [depth for depth in self.depths if depth % BLOCK_SIZE]:
            below = odd[0] // BLOCK_SIZE * BLOCK_SIZE
            raise UsageError(
                f"a depth of {odd[0]} tokens does not end where a block of the KV cache does",
                f"take a multiple of {BLOCK_SIZE}: {below} or {below + BLOCK_SIZE}",
            )
        trials = self.trials()
        if not trials:
            raise UsageError("there is nothing to measure", "give -p, -n or -pg a number above 0")
        if self.embeds and (self.pairs or self.depths != (0,)):
            raise UsageError("-embd is about texts alone, without known tokens and answers", "leave -pg and -d out")
        if self.parallel != (1,) and not any(test.num_gen or test.embeds for test in trials):
            raise UsageError("-npl is about generating, and no test does", "give -n or -pg a number above 0")
        if len(trials) > MAX_VALUES or len(self.models) > MAX_VALUES:
            raise UsageError(f"more than {MAX_VALUES} tests", "sweep fewer values")

    def setups(self) -> Iterator[Setup]:
        """In an order in which a model's own settings come together."""
        return itertools.starmap(
            Setup,
            itertools.product(
                self.models,
                self.quants,
                self.batch_sizes,
                self.ubatch_sizes,
                self.cache_types_k,
                self.cache_types_v,
                self.n_gpu_layers,
                self.n_cpu_moe,
                self.threads,
                self.tensor_parallel_sizes,
            ),
        )

    def trials(self) -> list[Trial]:
        """Of every setup: by depth the prompts, the answers and both together. Several sequences at once are for tests that
        generate: a prompt's steps are full with one."""
        if self.embeds:
            return [Trial(count, 0, 0, many, embeds=True) for count in self.num_prompts if count for many in self.parallel]
        found = []
        for depth in self.depths:
            found += [Trial(count, 0, depth) for count in self.num_prompts if count]
            found += [Trial(0, count, depth, many) for count in self.num_gens if count for many in self.parallel]
            for num_prompt, num_gen in self.pairs:
                several = self.parallel if num_gen else (1,)
                found += [Trial(num_prompt, num_gen, depth, many) for many in several if num_prompt or num_gen]
        return found


def numbers(text: str) -> list[int]:
    """`512`, `1,2,4`, `1-4`, `4-64*2`, `1-8+1`. ValueError says what was expected."""
    found: list[int] = []
    for part in text.split(","):
        found += _range(part.strip(), text)
        if len(found) > MAX_VALUES:
            raise ValueError(f"{text!r} has more than {MAX_VALUES} values")
    return found


def pair(text: str) -> tuple[int, int]:
    """`512,128`: a prompt and an answer. ValueError says what was expected."""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a prompt and an answer in tokens, such as 512,128")
    return int(match[1]), int(match[2])


def _range(part: str, text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,9}", part):
        return [int(part)]
    match = _RANGE.fullmatch(part)
    if match is None:
        raise ValueError(f"{text!r} is not a list of numbers such as 512, 1,2,4, 4-64*2 or 1-8+1")
    first, last, step = int(match[1]), int(match[2]), int(match[4] or 1)
    if first > last:
        raise ValueError(f"{text!r} ends before it begins")
    if match[3] != "*":
        if step < 1:
            raise ValueError(f"{text!r} never gets to its end")
        return list(range(first, last + 1, step)[: MAX_VALUES + 1])
    if step < 2 or first < 1:
        raise ValueError(f"{text!r} never gets to its end")
    return [first * step**i for i in range(31) if first * step**i <= last]
