"""A model in this process that answers: loaded, exchanged for another one, asked to think or not, and what it has read last."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_cli.chat.model import Model, Reply, Settings
from nanovllm_cli.chat.prompt import Prompts, images_of
from nanovllm_cli.cli import signals
from nanovllm_cli.cli.answering import Settled
from nanovllm_cli.cli.local import LocalAnswering
from nanovllm_cli.cli.model import Prompting
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.system import peak_memory_bytes

if TYPE_CHECKING:
    from nanovllm_cli.chat.conversation import Message
    from nanovllm_cli.cli.answering import Answering, Given
    from nanovllm_cli.cli.model import Loaded
    from nanovllm_cli.cli.shared_options import Choice
    from nanovllm_cli.llm import LLM

Load = Callable[[], "Loaded"]

logger = logging.getLogger(__name__)


class LocalModel(Model):
    """One model at a time. find: what loads a name's; both may raise any NanovllmError."""

    def __init__(self, find: Callable[[str], Load], settings: Settings) -> None:
        self.settings = settings
        self._find = find
        self._load: Load | None = None
        self._loaded: Loaded | None = None
        self._prompts: Prompts | None = None
        self._kept: Sequence[int] = ()

    @property
    def is_open(self) -> bool:
        return self._loaded is not None

    @property
    def llm(self) -> LLM:
        assert self._loaded is not None, "open comes first"
        return self._loaded.llm

    @property
    def prompts(self) -> Prompts:
        assert self._prompts is not None, "open comes first"
        return self._prompts

    @property
    def name(self) -> str:
        return self.llm.name

    @property
    def limit(self) -> int:
        return self.prompts.limit

    @property
    def memory_bytes(self) -> int:
        return peak_memory_bytes()

    @property
    def reads_images(self) -> bool:
        return self.llm.vision is not None

    @property
    def hears(self) -> bool:
        return self.llm.hearing is not None

    @property
    def sees_videos(self) -> bool:
        return self.llm.vision is not None and self.llm.vision.video is not None

    def look(self, url: str) -> None:
        self.prompts.prompting.look(url)

    @property
    def facts(self) -> str:
        llm = self.llm
        return f"{llm.resolved.told_as(llm.name)}, {llm.num_parameters:,} parameters, context {self.limit:,} tokens"

    @property
    def template(self) -> str:
        assert self.llm.chat_template is not None, "it can chat"
        return self.llm.chat_template.source

    @property
    def lasting_name(self) -> str:
        name = self.llm.name
        return str(Path(name).absolute()) if Path(name).exists() else name

    @property
    def kept(self) -> Sequence[int]:
        return self._kept

    @kept.setter
    def kept(self, ids: Sequence[int]) -> None:
        self._kept = ids
        if self._prompts is not None:
            self._prompts.kept = ids

    def open(self, name: str) -> None:
        """Raises NanovllmError, and UsageError for one that cannot chat."""
        self._open(self._find(name))

    def switch(self, name: str) -> None:
        """Another one in its place. Once it is found the old one goes, and comes back where the new one fails."""
        old, new = self._load, self._find(name)
        assert old is not None, "open comes first"
        try:
            with signals.held():  # half a model answers nobody
                self.close()
                gc.unfreeze()  # what was loaded with the old one is not to outlive it
                gc.collect()
            self._open(new)
        except (Exception, KeyboardInterrupt):
            signals.forgive()
            with signals.held():  # whatever else comes: without a model there is no conversation
                self._open(old)
            raise

    def think(self, choice: Choice) -> None:
        """Raises UsageError where the template has no switch."""
        self._prompts = self._prompts_for(self.llm, choice)
        self.settings.think = choice

    def settled(self, given: Given) -> Settled:
        return Settled(self.prompts.prompting.settled_for_all(given))

    def names(self) -> Iterable[tuple[str, str]]:
        from nanovllm_cli.cli.complete import models

        return models()

    # ---- answering ----

    def answer(self, system: str | None, messages: Sequence[Message], *, goes_on: bool = False) -> Reply:
        prompt = self.prompts.going_on(system, messages) if goes_on else self.prompts.next(system, messages)
        params = self.prompts.prompting.params_for(prompt.ids, self.settings.given, goes_on=goes_on)
        return Reply(LocalAnswering(self.llm, prompt.ids, params, prompt.splitter), prompt.num_dropped)

    def keep(self, answering: Answering) -> None:
        assert isinstance(answering, LocalAnswering)
        self.kept = answering.ids

    def start_over(self) -> None:
        self.prompts.start_over()

    def count(self, system: str | None, messages: Sequence[Message]) -> int:
        return self.prompts.count(system, messages)

    def tokens_of(self, texts: Iterable[str]) -> int:
        return self.prompts.tokens_of(texts)

    def tokens_of_image(self, url: str, where: str) -> int:
        return self.prompts.tokens_of_image(url, where)

    # ---- what it has read ----

    def load_kv(self, path: Path) -> None:
        """What it had read of a conversation, if that was kept."""
        if path.is_file() and self._kept:
            found = self.llm.load_kv(path)
            logger.info("%d tokens of the conversation were read from %s", found, path)

    def save_kv(self, path: Path) -> Sequence[int]:
        """Keeps what it has read in front of the first image, whose pixels are not kept, and returns these tokens. Raises
        OutputError and DoesNotFitError."""
        images = images_of(self._kept)
        ids = self._kept[: images[0].start] if images else self._kept
        with signals.held():
            self.llm.save_kv(ids, path)
        return ids

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.llm.close()
        self._loaded = self._prompts = None
        self._kept = ()

    def _open(self, load: Load) -> None:
        if self.settings.tools is not None:
            self.settings.tools.source.check()
        loaded = load()
        try:
            self._prompts = self._prompts_for(loaded.llm, self.settings.think)
        except BaseException:
            loaded.llm.close()
            raise
        self._load, self._loaded = load, loaded

    def _prompts_for(self, llm: LLM, think: Choice | None) -> Prompts:
        tools = [] if self.settings.tools is None else self.settings.tools.for_template()
        prompting = Prompting(llm, think=think, kwargs=self.settings.kwargs, tools=tools)
        if not llm.spec.has_head:
            hint = "nanovllm embed MODEL" if llm.embedding.refusal is None else llm.embedding.refusal.hint
            raise UnsupportedError(f"{llm.name} embeds, ranks or labels texts: it answers nothing", hint)
        if not prompting.chats:
            hint = "nanovllm run goes on with plain text; --chat-template chatml gives it a format"
            if llm.spec.encoder is not None:
                hint = "its encoder reads each prompt by itself: nanovllm run MODEL TEXT, or --batch FILE for many"
            if llm.hearing is not None and llm.hearing.leads:
                hint = "it writes down what is said: nanovllm run MODEL --audio FILE"
            raise UsageError(f"{llm.name} has no chat template", hint)
        if think is not None and prompting.thinking_switch is None:
            raise UsageError(f"the template of {llm.name} has no switch for thinking")
        return Prompts(prompting, self.settings.shifts, self._kept)
