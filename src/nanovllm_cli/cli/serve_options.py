"""The options of `nanovllm serve`: names as llama-server has them, or vLLM where that has the better one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm_cli.cli import parsers
from nanovllm_cli.cli.command import MESSAGES, MODEL, option
from nanovllm_cli.cli.options import (
    ChatTemplateChoice,
    Device,
    DType,
    ModelNames,
    Offline,
    Quant,
    Revision,
)
from nanovllm_cli.cli.shared_options import (
    ActivationsChoice,
    ControlVectorLayers,
    ControlVectors,
    ControlVectorsScaled,
    LoraModules,
    LoraNames,
    LoraScaled,
    ReasoningParser,
    ThinkUnsaid,
    ToolCallParser,
    adapters,
    control_vectors,
)
from nanovllm_cli.config import EngineConfig, Lora, LoraModule, Policy
from nanovllm_cli.errors import UsageError

ADDRESS, ACCESS, LIMITS = "Address", "Who may ask", "Limits"
HOST, PORT = "127.0.0.1", 8080
MAX_REQUESTS = 512
DRAIN_SECONDS, IDLE_SECONDS, PING_SECONDS, SWAP_SECONDS = 30.0, 30.0, 15.0, 60.0


def _seconds(flag: str, help: str, default: float | None, without: str = "", panel: str = LIMITS) -> Any:
    """without: what it means that there is no default."""
    shown = without if default is None else f"{default:g}"
    return option(flag, help=f"{help} [{shown}]", default=default, panel=panel, metavar="SECONDS")


def _file(flag: str, help: str, panel: str = ADDRESS, metavar: str = "FILE") -> Any:
    return option(flag, help=help, panel=panel, metavar=metavar)


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """Which models, by which names, in which numbers."""

    model: ModelNames = None
    alias: list[str] | None = option(
        "-a", "--alias", "--served-model-name",
        help="What clients call the model, in place of its name; of several models, each one's in turn. Repeatable.",
        panel=MODEL, metavar="NAME", envvar="NANOVLLM_ALIAS",
    )
    max_models: int | None = option(
        "--max-models", help="Most models in memory; the one that was not asked for longest makes room. [all of them]",
        panel=MODEL,
    )
    sleep_idle: float | None = _seconds(
        "--sleep-idle",
        "Takes a model out of memory when nobody asked it for so long; the next request loads it.",
        None, "never", panel=MODEL,
    )
    swap_timeout: float = _seconds(
        "--swap-timeout",
        "With --max-models: how long a request waits until others that are in use make room for its model.",
        SWAP_SECONDS, panel=MODEL,
    )
    prompt_cache: str | None = option(
        "--prompt-cache",
        help="A folder that keeps what models have read while they are not loaded; nothing of it is read again then.",
        panel=MODEL, metavar="FOLDER",
    )
    tool_call_parser: ToolCallParser = None
    reasoning_parser: ReasoningParser = None
    revision: Revision = None
    offline: Offline = False
    dtype: DType = EngineConfig().dtype
    device: Device = "auto"
    quant: Quant = None
    lora: LoraNames = None
    lora_scaled: LoraScaled = None
    lora_modules: LoraModules = None
    control_vector: ControlVectors = None
    control_vector_scaled: ControlVectorsScaled = None
    control_vector_layer_range: ControlVectorLayers = None
    activations: ActivationsChoice = EngineConfig().activations
    chat_template: ChatTemplateChoice = None
    think: ThinkUnsaid = None
    chat_template_kwargs: str | None = option(
        "--chat-template-kwargs", help="More variables for the chat template, where a request does not set them.",
        panel=MODEL, metavar="JSON",
    )
    reasoning_budget: int | None = option(
        "--reasoning-budget", help="Most tokens of reasoning where a request does not say; 0 ends it at once. [-1: no limit]",
        panel=MODEL,
    )

    @property
    def adapters(self) -> tuple[Lora, ...]:
        return adapters(self.lora, self.lora_scaled)

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        return tuple(self.lora_modules or ())

    @property
    def vectors(self) -> dict[str, Any]:
        return control_vectors(self.control_vector, self.control_vector_scaled, self.control_vector_layer_range)

    def names(self, ids: list[str]) -> list[tuple[str, ...]]:
        """What each model is called, its own id without aliases. Raises UsageError for too few, and for the same twice."""
        aliases = [name.strip() for each in self.alias or [] for name in each.split(",")]
        if not all(name and name.isprintable() and len(name) <= 200 for name in aliases):
            raise UsageError("--alias needs names of printable characters")
        if not aliases:
            names: list[tuple[str, ...]] = [(each,) for each in ids]
        elif len(ids) == 1:
            names = [tuple(dict.fromkeys(aliases))]
        elif len(aliases) == len(ids):
            names = [(each,) for each in aliases]
        else:
            raise UsageError(f"{len(ids)} models have {len(aliases)} aliases", "one --alias for each, in their order")
        flat = [name for each in names for name in each] + [name for name, _ in self.modules if len(ids) == 1]
        if len(set(flat)) < len(flat):
            twice = next(name for name in flat if flat.count(name) > 1)
            raise UsageError(f"two models would be called {twice!r}", "give each a name by --alias, and adapters others")
        return names


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where it listens."""

    host: str = option(
        "--host", help=f"The address; beyond this machine only with --api-key. [{HOST}]", default=HOST, panel=ADDRESS
    )
    port: int = option("--port", help=f"The port; 0 takes any that is free. [{PORT}]", default=PORT, panel=ADDRESS)
    unix_socket: str | None = _file("--unix-socket", "A socket file instead, for its owner alone.", metavar="PATH")
    ssl_cert_file: str | None = _file(
        "--ssl-cert-file", "HTTPS: the certificate, PEM; one that is renewed counts at once."
    )
    ssl_key_file: str | None = _file("--ssl-key-file", "HTTPS: its key, PEM.")
    ssl_key_password_file: str | None = _file("--ssl-key-password-file", "HTTPS: the key's password.")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who gets in."""

    api_key: list[str] | None = option(
        "--api-key",
        help="A key that requests must carry; other users of this machine see it, unlike a file or the environment. "
        "Repeatable.",
        panel=ACCESS, metavar="KEY",
    )
    api_key_file: str | None = _file("--api-key-file", "Keys, one a line; what changes in it counts at once.", ACCESS)
    allowed_host: list[str] | None = option(
        "--allowed-host",
        help="A name that requests may call this machine; * is any. Repeatable. [localhost and addresses; "
        "any with keys]",
        panel=ACCESS, metavar="HOST",
    )
    cors_origin: list[str] | None = option(
        "--cors-origin",
        help="Pages from here may use the server, such as https://example.org; * is any. Repeatable. [none]",
        panel=ACCESS, metavar="ORIGIN",
    )


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How much it takes on, and what it tells."""

    parallel: int | None = option(
        "-np", "--parallel", "--max-num-seqs",
        help=f"Most answers that a model works on at once. [{EngineConfig().max_num_seqs}]",
        panel=LIMITS, envvar="NANOVLLM_PARALLEL",
    )
    scheduling_policy: Policy = option(
        "--scheduling-policy",
        help="Who is worked on first: who came first, or whose request says the lowest `priority`; waiting counts, too. "
        f"[{EngineConfig().policy}]",
        default=EngineConfig().policy, panel=LIMITS,
    )
    max_requests: int = option(
        "--max-requests", help=f"Most requests under way; more are told to come back. [{MAX_REQUESTS}]",
        default=MAX_REQUESTS, panel=LIMITS,
    )
    max_body: int | None = option(
        "--max-body", help="Largest request. [16M; 64M where a model reads images or hears]",
        panel=LIMITS, metavar="SIZE", parser=parsers.memory,
    )
    timeout: float | None = _seconds("--timeout", "Longest time for one request.", None, "no limit")
    idle_timeout: float = _seconds("--idle-timeout", "How long a connection may lie idle.", IDLE_SECONDS)
    drain_timeout: float = _seconds(
        "--drain-timeout", "How long answers may go on after SIGTERM or Ctrl-C.", DRAIN_SECONDS
    )
    ping_interval: float = _seconds(
        "--ping-interval", "How long a stream is silent before it is pinged.", PING_SECONDS
    )
    access_log: bool = option(
        "--access-log/--no-access-log", help="A line for each request on stderr. [on]", default=True, panel=MESSAGES
    )
    otlp_endpoint: str | None = option(
        "--otlp-endpoint", help="Sends OpenTelemetry spans to this collector; needs the extra otel.",
        panel=MESSAGES, metavar="URL",
    )
