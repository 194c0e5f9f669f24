"""Logarithmic mel spectrograms of three kinds, in bands from 0 to 8 kHz, of frames every 10 ms under a Hann window.

Whisper's (Radford et al. 2022; its `log_mel_spectrogram`): frames of 25 ms, reflected at the ends; powers, in bands as wide as
Slaney's auditory toolbox has them, of one area each; what lies more than 80 dB below the loudest is raised to that.

Those of the Universal Speech Model (Zhang et al. 2023), as Gemma 4 has them: frames of 20 ms, the first of which begins half a
frame in front of the sound, in silence, and none of which reaches beyond its end; magnitudes, in bands as wide as HTK has them,
of one height each; all of them raised by a thousandth.

torchaudio's, as Granite Speech has them: Whisper's frames, transformed as 512 points, in bands as wide as HTK has them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW

_TOGETHER = 1 << 12  # frames
_FRAME, _POINTS = 320, 512  # samples of a universal one's, and what they are transformed as


def log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz, more than 200 of them -> [n // 160, bins] float32."""
    return _of_powers(samples, len(samples) // HOP, mel_bands(bins), WINDOW)


def paired_log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz, more than 200 of them -> [n // 160 + 1 or one less, an even number, bins] float32."""
    return _of_powers(samples, (len(samples) // HOP + 1) // 2 * 2, _universal_bands(bins), _POINTS)


def _of_powers(samples: np.ndarray, count: int, bands: np.ndarray, points: int) -> np.ndarray:
    """bands: of frames that are transformed as so many points."""
    padded = np.pad(samples.astype(np.float32), WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    out = np.empty((count, bands.shape[1]), np.float32)
    for first in range(0, count, _TOGETHER):
        spectrum = np.fft.rfft(frames[first : min(first + _TOGETHER, count)] * window, points, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        out[first : first + _TOGETHER] = np.log10(np.maximum(power @ bands, 1e-10))
    if count:
        np.maximum(out, out.max() - 8, out=out)
    return (out + 4) / 4


def universal_log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz -> [(n - 1) // 160, bins] float32."""
    count = max(0, (len(samples) - 1) // HOP)
    out = np.empty((count, bins), np.float32)
    if not count:
        return out
    padded = np.concatenate([np.zeros(_FRAME // 2, np.float32), samples])
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::HOP][:count]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)
    bands = _universal_bands(bins)
    for first in range(0, count, _TOGETHER):
        spectrum = np.fft.rfft(frames[first : first + _TOGETHER] * window, _POINTS, axis=1)
        out[first : first + _TOGETHER] = np.log(np.abs(spectrum) @ bands + 1e-3)
    return out


@lru_cache(maxsize=4)
def mel_bands(bins: int) -> np.ndarray:
    """[201, bins]: triangles that meet in the middle of each other, of one area each."""
    points = _hertz(np.linspace(0.0, _mel(RATE / 2), bins + 2))
    bands: np.ndarray = _triangles(points, WINDOW) * 2 / (points[2:] - points[:-2])
    return bands


@lru_cache(maxsize=4)
def _universal_bands(bins: int) -> np.ndarray:
    """[257, bins]. The highest of many fall between two of the frequencies, and are nothing."""
    top = np.log1p(RATE / 2 / 700)  # of HTK's mels, but for what they are multiplied with
    return _triangles(700 * np.expm1(np.linspace(0.0, top, bins + 2)), _POINTS)


def _triangles(points: np.ndarray, num_points: int) -> np.ndarray:
    """[num_points // 2 + 1, bands]: from each of the points to the one after the next, 1 in between."""
    frequencies = np.linspace(0, RATE / 2, num_points // 2 + 1)[:, None]
    rising = (frequencies - points[:-2]) / (points[1:-1] - points[:-2])
    falling = (points[2:] - frequencies) / (points[2:] - points[1:-1])
    found: np.ndarray = np.maximum(0, np.minimum(rising, falling))
    return found


def _mel(hertz: float) -> float:
    """Above 1 kHz: 27 of them make it 6.4 times as high."""
    return 15 + 27 * float(np.log(hertz / 1000)) / float(np.log(6.4))


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
