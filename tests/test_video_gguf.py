"""Videos by what a GGUF model sees by, in a file of its own, whose patches' kernel is in two: against the folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.text.image_tokens import in_vocabulary
from nanovllm_cli.vision_spec import Image
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.convert_mmproj import tower_file
from test_mmproj import opened
from test_towers import all_rows, make, open_tower
from towers_gguf import write_mmproj

QWENS = ["qwen2", "qwen2_5", "qwen3", "qwen3_5"]


def film(frames: int = 2) -> Image:
    pixels = np.random.default_rng(frames).integers(0, 256, (frames, 24, 40, 3), np.uint8)
    return Image.of(24, 40, pixels.tobytes(), frames=frames)


@pytest.mark.parametrize("name", QWENS)
def test_rows_of_two_frames_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path).folder
    wanted, reference = open_tower(folder)
    expected = all_rows(reference(film()))
    with open_checkpoint(folder) as checkpoint:
        written = tower_file(checkpoint, "f32", "it")
        assert written is not None
        ours = written.write(tmp_path / "model.gguf", replace=False, progress=NullProgress()).path
    for path in (write_mmproj(folder, tmp_path / "mmproj.gguf"), ours):
        spec, tower = opened(path)
        torch.testing.assert_close(all_rows(tower(film())), expected, rtol=1e-5, atol=1e-6)
        assert spec.video is not None
        assert wanted.video is not None
        assert (spec.video.step, spec.video.sampling, spec.video.wording) == (2, wanted.video.sampling, wanted.video.wording)
    turned = Image.of(24, 40, film().pixels[len(film().pixels) // 2 :] + film().pixels[: len(film().pixels) // 2], frames=2)
    assert not torch.allclose(all_rows(reference(turned)), expected, atol=1e-3), "which frame is the first one counts"


def test_an_image_is_a_film_that_stands_still(tmp_path: Path) -> None:
    _, tower = open_tower(make("qwen3", tmp_path).folder)
    one = film(1)
    twice = Image.of(one.height, one.width, one.pixels * 2, frames=2)
    torch.testing.assert_close(all_rows(tower(twice)), all_rows(tower(one)), rtol=1e-4, atol=1e-5)
    assert one.digest != twice.digest


def test_files_that_do_not_say_how_videos_are_told_have_none(tmp_path: Path) -> None:
    """GLM-4.1V's and 4.6V's files are alike, and so are those of Qwen3-VL and Qwen3-Omni, but for their vocabularies."""
    spec, _ = opened(write_mmproj(make("glm4v", tmp_path / "glm").folder, tmp_path / "mmproj.gguf"))
    assert spec.video is None
    spec, _ = opened(write_mmproj(make("qwen3", tmp_path / "qwen").folder, tmp_path / "mmproj.gguf"))
    for words, sees in ((["<|image_pad|>", "<|video_pad|>"], True), (["<|image_pad|>"], False),
                        (["<|image_pad|>", "<|video_pad|>", "<|audio_start|>"], False)):  # fmt: skip
        tokenizer: Any = SimpleNamespace(control_tokens=words)
        found = in_vocabulary(Senses(spec), tokenizer).vision
        assert found is not None
        assert (found.video is not None) == sees
