"""Images that are cut into pieces: which ones, their pixels, and the text around them, held against transformers."""

from __future__ import annotations

import json
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
from transformers import AutoModelForImageTextToText, Lfm2VlProcessor, SmolVLMConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from engines import SMALL, random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.images.source import data_url
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.towers import tower_family
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.text.image_tokens import with_marks
from nanovllm_cli.vision_spec import Image, Picture, VisionSpec
from test_images import colours, saved, seeing
from test_llm import write_byte_tokenizer

TILES = SizeRule("tiles", 16, longest_side=256, resample="lanczos", tile=64)
GRID = SizeRule("grid", 32, min_pixels=64 * 1024, max_pixels=256 * 1024, resample="bilinear", tile=512, least_tiles=2,
                most_tiles=10, tolerance=2.0)  # fmt: skip
SIDES = st.integers(1, 5000)
OF_LFM2 = [
    (263, 3073, 128, 1728, 1, 10), (3537, 2851, 544, 448, 3, 2), (426, 257, 416, 256, 0, 0), (328, 2536, 160, 1408, 1, 8),
    (2217, 157, 1920, 128, 0, 0), (1156, 1656, 416, 608, 2, 3), (2325, 2787, 448, 544, 3, 3), (257, 306, 256, 320, 0, 0),
    (354, 3192, 160, 1536, 1, 9), (311, 3216, 128, 1632, 1, 10), (110, 440, 128, 512, 0, 0), (3542, 584, 1248, 192, 6, 1),
    (56, 98, 224, 352, 0, 0), (2270, 289, 1408, 160, 8, 1), (1885, 2147, 448, 544, 3, 3), (2730, 1020, 832, 288, 5, 2),
    (461, 2391, 224, 1152, 1, 5), (1841, 3829, 352, 736, 2, 4), (682, 846, 448, 544, 2, 2), (2045, 3622, 384, 672, 2, 4),
    (1823, 201, 1536, 160, 0, 0), (3705, 1830, 704, 352, 4, 2), (1577, 3377, 320, 736, 2, 4), (481, 143, 480, 160, 0, 0),
    (373, 1795, 224, 1120, 1, 5), (2018, 2319, 448, 544, 3, 3), (542, 3653, 192, 1312, 1, 7), (1783, 878, 704, 352, 4, 2),
    (2661, 264, 1600, 160, 10, 1), (1113, 573, 704, 352, 2, 1), (380, 145, 416, 160, 0, 0), (3174, 3698, 448, 544, 3, 3),
    (1700, 2536, 416, 608, 2, 3), (1243, 2038, 384, 640, 2, 3), (3002, 389, 1408, 160, 8, 1), (409, 600, 416, 608, 0, 0),
    (2487, 3151, 448, 576, 2, 3), (2125, 2322, 480, 512, 3, 3), (491, 2794, 192, 1216, 1, 6), (3889, 249, 2016, 128, 10, 1),
    (1933, 3839, 352, 704, 2, 4), (144, 3845, 96, 2624, 0, 0), (3605, 597, 1248, 192, 6, 1), (1024, 1024, 512, 512, 2, 2),
    (768, 1024, 416, 576, 2, 3), (3000, 4000, 416, 576, 2, 3), (512, 4096, 160, 1440, 1, 8), (4096, 512, 1440, 160, 8, 1),
    (1000, 1024, 480, 512, 2, 2), (1254, 1000, 544, 448, 3, 2), (1000, 1254, 448, 544, 2, 3), (724, 724, 512, 512, 2, 2),
    (725, 725, 512, 512, 2, 2),
]
"""Of an image, of what shows all of it, and lines and columns of pieces, as transformers' Lfm2VlImageProcessor gives them."""
SMOLVLM = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "scale_factor": 4,
    "text_config": {"model_type": "llama", "hidden_size": 960},
    "vision_config": {"hidden_size": 768, "image_size": 512, "model_type": "smolvlm_vision", "num_attention_heads": 12,
                      "patch_size": 16, "max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048},
                      "use_base_siglip": False},
}  # fmt: skip
SMOLVLM_IMAGES = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "max_image_size": {"longest_edge": 512},
    "resample": 1, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 2048},
}  # fmt: skip
LFM2_VL = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "downsample_factor": 2,
    "projector_hidden_size": 2560,
    "text_config": {"model_type": "lfm2", "hidden_size": 2048},
    "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                      "num_attention_heads": 16, "num_hidden_layers": 26, "num_patches": 256, "patch_size": 16,
                      "vision_use_head": False},
}  # fmt: skip


