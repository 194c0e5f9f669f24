"""The conversation itself: messages in, answers out, and what becomes of both when something interferes.

`Chat` knows a model, a conversation and its session, and talks to a `Display`; `run` reads messages until somebody leaves.
A message counts once its answer has begun, so what is stopped before is as if it had not been sent. Slash commands are in
`commands.py`; how things look is the surface's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_cli.chat.conversation import Call, Conversation, Event, Message, counted_images
from nanovllm_cli.chat.model import Model
from nanovllm_cli.chat.prompt import OVERFLOW_HINT
from nanovllm_cli.chat.session import Session, Sessions, kept_ids, last_model
from nanovllm_cli.chat.surface import NEARLY_FULL, Display, Reader, Status
from nanovllm_cli.chat.toolbox import Outcome, calls_of
from nanovllm_cli.chat.turn import Turn
from nanovllm_cli.cli import signals
from nanovllm_cli.cli.progress_line import counted
from nanovllm_cli.cli.question import LACKS, kind_of
from nanovllm_cli.cli.records import Statistics
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, VIDEOS

if TYPE_CHECKING:
    from nanovllm_cli.cli.shared_options import Choice

logger = logging.getLogger(__name__)

LEAVING_HINT = "Ctrl-C again, Ctrl-D or /exit leaves; /help lists the commands"


class Leave(Exception):
    """A command ends the conversation."""


class Chat:
    """One person, one model at a time. attachments, images: texts of files, and data URLs, that go with the next message.

    interactive: somebody sits at a terminal: Ctrl-C stops an answer and not the program. edits: the reader can offer a text to
    be changed.
    """

    def __init__(
        self,
        model: Model,
        sessions: Sessions,
        display: Display,
        *,
        interactive: bool,
        edits: bool = False,
    ) -> None:
        self.model = model
        self.sessions = sessions
        self.display = display
        self.interactive = interactive
        self.edits = edits
        self.session: Session | None = None
        self.resumed_model: str | None = None
        self.conversation = Conversation(self._record)
        self.attachments: list[str] = []
        self.images: list[str] = []
        self.statistics: Statistics | None = None
        self.failure: NanovllmError | None = None
        self.lost: NanovllmError | None = None
        """What left the conversation without a model, which ended it."""
        self.num_answers = self.num_answer_tokens = 0
        self._kv_path: Path | None = None
        self._used: int | None = None
        self._draft = ""
        self._edits_last = False
        self._num_dropped = 0
        self._has_warned = False
        self._leaves_next = False

    # ---- the model ----

    def switch_model(self, name: str) -> None:
        """Another model, same conversation; the old one where the new one fails."""
        self._used = None
        self.model.switch(name)

    def think(self, choice: Choice) -> None:
        """Raises UsageError where the template has no switch."""
        self.model.think(choice)
        self._used = None

    # ---- the session ----

    def keep(self, name: str | None = None) -> None:
        """Begins a session, with what has been said already. Raises UsageError, SessionError or OutputError."""
        session = self.sessions.new(self.model.lasting_name, name)
        if self.conversation.messages:
            self._write_all(session)
        self.session = session

    def resume(self, name: str, *, keeps: bool = True) -> None:
        """Goes on with a saved session, in place of the present one. keeps: in its file; without, that stays as it is. Raises
        SessionError, and nothing has changed."""
        session, events = self.sessions.open(name)
        try:
            conversation = Conversation.replay(events)
        except NanovllmError:
            session.close()
            raise
        self.end_session()
        self.session, self.conversation = session, conversation
        if not keeps:
            session.close()
            self.session = None
        conversation.record = self._record
        self._start_over()
        last = conversation.last
        if last is not None and last.role == "user":
            question = conversation.undo()
            self._draft, again = question.content, "here it is again"
            if self.edits and question.images:
                self.images = [*question.images, *self.images]
                again += f", with {counted_images(question.images)}"
            self.display.warn("the last message has had no answer" + (f": {again}" if self.edits else ", and is left out"))
        elif self._waits_for_an_answer:
            self.display.warn("the last answer has called tools, and waits: /continue goes on")
        self.resumed_model = last_model(events) or None
        self.model.kept = kept_ids(events)
        self._kv_path = session.kv_path
        if self.model.is_open:
            self.load_kv()

    def load_kv(self) -> None:
        """What the model had read of the session, if it was kept."""
        if self._kv_path is not None:
            self.model.load_kv(self._kv_path)

    def end_session(self) -> None:
        """Keeps the KV where that is wanted, and lets the session go."""
        session, self.session = self.session, None
        if session is None:
            return
        try:
            if self.model.settings.saves_kv and session.exists and self.model.is_open and self.model.kept:
                ids = self.model.save_kv(session.kv_path)
                session.append({"event": "kv", "model": self.model.lasting_name, "ids": list(ids)})
        except NanovllmError as error:
            self.display.fail(f"the KV cache was not kept: {error.message}", error.hint)
        finally:
            session.close()
            self.sessions.entries()

    def close(self) -> None:
        self.end_session()
        self.model.close()

    def _record(self, event: Event) -> None:
        """Into the session, which begins with the first message. Where that fails, the conversation goes on without one."""
        session = self.session
        if session is None or not (session.exists or event["event"] == "message"):
            return
        try:
            if not session.exists:
                self._write_all(session)
            session.append(event)
        except NanovllmError as error:
            session.close()
            self.session = None
            self.failure = self.failure or error
            hint = "/save keeps all of it once that is mended" if self.interactive else "--no-save asks for nothing to be kept"
            self.display.fail(f"nothing is kept from here on: {error.message}", hint)

    def _write_all(self, session: Session) -> None:
        """What has been said already. Where that fails, the session is let go."""
        try:
            for event in self.conversation.events():
                session.append(event)
        except NanovllmError:
            session.close()
            raise

    # ---- the conversation ----

    def run(self, reader: Reader, first: Sequence[str] = ()) -> None:
        """Messages from `first`, then from the reader, until it ends or somebody leaves."""
        waiting = list(first)
        if self.model.settings.tools is not None:
            self.model.settings.tools.ask = reader.decide
        while True:
            is_read = False
            try:
                text = waiting.pop(0) if waiting else reader.read(self._take_draft())
                is_read, self._leaves_next = True, False
                self.handle(text)
            except (EOFError, Leave):
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                signals.forgive()
                if not is_read and self._leaves_next:
                    return
                if not is_read:
                    self._edits_last, self._leaves_next = False, True
                    self.display.say(LEAVING_HINT)
            except NanovllmError as error:
                signals.forgive()
                signals.check()  # what a request to end has broken, such as a terminal that was closed, is no failure
                self.failure = self.failure or error
                self.display.fail(error.message, error.hint)
                if not self.model.is_open:  # one could not be loaded, nor the one before it again
                    self.lost = error
                    return

    def handle(self, text: str) -> None:
        """A message, or a command. Raises NanovllmError, and KeyboardInterrupt where an answer was stopped."""
        from nanovllm_cli.chat import commands

        if not text.strip():
            return
        if text.startswith("/") and not text.startswith("//"):
            commands.run(self, text)
        else:
            self.ask(text[1:] if text.startswith("//") else text)

    def attach(self, url: str, name: str) -> int | None:
        """An image, a sound or a video, as a data URL, goes with the next message. Returns its tokens, None where nobody knows.
        Raises UsageError for one that can't be read, or where the model reads none."""
        model, kind = self.model, kind_of(url)
        does = {IMAGES: model.reads_images, SOUNDS: model.hears, VIDEOS: model.sees_videos}[kind]
        if does is False:
            raise UsageError(f"{model.name} {LACKS[kind]}", "/model NAME takes another model")
        tokens, limit = self.model.tokens_of_image(url, name), self.model.limit
        if tokens is not None and limit is not None and tokens >= limit:
            raise UsageError(f"{name} has {tokens} tokens, the context holds {limit}")
        self.images.append(url)
        return tokens

    def ask(self, text: str) -> None:
        """Sends a message and shows the answer. What stops or fails before that begins leaves the message as a draft, with what
        was to go with it; from a pipe nobody sends it again."""
        edits, self._edits_last = self._edits_last, False
        content = "\n\n".join([*self.attachments, text])
        images = tuple(self.images)
        before = self.conversation.messages
        if edits and self.conversation.question is not None:
            images = self.conversation.question.images + images
            before = before[: before.index(self.conversation.question)]
        self._draft, self._edits_last = text, edits

        def sent() -> None:
            if edits:
                self.conversation.undo()
            self.conversation.ask(content, images)
            self._drop_draft()

        messages = [*before, Message(0, None, "user", content, images=images)]
        try:
            self._answer(messages, sent)
        finally:
            if not self.interactive:
                self._drop_draft()

    def regenerate(self) -> None:
        """Another answer to the last message, which is not edited any more."""
        self._edits_last = False
        messages = self.conversation.messages
        messages = messages[: messages.index(self.conversation.asked()) + 1]
        self._answer(messages, self.conversation.back_to_question)

    def go_on(self) -> None:
        """More of the last answer, whose question is not edited any more; behind calls of tools, those that were not run and what
        follows from them."""
        self._edits_last = False
        tools = self.model.settings.tools
        if self._waits_for_an_answer:
            if tools is not None:
                tools.run_all(self.conversation.open_calls, self._take)
            self._answer(self.conversation.messages, lambda: None)
            return
        begun = self.conversation.answered()
        self._answer(self.conversation.messages, self.conversation.before_answer, begun)

    def edit(self, text: str) -> None:
        """Replaces the last message: by `text`, or by what comes of offering it to be changed."""
        question = self.conversation.asked()
        if not text and not self.edits:
            raise UsageError("there is no line editor here", "write the new message behind it: /edit TEXT")
        self._edits_last = True
        if text:
            self.ask(text)
        else:
            self._draft = question.content

    def undo(self) -> Message:
        question = self.conversation.undo()
        self._forget()
        return question

    def clear(self) -> None:
        self.conversation.clear()
        self._start_over()

    def tell(self, system: str | None) -> None:
        self.conversation.tell(system)
        self._used = None

    # ---- what is left of the context ----

    @property
    def context_used(self) -> int | None:
        """Tokens that the conversation has in the template's words; None where a server has not said."""
        if self._used is None:
            self._used = self.model.count(self.conversation.system, self.conversation.messages)
        return self._used

    def status(self) -> Status:
        return Status(
            model=self.model.name,
            context_used=self.context_used,
            context_size=self.model.limit,
            tokens_per_second=self.statistics.answer_tokens_per_second if self.statistics is not None else None,
            memory_bytes=self.model.memory_bytes,
            session=self.session.name if self.session is not None and self.session.exists else None,
        )

    # ---- inside ----

    def _answer(
        self, messages: Sequence[Message], sent: Callable[[], object], begun: Message | None = None
    ) -> None:
        """An answer, and where it calls tools, what follows from their results, until one calls none. Else as `_stream`."""

        def called(is_there: bool) -> list[Call]:
            return self.conversation.open_calls if is_there else []

        def again() -> list[Call]:
            return called(self._stream(self.conversation.messages, lambda: None))

        calls, tools = called(self._stream(messages, sent, begun)), self.model.settings.tools
        if tools is not None:
            tools.follow(calls, self._take, again, "/continue lets it go on")

    @property
    def _waits_for_an_answer(self) -> bool:
        """Whether tools stand at the end: they are to be run, or have been, and the answer to that is to come."""
        last = self.conversation.last
        return last is not None and (bool(last.calls) or last.role == "tool")

    def _take(self, call: Call, result: Outcome) -> None:
        """What Ctrl-C stopped has none, which the model is told when it is asked again."""
        self.conversation.take_result(call, *result)
        self._used = None

    def _stream(
        self, messages: Sequence[Message], sent: Callable[[], object], begun: Message | None = None
    ) -> bool:
        """Streams an answer and keeps it. `sent` is called with its first token; where none comes, nothing has changed, and it is
        False. begun: the last message, an answer that this one goes on with."""
        answering, num_dropped = self.model.answer(self.conversation.system, messages, goes_on=begun is not None)
        self._say_what_was_dropped(num_dropped)
        turn = Turn(
            answering,
            self.display,
            shows_reasoning=self.model.settings.shows_reasoning,
            limit=self.model.limit,
            on_begin=sent,
        )
        try:
            turn.run()
        finally:
            turn.flush()
            try:
                if turn.began:
                    with signals.held():
                        self._keep(turn, begun)
            finally:
                turn.end(self._remark(turn))
        turn.answer.check("/regen asks for another one")
        self._warn_when_nearly_full()
        return turn.began

    def _keep(self, turn: Turn, begun: Message | None) -> None:
        content, reasoning = turn.answer.content, turn.answer.reasoning
        if begun is not None:
            content, reasoning = begun.content + content, begun.reasoning + reasoning
        self.model.keep(turn.answering)
        self._used = turn.used
        self.statistics = turn.answering.statistics(turn.ended)
        self.num_answers += 1
        self.num_answer_tokens += self.statistics.answer_tokens or 0
        calls = calls_of(turn.answer, is_whole=turn.cut is None)
        self.conversation.answer(content, reasoning=reasoning, cut=turn.cut, model=self.model.lasting_name, calls=calls)
        logger.info("%s", self.statistics.line())

    def _remark(self, turn: Turn) -> str | None:
        """Why the answer is not whole, and what can be done about it."""
        if turn.cut == "interrupted":
            is_sent = turn.began or self._waits_for_an_answer
            return "stopped; /continue goes on" if is_sent else "stopped: the message was not sent"
        if turn.cut == "length":
            where = f"at {turn.answer.num_tokens} tokens" if turn.answer.num_tokens is not None else "by the limit"
            return f"cut off {where}; /continue goes on, /set predict N changes the limit"
        if turn.cut == "repetition":
            return "cut off where it repeated itself; /regen has another try, /set max-repeats 0 lets it"
        if turn.cut == "context":
            return f"cut off: the context of {self.model.limit} tokens is full"
        return None

    def _say_what_was_dropped(self, num_dropped: int) -> None:
        if num_dropped > self._num_dropped:
            here = "are left out" if num_dropped > 1 else "is left out"
            self.display.warn(f"the context is full: of the conversation's beginning {counted(num_dropped, 'message')} {here}")
        self._num_dropped = num_dropped

    def _warn_when_nearly_full(self) -> None:
        used, size = self.context_used, self.model.limit
        if used is None or size is None or used < NEARLY_FULL * size:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            advice = "the oldest turns will be left out" if self.model.settings.shifts else OVERFLOW_HINT
            self.display.warn(f"{used / size:.0%} of the context is used ({used} of {size} tokens): {advice}")

    def _drop_draft(self) -> None:
        """With what was to go with it."""
        self._draft, self._edits_last = "", False
        self.attachments.clear()
        self.images.clear()

    def _take_draft(self) -> str:
        draft, self._draft = self._draft, ""
        return draft

    def _start_over(self) -> None:
        """Another conversation."""
        self._forget()
        if self.model.settings.tools is not None:
            self.model.settings.tools.forget()

    def _forget(self) -> None:
        """Other messages than a moment ago: what was known of them is to be found out again."""
        self._used, self._num_dropped, self._edits_last = None, 0, False
        if self.model.is_open:
            self.model.start_over()
