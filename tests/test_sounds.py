"""Sounds: files of several kinds, other rates, and spectrograms against transformers' feature extractors."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import wave as python_wave
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nanovllm_cli import sent as sent_
from nanovllm_cli.children import start_decoder
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import RATE, EarSpec, HearingSpec, Transcript
from nanovllm_cli.sounds import decoder, reading, wav
from nanovllm_cli.sounds.reading import read_sent, read_sound, samples_of
from nanovllm_cli.sounds.resampling import resampled
from nanovllm_cli.sounds.source import SOUND
from nanovllm_cli.sounds.spectrogram import log_mel
from nanovllm_cli.vision_spec import ImageTokens, Sound
from sounding import chunk, in_base64, noise, riff, tone
from sounding import wav as saved

TOKENS = ImageTokens("<|audio_pad|>", "<|audio_pad|>")
SHAPE: dict[str, Any] = {
    "num_bins": 128, "positions": 1500, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8, "out_size": 8,
    "activation": "gelu", "projector": "one",
}  # fmt: skip
LINE, PLANE = EarSpec(**SHAPE, front="line"), EarSpec(**SHAPE, front="plane", chunk=100, channels=3)
AROUND = "<|audio_start|>", "<|audio_end|>"
VOXTRAL = HearingSpec(LINE, TOKENS, 3000, AROUND, Transcript(), padded=True)
QWEN2 = HearingSpec(LINE, TOKENS, 3000, AROUND, Transcript(), padded=True, framed=True, most=1)
QWEN3 = HearingSpec(PLANE, TOKENS, 800, AROUND, Transcript(), least=8000)


def values_of(sound: Sound) -> np.ndarray:
    return np.frombuffer(sound.values, "<f4").reshape(sound.frames, sound.bins)


def at_16_khz(samples: np.ndarray, rate: int, block: int = 1 << 20) -> np.ndarray:
    pieces = (samples[at : at + block].astype(np.float32) for at in range(0, len(samples), block))
    return np.concatenate(list(resampled(pieces, rate, RATE)))


def refused(data: bytes, kind: type[NanovllmError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        read_sound(data, QWEN3, "the sound")
    return caught.value.message


@pytest.mark.parametrize(("bits", "kind"), [(8, 1), (16, 1), (24, 1), (32, 1), (32, 3), (64, 3)])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_wav_files_of_all_widths_are_their_samples(bits: int, kind: int, channels: int) -> None:
    samples = np.stack([noise(RATE // 5 + 1, seed) for seed in range(channels)], axis=1)
    found = samples_of(saved(samples, RATE, bits, kind), "it")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples.mean(axis=1), atol=2 ** -(bits - 1) * 1.01 if kind == 1 and bits < 24 else 1e-6)


def test_a_wav_file_as_python_writes_it() -> None:
    file, numbers = io.BytesIO(), (noise(4000) * 2**15).astype("<i2")
    with python_wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(numbers.tobytes())
    assert (samples_of(file.getvalue(), "it") == numbers.astype(np.float32) / 2**15).all()


def test_other_chunks_and_the_extensible_form_are_read() -> None:
    numbers = (noise(4000) * 2**15).astype("<i2")
    form = struct.pack("<HHIIHHHHI16s", 0xFFFE, 1, RATE, 2 * RATE, 2, 16, 22, 16, 4, b"\1\0" + b"\0" * 14)
    data = riff(chunk(b"LIST", b"odd") + chunk(b"fmt ", form) + chunk(b"data", numbers.tobytes()) + chunk(b"id3 ", b"x"))
    assert (samples_of(data, "it") == numbers.astype(np.float32) / 2**15).all()


@pytest.mark.parametrize("length", [0xFFFFFFFF, 10**6])
def test_a_stream_whose_length_nobody_wrote_is_read_to_its_end(length: int) -> None:
    data = saved(noise(4001))
    place = data.index(b"data") + 4
    streamed = data[:place] + struct.pack("<I", length) + data[place + 4 :]
    assert (samples_of(streamed, "it") == samples_of(data, "it")).all()
    assert len(samples_of(streamed[:-1], "it")) == 4000, "half a sample is none"


def test_a_recording_that_was_cut_off_before_its_lengths_were_written_is_read_to_its_end() -> None:
    data = saved(np.full(4000, 0.1))
    place = data.index(b"data") + 4
    begun = data[:4] + bytes(4) + data[8:place] + bytes(4) + data[place + 4 :]
    assert (samples_of(begun, "it") == samples_of(data, "it")).all()
    empty = data[:place] + bytes(4) + b"LIST" + struct.pack("<I", 8000) + bytes(8000)
    assert "shorter" in refused(empty), "what was written to its end has no samples"


@pytest.mark.parametrize("rate", [1000, 8000, 11025, 22050, 44100, 44101, 48000, 192_000])
def test_a_tone_at_another_rate_is_the_same_tone(rate: int) -> None:
    hertz, seconds = 0.38 * min(rate, RATE), 2.0 if rate < 8000 else 0.5
    found = at_16_khz(tone(hertz, rate, seconds), rate)
    expected = tone(hertz, RATE, seconds)
    assert len(found) == len(expected)
    inner = slice(len(found) // 8, -len(found) // 8)
    np.testing.assert_allclose(found[inner], expected[inner], atol=1e-4)


def test_what_is_too_high_for_a_rate_does_not_fold_back() -> None:
    found = at_16_khz(tone(9500, 48000, 0.5), 48000)
    assert np.abs(found[1000:-1000]).max() < 1e-4


def test_a_sound_keeps_its_length_at_odd_rates() -> None:
    for rate, count in ((44100, 4411), (8000, 801), (44101, 5000), (96000, 17)):
        assert len(at_16_khz(noise(count), rate)) == -(-count * RATE // rate)
    assert (at_16_khz(np.ones(4410), 44100)[200:-200].round(5) == 1).all()


@pytest.mark.parametrize("rate", [8000, 44100, 44101, 192_000])
def test_a_sound_is_the_same_in_blocks_of_any_length(rate: int) -> None:
    samples = noise(20_011)
    whole = at_16_khz(samples, rate)
    for block in (1, 997, 4096, 20_010):
        assert (at_16_khz(samples[: 3000 if block == 1 else None], rate, block)[:100] == whole[:100]).all()
        if block > 1:
            assert (at_16_khz(samples, rate, block) == whole).all()


# ---- spectrograms ----


@pytest.mark.parametrize("bins", [80, 128])
def test_a_spectrogram_is_that_of_whisper(bins: int) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    samples = np.zeros(30 * RATE, np.float32)
    samples[: 2 * RATE] = tone(440, RATE, 2) + noise(2 * RATE)
    expected = extractor(samples, sampling_rate=RATE)["input_features"][0]
    np.testing.assert_allclose(log_mel(samples, bins), expected.T, atol=5e-5)


@pytest.mark.parametrize("count", [RATE * 30, RATE * 31 + 77, 2001])
def test_pieces_are_those_of_voxtral(count: int) -> None:
    """Which pads to whole halves of minutes, and cuts what comes of all of it."""
    transformers = pytest.importorskip("transformers")
    samples = noise(count).astype(np.float32)
    expected = transformers.WhisperFeatureExtractor(feature_size=128)(
        samples, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=30 * RATE
    )["input_features"][0]
    clip = read_sound(saved(samples, bits=32, kind=3), VOXTRAL, "it")
    assert [(each.frames, each.heard) for each in clip.images] == [(3000, 3000)] * -(-count // (30 * RATE))
    np.testing.assert_allclose(np.concatenate(list(map(values_of, clip.images))), expected.T, atol=5e-5)
    assert clip.seconds == pytest.approx(count / RATE)


@pytest.mark.parametrize(
    ("count", "tokens"), [(2000, 7), (7999, 7), (8001, 7), (128_000, 104), (128_159, 104), (300_001, 18 * 13 + 10)]
)
def test_pieces_are_those_of_qwen3_asr(count: int, tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    samples = noise(count).astype(np.float32)
    extractor = transformers.Qwen3ASRFeatureExtractor()
    given = extractor(samples, sampling_rate=RATE, padding=True, return_attention_mask=True)
    heard = int(given["attention_mask"].sum())
    clip = read_sound(saved(samples, bits=32, kind=3), QWEN3, "it")
    found = np.concatenate(list(map(values_of, clip.images)))
    assert len(found) == heard == sum(each.heard for each in clip.images)
    assert all(each.frames == 800 for each in clip.images[:-1])
    np.testing.assert_allclose(found, given["input_features"][0].numpy().T[:heard], atol=5e-5)
    assert QWEN3.num_tokens(clip) == tokens


@pytest.mark.parametrize("count", [2000, 2001, 160_000, 480_000])
def test_what_qwen2_audio_hears_is_as_long_as_the_sound(count: int) -> None:
    transformers = pytest.importorskip("transformers")
    samples = noise(count).astype(np.float32)
    given = transformers.WhisperFeatureExtractor(feature_size=128)(samples, sampling_rate=RATE, return_attention_mask=True)
    (sound,) = read_sound(saved(samples, bits=32, kind=3), QWEN2, "it").images
    assert (sound.frames, sound.heard) == (3000, given["attention_mask"].sum())
    np.testing.assert_allclose(values_of(sound), given["input_features"][0].T, atol=5e-5)


def test_digests_tell_sounds_apart() -> None:
    first = read_sound(saved(noise(4000)), QWEN3, "it").images[0]
    assert first == read_sound(saved(noise(4000)), QWEN3, "it").images[0]
    others = [Sound.of(first.values, *sizes) for sizes in ((49, 50, 128), (50, 49, 128), (50, 50, 64))]
    others.append(read_sound(saved(noise(4000, 1)), QWEN3, "it").images[0])
    assert len({each.digest for each in (first, *others)}) == 5


# ---- other kinds ----


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)])
def test_compressed_kinds_are_heard(kind: str, subtype: str | None) -> None:
    soundfile = pytest.importorskip("soundfile")
    file, samples = io.BytesIO(), np.stack([tone(440, 48000, 1), tone(440, 48000, 1)], axis=1)
    soundfile.write(file, samples, 48000, format=kind, subtype=subtype)
    found = samples_of(file.getvalue(), "it")
    spectrum = np.abs(np.fft.rfft(found[2000:14000]))
    assert spectrum.argmax() * RATE / 12000 == pytest.approx(440, abs=2)
    assert np.abs(found[2000:14000]).max() == pytest.approx(0.5, abs=0.03)
    assert "damaged" in refused(file.getvalue()[:60])
    for cut in (len(file.getvalue()) // 2, 300):
        with contextlib.suppress(UsageError):
            samples_of(file.getvalue()[:cut], "it")


def test_an_mp3_that_ends_in_the_middle_is_heard_so_far() -> None:
    """As a WAV is, a download that was broken off or a recorder without power: its header tells of more frames than came."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(440, 48000, 3.0), 48000, format="MP3")
    whole = samples_of(file.getvalue(), "it")
    for share in (0.5, 0.9, 0.99):
        found = samples_of(file.getvalue()[: int(len(file.getvalue()) * share)], "it")
        assert len(found) / RATE == pytest.approx(3 * share, abs=0.15)
        np.testing.assert_allclose(found[: len(found) - 2000], whole[: len(found) - 2000], atol=1e-3)


