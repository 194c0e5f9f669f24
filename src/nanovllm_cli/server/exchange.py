"""Exchange: one request and its answer, as logs and metrics tell of it. Never holds a prompt, an answer or a key."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from nanovllm_cli.server.ports import Caller, Generation

SCOPE_KEY = "nanovllm.exchange"


@dataclass(slots=True)
class Exchange:
    """request_id: the client's own where it was sane. started, first_byte, ended: time.monotonic(). tenant: see ports.Caller.

    first_byte: of a stream; None for an answer that is sent at once.
    limit: when it is over however far it has come; seconds: how long that is, None for no limit.
    path: as it was asked for, for logs; route: the route's template, for metrics (None where no route fits). traceparent,
    tracestate: see ports.Caller.
    """

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    tenant: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    route: str | None = None
    status: int | None = None
    first_byte: float | None = None
    ended: float | None = None
    model: str | None = None
    error: str | None = None
    limit: asyncio.Timeout | None = None
    seconds: float | None = None
    _generations: list[Generation] = field(default_factory=list)
    _read_tokens: int = 0

    @property
    def caller(self) -> Caller:
        return Caller(self.request_id, self.tenant, self.traceparent, self.tracestate)

    def follow(self, generation: Generation) -> None:
        """This generation's tokens are part of the exchange. Routes call it once for each."""
        self.model = generation.model.id
        self._generations.append(generation)

    def forget(self) -> None:
        """What is over. A connection that stays keeps its last request's scope, and with it the exchange."""
        self._generations.clear()

    def count(self, model: str | None, prompt_tokens: int) -> None:
        """Tokens that were read without a generation (embeddings, counting)."""
        self.model = model
        self._read_tokens += prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._read_tokens + sum(generation.usage.prompt_tokens for generation in self._generations)

    @property
    def completion_tokens(self) -> int:
        return sum(generation.usage.completion_tokens for generation in self._generations)


async def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange


CurrentExchange = Annotated[Exchange, Depends(exchange_of)]
"""A route's parameter of this type is the exchange that it answers."""
