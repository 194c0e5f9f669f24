"""Whispers, tiny and random, by transformers; and what they are asked."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import random_model, save
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import PlacedImage, Sound, TokenIds
from test_llm import write_byte_tokenizer

LANGUAGES = ("en", "de", "fr")
WORDS = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
END, START, EN, DE, FR, TRANSLATE, TRANSCRIBE, SOUND, PREVIOUS, NOTHING, UNTIMED = range(256, 256 + len(WORDS))
TIMES = UNTIMED + 1
"""The first of the tokens that are times."""
ROWS, TEXT_LEN = 50, 64
"""Of the encoder, which hears a second; and tokens of a text."""
VOCAB = TIMES + ROWS + 1


def config_of(**changes: Any) -> Any:
    from transformers import WhisperConfig

    shape = {
        "vocab_size": VOCAB, "num_mel_bins": 9, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_layers": 3, "decoder_attention_heads": 3, "decoder_ffn_dim": 70, "d_model": 48, "max_source_positions": ROWS,
        "max_target_positions": TEXT_LEN, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END,
        "decoder_start_token_id": START, "suppress_tokens": [], "begin_suppress_tokens": [],
    }  # fmt: skip
    return WhisperConfig(**shape | changes)


@functools.cache
def whisper(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForSpeechSeq2Seq

    return random_model(config_of(), seed, dtype, AutoModelForSpeechSeq2Seq)


def generation_config(**changes: Any) -> dict[str, Any]:
    """As openai's repositories have it."""
    return {
        "bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START, "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": EN + i for i, code in enumerate(LANGUAGES)},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, "no_timestamps_token_id": UNTIMED,
        "prev_sot_token_id": PREVIOUS, "max_length": TEXT_LEN, "max_initial_timestamp_index": 20, "return_timestamps": False,
        "suppress_tokens": [7, 8, TRANSLATE, TRANSCRIBE, SOUND, PREVIOUS, NOTHING, START], "begin_suppress_tokens": [32, END],
    } | changes  # fmt: skip


def whisper_folder(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **generation: Any) -> Path:
    """With a tokenizer whose tokens are bytes."""
    save(whisper(seed, dtype), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": 9, "chunk_length": 1}))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(**generation)))
    write_byte_tokenizer(folder, WORDS, bos_token=WORDS[0], eos_token=WORDS[0])
    told = json.loads((folder / "tokenizer_config.json").read_text())
    del told["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def a_window(seed: int = 0) -> Sound:
    """A spectrogram at random."""
    values = np.random.default_rng(seed).normal(0, 0.7, (2 * ROWS, 9)).astype("<f4")
    return Sound.of(values.tobytes(), 2 * ROWS, 2 * ROWS, 9)


def features(sound: Sound) -> torch.Tensor:
    """As transformers takes them."""
    return torch.from_numpy(np.frombuffer(sound.values, "<f4").reshape(sound.frames, sound.bins).copy()).T[None]


def prompt_of(spec: HearingSpec, sound: Sound, text: list[int]) -> TokenIds:
    placed: PlacedImage = spec.placed(sound, 0)
    return TokenIds([SOUND] * placed.num_rows + [START] * (placed.num_tokens - placed.num_rows) + text, [placed])
