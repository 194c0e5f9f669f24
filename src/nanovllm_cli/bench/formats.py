"""Records as text: llama-bench's five formats, column for column, so that what reads its output reads ours.

A printer gives text to be written before the first record, for each record, and after the last. The widths and signs of the table
are those of llama-bench's markdown printer; its columns for what this engine has no setting for are left out of every format, and
CSV, JSON and SQL have ours behind theirs (`record.OWN_FIELDS`).
"""

from __future__ import annotations

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from nanovllm_cli.bench.record import LLAMA_BENCH_FIELDS, OWN_FIELDS, Record

ALL_FIELDS = (*LLAMA_BENCH_FIELDS, *OWN_FIELDS)
SQL_TABLE = "llama_bench"
_BELIEVABLE = 1.1  # of a limit: beyond it something else than the test is to be explained

# Width of a column of the table, negative for text that stands on the left, and its heading where it is not the field's name.
_WIDTHS = {
    "model": -30, "size": 10, "params": 10, "backend": -10, "n_gpu_layers": 3, "n_cpu_moe": 9, "n_threads": 7,
    "tensor_parallel_size": 3, "n_batch": 7, "n_ubatch": 8,
    "type_k": 6, "type_v": 6, "test": 15, "t/s": 20,
}  # fmt: skip
_HEADINGS = {"n_gpu_layers": "ngl", "n_threads": "threads", "tensor_parallel_size": "tp"}


class Printer(ABC):
    def header(self) -> str:
        return ""

    @abstractmethod
    def row(self, record: Record) -> str: ...

    def footer(self) -> str:
        return ""


class Markdown(Printer):
    """The table. swept: fields that are shown because they were swept, or set. On a GPU `ngl` stands where `threads` does on a
    CPU; the footer names the build of the last row."""

    def __init__(self, swept: Sequence[str], *, on_cpu: bool) -> None:
        optional = ("n_gpu_layers", "n_cpu_moe", "n_threads", "tensor_parallel_size", "n_batch", "n_ubatch", "type_k", "type_v")
        shown = {*swept, "n_threads" if on_cpu else "n_gpu_layers"}
        self._columns = ["model", "size", "params", "backend", *(name for name in optional if name in shown), "test", "t/s"]
        self._build = ""

    def header(self) -> str:
        names = [_padded(_HEADINGS.get(name, name), _WIDTHS[name]) for name in self._columns]
        rules = ["-" * (abs(_WIDTHS[name]) - 1) + (":" if _WIDTHS[name] > 0 else "-") for name in self._columns]
        return _line(names) + _line(rules)

    def row(self, record: Record) -> str:
        self._build = f"\nbuild: {record.build_commit} ({record.build_number})\n"
        return _line([_padded(self._cell(record, name), _WIDTHS[name]) for name in self._columns])

    def footer(self) -> str:
        return self._build

    def _cell(self, record: Record, name: str) -> str:
        if name == "model":
            return record.model_type
        if name == "size":
            mib = record.model_size / 2**20
            return f"{mib:.2f} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"
        if name == "params":
            count = record.model_n_params
            return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"
        if name == "backend":
            return record.backends
        if name == "t/s":
            return f"{record.avg_ts:.2f} ± {record.stddev_ts:.2f}"
        return str(getattr(record, name))


class Csv(Printer):
    """A line of names, then every value between quotes."""

    def header(self) -> str:
        return ",".join(ALL_FIELDS) + "\n"

    def row(self, record: Record) -> str:
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(map(_plain, record.values().values()))
        return text.getvalue()


class Json(Printer):
    """An array with an object a record."""

    def __init__(self) -> None:
        self._separator = ""

    def header(self) -> str:
        return "[\n"

    def row(self, record: Record) -> str:
        text = json.dumps(record.as_json(), indent=2, ensure_ascii=False, allow_nan=False)
        before, self._separator = self._separator, ",\n"
        return before + "  " + text.replace("\n", "\n  ")

    def footer(self) -> str:
        return "\n]\n" if self._separator else "]\n"


class JsonLines(Printer):
    """An object a line."""

    def row(self, record: Record) -> str:
        return json.dumps(record.as_json(), ensure_ascii=False, allow_nan=False) + "\n"


class Sql(Printer):
    """Statements for sqlite: a table, where there is none, and a row a record. Names are quoted: `limit` is a word of SQL's."""

    def header(self) -> str:
        kinds = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT"}
        example = Record("", "", 0, 0, 0, 1, (1,)).values()
        columns = ",\n".join(f'  "{name}" {kinds[type(example[name])]}' for name in ALL_FIELDS)
        return f"CREATE TABLE IF NOT EXISTS {SQL_TABLE} (\n{columns}\n);\n\n"

    def row(self, record: Record) -> str:
        values = ", ".join("'" + str(_plain(value)).replace("'", "''") + "'" for value in record.values().values())
        names = ", ".join(f'"{name}"' for name in ALL_FIELDS)
        return f"INSERT INTO {SQL_TABLE} ({names}) VALUES ({values});\n"


FORMATS: dict[str, Callable[[], Printer]] = {"csv": Csv, "json": Json, "jsonl": JsonLines, "sql": Sql}


def explained(record: Record) -> str:
    """What the numbers mean on this machine, in one line: the limit that counts, and how near it the test came."""
    parts = [f"{record.test}: {_amount(record.bytes_per_token)}B and {_amount(record.flops_per_token)}FLOP a token"]
    reached = {"memory": f"{record.gb_s:.1f} GB/s", "compute": f"{record.gflops:.0f} GFLOP/s"}
    allowed = {"memory": f"{record.roofline_gb_s:.1f}", "compute": f"{record.roofline_gflops:.0f}"}
    if record.limit:
        share = f"{record.limit_share:.0%} of the {allowed[record.limit]} that {record.limit} allows"
        parts.append(f"{reached[record.limit]}, {share}")
        if record.limit_share > _BELIEVABLE:
            parts.append("it reads from caches, or the machine was busy when it was measured (--roofline measure)")
    else:
        parts.append(", ".join(reached.values()))
    return "; ".join(parts)


def _amount(number: float) -> str:
    return f"{number / 1e9:.3g} G" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _padded(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def _line(cells: list[str]) -> str:
    return "".join(["|", *(f" {cell} |" for cell in cells), "\n"])


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
