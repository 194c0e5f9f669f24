"""A conversation made into its prompt: its messages as the model's template wants them, its images, sounds and videos read, and
all made into tokens.

They come from anybody, and each may take seconds and a gigabyte to decode. So they are read one by one, in threads of their
own, where no text waits behind them, and the next one only while all so far are within bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from nanovllm_cli.errors import NanovllmError, PromptTooLongError, TemplateError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.senses import kinds_of, read_part
from nanovllm_cli.server.api_error import ApiError, invalid_value, too_long
from nanovllm_cli.server.ports import ChatAsked, ServedModel
from nanovllm_cli.server.reading import template_variables
from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat, strings
from nanovllm_cli.text.content_parts import IMAGES, PARTS, SOUNDS, VIDEOS, ImagePart
from nanovllm_cli.text.image_tokens import Sent
from nanovllm_cli.text.messages import template_messages, template_tools
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.vision_spec import TokenIds

_NAMES = {IMAGES: "images", SOUNDS: "sounds", VIDEOS: "videos"}
MAX_IMAGES = 64
"""Of a request, and sounds and videos."""
MAX_PIXELS = 1 << 28
"""Of all images of a request, as they were sent or as the model is shown them, whichever are more: 768 MiB, which all sounds of
one may have, too, as spectrograms."""


MOST_AT_ONCE = 8
"""Requests whose images are read in turn; others wait, so that few hold pixels that no engine has been told of."""


async def chat_prompt(
    model: ServedModel,
    asked: ChatAsked,
    salt: str | None,
    text_threads: Executor,
    image_threads: Executor,
    turns: asyncio.Semaphore,
) -> TokenIds:
    """With its images. salt: of what is remembered. turns: of MOST_AT_ONCE. Raises ApiError, and typed errors."""
    loop = asyncio.get_running_loop()
    begun = await loop.run_in_executor(text_threads, _begun, model, asked)
    if isinstance(begun, TokenIds):
        return begun
    async with turns:
        images = await _images(model, asked, begun, salt, image_threads)
    return await loop.run_in_executor(text_threads, _encoded, model, asked, begun, images)


class _Begun(NamedTuple):
    """messages, variables: as the template wants them. images: of the messages, called as the client's request has them."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    images: Sequence[ImagePart]


async def _images(
    model: ServedModel, asked: ChatAsked, begun: _Begun, salt: str | None, threads: Executor
) -> list[Sent]:
    loop = asyncio.get_running_loop()
    senses, limit = model.facts.senses, model.facts.context_len
    assert senses is not None
    images: list[Sent] = []
    num_bytes = num_tokens = 0
    for part in begun.images:
        image, taken = await loop.run_in_executor(threads, _read, part, senses, salt)
        num_bytes += taken
        num_tokens += senses.num_tokens(image)
        if num_bytes > 3 * MAX_PIXELS:
            what = f"images and frames may have {MAX_PIXELS >> 20} million pixels"
            if part.kind == SOUNDS:
                what = f"sounds may have {3 * MAX_PIXELS >> 20} MiB of spectrograms"
            raise invalid_value(f"{part.where}: a request's {what}, and with this one have more; make them smaller", part.where)
        if num_tokens >= limit:
            raise too_long(num_tokens, limit, asked.param, at_least=True)
        images.append(image)
    return images


