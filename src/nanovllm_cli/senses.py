"""What a model sees of a message's images and videos, or hears of its sounds: one door, for whoever has a model and messages.

Nothing here imports torch, so that a server's process for HTTP may read them, nor numpy before there is a sound.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.images import reading as images
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, VIDEOS, ImagePart
from nanovllm_cli.vision_spec import Clip, Picture, Video


def kinds_of(senses: Senses | None) -> list[str]:
    """Which parts of messages they are for."""
    if senses is None:
        return []
    video = None if senses.vision is None else senses.vision.video
    senses_of = (IMAGES, senses.vision), (SOUNDS, senses.hearing), (VIDEOS, video)
    return [kind for kind, sense in senses_of if sense is not None]


def read_parts(parts: Iterable[ImagePart], senses: Senses | None) -> list[Picture | Clip | Video]:
    """Raises UsageError for what is none, or damaged, UnsupportedError for an address or a kind that is not read."""
    return [] if senses is None else [read_part(part, senses)[0] for part in parts]


def read_part(part: ImagePart, senses: Senses, salt: str | None = None) -> tuple[Picture | Clip | Video, int]:
    """With the bytes that it takes: of an image's pixels, as it was sent or as it is shown, whichever are more, of a video's
    frames, as they are shown, or of a sound's spectrogram. salt: see `images.reading.read_sent`."""
    if part.kind == SOUNDS:
        from nanovllm_cli.sounds import reading as sounds

        assert senses.hearing is not None
        clip = sounds.read_sent(part.url, senses.hearing, part.where, salt)
        return clip, sum(sound.num_bytes for sound in clip.images)
    assert senses.vision is not None
    if part.kind == VIDEOS:
        from nanovllm_cli.images import videos

        assert senses.vision.video is not None
        video = videos.read_sent(part.url, senses.vision.video, part.where, salt)
        return video, video.num_bytes
    picture, num_pixels = images.read_sent(part.url, senses.vision, part.where, salt)
    return picture, 3 * max(num_pixels, picture.num_pixels)
