"""HunYuan-VL: its config as published, what is refused, conversations about images, and files. Rows and answers: test_towers.py,
test_vision.py, test_mmproj.py."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, HunYuanVLConfig
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.sight import rotary_positions
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.registry_gguf import gguf_family
from nanovllm_cli.vision_spec import Image
from seeing import FIRST, hunyuan_as_published
from test_image_pieces import read
from test_images import asked_about, colours
from test_llm import write_byte_tokenizer
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_vision import MODELS, TOWER, XDROPE, an_image, prompt_with

FIRST_TOKEN, LAST_TOKEN, IMAGE = (f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 101, 102))
WORDS = ["<|im_end|>", FIRST_TOKEN, IMAGE, LAST_TOKEN]
OCR: dict[str, Any] = {
    "architectures": ["HunYuanVLForConditionalGeneration"], "model_type": "hunyuan_vl", "attention_head_dim": 128,
    "eos_token_id": 120020, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
    "max_position_embeddings": 32768, "num_attention_heads": 16, "num_experts": 1, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "org_vocab_size": 120818, "pad_token_id": -1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "type": "xdrope", "xdrope_section": [16, 16, 16, 16]},
    "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True,
    "vision_config": {"hidden_act": "gelu", "hidden_size": 1152, "img_max_token_num": 4096, "intermediate_size": 4304,
                      "interpolate_mode": "bilinear", "max_image_size": 2048, "max_vit_seq_len": 16384, "num_attention_heads": 16,
                      "num_channels": 3, "num_hidden_layers": 27, "out_hidden_size": 1024, "patch_size": 16,
                      "rms_norm_eps": 1e-05, "spatial_merge_size": 2},
}  # fmt: skip
"""In one piece, with names of the publisher's own."""
IMAGES: dict[str, Any] = {"min_pixels": 262144, "max_pixels": 4194304, "patch_size": 16, "merge_size": 2, "resample": 1,
                          "temporal_patch_size": 1}  # fmt: skip


def changed(vision: dict[str, Any], **config: Any) -> dict[str, Any]:
    return OCR | config | {"vision_config": OCR["vision_config"] | vision}


def all_read(config: dict[str, Any], images: dict[str, Any]) -> None:
    spec_from_hf(config, hf_family(config))
    read(config, images)


def test_a_hunyuan_ocr_as_published() -> None:
    spec = read(OCR, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1152, 27, 16, 4304)
    assert (tower.out_size, tower.eps, tower.projector_eps, tower.cell, tower.positions) == (1024, 1e-5, 1e-5, 32, 128 * 128)
    assert (spec.size.min_pixels, spec.size.max_pixels, spec.size.resample) == (262144, 4194304, "bicubic")
    assert (spec.tokens.token, spec.has_grid, tower.activation) == (IMAGE, False, "gelu")
    placed = spec.placed(an_image(spec, 12, 17), 5, 3)
    assert (placed.num_tokens, placed.num_rows, placed.extent, placed.ordinal) == (12 * 18 + 2, 12 * 18 + 2, 12 * 18 + 2, 3)


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_sizes_are_transformers(height: int, width: int) -> None:
    if max(height, width) <= 150 * min(height, width):
        spec = read(OCR, IMAGES)
        rows, columns = fitted(spec.size, height, width).whole
        assert (rows, columns) == smart_resize(height, width, 32, 1 << 18, 1 << 22)
        placed = spec.placed(Image(rows, columns, b"", b""), 0)
        assert placed.num_tokens == rows // 32 * (columns // 32 + 1) + 2 <= most_tokens(spec)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_an_image_has_no_more_tokens_than_it_may_with_those_at_ends_of_lines(height: int, width: int, most: int) -> None:
    if max(height, width) <= 200 * min(height, width):
        spec = read(OCR, IMAGES)
        limited = spec.limited(most)
        tall, wide = fitted(limited.size, height, width).whole
        found = limited.placed(Image(tall, wide, b"", b""), 0).num_tokens
        assert found == tall // 32 * (wide // 32 + 1) + 2
        assert spec.least_tokens == 4 <= found <= most_tokens(limited) <= max(most, 4)
        whole = fitted(spec.size, height, width).whole
        if spec.placed(Image(*whole, b"", b""), 0).num_tokens <= most:
            assert (tall, wide) == whole
        elif max(height, width) <= 2 * min(height, width) and most >= 300:
            assert found >= 0.85 * most, "smaller than it need be"


def test_its_text_as_published_is_what_transformers_makes_of_it() -> None:
    """Two spellings: flat with the publisher's names, and what transformers saves. The base is stretched by alpha."""
    flat = spec_from_hf(OCR, hf_family(OCR))
    own: Any = HunYuanVLConfig(**{key: value for key, value in OCR.items() if key != "architectures"})
    saved_again = own.to_dict() | {"architectures": OCR["architectures"]}
    assert saved_again["text_config"]["rope_parameters"]["mrope_section"] == [16] * 4
    assert flat == spec_from_hf(saved_again, hf_family(saved_again))
    rope = flat.attention.rope
    assert rope is not None
    assert rope.theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert (rope.axes, rope.scaling, flat.max_position) == ((0,) * 16 + (1,) * 16 + (2,) * 16 + (3,) * 16, "none", 32768)
    assert (flat.attention.head_dim, flat.vocab_size, flat.attention.qk_norm_of) == (128, 120818, "turned head")


