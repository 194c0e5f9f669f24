"""The options that only `chat` has: how the conversation goes, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.cli.answer import ReasoningChoice
from nanovllm_cli.cli.command import CONVERSATION, PROMPT, SESSIONS, option
from nanovllm_cli.cli.shared_options import SystemPrompt, TemplateKwargs, Think

Overflow = Literal["error", "shift"]
MarkdownChoice = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How it goes."""

    system_prompt: SystemPrompt = None
    prompt: str | None = option(
        "-p", "--prompt", help="The first message, as the arguments after MODEL.", panel=PROMPT, metavar="TEXT", envvar=None
    )
    file: list[str] | None = option(
        "-f", "--file", help="Text of the first message, before the arguments. Repeatable.",
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    image: list[str] | None = option(
        "--image", help="An image that the first message is about. Repeatable.", panel=PROMPT, metavar="FILE", envvar=None
    )
    audio: list[str] | None = option(
        "--audio", help="A sound that the first message is about. Repeatable.", panel=PROMPT, metavar="FILE", envvar=None
    )
    video: list[str] | None = option(
        "--video", help="A video that the first message is about. Repeatable.", panel=PROMPT, metavar="FILE", envvar=None
    )
    think: Think = None
    reasoning: ReasoningChoice = option(
        "--reasoning", help="A model's reasoning; auto shows it on a terminal, where hide folds it. [auto]",
        default="auto", panel=CONVERSATION,
    )
    markdown: MarkdownChoice = option(
        "--markdown", help="Render answers; auto does where messages are typed, always on every terminal. [auto]",
        default="auto", panel=CONVERSATION,
    )
    context_overflow: Overflow = option(
        "--context-overflow",
        help="When the context is full: refuse the message, or leave the oldest turns out and say so. [error]",
        default="error", panel=CONVERSATION,
    )
    chat_template_kwargs: TemplateKwargs = None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Where it is kept."""

    continue_last: bool = option(
        "--continue", help="Go on with the last conversation.", default=False, panel=SESSIONS, envvar=None
    )
    session: str | None = option(
        "--session", help="Go on with the session of this name, or of this beginning; else begin it.",
        panel=SESSIONS, metavar="NAME", envvar=None,
    )
    no_save: bool = option("--no-save", help="Keep nothing.", default=False, panel=SESSIONS)
    save_kv: bool = option(
        "--save-kv", help="Keep what the model has read as well, so that a session goes on at once.",
        default=False, panel=SESSIONS,
    )
    list_sessions: bool = option(
        "--list-sessions", help="Show the sessions, the latest first, and end.",
        default=False, panel=SESSIONS, envvar=None,
    )
    delete_session: str | None = option(
        "--delete-session", help="Delete this session, and end.", panel=SESSIONS, metavar="NAME", envvar=None
    )
