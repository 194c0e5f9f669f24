"""Images that are none, or made to do harm: an image or a typed error comes of each, in time. Where images may come from."""

from __future__ import annotations

import base64
import io
import random
import re
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as pillow

from nanovllm_cli import sent
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.images import reading
from nanovllm_cli.images.parts import MAX_PARTS, too_many_parts
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.source import IMAGE, data_url
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.vision_spec import ImageTokens, Picture, TowerSpec, VisionSpec

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")
TOWER = TowerSpec(
    patch_size=4, merge=2, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8, out_size=8,
    activation="silu", norm="rms", eps=1e-6, projector="merger", projector_eps=1e-6,
)  # fmt: skip
RULE = SizeRule("longest", 8, longest_side=16)
SPEC = VisionSpec(TOWER, RULE, ImageTokens("<image>", "<pad>"), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def saved(kind: str, picture: pillow.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    given = picture or pillow.frombytes("RGB", (24, 17), random.Random(5).randbytes(24 * 17 * 3))
    given.save(file, kind, **options)
    return file.getvalue()


PNG = saved("PNG")
TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
VALID = {
    "png": PNG,
    "png with a palette": saved("PNG", pillow.new("P", (24, 17), 3), transparency=3),
    "jpeg": saved("JPEG"),
    "jpeg, progressive": saved("JPEG", progressive=True, exif=TURNED),
    "webp": saved("WEBP"),
    "webp, lossless": saved("WEBP", lossless=True),
    "gif": saved("GIF"),
    "bmp": saved("BMP"),
}


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, body: bytes = b"") -> bytes:
    """One that promises so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def refusal(data: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        read_image(data, SPEC, "messages[2].content[1]")
    assert caught.value.message.startswith("messages[2].content[1] ")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 64,
        b"a text\n",
        b"BMW makes cars, and no pictures of a kind",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"GIF88a" + bytes(40),
        b"RIFF\x24\0\0\0WAVEfmt ",
        b"%PDF-1.7\n",
        b"8BPS\0\x01" + bytes(40),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\0\0\0\x1cftypheic",
        saved("TIFF"),
        saved("ICO"),
        saved("PPM"),
        saved("JPEG2000"),
        PNG[1:],
        b"\n" + PNG,
    ],
)
def test_no_image_of_a_known_kind(data: bytes) -> None:
    assert refusal(data).endswith("is no image of a kind that is read here")


def test_nothing_is_no_image() -> None:
    assert refusal(b"").endswith("is empty")


def test_only_the_plugin_of_its_kind_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    opened = pillow.open
    monkeypatch.setattr(pillow, "open", lambda file, formats: asked.append(formats) or opened(file, formats=formats))
    read_image(PNG, SPEC, "it")
    assert asked == [["PNG"]]


@pytest.mark.parametrize("name", VALID)
def test_cut_anywhere_it_is_an_image_or_refused(name: str) -> None:
    data = VALID[name]
    refused = 0
    for end in range(0, len(data), max(1, len(data) // 40)):
        try:
            assert isinstance(read_image(data[:end], SPEC, "it"), Picture)
        except UsageError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("name", VALID)
def test_changed_anywhere_it_is_an_image_or_refused(name: str) -> None:
    chance = random.Random(name)
    outcomes = set()
    for _ in range(120):
        data = bytearray(VALID[name])
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(min(len(data), 120 if chance.random() < 0.7 else len(data)))
            if chance.random() < 0.2:
                data[place : place + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 9))
            else:
                data[place] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        try:
            image = read_image(bytes(data), SPEC, "it")
        except NanovllmError as error:
            outcomes.add(type(error))
        else:
            assert [len(each.pixels) for each in image.images] == [3 * image.num_pixels]
            outcomes.add(Picture)
    assert outcomes <= {UsageError, Picture}
    assert UsageError in outcomes


@pytest.mark.parametrize("error", [MemoryError, struct.error, EOFError, zlib.error, KeyError, RuntimeError, SyntaxError, OSError])
def test_whatever_pillow_raises_is_a_typed_error(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise error("line one\nline two")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    assert "is damaged" in refusal(saved("BMP"))


def test_a_png_with_right_sums_around_wrong_chunks() -> None:
    """Changes that the checksums would else find."""
    chance = random.Random(1)
    for kind in (b"PLTE", b"tRNS", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"zTXt", b"iTXt", b"pHYs", b"gAMA", b"sBIT", b"IHDR"):
        for size in (0, 1, 5, 13, 26, 300):
            data = PNG[:33] + chunk(kind, chance.randbytes(size)) + PNG[33:]
            try:
                read_image(data, SPEC, "it")
            except UsageError:
                continue


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (8193, 8192), (10_000, 9000), (2**31 - 1, 2**31 - 1)])
def test_many_pixels_are_refused_before_they_are_decoded(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it was decoded"))
    assert refusal(png_of(width, height)).endswith("has more than 64 million pixels")
    assert pillow.MAX_IMAGE_PIXELS == 1024 * 1024 * 1024 // 4 // 3


def test_so_they_are_in_a_webp() -> None:
    data = saved("WEBP", pillow.new("RGB", (24, 17)), lossless=True)
    place = data.index(b"VP8L") + 9
    assert "64 million" in refusal(data[:place] + b"\xff\xff\xff\x0f" + data[place + 4 :])


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0), (2**32 - 1, 5)])
def test_sides_that_are_none(width: int, height: int) -> None:
    refusal(png_of(width, height))


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 201), (4021, 20)])
def test_a_line_is_refused(width: int, height: int) -> None:
    assert "200 times" in refusal(saved("PNG", pillow.new("RGB", (width, height))))


@pytest.mark.parametrize(("width", "height"), [(200, 1), (1, 200), (4000, 20)])
def test_what_is_nearly_one_is_not(width: int, height: int) -> None:
    (image,) = read_image(saved("PNG", pillow.new("RGB", (width, height))), SPEC, "it").images
    assert {image.height, image.width} == {8, 16}


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """One of 8192 x 8192 takes 30 ms a scan, which has 60 bytes."""
    plain = saved("JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    assert isinstance(read_image(plain[:-2] + scan * 50 + plain[-2:], SPEC, "it"), Picture)
    for more in (scan, b"\xff\xff" + scan, b"\xff\xd3" + scan):  # bytes that fill, and a marker without a length
        assert refusal(plain[:-2] + more * 100 + plain[-2:]).endswith("is a JPEG of more than 100 parts")


def test_scans_behind_markers_that_libjpeg_passes_count() -> None:
    """Before a restart it looks for the right marker, and reserved ones have no length for it: FFFF there fills."""
    plain = saved("JPEG", progressive=True, restart_marker_rows=1)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    for reserved in (b"\x02", b"\xbf"):
        hiding = scan.replace(b"\xff\xd0", b"\xff" + reserved + b"\xff\xff\xff\xd0", 1)
        assert len(hiding) == len(scan) + 4
        assert isinstance(read_image(plain[:-2] + hiding * 50 + plain[-2:], SPEC, "it"), Picture)
        assert "more than 100 parts" in refusal(plain[:-2] + hiding * 600 + plain[-2:])


@pytest.mark.parametrize("marker", [b"\xdc\0\x04", b"\xdd\0\x04", b"\xef\0\x04", b"\xfe\0\x04"])  # DNL, DRI, APP15, COM
def test_what_segments_hold_is_no_end(marker: bytes) -> None:
    plain = saved("JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    assert "more than 100 parts" in refusal(plain[:-2] + b"\xff" + marker + b"\xff\xd9" + scan * 100 + plain[-2:])


def test_scans_behind_what_looks_like_the_end_count() -> None:
    plain = saved("JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    hidden = b"\xff\xfe\x00\x06\xff\xd9\xff\xd9"  # a comment
    assert "more than 100 parts" in refusal(plain[:-2] + hidden + scan * 100 + plain[-2:])


def test_what_lies_behind_a_jpeg_is_not_counted() -> None:
    """A phone puts a film there."""
    assert isinstance(read_image(saved("JPEG") + b"\xff\xda\0\x02" * 50_000, SPEC, "it"), Picture)


def test_a_jpeg_of_many_exif_pieces_is_refused() -> None:
    plain = saved("JPEG")
    piece = b"\xff\xe1\x00\x10Exif\0\0" + bytes(8)
    assert "more than 100 parts" in refusal(plain[:2] + piece * 60_000 + plain[2:])


def gif_of(before: bytes) -> bytes:
    """An image with this between its colours and itself."""
    plain = saved("GIF")
    start = 13 + (3 << (plain[10] & 7) + 1)
    assert plain[10] & 128
    return plain[:start] + before + plain[start:]


JPEG = saved("JPEG")
PARTS = {
    "jpeg, segments": lambda count: JPEG[:2] + b"\xff\xe9\0\x02" * count + JPEG[2:],
    "jpeg, comments": lambda count: JPEG[:2] + b"\xff\xfe\0\x03a" * count + JPEG[2:],
    "jpeg, filled": lambda count: JPEG[:2] + b"\xff" * count + JPEG[2:],
    "png, chunks": lambda count: PNG[:33] + chunk(b"prVt", b"") * count + PNG[33:],
    "png, texts": lambda count: PNG[:33] + chunk(b"tEXt", b"a\0b") * count + PNG[33:],
    "gif, a comment": lambda count: gif_of(b"!\xfe" + b"\x01a" * count + b"\0"),
    "gif, comments": lambda count: gif_of(b"!\xfe\x01a\0" * (count // 2)),
    "gif, nothing": lambda count: gif_of(b"\x01" * count),
}


@pytest.mark.parametrize("name", PARTS)
def test_many_parts_are_refused_before_they_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow takes up to 20 seconds for 64 MB of them, and 2 GB."""
    assert isinstance(read_image(PARTS[name](MAX_PARTS // 2), SPEC, "it"), Picture)
    monkeypatch.setattr(pillow, "open", lambda *_, **__: pytest.fail("Pillow read it"))
    kind = name.split(",")[0].upper()
    assert refusal(PARTS[name](2 * MAX_PARTS)).endswith(f"is a {kind} of more than 65536 parts")


def test_parts_of_usual_sizes_may_fill_the_largest_file() -> None:
    """1 KB in a PNG's chunk, 255 bytes in a GIF's block behind the first image, 64 KB in a JPEG's segment."""
    size = sent.MAX_BYTES
    for data in (
        PNG[:33] + chunk(b"IDAT", bytes(1024)) * (size // 1036) + PNG[33:],
        saved("GIF")[:-1] + (b"\xff" + bytes(255)) * (size // 256),
        JPEG[:2] + (b"\xff\xe9\xff\xff" + bytes(65533)) * (size // 65537) + JPEG[2:],
    ):
        assert too_many_parts(data, str(IMAGE.kind_of(data))) is None


def bmp_of(head: bytes, body: bytes) -> bytes:
    return b"BM" + struct.pack("<III", 14 + len(head) + len(body), 0, 14 + len(head)) + head + body


@pytest.mark.parametrize(("compression", "depth"), [(1, 8), (2, 4)])
def test_a_compressed_bmp_is_refused_before_it_is_decoded(
    compression: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow does that in Python: other threads stand still for seconds."""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it was decoded"))
    head = struct.pack("<IiiHHIIiiII", 40, 8192, 8192, 1, depth, compression, 0, 0, 0, 1 << depth, 0) + bytes(4 << depth)
    assert refusal(bmp_of(head, b"\0\x02\xff\xff" * 9000)).endswith("is a compressed BMP")


def test_a_bmp_with_the_shortest_head_is_an_image() -> None:
    """Pixels are where others have their compression."""
    data = bmp_of(struct.pack("<IHHHH", 12, 16, 16, 1, 24), b"\0\0\0\0\1\0\0\0" * 96)
    assert data[30:34] == b"\1\0\0\0"
    assert isinstance(read_image(data, SPEC, "it"), Picture)


def test_markers_of_nothing_are_passed_in_time() -> None:
    assert too_many_parts(b"\xff\xd8" + b"\xff" * (1 << 22) + b"\0", "jpeg") is None


def test_what_pillow_warns_of_is_not_said(tmp_path: Path) -> None:
    data = saved("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x02\0\x0f\x01\x02\0\xff\xff\0\0\x10\0\0\0")
    reading.hush.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert isinstance(read_image(data, SPEC, "it"), Picture)
        assert said == []
        pillow.open(io.BytesIO(data)).getexif()
    reading.hush.cache_clear()


def test_many_at_once_are_as_one_by_one() -> None:
    expected = {name: read_image(data, SPEC, name) for name, data in VALID.items()}
    found = {}

    def read(name: str) -> None:
        found[name] = [read_image(VALID[name], SPEC, name) for _ in range(5)]

    threads = [threading.Thread(target=read, args=(name,)) for name in VALID]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [image] * 5 for name, image in expected.items()}


def test_of_small_ones_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of all are summed with each that is read."""
    monkeypatch.setattr(reading, "_recent", recent := reading._Recent())
    monkeypatch.setattr(sent, "MOST_REMEMBERED", 3)
    for width in range(1, 9):
        assert reading.read_sent(data_url(saved("PNG", pillow.new("L", (width, 1)))), SPEC, "it")[1] == width
    assert [num_sent for _, num_sent in recent._made.values()] == [6, 7, 8]


def test_pillow_is_not_imported_before_there_is_an_image() -> None:
    code = "import sys, nanovllm_cli.images.reading, nanovllm_cli.images.source; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# where images come from


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("name", VALID)
def test_a_file_comes_back_out_of_its_url(name: str) -> None:
    url = data_url(VALID[name])
    kind = re.split(r"[, ]", name)[0]
    assert IMAGE.kind_of(VALID[name]) == kind
    assert url == url_of(VALID[name], f"image/{kind}")
    assert IMAGE.bytes_of(url, "it") == VALID[name]


def test_forms_of_an_url() -> None:
    plain = base64.b64encode(PNG).decode()
    wrapped = "\r\n".join(plain[place : place + 76] for place in range(0, len(plain), 76))
    quoted = plain.replace("=", "%3D").replace("+", "%2b").replace("/", "%2F")
    for url in (
        url_of(PNG, "image/jpg"),
        f"DATA:Image/PNG;BASE64,{plain}",
        f"data:image/png;charset=utf-8;base64,{plain}",
        f"  data:image/png;base64, {wrapped}\n",
        f"data:image/png;base64,{quoted}",
        plain,
        wrapped,
    ):
        assert IMAGE.bytes_of(url, "it") == PNG, url[:40]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://example.com/cat.png",
        " HTTPS://example.com/cat.png",
        "file:///etc/passwd",
        "ftp://example.com/cat.png",
        "blob:https://example.com/1",
        "C:\\cat.png",
        "gopher:data:image/png;base64,AAAA",
    ],
)
def test_no_address_is_opened(url: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^messages\[0\] is an address") as caught:
        IMAGE.bytes_of(url, "messages[0]")
    assert "data:image/png;base64" in str(caught.value.hint)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/etc/passwd",
        "cat.png",
        "../cat/cat/cat/",
        "//example.com/cat.png",
        "aGVsbG8gd29ybGQ=",
        "data:",
        "data:image/png;base64",
        "data:,hello",
        "data:image/png,hello",
        "data:image/svg+xml;utf8,<svg/>",
        "data:text/plain;base64,aGVsbG8=",
        "data:application/pdf;base64,aGVsbG8=",
        "data:image/png;base64,?",
        "data:image/png;base64,aGVsbG8",
        "data:image/png;base64,aGVs=bG8=",
        "data:image/png;base64,aGVsbG8==",
        "data:image/png;base64,aGV%73bG8=",
        "data:image/png;base64,aGVs_-8=",
        "data:image/png;base64,äöü=",
        "data:image/png;base64,\ud800",
        "data:image/png;base64,aGVsbG8=#a",
    ],
)
def test_other_text_is_no_image(url: str) -> None:
    with pytest.raises(UsageError, match=r"^messages\[0\] is ") as caught:
        IMAGE.bytes_of(url, "messages[0]")
    assert "data:image/png;base64" in str(caught.value.hint)


def test_an_url_of_nothing_is_an_empty_image() -> None:
    assert refusal(IMAGE.bytes_of("data:image/png;base64,", "it")).endswith("is empty")


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "MAX_BYTES", len(PNG) - 1)
    for read in (lambda: data_url(PNG), lambda: IMAGE.bytes_of(url_of(PNG), "it"), lambda: IMAGE.bytes_of("A" * 10**6, "it")):
        with pytest.raises(UsageError, match="is too large"):
            read()
    monkeypatch.setattr(sent, "MAX_BYTES", len(PNG))
    assert IMAGE.bytes_of(data_url(PNG), "it") == PNG


@pytest.mark.parametrize("data", [b"", b"no image\n" * 20])
def test_a_file_that_is_no_image(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"cat\.png") as caught:
        data_url(data, "cat.png")
    assert caught.value.hint
