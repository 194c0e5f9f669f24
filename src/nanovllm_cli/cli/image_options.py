"""Options of how a model sees, of all commands that load one."""

from __future__ import annotations

from typing import Annotated

from nanovllm_cli.cli.command import ENGINE, typer_option
from nanovllm_cli.config import EngineConfig

Mmproj = Annotated[
    str | None,
    typer_option(
        "-mm", "--mmproj",
        help="What a GGUF model sees or hears by: its file mmproj-….gguf, or a name on the hub. [the one beside the model]",
        panel=ENGINE, metavar="FILE",
    ),
]  # fmt: skip
MmprojAuto = Annotated[
    bool,
    typer_option(
        "--mmproj-auto/--no-mmproj",
        help="Look for what a GGUF model sees or hears by beside it, and download it with a model from the hub. [on]",
        panel=ENGINE,
    ),
]
ImageMaxTokens = Annotated[
    int,
    typer_option(
        "--image-max-tokens",
        help="Most tokens that an image is made into, where the model takes images of many sizes. "
        f"[{EngineConfig().image_max_tokens}]",
        panel=ENGINE, metavar="N",
    ),
]  # fmt: skip
