"""WAV files: whole numbers of 8, 16, 24 and 32 bits, floats of 32 and 64, of any number of channels up to a bound ("Multimedia
Programming Interface and Data Specifications 1.0", WAVE_FORMAT_EXTENSIBLE, and RF64, EBU Tech 3306). Their mean over the channels
is what is heard.

Anybody may have sent them. A data chunk that is cut off, or whose length was never written, as streams have it, is read as far as
it goes. Compressed WAV files (A-law, ADPCM) are refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from nanovllm_cli.errors import UnsupportedError, UsageError

MAX_CHANNELS = 32
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BROKEN = "save or send it again"
_BLOCK = 1 << 18  # samples of all channels that are numbers at once
_MOST_CHUNKS = 1 << 10
_IN_DS64 = 0xFFFFFFFF


class Wave(NamedTuple):
    """data: frames behind each other, of `channels` samples of `width` bytes each."""

    rate: int
    channels: int
    width: int
    is_float: bool
    data: memoryview

    @property
    def num_frames(self) -> int:
        return len(self.data) // (self.channels * self.width)

    def mono(self) -> Generator[np.ndarray, None, None]:
        """float32, block by block."""
        step = max(1, _BLOCK // self.channels)
        size = self.channels * self.width
        for first in range(0, self.num_frames, step):
            block = self.data[first * size : min(first + step, self.num_frames) * size]
            values = _numbers(block, self.width, self.is_float).reshape(-1, self.channels)
            with np.errstate(over="ignore"):  # whoever takes them looks for what is infinite
                mean = values[:, 0] if self.channels == 1 else values.mean(axis=1, dtype=np.float32)
            yield mean


def read_wave(data: bytes, where: str) -> Wave:
    """Raises UsageError for what is broken, UnsupportedError for samples of other kinds. where: what an error calls it."""
    form, place, long = None, 12, 0
    for _ in range(_MOST_CHUNKS):
        name, length = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        if len(data) < place + 8:
            break
        place += 8
        if name == b"fmt ":
            form = _form(data[place : place + length], where)
        elif name == b"ds64":  # of an RF64, whose chunk of samples says nothing of its length
            long = int.from_bytes(data[place + 8 : place + 16], "little")
        elif name == b"data":
            if form is None:
                break
            length = long if long and length == _IN_DS64 else length
            if length == int.from_bytes(data[4:8], "little") == 0:  # both are written when a recording ends
                length = len(data)
            rate, channels, width, is_float = form
            return Wave(rate, channels, width, is_float, memoryview(data)[place : min(place + length, len(data))])
        place += length + length % 2
    raise UsageError(f"{where} is damaged: a WAV file without samples", _BROKEN)


def _form(chunk: bytes, where: str) -> tuple[int, int, int, bool]:
    if len(chunk) < 16:
        raise UsageError(f"{where} is damaged: a WAV file that doesn't say what its samples are", _BROKEN)
    kind, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = int.from_bytes(chunk[24:26], "little")
    width = -(-bits // 8)
    known = width in (1, 2, 3, 4) if kind == _PCM else width in (4, 8) and kind == _FLOAT
    if not known:
        plain = {_PCM: f"{bits} bits", _FLOAT: f"floats of {bits} bits"}
        what = plain.get(kind, f"the compressed kind {kind:#x}")
        raise UnsupportedError(f"{where} is a WAV file with samples of {what}", "convert it: whole numbers of 16 bits are read")
    if not 1 <= channels <= MAX_CHANNELS or align != channels * width:
        told = f"a WAV file with {channels} channels of {width} bytes in frames of {align}"
        raise UsageError(f"{where} is damaged: {told}", _BROKEN)
    return rate, channels, width, kind == _FLOAT


def _numbers(block: memoryview, width: int, is_float: bool) -> np.ndarray:
    if is_float:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.frombuffer(block, f"<f{width}").astype(np.float32)
    if width == 1:  # these alone have no sign
        return (np.frombuffer(block, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        whole = np.zeros((len(block) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(block, np.uint8).reshape(-1, 3)
        return whole.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    return np.frombuffer(block, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))
