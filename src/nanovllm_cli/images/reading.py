"""An image's bytes, made into the pixels that a tower takes: in one, or in pieces and all of it once more.

Anybody may have sent them: what Pillow raises becomes a typed error here, and what would take it long is found before.
"""

from __future__ import annotations

import warnings
from functools import cache
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

from nanovllm_cli.errors import UsageError
from nanovllm_cli.images.parts import too_many_parts
from nanovllm_cli.images.sizes import MAX_ASPECT, Sides, Sizes, fitted
from nanovllm_cli.images.source import IMAGE
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.sent import Recent
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import Image, Picture, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

MAX_PIXELS = 1 << 26  # 8192 x 8192; each takes up to 24 bytes while it is decoded
_GREY = 127, 127, 127  # what a page lies on
_RLE = 1, 2  # compressions of a BMP


def read_sent(url: str, spec: VisionSpec, where: str, salt: str | None = None) -> tuple[Picture, int]:
    """What a model sees of an image as a client sent it, and how many pixels were sent; see `Medium.bytes_of`. salt: who has
    another one can't tell by the time it takes whether the image was read before."""

    def read() -> tuple[Picture, int]:
        data = IMAGE.bytes_of(url, where)
        return read_image(data, spec, where), _num_pixels(data)

    return _recent.get(url, (spec, salt), read)


class _Recent(Recent[tuple[Picture, int]]):
    """With the number of pixels that were sent."""

    def __init__(self) -> None:
        super().__init__(lambda made: 3 * made[0].num_pixels)


_recent = _Recent()


def read_image(data: bytes, spec: VisionSpec, where: str) -> Picture:
    """What a model sees of a file: upright, its first frame, of the sizes that the model wants. where: what an error calls it.

    Raises UsageError for what is no image, is damaged, or has more than MAX_PIXELS or an aspect of more than MAX_ASPECT.
    """
    kind = IMAGE.known(data, where)
    if (too_many := too_many_parts(data, kind)) is not None:
        raise UsageError(f"{where} is a {kind.upper()} of more than {too_many}", f"save it again, as a plain {kind.upper()}")
    return _made(_decoded(data, kind, where), spec.size)


def frame_of(picture: Pixels, rule: SizeRule) -> Image:
    """A video's, by a rule that cuts nothing into pieces."""
    (image,) = _made(picture, rule).images
    return image


