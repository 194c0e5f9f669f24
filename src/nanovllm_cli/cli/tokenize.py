"""`nanovllm tokenize`: the tokens that a text is cut into, and the text that tokens are. Only the tokenizer is opened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli import inputs, signals
from nanovllm_cli.cli.command import OUTPUT, PROMPT, expand, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import chat_template, name_and_words, named_model, template_kwargs, template_variables
from nanovllm_cli.cli.models_show import here
from nanovllm_cli.cli.options import (
    ChatTemplateChoice,
    MessageOptions,
    ModelName,
    ModelWord,
    Revision,
    SourceOptions,
    refuse_both,
)
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.question import with_system
from nanovllm_cli.cli.shared_options import SystemPrompt, TemplateKwargs, Think
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.errors import UsageError

if TYPE_CHECKING:
    from nanovllm_cli.text.tokenizer import Tokenizer

EXAMPLE = 'for example: nanovllm tokenize tiny "Once upon a time"'
TEXT = "Text"
_OF_CHATS = ("system_prompt", "think", "chat_template", "chat_template_kwargs")
_OF_TEXTS = ("no_bos", "no_parse_special")
_OF_ENCODING = ("chat", *_OF_CHATS, *_OF_TEXTS, "ids", "count", "json")
_MOST_DIGITS = 18
"""Of an id: Python takes long for numbers of many thousands."""


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """Whose tokenizer, of what, and how it is read."""

    model: ModelName = None
    revision: Revision = None
    chat_template: ChatTemplateChoice = None
    prompt: str | None = option(
        "-p", "--prompt", help="The text, as the arguments after MODEL.", panel=TEXT, metavar="TEXT", envvar=None
    )
    file: list[str] | None = option(
        "-f", "--file", help="Text from a file, before the arguments; - is standard input. Repeatable.",
        panel=TEXT, metavar="FILE", envvar=None,
    )
    no_bos: bool = option(
        "--no-bos", help="Nothing is put before or behind the text: no BOS, no EOS.", default=False, panel=TEXT, envvar=None
    )
    no_parse_special: bool = option(
        "--no-parse-special",
        help="Control tokens written in the text, such as <|im_end|>, are text like any other. Without this they are what they "
        "name, as run --raw takes them.",
        default=False, panel=TEXT, envvar=None,
    )
    decode: bool = option(
        "--decode", help="The other way round: what is given are ids, 1 2 3 or [1, 2, 3]; their text comes out, byte for byte.",
        default=False, panel=TEXT, envvar=None,
    )
    chat: bool = option(
        "--chat", help="What the model is given where run is given the text: a user's message in the chat template.",
        default=False, panel=PROMPT, envvar=None,
    )
    system_prompt: SystemPrompt = None
    think: Think = None
    chat_template_kwargs: TemplateKwargs = None
    ids: bool = option("--ids", help="The ids alone, on a line: [1, 2, 3].", default=False, panel=OUTPUT, envvar=None)
    count: bool = option("--count", help="How many there are, and nothing else.", default=False, panel=OUTPUT, envvar=None)
    json: bool = option(
        "--json", help="One JSON object: model, ids, pieces (text, or bytes where a token is none by itself), count.",
        default=False, panel=OUTPUT,
    )  # fmt: skip


@expand
def tokenize(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="The text; standard input, if any, goes before it.")
    ] = None,
    options: TokenizeOptions,
    messages: MessageOptions,
) -> None:
    """Show the tokens of a text, or the text of tokens.

    A line is a token: its id, and its text, or its bytes where it is no whole character. Texts are cut as they are, the newline
    at the end of a file or of standard input too, with nothing between them; with --chat they are put together as run does.
    Only the tokenizer is read, of files that are on this machine; no weight is loaded and nothing is downloaded.
    """
    screen = screen_for(messages)
    _check_together(ctx, options)
    kwargs = template_kwargs(ctx, options.chat_template_kwargs)
    name, spoken = name_and_words(SourceOptions(options.model), model_word, words or [])
    name = named_model(ctx.obj, name, EXAMPLE)
    template = chat_template(options.chat_template) if options.chat else None
    text = _text([*([] if options.prompt is None else [options.prompt]), *spoken], options, screen)
    screen.announce(f"opening {name}")
    tokenizer = _tokenizer(name, options.revision, screen)
    if options.decode:
        data = _decoded(tokenizer, _parsed(text, tokenizer, name))
        screen.status("")
        screen.exactly(data)
        return
    if options.chat:
        ids = _chat_ids(tokenizer, name, text, template, options, kwargs)
    else:
        parse = not options.no_parse_special
        ids = tokenizer.encode(text, add_special_tokens=not options.no_bos, parse_special=parse)
    screen.status("")
    if options.count:
        screen.answer(f"{len(ids)}\n")
    elif options.ids:
        screen.record(ids)
    elif options.json:
        pieces = [_piece(tokenizer.id_to_bytes(i)) for i in ids]
        screen.record({"model": name, "ids": ids, "pieces": pieces, "count": len(ids)})
    elif ids:
        screen.styled(_listing(tokenizer, ids, screen))


def _check_together(ctx: typer.Context, options: TokenizeOptions) -> None:
    """UsageError for options that don't go with each other."""
    refuse_both(ids=options.ids, count=options.count, json=options.json)
    if options.decode:
        refuse_typed(ctx, _OF_ENCODING, "has no meaning with --decode, which gives text", "leave one of them out")
    elif options.chat:
        refuse_typed(ctx, _OF_TEXTS, "has no meaning with --chat: the template says what is special", "leave one of them out")
    else:
        refuse_typed(ctx, _OF_CHATS, "has no meaning without --chat", "add --chat")


