"""Images: which size a model wants, and the pixels that it gets, held against transformers' processors over Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from PIL import ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted, most_rows, most_tokens
from nanovllm_cli.images.source import data_url
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Image, ImageTokens, TowerSpec, VisionSpec

AREA = SizeRule("area", 28, min_pixels=56 * 56, max_pixels=28 * 28 * 12)
LONGEST = SizeRule("longest", 28, longest_side=112)
SQUARE = SizeRule("square", 56, longest_side=112, resample="bilinear")
LARGEST = SizeRule("largest", 28, max_pixels=28 * 28 * 70, longest_side=28 * 70)
SIDES = st.integers(1, 6000)


def seeing(size: SizeRule, merge: int = 2) -> VisionSpec:
    """A model whose output's rows stand for size.multiple x size.multiple pixels."""
    tower = TowerSpec(
        patch_size=size.multiple // merge, merge=merge, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8, out_size=8,
        activation="silu", norm="rms", eps=1e-6, projector="merger", projector_eps=1e-6,
    )  # fmt: skip
    return VisionSpec(tower, size, ImageTokens("<image>", "<pad>"), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read_one(file: bytes, spec: VisionSpec) -> Image:
    picture = read_image(file, spec, "it")
    (image,) = picture.images
    assert (picture.rows, picture.columns) == (0, 0)
    return image


@settings(max_examples=400, deadline=None)
@given(SIDES, SIDES, st.sampled_from([28, 32, 56]), st.integers(1, 40), st.integers(40, 2000))
@example(1, 200, 28, 4, 1280)
@example(42, 70, 28, 4, 1280)
@example(70, 84, 28, 4, 6)
def test_area_is_qwens(height: int, width: int, unit: int, least: int, most: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    rule = SizeRule("area", unit, min_pixels=least * 28 * 28, max_pixels=most * unit * unit)
    assert fitted(rule, height, width).whole == smart_resize(height, width, unit, rule.min_pixels, rule.max_pixels)


@settings(max_examples=400, deadline=None)
@given(SIDES, SIDES, st.sampled_from([14, 16, 28]), st.sampled_from([1024, 1540, 448, 1000]))
@example(1540, 1541, 28, 1540)
@example(30, 6000, 28, 1540)
def test_longest_is_pixtrals(height: int, width: int, unit: int, longest: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    shape = np.broadcast_to(np.uint8(0), (3, height, width))
    theirs = get_resize_output_image_size(shape, (longest, longest), (unit, unit), "channels_first")
    assert fitted(SizeRule("longest", unit, longest_side=longest), height, width).whole == theirs


@settings(max_examples=400, deadline=None)
@given(SIDES, SIDES, st.sampled_from([(16, 3), (16, 1), (14, 2)]), st.sampled_from([2, 7, 70, 140, 280, 560, 1120]))
@example(1, 200, (16, 3), 70)
@example(200, 1, (16, 3), 140)
@example(3000, 4000, (16, 3), 280)
@example(48, 48, (16, 3), 1120)
def test_largest_is_gemma_4s(height: int, width: int, patch: tuple[int, int], most: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    (side, pooled), unit = patch, patch[0] * patch[1]
    theirs = get_aspect_ratio_preserving_size(height, width, side, most * pooled**2, pooled)
    rule = SizeRule("largest", unit, max_pixels=most * unit**2, longest_side=most * unit)
    assert fitted(rule, height, width).whole == theirs
    assert theirs[0] * theirs[1] <= most_rows(seeing(rule, pooled)) * unit**2


@pytest.mark.parametrize(("height", "width"), [(1, 200), (10, 10), (5000, 300), (200, 1)])
@pytest.mark.parametrize("most", [1, 2, 5, 69, 71])
def test_what_is_as_large_as_may_be_is_limited(height: int, width: int, most: int) -> None:
    limited = seeing(LARGEST).limited(most)
    rows, columns = (side // 28 for side in fitted(limited.size, height, width).whole)
    assert 0 < rows * columns <= most_rows(limited) == min(most, 70)


@pytest.mark.parametrize("most", [1, 2, 11, 12, 13, 110, 10**6])
def test_tokens_at_ends_of_lines_count_among_those_that_an_image_may_have(most: int) -> None:
    """Of Pixtral's kind: a square is the largest, and no larger one than this would do."""
    plain = seeing(SizeRule("longest", 28, longest_side=28 * 10))
    spec = replace(plain, tokens=replace(plain.tokens, line_end="<end>")).limited(most)
    (square, wide) = (
        spec.placed(Image(*fitted(spec.size, *sides).whole, b"", b""), 0) for sides in ((4000, 4000), (1000, 4000))
    )
    assert wide.num_tokens <= square.num_tokens == most_tokens(spec) <= max(most, spec.least_tokens) == max(most, 2)
    assert square.rows == 10 or (square.rows + 1) * (square.rows + 2) > most


def test_what_is_as_large_as_may_be_keeps_its_shape_where_sides_are_bounded() -> None:
    rule = replace(LARGEST, longest_side=16 * 28)
    assert fitted(rule, 4000, 1000).whole == fitted(rule, 40, 10).whole == (16 * 28, 4 * 28)
    assert fitted(rule, 10, 1000).whole == (28, 16 * 28)
    assert fitted(rule, 500, 500).whole == (8 * 28, 8 * 28)


@pytest.mark.parametrize("rule", [AREA, LONGEST, SQUARE, LARGEST])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 200), (200, 1), (1, 40_000), (8192, 8192), (113, 111)])
def test_no_size_is_nothing_or_beside_the_grid(rule: SizeRule, height: int, width: int) -> None:
    sides = fitted(rule, height, width).whole
    assert all(side > 0 and side % rule.multiple == 0 for side in sides)


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        (SizeRule("area", 28, min_pixels=3136, max_pixels=1003520), 1280),
        (SizeRule("area", 28, min_pixels=3136, max_pixels=12845056), 16384),
        (SizeRule("area", 32, min_pixels=65536, max_pixels=16777216), 16384),
        (SizeRule("longest", 28, longest_side=1540), 3025),
        (SizeRule("longest", 16, longest_side=1000), 63 * 63),
        (SizeRule("square", 56, longest_side=896), 256),
        (SizeRule("largest", 48, max_pixels=48 * 48 * 280, longest_side=48 * 3000), 280),
        (SizeRule("largest", 48, max_pixels=48 * 48 * 280, longest_side=48 * 10), 100),
    ],
)
def test_most_rows_is_what_some_image_becomes_and_none_passes(rule: SizeRule, rows: int) -> None:
    assert most_rows(seeing(rule)) == rows
    side = rule.longest_side or 32 * rule.multiple
    shapes = [(height, width) for height in range(100, 6000, 171) for width in range(100, 6000, 171)]
    shapes.append((rule.max_pixels // side or side, side))
    assert max(height * width for height, width in (fitted(rule, *shape).whole for shape in shapes)) == rows * rule.multiple**2


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.integers(1, 60), st.integers(0, 300))
@example(10, 560, 60, 0)
@example(10, 2000, 1, 0)
def test_most_rows_holds_where_the_bounds_are_close(height: int, width: int, least: int, more: int) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    rule = SizeRule("area", 28, min_pixels=least * 784, max_pixels=(least + more) * 784)
    rows, columns = (side // 28 for side in fitted(rule, height, width).whole)
    assert rows * columns <= most_rows(seeing(rule))


def test_rows_are_counted_in_the_towers_cells() -> None:
    spec = seeing(SizeRule("square", 28, longest_side=896))
    for rule in (SizeRule("square", 14, longest_side=896), SizeRule("longest", 56, longest_side=890)):
        assert most_rows(replace(spec, size=rule)) == 1024
    assert most_rows(replace(spec, size=SizeRule("area", 56, min_pixels=1, max_pixels=1003520))) == 1280


def colours(height: int, width: int, channels: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A gradient with noise: the first shows a picture that is turned, the second a filter that is another."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, channels))
    down, right = np.mgrid[0:height, 0:width]
    slope = (down * 90 // height + right * 45 // width)[..., None]
    return (noise + slope).astype(np.uint8)


def saved(picture: pillow.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def asked_about(pictures: list[pillow.Image], between: str = "and") -> list[dict[str, Any]]:
    """A message with two of them, and a text behind each."""
    urls = [data_url(saved(each, "PNG")) for each in pictures]
    parts = [({"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text})
             for url, text in zip(urls, (between, "differ?"), strict=True)]  # fmt: skip
    return [{"role": "user", "content": [part for both in parts for part in both]}]


def picture(height: int = 61, width: int = 97, mode: str = "RGB") -> pillow.Image:
    return pillow.fromarray(colours(height, width, 4), "RGBA").convert(mode)


def turned(orientation: int) -> dict[str, Any]:
    exif = pillow.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: saved(picture(), "PNG"),
    "png, large": lambda: saved(picture(700, 333), "PNG"),
    "png, small": lambda: saved(picture(3, 5), "PNG"),
    "png, narrow": lambda: saved(picture(2, 200), "PNG"),
    "png, a size that stays": lambda: saved(picture(84, 112), "PNG"),
    "png, grey": lambda: saved(picture(mode="L"), "PNG"),
    "png, grey and alpha": lambda: saved(picture(mode="LA"), "PNG"),
    "png, black and white": lambda: saved(picture(mode="1"), "PNG"),
    "png, palette": lambda: saved(picture().quantize(30), "PNG"),
    "png, palette with a clear colour": lambda: saved(picture().quantize(30), "PNG", transparency=3),
    "png, palette with alpha": lambda: saved(picture().quantize(4), "PNG", transparency=b"\x00\x50\xa0\xff"),
    "png, a clear colour": lambda: saved(pillow.new("RGB", (40, 30), (9, 8, 7)), "PNG", transparency=(9, 8, 7)),
    "png, alpha": lambda: saved(picture(mode="RGBA"), "PNG"),
    "png, turned": lambda: saved(picture(), "PNG", **turned(8)),
    "jpeg": lambda: saved(picture(), "JPEG"),
    "jpeg, progressive": lambda: saved(picture(), "JPEG", progressive=True),
    "jpeg, grey": lambda: saved(picture(mode="L"), "JPEG"),
    "jpeg, CMYK": lambda: saved(picture().convert("CMYK"), "JPEG"),
    **{f"jpeg, turned by {way}": lambda way=way: saved(picture(), "JPEG", **turned(way)) for way in range(1, 9)},  # type: ignore[misc]
    "jpeg, two pictures": lambda: saved(picture(), "MPO", save_all=True, append_images=[picture(20, 20)]),
    "webp": lambda: saved(picture(), "WEBP"),
    "webp, alpha": lambda: saved(picture(mode="RGBA"), "WEBP", lossless=True),
    "webp, animated": lambda: saved(picture(), "WEBP", save_all=True, append_images=[picture(mode="L").convert("RGB")]),
    "webp, turned": lambda: saved(picture(), "WEBP", **turned(6)),
    "gif": lambda: saved(picture(), "GIF"),
    "gif, animated": lambda: saved(picture(), "GIF", save_all=True, append_images=[picture(mode="L").convert("RGB")]),
    "gif, clear": lambda: saved(picture().quantize(30), "GIF", transparency=3),
    "bmp": lambda: saved(picture(), "BMP"),
    "bmp, palette": lambda: saved(picture().quantize(30), "BMP"),
}


def theirs_as(rule: SizeRule, file: bytes) -> np.ndarray[Any, Any]:
    """Its pixels, colours first, by the processor that has this rule."""
    given = ImageOps.exif_transpose(pillow.open(io.BytesIO(file)))
    plain: Any = {"do_rescale": False, "do_normalize": False}
    if rule.kind == "square":
        side = {"height": rule.longest_side, "width": rule.longest_side}
        return np.asarray(Gemma3ImageProcessorPil(size=side, **plain)(images=[given])["pixel_values"][0])
    if rule.kind == "longest":
        pixtral = PixtralImageProcessorPil(size={"longest_edge": rule.longest_side}, **plain)
        return np.asarray(pixtral(images=[given], patch_size=rule.multiple)["pixel_values"][0])
    if rule.kind == "largest":
        gemma = Gemma4ImageProcessorPil(patch_size=14, pooling_kernel_size=2, max_soft_tokens=rule.max_pixels // 28**2, **plain)
        found = gemma(images=[given])
        columns, rows = (side + 1 for side in found["image_position_ids"][0].max(axis=0))
        lines = np.asarray(found["pixel_values"][0][: rows * columns]).reshape(rows, columns, 14, 14, 3)
        return lines.transpose(4, 0, 2, 1, 3).reshape(3, rows * 14, columns * 14)
    size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    found = Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2, **plain)(images=[given])
    _, rows, columns = found["image_grid_thw"][0]
    patches = np.asarray(found["pixel_values"]).reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    return patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 14, columns * 14)


def pixels(image: Image) -> np.ndarray[Any, Any]:
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


@pytest.mark.parametrize("rule", [AREA, LONGEST, SQUARE, LARGEST], ids=lambda rule: rule.kind)
@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers(name: str, rule: SizeRule) -> None:
    file = FILES[name]()
    expected = theirs_as(rule, file)
    image = read_one(file, seeing(rule))
    assert (image.height, image.width) == expected.shape[1:] == fitted(rule, *upright(file)).whole
    np.testing.assert_array_equal(pixels(image), expected.transpose(1, 2, 0))


def upright(file: bytes) -> tuple[int, int]:
    given = ImageOps.exif_transpose(pillow.open(io.BytesIO(file)))
    return given.height, given.width


def test_grey_of_16_bits_is_not_white() -> None:
    """Pillow, and so transformers, makes 255 of all that is more."""
    grey = np.linspace(0, 65535, 112 * 112).reshape(112, 112).astype(np.uint16)
    image = read_one(saved(pillow.fromarray(grey), "PNG"), seeing(LONGEST))
    np.testing.assert_array_equal(pixels(image)[..., 1], grey >> 8)


def test_a_clear_picture_is_white() -> None:
    image = read_one(saved(pillow.new("RGBA", (30, 30), (0, 0, 0, 0)), "PNG"), seeing(SQUARE))
    assert set(image.pixels) == {255}


def test_the_digest_is_of_size_and_pixels() -> None:
    tall = pillow.new("RGB", (28, 112), "red")
    wide, dark = tall.rotate(90, expand=True), pillow.new("RGB", tall.size)
    files = [saved(tall, "PNG"), saved(tall, "BMP"), saved(wide, "PNG"), saved(dark, "PNG")]
    images = [read_one(file, seeing(LONGEST)) for file in files]
    one, same, lying, black = images
    assert one == same
    assert one.pixels == lying.pixels
    assert len({one.digest, lying.digest, black.digest}) == 3
    assert {len(image.digest) for image in images} == {16}
