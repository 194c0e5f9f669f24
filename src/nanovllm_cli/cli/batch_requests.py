"""Files of requests in the form of OpenAI's batches (`text/batch_form.py`). An answer's `id` says which line under which settings
it is of, so that an interrupted batch can go on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nanovllm_cli.cli.batch_lines import digest, parsed, raw_lines, shown
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.records import Record
from nanovllm_cli.cli.results import Form
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.batch_form import EXAMPLE, ID, Request, failed, request_of


def read_requests(source: str, screen: Console) -> list[Request]:
    """Every line of a file but the blank ones. Raises UsageError for a file that cannot be read at all."""
    lines: dict[str, int] = {}
    found = [request_of(number, data, partial(parsed, example=EXAMPLE), lines) for number, data in raw_lines(source, screen)]
    if not found:
        raise UsageError(f"{shown(source)} has no requests", f"each line is {EXAMPLE}")
    return found


def keys_of(requests: Sequence[Request], settings: object) -> list[str]:
    """What identifies the answer of each. settings: whatever decides it, besides the line."""
    by = digest(settings)[:12]
    return [f"{ID}{by}{digest([each.custom_id, each.path, each.body])[:20]}" for each in requests]


def _key(record: Record) -> str | None:
    key = record.get("id")
    return key if isinstance(key, str) and key.startswith(ID) and "custom_id" in record else None


FORM = Form(_key, failed, lambda line, record, number: line)
