"""Models that cut images into pieces, converted: a GGUF file and what it sees by against the folder that both are made of, and
against llama.cpp. llama-cpp-python is no dependency: without it, that is skipped."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from engines import greedy, random_model, save
from nanovllm_cli import LLM, EngineConfig, data_url
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.mmproj import load_mmproj, open_mmproj, read_mmproj
from seeing import png
from test_convert import TINY
from test_image_pieces import TEMPLATE
from test_mmproj import random_seeing
from test_vision import MODELS, logprobs_of

WORDS = {
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"],
    "lfm2-vl": ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "smolvlm": {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}, "resample": 1}, "lfm2-vl": {},
}  # fmt: skip
HEIGHT, WIDTH = 550, 1100
NUM_TOKENS = {"smolvlm": (2 + 1) * 4 * 4, "lfm2-vl": 2 * 16 * 16 + 11 * 22}
"""Of an image of that size: of two pieces and of all of it."""


def model_of(name: str, folder: Path) -> Path:
    """With a tokenizer that a GGUF file can hold, and patches with which an LFM2's pieces have few tokens."""
    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens(WORDS[name])
    config = random_seeing(name).config.to_dict()
    config["image_token_id"] = backend.token_to_id("<image>")
    config["text_config"] |= {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 2048}
    if name == "lfm2-vl":
        config["vision_config"] |= {"patch_size": 16, "vision_use_head": False}
    save(random_model(type(MODELS[name])(**config), auto=AutoModelForImageTextToText), folder)
    backend.save(str(folder / "tokenizer.json"))
    told = json.loads((TINY / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[name]))
    return folder


def converted(name: str, place: Path) -> tuple[Path, Path, Path]:
    """The folder, its GGUF file and what that sees by."""
    folder, output = model_of(name, place / "folder"), place / "m-F32.gguf"
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        assert plan.tower is not None
        assert [note for note in plan.notes if "sees" in note] == []
        convert.write(checkpoint, plan, output)
        return folder, output, plan.tower.write(output, replace=False, progress=NullProgress()).path


def answers(path: Path, name: str) -> list[Any]:
    """To a question about each of two images: the prompt, the answer and its logprobs."""
    found = []
    with LLM(path, config=EngineConfig(threads=2, dtype="float32")) as llm:
        for seed in (0, 1):
            image = {"type": "image_url", "image_url": {"url": data_url(png(WIDTH, HEIGHT, seed))}}
            said = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
            prompt = list(llm.encode_chat(said))
            assert prompt.count(llm.tokenizer.control_tokens["<image>"]) == NUM_TOKENS[name]
            (answer,) = llm.chat(said, greedy(6, logprobs=0))
            found.append((prompt, answer.outputs[0].token_ids, logprobs_of(answer)))
    return found


@pytest.mark.parametrize("name", WORDS)
def test_a_converted_model_sees_pieces_as_its_folder_does(name: str, tmp_path: Path) -> None:
    folder, output, _ = converted(name, tmp_path)
    of_folder, of_files = (answers(path, name) for path in (folder, output))
    for (prompt, tokens, logprobs), wanted in zip(of_files, of_folder, strict=True):
        assert (prompt, tokens) == wanted[:2]
        assert logprobs == pytest.approx(wanted[2], abs=1e-3)
    assert of_files[0][2] != pytest.approx(of_files[1][2], abs=1e-3)  # of another image


def rows_by_llama_cpp(text: Path, mmproj: Path, image: bytes) -> list[np.ndarray]:
    """Of each piece of an image, in the order of the prompt."""
    import llama_cpp as lib
    from llama_cpp import mtmd_cpp as mtmd

    model = lib.llama_model_load_from_file(str(text).encode(), lib.llama_model_default_params())
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.n_threads = False, 2
    context = mtmd.mtmd_init_from_file(str(mmproj).encode(), model, settings)
    assert context, "llama.cpp takes these files"
    stored = (ctypes.c_uint8 * len(image)).from_buffer_copy(image)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(mtmd.mtmd_helper_bitmap_init_from_buf(context, stored, len(image), False))
    said = mtmd.mtmd_input_text(marker := mtmd.mtmd_default_marker(), len(marker), True, True)
    chunks = mtmd.mtmd_input_chunks_init()
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(said), bitmaps, 1) == 0
    found = []
    for place in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, place)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            assert mtmd.mtmd_encode_chunk(context, chunk) == 0
            shape = mtmd.mtmd_input_chunk_get_n_tokens(chunk), lib.llama_model_n_embd(model)
            numbers = ctypes.cast(mtmd.mtmd_get_output_embd(context), ctypes.POINTER(ctypes.c_float))
            found.append(np.ctypeslib.as_array(numbers, shape).copy())
    return found


@pytest.mark.parametrize(("name", "width", "height", "rows", "columns"), [
    ("smolvlm", 64, 32, 1, 2), ("smolvlm", 64, 64, 2, 2), ("lfm2-vl", 1024, 1024, 2, 2), ("lfm2-vl", 480, 512, 0, 0),
])  # fmt: skip
def test_rows_of_pieces_are_llama_cpps(name: str, width: int, height: int, rows: int, columns: int, tmp_path: Path) -> None:
    """To 2e-3: it multiplies in float16. The pieces have their size already, all of it is resized on either side."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    image = png(width, height)
    _, text, mmproj = converted(name, tmp_path)
    expected = rows_by_llama_cpp(text, mmproj, image)
    with open_mmproj(mmproj) as file:
        spec = read_mmproj(file).vision
        tower = load_mmproj(file, spec, torch.float32)
    picture = read_image(image, spec, "it")
    assert (picture.rows, picture.columns) == (rows, columns)
    found = [tower(each).rows.numpy() for each in picture.images]
    assert [each.shape for each in found] == [each.shape for each in expected]
    pieces = rows * columns or 1
    for ours, theirs in zip(found[:pieces], expected[:pieces], strict=True):
        assert np.linalg.norm(ours - theirs, axis=1).max() < 2e-3 * np.linalg.norm(theirs, axis=1).min()
    assert len({each.tobytes() for each in found}) == len(found)
