"""`nanovllm serve`: models behind HTTP, until a signal ends it. What goes on in it is in the room `server`."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import expand
from nanovllm_cli.cli.log import hear, screen_for
from nanovllm_cli.cli.model import chat_template, named_models, say_parts, template_kwargs
from nanovllm_cli.cli.options import EngineOptions, MessageOptions, ModelWords
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.sampling_options import AnswersOptions
from nanovllm_cli.cli.serve_options import AccessOptions, AddressOptions, LimitOptions, ServedOptions
from nanovllm_cli.cli.served import short_name, teller, told_of
from nanovllm_cli.cli.unused import refuse_typed
from nanovllm_cli.errors import OutputError, UsageError

if TYPE_CHECKING:
    from nanovllm_cli.server.listen import Listener
    from nanovllm_cli.server.messages import Facts
    from nanovllm_cli.server.served_models import ModelSettings, ServedModels
    from nanovllm_cli.server.settings import ServeSettings

EXAMPLE = "for example: nanovllm serve tiny"


@expand
def serve(
    *,
    ctx: typer.Context,
    model_word: ModelWords = None,
    model: ServedOptions,
    address: AddressOptions,
    access: AccessOptions,
    limits: LimitOptions,
    sampling: AnswersOptions,
    engine: EngineOptions,
    messages: MessageOptions,
) -> None:
    """Answer over HTTP, as OpenAI's, Anthropic's and Ollama's clients ask.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/audio/transcriptions, /v1/messages, /v1/models,
    /api/chat, /api/generate; a page to chat with at /, how it does at /status and /metrics. Ctrl-C or SIGTERM lets running
    answers finish; a second one does not.
    Sampling options are what requests get that ask for nothing else.
    """
    screen = screen_for(messages)
    if limits.access_log:
        hear("nanovllm_cli.server.logs", messages, screen)
    names = named_models(ctx.obj, [*(model_word or []), *(model.model or [])], EXAMPLE)
    if model.max_models is not None and model.max_models < 1:
        raise UsageError("--max-models must be at least 1")
    if model.sleep_idle is not None and not model.sleep_idle > 0:
        raise UsageError("--sleep-idle must be more than 0")
    if model.max_models is None:
        refuse_typed(ctx, ["swap_timeout"], "has no meaning without --max-models")
    elif model.max_models >= len(names):
        refuse_typed(ctx, ["swap_timeout"], f"has no meaning: --max-models {model.max_models} has room for all of them")
    if address.ssl_key_file is None:
        refuse_typed(ctx, ["ssl_key_password_file"], "has no meaning without --ssl-key-file")
    if messages.quiet and limits.access_log:
        refuse_typed(ctx, ["access_log"], "has no meaning with --quiet", "leave one of them out")
    if address.unix_socket is not None:
        refuse_typed(ctx, ["host", "port", "allowed_host"], "has no meaning with --unix-socket", "leave one of them out")
    if not 0 < model.swap_timeout < math.inf:
        raise UsageError("--swap-timeout must be more than 0")
    if (stray := next((name for name in names if model.modules and "=" in name and not os.path.exists(name)), None)) is not None:
        raise UsageError(f"{stray} is no model: --lora-modules takes one adapter", f"say --lora-modules {stray}")
    if len(names) > 1:
        own = ["lora", "lora_scaled", "lora_modules"]
        refuse_typed(ctx, own, "has no meaning with several models", "serve the model of the adapter alone")
        leading = ["control_vector", "control_vector_scaled", "control_vector_layer_range"]
        refuse_typed(ctx, leading, "has no meaning with several models", "serve the model of the control vector alone")
        beside = ["draft_model", "draft_quant", "mtp", "mmproj"]
        refuse_typed(ctx, beside, "has no meaning with several models", "serve one of them alone")
        spoken = ["think", "chat_template_kwargs", "reasoning_budget"]
        refuse_typed(ctx, spoken, "has no meaning with several models", "a request says it, or serve one of them alone")
    given = sampling.given()
    variables, budget = template_kwargs(ctx, model.chat_template_kwargs), model.reasoning_budget
    if budget is not None and not -1 <= budget < 2**31:
        raise UsageError("--reasoning-budget is a number of tokens, or -1 for no limit")
    config = replace(engine.config(model, max_num_seqs=limits.parallel, settings=ctx.obj), policy=limits.scheduling_policy)
    called = model.names([short_name(name) for name in names])
    template = chat_template(model.chat_template)
    screen.announce("starting the server")
    with signals.insisting():
        from nanovllm_cli.server.listen import listen
        from nanovllm_cli.server.ports import ChatDefaults
        from nanovllm_cli.server.served_models import ModelSettings
        from nanovllm_cli.weights.source import files_for, find_parts, resolve
    folder = _cache_folder(model.prompt_cache)
    settings = _settings(address, access, limits)
    listener = listen(settings)
    try:
        progress = ProgressLine(screen)
        thinking = None if model.think is None else model.think == "on"
        chat = ChatDefaults(variables, None if budget == -1 else budget)
        if len(names) > 1:  # whoever set a default did not say for which
            thinking, chat = None, ChatDefaults()
            config = replace(config, lora=(), lora_modules=(), control_vectors=(), control_vector_layers=None, draft_model=None,
                             draft_quant=None, mtp=False, mmproj=None)  # fmt: skip
        config = find_parts(config, offline=model.offline, progress=progress)
        say_parts(config, screen)
        source: dict[str, Any] = {"offline": model.offline, "revision": model.revision, "pick": files_for(config)}
        served = [
            ModelSettings(
                each,
                resolve(name, **source, progress=progress).path,
                config,
                template,
                given,
                model.tool_call_parser,
                model.reasoning_parser,
                thinking,
                chat,
                None if folder is None else folder / _kept_as(each[0]),
            )
            for name, each in zip(names, called, strict=True)
        ]
        with parsers.by_their_flags():
            _run(served, settings, listener, model, limits.otlp_endpoint, screen)
    finally:
        listener.close()


def _cache_folder(path: str | None) -> Path | None:
    """Made where it is not there. Raises UsageError and OutputError."""
    if path is None:
        return None
    folder = Path(path)
    if not path or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--prompt-cache {path!r}: not a folder", "each model has a file of its own in it")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise OutputError(f"cannot make {path}: {failure.strerror}") from failure
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write to {path}", "choose a folder that you may write to")
    return folder


def _kept_as(name: str) -> str:
    """A file's name for a model's, which no other model's has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80]
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.kv"


