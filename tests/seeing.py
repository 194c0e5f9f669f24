"""A model that reads images, with a tokenizer and a chat template: tiny and random, by transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engines import SMALL, random_model, save
from test_llm import write_byte_tokenizer

WORDS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
FIRST = 256  # their ids are behind those of bytes
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def seeing_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen3-VL: bytes are tokens, a token of an image has 8 x 8 pixels, and an image 4 to 64 tokens."""
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    config: Any = Qwen3VLConfig(
        text_config=SMALL | {
            "vocab_size": FIRST + len(WORDS), "head_dim": 32, "max_position_embeddings": 1024, "eos_token_id": FIRST + 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": SMALL["hidden_size"], "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=FIRST + 3, video_token_id=FIRST + 5, vision_start_token_id=FIRST + 2, vision_end_token_id=FIRST + 4,
    )  # fmt: skip
    save(random_model(config, seed, dtype, AutoModelForImageTextToText), folder)
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": sizes, "patch_size": 4, "merge_size": 2}))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[1], chat_template=TEMPLATE)
    return folder


def png(width: int = 24, height: int = 16, seed: int = 0) -> bytes:
    """An image's file, of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def kimi_as_published(folder: Path) -> None:
    """A Kimi K2.5 that transformers has saved: with names that it changes when it reads them, and not back when it writes."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers.")
        .replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
        .replace("model.mm_projector.", "mm_projector."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def kimi_vl(source: Path, folder: Path, **settings: Any) -> Path:
    """The same tower and text as a Kimi-VL's folder has them. settings: of images."""
    folder.mkdir()
    names = {"mm_projector.pre_norm": "multi_modal_projector.pre_norm", "mm_projector.proj.0": "multi_modal_projector.linear_1",
             "mm_projector.proj.2": "multi_modal_projector.linear_2"}  # fmt: skip
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        tensors[f"{names.get(module, module)}.{kind}"] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    vision = config["vision_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "merge_kernel_size")
    own = {key: vision[key] for key in kept} | {"model_type": "moonvit"}
    own |= {f"init_pos_emb_{side}": vision[f"pos_emb_{side}"] for side in ("height", "width")}
    for key in ("projection_layer_norm_eps", "projection_hidden_size"):
        config.pop(key)
    config |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "vision_config": own}
    (folder / "config.json").write_text(json.dumps(config))
    said = {"patch_size": vision["patch_size"], "pad_input": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(said | settings))
    return folder


def siglip_2s_patches(values: list[torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """Of images one below the other, of which the smaller are filled up; a pixel's colours behind each other."""
    shapes = torch.tensor([[value.shape[1] // side, value.shape[2] // side] for value in values])
    patches = torch.zeros(len(values), int(shapes.prod(1).max()), 3 * side**2)
    mask = torch.zeros(patches.shape[:2], dtype=torch.int32)
    for i, (value, (lines, columns)) in enumerate(zip(values, shapes.tolist(), strict=True)):
        flat = value.view(3, lines, side, columns, side).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        patches[i, : len(flat)], mask[i, : len(flat)] = flat, 1
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def packed_patches(values: list[torch.Tensor], side: int) -> dict[str, torch.Tensor]:
    """Of images [3, height, width], behind each other, as a MiniCPM-V's tower takes them."""
    patches, sizes = [], []
    for value in values:
        lines, columns = (each // side for each in value.shape[1:])
        parts = value.reshape(3, lines, side, columns, side).permute(0, 2, 1, 3, 4)
        patches.append(parts.reshape(3, side, -1))
        sizes.append([lines, columns])
    return {"pixel_values": torch.cat(patches, dim=-1)[None], "target_sizes": torch.tensor(sizes, dtype=torch.int32)}


def hunyuan_as_published(model: Any) -> Any:
    """transformers' model with two things as Tencent's code, vLLM's and llama.cpp have them: both halves of a rotary pair turn by
    the same position, and a tower's positions are stretched by a tenth of a patch more."""
    rope, embeddings = model.model.language_model.rotary_emb, model.model.vision_tower.embeddings

    def divided(freq: torch.Tensor) -> torch.Tensor:
        parts = [part[axis] for axis, part in enumerate(freq.split(rope.mrope_section, dim=-1))]
        return torch.cat(parts * 2, dim=-1)

    def stretched(like: torch.Tensor, height: int, width: int) -> torch.Tensor:
        edge = embeddings.position_edge
        table = embeddings.position_embedding.weight[1:].view(1, edge, edge, -1).permute(0, 3, 1, 2).float()
        scales = (int(height) + 0.1) / edge, (int(width) + 0.1) / edge
        made = torch.nn.functional.interpolate(table, scale_factor=scales, mode="bilinear", align_corners=False)
        return made.permute(0, 2, 3, 1).flatten(1, 2).to(like.dtype)

    rope.recomposition_frequencies, embeddings.interpolate_pos_encoding = divided, stretched
    return model
