"""Compressed sounds, decoded in a process of its own for each: by `decoder.py`, and those in containers, such as videos', by
`container.py`."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Generator
from importlib.util import find_spec
from types import ModuleType
from typing import IO, NamedTuple

import numpy as np

from nanovllm_cli.children import start_decoder
from nanovllm_cli.errors import NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.sounds import container, decoder
from nanovllm_cli.sounds.source import CONTAINERS
from nanovllm_cli.sounds.wav import MAX_CHANNELS

_FORMATS = ("FLAC", "OGG", "MP3")
_NAMES = {"matroska": "MKV or WebM", "mp4": "MP4", "mpegts": "MPEG-TS"}
_BLOCK = 1 << 20
_LONGEST_LINE = 200


class Decoded(NamedTuple):
    """blocks: the mean of all channels, float32, as they come. Closing them ends the process."""

    rate: int
    channels: int
    blocks: Generator[np.ndarray, None, None]


def decoded(data: bytes, kind: str, where: str) -> Decoded:
    """kind: one of `source.SOUND`'s, for errors: behind a tag there may be another. Raises UsageError for what is damaged, here
    or while blocks are taken, UnsupportedError where there is nothing to decode it with."""
    program: ModuleType = container if kind in CONTAINERS else decoder
    if find_spec("av" if kind in CONTAINERS else "soundfile") is None:
        raise _no_library(where, kind)
    child = start_decoder(program)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is told below why
            if kind in CONTAINERS:
                child.stdin.write(json.dumps(CONTAINERS[kind]).encode() + b"\n")
            child.stdin.write(data)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        line = child.stdout.readline(_LONGEST_LINE)
        if not line:
            if child.wait() == program.NO_LIBRARY:
                raise _no_library(where, kind)
            raise _damaged(where, kind)
        try:
            told = json.loads(line)
            if isinstance(told, str):
                raise _none(told, where)
            found, rate, channels = told
            is_known = (found in _FORMATS or kind in CONTAINERS) and int(rate) > 0 and 1 <= channels <= MAX_CHANNELS
        except (ValueError, TypeError) as failure:  # a decoder that was ended while it spoke
            raise _damaged(where, kind) from failure
        if not is_known:
            raise _damaged(where, kind)
        return Decoded(rate, channels, _blocks(child, child.stdout, channels, _damaged(where, kind)))
    except BaseException:
        _end(child)
        raise


def _blocks(
    child: subprocess.Popen[bytes], out: IO[bytes], channels: int, failure: UsageError
) -> Generator[np.ndarray, None, None]:
    try:
        frame = 4 * channels
        while block := out.read(_BLOCK // frame * frame):
            whole = np.frombuffer(block, np.float32, len(block) // frame * channels).reshape(-1, channels)
            yield whole[:, 0] if channels == 1 else whole.mean(axis=1, dtype=np.float32)
        if child.wait() != 0:
            raise failure
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _no_library(where: str, kind: str) -> UnsupportedError:
    if kind in CONTAINERS:
        told = f"{where} is {_NAMES.get(kind, kind.upper())}, and PyAV is not installed"
        return UnsupportedError(told, "pip install av, which brings FFmpeg along; or: ffmpeg -i FILE -vn talk.wav")
    told = f"{where} is {kind.upper()}, and soundfile is not installed"
    return UnsupportedError(told, "pip install soundfile, or send a WAV")


def _none(why: str, where: str) -> NanovllmError:
    if why == container.NO_SOUND:
        return UsageError(f"{where} has no sound in it", "ffprobe FILE tells what it has")
    told = f"the sound of {where} is of the codec {why!r}, which is not read here"
    return UnsupportedError(told, "convert it: ffmpeg -i FILE -vn talk.wav")


def _damaged(where: str, kind: str) -> UsageError:
    told = f"{where} is damaged: it can't be decoded as {_NAMES.get(kind, kind.upper())}"
    return UsageError(told, "save or send it again")
