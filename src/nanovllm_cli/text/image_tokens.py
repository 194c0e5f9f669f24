"""Where images, sounds or videos stand in a prompt: what a chat template wrote for each becomes the tokens that the model reads
in its place."""

from __future__ import annotations

import re
import secrets
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from nanovllm_cli.canvas_spec import Canvas, Markers
from nanovllm_cli.errors import CheckpointError, TemplateError
from nanovllm_cli.hearing_spec import HearingSpec, Sense, Senses
from nanovllm_cli.leading import led
from nanovllm_cli.text.content_parts import IMAGES, PART_TYPES, SOUNDS, VIDEOS
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import Clip, Image, ImageTokens, Picture, PlacedImage, Sound, TokenIds, Video, VisionSpec

Sent = Picture | Clip | Video
Marks = Mapping[str, ImageTokens]
"""What a template writes for an image, a sound and a video, by these kinds."""


def in_vocabulary(senses: Senses, tokenizer: Tokenizer) -> Senses:
    """With a token that stands for an image and that the tokenizer has, where there is one; without videos, where there is none
    for them."""

    def known(sense: Sense) -> Sense:
        tokens = sense.tokens
        if isinstance(sense, VisionSpec) and (video := sense.video) is not None:
            of_frames = _known(video.tokens, tokenizer)
            is_there = of_frames.token in tokenizer.control_tokens and video.unless not in tokenizer.control_tokens
            sense = replace(sense, video=replace(video, tokens=of_frames) if is_there else None)
        return replace(sense, tokens=_known(tokens, tokenizer))

    reading = None if senses.reading is None else replace(senses.reading, languages=tokenizer.languages)
    return Senses.of(*map(known, senses.all))._replace(reading=reading)


def _known(tokens: ImageTokens, tokenizer: Tokenizer) -> ImageTokens:
    if tokens.token in tokenizer.control_tokens or tokens.instead not in tokenizer.control_tokens:
        return tokens
    return replace(tokens, token=tokens.instead)


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
    """Messages as a template of this source takes what was sent in them, and what it is to write for each."""
    told, marks = list(messages), dict[str, ImageTokens]()
    for kind, sense, tokens in _kinds(senses):
        if kind not in map(_kind_of, sent):
            continue
        if isinstance(sense, HearingSpec):
            if "audio" not in source.lower():
                told, tokens = _in_texts(told, PART_TYPES[kind], tokens, *sense.around)
        elif (kind == VIDEOS or tokens.line is not None) and tokens.marker not in source:
            told, tokens = _in_texts(told, PART_TYPES[kind], tokens, tokens.before, tokens.after + (tokens.line or ""))
        marks[kind] = tokens
    return told, marks


def _kinds(senses: Senses) -> Iterator[tuple[str, Sense, ImageTokens]]:
    """What may be sent."""
    for sense in senses.all:
        yield SOUNDS if isinstance(sense, HearingSpec) else IMAGES, sense, sense.tokens
        if isinstance(sense, VisionSpec) and sense.video is not None:
            yield VIDEOS, sense, sense.video.tokens


def _kind_of(sent: Sent) -> str:
    return SOUNDS if isinstance(sent, Clip) else VIDEOS if isinstance(sent, Video) else IMAGES


def _in_texts(messages: Sequence[Any], kind: str, tokens: ImageTokens, before: str, after: str) -> tuple[list[Any], ImageTokens]:
    """Messages for a template that knows nothing of images, sounds or videos: their parts are one text each, with a mark that
    nobody can have written where one is, and which tokens that becomes."""
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


class Marked(NamedTuple):
    """A rendered conversation in which each of what was sent has its tokens, `sent` in the order in which it has them; plain_at:
    where a control token is a text's own."""

    text: str
    plain_at: set[int]
    sent: list[Sent]


def with_marks(text: str, plain_at: Collection[int], marks: Marks, sent: Sequence[Sent]) -> Marked:
    """With one `token` for each of the pictures' images, the clips' pieces, or the videos' images, and what surrounds it.
    TemplateError where the template wrote fewer of them than were sent, or more."""
    found: list[tuple[int, str, str, Sent]] = []  # where a mark begins, itself, what it becomes, and of what
    for kind, tokens in marks.items():
        own = [each for each in sent if _kind_of(each) == kind]
        places, mark = _places(text, plain_at, tokens, len(own))
        if len(places) != len(own):
            raise TemplateError(
                f"the chat template writes {len(places)} places ({tokens.marker}) for {len(own)} {_NAMES[kind]}",
                "use the model's own template" if len(places) < len(own) else None,
            )
        found += [(place, mark, tokens.text(each, i), each) for i, (place, each) in enumerate(zip(places, own, strict=True))]
    found.sort(key=lambda each: each[0])
    once = {tokens.marker: tokens.before for tokens in marks.values() if tokens.shares_ends}
    for i, ((before, long, *_), (place, mark, becomes, each)) in enumerate(pairwise(found), 1):
        if mark in once and before + len(long) == place:
            found[i] = place, mark, becomes.removeprefix(once[mark]), each
    further = list(accumulate((len(becomes) - len(mark) for _, mark, becomes, _ in found), initial=0))
    begins = [place for place, *_ in found]
    moved = {at + further[bisect(begins, at)] for at in plain_at}
    pieces, start = [], 0
    for place, mark, becomes, _ in found:
        pieces += [text[start:place], becomes]
        start = place + len(mark)
    return Marked("".join([*pieces, text[start:]]), moved, [each for *_, each in found])


