"""How an encoder reads a text for a decoder to attend to (T5, BART), as plain values: a prompt is what the encoder reads.

It begins with the text's own tokens, filled up to whole blocks, which stand for the rows that the encoder makes of them and which
no layer of the decoder computes (`CrossSpec`); behind them are the tokens that the decoder begins with, and then what it writes.
So it stands where an image stands that is looked at (`leading.py`), with the same means.

Models that translate are told by tokens from which language and into which (`LanguageTokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.cross_spec import lead_of
from nanovllm_cli.vision_spec import Image, PlacedImage, Sound, TokenIds

PADDING = 0
"""A token for what fills up a block: nothing reads it."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """An encoder as far as its steps go: layers, and multiplications of one for a token."""

    num_layers: int
    token_work: int

    def layer_work(self, text: Image | Sound) -> int:
        """Of all of a text's tokens."""
        assert isinstance(text, Sound)
        return self.token_work * text.frames


@dataclass(frozen=True, slots=True)
class LanguageTokens:
    """What tells a model languages. tokens: by code, as its vocabulary has these. source: where in what is read its language
    stands, "none": nowhere. target: where that of what is written stands: "read": in front of what is read; "begun": behind what
    the decoder begins with; "instead": in the place of that."""

    tokens: tuple[tuple[str, int], ...]
    source: Literal["none", "first", "last"]
    target: Literal["read", "begun", "instead"]

    @property
    def codes(self) -> dict[str, int]:
        return dict(self.tokens)

    def placed(self, ids: Sequence[int], token: int, place: Literal["first", "last"]) -> list[int]:
        """A text with this language's token there, in the place of another's."""
        known, at = {each for _, each in self.tokens}, -1 if place == "last" else 0
        rest = list(ids)
        if rest and rest[at] in known:
            del rest[at]
        return [*rest, token] if place == "last" else [token, *rest]


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """begins: tokens that the decoder begins with. most_read, most_written: positions that encoder and decoder have, None: any.
    never: tokens that are not drawn, whatever is asked for. languages: None of a model that knows none by tokens. tells_start,
    tells_target: whether files say what the decoder begins with, and a token behind that, by which it may know into which one it
    writes."""

    tower: TextTower
    begins: tuple[int, ...]
    most_read: int | None = None
    most_written: int | None = None
    never: tuple[int, ...] = ()
    languages: LanguageTokens | None = None
    tells_start: bool = True
    tells_target: bool = False

    def num_tokens(self, num_read: int) -> int:
        """Of a prompt for a text of so many."""
        is_added = self.needs_target and self.languages is not None and self.languages.target == "begun"
        return lead_of(num_read) + len(self.begins) + is_added

    @staticmethod
    def num_begun(prompt: Sequence[int], images: Sequence[PlacedImage]) -> int:
        """Tokens of the decoder's in a prompt."""
        return len(prompt) - images[0].end

    @property
    def needs_target(self) -> bool:
        """Whether each request has to say into which language it is to be translated."""
        said = {"read": True, "begun": self.tells_target, "instead": self.tells_start}
        return self.languages is not None and not said[self.languages.target]

    def prompt(self, ids: Sequence[int], source: int | None = None, target: int | None = None) -> TokenIds:
        """For a text of these tokens. source, target: tokens of its language, and of that of the answer, where they are told."""
        begins = self.begins
        if self.languages is not None and source is not None and self.languages.source != "none":
            ids = self.languages.placed(ids, source, self.languages.source)
        match target, self.languages:
            case int(token), LanguageTokens(target="read"):
                ids = self.languages.placed(ids, token, "first")
            case int(token), LanguageTokens(target="instead"):
                begins = (token,)
            case int(token), LanguageTokens():
                begins = (begins[0], token)
        lead = lead_of(len(ids))
        placed = PlacedImage(Sound.of_text(ids), 0, 1, len(ids), behind=lead - len(ids), leads=True, shown=lead)
        return TokenIds([*ids, *[PADDING] * placed.behind, *begins], (placed,))
