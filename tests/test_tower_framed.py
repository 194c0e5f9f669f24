"""DeepSeek-VL and Janus, VideoLLaMA 3, VipLLaVA and Video-LLaVA: configs as published, pixels as transformers has them, and what
is refused. Rows and answers: test_towers.py, test_vision.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.vision_spec import Picture
from test_image_pieces import read
from test_images import colours, saved

LLAMA = {"model_type": "llama", "hidden_size": 2048}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekVLForConditionalGeneration"], "model_type": "deepseek_vl", "image_token_id": 100015,
    "text_config": LLAMA,
    "vision_config": {"hidden_size": 1024, "image_size": 384, "intermediate_size": 4096, "model_type": "siglip_vision_model",
                      "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 16, "vision_use_head": False,
                      "hidden_act": "gelu"},
}  # fmt: skip
JANUS: dict[str, Any] = {
    "architectures": ["JanusForConditionalGeneration"], "model_type": "janus", "image_token_id": 100581, "text_config": LLAMA,
    "vision_config": {"hidden_size": 1024, "image_size": 384, "model_type": "janus_vision_model", "num_attention_heads": 16,
                      "num_hidden_layers": 24, "patch_size": 16, "projection_dim": 2048, "mlp_ratio": 4.0, "depth": 2,
                      "use_qk_norm": False, "attention_bias": True, "hidden_act": "gelu"},
}  # fmt: skip
SQUARE: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "min_size": 14, "resample": 3, "size": {"height": 384, "width": 384},
}  # fmt: skip
VIDEO_LLAMA: dict[str, Any] = {
    "architectures": ["VideoLlama3ForConditionalGeneration"], "model_type": "video_llama_3", "image_token_id": 151655,
    "text_config": {"model_type": "qwen2", "hidden_size": 1536},
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "video_llama_3_vision", "patch_size": 14,
                      "num_attention_heads": 16, "num_hidden_layers": 27},
}  # fmt: skip
FREE: dict[str, Any] = {
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 1, "patch_size": 14, "temporal_patch_size": 1, "resample": 3,
    "size": {"shortest_edge": 200704, "longest_edge": 3010560},
}  # fmt: skip
CLIP: dict[str, Any] = {
    "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
}  # fmt: skip
VIP: dict[str, Any] = {
    "architectures": ["VipLlavaForConditionalGeneration"], "model_type": "vipllava", "image_token_index": 32000,
    "projector_layernorm_eps": 1e-5, "vision_feature_layers": [-2, -5, -8, -11, 6], "text_config": LLAMA, "vision_config": CLIP,
}  # fmt: skip


def changed(config: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return config | own | {"vision_config": config["vision_config"] | vision}


def test_all_as_published() -> None:
    deepseek, janus = read(DEEPSEEK, SQUARE), read(JANUS, SQUARE)
    for spec in deepseek, janus:
        tower = spec.tower
        assert (tower.hidden_size, tower.num_layers, tower.intermediate_size, tower.out_size, tower.projector_size) == (
            1024, 24, 4096, 2048, 2048,
        )  # fmt: skip
        assert (spec.size.kind, spec.size.around, spec.least_tokens, most_rows(spec)) == ("framed", (127,) * 3, 576, 576)
        assert most_tokens(spec.limited(5)) == 576
    assert [each.tokens.text(Picture((None,)), 0) for each in (deepseek, janus)] == [  # type: ignore[arg-type]
        "<image_placeholder>", "<begin_of_image><image_placeholder><end_of_image>",
    ]  # fmt: skip
    video = read(VIDEO_LLAMA, FREE)
    assert (video.tower.cell, video.tower.theta, video.tower.positions, video.has_grid) == (14, 1e4, 0, False)
    assert (video.size.min_pixels, video.size.max_pixels) == (200704, 3010560)
    vip = read(VIP, {"size": {"shortest_edge": 336}})
    assert (vip.tower.reads, vip.tower.num_layers, vip.tower.projector_eps) == ((23, 20, 17, 14, 6), 23, 1e-5)
    older = {**VIP, "architectures": ["VideoLlavaForConditionalGeneration"], "vision_config": {}}
    plain = read(older)
    assert (plain.size.tile, plain.tower.num_layers, plain.tower.positions) == (224, 23, 256)
    names = [hf_family(each).name for each in (DEEPSEEK, JANUS, VIDEO_LLAMA, VIP)]
    assert names == [hf_family(each | {"vision_config": None}).name for each in (DEEPSEEK, JANUS, VIDEO_LLAMA, VIP)]


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_what_lies_in_a_square_is_as_large_as_transformers_has_it(height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    found = fitted(read(DEEPSEEK, SQUARE).size, height, width)
    scale = 384 / max(height, width)  # as `DeepseekVLImageProcessorPil.resize` has it
    assert (found.whole, found.first) == ((384, 384), (max(round(height * scale), 14), max(round(width * scale), 14)))


@pytest.mark.parametrize("mean", [[0.5] * 3, [0.48145466, 0.4578275, 0.40821073]])
@pytest.mark.parametrize(("height", "width"), [(700, 380), (30, 1111), (200, 200), (5, 900)])
def test_pixels_of_squares_are_those_of_transformers(height: int, width: int, mean: list[float]) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    said = SQUARE | {"image_mean": mean}
    for config, processor in (DEEPSEEK, DeepseekVLImageProcessorPil), (JANUS, JanusImageProcessorPil):
        (found,) = read_image(saved(picture, "PNG"), read(config, said), "it").images
        theirs: Any = processor(**said | {"do_rescale": False, "do_normalize": False})
        (seen,) = theirs(images=[picture])["pixel_values"]
        assert found.pixels == seen.transpose(1, 2, 0).tobytes()


@pytest.mark.parametrize(("height", "width"), [(700, 380), (60, 1111), (200, 200), (1400, 1500)])
def test_pixels_of_any_shape_are_those_of_transformers(height: int, width: int) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    said = FREE | {"size": {"shortest_edge": 20000, "longest_edge": 400000}}
    (found,) = read_image(saved(picture, "PNG"), read(VIDEO_LLAMA, said), "it").images
    theirs: Any = VideoLlama3ImageProcessorPil(**said | {"do_rescale": False, "do_normalize": False})
    seen = theirs(images=[picture], return_tensors="pt")
    _, lines, columns = seen["image_grid_thw"][0].tolist()
    patches = seen["pixel_values"].view(lines, columns, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(lines * 14, columns * 14, 3)
    assert (found.height, found.width) == tuple(patches.shape[:2])
    assert found.pixels == patches.to(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed(DEEPSEEK, {"model_type": "sam_vision_model"}), SQUARE, "a tower of the kind 'sam_vision_model'"),
    (changed(JANUS, {"use_qk_norm": True}), SQUARE, "use_qk_norm 'True'"),
    (changed(JANUS, {"depth": 3}), SQUARE, "depth '3'"),
    (JANUS, SQUARE | {"do_pad": False}, "do_pad false"),
    (changed(VIDEO_LLAMA, {"rope_parameters": {"rope_type": "yarn"}}), FREE, "rotary positions of the type 'yarn'"),
    (changed(VIP, {"model_type": "siglip_vision_model"}), {}, "a tower of the kind 'siglip_vision_model'"),
    (VIP, {"do_pad": True}, "filled up to squares"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed(DEEPSEEK, {"image_size": 390}), SQUARE, "don't divide into patches of 16"),
    (DEEPSEEK, SQUARE | {"size": {"height": 1024, "width": 1024}}, "the tower reads images of 384 x 384"),
    (DEEPSEEK, SQUARE | {"min_size": 400}, "'min_size' is 400"),
    (changed(JANUS, {"projection_dim": 1024}), SQUARE, "rows of 1024 numbers for a decoder of 2048"),
    (changed(JANUS, {"mlp_ratio": -1}), SQUARE, "mlp_ratio"),
    (VIDEO_LLAMA, FREE | {"merge_size": 2}, "'merge_size' is 2, and the tower's 1"),
    (VIDEO_LLAMA, FREE | {"patch_size": 16}, "'patch_size' is 16"),
    (VIP | {"vision_feature_layers": [-2, 99]}, {}, r"'vision_feature_layer' is \[-2, 99\]"),
    (VIP | {"vision_feature_layer": [-2, 30]}, {}, r"'vision_feature_layer' is \[-2, 30\] in a tower of 24 layers"),
    (VIP | {"vision_feature_layer": []}, {}, "'vision_feature_layer'"),
    (VIP | {"vision_feature_layer": [1] * 100_000}, {}, "'vision_feature_layer'"),
    (VIP | {"vision_feature_layer": ["last"]}, {}, "'vision_feature_layer'"),
    (VIP | {"vision_feature_layer": 0}, {}, "'vision_feature_layer'"),
])  # fmt: skip
def test_what_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
