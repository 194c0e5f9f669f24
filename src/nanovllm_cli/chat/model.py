"""What a conversation needs of the model that answers: in this process (`local_model.py`) or on a server (`remote_model.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nanovllm_cli.chat.sampling import Setting, shown
from nanovllm_cli.cli.answering import Answering, Given, Settled

if TYPE_CHECKING:
    from nanovllm_cli.chat.conversation import Message
    from nanovllm_cli.chat.toolbox import Toolbox
    from nanovllm_cli.cli.shared_options import Choice


@dataclass
class Settings:
    """What a person may change on the way. given: fields of SamplingParams, over the model's own defaults."""

    given: dict[str, Any] = field(default_factory=dict)
    think: Choice | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    shows_reasoning: bool = True
    shifts: bool = False
    saves_kv: bool = False
    tools: Toolbox | None = None


class Reply(NamedTuple):
    """An answer on its way. num_dropped: messages at the beginning that found no room."""

    answering: Answering
    num_dropped: int = 0


class Model(Protocol):
    """One model at a time. `open` comes first. Methods raise NanovllmError; counts are in tokens, None where nobody knows."""

    settings: Settings
    kept: Sequence[int]
    """The tokens that it has read last, its answer included, where KV can be kept. TokenIds where some stand for images."""

    @property
    def is_open(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def lasting_name(self) -> str:
        """What it can be opened by again, from any folder."""
        return self.name

    @property
    def limit(self) -> int | None:
        """Of prompt and answer together."""

    @property
    def memory_bytes(self) -> int | None:
        """The most that it has taken."""
        return None

    @property
    def reads_images(self) -> bool | None:
        """None where nobody knows."""
        return None

    @property
    def hears(self) -> bool | None:
        """The same of sounds."""
        return None

    @property
    def sees_videos(self) -> bool | None:
        """The same of videos."""
        return None

    def look(self, url: str) -> None:
        """Whether it can be shown this data URL, as a tool's result. Raises NanovllmError where it cannot."""

    @property
    def facts(self) -> str:
        """What it is, in one line."""

    @property
    def template(self) -> str:
        """The chat template's source."""

    def open(self, name: str) -> None: ...

    def switch(self, name: str) -> None:
        """Another one in its place; where that fails, the old one stays."""
        self.open(name)

    def think(self, choice: Choice) -> None: ...

    def settled(self, given: Given) -> Settled:
        """Refuses settings that do not go together."""

    def shown(self, setting: Setting) -> str:
        """The value of a setting that counts now."""
        settled = self.settled(self.settings.given)
        is_known = settled.known is None or setting.field in settled.known
        return shown(settled.params, setting) if is_known else "the server's own"

    def names(self) -> Iterable[tuple[str, str]]:
        """Models that one could switch to, and what each is."""

    def answer(self, system: str | None, messages: Sequence[Message], *, goes_on: bool = False) -> Reply:
        """To the last message; or, with goes_on, more of it."""

    def keep(self, answering: Answering) -> None:
        """This answer is a part of the conversation."""

    def start_over(self) -> None:
        """Other messages than before: the first of them has room again."""

    def count(self, system: str | None, messages: Sequence[Message]) -> int | None:
        """What the conversation has now."""

    def tokens_of(self, texts: Iterable[str]) -> int | None: ...

    def tokens_of_image(self, url: str, where: str) -> int | None:
        """Of a data URL, of a sound, too. where: what an error calls it, such as that it is damaged."""

    def load_kv(self, path: Path) -> None: ...

    def save_kv(self, path: Path) -> Sequence[int]:
        """Keeps what it has read, and returns these tokens: those in front of the first image."""

    def close(self) -> None: ...
