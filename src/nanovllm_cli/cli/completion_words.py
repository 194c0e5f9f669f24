"""What can stand behind a flag or as an argument, for completion: by its name in the help, or for one flag of a command.

Lists are typed again here, because the modules that own them import torch and a shell asks for its script at every start;
`tests/test_completions.py` holds them against their owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.cli.command_tree import Page, Parameter
from nanovllm_cli.weights.shapes import SHAPES

Kind = Literal["nothing", "words", "files", "folders", "models", "cached-models", "sessions"]

FORMATS = (
    "int8", "int8-weight-only", "fp8", "fp8:block=128", "fp8-weight-only", "int4", "int4:group=32", "int4-weight-only", "int3",
    "int2", "nf4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
)  # fmt: skip
MIXES = ("q2_k_m", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m")
TEMPLATES = (
    "alpaca", "chatml", "deepseek-v3.2", "deepseek-v4", "gemma", "got-ocr", "llama2", "llama3", "mistral", "paligemma", "phi3",
    "plain", "rwkv", "vicuna", "zephyr",
)  # fmt: skip
CACHE_TYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")
OUTTYPES = (
    "auto", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q1_0", "q2_0",
    "tq1_0", "tq2_0", "mxfp4",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Values:
    """kind: what the shell offers, besides `words`."""

    kind: Kind
    words: tuple[str, ...] = ()


def values(root: Page, command: Page, parameter: Parameter) -> Values:
    """What can be completed for a parameter of a command that takes a value."""
    if parameter.choices:
        return Values("words", parameter.choices)
    for key in (f"{command.name} {parameter.name}", parameter.value.removesuffix(",…")):
        if key in _VALUES:
            return _VALUES[key]
    if parameter.value == "KEY":
        return Values("words", tuple(dict.fromkeys(str(each.key) for page in root.every() for each in page.settings)))
    if parameter.value == "COMMAND":
        return Values("words", tuple(page.name for page in root.every() if page.settings))
    return Values("nothing")


_VALUES: dict[str, Values] = {
    "MODEL": Values("models"),
    "OTHER": Values("models"),
    "FILE": Values("files"),
    "PATH": Values("files"),
    "PATH:SCALE": Values("files"),
    "FILE:SCALE": Values("files"),
    "NAME=PATH": Values("files"),
    "FOLDER": Values("folders"),
    "JSON|@FILE": Values("files"),
    "TEXT|@FILE": Values("files"),
    "NAME|FILE": Values("files", TEMPLATES),
    "DEVICE": Values("words", ("auto", "cpu", "cuda", "cuda:0")),
    "FORMAT": Values("words", FORMATS),
    "quantize to": Values("words", (*FORMATS, *MIXES)),
    "quantize head": Values("words", ("keep", *FORMATS)),
    "quantize embedding": Values("words", ("keep", *FORMATS)),
    "TYPE": Values("words", CACHE_TYPES),
    "convert outtype": Values("words", OUTTYPES),
    **dict.fromkeys(
        [f"{command} random_weights" for command in ("bench", "bench.throughput", "bench.latency")],
        Values("files", tuple(SHAPES)),
    ),
    "models.rm model_word": Values("cached-models"),
    **dict.fromkeys([f"{each} api_key" for each in ("run", "chat", "run-batch", "bench.serve", "serve")], Values("nothing")),
    "chat session": Values("sessions"),
    "chat delete_session": Values("sessions"),
}
