"""`nanovllm run-batch`: a file of requests as OpenAI's batches have them, all at once, each answered as a server would.

A model of this machine answers by the server's own routes, without a server in front: whatever a request may say there it may
say here. With --url a server does. Results are kept as those of `run --batch` are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.batch_lines import Tally
from nanovllm_cli.cli.batch_requests import FORM, keys_of, read_requests
from nanovllm_cli.cli.command import ENGINE, expand, option
from nanovllm_cli.cli.files import output_path
from nanovllm_cli.cli.inputs import MAX_INPUT_BYTES, STANDARD_INPUT
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.model import chat_template, name_and_words, named_model, say_parts, template_kwargs
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelOptions, ModelWord
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.records import dumps
from nanovllm_cli.cli.remote_options import RemoteOptions
from nanovllm_cli.cli.results import Results
from nanovllm_cli.cli.sampling_options import AnswersOptions
from nanovllm_cli.cli.served import short_name, teller, told_of
from nanovllm_cli.cli.shared_options import LoraModules, ReasoningParser, TemplateKwargs, ThinkUnsaid, ToolCallParser
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.batch_form import Request, answer_of, answer_of_broken, failed, usage_of
from nanovllm_cli.together import together

if TYPE_CHECKING:
    from nanovllm_cli.client.endpoint import Endpoint
    from nanovllm_cli.server.messages import Facts
    from nanovllm_cli.server.served_models import ModelSettings

EXAMPLE = "for example: nanovllm run-batch tiny requests.jsonl -o answers.jsonl"
FILES = "Files"
MOST_HERE = 256
"""Requests that are under way together, at the least; the engine takes as many of them into a step as it has room for."""
_DECIDE = (
    "dtype", "device", "quant", "lora", "lora_modules", "control_vectors", "control_vector_layers", "activations",
    "max_model_len", "rope", "overrides", "kv_cache_dtype", "cache_type_k", "cache_type_v", "deterministic", "image_max_tokens",
    "video_fps", "video_max_frames",
)  # fmt: skip
"""Settings of the engine that an answer follows from."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What goes in, and where it comes out."""

    input_file: str | None = option(
        "-i", "--input-file", help="The requests, in place of the argument FILE.", panel=FILES, metavar="FILE", envvar=None
    )
    output: str | None = option(
        "-o", "--output", "--output-file", help="Write the answers to a file, and go on there after an interruption. [stdout]",
        panel=FILES, metavar="FILE", envvar=None,
    )
    overwrite: bool = option(
        "--overwrite", help="Replace answers to other requests or settings in -o.", default=False, panel=FILES, envvar=None
    )
    stats: bool | None = option(
        "--stats/--no-stats", help="A line of statistics on stderr. [unless --quiet]", panel=FILES
    )


@dataclass(frozen=True, slots=True)
class RequestsOptions:
    """How many at once, and what counts in conversations whose requests do not say."""

    parallel: int | None = option(
        "-np", "--parallel", "--max-num-seqs",
        help=f"Most answers that the model works on at once. [{EngineConfig().max_num_seqs}]",
        panel=ENGINE, envvar="NANOVLLM_PARALLEL",
    )
    think: ThinkUnsaid = None
    chat_template_kwargs: TemplateKwargs = None
    tool_call_parser: ToolCallParser = None
    reasoning_parser: ReasoningParser = None
    lora_modules: LoraModules = None


class Answer(Protocol):
    @property
    def status(self) -> int: ...

    @property
    def request_id(self) -> str | None: ...

    @property
    def body(self) -> bytes: ...


Post = Callable[[str, dict[str, Any]], Awaitable[Answer]]
Found = tuple[int, Answer]


class _Left(NamedTuple):
    """A request that has no answer yet, by its position."""

    position: int
    request: Request


