"""dots.ocr and HyperCLOVA X Vision 2: configs as published, a tower's rows held against one written out here in float64, sizes of
images, what is refused. transformers has no dots.ocr; llama.cpp made the same of the same weights, once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.vision_spec import Image, TokenIds
from test_image_pieces import read
from test_images import colours, saved
from test_towers import difference, draw, image, open_tower

DOTS: dict[str, Any] = {
    "architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr", "hidden_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "image_token_id": 151665,
    "vision_config": {
        "embed_dim": 1536, "hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 42, "num_attention_heads": 12,
        "num_channels": 3, "patch_size": 14, "post_norm": True, "rms_norm_eps": 1e-5, "spatial_merge_size": 2,
        "temporal_patch_size": 1, "use_bias": False,
    },
}  # fmt: skip
"""In so far as it is read."""
IMAGES: dict[str, Any] = {
    "min_pixels": 3136, "max_pixels": 11289600, "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
SMALL_TOWER = {"embed_dim": 32, "hidden_size": SMALL["hidden_size"], "intermediate_size": 40, "num_hidden_layers": 3,
               "num_attention_heads": 2, "patch_size": 4, "rms_norm_eps": 1e-3}  # fmt: skip
NAVER: dict[str, Any] = {
    "architectures": ["HyperCLOVAXVisionV2ForConditionalGeneration"], "model_type": "hyperclovax_vision_v2",
    "text_config": {"model_type": "hyperclovax", "hidden_size": 6144},
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
        "intermediate_size": 3456, "model_type": "qwen2_5_vl", "num_heads": 16, "out_hidden_size": 5120, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    },
}  # fmt: skip


def changed(config: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return config | own | {"vision_config": config["vision_config"] | vision}


def tensors_of(vision: dict[str, Any], width: int) -> dict[str, torch.Tensor]:
    """Of a tower, at random, by the names that folders have."""
    hidden, inner, patch, joined = vision["embed_dim"], vision["intermediate_size"], vision["patch_size"], 4 * vision["embed_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.patchifier.proj.weight": (hidden, 3, patch, patch), "patch_embed.patchifier.proj.bias": (hidden,),
        "patch_embed.patchifier.norm.weight": (hidden,), "post_trunk_norm.weight": (hidden,), "merger.ln_q.weight": (hidden,),
        "merger.ln_q.bias": (hidden,), "merger.mlp.0.weight": (joined, joined), "merger.mlp.0.bias": (joined,),
        "merger.mlp.2.weight": (width, joined), "merger.mlp.2.bias": (width,),
    }  # fmt: skip
    for i in range(vision["num_hidden_layers"]):
        shapes |= {
            f"blocks.{i}.norm1.weight": (hidden,), f"blocks.{i}.norm2.weight": (hidden,),
            f"blocks.{i}.attn.qkv.weight": (3 * hidden, hidden), f"blocks.{i}.attn.proj.weight": (hidden, hidden),
            f"blocks.{i}.mlp.fc1.weight": (inner, hidden), f"blocks.{i}.mlp.fc2.weight": (hidden, inner),
            f"blocks.{i}.mlp.fc3.weight": (inner, hidden),
        }  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    drawn = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator) / (math.prod(shape[1:]) ** 0.5 if len(shape) > 1 else 4)
        drawn[f"vision_tower.{name}"] = numbers + 1 if len(shape) == 1 and name.endswith("weight") else numbers
    return drawn


def dots_folder(folder: Path) -> Path:
    """A Qwen2 that sees by such a tower."""
    model = random_model(LlamaConfig(**SMALL))
    save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    own = {key: config[key] for key in SMALL if key in config} | {"max_position_embeddings": 512, "attention_bias": True}
    config = changed(DOTS, SMALL_TOWER, **own) | {"image_token_id": 512}
    tensors = load_file(folder / "model.safetensors")
    for i in range(SMALL["num_hidden_layers"]):  # a Qwen2's, which a Llama has not
        for part, heads in (("q", SMALL["num_attention_heads"]), ("k", 2), ("v", 2)):
            tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = torch.zeros(heads * SMALL["head_dim"])
    save_file(tensors | tensors_of(config["vision_config"], SMALL["hidden_size"]), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES | {"patch_size": 4, "min_pixels": 64}))
    return folder


def rms(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def written_out(tensors: dict[str, torch.Tensor], vision: dict[str, Any], pixels: np.ndarray) -> torch.Tensor:
    """Patches line by line; those of a cell are joined in the end."""
    t = {name.removeprefix("vision_tower."): tensor.double() for name, tensor in tensors.items() if name.startswith("vision_")}
    side, heads, eps = vision["patch_size"], vision["num_attention_heads"], vision["rms_norm_eps"]
    mean, std = (torch.tensor(IMAGES[key]).double().view(3, 1, 1) for key in ("image_mean", "image_std"))
    values = (torch.from_numpy(pixels).permute(2, 0, 1).double() / 255 - mean) / std
    lines, columns = values.shape[1] // side, values.shape[2] // side
    kernel, bias = t["patch_embed.patchifier.proj.weight"], t["patch_embed.patchifier.proj.bias"]
    x = torch.nn.functional.conv2d(values[None], kernel, bias, side)[0].flatten(1).T
    x = rms(x, t["patch_embed.patchifier.norm.weight"], eps)
    dim = x.shape[1] // heads
    turns = 1e4 ** (-torch.arange(0, dim // 2, 2).double() / (dim // 2))
    line, column = torch.arange(lines).repeat_interleave(columns)[:, None], torch.arange(columns).repeat(lines)[:, None]
    angles = torch.cat([line * turns, column * turns] * 2, dim=1)[:, None]
    for i in range(vision["num_hidden_layers"]):
        def of(name: str, i: int = i) -> torch.Tensor:
            return t[f"blocks.{i}.{name}.weight"]

        qkv = (rms(x, of("norm1"), eps) @ of("attn.qkv").T).view(-1, 3, heads, dim)
        q, k = (qkv[:, j] * angles.cos() + torch.cat([-qkv[:, j, :, dim // 2 :], qkv[:, j, :, : dim // 2]], -1) * angles.sin()
                for j in range(2))  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), qkv[:, 2]).flatten(1) @ of("attn.proj").T
        y = rms(x, of("norm2"), eps)
        gate = y @ of("mlp.fc1").T
        x = x + (gate * torch.sigmoid(gate) * (y @ of("mlp.fc3").T)) @ of("mlp.fc2").T
    x = rms(x, t["post_trunk_norm.weight"], eps)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    x = x * t["merger.ln_q.weight"] + t["merger.ln_q.bias"]
    cells = x.view(lines // 2, 2, columns // 2, 2, -1).transpose(1, 2).reshape(lines * columns // 4, -1)
    between = cells @ t["merger.mlp.0.weight"].T + t["merger.mlp.0.bias"]
    between = between * 0.5 * (1 + torch.erf(between / 2**0.5))
    return between @ t["merger.mlp.2.weight"].T + t["merger.mlp.2.bias"]


def test_both_as_published() -> None:
    spec = read(DOTS, IMAGES)
    tower = spec.tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size, tower.out_size, tower.cell) == (
        1536, 42, 12, 4224, 1536, 28,
    )  # fmt: skip
    assert (tower.projector_size, tower.bias, tower.projector_bias, tower.theta, tower.positions) == (6144, False, True, 1e4, 0)
    assert (spec.size.kind, spec.size.min_pixels, spec.size.max_pixels, spec.has_grid) == ("area", 3136, 11289600, False)
    naver = read(NAVER)
    assert (naver.tower.merged_size, naver.tower.out_size, naver.tower.window, naver.has_grid) == (5120, 6144, 4, False)
    assert [hf_family(each).name for each in (DOTS, NAVER)] == ["qwen2", "hyperclovax"]


@pytest.mark.parametrize("size", [(8, 8), (24, 40), (40, 16)])
def test_rows_are_those_of_a_tower_written_out(size: tuple[int, int], tmp_path: Path) -> None:
    folder = dots_folder(tmp_path)
    _, tower = open_tower(folder)
    pixels = draw(*size)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    expected = written_out(load_file(folder / "model.safetensors"), vision, pixels)
    assert difference(tower(image(pixels)).rows, expected.float()) < 1e-5
    _, half = open_tower(folder, torch.bfloat16)
    assert difference(half(image(pixels)).rows.float(), expected.float()) < 0.05


def test_what_follows_an_image_depends_on_it_whatever_the_steps(tmp_path: Path) -> None:
    worker = worker_for(dots_folder(tmp_path), dtype="float32")
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    prompts = []
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)
        prompts.append(TokenIds([5, 6, *[512] * 6, 7], [vision.placed(Image.of(16, 24, pixels.tobytes()), 2)]))
    answers = []
    for limit in (512, 4):
        outputs = run(engine_for(worker, max_num_batched_tokens=limit), [(each, greedy(8, logprobs=0)) for each in prompts])
        answers.append([[each.logprob for each in output.outputs[0].logprobs] for output in outputs])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize(("height", "width"), [(700, 380), (30, 1111), (56, 56), (10, 10), (3000, 2000)])
def test_pixels_are_those_of_qwens_image_processor(height: int, width: int) -> None:
    """Of which dots.ocr's is one."""
    picture = pillow.fromarray(colours(height, width, 3))
    most = 300_000
    (found,) = read_image(saved(picture, "PNG"), read(DOTS, IMAGES | {"max_pixels": most}), "it").images
    tall, wide = smart_resize(height, width, 28, 3136, most)
    assert (found.height, found.width) == (tall, wide)
    theirs: Any = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=1, do_rescale=False,
                                           do_normalize=False, size={"shortest_edge": 3136, "longest_edge": most})  # fmt: skip
    patches = theirs(images=[picture], return_tensors="pt")["pixel_values"]
    cells = patches.view(tall // 28, wide // 28, 2, 2, 3, 14, 14).permute(0, 2, 5, 1, 3, 6, 4).reshape(tall, wide, 3)
    assert found.pixels == cells.to(torch.uint8).numpy().tobytes()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (changed(DOTS, {"post_norm": False}), IMAGES, UnsupportedError, "post_norm 'False' is not supported"),
    (changed(DOTS, {"use_bias": True}), IMAGES, UnsupportedError, "use_bias 'True'"),
    (changed(DOTS, {"temporal_patch_size": 2}), IMAGES, UnsupportedError, "temporal_patch_size '2'"),
    (changed(DOTS, {"model_type": "another"}), IMAGES, UnsupportedError, "a tower of the kind 'another'"),
    (changed(DOTS, {"hidden_size": 1024}), IMAGES, CheckpointError, "rows of 1024 numbers for a decoder of 1536"),
    (changed(DOTS, {"num_attention_heads": 7}), IMAGES, CheckpointError, "7 heads can't share 1536"),
    (changed(DOTS, {"num_hidden_layers": 10**9}), IMAGES, CheckpointError, "are believed"),
    (DOTS, IMAGES | {"merge_size": 4}, CheckpointError, "'merge_size' is 4"),
    (DOTS, IMAGES | {"max_pixels": 1 << 29}, CheckpointError, "at most"),
    (changed(NAVER, {"window_size": 4}), {}, CheckpointError, "window_size"),
    (changed(NAVER, {"out_hidden_size": 0}), {}, CheckpointError, "out_hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "images", "error", "words"), REFUSED)
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)


@pytest.mark.parametrize("change", [
    lambda t: t.pop("vision_tower.blocks.1.mlp.fc3.weight"),
    lambda t: t.update({"vision_tower.blocks.1.attn.qkv.bias": torch.zeros(96)}),
])  # fmt: skip
def test_other_tensors_are_told(change: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path) -> None:
    folder = dots_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing|1 not part of it"):
        open_tower(folder)
