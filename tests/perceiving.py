"""A model that sees and hears, tiny and random, by transformers: a Gemma 4 whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path

from engines import random_model, save
from test_llm import write_byte_tokenizer
from test_models import CASES

WORDS = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>")
FIRST = 256  # their ids are behind those of bytes
TEMPLATE = """<bos>{% for message in messages %}<|turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|image|>{% elif part.type == 'audio' %}<|audio|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""


def perceiving_model(folder: Path) -> Path:
    """Of patches of four pixels and spectrograms of 34 bands."""
    from transformers import AutoModelForMultimodalLM, Gemma4Config
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    vocabulary = {name: FIRST + len(WORDS) for name in ("vocab_size", "vocab_size_per_layer_input")}
    text = CASES["gemma4, keys of other layers"].to_dict() | vocabulary | {"pad_token_id": 0, "max_position_embeddings": 1024}
    vision = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "patch_size": 4, "position_embedding_size": 30,
    }  # fmt: skip
    audio = {
        "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [36, 5],
        "output_proj_dims": 20, "use_clipped_linears": False,
    }  # fmt: skip
    tokens = {"image_token_id": FIRST + 4, "audio_token_id": FIRST + 7}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, **tokens)
    save(random_model(config, auto=AutoModelForMultimodalLM), folder)
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=3, max_soft_tokens=70)
    parts = {"image_processor": images, "feature_extractor": Gemma4AudioFeatureExtractor(feature_size=34)}
    told = {name: json.loads(part.to_json_string()) for name, part in parts.items()}
    (folder / "processor_config.json").write_text(json.dumps(told))
    write_byte_tokenizer(folder, WORDS, bos_token=WORDS[0], eos_token=WORDS[3], chat_template=TEMPLATE)
    return folder
