"""Granite Docling: its config as transformers has it, how a page is cut, what is refused, a conversation about two images. Rows
and answers: test_towers.py and test_vision.py."""

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
from transformers import AutoModelForImageTextToText, GraniteDoclingConfig, GraniteDoclingProcessor
from transformers.models.granite_docling import image_processing_pil_granite_docling as theirs

from engines import SMALL, random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_or_note
from seeing import FIRST
from test_image_pieces import blank, read
from test_images import asked_about, colours, saved, seeing
from test_llm import write_byte_tokenizer
from test_vision import TOWER

PLAIN: dict[str, Any] = GraniteDoclingConfig().to_dict()
DOCLING = PLAIN | {"architectures": ["GraniteDoclingForConditionalGeneration"]}
FAKE = "<fake_token_around_image>"
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
WORDS = ["<|end_of_text|>", "<image>", FAKE, "<global-img>", *PLACES]
SIDES = st.integers(1, 6000)
DENSE = {"dense_max_patches": 48, "dense_max_scale": 0.75, "dense_min_aspect": 1.2, "dense_max_aspect": 3.0}


def changed(vision: dict[str, Any], **config: Any) -> dict[str, Any]:
    return DOCLING | config | {"vision_config": DOCLING["vision_config"] | vision}


def test_a_docling_as_transformers_has_it() -> None:
    spec = read(DOCLING)
    tower, rule = spec.tower, SizeRule("canvas", 64, tile=512, least_tiles=1, most_tiles=32, most_lines=16)
    assert (tower.cell, tower.positions, tower.deep, tower.out_size, tower.out_scale) == (64, 32 * 32, (3, 7, 10), 1024, 12.0)
    assert (tower.hidden_size, tower.num_heads, tower.projector, tower.projector_eps) == (768, 12, "placed", 1e-5)
    assert (spec.size, spec.has_grid, spec.least_tokens) == (rule, False, 64)
    assert read(DOCLING, {"crop_to_patches": False}).size.most_tiles == read(DOCLING, {"max_patches": 1}).size.most_tiles == 1
    dense = read(DOCLING, DENSE).size
    assert (dense.dense, dense.all_tiles) == ((48, 0.75, 1.2, 3.0), 48)
    assert read(DOCLING, {"dense_max_patches": 48}).size == rule  # says of no page that it is one
    text = spec_from_hf(DOCLING | {"text_config": {}}, hf_family(DOCLING))
    assert (text.embedding_scale, text.residual_scale, text.tied_head, text.num_layers) == (12.0, 0.263, True, 28)


