"""`nanovllm run`: one prompt in, one answer out; or a file of prompts (`batch.py`). Never asks anything back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nanovllm_cli.cli import answer as answers
from nanovllm_cli.cli import history, inputs, log, signals
from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.files import WholeFile
from nanovllm_cli.cli.model import Loaded, Prompting, continued, load, name_and_words, named_model, template_kwargs
from nanovllm_cli.cli.options import (
    EngineOptions,
    MessageOptions,
    ModelOptions,
    SamplingOptions,
    refuse_both,
)
from nanovllm_cli.cli.output import Console, console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.records import Statistics
from nanovllm_cli.cli.run_options import OutputOptions, PromptOptions
from nanovllm_cli.errors import RequestError, UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.sampling_params import SamplingParams

EXAMPLE = 'for example: nanovllm run tiny "Once upon a time"'
_PREFILL_WORTH_SHOWING = 256
_STATUS_SECONDS = 0.1

logger = logging.getLogger(__name__)


@expand
def run(
    *,
    ctx: typer.Context,
    model_word: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A path, org/repo[:quant][@revision], or a short name; or -m.")
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="The prompt; standard input, if any, goes before it.")
    ] = None,
    model: ModelOptions,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    output: OutputOptions,
    messages: MessageOptions,
) -> None:
    """Answer one prompt, or a file of prompts.

    The answer goes to stdout and nothing else does. With -m (or NANOVLLM_MODEL) every argument is part of the prompt.
    Sizes take k (thousands) and K (times 1024). Any option can be set by NANOVLLM_ and its name, by nanovllm.toml in
    the project, and by config.toml in ~/.config/nanovllm.
    """
    screen = console()
    log.configure(messages, screen)
    name, spoken = name_and_words(model, model_word, words or [])
    name = named_model(ctx.obj, name, model, EXAMPLE)
    given = sampling.given()
    _refuse_contradictions(prompt, output, sampling)
    asked = _Asked(
        name=name,
        words=[*([prompt.prompt] if prompt.prompt is not None else []), *spoken],
        given=given,
        system=None if prompt.system_prompt is None else inputs.checked(prompt.system_prompt, "the system prompt"),
        kwargs=template_kwargs(prompt.chat_template_kwargs),
        path=_path(output.output),
    )
    if prompt.batch is not None:
        _run_batch(prompt.batch, asked, model, prompt, engine, output, screen)
    else:
        _run_one(asked, model, prompt, engine, output, screen)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the options come to, once they are checked. given: fields of SamplingParams."""

    name: str
    words: list[str]
    given: dict[str, Any]
    system: str | None
    kwargs: dict[str, Any]
    path: Path | None

    def prompting(self, llm: LLM, prompt: PromptOptions) -> Prompting:
        return Prompting(llm, prompt.raw, self.system, prompt.think, self.kwargs)


def _run_one(
    asked: _Asked,
    model: ModelOptions,
    prompt: PromptOptions,
    engine: EngineOptions,
    output: OutputOptions,
    screen: Console,
) -> None:
    config = engine.config(model, max_num_seqs=asked.given.get("n", 1))
    last = history.load() if prompt.continue_last else None
    text = inputs.assemble(asked.words, prompt.file or [], screen)
    if not text and last is None:
        raise UsageError("there is no prompt", EXAMPLE)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(WholeFile(asked.path)) if asked.path is not None else None
        loaded = load(asked.name, model, config, screen)
        stack.enter_context(contextlib.closing(loaded.llm))
        turn = _Turn(loaded, asked.prompting(loaded.llm, prompt), last, text)
        params = dataclasses.replace(loaded.llm.default_params, **asked.given)
        screen.status("reading the prompt")
        _answer(turn, params, output, screen, file, saves=not output.no_save, told="max_tokens" in asked.given)


def _run_batch(
    source: str,
    asked: _Asked,
    model: ModelOptions,
    prompt: PromptOptions,
    engine: EngineOptions,
    output: OutputOptions,
    screen: Console,
) -> None:
    from nanovllm_cli.cli import batch

    if asked.words or prompt.file:
        raise UsageError("--batch has its prompts in its file", "leave the prompt out, or run it by itself")
    config = engine.config(model)
    options = batch.BatchOptions(
        source=source,
        output=asked.path,
        overwrite=output.overwrite,
        keeps_reasoning=output.reasoning != "hide",
        stats=output.stats,
        given=asked.given,
        settings={
            "raw": prompt.raw,
            "system": asked.system,
            "think": prompt.think,
            "kwargs": asked.kwargs,
            "chat_template": model.chat_template,
        },
    )
    lines = batch.read_lines(source, screen)
    with batch.open_results(options, lines, screen) as results:
        loaded = load(asked.name, model, config, screen)
        with contextlib.closing(loaded.llm):
            batch.run_batch(loaded, asked.prompting(loaded.llm, prompt), options, lines, results, screen)


def _refuse_contradictions(prompt: PromptOptions, output: OutputOptions, sampling: SamplingOptions) -> None:
    """Raises UsageError for options that cannot both have an effect, or none where they are."""
    batched = prompt.batch is not None
    refuse_both(json=output.json, jsonl=output.jsonl, extract=output.extract, batch=batched)
    refuse_both(batch=batched, continue_=prompt.continue_last)
    if sampling.logprobs is not None and not (output.json or output.jsonl or batched):
        raise UsageError("--logprobs has no place in plain text", "add --json, --jsonl or --batch")
    if output.overwrite and not (batched and output.output):
        raise UsageError("--overwrite has no meaning without --batch and -o")


