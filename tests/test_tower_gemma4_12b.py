"""Gemma 4 12B, which sees without layers: its config as published, rows and answers against transformers, from its folder and
from files as llama.cpp's converter writes them, what it takes, what is refused. What follows a prompt with images, steps:
test_vision.py. transformers' image processor can't be imported without torchvision: how it joins patches is taken out of its
source."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image as pillow
from safetensors.numpy import load_file
from transformers import AutoModelForImageTextToText, Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from engines import random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.vision_spec import Image
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.mmproj import open_mmproj, read_mmproj
from nanovllm_cli.weights.vision import read_vision
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import opened, with_merges, written
from test_tower_memory import Held
from test_towers import TEXT, difference, draw, image, open_tower
from test_vision import MODELS

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"], "image_token_id": 258880, "model_type": "gemma4_unified",
    "text_config": {"global_head_dim": 512, "head_dim": 256, "hidden_size": 3840, "intermediate_size": 15360,
                    "model_type": "gemma4_unified_text", "num_attention_heads": 16, "num_global_key_value_heads": 1,
                    "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "sliding_window": 1024,
                    "attention_k_eq_v": True, "use_bidirectional_attention": "vision", "vocab_size": 262144},
    "tie_word_embeddings": True, "video_token_id": 258884,
    "vision_config": {"mm_embed_dim": 3840, "mm_posemb_size": 1120, "model_patch_size": 48,
                      "model_type": "gemma4_unified_vision", "num_soft_tokens": 280, "output_proj_dims": 3840, "patch_size": 16,
                      "pooling_kernel_size": 3, "rms_norm_eps": 1e-06},
}  # fmt: skip
"""config.json of google/gemma-4-12B-it, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3, "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3,
}  # fmt: skip
VISION = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 9,
          "rms_norm_eps": 1e-3}  # fmt: skip
GRIDS = [(1, 1), (3, 5), (7, 2), (1, 9)]
WORDS = ["<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|turn>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{{ '<turn|>\n' }}{% endfor %}{{ '<|turn>model\n' }}"
)


def changed(part: str, **own: Any) -> dict[str, Any]:
    return GEMMA | {part: GEMMA[part] | own}


def joined_by_transformers() -> Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
    """How its image processor joins patches to cells."""
    found = importlib.util.find_spec("transformers.models.gemma4_unified")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = (Path(found.submodule_search_locations[0]) / "image_processing_gemma4_unified.py").read_text()
    module = ast.parse(source)
    module.body = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == "patches_merge"]
    scope: dict[str, Any] = {"math": math, "torch": torch}
    exec(compile(module, "transformers", "exec"), scope)
    return scope["patches_merge"]


patches_merge = joined_by_transformers()


