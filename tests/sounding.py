"""Sounds for tests: samples at random or a tone, and files of them."""

from __future__ import annotations

import base64
import struct

import numpy as np


def tone(hertz: float, rate: int, seconds: float) -> np.ndarray:
    """[n] float64, half as loud as may be."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, num_samples).clip(-0.9, 0.9)


def wav(samples: np.ndarray, rate: int = 16_000, bits: int = 16, kind: int = 1) -> bytes:
    """[n] or [n, channels] from -1 to 1. kind 1: whole numbers, 3: floats."""
    samples = samples if samples.ndim == 2 else samples[:, None]
    if kind == 3:
        data = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = (np.round(samples * 127) + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(samples * (2 ** (bits - 1) - 1)).astype("<i4")
        data = whole.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    width = samples.shape[1] * bits // 8
    form = struct.pack("<HHIIHH", kind, samples.shape[1], rate, rate * width, width, bits)
    return riff(chunk(b"fmt ", form) + chunk(b"data", data))


def chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def riff(chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def sound_part(data: bytes) -> dict[str, object]:
    """Of a message, as OpenAI's clients write it."""
    return {"type": "input_audio", "input_audio": {"data": in_base64(data), "format": "wav"}}
