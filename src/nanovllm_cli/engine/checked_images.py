"""Whether a prompt's images and its tokens go together, before a kernel sees either."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.text.image_tokens import image_token
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import PlacedImage, TokenIds, VisionSpec


class Seeing(NamedTuple):
    """How an engine's model sees. image_token: stands for images and nothing else, so that a copy of a prompt's ids that has lost
    them is no prompt; None where there is no such token. token_work: multiplications with weights for a token of a prompt."""

    vision: VisionSpec
    image_token: int | None
    token_work: int


def seeing_of(vision: VisionSpec | None, tokenizer: Tokenizer, model: ModelSpec) -> Seeing | None:
    return None if vision is None else Seeing(vision, image_token(tokenizer, vision), model.prompt_work)


def checked_images(
    seeing: Seeing | None, given: Iterable[int], prompt: tuple[int, ...], salt: str | None
) -> tuple[PlacedImage, ...]:
    """Of TokenIds, as the model's vision has them; nobody with another salt finds what was made of them. Raises UnsupportedError,
    UsageError."""
    images = given.images if isinstance(given, TokenIds) else ()
    if seeing is None:
        if images:
            raise UnsupportedError("this model reads no images")
        return ()
    vision, image_token, _ = seeing
    if not vision.fits(images, len(prompt)):
        raise UsageError("a prompt's images are of a size that the model's vision gives, and stand in it in their order")
    there = sum(each.num_rows for each in images)
    if image_token is not None and (found := prompt.count(image_token)) != there:
        raise UsageError(f"{found} tokens of the prompt stand for images, which it has for {there}", "send them in messages")
    return images if salt is None else tuple([each.salted(salt) for each in images])
