"""Idefics 2: its config as published, sizes, quarters, pixels and prompts as transformers has them, an answer about images, what
it takes, what is refused. Rows, steps: test_towers.py, test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, Idefics2Processor
from transformers.image_utils import SizeDict
from transformers.models.idefics2.image_processing_pil_idefics2 import (
    Idefics2ImageProcessorPil,
    get_resize_output_image_size,
)

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.text.image_tokens import with_marks
from nanovllm_cli.vision_spec import Image, Picture
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_sees_by_no_file, with_merges
from test_tower_memory import Held
from test_vision import MODELS

IDEFICS: dict[str, Any] = {
    "architectures": ["Idefics2ForConditionalGeneration"], "image_token_id": 32001, "model_type": "idefics2",
    "perceiver_config": {"model_type": "idefics2"}, "tie_word_embeddings": False,
    "text_config": {"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
                    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 4096, "vocab_size": 32003},
    "vision_config": {"hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "model_type": "idefics2",
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
}  # fmt: skip
"""config.json of Idefics 2 8B, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2,
    "size": {"longest_edge": 980, "shortest_edge": 378},
}  # fmt: skip
SMALL_IMAGES = IMAGES | {"size": {"longest_edge": 48, "shortest_edge": 12}}
AROUND = "<fake_token_around_image>"
WORDS = ["<image>", AROUND, "<|im_start|>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{{ '<end_of_utterance>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def changed(part: str, **own: Any) -> dict[str, Any]:
    return IDEFICS | {part: IDEFICS[part] | own}


def written_by_transformers(text: str, *, splits: bool, count: int = 64) -> str:
    """What its processor gives to the tokenizer."""
    seen: list[str] = []

    class Tokenizer:
        def __init__(self) -> None:
            self.init_kwargs: dict[str, Any] = {}

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            seen.extend(texts)
            return {"input_ids": [[]]}

    processor: Any = Idefics2Processor.__new__(Idefics2Processor)
    processor.tokenizer, processor.image_processor = Tokenizer(), Idefics2ImageProcessorPil(do_image_splitting=splits)
    processor.fake_image_token, processor.image_token, processor.image_seq_len = AROUND, "<image>", count
    processor._merge_kwargs = lambda **_: {"text_kwargs": {}, "images_kwargs": {}}
    processor._check_special_mm_tokens = lambda *_, **__: None
    processor(text=text)
    return seen[0]


def test_it_is_as_published() -> None:
    spec = read(IDEFICS, IMAGES)
    tower, perceiver = spec.tower, spec.tower.resampler
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size, tower.out_size) == (
        1152, 27, 16, 4304, 4096,
    )  # fmt: skip
    assert perceiver == (64, 3, 16, 4, 96, 14336, 1e-6)
    assert (tower.cell, tower.positions, spec.size.longest_side, spec.size.least_side) == (14, 4900, 980, 378)
    assert (spec.least_tokens, most_tokens(spec), most_rows(spec)) == (320, 320, 4900)
    assert most_tokens(spec.limited(319)) == 64
    assert spec.limited(320).size == spec.size
    alone = read(IDEFICS)  # settings that say nothing divide nothing
    assert (alone.least_tokens, most_tokens(alone)) == (64, 64)
    other = read(changed("perceiver_config", hidden_size=1024, rms_norm_eps=1e-3)).tower.resampler
    assert other is not None
    assert other.eps == 1e-5, "as transformers has it where a part says another width than the text's"
    shapes = tower_shapes(tower)
    assert sum(int(np.prod(shape)) for name, shape in shapes.items() if name.startswith("resampler.")) == 3 * (
        3 * 4096 + 4096 * 96 * (16 + 4 + 4 + 16) + 3 * 4 * 4096**2
    ) + 65 * 4096
    text = spec_from_hf(IDEFICS, hf_family(IDEFICS))
    assert (text.num_layers, text.attention.num_kv_heads, text.tied_head) == (32, 8, False)


