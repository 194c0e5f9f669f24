"""`nanovllm chat`: a conversation, in a terminal or from a pipe. What happens in it is in the room `chat`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from nanovllm_cli.cli import inputs
from nanovllm_cli.cli.answer import shows_reasoning
from nanovllm_cli.cli.chat_options import ChatOptions, SessionOptions
from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.form import FormOptions, refuse_with_beams
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import Loaded, find, name_and_words, named_model, template_kwargs
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelOptions, ModelWord, refuse_both
from nanovllm_cli.cli.output import Console, one_line
from nanovllm_cli.cli.remote_options import RemoteOptions, named_by_word, only_model
from nanovllm_cli.cli.sampling_options import SamplingOptions
from nanovllm_cli.cli.table import aligned
from nanovllm_cli.cli.tool_options import ToolOptions
from nanovllm_cli.cli.unused import refuse_beside, sampling_notes
from nanovllm_cli.errors import ModelNotFoundError, UsageError
from nanovllm_cli.folders import state_folder
from nanovllm_cli.images.source import IMAGE
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.sounds.source import SOUND

if TYPE_CHECKING:
    from nanovllm_cli.chat.loop import Chat
    from nanovllm_cli.chat.model import Model, Settings
    from nanovllm_cli.chat.session import Sessions
    from nanovllm_cli.chat.surface import Display, Reader
    from nanovllm_cli.chat.toolbox import Toolbox
    from nanovllm_cli.client.endpoint import Endpoint, ServedModel
    from nanovllm_cli.config import EngineConfig

EXAMPLE = "for example: nanovllm chat tiny"


@expand
def chat(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="The first message.")] = None,
    model: ModelOptions,
    server: RemoteOptions,
    talk: ChatOptions,
    tools: ToolOptions,
    sessions: SessionOptions,
    sampling: SamplingOptions,
    form: FormOptions,
    engine: EngineOptions,
    messages: MessageOptions,
) -> None:
    """Talk with a model.

    In a terminal, /help lists what can be written besides messages; Ctrl-C stops an answer, Ctrl-D leaves. From a pipe each line
    is a message (several lines between two lines of three quotation marks), and stdout has the answers and nothing else.
    A message that fails is told on stderr, the next one follows, and the exit code is that of the first failure.
    What is said is kept, unless --no-save; --continue goes on with it, and needs no MODEL.
    """
    screen = screen_for(messages)
    from nanovllm_cli.chat.session import Sessions

    saved = Sessions(state_folder() / "sessions")
    refuse_both(list_sessions=sessions.list_sessions, delete_session=sessions.delete_session is not None)
    if sessions.list_sessions:
        refuse_beside(ctx, "--list-sessions", MessageOptions, "list_sessions")
        _list(saved, screen)
    elif sessions.delete_session is not None:
        refuse_beside(ctx, "--delete-session", MessageOptions, "delete_session")
        saved.delete(sessions.delete_session)
        screen.say(f"{sessions.delete_session} is deleted")
    else:
        source: _Local | _Remote
        given = sampling.given() | form.given()
        refuse_with_beams(given)
        shifts = ("context_overflow",) if talk.context_overflow == "shift" else ()
        endpoint = server.endpoint(ctx, "save_kv", *shifts)
        if endpoint is not None:
            source, spoken = _Remote.of(endpoint, model.model, [word for word in (model_word, *(words or [])) if word])
        else:
            name, spoken = name_and_words(model, model_word, words or [])
            config = engine.config(model, max_num_seqs=given.get("num_beams", 1), settings=ctx.obj)
            source = _Local(ctx.obj, name, model, config, screen, bool(tools.mcp))
        first = _first_message(talk, spoken)
        kwargs = template_kwargs(ctx, talk.chat_template_kwargs)
        tools.check(ctx)
        with tools.opened(screen) if tools.mcp else contextlib.nullcontext() as box:
            _converse(ctx, source, first, talk, kwargs, sessions, given, saved, screen, box)


@dataclass
class _Local:
    """Models in this process. settings: those of the files. named: by a word or by -m."""

    settings: object
    named: str | None
    options: ModelOptions
    config: EngineConfig
    screen: Console
    has_tools: bool = False
    _begun_with: str = field(default="", init=False)

    def model(self, settings: Settings) -> Model:
        from nanovllm_cli.chat.local_model import LocalModel

        return LocalModel(self._find, settings)

    def name(self, resumed: str | None) -> str:
        """The model to begin with. resumed: the one that the session had."""
        self._begun_with = self.named or resumed or named_model(self.settings, self.options.model, EXAMPLE)
        return self._begun_with

    def _find(self, name: str) -> Callable[[], Loaded]:
        options, config = self.options, self.config
        if name != self._begun_with:  # what was said of the first is of it alone
            options = dataclasses.replace(options, revision=None, chat_template=None)
            config = dataclasses.replace(config, lora=(), control_vectors=(), control_vector_layers=None, draft_model=None,
                                         draft_quant=None, mtp=False, mmproj=None)  # fmt: skip
        return find(named_model(self.settings, name, EXAMPLE), options, config, self.screen, shows_calls=self.has_tools)


@dataclass(frozen=True)
class _Remote:
    """A server's models."""

    endpoint: Endpoint
    served: Sequence[ServedModel]
    named: str | None

    @classmethod
    def of(cls, endpoint: Endpoint, named: str | None, words: list[str]) -> tuple[_Remote, list[str]]:
        """And the words that are the first message's."""
        from nanovllm_cli.cli.remote import waited_for

        served = waited_for(endpoint.models())
        if named is None:
            named, words = named_by_word(served, words)
        return cls(endpoint, served, named), words

    def model(self, settings: Settings) -> Model:
        from nanovllm_cli.chat.remote_model import RemoteModel

        return RemoteModel(self.endpoint, settings)

    def name(self, resumed: str | None) -> str:
        """The model to begin with. resumed: the one that the session had, which this server may not have."""
        if self.named is None and resumed in [each.id for each in self.served]:
            return str(resumed)
        return self.named or only_model(self.served)


