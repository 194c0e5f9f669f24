"""What may be asked of a text that draws nothing: a vector, or when its tokens are said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.model_spec import Pooled, Pooling
from nanovllm_cli.vision_spec import PlacedImage, TokenIds

_POOLED = (*get_args(Pooling), "each")
MOST_HEADS = 1 << 12
"""Whose attention is measured for one text."""


def check_pooling(
    pooling: Pooled | Alignment,
    prompt: Iterable[int],
    hearing: HearingSpec | None,
    refusal: UnsupportedError | None,
    num_processes: int,
) -> None:
    """refusal: why this model embeds nothing. Raises UnsupportedError for what it can't be asked, UsageError for what nobody
    can."""
    if isinstance(pooling, Alignment):
        _check_alignment(pooling, prompt, hearing, num_processes)
        return
    if refusal is not None:
        raise UnsupportedError(refusal.message, refusal.hint)
    if pooling not in _POOLED:
        raise UsageError(f"unknown pooling {pooling!r}", f"known: {', '.join(_POOLED)}")
    if isinstance(prompt, TokenIds) and prompt.images:
        raise UnsupportedError("texts are embedded, and no images")


def check_times(num_processes: int) -> None:
    """Raises UnsupportedError where times of words can't be told."""
    if num_processes > 1:
        raise UnsupportedError("times of words are not told where several processes compute a model", "leave -tp out")


def _check_alignment(wanted: Alignment, prompt: Iterable[int], hearing: HearingSpec | None, num_processes: int) -> None:
    if hearing is None or not hearing.leads or hearing.plain:
        told = "this model knows no times of words: it attends to no sound beside its text, or to one of any length"
        raise UnsupportedError(told, "take a Whisper")
    check_times(num_processes)
    layers, heads = hearing.decoder
    placed: PlacedImage = prompt.images[0]  # type: ignore[attr-defined]
    length = len(prompt) - placed.end  # type: ignore[arg-type]
    if not 1 <= len(wanted.heads) <= MOST_HEADS or any(
        not (0 <= layer < layers and 0 <= head < heads) for layer, head in wanted.heads
    ):
        raise UsageError(f"an alignment is by heads of the decoder, which has {layers} layers of {heads}")
    if not (0 <= wanted.before <= length - 2 and 1 <= wanted.rows <= placed.num_rows):
        raise UsageError("an alignment is of a text with its end behind what it begins with, and of rows of the sound")