@pytest.mark.parametrize("kind", ["FLAC", "OGG", "MP3"])
def test_damaged_sounds_write_nothing_and_leave_no_process(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libmpg123 tells standard error of each frame that it can't decode."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(440, 48000, 2), 48000, format=kind)
    data = np.frombuffer(file.getvalue(), np.uint8).copy()
    data[len(data) // 3 :] = np.random.default_rng(0).integers(0, 256, len(data) - len(data) // 3, np.uint8)
    children: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with contextlib.suppress(UsageError):
        samples_of(data.tobytes(), "it")
    assert capfd.readouterr() == ("", "")
    assert [child.returncode is not None for child in children] == [True]


def test_a_decoder_that_dies_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for code, told in (
        ("import sys; sys.stdin.buffer.read(); sys.exit(1)", "damaged"), ("import os; os.abort()", "damaged"),
        ("print('[\"FLAC\", 16000, 1]', flush=True); import os; os.abort()", "damaged"),
        ("print('[\"AIFF\", 16000, 1]')", "damaged"), ("print('[\"FLAC\", 16000, 99]')", "damaged"),
        ("print('[\"FLAC\", 16', end='')", "damaged"), ("print('[[], 16000, 1]')", "damaged"), ("print('7')", "damaged"),
        ("print('[\"FLAC\", null, 1]')", "damaged"), ("print('[\"FLAC\", 16000, null]')", "damaged"),
    ):  # fmt: skip
        (tmp_path / "decoder.py").write_text(code)
        monkeypatch.setattr(decoder, "__file__", str(tmp_path / "decoder.py"))
        assert told in refused(b"fLaC" + b"\0" * (1 << 20))
    (tmp_path / "decoder.py").write_text(f"import sys; sys.exit({decoder.NO_LIBRARY})")
    assert "soundfile is not installed" in refused(b"fLaC" + b"\0" * 100, UnsupportedError)


def test_few_bytes_that_stand_for_very_many_samples() -> None:
    """Silence of 32 channels: what takes long to decode is ended while it is decoded."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 192_000, 8, format="FLAC") as out:
        for _ in range(200):
            out.write(np.zeros((192_000, 8), np.int16))
    assert len(file.getvalue()) < 1 << 20
    assert "million samples, in 8 channels" in refused(file.getvalue())
    with pytest.raises(UsageError, match="longer than the 30 seconds that the model hears"):
        read_sound(file.getvalue(), QWEN2, "it")


def test_a_flac_behind_a_tag() -> None:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, noise(4000), RATE, format="FLAC")
    tag = b"ID3\4\0\0" + bytes([0, 0, 1, 0]) + b"\0" * 128
    np.testing.assert_array_equal(samples_of(tag + file.getvalue(), "it"), samples_of(file.getvalue(), "it"))


def test_what_stands_behind_an_rf64s_samples_is_not_heard() -> None:
    """Its length is in a chunk of its own."""
    samples, form = b"\1\0" * 4000, struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    for size, heard in ((8000, 4000), (0, 4500), (1 << 60, 4500)):
        sizes = chunk(b"ds64", struct.pack("<QQQI", 0, size, 0, 0))
        data = b"RF64\xff\xff\xff\xffWAVE" + sizes + chunk(b"fmt ", form) + b"data\xff\xff\xff\xff" + samples + b"axml" * 250
        assert len(samples_of(data, "it")) == heard


@pytest.mark.filterwarnings("error")
def test_numbers_too_large_for_any_sound_are_told_of_once() -> None:
    assert "no numbers" in refused(saved(np.full(4000, 1e300), bits=64, kind=3))
    data = saved(np.full((4000, 2), 3e38), bits=32, kind=3)
    assert "no numbers" in refused(data)


def test_a_wav_needs_no_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(samples_of(saved(noise(4000)), "it")) == 4000
    assert "soundfile is not installed" in refused(b"fLaC" + b"\0" * 100, UnsupportedError)


def test_numpy_alone_is_imported_to_read_a_wav() -> None:
    code = "import sys, nanovllm_cli.sounds.reading; sys.exit(bool({'soundfile', 'torch'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what is none ----

GOOD = saved(noise(4000))
FORM = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
BAD = {
    "nothing": (b"", "is empty"),
    "a text": (b"hello, what is this?", "no sound of a kind"),
    "an image": (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "no sound of a kind"),
    "another RIFF": (b"RIFF\0\0\0\0WEBPVP8 ", "no sound of a kind"),
    "a head alone": (riff(b""), "without samples"),
    "no form": (riff(chunk(b"data", b"\0" * 8000)), "without samples"),
    "half a form": (riff(chunk(b"fmt ", FORM[:10]) + chunk(b"data", b"\0" * 8000)), "doesn't say"),
    "no channels": (riff(chunk(b"fmt ", FORM[:2] + b"\0\0" + FORM[4:]) + chunk(b"data", b"\0" * 8000)), "0 channels"),
    "65535 channels": (riff(chunk(b"fmt ", FORM[:2] + b"\xff\xff" + FORM[4:]) + chunk(b"data", b"\0" * 8000)), "65535 channels"),
    "another width": (riff(chunk(b"fmt ", FORM[:12] + b"\7\0" + FORM[14:]) + chunk(b"data", b"\0" * 8000)), "frames of 7"),
    "no rate": (riff(chunk(b"fmt ", FORM[:4] + b"\0\0\0\0" + FORM[8:]) + chunk(b"data", b"\0" * 8000)), "0 samples a second"),
    "a rate beyond all": (riff(chunk(b"fmt ", FORM[:4] + b"\xff\xff\xff\xff" + FORM[8:]) + chunk(b"data", b"\0" * 8000)),
                          "4294967295 samples a second"),
    "no samples": (riff(chunk(b"fmt ", FORM) + chunk(b"data", b"")), "shorter than"),
    "a click": (saved(noise(RATE // 10 - 1)), "shorter than"),
    "chunks without end": (riff(chunk(b"junk", b"") * 2000 + GOOD[12:]), "without samples"),
    "numbers that are none": (saved(np.where(np.arange(4000) == 7, np.nan, 0.1), bits=32, kind=3), "no numbers"),
    "infinite numbers": (saved(np.where(np.arange(4000) == 7, np.inf, 0.1), bits=64, kind=3), "no numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_sound_is_refused(name: str) -> None:
    data, told = BAD[name]
    assert told in refused(data)


@pytest.mark.parametrize(
    ("kind", "bits", "told"), [(7, 8, "compressed kind 0x7"), (1, 40, "40 bits"), (3, 16, "floats of 16 bits"), (2, 4, "0x2")]
)
def test_wav_files_of_other_samples_are_refused_by_name(kind: int, bits: int, told: str) -> None:
    form = struct.pack("<HHIIHH", kind, 1, RATE, RATE * 2, bits // 8, bits)
    assert told in refused(riff(chunk(b"fmt ", form) + chunk(b"data", b"\0" * 8000)), UnsupportedError)


def test_loud_samples_stay_finite() -> None:
    clip = read_sound(saved(np.full(4000, 1e30), bits=32, kind=3), QWEN3, "it")
    assert np.isfinite(values_of(clip.images[0])).all()


def test_a_sound_may_be_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_SECONDS", 2)
    assert read_sound(saved(noise(2 * RATE)), QWEN3, "it").seconds == 2
    assert "longer than" in refused(saved(noise(2 * RATE + 1)))
    monkeypatch.setattr(reading, "MAX_SECONDS", 60)
    with pytest.raises(UsageError, match="longer than the 30 seconds that the model hears"):
        read_sound(saved(noise(30 * RATE + 1)), QWEN2, "it")
    assert wav.MAX_CHANNELS == 32


def test_how_a_sound_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for sent in (in_base64(GOOD), SOUND.data_url(GOOD), "data:audio/x-wav;base64," + in_base64(GOOD), "data:video/ogg;base64,"
                 + in_base64(GOOD), "\n" + in_base64(GOOD)):  # fmt: skip
        assert SOUND.bytes_of(sent, "it") == GOOD
    for sent, told in (("http://127.0.0.1/a.wav", "none is opened"), ("file:///etc/passwd", "none is opened")):
        with pytest.raises(UnsupportedError, match=told):
            SOUND.bytes_of(sent, "it")
    for sent in ("/etc/passwd", "data:text/plain;base64,AAAA", "data:audio/wav,abc", "data:audio/wav;base64,???"):
        with pytest.raises(UsageError):
            SOUND.bytes_of(sent, "it")
    monkeypatch.setattr(sent_, "MAX_BYTES", len(GOOD) - 1)
    sent_as = (in_base64(GOOD), "A" * 10**6)
    for read in (lambda: SOUND.data_url(GOOD), *(lambda each=each: SOUND.bytes_of(each, "it") for each in sent_as)):
        with pytest.raises(UsageError, match="too large"):
            read()


def test_a_sound_that_was_read_last_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(reading, "read_sound", lambda *given: read.append(given[2]) or read_sound(*given))
    sent = in_base64(saved(noise(5000, 9)))
    clips = [read_sent(sent, spec, where, salt) for spec, where, salt in
             ((QWEN3, "a", None), (QWEN3, "b", None), (QWEN3, "c", "salt"), (VOXTRAL, "d", None))]  # fmt: skip
    assert read == ["a", "c", "d"]
    assert clips[0] == clips[1] == clips[2] != clips[3]


def test_a_decoder_runs_within_its_limits(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("elsewhere memory has none")
    (tmp_path / "program.py").write_text(
        "import resource, sys\n"
        "kinds = resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_AS\n"
        "print([resource.getrlimit(each)[0] for each in kinds], __name__, 'nanovllm_cli' in sys.modules)\n"
    )
    program = SimpleNamespace(__file__=str(tmp_path / "program.py"), SECONDS=7, BYTES=1 << 30)
    out, _ = start_decoder(cast(ModuleType, program)).communicate(b"")
    assert out.decode() == f"[0, 7, {1 << 30}] __main__ False\n"
