"""Conversations with images of models that see since lately: ids and answers held against transformers, and against files that
folders are converted to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.llama4.processing_llama4 import Llama4Processor

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from seeing import kimi_as_published
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import with_merges
from test_tower_kimi import navit_resize
from test_tower_llama4 import laid
from test_vision import MODELS

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
TURNS = "<|im_start|>", "<|im_end|>"
CASES: dict[str, tuple[str, tuple[str, ...], str, dict[str, Any]]] = {
    "llama4": ("<|patch|>", ("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
               "<|image|>", {"size": {"height": 32, "width": 32}, "max_patches": 6}),
    "kimi-k2.5": ("<|media_pad|>", ("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
                  "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", {"patch_size": 4, "max_patches": 60}),
    "janus": ("<image_placeholder>", ("<begin_of_image>", "<end_of_image>"), "<image_placeholder>",
              {"size": {"height": 16, "width": 16}, "min_size": 2, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.5] * 3}),
}  # fmt: skip
"""The token of an image's rows, others, what a template writes for an image, and the image processor's settings."""
PICTURES = [pillow.fromarray(colours(*sides, 3)) for sides in ((50, 33), (5, 90), (20, 20))]


def words_of(name: str) -> list[str]:
    token, others, _, _ = CASES[name]
    return [token, *others, *TURNS]


def made(name: str, folder: Path) -> tuple[Any, Path]:
    config = type(MODELS[name]).from_dict(MODELS[name].to_dict())
    config.image_token_id = 256
    config.text_config.max_position_embeddings = 1024
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    if name == "kimi-k2.5":
        kimi_as_published(folder)
    _, _, written, images = CASES[name]
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    template = TEMPLATE.replace("IMAGE", written)
    write_byte_tokenizer(folder, tuple(words_of(name)), eos_token="<|im_end|>", chat_template=template)
    return model, folder


def normed(pixels: np.ndarray, mean: tuple[float, float, float] = (0.5, 0.5, 0.5)) -> torch.Tensor:
    return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255 - torch.tensor(mean).view(3, 1, 1)) / 0.5


def of_llama4(picture: pillow.Image) -> tuple[str, list[torch.Tensor]]:
    """Text and tiles, as transformers' processors have them."""
    (tall, wide), (inner_tall, inner_wide) = laid(picture.height, picture.width, 6, 32)
    canvas = np.zeros((tall, wide, 3), np.uint8)
    canvas[:inner_tall, :inner_wide] = np.asarray(picture.resize((inner_wide, inner_tall), pillow.Resampling.BILINEAR))
    grid = tall // 32, wide // 32
    tiles = [canvas[i * 32 : i * 32 + 32, j * 32 : j * 32 + 32] for i in range(grid[0]) for j in range(grid[1])]
    if len(tiles) > 1:
        tiles.append(np.asarray(picture.resize((32, 32), pillow.Resampling.BILINEAR)))
    processor: Any = Llama4Processor.__new__(Llama4Processor)
    return processor._prompt_split_image(grid, 16), [normed(each) for each in tiles]


def of_kimi(picture: pillow.Image) -> tuple[str, torch.Tensor, list[int]]:
    (tall, wide), whole = navit_resize(picture.height, picture.width, 4, 2, 60, 512)
    canvas = np.zeros((*whole, 3), np.uint8)
    canvas[:tall, :wide] = np.asarray(picture.resize((wide, tall), pillow.Resampling.BICUBIC))
    patches = normed(canvas).unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4)
    text = "<|media_begin|>image<|media_content|>" + "<|media_pad|>" * (whole[0] * whole[1] // 64) + "<|media_end|>"
    return text, patches.flatten(0, 1), [1, whole[0] // 4, whole[1] // 4]


def expected(name: str) -> tuple[str, dict[str, Any]]:
    """All images' text, and what transformers' model is given of them."""
    if name == "llama4":
        both = [of_llama4(picture) for picture in PICTURES]
        return "".join(text for text, _ in both), {"pixel_values": torch.stack([tile for _, tiles in both for tile in tiles])}
    if name == "kimi-k2.5":
        three = [of_kimi(picture) for picture in PICTURES]
        grids = torch.tensor([grid for _, _, grid in three])
        return "".join(text for text, _, _ in three), {"pixel_values": torch.cat([each for _, each, _ in three]),
                                                       "image_grid_thw": grids}  # fmt: skip
    processor: Any = JanusImageProcessorPil(**CASES["janus"][3])
    seen = processor(images=PICTURES, return_tensors="pt")["pixel_values"]
    return ("<begin_of_image>" + "<image_placeholder>" * 16 + "<end_of_image>") * len(PICTURES), {"pixel_values": seen}


def said() -> list[dict[str, Any]]:
    urls = [{"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}} for picture in PICTURES]
    return [{"role": "user", "content": [*urls, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_about_images_is_transformers(name: str, tmp_path: Path) -> None:
    model, folder = made(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said())
        (output,) = llm.chat(said(), params)
    seen, given = expected(name)
    text = f"<|im_start|>user\n{seen}What is it?<|im_end|>\n<|im_start|>assistant\n"
    words = words_of(name)
    for place, word in enumerate(words):
        text = text.replace(word, chr(0xE000 + place))
    ids = [256 + ord(each) - 0xE000 if each >= "\ue000" else ord(each) for each in text]
    assert list(prompt) == ids
    answer = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*ids, *answer]]), **given).logits[0, len(ids) - 1 : -1]
    assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["llama4", "janus"])
def test_a_converted_model_answers_as_its_folder_does(name: str, tmp_path: Path) -> None:
    """With a file of what it sees by beside it. A K2.5's folder of transformers has a text that no file holds."""
    _, folder = made(name, tmp_path / "folder")
    with_merges(folder, words_of(name))
    if (config := tmp_path / "folder" / "config.json") and name == "llama4":
        known = json.loads(config.read_text())
        known["image_token_index"] = known["text_config"]["vocab_size"] - len(words_of(name))
        config.write_text(json.dumps(known))
    images = json.loads((folder / "preprocessor_config.json").read_text())
    said_of_images = {key: images[key] for key in ("size", "image_mean") if key in images}
    (folder / "preprocessor_config.json").write_text(json.dumps(said_of_images))
    output = tmp_path / "it.gguf"
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        assert plan.tower is not None
        convert.write(checkpoint, plan, output)
        plan.tower.write(output, replace=False, progress=NullProgress())
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for source in folder, output:
        with LLM(source, config=EngineConfig(threads=2, dtype="float32")) as llm:
            answers.append((list(llm.encode_chat(said())), list(llm.chat(said(), params)[0].outputs[0].token_ids)))
    assert answers[0] == answers[1]
