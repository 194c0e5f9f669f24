"""The options that only `chat` has: how the conversation goes, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nanovllm_cli.cli.answer import ReasoningChoice
from nanovllm_cli.cli.command import CONVERSATION, PROMPT, SESSIONS, option
from nanovllm_cli.cli.options import Choice

Overflow = Literal["error", "shift"]
MarkdownChoice = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How it goes."""

    system_prompt: Annotated[
        str | None,
        option("-sys", "--system-prompt", help="What the model is told first.", panel=CONVERSATION, metavar="TEXT"),
    ] = None
    file: Annotated[
        list[str] | None,
        option(
            "-f", "--file", help="Text of the first message, before the arguments. Repeatable.",
            panel=PROMPT, metavar="FILE", envvar=None,
        ),
    ] = None  # fmt: skip
    think: Annotated[
        Choice | None,
        option("--think", help="Whether the model reasons first, where its template has a switch.", panel=CONVERSATION),
    ] = None
    reasoning: Annotated[
        ReasoningChoice,
        option(
            "--reasoning",
            help="A model's reasoning; auto shows it on a terminal, where hide folds it. [auto]",
            panel=CONVERSATION,
        ),
    ] = "auto"
    markdown: Annotated[
        MarkdownChoice,
        option(
            "--markdown",
            help="Render answers; auto does where messages are typed, always on every terminal. [auto]",
            panel=CONVERSATION,
        ),
    ] = "auto"
    context_overflow: Annotated[
        Overflow,
        option(
            "--context-overflow",
            help="When the context is full: refuse the message, or leave the oldest turns out and say so. [error]",
            panel=CONVERSATION,
        ),
    ] = "error"
    chat_template_kwargs: Annotated[
        str | None,
        option(
            "--chat-template-kwargs", help="More variables for the chat template.", panel=CONVERSATION, metavar="JSON"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Where it is kept."""

    continue_last: Annotated[
        bool, option("--continue", help="Go on with the last conversation.", panel=SESSIONS, envvar=None)
    ] = False
    session: Annotated[
        str | None,
        option(
            "--session", help="Go on with the session of this name, or of this beginning; else begin it.",
            panel=SESSIONS, metavar="NAME", envvar=None,
        ),
    ] = None  # fmt: skip
    no_save: Annotated[bool, option("--no-save", help="Keep nothing.", panel=SESSIONS)] = False
    save_kv: Annotated[
        bool,
        option(
            "--save-kv",
            help="Keep what the model has read as well, so that a session goes on at once.",
            panel=SESSIONS,
        ),
    ] = False
    list_sessions: Annotated[
        bool,
        option("--list-sessions", help="Show the sessions, the latest first, and end.", panel=SESSIONS, envvar=None),
    ] = False
    delete_session: Annotated[
        str | None,
        option("--delete-session", help="Delete this session, and end.", panel=SESSIONS, metavar="NAME", envvar=None),
    ] = None
