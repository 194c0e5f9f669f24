"""Models that read images against transformers in fp32: what follows a prompt with images, whatever steps it is computed in."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Cohere2VisionConfig,
    CohereCompassConfig,
    DeepseekOcr2Config,
    DeepseekVLConfig,
    Ernie4_5_VLMoeConfig,
    Exaone4_5_Config,
    FastVlmConfig,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    GlmOcrConfig,
    GotOcr2Config,
    Granite4VisionConfig,
    GraniteDoclingConfig,
    HunYuanVLConfig,
    HyperCLOVAXVisionV2Config,
    Idefics2Config,
    InternVLConfig,
    JanusConfig,
    Kimi_K25Config,
    Lfm2VlConfig,
    Lfm3VlConfig,
    LightOnOcrConfig,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextVideoConfig,
    LlavaOnevisionConfig,
    MiniCPMV4_6Config,
    MiniCPMV4_7Config,
    Mistral3Config,
    Ovis2Config,
    PaddleOCRVLConfig,
    PaliGemmaConfig,
    PerceptionLMConfig,
    QianfanOCRConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
    VideoLlama3Config,
    VideoLlavaConfig,
    VipLlavaConfig,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import fastvit
import perception_encoder
from engines import (
    SMALL,
    check_that_no_bit_changes,
    engine_for,
    greedy,
    logprobs_of,
    random_model,
    run,
    save,
    worker_for,
)
from nanovllm_cli.canvas_spec import Markers
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.engine.interrupts import held
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.images.sizes import fitted, most_rows
from nanovllm_cli.models.tower import Tower
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.text.image_tokens import on_canvases
from nanovllm_cli.vision_spec import Image, Picture, PlacedImage, TokenIds, VisionSpec
from seeing import hunyuan_as_published, kimi_as_published, packed_patches, siglip_2s_patches
from test_models import CASES, QWEN_IDS, QWEN_TEXT

NUMBERS = np.random.default_rng(0)
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA_4_TOWER = TOWER | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}
GEMMA_4_IDS: dict[str, Any] = {"audio_config": None, "image_token_id": 512, "video_token_id": 511}
QWEN_TOWER = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MROPE_WHOLE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}
XDROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0, "mrope_section": [4, 3, 3, 2]}
GLM_TEXT = QWEN_TEXT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}  # fmt: skip
GLM_EXPERTS = {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 34, "n_group": 1, "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
}  # fmt: skip
COHERE_TEXT = CASES["command r7b"].to_dict() | {"vocab_size": 513, "logit_scale": 1.0}
"""Of models that see, transformers forgets the scale of logits since its version 5."""
MARKERS = [f"{name}_id" for name in Markers._fields]
MODELS: dict[str, Any] = {
    "qwen2-vl": Qwen2VLConfig(
        text_config=QWEN_TEXT, vision_config=QWEN_TOWER | {"embed_dim": 32, "hidden_size": 48}, **QWEN_IDS
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=QWEN_TEXT, **QWEN_IDS,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "window_size": 16,
                                    "fullatt_block_indexes": [2]},
    ),
    "ernie4.5-vl": Ernie4_5_VLMoeConfig(
        text_config={key: value for key, value in SMALL.items() if key not in ("head_dim", "pad_token_id")} | {
            "vocab_size": 513, "num_attention_heads": 3, "num_key_value_heads": 1, "moe_num_experts": 5, "moe_k": 2,
            "moe_num_shared_experts": 1, "moe_intermediate_size": [36, 20], "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40},
        image_token_id=512, video_token_id=511, image_start_token_id=7, image_end_token_id=8, video_start_token_id=9,
        video_end_token_id=10,
    ),
    "exaone4.5": Exaone4_5_Config(
        image_token_id=512, video_token_id=511,
        text_config=CASES["exaone 4, a window in most layers, the first without"].to_dict(),
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "window_size": 16,
                                    "num_key_value_heads": 1, "fullatt_block_indexes": [2]},
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config=QWEN_TEXT | {"head_dim": 32}, **QWEN_IDS,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48,
                                    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3.5": Qwen3_5Config(
        text_config=CASES["qwen3.5"].to_dict(), **QWEN_IDS, tie_word_embeddings=False,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48,
                                    "num_position_embeddings": 16},
    ),
    "gemma3": Gemma3Config(
        text_config=CASES["gemma3, ropes of two bases"].to_dict(), image_token_index=512, mm_tokens_per_image=16,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4},
    ),
    "gemma4": Gemma4Config(
        text_config=CASES["gemma4, keys of other layers"].to_dict() | {"pad_token_id": 0}, **GEMMA_4_IDS,
        vision_config=GEMMA_4_TOWER | {"use_clipped_linears": True},
    ),
    "gemma4, whole in windows": Gemma4Config(
        text_config=CASES["gemma4, keys are values"].to_dict() | {"pad_token_id": 0, "use_bidirectional_attention": "vision"},
        vision_config=GEMMA_4_TOWER | {"standardize": True, "pooling_kernel_size": 2}, **GEMMA_4_IDS,
    ),
    "gemma4, without layers": Gemma4UnifiedConfig(
        text_config=CASES["gemma4, one piece"].to_dict() | {"pad_token_id": 0, "use_bidirectional_attention": "vision"},
        vision_config={"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 40, "output_proj_dims": 40,
                       "mm_posemb_size": 9, "rms_norm_eps": 1e-2}, **GEMMA_4_IDS,
    ),
    "mistral3": Mistral3Config(
        text_config=CASES["mistral, window"].to_dict(), image_token_index=512, spatial_merge_size=2,
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16, "patch_size": 4, "image_size": 64},
    ),
    "pixtral": LlavaConfig(
        text_config=CASES["mistral, window"].to_dict(), image_token_index=512, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16, "patch_size": 4, "image_size": 64},
    ),
    "glm4v": Glm4vConfig(
        text_config=GLM_TEXT, image_token_id=512, tie_word_embeddings=False,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "image_size": 20},
    ),
    "glm4v, 2 of 5 experts": Glm4vMoeConfig(
        text_config=QWEN_TEXT | GLM_EXPERTS, image_token_id=512, tie_word_embeddings=False,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48, "image_size": 16},
    ),
    "glm-ocr": GlmOcrConfig(
        text_config=GLM_TEXT | {"head_dim": 24, "rope_parameters": MROPE_WHOLE}, image_token_id=512, tie_word_embeddings=False,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48},
    ),
    "paddleocr-vl": PaddleOCRVLConfig(
        text_config=GLM_TEXT | {"head_dim": 24, "rope_parameters": MROPE_WHOLE}, image_token_id=512,
        vision_config=TOWER | {"image_size": 20, "patch_size": 4},
    ),
    "lighton-ocr": LightOnOcrConfig(
        text_config=SMALL | {"model_type": "qwen3"}, image_token_id=512, spatial_merge_size=2, tie_word_embeddings=False,
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16, "patch_size": 4, "image_size": 64},
    ),
    "smolvlm": SmolVLMConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "llama"}, image_token_id=512, scale_factor=2, pad_token_id=0,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4},
    ),
    "granite 4 vision": Granite4VisionConfig(
        text_config=SMALL | {"vocab_size": 513, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "num_hidden_layers": 5},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "hidden_size": 64, "image_size": 16, "patch_size": 4},
        qformer_config={"model_type": "blip_2_qformer", "intermediate_size": 40, "num_hidden_layers": 1,
                        "cross_attention_frequency": 1, "use_qformer_text_input": False},
        image_token_index=512, image_token_id=512, downsample_rate="1/2", vision_feature_select_strategy="full",
        deepstack_layer_map=[[-2, 0]], spatial_target_layers=[1, 2, 3, 4], image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "granite docling": GraniteDoclingConfig(
        text_config=SMALL | {"vocab_size": 513, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}, image_token_id=512,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4, "scale_factor": 2, "out_hidden_size": 48,
                               "num_hidden_layers": 3, "deepstack_visual_indexes": [0, 1]},
    ),
    "internvl": InternVLConfig(
        text_config=SMALL | {"model_type": "qwen3", "vocab_size": 513, "tie_word_embeddings": False}, image_token_id=512,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4}, tie_word_embeddings=False,
    ),
    "qianfan-ocr": QianfanOCRConfig(
        text_config=SMALL | {"model_type": "qwen3", "vocab_size": 513, "tie_word_embeddings": False}, image_token_id=512,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4},
    ),
    "aya-vision": AyaVisionConfig(
        text_config=COHERE_TEXT, image_token_index=512,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "command-a-vision": Cohere2VisionConfig(
        text_config=COHERE_TEXT, image_token_id=512, alignment_intermediate_size=56,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "llama4": Llama4Config(
        text_config=CASES["llama4, as published"].to_dict(), image_token_index=512,
        vision_config=TOWER | {"intermediate_size": 128, "image_size": 32, "patch_size": 4, "projector_input_dim": 20,
                               "projector_output_dim": 20, "vision_output_dim": 20},
    ),
    "kimi-k2.5": Kimi_K25Config(
        text_config=CASES["deepseek v3, 3 of 5 and shared"].to_dict() | {"vocab_size": 513}, image_token_id=512,
        projection_hidden_size=32, tie_word_embeddings=False, video_token_id=511,
        vision_config=TOWER | {"patch_size": 4, "pos_emb_height": 5, "pos_emb_width": 5},
    ),
    "north micro vision": CohereCompassConfig(
        text_config=CASES["cohere compass"].to_dict() | {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, "full_attention": None,
        }}, **QWEN_IDS,
        vision_config=QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48,
                                    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    ),
    "hyperclovax vision": HyperCLOVAXVisionV2Config(
        text_config=SMALL | {"model_type": "hyperclovax", "vocab_size": 513}, image_token_id=512, video_token_id=511,
        vision_config=QWEN_TOWER | {"model_type": "qwen2_5_vl_vision", "hidden_size": 32, "intermediate_size": 40,
                                    "out_hidden_size": 20, "window_size": 16, "fullatt_block_indexes": [2]},
    ),
    "deepseek-vl": DeepseekVLConfig(
        text_config=SMALL | {"model_type": "llama", "vocab_size": 513}, image_token_id=512,
        vision_config=TOWER | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False},
    ),
    "janus": JanusConfig(
        text_config=SMALL | {"model_type": "llama", "vocab_size": 513}, image_token_id=512,
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "mlp_ratio": 1.5, "projection_dim": 48},
        vq_config={"base_channels": 32, "channel_multiplier": [1, 1], "embed_dim": 4, "num_embeddings": 8, "latent_channels": 8,
                   "num_res_blocks": 1, "image_token_embed_dim": 16, "projection_dim": 16},
    ),
    "videollama3": VideoLlama3Config(
        text_config=SMALL | {"model_type": "qwen2", "vocab_size": 513, "intermediate_size": 66}, image_token_id=512,
        video_token_id=511, vision_config=TOWER | {"patch_size": 4},
    ),
    "llava-next-video": LlavaNextVideoConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "llama"}, image_token_index=512, video_token_index=511,
        image_grid_pinpoints=[[16, 32], [32, 16]],
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "num_hidden_layers": 3},
    ),
    "video-llava": VideoLlavaConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "llama"}, image_token_index=512, video_token_index=511,
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "num_hidden_layers": 3},
    ),
    "vipllava": VipLlavaConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "llama"}, image_token_index=512, vision_feature_layer=[-2, 1, 3],
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "num_hidden_layers": 5},
    ),
    "llava": LlavaConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "llama"}, image_token_index=512,
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "num_hidden_layers": 3},
    ),
    "llava-next": LlavaNextConfig(
        text_config=CASES["mistral, window"].to_dict(), image_token_index=512, image_grid_pinpoints=[[16, 32], [32, 16]],
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "num_hidden_layers": 3},
    ),
    "llava-onevision": LlavaOnevisionConfig(
        text_config=SMALL | {"vocab_size": 513, "model_type": "qwen2"}, image_token_index=512, video_token_index=511,
        image_grid_pinpoints=[[18, 36], [36, 36]], vision_aspect_ratio="anyres_max_1",
        vision_config=TOWER | {"image_size": 18, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "paligemma": PaliGemmaConfig(
        text_config=CASES["gemma"].to_dict() | {"vocab_size": 513}, image_token_index=512, projection_dim=48,
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "paligemma2": PaliGemmaConfig(
        text_config=CASES["gemma2, caps, window in every other layer"].to_dict() | {"vocab_size": 513, "sliding_window": 25},
        image_token_index=512, projection_dim=48,
        vision_config=TOWER | {"image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"},
    ),
    "deepseek-ocr2": DeepseekOcr2Config(
        text_config=SMALL | {
            "vocab_size": 513, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 34,
            "num_key_value_heads": 6, "mlp_layer_types": ["dense"] + ["sparse"] * (SMALL["num_hidden_layers"] - 1),
        },
        image_token_id=512,
        vision_config={
            "sam_config": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "image_size": 64, "patch_size": 1,
                           "output_channels": 6, "downsample_channels": [7, 12], "global_attn_indexes": [1]},
            "encoder_config": {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
                               "num_key_value_heads": 1},
        },
    ),
    "fastvlm": FastVlmConfig(
        text_config=SMALL | {"model_type": "qwen2", "vocab_size": 513}, image_token_index=512, vision_config=fastvit.vision(),
    ),
    "ovis2": Ovis2Config(
        text_config=SMALL | {"model_type": "qwen2", "vocab_size": 513}, image_token_id=512, hidden_size=48, vocab_size=513,
        visual_indicator_token_ids=[506, 507, 508, 509, 510],
        vision_config=TOWER | {"image_size": 8, "patch_size": 2, "hidden_stride": 2, "vocab_size": 41},
    ),
    "idefics2": Idefics2Config(
        text_config=CASES["mistral, window"].to_dict() | {"vocab_size": 513}, image_token_id=512,
        vision_config=TOWER | {"image_size": 24, "patch_size": 4},
        perceiver_config={"hidden_size": 48, "resampler_n_latents": 7, "resampler_depth": 2, "resampler_n_heads": 4,
                          "resampler_head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-2},
    ),
    "perception": PerceptionLMConfig(
        text_config=SMALL | {"model_type": "llama", "vocab_size": 513}, image_token_id=512, video_token_id=511,
        projector_pooling_ratio=2, vision_config=perception_encoder.vision(side=112),
    ),
    "got-ocr2": GotOcr2Config(
        text_config=SMALL | {"model_type": "qwen2", "vocab_size": 513}, image_token_index=512, tie_word_embeddings=False,
        vision_config={"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 1,
                       "output_channels": 6, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 20},
    ),
    "lfm2-vl": Lfm2VlConfig(
        text_config=CASES["lfm2"].to_dict(), image_token_id=512, downsample_factor=2, projector_hidden_size=40,
        vision_config=TOWER | {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 36},
    ),
    "hunyuan-vl": HunYuanVLConfig(
        text_config=SMALL | {"vocab_size": 513, "head_dim": 24, "rope_parameters": XDROPE}, image_token_id=512,
        tie_word_embeddings=False, vision_config=TOWER | {"patch_size": 4, "max_image_size": 20, "num_hidden_layers": 3},
    ),
    "minicpm-v": MiniCPMV4_6Config(
        text_config=CASES["qwen3.5"].to_dict(), image_token_id=512, insert_layer_id=0, tie_word_embeddings=False,
        vision_config=TOWER | {"patch_size": 4, "image_size": 24},
    ),
    "minicpm-v, on a canvas": MiniCPMV4_7Config(
        text_config=CASES["qwen3.5"].to_dict(), image_token_id=512, insert_layer_id=0, tie_word_embeddings=False,
        vision_config=TOWER | {"patch_size": 4, "image_size": 24}, downsample_mode="4x",
        **dict(zip(MARKERS, range(505, 510), strict=True)),
    ),
    "lfm3-vl": Lfm3VlConfig(
        text_config=CASES["lfm3"].to_dict(), image_token_id=512, projector_hidden_size=40, tie_word_embeddings=False,
        vision_config=TOWER | {"num_key_value_heads": 1, "num_hidden_layers": 3, "patch_size": 4},
    ),
}  # fmt: skip
SHORT = [name for name in MODELS if name not in ("deepseek-ocr2", "paligemma", "paligemma2")]
"""Without that whose images have hundreds of tokens, however small it is, and those that read nothing but an image and a text."""
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]  # a Llama 4's, which transformers 5.24 looks for there
SQUARES = "llama4", "deepseek_vl", "janus", "internvl", "aya_vision", "cohere2_vision", "fast_vlm", "got_ocr2", "qianfan_ocr"
"""Of which transformers takes nothing but pixels."""
IMAGE_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek-vl": {"size": {"height": 16, "width": 16}}, "janus": {"size": {"height": 16, "width": 16}},
    "videollama3": {"patch_size": 4, "merge_size": 1},
    "llama4": {"size": {"height": 32, "width": 32}}, "kimi-k2.5": {"patch_size": 4},
    "ovis2": {"crop_to_patches": True, "max_patches": 4, "size": {"height": 8, "width": 8}},
}  # fmt: skip
Part = int | Image | Picture


def an_image(vision: VisionSpec, rows: int, columns: int) -> Image:
    height, width = rows * vision.tower.cell, columns * vision.tower.cell
    if vision.size.kind == "pages":
        rows = columns = 12 if rows < columns else 16
        height, width = rows * vision.tower.cell, columns * vision.tower.cell
    if vision.size.kind == "mosaic":  # of squares of 4 x 4 patches or fewer, and of images that fill less than all of them
        grid = (rows % 2 + 1, columns // 2) if vision.size.apart else fitted(vision.size, rows, 3 * columns).grid
        assert grid is not None
        mosaic = Mosaic(*grid, *((0, 0) if vision.size.apart else (rows, 3 * columns)))
        side = vision.size.tile // vision.tower.cell * vision.tower.cell
        pixels = NUMBERS.integers(0, 256, (mosaic.num_squares * side, side, 3), np.uint8).tobytes()
        return Image.of(mosaic.num_squares * side, side, pixels, mosaic)
    pixels = NUMBERS.integers(0, 256, (height, width, 3), np.uint8).tobytes()
    return Image.of(height, width, pixels)


def prompt_with(vision: VisionSpec, parts: list[Part], token: int) -> TokenIds:
    """So many tokens at random, or an image. Ends of lines are read as any other token."""
    ids: list[int] = []
    images: list[PlacedImage] = []
    pictures: list[Picture] = []
    for part in parts:
        if isinstance(part, int):
            ids += NUMBERS.integers(2, 500, part).tolist()
            continue
        if vision.markers is not None:
            pictures.append(part if isinstance(part, Picture) else Picture((part,)))
            for number, image in enumerate(pictures[-1].images):
                begin, end = vision.markers[2:4] if number else vision.markers[:2]
                ids += [vision.markers.newline] if number > 1 and (number - 1) % pictures[-1].columns == 0 else []
                images.append(vision.placed(image, len(ids) + 1))
                ids += [begin, *[token] * images[-1].num_rows, end]
            continue
        assert not isinstance(part, Picture)
        images.append(vision.placed(part, len(ids), len(images)))
        line = [token] * images[-1].columns + ([501] if images[-1].ends_lines else [])
        ids += line * images[-1].rows + [token] * 2 * images[-1].framed
    if vision.prefix:
        images[-1] = images[-1]._replace(behind=len(ids) - images[-1].end)
    return TokenIds(ids, images if vision.markers is None else on_canvases(ids, images, pictures, vision.markers))


def seen_by_transformers(model: Any, vision: VisionSpec, prompt: TokenIds, token: int) -> dict[str, torch.Tensor]:
    """Its arguments, made of the pixels by hand."""
    tower, ids = vision.tower, torch.tensor([list(prompt)])
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (vision.mean, vision.std))
    values = []
    for placed in prompt.images:
        pixels = torch.tensor(list(placed.image.pixels), dtype=torch.float32)
        pixels = pixels.view(placed.image.height, placed.image.width, 3).permute(2, 0, 1)
        values.append((pixels / 255 - mean) / std)
    is_image = (ids == token).int()
    if model.config.model_type == "deepseek_ocr2":
        pieces, whole = ([each for each in values if (each.shape[1] < 64) == is_piece] for is_piece in (True, False))
        local = {"pixel_values_local": torch.stack(pieces), "num_local_patches": [len(pieces)]} if pieces else {}
        return {"input_ids": ids, "pixel_values": torch.stack(whole)} | local
    if model.config.model_type in ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"):
        mosaics = [placed.image.mosaic for placed in prompt.images]
        sizes = torch.tensor([[each.height, each.width] for each in mosaics if each is not None])
        squares = torch.stack([value.view(3, -1, 16, 16).transpose(0, 1) for value in values])
        return {"input_ids": ids, "pixel_values": squares, "image_sizes": sizes}
    if model.config.model_type == "ovis2":
        for placed in prompt.images:
            assert isinstance(placed.image, Image)
            assert placed.image.mosaic is not None
            for place, kind in placed.image.mosaic.marks(2):
                ids[0, placed.start + place] = model.config.visual_indicator_token_ids[kind]
        squares = torch.cat([value.view(3, -1, 8, 8).transpose(0, 1) for value in values])
        return {"input_ids": ids, "pixel_values": squares}
    if model.config.model_type == "video_llava":
        return {"input_ids": ids, "pixel_values_images": torch.stack(values)}
    if model.config.model_type == "video_llama_3":
        sides = [[1, *(side // tower.patch_size for side in value.shape[1:])] for value in values]
        patches = [value.unfold(1, side := tower.patch_size, side).unfold(2, side, side) for value in values]
        flat = torch.cat([each.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1) for each in patches])
        return {"input_ids": ids, "pixel_values": flat, "image_grid_thw": torch.tensor(sides),
                "image_merge_sizes": torch.ones(len(values), dtype=torch.int64)}  # fmt: skip
    if model.config.model_type == "idefics2":
        most = [max(value.shape[side] for value in values) for side in (1, 2)]
        whole, mask = torch.zeros(1, len(values), 3, *most), torch.zeros(1, len(values), *most, dtype=torch.int64)
        for i, value in enumerate(values):
            whole[0, i, :, : value.shape[1], : value.shape[2]], mask[0, i, : value.shape[1], : value.shape[2]] = value, 1
        return {"input_ids": ids, "pixel_values": whole, "pixel_attention_mask": mask}
    if model.config.model_type == "perception_lm":
        return {"input_ids": ids, "pixel_values": torch.stack(values)[None]}
    if model.config.model_type in SQUARES or tower.norm_placed:
        return {"input_ids": ids, "pixel_values": torch.stack(values)}
    if model.config.model_type == "kimi_k25":
        sides = [[1, *(side // tower.patch_size for side in value.shape[1:])] for value in values]
        patches = [value.unfold(1, side := tower.patch_size, side).unfold(2, side, side) for value in values]
        flat = torch.cat([each.permute(1, 2, 0, 3, 4).flatten(0, 1) for each in patches])
        return {"input_ids": ids, "pixel_values": flat, "image_grid_thw": torch.tensor(sides)}
    if model.config.model_type == "paligemma":
        is_answer = (torch.arange(len(prompt)) >= prompt.images[0].end).long()[None]
        return {"input_ids": ids, "pixel_values": torch.stack(values), "token_type_ids": is_answer}
    if model.config.model_type == "gemma3":
        return {"input_ids": ids, "pixel_values": torch.stack(values), "token_type_ids": is_image}
    if model.config.model_type in ("mistral3", "lighton_ocr", "llava"):
        sizes = torch.tensor([[each.image.height, each.image.width] for each in prompt.images])
        whole = torch.zeros(len(values), 3, *sizes.max(0).values.tolist())
        for each, value in zip(whole, values, strict=True):
            each[:, : value.shape[1], : value.shape[2]] = value
        return {"input_ids": ids, "pixel_values": whole, "image_sizes": sizes}
    if model.config.model_type == "internvl":
        return {"input_ids": ids, "pixel_values": torch.stack(values)}
    if model.config.model_type == "granite_docling":
        return {"input_ids": ids, "pixel_values": torch.stack(values)[None],
                "pixel_attention_mask": torch.ones(1, len(values), dtype=torch.bool)}  # fmt: skip
    if model.config.model_type == "smolvlm":
        return {"input_ids": ids, "pixel_values": torch.stack(values)[None]}
    if model.config.model_type == "lfm2_vl":
        return {"input_ids": ids} | siglip_2s_patches(values, tower.patch_size)
    if model.config.model_type == "minicpmv4_6":
        return {"input_ids": ids} | packed_patches(values, tower.patch_size)
    if model.config.model_type == "minicpmv4_7":
        return {"input_ids": ids, "mm_token_type_ids": is_image} | packed_patches(values, tower.patch_size)
    if model.config.model_type == "gemma4":
        return {"input_ids": ids, "mm_token_type_ids": is_image} | gemma_4s_patches(prompt, tower.patch_size)
    if model.config.model_type == "gemma4_unified":
        return {"input_ids": ids, "attention_mask": gemma_4s_masks(model, is_image)} | gemma_4s_cells(prompt, tower.cell)
    patches, grids = [], []
    for value in values:
        lines, columns = (side // tower.cell for side in value.shape[1:])
        cells = value.view(3, lines, tower.merge, tower.patch_size, columns, tower.merge, tower.patch_size)
        if model.config.model_type == "hunyuan_vl":
            patches.append(cells.permute(1, 2, 4, 5, 0, 3, 6).flatten(0, 3).flatten(1))
        elif model.config.model_type == "paddleocr_vl":
            patches.append(cells.permute(1, 2, 4, 5, 0, 3, 6).flatten(0, 3))  # a row a patch, line by line
        else:
            flat = cells.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # cell by cell
            frames = 1 if model.config.model_type == "ernie4_5_vl_moe" else 2
            patches.append(flat[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1))
        grids.append([1, lines * tower.merge, columns * tower.merge])
    grid = torch.tensor(grids)
    given = {"input_ids": ids, "pixel_values": torch.cat(patches), "image_grid_thw": grid, "mm_token_type_ids": is_image}
    if model.config.model_type == "ernie4_5_vl_moe":  # of which experts are asked, beside positions
        around = torch.tensor([*range(7, 11), model.config.video_token_id])
        given["moe_mm_token_type_ids"] = is_image | torch.isin(ids, around).int()
    return given


def gemma_4s_patches(prompt: TokenIds, side: int) -> dict[str, torch.Tensor]:
    """Of images one below the other, of which the smaller are filled up; with each patch's column and line."""
    most = max(placed.image.height * placed.image.width for placed in prompt.images) // side**2
    patches = torch.zeros(len(prompt.images), most, 3 * side**2)
    places = torch.full((len(prompt.images), most, 2), -1)
    for i, (image, *_) in enumerate(prompt.images):
        lines, columns = image.height // side, image.width // side
        pixels = torch.tensor(list(image.pixels), dtype=torch.float32).view(lines, side, columns, side, 3) / 255
        patches[i, : lines * columns] = pixels.transpose(1, 2).reshape(lines * columns, -1)
        places[i, : lines * columns] = torch.cartesian_prod(torch.arange(lines), torch.arange(columns)).flip(1)
    return {"pixel_values": patches, "image_position_ids": places}


