"""DeepSeek-OCR, the first: its config as published, how a page is cut, rows and answers against transformers' Unlimited-OCR,
whose encoder is the same and whose texts see all where their window is long enough, GGUF files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from PIL import ImageOps
from safetensors.numpy import load_file as load_numbers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, UnlimitedOcrConfig
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import get_optimal_tiled_canvas

from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.images.source import data_url
from nanovllm_cli.model_spec import MoESpec
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.models.tower_layers import Seeing
from nanovllm_cli.text.builtin_templates import BUILTIN_TEMPLATES
from nanovllm_cli.vision_spec import Image, TokenIds, VisionSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from nanovllm_cli.weights.vision import check_tower, load_tower, read_vision
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_it_sees_as_its_folder_does, opened, with_merges
from test_tower_deepseek import OF_CODE, TEXT
from test_tower_memory import Held
from test_vision import logprobs_of
from towers_gguf import Tensors, _add

CLIP = {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
SAM = {"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11], "heads": 12, "layers": 12, "width": 768}
OCR: dict[str, Any] = OF_CODE | {
    "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2", "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head", "tile_tag": "2D",
    "projector_config": {"input_dim": 2048, "model_type": "mlp_projector", "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {
        "image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deeplip_b_l", "model_type": "vision",
        "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
    },
}  # fmt: skip
"""config.json of deepseek-ai/DeepSeek-OCR, in so far as it is read, or might be."""
LONG = 1 << 20
GRIDS = [None, (1, 2), (2, 1), (2, 2), (2, 3), (5, 1)]
"""Lines and columns of pieces."""


def changed(sam: dict[str, Any] | None = None, clip: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    width = {"clip-l-14-224": CLIP | (clip or {}), "sam_vit_b": SAM | (sam or {})}
    return OCR | {"vision_config": {"image_size": 1024, "width": width}} | own


def small(**sam: Any) -> Any:
    """transformers' config. A page has 16 x 16 cells, a piece 10 x 10."""
    text = SMALL | {
        "vocab_size": 513, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 34, "num_key_value_heads": 6,
        "sliding_window": LONG, "mlp_layer_types": ["dense"] + ["sparse"] * (SMALL["num_hidden_layers"] - 1),
        "max_position_embeddings": 2048,
    }  # fmt: skip
    seen = {
        "sam_config": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "image_size": 64, "patch_size": 1,
                       "output_channels": 6, "downsample_channels": [7, 12], "global_attn_indexes": [1], "mlp_dim": 20} | sam,
        "encoder_config": {"hidden_size": 12, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
                           "image_size": 28, "patch_size": 4},
    }  # fmt: skip
    return UnlimitedOcrConfig(text_config=text, image_token_id=512, vision_config=seen)


def published(config: Any) -> dict[str, Any]:
    """The same as DeepSeek has it, with what its code has fixed."""
    text, sam, clip = config.text_config, config.vision_config.sam_config, config.vision_config.encoder_config
    return {
        "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
        "projector_config": {"projector_type": "linear"},
        "language_config": {key: getattr(text, key, OF_CODE.get(key)) for key in OF_CODE if key in TEXT or key in LATENT}
        | {"first_k_dense_replace": 1},
        "vision_config": {"image_size": sam.image_size, "width": {
            "clip-l-14-224": {"heads": clip.num_attention_heads, "image_size": clip.image_size, "layers": clip.num_hidden_layers,
                              "patch_size": clip.patch_size, "width": clip.hidden_size},
            "sam_vit_b": {"downsample_channels": sam.downsample_channels, "global_attn_indexes": sam.global_attn_indexes,
                          "heads": sam.num_attention_heads, "layers": sam.num_hidden_layers, "width": sam.hidden_size,
                          "patch_size": sam.patch_size, "output_channels": sam.output_channels, "mlp_dim": sam.mlp_dim},
        }},
    }  # fmt: skip


LATENT = "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_mla", "n_group", "topk_group"


def folder_of(model: Any, folder: Path) -> Path:
    """transformers writes names as DeepSeek has them; and beside them there is what its code makes and does not use."""
    save(model, folder)
    (folder / "config.json").write_text(json.dumps(published(model.config)))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.vision_model.embeddings.patch_embedding.weight"] = torch.ones(12, 3, 4, 4)
    tensors["model.vision_model.embeddings.position_ids"] = torch.arange(50)[None]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = random_model(small(), auto=AutoModelForImageTextToText)
    return model, folder_of(model, tmp_path_factory.mktemp("model"))


