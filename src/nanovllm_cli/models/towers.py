"""Which families of models see: what their configs say of it -> VisionSpec, and what their folders call a tower's tensors.

Two files say it. config.json has the tower ("vision_config"); what an image is made into before is in the image processor's
settings, preprocessor_config.json or a section of processor_config.json. Keys that a file leaves out have transformers' defaults,
or, of images, those of the published models. Both files are untrusted: whatever is read is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models import tower_videos
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.ernie import ERNIE_VL_NAMES
from nanovllm_cli.models.families import text_config
from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.models.tower_configs import (
    CLIP,
    HALVES,
    MAX_SIDE,
    SIGLIP_NAMES,
    activation_of,
    check_only,
    check_squares,
    colours_of,
    depth_of,
    heads_of,
    resample_of,
    siglip_shape,
    square,
    text_width,
    theta_of,
    vision_section,
    weights_and_biases,
)
from nanovllm_cli.models.towers_cohere import AYA_NAMES, COMMAND_A_NAMES, aya_vision, command_a_vision
from nanovllm_cli.models.towers_deepseek import (
    DEEPSEEK_OCR2_NAMES,
    DEEPSEEK_OCR_NAMES,
    DEEPSEEK_OCR_UNREAD,
    deepseek_ocr,
    deepseek_ocr2,
    deepseek_ocr2_code,
)
from nanovllm_cli.models.towers_deepseek_vl import DEEPSEEK_VL_NAMES, JANUS_NAMES, deepseek_vl, janus
from nanovllm_cli.models.towers_docling import DOCLING_NAMES, docling
from nanovllm_cli.models.towers_dots import DOTS_OCR_NAMES, HYPERCLOVAX_NAMES, dots_ocr, hyperclovax
from nanovllm_cli.models.towers_ernie import ERNIE_NAMES, ernie4_5
from nanovllm_cli.models.towers_fastvlm import FASTVLM_NAMES, fastvlm
from nanovllm_cli.models.towers_gemma4 import GEMMA4_NAMES, GEMMA4_UNIFIED_NAMES, gemma4, gemma4_unified
from nanovllm_cli.models.towers_got import GOT_NAMES, got_ocr2
from nanovllm_cli.models.towers_granite import GRANITE4_NAMES, granite4
from nanovllm_cli.models.towers_hunyuan import HUNYUAN_NAMES, hunyuan
from nanovllm_cli.models.towers_idefics2 import IDEFICS2_NAMES, idefics2
from nanovllm_cli.models.towers_internvl import (
    INTERNVL_CHAT_NAMES,
    INTERNVL_NAMES,
    INTERNVL_UNREAD,
    internvl,
    internvl_chat,
    qianfan_ocr,
)
from nanovllm_cli.models.towers_kimi import KIMI_K25_NAMES, KIMI_UNREAD, KIMI_VL_NAMES, kimi_k25, kimi_vl
from nanovllm_cli.models.towers_lfm3 import LFM3_NAMES, lfm3
from nanovllm_cli.models.towers_llama4 import LLAMA4_NAMES, llama4
from nanovllm_cli.models.towers_llava import LLAVA_NAMES, LLAVA_UNREAD, llava, llava_next, llava_onevision
from nanovllm_cli.models.towers_minicpm import MINICPM_NAMES, minicpm, minicpm_4_7, minicpm_ocr
from nanovllm_cli.models.towers_mllama import MLLAMA_NAMES, mllama
from nanovllm_cli.models.towers_molmo import MOLMO2_NAMES, molmo2
from nanovllm_cli.models.towers_ovis import OVIS2_NAMES, ovis2
from nanovllm_cli.models.towers_pages import GLM4V_NAMES, GLM_OCR_NAMES, PADDLEOCR_NAMES, glm4v, glm_ocr, paddleocr
from nanovllm_cli.models.towers_paligemma import PALIGEMMA_NAMES, paligemma
from nanovllm_cli.models.towers_perception import PERCEPTION_NAMES, perception_lm
from nanovllm_cli.models.towers_qwen import (
    OMNI2_5_NAMES,
    OMNI3_NAMES,
    QWEN2_5_NAMES,
    QWEN2_NAMES,
    QWEN3_NAMES,
    exaone4_5,
    omni2_5,
    qwen2,
    qwen2_5,
    qwen3_5,
    qwen3_vl,
)
from nanovllm_cli.models.towers_tiled import IDEFICS3_NAMES, LFM2_NAMES, idefics3, lfm2
from nanovllm_cli.models.towers_videollama import VIDEO_LLAMA3_NAMES, video_llama3
from nanovllm_cli.models.towers_vipllava import VIP_LLAVA_NAMES, video_llava, vip_llava
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, TowerSpec, VisionSpec

_GEMMA_TOKENS = ImageTokens(
    "<start_of_image>", "<image_soft_token>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"
)
_MISTRAL_TOKENS = ImageTokens("[IMG]", "[IMG]", line_end="[IMG_BREAK]", last_end="[IMG_END]")
_LIGHTON_TOKENS = ImageTokens("<|image_pad|>", "<|image_pad|>")

Read = Callable[[ConfigReader, ConfigReader], VisionSpec]
"""Of config.json, and of the image processor's settings."""


