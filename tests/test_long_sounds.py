"""Sounds that are as long as a meeting, and those in containers, such as videos'."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import RATE
from nanovllm_cli.sounds import decoding, reading
from nanovllm_cli.sounds.reading import read_sound, read_while_wanted, samples_of
from nanovllm_cli.sounds.spectrogram import log_mel, streamed_log_mel
from sounding import noise, tone
from sounding import wav as saved
from test_sounds import QWEN3, refused


@pytest.mark.parametrize("count", [201, 1000, 16_000, 4096 * 160 - 1, 4096 * 160 + 240, 4096 * 160 + 241, 700_077])
def test_a_spectrogram_is_the_same_of_parts(count: int) -> None:
    """To the bit, wherever a sound is parted."""
    samples = noise(count, count).astype(np.float32)
    for least in (0, 48_000):
        whole = log_mel(np.concatenate([samples, np.zeros(max(0, least - count), np.float32)]), 20)
        for size in (173, 1 << 16) if count < 20_000 else (99_991, 1 << 18):
            made = streamed_log_mel((samples[first : first + size] for first in range(0, count, size)), 20, least)
            assert made.num_heard == count
            np.testing.assert_array_equal(np.concatenate(made.parts), whole)


def test_a_dictated_sound_may_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    whisper = replace(QWEN3, piece=100, leads=True)
    monkeypatch.setattr(reading, "MAX_SECONDS", 1)
    monkeypatch.setattr(reading, "MAX_DICTATED_SECONDS", 3)
    (sound,) = read_sound(saved(noise(3 * RATE)), whisper, "it").images
    assert (sound.frames, sound.heard) == (300, 300)
    with pytest.raises(UsageError, match="longer than"):
        read_sound(saved(noise(3 * RATE + 1)), whisper, "it")
    brief = read_while_wanted(saved(noise(RATE)), whisper, "it", lambda: True, if_short=True)
    assert brief == read_sound(saved(noise(RATE)), whisper, "it")
    assert read_while_wanted(saved(noise(RATE + 1)), whisper, "it", lambda: True, if_short=True) is None
    for if_short in (False, True):
        with pytest.raises(UsageError, match="no sound of a kind"):
            read_while_wanted(b"hello", whisper, "it", lambda: True, if_short=if_short)
    with pytest.raises(UsageError, match="longer than"):
        read_while_wanted(saved(noise(3 * RATE + 1)), whisper, "it", lambda: True)
    with pytest.raises(UsageError, match="longer than"):
        read_sound(saved(noise(RATE + 1)), QWEN3, "it")
    with pytest.raises(UsageError, match="shorter than"):
        read_sound(saved(noise(RATE // 10 - 1)), whisper, "it")


def test_a_short_sound_of_many_channels_may_be_one_of_the_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have more samples, as they take longer: a film's six channels at 48 kHz are that of three in stereo."""
    whisper, film = replace(QWEN3, piece=100, leads=True), saved(np.stack([noise(48_000)] * 6, axis=1), rate=48_000)
    monkeypatch.setattr(reading, "MAX_SECONDS", 2)
    monkeypatch.setattr(reading, "MAX_DICTATED_SECONDS", 3)
    assert read_while_wanted(film, whisper, "it", lambda: True, if_short=True) is None
    assert read_while_wanted(film, whisper, "it", lambda: True) == read_sound(film, whisper, "it")
    monkeypatch.setattr(reading, "MAX_DICTATED_SECONDS", 2)
    with pytest.raises(UsageError, match="samples, in 6 channels"):
        read_while_wanted(film, whisper, "it", lambda: True)


def test_a_sound_that_nobody_wants_any_more_is_not_read_to_its_end() -> None:
    whisper, asked = replace(QWEN3, piece=100, leads=True), []

    def wanted() -> bool:
        asked.append(1)
        return len(asked) < 3

    with pytest.raises(UsageError, match="no longer wanted"):
        read_while_wanted(saved(noise(60 * 44_100), rate=44_100), whisper, "it", wanted)
    assert len(asked) == 3