def seen_by_transformers(pictures: list[Any], patch: int, merge: int, **settings: Any) -> dict[str, torch.Tensor]:
    """Cells and their places, of images whose sides are whole cells, or are made so."""
    images = Gemma4ImageProcessorPil(patch_size=patch, pooling_kernel_size=merge, max_soft_tokens=280)
    cells, places = [], []
    for picture in pictures:
        given = images(images=[picture], return_tensors="pt", **settings)
        is_there = (given["image_position_ids"][0] >= 0).all(-1)
        patches, at = given["pixel_values"][:, is_there], given["image_position_ids"][:, is_there]
        joined, where = patches_merge(patches, at, patches.shape[1] // merge**2)
        cells.append(joined[0])
        places.append(where[0])
    most = max(map(len, cells))
    pixels, at = torch.zeros(len(cells), most, cells[0].shape[1]), torch.full((len(cells), most, 2), -1)
    for i, (own, where) in enumerate(zip(cells, places, strict=True)):
        pixels[i, : len(own)], at[i, : len(own)] = own, where
    return {"pixel_values": pixels, "image_position_ids": at}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and its folder."""
    text = TEXT | {"use_bidirectional_attention": "vision"}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=VISION, audio_config=None)
    model = Gemma4UnifiedForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + drawn / 4 if parameter.dim() == 1 else drawn / parameter.shape[-1] ** 0.5
    folder = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(folder)
    said = IMAGES | {"patch_size": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(said | {"max_soft_tokens": 70}))
    return model, folder


def rows_of(model: Any, pixels: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model.model.get_image_features(**seen_by_transformers([pixels], 4, 3, do_resize=False)).pooler_output[0]


def test_it_is_as_published() -> None:
    spec = read(GEMMA, IMAGES)
    tower = spec.tower
    assert (tower.cell, tower.hidden_size, tower.positions, tower.out_size, tower.num_stages) == (48, 3840, 1120, 3840, 1)
    assert (spec.whole, spec.whole_in_windows, spec.mean, spec.std) == (True, True, (0, 0, 0), (1, 1, 1))
    assert (most_tokens(spec), most_tokens(spec.limited(70)), spec.size.longest_side) == (280, 70, 1120 * 48)
    assert sum(math.prod(shape) for shape in tower_shapes(tower).values()) == (
        2 * 6912 + 6912 * 3840 + 3840 + 4 * 3840 + 2 * 1120 * 3840 + 3840**2
    )
    plain = read(changed("text_config", use_bidirectional_attention=None), IMAGES)
    assert (plain.whole, plain.whole_in_windows) == (False, False)
    usual = GEMMA | {"text_config": {key: each for key, each in GEMMA["text_config"].items() if "bidirectional" not in key}}
    assert read(usual) == spec
    text = spec_from_hf(GEMMA, hf_family(GEMMA))
    assert (text.num_layers, text.hidden_size) == (48, 3840)


def test_rows_are_those_of_transformers(made: tuple[Any, Path]) -> None:
    spec, tower = open_tower(made[1])
    for rows, columns in GRIDS:
        pixels = draw(rows * 12, columns * 12)
        found = tower(image(pixels)).rows
        assert len(found) == rows * columns == spec.placed(image(pixels), 0).num_rows
        assert difference(found, rows_of(made[0], pixels)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype, made: tuple[Any, Path]) -> None:
    _, tower = open_tower(made[1], dtype)
    pixels = draw(60, 36)
    found, expected = tower(image(pixels)).rows, rows_of(made[0], pixels)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() < (0.02 if dtype == torch.bfloat16 else 0.003) * expected.norm()


def test_it_is_read_from_a_folder_and_sees_videos(made: tuple[Any, Path]) -> None:
    with open_checkpoint(made[1]) as checkpoint:
        spec = read_vision(checkpoint)
    assert spec is not None
    assert spec.video is not None
    assert (spec.video.num_frames, spec.video.wording, spec.video.size.max_pixels) == (32, "gemma4", 70 * 144)


def test_an_answer_about_images_is_transformers(tmp_path: Path) -> None:
    """As its `generate` has it: tokens of an image see all of it in layers with a window."""
    config = type(MODELS["gemma4, without layers"]).from_dict(MODELS["gemma4, without layers"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    config.text_config.sliding_window = 80  # longer than an image, shorter than both
    model = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(model, tmp_path / "folder")
    said = IMAGES | {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[4], chat_template=TEMPLATE)
    pictures = [pillow.fromarray(colours(*sides, 3)) for sides in ((31, 24), (17, 30))]
    spec = read(json.loads((folder / "config.json").read_text()), said)
    sized = [read_image(saved(picture, "PNG"), spec, "it").images[0] for picture in pictures]
    arrays = [np.frombuffer(each.pixels, np.uint8).reshape(each.height, each.width, 3) for each in sized]
    urls = [{"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}} for picture in pictures]
    asked = [{"role": "user", "content": [*urls, {"type": "text", "text": "What?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32")) as llm:
        prompt = llm.encode_chat(asked)
        (output,) = llm.chat(asked, params)
    counts = [each.height * each.width // 64 for each in sized]
    ids = [259, *b"user\n", *(token for count in counts for token in (257, *[256] * count, 258)), *b"What?", 260, *b"\n"]
    ids += [259, *b"model\n"]
    assert list(prompt) == ids
    given = torch.tensor([ids])
    answer = model.generate(
        given, **seen_by_transformers(arrays, 4, 2, do_resize=False), mm_token_type_ids=(given == 256).int(), max_new_tokens=8,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def mmproj_by_hand(folder: Path, path: Path, change: Callable[[dict[str, np.ndarray]], Any] = dict, **keys: Any) -> Path:
    """As llama.cpp's converter writes it (conversion/gemma.py): columns of the matrix, and of the norm in front of it, by
    colours; tables one behind the other; and what it hears by."""
    said = json.loads((folder / "config.json").read_text())
    vision, tensors = said["vision_config"], dict[str, np.ndarray]()
    side = vision["patch_size"] * vision["pooling_kernel_size"]
    place = np.arange(3 * side**2)
    columns = place % side**2 // side * side * 3 + place % side * 3 + place // side**2
    names = {"patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2",
             "pos_norm": "v.patch_norm.3", "embedding_projection": "mm.input_projection"}  # fmt: skip
    for name, numbers in load_file(folder / "model.safetensors").items():
        if "language_model" in name or name == "lm_head.weight":
            continue
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if kind == "pos_embedding":
            tensors["v.position_embd.weight"] = np.ascontiguousarray(numbers.transpose(1, 0, 2))
            continue
        is_of_pixels = module == "patch_ln1" or (module, kind) == ("patch_dense", "weight")
        tensors[f"{names[module]}.{kind}"] = np.ascontiguousarray(numbers[..., columns] if is_of_pixels else numbers)
    tensors["mm.a.input_projection.weight"] = np.ones((said["text_config"]["hidden_size"], 640), np.float32)
    change(tensors)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_audio_encoder", True)
    numbers = {"image_size": 224, "patch_size": vision["patch_size"], "embedding_length": vision["mm_embed_dim"],
               "feed_forward_length": 0, "block_count": 0, "attention.head_count": 0,
               "projector.scale_factor": vision["pooling_kernel_size"],
               "projection_dim": said["text_config"]["hidden_size"]} | keys  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["rms_norm_eps"])
    writer.add_array("clip.vision.image_mean", [0.0] * 3)
    writer.add_array("clip.vision.image_std", [1.0] * 3)
    writer.add_string("clip.vision.projector_type", "gemma4uv")
    writer.add_string("clip.audio.projector_type", "gemma4ua")
    for name, numbers_of in tensors.items():
        writer.add_tensor(name, numbers_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_sees_what_its_folder_sees(made: tuple[Any, Path], tmp_path: Path) -> None:
    spec, tower = opened(mmproj_by_hand(made[1], tmp_path / "mmproj.gguf"))
    of_folder, expected = open_tower(made[1])
    known = replace(of_folder.tower, projector_eps=float(np.float32(1e-3)))
    assert (spec.tower, spec.size, spec.tokens) == (known, of_folder.size, of_folder.tokens)
    assert (spec.mean, spec.std, spec.whole, spec.whole_in_windows) == ((0, 0, 0), (1, 1, 1), True, True)
    assert spec.video is not None
    assert spec.video.wording == "gemma4"
    pixels = image(draw(36, 60))
    assert difference(tower(pixels).rows, expected(pixels).rows) < 1e-6
    with open_mmproj(tmp_path / "mmproj.gguf") as file:
        assert read_mmproj(file).hearing is None


def test_a_folder_becomes_the_file_that_llama_cpp_makes(made: tuple[Any, Path], tmp_path: Path) -> None:
    reference = gguf.GGUFReader(mmproj_by_hand(made[1], tmp_path / "reference.gguf"))
    found = gguf.GGUFReader(written(made[1], tmp_path / "m-Q4_0.gguf"))
    tensors, wanted = ({tensor.name: tensor.data for tensor in file.tensors} for file in (found, reference))
    wanted.pop("mm.a.input_projection.weight")
    assert tensors.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(tensors[name], wanted[name])] == []
    fields = {key: field.contents() for key, field in found.fields.items()}
    means_nothing = {f"clip.{key}" for key in ("has_audio_encoder", "audio.projector_type", "vision.image_size",
                                               "vision.attention.head_count")}  # fmt: skip
    for key, field in reference.fields.items():
        if not key.startswith("GGUF.") and key not in means_nothing:
            assert fields[key] == pytest.approx(field.contents()), key


@pytest.mark.parametrize(("change", "keys", "words"), [
    (lambda t: t.pop("mm.input_projection.weight"), {}, r"tensor 'mm\.input_projection\.weight' is missing"),
    (lambda t: t.update({"v.position_embd.weight": np.ones((9, 32), np.float32)}), {}, "is no two tables"),
    (lambda t: t.update({"v.position_embd.weight": np.ones((3, 9, 32), np.float32)}), {}, "of the wrong shape"),
    (lambda t: t.pop("v.patch_norm.3.bias"), {}, r"1 missing: v\.patch_norm\.3\.bias"),
    (lambda t: t.update({"v.blk.0.ln1.weight": np.ones(32, np.float32)}), {}, r"1 not part of it: v\.blk\.0\.ln1\.weight"),
    (dict, {"projector.scale_factor": 2}, "of the wrong shape"),
    (dict, {"patch_size": 1 << 20}, "pixels are not believed"),
    (dict, {"embedding_length": 0}, "'clip.vision.embedding_length' must be"),
])  # fmt: skip
def test_files_that_are_broken_are_told(
    change: Callable[[dict[str, np.ndarray]], Any], keys: dict[str, int], words: str, made: tuple[Any, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        opened(mmproj_by_hand(made[1], tmp_path / "mmproj.gguf", change, **keys))


def test_an_answer_is_the_same_from_files(doors: Doors, tmp_path: Path) -> None:
    config = type(MODELS["gemma4, without layers"]).from_dict(MODELS["gemma4, without layers"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_id = 1024, 256
    config.text_config.sliding_window = 80
    folder = save(random_model(config, auto=AutoModelForImageTextToText), tmp_path / "folder")
    said = IMAGES | {"patch_size": 4, "pooling_kernel_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[4], chat_template=TEMPLATE)
    with_merges(folder, WORDS)
    with open_checkpoint(folder) as checkpoint:
        convert.write(checkpoint, convert.plan(checkpoint, "gguf", "f32"), tmp_path / "m-F32.gguf")
    assert written(folder, tmp_path / "m-F32.gguf") == tmp_path / "mmproj-m-F32.gguf"
    picture = {"type": "image_url", "image_url": {"url": data_url(saved(pillow.fromarray(colours(31, 24, 3)), "PNG"))}}
    asked = [{"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    code, out, err = doors.command("models", "show", str(folder))
    assert (code, "of 8 x 8 pixels; read by no layers" in out) == (0, True), out + err
    answers = []
    for path in (folder, tmp_path / "m-F32.gguf"):
        settings = EngineConfig(threads=2, dtype="float32", image_max_tokens=70)
        with LLM(path, config=settings) as llm:
            prompt = llm.encode_chat(asked)
            answers.append((list(prompt), list(llm.chat(asked, params)[0].outputs[0].token_ids)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [24, 1500])
def test_what_it_takes_is_told(width: int, dtype: torch.dtype) -> None:
    """Where a cell's pixels are the most, and where what is made of them is."""
    config = changed("vision_config", mm_embed_dim=width, output_proj_dims=width, patch_size=8, pooling_kernel_size=2,
                     model_patch_size=16)  # fmt: skip
    spec = read(config | {"text_config": GEMMA["text_config"] | {"hidden_size": width}}).tower
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, seen = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(320, 320, bytes(3 * 320 * 320))
    with torch.inference_mode(), Held() as held:
        tower(seen)
    assert held.most <= work_bytes(spec, 320 * 320, dtype) <= 1.6 * held.most


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed("vision_config", model_type="gemma4_vision"), {}, UnsupportedError, "a tower of the kind 'gemma4_vision'"),
    (GEMMA, {"do_resize": False}, UnsupportedError, "do_resize false"),
    (GEMMA, {"do_rescale": False}, UnsupportedError, "do_rescale false"),
    (changed("vision_config", output_proj_dims=1000), {}, CheckpointError, "'output_proj_dims' is 1000, where there are 3840"),
    (changed("vision_config", model_patch_size=16), {}, CheckpointError, "'model_patch_size' is 16, where there are 48"),
    (changed("vision_config", mm_embed_dim=0), {}, CheckpointError, "'mm_embed_dim' must be"),
    (changed("vision_config", patch_size=1 << 20, model_patch_size=None), {}, CheckpointError, "pixels are not believed"),
    (changed("vision_config", mm_posemb_size=0), {}, CheckpointError, "'mm_posemb_size' must be"),
    (changed("text_config", use_bidirectional_attention=3), {}, CheckpointError, "'use_bidirectional_attention' must be"),
    (GEMMA, {"patch_size": 14}, CheckpointError, "patch_size 14 for a tower of 16"),
    (GEMMA, {"pooling_kernel_size": 2}, CheckpointError, "pooling_kernel_size 2 for a tower of 3"),
    (GEMMA, {"max_soft_tokens": 1 << 20}, CheckpointError, "images of up to"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
