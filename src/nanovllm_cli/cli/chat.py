"""`nanovllm chat`: a conversation, in a terminal or from a pipe. What happens in it is in the room `chat`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm_cli.cli import inputs, log
from nanovllm_cli.cli.chat_options import ChatOptions, SessionOptions
from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.model import Loaded, load, name_and_words, named_model, template_kwargs
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelOptions, SamplingOptions, refuse_both
from nanovllm_cli.cli.output import Console, console, one_line
from nanovllm_cli.errors import UsageError
from nanovllm_cli.folders import state_folder

if TYPE_CHECKING:
    from nanovllm_cli.chat.loop import Chat
    from nanovllm_cli.chat.session import Sessions
    from nanovllm_cli.chat.surface import Display, Reader
    from nanovllm_cli.config import EngineConfig

EXAMPLE = "for example: nanovllm chat tiny"


@expand
def chat(
    *,
    ctx: typer.Context,
    model_word: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A path, org/repo[:quant][@revision], or a short name; or -m.")
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="The first message.")] = None,
    model: ModelOptions,
    talk: ChatOptions,
    sessions: SessionOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    messages: MessageOptions,
) -> None:
    """Talk with a model.

    In a terminal, /help lists what can be written besides messages; Ctrl-C stops an answer, Ctrl-D leaves. From a pipe each line
    is a message (several lines between two lines of three quotation marks), and stdout has the answers and nothing else.
    A message that fails is told on stderr, the next one follows, and the exit code is that of the first failure.
    What is said is kept, unless --no-save: --continue goes on with it, without MODEL with the model of then.
    """
    screen = console()
    log.configure(messages, screen)
    from nanovllm_cli.chat.session import Sessions

    saved = Sessions(state_folder() / "sessions")
    refuse_both(list_sessions=sessions.list_sessions, delete_session=sessions.delete_session is not None)
    if sessions.list_sessions:
        _list(saved, screen)
    elif sessions.delete_session is not None:
        saved.delete(sessions.delete_session)
        screen.say(f"{sessions.delete_session} is deleted")
    else:
        name, spoken = name_and_words(model, model_word, words or [])
        config = engine.config(model, max_num_seqs=1)
        first = _first_message(talk.file or [], spoken)
        _converse(ctx.obj, name, first, model, config, talk, sessions, sampling, saved, screen)


def _converse(
    settings: object,
    name: str | None,
    first: str,
    model: ModelOptions,
    config: EngineConfig,
    talk: ChatOptions,
    sessions: SessionOptions,
    sampling: SamplingOptions,
    saved: Sessions,
    screen: Console,
) -> None:
    from nanovllm_cli.chat import loop
    from nanovllm_cli.chat.commands import say_session

    resumed = _session_to_resume(sessions, saved)
    options = loop.Settings(
        given=_given(sampling),
        think=talk.think,
        kwargs=template_kwargs(talk.chat_template_kwargs),
        shows_reasoning=_shows_reasoning(talk, screen),
        shifts=talk.context_overflow == "shift",
        saves_kv=sessions.save_kv,
    )
    system = None if talk.system_prompt is None else inputs.checked(talk.system_prompt, "the system prompt")

    others = dataclasses.replace(
        model, model=None, revision=None, chat_template=None
    )  # what was said of the first alone

    def open_model(name: str) -> Loaded:
        return load(
            named_model(settings, name, others, EXAMPLE), model if name == started_with else others, config, screen
        )

    display = _display(screen)
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    chat = loop.Chat(open_model, saved, display, options, interactive=at_terminal)
    with contextlib.closing(chat):
        if resumed is not None:
            chat.resume(resumed)
        started_with = name or chat.resumed_model or named_model(settings, None, model, EXAMPLE)
        chat.open_model(started_with)
        if chat.session is not None:
            chat.load_kv()
            if at_terminal:
                say_session(chat)
        elif not sessions.no_save:
            chat.keep(sessions.session)
        if system is not None and system != chat.conversation.system:
            chat.tell(system)
        with contextlib.closing(_reader(chat, screen)) as reader:
            chat.run(reader, [first] if first else [])
    if chat.failure is not None and not at_terminal:
        raise typer.Exit(chat.failure.exit_code)


def _first_message(files: list[str], words: list[str]) -> str:
    texts = [inputs.decode(inputs.read_file(name), name).removesuffix("\n") for name in files]
    texts.append(" ".join(inputs.checked(word) for word in words))
    return "\n\n".join(text for text in texts if text)


def _session_to_resume(options: SessionOptions, saved: Sessions) -> str | None:
    """The name of a session that is there. Raises UsageError for options that contradict each other."""
    refuse_both(continue_=options.continue_last, session=options.session is not None)
    for flag, given in (
        ("--continue", options.continue_last),
        ("--session", options.session),
        ("--save-kv", options.save_kv),
    ):
        if given and options.no_save:
            raise UsageError(f"{flag} and --no-save cannot be used together")
    if options.session is not None:
        return saved.find(options.session)
    if not options.continue_last:
        return None
    names = saved.names()
    if not names:
        raise UsageError("there is no conversation to go on with", EXAMPLE)
    return names[0]


def _given(sampling: SamplingOptions) -> dict[str, object]:
    given = sampling.given()
    for flag, field in (("--num-answers", "n"), ("--logprobs", "logprobs")):
        if field in given:
            raise UsageError(f"{flag} has no place in a conversation", "nanovllm run has it")
    return given


def _shows_reasoning(talk: ChatOptions, screen: Console) -> bool:
    return talk.reasoning == "show" or (talk.reasoning == "auto" and screen.err.is_terminal and not screen.quiet)


def _display(screen: Console) -> Display:
    from nanovllm_cli.chat.plain import PlainDisplay

    return PlainDisplay(screen)


def _reader(chat: Chat, screen: Console) -> Reader:
    from nanovllm_cli.chat.plain import PlainReader

    return PlainReader(screen)


def _list(saved: Sessions, screen: Console) -> None:
    """One line a session, columns aligned."""
    entries = saved.entries()
    if not entries:
        screen.say("there are no sessions yet")
        return
    rows = [
        (
            one_line(entry.name),
            datetime.fromtimestamp(entry.updated).strftime("%Y-%m-%d %H:%M"),
            f"{entry.turns:,}",
            one_line(entry.model),
            one_line(entry.title),
        )
        for entry in entries
    ]
    head = ("NAME", "LAST", "TURNS", "MODEL", "TITLE")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        screen.answer("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
