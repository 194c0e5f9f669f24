"""Architectures of folders whose models have a head for labels in place of tokens, as transformers names them: classifiers,
rerankers, models of rewards, and those that give each token a label."""

_DECODERS = (
    "Arcee", "Bloom", "DeepseekV2", "DeepseekV3", "Exaone4", "GPTNeo", "GPTNeoX", "Gemma", "Gemma2", "Glm", "Glm4",
    "GptOss", "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "Jamba", "Llama", "MiniCPM3", "Ministral", "Ministral3", "Mistral",
    "Mistral4", "Mixtral", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe",
    "Qwen3Next", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
)  # fmt: skip
ENCODERS = ("Bert", "Camembert", "DistilBert", "Gte", "MPNet", "ModernBert", "New", "Roberta", "XLMRoberta")

OF_TEXTS: dict[str, str] = {
    **{f"{name}ForSequenceClassification": f"{name}ForCausalLM" for name in _DECODERS},
    **{f"{name}ForSequenceClassification": f"{name}Model" for name in ENCODERS},
    "GPT2ForSequenceClassification": "GPT2LMHeadModel",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    "Qwen3_5TextForSequenceClassification": "Qwen3_5ForCausalLM",
    "Qwen2ForRewardModel": "Qwen2ForCausalLM",
}
"""A number for each label of a whole text -> the architecture that has the same layers."""

_EACH = (
    "Arcee", "Exaone4", "Gemma", "Gemma2", "Glm", "Glm4", "GptOss", "Helium", "Llama", "Ministral",
    "Ministral3", "Mistral", "Mixtral", "Nemotron", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SeedOss",
    "SmolLM3", "StableLm", "Starcoder2",
)  # fmt: skip
OF_TOKENS: dict[str, str] = {
    **{f"{name}ForTokenClassification": f"{name}ForCausalLM" for name in _EACH},
    **{f"{name}ForTokenClassification": f"{name}Model" for name in ENCODERS},
    "OpenAIPrivacyFilterForTokenClassification": "OpenAIPrivacyFilterModel",
}
"""The same for each token."""

SAME_LAYERS = OF_TEXTS | OF_TOKENS
