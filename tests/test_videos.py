"""Videos read: which frames, at which times, upright and of which size; and files that are none, or made to do harm."""

from __future__ import annotations

import base64
import contextlib
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from filming import clip, frame, moving, sound_alone
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.images import video_decoder, video_decoding, videos
from nanovllm_cli.images.video_sampling import sampled
from nanovllm_cli.images.video_source import VIDEO
from nanovllm_cli.images.video_texts import in_words, texts_of
from nanovllm_cli.images.videos import read_video
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.tokens_spec import ImageTokens
from nanovllm_cli.video_spec import VideoSpec
from nanovllm_cli.vision_spec import Image

TOKENS = ImageTokens("<v>", "<v>")
AREA = SizeRule("area", 8, min_pixels=64, max_pixels=64 * 48)
QWEN3 = VideoSpec(TOKENS, AREA, "spaced", "qwen3", step=2, least_frames=4)
FRAMES = VideoSpec(TOKENS, AREA, "even", "internvl", fps=5.0)
CODECS = [
    ("mpeg4", "mp4"), ("libx264", "mp4"), ("mpeg4", "mov"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("mpeg2video", "mpegts"),
    ("libx264", "matroska"), ("mpeg1video", "mpeg"), ("flv", "flv"), ("libtheora", "ogg"), ("libx265", "mp4"),
    ("libsvtav1", "mp4"),
]  # fmt: skip


def pixels(image: Image) -> np.ndarray:
    return np.frombuffer(image.pixels, np.uint8).reshape(-1, image.height, image.width, 3)


def reds(data: bytes, spec: VideoSpec = FRAMES) -> list[float]:
    """How far each frame is, by its grey."""
    made = [each for image in read_video(data, spec, "it").images for each in pixels(image)]
    return [float(each[-(len(each) // 3) :].mean()) for each in made]


def far(number: int, count: int = 50) -> float:
    return float(frame(number, count, (8, 8))[-1].mean())


@pytest.mark.parametrize(("codec", "container"), CODECS)
def test_frames_of_each_container(codec: str, container: str) -> None:
    """Every fifth of a second, of those that follow each other by 25."""
    av: Any = pytest.importorskip("av")
    if codec not in av.codecs_available:
        pytest.skip(f"FFmpeg is without {codec} here")
    found = reds(clip(codec=codec, container=container, size=(128, 96)))
    np.testing.assert_allclose(found, [far(number) for number in range(0, 50, 5)], atol=5)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_images_that_move_need_no_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_decoding, "find_spec", lambda name: None)
    found = reds(moving(10, kind=kind))
    np.testing.assert_allclose(found, [far(number, 10) for number in range(0, 10, 2)], atol=3)
    assert len(reds(moving(1, kind=kind), QWEN3)) == 2  # one that stands still is a video of a frame


def test_an_image_of_two_frames_and_its_time() -> None:
    """Pixels are those that Pillow makes of what PyAV decodes, colours and all."""
    av: Any = pytest.importorskip("av")
    data = clip(50, size=(100, 60))
    video = read_video(data, replace(QWEN3, fps=2.0), "it")
    assert [(each.frames, each.height, each.width) for each in video.images] == [(2, 40, 64)] * 2
    assert video.texts == ("<0.3 seconds><|vision_start|>", "<|vision_end|><1.6 seconds><|vision_start|>", "<|vision_end|>")
    assert (video.times, video.seconds) == ((), 2.0)
    import io

    with av.open(io.BytesIO(data)) as file:
        every = [each.to_image() for each in file.decode(video=0)]
    for at, number in enumerate((0, 16, 33, 49)):  # numpy's linspace(0, 49, 4), rounded
        expected = np.asarray(every[number].resize((64, 40), 3))
        assert np.array_equal(pixels(video.images[at // 2])[at % 2], expected)


def test_a_last_frame_is_shown_twice_where_images_are_of_two() -> None:
    video = read_video(clip(5), QWEN3, "it")
    assert len(video.images) == 2
    assert len(read_video(clip(3), replace(QWEN3, least_frames=3), "it").images) == 2
    last = pixels(read_video(clip(3), replace(QWEN3, least_frames=3), "it").images[-1])
    assert np.array_equal(last[0], last[1])


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_what_a_phone_has_turned_is_upright(turned: int) -> None:
    """Green is above in what was recorded; to the left of that it is at the left."""
    image = read_video(clip(10, turned=turned if turned < 180 else turned - 360), FRAMES, "it").images[0]
    assert ((image.height, image.width) == (48, 64)) == (turned == 180)
    green = np.ptp(pixels(image)[0].astype(int), axis=-1) > 100
    top, left = green[: image.height // 2].mean(), green[:, : image.width // 2].mean()
    assert {90: left > 0.9, 180: top < 0.1, 270: left < 0.1}[turned]


def test_pixels_that_are_no_squares_become_some() -> None:
    image = read_video(clip(5, size=(48, 48), shape=Fraction(2, 1)), FRAMES, "it").images[0]
    assert image.width / image.height == pytest.approx(2, abs=0.3)


def test_frames_are_found_by_their_times() -> None:
    """Half a second of many frames, then one that stays for long: what is shown at a time is taken, not the next."""
    times = [*range(0, 50, 5), 400]
    data = clip(11, rate=100, times=times, container="matroska")
    film = replace(FRAMES, fps=1.0)
    video = read_video(data, film, "it")
    assert video.seconds == pytest.approx(4.0, abs=0.5)
    found = reds(data, film)
    assert found[0] == pytest.approx(far(0, 11), abs=4)
    assert found[1:3] == pytest.approx([far(9, 11)] * 2, abs=4)


def test_a_long_video_is_sought_in_and_gives_the_same_frames() -> None:
    """Keyframes every 25 frames: of 2,000, four are wanted."""
    data = clip(2000, size=(16, 16), g="25")
    spec = replace(FRAMES, num_frames=4)
    np.testing.assert_allclose(reds(data, spec), [far(number, 2000) for number in (0, 500, 1000, 1500)], atol=4)


def test_what_limits_there_are() -> None:
    data = clip(50)
    assert len(read_video(data, FRAMES.limited(64, 8, None, 3), "it").images) == 3
    assert len(read_video(data, FRAMES.limited(64, 8, 25.0, 100), "it").images) == 50
    small = read_video(data, FRAMES.limited(4, 8, None, 100), "it").images[0]
    assert small.height * small.width <= 4 * 64
    shared = replace(QWEN3, most_pixels=4 * 32 * 24, size=replace(AREA, min_pixels=0))
    assert {each.height * each.width for each in read_video(data, shared, "it").images} == {32 * 24}
    assert QWEN3.limited(64, 8, None, 1).most_frames == 2, "of an image that has two"


@pytest.mark.parametrize(("name", "expected"), [  # of transformers 5.24's processors, for 100 frames at 30 a second
    ("spaced", [0, 20, 40, 59, 79, 99]), ("even", [0, 16, 33, 50, 66, 83]), ("middles", [8, 25, 41, 58, 75, 91]),
    ("seconds", [0, 15, 30, 45, 60, 75]), ("trimmed", [0, 16, 33, 49, 66, 82, 99]),
])  # fmt: skip
def test_which_frames_are_taken(name: Any, expected: list[int]) -> None:
    assert sampled(replace(QWEN3, sampling=name, fps=2.0), 100, 30.0) == expected


def test_glm_4_6_takes_fewer_a_second_the_longer_a_video_is() -> None:
    """transformers 5.24's Glm46VVideoProcessor: 3 images of 2 frames a second up to half a minute, then 1, then 1 in two."""
    spec = replace(QWEN3, sampling="dynamic", fps=0.0)
    assert sampled(spec, 60, 30.0) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 56]
    assert len(sampled(spec, 1500, 25.0)) == 120
    assert len(sampled(spec, 25 * 600, 25.0)) == 600


def test_some_frame_is_always_taken_and_none_that_is_not_there() -> None:
    for name in ("spaced", "even", "middles", "seconds", "dynamic", "trimmed"):
        for total in (1, 2, 3, 7, 1000):
            for rate in (0.5, 24000 / 1001, 240.0):
                found = sampled(replace(QWEN3, sampling=name, most_frames=6), total, rate)
                assert 1 <= len(found) <= 6
                assert found == sorted(found)
                assert 0 <= found[0] <= found[-1] < total


def test_texts_are_as_models_were_trained() -> None:
    times = [[0.0], [61.54]]
    assert texts_of("internvl", times, 90.0) == ("Frame1: <img>", "</img>\nFrame2: <img>", "</img>")
    assert texts_of("gemma4", times, 90.0) == ("00:00 <|image>", "<image|> 01:01 <|image>", "<image|>")
    assert texts_of("glm", times, 90.0)[1:] == ("<|end_of_image|>0<|begin_of_image|>", "<|end_of_image|>61")
    assert texts_of("glm4.6", times, 90.0)[-1] == "<|end_of_image|>61.5 seconds"
    assert texts_of("plain", times, 90.0) == ("", "", "")
    assert texts_of("qwen2", times, 90.0) == ("<|vision_start|>", "", "<|vision_end|>")
    around = "<fake_token_around_image>"
    assert texts_of("smolvlm", times, 3690.0) == (
        "You are provided the following series of two frames from a 1:01:30 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{around}<global-img>",
        f"{around}\nFrame from 01:01:{around}<global-img>", f"{around}\n\n",
    )  # fmt: skip
    assert [in_words(number) for number in (0, 13, 20, 64, 100, 101, 768)] == [
        "zero", "thirteen", "twenty", "sixty-four", "one hundred", "one hundred and one", "seven hundred and sixty-eight",
    ]  # fmt: skip


def test_positions_in_time() -> None:
    """Of Qwen2.5-VL: two a second, of pairs that are half a second apart or two; of Qwen2-VL one a pair."""
    data = clip(100)
    spec = VideoSpec(TOKENS, AREA, "even", "qwen2", step=2, pace=2.0)
    assert read_video(data, spec, "it").times == (0, 2, 4, 6)
    assert read_video(data, replace(spec, fps=1.0), "it").times == (0, 4)
    assert read_video(data, replace(spec, pace=0.0), "it").times == (0, 1, 2, 3)


BAD: list[tuple[str, str]] = [
    ("nothing", "is empty"), ("a text", "no video of a kind"), ("a sound", "has no pictures"), ("cut off", "damaged or cut off"),
    ("without an index", "damaged or cut off"), ("noise in it", "damaged or cut off"), ("a cut GIF", "damaged or cut off"),
    ("a playlist", "no video of a kind"), ("a thin one", "one side is more than 200 times"),
]  # fmt: skip


def bad(name: str) -> bytes:
    if name in ("nothing", "a text"):
        return b"" if name == "nothing" else b"a text of some words, and no video at all"
    if name == "a sound":
        return sound_alone()
    if name == "cut off":
        return clip()[:900]
    if name == "without an index":
        return clip()[: len(clip()) // 2]
    if name == "noise in it":
        pytest.importorskip("av", reason="PyAV decodes videos: pip install av")
        return b"\x1a\x45\xdf\xa3" + np.random.default_rng(0).bytes(4000)
    if name == "a cut GIF":
        return moving()[:300]
    if name == "a playlist":
        return b"ffconcat version 1.0\nfile '/etc/passwd'\n#EXTM3U\nhttp://127.0.0.1/x.ts\n"
    return clip(3, size=(8000, 16))


@pytest.mark.parametrize(("name", "told"), BAD)
def test_what_is_no_video_is_told_so(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_video(bad(name), FRAMES, "it")


def test_bytes_that_anybody_changed_break_nothing() -> None:
    """Whatever it is, it ends in frames or in a typed error."""
    good, random = bytearray(clip(20)), np.random.default_rng(1)
    for _ in range(6):
        data = bytearray(good)
        for place in random.integers(40, len(data), 20):
            data[place] = random.integers(256)
        with contextlib.suppress(NanovllmError):
            assert read_video(bytes(data), FRAMES, "it").images


def test_a_container_is_not_read_as_another() -> None:
    """An MKV's first bytes, and an MP4 behind them: FFmpeg would find that by itself."""
    with pytest.raises(UsageError, match="damaged"):
        read_video(b"\x1a\x45\xdf\xa3" + bytes(4) + clip(), FRAMES, "it")


def test_a_codec_that_is_not_listed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = Path(video_decoder.__file__).read_text().replace('"mpeg4", "mpeg1video"', '"mpeg1video"')
    (tmp_path / "decoder.py").write_text(text)
    monkeypatch.setattr(video_decoder, "__file__", str(tmp_path / "decoder.py"))
    with pytest.raises(UnsupportedError, match="codec 'mpeg4'"):
        read_video(clip(), FRAMES, "it")


def test_what_decodes_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_decoding, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="PyAV is not installed") as caught:
        read_video(b"\0\0\0\x18ftypmp42" + bytes(40), FRAMES, "it")
    assert "pip install" in str(caught.value.hint)


def test_a_decoder_ends_with_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    monkeypatch.setattr(video_decoding.subprocess, "Popen", Popen)
    monkeypatch.setattr(videos, "frame_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_video(clip(), FRAMES, "it")
    assert children[0].returncode is not None


def test_limits_of_time_and_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    data, gif = clip(50), moving(10)
    monkeypatch.setattr(video_decoding, "MAX_SECONDS", 0.5)
    for each in (data, gif):
        with pytest.raises(UsageError, match="longer than"):
            read_video(each, FRAMES, "it")
    monkeypatch.setattr(video_decoding, "MAX_MOVING_PIXELS", 10_000)
    with pytest.raises(UsageError, match="more than are read"):
        read_video(gif, FRAMES, "it")


def test_how_a_video_is_sent() -> None:
    data = clip(5)
    url = VIDEO.data_url(data)
    assert url.startswith("data:video/mp4;base64,")
    assert VIDEO.bytes_of(url, "it") == VIDEO.bytes_of(base64.b64encode(data).decode(), "it") == data
    assert VIDEO.data_url(moving(2)).startswith("data:video/gif;base64,")
    for sent in ("https://example.org/a.mp4", "file:///etc/passwd", "concat:a.mp4|b.mp4"):
        with pytest.raises(UnsupportedError, match="none is opened"):
            VIDEO.bytes_of(sent, "it")
    with pytest.raises(UsageError, match="neither a data URL nor a video"):
        VIDEO.bytes_of("/etc/passwd", "it")
    first = videos.read_sent(url, FRAMES, "it")
    assert videos.read_sent(url, FRAMES, "it") is first is not videos.read_sent(url, FRAMES, "it", "salt")


def test_the_decoder_imports_nothing_of_ours() -> None:
    command = [sys.executable, "-P", video_decoder.__file__]
    found = subprocess.run(command, input=b'[0, "mov"]\n', capture_output=True, check=False)
    assert found.returncode in (1, video_decoder.NO_LIBRARY)
    assert "nanovllm" not in Path(video_decoder.__file__).read_text()