class _Turn:
    """One prompt on its way to the model, and what is kept of it."""

    def __init__(self, loaded: Loaded, prompting: Prompting, last: history.LastRun | None, text: str) -> None:
        self.loaded = loaded
        self.prompting = prompting
        self.messages: list[history.Message] | None = None
        self.prefix = ""  # the part of the last message that an earlier run has said
        self.text = text
        if last is not None:
            self.messages, self.text = continued(last, prompting, text)
        elif prompting.chats:
            self.messages = prompting.new_messages(text)
        if self.messages is None:
            self.ids = prompting.encode_raw(self.text)
        elif self.messages[-1]["role"] == "assistant":
            self.ids = prompting.encode_unfinished(self.messages)
            self.prefix = str(self.messages[-1].get("content") or "")
            self.messages = self.messages[:-1]
        else:
            self.ids = prompting.encode(self.messages)

    def save(self, content: str) -> None:
        name = self.loaded.llm.name
        if self.messages is None:
            history.save(history.LastRun(name, text=self.text + content))
        elif self.prefix + content:
            answer = {"role": "assistant", "content": self.prefix + content}
            history.save(history.LastRun(name, messages=[*self.messages, answer]))


def _answer(
    turn: _Turn,
    params: SamplingParams,
    options: OutputOptions,
    screen: Console,
    file: WholeFile | None,
    *,
    saves: bool,
    told: bool,
) -> None:
    """Streams the answer to where it belongs. `told`: the user has set a limit, and need not hear that it was
    reached."""
    llm = turn.loaded.llm
    transcript = answers.Transcript(turn.prompting.parser_for(turn.ids))
    write = file.write if file is not None else screen.answer
    printer = _printer(options, screen, write, transcript, turn)
    status = _Status(
        screen, len(turn.ids), hidden=file is not None or options.json or options.extract or not screen.out.is_terminal
    )
    output: RequestOutput | None = None
    try:
        steps = cast("Generator[RequestOutput, None, None]", llm.stream(turn.ids, params))
        with contextlib.closing(steps):
            for output in steps:
                signals.check()
                status.show(output)
                printer.step(transcript.add(output))
    finally:
        whole = output is not None and output.finished
        if not whole:
            printer.cut()
            screen.end_answer()
        if saves and output is not None:
            turn.save(transcript.contents.get(0, ""))
    if output is None or not output.finished:
        raise RequestError("the engine gave no answer", "run it again with --debug")
    statistics = Statistics.of(output, llm, turn.loaded.seconds, time.monotonic())
    try:
        printer.finish(output, statistics)
    finally:
        screen.end_answer()
    if file is not None:
        file.commit()
    for answer in output.outputs:
        if answer.error is not None:
            raise RequestError(f"the answer failed: {answer.error}")
    if not told and any(answer.finish_reason == "length" for answer in output.outputs):
        screen.say(f"cut off: {_limit(params, llm.max_model_len)}", "dim")
    logger.info("%s", statistics.line())
    shows = options.stats if options.stats is not None else not (screen.quiet or options.json or options.jsonl)
    if shows:
        screen.line(statistics.line(), "dim")


def _printer(
    options: OutputOptions, screen: Console, write: answers.Write, transcript: answers.Transcript, turn: _Turn
) -> answers.Printer:
    if options.json:
        return answers.JsonPrinter(write, transcript, turn.loaded.llm, reasoning=options.reasoning)
    if options.jsonl:
        return answers.JsonLinesPrinter(write, transcript, turn.loaded.llm, reasoning=options.reasoning)
    return answers.TextPrinter(screen, write, transcript, reasoning=options.reasoning, extract=options.extract)


class _Status:
    """The status line while the model reads and, where the answer is not on the screen, while it writes."""

    def __init__(self, screen: Console, prompt_len: int, *, hidden: bool) -> None:
        self._screen = screen
        self._hidden = hidden
        self._prompt_len = prompt_len
        self._progress = ProgressLine(screen)
        self._read = 0
        self._drawn = 0.0

    def show(self, output: RequestOutput) -> None:
        metrics = output.metrics
        if metrics.first_token is None:
            if self._prompt_len < _PREFILL_WORTH_SHOWING:
                return
            if self._read == 0:
                self._progress.stage("reading the prompt", self._prompt_len, "tokens")
            self._progress.advance(max(metrics.num_computed_prompt_tokens - self._read, 0))
            self._read = max(metrics.num_computed_prompt_tokens, 1)
        elif self._hidden and time.monotonic() - self._drawn >= _STATUS_SECONDS:
            self._drawn = time.monotonic()
            count = sum(len(answer.token_ids) for answer in output.outputs)
            self._screen.status(f"writing  {count:,} tokens")


def _path(output: str | None) -> Path | None:
    if output == "":
        raise UsageError("-o needs the name of a file")
    return None if output is None or output == "-" else Path(output)


def _limit(params: SamplingParams, max_model_len: int) -> str:
    if params.max_tokens is not None:
        return f"the model's own limit is {params.max_tokens} tokens; -n raises it"
    return f"the context of {max_model_len} tokens is full"
