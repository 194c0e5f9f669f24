"""Models that hear by Whisper's encoder, or one much like it, tiny and random, by transformers; and what transformers makes of a
prompt with pieces of sounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engines import random_model
from hearing import TEXT, TOKEN
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.vision_spec import Sound, TokenIds

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "num_mel_bins": 9}
FAMILIES = ["audio-flamingo", "music-flamingo", "glm-asr", "qwen2.5-omni"]
ARCHITECTURES = {
    "audio-flamingo": "AudioFlamingo3ForConditionalGeneration", "music-flamingo": "MusicFlamingoForConditionalGeneration",
    "glm-asr": "GlmAsrForConditionalGeneration", "qwen2.5-omni": "Qwen2_5OmniThinkerForConditionalGeneration",
}  # fmt: skip


def config_of(family: str, **text: Any) -> Any:
    """Pieces of 50 frames, 56 or 20."""
    import transformers

    text = TEXT | text
    if family == "qwen2.5-omni":
        audio = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 9,
                 "n_window": 10, "output_dim": text["hidden_size"], "max_source_positions": 25}  # fmt: skip
        vision = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 8, "out_hidden_size": text["hidden_size"]}
        sections = [4, 2, 2] if text["hidden_size"] // text["num_attention_heads"] == 16 else [4, 4, 4]
        text |= {"rope_parameters": {"mrope_section": sections, "rope_type": "default", "rope_theta": 1e4}}
        return transformers.Qwen2_5OmniThinkerConfig(
            audio_config=audio, vision_config=vision, text_config=text, audio_token_index=TOKEN,
            vision_start_token_id=510, audio_start_token_id=509, image_token_index=508, video_token_index=507,
        )
    if family == "glm-asr":
        audio = SHAPE | {"intermediate_size": 128, "max_position_embeddings": 28}
        return transformers.GlmAsrConfig(
            audio_config=audio, text_config=text | {"model_type": "llama"}, audio_token_id=TOKEN, tie_word_embeddings=False
        )
    audio, text = SHAPE | {"max_source_positions": 25, "model_type": "audioflamingo3_encoder"}, text | {"model_type": "qwen2"}
    if family == "audio-flamingo":
        return transformers.AudioFlamingo3Config(audio_config=audio, text_config=text, audio_token_id=TOKEN)
    assert family == "music-flamingo"
    return transformers.MusicFlamingoConfig(
        audio_config=audio, text_config=text, audio_token_id=TOKEN,
        rope_parameters={"rope_theta": 1200.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    )  # fmt: skip


def random_ear(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    import transformers

    kind = getattr(transformers, ARCHITECTURES[family])

    class Made:
        from_config = staticmethod(lambda config, attn_implementation: kind._from_config(config, attn_implementation="eager"))

    return random_model(config_of(family, **text), seed, dtype, Made)


def a_piece(spec: HearingSpec, heard: int, seed: int = 0, ordinal: int = 0) -> Sound:
    """A spectrogram at random."""
    frames, bins = spec.piece if spec.padded else heard, spec.tower.num_bins
    values = np.random.default_rng(seed).normal(0, 0.7, (frames, bins)).astype("<f4")
    return Sound.of(values.tobytes(), frames, heard, bins, ordinal if spec.timed else 0)


def values_of(sound: Sound) -> torch.Tensor:
    """[bins, frames]."""
    return torch.from_numpy(np.frombuffer(sound.values, "<f4").reshape(sound.frames, -1).copy()).T


def heard_by_transformers(family: str, prompt: TokenIds) -> dict[str, torch.Tensor]:
    """Its arguments. Pieces of a Qwen2.5-Omni's sound that follow each other are one of its inputs."""
    ids = torch.tensor([list(prompt)])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family != "qwen2.5-omni":
        sounds = [placed.image for placed in prompt.images]
        mask = torch.tensor([[int(i < each.heard) for i in range(each.frames)] for each in sounds])
        return given | {"input_features": torch.stack(list(map(values_of, sounds))), "input_features_mask": mask}
    runs: list[list[torch.Tensor]] = []
    end = None
    for placed in prompt.images:
        if placed.start != end:
            runs.append([])
        runs[-1].append(values_of(placed.image))
        end = placed.end
    together = [torch.cat(run, dim=1) for run in runs]
    width = max(each.shape[1] for each in together)
    mask = torch.tensor([[int(i < each.shape[1]) for i in range(width)] for each in together])
    padded = torch.stack([torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in together])
    return given | {"input_features": padded, "feature_attention_mask": mask}


MARKS = {
    "audio-flamingo": ("<sound>", ""), "music-flamingo": ("<sound>", ""), "qwen2.5-omni": ("<|AUDIO|>", "audio_bos audio_eos"),
    "glm-asr": ("<|pad|>", "begin_of_audio end_of_audio"),
}  # fmt: skip
"""What a template writes for a sound, and what around it."""


def words_of(family: str) -> tuple[str, ...]:
    mark, around = MARKS[family]
    further = ("<|sound_bos|>", "<|sound_eos|>") if family == "music-flamingo" else ("<|IMAGE|>", "<|VIDEO|>")
    return ("<|im_start|>", "<|im_end|>", mark, *further, *(f"<|{each}|>" for each in around.split()))


def written(family: str) -> str:
    mark, around = MARKS[family]
    return mark.join(f"<|{each}|>" for each in around.split()) if around else mark
