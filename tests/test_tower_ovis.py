"""Ovis2: its config as published, how an image is divided, pixels and prompts as transformers has them, an answer about an image,
what is refused. Rows, steps: test_towers.py, test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, Ovis2Processor
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil, get_min_tile_covering_grid

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.vision_spec import Image
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_sees_by_no_file, with_merges
from test_tower_memory import Held
from test_vision import MODELS

OVIS: dict[str, Any] = {
    "architectures": ["Ovis2ForConditionalGeneration"], "hidden_size": 896, "image_token_id": 151665, "model_type": "ovis2",
    "text_config": {"hidden_size": 896, "intermediate_size": 4864, "model_type": "qwen2", "num_attention_heads": 14,
                    "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936},
    "tie_word_embeddings": True, "visual_indicator_token_ids": [151666, 151667, 151668, 151669, 151670], "vocab_size": 151936,
    "vision_config": {"hidden_act": "silu", "hidden_size": 1024, "hidden_stride": 2, "image_size": 448, "intermediate_size": 2816,
                      "mlp_bias": False, "model_type": "ovis2_vision", "num_attention_heads": 8, "num_hidden_layers": 24,
                      "num_visual_indicator_tokens": 5, "patch_size": 14, "qkv_bias": False, "rms_norm_eps": 1e-5,
                      "tokenize_function": "softmax", "vocab_size": 65536},
}  # fmt: skip
"""A config of an Ovis2 of 1B as transformers has it, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "crop_to_patches": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711], "max_patches": 9,
    "min_patches": 1, "resample": 3, "size": {"height": 448, "width": 448}, "use_covering_area_grid": True,
}  # fmt: skip
SMALL_IMAGES: dict[str, Any] = IMAGES | {"size": {"height": 8, "width": 8}, "max_patches": 6}
WORDS = [
    "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>", "<|im_start|>", "<|im_end|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return OVIS | own | {"vision_config": OVIS["vision_config"] | vision}


def test_it_is_as_published() -> None:
    spec = read(OVIS, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size, tower.out_size) == (
        1024, 24, 8, 2816, 896,
    )  # fmt: skip
    assert (tower.cell, tower.positions, tower.projector_size, tower.marks, tower.gated) == (28, 1024, 65531, 5, True)
    assert (spec.size.tile, spec.size.apart, len(spec.size.grids)) == (448, True, 22)
    assert (spec.least_tokens, most_tokens(spec)) == (256 + 3, 10 * 256 + 2 + 9)
    assert most_rows(spec) == most_tokens(spec)
    assert read(OVIS).size.grids == ()  # settings that say nothing cut nothing
    text = spec_from_hf(OVIS, hf_family(OVIS))
    assert (text.num_layers, text.attention.num_kv_heads, text.tied_head) == (24, 2, True)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_an_image_is_divided_as_transformers_does_it(height: int, width: int, most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    spec = read(OVIS, IMAGES | {"max_patches": most})
    columns, rows = get_min_tile_covering_grid((height, width), 448, most)
    found = fitted(spec.size, height, width)
    assert found.whole == (448, 448)
    assert found.grid == (None if rows * columns == 1 else (rows, columns))
    assert found.pieces == found.first == (None if rows * columns == 1 else (rows * 448, columns * 448))
    limited = spec.limited(256 * 3)
    assert most_tokens(limited) <= 256 * 3 or not limited.size.grids


@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("shape", [(7, 8), (8, 30), (40, 9), (16, 17), (31, 33)])
def test_pixels_and_tokens_are_those_of_transformers(shape: tuple[int, int], most: int) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    said = SMALL_IMAGES | {"max_patches": most}
    theirs: Any = Ovis2ImageProcessorPil(**said | {"do_rescale": False, "do_normalize": False})
    seen = theirs(images=[picture], return_tensors="pt")
    small = changed({"image_size": 8, "patch_size": 2})
    spec = read(small, said)
    picture_read = read_image(saved(picture, "PNG"), spec, "it")
    (found,) = picture_read.images
    assert found.pixels == seen["pixel_values"].to(torch.uint8).permute(0, 2, 3, 1).numpy().tobytes()
    names: Any = Ovis2Processor.__new__(Ovis2Processor)
    names.image_seq_length = 4
    text = names.replace_image_token(seen, 0)
    assert spec.num_tokens(picture_read) == text.count("<")
    assert found.mosaic is not None
    tokens = text.replace("><", ">|<").split("|")
    marks = [(place, spec.tokens.marks.index(token)) for place, token in enumerate(tokens) if token != "<IMG_ATOM>"]
    assert found.mosaic.marks(2) == marks


def test_an_answer_about_an_image_is_transformers(tmp_path: Path) -> None:
    config = type(MODELS["ovis2"]).from_dict(MODELS["ovis2"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    config.visual_indicator_token_ids = [257, 258, 259, 260, 261]
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    (folder / "preprocessor_config.json").write_text(json.dumps(SMALL_IMAGES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[-1], chat_template=TEMPLATE)
    pictures = [pillow.fromarray(colours(*sides, 3)) for sides in ((31, 33), (5, 6))]
    urls = [{"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}} for picture in pictures]
    said = [{"role": "user", "content": [*urls, {"type": "text", "text": "What is it?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    seen = Ovis2ImageProcessorPil(**SMALL_IMAGES)(images=pictures, return_tensors="pt")
    names: Any = Ovis2Processor.__new__(Ovis2Processor)
    names.image_seq_length = 4
    first, second = (names.replace_image_token(seen, place) for place in range(2))
    assert first.count("<IMG_COL>") > 0 < first.count("<IMG_ROW>")
    text = f"<|im_start|>user\n{first}\n{second}\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    for place, word in enumerate(WORDS):
        text = text.replace(word, chr(0xE000 + place))
    ids = [256 + ord(each) - 0xE000 if each >= "\ue000" else ord(each) for each in text]
    assert list(prompt) == ids
    answer = model.generate(
        torch.tensor([ids]), pixel_values=seen["pixel_values"], max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    check_sees_by_no_file(with_merges(folder, WORDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_weights_of_a_table_take_is_told(dtype: torch.dtype) -> None:
    """Not all rows have theirs at once."""
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    config = changed(small | {"image_size": 64, "patch_size": 2, "vocab_size": 20_000})
    spec = read(config, IMAGES | {"size": {"height": 64, "width": 64}}).tower
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, image = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(320, 64, bytes(3 * 320 * 64), Mosaic(2, 2, 0, 0))
    with torch.inference_mode(), Held() as held:
        tower(image)
    assert held.most <= work_bytes(spec, 320 * 64, dtype) <= 1.6 * held.most


def test_a_mosaic_that_nobody_made_is_refused() -> None:
    spec = read(changed({"image_size": 8, "patch_size": 2}), SMALL_IMAGES)
    pixels = np.zeros((24, 8, 3), np.uint8).tobytes()
    fine = Image.of(24, 8, pixels, Mosaic(1, 2, 0, 0))
    assert spec.fits([spec.placed(fine, 3)], 40)
    bad = [Mosaic(1, 2, 30, 40), Mosaic(1, 2, 0, 40), Mosaic(2, 2, 0, 0), Mosaic(1, 7, 0, 0), Mosaic(0, 0, 0, 0)]
    for mosaic in bad:
        image = fine._replace(mosaic=mosaic)
        assert not spec.fits([spec.placed(fine, 3)._replace(image=image)], 99)
    assert not spec.fits([spec.placed(fine, 3)._replace(columns=12)], 40)


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({"tokenize_function": "st_argmax"}), {}, UnsupportedError, "tokenize_function 'st_argmax'"),
    (changed({"qkv_bias": True}), {}, UnsupportedError, "qkv_bias 'True'"),
    (changed({"mlp_bias": True}), {}, UnsupportedError, "mlp_bias 'True'"),
    (changed({"num_visual_indicator_tokens": 6}), {}, UnsupportedError, "num_visual_indicator_tokens '6'"),
    (changed({"model_type": "aimv2"}), {}, UnsupportedError, "a tower of the kind 'aimv2'"),
    (changed({"hidden_act": "relu"}), {}, UnsupportedError, "activation 'relu'"),
    (OVIS, {"use_covering_area_grid": False}, UnsupportedError, "use_covering_area_grid false"),
    (OVIS, {"min_patches": 2}, UnsupportedError, "min_patches 2"),
    (OVIS, {"do_center_crop": True}, UnsupportedError, "do_center_crop true"),
    (changed({"hidden_stride": 3}), {}, CheckpointError, "don't divide into tokens of 3 x 3 patches of 14"),
    (changed({"vocab_size": 5}), {}, CheckpointError, "a table of 5 entries"),
    (changed({}, hidden_size=1536), {}, CheckpointError, "rows of 1536 numbers for a decoder of 896"),
    (OVIS, {"size": {"height": 384, "width": 384}}, CheckpointError, r"448 x 448 pixels, not \[384\]"),
    (OVIS, {"max_patches": 1 << 20}, CheckpointError, "are not believed"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
