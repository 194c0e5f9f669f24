"""The perplexity of a text, in windows as llama-perplexity has them, so that its numbers and these can be held side by side.

    window      ctx_size tokens of the text, the next window the next ones; what is left at the end is no window
    BOS         what the tokenizer puts before a text stands in place of a window's first tokens
    scored      a window's tokens behind number ctx_size / 2 (from 0), so that each has half a window before it; or, of whole
                windows, all that have any: so does the quality card
    perplexity  exp of the mean of -log p(token) over all that are scored; its error as in quality.py

Two models are compared over the same windows by card.measure; two that embed or rank, over passages, by card.measure_vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, RequestError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quantization.card import LOGIT_ROWS, measure, measure_vectors, parts
from nanovllm_cli.quantization.logits import MeasuredModel
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.passages import Cut, embeds, reading_of
from nanovllm_cli.quantization.quality import Likelihood, Perplexity, Quality
from nanovllm_cli.quantization.texts import NamedText
from nanovllm_cli.quantization.vector_quality import Pooled
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint

LEAST_CTX_SIZE = 8


@dataclass(frozen=True, slots=True)
class Windows:
    """ids: of each, equally many. first: the token of a window behind which it is scored."""

    ids: Sequence[Sequence[int]]
    first: int

    @property
    def scored(self) -> int:
        """Tokens."""
        return sum(len(window) - 1 - self.first for window in self.ids)


def text_ids(tokenizer: Tokenizer, text: NamedText, *, parse_special: bool = False) -> list[int]:
    """Its tokens, with what the tokenizer puts before them, and nothing behind. One newline at the end, which files have, is left
    out, as llama-perplexity does. parse_special: control tokens written in the text are what they name; there they are not."""
    ids = tokenizer.encode(text.text.removesuffix("\n"), add_special_tokens=False, parse_special=parse_special)
    return [*tokenizer.prefix_ids, *ids]


def cut(
    ids: Sequence[int], prefix: Sequence[int], ctx_size: int, *, most: int | None = None, whole: bool = False
) -> Windows:
    """ids: of the text, those in front too. prefix: what stands at the beginning of each window. most: windows. Raises UsageError
    for a text that is too short for one."""
    if ctx_size < max(LEAST_CTX_SIZE, 2 * len(prefix)):
        raise UsageError(f"a window of {ctx_size} is too short to score a token of it", f"take {LEAST_CTX_SIZE} at least")
    count = len(ids) // ctx_size if most is None else min(most, len(ids) // ctx_size)
    if count == 0:
        tokens = "1 token" if len(ids) == 1 else f"{len(ids):,} tokens"
        raise UsageError(f"the text has {tokens}, and a window {ctx_size:,}", "give a longer text, or a smaller --ctx-size")
    starts = range(0, count * ctx_size, ctx_size)
    first = max(len(prefix) - 1, 0) if whole else ctx_size // 2
    return Windows([[*prefix, *ids[start + len(prefix) : start + ctx_size]] for start in starts], first)


def check_fits(windows: Windows, spec: ModelSpec) -> None:
    """Raises CheckpointError and DoesNotFitError for a model that has no such tokens, or no such positions, UsageError for tokens
    that it has no probability of."""
    largest, ctx_size = max(map(max, windows.ids)), len(windows.ids[0])
    if largest >= spec.vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, and the model has {spec.vocab_size} of them",
            "the folder mixes files of different models",
        )
    scored = max(max(window[windows.first + 1 :]) for window in windows.ids)
    if scored >= spec.num_drawn:
        raise UsageError(f"the text has token {scored}, which the model reads and never writes", "leave such tokens out")
    if ctx_size > spec.max_position:
        raise DoesNotFitError(
            f"a window has {ctx_size:,} tokens, and the model's context {spec.max_position:,}", "take a smaller --ctx-size"
        )


def check_alike(ids: Sequence[int], others: Sequence[int], spec: ModelSpec, other: ModelSpec) -> None:
    """Raises UsageError for two models that do not say the same tokens, given the ids that each makes of a text."""
    check_same_ids(ids, others)
    if (spec.vocab_size, spec.num_drawn) != (other.vocab_size, other.num_drawn):
        raise UsageError(
            f"one model has {spec.vocab_size} tokens and the other {other.vocab_size}: their probabilities can't be compared",
            "name two forms of one model",
        )


def check_same_ids(ids: Sequence[int], others: Sequence[int]) -> None:
    """Raises UsageError where two models read other ids of a text."""
    if list(ids) != list(others):
        pairs = enumerate(zip(ids, others, strict=False))
        at = next((i for i, (one, two) in pairs if one != two), min(len(ids), len(others)))
        raise UsageError(
            f"the two tokenizers cut the text otherwise, first at token {at}: {ids[at : at + 3]} … and {others[at : at + 3]} …",
            "name two forms of one model; nanovllm verify says what differs",
        )


def perplexity(
    model: MeasuredModel, windows: Windows, progress: LoadProgress, told: Callable[[Perplexity], None] | None = None
) -> Perplexity:
    """told: hears what it is so far, before progress hears of the windows. Raises RequestError where logits are no numbers."""
    found = Likelihood()
    progress.stage("reading the text", sum(map(len, windows.ids)), "tokens")
    for part in parts(windows.ids, model.at_once):
        rows = model.scored(part, windows.first)
        targets = torch.tensor([token for window in part for token in window[windows.first + 1 :]])
        for at in range(0, len(targets), LOGIT_ROWS):
            found.add(model.logits(rows[at : at + LOGIT_ROWS]), targets[at : at + LOGIT_ROWS])
        so_far = found.perplexity()
        if not so_far.is_finite:
            raise _not_finite()
        if told is not None:
            told(so_far)
        progress.advance(sum(map(len, part)))
    progress.done()
    return so_far


def compare(
    original: Checkpoint, other: Checkpoint, windows: Windows, progress: LoadProgress, config: EngineConfig
) -> Quality:
    """What `other` has lost: see card.measure. Raises RequestError where logits are no numbers."""
    quality = measure(original, other, windows.ids, progress, first=windows.first, config=config)
    if not quality.is_finite:
        raise _not_finite()
    return quality


def by_vectors(one: Original, other: Original) -> bool:
    """Whether two models are compared by vectors of texts, or scores of pairs, and not by probabilities. UsageError where one of
    them has no other than these, and the other none."""
    if embeds(one.checkpoint, one.spec) and embeds(other.checkpoint, other.spec):
        return True
    lacking = [each.name for each in (one, other) if not each.spec.has_head]
    if lacking:
        raise UsageError(f"{lacking[0]} embeds or ranks, and the other model writes text", "name two forms of one model")
    return False


def compare_vectors(
    one: Original, other: Original, text: NamedText, cut: Cut, progress: LoadProgress, config: EngineConfig
) -> Pooled:
    """What `other` has lost: see card.measure_vectors. UsageError for models that read other tokens, or of which one
    embeds and the other ranks; RequestError where vectors are no numbers."""
    hint = "give a longer text, or another --ctx-size"
    readings = [reading_of(each.checkpoint, each.spec, each.tokenizer(), text, cut, hint) for each in (one, other)]
    if (readings[0].scoring is None) != (readings[1].scoring is None):
        raise UsageError("one model makes vectors and the other scores", "name two forms of one model")
    check_same_ids(*([token for ids in reading.ids for token in ids] for reading in readings))
    if readings[0].classes != readings[1].classes:
        raise UsageError("the two models have other labels", "name two forms of one model")
    found = measure_vectors(one.checkpoint, other.checkpoint, readings[0], progress, config)
    if not found.is_finite:
        raise _not_finite("vectors")
    return found


def _not_finite(what: str = "logits") -> RequestError:
    return RequestError(f"the model's {what} are not finite numbers", "in --dtype float32 they may be; else the model is broken")
