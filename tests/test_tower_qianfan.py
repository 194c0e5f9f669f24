"""Qianfan-OCR: its config as published, a conversation as transformers' processor writes it, folders as transformers saves them
and with the names that they were published with, files, what is refused. Rows, steps: test_towers.py, test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as pillow
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_vision import MODELS

QIANFAN: dict[str, Any] = {
    "architectures": ["QianfanOCRForConditionalGeneration"], "downsample_ratio": 0.5, "image_token_id": 151671,
    "model_type": "qianfan_ocr", "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "text_config": {
        "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 153678,
    },
    "vision_config": {
        "hidden_act": "gelu", "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096, "layer_norm_eps": 1e-6,
        "model_type": "qianfan_ocr_vision", "norm_type": "layer_norm", "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14, "drop_path_rate": 0.1,
    },
}  # fmt: skip
"""A config of a Qianfan-OCR of 4B, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "crop_to_patches": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "max_patches": 12, "min_patches": 1,
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3, "size": {"height": 448, "width": 448},
}  # fmt: skip
WORDS = ["<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<image>\n' }}{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return QIANFAN | own | {"vision_config": QIANFAN["vision_config"] | vision}


def test_it_is_as_published() -> None:
    spec = read(QIANFAN, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1024, 24, 16, 4096)
    assert (tower.out_size, tower.projector_size, tower.cell, tower.positions, tower.qkv_bias) == (2560, 2560, 28, 1024, True)
    assert (spec.size.kind, spec.size.tile, spec.size.least_tiles, spec.size.most_tiles) == ("canvas", 448, 1, 12)
    assert (spec.tokens.marker, spec.tokens.token, spec.least_tokens) == ("<image>", "<IMG_CONTEXT>", 256)
    assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert not read(changed({"attention_bias": False})).tower.qkv_bias
    text = spec_from_hf(QIANFAN, hf_family(QIANFAN))
    assert (text.num_layers, text.attention.num_kv_heads, text.attention.head_dim, text.tied_head) == (36, 8, 128, False)


def their_prompt(picture: Any, text: str) -> str:
    processor: Any = QianfanOCRProcessor.__new__(QianfanOCRProcessor)
    processor.start_image_token, processor.image_token, processor.end_image_token = "<img>", "<IMG_CONTEXT>", "</img>"
    processor.image_placeholder_token, processor.image_seq_length = "<image>", 16
    seen = GotOcr2ImageProcessorPil(**settings())(images=[picture])
    (told,), _ = processor.get_text_with_replacements([text], [processor.replace_image_token(seen, 0)])
    return str(told)


def settings() -> Any:
    return IMAGES | {"size": {"height": 32, "width": 32}, "max_patches": 4}


@pytest.fixture(scope="module")
def qianfan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = type(MODELS["qianfan-ocr"]).from_dict(MODELS["qianfan-ocr"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings()))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[4], chat_template=TEMPLATE)
    return model, folder


def as_published(folder: Path, output: Path) -> Path:
    """transformers writes a text's layers under another name than it was published with."""
    output.mkdir()
    for file in folder.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("language_model.model.encoder.", "language_model.model."): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, output / "model.safetensors", {"format": "pt"})
    return output


@pytest.mark.parametrize("is_published", [True, False])
def test_an_answer_about_a_page_is_transformers(is_published: bool, qianfan: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = qianfan
    picture = pillow.fromarray(colours(90, 60, 3))
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    said = [{"role": "user", "content": [url, {"type": "text", "text": "What is <image> and <IMG_CONTEXT>?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    path = as_published(folder, tmp_path / "published") if is_published else folder
    with LLM(path, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=40)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    asked = "What is <IMAGE> and <CONTEXT>?"  # a message's own are texts
    text = their_prompt(picture, f"<|im_start|>user\n<image>\n{asked}<|im_end|>\n<|im_start|>assistant\n")
    for place, word in enumerate(WORDS):
        text = text.replace(word, chr(0xE000 + place))
    text = text.replace("<IMAGE>", "<image>").replace("<CONTEXT>", "<IMG_CONTEXT>")
    ids = [256 + ord(each) - 0xE000 if each >= "\ue000" else ord(each) for each in text]
    assert list(prompt) == ids
    assert ids.count(256) > 16
    seen = GotOcr2ImageProcessorPil(**settings())(images=[picture], return_tensors="pt")["pixel_values"]
    answer = model.generate(
        torch.tensor([ids]), pixel_values=seen, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_converted_it_sees_as_its_folder_does(qianfan: tuple[Any, Path], tmp_path: Path) -> None:
    folder = with_merges(as_published(qianfan[1], tmp_path / "folder"), WORDS[:3])
    check_it_sees_as_its_folder_does(folder, tmp_path / "m-F32.gguf")


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({"model_type": "internvl_vision"}), {}, UnsupportedError, "a tower of the kind 'internvl_vision'"),
    (changed({"use_qk_norm": True}), {}, UnsupportedError, "use_qk_norm 'True'"),
    (changed({}, vision_feature_layer=-2), {}, UnsupportedError, "vision_feature_layer '-2'"),
    (QIANFAN | {"text_config": {"model_type": "mamba", "hidden_size": 8}}, {}, UnsupportedError, "unknown architecture 'mamba'"),
    (changed({"attention_bias": "yes"}), {}, CheckpointError, "'attention_bias' must be true or false"),
    (changed({"image_size": 442}), {}, CheckpointError, "images of 442 x 442 pixels don't divide"),
    (QIANFAN, {"max_patches": 1 << 20}, CheckpointError, "are not believed"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