def gemma_4s_cells(prompt: TokenIds, side: int) -> dict[str, torch.Tensor]:
    """The same of cells, which a model without layers reads."""
    given = gemma_4s_patches(prompt, side)
    return {"pixel_values": given["pixel_values"], "image_position_ids": given["image_position_ids"]}


def gemma_4s_masks(model: Any, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    """As its `generate` makes them: its forward alone, which is inconsistent there, lets an image's tokens see all of it in all
    layers."""
    config = model.config.get_text_config()
    like = torch.zeros(*is_image.shape, config.hidden_size)
    places = torch.arange(is_image.shape[1])[None]
    return model.create_masks_for_generate(config, like, None, None, places, mm_token_type_ids=is_image)


def opened(name: str, folder: Path, **settings: Any) -> tuple[Any, Worker, VisionSpec, int]:
    model = random_model(MODELS[name], auto=AutoModelForImageTextToText)
    save(model, folder)
    if name == "kimi-k2.5":
        kimi_as_published(folder)
    if name in IMAGE_SETTINGS:
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_SETTINGS[name]))
    worker = worker_for(folder, dtype="float32", **settings)
    model = hunyuan_as_published(model) if name == "hunyuan-vl" else model
    assert worker.sight is not None
    return model, worker, worker.sight.senses.vision, model.config.image_token_id


