"""Other families than Qwen3 in the GPU's engine on emulated kernels: tokens and likelihoods of the CPU.

Not among the tests that run on a GPU: a machine with one has the transformers that it has, and some of these classes are new.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Apertus1p5TextConfig,
    ApertusConfig,
    ArceeConfig,
    BitNetConfig,
    BloomConfig,
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm3Config,
    MiniCPM3Config,
    Ministral3Config,
    MptConfig,
    NanoChatConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    PhiConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import greedy, random_model, run, save
from test_cuda_engine import PROMPTS, SHAPE, engine_on
from test_models import MINICPM3

pytestmark = needs_emulation
CLASSIC = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"hidden_size": 64}
OTHERS: dict[str, Any] = {
    "gemma3": Gemma3TextConfig(
        **SHAPE | {"tie_word_embeddings": True}, sliding_window=10, query_pre_attn_scalar=20, final_logit_softcapping=8.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma2": Gemma2Config(**SHAPE | {"tie_word_embeddings": True}, sliding_window=10, query_pre_attn_scalar=20),
    "glm4": Glm4Config(**SHAPE),
    "granite": GraniteConfig(**SHAPE, embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.2),
    "hunyuan": HunYuanDenseV1Config(**SHAPE),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "lfm3": Lfm3Config(**SHAPE | {"num_hidden_layers": 3}, layer_types=["conv", "full_attention", "sliding_attention"],
                       sliding_window=10),
    "nanochat": NanoChatConfig(**SHAPE | {"pad_token_id": 0}),
    "olmo": OlmoConfig(**SHAPE | {"pad_token_id": 0}, clip_qkv=0.5),
    "olmo2": Olmo2Config(**SHAPE),
    "cohere2": Cohere2Config(
        **SHAPE | {"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": True}, sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "exaone4": Exaone4Config(**SHAPE, sliding_window=10, layer_types=["sliding_attention", "full_attention"]),
    "smollm3": SmolLM3Config(**SHAPE | {"no_rope_layers": [0, 1]}),
    "starcoder2": Starcoder2Config(**CLASSIC, sliding_window=10),
    "stablelm": StableLmConfig(**CLASSIC, use_parallel_residual=True),
    "pythia": GPTNeoXConfig(**{name: value for name, value in CLASSIC.items() if name != "num_key_value_heads"}),
    "phi": PhiConfig(**CLASSIC),
    "gpt2": GPT2Config(vocab_size=513, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=80),
    "opt": OPTConfig(vocab_size=513, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
                     ffn_dim=80, word_embed_proj_dim=64),
    "bigcode": GPTBigCodeConfig(vocab_size=513, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=80),
    "minicpm3": MiniCPM3Config(**MINICPM3 | {"scale_depth": 2.0, "dim_model_base": 20, "scale_emb": 3}),
    "arcee": ArceeConfig(**SHAPE | {"head_dim": 8, "mlp_bias": True}),
    "ministral3": Ministral3Config(
        **SHAPE | {"pad_token_id": 0},
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    ),
    "apertus": ApertusConfig(**SHAPE | {"head_dim": 8, "pad_token_id": 0}),
    "apertus 1.5": Apertus1p5TextConfig(**SHAPE | {"head_dim": 8, "pad_token_id": 0}, output_vocab_size=129),
    "bitnet": BitNetConfig(**SHAPE | {"head_dim": 8}),
    "bloom": BloomConfig(vocab_size=513, hidden_size=64, n_layer=2, n_head=4),
    "mpt": MptConfig(vocab_size=513, d_model=48, n_layers=2, n_heads=4, max_seq_len=128, attn_config={"softmax_scale": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_give_the_tokens_and_likelihoods_of_the_cpu(family: str, tmp_path: Path) -> None:
    """Norms with an offset, on either side, behind, of heads, of turned ones, of all together; caps; windows, layers without
    positions; factors; convolutions; MLPs without a gate; scores by distance: recorded, all of it."""
    model = save(random_model(OTHERS[family], dtype=torch.bfloat16), tmp_path)
    device = EmulatedDevice()
    asked = [(prompt, greedy(6, logprobs=1)) for prompt in PROMPTS[:3]]
    found, wanted = ([output.outputs[0] for output in run(engine_on(model, where), asked)] for where in (device, None))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert [each.logprob for each in mine.logprobs] == pytest.approx([each.logprob for each in theirs.logprobs], abs=0.08)
    assert device.graphs
