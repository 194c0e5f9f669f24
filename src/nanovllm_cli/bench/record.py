"""What a measurement is, as data, and as JSON in and out.

A `Record` is one row of `nanovllm bench`: llama-bench's fields under llama-bench's names, and ours under names of their own. Its
JSON has all fields flat, and the machine under "machine"; a file of llama-bench reads as records, too.
A `Summary` is one run of `bench throughput`, `latency` or `serve`.

    write_json(results)            the text of a JSON array
    read_results(path)             records and summaries of a JSON object, a JSON array or JSON lines
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.errors import AccessRefusedError, UsageError

MAX_FILE_BYTES = 256 << 20
STANDARD_INPUT = "-"
_LARGEST = 1e18
"""Of a number that is believed, and 1 / this is the smallest: what is computed of both is a number, too."""


@dataclass(frozen=True, slots=True)
class Record:
    """One test: what was run, and the nanoseconds of each repetition.

    llama-bench's fields: backends "CPU" or "CUDA"; model_size in bytes as loaded; n_batch, n_ubatch: most tokens in one step, of
    which the smaller counts; n_gpu_layers, n_cpu_moe: as EngineConfig has them, 0 on a CPU; test_time: RFC 3339, UTC.
    Ours: n_parallel: how many sequences ran at once. tensor_parallel_size: processes that computed the model. dtype: computed in.
    quant: --quant, or "". formats: how matrices are kept.
    deterministic, activations: as EngineConfig has them.
    bytes_per_token, flops_per_token: the least that a token of this test costs (see `work.py`), 0 where unknown.
    roofline_gb_s, roofline_gflops: the machine's, 0 where it was not measured. peak_memory: of the process (CPU; of several the
    first) or the device (GPU), in bytes.
    """

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_prompt: int
    n_gen: int
    samples_ns: tuple[int, ...]
    build_commit: str = ""
    build_number: int = 0
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = "CPU"
    n_batch: int = 0
    n_ubatch: int = 0
    n_threads: int = 0
    tensor_parallel_size: int = 1
    type_k: str = ""
    type_v: str = ""
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0
    flash_attn: int = 0
    n_depth: int = 0
    test_time: str = ""
    n_parallel: int = 1
    dtype: str = ""
    quant: str = ""
    formats: str = ""
    deterministic: bool = False
    activations: str = ""
    bytes_per_token: float = 0.0
    flops_per_token: float = 0.0
    roofline_gb_s: float = 0.0
    roofline_gflops: float = 0.0
    peak_memory: int = 0
    machine: Machine = field(default_factory=Machine)

    @property
    def test(self) -> str:
        """pp512, tg128, pp512+tg128, each with how many sequences at once and at which depth: tg128 x16 @ d512."""
        parts = [f"{kind}{count}" for kind, count in (("pp", self.n_prompt), ("tg", self.n_gen)) if count]
        name = "+".join(parts)
        if self.n_parallel > 1:
            name += f" x{self.n_parallel}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def num_tokens(self) -> int:
        """Of one repetition, over all sequences."""
        return (self.n_prompt + self.n_gen) * self.n_parallel

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens a second of each repetition."""
        return tuple([1e9 * self.num_tokens / max(sample, 1) for sample in self.samples_ns])

    @property
    def avg_ns(self) -> int:
        return round(statistics.fmean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return round(_deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _deviation(self.samples_ts)

    @property
    def gb_s(self) -> float:
        """Memory read a second, in 10^9 bytes; the least that the work needs, so what was read is no less."""
        return self.bytes_per_token * self.avg_ts / 1e9

    @property
    def gflops(self) -> float:
        return self.flops_per_token * self.avg_ts / 1e9

    @property
    def limit(self) -> str:
        """What holds this test back on the machine's roofline: "memory", "compute", or "" where that is unknown."""
        memory, compute = self._least_seconds()
        return "" if not max(memory, compute) else "memory" if memory >= compute else "compute"

    @property
    def limit_share(self) -> float:
        """The share of what the roofline allows; 0 where that is unknown."""
        return max(self._least_seconds()) * self.avg_ts

    def _least_seconds(self) -> tuple[float, float]:
        """Of one token, by memory and by arithmetic."""
        memory = self.bytes_per_token / (self.roofline_gb_s * 1e9) if self.roofline_gb_s else 0.0
        compute = self.flops_per_token / (self.roofline_gflops * 1e9) if self.roofline_gflops else 0.0
        return memory, compute

    def values(self) -> dict[str, Any]:
        """Every plain field in the order of llama-bench's columns, ours behind them: for CSV and SQL."""
        return {name: getattr(self, name) for name in (*LLAMA_BENCH_FIELDS, *OWN_FIELDS)}

    def as_json(self) -> dict[str, Any]:
        return self.values() | {
            "samples_ns": list(self.samples_ns),
            "samples_ts": list(self.samples_ts),
            "machine": dataclasses.asdict(self.machine),
        }


LLAMA_BENCH_FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "flash_attn",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip
OWN_FIELDS = (
    "test", "n_parallel", "tensor_parallel_size", "dtype", "quant", "formats", "deterministic", "activations", "bytes_per_token",
    "flops_per_token", "gb_s", "gflops", "roofline_gb_s", "roofline_gflops", "limit", "limit_share", "peak_memory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """One run over many requests.

    kind: throughput, latency or serve. settings: what was asked for. metrics: a number a name, whose end is its unit
    (request_throughput, mean_ttft_ms, …; the names are vLLM's where it has one). series: a number for each request, or for each
    moment, by name.
    """

    kind: str
    model: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self.model,
            "settings": dict(self.settings),
            "metrics": dict(self.metrics),
            "series": {name: list(values) for name, values in self.series.items()},
            "machine": dataclasses.asdict(self.machine),
        }


Result = Record | Summary


def write_json(results: Iterable[Result]) -> str:
    """A JSON array, an object a result, ending in a newline."""
    return json.dumps([result.as_json() for result in results], indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(path: str | Path) -> list[Result]:
    """What `bench … -o json`, `-o jsonl` and `--json` have written, llama-bench's own, and `vllm bench serve --save-result`'s;
    of standard input where the path is "-".

    Raises UsageError for anything else, AccessRefusedError for a file that this user may not read.
    """
    opened, path = (_standard_input(), Path("standard input")) if path == STANDARD_INPUT else (None, Path(path))
    text = read_text(path, MAX_FILE_BYTES, "results", opened)
    values = [item for value in _parse(path, text) for item in (value if isinstance(value, list) else [value])]
    if not values:
        raise UsageError(f"{path}: no results in it")
    return [_result(path, number, value) for number, value in enumerate(values, 1)]


def read_text(path: Path, most_bytes: int, what: str, opened: BinaryIO | None = None) -> str:
    """A file that the user named; opened: what stands behind that name, where it is none. Raises UsageError and
    AccessRefusedError."""
    try:
        with open(path, "rb") if opened is None else contextlib.nullcontext(opened) as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise UsageError(f"{path}: larger than the {most_bytes >> 20} MiB that {what} may have")
        return data.decode("utf-8-sig")
    except PermissionError as error:
        raise AccessRefusedError(f"{path}: permission denied") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8") from error


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    return sys.stdin.buffer


def _parse(path: Path, text: str) -> list[Any]:
    """One JSON value, or one a line."""
    try:
        return [json.loads(text)]
    except RecursionError as error:
        raise UsageError(f"{path}: JSON nested too deeply") from error
    except ValueError as whole:
        try:
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        except RecursionError as error:
            raise UsageError(f"{path}: JSON nested too deeply") from error
        except ValueError:
            raise UsageError(f"{path}: not JSON: {whole}", "write results with -o json or -o jsonl") from whole


def _result(path: Path, number: int, value: Any) -> Result:
    where = f"{path}: result {number}"
    if not isinstance(value, dict):
        raise UsageError(f"{where}: not an object")
    machine = Machine(**_fields(where, Machine, _object(where, "machine", value.get("machine", {})), set()))
    if "samples_ns" in value:
        return _record(where, value, machine)
    if "metrics" in value:
        return _summary(where, value, machine)
    if {"completed", "duration", "request_throughput"} <= value.keys():
        return _vllm_run(where, value)
    raise UsageError(f"{where}: neither samples_ns nor metrics in it", "write results with -o json or -o jsonl")


def _record(where: str, value: dict[str, Any], machine: Machine) -> Record:
    samples = tuple([_number(where, "samples_ns", sample, int) for sample in _list(where, "samples_ns", value["samples_ns"])])
    if not samples:
        raise UsageError(f"{where}: samples_ns is empty")
    if min(samples) < 1:
        raise UsageError(f"{where}: samples_ns has {min(samples)}: times are above 0")
    given = _fields(where, Record, value, {"samples_ns", "machine"})
    missing = {"model_filename", "model_type", "model_size", "model_n_params", "n_prompt", "n_gen"} - set(given)
    if missing:
        raise UsageError(f"{where}: {sorted(missing)[0]} is missing")
    return Record(samples_ns=samples, machine=machine, **given)


def _summary(where: str, value: dict[str, Any], machine: Machine) -> Summary:
    metrics = {name: _number(where, name, number) for name, number in _object(where, "metrics", value["metrics"]).items()}
    series = {
        name: [_number(where, name, number) for number in _list(where, name, numbers)]
        for name, numbers in _object(where, "series", value.get("series", {})).items()
    }
    words = {name: _text(where, name, value.get(name, "")) for name in ("kind", "model")}
    settings = _object(where, "settings", value.get("settings", {}))
    return Summary(words["kind"], words["model"], settings, metrics, series, machine)


def _vllm_run(where: str, value: dict[str, Any]) -> Summary:
    """vLLM's result is one flat object: figures, what was asked for, and with --save-detailed seconds of every request."""
    asked = ("num_prompts", "request_rate", "burstiness", "max_concurrency")
    metrics = {
        name: _number(where, name, item)
        for name, item in value.items()
        if isinstance(item, int | float) and name not in asked and not isinstance(item, bool)
    }
    ttfts = _list(where, "ttfts", value.get("ttfts", []))
    itls = [gap for gaps in _list(where, "itls", value.get("itls", [])) for gap in _list(where, "itls", gaps)]
    series = {
        name: [1e3 * _number(where, name, seconds) for seconds in samples]
        for name, samples in (("ttft_ms", ttfts), ("itl_ms", itls))
        if samples
    }
    settings = {name: value[name] for name in asked if name in value}
    return Summary("serve", _text(where, "model_id", value.get("model_id", "")), settings, metrics, series)


def _fields(where: str, cls: type[Any], value: Mapping[str, Any], leave_out: set[str]) -> dict[str, Any]:
    """The fields of `cls` that `value` has, each of its type; what else there is has no meaning here."""
    readers: dict[str, Any] = {
        "str": _text,
        "int": lambda where, name, item: _number(where, name, item, int),
        "float": lambda where, name, item: float(_number(where, name, item)),
        "bool": lambda where, name, item: bool(_number(where, name, item)),
    }
    return {
        each.name: readers[str(each.type)](where, each.name, value[each.name])
        for each in dataclasses.fields(cls)
        if each.name in value and each.name not in leave_out
    }


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is not text")
    return value


def _number(where: str, name: str, value: Any, kind: type[Any] = float) -> Any:
    is_number = isinstance(value, int | float) and (value == 0 or 1 / _LARGEST <= abs(value) <= _LARGEST)
    if not is_number or (kind is int and value != int(value)):
        raise UsageError(f"{where}: {name} is not a number, or a huge one")
    return kind(value) if kind is int else value


def _list(where: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where}: {name} is not a list")
    return value


def _object(where: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {name} is not an object")
    return value


def _deviation(samples: Sequence[float]) -> float:
    """Of a sample, as llama-bench has it: divided by n - 1, and 0 for one repetition."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
