"""From results to tables in Markdown: what was asked for and what was found, then every section's numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Results = Mapping[str, Mapping[str, Any]]
"""Records by section."""
RED = "MISSED"
SMALLEST, EAGER, ONE_BY_ONE, OVERLAPPED = "qwen3-0.6b", "eager", "one kernel after the other", "programmatic launch"
"""Rows of batch-1: a model, and behind a comma the way its kernels were launched. Of contact: these ways."""
LAST_BEGUN = "last begun"
"""Of contact: the way that it came to, which may have hung."""
ENDED = ("done", "failed", "timed out")
BARRED = {(32, 2048), (128, 2048)}
"""Sequences and tokens of each that every bar of decode attention needs."""
SIZES = ((4096, 12288), (24576, 4096), (151936, 4096))
"""Outputs and columns of the products that have bars: each of these bars needs all."""
MOST_ROWS = 4096
"""Of products whose rows are many and few: measured from the fewest up, so that who has this many has all."""


class Bar(NamedTuple):
    """wanted: at least so much, or at most where `most`. find: the number found, or None where it was not measured."""

    title: str
    wanted: float
    unit: str
    find: Callable[[Results], float | None]
    most: bool = False


def _get(results: Results, section: str, *path: str) -> Any:
    value: Any = results.get(section, {}).get("results", {})
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _copy_share(results: Results, kind: str) -> float | None:
    """The lowest share of the copy ceiling over the rows that read as many sequences and tokens as the bar asks for, which rows
    of a window do not. None where one that it needs is missing: the worst may be that one."""
    ceiling = _get(results, "ceilings", "copy GB/s")
    rates, sizes = [], set()
    for row in [row for section in ("attention", "attention-others") for row in _get(results, section, "decode") or []]:
        found = re.search(rf", {kind}, (\d+) x (\d+)$", row["case"])
        if found and int(found[1]) >= 32 and int(found[2]) >= 2048 and "window" not in row["case"]:
            rates.append(row["GB/s"])
            sizes.add((int(found[1]), int(found[2])))
    return _ratio(min(rates), ceiling) if sizes >= BARRED else None


def _wrong(results: Results) -> float | None:
    """Tests that failed; a file of which none passed, or that took the GPU with it, counts as one, and so does a section that
    did not get to its end."""
    record = results.get("kernels")
    if record is None or not record["results"]:
        return None
    files = record["results"].values()
    failed = sum(file["failed"] + ("lost" in file or not file["passed"]) for file in files)
    return float(failed + (record["status"] != "done"))


def _not_near(results: Results) -> float | None:
    """None where not all kinds were judged."""
    if results.get("tokens", {}).get("status") != "done":
        return None
    kinds = [value for kind, value in (results.get("tokens", {}).get("results") or {}).items() if not kind.endswith(" cache")]
    kinds = [value for value in kinds if isinstance(value, Mapping)]
    return max(value["largest gap"] for value in kinds) if kinds else None


def _decode(model: str, key: str = "tok/s") -> Callable[[Results], float | None]:
    return lambda results: _get(results, "batch-1", model, key)


def _product_share(name: str) -> Callable[[Results], float | None]:
    """The lowest share of the copy ceiling over the sizes, in bytes that the format keeps."""

    def find(results: Results) -> float | None:
        rates = [row["GB/s"] for row in _get(results, "quantized", name) or []]
        return _ratio(min(rates), _get(results, "ceilings", "copy GB/s")) if len(rates) == len(SIZES) else None

    return find


def _quantized_decode(name: str) -> Callable[[Results], float | None]:
    return lambda results: _get(results, "quantized-8b", f"{name}, 1", "tok/s")


def _least_gain(least: int, most: int) -> Callable[[Results], float | None]:
    """Of packed int4 against bf16 weights, from `least` rows to `most`, once so many were measured."""

    def find(results: Results) -> float | None:
        rows = _get(results, "crossover", "int4") or []
        gains = [row["gain"] for row in rows if least <= row["rows"] <= most]
        return min(gains) if gains and rows[-1]["rows"] >= most else None

    return find


def _prefill_ratio(one: str, other: str) -> Callable[[Results], float | None]:
    return lambda results: _ratio(*(_get(results, "quantized-prefill", name, "tok/s") for name in (one, other)))


def _against_llama_cpp(test: str) -> Callable[[Results], float | None]:
    return lambda results: _ratio(*(_get(results, "llama.cpp", f"{name}, {test}", "tok/s") for name in ("nanovllm", "llama.cpp")))


BARS = (
    Bar("kernel tests that fail on the device", 0, "", _wrong, most=True),
    Bar("log-probability by which a GPU token is behind the CPU's first", 0.1, "", _not_near, most=True),
    Bar("decode, batch 1, Qwen3-0.6B", 1500, "tok/s", _decode("qwen3-0.6b")),
    Bar("decode, batch 1, Qwen3-8B", 250, "tok/s", _decode("qwen3-8b")),
    Bar(
        "decode, batch 1, Qwen3-8B, share of the copy ceiling", 0.85, "",
        lambda r: _ratio(_get(r, "batch-1", "qwen3-8b", "GB/s"), _get(r, "ceilings", "copy GB/s")),
    ),
    Bar("decode attention, bf16, worst from 32 x 2048 up, share of the copy ceiling", 0.85, "", lambda r: _copy_share(r, "bf16")),
    Bar("decode attention, fp8, worst from 32 x 2048 up, share of the copy ceiling", 0.85, "", lambda r: _copy_share(r, "fp8")),
    Bar("decode attention, int8, worst from 32 x 2048 up, share of the copy ceiling", 0.85, "", lambda r: _copy_share(r, "int8")),
    Bar(
        "prefill of Qwen3-8B at 2,048 tokens, share of the matmul ceiling", 0.65, "",
        lambda r: _ratio(_get(r, "prefill", "2048 x 1", "TFLOP/s"), _get(r, "ceilings", "matmul TFLOP/s")),
    ),
    Bar("nano-vllm's workload", 15000, "tok/s", lambda r: _get(r, "workload", "bf16", "tok/s")),
    Bar(
        "against transformers compiled, batch 1", 1.5, "x",
        lambda r: _ratio(_get(r, "batch-1", "qwen3-0.6b", "tok/s"), _get(r, "transformers", "compiled, 1", "tok/s")),
    ),
    Bar(
        "against transformers compiled, batch 32", 3, "x",
        lambda r: _ratio(_get(r, "batches", "qwen3-0.6b, 32", "tok/s"), _get(r, "transformers", "compiled, 32", "tok/s")),
    ),
    Bar(
        "graphs against eager, batch 1, Qwen3-0.6B", 3, "x",
        lambda r: _ratio(_get(r, "batch-1", "qwen3-0.6b", "tok/s"), _get(r, "batch-1", "qwen3-0.6b, eager", "tok/s")),
    ),
    Bar("CPU time of a step, batch 1, Qwen3-0.6B", 0.3, "ms", _decode("qwen3-0.6b", "CPU ms a step"), most=True),
    *(
        Bar(f"a row by weights in {name}, worst size, share of the copy ceiling", share, "", _product_share(name))
        for name, share in (("fp8-weight-only", 0.8), ("int8-weight-only", 0.8), ("int4", 0.65), ("q4_k", 0.6), ("q8_0", 0.75))
    ),
    Bar("int4 against bf16, worst of 1 to 16 rows", 3, "x", _least_gain(1, 16)),
    Bar("int4 against bf16, 32 rows", 2, "x", _least_gain(32, 32)),
    Bar("int4 against bf16, worst of all rows", 1, "x", _least_gain(1, MOST_ROWS)),
    *(
        Bar(f"decode, batch 1, Qwen3-8B in {name}", rate, "tok/s", _quantized_decode(name))
        for name, rate in (("fp8", 440), ("int4", 620), ("q4_k_m", 480))
    ),
    Bar("prefill of Qwen3-8B in fp8 against bf16", 1.4, "x", _prefill_ratio("fp8", "bf16")),
    Bar("prefill of Qwen3-8B in Q4_K_M against int4", 0.9, "x", _prefill_ratio("q4_k_m", "int4")),
    Bar("against llama.cpp, batch 1", 1.2, "x", _against_llama_cpp("batch 1")),
    Bar("against llama.cpp, batch 32", 3, "x", _against_llama_cpp("batch 32")),
)  # fmt: skip


def one_by_one_is_better(results: Results) -> bool:
    """By contact, kernels that overlap never got to an answer or gave another one; by batch-1 that too, or they were slower."""
    begun, plain, overlapped = (_get(results, "contact", key) for key in (LAST_BEGUN, ONE_BY_ONE, OVERLAPPED))
    differ = plain is not None and (overlapped is None or plain["same tokens"] != overlapped["same tokens"])
    if differ and begun == OVERLAPPED and _has_ended(results, "contact"):
        return True
    if not _has_ended(results, "batch-1"):
        return False
    first, plain, overlapped = (
        _get(results, "batch-1", row) for row in (SMALLEST, f"{SMALLEST}, {ONE_BY_ONE}", f"{SMALLEST}, {OVERLAPPED}")
    )
    if plain is None or overlapped is None:
        return first is None
    return plain["same tokens"] != overlapped["same tokens"] or overlapped["tok/s"] < plain["tok/s"]


def _has_ended(results: Results, section: str) -> bool:
    return results.get(section, {}).get("status") in ENDED


def bars(results: Results) -> list[dict[str, Any]]:
    """Each bar with what was found: met True, False, or None where nothing was measured."""
    rows = []
    for bar in BARS:
        found = bar.find(results)
        met = None if found is None else found <= bar.wanted if bar.most else found >= bar.wanted
        limit = f"{'<=' if bar.most else '>='} {number(bar.wanted)} {bar.unit}".strip()
        rows.append({"bar": bar.title, "wanted": limit, "found": found, "met": met})
    return rows


def markdown(results: Results) -> str:
    """The whole report. Bars last, for who reads its end."""
    parts = ["# GPU run", sections_table(results)]
    for name, record in results.items():
        found = record["results"]
        if found or record["status"] != "done":
            parts.append(f"## {name}")
        if record["status"] != "done":
            parts.append(f"{record['status']}: {last_line(record.get('why'))}")
        if found:
            parts += list(tables(found, _ceilings(results)))
    verdict = {True: "met", False: RED, None: "not measured"}
    rows = [(row["bar"], row["wanted"], number(row["found"]), verdict[row["met"]]) for row in bars(results)]
    return "\n\n".join([*parts, "## Bars", table(("bar", "wanted", "found", ""), rows)]) + "\n"


def sections_table(results: Results) -> str:
    rows = [
        (
            name,
            record["status"] + (", by an earlier call" if record.get("earlier") else ""),
            number(record["seconds"]),
            last_line(record.get("why")),
        )
        for name, record in results.items()
    ]
    return table(("section", "status", "seconds", "why not"), rows)


def tables(found: Mapping[str, Any], ceilings: tuple[float | None, float | None]) -> Iterable[str]:
    """Plain values as a list, rows of like keys as one table, lists of rows as a table each."""
    plain = {key: value for key, value in found.items() if not isinstance(value, Mapping | list)}
    if plain:
        yield table(("", ""), [(key, number(value)) for key, value in plain.items()])
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, value in found.items():
        if isinstance(value, Mapping) and "rows" not in value:
            alike.setdefault(tuple(value), []).append({"": key} | dict(value))
    for rows in alike.values():
        yield rows_table(rows, ceilings)
    for key, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"### {key}\n\n{rows_table(value, ceilings)}"
        elif isinstance(value, list):
            yield f"{key}: {', '.join(map(str, value)) or 'none'}"
        elif isinstance(value, Mapping) and "rows" in value:
            rest = ", ".join(f"{name} {number(each)}" for name, each in value.items() if name != "rows")
            yield f"### {key}\n\n{rest}\n\n{rows_table(value['rows'], ceilings)}"


def rows_table(rows: Sequence[Mapping[str, Any]], ceilings: tuple[float | None, float | None]) -> str:
    """Rates get a column beside them: their share of what the device can do. What is no single value stands below."""
    limits = {rate: ceiling for rate, ceiling in zip(RATES, ceilings, strict=True) if ceiling}
    keys = [key for key in {key: None for row in rows for key in row} if not _is_long(rows, key)]
    head = [part for key in keys for part in ((key, SHARES[key]) if key in limits else (key,))]
    body: list[list[str]] = []
    below: list[str] = []
    for row in rows:
        cells = []
        for key in keys:
            value = row.get(key)
            cells.append(number(value))
            if key in limits:
                cells.append("" if value is None else f"{value / limits[key]:.1%}")
        body.append(cells)
        first = next(iter(row.values()))
        below += [f"- {first}, {key}: {_listed(value)}" for key, value in row.items() if value and _is_long([row], key)]
    return "\n".join([table(head, body), *([""] if below else []), *below])


def _is_long(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(isinstance(row.get(key), list | Mapping) or "\n" in str(row.get(key)) for row in rows)


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{number(each)} ({name})" for name, each in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else last_line(str(value))


RATES = ("GB/s", "TFLOP/s")
SHARES = {"GB/s": "of copy", "TFLOP/s": "of matmul"}


def _ceilings(results: Results) -> tuple[float | None, float | None]:
    return _get(results, "ceilings", "copy GB/s"), _get(results, "ceilings", "matmul TFLOP/s")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, so that it reads without being rendered."""
    lines = [list(head), *(list(row) for row in rows)]
    lines = [[cell.replace("|", "/").replace("\n", " ") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]
    drawn = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([drawn[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *drawn[1:]])


def number(value: Any) -> str:
    """Four digits, as a person reads them."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def last_line(why: str | None) -> str:
    return (why or "").strip().splitlines()[-1][:160] if why and why.strip() else ""
