"""Where images, or sounds, stand in a prompt: what a chat template wrote for each becomes the tokens that the model reads in its
place."""

from __future__ import annotations

import re
import secrets
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from nanovllm_cli.canvas_spec import Canvas, Markers
from nanovllm_cli.errors import CheckpointError, TemplateError
from nanovllm_cli.hearing_spec import HearingSpec, Sense, Senses
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import Clip, Image, ImageTokens, Picture, PlacedImage, Sound, TokenIds, VisionSpec

Sent = Picture | Clip
Marks = Mapping[bool, ImageTokens]
"""What a template writes for an image, and for a sound (True)."""


def in_vocabulary(senses: Senses, tokenizer: Tokenizer) -> Senses:
    """With a token that stands for an image and that the tokenizer has, where there is one."""

    def known(sense: Sense) -> Sense:
        tokens = sense.tokens
        if tokens.token in tokenizer.control_tokens or tokens.instead not in tokenizer.control_tokens:
            return sense
        return replace(sense, tokens=replace(tokens, token=tokens.instead))

    return Senses.of(*map(known, senses.all))


def asked_words(senses: Senses | None) -> list[str]:
    """Control tokens that somebody's text may name; see `ImageTokens`."""
    return [] if senses is None else [word for sense in senses.all for word in sense.tokens.asked]


def asked_ids(senses: Senses | None, tokenizer: Tokenizer) -> list[int]:
    """Of these, which answers show."""
    ids = map(tokenizer.token_to_id, asked_words(senses))
    return [number for number in ids if number is not None]


def in_template(
    messages: Sequence[Any], source: str, senses: Senses, sent: Sequence[Sent]
) -> tuple[list[Any], Marks]:
    """Messages as a template of this source takes what was sent in them, and what it is to write for each, by whether it is a
    sound."""
    told, marks = list(messages), dict[bool, ImageTokens]()
    for sense in senses.all:
        is_sound, tokens = isinstance(sense, HearingSpec), sense.tokens
        if not any(isinstance(each, Clip) == is_sound for each in sent):
            continue
        if isinstance(sense, HearingSpec) and "audio" not in source.lower():
            told, tokens = _in_texts(told, "audio", tokens, *sense.around)
        elif tokens.line is not None and tokens.marker not in source:
            told, tokens = _in_texts(told, "image", tokens, tokens.before, tokens.after + tokens.line)
        marks[is_sound] = tokens
    return told, marks


def _in_texts(messages: Sequence[Any], kind: str, tokens: ImageTokens, before: str, after: str) -> tuple[list[Any], ImageTokens]:
    """Messages for a template that knows nothing of images, or of sounds: their parts are one text each, with a mark that nobody
    can have written where one is, and which tokens that becomes."""
    mark = f"\u241f{secrets.token_hex(16)}"
    told = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = [{"type": "text", "text": mark} if part.get("type") == kind else part for part in content]
            is_text = all(part.get("type") == "text" for part in parts)
            message = {**message, "content": "".join(str(part.get("text", "")) for part in parts) if is_text else parts}
        told.append(message)
    return told, replace(tokens, marker=mark, before=before, after=after)


def with_marks(text: str, plain_at: Collection[int], marks: Marks, sent: Sequence[Sent]) -> tuple[str, set[int]]:
    """A rendered conversation with one `token` for each of the pictures' images, or the clips' pieces, and what surrounds it; and
    `plain_at` in it, where a control token is a text's own. TemplateError where the template wrote fewer of them than were sent,
    or more."""
    found: list[tuple[int, str, str]] = []  # where a mark begins, itself, and what it becomes
    for is_sound, tokens in marks.items():
        own = [each for each in sent if isinstance(each, Clip) == is_sound]
        places, mark = _places(text, plain_at, tokens, len(own))
        if len(places) != len(own):
            raise TemplateError(
                f"the chat template writes {len(places)} places ({tokens.marker}) for {len(own)} {_NAMES[is_sound]}",
                "use the model's own template" if len(places) < len(own) else None,
            )
        found += [(place, mark, tokens.text(each, i)) for i, (place, each) in enumerate(zip(places, own, strict=True))]
    found.sort()
    further = list(accumulate((len(becomes) - len(mark) for _, mark, becomes in found), initial=0))
    begins = [place for place, _, _ in found]
    moved = {at + further[bisect(begins, at)] for at in plain_at}
    pieces, start = [], 0
    for place, mark, becomes in found:
        pieces += [text[start:place], becomes]
        start = place + len(mark)
    return "".join([*pieces, text[start:]]), moved


def _places(text: str, plain_at: Collection[int], tokens: ImageTokens, count: int) -> tuple[list[int], str]:
    """Where a template has written its mark, and that; as often as tokens stand for an image, if so it has for all of so many."""
    mark = tokens.marker
    places = [match.start() for match in re.finditer(re.escape(mark), text) if match.start() not in plain_at]
    firsts, long = places[:: tokens.often], mark * tokens.often
    if len(places) == count * tokens.often and all(text.startswith(long, place) for place in firsts):
        return firsts, long
    return places, mark


