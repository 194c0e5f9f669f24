"""`nanovllm run`: one prompt in, one answer out; or a file of prompts (`batch.py`). Never asks anything back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli import history, inputs
from nanovllm_cli.cli.command import expand, is_typed
from nanovllm_cli.cli.files import WholeFile, output_path
from nanovllm_cli.cli.form import FormOptions, refuse_with_beams
from nanovllm_cli.cli.local import open_local
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import name_and_words, named_model, refuse_template_options, template_kwargs
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelOptions, ModelWord, refuse_both
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.prompt_cache import prompt_cache
from nanovllm_cli.cli.question import Question, TranscriptWishes, continued, new_question
from nanovllm_cli.cli.remote_options import RemoteOptions
from nanovllm_cli.cli.run_answer import RunAnswer
from nanovllm_cli.cli.run_options import OutputOptions, PromptOptions
from nanovllm_cli.cli.sampling_options import AnswersOptions
from nanovllm_cli.cli.tool_options import ToolOptions
from nanovllm_cli.cli.transcript_options import TranscriptOptions
from nanovllm_cli.cli.unused import refuse_typed, sampling_notes
from nanovllm_cli.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.chat.toolbox import Toolbox
    from nanovllm_cli.cli.answering import Answerer
    from nanovllm_cli.client.endpoint import Endpoint

EXAMPLE = 'for example: nanovllm run tiny "Once upon a time"'


@expand
def run(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="The prompt; standard input, if any, goes before it.")
    ] = None,
    model: ModelOptions,
    server: RemoteOptions,
    prompt: PromptOptions,
    sampling: AnswersOptions,
    form: FormOptions,
    tools: ToolOptions,
    transcript: TranscriptOptions,
    engine: EngineOptions,
    output: OutputOptions,
    messages: MessageOptions,
) -> None:
    """Answer one prompt, or a file of prompts.

    The answer goes to stdout and nothing else does. With -m (or NANOVLLM_MODEL) every argument is part of the prompt.
    Sizes take k (thousands) and K (times 1024). Options that say how, and not what about, can be set by NANOVLLM_ and their
    name, by nanovllm.toml in the project, and by config.toml in ~/.config/nanovllm.
    """
    screen = screen_for(messages)
    given = sampling.given() | form.given()
    refuse_with_beams(given)
    wishes = transcript.wishes()
    _refuse_contradictions(prompt, output, wishes)
    has_tools = _has_tools(ctx, tools, prompt, given, wishes)
    if not (output.json or output.jsonl or prompt.batch is not None):
        refuse_typed(ctx, ("logprobs",), "has no place in plain text", "add --json, --jsonl or --batch")
        given.pop("logprobs", None)
    if prompt.batch is None:
        refuse_typed(ctx, ("lora_modules",), "has no meaning without --batch, whose lines choose", "--lora PATH is all it takes")
    if prompt.raw and is_typed(ctx, "chat_template"):
        raise UsageError("--chat-template has no meaning: --raw leaves the chat template out", "leave one of them out")
    system = None if prompt.system_prompt is None else inputs.checked(prompt.system_prompt, "the system prompt")
    kwargs = template_kwargs(ctx, prompt.chat_template_kwargs)
    endpoint = server.endpoint(ctx, "lora_modules", "prompt_cache", "prompt_cache_ro")
    last = history.load() if prompt.continue_last else None
    if endpoint is not None:
        answerer, spoken = _remote(endpoint, model, [word for word in (model_word, *(words or [])) if word], prompt, kwargs)
    else:
        name, spoken = name_and_words(model, model_word, words or [])
        if last is not None and not model.model and name and _is_said(name):
            spoken = [name, *spoken]
            name = model_word = None
        side_by_side = max(given.get("n", 1), given.get("num_beams", 1), wishes.side_by_side if prompt.audio else 1)
        seats = None if prompt.batch is not None else side_by_side
        config = engine.config(model, max_num_seqs=seats, settings=ctx.obj)
        if not name and last is not None:
            name = last.model
            config = last.beside(config)
        if prompt.lora_modules and prompt.batch is not None:
            config = dataclasses.replace(config, lora_modules=tuple(prompt.lora_modules))
        name = named_model(ctx.obj, name, EXAMPLE)
        cache = prompt_cache(prompt.prompt_cache, is_read_only=prompt.prompt_cache_ro)

        def answerer(box: Toolbox | None) -> Answerer:
            try:
                return open_local(
                    name, model, config, screen, raw=prompt.raw, system=system, think=prompt.think, kwargs=kwargs,
                    prompt_cache=cache, tools=box,
                )  # fmt: skip
            except ModelNotFoundError as error:
                if last is not None and name == model_word:
                    words = shlex.quote(" ".join([name, *spoken]))
                    error.hint = f"without MODEL the prompt stands behind -p: nanovllm run --continue -p {words}"
                elif last is not None and name == last.model and not model.model:
                    error.hint = "the last run was with it: if it was a server's, say --url; or else, name another with -m"
                raise

    def opened(box: Toolbox | None) -> Answerer:
        found = answerer(box)
        for note in sampling_notes(ctx, *found.settled(given)):
            screen.say(note, "dim")
        return found

    asked = _Asked(
        ctx=ctx,
        answerer=opened,
        words=[*([prompt.prompt] if prompt.prompt is not None else []), *spoken],
        given=given,
        system=system,
        path=output_path(output.output),
        last=last,
        model_word=None if model.model or endpoint is not None else model_word,
    )
    if prompt.batch is not None:
        settings = {"raw": prompt.raw, "think": prompt.think, "kwargs": kwargs, "chat_template": model.chat_template}
        _run_batch(prompt.batch, asked, settings, prompt, output, screen)
    else:
        _run_one(asked, prompt, wishes, output, screen, tools if has_tools else None)


def _is_said(word: str) -> bool:
    """Whether it can only be what somebody says to a model: no name of one has blanks, but for a path."""
    return len(word.split()) > 1 and not os.path.exists(word)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the options come to, once they are checked. ctx: of the command. answerer: opens whoever answers, and may call tools,
    which may take long. given: fields of SamplingParams. last: the run to go on from. model_word: the argument that names the
    model, if one does."""

    ctx: typer.Context
    answerer: Callable[[Toolbox | None], Answerer]
    words: list[str]
    given: dict[str, Any]
    system: str | None
    path: Path | None
    last: history.LastRun | None
    model_word: str | None