def test_it_is_as_published() -> None:
    spec = read(OCR)
    tower, sam = spec.tower, spec.tower.sam
    assert sam is not None
    assert (sam.hidden_size, sam.num_layers, sam.num_heads, sam.intermediate_size, sam.window) == (768, 12, 12, 3072, 14)
    assert (sam.full, sam.positions, sam.neck, sam.middle, sam.queries) == ((2, 5, 8, 11), 64 * 64, 256, 512, None)
    assert (tower.num_stages, tower.cell, tower.out_size, tower.hidden_size, tower.num_heads) == (36, 64, 1280, 1024, 16)
    assert (tower.intermediate_size, tower.activation, tower.eps, tower.positions) == (4096, "quick_gelu", 1e-5, 256)
    assert (spec.size.tile, spec.size.longest_side, spec.size.least_tiles, spec.size.most_tiles) == (640, 1024, 2, 9)
    assert (spec.least_tokens, most_rows(spec), most_tokens(spec)) == (273, 990, 273 + 990)
    assert (*spec.mean, *spec.std) == (0.5,) * 6
    text = spec_from_hf(OCR, hf_family(OCR))
    assert text == spec_from_hf(OF_CODE, hf_family(OF_CODE))
    assert [isinstance(block.mlp, MoESpec) for block in text.blocks] == [False] + [True] * 11


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 1500))
@settings(max_examples=300, deadline=None)
def test_a_page_is_cut_as_transformers_does_it(height: int, width: int, most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    spec = read(OCR)
    found = fitted(spec.size, height, width)
    columns, rows = get_optimal_tiled_canvas((height, width), (640, 640), 2, 9)
    assert found.pieces == ((rows * 640, columns * 640) if max(height, width) > 640 else None)
    assert max(found.whole) == 1024
    limited = spec.limited(most)
    size = fitted(limited.size, height, width)
    side = limited.size.longest_side // 64
    pieces = 0 if size.pieces is None else size.pieces[0] // 64 * (size.pieces[1] // 64 + 1)
    assert side * (side + 1) + 1 + pieces <= max(most, 73)
    assert side == (16 if most >= 273 else 10 if most >= 111 else 8)
    assert size.whole == found.whole or (side < 16 and size.whole == (side * 64, side * 64))


@pytest.mark.parametrize("shape", [(61, 97), (97, 61), (39, 40), (300, 30), (20, 20), (33, 130)])
def test_pixels_are_those_of_its_code(shape: tuple[int, int], made: tuple[Any, Path]) -> None:
    """A page of 64 in the middle of a grey square, pieces of 40 in front of it; those of a line, or in a column, in one."""
    picture = pillow.fromarray(colours(*shape, 3))
    with open_checkpoint(made[1]) as checkpoint:
        spec = read_vision(checkpoint)
    assert spec is not None
    ours = read_image(saved(picture, "PNG"), spec, "it").images
    expected = [np.asarray(ImageOps.pad(picture, (64, 64), color=(127, 127, 127)))]
    if max(shape) > 40:
        columns, rows = get_optimal_tiled_canvas(shape, (40, 40), 2, 9)
        large = np.asarray(picture.resize((40 * columns, 40 * rows)))
        expected = [*([large] if columns == 1 else np.split(large, rows)), *expected]
    assert [(image.height, image.width) for image in ours] == [each.shape[:2] for each in expected]
    assert [image.pixels for image in ours] == [each.tobytes() for each in expected]
    for most, side in (272, 40), (110, 32):  # its modes "small" and "tiny", which keep no shape
        (found,) = read_image(saved(picture, "PNG"), spec.limited(most), "it").images
        assert found.pixels == picture.resize((side, side)).tobytes()


def tower_in(folder: Path) -> tuple[VisionSpec, Seeing]:
    with open_checkpoint(folder) as checkpoint:
        spec = read_vision(checkpoint)
        assert spec is not None
        check_tower(checkpoint, spec)
        return spec, load_tower(checkpoint, spec, torch.float32)


def views(grid: tuple[int, int] | None, side: int = 64) -> tuple[list[Image], dict[str, Any]]:
    """A page of noise in so many lines and columns of pieces, as ours and as transformers takes it."""
    numbers = np.random.default_rng(5)

    def image(pixels: np.ndarray) -> Image:
        return Image.of(*pixels.shape[:2], pixels.tobytes())

    def values(pixels: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1

    whole = numbers.integers(0, 256, (side, side, 3), np.uint8)
    theirs: dict[str, Any] = {"pixel_values": values([whole])}
    if grid is None:
        return [image(whole)], theirs
    rows, columns = grid
    page = numbers.integers(0, 256, (40 * rows, 40 * columns, 3), np.uint8)
    pieces = [piece for line in np.split(page, rows) for piece in np.split(line, columns, axis=1)]
    theirs |= {"pixel_values_local": values(pieces), "num_local_patches": [len(pieces)], "patches_grid": [[columns, rows]]}
    return [*map(image, [page] if columns == 1 else np.split(page, rows)), image(whole)], theirs


@pytest.mark.parametrize(("grid", "side"), [*((grid, 64) for grid in GRIDS), (None, 40), (None, 32)])
def test_rows_are_transformers(grid: tuple[int, int] | None, side: int, made: tuple[Any, Path]) -> None:
    model, folder = made
    spec, tower = tower_in(folder)
    images, given = views(grid, side)
    with torch.inference_mode():
        (expected,) = model.model.get_image_features(**given).pooler_output
        found = [tower(image).rows for image in images]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-3)
    placed = [spec.placed(image, 0) for image in images]
    assert [each.num_rows for each in placed] == [len(rows) for rows in found]
    limited = spec.limited(most_tokens(spec) if side == 64 else 111 if side == 40 else 73)
    assert all(limited.fits([limited.placed(image, 0)], 2000) for image in images)
    assert max(each.num_rows for each in placed) <= most_rows(limited)


@pytest.mark.parametrize("sides", [(40, 60), (40, 40), (80, 80), (40, 400), (120, 80), (64, 40), (32, 32), (0, 0)])
def test_images_of_other_sizes_are_refused(sides: tuple[int, int], made: tuple[Any, Path]) -> None:
    spec, _ = tower_in(made[1])
    image = Image.of(*sides, bytes(3 * sides[0] * sides[1]))
    assert not spec.fits([spec.placed(image, 2)], 3000)


WORDS = ["<image>", "<|grounding|>", "<|ref|>", "<|/ref|>", "<s>", "</s>"]


def test_a_chat_about_a_page_is_transformers_and_steps_change_no_bit(made: tuple[Any, Path]) -> None:
    """Without a template of its own; tokens that say what to do count in a message, and no others do."""
    model, folder = made
    write_byte_tokenizer(folder, tuple(WORDS))
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    picture = pillow.fromarray(colours(40, 90, 3))
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(picture, "PNG"))}}
    text = {"type": "text", "text": "<|grounding|>a</s>"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=200)) as llm:
        assert llm.chat_template is not None
        assert llm.chat_template.source == BUILTIN_TEMPLATES["plain"]
        prompt = llm.encode_chat([{"role": "user", "content": [url, text]}])
        (output,) = llm.chat([{"role": "user", "content": [url, text]}], params)
        for token, shown in ((258, "<|ref|>"), (260, "")):
            one = SamplingParams(temperature=0, max_tokens=1, logit_bias={token: 100.0}, ignore_eos=True)
            assert llm.chat([{"role": "user", "content": "a"}], one)[0].outputs[0].text == shown
    ids = [260, *[256] * (2 * 110 - 10 + 273), *b"\n", 257, *b"a</s>"]
    assert list(prompt) == ids
    columns, rows = get_optimal_tiled_canvas((40, 90), (40, 40), 2, 9)
    assert (columns, rows) == (2, 1)
    pixels = [torch.from_numpy(np.array(each)).permute(2, 0, 1)[None].to(torch.float32) / 127.5 - 1
              for each in (picture.resize((80, 40)), ImageOps.pad(picture, (64, 64), color=(127, 127, 127)))]  # fmt: skip
    seen = {"pixel_values": pixels[1], "pixel_values_local": torch.cat(pixels[0].split(40, dim=3)), "num_local_patches": [2],
            "patches_grid": [[2, 1]]}  # fmt: skip
    model.model.config.image_token_id = model.config.image_token_id = 256
    answer = model.generate(
        torch.tensor([ids]), **seen, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, no_repeat_ngram_size=0
    )
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()
    worker = worker_for(folder, dtype="float32")
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    assert vision is not None
    requests = [(prompt_of(vision, views(grid)[0]), greedy(8, logprobs=0)) for grid in ((2, 3), (2, 1))]
    alone = [logprobs_of(run(engine_for(worker), [request])[0]) for request in requests]
    for most in 23, 512:
        assert [logprobs_of(each) for each in run(engine_for(worker, max_num_batched_tokens=most), requests)] == alone


