"""MTP: a layer behind a model's own that predicts the token after the next one (multi-token prediction; DeepSeek-V3, Liu et al.
2024): of a token's embedding, and of what the model made of the token before it. Its own output stands in for the model's where
that is not there yet, so that it predicts further ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.ops import Addend, side_by_side
from nanovllm_cli.layers.embedding import Head
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder

LEAST_GUESSED = 1 << 15
SHARE_GUESSED = 3 / 8
"""Of a vocabulary, in the order of its merges: the first are the most frequent. Of Qwen2's they are 96 % of English tokens, 98 %
of code's and 75 % of those of many languages together, and a guess reads three eighths of the head (benchmarks/LOG.md)."""


def num_guessed(vocab_size: int) -> int:
    """Among so many tokens, the first, the layer guesses: of a large vocabulary a share, as its head is most of what it reads."""
    return min(vocab_size, max(LEAST_GUESSED, int(vocab_size * SHARE_GUESSED) // 128 * 128))


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """Of the layer behind a model's own: one as its last, with the attention of the last that has one."""
    assert spec.embedding_scale == spec.residual_scale == 1.0, "no model with such a layer has these"
    assert spec.head_rows == 0, "nor fewer tokens to draw"
    attention = next(mixer for mixer in reversed(spec.mixers) if isinstance(mixer, AttentionSpec))
    blocks = (replace(spec.blocks[-1], mixer=attention),)
    return replace(spec, blocks=blocks, vocab_size=num_guessed(spec.vocab_size))


class MTP(Decoder):
    """join([norm(embedding of token i), norm(hidden row of token i - 1)]) through one block and a norm of its own; embedding and
    head are the model's, or a copy of the head's first rows. Hidden rows, those it reads and those it gives, are as the model's
    last norm leaves them.

    spec: see `mtp_spec`. head_rows: of the copy; 0: there is none.
    """

    reads_hidden = True

    def __init__(self, spec: ModelSpec, kit: Kit, model: Decoder) -> None:
        super().__init__(spec, kit, model)
        width = spec.hidden_size
        self.head_rows = 0 if spec.vocab_size == model.spec.vocab_size else spec.vocab_size
        if self.head_rows:
            self.head = Head(self.head_rows, width, kit, spec.tied_head)
        self._norms = {name: RMSNorm(spec.norm, width, kit) for name in ("embedding_norm", "hidden_norm")}
        self._join = Linear(2 * width, {"join": width}, kit)

    def slots(self) -> Slots:
        slots = {name: slot for name, slot in super().slots().items() if not name.startswith(("embedding.", "head."))}
        slots |= {f"{name}.weight": norm.slots()["weight"] for name, norm in self._norms.items()}
        return slots | self._join.slots()

    def enter(self, batch: Batch) -> tuple[torch.Tensor, Addend | None]:
        assert batch.hidden is not None
        embedded = self._norms["embedding_norm"].alone(self.embedding(batch.token_ids, batch.token_table))
        return self._join(side_by_side(embedded, self._norms["hidden_norm"].alone(batch.hidden), self.ops)), None
