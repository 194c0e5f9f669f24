"""MiniCPM-V 4.7: its config, where tokens lie on a canvas, what is refused, a conversation about two images. Rows, answers and
how an image is cut: test_vision.py, and test_tower_minicpm.py, whose tower and cuts it has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, MiniCPMV4_7Config
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.canvas_spec import Canvas
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.prefix_cache import PrefixCache
from nanovllm_cli.engine.sequence import Request
from nanovllm_cli.engine.sight import rotary_positions
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.text.image_tokens import on_canvases
from nanovllm_cli.vision_spec import Image, Picture, PlacedImage, TokenIds
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_or_note
from seeing import FIRST
from test_image_pieces import read
from test_images import asked_about, colours
from test_llm import write_byte_tokenizer
from test_models import CASES
from test_tower_minicpm import SIZES, TEMPLATE, V4_6, WORDS, processor_of
from test_vision import MARKERS, TOWER, an_image, prompt_with

IDS = dict(zip(MARKERS, range(505, 510), strict=True))
V4_7: dict[str, Any] = V4_6 | IDS | {
    "architectures": ["MiniCPMV4_7ForConditionalGeneration"],
    "vision_config": V4_6["vision_config"] | {"model_type": "minicpmv4_7_vision"},
}  # fmt: skip


def test_its_config() -> None:
    spec = read(V4_7)
    old = read(V4_6)
    assert (spec.tower, spec.size, spec.tokens, spec.mean) == (old.tower, old.size, old.tokens, old.mean)
    assert (spec.has_grid, spec.markers, old.markers) == (True, (505, 506, 507, 508, 509), None)
    assert hf_family(V4_7).name == "qwen3_5"
    for name in MARKERS:
        with pytest.raises(CheckpointError, match=name):
            read({key: value for key, value in V4_7.items() if key != name})
    with pytest.raises(CheckpointError, match="'newline_id' must be"):
        read(V4_7 | {"newline_id": -1})
    with pytest.raises(CheckpointError, match="tokens around images that are the same"):
        read(V4_7 | {"newline_id": 505})
    with pytest.raises(UnsupportedError, match="a tower of the kind 'minicpmv4_6_vision'"):
        read(V4_7 | {"vision_config": V4_6["vision_config"]})


THEIRS: Any = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
torch.nn.Module.__init__(THEIRS)
THEIRS.config = MiniCPMV4_7Config(**IDS)
SIDE = st.integers(1, 5)
PARTS = st.one_of(
    st.integers(0, 4), st.just("newline"),
    st.tuples(SIDE, SIDE, st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 3), SIDE, SIDE))),
)  # fmt: skip


@given(st.lists(PARTS, max_size=7), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_where_tokens_lie_is_transformers(parts: list[Any], step: int) -> None:
    """Text, newlines and images behind each other in any order; cut in steps anywhere."""
    markers = read(V4_7).markers
    assert markers is not None
    ids: list[int] = []
    plain: list[PlacedImage] = []
    pictures: list[Picture] = []
    sizes: list[list[int]] = []
    for part in parts:
        if not isinstance(part, tuple):
            ids += [markers.newline] if part == "newline" else [7] * part
            continue
        lines, columns, cut = part
        rows, across, tall, wide = cut or (0, 0, 0, 0)
        pieces = [(lines, columns), *[(tall, wide)] * (rows * across)]
        pictures.append(Picture((Image(0, 0, b"", b""),) * len(pieces), rows, across))
        for number, piece in enumerate(pieces):
            begin, end = markers[2:4] if number else markers[:2]
            ids += [markers.newline] if number > 1 and (number - 1) % across == 0 else []
            plain.append(PlacedImage(Image(0, 0, b"", b""), len(ids) + 1, *piece, has_grid=True))
            ids += [begin, *[512] * (piece[0] * piece[1]), end]
            sizes.append([4 * side for side in piece])
    ids += [7]
    given = torch.tensor([ids])
    expected, delta = THEIRS.get_rope_index(given, (given == 512).int(), torch.tensor(sizes))
    prompt = TokenIds(ids, on_canvases(ids, plain, pictures, markers))
    found = []
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        within = tuple(each for each in prompt.images if each.end > start and each.start < start + len(some))
        shift = sum(each.extent - each.num_tokens for each in prompt.images if each.end <= start)
        share = Scheduled(0, some, start, [], (), images=within, shift=shift)
        made = rotary_positions([share], np.arange(start, start + len(some)))
        found.append(made if made.ndim == 2 else np.stack([made] * 3))
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected[:, 0].numpy())
    assert len(ids) + sum(each.extent - each.num_tokens for each in prompt.images) == len(ids) + int(delta)


def test_images_that_do_not_lie_so_are_refused() -> None:
    spec = read(V4_7 | {"downsample_mode": "4x"}, {"downsample_mode": "4x"})
    cut = Picture(tuple(an_image(spec, *sides) for sides in [(2, 3), *[(3, 2)] * 4]), 2, 2)
    prompt = prompt_with(spec, [3, cut, 2, an_image(spec, 2, 2), 3], 512)
    images = list(prompt.images)
    assert spec.fits(images, len(prompt))
    whole, first, second, third, fourth, alone = (each.canvas for each in images)
    assert (whole, first) == (Canvas(6, 4, is_whole=True), Canvas(6, 4))
    assert (second, third) == (Canvas(6, 4, left=2, num_behind=2), Canvas(6, 4, top=3))
    assert (fourth, alone) == (Canvas(6, 4, 3, 2, is_last=True), Canvas(2, 2, is_whole=True, is_last=True))
    wrong: list[list[PlacedImage]] = [
        images[1:], images[:4], [images[0], *images[2:]], [*images[:2], *images[3:]], images[5:] + images[:5],
        [each._replace(canvas=None) for each in images], [images[-1]._replace(canvas=alone._replace(tall=3))],
    ]  # fmt: skip
    for place, change in [
        (0, {"tall": 7}), (0, {"num_behind": 0}), (0, {"is_last": True}), (0, {"top": 1}), (0, {"is_whole": False}),
        (1, {"left": 1}), (1, {"tall": 7}), (1, {"is_last": True}), (1, {"num_behind": 2}), (1, {"is_whole": True}),
        (4, {"is_last": False}), (4, {"top": 0}), (5, {"wide": 3}),
    ]:  # fmt: skip
        canvas = images[place].canvas
        assert canvas is not None
        wrong.append([*images[:place], images[place]._replace(canvas=canvas._replace(**change)), *images[place + 1 :]])
    assert [spec.fits(each, len(prompt)) for each in wrong] == [False] * len(wrong)
    assert not read(V4_6).fits(images, len(prompt))


def test_images_between_other_tokens_than_the_config_says() -> None:
    spec = read(V4_7)
    assert spec.markers is not None
    picture = Picture((an_image(spec, 1, 2), *[an_image(spec, 1, 1)] * 2), 2, 1)
    good = prompt_with(spec, [1, picture, 1], 512)
    plain = [each._replace(start=each.start + 1, canvas=None) for each in good.images]
    for place in (good.index(505), good.index(506), good.index(507), good.index(509)):
        ids = list(good)
        ids[place] = 7
        with pytest.raises(CheckpointError, match="between other tokens"):
            list(on_canvases(ids, plain, [picture], spec.markers))
    for ids, images in (list(good)[2:], [plain[0]._replace(start=0)]), (list(good)[: plain[0].end], plain[:1]):
        with pytest.raises(CheckpointError, match="between other tokens"):
            list(on_canvases(ids, images, [Picture(picture.images[:1])], spec.markers))


@pytest.fixture(scope="module")
def minicpm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes: of 32 x 32 pixels are 4 tokens. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    text = CASES["qwen3.5"].to_dict() | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST}
    config: Any = MiniCPMV4_7Config(
        text_config=text, image_token_id=FIRST + 1, insert_layer_id=0, tie_word_embeddings=False,
        vision_config=TOWER | {"patch_size": 4, "image_size": 24},
        **dict(zip(MARKERS, [*range(FIRST + 2, FIRST + 6), ord("\n")], strict=True)),
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SIZES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    return model, folder


PICTURES = [pillow.fromarray(colours(90, 70, 3)), pillow.fromarray(colours(24, 33, 3))]
SAID = asked_about(PICTURES, "\nand")


def test_a_chat_about_two_images_is_transformers(minicpm: tuple[Any, Path]) -> None:
    model, folder = minicpm
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, params)
    seen = MiniCPMV4_6ImageProcessorPil(**SIZES)(images=PICTURES, return_tensors="pt")
    instead = [processor_of().replace_image_token(seen, place, image_token_divisor=16) for place in range(2)]
    first, last = (f"<image_id>{place}</image_id>{text}" for place, text in enumerate(instead))
    assert "\n<slice>" in first
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"{first}\nand{last}differ?<|im_end|>"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    given = {"input_ids": torch.tensor([ids]), "pixel_values": seen["pixel_values"], "target_sizes": seen["target_sizes"]}
    kinds = (given["input_ids"] == FIRST + 1).int()
    said: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(**given, mm_token_type_ids=kinds, **said)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_no_file_is_written_of_what_it_sees_by(minicpm: tuple[Any, Path]) -> None:
    with open_checkpoint(minicpm[1]) as checkpoint:
        tower, notes = tower_or_note(checkpoint, "f32", "m")
    assert tower is None
    assert ["no file is written of what such a model sees by" in note for note in notes] == [True]


def test_a_found_prefix_lies_on_the_same_canvas() -> None:
    """What shows all of two pictures may be the same, and their tokens; and their pieces lie otherwise."""
    spec = read(V4_7)
    prompt = prompt_with(spec, [1, Picture(tuple(an_image(spec, 2, 2) for _ in range(5)), 2, 2), 9], 512)
    wider = [each._replace(canvas=each.canvas and each.canvas._replace(wide=8)) for each in prompt.images]

    def digested(images: Sequence[PlacedImage]) -> bytes:
        request = SimpleNamespace(images=tuple(images))
        sequence: Any = SimpleNamespace(token_ids=list(prompt), request=SimpleNamespace(
            images_within=lambda *span: Request.images_within(request, *span)  # type: ignore[arg-type]
        ))  # fmt: skip
        return PrefixCache._tokens(SimpleNamespace(_block_size=16), sequence, 0)  # type: ignore[arg-type]

    assert digested(prompt.images) == digested([each._replace() for each in prompt.images]) != digested(wider)
