"""Where images, or sounds, stand in a prompt: what a chat template wrote for each becomes the tokens that the model reads in its
place."""

from __future__ import annotations

import re
import secrets
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from nanovllm_cli.errors import CheckpointError, TemplateError
from nanovllm_cli.hearing_spec import HearingSpec, Sense
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import Clip, ImageTokens, Picture, PlacedImage, TokenIds

Sent = Picture | Clip


def in_vocabulary(vision: Sense, tokenizer: Tokenizer) -> Sense:
    """With a token that stands for an image and that the tokenizer has, where there is one."""
    tokens = vision.tokens
    if tokens.token in tokenizer.control_tokens or tokens.instead not in tokenizer.control_tokens:
        return vision
    return replace(vision, tokens=replace(tokens, token=tokens.instead))


def sounds_in_texts(messages: Sequence[Any], hearing: HearingSpec) -> tuple[list[Any], ImageTokens]:
    """Messages for a template that knows nothing of sounds: their parts are one text each, with a mark that nobody can have
    written where a sound is, and which tokens that becomes."""
    return _in_texts(messages, "audio", hearing.tokens, *hearing.around)


def images_in_texts(messages: Sequence[Any], tokens: ImageTokens) -> tuple[list[Any], ImageTokens]:
    """The same of images."""
    assert tokens.line is not None
    return _in_texts(messages, "image", tokens, tokens.before, tokens.after + tokens.line)


def _in_texts(messages: Sequence[Any], kind: str, tokens: ImageTokens, before: str, after: str) -> tuple[list[Any], ImageTokens]:
    mark = f"\u241f{secrets.token_hex(16)}"
    told = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            texts = [mark if part.get("type") == kind else str(part.get("text", "")) for part in content]
            message = {**message, "content": "".join(texts)}
        told.append(message)
    return told, replace(tokens, marker=mark, before=before, after=after)


def with_marks(text: str, plain_at: Collection[int], tokens: ImageTokens, pictures: Sequence[Sent]) -> tuple[str, set[int]]:
    """A rendered conversation with one `token` for each of the pictures' images, and what surrounds it; and `plain_at` in it,
    where a control token is a text's own. TemplateError where the template wrote fewer images than pictures, or more."""
    count = len(pictures)
    marks = [match.start() for match in re.finditer(re.escape(tokens.marker), text) if match.start() not in plain_at]
    if len(marks) != count:
        raise TemplateError(
            f"the chat template writes {len(marks)} places ({tokens.marker}) for {count} {_name_of(pictures)}",
            "use the model's own template" if len(marks) < count else None,
        )
    instead = [tokens.text(picture, number) for number, picture in enumerate(pictures)]
    further = list(accumulate((len(becomes) - len(tokens.marker) for becomes in instead), initial=0))
    moved = {at + further[bisect(marks, at)] for at in plain_at}
    pieces, start = [], 0
    for place, becomes in zip(marks, instead, strict=True):
        pieces += [text[start:place], becomes]
        start = place + len(tokens.marker)
    return "".join([*pieces, text[start:]]), moved


def with_images(ids: Sequence[int], tokenizer: Tokenizer, vision: Sense, pictures: Sequence[Sent]) -> TokenIds:
    """Ids with one `token` for each image of the pictures, as they are with all that stand for it. CheckpointError where the
    tokenizer lacks what images are made of."""
    tokens, images = vision.tokens, [image for picture in pictures for image in picture.images]
    part = _id(tokenizer, tokens.token)
    line_end, last_end = (_id(tokenizer, text) if text else part for text in (tokens.line_end, tokens.last_end))
    if (count := list(ids).count(part)) != len(images):
        raise TemplateError(f"the chat template writes {count} {tokens.token} for {len(images)} {_name_of(pictures)}")
    left = iter(images)
    out: list[int] = []
    placed: list[PlacedImage] = []
    for token_id in ids:
        if token_id != part:
            out.append(token_id)
            continue
        placed.append(vision.placed(next(left), len(out), len(placed)))
        line = [part] * placed[-1].columns
        if not placed[-1].ends_lines:
            out += [part] * placed[-1].num_tokens
        else:
            out += [*line, line_end] * placed[-1].rows
            out[-1] = last_end
    return TokenIds(out, placed)


def _name_of(sent: Sequence[Sent]) -> str:
    return "sounds" if any(isinstance(each, Clip) for each in sent) else "images"


def image_token(tokenizer: Tokenizer, vision: Sense) -> int | None:
    """The token that stands for images and nothing else, where there is one."""
    if vision.tokens.token == vision.tokens.instead:
        return None
    return tokenizer.control_tokens.get(vision.tokens.token)


def _id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.control_tokens.get(text)
    if found is None:
        raise CheckpointError(f"the tokenizer has no control token {text}, which images are made of")
    return found
