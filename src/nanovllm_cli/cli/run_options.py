"""The options that only `run` has: what is asked, and what comes of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nanovllm_cli.cli.answer import ReasoningChoice
from nanovllm_cli.cli.command import OUTPUT, PROMPT, option
from nanovllm_cli.cli.options import Choice


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What is asked."""

    prompt: Annotated[
        str | None,
        option(
            "-p",
            "--prompt",
            help="The prompt, as the arguments after MODEL.",
            panel=PROMPT,
            metavar="TEXT",
            envvar=None,
        ),
    ] = None
    file: Annotated[
        list[str] | None,
        option(
            "-f", "--file", help="Text from a file, before the arguments; - is standard input. Repeatable.",
            panel=PROMPT, metavar="FILE", envvar=None,
        ),
    ] = None  # fmt: skip
    system_prompt: Annotated[
        str | None,
        option("-sys", "--system-prompt", help="What the model is told first.", panel=PROMPT, metavar="TEXT"),
    ] = None
    continue_last: Annotated[
        bool,
        option(
            "--continue",
            help="Go on from the last run: with a new prompt as its next turn, without one with its answer.",
            panel=PROMPT, envvar=None,
        ),
    ] = False  # fmt: skip
    raw: Annotated[bool, option("--raw", help="The prompt as it is, without the chat template.", panel=PROMPT)] = False
    think: Annotated[
        Choice | None,
        option("--think", help="Whether the model reasons first, where its template has a switch.", panel=PROMPT),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        option("--chat-template-kwargs", help="More variables for the chat template.", panel=PROMPT, metavar="JSON"),
    ] = None
    batch: Annotated[
        str | None,
        option(
            "--batch",
            help='A file of JSON lines, {"prompt": …} or {"messages": […]}, all at once; JSON lines come out.',
            panel=PROMPT, metavar="FILE", envvar=None,
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is said, and where."""

    output: Annotated[
        str | None,
        option(
            "-o",
            "--output",
            help="Write the answer to a file, whole or not at all.",
            panel=OUTPUT,
            metavar="FILE",
            envvar=None,
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            "--overwrite",
            help="Let --batch replace results of other prompts or settings in -o.",
            panel=OUTPUT,
            envvar=None,
        ),
    ] = False
    json: Annotated[bool, option("--json", help="One JSON object instead of text.", panel=OUTPUT)] = False
    jsonl: Annotated[
        bool, option("--jsonl", help="A JSON line for each step, then one with statistics.", panel=OUTPUT)
    ] = False
    extract: Annotated[
        bool, option("-x", "--extract", help="Only the first code block of the answer.", panel=OUTPUT)
    ] = False
    reasoning: Annotated[
        ReasoningChoice,
        option("--reasoning", help="A model's reasoning on stderr; auto: on a terminal. [auto]", panel=OUTPUT),
    ] = "auto"
    stats: Annotated[
        bool | None,
        option(
            "--stats/--no-stats",
            help="A line of statistics on stderr. [unless --quiet, --json or --jsonl]",
            panel=OUTPUT,
        ),
    ] = None
    no_save: Annotated[bool, option("--no-save", help="Keep nothing for --continue.", panel=OUTPUT)] = False
