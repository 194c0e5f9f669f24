"""A random LoRA adapter of the bundled model, as PEFT saves one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.source import resolve


def write_adapter(folder: Path) -> Path:
    """Of some matrices, and strong enough that answers differ."""
    sides = {}
    generator = torch.Generator().manual_seed(0)
    with open_checkpoint(resolve("tiny").path) as checkpoint:
        for i in range(4):
            for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
                rows, width = checkpoint.info(f"model.layers.{i}.{part}.weight").shape
                place = f"base_model.model.model.layers.{i}.{part}"
                sides[f"{place}.lora_A.weight"] = torch.randn(2, width, generator=generator)
                sides[f"{place}.lora_B.weight"] = 0.05 * torch.randn(rows, 2, generator=generator)
    folder.mkdir()
    save_file(sides, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return folder
