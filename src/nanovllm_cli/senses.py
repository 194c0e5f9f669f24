"""What a model sees of a message's images, or hears of its sounds: one door to both, for whoever has a model and messages.

Nothing here imports torch, so that a server's process for HTTP may read them, nor numpy before there is a sound.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm_cli.hearing_spec import HearingSpec, Sense
from nanovllm_cli.images import reading as images
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, ImagePart
from nanovllm_cli.vision_spec import Clip, Picture


def kind_of(sense: Sense | None) -> str | None:
    """Which parts of messages it is for."""
    return None if sense is None else SOUNDS if isinstance(sense, HearingSpec) else IMAGES


def read_parts(parts: Iterable[ImagePart], sense: Sense | None) -> list[Picture | Clip]:
    """Raises UsageError for what is none, or damaged, UnsupportedError for an address or a kind that is not read."""
    return [] if sense is None else [read_part(part, sense)[0] for part in parts]


def read_part(part: ImagePart, sense: Sense, salt: str | None = None) -> tuple[Picture | Clip, int]:
    """With the bytes that it takes: of an image's pixels, as it was sent or as it is shown, whichever are more, or of a sound's
    spectrogram. salt: see `images.reading.read_sent`."""
    if isinstance(sense, HearingSpec):
        from nanovllm_cli.sounds import reading as sounds

        clip = sounds.read_sent(part.url, sense, part.where, salt)
        return clip, sum(sound.num_bytes for sound in clip.images)
    picture, num_pixels = images.read_sent(part.url, sense, part.where, salt)
    return picture, 3 * max(num_pixels, picture.num_pixels)
