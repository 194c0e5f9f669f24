"""LFM3-VL: its config as transformers has it, what is refused, a conversation about two images. Rows and answers: test_towers.py
and test_vision.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, Lfm3VlConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from seeing import FIRST, TEMPLATE, WORDS
from test_image_pieces import read
from test_images import asked_about, colours
from test_llm import write_byte_tokenizer
from test_models import CASES
from test_vision import TOWER

PUBLISHED: dict[str, Any] = Lfm3VlConfig().to_dict() | {"architectures": ["Lfm3VlForConditionalGeneration"]}
IMAGES: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}


def changed(vision: dict[str, Any], **config: Any) -> dict[str, Any]:
    return PUBLISHED | config | {"vision_config": PUBLISHED["vision_config"] | vision}


@pytest.mark.parametrize("vision", [{}, {"layer_types": None, "rope_parameters": None}, {"patch_size": [16, 16]}])
def test_an_lfm3_vl_as_transformers_has_it(vision: dict[str, Any]) -> None:
    spec = read(changed(vision), IMAGES)
    tower = spec.tower
    own: Any = Lfm3VlConfig().vision_config
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.key_heads) == (1024, 14, 16, 8)
    assert (tower.convolves, tower.taps) == (tuple(i for i, kind in enumerate(own.layer_types) if kind == "conv"), 3)
    assert tower.convolves == (0, 1, 3, 5, 7, 9, 11, 13)
    assert (tower.out_size, tower.projector_size, tower.theta, tower.cell, tower.qkv_rows) == (2048, 4096, 1e6, 32, 2048)
    assert (spec.has_grid, spec.size.min_pixels, spec.size.max_pixels) == (False, 56 * 56, 1280 * 28 * 28)
    assert read(PUBLISHED, IMAGES | {"size": {"shortest_edge": 4096, "longest_edge": 8192}}).size.max_pixels == 8192


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"layer_types": ["conv"] * 13 + ["mamba"]}), {}, "type 'mamba'"),
    (changed({"model_type": "siglip2_vision_model"}), {}, "a tower of the kind 'siglip2_vision_model'"),
    (changed({"in_channels": 1}), {}, "other than three colours"),
    (changed({"hidden_act": "gelu"}), {}, "hidden_act 'gelu'"),
    (changed({"patch_size": [16, 14]}), {}, "'patch_size' other than of a square"),
    (changed({"rope_parameters": {"rope_type": "yarn"}}), {}, "of the type 'yarn'"),
    (changed({}, projector_hidden_act="relu"), {}, "projector_hidden_act 'relu'"),
    (PUBLISHED, {"do_normalize": False}, "do_normalize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"layer_types": ["conv"] * 13}), {}, "a list of 14 kinds"),
    (changed({"layer_types": "conv"}), {}, "a list of 14 kinds"),
    (changed({"num_key_value_heads": 5}), {}, "16 heads of queries can't share 5 of keys"),
    (changed({"num_key_value_heads": 32}), {}, "can't share 32 of keys"),
    (changed({"num_attention_heads": 12}), {}, "12 heads can't share 1024"),
    (changed({"conv_kernel_size": 4}), {}, "'conv_kernel_size' must be odd"),
    (changed({"conv_kernel_size": 65}), {}, "at most 63, not 65"),
    (changed({"conv_kernel_size": 0}), {}, "'conv_kernel_size' must be"),
    (changed({"num_hidden_layers": 1 << 20}), {}, "at most 1024 are believed"),
    (PUBLISHED, {"patch_size": 14}, "'patch_size' is 14, and the tower's 16"),
    (PUBLISHED, {"merge_size": 3}, "'merge_size' is 3"),
    (PUBLISHED, {"size": {"shortest_edge": 9000, "longest_edge": 4096}}, "images of 9000 to 4096 pixels"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


@pytest.fixture(scope="module")
def lfm3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    text = CASES["lfm3"].to_dict() | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST + 1, "max_position_embeddings": 512}
    config: Any = Lfm3VlConfig(
        text_config=text, image_token_id=FIRST + 3, video_token_id=FIRST + 5, projector_hidden_size=40, tie_word_embeddings=False,
        vision_config=TOWER | {"num_key_value_heads": 1, "num_hidden_layers": 3, "patch_size": 4},
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[1], chat_template=TEMPLATE)
    return model, folder


PICTURES = [pillow.fromarray(colours(50, 33, 3)), pillow.fromarray(colours(7, 91, 3))]
SAID = asked_about(PICTURES)


@pytest.mark.parametrize(("most", "tokens"), [(4096, [6 * 4, 1 * 11]), (9, [3 * 2, 1 * 10])])
def test_a_chat_about_two_images_is_transformers(lfm3: tuple[Any, Path], most: int, tokens: list[int]) -> None:
    model, folder = lfm3
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19, image_max_tokens=most)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, params)
    size = {"shortest_edge": 256, "longest_edge": min(4096, most * 64)}
    processor: Any = Qwen2VLImageProcessorPil(size=size, patch_size=4)
    seen = processor(images=PICTURES, return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in seen["image_grid_thw"]]
    assert counts == tokens
    first, last = ("<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" for count in counts)
    ids: list[int] = []
    for piece in re.split(r"(<\|[^>]*\|>)", f"<|im_start|>user\n{first}and{last}differ?<|im_end|>\n<|im_start|>assistant\n"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    given = {"input_ids": torch.tensor([ids]), "pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
    answer = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_no_gguf_file_is_made_of_one(lfm3: tuple[Any, Path]) -> None:
    """llama.cpp has neither its decoder nor its tower."""
    with open_checkpoint(lfm3[1]) as checkpoint, pytest.raises(UnsupportedError, match="LFM3"):
        convert.plan(checkpoint, "gguf", "f32")