def _text(words: Sequence[str], options: TokenizeOptions, screen: Console) -> str:
    files = options.file or []
    if options.chat or options.decode:
        text = inputs.assemble(words, files, screen) or None
    else:
        text = inputs.as_it_is(words, files, screen)
    if text is None:
        if options.decode:
            raise UsageError("there are no ids", "for example: nanovllm tokenize tiny --decode 9 10 11")
        raise UsageError("there is no text", EXAMPLE)
    return text


def _tokenizer(name: str, revision: str | None, screen: Console) -> Tokenizer:
    with signals.insisting():
        from nanovllm_cli.weights.checkpoint import open_checkpoint
        from nanovllm_cli.weights.tokenizer import load_tokenizer
    with open_checkpoint(here(name, revision, ProgressLine(screen)).path) as checkpoint:
        return load_tokenizer(checkpoint)


def _chat_ids(
    tokenizer: Tokenizer, name: str, text: str, source: str | None, options: TokenizeOptions, kwargs: dict[str, Any]
) -> list[int]:
    """Of a user's message, as the model is given it: see LLM.encode_chat."""
    from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat
    from nanovllm_cli.text.messages import template_messages

    if source is None and "default" not in tokenizer.chat_templates:
        raise UsageError(f"{name} has no chat template", "leave --chat out, or add --chat-template NAME")
    template = ChatTemplate.of(tokenizer, source)
    system = None if options.system_prompt is None else inputs.checked(options.system_prompt, "the system prompt")
    conversation = template_messages(with_system([{"role": "user", "content": text}], system), template)
    variables = template_variables(template.source, name, options.think, kwargs)
    return encode_chat(tokenizer, template, conversation, variables=variables)


def _listing(tokenizer: Tokenizer, ids: Sequence[int], screen: Console) -> str:
    """A line for each, in which everything that is not printable is escaped."""
    width = len(str(max(ids)))
    control = tokenizer.control_ids
    lines = []
    for i in ids:
        piece = _piece(tokenizer.id_to_bytes(i))
        line = f"{i:>{width}} -> {(piece if isinstance(piece, str) else bytes(piece))!r}"
        lines.append(screen.dimmed(line) if i in control else line)
    return "\n".join(lines) + "\n"


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are none by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _parsed(text: str, tokenizer: Tokenizer, name: str) -> list[int]:
    """1 2 3, or [1, 2, 3]. UsageError names the first that is no id of the tokenizer."""
    inside = re.fullmatch(r"\s*\[(.*)\]\s*", text, re.DOTALL)
    stripped = (inside[1] if inside else text).strip()
    words = re.split(r"\s*,\s*|\s+", stripped) if stripped else []
    for word in words:
        if not re.fullmatch("[0-9]+", word):
            raise UsageError(f"{word[:40]!r} is not a token id", "--decode takes whole numbers: 1 2 3, or [1, 2, 3]")
        if len(word) > _MOST_DIGITS or tokenizer.id_to_token(int(word)) is None:
            most = tokenizer.vocab_size - 1
            raise UsageError(f"{name} has no token {word[:40]}", f"its tokens have ids from 0 to {most}")
    return [int(word) for word in words]


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """What the ids are, control tokens too, with bytes that are no text left as they are: see Tokenizer.decode."""
    data = b"".join(map(tokenizer.id_to_bytes, ids))
    return data.removeprefix(b" ") if tokenizer.strips_leading_space else data
