"""DeepSeek-OCR 2: its configs as published, how a page is cut, a conversation, and what is refused. Answers: test_vision.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.images.source import data_url
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.vision_spec import Image
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_vision import MODELS, an_image, logprobs_of, prompt_with

TEXT: dict[str, Any] = {
    "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10,
    "max_position_embeddings": 8192, "vocab_size": 129280, "moe_intermediate_size": 896, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "topk_method": "greedy",
}  # fmt: skip
SAM: dict[str, Any] = {"global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512, 896], "hidden_size": 768}
BEHIND = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24,
          "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}  # fmt: skip
OCR2: dict[str, Any] = {
    "architectures": ["DeepseekOcr2ForConditionalGeneration"], "vision_config": {"sam_config": SAM, "encoder_config": BEHIND},
    "text_config": TEXT | {"mlp_layer_types": ["dense"] + ["sparse"] * 11},
}  # fmt: skip
OF_CODE: dict[str, Any] = {
    "architectures": ["DeepseekOCR2ForCausalLM"], **TEXT, "first_k_dense_replace": 1, "kv_lora_rank": None, "q_lora_rank": None,
    "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False, "n_group": 1, "topk_group": 1,
    "vision_config": {"image_size": 1024, "width": {
        "qwen2-0-5b": {"dim": 896},
        "sam_vit_b": {"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11], "heads": 12, "layers": 12,
                      "width": 768},
    }},
}  # fmt: skip


def changed(sam: dict[str, Any], **behind: Any) -> dict[str, Any]:
    return OCR2 | {"vision_config": {"sam_config": SAM | sam, "encoder_config": BEHIND | behind}}


def test_it_is_as_published_in_both_kinds_of_folders() -> None:
    spec, other = read(OCR2), read(OF_CODE)
    assert spec == other
    tower, sam = spec.tower, spec.tower.sam
    assert sam is not None
    assert (sam.hidden_size, sam.num_layers, sam.num_heads, sam.intermediate_size, sam.window) == (768, 12, 12, 3072, 14)
    assert (sam.full, sam.positions, sam.neck, sam.middle, sam.queries) == ((2, 5, 8, 11), 64 * 64, 256, 512, (144, 256))
    assert (tower.num_stages, tower.cell, tower.out_size, tower.theta, tower.key_heads) == (36, 64, 1280, 1e6, 2)
    assert (spec.size.tile, spec.size.longest_side, spec.size.least_tiles, spec.size.most_tiles) == (768, 1024, 2, 6)
    assert (spec.least_tokens, most_rows(spec), most_tokens(spec)) == (257, 257, 257 + 6 * 144)
    texts = [spec_from_hf(config, hf_family(config)) for config in (OCR2, OF_CODE)]
    assert texts[0] == texts[1]
    assert [isinstance(block.mlp, MoESpec) for block in texts[0].blocks] == [False] + [True] * 11
    assert texts[0].attention.latent is None


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_a_page_is_cut_as_transformers_does_it(height: int, width: int, most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    spec = read(OCR2)
    found = fitted(spec.size, height, width)
    columns, rows = get_optimal_tiled_canvas((height, width), (768, 768), 2, 6)
    assert found.pieces == ((rows * 768, columns * 768) if max(height, width) > 768 else None)
    assert max(found.whole) == 1024
    limited = fitted(spec.limited(most).size, height, width)
    pieces = 0 if limited.pieces is None else limited.pieces[0] * limited.pieces[1] // 768**2
    assert 257 + 144 * pieces <= max(most, 257)


@pytest.mark.parametrize("shape", [(61, 97), (97, 61), (47, 48), (300, 30), (20, 20)])
def test_pixels_and_tokens_are_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    size: Any = {"size": {"height": 64, "width": 64}, "tile_size": 48}
    processor: Any = DeepseekOcr2ImageProcessorPil(**size, do_rescale=False, do_normalize=False)
    theirs = processor(images=[picture])
    vision = MODELS["deepseek-ocr2"].to_dict()["vision_config"]
    spec = read(OCR2 | {"vision_config": vision})
    ours = read_image(saved(picture, "PNG"), spec, "it")
    expected = [*theirs.get("pixel_values_local", []), *theirs["pixel_values"]]
    assert [image.pixels for image in ours.images] == [each.astype(np.uint8).transpose(1, 2, 0).tobytes() for each in expected]
    names: Any = DeepseekOcr2Processor.__new__(DeepseekOcr2Processor)
    names.image_token, names.patch_size, names.downsample_ratio, names.image_processor = "<image>", 1, 4, processor
    assert spec.num_tokens(ours) == names.replace_image_token(theirs, 0).count("<image>")
    assert spec.tokens.text(ours) == "<image>" * len(ours.images)


WORDS = ["<image>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|end|>"
)


def test_a_chat_about_a_page_is_transformers_and_steps_change_no_bit(tmp_path: Path) -> None:
    config = type(MODELS["deepseek-ocr2"]).from_dict(MODELS["deepseek-ocr2"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[1], chat_template=TEMPLATE)
    picture = pillow.fromarray(colours(40, 90, 3))
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    said = [{"role": "user", "content": [url, {"type": "text", "text": "Free OCR."}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=200)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    size: Any = {"size": {"height": 64, "width": 64}, "tile_size": 48}
    seen = DeepseekOcr2ImageProcessorPil(**size)(images=[picture], return_tensors="pt")
    ids = [*[256] * (2 * 144 + 257), *b"\nFree OCR.", 257]
    assert list(prompt) == ids
    given = {key: seen[key] for key in ("pixel_values", "pixel_values_local", "num_local_patches")}
    answer = model.generate(torch.tensor([ids]), **given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    worker = worker_for(folder, dtype="float32")
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    assert vision is not None
    requests = [(prompt_with(vision, [3, an_image(vision, *sides), 4], 256), greedy(8, logprobs=0)) for sides in ((1, 2), (2, 1))]
    alone = [logprobs_of(run(engine_for(worker), [request])[0]) for request in requests]
    for most in 23, 512:
        assert [logprobs_of(each) for each in run(engine_for(worker, max_num_batched_tokens=most), requests)] == alone
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match="patches of 1"):
        tower_file(checkpoint, "f32", "m")  # of which llama.cpp asks no file


def test_converted_it_sees_as_its_folder_does(tmp_path: Path) -> None:
    """llama.cpp reads the same file, and makes the same of it, where it stretches no positions."""
    values = MODELS["deepseek-ocr2"].to_dict()
    sam = values["vision_config"]["sam_config"]
    sam |= {"patch_size": 16, "image_size": 1024, "num_hidden_layers": 3, "global_attn_indexes": [2]}
    values["vision_config"]["encoder_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    model = random_model(type(MODELS["deepseek-ocr2"]).from_dict(values), auto=AutoModelForImageTextToText)
    folder = with_merges(save(model, tmp_path / "folder"), WORDS[:1])
    check_it_sees_as_its_folder_does(folder, tmp_path / "m-F32.gguf")
    with open_checkpoint(folder) as checkpoint:
        made = tower_file(checkpoint, "bf16", "m")
    assert made is not None
    types = {step.name: step.after for step in made.steps}
    full = "v.view_seperator", "v.resample_query_768.weight", "v.sam.pos_embd.weight", "v.sam.net_2.weight"
    assert {types[name] for name in full} == {"F32"}, "of other types llama.cpp makes nothing, and ends"
    assert types["mm.model.fc.weight"] == "BF16"


@pytest.mark.parametrize(("rope", "heads", "words"), [
    ({"rope_theta": 5e4}, 6, "positions with another base"), ({"rope_theta": 1e4}, 3, "shared heads of keys"),
])  # fmt: skip
def test_what_no_file_can_say_of_its_texts(rope: dict[str, Any], heads: int, words: str) -> None:
    own = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": heads}
    config = OCR2 | {"text_config": OCR2["text_config"] | own | {"rope_parameters": rope | {"rope_type": "default"}}}
    spec = spec_from_hf(config, hf_family(config))
    keys = hf_family(config).gguf_keys
    assert keys is not None
    with pytest.raises(UnsupportedError, match=words):
        keys(spec)


def test_images_of_other_sizes_are_refused() -> None:
    spec = read(OCR2)
    for side, fits in ((768, True), (1024, True), (64, False)):
        image = Image.of(side, side, bytes(3 * side * side))
        assert spec.fits([spec.placed(image, 2)], 300) is fits
    assert not spec.fits([spec.placed(Image.of(1024, 768, bytes(3 * 1024 * 768)), 2)], 300)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"use_rel_pos": False}), {}, "use_rel_pos 'False'"),
    (changed({"hidden_act": "silu"}), {}, "hidden_act 'silu'"),
    (changed({}, use_sliding_window=True), {}, "windows of what looks at images"),
    (OCR2, {"background_color": [0, 0, 0]}, r"background_color \[0, 0, 0\]"),
    (OCR2, {"do_normalize": False}, "do_normalize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


def test_latent_attention_is_refused() -> None:
    config = OF_CODE | {"use_mla": True}
    with pytest.raises(UnsupportedError, match="latent attention of a DeepSeek-OCR"):
        spec_from_hf(config, hf_family(config))


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"downsample_channels": [512, 1024]}), {}, "two numbers, the second of them 896"),
    (changed({"downsample_channels": ["a", 896]}), {}, "'downsample_channels' must be"),
    (changed({"num_attention_heads": 7}), {}, "7 heads can't share 768"),
    (changed({}, num_key_value_heads=3), {}, "14 heads can't share 3 of keys"),
    (changed({"image_size": 512}), {}, r"squares of 768 and 1024 pixels, not of 768 and \[512, 1024\]"),
    (OCR2, {"tile_size": 640}, "not of 640"),
    (OCR2, {"min_patches": 7}, "7 to 6 pieces"),
    (OCR2, {"max_patches": 1 << 20}, "are not believed"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
