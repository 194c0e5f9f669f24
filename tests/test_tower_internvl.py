"""InternVL: as published, sizes of its images against transformers', what stands for them with the model's own template and with
one that knows nothing of images. Rows, answers, files: test_towers.py, test_vision.py, test_mmproj.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, data_url
from nanovllm_cli.errors import CheckpointError, TemplateError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_tokens
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import VisionSpec
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.mmproj import check_mmproj, open_mmproj, read_mmproj
from nanovllm_cli.weights.vision import read_vision
from quantizing import quantize
from seeing import png
from test_convert import TINY
from test_image_pieces import read
from test_images import colours, saved, seeing
from test_remote_families import internlm2
from test_towers import make
from test_towers_pages import CLIP as CLIP_COLOURS
from test_vision import MODELS, logprobs_of
from towers_gguf import write_mmproj

INTERNVL3_1B: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
    "image_token_id": 151667, "model_type": "internvl", "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "text_config": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "model_type": "qwen2"},
    "vision_config": {
        "architectures": ["InternVisionModel"], "attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024,
        "image_size": [448, 448], "intermediate_size": 4096, "layer_norm_eps": 1e-06, "model_type": "internvl_vision",
        "norm_type": "layer_norm", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
        "patch_size": [14, 14], "use_absolute_position_embeddings": True, "use_mask_token": False, "use_mean_pooling": True,
        "use_qk_norm": False,
    },
}  # fmt: skip
"""config.json of OpenGVLab/InternVL3-1B-hf, in so far as it is of what sees."""
IMAGES: dict[str, Any] = {
    "crop_to_patches": False, "do_normalize": True, "do_rescale": True, "do_resize": True, "max_patches": 12, "min_patches": 1,
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3, "size": {"height": 448, "width": 448},
}  # fmt: skip
CANVAS = SizeRule("canvas", 28, tile=448, least_tiles=1, most_tiles=12)
TEMPLATES = {
    "its own": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}<|im_start|>assistant\n"
    ),
    "of texts": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "<|im_start|>assistant\n"
    ),
}
OLD_NAMES = {
    r"encoder\.layer\.": "encoder.layers.", r"cls_token": "class_embedding", r"position_embeddings": "position_embedding",
    r"patch_embeddings\.projection": "patch_embedding", r"lambda_(\d)": r"ls\1", r"attention\.projection_layer": "attn.proj",
    r"attention\.": "attn.", r"layernorm_before": "norm1", r"layernorm_after": "norm2",
    r"multi_modal_projector\.layer_norm": "mlp1.0", r"multi_modal_projector\.linear_1": "mlp1.1",
    r"multi_modal_projector\.linear_2": "mlp1.3",
}  # fmt: skip
WORDS = ["<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"]


def changed(vision: dict[str, Any], **config: Any) -> dict[str, Any]:
    return INTERNVL3_1B | config | {"vision_config": INTERNVL3_1B["vision_config"] | vision}


def test_an_internvl3_as_published() -> None:
    spec = read(INTERNVL3_1B, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1024, 24, 16, 4096)
    assert (tower.out_size, tower.eps, tower.projector_eps, tower.cell, tower.positions) == (896, 1e-6, 1e-5, 28, 1024)
    assert (spec.size, spec.least_tokens) == (CANVAS, 256)
    assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(("kind", "name"), [
    ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"), ("llama", "LlamaForCausalLM"), (None, "Qwen2ForCausalLM"),
])  # fmt: skip
def test_what_writes_texts_is_of_several_families(kind: str | None, name: str) -> None:
    config = INTERNVL3_1B | {"text_config": {"hidden_size": 8} | ({"model_type": kind} if kind else {})}
    assert hf_family(config) is hf_family({"architectures": [name]})


def test_what_writes_texts_may_be_unknown() -> None:
    with pytest.raises(UnsupportedError, match="internlm2"):
        hf_family(INTERNVL3_1B | {"text_config": {"model_type": "internlm2"}})


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 4), st.integers(0, 12))
@settings(max_examples=500, deadline=None)
def test_pieces_are_those_of_transformers(height: int, width: int, least: int, more: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    rule = replace(CANVAS, least_tiles=least, most_tiles=least + more)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, least + more)
    found = fitted(rule, height, width)
    assert found.whole == (448, 448)
    assert found.pieces == ((rows * 448, columns * 448) if rows * columns > 1 else None)
    spec = replace(seeing(rule), size=rule)
    assert (1 + rows * columns) * 448**2 // spec.tower.cell**2 <= most_tokens(spec) or rows * columns == 1


@pytest.mark.parametrize(("height", "width", "rows", "columns"), [(900, 450, 2, 1), (448, 1344, 1, 3), (300, 300, 0, 0)])
def test_pixels_of_pieces_and_of_all_of_it(height: int, width: int, rows: int, columns: int) -> None:
    picture = pillow.fromarray(colours(height, width, 3))
    found = read_image(saved(picture, "PNG"), seeing(replace(CANVAS, resample="bicubic")), "it")
    assert (found.rows, found.columns) == (rows, columns)
    large = picture.resize((columns * 448, rows * 448), pillow.Resampling.BICUBIC) if rows else None
    for place, image in enumerate(found.images[:-1]):
        row, column = divmod(place, columns)
        assert large is not None
        assert image.pixels == large.crop((column * 448, row * 448, column * 448 + 448, row * 448 + 448)).tobytes()
    assert found.images[-1].pixels == picture.resize((448, 448), pillow.Resampling.BICUBIC).tobytes()


@pytest.mark.parametrize(("most", "tiles"), [(256, 1), (512, 1), (768, 2), (256 * 13, 12), (10**6, 12)])
def test_fewer_pieces_where_there_is_room_for_fewer_tokens(most: int, tiles: int) -> None:
    limited = read(INTERNVL3_1B, IMAGES).limited(most)
    assert limited.size.most_tiles == tiles


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"use_qk_norm": True}), {}, "use_qk_norm 'True' is not supported"),
    (changed({"use_absolute_position_embeddings": False}), {}, "use_absolute_position_embeddings"),
    (changed({"use_mean_pooling": False}), {}, "use_mean_pooling"),
    (changed({}, vision_feature_layer=-2), {}, "vision_feature_layer '-2'"),
    (changed({}, projector_hidden_act="relu"), {}, "projector_hidden_act 'relu'"),
    (changed({}, vision_feature_select_strategy="full"), {}, "vision_feature_select_strategy 'full'"),
    (changed({"norm_type": "batch_norm"}), {}, "norm_type 'batch_norm'"),
    (changed({"image_size": [448, 224]}), {}, "'image_size' other than of a square"),
    (changed({"patch_size": [14]}), {}, "'patch_size' other than of a square"),
    (changed({"model_type": "siglip"}), {}, "a tower of the kind 'siglip'"),
    (changed({}), {"do_normalize": False}, "do_normalize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"image_size": 442}), {}, "images of 442 x 442 pixels don't divide"),
    (changed({}, downsample_ratio=0.3), {}, "'downsample_ratio' must be one whole number's part"),
    (changed({}, downsample_ratio=0.001), {}, "'downsample_ratio' must be"),
    (changed({}, downsample_ratio=2), {}, "'downsample_ratio' must be"),
    (changed({"num_hidden_layers": 100_000}), {}, "asks for 100000 layers"),
    (changed({"image_size": 1 << 20}), {}, "pixels"),
    (changed({}), {"size": {"height": 224, "width": 224}}, r"pieces of 448 x 448 pixels, not \[224\]"),
    (changed({}), {"min_patches": 5, "max_patches": 4}, "5 to 4 pieces"),
    (changed({}), {"max_patches": 100_000}, "1 to 100000 pieces"),
    (changed({"image_size": ["a", "b"]}), {}, "image_size"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


def model_of(template: str, folder: Path, text: dict[str, Any] | None = None) -> Path:
    """With a tokenizer that a GGUF file can hold."""
    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens(WORDS)
    config = MODELS["internvl"].to_dict()
    config["image_token_id"] = backend.token_to_id("<IMG_CONTEXT>")
    config["text_config"] |= {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 1024}
    config["text_config"] |= text or {}
    save(random_model(type(MODELS["internvl"])(**config), auto=AutoModelForImageTextToText), folder)
    backend.save(str(folder / "tokenizer.json"))
    told = json.loads((TINY / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATES[template]}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}, "max_patches": 4}))
    return folder


def asked(path: Path) -> tuple[list[int], list[int], list[float], list[int]]:
    """About an image of two pieces, of all of which 16 tokens tell: the prompt, the answer, and the ids of WORDS."""
    image = {"type": "image_url", "image_url": {"url": data_url(png(64, 32))}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "What is <IMG_CONTEXT> this?"}]}]
    with LLM(path, config=EngineConfig(threads=2, dtype="float32", num_blocks=32)) as llm:
        words = [llm.tokenizer.control_tokens[word] for word in WORDS]
        (answer,) = llm.chat(said, greedy(6, logprobs=0))
        return list(answer.prompt_token_ids), list(answer.outputs[0].token_ids), logprobs_of(answer), words


def test_a_model_and_what_is_made_of_it_answer_alike_by_either_template(tmp_path: Path) -> None:
    found = []
    for template in TEMPLATES:
        folder, output = model_of(template, tmp_path / template), tmp_path / f"{template}.gguf"
        with open_checkpoint(folder) as checkpoint:
            plan = convert.plan(checkpoint, "gguf", "f32")
            assert plan.tower is not None
            convert.write(checkpoint, plan, output)
            mmproj = plan.tower.write(output, replace=True, progress=NullProgress()).path
        found += [asked(folder), asked(output)]
        mmproj.unlink()
    prompt, tokens, logprobs, (context, first, last, *_) = found[0]
    start = prompt.index(first)
    assert prompt[start : start + 3 * 16 + 2] == [first, *[context] * 48, last]
    assert prompt.count(context) == 48
    for each in found[1:]:
        assert each[:2] == (prompt, tokens)
        assert each[2] == pytest.approx(logprobs, abs=1e-3)


def as_first_published(folder: Path, output: Path, text: str = "Qwen3ForCausalLM") -> Path:
    """The same model as a folder with code of its own, by the names that transformers' converter changes (its
    convert_internvl_weights_to_hf.py)."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = name.removeprefix("model.").removeprefix("vision_tower.")
        if "lm_head" in name or "language_model" in name:
            tensors[name if name.startswith("language_model.") else f"language_model.{theirs}"] = tensor
            continue
        for ours, old in OLD_NAMES.items():
            theirs = re.sub(ours, old, theirs)
        tensors[theirs if theirs.startswith("mlp1") else f"vision_model.{theirs}"] = tensor
    for layer in sorted({name.split(".")[3] for name in tensors if ".attn.q_proj." in name}):
        for kind in "weight", "bias":
            parts = [f"vision_model.encoder.layers.{layer}.attn.{part}_proj.{kind}" for part in "qkv"]
            if parts[0] in tensors:
                tensors[f"vision_model.encoder.layers.{layer}.attn.qkv.{kind}"] = torch.cat([tensors.pop(part) for part in parts])
    output.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    kept = {key: vision[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                                         "norm_type", "layer_norm_eps", "hidden_act")}  # fmt: skip
    chat = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5, "ps_version": "v2",
        "llm_config": config["text_config"] | {"architectures": [text]}, "dynamic_image_size": True, "max_dynamic_patch": 4,
        "min_dynamic_patch": 1, "select_layer": -1, "use_thumbnail": True, "tie_word_embeddings": True,
        "force_image_size": vision["image_size"][0],
        "vision_config": kept | {"image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0],
                                 "qkv_bias": vision["attention_bias"], "qk_normalization": False},
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps(chat))
    (output / "preprocessor_config.json").write_text(json.dumps(CLIP_COLOURS | {"size": 448, "crop_size": 448}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_text((folder / name).read_text())
    return output


def test_folders_with_code_of_their_own_are_the_same_model(tmp_path: Path) -> None:
    folder = model_of("its own", tmp_path / "folder")
    first = as_first_published(model_of("of texts", tmp_path / "of texts"), tmp_path / "first")
    assert asked(first) == asked(folder)
    output = tmp_path / "m.gguf"
    with open_checkpoint(first) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        assert plan.tower is not None
        convert.write(checkpoint, plan, output)
        plan.tower.write(output, replace=True, progress=NullProgress())
    found, wanted = asked(output), asked(folder)
    assert found[:2] == wanted[:2]
    assert found[2] == pytest.approx(wanted[2], abs=1e-3)


def test_an_internlm2_inside_of_one(tmp_path: Path) -> None:
    """Whose queries, keys and values are one tensor, by the heads that its part of the config has."""
    folder = model_of("of texts", tmp_path / "folder", {"model_type": "llama", "head_dim": 8})
    first = as_first_published(folder, tmp_path / "first", "InternLM2ForCausalLM")
    config = json.loads((first / "config.json").read_text())
    config["llm_config"] |= {"model_type": "internlm2", "bias": False}
    (first / "config.json").write_text(json.dumps(config))
    tensors = load_file(first / "model.safetensors")
    own = [name for name in tensors if name.startswith("language_model.")]
    inner = {name.removeprefix("language_model."): tensors.pop(name) for name in own}
    inner = internlm2(inner, config["llm_config"])
    assert any("wqkv" in name for name in inner)
    save_file(tensors | {f"language_model.{name}": tensor for name, tensor in inner.items()}, first / "model.safetensors")
    assert asked(first) == asked(folder)


@pytest.mark.parametrize(("change", "words"), [
    ({"ps_version": "v1"}, "ps_version 'v1'"), ({"select_layer": -4}, "select_layer '-4'"), ({"pad2square": True}, "pad2square"),
    ({"force_image_size": 64}, "positions for another image_size than force_image_size, 64"),
    ({"use_thumbnail": False}, "use_thumbnail"),
    ({"vision_config": {"image_size": 32, "patch_size": 4, "qk_normalization": True}}, "use_qk_norm"),
    ({"llm_config": {"architectures": ["Phi3VForCausalLM"], "hidden_size": 8}}, "unknown architecture"),
])  # fmt: skip
def test_what_such_a_folder_can_not_be(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = as_first_published(model_of("its own", tmp_path / "folder"), tmp_path / "first")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedError, match=words):
        read_vision(checkpoint)


def test_one_piece_where_such_a_folder_makes_no_more() -> None:
    chat = {"architectures": ["InternVLChatModel"], "text_config": {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8},
            "vision_config": {"image_size": 448, "qk_normalization": False}}  # fmt: skip
    spec = read(chat)
    assert (spec.size.most_tiles, spec.tower.norm, spec.tower.hidden_size) == (1, "rms", 3200)
    assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert read(chat | {"dynamic_image_size": True, "use_thumbnail": True}).size.most_tiles == 6


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_experts_inside_of_one(kind: str, is_tied: bool, tmp_path: Path) -> None:
    own = {
        "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    }[kind]  # fmt: skip
    text = SMALL | {"model_type": kind, "num_hidden_layers": 2, "num_experts_per_tok": 2, "pad_token_id": None} | own
    config = MODELS["internvl"].to_dict() | {"text_config": text, "tie_word_embeddings": is_tied}
    model = random_model(type(MODELS["internvl"])(**config), auto=AutoModelForImageTextToText)
    (output,) = run(engine_for(worker_for(save(model, tmp_path), dtype="float32")), [([5, 6, 7, 8], greedy(6))])
    answer = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, *answer]])).logits[0, 3:-1]
    assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize("outer", [None, True])