def _begun(model: ServedModel, asked: ChatAsked) -> _Begun | TokenIds:
    """All of the prompt, where there are no images to be read."""
    if asked.draws and not model.facts.has_head:
        does = "tells classes of" if model.facts.classifies and not model.facts.ranks else "embeds or ranks"
        raise ApiError(400, f"the model {model.id!r} {does} texts, and answers nothing", code="unsupported")
    if model.facts.hearing is not None and model.facts.hearing.leads:
        told = f"the model {model.id!r} writes down what is said: use /v1/audio/transcriptions"
        raise ApiError(400, told, code="unsupported")
    if model.chat_template is None:
        raise ApiError(400, f"the model {model.id!r} has no chat template: use /v1/completions", code="unsupported")
    kinds = kinds_of(model.facts.senses)
    _check_images(asked.image_paths, model)
    variables, paths = _variables(model, asked), _image_paths(asked, kinds or [IMAGES])
    if not kinds:
        _check_images(list(paths.values()), model)
    elif len(paths) > MAX_IMAGES:
        further, what = list(paths.values())[MAX_IMAGES], " and ".join(_NAMES[kind] for kind in kinds)
        told = f"{further}: a request may have {MAX_IMAGES} {what}, and this one has {len(paths)}"
        raise invalid_value(told, further)
    images: list[ImagePart] = []
    try:
        template, known = _template_of(model, asked)
        tools = asked.tools if asked.tool_choice != "none" else ()
        messages = template_messages(asked.messages, template, images, kinds, tools=tools, known=known)
    except NanovllmError as error:
        raise ApiError.of(error, asked.param) from error
    model.check_length(sum(map(len, strings([*messages, *asked.tools]))), asked.param)
    begun = _Begun(messages, variables, [part._replace(where=paths[part.where]) for part in images])
    return begun if images else _encoded(model, asked, begun, ())


def _encoded(model: ServedModel, asked: ChatAsked, begun: _Begun, images: Sequence[Sent]) -> TokenIds:
    template, known = _template_of(model, asked)
    try:
        return encode_chat(
            model.tokenizer,
            template,
            begun.messages,
            tools=template_tools(asked.tools, template, known) if asked.tools and asked.tool_choice != "none" else None,
            add_generation_prompt=asked.opens and not asked.continues,
            continue_final_message=asked.continues,
            most_tokens=model.facts.context_len,
            images=images,
            senses=model.facts.senses,
            variables=begun.variables,
        )
    except PromptTooLongError as error:
        raise too_long(error.prompt_len, error.limit, asked.param, at_least=True) from error
    except TemplateError as error:
        raise ApiError.of(error, asked.param) from error


def _template_of(model: ServedModel, asked: ChatAsked) -> tuple[ChatTemplate, ToolFormat | None]:
    """The template of this request, and how its model calls tools."""
    assert model.chat_template is not None
    tools = asked.tools if asked.tool_choice != "none" else None
    return model.chat_template.for_tools(tools), None if model.format is None else model.format.tools


def _variables(model: ServedModel, asked: ChatAsked) -> dict[str, Any]:
    """Of the template, as the request has them; else as the server does."""
    variables = template_variables(asked.template_kwargs)
    if asked.thinking is not None:
        if model.thinking_switch is not None:
            variables.setdefault(model.thinking_switch, asked.thinking)
        elif asked.thinking and (model.format is None or not model.format.thinks):
            raise ApiError(400, f"the model {model.id!r} does not reason aloud", code="unsupported")
    return {**model.chat_defaults.variables, **variables}


def _check_images(paths: Sequence[str], model: ServedModel) -> None:
    """Before any of them is looked at."""
    if paths and model.facts.vision is None:
        told = f"{paths[0]}: the model {model.id!r} reads no images; send texts alone"
        raise ApiError(400, told, code="unsupported", param=paths[0])


def _image_paths(asked: ChatAsked, kinds: Sequence[str]) -> dict[str, str]:
    """Where the images of its messages are, and sounds, as `template_messages` calls that and as the client's request does, in
    order."""
    places = [
        f"messages[{number}].content[{place}]"
        for number, message in enumerate(asked.messages)
        if isinstance(content := message.get("content"), list)
        for place, part in enumerate(content)
        if isinstance(part, Mapping) and isinstance(part.get("type"), str) and any(part["type"] in PARTS[kind] for kind in kinds)
    ]
    paths = asked.image_paths if asked.sound_path is None else [asked.sound_path]
    return dict(zip(places, paths or places, strict=True))


def _read(part: ImagePart, senses: Senses, salt: str | None) -> tuple[Sent, int]:
    """See `read_part`."""
    try:
        return read_part(part, senses, salt)
    except NanovllmError as error:
        raise ApiError.of(error, part.where) from error
