"""A model that a server has (`chat --url`). Template, context and defaults are the server's; what it does not tell is None."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_cli.chat.model import Model, Reply, Settings
from nanovllm_cli.chat.prompt import for_template
from nanovllm_cli.cli.remote import NOT_SHOWN, RemoteAnswering, settled, waited_for
from nanovllm_cli.client.endpoint import Endpoint, ServedModel, unknown_model
from nanovllm_cli.client.wire import CHAT, chat_body
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.reasoning import thinking_variables

if TYPE_CHECKING:
    from nanovllm_cli.chat.conversation import Message
    from nanovllm_cli.cli.answering import Answering, Given, Settled
    from nanovllm_cli.cli.shared_options import Choice


class RemoteModel(Model):
    """One of a server's models at a time. It needs no loading here: to open one is to find it in the server's list."""

    def __init__(self, endpoint: Endpoint, settings: Settings) -> None:
        self.settings = settings
        self.kept: Sequence[int] = ()
        self._endpoint = endpoint
        self._served: ServedModel | None = None

    # ---- what it is ----

    @property
    def is_open(self) -> bool:
        return self._served is not None

    @property
    def name(self) -> str:
        assert self._served is not None, "open comes first"
        return self._served.id

    @property
    def limit(self) -> int | None:
        assert self._served is not None, "open comes first"
        return self._served.context_len

    def look(self, url: str) -> None:
        raise UnsupportedError(NOT_SHOWN)

    @property
    def facts(self) -> str:
        context = "" if self.limit is None else f", context {self.limit:,} tokens"
        return f"{self.name}: at {self._endpoint.server.url}{context}"

    @property
    def template(self) -> str:
        raise UsageError("the chat template is the server's, and is not told")

    # ---- changing it ----

    def open(self, name: str) -> None:
        served = {each.id: each for each in self._listed()}
        if name not in served:
            raise unknown_model(name, list(served))
        self._served = served[name]

    def think(self, choice: Choice) -> None:
        self.settings.think = choice

    def settled(self, given: Given) -> Settled:
        return settled(given)

    def names(self) -> Iterable[tuple[str, str]]:
        return [(each.id, "") for each in self._listed()]

    # ---- answering ----

    def answer(self, system: str | None, messages: Sequence[Message], *, goes_on: bool = False) -> Reply:
        if goes_on and not messages[-1].content:
            raise UsageError("the answer was cut in its reasoning", "/regen asks for another one")
        thinks = None if self.settings.think is None else self.settings.think == "on"
        body = chat_body(
            self.name,
            for_template(system, messages),
            self.settings.given,
            template_kwargs={**thinking_variables(thinks), **self.settings.kwargs},
            tells_reading=self._served is not None and self._served.tells_reading,
            tools=() if self.settings.tools is None else self.settings.tools.for_template(),
        )
        return Reply(RemoteAnswering(self._endpoint, CHAT, body))

    def keep(self, answering: Answering) -> None:
        """The server may remember it: that is its own business."""

    def start_over(self) -> None:
        """Nothing is ever left out here."""

    def count(self, system: str | None, messages: Sequence[Message]) -> int | None:
        return None if messages or system else 0

    def tokens_of(self, texts: Iterable[str]) -> None:
        return None

    def tokens_of_image(self, url: str, where: str) -> None:
        return None

    def load_kv(self, path: Path) -> None:
        """What was kept is of a model that ran here."""

    def save_kv(self, path: Path) -> Sequence[int]:
        raise UsageError("what a server has read cannot be kept here")

    def close(self) -> None:
        self._served = None

    def _listed(self) -> list[ServedModel]:
        return waited_for(self._endpoint.models())
