"""The Typer application: all commands in one place, for `app.main`, for the manual pages and for completions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nanovllm_cli.cli import (
    bench,
    bench_compare,
    bench_latency,
    bench_serve,
    bench_throughput,
    chat,
    classify,
    completion,
    config,
    control_vector,
    convert,
    embed,
    models,
    perplexity,
    plan,
    quantize,
    redact,
    run,
    run_batch,
    serve,
    tokenize,
    verify,
)
from nanovllm_cli.cli.command import Command, DefaultGroup, Group, SettinglessCommand, group
from nanovllm_cli.cli.habits import is_habit
from nanovllm_cli.cli.options import print_version
from nanovllm_cli.errors import UsageError

PROGRAM = "nanovllm"
ORDER = (
    "run", "chat", "embed", "classify", "redact", "serve", "run-batch", "bench", "models", "plan", "tokenize", "convert",
    "quantize", "perplexity", "verify", "control-vector", "config", "completion",
)  # fmt: skip


class Program(Group):
    """All commands, in the order in which a person meets them; Typer would put groups last."""

    def __init__(self, *, name: str | None = None, commands: Any = None, **attributes: Any) -> None:
        super().__init__(name=name, commands=commands, **attributes)
        self.commands = {name: self.commands.pop(name) for name in ORDER} | dict(self.commands)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag = args[0].split("=")[0] if args else ""
        known = {name for command in self.commands.values() for param in command.params for name in param.opts}
        own = ("-h", "--help", "--version", "--usage", "-V")  # the last two are peers' names of them
        if flag.startswith("-") and flag not in own and (flag in known or is_habit(flag)):
            raise UsageError(f"{flag} stands before any command", f"the command comes first: nanovllm run {flag} …")
        return super().parse_args(ctx, args)


def build() -> typer.Typer:
    app = group(
        "Run language models on this machine.",
        Program,
        name=PROGRAM,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_program)
    app.command("run", cls=Command)(run.run)
    app.command("run-batch", cls=Command)(run_batch.run_batch)
    app.command("chat", cls=Command)(chat.chat)
    app.command("embed", cls=Command)(embed.embed)
    app.command("classify", cls=Command)(classify.classify)
    app.command("redact", cls=Command)(redact.redact)
    app.command("serve", cls=Command)(serve.serve)
    app.add_typer(models.build())
    app.command("plan", cls=Command)(plan.plan)
    app.command("tokenize", cls=Command)(tokenize.tokenize)
    app.command("convert", cls=Command)(convert.convert)
    app.command("quantize", cls=Command)(quantize.quantize)
    app.command("perplexity", cls=Command)(perplexity.perplexity)
    app.command("verify", cls=Command)(verify.verify)
    app.command("control-vector", cls=Command)(control_vector.control_vector)
    benchmarks = group("Measure speed.", DefaultGroup)
    benchmarks.command("bench", cls=Command)(bench.bench)
    benchmarks.command("throughput", cls=Command)(bench_throughput.bench_throughput)
    benchmarks.command("latency", cls=Command)(bench_latency.bench_latency)
    benchmarks.command("serve", cls=Command)(bench_serve.bench_serve)
    benchmarks.command("compare", cls=Command)(bench_compare.bench_compare)
    app.add_typer(benchmarks, name="bench")
    app.add_typer(config.build(), name="config")
    app.command("completion", cls=SettinglessCommand)(completion.completion)
    return app


def _program(
    version: Annotated[
        bool, typer.Option("--version", help="The version, and nothing else.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    pass
