"""Molmo 2: its config as published, how an image is divided, pixels, prompts and answers as transformers has them, what is
refused."""

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
from torch.nn import functional
from transformers import AutoModelForImageTextToText, Molmo2Config, Molmo2Processor
from transformers.image_utils import SizeDict
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor, compute_crop_geometry

from engines import engine_for, greedy, logprobs_of, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_of, tower_shapes, work_bytes
from nanovllm_cli.models.towers_molmo import molmo2
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.vision_spec import Image, TokenIds, VisionSpec
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_tower_memory import Held

PUBLISHED: dict[str, Any] = {
    "architectures": ["Molmo2ForConditionalGeneration"], "model_type": "molmo2", "tie_word_embeddings": False,
    "adapter_config": {"head_dim": 72, "hidden_size": 1152, "intermediate_size": 12288, "num_attention_heads": 16,
                       "text_hidden_size": 4096, "vit_layers": [-3, -9]},
    "text_config": {"additional_vocab_size": 128, "hidden_size": 4096, "layer_norm_eps": 1e-6, "model_type": "molmo2_text",
                    "num_hidden_layers": 36, "qkv_bias": False, "rope_theta": 1e6, "vocab_size": 151936},
    "vit_config": {"image_default_input_size": [378, 378], "image_num_pos": 729, "image_patch_size": 14, "model_type": "molmo2",
                   "num_hidden_layers": 27},
}  # fmt: skip
"""A config by the keys of those that are published, which name a tower of 27 layers of which the folder has 25."""
IMAGES: dict[str, Any] = {"max_crops": 8, "overlap_margins": [4, 4], "patch_size": 14, "pooling_size": [2, 2], "resample": 2,
                          "size": {"height": 378, "width": 378}}  # fmt: skip
SMALL: dict[str, Any] = IMAGES | {"max_crops": 4, "overlap_margins": [1, 1], "patch_size": 4, "size": {"height": 20, "width": 20}}
WORDS = ["<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>", "<|image|>", "<eos>"]
FIRST = 500
TEMPLATE = ("{% for m in messages %}{% for part in m.content %}{{ '<|image|>' if part.type == 'image' else part.text }}"
            "{% endfor %}{% endfor %}: ")  # fmt: skip
