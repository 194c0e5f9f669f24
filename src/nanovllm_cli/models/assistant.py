"""An assistant: a small model that guesses for a large one, out of what that one keeps (Gemma 4's, Google 2026).

Its layers have queries alone: they attend to the keys and values of the large model's last layer of their kind, with a window or
without. It reads the large model's embedding of the token that was drawn last, beside what the large model made of the token
before it, and gives what stands in for that where it reads its own guess. However many it guesses in a row, its queries stand
where the first of these tokens does.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm_cli.attention.backend import Angles
from nanovllm_cli.batch import Batch
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.ops import Addend, Hidden, side_by_side
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.rope_spec import RopeSpec

_OF_ITS_OWN = "an assistant guesses for the model that it was made with; name that one"


def assistant_spec(own: ModelSpec, width: int, model: ModelSpec) -> ModelSpec:
    """`own`, what the assistant's config says, with layers that read those of `model`, which `AttentionSpec.reads` then counts.
    width: of the rows that the assistant was made to read. UnsupportedError where it was made for another model."""
    if width != model.hidden_size or own.vocab_size != model.vocab_size:
        theirs = f"{model.vocab_size:,} tokens and rows of {model.hidden_size}"
        raise UnsupportedError(
            f"the assistant is made for {own.vocab_size:,} tokens and rows of {width}; the model has {theirs}", _OF_ITS_OWN
        )
    kept = {mixer.window is None: i for i, mixer in enumerate(model.mixers)
            if isinstance(mixer, AttentionSpec) and mixer.reads is None and mixer.latent is None}  # fmt: skip
    blocks = []
    for block in own.blocks:
        attention = block.mixer
        assert isinstance(attention, AttentionSpec), "no assistant has others"
        place = kept.get(attention.window is None)
        its = None if place is None else model.mixers[place]
        heads = attention.num_kv_heads, attention.head_dim
        if place is None or not isinstance(its, AttentionSpec) or (its.num_kv_heads, its.head_dim) != heads:
            wanted = f"{heads[0]} heads of {heads[1]}"
            raise UnsupportedError(f"the model keeps no {wanted} that the assistant could read", _OF_ITS_OWN)
        blocks.append(replace(block, mixer=replace(attention, reads=place, keys_are_values=False)))
    return replace(own, blocks=tuple(blocks), max_position=model.max_position, tied_head=True)


class Assistant(Decoder):
    """join([embedding of the token, hidden row of the token before]) through blocks and a norm; the head gives its logits, and
    back its hidden rows, which are like the model's, as its last norm leaves them.

    spec: see `assistant_spec`.
    """

    reads_hidden = True

    def __init__(self, spec: ModelSpec, kit: Kit, model: Decoder) -> None:
        super().__init__(spec, kit)
        self._model = model
        width = model.spec.hidden_size
        self._join = Linear(2 * width, {"join": spec.hidden_size}, kit)
        self._back = Linear(spec.hidden_size, {"back": width}, kit)

    def slots(self) -> Slots:
        return super().slots() | self._back.slots() | self._join.slots()

    def enter(self, batch: Batch) -> tuple[torch.Tensor, Addend | None]:
        assert batch.hidden is not None
        embedded, _ = self._model.enter(replace(batch, images=None))
        return self._join(side_by_side(embedded, batch.hidden, self.ops)), None

    def angles(self, batch: Batch) -> dict[RopeSpec | None, Angles]:
        """Of the places behind the batch's, which are those of the last tokens that are kept."""
        return super().angles(replace(batch, positions=batch.positions + 1))

    def no_rows(self, count: int) -> torch.Tensor:
        return self._model.no_rows(count)

    def normed(self, hidden: Hidden) -> torch.Tensor:
        return self._back(super().normed(hidden))
