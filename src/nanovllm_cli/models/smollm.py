"""SmolLM3: Llama, of which every fourth layer has no positions."""

from __future__ import annotations

from nanovllm_cli.models.family import Family

SMOLLM3 = Family(
    "smollm3",
    has_window=True,
    window_switch="use_sliding_window",
    no_rope_every=4,
    interleaved_gguf=True,
    tied_by_default=True,
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "max_position_embeddings": 32768},
)
