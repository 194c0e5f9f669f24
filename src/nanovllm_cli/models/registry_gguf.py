"""Which family a GGUF file belongs to, by the name that llama.cpp has for its architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.afmoe import AFMOE
from nanovllm_cli.models.apertus import APERTUS
from nanovllm_cli.models.bailing import BAILING_MOE2
from nanovllm_cli.models.bert import BERT, JINA_BERT
from nanovllm_cli.models.bitnet import BITNET
from nanovllm_cli.models.bloom import BLOOM, MPT
from nanovllm_cli.models.cohere import COHERE, COHERE2
from nanovllm_cli.models.cohere2_moe import COHERE2_MOE, family_of_cohere2moe
from nanovllm_cli.models.deepseek import DEEPSEEK2, DEEPSEEK_OCR, family_of_gguf
from nanovllm_cli.models.dots import DOTS1
from nanovllm_cli.models.ernie import ERNIE4_5, ERNIE4_5_MOE, PADDLEOCR
from nanovllm_cli.models.exaone import EXAONE, EXAONE4, EXAONE_MOE
from nanovllm_cli.models.falcon import FALCON, family_of_falcon_gguf
from nanovllm_cli.models.falcon_h1 import FALCON_H1
from nanovllm_cli.models.families import (
    ARCEE,
    EUROBERT,
    JAIS2,
    LLAMA,
    LLAMA_BOTH_WAYS,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA_EMBEDDING
from nanovllm_cli.models.gemma3n import GEMMA3N
from nanovllm_cli.models.gemma4 import GEMMA4, GEMMA4_ASSISTANT
from nanovllm_cli.models.glm import GLM, GLM4, GLM4_MOE, family_of_glm4
from nanovllm_cli.models.gpt2 import GPT2, GPT_BIGCODE
from nanovllm_cli.models.gpt_neox import GPT_NEOX
from nanovllm_cli.models.gpt_oss import GPT_OSS
from nanovllm_cli.models.granite import (
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SWA,
    GRANITE_STATES,
)
from nanovllm_cli.models.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HUNYUAN_VL, HY_V3
from nanovllm_cli.models.internlm import INTERNLM2
from nanovllm_cli.models.jamba import JAMBA
from nanovllm_cli.models.kimi import KIMI_LINEAR
from nanovllm_cli.models.laguna import LAGUNA, MELLUM
from nanovllm_cli.models.lfm2 import LFM2, LFM2_MOE
from nanovllm_cli.models.llama4 import LLAMA4
from nanovllm_cli.models.minicpm import MINICPM, MINICPM3
from nanovllm_cli.models.minimax import MINIMAX_M2
from nanovllm_cli.models.mistral import MINISTRAL3, MISTRAL4
from nanovllm_cli.models.modernbert import MODERNBERT
from nanovllm_cli.models.muse import MUSE_GLIMMER
from nanovllm_cli.models.nemotron import NEMOTRON, NEMOTRON_H, NEMOTRON_H_MOE
from nanovllm_cli.models.nomic import JINA_BERT_3, NOMIC_BERT, NOMIC_BERT_MOE
from nanovllm_cli.models.olmo import OLMO, OLMO2, OLMOE
from nanovllm_cli.models.phi import PHI, PHI3, PHIMOE
from nanovllm_cli.models.qwen_next import QWEN2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from nanovllm_cli.models.registry import look_up
from nanovllm_cli.models.seed_oss import SEED_OSS
from nanovllm_cli.models.smollm import SMOLLM3
from nanovllm_cli.models.stablelm import STABLELM
from nanovllm_cli.models.starcoder2 import STARCODER2
from nanovllm_cli.models.states_alone import MAMBA, MAMBA2

GGUF_ARCHITECTURES: dict[str, Family] = {
    "afmoe": AFMOE,
    "llama": LLAMA,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "apertus": APERTUS,
    "arcee": ARCEE,
    "cohere2": COHERE2,
    "cohere2moe": COHERE2_MOE,
    "command-r": COHERE,
    "deepseek2": DEEPSEEK2,
    "deepseek2-ocr": DEEPSEEK_OCR,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen2moe": QWEN2_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35moe": QWEN3_5_MOE,
    "qwen2vl": QWEN2,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "ernie4_5": ERNIE4_5,
    "ernie4_5-moe": ERNIE4_5_MOE,
    "dots1": DOTS1,
    "exaone4": EXAONE4,
    "exaone-moe": EXAONE_MOE,
    "falcon": FALCON,
    "falcon-h1": FALCON_H1,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4-assistant": GEMMA4_ASSISTANT,
    "gemma-embedding": GEMMA_EMBEDDING,
    "bailingmoe2": BAILING_MOE2,
    "bert": BERT,
    "bitnet": BITNET,
    "bloom": BLOOM,
    "eurobert": EUROBERT,
    "llama-embed": LLAMA_BOTH_WAYS,
    "jina-bert-v2": JINA_BERT,
    "modern-bert": MODERNBERT,
    "nomic-bert": NOMIC_BERT,
    "jina-bert-v3": JINA_BERT_3,
    "nomic-bert-moe": NOMIC_BERT_MOE,
    "chatglm": GLM,
    "exaone": EXAONE,
    "glm4": GLM4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "gpt2": GPT2,
    "gptneox": GPT_NEOX,
    "granite": GRANITE,
    "granitehybrid": GRANITE_STATES,
    "granitemoe": GRANITE_MOE,
    "granite_swa": GRANITE_MOE_SWA,
    "hunyuan-dense": HUNYUAN_DENSE,
    "hunyuan-moe": HUNYUAN_MOE,
    "hunyuan_vl": HUNYUAN_VL,
    "hy_v3": HY_V3,
    "internlm2": INTERNLM2,
    "kimi-linear": KIMI_LINEAR,
    "laguna": LAGUNA,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "mellum": MELLUM,
    "minicpm": MINICPM,
    "minicpm3": MINICPM3,
    "minimax-m2": MINIMAX_M2,
    "mistral3": MINISTRAL3,
    "mistral4": MISTRAL4,
    "jais2": JAIS2,
    "mpt": MPT,
    "jamba": JAMBA,
    "muse-glimmer": MUSE_GLIMMER,
    "nemotron": NEMOTRON,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "paddleocr": PADDLEOCR,
    "phi2": PHI,
    "phi3": PHI3,
    "phimoe": PHIMOE,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder": GPT_BIGCODE,
    "starcoder2": STARCODER2,
}


def gguf_family(metadata: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """By "general.architecture", and where that is not enough by the names of the file's tensors."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError("GGUF metadata has no 'general.architecture'", "is this the file of a language model?")
    if name == "falcon":
        return family_of_falcon_gguf(metadata, names)
    by_more = {"deepseek2": family_of_gguf, "glm4": family_of_glm4, "cohere2moe": family_of_cohere2moe}.get(name)
    return look_up(name, GGUF_ARCHITECTURES) if by_more is None else by_more(metadata)
