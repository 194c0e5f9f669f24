"""How large a MiniCPM-OCR makes small images, and pieces, by what is written in them: against transformers, which has OpenCV find
glyphs, whose part here is written out."""

from __future__ import annotations

import importlib
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow
from PIL import ImageDraw

from nanovllm_cli.images.letters import components, grown, threshold
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted
from nanovllm_cli.size_spec import SizeRule
from test_images import saved, seeing

OCR = importlib.import_module("transformers.models.minicpm_ocr.image_processing_minicpm_ocr")
NUMBERS = np.random.default_rng(0)
RULE = SizeRule("slices", 8, tile=100, most_tiles=4, grows="letters")


def otsu(grey: np.ndarray) -> int:
    """In fractions: how far apart the means are, weighted."""
    counts = [int(count) for count in np.bincount(grey.reshape(-1), minlength=256)]
    best, most = 0, Fraction(0)
    for value in range(256):
        below, above = sum(counts[: value + 1]), sum(counts[value + 1 :])
        if below and above:
            of_below = Fraction(sum(i * n for i, n in enumerate(counts[: value + 1])), below)
            of_above = Fraction(sum(i * n for i, n in enumerate(counts) if i > value), above)
            apart = below * above * (of_below - of_above) ** 2
            best, most = (value, apart) if apart > most else (best, most)
    return best


def flooded(mask: np.ndarray) -> list[tuple[int, int, int]]:
    """Pixels, lines and columns of what hangs together, found one after another."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while left:
        reached, at = [left.pop()], 0
        while at < len(reached):
            y, x = reached[at]
            at += 1
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            reached += near
        lines, columns = ([place[axis] for place in reached] for axis in (0, 1))
        found.append((len(reached), max(lines) - min(lines) + 1, max(columns) - min(columns) + 1))
    return sorted(found)


CV2: Any = SimpleNamespace(
    THRESH_BINARY=0, THRESH_OTSU=8,
    threshold=lambda grey, low, high, kind: (otsu(grey), np.where(grey > otsu(grey), 255, 0)),
    connectedComponentsWithStats=lambda mask, connectivity: (
        1 + len(flooded(mask)), None, [None, *((0, 0, columns, lines, area) for area, lines, columns in flooded(mask))], None
    ),
)  # fmt: skip


def drawn(height: int, width: int, step: int, size: int, ink: int = 0, paper: int = 255) -> np.ndarray:
    """Letters of about so many pixels, in lines that are `step` apart."""
    picture = pillow.new("RGB", (width, height), (paper, paper, paper - paper // 9))
    draw = ImageDraw.Draw(picture)
    for y in range(1, height, step):
        for x in range(1, width, step):
            draw.line([(x, y), (x + size // 2, y + size), (x + size - 1, y)], fill=(ink, ink, ink + 3))
    return np.asarray(picture)


SAMPLES = {
    "small letters": drawn(70, 90, 9, 6), "bright on dark": drawn(60, 61, 9, 6, 240, 20), "large letters": drawn(95, 99, 30, 25),
    "few": drawn(90, 90, 40, 6), "tiny": drawn(30, 41, 40, 20), "one colour": np.full((40, 33, 3), 7, np.uint8),
    "noise": NUMBERS.integers(0, 256, (40, 51, 3), np.uint8), "one pixel": np.zeros((1, 1, 3), np.uint8),
    "ruled": np.where(np.arange(50)[:, None, None] % 7 == 0, 0, np.full((50, 60, 3), 255)).astype(np.uint8),
}  # fmt: skip


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor, whose images lose all but their size when they are resized."""
    monkeypatch.setattr(OCR, "cv2", CV2, raising=False)
    monkeypatch.setattr(OCR, "requires_backends", lambda *given: None)
    made: Any = OCR.MiniCPMOcrImageProcessor.__new__(OCR.MiniCPMOcrImageProcessor)
    made.resize = lambda image, size, resample: torch.zeros(3, size.height, size.width)
    return made


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_written_asks_for_what_transformers_says(name: str, theirs: Any) -> None:
    pixels = SAMPLES[name]
    picture = pillow.fromarray(pixels)
    grey = np.asarray(picture.convert("L"))
    assert threshold(grey) == otsu(grey)
    for mask in (grey <= threshold(grey), grey > 100):
        assert sorted(zip(*(each.tolist() for each in components(mask)), strict=True)) == flooded(mask)
    said = OCR.adaptive_upsize_resolution(pixels.transpose(2, 0, 1), 448)
    assert {"whole": 448, "tiny": 84, "": None}[grown(picture)] == said
    assert said == {"small letters": 448, "bright on dark": 448, "large letters": None, "few": None}.get(name, said)
    if pixels.size > 3:
        image = read_image(saved(picture, "PNG"), seeing(RULE), "it").images[0]
        side = 84 if said == 84 else 100
        wanted = theirs.find_best_resize(pixels.shape[:2], side, 4, "4x", allow_upscale=said is not None)
        assert (image.height, image.width) == wanted


def test_pieces_are_made_what_transformers_makes_them(theirs: Any) -> None:
    """Of one with small letters, one with large ones, one with hardly any, and one of noise."""
    pixels = np.concatenate([
        np.concatenate([drawn(80, 83, 9, 6), drawn(80, 83, 30, 25)], axis=1),
        np.concatenate([drawn(81, 83, 70, 6), NUMBERS.integers(0, 256, (81, 83, 3), np.uint8)], axis=1),
    ])  # fmt: skip
    height, width = pixels.shape[:2]
    ours = read_image(saved(pillow.fromarray(pixels), "PNG"), seeing(RULE), "it")
    grid = theirs.get_sliced_grid((height, width), 4, 100)
    assert [ours.rows, ours.columns] == list(grid) == [2, 2]
    tall, wide = (side // 2 for side in theirs.get_refine_size((height, width), grid, 100, 4, "4x", allow_upscale=True))
    image = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    wanted = [theirs._resolve_tile_size(image, grid, *divmod(i, 2), torch.zeros(3, tall, wide), 100, 4, "4x").shape[1:]
              for i in range(4)]  # fmt: skip
    assert [(each.height, each.width) for each in ours.images[1:]] == [tuple(each) for each in wanted]
    assert len({(each.height, each.width) for each in ours.images[1:]}) > 1
    assert (ours.images[0].height, ours.images[0].width) == fitted(RULE, height, width).whole
