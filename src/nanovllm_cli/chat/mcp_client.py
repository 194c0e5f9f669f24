"""Tools of servers that speak the Model Context Protocol, by its own Python package (the extra `mcp`), in a thread of its own.

Names of tools are the servers' where they differ, else "SERVER_NAME". What a server writes to its standard error is looked at
where it can't be reached, and else left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TextIO, TypeVar

from nanovllm_cli.chat.mcp_servers import McpServer
from nanovllm_cli.chat.toolbox import Outcome, Tool
from nanovllm_cli.cli import signals
from nanovllm_cli.errors import RequestError, UnsupportedError, UsageError
from nanovllm_cli.text.tool_calls import MAX_NAME_CHARS, MAX_TOOLS

T = TypeVar("T")

START_SECONDS = 120.0
"""For a server to be there: npx and uvx install on the way. As much for it to tell its tools."""
END_SECONDS = 10.0
"""The package asks a server to end, and kills it, in less."""
MAX_PAGES = 100
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MEDIA = re.compile(r"(image|audio)/[a-z0-9.+-]+", re.IGNORECASE)
_FAILURES = Exception, BaseExceptionGroup
"""What the package raises: groups, where a connection broke. Ctrl-C and requests to end are none."""

logger = logging.getLogger(__name__)


class _Owner(NamedTuple):
    """Where a tool is called, and by what name. client: the package's."""

    server: McpServer
    client: Any
    tool: str