@given(st.integers(1, 6000), st.integers(1, 6000))
@settings(max_examples=300, deadline=None)
def test_an_image_is_as_large_as_transformers_makes_it(height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    expected = get_resize_output_image_size(np.empty((3, height, width)), SizeDict(shortest_edge=378, longest_edge=980))
    assert fitted(read(IDEFICS, IMAGES).size, height, width).whole == expected


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("shape", [(7, 8), (40, 9), (31, 133), (100, 97), (2, 90)])
def test_pixels_and_tokens_are_those_of_transformers(shape: tuple[int, int], splits: bool) -> None:
    """Quarters line by line, the lower and the right one being the larger ones, and all of it; whole patches are read."""
    picture, said = pillow.fromarray(colours(*shape, 3)), SMALL_IMAGES | {"do_image_splitting": splits}
    theirs: Any = Idefics2ImageProcessorPil(**said | {"do_rescale": False, "do_normalize": False})
    seen = theirs(images=[picture], return_tensors="pt")
    spec = read(changed("vision_config", image_size=48, patch_size=4), said)
    found = read_image(saved(picture, "PNG"), spec, "it")
    assert len(found.images) == len(seen["pixel_values"][0]) == (5 if splits else 1)
    for image, pixels, mask in zip(found.images, seen["pixel_values"][0], seen["pixel_attention_mask"][0], strict=True):
        height, width = (int(side) // 4 * 4 for side in (mask[:, 0].sum(), mask[0].sum()))
        expected = pixels[:, :height, :width].to(torch.uint8).permute(1, 2, 0).numpy()
        assert (image.height, image.width) == (height, width)
        assert image.pixels == expected.tobytes()
    assert spec.num_tokens(found) == written_by_transformers("<image>", splits=splits).count("<image>")


def test_what_is_too_thin_to_have_quarters_is_shown_once() -> None:
    """transformers fails with it."""
    found = read_image(saved(pillow.fromarray(colours(1, 90, 3)), "PNG"), read(IDEFICS, IMAGES), "it")
    assert [(each.height, each.width) for each in found.images] == [(378, 378)]
    assert read(IDEFICS, IMAGES).num_tokens(found) == 64


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("text", ["a <image> b", "<image><image>\nc<image>", "<image>\n<image><image><image>"])
def test_the_text_around_images_is_transformers(text: str, splits: bool) -> None:
    """Of tokens for an image there is one in ours. What is between images that follow each other is there once."""
    tokens = read(IDEFICS, IMAGES | {"do_image_splitting": splits}).tokens
    blank = Image.of(14, 14, bytes(3 * 14 * 14))
    pictures = [Picture((blank,) * 5, 2, 2) if splits else Picture((blank,))] * text.count("<image>")
    assert with_marks(text, set(), {"images": tokens}, pictures).text == written_by_transformers(text, splits=splits, count=1)


def test_a_word_behind_an_image_gets_no_space() -> None:
    tokens = read(IDEFICS, IMAGES | {"do_image_splitting": False}).tokens
    found = with_marks("<image>What", set(), {"images": tokens}, [Picture((Image.of(14, 14, bytes(3 * 14 * 14)),))]).text
    assert found == f"{AROUND}<image>{AROUND}What"
    assert written_by_transformers("<image>What", splits=False, count=1) == f"{AROUND}<image>{AROUND} What"


def test_an_answer_about_images_is_transformers(doors: Doors, tmp_path: Path) -> None:
    config = type(MODELS["idefics2"]).from_dict(MODELS["idefics2"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    (folder / "preprocessor_config.json").write_text(json.dumps(SMALL_IMAGES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[3], chat_template=TEMPLATE)
    pictures = [pillow.fromarray(colours(*sides, 3)) for sides in ((31, 65), (25, 6))]
    urls = [{"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}} for picture in pictures]
    said = [{"role": "user", "content": [*urls, {"type": "text", "text": "\nWhat?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    text = "<|im_start|>user\n<image><image>\nWhat?<end_of_utterance>\n<|im_start|>assistant\n"
    text = written_by_transformers(text, splits=True, count=7)
    for place, word in enumerate(WORDS):
        text = text.replace(word, chr(0xE000 + place))
    ids = [256 + ord(each) - 0xE000 if each >= "\ue000" else ord(each) for each in text]
    assert list(prompt) == ids
    assert ids.count(257) == 2 * 5 + 1
    seen = Idefics2ImageProcessorPil(**SMALL_IMAGES)(images=[pictures], return_tensors="pt")
    answer = model.generate(
        torch.tensor([ids]), pixel_values=seen["pixel_values"], pixel_attention_mask=seen["pixel_attention_mask"],
        max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    code, out, err = doors.command("models", "show", str(folder))
    assert (code, "35 tokens at most for each, whatever its size; read by 2 layers of 32" in out) == (0, True), out + err
    check_sees_by_no_file(with_merges(folder, WORDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("between", "width"), [(2000, 64), (16, 256)])
def test_what_it_takes_is_told(between: int, width: int, dtype: torch.dtype) -> None:
    """Where what makes rows wide is the most, and where queries that look at them are."""
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "image_size": 128}
    config = changed("vision_config", **small, patch_size=4) | {
        "text_config": IDEFICS["text_config"] | {"hidden_size": width, "intermediate_size": between},
        "perceiver_config": {"hidden_size": width, "resampler_n_heads": 8, "num_key_value_heads": 2, "resampler_head_dim": 16},
    }
    spec = read(config, IMAGES).tower
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, image = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(160, 160, bytes(3 * 160 * 160))
    with torch.inference_mode(), Held() as held:
        tower(image)
    assert held.most <= work_bytes(spec, 160 * 160, dtype) <= 1.6 * held.most


def test_images_that_nobody_made_are_refused() -> None:
    spec = read(changed("vision_config", patch_size=4, image_size=48), SMALL_IMAGES)
    image = Image.of(12, 16, bytes(3 * 12 * 16))
    placed = spec.placed(image, 3)
    assert spec.fits([placed], 67)
    assert not spec.fits([placed], 66)
    assert not spec.fits([placed._replace(columns=12)], 99)
    assert not spec.fits([placed._replace(rows=3, columns=4)], 99)
    assert not spec.fits([spec.placed(Image.of(12, 14, bytes(3 * 12 * 14)), 3)], 99)


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed("vision_config", model_type="clip_vision_model"), {}, UnsupportedError, "a tower of the kind 'clip_vision_model'"),
    (changed("vision_config", hidden_act="relu"), {}, UnsupportedError, "activation 'relu'"),
    (changed("perceiver_config", hidden_act="gelu"), {}, UnsupportedError, "hidden_act 'gelu'"),
    (changed("text_config", hidden_act="gelu"), {}, UnsupportedError, "hidden_act 'gelu'"),
    (IDEFICS, {"size": {"height": 378, "width": 378}}, UnsupportedError, "images of one size"),
    (IDEFICS, {"do_resize": False}, UnsupportedError, "do_resize false"),
    (changed("perceiver_config", num_key_value_heads=5), {}, CheckpointError, "16 heads of queries can't share 5"),
    (changed("perceiver_config", resampler_n_latents=1 << 20), {}, CheckpointError, "1048576 tokens of an image"),
    (changed("perceiver_config", resampler_depth=1 << 20), {}, CheckpointError, "asks for 1048576 layers"),
    (changed("perceiver_config", resampler_head_dim=0), {}, CheckpointError, "'resampler_head_dim' must be"),
    (changed("vision_config", image_size=1 << 20), {}, CheckpointError, "are not believed"),
    (changed("vision_config", num_attention_heads=7), {}, CheckpointError, "7 heads can't share 1152"),
    (IDEFICS, {"size": {"longest_edge": 378, "shortest_edge": 980}}, CheckpointError, "sides of 980 to 378 pixels"),
    (IDEFICS, {"size": {"longest_edge": 980, "shortest_edge": 13}}, CheckpointError, "in patches of 14, are not believed"),
    (IDEFICS, {"size": {"longest_edge": 1 << 20, "shortest_edge": 378}}, CheckpointError, "are not believed"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
