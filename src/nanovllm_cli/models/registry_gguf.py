"""Which family a GGUF file belongs to, by the name that llama.cpp has for its architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.cohere2_moe import COHERE2_MOE, family_of_cohere2moe
from nanovllm_cli.models.deepseek import family_of_gguf
from nanovllm_cli.models.eagle import EAGLE3
from nanovllm_cli.models.falcon import FALCON, family_of_falcon_gguf
from nanovllm_cli.models.families import MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.gemma import GEMMA3, GEMMA_EMBEDDING
from nanovllm_cli.models.glm import family_of_glm4
from nanovllm_cli.models.granite import GRANITE_STATES
from nanovllm_cli.models.llamas import BAICHUAN, CODESHELL, DBRX, JAIS, OPENELM, PLAMO, QWEN, REFACT
from nanovllm_cli.models.nemotron import NEMOTRON_H, NEMOTRON_H_MOE
from nanovllm_cli.models.nomic import JINA_BERT_3, NOMIC_BERT_MOE
from nanovllm_cli.models.plamo import PLAMO2, PLAMO3
from nanovllm_cli.models.registry import HF_ARCHITECTURES, HF_BODIES, look_up
from nanovllm_cli.models.states_alone import MAMBA
from nanovllm_cli.models.t5 import family_of_t5_gguf

_OWN = [family for family in (*HF_ARCHITECTURES.values(), *HF_BODIES.values()) if family.gguf_like is None]
GGUF_ARCHITECTURES: dict[str, Family] = {
    # Of those that share an architecture, the first in the registry.
    **{family.gguf_name or family.name: family for family in reversed(_OWN)},
    # What folders are not of, or others, too.
    **{family.name: family for family in (BAICHUAN, CODESHELL, DBRX, JAIS, OPENELM, PLAMO, PLAMO2, PLAMO3, QWEN, REFACT)},
    "cohere2moe": COHERE2_MOE,
    "eagle3": EAGLE3,
    "falcon": FALCON,
    "gemma3": GEMMA3,
    "gemma-embedding": GEMMA_EMBEDDING,
    "granitehybrid": GRANITE_STATES,
    "jina-bert-v3": JINA_BERT_3,
    "mamba": MAMBA,
    "mistral": MISTRAL,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "nomic-bert-moe": NOMIC_BERT_MOE,
    # Of models that see: what writes, whose files say as much of positions as counts.
    "qwen2vl": QWEN2,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
}


def gguf_family(metadata: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """By "general.architecture", and where that is not enough by the names of the file's tensors."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError("GGUF metadata has no 'general.architecture'", "is this the file of a language model?")
    if name == "falcon":
        return family_of_falcon_gguf(metadata, names)
    if name == "t5":
        return family_of_t5_gguf(names)
    by_more = {"deepseek2": family_of_gguf, "glm4": family_of_glm4, "cohere2moe": family_of_cohere2moe}.get(name)
    return look_up(name, GGUF_ARCHITECTURES) if by_more is None else by_more(metadata)
