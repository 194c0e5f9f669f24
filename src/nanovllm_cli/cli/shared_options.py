"""Options of several groups, which `options.py` has: adapters, control vectors, how a model sees, how it is spoken to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import ENGINE, MODEL, OUTPUT, PROMPT, typer_option
from nanovllm_cli.config import AS_TRAINED, Activations, ControlVector, EngineConfig, Lora, RopeChange
from nanovllm_cli.errors import UsageError

Choice = Literal["on", "off"]

SystemPrompt = Annotated[
    str | None, typer_option("-sys", "--system-prompt", help="What the model is told first.", panel=PROMPT, metavar="TEXT")
]
Think = Annotated[
    Choice | None,
    typer_option("--think", help="Whether the model reasons first, where its template has a switch.", panel=PROMPT),
]
ThinkUnsaid = Annotated[
    Choice | None,
    typer_option(
        "--think", help="Whether the model reasons where a request does not say, if its template has a switch.", panel=MODEL
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer_option(
        "--tool-call-parser", help="How the model writes tool calls. [what its template says]", panel=MODEL, metavar="NAME"
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer_option("--reasoning-parser", help="How it marks its reasoning. [what its template says]", panel=MODEL, metavar="NAME"),
]
TemplateKwargs = Annotated[
    str | None,
    typer_option("--chat-template-kwargs", help="More variables for the chat template.", panel=PROMPT, metavar="JSON"),
]
ActivationsChoice = Annotated[
    Activations,
    typer_option(
        "--activations",
        help="What meets a quantized weight: rounded to 8 bits where its format says so, or exact. auto: rounded, but not "
        "in float32. [auto]",
        panel=MODEL,
    ),
]
RooflineChoice = Annotated[
    Literal["cached", "measure", "off"],
    typer_option(
        "--roofline",
        help="What this machine can do at most: as kept from an earlier run, measured anew, or nothing is said of it. [cached]",
        panel=OUTPUT,
    ),
]
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
VideoFps = Annotated[
    float | None,
    typer_option(
        "--video-fps", help="Frames of a video that are taken of each second. [as the model was trained]",
        panel=ENGINE, metavar="F",
    ),
]  # fmt: skip
VideoMaxFrames = Annotated[
    int,
    typer_option(
        "--video-max-frames", help=f"Most frames that are taken of a video. [{EngineConfig().video_max_frames}]",
        panel=ENGINE, metavar="N",
    ),
]  # fmt: skip
ImageMaxTokens = Annotated[
    int,
    typer_option(
        "--image-max-tokens",
        help="Most tokens that an image, or a video's frame, is made into, where the model takes many sizes. "
        f"[{EngineConfig().image_max_tokens}]",
        panel=ENGINE, metavar="N",
    ),
]  # fmt: skip
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
ControlVectors = Annotated[
    list[str] | None,
    typer_option(
        "--control-vector",
        help="A file of llama.cpp's that leads the model into a direction: what is added behind its layers. Repeatable.",
        panel=MODEL, metavar="FILE",
    ),
]  # fmt: skip
ControlVectorsScaled = Annotated[
    list[Any] | None,
    typer_option(
        "--control-vector-scaled", help="The same, of another strength, below 0 away from there: FILE:-0.5. Repeatable.",
        panel=MODEL, metavar="FILE:SCALE", parser=parsers.scaled_vector,
    ),
]  # fmt: skip
ControlVectorLayers = Annotated[
    tuple[int, int] | None,
    typer_option(
        "--control-vector-layer-range",
        help="The first and the last layer behind which control vectors are added, counted from 0; 0 itself has none. [all]",
        panel=MODEL, metavar="FIRST LAST",
    ),
]  # fmt: skip

RopeScaling = Annotated[
    Any,
    typer_option(
        "--rope-scaling",
        help="How positions behind those of the training are turned: none, linear, dynamic or yarn; or JSON, as config.json "
        "has it. [the model's own]",
        panel=ENGINE, metavar="KIND", parser=parsers.rope_scaling,
    ),
]  # fmt: skip
RopeScale = Annotated[
    float | None,
    typer_option("--rope-scale", help="How many times as far as it was trained to; linear where no kind is named.", panel=ENGINE),
]
RopeFreqBase = Annotated[
    float | None, typer_option("--rope-freq-base", help="Base of rotary angles. [the model's own]", panel=ENGINE)
]
YarnOrigCtx = Annotated[
    int | None,
    typer_option(
        "--yarn-orig-ctx", help="What yarn stretches, in tokens. [what it was trained for]",
        panel=ENGINE, metavar="SIZE", parser=parsers.count,
    ),
]  # fmt: skip
OverrideKv = Annotated[
    list[Any] | None,
    typer_option(
        "--override-kv",
        help="Another setting than the model's files have: of a GGUF's metadata, or of config.json. TYPE is int, float, bool or "
        "str. Repeatable.",
        panel=MODEL, metavar="KEY=TYPE:VALUE", parser=parsers.override_kv,
    ),
]  # fmt: skip
HfOverrides = Annotated[
    str | None,
    typer_option(
        "--hf-overrides", help="The same as JSON, in which objects may lie in objects.", panel=MODEL, metavar="JSON"
    ),
]  # fmt: skip


def adapters(names: Sequence[str] | None, scaled: Sequence[parsers.Scaled] | None) -> tuple[Lora, ...]:
    """Those of --lora and of --lora-scaled, each of which may name several."""
    plain = [Lora(name) for text in names or () for name in parsers.listed(text)]
    return (*plain, *(Lora(*each) for several in scaled or () for each in several))


def control_vectors(
    names: Sequence[str] | None, scaled: Sequence[parsers.Scaled] | None, layers: tuple[int, int] | None
) -> dict[str, Any]:
    """What EngineConfig has of --control-vector, --control-vector-scaled and --control-vector-layer-range."""
    plain = [ControlVector(name) for text in names or () for name in parsers.listed(text)]
    vectors = (*plain, *(ControlVector(*each) for several in scaled or () for each in several))
    return {"control_vectors": vectors, "control_vector_layers": layers}


def overrides(pairs: Sequence[parsers.Pairs] | None, text: str | None) -> dict[str, Any]:
    """Those of --override-kv, each of which may name several, and of --hf-overrides. Raises UsageError, for two of a name too."""
    said = {} if text is None else parsers.json_object("--hf-overrides", text, '{"num_experts_per_tok": 4}')
    each = [*(pair for several in pairs or () for pair in several), *said.items()]
    names = [name for name, _ in each]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UsageError(f"{twice} has two other values", "leave one of them out of --override-kv and --hf-overrides")
    return dict(each)


def rope_change(told: RopeChange | None, scale: float | None, base: float | None, original_len: int | None) -> RopeChange:
    """told: what --rope-scaling said; flags for its fields count for more."""
    told = told or AS_TRAINED
    return RopeChange(
        told.scaling,
        told.scale if scale is None else scale,
        told.base if base is None else base,
        told.original_len if original_len is None else original_len,
    )
