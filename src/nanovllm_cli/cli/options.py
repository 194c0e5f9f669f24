"""The options that commands share, in groups. A default that a dataclass of the library has is read from there, not
typed again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import ENGINE, MESSAGES, MODEL, option, typer_option
from nanovllm_cli.cli.output import console
from nanovllm_cli.cli.settings import Settings
from nanovllm_cli.cli.shared_options import (
    ActivationsChoice,
    ControlVectorLayers,
    ControlVectors,
    ControlVectorsScaled,
    HfOverrides,
    ImageMaxTokens,
    LoraNames,
    LoraScaled,
    Mmproj,
    MmprojAuto,
    OverrideKv,
    RopeFreqBase,
    RopeScale,
    RopeScaling,
    VideoFps,
    VideoMaxFrames,
    YarnOrigCtx,
    adapters,
    control_vectors,
    overrides,
    rope_change,
)
from nanovllm_cli.config import DRAFTED_TOKENS, MTP_TOKENS, DTypeName, EngineConfig, Lora, LoraModule
from nanovllm_cli.errors import UsageError
from nanovllm_cli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm_cli.cli.serve_options import ServedOptions


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            known = version("nanovllm-cli")
        except PackageNotFoundError:
            known = "(not installed)"
        console().out.write(f"nanovllm {known}\n")
        raise typer.Exit


def default_of(cls: type[SamplingParams] | type[EngineConfig], name: str) -> str:
    """What a field is where nobody says: for the help."""
    value = next(field.default for field in dataclasses.fields(cls) if field.name == name)
    return f"{value:g}" if isinstance(value, float) else str(value)


def of_same_name(cls: type[SamplingParams] | type[EngineConfig], *groups: object) -> dict[str, Any]:
    """Fields of `cls` that are options of these groups, by what they say."""
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: getattr(group, name) for group in groups for name in names if hasattr(group, name)}


_A_MODEL = "A path, org/repo[:quant][@revision], or a short name; or -m."
ModelWord = Annotated[str | None, typer.Argument(metavar="MODEL", help=_A_MODEL)]
ModelWords = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=_A_MODEL)]

Revision = Annotated[
    str | None, typer_option("--revision", help="Branch, tag or commit on the hub. [main]", panel=MODEL, metavar="REV")
]
Offline = Annotated[bool, typer_option("--offline", help="Use only what is on this machine.", panel=MODEL)]
DType = Annotated[
    DTypeName, typer_option("--dtype", help=f"What it computes in. [{default_of(EngineConfig, 'dtype')}]", panel=MODEL)
]
Device = Annotated[
    str,
    typer_option("--device", help="auto, cpu, cuda, cuda:N. [auto]", panel=MODEL, parser=parsers.device, metavar="DEVICE"),
]
Quant = Annotated[
    str | None,
    typer_option(
        "--quant",
        help="Round plain weights while loading: int8, fp8, int4[:group=N], nf4, q4_k, … [as they are stored]",
        panel=MODEL, metavar="FORMAT",
    ),
]  # fmt: skip
ChatTemplateChoice = Annotated[
    str | None,
    typer_option(
        "--chat-template",
        help="A built-in template's name, a Jinja file or what would be in one, instead of the model's own.",
        panel=MODEL, metavar="NAME|FILE",
    ),
]  # fmt: skip
Deterministic = Annotated[
    bool, typer_option("--deterministic", help="An answer never depends on what else is computed with it.", panel=ENGINE)
]


ModelName = Annotated[
    str | None,
    typer_option(
        "-m", "--model",
        help="A path, org/repo[:quant][@revision], or a short name, in place of the first argument.",
        panel=MODEL, metavar="MODEL",
    ),
]  # fmt: skip
ModelNames = Annotated[
    list[str] | None,
    typer_option(
        "-m", "--model",
        help="A path, org/repo[:quant][@revision], or a short name, beside the arguments. Repeatable.",
        panel=MODEL, metavar="MODEL",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which model, from where."""

    model: ModelName = None
    revision: Revision = None
    offline: Offline = False


@dataclass(frozen=True, slots=True)
class WeightsOptions(SourceOptions):
    """Which model, from where, in which numbers."""

    dtype: DType = EngineConfig().dtype
    device: Device = "auto"
    quant: Quant = None
    activations: ActivationsChoice = EngineConfig().activations

    @property
    def adapters(self) -> tuple[Lora, ...]:
        """None, where there are no options for them."""
        return ()

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """Of adapters that requests choose. As above."""
        return ()

    @property
    def vectors(self) -> dict[str, Any]:
        """Of control vectors, by EngineConfig's names. As above."""
        return {}


