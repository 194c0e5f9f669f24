"""`nanovllm bench serve`: how a server does under load. The work is in `bench/serve.py`."""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.bench_dataset import DatasetOptions
from nanovllm_cli.cli.bench_output import SummaryOutputOptions, numbers, percentiles, write_results
from nanovllm_cli.cli.command import OUTPUT, SERVER, expand, is_typed, option
from nanovllm_cli.cli.log import screen_for
from nanovllm_cli.cli.options import MessageOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.errors import RequestError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.bench.record import Summary
    from nanovllm_cli.bench.serve import Outcome, Plan
    from nanovllm_cli.bench.serve_client import Target

LOAD = "Load"
NUM_PROMPTS, WARMUP, TIMEOUT = 100, 1, 600.0
_MOST_FAILURES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Whom to ask."""

    url: str = option(
        "--url", help="The server, with or without /v1. [http://127.0.0.1:8080]",
        default="http://127.0.0.1:8080", panel=SERVER, metavar="URL",
    )
    model: str | None = option(
        "-m", "--model", help="The model's name there. [the first that the server lists]",
        panel=SERVER, metavar="NAME",
    )
    endpoint: Literal["completions", "chat"] = option(
        "--endpoint", help="Which of OpenAI's endpoints: prompts as they are, or as a chat. [completions]",
        default="completions", panel=SERVER,
    )
    api_key: str | None = option(
        "--api-key", help="Never shown; other users see a command line, so rather set NANOVLLM_API_KEY or OPENAI_API_KEY.",
        panel=SERVER, metavar="KEY",
    )
    ignore_eos: bool = option(
        "--ignore-eos", help="Answers go on to their full length. Not every server can do that.",
        default=False, panel=SERVER,
    )
    extra_body: str | None = option(
        "--extra-body",
        help='More fields of each request, such as \'{"top_k": 20}\', in place of ours; null takes one out. [greedy answers]',
        panel=SERVER, metavar="JSON",
    )
    timeout: float = option(
        "--timeout", help=f"Most seconds for one request. [{TIMEOUT:g}]",
        default=TIMEOUT, panel=SERVER, metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much is asked, and when."""

    num_prompts: int = option(
        "--num-prompts", help=f"How many requests. [{NUM_PROMPTS}]", default=NUM_PROMPTS, panel=LOAD, metavar="N"
    )
    request_rate: str = option(
        "--request-rate", help="Requests a second; inf sends all at once. Several between commas are a run each. [inf]",
        default="inf", panel=LOAD, metavar="R,…",
    )
    burstiness: float = option(
        "--burstiness",
        help="Shape of the gamma distribution of gaps: 1 is a Poisson process, less comes in bursts, more is even. [1]",
        default=1.0, panel=LOAD, metavar="SHAPE",
    )
    ramp_up: float = option(
        "--ramp-up", help="Seconds in which the rate grows from nothing. [0]",
        default=0.0, panel=LOAD, metavar="SECONDS",
    )
    max_concurrency: str | None = option(
        "--max-concurrency",
        help="Most requests at a time; others wait. Several between commas are a run each. [any number]",
        panel=LOAD, metavar="N,…",
    )
    warmup: int = option(
        "--warmup", help=f"Requests beforehand that do not count. [{WARMUP}]", default=WARMUP, panel=LOAD, metavar="N"
    )
    seed: int = option(
        "-s", "--seed", help="Of the made-up prompts and of the gaps. [0]", default=0, panel=LOAD, metavar="N"
    )


@dataclass(frozen=True, slots=True)
class ServeOutputOptions(SummaryOutputOptions):
    """What is told."""

    goodput: list[str] | None = option(
        "--goodput", help="Goals in milliseconds that a good request keeps to: ttft:200,tpot:50,e2el:5000. Repeatable.",
        panel=OUTPUT, metavar="NAME:MS",
    )


