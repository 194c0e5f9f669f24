"""Logarithmic mel spectrograms of three kinds, in bands from 0 to 8 kHz, of frames every 10 ms under a Hann window.

Whisper's (Radford et al. 2022; its `log_mel_spectrogram`): frames of 25 ms, reflected at the ends; powers, in bands as wide as
Slaney's auditory toolbox has them, of one area each; what lies more than 80 dB below the loudest is raised to that.

Those of the Universal Speech Model (Zhang et al. 2023), as Gemma 4 has them: frames of 20 ms, the first of which begins half a
frame in front of the sound, in silence, and none of which reaches beyond its end; magnitudes, in bands as wide as HTK has them,
of one height each; all of them raised by a thousandth.

torchaudio's, as Granite Speech has them: Whisper's frames, transformed as 512 points, in bands as wide as HTK has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW

_TOGETHER = 1 << 12  # frames
_FRAME, _POINTS = 320, 512  # samples of a universal one's, and what they are transformed as


def log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz, more than 200 of them -> [n // 160, bins] float32."""
    return _of_powers(samples, len(samples) // HOP, mel_bands(bins), WINDOW)


class Streamed(NamedTuple):
    """A spectrogram of a sound in parts [n, bins] float32 that follow each other, and how many samples there were, without
    silence behind them."""

    parts: list[np.ndarray]
    num_heard: int


def streamed_log_mel(blocks: Iterable[np.ndarray], bins: int, least: int) -> Streamed:
    """What `log_mel` makes of all blocks together, to the bit, without their samples ever being there at once: an hour of these
    takes 230 MB. least: samples that a shorter sound is filled up to, by silence; more than 200."""
    parts: list[np.ndarray] = []
    bands, half, step = mel_bands(bins), WINDOW // 2, (_TOGETHER - 1) * HOP + WINDOW
    held, count, heard = np.empty(0, np.float32), 0, 0
    for block, is_heard in _filled_up(blocks, least):
        held, before, count = np.concatenate([held, block]), count, count + len(block)
        heard += len(block) if is_heard else 0
        if count <= half:
            continue
        held = np.concatenate([held[half:0:-1], held]) if before <= half else held
        while len(held) >= step:
            parts.append(_logs(held[:step], bands, WINDOW))
            held = held[_TOGETHER * HOP :]
    left = count // HOP - len(parts) * _TOGETHER
    held = np.concatenate([held, held[-2 : -half - 2 : -1]])
    while left > 0:
        parts.append(_logs(held[:step], bands, WINDOW)[:left])
        held, left = held[_TOGETHER * HOP :], left - _TOGETHER
    lowest = max(float(part.max()) for part in parts) - 8
    for part in parts:
        np.maximum(part, np.float32(lowest), out=part)
        part += 4
        part /= 4
    return Streamed(parts, heard)


def _filled_up(blocks: Iterable[np.ndarray], least: int) -> Iterator[tuple[np.ndarray, bool]]:
    count = 0
    for block in blocks:
        count += len(block)
        yield block.astype(np.float32, copy=False), True
    yield np.zeros(max(0, least - count), np.float32), False


def _logs(samples: np.ndarray, bands: np.ndarray, points: int) -> np.ndarray:
    """[n] with all that frames reach over -> [frames, bins] float32, of which nothing is raised yet."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(frames * window, points, axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    logs: np.ndarray = np.log10(np.maximum(power @ bands, 1e-10)).astype(np.float32)
    return logs


def paired_log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """[n] float32 at 16 kHz, more than 200 of them -> [n // 160 + 1 or one less, an even number, bins] float32."""
    return _of_powers(samples, (len(samples) // HOP + 1) // 2 * 2, _universal_bands(bins), _POINTS)


def _of_powers(samples: np.ndarray, count: int, bands: np.ndarray, points: int) -> np.ndarray:
    """bands: of frames that are transformed as so many points."""
    padded = np.pad(samples.astype(np.float32), WINDOW // 2, mode="reflect")
    out = np.empty((count, bands.shape[1]), np.float32)
    for first in range(0, count, _TOGETHER):
        end = min(first + _TOGETHER, count)
        out[first:end] = _logs(padded[first * HOP : (end - 1) * HOP + WINDOW], bands, points)
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
