"""The options that say which requests a benchmark makes; the requests are `bench/workload.py`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nanovllm_cli.cli.command import is_typed, option
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.bench.workload import Count, Workload

DATASET = "Requests"
INPUT_LEN, OUTPUT_LEN, PREFIX_LEN, NUM_PREFIXES = 512, 128, 256, 10

Number = TypeVar("Number", int, float)

_TAKES = {
    "random": ("input_len", "output_len", "range_ratio"),
    "prefix": ("input_len", "output_len", "prefix_len", "num_prefixes"),
    "sharegpt": ("dataset_path", "output_len"),
    "file": ("dataset_path", "output_len"),
}


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """What is asked. A field that is None was not given."""

    dataset: Literal["random", "prefix", "sharegpt", "file"] | None = option(
        "--dataset",
        help="Made-up prompts, made-up prompts of which groups begin alike, ShareGPT's JSON, or one prompt a line "
        '(text, or JSON with "prompt" and "max_tokens"). [random, or file with --dataset-path]',
        panel=DATASET,
    )
    dataset_path: str | None = option("--dataset-path", help="The file of prompts.", panel=DATASET, metavar="FILE")
    input_len: int | None = option(
        "--input-len", help=f"Tokens of a made-up prompt (behind its prefix). [{INPUT_LEN}]",
        panel=DATASET, metavar="N",
    )
    output_len: int | None = option(
        "--output-len", help=f"Tokens of an answer. [{OUTPUT_LEN}; sharegpt: the file's]", panel=DATASET, metavar="N"
    )
    range_ratio: float | None = option(
        "--range-ratio", help="Lengths differ by up to this share, either way. [0]", panel=DATASET, metavar="SHARE"
    )
    prefix_len: int | None = option(
        "--prefix-len", help=f"Tokens that a group shares. [{PREFIX_LEN}]", panel=DATASET, metavar="N"
    )
    num_prefixes: int | None = option(
        "--num-prefixes", help=f"How many groups. [{NUM_PREFIXES}]", panel=DATASET, metavar="N"
    )

    @property
    def kind(self) -> str:
        return self.dataset or ("file" if self.dataset_path is not None else "random")

    def refuse_seed(self, ctx: Any) -> None:
        """Raises UsageError for a seed that was typed where nothing else is drawn by one."""
        if self.kind == "file" and is_typed(ctx, "seed"):
            raise UsageError("--seed has no meaning for --dataset file, which is asked in its own order")

    def workload(
        self,
        count: int,
        *,
        seed: int,
        vocab_size: int | None = None,
        reserved: Collection[int] = (),
        tokens: Count | None = None,
    ) -> Workload:
        """`count` requests. vocab_size: prompts are token ids below it, or words where it is None. reserved: those that stand
        for images or sounds. tokens: how many a text has, where a tokenizer is at hand. Raises UsageError."""
        from nanovllm_cli.bench import workload

        kind = self.kind
        for each in fields(self)[1:]:
            if getattr(self, each.name) is not None and each.name not in _TAKES[kind]:
                raise UsageError(f"--{each.name.replace('_', '-')} has no meaning for --dataset {kind}")
        input_len, output_len = _or(self.input_len, INPUT_LEN), _or(self.output_len, OUTPUT_LEN)
        if kind == "random":
            return workload.random_lengths(
                count, input_len, output_len, range_ratio=_or(self.range_ratio, 0.0), vocab_size=vocab_size, reserved=reserved,
                seed=seed,
            )  # fmt: skip
        if kind == "prefix":
            prefix_len, num_prefixes = _or(self.prefix_len, PREFIX_LEN), _or(self.num_prefixes, NUM_PREFIXES)
            return workload.prefix_repetition(
                count, prefix_len, input_len, output_len, num_prefixes=num_prefixes, vocab_size=vocab_size, reserved=reserved,
                seed=seed,
            )  # fmt: skip
        if self.dataset_path is None:
            raise UsageError(f"--dataset {kind} needs a file", "name it by --dataset-path")
        if kind == "sharegpt":
            count_of = tokens or workload.estimated_count
            return workload.sharegpt(self.dataset_path, count, output_len=self.output_len, tokens=count_of, seed=seed)
        return workload.prompts_file(self.dataset_path, count, output_len)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