def test_the_small_one_is_an_idefics3() -> None:
    """ibm-granite/granite-docling-258M."""
    images = {"do_image_splitting": True, "max_image_size": {"longest_edge": 512}, "resample": 1, "size": {"longest_edge": 2048}}
    spec = read({
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": 4,
        "text_config": {"model_type": "llama", "hidden_size": 576},
        "vision_config": {"model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "image_size": 512,
                          "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16},
    }, images)  # fmt: skip
    assert (spec.tower.cell, spec.tower.projector, spec.size.kind, spec.least_tokens) == (64, "joined", "tiles", 64)


@given(SIDES, SIDES, st.sampled_from([{}, DENSE, {"dense_max_patches": 60, "dense_min_aspect": 1.5}]),
       st.sampled_from([{"max_patches": 32}, {"max_patches": 9}, {"max_patches": 20, "min_patches": 3}]))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_how_a_page_is_cut_is_transformers(height: int, width: int, dense: dict[str, Any], most: dict[str, Any]) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    kept = {"crop_to_patches": True, "min_patches": 1, "size": {"height": 512, "width": 512}}
    rows, columns = theirs.get_page_tile_grid(height, width, **kept | most | dense)
    spec = read(DOCLING, dense | most)
    found = fitted(spec.size, height, width)
    assert found.pieces == ((rows * 512, columns * 512) if rows * columns > 1 else None)
    assert 64 * (rows * columns + 1) <= most_tokens(spec) + 64 * (rows * columns == 1)
    few = fitted(spec.limited(64 * 6).size, height, width).pieces
    assert few is None or few[0] * few[1] <= 5 * 512**2


@pytest.mark.parametrize("shape", [(61, 97), (130, 33), (20, 20), (30, 150)])
def test_pixels_are_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    own = SIZES | {"max_patches": 6, "dense_max_patches": 9, "dense_max_scale": 1.0, "dense_min_aspect": 2.0}
    plain: Any = own | {"do_rescale": False, "do_normalize": False}
    made = theirs.GraniteDoclingImageProcessorPil(**plain)(images=[picture])
    rule = read(changed({"image_size": 32, "patch_size": 4}), own).size
    ours = read_image(saved(picture, "PNG"), seeing(rule), "it")
    assert ([[max(ours.rows, 1)]], [[max(ours.columns, 1)]]) == (made["rows"], made["cols"])
    pixels = [np.frombuffer(image.pixels, np.uint8).reshape(32, 32, 3).transpose(2, 0, 1) for image in ours.images]
    np.testing.assert_array_equal(np.stack(pixels), np.array(made["pixel_values"])[0])


@pytest.mark.parametrize(("config", "images", "words"), [
    (DOCLING, {"fine_route": True}, "fine_route true"),
    (DOCLING, {"do_normalize": False}, "do_normalize false"),
    (changed({"model_type": "idefics3_vision"}), {}, "a tower of the kind 'idefics3_vision'"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"image_size": 500}), {}, "500 x 500 pixels don't divide into tokens of 4 x 4 patches of 16"),
    (changed({"out_hidden_size": 1023}), {}, "'out_hidden_size' must be a multiple of 4"),
    (changed({"out_hidden_size": 512}), {}, "rows of 512 numbers for a decoder of 1024"),
    (changed({"deepstack_visual_indexes": [3, 3]}), {}, "in order, and each once"),
    (DOCLING, {"size": {"height": 512, "width": 384}}, r"not \[384, 512\]"),
    (DOCLING, {"min_patches": 33}, "33 to 32 pieces"),
    (DOCLING, {"min_patches": 9} | DENSE | {"dense_max_patches": 8}, "9 to 32 pieces"),
    (DOCLING, DENSE | {"dense_max_patches": 1 << 20}, "are not believed"),
    (DOCLING, DENSE | {"dense_max_patches": -1}, "'dense_max_patches' must be"),
    (DOCLING, DENSE | {"dense_max_scale": "1"}, "'dense_max_scale' must be"),
    (DOCLING, {"crop_to_patches": 1}, "'crop_to_patches' must be"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


def processor_of(tokens: int) -> Any:
    """transformers', for what it makes of a template's marks."""
    made: Any = GraniteDoclingProcessor.__new__(GraniteDoclingProcessor)
    made.fake_image_token, made.image_token, made.global_image_tag, made.image_seq_len = FAKE, "<image>", "<global-img>", tokens
    return made


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 2), (3, 2)])
def test_the_text_around_pieces_is_transformers(rows: int, columns: int) -> None:
    expected = processor_of(1).replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
    picture = blank(rows * columns + 1, rows, columns) if rows * columns > 1 else blank(1, 0, 0)
    assert read(DOCLING).tokens.text(picture) == expected


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<|end_of_text|>"
)
SIZES: dict[str, Any] = {"size": {"height": 32, "width": 32}, "max_patches": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture(scope="module")
def docling(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes: of 32 x 32 pixels are 4 tokens. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    text = SMALL | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST, "embedding_multiplier": 2.0}
    config: Any = GraniteDoclingConfig(
        text_config=text, image_token_id=FIRST + 1,
        vision_config=TOWER | {"image_size": 32, "patch_size": 4, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SIZES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    return model, folder


PICTURES = [pillow.fromarray(colours(50, 70, 3)), pillow.fromarray(colours(24, 33, 3))]
SAID = asked_about(PICTURES)


def test_a_chat_about_two_images_is_transformers(docling: tuple[Any, Path]) -> None:
    model, folder = docling
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    seen = theirs.GraniteDoclingImageProcessorPil(**SIZES)(images=[PICTURES], return_tensors="pt")
    assert [len(seen["rows"][0]), seen["pixel_values"].shape[1]] == [2, 6]  # four pieces and all of it, and one
    first, last = (processor_of(4).replace_image_token(seen, place) for place in range(2))
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"{first}and{last}differ?<|end_of_text|>"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    whole = torch.tensor([[*ids, *output.outputs[0].token_ids]])
    with torch.inference_mode():
        logits = model(whole, pixel_values=seen["pixel_values"], pixel_attention_mask=seen["pixel_attention_mask"]).logits[0]
    assert list(output.outputs[0].token_ids) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


def test_no_file_is_written_of_what_it_sees_by(docling: tuple[Any, Path]) -> None:
    with open_checkpoint(docling[1]) as checkpoint:
        tower, notes = tower_or_note(checkpoint, "f32", "m")
    assert tower is None
    assert ["no file is written of what such a model sees by" in note for note in notes] == [True]


def test_tiles_that_may_be_few_are_never_more() -> None:
    spec = read(DOCLING, DENSE)
    assert replace(spec.limited(64 * 11).size, dense=None).most_tiles == spec.limited(64 * 11).size.all_tiles == 10
