"""Whole prompts with sounds, from files to answers, beside what transformers' processors and models make of the same; and how
these families are asked for transcripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hearing_kin
from engines import save
from hearing_kin import random_ear, words_of, written
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.models import ears_flamingo, ears_glm, ears_granite, ears_omni
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.transcripts import asks
from sounding import noise, sound_part
from sounding import wav as saved
from test_hearing_granite import model_of as granite
from test_llm import write_byte_tokenizer

transformers = pytest.importorskip("transformers")
FIRST = 256
TEMPLATE = """{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}
{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{{% for part in message.content %}}\
{{% if part.type == 'audio' %}}{sound}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>
{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}"""
ASKED = "What is it?"


def folder_of(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """With pieces of two seconds."""
    words, small = words_of(family), hearing_kin.config_of

    def config_of_seconds(family: str, **text: Any) -> Any:
        config = small(family, **text)
        key = "max_position_embeddings" if family == "glm-asr" else "max_source_positions"
        setattr(config.audio_config, key, 100)
        if family == "qwen2.5-omni":
            config.audio_config.n_window, config.audio_config.max_source_positions = 100, 1500
            config.audio_token_id = FIRST + 2
        config.audio_token_id = FIRST + 2
        return config

    monkeypatch.setattr(hearing_kin, "config_of", config_of_seconds)
    model = random_ear(family, vocab_size=FIRST + len(words), eos_token_id=FIRST + 1, max_position_embeddings=1024)
    monkeypatch.undo()
    save(model, folder)
    settings = {"feature_size": 9} | ({} if family == "qwen2.5-omni" else {"chunk_length": 2})
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    write_byte_tokenizer(folder, words, eos_token=words[1], chat_template=TEMPLATE.format(sound=written(family)))
    return model, folder


def messages_with(samples: np.ndarray) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [sound_part(saved(samples, bits=32, kind=3)), {"type": "text", "text": ASKED}]}]


@pytest.mark.parametrize("family", ["audio-flamingo", "music-flamingo", "glm-asr"])
@pytest.mark.parametrize("count", [9_001, 75_003])
def test_a_prompt_is_that_of_transformers_processor_and_so_is_the_answer(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = folder_of(family, tmp_path, monkeypatch)
    samples = noise(count).astype(np.float32)
    with LLM(str(folder), config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        ids = llm.encode_chat(messages_with(samples))
        (answer,) = llm.chat(messages_with(samples), SamplingParams(temperature=0.0, max_tokens=1, logprobs=0))
    name = {"audio-flamingo": "AudioFlamingo3", "music-flamingo": "MusicFlamingo", "glm-asr": "GlmAsr"}[family]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|im_end|>", eos_token="<|im_end|>"
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=9, chunk_length=2)
    processor = getattr(transformers, f"{name}Processor")(extractor, tokenizer)
    text = f"<|im_start|>user\n{written(family)}{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    given = processor(text=[text], audio=[samples])
    assert list(ids) == given["input_ids"][0].tolist()
    with torch.inference_mode():
        logits = model(**given).logits[0, -1]
    assert list(answer.outputs[0].token_ids) == [int(logits.argmax())]
    logprobs = answer.outputs[0].logprobs
    assert logprobs is not None
    assert logprobs[0].logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)


def test_a_qwen2_5_omnis_sound_is_many_pieces_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' feature extractor fills up five minutes, of which a mask says how much counts."""
    model, folder = folder_of("qwen2.5-omni", tmp_path, monkeypatch)
    samples = noise(75_003).astype(np.float32)
    with LLM(str(folder), config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        ids = llm.encode_chat(messages_with(samples))
        (answer,) = llm.chat(messages_with(samples), SamplingParams(temperature=0.0, max_tokens=1, logprobs=0))
    extractor = transformers.WhisperFeatureExtractor(feature_size=9, chunk_length=300)
    heard = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", padding="max_length")
    count = ((int(heard["attention_mask"].sum()) - 1) // 2 + 1 - 2) // 2 + 1
    text = f"<|im_start|>user\n<|audio_bos|>{'<|AUDIO|>' * count}<|audio_eos|>{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    wanted = Tokenizer.from_folder(folder).encode(text, add_special_tokens=False)
    assert list(ids) == list(wanted)
    assert [placed.num_tokens for placed in ids.images] == [50, 50, count - 100]
    with torch.inference_mode():
        tokens = torch.tensor([wanted])
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), input_features=heard["input_features"],
                       feature_attention_mask=heard["attention_mask"]).logits[0, -1]  # fmt: skip
    assert list(answer.outputs[0].token_ids) == [int(logits.argmax())]


def test_a_template_that_knows_nothing_of_sounds_gets_a_granites_mark(tmp_path: Path) -> None:
    folder = save(granite("plain"), tmp_path)
    words = ("<|im_start|>", "<|im_end|>", "<|audio|>")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"audio_token_index": FIRST + 2}))
    template = TEMPLATE.format(sound="").replace("part.type == 'audio'", "false")
    assert "audio" not in template
    write_byte_tokenizer(folder, words, eos_token=words[1], chat_template=template)
    samples = noise(4000).astype(np.float32)
    with LLM(str(folder), config=EngineConfig(threads=2, num_blocks=64, dtype="float32")) as llm:
        ids = llm.encode_chat(messages_with(samples))
        text = llm.tokenizer.decode(ids, skip_special_tokens=False)
        (answer,) = llm.chat(messages_with(samples), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    tokens = "<|audio|>" * (2 * -(-13 // 6))  # 26 frames, of which 13 pairs are three windows
    assert text == f"<|im_start|>user\n{tokens}{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    assert len(answer.outputs[0].token_ids) == 3


@pytest.mark.parametrize(("known", "asked", "in_french"), [
    (ears_omni.OMNI_TRANSCRIPT, "Transcribe the audio into text.", "Transcribe the French audio into text."),
    (ears_flamingo._TRANSCRIPT, "Transcribe the input speech.", "Transcribe the input speech. It is French."),
    (ears_glm._TRANSCRIPT, "Please transcribe this audio into text", "Please transcribe this audio into text. It is French."),
    (ears_granite._TRANSCRIPT, "can you transcribe the speech into a written format?",
     "can you transcribe the speech into a written format? It is French."),
])  # fmt: skip
def test_transcripts_are_asked_for_as_they_were_trained(known: Any, asked: str, in_french: str, tmp_path: Path) -> None:
    """As transformers' processors do, where they have a question of their own."""
    write_byte_tokenizer(tmp_path, ("<|im_end|>",))
    tokenizer, part = Tokenizer.from_folder(tmp_path), {"type": "audio_url", "audio_url": {"url": "data:"}}
    for more, told in (((), asked), (("fr",), in_french), ((None, "Sum it up."), "Sum it up.")):
        messages, begins = asks(known, tokenizer, part, *more)
        assert messages == [{"role": "user", "content": [part, {"type": "text", "text": told}]}]
        assert begins == []


def test_questions_are_those_of_processors() -> None:
    import inspect

    for name, known in (("AudioFlamingo3", ears_flamingo._TRANSCRIPT), ("GlmAsr", ears_glm._TRANSCRIPT)):
        given = inspect.signature(getattr(transformers, f"{name}Processor").__init__).parameters
        assert given["default_transcription_prompt"].default == known.question
        assert given["audio_token"].default == config_token(name)


def config_token(name: str) -> str:
    return {"AudioFlamingo3": ears_flamingo._TOKENS, "GlmAsr": ears_glm._TOKENS}[name].token
