"""Moonshines, tiny and random, by transformers; and what they are asked."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import random_model, save
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import Sound, TokenIds
from test_llm import write_byte_tokenizer

START, END, VOCAB = 256, 257, 258
TEXT_LEN = 40


def config_of(**changes: Any) -> Any:
    """Of whose heads of 16 numbers 14 turn."""
    from transformers import MoonshineConfig

    shape = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 52, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3,
        "max_position_embeddings": TEXT_LEN, "decoder_start_token_id": START, "bos_token_id": START, "eos_token_id": END,
        "pad_token_id": END, "partial_rotary_factor": 0.9, "pad_head_dim_to_multiple_of": 8,
    }  # fmt: skip
    return MoonshineConfig(**shape | changes)


@functools.cache
def moonshine(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForSpeechSeq2Seq

    return random_model(config_of(), seed, dtype, AutoModelForSpeechSeq2Seq)


def moonshine_folder(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """With a tokenizer whose tokens are bytes."""
    save(moonshine(seed, dtype), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 1, "sampling_rate": 16000}))
    write_byte_tokenizer(folder, ("<s>", "</s>"))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    del told["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def a_wave(samples: int, seed: int = 0) -> Sound:
    values = np.random.default_rng(seed).normal(0, 0.3, samples).astype("<f4")
    return Sound.of(values.tobytes(), samples, samples, 1)


def heard(sound: Sound) -> torch.Tensor:
    """As transformers takes it."""
    return torch.from_numpy(np.frombuffer(sound.values, "<f4").copy())[None]


def prompt_of(spec: HearingSpec, sound: Sound, text: list[int]) -> TokenIds:
    placed = spec.placed(sound, 0)
    return TokenIds([START] * placed.num_tokens + text, [placed])