def read(config: dict[str, Any], images: dict[str, Any] | None = None) -> VisionSpec:
    family = tower_family(config)
    assert family is not None
    return family.read(ConfigReader(config, "config.json"), ConfigReader(images or {}, "preprocessor_config.json"))


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.sampled_from([364, 512]), st.integers(1, 5))
def test_sizes_are_idefics3s(height: int, width: int, tile: int, count: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    processor: Any = SmolVLMImageProcessorPil()
    rule = SizeRule("tiles", 16, longest_side=count * tile, tile=tile)
    first = get_resize_output_image_size(np.empty((3, height, width)), resolution_max_side=rule.longest_side)
    resized: list[tuple[int, int]] = []
    processor.resize = lambda image, size, resample=None: resized.append((size.height, size.width)) or np.empty((3, *resized[-1]))
    image = processor.resize_for_vision_encoder(np.empty((3, *first)), tile)
    _, rows, columns = processor.split_images(image, {"longest_edge": tile})
    found = fitted(rule, height, width)
    assert found.first == first
    if rows:
        assert found.pieces == resized[0] == (rows * tile, columns * tile)
    else:
        assert found.pieces is None
    assert found.whole == resized[-1] == (tile, tile)


@pytest.mark.parametrize("shape", [(61, 97), (97, 61), (300, 300), (500, 20), (64, 64), (1, 100), (641, 480)])
@pytest.mark.parametrize("longest", [64, 128, 256])
def test_pixels_are_idefics3s(shape: tuple[int, int], longest: int) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    rule = replace(TILES, longest_side=longest)
    plain: Any = {"do_rescale": False, "do_normalize": False, "do_pad": False, "return_row_col_info": True}
    processor = SmolVLMImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": 64}, **plain)
    theirs = processor(images=[picture])
    ours = read_image(saved(picture, "PNG"), seeing(rule), "it")
    assert [[ours.rows]] == theirs["rows"]
    assert [[ours.columns]] == theirs["cols"]
    pixels = [np.frombuffer(image.pixels, np.uint8).reshape(64, 64, 3).transpose(2, 0, 1) for image in ours.images]
    np.testing.assert_array_equal(np.stack(pixels), np.stack(theirs["pixel_values"][0]))


@pytest.mark.parametrize(("height", "width", "all_height", "all_width", "rows", "columns"), OF_LFM2)
def test_sizes_are_lfm2s(height: int, width: int, all_height: int, all_width: int, rows: int, columns: int) -> None:
    found = fitted(GRID, height, width)
    assert found.whole == (all_height, all_width)
    assert found.pieces == ((rows * 512, columns * 512) if rows else None)
    assert found.first is None


def test_pieces_of_a_grid_are_cut_of_the_image_and_all_of_it_is_made_of_the_image_itself() -> None:
    picture = pillow.fromarray(colours(300, 200, 3))
    rule = replace(GRID, tile=64, min_pixels=1024, max_pixels=4096)
    found = read_image(saved(picture, "PNG"), seeing(rule), "it")
    assert (found.rows, found.columns) == (3, 2)
    large = picture.resize((2 * 64, 3 * 64), pillow.Resampling.BILINEAR)
    for place, image in enumerate(found.images[:-1]):
        row, column = divmod(place, 2)
        assert image.pixels == large.crop((column * 64, row * 64, column * 64 + 64, row * 64 + 64)).tobytes()
    whole = found.images[-1]
    assert whole.pixels == picture.resize((whole.width, whole.height), pillow.Resampling.BILINEAR).tobytes()


@settings(max_examples=200, deadline=None)
@given(SIDES, SIDES, st.sampled_from([TILES, GRID]), st.integers(1, 3000))
def test_no_image_has_more_tokens_than_it_may(height: int, width: int, rule: SizeRule, most: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    limited = seeing(rule).limited(most)
    sizes, cell = fitted(limited.size, height, width), limited.tower.cell
    rows = [(sides[0] // cell) * (sides[1] // cell) for sides in (sizes.whole, sizes.pieces) if sides is not None]
    assert sum(rows) <= most_tokens(limited)
    assert rows[0] <= most_rows(limited)
    if rule.kind == "tiles":
        assert sum(rows) <= max(most, (rule.tile // cell) ** 2)  # one piece there has to be
    elif most >= 200:
        assert sum(rows) <= most


def test_published_models_see() -> None:
    smol, lfm2 = read(SMOLVLM, SMOLVLM_IMAGES), read(LFM2_VL)
    assert smol.size == SizeRule("tiles", 64, longest_side=2048, resample="lanczos", tile=512)
    assert (smol.tower.positions, smol.tower.out_size, smol.tower.num_layers) == (1024, 960, 12)
    assert most_tokens(smol) == 17 * 64
    assert lfm2.size == GRID
    assert (lfm2.tower.projector_size, lfm2.tower.projector_eps, lfm2.tower.stretch) == (2560, 1e-5, "areas")
    assert read(LFM2_VL | {"projector_use_layernorm": False}).tower.projector_eps == 0
    for no in (False, None):  # the same to transformers
        assert read(SMOLVLM, SMOLVLM_IMAGES | {"do_image_splitting": no}).size.most_tiles == 1
        assert read(LFM2_VL, {"do_image_splitting": no}).size.most_tiles == 0


def test_an_image_that_is_not_to_be_cut_is_one_piece() -> None:
    once = replace(TILES, most_tiles=1)
    assert fitted(once, 100, 300) == ((64, 64), None, (86, 256), None)
    assert fitted(replace(GRID, most_tiles=0), 3000, 4000).pieces is None
    assert most_tokens(seeing(once)) == 16
    assert most_tokens(seeing(replace(GRID, most_tiles=1))) == most_rows(seeing(replace(GRID, most_tiles=1)))


@pytest.mark.parametrize(("config", "images"), [
    (SMOLVLM | {"vision_config": {"model_type": "siglip_vision_model"}}, {}),
    (SMOLVLM, {"do_resize": False}),
    (SMOLVLM, {"resample": 0}),
    (SMOLVLM, {"size": {"height": 1024, "width": 1024}}),
    (SMOLVLM, {"max_image_size": {"height": 512, "width": 512}}),
    (LFM2_VL | {"projector_bias": False}, {}),
    (LFM2_VL | {"projector_hidden_act": "silu"}, {}),
    (LFM2_VL | {"vision_feature_layer": -2}, {}),
    (LFM2_VL, {"use_thumbnail": False}),
    (LFM2_VL, {"use_image_special_tokens": False}),
])  # fmt: skip
def test_what_no_tower_here_can_be_is_told(config: dict[str, Any], images: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(config, images)
    assert caught.value.hint


@pytest.mark.parametrize(("config", "images"), [
    (SMOLVLM | {"scale_factor": 5}, {}),
    (SMOLVLM | {"vision_config": {"image_size": 1 << 15}}, {}),
    (SMOLVLM, {"max_image_size": {"longest_edge": 364}}),
    (SMOLVLM, {"size": {"longest_edge": 100}}),
    (SMOLVLM, {"size": {"longest_edge": 1 << 20}}),
    (SMOLVLM, {"size": {"longest_edge": (1 << 14) + 1}}),
    (LFM2_VL, {"tile_size": 4096, "max_tiles": 17}),
    (SMOLVLM, {"size": {"longest_edge": -5}}),
    (LFM2_VL | {"vision_config": {"model_type": "siglip2_vision_model", "num_patches": 250}}, {}),
    (LFM2_VL, {"tile_size": 500}),
    (LFM2_VL, {"tile_size": 1 << 20}),
    (LFM2_VL, {"max_tiles": 1}),
    (LFM2_VL, {"max_tiles": 1 << 40}),
    (LFM2_VL, {"min_image_tokens": 300}),
    (LFM2_VL, {"max_image_tokens": 1 << 40}),
    (LFM2_VL, {"encoder_patch_size": 14}),
    (LFM2_VL, {"max_pixels_tolerance": "much"}),
])  # fmt: skip
def test_a_config_that_contradicts_itself_is_broken(config: dict[str, Any], images: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read(config, images)


def blank(count: int, rows: int = 0, columns: int = 0) -> Picture:
    return Picture((Image.of(8, 8, bytes(192)),) * count, rows, columns)


@pytest.mark.parametrize("picture", [blank(1), blank(3, 1, 2), blank(13, 4, 3)])
def test_the_text_around_pieces_is_transformers(picture: Picture) -> None:
    """With one token for each image, of which theirs has as many as there are rows."""
    smol = get_image_prompt_string(picture.rows, picture.columns, 1, "<fake_token_around_image>", "<image>", "<global-img>")
    assert read(SMOLVLM).tokens.text(picture) == smol
    names: Any = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    names.image_token, names.image_start_token, names.image_end_token = "<image>", "<|image_start|>", "<|image_end|>"
    names.image_thumbnail_token = "<|img_thumbnail|>"
    lfm2 = names._build_image_tokens(max(1, picture.rows), max(1, picture.columns), 1, 1, True, True)
    assert read(LFM2_VL).tokens.text(picture) == lfm2


def test_images_in_pieces_and_without_get_their_own_text_each() -> None:
    vision = read(LFM2_VL)
    text = "a<image>b<image>c<image>"
    made, plain, _ = with_marks(text, [9], {"images": vision.tokens}, [blank(3, 2, 1), blank(1)])
    one = "<|image_start|><image><|image_end|>"
    cut = "<|image_start|><|img_row_1_col_1|><image><|img_row_2_col_1|><image><|img_thumbnail|><image><|image_end|>"
    assert made == f"a{cut}b<image>c{one}"
    assert plain == {made.index("b<image>") + 1}


WORDS = ["<end>", "<image>", "<fake_token_around_image>", "<global-img>"]
WORDS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
IMAGE = 257
TEMPLATE = """{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
<end>
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes: a piece has 32 x 32 pixels and 16 tokens. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    config: Any = SmolVLMConfig(
        text_config=SMALL | {"vocab_size": 256 + len(WORDS), "model_type": "llama", "max_position_embeddings": 1024},
        image_token_id=IMAGE, scale_factor=2, pad_token_id=0,
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "image_size": 32, "patch_size": 4},
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    sizes = {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return model, folder


def test_a_chat_with_an_image_in_pieces_is_transformers(smolvlm: tuple[Any, Path]) -> None:
    model, folder = smolvlm
    picture = pillow.fromarray(colours(50, 90, 3))
    said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}},
                                        {"type": "text", "text": "what?"}]}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=24)) as llm:
        prompt = llm.encode_chat([said])
        (output,) = llm.chat([said], params)
    processor: Any = SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    seen = processor(images=[picture], return_tensors="pt")
    text = get_image_prompt_string(2, 2, 16, "<fake_token_around_image>", "<image>", "<global-img>")
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"user:{text}what?<end>\nassistant:"):
        ids += [256 + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(torch.tensor([ids]), pixel_values=seen["pixel_values"], **options)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_an_image_has_no_more_pieces_than_it_may(smolvlm: tuple[Any, Path]) -> None:
    _, folder = smolvlm
    picture = data_url(saved(pillow.fromarray(colours(50, 90, 3)), "PNG"))
    counts = {}
    for most in (16, 79, 80, 4096):
        with LLM(folder, config=EngineConfig(threads=2, image_max_tokens=most)) as llm:
            said = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}
            counts[most] = list(llm.encode_chat([said])).count(IMAGE)
    assert counts == {16: 16, 79: 16, 80: 80, 4096: 80}
