"""Vision towers against transformers: tiny random models of each family, written as transformers writes them, and read."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fastvit
import perception_encoder
from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models import tower_attention
from nanovllm_cli.models.tower import Tower, TowerRows
from nanovllm_cli.models.tower_attention import TorchAttention
from nanovllm_cli.vision_spec import Image, VisionSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.vision import check_tower, load_tower, read_vision, vision_bytes
from seeing import hunyuan_as_published, kimi_as_published, packed_patches, siglip_2s_patches

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 4}
QWEN3 = QWEN | {"hidden_size": 40, "intermediate_size": 48, "out_hidden_size": 24, "num_position_embeddings": 25}
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48,
    "patch_size": 4, "vision_use_head": False, "layer_norm_eps": 1e-3, "model_type": "siglip_vision_model",
}  # fmt: skip
PIXTRAL = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
    "patch_size": 4, "hidden_act": "silu", "model_type": "pixtral",
}  # fmt: skip
QFORMER = {
    "model_type": "blip_2_qformer", "intermediate_size": 40, "num_hidden_layers": 1, "cross_attention_frequency": 1,
    "use_qformer_text_input": False,
}  # fmt: skip
INTERNVL = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48,
    "patch_size": 4, "layer_norm_eps": 1e-3,
}  # fmt: skip
GLM = {
    "depth": 3, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 40, "rms_norm_eps": 1e-3,
}  # fmt: skip
KIMI_TEXT = {
    "model_type": "deepseek_v3", "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "vocab_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2VL", {
        "text_config": TEXT | MROPE, "vision_config": QWEN | {"embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2},
    }),
    "qwen2_5": ("Qwen2_5_VL", {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN | {
            "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1],
        },
    }),
    "exaone": ("Exaone4_5_", {
        "text_config": TEXT | {"model_type": "exaone4"},
        "vision_config": QWEN | {
            "hidden_size": 48, "intermediate_size": 40, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1],
            "num_heads": 3, "num_key_value_heads": 1,
        },
    }),
    "qwen3": ("Qwen3VL", {"text_config": TEXT | MROPE, "vision_config": QWEN3 | {"deepstack_visual_indexes": [0, 2]}}),
    "qwen3_5": ("Qwen3_5", {
        "text_config": TEXT | {"layer_types": ["full_attention"]}, "vision_config": QWEN3,
    }),
    "gemma3": ("Gemma3", {"text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 16}),
    "mistral3": ("Mistral3", {
        "text_config": TEXT | {"model_type": "mistral", "rms_norm_eps": 1e-2}, "vision_config": PIXTRAL,
    }),
    "pixtral": ("Llava", {
        "text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL | {"patch_size": 8},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    }),
    "lighton_ocr": ("LightOnOcr", {
        "text_config": TEXT | {"model_type": "qwen3", "rms_norm_eps": 1e-2}, "vision_config": PIXTRAL,
    }),
    "ernie": ("Ernie4_5_VLMoe", {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {
            "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [8, 4], "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        },
        "vision_config": QWEN | {"hidden_size": 32, "intermediate_size": 40, "rms_norm_eps": 1e-3},
    }),
    "glm4v": ("Glm4v", {"text_config": TEXT | MROPE, "vision_config": GLM | {"out_hidden_size": 24, "image_size": 20}}),
    "glm4v_moe": ("Glm4vMoe", {
        "text_config": TEXT | MROPE | {"n_routed_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
        "vision_config": GLM | {"out_hidden_size": 24, "image_size": 28},
    }),
    "glm_ocr": ("GlmOcr", {"text_config": TEXT | MROPE, "vision_config": GLM | {"out_hidden_size": 24}}),
    "paddleocr": ("PaddleOCRVL", {
        "text_config": TEXT | MROPE,
        "vision_config": SIGLIP | {"model_type": "paddleocr_vl_vision", "num_hidden_layers": 3, "image_size": 20},
    }),
    "smolvlm": ("SmolVLM", {
        "text_config": TEXT | {"model_type": "llama"}, "scale_factor": 2, "pad_token_id": 0,
        "vision_config": SIGLIP | {"model_type": "smolvlm_vision"},
    }),
    "docling": ("GraniteDocling", {
        "text_config": TEXT | {"embedding_multiplier": 3.0}, "density_router_hidden_size": 8,
        "vision_config": {key: value for key, value in SIGLIP.items() if key not in ("model_type", "vision_use_head")}
        | {"scale_factor": 2, "out_hidden_size": 24, "deepstack_visual_indexes": [0, 2], "num_hidden_layers": 4},
    }),
    "granite4": ("Granite4Vision", {
        "text_config": TEXT | {"num_hidden_layers": 7}, "downsample_rate": "2/4", "vision_feature_select_strategy": "full",
        "vision_config": SIGLIP | {"hidden_size": 128, "num_hidden_layers": 3, "image_size": 32},
        "qformer_config": QFORMER, "deepstack_layer_map": [[-2, 0], [1, 5]], "spatial_vision_layer": -1,
        "spatial_target_layers": [1, 2, 3, 6], "image_grid_pinpoints": [[32, 64]],
    }),
    "internvl": ("InternVL", {
        "text_config": TEXT | {"model_type": "qwen2"}, "vision_config": INTERNVL | {"attention_bias": True},
    }),
    "internvl, rms": ("InternVL", {
        "text_config": TEXT | {"model_type": "qwen3"}, "downsample_ratio": 0.5,
        "vision_config": INTERNVL | {"norm_type": "rms_norm", "hidden_act": "silu", "image_size": [48, 48], "patch_size": [4, 4]},
    }),
    "qianfan": ("QianfanOCR", {"text_config": TEXT | {"model_type": "qwen3"}, "vision_config": INTERNVL}),
    "lfm2": ("Lfm2Vl", {
        "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["full_attention"]}, "downsample_factor": 2,
        "projector_hidden_size": 56,
        "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 36},
    }),
    "hunyuan": ("HunYuanVL", {
        "text_config": TEXT | {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 2, 2, 2]}},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
            "max_image_size": 28, "rms_norm_eps": 1e-3,
        },
    }),
    "minicpm": ("MiniCPMV4_6", {
        "text_config": TEXT | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"]}, "insert_layer_id": 1,
        "vision_config": SIGLIP | {"model_type": "minicpmv4_6_vision", "num_hidden_layers": 4, "image_size": 27},
    }),
    "minicpm_ocr": ("MiniCPMOcr", {
        "text_config": TEXT | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"]},
        "insert_layer_id": 0, "vision_config": SIGLIP | {"model_type": "minicpm_ocr_vision", "image_size": 28},
    }),
    "llama4": ("Llama4", {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {"num_local_experts": 2},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 48,
            "patch_size": 4, "projector_input_dim": 20, "projector_output_dim": 20, "vision_output_dim": 20,
        },
    }),
    "kimi": ("Kimi_K25", {
        "text_config": KIMI_TEXT, "projection_hidden_size": 32, "projection_layer_norm_eps": 1e-3,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
            "pos_emb_height": 5, "pos_emb_width": 5,
        },
    }),
    "videollama3": ("VideoLlama3", {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {key: value for key, value in SIGLIP.items() if key not in ("model_type", "vision_use_head")},
    }),
    "vipllava": ("VipLlava", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_feature_layer": [-2, 1, 2], "projector_layernorm_eps": 1e-3,
        "vision_config": SIGLIP | {"model_type": "clip_vision_model", "num_hidden_layers": 4},
    }),
    "janus": ("Janus", {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {key: value for key, value in SIGLIP.items() if key not in ("model_type", "vision_use_head")}
        | {"mlp_ratio": 1.5, "projection_dim": 24},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "embed_dim": 4, "num_embeddings": 8, "latent_channels": 32,
                      "num_res_blocks": 1, "image_token_embed_dim": 16, "projection_dim": 16},
    }),
    "deepseek_vl": ("DeepseekVL", {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP}),
    "hyperclovax": ("HyperCLOVAXVisionV2", {
        "text_config": TEXT | {"model_type": "hyperclovax"},
        "vision_config": QWEN | {
            "model_type": "qwen2_5_vl_vision", "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 20,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
    }),
    "got": ("GotOcr2", {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 32, "output_channels": 10, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 48,
            "patch_size": 2, "window_size": 5, "global_attn_indexes": [1], "mlp_dim": 40, "layer_norm_eps": 1e-3,
        },
    }),
    "fastvlm": ("FastVlm", {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": fastvit.vision()}),
    "perception": ("PerceptionLM", {
        "text_config": TEXT | {"model_type": "llama"}, "projector_pooling_ratio": 2,
        "vision_config": perception_encoder.vision(),
    }),
    "perception, giant": ("PerceptionLM", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_use_cls_token": False, "projector_pooling_ratio": 4,
        "vision_config": perception_encoder.vision(perception_encoder.GIANT, use_post_transformer_norm=True, init_values=None),
    }),
    "idefics2": ("Idefics2", {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": {key: value for key, value in SIGLIP.items() if key not in ("model_type", "vision_use_head")}
        | {"image_size": 20},
        "perceiver_config": {"hidden_size": 24, "resampler_n_latents": 6, "resampler_depth": 2, "resampler_n_heads": 4,
                             "resampler_head_dim": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    }),
    "ovis2": ("Ovis2", {
        "text_config": TEXT | {"model_type": "qwen2"}, "hidden_size": 24, "vocab_size": 32, "image_token_id": 20,
        "visual_indicator_token_ids": [21, 22, 23, 24, 25],
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 48,
            "patch_size": 4, "hidden_stride": 2, "vocab_size": 53, "rms_norm_eps": 1e-3,
        },
    }),
    "aya": ("AyaVision", {
        "text_config": TEXT | {"model_type": "cohere2"}, "alignment_intermediate_size": 44, "adapter_layer_norm_eps": 1e-3,
        "vision_config": SIGLIP,
    }),
    "command_a": ("Cohere2Vision", {
        "text_config": TEXT | {"model_type": "cohere2"}, "alignment_intermediate_size": 44, "vision_config": SIGLIP,
    }),
    "llava": ("Llava", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
    }),
    "llava, siglip": ("Llava", {
        "text_config": TEXT | {"model_type": "qwen2"}, "vision_config": SIGLIP | {"image_size": 50},
        "vision_feature_layer": 1, "vision_feature_select_strategy": "full",
    }),
    "lfm3": ("Lfm3Vl", {
        "text_config": TEXT | {"model_type": "lfm3", "layer_types": ["full_attention"]}, "projector_hidden_size": 56,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "patch_size": 4, "conv_kernel_size": 5, "norm_eps": 1e-3,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
    }),
}  # fmt: skip
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IN_PIECES: dict[str, dict[str, Any]] = {
    "fastvlm": HALVES | {"size": {"shortest_edge": 192}, "crop_size": {"height": 192, "width": 192}},
    "perception": HALVES | {"tile_size": 56}, "perception, giant": HALVES | {"tile_size": 56, "vision_input_type": "vanilla"},
    "idefics2": HALVES | {"size": {"shortest_edge": 16, "longest_edge": 104}},
    "ovis2": HALVES | {"size": {"height": 48, "width": 48}},
    "got": HALVES | {"size": {"height": 48, "width": 48}},
    "llama4": HALVES | {"size": {"height": 48, "width": 48}}, "kimi": HALVES | {"patch_size": 4},
    "videollama3": HALVES | {"patch_size": 4, "merge_size": 1}, "vipllava": HALVES | {"size": {"shortest_edge": 48}},
    "janus": HALVES | {"size": {"height": 48, "width": 48}}, "deepseek_vl": HALVES | {"size": {"height": 48, "width": 48}},
    "granite4": HALVES, "docling": HALVES | {"size": {"height": 48, "width": 48}, "max_patches": 6},
    "internvl": HALVES | {"size": {"height": 48, "width": 48}, "max_patches": 6},
    "qianfan": HALVES | {"size": {"height": 48, "width": 48}, "max_patches": 6},
    "internvl, rms": HALVES | {"size": {"height": 48, "width": 48}},
    "aya": HALVES | {"size": {"height": 48, "width": 48}},
    "command_a": HALVES | {"size": {"height": 48, "width": 48}, "patch_size": 6},
    "llava": HALVES | {"size": {"shortest_edge": 48}}, "llava, siglip": HALVES | {"size": {"height": 50, "width": 50}},
    "minicpm": {"scale_resolution": 64}, "minicpm_ocr": {"scale_resolution": 64},
    "smolvlm": {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}, "lfm2": {"tile_size": 512},
}  # fmt: skip
"""Settings of image processors that cut images."""
CELL = 8
CELLS = {"gemma3": 12, "minicpm": 16, "fastvlm": 64, "perception": 28, "perception, giant": 56} | dict.fromkeys(
    ("llava", "llava, siglip", "idefics2", "videollama3", "vipllava", "janus", "deepseek_vl"), 4
)
FREE_SIZES = [(8, 8), (24, 40), (40, 16), (32, 32)]
SIZES = {"minicpm": [(16, 16), (48, 80), (80, 32), (64, 64)], "gemma3": [(48, 48)],
         "llama4": [(48, 48)], "vipllava": [(48, 48)], "janus": [(48, 48)], "deepseek_vl": [(48, 48)],
         "videollama3": [(4, 4), (24, 40), (44, 16)], "perception": [(56, 56)], "perception, giant": [(56, 56)],
         "idefics2": [(16, 16), (100, 20), (24, 40)],  # 25 patches begin where the table's do, but for rounding
         "aya": [(48, 48)], "command_a": [(48, 48)], "llava": [(48, 48)], "llava, siglip": [(48, 48)],
         "smolvlm": [(48, 48)], "docling": [(48, 48)], "internvl": [(48, 48)], "qianfan": [(48, 48)], "internvl, rms": [(48, 48)],
         "granite4": [(32, 32)], "got": [(48, 48)], "ovis2": [(48, 48)], "fastvlm": [(64, 64), (128, 320), (192, 192)],
         "mistral3": FREE_SIZES[1:],  # transformers fails with a Mistral 3's image of one token
         "lighton_ocr": FREE_SIZES[1:]}  # fmt: skip

Rows = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True)
class Made:
    """A folder, and what transformers makes of an image of uint8 [height, width, 3]."""

    folder: Path
    rows: Callable[[np.ndarray], Rows]


def make(name: str, folder: Path) -> Made:
    prefix, settings = MADE[name]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # larger than transformers draws them: all of the tower is to be seen in what it makes
        width = math.prod(parameter.shape[1:])
        drawn = torch.randn(parameter.shape, generator=generator) / (width**0.5 if parameter.dim() > 1 else 4)
        is_gain = parameter.dim() == 1 and bool((parameter == 1).all())
        parameter.data = drawn + 1 if is_gain else drawn
    model.save_pretrained(folder)
    if name == "kimi":
        kimi_as_published(folder)
    model = hunyuan_as_published(model) if name == "hunyuan" else model
    if name in IN_PIECES:
        (folder / "preprocessor_config.json").write_text(json.dumps(IN_PIECES[name]))
    else:
        images = image_processor(name)
        images.save_pretrained(folder)

    def rows(pixels: np.ndarray) -> Rows:
        if name in IN_PIECES:
            values = torch.from_numpy(pixels).permute(2, 0, 1) / 255 * 2 - 1
            if name.startswith("minicpm"):
                with torch.no_grad():
                    return model.model.get_image_features(**packed_patches([values], CELL // 2)).pooler_output[0], []
            if name == "llama4":
                with torch.no_grad():
                    return model.multi_modal_projector(model.get_image_features(values[None]).last_hidden_state[0]), []
            if name in ("kimi", "videollama3"):
                lines, columns = (side // (CELL // 2) for side in pixels.shape[:2])
                cut = values.unfold(1, CELL // 2, CELL // 2).unfold(2, CELL // 2, CELL // 2).permute(1, 2, 0, 3, 4).flatten(0, 1)
                sizes = {"image_merge_sizes": torch.ones(1, dtype=torch.int64)} if name == "videollama3" else {}
                with torch.no_grad():
                    found = model.model.get_image_features(
                        cut if name == "kimi" else cut.flatten(1), torch.tensor([[1, lines, columns]]), **sizes
                    )
                return found.pooler_output[0], []
            if name == "vipllava":
                with torch.no_grad():
                    found = model.model.get_image_features(values[None], vision_feature_layer=model.config.vision_feature_layer)
                return found.pooler_output[0], []
            if name == "granite4":  # of one square, which is the first of all
                all_of_it = {"vision_feature_select_strategy": "full"}
                with torch.no_grad():
                    made = model.model.get_image_features(values.expand(1, 3, -1, -1, -1), torch.tensor([[32, 64]]), **all_of_it)
                alone = {before: each[0][:16] for before, each in made.deepstack_features}
                return alone.pop(0), list(alone.values())
            if name == "docling":  # whose decoder multiplies them
                with torch.no_grad():
                    found = model.model.get_image_features(values[None, None], torch.ones(1, 1, dtype=torch.bool))
                return found.pooler_output[0] * 3, [each[0] for each in found.deepstack_features]
            shaped = values[None, None] if name.startswith(("smolvlm", "perception", "idefics2")) else values[None]
            seen = siglip_2s_patches([values], CELL // 2) if name == "lfm2" else {"pixel_values": shaped}
            with torch.no_grad():
                found = model.model.get_image_features(**seen).pooler_output
            return found[0], []
        given = images(images=[pixels], return_tensors="pt")
        with torch.no_grad():
            if name == "gemma3":
                return model.model.get_image_features(given["pixel_values"]).pooler_output[0], []
            if name in ("mistral3", "lighton_ocr", "pixtral"):
                seen = {key: given[key] for key in ("pixel_values", "image_sizes")}
                return model.model.get_image_features(**seen).pooler_output[0], []
            if name == "paddleocr":
                return model.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output[0], []
            if name in ("hunyuan", "lfm3", "hyperclovax"):
                return model.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output[0], []
            if name == "ernie":
                return model.model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output[0], []
            found = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
            return found.pooler_output, list(getattr(found, "deepstack_features", None) or [])

    return Made(folder, rows)


def image_processor(name: str) -> Any:
    """Of images that have their size already."""
    if name == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    if name == "paddleocr":
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

        return PaddleOCRVLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1 << 14})
    if name in ("mistral3", "lighton_ocr", "pixtral"):
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        return PixtralImageProcessorPil(patch_size={"height": CELL, "width": CELL}, size={"longest_edge": 64})
    if name == "hunyuan":
        from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil

        return HunYuanVLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1 << 14})
    if name == "ernie":
        from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
            Ernie4_5_VLMoeImageProcessorPil,
        )

        return Ernie4_5_VLMoeImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1 << 14})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    colours: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if name.startswith("qwen3") else {}
    return Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1 << 14}, **colours)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """By name; each is made once."""
    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(pixels: np.ndarray) -> Image:
    return Image(pixels.shape[0], pixels.shape[1], pixels.tobytes(), b"")


def open_tower(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[VisionSpec, Tower]:
    with open_checkpoint(folder) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        check_tower(checkpoint, spec)
        return spec, load_tower(checkpoint, spec, dtype)


def all_rows(found: TowerRows) -> torch.Tensor:
    return torch.stack([found.rows, *found.deep]).float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole, and of the row that differs most."""
    assert found.shape == expected.shape
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("by", ["our kernels", "torch"])
@pytest.mark.parametrize("name", MADE)
def test_rows_are_those_of_transformers(
    name: str, by: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "torch":  # as on a GPU
        monkeypatch.setattr(tower_attention, "PagedAttention", lambda *given: TorchAttention(*given[:3], given[4]))
    spec, tower = open_tower(made(name).folder)
    assert spec.tower.cell == CELLS.get(name, CELL)
    for height, width in SIZES.get(name, FREE_SIZES):
        pixels = draw(height, width)
        rows, deep = made(name).rows(pixels)
        found = tower(image(pixels))
        assert len(found.rows) == spec.placed(image(pixels), 0).num_rows
        assert len(found.deep) == len(spec.tower.deep_behind) == {"qwen3": 2, "docling": 2, "granite4": 5}.get(name, 0)
        assert difference(all_rows(found), torch.stack([rows, *deep])) < 1e-5


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(name: str, dtype: torch.dtype, made: Callable[[str], Made]) -> None:
    pixels = draw(*SIZES.get(name, FREE_SIZES)[-1])
    rows, deep = made(name).rows(pixels)
    _, tower = open_tower(made(name).folder, dtype)
    found = tower(image(pixels))
    assert found.rows.dtype == dtype
    assert difference(all_rows(found), torch.stack([rows, *deep])) < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_images_that_fill_windows_and_those_that_are_less_than_one(made: Callable[[str], Made]) -> None:
    _, tower = open_tower(made("qwen2_5").folder)
    for height, width in [(16, 16), (32, 48), (8, 40), (56, 8), (40, 56)]:
        pixels = draw(height, width)
        assert difference(tower(image(pixels)).rows, made("qwen2_5").rows(pixels)[0]) < 1e-5


def test_rows_are_those_of_transformers_where_an_mlp_is_computed_in_parts(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm_cli.models.tower.ROWS_TOGETHER", 7)
    _, tower = open_tower(made("qwen3").folder)
    pixels = draw(24, 40)
    assert difference(tower(image(pixels)).rows, made("qwen3").rows(pixels)[0]) < 1e-5


def test_the_bytes_told_are_those_of_the_weights(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm_cli.weights.vision.tower_of", lambda spec, tensors, *others: tensors)
    for name in MADE:
        spec, tensors = open_tower(made(name).folder, torch.bfloat16)
        assert vision_bytes(spec, torch.bfloat16) == sum(each.nbytes for each in tensors.values())  # type: ignore[attr-defined]


# Older folders call the same tensors otherwise.
PREFIXES = {
    "qwen3": [("model.visual.", "visual.")],
    "qwen2": [("visual.", "model.visual.")],
    "gemma3": [
        ("vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "model.vision_tower."),
        ("vision_tower.", "model.vision_tower.vision_model."),
    ],
    "mistral3": [("vision_tower.", "model.vision_tower.")],
    "pixtral": [("vision_tower.", "model.vision_tower.")],
    "glm4v": [("model.visual.", "visual.")],
    "glm_ocr": [("model.visual.", "visual.")],
    "paddleocr": [("visual.", "model.visual."), ("mlp_AR.", "model.projector.")],
    "lighton_ocr": [("model.vision_encoder.", "vision_encoder."), ("model.vision_projection.", "vision_projection.")],
}


@pytest.mark.parametrize(("name", "old", "new"), [(name, *each) for name, pairs in PREFIXES.items() for each in pairs])
def test_tensors_are_found_under_every_prefix(
    name: str, old: str, new: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    outer = new.split("vision")[0] if name != "qwen2" else ""

    def renamed(tensor: str) -> str:
        return outer + tensor if tensor.startswith("multi_modal_projector.") else tensor.replace(old, new)

    tensors = load_file(made(name).folder / "model.safetensors")
    folder = copy(made(name).folder, tmp_path, {renamed(each): tensor for each, tensor in tensors.items()})
    pixels = image(draw(*SIZES.get(name, FREE_SIZES)[-1]))
    assert torch.equal(open_tower(folder)[1](pixels).rows, open_tower(made(name).folder)[1](pixels).rows)


def copy(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """The same folder with other tensors, and these keys in its config."""
    tensors = load_file(source / "model.safetensors") if tensors is None else tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    read = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, **(config or {})}))
    settings = source / "preprocessor_config.json"
    (folder / settings.name).write_text(settings.read_text())
    return folder


QKV = "model.visual.blocks.1.attn.qkv.weight"


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop(QKV), "1 missing: visual.blocks.1.attn.qkv.weight"),
    (lambda t: t.update({QKV: t[QKV][:-1]}), r"1 of the wrong shape: .*blocks.1.attn.qkv.weight \(expected \[120, 40\]"),
    (lambda t: t.update({QKV: t[QKV].T.contiguous()}), "of the wrong shape"),
    (lambda t: t.update({"model.visual.blocks.3.norm1.weight": torch.ones(40)}), "1 not part of it: .*blocks.3.norm1.weight"),
    (lambda t: t.update({"visual.blocks.1.attn.qkv.weight": t[QKV]}), "1 not part of it: visual.blocks.1.attn.qkv.weight"),
    (lambda t: t.pop("model.visual.deepstack_merger_list.1.norm.bias"), "1 missing: .*deepstack_merger_list.1.norm.bias"),
    (lambda t: (t.pop(QKV), t.pop("model.visual.pos_embed.weight")), "2 missing"),
])  # fmt: skip
def test_tensors_that_do_not_match_are_told_before_they_are_read(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    tensors = load_file(made("qwen3").folder / "model.safetensors")
    change(tensors)
    with open_checkpoint(copy(made("qwen3").folder, tmp_path, tensors)) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        with pytest.raises(CheckpointError, match=words) as caught:
            check_tower(checkpoint, spec)
        assert caught.value.hint
        with pytest.raises(CheckpointError, match=words):
            load_tower(checkpoint, spec, torch.float32)


@pytest.mark.parametrize(("value", "words"), [
    (torch.full((120, 40), math.nan), "NaN"),
    (torch.full((120, 40), math.inf), "infinite"),
    (torch.zeros((120, 40), dtype=torch.int32), "not numbers that a layer can use"),
])  # fmt: skip
def test_weights_that_are_no_numbers_are_refused(
    value: torch.Tensor, words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    tensors = load_file(made("qwen3").folder / "model.safetensors") | {QKV: value}
    with open_checkpoint(copy(made("qwen3").folder, tmp_path, tensors)) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        with pytest.raises(CheckpointError, match=words):
            load_tower(checkpoint, spec, torch.float32)


@pytest.mark.parametrize(("name", "extra"), [
    ("gemma3", {"vision_tower.vision_model.head.probe": torch.ones(1, 1, 32),
                "vision_tower.embeddings.position_ids": torch.arange(144)}),
    ("internvl", {"vision_tower.embeddings.mask_token": torch.ones(1, 1, 48)}),  # as saved of a config with use_mask_token
])  # fmt: skip
def test_what_no_tower_reads_is_left_aside(
    name: str, extra: dict[str, torch.Tensor], made: Callable[[str], Made], tmp_path: Path
) -> None:
    tensors = load_file(made(name).folder / "model.safetensors") | extra
    open_tower(copy(made(name).folder, tmp_path, tensors))


FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


@pytest.mark.parametrize("name", [QKV, "model.language_model.layers.0.mlp.up_proj.weight"])
def test_towers_of_quantized_models_are_read(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Whether the tower was left alone, as most do, or not."""
    tensors = load_file(made("qwen3").folder / "model.safetensors")
    scale = tensors[name].abs().max() / 448
    codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
    stored = tensors | {name: codes, name.replace("weight", "weight_scale"): scale}
    folder = copy(made("qwen3").folder, tmp_path, stored, FP8)
    (same := tmp_path / "plain").mkdir()
    copy(made("qwen3").folder, same, tensors | {name: codes.float() * scale})
    pixels = image(draw(24, 40))
    assert torch.equal(open_tower(folder)[1](pixels).rows, open_tower(same)[1](pixels).rows)
