"""Perception LM: its config as published, which tiles an image is cut into, pixels and prompts as transformers has them, answers
about an image and a video, what is refused; and the tower that tests compare with against timm's, where that is installed. Rows,
steps: test_towers.py, test_vision.py. transformers' image processor can't be imported without torchvision: what it chooses is
taken out of its source."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, PerceptionLMProcessor

import perception_encoder
from engines import random_model, save
from filming import moving
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.images.videos import read_video
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_shapes
from nanovllm_cli.models.tower_videos import perception_lm
from nanovllm_cli.text.image_tokens import with_marks
from perception_encoder import GIANT, LARGE, PerceptionEncoder
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_sees_by_no_file, with_merges
from test_vision import MODELS

ARGUMENTS: dict[str, Any] = {
    "depth": 23, "embed_dim": 1024, "global_pool": "", "img_size": [448, 448], "init_values": 0.1, "ref_feat_shape": [32, 32],
    "use_post_transformer_norm": False,
}  # fmt: skip
PERCEPTION: dict[str, Any] = {
    "architectures": ["PerceptionLMForConditionalGeneration"], "image_token_id": 128002, "model_type": "perception_lm",
    "projector_pooling_ratio": 2, "video_token_id": 128003, "vision_use_cls_token": True,
    "text_config": {"hidden_size": 2048, "intermediate_size": 8192, "model_type": "llama", "num_attention_heads": 32,
                    "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": True,
                    "vocab_size": 128256},
    "vision_config": {"architecture": LARGE, "do_pooling": True, "global_pool": "map", "model_type": "timm_wrapper",
                      "model_args": ARGUMENTS},
}  # fmt: skip
"""A config of a Perception LM of 1B, as transformers' converter writes it, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "max_num_tiles": 36, "resample": 3, "size": {"height": 448, "width": 448}, "tile_size": 448,
    "vision_input_type": "thumb+tile",
}  # fmt: skip
TIMMS = 291_415_040
SMALL_IMAGES = IMAGES | {"tile_size": 112, "max_num_tiles": 4}
WORDS = ["<|image|>", "<|video|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ '<|image|>' if part.type == 'image' else '<|video|>' if part.type == 'video' else part.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return PERCEPTION | own | {"vision_config": PERCEPTION["vision_config"] | vision}


def told(**arguments: Any) -> dict[str, Any]:
    return changed({"model_args": ARGUMENTS | arguments})


def chosen_by_transformers() -> Any:
    """Of what its image processor does by itself, without torchvision: an object that has `max_num_tiles`."""
    found = importlib.util.find_spec("transformers.models.perception_lm")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = (Path(found.submodule_search_locations[0]) / "image_processing_perception_lm.py").read_text()
    module = ast.parse(source)
    (own,) = (each for each in module.body if isinstance(each, ast.ClassDef) and each.name == "PerceptionLMImageProcessor")
    names = {"_factors", "_find_supported_aspect_ratios", "_get_image_height_width", "_fit_image_to_canvas",
             "_find_closest_aspect_ratio"}  # fmt: skip
    own.body = [each for each in own.body if isinstance(each, ast.FunctionDef) and each.name in names]
    own.bases, own.decorator_list, module.body = [], [], [own]
    scope: dict[str, Any] = {"math": math, "reduce": reduce}
    exec(compile(module, "transformers", "exec"), scope)
    return scope["PerceptionLMImageProcessor"]()


THEIRS = chosen_by_transformers()


def grid_of_transformers(height: int, width: int, most: int, tile: int) -> tuple[int, int]:
    """Lines and columns."""
    THEIRS.max_num_tiles = most
    grid = (1, 1) if most == 1 else THEIRS._fit_image_to_canvas(width, height, tile)
    columns, rows = grid or THEIRS._find_closest_aspect_ratio(width, height, tile)
    return rows, columns


def test_it_is_as_published() -> None:
    spec = read(PERCEPTION, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size, tower.out_size) == (
        1024, 23, 16, 4096, 2048,
    )  # fmt: skip
    assert (tower.cell, tower.positions, tower.lead, tower.post_norm, tower.scaled) == (28, 1024, True, False, True)
    assert (spec.size.tile, spec.size.most_tiles, spec.least_tokens) == (448, 36, 2 * 256)
    assert (most_tokens(spec), most_rows(spec)) == (37 * 256, 256)
    assert most_tokens(spec.limited(4096)) == 16 * 256
    giant = read(changed(
        {"architecture": f"{GIANT}.fb", "model_args": ARGUMENTS | {"depth": 47, "embed_dim": 1536}}, vision_use_cls_token=False,
    )).tower  # fmt: skip
    assert (giant.hidden_size, giant.num_layers, giant.intermediate_size, giant.lead) == (1536, 47, 8960, False)
    assert read(PERCEPTION).size == spec.size
    alone = read(PERCEPTION, {"vision_input_type": "vanilla"})
    assert (alone.size.kind, alone.least_tokens, most_tokens(alone)) == ("square", 256, 256)
    text = spec_from_hf(PERCEPTION, hf_family(PERCEPTION))
    assert (text.num_layers, text.attention.num_kv_heads, text.tied_head) == (16, 8, True)
    film = perception_lm(ConfigReader(PERCEPTION, "config.json"), ConfigReader({}, "video"), spec)
    assert (film.num_frames, film.size.longest_side, film.sampling) == (32, 448, "even")


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 37))
@example(448, 448, 36)
@example(449, 448, 36)
@example(3000, 3000, 4)
@example(300, 9000, 2)
@settings(max_examples=400, deadline=None)
def test_an_image_is_cut_as_transformers_does_it(height: int, width: int, most: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    spec = read(PERCEPTION, IMAGES | {"max_num_tiles": most})
    rows, columns = grid_of_transformers(height, width, most, 448)
    found = fitted(spec.size, height, width)
    assert (found.whole, found.first) == ((448, 448), None)
    assert found.pieces == (rows * 448, columns * 448)
    assert most_tokens(spec) >= 256 * (1 + rows * columns) >= spec.least_tokens


@pytest.mark.parametrize("most", [1, 4, 6])
@pytest.mark.parametrize("shape", [(112, 112), (31, 200), (300, 150), (600, 900)])
def test_pixels_and_tokens_are_those_of_transformers(shape: tuple[int, int], most: int) -> None:
    """All of it first, then pieces line by line; resized by Pillow, which torch's resizing is within rounding of."""
    picture = pillow.fromarray(colours(*shape, 3))
    config = told(img_size=[112, 112], ref_feat_shape=[8, 8])
    spec = read(config, SMALL_IMAGES | {"max_num_tiles": most})
    found = read_image(saved(picture, "PNG"), spec, "it")
    rows, columns = grid_of_transformers(*shape, most, 112)
    assert (found.rows, found.columns) == (rows, columns)
    large = np.asarray(picture.resize((columns * 112, rows * 112), pillow.Resampling.BICUBIC))
    tiles = large.reshape(rows, 112, columns, 112, 3).swapaxes(1, 2).reshape(-1, 112, 112, 3)
    whole = np.asarray(picture.resize((112, 112), pillow.Resampling.BICUBIC))
    assert [each.pixels for each in found.images] == [each.tobytes() for each in (whole, *tiles)]
    names: Any = PerceptionLMProcessor.__new__(PerceptionLMProcessor)
    names.patch_size, names.pooling_ratio, names.image_token = 14, 2, "<|image|>"
    text = names.replace_image_token({"pixel_values": [torch.zeros(1 + rows * columns, 3, 112, 112)]}, 0)
    assert spec.num_tokens(found) == text.count("<|image|>")
    assert with_marks("a<|image|>b", set(), {"images": spec.tokens}, [found]).text == f"a{'<|image|>' * len(found.images)}b"


@pytest.mark.parametrize("is_film", [False, True])
def test_answers_about_an_image_and_a_video_are_transformers(is_film: bool, tmp_path: Path) -> None:
    config = type(MODELS["perception"]).from_dict(MODELS["perception"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id, config.video_token_id = 1024, 256, 257
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    (folder / "preprocessor_config.json").write_text(json.dumps(SMALL_IMAGES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[3], chat_template=TEMPLATE)
    spec = read(json.loads((folder / "config.json").read_text()), SMALL_IMAGES)
    if is_film:
        data = moving(3, kind="GIF")
        film = perception_lm(ConfigReader({}, "config.json"), ConfigReader({}, "video"), spec)
        url: dict[str, Any] = {"type": "video_url", "video_url": {"url": VIDEO.data_url(data)}}
        seen, token = read_video(data, film, "it").images, 257
        assert len(seen) == 3
    else:
        data = saved(pillow.fromarray(colours(150, 90, 3)), "PNG")
        url = {"type": "image_url", "image_url": {"url": data_url(data)}}
        seen, token = read_image(data, spec, "it").images, 256
        assert len(seen) == 1 + 4
    said = [{"role": "user", "content": [url, {"type": "text", "text": "What is it?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    ids = [258, *b"user\n", *[token] * 16 * len(seen), *b"What is it?", 259, *b"\n", 258, *b"assistant\n"]
    assert list(prompt) == ids
    pixels = np.stack([np.frombuffer(each.pixels, np.uint8).reshape(112, 112, 3) for each in seen])
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 * 2 - 1
    answer = model.generate(
        torch.tensor([ids]), **{"pixel_values_videos" if is_film else "pixel_values": values[None]}, max_new_tokens=8,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    check_sees_by_no_file(with_merges(folder, WORDS))


@pytest.mark.parametrize(("architecture", "further"), [
    (LARGE, {}), (LARGE, {"use_post_transformer_norm": True, "init_values": None}), (GIANT, {}),
])  # fmt: skip
def test_what_is_compared_with_is_timms(architecture: str, further: dict[str, Any]) -> None:
    timm = pytest.importorskip("timm")
    arguments = perception_encoder.vision(architecture, **further)["model_args"]
    ours = PerceptionEncoder(architecture, **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in ours.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    theirs = timm.create_model(architecture, num_classes=0, **arguments).eval()
    theirs.load_state_dict(ours.state_dict())
    image = torch.rand(2, 3, 56, 56, generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(ours(image), theirs.forward_features(image), rtol=1e-4, atol=1e-4)


def test_what_there_is_of_the_published_one() -> None:
    """As many numbers as timm's model has that is told the same."""
    shapes = tower_shapes(read(PERCEPTION, IMAGES).tower)
    own = [math.prod(shape) for name, shape in shapes.items() if not name.startswith("projector.")]
    with torch.device("meta"):
        encoder = PerceptionEncoder(LARGE, **ARGUMENTS)
    assert sum(own) == sum(parameter.numel() for parameter in encoder.parameters()) == TIMMS


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({"architecture": "vit_pe_core_base_patch16_224"}), {}, UnsupportedError, "architecture 'vit_pe_core_base"),
    (changed({"model_type": "clip_vision_model"}), {}, UnsupportedError, "a tower of the kind 'clip_vision_model'"),
    (changed({}, vision_use_cls_token=False), {}, UnsupportedError, "vision_use_cls_token 'False'"),
    (changed({"architecture": GIANT}), {}, UnsupportedError, "vision_use_cls_token 'True'"),
    (told(global_pool="map"), {}, UnsupportedError, "makes one row of an image"),
    (told(dynamic_img_size=True), {}, UnsupportedError, "'dynamic_img_size' is not supported"),
    (told(ref_feat_shape=[24, 24]), {}, UnsupportedError, "positions of 24 lines for images of 32"),
    (told(img_size=[448, 336]), {}, UnsupportedError, "'img_size' other than of a square"),
    (PERCEPTION, {"vision_input_type": "pan"}, UnsupportedError, "vision_input_type 'pan'"),
    (PERCEPTION, {"do_normalize": False}, UnsupportedError, "do_normalize false"),
    (changed({"architecture": None}), {}, CheckpointError, "has no 'architecture'"),
    (changed({}, projector_pooling_ratio=3), {}, CheckpointError, "don't divide into tokens of 3 x 3 patches of 14"),
    (told(img_size=[450, 450]), {}, CheckpointError, "450 x 450 pixels don't divide"),
    (told(img_size=[1 << 20, 1 << 20]), {}, CheckpointError, "don't divide"),
    (told(embed_dim=1000), {}, CheckpointError, "16 heads can't share 1000"),
    (told(depth=1 << 20), {}, CheckpointError, "asks for 1048576 layers"),
    (PERCEPTION, {"tile_size": 336}, CheckpointError, "squares of 448 x 448 pixels, not 336"),
    (PERCEPTION, {"max_num_tiles": 1 << 20}, CheckpointError, "are not believed"),
    (PERCEPTION, {"max_num_tiles": 0}, CheckpointError, "'max_num_tiles' must be"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