def _remote(
    endpoint: Endpoint, model: ModelOptions, words: list[str], prompt: PromptOptions, kwargs: dict[str, Any]
) -> tuple[Callable[[Toolbox | None], Answerer], list[str]]:
    """One of a server's models, and the words that are the prompt's."""
    from nanovllm_cli.cli.remote import RemoteAnswerer, waited_for
    from nanovllm_cli.cli.remote_options import named_by_word, only_model
    from nanovllm_cli.text.reasoning import thinking_variables

    if prompt.raw:
        refuse_template_options("--raw leaves the chat template out", prompt.system_prompt, prompt.think, kwargs)
    name, spoken, tells_reading = model.model, words, False
    if name is None:
        served = waited_for(endpoint.models())
        name, spoken = named_by_word(served, words)
        name = name or only_model(served)
        tells_reading = any(each.tells_reading for each in served if each.id == name)
    thinks = None if prompt.think is None else prompt.think == "on"
    answerer = RemoteAnswerer(endpoint, name, prompt.raw, {**thinking_variables(thinks), **kwargs}, tells_reading)
    return lambda box: answerer if box is None else dataclasses.replace(answerer, tools=box.for_template()), spoken


def _run_one(
    asked: _Asked,
    prompt: PromptOptions,
    wishes: TranscriptWishes,
    output: OutputOptions,
    screen: Console,
    tools: ToolOptions | None,
) -> None:
    last = asked.last
    seen, heard, watched = prompt.image or [], prompt.audio or [], prompt.video or []
    files = inputs.attached(seen, heard, [*asked.words, *(prompt.file or [])], watched)
    is_taken = inputs.STANDARD_INPUT in (*seen, *heard, *watched)
    text = inputs.assemble(asked.words, prompt.file or [], screen, reads_stdin=not is_taken)
    if not text and not files and last is None:
        taken = f": {asked.model_word!r} is taken for the model" if " " in (asked.model_word or "") else ""
        raise UsageError(f"there is no prompt{taken}", f"{EXAMPLE}; nanovllm chat is the conversation")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(WholeFile(asked.path)) if asked.path is not None else None
        box = stack.enter_context(tools.opened(screen)) if tools is not None else None
        if box is not None:
            box.after_stop = ""
        answerer = stack.enter_context(contextlib.closing(asked.answerer(box)))
        if box is not None:
            if not answerer.chats:
                why = "it writes down sounds" if answerer.dictates else "it has no chat template, which would tell it of them"
                raise UsageError(f"{answerer.name} calls no tools: {why}", "leave --mcp out, or take another model")
            box.look = answerer.look
        if answerer.dictates and last is not None:
            raise UsageError("--continue has no meaning: this model writes down sounds", "leave it out")
        if answerer.reads_alone and last is not None:
            what = "--continue has no meaning: this model's encoder reads each prompt by itself"
            raise UsageError(what, "leave it out, and write all that it is to read")
        if answerer.dictates:
            of_texts = "prompt_cache", "prompt_cache_ro", "chat_template", "raw"
            refuse_typed(asked.ctx, of_texts, "has no meaning: this model writes down sounds", "leave it out")
            sounds, names = [each.data if each.is_sound else each.url for each in files], [each.name for each in files]
            question = Question(text=text, sounds=sounds, names=names, wishes=wishes)
        elif wishes != TranscriptWishes():
            question = answerer.asked_for_words(Question(text=text, sounds=[each.url for each in files], wishes=wishes))
        elif last is not None:
            images = [each.url for each in files]
            question = continued(last, text, chats=answerer.chats, system=asked.system, images=images)
        else:
            images = [each.url for each in files]
            question = new_question(text, chats=answerer.chats, system=asked.system, images=images)
        files.clear()  # which may be gigabytes
        screen.status("reading the prompt")
        RunAnswer(answerer, question, asked.given, output, screen, file, box).answer()