@pytest.mark.parametrize("has_head", [True, False])
def test_a_config_that_ties_by_default(outer: bool | None, has_head: bool, tmp_path: Path) -> None:
    """transformers' own does, and what it saves again says so; a head that is there counts all the same."""
    folder = model_of("its own", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config | ({} if outer is None else {"tie_word_embeddings": outer})))
    tensors = load_file(folder / "model.safetensors")
    heads = [name for name in tensors if "lm_head" in name]
    assert heads
    if not has_head:
        save_file({name: tensor for name, tensor in tensors.items() if name not in heads}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip
    (output,) = run(engine_for(worker_for(folder, dtype="float32")), [([5, 6, 7, 8], greedy(6))])
    answer = list(output.outputs[0].token_ids)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, *answer]])).logits[0, 3:-1]
    assert answer == logits.argmax(-1).tolist()


def test_a_quantized_folder_has_the_config_that_it_was_published_with(tmp_path: Path) -> None:
    first = as_first_published(model_of("of texts", tmp_path / "folder"), tmp_path / "first")
    quantize("int8", tmp_path / "quantized", first)
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert "text_config" not in config
    assert config["llm_config"] == json.loads((first / "config.json").read_text())["llm_config"]
    assert asked(tmp_path / "quantized")[0] == asked(first)[0]


