"""Tools of servers that speak the Model Context Protocol, by its own Python package (the extra `mcp`), in a thread of its own.

Names of tools are the servers' where they differ, else "SERVER_NAME". What a server writes to its standard error is looked at
where it can't be reached, and else left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from nanovllm_cli.chat.mcp_servers import McpServer
from nanovllm_cli.chat.toolbox import Tool
from nanovllm_cli.errors import RequestError, UnsupportedError, UsageError
from nanovllm_cli.text.tool_calls import MAX_TOOLS

T = TypeVar("T")

START_SECONDS = 120.0
"""For a server to be there: npx and uvx install on the way."""
MAX_PAGES = 100
_NAME = re.compile(r"[^A-Za-z0-9_-]")


class McpTools:
    """Servers that run until `close`. Raises UsageError for one that does not come, with the last that it said; UnsupportedError
    without the package."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            told = "tools of MCP servers need the package mcp, which is not installed"
            raise UnsupportedError(told, "pip install 'nanovllm-cli[mcp]'") from None
        self.tools: Sequence[Tool] = ()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._stop = asyncio.Event()
        self._clients: dict[str, Any] = {}
        self._tasks: list[Future[None]] = []
        self._owners: dict[str, tuple[McpServer, str]] = {}
        try:
            started = [self._start(each) for each in servers]
            self.tools = self._named([(each, self._listed(each, ready)) for each, ready in zip(servers, started, strict=True)])
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        server, own_name = self._owners[name]
        client = self._clients[server.name]
        try:
            result = self._wait(client.call_tool(own_name, arguments, read_timeout_seconds=server.timeout))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # exception groups of a connection that broke are no Exception
            raise RequestError(f"{name}: {_said(error)}") from error
        text = "\n".join(_texts(result.content))
        if result.is_error:
            raise RequestError(text or f"{name} failed")
        return text

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        for task in self._tasks:
            with contextlib.suppress(BaseException):
                task.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _start(self, server: McpServer) -> Future[Any]:
        ready: Future[Any] = Future()
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._serve(server, ready), self._loop))
        return ready

    async def _serve(self, server: McpServer, ready: Future[Any]) -> None:
        """Holds the connection open: what opens one and what closes it are one task, as the package asks for."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with AsyncExitStack() as stack:
                    client = await stack.enter_async_context(await _client(server, stack, log))
                    ready.set_result(client)
                    await self._stop.wait()
            except BaseException as error:
                if ready.done():
                    raise
                log.seek(0)
                last = next((line.strip() for line in reversed(log.read()[-10_000:].splitlines()) if line.strip()), "")
                ready.set_exception(UsageError(f"the MCP server {server.name} did not start: {_said(error)}", last[:300] or None))

    def _listed(self, server: McpServer, ready: Future[Any]) -> list[Any]:
        try:
            client = self._clients[server.name] = ready.result(START_SECONDS)
        except TimeoutError:
            raise UsageError(f"the MCP server {server.name} did not start within {START_SECONDS:g} s") from None
        try:
            return self._wait(_all_tools(client))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise UsageError(f"the MCP server {server.name} does not tell its tools: {_said(error)}") from error

    def _named(self, found: Sequence[tuple[McpServer, list[Any]]]) -> list[Tool]:
        counts = Counter(tool.name for _, tools in found for tool in tools)
        named: list[Tool] = []
        for server, tools in found:
            for tool in tools:
                name = _NAME.sub("_", tool.name if counts[tool.name] == 1 else f"{server.name}_{tool.name}")
                if name in self._owners:
                    raise UsageError(f"two tools are called {name}", "give the servers other names")
                self._owners[name] = server, tool.name
                named.append(Tool(name, server.name, tool.description or "", dict(tool.input_schema)))
        if len(named) > MAX_TOOLS:
            raise UsageError(f"{len(named)} tools are more than {MAX_TOOLS}", "fewer servers have fewer")
        return named

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; what interrupts the wait stops the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RequestError("the connection was closed") from None
        except BaseException:
            future.cancel()
            raise


async def _client(server: McpServer, stack: AsyncExitStack, log: Any) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.command:
        parameters = StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env) or None, cwd=server.cwd
        )
        return Client(stdio_client(parameters, errlog=log))
    if not server.headers:
        return Client(server.url)
    import httpx2

    http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(server.headers), timeout=server.timeout))
    return Client(streamable_http_client(server.url, http_client=http))


async def _all_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor or len(found) > MAX_TOOLS:
            break
    return found


def _texts(content: Sequence[Any]) -> Iterator[str]:
    """What a model reads of a result: its texts, and of anything else that it was there."""
    for part in content:
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) if resource is None else getattr(resource, "text", None)
        yield text if isinstance(text, str) else f"[{getattr(part, 'type', 'something')}, which is not shown here]"


def _said(error: BaseException) -> str:
    """In one line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