@pytest.mark.parametrize(("config", "words"), [
    (OCR | {"num_experts": 8}, "with experts"),
    (OCR | {"use_qk_norm": False}, "'use_qk_norm' is false"),
    (OCR | {"use_cla": True}, "'use_cla' is true"),
    (changed({"interpolate_mode": "bicubic"}), "interpolate_mode 'bicubic'"),
    (changed({"num_key_value_heads": 4}), "num_key_value_heads '4'"),
    (changed({"head_dim": 64}), "head_dim '64'"),
    (changed({"temporal_patch_size": 2}), "temporal_patch_size '2'"),
    (changed({"hidden_act": "relu"}), "activation 'relu'"),
])  # fmt: skip
def test_what_is_not_computed_here(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        all_read(config, IMAGES)


@pytest.mark.parametrize(("config", "images", "words"), [
    (OCR | {"rope_scaling": OCR["rope_scaling"] | {"mrope_section": [32, 16, 8, 8]}}, {}, "contradict each other"),
    (OCR | {"rope_scaling": OCR["rope_scaling"] | {"xdrope_section": [32, 32]}}, {}, "must be 3 or 4 counts"),
    (OCR | {"rope_scaling": OCR["rope_scaling"] | {"xdrope_section": [16, 16, 16, "16"]}}, {}, "must be 3 or 4 counts"),
    (OCR | {"rope_scaling": OCR["rope_scaling"] | {"alpha": "much"}}, {}, "alpha"),
    (changed({"max_image_size": 15}), {}, "images of 15 x 15 pixels in patches of 16"),
    (changed({"max_image_size": 1 << 20}), {}, "are not believed"),
    (changed({"num_attention_heads": 17}), {}, "17 heads can't share 1152"),
    (OCR, {"patch_size": 14}, "'patch_size' is 14"),
    (OCR, {"spatial_patch_size": 2}, "'spatial_patch_size' is 2"),
    (OCR, {"min_pixels": 1 << 23}, "pixels; the second must be the larger"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        all_read(config, images)


def test_positions_of_two_images_are_transformers_in_any_steps() -> None:
    model = random_model(MODELS["hunyuan-vl"], auto=AutoModelForImageTextToText)
    spec = read(changed({"patch_size": 4, "max_image_size": 16}, hidden_size=48))
    prompt = prompt_with(spec, [5, an_image(spec, 3, 4), 2, an_image(spec, 1, 2), 1, an_image(spec, 2, 1), 4], 512)
    assert [placed.ordinal for placed in prompt.images] == [0, 1, 2]
    ids = torch.tensor([list(prompt)])
    grid = torch.tensor([[1, each.rows * 2, (each.columns - 1) * 2] for each in prompt.images])
    expected, shift = model.model.get_rope_index(ids, (ids == 512).int(), image_grid_thw=grid)
    assert shift.tolist() == [[0]]
    for cuts in ([0, len(prompt)], [0, 4, 6, 7, 15, 23, 24, 30, len(prompt)]):
        found = []
        for start, end in pairwise(cuts):
            images = tuple(each for each in prompt.images if each.start < end and each.end > start)
            share = Scheduled(0, list(prompt[start:end]), start, [], (), images=images)
            positions = rotary_positions([share], np.arange(start, end))
            found.append(np.repeat(positions[None], 4, axis=0) if positions.ndim == 1 else positions)
        np.testing.assert_array_equal(np.concatenate(found, axis=1), expected[:, 0])


def test_a_config_in_one_piece_is_read_as_another(tmp_path: Path) -> None:
    model = random_model(MODELS["hunyuan-vl"], auto=AutoModelForImageTextToText)
    (tmp_path / "flat").mkdir()
    folder, flat = save(model, tmp_path / "folder"), tmp_path / "flat"
    tensors = load_file(folder / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"vit", "model", "lm_head"}
    save_file(tensors, flat / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "xdrope", "alpha": rope["alpha"], "factor": 1.0, "xdrope_section": rope["mrope_section"]}
    old = {"attention_head_dim": text.pop("head_dim"), "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    (flat / "config.json").write_text(json.dumps(text | old | config))
    answers = []
    for path in (folder, flat):
        worker = worker_for(path, dtype="float32")
        assert worker.sight is not None
        vision = worker.sight.senses.vision
        if not answers:
            prompt = prompt_with(vision, [4, an_image(vision, 2, 3), 5], 512)
        answers += [run(engine_for(worker), [(prompt, greedy(8))])[0].outputs[0].token_ids]
    assert answers[0] == answers[1]


def test_sections_of_three_positions_leave_it_blind(tmp_path: Path) -> None:
    """As it would be of a model whose images have a time, a row and a column."""
    folder = save(random_model(MODELS["hunyuan-vl"], auto=AutoModelForImageTextToText), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [4, 4, 4]
    (folder / "config.json").write_text(json.dumps(config))
    worker = worker_for(folder, dtype="float32")
    assert worker.sight is None
    run(engine_for(worker), [([5, 6, 7], greedy(2))])


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}" + FIRST_TOKEN + IMAGE + LAST_TOKEN + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}<|im_end|>"
)


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes. transformers' and its folder."""
    folder = tmp_path_factory.mktemp("model")
    text = SMALL | {"vocab_size": FIRST + len(WORDS), "eos_token_id": FIRST, "head_dim": 24, "rope_parameters": XDROPE}
    config: Any = HunYuanVLConfig(
        text_config=text, image_token_id=FIRST + 2, tie_word_embeddings=False,
        vision_config=TOWER | {"patch_size": 4, "max_image_size": 20},
    )  # fmt: skip
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], chat_template=TEMPLATE)
    return hunyuan_as_published(model), folder


PICTURES = [pillow.fromarray(colours(50, 33, 3)), pillow.fromarray(colours(7, 91, 3))]
SAID = asked_about(PICTURES)


@pytest.mark.parametrize(
    ("most", "cells", "tokens"), [(4096, 64, [6 * 5 + 2, 1 * 12 + 2]), (13, 9, [3 * 3 + 2, 1 * 11 + 2])]
)
def test_a_chat_about_two_images_is_transformers(
    hunyuan: tuple[Any, Path], most: int, cells: int, tokens: list[int]
) -> None:
    """cells: what transformers takes for the most, which counts no tokens at ends of lines."""
    model, folder = hunyuan
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=19, image_max_tokens=most)) as llm:
        prompt = llm.encode_chat(SAID)
        (output,) = llm.chat(SAID, params)
    size = {"shortest_edge": 256, "longest_edge": cells * 64}
    processor: Any = HunYuanVLImageProcessorPil(size=size, patch_size=4)
    seen = processor(images=PICTURES, return_tensors="pt")
    counts = [height // 2 * (width // 2 + 1) + 2 for _, height, width in seen["image_grid_thw"].tolist()]
    assert counts == tokens
    first, last = (FIRST_TOKEN + IMAGE * count + LAST_TOKEN for count in counts)
    ids: list[int] = []
    for piece in re.split("(<[^>]*>)", f"{first}and{last}differ?<|im_end|>"):
        ids += [FIRST + WORDS.index(piece)] if piece in WORDS else piece.encode()
    assert list(prompt) == ids
    shown = {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
    kinds = (torch.tensor([ids]) == FIRST + 2).int()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **shown, **options)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_converted_it_reads_images_as_its_folder_does(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["hunyuan-vl"], auto=AutoModelForImageTextToText), tmp_path / "folder")
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    check_it_sees_as_its_folder_does(with_merges(folder, WORDS[1:]), tmp_path / "m-F32.gguf")


