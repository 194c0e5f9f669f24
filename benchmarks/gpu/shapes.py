"""Real models' shapes as GPU benchmarks think of them, and what a step costs at the least."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.weights import random_weights, shapes
from nanovllm_cli.weights.convert_names import tensor_shapes
from nanovllm_cli.weights.random_weights import BF16_BYTES, POOL

__all__ = ["POOL", "SHAPES", "HasConfig", "RandomCheckpoint", "Shape"]


class HasConfig(Protocol):
    """A model's shape."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense model. q, k and their norms as the family has them."""

    family: Literal["Qwen3ForCausalLM", "LlamaForCausalLM"]
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    tied: bool
    max_position: int = 40960
    rope: tuple[tuple[str, Any], ...] = (("rope_type", "default"), ("rope_theta", 1e6))

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": [self.family],
            "model_type": "qwen3" if self.has_qk_norm else "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.max_position,
            "rope_parameters": dict(self.rope),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        }

    @property
    def has_qk_norm(self) -> bool:
        return self.family == "Qwen3ForCausalLM"

    @classmethod
    def known(cls, name: str) -> Shape:
        """One that the package knows by name."""
        config = shapes.SHAPES[name]
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"], **config.get("rope_scaling", {})}
        return cls(
            config["architectures"][0], config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
            config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["vocab_size"],
            config["tie_word_embeddings"], config["max_position_embeddings"], tuple(rope.items()),
        )  # fmt: skip

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the checkpoint's names."""
        family = hf_family(self.config)
        return tensor_shapes(spec_from_hf(self.config, family), family.names("hf"))

    @property
    def matrix_numbers(self) -> int:
        """Weights that every token is multiplied with: all matrices but an embedding that is not the head."""
        numbers = sum(math.prod(shape) for shape in self.tensors().values() if len(shape) > 1)
        return numbers if self.tied else numbers - self.vocab * self.hidden

    def decode_bytes(self, context: float, batch: int = 1, kv_bytes: int = BF16_BYTES) -> float:
        """The fewest bytes a decode step reads: each weight once, K and V of `context` tokens of each sequence."""
        cache = 2 * self.layers * self.kv_heads * self.dim * kv_bytes * context * batch
        return self.matrix_numbers * BF16_BYTES + cache

    def prefill_flops(self, tokens: int, sequences: int = 1) -> float:
        """Of sequences of so many tokens each, whose last token alone takes the head; causal attention counts half."""
        head = self.vocab * self.hidden
        linear = 2.0 * (self.matrix_numbers - head) * tokens + 2.0 * head
        attention = self.layers * self.heads * self.dim * 2.0 * tokens * tokens
        return sequences * (linear + attention)


SHAPES = {name: Shape.known(name) for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.2-1b")} | {
    "tiny": Shape("Qwen3ForCausalLM", 2, 64, 96, 4, 2, 64, 320, tied=True, max_position=512)
}


class RandomCheckpoint(random_weights.RandomCheckpoint):
    """Made-up weights of a Shape, on a device."""

    def __init__(self, shape: HasConfig, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__(shape.config, device, seed)
