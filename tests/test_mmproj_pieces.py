"""Models that cut images into pieces, converted: a GGUF file and what it sees by against the folder that both are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from engines import greedy, random_model, save
from nanovllm_cli import LLM, EngineConfig, data_url
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
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
    folder, output = model_of(name, tmp_path / "folder"), tmp_path / "m-F32.gguf"
    with open_checkpoint(folder) as checkpoint:
        plan = convert.plan(checkpoint, "gguf", "f32")
        assert plan.tower is not None
        assert [note for note in plan.notes if "sees" in note] == []
        convert.write(checkpoint, plan, output)
        plan.tower.write(output, replace=False, progress=NullProgress())
    of_folder, of_files = (answers(path, name) for path in (folder, output))
    for (prompt, tokens, logprobs), wanted in zip(of_files, of_folder, strict=True):
        assert (prompt, tokens) == wanted[:2]
        assert logprobs == pytest.approx(wanted[2], abs=1e-3)
    assert of_files[0][2] != pytest.approx(of_files[1][2], abs=1e-3)  # of another image
