"""EXAONE 4.5: its config as transformers has it, what is refused, pixels, and files. Rows and answers: test_towers.py,
test_vision.py, test_mmproj.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, Exaone4_5_Config

from engines import random_model, save
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.registry import hf_family
from seeing import WORDS
from test_image_pieces import read
from test_mmproj import check_it_sees_as_its_folder_does, with_merges
from test_vision import MODELS

_PLAIN: dict[str, Any] = Exaone4_5_Config(
    vision_config={"hidden_size": 2048, "num_heads": 32, "out_hidden_size": 4096, "depth": 28},
    text_config={"model_type": "exaone4", "hidden_size": 4096},
).to_dict()
EXAONE = _PLAIN | {"architectures": ["Exaone4_5_ForConditionalGeneration"]}


def changed(**vision: Any) -> dict[str, Any]:
    return EXAONE | {"vision_config": EXAONE["vision_config"] | vision}


@pytest.mark.parametrize("kind", ["exaone4", "exaone4_5_text"])
def test_an_exaone_as_transformers_has_it(kind: str) -> None:
    config = EXAONE | {"text_config": EXAONE["text_config"] | {"model_type": kind}}
    spec = read(config)
    tower = spec.tower
    assert (tower.num_heads, tower.key_heads, tower.head_dim, tower.qkv_rows) == (32, 8, 64, 48 * 64)
    assert (tower.cell, tower.window, tower.full, tower.eps) == (28, 4, (7, 15, 23), 1e-6)
    assert (spec.has_grid, spec.tokens.token, spec.tokens.before) == (False, "<|image_pad|>", "")
    assert (spec.size.kind, spec.size.min_pixels, hf_family(config).name) == ("area", 56 * 56, "exaone4")


def test_what_no_tower_here_can_be() -> None:
    with pytest.raises(UnsupportedError, match="a tower of the kind 'qwen2_5_vl'"):
        read(changed(model_type="qwen2_5_vl"))
    for key_heads, words in (3, "32 heads of queries can't share 3 of keys"), (0, "'num_key_value_heads' must be"):
        with pytest.raises(CheckpointError, match=words):
            read(changed(num_key_value_heads=key_heads))
    with pytest.raises(CheckpointError, match="makes rows of 4095 numbers for a decoder of 4096"):
        read(changed(out_hidden_size=4095))


def test_converted_it_reads_images_as_its_folder_does(tmp_path: Path) -> None:
    folder = save(random_model(MODELS["exaone4.5"], auto=AutoModelForImageTextToText), tmp_path / "folder")
    check_it_sees_as_its_folder_does(with_merges(folder, WORDS), tmp_path / "m-F32.gguf")
