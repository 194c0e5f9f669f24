"""MiniCPM-V 4.6 and MiniCPM-OCR: their configs, how an image is cut, what is refused, conversations about images, and files. Rows
and answers: test_towers.py, test_vision.py, test_mmproj.py."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, MiniCPMOcrConfig, MiniCPMV4_6Config, MiniCPMV4_6Processor
from transformers.models.minicpm_ocr.image_processing_minicpm_ocr import MiniCPMOcrImageProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from seeing import FIRST
from test_image_pieces import blank, read
from test_images import asked_about, colours, saved, seeing
from test_llm import write_byte_tokenizer
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_models import CASES
from test_vision import MODELS, TOWER

V4_6: dict[str, Any] = {
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6", "drop_vision_last_layer": False,
    "image_size": 1120, "insert_layer_id": 6, "image_token_id": 248056, "tie_word_embeddings": True,
    "text_config": {"model_type": "qwen3_5_text", "hidden_size": 1024},
    "vision_config": {"model_type": "minicpmv4_6_vision", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
                      "image_size": 980, "intermediate_size": 4304, "layer_norm_eps": 1e-06, "num_attention_heads": 16,
                      "num_channels": 3, "num_hidden_layers": 27, "patch_size": 14},
}  # fmt: skip
"""config.json of openbmb/MiniCPM-V-4.6, in so far as it is of what sees."""
OCR = MiniCPMOcrConfig().to_dict() | {"architectures": ["MiniCPMOcrForConditionalGeneration"]}
SLICES = SizeRule("slices", 56, tile=448, most_tiles=9)
SIDES = st.integers(1, 4000)
WORDS = ["<|im_end|>", "<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]


def changed(vision: dict[str, Any], **config: Any) -> dict[str, Any]:
    return V4_6 | config | {"vision_config": V4_6["vision_config"] | vision}


def test_a_minicpm_v_as_published() -> None:
    spec = read(V4_6, {"patch_size": 14})
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1152, 27, 16, 4304)
    assert (tower.positions, tower.shrinks, tower.cell, tower.joins, tower.out_size) == (70 * 70, 6, 56, 4, 1024)
    assert (tower.projector_size, tower.projector_eps, tower.eps, tower.activation) == (4608, 1e-6, 1e-6, "gelu_tanh")
    assert (spec.size, spec.mean, spec.std, spec.has_grid) == (SLICES, (0.5,) * 3, (0.5,) * 3, False)
    assert spec.least_tokens == 64
    more = read(V4_6 | {"downsample_mode": "4x"}, {"downsample_mode": "4x"}).tower
    assert (more.shrinks, more.cell, more.joins) == (None, 28, 4)
    assert read(V4_6, {"slice_mode": False}).size.most_tiles == 1
    assert hf_family(V4_6).name == "qwen3_5"


def test_a_minicpm_ocr_has_four_times_as_many_tokens() -> None:
    spec = read(OCR, {"patch_size": 16})
    assert (spec.tower.shrinks, spec.tower.cell, spec.size.tile, spec.size.grows) == (None, 32, 448, "always")
    assert spec.least_tokens == 14 * 14
    assert (read(OCR | {"downsample_mode": "16x"}).tower.shrinks, hf_family(OCR).name) == (6, "qwen3_5")
    for said, meant in ("never", "never"), ("adaptive", "letters"):
        small = read(OCR, {"small_image_upsize": said})
        assert (small.size.grows, small.least_tokens) == (meant, 1)
    with pytest.raises(UnsupportedError, match="small_image_upsize 'often' is not supported"):
        read(OCR, {"small_image_upsize": "often"})
    with pytest.raises(CheckpointError, match="pieces of 83 x 83 pixels, and small images of 84"):
        read(OCR, {"small_image_upsize": "adaptive", "scale_resolution": 83})
    with pytest.raises(UnsupportedError, match="a tower of the kind 'minicpmv4_6_vision'"):
        read(OCR | {"vision_config": V4_6["vision_config"]})


@given(SIDES, SIDES, st.sampled_from(["16x", "4x"]), st.integers(1, 12), st.sampled_from([448, 100]), st.booleans())
@settings(max_examples=400, deadline=None)
def test_how_an_image_is_cut_is_transformers(
    height: int, width: int, mode: str, most: int, tile: int, grows: bool
) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    processor: Any = MiniCPMOcrImageProcessor.__new__(MiniCPMOcrImageProcessor)
    grid = processor.get_sliced_grid((height, width), most, tile)
    rule = replace(SLICES, multiple=56 if mode == "16x" else 28, most_tiles=most, tile=tile, grows="always" if grows else "never")
    found = fitted(rule, height, width)
    whole = processor.find_best_resize((height, width), tile, 14, mode, allow_upscale=grid is None and grows)
    assert found.whole == whole
    spec = read(V4_6 | {"downsample_mode": mode}, {"downsample_mode": mode})
    assert math.prod(whole) // rule.multiple**2 <= most_rows(replace(spec, size=rule))
    assert found.grid == (None if grid is None else tuple(grid))
    if grid is None:
        assert found.pieces is None
    else:
        assert found.pieces == processor.get_refine_size((height, width), grid, tile, 14, mode, allow_upscale=True)


@given(SIDES, SIDES, st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_no_image_has_more_tokens_than_it_may(height: int, width: int, most: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    limited = read(V4_6).limited(most)
    sizes = fitted(limited.size, height, width)
    rows = [sides[0] // 56 * (sides[1] // 56) for sides in (sizes.whole, sizes.pieces) if sides is not None]
    assert sum(rows) <= most_tokens(limited)
    assert max(rows[0], rows[-1] // (sizes.grid[0] * sizes.grid[1] if sizes.grid else 1)) <= most_rows(limited)
    if max(height, width) <= 2 * min(height, width):
        assert sum(rows) <= max(most, 74)  # of one piece there are some, whatever is asked for


@pytest.mark.parametrize("shape", [(61, 97), (97, 61), (300, 301), (700, 20), (64, 64), (1, 150), (641, 480)])
def test_pixels_are_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    plain: Any = {"do_rescale": False, "do_normalize": False, "patch_size": 4, "scale_resolution": 100}
    theirs = MiniCPMV4_6ImageProcessorPil(**plain)(images=[picture])
    ours = read_image(saved(picture, "PNG"), seeing(replace(SLICES, multiple=16, tile=100)), "it")
    assert [[ours.rows, ours.columns]] == [list(grid) for grid in theirs["grids"]]
    assert [[image.height // 4, image.width // 4] for image in ours.images] == theirs["target_sizes"].tolist()
    packed = []
    for image in ours.images:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3).transpose(2, 0, 1)
        packed.append(MiniCPMV4_6ImageProcessorPil().reshape_by_patch(pixels, 4))
    np.testing.assert_array_equal(np.concatenate(packed, axis=-1)[None], theirs["pixel_values"])


@pytest.mark.parametrize(("config", "images", "words"), [
    (V4_6 | {"downsample_mode": "8x"}, {}, "downsample_mode '8x'"),
    (V4_6 | {"merger_times": 2}, {}, "merger_times '2'"),
    (V4_6 | {"merge_kernel_size": [2, 4]}, {}, r"merge_kernel_size '\[2, 4\]'"),
    (V4_6 | {"drop_vision_last_layer": True}, {}, "drop_vision_last_layer 'True'"),
    (V4_6 | {"text_config": {"model_type": "llama", "hidden_size": 1024}}, {}, "unknown architecture 'llama'"),
    (changed({"window_kernel_size": [4, 4]}), {}, r"window_kernel_size '\[4, 4\]'"),
    (changed({"model_type": "siglip_vision_model"}), {}, "a tower of the kind 'siglip_vision_model'"),
    (V4_6, {"do_resize": False}, "do_resize false"),
    (V4_6, {"resample": 0}, "resample 0"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (V4_6 | {"insert_layer_id": 27}, {}, "'insert_layer_id' is 27 in a tower of 27 layers"),
    (V4_6 | {"insert_layer_id": -1}, {}, "'insert_layer_id' must be"),
    (V4_6, {"downsample_mode": "4x"}, "'downsample_mode' is '4x', and the tower's '16x'"),
    (V4_6, {"patch_size": 16}, "'patch_size' is 16, and the tower's 14"),
    (changed({"image_size": 13}), {}, "images of 13 x 13 pixels in patches of 14"),
    (changed({"image_size": 1 << 20}), {}, "are not believed"),
    (changed({"num_attention_heads": 7}), {}, "7 heads can't share 1152"),
    (V4_6, {"scale_resolution": 55}, "9 pieces of about 55 x 55 pixels"),
    (V4_6, {"scale_resolution": 1 << 20}, "are not"),
    (V4_6, {"max_slice_nums": 1 << 20}, "are not"),
    (V4_6, {"max_slice_nums": 0}, "'max_slice_nums' must be"),
    (V4_6, {"use_image_id": "yes"}, "'use_image_id' must be"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


def processor_of(**settings: Any) -> Any:
    """transformers', for what it makes of a template's marks."""
    made: Any = MiniCPMV4_6Processor.__new__(MiniCPMV4_6Processor)
    made.image_token, made.slice_mode = WORDS[1], settings.get("slice_mode", True)
    made.image_start_token, made.image_end_token, made.slice_start_token, made.slice_end_token = WORDS[2:6]
    made.image_id_start_token, made.image_id_end_token = WORDS[6:]
    return made


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 0, 0), (3, 1, 2), (7, 3, 2)])
def test_the_text_around_pieces_is_transformers(count: int, rows: int, columns: int) -> None:
    sizes = {"grids": [[rows, columns]], "num_patches_per_image": [count], "target_sizes": np.full((count, 2), 4)}
    expected = processor_of().replace_image_token(sizes, 0, image_token_divisor=16)
    tokens = read(V4_6).tokens
    numbered = processor_of()._prepend_local_ids([WORDS[1] * 12], [expected] * 12, WORDS[1])
    assert [tokens.text(blank(count, rows, columns), number) for number in range(12)] == numbered
    assert read(V4_6, {"use_image_id": False}).tokens.text(blank(count, rows, columns), 11) == expected


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<|im_end|>"
)
SIZES = {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4}


@pytest.fixture(scope="module")
def minicpm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes: of 32 x 32 pixels are 4 tokens. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    text = CASES["qwen3.5"].to_dict() | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST}
    config: Any = MiniCPMV4_6Config(
        text_config=text, image_token_id=FIRST + 1, insert_layer_id=0, tie_word_embeddings=False,
        vision_config=TOWER | {"patch_size": 4, "image_size": 24},
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SIZES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    return model, folder


PICTURES = [pillow.fromarray(colours(50, 70, 3)), pillow.fromarray(colours(24, 33, 3))]
SAID = asked_about(PICTURES)


@pytest.mark.parametrize(("most", "slices", "tokens"), [(4096, 4, 4 + 4 * 4 + 4), (4 * 6, 3, 4 + 2 * 4 + 4), (4, 1, 4 + 4)])
def test_a_chat_about_two_images_is_transformers(minicpm: tuple[Any, Path], most: int, slices: int, tokens: int) -> None:
    model, folder = minicpm
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19, image_max_tokens=most)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, params)
    processor: Any = MiniCPMV4_6ImageProcessorPil(**SIZES | {"max_slice_nums": slices})
    seen = processor(images=PICTURES, return_tensors="pt")
    instead = [processor_of().replace_image_token(seen, place, image_token_divisor=16) for place in range(2)]
    first, last = (f"<image_id>{place}</image_id>{text}" for place, text in enumerate(instead))
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"{first}and{last}differ?<|im_end|>"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    assert ids.count(FIRST + 1) == tokens
    given = {"input_ids": torch.tensor([ids]), "pixel_values": seen["pixel_values"], "target_sizes": seen["target_sizes"]}
    answer = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_converted_it_reads_images_as_its_folder_does(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["minicpm-v"], auto=AutoModelForImageTextToText), tmp_path / "folder")
    (folder / "preprocessor_config.json").write_text(json.dumps({"scale_resolution": 32, "patch_size": 4}))
    check_it_sees_as_its_folder_does(with_merges(folder, WORDS[1:]), tmp_path / "m-F32.gguf")


@pytest.mark.parametrize(("own", "words"), [
    ({"max_slice_nums": 4}, "most_tiles"), ({"use_image_id": False}, "before"), ({"resample": 2}, "resample"),
])  # fmt: skip
def test_what_no_file_can_say_of_it(minicpm: tuple[Any, Path], own: dict[str, Any], words: str, tmp_path: Path) -> None:
    for each in minicpm[1].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"scale_resolution": 32} | own))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(UnsupportedError, match=words):
        tower_file(checkpoint, "f32", "m")