def prompt_of(vision: VisionSpec, images: list[Image]) -> TokenIds:
    ids, placed = [3, 4, 5], []
    for image in images:
        placed.append(vision.placed(image, len(ids)))
        ids += [256] * placed[-1].num_rows
    return TokenIds([*ids, 7, 8], placed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sides", [(1024, 1024), (640, 1920), (1920, 640)])
def test_what_it_takes_is_told(sides: tuple[int, int], dtype: torch.dtype) -> None:
    spec = read(changed({"layers": 2, "global_attn_indexes": [1]}, {"layers": 1})).tower
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, image = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(*sides, bytes(3 * sides[0] * sides[1]))
    with torch.inference_mode(), Held() as held:
        tower(image)
    most = 2.5 if sides[0] == sides[1] else 4  # whatever its pieces are, room for all of a page is counted
    assert held.most <= work_bytes(spec, sides[0] * sides[1], dtype) <= most * held.most


@pytest.fixture(scope="module")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With patches, and a layer in which all of them see each other, as files can't say otherwise."""
    config = small(patch_size=16, image_size=512, num_hidden_layers=3, global_attn_indexes=[2])
    model = random_model(config, auto=AutoModelForImageTextToText)
    return with_merges(folder_of(model, tmp_path_factory.mktemp("folder")), WORDS[:1], "language_config")


def test_converted_it_sees_as_its_folder_does(of_files: Path, tmp_path: Path) -> None:
    numbers = np.random.default_rng(6)
    images = [Image.of(*sides, numbers.integers(0, 256, 3 * sides[0] * sides[1], np.uint8).tobytes())
              for sides in ((320, 640), (640, 320), (512, 512))]  # fmt: skip
    check_it_sees_as_its_folder_does(of_files, tmp_path / "m-F32.gguf", images)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_what_llama_cpp_reads_in_float32_alone_is_in_it(kind: str, of_files: Path) -> None:
    with open_checkpoint(of_files) as checkpoint:
        made = tower_file(checkpoint, kind, "m")
    assert made is not None
    after = {step.name: step.after for step in made.steps}
    full = ("patch_embd", "pos_embd", "position_embd", "pos_h", "pos_w", "neck.0", "neck.2", "net_2", "net_3", "view_seperator")
    for name, kind_of_it in after.items():
        is_matrix = name.endswith(("qkv.weight", "out.weight", "lin1.weight", "ffn_up.weight", "fc.weight"))
        if is_matrix or any(part in name for part in full):
            assert kind_of_it == (kind.upper() if is_matrix else "F32"), name


def mmproj(folder: Path, path: Path, keys: dict[str, Any], change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
    """As llama.cpp's converter writes it, by hand: names and keys of `conversion/deepseek.py` and the gguf package."""
    config = json.loads((folder / "config.json").read_text())
    width = config["vision_config"]["width"]
    clip, sam = width["clip-l-14-224"], width["sam_vit_b"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 12)
    tensors: Tensors = {}
    for name, numbers in load_numbers(folder / "model.safetensors").items():
        if name.endswith(("lm_head.weight", "position_ids")) or name.startswith(TEXTS):
            continue
        name += ".weight" if name.endswith(("pos_embed", "rel_pos_h", "rel_pos_w")) else ""
        tensors[names.get_name(name, (".weight", ".bias")) or OWN[name]] = numbers
    change(tensors)
    values: dict[str, Any] = {
        "clip.has_vision_encoder": True, "clip.projector_type": "deepseekocr", "clip.vision.projection_dim": 48,
        "clip.vision.image_size": clip["image_size"], "clip.vision.patch_size": clip["patch_size"],
        "clip.vision.embedding_length": clip["width"], "clip.vision.feed_forward_length": 4 * clip["heads"],
        "clip.vision.block_count": clip["layers"], "clip.vision.attention.head_count": clip["heads"],
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3, "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.window_size": 14,
        "clip.vision.sam.block_count": sam["layers"], "clip.vision.sam.embedding_length": sam["width"],
        "clip.vision.sam.head_count": sam["heads"],
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    for key, value in (values | keys).items():
        _add(writer, key, value)
    for each, numbers in tensors.items():
        writer.add_tensor(each, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TEXTS = "model.embed_tokens.", "model.layers.", "model.norm."
OWN = {"model.view_seperator": "v.view_seperator", "model.image_newline": "v.image_newline"}


@pytest.mark.parametrize("as_matrices", [False, True])
def test_a_file_of_llama_cpps_converter_is_read(as_matrices: bool, of_files: Path, tmp_path: Path) -> None:
    """Whatever it says of patches, of an MLP's width, of an activation and an epsilon, which are not those of its weights."""

    def change(tensors: Tensors) -> None:
        for name in ("v.view_seperator", "v.image_newline", "v.class_embd") if as_matrices else ():
            tensors[name] = tensors[name][None]

    wanted, reference = tower_in(of_files)
    spec, tower = opened(mmproj(of_files, tmp_path / "mmproj.gguf", {}, change))
    assert spec == wanted
    image = Image.of(320, 640, np.random.default_rng(7).integers(0, 256, 3 * 320 * 640, np.uint8).tobytes())
    torch.testing.assert_close(tower(image).rows, reference(image).rows)
    keys = {"clip.vision.preproc_min_tiles": 3, "clip.vision.preproc_max_tiles": 4}
    spec, _ = opened(mmproj(of_files, tmp_path / "mmproj.gguf", keys))
    assert (spec.size.least_tiles, spec.size.most_tiles) == (3, 4)


@pytest.mark.parametrize(("change", "words"), [
    (lambda tensors: tensors.pop("v.image_newline"), r"1 missing: v\.image_newline"),
    (lambda tensors: tensors.update({"v.position_embd.weight": np.ones((48, 12), np.float32)}), r"expected \[37, 12\]"),
    (lambda tensors: tensors.update({"v.sam.patch_embd.weight": np.ones((8, 3, 8, 8), np.float32)}), r"patches of \[8, 8\]"),
    (lambda tensors: tensors.pop("v.sam.pos_embd.weight"), r"positions of \[\]"),
    (lambda tensors: tensors.update({"v.blk.0.attn_q.weight": np.ones((12, 12), np.float32)}), "1 not part of it"),
])  # fmt: skip
def test_a_file_that_is_broken(change: Callable[[Tensors], Any], words: str, of_files: Path, tmp_path: Path) -> None:
    with pytest.raises(NanovllmError, match=words):
        opened(mmproj(of_files, tmp_path / "mmproj.gguf", {}, change))


def test_tensors_that_do_not_match_are_told(made: tuple[Any, Path], tmp_path: Path) -> None:
    for file in made[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.image_newline"]
    tensors["model.vision_model.embeddings.class_embedding"] = torch.ones(13)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: image_newline; 1 of the wrong shape: .*class_embedding"):
        tower_in(tmp_path)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"use_rel_pos": False}) | {"tile_tag": "1D"}, {}, "tile_tag '1D'"),
    (OCR | {"projector_config": {"projector_type": "mlp_gelu"}}, {}, "projector_type 'mlp_gelu'"),
    (OCR | {"use_mla": True}, {}, "use_mla 'True'"),
    (OCR, {"do_normalize": False}, "do_normalize false"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed({"downsample_channels": [512, 896]}), {}, "two numbers, the second of them 1024"),
    (changed(clip={"heads": 15}), {}, "15 heads can't share 1024"),
    (changed(clip={"layers": 1 << 20}), {}, "at most 1024 are believed"),
    (OCR | {"vision_config": {"image_size": 1000, "width": {}}}, {}, "don't divide into eighths"),
    (OCR, {"min_patches": 10}, "10 to 9 pieces"),
])  # fmt: skip
def test_a_config_that_is_broken(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)
