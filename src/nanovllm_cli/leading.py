"""Images that lie in front of a prompt instead of in it, for layers that look at them (`LookSpec`): which tokens in front of a
text stand for the rows that a tower makes of each, and what of these a token sees.

In the text a token of its own stands for each image. Tokens see the last image in front of them, that token being the first that
does, and with it those whose tokens follow each other up to there, as Llama 3.2 was trained and as transformers' MllamaProcessor
has it. Those in front of the first image see none. Images that are seen together lie together, as whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_cli.cross_spec import lead_of
from nanovllm_cli.vision_spec import PlacedImage


class Glance(NamedTuple):
    """From the token `start` of a sequence on, up to the next glance, tokens see `num_rows` rows, for which those from `first` on
    stand."""

    start: int
    first: int
    num_rows: int


class Lead(NamedTuple):
    """num_tokens: in front of a text. glances: in order."""

    num_tokens: int
    glances: tuple[Glance, ...]

    def seen_at(self, place: int) -> tuple[int, int]:
        """What the token there sees: the first of those that stand for it, and how many rows that is; 0: nothing."""
        return next(((each.first, each.num_rows) for each in reversed(self.glances) if each.start <= place), (0, 0))


def led(images: Sequence[PlacedImage], text: Sequence[int], token: int) -> tuple[PlacedImage, ...]:
    """Where images lie in front of a text, in which `token` stands for each of them: as many as there are."""
    shown = [place for place, each in enumerate(text) if each == token]
    found: list[PlacedImage] = []
    end = 0
    for i, (image, place) in enumerate(zip(images, shown, strict=True)):
        start, rows_end = end, end + image.num_rows
        end = rows_end if shown[i + 1 : i + 2] == [place + 1] else lead_of(rows_end)
        found.append(image._replace(start=start, behind=end - rows_end, shown=place))
    return tuple([image._replace(shown=place + end) for image, place in zip(found, shown, strict=True)])


def are_led(images: Sequence[PlacedImage], prompt: Sequence[int], token: int) -> bool:
    """Whether images lie in front of a prompt as `led` has it."""
    end = images[-1].end if images else 0
    lead, text = prompt[:end], prompt[end:]
    if len(lead) < end or set(lead) - {token} or list(text).count(token) != len(images):
        return False
    return tuple(images) == led([image._replace(start=0, behind=0, shown=None) for image in images], text, token)


def lead_in(images: Sequence[PlacedImage]) -> Lead | None:
    """Of a prompt with these images; None where none lies in front of it so."""
    glances: list[Glance] = []
    first, before = 0, -1
    for image in images:
        if image.shown is None:
            return None
        first = first if image.shown == before + 1 else image.start
        before = image.shown
        glances.append(Glance(image.shown, first, image.end - image.behind - first))
    return Lead(images[-1].end, tuple(glances)) if glances else None
