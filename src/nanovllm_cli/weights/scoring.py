"""What a reranker makes of a query and a document that it reads together: the probability of "yes" against "no".

GGUF files of Qwen3-Reranker and its like (`pooling_type` rank) have the head's two rows as `cls.output.weight`, and a prompt with
places for query and document as their chat template "rerank". Not covered: other numbers of labels, layers before these rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.tensor_names import RANKS, is_reranker

_LABELS = ["yes", "no"]
_TEMPLATE = "tokenizer.chat_template.rerank"
_QUERY, _DOCUMENT = "{query}", "{document}"


class Scoring(NamedTuple):
    """yes, no: [hidden] each. template: a text that has {query} and {document} in it, each once."""

    yes: tuple[float, ...]
    no: tuple[float, ...]
    template: str

    def prompt(self, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
        """Token ids of the two in the template. Control tokens are the template's alone."""
        text, plain = "", set[int]()
        for piece in _pieces(self.template):
            own = {_QUERY: query, _DOCUMENT: document}.get(piece)
            if own is not None:
                plain |= set(range(len(text), len(text) + len(own)))
            text += piece if own is None else own
        return tokenizer.encode_guarded(text, plain)

    def score(self, hidden: Sequence[float]) -> float:
        """Of the row [hidden] behind a prompt's last token: 0 to 1."""
        yes, no = (math.fsum(a * b for a, b in zip(row, hidden, strict=True)) for row in (self.yes, self.no))
        return 1 / (1 + math.exp(no - yes)) if yes >= no else math.exp(yes - no) / (1 + math.exp(yes - no))


def scoring_of(checkpoint: Checkpoint) -> Scoring | None:
    """None of a model that does not rank. UnsupportedError for one that does so otherwise."""
    if not is_reranker(checkpoint):
        return None
    config, arch = checkpoint.config, checkpoint.config["general.architecture"]
    template, labels = config.get(_TEMPLATE), config.get(f"{arch}.classifier.output_labels")
    hidden = config.get(f"{arch}.embedding_length")
    there = checkpoint.info(RANKS).shape if RANKS in checkpoint.names() else ()
    fits = isinstance(template, str) and template.count(_QUERY) == template.count(_DOCUMENT) == 1
    if not fits or list(labels or ()) != _LABELS or there != (2, hidden):
        raise UnsupportedError(
            f"{checkpoint.path}: a reranker that does not answer yes or no, in a prompt of its own, is not supported",
            "Qwen3-Reranker is; or take a model that embeds: /v1/rerank goes by its vectors",
        )
    assert isinstance(template, str)
    yes, no = checkpoint.tensor(RANKS).double().tolist()
    return Scoring(tuple(yes), tuple(no), template)


def _pieces(template: str) -> list[str]:
    first, second = sorted((_QUERY, _DOCUMENT), key=template.index)
    before, _, rest = template.partition(first)
    between, _, after = rest.partition(second)
    return [before, first, between, second, after]