QWEN: dict[str, Any] = {
    "qk_norm_type": "qwen3", "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
OLMO: dict[str, Any] = {
    "qk_norm_type": "olmo", "norm_after": True, "rope_scaling_layers": [1],
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}  # fmt: skip


def read(config: dict[str, Any], images: dict[str, Any] = IMAGES, **own: Any) -> VisionSpec:
    return molmo2(ConfigReader(config, "config.json"), ConfigReader(images | {"processor": own}, "images"))


def changed(section: str, **own: Any) -> dict[str, Any]:
    return PUBLISHED | {section: PUBLISHED[section] | own}


def small(text: dict[str, Any]) -> Molmo2Config:
    tower = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return Molmo2Config(
        text_config={"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": FIRST,
                     "additional_vocab_size": 20, "num_hidden_layers": 2, "intermediate_size": 64} | text,
        vision_config=tower | {"intermediate_size": 40, "num_hidden_layers": 3, "image_size": [20, 20], "patch_size": 4},
        adapter_config=tower | {"vision_feature_layer": [2, 0], "intermediate_size": 44, "text_hidden_size": 48},
        image_patch_id=FIRST,
    )  # fmt: skip


class Images(Molmo2ImageProcessor):  # type: ignore[misc]
    """Without torchvision, whose functions these two are, of floats without antialiasing."""

    def resize(self, image: torch.Tensor, size: Any, **given: Any) -> torch.Tensor:
        assert given["antialias"] is False
        return functional.interpolate(image, (size.height, size.width), mode="bilinear", align_corners=False)

    def rescale_and_normalize(self, images: torch.Tensor, *given: Any) -> torch.Tensor:
        return images / 127.5 - 1

    def seen(self, picture: pillow.Image) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        names = "do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"
        own = {name: getattr(self, name) for name in (*names, "do_convert_rgb", *SMALL)} | {"size": SizeDict(**SMALL["size"])}
        return dict(self._preprocess([pixels], disable_grouping=False, return_tensors="pt", **own))


def a_processor(**own: Any) -> Molmo2Processor:
    processor: Any = Molmo2Processor.__new__(Molmo2Processor)
    said = {"image_use_col_tokens": True, "use_single_crop_col_tokens": None, "use_single_crop_start_token": True} | own
    for key, value in said.items():
        setattr(processor, key, value)
    return processor  # type: ignore[no-any-return]


def test_it_is_as_published() -> None:
    spec = read(PUBLISHED, use_single_crop_col_tokens=False)
    tower = spec.tower
    assert (tower.reads, tower.num_layers, tower.hidden_size, tower.positions, tower.out_size) == ((25, 19), 25, 1152, 729, 4096)
    assert (spec.least_tokens, most_tokens(spec)) == (2 * (14 * 14 + 2) + 14, 14 * 14 + 2 + 80 * 15 + 2)
    assert spec.limited(900).size.grids[-1] == (4, 1)
    text = spec_from_hf(PUBLISHED, hf_family(PUBLISHED))
    assert (text.vocab_size, text.head_rows, text.num_layers, text.attention.num_kv_heads) == (152064, 151936, 36, 8)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_an_image_is_divided_as_transformers_does_it(height: int, width: int, most: int) -> None:
    rows, columns, tall, wide = compute_crop_geometry(height, width, most, [4, 4], 378, 14)
    found = fitted(read(PUBLISHED, IMAGES | {"max_crops": most}).size, height, width)
    assert (found.grid, found.pieces, found.first, found.whole) == ((rows, columns), (tall, wide), (tall, wide), (378, 378))


@pytest.mark.parametrize("own", [{}, {"use_single_crop_col_tokens": False}, {"use_single_crop_start_token": False}])
@pytest.mark.parametrize("shape", [(7, 8), (20, 90), (80, 31), (33, 34), (8, 8)])
def test_pixels_and_tokens_are_those_of_transformers(shape: tuple[int, int], own: dict[str, Any]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    seen = Images(**SMALL).seen(picture)
    spec = read(json.loads(small(QWEN).to_json_string()) | {"architectures": PUBLISHED["architectures"]}, SMALL, **own)
    pictured = read_image(saved(picture, "PNG"), spec, "it")
    (found,) = pictured.images
    assert found.mosaic is not None
    values = ((seen["pixel_values"] + 1) * 127.5).round().to(torch.int16)
    theirs = values.view(-1, 5, 5, 4, 4, 3).transpose(2, 3).reshape(-1, 20, 3)
    ours = torch.tensor(list(found.pixels), dtype=torch.int16).view(theirs.shape)
    assert (theirs - ours).abs().max() <= 1  # where a colour lies in the middle between two
    assert (theirs != ours).float().mean() < 1e-2
    tokens = a_processor(**own).replace_image_token(seen, 0).replace("><", ">|<").split("|")
    placed = spec.placed(found, 0)
    assert placed.whole
    assert placed.num_tokens == len(tokens)
    assert placed.num_alike == tokens.count("<im_patch>")
    marks = {mark.place: spec.tokens.marks[mark.kind] for mark in found.mosaic.marks(found.mosaic.height)}
    assert [marks.get(place, "<im_patch>") for place in range(len(tokens))] == tokens
    assert spec.fits([placed], len(tokens))


@pytest.fixture(scope="module", params=[QWEN, OLMO], ids=["qwen3", "olmo"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes."""
    made = random_model(small(request.param), auto=AutoModelForImageTextToText)
    folder = save(made, tmp_path_factory.mktemp("molmo"))
    said = {"image_processor": SMALL, "image_use_col_tokens": True, "use_single_crop_col_tokens": False}
    (folder / "processor_config.json").write_text(json.dumps(said))
    write_byte_tokenizer(folder, tuple([f"<unused{i}>" for i in range(256, FIRST)] + WORDS), eos_token=WORDS[-1],
                         chat_template=TEMPLATE)  # fmt: skip
    return made, folder


def test_an_answer_about_an_image_is_transformers(model: tuple[Any, Path]) -> None:
    made, folder = model
    picture = pillow.fromarray(colours(24, 40, 3))  # in squares of 5 lines and 8 columns of patches
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    said = [{"role": "user", "content": [{"type": "text", "text": "Say: "}, image, {"type": "text", "text": "What is it?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=23)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
        assert llm.tokenizer.encode("Say") == [FIRST + 6, *b"Say"]  # as the processor begins all texts
        with pytest.raises(UnsupportedError, match="sees 1 image in a prompt, not 2"):
            llm.chat([{"role": "user", "content": [image, image]}], params)
    seen = Images(**SMALL).seen(picture)
    tokens = a_processor(use_single_crop_col_tokens=False).replace_image_token(seen, 0).replace("><", ">|<").split("|")
    ids = [FIRST + 6, *b"Say: ", *(FIRST + WORDS.index(token) for token in tokens), *b"What is it?: "]
    assert list(prompt) == ids
    kinds = torch.tensor([[int(FIRST <= each < FIRST + 5) for each in ids]])
    answer = made.generate(torch.tensor([ids]), **seen, mm_token_type_ids=kinds, max_new_tokens=8, do_sample=False,
                           eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_neither_steps_nor_neighbours_nor_found_prefixes_change_a_bit(model: tuple[Any, Path]) -> None:
    _, folder = model
    worker = worker_for(folder, num_blocks=64)
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    assert vision is not None
    prompts = []
    for shape in ((33, 60), (20, 20)):
        (image,) = read_image(saved(pillow.fromarray(colours(*shape, 3)), "PNG"), vision, "it").images
        placed = vision.placed(image, 5)
        assert image.mosaic is not None
        ids = [*range(5), *[FIRST] * placed.num_tokens, *range(40, 51)]
        for mark in image.mosaic.marks(5):
            ids[5 + mark.place] = FIRST + WORDS.index(vision.tokens.marks[mark.kind])
        prompts.append(TokenIds(ids, [placed]))
    requests = [(prompt, greedy(6, logprobs=0)) for prompt in (*prompts, list(range(30, 60)))]
    alone = [logprobs_of(run(engine_for(worker), [request])[0]) for request in requests]
    changed_settings: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 14}]
    for setting in changed_settings:
        engine = engine_for(worker, **setting)
        for _ in range(2):
            assert [logprobs_of(each) for each in run(engine, requests)] == alone
        assert engine.stats().prefix_hit_tokens > 0


def test_no_file_of_llama_cpp_is_made(model: tuple[Any, Path]) -> None:
    with open_checkpoint(model[1]) as checkpoint, pytest.raises(UnsupportedError, match="Molmo 2"):
        convert.plan(checkpoint, "gguf", "f32")


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed("vit_config", image_num_pos=730), {}, CheckpointError, "730 positions for images of 729 patches"),
    (changed("vit_config", image_default_input_size=[378, 364]), {}, UnsupportedError, "other than of a square"),
    (changed("vit_config", head_dim=64), {}, UnsupportedError, "head_dim '64'"),
    (changed("adapter_config", vit_layers=[-3, 27]), {}, CheckpointError, "in a tower of 27 layers"),
    (changed("adapter_config", vit_layers=3), {}, CheckpointError, "must be a list of layers"),
    (changed("adapter_config", text_hidden_size=2560), {}, CheckpointError, "rows of 2560 numbers for a decoder of 4096"),
    (changed("adapter_config", num_key_value_heads=5), {}, CheckpointError, "can't share 5 of keys evenly"),
    (changed("adapter_config", mlp_bias=True), {}, UnsupportedError, "mlp_bias 'True'"),
    (PUBLISHED, {"pooling_size": [3, 3]}, UnsupportedError, "pooling_size"),
    (PUBLISHED, {"overlap_margins": [4, 3]}, UnsupportedError, "overlap_margins"),
    (PUBLISHED, {"overlap_margins": [14, 14]}, CheckpointError, "leave none of 27"),
    (PUBLISHED, {"overlap_margins": [4]}, CheckpointError, "two numbers of patches"),
    (PUBLISHED, {"max_crops": 1 << 20}, CheckpointError, "are not believed"),
    (PUBLISHED, {"resample": 3}, UnsupportedError, "resample other than 2"),
    (PUBLISHED, {"size": {"height": 336, "width": 336}}, CheckpointError, r"378 x 378 pixels, not \[336\]"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, IMAGES | images)


@pytest.mark.parametrize(("own", "error", "words"), [
    ({"qk_norm_type": "olmo"}, UnsupportedError, "qk_norm_type 'olmo' with norm_after False"),
    ({"rope_scaling_layers": [36]}, CheckpointError, "must be a list of layers, of 36"),
    ({"additional_vocab_size": 1 << 30}, CheckpointError, "tokens beside the vocabulary are not believed"),
])  # fmt: skip
def test_texts_that_are_refused(own: dict[str, Any], error: type[Exception], words: str) -> None:
    config = changed("text_config", **own)
    with pytest.raises(error, match=words):
        spec_from_hf(config, hf_family(config))


def test_what_patches_of_several_layers_take_is_told() -> None:
    config = json.loads(small(QWEN).to_json_string()) | {"architectures": PUBLISHED["architectures"]}
    config["vision_config"] |= {"image_size": [108, 108], "num_position_embeddings": 729, "hidden_size": 64, "head_dim": 32}
    spec = read(config, SMALL | {"size": {"height": 108, "width": 108}, "overlap_margins": [4, 4]}).tower
    tensors = {name: torch.ones(shape) for name, shape in tower_shapes(spec).items()}
    tower, num_pixels = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), 5 * 108**2
    image = Image.of(5 * 108, 108, bytes(3 * num_pixels), Mosaic(2, 2, 27, 27, 4, 1))
    with torch.inference_mode(), Held() as held:
        tower(image)
    assert held.most <= work_bytes(spec, num_pixels, torch.float32) <= 1.7 * held.most


def test_a_mosaic_that_nobody_made_is_refused() -> None:
    spec = read(json.loads(small(QWEN).to_json_string()) | {"architectures": PUBLISHED["architectures"]}, SMALL)
    fine = Image.of(60, 20, bytes(3 * 60 * 20), Mosaic(1, 2, 5, 5, 1, 1))
    assert spec.fits([spec.placed(fine, 3)], 99)
    for rows, columns, *others in (
        (2, 2, 5, 5, 1, 1), (1, 5, 5, 5, 1, 1), (0, 0, 5, 5, 1, 1), (1, 2, 5, 6, 1, 1), (1, 2, 5, 5, 2, 1), (1, 2, 5, 5, 0, 1),
        (1, 2, 5, 5, 1, 0), (1, 2, 0, 0, 0, 0),
    ):  # fmt: skip
        image = fine._replace(mosaic=Mosaic(rows, columns, *others))
        assert not spec.fits([spec.placed(fine, 3)._replace(image=image)], 99)
