"""Phi-3, Phi-3.5 and Phi-4 (text): q, k and v are one tensor, and so are gate and up; some rotate a part of each head."""

from __future__ import annotations

from nanovllm_cli.models.family import Family

PHI3 = Family(
    "phi3",
    qkv_bias=False,
    has_window=True,
    fused_qkv=True,
    fused_mlp=True,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