def _run(
    served: Sequence[ModelSettings],
    settings: ServeSettings,
    listener: Listener,
    model: ServedOptions,
    otlp_endpoint: str | None,
    screen: Console,
) -> None:
    from nanovllm_cli.constrain.pool import CheckPool
    from nanovllm_cli.server.app import create_app
    from nanovllm_cli.server.context import ServerContext
    from nanovllm_cli.server.generation import Generator
    from nanovllm_cli.server.metrics import Metrics
    from nanovllm_cli.server.observer import Observer, Observers
    from nanovllm_cli.server.run import Interrupted, serve
    from nanovllm_cli.server.served_models import ServedModels
    from nanovllm_cli.server.tracing import tracing

    metrics, traces = Metrics(), tracing(otlp_endpoint, os.environ)
    observer: Observer = metrics if traces is None else Observers([metrics, traces])
    models = ServedModels(
        served,
        max_loaded=model.max_models or len(served),
        room_seconds=model.swap_timeout,
        sleep_idle=model.sleep_idle,
        observer=observer,
        on_loading=teller(screen),
    )
    pool = CheckPool()
    app = create_app(ServerContext(settings, models, Generator(pool, observer), pool, observer, metrics))

    def on_drain(in_flight: int) -> None:
        if in_flight:
            screen.say(f"{in_flight} running; Ctrl-C again does not wait for them")

    try:
        serve(
            app,
            settings,
            listener,
            models,
            on_ready=lambda: _tell_ready(models, settings, listener, screen),
            on_drain=on_drain,
            on_end=(pool.close,),
        )
    except Interrupted as stop:
        raise (KeyboardInterrupt() if stop.is_ctrl_c else signals.Terminated(stop.signum)) from None
    finally:
        if traces is not None:
            traces.close()


def _settings(address: AddressOptions, access: AccessOptions, limits: LimitOptions) -> ServeSettings:
    from nanovllm_cli.server.keys import KeyFile
    from nanovllm_cli.server.settings import ServeSettings

    return ServeSettings(
        host=address.host,
        port=address.port,
        unix_socket=address.unix_socket,
        tls_certificate=address.ssl_cert_file,
        tls_key=address.ssl_key_file,
        tls_password_file=address.ssl_key_password_file,
        api_keys=tuple(dict.fromkeys(access.api_key or ())),
        key_file=None if access.api_key_file is None else KeyFile(access.api_key_file),
        allowed_hosts=tuple(access.allowed_host or ()),
        cors_origins=tuple(origin.lower().removesuffix("/") for origin in access.cors_origin or ()),
        max_body_bytes=limits.max_body,
        max_requests=limits.max_requests,
        request_seconds=limits.timeout,
        idle_seconds=limits.idle_timeout,
        drain_seconds=limits.drain_timeout,
        ping_seconds=limits.ping_interval,
    )


def _tell_ready(models: ServedModels, settings: ServeSettings, listener: Listener, screen: Console) -> None:
    screen.status("")
    for card in models.cards():
        engine = models.engines().get(card.id)
        facts = None if engine is None else engine.facts
        if facts is not None:
            screen.say(told_of(card.id, facts), "dim")
        elif card.context_len is None:
            screen.say(f"{card.id}: loaded when it is asked for", "dim")
    screen.say(f"listening at {listener.url}")
    first = models.cards()[0].id
    asked = _asked(first, models.engines()[first].facts, completes=models.is_without_template(first))
    screen.say(_example(settings, listener, *asked), "dim")


def _asked(name: str, facts: Facts | None, *, completes: bool) -> tuple[str, list[str]]:
    """What a model is for: a path, and curl's words for what is sent there. completes: it has no template for conversations."""
    if facts is not None and facts.hearing is not None and facts.hearing.leads:
        return "audio/transcriptions", ["-F", f"model={name}", "-F", "file=@talk.wav"]
    path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if facts is not None and not facts.has_head:
        judges = "spans" if facts.pooling == "each" else "classify"
        path = "rerank" if facts.ranks else judges if facts.classifies else "embeddings"
        asked = '"query": "Hello", "documents": ["Hi"]' if facts.ranks else '"input": "Hello"'
    elif completes:
        path, asked = "completions", '"prompt": "Hello"'
    return path, ["-H", "Content-Type: application/json", "-d", f'{{"model": "{name}", {asked}}}']


def _example(settings: ServeSettings, listener: Listener, path: str, asked: list[str]) -> str:
    """A line to copy."""
    at = listener.url
    words = ["curl"]
    if settings.unix_socket is not None:
        words += ["--unix-socket", str(listener.unix_path)]
        at = "http://localhost"
    line = shlex.join([*words, f"{at}/v1/{path}"])
    if settings.needs_key:
        line += ' -H "Authorization: Bearer $KEY"'
    return f"{line} {shlex.join(asked)}"
