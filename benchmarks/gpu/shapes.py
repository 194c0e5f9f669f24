"""Real models' shapes, and a checkpoint of random weights in one of them that needs no file."""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from nanovllm_cli.weights.checkpoint import TensorInfo

STD = 0.02
"""Of matrices, as transformers initialises them."""
POOL = (1 << 24) + 127
"""Random numbers that a checkpoint is made of; a slice of a tensor begins anywhere among them."""
BF16_BYTES = 2


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

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the checkpoint's names."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        if self.has_qk_norm:
            parts |= {"self_attn.q_norm": (self.dim,), "self_attn.k_norm": (self.dim,)}
        outer = {"model.embed_tokens.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied:
            outer["lm_head.weight"] = (self.vocab, self.hidden)
        return outer | {
            f"model.layers.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in parts.items()
        }

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


SHAPES = {
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "qwen3-8b": Shape("Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 128, 151936, tied=False),
    "llama-3.2-1b": Shape(
        "LlamaForCausalLM", 16, 2048, 8192, 32, 8, 64, 128256, tied=True, max_position=131072,
        rope=(
            ("rope_type", "llama3"), ("rope_theta", 5e5), ("factor", 32.0), ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192),
        ),
    ),
    "tiny": Shape("Qwen3ForCausalLM", 2, 64, 96, 4, 2, 64, 320, tied=True, max_position=512),
}  # fmt: skip


@functools.cache
def _pool(seed: int) -> torch.Tensor:
    return torch.randn(POOL, generator=torch.Generator().manual_seed(seed))


class RandomCheckpoint:
    """A Checkpoint whose tensors are made when they are asked for, on `device`: slices of one pool of normal numbers, which is
    the same on every device. Matrices have a standard deviation of STD, norms lie around 1."""

    format: Literal["hf", "gguf"] = "hf"
    path = Path("random weights")

    def __init__(self, shape: Shape, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.config = shape.config
        self.generation_config: dict[str, Any] = {}
        self._shapes = shape.tensors()
        pool = _pool(seed)
        self._matrices = (pool * STD).to(torch.bfloat16).to(device)
        self._norms = (1 + 0.1 * pool[: 1 << 16]).to(torch.bfloat16).to(device)

    @property
    def total_bytes(self) -> int:
        return sum(self.info(name).num_bytes for name in self._shapes)

    def names(self) -> list[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        shape = self._shapes[name]
        return TensorInfo(name, shape, "BF16", math.prod(shape) * BF16_BYTES)

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        first, last = rows or (0, shape[0])
        numel = math.prod((last - first, *shape[1:]))
        source = self._matrices if len(shape) > 1 else self._norms
        begin = (zlib.crc32(name.encode()) + first * math.prod(shape[1:])) % len(source)
        parts = []
        while numel > 0:  # around the end of the pool, where the slice passes it
            parts.append(source[begin : begin + numel])
            numel -= len(parts[-1])
            begin = 0
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values.view(last - first, *shape[1:]).to(dtype or torch.bfloat16)

    def raw(self, name: str) -> torch.Tensor:
        return self.tensor(name).view(torch.uint8)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
