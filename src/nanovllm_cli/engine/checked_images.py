"""Whether a prompt's images and its tokens go together, before a kernel sees either."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.vision_spec import PlacedImage, TokenIds, VisionSpec


def checked_images(
    vision: VisionSpec | None, image_token: int | None, given: Iterable[int], prompt: tuple[int, ...], salt: str | None
) -> tuple[PlacedImage, ...]:
    """Of TokenIds, as the model's vision has them; nobody with another salt finds what was made of them. image_token: stands for
    images and nothing else, so that a copy of the ids that has lost them is no prompt. Raises UnsupportedError, UsageError."""
    images = given.images if isinstance(given, TokenIds) else ()
    if vision is None:
        if images:
            raise UnsupportedError("this model reads no images")
        return ()
    if not vision.fits(images, len(prompt)):
        raise UsageError("a prompt's images are of a size that the model's vision gives, and stand in it in their order")
    there = sum(each.num_rows for each in images)
    if image_token is not None and (found := prompt.count(image_token)) != there:
        raise UsageError(f"{found} tokens of the prompt stand for images, which it has for {there}", "send them in messages")
    return images if salt is None else tuple([each.salted(salt) for each in images])
