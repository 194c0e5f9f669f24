"""A FastViT-HD in plain torch, as timm's "fastvit_mci3" is when its branches are joined: written from the papers
(Vasu et al. 2023, 2024) and from the names and shapes of its tensors, for tests without timm. `test_tower_fastvlm.py` holds it to
timm's, where that is installed. transformers' FastVLMs see by it once this is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.fast_vlm import modeling_fast_vlm

HEAD = 32


class Joined(nn.Module):
    """A convolution that several branches were."""

    def __init__(self, before: int, after: int, side: int, stride: int = 1, *, alone: bool = True, acts: bool = True) -> None:
        super().__init__()
        groups = before if alone else 1
        self.reparam_conv = nn.Conv2d(before, after, side, stride, side // 2, groups=groups)
        self.acts = acts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.reparam_conv(x)
        return nn.functional.gelu(x) if self.acts else x


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))


class Spread(nn.Module):
    """A convolution with a norm that has seen images: some are as good as others here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.bn.running_mean = torch.linspace(-0.7, 0.9, width)
        self.bn.running_var = torch.linspace(0.3, 1.9, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        mean, variance, gain, bias = (
            each.view(1, -1, 1, 1) for each in (self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias)
        )
        return (x - mean) / (variance + 1e-5).sqrt() * gain + bias


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = Spread(width), nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(self.conv(x))))


class Heads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width]."""
        q, k, v = self.qkv(x).view(len(x), 3, -1, HEAD).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(1, 2)) / HEAD**0.5
        return self.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token_mixer, self.mlp, self.layer_scale = Joined(width, width, 3, acts=False), Inner(width), Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token_mixer(x)
        return x + self.layer_scale.gamma * self.mlp(x)


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.token_mixer, self.mlp = nn.LayerNorm(width, 1e-5), Heads(width), Inner(width)
        self.layer_scale_1, self.layer_scale_2 = Scale(width), Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.stack([self.token_mixer(self.norm(each.flatten(1).T)).T.view(each.shape) for each in x])
        x = x + self.layer_scale_1.gamma * seen
        return x + self.layer_scale_2.gamma * self.mlp(x)


class Stage(nn.Module):
    def __init__(self, before: int, width: int, depth: int, *, first: bool, attends: bool) -> None:
        super().__init__()
        self.downsample, self.pos_emb = nn.Identity(), nn.Identity()
        if not first:
            self.downsample = nn.Module()
            self.downsample.proj = nn.Sequential(Joined(before, width, 7, 2), Joined(width, width, 1, alone=False))
            self.downsample.forward = self.downsample.proj.forward
        if attends:
            self.pos_emb = Joined(width, width, 7, acts=False)
        self.blocks = nn.Sequential(*((Attending if attends else Mixing)(width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.pos_emb(self.downsample(x)))


class Weighed(Joined):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width, 3)
        self.se = nn.Module()
        self.se.fc1, self.se.fc2 = nn.Conv2d(2 * width, width // 8, 1), nn.Conv2d(width // 8, 2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.reparam_conv(x)
        weights = self.se.fc2(nn.functional.relu(self.se.fc1(x.mean((2, 3), keepdim=True))))
        return nn.functional.gelu(x * weights.sigmoid())


class FastViTHD(nn.Module):
    def __init__(self, layers: tuple[int, ...], embed_dims: tuple[int, ...]) -> None:
        super().__init__()
        first = embed_dims[0]
        self.stem = nn.Sequential(
            Joined(3, first, 3, 2, alone=False), Joined(first, first, 3, 2), Joined(first, first, 1, alone=False)
        )
        before = (first, *embed_dims)
        self.stages = nn.Sequential(*(
            Stage(before[i], width, depth, first=not i, attends=i >= 3)
            for i, (width, depth) in enumerate(zip(embed_dims, layers, strict=True))
        ))  # fmt: skip
        self.final_conv = Weighed(embed_dims[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.final_conv(self.stages(self.stem(x)))


class Wrapped(nn.Module):
    """As transformers wraps timm's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.timm_model = FastViTHD(tuple(config.model_args["layers"]), tuple(config.model_args["embed_dims"]))

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.timm_model(pixel_values))


class _Auto:
    own = modeling_fast_vlm.AutoModel

    @classmethod
    def from_config(cls, config: Any, **settings: Any) -> Any:
        return Wrapped(config) if config.model_type == "timm_wrapper" else cls.own.from_config(config, **settings)


modeling_fast_vlm.AutoModel = _Auto


def vision(**arguments: Any) -> dict[str, Any]:
    """Of a tiny one, a config's part."""
    small = {"inference_mode": True, "layers": [1, 2, 1, 2, 1], "embed_dims": [8, 16, 32, 32, 64]} | arguments
    return {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 128, "model_args": small}