@pytest.mark.parametrize(("name", "change"), [
    ("v.class_embd", lambda array: np.append(array.reshape(-1), 1)), ("v.class_embd", lambda array: array.reshape(-1)[1:]),
    ("v.position_embd.weight", lambda array: array.reshape(-1, 32).T.copy()),
    ("v.position_embd.weight", lambda array: np.append(array.reshape(-1), 1)),
])  # fmt: skip
def test_a_file_with_other_shapes_is_told_so(name: str, change: Any, tmp_path: Path) -> None:
    folder = make("internvl", tmp_path / "folder").folder

    def changed_shape(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = change(tensors[name]).astype(np.float32)

    with open_mmproj(write_mmproj(folder, tmp_path / "m.gguf", change=changed_shape)) as file:
        spec = read_mmproj(file)
        with pytest.raises(CheckpointError, match=f"of the wrong shape: {name}"):
            check_mmproj(file, spec)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (1, 1, 32)])
def test_a_class_token_may_be_a_batch(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = make("internvl", tmp_path / "folder").folder

    def reshaped(tensors: dict[str, np.ndarray]) -> None:
        tensors["v.class_embd"] = tensors["v.class_embd"].reshape(shape)
        tensors["v.position_embd.weight"] = tensors["v.position_embd.weight"].reshape(-1, 32)

    with open_mmproj(write_mmproj(folder, tmp_path / "m.gguf", change=reshaped)) as file:
        check_mmproj(file, read_mmproj(file))


def test_a_template_that_tells_of_images_but_writes_none_is_refused(tmp_path: Path) -> None:
    folder = model_of("its own", tmp_path)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    without = "{# <IMG_CONTEXT> #}{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": without}))
    with pytest.raises(TemplateError, match="writes 0 places"):
        asked(folder)


def test_a_file_that_does_not_say_how_many_pieces_has_twelve_at_most(tmp_path: Path) -> None:
    folder = make("internvl", tmp_path / "folder").folder
    keys = {"clip.vision.preproc_min_tiles": None, "clip.vision.preproc_max_tiles": None}
    for own, most in (keys, 12), ({}, 6):
        with open_mmproj(write_mmproj(folder, tmp_path / f"{most}.gguf", own)) as file:
            spec = read_mmproj(file).vision
            assert isinstance(spec, VisionSpec)
            assert (spec.size.least_tiles, spec.size.most_tiles) == (1, most)
    assert np.isfinite(spec.mean).all()