@expand
def run_batch(
    *,
    ctx: typer.Context,
    model_word: ModelWord = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="The requests, a line of JSON each; - is standard input.")
    ] = None,
    model: ModelOptions,
    server: RemoteOptions,
    wanted: RequestsOptions,
    sampling: AnswersOptions,
    engine: EngineOptions,
    files: FileOptions,
    messages: MessageOptions,
) -> None:
    """Answer a file of requests in the form of OpenAI's batches.

    A line is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": …}; completions, responses, embeddings,
    rerank, score and messages are other urls. Answers come in the order of the lines. Sampling options are what requests get that
    ask for nothing else.
    """
    screen = screen_for(messages)
    if files.overwrite and not files.output:
        raise UsageError("--overwrite has no meaning without -o")
    local = [each.name for group in (RequestsOptions, AnswersOptions) for each in dataclasses.fields(group)]
    endpoint = server.endpoint(ctx, *local)
    if endpoint is not None:
        source = _source([word for word in (model_word, *(words or [])) if word], files)
        requests = [each.asking(model.model) for each in read_requests(source, screen)]
        with _results(files, requests, screen) as results:
            run = _Run(requests, results, Tally(results, len(requests), screen, files.stats), [endpoint.server.url, model.model])
            run.run(lambda left: _remote(endpoint, left, run.begin), screen)
        return
    name, spoken = name_and_words(model, model_word, words or [])
    name = named_model(ctx.obj, name, EXAMPLE)
    requests = read_requests(_source(spoken, files), screen)
    config = engine.config(model, max_num_seqs=wanted.parallel, settings=ctx.obj)
    config = dataclasses.replace(config, lora_modules=tuple(wanted.lora_modules or ()))
    requests = _of_this_model(requests, short_name(name), [adapter for adapter, _ in config.lora_modules], screen)
    variables, given = template_kwargs(ctx, wanted.chat_template_kwargs), sampling.given()
    with _results(files, requests, screen) as results:  # before anything slow happens
        screen.announce(f"loading {name}")
        served = _served(name, model, config, wanted, variables, given, screen)
        run = _Run(requests, results, Tally(results, len(requests), screen, files.stats), _deciding(served, wanted))

        def ready(facts: Facts) -> None:
            screen.say(told_of(served.names[0], facts), "dim")
            run.begin()

        with parsers.by_their_flags():
            run.run(lambda left: _here(served, left, ready, screen), screen)


def _served(
    name: str,
    model: ModelOptions,
    config: EngineConfig,
    wanted: RequestsOptions,
    variables: dict[str, Any],
    given: dict[str, Any],
    screen: Console,
) -> ModelSettings:
    """The model, on this machine. Raises NanovllmError."""
    template = chat_template(model.chat_template)
    with signals.insisting():
        from nanovllm_cli.server.ports import ChatDefaults
        from nanovllm_cli.server.served_models import ModelSettings
        from nanovllm_cli.weights.source import files_for, find_parts, resolve
    progress = ProgressLine(screen)
    config = find_parts(config, offline=model.offline, progress=progress)
    say_parts(config, screen)
    found = resolve(name, offline=model.offline, revision=model.revision, pick=files_for(config), progress=progress)
    return ModelSettings(
        (short_name(name),), found.path, config, template, given, wanted.tool_call_parser, wanted.reasoning_parser,
        None if wanted.think is None else wanted.think == "on", ChatDefaults(variables),
    )  # fmt: skip


def _deciding(model: ModelSettings, wanted: RequestsOptions) -> list[object]:
    """What an answer follows from, besides its line: the model by its files, and settings. How fast one comes decides nothing."""
    from nanovllm_cli.cli.local import stamps_of

    config = model.config
    beside = [*(path for path, _ in (*config.lora, *config.control_vectors)), *(path for _, path in config.lora_modules)]
    files = [str(Path(each).resolve()) for each in (str(model.path), *beside, *filter(None, [config.mmproj]))]
    chosen = [wanted.think, wanted.chat_template_kwargs, wanted.tool_call_parser, wanted.reasoning_parser]
    stamps, settings = [stamps_of(Path(each)) for each in files], [str(getattr(config, name)) for name in _DECIDE]
    return [files, stamps, settings, model.chat_template, model.given, chosen]


