"""Whether a prompt's images and its tokens go together, before a kernel sees either."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nanovllm_cli.errors import PromptTooLongError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.leading import are_led
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.reading_spec import ReadingSpec
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.image_tokens import image_token, video_token
from nanovllm_cli.text.languages import language_code
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import Image, PlacedImage, Sound, TokenIds

READ_HINT = "its encoder has positions for so many: cut the text at the ends of sentences, and send the parts"


class Seeing(NamedTuple):
    """How an engine's model sees, or hears. image_token, sound_token, video_token: stand for images, sounds and videos, and
    nothing else, so that a copy of a prompt's ids that has lost them is no prompt; None where there is no such token. token_work:
    multiplications with weights for a token of a prompt."""

    senses: Senses
    image_token: int | None
    sound_token: int | None
    token_work: int
    video_token: int | None = None


def seeing_of(senses: Senses | None, tokenizer: Tokenizer, model: ModelSpec) -> Seeing | None:
    if senses is None:
        return None
    tokens = (image_token(tokenizer, senses.vision), image_token(tokenizer, senses.hearing))
    return Seeing(senses, *tokens, model.prompt_work, video_token(tokenizer, senses.vision))


def checked_images(
    seeing: Seeing | None, given: Iterable[int], prompt: tuple[int, ...], salt: str | None
) -> tuple[PlacedImage, ...]:
    """Of TokenIds, as the model's senses have them; nobody with another salt finds what was made of them. Raises
    UnsupportedError, UsageError."""
    images = given.images if isinstance(given, TokenIds) else ()
    if seeing is None or seeing.senses.reading is not None:
        if images:
            raise UnsupportedError("this model reads no images, and hears nothing")
        return ()
    vision = seeing.senses.vision
    if vision is not None and vision.prefix:
        if len(images) != 1:
            told = f"this model reads one image with a text behind it, not {len(images)}"
            raise UsageError(told, "send an image with the text")
        if images[0].end > vision.prefix:
            told = f"the image and its text are {images[0].end} tokens, of which this model sees {vision.prefix} at a time"
            raise UsageError(told, "make the text shorter")
    if vision is not None and 0 < vision.most_images < len(images):
        told = f"this model sees {vision.most_images} image in a prompt, not {len(images)}: those of one would see each other"
        raise UnsupportedError(told, "send one, or lay several side by side in one image")
    hearing = seeing.senses.hearing
    if hearing is not None and hearing.leads and (len(images) != 1 or images[0].start):
        sound = "half a minute of sound" if hearing.padded else "a piece of a sound"
        told = f"a prompt of this model begins with {sound}, and has no other; this one has {len(images)}"
        raise UsageError(told, "run MODEL --audio FILE, nanovllm_cli.transcribe and /v1/audio/transcriptions make such prompts")
    if vision is not None and vision.leads and images and not _are_led(images, prompt, seeing.image_token):
        raise UsageError("a prompt's images lie in front of it, each with a token in the text", "send them in messages")
    if not seeing.senses.fits(images, len(prompt)):
        if seeing.senses.vision is None:
            raise UsageError("a prompt's sounds are as the model hears them, and stand in it in their order")
        raise UsageError("a prompt's images are of a size that the model's vision gives, and stand in it in their order")
    for token, what in ((seeing.image_token, "images"), (seeing.sound_token, "sounds"), (seeing.video_token, "videos")):
        there = sum(each.num_alike for each in images if token == _token_of(each, seeing))
        if token is not None and (found := prompt.count(token)) != there:
            raise UsageError(f"{found} tokens of the prompt stand for {what}, which it has for {there}", "send them in messages")
    return images if salt is None else tuple([each.salted(salt) for each in images])


def led_prompt(
    seeing: Seeing | None, given: Iterable[int], prompt: tuple[int, ...], salt: str | None, params: SamplingParams
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """A prompt and its images, checked as above; where an encoder reads it, what the decoder begins with, and the text."""
    images = checked_images(seeing, given, prompt, salt)
    reading = None if seeing is None else seeing.senses.reading
    source, target = _languages(reading, params)
    if reading is None:
        return prompt, images
    read = reading.prompt(prompt, source, target)
    _check_read(read.images[0].image, reading)
    return tuple(read), tuple([each if salt is None else each.salted(salt) for each in read.images])


def _languages(reading: ReadingSpec | None, params: SamplingParams) -> tuple[int | None, int | None]:
    """Tokens of the languages that a request names, where it does. Raises UsageError."""
    known = None if reading is None else reading.languages
    named = {"source_language": params.source_language, "target_language": params.target_language}
    if reading is None or known is None:
        if field := next((field for field, name in named.items() if name is not None), None):
            raise UsageError(f"{field} has no meaning: this model is told no languages", "leave it out")
        return None, None
    if params.source_language is not None and known.source == "none":
        raise UsageError("source_language has no meaning: this model is told only into which it translates", "leave it out")
    if params.target_language is None and reading.needs_target:
        told = f"this model translates into {len(known.tokens)} languages, and nothing says into which"
        raise UsageError(told, "target_language, or --target-language, names one: de, German, deu_Latn")
    codes = known.codes
    found = [None if name is None else codes[_code(field, name, codes)] for field, name in named.items()]
    return found[0], found[1]


def _code(field: str, name: str, codes: Iterable[str]) -> str:
    try:
        return language_code(name, list(codes))
    except UsageError as error:
        raise UsageError(f"{field}: {error.message}", error.hint) from None


def _check_read(text: Image | Sound, reading: ReadingSpec) -> None:
    """Of a text with its language's token."""
    assert isinstance(text, Sound)
    if reading.most_read is not None and text.frames > reading.most_read:
        raise PromptTooLongError(text.frames, reading.most_read, READ_HINT)


def _are_led(images: tuple[PlacedImage, ...], prompt: tuple[int, ...], token: int | None) -> bool:
    return are_led(images, prompt, prompt[0] if token is None else token)


def _token_of(placed: PlacedImage, seeing: Seeing) -> int | None:
    if isinstance(placed.image, Sound):
        return seeing.sound_token
    return seeing.image_token if placed.moment is None else seeing.video_token
