"""What writes, inside of models of several parts: which family it is of, where these say no more of it than a kind. The models
themselves are in `registry.py`."""

from __future__ import annotations

from nanovllm_cli.models.bailing import SARVAM_MOE
from nanovllm_cli.models.cohere import COHERE, COHERE2
from nanovllm_cli.models.ernie import ERNIE_VL_NAMES
from nanovllm_cli.models.exaone import EXAONE
from nanovllm_cli.models.families import LLAMA, QWEN2, QWEN2_AUDIO, QWEN3, QWEN3_MOE
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.gemma import PALI_GEMMA, PALI_GEMMA2
from nanovllm_cli.models.gpt_oss import GPT_OSS
from nanovllm_cli.models.granite import GRANITE
from nanovllm_cli.models.hyperclovax import HYPERCLOVAX
from nanovllm_cli.models.mistral import LLAVA, LLAVA_MISTRAL, MINISTRAL3, MISTRAL4
from nanovllm_cli.models.nemotron import NEMOTRON_H
from nanovllm_cli.models.qwen_next import QWEN3_5, QWEN3_5_MOE

TIED_UNLESS_TOLD = {
    "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration", *ERNIE_VL_NAMES, "FastVlmForConditionalGeneration",
    "Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GlmAsrForConditionalGeneration", "GotOcr2ForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration", "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration", "HunYuanVLForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "InternVLForConditionalGeneration", "JanusForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration", "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "Lfm3VlForConditionalGeneration", "LightOnOCRForConditionalGeneration",
    "LightOnOcrForConditionalGeneration", "MiniCPMOcrForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration", "PaliGemmaForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
}  # fmt: skip
"""Models of several parts that in transformers have no head beside the embedding where the config does not say it outside of its
parts, whatever it says in the part for texts."""
TEXT_MODELS = {"ministral3": MINISTRAL3, "mistral4": MISTRAL4}
"""Inside of models of several architectures, by "model_type"."""
_USUAL_TEXTS = {
    "granite": GRANITE, "hyperclovax": HYPERCLOVAX, "llama": LLAVA, "mistral": LLAVA_MISTRAL, "qwen2": QWEN2_AUDIO,
    "qwen3": QWEN3,
}  # fmt: skip
"""With what transformers takes for granted, which folders of models of several parts may leave out."""
_HAVE_USUAL_TEXTS = (
    "AudioFlamingo3", "DeepseekVL", "DeepseekVLHybrid", "FastVlm", "GlmAsr", "GotOcr2", "GraniteSpeech", "GraniteSpeechPlus",
    "HyperCLOVAXVisionV2", "Idefics2", "Janus", "LlavaNextVideo", "MusicFlamingo", "Ovis2", "PerceptionLM", "QianfanOCR",
    "VibeVoiceAsr", "VideoLlama3", "VideoLlava", "VipLlava",
)  # fmt: skip
"""Beside what sees, hears or draws, which is left aside."""
_MINICPM_V = {"qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5_MOE}
TEXTS_OF: dict[str, dict[str, Family]] = {
    "AyaVisionForConditionalGeneration": {"cohere": COHERE, "cohere2": COHERE2},
    "Cohere2VisionForConditionalGeneration": {"cohere2": COHERE2},
    "InternVLForConditionalGeneration": {
        "gpt_oss": GPT_OSS, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE,
    },
    "LlavaForConditionalGeneration": {"llama": LLAVA, "mistral": LLAVA_MISTRAL, "qwen2": QWEN2},
    "LlavaNextForConditionalGeneration": {"llama": LLAVA, "mistral": LLAVA_MISTRAL, "qwen2": QWEN2},
    "LlavaOnevisionForConditionalGeneration": {"qwen2": QWEN2},
    "PaliGemmaForConditionalGeneration": {"gemma": PALI_GEMMA, "gemma2": PALI_GEMMA2},
    "NemotronH_Nano_VL_V2": {"nemotron_h": NEMOTRON_H},
    "NemotronH_Omni_Reasoning_V3": {"nemotron_h": NEMOTRON_H},
    **{f"{each}ForConditionalGeneration": _USUAL_TEXTS for each in _HAVE_USUAL_TEXTS},
    **{f"MiniCPM{each}ForConditionalGeneration": _MINICPM_V for each in ("Ocr", "V4_6", "V4_7")},
}  # fmt: skip
"""Inside of those that see, whose texts are of several families, or of one that must be it."""
OF_ANOTHER_CLASS = {"exaone": EXAONE, "sarvam_moe": SARVAM_MOE}
"""By "model_type", what transformers has another model's class for, and saves as such a one."""
