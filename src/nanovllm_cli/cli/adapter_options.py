"""The options that name adapters, declared once for all commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import MODEL, typer_option
from nanovllm_cli.config import Lora

LoraNames = Annotated[
    list[str] | None,
    typer_option(
        "--lora",
        help="An adapter that is added to the weights: PEFT's folder, a .gguf file, or a name on the hub. Repeatable.",
        panel=MODEL, metavar="PATH",
    ),
]  # fmt: skip
LoraScaled = Annotated[
    list[Any] | None,
    typer_option(
        "--lora-scaled", help="The same, of another strength: PATH:0.5. Repeatable.",
        panel=MODEL, metavar="PATH:SCALE", parser=parsers.scaled,
    ),
]  # fmt: skip
LoraModules = Annotated[
    list[Any] | None,
    typer_option(
        "--lora-modules",
        help="An adapter that requests may choose, and its name there; others don't have it. PATH as of --lora. Repeatable.",
        panel=MODEL, metavar="NAME=PATH", parser=parsers.lora_module,
    ),
]  # fmt: skip


def adapters(names: Sequence[str] | None, scaled: Sequence[parsers.Scaled] | None) -> tuple[Lora, ...]:
    """Those of --lora and of --lora-scaled, each of which may name several."""
    plain = [Lora(name) for text in names or () for name in parsers.listed(text)]
    return (*plain, *(Lora(*each) for several in scaled or () for each in several))