@expand
def bench_serve(
    *,
    ctx: typer.Context,
    server: ServerOptions,
    load: LoadOptions,
    dataset: DatasetOptions,
    output: ServeOutputOptions,
    messages: MessageOptions,
) -> None:
    """Measure how an OpenAI-compatible server does under load.

    Requests are sent when a schedule made beforehand says so, whatever became of those before them. Figures are those of vLLM's
    own benchmark: throughput, and the time to the first token (TTFT), per further token (TPOT), between tokens (ITL) and to the
    whole answer (E2EL). A request's time begins before it connects; each has a connection of its own. Answers are greedy.
    Ctrl-C reports what is done until then. Exits with 1 where no request succeeded.
    """
    screen = screen_for(messages)
    with signals.insisting():
        from nanovllm_cli.bench import serve
        from nanovllm_cli.bench.machine import this_machine
    plans = _plans(load, output)
    if all(math.isinf(plan.request_rate) for plan in plans):
        if is_typed(ctx, "burstiness"):
            raise UsageError("--burstiness has no meaning where all requests are sent at once", "give --request-rate too")
        dataset.refuse_seed(ctx)
    target = _target(server)
    if load.num_prompts < 1 or load.warmup < 0:
        raise UsageError("--num-prompts takes a number from 1 on, --warmup one from 0 on")
    workload = dataset.workload(load.num_prompts + load.warmup, seed=load.seed)
    target.body(workload.requests[0])
    output.check()
    if not target.model:
        target = replace(target, model=serve.find_model(target))
        screen.say(f"model: {target.model}")
    screen.announce("warming up")
    serve.warm_up(target, workload, load.warmup)
    machine = this_machine(_without_key(sys.argv[1:]))
    results: list[Summary] = []
    interrupted: BaseException | None = None
    for plan in plans:
        progress = ProgressLine(screen)
        progress.stage(_title(plan), load.num_prompts, "requests")
        outcome = serve.measure(target, workload, plan, machine, skip=load.warmup, tick=progress.advance)
        screen.status("")
        results.append(outcome.summary)
        _tell(outcome, output, screen)
        interrupted = outcome.interrupted
        if interrupted is not None:
            break
    write_results(results, output, screen)
    if interrupted is not None:
        raise interrupted
    if not any(each.metrics["completed"] for each in results):
        raise RequestError("no request succeeded", f"look at {target.server.url}, --model and --endpoint")


def _target(options: ServerOptions) -> Target:
    from nanovllm_cli.bench.serve_client import Target
    from nanovllm_cli.client.http import Server

    extra = {}
    if options.extra_body is not None:
        extra = parsers.json_object("--extra-body", options.extra_body, """for example: --extra-body '{"top_k": 20}'""")
    return Target(
        Server.at(options.url),
        options.endpoint,
        options.model or "",
        options.api_key or os.environ.get("OPENAI_API_KEY") or None,
        options.ignore_eos,
        extra,
        options.timeout,
    )


def _without_key(words: list[str]) -> list[str]:
    """The command line as results may tell it."""
    shown = [re.sub(r"^(--api-key=).*", r"\1...", word, flags=re.DOTALL) for word in words]
    return ["..." if i and words[i - 1] == "--api-key" else word for i, word in enumerate(shown)]


def _plans(load: LoadOptions, output: ServeOutputOptions) -> list[Plan]:
    """One for each rate and each limit of concurrency."""
    from nanovllm_cli.bench.metrics import goals_of
    from nanovllm_cli.bench.serve import Plan
    from nanovllm_cli.bench.serve_client import schedule

    goals = goals_of(word for words in output.goodput or () for word in words.replace(",", " ").split())
    wanted = percentiles(output.percentiles)
    limits = [None] if load.max_concurrency is None else numbers("--max-concurrency", load.max_concurrency)
    if any(limit is not None and not limit.is_integer() for limit in limits):
        raise UsageError("--max-concurrency takes whole numbers")
    rates = numbers("--request-rate", load.request_rate)
    for rate in rates:
        schedule(2, rate, burstiness=load.burstiness, ramp_up=load.ramp_up)  # refuses what makes no sense
    return [
        Plan(
            rate, None if limit is None else int(limit), load.burstiness, load.ramp_up, load.seed, wanted, goals
        )
        for rate in rates for limit in limits
    ]  # fmt: skip


def _title(plan: Plan) -> str:
    rate = "all at once" if math.isinf(plan.request_rate) else f"{plan.request_rate:g} requests/s"
    return rate + (f", at most {plan.max_concurrency} under way" if plan.max_concurrency else "")


def _tell(outcome: Outcome, output: ServeOutputOptions, screen: Console) -> None:
    from nanovllm_cli.bench.serve_report import serve_table

    if output.output == "md":
        screen.answer(serve_table(outcome.summary) + "\n")
    for remark in outcome.remarks:
        screen.say(remark)
    for error, count in outcome.failures[:_MOST_FAILURES_SHOWN]:
        screen.say(f"{count} failed: {error}")