def with_images(ids: Sequence[int], tokenizer: Tokenizer, senses: Senses, sent: Sequence[Sent]) -> TokenIds:
    """Ids with one `token` for each image of what was sent, or piece of a sound, as they are with all that stand for it.
    CheckpointError where the tokenizer lacks what images are made of."""
    left: dict[int, _Left] = {}
    for sense in senses.all:
        is_sound, tokens = isinstance(sense, HearingSpec), sense.tokens
        images = [image for each in sent if isinstance(each, Clip) == is_sound for image in each.images]
        if not images:
            continue
        part = _id(tokenizer, tokens.token)
        ends = tuple(_id(tokenizer, text) if text else part for text in (tokens.line_end, tokens.last_end))
        if (count := list(ids).count(part)) != len(images):
            raise TemplateError(f"the chat template writes {count} {tokens.token} for {len(images)} {_NAMES[is_sound]}")
        left[part] = _Left(sense, iter(images), *ends)
    out: list[int] = []
    placed: list[PlacedImage] = []
    for token_id in ids:
        if token_id not in left:
            out.append(token_id)
            continue
        sense, images_left, line_end, last_end = left[token_id]
        image = next(images_left)
        before = sum(isinstance(each.image, Sound) == isinstance(image, Sound) for each in placed)
        placed.append(sense.placed(image, len(out), before))
        line = [token_id] * placed[-1].columns
        if not placed[-1].ends_lines:
            out += [token_id] * placed[-1].num_tokens
            for place, mark in _marks(placed[-1], sense):
                out[place] = _id(tokenizer, mark)
        else:
            out += [*line, line_end] * placed[-1].rows
            out[-1] = last_end
    if placed and senses.vision is not None and senses.vision.prefix:  # all of the prompt belongs to its image
        placed[-1] = placed[-1]._replace(behind=len(out) - placed[-1].end)
    if senses.vision is not None and senses.vision.markers is not None:
        placed = list(on_canvases(out, placed, [each for each in sent if isinstance(each, Picture)], senses.vision.markers))
    return TokenIds(out, placed)


def _marks(placed: PlacedImage, sense: Sense) -> list[tuple[int, str]]:
    """Tokens between an image's squares that lie apart, and where they are in a prompt."""
    image, kinds = placed.image, sense.tokens.marks
    if not kinds or not isinstance(image, Image) or image.mosaic is None:
        return []
    side = image.width // sense.tower.cell if isinstance(sense, VisionSpec) else 0
    return [(placed.start + place, kinds[kind]) for place, kind in image.mosaic.marks(side)]


def on_canvases(
    ids: list[int], placed: Sequence[PlacedImage], pictures: Sequence[Picture], markers: Markers
) -> Iterator[PlacedImage]:
    """With the tokens in front of pieces and behind them, and where they lie. CheckpointError for another tokenizer's markers."""
    first = 0
    for picture in pictures:
        pieces = placed[first : first + len(picture.images)]
        first += len(pieces)
        tall, wide = pieces[-1].rows * max(1, picture.rows), pieces[-1].columns * max(1, picture.columns)
        for number, piece in enumerate(pieces):
            around = markers[2:4] if number else markers[:2]
            begin, end = piece.start - 1, piece.end
            line, column = divmod(number - 1, max(1, picture.columns)) if number else (0, 0)
            is_last = number == len(pieces) - 1
            following = placed[first : first + 1] if is_last else pieces[number + 1 :]
            behind, limit = end + 1, following[0].start - 1 if following else len(ids)
            while behind < limit and ids[behind] in markers:
                behind += 1
            is_between = begin >= 0 and ids[begin] == around[0] and ids[end : end + 1] == [around[1]]
            if not is_between or (behind < limit and not is_last):
                raise CheckpointError("images are between other tokens than config.json says", "take the publisher's own folder")
            yield piece._replace(start=begin, canvas=Canvas(
                tall, wide, line * piece.rows, column * piece.columns, not number, behind - end, is_last
            ))  # fmt: skip


class _Left(NamedTuple):
    """Images that are still to be placed, or pieces of sounds, and the tokens that end their lines."""

    sense: Sense
    images: Iterator[Image | Sound]
    line_end: int
    last_end: int


_NAMES = {False: "images", True: "sounds"}


def image_token(tokenizer: Tokenizer, sense: Sense | None) -> int | None:
    """The token that stands for images and nothing else, or for sounds, where there is one."""
    if sense is None or sense.tokens.token == sense.tokens.instead:
        return None
    return tokenizer.control_tokens.get(sense.tokens.token)


def _id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.control_tokens.get(text)
    if found is None:
        raise CheckpointError(f"the tokenizer has no control token {text}, which images are made of")
    return found
