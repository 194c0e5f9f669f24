"""`--url` and what belongs to it: which server, with which key, which of its models; and what has no meaning there."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanovllm_cli.cli.command import SERVER, option
from nanovllm_cli.cli.options import EngineOptions, ModelOptions
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.client.endpoint import Endpoint, ServedModel

PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """A server that answers, in place of a model in this process."""

    url: Annotated[
        str | None,
        option(
            "--url",
            help="Ask this OpenAI-compatible server: http://HOST:PORT with or without /v1, or unix:///SOCKET. MODEL is one of "
            "its models, and may be left out where it has one.",
            panel=SERVER, metavar="URL",
        ),
    ] = None  # fmt: skip
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            help="Its key. Other users see a command line, so rather set NANOVLLM_API_KEY; OPENAI_API_KEY counts after it.",
            panel=SERVER, metavar="KEY",
        ),
    ] = None  # fmt: skip
    timeout: Annotated[
        float,
        option("--timeout", help=f"Most seconds in which it says nothing. [{PATIENCE:g}]", panel=SERVER, metavar="SECONDS"),
    ] = PATIENCE

    def endpoint(self, ctx: Any) -> Endpoint | None:
        """The server that is to be asked, if one is. Raises UsageError, also for options that have no meaning there, or none
        without one."""
        if not self.url:
            _refuse(ctx, ["api_key", "timeout"], "has no meaning without --url")
            return None
        local = [each.name for group in (ModelOptions, EngineOptions) for each in dataclasses.fields(group)]
        local.remove("model")
        _refuse(ctx, local, "has no meaning with --url: it is the server's business")
        from nanovllm_cli.client.endpoint import Endpoint, checked_key
        from nanovllm_cli.client.http import Server

        if not 0 < self.timeout <= 1e6:
            raise UsageError(f"--timeout of {self.timeout:g} seconds")
        key = self.api_key or os.environ.get("OPENAI_API_KEY") or None
        return Endpoint(Server.at(self.url), checked_key(key), self.timeout)


def _refuse(ctx: Any, names: Sequence[str], why: str) -> None:
    """Raises UsageError for the first of these options that the command line has. What the environment and settings files say
    are defaults: they are for where they have a meaning."""
    for param in ctx.command.params:
        if param.name in names:
            source = ctx.get_parameter_source(param.name)
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{max(param.opts, key=len)} {why}")


def model_and_words(
    served: Sequence[ServedModel], named: str | None, words: Sequence[str]
) -> tuple[ServedModel, list[str]]:
    """Which of a server's models is meant, and the words that are the prompt's. named: by -m, which need not be listed. Else the
    first word, where the server has a model of that name; else the only one that it has. Raises UsageError."""
    by_name = {each.id: each for each in served}
    if named is not None:
        from nanovllm_cli.client.endpoint import ServedModel

        return by_name.get(named, ServedModel(named, None)), list(words)
    if words and words[0] in by_name:
        return by_name[words[0]], list(words[1:])
    names = ", ".join(list(by_name)[:8])
    if words and " " not in words[0] and (near := difflib.get_close_matches(words[0], by_name, n=1, cutoff=0.8)):
        raise UsageError(f"the server has no model {words[0]}", f"did you mean {near[0]}? -m {near[0]} leaves no doubt")
    if len(by_name) > 1:
        raise UsageError(f"the server has several models: {names}", "name one of them first, or by -m")
    return served[0], list(words)
