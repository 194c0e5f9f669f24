"""What a GGUF model sees by, in a file of its own, against the folder that it is made of; and files that are something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from engines import engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, data_url
from nanovllm_cli.errors import CheckpointError, ModelNotFoundError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.models.tower import Tower
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.text.image_tokens import in_vocabulary, with_images, with_marks
from nanovllm_cli.vision_spec import Image, Picture, TokenIds, VisionSpec
from nanovllm_cli.weights import convert, files, hub
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file, tower_or_note
from nanovllm_cli.weights.hub_http import Listing
from nanovllm_cli.weights.mmproj import check_mmproj, checked_mmproj, load_mmproj, open_mmproj, read_mmproj, with_mmproj
from nanovllm_cli.weights.source import RemoteModel, files_for, locate, resolve
from seeing import WORDS, png, seeing_model
from test_convert import TINY
from test_llm import write_byte_tokenizer
from test_models_gguf import CASES, delta, gemma3, nothing, taps, window
from test_models_gguf import write as write_text
from test_towers import FREE_SIZES, MADE, SIZES, Made, all_rows, draw, image, make, open_tower
from test_vision import MODELS, Part, logprobs_of, parts_of, prompt_with
from towers_gguf import Tensors, write_mmproj

FAMILIES = ["qwen2", "qwen2_5", "exaone", "qwen3", "qwen3_5", "gemma3", "mistral3", "pixtral", "smolvlm", "lfm2", "glm4v",
            "glm4v_moe", "glm_ocr", "paddleocr", "lighton_ocr", "internvl", "internvl, rms", "hunyuan", "minicpm",
            "minicpm_ocr"]  # fmt: skip


PIXTRALS = "mistral3", "pixtral"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """By name; each is made once. A Mistral's file has one epsilon for all of its norms, a LightOnOCR's not the decoder's."""
    kept: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in kept:
            with pytest.MonkeyPatch.context() as patch:
                for each in PIXTRALS:
                    patch.setitem(MADE[each][1]["text_config"], "vocab_size", 300)
                patch.setitem(MADE["mistral3"][1]["text_config"], "rms_norm_eps", 1e-5)
                patch.setitem(MADE["lighton_ocr"][1]["text_config"], "rms_norm_eps", 1e-6)
                patch.setitem(MADE["lighton_ocr"][1]["vision_config"], "num_hidden_layers", 3)  # gguf counts a projector by them
                kept[name] = make(name, tmp_path_factory.mktemp(name))
            if name in PIXTRALS:
                write_byte_tokenizer(kept[name].folder, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
        return kept[name]

    return get


def opened(path: Path, dtype: torch.dtype = torch.float32) -> tuple[VisionSpec, Tower]:
    with open_mmproj(path) as file:
        senses = read_mmproj(file)
        check_mmproj(file, senses)
        assert senses.vision is not None
        return senses.vision, load_mmproj(file, senses.vision, dtype)


def rows(tower: Tower, name: str) -> torch.Tensor:
    """Of images of several sizes."""
    return torch.cat([all_rows(tower(image(draw(*size)))) for size in SIZES.get(name, FREE_SIZES)], dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_the_folder(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = made(name).folder
    spec, tower = opened(write_mmproj(folder, tmp_path / "mmproj.gguf"))
    wanted, reference = open_tower(folder)
    torch.testing.assert_close(rows(tower, name), rows(reference, name), rtol=1e-5, atol=1e-6)
    assert replace(spec.tower, eps=0, projector_eps=0, films=False) == replace(wanted.tower, eps=0, projector_eps=0, films=False)
    assert (spec.tower.eps, spec.tower.projector_eps) == pytest.approx((wanted.tower.eps, wanted.tower.projector_eps))
    assert (*spec.mean, *spec.std) == pytest.approx((*wanted.mean, *wanted.std))
    assert (spec.has_grid, spec.whole, spec.size.kind, spec.size.resample) == (
        wanted.has_grid, wanted.whole, wanted.size.kind, wanted.size.resample
    )  # fmt: skip
    assert replace(spec.tokens, instead="") == wanted.tokens


def test_sizes_of_images_are_the_familys_or_what_a_file_says(made: Callable[[str], Made], tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clip.vision.image_min_pixels": 640, "clip.vision.image_max_pixels": 6400}
    for given, pixels in ({}, (1 << 16, 1 << 24)), (keys, (640, 6400)):
        spec, _ = opened(write_mmproj(made("qwen3").folder, tmp_path / "mmproj.gguf", given))
        assert (spec.size.min_pixels, spec.size.max_pixels) == pixels
    spec, _ = opened(write_mmproj(made("mistral3").folder, tmp_path / "mmproj.gguf", {"clip.vision.image_size": 1540}))
    assert spec.size.longest_side == 1540
    for longest in (96, 48, 480, None):  # older files don't say it
        keys = {"clip.vision.preproc_image_size": longest}
        spec, _ = opened(write_mmproj(made("smolvlm").folder, tmp_path / "mmproj.gguf", keys))
        assert spec.size == SizeRule("tiles", 8, longest_side=longest or 4 * 48, resample="lanczos", tile=48)
    grid = SizeRule("grid", 8, 64 * 64, 256 * 64, resample="bilinear", tile=512, least_tiles=2, most_tiles=10, tolerance=2.0)
    for algorithm, resample in (None, "bilinear"), ("bilinear", "bilinear"), ("bicubic", "bicubic"), ("lanczos", "lanczos"):
        keys = {"clip.vision.image_resize_algo": algorithm, "clip.vision.image_size": None}
        spec, _ = opened(write_mmproj(made("lfm2").folder, tmp_path / "mmproj.gguf", keys))
        assert spec.size == replace(grid, resample=resample)


def divides(name: str, numbers: np.ndarray, size: int) -> bool:
    return numbers.ndim == 2 and numbers.shape[1] % size == 0 and "position" not in name


@pytest.mark.parametrize(("kind", "size"), [("F16", 1), ("BF16", 1), ("Q8_0", 32), ("Q4_0", 32), ("Q5_1", 32)])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "smolvlm", "lfm2"])
def test_numbers_of_other_types_are_what_they_stand_for(
    name: str, kind: str, size: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    number = gguf.GGMLQuantizationType[kind]

    def rounded(tensors: Tensors) -> None:
        for each, numbers in tensors.items():
            if divides(each, numbers, size):
                tensors[each] = gguf.quants.dequantize(gguf.quants.quantize(numbers, number), number)

    stored = write_mmproj(made(name).folder, tmp_path / "mmproj.gguf",
                          types=lambda each, numbers: kind if divides(each, numbers, size) else "F32")  # fmt: skip
    plain = write_mmproj(made(name).folder, tmp_path / "plain.gguf", change=rounded)
    assert torch.equal(rows(opened(stored)[1], name), rows(opened(plain)[1], name))
    assert not torch.equal(rows(opened(stored)[1], name), rows(open_tower(made(name).folder)[1], name))


def swap(tensors: Tensors) -> None:
    for each in [each for each in tensors if "ffn_up" in each]:
        other = each.replace("ffn_up", "ffn_down")
        tensors[each], tensors[other] = tensors[other], tensors[each]


def split(tensors: Tensors) -> None:
    for each in [each for each in tensors if "attn_qkv" in each]:
        for part, numbers in zip("qkv", np.split(tensors.pop(each), 3), strict=True):
            tensors[each.replace("qkv", part)] = numbers


def join(tensors: Tensors) -> None:
    for each in [each for each in tensors if "attn_q." in each]:
        parts = [tensors.pop(each.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[each.replace("attn_q", "attn_qkv")] = np.concatenate(parts)


def with_others(tensors: Tensors) -> None:
    for each in ("v.token_embd.img_break", "a.blk.0.attn_q.weight", "mm.a.fc.weight"):
        tensors[each] = np.ones((2, 24), np.float32)


@pytest.mark.parametrize(("name", "change", "keys"), [
    ("qwen2", swap, {"clip.vision.feed_forward_length": 0, "clip.use_gelu": False, "clip.use_silu": False}),
    ("gemma3", swap, {}),
    ("smolvlm", swap, {"clip.vision.preproc_image_size": None}),
    ("lfm2", join, {"clip.vision.image_size": None, "clip.vision.projection_dim": None}),
    ("qwen3", split, {"clip.vision.is_deepstack_layers": None}),
    ("qwen2_5", join, {"clip.has_audio_encoder": True}),
    ("mistral3", with_others, {"clip.projector_type": None, "clip.vision.projector_type": "pixtral"}),
    ("qwen3_5", with_others, {"clip.vision.projection_dim": None, "clip.vision.attention.layer_norm_epsilon": 0.5}),
])  # fmt: skip
def test_older_and_other_files_have_the_same(
    name: str, change: Callable[[Tensors], None], keys: dict[str, Any], made: Callable[[str], Made], tmp_path: Path
) -> None:
    _, usual = opened(write_mmproj(made(name).folder, tmp_path / "usual.gguf"))
    _, tower = opened(write_mmproj(made(name).folder, tmp_path / "mmproj.gguf", keys, change))
    assert torch.equal(rows(tower, name), rows(usual, name))


def test_a_projector_without_a_norm_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MADE["lfm2"][1], "projector_use_layernorm", False)
    (folder := tmp_path / "folder").mkdir()
    make("lfm2", folder)
    wanted, reference = open_tower(folder)
    assert wanted.tower.projector_eps == 0
    for path in write_mmproj(folder, tmp_path / "mmproj.gguf"), written(folder, tmp_path / "m.gguf"):
        spec, tower = opened(path)
        assert spec.tower.projector_eps == 0
        torch.testing.assert_close(rows(tower, "lfm2"), rows(reference, "lfm2"), rtol=1e-5, atol=1e-6)


def test_windows_that_a_file_says_nothing_of(made: Callable[[str], Made], tmp_path: Path) -> None:
    spec, _ = opened(write_mmproj(made("qwen2_5").folder, tmp_path / "mmproj.gguf", {"clip.vision.window_size": None}))
    assert (spec.tower.window, spec.tower.full) == (112 // 8, (1,))


BAD_KEYS: list[tuple[str, str, Any]] = [
    *[("qwen3", f"clip.vision.{key}", value) for key in ("embedding_length", "block_count", "patch_size", "attention.head_count")
      for value in (None, 0, "16", 2.5, True, [16], 1 << 31)],
    *[("qwen3", "clip.vision.embedding_length", value) for value in (39, 48)],
    *[("qwen3", "clip.vision.block_count", value) for value in (2, 4, 1025)],
    ("qwen2_5", "clip.vision.block_count", (1 << 31) - 1),
    *[("qwen3", "clip.vision.patch_size", value) for value in (3, 5)],
    *[("qwen3", "clip.vision.attention.head_count", value) for value in (3, 20)],
    *[("qwen3", "clip.vision.spatial_merge_size", value) for value in (0, 1, 3, "2", 1 << 30)],
    *[("qwen3", "clip.vision.is_deepstack_layers", value)
      for value in (True, [1, 0, 1], [True, True, True], [True] * 4, [False, True, True], "yes", [False, False, False])],
    *[("qwen3", f"clip.vision.image_{bound}_pixels", value) for bound in ("min", "max") for value in (0, "640", 1.5, [1])],
    ("qwen3", "clip.vision.image_max_pixels", 1 << 30),
    ("qwen3", "clip.vision.image_min_pixels", 1 << 25),
    *[("qwen3", "clip.vision.image_mean", value)
      for value in (0.5, [0.5], [0.5] * 4, ["a", "b", "c"], [1e30] * 3, [math.nan] * 3)],
    *[("qwen3", "clip.vision.image_std", value) for value in ([0.0] * 3, [-1.0] * 3, [math.inf] * 3)],
    *[("qwen3", "clip.use_gelu", value) for value in (1, "true")],
    ("qwen3", "clip.use_silu", True),
    ("qwen3", "clip.has_vision_encoder", 1),
    ("qwen3", "clip.projector_type", 5),
    *[("qwen2_5", "clip.vision.n_wa_pattern", value) for value in (None, 0, "2", [2], 2.0)],
    *[("qwen2_5", "clip.vision.window_size", value) for value in (0, 7, "16")],
    *[("gemma3", "clip.vision.image_size", value) for value in (None, 0, 47, 96, 1 << 20, "48")],
    *[("gemma3", "clip.vision.projector.scale_factor", value) for value in (0, 5, "3", 1 << 30)],
    *[("gemma3", "clip.vision.attention.layer_norm_epsilon", value) for value in (None, 0.0, -1.0, math.nan, "1e-6")],
    *[("mistral3", "clip.vision.image_size", value) for value in (None, 0, 7, 1 << 20)],
    *[("mistral3", "clip.vision.spatial_merge_size", value) for value in (None, 1, 0, 4)],
    *[("smolvlm", "clip.vision.image_size", value) for value in (None, 0, 47, 96, 1 << 20, "48")],
    *[("smolvlm", "clip.vision.preproc_image_size", value) for value in (0, 47, 1 << 20, "96", [96])],
    *[(name, "clip.vision.projector.scale_factor", value) for name in ("smolvlm", "lfm2") for value in (None, 0, 1, 3, 5, "2")],
    *[(name, "clip.vision.attention.layer_norm_epsilon", value) for name in ("smolvlm", "lfm2")
      for value in (None, 0.0, math.nan, "1e-6")],
    *[("lfm2", "clip.vision.image_resize_algo", value) for value in (3, True)],
    *[("minicpm", "clip.vision.projector.scale_factor", value) for value in (0, 1, 2, 3, 8, "4")],
    *[("minicpm", "clip.vision.wa_layer_indexes", value) for value in ([4], [-1], [1, 2], ["1"], 1)],
    *[("minicpm", "clip.vision.image_size", value) for value in (None, 0, 15, 1 << 20, "64")],
    *[("hunyuan", "clip.vision.spatial_merge_size", value) for value in (0, 1, 3, "2")],
    *[("hunyuan", "clip.vision.image_max_pixels", value) for value in (0, 63, 1 << 31, "64")],
    ("hunyuan", "clip.vision.attention.layer_norm_epsilon", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), BAD_KEYS)
def test_broken_metadata_are_refused(name: str, key: str, value: Any, made: Callable[[str], Made], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mmproj\.gguf") as caught:
        opened(write_mmproj(made(name).folder, tmp_path / "mmproj.gguf", {key: value}))
    assert caught.value.hint


@pytest.mark.parametrize(("name", "keys", "words"), [
    ("qwen3", {"clip.projector_type": "youtuvl"}, "images by the projector 'youtuvl' are not supported"),
    ("qwen3", {"clip.projector_type": None}, "images by the projector 'none'"),
    ("qwen3", {"clip.projector_type": "x" * 1000}, "images by the projector 'x{40}'"),
    ("qwen3", {"clip.has_vision_encoder": False}, "nothing in it sees"),
    ("lfm2", {"clip.vision.image_resize_algo": "nearest"}, "images resized by 'nearest' are not supported"),
])  # fmt: skip
def test_what_no_tower_here_can_be_is_told(
    name: str, keys: dict[str, Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        opened(write_mmproj(made(name).folder, tmp_path / "mmproj.gguf", keys))
    assert caught.value.hint


def test_a_mistral_without_what_joins_its_patches_is_no_pixtral(made: Callable[[str], Made], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 not part of it: mm\.input_norm\.weight"):
        opened(write_mmproj(made("mistral3").folder, tmp_path / "mmproj.gguf", change=lambda t: t.pop("mm.patch_merger.weight")))


def test_a_line_of_a_pixtral_ends_by_a_token_that_its_tokenizer_has(made: Callable[[str], Made], tmp_path: Path) -> None:
    for file in made("pixtral").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_byte_tokenizer(tmp_path, ("[IMG]", "[IMG_END]"))
    with pytest.raises(CheckpointError, match=r"has no \[IMG_BREAK\]"):
        written(tmp_path, tmp_path / "m.gguf")


QKV = "v.blk.1.attn_qkv.weight"
FLAT = np.ones(40, np.float32)


@pytest.mark.parametrize(("name", "change", "words"), [
    ("qwen3", lambda t: t.pop(QKV), f"1 missing: {QKV}"),
    ("qwen3", lambda t: t.update({QKV: t[QKV][:-1]}), rf"1 of the wrong shape: {QKV} \(expected \[120, 40\], found \[119, 40\]"),
    ("qwen3", lambda t: t.update({"v.blk.3.ln1.weight": FLAT}), r"1 not part of it: v\.blk\.3\.ln1\.weight"),
    ("qwen3", lambda t: t.pop("v.deepstack.2.fc1.bias"), r"1 missing: v\.deepstack\.2\.fc1\.bias"),
    ("qwen3", lambda t: t.pop("v.patch_embd.weight.1"), r"1 missing: v\.patch_embd\.weight\.1"),
    ("qwen3", lambda t: t.update({"v.patch_embd.weight": np.ones((40, 96), np.float32)}), "of the wrong shape"),
    ("qwen3", lambda t: t.pop("v.position_embd.weight"), r"tensor 'v\.position_embd\.weight' is missing"),
    ("qwen3", lambda t: t.update({"v.position_embd.weight": np.ones((24, 40), np.float32)}), "must be a square, not 24"),
    ("qwen3", lambda t: t.update({"mm.2.weight": FLAT}), r"tensor 'mm\.2\.weight' is no matrix: \[40\]"),
    ("qwen3", lambda t: t.pop("v.blk.0.ffn_up.weight"), r"tensor 'v\.blk\.0\.ffn_up\.weight' is missing"),
    ("qwen2", lambda t: t.update({"v.blk.0.ffn_up.weight": np.ones((7, 7), np.float32)}), "of the wrong shape"),
    ("gemma3", lambda t: t.pop("mm.input_projection.weight"), r"tensor 'mm\.input_projection\.weight' is missing"),
    ("gemma3", lambda t: t.update({"v.position_embd.weight": np.ones((100, 32), np.float32)}), r"expected \[144, 32\]"),
    ("mistral3", lambda t: t.clear(), "is missing|not support"),
    ("smolvlm", lambda t: t.pop("mm.model.fc.weight"), r"tensor 'mm\.model\.fc\.weight' is missing"),
    ("smolvlm", lambda t: t.update({"mm.model.fc.bias": np.ones(24, np.float32)}), r"1 not part of it: mm\.model\.fc\.bias"),
    ("smolvlm", lambda t: t.update({"mm.model.fc.weight": np.ones((24, 64), np.float32)}), r"expected \[24, 128\]"),
    ("smolvlm", lambda t: t.pop("v.post_ln.bias"), r"1 missing: v\.post_ln\.bias"),
    ("lfm2", lambda t: t.pop("v.position_embd.weight"), r"tensor 'v\.position_embd\.weight' is missing"),
    ("lfm2", lambda t: t.update({"v.position_embd.weight": np.ones((35, 32), np.float32)}), "must be a square, not 35"),
    ("lfm2", lambda t: t.pop("mm.1.weight"), r"tensor 'mm\.1\.weight' is missing"),
    ("lfm2", lambda t: t.pop("mm.2.bias"), r"1 missing: mm\.2\.bias"),
    ("lfm2", lambda t: t.pop("mm.input_norm.bias"), r"1 missing: mm\.input_norm\.bias"),
    ("lfm2", lambda t: t.pop("mm.input_norm.weight"), r"1 not part of it: mm\.input_norm\.bias"),
    ("lfm2", lambda t: t.update({"v.patch_embd.weight": np.ones((32, 48), np.float32)}), r"expected \[32, 3, 4, 4\]"),
])  # fmt: skip
def test_tensors_that_do_not_match_are_told(
    name: str, change: Callable[[Tensors], Any], words: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    with pytest.raises(NanovllmError, match=words) as caught:
        opened(write_mmproj(made(name).folder, tmp_path / "mmproj.gguf", change=change))
    assert caught.value.hint


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(value: float, made: Callable[[str], Made], tmp_path: Path) -> None:
    broken = write_mmproj(made("qwen3").folder, tmp_path / "mmproj.gguf", change=lambda t: t[QKV].fill(value))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        opened(broken)


class TextPart:
    """Of a model that sees, what writes; with as much of a transformers model as test_models_gguf asks for."""

    def __init__(self, model: Any) -> None:
        self.config = config = model.config.text_config
        if not hasattr(config, "head_dim"):
            config.head_dim = config.hidden_size // config.num_attention_heads
        seeing = "visual.", "vision_tower.", "vision_model.", "connector.", "projector."
        self._parameters = [(name.replace("language_model.", "").replace("text_model.", ""), parameter)
                            for name, parameter in model.named_parameters() if not any(each in name for each in seeing)]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._parameters

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []


TEXTS: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "qwen2-vl": ("qwen2vl", nothing), "qwen2.5-vl": ("qwen2vl", nothing), "qwen3-vl": ("qwen3vl", nothing),
    "qwen3.5": ("qwen35", delta), "gemma3": ("gemma3", gemma3), "mistral3": ("llama", window),
    "pixtral": ("llama", window),
    "smolvlm": ("llama", nothing), "lfm2-vl": ("lfm2", taps),
}  # fmt: skip


def random_seeing(name: str) -> Any:
    """Of a text that files can say, as with the usual scale of a Gemma's scores."""
    config = MODELS[name]
    if (text := {"gemma3": "gemma3", "lfm2-vl": "lfm2"}.get(name)) is not None:
        config = type(config)(**config.to_dict() | {"text_config": CASES[text][1].to_dict()})
    return random_model(config, auto=AutoModelForImageTextToText)


def both_files(name: str, folder: Path, tmp_path: Path, model: Any, **keys: Any) -> tuple[Path, Path]:
    """Text and tower of a model in a folder."""
    arch, add = TEXTS[name]

    def say(writer: Any, config: Any) -> None:
        add(writer, config)
        if name.startswith("qwen"):
            writer.add_rope_dimension_sections([*config.rope_parameters.get("mrope_section", [11, 11, 10]), 0])
        for key, value in keys.items():
            writer.add_uint32(f"{arch}.{key}", value)

    text = write_text(tmp_path / "text.gguf", arch, TextPart(model), say)
    return text, write_mmproj(folder, tmp_path / "mmproj.gguf")


@pytest.mark.parametrize("name", TEXTS)
def test_what_follows_images_is_what_the_folder_says(name: str, tmp_path: Path) -> None:
    model = random_seeing(name)
    folder = save(model, tmp_path / "folder")
    deep = {"n_deepstack_layers": 2} if name == "qwen3-vl" else {}
    text, mmproj = both_files(name, folder, tmp_path, model, **deep)
    answers = []
    for path, settings in (folder, {}), (text, {"mmproj": str(mmproj)}):
        worker = worker_for(path, dtype="float32", **settings)
        assert worker.sight is not None
        vision = worker.sight.senses.vision
        if not answers:
            prompt = prompt_with(vision, parts_of(vision), model.config.image_token_id)
        answers += run(engine_for(worker), [(prompt, greedy(12, logprobs=0))])
    folder_says, file_says = answers
    assert file_says.outputs[0].token_ids == folder_says.outputs[0].token_ids
    assert logprobs_of(file_says) == pytest.approx(logprobs_of(folder_says), abs=1e-3)
    worker = worker_for(text, dtype="float32")
    assert worker.sight is None
    blind = run(engine_for(worker), [(list(prompt), greedy(12, logprobs=0))])[0]
    assert logprobs_of(blind) != pytest.approx(logprobs_of(folder_says), abs=1e-3)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A Qwen3-VL's folder, text and tower."""
    folder = tmp_path_factory.mktemp("seeing")
    model = random_seeing("qwen3-vl")
    return save(model, folder / "folder"), *both_files("qwen3-vl", folder / "folder", folder, model)


def belongs(mmproj: Path, model: Path, width: int = 48) -> VisionSpec:
    with open_checkpoint(model) as checkpoint:
        vision = checked_mmproj(mmproj, checkpoint, width).vision
    assert vision is not None
    return vision


def test_a_file_of_another_model_is_refused(seeing: tuple[Path, Path, Path], made: Callable[[str], Made], tmp_path: Path) -> None:
    folder, text, mmproj = seeing
    assert belongs(mmproj, text).tower.deep == (0, 2)
    gemma = write_mmproj(made("gemma3").folder, tmp_path / "gemma.gguf")
    deeper = write_text(tmp_path / "deeper.gguf", "qwen3vl", random_model(CASES["qwen3"][1]),
                        lambda writer, config: writer.add_uint32("qwen3vl.n_deepstack_layers", 3))  # fmt: skip
    for others, model, width, words in [
        (gemma, text, 24, "is of models of the kind gemma3, not of qwen3vl"),
        (mmproj, text, 47, "makes rows of 48 numbers for a model of 47"),
        (mmproj, deeper, 48, "adds rows behind 2 layers of a model, not 3"),
        (mmproj, folder, 48, "is no GGUF model"),
        (text, text, 48, "is a model of the architecture 'qwen3vl', not what one sees by"),
        (folder, text, 48, "is a model, not what one sees by"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            belongs(others, model, width)
        assert "mmproj" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "arch", "other"), [
    ("smolvlm", "llama", "lfm2"), ("lfm2", "lfm2", "llama"), ("lfm2", "lfm2moe", "qwen3vl"),
])  # fmt: skip
def test_a_file_is_of_texts_of_its_family(name: str, arch: str, other: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    mmproj = write_mmproj(made(name).folder, tmp_path / "mmproj.gguf")
    text = SimpleNamespace(format="gguf", config={"general.architecture": arch})
    assert checked_mmproj(mmproj, text, 24).vision.tower.out_size == 24
    text.config["general.architecture"] = other
    with pytest.raises(UsageError, match=f"is of models of the kind .*, not of {other}"):
        checked_mmproj(mmproj, text, 24)


def test_what_a_model_sees_by_is_no_model(seeing: tuple[Path, Path, Path]) -> None:
    with pytest.raises(UnsupportedError, match="what a model sees by, not a model") as caught:
        open_checkpoint(seeing[2])
    assert f"--mmproj {seeing[2]}" in str(caught.value.hint)


NAMES = {
    "alone": (["m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf"),
    "of 16 bits before others": (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "m.gguf", "mmproj-F16.gguf"),
    "bfloat16 first": (["mmproj-F16.gguf", "mmproj-BF16.gguf"], "m.gguf", "mmproj-BF16.gguf"),
    "whatever the case, anywhere in the name": (["m-mmproj-f16.gguf", "x-mmproj-q8_0.gguf"], "m.gguf", "m-mmproj-f16.gguf"),
    "of two models": (["mmproj-a-F16.gguf", "mmproj-b-F16.gguf"], "m.gguf", None),
    "none of these is better": (["mmproj-Q8_0.gguf", "mmproj-Q4_0.gguf"], "m.gguf", None),
    "the nearest": (["mmproj-F16.gguf", "a/mmproj-Q8_0.gguf", "b/mmproj-F16.gguf"], "a/m.gguf", "a/mmproj-Q8_0.gguf"),
    "around it": (["mmproj-F16.gguf", "b/mmproj-F16.gguf"], "a/Q4/m-00001-of-00002.gguf", "mmproj-F16.gguf"),
    "not elsewhere": (["b/mmproj-F16.gguf", "mmproj-F16.safetensors", "mmproj.txt"], "m.gguf", None),
}


@pytest.mark.parametrize("case", NAMES)
def test_of_several_files_one_is_meant(case: str) -> None:
    names, model, wanted = NAMES[case]
    assert files.mmproj_beside(names, model) == wanted
    assert not any(map(files.quants, [[name] for name in names if "mmproj" in name]))


def test_a_repository_has_it_beside_the_model() -> None:
    names = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "../mmproj-BF16.gguf"]
    chosen = files.choose_seeing(names, "a/m", quant="q8_0")
    assert (chosen.files, chosen.entry, chosen.mmproj) == (("m-Q8_0.gguf", "mmproj-F16.gguf"), "m-Q8_0.gguf", "mmproj-F16.gguf")
    assert files.choose(names, "a/m", quant="q8_0").files == ("m-Q8_0.gguf",)
    assert files.choose_seeing(["config.json", "model.safetensors", "mmproj-F16.gguf"], "a/m").mmproj is None
    assert files.choose_mmproj(names, "a/m").files == ("mmproj-F16.gguf",)
    assert files.choose_mmproj(names, "a/m", quant="F32").files == ("mmproj-F32.gguf",)
    assert files.choose_mmproj(names, "a/m", file="mmproj-F32.gguf").files == ("mmproj-F32.gguf",)
    for quant, words in ("q4_k", "no file mmproj-….gguf of q4_k"), (None, "several files mmproj-….gguf"):
        with pytest.raises(UsageError, match=words):
            files.choose_mmproj(["mmproj-a-F16.gguf", "mmproj-b-F16.gguf"], "a/m", quant=quant)


def check_it_sees_as_its_folder_does(folder: Path, output: Path, images: Sequence[Part] = ()) -> None:
    """Converted to float32, with what it sees by beside it. images: in a prompt, others than of any family."""
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        convert.write(checkpoint, plan, output)
        assert plan.tower is not None
        wrote = plan.tower.write(output, replace=False, progress=NullProgress())
    answers: list[Any] = []
    prompt = TokenIds()
    for path, own in (folder, {}), (output, {"mmproj": str(wrote.path)}):
        worker = worker_for(path, dtype="float32", **own)
        assert worker.sight is not None
        vision = worker.sight.senses.vision
        if not answers:
            prompt = prompt_with(vision, [5, *images, 6] if images else parts_of(vision), 4096)
        answers += run(engine_for(worker), [(prompt, greedy(12, logprobs=0))])
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    assert logprobs_of(answers[1]) == pytest.approx(logprobs_of(answers[0]), abs=1e-3)


def with_merges(folder: Path, words: list[str] = WORDS, text: str = "text_config") -> Path:
    """The same model with more tokens, whose tokenizer a file can hold. text: the section of its config that says how many."""
    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens(words)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config[text]["vocab_size"] = backend.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        tensors[name] = torch.randn(backend.get_vocab_size(), tensors[name].shape[1], generator=torch.Generator().manual_seed(3))
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_sees_by_no_file(folder: Path) -> None:
    """What it writes becomes a file, and of what it sees by is said that none does."""
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
    assert plan.tower is None
    assert any("no file is written of what such a model sees by" in note for note in plan.notes)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and a file of its text, beside which there is what it sees by."""
    folder = with_merges(seeing_model(tmp_path_factory.mktemp("chatting")))
    place = tmp_path_factory.mktemp("files")
    with open_checkpoint(folder) as checkpoint:
        made = convert.plan(checkpoint, "gguf", "f32")
        convert.write(checkpoint, made, place / "m-F32.gguf")
    sizes = {"clip.vision.image_min_pixels": 16 * 16, "clip.vision.image_max_pixels": 64 * 64}
    write_mmproj(folder, place / "mmproj-F32.gguf", sizes)
    return folder, place / "m-F32.gguf"


ASKED = [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": data_url(png())}}, {"type": "text", "text": "What is this?"},
]}]  # fmt: skip


class Heard(NullProgress):
    """Notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def load(path: Path, progress: Heard | None = None, **settings: Any) -> LLM:
    return LLM(path, config=EngineConfig(threads=2, num_blocks=64, dtype="float32", **settings), progress=progress)


def answered(llm: LLM) -> tuple[int, ...]:
    return llm.chat(ASKED, greedy(12))[0].outputs[0].token_ids


def test_a_file_is_asked_as_its_folder_is(chatting: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = chatting
    wanted = answered(load(folder))
    beside, heard = text.with_name("mmproj-F32.gguf"), Heard()
    llm = load(text, heard)
    assert (llm.mmproj, heard.notes) == (str(beside), ["with images by mmproj-F32.gguf"])
    assert answered(llm) == wanted
    alone = tmp_path / "m.gguf"
    alone.symlink_to(text)
    for named in (beside, beside.parent):
        heard = Heard()
        llm = load(alone, heard, mmproj=str(named))
        assert (llm.mmproj, heard.notes) == (str(beside), [])
        assert answered(llm) == wanted
    assert answered(load(text, draft_model=str(folder))) == wanted
    for blind in load(alone), load(text, mmproj_auto=False):
        assert (blind.mmproj, blind.vision) == (None, None)
        with pytest.raises(UnsupportedError, match="reads no images") as caught:
            answered(blind)
        assert "--mmproj" in str(caught.value.hint)


def test_what_lies_beside_a_model_and_is_anothers_is_left_there(
    chatting: tuple[Path, Path], made: Callable[[str], Made], tmp_path: Path
) -> None:
    text = tmp_path / "m.gguf"
    text.symlink_to(chatting[1])
    beside = write_mmproj(made("gemma3").folder, tmp_path / "mmproj-F32.gguf")
    llm, heard = load(text, heard := Heard()), heard
    assert llm.vision is None
    assert heard.notes == [f"images are not read: {beside} is of models of the kind gemma3, not of qwen3vl"]
    with pytest.raises(UsageError, match="is of models of the kind gemma3"):
        load(text, mmproj=str(beside))
    beside.write_bytes(b"GGUF")
    llm, heard = load(text, heard := Heard()), heard
    assert llm.vision is None
    assert heard.notes[0].startswith(f"images are not read: {beside}: ")
    with pytest.raises(CheckpointError):
        load(text, mmproj=str(beside))
    write_mmproj(made("qwen2").folder, beside, {"clip.projector_type": "youtuvl"})
    with pytest.raises(UnsupportedError, match="youtuvl"):
        load(text, mmproj=str(beside))
    with pytest.raises(ModelNotFoundError, match=r"no mmproj \./nowhere\.gguf"):
        load(text, mmproj="./nowhere.gguf")


def test_a_vocabulary_without_its_tokens_is_another_models(chatting: tuple[Path, Path]) -> None:
    text = chatting[1]
    config = EngineConfig(mmproj=str(text.with_name("mmproj-F32.gguf")))
    with open_checkpoint(text) as checkpoint:
        assert with_mmproj(config, None, checkpoint, 48, ["<|image_pad|>"], NullProgress()) is config
        with pytest.raises(UsageError, match=r"tokens <\|image_pad\|>, which this one lacks"):
            with_mmproj(config, None, checkpoint, 48, ["<|vision_start|>"], NullProgress())


def test_a_gemmas_file_may_lack_the_token_of_images(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As those of Google and others do: theirs ends in front of it."""
    spec, _ = opened(write_mmproj(made("gemma3").folder, tmp_path / "mmproj.gguf"))
    whole, cut = ({each: place for place, each in enumerate(("<pad>", "<start_of_image>", "<end_of_image>", *more))}
                  for more in (["<image_soft_token>"], []))  # fmt: skip
    one = Image.of(48, 48, bytes(3 * 48 * 48))
    for tokens, part in (whole, "<image_soft_token>"), (cut, "<pad>"):
        tokenizer: Any = SimpleNamespace(control_tokens=tokens)
        known = in_vocabulary(Senses(spec), tokenizer)
        text, *_ = with_marks("a<start_of_image>b", [], {"images": known.all[0].tokens}, [Picture((one,))])
        assert text == f"a\n\n<start_of_image>{part}<end_of_image>\n\nb"
        ids = with_images([7, tokens[part], 8], tokenizer, known, [Picture((one,))])
        assert list(ids) == [7, *[tokens[part]] * 16, 8]
        assert known.fits(ids.images, len(ids))


def test_in_the_cache_it_is_found_around_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0123456789" * 4)
    model, mmproj = snapshot / "Q4_0" / "m-Q4_0.gguf", snapshot / "mmproj-F16.gguf"
    model.parent.mkdir(parents=True)
    (tmp_path / "models--org--m" / "refs").mkdir()
    (tmp_path / "models--org--m" / "refs" / "main").write_text(snapshot.name)
    model.write_bytes(b"four")
    mmproj.write_bytes(b"sixteen")
    seeing, blind = files_for(EngineConfig()), files_for(EngineConfig(mmproj_auto=False))
    found = resolve("org/m:Q4_0", offline=True, pick=seeing)
    assert (found.path, found.mmproj, found.num_bytes) == (model, mmproj, 11)
    assert resolve(str(model)).mmproj == mmproj
    found = resolve("org/m:Q4_0", offline=True, pick=blind)
    assert (found.path, found.mmproj, found.num_bytes) == (model, None, 4)
    assert files_for(EngineConfig(mmproj="x")) is blind
    listing = Listing(snapshot.name, {"Q4_0/m-Q4_0.gguf": 4, "mmproj-F16.gguf": 7, "mmproj-F32.gguf": 9}, {})
    monkeypatch.setattr(hub, "list_repo", lambda *args, **kwargs: listing)
    for pick, wanted in (seeing, ("Q4_0/m-Q4_0.gguf", "mmproj-F16.gguf")), (blind, ("Q4_0/m-Q4_0.gguf",)):
        remote = locate("org/other", pick=pick)
        assert isinstance(remote, RemoteModel)
        assert remote.weights.files == wanted


# ---- written ----


def written(folder: Path, output: Path, outtype: str = "f32") -> Path:
    """Of a folder's tower, for a model in that file."""
    with open_checkpoint(folder) as checkpoint:
        made = tower_file(checkpoint, outtype, "m")
        assert made is not None
        return made.write(output, replace=False, progress=NullProgress()).path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_becomes_the_file_that_llama_cpp_makes(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    reference = gguf.GGUFReader(write_mmproj(made(name).folder, tmp_path / "reference.gguf"))
    found = gguf.GGUFReader(written(made(name).folder, tmp_path / "m-Q4_0.gguf"))
    tensors, wanted = ({tensor.name: tensor for tensor in file.tensors} for file in (found, reference))
    wanted.pop("v.view_seperator", None)  # nothing reads it
    assert tensors.keys() == wanted.keys()
    assert [each for each in wanted if not np.array_equal(tensors[each].data, wanted[each].data)] == []
    fields = {key: field.contents() for key, field in found.fields.items()}
    sizes = [("clip.vision.image_size", each) for each in ("qwen2", "exaon", "glm_o")]  # which mean nothing
    wrong = {"qwen": {"clip.vision.feed_forward_length", "clip.vision.attention.layer_norm_epsilon"},
             "glm4": {"clip.vision.feed_forward_length"}}.get(name[:4], set())  # fmt: skip
    for key, field in reference.fields.items():
        if not key.startswith("GGUF.") and key not in wrong and (key, name[:5]) not in sizes:
            assert fields[key] == pytest.approx(field.contents()), key
    spec, _ = opened(tmp_path / "mmproj-m-F32.gguf")
    assert replace(spec.size, resample="bicubic") == replace(open_tower(made(name).folder)[0].size, resample="bicubic")


@pytest.mark.parametrize(("outtype", "dtype", "plain", "convolved"), [
    ("auto", torch.bfloat16, "BF16", "F32"), ("auto", torch.float16, "F16", "F16"), ("q4_k", torch.bfloat16, "BF16", "F32"),
    ("f16", torch.bfloat16, "F16", "F16"), ("bf16", torch.float32, "BF16", "F32"),
])  # fmt: skip
def test_numbers_are_written_as_the_folder_has_them_or_as_asked(
    outtype: str, dtype: torch.dtype, plain: str, convolved: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    for name in ("gemma3", "mistral3", "smolvlm", "lfm2"):
        (folder := tmp_path / name).mkdir()
        for file in made(name).folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        save_file({each: tensor.to(dtype) for each, tensor in tensors.items()}, folder / "model.safetensors")
        path = written(folder, tmp_path / f"{name}.gguf", outtype)
        assert path.name == f"mmproj-{name}-{plain}.gguf"
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
        others = ("patch_embd.w", "patch_merger.w", "input_projection.w")
        by_others = {kind for each, kind in kinds.items() if any(part in each for part in others)}
        assert by_others == {"F32" if name == "smolvlm" else convolved}
        assert {kind for each, kind in kinds.items() if ("attn" in each or "mm.model" in each) and "weight" in each} == {plain}
        assert {kind for each, kind in kinds.items() if "bias" in each or "ln" in each or "position" in each} <= {"F32"}
        pair = (open_tower(folder, torch.float32)[1], opened(path)[1])
        torch.testing.assert_close(*(rows(tower, name) for tower in pair), rtol=0.05, atol=0.05)


def test_a_converted_model_sees_as_its_folder_does(chatting: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = chatting
    output = tmp_path / "m-F32.gguf"
    output.symlink_to(text)
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        assert plan.tower is not None
        assert not any("sees" in note for note in plan.notes)
        wrote = plan.tower.write(output, replace=False, progress=NullProgress())
        assert wrote == (tmp_path / "mmproj-m-F32.gguf", True, "sees")
        again = plan.tower.write(output, replace=False, progress=NullProgress())
        assert (again.is_new, str(again)) == (False, f"what it sees by: {wrote.path}, which is there already, and stays")
        assert plan.tower.write(output, replace=True, progress=NullProgress()).is_new
        assert plan.tower.path(Path("parts")) == Path("parts/mmproj-parts-F32.gguf")
    assert answered(load(output)) == answered(load(folder))
    with open_checkpoint(text) as checkpoint:
        back = convert.plan(checkpoint, "hf")
    assert "positions in images: it will read texts alone" in back.notes


@pytest.mark.parametrize(("name", "settings", "vision", "words"), [
    ("qwen3", {"resample": 2}, {}, "a GGUF file can't say this of a tower: resample"),
    ("qwen2_5", {}, {"fullatt_block_indexes": [0, 1]}, None),
    ("qwen2_5", {}, {"fullatt_block_indexes": [1, 2]}, "can't say this of a tower: full"),
    ("qwen3", {}, {"rope_parameters": {"rope_theta": 100.0}}, "can't say this of a tower: theta"),
    ("mistral3", {}, {"hidden_act": "gelu"}, None),
    ("gemma3", {}, {"hidden_act": "gelu"}, "can't say this of a tower: activation"),
    ("qwen3", {"do_normalize": False}, {}, "do_normalize false is not supported"),
    ("qwen3", {}, {"hidden_size": 0}, "'hidden_size' must be a whole number"),
    ("smolvlm", {"resample": 3}, {}, "can't say this of a tower: resample"),
    ("smolvlm", {"do_image_splitting": False}, {}, "can't say this of a tower: most_tiles"),
    ("smolvlm", {}, {"hidden_act": "gelu"}, "can't say this of a tower: activation"),
    ("lfm2", {"tile_size": 256}, {}, "can't say this of a tower: tile"),
    ("lfm2", {"min_tiles": 1}, {}, "can't say this of a tower: least_tiles"),
    ("lfm2", {"max_tiles": 9, "max_image_tokens": 128}, {}, "can't say this of a tower: max_pixels, most_tiles"),
    ("lfm2", {"min_image_tokens": 16}, {}, "can't say this of a tower: min_pixels"),
    ("lfm2", {"max_pixels_tolerance": 1.5}, {}, "can't say this of a tower: tolerance"),
    ("lfm2", {"do_image_splitting": False}, {}, "can't say this of a tower: most_tiles"),
    ("lfm2", {"resample": 3}, {"hidden_act": "gelu"}, "can't say this of a tower: activation, resample"),
])  # fmt: skip
def test_a_tower_that_no_file_can_say_is_left_out(
    name: str, settings: dict[str, Any], vision: dict[str, Any], words: str | None, made: Callable[[str], Made], tmp_path: Path
) -> None:
    for file in made(name).folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= vision
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | settings))
    if words is None and vision == {"fullatt_block_indexes": [0, 1]}:
        words = "can't say this of a tower: full"  # of three layers, each first one would be
    if words is None:
        spec, _ = opened(written(tmp_path, tmp_path / "m.gguf"))
        assert spec.tower.activation == "gelu"
        return
    with pytest.raises((UnsupportedError, CheckpointError), match=words):
        written(tmp_path, tmp_path / "m.gguf")
    if name == "qwen3" and settings:
        (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
        with open_checkpoint(tmp_path) as checkpoint:
            plan = tower_or_note(checkpoint, "f32", "m")
        assert plan[0] is None
        assert words in plan[1][0]


def test_it_lies_beside_a_file_whatever_that_is_called_and_among_parts(seeing: tuple[Path, Path, Path], tmp_path: Path) -> None:
    with open_checkpoint(seeing[0]) as checkpoint:
        tower = tower_file(checkpoint, "f32", "m")
    assert tower is not None
    (tmp_path / "m").touch()
    for output, folder in ((tmp_path / "m", tmp_path), (tmp_path / "m.gguf", tmp_path), (tmp_path / "parts", tmp_path / "parts")):
        assert tower.path(output).parent == folder
