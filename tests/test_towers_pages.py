"""Models that read pages: LightOnOCR, PaddleOCR-VL, GLM-OCR, GLMs that see. Their folders as published, sizes of images against
transformers', and what `convert` makes of them. Rows and answers: test_towers.py, test_vision.py, test_mmproj.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PixtralVisionConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as of_glm
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as of_paddle
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.sizes import fitted
from nanovllm_cli.images.source import data_url
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.towers import tower_family
from nanovllm_cli.vision_spec import VisionSpec
from seeing import png
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_vision import MODELS, parts_of, prompt_with

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
LIGHTON_OCR = {
    "architectures": ["LightOnOCRForConditionalGeneration"], "image_token_id": 151655, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    "text_config": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "model_type": "qwen3", "rms_norm_eps": 1e-06},
    "vision_config": {"attention_dropout": 0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
                      "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3,
                      "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000},
}  # fmt: skip
"""config.json of lightonai/LightOnOCR-1B-1025, in so far as it is of what sees."""
LIGHTON_IMAGES = CLIP | {
    "crop_size": None, "default_to_square": True, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True,
    "do_pad": None, "do_rescale": True, "do_resize": True, "image_processor_type": "PixtralImageProcessorFast", "patch_size": 14,
    "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
}  # fmt: skip
GLM_OCR: dict[str, Any] = {"architectures": ["GlmOcrForConditionalGeneration"], "text_config": {"hidden_size": 1536}}
GLM_4_1V: dict[str, Any] = {"architectures": ["Glm4vForConditionalGeneration"], "text_config": {"hidden_size": 4096}}
PADDLE: dict[str, Any] = {"architectures": ["PaddleOCRVLForConditionalGeneration"], "hidden_size": 1024}
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 5000))
PAGES = ["glm4v", "glm4v, 2 of 5 experts", "glm-ocr", "paddleocr-vl", "lighton-ocr"]
WORDS = {
    "glm": ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|user|>", "<|assistant|>"],
    "pad": ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
    "lig": ["<|image_pad|>", "<|im_start|>", "<|im_end|>"],
}


def spec_of(config: dict[str, Any], images: dict[str, Any] | None = None, **vision: Any) -> VisionSpec:
    config = {"vision_config": {}, **config}
    config = config | {"vision_config": config["vision_config"] | vision}
    family = tower_family(config)
    assert family is not None
    return family.read(ConfigReader(config, "config.json"), ConfigReader(images or {}, "preprocessor_config.json"))


def test_a_lighton_ocr_as_published() -> None:
    spec = spec_of(LIGHTON_OCR, LIGHTON_IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1024, 24, 16, 4096)
    assert (tower.out_size, tower.eps, tower.projector_eps, tower.cell) == (1024, 1e-5, 1e-6, 28)
    assert (spec.tokens.marker, spec.tokens.token, spec.tokens.line_end) == ("<|image_pad|>", "<|image_pad|>", "")
    assert (spec.has_grid, spec.whole) == (False, False)
    silent = {key: value for key, value in LIGHTON_OCR["vision_config"].items() if key != "hidden_act"}
    assert tower.activation == "silu"
    assert spec_of(LIGHTON_OCR | {"vision_config": silent}).tower.activation == PixtralVisionConfig().hidden_act == "gelu"
    a4 = fitted(spec.size, 1540, 1089)
    assert a4.whole == (1540, 1092)
    assert np.prod(a4.whole) // 28**2 == 55 * 39


@pytest.mark.parametrize(("config", "limits"), [(GLM_4_1V, (12544, 47040000)), (GLM_OCR, (12544, 9633792))])
@given(SIDES, SIDES)
@settings(max_examples=300, deadline=None)
def test_sizes_of_a_glms_images(config: dict[str, Any], limits: tuple[int, int], height: int, width: int) -> None:
    least, most = limits
    rule = spec_of(config, {"size": {"shortest_edge": least, "longest_edge": most}}).size
    if max(height, width) <= 150 * min(height, width):
        assert fitted(rule, height, width).whole == of_glm(2, height, width, min_pixels=least, max_pixels=most)


def test_a_glms_counts_of_pixels_are_those_of_its_size() -> None:
    settings = {"size": {"shortest_edge": 784, "longest_edge": 28 * 28 * 40}, "max_pixels": 7840, "min_pixels": 23520}
    image = np.zeros((280, 280, 3), np.uint8)
    grid = Glm4vImageProcessorPil(**settings)(images=[image], return_tensors="np")["image_grid_thw"]
    height, width = fitted(spec_of(GLM_4_1V, settings).size, 280, 280).whole
    assert (height // 14, width // 14) == tuple(grid[0, 1:])


@given(SIDES, SIDES)
@example(24, 33)
@example(8, 31)
@example(5, 7)
@settings(max_examples=300, deadline=None)
def test_sizes_of_a_paddleocrs_images(height: int, width: int) -> None:
    """Of small ones a half is rounded to what is even."""
    rule = spec_of(PADDLE, {"min_pixels": 147384, "max_pixels": 2822400}).size
    if max(height, width) <= 150 * min(height, width):
        assert fitted(rule, height, width).whole == of_paddle(height, width, 28, 147384, 2822400)


@given(SIDES, SIDES)
@settings(max_examples=300, deadline=None)
def test_sizes_of_a_lighton_ocrs_images(height: int, width: int) -> None:
    """As transformers has them for whole tokens, not patches."""
    wanted = get_resize_output_image_size(torch.empty(3, height, width), 1540, 28)
    found = fitted(spec_of(LIGHTON_OCR, LIGHTON_IMAGES).size, height, width).whole
    assert found == (max(28, wanted[0]), max(28, wanted[1]))


@pytest.mark.parametrize(("config", "vision", "words"), [
    (GLM_4_1V, {"attention_bias": True}, "attention_bias true is not supported"),
    (GLM_4_1V, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    (GLM_4_1V, {"rope_parameters": {"rope_type": "yarn"}}, "of the type 'yarn'"),
    (GLM_4_1V, {"in_channels": 1}, "other than three colours"),
    (LIGHTON_OCR, {"model_type": "siglip"}, "a tower of the kind 'siglip'"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], vision: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        spec_of(config, **vision)


@pytest.mark.parametrize(("config", "vision", "words"), [
    (GLM_4_1V, {"out_hidden_size": 2048}, "rows of 2048 numbers for a decoder of 4096"),
    (GLM_4_1V, {"image_size": 13}, "images of 13 x 13 pixels in patches of 14"),
    (GLM_4_1V, {"image_size": 1 << 20}, "are not believed"),
    (GLM_4_1V, {"depth": 1 << 20}, "at most 1024 are believed"),
    (GLM_OCR, {"num_heads": 15}, "15 heads can't share 1024"),
    (GLM_OCR, {"spatial_merge_size": 0}, "'spatial_merge_size' must be"),
    (PADDLE, {"image_size": 7}, "images of 7 x 7 pixels"),
    (PADDLE, {"hidden_size": 1150}, "can't share 1150"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], vision: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        spec_of(config, **vision)


@pytest.mark.parametrize(("key", "said"), [("patch_size", 16), ("merge_size", 1), ("temporal_patch_size", 1)])
def test_an_image_processor_is_of_the_same_tower(key: str, said: int) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}' is {said}, and the tower's"):
        spec_of(GLM_4_1V, {key: said})


def test_no_pixels_for_a_frame_are_no_image() -> None:
    with pytest.raises(CheckpointError, match="images of 1 to 1 pixels"):
        spec_of(GLM_4_1V, {"size": {"shortest_edge": 1, "longest_edge": 1}})


def a_folder(name: str, folder: Path) -> tuple[Path, Any]:
    """With the tokenizer of the bundled model, which has the family's tokens as well."""
    config = MODELS[name]
    told = config.to_dict()
    told["vision_config"] |= {"num_hidden_layers": 3} if name == "lighton-ocr" else {}
    told["text_config"] |= {"rms_norm_eps": 1e-6} if name == "lighton-ocr" else {}
    model = random_model(type(config)(**told), auto=AutoModelForImageTextToText)
    sizes = {"longest_edge": 64} if name == "lighton-ocr" else {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": sizes}))
    return with_merges(folder, WORDS[name[:3]]), model.config


@pytest.mark.parametrize("name", PAGES)
def test_converted_it_reads_images_as_its_folder_does(name: str, tmp_path: Path) -> None:
    """GLMs have rotary pairs side by side in folders and as halves in files."""
    folder, _ = a_folder(name, tmp_path / "folder")
    check_it_sees_as_its_folder_does(folder, tmp_path / "m-F32.gguf")


def test_a_page_is_read_by_the_models_own_template(tmp_path: Path) -> None:
    """The template of GLM-OCR in short."""
    folder, _ = a_folder("glm-ocr", tmp_path)
    template = (
        "[gMASK]{% for m in messages %}<|user|>\n{% for part in m.content %}{% if part.type == 'image' %}<|begin_of_image|>"
        "<|image|><|end_of_image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}<|assistant|>\n"
    )
    (folder / "chat_template.jinja").write_text(template)
    content = [{"type": "image_url", "image_url": {"url": data_url(png(32, 24))}}, {"type": "text", "text": "Text Recognition:"}]
    llm = LLM(folder, config=EngineConfig(threads=2, num_blocks=64, dtype="float32"))
    try:
        (output,) = llm.chat([[{"role": "user", "content": content}]], SamplingParams(max_tokens=4, temperature=0))
        ids = list(output.prompt_token_ids)
        image, first, last = (llm.tokenizer.control_tokens[word] for word in WORDS["glm"][:3])
        assert ids.count(image) == 4 * 3
        assert ids[ids.index(image) - 1] == first
        assert ids[ids.index(image) + 12] == last
    finally:
        llm.close()


@pytest.mark.parametrize("published", [False, True])
def test_the_layer_that_guesses_further_is_left_aside(published: bool, tmp_path: Path) -> None:
    """GLM-OCR has one behind its own."""
    model = random_model(MODELS["glm-ocr"], auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layers = model.config.text_config.num_hidden_layers
    own = {name: tensor for name, tensor in tensors.items() if f".layers.{layers - 1}." in name and "language_model" in name}
    assert own
    further = {name.replace(f".layers.{layers - 1}.", f".layers.{layers}."): tensor.clone() for name, tensor in own.items()}
    further[f"model.language_model.layers.{layers}.eh_proj.weight"] = torch.ones(48, 96)
    save_file(tensors | further, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_nextn_predict_layers": 1} if published else {}
    (folder / "config.json").write_text(json.dumps(config))
    if not published:
        with pytest.raises(CheckpointError, match="not part of"):
            worker_for(folder, dtype="float32")
        return
    worker = worker_for(folder, dtype="float32")
    (output,) = run(engine_for(worker), [([5, 6, 7], greedy(5))])
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, *output.outputs[0].token_ids]])).logits[0, 2:-1]
    assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()


def test_a_paddleocr_vl_as_published(tmp_path: Path) -> None:
    """A config in one piece, with the tower's head and positions that nothing reads."""
    model = random_model(MODELS["paddleocr-vl"], auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} >= {"mlp_AR", "visual", "model"}
    unread = {"visual.vision_model.head.probe": torch.ones(1, 1, 32), "visual.vision_model.head.mlp.fc1.bias": torch.ones(4),
              "visual.vision_model.embeddings.packing_position_embedding.weight": torch.ones(64, 32)}  # fmt: skip
    save_file(tensors | unread, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"rope_type": "default", "type": "default", "mrope_section": rope["mrope_section"]}
    own = {"architectures": config["architectures"], "model_type": "paddleocr_vl"}
    flat = text | config | own | {"rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(flat))
    worker = worker_for(folder, dtype="float32")
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    prompt = prompt_with(vision, parts_of(vision), 512)
    (found,) = run(engine_for(worker), [(prompt, greedy(8))])
    (tmp_path / "saved").mkdir()
    reference = worker_for(save(model, tmp_path / "saved"), dtype="float32")
    (wanted,) = run(engine_for(reference), [(prompt, greedy(8))])
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
