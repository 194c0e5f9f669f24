"""Granite 4 Vision: its config, how many tokens an image has, what is refused, a conversation about two images. Rows and
answers: test_towers.py and test_vision.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, Granite4VisionConfig, Granite4VisionProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from engines import SMALL, random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower_configs import MOST_TILES
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.vision_spec import Query
from seeing import FIRST
from test_image_pieces import read
from test_images import asked_about, colours
from test_llm import write_byte_tokenizer
from test_vision import MODELS, TOWER

PINPOINTS = [[384 * rows, 384 * columns] for rows in (1, 2, 3, 4, 6) for columns in (1, 2, 3, 5, 10) if rows * columns <= 10]
_PLAIN: dict[str, Any] = Granite4VisionConfig(
    text_config={"hidden_size": 2560, "num_hidden_layers": 40}, downsample_rate="4/8", image_grid_pinpoints=PINPOINTS,
    deepstack_layer_map=[[-19, 9], [-13, 6], [-7, 3], [-1, 0]], spatial_vision_layer=-1, vision_feature_select_strategy="full",
    vision_config={"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384, "patch_size": 16,
                   "num_attention_heads": 16, "num_hidden_layers": 27, "intermediate_size": 4304},
).to_dict()  # fmt: skip
GRANITE = json.loads(json.dumps(_PLAIN)) | {"architectures": ["Granite4VisionForConditionalGeneration"]}
SIDES = st.integers(1, 6000)


def changed(vision: dict[str, Any] | None = None, asks: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    return GRANITE | config | {
        "vision_config": GRANITE["vision_config"] | (vision or {}), "qformer_config": GRANITE["qformer_config"] | (asks or {}),
    }  # fmt: skip


def test_a_granite_as_published() -> None:
    spec = read(GRANITE)
    tower = spec.tower
    assert tower.queries[:5] == (Query(8, 9, None), Query(14, 6, None), Query(20, 3, None), Query(26, 0, None), Query(26, 12, 0))
    assert tower.query_names == [*(f"layerwise.{i}" for i in range(4)), *(f"spatial.{i}" for i in range(4))]
    assert tower.deep_behind == (8, 5, 2, 11, 14, 17, 20)
    assert (tower.cell, tower.merge, tower.query_side, tower.positions, tower.projector_size) == (32, 2, 4, 576, 3072)
    assert (spec.has_grid, spec.size.kind, spec.size.multiple, spec.size.tile) == (False, "mosaic", 32, 384)
    assert [[384 * rows, 384 * columns] for rows, columns in spec.size.grids] == PINPOINTS
    assert read(changed(deepstack_layer_map=[[2, 0]])).tower.queries[0].behind == 1  # counted from the patches' own rows on
    assert hf_family(GRANITE).name == "granite"


def processor_of(images: Any, patch: int, rate: str) -> Any:
    """transformers', for how many tokens it writes."""
    made: Any = Granite4VisionProcessor.__new__(Granite4VisionProcessor)
    made.image_processor, made.image_token, made.patch_size, made.downsample_rate = images, "<image>", patch, rate
    made.num_additional_image_tokens, made.vision_feature_select_strategy = 0, "full"
    return made


@given(SIDES, SIDES)
@settings(max_examples=200, deadline=None)
def test_how_many_tokens_stand_for_an_image_is_transformers(height: int, width: int) -> None:
    assume(max(height, width) <= 100 * min(height, width))
    grid = fitted(read(GRANITE).size, height, width).grid
    assert grid is not None
    processor = processor_of(LlavaNextImageProcessorPil(image_grid_pinpoints=PINPOINTS), 16, "4/8")
    wanted = processor._get_number_of_features(height, width, 384, 384)
    assert Mosaic(*grid, height, width).num_rows(12, MOST_TILES) == wanted <= most_tokens(read(GRANITE))


SIZES: dict[str, Any] = {
    "size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]],
}  # fmt: skip


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"model_type": "clip_vision_model"}), {}, "a tower of the kind 'clip_vision_model'"),
    (changed(vision_feature_select_strategy="default"), {}, "vision_feature_select_strategy 'default'"),
    (changed(downsample_rate="3/8"), {}, "downsample_rate '3/8'"),
    (changed(downsample_rate="4"), {}, "downsample_rate '4'"),
    (changed(asks={"num_hidden_layers": 2}), {}, "num_hidden_layers '2'"),
    (changed(asks={"use_qformer_text_input": True}), {}, "use_qformer_text_input 'True'"),
    (changed(deepstack_layer_map=[[-1, 0], [-2, 0]]), {}, "several rows in front of one layer"),
    (changed(deepstack_layer_map=[[0, 1]]), {}, "behind none of its layers"),
    (GRANITE, {"do_resize": False}, "do_resize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"image_size": 320}), {}, "320 x 320 pixels don't divide into windows of 8 patches of 16"),
    (changed({"hidden_size": 1120}), {}, "'hidden_size' must be a multiple of 64"),
    (changed(deepstack_layer_map=[[-28, 0]]), {}, "layer -28 of a tower of 27"),
    (changed(deepstack_layer_map=[[-1, 40]]), {}, "in front of 40 of 40"),
    (changed(deepstack_layer_map=[["-1", 0]]), {}, "layer -1 of a tower"),
    (changed(deepstack_layer_map=[[-1]]), {}, "a list of pairs"),
    (changed(deepstack_layer_map=None), {}, "a list of pairs"),
    (changed(spatial_target_layers=[1, 2, 3]), {}, "of 4 layers"),
    (changed(spatial_vision_layer=28), {}, "layer 28 of a tower of 27"),
    (GRANITE, {"size": {"height": 384, "width": 192}}, "384 x 384 pixels, not 192"),
    (changed(image_grid_pinpoints=[[384, 400]]), {}, "doesn't divide"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


WORDS = ["<|end_of_text|>", "<image>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<|end_of_text|>"
)
PICTURES = [pillow.fromarray(colours(50, 70, 3)), pillow.fromarray(colours(11, 33, 3))]
SAID = asked_about(PICTURES)


def test_a_chat_about_two_images_is_transformers(tmp_path: Path) -> None:
    config = MODELS["granite 4 vision"].to_dict()
    text = SMALL | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST, "embedding_multiplier": 2.0, "num_hidden_layers": 5}
    made: Any = Granite4VisionConfig(**config | {
        "text_config": text, "image_token_index": FIRST + 1, "image_token_id": FIRST + 1,
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "hidden_size": 64, "image_size": 32, "patch_size": 4},
        "downsample_rate": "2/4", "image_grid_pinpoints": SIZES["image_grid_pinpoints"],
    })  # fmt: skip
    model: Any = random_model(made, auto=AutoModelForImageTextToText)
    save(model, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIZES))
    write_byte_tokenizer(tmp_path, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    with LLM(tmp_path, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    images = LlavaNextImageProcessorPil(**SIZES)
    seen = images(images=PICTURES, return_tensors="pt")
    processor = processor_of(images, 4, "2/4")
    first, last = (processor.replace_image_token(seen, place) for place in range(2))
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"{first}and{last}differ?<|end_of_text|>"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    said: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(torch.tensor([ids]), pixel_values=seen["pixel_values"], image_sizes=seen["image_sizes"], **said)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