def _run_batch(
    source: str,
    asked: _Asked,
    settings: dict[str, Any],
    prompt: PromptOptions,
    output: OutputOptions,
    screen: Console,
) -> None:
    from nanovllm_cli.cli import batch
    from nanovllm_cli.cli.results import Results

    if asked.words or prompt.file or prompt.image or prompt.audio or prompt.video:
        hint = "leave prompt, images, sounds and videos out, or run them by themselves"
        raise UsageError("--batch has its prompts in its file", hint)
    options = batch.BatchOptions(
        keeps_reasoning=output.reasoning != "hide",
        stats=output.stats,
        given=asked.given,
        system=asked.system,
        settings=settings,
    )
    lines = batch.read_lines(source, screen)
    opened = Results(asked.path, output.overwrite, len(lines), screen.answer)  # before anything slow happens
    with opened as results, contextlib.closing(asked.answerer(None)) as answerer:
        batch.run_batch(answerer, options, lines, results, screen)


def _has_tools(
    ctx: typer.Context, tools: ToolOptions, prompt: PromptOptions, given: Mapping[str, Any], wishes: TranscriptWishes
) -> bool:
    """Whether the model may call any. Raises UsageError where they were typed beside what they do not go with; what the
    environment says of them is for where they have a meaning."""
    tools.check(ctx)
    others = {
        "--batch": prompt.batch is not None,
        "--raw": prompt.raw,
        "-N": given.get("n", 1) > 1,
        "--beams": given.get("num_beams", 1) > 1,
        (wishes.flags or ["--language"])[0]: wishes != TranscriptWishes(),
    }
    against = [flag for flag, is_there in others.items() if is_there]
    if tools.mcp and against and is_typed(ctx, "mcp"):
        what = f"--mcp and {against[0]} cannot be used together"
        raise UsageError(what, "tools are called on the way to one answer, of a model that chats")
    return bool(tools.mcp) and not against


def _refuse_contradictions(prompt: PromptOptions, output: OutputOptions, wishes: TranscriptWishes) -> None:
    """Raises UsageError for options that cannot both have an effect, or none where they are."""
    batched = prompt.batch is not None
    refuse_both(json=output.json, jsonl=output.jsonl, extract=output.extract, batch=batched)
    refuse_both(batch=batched, continue_=prompt.continue_last)
    for flag in [*(["--language"] if wishes.language is not None else []), *wishes.flags]:
        refuse_both(batch=batched, continue_=prompt.continue_last, **{flag.removeprefix("--").replace("-", "_"): True})
    if wishes.word_times and not (output.json or output.jsonl):
        raise UsageError("--word-times has no place in plain text", "add --json or --jsonl; --subtitles has --max-words")
    if output.overwrite and not (batched and output.output):
        raise UsageError("--overwrite has no meaning without --batch and -o")