def _converse(
    ctx: typer.Context,
    source: _Local | _Remote,
    first: _First,
    talk: ChatOptions,
    kwargs: dict[str, Any],
    sessions: SessionOptions,
    given: dict[str, Any],
    saved: Sessions,
    screen: Console,
    tools: Toolbox | None = None,
) -> None:
    from nanovllm_cli.chat import loop
    from nanovllm_cli.chat.commands import say_attached, say_session
    from nanovllm_cli.chat.model import Settings

    resumed = _session_to_resume(sessions, saved)
    surface = _surface(talk, screen)
    is_local = isinstance(source, _Local)
    options = Settings(
        given=given,
        think=talk.think,
        kwargs=kwargs,
        shows_reasoning=surface.shows_reasoning,
        shifts=is_local and talk.context_overflow == "shift",
        saves_kv=is_local and sessions.save_kv,
        tools=tools,
    )
    if tools is not None:
        tools.tell, tools.show = surface.display.tool, partial(surface.display.tool, is_asked=True)
    system = None if talk.system_prompt is None else inputs.checked(talk.system_prompt, "the system prompt")
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    chat = loop.Chat(source.model(options), saved, surface.display, interactive=at_terminal, edits=surface.edits)
    if tools is not None:
        tools.look = lambda url: chat.model.look(url)
    with contextlib.closing(chat):
        if resumed is not None:
            chat.resume(resumed)
        try:
            chat.model.open(source.name(chat.resumed_model))
        except ModelNotFoundError as error:
            if resumed is not None and isinstance(source, _Local) and not source.options.model:
                if source.named:
                    error.hint = "without MODEL the session's own is taken; a message to it stands behind -p"
                else:
                    error.hint = "the session was with it: if it was a server's, say --url; or else, name another with -m"
            raise
        if tools is not None:
            tools.for_template()  # of a server's model nobody has asked for them yet: what is wrong with them is told now
        for note in sampling_notes(ctx, *chat.model.settled(given)):
            screen.say(note, "dim")
        if resumed is not None:
            chat.load_kv()
            if at_terminal:
                say_session(chat, resumed)
        elif not sessions.no_save:
            chat.keep(sessions.session)
        if system is not None and system != chat.conversation.system:
            chat.tell(system)
        for name, url in first.images:
            if at_terminal and not first.text:
                say_attached(chat, url, name)
            else:
                chat.attach(url, name)
        with contextlib.closing(surface.open_reader(chat)) as reader:
            chat.run(reader, [first.text] if first.text else [])
    if (ended := chat.lost or (None if at_terminal else chat.failure)) is not None:
        raise typer.Exit(ended.exit_code)


