"""Which family a checkpoint belongs to, by the name it gives itself. A new model is a row here, and what it points to, which says
what its GGUF files call it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.afmoe import AFMOE
from nanovllm_cli.models.apertus import APERTUS, APERTUS_1_5
from nanovllm_cli.models.axk import AXK1, AXK2
from nanovllm_cli.models.bailing import BAILING_MOE, BAILING_MOE2, SARVAM_MOE
from nanovllm_cli.models.bailing_hybrid import BAILING_HYBRID
from nanovllm_cli.models.bart import BART_FAMILIES
from nanovllm_cli.models.bert import BERT, DISTILBERT, JINA_BERT, MPNET, ROBERTA
from nanovllm_cli.models.bitnet import BITNET
from nanovllm_cli.models.bloom import BLOOM, MPT
from nanovllm_cli.models.classifiers import SAME_LAYERS
from nanovllm_cli.models.cohere import COHERE, COHERE2, COHERE_COMPASS, COHERE_COMPASS_VISION
from nanovllm_cli.models.cohere2_moe import COHERE2_MOE
from nanovllm_cli.models.deci import DECI
from nanovllm_cli.models.deepseek import (
    DEEPSEEK,
    DEEPSEEK2,
    DEEPSEEK3,
    DEEPSEEK_OCR,
    GLM4_MOE_LITE,
    PLM,
    SARVAM_MLA,
    YOUTU,
)
from nanovllm_cli.models.deepseek4 import DEEPSEEK4
from nanovllm_cli.models.dory import DORY
from nanovllm_cli.models.dots import DOTS1
from nanovllm_cli.models.eagle import EAGLE3, OWN_ARCHITECTURES, is_eagle
from nanovllm_cli.models.embedding_gemma2 import EMBEDDING_GEMMA2
from nanovllm_cli.models.ernie import ERNIE4_5, ERNIE4_5_MOE, ERNIE4_5_VL, ERNIE_VL_NAMES, PADDLEOCR
from nanovllm_cli.models.exaone import EXAONE, EXAONE4, EXAONE_MOE
from nanovllm_cli.models.falcon import FALCON, family_of_falcon
from nanovllm_cli.models.falcon_h1 import FALCON_H1
from nanovllm_cli.models.families import (
    ARCEE,
    CWM,
    EUROBERT,
    HELIUM,
    JAIS2,
    LLAMA,
    LLAMA_BOTH_WAYS,
    MINISTRAL,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN2_5_OMNI,
    QWEN2_AUDIO,
    QWEN2_VL,
    QWEN3,
    QWEN3_ASR,
    QWEN3_MOE,
    QWEN3_OMNI,
    QWEN3_VL,
    QWEN3_VL_MOE,
    SEED_OSS,
    SMOLLM3,
    VOXTRAL,
)
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.flint import FLINT
from nanovllm_cli.models.gemma import GEMMA, GEMMA2, GEMMA3, PALI_GEMMA, VAULT_GEMMA
from nanovllm_cli.models.gemma3n import GEMMA3N
from nanovllm_cli.models.gemma4 import GEMMA4, GEMMA4_ASSISTANT, GEMMA4_UNIFIED
from nanovllm_cli.models.glm import GLM, GLM4, GLM4_MOE, GLM4V, GLM4V_MOE, GLM_OCR, SOLAR_OPEN
from nanovllm_cli.models.gpt2 import GPT2, GPT_BIGCODE
from nanovllm_cli.models.gpt_neo import GPT_J, GPT_NEO
from nanovllm_cli.models.gpt_neox import GPT_NEOX
from nanovllm_cli.models.gpt_oss import GPT_OSS, PRIVACY_FILTER
from nanovllm_cli.models.granite import (
    BAMBA,
    GRANITE,
    GRANITE_DOCLING,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
)
from nanovllm_cli.models.gte import GTE, GTE_NEW
from nanovllm_cli.models.hrm import HRM_TEXT
from nanovllm_cli.models.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HUNYUAN_VL, HY_V3
from nanovllm_cli.models.hunyuan4 import HY_V4, HY_V4_VL
from nanovllm_cli.models.hyperclovax import HYPERCLOVAX
from nanovllm_cli.models.internlm import INTERNLM2, INTERNLM3
from nanovllm_cli.models.jamba import JAMBA
from nanovllm_cli.models.k2_horizon import K2_HORIZON
from nanovllm_cli.models.kimi import KIMI_LINEAR
from nanovllm_cli.models.kolibri import KOLIBRI1
from nanovllm_cli.models.laguna import LAGUNA, MAPLE, MELLUM
from nanovllm_cli.models.lara import LARA_MINI
from nanovllm_cli.models.lfm2 import LFM2, LFM2_MOE, LFM3
from nanovllm_cli.models.llama4 import LLAMA4
from nanovllm_cli.models.llamas import INTERNLM, KORMO, MAINCODER, ORION, PANGU, XVERSE
from nanovllm_cli.models.mimo import MIMO2
from nanovllm_cli.models.minicpm import MINICPM, MINICPM3
from nanovllm_cli.models.minimax import MINIMAX_M2
from nanovllm_cli.models.mistral import LLAVA, MINISTRAL3, MISTRAL3, MISTRAL4
from nanovllm_cli.models.mllama import MLLAMA
from nanovllm_cli.models.modernbert import MODERNBERT
from nanovllm_cli.models.molmo import MOLMO_NAMES, family_of_molmo
from nanovllm_cli.models.moonshine import MOONSHINE
from nanovllm_cli.models.muse import MUSE_GLIMMER
from nanovllm_cli.models.nanbeige import NANBEIGE, OURO
from nanovllm_cli.models.nanochat import NANOCHAT
from nanovllm_cli.models.nemotron import NEMOTRON, NEMOTRON_H, NEMOTRON_PUZZLE
from nanovllm_cli.models.nomic import NOMIC_BERT
from nanovllm_cli.models.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from nanovllm_cli.models.olmo_hybrid import OLMO_HYBRID
from nanovllm_cli.models.opt import OPT
from nanovllm_cli.models.phi import PHI, PHI3, PHI4_MM, PHI4_MULTIMODAL, PHIMOE
from nanovllm_cli.models.qwen4 import QWEN4_EXP
from nanovllm_cli.models.qwen_next import QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from nanovllm_cli.models.registry_parts import OF_ANOTHER_CLASS, TEXT_MODELS, TEXTS_OF, TIED_UNLESS_TOLD
from nanovllm_cli.models.rwkv import RWKV7
from nanovllm_cli.models.smallthinker import SMALLTHINKER
from nanovllm_cli.models.spark import SPARK
from nanovllm_cli.models.sparse import DEEPSEEK32, GLM_DSA
from nanovllm_cli.models.stablelm import STABLELM
from nanovllm_cli.models.starcoder2 import STARCODER2
from nanovllm_cli.models.states_alone import FALCON_MAMBA, MAMBA, MAMBA2
from nanovllm_cli.models.step import STEP
from nanovllm_cli.models.t5 import T5_FAMILIES, T5_NAMES, family_of_t5
from nanovllm_cli.models.talkie import TALKIE
from nanovllm_cli.models.whisper import WHISPER
from nanovllm_cli.models.zamba2 import ZAMBA2
from nanovllm_cli.models.zaya import ZAYA

HF_ARCHITECTURES: dict[str, Family] = {
    "AfmoeForCausalLM": AFMOE,
    "AXK1ForCausalLM": AXK1,
    "AXK2ForCausalLM": AXK2,
    **dict.fromkeys(("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), BAILING_HYBRID),
    "BailingMoeForCausalLM": BAILING_MOE,
    "BailingMoeV2ForCausalLM": BAILING_MOE2,
    "BambaForCausalLM": BAMBA,
    "LlamaForCausalLM": LLAMA,
    **dict.fromkeys(("AquilaForCausalLM", "AquilaModel", "LLaMAForCausalLM"), LLAMA),
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), LLAMA4),
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), QWEN3_5),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), QWEN3_5_MOE),
    **dict.fromkeys(("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), QWEN4_EXP),
    "ApertusForCausalLM": APERTUS,
    **dict.fromkeys(("Apertus1p5ForConditionalGeneration", "Apertus1p5TextForCausalLM"), APERTUS_1_5),
    "ArceeForCausalLM": ARCEE,
    **dict.fromkeys(("BitNetForCausalLM", "BitnetForCausalLM"), BITNET),
    "AyaVisionForConditionalGeneration": COHERE2,
    "BloomForCausalLM": BLOOM,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Cohere2MoeForCausalLM": COHERE2_MOE,
    "CohereCompassForCausalLM": COHERE_COMPASS,
    "CohereCompassForConditionalGeneration": COHERE_COMPASS_VISION,
    "Cohere2VisionForConditionalGeneration": COHERE2,
    "DeciLMForCausalLM": DECI,
    "DeepseekOCRForCausalLM": DEEPSEEK_OCR,
    "DeepseekOCR2ForCausalLM": DEEPSEEK_OCR,
    "DeepseekOcr2ForConditionalGeneration": DEEPSEEK_OCR,
    "DeepseekForCausalLM": DEEPSEEK,
    "DeepseekV2ForCausalLM": DEEPSEEK2,
    "DeepseekV3ForCausalLM": DEEPSEEK3,
    "DeepseekV32ForCausalLM": DEEPSEEK32,
    "DeepseekV4ForCausalLM": DEEPSEEK4,
    "Qwen2AudioForConditionalGeneration": QWEN2_AUDIO,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5OmniForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen2_5OmniModel": QWEN2_5_OMNI,
    "Qwen2_5OmniThinkerForConditionalGeneration": QWEN2_5_OMNI,
    "Qwen3ASRForConditionalGeneration": QWEN3_ASR,
    "Qwen3OmniMoeForConditionalGeneration": QWEN3_OMNI,
    "Qwen3OmniMoeThinkerForConditionalGeneration": QWEN3_OMNI,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ERNIE4_5),
    "Ernie4_5_MoeForCausalLM": ERNIE4_5_MOE,
    **dict.fromkeys(ERNIE_VL_NAMES, ERNIE4_5_VL),
    "DoryForCausalLM": DORY,
    "Dots1ForCausalLM": DOTS1,
    "DotsOCRForCausalLM": QWEN2,
    "CwmForCausalLM": CWM,
    "ExaoneForCausalLM": EXAONE,
    "Exaone4ForCausalLM": EXAONE4,
    "Exaone4_5_ForConditionalGeneration": EXAONE4,
    "ExaoneMoEForCausalLM": EXAONE_MOE,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "FalconForCausalLM": FALCON,
    "FalconH1ForCausalLM": FALCON_H1,
    "FalconMambaForCausalLM": FALCON_MAMBA,
    "FlintForCausalLM": FLINT,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4AssistantForCausalLM": GEMMA4_ASSISTANT,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4UnifiedAssistantForCausalLM": GEMMA4_ASSISTANT,
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm4vMoeForConditionalGeneration": GLM4V_MOE,
    "Glm46VForConditionalGeneration": GLM4V,
    "GlmMoeDsaForCausalLM": GLM_DSA,
    "GlmOcrForConditionalGeneration": GLM_OCR,
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT_BIGCODE,
    "GPTJForCausalLM": GPT_J,
    "GPTNeoForCausalLM": GPT_NEO,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "Granite4VisionForConditionalGeneration": GRANITE,
    "GraniteDoclingForConditionalGeneration": GRANITE_DOCLING,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "GraniteMoeSWAForCausalLM": GRANITE_MOE_SWA,
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "HeliumForCausalLM": HELIUM,
    "HrmTextForCausalLM": HRM_TEXT,
    "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "HunYuanVLForConditionalGeneration": HUNYUAN_VL,
    "HYV3ForCausalLM": HY_V3,
    "HYV4ForCausalLM": HY_V4,
    "HYV4VLForConditionalGeneration": HY_V4_VL,
    "HyperCLOVAXForCausalLM": HYPERCLOVAX,
    "InternLMForCausalLM": INTERNLM,
    "InternLM2ForCausalLM": INTERNLM2,
    "InternLM3ForCausalLM": INTERNLM3,
    "InternVLChatModel": QWEN2,
    "InternVLForConditionalGeneration": QWEN2,
    "KimiK25ForConditionalGeneration": DEEPSEEK3,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "KimiVLForConditionalGeneration": DEEPSEEK3,
    "Kimi_K25ForConditionalGeneration": DEEPSEEK3,
    "KORMoForCausalLM": KORMO,
    "Kolibri1ForCausalLM": KOLIBRI1,
    "LagunaForCausalLM": LAGUNA,
    "LaraMiniForCausalLM": LARA_MINI,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Lfm3ForCausalLM": LFM3,
    "Lfm3VlForConditionalGeneration": LFM3,
    "IQuestCoderForCausalLM": LLAMA,
    "Idefics3ForConditionalGeneration": LLAMA,
    "Jais2ForCausalLM": JAIS2,
    "JambaForCausalLM": JAMBA,
    "Lfm2VlForConditionalGeneration": LFM2,
    "LightOnOCRForConditionalGeneration": QWEN3,
    "LightOnOcrForConditionalGeneration": QWEN3,
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA,
    "LlavaOnevisionForConditionalGeneration": QWEN2,
    "MaincoderForCausalLM": MAINCODER,
    "MambaForCausalLM": MAMBA,
    "Mamba2ForCausalLM": MAMBA2,
    "MapleForCausalLM": MAPLE,
    "MellumForCausalLM": MELLUM,
    "MiMoForCausalLM": QWEN2,
    "MiMoV2FlashForCausalLM": MIMO2,
    "MiniCPMForCausalLM": MINICPM,
    "MiniCPM3ForCausalLM": MINICPM3,
    "MiniCPMOcrForConditionalGeneration": QWEN3_5,
    "MiniCPMV4_6ForConditionalGeneration": QWEN3_5,
    "MiniCPMV4_7ForConditionalGeneration": QWEN3_5,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "MllamaForConditionalGeneration": MLLAMA,
    "MinistralForCausalLM": MINISTRAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "Mistral4ForCausalLM": MISTRAL4,
    "MptForCausalLM": MPT,
    "MPTForCausalLM": MPT,
    "MuseGlimmerForConditionalGeneration": MUSE_GLIMMER,
    "NanbeigeForCausalLM": NANBEIGE,
    "NanoChatForCausalLM": NANOCHAT,
    "NemotronForCausalLM": NEMOTRON,
    "NemotronHForCausalLM": NEMOTRON_H,
    "NemotronHPuzzleForCausalLM": NEMOTRON_PUZZLE,
    "OPTForCausalLM": OPT,
    "OlmoForCausalLM": OLMO,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
    "OlmoeForCausalLM": OLMOE,
    "FlexOlmoForCausalLM": FLEX_OLMO,
    "OrionForCausalLM": ORION,
    "PaddleOCRVLForConditionalGeneration": PADDLEOCR,
    "PaliGemmaForConditionalGeneration": PALI_GEMMA,
    "PanguEmbeddedForCausalLM": PANGU,
    "PhiForCausalLM": PHI,
    "Phi3ForCausalLM": PHI3,
    "Phi4MMForCausalLM": PHI4_MM,
    "Phi4MultimodalForCausalLM": PHI4_MULTIMODAL,
    "PLMForCausalLM": PLM,
    "PhiMoEForCausalLM": PHIMOE,
    "PhimoeForCausalLM": PHIMOE,
    "SarvamMLAForCausalLM": SARVAM_MLA,
    "SarvamMoEForCausalLM": SARVAM_MOE,
    "SeedOssForCausalLM": SEED_OSS,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "SmallThinkerForCausalLM": SMALLTHINKER,
    "SmolLM3ForCausalLM": SMOLLM3,
    "SmolVLMForConditionalGeneration": LLAMA,
    "BertForMaskedLM": BERT,
    "BertForPreTraining": BERT,
    "DistilBertForMaskedLM": DISTILBERT,
    "JinaBertForMaskedLM": JINA_BERT,
    "MPNetForMaskedLM": MPNET,
    "ModernBertForMaskedLM": MODERNBERT,
    "RobertaForMaskedLM": ROBERTA,
    "XLMRobertaForMaskedLM": ROBERTA,
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), RWKV7),
    "Spark2_5ForCausalLM": SPARK,
    **dict.fromkeys(("StableLmForCausalLM", "StableLMEpochForCausalLM"), STABLELM),
    "Starcoder2ForCausalLM": STARCODER2,
    "Step3p5ForCausalLM": STEP,
    "Step3p7ForConditionalGeneration": STEP,
    "StepVLForConditionalGeneration": QWEN3,
    **dict.fromkeys(("K2HorizonForCausalLM", "K2AuroraForCausalLM"), K2_HORIZON),
    "OuroForCausalLM": OURO,
    **BART_FAMILIES,
    **{kind: T5_FAMILIES[name, name != "t5"] for kind, name in T5_NAMES.items()},
    "TalkieForCausalLM": TALKIE,
    "MoonshineForConditionalGeneration": MOONSHINE,
    "VoxtralForConditionalGeneration": VOXTRAL,
    "WhisperForConditionalGeneration": WHISPER,
    "VaultGemmaForCausalLM": VAULT_GEMMA,
    "XverseForCausalLM": XVERSE,
    "YoutuForCausalLM": YOUTU,
    "YoutuVLForConditionalGeneration": YOUTU,
    "Zamba2ForCausalLM": ZAMBA2,
    "ZayaForCausalLM": ZAYA,
}
HF_BODIES: dict[str, Family] = {
    "BertModel": BERT,
    "CamembertModel": ROBERTA,
    "DistilBertModel": DISTILBERT,
    **dict.fromkeys(("EmbeddingGemma2Model", "EmbeddingGemma2TextModel"), EMBEDDING_GEMMA2),
    "EuroBertModel": EUROBERT,
    "Gemma2Model": GEMMA2,
    "Gemma3TextModel": GEMMA3,
    "JinaBertModel": JINA_BERT,
    "MPNetModel": MPNET,
    "LlamaBidirectionalModel": LLAMA_BOTH_WAYS,
    "LlamaModel": LLAMA,
    "MistralModel": MISTRAL,
    "MixtralModel": MIXTRAL,
    "ModernBertModel": MODERNBERT,
    "GteModel": GTE,
    "NewModel": GTE_NEW,
    "NomicBertModel": NOMIC_BERT,
    "OpenAIPrivacyFilterModel": PRIVACY_FILTER,
    "Qwen2Model": QWEN2,
    "Qwen2MoeModel": QWEN2_MOE,
    "Qwen3Model": QWEN3,
    "Qwen3MoeModel": QWEN3_MOE,
    "Qwen3_5TextModel": QWEN3_5,
    "RobertaModel": ROBERTA,
    "XLMRobertaModel": ROBERTA,
}
"""Models without their head, as those that embed texts are published."""
_BOTH_WAYS = re.compile(r"bert|mpnet|electra|encoder|bidirectional|^t5|^dream|^llada|^rnd1", re.IGNORECASE)
"""Names of other architectures whose tokens see those behind them."""


def hf_family(config: Mapping[str, Any]) -> Family:
    """By "architectures", as written in config.json."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json has no 'architectures'", "is this the folder of a language model?")
    inner = config.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, Mapping) else None
    layers = SAME_LAYERS.get(names[0], names[0])
    if names[0] in ("FalconForCausalLM", *MOLMO_NAMES):
        return (family_of_molmo if names[0] in MOLMO_NAMES else family_of_falcon)(config)
    if names[0] in T5_NAMES:
        return family_of_t5(config, T5_NAMES[names[0]])
    if names[0] in OWN_ARCHITECTURES or is_eagle(config):
        return EAGLE3
    if names[0] == "InternVLChatModel" and isinstance(inner, Mapping):
        return hf_family(inner)
    if names[0] in TEXTS_OF and kind is not None:
        return look_up(str(kind), TEXTS_OF[names[0]])
    own = TEXT_MODELS.get(str(kind)) or OF_ANOTHER_CLASS.get(str(config.get("model_type")))
    return own or HF_BODIES.get(layers) or look_up(layers, HF_ARCHITECTURES)


def may_be_tied(config: Mapping[str, Any]) -> bool:
    """Whether transformers takes the embedding for the head of a model of several parts that comes without one, where
    `text_config` has not told it already."""
    inner, told = config.get("text_config"), config.get("tie_word_embeddings")
    if not isinstance(inner, Mapping):
        return False
    return (told is None and config["architectures"][0] in TIED_UNLESS_TOLD) or inner.get("tie_word_embeddings") is True


def look_up(name: str, table: dict[str, Family]) -> Family:
    """The row of the table, or an error that names the nearest."""
    if name in table:
        return table[name]
    if _BOTH_WAYS.search(name):
        raise _reads_both_ways(name)
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.8)
    nearest = f"the nearest that is known is {near[0]}; " if near else ""
    raise UnsupportedError(f"unknown architecture {name[:80]!r}", f"{nearest}docs/models.md lists what runs")


def _reads_both_ways(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name[:80]}: this kind of attention in both directions is not supported",
        "known: BERT, DistilBERT, (XLM-)RoBERTa, ModernBERT, nomic-bert, EuroBERT, EmbeddingGemma; what reads left to right",
    )
