"""The options that only `run` has: what is asked, and what comes of the answer."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm_cli.cli.answer import ReasoningChoice
from nanovllm_cli.cli.command import OUTPUT, PROMPT, option
from nanovllm_cli.cli.shared_options import LoraModules, SystemPrompt, TemplateKwargs, Think


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What is asked."""

    prompt: str | None = option(
        "-p", "--prompt", help="The prompt, as the arguments after MODEL.",
        panel=PROMPT, metavar="TEXT", envvar=None,
    )
    file: list[str] | None = option(
        "-f", "--file", help="Text from a file, before the arguments; - is standard input. Repeatable.",
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    image: list[str] | None = option(
        "--image", help="An image that the prompt is about; - is standard input. Repeatable.",
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    audio: list[str] | None = option(
        "--audio", help="A sound that the prompt is about; - is standard input. Repeatable.",
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    video: list[str] | None = option(
        "--video", help="A video that the prompt is about; - is standard input. Repeatable.",
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    system_prompt: SystemPrompt = None
    continue_last: bool = option(
        "--continue",
        help="Go on from the last run: with a new prompt as its next turn, without one with its answer. Its model is used where "
        "none is named.",
        default=False, panel=PROMPT, envvar=None,
    )
    raw: bool = option("--raw", help="The prompt as it is, without the chat template.", default=False, panel=PROMPT)
    think: Think = None
    chat_template_kwargs: TemplateKwargs = None
    batch: str | None = option(
        "--batch", help='A file of JSON lines, {"prompt": …} or {"messages": […]}, all at once; JSON lines come out.',
        panel=PROMPT, metavar="FILE", envvar=None,
    )
    lora_modules: LoraModules = None
    prompt_cache: str | None = option(
        "--prompt-cache",
        help="A file that keeps what was read of the prompt: the next one that begins alike is not read again up to there.",
        panel=PROMPT, metavar="FILE",
    )
    prompt_cache_ro: bool = option(
        "--prompt-cache-ro", help="Use that file and leave it as it is.", default=False, panel=PROMPT
    )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is said, and where."""

    output: str | None = option(
        "-o", "--output", help="Write the answer to a file, whole or not at all.",
        panel=OUTPUT, metavar="FILE", envvar=None,
    )
    overwrite: bool = option(
        "--overwrite", help="Let --batch replace results of other prompts or settings in -o.",
        default=False, panel=OUTPUT, envvar=None,
    )
    json: bool = option("--json", help="One JSON object instead of text.", default=False, panel=OUTPUT)
    jsonl: bool = option(
        "--jsonl", help="A JSON line for each step, then one with statistics.", default=False, panel=OUTPUT
    )
    extract: bool = option(
        "-x", "--extract", help="Only the first code block of the answer.", default=False, panel=OUTPUT
    )
    reasoning: ReasoningChoice = option(
        "--reasoning", help="A model's reasoning on stderr; auto: on a terminal. [auto]", default="auto", panel=OUTPUT
    )
    stats: bool | None = option(
        "--stats/--no-stats", help="A line of statistics on stderr. [unless --quiet, --json or --jsonl]",
        panel=OUTPUT,
    )
    no_save: bool = option("--no-save", help="Keep nothing for --continue.", default=False, panel=OUTPUT)
