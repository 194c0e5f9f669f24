"""Short names for models: `qwen3:4b` instead of `Qwen/Qwen3-4B`.

The part before the colon is the family, the part after it the size; the bare family is its smallest member.
Only families that this package runs, and only the publishers' own repositories (those of Llama, Gemma and Cohere ask for a
licence to be accepted first). `tiny` is the model that comes with the package. Nothing is imported here: shell completion reads
it.
"""

from __future__ import annotations

BUNDLED = "tiny"

_FAMILIES: dict[str, dict[str, str]] = {
    "qwen3": {
        "0.6b": "Qwen/Qwen3-0.6B",
        "1.7b": "Qwen/Qwen3-1.7B",
        "4b": "Qwen/Qwen3-4B",
        "4b-instruct": "Qwen/Qwen3-4B-Instruct-2507",
        "4b-thinking": "Qwen/Qwen3-4B-Thinking-2507",
        "8b": "Qwen/Qwen3-8B",
        "14b": "Qwen/Qwen3-14B",
        "32b": "Qwen/Qwen3-32B",
        "30b-a3b": "Qwen/Qwen3-30B-A3B",
        "235b-a22b": "Qwen/Qwen3-235B-A22B",
    },
    "qwen3-embedding": {
        "0.6b": "Qwen/Qwen3-Embedding-0.6B",
        "4b": "Qwen/Qwen3-Embedding-4B",
        "8b": "Qwen/Qwen3-Embedding-8B",
    },
    "all-minilm": {"22m": "sentence-transformers/all-MiniLM-L6-v2", "33m": "sentence-transformers/all-MiniLM-L12-v2"},
    "bge": {"small": "BAAI/bge-small-en-v1.5", "base": "BAAI/bge-base-en-v1.5", "large": "BAAI/bge-large-en-v1.5"},
    "bge-reranker": {"v2-m3": "BAAI/bge-reranker-v2-m3"},
    "embeddinggemma": {"300m": "google/embeddinggemma-300m"},
    "granite-embedding": {
        "small": "ibm-granite/granite-embedding-small-english-r2",
        "149m": "ibm-granite/granite-embedding-english-r2",
    },
    "multilingual-e5": {
        "small": "intfloat/multilingual-e5-small",
        "base": "intfloat/multilingual-e5-base",
        "large": "intfloat/multilingual-e5-large",
    },
    "nomic-embed-text": {"v1.5": "nomic-ai/nomic-embed-text-v1.5"},
    "qwen3.5": {
        "0.8b": "Qwen/Qwen3.5-0.8B",
        "2b": "Qwen/Qwen3.5-2B",
        "4b": "Qwen/Qwen3.5-4B",
        "9b": "Qwen/Qwen3.5-9B",
        "27b": "Qwen/Qwen3.5-27B",
        "35b-a3b": "Qwen/Qwen3.5-35B-A3B",
        "122b-a10b": "Qwen/Qwen3.5-122B-A10B",
    },
    "qwen3.6": {"27b": "Qwen/Qwen3.6-27B", "35b-a3b": "Qwen/Qwen3.6-35B-A3B"},
    "qwen2.5": {
        "0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
        "1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
        "3b": "Qwen/Qwen2.5-3B-Instruct",
        "7b": "Qwen/Qwen2.5-7B-Instruct",
        "14b": "Qwen/Qwen2.5-14B-Instruct",
        "32b": "Qwen/Qwen2.5-32B-Instruct",
        "72b": "Qwen/Qwen2.5-72B-Instruct",
    },
    "qwen2.5-coder": {
        "0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "3b": "Qwen/Qwen2.5-Coder-3B-Instruct",
        "7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
        "14b": "Qwen/Qwen2.5-Coder-14B-Instruct",
        "32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
    },
    "qwen2": {
        "0.5b": "Qwen/Qwen2-0.5B-Instruct",
        "1.5b": "Qwen/Qwen2-1.5B-Instruct",
        "7b": "Qwen/Qwen2-7B-Instruct",
        "72b": "Qwen/Qwen2-72B-Instruct",
    },
    "qwen3-vl": {
        "2b": "Qwen/Qwen3-VL-2B-Instruct",
        "4b": "Qwen/Qwen3-VL-4B-Instruct",
        "8b": "Qwen/Qwen3-VL-8B-Instruct",
        "32b": "Qwen/Qwen3-VL-32B-Instruct",
        "30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    },
    "qwen2.5vl": {
        "3b": "Qwen/Qwen2.5-VL-3B-Instruct",
        "7b": "Qwen/Qwen2.5-VL-7B-Instruct",
        "32b": "Qwen/Qwen2.5-VL-32B-Instruct",
        "72b": "Qwen/Qwen2.5-VL-72B-Instruct",
    },
    "qwq": {"32b": "Qwen/QwQ-32B"},
    "llama4": {
        "scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    },
    "llama3.3": {"70b": "meta-llama/Llama-3.3-70B-Instruct"},
    "llama3.2": {"1b": "meta-llama/Llama-3.2-1B-Instruct", "3b": "meta-llama/Llama-3.2-3B-Instruct"},
    "llama3.1": {"8b": "meta-llama/Llama-3.1-8B-Instruct", "70b": "meta-llama/Llama-3.1-70B-Instruct"},
    "llama3": {"8b": "meta-llama/Meta-Llama-3-8B-Instruct", "70b": "meta-llama/Meta-Llama-3-70B-Instruct"},
    "llama2": {
        "7b": "meta-llama/Llama-2-7b-chat-hf",
        "13b": "meta-llama/Llama-2-13b-chat-hf",
        "70b": "meta-llama/Llama-2-70b-chat-hf",
    },
    "tinyllama": {"1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"},
    "smollm2": {
        "135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    },
    "smollm3": {"3b": "HuggingFaceTB/SmolLM3-3B"},
    "smolvlm": {
        "256m": "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
        "500m": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "2.2b": "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    },
    "gemma4": {
        "e2b": "google/gemma-4-E2B-it",
        "e4b": "google/gemma-4-E4B-it",
        "12b": "google/gemma-4-12B-it",
        "26b-a4b": "google/gemma-4-26B-A4B-it",
        "31b": "google/gemma-4-31B-it",
    },
    "gemma3": {
        "270m": "google/gemma-3-270m-it",
        "1b": "google/gemma-3-1b-it",
        "4b": "google/gemma-3-4b-it",
        "12b": "google/gemma-3-12b-it",
        "27b": "google/gemma-3-27b-it",
    },
    "gemma2": {"2b": "google/gemma-2-2b-it", "9b": "google/gemma-2-9b-it", "27b": "google/gemma-2-27b-it"},
    "phi4": {"14b": "microsoft/phi-4"},
    "phi4-mini": {"3.8b": "microsoft/Phi-4-mini-instruct"},
    "phi3.5": {"3.8b": "microsoft/Phi-3.5-mini-instruct"},
    "granite4": {
        "350m": "ibm-granite/granite-4.0-350m",
        "1b": "ibm-granite/granite-4.0-1b",
        "micro": "ibm-granite/granite-4.0-micro",
    },
    "granite4-h": {
        "350m": "ibm-granite/granite-4.0-h-350m",
        "1b": "ibm-granite/granite-4.0-h-1b",
        "micro": "ibm-granite/granite-4.0-h-micro",
        "tiny": "ibm-granite/granite-4.0-h-tiny",
        "small": "ibm-granite/granite-4.0-h-small",
    },
    "nemotron-h": {"8b": "nvidia/Nemotron-H-8B-Base-8K"},
    "nemotron-nano": {"9b": "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "12b": "nvidia/NVIDIA-Nemotron-Nano-12B-v2"},
    "nemotron3-nano": {"30b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"},
    "afm": {"4.5b": "arcee-ai/AFM-4.5B"},
    "granite3.1-moe": {
        "1b": "ibm-granite/granite-3.1-1b-a400m-instruct",
        "3b": "ibm-granite/granite-3.1-3b-a800m-instruct",
    },
    "granite3.3": {"2b": "ibm-granite/granite-3.3-2b-instruct", "8b": "ibm-granite/granite-3.3-8b-instruct"},
    "olmo2": {
        "1b": "allenai/OLMo-2-0425-1B-Instruct",
        "7b": "allenai/OLMo-2-1124-7B-Instruct",
        "13b": "allenai/OLMo-2-1124-13B-Instruct",
        "32b": "allenai/OLMo-2-0325-32B-Instruct",
    },
    "olmo3": {
        "7b": "allenai/Olmo-3-7B-Instruct",
        "7b-think": "allenai/Olmo-3-7B-Think",
        "32b-think": "allenai/Olmo-3-32B-Think",
    },
    "gpt2": {
        "124m": "openai-community/gpt2",
        "355m": "openai-community/gpt2-medium",
        "774m": "openai-community/gpt2-large",
        "1.5b": "openai-community/gpt2-xl",
    },
    "pythia": {
        "70m": "EleutherAI/pythia-70m",
        "160m": "EleutherAI/pythia-160m",
        "410m": "EleutherAI/pythia-410m",
        "1b": "EleutherAI/pythia-1b",
        "1.4b": "EleutherAI/pythia-1.4b",
        "2.8b": "EleutherAI/pythia-2.8b",
        "6.9b": "EleutherAI/pythia-6.9b",
        "12b": "EleutherAI/pythia-12b",
    },
    "starcoder2": {"3b": "bigcode/starcoder2-3b", "7b": "bigcode/starcoder2-7b", "15b": "bigcode/starcoder2-15b"},
    "stablelm2": {"1.6b": "stabilityai/stablelm-2-1_6b-chat", "zephyr-1.6b": "stabilityai/stablelm-2-zephyr-1_6b"},
    "exaone4": {"1.2b": "LGAI-EXAONE/EXAONE-4.0-1.2B", "32b": "LGAI-EXAONE/EXAONE-4.0-32B"},
    "trinity": {"nano": "arcee-ai/Trinity-Nano-Preview", "mini": "arcee-ai/Trinity-Mini"},
    "k-exaone": {"236b-a23b": "LGAI-EXAONE/K-EXAONE-236B-A23B"},
    "olmoe": {"7b-a1b": "allenai/OLMoE-1B-7B-0125-Instruct"},
    "flex-olmo": {"7x7b": "allenai/FlexOlmo-7x7B-1T"},
    "minimax-m2": {"230b-a10b": "MiniMaxAI/MiniMax-M2"},
    "dots.llm1": {"142b-a14b": "rednote-hilab/dots.llm1.inst"},
    "solar-open": {"100b": "upstage/Solar-Open-100B"},
    "hunyuan": {
        "0.5b": "tencent/Hunyuan-0.5B-Instruct",
        "1.8b": "tencent/Hunyuan-1.8B-Instruct",
        "4b": "tencent/Hunyuan-4B-Instruct",
        "7b": "tencent/Hunyuan-7B-Instruct",
    },
    "apertus": {"8b": "swiss-ai/Apertus-8B-Instruct-2509", "70b": "swiss-ai/Apertus-70B-Instruct-2509"},
    "ling2": {"mini": "inclusionAI/Ling-mini-2.0", "flash": "inclusionAI/Ling-flash-2.0", "1t": "inclusionAI/Ling-1T"},
    "ring2": {"mini": "inclusionAI/Ring-mini-2.0", "flash": "inclusionAI/Ring-flash-2.0", "1t": "inclusionAI/Ring-1T"},
    "sarvam": {"30b": "sarvamai/sarvam-30b"},
    "command-r": {"35b": "CohereLabs/c4ai-command-r-v01"},
    "command-r7b": {"7b": "CohereLabs/c4ai-command-r7b-12-2024"},
    "glm4": {"9b": "zai-org/GLM-4-9B-0414", "32b": "zai-org/GLM-4-32B-0414"},
    "glm4.7-flash": {"30b": "zai-org/GLM-4.7-Flash"},
    "deepseek-v2-lite": {"16b": "deepseek-ai/DeepSeek-V2-Lite-Chat"},
    "youtu": {"2b": "tencent/Youtu-LLM-2B"},
    "glm4.5-air": {"106b": "zai-org/GLM-4.5-Air"},
    "lfm2": {
        "350m": "LiquidAI/LFM2-350M",
        "700m": "LiquidAI/LFM2-700M",
        "1.2b": "LiquidAI/LFM2-1.2B",
        "2.6b": "LiquidAI/LFM2-2.6B",
        "8b-a1b": "LiquidAI/LFM2-8B-A1B",
        "24b-a2b": "LiquidAI/LFM2-24B-A2B",
    },
    "lfm2.5": {"1.2b": "LiquidAI/LFM2.5-1.2B-Instruct"},
    "lfm2-vl": {"450m": "LiquidAI/LFM2-VL-450M", "1.6b": "LiquidAI/LFM2-VL-1.6B", "3b": "LiquidAI/LFM2-VL-3B"},
    "mistral": {"7b": "mistralai/Mistral-7B-Instruct-v0.3"},
    "mistral-nemo": {"12b": "mistralai/Mistral-Nemo-Instruct-2407"},
    "mistral-small": {"24b": "mistralai/Mistral-Small-3.2-24B-Instruct-2506"},
    "ministral3": {
        "3b": "mistralai/Ministral-3-3B-Instruct-2512",
        "8b": "mistralai/Ministral-3-8B-Instruct-2512",
        "14b": "mistralai/Ministral-3-14B-Instruct-2512",
    },
    "mixtral": {"8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1", "8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1"},
    "seed-oss": {"36b": "ByteDance-Seed/Seed-OSS-36B-Instruct"},
    "gpt-oss": {"20b": "openai/gpt-oss-20b", "120b": "openai/gpt-oss-120b"},
    "deepseek-r1": {
        "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
        "32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        "70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    },
}

# alias -> repository on the hub
ALIASES: dict[str, str] = {
    name: repo
    for family, sizes in _FAMILIES.items()
    for name, repo in [
        (family, next(iter(sizes.values()))),
        *((f"{family}:{size}", repo) for size, repo in sizes.items()),
    ]
}