def _places(text: str, plain_at: Collection[int], tokens: ImageTokens, count: int) -> tuple[list[int], str]:
    """Where a template has written its mark, and that; as often as tokens stand for an image, if so it has for all of so many."""
    mark = tokens.marker
    places = [match.start() for match in re.finditer(re.escape(mark), text) if match.start() not in plain_at]
    firsts, long = places[:: tokens.often], mark * tokens.often
    if len(places) == count * tokens.often and all(text.startswith(long, place) for place in firsts):
        return firsts, long
    return places, mark


def with_images(ids: Sequence[int], tokenizer: Tokenizer, senses: Senses, sent: Sequence[Sent]) -> TokenIds:
    """Ids with one `token` for each image of what was sent, or piece of a sound, as they are with all that stand for it. sent: in
    the order of the tokens. CheckpointError where the tokenizer lacks what images are made of."""
    left: dict[int, _Left] = {}
    for kind, sense, tokens in _kinds(senses):
        own = [each for each in sent if _kind_of(each) == kind]
        if own:
            part = _id(tokenizer, tokens.token)
            ends = tuple(_id(tokenizer, text) if text else part for text in (tokens.line_end, tokens.last_end))
            left.setdefault(part, _Left(sense, [], _NAMES[kind], *ends))
    tokens_of = {kind: _id(tokenizer, tokens.token) for kind, _, tokens in _kinds(senses) if kind in map(_kind_of, sent)}
    for each in sent:
        left[tokens_of[_kind_of(each)]].places.extend(_placing(each, senses))
    for part, (_, places, name, *_) in left.items():
        if (count := list(ids).count(part)) != len(places):
            told = f"the chat template writes {count} {tokenizer.id_to_token(part)} for {len(places)} {name}"
            raise TemplateError(told)
    if senses.vision is not None and senses.vision.leads:
        ((token, one),) = left.items()
        in_front = led([place(0, 0) for _, place in one.places], ids, token)
        return TokenIds([*[token] * in_front[-1].end, *ids], in_front)
    for _, places, *_ in left.values():
        places.reverse()  # to be taken from behind
    out: list[int] = []
    placed: list[PlacedImage] = []
    for token_id in ids:
        if token_id not in left:
            out.append(token_id)
            continue
        sense, places, _, line_end, last_end = left[token_id]
        image, place = places.pop()
        before = sum(isinstance(each.image, Sound) == isinstance(image, Sound) for each in placed)
        placed.append(place(len(out), before))
        line = [token_id] * placed[-1].columns
        if not placed[-1].ends_lines:
            out += [token_id] * placed[-1].num_tokens
            for at, mark in _marks(placed[-1], sense):
                out[at] = _id(tokenizer, mark)
        else:
            out += [*line, line_end] * placed[-1].rows
            out[-1] = last_end
    if placed and senses.vision is not None and senses.vision.prefix:  # all of the prompt belongs to its image
        placed[-1] = placed[-1]._replace(behind=len(out) - placed[-1].end)
    if senses.vision is not None and senses.vision.markers is not None:
        placed = list(on_canvases(out, placed, [each for each in sent if isinstance(each, Picture)], senses.vision.markers))
    return TokenIds(out, placed)


def _placing(sent: Sent, senses: Senses) -> Iterator[tuple[Image | Sound, Callable[[int, int], PlacedImage]]]:
    """Each image of what was sent, or piece of a sound, and how it is placed, from where its tokens begin and how many of its
    kind there are before."""
    sense = senses.by(sent)
    if isinstance(sent, Video):
        assert isinstance(sense, VisionSpec)
        yield from ((image, partial(_filmed, sense, sent, number)) for number, image in enumerate(sent.images))
    else:
        images: Sequence[Image | Sound] = sent.images
        yield from ((image, partial(sense.placed, image)) for image in images)


def _filmed(sense: VisionSpec, video: Video, number: int, start: int, before: int) -> PlacedImage:
    return sense.filmed(video, number, start)


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
    """Images that are still to be placed, or pieces of sounds, what errors call them, and the tokens that end their lines."""

    sense: Sense
    places: list[tuple[Image | Sound, Callable[[int, int], PlacedImage]]]
    name: str
    line_end: int
    last_end: int


_NAMES = {IMAGES: "images", SOUNDS: "sounds", VIDEOS: "videos"}


def image_token(tokenizer: Tokenizer, sense: Sense | None) -> int | None:
    """The token that stands for images and nothing else, or for sounds, where there is one."""
    if sense is None or sense.tokens.token == sense.tokens.instead:
        return None
    return tokenizer.control_tokens.get(sense.tokens.token)


def video_token(tokenizer: Tokenizer, vision: VisionSpec | None) -> int | None:
    """The same for videos, whose frames may have that of images."""
    if vision is None or vision.video is None or vision.video.tokens.token == vision.video.tokens.instead:
        return None
    return tokenizer.control_tokens.get(vision.video.tokens.token)


def _id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.control_tokens.get(text)
    if found is None:
        raise CheckpointError(f"the tokenizer has no control token {text}, which images are made of")
    return found