class _First(NamedTuple):
    """What is said first, "" where that is still to come. images: names of files and data URLs, of sounds and videos, too."""

    text: str
    images: list[tuple[str, str]]


def _first_message(talk: ChatOptions, spoken: list[str]) -> _First:
    texts = [inputs.read_text(name).removesuffix("\n") for name in talk.file or []]
    words = [*([talk.prompt] if talk.prompt is not None else []), *spoken]
    texts.append(" ".join(inputs.checked(word) for word in words))
    text = "\n\n".join(text for text in texts if text)
    if talk.file and text.startswith("/"):  # as comments of many languages do: a message all the same, and no command
        text = f"/{text}"
    images = [(name, IMAGE.data_url(inputs.read_file(name), name)) for name in talk.image or []]
    images += [(name, SOUND.data_url(inputs.read_file(name), name)) for name in talk.audio or []]
    images += [(name, VIDEO.data_url(inputs.read_file(name), name)) for name in talk.video or []]
    return _First(text, images)


def _session_to_resume(options: SessionOptions, saved: Sessions) -> str | None:
    """The name of a session that is there. Raises UsageError for options that contradict each other."""
    refuse_both(continue_=options.continue_last, session=options.session is not None)
    refuse_both(continue_=options.continue_last, no_save=options.no_save)
    refuse_both(session=bool(options.session), no_save=options.no_save)
    refuse_both(save_kv=options.save_kv, no_save=options.no_save)
    if options.session is not None:
        return saved.find(options.session)
    if not options.continue_last:
        return None
    names = saved.names()
    if not names:
        raise UsageError("there is no conversation to go on with", EXAMPLE)
    return names[0]


class _Surface(NamedTuple):
    """Where it happens. edits: the reader can offer a text to be changed."""

    display: Display
    open_reader: Callable[[Chat], Reader]
    shows_reasoning: bool
    edits: bool = False


def _surface(talk: ChatOptions, screen: Console) -> _Surface:
    """A line editor and rendered answers where both ends are a terminal; lines and text elsewhere. Raises UsageError."""
    from nanovllm_cli.chat.plain import PlainDisplay, PlainReader

    asks = sys.stdin is not None and sys.stdin.isatty()
    if talk.markdown == "always" and not screen.out.moves_cursor:
        raise UsageError(
            "--markdown always needs a terminal, and standard output is none", "leave it out: text is as it is there"
        )
    plain = _Surface(
        PlainDisplay(screen), lambda chat: PlainReader(screen), shows_reasoning(talk.reasoning, screen), edits=False
    )
    if not screen.out.moves_cursor or not (asks or talk.markdown == "always"):
        return plain
    from nanovllm_cli.chat.keys import AnswerKeys
    from nanovllm_cli.chat.terminal import TerminalDisplay

    keys = AnswerKeys(sys.stdin.fileno()) if asks else None
    display = TerminalDisplay(
        screen, markdown=talk.markdown != "never", folds_thinking=talk.reasoning == "hide", keys=keys
    )
    if not asks:
        return plain._replace(display=display)

    def open_editor(chat: Chat) -> Reader:
        from nanovllm_cli.chat.commands import complete
        from nanovllm_cli.chat.line_editor import LineEditor

        return LineEditor(
            partial(complete, chat),
            chat.status,
            display.toggle_thinking,
            keys=keys,
            history_file=state_folder() / "chat-history" if chat.session is not None else None,
            color=screen.out.color,
        )

    return _Surface(display, open_editor, shows_reasoning=True, edits=True)


def _list(saved: Sessions, screen: Console) -> None:
    """One line a session, columns aligned."""
    entries = saved.entries()
    if not entries:
        screen.say("there are no sessions yet")
        return
    rows = [("NAME", "LAST", "TURNS", "MODEL", "TITLE")]
    for entry in entries:
        updated = datetime.fromtimestamp(entry.updated).strftime("%Y-%m-%d %H:%M")
        rows.append((one_line(entry.name), updated, f"{entry.turns:,}", one_line(entry.model), one_line(entry.title)))
    screen.lines(aligned(rows, left=range(5)))
