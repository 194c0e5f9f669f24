"""`nanovllm completion`: the script that lets a shell complete this program's command line."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.options import MessageOptions


@expand
def completion(
    *,
    ctx: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    messages: MessageOptions,
) -> None:
    """Print the completion script for a shell.

    A package that is installed for everybody brings these scripts along in share/. Where the shell does not find them: for
    bash, put the first example's line into ~/.bashrc; for zsh, the second's into ~/.zshrc, after compinit; for fish, run the
    third once.
    """
    from nanovllm_cli.cli.command_tree import root_page
    from nanovllm_cli.cli.completion_scripts import script
    from nanovllm_cli.cli.log import screen_for

    screen_for(messages).answer(script(shell, root_page(ctx)))