@dataclass(frozen=True, slots=True, eq=False)
class TowerFamily:
    """names: our names of tensors, {i} for a layer, or a stage, and {j} for a layer in that -> those in its folders, of which
    ours has the rows behind each other. What a name may begin with is left to who reads them. unread: what folders have and
    nothing here reads, a layer's number as the only group, which then is none of the spec's. video: of those that see them.
    asks_processor: whether settings of images have those of processor_config.json in "processor"."""

    read: Read
    names: Mapping[str, tuple[str, ...]]
    unread: re.Pattern[str] = re.compile(r"(?!)")
    video: tower_videos.ReadVideo | None = None
    asks_processor: bool = False


def tower_family(config: Mapping[str, Any]) -> TowerFamily | None:
    """By "architectures", as written in config.json; None where nothing here knows how such a model sees, if it does."""
    names, vision = config.get("architectures"), config.get("vision_config")
    if names == ["LlavaForConditionalGeneration"] and isinstance(vision, Mapping) and vision.get("model_type") != "pixtral":
        return _LLAVA
    return TOWERS.get(str(names[0])) if isinstance(names, list) and names else None


def _gemma3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    vision = vision_section(config, "siglip_vision_model")
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    cells = math.isqrt(square(config, config.integer("mm_tokens_per_image", 256), "mm_tokens_per_image"))
    if side > MAX_SIDE or side % (patch * cells):
        raise CheckpointError(
            f"{vision.where}: images of {side} x {side} pixels in patches of {patch} don't make {cells} x {cells} tokens", BROKEN
        )
    shape = siglip_shape(config, vision)
    tower = TowerSpec(
        patch_size=patch,
        merge=side // patch // cells,
        projector="pooled",
        projector_eps=shape["eps"],
        positions=(side // patch) ** 2,
        **shape,
    )
    check_squares(images, side, "images")
    if images.flag("do_pan_and_scan", False):
        raise UnsupportedError(f"{images.where}: images that are also read in parts (do_pan_and_scan) are not supported", ANOTHER)
    rule = SizeRule("square", side, longest_side=side, resample=resample_of(images, 2))
    return VisionSpec(tower, rule, _GEMMA_TOKENS, *colours_of(images, HALVES), whole=True)


def _lighton_ocr(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """A Mistral 3's tower in front of a Qwen3. Sides are rounded up to whole tokens, as llama.cpp has it; transformers rounds
    them to patches, and what is left of a token at the edge is not read."""
    return _pixtral(config, images, _LIGHTON_TOKENS)


def _mistral3(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    return _pixtral(config, images, _MISTRAL_TOKENS)


def _pixtral_12b(config: ConfigReader, images: ConfigReader) -> VisionSpec:
    """A Pixtral: each patch is a token."""
    vision_section(config, "pixtral")
    usual = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    config = ConfigReader({**usual, **config.values}, config.where)
    check_only(config, vision_feature_select_strategy="full")
    return _pixtral(config, images, _MISTRAL_TOKENS, joins=False)


def _pixtral(config: ConfigReader, images: ConfigReader, tokens: ImageTokens, *, joins: bool = True) -> VisionSpec:
    """joins: cells of patches, into tokens."""
    vision = vision_section(config, "pixtral")
    hidden = vision.integer("hidden_size", 1024)
    check_only(config, projector_hidden_act="gelu", vision_feature_layer=-1)
    projector: dict[str, Any]
    if joins:
        check_only(config, multimodal_projector_bias=False)
        text = ConfigReader(text_config(config.values), config.where)
        projector = {"merge": config.integer("spatial_merge_size", 2), "projector": "patch_merger",
                     "projector_eps": text.number("rms_norm_eps", 1e-5)}  # fmt: skip
    else:
        projector = {"merge": 1, "projector": "joined", "projector_eps": 0.0, "projector_size": text_width(config),
                     "projector_bias": config.flag("multimodal_projector_bias", True)}  # fmt: skip
    tower = TowerSpec(
        **projector,
        patch_size=vision.integer("patch_size", 14),
        hidden_size=hidden,
        num_layers=depth_of(vision, "num_hidden_layers", 24),
        num_heads=heads_of(vision, "num_attention_heads", hidden, parts=4),
        intermediate_size=vision.integer("intermediate_size", 4096),
        out_size=text_width(config),
        activation=activation_of(vision, "gelu"),
        norm="rms",
        eps=1e-5,
        frames=0,
        gated=True,
        bias=False,
        theta=theta_of(vision),
        dealt=True,
        pre_norm=True,
    )
    longest = _longest(images.section("size"), vision.integer("image_size", 1540))
    if not tower.cell <= longest <= MAX_SIDE:
        raise CheckpointError(
            f"{images.where}: 'longest_edge' must be from {tower.cell} to {MAX_SIDE} pixels, not {longest}", BROKEN
        )
    rule = SizeRule("longest", tower.cell, longest_side=longest, resample=resample_of(images, 3))
    return VisionSpec(tower, rule, tokens, *colours_of(images, CLIP))


def _longest(size: ConfigReader, usual: int) -> int:
    """Side that no image is longer than; a square that it must lie in bounds it alike."""
    if size.has("longest_edge") or not (size.has("height") or size.has("width")):
        return size.integer("longest_edge", usual)
    height, width = size.integer("height"), size.integer("width")
    if height != width:
        told = f"{size.where}: images in a frame of {height} x {width} pixels are not supported"
        raise UnsupportedError(told, "known: longest_edge, or a square")
    return height


GEMMA3_NAMES = weights_and_biases(SIGLIP_NAMES | {"projector.norm": "multi_modal_projector.mm_soft_emb_norm"}) | {
    "projector.out.weight": ("multi_modal_projector.mm_input_projection_weight",)
}
MISTRAL3_NAMES = weights_and_biases({
    "patch": "vision_tower.patch_conv",
    "pre_norm": "vision_tower.ln_pre",
    "layers.{i}.attention_norm": "vision_tower.transformer.layers.{i}.attention_norm",
    "layers.{i}.qkv": tuple(f"vision_tower.transformer.layers.{{i}}.attention.{part}_proj" for part in "qkv"),
    "layers.{i}.out": "vision_tower.transformer.layers.{i}.attention.o_proj",
    "layers.{i}.mlp_norm": "vision_tower.transformer.layers.{i}.ffn_norm",
    "layers.{i}.up": tuple(f"vision_tower.transformer.layers.{{i}}.feed_forward.{part}_proj" for part in ("gate", "up")),
    "layers.{i}.down": "vision_tower.transformer.layers.{i}.feed_forward.down_proj",
    "projector.norm": "multi_modal_projector.norm",
    "projector.join": "multi_modal_projector.patch_merger.merging_layer",
    "projector.up": "multi_modal_projector.linear_1",
    "projector.down": "multi_modal_projector.linear_2",
})  # fmt: skip

_QWEN3_VL = TowerFamily(qwen3_vl, QWEN3_NAMES, video=tower_videos.qwen3)
_QWEN3_5 = TowerFamily(qwen3_5, QWEN3_NAMES, video=tower_videos.qwen3)
_OMNI2_5, _OMNI3 = TowerFamily(omni2_5, OMNI2_5_NAMES), TowerFamily(qwen3_vl, OMNI3_NAMES)
_IDEFICS3 = TowerFamily(idefics3, IDEFICS3_NAMES)
_GLM4V, _LIGHTON_OCR = TowerFamily(glm4v, GLM4V_NAMES, video=tower_videos.glm4v), TowerFamily(_lighton_ocr, MISTRAL3_NAMES)
_KIMI_K25 = TowerFamily(kimi_k25, KIMI_K25_NAMES, KIMI_UNREAD)
_LLAVA = TowerFamily(llava, LLAVA_NAMES, LLAVA_UNREAD)
TOWERS: dict[str, TowerFamily] = {
    "AyaVisionForConditionalGeneration": TowerFamily(aya_vision, AYA_NAMES, re.compile(r"vision_tower\.post_layernorm\..*")),
    "Cohere2VisionForConditionalGeneration": TowerFamily(command_a_vision, COMMAND_A_NAMES),
    "CohereCompassForConditionalGeneration": _QWEN3_VL,
    "DeepseekVLForConditionalGeneration": TowerFamily(deepseek_vl, DEEPSEEK_VL_NAMES),
    "DeepseekOCRForCausalLM": TowerFamily(deepseek_ocr, DEEPSEEK_OCR_NAMES, DEEPSEEK_OCR_UNREAD),
    "DeepseekOCR2ForCausalLM": TowerFamily(deepseek_ocr2_code, DEEPSEEK_OCR2_NAMES),
    "DeepseekOcr2ForConditionalGeneration": TowerFamily(deepseek_ocr2, DEEPSEEK_OCR2_NAMES),
    "DotsOCRForCausalLM": TowerFamily(dots_ocr, DOTS_OCR_NAMES),
    "DotsOCRForConditionalGeneration": TowerFamily(dots_ocr, DOTS_OCR_NAMES),
    **dict.fromkeys(ERNIE_VL_NAMES, TowerFamily(ernie4_5, ERNIE_NAMES)),
    "Exaone4_5_ForConditionalGeneration": TowerFamily(exaone4_5, QWEN2_5_NAMES, video=tower_videos.exaone4_5),
    "FastVlmForConditionalGeneration": TowerFamily(fastvlm, FASTVLM_NAMES),
    "Gemma3ForConditionalGeneration": TowerFamily(_gemma3, GEMMA3_NAMES),
    "Gemma4ForConditionalGeneration": TowerFamily(gemma4, GEMMA4_NAMES, video=tower_videos.gemma4),
    "Gemma4UnifiedForConditionalGeneration": TowerFamily(gemma4_unified, GEMMA4_UNIFIED_NAMES, video=tower_videos.gemma4),
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": _GLM4V,
    "Glm46VForConditionalGeneration": TowerFamily(glm4v, GLM4V_NAMES, video=tower_videos.glm4_6v),
    "GlmOcrForConditionalGeneration": TowerFamily(glm_ocr, GLM_OCR_NAMES),
    "GotOcr2ForConditionalGeneration": TowerFamily(got_ocr2, GOT_NAMES),
    "Granite4VisionForConditionalGeneration": TowerFamily(granite4, GRANITE4_NAMES),
    "GraniteDoclingForConditionalGeneration": TowerFamily(docling, DOCLING_NAMES),
    "HunYuanVLForConditionalGeneration": TowerFamily(hunyuan, HUNYUAN_NAMES),
    "HyperCLOVAXVisionV2ForConditionalGeneration": TowerFamily(hyperclovax, HYPERCLOVAX_NAMES),
    "Idefics2ForConditionalGeneration": TowerFamily(idefics2, IDEFICS2_NAMES),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "InternVLChatModel": TowerFamily(internvl_chat, INTERNVL_CHAT_NAMES, video=tower_videos.internvl),
    "InternVLForConditionalGeneration": TowerFamily(internvl, INTERNVL_NAMES, INTERNVL_UNREAD, tower_videos.internvl),
    "JanusForConditionalGeneration": TowerFamily(janus, JANUS_NAMES),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "KimiVLForConditionalGeneration": TowerFamily(kimi_vl, KIMI_VL_NAMES),
    "LightOnOCRForConditionalGeneration": _LIGHTON_OCR,
    "LightOnOcrForConditionalGeneration": _LIGHTON_OCR,
    "Llama4ForConditionalGeneration": TowerFamily(llama4, LLAMA4_NAMES),
    "LlavaForConditionalGeneration": TowerFamily(_pixtral_12b, MISTRAL3_NAMES),
    "LlavaNextForConditionalGeneration": TowerFamily(llava_next, LLAVA_NAMES, LLAVA_UNREAD),
    "LlavaNextVideoForConditionalGeneration": TowerFamily(llava_next, LLAVA_NAMES, LLAVA_UNREAD),
    "LlavaOnevisionForConditionalGeneration": TowerFamily(llava_onevision, LLAVA_NAMES, LLAVA_UNREAD),
    "Molmo2ForConditionalGeneration": TowerFamily(molmo2, MOLMO2_NAMES, re.compile(r"vision_tower\.layers\.(\d+)\..*"),
                                                  asks_processor=True),
    "Ovis2ForConditionalGeneration": TowerFamily(ovis2, OVIS2_NAMES),
    "PaddleOCRVLForConditionalGeneration": TowerFamily(paddleocr, PADDLEOCR_NAMES),
    "Lfm2VlForConditionalGeneration": TowerFamily(lfm2, LFM2_NAMES),
    "Lfm3VlForConditionalGeneration": TowerFamily(lfm3, LFM3_NAMES),
    "MiniCPMOcrForConditionalGeneration": TowerFamily(minicpm_ocr, MINICPM_NAMES),
    "MiniCPMV4_6ForConditionalGeneration": TowerFamily(minicpm, MINICPM_NAMES),
    "MiniCPMV4_7ForConditionalGeneration": TowerFamily(minicpm_4_7, MINICPM_NAMES),
    "Mistral3ForConditionalGeneration": TowerFamily(_mistral3, MISTRAL3_NAMES),
    "MllamaForConditionalGeneration": TowerFamily(mllama, MLLAMA_NAMES),
    "PaliGemmaForConditionalGeneration": TowerFamily(paligemma, PALIGEMMA_NAMES),
    "PerceptionLMForConditionalGeneration": TowerFamily(perception_lm, PERCEPTION_NAMES, video=tower_videos.perception_lm),
    "QianfanOCRForConditionalGeneration": TowerFamily(qianfan_ocr, INTERNVL_CHAT_NAMES),
    "Qwen2VLForConditionalGeneration": TowerFamily(qwen2, QWEN2_NAMES, video=tower_videos.qwen2),
    "Qwen2_5_VLForConditionalGeneration": TowerFamily(qwen2_5, QWEN2_5_NAMES, video=tower_videos.qwen2_5),
    "Qwen2_5OmniForConditionalGeneration": _OMNI2_5,
    "Qwen2_5OmniModel": _OMNI2_5,
    "Qwen2_5OmniThinkerForConditionalGeneration": _OMNI2_5,
    "Qwen3OmniMoeForConditionalGeneration": _OMNI3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _OMNI3,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen4ExpForConditionalGeneration": _QWEN3_5,
    "SmolVLMForConditionalGeneration": TowerFamily(idefics3, IDEFICS3_NAMES, video=tower_videos.smolvlm),
    "VideoLlama3ForConditionalGeneration": TowerFamily(video_llama3, VIDEO_LLAMA3_NAMES),
    "VideoLlavaForConditionalGeneration": TowerFamily(video_llava, LLAVA_NAMES, LLAVA_UNREAD),
    "VipLlavaForConditionalGeneration": TowerFamily(vip_llava, VIP_LLAVA_NAMES, LLAVA_UNREAD),
}
