"""Logarithmic mel spectrograms, as Whisper's are (Radford et al. 2022; its `log_mel_spectrogram`): frames of 25 ms every 10 ms
under a Hann window, reflected at the ends; bands as wide as Slaney's auditory toolbox has them, from 0 to 8 kHz; what lies more
than 80 dB below the loudest is raised to that."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW

_TOGETHER = 1 << 12  # frames


def log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz, more than 200 of them -> [n // 160, bins] float32."""
    count, half = len(samples) // HOP, WINDOW // 2
    padded = np.pad(samples.astype(np.float32), half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    bands = mel_bands(bins)
    out = np.empty((count, bins), np.float32)
    for first in range(0, count, _TOGETHER):
        spectrum = np.fft.rfft(frames[first : min(first + _TOGETHER, count)] * window, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        out[first : first + _TOGETHER] = np.log10(np.maximum(power @ bands, 1e-10))
    if count:
        np.maximum(out, out.max() - 8, out=out)
    return (out + 4) / 4


@lru_cache(maxsize=4)
def mel_bands(bins: int) -> np.ndarray:
    """[201, bins]: triangles that meet in the middle of each other, of one area each."""
    points = _hertz(np.linspace(0.0, _mel(RATE / 2), bins + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (frequencies - points[:-2]) / (points[1:-1] - points[:-2])
    falling = (points[2:] - frequencies) / (points[2:] - points[1:-1])
    bands: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * 2 / (points[2:] - points[:-2])
    return bands


def _mel(hertz: float) -> float:
    """Above 1 kHz: 27 of them make it 6.4 times as high."""
    return 15 + 27 * float(np.log(hertz / 1000)) / float(np.log(6.4))


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