class _Run:
    """settings: whatever decides an answer, besides its line."""

    def __init__(self, requests: list[Request], results: Results, tally: Tally, settings: object) -> None:
        self._requests, self._results, self._tally = requests, results, tally
        self._keys = keys_of(requests, settings)
        self._kept = results.resume(self._keys, [each.number for each in requests])
        self._waiting = [_Left(i, each) for i, each in enumerate(requests) if not results.has(i)]

    def begin(self) -> None:
        """What is broken fails, and what is left may be asked."""
        self._tally.begin(self._kept)
        for position, request in self._waiting:
            if request.broken is not None:
                self._put(position, answer_of_broken(self._keys[position], request))

    def run(self, ask: Callable[[list[_Left]], AsyncGenerator[Found, None]], screen: Console) -> None:
        """Asks what has no answer yet. Raises RequestError at the end if a line failed."""
        from nanovllm_cli.cli.remote import interruptible

        left = [each for each in self._waiting if each.request.broken is None]
        try:
            if not left:
                self.begin()
            steps = interruptible(ask(left)) if left else None
            with contextlib.closing(steps) if steps is not None else contextlib.nullcontext():
                for found in steps or ():
                    signals.check()
                    if found is not None:
                        position, answer = found
                        key, request = self._keys[position], self._requests[position]
                        self._put(position, answer_of(key, request, answer.status, answer.request_id, answer.body))
            self._tally.finish()
        except BaseException:
            if kept_in := self._results.kept_in:
                screen.say(f"finished answers are kept in {kept_in}; the same command goes on from there")
            raise

    def _put(self, position: int, record: dict[str, Any]) -> None:
        prompt, answer = usage_of(record)
        self._tally.prompt_tokens += prompt
        self._tally.answer_tokens += answer
        self._tally.failed += failed(record)
        self._tally.put(position, dumps(record))


async def _here(
    model: ModelSettings, left: list[_Left], ready: Callable[[Facts], None], screen: Console
) -> AsyncGenerator[Found, None]:
    """Answers of a model of this machine. ready: told of it once it is loaded."""
    from nanovllm_cli.server.unserved import routes_of

    most = max(MOST_HERE, 2 * model.config.max_num_seqs)
    async with routes_of(model, max_requests=most, max_body_bytes=MAX_INPUT_BYTES, on_loading=teller(screen)) as (routes, facts):
        ready(facts)
        async for found in _asked(left, routes.post, most):
            yield found


async def _remote(endpoint: Endpoint, left: list[_Left], ready: Callable[[], None]) -> AsyncGenerator[Found, None]:
    from nanovllm_cli.cli.remote import MOST_AT_A_TIME

    async def post(path: str, body: dict[str, Any]) -> Answer:
        return await endpoint.post(path.removeprefix("/v1"), body)

    ready()
    async for found in _asked(left, post, MOST_AT_A_TIME):
        yield found


async def _asked(left: Iterable[_Left], post: Post, most: int) -> AsyncGenerator[Found, None]:
    async def one(position: int, request: Request) -> Found:
        assert request.body is not None, "it is not broken"
        return position, await post(request.path, request.body)

    async with contextlib.aclosing(together((one(*each) for each in left), most)) as answers:
        async for found in answers:
            yield found


def _source(words: list[str], files: FileOptions) -> str:
    """The file of requests. Raises UsageError for none, and for more than one."""
    named = [*words, *([files.input_file] if files.input_file is not None else [])]
    if len(named) > 1:
        raise UsageError(f"one file of requests at a time: {named[0]} and {named[1]} are two", EXAMPLE)
    if named:
        return named[0]
    if sys.stdin is not None and not sys.stdin.isatty():
        return STANDARD_INPUT
    raise UsageError("there is no file of requests", EXAMPLE)


def _results(files: FileOptions, requests: list[Request], screen: Console) -> Results:
    return Results(output_path(files.output), files.overwrite, len(requests), screen.answer, FORM)


def _of_this_model(requests: list[Request], name: str, adapters: list[str], screen: Console) -> list[Request]:
    """The same, asking for the model that was named on the command line; adapters are chosen by their names."""
    asked = [str((each.body or {}).get("model", name)) for each in requests]
    others = Counter(each[:60] for each in asked if each not in (name, *adapters))
    if others:
        screen.say(f"lines that ask for {', '.join(list(others)[:4])}{', …' if len(others) > 4 else ''} are answered by {name}")
    return [each if model in adapters else each.asking(name) for each, model in zip(requests, asked, strict=True)]