class McpTools:
    """Servers that run until `close`. They start at once, and are waited for where their tools are asked for: much can be done
    until then. Raises UnsupportedError without the package. told: of the tools, once they are known."""

    def __init__(self, servers: Sequence[McpServer], told: Callable[[Sequence[Tool]], object] = lambda tools: None) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            what = "tools of MCP servers need the package mcp, which is not installed"
            raise UnsupportedError(what, "pip install 'nanovllm-cli[mcp]'") from None
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # a line for each that a server writes where none belongs
        self._tools: Sequence[Tool] | None = None
        self._told = told
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._tasks: list[asyncio.Task[None]] = []
        self._owners: dict[str, _Owner] = {}
        try:
            self._started = [(each, self._start(each)) for each in servers]
        except BaseException:
            self.close()
            raise

    @property
    def tools(self) -> Sequence[Tool]:
        return self.wait()

    def check(self) -> None:
        """Raises UsageError for a server that is known not to come, with the last that it said."""
        for _, ready in self._started:
            if ready.done():
                ready.result()

    def wait(self) -> Sequence[Tool]:
        """All tools, once all servers have told theirs. Raises UsageError for one that does not come, and none stays."""
        if self._tools is None:
            try:
                self.check()
                self._tools = self._named([(each, *self._listed(each, ready)) for each, ready in self._started])
            except BaseException:
                self.close()
                raise
            self._told(self._tools)
        return self._tools

    def call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        self.wait()
        owner = self._owners[name]
        try:
            result = self._wait(owner.client.call_tool(owner.tool, arguments), owner.server.timeout)
        except _FAILURES as error:
            raise RequestError(_said(error)) from error
        text, images = "\n".join(_texts(result.content)), tuple(filter(None, map(_url, result.content)))
        if not (text or images) and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise RequestError(text or "it does not say why")
        return Outcome(text, images)

    def close(self) -> None:
        """Ends the servers, those that never came as well; whoever asks for the end twice waits for that."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with signals.held():
                self._wait(self._end(), 2 * END_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_SECONDS)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_SECONDS)

    def _start(self, server: McpServer) -> Future[Any]:
        ready: Future[Any] = Future()

        async def begin() -> None:
            self._tasks.append(asyncio.create_task(self._serve(server, ready)))

        self._wait(begin(), START_SECONDS)
        return ready

    async def _serve(self, server: McpServer, ready: Future[Any]) -> None:
        """Holds the connection open until it is cancelled: what opens one and what closes it are one task, as the package asks
        for."""
        with _tail() as (log, last_line):
            try:
                async with AsyncExitStack() as stack:
                    ready.set_result(await stack.enter_async_context(await _client(server, stack, log)))
                    await asyncio.Event().wait()
            except _FAILURES as error:
                if ready.done():
                    logger.info("the MCP server %s is gone: %s", server.name, _said(error))
                else:
                    told = f"the MCP server {server.name} did not start: {_said(error)}"
                    ready.set_exception(UsageError(told, last_line()))

    def _listed(self, server: McpServer, ready: Future[Any]) -> tuple[Any, list[Any]]:
        try:
            client = ready.result(START_SECONDS)
        except TimeoutError:
            raise UsageError(f"the MCP server {server.name} did not start within {START_SECONDS:g} s") from None
        try:
            return client, self._wait(_all_tools(client), START_SECONDS)
        except _FAILURES as error:
            raise UsageError(f"the MCP server {server.name} does not tell its tools: {_said(error)}") from error

    def _named(self, found: Sequence[tuple[McpServer, Any, list[Any]]]) -> list[Tool]:
        counts = Counter(tool.name for *_, tools in found for tool in tools)
        named: list[Tool] = []
        for server, client, tools in found:
            for tool in tools:
                name = _NAME.sub("_", tool.name if counts[tool.name] == 1 else f"{server.name}_{tool.name}")
                if not tool.name or len(name) > MAX_NAME_CHARS:
                    raise UsageError(f"a tool of the MCP server {server.name} has no name of 1 to {MAX_NAME_CHARS} characters")
                if name in self._owners:
                    raise UsageError(f"two tools are called {name}", "give the servers other names")
                self._owners[name] = _Owner(server, client, tool.name)
                named.append(Tool(name, server.name, tool.description or "", dict(tool.input_schema)))
        if len(named) > MAX_TOOLS:
            raise UsageError(f"{len(named)} tools are more than {MAX_TOOLS}", "fewer servers have fewer")
        return named

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result; what interrupts the wait stops the work, and so does its end. Raises RequestError there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except CancelledError:
            raise RequestError("the connection was closed") from None
        except BaseException as error:
            future.cancel()
            if isinstance(error, TimeoutError):
                raise RequestError(f"timed out: no answer within {seconds:g} s") from None
            raise


@contextlib.contextmanager
def _tail() -> Iterator[tuple[TextIO, Callable[[], str | None]]]:
    """A file for a server's standard error, and what gives the last line of that. All is read, as a full pipe would stop it, and
    no more than the end is kept. Within an event loop."""
    loop, last = asyncio.get_running_loop(), bytearray()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reading, 1 << 16):
                last.extend(data)
                del last[:-10_000]
                if len(data) < 1 << 16:
                    break

    def last_line() -> str | None:
        read()
        lines = last.decode("utf-8", "replace").splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), None)

    loop.add_reader(reading, read)
    try:
        with open(writing, "w") as log:
            yield log, last_line
    finally:
        loop.remove_reader(reading)
        os.close(reading)


async def _client(server: McpServer, stack: AsyncExitStack, log: Any) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.command:
        parameters = StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env) or None, cwd=server.cwd,
            encoding_error_handler="replace",
        )  # fmt: skip
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
            return found
    raise RequestError(f"their list goes on behind {MAX_PAGES} pages")


def _texts(content: Sequence[Any]) -> Iterator[str]:
    """What a model reads of a result: its texts, and of what is neither text nor image nor sound that it was there."""
    for part in content:
        if _url(part) is not None:
            continue
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) if resource is None else getattr(resource, "text", None)
        yield text if isinstance(text, str) else f"[{getattr(part, 'type', 'something')}, which is not shown here]"


def _url(part: Any) -> str | None:
    """An image or a sound, as its server says that it is one; whether it is, whoever looks at it will see."""
    within = getattr(part, "resource", part)
    kind, data = getattr(within, "mime_type", None), getattr(within, "data", None) or getattr(within, "blob", None)
    if not (isinstance(kind, str) and isinstance(data, str) and _MEDIA.fullmatch(kind)):
        return None
    return f"data:{kind.lower()};base64,{data}"


def _said(error: BaseException) -> str:
    """In one line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