def test_an_hour_is_read_in_the_memory_of_its_spectrogram() -> None:
    """80 bands of an hour are 115 MB: beside these and the file there is no copy of its samples, which are 230 MB."""
    code = """
import resource, sys
import numpy as np
from dataclasses import replace
from nanovllm_cli.sounds.reading import read_sound
from sounding import wav
from test_sounds import QWEN3
data = wav(np.zeros(3600 * 16_000, np.float32), bits=8)
spec = replace(QWEN3, piece=3000, leads=True, tower=replace(QWEN3.tower, num_bins=80))
read_sound(data[: 44 + 16_000], spec, "it")
before = int(open("/proc/self/statm").read().split()[1]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (340 << 20),) * 2)
clip = read_sound(data, spec, "it")
assert (clip.seconds, clip.images[0].frames) == (3600, 360_000)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def contained(
    container: str, codec: str, rate: int = 44_100, layout: str = "stereo", *, film: bool = False, sound: bool = True
) -> bytes:
    """Two seconds of a tone of 440 Hz in a file of FFmpeg's."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        video = out.add_stream("mpeg4", rate=10) if film else None
        audio = out.add_stream(codec, rate=rate, layout=layout) if sound else None
        if video is not None:
            video.width = video.height = 32
            video.pix_fmt = "yuv420p"
            for shade in range(20):
                out.mux(video.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, np.uint8))))
            out.mux(video.encode())
        if audio is not None:
            channels = 2 if layout == "stereo" else 1
            samples = np.ascontiguousarray(np.stack([tone(440, rate, 2.0)] * channels).astype(np.float32))
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
            frame.sample_rate = rate
            size = audio.codec_context.frame_size or 1024
            cut = av.AudioResampler(format=audio.codec_context.format.name, layout=layout, rate=rate, frame_size=size)
            for each in [*cut.resample(frame), *cut.resample(None)]:
                out.mux(audio.encode(each))
            out.mux(audio.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "aac", {"film": True}), ("ipod", "aac", {"layout": "mono"}),
        ("matroska", "libopus", {"film": True, "rate": 48_000}),
        ("webm", "libopus", {"rate": 48_000}), ("mov", "pcm_s16le", {"film": True, "rate": 16_000}),
        ("avi", "libmp3lame", {"film": True}),
        ("mpegts", "aac", {}), ("adts", "aac", {}), ("mpeg", "mp2", {"film": True}), ("mp4", "alac", {}),
    ],
)  # fmt: skip
def test_the_sound_of_a_video_is_heard(container: str, codec: str, options: dict[str, Any]) -> None:
    found = samples_of(contained(container, codec, **options), "it")
    assert len(found) / RATE == pytest.approx(2.0, abs=0.1)
    spectrum = np.abs(np.fft.rfft(found))
    assert spectrum.argmax() * RATE / len(found) == pytest.approx(440, abs=2)
    assert found[RATE // 2 : -RATE // 2].std() == pytest.approx(0.5 / 2**0.5, abs=0.02), "as loud as it was"


def test_a_sound_whose_channels_and_rate_change_is_heard_to_its_end() -> None:
    """As in recordings of broadcasts, from one programme to the next."""
    kinds = (44_100, "mono"), (44_100, "stereo"), (32_000, "mono")
    parts = [contained("adts", "aac", rate, layout) for rate, layout in kinds]
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        found = samples_of(b"".join([parts[i] for i in order]), "it")
        assert len(found) / RATE == pytest.approx(6.0, abs=0.3)
        for seconds in (1, 3, 5):  # in the middle of each
            heard = found[int((seconds - 0.5) * RATE) : int((seconds + 0.5) * RATE)]
            assert np.abs(np.fft.rfft(heard)).argmax() == 440
            assert 0.25 < heard.std() < 0.6


def test_what_has_no_sound_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    film = contained("mp4", "aac", film=True, sound=False)
    assert "has no sound in it" in refused(film)
    for cut in (40, len(film) // 2):
        assert "it" in refused(film[:cut])
    good = contained("mp4", "aac")
    for data in (good[:100], good[:8] + bytes(2000), b"\x1a\x45\xdf\xa3" + b"\xff" * 500, b"FLV\x01" + bytes(9)):
        refused(data)
    monkeypatch.setattr(decoding, "find_spec", lambda name: None)
    assert "PyAV is not installed" in refused(good, UnsupportedError)
