"""llama.cpp's command line on vLLM's engine.

    from nanovllm_cli import LLM, SamplingParams

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing`'s, which takes longer to import than all else here

# How long idle threads of torch's OpenMP, which the kernels share, spin before they sleep: about 0.1 ms here, 3 ms by default.
# On a busy machine the default keeps a thread's own colleagues off the processor for whole time slices (1 s a token instead
# of 0.1). OpenMP reads it when torch is imported, which is why it stands here.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from typing import Any

    from nanovllm_cli.config import EngineConfig
    from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
    from nanovllm_cli.errors import NanovllmError
    from nanovllm_cli.images.source import data_url
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.sampling_params import SamplingParams
    from nanovllm_cli.text.wishes import Wishes
    from nanovllm_cli.transcribing import transcribe

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "EngineConfig", "NanovllmError", "RequestOutput", "SamplingParams", "Wishes", "data_url",
    "transcribe",
]  # fmt: skip

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "engine.outputs",
    "EngineConfig": "config",
    "NanovllmError": "errors",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "sampling_params",
    "Wishes": "text.wishes",
    "data_url": "images.source",
    "transcribe": "transcribing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if name[:1].isupper():  # `from … import` leaves out what an AttributeError says
            from nanovllm_cli.vllm_names import CLASS_HINTS

            if name in CLASS_HINTS:
                raise ImportError(f"{__name__} has no {name}: {CLASS_HINTS[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module(f"{__name__}.system")  # says it in a word where nothing here runs
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
