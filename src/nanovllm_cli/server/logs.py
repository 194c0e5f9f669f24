"""One line for each request: how it went and what it took. Never a prompt, an answer, a query or a key."""

from __future__ import annotations

import logging
from typing import Any

from nanovllm_cli.server.exchange import Exchange

WATCHING = {"/health", "/v1/health", "/metrics", "/status.json"}

logger = logging.getLogger(__name__)


def log_exchange(exchange: Exchange) -> None:
    """At level INFO, as fields for the JSON log, too; what asks every few seconds only at DEBUG. What has no value (a model,
    tokens) is left out."""
    level = logging.DEBUG if exchange.path in WATCHING else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = exchange_fields(exchange)
    shown = [exchange.method, exchange.path, str(exchange.status), f"{fields['seconds']:.3f} s"]
    if "ttft_seconds" in fields:
        shown.append(f"first {fields['ttft_seconds']:.3f} s")
    if "prompt_tokens" in fields:
        shown.append(f"{fields['prompt_tokens']}+{fields.get('completion_tokens', 0)} tokens")
    shown += [str(fields[name]) for name in ("model", "error") if name in fields]
    logger.log(level, "%s  %s", "  ".join(shown), exchange.request_id, extra={"fields": fields})


def exchange_fields(exchange: Exchange) -> dict[str, Any]:
    """seconds: from the request's head to the answer's end. ttft_seconds: to a stream's first byte, where tokens came."""
    assert exchange.ended is not None
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "seconds": round(exchange.ended - exchange.started, 6),
    }
    if exchange.completion_tokens and exchange.first_byte is not None:
        fields["ttft_seconds"] = round(exchange.first_byte - exchange.started, 6)
    if exchange.model is not None:
        fields |= {"model": exchange.model, "prompt_tokens": exchange.prompt_tokens}
        fields["completion_tokens"] = exchange.completion_tokens
    if exchange.error is not None:
        fields["error"] = exchange.error
    return fields
