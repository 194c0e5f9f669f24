"""PaliGemma: its config as published, its prompt, whose tokens all see each other, what is refused. Answers: test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from engines import engine_for, greedy, random_model, run, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, TemplateError, UnsupportedError, UsageError
from nanovllm_cli.images.source import data_url
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.text.builtin_templates import BUILTIN_TEMPLATES
from nanovllm_cli.vision_spec import TokenIds
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_vision import MODELS, an_image, logprobs_of, opened, prompt_with

MIX: dict[str, Any] = {
    "architectures": ["PaliGemmaForConditionalGeneration"], "hidden_size": 2048, "image_token_index": 257152,
    "projection_dim": 2048,
    "text_config": {"hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
                    "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "vocab_size": 257216},
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model",
                      "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 256, "patch_size": 14,
                      "projection_dim": 2048},
}  # fmt: skip
"""config.json of google/paligemma-3b-mix-224."""
WORDS = ["<image>", "<bos>", "<eos>"]


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return MIX | own | {"vision_config": MIX["vision_config"] | vision}


def test_a_paligemma_as_published() -> None:
    spec = read(MIX, {"size": {"height": 224, "width": 224}, "image_seq_length": 256, "resample": 3})
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.positions, tower.out_size, tower.post_norm) == (1152, 27, 256, 2048, True)
    assert (spec.least_tokens, spec.whole, spec.mean, spec.size.longest_side) == (256, True, (0.5,) * 3, 224)
    assert read(changed({"image_size": 896})).least_tokens == 4096
    text = spec_from_hf(MIX, hf_family(MIX))
    assert (text.num_layers, text.attention.num_kv_heads, text.attention.both_ways) == (18, 1, False)
    assert hf_family(MIX | {"text_config": {"model_type": "gemma2"}}).name == "gemma2"


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = type(MODELS["paligemma"]).from_dict(MODELS["paligemma"].to_dict())
    config.image_token_index = 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16, "width": 16}}))
    write_byte_tokenizer(folder, tuple(WORDS))
    told = {"bos_token": WORDS[1], "eos_token": WORDS[2], "chat_template": BUILTIN_TEMPLATES["paligemma"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return model, folder


def test_an_answer_about_an_image_is_transformers(paligemma: tuple[Any, Path]) -> None:
    model, folder = paligemma
    picture = pillow.fromarray(colours(50, 70, 3))
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    said = [{"role": "user", "content": [{"type": "text", "text": "caption en"}, image]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
        with pytest.raises(UsageError, match="one image with a text behind it, not 0"):
            llm.generate("caption en", params)
        with pytest.raises(UsageError, match="one image with a text behind it, not 2"):
            llm.chat([{"role": "user", "content": [image, image]}], params)
        with pytest.raises(TemplateError, match="one message, and no conversation"):
            llm.chat([*said, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], params)
    text: Any = PaliGemmaProcessor.__new__(PaliGemmaProcessor)
    text.tokenizer = type("", (), {"bos_token": WORDS[1]})
    (told,) = text.prepare_inputs_layout(text=["<image>caption en"], images=[picture])[1]
    assert told == "<image><bos>caption en\n"
    ids = [*[256] * 16, 257, *b"caption en\n"]
    assert list(prompt) == ids
    assert prompt.images[0].behind == len(ids) - 16
    seen = SiglipImageProcessorPil(size={"height": 16, "width": 16}, resample=3)(images=[picture], return_tensors="pt")
    given = {"pixel_values": seen["pixel_values"], "token_type_ids": torch.zeros(1, len(ids), dtype=torch.long)}
    answer = model.generate(torch.tensor([ids]), **given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="PaliGemma"):
        convert.plan(checkpoint, "gguf", "f32")


@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
def test_neither_steps_nor_neighbours_nor_found_prefixes_change_a_bit(name: str, tmp_path: Path) -> None:
    """Two texts behind one image begin alike, and what is cached of them is not the same: each sees all of its own."""
    _, worker, vision, token = opened(name, tmp_path, num_blocks=64)
    assert vision is not None
    first = prompt_with(vision, [an_image(vision, 4, 4), 7], token)
    (placed,) = first.images
    other = TokenIds([*first[:-1], 300 + first[-1] % 7], first.images)
    answered = TokenIds([*first, *range(100, 140)], first.images)  # as one that goes on with what was answered
    assert placed.behind == 7
    requests = [(prompt, greedy(9, logprobs=0)) for prompt in (first, other, answered)]
    alone = [logprobs_of(run(engine_for(worker), [request])[0]) for request in requests]
    assert alone[0] != alone[1]
    for setting in ({}, {"max_num_batched_tokens": 3}, {"num_blocks": 7}, {"num_speculative_tokens": 3}):
        engine = engine_for(worker, **setting)
        for _ in range(2):
            assert [logprobs_of(each) for each in run(engine, requests)] == alone
        assert engine.stats().prefix_hit_tokens > 0
    assert not vision.fits([placed._replace(start=1)], len(first) + 1)
    assert not vision.fits([placed._replace(behind=-1)], len(first))
    assert not vision.fits([placed._replace(behind=8)], len(first))
    assert not vision.fits([placed, placed], len(first))


def test_a_text_that_is_longer_than_a_window_is_refused(tmp_path: Path) -> None:
    _, worker, vision, token = opened("paligemma2", tmp_path)
    assert vision is not None
    assert vision.prefix == 25
    run(engine_for(worker), [(prompt_with(vision, [an_image(vision, 4, 4), 9], token), greedy(2))])
    with pytest.raises(UsageError, match="26 tokens, of which this model sees 25 at a time"):
        run(engine_for(worker), [(prompt_with(vision, [an_image(vision, 4, 4), 10], token), greedy(2))])


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({}, text_config={"hidden_size": 8, "use_bidirectional_attention": False}), {}, UnsupportedError, "not see all of"),
    (changed({}, text_config={"model_type": "llama", "hidden_size": 8}), {}, UnsupportedError, "unknown architecture 'llama'"),
    (changed({"model_type": "clip_vision_model"}), {}, UnsupportedError, "a tower of the kind 'clip_vision_model'"),
    (changed({"image_size": 225}), {}, CheckpointError, "don't divide into patches of 14"),
    (MIX | {"projection_dim": 2304}, {}, CheckpointError, "rows of 2304 numbers for a decoder of 2048"),
    (MIX, {"image_seq_length": 1024}, CheckpointError, "is 1024, and the tower's 256"),
    (MIX, {"size": {"height": 448, "width": 448}}, CheckpointError, r"not \[448\]"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