def _made(picture: Pixels, rule: SizeRule) -> Picture:
    from PIL.Image import Resampling

    from nanovllm_cli.images import letters  # with numpy
    from nanovllm_cli.images.between import between_four

    def resized(source: Pixels, sides: Sides) -> Pixels:
        height, width = sides
        if rule.resample == "nearest four":
            return between_four(source, height, width)
        return source.resize((width, height), Resampling[rule.resample.upper()])

    sizes, tile = fitted(rule, picture.height, picture.width), rule.tile
    if rule.kind == "middle":
        assert sizes.first is not None
        height, width = sizes.first
        top, left = (height - tile) // 2, (width - tile) // 2
        return Picture((_image(resized(picture, sizes.first).crop((left, top, left + tile, top + tile)), rule),))
    if rule.kind == "bounded":
        parts = _quarters(picture) if rule.most_tiles > 1 else []
        sized = [(part, fitted(rule, part.height, part.width).whole) for part in (*parts, picture)]
        images = tuple(_image(resized(part, sides), rule) for part, sides in sized)
        return Picture(images, 2, 2) if parts else Picture(images)
    if rule.kind == "mosaic":
        inner = None if sizes.first is None else resized(picture, sizes.first)
        return Picture((_mosaic(resized(picture, sizes.whole), inner, sizes, rule, (picture.height, picture.width)),))
    first = picture if sizes.first is None else resized(picture, sizes.first)
    if sizes.pieces is None and (rule.kept or rule.kind in ("padded", "framed")):
        return Picture((_image(_laid(first, sizes.whole, rule), rule),))
    if sizes.pieces is None:
        asked = letters.size_of(picture, rule) if rule.grows == "letters" else sizes.whole
        return Picture((_image(_filled_up(resized(first, asked), rule), rule),))
    large = _laid(first, sizes.pieces, rule) if rule.kept else resized(first, sizes.pieces)
    rows, columns = sizes.grid or (sizes.pieces[0] // tile, sizes.pieces[1] // tile)
    tall, wide = sizes.pieces[0] // rows, sizes.pieces[1] // columns
    corners = [(column * wide, row * tall) for row in range(rows) for column in range(columns)]
    cut = [large.crop((x, y, x + wide, y + tall)) for x, y in corners]
    if rule.grows == "letters":
        cut = [letters.sized(picture, each, rule, (rows, columns), divmod(i, columns)) for i, each in enumerate(cut)]
    pieces = [_image(each, rule) for each in cut]
    shown = picture if rule.kept or sizes.first is None else large
    whole = _image(_filled_up(resized(shown, sizes.whole), rule), rule)
    return Picture((whole, *pieces) if rule.whole_first else (*pieces, whole), rows, columns)


def _quarters(picture: Pixels) -> list[Pixels]:
    """Line by line; none of what is too thin to have them."""
    height, width = picture.height, picture.width
    if min(height, width) < 2:
        return []
    lines, columns = ((0, side // 2, side) for side in (height, width))
    return [picture.crop((x, y, right, low)) for y, low in pairwise(lines) for x, right in pairwise(columns)]


def _image(made: Pixels, rule: SizeRule) -> Image:
    """Without what is no whole multiple of the rule's."""
    height, width = (side // rule.multiple * rule.multiple for side in (made.height, made.width))
    made = made if (height, width) == (made.height, made.width) else made.crop((0, 0, width, height))
    return Image.of(height, width, made.tobytes())


def _filled_up(made: Pixels, rule: SizeRule) -> Pixels:
    """In the middle of a square, where a rule says so."""
    from PIL import Image as pillow

    if rule.kind != "pages":
        return made
    side = rule.longest_side
    square = pillow.new("RGB", (side, side), _GREY)
    square.paste(made, ((side - made.width) // 2, (side - made.height) // 2))
    return square


def _laid(made: Pixels, sides: Sides, rule: SizeRule) -> Pixels:
    """At the upper left of what is as large as that, or in its middle, where a rule says so."""
    from PIL import Image as pillow

    height, width = sides
    canvas = pillow.new("RGB", (width, height), rule.around)
    is_framed = rule.kind == "framed"
    canvas.paste(made, ((width - made.width) // 2, (height - made.height) // 2) if is_framed else (0, 0))
    return canvas


def _mosaic(whole: Pixels, inner: Pixels | None, sizes: Sizes, rule: SizeRule, own: Sides) -> Image:
    """Squares below each other: all of it, and those in whose middle `inner` lies. own: the image's height and width, which don't
    matter where squares lie apart."""
    from PIL import Image as pillow

    tile, squares = rule.tile, [whole]
    rows, columns = sizes.grid or (0, 0)
    if inner is not None:
        canvas = pillow.new("RGB", inner.size if rule.margin else (columns * tile, rows * tile))
        canvas.paste(inner, ((canvas.width - inner.width) // 2, (canvas.height - inner.height) // 2))
        step = tile - 2 * rule.margin * rule.multiple
        corners = [(column * step, row * step) for row in range(rows) for column in range(columns)]
        squares += [canvas.crop((x, y, x + tile, y + tile)) for x, y in corners]
    made = [_image(square, rule) for square in squares]
    height, width = made[0].height * len(made), made[0].width
    if rule.margin:
        mosaic = Mosaic(rows, columns, tile // rule.multiple, tile // rule.multiple, rule.margin, int(rule.ends))
    else:
        mosaic = Mosaic(rows, columns, *((0, 0) if rule.apart else own))
    return Image.of(height, width, b"".join(each.pixels for each in made), mosaic)


def _decoded(data: bytes, kind: str, where: str) -> Pixels:
    """Upright and in RGB. `kind` alone is tried: Pillow knows fifty more, which are not for strangers' bytes."""
    from PIL import Image as pillow
    from PIL import ImageOps

    hush()
    try:
        with pillow.open(BytesIO(data), formats=[kind.upper()]) as picture:
            check_size(picture.width, picture.height, where)
            if kind == "bmp" and picture.info.get("compression") in _RLE:  # which Pillow decodes in Python, other threads waiting
                raise UsageError(f"{where} is a compressed BMP", "save it again, as a PNG or a plain BMP")
            ImageOps.exif_transpose(picture, in_place=True)
            return rgb(picture)
    except UsageError:
        raise
    except pillow.DecompressionBombError:  # Pillow's own bound lies beyond ours
        raise _too_many_pixels(where) from None
    except Exception as failure:  # any: which ones a damaged file leads to is not written down anywhere
        raise UsageError(f"{where} is damaged: it can't be decoded as {kind.upper()}", "save or send it again") from failure


def _num_pixels(data: bytes) -> int:
    """Of a file that could be decoded."""
    from PIL import Image as pillow

    kind = IMAGE.kind_of(data)
    assert kind is not None
    with pillow.open(BytesIO(data), formats=[kind.upper()]) as picture:
        return picture.width * picture.height


def check_size(width: int, height: int, where: str) -> None:
    """Raises UsageError."""
    if width * height > MAX_PIXELS:
        raise _too_many_pixels(where)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UsageError(
            f"{where} has {width} x {height} pixels: one side is more than {MAX_ASPECT} times the other", "cut it into pieces"
        )


def _too_many_pixels(where: str) -> UsageError:
    return UsageError(f"{where} has more than {MAX_PIXELS >> 20} million pixels", "make it smaller; models see far fewer")


def rgb(picture: Pixels) -> Pixels:
    from PIL import Image as pillow

    if picture.mode == "I;16":  # its upper bytes, as Pillow reads colours of 16 bits; what it makes of such greys is white
        return pillow.frombytes("L", picture.size, picture.tobytes()[1::2]).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    # on white, as transformers' image processors put it, and viewers mostly do
    picture = picture.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", picture.size, "white"), picture).convert("RGB")


@cache
def hush() -> None:
    """What Pillow warns of in a damaged file goes to nobody's standard error. Once, as threads share the filters of warnings."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
