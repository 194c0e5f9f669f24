"""Servers of tools as a file names them: the JSON that clients of the Model Context Protocol share.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"], "env": {"KEY": "${KEY}"}},
                    "search": {"url": "https://…/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}}}

`servers` is VS Code's name of the same. `${NAME}` and `${NAME:-default}` stand for variables of the environment, so that a file
holds no secrets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm_cli.cli.inputs import read_text
from nanovllm_cli.errors import UsageError

EXAMPLE = '{"mcpServers": {"files": {"command": "…", "args": ["…"]}}}'
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_KINDS = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}
_FIELDS = {"command", "args", "env", "cwd", "url", "headers", "type", "disabled", "timeout"}
_NOT_HERE = {"autoApprove": "--allow", "alwaysAllow": "--allow", "trust": "--allow", "envFile": "env", "includeTools": "--allow"}


@dataclass(frozen=True)
class McpServer:
    """One that is started here (command) or listens elsewhere (url). timeout: seconds for one call."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0


def read_servers(path: str) -> list[McpServer]:
    """Those of a file that are not disabled. Raises UsageError for what they can't be, and for variables that are not set."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}", EXAMPLE) from None
    entries = value.get("mcpServers", value.get("servers")) if isinstance(value, dict) else None
    if not isinstance(entries, dict):
        raise UsageError(f"{path} names no servers", EXAMPLE)
    return [_server(name, entry, path) for name, entry in entries.items() if not _is_disabled(entry)]


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("disabled") is True


def _server(name: str, entry: Any, path: str) -> McpServer:
    where = f"the server {name[:60]!r} of {path}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no object", EXAMPLE)
    for unknown in sorted(entry.keys() - _FIELDS):
        instead = _NOT_HERE.get(unknown)
        hint = f"here {instead} says so" if instead else f"known: {', '.join(sorted(_FIELDS))}"
        raise UsageError(f"{where} has {unknown[:40]!r}, which means nothing here", hint)
    kind = entry.get("type")
    if kind is not None and (not isinstance(kind, str) or kind not in _KINDS):
        hint = "it may speak the newer way as well: \"type\": \"http\"" if kind == "sse" else f"known: {', '.join(_KINDS)}"
        raise UsageError(f"{where} is of the type {str(kind)[:40]!r}", hint)
    given = [each for each in ("command", "url") if entry.get(each)]
    if len(given) != 1 or (kind is not None and _KINDS[kind] != given[0]):
        raise UsageError(f"{where} needs either a command or a url", EXAMPLE)
    others = {"command": {"headers"}, "url": {"args", "env", "cwd"}}[given[0]] & entry.keys()
    if others:
        raise UsageError(f"{where} has {min(others)!r}, which a {given[0]} has not")

    def text(key: str) -> str:
        found = entry.get(key, "")
        if not isinstance(found, str) or "\0" in found:
            raise UsageError(f"{key!r} of {where} is no text")
        return _expanded(found, where)

    def texts(key: str) -> dict[str, str]:
        found = entry.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            raise UsageError(f"{key!r} of {where} is no object of texts")
        return {each: _expanded(value, where) for each, value in found.items()}

    args = entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise UsageError(f"'args' of {where} are no list of texts")
    timeout = entry.get("timeout", McpServer.timeout)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86_400:
        raise UsageError(f"'timeout' of {where} is no number of seconds", "from 0 to 86400")
    url = text("url")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(f"'url' of {where} is no address: {url[:60]}", "http://HOST:PORT/mcp")
    return McpServer(
        name, text("command"), tuple([_expanded(each, where) for each in args]), texts("env"), text("cwd") or None, url,
        texts("headers"), float(timeout),
    )  # fmt: skip


def _expanded(text: str, where: str) -> str:
    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise UsageError(f"{where} needs {match[1]}, which is not set", f"export {match[1]}=…, or ${{{match[1]}:-default}}")
        return found

    return _VARIABLE.sub(value, text)