def parts_of(vision: VisionSpec) -> list[Part]:
    if vision.markers is not None:  # in lines of pieces, and whole
        cut = Picture(tuple(an_image(vision, *sides) for sides in [(2, 3), *[(3, 2)] * 4]), 2, 2)
        return [5, cut, 2, an_image(vision, 5, 2), 6]
    if vision.prefix:
        return [an_image(vision, 4, 4), 7]
    if vision.size.kind in ("square", "framed", "tiles", "canvas", "middle"):
        return [5, an_image(vision, 4, 4), 3, an_image(vision, 4, 4), 6]
    return [5, an_image(vision, 3, 4), 2, an_image(vision, 5, 2), 6]


@pytest.mark.parametrize("name", MODELS)
def test_what_follows_images_is_what_transformers_has(name: str, tmp_path: Path) -> None:
    model, worker, vision, token = opened(name, tmp_path)
    prompt = prompt_with(vision, parts_of(vision), token)
    (output,) = run(engine_for(worker), [(prompt, greedy(12, logprobs=0))])
    answer = output.outputs[0]
    whole = TokenIds([*prompt, *answer.token_ids], prompt.images)
    with torch.inference_mode():
        logits = model(**seen_by_transformers(model, vision, whole, token)).logits[0, len(prompt) - 1 : -1]
    assert len(answer.token_ids) == 12, "a step that fails leaves none"
    assert list(answer.token_ids) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    assert answer.logprobs is not None
    actual = torch.tensor([each.logprob for each in answer.logprobs])
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SHORT)
def test_neither_steps_nor_neighbours_change_a_bit(name: str, tmp_path: Path) -> None:
    """Alone in one step, cut anywhere, beside others, behind a found prefix, and computed again after a preemption."""
    _, worker, vision, token = opened(name, tmp_path, num_blocks=64)
    parts = parts_of(vision)
    prompts = [prompt_with(vision, parts, token), prompt_with(vision, [*parts[:4], 9], token)]
    prompts += [prompt_with(vision, [7], token), TokenIds([*prompts[0], *NUMBERS.integers(2, 500, 20)], prompts[0].images)]
    requests = [(prompt, greedy(24, logprobs=0)) for prompt in prompts]
    guesses, finds = {"num_speculative_tokens": 3}, not worker.spec.has_states
    check_that_no_bit_changes(worker, requests, sum(-(-len(prompt) // 16) for prompt in prompts) + 2, guesses, finds=finds)


def test_a_found_prefix_is_of_the_same_image(tmp_path: Path) -> None:
    """Tokens of two images are the same; what is cached of them is not. What lies in front of them is shared."""
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    ids = NUMBERS.integers(2, 500, 40).tolist()
    images = [an_image(vision, 8, 8) for _ in range(2)]
    prompts = [TokenIds([*ids, *[token] * 64, *ids], [vision.placed(image, 40)]) for image in images]
    moved = TokenIds([*ids[:39], *[token] * 65, *ids], [vision.placed(images[0], 39)])
    engine = engine_for(worker)
    hits = []
    answers = []
    for prompt in (*prompts, prompts[0], moved):
        before = engine.stats().prefix_hit_tokens
        (output,) = run(engine, [(prompt, greedy(8, logprobs=0))])
        answers.append(logprobs_of(output))  # its tokens may be those of the other image
        hits.append(engine.stats().prefix_hit_tokens - before)
    assert hits == [0, 32, 128, 32]
    assert answers[0] == answers[2] != answers[1]


def test_answers_of_one_prompt_share_its_images(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen2.5-vl", tmp_path)
    prompt = prompt_with(vision, parts_of(vision), token)
    (output,) = run(engine_for(worker), [(prompt, greedy(6, n=3))])
    assert len({answer.token_ids for answer in output.outputs}) == 1
    assert output.outputs[0].token_ids == run(engine_for(worker), [(prompt, greedy(6))])[0].outputs[0].token_ids


def test_a_tower_is_loaded_with_the_first_image_and_computes_each_once(tmp_path: Path) -> None:
    _, worker, vision, token = opened("gemma3", tmp_path)
    sight = worker.sight
    assert sight is not None
    run(engine_for(worker), [(prompt_with(vision, [9], token), greedy(2))])
    assert sight._organs[0]._tower is None
    told: list[int] = []
    sight.told = lambda: told.append(1)
    image = an_image(vision, 4, 4)
    prompt = prompt_with(vision, [3, image, 5], token)
    run(engine_for(worker, max_num_batched_tokens=5), [(prompt, greedy(2))])
    assert sight.num_computed == 1
    run(engine_for(worker), [(prompt_with(vision, [8, image, 5], token), greedy(2))])
    assert (sight.num_computed, len(told)) == (1, vision.tower.num_layers)


def test_prompt_logprobs_of_images_are_those_of_transformers(tmp_path: Path) -> None:
    """All rows are asked for, of a model that adds rows behind its last layer but one, too."""
    model, worker, vision, token = opened("qwen3-vl", tmp_path)
    prompt = prompt_with(vision, parts_of(vision), token)
    (output,) = run(engine_for(worker), [(prompt, greedy(1, prompt_logprobs=0))])
    assert output.prompt_logprobs is not None
    actual = torch.tensor([each.logprob for each in output.prompt_logprobs[1:] if each is not None])
    with torch.inference_mode():
        logits = model(**seen_by_transformers(model, vision, prompt, token)).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(list(prompt[1:]))[:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_images_that_do_not_fit_their_prompt_are_refused(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    image, cell = an_image(vision, 2, 3), vision.tower.cell
    good = prompt_with(vision, [4, image, 4], token)
    placed = good.images[0]
    wrong = [
        [placed._replace(start=9)],  # beyond the end
        [placed, placed],  # twice the same tokens
        [placed._replace(rows=3, columns=2)],
        [placed._replace(has_grid=False)],
        [vision.placed(image._replace(pixels=image.pixels[:-1]), 4)],
        [vision.placed(Image.of(cell, cell + 1, bytes(3 * cell * (cell + 1))), 4)],
        [vision.placed(Image.of(0, 0, b""), 4)],
    ]
    engine = engine_for(worker)
    for images in wrong:
        with pytest.raises(UsageError, match="images"):
            engine.add("it", TokenIds(good, images), greedy(1))
    assert not engine.has_unfinished()
    with pytest.raises(UnsupportedError, match="reads no images"):
        checked_images(None, good, tuple(good), None)
    with pytest.raises(UnsupportedError, match="no images"):
        engine.embed("it", good, "mean")
    for tokens in (list(good), [*good, token], good[:-5]):
        with pytest.raises(UsageError, match="stand for images"):
            checked_images(Seeing(Senses(vision), token, None, 1), tokens, tuple(tokens), None)


def test_what_is_made_of_an_image_is_found_with_the_same_salt_alone(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    assert worker.sight is not None
    prompt = prompt_with(vision, [4, an_image(vision, 2, 3), 4], token)
    engine, computed, answers = engine_for(worker), [], set()
    for salt in ("one", "one", "two", None):
        (output,) = run(engine, [(prompt, greedy(3))], salt)
        answers.add(output.outputs[0].token_ids)
        computed.append(worker.sight.num_computed)
    assert computed == [1, 1, 2, 3]
    assert len(answers) == 1


def test_several_processes_see_the_same(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    prompt = prompt_with(vision, parts_of(vision), token)
    (alone,) = run(engine_for(worker), [(prompt, greedy(8))])
    divided = worker_for(tmp_path, dtype="float32", tensor_parallel_size=2)
    try:
        together = [run(engine_for(divided, token_work=work), [(prompt, greedy(8))]) for work in (1, 10**9)]  # in parts, at once
    finally:
        divided.close()
    assert [output.outputs[0].token_ids for (output,) in together] == [alone.outputs[0].token_ids] * 2


def test_ctrl_c_waits_for_a_layer_that_several_processes_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them can leave a step in its midst."""
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    prompt = prompt_with(vision, parts_of(vision), token)
    (alone,) = run(engine_for(worker), [(prompt, greedy(8))])
    divided = worker_for(tmp_path, dtype="float32", tensor_parallel_size=2)
    layer, before = Tower._layer, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(self: Tower, name: str, *args: Any) -> None:
        monkeypatch.setattr(Tower, "_layer", layer)
        signal.raise_signal(signal.SIGINT)
        layer(self, name, *args)

    monkeypatch.setattr(Tower, "_layer", interrupted)
    engine = engine_for(divided, token_work=1)
    engine.add("it", prompt, greedy(8))
    try:
        engine.step()  # what is in front of the image
        with pytest.raises(KeyboardInterrupt), held():
            engine.step()
        while engine.has_unfinished():
            (output,) = engine.step() or [None]
    finally:
        signal.signal(signal.SIGINT, before)
        divided.close()
    assert output is not None
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_no_tower_can_be_leaves_a_model_that_reads_texts(tmp_path: Path) -> None:
    save(random_model(MODELS["gemma3"], auto=AutoModelForImageTextToText), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}')
    worker = worker_for(tmp_path, dtype="float32")
    assert worker.sight is None
    (output,) = run(engine_for(worker), [([5, 6, 7], greedy(3))])
    assert len(output.outputs[0].token_ids) == 3


def test_images_longer_than_a_window_are_left_out_or_made_smaller(tmp_path: Path) -> None:
    """Where tokens of an image see all of it: attention in both directions is bounded by a window on either side."""
    config = copy.deepcopy(MODELS["gemma3"])
    config.text_config.sliding_window = 15
    save(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "fixed")
    assert worker_for(tmp_path / "fixed", dtype="float32").sight is None
    save(random_model(MODELS["gemma4, whole in windows"], auto=AutoModelForImageTextToText), tmp_path / "any")
    worker = worker_for(tmp_path / "any", dtype="float32")
    assert worker.sight is not None
    windows = {attention.window for attention in worker.spec.attentions} - {None}
    assert most_rows(worker.sight.senses.vision) <= min(window for window in windows if window is not None)


def test_a_tower_that_does_not_load_ends_what_has_images_and_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker, vision, token = opened("qwen3-vl", tmp_path)
    sight = worker.sight
    assert sight is not None
    tries = []

    def load() -> Tower:
        tries.append(1)
        raise CheckpointError("NaN in a tower")

    monkeypatch.setattr(sight._organs[0], "load", load)
    engine = engine_for(worker)
    for _ in range(2):
        prompts = [prompt_with(vision, [4, an_image(vision, 2, 3), 4], token), TokenIds([5, 6, 7])]
        seeing, reading = run(engine, [(prompt, greedy(3)) for prompt in prompts])
        assert seeing.outputs[0].finish_reason == "error"
        assert "NaN in a tower" in (seeing.outputs[0].error or "")
        assert len(reading.outputs[0].token_ids) == 3
    assert tries == [1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tower_that_is_broken_leaves_a_model_that_reads_texts(processes: int, tmp_path: Path) -> None:
    """Told by names at once; by numbers with the first image, or, of several processes, at once as well."""
    save(random_model(MODELS["qwen3-vl"], auto=AutoModelForImageTextToText), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if "visual" in name and "fc1.weight" in name)
    broken = {**tensors, name: torch.full_like(tensors[name], torch.nan)} if processes == 2 else dict(tensors)
    if processes == 1:
        del broken[name]
    save_file(broken, tmp_path / "model.safetensors")
    worker = worker_for(tmp_path, dtype="float32", tensor_parallel_size=processes)
    try:
        assert worker.sight is None
        (output,) = run(engine_for(worker), [([5, 6, 7], greedy(3))])
        assert len(output.outputs[0].token_ids) == 3
    finally:
        worker.close()


def test_a_draft_model_whose_vocabulary_ends_before_an_images_tokens(tmp_path: Path) -> None:
    _, worker, vision, token = opened("qwen3-vl", tmp_path / "model")
    prompt = prompt_with(vision, parts_of(vision), token)
    (plain,) = run(engine_for(worker), [(prompt, greedy(12))])
    small = LlamaConfig(**SMALL | {"vocab_size": 512})
    draft = save(random_model(small), tmp_path / "draft")
    settings: dict[str, Any] = {"draft_model": str(draft), "num_speculative_tokens": 3, "draft_min_p": 0.0}
    guessed = worker_for(tmp_path / "model", dtype="float32", **settings)
    (output,) = run(engine_for(guessed, **settings), [(prompt, greedy(12))])
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.num_guessed_tokens > 0


def test_positions_that_the_files_do_not_divide(tmp_path: Path) -> None:
    """Nor take memory for as many as they say."""
    save(random_model(MODELS["qwen2.5-vl"], auto=AutoModelForImageTextToText), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for sections in ([2, 3, 2], [10**12, 0, 0]):
        config["text_config"]["rope_parameters"]["mrope_section"] = sections
        (tmp_path / "config.json").write_text(json.dumps(config))
        worker = worker_for(tmp_path, dtype="float32")
        assert worker.sight is None
        (output,) = run(engine_for(worker), [([5, 6, 7], greedy(3))])
        assert len(output.outputs[0].token_ids) == 3
