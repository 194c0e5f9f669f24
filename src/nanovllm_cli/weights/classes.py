"""What a model that tells classes reads of a text, and what its head's numbers say of its labels (`heads.py`).

    a text      as its tokenizer has it, what the vocabulary puts around it included
    two texts   encoders: the tokenizer's pair, as those that judge whether one follows from the other are taught it; decoders:
                one behind the other

Control tokens that are written in texts stay text: what is judged has no say in it. Token ids are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.heads import Shares, head_of
from nanovllm_cli.weights.scoring import in_a_row, sigmoid


class Classification(NamedTuple):
    """probs: of each of a model's labels, in their order, or numbers that are not probabilities yet. label: of the largest."""

    label: str
    probs: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class Classes(NamedTuple):
    """labels: in their order. shares: what their numbers become. pairs: whether two texts are a pair of the tokenizer's. each:
    whether they are of each token, and not of a text."""

    labels: tuple[str, ...]
    shares: Shares
    pairs: bool = False
    each: bool = False

    @property
    def exclusive(self) -> bool:
        """Whether a text has one label alone."""
        return self.shares == "softmax"

    def prompt(self, tokenizer: Tokenizer, text: str, second: str | None = None) -> list[int]:
        """Token ids of what the model reads. UnsupportedError where it is an encoder, and its vocabulary parts no texts."""
        if second is None:
            return tokenizer.encode(text, parse_special=False)
        if self.pairs:
            return tokenizer.encode_pair(text, second).ids
        return in_a_row(tokenizer, text, second, parse_special=False)

    def of(self, numbers: Sequence[float], *, activation: bool = True) -> Classification:
        """Of what the head gave. activation: False leaves the numbers as they are."""
        probs = shares_of(numbers, self.shares if activation else "identity")
        return Classification(self.labels[max(range(len(probs)), key=probs.__getitem__)], probs)


def classes_of(checkpoint: Checkpoint) -> Classes | None:
    """None of a model without labels. Raises as `head_of`."""
    head = head_of(checkpoint)
    return None if head is None or not head.labels else Classes(head.labels, head.shares, head.pairs, head.tells_tokens)


def shares_of(numbers: Sequence[float], shares: Shares) -> tuple[float, ...]:
    if shares == "identity":
        return tuple(numbers)
    if shares == "sigmoid":
        return tuple(sigmoid(number) for number in numbers)
    largest = max(numbers)
    powers = [math.exp(number - largest) for number in numbers]
    total = math.fsum(powers)
    return tuple(power / total for power in powers)

