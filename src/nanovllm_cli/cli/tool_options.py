"""Tools that a model may call while `run` or `chat` asks it: which servers have them, and what runs unasked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli.command import TOOLS, is_typed, option
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import counted
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.chat.toolbox import Tool, Toolbox


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Whose tools, and which of them need no person."""

    mcp: list[str] | None = option(
        "--mcp", "--mcp-config", "--mcp-servers-config",
        help='Servers of tools that the model may call, as a JSON file of "mcpServers" names them. Repeatable.',
        panel=TOOLS, metavar="FILE",
    )
    allow: list[str] | None = option(
        "--allow",
        help="A tool, or a pattern such as 'read_*', that runs unasked. Repeatable. [chat asks for each call, run refuses it]",
        panel=TOOLS, metavar="TOOL",
    )

    def check(self, ctx: Any) -> None:
        """Raises UsageError for leave without tools."""
        if self.allow and not self.mcp and is_typed(ctx, "allow"):
            raise UsageError("--allow has no meaning: there are no tools", "--mcp FILE names servers that have some")

    @contextlib.contextmanager
    def opened(self, screen: Console) -> Iterator[Toolbox]:
        """Servers of tools run within: they start while others do, and are waited for by who first asks for the tools. Raises
        UsageError, and UnsupportedError without the package that speaks with them."""
        from nanovllm_cli.chat.mcp_client import McpTools
        from nanovllm_cli.chat.mcp_servers import read_servers
        from nanovllm_cli.chat.toolbox import Toolbox

        servers = [server for path in self.mcp or () for server in read_servers(path)]
        screen.announce(f"starting {counted(len(servers), 'server')} of tools")

        def told(tools: Sequence[Tool]) -> None:
            screen.say(f"{counted(len(tools), 'tool')}: {', '.join(each.name for each in tools)}", "dim")

        with contextlib.closing(McpTools(servers, told)) as source:
            yield Toolbox(source, self.allow or (), tell=lambda line: screen.say(line, "dim"))