@dataclass(frozen=True, slots=True)
class AdaptedOptions(WeightsOptions):
    """Which model, from where, in which numbers, with which adapters and control vectors."""

    lora: LoraNames = None
    lora_scaled: LoraScaled = None
    control_vector: ControlVectors = None
    control_vector_scaled: ControlVectorsScaled = None
    control_vector_layer_range: ControlVectorLayers = None

    @property
    def adapters(self) -> tuple[Lora, ...]:
        return adapters(self.lora, self.lora_scaled)

    @property
    def vectors(self) -> dict[str, Any]:
        return control_vectors(self.control_vector, self.control_vector_scaled, self.control_vector_layer_range)


@dataclass(frozen=True, slots=True)
class ModelOptions(AdaptedOptions):
    """The same, and how it is spoken to."""

    chat_template: ChatTemplateChoice = None


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How much memory, how many tokens at once."""

    ctx_size: int | None = option(
        "-c", "--ctx-size",
        help="Longest prompt plus answer in tokens, such as 25.6k or 32K. [what the model was made for]",
        panel=ENGINE, metavar="SIZE", parser=parsers.count,
    )
    rope_scaling: RopeScaling = None
    rope_scale: RopeScale = None
    rope_freq_base: RopeFreqBase = None
    yarn_orig_ctx: YarnOrigCtx = None
    override_kv: OverrideKv = None
    hf_overrides: HfOverrides = None
    batch_size: int | None = option(
        "-b", "--batch-size",
        help=f"Most tokens in one step of the engine. [{default_of(EngineConfig, 'max_num_batched_tokens')}]",
        panel=ENGINE, metavar="SIZE", parser=parsers.count,
    )
    kv_cache: int | None = option(
        "--kv-cache", help="Memory for the KV cache, such as 512M or 1.5G. [what fits, no more than needed]",
        panel=ENGINE, metavar="SIZE", parser=parsers.memory,
    )
    kv_cache_dtype: str = option(
        "--kv-cache-dtype",
        help="What the KV cache is kept as: auto (what it computes in), int8 (or q8_0) or fp8; both take half. [auto]",
        default=EngineConfig().kv_cache_dtype, panel=ENGINE, metavar="TYPE", parser=parsers.cache_type,
    )
    cache_type_k: str | None = option(
        "-ctk", "--cache-type-k", help="The same for keys alone. [--kv-cache-dtype]",
        panel=ENGINE, metavar="TYPE", parser=parsers.cache_type,
    )
    cache_type_v: str | None = option(
        "-ctv", "--cache-type-v", help="The same for values alone. [--kv-cache-dtype]",
        panel=ENGINE, metavar="TYPE", parser=parsers.cache_type,
    )
    gpu_memory_utilization: float = option(
        "--gpu-memory-utilization",
        help="Share of a GPU's memory for weights, KV cache and one step. "
        f"[{default_of(EngineConfig, 'gpu_memory_utilization')}]",
        default=EngineConfig().gpu_memory_utilization, panel=ENGINE, metavar="SHARE",
    )
    n_gpu_layers: int | None = option(
        "-ngl", "--n-gpu-layers", "--gpu-layers",
        help="On a GPU: how many layers, the last ones, have their weights there; the head counts as one. It reads all others "
        "from the machine's memory. A number, or all. [auto: as many as fit]",
        panel=ENGINE, metavar="N", parser=parsers.layers,
    )
    n_cpu_moe: int = option(
        "-ncmoe", "--n-cpu-moe",
        help="On a GPU: of so many layers, the first ones, the experts are read from the machine's memory. "
        "[as few as do not fit]",
        default=EngineConfig().n_cpu_moe, panel=ENGINE, metavar="N",
    )
    cpu_moe: bool = option("-cmoe", "--cpu-moe", help="The same of all layers.", default=False, panel=ENGINE)
    threads: int | None = option("-t", "--threads", help="CPU threads. [-1: one a core; of a Mac, one a fast core]", panel=ENGINE)
    tensor_parallel_size: int = option(
        "-tp", "--tensor-parallel-size",
        help="Processes that compute the model together, each with its part of weights and KV cache: on a GPU each, from the one "
        "that --device names on, or beside a memory each of a computer with several (NUMA). "
        f"[{default_of(EngineConfig, 'tensor_parallel_size')}]",
        default=EngineConfig().tensor_parallel_size, panel=ENGINE,
    )

    @parsers.by_their_flags()
    def config(self, model: WeightsOptions | ServedOptions, *, max_num_seqs: int | None = None) -> EngineConfig:
        """The engine's settings. Raises UsageError."""
        given = of_same_name(EngineConfig, model, self) | model.vectors | {
            "lora": model.adapters,
            "lora_modules": model.modules,
            "max_model_len": None if self.ctx_size in (0, -1) else self.ctx_size,
            "rope": rope_change(self.rope_scaling, self.rope_scale, self.rope_freq_base, self.yarn_orig_ctx),
            "overrides": overrides(self.override_kv, self.hf_overrides),
            "max_num_batched_tokens": self.batch_size,
            "kv_cache_bytes": self.kv_cache,
            "n_gpu_layers": None if self.n_gpu_layers == -1 else self.n_gpu_layers,
            "n_cpu_moe": parsers.ALL_LAYERS if self.cpu_moe else self.n_cpu_moe,
            "threads": None if self.threads == -1 else self.threads,
            "max_num_seqs": max_num_seqs,
        }
        return EngineConfig(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class EngineOptions(MemoryOptions):
    """How much memory, how many tokens at once, and how steps are run."""

    eager: bool = option(
        "--eager", help="On a GPU: launch every kernel, record no step as a graph.", default=False, panel=ENGINE
    )
    programmatic_launch: bool = option(
        "--programmatic-launch/--no-programmatic-launch",
        help="On a GPU from 9.0 up: start kernels before the one ahead ends. [on]",
        default=EngineConfig().programmatic_launch, panel=ENGINE,
    )
    deterministic: Deterministic = False
    speculate: int = option(
        "--speculate",
        help="Guess up to N tokens a step by what followed the same words before. What is said stays the same (on a GPU but for "
        "near-ties, without --deterministic), and comes sooner where texts repeat themselves. "
        f"[0; {DRAFTED_TOKENS} with --draft-model, {MTP_TOKENS} with --mtp]",
        default=EngineConfig().num_speculative_tokens, panel=ENGINE, metavar="N",
    )
    draft_model: str | None = option(
        "--draft-model",
        help="A smaller model of the same vocabulary, a Gemma 4's assistant or an EAGLE-3 drafter, which guesses what the large "
        "one then looks at all at once. What is said stays the same.",
        panel=ENGINE, metavar="MODEL",
    )
    draft_quant: str | None = option(
        "--draft-quant", help="Round the draft model's weights, as --quant does.", panel=ENGINE, metavar="FORMAT"
    )
    mtp: bool = option(
        "--mtp",
        help="The model's own layer for further tokens guesses, where it has one (multi-token prediction: Qwen3.5, Qwen3-Next, "
        "GLM-4.5, DeepSeek-V3 and others of these). What is said stays the same.",
        default=False, panel=ENGINE,
    )
    draft_min_p: float = option(
        "--draft-min-p",
        help=f"The least probability of a token that --draft-model or --mtp guesses. [{EngineConfig().draft_min_p:g}]",
        default=EngineConfig().draft_min_p, panel=ENGINE, metavar="P",
    )
    mmproj: Mmproj = None
    mmproj_auto: MmprojAuto = EngineConfig().mmproj_auto
    image_max_tokens: ImageMaxTokens = EngineConfig().image_max_tokens
    video_fps: VideoFps = None
    video_max_frames: VideoMaxFrames = EngineConfig().video_max_frames

    @parsers.by_their_flags()
    def config(
        self, model: WeightsOptions | ServedOptions, *, max_num_seqs: int | None = None, settings: object = None
    ) -> EngineConfig:
        """The engine's settings. settings: whose aliases a draft model may be named by. Raises UsageError."""
        draft = self.draft_model
        if draft is not None and isinstance(settings, Settings):
            draft = settings.resolve(draft)
        config = MemoryOptions.config(self, model, max_num_seqs=max_num_seqs)
        return dataclasses.replace(config, draft_model=draft, num_speculative_tokens=self.speculate)


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """What is said on stderr and in logs."""

    quiet: bool = option("-q", "--quiet", help="Only errors on stderr.", default=False, panel=MESSAGES)
    verbose: int = option(
        "-v", "--verbose", help="More on stderr; -vv for everything.", default=0, panel=MESSAGES, count=True
    )
    log_file: str | None = option("--log-file", help="Appends the log to this file.", panel=MESSAGES, metavar="FILE")
    log_json: bool = option("--log-json", help="One JSON object a line in the log.", default=False, panel=MESSAGES)
    debug: bool = option("--debug", help="Tracebacks with errors.", default=False, panel=MESSAGES)
    version: bool = option(
        "--version", help="The version, and nothing else.",
        default=False, panel=MESSAGES, envvar=None, is_eager=True, callback=print_version,
    )


def refuse_both(**flags: bool) -> None:
    """Raises UsageError where two flags were given that cannot both have an effect."""
    given = ["--" + name.rstrip("_").replace("_", "-") for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} cannot be used together")
