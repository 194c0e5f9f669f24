"""A Perception Encoder in plain torch, as timm's "vit_pe_core_…" are without pooling: written from the paper (Bolya et al. 2025)
and from the names and shapes of its tensors, for tests without timm. `test_tower_perception.py` holds it to timm's, where that is
installed. transformers' Perception LMs see by it once this is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.perception_lm import modeling_perception_lm

HEADS, PATCH = 16, 14
GIANT = "vit_pe_core_gigantic_patch14_448"
LARGE = "vit_pe_core_large_patch14_336"


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """angles [rows, half a head]: of numbers that are side by side, read as a complex one."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = [torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn for each in (q, k)]
        q, k = (torch.view_as_real(each).flatten(-2) for each in pairs)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, gain: float | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.attn, self.mlp = _Attention(width), _Mlp(width, inner)
        self.gamma_1, self.gamma_2 = (None if gain is None else nn.Parameter(torch.full((width,), gain)) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        seen = self.attn(self.norm1(x), angles)
        x = x + (seen if self.gamma_1 is None else self.gamma_1 * seen)
        made = self.mlp(self.norm2(x))
        return x + (made if self.gamma_2 is None else self.gamma_2 * made)


class _Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH, bias=False)


class PerceptionEncoder(nn.Module):
    def __init__(
        self, architecture: str, embed_dim: int, depth: int, img_size: tuple[int, int], init_values: float | None = None,
        use_post_transformer_norm: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.side, self.leads = img_size[0] // PATCH, architecture == LARGE
        self.patch_embed = _Patches(embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if self.leads else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2 + self.leads, embed_dim))
        self.norm_pre = nn.LayerNorm(embed_dim, eps=1e-5)
        inner = 4 * embed_dim if self.leads else int(embed_dim * 8960 / 1536)
        self.blocks = nn.ModuleList([_Block(embed_dim, inner, init_values) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-5) if use_post_transformer_norm else nn.Identity()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm_pre(x + self.pos_embed)
        each = x.shape[-1] // HEADS // 4
        slow = 1e4 ** -(torch.arange(each) / each)
        line, column = (torch.arange(self.side).repeat_interleave(self.side), torch.arange(self.side).repeat(self.side))
        angles = torch.cat([(column + self.leads)[:, None] * slow, (line + self.leads)[:, None] * slow], dim=1)
        angles = torch.cat([torch.zeros(int(self.leads), 2 * each), angles])
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


class Wrapped(nn.Module):
    """As transformers wraps timm's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.timm_model = PerceptionEncoder(config.architecture, **config.model_args)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.timm_model(pixel_values))


class _Auto:
    own = modeling_perception_lm.AutoModel

    @classmethod
    def from_config(cls, config: Any, **settings: Any) -> Any:
        return Wrapped(config) if config.model_type == "timm_wrapper" else cls.own.from_config(config, **settings)


modeling_perception_lm.AutoModel = _Auto


def vision(architecture: str = LARGE, side: int = 56, **arguments: Any) -> dict[str, Any]:
    """Of a tiny one, a config's part."""
    lines = side // PATCH
    small = {"depth": 2, "embed_dim": 128, "global_pool": "", "img_size": [side, side], "init_values": 0.1,
             "ref_feat_shape": [lines, lines], "use_post_transformer_norm": False} | arguments  # fmt: skip
    return {"model_type": "timm_wrapper", "architecture": architecture, "model_args": small}
