"""What a model that ranks reads of a query and a document, and the score that its head's numbers are (`heads.py`).

    GGUF        the chat template "rerank", a text with places for both, of Qwen3-Reranker and its like
    template    a Jinja template with messages of the roles "query" and "document", as vLLM and sentence-transformers have them:
                the folder's own, or the one that is given
    otherwise   decoders: both texts one behind the other. They are the prompt, so control tokens in them are read as such.
                encoders: the tokenizer's pair of texts

Control tokens in texts that a template is around stay text. Not covered: prompts by name (sentence-transformers' `prompts`).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.heads import DOCUMENT, QUERY, Outcome, head_of
from nanovllm_cli.weights.pooling import Embedding

Pair = Callable[[Tokenizer, str, str], list[int]]
"""Token ids of a query and a document that no template is around."""

SecondText = Callable[[Sequence[int]], int]
"""Where the second text of such ids begins, or 0."""

_FOR_ROLES = "a reranker's template has them; leave --chat-template out for the model's own way"
_ROLES = [re.compile(rf"""(["']){role}\1""") for role in ("query", "document")]


class Scoring(NamedTuple):
    """template: a text that has {query} and {document} in it, each once. chat: a template of messages. pair: without these."""

    outcome: Outcome
    pair: Pair
    template: str | None = None
    chat: ChatTemplate | None = None

    def prompt(self, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
        """Token ids of what the model reads of the two. Raises TemplateError where its template fails."""
        if self.chat is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return encode_chat(tokenizer, self.chat, messages)
        if self.template is None:
            return self.pair(tokenizer, query, document)
        text, plain = "", set[int]()
        for piece in _pieces(self.template):
            own = {QUERY: query, DOCUMENT: document}.get(piece)
            if own is not None:
                plain |= set(range(len(text), len(text) + len(own)))
            text += piece if own is None else own
        return tokenizer.encode_guarded(text, plain)

    def fitting(self, tokenizer: Tokenizer, query: str, document: str, limit: int) -> list[int]:
        """The same, with as much of the document's beginning as fits into `limit` tokens. Longer where none of it does."""

        def size(count: int) -> int:
            return len(self.prompt(tokenizer, query, document[:count]))

        count = bisect.bisect_right(range(1, len(document) + 1), limit, key=size)
        return self.prompt(tokenizer, query, document[:count])

    def margin(self, numbers: Sequence[float]) -> float:
        """Of what the head gave: the score before the sigmoid."""
        return numbers[0] - numbers[1] if self.outcome == "yes" else numbers[0]

    def score(self, numbers: Sequence[float]) -> float:
        """Of what the head gave: 0 to 1, but where the files ask for the number itself."""
        return self.of_margin(self.margin(numbers))

    def of_margin(self, margin: float) -> float:
        """The score of what it is before the sigmoid."""
        if self.outcome == "identity":
            return margin
        return sigmoid(margin)


def scoring_of(checkpoint: Checkpoint, tokenizer: Tokenizer, chat_template: str | None = None) -> Scoring | None:
    """None of a model that does not rank. chat_template: in place of its own.

    UnsupportedError for one that does so otherwise, UsageError for a template without the two roles.
    """
    head = head_of(checkpoint)
    if head is None or not head.ranks:
        return None
    found = Scoring(head.outcome, in_a_row)
    if chat_template is not None:
        if not _speaks_of_both(chat_template):
            raise UsageError("the chat template has no messages of the roles query and document", _FOR_ROLES)
        return found._replace(chat=ChatTemplate.of(tokenizer, chat_template))
    if head.template is not None:
        return found._replace(template=head.template)
    own = tokenizer.chat_templates.get("default", "")
    if _speaks_of_both(own):
        return found._replace(chat=ChatTemplate.of(tokenizer, own))
    if head.pairs and not tokenizer.reads_pairs:
        raise UnsupportedError(f"{checkpoint.path}: its tokenizer makes no pairs of texts", "take a reranker that is a decoder")
    return found._replace(pair=_as_pair) if head.pairs else found


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number)) if number >= 0 else math.exp(number) / (1 + math.exp(number))


def second_text_of(embedding: Embedding, tokenizer: Tokenizer, spec: ModelSpec) -> SecondText | None:
    """What finds the text that is to be marked, of a model that judges and marks one. What is embedded is one text."""
    return tokenizer.second_text if embedding.judges and spec.tells_texts_apart else None


def in_a_row(tokenizer: Tokenizer, query: str, document: str, *, parse_special: bool = True) -> list[int]:
    """Each by itself, one behind the other; what the vocabulary puts around a text is around both."""
    both = (tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special) for text in (query, document))
    around = tokenizer.encode("")
    before = len(tokenizer.prefix_ids)
    return [*around[:before], *(token_id for ids in both for token_id in ids), *around[before:]]


def _as_pair(tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    return tokenizer.encode_pair(query, document).ids


def _speaks_of_both(template: str) -> bool:
    return all(role.search(template) for role in _ROLES)


def _pieces(template: str) -> list[str]:
    first, second = sorted((QUERY, DOCUMENT), key=template.index)
    before, _, rest = template.partition(first)
    between, _, after = rest.partition(second)
    return [before, first, between, second, after]
