"""The bundled model `tiny` for training: Qwen3's architecture in plain torch, with Hugging Face's parameter names.

Only what training needs: whole sequences, no cache. T tokens, B sequences, H query heads, K kv heads, D head dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model. 3.8 million parameters as they stand."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on each query and key head.

    Written out, as the fused operator's backward is slower on a CPU at these lengths.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = (B, T, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        K = k.shape[1]
        q = q.reshape(B, K, -1, self.head_dim) * self.head_dim**-0.5  # [B, K, H/K * T, D]: one product a kv head
        scores = (q @ k.transpose(-1, -2)).view(B, K, -1, T, T)
        mask = torch.full((T, T), -torch.inf, dtype=scores.dtype).triu(1)
        shares = (scores + mask).softmax(-1).to(v.dtype).view(B, K, -1, T)
        y = (shares @ v).view(B, -1, T, self.head_dim)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each on a normed residual stream."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyModel(nn.Module):
    """Token ids [B, T] to final hidden states [B, T, hidden]; `logits` applies the tied head to chosen ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_positions), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # each layer starts as the identity
            elif name.endswith("_proj.weight"):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    @torch.no_grad()
    def center_embeddings(self) -> None:
        """Take the mean off all embeddings. The head does not see it; without this Adam drives rare tokens together."""
        self.embed_tokens.weight.sub_(self.embed_tokens.weight.mean(dim=0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
        cos, sin = (table[: ids.shape[1], None].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves convention: x is [B, T, heads, D], cos and sin are [T, 1, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
