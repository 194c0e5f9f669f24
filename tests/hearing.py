"""Models that hear, tiny and random, by transformers; and what transformers makes of a prompt with sounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import SMALL, random_model, save
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import Sound, TokenIds
from test_llm import write_byte_tokenizer

TOKEN = 512  # that stands for sounds
TEXT = SMALL | {"max_position_embeddings": 512}
WORDS = ["<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
FIRST = 256  # their ids are behind those of bytes
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def config_of(family: str, **text: Any) -> Any:
    """Pieces of 50 frames, or 200 in chunks of 100, of which transformers can have no others."""
    import transformers

    text = TEXT | text
    whisper = {"num_mel_bins": 9, "max_source_positions": 25}
    names = ("encoder_layers", "encoder_attention_heads", "d_model", "encoder_ffn_dim")
    shape = dict(zip(names, (3, 2, 32, 64), strict=True))
    if family == "voxtral":
        whisper |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 160}
        return transformers.VoxtralConfig(audio_config=whisper, text_config=text | {"model_type": "llama"}, audio_token_id=TOKEN)
    if family == "qwen2-audio":
        return transformers.Qwen2AudioConfig(
            audio_config=whisper | shape, text_config=text | {"model_type": "qwen2"}, audio_token_index=TOKEN
        )
    assert family == "qwen3-asr"
    return transformers.Qwen3ASRConfig(
        audio_config=shape | {"num_mel_bins": 9, "n_window": 50, "n_window_infer": 200, "output_dim": 48,
                              "downsample_hidden_size": 5},
        text_config=text | {"model_type": "qwen3"}, audio_token_id=TOKEN, tie_word_embeddings=False,
    )  # fmt: skip


def random_ear(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    from transformers import AutoModelForMultimodalLM

    return random_model(config_of(family, **text), seed, dtype, AutoModelForMultimodalLM)


def a_sound(spec: HearingSpec, heard: int, seed: int = 0) -> Sound:
    """A spectrogram at random."""
    frames, bins = spec.piece if spec.padded else heard, spec.tower.num_bins
    values = np.random.default_rng(seed).normal(0, 0.7, (frames, bins)).astype("<f4")
    return Sound.of(values.tobytes(), frames, heard, bins)


def prompt_with(spec: HearingSpec, parts: list[int | Sound], token: int = TOKEN, seed: int = 0) -> TokenIds:
    """So many tokens at random, or a piece of a sound."""
    numbers = np.random.default_rng(seed)
    ids: list[int] = []
    sounds = []
    for part in parts:
        if isinstance(part, int):
            ids += numbers.integers(2, 500, part).tolist()
            continue
        sounds.append(spec.placed(part, len(ids)))
        ids += [token] * sounds[-1].num_tokens
    return TokenIds(ids, sounds)


def heard_by_transformers(spec: HearingSpec, prompt: TokenIds) -> dict[str, torch.Tensor]:
    """Its arguments. Pieces of one Qwen3-ASR's sound that follow each other are one of its inputs."""
    ids, tower = torch.tensor([list(prompt)]), spec.tower
    sounds = [placed.image for placed in prompt.images]
    values = [torch.from_numpy(np.frombuffer(each.values, "<f4").reshape(each.frames, -1).copy()).T for each in sounds]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not spec.padded:
        width = max(-(-each.shape[1] // tower.chunk) * tower.chunk for each in values)
        padded = [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in values]
        mask = torch.tensor([[int(i < each.shape[1]) for i in range(width)] for each in values])
        return given | {"input_features": torch.stack(padded), "input_features_mask": mask}
    given["input_features"] = torch.stack(values)
    if spec.framed:
        given["feature_attention_mask"] = torch.tensor([[int(i < each.heard) for i in range(each.frames)] for each in sounds])
    return given


def hearing_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "qwen3-asr", words: Sequence[str] = WORDS
) -> Path:
    """A Qwen3-ASR: bytes are tokens, of a spectrogram of nine bands. words: its control tokens."""
    from transformers import AutoModelForMultimodalLM

    config = config_of(family, vocab_size=FIRST + len(words), eos_token_id=FIRST + 1, max_position_embeddings=1024)
    config.audio_token_id = FIRST + 3
    save(random_model(config, seed, dtype, AutoModelForMultimodalLM), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 9, "min_length": 800}))
    write_byte_tokenizer(folder, tuple(words), eos_token=WORDS[1], chat_template=TEMPLATE)
    return folder