@pytest.mark.parametrize(("own", "theta", "sections"), [
    ({"rope.scaling.alpha": 50.0, "rope.dimension_sections": [4, 3, 3, 2]}, 1e4 * 50 ** (24 / 22), (4, 3, 3, 2)),
    ({"rope.dimension_sections": [5, 4, 3, 0]}, 1e4, (5, 4, 3)),
    ({"rope.scaling.alpha": 0.0}, 1e4, ()),
])  # fmt: skip
def test_a_file_may_have_alpha_beside_the_base(own: dict[str, Any], theta: float, sections: tuple[int, ...]) -> None:
    """As llama.cpp's converter writes it; ours stretches the base, as it does for the model without images."""
    said = {"block_count": 1, "embedding_length": 48, "feed_forward_length": 64, "attention.head_count": 2, "context_length": 512,
            "attention.key_length": 24, "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e4} | own  # fmt: skip
    metadata = {"general.architecture": "hunyuan_vl"} | {f"hunyuan_vl.{key}": value for key, value in said.items()}
    spec = spec_from_gguf(metadata, gguf_family(metadata), 513, set(), lambda name: None)
    rope = spec.attention.rope
    assert rope is not None
    assert (rope.theta, rope.sections, spec.attention.qk_norm_of) == (pytest.approx(theta), sections, "turned head")


def test_an_alpha_that_is_no_number_is_broken() -> None:
    metadata = {"general.architecture": "hunyuan_vl", "hunyuan_vl.block_count": 1, "hunyuan_vl.embedding_length": 48,
                "hunyuan_vl.attention.head_count": 2, "hunyuan_vl.feed_forward_length": 64, "hunyuan_vl.context_length": 64,
                "hunyuan_vl.attention.layer_norm_rms_epsilon": 1e-5, "hunyuan_vl.rope.scaling.alpha": "much"}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.alpha"):
        spec_from_gguf(metadata, gguf_family(metadata), 513, set(), lambda name: None)
