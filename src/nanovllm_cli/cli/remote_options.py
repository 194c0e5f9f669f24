"""`--url` and what belongs to it: which server, with which key, which of its models; and what has no meaning there."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.command import SERVER, option
from nanovllm_cli.cli.options import EngineOptions, ModelOptions
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.client.endpoint import Endpoint, ServedModel

PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """A server that answers, in place of a model in this process."""

    url: str | None = option(
        "--url",
        help="Ask this OpenAI-compatible server: http://HOST:PORT with or without /v1, or unix:///SOCKET. MODEL is one of "
        "its models, and may be left out where it has one.",
        panel=SERVER, metavar="URL",
    )
    api_key: str | None = option(
        "--api-key",
        help="Its key. Other users see a command line, so rather set NANOVLLM_API_KEY; OPENAI_API_KEY counts after it.",
        panel=SERVER, metavar="KEY",
    )
    timeout: float = option(
        "--timeout", help=f"Most seconds in which it says nothing. [{PATIENCE:g}]",
        default=PATIENCE, panel=SERVER, metavar="SECONDS",
    )

    def endpoint(self, ctx: Any, *more_local: str) -> Endpoint | None:
        """The server that is to be asked, if one is. more_local: options of this command that need a model in this process.
        Raises UsageError, also for options that have no meaning with a server, or none without one."""
        if not self.url:
            refuse_typed(ctx, ["api_key", "timeout"], "has no meaning without --url")
            return None
        local = [each.name for group in (ModelOptions, EngineOptions) for each in dataclasses.fields(group)]
        local.remove("model")
        refuse_typed(ctx, [*local, *more_local], "has no meaning with --url: it is the server's business")
        from nanovllm_cli.client.endpoint import Endpoint, checked_key
        from nanovllm_cli.client.http import Server

        if not 0 < self.timeout <= 1e6:
            raise UsageError(f"--timeout of {self.timeout:g} seconds")
        key = self.api_key or os.environ.get("OPENAI_API_KEY") or None
        return Endpoint(Server.at(self.url), checked_key(key), self.timeout)


def named_by_word(served: Sequence[ServedModel], words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model that the first word names, if the server has it, and the rest. Raises UsageError for nearly one."""
    names = [each.id for each in served]
    if words and words[0] in names:
        return words[0], list(words[1:])
    if words and " " not in words[0] and (near := difflib.get_close_matches(words[0], names, n=1, cutoff=0.8)):
        raise UsageError(f"the server has no model {words[0]}", f"did you mean {near[0]}? -m {near[0]} leaves no doubt")
    return None, list(words)


def only_model(served: Sequence[ServedModel]) -> str:
    """The one that need not be named, whatever adapters it has. Raises UsageError where there are several."""
    own = [each for each in served if not each.is_adapter] or served
    if len(own) != 1:
        names = ", ".join(each.id for each in served[:8])
        raise UsageError(f"the server has several models: {names}", "name one of them first, or by -m")
    return own[0].id
