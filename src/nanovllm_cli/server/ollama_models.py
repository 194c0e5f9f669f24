"""Models as Ollama's clients list them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.fim import fills_in
from nanovllm_cli.server.ollama_answers import timestamp
from nanovllm_cli.server.ollama_prompts import thinks
from nanovllm_cli.server.ports import LATEST, EngineState, ModelAbout, Models
from nanovllm_cli.server.schemas_ollama import OPTION_NAMES

_LOADED = (EngineState.READY, EngineState.STUCK, EngineState.RESTARTING)
_FOREVER_SECONDS = 2**63 / 1e9
"""From now on: what Ollama says of models that stay."""
_OFF = SamplingParams()

logger = logging.getLogger(__name__)


async def about_all(models: Models, names: Iterable[str]) -> list[ModelAbout]:
    """Those whose files can be read. One after another: a tokenizer takes a quarter of a second."""
    told = []
    for name in names:
        try:
            told.append(await models.about(name))
        except ApiError as error:
            logger.warning("a model is not listed: %s", error.message)
    return told


def tag(about: ModelAbout) -> Mapping[str, Any]:
    """An entry of /api/tags."""
    more = {"context_length": _context_len(about), "embedding_length": about.files.hidden_size}
    return {
        "name": about.id,
        "model": about.id,
        "modified_at": timestamp(about.files.modified),
        "size": about.files.num_bytes,
        "digest": about.files.digest,
        "details": _details(about) | more,
        "capabilities": capabilities(about),
    }


def running(about: ModelAbout) -> Mapping[str, Any] | None:
    """An entry of /api/ps; None for a model that is not loaded."""
    facts = about.facts
    if facts is None or about.state not in _LOADED:
        return None
    size = facts.weight_bytes + facts.kv_bytes
    return {
        "name": about.id,
        "model": about.id,
        "size": size,
        "digest": about.files.digest,
        "details": _details(about),
        "expires_at": timestamp(time.time() + _FOREVER_SECONDS if about.sleeps is None else about.sleeps),
        "size_vram": size if facts.device != "cpu" else 0,
        "context_length": facts.context_len,
    }


def shown(about: ModelAbout) -> Mapping[str, Any]:
    """The answer to /api/show. There are no Modelfiles here."""
    files, architecture = about.files, about.files.architecture
    return {
        "parameters": _parameters(about.text.default_params),
        "template": "" if about.text.chat_template is None else about.text.chat_template.source,
        "details": _details(about),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": about.id.removesuffix(LATEST),
            "general.parameter_count": files.num_parameters,
            f"{architecture}.context_length": _context_len(about),
            f"{architecture}.embedding_length": files.hidden_size,
            f"{architecture}.block_count": files.num_layers,
        },
        "capabilities": capabilities(about),
        "modified_at": timestamp(files.modified),
    }


def capabilities(about: ModelAbout) -> list[str]:
    text, files = about.text, about.files
    can = {
        "completion": files.has_head,
        "tools": files.has_head and text.chat_template is not None and "tool" in text.chat_template.source,
        "insert": files.has_head and fills_in(text.tokenizer),
        "thinking": files.has_head and thinks(text.format, text.thinking_switch),
        "vision": files.reads_images if about.facts is None else about.facts.vision is not None,
        "embedding": files.embeds,
    }
    return [name for name, is_so in can.items() if is_so]


def _context_len(about: ModelAbout) -> int:
    """What is served, as soon as that is known."""
    return about.files.context_len if about.facts is None else about.facts.context_len


def _details(about: ModelAbout) -> dict[str, Any]:
    files = about.files
    return {
        "parent_model": about.parent or "",
        "format": files.format,
        "family": files.architecture,
        "families": [files.architecture],
        "parameter_size": _parameter_size(files.num_parameters),
        "quantization_level": files.stored,
    }


def _parameter_size(count: int) -> str:
    """As Ollama writes it: 7.6B, 494.03M, 260K."""
    for limit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= limit:
            return f"{count / limit:.{0 if count % limit == 0 else digits}f}{letter}"
    return str(count)


def _parameters(params: SamplingParams) -> str:
    """Defaults that change anything, a line each."""
    changed = (field for field in OPTION_NAMES if getattr(params, field) != getattr(_OFF, field))
    said = [(OPTION_NAMES[field], getattr(params, field)) for field in changed]
    said += [("stop", f'"{text}"') for text in params.stop]
    return "\n".join(f"{name:<30} {value}" for name, value in said)
